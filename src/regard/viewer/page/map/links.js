// The strongest links (token pairs) of a head, those of the largest effects, or those that differ most from another head: rings
// on the map, and a list to go to them.

import { headName } from "../data/source.js";
import { unlessSaid } from "../data/watch.js";
import { make } from "../drawing/dom.js";
import {
  counted,
  countText,
  effectText,
  readText,
  signedText,
  weightText,
} from "../drawing/numbers.js";
import { positionOf } from "./layout.js";

/** @import { Aligned } from "../data/alignment.js" */
/** @import { Context, Unit } from "../data/selection.js" */
/** @import { Changed, Link, Links, Place, RecordingFacts } from "../data/source.js" */
/** @import { Texts } from "../data/tokens.js" */

/** @typedef {(query: number, key: number) => void} GoTo */

/**
 * What is listed: a number for each pair, which `text` writes; `none`: what is said in place of
 * pairs, and `note` below them.
 * @typedef {{heading: string, pairs: Link[], text: (x: number) => string, none: string,
 *   note: string, isDone: boolean}} Listed
 */

const LISTED = 8;
const REQUESTED = 256;
const LONG_TEXT = 1000; // tokens; in longer texts links between neighbours are left out
const NEAR = 0.01; // of the length
const LINKS_AGAIN_MS = 1000;
const LEAST = 0.00005; // of a difference that four decimals show
const MEAN_PAIRS = 2 ** 24; // of which the server finds the strongest of a mean of heads
const LATE_MS = 300; // until the list of the former head makes way

/** @type {Listed} of several heads of a long text */
const TOO_MANY = {
  heading: "Strongest pairs",
  pairs: [],
  text: String,
  none: `of a mean of heads up to ${countText(MEAN_PAIRS)} pairs; choose one head`,
  note: "",
  isDone: true,
};

/**
 * {element, rings(), update(), end()}. `go(query, key)`: a link is chosen; `changed()`: the rings
 * have changed.
 * @param {Context} context
 * @param {{go: GoTo, changed: () => void}} does
 */
export function makeLinks(context, { go, changed }) {
  const { selection, source } = context;
  /** @type {{rings: Link[], requested: string | null, timer: number | undefined, late: number | undefined}} */
  const state = { rings: [], requested: null, timer: undefined, late: undefined };
  const heading = make("summary");
  const list = make("ol");
  const note = make("p", { class: "regard-note" });
  const element = make("details", { class: "regard-pairs", open: true }, heading, list, note);
  element.addEventListener("toggle", () => changed());

  const tell = (/** @type {string} */ text) => list.replaceChildren(make("li", { text }));

  const name = () => {
    const { where, otherWhere, compare } = selection;
    const isDifference = compare === "difference" && otherWhere;
    return headName(where) + (isDifference ? ` − ${headName(otherWhere)}` : "");
  };
  /** @type {() => Promise<Listed>} */
  const read = async () => {
    const { where, otherWhere, compare } = selection;
    if (compare === "difference" && otherWhere)
      return differing(await source.changed(where, otherWhere, LISTED), await context.align());
    const facts = context.about.recordings[where.recording];
    if (where.effect) return withEffects(await source.links({ ...where, n: LISTED }));
    if (where.heads && facts.queries * facts.tokens > MEAN_PAIRS) return TOO_MANY;
    return notable(await source.links({ ...where, n: REQUESTED }), facts, where);
  };
  const request = async (/** @type {string} */ wanted) => {
    const { recording } = selection;
    const { heading: words, pairs, text, none, note: below, isDone } = await read();
    const texts = await context.texts(recording);
    if (state.requested !== wanted) return;
    state.rings = pairs;
    heading.textContent = words;
    note.textContent = below;
    const facts = context.about.recordings[recording];
    const button = (/** @type {Link} */ pair) => linkButton(pair, text(pair[2]), facts, named, go);
    const named = { ...texts, unit: selection.usedUnit };
    list.replaceChildren(...pairs.map((pair) => make("li", {}, button(pair))));
    if (!pairs.length) tell(none);
    clearTimeout(state.late);
    await markChosen();
    changed();
    if (!isDone) state.timer = setTimeout(() => tried(wanted), LINKS_AGAIN_MS);
  };
  // The next update repeats a failed request.
  const tried = (/** @type {string} */ wanted) =>
    request(wanted).catch((error) => {
      if (state.requested === wanted) {
        state.requested = null;
        clearTimeout(state.late);
        tell("not read");
        note.textContent = "";
      }
      unlessSaid(error);
    });
  const update = () => {
    const wanted = name();
    if (state.requested === wanted) return;
    clearTimeout(state.timer);
    clearTimeout(state.late);
    state.requested = wanted;
    state.rings = [];
    state.late = setTimeout(() => tell("reading …"), LATE_MS);
    state.timer = setTimeout(() => tried(wanted), 50);
  };
  const markChosen = async () => {
    const { recording, query, key, usedUnit: unit } = selection;
    if (query === null || key === null) return;
    const texts = await context.texts(recording);
    const chosen = [texts.queries.span(query, unit)[0], texts.keys.span(key, unit)[0]];
    for (const button of list.querySelectorAll("button")) {
      const { query, key } = button.dataset;
      const is = Number(query) === chosen[0] && Number(key) === chosen[1];
      button.setAttribute("aria-current", String(is));
    }
  };
  selection.listen(() => markChosen().catch(unlessSaid));
  heading.textContent = "Strongest pairs";
  const end = () => {
    clearTimeout(state.timer);
    clearTimeout(state.late);
  };
  const rings = () => (element.open ? state.rings : []);
  return { element, rings, update, end };
}

