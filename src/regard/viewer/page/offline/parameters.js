// The parameters of a request, checked against the recordings.

import { KIND_NAMES } from "../data/kinds.js";

/** @import { Parameters } from "../data/source.js" */
/** @import { PackedData } from "./local.js" */
/** @import { Part } from "./work.js" */

const FIRST = /** @type {const} */ (["shown", "hidden"]);
const UNITS = /** @type {const} */ (["token", "word"]);

export class LocalParameters {
  /**
   * @param {Parameters} parameters
   * @param {PackedData} data
   */
  constructor(parameters, data) {
    this.parameters = parameters;
    this.data = data;
    this.recording = parameters.recording === undefined ? 0 : this.#recording();
    this.facts = data.about.recordings[this.recording];
    this.first = parameters.first === undefined ? "shown" : this.word("first", FIRST);
    this.unit = parameters.unit === undefined ? "token" : this.word("unit", UNITS);
    this.on = parameters.on === undefined ? null : this.number("on", data.recordings.length);
    this.effect = parameters.effect === undefined ? null : this.word("effect", KIND_NAMES);
    const { against } = parameters;
    this.against = against === undefined ? null : this.number("against", data.recordings.length);
    if (this.on !== null && this.against !== null)
      throw new Error("on and against are two ways to compare; give one of them.");
    if (this.unit === "word" && (this.on !== null || this.against !== null))
      throw new Error("on and against compare tokens; leave unit=word out.");
    if (parameters.heads !== undefined && (this.on !== null || this.against !== null))
      throw new Error("on and against compare one head; give head in place of heads.");
    if (this.effect && this.first === "hidden")
      throw new Error("effects are of the pass as it was; leave first=hidden out.");
    const others = [this.on, this.against, parameters.unit].filter(
      (x) => x !== null && x !== undefined,
    );
    if (this.effect && others.length)
      throw new Error("effects are of a head's own tokens; leave on, against and unit out.");
    // Positions are of the recording that others are shown on.
    if (this.on !== null) {
      const { tokens, queries } = data.about.recordings[this.on];
      this.facts = { ...this.facts, tokens, queries };
    }
  }

  /** The recording to compare with. */
  other() {
    return this.number("with", this.data.recordings.length);
  }

  /** @returns {[recording: number, layer: number, head: number, first: LocalParameters["first"]]} */
  otherHead() {
    const recording = this.other();
    const { layers } = this.data.about.recordings[recording];
    const layer = this.number("with_layer", layers.length);
    return [recording, layer, this.number("with_head", layers[layer].heads), this.first];
  }

  #recording() {
    return this.number("recording", this.data.recordings.length);
  }

  /** @returns {[recording: number, layer: number]} */
  layer() {
    return [this.recording, this.number("layer", this.facts.layers.length)];
  }

  /** @returns {[recording: number, layer: number, head: number, first: LocalParameters["first"]]} */
  head() {
    const [recording, layer] = this.layer();
    return [recording, layer, this.number("head", this.facts.layers[layer].heads), this.first];
  }

  /**
   * The places of `heads`, or of the one `head`.
   * @returns {[recording: number, layer: number, heads: number[], first: LocalParameters["first"]]}
   */
  heads() {
    const [recording, layer] = this.layer();
    if (this.parameters.heads === undefined)
      return [recording, layer, [this.head()[2]], this.first];
    const { heads: count } = this.facts.layers[layer];
    const heads = [...new Set(this.numbers("heads", count, count))].sort((a, b) => a - b);
    return [recording, layer, heads, this.first];
  }

  /**
   * The parts of `queries`, or the one `query`.
   * @returns {Part[]}
   */
  queries() {
    const { queries: given } = this.parameters;
    if (given === undefined) return [[this.query(), this.query() + 1]];
    const texts = String(given).split(",");
    return texts.map((text) => partOf("queries", text, this.facts.queries));
  }

  query() {
    return this.number("query", this.facts.queries);
  }

  key() {
    return this.number("key", this.facts.tokens);
  }

  /** @param {"key" | "query"} side */
  tokens(side) {
    const { tokens, query_tokens: own } = this.data.recordings[this.recording];
    return side === "query" ? (own ?? tokens) : tokens;
  }

  /**
   * @param {string} name
   * @param {number} count
   */
  number(name, count) {
    return numberBelow(name, this.parameters[name], count);
  }

  /**
   * @param {string} name
   * @param {number} count
   * @param {number} most
   */
  numbers(name, count, most) {
    const parts = String(this.parameters[name]).split(",");
    if (parts.length > most)
      throw new Error(`${name} are ${parts.length}; request at most ${most}.`);
    return parts.map((part) => numberBelow(name, part, count));
  }

  /**
   * [a, b] of "a-b", or null where it was left out.
   * @param {"rows" | "columns"} name
   * @returns {Part | null}
   */
  part(name) {
    const given = this.parameters[name];
    if (given === undefined) return null;
    const count = name === "rows" ? this.facts.queries : this.facts.tokens;
    return partOf(name, String(given), count);
  }

  /**
   * @template {string} Word
   * @param {string} name
   * @param {readonly Word[]} known
   */
  word(name, known) {
    const given = this.parameters[name];
    const found = known.find((word) => word === given);
    if (found !== undefined) return found;
    throw new Error(`${name} is ${given}; there are ${known.join(", ")}.`);
  }
}

/**
 * @param {string} name
 * @param {string | number | undefined} given
 * @param {number} count
 */
function numberBelow(name, given, count) {
  if (!/^\d{1,16}$/.test(String(given)))
    throw new Error(`${name} is ${given}; a decimal integer is needed.`);
  if (Number(given) >= count)
    throw new Error(`${name} is ${given}; there are ${count}, 0 to ${count - 1}.`);
  return Number(given);
}

/**
 * @param {string} name
 * @param {string} text
 * @param {number} count
 * @returns {Part}
 */
function partOf(name, text, count) {
  const [low, high] = /^(\d+)-(\d+)$/.exec(text)?.slice(1).map(Number) ?? [0, 0];
  if (low < high && high <= count) return [low, high];
  throw new Error(`${name} is ${text}; a-b is needed, with 0 ≤ a < b ≤ ${count}.`);
}
