// A long text: its strongest places in context, and the whole text as a strip.

import {
  colourRange,
  invisiblePixel,
  pixelTable,
  signedEntry,
  signedRange,
  weightEntry,
} from "../drawing/colours.js";
import { make, penOf } from "../drawing/dom.js";
import { countText, noneWords, timesText, weightText } from "../drawing/numbers.js";
import { shownAt } from "./line.js";

/** @import { Selection, Unit } from "../data/selection.js" */
/** @import { Hit, TokenText } from "../data/tokens.js" */
/** @import { Line, Tint } from "./line.js" */

/** @typedef {{line: Line, selection: Selection, dark: boolean, hits: Hit[]}} StripState */

const AROUND = 8; // tokens on both sides

/**
 * A passage around a place: its text, with the token itself marked.
 * @param {{text: TokenText, unit?: Unit}} line
 * @param {number} place
 * @param {Tint | null} tint
 */
export function passageOf(line, place, tint) {
  /** @type {(from: number, to: number) => string} */
  const words = (from, to) => {
    const parts = [];
    for (let n = from; n < to; n++) parts.push(line.text.text(n).replace(/\s+/g, " "));
    return parts.join(line.text.spaced ? " " : "");
  };
  const [first, last] = line.text.span(place, line.unit ?? "token");
  const from = Math.max(0, first - AROUND);
  const to = Math.min(line.text.length, last + 1 + AROUND);
  const gap = line.text.spaced ? " " : "";
  const space = gap || (/^\s/.test(line.text.text(first)) ? " " : "");
  const mark = make("mark", { text: line.text.label(place, 60, line.unit) });
  mark.style.setProperty("--back", tint?.back ?? "transparent");
  mark.style.setProperty("--on", tint?.ink ?? "");
  const before = make("span", { class: "regard-before" });
  before.textContent = `${from > 0 ? "…" : ""}${words(from, first)}${space}`;
  const after = `${gap}${words(last + 1, to)}${to < line.text.length ? "…" : ""}`;
  return make("span", { class: "regard-passage", dir: "auto" }, before, mark, after);
}

/**
 * A place's button: position, weight, × uniform, and the passage.
 * @param {Line} line
 * @param {number} place
 * @param {Tint | null} tint
 * @param {string} label
 */
export function passageButton(line, place, tint, label) {
  const [text, beside] = numberWords(line, place);
  const head = make(
    "span",
    { class: "regard-passage-head" },
    make("span", { text: [countText(place), label, beside].filter(Boolean).join(" · ") }),
    make("b", { text }),
  );
  const passage = passageOf(line, place, tint);
  return make("button", { type: "button", class: "regard-place" }, head, passage);
}

/**
 * The number of a place, nothing where it is masked, and what stands beside it.
 * @param {Line} line
 * @param {number} place
 * @returns {[text: string, beside: string]}
 */
function numberWords(line, place) {
  const { compared } = line;
  if (compared?.lacks(place)) return ["", "no counterpart"];
  if (compared) {
    const number = compared.numbers[place - line.base];
    return [Number.isNaN(number) ? "" : compared.text(number), compared.beside(place - line.base)];
  }
  const weight = Math.exp(line.at(place));
  if (Number.isNaN(weight)) return [line.isLost(place) ? noneWords(true) : "", ""];
  return [weightText(weight), `${timesText(weight * line.seenAt(place))} × uniform`];
}

