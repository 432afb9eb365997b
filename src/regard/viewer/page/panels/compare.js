// Which other head the map is compared with: any layer's, any recording's.

import { make, makePicker } from "../drawing/dom.js";

const WAYS = { "": "nothing", side: "side by side", difference: "difference" };

// {element, toggle()}: toggle goes from one head to two beside each other to their difference.
export function makeCompare(context) {
  const { about, selection } = context;
  const way = makePicker("compare", (compare) => compareBy(selection, compare));
  way.fill(Object.entries(WAYS));
  const pick = (field) => (value) => {
    const other = { ...otherOf(selection), [field]: Number(value) };
    selection.set({ other: otherText(mended(about, other)) });
  };
  const recording = makePicker("of", pick("recording"));
  const layer = makePicker("layer", pick("layer"));
  const head = makePicker("head", pick("head"));
  const swap = make("button", { type: "button", class: "regard-button", text: "⇄" });
  swap.title = "Swap both heads";
  swap.setAttribute("aria-label", "Swap both heads");
  swap.addEventListener("click", () => swapHeads(selection));
  recording.fill(about.recordings.map(({ name }, n) => [n, name]));
  const picked = make(
    "div",
    { class: "regard-compare-with" },
    layer.element,
    head.element,
    about.recordings.length > 1 ? recording.element : null,
    swap,
  );
  const element = make("div", { class: "regard-compare" }, way.element, picked);
  const show = () => {
    way.show(selection.compare);
    picked.hidden = !selection.compare;
    const other = otherOf(selection);
    const { layers } = about.recordings[other.recording];
    layer.fill(layers.map(({ number }, n) => [n, number ?? n]));
    head.fill(Array.from({ length: layers[other.layer].heads }, (_, n) => [n, n]));
    recording.show(other.recording);
    layer.show(other.layer);
    head.show(other.head);
  };
  selection.addEventListener("change", ({ detail }) => {
    if (["compare", "other", "recording", "layer", "head"].some((name) => detail.has(name))) show();
  });
  show();
  const toggle = () => {
    const ways = Object.keys(WAYS);
    compareBy(selection, ways[(ways.indexOf(selection.compare) + 1) % ways.length]);
  };
  return { element, toggle };
}

function compareBy(selection, compare) {
  selection.set({ compare, other: otherText(otherOf(selection)) });
}

// The other head as it is chosen, else the same one of the next recording, else the next head.
function otherOf({ about, other, recording, layer, head }) {
  const found = /^L(\d+)H(\d+)(?:@(\d+))?$/.exec(other);
  if (found) {
    const [, l, h, r] = found;
    return mended(about, { recording: Number(r ?? 0), layer: Number(l), head: Number(h) });
  }
  const count = about.recordings.length;
  if (count > 1) return mended(about, { recording: (recording + 1) % count, layer, head });
  const { layers } = about.recordings[recording];
  const next = (head + 1) % layers[layer].heads;
  return next || layers.length === 1
    ? { recording, layer, head: next }
    : { recording, layer: (layer + 1) % layers.length, head: 0 };
}

function mended({ recordings }, { recording, layer, head }) {
  const inside = (n, count) => Math.max(0, Math.min(n, count - 1));
  const r = inside(recording, recordings.length);
  const l = inside(layer, recordings[r].layers.length);
  return { recording: r, layer: l, head: inside(head, recordings[r].layers[l].heads) };
}

function otherText({ recording, layer, head }) {
  return `L${layer}H${head}${recording ? `@${recording}` : ""}`;
}

function swapHeads(selection) {
  selection.set({ ...otherOf(selection), other: otherText(selection.where) });
}
