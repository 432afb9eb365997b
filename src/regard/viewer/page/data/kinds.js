// The kinds of effects, in words.

/** @import { EffectKind } from "./source.js" */

/**
 * A kind of effect: what it is, what the ends of the colours stand for in a word and in a sentence;
 * `least` is empty where no number is negative.
 * @typedef {{means: string, least: string, most: string, signs: string}} KindWords
 */

/** @type {Record<EffectKind, KindWords>} */
export const KINDS = {
  knockout: {
    means: "Knockout: the explained number when the pair is cut.",
    least: "falls",
    most: "rises",
    signs: "Red: the number rises; blue: it falls.",
  },
  contribution: {
    means: "Contribution: what the pair adds to the explained number.",
    least: "lowers",
    most: "raises",
    signs: "Red: the pair raises the number; blue: it lowers it.",
  },
  relevance: {
    means: "Relevance: what the pair adds to the explained number, where it raises it.",
    least: "",
    most: "raises",
    signs: "Red: the pair raises the number.",
  },
  gradient: {
    means: "Gradient: what more weight does to the explained number.",
    least: "falls",
    most: "rises",
    signs: "Red: the number rises; blue: it falls.",
  },
  change: {
    means: "Change: how far the head's output moves when the pair is cut.",
    least: "",
    most: "moves",
    signs: "Red: the output moves; there is no sign.",
  },
};
export const KIND_NAMES = /** @type {EffectKind[]} */ (Object.keys(KINDS));

/**
 * A kind in two sentences.
 * @param {EffectKind} kind
 */
export function kindWords(kind) {
  const { means, signs } = KINDS[kind];
  return `${means} ${signs}`;
}
