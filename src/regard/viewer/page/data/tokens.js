// Tokens as people read them, and phrases found in them.

/** @import { About, Source } from "./source.js" */

/** @import { Unit } from "./selection.js" */

/** @typedef {[first: number, last: number]} Hit the places of a phrase that was found */

/**
 * The texts of a recording. Query i is the token offset + i of `keys`; offset is null where the
 * queries have a text of their own.
 * @typedef {{keys: TokenText, queries: TokenText, offset: number | null}} Texts
 */

// Byte-level vocabularies write a space as Ġ, a line's end as Ċ and a tab as ĉ; others write ▁.
/** @type {Record<string, string>} */
const SPELLED = { Ġ: " ", "▁": " ", Ċ: "\n", ĉ: "\t" };
// Characters that hide, or turn the order of letters around, are written out: ␀, ⟨202E⟩.
const CONTROLS = "\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\ufff9-\\ufffb\\ufffe\\uffff";
const MARKS = "\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff";
const UNSEEN = new RegExp(`[${CONTROLS}${MARKS}]`, "g");
const BYTES = /(?:\\x[0-9a-f]{2})+/g; // of characters that tokens have parts of
const LONGEST = 400; // characters of one token that are shown

/**
 * The token's text with its spaces, and without hidden characters.
 * @param {string} text
 */
export function cleanToken(text) {
  const cut = text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text;
  return cut.replace(/[Ġ▁Ċĉ]/g, (mark) => SPELLED[mark]).replace(UNSEEN, written);
}

