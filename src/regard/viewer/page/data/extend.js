// Chooses several queries, whose mean is shown, or several heads of a layer.

import { isIn, partsText, toggledIn } from "./several.js";

/** @import { Context, Selection } from "./selection.js" */
/** @import { Part } from "./several.js" */
/** @import { Hit } from "./tokens.js" */

/**
 * Chooses the queries from the chosen one to another, of words all pieces.
 * @param {Context} context
 * @param {number} query
 */
export async function extendTo({ selection, texts }, query) {
  const { queries } = await texts(selection.recording);
  const to = Math.max(0, Math.min(query, queries.length - 1));
  const spans = [selection.query ?? to, to].map((at) => queries.span(at, selection.usedUnit));
  const [first, last] = [Math.min(...spans.flat()), Math.max(...spans.flat())];
  selection.set({ queries: partsText([[first, last + 1]]), side: "to" });
}

/**
 * Moves the end of the chosen queries that lies away from the chosen one, up (−1) or down (1).
 * @param {Context} context
 * @param {number} by
 */
export async function extendBy(context, by) {
  const { selection, texts } = context;
  const { query, queryParts: parts, usedUnit: unit } = selection;
  if (query === null) return;
  const { queries } = await texts(selection.recording);
  const [first, last] = [parts[0][0], parts[parts.length - 1][1] - 1];
  const end = queries.span(query, unit)[1] >= last ? first : last;
  const [from, to] = queries.span(end, unit);
  await extendTo(context, by < 0 ? from - 1 : to + 1);
}

/**
 * Adds a query, of a word all pieces, to the chosen ones, or takes it out.
 * @param {Context} context
 * @param {number} query
 */
export async function toggleQuery({ selection, texts }, query) {
  const { queries } = await texts(selection.recording);
  const [first, last] = queries.span(query, selection.usedUnit);
  const own = queries.span(selection.query ?? query, selection.usedUnit);
  const before = selection.queries ? selection.queryParts : [partOf(own)];
  const parts = toggledIn(before, [first, last + 1]);
  if (!parts.length) return;
  const isKept = selection.query !== null && isIn(parts, selection.query);
  const chosen = isKept ? selection.query : parts[0][0];
  selection.set({ query: chosen, queries: partsText(parts), side: "to" });
}

/**
 * @param {Hit} span
 * @returns {Part}
 */
function partOf([first, last]) {
  return [first, last + 1];
}

/**
 * Adds a head of the layer to the chosen ones, or takes it out.
 * @param {Selection} selection
 * @param {number} head
 */
export function toggleHead(selection, head) {
  const { headPlaces: before } = selection;
  const places = before.includes(head)
    ? before.filter((place) => place !== head)
    : [...before, head].sort((a, b) => a - b);
  if (places.length) chooseHeads(selection, places);
}

/**
 * @param {Selection} selection
 * @param {number[]} places
 */
export function chooseHeads(selection, places) {
  const { head_numbers: numbers } = selection.layerFacts;
  const head = places.includes(selection.head) ? selection.head : places[0];
  selection.set({ head, heads: places.map((place) => numbers[place]).join() });
}

/**
 * `mean of 3 heads of layer 2: 2, 4, 7`, or nothing where one is chosen.
 * @param {Selection} selection
 */
export function headsWords({ headPlaces: places, layerFacts }) {
  if (places.length < 2) return "";
  const numbers = places.map((place) => layerFacts.head_numbers[place]);
  return `mean of ${places.length} heads of layer ${layerFacts.number}: ${numbers.join(", ")}`;
}
