// The input for a text, with what is said of it, and what stands below while there is none.

import { make } from "../drawing/dom.js";

const PAUSE_MS = 200; // in the typing, after which a text is read
const LONG = 500; // characters; a longer text takes the model longer than a pause
const LONG_PAUSE_MS = 600;
const EXAMPLES = [
  "the cat saw the dog and the cat saw the bird",
  "Mary gave the roses to John, and John gave the roses to Mary.",
  "for line in lines:\n    words = line.split()\n    for word in words:",
];

/**
 * {element, fill(text), focus(), say(sentence)}; `read` gets a text after a pause, or on Enter.
 * @param {(text: string) => void} read
 */
export function makeInput(read) {
  const area = make("textarea", {
    rows: 1,
    spellcheck: false,
    autocomplete: "off",
    placeholder: "Type a text: the model reads it as you type",
    "aria-label": "Text that the model reads",
  });
  const status = make("span", { class: "regard-typing-status", role: "status" });
  const look = { class: "regard-typing", "aria-label": "Text to read" };
  const element = make("section", look, area, status);
  /** @type {number | undefined} */
  let timer;
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + 2}px`; // 2: the border
  };
  const now = () => {
    clearTimeout(timer);
    read(area.value);
  };
  area.addEventListener("input", () => {
    fit();
    clearTimeout(timer);
    timer = setTimeout(now, area.value.length > LONG ? LONG_PAUSE_MS : PAUSE_MS);
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") area.blur(); // the keys act on the map again
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    now();
  });
  const fill = (/** @type {string} */ text) => {
    clearTimeout(timer); // who fills it reads it
    area.value = text;
    fit();
  };
  const say = (/** @type {string} */ sentence) => {
    status.textContent = sentence;
  };
  return { element, fill, say, focus: () => area.focus() };
}

/**
 * What the page says while there is no text, with a few to try.
 * @param {(text: string) => void} choose
 */
export function makeEmpty(choose) {
  const examples = EXAMPLES.map((text) =>
    make("button", { type: "button", class: "regard-button", text, onclick: () => choose(text) }),
  );
  return make(
    "main",
    { class: "regard-empty" },
    make("h1", { text: "Nothing to show yet. Type a text above, or try one of these:" }),
    ...examples,
  );
}
