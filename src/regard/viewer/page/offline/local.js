// The page's numbers computed in the page, from the query, key and value that it holds: an exported
// file asks nobody. Answers as docs/viewer-protocol.md has them.

import { forgetFirst, TILE } from "../data/source.js";
import { AttentionHead } from "./attention.js";
import { LocalParameters } from "./parameters.js";
import { LATER, LocalTurns, SOON } from "./turns.js";
import { unpackedArray } from "./unpack.js";
import { ColumnWork, HeadsWork, LinksWork, TileWork, VisibleWork } from "./work.js";

/** @import { About, Ask, Parameters, Reply } from "../data/source.js" */
/** @import { Numbers, HeldLayer, Pair, Rules } from "./attention.js" */
/** @import { Patience } from "./turns.js" */
/** @import { Dtype } from "./unpack.js" */
/** @import { RowWork } from "./work.js" */

/**
 * An array of the file: the name of the text that holds it, and what it is.
 * @typedef {{text: string, dtype: Dtype, shape: number[]}} PackedArray
 */

/** @typedef {Rules & {arrays: {[name: string]: PackedArray | undefined}}} PackedLayer */

/**
 * @typedef {{tokens: string[], query_tokens: string[] | null,
 *   layers: PackedLayer[]}} PackedRecording
 */

/**
 * What an exported file holds, as regard/viewer/export.py packs it.
 * @typedef {{about: About, recordings: PackedRecording[]}} PackedData
 */

/** @typedef {{value: unknown, coverage?: number}} Found */

/** @typedef {(name: string) => string} TextOf */

const BUDGET_MS = 250; // of computing for an answer that can be given in part
const PATIENCE_MS = 1000; // for it, while others compute
const WANTED_MS = 3000; // after an answer in part, until it is given up
const MOST_WORKS = 48; // kept: 1 MB each
const MOST_LINKS = 512;
const MOST_STEPS = 64;

/**
 * The `ask` of a page that holds its recordings; `textOf(name)` gives the text of a packed array.
 * @param {PackedData} data
 * @param {TextOf} textOf
 * @returns {Ask}
 */
export function overLocal(data, textOf) {
  const local = new LocalAnswers(data, textOf);
  return (path, parameters, signal) => local.answer(path, parameters, signal);
}

class LocalAnswers {
  /**
   * @param {PackedData} data
   * @param {TextOf} textOf
   */
  constructor(data, textOf) {
    this.data = data;
    this.textOf = textOf;
    this.turns = new LocalTurns();
    /** @type {Map<string, Promise<HeldLayer>>} */
    this.layers = new Map();
    /** @type {Map<string, Promise<AttentionHead>>} */
    this.heads = new Map();
    /** @type {Map<string, RowWork>} under way or done, the latest asked for last */
    this.works = new Map();
  }

  /**
   * @param {string} path
   * @param {Parameters} parameters
   * @param {AbortSignal} [signal]
   * @returns {Promise<Reply>}
   */
  async answer(path, parameters, signal) {
    const question = this.#questions[path];
    if (!question) throw new Error(`there is no question of the name ${path}.`);
    const found = await question(new LocalParameters(parameters, this.data), signal);
    const { value, coverage = 1 } = found;
    const isFloats = value instanceof Float32Array;
    const body = isFloats
      ? value.slice()
      : new TextEncoder().encode(JSON.stringify(value, inWords));
    return { body: body.buffer, coverage };
  }

