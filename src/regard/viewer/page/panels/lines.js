// Lines: two columns of tokens, queries and keys, and a line for the weight of each pair, in
// several heads at once.

import { lookAt, lookFrom } from "../data/choose.js";
import { chooseHeads, extendTo, toggleHead, toggleQuery } from "../data/extend.js";
import { isLostAt } from "../data/lost.js";
import { unlessSaid } from "../data/watch.js";
import { readWindow, windowAround } from "../data/window.js";
import { watchTheme } from "../drawing/colours.js";
import { make, penOf } from "../drawing/dom.js";
import { drawMarks } from "../drawing/marks.js";
import { countText, noneWords } from "../drawing/numbers.js";
import { entriesOf, HEAD_COLOURS, MOST_HEADS } from "../drawing/palette.js";
import { TokenColumn } from "./linecolumn.js";
import { LEAST_SHOWN, lineMarks, percentText } from "./linemarks.js";
import { panelMarks } from "./panelmarks.js";

/** @import { Context, Fields, Unit } from "../data/selection.js" */
/** @import { Part } from "../data/several.js" */
/** @import { Hit, Texts, TokenText } from "../data/tokens.js" */
/** @import { Window } from "../data/window.js" */
/** @import { Modifiers } from "../drawing/dom.js" */
/** @import { Mark } from "../drawing/marks.js" */
/** @import { Share } from "./linecolumn.js" */
/** @import { HeadLines, Pointed } from "./linemarks.js" */

/**
 * What is drawn: some queries and keys, and the weights between them in each head.
 * @typedef {{texts: Texts, unit: Unit, rows: Window, columns: Window,
 *   heads: HeadLines[]}} FoundLines
 */

export const MOST_TOKENS = 60; // in a column
const MOST_SAID = 4; // heads, the strongest, in a sentence that takes one line
const ROW = { least: 15, most: 26 }; // CSS pixels of a token
/** @type {(keyof Fields)[]} */
const FOLLOWED = [
  "view",
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
];

/** @param {Context} context */
export function makeLines(context) {
  const panel = new LinesPanel(context);
  return { element: panel.element, picture: () => panel.picture(), end: () => panel.end() };
}

// Its element's data-shown names what it shows, `L2 heads 2,4 query 5 key 2`.
class LinesPanel {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.selection = context.selection;
    this.reading = new AbortController();
    /** @type {FoundLines | null} */
    this.found = null;
    /** @type {Pointed | null} the token whose lines alone are drawn */
    this.pointed = null;
    this.filled = ""; // the tokens that the columns show
    this.row = ROW.most;
    this.title = make("h2", { text: "Lines" });
    this.chips = make("div", { class: "regard-lines-heads", role: "group", "aria-label": "Heads" });
    this.note = make("p", { class: "regard-note" });
    this.canvas = make("canvas", { class: "regard-lines-canvas", "aria-hidden": "true" });
    this.field = make("div", { class: "regard-lines-field" });
    this.columns = { query: this.#column("query"), key: this.#column("key") };
    const { query, key } = this.columns;
    this.field.append(query.element, this.canvas, key.element);
    this.element = make(
      "section",
      { class: "regard-lines", "aria-label": "Lines" },
      this.title,
      this.chips,
      this.note,
      this.field,
    );
    this.dark = watchTheme(context.ended, (dark) => {
      this.dark = dark;
      this.#show();
    });
    this.selection.listen((changed) => {
      if (FOLLOWED.some((name) => changed.has(name))) this.#read();
    });
    this.observer = new ResizeObserver(() => this.#size());
    this.observer.observe(this.field);
    this.#read();
  }

  end() {
    this.reading.abort();
    this.observer.disconnect();
  }

  // {width, height, marks} of the whole panel, with each line as a line.
  picture() {
    const { width, height, marks } = panelMarks(this.element);
    const drawn = marks.flatMap((mark) => {
      if (mark.kind !== "image" || mark.canvas !== this.canvas) return [mark];
      return this.#marks(mark.width).map((line) => moved(line, mark.x, mark.y));
    });
    return { width, height, marks: drawn, title: this.title.textContent ?? "Lines" };
  }

  /** @param {"query" | "key"} side */
  #column(side) {
    return new TokenColumn(side, this.field, {
      choose: (place, how) => this.#choose(side, place, how).catch(unlessSaid),
      enter: (place) => this.#point({ side, place }),
      leave: () => this.#point(null),
      cross: (place) => this.columns[side === "query" ? "key" : "query"].focus(place),
    });
  }

