// The data source of the page. `request(path, parameters, signal)` gives {body: ArrayBuffer,
// coverage: number}: over HTTP, from a notebook's kernel, or computed here (offline/local.js).

import { takeLost } from "./lost.js";
import { isAbort } from "./watch.js";

/** @import { Lost } from "./lost.js" */

/** @typedef {{[name: string]: string | number | undefined}} Parameters of a request */

/** @typedef {{body: ArrayBuffer, coverage: number}} Reply */

/**
 * Sends a request to an endpoint of docs/viewer-protocol.md.
 * @callback SendRequest
 * @param {string} path
 * @param {Parameters} parameters
 * @param {AbortSignal} [signal]
 * @returns {Promise<Reply>}
 */

/** @typedef {"knockout" | "contribution" | "relevance" | "gradient" | "change"} EffectKind */

/**
 * Facts of a layer. Requests and the selection have layers and heads by their places; people read
 * `number` and `head_numbers`, which are those of the model.
 * @typedef {{number: number, name: string, heads: number, head_numbers: number[],
 *   key_heads: number, head_size: number, value_size: number | null, scale: number,
 *   samples: number, capped: string | null, causal: boolean, weights_only: boolean,
 *   effects: EffectKind[], options: string[]}} LayerFacts
 */

/**
 * Facts of a recording, or of one of the groups that it has: `group` is empty where there is one.
 * @typedef {{name: string, model: string | null, group: string, tokens: number, queries: number, itself: boolean,
 *   start: number, boundary: number | null, words: number, layers: LayerFacts[]}} RecordingFacts
 */

/**
 * A text that can be typed: the one of this reading, its id, whether the model predicts next tokens,
 * and the most characters of another one. `reading` is null where there is no text yet.
 * @typedef {{reading: string | null, text: string, next: boolean, characters: number}} Typed
 */

/** @typedef {{version: number, recordings: RecordingFacts[], typed?: Typed}} About */

/** @typedef {{next: [token: string, probability: number][]}} NextTokens likeliest first */

/**
 * A layer; `first` is "hidden" for its weights without those of the first token.
 * @typedef {{recording: number, layer: number, first?: First}} LayerPlace
 */

/** @typedef {"hidden" | undefined} First */

/**
 * A head, as the parameters of a request name it; or several, `0,2,5`, which are their mean. `unit`
 * is "word" for its weights by words; with `effect` numbers are signed effects, in place of
 * logarithms of weights.
 * @typedef {LayerPlace & {head: number, heads?: string, unit?: Unit, effect?: EffectKind}} Place
 */

/** @typedef {"token" | "word" | undefined} Unit */

/**
 * Logarithms of weights, or effects, or counts: NaN where masked, and where they are `lost`.
 * @typedef {{values: Float32Array, lost: Lost, coverage: number}} Floats
 */

/**
 * A head on the tokens of the recording `on`, or where these have counterparts in `against`.
 * @typedef {Place & {on?: number, against?: number}} MapPlace
 */

/**
 * 256 × 256 bins of 2^level tokens.
 * @typedef {MapPlace & {plane: "max" | "mass", level: number, row: number, column: number}} TilePlace
 */

/**
 * Its ln(weight), or its effect, NaN where that is no finite number.
 * @typedef {[query: number, key: number, number: number]} Link
 */

/** @typedef {{largest: ((number | null)[] | null)[]}} LargestEffects of each head of each layer, in size */

/**
 * Strongest first; queries that see fewer than `fewest` keys are left out.
 * @typedef {{links: Link[], fewest: number, coverage: number}} Links
 */

/** @typedef {[start: number, there: number, count: number]} Run of tokens and their counterparts */

/**
 * A difference is that of the weights of a pair, this head's minus that of its counterpart;
 * `settled`: a repeated request gives the same; `lost`: how many of the queries that were read have
 * differences that are no numbers.
 * @typedef {{links: [query: number, key: number, difference: number][], lost: number,
 *   coverage: number, settled: boolean}} Changed
 */

/** @typedef {(number | null)[]} Scores of each head, null where there is no number */

/**
 * Of the heads of a layer; the corpus is that of a survey, where there is one.
 * @typedef {{size: number, entropy: Scores, distance: Scores, first: Scores | null,
 *   previous: Scores | null, induction: Scores | null, coverage: number, settled: boolean,
 *   corpus?: {entropy: Scores, distance: Scores, first: Scores, previous: Scores,
 *   induction: Scores}}} HeadScores
 */

/**
 * A thumbnail is size × size effects, NaN where masked.
 * @typedef {{size: number, thumbnails: Float32Array, coverage: number, settled: boolean}} EffectThumbnails
 */

/**
 * What each head of each layer is called, by places, its main role in a few letters, its sentence, and the head to open at.
 * @typedef {{opens: {layer: number, head: number}, roles: string[][], tags: string[][], says: string[][]}} HeadRoles
 */

/**
 * Thumbnails and scores of a layer's heads; a thumbnail is size × size logarithms.
 * @typedef {HeadScores & {thumbnails: Float32Array}} HeadsFacts
 */

