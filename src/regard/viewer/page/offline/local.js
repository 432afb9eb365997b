// The page's numbers computed in the page, from the query, key and value that it holds: an exported
// file asks nobody. Answers as docs/viewer-protocol.md has them.

import { TILE } from "../data/source.js";
import { AttentionHead } from "./attention.js";
import { unpackedArray } from "./unpack.js";
import { ColumnWork, HeadsWork, LinksWork, TileWork, VisibleWork } from "./work.js";

const SLICE_MS = 10; // of computing, before the page may draw and listen again
const BUDGET_MS = 250; // of computing for an answer that can be given in part
const PATIENCE_MS = 1000; // for it, while others compute
const WANTED_MS = 3000; // after an answer in part, until it is given up
const MOST_WORKS = 48; // kept: 1 MB each
const MOST_LINKS = 512;
const MOST_STEPS = 64;
const SOON = 0; // what the page waits for
const LATER = 1; // what it can do without for now

// The `ask` of a page that holds its recordings: data is {about, recordings: [{tokens,
// query_tokens, layers}]}, and `textOf(name)` gives the text of a packed array.
export function overLocal(data, textOf) {
  const local = new LocalAnswers(data, textOf);
  return (path, parameters, signal) => local.answer(path, parameters, signal);
}

class LocalAnswers {
  constructor(data, textOf) {
    this.data = data;
    this.textOf = textOf;
    this.turns = new LocalTurns();
    this.layers = new Map();
    this.heads = new Map();
    this.works = new Map(); // under way or done, the latest asked for last
  }

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

  async #tile(asked, signal) {
    const head = await this.#head(...asked.head());
    const plane = asked.word("plane", ["max", "mass"]);
    const level = asked.number("level", 32);
    const tiles = (count) => Math.ceil(count / (TILE * 2 ** level));
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

  async #row(asked, signal) {
    const head = await this.#head(...asked.head());
    const query = asked.query();
    await this.turns.wait(SOON, signal);
    const [low, high] = head.logs(query);
    const value = new Float32Array(head.layer.keys).fill(NaN);
    value.set(head.line.subarray(low, high), low);
    return { value };
  }

  async #column(asked, signal) {
    const head = await this.#head(...asked.head());
    const key = asked.key();
    const name = `column ${asked.head()} ${key}`;
    const work = await this.#worked(name, () => new ColumnWork(head, key), SOON, signal);
    return { value: work.values, coverage: work.coverage };
  }

  async #visible(asked, signal) {
    const head = await this.#head(...asked.head());
    const work = new VisibleWork(head);
    while (work.read < work.count) await this.#advance(work, SOON, signal, BUDGET_MS);
    return { value: work.values };
  }

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

  async #heads(asked, signal) {
    const [recording, layer] = asked.layer();
    const { heads: count } = await this.#layer(recording, layer);
    const numbers = Array.from({ length: count }, (_, head) => head);
    const heads = await Promise.all(numbers.map((head) => this.#head(recording, layer, head)));
    const make = () => new HeadsWork(heads, asked.facts.itself ? asked.tokens("key") : null);
    const work = await this.#worked(`heads ${recording} ${layer}`, make, LATER, signal);
    return { value: work.facts(), coverage: work.coverage };
  }

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

  async #steps(asked, signal) {
    const head = await this.#head(...asked.head());
    const queries = asked.numbers("queries", asked.facts.queries, MOST_STEPS);
    const keys = asked.numbers("keys", asked.facts.tokens, MOST_STEPS);
    const vectors = (array, size, places) =>
      array ? places.map((n) => [...array.subarray(n * size, (n + 1) * size)]) : null;
    const { size, valueSize, softcap } = head.layer;
    const [weights, output] = [[], []];
    for (const i of queries) {
      await this.turns.wait(SOON, signal);
      const line = rowOfWeights(head, i);
      weights.push(keys.map((j) => line[j]));
      if (head.value) output.push(outputOf(head, line, i));
    }
    const pairs = queries.map((i) => keys.map((j) => head.pair(i, j)));
    const matrix = (name) => pairs.map((row) => row.map((pair) => pair[name]));
    const value = {
      queries,
      keys,
      query: vectors(head.query, size, queries),
      key: vectors(head.key, size, keys),
      value: vectors(head.value, valueSize, keys),
      scores: matrix("score"),
      scaled: matrix("scaled"),
      capped: softcap === null ? null : matrix("capped"),
      biased: head.biasAt ? matrix("biased") : null,
      masked: matrix("masked"),
      weights,
      output: head.value ? output : null,
    };
    return { value };
  }

  // What is asked of some work, done at least as far as it can be shown.
  async #worked(name, make, patience, signal) {
    const work = this.works.get(name) ?? make();
    this.works.delete(name);
    this.works.set(name, work);
    if (this.works.size > MOST_WORKS) this.works.delete(this.works.keys().next().value);
    await this.#advance(work, patience, signal, BUDGET_MS);
    this.#goOn(work);
    return work;
  }

  // Goes on with what was shown in part, as long as somebody asks for it now and then.
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

  // Until it is done; or can be shown, and has had its time.
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

  #layer(recording, layer) {
    const make = () => readLayer(this.data.recordings[recording].layers[layer], this.textOf);
    return rememberedIn(this.layers, `${recording} ${layer}`, make);
  }

  #head(recording, layer, head) {
    const make = async () => new AttentionHead(await this.#layer(recording, layer), head);
    return rememberedIn(this.heads, `${recording} ${layer} ${head}`, make);
  }
}

