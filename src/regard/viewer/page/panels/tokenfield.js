// A text as tokens to point at, to choose, and to walk through by keyboard.

import { make, nextInLine, showInside } from "../drawing/dom.js";

const ARROW_STEPS = { ArrowLeft: -1, ArrowRight: 1 };

// `does`: {choose(place), look(place), enter(place), leave()}; `scroller`: what is scrolled to
// show a token.
export class TokenField {
  constructor(label, scroller, does) {
    this.does = does;
    this.scroller = scroller;
    this.nodes = [];
    this.text = null;
    this.element = make("div", {
      class: "regard-tokens",
      role: "listbox",
      "aria-label": label,
      dir: "auto",
    });
    this.#listen();
  }

  // Shows a text; `boundary`: the first place that a model wrote, or null.
  fill(text, boundary) {
    if (this.text === text) return;
    this.text = text;
    this.nodes = Array.from({ length: text.length }, (_, place) => this.#node(place, boundary));
    this.element.replaceChildren(...this.nodes);
  }

  // A token: the space before its word stands by itself, so that no tint ends a line.
  #node(place, boundary) {
    const shown = this.text.text(place).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t") || "∅";
    const [, space, word] = /^( *)([^]*)$/.exec(shown);
    const gap = this.text.spaced && place > 0 ? " " : "";
    const node = make("span", { class: "regard-token", role: "option", tabIndex: -1 });
    const inner = make("span", { class: "regard-word", text: word || space });
    node.append(gap + (word ? space : ""), inner);
    node.place = place;
    node.classList.toggle("regard-written", boundary !== null && place >= boundary);
    node.classList.toggle("regard-boundary", boundary !== null && place === boundary);
    return node;
  }

  // Colours each token by tint(place) → {back, ink} or null, and marks both ends of the pair.
  paint(tint, chosen, locked) {
    this.nodes.forEach((node, place) => {
      const found = tint(place);
      node.classList.toggle("regard-unseen", found === null);
      node.style.setProperty("--back", found?.back ?? "transparent");
      node.style.setProperty("--on", found?.ink ?? "");
      node.classList.toggle("regard-chosen", place === chosen);
      node.classList.toggle("regard-locked", place === locked);
      node.setAttribute("aria-selected", String(place === locked));
    });
    if (!this.element.contains(document.activeElement)) this.#rove(chosen ?? locked);
  }

  // Marks the places found by a search, and the one that is gone to.
  mark(hits, current) {
    const marked = new Set(hits.flatMap(([first, last]) => range(first, last)));
    const now = new Set(current ? range(...current) : []);
    this.nodes.forEach((node, place) => {
      node.classList.toggle("regard-hit", marked.has(place));
      node.classList.toggle("regard-hit-now", now.has(place));
    });
    if (current) this.show(current[0]);
  }

  // Shows one token alone; null shows all again.
  isolate(place) {
    this.element.classList.toggle("regard-isolating", place !== null);
    for (const node of this.element.querySelectorAll(".regard-isolated"))
      node.classList.remove("regard-isolated");
    this.nodes[place]?.classList.add("regard-isolated");
  }

  show(place) {
    if (this.nodes[place]) showInside(this.scroller, this.nodes[place]);
  }

  #listen() {
    const at = (event) => event.target.closest?.(".regard-token")?.place;
    const on = (name, act) => this.element.addEventListener(name, act);
    on("click", (event) => at(event) !== undefined && this.does.choose(at(event)));
    on("dblclick", (event) => at(event) !== undefined && this.does.look(at(event)));
    on("pointerover", (event) => at(event) !== undefined && this.does.enter(at(event)));
    on("pointerleave", () => this.does.leave());
    on("focusin", (event) => at(event) !== undefined && this.#rove(at(event)));
    on("keydown", (event) => this.#press(event, at(event)));
  }

  #press(event, place) {
    if (place === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ")
      this.does[event.shiftKey ? "look" : "choose"](place);
    else if (!this.#walk(event, place)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  #walk(event, place) {
    const step = ARROW_STEPS[event.key];
    const line = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const last = this.nodes.length - 1;
    let to = { Home: 0, End: last }[event.key];
    if (step) to = Math.max(0, Math.min(last, place + step * (event.shiftKey ? 10 : 1)));
    if (line) to = nextInLine(this.nodes, place, line)?.place ?? place;
    if (to === undefined) return false;
    this.nodes[to].focus({ preventScroll: true });
    this.show(to);
    this.does.enter(to);
    return true;
  }

  #rove(place) {
    if (this.walker) this.walker.tabIndex = -1;
    this.walker = this.nodes[place] ?? this.nodes[0];
    if (this.walker) this.walker.tabIndex = 0;
  }
}

function range(first, last) {
  return Array.from({ length: last - first + 1 }, (_, n) => first + n);
}
