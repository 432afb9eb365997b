// One drawn matrix: the canvas of its cells, the canvas of the marks over and around them, and the
// outline of the bin under the pointer.

import { headName, TILE } from "../data/source.js";
import { placeInTile, Tiles } from "../data/tiles.js";
import {
  colourRange,
  hatchPixels,
  invisiblePixel,
  pixelTable,
  signedRange,
} from "../drawing/colours.js";
import { make, penOf } from "../drawing/dom.js";
import {
  differenceAt,
  differencePixels,
  drawCells,
  effectPixels,
  hatch,
  tilePixels,
} from "./cells.js";
import { binsOf } from "./mapview.js";
import { makeWaiting } from "./waiting.js";

/** @import { Aligned } from "../data/alignment.js" */
/** @import { About, Floats, LayerFacts, MapPlace, Place } from "../data/source.js" */
/** @import { Context } from "../data/selection.js" */
/** @import { Progress } from "./caption.js" */
/** @import { DrawnTile } from "./cells.js" */
/** @import { Extent, MapView } from "./mapview.js" */
/** @import { Span } from "../data/tiles.js" */
/** @import { Point } from "./pointer.js" */

/**
 * Facts of a head's matrix.
 * @typedef {Extent & {itself: boolean, start: number, boundary: number | null, layer: LayerFacts,
 *   name: string}} FrameFacts
 */

/** @typedef {{width: number, height: number, ratio: number}} FrameSize in device pixels */

/**
 * Callbacks of a frame: a tile has come; its canvases are empty and of another size; the numbers of
 * unmasked keys have come.
 * @typedef {{changed: () => void, resized: () => void, counted: (frame: Frame) => void}} Listeners
 */

/** @typedef {Floats[]} Sources what a tile is coloured from: its numbers, or those of two heads */

/**
 * How tiles become pixels; `look` is another where pixels would be.
 * @typedef {{look: string,
 *   pixels: (sources: Sources, row: number, level: number) => Uint32Array}} Colouring
 */

/** @typedef {{look: string, sources: Sources, pixels: Uint32Array}} ColouredTile */

/** @type {MapView} of a frame that nothing was drawn in */
const NOWHERE = { x: 0, y: 0, zoom: 1, level: 0, fit: 1, nearest: 1 };

export const GUTTER = { left: 112, top: 84 }; // CSS pixels, as in style/map.css

const TABLES = {
  light: { ramp: pixelTable(false, false), signed: pixelTable(true, false) },
  dark: { ramp: pixelTable(false, true), signed: pixelTable(true, true) },
};

