// Lines, texts and rings as a list, drawn on a canvas or written as SVG: the export equals the
// screen. Units are CSS pixels; `turn` is in degrees.

import { penOf } from "./dom.js";

/** @typedef {{x: number, y: number, width: number, height: number}} Box */

/** @typedef {{alpha?: number, colour?: string}} Look */

/**
 * @typedef {Look & {kind: "text", x: number, y: number, text: string, colour: string,
 *   turn?: number, align?: "start" | "middle" | "end", halo?: string, size?: number, weight?: number}} TextMark
 */

/**
 * @typedef {Look & {kind: "line", x1: number, y1: number, x2: number, y2: number, colour: string,
 *   width?: number, dash?: readonly number[]}} LineMark
 */

/**
 * `colour` fills it, `line` goes around it; `crisp`: its neighbours touch it.
 * @typedef {Look & Box & {kind: "box", line?: string, stroke?: number, round?: number,
 *   crisp?: boolean}} BoxMark
 */

/** @typedef {Look & Box & {kind: "image", canvas: HTMLCanvasElement}} ImageMark */

/**
 * @typedef {Look & {kind: "ring", x: number, y: number, radius: number, colour: string,
 *   width?: number}} RingMark
 */

/** @typedef {TextMark | LineMark | BoxMark | ImageMark | RingMark} Mark */

/** @typedef {{[name: string]: string | number | undefined}} Attributes */

// Of SVG files: fonts that their readers have.
export const FILE_FONT =
  'Helvetica, Arial, "Liberation Sans", "Noto Sans", "DejaVu Sans", sans-serif';
export const MARK_FONT = 'system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif';
const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
/** @type {CanvasRenderingContext2D | null} */
let measuring = null;

/**
 * @param {string} text
 * @param {number} [size]
 * @param {number} [weight]
 */
export function textWidth(text, size = 11, weight = 400) {
  measuring ??= penOf(document.createElement("canvas"));
  measuring.font = fontOf({ size, weight });
  return measuring.measureText(text).width;
}

/**
 * The text, cut with … where it is wider than `width`; empty where not even a letter fits.
 * @param {string} text
 * @param {number} width
 * @param {number} [size]
 * @param {number} [weight]
 */
export function fitted(text, width, size = 11, weight = 400) {
  if (textWidth(text, size, weight) <= width) return text;
  const letters = [...text];
  let [low, high] = [0, letters.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (textWidth(`${letters.slice(0, middle).join("")}…`, size, weight) <= width) low = middle;
    else high = middle - 1;
  }
  return low ? `${letters.slice(0, low).join("")}…` : "";
}

export const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/; // Hebrew, Arabic, and others

/**
 * Isolated: right-to-left letters do not move the text beside them.
 * @param {string} text
 */
export function isolated(text) {
  return `\u2068${text}\u2069`;
}

