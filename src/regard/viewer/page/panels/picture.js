// The view as a picture: a PNG of any resolution, or an SVG with lines and letters that scale.

import { ENTRIES, pixelTable, signedRange } from "../drawing/colours.js";
import { penOf } from "../drawing/dom.js";
import { drawMarks, FILE_FONT, fitted, svgNode, textWidth, writeMarks } from "../drawing/marks.js";
import { withDensity } from "../drawing/png.js";
import { PRINTED } from "../map/axes.js";
import { GUTTER } from "../map/frame.js";
import { layoutOf } from "../map/layout.js";
import { barLabel, barTicks, isSigned } from "./bar.js";
import { panelMarks } from "./panelmarks.js";

/** @import { Context, Selection } from "../data/selection.js" */
/** @import { Mark } from "../drawing/marks.js" */
/** @import { Theme } from "../map/axes.js" */
/** @import { Frame } from "../map/frame.js" */
/** @import { Layout } from "../map/layout.js" */
/** @import { HeadMapView } from "../map/map.js" */
/** @import { Tick } from "./bar.js" */

/** @typedef {{map: HeadMapView, steps: {element: HTMLElement}, lines: {picture: () => Sheet}}} PictureParts */

/**
 * What is saved: `width` in inches, `dpi` pixels per inch of a PNG, `background` of the paper or of
 * the page, `marks`: whether the selection, the rings and the cross-hair are drawn too.
 * @typedef {{kind: "png" | "svg", width: number, dpi: number,
 *   background: "white" | "transparent" | "page", marks: boolean}} PictureChoices
 */

/** @typedef {{width: number, height: number, title: string, marks: Mark[]}} Sheet in CSS pixels */

export const INCH = 96; // CSS pixels
const CAPTION = 62; // CSS pixels below
const CAPTION_SIZE = 11;
const CAPTION_LINE = 15;
const FEW_CELLS = 4096; // are written as rectangles
const BAR_WIDTH = 160;
const WIDE_BAR_WIDTH = 240; // of powers of ten on both sides of 0
const BESIDE_BAR = 300; // CSS pixels: the gutter, and what the bar is
const TICK_SIZE = 9;
const TICK_GAP = 3; // CSS pixels between the numbers of two ticks
const MOST_PIXELS = 16384; // on a side, of any browser's canvas

/**
 * Saves the view: the map with axes, a colour bar and a caption, the steps, or the lines.
 * @param {Context} context
 * @param {PictureParts} parts
 * @param {PictureChoices} choices
 */
export async function savePicture(context, parts, choices) {
  const isMap = context.selection.view === "map";
  const sheet = isMap ? mapSheet(context, parts.map, choices) : panelSheet(context, parts, choices);
  const paper = { white: "#ffffff", transparent: "", page: parts.map.colours.paper };
  const fill = paper[choices.background];
  const blob = await (choices.kind === "svg" ? svgOf : pngOf)(sheet, fill, choices);
  download(blob, `${fileName(context)}.${choices.kind}`);
}

/**
 * Width and height of the picture in CSS pixels.
 * @param {Context} context
 * @param {PictureParts} parts
 */
export function sizeShown({ selection }, { map, steps, lines }) {
  if (selection.view === "map") return pictureSize(map);
  const { width, height } =
    selection.view === "lines" ? lines.picture() : panelMarks(steps.element);
  return { width, height };
}

/**
 * @param {Sheet} sheet
 * @param {string} fill
 * @param {PictureChoices} choices
 */
async function pngOf({ width, height, marks }, fill, choices) {
  const scale = (choices.width * choices.dpi) / width;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  if (!canvas.width || !canvas.height)
    throw new RangeError("less than a pixel; take a larger width or more dpi");
  if (Math.max(canvas.width, canvas.height) > MOST_PIXELS)
    throw new RangeError("more than 16,384 pixels on a side; take a smaller width or fewer dpi");
  const pen = penOf(canvas);
  if (fill) {
    pen.fillStyle = fill;
    pen.fillRect(0, 0, canvas.width, canvas.height);
  }
  pen.scale(scale, scale);
  drawMarks(pen, marks);
  /** @type {Blob | null} */
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!blob) throw new RangeError("too large for this browser; take a smaller width or fewer dpi");
  return withDensity(blob, choices.dpi);
}

/**
 * @param {Sheet} sheet
 * @param {string} fill
 * @param {PictureChoices} choices
 */
async function svgOf({ width, height, title, marks }, fill, choices) {
  const size = { width: `${choices.width}in`, height: `${(choices.width * height) / width}in` };
  const viewBox = `0 0 ${width} ${height}`;
  const svg = svgNode("svg", { ...size, viewBox, "font-family": FILE_FONT });
  svg.append(svgNode("title", {}, title));
  if (fill) svg.append(svgNode("rect", { width, height, fill }));
  writeMarks(svg, marks);
  return new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
}

