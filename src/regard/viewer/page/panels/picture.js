// The view as a picture: a PNG, or an SVG with lines and letters that scale.

import { ENTRIES, pixelTable } from "../drawing/colours.js";
import { penOf } from "../drawing/dom.js";
import { drawMarks, imageNode, MARK_FONT, svgNode, writeMarks } from "../drawing/marks.js";
import { GUTTER } from "../map/frame.js";
import { barText } from "./bar.js";
import { panelMarks } from "./panelmarks.js";

/** @import { Context } from "../data/selection.js" */
/** @import { Mark } from "../drawing/marks.js" */
/** @import { Frame } from "../map/frame.js" */
/** @import { HeadMapView } from "../map/map.js" */

/** @typedef {{map: HeadMapView, steps: {element: HTMLElement}, lines: {picture: () => PanelPicture}}} PictureParts */

/** @typedef {{width: number, height: number, marks: Mark[], title: string}} PanelPicture */

const CAPTION = 46; // CSS pixels below
const FEW_CELLS = 4096; // are written as rectangles
const BAR_WIDTH = 160;

/**
 * Saves the view at the screen's resolution: the map with axes and a caption, the steps, or the
 * lines.
 * @param {Context} context
 * @param {PictureParts} parts
 */
export async function savePng(context, parts) {
  const isMap = context.selection.view === "map";
  const canvas = isMap ? mapCanvas(context, parts.map) : panelCanvas(context, parts);
  /** @type {Blob | null} */
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!blob) throw new Error("The picture is too large for this browser.");
  download(blob, `${fileName(context)}.png`);
}

/**
 * Saves the same as SVG.
 * @param {Context} context
 * @param {PictureParts} parts
 */
export async function saveSvg(context, parts) {
  const isMap = context.selection.view === "map";
  const svg = isMap ? mapSvg(context, parts.map) : panelSvg(context, parts);
  const text = new XMLSerializer().serializeToString(svg);
  download(new Blob([text], { type: "image/svg+xml" }), `${fileName(context)}.svg`);
}

/**
 * @param {Context} context
 * @param {PictureParts} parts
 * @returns {PanelPicture}
 */
function panelPicture({ selection }, { steps, lines }) {
  if (selection.view === "lines") return lines.picture();
  const title = steps.element.querySelector("h2")?.textContent ?? "Steps";
  return { ...panelMarks(steps.element), title };
}

/**
 * @param {Context} context
 * @param {PictureParts} parts
 */
function panelCanvas(context, parts) {
  const { width, height, marks } = panelPicture(context, parts);
  const ratio = devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const paint = penOf(canvas);
  paint.scale(ratio, ratio);
  paint.fillStyle = parts.map.colours.paper;
  paint.fillRect(0, 0, width, height);
  drawMarks(paint, marks);
  return canvas;
}

/**
 * @param {Context} context
 * @param {PictureParts} parts
 */
function panelSvg(context, parts) {
  const { width, height, marks, title } = panelPicture(context, parts);
  const svg = emptySvg(width, height, title, parts.map.colours.paper);
  writeMarks(svg, marks);
  return svg;
}

/**
 * @param {number} width
 * @param {number} height
 * @param {string} title
 * @param {string} paper
 */
function emptySvg(width, height, title, paper) {
  const viewBox = `0 0 ${width} ${height}`;
  const svg = svgNode("svg", { width, height, viewBox, "font-family": MARK_FONT });
  svg.append(svgNode("title", {}, title), svgNode("rect", { width, height, fill: paper }));
  return svg;
}

/**
 * @param {Context} context
 * @param {HeadMapView} map
 */
function mapCanvas(context, map) {
  const ratio = map.frames[0].size.ratio;
  const { width, height, offsets } = pictureSize(map);
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const paint = penOf(canvas);
  paint.fillStyle = map.colours.paper;
  paint.fillRect(0, 0, canvas.width, canvas.height);
  map.shown.forEach((frame, n) => {
    const left = Math.round((offsets[n] + GUTTER.left) * ratio);
    paint.setTransform(1, 0, 0, 1, 0, 0);
    paint.drawImage(frame.cells, left, Math.round(GUTTER.top * ratio));
    paint.setTransform(ratio, 0, 0, ratio, left - GUTTER.left * ratio, 0);
    drawMarks(paint, map.marksOf(frame));
  });
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawMarks(paint, captionMarks(context, map, height));
  paint.drawImage(barCanvas(map), GUTTER.left, height - 16, BAR_WIDTH, 8);
  return canvas;
}

