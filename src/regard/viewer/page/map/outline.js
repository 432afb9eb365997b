// The outline of the bin under the pointer, in every frame that has it.

import { GUTTER } from "./frame.js";

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
 * Puts the frame's outline around a bin, or hides it.
 * @param {Frame} frame
 * @param {Bin | null} bin
 */
export function outline(frame, bin) {
  frame.hover.hidden = !bin;
  if (!bin) return;
  const { view, size } = frame;
  const side = (2 ** view.level * view.zoom) / size.ratio;
  /** @type {(bin: number, start: number) => number} */
  const at = (bin, start) => bin * side - (start * view.zoom) / size.ratio;
  const grown = Math.max(side, 5);
  const [x, y] = [at(bin.column, view.x), at(bin.row, view.y)];
  const off = (grown - side) / 2;
  frame.hover.style.width = `${grown}px`;
  frame.hover.style.height = `${grown}px`;
  frame.hover.style.translate = `${GUTTER.left + x - off}px ${GUTTER.top + y - off}px`;
}
