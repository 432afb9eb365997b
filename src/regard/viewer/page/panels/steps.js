// Every step of one head: q·kᵀ → scores → scaled → masked → weights → ·v → output.

import { unlessSaid } from "../data/watch.js";
import { watchTheme } from "../drawing/colours.js";
import { make } from "../drawing/dom.js";
import { textWidth } from "../drawing/marks.js";
import { countSeen, countText, largest, stepText } from "../drawing/numbers.js";
import { arithmeticLines, scalingText, showArithmetic } from "./arithmetic.js";
import { bandSizes } from "./band.js";
import { MatrixView } from "./matrix.js";
import { makeStages, STAGES, stageSigns, stagesOf } from "./stages.js";

/** @import { Context, Fields } from "../data/selection.js" */
/** @import { LayerFacts, Steps } from "../data/source.js" */
/** @import { Texts, TokenText } from "../data/tokens.js" */
/** @import { BandSizes } from "./band.js" */
/** @import { Axis, ChooseCell, Values } from "./matrix.js" */
/** @import { Stage } from "./stages.js" */

/**
 * The steps shown: of all queries and keys, or of one query and its strongest keys; `name` and
 * `facts` are those of the head.
 * @typedef {{steps: Steps, text: Texts, all: boolean, seen: number, name: string,
 *   facts: LayerFacts}} FoundSteps
 */

/** @typedef {Exclude<keyof Steps, "queries" | "keys">} StepName */

/**
 * Sides of the matrices; the keys run down in v, and the columns of k down in kᵀ.
 * @typedef {{query: Axis, key: Axis, valueKey: Axis, dim: Axis, keyDim: Axis,
 *   valueDim: Axis}} StepAxes
 */

/**
 * A cell of a matrix: places among the steps, and columns of vectors.
 * @typedef {{row?: number, column?: number, dim?: number | null,
 *   valueDim?: number | null}} CellPlace
 */

/** @type {StepName[]} with a cell for every query and key */
const MATRICES = [...STAGES, "weights"];
/** @type {StepName[]} of all queries and keys */
const WHOLE_MATRICES = ["scores", "weights"];
/** @type {StepName[]} in their order */
const STEP_NAMES = ["query", "key", ...MATRICES, "value", "output"];
const NO_STAGES = { scaled: null, capped: null, biased: null, edited: null, masked: null };
const WHOLE = 32; // queries and keys that are all shown
const STRONGEST = 12; // keys of longer texts
const WIDE = 176; // pixels of a vector of many numbers
const SHORT = 7; // letters of a label in the band
const LABELS = 60; // pixels of it, at most: style/steps.css
const BESIDE = 48; // pixels beside the scores that the switch may have: style/steps.css
const NUMBER = 48; // of a number that is written out
/** @type {(keyof Fields)[]} */
const FOLLOWED = [
  "recording",
  "layer",
  "head",
  "heads",
  "query",
  "queries",
  "key",
  "first",
  "view",
];

/** @param {Context} context */
export function makeSteps(context) {
  const panel = new StepsPanel(context);
  return { element: panel.element, end: () => panel.end() };
}

function makeSign() {
  return make("span", { class: "regard-sign", "aria-hidden": "true" });
}

// Its element's data-shown names the pair it shows, `query 5 key 2`.
class StepsPanel {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.selection = context.selection;
    this.run = 0;
    /** @type {number | null} the chosen column of q and k */
    this.dim = null;
    /** @type {number | null} of v and the output */
    this.valueDim = null;
    /** @type {Stage | null} of the scores that was chosen; null is their last */
    this.stage = null;
    this.width = 700; // CSS pixels, until they are known
    this.height = 0; // for the matrices
    /** @type {BandSizes | null} */
    this.sizes = null;
    /** @type {FoundSteps | null} */
    this.found = null;
    this.views = this.#matrices();
    this.stages = makeStages((stage) => {
      this.stage = stage;
      this.#show();
    });
    this.views.scores.title.after(this.stages.element);
    this.signs = new Map(STEP_NAMES.map((name) => [name, makeSign()]));
    const steps = STEP_NAMES.map((name) => {
      const { element } = this.views[name];
      const properties = { class: "regard-step", "data-step": name };
      return make("div", properties, this.signs.get(name), element);
    });
    this.title = make("h2", { text: "Steps" });
    this.note = make("p", { class: "regard-note" });
    this.arithmetic = make("dl", { class: "regard-arithmetic" });
    this.flow = make("div", { class: "regard-flow" }, ...steps);
    this.element = make(
      "section",
      { class: "regard-steps", "aria-label": "Steps" },
      this.title,
      this.note,
      this.flow,
      this.arithmetic,
    );
    this.dark = watchTheme(context.ended, (dark) => {
      this.dark = dark;
      this.#show();
    });
    this.selection.listen((changed) => {
      if (FOLLOWED.some((name) => changed.has(name))) this.#read();
    });
    this.observer = new ResizeObserver(() => this.#resize());
    for (const element of [this.element, this.flow]) this.observer.observe(element);
    this.#read();
  }

