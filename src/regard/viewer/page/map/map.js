// The attention map of a head: a heatmap of its weights to zoom and to move with pointer and keys.
//
// On the element, data-idle is "true" once every tile of the view is exact and its tokens are known,
// data-missing is how many tiles are missing, and data-read is the fraction of rows that they have
// read. On its canvas, data-paints counts how often the cells were drawn; data-x, -y, -zoom and
// -level are their view. The class "bare" hides all but the cells.

import { counterpart, lackingText } from "../data/alignment.js";
import { headsWords } from "../data/extend.js";
import { kindWords } from "../data/kinds.js";
import { headName } from "../data/source.js";
import { unlessSaid } from "../data/watch.js";
import { watchTheme } from "../drawing/colours.js";
import { make, penOf } from "../drawing/dom.js";
import { drawMarks } from "../drawing/marks.js";
import { frameMarks, themeOf } from "./axes.js";
import { listenToAxes } from "./axispointer.js";
import { captionOf, frameName, progressText } from "./caption.js";
import { Frame } from "./frame.js";
import { exactWordsOfBin, labelOfBin, wordsOfBin, wordsOfEffect, wordsOfTokens } from "./hover.js";
import { layoutOf } from "./layout.js";
import { makeLinks } from "./links.js";
import { viewOf, viewWith, zoomedAt } from "./mapview.js";
import { isSameBin, isSameHover, outline } from "./outline.js";
import { listenToPointer } from "./pointer.js";
import { shownRange } from "./shown.js";
import { listenToSums, MapSums } from "./sums.js";

/** @import { Changed, Context, Fields } from "../data/selection.js" */
/** @import { Link } from "../data/source.js" */
/** @import { Texts } from "../data/tokens.js" */
/** @import { Mark } from "../drawing/marks.js" */
/** @import { AxisTexts, Theme } from "./axes.js" */
/** @import { Extent, MapView } from "./mapview.js" */
/** @import { Bin, Hovered } from "./outline.js" */

const EXACT_MS = 80; // the pointer rests before the exact pair of a bin is looked for
const SAY_MS = 2500; // between two words on progress
/** @type {(keyof Fields)[]} */
const MARKED = ["query", "queries", "key", "side"]; // fields that leave the cells as they are
const NONE_CHOSEN = { query: null, several: [], key: null, rings: [] };

