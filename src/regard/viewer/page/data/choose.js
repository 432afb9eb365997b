// Chooses a pair where none is chosen yet.

import { largest } from "../drawing/numbers.js";
import { namesHead, recordingIn } from "./selection.js";
import { headName } from "./source.js";

/** @import { Context, Selection } from "./selection.js" */
/** @import { About, Place, Source } from "./source.js" */

/**
 * The head to open at, where the address names none: the one that tells most.
 * @param {Source} source
 * @param {About} about
 * @param {string} hash of the address, empty where there is none
 * @returns {Promise<Place>}
 */
export async function chooseHead(source, about, hash) {
  const recording = recordingIn(about, hash);
  if (namesHead(hash)) return { recording, layer: 0, head: 0 };
  const { opens } = await source.roles(recording);
  return { recording, ...opens };
}

/**
 * Chooses the last query with an unmasked key, and its strongest key; Back does not undo it.
 * @param {Context} context
 * @returns {Promise<void>}
 */
export async function chooseFirst(context) {
  const { selection, source } = context;
  if (selection.query !== null && selection.key !== null) return;
  const where = selection.where;
  const query = selection.query ?? lastSeeing((await source.visible(where)).values);
  const { values } = await source.row({ ...where, query });
  if (!isStill(selection, where)) return chooseFirst(context);
  if (selection.query !== null && selection.key !== null) return;
  const key = selection.key ?? largest(values, 1)[0] ?? 0;
  selection.set(selection.query === null ? { query, key } : { key }, { step: false });
}

/**
 * Chooses a query and its strongest key.
 * @param {Context} context
 * @param {number} query
 */
export async function lookFrom({ selection, source }, query) {
  const where = selection.where;
  const { values } = await source.row({ ...where, query });
  if (!isStill(selection, where)) return;
  selection.set({ query, key: largest(values, 1)[0] ?? selection.key ?? 0 });
}

/**
 * Chooses a key and the query that attends to it most.
 * @param {Context} context
 * @param {number} key
 */
export async function lookAt(context, key) {
  const { selection, source } = context;
  const where = selection.where;
  const { values, coverage } = await source.column({ ...where, key });
  if (!isStill(selection, where)) return;
  if (coverage < 1) context.because = "the strongest of the rows read so far";
  selection.set({ key, query: largest(values, 1)[0] ?? selection.query ?? 0 });
}

/**
 * @param {Selection} selection
 * @param {Place} where
 */
function isStill(selection, where) {
  return headName(selection.where) === headName(where);
}

/** @param {Float32Array} counts */
function lastSeeing(counts) {
  const last = counts.findLastIndex((count) => count > 0);
  return last < 0 ? counts.length - 1 : last;
}