  /** @type {{[path: string]: (asked: LocalParameters, signal?: AbortSignal) => Promise<Found>}} */
  #questions = {
    about: async () => ({ value: this.data.about }),
    tokens: async (asked) => ({ value: asked.tokens(asked.word("side", ["key", "query"])) }),
    tile: (asked, signal) => this.#tile(asked, signal),
    row: (asked, signal) => this.#row(asked, signal),
    column: (asked, signal) => this.#column(asked, signal),
    visible: (asked, signal) => this.#visible(asked, signal),
    links: (asked, signal) => this.#links(asked, signal),
    heads: (asked, signal) => this.#heads(asked, signal),
    pair: (asked, signal) => this.#pair(asked, signal),
    steps: (asked, signal) => this.#steps(asked, signal),
  };

  /**
   * @param {LocalParameters} asked
   * @param {AbortSignal} [signal]
   */
  async #tile(asked, signal) {
    const head = await this.#head(...asked.head());
    const plane = asked.word("plane", ["max", "mass"]);
    const level = asked.number("level", 32);
    const tiles = (/** @type {number} */ count) => Math.ceil(count / (TILE * 2 ** level));
    const row = asked.number("row", tiles(asked.facts.queries));
    const column = asked.number("column", tiles(asked.facts.tokens));
    const name = `tile ${asked.head()} ${level} ${row} ${column}`;
    const work = await this.#worked(
      name,
      () => new TileWork(head, level, row, column),
      SOON,
      signal,
    );
    return { value: work.picture(plane), coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} asked
   * @param {AbortSignal} [signal]
   */
  async #row(asked, signal) {
    const head = await this.#head(...asked.head());
    const query = asked.query();
    await this.turns.wait(SOON, signal);
    const [low, high] = head.logs(query);
    const value = new Float32Array(head.layer.keys).fill(NaN);
    value.set(head.line.subarray(low, high), low);
    return { value };
  }

  /**
   * @param {LocalParameters} asked
   * @param {AbortSignal} [signal]
   */
  async #column(asked, signal) {
    const head = await this.#head(...asked.head());
    const key = asked.key();
    const name = `column ${asked.head()} ${key}`;
    const work = await this.#worked(name, () => new ColumnWork(head, key), SOON, signal);
    return { value: work.values, coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} asked
   * @param {AbortSignal} [signal]
   */
  async #visible(asked, signal) {
    const head = await this.#head(...asked.head());
    const work = new VisibleWork(head);
    while (work.read < work.count) await this.#advance(work, SOON, signal, BUDGET_MS);
    return { value: work.values };
  }

  /**
   * @param {LocalParameters} asked
   * @param {AbortSignal} [signal]
   */
  async #links(asked, signal) {
    const head = await this.#head(...asked.head());
    const n = asked.number("n", MOST_LINKS + 1);
    const [rows, columns] = [asked.part("rows"), asked.part("columns")];
    const name = `links ${asked.head()} ${n} ${rows} ${columns}`;
    const work = await this.#worked(
      name,
      () => new LinksWork(head, n, rows, columns),
      SOON,
      signal,
    );
    return { value: { links: work.links(), coverage: work.coverage }, coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} asked
   * @param {AbortSignal} [signal]
   */
  async #heads(asked, signal) {
    const [recording, layer] = asked.layer();
    const { heads: count } = await this.#layer(recording, layer);
    const numbers = Array.from({ length: count }, (_, head) => head);
    const heads = await Promise.all(numbers.map((head) => this.#head(recording, layer, head)));
    const make = () => new HeadsWork(heads, asked.facts.itself ? asked.tokens("key") : null);
    const work = await this.#worked(`heads ${recording} ${layer}`, make, LATER, signal);
    return { value: work.facts(), coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} asked
   * @param {AbortSignal} [signal]
   */
  async #pair(asked, signal) {
    const [query, key, recording] = [asked.query(), asked.key(), asked.recording];
    const found = [];
    for (const layer of this.data.recordings[recording].layers.keys()) {
      const { heads } = await this.#layer(recording, layer);
      for (let n = 0; n < heads; n++) {
        const head = await this.#head(recording, layer, n);
        if (this.turns.isOver) await this.turns.wait(SOON, signal);
        found.push(head.log(query, key));
      }
    }
    return { value: Float32Array.from(found) };
  }

  /**
   * @param {LocalParameters} asked
   * @param {AbortSignal} [signal]
   */
  async #steps(asked, signal) {
    const head = await this.#head(...asked.head());
    const queries = asked.numbers("queries", asked.facts.queries, MOST_STEPS);
    const keys = asked.numbers("keys", asked.facts.tokens, MOST_STEPS);
    /** @type {(array: Numbers | null, size: number, places: number[]) => number[][] | null} */
    const vectors = (array, size, places) =>
      array ? places.map((n) => [...array.subarray(n * size, (n + 1) * size)]) : null;
    const { size, valueSize } = head.layer;
    /** @type {number[][]} */
    const weights = [];
    /** @type {number[][]} */
    const output = [];
    for (const i of queries) {
      await this.turns.wait(SOON, signal);
      const line = rowOfWeights(head, i);
      weights.push(keys.map((j) => line[j]));
      if (head.value) output.push(outputOf(head, head.value, line, i));
    }
    const pairs = queries.map((i) => keys.map((j) => head.pair(i, j)));
    const matrix = (/** @type {keyof Pair} */ name) =>
      pairs.map((row) => row.map((pair) => pair[name]));
    const value = {
      queries,
      keys,
      query: vectors(head.query, size, queries),
      key: vectors(head.key, size, keys),
      value: vectors(head.value, valueSize, keys),
      scores: matrix("score"),
      scaled: matrix("scaled"),
      capped: head.isCapped ? matrix("capped") : null,
      biased: head.biasAt ? matrix("biased") : null,
      masked: matrix("masked"),
      weights,
      output: head.value ? output : null,
    };
    return { value };
  }

  /**
   * What is asked of some work, done at least as far as it can be shown.
   * @template {RowWork} Work
   * @param {string} name
   * @param {() => Work} make
   * @param {Patience} patience
   * @param {AbortSignal} [signal]
   */
  async #worked(name, make, patience, signal) {
    const work = /** @type {Work} */ (this.works.get(name) ?? make());
    this.works.delete(name);
    this.works.set(name, work);
    if (this.works.size > MOST_WORKS) forgetFirst(this.works);
    await this.#advance(work, patience, signal, BUDGET_MS);
    this.#goOn(work);
    return work;
  }

  /**
   * Goes on with what was shown in part, as long as somebody asks for it now and then.
   * @param {RowWork} work
   */
  async #goOn(work) {
    work.wanted = performance.now() + WANTED_MS;
    if (work.goesOn) return;
    work.goesOn = true;
    while (work.read < work.count && performance.now() < work.wanted) {
      await this.turns.wait(LATER);
      while (work.read < work.count && !this.turns.isOver) work.step();
    }
    work.goesOn = false;
  }

  /**
   * Until it is done; or can be shown, and has had its time.
   * @param {RowWork} work
   * @param {Patience} patience
   * @param {AbortSignal | undefined} signal
   * @param {number} budget
   */
  async #advance(work, patience, signal, budget) {
    const until = performance.now() + PATIENCE_MS;
    let left = budget;
    while (work.read < work.count) {
      if (this.turns.isOver) await this.turns.wait(patience, signal);
      const began = performance.now();
      if (work.read >= work.least && (left < 0 || began > until)) break;
      if (work.read < work.count) work.step();
      left -= performance.now() - began;
    }
  }

  /**
   * @param {number} recording
   * @param {number} layer
   */
  #layer(recording, layer) {
    const make = () => readLayer(this.data.recordings[recording].layers[layer], this.textOf);
    return rememberedIn(this.layers, `${recording} ${layer}`, make);
  }

  /**
   * @param {number} recording
   * @param {number} layer
   * @param {number} head
   */
  #head(recording, layer, head) {
    const make = async () => new AttentionHead(await this.#layer(recording, layer), head);
    return rememberedIn(this.heads, `${recording} ${layer} ${head}`, make);
  }
}

