// Where tokens lie in a frame of the map.

import { GUTTER } from "./frame.js";
import { endPixel } from "./mapview.js";

/** @import { Frame, FrameFacts, FrameSize } from "./frame.js" */
/** @import { Extent, MapView } from "./mapview.js" */

/** @typedef {[from: number, to: number]} Ends of a stretch of tokens, or of CSS pixels */

// A frame's geometry in CSS pixels: where tokens lie, and how far the matrix reaches.
export class Layout {
  /**
   * @param {MapView} view
   * @param {FrameSize} size
   * @param {Extent} extent
   * @param {FrameFacts} facts
   */
  constructor(view, size, extent, facts) {
    const { width, height, ratio } = size;
    this.view = view;
    this.facts = facts;
    this.cell = view.zoom / ratio;
    this.left = GUTTER.left;
    this.top = GUTTER.top;
    this.right = GUTTER.left + endPixel(view.x, view.zoom, view.level, width, extent.keys) / ratio;
    this.bottom =
      GUTTER.top + endPixel(view.y, view.zoom, view.level, height, extent.queries) / ratio;
    /** @type {(start: number, pixels: number, length: number) => number} */
    const last = (start, pixels, length) =>
      Math.min(length - 1, Math.floor(start + pixels / view.zoom));
    /** @type {Ends} the first and the last in view */
    this.keys = [Math.floor(view.x), last(view.x, width, extent.keys)];
    /** @type {Ends} */
    this.queries = [Math.floor(view.y), last(view.y, height, extent.queries)];
  }

  /**
   * The left edge of a key, and the upper edge of a query.
   * @param {number} key
   */
  xOf(key) {
    return this.left + (key - this.view.x) * this.cell;
  }

  /** @param {number} query */
  yOf(query) {
    return this.top + (query - this.view.y) * this.cell;
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  shows(x, y) {
    return x >= this.left && x <= this.right && y >= this.top && y <= this.bottom;
  }
}

/** @param {Frame} frame */
export function layoutOf({ view, size, extent, facts }) {
  return new Layout(view, size, extent, facts);
}

/**
 * The position of a query: that in the text where it is one of the keys.
 * @param {number} query
 * @param {{itself: boolean, start: number}} facts
 */
export function positionOf(query, { itself, start }) {
  return itself ? query + start : query;
}