/**
 * @param {Links} found
 * @param {RecordingFacts} facts
 * @param {Place} where
 * @returns {Listed}
 */
function notable({ links, fewest, coverage }, facts, { first }) {
  const { kept: pairs, isLong } = notableLinks(links, facts);
  const heading = isLong ? "Strongest distant pairs" : "Strongest pairs";
  const text = (/** @type {number} */ x) => weightText(Math.exp(x));
  const none = "no pair above 0 %: all are masked, have no weight, or are not numbers (NaN)";
  const isWithout = links.length > 0 && !first && links.every(([, key]) => key > 0);
  const parts = [
    fewest ? `Of queries that see at least ${counted(fewest, "key")}.` : "",
    isWithout ? "Pairs with the first token are left out." : "",
  ];
  const note = parts.filter(Boolean).join(" ");
  return { heading, pairs, text, none, note, isDone: coverage === 1 };
}

/**
 * @param {Links} found
 * @returns {Listed}
 */
function withEffects({ links: pairs, coverage }) {
  const none = "no pair has an effect here";
  const part = coverage < 1 ? ` · ${readText(coverage)} of rows read` : "";
  const heading = `Strongest effects${part}`;
  return { heading, pairs, text: effectText, none, note: "", isDone: coverage === 1 };
}

/**
 * @param {Changed} found
 * @param {Aligned} alignment
 * @returns {Listed}
 */
function differing({ links, lost, coverage, settled }, alignment) {
  const pairs = links.filter(([, , difference]) => Math.abs(difference) >= LEAST);
  const part = coverage < 1 ? ` · ${readText(coverage)} of queries` : "";
  const heading = `Largest differences${part}`;
  const hasPairs = !alignment || (alignment.queries.isAny && alignment.keys.isAny);
  const none = hasPairs ? `no ${lost ? "other " : ""}difference` : "no pair has a counterpart";
  const queries = counted(lost, "query", "queries");
  const note = lost ? `Weights of ${queries} are not numbers (NaN).` : "";
  return { heading, pairs, text: signedText, none, note, isDone: coverage === 1 || settled };
}

/**
 * The links to list: in long texts those between distant tokens, if there are enough of them.
 * @param {Link[]} links
 * @param {Pick<RecordingFacts, "tokens" | "itself" | "start">} facts
 */
export function notableLinks(links, { tokens, itself, start }) {
  if (!itself || tokens < LONG_TEXT) return { kept: links.slice(0, LISTED), isLong: false };
  const far = links.filter(([query, key]) => Math.abs(query + start - key) >= NEAR * tokens);
  const isLong = far.length >= Math.min(4, links.length);
  return { kept: (isLong ? far : links).slice(0, LISTED), isLong };
}

/**
 * @param {Link} pair
 * @param {string} words its number
 * @param {RecordingFacts} facts
 * @param {Texts & {unit: Unit}} texts
 * @param {GoTo} go
 */
function linkButton([query, key], words, facts, texts, go) {
  /** @type {(position: number, label: string) => HTMLElement[]} */
  const named = (position, label) => [
    make("b", { text: countText(position) }),
    make("bdi", { text: label }),
  ];
  return make(
    "button",
    { type: "button", "data-query": query, "data-key": key, onclick: () => go(query, key) },
    make(
      "span",
      {},
      ...named(positionOf(query, facts), texts.queries.label(query, 12, texts.unit)),
    ),
    make("i", { text: "→", "aria-hidden": "true" }),
    make("span", {}, ...named(key, texts.keys.label(key, 12, texts.unit))),
    make("em", { text: words }),
  );
}
