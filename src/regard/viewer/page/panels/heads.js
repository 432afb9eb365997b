// Every head of every layer as a small attention map: the picker of heads.

import { toggleHead } from "../data/extend.js";
import { isLostAt } from "../data/lost.js";
import { headCounts, nameOfPlace, sharing } from "../data/selection.js";
import { unlessSaid } from "../data/watch.js";
import {
  colourRange,
  invisiblePixel,
  pixelTable,
  signedEntry,
  signedRange,
  usualRange,
  watchTheme,
  weightEntry,
} from "../drawing/colours.js";
import {
  lineStep,
  make,
  makePicker,
  modifiersOf,
  nextInLine,
  penOf,
  showInside,
} from "../drawing/dom.js";
import { effectWords, noneWords, readText, stepText, weightText } from "../drawing/numbers.js";
import { ChangeGrid, comparedRecording, readChange } from "./change.js";

/** @import { Context, Fields } from "../data/selection.js" */
/** @import { EffectKind, EffectThumbnails, Floats, HeadRoles, HeadsFacts } from "../data/source.js" */
/** @import { LayerChange } from "./change.js" */

/** @typedef {"entropy" | "distance" | "first" | "previous" | "induction" | "change" | "effect"} Score */

/**
 * A head's place in the list, with its main role and the score that orders the heads.
 * @typedef {{layer: number, head: number, button: HTMLButtonElement, canvas: HTMLCanvasElement,
 *   tag: HTMLElement, score: HTMLElement}} HeadCell
 */

/**
 * A score that orders heads: its words, its name, whether the least comes first.
 * @typedef {{words: string, name: string, least?: boolean, text: (x: number) => string}} ScoreOrder
 */

/** @type {Record<Score, ScoreOrder>} */
const SCORES = {
  entropy: { words: "entropy, low first", name: "entropy", least: true, text: stepText },
  distance: { words: "distance, far first", name: "distance", text: stepText },
  first: { words: "first token", name: "first token", text: weightText },
  previous: { words: "previous token", name: "previous token", text: weightText },
  induction: { words: "induction", name: "induction", text: weightText },
  change: { words: "change, most first", name: "change", text: weightText },
  effect: { words: "largest effect", name: "largest effect", text: stepText },
};
const SCORE_NAMES = /** @type {Score[]} */ (Object.keys(SCORES));
/** @type {("layer" | Score)[]} */
const ORDERS = ["layer", ...SCORE_NAMES];
const ROW_OF_HEADS = 12; // at most, side by side
const AGAIN_MS = 1000; // until thumbnails without all rows are requested again
/** @type {(keyof Fields)[]} */
const LOOKS = ["low", "high", "scale", "span"]; // fields of the selection that change the colours
/** @type {(keyof Fields)[]} */
const CHOSEN = ["layer", "head", "heads"];
/** @type {(keyof Fields)[]} */
const PAIR = ["recording", "query", "key", "first", "unit", "plane", "kind", "view", "compare"];

/** @param {Context} context */
export function makeHeads(context) {
  const panel = new HeadsPanel(context);
  panel.start();
  return {
    element: panel.element,
    nextOrder: () => panel.nextOrder(),
    togglePair: () => panel.togglePair(),
    end: () => panel.end(),
  };
}

/** @param {"layer" | Score} order */
function orderWords(order) {
  return order === "layer" ? "layer" : SCORES[order].words;
}

