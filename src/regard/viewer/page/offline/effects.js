// The effects of a head, row by row, as regard's _weights/effects.py has them: a row of weights, the
// values of its keys and the gradient of its output give a row of effects.

import { TILE } from "../data/source.js";
import { evenBounds, packedThumbnails, RowWork, THUMBNAIL } from "./work.js";

/** @import { EffectKind, Link } from "../data/source.js" */
/** @import { AttentionHead, Numbers } from "./attention.js" */
/** @import { HeadRows, Part } from "./work.js" */

const FEW_QUERIES = 512; // all of which are read for the largest effect
const SAMPLE = 16; // of more
// The weight above which 1 − w is the sum of the others: two of a row have 1/2 each, and a rounding.
const FIRST = 0.5625;

/**
 * A row: the weights of the keys from `low` to `high` − 1, NaN where masked, and that of the sink.
 * @typedef {{weights: Float64Array, ofSink: number, low: number, high: number, first: number}} Row
 */

// What works read of an AttentionHead, with signed effects in place of logarithms.
export class EffectHead {
  /**
   * @param {AttentionHead} head
   * @param {EffectKind} kind
   */
  constructor(head, kind) {
    const { value, gradient, layer } = head;
    if (!value || !gradient) throw new Error("effects: this layer has no gradient.");
    this.head = head;
    this.kind = kind;
    this.layer = layer;
    this.value = value;
    this.gradient = gradient;
    this.line = new Float64Array(layer.keys); // of the last row computed
    this.row = -1; // which one that is
  }

  /** @param {number} i */
  interval(i) {
    return this.head.interval(i);
  }

  /** @param {number} i */
  visible(i) {
    return this.head.visible(i);
  }

  /**
   * Whether the effect of an unmasked pair, whose row was computed, is no finite number.
   * @param {number} i
   * @param {number} j
   */
  isLost(i, j) {
    return !Number.isFinite(this.line[j]) && this.head.sees(i, j);
  }

  isFirst() {
    return true;
  }

  /**
   * Writes the effects of query i into this.line, and gives the bounds of its keys between `from`
   * and `to`. NaN: masked.
   * @param {number} i
   * @param {number} [from]
   * @param {number} [to]
   * @returns {[low: number, high: number]}
   */
  logs(i, from = 0, to = this.layer.keys) {
    if (this.row !== i) this.#read(i);
    this.row = i;
    const [low, high] = this.interval(i);
    const a = Math.min(Math.max(low, from), high);
    return [a, Math.max(a, Math.min(high, to))];
  }

  /** @param {number} i */
  #read(i) {
    const row = this.#weights(i);
    if (this.kind === "change") this.#change(row, i);
    else this.#byGradient(row, i);
  }

  /**
   * @param {number} i
   * @returns {Row}
   */
  #weights(i) {
    const { head, line } = this;
    const [low, high] = head.logs(i);
    let first = -1; // the key whose weight is above FIRST
    for (let j = low; j < high; j++) {
      line[j] = Math.exp(head.line[j]);
      if (line[j] > FIRST) first = j;
    }
    const ofSink = Math.exp(head.sink - head.maximum[i] - head.logSum[i]);
    return { weights: line.slice(), ofSink, low, high, first };
  }

  /**
   * @param {Row} row
   * @param {number} i
   */
  #byGradient({ weights, ofSink, low, high, first }, i) {
    const { head, line, kind, gradient, value } = this;
    const { valueSize: size } = this.layer;
    const isMasked = (/** @type {number} */ j) => Number.isNaN(weights[j]) && !head.isLost(i, j);
    const g = gradient.subarray(i * size, (i + 1) * size);
    let ofRest = 0;
    let beside = ofSink; // all weights but that of `first`
    for (let j = low; j < high; j++) {
      if (isMasked(j)) continue;
      line[j] = product(g, value, j * size);
      if (j === first) continue;
      ofRest += weights[j] * line[j];
      beside += weights[j];
    }
    const ofFirst = first < 0 ? 0 : weights[first] * line[first];
    for (let j = low; j < high; j++) {
      const [w, gv] = [weights[j], line[j]];
      if (isMasked(j)) line[j] = NaN;
      else if (kind === "knockout") {
        const others = j === first ? ofRest : ofRest + ofFirst - w * gv;
        const rest = j === first ? beside : 1 - w;
        line[j] = w * ((rest === 0 ? 0 : others / rest) - gv);
      } else if (kind !== "gradient") line[j] = kind === "relevance" && w * gv < 0 ? 0 : w * gv;
    }
  }

  /**
   * @param {Row} row
   * @param {number} i
   */
  #change({ weights, ofSink, low, high, first }, i) {
    const { head, line, value } = this;
    const { valueSize: size } = this.layer;
    const ofRest = new Float64Array(size);
    let beside = ofSink;
    for (let j = low; j < high; j++) {
      if (j === first || (Number.isNaN(weights[j]) && !head.isLost(i, j))) continue;
      for (let d = 0; d < size; d++) ofRest[d] += weights[j] * value[j * size + d];
      beside += weights[j];
    }
    const output = ofRest.map((x, d) =>
      first < 0 ? x : x + weights[first] * value[first * size + d],
    );
    const left = ofRest.map((x) => (beside === 0 ? 0 : x / beside));
    for (let j = low; j < high; j++) {
      const w = weights[j];
      const far = distance(j === first ? left : output, value, j * size);
      line[j] = j === first ? w * far : (w * far) / (1 - w);
    }
  }
}

