// The dialog that saves a picture: the same choices as recording.figure in Python.

import { make, makePicker, makeSwitch } from "../drawing/dom.js";
import { countText } from "../drawing/numbers.js";
import { INCH, savePicture, sizeShown } from "./picture.js";

/** @import { Context } from "../data/selection.js" */
/** @import { Option } from "../drawing/dom.js" */
/** @import { PictureChoices, PictureParts } from "./picture.js" */

/** @type {Record<PictureChoices["kind"], string>} */
const KINDS = { png: "PNG picture", svg: "SVG drawing" };
/** @type {Option[]} */
const BACKGROUNDS = [
  ["white", "white"],
  ["transparent", "transparent"],
  ["page", "as on the page"],
];
const USUAL_DPI = 300;

/**
 * @param {Context} context
 * @param {PictureParts} parts
 */
export function makeExport(context, parts) {
  /** @type {PictureChoices} */
  const choices = { kind: "png", width: 0, dpi: USUAL_DPI, background: "white", marks: false };
  const format = makeSwitch("Format", KINDS, (kind) => change({ kind }));
  const width = makeNumber("width, inches", (width) => change({ width }));
  const dpi = makeNumber("pixels per inch", (dpi) => change({ dpi }));
  const background = makePicker("background", (value) =>
    change({ background: /** @type {PictureChoices["background"]} */ (value) }),
  );
  background.fill(BACKGROUNDS);
  const marks = make("input", { type: "checkbox" });
  marks.addEventListener("change", () => change({ marks: marks.checked }));
  const size = make("p", { class: "regard-note", role: "status" });
  const save = make("button", { type: "button", class: "regard-button", text: "Save" });
  const close = make("button", { type: "button", class: "regard-button", text: "Cancel" });
  const element = make(
    "dialog",
    { class: "regard-help regard-export", "aria-label": "Export a picture" },
    make("h2", { text: "Export a picture" }),
    format.element,
    width.element,
    dpi.element,
    background.element,
    make("label", {}, marks, "selection, rings and cross-hair"),
    size,
    commandNote("A PDF, and any part of any head:", "regard view … --export head.pdf"),
    commandNote("The whole page as one file:", "regard view … --export page.html"),
    make("div", { class: "regard-export-end" }, save, close),
  );
  let shown = { width: INCH, height: INCH };
  const change = (/** @type {Partial<PictureChoices>} */ changed) => {
    Object.assign(choices, changed);
    show();
  };
  const show = () => {
    format.show(choices.kind);
    background.show(choices.background);
    dpi.element.hidden = choices.kind === "svg";
    const height = (choices.width * shown.height) / shown.width;
    const unit = choices.kind === "svg" ? 1 : choices.dpi;
    const sides = [choices.width, height].map((side) => side * unit);
    const isRight = sides.every((side) => side > 0 && Number.isFinite(side));
    save.disabled = !isRight;
    if (!isRight) size.textContent = "A width and a resolution above 0 are needed.";
    else if (unit === 1) size.textContent = `${sides.map((n) => n.toFixed(2)).join(" × ")} inches`;
    else size.textContent = `${sides.map((n) => countText(Math.round(n))).join(" × ")} pixels`;
  };
  const open = () => {
    if (element.open) return;
    const { width: before } = shown;
    const isEdited = choices.width !== 0 && choices.width !== before / INCH;
    shown = sizeShown(context, parts);
    if (!isEdited) choices.width = shown.width / INCH;
    background.element.hidden = context.selection.view !== "map" && parts.map.dark;
    width.show(Number(choices.width.toFixed(2)));
    dpi.show(choices.dpi);
    show();
    element.showModal();
  };
  const saves = async () => {
    const isDarkPanel = background.element.hidden; // it has the colours of the page alone
    const wanted = isDarkPanel
      ? { ...choices, background: /** @type {"page"} */ ("page") }
      : choices;
    try {
      await savePicture(context, parts, wanted);
      element.close();
      context.say(`saved: ${KINDS[choices.kind]}`);
    } catch (error) {
      if (!(error instanceof RangeError)) console.error(error);
      size.textContent = `Not saved: ${error instanceof Error ? error.message : error}.`;
    }
  };
  save.addEventListener("click", () => saves());
  close.addEventListener("click", () => element.close());
  element.addEventListener("click", (event) => {
    if (event.target === element) element.close();
  });
  return { element, open };
}

/**
 * A labelled number: {element, show(value)}; what is no number is NaN.
 * @param {string} label
 * @param {(value: number) => void} change
 */
function makeNumber(label, change) {
  const input = make("input", { type: "number", min: 0, step: "any" });
  input.addEventListener("input", () => change(input.valueAsNumber));
  const element = make("label", {}, make("span", { text: label }), input);
  const show = (/** @type {number} */ value) => {
    input.value = String(value);
  };
  return { element, show };
}

/**
 * @param {string} text
 * @param {string} command
 */
function commandNote(text, command) {
  return make("p", { class: "regard-note" }, `${text} `, make("code", { text: command }));
}
