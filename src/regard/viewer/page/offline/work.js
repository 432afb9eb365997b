// Requests to a head, worked off row by row, so that one can pause and be shown half done: each has
// `count` rows (of heads), has `read` some of them, and is worth showing from `least` on.

import { TILE } from "../data/source.js";

/** @import { Link, Scores } from "../data/source.js" */
/** @import { AlignedHead } from "./aligned.js" */
/** @import { AttentionHead } from "./attention.js" */
/** @import { WordHead } from "./words.js" */
/** @import { Plane } from "../data/selection.js" */

/** @typedef {readonly [from: number, to: number]} Part */

/** @typedef {AttentionHead | WordHead | AlignedHead} Head */

/** @typedef {Pick<HeadRows, "line" | "logs" | "isLost">} ReadRows whose rows were computed */

const FEW_KEYS = 8; // of fewer, one has a large weight in any case

/**
 * What a work reads of a head, or of the mean of several.
 * @typedef {Pick<WordHead, "line" | "interval" | "logs" | "visible" | "isFirst" | "isLost"> &
 *   {layer: {queries: number, keys: number}}} HeadRows
 */

export const THUMBNAIL = 48; // bins on a side
const THUMBNAIL_STEPS = 64; // to a nat: what regard's server rounds to

export class RowWork {
  /**
   * `bounds`: where each bin of rows starts, and the end. One row of every bin comes first.
   * @param {number[]} bounds
   * @param {number} least
   */
  constructor(bounds, least) {
    this.bounds = bounds;
    this.rows = spreadRows(bounds);
    this.count = bounds[bounds.length - 1] - bounds[0];
    this.least = Math.min(least, this.count);
    this.read = 0;
    this.wanted = 0; // until when its rest is wanted, in milliseconds
    this.goesOn = false; // in the background
  }

  get coverage() {
    return this.count === 0 ? 1 : this.read / this.count;
  }

  step() {
    const next = this.rows.next();
    if (next.done) return;
    const [row, bin] = next.value;
    this.take(row, bin);
    this.read++;
  }

  /**
   * Takes one row.
   * @param {number} _row
   * @param {number} _bin
   */
  take(_row, _bin) {
    throw new Error("A work says what it takes of a row.");
  }
}

/**
 * [row, bin], one row of every bin, then another of each, far from the first: offsets by their
 * bits, reversed.
 * @param {number[]} bounds
 * @returns {Generator<[row: number, bin: number]>}
 */
function* spreadRows(bounds) {
  const heights = bounds.slice(1).map((stop, bin) => stop - bounds[bin]);
  const bits = Math.ceil(Math.log2(Math.max(1, ...heights)));
  for (let turn = 0; turn < 2 ** bits; turn++) {
    const offset = reversedBits(turn, bits);
    for (let bin = 0; bin < heights.length; bin++)
      if (offset < heights[bin]) yield [bounds[bin] + offset, bin];
  }
}

/**
 * @param {number} number
 * @param {number} bits
 */
function reversedBits(number, bits) {
  let reversed = 0;
  for (let bit = 0; bit < bits; bit++) reversed = reversed * 2 + ((number >> bit) & 1);
  return reversed;
}

/**
 * Where bins of `side` start between low and high, and the end.
 * @param {number} low
 * @param {number} high
 * @param {number} side
 */
export function evenBounds(low, high, side) {
  const bounds = [low];
  while (bounds[bounds.length - 1] < high)
    bounds.push(Math.min(bounds[bounds.length - 1] + side, high));
  return bounds;
}

/**
 * A number of a row that was computed, of a key of its interval; +∞ where it is none, and its pair
 * is not masked.
 * @param {ReadRows} head
 * @param {number} row
 * @param {number} key
 */
export function toldIn(head, row, key) {
  return head.isLost(row, key) ? Infinity : head.line[key];
}

/**
 * The same of any pair; NaN where it is masked.
 * @param {ReadRows} head
 * @param {number} row
 * @param {number} key
 */
export function toldOf(head, row, key) {
  const [from, to] = head.logs(row, key, key + 1);
  return from < to ? toldIn(head, row, key) : NaN;
}

