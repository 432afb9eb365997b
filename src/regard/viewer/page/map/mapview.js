// The part of the matrix that the map shows: pure arithmetic, in tokens and device pixels.

/** @typedef {{width: number, height: number}} Pixels of a canvas */

/** @typedef {{queries: number, keys: number}} Extent of a matrix, in tokens */

/**
 * The token at the left and the top, device pixels per token, the level of bins, and the least and
 * the largest zoom.
 * @typedef {{x: number, y: number, zoom: number, level: number, fit: number,
 *   nearest: number}} MapView
 */

/**
 * A wanted view; null follows the window.
 * @typedef {{x: number | null, y: number | null, zoom: number | null}} WantedView
 */

const NEAREST = 64; // device pixels for a token
const LARGEST_FIT = 160; // of a text of a few tokens
const MARGIN = 2; // pixels beyond the last token, so that its bin is never cut off

/**
 * The zoom that fits the whole matrix, and the largest zoom.
 * @param {Pixels} size
 * @param {Extent} extent
 */
export function zoomLimits({ width, height }, { queries, keys }) {
  const fit = Math.min((width - MARGIN) / keys, (height - MARGIN) / queries, LARGEST_FIT);
  const whole = fit >= 8 ? Math.floor(fit) : Math.max(fit, 1e-9); // equal cells where they are big
  return { fit: whole, nearest: Math.max(NEAREST, whole) };
}

/**
 * {x, y, zoom, level, fit, nearest}: the wanted view, clamped to the matrix.
 * @param {WantedView} wanted
 * @param {Pixels} size
 * @param {Extent} extent
 * @returns {MapView}
 */
export function viewOf({ x, y, zoom }, size, extent) {
  const { fit, nearest } = zoomLimits(size, extent);
  const near = zoom === null ? fit : Math.max(fit, Math.min(nearest, zoom));
  return {
    x: held(x ?? 0, size.width, near, extent.keys),
    y: held(y ?? 0, size.height, near, extent.queries),
    zoom: near,
    level: levelOf(near),
    fit,
    nearest,
  };
}

/**
 * @param {number} start
 * @param {number} pixels
 * @param {number} zoom
 * @param {number} length
 */
function held(start, pixels, zoom, length) {
  return Math.max(0, Math.min(start, length - (pixels - MARGIN) / zoom));
}

/**
 * The view after zooming by a factor while the token under the pixel (px, py) stays there.
 * @param {MapView} view
 * @param {number} factor
 * @param {number} px
 * @param {number} py
 * @param {Pixels} size
 * @param {Extent} extent
 */
export function zoomedAt(view, factor, px, py, size, extent) {
  const zoom = Math.max(view.fit, Math.min(view.nearest, view.zoom * factor));
  const x = view.x + px / view.zoom - px / zoom;
  const y = view.y + py / view.zoom - py / zoom;
  return viewOf({ x, y, zoom }, size, extent);
}

/**
 * The view nearest to this one that contains the bin of the token pair, some pixels inside.
 * @param {MapView} view
 * @param {number} query
 * @param {number} key
 * @param {Pixels} size
 * @param {Extent} extent
 */
export function viewWith(view, query, key, size, extent) {
  /** @type {(start: number, token: number, pixels: number) => number} */
  const near = (start, token, pixels) => {
    const inset = Math.min(24, pixels / 4);
    const at = (token + 0.5 - start) * view.zoom;
    if (at >= 1 && at <= pixels - 1) return start;
    return at < 1 ? token + 0.5 - inset / view.zoom : token + 0.5 - (pixels - inset) / view.zoom;
  };
  const x = near(view.x, key, size.width);
  const y = near(view.y, query, size.height);
  return viewOf({ x, y, zoom: view.zoom }, size, extent);
}

/**
 * Bins of 2^level tokens cover 1 to 2 device pixels each, or hold one token.
 * @param {number} zoom
 */
export function levelOf(zoom) {
  return Math.max(0, Math.ceil(-Math.log2(zoom)));
}

/**
 * Int32Array(pixels): the bin in each pixel's centre, -1 where there are no tokens. A bin that
 * holds tokens is drawn whole, also the last one: none falls between two pixels.
 * @param {number} start
 * @param {number} zoom
 * @param {number} level
 * @param {number} pixels
 * @param {number} length
 */
export function binsOf(start, zoom, level, pixels, length) {
  const bins = new Int32Array(pixels);
  const side = 2 ** level;
  const count = Math.ceil(length / side);
  for (let p = 0; p < pixels; p++) {
    const bin = Math.floor((start + (p + 0.5) / zoom) / side);
    bins[p] = bin >= 0 && bin < count ? bin : -1;
  }
  return bins;
}

/**
 * Where the matrix ends, in device pixels of the map: its last bin's end.
 * @param {number} start
 * @param {number} zoom
 * @param {number} level
 * @param {number} pixels
 * @param {number} length
 */
export function endPixel(start, zoom, level, pixels, length) {
  const side = 2 ** level;
  return Math.min(pixels, (Math.ceil(length / side) * side - start) * zoom);
}
