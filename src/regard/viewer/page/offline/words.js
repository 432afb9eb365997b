// A head by words: each pair of pieces has the weight of its pair of words, the sum over the key's
// pieces of the mean over the query's. As in regard's viewer/_words.py.

/** @import { AttentionHead } from "./attention.js" */

/**
 * The first piece of each word.
 * @typedef {{key: number[], query: number[]}} WordStarts
 */

// What works read of an AttentionHead.
export class WordHead {
  /**
   * @param {AttentionHead} head
   * @param {WordStarts} starts
   */
  constructor(head, starts) {
    const { layer } = head;
    this.head = head;
    this.layer = layer;
    this.down = wordOf(starts.query, layer.queries);
    this.across = wordOf(starts.key, layer.keys);
    this.tops = [...starts.query, layer.queries];
    this.lefts = [...starts.key, layer.keys];
    this.line = new Float64Array(layer.keys); // of the last row computed
    this.sums = new Float64Array(starts.key.length); // of its words; NaN where masked, or lost
    this.lost = new Uint8Array(starts.key.length); // the words whose weights are NaN, not masked
    this.word = -1; // whose these are
  }

  /**
   * As AttentionHead has it, for the word of query i.
   * @param {number} i
   * @param {number} [from]
   * @param {number} [to]
   * @returns {[low: number, high: number]}
   */
  logs(i, from = 0, to = this.layer.keys) {
    this.#read(this.down[i]);
    const [low, high] = this.interval(i);
    const a = Math.min(Math.max(low, from), high);
    const b = Math.max(a, Math.min(high, to));
    for (let j = a; j < b; j++) this.line[j] = Math.log(this.sums[this.across[j]]);
    return [a, b];
  }

  /**
   * The keys from the first to the last word that query i's word may see.
   * @param {number} i
   * @returns {[low: number, high: number]}
   */
  interval(i) {
    const every = this.#pieces(this.down[i]).map((piece) => this.head.interval(piece));
    const seen = every.filter(([low, high]) => low < high);
    if (!seen.length) return [0, 0];
    const last = Math.max(...seen.map(([, high]) => high)) - 1;
    const first = Math.min(...seen.map(([low]) => low));
    return [this.lefts[this.across[first]], this.lefts[this.across[last] + 1]];
  }

  /**
   * @param {number} i
   * @param {number} j
   */
  sees(i, j) {
    this.#read(this.down[i]);
    return !Number.isNaN(this.sums[this.across[j]]);
  }

  /**
   * The number of unmasked words of query i's word.
   * @param {number} i
   */
  visible(i) {
    this.#read(this.down[i]);
    const { sums, lost } = this;
    return sums.reduce((count, sum, n) => count + (Number.isNaN(sum) && !lost[n] ? 0 : 1), 0);
  }

  /** @param {number} i */
  isBroken(i) {
    this.#read(this.down[i]);
    return this.lost.includes(1);
  }

  /**
   * As AttentionHead has it.
   * @param {number} i
   * @param {number} j
   */
  isLost(i, j) {
    this.#read(this.down[i]);
    return this.lost[this.across[j]] === 1;
  }

  /**
   * Whether query i and key j are the first of their words, or of the part that starts there.
   * @param {number} i
   * @param {number} j
   * @param {number} top
   * @param {number} left
   */
  isFirst(i, j, top, left) {
    const isTop = i === top || i === this.tops[this.down[i]];
    return isTop && (j === left || j === this.lefts[this.across[j]]);
  }

  /** @param {number} word */
  #pieces(word) {
    const [first, after] = [this.tops[word], this.tops[word + 1]];
    return Array.from({ length: after - first }, (_, n) => first + n);
  }

  /** @param {number} word */
  #read(word) {
    if (word === this.word) return;
    this.word = word;
    const { head, sums, lost, across } = this;
    const pieces = this.#pieces(word);
    sums.fill(NaN);
    lost.fill(0);
    for (const piece of pieces) {
      const [low, high] = head.logs(piece);
      for (let j = low; j < high; j++) {
        const weight = Math.exp(head.line[j]) / pieces.length;
        if (!Number.isNaN(weight)) sums[across[j]] = (sums[across[j]] || 0) + weight;
        else if (head.isLost(piece, j)) lost[across[j]] = 1;
      }
    }
    lost.forEach((isLost, n) => {
      if (isLost) sums[n] = NaN;
    });
  }
}

/**
 * The word of each of `count` pieces.
 * @param {number[]} starts
 * @param {number} count
 */
function wordOf(starts, count) {
  const words = new Uint32Array(count);
  starts.forEach((start, word) => {
    words.fill(word, start, starts[word + 1] ?? count);
  });
  return words;
}
