// Attention of one head in float64, row by row, so that nothing of size Lq × Lk is stored:
//
//   s = scale · q·kᵀ → softcap · tanh(s / softcap) → + bias → + ln(factor) of the edits
//     → masked keys to −∞
//   ln w = s − maximum − ln Σ exp(s − maximum), the sink among the exponents
//
// Maximum and sum stay apart: scores of 10⁶ lose nothing. As in regard's _backends/formula.py.

/** @typedef {Float32Array | Float64Array | Int32Array | Uint8Array} Numbers */

/**
 * An array of three axes; those of size 1 are broadcast.
 * @typedef {{values: Numbers, shape: number[]}} Repeated
 */

/**
 * Half-open ranges of heads, queries and keys, null for all, and the factor of their weights; 0
 * masks them.
 * @typedef {[heads: Range | null, queries: Range | null, keys: Range | null, factor: number]} Edit
 */

/** @typedef {[start: number, stop: number | null]} Range */

/**
 * An edit of one head.
 * @typedef {{queries: [number, number], keys: [number, number], log: number}} HeadEdit
 */

/**
 * The rules that mask keys by position in a layer, and the options of its scores.
 * @typedef {{scale: number, softcap: number | null, causal: boolean, left: number | null,
 *   right: number | null, start: number, length: number, edits: Edit[]}} Rules
 */

/**
 * A layer; query, key, value, and the gradient by the output, are flat.
 * @typedef {Rules & {heads: number, keyHeads: number, queries: number, keys: number, size: number,
 *   valueSize: number, query: Numbers, key: Numbers, value: Numbers | null,
 *   gradient: Numbers | null,
 *   sinks: Numbers | null, querySegments: Numbers | null, keySegments: Numbers | null,
 *   intervalFirst: Numbers | null, intervalLast: Numbers | null,
 *   mask: Repeated | null, bias: Repeated | null}} HeldLayer
 */

/**
 * A score on its way to the softmax.
 * @typedef {{score: number, scaled: number, capped: number, biased: number, edited: number,
 *   masked: number}} Pair
 */

export class AttentionHead {
  /**
   * @param {HeldLayer} layer
   * @param {number} head
   */
  constructor(layer, head) {
    const shared = Math.floor(head / (layer.heads / layer.keyHeads));
    const { queries, keys, size, valueSize } = layer;
    this.layer = layer;
    this.query = layer.query.subarray(head * queries * size, (head + 1) * queries * size);
    this.key = layer.key.subarray(shared * keys * size, (shared + 1) * keys * size);
    this.value =
      layer.value?.subarray(shared * keys * valueSize, (shared + 1) * keys * valueSize) ?? null;
    this.gradient =
      layer.gradient?.subarray(head * queries * valueSize, (head + 1) * queries * valueSize) ??
      null;
    this.sink = layer.sinks?.[head] ?? -Infinity;
    this.biasAt = layer.bias ? repeatedArray(layer.bias, head) : null;
    this.maskAt = layer.mask ? repeatedArray(layer.mask, head) : null;
    this.edits = editsOf(layer, head);
    const cuts = this.edits.some(({ log }) => log === -Infinity);
    this.hasRules = Boolean(layer.querySegments || layer.mask || cuts);
    this.line = new Float64Array(keys); // of the last row computed
    this.known = new Uint8Array(queries);
    this.maximum = new Float64Array(queries);
    this.logSum = new Float64Array(queries); // NaN where the weights are NaN
  }

  /**
   * The keys, low to high − 1, that query i may attend to by position and its interval.
   * @param {number} i
   * @returns {[low: number, high: number]}
   */
  interval(i) {
    const { start, length, causal, left, right, intervalFirst, intervalLast } = this.layer;
    let [low, high] = [intervalFirst?.[i] ?? 0, Math.min(length, intervalLast?.[i] ?? length)];
    if (causal) high = Math.min(high, start + i + 1);
    if (right !== null) high = Math.min(high, start + i + right + 1);
    if (left !== null) low = Math.max(low, start + i - left);
    high = Math.max(high, 0);
    return [Math.min(low, high), high];
  }

