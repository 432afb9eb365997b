// The selection on the page, and the address that follows it.

import { colourRange, isEnd, usualScale } from "../drawing/colours.js";
import { KIND_NAMES } from "./kinds.js";
import { countIn, isIn, partsOf, partsText, placesOfNumbers } from "./several.js";

/** @import { About, EffectKind, LargestEffects, LayerFacts, Place } from "./source.js" */
/** @import { Part } from "./several.js" */
/** @import { Source } from "./source.js" */
/** @import { Aligned } from "./alignment.js" */
/** @import { Texts } from "./tokens.js" */

/** @typedef {"map" | "steps" | "lines"} View */
/** @typedef {"max" | "mass" | "effect"} Plane */
/** @typedef {"token" | "word"} Unit */
/** @import { Scale } from "../drawing/colours.js" */
/** @typedef {"to" | "by"} Side */
/** @typedef {"" | "side" | "difference"} Compare */

/**
 * @typedef {{view: View, recording: number, layer: number, head: number, heads: string,
 *   query: number | null, queries: string, key: number | null, plane: Plane, kind: EffectKind,
 *   scale: Scale | "",
 *   first: "" | "hidden", unit: Unit | "", sums: "" | "shown", side: Side, low: number | null,
 *   high: number | null, span: number | null, compare: Compare, other: string, x: number | null,
 *   y: number | null, zoom: number | null, text: string}} Fields
 */

/** @typedef {Set<keyof Fields>} Changed the names of the fields that changed */

/** @typedef {{changed: Changed, since?: number}} Change */

/**
 * Shared by all parts of the page. `because`: a panel's words that come first in the status line of
 * its change; `drawn` waits for the map's first whole picture, which `isDrawn` announces.
 * @typedef {{about: About, source: Source, selection: Selection,
 *   texts: (recording: number) => Promise<Texts>, aligned: () => Aligned,
 *   align: () => Promise<Aligned>, say: (text: string, isLate?: boolean) => void, said: () => number,
 *   aside: (text: string) => void, because: string, root: HTMLElement, ended: AbortSignal,
 *   drawn: Promise<void>, isDrawn: () => void}} Context
 */

/** @type {Readonly<Fields>} */
const DEFAULTS = {
  view: "map", // or "steps", or "lines"
  recording: 0,
  layer: 0,
  head: 0,
  heads: "", // several of the layer, by their numbers, `2,4,7`; `head` is one of them
  query: null, // a position, or none
  queries: "", // several, `3-7,9-10`; `query` is one of them
  key: null,
  plane: "max", // "mass", or "effect"
  kind: "knockout", // of effects
  scale: "", // "linear", "log" or "uniform"; by itself as many keys need it
  first: "", // or "hidden": the first token, and the others share its weight
  unit: "", // "token" or "word"; by itself words in short texts
  sums: "", // or "shown": of rows and columns, beside the map
  side: "to", // what the query attends to; "by": what the key is attended by
  low: null, // the range of colours, where it was edited, its ends as isEnd allows; see Range
  high: null,
  span: null, // the same of a difference, or of effects: colours reach from −span to span
  compare: "", // "side" or "difference": with
  other: "", // L2H1, or L2H1@1 in the second recording
  x: null, // the map: the token at its left and top, and device pixels for a token
  y: null,
  zoom: null,
  text: "", // that was typed; empty for the one that the page opened with
};
// Back undoes these; the others are replaced in the address.
/** @type {(keyof Fields)[]} */
const STEPS = [
  "view",
  "recording",
  "layer",
  "head",
  "query",
  "key",
  "heads",
  "queries",
  "compare",
  "other",
];
const SHORT_TEXT = 200; // tokens; shorter ones are shown by words
/** @type {(keyof Fields)[]} */
const CHOSEN = ["recording", "layer", "head", "heads", "query", "queries", "key"];
// Browsers refuse more than some twenty changes of the address a second.
const ADDRESS_MS = 200;