// 256 × 256 bins, on both planes.
export class TileWork extends RowWork {
  /**
   * @param {Head} head
   * @param {number} level
   * @param {number} row
   * @param {number} column
   */
  constructor(head, level, row, column) {
    const { queries, keys } = head.layer;
    // Levels above the one with a single bin are equal to it.
    const side = 2 ** Math.min(level, Math.ceil(Math.log2(Math.max(queries, keys, 1))));
    /** @type {(n: number, at: number) => Part} */
    const part = (n, at) => [Math.min(n, at * TILE * side), Math.min(n, (at + 1) * TILE * side)];
    const bounds = evenBounds(...part(queries, row), side);
    super(bounds, bounds.length - 1);
    this.head = head;
    this.side = side;
    const [left, right] = part(keys, column);
    this.left = left;
    this.right = right;
    this.across = Math.ceil((this.right - this.left) / side);
    this.strongest = new Float64Array((bounds.length - 1) * this.across).fill(NaN);
    this.sums = new Float64Array(this.strongest.length);
    this.taken = new Uint32Array(bounds.length - 1);
    /** @type {Set<number>} places in the picture of weights of NaN */
    this.lost = new Set();
  }

  /**
   * @param {number} row
   * @param {number} bin
   * @override
   */
  take(row, bin) {
    const { head, side, left, strongest, sums } = this;
    const [low, high] = head.logs(row, left, this.right);
    const base = bin * this.across;
    this.taken[bin]++;
    for (let j = low; j < high; j++) {
      const at = base + Math.floor((j - left) / side);
      const log = head.line[j];
      if (!Number.isNaN(log)) {
        if (!(strongest[at] >= log)) strongest[at] = log;
        if (side > 1) sums[at] += Math.exp(log);
      } else if (head.isLost(row, j)) this.lost.add(bin * TILE + at - base);
    }
  }

  /** @param {Plane} plane */
  picture(plane) {
    const { across, side, strongest, sums, taken } = this;
    const picture = new Float32Array(TILE * TILE).fill(NaN);
    for (let at = 0; at < strongest.length; at++) {
      const bin = Math.floor(at / across);
      const place = bin * TILE + (at % across);
      if (Number.isNaN(strongest[at])) continue;
      const isMean = plane === "mass" && side > 1;
      picture[place] = isMean ? Math.log(sums[at] / taken[bin]) : strongest[at];
    }
    for (const place of this.lost) picture[place] = Infinity;
    return picture;
  }
}

// The weights of one key from all queries.
export class ColumnWork extends RowWork {
  /**
   * @param {HeadRows} head
   * @param {number} key
   */
  constructor(head, key) {
    super([0, head.layer.queries], 0);
    this.head = head;
    this.key = key;
    this.values = new Float32Array(head.layer.queries).fill(NaN);
  }

  /**
   * @param {number} row
   * @override
   */
  take(row) {
    const [low, high] = this.head.interval(row);
    if (low <= this.key && this.key < high) this.values[row] = toldOf(this.head, row, this.key);
  }
}

// The number of unmasked keys of each query.
export class VisibleWork extends RowWork {
  /** @param {HeadRows} head */
  constructor(head) {
    super([0, head.layer.queries], 0);
    this.head = head;
    this.values = new Float32Array(head.layer.queries);
  }

  /**
   * @param {number} row
   * @override
   */
  take(row) {
    this.values[row] = this.head.visible(row);
  }
}

// The n strongest links, of a part where one is given. For the whole, queries that see few keys are
// left out, and those to key 0, the usual attention sink, are kept apart.
export class LinksWork extends RowWork {
  /**
   * @param {HeadRows} head
   * @param {number} n
   * @param {Part | null} rows
   * @param {Part | null} columns
   * @param {Float32Array} seen the number of unmasked keys of each query
   */
  constructor(head, n, rows, columns, seen) {
    super([...(rows ?? [0, head.layer.queries])], 0);
    this.head = head;
    this.seen = seen;
    const [left, right] = columns ?? [0, head.layer.keys];
    this.left = left;
    this.right = right;
    this.top = rows?.[0] ?? 0;
    this.isWhole = !rows && !columns;
    this.fewest = this.isWhole ? fewestKeys(seen) : 0;
    this.found = new StrongestLinks(n);
    this.resting = new StrongestLinks(n);
  }

  /**
   * @param {number} row
   * @override
   */
  take(row) {
    if (this.seen[row] < this.fewest) return;
    const { head, found, resting, top, left } = this;
    const [low, high] = head.logs(row, left, this.right);
    const { line } = head;
    for (let key = low; key < high; key++) {
      if (!head.isFirst(row, key, top, left)) continue;
      const into = this.isWhole && key === 0 ? resting : found;
      if (line[key] >= into.floor) into.add(row, key, line[key]);
    }
  }