class HeadsPanel {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.selection = context.selection;
    /** @type {HeadCell[]} layer after layer */
    this.cells = [];
    /** @type {(HeadsFacts | null)[]} of each layer, where they are known */
    this.facts = [];
    /** @type {(EffectThumbnails | null)[]} of each layer, where effects are shown and known */
    this.effects = [];
    /** @type {LayerChange[]} of each layer, where another recording is compared with */
    this.changes = [];
    this.grid = new ChangeGrid(context);
    this.compared = comparedRecording(this.selection);
    this.effect = this.selection.effect;
    /** @type {Floats | null} ln of the chosen pair's weight in every head, or its effect */
    this.pair = null;
    /** @type {"layer" | Score} */
    this.order = "layer";
    this.coloursPair = false;
    /** @type {HeadRoles | null} */
    this.roles = null;
    this.run = 0; // counts up with each recording, to drop late responses
    this.dark = watchTheme(context.ended, (dark) => {
      this.dark = dark;
      this.paintAll();
    });
    this.title = make("h2", { text: "Heads" });
    this.picker = makePicker("order", (order) => {
      this.orderBy(ORDERS.find((name) => name === order) ?? "layer");
    });
    this.#fillOrders();
    this.pairButton = make("button", {
      type: "button",
      class: "regard-button",
      text: "this pair in every head",
      "aria-pressed": "false",
      onclick: () => this.togglePair(),
    });
    this.list = make("div", { class: "regard-head-list", role: "group", "aria-label": "Heads" });
    this.list.addEventListener("keydown", (event) => this.#moveFocus(event));
    this.note = make("p", { class: "regard-note" });
    this.element = make(
      "section",
      { class: "regard-heads", "aria-label": "Heads" },
      this.title,
      make("div", { class: "regard-tools" }, this.picker.element, this.pairButton),
      this.grid.element,
      this.list,
      this.note,
    );
  }

  start() {
    this.selection.listen((changed) => {
      const compared = comparedRecording(this.selection);
      const isOther = compared !== this.compared;
      this.compared = compared;
      const isEffect = this.effect !== this.selection.effect;
      this.effect = this.selection.effect;
      if (isOther || isEffect) this.#fillOrders();
      if (isEffect) this.pair = null;
      if (isEffect) this.#readEffects();
      if (isEffect || (this.effect && changed.has("span"))) this.#arrange();
      if (isOther || changed.has("recording") || changed.has("first")) this.#read();
      if ((this.coloursPair || this.effect) && LOOKS.some((name) => changed.has(name)))
        this.paintAll();
      if (CHOSEN.some((name) => changed.has(name))) this.#showChosen();
      if (isEffect || PAIR.some((name) => changed.has(name))) this.#readPair();
      if (changed.has("view") && changed.has("recording")) this.#readPair();
    });
    this.#read();
  }

  end() {
    this.run++;
    this.effects = [];
  }