/** @implements {Fields} */
export class Selection extends EventTarget {
  view = DEFAULTS.view;
  recording = DEFAULTS.recording;
  layer = DEFAULTS.layer;
  head = DEFAULTS.head;
  heads = DEFAULTS.heads;
  query = DEFAULTS.query;
  queries = DEFAULTS.queries;
  key = DEFAULTS.key;
  plane = DEFAULTS.plane;
  kind = DEFAULTS.kind;
  scale = DEFAULTS.scale;
  first = DEFAULTS.first;
  unit = DEFAULTS.unit;
  sums = DEFAULTS.sums;
  side = DEFAULTS.side;
  low = DEFAULTS.low;
  high = DEFAULTS.high;
  span = DEFAULTS.span;
  compare = DEFAULTS.compare;
  other = DEFAULTS.other;
  x = DEFAULTS.x;
  y = DEFAULTS.y;
  zoom = DEFAULTS.zoom;
  text = DEFAULTS.text;

  /**
   * `about` is the source's; `address`: whether the page's address follows; `opens`: the head of an
   * address that names none.
   * @param {About} about
   * @param {boolean} address
   * @param {Place} opens
   */
  constructor(about, address, opens) {
    super();
    this.about = about;
    this.address = address;
    this.opens = opens;
    /** @type {Map<string, LargestEffects["largest"]>} by recording and kind, where it is known */
    this.largest = new Map();
    this.ended = false;
    this.choices = 0; // counts up with each, also where it waits for numbers
    this.repeats = false; // while a key is held down: no step back for each of its moves
    /** @type {number | undefined} of an address that is not written yet */
    this.timer = undefined;
    this.goes = () => this.#follow();
    Object.assign(this, opens, address ? fromHash(about, location.hash, opens) : {});
    this.#mend();
    this.hash = location.hash; // as it was written, or read
    if (address) window.addEventListener("popstate", this.goes);
  }

  /**
   * Calls `hear` whenever something has changed.
   * @param {(changed: Changed, since?: number) => void} hear
   */
  listen(hear) {
    this.addEventListener("change", (event) => {
      const { changed, since } = /** @type {CustomEvent<Change>} */ (event).detail;
      hear(changed, since);
    });
  }

  // Stops following the address; what comes later, as a choice that waited for numbers, is nothing.
  end() {
    this.ended = true;
    this.#stopTimer();
    window.removeEventListener("popstate", this.goes);
  }

