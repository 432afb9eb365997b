// Which heads and tokens a request compares.

import { AlignedHead } from "./aligned.js";

/** @import { Run } from "../data/source.js" */
/** @import { Places } from "./aligned.js" */
/** @import { AttentionHead } from "./attention.js" */
/** @import { Alignment, PackedData } from "./local.js" */
/** @import { LocalParameters } from "./parameters.js" */
/** @import { WordHead } from "./words.js" */

/** @typedef {[one: AttentionHead, other: AttentionHead]} Heads */

/**
 * @callback HeadOf
 * @param {number} recording
 * @param {number} layer
 * @param {number} head
 * @param {LocalParameters["first"]} first
 * @returns {Promise<AttentionHead>}
 */

export class Comparisons {
  /**
   * @param {PackedData} data
   * @param {HeadOf} headOf
   */
  constructor(data, headOf) {
    this.data = data;
    this.headOf = headOf;
  }

  /**
   * A head, on the tokens of another recording, or where its own have counterparts.
   * @param {AttentionHead | WordHead} head
   * @param {LocalParameters} parameters
   */
  placed(head, parameters) {
    const { on, against, recording } = parameters;
    if (on !== null) return new AlignedHead(head, this.#places(on, recording));
    if (against === null) return head;
    const { queries, keys } = this.#places(recording, against);
    return new AlignedHead(head, { queries: chosen(queries), keys: chosen(keys) });
  }

  /**
   * The heads of a layer, each with that of the same numbers, or null.
   * @param {LocalParameters} parameters
   * @returns {Promise<[name: string, heads: (Heads | null)[], places: Places]>}
   */
  async change(parameters) {
    const [recording, layer] = parameters.layer();
    const [other, { first }] = [parameters.other(), parameters];
    const { head_numbers: numbers, number } = parameters.facts.layers[layer];
    const { layers } = this.data.about.recordings[other];
    const there = layers.findIndex((facts) => facts.number === number);
    /** @type {(_: number, head: number) => Promise<Heads | null>} */
    const compared = async (_, head) => {
      const same = layers[there]?.head_numbers.indexOf(numbers[head]) ?? -1;
      if (same < 0) return null;
      const one = await this.headOf(recording, layer, head, first);
      return [one, await this.headOf(other, there, same, first)];
    };
    const name = `change ${recording} ${layer} ${other} ${first}`;
    return [name, await Promise.all(numbers.map(compared)), this.#places(recording, other)];
  }

  /**
   * Two heads.
   * @param {LocalParameters} parameters
   * @returns {Promise<[name: string, heads: Heads, places: Places]>}
   */
  async changed(parameters) {
    const [one, other] = [parameters.head(), parameters.otherHead()];
    const heads = await Promise.all([this.headOf(...one), this.headOf(...other)]);
    return [`changed ${one} ${other}`, heads, this.#places(one[0], other[0])];
  }

  /**
   * @param {number} one
   * @param {number} other
   * @returns {Alignment}
   */
  alignment(one, other) {
    const { queries, tokens } = this.data.about.recordings[one];
    if (one === other) return { queries: [[0, 0, queries]], keys: [[0, 0, tokens]] };
    const known = this.data.alignments[`${Math.min(one, other)} ${Math.max(one, other)}`];
    return one < other ? known : turned(known);
  }

  /**
   * The counterparts of one recording's tokens.
   * @param {number} one
   * @param {number} other
   * @returns {Places}
   */
  #places(one, other) {
    const { queries, tokens } = this.data.about.recordings[one];
    const runs = this.alignment(one, other);
    return { queries: placesOf(runs.queries, queries), keys: placesOf(runs.keys, tokens) };
  }
}

/**
 * The same text for the same map.
 * @param {LocalParameters} parameters
 */
export function nameOf(parameters) {
  const { on, against, effect } = parameters;
  return `${parameters.heads()} ${on} ${against} ${effect}`;
}

/**
 * The counterpart of each of `count` tokens; -1: none.
 * @param {Run[]} runs
 * @param {number} count
 */
function placesOf(runs, count) {
  const places = new Int32Array(count).fill(-1);
  for (const [start, there, length] of runs)
    for (let n = 0; n < length; n++) places[start + n] = there + n;
  return places;
}

/**
 * The own number of each place that has a counterpart.
 * @param {Int32Array} places
 */
function chosen(places) {
  return places.map((there, n) => (there < 0 ? -1 : n));
}

/**
 * An alignment, seen from the other recording.
 * @param {Alignment} alignment
 * @returns {Alignment}
 */
function turned({ queries, keys }) {
  /** @type {(runs: Run[]) => Run[]} */
  const back = (runs) => runs.map(([start, there, count]) => [there, start, count]);
  return { queries: back(queries), keys: back(keys) };
}