  get #orders() {
    const has = { change: this.compared !== null, effect: this.selection.effect !== undefined };
    return ORDERS.filter((order) => (order === "change" || order === "effect" ? has[order] : true));
  }

  #fillOrders() {
    this.picker.fill(this.#orders.map((order) => [order, orderWords(order)]));
    if (!this.#orders.includes(this.order)) this.order = "layer";
    this.picker.show(this.order);
  }

  // Makes the buttons of a recording, and fills them layer by layer, the chosen layer first.
  #read() {
    const { layers } = this.selection.recordingFacts;
    this.facts = layers.map(() => null);
    this.#readEffects();
    this.changes = layers.map(() => null);
    this.grid.show(this.changes, this.dark);
    this.pair = null;
    this.roles = null;
    this.cells = layers.flatMap((facts, layer) =>
      Array.from({ length: facts.heads }, (_, head) => this.#cell(layer, head)),
    );
    const most = Math.max(...layers.map(({ heads }) => heads));
    const groups = layers.map(({ heads, key_heads }) => (key_heads < heads ? key_heads : 0));
    this.list.style.setProperty("--heads", String(most));
    this.list.style.setProperty("--groups", String(Math.max(...groups)));
    this.#arrange();
    const run = ++this.run;
    const first = this.selection.layer;
    const order = layers
      .map((_, n) => n)
      .sort((a, b) => Number(b === first) - Number(a === first) || a - b);
    this.#readLayers(order, run).catch(unlessSaid);
    this.#readRoles(run).catch(unlessSaid);
  }

  /**
   * What each head is called, below its thumbnail; with a token hidden its weights are others.
   * @param {number} run
   */
  async #readRoles(run) {
    const { recording, first } = this.selection;
    if (first) return;
    await this.context.drawn;
    const roles = await this.context.source.roles(recording);
    if (run !== this.run) return;
    this.roles = roles;
    for (const cell of this.cells) {
      cell.tag.textContent = roles.tags[cell.layer][cell.head];
      this.#name(cell);
    }
  }

  /**
   * @param {number[]} layers
   * @param {number} run
   */
  async #readLayers(layers, run) {
    /** @type {number[]} */
    const left = [];
    await this.context.drawn;
    const isStill = () => run === this.run;
    for (const layer of layers) {
      if (!isStill()) return;
      const { recording, first } = this.selection;
      const asked = { recording, layer, first: first || undefined };
      const facts = await this.context.source.heads(asked);
      if (!isStill()) return;
      const change = await readChange(this.context, layer);
      if (!isStill()) return;
      this.facts[layer] = facts;
      this.changes[layer] = change;
      this.grid.show(this.changes, this.dark);
      for (const cell of this.#cellsOf(layer)) this.#paint(cell);
      const parts = [facts, ...(change ? [change] : [])];
      if (parts.some((part) => part.coverage < 1 && !part.settled)) left.push(layer);
      if (this.order !== "layer") this.#arrange();
      this.#explain();
    }
    if (left.length) setTimeout(() => this.#continue(left, run), AGAIN_MS);
  }

  // Reads the thumbnails of effects, where these are shown, the chosen layer first.
  #readEffects() {
    const { effect, selection } = this;
    const { layers } = selection.recordingFacts;
    this.effects = layers.map(() => null);
    this.#explain();
    this.paintAll();
    if (!effect) return;
    const first = selection.layer;
    const order = layers
      .flatMap(({ effects }, n) => (effects.length ? [n] : []))
      .sort((a, b) => Number(b === first) - Number(a === first) || a - b);
    this.#requestEffects(order, selection.recording, effect).catch(unlessSaid);
  }

  /**
   * @param {number[]} layers
   * @param {number} recording
   * @param {EffectKind} effect
   */
  async #requestEffects(layers, recording, effect) {
    const { effects } = this;
    const isStill = () => this.effects === effects;
    await this.context.drawn;
    /** @type {number[]} */
    const left = [];
    for (const layer of layers) {
      if (!isStill()) return;
      const found = await this.context.source.effectThumbnails({ recording, layer, effect });
      if (!isStill()) return;
      effects[layer] = found;
      if (found.coverage < 1 && !found.settled) left.push(layer);
      for (const cell of this.#cellsOf(layer)) this.#paint(cell);
      this.#explain();
    }
    const again = () => {
      if (isStill()) this.#requestEffects(left, recording, effect).catch(unlessSaid);
    };
    if (left.length) setTimeout(again, AGAIN_MS);
  }

  /**
   * @param {number[]} layers
   * @param {number} run
   */
  #continue(layers, run) {
    if (run === this.run) this.#readLayers(layers, run).catch(unlessSaid);
  }

  /**
   * @param {number} layer
   * @param {number} head
   * @returns {HeadCell}
   */
  #cell(layer, head) {
    const canvas = make("canvas", { width: 1, height: 1 });
    const score = make("span", { class: "regard-head-score", hidden: true });
    const button = make("button", { type: "button", class: "regard-head", tabIndex: -1 }, canvas);
    const name = this.#called({ layer, head });
    const tag = make("span", { class: "regard-head-tag" });
    button.append(make("span", { class: "regard-head-name", text: name }), tag, score);
    button.addEventListener("click", (event) => {
      if (modifiersOf(event).control && layer === this.selection.layer)
        toggleHead(this.selection, head);
      else this.selection.set({ layer, head });
    });
    button.addEventListener("focus", () => this.#rove(button));
    const cell = { layer, head, button, canvas, tag, score };
    this.#name(cell);
    return cell;
  }

  /**
   * `L5H3`, by the layer's own number.
   * @param {{layer: number, head: number}} cell
   */
  #called(cell) {
    const { about, recording } = this.selection;
    return nameOfPlace(about, { ...cell, recording });
  }

  /** @param {number} layer */
  #cellsOf(layer) {
    return this.cells.filter((cell) => cell.layer === layer);
  }

  // Puts the buttons in their order: in rows of layers, or in one list with the number.
  #arrange() {
    const active = document.activeElement;
    const { order } = this;
    this.list.classList.toggle("regard-flat", order !== "layer");
    const focused = this.list.contains(active) && active instanceof HTMLElement ? active : null;
    this.list.replaceChildren(...(order === "layer" ? this.#rows() : this.#sorted(order)));
    for (const cell of this.cells) {
      cell.score.hidden = order === "layer";
      if (order !== "layer") cell.score.textContent = this.#scoreText(cell, order);
    }
    this.#showChosen();
    this.#explain();
    focused?.focus();
  }

  #rows() {
    return [...this.#numbers(), ...this.#layers()];
  }

  // The numbers of heads above their columns, where each layer has the same in one row.
  #numbers() {
    const { layers } = this.selection.recordingFacts;
    const [{ heads, key_heads: keyHeads, head_numbers: numbers }] = layers;
    const isSame = layers.every((facts) => String(facts.head_numbers) === String(numbers));
    if (!isSame || heads > ROW_OF_HEADS || keyHeads < heads) return [];
    const named = numbers.map((number) => make("span", { text: String(number) }));
    const row = make("div", { class: "regard-head-numbers", "aria-hidden": "true" }, ...named);
    return [
      make(
        "div",
        { class: "regard-layer regard-head-columns" },
        make("span", { class: "regard-layer-name" }),
        row,
      ),
    ];
  }

  #layers() {
    return this.selection.recordingFacts.layers.map((facts, layer) => {
      const cells = this.#cellsOf(layer);
      const shared = facts.heads / facts.key_heads;
      const groups = Array.from({ length: facts.key_heads }, (_, n) => {
        const buttons = cells.slice(n * shared, (n + 1) * shared).map((cell) => cell.button);
        if (shared === 1) return buttons[0];
        const label = `heads ${sharing(facts, n).join(", ")} share their keys`;
        const group = { class: "regard-head-group", role: "group", "aria-label": label };
        return make("span", group, ...buttons);
      });
      const text = String(facts.number);
      const label = make("span", { class: "regard-layer-name", text, title: facts.name });
      const row = make("div", { class: "regard-head-row" }, ...groups);
      return make("div", { class: "regard-layer" }, label, row);
    });
  }

  /** @param {Score} order */
  #sorted(order) {
    const { least } = SCORES[order];
    const number = (/** @type {HeadCell} */ cell) => {
      const score = this.#score(cell, order) ?? NaN;
      return Number.isNaN(score) ? (least ? Infinity : -Infinity) : score;
    };
    const way = least ? 1 : -1;
    const known = this.cells.toSorted((a, b) => way * (number(a) - number(b)) || 0);
    return known.map((cell) => cell.button);
  }

  /**
   * @param {{layer: number, head: number}} cell
   * @param {Score} name
   */
  #score({ layer, head }, name) {
    if (name === "change") return this.changes[layer]?.change[head] ?? null;
    if (name === "effect") return this.selection.largestOf(layer, head);
    return this.facts[layer]?.[name]?.[head] ?? null;
  }

  /**
   * @param {HeadCell} cell
   * @param {Score} name
   */
  #scoreText(cell, name) {
    const { text } = SCORES[name];
    const [score, mean] = [this.#score(cell, name), this.#corpusMean(cell, name)];
    const own = score === null ? "–" : Number.isNaN(score) ? "NaN" : text(score);
    return mean === null ? own : `${own} (${text(mean)})`;
  }

  /**
   * The mean over a survey's corpus, where there is one.
   * @param {{layer: number, head: number}} cell
   * @param {Score} name
   */
  #corpusMean({ layer, head }, name) {
    if (name === "change" || name === "effect") return null;
    return this.facts[layer]?.corpus?.[name][head] ?? null;
  }

  #explain() {
    const known = this.facts.filter((facts) => facts !== null);
    const least = Math.min(1, ...known.map(({ coverage }) => coverage));
    const parts = [];
    if (known.length < this.facts.length)
      parts.push(`${known.length} of ${this.facts.length} layers read.`);
    else if (least < 1) parts.push(`${readText(least)} of the rows read.`);
    if (this.order !== "layer" && known.length && !this.#anyScore(this.order))
      parts.push(
        `There is no ${SCORES[this.order].name} here${this.order === "change" || this.order === "effect" ? "." : ": this is cross-attention."}`,
      );
    const what = this.effect ? "effect" : "weight";
    if (this.coloursPair) parts.push(`Each square: the ${what} of the chosen pair in that head.`);
    else if (this.effects.some(Boolean)) parts.push("Each square: the head's effects.");
    else parts.push("Each square: the head's attention map.");
    if (this.selection.recordingFacts.layers.some((l) => l.key_heads < l.heads))
      parts.push("Heads over one line share their keys.");
    if (known.some(({ corpus }) => corpus))
      parts.push("In brackets beside a head's score: its mean over the survey's corpus.");
    this.note.textContent = parts.join(" ");
    const { layers } = this.selection.recordingFacts;
    this.title.textContent = `Heads · ${layers.length} × ${headCounts(layers)}`;
  }

  /** @param {Score} order */
  #anyScore(order) {
    return this.cells.some((cell) => this.#score(cell, order) !== null);
  }

  /** @param {"layer" | Score} order */
  orderBy(order) {
    this.order = order;
    this.picker.show(order);
    this.#arrange();
    this.context.say(`heads in order of ${orderWords(order)}`);
  }

  nextOrder() {
    const orders = this.#orders;
    this.orderBy(orders[(orders.indexOf(this.order) + 1) % orders.length]);
  }

  togglePair() {
    this.coloursPair = !this.coloursPair;
    this.pairButton.setAttribute("aria-pressed", String(this.coloursPair));
    const words = this.coloursPair ? "this pair in every head" : "their own maps";
    this.context.say(`heads show ${words}`);
    this.#explain();
    this.paintAll();
    this.#readPair();
  }

  #readPair() {
    if (this.coloursPair) this.#requestPair().catch(unlessSaid);
  }

  // What the squares show of the chosen pair.
  get #wantedPair() {
    const { recording, query, key, where } = this.selection;
    const { first, unit, effect } = where;
    return { recording, query, key, first, unit, effect };
  }

  async #requestPair() {
    const wanted = this.#wantedPair;
    const { query, key } = wanted;
    if (query === null || key === null) return;
    const found = await this.context.source.pair({ ...wanted, query, key });
    if (String(Object.values(this.#wantedPair)) !== String(Object.values(wanted))) return;
    this.pair = found;
    this.paintAll();
  }

  paintAll() {
    this.grid.show(this.changes, this.dark);
    for (const cell of this.cells) this.#paint(cell);
  }

  /** @param {HeadCell} cell */
  #paint(cell) {
    this.#name(cell);
    const place = this.cells.indexOf(cell);
    if (this.coloursPair) {
      if (this.pair) this.#draw(cell, this.pair.values.subarray(place, place + 1), 1);
      return;
    }
    const facts = this.effects[cell.layer] ?? this.facts[cell.layer];
    if (!facts) return;
    const bins = facts.size ** 2;
    const own = facts.thumbnails.subarray(cell.head * bins, (cell.head + 1) * bins);
    this.#draw(cell, own, facts.size);
  }

  /**
   * @param {HeadCell} cell
   * @param {Float32Array} values
   * @param {number} size
   */
  #draw({ canvas, layer }, values, size) {
    const { selection } = this;
    const isSigned = this.coloursPair ? this.effect : this.effects[layer];
    const signed = isSigned ? signedRange(selection) : null;
    const range =
      this.coloursPair && selection.usedScale !== "uniform"
        ? colourRange(selection)
        : usualRange(selection.recordingFacts.tokens);
    [canvas.width, canvas.height] = [size, size];
    const picture = new ImageData(size, size);
    const pixels = new Uint32Array(picture.data.buffer);
    const [grey, ramp] = [invisiblePixel(this.dark), pixelTable(signed !== null, this.dark)];
    const entry = (/** @type {number} */ value) =>
      signed ? signedEntry(value, signed) : weightEntry(value, range);
    for (let n = 0; n < pixels.length; n++)
      pixels[n] = Number.isNaN(values[n]) ? grey : ramp[entry(values[n])];
    penOf(canvas).putImageData(picture, 0, 0);
  }

  /**
   * A head's label: `L5H3, entropy 2.31, …`.
   * @param {HeadCell} cell
   */
  #name(cell) {
    const scores = SCORE_NAMES.filter((name) => this.#score(cell, name) !== null);
    const parts = scores.map((name) => `${SCORES[name].name} ${this.#scoreText(cell, name)}`);
    const place = this.cells.indexOf(cell);
    if (this.coloursPair && this.pair && place >= 0)
      parts.unshift(this.#pairWords(this.pair, place));
    const role = this.roles?.roles[cell.layer][cell.head];
    const name = [this.#called(cell), ...(role ? [role] : []), ...parts].join(", ");
    cell.button.setAttribute("aria-label", name);
    cell.button.title = name;
  }

  /**
   * @param {Floats} pair
   * @param {number} place
   */
  #pairWords({ values, lost }, place) {
    const [number, isLost] = [values[place], isLostAt(lost, place)];
    if (this.effect) return effectWords(number, isLost);
    return Number.isNaN(number) ? noneWords(isLost) : `weight ${weightText(Math.exp(number))}`;
  }

  #showChosen() {
    const { layer, head, headPlaces: places } = this.selection;
    for (const cell of this.cells) {
      const chosen = cell.layer === layer && cell.head === head;
      const isOne = cell.layer === layer && places.includes(cell.head);
      cell.button.setAttribute("aria-pressed", String(isOne));
      if (chosen && !this.list.contains(document.activeElement)) this.#rove(cell.button);
      if (chosen) showInside(this.element, cell.button);
    }
  }

  /**
   * One button of the list is in the tab order: the one where the focus was last.
   * @param {HTMLElement} button
   */
  #rove(button) {
    for (const cell of this.cells) cell.button.tabIndex = cell.button === button ? 0 : -1;
  }

  /** @param {KeyboardEvent} event */
  #moveFocus(event) {
    const buttons = [...this.list.querySelectorAll("button")];
    const active = document.activeElement;
    const at = active instanceof HTMLButtonElement ? buttons.indexOf(active) : -1;
    /** @type {{[key: string]: number | undefined}} */
    const ends = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: buttons.length - 1 };
    if (event.ctrlKey && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      buttons[at]?.dispatchEvent(new MouseEvent("click", { ctrlKey: true }));
    }
    const [to, line] = [ends[event.key], lineStep(event.key)];
    if (to === undefined && !line) return;
    const next = line ? nextInLine(buttons, at, line) : buttons[to ?? at];
    event.preventDefault();
    event.stopPropagation();
    next?.focus();
    if (next) this.context.say(next.getAttribute("aria-label") ?? "");
  }
}
