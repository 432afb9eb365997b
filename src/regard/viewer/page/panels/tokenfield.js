// A text as tokens to point at, choose, and walk through by keyboard.

import { lineStep, make, modifiersOf, nextInLine, showInside } from "../drawing/dom.js";
import { RIGHT_TO_LEFT } from "../drawing/marks.js";

/** @import { Unit } from "../data/selection.js" */
/** @import { Hit, TokenText } from "../data/tokens.js" */
/** @import { Modifiers } from "../drawing/dom.js" */
/** @import { Tint } from "./line.js" */

/**
 * Actions of the pointer or the keyboard on a token.
 * @typedef {{choose: (place: number, how: Modifiers) => void, look: (place: number) => void,
 *   enter: (place: number) => void, leave: () => void}} TokenActs
 */

/** @type {{[key: string]: number | undefined}} */
const ARROW_STEPS = { ArrowLeft: -1, ArrowRight: 1 };
const SPECIAL = /^(<[^<>]+>|\[[^[\]]+\])$/; // <bos>, [CLS]

// `scroller`: what is scrolled to show a token.
export class TokenField {
  /**
   * @param {string} label
   * @param {HTMLElement} scroller
   * @param {TokenActs} does
   */
  constructor(label, scroller, does) {
    this.does = does;
    this.scroller = scroller;
    /** @type {HTMLElement[]} */
    this.nodes = [];
    /** @type {TokenText | null} */
    this.text = null;
    /** @type {HTMLElement | undefined} the token that is in the tab order */
    this.walker = undefined;
    this.element = make("div", {
      class: "regard-tokens",
      role: "listbox",
      "aria-label": label,
      dir: "auto",
    });
    this.#listen();
  }

  /**
   * Shows a text; `boundary`: the first place that a model wrote, or null.
   * @param {TokenText} text
   * @param {number | null} boundary
   */
  fill(text, boundary) {
    if (this.text === text) return;
    this.text = text;
    this.nodes = Array.from({ length: text.length }, (_, place) =>
      this.#node(text, place, boundary),
    );
    this.element.replaceChildren(...this.nodes);
    this.element.classList.toggle("regard-code", text.isCode);
  }