/**
 * Rows are queries, columns keys; null is −∞, and a step that the head does not have.
 * @typedef {{queries: number[], keys: number[], query: number[][], key: number[][],
 *   value: number[][] | null, scores: number[][], scaled: number[][], capped: number[][] | null,
 *   biased: (number | null)[][] | null, edited: (number | null)[][] | null,
 *   masked: (number | null)[][], weights: number[][], output: number[][] | null}} Steps
 */

export const TILE = 256; // bins on a side
const MAX_CACHED = 512; // responses; as tiles they take 128 MB

export class Source {
  /** @param {SendRequest} request */
  constructor(request) {
    this.request = request;
    /** @type {Map<string, unknown>} LRU cache of the exact responses, the latest used last */
    this.kept = new Map();
    /** @type {Map<string, Promise<unknown>>} requests in flight */
    this.pending = new Map();
  }

  /** @returns {Promise<About>} */
  about() {
    return this.#json("about", {});
  }

  /**
   * The texts of a recording's keys, or of its queries.
   * @param {number} recording
   * @param {"key" | "query"} [side]
   * @returns {Promise<string[]>}
   */
  tokens(recording, side = "key") {
    return this.#json("tokens", { recording, side });
  }

  /**
   * The position of the first piece of each word.
   * @param {number} recording
   * @returns {Promise<{key: number[], query: number[]}>}
   */
  words(recording) {
    return this.#json("words", { recording });
  }

  /**
   * ln of the weights, or effects, of 256 × 256 bins of 2^level tokens.
   * @param {TilePlace} where
   * @param {AbortSignal} [signal]
   */
  tile(where, signal) {
    return this.#floats("tile", where, signal);
  }

  /**
   * The tile where it is known already, else undefined.
   * @param {TilePlace} where
   */
  knownTile(where) {
    return /** @type {Floats | undefined} */ (this.kept.get(address("tile", sent(where))));
  }

  /**
   * ln of the weights of a query over all keys, or the mean of several.
   * @param {MapPlace & {query?: number, queries?: string}} where
   * @param {AbortSignal} [signal]
   */
  row(where, signal) {
    return this.#floats("row", where, signal);
  }

  /**
   * ln of the weights of one key from all queries.
   * @param {MapPlace & {key: number}} where
   * @param {AbortSignal} [signal]
   */
  column(where, signal) {
    return this.#floats("column", where, signal);
  }

  /**
   * The size of the largest effect of each head.
   * @param {{recording: number, effect: EffectKind}} where
   * @returns {Promise<LargestEffects>}
   */
  effects(where) {
    return this.#json("effects", where);
  }

  /**
   * The sums of the weights of each query, then of each key.
   * @param {Place} where
   */
  sums(where) {
    return this.#floats("sums", where);
  }

  /**
   * The number of unmasked keys of each query.
   * @param {Place} where
   */
  visible(where) {
    return this.#floats("visible", { ...where, effect: undefined });
  }

  /**
   * ln of the weight of one pair in every head of every layer, layer after layer.
   * @param {{recording: number, query: number, key: number, first?: First, unit?: Unit,
   *   effect?: EffectKind}} where
   * @param {AbortSignal} [signal]
   */
  pair(where, signal) {
    return this.#floats("pair", where, signal);
  }

  /**
   * Strongest first; of a part where `rows` and `columns` are given, as "from-to".
   * @param {MapPlace & {n: number, rows?: string, columns?: string}} where
   * @param {AbortSignal} [signal]
   * @returns {Promise<Links>}
   */
  links(where, signal) {
    return this.#json("links", where, signal, withNumbers);
  }

  /**
   * Thumbnails and scores of every head of a layer.
   * @param {LayerPlace} where
   * @returns {Promise<HeadsFacts>}
   */
  async heads(where) {
    /** @type {HeadScores & {thumbnails: string}} */
    const found = await this.#json("heads", where);
    return { ...found, thumbnails: unpacked(found.thumbnails) };
  }

  /**
   * The effects of every head of a layer, as thumbnails.
   * @param {{recording: number, layer: number, effect: EffectKind}} where
   * @returns {Promise<EffectThumbnails>}
   */
  async effectThumbnails(where) {
    /** @type {Omit<EffectThumbnails, "thumbnails"> & {thumbnails: string}} */
    const found = await this.#json("heads", where);
    return { ...found, thumbnails: unpacked(found.thumbnails) };
  }

  /**
   * The roles of all heads of a recording.
   * @param {number} recording
   * @returns {Promise<HeadRoles>}
   */
  roles(recording) {
    return this.#json("roles", { recording });
  }

  /**
   * Which tokens of a recording are which of another, in runs.
   * @param {{recording: number, with: number}} where
   * @returns {Promise<{queries: Run[], keys: Run[]}>}
   */
  alignment(where) {
    return this.#json("alignment", where);
  }

  /**
   * How much each head of a layer differs from that of the same numbers in another recording; NaN
   * where a weight is no number.
   * @param {LayerPlace & {with: number}} where
   * @returns {Promise<{change: Scores, coverage: number, settled: boolean}>}
   */
  change(where) {
    return this.#json("change", where, undefined, withNumbers);
  }

