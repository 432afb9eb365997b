// The header: what is shown, and the switches of how.

import { make, makePicker, makeSwitch } from "./dom.js";

const counted = new Intl.NumberFormat("en");

export function makeHeader(context) {
  const { about, selection } = context;
  const view = makeSwitch("View", { map: "Map", steps: "Steps" }, (view) => selection.set({ view }));
  const layer = makePicker("layer", (n) => selection.set({ layer: Number(n) }));
  const head = makePicker("head", (n) => selection.set({ head: Number(n) }));
  const scale = makePicker("scale", (scale) => selection.set({ scale }));
  scale.fill([
    ["weight", "weight (log)"],
    ["uniform", "× uniform"],
  ]);
  const planes = { max: "strongest link", mass: "mass" };
  const plane = makeSwitch("Plane", planes, (plane) => selection.set({ plane }));
  const title = make("h1", { class: "regard-title" });
  const facts = make("span", { class: "regard-facts" });
  const slots = { colourBar: make("div", { class: "regard-slot-bar" }) };
  slots.compare = make("div", { class: "regard-slot-compare" });
  slots.menu = make("div", { class: "regard-slot-menu" });
  const element = make(
    "header",
    { class: "regard-header" },
    title, facts, view.element, layer.element, head.element, scale.element, plane.element,
    slots.colourBar, slots.compare, slots.menu,
  );
  const show = () => {
    const { name, model, tokens, layers } = selection.recordingFacts;
    title.textContent = model || name;
    facts.textContent = `${counted.format(tokens)} tokens · ${layers.length} × ${layers[0].heads} heads`;
    layer.fill(layers.map((_, n) => [n, n]));
    head.fill(Array.from({ length: selection.layerFacts.heads }, (_, n) => [n, n]));
    layer.show(selection.layer);
    head.show(selection.head);
    view.show(selection.view);
    scale.show(selection.scale);
    plane.show(selection.plane);
  };
  selection.addEventListener("change", show);
  show();
  return { element, slots };
}
