// One matrix of a step: cells, labels, shape and range, to point at and to walk through.

import { INVISIBLE, signedColour, usualRange, weightColour } from "../drawing/colours.js";
import { make, penOf } from "../drawing/dom.js";
import { MARK_FONT } from "../drawing/marks.js";
import { stepText } from "../drawing/numbers.js";
import { numberIn } from "./cellnumber.js";
import { inkOn } from "./line.js";

/** @import { Colour } from "../drawing/colours.js" */
/** @import { Box } from "../drawing/marks.js" */

/** @typedef {readonly (readonly (number | null)[])[]} Values null is −∞ */

/**
 * One side of a matrix: a label of each row (or column), the word for them, pixels of a cell.
 * @typedef {{labels: string[] | null, word: string, size: number}} Axis
 */

/**
 * The content of a matrix; null in `hidden` is a weight of 0 because the pair is masked.
 * @typedef {{values: Values, hidden?: Values | null, rows: Axis, columns: Axis, weights?: boolean,
 *   note?: string, dark: boolean}} Filling
 */

/** @typedef {(row: number, column: number, words: string) => void} ChooseCell */

/** @type {Axis} */
const NO_AXIS = { labels: null, word: "", size: 1 };
let matrixCount = 0;

// `choose`: a cell was chosen; `name`: its words, as in "scores".
export class MatrixView {
  /**
   * @param {string} name
   * @param {ChooseCell} choose
   */
  constructor(name, choose) {
    this.name = name;
    this.choose = choose;
    /** @type {[row: number, column: number]} */
    this.at = [0, 0];
    /** @type {Values} */
    this.values = [];
    /** @type {Values | null} */
    this.hidden = null;
    this.weights = false;
    this.dark = false;
    /** @type {[rows: Axis, columns: Axis]} */
    this.axes = [NO_AXIS, NO_AXIS];
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.cell = make("span", { role: "gridcell", id: `regard-cell-${matrixCount++}` });
    this.row = make("div", { role: "row", class: "regard-hidden" }, this.cell);
    this.outlines = make("div", { class: "regard-outlines", "aria-hidden": "true" });
    this.grid = make(
      "div",
      { class: "regard-grid", role: "grid", tabIndex: 0, "aria-activedescendant": this.cell.id },
      this.canvas,
      this.outlines,
      this.row,
    );
    this.rows = make("div", { class: "regard-row-labels", "aria-hidden": "true" });
    this.columns = make("div", { class: "regard-column-labels", "aria-hidden": "true" });
    this.shape = make("div", { class: "regard-shape" });
    this.title = make("figcaption", { text: name });
    this.element = make(
      "figure",
      { class: "regard-matrix" },
      this.title,
      make("div", { class: "regard-matrix-body" }, this.columns, this.rows, this.grid),
      this.shape,
    );
    this.#listen();
  }

  /** @param {string} name */
  rename(name) {
    this.name = name;
    this.title.textContent = name;
  }

  /** @param {Filling} filling */
  fill({ values, hidden = null, rows, columns, weights = false, note, dark }) {
    this.values = values;
    this.hidden = hidden;
    this.weights = weights;
    this.dark = dark;
    this.axes = [rows, columns];
    const [height, width] = [values.length, values[0]?.length ?? 0];
    this.grid.setAttribute("aria-label", `${this.name}, ${height} × ${width}`);
    this.grid.setAttribute("aria-rowcount", String(height));
    this.grid.setAttribute("aria-colcount", String(width));
    labels(this.rows, rows, "height");
    labels(this.columns, columns, "width");
    this.shape.textContent = [shapeText(height, width), note ?? rangeText(values)].join(" ");
    this.#draw();
  }

  /**
   * Outlines a row, a column or the cell where both meet; null is none.
   * @param {{row?: number | null, column?: number | null, cell?: boolean}} place
   */
  mark({ row = null, column = null, cell = false }) {
    const [height, width] = this.axes.map((axis) => axis.size);
    /** @type {(top: number, left: number, tall: number, wide: number) => HTMLElement} */
    const box = (top, left, tall, wide) => {
      const node = make("div");
      Object.assign(node.style, {
        top: `${top}px`,
        left: `${left}px`,
        height: `${tall}px`,
        width: `${wide}px`,
      });
      return node;
    };
    const full = [this.values.length * height, (this.values[0]?.length ?? 0) * width];
    const boxes = [];
    if (cell && row !== null && column !== null)
      boxes.push(box(row * height, column * width, height, width));
    else if (row !== null) boxes.push(box(row * height, 0, height, full[1]));
    else if (column !== null) boxes.push(box(0, column * width, full[0], width));
    this.outlines.replaceChildren(...boxes);
    emphasise(this.rows, row);
    emphasise(this.columns, column);
    this.#stand(row ?? this.at[0], column ?? this.at[1]);
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  #stand(row, column) {
    const rows = this.values.length;
    const columns = this.values[0]?.length ?? 0;
    this.at = [Math.max(0, Math.min(row, rows - 1)), Math.max(0, Math.min(column, columns - 1))];
    this.row.setAttribute("aria-rowindex", String(this.at[0] + 1));
    this.cell.setAttribute("aria-colindex", String(this.at[1] + 1));
    this.cell.textContent = this.words(...this.at);
  }

  /**
   * `scores, query «it», key «cat»: 5.58`
   * @param {number} row
   * @param {number} column
   */
  words(row, column) {
    const places = [row, column].map((place, n) => {
      const { labels, word } = this.axes[n];
      return `${word} ${labels ? `«${labels[place]}»` : place}`;
    });
    const hides = this.hidden?.[row][column] === null ? ", masked" : "";
    return `${this.name}, ${places.join(", ")}: ${stepText(this.values[row][column], 5)}${hides}`;
  }

