// What goes wrong between the page and its source is said once, and never lost.

import { make } from "../drawing/dom.js";

/** @import { Ask } from "./source.js" */

/** @type {WeakSet<object>} */
const said = new WeakSet();

// A banner over the page: {element, show(sentence, again), hide()}.
export function makeBanner() {
  const sentence = make("span");
  const again = make("button", { type: "button", text: "Try again" });
  const close = make("button", { type: "button", text: "×", "aria-label": "Close this message" });
  const element = make(
    "div",
    { class: "regard-banner", role: "alert", hidden: true },
    sentence,
    again,
    close,
  );
  const hide = () => {
    element.hidden = true;
  };
  close.addEventListener("click", hide);
  /**
   * @param {string} text
   * @param {() => void} retry
   */
  const show = (text, retry) => {
    sentence.textContent = text;
    again.onclick = () => {
      hide();
      retry();
    };
    element.hidden = false;
  };
  return { element, show, hide };
}

/**
 * `ask`, which tells `fails` of a failure, and `works` once the same question is answered, or any
 * after the server was away.
 * @param {Ask} ask
 * @param {{fails: (sentence: string) => void, works: () => void}} tell
 * @returns {Ask}
 */
export function watched(ask, { fails, works }) {
  /** @type {{question: string, away: boolean} | null} */
  let failed = null;
  return async (path, parameters, signal) => {
    const question = JSON.stringify([path, parameters]);
    try {
      const answer = await ask(path, parameters, signal);
      if (failed !== null && (failed.away || failed.question === question)) {
        failed = null;
        works();
      }
      return answer;
    } catch (error) {
      if (!isAbort(error)) {
        failed = { question, away: error instanceof TypeError };
        if (error instanceof Error) said.add(error);
        fails(sentenceOf(error));
      }
      throw error;
    }
  };
}

/**
 * For a promise's end: lets pass only what nobody has been told.
 * @param {unknown} error
 */
export function unlessSaid(error) {
  if (!isAbort(error) && !(error instanceof Error && said.has(error))) throw error;
}

/**
 * Whether it only says that an answer is no longer needed.
 * @param {unknown} error
 */
export function isAbort(error) {
  return error instanceof Error && error.name === "AbortError";
}

/**
 * A failed fetch is a TypeError, and its words differ from browser to browser.
 * @param {unknown} error
 */
function sentenceOf(error) {
  if (error instanceof TypeError) return "The server has ended: run regard view again.";
  const words = error instanceof Error ? error.message : "";
  return words || "The source of the numbers gave no answer; try again.";
}
