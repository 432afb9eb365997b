// Every head of every layer as a small map: the picker of heads.

import { nameOfPlace } from "../data/selection.js";
import { unlessSaid } from "../data/watch.js";
import {
  colourRange,
  entryOf,
  invisiblePixel,
  pixelTable,
  watchTheme,
} from "../drawing/colours.js";
import { make, makePicker, nextInLine, showInside } from "../drawing/dom.js";
import { stepText, weightText } from "../drawing/numbers.js";

// What heads are ordered by: its name, its words, whether the least comes first, its number.
const ORDERS = {
  layer: { words: "layer" },
  entropy: { words: "entropy, low first", name: "entropy", least: true, number: stepText },
  distance: { words: "distance, far first", name: "distance", number: stepText },
  first: { words: "first token", name: "first token", number: weightText },
  previous: { words: "previous token", name: "previous token", number: weightText },
  induction: { words: "induction", name: "induction", number: weightText },
};
const SCORES = Object.keys(ORDERS).slice(1);
const AGAIN_MS = 1000; // until thumbnails that have not read every row are asked for again
const LOOKS = ["low", "high", "scale"]; // of the selection, that colours follow
const FIXED = { low: -5, high: 0 }; // thumbnails keep their colours whatever the map's range is

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

class HeadsPanel {
  constructor(context) {
    this.context = context;
    this.selection = context.selection;
    this.cells = []; // {layer, head, button, canvas, score}, layer after layer
    this.facts = []; // of each layer, where they are known
    this.pair = null; // ln of the chosen pair's weight in every head
    this.order = "layer";
    this.coloursPair = false;
    this.run = 0; // counts up with each recording, so that late answers are known
    this.ramp = pixelTable(false);
    this.dark = watchTheme(context.ended, (dark) => {
      this.dark = dark;
      this.paintAll();
    });
    this.#build();
  }

  #build() {
    this.title = make("h2", { text: "Heads" });
    this.picker = makePicker("order", (order) => this.orderBy(order));
    this.picker.fill(Object.entries(ORDERS).map(([value, { words }]) => [value, words]));
    this.pairButton = make("button", {
      type: "button",
      class: "regard-button",
      text: "colour by selected pair",
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
      this.list,
      this.note,
    );
  }

  start() {
    this.selection.addEventListener("change", ({ detail }) => {
      if (detail.has("recording")) this.#read();
      if (this.coloursPair && LOOKS.some((name) => detail.has(name))) this.paintAll();
      if (detail.has("layer") || detail.has("head")) this.#showChosen();
      if (["recording", "query", "key"].some((name) => detail.has(name))) this.#readPair();
      if (detail.has("view") && detail.has("recording")) this.#readPair();
    });
    this.#read();
  }

  end() {
    this.run++;
  }

  // Makes the buttons of a recording, and fills them layer by layer, the chosen layer first.
  #read() {
    const { layers } = this.selection.recordingFacts;
    this.facts = layers.map(() => null);
    this.pair = null;
    this.cells = layers.flatMap((facts, layer) =>
      Array.from({ length: facts.heads }, (_, head) => this.#cell(layer, head)),
    );
    const most = (count) => Math.max(...layers.map(count));
    this.list.style.setProperty(
      "--heads",
      most(({ heads }) => heads),
    );
    const groups = ({ heads, key_heads }) => (key_heads < heads ? key_heads : 0);
    this.list.style.setProperty("--groups", most(groups));
    this.#arrange();
    const run = ++this.run;
    const first = this.selection.layer;
    const order = layers.map((_, n) => n).sort((a, b) => (b === first) - (a === first) || a - b);
    this.#readLayers(order, run).catch(unlessSaid);
  }

  async #readLayers(layers, run) {
    const left = [];
    await this.context.drawn;
    for (const layer of layers) {
      const { recording } = this.selection;
      const facts = await this.context.source.heads({ recording, layer });
      if (run !== this.run) return;
      this.facts[layer] = facts;
      for (const cell of this.#cellsOf(layer)) this.#paint(cell);
      if (facts.coverage < 1 && !facts.settled) left.push(layer);
      if (this.order !== "layer") this.#arrange();
      this.#explain();
    }
    if (left.length) setTimeout(() => this.#continue(left, run), AGAIN_MS);
  }

  #continue(layers, run) {
    if (run === this.run) this.#readLayers(layers, run).catch(unlessSaid);
  }

