// A panel of the page as marks: its words, canvases and boxes, also those scrolled out of view.

import { isolated, RIGHT_TO_LEFT } from "../drawing/marks.js";

/** @import { Box, Mark } from "../drawing/marks.js" */

/** @typedef {(box: DOMRect) => Box} Placed in the panel */

/**
 * {width, height, marks}, in CSS pixels of the panel's whole content; `without`: a selector of what
 * is left out.
 * @param {HTMLElement} element
 * @param {string} [without]
 */
export function panelMarks(element, without = "") {
  element.classList.add("regard-pictured"); // nothing scrolls
  const origin = element.getBoundingClientRect();
  const [left, top] = [-origin.left, -origin.top];
  /** @type {Placed} */
  const placed = ({ x, y, width, height }) => ({ x: x + left, y: y + top, width, height });
  /** @type {Mark[]} */
  const marks = [];
  const add = (/** @type {Element} */ parent) => {
    for (const node of parent.childNodes) {
      if (node instanceof Text) marks.push(...wordMarks(node, parent, placed));
      else if (node instanceof Element && isShown(node) && !(without && node.matches(without))) {
        marks.push(...boxMarks(node, placed));
        add(node);
      }
    }
  };
  add(element);
  const { scrollWidth: width, scrollHeight: height } = element;
  element.classList.remove("regard-pictured");
  return { width, height, marks };
}

/** @param {Element} node */
function isShown(node) {
  const isOpen = getComputedStyle(node).display === "contents"; // has no box, but what is in it
  return !node.classList.contains("regard-hidden") && (isOpen || node.checkVisibility());
}

/**
 * @param {Element} node
 * @param {Placed} placed
 * @returns {Mark[]}
 */
function boxMarks(node, placed) {
  const box = placed(node.getBoundingClientRect());
  if (node instanceof HTMLCanvasElement)
    return node.width && node.height ? [{ kind: "image", canvas: node, ...box }] : [];
  const style = getComputedStyle(node);
  const stroke = parseFloat(style.borderTopWidth);
  const colour = isClear(style.backgroundColor) ? undefined : style.backgroundColor;
  if (!colour && !stroke) return [];
  const line = stroke ? style.borderTopColor : undefined;
  const round = parseFloat(style.borderTopLeftRadius) || 0;
  return [{ kind: "box", ...box, colour, line, stroke, round }];
}

/** @param {string} colour */
function isClear(colour) {
  return colour === "transparent" || /^rgba.*, 0\)$/.test(colour);
}

/**
 * Each word at its place on the page; the labels of columns run upwards.
 * @param {Text} node
 * @param {Element} parent
 * @param {Placed} placed
 * @returns {Mark[]}
 */
function wordMarks(node, parent, placed) {
  const style = getComputedStyle(parent);
  const size = parseFloat(style.fontSize);
  const weight = Number(style.fontWeight);
  const look = /** @type {const} */ ({ kind: "text", colour: style.color, size, weight });
  const isUpright = parent.closest(".regard-column-labels") !== null;
  const range = document.createRange();
  return [...node.data.matchAll(/\S+/g)].flatMap(({ index, 0: text }) => {
    range.setStart(node, index);
    range.setEnd(node, index + text.length);
    const { x, y, width, height } = placed(range.getBoundingClientRect());
    if (!width || !height) return [];
    const middle = 0.35 * size; // from the middle of a line to the foot of its letters
    const own = { ...look, text: RIGHT_TO_LEFT.test(text) ? isolated(text) : text };
    if (isUpright) return [{ ...own, x: x + width / 2 + middle, y: y + height, turn: -90 }];
    return [{ ...own, x, y: y + height / 2 + middle }];
  });
}
