// The page with an input: what is typed is read by the model, and shown by a page of its own, which
// takes the place of the one before once it is drawn. The address has the text.

import { hashOfText, headOfHash, nameOfPlace, textOfHash } from "./data/selection.js";
import { overHttp, Source, sendText } from "./data/source.js";
import { isAbort, sentenceOf } from "./data/watch.js";
import { make } from "./drawing/dom.js";
import { start } from "./main.js";
import { makeNext } from "./panels/next.js";
import { makeEmpty, makeInput } from "./panels/typing.js";

/** @import { About, Typed } from "./data/source.js" */
/** @import { Page } from "./main.js" */

/**
 * Shows the text of the address, or the one that the page opens with.
 * @param {HTMLElement} root
 * @param {About} about
 */
export async function startTyped(root, about) {
  const page = new TypedPage(root, about);
  await page.open();
  return page.shown;
}

class TypedPage {
  /**
   * @param {HTMLElement} root
   * @param {About} about of the first text
   */
  constructor(root, about) {
    this.first = about;
    this.characters = typedOf(about).characters;
    this.text = ""; // the latest that was to be read
    this.told = ""; // the head that the page chose
    /** @type {Page | null} */
    this.shown = null;
    this.reading = new AbortController();
    this.input = makeInput((text) => this.#read(text));
    this.place = make("div", { class: "regard-readings" });
    this.root = root;
    root.classList.add("regard-typed");
    root.replaceChildren(this.input.element, this.place);
    window.addEventListener("popstate", () => {
      const text = this.#addressed();
      if (text === this.text) return;
      this.input.fill(text);
      this.#read(text);
    });
  }

  async open() {
    const text = this.#addressed();
    this.input.fill(text);
    if (text === "") this.input.focus();
    await this.#read(text);
  }

  #addressed() {
    return textOfHash(location.hash) ?? typedOf(this.first).text;
  }

  /**
   * Reads a text and shows it, unless a later one comes; says what is wrong where that fails.
   * @param {string} text
   */
  async #read(text) {
    this.reading.abort();
    this.reading = new AbortController();
    this.text = text;
    const { signal } = this.reading;
    if (!text.trim()) return this.#clear();
    this.#say("reading", "reading …");
    try {
      this.#checkLength(text);
      const isFirst = text === typedOf(this.first).text;
      const about = isFirst ? this.first : await sendText(text, signal);
      await this.#show(about, signal);
      if (!signal.aborted) this.#say("read", `read by ${about.recordings[0].model ?? "the model"}`);
    } catch (error) {
      if (signal.aborted || isAbort(error)) return;
      const sentence = sentenceOf(error)
        .trim()
        .replace(/[^.!?]$/, "$&.");
      this.#say("failed", this.shown ? `${sentence} Below is the text before.` : sentence);
    }
  }

  /** @param {string} text */
  #checkLength(text) {
    const count = [...text].length;
    if (count <= this.characters) return;
    const most = this.characters.toLocaleString("en");
    throw new Error(
      `The text has ${count.toLocaleString("en")} characters; the page reads at most ${most}.` +
        " Save it as a file, and open that with regard view FILE.",
    );
  }

  /**
   * @param {About} about
   * @param {AbortSignal} signal
   */
  async #show(about, signal) {
    const request = overHttp(typedOf(about).reading ?? "");
    const head = await this.#headFor(about, signal);
    if (signal.aborted) return;
    this.#endShown();
    this.#follow(typedOf(about).text, head);
    const stage = make("div", { class: "regard-stage regard-coming" });
    this.place.append(stage);
    const besides = typedOf(about).next ? makeNext : undefined;
    const page = await start(stage, request, { address: true, known: about, besides });
    if (page === null || this.place.lastChild !== stage) return page?.end();
    this.shown = page;
    await page.context.drawn;
    if (this.place.lastChild === stage) this.place.replaceChildren(stage);
    stage.classList.remove("regard-coming");
  }

  /**
   * The name of the head to open at: the one of the address, until another text tells more by another;
   * a head that was chosen stays, also one that is chosen meanwhile.
   * @param {About} about
   * @param {AbortSignal} signal
   */
  async #headFor(about, signal) {
    const named = this.#named();
    const isFirst = about === this.first;
    if (named && isFirst) return named;
    if (named && !this.told && typedOf(this.first).reading) {
      const told = await tellingHead(this.first);
      this.told ||= told;
    }
    if (named && named !== this.told) return this.#named();
    const told = await tellingHead(about);
    if (signal.aborted) return named;
    const now = this.#named();
    if (now !== named) return now;
    this.told = told;
    return told;
  }

  #endShown() {
    this.shown?.context.selection.settle();
    this.shown?.end();
  }

  // The head of the address, once the page that is shown has written what it held back.
  #named() {
    this.shown?.context.selection.settle();
    return headOfHash(location.hash);
  }

  /**
   * Puts a text and a head into the address, unless they are there.
   * @param {string} text
   * @param {string} head
   */
  #follow(text, head) {
    if (text === this.#addressed() && head === headOfHash(location.hash)) return;
    history.replaceState(null, "", this.#addressOf(head, text));
  }

  /**
   * @param {string} head
   * @param {string} text
   */
  #addressOf(head, text) {
    return hashOfText(location.hash, head, text === typedOf(this.first).text ? null : text);
  }

  #clear() {
    this.#endShown();
    this.shown = null;
    if (location.hash || this.#addressed())
      history.replaceState(null, "", this.#addressOf(headOfHash(location.hash), ""));
    const choose = (/** @type {string} */ text) => {
      this.input.fill(text);
      this.input.focus();
      this.#read(text);
    };
    this.place.replaceChildren(makeEmpty(choose));
    this.#say("empty", "");
  }

  /**
   * @param {"empty" | "reading" | "read" | "failed"} state
   * @param {string} sentence
   */
  #say(state, sentence) {
    this.root.dataset.state = state;
    this.input.say(sentence);
  }
}

/**
 * @param {About} about
 * @returns {Typed}
 */
function typedOf({ typed }) {
  if (!typed) throw new Error("The server takes no texts; open the address that it printed.");
  return typed;
}

/**
 * The name of the head that tells most.
 * @param {About} about
 */
async function tellingHead(about) {
  const { opens } = await new Source(overHttp(typedOf(about).reading ?? "")).roles(0);
  return nameOfPlace(about, { recording: 0, ...opens });
}
