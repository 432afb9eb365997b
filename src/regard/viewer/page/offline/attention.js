// Attention of one head in float64, row by row, so that nothing of size Lq × Lk is stored:
//
//   s = scale · q·kᵀ → softcap · tanh(s / softcap) → + bias → invisible keys to −∞
//   ln w = s − maximum − ln Σ exp(s − maximum), the sink among the exponents
//
// Maximum and sum stay apart: scores of 10⁶ lose nothing. The same as regard's _reference.py.

// A layer: {heads, keyHeads, queries, keys, size, valueSize, scale, softcap, causal, left, right,
// start, length, query, key, value, sinks, querySegments, keySegments, mask, bias}; arrays are
// flat, mask and bias {values, shape} of three axes, of which those of size 1 are repeated.
export class AttentionHead {
  constructor(layer, head) {
    const shared = Math.floor(head / (layer.heads / layer.keyHeads));
    const { queries, keys, size, valueSize } = layer;
    this.layer = layer;
    this.query = layer.query.subarray(head * queries * size, (head + 1) * queries * size);
    this.key = layer.key.subarray(shared * keys * size, (shared + 1) * keys * size);
    this.value = layer.value?.subarray(shared * keys * valueSize, (shared + 1) * keys * valueSize);
    this.sink = layer.sinks?.[head] ?? -Infinity;
    this.biasAt = layer.bias ? repeatedArray(layer.bias, head) : null;
    this.maskAt = layer.mask ? repeatedArray(layer.mask, head) : null;
    this.hasRules = Boolean(layer.querySegments || layer.mask);
    this.line = new Float64Array(keys); // of the row that was asked for last
    this.known = new Uint8Array(queries);
    this.maximum = new Float64Array(queries);
    this.logSum = new Float64Array(queries); // NaN where the weights are no numbers
  }

  // The keys, from low to high − 1, that query i may see by place alone.
  interval(i) {
    const { start, length, causal, left, right } = this.layer;
    let [low, high] = [0, length];
    if (causal) high = Math.min(high, start + i + 1);
    if (right !== null) high = Math.min(high, start + i + right + 1);
    if (left !== null) low = Math.max(low, start + i - left);
    high = Math.max(high, 0);
    return [Math.min(low, high), high];
  }

  // Whether query i sees key j of its interval, by segments and mask.
  sees(i, j) {
    const { querySegments, keySegments } = this.layer;
    if (querySegments && querySegments[i] !== keySegments[j]) return false;
    return !this.maskAt || this.maskAt(i, j) !== 0;
  }

  // How many keys query i sees.
  visible(i) {
    const [low, high] = this.interval(i);
    if (!this.hasRules) return high - low;
    let count = 0;
    for (let j = low; j < high; j++) if (this.sees(i, j)) count++;
    return count;
  }

  // q·k of one pair, and what becomes of it up to the softmax.
  pair(i, j) {
    const { scale, softcap, size } = this.layer;
    const score = product(this.query, i * size, this.key, j * size, size);
    const scaled = scale * score;
    const capped = softcap === null ? scaled : softcap * Math.tanh(scaled / softcap);
    const biased = this.biasAt ? capped + this.biasAt(i, j) : capped;
    const [low, high] = this.interval(i);
    const isVisible = low <= j && j < high && this.sees(i, j);
    return { score, scaled, capped, biased, masked: isVisible ? biased : -Infinity, isVisible };
  }

  // Writes ln w of query i into this.line, for the keys of its interval from `from` to `to` − 1,
  // and gives their bounds, [low, high]. NaN: invisible, or the row is of NaN.
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

  // Whether the weights of query i, whose logs were asked for, are no numbers.
  isBroken(i) {
    return Number.isNaN(this.logSum[i]);
  }

  // ln of one weight.
  log(i, j) {
    if (!this.known[i]) this.#measure(i, ...this.interval(i));
    const { masked, isVisible } = this.pair(i, j);
    return isVisible ? masked - this.maximum[i] - this.logSum[i] : NaN;
  }

  // Logits of query i into this.line, NaN where invisible; whether one that is visible is NaN.
  #fill(i, low, high) {
    const { query, key, line, biasAt } = this;
    const { scale, softcap, size } = this.layer;
    fillProducts(line, scale, query.subarray(i * size, (i + 1) * size), key, size, low, high);
    if (softcap !== null)
      for (let j = low; j < high; j++) line[j] = softcap * Math.tanh(line[j] / softcap);
    if (biasAt) for (let j = low; j < high; j++) line[j] += biasAt(i, j);
    let isBroken = false;
    for (let j = low; j < high; j++) {
      if (this.hasRules && !this.sees(i, j)) line[j] = NaN;
      else if (line[j] !== line[j]) isBroken = true;
    }
    return isBroken;
  }

  // Maximum and sum of query i, and its logits in this.line.
  #measure(i, low, high) {
    const isBroken = this.#fill(i, low, high);
    const { line } = this;
    let maximum = -Infinity;
    for (let j = low; j < high; j++) if (line[j] > maximum) maximum = line[j];
    const isSeeing = maximum !== -Infinity;
    maximum = isSeeing ? Math.max(maximum, this.sink) : 0;
    let sum = isSeeing ? Math.exp(this.sink - maximum) : 0;
    for (let j = low; j < high; j++) if (line[j] === line[j]) sum += Math.exp(line[j] - maximum);
    this.known[i] = 1;
    this.maximum[i] = maximum;
    this.logSum[i] = isBroken ? NaN : sum === 0 ? 0 : Math.log(sum);
  }
}

// q·k of one pair.
function product(x, atX, y, atY, size) {
  let sum = 0;
  for (let n = 0; n < size; n++) sum += x[atX + n] * y[atY + n];
  return sum;
}

// line[j] = scale · x·y of row j of y, from low to high − 1. Four rows at once, each added up in the
// order of `product`: 1.6 times as fast as one, and 4.5 times where [a, b] = [0, 0] declared them.
function fillProducts(line, scale, x, y, size, low, high) {
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
    line[j] = scale * a;
    line[j + 1] = scale * b;
    line[j + 2] = scale * c;
    line[j + 3] = scale * d;
  }
  for (; j < high; j++) line[j] = scale * product(x, 0, y, j * size, size);
}

// The entry for query i and key j of an array that is repeated along its axes of size 1.
function repeatedArray({ values, shape }, head) {
  const [heads, rows, columns] = shape;
  const base = heads === 1 ? 0 : head * rows * columns;
  const [down, across] = [rows === 1 ? 0 : columns, columns === 1 ? 0 : 1];
  return (i, j) => values[base + i * down + j * across];
}