  /**
   * The pairs of a head that differ most from those of another, where they have counterparts.
   * @param {Place} one
   * @param {Place} other
   * @param {number} n
   * @returns {Promise<Changed>}
   */
  changed(one, { recording, layer, head }, n) {
    const other = { with: recording, with_layer: layer, with_head: head };
    return this.#json("changed", { ...one, ...other, n });
  }

  /**
   * The likeliest tokens after a query.
   * @param {number} query
   * @returns {Promise<NextTokens>}
   */
  next(query) {
    return this.#json("next", { query });
  }

  /**
   * Every step of some queries and keys of a head, as lists of numbers.
   * @param {Place & {queries: string, keys: string}} where
   * @param {AbortSignal} [signal]
   * @returns {Promise<Steps>}
   */
  steps(where, signal) {
    return this.#json("steps", where, signal, withNumbers);
  }

  /**
   * @param {string} path
   * @param {Parameters} parameters
   * @param {AbortSignal} [signal]
   * @param {(name: string, value: unknown) => unknown} [revive]
   */
  async #json(path, parameters, signal, revive) {
    const decode = (/** @type {Reply} */ { body }) =>
      JSON.parse(new TextDecoder().decode(body), revive);
    return this.#get(path, parameters, signal, decode);
  }

  /**
   * @param {string} path
   * @param {Parameters} parameters
   * @param {AbortSignal} [signal]
   * @returns {Promise<Floats>}
   */
  async #floats(path, parameters, signal) {
    const decode = (/** @type {Reply} */ { body, coverage }) => {
      const values = new Float32Array(body);
      return { values, lost: takeLost(values), coverage };
    };
    return this.#get(path, parameters, signal, decode);
  }

  /**
   * @template {{coverage?: number}} Answer
   * @param {string} path
   * @param {Parameters} parameters
   * @param {AbortSignal | undefined} signal
   * @param {(reply: Reply) => Answer} decode
   * @returns {Promise<Answer>}
   */
  async #get(path, parameters, signal, decode) {
    const name = address(path, sent(parameters));
    const known = /** @type {Answer | undefined} */ (this.kept.get(name));
    if (known !== undefined) {
      this.kept.delete(name);
      this.kept.set(name, known);
      return known;
    }
    const pending = /** @type {Promise<Answer> | undefined} */ (this.pending.get(name));
    if (pending) {
      try {
        return await pending;
      } catch (error) {
        // Who asked first no longer needs it.
        if (!isAbort(error) || signal?.aborted) throw error;
        return this.#get(path, parameters, signal, decode);
      }
    }
    const promise = this.request(path, sent(parameters), signal).then(decode);
    this.pending.set(name, promise);
    try {
      const answer = await promise;
      if ((answer.coverage ?? 1) === 1) this.kept.set(name, answer);
      if (this.kept.size > MAX_CACHED) dropOldest(this.kept);
      return answer;
    } finally {
      this.pending.delete(name);
    }
  }
}

/**
 * Words as the numbers that JSON lacks.
 * @param {string} _
 * @param {unknown} x
 */
function withNumbers(_, x) {
  return x === "NaN" || x === "Infinity" ? Number(x) : x;
}

/** @param {string} text base64 of float32 */
function unpacked(text) {
  return new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}

/**
 * The same text for the same head.
 * @param {Place} where
 */
export function headName({ recording, layer, head, heads, first, unit, effect }) {
  return `${recording}/${layer}/${heads ?? head}/${first ?? ""}/${unit ?? ""}/${effect ?? ""}`;
}

/**
 * What a request sends: several heads stand in place of one.
 * @param {Parameters} parameters
 * @returns {Parameters}
 */
function sent(parameters) {
  return parameters.heads === undefined ? parameters : { ...parameters, head: undefined };
}

/**
 * Drops the oldest entry of a map: the least recently used one of an LRU cache.
 * @param {Map<string, unknown>} map
 */
export function dropOldest(map) {
  for (const name of map.keys()) {
    map.delete(name);
    return;
  }
}

/**
 * @param {string} path
 * @param {Parameters} parameters
 */
function address(path, parameters) {
  const given = Object.entries(parameters).flatMap(([name, value]) =>
    value === undefined ? [] : [[name, String(value)]],
  );
  return `${path}?${new URLSearchParams(given)}`;
}

/**
 * Requests over HTTP, for a page that a server gave; about one reading where it is named.
 * @param {string} [reading]
 * @returns {SendRequest}
 */
export function overHttp(reading) {
  return async (path, parameters, signal) => {
    const response = await fetch(`data/${address(path, { ...parameters, reading })}`, { signal });
    if (!response.ok) throw new Error(await response.text());
    return {
      body: await response.arrayBuffer(),
      coverage: Number(response.headers.get("Regard-Coverage") ?? 1),
    };
  };
}

/**
 * Sends a text to be read by the model, and gives what `about` tells of it.
 * @param {string} text
 * @param {AbortSignal} signal
 * @returns {Promise<About>}
 */
export async function sendText(text, signal) {
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify({ text });
  const response = await fetch("data/read", { method: "POST", headers, body, signal });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}
