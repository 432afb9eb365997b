// Keyboard shortcuts, wherever the focus is, unless something is being typed.

import { extendBy } from "../data/extend.js";
import { KIND_NAMES } from "../data/kinds.js";
import { unlessSaid } from "../data/watch.js";

/** @import { Context, Fields, Plane, Selection, View } from "../data/selection.js" */
/** @import { Texts } from "../data/tokens.js" */
/** @import { Scale } from "../drawing/colours.js" */
/** @import { HeadMapView } from "../map/map.js" */

/**
 * The parts that keys act on.
 * @typedef {{map: HeadMapView, text: {search: () => void},
 *   heads: {togglePair: () => void, nextOrder: () => void}, compare: {toggle: () => void},
 *   help: {open: () => void}, showPanel: (name: "heads" | "text") => void}} KeyParts
 */

/** @type {{[key: string]: [across: number, down: number] | undefined}} */
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
/** @type {Record<View, View>} */
const NEXT_VIEW = { map: "lines", lines: "steps", steps: "map" };
/** @type {Scale[]} */
const SCALES = ["linear", "log", "uniform"];
/** @type {Plane[]} */
const PLANES = ["max", "mass", "effect"];
const TYPED = "input:not([type=checkbox]), select, textarea, [contenteditable]";
const PRESSED = "button, a, summary";

/**
 * Listens until `signal` ends it.
 * @param {Context} context
 * @param {KeyParts} parts
 * @param {Document | HTMLElement} target
 * @param {AbortSignal} signal
 */
export function listenToKeys(context, parts, target, signal) {
  const { selection, root } = context;
  const down = (/** @type {KeyboardEvent} */ event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = event.composedPath()[0];
    if (at instanceof Element && (at.closest(TYPED) || at.closest("dialog"))) return;
    const presses = at instanceof Element && at.closest(PRESSED);
    if (event.key === "Enter" && presses) return;
    if (acts(event, context, parts)) event.preventDefault();
  };
  // Before any panel hears of the key, and until all that it does has begun.
  const pressed = (/** @type {KeyboardEvent} */ event) => {
    selection.repeats = event.repeat;
    if (!event.repeat) return;
    setTimeout(() => {
      selection.repeats = false;
    });
  };
  target.addEventListener("keydown", (event) => pressed(/** @type {KeyboardEvent} */ (event)), {
    capture: true,
    signal,
  });
  target.addEventListener("keydown", (event) => down(/** @type {KeyboardEvent} */ (event)), {
    signal,
  });
  if (target === root && !root.hasAttribute("tabindex")) root.tabIndex = -1;
}

/**
 * Runs a key's action; false where it has none.
 * @param {KeyboardEvent} event
 * @param {Context} context
 * @param {KeyParts} parts
 */
function acts(event, context, parts) {
  const arrow = ARROWS[event.key];
  if (arrow) {
    const [across, down] = arrow;
    if (event.shiftKey && down) extendBy(context, down).catch(unlessSaid);
    else moveBy(context, parts.map, event.shiftKey ? 10 * across : across, down);
    return true;
  }
  const act = actions(context, parts)[event.key];
  act?.();
  return act !== undefined;
}

/**
 * @param {Context} context
 * @param {HeadMapView} map
 * @param {number} across
 * @param {number} down
 */
function moveBy({ selection, texts }, map, across, down) {
  if (selection.view === "map") return map.move(across, down);
  const { recording, usedUnit: unit } = selection;
  const step = !selection.repeats;
  const move = (/** @type {Texts} */ { queries, keys }) => {
    const query = queries.moved(selection.query ?? 0, down, unit);
    selection.set({ query, key: keys.moved(selection.key ?? 0, across, unit) }, { step });
  };
  texts(recording).then(move).catch(unlessSaid);
}

/**
 * @param {Context} context
 * @param {KeyParts} parts
 * @returns {{[key: string]: (() => void) | undefined}}
 */
function actions(context, { map, text, heads, compare, help, showPanel }) {
  const { selection } = context;
  const set = (/** @type {Partial<Fields>} */ fields) => selection.set(fields);
  const layer = (/** @type {number} */ by) => () =>
    set({ layer: Math.max(0, selection.layer + by) });
  const head = (/** @type {number} */ by) => () => set({ head: Math.max(0, selection.head + by) });
  const onMap = (/** @type {() => void} */ act) => (selection.view === "map" ? act : undefined);
  const ofWeights = (/** @type {() => void} */ act) => (selection.effect ? undefined : act);
  const turnUnit = () => set({ unit: selection.usedUnit === "word" ? "token" : "word" });
  /** @type {(name: "heads" | "text", act: () => void) => () => void} */
  const inPanel = (name, act) => () => {
    showPanel(name);
    act();
  };
  return {
    "+": onMap(() => map.zoomBy(2)),
    "=": onMap(() => map.zoomBy(2)),
    "-": onMap(() => map.zoomBy(0.5)),
    0: onMap(() => map.fit()),
    Enter: onMap(() => map.enter()),
    m: () => set({ plane: nextPlane(selection) }),
    e: selection.effect ? () => set({ kind: nextOf(KIND_NAMES, selection.kind) }) : undefined,
    s: () => set({ scale: nextScale(selection) }),
    h: ofWeights(() => set({ first: selection.first ? "" : "hidden" })),
    n: ofWeights(() => set({ sums: selection.sums ? "" : "shown" })),
    w: selection.view === "steps" ? undefined : ofWeights(turnUnit),
    v: () => set({ view: NEXT_VIEW[selection.view] }),
    t: inPanel("text", () => set({ side: selection.side === "to" ? "by" : "to" })),
    PageUp: () => moveBy(context, map, 0, -10),
    PageDown: () => moveBy(context, map, 0, 10),
    "[": head(-1),
    "]": head(1),
    "{": layer(-1),
    "}": layer(1),
    "/": inPanel("text", () => text.search()),
    p: inPanel("heads", () => heads.togglePair()),
    o: inPanel("heads", () => heads.nextOrder()),
    c: () => compare.toggle(),
    "?": () => help.open(),
  };
}

/**
 * The choice after this one, and after the last the first.
 * @template Choice
 * @param {readonly Choice[]} choices
 * @param {Choice} now
 */
function nextOf(choices, now) {
  return choices[(choices.indexOf(now) + 1) % choices.length];
}

/** @param {Selection} selection */
function nextPlane({ usedPlane, view, hasEffects }) {
  return nextOf(view === "map" && hasEffects ? PLANES : PLANES.slice(0, 2), usedPlane);
}

/** @param {Selection} selection */
function nextScale({ usedScale, effect }) {
  return nextOf(effect ? SCALES.slice(0, 2) : SCALES, usedScale);
}
