// The head to compare with: of any layer, of any recording.

import { counterpart } from "../data/alignment.js";
import { labelOfRecording, nameOfPlace, nearestPlace, placeOf } from "../data/selection.js";
import { unlessSaid } from "../data/watch.js";
import { make, makePicker } from "../drawing/dom.js";

/** @import { Compare, Context, Fields, Selection } from "../data/selection.js" */
/** @import { About, Place } from "../data/source.js" */

/** @type {Record<Compare, string>} */
const WAYS = { "": "Compare…", side: "side by side", difference: "difference" };

/** @type {(keyof Fields)[]} */
const FOLLOWED = ["compare", "other", "recording", "layer", "head"];

/**
 * {element, other, toggle()}: `other` chooses the second head; toggle cycles through one head, two
 * side by side, and their difference.
 * @param {Context} context
 */
export function makeCompare(context) {
  const { about, selection } = context;
  const way = makePicker("compare", (compare) => {
    compareBy(selection, /** @type {Compare} */ (compare));
  });
  way.element.classList.add("regard-unnamed");
  way.fill(Object.entries(WAYS));
  /** @type {(field: keyof Place) => (value: string) => void} */
  const pick = (field) => (value) => {
    const chosen = { ...otherOf(selection), [field]: Number(value) };
    selection.set({ other: otherText(about, mended(about, chosen)) });
  };
  const recording = makePicker("of", pick("recording"));
  const layer = makePicker("with layer", pick("layer"));
  const head = makePicker("head", pick("head"));
  const swap = make("button", { type: "button", class: "regard-button", text: "⇄" });
  swap.title = "Swap both heads";
  swap.setAttribute("aria-label", "Swap both heads");
  swap.addEventListener("click", () => swapHeads(context).catch(unlessSaid));
  recording.element.classList.add("regard-recording");
  recording.fill(about.recordings.map((_, n) => [n, labelOfRecording(about, n)]));
  const other = make(
    "div",
    { class: "regard-compare-with" },
    layer.element,
    head.element,
    about.recordings.length > 1 ? recording.element : null,
    swap,
  );
  const show = () => {
    way.show(selection.compare);
    other.hidden = !selection.compare;
    const place = otherOf(selection);
    const { layers } = about.recordings[place.recording];
    layer.fill(layers.map(({ number }, n) => [n, number]));
    head.fill(layers[place.layer].head_numbers.map((number, n) => [n, number]));
    recording.show(place.recording);
    layer.show(place.layer);
    head.show(place.head);
  };
  selection.listen((changed) => {
    if (FOLLOWED.some((name) => changed.has(name))) show();
  });
  show();
  // An address may say to compare, and not with what, or with a head that is not there.
  const choose = () => {
    if (selection.compare && !selection.otherWhere)
      compareBy(selection, selection.compare, { step: false });
  };
  selection.listen(choose);
  choose();
  const toggle = () => {
    const ways = /** @type {Compare[]} */ (Object.keys(WAYS));
    compareBy(selection, ways[(ways.indexOf(selection.compare) + 1) % ways.length]);
  };
  return { element: way.element, other, toggle };
}

/**
 * @param {Selection} selection
 * @param {Compare} compare
 * @param {{step?: boolean}} [how]
 */
function compareBy(selection, compare, how) {
  selection.set({ compare, other: otherText(selection.about, otherOf(selection)) }, how);
}

/**
 * The chosen other head, else the same one of the next recording, else the next head.
 * @param {Selection} selection
 * @returns {Place}
 */
function otherOf({ about, other, recording, layer, head }) {
  const found = placeOf(about, other);
  if (found) return found;
  const count = about.recordings.length;
  if (count > 1) {
    const { number, head_numbers: numbers } = about.recordings[recording].layers[layer];
    const next = (recording + 1) % count;
    return nearestPlace(about, next, number, numbers[head]) ?? { recording, layer, head };
  }
  const { layers } = about.recordings[recording];
  const next = (head + 1) % layers[layer].heads;
  return next || layers.length === 1
    ? { recording, layer, head: next }
    : { recording, layer: (layer + 1) % layers.length, head: 0 };
}

/**
 * @param {About} about
 * @param {Place} where
 * @returns {Place}
 */
function mended({ recordings }, { recording, layer, head }) {
  /** @type {(n: number, count: number) => number} */
  const inside = (n, count) => Math.max(0, Math.min(n, count - 1));
  const r = inside(recording, recordings.length);
  const l = inside(layer, recordings[r].layers.length);
  return { recording: r, layer: l, head: inside(head, recordings[r].layers[l].heads) };
}

/**
 * @param {About} about
 * @param {Place} where
 */
function otherText(about, where) {
  return `${nameOfPlace(about, where)}${where.recording ? `@${where.recording}` : ""}`;
}

/**
 * The chosen pair becomes its counterpart, or another where it has none.
 * @param {Context} context
 */
async function swapHeads({ selection, align }) {
  const pair = counterpart(await align(), "there", selection);
  const other = otherText(selection.about, selection.where);
  selection.set({ ...otherOf(selection), other, ...pair });
}
