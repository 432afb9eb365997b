// The endpoints of docs/viewer-protocol.md computed in the page, from the query, key and value that
// it holds: an exported file sends no requests.

import { dropOldest, TILE } from "../data/source.js";
import { ChangedWork, ChangeWork } from "./aligned.js";
import { AttentionHead } from "./attention.js";
import { Comparisons, nameOf } from "./comparisons.js";
import {
  EffectHead,
  EffectHeadsWork,
  EffectLinksWork,
  EffectRowsWork,
  EffectTileWork,
  LargestWork,
  MeanEffects,
} from "./effects.js";
import { MeanHead, MeanRowWork, MeanTileWork, SumsWork } from "./mean.js";
import { LocalParameters } from "./parameters.js";
import { LATER, LocalTurns, SOON } from "./turns.js";
import { unpackedArray } from "./unpack.js";
import { WordHead } from "./words.js";
import { ColumnWork, HeadsWork, LinksWork, TileWork, toldIn, toldOf, VisibleWork } from "./work.js";

/** @import { About, EffectKind, HeadRoles, SendRequest, Parameters, Reply, Run } from "../data/source.js" */
/** @import { Numbers, HeldLayer, Pair, Rules } from "./attention.js" */
/** @import { Priority } from "./turns.js" */
/** @import { Dtype } from "./unpack.js" */
/** @import { WordStarts } from "./words.js" */
/** @import { HeadRows, RowWork } from "./work.js" */

/**
 * An array of the file: the name of the text that holds it, and what it is.
 * @typedef {{text: string, dtype: Dtype, shape: number[]}} PackedArray
 */

/** @typedef {Rules & {arrays: {[name: string]: PackedArray | undefined}}} PackedLayer */

/**
 * @typedef {{tokens: string[], query_tokens: string[] | null, words: WordStarts,
 *   layers: PackedLayer[], roles: HeadRoles}} PackedRecording
 */

/** @typedef {{queries: Run[], keys: Run[]}} Alignment of a recording's tokens with another's */

/**
 * The content of an exported file, as regard/viewer/export.py packs it; `alignments` of two
 * recordings, the first of them first.
 * @typedef {{about: About, recordings: PackedRecording[],
 *   alignments: {[pair: string]: Alignment}}} PackedData
 */

/** @typedef {{value: unknown, coverage?: number}} Found */

/** @typedef {(name: string) => string} TextOf */

const BUDGET_MS = 250; // of computing, for a response that can be partial
const WAIT_MS = 1000; // for it, while others compute
const WANTED_MS = 3000; // after a partial response, until its work is dropped
const MAX_WORKS = 48; // in the LRU cache: 1 MB each
const MOST_LINKS = 512;
const MOST_STEPS = 64;

