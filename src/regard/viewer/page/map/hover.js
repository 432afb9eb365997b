// The readout of the bin under the pointer.

import { nameOfPlace } from "../data/selection.js";
import { countText, signedText, weightText, weightWords } from "../drawing/numbers.js";
import { differenceOf } from "./cells.js";
import { positionOf } from "./layout.js";

/** @import { Context } from "../data/selection.js" */
/** @import { About, Link, Place } from "../data/source.js" */
/** @import { TokenText } from "../data/tokens.js" */
/** @import { AxisTexts } from "./axes.js" */
/** @import { Frame } from "./frame.js" */

/**
 * `query 5 «it» → key 2 «cat»   weight 0.6443 (3.87 × uniform)` of a pair, of a bin
 * `queries 77,312–77,567 → keys 55,040–55,295   strongest 0.9991`.
 * @param {Context} context
 * @param {Frame} frame
 * @param {number} row
 * @param {number} column
 * @param {AxisTexts | undefined} texts
 */
export function wordsOfBin({ about, selection }, frame, row, column, texts) {
  const { level } = frame.view;
  const value = frame.valueAt(row, column);
  const place = placeOfBin(frame, row, column, texts);
  if (frame.lacks(row, column)) return `${place}   no counterpart`;
  if (frame.other) {
    const words = differenceWords(about, frame, frame.other, row, column);
    return `${place}   ${words}${counterpartWords(frame, row, column)}`;
  }
  if (value === undefined) return `${place}   …`;
  if (level === 0) return `${place}   ${pairWeight(value, frame.seenBy(row, 0))}`;
  if (Number.isNaN(value)) return `${place}   masked`;
  const weight = weightText(Math.exp(value));
  return `${place}   ${selection.plane === "mass" ? "mass" : "strongest"} ${weight}`;
}

/**
 * The same with the exact strongest pair:
 * `queries … → keys …   strongest: 77,507 «node» → 55,141 «,» = 0.9991   (click: go there)`.
 * @param {Context} context
 * @param {Frame} frame
 * @param {number} row
 * @param {number} column
 * @param {AxisTexts | undefined} texts
 * @param {Link | null} found
 */
export function exactWordsOfBin(context, frame, row, column, texts, found) {
  const words = wordsOfBin(context, frame, row, column, texts);
  if (!found) return words;
  const [query, key, logWeight] = found;
  const weight = weightText(Math.exp(logWeight));
  const from = namedQuery(frame, query, texts);
  const pair = `${from} → ${namedKey(key, texts)} = ${weight}   (click: go there)`;
  const isStrongest = context.selection.plane === "max" && !frame.other;
  const place = placeOfBin(frame, row, column, texts);
  return `${isStrongest ? place : words}   strongest: ${pair}`;
}

/**
 * @param {number} value
 * @param {number | undefined} seen
 */
function pairWeight(value, seen) {
  if (seen !== undefined || Number.isNaN(value)) return weightWords(value, seen ?? NaN);
  return `weight ${weightText(Math.exp(value))}`;
}

/**
 * @param {Frame} frame
 * @param {number} row
 * @param {number} column
 * @param {AxisTexts | undefined} texts
 */
function placeOfBin(frame, row, column, texts) {
  const side = 2 ** frame.view.level;
  const { queries, keys } = frame.extent;
  if (side === 1) return `query ${namedQuery(frame, row, texts)} → key ${namedKey(column, texts)}`;
  const first = positionOf(row * side, frame.facts);
  const last = positionOf(Math.min((row + 1) * side, queries) - 1, frame.facts);
  /** @type {(a: number, b: number) => string} */
  const range = (a, b) => `${countText(a)}–${countText(b)}`;
  const across = range(column * side, Math.min((column + 1) * side, keys) - 1);
  return `queries ${range(first, last)} → keys ${across}`;
}

/**
 * @param {Frame} frame
 * @param {number} query
 * @param {AxisTexts | undefined} texts
 */
function namedQuery({ facts }, query, texts) {
  return named(positionOf(query, facts), query, texts?.queries);
}

/**
 * @param {number} key
 * @param {AxisTexts | undefined} texts
 */
function namedKey(key, texts) {
  return named(key, key, texts?.keys);
}

/**
 * @param {number} position
 * @param {number} index
 * @param {TokenText | undefined} tokens
 */
function named(position, index, tokens) {
  const known = tokens && index < tokens.length;
  return countText(position) + (known ? ` «\u2068${tokens.label(index, 24)}\u2069»` : "");
}

/**
 * @param {About} about
 * @param {Frame} frame
 * @param {Place} other
 * @param {number} row
 * @param {number} column
 */
function differenceWords(about, frame, other, row, column) {
  const [one, compared] = [frame.valueAt(row, column), frame.otherValueAt(row, column)];
  const words = (/** @type {number | undefined} */ value) =>
    value === undefined ? "…" : Number.isNaN(value) ? "masked" : weightText(Math.exp(value));
  const own = `${nameOfPlace(about, frame.where)} ${words(one)}`;
  const sides = `${own} − ${nameOfPlace(about, other)} ${words(compared)}`;
  if (one === undefined || compared === undefined) return sides;
  if (Number.isNaN(one) && Number.isNaN(compared)) return sides;
  const difference = differenceOf(one, compared);
  return `${sides} = ${signedText(difference)}`;
}

/**
 * `   (there: query 14 → key 2)` of a pair whose counterpart has other positions.
 * @param {Frame} frame
 * @param {number} query
 * @param {number} key
 */
function counterpartWords({ alignment, otherFacts, view }, query, key) {
  if (!alignment || !otherFacts || view.level > 0) return "";
  const [q, k] = [alignment.queries.there[query], alignment.keys.there[key]];
  if (q === query && k === key) return "";
  return `   (there: query ${countText(positionOf(q, otherFacts))} → key ${countText(k)})`;
}