  #resize() {
    const width = this.element.clientWidth;
    const height = this.flow.offsetHeight;
    if (!width || (width === this.width && height === this.height)) return;
    [this.width, this.height] = [width, height];
    this.#show();
  }

  /** @returns {Record<StepName, MatrixView>} */
  #matrices() {
    /** @type {ChooseCell} */
    const pair = (row, column, words) => this.#choosePair(row, column, words);
    /** @type {(name: string, choose: ChooseCell) => MatrixView} */
    const view = (name, choose) => new MatrixView(name, choose);
    return {
      query: view("q", (row, dim, words) => this.#choose({ row, dim }, words)),
      key: view("k", (row, column, words) => this.#chooseKey(row, column, words)),
      scores: view("scores", pair),
      scaled: view("scaled", pair),
      capped: view("capped", pair),
      biased: view("biased", pair),
      edited: view("edited", pair),
      masked: view("masked", pair),
      weights: view("weights", pair),
      value: view("v", (column, valueDim, words) => this.#choose({ column, valueDim }, words)),
      output: view("output", (row, valueDim, words) => this.#choose({ row, valueDim }, words)),
    };
  }

  end() {
    this.run++;
    this.observer.disconnect();
  }

  #read() {
    const { view, query, key } = this.selection;
    const run = ++this.run;
    const { weights_only: alone } = this.selection.layerFacts;
    this.flow.hidden = this.arithmetic.hidden = alone;
    if (alone) this.#showNone();
    else if (view === "steps" && query !== null && key !== null)
      this.#request(run, query, key).catch(unlessSaid);
  }

  /**
   * @param {number} run
   * @param {number} query
   * @param {number} key
   */
  async #request(run, query, key) {
    const { source, texts } = this.context;
    const { recording, name, layerFacts: facts } = this.selection;
    const where = this.selection.whereOfTokens;
    const text = await texts(recording);
    const row = (await source.row({ ...where, query })).values;
    const all = text.queries.length <= WHOLE && text.keys.length <= WHOLE;
    const queries = all ? text.queries.raw.map((_, n) => n) : [query];
    const chosen = all ? text.keys.raw.map((_, n) => n) : strongestWith(row, key);
    const parameters = { ...where, queries: queries.join(), keys: chosen.join() };
    const steps = await source.steps(parameters);
    if (run !== this.run) return;
    this.found = { steps, text, all, seen: countSeen(row), name, facts };
    this.#show();
  }

  #showNone() {
    this.found = null;
    this.title.textContent = `Steps of ${this.selection.name}`;
    this.note.textContent =
      "This recording was made of weights alone: there is no query and key to compute them from.";
    this.note.hidden = false;
  }

  #show() {
    if (!this.found) return;
    const { steps, text, all, name: head, facts } = this.found;
    const stages = stagesOf(steps);
    const stage = stages.find((name) => name === this.stage) ?? stages[stages.length - 1];
    this.stages.element.hidden = !all;
    this.stages.show(stages, stage, facts);
    this.sizes = all ? this.#bandSizes(this.found) : null;
    const axes = this.#axes(this.found);
    const shown = all ? { ...steps, ...NO_STAGES, scores: steps[stage] } : steps;
    this.views.scores.rename(all ? stage : "scores");
    for (const name of STEP_NAMES) {
      const values = shown[name];
      const { parentElement } = this.views[name].element;
      if (parentElement) parentElement.hidden = !values;
      if (values) this.#fill(name, values, this.found, axes);
    }
    this.views.scores.title.hidden = all;
    this.views.key.rename(all ? "kᵀ" : "k");
    this.element.classList.toggle("regard-one-query", !all);
    this.element.classList.toggle("regard-band", this.sizes !== null);
    this.#signs(facts);
    this.title.textContent = `Steps of ${head} · ${formulaText(steps, facts)}`;
    const parts = [];
    if (!all)
      parts.push(
        `The text has ${countText(text.keys.length)} tokens, so this is query ` +
          `${countText((text.offset ?? 0) + steps.queries[0])} and its ` +
          `${steps.keys.length === 1 ? "strongest key" : `${steps.keys.length} strongest keys`}; ` +
          "weights and output are those of all keys.",
      );
    if (this.selection.heads)
      parts.push(`Of ${this.selection.headPlaces.length} chosen heads, this is one.`);
    if (this.selection.queries && !all) parts.push("Of several chosen queries, this is one.");
    if (!steps.value) parts.push("No values were recorded, so the steps end at the weights.");
    this.note.textContent = parts.join(" ");
    this.note.hidden = parts.length === 0;
    this.#mark();
  }

  /** @param {FoundSteps} found */
  #bandSizes({ steps, text }) {
    const padding = 32; // as in style/steps.css, or with a scroll bar
    const room = { width: this.width - padding, height: this.flow.offsetHeight };
    /** @type {(of: TokenText, places: number[]) => number} */
    const widest = (of, places) =>
      Math.min(LABELS, 8 + Math.max(...places.map((n) => textWidth(of.label(n, SHORT), 12))));
    return bandSizes(room, {
      rowLabels: widest(text.queries, steps.queries),
      columnLabels: widest(text.keys, steps.keys),
      switched: this.stages.element.offsetWidth - BESIDE,
      queries: steps.queries.length,
      keys: steps.keys.length,
      dims: steps.query[0].length,
      valueDims: steps.value?.[0].length ?? 0,
    });
  }

  /**
   * Sizes and labels of the matrices' sides. With one query and its strongest keys, the keys run
   * down, so that one line has everything of a key.
   * @param {FoundSteps} found
   * @returns {StepAxes}
   */
  #axes({ steps, text, all }) {
    const sizes = this.sizes ?? this.#flowSizes(steps, all);
    const most = this.sizes ? SHORT : 9;
    /** @type {(of: TokenText, from: number) => (n: number) => string} */
    const label = (of, from) => (n) =>
      all ? of.label(n, most) : `${countText(from + n)} ${of.label(n, 8)}`;
    /** @type {(word: string, labels: string[] | null, size: number) => Axis} */
    const axis = (word, labels, size) => ({ word, labels, size });
    const queries = steps.queries.map(label(text.queries, text.offset ?? 0));
    const keys = steps.keys.map(label(text.keys, 0));
    return {
      query: axis("query", queries, sizes.tall),
      key: axis("key", keys, sizes.wide),
      valueKey: axis("key", keys, sizes.tall),
      dim: axis("column", null, sizes.dim),
      keyDim: axis("column", null, sizes.keyDim),
      valueDim: axis("column", null, sizes.valueDim),
    };
  }

  /**
   * Of matrices one after another: so that three stand beside each other, or else two.
   * @param {Steps} steps
   * @param {boolean} all
   * @returns {BandSizes}
   */
  #flowSizes(steps, all) {
    const count = Math.max(steps.queries.length, steps.keys.length);
    const three = Math.floor((this.width - 345) / (3 * count));
    const two = Math.floor((this.width - 220) / (2 * count));
    const fitting = three >= 13 ? Math.min(20, three) : Math.max(11, Math.min(17, two));
    const side = all ? fitting : 22;
    const wide = all ? WIDE : 0.75 * WIDE; // so that all steps of one query fit beside each other
    /** @type {(numbers: number[][]) => number} */
    const along = (numbers) => Math.max(2, Math.min(side, Math.floor(wide / numbers[0].length)));
    const [dim, valueDim] = [along(steps.query), steps.value ? along(steps.value) : 0];
    return { tall: side, wide: side, dim, keyDim: dim, valueDim };
  }

  /**
   * @param {StepName} name
   * @param {Values} values
   * @param {FoundSteps} found
   * @param {StepAxes} axes
   */
  #fill(name, values, found, axes) {
    const { rows, columns, turned } = sidesOf(name, found.all, axes);
    const turn = turned ? transposed : (/** @type {Values} */ matrix) => matrix;
    const weights = name === "weights";
    const hidden = weights ? turn(found.steps.masked) : null;
    const bare = this.sizes && !weights && name !== "scores"; // no room for the range
    const note = weights ? sumText(found) : bare ? "" : undefined;
    this.views[name].fill({
      values: turn(values),
      hidden,
      rows,
      columns,
      weights,
      note,
      dark: this.dark,
    });
  }

  /** @param {LayerFacts} facts */
  #signs(facts) {
    /** @type {Partial<Record<StepName, string>>} */
    const band = { scores: "· kᵀ\n=", weights: "softmax\n→", output: "· v\n=" };
    /** @type {Partial<Record<StepName, string>>} */
    const flow = {
      ...stageSigns(facts),
      key: "·",
      scores: "→",
      weights: "softmax",
      value: "·",
      output: "=",
    };
    const signs = this.sizes ? band : flow;
    for (const [name, sign] of this.signs) sign.textContent = signs[name] ?? "";
  }

  // Outlines the row and column of the chosen cell, and writes its arithmetic.
  #mark() {
    if (!this.found) return;
    const { steps, text, all, seen, facts } = this.found;
    const { query, key } = this.selection;
    if (query === null || key === null) return;
    const i = steps.queries.indexOf(query);
    const j = steps.keys.indexOf(key);
    if (i < 0 || j < 0) return;
    const { query: q, key: k, value, output } = this.views;
    const dims = this.dim !== null;
    q.mark({ row: i, column: this.dim, cell: dims });
    k.mark({ row: all ? this.dim : j, column: all ? j : this.dim, cell: dims });
    for (const name of all ? WHOLE_MATRICES : MATRICES)
      if (steps[name]) this.views[name].mark({ row: all ? i : j, column: all ? j : i, cell: true });
    const cell = this.valueDim !== null;
    if (steps.value) value.mark({ row: j, column: this.valueDim, cell });
    if (steps.output) output.mark({ row: i, column: this.valueDim, cell });
    const names = {
      query: text.queries.label(query, 12),
      key: text.keys.label(key, 12),
      keys: steps.keys.map((n) => text.keys.label(n, 12)),
    };
    const places = { query: (text.offset ?? 0) + query, key };
    const of = { steps, i, j, names, places, seen, dim: this.valueDim, facts };
    showArithmetic(this.arithmetic, arithmeticLines(of));
    this.element.dataset.shown = `query ${query} key ${key}`;
  }

  /**
   * @param {number} row
   * @param {number} column
   * @param {string} words
   */
  #choosePair(row, column, words) {
    this.#choose(this.found?.all ? { row, column } : { row: column, column: row }, words);
  }

  /**
   * @param {number} row
   * @param {number} column
   * @param {string} words
   */
  #chooseKey(row, column, words) {
    this.#choose(this.found?.all ? { column, dim: row } : { column: row, dim: column }, words);
  }

  /**
   * `words`: the cell's name and value.
   * @param {CellPlace} place
   * @param {string} words
   */
  #choose({ row, column, dim = null, valueDim = null }, words) {
    if (!this.found) return;
    const { steps } = this.found;
    this.dim = dim;
    this.valueDim = valueDim;
    const query = steps.queries[row ?? -1] ?? this.selection.query;
    const key = steps.keys[column ?? -1] ?? this.selection.key;
    if (query === this.selection.query && key === this.selection.key) {
      this.#mark();
      this.context.say(words);
    } else {
      this.context.because = words;
      this.selection.set({ query, key });
    }
  }
}