  /**
   * Sets some fields, each to the nearest value that exists, and notifies the listeners. `step`:
   * whether Back may undo it alone; `since`: how much had been said when the choice began, where a
   * response came between; `isChoice`: whether those that still wait give way to it.
   * @param {Partial<Fields>} fields
   * @param {{step?: boolean, since?: number, isChoice?: boolean}} [how]
   */
  set(fields, { step = !this.repeats, since, isChoice = true } = {}) {
    if (this.ended) return;
    if (isChoice && CHOSEN.some((name) => name in fields)) this.choices++;
    const [before, scale, effect] = [this.#fields(), this.usedScale, this.effect];
    Object.assign(this, this.#moved(fields), fields);
    this.#mend();
    if (this.usedScale !== scale) Object.assign(this, { low: null, high: null, ...fields });
    if (this.effect !== effect) Object.assign(this, { span: null, ...fields });
    const changed = this.#tell(before, since);
    if (!this.address || changed.size === 0) return;
    const late = this.#stopTimer();
    if (step && STEPS.some((name) => changed.has(name))) {
      if (late) this.#write("replaceState", before);
      this.#write("pushState", this.#fields());
    } else this.timer = setTimeout(() => this.settle(), ADDRESS_MS);
  }

  // Writes the address now, where it is behind and nobody has gone to another.
  settle() {
    if (this.#stopTimer() && location.hash === this.hash)
      this.#write("replaceState", this.#fields());
  }

  /**
   * Begins a choice that waits for numbers; the function tells whether none came after it.
   * @returns {() => boolean}
   */
  begins() {
    const own = ++this.choices;
    return () => own === this.choices;
  }

  // Notifies of every field again, as after a failure.
  again() {
    this.#dispatch({ changed: EVERY });
  }

  get recordingFacts() {
    return this.about.recordings[this.recording];
  }

  get layerFacts() {
    return this.recordingFacts.layers[this.layer];
  }

  /**
   * {recording, layer, head, heads, first, unit, effect}: the first parameters of requests for what
   * the map shows; `heads`, where several are chosen, for their mean.
   * @returns {Place}
   */
  get where() {
    const { headPlaces: places, effect } = this;
    return { ...this.oneHead, heads: places.length > 1 ? places.join() : undefined, effect };
  }

  /**
   * The kind of effects that are shown in place of weights: on the map, where both heads that are
   * compared side by side have some.
   * @returns {EffectKind | undefined}
   */
  get effect() {
    const isShown = this.plane === "effect" && this.view === "map" && this.hasEffects;
    return isShown ? this.kind : undefined;
  }

  // Whether there are effects to show; a difference is one of weights.
  get hasEffects() {
    const { compare, layerFacts, about } = this;
    const other = compare ? placeOf(about, this.other) : null;
    const there = other && about.recordings[other.recording].layers[other.layer];
    return (
      [layerFacts, there ?? layerFacts].every(({ effects }) => effects.length > 0) &&
      compare !== "difference"
    );
  }

  // The plane that is shown.
  /** @returns {Plane} */
  get usedPlane() {
    return this.plane === "effect" && !this.effect ? "max" : this.plane;
  }

  // The size of the largest effect of the recording; undefined while it is not known.
  get largestEffect() {
    const largest = this.largest.get(`${this.recording} ${this.kind}`);
    return largest && Math.max(0, ...largest.flatMap((layer) => layer ?? []).map((x) => x ?? 0));
  }

  /**
   * The same of one head; null where it has none, or is not known.
   * @param {number} layer
   * @param {number} head
   */
  largestOf(layer, head) {
    return this.largest.get(`${this.recording} ${this.kind}`)?.[layer]?.[head] ?? null;
  }

  /**
   * Keeps the largest effects, and notifies of a range of colours that follows from them.
   * @param {{recording: number, effect: EffectKind} & LargestEffects} found
   */
  learnEffects({ recording, effect, largest }) {
    this.largest.set(`${recording} ${effect}`, largest);
    this.#dispatch({ changed: new Set(["span"]) });
  }

  /**
   * The same of `head` alone.
   * @returns {Place}
   */
  get oneHead() {
    return { ...this.whereOfTokens, unit: this.usedUnit === "word" ? "word" : undefined };
  }

  /**
   * The same by tokens, whatever the page shows.
   * @returns {Place}
   */
  get whereOfTokens() {
    const { recording, layer, head } = this;
    return { recording, layer, head, first: this.usedFirst || undefined };
  }

  // Effects are of the pass as it was, with its first token.
  get usedFirst() {
    return this.effect ? "" : this.first;
  }

  // The places of the chosen heads.
  get headPlaces() {
    const places = placesOfNumbers(this.heads, this.layerFacts);
    return places.length > 1 ? places : [this.head];
  }

  /**
   * The chosen queries.
   * @returns {Part[]}
   */
  get queryParts() {
    if (this.queries) return partsOf(this.queries, this.recordingFacts.queries);
    return this.query === null ? [] : [[this.query, this.query + 1]];
  }

  // What a request for the weights of the chosen queries, or of their mean, names.
  get asked() {
    return this.queries ? { queries: this.queries } : { query: this.query ?? 0 };
  }

  /**
   * The same of the head to compare with, or null.
   * @returns {Place | null}
   */
  get otherWhere() {
    const place = this.compare ? placeOf(this.about, this.other) : null;
    const { first, unit, effect } = this.where;
    return place && { ...place, first, unit, effect };
  }

  // The scale of the colours.
  get usedScale() {
    const usual = this.effect ? "log" : usualScale(this.recordingFacts.tokens);
    const hasNone = this.scale === "uniform" && this.effect;
    return hasNone ? usual : this.scale || usual;
  }

  // Whether weights are shown by words: where some have several tokens. Steps are of tokens, and so
  // is all that stands beside them.
  /** @returns {Unit} */
  get usedUnit() {
    const { tokens, words } = this.recordingFacts;
    const isOfTokens = this.view === "steps" || this.compare === "difference" || this.effect;
    if (words === tokens || isOfTokens) return "token";
    return this.unit || (tokens < SHORT_TEXT ? "word" : "token");
  }

  // `L5H3`.
  get name() {
    return nameOfPlace(this.about, this);
  }

  /**
   * @param {"pushState" | "replaceState"} how
   * @param {Fields} fields
   */
  #write(how, fields) {
    try {
      history[how](null, "", toHash(this.about, fields));
    } catch (error) {
      // A frame of another page may have no address, and some browsers refuse many changes.
      if (!(error instanceof DOMException)) throw error;
    }
    this.hash = location.hash;
  }

  // Whether the address was behind.
  #stopTimer() {
    const late = this.timer !== undefined;
    clearTimeout(this.timer);
    this.timer = undefined;
    return late;
  }

  #follow() {
    this.#stopTimer();
    this.choices++;
    this.hash = location.hash;
    const before = this.#fields();
    Object.assign(this, DEFAULTS, fromHash(this.about, location.hash, this.opens));
    this.#mend();
    this.#tell(before);
  }