export class HeadMapView {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    /** @type {Map<number, Texts | undefined>} by recording */
    this.texts = new Map();
    /** @type {MapView | null} that the next picture shows */
    this.next = null;
    this.pending = 0; // the next picture, where one is due
    this.stale = true; // whether it needs other cells, not only other marks
    /** @type {Hovered | null} */
    this.hovered = null;
    /** @type {number | undefined} until the exact pair of a bin is looked for */
    this.resting = undefined;
    this.said = 0;
    /** @type {Theme | null} */
    this.theme = null;
    const changed = () => this.schedule();
    const resized = () => {
      this.stale = true;
      this.#draw();
    };
    const counted = (/** @type {Frame} */ frame) => this.hover(frame);
    this.frames = [0, 1].map(() => new Frame(context, { changed, resized, counted }));
    this.links = makeLinks(context, {
      go: (query, key) => this.goTo(query, key),
      changed: () => this.schedule(false),
    });
    this.sums = new MapSums(context, () => this.schedule(false));
    this.caption = make("p", { class: "regard-map-caption" });
    this.says = make("p", { class: "regard-map-says" });
    this.top = make("div", { class: "regard-map-top" }, this.says);
    this.head = make("div", { class: "regard-map-head" }, this.caption);
    this.stage = make(
      "div",
      { class: "regard-map-stage", tabIndex: 0, role: "application" },
      ...this.frames.map((frame) => frame.element),
    );
    const body = make("div", { class: "regard-map-body" }, this.stage);
    this.element = make(
      "section",
      { class: "regard-map", "aria-label": "Map" },
      this.top,
      this.head,
      body,
    );
    this.element.dataset.idle = "false";
    for (const frame of this.frames) {
      listenToPointer(frame, this);
      listenToAxes(frame, context);
      listenToSums(frame, this.sums, () => this.#axisTexts(frame));
    }
    this.stage.addEventListener("keydown", (event) => this.#homeOrEnd(event));
    this.dark = watchTheme(context.ended, (dark) => {
      this.dark = dark;
      this.theme = null;
      this.schedule();
    });
    context.selection.listen((changed) => this.#follow(changed));
    this.#follow(null);
  }

  get selection() {
    return this.context.selection;
  }

  // The frames that are shown: two when heads are compared side by side.
  get shown() {
    return this.frames.filter((frame) => !frame.element.hidden);
  }

  get size() {
    return this.frames[0].size;
  }

  /** @returns {Extent} */
  get extent() {
    const extents = this.shown.map((frame) => frame.extent);
    const most = (/** @type {keyof Extent} */ name) =>
      Math.max(...extents.map((extent) => extent[name]));
    return { queries: most("queries"), keys: most("keys") };
  }

  get view() {
    return this.next ?? viewOf(this.selection, this.size, this.extent);
  }

  /**
   * Shows a view; the whole matrix is no view of its own, so that it follows the window.
   * @param {MapView} view
   */
  show(view) {
    this.next = view;
    this.schedule();
  }

  /**
   * @param {number} factor
   * @param {number} px
   * @param {number} py
   */
  zoomAt(factor, px, py) {
    this.show(zoomedAt(this.view, factor, px, py, this.size, this.extent));
  }

  /**
   * @param {number} dx
   * @param {number} dy
   */
  panBy(dx, dy) {
    const { x, y, zoom } = this.view;
    this.show(viewOf({ x: x - dx / zoom, y: y - dy / zoom, zoom }, this.size, this.extent));
  }

  /**
   * Zooms around the chosen pair where it is in view, else around the middle.
   * @param {number} factor
   */
  zoomBy(factor) {
    const { view, size, selection } = this;
    /** @type {(token: number | null, start: number, pixels: number) => number} */
    const place = (token, start, pixels) => {
      const at = token === null ? -1 : (token + 0.5 - start) * view.zoom;
      return at >= 0 && at <= pixels ? at : pixels / 2;
    };
    const px = place(selection.key, view.x, size.width);
    this.zoomAt(factor, px, place(selection.query, view.y, size.height));
  }

  fit() {
    this.show(viewOf({ x: null, y: null, zoom: null }, this.size, this.extent));
  }

  /**
   * Moves the chosen pair by whole bins, or words.
   * @param {number} across
   * @param {number} down
   */
  move(across, down) {
    const side = 2 ** this.view.level;
    const { query, key } = this.#cursor();
    const texts = side === 1 ? this.#axisTexts(this.frames[0]) : null;
    if (texts) {
      const { queries, keys, unit } = texts;
      this.goTo(queries.moved(query, down, unit), keys.moved(key, across, unit));
    } else this.goTo(query + down * side, key + across * side);
  }

  // Goes to the strongest link of the chosen bin.
  enter() {
    const { view } = this;
    const { query, key } = this.#cursor();
    const side = 2 ** view.level;
    this.choose(this.frames[0], Math.floor(query / side), Math.floor(key / side));
  }

  /**
   * Chooses a pair and scrolls it into view.
   * @param {number} query
   * @param {number} key
   * @param {number} [since]
   */
  goTo(query, key, since) {
    const { queries, tokens } = this.selection.recordingFacts;
    const [q, k] = [
      Math.max(0, Math.min(queries - 1, query)),
      Math.max(0, Math.min(tokens - 1, key)),
    ];
    const { view } = this;
    const there = viewWith(view, q, k, this.size, this.extent);
    const same = there.x === view.x && there.y === view.y;
    if (!same && this.size.width) this.show(there); // a hidden map keeps its view
    this.selection.set({ query: q, key: k }, { since });
  }

  /**
   * Chooses the strongest pair of a bin.
   * @param {Frame} frame
   * @param {number} row
   * @param {number} column
   */
  choose(frame, row, column) {
    const side = 2 ** frame.view.level;
    const [since, isLatest] = [this.context.said(), this.selection.begins()];
    const middle = (/** @type {number} */ bin) => bin * side + Math.floor(side / 2);
    const go = (/** @type {Link | null} */ found) => {
      if (!isLatest()) return;
      const [there, at] = found ?? [middle(row), middle(column)];
      const { query, key } = this.#from(frame, there, at);
      const { queries, tokens } = this.selection.recordingFacts;
      const isThere = query !== null && key !== null && query < queries && key < tokens;
      if (isThere) this.goTo(query, key, since);
      else if (since === this.context.said())
        this.context.say(`${frameName(this.context, this.frames[0].where)} has no such pair`);
    };
    this.strongestOf(frame, row, column).then(go).catch(unlessSaid);
  }

  /**
   * [query, key, ln weight or effect] of the strongest pair of a bin at the level shown, or null.
   * @param {Frame} frame
   * @param {number} row
   * @param {number} column
   * @returns {Promise<Link | null>}
   */
  async strongestOf(frame, row, column) {
    const { level } = frame.view;
    if (level === 0) return [row, column, frame.valueAt(row, column) ?? NaN];
    const side = 2 ** level;
    /** @type {(bin: number, length: number) => string} */
    const part = (bin, length) => `${bin * side}-${Math.min((bin + 1) * side, length)}`;
    const { queries, keys } = frame.facts;
    if (row * side >= queries || column * side >= keys) return null;
    const where = { ...frame.paired, n: 1, rows: part(row, queries), columns: part(column, keys) };
    const { links } = await this.context.source.links(where);
    return links[0] ?? null;
  }

  /**
   * Outlines the bin under a frame's pointer in every frame, and reads it out.
   * @param {Frame} frame
   */
  hover(frame) {
    const before = this.hovered;
    const bin = frame.pointer && frame.paints ? frame.binAt(frame.pointer) : null;
    if (!bin && before?.frame !== frame) return;
    const { level } = frame.view;
    const value = bin ? frame.valueAt(bin.row, bin.column) : undefined;
    const hovered = bin && { ...bin, value, seen: frame.knowsSeen, frame, level };
    this.hovered = hovered;
    for (const one of this.shown) {
      const [at, texts] = [hovered && this.#hoveredIn(one, hovered), this.#axisTexts(one)];
      outline(one, at, texts);
      if (at) one.point.textContent = labelOfBin(this.context, one, at, texts ?? undefined);
    }
    if (isSameHover(before, hovered)) return;
    clearTimeout(this.resting);
    if (!hovered) return;
    frame.needSeen();
    const texts = this.#axisTexts(frame) ?? undefined;
    const words = wordsOfBin(this.context, frame, hovered.row, hovered.column, texts);
    this.context.say(words, isSameBin(before, hovered)); // painted anew below a pointer that rests
    const exact = () => this.#sayExact(hovered).catch(unlessSaid);
    const isMore = this.selection.usedUnit === "word" || frame.where.effect;
    if (level > 0 || isMore) this.resting = setTimeout(exact, EXACT_MS);
  }

  /**
   * The bin under the pointer in another frame: that of the counterpart of its first pair.
   * @param {Frame} frame
   * @param {Hovered} hovered
   * @returns {Bin | null}
   */
  #hoveredIn(frame, hovered) {
    if (frame === hovered.frame || !this.context.aligned()) return hovered;
    const side = 2 ** hovered.level;
    const [query, key] = [hovered.row * side, hovered.column * side];
    const own = this.#from(hovered.frame, query, key);
    const there = this.#in(frame, own.query, own.key);
    if (there.query === null || there.key === null) return null;
    return { row: Math.floor(there.query / side), column: Math.floor(there.key / side) };
  }

  // Fits the range of colours to the values in view.
  fitRange() {
    this.selection.set(shownRange(this.frames[0], this.selection));
  }

  /**
   * Draws soon; `cells`: whether cells changed too, not only the marks over them.
   * @param {boolean} [cells]
   */
  schedule(cells = true) {
    if (this.context.ended.aborted) return;
    this.stale ||= cells;
    this.element.dataset.idle = "false";
    if (!this.pending) this.pending = requestAnimationFrame(() => this.#frame());
  }

  end() {
    cancelAnimationFrame(this.pending);
    this.links.end();
    this.sums.end();
    for (const frame of this.frames) frame.end();
  }

  // The page's own colours, by name.
  get colours() {
    this.theme ??= themeOf(this.context.root);
    return this.theme;
  }

  /**
   * The marks over and around a frame's cells, also for an exported picture: in other colours, or
   * without what is chosen.
   * @param {Frame} frame
   * @param {Theme} [theme]
   * @param {boolean} [chosen]
   * @returns {Mark[]}
   */
  marksOf(frame, theme = this.colours, chosen = true) {
    const { selection } = this;
    const layout = layoutOf(frame);
    const rings = frame === this.frames[0] ? this.links.rings() : [];
    const texts = this.#axisTexts(frame);
    const { query, key } = this.#in(frame, selection.query, selection.key);
    const several = selection.queries ? selection.queryParts : [];
    const marked = chosen ? { query, several, key, rings } : NONE_CHOSEN;
    return [...frameMarks(layout, texts, marked, theme), ...this.sums.marks(frame, layout, theme)];
  }

  /**
   * The texts of a frame, named by tokens or by words.
   * @param {Frame} frame
   * @returns {AxisTexts | null}
   */
  #axisTexts(frame) {
    const texts = this.texts.get(frame.where.recording);
    return texts ? { ...texts, unit: this.selection.usedUnit } : null;
  }

  /**
   * A pair of the first frame as a frame has it: in the second one its counterpart.
   * @param {Frame} frame
   * @param {number | null} query
   * @param {number | null} key
   */
  #in(frame, query, key) {
    const alignment = frame === this.frames[0] ? null : this.context.aligned();
    return counterpart(alignment, "there", { query, key });
  }

  /**
   * A frame's pair in the first frame.
   * @param {Frame} frame
   * @param {number} query
   * @param {number} key
   */
  #from(frame, query, key) {
    const alignment = frame === this.frames[0] ? null : this.context.aligned();
    return counterpart(alignment, "back", { query, key });
  }