export class Frame {
  /**
   * @param {Context} context
   * @param {Listeners} tell
   */
  constructor(context, tell) {
    this.context = context;
    this.tell = tell;
    this.cells = make("canvas", { class: "regard-map-cells", "aria-hidden": "true" });
    this.marks = make("canvas", { class: "regard-map-marks", "aria-hidden": "true" });
    this.point = make("span", { class: "regard-map-point", "aria-hidden": "true" });
    this.hover = make("div", { class: "regard-map-hover", hidden: true }, this.point);
    this.title = make("div", { class: "regard-map-title", hidden: true });
    this.waiting = makeWaiting();
    const parts = [this.cells, this.marks, this.hover, this.waiting.element];
    this.plot = make("div", { class: "regard-map-plot" }, ...parts);
    this.element = make("div", { class: "regard-map-frame" }, this.title, this.plot);
    this.where = context.selection.where;
    this.facts = factsOf(context.about, this.where);
    /** @type {Place | null} */
    this.other = null;
    /** @type {FrameFacts | null} */
    this.otherFacts = null;
    /** @type {Aligned} of the tokens with those of the other */
    this.alignment = null;
    this.tiles = new Tiles(context.source, tell.changed);
    this.otherTiles = new Tiles(context.source, tell.changed);
    /** @type {Map<string, ColouredTile>} what the last paint coloured */
    this.coloured = new Map();
    /** @type {Map<string, Float64Array | null>} by head: running sums of unmasked keys */
    this.seen = new Map();
    /** @type {FrameSize} */
    this.size = { width: 0, height: 0, ratio: 1 };
    this.view = NOWHERE;
    this.columns = new Int32Array(0);
    this.rows = new Int32Array(0);
    /** @type {ImageData | null} */
    this.image = null;
    this.pixels = new Uint32Array(0);
    this.paints = 0;
    /** @type {Point | null} where the pointer hovers */
    this.pointer = null;
    this.observer = new ResizeObserver((entries) => this.#resized(entries));
    observePixels(this.observer, this.cells);
    observePixels(this.observer, this.marks);
  }

  /**
   * Which head is drawn, and against which one (or null).
   * @param {Place} where
   * @param {Place | null} other
   * @param {Aligned} alignment of their tokens
   */
  show(where, other, alignment) {
    this.where = where;
    this.other = other;
    this.alignment = other ? alignment : null;
    this.facts = factsOf(this.context.about, where);
    this.otherFacts = other && factsOf(this.context.about, other);
    if (!other) this.otherTiles.end();
  }

  /** @returns {Extent} */
  get extent() {
    return { queries: this.facts.queries, keys: this.facts.keys };
  }

  /**
   * The head, where its tokens have counterparts in the other.
   * @returns {MapPlace}
   */
  get paired() {
    return this.other && this.alignment
      ? { ...this.where, against: this.other.recording }
      : this.where;
  }

  /**
   * Whether none of a bin's pairs has a counterpart in the other head.
   * @param {number} row
   * @param {number} column
   */
  lacks(row, column) {
    const { alignment, view } = this;
    if (!alignment) return false;
    return !alignment.queries.has(row, view.level) || !alignment.keys.has(column, view.level);
  }

  /**
   * Draws the cells of a view, from the tiles that are known.
   * @param {MapView} view
   * @param {boolean} dark
   */
  paint(view, dark) {
    const { width, height } = this.size;
    const { queries, keys } = this.extent;
    this.view = view;
    this.columns = binsOf(view.x, view.zoom, view.level, width, keys);
    this.rows = binsOf(view.y, view.zoom, view.level, height, queries);
    this.#want(view);
    let { image } = this;
    if (image?.width !== width || image.height !== height) {
      image = new ImageData(width, height);
      this.image = image;
      this.pixels = new Uint32Array(image.data.buffer);
    }
    const found = this.#finder(view, dark);
    drawCells(this.pixels, width, this.columns, this.rows, found);
    this.#hatch(dark);
    penOf(this.cells).putImageData(image, 0, 0);
    this.paints++;
    const { x, y, zoom, level } = view;
    Object.assign(this.cells.dataset, { x, y, zoom, level, paints: this.paints });
  }

  /**
   * {row, column} of the bin drawn at a point, or null.
   * @param {Point} point
   */
  binAt({ x, y }) {
    const [row, column] = [this.rows[Math.floor(y)], this.columns[Math.floor(x)]];
    return row >= 0 && column >= 0 ? { row, column } : null;
  }

  /**
   * ln(weight), or the effect, of a bin at the level shown: NaN is masked, undefined not known yet.
   * @param {number} row
   * @param {number} column
   */
  valueAt(row, column) {
    return this.tiles.valueAt(row, column);
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  otherValueAt(row, column) {
    return this.other ? this.otherTiles.valueAt(row, column) : undefined;
  }

  /**
   * The mean number of unmasked keys of a bin's queries, or undefined while it is not known.
   * @param {number} row
   * @param {number} level
   */
  seenBy(row, level) {
    const sums = this.seen.get(headName(this.where));
    if (!sums) return undefined;
    return meanSeen(sums, row, 2 ** level);
  }

  /**
   * Whether the NaN of a bin is no number; where it is not, all of it is masked.
   * @param {number} row
   * @param {number} column
   */
  isLost(row, column) {
    return this.tiles.isLost(row, column);
  }

  /**
   * The same in the other head.
   * @param {number} row
   * @param {number} column
   */
  isOtherLost(row, column) {
    return this.other !== null && this.otherTiles.isLost(row, column);
  }

  /**
   * The difference from the other head in a bin: NaN where both are masked, and where it is no
   * number, undefined while it is not known.
   * @param {number} row
   * @param {number} column
   */
  differenceAt(row, column) {
    const [one, other] = [this.tiles.tileOf(row, column), this.otherTiles.tileOf(row, column)];
    return one && other ? differenceAt(one, other, placeInTile(row, column)) : undefined;
  }

  // Requests the number of unmasked keys of each query, once for each head.
  needSeen() {
    const name = headName(this.where);
    if (this.seen.has(name)) return;
    this.seen.set(name, null);
    this.context.source.visible(this.where).then(
      ({ values }) => {
        const sums = new Float64Array(values.length + 1);
        for (let i = 0; i < values.length; i++) sums[i + 1] = sums[i] + values[i];
        this.seen.set(name, sums);
        if (this.context.selection.usedScale === "uniform") this.tell.changed();
        if (this.pointer) this.tell.counted(this);
      },
      () => this.seen.delete(name),
    );
  }

  /**
   * The progress of both heads.
   * @returns {Progress}
   */
  get progress() {
    const parts = this.other ? [this.tiles, this.otherTiles] : [this.tiles];
    const reads = parts.map((tiles) => tiles.progress.read).filter((read) => read !== null);
    const waits = this.alignment === undefined || !this.#hasColours;
    return {
      read: reads.length ? Math.min(...reads) : null,
      missing: parts.reduce((sum, tiles) => sum + tiles.progress.missing, waits ? 1 : 0),
      error: parts.map((tiles) => tiles.error).find((error) => error) ?? null,
    };
  }

  // Whether the range of colours is known.
  get #hasColours() {
    const { selection } = this.context;
    if (selection.effect) return selection.largestEffect !== undefined;
    return this.other !== null || selection.usedScale !== "uniform" || this.knowsSeen;
  }

  // Whether there is no tile to draw.
  get isBlank() {
    return this.coloured.size === 0;
  }

  get knowsSeen() {
    return Boolean(this.seen.get(headName(this.where)));
  }

  /**
   * Hatches the bins without a counterpart.
   * @param {boolean} dark
   */
  #hatch(dark) {
    const { alignment, view } = this;
    if (!alignment) return;
    const rows = this.rows.map((bin) =>
      Number(bin >= 0 && !alignment.queries.has(bin, view.level)),
    );
    const columns = this.columns.map((bin) =>
      Number(bin >= 0 && !alignment.keys.has(bin, view.level)),
    );
    const inside = { rows: this.rows, columns: this.columns };
    hatch(this.pixels, { rows, columns }, inside, hatchPixels(dark), this.size.ratio);
  }

