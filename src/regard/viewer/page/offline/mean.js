// The mean of several heads, and of several queries, row by row.

import { RowWork, TileWork } from "./work.js";

/** @import { Plane } from "../data/selection.js" */
/** @import { Head, HeadRows, Part } from "./work.js" */

// Several heads of a layer as one: masks by position are those of the layer.
export class MeanHead {
  /** @param {Head[]} heads */
  constructor(heads) {
    this.heads = heads;
    this.layer = heads[0].layer;
    this.line = new Float64Array(this.layer.keys); // of the last row computed
  }

  /** @param {number} i */
  interval(i) {
    return this.heads[0].interval(i);
  }

  /**
   * @param {number} i
   * @param {number} j
   * @param {number} top
   * @param {number} left
   */
  isFirst(i, j, top, left) {
    return this.heads[0].isFirst(i, j, top, left);
  }

  /**
   * @param {number} i
   * @param {number} j
   */
  isLost(i, j) {
    return this.heads.some((head) => Number.isNaN(head.line[j]) && head.isLost(i, j));
  }

  /** @param {number} i */
  visible(i) {
    return this.heads.reduce((sum, head) => sum + head.visible(i), 0) / this.heads.length;
  }

  /**
   * As AttentionHead has it.
   * @param {number} i
   * @param {number} [from]
   * @param {number} [to]
   * @returns {[low: number, high: number]}
   */
  logs(i, from, to) {
    const { heads, line } = this;
    const [low, high] = heads.map((head) => head.logs(i, from, to))[0];
    const lines = heads.map((head) => head.line);
    for (let j = low; j < high; j++) line[j] = this.isLost(i, j) ? NaN : meanLog(lines, j);
    return [low, high];
  }
}

// The tiles of several heads, each bin the mean of theirs.
export class MeanTileWork extends RowWork {
  /** @param {TileWork[]} works of the same tile */
  constructor(works) {
    super(works[0].bounds, works[0].least);
    this.works = works;
  }

  /** @override */
  step() {
    for (const work of this.works) work.step();
    this.read = this.works[0].read;
  }

  /** @param {Plane} plane */
  picture(plane) {
    const pictures = this.works.map((work) => work.picture(plane));
    const isLost = (/** @type {number} */ at) => this.works.some(({ lost }) => lost.has(at));
    return pictures[0].map((_, at) => (isLost(at) ? Infinity : meanLog(pictures, at)));
  }
}

// The mean of some queries over all keys.
export class MeanRowWork extends RowWork {
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
    this.lost = new Uint8Array(head.layer.keys); // the keys with a weight of NaN
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
      const log = head.line[j];
      if (!Number.isNaN(log)) sums[j] = (Number.isNaN(sums[j]) ? 0 : sums[j]) + Math.exp(log);
      else if (head.isLost(query, j)) lost[j] = 1;
    }
  }

  get values() {
    const { sums, lost, read } = this;
    return Float32Array.from(sums, (sum, j) => (lost[j] ? Infinity : Math.log(sum / read)));
  }
}

// The sums of the weights of each query, then of each key.
export class SumsWork extends RowWork {
  /** @param {HeadRows} head */
  constructor(head) {
    const { queries, keys } = head.layer;
    super([0, queries], 0);
    this.head = head;
    this.values = new Float64Array(queries + keys).fill(NaN, 0, queries);
  }

  /**
   * @param {number} row
   * @override
   */
  take(row) {
    const { head, values } = this;
    const { queries } = head.layer;
    const [low, high] = head.logs(row);
    let sum = 0;
    for (let j = low; j < high; j++) {
      const weight = Math.exp(head.line[j]);
      if (Number.isNaN(weight) && !head.isLost(row, j)) continue;
      sum += weight;
      values[queries + j] += weight;
    }
    values[row] = sum;
  }
}

/**
 * ln of the mean of weights from their logarithms at `at`; NaN counts as 0 beside numbers.
 * @param {(Float32Array | Float64Array)[]} logs
 * @param {number} at
 */
function meanLog(logs, at) {
  let most = NaN;
  for (const line of logs) if (!(most >= line[at])) most = line[at] >= -Infinity ? line[at] : most;
  if (!(most > -Infinity)) return most;
  let sum = 0;
  for (const line of logs) if (line[at] > -Infinity) sum += Math.exp(line[at] - most);
  return most + Math.log(sum / logs.length);
}