/** @param {{size?: number, weight?: number}} look */
function fontOf({ size = 11, weight = 400 }) {
  return `${weight} ${size}px ${MARK_FONT}`;
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {readonly Mark[]} marks
 */
export function drawMarks(pen, marks) {
  for (const mark of marks) {
    pen.save();
    pen.globalAlpha = mark.alpha ?? 1;
    drawMark(pen, mark);
    pen.restore();
  }
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {Mark} mark
 */
function drawMark(pen, mark) {
  switch (mark.kind) {
    case "text":
      return drawText(pen, mark);
    case "line":
      return drawLine(pen, mark);
    case "box":
      return drawBox(pen, mark);
    case "image":
      // Enlarged cells stay squares; of those that are made smaller, each counts.
      pen.imageSmoothingEnabled = pen.getTransform().a * mark.width < 0.999 * mark.canvas.width;
      return pen.drawImage(mark.canvas, mark.x, mark.y, mark.width, mark.height);
    case "ring":
      return drawRing(pen, mark);
  }
}

/** @type {Record<"start" | "middle" | "end", CanvasTextAlign>} */
const ALIGNED = { start: "left", middle: "center", end: "right" };

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {TextMark} mark
 */
function drawText(pen, mark) {
  const { x, y, text, turn = 0, align = "start", colour, halo } = mark;
  pen.translate(x, y);
  pen.rotate((turn * Math.PI) / 180);
  pen.font = fontOf(mark);
  pen.direction = "ltr";
  pen.textAlign = ALIGNED[align];
  pen.textBaseline = "alphabetic";
  if (halo) {
    [pen.strokeStyle, pen.lineWidth, pen.lineJoin] = [halo, 4, "round"];
    pen.strokeText(text, 0, 0);
  }
  pen.fillStyle = colour;
  pen.fillText(text, 0, 0);
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {LineMark} mark
 */
function drawLine(pen, { x1, y1, x2, y2, colour, width = 1, dash }) {
  [pen.strokeStyle, pen.lineWidth] = [colour, width];
  if (dash) pen.setLineDash(dash);
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {BoxMark} mark
 */
function drawBox(pen, { x, y, width, height, colour, line, stroke = 1, round = 0 }) {
  pen.beginPath();
  pen.roundRect(x, y, width, height, round);
  if (colour) {
    pen.fillStyle = colour;
    pen.fill();
  }
  if (line) {
    [pen.strokeStyle, pen.lineWidth] = [line, stroke];
    pen.stroke();
  }
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {RingMark} mark
 */
function drawRing(pen, { x, y, radius, colour, width = 2 }) {
  [pen.strokeStyle, pen.lineWidth] = [colour, width];
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.stroke();
}

/**
 * Appends the marks to an SVG element.
 * @param {SVGElement} parent
 * @param {readonly Mark[]} marks
 */
export function writeMarks(parent, marks) {
  for (const mark of marks) {
    const node = writtenMark(mark);
    if (mark.alpha !== undefined) node.setAttribute("opacity", String(mark.alpha));
    parent.append(node);
  }
}

// What XML has no place for, in names of files and models too.
const FORBIDDEN = /[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\u{10000}-\u{10FFFF}]/gu;

/**
 * @param {string} tag
 * @param {Attributes} attributes
 * @param {string} [text]
 */
export function svgNode(tag, attributes, text) {
  const node = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes))
    if (value !== undefined)
      node.setAttribute(name, typeof value === "number" ? shortNumber(value) : value);
  if (text !== undefined) node.textContent = text.replace(FORBIDDEN, "\ufffd");
  return node;
}

/** @param {number} n */
function shortNumber(n) {
  return String(Math.round(n * 100) / 100);
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Box} box
 */
export function imageNode(canvas, { x, y, width, height }) {
  const href = canvas.toDataURL("image/png");
  return svgNode("image", {
    x,
    y,
    width,
    height,
    preserveAspectRatio: "none",
    "image-rendering": "pixelated",
    href,
  });
}

/** @param {Mark} mark */
function writtenMark(mark) {
  switch (mark.kind) {
    case "text":
      return writtenText(mark);
    case "line":
      return writtenLine(mark);
    case "box":
      return writtenBox(mark);
    case "image":
      return imageNode(mark.canvas, mark);
    case "ring":
      return writtenRing(mark);
  }
}

/** @param {TextMark} mark */
function writtenText({ x, y, text, turn = 0, align = "start", colour, halo, size, weight }) {
  const outline = halo && {
    stroke: halo,
    "stroke-width": 4,
    "stroke-linejoin": "round",
    "paint-order": "stroke",
  };
  return svgNode(
    "text",
    {
      x,
      y,
      fill: colour,
      "font-size": size ?? 11,
      "font-weight": weight ?? 400,
      "text-anchor": align,
      transform: turn ? `rotate(${turn} ${shortNumber(x)} ${shortNumber(y)})` : undefined,
      ...(outline || {}),
    },
    text,
  );
}

/** @param {LineMark} mark */
function writtenLine({ x1, y1, x2, y2, colour, width = 1, dash }) {
  return svgNode("line", {
    x1,
    y1,
    x2,
    y2,
    stroke: colour,
    "stroke-width": width,
    "stroke-dasharray": dash?.join(" "),
  });
}

/** @param {BoxMark} mark */
function writtenBox({ x, y, width, height, colour = "none", line, stroke = 1, round = 0, crisp }) {
  return svgNode("rect", {
    x,
    y,
    width,
    height,
    rx: round || undefined,
    "shape-rendering": crisp ? "crispEdges" : undefined,
    fill: colour,
    stroke: line,
    "stroke-width": line && stroke,
  });
}

/** @param {RingMark} mark */
function writtenRing({ x, y, radius, colour, width = 2 }) {
  return svgNode("circle", {
    cx: x,
    cy: y,
    r: radius,
    fill: "none",
    stroke: colour,
    "stroke-width": width,
  });
}
