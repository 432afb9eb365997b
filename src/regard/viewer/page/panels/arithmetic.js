// The arithmetic of one cell, from the two vectors to its share of the output, in real numbers.

import { make } from "../drawing/dom.js";
import { countText, stepText, weightText } from "../drawing/numbers.js";

const TERMS = 4; // of a sum; the others are counted

// Lines about query i and key j of `steps`. names: {query, key, keys: […]}; seen: how many keys the
// query sees; dim: the chosen column of the output, or null; facts: the layer's.
export function arithmeticLines({ steps, i, j, names, places, seen, dim, facts }) {
  const score = steps.scores[i][j];
  const lines = [
    ["score", ...scoreParts(steps, i, j, names), " = ", bold(stepText(score))],
    ["scaled", `${stepText(score)} ${scalingText(facts)} = `, bold(stepText(steps.scaled[i][j]))],
  ];
  let last = steps.scaled[i][j];
  if (steps.capped) {
    const cap = stepText(facts.softcap);
    const capped = steps.capped[i][j];
    lines.push(["capped", `${cap} · tanh(${stepText(last)} ÷ ${cap}) = `, bold(stepText(capped))]);
    last = capped;
  }
  if (steps.biased) {
    const biased = steps.biased[i][j];
    const bias = biased === null ? "−∞" : stepText(biased - last);
    lines.push(["biased", `${stepText(last)} + ${bias} = `, bold(stepText(biased))]);
  }
  lines.push(["masked", maskedText(steps.masked[i][j], places)]);
  lines.push(["weight", ...weightParts(steps, i, j, seen)]);
  if (steps.value) lines.push(["output", ...outputParts(steps, i, names, dim, seen)]);
  return lines;
}

// The lines as an element.
export function showArithmetic(element, lines) {
  const shown = lines.map(([name, ...parts]) => [
    make("dt", { text: name }),
    make("dd", {}, ...parts),
  ]);
  element.replaceChildren(...shown.flat());
}

function bold(text) {
  return make("b", { text });
}

function coloured(kind, text) {
  return make("span", { class: `regard-of-${kind}`, text });
}

function scoreParts(steps, i, j, names) {
  const [q, k] = [steps.query[i], steps.key[j]];
  const terms = q
    .slice(0, TERMS)
    .flatMap((_, d) => [
      d ? " + " : "",
      coloured("query", stepText(q[d])),
      "·",
      coloured("key", stepText(k[d])),
    ]);
  const left = q.length - TERMS;
  const rest = left > 0 ? ` + … (${left} more)` : "";
  const name = [coloured("query", `q[${names.query}]`), "·", coloured("key", `k[${names.key}]`)];
  return [...name, " = ", ...terms, rest];
}

// `÷ √32`, or `× 0.2` where another scale was given.
export function scalingText({ scale, head_size }) {
  const usual = Math.abs(scale * Math.sqrt(head_size) - 1) < 1e-6;
  return usual ? `÷ √${head_size}` : `× ${stepText(scale, 4)}`;
}

function maskedText(masked, { query, key }) {
  const [i, j] = [countText(query), countText(key)];
  if (masked === null) return make("span", {}, bold("−∞"), `: query ${i} does not see key ${j}`);
  return make("span", {}, `query ${i} sees key ${j}: kept, `, bold(stepText(masked)));
}

function weightParts(steps, i, j, seen) {
  const masked = steps.masked[i][j];
  const weight = steps.weights[i][j];
  if (!(weight >= 0)) return ["what the scores give is no number"];
  const uniform = seen ? ` (uniform would be 1/${countText(seen)} = ${weightText(1 / seen)})` : "";
  if (masked === null) return ["nothing is left of e^(−∞): ", bold("0")];
  const most = Math.max(...steps.masked[i].filter((score) => score !== null));
  // Large scores overflow; the row's largest is taken off above and below.
  const off = most < 30 ? 0 : most;
  const shift = off ? ` − ${stepText(off)}` : "";
  const power = Math.exp(masked - off);
  const sum = weight > 0 ? ` = ${stepText(power)} ÷ ${stepText(power / weight)}` : "";
  const shown = off ? `(${stepText(masked)}${shift})` : stepText(masked);
  const others = off ? `(sⱼ${shift})` : "sⱼ";
  return [`e^${shown} ÷ Σⱼ e^${others}${sum} = `, bold(weightText(weight)), uniform];
}

// The largest shares; of one column of the output, with its numbers.
function outputParts(steps, i, names, dim, seen) {
  const weights = steps.weights[i];
  if (weights.some(Number.isNaN)) return ["what the weights give is no number"];
  const order = weights.map((_, n) => n).sort((a, b) => weights[b] - weights[a]);
  const shown = order.slice(0, TERMS).filter((n) => weights[n] > 0);
  const left = seen - shown.length; // of all keys, also those that are not among the steps
  const terms = shown.flatMap((n, rank) => {
    const value = dim === null ? `v[${names.keys[n]}]` : stepText(steps.value[n][dim]);
    return [rank ? " + " : "", stepText(weights[n]), "·", coloured("value", value)];
  });
  const rest = left > 0 ? ` + … (${left} more)` : "";
  const name = `o[${names.query}]${dim === null ? "" : `, column ${dim}`} = `;
  const result = dim === null ? [] : [" = ", bold(stepText(steps.output[i][dim]))];
  return [name, ...(terms.length ? terms : ["0"]), rest, ...result];
}
