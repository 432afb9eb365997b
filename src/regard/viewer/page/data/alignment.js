// Which token of one recording is which of another: the counterparts of its queries and of its keys.

import { countText } from "../drawing/numbers.js";

/** @import { Selection } from "./selection.js" */
/** @import { Run, Source } from "./source.js" */

/** @typedef {{queries: Counterparts, keys: Counterparts}} Alignment */

/**
 * An alignment; null where every token is its own counterpart, undefined while it is not known.
 * @typedef {Alignment | null | undefined} Aligned
 */

// The counterparts of the tokens on one side of a text.
export class Counterparts {
  /**
   * @param {Run[]} runs
   * @param {number} count of the text's tokens
   * @param {number} others those of the other text
   */
  constructor(runs, count, others) {
    this.there = new Int32Array(count).fill(-1);
    this.back = new Int32Array(others).fill(-1);
    for (const [start, there, length] of runs)
      for (let n = 0; n < length; n++) {
        this.there[start + n] = there + n;
        this.back[there + n] = start + n;
      }
    this.sums = new Int32Array(count + 1); // of tokens before each that have a counterpart
    for (let n = 0; n < count; n++) this.sums[n + 1] = this.sums[n] + Number(this.there[n] >= 0);
    this.isWhole = count === others && runs.length === 1 && runs[0][2] === count;
    this.isAny = this.sums[count] > 0;
    this.lacking = count - this.sums[count];
    this.lackingThere = others - this.sums[count];
  }

  /**
   * Whether any token of a bin of 2^level tokens has a counterpart.
   * @param {number} bin
   * @param {number} level
   */
  has(bin, level) {
    const last = this.sums.length - 1;
    const [from, to] = [bin, bin + 1].map((n) => Math.min(n * 2 ** level, last));
    return this.sums[to] > this.sums[from];
  }
}

/**
 * A pair in the other text, or back; null where a token is none, or has no counterpart.
 * @param {Aligned} alignment
 * @param {"there" | "back"} way
 * @param {{query: number | null, key: number | null}} pair
 */
export function counterpart(alignment, way, { query, key }) {
  /** @type {(side: Counterparts | undefined, n: number | null) => number | null} */
  const found = (side, n) => {
    if (alignment === null || n === null) return n;
    const place = side?.[way][n] ?? -1;
    return place < 0 ? null : place;
  };
  return { query: found(alignment?.queries, query), key: found(alignment?.keys, key) };
}

/**
 * {aligned(), align()}: the alignment of the recordings that are compared, as far as it is known,
 * and a promise of it.
 * @param {Source} source
 * @param {Selection} selection
 */
export function makeAlignments(source, selection) {
  /** @type {Map<string, Alignment | null>} */
  const known = new Map();
  const pair = () => ({
    recording: selection.recording,
    with: selection.otherWhere?.recording ?? selection.recording,
  });
  /** @type {() => Aligned} */
  const aligned = () => {
    const { recording, with: other } = pair();
    return recording === other ? null : known.get(`${recording} ${other}`);
  };
  const align = async () => {
    const found = aligned();
    if (found !== undefined) return found;
    const where = pair();
    const runs = await source.alignment(where);
    const { recordings } = selection.about;
    const [one, other] = [recordings[where.recording], recordings[where.with]];
    const queries = new Counterparts(runs.queries, one.queries, other.queries);
    const keys = new Counterparts(runs.keys, one.tokens, other.tokens);
    const made = queries.isWhole && keys.isWhole ? null : { queries, keys };
    known.set(`${where.recording} ${where.with}`, made);
    return made;
  };
  return { aligned, align };
}

/**
 * `3 tokens here and 2 in the other text have no counterpart`, or nothing.
 * @param {Aligned} alignment
 * @param {boolean} itself whether queries and keys are of one text
 */
export function lackingText(alignment, itself) {
  if (!alignment) return "";
  const { keys, queries } = alignment;
  /** @type {[noun: string, nouns: string, side: Counterparts][]} */
  const sides = itself
    ? [["token", "tokens", keys]]
    : [
        ["query", "queries", queries],
        ["key", "keys", keys],
      ];
  const parts = sides.map(([noun, nouns, { lacking: here, lackingThere: there }]) => {
    const counted = `${countText(here || there)} ${(here || there) === 1 ? noun : nouns}`;
    if (here && there) return `${counted} here and ${countText(there)} in the other text`;
    return here + there ? counted + (here ? "" : " of the other text") : "";
  });
  const total = sides.reduce((sum, [, , side]) => sum + side.lacking + side.lackingThere, 0);
  const words = parts.filter(Boolean).join(", ");
  return words && `${words} ${total === 1 ? "has" : "have"} no counterpart`;
}
