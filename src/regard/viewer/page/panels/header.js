// The header: the recording, and the switches of the view.

import { KIND_NAMES, kindWords } from "../data/kinds.js";
import { areGroups, headCounts, labelOfRecording } from "../data/selection.js";
import { make, makePicker, makeSwitch } from "../drawing/dom.js";
import { counted } from "../drawing/numbers.js";

/** @import { Context, Plane, Selection, View } from "../data/selection.js" */
/** @import { EffectKind, RecordingFacts } from "../data/source.js" */
/** @import { Scale } from "../drawing/colours.js" */
/** @import { Option } from "../drawing/dom.js" */

/**
 * The parts in the header, or opened from it.
 * @typedef {{compare: {element: HTMLElement}, help: {open: () => void},
 *   pictures: {open: () => void}}} HeaderParts
 */

/** @type {Record<View, string>} */
const VIEWS = { map: "Map", lines: "Lines", steps: "Steps" };
/** @type {Record<Plane, string>} */
const PLANES = { max: "strongest", mass: "share", effect: "effect" };
const FIRST_TITLE = "Hide the first token, often an attention sink: the others share its weight";
const PLANE_TITLE = "What a cell of several weights shows: the strongest, or their share of a row";
/** @type {[Scale, string][]} */
const SCALES = [
  ["linear", "linear"],
  ["log", "log"],
  ["uniform", "× uniform"],
];

/**
 * @param {Context} context
 * @param {HeaderParts} parts
 */
export function makeHeader(context, parts) {
  const { about, selection } = context;
  const title = make("h1", { class: "regard-title" });
  const facts = make("span", { class: "regard-facts" });
  const controls = makeControls(selection);
  const recording = about.recordings.length > 1 ? recordingPicker(context) : null;
  const [view, layer, head, scale, plane, kind, words, first] = controls.elements;
  /** @type {(name: string, ...nodes: (Node | undefined)[]) => HTMLElement} */
  const group = (name, ...nodes) => make("div", { class: `regard-group ${name}` }, ...nodes);
  const looks = group("regard-looks", scale, plane, kind, words, first);
  const element = make(
    "header",
    { class: "regard-header" },
    group("regard-names", title, recording?.element, facts, view, layer, head),
    looks,
    group("regard-menus", parts.compare.element, exportButton(parts), keysButton(parts)),
  );
  const show = () => {
    const { name, model, layers } = selection.recordingFacts;
    title.title = name || model || "recording";
    title.textContent = title.title;
    const size = sizeParts(selection.recordingFacts);
    facts.replaceChildren(...size.flatMap((part) => [make("span", { text: part }), " "]));
    facts.title = `${size.join(" ")} · ${layers.length} × ${headCounts(layers)} heads`;
    recording?.show(selection.recording);
    title.classList.toggle("regard-hidden", recording !== null && !areGroups(about));
    looks.hidden = selection.view === "steps";
    scale.hidden = plane.hidden = selection.view !== "map";
    controls.show();
  };
  selection.listen(show);
  show();
  return { element };
}

/**
 * `5 queries · 12 keys`, in what may stand on lines of its own.
 * @param {RecordingFacts} facts
 */
function sizeParts({ itself, tokens, queries }) {
  if (itself) return [counted(tokens, "token")];
  return [`${counted(queries, "query", "queries")} ·`, counted(tokens, "key")];
}

