// Failed requests: each is shown once, and none is lost.

import { make } from "../drawing/dom.js";

/** @import { SendRequest } from "./source.js" */

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
 * Wraps `request`: calls `fails` on a failure, and `works` once the same request succeeds, or any
 * after the server was away, with whether others failed meanwhile. Once the page has ended nothing
 * is asked any more.
 * @param {SendRequest} request
 * @param {{fails: (sentence: string) => void, works: (others: boolean) => void,
 *   ended: AbortSignal}} tell
 * @returns {SendRequest}
 */
export function watched(request, { fails, works, ended }) {
  /** @type {{name: string, away: boolean} | null} */
  let failed = null;
  /** @type {Set<string>} */
  const lost = new Set();
  return async (path, parameters, signal) => {
    const name = JSON.stringify([path, parameters]);
    try {
      ended.throwIfAborted();
      const answer = await request(path, parameters, signal);
      lost.delete(name);
      if (failed !== null && (failed.away || failed.name === name)) {
        failed = null;
        const others = lost.size > 0;
        lost.clear();
        works(others);
      }
      return answer;
    } catch (error) {
      if (!isAbort(error)) {
        failed = { name, away: error instanceof TypeError };
        if (failed.away) lost.add(name);
        if (error instanceof Error) said.add(error);
        fails(sentenceOf(error));
      }
      throw error;
    }
  };
}

/**
 * For the end of a promise: throws the error again unless it was shown already.
 * @param {unknown} error
 */
export function unlessSaid(error) {
  if (!isAbort(error) && !(error instanceof Error && said.has(error))) throw error;
}

/**
 * Whether it only says that a response is no longer needed.
 * @param {unknown} error
 */
export function isAbort(error) {
  return error instanceof Error && error.name === "AbortError";
}

/**
 * A failed fetch is a TypeError, whose message differs between browsers.
 * @param {unknown} error
 */
export function sentenceOf(error) {
  if (error instanceof TypeError) return "The server has ended: run regard view again.";
  const words = error instanceof Error ? error.message : "";
  return words || "The data source did not respond; try again.";
}
