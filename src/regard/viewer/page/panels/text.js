// The tokens that the chosen one attends to, or is attended by, in the text itself.

import { lookAt, lookFrom } from "../data/choose.js";
import { extendTo, toggleQuery } from "../data/extend.js";
import { KINDS } from "../data/kinds.js";
import { unlessSaid } from "../data/watch.js";
import { watchTheme } from "../drawing/colours.js";
import { make, makeSwitch } from "../drawing/dom.js";
import {
  countText,
  effectWords,
  fractionText,
  largest,
  readText,
  timesText,
  weightText,
} from "../drawing/numbers.js";
import { placesThatDiffer, signColour } from "./compared.js";
import { readLine, tintOf } from "./line.js";
import { passageButton, passageOf, TextStrip } from "./passages.js";
import { pairText } from "./readout.js";
import { makeSearch } from "./search.js";
import { TokenField } from "./tokenfield.js";

/** @import { Context, Fields } from "../data/selection.js" */
/** @import { LayerFacts } from "../data/source.js" */
/** @import { Hit } from "../data/tokens.js" */
/** @import { Modifiers } from "../drawing/dom.js" */
/** @import { Compared } from "./compared.js" */
/** @import { Line, Tint } from "./line.js" */

/** @typedef {(place: number) => Tint | null} TintAt */

const LOST = "The weights are not numbers (NaN): a score is NaN or infinite.";
const LOST_EFFECTS =
  "The effects are not finite numbers: a score, a value or a gradient is NaN, infinite or too large.";
const SHORT = 2000; // tokens of a text that is shown whole
const PLACES = 12;
const LEAST = 0.00005; // shown as 0.0001
const AGAIN_MS_TEXT = 700; // until a column without all rows is requested again
/** @type {(keyof Fields)[]} */
const CHANGES = [
  "recording",
  "layer",
  "head",
  "heads",
  "query",
  "queries",
  "key",
  "first",
  "unit",
  "compare",
  "other",
  "plane",
  "kind",
  "view",
  "span",
  "side",
  "scale",
  "low",
  "high",
];

/** @param {Context} context */
export function makeText(context) {
  const panel = new TextPanel(context);
  return { element: panel.element, search: () => panel.search.focus(), end: () => panel.end() };
}