  /**
   * What ends with a change: several queries with another query, several heads with another head,
   * and a comparison with several of either.
   * @param {Partial<Fields>} fields
   * @returns {Partial<Fields>}
   */
  #moved(fields) {
    const { query, layer, head, recording, queries, heads } = fields;
    const isElsewhere = [layer, head, recording].some((place) => place !== undefined);
    return {
      ...this.#recordingMoved(fields),
      ...(query === undefined ? {} : { queries: "" }),
      ...(isElsewhere ? { heads: "" } : {}),
      ...(queries || heads ? { compare: "" } : {}),
    };
  }

  /**
   * In another recording: the head of the same numbers, and in another group, whose text is another,
   * no pair.
   * @param {Partial<Fields>} fields
   * @returns {Partial<Fields>}
   */
  #recordingMoved({ recording: to }) {
    if (to === undefined || to === this.recording) return {};
    const place = nearestPlace(this.about, to, ...numbersOf(this.about, this));
    if (!place) return {};
    const isGroup = this.about.recordings[to].group !== this.recordingFacts.group;
    const nowhere = { query: null, queries: "", key: null, x: null, y: null, zoom: null };
    return isGroup ? { ...place, ...nowhere } : place;
  }

  #fields() {
    return /** @type {Fields} */ (Object.fromEntries(NAMES.map((name) => [name, this[name]])));
  }

  #mend() {
    this.recording = inside(this.recording, this.about.recordings.length);
    const { tokens, queries, layers } = this.recordingFacts;
    this.layer = inside(this.layer, layers.length);
    this.head = inside(this.head, layers[this.layer].heads);
    if (this.query !== null) this.query = inside(this.query, queries);
    if (this.key !== null) this.key = inside(this.key, tokens);
    this.#mendSeveral();
    for (const [name, known] of Object.entries(CHOICES)) {
      const field = /** @type {keyof typeof CHOICES} */ (name);
      if (!known.includes(this[field])) Object.assign(this, { [field]: DEFAULTS[field] });
    }
    this.#mendEnds();
  }

  // The ends of the colours, the smaller one first; none where they are one.
  #mendEnds() {
    if (this.low !== null && !isEnd(this.low)) this.low = null;
    if (this.high !== null && !isEnd(this.high)) this.high = null;
    const { low, high } = colourRange(this);
    if (low === high) Object.assign(this, { low: null, high: null });
    if (low > high) Object.assign(this, { low: high, high: low });
  }

  // Several queries, and several heads, are at least two, the chosen one among them; one of each is
  // compared.
  #mendSeveral() {
    if (this.compare) Object.assign(this, { queries: "", heads: "" });
    const parts = partsOf(this.queries, this.recordingFacts.queries);
    const hasQuery = this.query !== null && isIn(parts, this.query);
    this.queries = hasQuery && countIn(parts) > 1 ? partsText(parts) : "";
    const places = placesOfNumbers(this.heads, this.layerFacts);
    const isSeveral = places.length > 1 && places.includes(this.head);
    this.heads = isSeveral ? places.map((n) => this.layerFacts.head_numbers[n]).join() : "";
  }

  /**
   * @param {Fields} before
   * @param {number} [since]
   * @returns {Changed}
   */
  #tell(before, since) {
    const changed = new Set(NAMES.filter((name) => this[name] !== before[name]));
    if (changed.size) this.#dispatch({ changed, since });
    return changed;
  }

  /** @param {Change} change */
  #dispatch(change) {
    if (this.ended) return;
    this.dispatchEvent(new CustomEvent("change", { detail: change }));
  }
}