/**
 * @param {Context} context
 * @param {PictureParts} parts
 * @param {PictureChoices} choices
 * @returns {Sheet}
 */
function panelSheet({ selection }, { steps, lines }, { marks: isMarked }) {
  if (selection.view === "lines") return lines.picture();
  const title = steps.element.querySelector("h2")?.textContent ?? "Steps";
  return { title, ...panelMarks(steps.element, isMarked ? "" : ".regard-outlines") };
}

/**
 * @param {Context} context
 * @param {HeadMapView} map
 * @param {PictureChoices} choices
 * @returns {Sheet}
 */
function mapSheet(context, map, { kind, background, marks: isMarked }) {
  const { width, height, offsets } = pictureSize(map);
  const isPage = background === "page";
  const [theme, dark] = isPage ? [map.colours, map.dark] : [PRINTED, false];
  const ofFrame = (/** @type {Frame} */ frame) => [
    ...cellMarks(frame, layoutOf(frame), kind),
    ...map.marksOf(frame, theme, isMarked),
  ];
  const marks = inColours(map, dark, () =>
    map.shown.flatMap((frame, n) => ofFrame(frame).map((mark) => moved(mark, offsets[n]))),
  );
  const lines = captionLines(context, map, width - GUTTER.left - 8);
  const look = /** @type {const} */ ({ kind: "text", size: CAPTION_SIZE, colour: theme.soft });
  lines.forEach((text, n) => {
    marks.push({ ...look, x: GUTTER.left, y: foot(map) + 20 + n * CAPTION_LINE, text });
  });
  marks.push(...barMarks(context, map, theme, dark));
  return { width, height, title: map.caption.textContent ?? "", marks };
}

/**
 * Draws the cells light or dark for `read`, which copies them, and then as they were.
 * @template Found
 * @param {HeadMapView} map
 * @param {boolean} dark
 * @param {() => Found} read
 */
function inColours(map, dark, read) {
  const paint = (/** @type {boolean} */ dark) => {
    for (const frame of map.shown) frame.paint(frame.view, dark);
  };
  if (dark === map.dark) return read();
  paint(dark);
  try {
    return read();
  } finally {
    paint(map.dark);
  }
}

/** @param {HeadMapView} map */
function pictureSize(map) {
  let width = 0;
  const offsets = map.shown.map((frame) => {
    const offset = width;
    const right = layoutOf(frame).right + map.sums.room;
    width += Math.ceil(Math.max(right, BESIDE_BAR + barWidth(map.selection))) + 8;
    return offset;
  });
  return { width, height: foot(map) + CAPTION + saidAbove(map).length * CAPTION_LINE, offsets };
}

/**
 * Where the matrix, and the sums below it, end and its caption begins.
 * @param {HeadMapView} map
 */
function foot(map) {
  const bottom = Math.max(...map.shown.map((frame) => layoutOf(frame).bottom));
  return Math.ceil(bottom + map.sums.room);
}

/**
 * A mark of a frame that stands further to the right.
 * @param {Mark} mark
 * @param {number} by
 * @returns {Mark}
 */
function moved(mark, by) {
  return mark.kind === "line"
    ? { ...mark, x1: mark.x1 + by, x2: mark.x2 + by }
    : { ...mark, x: mark.x + by };
}

/**
 * What the map shows, and of what: a name that has no room is cut. Below it what is said of effects
 * and of a comparison.
 * @param {Context} context
 * @param {HeadMapView} map
 * @param {number} room in CSS pixels
 */
function captionLines({ selection }, map, room) {
  const { model, name } = selection.recordingFacts;
  const said = [name === model ? "" : model, map.caption.textContent];
  const rest = said.filter((part) => part).join(" · ");
  const named = fitted(name, room - textWidth(` · ${rest}`, CAPTION_SIZE), CAPTION_SIZE);
  const first = [named, rest].filter((part) => part).join(" · ");
  return [first, ...saidAbove(map)].map((line) => fitted(line, room, CAPTION_SIZE));
}

/**
 * The sentences above the map that its colours need.
 * @param {HeadMapView} map
 */
function saidAbove({ selection, says }) {
  if (!selection.compare && !selection.effect) return [];
  return (says.textContent ?? "").split(/(?<=\.) /).filter((sentence) => sentence);
}

/**
 * The colour bar with its ticks.
 * @param {Context} context
 * @param {HeadMapView} map
 * @param {Theme} theme
 * @param {boolean} dark
 * @returns {Mark[]}
 */