  /**
   * Whether key j of query i's interval is unmasked, by segments, edits and mask.
   * @param {number} i
   * @param {number} j
   */
  sees(i, j) {
    const { querySegments, keySegments } = this.layer;
    if (querySegments && querySegments[i] !== keySegments?.[j]) return false;
    if (this.edits.some((edit) => edit.log === -Infinity && hasPair(edit, i, j))) return false;
    return this.maskAt?.(i, j) !== 0;
  }

  /**
   * The number of unmasked keys of query i.
   * @param {number} i
   */
  visible(i) {
    const [low, high] = this.interval(i);
    if (!this.hasRules) return high - low;
    let count = 0;
    for (let j = low; j < high; j++) if (this.sees(i, j)) count++;
    return count;
  }

  /**
   * q·k of one pair, and every step from it up to the softmax.
   * @param {number} i
   * @param {number} j
   * @returns {Pair}
   */
  pair(i, j) {
    const { line } = this;
    this.#score(i, j, j + 1);
    const score = line[j];
    this.#scale(j, j + 1);
    const scaled = line[j];
    this.#cap(j, j + 1);
    const capped = line[j];
    this.#bias(i, j, j + 1);
    const biased = line[j];
    this.#edit(i, j, j + 1);
    const edited = line[j];
    const [low, high] = this.interval(i);
    const isVisible = low <= j && j < high && this.sees(i, j);
    return { score, scaled, capped, biased, edited, masked: isVisible ? edited : -Infinity };
  }

  /**
   * Writes ln w of query i into this.line, for the keys of its interval from `from` to `to` − 1,
   * and gives their bounds, [low, high]. NaN: masked, or the row is NaN.
   * @param {number} i
   * @param {number} [from]
   * @param {number} [to]
   * @returns {[low: number, high: number]}
   */
  logs(i, from = 0, to = this.layer.keys) {
    const [low, high] = this.interval(i);
    const a = Math.min(Math.max(low, from), high);
    const b = Math.max(a, Math.min(high, to));
    if (this.known[i]) this.#fill(i, a, b);
    else this.#measure(i, low, high);
    const { line } = this;
    const [maximum, logSum] = [this.maximum[i], this.logSum[i]];
    for (let j = a; j < b; j++) line[j] = line[j] - maximum - logSum;
    return [a, b];
  }

  /**
   * Whether the weights of query i, whose logs were computed, are NaN.
   * @param {number} i
   */
  isBroken(i) {
    return Number.isNaN(this.logSum[i]);
  }

  /**
   * Whether the weight of query i with key j of its interval, whose logs were computed, is NaN, and
   * not masked.
   * @param {number} i
   * @param {number} j
   */
  isLost(i, j) {
    return this.isBroken(i) && this.sees(i, j);
  }

  // Whether a pair is one of its own; those of words are many pairs in one.
  isFirst() {
    return true;
  }

