// The colour bar: the meaning of the map's colours, and their range to edit.

import { KINDS, kindWords } from "../data/kinds.js";
import {
  colourRange,
  ENTRIES,
  isEnd,
  pixelTable,
  RANGES,
  signedRange,
  watchTheme,
} from "../drawing/colours.js";
import { make, penOf } from "../drawing/dom.js";
import { stepText, timesText } from "../drawing/numbers.js";

/** @import { HeadMapView } from "../map/map.js" */
/** @import { Context, Selection } from "../data/selection.js" */
/** @import { Scale } from "../drawing/colours.js" */

const OF_DIFFERENCE = "Largest difference with a colour of its own";

/**
 * Whether colours stand for signed numbers: a difference, or effects.
 * @param {Selection} selection
 */
export function isSigned({ compare, otherWhere, effect }) {
  return (compare === "difference" && otherWhere !== null) || effect !== undefined;
}

/**
 * @param {Context} context
 * @param {HeadMapView} map
 */
export function makeColourBar({ selection, ended, say }, map) {
  const canvas = make("canvas", { width: ENTRIES, height: 1, role: "img" });
  const refuse = (/** @type {string} */ words) => {
    show();
    say(words);
  };
  const set = (/** @type {"low" | "high"} */ end) => (/** @type {number | null} */ shown) => {
    const { usedScale } = selection;
    const value = shown === null ? null : endOf(shown, usedScale);
    if (shown !== null && value === null) return refuse(noEndText(shown));
    const { low, high } = colourRange(selection);
    if (value === (end === "low" ? high : low))
      return refuse(`${shown} ${UNITS[usedScale]} is the other end of the colours`);
    selection.set({ [end]: value });
    if (value !== null && selection[end] !== value) say("both ends changed places");
  };
  const low = rangeInput("Faintest colour", set("low"));
  const high = rangeInput("Strongest colour", set("high"));
  const span = rangeInput(OF_DIFFERENCE, (shown) => {
    if (shown !== null && shown <= 0) refuse(noEndText(shown));
    else selection.set({ span: shown && shown / spanUnit(selection) });
  });
  const fit = make("button", { type: "button", class: "regard-button", text: "auto range" });
  fit.title = "Fit the colours to the values on the map; they never change by themselves";
  fit.addEventListener("click", () => map.fitRange());
  const reset = make("button", { type: "button", class: "regard-button", text: "reset" });
  reset.addEventListener("click", () => selection.set({ low: null, high: null, span: null }));
  const units = [make("span"), make("span")];
  const ends = [low, high].map((input, n) =>
    make("label", { class: "regard-colours-end" }, input, units[n]),
  );
  const spanned = make("span");
  const sides = make("label", { class: "regard-colours-span" }, "±", span, spanned);
  const signs = [
    make("span", { class: "regard-end-word" }),
    make("span", { class: "regard-end-word" }),
  ];
  const element = make(
    "div",
    { class: "regard-colours", role: "group", "aria-label": "Colours" },
    ends[0],
    signs[0],
    canvas,
    signs[1],
    ends[1],
    sides,
    fit,
    reset,
  );
  let dark = false;
  const show = () => {
    const signed = isSigned(selection);
    paintBar(canvas, signed, dark);
    const range = colourRange(selection);
    const [faintest, strongest] = [range.low, range.high].map((end) =>
      String(shownEnd(end, selection.usedScale)),
    );
    tell(low, faintest);
    tell(high, strongest);
    for (const unit of units) unit.textContent = UNITS[selection.usedScale];
    tell(span, String(shownSpan(selection)));
    spanned.textContent = selection.effect ? "" : "%";
    const words = selection.effect && KINDS[selection.effect];
    span.setAttribute(
      "aria-label",
      words ? "Largest effect with a colour of its own" : OF_DIFFERENCE,
    );
    signs[0].textContent = words?.least ?? "";
    signs[1].textContent = words?.most ?? "";
    ends[0].hidden = ends[1].hidden = signed;
    sides.hidden = !signed;
    reset.hidden = !isEdited(selection, signed);
    canvas.setAttribute("aria-label", barText(selection, signed));
    canvas.title = barText(selection, signed);
  };
  dark = watchTheme(ended, (now) => {
    dark = now;
    show();
  });
  selection.listen(show);
  show();
  return { element };
}

/** @type {Record<Scale, string>} */
const UNITS = { linear: "%", log: "%", uniform: "×" };

/**
 * An end of the range as people read it: per cent, or times uniform.
 * @param {number} end
 * @param {Scale} scale
 */
function shownEnd(end, scale) {
  const shown = scale === "linear" ? 100 * end : 10 ** (scale === "log" ? end + 2 : end);
  return Number(shown.toPrecision(6));
}

/**
 * The same the other way; null for what is no end.
 * @param {number} shown
 * @param {Scale} scale
 */
function endOf(shown, scale) {
  const power = Number(Math.log10(scale === "log" ? shown / 100 : shown).toPrecision(6));
  const end = scale === "linear" ? shown / 100 : power;
  return isEnd(end) ? end : null;
}

/** @param {number} shown */
function noEndText(shown) {
  return `${shown} is no end of these colours`;
}

