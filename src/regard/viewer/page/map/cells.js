// Draws tiles: first each tile's bins become colours, cached while nothing changes, then bins
// become the pixels that they cover. 1600 × 1600 pixels take about 5 ms.

import { isLostAt } from "../data/lost.js";
import { TILE } from "../data/source.js";
import { ENTRIES, signedEntry } from "../drawing/colours.js";

/** @import { Floats } from "../data/source.js" */
/** @import { Range, SignedRange } from "../drawing/colours.js" */

/** @typedef {{table: Uint32Array, invisible: number}} Palette */

/**
 * The pixels of a tile, drawn from `above` levels more than what is shown.
 * @typedef {{pixels: Uint32Array, above: number}} DrawnTile
 */

const TILE_BINS = TILE * TILE;
const IN_TILE = TILE - 1; // of a bin in its tile, as a mask
const TILE_BITS = Math.log2(TILE);
const STRIPES = 6; // CSS pixels from one to the next

/**
 * The pixels of a tile's bins: ln(weight), plus `shifts` for each of its rows where there are any.
 * @param {Float32Array} values
 * @param {Palette & Range} look
 * @param {Float64Array | null} shifts
 */
export function tilePixels(values, { table, invisible, low, high, linear }, shifts) {
  const pixels = new Uint32Array(TILE_BINS);
  const slope = (ENTRIES - 1) / (high - low);
  const unit = linear ? slope : slope / Math.LN10;
  for (let row = 0; row < TILE; row++) {
    const offset = (shifts ? shifts[row] * unit : 0) - low * slope + 0.5;
    for (let i = row * TILE, end = i + TILE; i < end; i++) {
      const place = (linear ? Math.exp(values[i]) : values[i]) * unit + offset;
      if (Number.isNaN(place)) pixels[i] = invisible;
      else pixels[i] = table[place < 0 ? 0 : place >= ENTRIES ? ENTRIES - 1 : place | 0];
    }
  }
  return pixels;
}

/**
 * The same of exp(one) − exp(other), linear from −span to span; a pair masked in one head alone
 * has weight 0 there, and where a weight is no number the difference is none.
 * @param {Floats} one
 * @param {Floats} other
 * @param {Palette & {span: number}} look
 */
export function differencePixels(one, other, { table, invisible, span }) {
  const pixels = new Uint32Array(TILE_BINS);
  const slope = (ENTRIES - 1) / (2 * span);
  for (let i = 0; i < TILE_BINS; i++) {
    const difference = differenceAt(one, other, i);
    const place = (difference + span) * slope + 0.5;
    if (Number.isNaN(difference)) pixels[i] = invisible;
    else pixels[i] = table[place < 0 ? 0 : place >= ENTRIES ? ENTRIES - 1 : place | 0];
  }
  return pixels;
}

/**
 * The pixels of signed numbers.
 * @param {Float32Array} values
 * @param {Palette & SignedRange} look
 */
export function effectPixels(values, { table, invisible, ...range }) {
  const pixels = new Uint32Array(TILE_BINS);
  for (let i = 0; i < TILE_BINS; i++)
    pixels[i] = Number.isNaN(values[i]) ? invisible : table[signedEntry(values[i], range)];
  return pixels;
}

/**
 * exp(one) − exp(other) at a place, where a masked pair has weight 0; NaN where both are masked, and
 * where one is no number.
 * @param {Pick<Floats, "values" | "lost">} one
 * @param {Pick<Floats, "values" | "lost">} other
 * @param {number} n
 */
export function differenceAt(one, other, n) {
  const a = one.values[n];
  const b = other.values[n];
  if (Number.isNaN(a) && Number.isNaN(b)) return NaN;
  if (isLostAt(one.lost, n) || isLostAt(other.lost, n)) return NaN;
  return weightOf(a) - weightOf(b);
}

/** @param {number} logWeight */
function weightOf(logWeight) {
  return Number.isNaN(logWeight) ? 0 : Math.exp(logWeight);
}

/**
 * Fills `out` (Uint32, width a row) from the bins in each column's and each row's centre.
 * `found(row, column)`: a tile, or null while it is not known.
 * @param {Uint32Array} out
 * @param {number} width
 * @param {Int32Array} columns
 * @param {Int32Array} rows
 * @param {(row: number, column: number) => DrawnTile | null} found
 */
export function drawCells(out, width, columns, rows, found) {
  const blocks = columnBlocks(columns);
  for (let y = 0; y < rows.length; y++) {
    const [bin, start] = [rows[y], y * width];
    if (bin < 0) out.fill(0, start, start + width);
    else if (y > 0 && rows[y - 1] === bin) out.copyWithin(start, start - width, start);
    else {
      for (const { from, to, column } of blocks) {
        const tile = column < 0 ? null : found(bin >> TILE_BITS, column);
        if (tile) drawRun(out, start, from, to, columns, tile, bin);
        else out.fill(0, start + from, start + to);
      }
    }
  }
}

/**
 * @param {Uint32Array} out
 * @param {number} start
 * @param {number} from
 * @param {number} to
 * @param {Int32Array} columns
 * @param {DrawnTile} tile
 * @param {number} bin
 */
function drawRun(out, start, from, to, columns, { pixels, above }, bin) {
  const row = ((bin >> above) & IN_TILE) << TILE_BITS;
  for (let x = from; x < to; x++) out[start + x] = pixels[row | ((columns[x] >> above) & IN_TILE)];
}

/**
 * Runs of pixel columns that lie in one tile; column -1 where there are no tokens.
 * @param {Int32Array} columns
 */
function columnBlocks(columns) {
  /** @type {{from: number, to: number, column: number}[]} */
  const blocks = [];
  for (let x = 0; x < columns.length; x++) {
    const column = columns[x] < 0 ? -1 : columns[x] >> TILE_BITS;
    const last = blocks.at(-1);
    if (last?.column === column) last.to = x + 1;
    else blocks.push({ from: x, to: x + 1, column });
  }
  return blocks;
}

/**
 * Stripes over rows and columns of pixels: those that are not 0 in `chosen`, and in the matrix.
 * @param {Uint32Array} out
 * @param {{rows: Int32Array, columns: Int32Array}} chosen
 * @param {{rows: Int32Array, columns: Int32Array}} bins of each pixel, -1 outside
 * @param {[ground: number, stripe: number]} colours
 * @param {number} ratio device pixels of a CSS pixel
 */
export function hatch(out, chosen, bins, [ground, stripe], ratio) {
  const { rows, columns } = chosen;
  const [width, period] = [columns.length, Math.max(4, Math.round(STRIPES * ratio))];
  const line = Math.max(1, Math.round(ratio));
  for (let y = 0; y < rows.length; y++) {
    if (bins.rows[y] < 0) continue;
    for (let x = 0; x < width; x++)
      if ((rows[y] || columns[x]) && bins.columns[x] >= 0)
        out[y * width + x] = (x + y) % period < line ? stripe : ground;
  }
}