function rememberedIn(map, name, make) {
  if (!map.has(name)) map.set(name, make());
  return map.get(name);
}

// A layer as AttentionHead wants it, from what the file has of it.
async function readLayer({ arrays, ...options }, textOf) {
  const read = async (name) => {
    if (!arrays[name]) return null;
    const { text, dtype, shape } = arrays[name];
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

// The weights of query i, 0 where invisible.
function rowOfWeights(head, i) {
  const weights = new Float64Array(head.layer.keys);
  const [low, high] = head.logs(i);
  for (let j = low; j < high; j++) {
    const isHidden = head.hasRules && !head.sees(i, j);
    weights[j] = isHidden ? 0 : Math.exp(head.line[j]);
  }
  return weights;
}

// Σ w · v over the visible keys: what is invisible takes no part, not even as 0 · NaN.
function outputOf(head, weights, i) {
  const size = head.layer.valueSize;
  const output = new Array(size).fill(0);
  const [low, high] = head.interval(i);
  for (let j = low; j < high; j++) {
    if (head.hasRules && !head.sees(i, j)) continue;
    for (let d = 0; d < size; d++) output[d] += weights[j] * head.value[j * size + d];
  }
  return output;
}

// Parameters of a question, checked against what there is.
class LocalParameters {
  constructor(parameters, data) {
    this.parameters = parameters;
    this.data = data;
    this.recording = parameters.recording === undefined ? 0 : this.#recording();
    this.facts = data.about.recordings[this.recording];
  }

  #recording() {
    return this.number("recording", this.data.recordings.length);
  }

  layer() {
    return [this.recording, this.number("layer", this.facts.layers.length)];
  }

  head() {
    const [recording, layer] = this.layer();
    return [recording, layer, this.number("head", this.facts.layers[layer].heads)];
  }

  query() {
    return this.number("query", this.facts.queries);
  }

  key() {
    return this.number("key", this.facts.tokens);
  }

  tokens(side) {
    const { tokens, query_tokens: own } = this.data.recordings[this.recording];
    return side === "query" ? (own ?? tokens) : tokens;
  }

  number(name, count) {
    return numberBelow(name, this.parameters[name], count);
  }

  numbers(name, count, most) {
    const parts = String(this.parameters[name]).split(",");
    if (parts.length > most)
      throw new Error(`${name} are ${parts.length}; ask for at most ${most}.`);
    return parts.map((part) => numberBelow(name, part, count));
  }

  // [a, b] of "a-b", or null where it was left out.
  part(name) {
    const given = this.parameters[name];
    if (given === undefined) return null;
    const count = name === "rows" ? this.facts.queries : this.facts.tokens;
    const [low, high] = /^(\d+)-(\d+)$/.exec(given)?.slice(1).map(Number) ?? [0, 0];
    if (low < high && high <= count) return [low, high];
    throw new Error(`${name} is ${given}; a-b is needed, with 0 ≤ a < b ≤ ${count}.`);
  }

  word(name, known) {
    const given = this.parameters[name];
    if (known.includes(given)) return given;
    throw new Error(`${name} is ${given}; there are ${known.join(", ")}.`);
  }
}

function numberBelow(name, given, count) {
  if (!/^\d{1,16}$/.test(String(given)))
    throw new Error(`${name} is ${given}; a decimal integer is needed.`);
  if (Number(given) >= count)
    throw new Error(`${name} is ${given}; there are ${count}, 0 to ${count - 1}.`);
  return Number(given);
}

// Slices of computing, one at a time, with time for the page between them; what it waits for first.
class LocalTurns {
  constructor() {
    this.since = -Infinity;
    this.waiting = [[], []];
    this.channel = new MessageChannel();
    this.channel.port1.onmessage = () => this.#next();
  }

  get isOver() {
    return performance.now() - this.since > SLICE_MS;
  }

  wait(patience, signal) {
    return new Promise((resolve, reject) => {
      this.waiting[patience].push({ resolve, reject, signal });
      this.channel.port2.postMessage(null);
    });
  }

  #next() {
    const { resolve, reject, signal } = this.waiting[SOON].shift() ?? this.waiting[LATER].shift();
    this.since = performance.now();
    if (signal?.aborted) reject(new DOMException("no longer needed", "AbortError"));
    else resolve();
  }
}

// NaN and +∞ as words, for which JSON has no numbers; −∞ is null.
function inWords(_, x) {
  return Number.isNaN(x) || x === Infinity ? String(x) : x;
}
