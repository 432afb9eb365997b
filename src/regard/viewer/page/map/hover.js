// The readout of the bin under the pointer.

import { isLostAt } from "../data/lost.js";
import { nameOfPlace } from "../data/selection.js";
import {
  countText,
  effectText,
  effectWords,
  noneWords,
  signedText,
  weightText,
  weightWords,
} from "../drawing/numbers.js";
import { positionOf } from "./layout.js";

/** @import { Context, Unit } from "../data/selection.js" */
/** @import { About, Link, Place } from "../data/source.js" */
/** @import { TokenText } from "../data/tokens.js" */
/** @import { AxisTexts } from "./axes.js" */
/** @import { Frame } from "./frame.js" */

/**
 * `query 5 «it» → key 2 «cat»   weight 64.43 % (3.87 × uniform)` of a pair, of a bin
 * `queries 77,312–77,567 → keys 55,040–55,295   strongest 99.91 %`.
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
  if (Number.isNaN(value)) return `${place}   ${noneWordsOf(frame, row, column)}`;
  if (frame.where.effect) return `${place}   ${level ? "largest " : ""}${effectWords(value)}`;
  if (level === 0) return `${place}   ${pairWeight(value, frame.seenBy(row, 0))}`;
  const weight = weightText(Math.exp(value));
  const strongest = frame.where.heads ? "mean of each head's strongest" : "strongest";
  return `${place}   ${selection.usedPlane === "mass" ? "share" : strongest} ${weight}`;
}

/**
 * What stands beside the pointer: `it → cat 64.43 %`, of a bin `strongest 99.91 %`.
 * @param {Context} context
 * @param {Frame} frame
 * @param {{row: number, column: number}} bin
 * @param {AxisTexts | undefined} texts
 */
export function labelOfBin({ selection }, frame, { row, column }, texts) {
  const value = shownValue(frame, row, column);
  const written = frame.where.effect ? effectText : frame.other ? signedText : weightText;
  const shown = value === undefined ? "…" : written(value);
  const isNone = frame.lacks(row, column) || Number.isNaN(value);
  const weight = isNone ? noneWordsOf(frame, row, column) : shown;
  if (frame.view.level > 0) return isNone ? weight : `${planeWords(selection, frame)} ${weight}`;
  /** @type {(tokens: TokenText | undefined, place: number) => string} */
  const name = (tokens, place) =>
    tokens && place < tokens.length
      ? `\u2068${tokens.label(place, 16, texts?.unit)}\u2069`
      : countText(place);
  return `${name(texts?.queries, row)} → ${name(texts?.keys, column)}  ${weight}`;
}

/**
 * What is said of a bin without a number.
 * @param {Frame} frame
 * @param {number} row
 * @param {number} column
 */
function noneWordsOf(frame, row, column) {
  if (frame.lacks(row, column)) return "no counterpart";
  const isLost = frame.isLost(row, column) || frame.isOtherLost(row, column);
  return frame.where.effect ? effectWords(NaN, isLost) : noneWords(isLost);
}

/**
 * The weight of a bin, its effect, or the difference of two; undefined while it is not known.
 * @param {Frame} frame
 * @param {number} row
 * @param {number} column
 */
function shownValue(frame, row, column) {
  const value = frame.valueAt(row, column);
  if (frame.where.effect) return value;
  if (frame.other) return frame.differenceAt(row, column);
  return value === undefined ? value : Math.exp(value);
}

/**
 * @param {Context["selection"]} selection
 * @param {Frame} frame
 */
function planeWords({ usedPlane: plane }, { other }) {
  if (plane === "effect") return "largest effect";
  return other ? "difference" : plane === "mass" ? "share" : "strongest";
}