/**
 * @template Kept
 * @param {Map<string, Kept>} map
 * @param {string} name
 * @param {() => Kept} make
 */
function rememberedIn(map, name, make) {
  const known = map.get(name) ?? make();
  map.set(name, known);
  return known;
}

/**
 * A layer as AttentionHead wants it, from what the file has of it.
 * @param {PackedLayer} layer
 * @param {TextOf} textOf
 * @returns {Promise<HeldLayer>}
 */
async function readLayer({ arrays, ...options }, textOf) {
  const read = async (/** @type {string} */ name) => {
    const array = arrays[name];
    if (!array) return null;
    const { text, dtype, shape } = array;
    return { values: await unpackedArray(textOf(text), dtype), shape };
  };
  const names = [
    "query",
    "key",
    "value",
    "sinks",
    "query_segments",
    "key_segments",
    "mask",
    "bias",
  ];
  const all = await Promise.all(names.map(read));
  const [query, key, value, sinks, querySegments, keySegments, mask, bias] = all;
  if (!query || !key) throw new Error("This file has no query or no key; export it again.");
  const [heads, queries, size] = query.shape;
  const [keyHeads, keys] = key.shape;
  return {
    ...options,
    heads,
    keyHeads,
    queries,
    keys,
    size,
    mask,
    bias,
    valueSize: value?.shape[2] ?? 0,
    query: query.values,
    key: key.values,
    value: value?.values ?? null,
    sinks: sinks?.values ?? null,
    querySegments: querySegments?.values ?? null,
    keySegments: keySegments?.values ?? null,
  };
}

/**
 * The weights of query i, 0 where invisible.
 * @param {AttentionHead} head
 * @param {number} i
 */
function rowOfWeights(head, i) {
  const weights = new Float64Array(head.layer.keys);
  const [low, high] = head.logs(i);
  for (let j = low; j < high; j++) {
    const isHidden = head.hasRules && !head.sees(i, j);
    weights[j] = isHidden ? 0 : Math.exp(head.line[j]);
  }
  return weights;
}

/**
 * Σ w · v over the visible keys: what is invisible takes no part, not even as 0 · NaN.
 * @param {AttentionHead} head
 * @param {Numbers} values
 * @param {Float64Array} weights
 * @param {number} i
 * @returns {number[]}
 */
function outputOf(head, values, weights, i) {
  const size = head.layer.valueSize;
  const output = new Array(size).fill(0);
  const [low, high] = head.interval(i);
  for (let j = low; j < high; j++) {
    if (head.hasRules && !head.sees(i, j)) continue;
    for (let d = 0; d < size; d++) output[d] += weights[j] * values[j * size + d];
  }
  return output;
}

/**
 * NaN and +∞ as words, for which JSON has no numbers; −∞ is null.
 * @param {string} _
 * @param {unknown} x
 */
function inWords(_, x) {
  return Number.isNaN(x) || x === Infinity ? String(x) : x;
}