  links() {
    const found = this.found.sorted();
    return found.length ? found : this.resting.sorted();
  }
}

/**
 * The least number of keys that a query of a notable pair sees; 0 where that is all queries.
 * @param {Float32Array} seen
 */
function fewestKeys(seen) {
  const most = seen.reduce((most, count) => Math.max(most, count), 0);
  const fewest = Math.min(FEW_KEYS, Math.floor(most / 2));
  return seen.some((count) => count < fewest) ? fewest : 0;
}

/** @typedef {{query: number, key: number, log: number, weight: number}} HeapLink */

// A heap of at most n links with the weakest on top. Weights are compared as float32, ties by their
// position, as the server orders them.
class StrongestLinks {
  /** @param {number} n */
  constructor(n) {
    this.n = n;
    /** @type {HeapLink[]} */
    this.heap = [];
    this.floor = n > 0 ? -104 : Infinity; // ln of the smallest float32 above 0
  }

  /**
   * @param {number} query
   * @param {number} key
   * @param {number} log
   */
  add(query, key, log) {
    const link = { query, key, log, weight: Math.fround(Math.exp(log)) };
    if (link.weight === 0) return;
    const { heap, n } = this;
    if (heap.length < n) {
      heap.push(link);
      this.#rise(heap.length - 1);
    } else if (isWeaker(heap[0], link)) {
      heap[0] = link;
      this.#sink(0);
    }
    if (heap.length === n) this.floor = heap[0].log - 1e-6;
  }

  sorted() {
    const order = [...this.heap].sort((a, b) => (isWeaker(a, b) ? 1 : -1));
    return order.map(({ query, key, log }) => /** @type {Link} */ ([query, key, log]));
  }

  /** @param {number} at */
  #rise(at) {
    const { heap } = this;
    for (let up = (at - 1) >> 1; at > 0 && isWeaker(heap[at], heap[up]); up = (at - 1) >> 1) {
      [heap[at], heap[up]] = [heap[up], heap[at]];
      at = up;
    }
  }

  /** @param {number} at */
  #sink(at) {
    const { heap } = this;
    for (;;) {
      let weakest = at;
      for (const down of [2 * at + 1, 2 * at + 2])
        if (down < heap.length && isWeaker(heap[down], heap[weakest])) weakest = down;
      if (weakest === at) return;
      [heap[at], heap[weakest]] = [heap[weakest], heap[at]];
      at = weakest;
    }
  }
}

/**
 * @param {HeapLink} a
 * @param {HeapLink} b
 */
function isWeaker(a, b) {
  if (a.weight !== b.weight) return a.weight < b.weight;
  return a.query !== b.query ? a.query > b.query : a.key > b.key;
}

/** @typedef {"first" | "previous" | "induction"} Role */

/**
 * Sums over the rows that were read, and for each role the number of those that see such a key.
 * @typedef {{entropy: number, distance: number, first: number, previous: number,
 *   induction: number, counts: Record<Role, number>}} Sums
 */

// Thumbnails and scores of all heads of a layer. `tokens`: of keys that are the queries too, or
// null.
export class HeadsWork extends RowWork {
  /**
   * @param {AttentionHead[]} heads
   * @param {string[] | null} tokens
   */
  constructor(heads, tokens) {
    const { queries, keys } = heads[0].layer;
    const side = (/** @type {number} */ n) => Math.min(THUMBNAIL, n);
    /** @type {(n: number) => (_: unknown, bin: number) => number} */
    const bound = (n) => (_, bin) => Math.floor((bin * n) / side(n));
    const bounds = Array.from({ length: side(queries) + 1 }, bound(queries));
    super(bounds, side(queries));
    this.heads = heads;
    this.down = side(queries);
    this.across = side(keys);
    this.bins = new Uint32Array(keys); // of each key
    for (let j = 0; j < keys; j++) this.bins[j] = Math.floor(((j + 1) * this.across - 1) / keys);
    this.places = tokens && tokens.length === queries ? placesOfTokens(tokens) : null;
    this.strongest = heads.map(() => new Float64Array(this.down * this.across).fill(NaN));
    /** @type {Set<number>[]} bins of each head with weights of NaN, not masked */
    this.lost = heads.map(() => new Set());
    const zero = { first: 0, previous: 0, induction: 0 };
    /** @type {Sums[]} */
    this.sums = heads.map(() => ({ entropy: 0, distance: 0, ...zero, counts: { ...zero } }));
  }