function barMarks({ selection }, map, theme, dark) {
  const signed = isSigned(selection);
  const y = foot(map) + 30 + saidAbove(map).length * CAPTION_LINE;
  const box = { x: GUTTER.left, y, width: barWidth(selection), height: 8 };
  const [end, colour] = [box.y + box.height, theme.soft];
  const found = barTicks(selection, signed);
  const named = withRoom(found, box.width);
  const ticks = found.flatMap((tick) => {
    const x = box.x + tick.at * box.width;
    /** @type {Mark[]} */
    const marks = [{ kind: "line", x1: x, x2: x, y1: end, y2: end + 3, colour }];
    const { text } = tick;
    if (named.includes(tick))
      marks.push({ kind: "text", x, y: end + 13, size: TICK_SIZE, align: "middle", colour, text });
    return marks;
  });
  const text = barLabel(selection, signed);
  const canvas = barCanvas(signed, dark);
  return [
    { kind: "image", ...box, canvas },
    { kind: "box", ...box, line: theme.line },
    ...ticks,
    { kind: "text", size: 11, x: box.x + box.width + 16, y: end, colour, text },
  ];
}

/** @param {Selection} selection */
function barWidth(selection) {
  return signedRange(selection).decades ? WIDE_BAR_WIDTH : BAR_WIDTH;
}

/**
 * The ticks whose numbers do not touch each other: the outer ones first, and of two that mirror
 * each other both or neither.
 * @param {Tick[]} ticks
 * @param {number} width of the bar
 */
function withRoom(ticks, width) {
  const out = (/** @type {Tick} */ { at }) => Math.round(1e6 * Math.abs(at - 0.5));
  const half = (/** @type {Tick} */ { text }) => (textWidth(text, TICK_SIZE) + TICK_GAP) / 2;
  const touch = (/** @type {Tick} */ one, /** @type {Tick} */ other) =>
    one !== other && Math.abs(one.at - other.at) * width < half(one) + half(other);
  /** @type {Tick[]} */
  let kept = [];
  for (const distance of [...new Set(ticks.map(out))].sort((a, b) => b - a)) {
    const more = [...kept, ...ticks.filter((tick) => out(tick) === distance)];
    if (!more.some((one) => more.some((other) => touch(one, other)))) kept = more;
  }
  return kept;
}

/**
 * @param {boolean} signed
 * @param {boolean} dark
 */
function barCanvas(signed, dark) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [ENTRIES, 1];
  const image = new ImageData(ENTRIES, 1);
  new Uint32Array(image.data.buffer).set(pixelTable(signed, dark));
  penOf(canvas).putImageData(image, 0, 0);
  return canvas;
}

/**
 * Cells: in an SVG rectangles where they are few, else one embedded picture.
 * @param {Frame} frame
 * @param {Layout} layout
 * @param {"png" | "svg"} kind
 * @returns {Mark[]}
 */
function cellMarks(frame, layout, kind) {
  const { size, view } = frame;
  const [columns, rows] = [runsOf(frame.columns), runsOf(frame.rows)];
  const [right, bottom] = [layout.right - GUTTER.left, layout.bottom - GUTTER.top];
  const isPicture = kind === "png" || view.level > 0 || frame.alignment !== null;
  if (isPicture || columns.length * rows.length > FEW_CELLS) {
    const canvas = copied(frame.cells, right * size.ratio, bottom * size.ratio);
    const [width, height] = [canvas.width / size.ratio, canvas.height / size.ratio];
    return [{ kind: "image", x: GUTTER.left, y: GUTTER.top, width, height, canvas }];
  }
  /** @type {(start: number, bin: number, end: number) => number} */
  const edge = (start, bin, end) =>
    Math.max(0, Math.min(end, ((bin - start) * view.zoom) / size.ratio));
  return rows.flatMap((row) =>
    columns.map((column) => {
      const pixel = frame.pixels[row.from * size.width + column.from];
      const [r, g, b] = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
      const [x, y] = [edge(view.x, column.bin, right), edge(view.y, row.bin, bottom)];
      const width = edge(view.x, column.bin + 1, right) - x;
      const height = edge(view.y, row.bin + 1, bottom) - y;
      const box = { x: x + GUTTER.left, y: y + GUTTER.top, width, height };
      return { kind: "box", ...box, colour: `rgb(${r},${g},${b})`, crisp: true };
    }),
  );
}

/**
 * @param {HTMLCanvasElement} cells
 * @param {number} width
 * @param {number} height
 */
function copied(cells, width, height) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height].map(Math.round);
  penOf(canvas).drawImage(cells, 0, 0);
  return canvas;
}

/**
 * [{bin, from}]: each bin, and the first pixel that shows it.
 * @param {Int32Array} bins
 */
function runsOf(bins) {
  /** @type {{bin: number, from: number}[]} */
  const runs = [];
  bins.forEach((bin, from) => {
    if (bin >= 0 && runs.at(-1)?.bin !== bin) runs.push({ bin, from });
  });
  return runs;
}

/** @param {Context} context */
function fileName({ selection }) {
  const stem = (selection.recordingFacts.name || "map").replace(/\.safetensors$/, "");
  return `${stem.replace(/[^\p{L}\p{N}_-]+/gu, "_").slice(0, 80)}-${selection.name}`;
}

/**
 * @param {Blob} blob
 * @param {string} name
 */
function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
