// The header: what is shown, and the switches of how.

import { make, makePicker, makeSwitch } from "../drawing/dom.js";
import { countText } from "../drawing/numbers.js";

const VIEWS = { map: "Map", steps: "Steps" };
const PLANES = { max: "strongest link", mass: "mass" };
const SCALES = [
  ["weight", "weight (log)"],
  ["uniform", "× uniform"],
];

export function makeHeader(context, parts) {
  const { about, selection } = context;
  const title = make("h1", { class: "regard-title" });
  const facts = make("span", { class: "regard-facts" });
  const controls = makeControls(selection);
  const recording = about.recordings.length > 1 ? recordingPicker(context) : null;
  const [view, layer, head, scale, plane] = controls.elements;
  const group = (name, ...nodes) => make("div", { class: `regard-group ${name}` }, ...nodes);
  const element = make(
    "header",
    { class: "regard-header" },
    group("regard-names", title, facts, recording?.element, view, layer, head),
    group("regard-menus", parts.compare.element, exportMenu(context, parts), keysButton(parts)),
    group("regard-looks", scale, plane, parts.colourBar.element),
  );
  const show = () => {
    const { name, model, layers } = selection.recordingFacts;
    title.textContent = title.title = name || model || "recording";
    const size = sizeText(selection.recordingFacts);
    facts.textContent = `${size} · ${layers.length} × ${layers[0].heads} heads`;
    recording?.show(selection.recording);
    controls.show();
  };
  selection.addEventListener("change", show);
  show();
  return { element };
}

function sizeText({ itself, tokens, queries }) {
  if (itself) return `${countText(tokens)} tokens`;
  return `${countText(queries)} queries · ${countText(tokens)} keys`;
}

function makeControls(selection) {
  const choose =
    (name, read = String) =>
    (value) =>
      selection.set({ [name]: read(value) });
  const view = makeSwitch("View", VIEWS, choose("view"));
  const layer = makePicker("layer", choose("layer", Number));
  const head = makePicker("head", choose("head", Number));
  const scale = makePicker("scale", choose("scale"));
  const plane = makeSwitch("Plane", PLANES, choose("plane"));
  scale.fill(SCALES);
  const numbers = (count) => Array.from({ length: count }, (_, n) => [n, n]);
  const filled = {};
  const fill = (name, picker, choices) => {
    if (filled[name] !== String(choices)) picker.fill(choices);
    filled[name] = String(choices);
    picker.show(selection[name]);
  };
  const show = () => {
    const { layers } = selection.recordingFacts;
    fill(
      "layer",
      layer,
      layers.map(({ number }, n) => [n, number ?? n]),
    );
    fill("head", head, numbers(selection.layerFacts.heads));
    view.show(selection.view);
    scale.show(selection.scale);
    plane.show(selection.plane);
  };
  return { elements: [view, layer, head, scale, plane].map(({ element }) => element), show };
}

function recordingPicker({ about, selection }) {
  const picker = makePicker("recording", (n) => selection.set({ recording: Number(n) }));
  picker.fill(about.recordings.map(({ name, model }, n) => [n, name || model || `recording ${n}`]));
  return picker;
}

function keysButton({ help }) {
  const button = make("button", { type: "button", class: "regard-button", text: "? keys" });
  button.setAttribute("aria-haspopup", "dialog");
  button.addEventListener("click", () => help.open());
  return button;
}

// A menu that closes when something is chosen in it, or the focus leaves it.
function exportMenu(context, { savers }) {
  const menu = make("details", { class: "regard-menu" }, make("summary", { text: "Export" }));
  const list = make("div", { class: "regard-menu-list" });
  for (const [name, save] of Object.entries(savers)) {
    const button = make("button", { type: "button", text: name });
    button.addEventListener("click", () => {
      menu.open = false;
      save().then(
        () => context.say(`saved: ${name}`),
        (error) => {
          console.error(error);
          context.say(`the ${name} could not be made`);
        },
      );
    });
    list.append(button);
  }
  const command = make("code", { text: "regard view … --export page.html" });
  list.append(make("p", { class: "regard-note" }, "The whole page as one file: ", command));
  menu.append(list);
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(event.relatedTarget)) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.firstChild.focus();
    event.stopPropagation();
  });
  return menu;
}
