// The tokens that the model expects after the chosen query, the likeliest first.

import { cleanToken } from "../data/tokens.js";
import { unlessSaid } from "../data/watch.js";
import { make } from "../drawing/dom.js";
import { countText, weightText } from "../drawing/numbers.js";

/** @import { Context } from "../data/selection.js" */

/**
 * Its data-shown names the query that it shows, `query 5`.
 * @param {Context} context
 */
export function makeNext({ selection, source, texts, ended }) {
  const title = make("h2", { text: "Next token" });
  const bars = make("ol", { class: "regard-next-bars" });
  const label = { class: "regard-next", "aria-label": "Next token" };
  const element = make("section", label, title, bars);
  let run = 0;
  const show = async (/** @type {number} */ own) => {
    const { query, recording } = selection;
    element.hidden = recording !== 0;
    if (query === null || element.hidden) return;
    const [{ next }, { queries, offset }] = await Promise.all([source.next(query), texts(0)]);
    if (own !== run || ended.aborted) return;
    const place = countText((offset ?? 0) + query);
    title.textContent = `Next token · after ${place} “${queries.label(query, 18)}”`;
    bars.replaceChildren(...next.map(([token, share]) => bar(token, share, next[0][1])));
    element.dataset.shown = `query ${query}`;
  };
  // Nothing of the former query stays where its own could not be read.
  const forget = () => {
    title.textContent = "Next token";
    bars.replaceChildren(make("li", { text: "not read" }));
    delete element.dataset.shown;
  };
  const read = () => {
    const own = ++run;
    show(own).catch((error) => {
      if (own === run) forget();
      unlessSaid(error);
    });
  };
  selection.listen((changed) => {
    if (changed.has("query") || changed.has("recording")) read();
  });
  read();
  return element;
}

/**
 * @param {string} token
 * @param {number} share
 * @param {number} most
 */
function bar(token, share, most) {
  const fill = make("span", { class: "regard-bar" });
  fill.style.setProperty("--part", String(share / most));
  const text = make("span", { class: "regard-bar-token", text: spelled(token), dir: "auto" });
  const number = make("span", { class: "regard-next-share", text: weightText(share) });
  return make("li", {}, text, fill, number);
}

/**
 * A token with the spaces that begin or end it: they tell whether it begins a word.
 * @param {string} token
 */
function spelled(token) {
  const clean = cleanToken(token).replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  return clean.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length)) || "∅";
}
