// The strongest links (token pairs) of a head: rings on the map, and a list to go to them.

import { headName } from "../data/source.js";
import { unlessSaid } from "../data/watch.js";
import { make } from "../drawing/dom.js";
import { countText, weightText } from "../drawing/numbers.js";
import { positionOf } from "./layout.js";

/** @import { Context, Unit } from "../data/selection.js" */
/** @import { Link, Links, Place, RecordingFacts } from "../data/source.js" */
/** @import { Texts } from "../data/tokens.js" */

/** @typedef {(query: number, key: number) => void} GoTo */

const LISTED = 8;
const REQUESTED = 256;
const LONG_TEXT = 1000; // tokens; in longer texts links between neighbours are left out
const NEAR = 0.01; // of the length
const LINKS_AGAIN_MS = 1000;
const LATE_MS = 300; // until the list of the former head makes way

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
  const element = make("details", { class: "regard-pairs", open: true }, heading, list);
  element.addEventListener("toggle", () => changed());

  const tell = (/** @type {string} */ text) => list.replaceChildren(make("li", { text }));

  /** @type {(found: Links, where: Place) => Promise<void>} */
  const show = async ({ links, coverage }, where) => {
    const facts = context.about.recordings[where.recording];
    const { kept, isLong } = notableLinks(links, facts);
    state.rings = kept;
    heading.textContent = isLong ? "Strongest distant pairs" : "Strongest pairs";
    const texts = await context.texts(where.recording);
    if (state.requested !== headName(where)) return;
    const named = { ...texts, unit: selection.usedUnit };
    list.replaceChildren(...kept.map((link) => make("li", {}, linkButton(link, facts, named, go))));
    if (!kept.length) tell("no pair above 0 %: all are masked, or have no weight");
    clearTimeout(state.late);
    await markChosen();
    changed();
    if (coverage < 1) state.timer = setTimeout(() => tried(where), LINKS_AGAIN_MS);
  };
  const request = async (/** @type {Place} */ where) => {
    const found = await source.links({ ...where, n: REQUESTED });
    if (state.requested === headName(where)) await show(found, where);
  };
  // The next update repeats a failed request.
  const tried = (/** @type {Place} */ where) =>
    request(where).catch((error) => {
      if (state.requested === headName(where)) {
        state.requested = null;
        clearTimeout(state.late);
        tell("not read");
      }
      unlessSaid(error);
    });
  const update = () => {
    const where = selection.where;
    if (state.requested === headName(where)) return;
    clearTimeout(state.timer);
    clearTimeout(state.late);
    state.requested = headName(where);
    state.rings = [];
    state.late = setTimeout(() => tell("reading …"), LATE_MS);
    state.timer = setTimeout(() => tried(where), 50);
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
  const rings = () => (element.open && !element.hidden ? state.rings : []);
  return { element, rings, update, end };
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
 * @param {Link} link
 * @param {RecordingFacts} facts
 * @param {Texts & {unit: Unit}} texts
 * @param {GoTo} go
 */
function linkButton([query, key, logWeight], facts, texts, go) {
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
    make("em", { text: weightText(Math.exp(logWeight)) }),
  );
}