  #cell(layer, head) {
    const canvas = make("canvas", { width: 1, height: 1 });
    const score = make("span", { class: "regard-head-score", hidden: true });
    const button = make("button", { type: "button", class: "regard-head", tabIndex: -1 }, canvas);
    const name = this.#called({ layer, head });
    button.append(make("span", { class: "regard-head-name", text: name }), score);
    button.addEventListener("click", () => this.selection.set({ layer, head }));
    button.addEventListener("focus", () => this.#rove(button));
    const cell = { layer, head, button, canvas, score };
    this.#name(cell);
    return cell;
  }

  // `L5H3`, by the layer's own number.
  #called(cell) {
    const { about, recording } = this.selection;
    return nameOfPlace(about, { ...cell, recording });
  }

  #cellsOf(layer) {
    return this.cells.filter((cell) => cell.layer === layer);
  }

  // Puts the buttons in their order: in rows of layers, or in one list with the number.
  #arrange() {
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    const flat = this.order !== "layer";
    this.list.classList.toggle("regard-flat", flat);
    this.list.replaceChildren(...(flat ? this.#sorted() : this.#rows()));
    for (const cell of this.cells) {
      cell.score.hidden = !flat;
      if (flat) cell.score.textContent = this.#scoreText(cell, this.order);
    }
    this.#showChosen();
    this.#explain();
    focused?.focus();
  }

  #rows() {
    return this.selection.recordingFacts.layers.map((facts, layer) => {
      const cells = this.#cellsOf(layer);
      const shared = facts.heads / facts.key_heads;
      const groups = Array.from({ length: facts.key_heads }, (_, n) => {
        const buttons = cells.slice(n * shared, (n + 1) * shared).map((cell) => cell.button);
        if (shared === 1) return buttons[0];
        const label = `heads that share the keys of key head ${n}`;
        const group = { class: "regard-head-group", role: "group", "aria-label": label };
        return make("span", group, ...buttons);
      });
      const number = String(facts.number ?? layer);
      const label = make("span", { class: "regard-layer-name", text: number });
      const row = make("div", { class: "regard-head-row" }, ...groups);
      return make("div", { class: "regard-layer" }, label, row);
    });
  }

  #sorted() {
    const { least } = ORDERS[this.order];
    const number = (cell) => this.#score(cell, this.order) ?? (least ? Infinity : -Infinity);
    const way = least ? 1 : -1;
    const known = this.cells.toSorted((a, b) => way * (number(a) - number(b)) || 0);
    return known.map((cell) => cell.button);
  }

  #score({ layer, head }, name) {
    return this.facts[layer]?.[name]?.[head] ?? null;
  }

  #scoreText(cell, name) {
    const score = this.#score(cell, name);
    return score === null ? "–" : ORDERS[name].number(score);
  }

  #explain() {
    const known = this.facts.filter(Boolean);
    const least = Math.min(1, ...known.map(({ coverage }) => coverage));
    const parts = [];
    if (known.length < this.facts.length)
      parts.push(`${known.length} of ${this.facts.length} layers read.`);
    else if (least < 1) parts.push(`${Math.round(100 * least)} % of the rows read.`);
    if (this.order !== "layer" && known.length && !this.#anyScore())
      parts.push(`There is no ${ORDERS[this.order].name} here: the queries are another text.`);
    if (this.coloursPair) parts.push("Each square: the weight of the chosen pair in that head.");
    else parts.push("Each square: the head's own map, strongest links.");
    if (this.selection.recordingFacts.layers.some((l) => l.key_heads < l.heads))
      parts.push("Heads over one line share their keys.");
    this.note.textContent = parts.join(" ");
    const { layers } = this.selection.recordingFacts;
    this.title.textContent = `Heads · ${layers.length} × ${layers[0].heads}`;
  }

  #anyScore() {
    return this.cells.some((cell) => this.#score(cell, this.order) !== null);
  }

  orderBy(order) {
    this.order = order;
    this.picker.show(order);
    this.#arrange();
    this.context.say(`heads in order of ${ORDERS[order].words}`);
  }

  nextOrder() {
    const names = Object.keys(ORDERS);
    this.orderBy(names[(names.indexOf(this.order) + 1) % names.length]);
  }

  togglePair() {
    this.coloursPair = !this.coloursPair;
    this.pairButton.setAttribute("aria-pressed", String(this.coloursPair));
    const words = this.coloursPair ? "the selected pair's weight" : "their own maps";
    this.context.say(`heads show ${words}`);
    this.#explain();
    this.paintAll();
    this.#readPair();
  }

  #readPair() {
    if (this.coloursPair) this.#askPair().catch(unlessSaid);
  }

  async #askPair() {
    const { recording, query, key } = this.selection;
    if (query === null || key === null) return;
    const { values } = await this.context.source.pair({ recording, query, key });
    const now = this.selection;
    if (now.recording !== recording || now.query !== query || now.key !== key) return;
    this.pair = values;
    this.paintAll();
  }

  paintAll() {
    for (const cell of this.cells) this.#paint(cell);
  }

  #paint(cell) {
    this.#name(cell);
    const place = this.cells.indexOf(cell);
    if (this.coloursPair) {
      if (this.pair) this.#draw(cell, this.pair.subarray(place, place + 1), 1);
      return;
    }
    const facts = this.facts[cell.layer];
    if (!facts) return;
    const bins = facts.size ** 2;
    const own = facts.thumbnails.subarray(cell.head * bins, (cell.head + 1) * bins);
    this.#draw(cell, own, facts.size);
  }

  #draw({ canvas }, values, size) {
    const range =
      this.coloursPair && this.selection.scale === "weight" ? colourRange(this.selection) : FIXED;
    canvas.width = canvas.height = size;
    const picture = new ImageData(size, size);
    const pixels = new Uint32Array(picture.data.buffer);
    const grey = invisiblePixel(this.dark);
    for (let n = 0; n < pixels.length; n++) {
      const at = values[n] / Math.LN10;
      pixels[n] = Number.isNaN(at) ? grey : this.ramp[entryOf(at, range.low, range.high)];
    }
    canvas.getContext("2d").putImageData(picture, 0, 0);
  }

  // What a head is called: `L5H3, entropy 2.31, …`.
  #name(cell) {
    const scores = SCORES.filter((name) => this.#score(cell, name) !== null);
    const parts = scores.map((name) => `${ORDERS[name].name} ${this.#scoreText(cell, name)}`);
    const place = this.cells.indexOf(cell);
    if (this.coloursPair && this.pair && place >= 0) {
      const weight = this.pair[place];
      parts.unshift(Number.isNaN(weight) ? "invisible" : `weight ${weightText(Math.exp(weight))}`);
    }
    const name = [this.#called(cell), ...parts].join(", ");
    cell.button.setAttribute("aria-label", name);
    cell.button.title = name;
  }

  #showChosen() {
    const { layer, head } = this.selection;
    for (const cell of this.cells) {
      const chosen = cell.layer === layer && cell.head === head;
      cell.button.setAttribute("aria-pressed", String(chosen));
      if (chosen && !this.list.contains(document.activeElement)) this.#rove(cell.button);
      if (chosen) showInside(this.element, cell.button);
    }
  }

  // One button of the list is in the tab order: the one where the focus was last.
  #rove(button) {
    for (const cell of this.cells) cell.button.tabIndex = cell.button === button ? 0 : -1;
  }

  #moveFocus(event) {
    const buttons = [...this.list.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    const last = buttons.length - 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    const line = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const next = line ? nextInLine(buttons, at, line) : buttons[to];
    if (to === undefined && !line) return;
    event.preventDefault();
    event.stopPropagation();
    next?.focus();
    if (next) this.context.say(next.getAttribute("aria-label"));
  }
}
