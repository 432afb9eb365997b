// Chooses a pair where none is chosen yet.

import { largest, largestInSize } from "../drawing/numbers.js";
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
 * Chooses the last query with an unmasked key, and its strongest key, or the pair of the largest
 * effect; Back does not undo it, and it is said where nothing was pointed at meanwhile.
 * @param {Context} context
 * @returns {Promise<void>}
 */
export async function chooseFirst(context) {
  const { selection, source } = context;
  if (selection.query !== null && selection.key !== null) return;
  const since = context.said();
  const where = selection.where;
  const query = selection.query ?? (await telling(source, where));
  const { values } = await source.row({ ...where, query });
  if (!isStill(selection, where)) return chooseFirst(context);
  if (selection.query !== null && selection.key !== null) return;
  const key = selection.key ?? strongest(values, where) ?? 0;
  const chosen = selection.query === null ? { query, key } : { key };
  selection.set(chosen, { step: false, since, isChoice: false });
}

/**
 * Chooses a query and its strongest key.
 * @param {Context} context
 * @param {number} query
 */
export async function lookFrom({ selection, source, said }, query) {
  const [since, isLatest] = [said(), selection.begins()];
  const where = selection.where;
  const { values } = await source.row({ ...where, query });
  if (!isLatest() || !isStill(selection, where)) return;
  selection.set({ query, key: strongest(values, where) ?? selection.key ?? 0 }, { since });
}

/**
 * Chooses a key and the query that attends to it most.
 * @param {Context} context
 * @param {number} key
 */
export async function lookAt(context, key) {
  const { selection, source } = context;
  const [since, isLatest] = [context.said(), selection.begins()];
  const where = selection.where;
  const { values, coverage } = await source.column({ ...where, key });
  if (!isLatest() || !isStill(selection, where)) return;
  if (coverage < 1) context.because = "the strongest of the rows read so far";
  selection.set({ key, query: strongest(values, where) ?? selection.query ?? 0 }, { since });
}

/**
 * The place of the strongest weight, or of the largest effect.
 * @param {Float32Array} values
 * @param {Place} where
 * @returns {number | undefined}
 */
function strongest(values, { effect }) {
  return effect ? largestInSize(values, 1)[0] : largest(values, 1)[0];
}

/**
 * The last query with an unmasked key; of effects that of the largest one.
 * @param {Source} source
 * @param {Place} where
 */
async function telling(source, where) {
  const { links } = where.effect ? await source.links({ ...where, n: 1 }) : { links: [] };
  return links[0]?.[0] ?? lastSeeing((await source.visible(where)).values);
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