/**
 * Cells as rectangles where they are few, else as one embedded picture.
 * @param {Context} context
 * @param {HeadMapView} map
 */
function mapSvg(context, map) {
  const { width, height, offsets } = pictureSize(map);
  const svg = emptySvg(width, height, map.caption.textContent ?? "", map.colours.paper);
  map.shown.forEach((frame, n) => {
    const group = svgNode("g", { transform: `translate(${offsets[n]} 0)` });
    group.append(...cellNodes(frame));
    writeMarks(group, map.marksOf(frame));
    svg.append(group);
  });
  writeMarks(svg, captionMarks(context, map, height));
  const bar = { x: GUTTER.left, y: height - 16, width: BAR_WIDTH, height: 8 };
  svg.append(imageNode(barCanvas(map), bar));
  return svg;
}

/** @param {HeadMapView} map */
function pictureSize(map) {
  let width = 0;
  const offsets = map.shown.map((frame) => {
    const offset = width;
    width += Math.ceil(GUTTER.left + frame.size.width / frame.size.ratio) + 8 + map.sums.room;
    return offset;
  });
  const { height, ratio } = map.frames[0].size;
  return {
    width,
    height: Math.ceil(GUTTER.top + height / ratio) + map.sums.room + CAPTION,
    offsets,
  };
}

/**
 * @param {Context} context
 * @param {HeadMapView} map
 * @param {number} height
 * @returns {Mark[]}
 */
function captionMarks({ selection }, map, height) {
  const { model, name } = selection.recordingFacts;
  const style = /** @type {const} */ ({ kind: "text", size: 11 });
  const look = { ...style, x: GUTTER.left, colour: map.colours.soft };
  const said = [name, name === model ? "" : model, map.caption.textContent];
  const signed = Boolean(map.frames[0].other);
  return [
    { ...look, y: height - 26, text: said.filter((part) => part).join(" · ") },
    { ...look, y: height - 8, x: GUTTER.left + BAR_WIDTH + 10, text: barText(selection, signed) },
  ];
}

/** @param {HeadMapView} map */
function barCanvas(map) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [ENTRIES, 1];
  const image = new ImageData(ENTRIES, 1);
  new Uint32Array(image.data.buffer).set(pixelTable(Boolean(map.frames[0].other), map.dark));
  penOf(canvas).putImageData(image, 0, 0);
  return canvas;
}

/** @param {Frame} frame */
function cellNodes(frame) {
  const { size, view } = frame;
  const [columns, rows] = [runsOf(frame.columns), runsOf(frame.rows)];
  if (view.level > 0 || columns.length * rows.length > FEW_CELLS) {
    const box = {
      x: GUTTER.left,
      y: GUTTER.top,
      width: size.width / size.ratio,
      height: size.height / size.ratio,
    };
    return [imageNode(frame.cells, box)];
  }
  /** @type {(start: number, bin: number, from: number) => number} */
  const edge = (start, bin, from) => Math.max(0, ((bin - start) * view.zoom) / size.ratio) + from;
  return rows.flatMap((row) =>
    columns.map((column) => {
      const pixel = frame.pixels[row.from * size.width + column.from];
      const [r, g, b] = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
      const [x, y] = [edge(view.x, column.bin, GUTTER.left), edge(view.y, row.bin, GUTTER.top)];
      const right = Math.min(
        edge(view.x, column.bin + 1, GUTTER.left),
        GUTTER.left + size.width / size.ratio,
      );
      const bottom = Math.min(
        edge(view.y, row.bin + 1, GUTTER.top),
        GUTTER.top + size.height / size.ratio,
      );
      const box = { x, y, width: right - x, height: bottom - y };
      return svgNode("rect", {
        ...box,
        fill: `rgb(${r},${g},${b})`,
        "shape-rendering": "crispEdges",
      });
    }),
  );
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
