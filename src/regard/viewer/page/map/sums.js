// Row sums beside the map and column sums below it, as bars that stand by their cells.

import { headName } from "../data/source.js";
import { unlessSaid } from "../data/watch.js";
import { make } from "../drawing/dom.js";
import { countText, readText, timesText } from "../drawing/numbers.js";
import { GUTTER } from "./frame.js";
import { layoutOf, positionOf } from "./layout.js";

/** @import { Context } from "../data/selection.js" */
/** @import { Floats, Place } from "../data/source.js" */
/** @import { BoxMark, Mark } from "../drawing/marks.js" */
/** @import { AxisTexts, Theme } from "./axes.js" */
/** @import { Frame } from "./frame.js" */
/** @import { Ends, Layout } from "./layout.js" */

/** @typedef {{rows: Float32Array, columns: Float32Array, most: number, coverage: number}} KnownSums */

const ROOM = 46; // CSS pixels beside the cells, as in style/map.css
const LONGEST = 36; // of a bar
const THICKEST = 7;
const APART = 6; // from the cells
const SUMS_AGAIN_MS = 500;
const ABOUT =
  "Row sums, right: 1, or less where a sink takes some. Column sums, below: the weight \
that each key receives from all queries";

// `changed()`: others are known.
export class MapSums {
  /**
   * @param {Context} context
   * @param {() => void} changed
   */
  constructor(context, changed) {
    this.context = context;
    this.changed = changed;
    /** @type {Map<string, KnownSums | null>} by head; null while requested */
    this.known = new Map();
    this.ended = false;
    /** @type {() => void} says anew what is under the pointer */
    this.again = () => {};
    const { selection } = context;
    const onclick = () => selection.set({ sums: selection.sums ? "" : "shown" });
    const look = { type: "button", class: "regard-button", text: "sums", title: ABOUT };
    this.button = make("button", { ...look, onclick });
    this.label = make("div", { class: "regard-sums-label", hidden: true });
  }

  // CSS pixels that the bars take beside and below the cells.
  get room() {
    return this.context.selection.sums && !this.#none ? ROOM : 0;
  }