// Its element's data-shown names the pair and side it shows, `query 5 key 2 to`.
class TextPanel {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.selection = context.selection;
    this.run = 0;
    /** @type {Hit[]} */
    this.hits = [];
    /** @type {Hit | null} */
    this.hit = null;
    /** @type {Line | null} */
    this.line = null;
    this.title = make("h2", { text: "Text" });
    const sides = { to: "attends to", by: "attended by" };
    this.sides = makeSwitch("Side", sides, (side) => this.selection.set({ side }));
    this.search = makeSearch(this.context, (hit, hits) => this.#found(hit, hits));
    const does = {
      /** @type {(place: number, how: Modifiers) => void} */
      choose: (place, how) => this.#extend(place, how) || this.#choose(place),
      look: (/** @type {number} */ place) => this.#look(place),
      enter: (/** @type {number} */ place) => this.#enter(place),
      leave: () => this.#leave(),
    };
    this.body = make("div", { class: "regard-text-body" });
    this.page = make("div", { class: "regard-text-page" });
    this.field = new TokenField("The text", this.page, does);
    this.page.append(this.field.element);
    this.own = make("p", { class: "regard-own" });
    this.mass = make("p", { class: "regard-note" });
    this.bars = make("ol", { class: "regard-bars" });
    this.note = make("p", { class: "regard-note" });
    this.strip = new TextStrip((place) => this.#choose(place));
    this.body.append(this.mass, this.bars, this.note);
    const tools = make("div", { class: "regard-tools" }, this.sides.element, this.search.element);
    this.element = make(
      "section",
      { class: "regard-text", "aria-label": "Text" },
      make("div", { class: "regard-text-top" }, this.title, tools),
      this.own,
      this.page,
      make("div", { class: "regard-text-main" }, this.strip.element, this.body),
    );
    this.dark = watchTheme(context.ended, (dark) => {
      this.dark = dark;
      if (this.line) this.#paint(this.line);
    });
    this.selection.listen((changed) => {
      if (CHANGES.some((name) => changed.has(name))) this.#read();
    });
    this.#read();
  }

  end() {
    this.run++;
  }

  #read() {
    this.sides.show(this.selection.side);
    const { query, key } = this.selection;
    if (query === null || key === null) return;
    const run = ++this.run;
    this.#readNow(run, { query, key }).catch((error) => {
      if (run === this.run) this.#forget();
      unlessSaid(error);
    });
  }

  // Nothing of the former head stays beside a map that could not be read.
  #forget() {
    this.line = null;
    this.title.textContent = "Text";
    this.mass.textContent = "not read";
    this.note.textContent = "";
    this.own.hidden = this.strip.element.hidden = true;
    this.bars.replaceChildren();
    this.field.clear();
    delete this.element.dataset.shown;
  }

  /**
   * @param {number} run
   * @param {{query: number, key: number}} pair
   */
  async #readNow(run, pair) {
    const line = await readLine(this.context, pair);
    if (run !== this.run) return;
    this.line = line;
    this.#paint(line);
    if (line.coverage === 1 && (line.compared?.coverage ?? 1) === 1) return;
    setTimeout(() => run === this.run && this.#readNow(run, pair).catch(unlessSaid), AGAIN_MS_TEXT);
  }

  /** @param {Line} line */
  #paint(line) {
    const { selection } = this;
    const long = line.text.length > SHORT;
    this.element.classList.toggle("regard-long", long);
    this.bars.classList.toggle("regard-differences", line.compared?.effect === null);
    this.strip.element.hidden = !long;
    this.page.hidden = long;
    this.#paintHeading(line, long);
    const places = placesOf(line);
    const tint = (/** @type {number} */ place) => tintOf(line, place, selection, this.dark);
    if (long) this.strip.paint({ line, selection, dark: this.dark, hits: this.hits });
    else this.#paintField(line, tint);
    this.mass.textContent = massWords(line, places, selection.layerFacts);
    this.bars.replaceChildren(
      ...(long ? this.#passages(line, places, tint) : this.#bars(line, places)),
    );
    this.#paintNote(line, long);
    this.search.look(line.text);
    this.element.dataset.shown = `query ${line.query} key ${line.key} ${line.side}`;
  }

  /**
   * @param {Line} line
   * @param {TintAt} tint
   */
  #paintField(line, tint) {
    const { boundary } = this.selection.recordingFacts;
    this.field.fill(line.text, line.own && line.side === "by" ? null : boundary);
    const lacks = (/** @type {number} */ place) => line.compared?.lacks(place) ?? false;
    this.field.paint(tint, { ...line, lacks });
    this.field.mark(this.hits, this.hit);
    const low = line.side === "to" && this.selection.layerFacts.causal;
    if (!this.hit) this.field.show(line.chosen ?? line.locked, low);
  }

  /**
   * @param {Line} line
   * @param {boolean} long
   */
  #paintHeading(line, long) {
    const { text, place } = line.own ?? { text: line.text, place: line.chosen ?? 0 };
    const named = `“${text.label(place, 24, line.unit)}”`;
    const position = countText(text.first(place, line.unit));
    const one = long ? `${line.unit} ${position} ${named}` : named;
    const token = line.count > 1 ? `${countText(line.count)} tokens` : one;
    const toward = line.count > 1 ? "attend to, on average" : "attends to";
    const does = line.side === "to" ? toward : "is attended by";
    const differs = line.compared?.effect ? ": effects" : ", and how that differs";
    const how = line.compared ? differs : "";
    this.title.textContent = `Text · what ${token} ${does}${how}`;
    this.own.hidden = line.own === null;
    if (line.own === null) return;
    const label = `The ${line.side === "to" ? "query" : "key"}, in its own text: `;
    this.own.replaceChildren(label, passageOf({ text }, place, null));
  }

  /**
   * @param {Line} line
   * @param {number[]} places
   */
  #bars(line, places) {
    const sizeOf = (/** @type {number} */ place) => Math.abs(numberOf(line, place));
    const most = places.length ? sizeOf(places[0]) : 0;
    return places.map((place) => {
      const weight = numberOf(line, place);
      const fill = make("span", { class: "regard-bar" });
      fill.style.setProperty("--part", String(most > 0 ? sizeOf(place) / most : 0));
      if (line.compared) fill.style.setProperty("--bar", signColour(weight, this.dark));
      const [text, times, title] = line.compared
        ? [line.compared.text(weight), line.compared.beside(place - line.base), line.compared.title]
        : [weightText(weight), `${timesText(weight * line.seenAt(place))} ×`, "times uniform"];
      const button = make(
        "button",
        { type: "button", class: "regard-bar-row" },
        make("span", {
          class: "regard-bar-token",
          text: line.text.label(place, 18, line.unit),
          dir: "auto",
        }),
        make("span", { class: "regard-bar-place", text: countText(place) }),
        fill,
        make("span", { class: "regard-bar-weight", text }),
        make("span", { class: "regard-bar-times", text: times, title }),
      );
      return this.#listed(line, button, place);
    });
  }

  /**
   * @param {Line} line
   * @param {number[]} places
   * @param {TintAt} tint
   */
  #passages(line, places, tint) {
    const first = (/** @type {number} */ place) => line.text.first(place, line.unit);
    const chosen = line.chosen === null ? null : first(line.chosen);
    const listed = places.map(first);
    const ends = [chosen, first(line.locked)].filter((p) => p !== null);
    const rest = ends.filter((p) => !listed.includes(p));
    const label = (/** @type {number} */ place) =>
      first(place) === chosen ? `the ${line.unit} itself` : "";
    return [...new Set(rest), ...places].map((place) =>
      this.#listed(line, passageButton(line, place, tint(place), label(place)), place),
    );
  }

  /**
   * @param {Line} line
   * @param {HTMLButtonElement} button
   * @param {number} place
   */
  #listed(line, button, place) {
    const isLocked = line.text.first(place, line.unit) === line.text.first(line.locked, line.unit);
    button.setAttribute("aria-pressed", String(isLocked));
    button.addEventListener("click", () => this.#choose(place));
    button.addEventListener("pointerenter", () => this.#enter(place));
    button.addEventListener("pointerleave", () => this.#leave());
    return make("li", {}, button);
  }

  /**
   * @param {Line} line
   * @param {boolean} long
   */
  #paintNote(line, long) {
    const { boundary } = this.selection.recordingFacts;
    const parts = [];
    const other = line.side === "to" ? "key" : "query";
    if (long) parts.push(`The strip is the whole text: click it to read there.`);
    else parts.push(`Click a token to choose the ${other}; double click to start from it.`);
    if (!long && !line.own) parts.push("Shift or Ctrl and click: the mean of several queries.");
    if (boundary !== null)
      parts.push(`The model wrote from position ${countText(boundary)} on: underlined.`);
    this.note.textContent = parts.join(" ");
  }

  /**
   * Chooses several queries, up to a token or that one too; false where that was not asked for.
   * @param {number} place
   * @param {Modifiers} how
   */
  #extend(place, { shift, control }) {
    const { line, selection } = this;
    if (!line || !(shift || control) || (line.own && line.side === "to")) return false;
    const query = place - (line.own ? 0 : (line.offset ?? 0));
    if (query < 0 || query >= selection.recordingFacts.queries) return false;
    (shift ? extendTo : toggleQuery)(this.context, query).catch(unlessSaid);
    return true;
  }

  /**
   * A token was chosen: the other one of the pair, or, where that is masked, the new query or key.
   * @param {number} place
   */
  #choose(place) {
    const { line } = this;
    if (!line) return;
    if (Number.isNaN(line.at(place)) && !line.isLost(place)) this.#look(place);
    else if (line.side === "to") this.selection.set({ key: place });
    else this.selection.set({ query: place - line.base });
  }

  /** @param {number} place */
  #look(place) {
    if (this.line) this.#lookNow(this.line, place).catch(unlessSaid);
  }

  /**
   * @param {Line} line
   * @param {number} place
   */
  async #lookNow(line, place) {
    const { context } = this;
    const query = place - ((await context.texts(this.selection.recording)).offset ?? 0);
    const isQuery = query >= 0 && query < this.selection.recordingFacts.queries;
    if (line.own) this.selection.set(line.side === "to" ? { key: place } : { query: place });
    else if (line.side === "by") await lookAt(context, place);
    else if (isQuery) await lookFrom(context, query);
    else this.selection.set({ key: place });
  }

  /** @param {number} place */
  #enter(place) {
    if (!this.page.hidden) this.field.isolate(place);
    this.#sayPair(place);
  }

  #leave() {
    this.field.isolate(null);
    if (this.line) this.#sayPair(this.line.locked);
  }

  /** @param {number} place */
  #sayPair(place) {
    const { line } = this;
    if (!line) return;
    const query = line.side === "to" ? line.query : place - line.base;
    const key = line.side === "to" ? place : line.key;
    const value = line.at(place);
    const seen = line.seenAt(place);
    if (line.queries.raw[query] === undefined)
      this.context.say(`token ${countText(place)} «${line.text.label(place, 24)}» is not a query`);
    else {
      const effect = line.compared?.effect && line.compared.numbers[place - line.base];
      const before = typeof effect === "number" ? `${effectWords(effect, true)} · ` : "";
      const [lost, { count }] = [line.isLost(place), line];
      this.context.say(pairText(line, { query, key, value, seen, lost, count }, before));
    }
  }

  /**
   * The search found hits, and goes to one of them, or to none.
   * @param {Hit | null} hit
   * @param {Hit[]} hits
   */
  #found(hit, hits) {
    this.hits = hits;
    this.hit = hit;
    if (!this.line) return;
    const { line, selection } = this;
    if (line.text.length <= SHORT) this.field.mark(hits, hit);
    else this.strip.paint({ line, selection, dark: this.dark, hits });
    if (hit) this.#goTo(line, hit[0]).catch(unlessSaid);
  }

  /**
   * @param {Line} line
   * @param {number} place
   */
  async #goTo(line, place) {
    const { query, key } = this.selection;
    const named = `${countText(place)} «${line.text.label(place, 24)}»`;
    this.context.because = `${this.search.words()}: ${named}`;
    await this.#lookNow(line, place);
    if (query !== this.selection.query || key !== this.selection.key) return;
    this.context.say(this.context.because);
    this.context.because = "";
  }
}