  // The chosen pair, or the middle of the view.
  #cursor() {
    const { view, size, selection } = this;
    return {
      query: selection.query ?? Math.floor(view.y + size.height / 2 / view.zoom),
      key: selection.key ?? Math.floor(view.x + size.width / 2 / view.zoom),
    };
  }

  /** @param {KeyboardEvent} event */
  #homeOrEnd(event) {
    if (event.key !== "Home" && event.key !== "End") return;
    const { query } = this.#cursor();
    const { tokens } = this.selection.recordingFacts;
    const end = event.key === "Home" ? 0 : tokens - 1;
    if (event.shiftKey) this.goTo(end, end);
    else this.goTo(query, end);
    event.preventDefault();
  }

  /** @param {Hovered} hovered */
  async #sayExact(hovered) {
    const { frame, row, column, level } = hovered;
    await this.context.texts(frame.where.recording);
    const texts = this.#axisTexts(frame) ?? undefined;
    const ofPair = frame.where.effect ? wordsOfEffect : wordsOfTokens;
    const read = level === 0 ? ofPair : exactWordsOfBin;
    const found = level === 0 ? null : await this.strongestOf(frame, row, column);
    const words = await read(this.context, frame, row, column, texts, found);
    if (isSameHover(this.hovered, hovered)) this.context.say(words, true);
  }

  /**
   * Shows the selection; `changed`: names of its fields, or null for all.
   * @param {Changed | null} changed
   */
  #follow(changed) {
    const { selection, frames } = this;
    const { where, otherWhere, compare } = selection;
    if (changed?.has("x") || changed?.has("y") || changed?.has("zoom")) this.next = null;
    frames[0].show(where, compare === "difference" ? otherWhere : null, this.context.aligned());
    this.#needAlignment();
    const beside = compare === "side" && otherWhere !== null;
    frames[1].element.hidden = !beside;
    frames[1].show(otherWhere ?? where, null, null);
    if (!beside) frames[1].tiles.end();
    for (const frame of frames) frame.title.hidden = !beside;
    frames[0].title.textContent = frameName(this.context, frames[0].where);
    frames[1].title.textContent = this.#otherTitle();
    for (const frame of this.shown) this.#needTexts(frame.where.recording);
    this.links.update();
    this.#tellRole().catch(unlessSaid);
    this.sums.show();
    this.element.classList.toggle("regard-summed", this.sums.room > 0);
    this.schedule(!changed || [...changed].some((name) => !MARKED.includes(name)));
  }

  // What the head does, once that is known; of heads that are compared what cannot be compared.
  async #tellRole() {
    const { where, compare, usedFirst: first, effect } = this.selection;
    const name = headName(where);
    const lacking = lackingText(this.context.aligned(), this.frames[0].facts.itself);
    const several = effect ? kindWords(effect) : headsWords(this.selection);
    if (this.says.dataset.of !== name || compare || effect)
      this.says.textContent = this.says.title = several || lacking;
    this.says.dataset.of = name;
    if (compare || first || several) return;
    await this.context.drawn;
    const { says } = await this.context.source.roles(where.recording);
    const { selection } = this;
    if (headName(selection.where) !== name || selection.compare) return;
    this.says.textContent = this.says.title = says[where.layer][where.head];
  }

  #otherTitle() {
    const { query, key } = this.#in(this.frames[1], this.selection.query, this.selection.key);
    const name = frameName(this.context, this.frames[1].where);
    const lacks = this.context.aligned() && (query === null || key === null);
    return lacks && this.selection.query !== null ? `${name} · the pair has no counterpart` : name;
  }

  #needAlignment() {
    if (this.context.aligned() !== undefined) return;
    const name = this.selection.other;
    const follow = () => this.selection.other === name && this.#follow(null);
    this.context.align().then(follow, unlessSaid);
  }

  /** @param {number} recording */
  #needTexts(recording) {
    if (this.texts.has(recording)) return;
    this.texts.set(recording, undefined);
    const keep = (/** @type {Texts} */ texts) => {
      this.texts.set(recording, texts);
      this.schedule(false);
    };
    const leave = () => {
      this.texts.delete(recording);
      this.schedule(false);
    };
    this.context.texts(recording).then(keep, leave);
  }

  #frame() {
    this.pending = 0;
    const { next } = this;
    if (next) {
      const whole = next.zoom <= next.fit;
      const { x, y, zoom } = whole ? { x: null, y: null, zoom: null } : next;
      this.selection.set({ x, y, zoom });
      cancelAnimationFrame(this.pending);
      this.pending = 0;
      this.next = null;
    }
    this.#draw();
  }

  #draw() {
    if (this.size.width === 0 || this.size.height === 0) {
      this.element.dataset.idle = "true"; // hidden
      for (const frame of this.frames) frame.pause();
      if (this.selection.view !== "map") this.context.isDrawn();
      return;
    }
    const { view } = this;
    for (const frame of this.shown) {
      if (frame.size.width === 0) continue;
      if (this.stale || !frame.paints) frame.paint(view, this.dark);
      const pen = penOf(frame.marks);
      const { width } = frame.marks;
      pen.setTransform(1, 0, 0, 1, 0, 0);
      pen.clearRect(0, 0, width, frame.marks.height);
      const scale = width / frame.marks.clientWidth;
      pen.setTransform(scale, 0, 0, scale, 0, 0);
      drawMarks(pen, this.marksOf(frame));
      frame.waiting.show(frame, layoutOf(frame));
    }
    this.stale = false;
    for (const frame of this.shown) if (frame.pointer) this.hover(frame);
    this.#tellProgress();
  }

  #tellProgress() {
    const parts = this.shown.map((frame) => frame.progress);
    const read = parts.reduce((least, part) => Math.min(least, part.read ?? 0), 1);
    const missing = parts.reduce((sum, part) => sum + part.missing, 0);
    const done = missing === 0 && read === 1;
    const named = [...this.texts.values()].every((texts) => texts !== undefined);
    const progress = progressText(parts, read, missing);
    const caption = captionOf(this.context, this.frames[0], progress);
    if (caption !== this.caption.textContent) {
      this.caption.textContent = this.caption.title = caption;
      this.stage.setAttribute("aria-label", `Attention map of ${caption}`);
    }
    this.element.dataset.idle = String(done && named && !this.pending);
    if (missing === 0 && read > 0) this.context.isDrawn();
    if (done) for (const frame of this.shown) frame.needSeen(); // for what the pointer finds
    Object.assign(this.element.dataset, { missing: String(missing), read: String(read) });
    const now = performance.now();
    if (!done && read > 0 && read < 1 && now - this.said > SAY_MS && !this.hovered) {
      this.said = now;
      this.context.aside(progress);
    }
    if (done) this.context.aside("");
  }
}
