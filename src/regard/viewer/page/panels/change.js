// How much each head changed from one recording to the other: a grid of layers and heads.

import { nameOfPlace } from "../data/selection.js";
import { entryOf, invisiblePixel, pixelTable } from "../drawing/colours.js";
import { make, penOf } from "../drawing/dom.js";
import { noneWords, weightText } from "../drawing/numbers.js";

/** @import { Context, Selection } from "../data/selection.js" */
/** @import { Scores } from "../data/source.js" */

/** @typedef {{change: Scores, coverage: number, settled: boolean} | null} LayerChange */

/** @typedef {{layer: number, head: number}} HeadPlace */

const CELL = 12; // CSS pixels of a head, at most
const GAP = 1;

/**
 * The number of the recording that is compared with, where it is another one; else null.
 * @param {Selection} selection
 */
export function comparedRecording({ recording, otherWhere }) {
  return otherWhere && otherWhere.recording !== recording ? otherWhere.recording : null;
}

/**
 * How much each head of a layer changed; null where no other recording is compared with.
 * @param {Context} context
 * @param {number} layer
 * @returns {Promise<LayerChange>}
 */
export async function readChange({ selection, source }, layer) {
  const other = comparedRecording(selection);
  if (other === null) return null;
  const { recording, first } = selection.where;
  return source.change({ recording, layer, first, with: other });
}

// {element, show(changes, dark)}: a click chooses a head.
export class ChangeGrid {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    /** @type {LayerChange[]} of each layer, where it is known */
    this.changes = [];
    this.dark = false;
    this.words = make("p", { class: "regard-note" });
    this.canvas = make("canvas", { class: "regard-change-grid", role: "img" });
    this.element = make("div", { class: "regard-change", hidden: true }, this.words, this.canvas);
    this.canvas.addEventListener("click", (event) => {
      const place = this.#at(event);
      if (place) context.selection.set(place);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const place = this.#at(event);
      this.canvas.title = place ? this.#said(place) : "";
    });
    context.selection.listen((changed) => {
      if (changed.has("layer") || changed.has("head")) this.#draw();
    });
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  /**
   * @param {LayerChange[]} changes
   * @param {boolean} dark
   */
  show(changes, dark) {
    this.changes = changes;
    this.dark = dark;
    const known = changes.filter((layer) => layer !== null);
    this.element.hidden = known.length === 0;
    const least = Math.min(1, ...known.map(({ coverage }) => coverage));
    const part = least < 1 ? ` ${Math.max(1, Math.round(100 * least))} % of the queries.` : "";
    const most = this.#most();
    const isLost = known.some(({ change }) => change.some(Number.isNaN));
    const none = isLost ? "no number." : "no head of the same number.";
    const lost = isLost ? " Where weights are not numbers (NaN), there is none." : "";
    const words = most ? `most: ${this.#said(most)}.${part}` : none;
    this.words.textContent = `Change of each head, ${words}${lost}`;
    this.canvas.setAttribute("aria-label", this.words.textContent);
    this.#draw();
  }

  /** @param {HeadPlace} place */
  #value({ layer, head }) {
    return this.changes[layer]?.change[head] ?? null;
  }

  /** @param {HeadPlace} place */
  #said(place) {
    const { about, recording } = this.context.selection;
    const value = this.#value(place);
    const none = value === null ? "–" : noneWords(true);
    const words = Number.isNaN(value ?? NaN) ? none : weightText(Number(value));
    return `${nameOfPlace(about, { ...place, recording })} ${words}`;
  }

  // The head that changed most, or null.
  #most() {
    const places = this.#places().filter((place) => !Number.isNaN(this.#value(place) ?? NaN));
    const order = (/** @type {HeadPlace} */ place) => -Number(this.#value(place));
    return places.toSorted((a, b) => order(a) - order(b))[0] ?? null;
  }

  /** @returns {HeadPlace[]} */
  #places() {
    return this.context.selection.recordingFacts.layers.flatMap(({ heads }, layer) =>
      Array.from({ length: heads }, (_, head) => ({ layer, head })),
    );
  }

  // CSS pixels from one head to the next.
  get #side() {
    const { layers } = this.context.selection.recordingFacts;
    const most = Math.max(...layers.map(({ heads }) => heads));
    return Math.max(3, Math.min(CELL + GAP, Math.floor(this.element.clientWidth / most)));
  }

  /**
   * @param {MouseEvent} event
   * @returns {HeadPlace | null}
   */
  #at({ offsetX, offsetY }) {
    const [head, layer] = [offsetX, offsetY].map((at) => Math.floor(at / this.#side));
    const heads = this.context.selection.recordingFacts.layers[layer]?.heads ?? 0;
    return layer >= 0 && head >= 0 && head < heads ? { layer, head } : null;
  }

  #draw() {
    if (!this.element.clientWidth) return;
    const { canvas, context, dark } = this;
    const { recordingFacts, layer, head } = context.selection;
    const side = this.#side;
    const ratio = devicePixelRatio;
    const width = side * Math.max(...recordingFacts.layers.map(({ heads }) => heads));
    const height = side * recordingFacts.layers.length;
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
    const pen = penOf(canvas);
    pen.scale(ratio, ratio);
    const most = this.#most();
    const top = (most && this.#value(most)) || 1;
    for (const place of this.#places()) {
      pen.fillStyle = colourOf(this.#value(place), top, dark);
      pen.fillRect(place.head * side, place.layer * side, side - GAP, side - GAP);
    }
    pen.strokeStyle = getComputedStyle(canvas).getPropertyValue("--accent");
    pen.lineWidth = 2;
    pen.strokeRect(head * side, layer * side, side - GAP, side - GAP);
  }
}

/**
 * @param {number | null} value
 * @param {number} top
 * @param {boolean} dark
 */
function colourOf(value, top, dark) {
  const pixel =
    value === null || Number.isNaN(value)
      ? invisiblePixel(dark)
      : pixelTable(false, dark)[entryOf(value, 0, top)];
  return `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})`;
}
