// The help dialog: keys, pointer, and the page's words.

import { make } from "../drawing/dom.js";

/** @type {[keys: string, does: string][]} as they are written */
const KEY_LIST = [
  ["← ↑ → ↓", "move the chosen pair: query down, key across; Shift ← → by ten keys"],
  ["Page ↑ ↓", "move the query by ten"],
  ["Shift ↑ ↓", "choose several queries: their mean is in the text"],
  ["+ −", "zoom the map"],
  ["0", "fit the whole map"],
  ["Home End", "first and last key of the row, where the map has the focus"],
  ["Enter", "go to the strongest pair in the cell"],
  ["v", "Map, Lines or Steps"],
  ["m", "cells of several weights: the strongest, or their share; or effects"],
  ["e", "kind of effect: knockout, contribution, relevance, gradient, change"],
  ["s", "scale: linear, logarithmic or × uniform"],
  ["w", "words, or the tokens that they are made of"],
  ["h", "hide the first token: the others share its weight"],
  ["n", "sums of rows and columns beside the map"],
  ["[ ]", "previous, next head"],
  ["{ }", "previous, next layer"],
  ["t", "text: attends to or attended by"],
  ["/", "search the text; Enter next, Shift+Enter previous"],
  ["p", "this pair in every head"],
  ["o", "order of the heads"],
  ["c", "compare with another head"],
  ["?", "this list"],
  ["Esc", "close, or leave the search"],
];
/** @type {[keys: string, does: string][]} */
const MOUSE_LIST = [
  ["wheel, pinch", "zoom the map where the pointer is"],
  ["drag", "move the map"],
  ["click on an axis", "choose the query, or the key"],
  ["Shift, Ctrl and click", "several queries, on the axis, in the text, in Lines"],
  ["Ctrl and click a head", "several heads of the layer: the map shows their mean"],
  ["click in the text", "choose the other token of the pair; a double click starts from it"],
];
/** @type {[word: string, means: string][]} in the field's terms */
const WORD_LIST = [
  ["map", "attention map: a heatmap of a head's weights"],
  ["pair", "a query and a key, with the weight between them"],
  ["share", "the sum of the weights on the keys of a cell, mean of its queries"],
  ["effect", "what a pair does to the number that was explained, as the recording keeps it"],
  ["masked", "grey: the query may not attend to the key"],
  ["not a number", "grey too: a weight that is NaN, since a score is NaN or infinite"],
  ["× uniform", "the weight ÷ that of equal weights over all unmasked keys"],
  ["first token", "often the attention sink: it takes weight that is needed nowhere else"],
];

export function makeHelp() {
  const close = make("button", { type: "button", text: "Close", class: "regard-button" });
  const element = make(
    "dialog",
    { class: "regard-help", "aria-label": "Keys" },
    make("h2", { text: "Keys" }),
    listed(KEY_LIST, "kbd"),
    make("h2", { text: "Pointer" }),
    listed(MOUSE_LIST, "span"),
    make("h2", { text: "Words" }),
    listed(WORD_LIST, "span"),
    close,
  );
  close.addEventListener("click", () => element.close());
  element.addEventListener("click", (event) => {
    if (event.target === element) element.close();
  });
  const open = () => {
    if (element.open) return;
    element.showModal();
    element.scrollTop = 0; // the focus is on what closes it, at the end
  };
  return { element, open };
}

/**
 * @param {[keys: string, does: string][]} list
 * @param {"kbd" | "span"} tag
 */
function listed(list, tag) {
  const rows = list.map(([keys, does]) => [
    make("dt", {}, make(tag, { text: keys })),
    make("dd", { text: does }),
  ]);
  return make("dl", {}, ...rows.flat());
}