  // Requests no tiles until it is painted again.
  pause() {
    this.tiles.pause();
    this.otherTiles.pause();
  }

  end() {
    this.observer.disconnect();
    this.tiles.end();
    this.otherTiles.end();
  }

  /** @param {MapView} view */
  #want(view) {
    const { usedPlane, usedScale } = this.context.selection;
    const plane = usedPlane === "mass" ? "mass" : "max";
    const side = 2 ** view.level;
    /** @type {(bins: Int32Array, length: number) => Span} */
    const shown = (bins, length) => {
      const from = Math.max(0, bins[0]);
      const last = bins.findLast((bin) => bin >= 0) ?? -1;
      return [from, Math.min(last + 1, Math.ceil(length / side))];
    };
    if (this.alignment === undefined) return;
    const { queries, keys } = this.facts;
    const [rows, columns] = [shown(this.rows, queries), shown(this.columns, keys)];
    this.tiles.want(this.paired, plane, view.level, rows, columns);
    const on = this.alignment ? this.where.recording : undefined;
    if (this.other) this.otherTiles.want({ ...this.other, on }, plane, view.level, rows, columns);
    else if (usedScale === "uniform") this.needSeen();
  }

  /**
   * The function that gives drawCells the tiles as pixels.
   * @param {MapView} view
   * @param {boolean} dark
   * @returns {(row: number, column: number) => DrawnTile | null}
   */
  #finder(view, dark) {
    const colour = this.#colour(dark);
    const before = this.coloured;
    /** @type {typeof before} */
    const used = new Map();
    /** @type {Map<number, DrawnTile | null>} */
    const answers = new Map();
    const deepest = Math.ceil(Math.log2(Math.max(this.extent.queries, this.extent.keys, 2)));
    /** @type {(row: number, column: number) => DrawnTile | null} */
    const search = (row, column) => {
      for (let above = 0; view.level + above <= deepest; above++) {
        const level = view.level + above;
        const [r, c] = [row >> above, column >> above];
        const sources = this.#sources(level, r, c);
        if (!sources) continue;
        const name = `${level}/${r}/${c}`;
        const known = used.get(name) ?? before.get(name);
        const fresh =
          known?.look === colour.look && known.sources.every((s, i) => s === sources[i]);
        const entry = fresh
          ? known
          : { look: colour.look, sources, pixels: colour.pixels(sources, r, level) };
        used.set(name, entry);
        return { pixels: entry.pixels, above };
      }
      return null;
    };
    this.coloured = used;
    if (!this.#hasColours) return () => null;
    return (row, column) => {
      const name = row * 65536 + column;
      const known = answers.get(name);
      if (known !== undefined) return known;
      const answer = search(row, column);
      answers.set(name, answer);
      return answer;
    };
  }

  /**
   * What a tile is coloured from; null while it is not known.
   * @param {number} level
   * @param {number} row
   * @param {number} column
   * @returns {Sources | null}
   */
  #sources(level, row, column) {
    if (this.alignment === undefined) return null;
    const one = this.tiles.known(level, row, column);
    if (!this.other || !one) return one ? [one] : null;
    const other = this.otherTiles.known(level, row, column);
    return other ? [one, other] : null;
  }

  /**
   * @param {boolean} dark
   * @returns {Colouring}
   */
  #colour(dark) {
    if (this.other) return this.#differenceColour(dark);
    return this.context.selection.effect ? this.#effectColour(dark) : this.#weightColour(dark);
  }

  /**
   * @param {boolean} dark
   * @returns {Colouring}
   */
  #weightColour(dark) {
    const { selection } = this.context;
    const range = colourRange(selection);
    const { ramp: table } = TABLES[dark ? "dark" : "light"];
    const look = { table, invisible: invisiblePixel(dark), ...range };
    const uniform = selection.usedScale === "uniform";
    return {
      look: `${range.low} ${range.high} ${dark} ${selection.usedScale} ${selection.usedPlane} ${headName(this.where)}`,
      pixels: (sources, row, level) => {
        return tilePixels(sources[0].values, look, uniform ? this.#shifts(row, level) : null);
      },
    };
  }

  /**
   * @param {boolean} dark
   * @returns {Colouring}
   */
  #differenceColour(dark) {
    const { span } = signedRange(this.context.selection);
    const { signed: table } = TABLES[dark ? "dark" : "light"];
    const look = { table, invisible: invisiblePixel(dark), span };
    return {
      look: `${span} ${dark} difference`,
      pixels: ([one, other]) => differencePixels(one, other, look),
    };
  }

  /**
   * @param {boolean} dark
   * @returns {Colouring}
   */
  #effectColour(dark) {
    const range = signedRange(this.context.selection);
    const { signed: table } = TABLES[dark ? "dark" : "light"];
    const look = { table, invisible: invisiblePixel(dark), ...range };
    return {
      look: `${range.span} ${range.decades} ${dark} ${headName(this.where)}`,
      pixels: ([{ values }]) => effectPixels(values, look),
    };
  }

  /**
   * The shift of ln(weight) in each row of a tile for × uniform: ln of the unmasked keys of its
   * queries, less ln of the keys in a bin in the plane of mass, which sums over them.
   * @param {number} row
   * @param {number} level
   */
  #shifts(row, level) {
    const bin = this.context.selection.usedPlane === "mass" ? level * Math.LN2 : 0;
    return Float64Array.from({ length: TILE }, (_, r) => {
      const seen = this.seenBy(row * TILE + r, level);
      return seen !== undefined && seen > 0 ? Math.log(seen) - bin : 0;
    });
  }

  /** @param {ResizeObserverEntry[]} entries */
  #resized(entries) {
    for (const entry of entries) {
      const css = entry.contentRect;
      const exact = entry.devicePixelContentBoxSize?.[0];
      const width = exact?.inlineSize ?? Math.round(css.width * devicePixelRatio);
      const height = exact?.blockSize ?? Math.round(css.height * devicePixelRatio);
      const canvas = entry.target === this.cells ? this.cells : this.marks;
      if (canvas.width !== width) canvas.width = width;
      if (canvas.height !== height) canvas.height = height;
      if (canvas === this.cells) {
        const isUsual = Math.abs(width - css.width * devicePixelRatio) <= 1;
        this.size = { width, height, ratio: isUsual ? devicePixelRatio : width / css.width || 1 };
        this.image = null;
      }
    }
    this.tell.resized();
  }
}

/**
 * @param {About} about
 * @param {Place} where
 * @returns {FrameFacts}
 */
export function factsOf(about, { recording, layer }) {
  const { queries, tokens, itself, start, boundary, layers, name } = about.recordings[recording];
  return { queries, keys: tokens, itself, start, boundary, layer: layers[layer], name };
}

/**
 * @param {Float64Array} sums
 * @param {number} row
 * @param {number} side
 */
function meanSeen(sums, row, side) {
  const from = Math.min(row * side, sums.length - 1);
  const to = Math.min(from + side, sums.length - 1);
  return to > from ? (sums[to] - sums[from]) / (to - from) : undefined;
}

/**
 * Device pixels where the browser gives them, so that fractional ratios stay exact.
 * @param {ResizeObserver} observer
 * @param {HTMLCanvasElement} canvas
 */
function observePixels(observer, canvas) {
  try {
    observer.observe(canvas, { box: "device-pixel-content-box" });
  } catch {
    observer.observe(canvas);
  }
}
