// Signed numbers along a line of weights: their effects, or how they differ from those of the head
// that it is compared with, at counterparts.

import { counterpart } from "../data/alignment.js";
import { isLostAt } from "../data/lost.js";
import { nameOfPlace } from "../data/selection.js";
import { signedColour, signedRange } from "../drawing/colours.js";
import {
  effectText,
  effectWords,
  largestInSize,
  noneWords,
  signedText,
  weightText,
} from "../drawing/numbers.js";
import { differenceAt } from "../map/cells.js";

/** @import { Context, Selection } from "../data/selection.js" */
/** @import { EffectKind, Floats } from "../data/source.js" */
/** @import { Line } from "./line.js" */

const SIGN = 0.6; // of the range of colours

/**
 * Signed numbers at the places of a line, which `text` writes: NaN where they are masked, where they
 * are no numbers, `lost` of them, and where there is no counterpart, which `lacks`. Those below `least` are not listed. `beside(n)` is what
 * stands beside a number, and `title` says what that is. `effect`: their kind, or null of a
 * difference from the weights `there`.
 * @typedef {{numbers: Float32Array, text: (x: number) => string, least: number,
 *   beside: (n: number) => string, title: string, effect: EffectKind | null,
 *   lacks: (place: number) => boolean, lost: number, coverage: number}} Compared
 */

const LEAST = 0.00005; // of a difference: shown as 0.01 %
const LEAST_EFFECT = 0.001; // of the largest

/**
 * The signed numbers of a line; null where weights are shown.
 * @param {Context} context
 * @param {Pick<Line, "side" | "query" | "key" | "values" | "lost" | "base"> & {coverage: number}} line
 * @returns {Promise<Compared | null>}
 */
export async function readCompared(context, line) {
  const { side, query, key, values, lost, base, coverage } = line;
  const { selection, source } = context;
  if (selection.effect) return readEffects(context, { side, key, values, lost });
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
  const sides = [{ values, lost }, found];
  // NaN in one alone may be a row that was not read there.
  const isWhole = Math.min(coverage, found.coverage) === 1;
  const isOpen = (/** @type {number} */ n) =>
    !isWhole && sides.some((side) => Number.isNaN(side.values[n]));
  const numbers = values.map((_, n) => {
    return lacks(base + n) || isOpen(n) ? NaN : differenceAt(sides[0], sides[1], n);
  });
  const isLost = (/** @type {number} */ n) => sides.some((side) => isLostAt(side.lost, n));
  const count = values.reduce((sum, _, n) => sum + Number(isLost(n) && !lacks(base + n)), 0);
  const beside = (/** @type {number} */ n) =>
    sides.map((side) => loggedText(side.values[n], isLostAt(side.lost, n))).join(" − ");
  const title = "this head − the other";
  const said = { text: signedText, least: LEAST, beside, title, effect: null };
  return { numbers, ...said, lacks, lost: count, coverage: Math.min(coverage, found.coverage) };
}

/**
 * A weight by its logarithm, or what is said of NaN.
 * @param {number} log
 * @param {boolean} isLost
 */
function loggedText(log, isLost) {
  return Number.isNaN(log) ? noneWords(isLost) : weightText(Math.exp(log));
}

/**
 * The effects at the places of a line, beside their weights.
 * @param {Context} context
 * @param {Pick<Line, "side" | "key" | "values" | "lost">} line
 * @returns {Promise<Compared>}
 */
async function readEffects({ selection, source }, { side, key, values, lost: none }) {
  const { where, asked, effect = null } = selection;
  /** @type {Floats} */
  const {
    values: numbers,
    lost,
    coverage,
  } = side === "to"
    ? await source.row({ ...where, ...asked })
    : await source.column({ ...where, key });
  const [first] = largestInSize(numbers, 1);
  const least = first === undefined ? 0 : LEAST_EFFECT * Math.abs(numbers[first]);
  const beside = (/** @type {number} */ n) => loggedText(values[n], isLostAt(none, n));
  const said = { text: effectText, least, beside, title: "weight", effect };
  const count = lost?.reduce((sum, is) => sum + is, 0) ?? 0;
  return { numbers, ...said, lacks: () => false, lost: count, coverage };
}

/**
 * The places of the largest numbers, as far as they are listed.
 * @param {Compared} compared
 * @param {number} most
 */
export function placesThatDiffer({ numbers, least }, most) {
  return largestInSize(numbers, most).filter((n) => Math.abs(numbers[n]) >= least);
}

/**
 * The colour of a number, null where there is none.
 * @param {Compared} compared
 * @param {number} n
 * @param {Selection} selection
 * @param {boolean} dark
 */
export function differenceColour({ numbers }, n, selection, dark) {
  const value = numbers[n];
  return Number.isNaN(value) ? null : signedColour(value, signedRange(selection), dark);
}

/**
 * The colour that stands for more, or for less.
 * @param {number} difference
 * @param {boolean} dark
 */
export function signColour(difference, dark) {
  const range = { span: 1, decades: 0 };
  return `rgb(${signedColour(Math.sign(difference) * SIGN, range, dark).join(" ")})`;
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
  const { values, lost } = await source.row({ ...other, query: there.query });
  const [number, isLost] = [values[there.key], isLostAt(lost, there.key)];
  const words = other.effect ? effectWords(number, isLost) : loggedText(number, isLost);
  return ` · ${nameOfPlace(about, other)} of the other: ${words}`;
}