/**
 * @param {number} n
 * @param {number} count
 */
function inside(n, count) {
  return Math.max(0, Math.min(Math.round(n) || 0, count - 1));
}

const NAMES = /** @type {(keyof Fields)[]} */ (Object.keys(DEFAULTS));

// What listeners are told where nothing has changed and everything is to be read again.
export const EVERY = /** @type {Changed} */ (new Set(NAMES));

/** @type {Record<"view" | "plane" | "kind" | "scale" | "first" | "unit" | "sums" | "side" | "compare", string[]>} */
const CHOICES = {
  view: ["map", "steps", "lines"],
  plane: ["max", "mass", "effect"],
  kind: KIND_NAMES,
  scale: ["", "linear", "log", "uniform"],
  first: ["", "hidden"],
  unit: ["", "token", "word"],
  sums: ["", "shown"],
  side: ["to", "by"],
  compare: ["", "side", "difference"],
};

/**
 * The head of the name `L2H1`, or `L2H1@1`, by its numbers; null where there is none.
 * @param {About} about
 * @param {string} name
 * @returns {Place | null}
 */
export function placeOf(about, name) {
  const found = /^L(\d+)H(\d+)(?:@(\d+))?$/.exec(name);
  if (!found) return null;
  const [, layer, head, recording] = found;
  const place = nearestPlace(about, Number(recording ?? 0), Number(layer), Number(head));
  const isThere = place && nameOfPlace(about, place) === `L${Number(layer)}H${Number(head)}`;
  return isThere ? place : null;
}

/**
 * `L5H3`, by the numbers of the layer and of the head in the model.
 * @param {About} about
 * @param {Omit<Place, "first" | "unit">} where
 */
export function nameOfPlace(about, where) {
  const [layer, head] = numbersOf(about, where);
  return `L${layer}H${head}`;
}

/**
 * The numbers of the heads that share a key head, from the first on.
 * @param {LayerFacts} facts
 * @param {number} keyHead
 */
export function sharing({ heads, key_heads: keyHeads, head_numbers: numbers }, keyHead) {
  const count = heads / keyHeads;
  return numbers.slice(keyHead * count, (keyHead + 1) * count);
}

/**
 * How many heads a layer has: `8`, or `2 to 8` where layers differ.
 * @param {LayerFacts[]} layers
 */
export function headCounts(layers) {
  const counts = layers.map(({ heads }) => heads);
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  return least === most ? String(most) : `${least} to ${most}`;
}

/**
 * @param {About} about
 * @param {Omit<Place, "first" | "unit">} where
 * @returns {[layer: number, head: number]}
 */
function numbersOf(about, { recording, layer, head }) {
  const facts = about.recordings[recording].layers[layer];
  return [facts?.number ?? layer, facts?.head_numbers[head] ?? head];
}

/**
 * The place whose numbers are nearest to these; null where there is no such recording.
 * @param {About} about
 * @param {number} recording
 * @param {number} layerNumber
 * @param {number} headNumber
 * @returns {Place | null}
 */
export function nearestPlace(about, recording, layerNumber, headNumber) {
  const layers = about.recordings[recording]?.layers;
  if (!layers) return null;
  const numbers = layers.map(({ number }) => number);
  const layer = nearest(numbers, layerNumber);
  return { recording, layer, head: nearest(layers[layer].head_numbers, headNumber) };
}

/**
 * @param {number[]} numbers
 * @param {number} number
 */
function nearest(numbers, number) {
  const far = numbers.map((other) => Math.abs(other - number));
  return far.indexOf(Math.min(...far));
}

/**
 * What people call a recording beside the others: its name, its group, or both.
 * @param {About} about
 * @param {number} recording
 */
