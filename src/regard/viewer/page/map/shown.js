// The range of what a frame shows, for the colours.

import { colourRange } from "../drawing/colours.js";

const LOWEST = 0.02; // of the bins may be fainter than the ramp's start
const LEAST_RANGE = 0.5; // powers of ten

// The selection's fields that fit the colours to the bins in a frame.
export function shownRange(frame, selection) {
  if (frame.other) return { span: spanShown(frame) };
  const values = [];
  const { level } = frame.view;
  for (const row of distinctBins(frame.rows)) {
    const seen = selection.scale === "uniform" ? (frame.seenBy(row, level) ?? 1) : 1;
    const bin = selection.scale === "uniform" && selection.plane === "mass" ? 2 ** level : 1;
    const shift = Math.log(seen / bin);
    for (const column of distinctBins(frame.columns)) {
      const value = frame.valueAt(row, column);
      if (value > -Infinity) values.push((value + shift) / Math.LN10);
    }
  }
  if (!values.length) return colourRange(selection);
  const sorted = Float64Array.from(values).sort();
  const high = Math.ceil(sorted.at(-1) * 10 - 1e-4) / 10;
  const low = Math.floor(sorted[Math.floor(LOWEST * sorted.length)] * 10) / 10;
  return { low: Math.min(low, Math.round(10 * (high - LEAST_RANGE)) / 10), high };
}

function spanShown(frame) {
  let most = 0;
  const weight = (value) => (value > -Infinity ? Math.exp(value) : 0);
  for (const row of distinctBins(frame.rows))
    for (const column of distinctBins(frame.columns)) {
      const [one, other] = [frame.valueAt(row, column), frame.otherValueAt(row, column)];
      most = Math.max(most, Math.abs(weight(one) - weight(other)));
    }
  return most > 0 ? Number(most.toPrecision(2)) : null;
}

function distinctBins(bins) {
  return [...new Set(bins)].filter((bin) => bin >= 0);
}
