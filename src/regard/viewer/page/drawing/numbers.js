// Numbers as text.

const COUNT = new Intl.NumberFormat("en");

/**
 * 77,507
 * @param {number} n
 */
export function countText(n) {
  return COUNT.format(n);
}

/**
 * `1 query`, `5 queries`.
 * @param {number} n
 * @param {string} one
 * @param {string} [several]
 */
export function counted(n, one, several = `${one}s`) {
  return `${countText(n)} ${n === 1 ? one : several}`;
}

/**
 * A number of about 1 with four decimals; a smaller one as 3.1e−7.
 * @param {number} weight
 */
export function fractionText(weight) {
  if (weight === 0 || weight >= 0.00005) return weight === 0 ? "0" : weight.toFixed(4);
  return weight.toExponential(1).replace("-", "−");
}

/**
 * How much was read, in whole per cent: 1 % where there is any, and 100 % only where that is all.
 * @param {number} coverage from 0 to 1
 */
export function readText(coverage) {
  return `${Math.max(1, Math.floor(100 * coverage))} %`;
}

/**
 * A weight, or a difference of two, in per cent: 64.43 %, −3.10 %, 3.1e−5 %.
 * @param {number} weight
 */
export function weightText(weight) {
  const share = 100 * weight;
  const isSmall = weight !== 0 && Math.abs(share) < 0.005;
  const text = weight === 0 ? "0" : isSmall ? share.toExponential(1) : share.toFixed(2);
  return `${text.replaceAll("-", "−")} %`;
}

/**
 * `+31.00 %`.
 * @param {number} difference
 */
export function signedText(difference) {
  return (difference < 0 ? "−" : "+") + weightText(Math.abs(difference));
}

/**
 * An effect, with its sign: +0.0312, −1.2e−6, 0; NaN where it is no finite number.
 * @param {number} effect
 */
export function effectText(effect) {
  if (Number.isNaN(effect)) return "not finite";
  return (effect > 0 ? "+" : "") + stepText(effect);
}

/**
 * What is said of NaN: that the pair is masked, or, where it is not, that its weight is no number.
 * @param {boolean} isLost
 */
export function noneWords(isLost) {
  return isLost ? "not a number (NaN)" : "masked";
}

/**
 * `effect −0.183`, or what is said of NaN: infinite effects are among it.
 * @param {number} effect
 * @param {boolean} [isLost]
 */
export function effectWords(effect, isLost = false) {
  if (!Number.isNaN(effect)) return `effect ${effectText(effect)}`;
  return isLost ? "effect not a finite number" : noneWords(false);
}

/**
 * `weight 64.43 % (3.87 × uniform)`, of ln weight, where the query has `seen` unmasked keys.
 * @param {number} lnWeight
 * @param {number} seen
 * @param {boolean} [isLost] whether NaN is no number
 */
export function weightWords(lnWeight, seen, isLost = false) {
  if (Number.isNaN(lnWeight)) return noneWords(isLost);
  const weight = Math.exp(lnWeight);
  return `weight ${weightText(weight)} (${timesText(weight * seen)} × uniform)`;
}

/**
 * Three digits of any size: 3.87, 0.0012, 1.2e+5.
 * @param {number} x
 */
export function timesText(x) {
  if (x === 0) return "0";
  const far = Math.abs(x) < 0.001 || Math.abs(x) >= 1e5;
  return (far ? x.toExponential(1) : String(Number(x.toPrecision(3)))).replace(/-/g, "−");
}

/**
 * A number of a step, short: −0.24, 17.8, 1.2e−6; null is −∞.
 * @param {number | null} x
 * @param {number} [digits]
 */
export function stepText(x, digits = 3) {
  if (x === null) return "−∞";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "NaN";
  if (x === 0) return "0";
  const size = Math.abs(x);
  const far = size < 0.001 || size >= 1e6;
  const text = far ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)));
  return text.replace(/-/g, "−");
}

/**
 * The indices of the n numbers of largest size, without 0 and NaN.
 * @param {Float32Array} values
 * @param {number} n
 */
export function largestInSize(values, n) {
  const sizes = values.map(Math.abs);
  return largest(sizes, n).filter((place) => sizes[place] > 0);
}

/**
 * The indices of the n largest numbers, largest first, without NaN.
 * @param {Float32Array} values
 * @param {number} n
 */
export function largest(values, n) {
  /** @type {number[]} */
  const found = [];
  for (let place = 0; place < values.length; place++) {
    const value = values[place];
    if (!(value >= -Infinity)) continue;
    if (found.length === n && value <= values[found[n - 1]]) continue;
    let at = found.length;
    while (at > 0 && values[found[at - 1]] < value) at--;
    found.splice(at, 0, place);
    if (found.length > n) found.pop();
  }
  return found;
}

/**
 * How many are not NaN.
 * @param {Float32Array} values
 */
export function countSeen(values) {
  let seen = 0;
  for (const value of values) if (!Number.isNaN(value)) seen++;
  return seen;
}