/**
 * The number that a place is listed with: its weight, or how that differs.
 * @param {Line} line
 * @param {number} place
 */
function numberOf(line, place) {
  return line.compared ? line.compared.numbers[place - line.base] : Math.exp(line.at(place));
}

/**
 * The strongest places whose weight four decimals can show, strongest first.
 * @param {Line} line
 */
function placesOf(line) {
  if (line.compared) return placesThatDiffer(line.compared, PLACES).map((n) => n + line.base);
  const found = largest(line.singles, PLACES).filter((n, rank) => {
    return rank === 0 || Math.exp(line.values[n]) >= LEAST;
  });
  return found.map((n) => n + line.base);
}

/**
 * @param {Line} line
 * @param {Compared} compared
 * @param {number} count of the places listed
 */
function effectsWords({ side }, { effect, lost, coverage }, count) {
  const read = coverage < 1 ? ` ${readText(coverage)} of the rows read.` : "";
  const none =
    side === "to" ? "No pair of this query has an effect." : "No pair of this key has an effect.";
  if (!count && lost) return LOST_EFFECTS + read;
  const some = lost ? " Some effects are not finite numbers." : "";
  const signs = effect ? `${KINDS[effect].signs} Beside each effect is the weight.` : "";
  return (count ? signs : none) + some + read;
}