  // Why there are no sums of what is shown, or nothing.
  get #none() {
    const { effect, compare, otherWhere } = this.context.selection;
    if (effect) return "Sums are those of weights";
    return compare === "difference" && otherWhere ? "Sums are those of one head" : "";
  }

  show() {
    this.button.disabled = this.#none !== "";
    this.button.title = this.#none || ABOUT;
    this.button.setAttribute("aria-pressed", String(this.room > 0));
    this.label.hidden = true;
    this.again = () => {};
  }

  end() {
    this.ended = true;
  }

  /**
   * The bars of a frame; none of a difference, and none before they are known.
   * @param {Frame} frame
   * @param {Layout} layout
   * @param {Theme} theme
   * @returns {Mark[]}
   */
  marks(frame, layout, theme) {
    const sums = this.#of(frame);
    if (!sums) return [];
    const { level } = frame.view;
    const look = /** @type {const} */ ({ kind: "box", colour: theme.bar, alpha: 0.75 });
    const text = /** @type {const} */ ({ kind: "text", size: 10, colour: theme.soft });
    const [x, y] = [layout.right + APART, layout.bottom + APART];
    /** @type {BoxMark[]} */
    const rows = barsOf(sums.rows, layout.queries, level, meanIn).map(([from, to, sum]) => {
      const [top, bottom] = within(layout.yOf(from), layout.yOf(to), layout.top, layout.bottom);
      return { ...look, x, y: top, width: LONGEST * Math.min(1, sum), height: bottom - top };
    });
    /** @type {BoxMark[]} */
    const columns = barsOf(sums.columns, layout.keys, level, mostIn).map(([from, to, sum]) => {
      const [left, right] = within(layout.xOf(from), layout.xOf(to), layout.left, layout.right);
      return { ...look, x: left, y, width: right - left, height: (LONGEST * sum) / sums.most };
    });
    const most = `longest ${timesText(sums.most)}`;
    return [
      ...[...rows, ...columns].filter(({ width, height }) => width > 0 && height > 0),
      { ...text, x, y: layout.top - 6, text: "sum" },
      { ...text, x: layout.left - 8, y: y + 9, align: "end", text: "received" },
      { ...text, x: layout.left - 8, y: y + 21, align: "end", text: most },
    ];
  }

  /**
   * Says the sum under the pointer, and writes it beside it.
   * @param {Frame} frame
   * @param {AxisTexts | null} texts
   * @param {MouseEvent | null} event
   */
  hover(frame, texts, event) {
    const words = event && this.#wordsAt(frame, texts, event);
    this.label.hidden = !words;
    if (!words) return;
    const box = frame.plot.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    this.label.textContent = words;
    frame.plot.append(this.label);
    this.label.style.right = `${box.width - Math.max(x - 8, this.label.offsetWidth)}px`;
    this.label.style.bottom = `${box.height - y + 8}px`;
    this.context.say(words);
  }

  /**
   * @param {Frame} frame
   * @param {AxisTexts | null} texts
   * @param {MouseEvent} event
   */
  #wordsAt(frame, texts, event) {
    const sums = this.#of(frame);
    if (!sums) return "";
    const { view, facts } = frame;
    const layout = layoutOf(frame);
    const box = frame.plot.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const query = Math.floor(view.y + (y - GUTTER.top) / layout.cell);
    const key = Math.floor(view.x + (x - GUTTER.left) / layout.cell);
    const read = sums.coverage < 1 ? ` (${readText(sums.coverage)} of rows read)` : "";
    /** @type {(side: "keys" | "queries", n: number) => string} */
    const named = (side, n) => (texts ? ` «${texts[side].label(n, 24)}»` : "");
    if (x > layout.right && y >= layout.top && y <= layout.bottom && query in sums.rows) {
      const place = countText(positionOf(query, facts));
      return `query ${place}${named("queries", query)}: weights sum to ${sumText(sums.rows[query], sums.coverage)}${read}`;
    }
    if (y > layout.bottom && x >= layout.left && x <= layout.right && key in sums.columns) {
      const sum = sumText(sums.columns[key], 1);
      return `key ${countText(key)}${named("keys", key)}: receives ${sum} from all queries${read}`;
    }
    return "";
  }

  /**
   * Those of a frame's head, by tokens, requested where they are not known.
   * @param {Frame} frame
   */
  #of(frame) {
    if (!this.room || frame.other) return null;
    const where = { ...frame.where, unit: undefined };
    const name = headName(where);
    if (!this.known.has(name)) {
      this.known.set(name, null);
      this.#request(name, where);
    }
    return this.known.get(name) ?? null;
  }

  /**
   * @param {string} name
   * @param {Place} where
   */
  #request(name, where) {
    const keep = (/** @type {Floats} */ { values, coverage }) => {
      if (this.ended) return;
      const { queries } = this.context.about.recordings[where.recording];
      const columns = values.subarray(queries);
      const most = columns.reduce((most, sum) => (sum > most ? sum : most), 1e-30);
      this.known.set(name, { rows: values.subarray(0, queries), columns, most, coverage });
      if (coverage < 1) setTimeout(again, SUMS_AGAIN_MS);
      this.changed();
      this.again();
    };
    const again = () => {
      const { view } = this.context.selection;
      if (this.room && view === "map") this.#request(name, where);
      else this.known.delete(name); // to be requested where sums are shown again
    };
    this.context.source.sums(where).then(keep, (error) => {
      this.known.delete(name);
      unlessSaid(error);
    });
  }
}

/**
 * [from, to, sum] of each bin of tokens in view.
 * @param {Float32Array} sums
 * @param {Ends} shown
 * @param {number} level
 * @param {(part: Float32Array) => number} join
 */
function barsOf(sums, [first, last], level, join) {
  const side = 2 ** level;
  /** @type {[from: number, to: number, sum: number][]} */
  const bars = [];
  for (let bin = Math.floor(first / side); bin * side <= last; bin++) {
    const [from, to] = [bin * side, (bin + 1) * side];
    bars.push([from, to, join(sums.subarray(from, to))]);
  }
  return bars;
}

/** @param {Float32Array} part */
function meanIn(part) {
  return part.reduce((sum, x) => sum + x, 0) / part.length;
}

/** @param {Float32Array} part */
function mostIn(part) {
  return part.reduce((most, x) => Math.max(most, x), 0);
}

/**
 * The ends of a bar that is as thick as its cell, or thinner in its middle, and in whole pixels, so
 * that neighbours do not overlap.
 * @param {number} from
 * @param {number} to
 * @param {number} least
 * @param {number} most
 */
function within(from, to, least, most) {
  const inset = Math.max(0, (to - from - THICKEST) / 2);
  return [
    Math.max(Math.round(from + inset), Math.round(least)),
    Math.min(Math.round(to - inset), Math.round(most)),
  ];
}

/**
 * @param {number} sum
 * @param {number} coverage
 */
function sumText(sum, coverage) {
  if (Number.isNaN(sum)) return coverage < 1 ? "…" : "NaN";
  return timesText(sum);
}

/**
 * @param {Frame} frame
 * @param {MapSums} sums
 * @param {() => AxisTexts | null} texts
 */
export function listenToSums(frame, sums, texts) {
  frame.plot.addEventListener("pointermove", (event) => {
    sums.again = () => sums.hover(frame, texts(), event);
    sums.again();
  });
  frame.plot.addEventListener("pointerleave", () => {
    sums.again = () => {};
    sums.hover(frame, null, null);
  });
}
