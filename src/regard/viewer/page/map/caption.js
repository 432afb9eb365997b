// The line above the map: what is shown, how coarsely, and how much of it has been read.

import { nameOfPlace } from "../data/selection.js";
import { countText } from "../drawing/numbers.js";

// `L5H3`, with its recording where there are several.
export function frameName({ about }, where) {
  const name = nameOfPlace(about, where);
  return about.recordings.length > 1
    ? `${name} of ${about.recordings[where.recording].name}`
    : name;
}

export function captionOf(context, frame, progress) {
  const { selection } = context;
  const parts = [
    headsText(context, frame),
    binText(frame.view.level, selection.plane),
    sharedText(selection),
  ];
  return [...parts, progress].filter((part) => part).join(" · ");
}

function headsText(context, frame) {
  const { selection } = context;
  const name = frameName(context, frame.where);
  const layer = selection.layerFacts.number ?? selection.layer;
  if (!selection.otherWhere) return `layer ${layer} head ${selection.head}`;
  const other = frameName(context, selection.otherWhere);
  return selection.compare === "difference" ? `${name} − ${other}` : `${name} beside ${other}`;
}

function binText(level, plane) {
  if (level === 0) return "every weight";
  const side = countText(2 ** level);
  if (plane === "mass") return `mass on ${side} keys, mean of ${side} queries`;
  return `strongest of ${side} × ${side} weights`;
}

// Which heads use the same keys.
function sharedText({ layerFacts, head }) {
  const { heads, key_heads: keyHeads } = layerFacts;
  const count = heads / keyHeads;
  if (count === 1) return "";
  const first = Math.floor(head / count) * count;
  return `heads ${first}–${first + count - 1} share keys`;
}

// `28 % of rows read`, or what is missing.
export function progressText(parts, read, missing) {
  if (parts.some((part) => part.error)) return "no answer, trying again";
  if (missing === 0 && read === 1) return "";
  if (read > 0 && read < 1) return `${Math.max(1, Math.floor(100 * read))} % of rows read`;
  return "loading";
}
