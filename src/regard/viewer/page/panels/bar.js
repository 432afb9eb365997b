// The colour bar: the meaning of the map's colours, and their range to edit.

import { colourRange, colourSpan, ENTRIES, pixelTable, RANGES } from "../drawing/colours.js";
import { make, penOf } from "../drawing/dom.js";

/** @import { HeadMapView } from "../map/map.js" */
/** @import { Context, Selection } from "../data/selection.js" */

/**
 * @param {Context} context
 * @param {HeadMapView} map
 */
export function makeColourBar({ selection }, map) {
  const canvas = make("canvas", { width: ENTRIES, height: 1, role: "img" });
  const low = rangeInput("Faintest colour, power of ten", (low) => selection.set({ low }));
  const high = rangeInput("Strongest colour, power of ten", (high) => selection.set({ high }));
  const span = rangeInput("Largest difference with a colour of its own", (span) =>
    selection.set({ span }),
  );
  Object.assign(span, { step: 0.05, min: 0.001 });
  const fit = make("button", { type: "button", class: "regard-button", text: "fit range" });
  fit.title = "Fit the colours to the values on the map; they never change by themselves";
  fit.addEventListener("click", () => map.fitRange());
  const reset = make("button", { type: "button", class: "regard-button", text: "reset" });
  reset.addEventListener("click", () => selection.set({ low: null, high: null, span: null }));
  const power = (/** @type {HTMLInputElement} */ input) =>
    make("label", { class: "regard-colours-power" }, "10", input);
  const ends = [
    power(low),
    power(high),
    make("label", { class: "regard-colours-span" }, "±", span),
  ];
  const element = make(
    "div",
    { class: "regard-colours", role: "group", "aria-label": "Colours" },
    ends[0],
    canvas,
    ends[1],
    ends[2],
    fit,
    reset,
  );
  const show = () => {
    const signed = selection.compare === "difference" && selection.otherWhere !== null;
    paintBar(canvas, signed);
    const range = colourRange(selection);
    [low.value, high.value] = [String(range.low), String(range.high)];
    span.value = String(colourSpan(selection));
    ends[0].hidden = ends[1].hidden = signed;
    ends[2].hidden = !signed;
    reset.hidden = !isEdited(selection, signed);
    canvas.setAttribute("aria-label", barText(selection, signed));
    canvas.title = barText(selection, signed);
  };
  selection.listen(show);
  show();
  return { element };
}

/**
 * @param {string} label
 * @param {(value: number | null) => void} change
 */
function rangeInput(label, change) {
  const input = make("input", { type: "number", step: 0.5, "aria-label": label });
  input.addEventListener("change", () => {
    change(
      input.value.trim() !== "" && Number.isFinite(Number(input.value))
        ? Number(input.value)
        : null,
    );
  });
  return input;
}

/**
 * @param {Selection} selection
 * @param {boolean} signed
 */
function isEdited({ low, high, span, scale }, signed) {
  if (signed) return span !== null;
  return (
    (low ?? RANGES[scale][0]) !== RANGES[scale][0] ||
    (high ?? RANGES[scale][1]) !== RANGES[scale][1]
  );
}

const RAISED_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/**
 * `10⁻⁵`; fractions as they are, 10^0.5.
 * @param {number} exponent
 */
function powerText(exponent) {
  if (!Number.isInteger(exponent)) return `10^${exponent}`;
  const digits = [...String(Math.abs(exponent))].map((digit) => RAISED_DIGITS[Number(digit)]);
  return `10${exponent < 0 ? "⁻" : ""}${digits.join("")}`;
}

/**
 * The meaning of the colours, in words.
 * @param {Selection} selection
 * @param {boolean} signed
 */
export function barText(selection, signed) {
  if (signed) {
    const span = colourSpan(selection);
    return `blue: ${span} less, white: equal, red: ${span} more`;
  }
  const { low, high } = colourRange(selection);
  const unit = selection.scale === "uniform" ? "× uniform" : "weight";
  return `${unit}, logarithmic: pale ${powerText(low)}, dark ${powerText(high)}`;
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {boolean} signed
 */
function paintBar(canvas, signed) {
  const image = new ImageData(ENTRIES, 1);
  new Uint32Array(image.data.buffer).set(pixelTable(signed));
  penOf(canvas).putImageData(image, 0, 0);
}