export function labelOfRecording(about, recording) {
  const labels = about.recordings.map((_, n) => ownLabel(about, n));
  const label = labels[recording];
  const isOnly = labels.filter((one) => one === label).length === 1;
  const before = labels.slice(0, recording).filter((one) => one === label);
  return isOnly ? label : `${label} (${before.length + 1})`;
}

/**
 * @param {About} about
 * @param {number} recording
 */
function ownLabel(about, recording) {
  const { name, model, group } = about.recordings[recording];
  const called = name || model || "";
  if (group && areGroups(about)) return group;
  return [called, group].filter(Boolean).join(" · ") || `recording ${recording}`;
}

/**
 * Whether the recordings are the groups of one.
 * @param {About} about
 */
export function areGroups({ recordings }) {
  const groups = new Set(recordings.map(({ group }) => group));
  const isOne = recordings.every(({ name }) => name === recordings[0].name);
  return isOne && groups.size === recordings.length && !groups.has("");
}

/**
 * @param {About} about
 * @param {Fields} fields
 */
function toHash(about, fields) {
  const { layer: _, head: __, ...rest } = fields;
  const names = /** @type {(keyof typeof rest)[]} */ (Object.keys(rest));
  const others = names.filter((name) => rest[name] !== DEFAULTS[name]);
  const written = (/** @type {unknown} */ x) => encodeURIComponent(String(x)).replace(/%2C/g, ",");
  const parts = others.map((name) => `${name}=${written(rest[name])}`);
  return `#${[nameOfPlace(about, fields), ...parts].join("&")}`;
}

/**
 * Whether an address names a head.
 * @param {string} hash
 */
export function namesHead(hash) {
  return hash
    .slice(1)
    .split("&")
    .some((part) => PLACE.test(part));
}

/**
 * The recording that an address names, by default the first.
 * @param {About} about
 * @param {string} hash
 */
export function recordingIn(about, hash) {
  const named = new URLSearchParams(hash.slice(1)).get("recording");
  return inside(Number(named), about.recordings.length);
}

const PLACE = /^L(\d+)H(\d+)$/;

/**
 * @param {About} about
 * @param {string} hash
 * @param {Place} opens
 */
function fromHash(about, hash, opens) {
  /** @type {Partial<Fields>} */
  const fields = {};
  let numbers = numbersOf(about, opens);
  for (const part of hash.slice(1).split("&")) {
    const place = PLACE.exec(part);
    if (place) numbers = [Number(place[1]), Number(place[2])];
    const [name, value] = part.split("=");
    if (value === undefined || !(name in DEFAULTS)) continue;
    const text = decoded(value);
    const isText = typeof DEFAULTS[/** @type {keyof Fields} */ (name)] === "string";
    if (isText) Object.assign(fields, { [name]: text });
    else if (text !== "" && Number.isFinite(Number(text)))
      Object.assign(fields, { [name]: Number(text) });
  }
  const recording = inside(fields.recording ?? 0, about.recordings.length);
  return { ...fields, ...nearestPlace(about, recording, ...numbers) };
}

// What an address says of one text alone.
const OF_TEXT = ["text", "recording", "query", "key", "low", "high", "span", "x", "y", "zoom"];

/**
 * The text that an address names; null where it names none.
 * @param {string} hash
 */
export function textOfHash(hash) {
  const part = hash
    .slice(1)
    .split("&")
    .find((one) => one.startsWith("text="));
  if (part === "text=") return "";
  return (part && decoded(part.slice(5))) || null;
}

/**
 * The head that an address names; empty where it names none.
 * @param {string} hash
 */
export function headOfHash(hash) {
  return /^#(L\d+H\d+)(?:&|$)/.exec(hash)?.[1] ?? "";
}

/**
 * The address of the same view at a head of another text.
 * @param {string} hash
 * @param {string} head
 * @param {string | null} text
 */
export function hashOfText(hash, head, text) {
  const parts = hash.slice(1).split("&");
  const kept = parts.filter((part) => part.includes("=") && !OF_TEXT.includes(part.split("=")[0]));
  const named = text === null ? "" : `text=${encodeURIComponent(text)}`;
  return `#${[head, ...kept, named].filter(Boolean).join("&")}`;
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