/** @param {string} character */
function written(character) {
  const code = character.codePointAt(0) ?? 0;
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  return `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/**
 * A label: the token in a few letters, on one line and never empty.
 * @param {string} text
 * @param {number} [most]
 */
export function tokenLabel(text, most = 14) {
  const clean = cleanToken(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  const letters = [...(clean.trim() || clean.replace(/\s/g, "␣") || "∅")];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : letters.join("");
}

/**
 * The tokens so that they are the text when they are joined: where several have the bytes of a
 * character, as `\xc3` and `\xa9`, the last has all of it.
 * @param {string[]} tokens
 */
function spelled(tokens) {
  const whole = tokens.join("");
  if (!whole.includes("\\x")) return tokens;
  let done = 0;
  const starts = tokens.map((token) => {
    done += token.length;
    return done - token.length;
  });
  const found = tokens.map(() => "");
  const spread = (/** @type {number} */ stop) => {
    while (done < stop) {
      const n = tokenAt(starts, done);
      const end = Math.min(stop, starts[n + 1] ?? stop);
      found[n] += whole.slice(done, end);
      done = end;
    }
  };
  done = 0;
  for (const { 0: run, index } of whole.matchAll(BYTES)) {
    const inner = [];
    for (let n = tokenAt(starts, index) + 1; starts[n] < index + run.length; n++)
      inner.push(starts[n] - index);
    const characters = inner.length && inner.every((n) => n % 4 === 0) ? decoded(run) : null;
    if (characters === null) continue; // written so in the text
    spread(index);
    for (const character of characters) {
      done += 4 * new TextEncoder().encode(character).length;
      found[tokenAt(starts, done - 1)] += character;
    }
  }
  spread(whole.length);
  return found;
}

/**
 * The characters of bytes that are written as `\xc3\xa9`; null where they are none.
 * @param {string} run
 */
function decoded(run) {
  const bytes = run
    .slice(2)
    .split("\\x")
    .map((byte) => Number.parseInt(byte, 16));
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

// A text as its tokens.
export class TokenText {
  /**
   * `starts`: the first token of each word, where some have several.
   * @param {string[]} tokens
   * @param {number[] | null} [starts]
   */
  constructor(tokens, starts = null) {
    this.raw = tokens;
    this.starts = starts;
    /** @type {(string | undefined)[]} */
    this.clean = [];
    /** @type {{text: string, starts: Int32Array} | null} what phrases are looked for in */
    this.searched = null;
    // Tokens without any space come from a tokenizer that drops spaces.
    const some = tokens.slice(0, 2000);
    this.spaced = some.length > 1 && !some.some((text) => /\s/.test(cleanToken(text)));
    this.isCode = isCode(some.map(cleanToken).join(""));
  }

  get length() {
    return this.raw.length;
  }

  /**
   * A token in the running text.
   * @param {number} position
   */
  text(position) {
    const clean = this.clean[position] ?? cleanToken(this.raw[position]);
    this.clean[position] = clean;
    return clean;
  }

  /**
   * The first and the last token of the one at a position, or of its word.
   * @param {number} position
   * @param {Unit} unit
   * @returns {Hit}
   */
  span(position, unit) {
    const { starts } = this;
    if (!starts || unit === "token") return [position, position];
    const word = tokenAt(starts, position);
    return [starts[word], (starts[word + 1] ?? this.length) - 1];
  }

  /**
   * The position that the one at a position is known by: its own, or where its word begins.
   * @param {number} position
   * @param {Unit} [unit]
   */
  first(position, unit = "token") {
    return this.span(position, unit)[0];
  }

  /**
   * The position some tokens further, or the first of some words further; `by` is how many.
   * @param {number} position
   * @param {number} by
   * @param {Unit} unit
   */
  moved(position, by, unit) {
    const { starts } = this;
    if (!starts || unit === "token" || by === 0) return position + by;
    const word = tokenAt(starts, position) + by;
    return starts[Math.max(0, Math.min(word, starts.length - 1))];
  }

  /**
   * Whether no token of its word comes before it.
   * @param {number} position
   * @param {Unit} unit
   */
  isFirst(position, unit) {
    return this.first(position, unit) === position;
  }

  /**
   * @param {number} position
   * @param {number} [most]
   * @param {Unit} [unit]
   */
  label(position, most, unit = "token") {
    const [first, last] = this.span(position, unit);
    const pieces = spelled(this.raw.slice(first, last + 1));
    const joined = pieces.map((piece, n) => (n ? piece.replace(/^##/, "") : piece)).join("");
    return tokenLabel(last > first ? joined.replaceAll("</w>", "") : joined, most);
  }

  /**
   * The places of a phrase, upper or lower case, across tokens: [[first, last], …].
   * @param {string} phrase
   */
  find(phrase) {
    const sought = phrase.toLowerCase();
    if (!sought) return [];
    const { text, starts } = this.#searched();
    /** @type {Hit[]} */
    const hits = [];
    for (let at = text.indexOf(sought); at >= 0; at = text.indexOf(sought, at + 1)) {
      const first = tokenAt(starts, at);
      if (hits.at(-1)?.[0] === first) continue;
      hits.push([first, tokenAt(starts, at + sought.length - 1)]);
    }
    return hits;
  }

  #searched() {
    if (this.searched) return this.searched;
    const starts = new Int32Array(this.length);
    const parts = [];
    const whole = spelled(this.raw);
    let length = 0;
    for (let n = 0; n < this.length; n++) {
      starts[n] = length;
      const text = whole === this.raw ? this.text(n) : cleanToken(whole[n]);
      parts.push(text.toLowerCase() + (this.spaced ? " " : ""));
      length += parts[n].length;
    }
    this.searched = { text: parts.join(""), starts };
    return this.searched;
  }
}

/**
 * Whether many lines of a text are indented, or end as lines of programs do.
 * @param {string} text
 */
function isCode(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  const like = lines.filter((line) => /^(\t| {2,})\S|[({[:;,]\s*$/.test(line));
  return lines.length >= 3 && like.length >= 0.4 * lines.length;
}

/**
 * The last token that starts at or before a place in the text.
 * @param {ArrayLike<number>} starts
 * @param {number} place
 */
function tokenAt(starts, place) {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

/**
 * The texts of recordings, each read once: texts(recording).
 * @param {Source} source
 * @param {About} about
 */
export function makeTexts(source, about) {
  /** @type {(recording: number) => Promise<Texts>} */
  const read = async (recording) => {
    const { itself, start, queries, tokens, words } = about.recordings[recording];
    const starts = words < tokens ? await source.words(recording) : null;
    const keys = new TokenText(await source.tokens(recording, "key"), starts?.key);
    if (!itself) {
      const own = new TokenText(await source.tokens(recording, "query"), starts?.query);
      return { keys, queries: own, offset: null };
    }
    const part = keys.raw.slice(start, start + queries);
    const whole = start === 0 && part.length === keys.length;
    return { keys, queries: whole ? keys : new TokenText(part, starts?.query), offset: start };
  };
  /** @type {Map<number, Promise<Texts>>} */
  const known = new Map();
  return async (/** @type {number} */ recording) => {
    const texts = known.get(recording) ?? read(recording);
    known.set(recording, texts);
    try {
      return await texts;
    } catch (error) {
      known.delete(recording);
      throw error;
    }
  };
}