  #draw() {
    const [height, width] = this.axes.map((axis) => axis.size);
    const rows = this.values.length;
    const columns = this.values[0]?.length ?? 0;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(columns * width * ratio);
    this.canvas.height = Math.round(rows * height * ratio);
    this.canvas.style.width = `${columns * width}px`;
    this.canvas.style.height = `${rows * height}px`;
    const pen = penOf(this.canvas);
    pen.scale(ratio, ratio);
    const span = largestSize(this.values) || 1;
    const gap = Math.min(width, height) >= 6 ? 1 : 0;
    for (const [r, line] of this.values.entries())
      for (const [c, value] of line.entries()) {
        const shown = this.hidden?.[r][c] === null ? null : value;
        const colour = this.#colour(shown, span);
        const [x, y] = [c * width, r * height];
        const wide = Math.max(width - gap, 1 / ratio); // narrower ones would be half transparent
        const at = { x, y, width: wide, height: height - gap };
        pen.fillStyle = `rgb(${colour.join(" ")})`;
        pen.fillRect(at.x, at.y, at.width, at.height);
        this.#write(pen, shown, colour, at);
      }
  }

  /**
   * @param {number | null} value
   * @param {number} span
   * @returns {Colour}
   */
  #colour(value, span) {
    if (value === null || !Number.isFinite(value)) return INVISIBLE[this.dark ? "dark" : "light"];
    if (!this.weights) return signedColour(value, { span, decades: 0 }, this.dark);
    return weightColour(Math.log(value), usualRange(this.values[0].length), this.dark);
  }

  /**
   * The number where there is room, a dash for −∞.
   * @param {CanvasRenderingContext2D} pen
   * @param {number | null} value
   * @param {Colour} colour
   * @param {Box} box
   */
  #write(pen, value, colour, { x, y, width, height }) {
    pen.fillStyle = inkOn(colour);
    const number = numberIn(value, { width, height }, this.weights);
    if (number) {
      pen.font = `${number.size}px ${MARK_FONT}`;
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.fillText(number.text, x + width / 2, y + height / 2 + 1);
    } else if (Number.isNaN(value) && width >= 6) {
      pen.fillText("?", x + width / 2 - 3, y + height / 2 + 4);
    } else if (value === null && width >= 6) {
      pen.globalAlpha = 0.55;
      pen.fillRect(x + width * 0.3, y + Math.round(height / 2) - 0.5, width * 0.4, 1);
      pen.globalAlpha = 1;
    }
  }

  #listen() {
    const under = (/** @type {MouseEvent} */ event) => {
      const box = this.canvas.getBoundingClientRect();
      const row = Math.floor((event.clientY - box.top) / this.axes[0].size);
      return [row, Math.floor((event.clientX - box.left) / this.axes[1].size)];
    };
    this.grid.addEventListener("click", (event) => {
      const [row, column] = under(event);
      if (this.values[row]?.[column] !== undefined) this.#choose(row, column);
    });
    this.grid.addEventListener("pointermove", (event) => {
      const [row, column] = under(event);
      const there = this.values[row]?.[column] !== undefined;
      this.grid.title = there ? this.words(row, column) : "";
    });
    this.grid.addEventListener("keydown", (event) => this.#press(event));
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  #choose(row, column) {
    this.#stand(row, column);
    this.choose(row, column, this.words(row, column));
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    /** @type {{[key: string]: [down: number, across: number] | undefined}} */
    const ways = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const way = ways[event.key];
    /** @type {{[key: string]: number | undefined}} */
    const ends = { Home: 0, End: Infinity };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (!way && !(event.key in ends) && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    const by = event.shiftKey ? 10 : 1;
    /** @type {(place: number, count: number) => number} */
    const inside = (place, count) => Math.max(0, Math.min(place, count - 1));
    const row = inside(this.at[0] + (way ? way[0] * by : 0), this.values.length);
    const column = ends[event.key] ?? this.at[1] + (way ? way[1] * by : 0);
    this.#choose(row, inside(column, this.values[0].length));
  }
}

/**
 * @param {HTMLElement} element
 * @param {Axis} axis
 * @param {"width" | "height"} side
 */
function labels(element, { labels, size }, side) {
  const nodes = (labels ?? []).map((text) => {
    const node = make("span", {}, make("span", { text, dir: "auto" }));
    node.style[side] = `${size}px`;
    return node;
  });
  element.style.fontSize = `${Math.max(9, Math.min(12, size - 2))}px`;
  element.replaceChildren(...nodes);
}

/**
 * @param {HTMLElement} element
 * @param {number | null} place
 */
function emphasise(element, place) {
  for (const [n, node] of [...element.children].entries())
    node.classList.toggle("regard-met", n === place);
}

/**
 * @param {number} height
 * @param {number} width
 */
function shapeText(height, width) {
  return `[${height}\u00a0×\u00a0${width}]`;
}

/** @param {Values} values */
function rangeText(values) {
  let least = Infinity;
  let most = -Infinity;
  for (const line of values)
    for (const value of line) {
      if (value === null || !Number.isFinite(value)) continue;
      least = Math.min(least, value);
      most = Math.max(most, value);
    }
  return most < least ? "" : `min\u00a0${stepText(least)} max\u00a0${stepText(most)}`;
}

/** @param {Values} values */
function largestSize(values) {
  let most = 0;
  for (const line of values)
    for (const value of line)
      if (value !== null && Number.isFinite(value)) most = Math.max(most, Math.abs(value));
  return most;
}
