// Chooses several queries, whose mean is shown, or several heads of a layer.

import { isIn, partsText, toggledIn } from "./several.js";

/** @import { Selection } from "./selection.js" */

/**
 * Chooses the queries from the chosen one to another.
 * @param {Selection} selection
 * @param {number} query
 */
export function extendTo(selection, query) {
  const { queries: count } = selection.recordingFacts;
  const to = Math.max(0, Math.min(query, count - 1));
  const from = selection.query ?? to;
  const parts = [/** @type {const} */ ([Math.min(from, to), Math.max(from, to) + 1])];
  selection.set({ queries: partsText(parts), side: "to" });
}

/**
 * Moves the end of the chosen queries that lies away from the chosen one.
 * @param {Selection} selection
 * @param {number} by
 */
export function extendBy(selection, by) {
  const { query, queryParts: parts } = selection;
  if (query === null) return;
  const [first, last] = [parts[0][0], parts[parts.length - 1][1] - 1];
  extendTo(selection, (query === last ? first : last) + by);
}

/**
 * Adds a query, or those of a word, to the chosen ones, or takes it out.
 * @param {Selection} selection
 * @param {number} query
 * @param {number} [last]
 */
export function toggleQuery(selection, query, last = query) {
  const parts = toggledIn(selection.queryParts, [query, last + 1]);
  if (!parts.length) return;
  const isKept = selection.query !== null && isIn(parts, selection.query);
  const chosen = isKept ? selection.query : parts[0][0];
  selection.set({ query: chosen, queries: partsText(parts), side: "to" });
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
