// The arithmetic of one cell, from the two vectors to its share of the output, in real numbers.

import { make } from "../drawing/dom.js";
import { countText, fractionText, stepText } from "../drawing/numbers.js";

/** @import { LayerFacts, Steps } from "../data/source.js" */

/** @typedef {{query: string, key: string, keys: string[]}} Names of tokens, keys of all steps */

/**
 * The name of a line, and its content.
 * @typedef {[name: string, ...parts: (Node | string)[]]} ArithmeticLine
 */

/**
 * Query i and key j of `steps`, and their places in the text; `seen`: how many keys the
 * query attends to; `dim`: the chosen column of the output, or null.
 * @typedef {{steps: Steps, i: number, j: number, names: Names,
 *   places: {query: number, key: number}, seen: number, dim: number | null,
 *   facts: LayerFacts}} Cell
 */

const TERMS = 3; // of a sum; the others are counted, where they are more than one
const DIGITS = 6; // of scores whose difference is what counts

/** @param {Cell} cell */
export function arithmeticLines(cell) {
  const { steps, i, j, names, places, facts } = cell;
  const score = steps.scores[i][j];
  /** @type {ArithmeticLine[]} */
  const lines = [
    ["score", ...scoreParts(steps, i, j, names), " = ", bold(stepText(score))],
    ["scaled", `${stepText(score)} ${scalingText(facts)} = `, bold(stepText(steps.scaled[i][j]))],
  ];
  let last = steps.scaled[i][j];
  if (steps.capped && facts.capped !== null) {
    const formula = facts.capped.replaceAll("*", "·").replaceAll("/", "÷");
    const capped = steps.capped[i][j];
    lines.push([
      "capped",
      `${formula.replaceAll("{}", stepText(last))} = `,
      bold(stepText(capped)),
    ]);
    last = capped;
  }
  if (steps.biased) {
    const biased = steps.biased[i][j];
    const bias = biased === null ? "−∞" : stepText(biased - last);
    lines.push(["biased", `${stepText(last)} + ${bias} = `, bold(stepText(biased))]);
    last = biased ?? -Infinity;
  }
  const edited = steps.edited?.[i][j];
  if (edited !== undefined && edited !== last) {
    const log = edited === null ? "−∞" : stepText(edited - last);
    const parts = [`${stepText(last)} + ${log} of the edits = `, bold(stepText(edited))];
    lines.push(["edited", ...parts]);
  }
  lines.push(["masked", maskedText(steps.masked[i][j], places)]);
  lines.push(["weight", ...weightParts(cell)]);
  if (steps.value) lines.push(["output", ...outputParts(steps, steps.value, cell)]);
  return lines;
}

/**
 * The lines as an element.
 * @param {HTMLElement} element
 * @param {ArithmeticLine[]} lines
 */
export function showArithmetic(element, lines) {
  const shown = lines.map(([name, ...parts]) =>
    make("div", { "data-line": name }, make("dt", { text: name }), make("dd", {}, ...parts)),
  );
  element.replaceChildren(...shown);
}

/** @param {number} count */
function shownTerms(count) {
  return count <= TERMS + 1 ? count : TERMS;
}

/** @param {string} text */
function bold(text) {
  return make("b", { text });
}

/**
 * @param {"query" | "key" | "value"} kind
 * @param {string} text
 */
function coloured(kind, text) {
  return make("span", { class: `regard-of-${kind}`, text });
}

/**
 * @param {Steps} steps
 * @param {number} i
 * @param {number} j
 * @param {Names} names
 */
function scoreParts(steps, i, j, names) {
  const [q, k] = [steps.query[i], steps.key[j]];
  const shown = shownTerms(q.length);
  const terms = q
    .slice(0, shown)
    .flatMap((_, d) => [
      d ? " + " : "",
      coloured("query", stepText(q[d])),
      "·",
      coloured("key", stepText(k[d])),
    ]);
  const left = q.length - shown;
  const rest = left > 0 ? ` + … (${left} more)` : "";
  const name = [coloured("query", `q[${names.query}]`), "·", coloured("key", `k[${names.key}]`)];
  return [...name, " = ", ...terms, rest];
}

/**
 * `÷ √32`, or `× 0.2` where another scale was given.
 * @param {LayerFacts} facts
 */
export function scalingText({ scale, head_size }) {
  const usual = Math.abs(scale * Math.sqrt(head_size) - 1) < 1e-6;
  return usual ? `÷ √${head_size}` : `× ${stepText(scale, 4)}`;
}

/**
 * @param {number | null} masked
 * @param {{query: number, key: number}} places
 */
function maskedText(masked, { query, key }) {
  const [i, j] = [countText(query), countText(key)];
  if (masked === null)
    return make("span", {}, bold("−∞"), `: query ${i} does not attend to key ${j}`);
  return make("span", {}, `query ${i} attends to key ${j}: kept, `, bold(stepText(masked)));
}

/** @param {Cell} cell */
function weightParts({ steps, i, j, seen, facts }) {
  const masked = steps.masked[i][j];
  const weight = steps.weights[i][j];
  if (!(weight >= 0)) return ["the scores give NaN"];
  const uniform = seen
    ? ` (uniform would be 1/${countText(seen)} = ${fractionText(1 / seen)})`
    : "";
  if (masked === null) return ["nothing is left of e^(−∞): ", bold("0")];
  const most = Math.max(...steps.masked[i].filter((score) => score !== null));
  // Powers of large scores overflow, and of very negative ones nothing is left: the row's maximum is
  // subtracted above and below.
  const off = Math.abs(most) < 30 ? 0 : most;
  const shift = off ? ` ${off > 0 ? "−" : "+"} ${stepText(Math.abs(off), DIGITS)}` : "";
  const power = Math.exp(masked - off);
  const sum = weight > 0 ? ` = ${stepText(power)} ÷ ${stepText(power / weight)}` : "";
  const shown = off ? `(${stepText(masked, DIGITS)}${shift})` : stepText(masked);
  const others = off ? `(sⱼ${shift})` : "sⱼ";
  const all = `Σⱼ e^${others}`;
  const below = facts.options.includes("sinks")
    ? `(${all} + e^${off ? `(sink${shift})` : "sink"})`
    : all;
  return [`e^${shown} ÷ ${below}${sum} = `, bold(fractionText(weight)), uniform];
}

/**
 * The terms with the largest weights; for one column of the output, its numbers.
 * @param {Steps} steps
 * @param {number[][]} values
 * @param {Cell} cell
 */
function outputParts(steps, values, { i, names, dim, seen }) {
  const weights = steps.weights[i];
  if (weights.some(Number.isNaN)) return ["the weights give NaN"];
  const order = weights.map((_, n) => n).sort((a, b) => weights[b] - weights[a]);
  const shown = order.slice(0, shownTerms(seen)).filter((n) => weights[n] > 0);
  const left = seen - shown.length; // of all keys, also those that are not among the steps
  const terms = shown.flatMap((n, rank) => {
    const value = dim === null ? `v[${names.keys[n]}]` : stepText(values[n][dim]);
    return [rank ? " + " : "", stepText(weights[n]), "·", coloured("value", value)];
  });
  const rest = left > 0 ? ` + … (${countText(left)} more)` : "";
  const name = `o[${names.query}]${dim === null ? "" : `, column ${dim}`} = `;
  const sum = dim === null ? undefined : steps.output?.[i][dim];
  const result = sum === undefined ? [] : [" = ", bold(stepText(sum))];
  return [name, ...(terms.length ? terms : ["0"]), rest, ...result];
}