// The whole text from top to bottom: {element, paint(line, …)}. `go(place)` goes there.
export class TextStrip {
  /** @param {(place: number) => void} go */
  constructor(go) {
    this.go = go;
    /** @type {StripState | null} */
    this.state = null;
    this.canvas = make("canvas", {
      class: "regard-strip",
      role: "slider",
      tabIndex: 0,
      "aria-label": "The whole text",
      "aria-orientation": "vertical",
      title: "The whole text: click to read there",
    });
    this.element = this.canvas;
    this.canvas.addEventListener("click", (event) => this.#click(event));
    this.canvas.addEventListener("keydown", (event) => this.#press(event));
    new ResizeObserver(() => this.#draw()).observe(this.canvas);
  }

  /** @param {StripState} state */
  paint(state) {
    this.state = state;
    const { line } = state;
    this.canvas.setAttribute("aria-valuemin", "0");
    this.canvas.setAttribute("aria-valuemax", String(line.text.length - 1));
    this.canvas.setAttribute("aria-valuenow", String(line.locked));
    const words = `position ${countText(line.locked)}, ${line.text.label(line.locked)}`;
    this.canvas.setAttribute("aria-valuetext", words);
    this.#draw();
  }

  get #pixels() {
    return Math.max(1, Math.round(this.canvas.clientHeight * devicePixelRatio));
  }

  #draw() {
    if (!this.state || !this.canvas.clientHeight) return;
    const { line, selection, dark, hits } = this.state;
    const height = this.#pixels;
    const width = Math.max(1, Math.round(this.canvas.clientWidth * devicePixelRatio));
    Object.assign(this.canvas, { width, height });
    const picture = new ImageData(width, height);
    const pixels = new Uint32Array(picture.data.buffer);
    const range = colourRange(selection);
    const [ramp, signed] = [pixelTable(false, dark), pixelTable(true, dark)];
    const span = signedRange(selection);
    for (let y = 0; y < height; y++) {
      const place = strongestPlace(line, y, height);
      let colour = invisiblePixel(dark);
      if (place !== null && line.compared)
        colour = signed[signedEntry(line.compared.numbers[place - line.base], span)];
      else if (place !== null) colour = ramp[weightEntry(shownAt(line, place, selection), range)];
      pixels.fill(colour, y * width, (y + 1) * width);
    }
    const pen = penOf(this.canvas);
    pen.putImageData(picture, 0, 0);
    this.#ticks(pen, line, width, height, hits);
  }

  /**
   * The chosen token as a wide line, the other end of the pair as two notches, hits as short ticks.
   * @param {CanvasRenderingContext2D} pen
   * @param {Line} line
   * @param {number} width
   * @param {number} height
   * @param {Hit[]} hits
   */
  #ticks(pen, line, width, height, hits) {
    const style = getComputedStyle(this.canvas);
    const y = (/** @type {number} */ place) => Math.floor((place / line.text.length) * height);
    const thick = Math.max(2, Math.round(2 * devicePixelRatio));
    pen.fillStyle = style.getPropertyValue("--focus");
    for (const [first] of hits) pen.fillRect(width * 0.7, y(first), width * 0.3, thick);
    pen.fillStyle = style.getPropertyValue("--accent");
    if (line.chosen !== null) pen.fillRect(0, y(line.chosen) - thick / 2, width, thick * 1.5);
    pen.fillRect(0, y(line.locked) - thick, width * 0.3, 2 * thick);
    pen.fillRect(width * 0.7, y(line.locked) - thick, width * 0.3, 2 * thick);
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const y = (event.offsetY / this.canvas.clientHeight) * this.#pixels;
    this.#goTo(Math.floor(y));
  }

  /**
   * To the strongest place within three pixels.
   * @param {number} y
   */
  #goTo(y) {
    if (!this.state) return;
    const { line } = this.state;
    const height = this.#pixels;
    const near = [0, -1, 1, -2, 2, -3, 3].map((off) => y + off);
    const rows = near.filter((row) => row >= 0 && row < height);
    const places = rows.map((row) => strongestPlace(line, row, height)).filter((p) => p !== null);
    places.sort((a, b) => sizeAt(line, b) - sizeAt(line, a));
    const [nearest] = placesOfRow(line.text, Math.min(Math.max(0, y), height - 1), height);
    this.go(places[0] ?? nearest);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    if (!this.state) return;
    const { line } = this.state;
    const step = Math.max(1, Math.round(line.text.length / this.#pixels));
    /** @type {{[key: string]: number | undefined}} */
    const by = { ArrowUp: -step, ArrowDown: step, PageUp: -10 * step, PageDown: 10 * step };
    /** @type {{[key: string]: number | undefined}} */
    const ends = { Home: 0, End: line.text.length - 1 };
    const to = ends[event.key] ?? line.locked + (by[event.key] ?? NaN);
    if (Number.isNaN(to)) return;
    event.preventDefault();
    event.stopPropagation();
    const way = to < line.locked ? -1 : 1;
    this.go(seenFrom(line, Math.max(0, Math.min(line.text.length - 1, to)), way));
  }
}

/**
 * The strongest place of the pixels' row y, or null where all of it is masked.
 * @param {Line} line
 * @param {number} y
 * @param {number} height
 */
function strongestPlace(line, y, height) {
  const [from, to] = placesOfRow(line.text, y, height);
  /** @type {number | null} */
  let best = null;
  for (let place = from; place < to; place++) {
    const value = sizeAt(line, place);
    if (!Number.isNaN(value) && (best === null || value > sizeAt(line, best))) best = place;
  }
  return best;
}

/**
 * What places are ranked by: ln of the weight, or the size of the signed number.
 * @param {Line} line
 * @param {number} place
 */
function sizeAt({ compared, base, at }, place) {
  return compared ? Math.abs(compared.numbers[place - base]) : at(place);
}

/**
 * The range of places that the pixels' row y shows.
 * @param {TokenText} text
 * @param {number} y
 * @param {number} height
 * @returns {[from: number, to: number]}
 */
function placesOfRow(text, y, height) {
  const from = Math.floor((y * text.length) / height);
  return [from, Math.max(from + 1, Math.floor(((y + 1) * text.length) / height))];
}

/**
 * The first unmasked place from `place` on, or the pair's own.
 * @param {Line} line
 * @param {number} place
 * @param {-1 | 1} way
 */
function seenFrom(line, place, way) {
  for (let n = place; n >= 0 && n < line.text.length; n += way)
    if (!Number.isNaN(line.at(n)) || line.isLost(n)) return n;
  return line.locked;
}
