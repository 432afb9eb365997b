// The weights of some queries and keys of a head, pair by pair, from its finest tiles.

import { isLostAt } from "./lost.js";
import { TILE } from "./source.js";
import { placeInTile } from "./tiles.js";

/** @import { Lost } from "./lost.js" */
/** @import { Unit } from "./selection.js" */
/** @import { Part } from "./several.js" */
/** @import { Place, Source, TilePlace } from "./source.js" */
/** @import { TokenText } from "./tokens.js" */

/**
 * Some neighbouring tokens, or words, of a text: which ones, and the place where each starts.
 * @typedef {{part: Part, places: number[], count: number}} Window
 */

const PART_AGAIN_MS = 200;

/**
 * At most `most` of a text's tokens, or words, with that at the place `chosen`; those of `before`
 * where it is among them.
 * @param {Part | null} before
 * @param {number} chosen
 * @param {TokenText} text
 * @param {Unit} unit
 * @param {number} most
 * @returns {Window}
 */
export function windowAround(before, chosen, text, unit, most) {
  const starts = unit === "word" ? text.starts : null;
  const count = starts?.length ?? text.length;
  const at = starts?.findLastIndex((start) => start <= chosen) ?? chosen;
  const part = partAround(before, at, count, most);
  const places = Array.from({ length: part[1] - part[0] }, (_, n) => {
    return starts?.[part[0] + n] ?? part[0] + n;
  });
  return { part, places, count };
}

/**
 * @param {Part | null} before
 * @param {number} at
 * @param {number} count
 * @param {number} most
 * @returns {Part}
 */
function partAround(before, at, count, most) {
  if (count <= most) return [0, count];
  if (before && before[1] <= count && before[0] <= at && at < before[1]) return before;
  const from = Math.max(0, Math.min(count - most, at - Math.floor(0.75 * most)));
  return [from, from + most];
}

/**
 * ln(weight) of each query with each key, row after row: NaN where masked, and where it is lost.
 * @param {Source} source
 * @param {Place} where
 * @param {number[]} rows in order
 * @param {number[]} columns
 * @param {AbortSignal} signal
 * @returns {Promise<{values: Float32Array, lost: Lost}>}
 */
export async function readWindow(source, where, rows, columns, signal) {
  const found = new Float32Array(rows.length * columns.length);
  const none = new Uint8Array(found.length);
  for (const row of tilesOf(rows))
    for (const column of tilesOf(columns)) {
      const place = { ...where, plane: /** @type {const} */ ("max"), level: 0, row, column };
      const { values, lost } = await wholeTile(source, place, signal);
      rows.forEach((query, i) => {
        if (Math.floor(query / TILE) !== row) return;
        columns.forEach((key, j) => {
          if (Math.floor(key / TILE) !== column) return;
          const [at, n] = [i * columns.length + j, placeInTile(query, key)];
          found[at] = values[n];
          none[at] = Number(isLostAt(lost, n));
        });
      });
    }
  return { values: found, lost: none.includes(1) ? none : null };
}

/** @param {number[]} places */
function tilesOf(places) {
  return new Set(places.map((place) => Math.floor(place / TILE)));
}

/**
 * @param {Source} source
 * @param {TilePlace} where
 * @param {AbortSignal} signal that it is no longer needed
 */
async function wholeTile(source, where, signal) {
  for (;;) {
    signal.throwIfAborted();
    const found = await source.tile(where);
    if (found.coverage === 1) return found;
    await new Promise((resolve) => setTimeout(resolve, PART_AGAIN_MS));
  }
}
