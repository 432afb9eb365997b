// What the chosen token attends to, or is attended by, in the text itself.

import { lookAt, lookFrom } from "../data/choose.js";
import { unlessSaid } from "../data/watch.js";
import { watchTheme } from "../drawing/colours.js";
import { make, makeSwitch } from "../drawing/dom.js";
import { countText, largest, timesText, weightText } from "../drawing/numbers.js";
import { readLine, tintOf } from "./line.js";
import { passageButton, passageOf, TextStrip } from "./passages.js";
import { pairText } from "./readout.js";
import { makeSearch } from "./search.js";
import { TokenField } from "./tokenfield.js";

const SHORT = 2000; // tokens that are shown whole
const PLACES = 12;
const LEAST = 0.00005; // shown as 0.0001
const AGAIN_MS_TEXT = 700; // until a column that has not every row is asked for again
const CHANGES = ["recording", "layer", "head", "query", "key", "side", "scale", "low", "high"];

export function makeText(context) {
  const panel = new TextPanel(context);
  return { element: panel.element, search: () => panel.search.focus(), end: () => panel.end() };
}

// Its element says through data-shown which pair and side it shows, `query 5 key 2 to`.
class TextPanel {
  constructor(context) {
    this.context = context;
    this.selection = context.selection;
    this.run = 0;
    this.hits = [];
    this.hit = null;
    this.#build();
    this.dark = watchTheme(context.ended, (dark) => {
      this.dark = dark;
      if (this.line) this.#paint();
    });
    this.selection.addEventListener("change", ({ detail }) => {
      if (CHANGES.some((name) => detail.has(name))) this.#read();
    });
    this.#read();
  }

  #build() {
    this.title = make("h2", { text: "Text" });
    const sides = { to: "attends to", by: "attended by" };
    this.sides = makeSwitch("Side", sides, (side) => this.selection.set({ side }));
    this.search = makeSearch(this.context, (hit, hits) => this.#found(hit, hits));
    const does = {
      choose: (place) => this.#choose(place),
      look: (place) => this.#look(place),
      enter: (place) => this.#enter(place),
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
  }

  end() {
    this.run++;
  }

  #read() {
    this.sides.show(this.selection.side);
    const { query, key } = this.selection;
    if (query === null || key === null) return;
    this.#readNow(++this.run).catch(unlessSaid);
  }

  async #readNow(run) {
    const line = await readLine(this.context);
    if (run !== this.run) return;
    this.line = line;
    this.#paint();
    if (line.coverage === 1) return;
    setTimeout(() => run === this.run && this.#readNow(run).catch(unlessSaid), AGAIN_MS_TEXT);
  }

  #paint() {
    const { line, selection } = this;
    const long = line.text.length > SHORT;
    this.element.classList.toggle("regard-long", long);
    this.strip.element.hidden = !long;
    this.page.hidden = long;
    this.#paintHeading(long);
    const places = this.#places();
    const tint = (place) => tintOf(line, place, selection, this.dark);
    if (long) this.strip.paint({ line, selection, dark: this.dark, hits: this.hits });
    else this.#paintField(tint);
    this.mass.textContent = this.#massWords(places);
    this.bars.replaceChildren(...(long ? this.#passages(places, tint) : this.#bars(places)));
    this.#paintNote(long);
    this.search.look(line.text);
    this.element.dataset.shown = `query ${line.query} key ${line.key} ${line.side}`;
  }

  #paintField(tint) {
    const { line } = this;
    const { boundary } = this.selection.recordingFacts;
    this.field.fill(line.text, line.own && line.side === "by" ? null : boundary);
    this.field.paint(tint, line.chosen, line.locked);
    this.field.mark(this.hits, this.hit);
    if (!this.hit) this.field.show(line.chosen ?? line.locked);
  }