// The mean of the effects of several heads; a pair that some of them mask counts as 0 there, and one
// that is no number in some of them is none.
export class MeanEffects {
  /** @param {EffectHead[]} heads */
  constructor(heads) {
    this.heads = heads;
    this.layer = heads[0].layer;
    this.line = new Float64Array(this.layer.keys);
  }

  /** @param {number} i */
  interval(i) {
    return this.heads[0].interval(i);
  }

  /** @param {number} i */
  visible(i) {
    return this.heads.reduce((sum, head) => sum + head.visible(i), 0) / this.heads.length;
  }

  /**
   * @param {number} i
   * @param {number} j
   */
  isLost(i, j) {
    return this.heads.some((head) => head.isLost(i, j));
  }

  isFirst() {
    return true;
  }

  /**
   * @param {number} i
   * @param {number} [from]
   * @param {number} [to]
   * @returns {[low: number, high: number]}
   */
  logs(i, from, to) {
    const { heads, line } = this;
    const [low, high] = heads.map((head) => head.logs(i, from, to))[0];
    for (let j = low; j < high; j++) {
      const seen = heads.map((head) => head.line[j]).filter((x) => !Number.isNaN(x));
      const isNone = !seen.length || this.isLost(i, j);
      line[j] = isNone ? NaN : seen.reduce((sum, x) => sum + x, 0) / heads.length;
    }
    return [low, high];
  }
}

// 256 × 256 bins, each with the effect of largest size in it.
export class EffectTileWork extends RowWork {
  /**
   * @param {HeadRows} head
   * @param {number} level
   * @param {number} row
   * @param {number} column
   */
  constructor(head, level, row, column) {
    const { queries, keys } = head.layer;
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
    this.values = new Float32Array(TILE * TILE).fill(NaN);
    /** @type {Set<number>} bins with effects that are no finite numbers */
    this.lost = new Set();
  }

  /**
   * @param {number} row
   * @param {number} bin
   * @override
   */
  take(row, bin) {
    const { head, side, left, values } = this;
    const [low, high] = head.logs(row, left, this.right);
    for (let j = low; j < high; j++) {
      const at = bin * TILE + Math.floor((j - left) / side);
      keepLarger(values, at, head.line[j]);
      if (head.isLost(row, j)) this.lost.add(at);
    }
  }

  picture() {
    return this.values.map((effect, at) => (this.lost.has(at) ? Infinity : effect));
  }
}

// The mean of the effects of some queries over all keys.
export class EffectRowsWork extends RowWork {
  /**
   * @param {HeadRows} head
   * @param {Part[]} parts
   */
  constructor(head, parts) {
    const queries = parts.flatMap(([from, to]) =>
      Array.from({ length: to - from }, (_, n) => from + n),
    );
    super([0, queries.length], 1);
    this.head = head;
    this.queries = queries;
    this.sums = new Float64Array(head.layer.keys).fill(NaN);
    this.lost = new Uint8Array(head.layer.keys); // the keys with an effect that is no finite number
  }

  /**
   * @param {number} n
   * @override
   */
  take(n) {
    const { head, sums, lost } = this;
    const query = this.queries[n];
    const [low, high] = head.logs(query);
    for (let j = low; j < high; j++) {
      const effect = head.line[j];
      if (Number.isFinite(effect)) sums[j] = (Number.isNaN(sums[j]) ? 0 : sums[j]) + effect;
      else if (head.isLost(query, j)) lost[j] = 1;
    }
  }

  get values() {
    const { sums, lost, read } = this;
    return Float32Array.from(sums, (sum, j) => (lost[j] ? Infinity : sum / read));
  }
}

// The n pairs of largest effects, of a part where one is given.
export class EffectLinksWork extends RowWork {
  /**
   * @param {HeadRows} head
   * @param {number} n
   * @param {Part | null} rows
   * @param {Part | null} columns
   */
  constructor(head, n, rows, columns) {
    super([...(rows ?? [0, head.layer.queries])], 0);
    this.head = head;
    this.n = n;
    const [left, right] = columns ?? [0, head.layer.keys];
    this.left = left;
    this.right = right;
    /** @type {Link[]} */
    this.found = [];
    this.floor = 0;
    this.fewest = 0;
  }

