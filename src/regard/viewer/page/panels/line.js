// A line of weights along a text: those of one query, or of one key.

import { isLostAt } from "../data/lost.js";
import { countIn, isIn } from "../data/several.js";
import { colourRange, weightColour } from "../drawing/colours.js";
import { countSeen } from "../drawing/numbers.js";
import { differenceColour, readCompared } from "./compared.js";

/** @import { Lost } from "../data/lost.js" */
/** @import { Context, Selection, Side, Unit } from "../data/selection.js" */
/** @import { Texts, TokenText } from "../data/tokens.js" */
/** @import { Compared } from "./compared.js" */

/**
 * A line of weights. Places count along `text`: `values` start at `base`, `chosen` is the query (or
 * key) whose weights these are, null where it is of the other text, `own`; `locked` is the other
 * token of the pair. By words each piece has its word's weight, and `singles` has it once; else
 * they are `values`. `at(place)` is ln of a weight, `seenAt(place)` its query's unmasked keys,
 * `compared` its signed numbers, where effects or a difference are shown; `lost`: where weights are
 * no numbers, `isLost(place)`. Of several queries, `count` of them, it is the mean, and
 * `isChosen(place)` tells each.
 * @typedef {Texts & {unit: Unit, side: Side, lost: Lost, isLost: (place: number) => boolean, text: TokenText, own: {text: TokenText, place: number} | null,
 *   values: Float32Array, singles: Float32Array, base: number, chosen: number | null, locked: number, coverage: number,
 *   count: number, isChosen: (place: number) => boolean, query: number, key: number, seenAt: (place: number) => number, total: number,
 *   at: (place: number) => number, compared: Compared | null}} Line
 */

/** @typedef {{back: string, ink: string}} Tint */

/**
 * The line of a selection that has a pair.
 * @param {Context} context
 * @param {{query: number, key: number}} pair
 * @returns {Promise<Line>}
 */
export async function readLine(context, { query, key }) {
  const { selection, source, texts } = context;
  const { recording, side, asked, queryParts, usedUnit: unit } = selection;
  const where = { ...selection.where, effect: undefined };
  const { keys, queries, offset } = await texts(recording);
  if (side === "to") {
    const { values, lost, coverage } = await source.row({ ...where, ...asked });
    const chosen = offset === null ? null : offset + query;
    const own = offset === null ? { text: queries, place: query } : null;
    const singles = once(values, keys, unit);
    const seen = countSeen(singles) + countLost(lost, keys, unit);
    const count = countIn(queryParts);
    const isChosen = (/** @type {number} */ n) => offset !== null && isIn(queryParts, n - offset);
    const found = {
      unit,
      side,
      text: keys,
      own,
      values,
      singles,
      base: 0,
      chosen,
      locked: key,
      lost,
    };
    const compared = await readCompared(context, { ...found, query, key, coverage });
    const rest = { query, key, keys, queries, offset, coverage, seenAt: () => seen, compared };
    return withPlaces({ ...found, ...rest, count, isChosen });
  }
  const { values, lost, coverage } = await source.column({ ...where, key });
  const counts = (await source.visible(where)).values;
  const base = offset ?? 0;
  const chosen = offset === null ? null : key;
  const own = offset === null ? { text: keys, place: key } : null;
  const text = offset === null ? queries : keys;
  const singles = once(values, queries, unit);
  const found = {
    unit,
    side,
    text,
    own,
    values,
    singles,
    base,
    chosen,
    locked: base + query,
    lost,
  };
  const seenAt = (/** @type {number} */ place) => counts[place - base];
  const compared = await readCompared(context, { ...found, query, key, coverage });
  const one = { count: 1, isChosen: (/** @type {number} */ place) => place === chosen };
  const rest = { query, key, keys, queries, offset, coverage, seenAt, compared };
  return withPlaces({ ...found, ...rest, ...one });
}

/**
 * How many tokens, or words, have weights that are no numbers.
 * @param {Lost} lost
 * @param {TokenText} text
 * @param {Unit} unit
 */
export function countLost(lost, text, unit) {
  const isOne = (/** @type {number} */ n) => unit === "token" || text.isFirst(n, unit);
  return lost?.reduce((count, is, n) => count + Number(is && isOne(n)), 0) ?? 0;
}

/**
 * The weights, but of each word only its first piece's; the others are NaN.
 * @param {Float32Array} values
 * @param {TokenText} text
 * @param {Unit} unit
 */
export function once(values, text, unit) {
  if (unit === "token") return values;
  return values.map((value, n) => (text.isFirst(n, unit) ? value : NaN));
}

/**
 * @param {Omit<Line, "total" | "at" | "isLost">} line
 * @returns {Line}
 */
function withPlaces(line) {
  let total = 0;
  for (const value of line.singles) if (value > -Infinity) total += Math.exp(value);
  const at = (/** @type {number} */ place) => line.values[place - line.base] ?? NaN;
  const isLost = (/** @type {number} */ place) => isLostAt(line.lost, place - line.base);
  return { ...line, total, at, isLost };
}

/**
 * Background and ink of a token, readable on each other, or null where it is masked.
 * @param {Line} line
 * @param {number} place
 * @param {Selection} selection
 * @param {boolean} dark
 * @returns {Tint | null}
 */
export function tintOf(line, place, selection, dark) {
  if (line.compared) return differenceTint(line.compared, place - line.base, selection, dark);
  const value = line.at(place);
  if (Number.isNaN(value)) return null;
  const shown = shownAt(line, place, selection);
  const back = weightColour(shown, colourRange(selection), dark);
  return { back: `rgb(${back.join(" ")})`, ink: inkOn(back) };
}

/**
 * @param {Compared} compared
 * @param {number} n
 * @param {Selection} selection
 * @param {boolean} dark
 * @returns {Tint | null}
 */
function differenceTint(compared, n, selection, dark) {
  const back = differenceColour(compared, n, selection, dark);
  return back && { back: `rgb(${back.join(" ")})`, ink: inkOn(back) };
}

/**
 * ln of what the scale shows of a place: its weight, or that in times of uniform.
 * @param {Line} line
 * @param {number} place
 * @param {Selection} selection
 */
export function shownAt(line, place, selection) {
  const value = line.at(place);
  return selection.usedScale === "uniform" ? value + Math.log(line.seenAt(place)) : value;
}

/**
 * Black or white, whichever has more contrast: at least 4.58 to 1.
 * @param {readonly number[]} colour
 */
export function inkOn(colour) {
  const [r, g, b] = colour.map((c) => {
    const s = c / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.1791 ? "#000" : "#fff";
}