/** @param {Selection} selection */
function makeControls(selection) {
  const view = makeSwitch("View", VIEWS, (view) => selection.set({ view }));
  const layer = makePicker("layer", (layer) => selection.set({ layer: Number(layer) }));
  const head = makePicker("head", (head) => selection.set({ head: Number(head) }));
  const scale = makePicker("scale", (scale) => {
    selection.set({ scale: /** @type {Scale} */ (scale) });
  });
  const plane = makeSwitch("Plane", PLANES, (plane) => selection.set({ plane }));
  const first = make("button", { type: "button", class: "regard-button", text: "hide first" });
  first.title = FIRST_TITLE;
  first.addEventListener("click", () => selection.set({ first: selection.first ? "" : "hidden" }));
  const words = make("button", { type: "button", class: "regard-button", text: "words" });
  words.addEventListener("click", () => {
    selection.set({ unit: selection.usedUnit === "word" ? "token" : "word" });
  });
  const kind = makePicker("kind of effect", (kind) => {
    selection.set({ kind: /** @type {EffectKind} */ (kind) });
  });
  kind.fill(KIND_NAMES.map((name) => [name, name]));
  kind.element.classList.add("regard-unnamed");
  scale.element.classList.add("regard-unnamed");
  const options = (/** @type {number[]} */ numbers) =>
    numbers.map((number, n) => /** @type {Option} */ ([n, number]));
  const filled = { layer: "", head: "", usedScale: "" };
  /** @type {(name: keyof typeof filled, picker: typeof layer, choices: Option[]) => void} */
  const fill = (name, picker, choices) => {
    if (filled[name] !== String(choices)) picker.fill(choices);
    filled[name] = String(choices);
    picker.show(selection[name]);
  };
  const showPlane = () => {
    const { layerFacts, hasEffects, usedPlane, effect } = selection;
    const button = plane.buttons.get("effect");
    if (button) {
      button.disabled = !hasEffects;
      if (!layerFacts.effects.length) button.remove();
      else if (!button.isConnected) plane.element.append(button);
    }
    const isOnly = selection.compare && !hasEffects && layerFacts.effects.length;
    plane.element.title = isOnly
      ? "Effects are compared side by side, where both heads have some"
      : PLANE_TITLE;
    plane.show(usedPlane);
    kind.element.hidden = !effect;
    kind.element.title = effect ? kindWords(effect) : "";
    kind.show(selection.kind);
    fill("usedScale", scale, effect ? SCALES.filter(([name]) => name !== "uniform") : SCALES);
  };
  const show = () => {
    const { layers } = selection.recordingFacts;
    fill("layer", layer, options(layers.map(({ number }) => number)));
    fill("head", head, options(selection.layerFacts.head_numbers));
    layer.element.title = selection.layerFacts.name;
    view.show(selection.view);
    showPlane();
    const { tokens, words: count } = selection.recordingFacts;
    words.setAttribute("aria-pressed", String(selection.usedUnit === "word"));
    const isDifference = selection.compare === "difference";
    const isEffect = selection.effect !== undefined;
    words.disabled = count === tokens || isDifference;
    words.hidden = first.hidden = isEffect; // effects are of tokens, and of the pass as it was
    words.title = "The tokens of a word as one: keys summed, queries averaged";
    if (isDifference) words.title = "A difference is one of tokens";
    if (count === tokens) words.title = "Each token is a word";
    first.setAttribute("aria-pressed", String(selection.usedFirst === "hidden"));
  };
  const elements = [view, layer, head, scale, plane, kind].map(({ element }) => element);
  return { elements: [...elements, words, first], show };
}

/** @param {Context} context */
function recordingPicker({ about, selection }) {
  const label = areGroups(about) ? "group" : "recording";
  const picker = makePicker(label, (n) => selection.set({ recording: Number(n) }));
  picker.element.classList.add("regard-recording");
  picker.element.classList.toggle("regard-unnamed", label === "recording"); // it is the title
  picker.fill(about.recordings.map((_, n) => [n, labelOfRecording(about, n)]));
  return picker;
}

/** @param {HeaderParts} parts */
function keysButton({ help }) {
  const button = make("button", { type: "button", class: "regard-button", text: "?" });
  button.setAttribute("aria-label", "Keys");
  button.title = "Keys and words";
  button.setAttribute("aria-haspopup", "dialog");
  button.addEventListener("click", () => help.open());
  return button;
}

/** @param {HeaderParts} parts */
function exportButton({ pictures }) {
  const button = make("button", { type: "button", class: "regard-button", text: "Export…" });
  button.setAttribute("aria-haspopup", "dialog");
  button.addEventListener("click", () => pictures.open());
  return button;
}