  #read() {
    const { view, query, key } = this.selection;
    this.reading.abort();
    this.reading = new AbortController();
    if (view === "lines" && query !== null && key !== null)
      this.#request(this.reading.signal, query, key).catch(unlessSaid);
  }

  /**
   * @param {AbortSignal} signal
   * @param {number} query
   * @param {number} key
   */
  async #request(signal, query, key) {
    const { context, selection } = this;
    const { recording, oneHead, usedUnit: unit } = selection;
    const texts = await context.texts(recording);
    if (signal.aborted) return;
    const { keys, queries, offset } = texts;
    const isSame = this.found?.texts === texts && this.found.unit === unit;
    const before = isSame ? this.found : null;
    const rows = windowAround(before?.rows.part ?? null, query, queries, unit, MOST_TOKENS);
    const beside = before?.columns.part ?? (offset === 0 ? rows.part : null);
    const columns = windowAround(beside, key, keys, unit, MOST_TOKENS);
    const places = selection.headPlaces.slice(0, MOST_HEADS);
    const entries = entriesOf(places);
    const read = async (/** @type {number} */ head, /** @type {number} */ n) => {
      const { values, lost } = await readWindow(
        context.source,
        { ...oneHead, head },
        rows.places,
        columns.places,
        signal,
      );
      return { head, entry: entries[n], weights: values.map(Math.exp), lost };
    };
    const heads = await Promise.all(places.map(read));
    if (signal.aborted) return;
    this.found = { texts, unit, rows, columns, heads };
    this.#show();
  }

  #show() {
    const { found, selection } = this;
    if (!found) return;
    const { texts, unit, rows, columns, heads } = found;
    const { queries, keys, offset } = texts;
    const filled = `${selection.recording} ${unit} ${rows.part} ${columns.part}`;
    if (filled !== this.filled) {
      this.pointed = null;
      this.columns.query.fill(queries, rows.places, unit, offset ?? 0);
      this.columns.key.fill(keys, columns.places, unit, 0);
    }
    const isOther = filled !== this.filled;
    this.filled = filled;
    const { query, key, queryParts: parts } = selection;
    const has = (/** @type {TokenText} */ text, /** @type {readonly Part[]} */ chosen) => {
      return (/** @type {number} */ place) => isAmong(chosen, text.span(place, unit));
    };
    this.columns.query.mark(has(queries, parts), query);
    this.columns.key.mark(has(keys, key === null ? [] : [[key, key + 1]]), key);
    this.title.textContent = `Lines of ${this.#named(heads)}`;
    this.note.textContent = this.#words(found);
    this.#showChips(heads);
    this.#size();
    if (isOther && query !== null) this.columns.query.show(query);
    const names = heads.map(({ head }) => selection.layerFacts.head_numbers[head]);
    const { number } = selection.layerFacts;
    this.element.dataset.shown = `L${number} heads ${names} query ${query} key ${key}`;
  }

  /** @param {HeadLines[]} heads */
  #named(heads) {
    const { number, head_numbers: numbers } = this.selection.layerFacts;
    const names = heads.map(({ head }) => numbers[head]);
    return `layer ${number}, head${names.length > 1 ? "s" : ""} ${names.join(", ")}`;
  }

  /** @param {FoundLines} found */
  #words({ rows, columns, heads, unit }) {
    const { selection } = this;
    const least = percentText(LEAST_SHOWN);
    const parts = [
      `The wider and stronger a line, the larger the weight. Masked pairs and weights under ${least} have none.`,
    ];
    if (heads.some(({ lost }) => lost)) parts.push("Nor have those that are not numbers (NaN).");
    if (rows.places.length < rows.count || columns.places.length < columns.count)
      parts.push(
        `Of ${countText(columns.count)} ${unit}s, these are ${rows.places.length} queries and ` +
          `${columns.places.length} keys around the chosen pair.`,
      );
    if (selection.headPlaces.length > heads.length)
      parts.push(`Of ${selection.headPlaces.length} chosen heads, the first ${heads.length}.`);
    if (selection.first) parts.push("The first token is hidden.");
    return parts.join(" ");
  }

  /** @param {HeadLines[]} heads */
  #showChips(heads) {
    const { selection } = this;
    const { head_numbers: numbers } = selection.layerFacts;
    const colours = new Map(heads.map(({ head, entry }) => [head, this.#colour(entry)]));
    const active = document.activeElement;
    const focused = active ? [...this.chips.children].indexOf(active) : -1;
    const chips = numbers.map((number, place) => {
      const colour = colours.get(place);
      const mark = make("i", { "aria-hidden": "true" });
      if (colour) mark.style.background = colour;
      const onclick = () => this.#toggle(place);
      const chip = make("button", { type: "button", class: "regard-button", onclick }, mark);
      chip.append(String(number));
      chip.setAttribute("aria-label", `head ${number}`);
      chip.setAttribute("aria-pressed", String(colour !== undefined));
      return chip;
    });
    this.chips.replaceChildren(
      make("span", { class: "regard-lines-of", text: "heads" }),
      ...chips,
      ...this.#allChip(),
    );
    const next = this.chips.children[focused];
    if (focused >= 0 && next instanceof HTMLElement) next.focus();
  }

  // A button for all heads of the layer, or for one again.
  #allChip() {
    const { selection } = this;
    const { heads } = selection.layerFacts;
    if (heads < 2 || heads > MOST_HEADS) return [];
    const isAll = selection.headPlaces.length === heads;
    const all = Array.from({ length: heads }, (_, place) => place);
    const onclick = () => chooseHeads(selection, isAll ? [selection.head] : all);
    const text = isAll ? "one" : "all";
    return [make("button", { type: "button", class: "regard-button", text, onclick })];
  }

  /** @param {number} place */
  #toggle(place) {
    const { headPlaces: places } = this.selection;
    if (places.length >= MOST_HEADS && !places.includes(place))
      this.context.say(`${MOST_HEADS} heads have a colour each; take one out first`);
    else if (places.length === 1 && places[0] === place)
      this.context.say("one head stays chosen; choose another one first");
    else toggleHead(this.selection, place);
  }

  /** @param {number} entry */
  #colour(entry) {
    return `rgb(${HEAD_COLOURS[this.dark ? "dark" : "light"][entry].join(" ")})`;
  }

  // Gives tokens as much height as there is, and the canvas its pixels.
  #size() {
    const { found, field, canvas } = this;
    if (!found || !field.clientHeight) return;
    const count = Math.max(found.rows.places.length, found.columns.places.length);
    const room = Math.floor((field.clientHeight - 4) / count);
    this.row = Math.max(ROW.least, Math.min(ROW.most, room));
    field.style.setProperty("--row", `${this.row}px`);
    field.style.setProperty("--count", String(count));
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    this.#draw();
  }

  #draw() {
    const { canvas } = this;
    const pen = penOf(canvas);
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.scale(devicePixelRatio, devicePixelRatio);
    const marks = this.#marks(canvas.clientWidth);
    drawMarks(pen, marks);
    canvas.dataset.lines = String(marks.length);
  }

  /** @param {number} width */
  #marks(width) {
    if (!this.found) return [];
    const { heads } = this.found;
    const [rows, columns] = [this.found.rows.places, this.found.columns.places];
    const colours = heads.map(({ entry }) => this.#colour(entry));
    return lineMarks(heads, { rows, columns, colours, width, row: this.row }, this.pointed);
  }

  /** @param {Pointed | null} pointed */
  #point(pointed) {
    this.pointed = pointed;
    if (!this.found) return;
    const { query, key } = this.columns;
    const own = (/** @type {"query" | "key"} */ side) =>
      pointed?.side === side ? pointed.place : null;
    query.showShares((place) => this.#shares("query", place), own("query"));
    key.showShares((place) => this.#shares("key", place), own("key"));
    this.#draw();
    if (pointed) this.context.say(this.#pointedWords(this.found, pointed));
  }

  /**
   * The shares at a token, largest first, of the token that is pointed at in the other column.
   * @param {"query" | "key"} side
   * @param {number} place
   * @returns {Share[]}
   */
  #shares(side, place) {
    const { found, pointed } = this;
    if (!found || !pointed || pointed.side === side) return [];
    const [query, key] = side === "key" ? [pointed.place, place] : [place, pointed.place];
    const weights = found.heads.map((lines) => weightIn(found, lines, query, key));
    return weights
      .map((weight, n) => ({ weight, colour: this.#colour(found.heads[n].entry) }))
      .filter(({ weight }) => weight >= LEAST_SHOWN)
      .sort((a, b) => b.weight - a.weight)
      .map(({ weight, colour }) => ({ colour, text: percentText(weight) }));
  }

  /**
   * `query 5 «it» attends to: head 2 «cat» 53 %, «the» 12 %; head 4 …; and 3 more`.
   * @param {FoundLines} found
   * @param {Pointed} pointed
   */
  #pointedWords(found, { side, place }) {
    const { texts, unit, rows, columns, heads } = found;
    const isQuery = side === "query";
    const [own, other] = isQuery ? [texts.queries, texts.keys] : [texts.keys, texts.queries];
    const { head_numbers: numbers } = this.selection.layerFacts;
    const said = heads.map((lines) => {
      const all = (isQuery ? columns : rows).places.map((at) => {
        const [query, key] = isQuery ? [place, at] : [at, place];
        const isLost = isLostAt(lines.lost, placeIn(found, query, key));
        return { at, isLost, weight: weightIn(found, lines, query, key) };
      });
      const best = all.filter(({ weight }) => weight >= LEAST_SHOWN);
      best.sort((a, b) => b.weight - a.weight);
      const words = best.slice(0, heads.length > 2 ? 1 : 3).map(({ at, weight }) => {
        return `«${other.label(at, 16, unit)}» ${percentText(weight)}`;
      });
      if (all.some(({ isLost }) => isLost)) words.push(noneWords(true));
      const text = `head ${numbers[lines.head]} ${words.join(", ") || "nothing from 1 % on"}`;
      return { text, weight: best[0]?.weight ?? 0 };
    });
    const isMany = said.length > MOST_SAID;
    if (isMany) said.sort((a, b) => b.weight - a.weight);
    const parts = said.slice(0, MOST_SAID).map(({ text }) => text);
    if (isMany) parts.push(`and ${said.length - MOST_SAID} more`);
    const position = isQuery ? (texts.offset ?? 0) + place : place;
    const named = `${side} ${countText(position)} «${own.label(place, 24, unit)}»`;
    return `${named} ${isQuery ? "attends to" : "is attended by"}: ${parts.join("; ")}`;
  }

  /**
   * @param {"query" | "key"} side
   * @param {number} place
   * @param {Modifiers} how
   */
  async #choose(side, place, { shift, control }) {
    const { context, selection, found } = this;
    if (side === "query" && shift) await extendTo(context, place);
    else if (side === "query" && control) await toggleQuery(context, place);
    else if (side === "query") await lookFrom(context, place);
    else if (found && this.#isMasked(found, place)) await lookAt(context, place);
    else selection.set({ key: place });
  }

  /**
   * Whether the chosen query may not attend to a key, in every head.
   * @param {FoundLines} found
   * @param {number} key
   */
  #isMasked(found, key) {
    const { query } = this.selection;
    if (query === null) return false;
    return found.heads.every((lines) => {
      const isNone = Number.isNaN(weightIn(found, lines, query, key));
      return isNone && !isLostAt(lines.lost, placeIn(found, query, key));
    });
  }
}

/**
 * @param {FoundLines} found
 * @param {HeadLines} lines
 * @param {number} query
 * @param {number} key
 */
function weightIn(found, { weights }, query, key) {
  return weights[placeIn(found, query, key)];
}

/**
 * The index of a pair among those drawn.
 * @param {FoundLines} found
 * @param {number} query
 * @param {number} key
 */
function placeIn({ rows, columns }, query, key) {
  const [row, column] = [rows, columns].map(({ places }, n) =>
    places.findLastIndex((place) => place <= (n ? key : query)),
  );
  return row * columns.places.length + column;
}

/**
 * @param {readonly Part[]} parts
 * @param {Hit} span
 */
function isAmong(parts, [first, last]) {
  return parts.some(([from, to]) => from <= last && first < to);
}

/**
 * @param {Mark} mark
 * @param {number} x
 * @param {number} y
 * @returns {Mark}
 */
function moved(mark, x, y) {
  if (mark.kind !== "line") return mark;
  return { ...mark, x1: mark.x1 + x, x2: mark.x2 + x, y1: mark.y1 + y, y2: mark.y2 + y };
}
