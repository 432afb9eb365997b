// The line above the map: the head, the size of bins, and how many rows have been read.

import { headsWords } from "../data/extend.js";
import { labelOfRecording, nameOfPlace, sharing } from "../data/selection.js";
import { countText, readText } from "../drawing/numbers.js";

/** @import { Context, Selection } from "../data/selection.js" */
/** @import { Place } from "../data/source.js" */
/** @import { Frame } from "./frame.js" */

/**
 * Progress of tiles: the fraction of rows that they have read, null where there is none; how many
 * are missing; and the error.
 * @typedef {{read: number | null, missing: number, error: unknown}} Progress
 */

/**
 * `L5H3`, or `mean of 3 heads of layer 5`, with its recording where there are several.
 * @param {Context} context
 * @param {Place} where
 */
export function frameName({ about }, where) {
  const count = where.heads?.split(",").length;
  const layer = about.recordings[where.recording].layers[where.layer].number;
  const name = count ? `mean of ${count} heads of layer ${layer}` : nameOfPlace(about, where);
  return about.recordings.length > 1
    ? `${name} of ${labelOfRecording(about, where.recording)}`
    : name;
}

/**
 * @param {Context} context
 * @param {Frame} frame
 * @param {string} progress
 */
export function captionOf(context, frame, progress) {
  const { selection } = context;
  const parts = [
    headsText(context, frame),
    binText(frame.view.level, selection),
    selection.heads ? "" : sharedText(selection),
    selection.usedFirst ? "first token hidden" : "",
  ];
  return [...parts, progress].filter((part) => part).join(" · ");
}

/**
 * @param {Context} context
 * @param {Frame} frame
 */
function headsText(context, frame) {
  const { selection } = context;
  const name = frameName(context, frame.where);
  if (!selection.otherWhere && selection.heads) return headsWords(selection);
  if (!selection.otherWhere) return name;
  const other = frameName(context, selection.otherWhere);
  return selection.compare === "difference" ? `${name} − ${other}` : `${name} beside ${other}`;
}

/**
 * @param {number} level
 * @param {Selection} selection
 */
function binText(level, { usedPlane: plane, effect, heads, usedUnit }) {
  const words = usedUnit === "word" ? " of words" : "";
  const side = countText(2 ** level);
  if (effect)
    return `${effect} of ${level ? `largest size in ${side} × ${side} pairs` : "every pair"}`;
  if (level === 0) return `every weight${words}`;
  if (plane === "mass") return `share on ${side} keys, mean of ${side} queries`;
  const each = heads ? "mean of each head's " : "";
  return `${each}strongest of ${side} × ${side} weights${words}`;
}

/**
 * The heads that share keys (grouped-query attention).
 * @param {Selection} selection
 */
function sharedText({ layerFacts, head }) {
  const { heads, key_heads: keyHeads } = layerFacts;
  const count = heads / keyHeads;
  if (count === 1) return "";
  const numbers = sharing(layerFacts, Math.floor(head / count));
  const isRange = numbers.every((number, n) => number === numbers[0] + n);
  const words = isRange ? `${numbers[0]}–${numbers[count - 1]}` : numbers.join(", ");
  return `heads ${words} share keys`;
}

/**
 * `28 % of rows read`, `loading`, or nothing.
 * @param {Progress[]} parts
 * @param {number} read
 * @param {number} missing
 */
export function progressText(parts, read, missing) {
  if (parts.some((part) => part.error)) return "no response, trying again";
  if (missing === 0 && read === 1) return "";
  if (read > 0 && read < 1) return `${readText(read)} of rows read`;
  return "loading";
}