/**
 * The same with the exact strongest pair:
 * `queries … → keys …   strongest: 77,507 «node» → 55,141 «,» = 99.91 %   (click: go there)`.
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
  const [query, key, number] = found;
  const { effect } = frame.where;
  const weight = effect ? effectText(number) : weightText(Math.exp(number));
  const from = namedQuery(frame, query, texts);
  const pair = `${from} → ${namedKey(key, texts)} = ${weight}   (click: go there)`;
  const isMean = frame.where.heads && !effect;
  const isNone = Number.isNaN(frame.valueAt(row, column));
  const isStrongest = context.selection.usedPlane !== "mass" && !frame.other && !isMean && !isNone;
  const place = placeOfBin(frame, row, column, texts);
  return `${isStrongest ? place : words}   ${effect ? "largest" : "strongest"}: ${pair}`;
}

/**
 * The same of a pair, with the weight beside its effect.
 * @param {Context} context
 * @param {Frame} frame
 * @param {number} query
 * @param {number} key
 * @param {AxisTexts | undefined} texts
 */
export async function wordsOfEffect(context, frame, query, key, texts) {
  const words = wordsOfBin(context, frame, query, key, texts);
  if (Number.isNaN(frame.valueAt(query, key))) return words;
  const { values } = await context.source.row({ ...frame.where, effect: undefined, query });
  return Number.isNaN(values[key]) ? words : `${words} · ${pairWeight(values[key], undefined)}`;
}

/**
 * The same of a pair of words, with the two tokens under the pointer.
 * @param {Context} context
 * @param {Frame} frame
 * @param {number} query
 * @param {number} key
 * @param {AxisTexts | undefined} texts
 */
export async function wordsOfTokens(context, frame, query, key, texts) {
  const words = wordsOfBin(context, frame, query, key, texts);
  if (!texts || frame.other) return words;
  const spans = [texts.queries.span(query, "word"), texts.keys.span(key, "word")];
  if (spans.every(([from, to]) => from === to)) return words;
  const { values, lost } = await context.source.row({ ...frame.where, unit: undefined, query });
  const pair = `${texts.queries.label(query, 24)} → ${texts.keys.label(key, 24)}`;
  const isNone = Number.isNaN(values[key]);
  const weight = isNone ? noneWords(isLostAt(lost, key)) : weightText(Math.exp(values[key]));
  return `${words}   its tokens ${pair}: ${weight}`;
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
  const from = rangeText(first, last, "query", "queries");
  const to = rangeText(column * side, Math.min((column + 1) * side, keys) - 1, "key", "keys");
  return `${from} → ${to}`;
}

/**
 * `queries 256–259`, or the one that the last bin may have.
 * @param {number} first
 * @param {number} last
 * @param {string} one
 * @param {string} several
 */
function rangeText(first, last, one, several) {
  if (first === last) return `${one} ${countText(first)}`;
  return `${several} ${countText(first)}–${countText(last)}`;
}

/**
 * @param {Frame} frame
 * @param {number} query
 * @param {AxisTexts | undefined} texts
 */
function namedQuery({ facts }, query, texts) {
  return named(positionOf(query, facts), query, texts?.queries, texts?.unit);
}

/**
 * @param {number} key
 * @param {AxisTexts | undefined} texts
 */
function namedKey(key, texts) {
  return named(key, key, texts?.keys, texts?.unit);
}

/**
 * @param {number} position
 * @param {number} index
 * @param {TokenText | undefined} tokens
 * @param {Unit | undefined} unit
 */
function named(position, index, tokens, unit) {
  if (!tokens || index >= tokens.length) return countText(position);
  const first = position - index + tokens.first(index, unit);
  return `${countText(first)} «\u2068${tokens.label(index, 24, unit)}\u2069»`;
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
  /** @type {(value: number | undefined, isLost: boolean) => string} */
  const words = (value, isLost) => {
    if (value === undefined) return "…";
    return Number.isNaN(value) ? noneWords(isLost) : weightText(Math.exp(value));
  };
  const own = `${nameOfPlace(about, frame.where)} ${words(one, frame.isLost(row, column))}`;
  const there = `${nameOfPlace(about, other)} ${words(compared, frame.isOtherLost(row, column))}`;
  const difference = frame.differenceAt(row, column) ?? NaN;
  return `${own} − ${there}${Number.isNaN(difference) ? "" : ` = ${signedText(difference)}`}`;
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