/**
 * What a difference of 1 is as people read it: per cent. Effects have no unit.
 * @param {Selection} selection
 */
function spanUnit({ effect }) {
  return effect ? 1 : 100;
}

/** @param {Selection} selection */
function shownSpan(selection) {
  return Number((spanUnit(selection) * signedRange(selection).span).toPrecision(6));
}

/** @type {WeakSet<HTMLInputElement>} */
const beingTyped = new WeakSet();

/**
 * Shows a number in a field, unless another is being typed there.
 * @param {HTMLInputElement} input
 * @param {string} number
 */
function tell(input, number) {
  if (!beingTyped.has(input)) input.value = number;
}

/**
 * @param {string} label
 * @param {(value: number | null) => void} change
 */
function rangeInput(label, change) {
  const input = make("input", { type: "number", step: "any", "aria-label": label });
  input.addEventListener("input", () => beingTyped.add(input));
  input.addEventListener("blur", () => beingTyped.delete(input));
  input.addEventListener("change", () => {
    beingTyped.delete(input);
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
function isEdited({ low, high, span, usedScale }, signed) {
  if (signed) return span !== null;
  const [least, most] = RANGES[usedScale];
  return (low ?? least) !== least || (high ?? most) !== most;
}

/**
 * The meaning of the colours, in words.
 * @param {Selection} selection
 * @param {boolean} signed
 */
export function barText(selection, signed) {
  const { effect } = selection;
  const { span, decades } = signedRange(selection);
  if (effect) {
    const scale = decades ? `logarithmic, ${decades} powers of ten on both sides` : "linear";
    return `${kindWords(effect)} ±${stepText(span)}, ${scale}`;
  }
  if (signed) {
    const end = `${shownSpan(selection)} %`;
    return `blue: ${end} less, red: ${end} more`;
  }
  const { usedScale } = selection;
  const { low, high } = colourRange(selection);
  const [least, most] = [low, high].map((end) => {
    return `${timesText(shownEnd(end, usedScale))} ${UNITS[usedScale]}`;
  });
  const unit = usedScale === "uniform" ? "times uniform" : "weight";
  return `${unit}, ${usedScale === "linear" ? "linear" : "logarithmic"}: ${least} to ${most}`;
}

const MOST_TICKS = 6;

/** @typedef {{at: number, text: string}} Tick a number at a fraction of the bar */

/**
 * Numbers along the bar.
 * @param {Selection} selection
 * @param {boolean} signed
 * @returns {Tick[]}
 */
export function barTicks(selection, signed) {
  const { span, decades } = signedRange(selection);
  if (decades) return decadeTicks(span, decades);
  const { low, high, linear } = signed
    ? { low: -span, high: span, linear: true }
    : colourRange(selection);
  const unit = signed ? spanUnit(selection) : linear ? 100 : 1;
  const step = linear ? niceStep((unit * (high - low)) / (MOST_TICKS - 1)) : decadeStep(high - low);
  let ticks = [];
  for (
    let n = Math.ceil((unit * low) / step - 1e-9);
    n * step <= unit * high * (1 + 1e-9) + 1e-12;
    n++
  )
    ticks.push(n * step);
  if (ticks.length < 2 && !linear) ticks = [low, high]; // of less than a power of ten, its ends
  return ticks.map((tick) => ({
    at: (tick / unit - low) / (high - low),
    text: linear ? digitsText(tick) : timesText(shownEnd(tick, selection.usedScale)),
  }));
}

/**
 * As many digits as neighbours of a narrow range need: 10.02.
 * @param {number} tick
 */
function digitsText(tick) {
  const number = Number(tick.toPrecision(6));
  const text = String(number);
  return text.length > 8 ? timesText(number) : text.replace("-", "−");
}

/**
 * Numbers along the bar of effects: powers of ten below the largest, on both sides.
 * @param {number} span
 * @param {number} decades
 */
function decadeTicks(span, decades) {
  const parts = Array.from({ length: decades }, (_, n) => n);
  return [-1, 1].flatMap((sign) =>
    parts.map((n) => ({
      at: 0.5 + sign * 0.5 * (1 - n / decades),
      text: timesText(Number((sign * span * 0.1 ** n).toPrecision(6))),
    })),
  );
}

/**
 * The least of 1, 2, 5 times a power of ten that is as large.
 * @param {number} least
 */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least * 0.999) ?? 10 * power;
}

/** @param {number} decades */
function decadeStep(decades) {
  return Math.max(1, Math.ceil(decades / MOST_TICKS));
}

/**
 * What the numbers along the bar are.
 * @param {Selection} selection
 * @param {boolean} signed
 */
export function barLabel({ usedScale, effect }, signed) {
  if (effect) return `effect (${effect})`;
  if (signed) return "difference of the weights, %";
  return usedScale === "uniform" ? "weight, times uniform" : "weight, %";
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {boolean} signed
 * @param {boolean} dark
 */
function paintBar(canvas, signed, dark) {
  const image = new ImageData(ENTRIES, 1);
  new Uint32Array(image.data.buffer).set(pixelTable(signed, dark));
  penOf(canvas).putImageData(image, 0, 0);
}