/**
 * The sums of the rows of weights.
 * @param {FoundSteps} found
 */
function sumText({ steps, all }) {
  const sums = steps.weights.map((row) => row.reduce((sum, weight) => sum + (weight ?? 0), 0));
  const far = Math.max(...sums.map((sum) => Math.abs(sum - 1)));
  if (!all) return `sum\u00a0${stepText(sums[0], 4)}`;
  if (far < 1e-5) return "every row sums to 1";
  return `sums ${stepText(Math.min(...sums))} … ${stepText(Math.max(...sums))}`;
}

/**
 * The sides of a matrix, and whether it lies on its side.
 * @param {StepName} name
 * @param {boolean} all
 * @param {StepAxes} axes
 */
function sidesOf(name, all, { query, key, valueKey, dim, keyDim, valueDim }) {
  const numbers = { ...query, size: NUMBER, labels: null };
  const bare = { ...key, labels: null };
  if (name === "query") return { rows: query, columns: dim, turned: false };
  if (name === "key" && all) return { rows: keyDim, columns: key, turned: true };
  if (name === "key") return { rows: key, columns: dim, turned: false };
  if (name === "value") return { rows: valueKey, columns: valueDim, turned: false };
  if (name === "output") return { rows: query, columns: valueDim, turned: false };
  if (all) return { rows: query, columns: key, turned: false };
  return { rows: bare, columns: numbers, turned: true };
}

/**
 * `softmax(q·kᵀ ÷ √64 + mask)·v`, with cap, bias and edits where the head has them.
 * @param {Steps} steps
 * @param {LayerFacts} facts
 */
function formulaText(steps, facts) {
  const scaled = `q·kᵀ ${scalingText(facts)}`;
  const capped = steps.capped ? `capped(${scaled})` : scaled;
  const biased = `${capped}${steps.biased ? " + bias" : ""}`;
  const masked = `${biased}${steps.edited ? " + ln(edits)" : ""} + mask`;
  const sink = facts.options.includes("sinks") ? ", with sink" : "";
  return `softmax(${masked}${sink})${steps.value ? "·v" : ""}`;
}

/**
 * The strongest keys of a row and the chosen one, in the order of the text.
 * @param {Float32Array} row
 * @param {number} key
 */
function strongestWith(row, key) {
  const found = largest(row, STRONGEST);
  if (!found.includes(key)) found.push(key);
  return found.sort((a, b) => a - b);
}

/**
 * @param {Values} rows
 * @returns {Values}
 */
function transposed(rows) {
  return rows[0].map((_, d) => rows.map((row) => row[d]));
}
