// Several numbers at once, as parts `a-b`: "3-7,9-10" are 3, 4, 5, 6 and 9, in the address and in
// requests alike.

/** @import { LayerFacts } from "./source.js" */

/** @typedef {readonly [from: number, to: number]} Part from a number to the one before another */

/**
 * The parts of a text that lie below `count`, in order, none beside another.
 * @param {string} text
 * @param {number} count
 * @returns {Part[]}
 */
export function partsOf(text, count) {
  const given = text.split(",").flatMap((part) => {
    const found = /^(\d{1,16})-(\d{1,16})$/.exec(part);
    return found ? [/** @type {Part} */ ([Number(found[1]), Number(found[2])])] : [];
  });
  return joined(given.map(([from, to]) => [from, Math.min(to, count)]));
}

/** @param {readonly Part[]} parts */
export function partsText(parts) {
  return parts.map(([from, to]) => `${from}-${to}`).join();
}

/** @param {readonly Part[]} parts */
export function countIn(parts) {
  return parts.reduce((sum, [from, to]) => sum + to - from, 0);
}

/**
 * @param {readonly Part[]} parts
 * @param {number} n
 */
export function isIn(parts, n) {
  return parts.some(([from, to]) => from <= n && n < to);
}

/**
 * The parts with some numbers more, or without them where they have the first.
 * @param {readonly Part[]} parts
 * @param {Part} some
 * @returns {Part[]}
 */
export function toggledIn(parts, some) {
  if (!isIn(parts, some[0])) return joined([...parts, some]);
  /** @type {(part: Part) => Part[]} */
  const without = ([from, to]) => [
    [from, Math.min(to, some[0])],
    [Math.max(from, some[1]), to],
  ];
  return joined(parts.flatMap(without));
}

/**
 * The places of heads, from their numbers with commas between them.
 * @param {string} text
 * @param {LayerFacts} facts
 */
export function placesOfNumbers(text, { head_numbers: numbers }) {
  const wanted = new Set(text.split(",").filter(Boolean).map(Number));
  return numbers.flatMap((number, place) => (wanted.has(number) ? [place] : []));
}

/**
 * @param {readonly Part[]} parts
 * @returns {Part[]}
 */
function joined(parts) {
  /** @type {[number, number][]} */
  const found = [];
  for (const [from, to] of parts.filter(([from, to]) => from < to).sort((a, b) => a[0] - b[0])) {
    const last = found.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else found.push([from, to]);
  }
  return found;
}
