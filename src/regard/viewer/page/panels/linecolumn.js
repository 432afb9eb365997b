// One of the two columns of Lines: tokens to point at, choose, and walk through by keyboard.

import { make, modifiersOf, showInside } from "../drawing/dom.js";
import { countText } from "../drawing/numbers.js";

/** @import { Unit } from "../data/selection.js" */
/** @import { TokenText } from "../data/tokens.js" */
/** @import { Modifiers } from "../drawing/dom.js" */

/** @typedef {{colour: string, text: string}} Share of a weight, in a head's colour */

/**
 * Actions on a token; `cross`: the focus goes over to the other column.
 * @typedef {{choose: (place: number, how: Modifiers) => void, enter: (place: number) => void,
 *   leave: () => void, cross: (place: number) => void}} ColumnActs
 */

/** @type {{[key: string]: number | undefined}} */
const STEPS_DOWN = { ArrowUp: -1, ArrowDown: 1 };

export class TokenColumn {
  /**
   * @param {"query" | "key"} side
   * @param {HTMLElement} scroller
   * @param {ColumnActs} does
   */
  constructor(side, scroller, does) {
    this.side = side;
    this.scroller = scroller;
    this.does = does;
    /** @type {HTMLElement[]} */
    this.nodes = [];
    /** @type {number[]} of the tokens, or where the words start */
    this.places = [];
    this.element = make("div", {
      class: `regard-lines-${side}`,
      role: "listbox",
      "aria-label": side === "query" ? "Queries" : "Keys",
      "aria-multiselectable": side === "query" ? "true" : null,
    });
    this.#listen();
  }

  /**
   * Shows some tokens, or words; `offset` is the position of the first token of the text.
   * @param {TokenText} text
   * @param {number[]} places
   * @param {Unit} unit
   * @param {number} offset
   */
  fill(text, places, unit, offset) {
    this.places = places;
    this.nodes = places.map((place) => {
      const parts = [
        make("span", { class: "regard-lines-shares" }),
        make("span", { class: "regard-lines-place", text: countText(offset + place) }),
        make("span", {
          class: "regard-lines-word",
          text: text.label(place, 16, unit),
          dir: "auto",
        }),
      ];
      if (this.side === "key") parts.reverse();
      const node = make("div", { class: "regard-lines-token", role: "option", tabIndex: -1 });
      node.append(...parts);
      return node;
    });
    this.element.replaceChildren(...this.nodes);
  }

  /**
   * @param {(place: number) => boolean} isChosen
   * @param {number | null} chosen where the focus comes in
   */
  mark(isChosen, chosen) {
    this.nodes.forEach((node, n) => {
      node.setAttribute("aria-selected", String(isChosen(this.places[n])));
    });
    if (!this.element.contains(document.activeElement)) this.#rove(this.#at(chosen ?? 0));
  }

  /**
   * Writes shares beside the tokens, and outlines the token that they belong to.
   * @param {(place: number) => Share[]} sharesAt
   * @param {number | null} own
   */
  showShares(sharesAt, own) {
    this.nodes.forEach((node, n) => {
      node.classList.toggle("regard-lines-own", this.places[n] === own);
      const shares = sharesAt(this.places[n]).map(({ colour, text }) => {
        const mark = make("i", { "aria-hidden": "true" });
        mark.style.background = colour;
        return make("span", {}, mark, text);
      });
      node.querySelector(".regard-lines-shares")?.replaceChildren(...shares);
    });
  }

  /** @param {number} place */
  focus(place) {
    this.nodes[this.#at(place)]?.focus({ preventScroll: true });
    this.show(place);
  }

  /**
   * Scrolls a token into view.
   * @param {number} place
   */
  show(place) {
    const node = this.nodes[this.#at(place)];
    if (node) showInside(this.scroller, node);
  }

  /**
   * The index of the token, or word, that has a place, or of the first.
   * @param {number} place
   */
  #at(place) {
    return Math.max(
      0,
      this.places.findLastIndex((start) => start <= place),
    );
  }

  #listen() {
    const { element, does } = this;
    element.addEventListener("click", (event) => {
      const place = this.#placeAt(event.target);
      if (place !== undefined) does.choose(place, modifiersOf(event));
    });
    /** @type {(name: "pointerover" | "focusin") => void} */
    const entered = (name) =>
      element.addEventListener(name, (event) => {
        const place = this.#placeAt(event.target);
        if (place === undefined) return;
        if (name === "focusin") this.#rove(this.#at(place));
        does.enter(place);
      });
    entered("pointerover");
    entered("focusin");
    element.addEventListener("pointerleave", () => does.leave());
    element.addEventListener("focusout", () => does.leave());
    element.addEventListener("keydown", (event) => this.#press(event));
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const place = this.#placeAt(event.target);
    if (place === undefined || event.altKey || event.metaKey) return;
    const at = this.#at(place);
    /** @type {{[key: string]: number | undefined}} */
    const ends = { Home: 0, End: this.places.length - 1 };
    const step = STEPS_DOWN[event.key];
    const to = step ? this.places[at + step] : this.places[ends[event.key] ?? -1];
    const isAcross = event.key === (this.side === "query" ? "ArrowRight" : "ArrowLeft");
    if (to !== undefined) this.focus(to);
    else if (isAcross) this.does.cross(place);
    else if (event.key === "Enter" || event.key === " ")
      this.does.choose(place, modifiersOf(event));
    else return;
    if (to !== undefined && event.shiftKey && this.side === "query")
      this.does.choose(to, modifiersOf(event));
    event.preventDefault();
  }

  /** @param {number} n */
  #rove(n) {
    this.nodes.forEach((node, at) => {
      node.tabIndex = at === n ? 0 : -1;
    });
  }

  /** @param {EventTarget | null} target */
  #placeAt(target) {
    const node = target instanceof Element ? target.closest(".regard-lines-token") : null;
    const n = node instanceof HTMLElement ? this.nodes.indexOf(node) : -1;
    return this.places[n];
  }
}
