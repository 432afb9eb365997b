// Weights that are NaN though their keys are not masked: a score is NaN or infinite.

import { countSeen } from "../drawing/numbers.js";

/** @import { Part } from "./several.js" */
/** @import { MapPlace, Source } from "./source.js" */

/**
 * Whether some weights in a row are no numbers: fewer are numbers than one of its queries has
 * unmasked keys. `values` is a row of one query, or the mean of several; each word's once.
 * @param {Source} source
 * @param {MapPlace} where
 * @param {readonly Part[]} queries
 * @param {Float32Array} values
 */
export async function isLostRow(source, where, queries, values) {
  const numbers = countSeen(values);
  const isOne = queries.length === 1 && queries[0][1] - queries[0][0] === 1;
  if (isOne && numbers > 0) return false;
  const { values: seen } = await source.visible(where);
  return queries.some(([from, to]) => seen.subarray(from, to).some((count) => count > numbers));
}
