// Finding tokens and phrases in the text.

import { make } from "../drawing/dom.js";
import { countText } from "../drawing/numbers.js";

/** @import { Context } from "../data/selection.js" */
/** @import { Hit, TokenText } from "../data/tokens.js" */

/**
 * `go(hit, hits)`: shows one hit among all; null for none.
 * @param {Context} context
 * @param {(hit: Hit | null, hits: Hit[]) => void} go
 */
export function makeSearch(context, go) {
  const input = make("input", {
    type: "search",
    placeholder: "search /",
    "aria-label": "Search the text",
    autocomplete: "off",
    spellcheck: false,
  });
  const count = make("span", { class: "regard-count" });
  const before = make("button", { type: "button", text: "‹", "aria-label": "Hit before" });
  const after = make("button", { type: "button", text: "›", "aria-label": "Next hit" });
  const element = make(
    "div",
    { class: "regard-search", role: "search" },
    input,
    count,
    before,
    after,
  );
  /** @type {{text: TokenText | null, hits: Hit[], now: number}} */
  const state = { text: null, hits: [], now: -1 };

  const show = () => {
    const { hits, now } = state;
    const found = hits.length ? `${countText(hits.length)} found` : "not found";
    const at = now >= 0 ? `${countText(now + 1)} of ${countText(hits.length)}` : found;
    count.textContent = input.value ? at : "";
    for (const button of [before, after]) button.disabled = hits.length === 0;
  };
  const find = () => {
    state.hits = state.text && input.value ? state.text.find(input.value) : [];
    state.now = -1;
    show();
    go(null, state.hits);
    if (input.value) context.say(`search «${input.value}»: ${count.textContent}`);
  };
  const move = (/** @type {-1 | 1} */ by) => {
    const { hits } = state;
    if (!hits.length) return;
    state.now = (state.now < 0 ? (by > 0 ? 0 : -1) : state.now + by) % hits.length;
    state.now = (state.now + hits.length) % hits.length;
    show();
    go(hits[state.now], hits);
  };
  const press = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter") move(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") clear();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const clear = () => {
    input.value = "";
    find();
    input.blur();
    context.say("search closed");
  };
  input.addEventListener("input", find);
  input.addEventListener("keydown", press);
  before.addEventListener("click", () => move(-1));
  after.addEventListener("click", () => move(1));
  show();

  // Searches another text from now on.
  const look = (/** @type {TokenText} */ text) => {
    if (state.text === text) return;
    state.text = text;
    find();
  };
  const focus = () => {
    input.focus();
    input.select();
  };
  return { element, look, focus, words: () => (state.now >= 0 ? (count.textContent ?? "") : "") };
}
