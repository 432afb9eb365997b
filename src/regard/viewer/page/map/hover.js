// What the map says of the bin that the pointer is on.

import { countText, weightText, weightWords } from "../drawing/numbers.js";
import { positionOf } from "./axes.js";

// `query 5 «it» → key 2 «cat»   weight 0.6443 (3.87 × uniform)` of a pair, of several
// `queries 77,312–77,567 → keys 55,040–55,295   strongest 0.9991`.
export function wordsOfBin({ selection }, frame, row, column, texts) {
  const { level } = frame.view;
  const value = frame.valueAt(row, column);
  if (frame.other)
    return `${placeOfBin(frame, row, column, texts)}   ${differenceWords(frame, row, column)}`;
  const place = placeOfBin(frame, row, column, texts);
  if (value === undefined) return `${place}   …`;
  if (level === 0) return `${place}   ${pairWeight(value, frame.seenBy(row, 0))}`;
  if (Number.isNaN(value)) return `${place}   invisible`;
  const weight = weightText(Math.exp(value));
  return `${place}   ${selection.plane === "mass" ? "mass" : "strongest"} ${weight}`;
}

// The same with the exact strongest pair:
// `queries … → keys …   strongest: 77,507 «node» → 55,141 «,» = 0.9991   (click: go there)`.
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

function pairWeight(value, seen) {
  if (seen !== undefined || Number.isNaN(value)) return weightWords(value, seen);
  return `weight ${weightText(Math.exp(value))}`;
}

function placeOfBin(frame, row, column, texts) {
  const side = 2 ** frame.view.level;
  const { queries, keys } = frame.extent;
  if (side === 1) return `query ${namedQuery(frame, row, texts)} → key ${namedKey(column, texts)}`;
  const first = positionOf(row * side, frame.facts);
  const last = positionOf(Math.min((row + 1) * side, queries) - 1, frame.facts);
  const range = (a, b) => `${countText(a)}–${countText(b)}`;
  const across = range(column * side, Math.min((column + 1) * side, keys) - 1);
  return `queries ${range(first, last)} → keys ${across}`;
}

function namedQuery({ facts }, query, texts) {
  return named(positionOf(query, facts), query, texts?.queries);
}

function namedKey(key, texts) {
  return named(key, key, texts?.keys);
}

function named(position, index, tokens) {
  const known = tokens && index < tokens.length;
  return countText(position) + (known ? ` «\u2068${tokens.label(index, 24)}\u2069»` : "");
}

function differenceWords(frame, row, column) {
  const [one, other] = [frame.valueAt(row, column), frame.otherValueAt(row, column)];
  const name = ({ layer, head }, facts) => `L${facts.layer.number ?? layer}H${head}`;
  const words = (value) =>
    value === undefined ? "…" : Number.isNaN(value) ? "invisible" : weightText(Math.exp(value));
  const own = `${name(frame.where, frame.facts)} ${words(one)}`;
  const sides = `${own} − ${name(frame.other, frame.otherFacts)} ${words(other)}`;
  if (one === undefined || other === undefined || (Number.isNaN(one) && Number.isNaN(other)))
    return sides;
  const weight = (value) => (Number.isNaN(value) ? 0 : Math.exp(value));
  const difference = weight(one) - weight(other);
  return `${sides} = ${difference < 0 ? "−" : "+"}${weightText(Math.abs(difference))}`;
}
