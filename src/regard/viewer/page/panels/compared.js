// A line of weights beside that of the head it is compared with: their difference at counterparts.

import { counterpart } from "../data/alignment.js";
import { nameOfPlace } from "../data/selection.js";
import { colourSpan, signedColour } from "../drawing/colours.js";
import { largest, weightText } from "../drawing/numbers.js";
import { differenceOf } from "../map/cells.js";

/** @import { Context, Selection } from "../data/selection.js" */
/** @import { Floats } from "../data/source.js" */
/** @import { Line } from "./line.js" */

const SIGN = 0.6; // of the range of colours

/**
 * The other head's weights at the places of a line, and the difference: NaN where both are masked,
 * and where there is no counterpart, which `lacks`.
 * @typedef {{there: Float32Array, difference: Float32Array, lacks: (place: number) => boolean,
 *   coverage: number}} Compared
 */

/**
 * What a line is compared with; null where no difference is shown.
 * @param {Context} context
 * @param {Pick<Line, "side" | "query" | "key" | "values" | "base">} line
 * @returns {Promise<Compared | null>}
 */
export async function readCompared(context, { side, query, key, values, base }) {
  const { selection, source } = context;
  const other = selection.otherWhere;
  if (selection.compare !== "difference" || !other) return null;
  const alignment = await context.align();
  const where = { ...other, on: alignment ? selection.recording : undefined };
  /** @type {Floats} */
  const found =
    side === "to" ? await source.row({ ...where, query }) : await source.column({ ...where, key });
  const isTo = side === "to";
  const lacks = (/** @type {number} */ place) => {
    const pair = isTo ? { query, key: place } : { query: place - base, key };
    const there = counterpart(alignment, "there", pair);
    return there.query === null || there.key === null;
  };
  const difference = values.map((value, n) => {
    const isNone = Number.isNaN(value) && Number.isNaN(found.values[n]);
    return isNone || lacks(base + n) ? NaN : differenceOf(value, found.values[n]);
  });
  return { there: found.values, difference, lacks, coverage: found.coverage };
}

/**
 * The places that differ most, as far as four decimals show it.
 * @param {Compared} compared
 * @param {number} most
 * @param {number} least
 */
export function placesThatDiffer({ difference }, most, least) {
  const sizes = difference.map(Math.abs);
  return largest(sizes, most).filter((n) => sizes[n] >= least);
}

/**
 * The colour of a difference, null where there is none.
 * @param {Compared} compared
 * @param {number} n
 * @param {Selection} selection
 * @param {boolean} dark
 */
export function differenceColour({ difference }, n, selection, dark) {
  const value = difference[n];
  return Number.isNaN(value) ? null : signedColour(value, colourSpan(selection), dark);
}

/**
 * The colour that stands for more, or for less.
 * @param {number} difference
 * @param {boolean} dark
 */
export function signColour(difference, dark) {
  return `rgb(${signedColour(Math.sign(difference) * SIGN, 1, dark).join(" ")})`;
}

/**
 * `42.00 % − 11.00 %`: the weights of a place in both heads.
 * @param {Line} line
 * @param {number} place
 */
export function sidesText({ values, base, compared }, place) {
  return [values, compared?.there]
    .map((side) => side?.[place - base] ?? NaN)
    .map((log) => (Number.isNaN(log) ? "masked" : weightText(Math.exp(log))))
    .join(" − ");
}

/**
 * ` · L2H4 of after: weight 22.00 % (query 13 → key 2)`, the chosen pair in the other head, or
 * nothing.
 * @param {Context} context
 * @param {number} query
 * @param {number} key
 */
export async function otherPairWords({ about, selection, source, align }, query, key) {
  const other = selection.otherWhere;
  if (!other) return "";
  const there = counterpart(await align(), "there", { query, key });
  if (there.query === null || there.key === null) return " · no counterpart";
  const { values } = await source.row({ ...other, query: there.query });
  const log = values[there.key];
  const weight = Number.isNaN(log) ? "masked" : weightText(Math.exp(log));
  return ` · ${nameOfPlace(about, other)} of the other: ${weight}`;
}