  /**
   * @param {number} row
   * @param {number} bin
   * @override
   */
  take(row, bin) {
    for (const [n, head] of this.heads.entries()) {
      const [low, high] = head.logs(row);
      this.#measure(head, this.sums[n], row, low, high);
      const picture = this.strongest[n];
      for (let j = low; j < high; j++) {
        const at = bin * this.across + this.bins[j];
        if (head.isLost(row, j)) this.lost[n].add(at);
        else if (head.line[j] >= -Infinity && !(picture[at] >= head.line[j]))
          picture[at] = head.line[j];
      }
    }
  }

  /**
   * @param {AttentionHead} head
   * @param {Sums} sums
   * @param {number} row
   * @param {number} low
   * @param {number} high
   */
  #measure(head, sums, row, low, high) {
    const { line } = head;
    const place = head.layer.start + row;
    const isSeen = (/** @type {number} */ j) =>
      low <= j && j < high && (!Number.isNaN(line[j]) || head.isLost(row, j));
    let seen = 0;
    for (let j = low; j < high; j++) {
      if (isSeen(j)) seen++;
      const w = Math.exp(line[j]);
      if (!(w > 0)) continue;
      sums.entropy -= w * line[j];
      sums.distance += w * Math.abs(place - j);
    }
    if (head.isBroken(row)) sums.entropy = sums.distance = NaN;
    if (head.isBroken(row) && seen >= 2) sums.first = sums.previous = sums.induction = NaN;
    if (!this.places || row === 0 || seen < 2) return;
    /** @type {(name: Role, keys: Iterable<number>) => void} */
    const add = (name, keys) => {
      const found = [...keys].filter(isSeen);
      if (found.length > 0) sums.counts[name]++;
      for (const j of found) sums[name] += Math.exp(line[j]);
    };
    add("first", [0]);
    add("previous", [row - 1]);
    add("induction", this.places.after(row));
  }

  facts() {
    /** @type {(name: "entropy" | "distance") => Scores} */
    const mean = (name) => this.sums.map((sums) => finiteOrNull(sums[name] / this.read));
    /** @type {(name: Role) => Scores | null} */
    const scored = (name) =>
      this.places ? this.sums.map((sums) => finiteOrNull(sums[name] / sums.counts[name])) : null;
    const pictures = this.strongest.map((values, n) =>
      values.map((log, at) => (this.lost[n].has(at) ? NaN : log)),
    );
    return {
      size: THUMBNAIL,
      thumbnails: packedThumbnails(
        pictures,
        this,
        (log) => Math.round(log * THUMBNAIL_STEPS) / THUMBNAIL_STEPS,
      ),
      entropy: mean("entropy"),
      distance: mean("distance"),
      first: scored("first"),
      previous: scored("previous"),
      induction: scored("induction"),
      coverage: this.coverage,
      settled: this.coverage === 1,
    };
  }
}

/**
 * base64 of the bins of each head; where there are fewer than a thumbnail has, each is repeated.
 * @param {(Float32Array | Float64Array)[]} pictures
 * @param {{down: number, across: number}} bins
 * @param {(value: number) => number} rounded
 */
export function packedThumbnails(pictures, { down, across }, rounded) {
  const packed = new Float32Array(pictures.length * THUMBNAIL * THUMBNAIL);
  let at = 0;
  for (const picture of pictures)
    for (let r = 0; r < THUMBNAIL; r++)
      for (let c = 0; c < THUMBNAIL; c++) {
        const row = Math.floor((r * down) / THUMBNAIL);
        const column = Math.floor((c * across) / THUMBNAIL);
        packed[at++] = rounded(picture[row * across + column]);
      }
  let binary = "";
  for (const byte of new Uint8Array(packed.buffer)) binary += String.fromCharCode(byte);
  return btoa(binary);
}

/**
 * {after(row)}: the places just after earlier occurrences of a row's token, without the row itself
 * and the one before it.
 * @param {string[]} tokens
 */
function placesOfTokens(tokens) {
  /** @type {Map<string, number[]>} */
  const all = new Map();
  tokens.forEach((token, place) => {
    const places = all.get(token) ?? [];
    all.set(token, places);
    places.push(place);
  });
  return {
    /**
     * @param {number} row
     * @returns {Generator<number, void>}
     */
    *after(row) {
      for (const place of all.get(tokens[row]) ?? []) {
        if (place + 1 >= row - 1) return;
        yield place + 1;
      }
    },
  };
}

/** @param {number} x */
function finiteOrNull(x) {
  return Number.isFinite(x) ? x : null;
}