  #paintHeading(long) {
    const { line } = this;
    const { text, place } = line.own ?? { text: line.text, place: line.chosen };
    const named = `“${text.label(place, 24)}”`;
    const token = long ? `token ${countText(place)} ${named}` : named;
    const does = line.side === "to" ? "attends to" : "is attended by";
    this.title.textContent = `Text · what ${token} ${does}`;
    this.own.hidden = line.own === null;
    if (line.own === null) return;
    const label = `The ${line.side === "to" ? "query" : "key"}, in its own text: `;
    this.own.replaceChildren(label, passageOf({ text }, place, null));
  }

  // The strongest places, strongest first, as far as four decimals show them.
  #places() {
    const { line } = this;
    const found = largest(line.values, PLACES).filter((n, rank) => {
      return rank === 0 || Math.exp(line.values[n]) >= LEAST;
    });
    return found.map((n) => n + line.base);
  }

  #massWords(places) {
    const { line } = this;
    const shown = places.reduce((sum, place) => sum + Math.exp(line.at(place)), 0);
    const read = line.coverage < 1 ? ` ${Math.round(100 * line.coverage)} % of the rows read.` : "";
    if (!places.length)
      return line.side === "to" ? "It sees no token: its output is 0." : `No token sees it.${read}`;
    const where = places.length === 1 ? "this place" : `these ${places.length} places`;
    if (line.side === "by") {
      const all = weightText(line.total);
      return `${weightText(shown)} of the ${all} that it gets comes from ${where}.${read}`;
    }
    const rest = 1 - line.total;
    const sink = rest > 0.0005 ? ` The sink takes ${weightText(rest)}.` : "";
    return `${weightText(shown)} of its mass is in ${where}.${sink}`;
  }

  #bars(places) {
    const { line } = this;
    const most = Math.exp(line.at(places[0]));
    return places.map((place) => {
      const weight = Math.exp(line.at(place));
      const fill = make("span", { class: "regard-bar" });
      fill.style.setProperty("--part", String(most > 0 ? weight / most : 0));
      const times = `${timesText(weight * line.seenAt(place))} ×`;
      const button = make(
        "button",
        { type: "button", class: "regard-bar-row" },
        make("span", { class: "regard-bar-token", text: line.text.label(place, 18), dir: "auto" }),
        make("span", { class: "regard-bar-place", text: countText(place) }),
        fill,
        make("span", { class: "regard-bar-weight", text: weightText(weight) }),
        make("span", { class: "regard-bar-times", text: times, title: "times uniform" }),
      );
      return this.#listed(button, place);
    });
  }

  #passages(places, tint) {
    const { line } = this;
    const rest = [line.chosen, line.locked].filter((p) => p !== null && !places.includes(p));
    const label = (place) => (place === line.chosen ? "the token itself" : "");
    const shown = [...new Set(rest.filter((p) => p !== line.chosen || line.own === null))];
    return [...shown, ...places].map((place) =>
      this.#listed(passageButton(line, place, tint(place), label(place)), place),
    );
  }

  #listed(button, place) {
    button.setAttribute("aria-pressed", String(place === this.line.locked));
    button.addEventListener("click", () => this.#choose(place));
    button.addEventListener("pointerenter", () => this.#enter(place));
    button.addEventListener("pointerleave", () => this.#leave());
    return make("li", {}, button);
  }

  #paintNote(long) {
    const { boundary } = this.selection.recordingFacts;
    const parts = [];
    const other = this.line.side === "to" ? "key" : "query";
    if (long) parts.push(`The strip is the whole text: click it to read there.`);
    else parts.push(`Click a token to choose the ${other}; double click to look from there.`);
    if (boundary !== null)
      parts.push(`From position ${countText(boundary)} on the model wrote: underlined.`);
    this.note.textContent = parts.join(" ");
  }

  // A token was chosen: the other end of the link, or, where it is invisible, the one that looks.
  #choose(place) {
    const { line } = this;
    if (Number.isNaN(line.at(place))) this.#look(place);
    else if (line.side === "to") this.selection.set({ key: place });
    else this.selection.set({ query: place - line.base });
  }

  #look(place) {
    this.#lookNow(place).catch(unlessSaid);
  }

  async #lookNow(place) {
    const { line, context } = this;
    const query = place - (await context.texts(this.selection.recording)).offset;
    const isQuery = query >= 0 && query < this.selection.recordingFacts.queries;
    if (line.own) this.selection.set(line.side === "to" ? { key: place } : { query: place });
    else if (line.side === "by") await lookAt(context, place);
    else if (isQuery) await lookFrom(context, query);
    else this.selection.set({ key: place });
  }

  #enter(place) {
    if (!this.page.hidden) this.field.isolate(place);
    this.#sayPair(place);
  }

  #leave() {
    this.field.isolate(null);
    this.#sayPair(this.line.locked);
  }

  #sayPair(place) {
    const { line } = this;
    const query = line.side === "to" ? line.query : place - line.base;
    const key = line.side === "to" ? place : line.key;
    const value = line.at(place);
    const seen = line.seenAt(place);
    if (line.queries.raw[query] === undefined)
      this.context.say(`token ${countText(place)} «${line.text.label(place, 24)}» is no query`);
    else this.context.say(pairText(line, { query, key, value, seen }));
  }

  // The search found hits, and goes to one of them, or to none.
  #found(hit, hits) {
    this.hits = hits;
    this.hit = hit;
    if (!this.line) return;
    const { line, selection } = this;
    if (line.text.length <= SHORT) this.field.mark(hits, hit);
    else this.strip.paint({ line, selection, dark: this.dark, hits });
    if (hit) this.#goTo(hit[0]).catch(unlessSaid);
  }

  async #goTo(place) {
    const { query, key } = this.selection;
    const text = this.line.text;
    this.context.because = `${this.search.words()}: ${countText(place)} «${text.label(place, 24)}»`;
    await this.#lookNow(place);
    if (query !== this.selection.query || key !== this.selection.key) return;
    this.context.say(this.context.because);
    this.context.because = "";
  }
}