  /**
   * A token: the space before its word is apart, so that no tint ends a line.
   * @param {TokenText} text
   * @param {number} place
   * @param {number | null} boundary
   */
  #node(text, place, boundary) {
    const shown = text.text(place).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t") || "∅";
    const word = shown.replace(/^ +/, "");
    const space = shown.slice(0, shown.length - word.length);
    const gap = text.spaced && place > 0 ? " " : "";
    const node = make("span", { class: "regard-token", role: "option", tabIndex: -1 });
    const inner = make("span", { class: "regard-word", text: word || space });
    node.append(gap + (word ? space : ""), inner);
    if (!shown.trim()) node.setAttribute("aria-label", text.label(place, 8)); // white space has no name
    if (SPECIAL.test(word)) node.dir = "ltr"; // and the direction of the text is that of the others
    node.style.direction = directionOf(word); // of its edges; letters have their own
    node.dataset.place = String(place);
    node.classList.toggle("regard-written", boundary !== null && place >= boundary);
    node.classList.toggle("regard-boundary", boundary !== null && place === boundary);
    const [first, last] = text.span(place, "word");
    node.classList.toggle("regard-after", first < place);
    node.classList.toggle("regard-goes-on", place < last);
    return node;
  }

  /**
   * Colours each token by tint(place) → {back, ink} or null, and marks both ends of the pair: its
   * tokens, or by words all of a word; and all chosen ones of its first end.
   * @param {(place: number) => Tint | null} tint
   * @param {{chosen: number | null, isChosen: (place: number) => boolean, locked: number,
   *   unit: Unit, lacks: (place: number) => boolean}} how by tokens or by words, and which tokens
   *   have no counterpart
   */
  paint(tint, { chosen, isChosen, locked, unit, lacks }) {
    const [own, other] = [chosen, locked].map((end) =>
      end === null ? [] : range(...(this.text?.span(end, unit) ?? [end, end])),
    );
    this.nodes.forEach((node, place) => {
      const found = tint(place);
      node.classList.toggle("regard-lacking", lacks(place));
      node.classList.toggle("regard-unseen", found === null);
      node.style.setProperty("--back", found?.back ?? "transparent");
      node.style.setProperty("--on", found?.ink ?? "");
      node.classList.toggle("regard-chosen", isChosen(place) || own.includes(place));
      node.classList.toggle("regard-locked", other.includes(place));
      node.setAttribute("aria-selected", String(place === locked));
    });
    if (!this.element.contains(document.activeElement)) this.#rove(chosen ?? locked);
  }

  clear() {
    this.text = null;
    this.nodes = [];
    this.element.replaceChildren();
  }

  /**
   * Marks the hits of a search, and the current one.
   * @param {Hit[]} hits
   * @param {Hit | null} current
   */
  mark(hits, current) {
    const marked = new Set(hits.flatMap(([first, last]) => range(first, last)));
    const now = new Set(current ? range(...current) : []);
    this.nodes.forEach((node, place) => {
      node.classList.toggle("regard-hit", marked.has(place));
      node.classList.toggle("regard-hit-now", now.has(place));
    });
    if (current) this.show(current[0]);
  }

  /**
   * Shows one token alone; null shows all again.
   * @param {number | null} place
   */
  isolate(place) {
    this.element.classList.toggle("regard-isolating", place !== null);
    for (const node of this.element.querySelectorAll(".regard-isolated"))
      node.classList.remove("regard-isolated");
    if (place !== null) this.nodes[place]?.classList.add("regard-isolated");
  }

  /**
   * Scrolls a token into view; `low`: to the foot, so that what comes before it is in view.
   * @param {number} place
   * @param {boolean} [low]
   */
  show(place, low = false) {
    const node = this.nodes[place];
    if (!node) return;
    if (low) this.scroller.scrollTop = 0;
    showInside(this.scroller, node);
  }

  #listen() {
    const { element, does } = this;
    /** @type {(name: keyof HTMLElementEventMap, act: (place: number, event: Event) => void) => void} */
    const on = (name, act) =>
      element.addEventListener(name, (event) => {
        const place = placeAt(event.target);
        if (place !== undefined) act(place, event);
      });
    on("click", (place, event) =>
      does.choose(place, modifiersOf(/** @type {MouseEvent} */ (event))),
    );
    on("dblclick", (place, event) => {
      const { shift, control } = modifiersOf(/** @type {MouseEvent} */ (event));
      if (!shift && !control) does.look(place);
    });
    on("pointerover", does.enter);
    on("focusin", (place) => this.#rove(place));
    element.addEventListener("pointerleave", () => does.leave());
    element.addEventListener("keydown", (event) => this.#press(event, placeAt(event.target)));
  }

  /**
   * @param {KeyboardEvent} event
   * @param {number | undefined} place
   */
  #press(event, place) {
    if (place === undefined || event.altKey) return;
    const how = modifiersOf(event);
    const isEnter = event.key === "Enter" || event.key === " ";
    if (isEnter && how.shift) this.does.look(place);
    else if (isEnter) this.does.choose(place, how);
    else if (how.control) return;
    else if (!this.#walk(event, place)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  /**
   * @param {KeyboardEvent} event
   * @param {number} place
   */
  #walk(event, place) {
    const turn = getComputedStyle(this.element).direction === "rtl" ? -1 : 1;
    const step = turn * (ARROW_STEPS[event.key] ?? 0);
    const line = lineStep(event.key);
    const last = this.nodes.length - 1;
    let to = event.key === "Home" ? 0 : event.key === "End" ? last : undefined;
    if (step) to = Math.max(0, Math.min(last, place + step));
    if (line) to = placeAt(nextInLine(this.nodes, place, line) ?? null) ?? place;
    if (to === undefined) return false;
    this.nodes[to].focus({ preventScroll: true });
    this.show(to);
    if (event.shiftKey) this.does.choose(to, modifiersOf(event));
    else this.does.enter(to);
    return true;
  }

  /** @param {number} place */
  #rove(place) {
    if (this.walker) this.walker.tabIndex = -1;
    this.walker = this.nodes[place] ?? this.nodes[0];
    if (this.walker) this.walker.tabIndex = 0;
  }
}

/**
 * The direction of a token's letters; empty where it has none, and takes that of the text.
 * @param {string} word
 */
function directionOf(word) {
  if (RIGHT_TO_LEFT.test(word)) return "rtl";
  return /\p{L}/u.test(word) ? "ltr" : "";
}

/**
 * The place of an event's token.
 * @param {EventTarget | null} target
 */
function placeAt(target) {
  const token = target instanceof Element ? target.closest(".regard-token") : null;
  return token instanceof HTMLElement ? Number(token.dataset.place) : undefined;
}

/**
 * @param {number} first
 * @param {number} last
 */
function range(first, last) {
  return Array.from({ length: last - first + 1 }, (_, n) => first + n);
}
