// The range of the values in a frame, for the colours.

import { colourRange, ENDS } from "../drawing/colours.js";

/** @import { Fields, Selection } from "../data/selection.js" */
/** @import { Frame } from "./frame.js" */

const LOWEST = 0.02; // fraction of bins that may be fainter than the ramp's start
const LEAST_RANGE = 0.5; // powers of ten
const FAINTEST = ENDS[0] + LEAST_RANGE;

/**
 * The selection's fields that fit the colours to the bins in a frame.
 * @param {Frame} frame
 * @param {Selection} selection
 * @returns {Partial<Fields>}
 */
export function shownRange(frame, selection) {
  if (frame.other || frame.where.effect) return { span: spanShown(frame) };
  /** @type {number[]} */
  const values = [];
  const { level } = frame.view;
  const uniform = selection.usedScale === "uniform";
  for (const row of distinctBins(frame.rows)) {
    const seen = uniform ? (frame.seenBy(row, level) ?? 1) : 1;
    const bin = uniform && selection.usedPlane === "mass" ? 2 ** level : 1;
    const shift = Math.log(seen / bin);
    for (const column of distinctBins(frame.columns)) {
      const value = frame.valueAt(row, column);
      if (value !== undefined && value > -Infinity)
        values.push(Math.max(FAINTEST, (value + shift) / Math.LN10));
    }
  }
  if (!values.length) return colourRange(selection);
  if (selection.usedScale === "linear") return { low: 0, high: 10 ** Math.max(...values) };
  const sorted = Float64Array.from(values).sort();
  const high = Math.ceil(sorted[sorted.length - 1] * 10 - 1e-4) / 10;
  const low = Math.floor(sorted[Math.floor(LOWEST * sorted.length)] * 10) / 10;
  return { low: Math.min(low, Math.round(10 * (high - LEAST_RANGE)) / 10), high };
}

/** @param {Frame} frame */
function spanShown(frame) {
  let most = 0;
  for (const row of distinctBins(frame.rows))
    for (const column of distinctBins(frame.columns)) {
      const shown = frame.where.effect
        ? frame.valueAt(row, column)
        : frame.differenceAt(row, column);
      if (Math.abs(shown ?? NaN) > most) most = Math.abs(shown ?? NaN);
    }
  return most > 0 ? Number(most.toPrecision(2)) : null;
}

/** @param {Int32Array} bins */
function distinctBins(bins) {
  return [...new Set(bins)].filter((bin) => bin >= 0);
}