  /**
   * @param {number} row
   * @override
   */
  take(row) {
    const { head, found } = this;
    const [low, high] = head.logs(row, this.left, this.right);
    for (let j = low; j < high; j++)
      if (Math.abs(head.line[j]) > this.floor) found.push([row, j, Math.fround(head.line[j])]);
    if (found.length > 64 + 4 * this.n) this.#cut();
  }

  #cut() {
    this.found.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]) || a[0] - b[0] || a[1] - b[1]);
    this.found.length = Math.min(this.found.length, this.n);
    if (this.found.length === this.n) this.floor = Math.abs(this.found.at(-1)?.[2] ?? Infinity);
  }

  links() {
    this.#cut();
    const told = (/** @type {number} */ effect) => (Number.isFinite(effect) ? effect : NaN);
    return this.found.map(([query, key, effect]) => [query, key, told(effect)]);
  }
}

// Thumbnails of the effects of all heads of a layer.
export class EffectHeadsWork extends RowWork {
  /** @param {EffectHead[]} heads */
  constructor(heads) {
    const { queries, keys } = heads[0].layer;
    const down = Math.min(THUMBNAIL, queries);
    const bounds = Array.from({ length: down + 1 }, (_, n) => Math.floor((n * queries) / down));
    super(bounds, down);
    this.heads = heads;
    this.down = down;
    this.across = Math.min(THUMBNAIL, keys);
    this.values = heads.map(() => new Float32Array(down * this.across).fill(NaN));
    /** @type {Set<number>[]} bins of each head with effects that are no finite numbers */
    this.lost = heads.map(() => new Set());
  }

  /**
   * @param {number} row
   * @param {number} bin
   * @override
   */
  take(row, bin) {
    const { keys } = this.heads[0].layer;
    for (const [n, head] of this.heads.entries()) {
      const [low, high] = head.logs(row);
      for (let j = low; j < high; j++) {
        const column = Math.floor(((j + 1) * this.across - 1) / keys);
        const at = bin * this.across + column;
        keepLarger(this.values[n], at, head.line[j]);
        if (head.isLost(row, j)) this.lost[n].add(at);
      }
    }
  }

  facts() {
    const { coverage, down, across } = this;
    const pictures = this.values.map((values, n) =>
      values.map((effect, at) => (this.lost[n].has(at) ? NaN : effect)),
    );
    const thumbnails = packedThumbnails(pictures, { down, across }, (effect) => effect);
    return { size: THUMBNAIL, thumbnails, coverage, settled: coverage === 1 };
  }
}

/**
 * Keeps the larger of two effects in size, the positive one of equals.
 * @param {Float32Array} values
 * @param {number} at
 * @param {number} effect
 */
function keepLarger(values, at, effect) {
  const [size, most] = [Math.abs(effect), Math.abs(values[at])];
  if (Number.isNaN(most) || size > most || (size === most && effect > 0)) values[at] = effect;
}

// The size of the largest effect of each head of a layer; of a long text in the rows with the
// largest gradients.
export class LargestWork extends RowWork {
  /** @param {EffectHead[]} heads */
  constructor(heads) {
    const rows = tellingRows(heads);
    super([0, rows.length], rows.length);
    this.heads = heads;
    this.queries = rows;
    this.sizes = heads.map(() => 0);
  }

  /**
   * @param {number} n
   * @override
   */
  take(n) {
    for (const [at, head] of this.heads.entries()) {
      const [low, high] = head.logs(this.queries[n]);
      for (let j = low; j < high; j++) {
        const size = Math.abs(head.line[j]);
        if (size > this.sizes[at]) this.sizes[at] = size;
      }
    }
  }

  largest() {
    return this.sizes.map((size) => (Number.isFinite(size) ? Number(size.toPrecision(9)) : null));
  }
}

/** @param {EffectHead[]} heads */
function tellingRows(heads) {
  const { queries, valueSize: size } = heads[0].layer;
  const rows = Array.from({ length: queries }, (_, row) => row);
  if (queries <= FEW_QUERIES) return rows;
  const sizes = new Float64Array(queries);
  for (const { gradient } of heads)
    for (let n = 0; n < queries * size; n++) sizes[Math.floor(n / size)] += gradient[n] ** 2 || 0;
  return rows.sort((a, b) => sizes[b] - sizes[a] || a - b).slice(0, SAMPLE);
}

/**
 * x·y of the vector of y that starts at `start`.
 * @param {Numbers} x
 * @param {Numbers} y
 * @param {number} start
 */
function product(x, y, start) {
  let sum = 0;
  for (let d = 0; d < x.length; d++) sum += x[d] * y[start + d];
  return sum;
}

/**
 * @param {Float64Array} x
 * @param {Numbers} y
 * @param {number} start
 */
function distance(x, y, start) {
  let sum = 0;
  for (let d = 0; d < x.length; d++) sum += (x[d] - y[start + d]) ** 2;
  return Math.sqrt(sum);
}
