// Heads at the counterparts of their tokens, and how much they differ, as
// regard/viewer/_differences.py has it.

import { RowWork } from "./work.js";

/** @import { Changed, Scores } from "../data/source.js" */
/** @import { AttentionHead } from "./attention.js" */
/** @import { WordHead } from "./words.js" */

/**
 * The query of each row and the key of each column; -1: none.
 * @typedef {{queries: Int32Array, keys: Int32Array}} Places
 */

// A head at chosen queries and keys, which works as AttentionHead does; NaN where there are none.
export class AlignedHead {
  /**
   * @param {AttentionHead | WordHead} head
   * @param {Places} places
   */
  constructor(head, { queries, keys }) {
    this.head = head;
    this.queries = queries;
    this.keys = keys;
    this.layer = { queries: queries.length, keys: keys.length };
    this.line = new Float64Array(keys.length);
  }

  /** @returns {[low: number, high: number]} */
  interval() {
    return [0, this.keys.length];
  }

  /**
   * @param {number} row
   * @param {number} [from]
   * @param {number} [to]
   * @returns {[low: number, high: number]}
   */
  logs(row, from = 0, to = this.keys.length) {
    const { head, keys, line } = this;
    line.fill(NaN, from, to);
    const chosen = keys.subarray(from, to);
    const first = chosen.find((key) => key >= 0);
    const last = chosen.findLast((key) => key >= 0);
    if (this.queries[row] < 0 || first === undefined || last === undefined) return [from, from];
    const [low, high] = head.logs(this.queries[row], first, last + 1);
    for (let j = from; j < to; j++)
      if (keys[j] >= low && keys[j] < high) line[j] = head.line[keys[j]];
    return [from, to];
  }

  /** @param {number} row */
  visible(row) {
    const query = this.queries[row];
    return query < 0 ? 0 : this.head.visible(query);
  }

  isBroken() {
    return false;
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  isLost(row, column) {
    const [query, key] = [this.queries[row], this.keys[column]];
    if (query < 0 || key < 0) return false;
    const [low, high] = this.head.interval(query);
    return low <= key && key < high && this.head.isLost(query, key);
  }

  isFirst() {
    return true;
  }

  sees() {
    return true;
  }
}

/**
 * A head, and that which it is compared with, at the tokens that have counterparts.
 * @param {[one: AttentionHead, other: AttentionHead]} heads
 * @param {Places} places of the other's tokens
 * @returns {[AlignedHead, AlignedHead]}
 */
function compared([one, other], { queries, keys }) {
  const own = { queries: withCounterparts(queries), keys: withCounterparts(keys) };
  const there = { queries: own.queries.map((n) => queries[n]), keys: own.keys.map((n) => keys[n]) };
  return [new AlignedHead(one, own), new AlignedHead(other, there)];
}

/** @param {Int32Array} places */
function withCounterparts(places) {
  return Int32Array.from(places.keys()).filter((n) => places[n] >= 0);
}

/**
 * Calls `take` with the difference of each pair of a row; NaN where a weight is no number.
 * @param {[AlignedHead, AlignedHead]} heads
 * @param {number} row
 * @param {(difference: number, column: number) => void} take
 */
function differences([one, other], row, take) {
  one.logs(row);
  other.logs(row);
  const weight = (/** @type {AlignedHead} */ head, /** @type {number} */ j) => {
    if (!Number.isNaN(head.line[j])) return Math.exp(head.line[j]);
    return head.isLost(row, j) ? NaN : 0;
  };
  for (let j = 0; j < one.line.length; j++) take(weight(one, j) - weight(other, j), j);
}

// How much each head of a layer changed: the mean over queries of ½ Σ |difference|.
export class ChangeWork extends RowWork {
  /**
   * @param {([one: AttentionHead, other: AttentionHead] | null)[]} heads null: there is no other
   * @param {Places} places
   */
  constructor(heads, places) {
    super([0, withCounterparts(places.queries).length], 1);
    this.pairs = heads.map((pair) => pair && compared(pair, places));
    this.sums = heads.map(() => 0);
  }

  /**
   * @param {number} row
   * @override
   */
  take(row) {
    for (const [n, pair] of this.pairs.entries())
      if (pair)
        differences(pair, row, (difference) => {
          this.sums[n] += Math.abs(difference) / 2;
        });
  }

  change() {
    /** @type {Scores} */
    const change = this.pairs.map((pair, n) => {
      return pair && this.read ? Number((this.sums[n] / this.read).toFixed(6)) : null;
    });
    return { change, coverage: this.coverage, settled: this.coverage === 1 };
  }
}

// The n pairs of two heads that differ most.
export class ChangedWork extends RowWork {
  /**
   * @param {[one: AttentionHead, other: AttentionHead]} heads
   * @param {Places} places
   * @param {number} n
   */
  constructor(heads, places, n) {
    super([0, withCounterparts(places.queries).length], 1);
    this.pair = compared(heads, places);
    this.n = n;
    /** @type {Changed["links"]} */
    this.found = [];
    this.floor = 0;
    this.lost = 0; // queries with differences that are no numbers
  }

  /**
   * @param {number} row
   * @override
   */
  take(row) {
    const [{ queries, keys }] = this.pair;
    let isLost = false;
    differences(this.pair, row, (difference, column) => {
      isLost ||= Number.isNaN(difference);
      if (Math.abs(difference) > this.floor)
        this.found.push([queries[row], keys[column], Math.fround(difference)]);
    });
    if (isLost) this.lost++;
    if (this.found.length > 64 + 4 * this.n) this.#cut();
  }

  #cut() {
    this.found.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]) || a[0] - b[0] || a[1] - b[1]);
    this.found.length = Math.min(this.found.length, this.n);
    if (this.found.length === this.n) this.floor = Math.abs(this.found.at(-1)?.[2] ?? Infinity);
  }

  changed() {
    this.#cut();
    const { found: links, lost, coverage } = this;
    return { links, lost, coverage, settled: coverage === 1 };
  }
}
