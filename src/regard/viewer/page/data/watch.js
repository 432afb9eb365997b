// What goes wrong between the page and its source is said once, and never lost.

import { make } from "../drawing/dom.js";

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

// `ask`, which tells `fails` of a failure, and `works` once the same question is answered, or any
// after the server was away.
export function watched(ask, { fails, works }) {
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
      if (error.name !== "AbortError") {
        failed = { question, away: error instanceof TypeError };
        said.add(error);
        fails(sentenceOf(error));
      }
      throw error;
    }
  };
}

// For a promise's end: lets pass only what nobody has been told.
export function unlessSaid(error) {
  if (error?.name !== "AbortError" && !said.has(error)) throw error;
}

// A failed fetch is a TypeError, and its words differ from browser to browser.
function sentenceOf(error) {
  if (error instanceof TypeError) return "The server has ended: run regard view again.";
  return error.message || "The source of the numbers gave no answer; try again.";
}
