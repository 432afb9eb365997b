// The lines between two columns of tokens, as marks.

/** @import { Lost } from "../data/lost.js" */
/** @import { LineMark } from "../drawing/marks.js" */

/**
 * A head's weights, row after row: NaN where masked, and where they are lost; the entry of its
 * colour.
 * @typedef {{head: number, entry: number, weights: Float32Array, lost: Lost}} HeadLines
 */

/** @typedef {{side: "query" | "key", place: number}} Pointed the token that is pointed at */

/**
 * The places of queries and keys; `colours` of the heads; `width` between the columns and `row`, the height of a token, in CSS
 * pixels.
 * @typedef {{rows: number[], columns: number[], colours: string[], width: number, row: number}} LineField
 */

export const LEAST_SHOWN = 0.01; // the smallest weight that has a line
const WIDEST = 4; // CSS pixels of a line of weight 1
const THINNEST = 0.6;
const FAINTEST = 0.2; // opacity
const APART = 2.6; // CSS pixels between the lines that heads have for the same pair

/**
 * The weakest first, so that the strongest lie on top; of one token alone where one is pointed at.
 * @param {HeadLines[]} heads
 * @param {LineField} field
 * @param {Pointed | null} pointed
 * @returns {LineMark[]}
 */
export function lineMarks(heads, { rows, columns, colours, width, row }, pointed) {
  const apart = Math.min(APART, (0.7 * row) / heads.length);
  /** @type {[weight: number, mark: LineMark][]} */
  const found = [];
  heads.forEach(({ weights }, h) => {
    const shift = (h - (heads.length - 1) / 2) * apart;
    const y = (/** @type {number} */ n) => (n + 0.5) * row + shift;
    weights.forEach((weight, at) => {
      if (!(weight >= LEAST_SHOWN)) return;
      const [i, j] = [Math.floor(at / columns.length), at % columns.length];
      const place = pointed?.side === "query" ? rows[i] : columns[j];
      if (pointed && pointed.place !== place) return;
      found.push([weight, { ...lookOf(weight, colours[h]), x1: 0, y1: y(i), x2: width, y2: y(j) }]);
    });
  });
  return found.sort((a, b) => a[0] - b[0]).map(([, mark]) => mark);
}

/**
 * @param {number} weight
 * @param {string} colour
 */
function lookOf(weight, colour) {
  const part = Math.min(1, weight);
  return {
    kind: /** @type {const} */ ("line"),
    colour,
    width: THINNEST + part * (WIDEST - THINNEST),
    alpha: FAINTEST + part * (1 - FAINTEST),
  };
}

/**
 * `53 %`, of small ones `1.4 %`.
 * @param {number} weight
 */
export function percentText(weight) {
  const percent = 100 * weight;
  return `${percent < 9.95 ? Number(percent.toFixed(1)) : Math.round(percent)} %`;
}
