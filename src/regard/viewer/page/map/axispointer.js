// Clicks on the axes of a frame: a query on the left, a key above.

import { lookFrom } from "../data/choose.js";
import { extendTo, toggleQuery } from "../data/extend.js";
import { unlessSaid } from "../data/watch.js";
import { modifiersOf } from "../drawing/dom.js";
import { GUTTER } from "./frame.js";

/** @import { Context } from "../data/selection.js" */
/** @import { Frame } from "./frame.js" */

/**
 * @param {Frame} frame
 * @param {Context} context
 */
export function listenToAxes(frame, context) {
  const { selection } = context;
  frame.plot.addEventListener("click", (event) => {
    if (event.target !== frame.plot) return;
    const { query, key } = tokenAt(frame, event);
    const { shift, control } = modifiersOf(event);
    if (key !== null) selection.set({ key });
    if (query === null) return;
    const choose = shift ? extendTo : control ? toggleQuery : lookFrom;
    choose(context, query).catch(unlessSaid);
  });
}

/**
 * The query, or the key, beside which a click was; null where there is none.
 * @param {Frame} frame
 * @param {MouseEvent} event
 */
function tokenAt({ plot, view, size, facts }, event) {
  const box = plot.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left - GUTTER.left, event.clientY - box.top - GUTTER.top];
  /** @type {(start: number, pixels: number, count: number) => number | null} */
  const at = (start, pixels, count) => {
    const token = Math.floor(start + (pixels * size.ratio) / view.zoom);
    return pixels >= 0 && token < count ? token : null;
  };
  const query = x < 0 ? at(view.y, y, facts.queries) : null;
  const key = y < 0 ? at(view.x, x, facts.keys) : null;
  return { query, key };
}
