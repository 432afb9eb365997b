// The outline of the bin under the pointer, in every frame that has it.

import { spanOf } from "./axes.js";
import { GUTTER } from "./frame.js";

/** @import { AxisTexts } from "./axes.js" */
/** @import { Frame } from "./frame.js" */

/** @typedef {{row: number, column: number}} Bin */

/**
 * The bin under the pointer, and what is known of it.
 * @typedef {Bin & {frame: Frame, level: number, value: number | undefined, seen: boolean}} Hovered
 */

/**
 * @param {Hovered | null} one
 * @param {Hovered | null} other
 */
export function isSameHover(one, other) {
  if (!one || !other) return one === other;
  /** @type {(keyof Hovered)[]} */
  const names = ["frame", "row", "column", "level", "value", "seen"];
  return names.every((name) => Object.is(one[name], other[name]));
}

/**
 * @param {Hovered | null} one
 * @param {Hovered | null} other
 */
export function isSameBin(one, other) {
  if (!one || !other) return one === other;
  return isSameHover(one, { ...other, value: one.value, seen: one.seen });
}

/**
 * Puts the frame's outline around a bin, by words around theirs, or hides it.
 * @param {Frame} frame
 * @param {Bin | null} bin
 * @param {AxisTexts | null} texts
 */
export function outline(frame, bin, texts) {
  frame.hover.hidden = !bin;
  if (!bin) return;
  const { view, size } = frame;
  const side = (2 ** view.level * view.zoom) / size.ratio;
  /** @type {(side: "keys" | "queries", bin: number, start: number) => [at: number, length: number]} */
  const reach = (axis, place, start) => {
    const [from, to] = view.level === 0 ? spanOf(texts, axis, place) : [place, place];
    const length = (to - from + 1) * side;
    const grown = Math.max(length, 5);
    return [from * side - (start * view.zoom) / size.ratio - (grown - length) / 2, grown];
  };
  const [x, width] = reach("keys", bin.column, view.x);
  const [y, height] = reach("queries", bin.row, view.y);
  Object.assign(frame.hover.style, { width: `${width}px`, height: `${height}px` });
  frame.hover.style.translate = `${GUTTER.left + x}px ${GUTTER.top + y}px`;
  frame.point.classList.toggle("regard-before-it", 2 * x > size.width / size.ratio);
}
