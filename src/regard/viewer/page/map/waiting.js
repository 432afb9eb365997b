// What stands in a frame until its first tile comes: the shape of its matrix, and what is awaited.

import { make } from "../drawing/dom.js";

/** @import { Frame } from "./frame.js" */
/** @import { Layout } from "./layout.js" */

/** A frame's element: {element, show(frame, layout)}. */
export function makeWaiting() {
  const words = make("p");
  const shape = make("div", { class: "regard-map-shape" });
  const element = make("div", { class: "regard-map-waiting", hidden: true }, shape, words);
  /** @type {(frame: Frame, layout: Layout) => void} */
  const show = (frame, { left, top, right, bottom }) => {
    element.hidden = !frame.isBlank;
    if (!frame.isBlank) return;
    const { error } = frame.progress;
    element.classList.toggle("regard-failed", Boolean(error));
    words.textContent = error ? "no response, trying again" : waitingText(frame);
    shape.style.clipPath = outlineOf(frame);
    const [width, height] = [`${right - left}px`, `${bottom - top}px`];
    Object.assign(element.style, { left: `${left}px`, top: `${top}px`, width, height });
  };
  return { element, show };
}

/** @param {Frame} frame */
function waitingText({ facts }) {
  const { samples } = facts.layer;
  return samples > 1 ? `reading the first of ${samples} samples of the rows` : "reading the rows";
}

/**
 * A triangle where the head is causal.
 * @param {Frame} frame
 */
function outlineOf({ facts }) {
  if (!facts.layer.causal) return "none";
  const first = facts.itself ? (100 * facts.start) / facts.keys : 0;
  return `polygon(0 0, ${first}% 0, 100% 100%, 0 100%)`;
}