/**
 * Requests to the recordings in the page; `textOf(name)` gives the text of a packed array.
 * @param {PackedData} data
 * @param {TextOf} textOf
 * @returns {SendRequest}
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
    this.comparisons = new Comparisons(data, (...where) => this.#head(...where));
    /** @type {Map<string, Promise<HeldLayer>>} */
    this.layers = new Map();
    /** @type {Map<string, Promise<AttentionHead>>} */
    this.heads = new Map();
    /** @type {WeakMap<HeadRows, Float32Array>} the number of unmasked keys of each query */
    this.seen = new WeakMap();
    /** @type {Map<string, WordHead>} */
    this.words = new Map();
    /** @type {Map<string, EffectHead>} */
    this.effects = new Map();
    /** @type {Map<string, RowWork>} LRU cache of work in progress or done */
    this.works = new Map();
  }

  /**
   * @param {string} path
   * @param {Parameters} parameters
   * @param {AbortSignal} [signal]
   * @returns {Promise<Reply>}
   */
  async answer(path, parameters, signal) {
    const endpoint = this.#endpoints[path];
    if (!endpoint) throw new Error(`there is no endpoint of the name ${path}.`);
    const found = await endpoint(new LocalParameters(parameters, this.data), signal);
    const { value, coverage = 1 } = found;
    const isFloats = value instanceof Float32Array;
    const body = isFloats
      ? value.slice()
      : new TextEncoder().encode(JSON.stringify(value, inWords));
    return { body: body.buffer, coverage };
  }

  /**
   * @type {{[path: string]:
   *   (parameters: LocalParameters, signal?: AbortSignal) => Promise<Found>}}
   */
  #endpoints = {
    about: async () => ({ value: this.data.about }),
    tokens: async (parameters) => ({
      value: parameters.tokens(parameters.word("side", ["key", "query"])),
    }),
    words: async ({ recording }) => ({ value: this.data.recordings[recording].words }),
    tile: (parameters, signal) => this.#tile(parameters, signal),
    row: (parameters, signal) => this.#row(parameters, signal),
    column: (parameters, signal) => this.#column(parameters, signal),
    sums: (parameters, signal) => this.#sums(parameters, signal),
    visible: (parameters, signal) => this.#visible(parameters, signal),
    links: (parameters, signal) => this.#links(parameters, signal),
    heads: (parameters, signal) => this.#heads(parameters, signal),
    roles: async ({ recording }) => ({ value: this.data.recordings[recording].roles }),
    pair: (parameters, signal) => this.#pair(parameters, signal),
    effects: (parameters, signal) => this.#largest(parameters, signal),
    alignment: async (parameters) => ({
      value: this.comparisons.alignment(parameters.recording, parameters.other()),
    }),
    change: (parameters, signal) => this.#change(parameters, signal),
    changed: (parameters, signal) => this.#changed(parameters, signal),
    steps: (parameters, signal) => this.#steps(parameters, signal),
  };

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #tile(parameters, signal) {
    const plane = parameters.word("plane", ["max", "mass"]);
    const level = parameters.number("level", 32);
    // The share of several tokens is what they have, whatever words they are of.
    const isShare = plane === "mass" && level > 0;
    const unit = isShare ? "token" : parameters.unit;
    const tiles = (/** @type {number} */ count) => Math.ceil(count / (TILE * 2 ** level));
    const row = parameters.number("row", tiles(parameters.facts.queries));
    const column = parameters.number("column", tiles(parameters.facts.tokens));
    const name = `tile ${nameOf(parameters)} ${unit} ${level} ${row} ${column}`;
    if (parameters.effect) {
      const rows = await this.#rowsOf(parameters);
      const make = () => new EffectTileWork(rows, level, row, column);
      const work = await this.#worked(name, make, SOON, signal);
      return { value: work.picture(), coverage: work.coverage };
    }
    const heads = await this.#headsOf(parameters, unit);
    const make = () => {
      const works = heads.map((head) => new TileWork(head, level, row, column));
      return works.length > 1 ? new MeanTileWork(works) : works[0];
    };
    const work = await this.#worked(name, make, SOON, signal);
    return { value: work.picture(plane), coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #row(parameters, signal) {
    const head = await this.#rowsOf(parameters);
    const parts = parameters.queries();
    const [[query, end]] = parts;
    if (parts.length > 1 || end > query + 1) {
      const name = `rows ${nameOf(parameters)} ${parameters.unit} ${parts}`;
      const make = () =>
        parameters.effect ? new EffectRowsWork(head, parts) : new MeanRowWork(head, parts);
      const work = await this.#worked(name, make, SOON, signal);
      return { value: work.values, coverage: work.coverage };
    }
    await this.turns.wait(SOON, signal);
    const [low, high] = head.logs(query);
    const value = new Float32Array(head.layer.keys).fill(NaN);
    for (let key = low; key < high; key++) value[key] = toldIn(head, query, key);
    return { value };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #column(parameters, signal) {
    const head = await this.#rowsOf(parameters);
    const key = parameters.key();
    const name = `column ${nameOf(parameters)} ${parameters.unit} ${key}`;
    const work = await this.#worked(name, () => new ColumnWork(head, key), SOON, signal);
    return { value: work.values, coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #sums(parameters, signal) {
    const head = await this.#rowsOf(parameters);
    const name = `sums ${parameters.heads()}`;
    const work = await this.#worked(name, () => new SumsWork(head), SOON, signal);
    return { value: Float32Array.from(work.values), coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #visible(parameters, signal) {
    return { value: await this.#seenBy(await this.#rowsOf(parameters), signal) };
  }

  /**
   * The number of unmasked keys of each query of a head, or their mean of several.
   * @param {HeadRows} head
   * @param {AbortSignal} [signal]
   */
  async #seenBy(head, signal) {
    const known = this.seen.get(head);
    if (known) return known;
    const work = new VisibleWork(head);
    while (work.read < work.count) await this.#advance(work, SOON, signal, BUDGET_MS);
    this.seen.set(head, work.values);
    return work.values;
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #links(parameters, signal) {
    const head = await this.#rowsOf(parameters);
    const n = parameters.number("n", MOST_LINKS + 1);
    const [rows, columns] = [parameters.part("rows"), parameters.part("columns")];
    const name = `links ${nameOf(parameters)} ${parameters.unit} ${n} ${rows} ${columns}`;
    const seen = parameters.effect ? null : await this.#seenBy(head, signal);
    const make = () =>
      seen
        ? new LinksWork(head, n, rows, columns, seen)
        : new EffectLinksWork(head, n, rows, columns);
    const work = await this.#worked(name, make, SOON, signal);
    const { fewest, coverage } = work;
    return { value: { links: work.links(), fewest, coverage }, coverage };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #heads(parameters, signal) {
    const [recording, layer] = parameters.layer();
    const { first, effect } = parameters;
    const { heads: count } = await this.#layer(recording, layer, first);
    const numbers = Array.from({ length: count }, (_, head) => head);
    if (effect) {
      const every = numbers.map((head) => this.#effectsOf(recording, layer, head, effect));
      const heads = await Promise.all(every);
      const name = `effects ${recording} ${layer} ${effect}`;
      const work = await this.#worked(name, () => new EffectHeadsWork(heads), LATER, signal);
      return { value: work.facts(), coverage: work.coverage };
    }
    const heads = await Promise.all(
      numbers.map((head) => this.#head(recording, layer, head, first)),
    );
    const make = () =>
      new HeadsWork(heads, parameters.facts.itself ? parameters.tokens("key") : null);
    const work = await this.#worked(`heads ${recording} ${layer} ${first}`, make, LATER, signal);
    return { value: work.facts(), coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #change(parameters, signal) {
    const [name, heads, places] = await this.comparisons.change(parameters);
    const work = await this.#worked(name, () => new ChangeWork(heads, places), LATER, signal);
    return { value: work.change(), coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #changed(parameters, signal) {
    const [name, heads, places] = await this.comparisons.changed(parameters);
    const n = parameters.number("n", MOST_LINKS + 1);
    const start = () => new ChangedWork(heads, places, n);
    const work = await this.#worked(`${name} ${n}`, start, SOON, signal);
    return { value: work.changed(), coverage: work.coverage };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #pair(parameters, signal) {
    const [query, key] = [parameters.query(), parameters.key()];
    const { recording, first, unit, effect, facts } = parameters;
    const found = [];
    for (const layer of this.data.recordings[recording].layers.keys()) {
      const { heads } = await this.#layer(recording, layer, first);
      const hasNone = effect && !facts.layers[layer].effects.length;
      for (let n = 0; n < heads; n++) {
        if (this.turns.isOver) await this.turns.wait(SOON, signal);
        if (hasNone) found.push(NaN);
        else if (effect)
          found.push(toldOf(await this.#effectsOf(recording, layer, n, effect), query, key));
        else found.push(toldOf(await this.#read(recording, layer, n, first, unit), query, key));
      }
    }
    return { value: Float32Array.from(found) };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #largest({ recording, facts, effect }, signal) {
    if (!effect) throw new Error("effect is missing; this endpoint needs it.");
    const largest = [];
    for (const [layer, { heads: count, effects }] of facts.layers.entries()) {
      const numbers = Array.from({ length: effects.length ? count : 0 }, (_, head) => head);
      const read = (/** @type {number} */ head) => this.#effectsOf(recording, layer, head, effect);
      const heads = await Promise.all(numbers.map(read));
      const name = `largest ${recording} ${layer} ${effect}`;
      const work =
        heads.length && (await this.#worked(name, () => new LargestWork(heads), SOON, signal));
      largest.push(work ? work.largest() : null);
    }
    return { value: { largest } };
  }

  /**
   * @param {LocalParameters} parameters
   * @param {AbortSignal} [signal]
   */
  async #steps(parameters, signal) {
    const head = await this.#head(...parameters.head());
    const queries = parameters.numbers("queries", parameters.facts.queries, MOST_STEPS);
    const keys = parameters.numbers("keys", parameters.facts.tokens, MOST_STEPS);
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
      edited: head.edits.length ? matrix("edited") : null,
      masked: matrix("masked"),
      weights,
      output: head.value ? output : null,
    };
    return { value };
  }

  /**
   * Some work from the cache, done at least as far as it can be shown.
   * @template {RowWork} Work
   * @param {string} name
   * @param {() => Work} make
   * @param {Priority} priority
   * @param {AbortSignal} [signal]
   */
  async #worked(name, make, priority, signal) {
    const work = /** @type {Work} */ (this.works.get(name) ?? make());
    this.works.delete(name);
    this.works.set(name, work);
    if (this.works.size > MAX_WORKS) dropOldest(this.works);
    await this.#advance(work, priority, signal, BUDGET_MS);
    this.#goOn(work);
    return work;
  }

  /**
   * Continues partial work in the background, as long as requests for it come now and then.
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
   * Works until it is done, or until it can be shown and its time is over.
   * @param {RowWork} work
   * @param {Priority} priority
   * @param {AbortSignal | undefined} signal
   * @param {number} budget
   */
  async #advance(work, priority, signal, budget) {
    const until = performance.now() + WAIT_MS;
    let left = budget;
    while (work.read < work.count) {
      if (this.turns.isOver) await this.turns.wait(priority, signal);
      const began = performance.now();
      if (work.read >= work.least && (left < 0 || began > until)) break;
      if (work.read < work.count) work.step();
      left -= performance.now() - began;
    }
  }

  /**
   * @param {number} recording
   * @param {number} layer
   * @param {LocalParameters["first"]} first
   * @returns {Promise<HeldLayer>}
   */
  #layer(recording, layer, first) {
    const make = async () => {
      if (first === "hidden") return withoutFirst(await this.#layer(recording, layer, "shown"));
      return readLayer(this.data.recordings[recording].layers[layer], this.textOf);
    };
    return cached(this.layers, `${recording} ${layer} ${first}`, make);
  }

  /**
   * The heads that are asked for, by tokens or by words, at the tokens that are wanted.
   * @param {LocalParameters} parameters
   * @param {LocalParameters["unit"]} [unit]
   */
  #headsOf(parameters, unit = parameters.unit) {
    const [recording, layer, places, first] = parameters.heads();
    const read = async (/** @type {number} */ head) => {
      const found = await this.#read(recording, layer, head, first, unit);
      return this.comparisons.placed(found, parameters);
    };
    return Promise.all(places.map(read));
  }

  /**
   * The head that is asked for, or the mean of several.
   * @param {LocalParameters} parameters
   * @returns {Promise<HeadRows>}
   */
  async #rowsOf(parameters) {
    const { effect } = parameters;
    if (effect) {
      const [recording, layer, places] = parameters.heads();
      const read = (/** @type {number} */ head) => this.#effectsOf(recording, layer, head, effect);
      const every = await Promise.all(places.map(read));
      return every.length > 1 ? new MeanEffects(every) : every[0];
    }
    const heads = await this.#headsOf(parameters);
    return heads.length > 1 ? new MeanHead(heads) : heads[0];
  }

  /**
   * @param {number} recording
   * @param {number} layer
   * @param {number} head
   * @param {LocalParameters["first"]} first
   * @param {LocalParameters["unit"]} unit
   * @returns {Promise<AttentionHead | WordHead>}
   */
  async #read(recording, layer, head, first, unit) {
    const pieces = await this.#head(recording, layer, head, first);
    if (unit !== "word") return pieces;
    const make = () => new WordHead(pieces, this.data.recordings[recording].words);
    return cached(this.words, `${recording} ${layer} ${head} ${first}`, make);
  }

  /**
   * @param {number} recording
   * @param {number} layer
   * @param {number} head
   * @param {EffectKind} kind
   */
  async #effectsOf(recording, layer, head, kind) {
    const found = await this.#head(recording, layer, head, "shown");
    const make = () => new EffectHead(found, kind);
    return cached(this.effects, `${recording} ${layer} ${head} ${kind}`, make);
  }

  /**
   * @param {number} recording
   * @param {number} layer
   * @param {number} head
   * @param {LocalParameters["first"]} first
   */
  #head(recording, layer, head, first) {
    const make = async () => new AttentionHead(await this.#layer(recording, layer, first), head);
    return cached(this.heads, `${recording} ${layer} ${head} ${first}`, make);
  }
}

/**
 * @template Kept
 * @param {Map<string, Kept>} map
 * @param {string} name
 * @param {() => Kept} make
 */
function cached(map, name, make) {
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
    "gradient",
    "sinks",
    "query_segments",
    "key_segments",
    "interval_first",
    "interval_last",
    "mask",
    "bias",
  ];
  const all = await Promise.all(names.map(read));
  const [query, key, value, gradient, sinks, querySegments, keySegments, first, last, mask, bias] =
    all;
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
    gradient: gradient?.values ?? null,
    sinks: sinks?.values ?? null,
    querySegments: querySegments?.values ?? null,
    keySegments: keySegments?.values ?? null,
    intervalFirst: first?.values ?? null,
    intervalLast: last?.values ?? null,
  };
}

/**
 * The layer with its first key hidden.
 * @param {HeldLayer} layer
 * @returns {HeldLayer}
 */
function withoutFirst(layer) {
  const { queries, keys, intervalFirst, intervalLast } = layer;
  const from = (/** @type {number} */ i) => Math.max(1, intervalFirst?.[i] ?? 0);
  const to = (/** @type {number} */ i) => Math.max(1, intervalLast?.[i] ?? keys);
  return {
    ...layer,
    intervalFirst: Float64Array.from({ length: queries }, (_, i) => from(i)),
    intervalLast: Float64Array.from({ length: queries }, (_, i) => to(i)),
  };
}

/**
 * The weights of query i, 0 where masked.
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
 * Σ w · v over the unmasked keys; masked ones are skipped, so that 0 · NaN never counts.
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