  /**
   * The score of query i with each key from low to high − 1, into this.line.
   * @param {number} i
   * @param {number} low
   * @param {number} high
   */
  #score(i, low, high) {
    const { size } = this.layer;
    const query = this.query.subarray(i * size, (i + 1) * size);
    fillProducts(this.line, query, this.key, size, low, high);
  }

  /**
   * Turns the scores in this.line into logits.
   * @param {number} low
   * @param {number} high
   */
  #scale(low, high) {
    const { line } = this;
    const { scale } = this.layer;
    for (let j = low; j < high; j++) line[j] *= scale;
  }

  /** Whether anything but the scale is done to scores before the bias. */
  get isCapped() {
    return this.layer.softcap !== null;
  }

  /**
   * @param {number} low
   * @param {number} high
   */
  #cap(low, high) {
    const { line } = this;
    const { softcap } = this.layer;
    if (softcap === null) return;
    for (let j = low; j < high; j++) line[j] = softcap * Math.tanh(line[j] / softcap);
  }

  /**
   * @param {number} i
   * @param {number} low
   * @param {number} high
   */
  #bias(i, low, high) {
    const { line, biasAt } = this;
    if (biasAt) for (let j = low; j < high; j++) line[j] += biasAt(i, j);
  }

  /**
   * @param {number} i
   * @param {number} low
   * @param {number} high
   */
  #edit(i, low, high) {
    const { line } = this;
    for (const { queries, keys, log } of this.edits) {
      if (i < queries[0] || i >= queries[1]) continue;
      const end = Math.min(high, keys[1]);
      for (let j = Math.max(low, keys[0]); j < end; j++) line[j] += log;
    }
  }

  /**
   * Logits of query i into this.line, NaN where masked; whether an unmasked one is NaN.
   * @param {number} i
   * @param {number} low
   * @param {number} high
   */
  #fill(i, low, high) {
    this.#score(i, low, high);
    this.#scale(low, high);
    this.#cap(low, high);
    this.#bias(i, low, high);
    this.#edit(i, low, high);
    const { line } = this;
    let isBroken = false;
    for (let j = low; j < high; j++) {
      if (this.hasRules && !this.sees(i, j)) line[j] = NaN;
      else if (Number.isNaN(line[j])) isBroken = true;
    }
    return isBroken;
  }

  /**
   * Maximum and sum of query i, and its logits in this.line.
   * @param {number} i
   * @param {number} low
   * @param {number} high
   */
  #measure(i, low, high) {
    const isBroken = this.#fill(i, low, high);
    const { line } = this;
    let maximum = -Infinity;
    for (let j = low; j < high; j++) if (line[j] > maximum) maximum = line[j];
    const isSeeing = maximum !== -Infinity;
    maximum = isSeeing ? Math.max(maximum, this.sink) : 0;
    let sum = isSeeing ? Math.exp(this.sink - maximum) : 0;
    for (let j = low; j < high; j++) if (!Number.isNaN(line[j])) sum += Math.exp(line[j] - maximum);
    this.known[i] = 1;
    this.maximum[i] = maximum;
    this.logSum[i] = isBroken ? NaN : sum === 0 ? 0 : Math.log(sum);
  }
}

/**
 * line[j] = x·y of row j of y, from low to high − 1. Four rows at once, each added up in the order
 * of one alone: 1.6 times as fast as one, and 4.5 times where [a, b] = [0, 0] declared them.
 * @param {Float64Array} line
 * @param {Numbers} x
 * @param {Numbers} y
 * @param {number} size
 * @param {number} low
 * @param {number} high
 */
function fillProducts(line, x, y, size, low, high) {
  let j = low;
  for (; j + 3 < high; j += 4) {
    let a = 0;
    let b = 0;
    let c = 0;
    let d = 0;
    for (let n = 0, at = j * size; n < size; n++, at++) {
      const value = x[n];
      a += value * y[at];
      b += value * y[at + size];
      c += value * y[at + 2 * size];
      d += value * y[at + 3 * size];
    }
    line[j] = a;
    line[j + 1] = b;
    line[j + 2] = c;
    line[j + 3] = d;
  }
  for (; j < high; j++) {
    let sum = 0;
    for (let n = 0, at = j * size; n < size; n++, at++) sum += x[n] * y[at];
    line[j] = sum;
  }
}

/**
 * The edits of a head, in whole numbers.
 * @param {HeldLayer} layer
 * @param {number} head
 * @returns {HeadEdit[]}
 */
function editsOf({ edits, heads, queries, keys }, head) {
  return edits
    .map(([own, rows, columns, factor]) => ({
      heads: ends(own, heads),
      queries: ends(rows, queries),
      keys: ends(columns, keys),
      log: Math.log(factor),
    }))
    .filter(({ heads: [first, last] }) => first <= head && head < last);
}

/**
 * @param {Range | null} range
 * @param {number} count
 * @returns {[start: number, stop: number]}
 */
function ends(range, count) {
  const [start, stop] = range ?? [0, count];
  return [start, stop ?? count];
}

/**
 * @param {HeadEdit} edit
 * @param {number} i
 * @param {number} j
 */
function hasPair({ queries, keys }, i, j) {
  return queries[0] <= i && i < queries[1] && keys[0] <= j && j < keys[1];
}

/**
 * The entry for query i and key j of an array, broadcast along its axes of size 1.
 * @param {Repeated} array
 * @param {number} head
 * @returns {(i: number, j: number) => number}
 */
function repeatedArray({ values, shape }, head) {
  const [heads, rows, columns] = shape;
  const base = heads === 1 ? 0 : head * rows * columns;
  const [down, across] = [rows === 1 ? 0 : columns, columns === 1 ? 0 : 1];
  return (i, j) => values[base + i * down + j * across];
}