/**
 * @param {Line} line
 * @param {Compared} compared
 * @param {number} count of the places listed
 */
function differenceWords({ values, base }, { lacks, lost, coverage }, count) {
  const lacking = values.reduce((sum, _, n) => sum + Number(lacks(base + n)), 0);
  if (lacking === values.length) return "It has no counterpart in the other text.";
  const words = lacking
    ? ` ${countText(lacking)} ${lacking === 1 ? "token has" : "tokens have"} no counterpart.`
    : "";
  const read = coverage < 1 ? ` ${readText(coverage)} of the rows read.` : "";
  if (!count && lost) return LOST + words + read;
  const some = lost ? " Some weights are not numbers (NaN)." : "";
  return (count ? "Weight here − weight there." : "No weight differs.") + some + words + read;
}

/**
 * The share of the weight that the places have.
 * @param {Line} line
 * @param {number[]} places
 * @param {LayerFacts} facts
 */
function massWords(line, places, { options }) {
  if (line.compared?.effect) return effectsWords(line, line.compared, places.length);
  if (line.compared) return differenceWords(line, line.compared, places.length);
  const shown = places.reduce((sum, place) => sum + Math.exp(line.at(place)), 0);
  const read = line.coverage < 1 ? ` ${readText(line.coverage)} of the rows read.` : "";
  if (!places.length && line.lost) return LOST + read;
  if (!places.length)
    return line.side === "to"
      ? "All keys are masked: the output is 0."
      : `Masked for every query.${read}`;
  const noun = line.unit === "word" ? "word" : "position";
  const where = places.length === 1 ? `this ${noun}` : `these ${places.length} ${noun}s`;
  if (line.side === "by") {
    const all = fractionText(line.total);
    const some = line.lost ? " Some of its weights are not numbers (NaN)." : "";
    return `${fractionText(shown)} of the ${all} that it receives comes from ${where}.${some}${read}`;
  }
  const rest = 1 - line.total;
  const lost = options.includes("sinks") ? "The sink takes" : "Rows that see no key lack";
  const sink = rest > 0.0005 ? ` ${lost} ${weightText(rest)}.` : "";
  const whose = line.count > 1 ? "their mean" : "its";
  if (line.lost) return `Some weights of these queries are not numbers (NaN).${read}`;
  return `${weightText(shown)} of ${whose} attention is on ${where}.${sink}${read}`;
}
