// Sizes of the band: small steps as matrices are multiplied on paper. kᵀ stands on the scores and
// v on the output, so that a number lies where its row and its column meet.

/** @typedef {{width: number, height: number}} Room in CSS pixels */

/**
 * How many there are of each, without v 0 of its columns; CSS pixels of the labels of rows and of
 * columns, and of the switch under the scores.
 * @typedef {{queries: number, keys: number, dims: number, valueDims: number, rowLabels: number,
 *   columnLabels: number, switched: number}} BandContent
 */

/**
 * CSS pixels of a token down and across, of a column of q, a row of kᵀ, and a column of v.
 * @typedef {{tall: number, wide: number, dim: number, keyDim: number, valueDim: number}} BandSizes
 */

const SIGNS = 112; // CSS pixels between the matrices
const WORDS = 78; // above and below them
const NUMBERED = 8; // tokens whose cells are as large as fits: with their numbers
const LEAST = 11;
const USUAL = 12;
const MOST = { few: 44, many: 20 };
const TALLEST = 32; // of cells that are wide for their numbers
const VECTOR = { least: 32, few: 48, many: 64 }; // of q, and of v
const DIGITS = 28; // of a number that is written into a vector

/**
 * The sizes at which the band fits, or null where it is too wide.
 * @param {Room} room
 * @param {BandContent} content
 * @returns {BandSizes | null}
 */
export function bandSizes({ width, height }, content) {
  const { queries, keys, dims, valueDims } = content;
  const few = Math.max(queries, keys) <= NUMBERED;
  const across = width - content.rowLabels - SIGNS;
  /** @type {(vector: number) => number} a cell's width beside vectors of that many pixels */
  const beside = (vector) => {
    const vectors = Math.min(dims * DIGITS, vector) + Math.min(valueDims * DIGITS, vector);
    return (across - vectors) / (2 * keys);
  };
  const usual = beside(few ? VECTOR.few : VECTOR.many);
  const fitting = Math.max(usual, Math.min(USUAL, beside(VECTOR.least)));
  if (fitting < LEAST) return null;
  const above = valueDims ? keys : Math.min(keys, 6); // rows of cells; kᵀ alone needs few
  const cells = height - WORDS - content.columnLabels;
  const down = Math.max(LEAST, cells / (queries + above));
  const most = Math.min(fitting, few ? MOST.few : MOST.many);
  const wide = Math.floor(Math.min(most, few ? 1.6 * down : down));
  const tall = Math.floor(Math.min(down, few ? TALLEST : wide));
  const matrices = keys * wide + Math.max(keys * wide, content.switched);
  const left = (across - matrices) / (valueDims ? 2 : 1);
  return {
    tall,
    wide,
    dim: share(left, dims, wide),
    keyDim: share(above * tall, dims, tall),
    valueDim: share(left, valueDims, wide),
  };
}

/**
 * A number's share of a vector's pixels: whole ones where there is at least one.
 * @param {number} pixels
 * @param {number} count
 * @param {number} most
 */
function share(pixels, count, most) {
  const each = Math.min(most, pixels / Math.max(1, count));
  return each < 1 ? each : Math.floor(each);
}
