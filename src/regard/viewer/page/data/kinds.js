// The kinds of effects, in words.

/** @import { EffectKind } from "./source.js" */

/**
 * A kind of effect: what the ends of the colours stand for, and its sentence; `least` is empty where
 * no number is negative.
 * @typedef {{least: string, most: string, says: string}} KindWords
 */

/** @type {Record<EffectKind, KindWords>} */
export const KINDS = {
  knockout: {
    least: "falls",
    most: "rises",
    says: "Knockout: what the explained number does once the query no longer sees the key. Red: it rises; blue: it falls.",
  },
  contribution: {
    least: "lowers",
    most: "raises",
    says: "Contribution: what a pair adds to the explained number, to first order. Red: it raises it; blue: it lowers it.",
  },
  relevance: {
    least: "",
    most: "raises",
    says: "Relevance: the contributions that raise the explained number.",
  },
  gradient: {
    least: "lowers",
    most: "raises",
    says: "Gradient: what more weight on a pair does to the explained number. Red: it raises it; blue: it lowers it.",
  },
  change: {
    least: "",
    most: "moves",
    says: "Change: how far the head's output moves once the query no longer sees the key. It has no sign.",
  },
};
export const KIND_NAMES = /** @type {EffectKind[]} */ (Object.keys(KINDS));
