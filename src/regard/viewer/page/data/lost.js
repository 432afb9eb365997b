// Numbers that are none though their pairs are not masked: a score is NaN or infinite.

/** @typedef {Uint8Array | null} Lost 1 where a number is none; null: nowhere */

/**
 * Where numbers are none: those that are +∞, which become NaN, as masked ones are.
 * @param {Float32Array} values
 * @returns {Lost}
 */
export function takeLost(values) {
  if (!values.includes(Infinity)) return null;
  const lost = Uint8Array.from(values, (value) => Number(value === Infinity));
  for (let n = 0; n < lost.length; n++) if (lost[n]) values[n] = NaN;
  return lost;
}

/**
 * @param {Lost} lost
 * @param {number} n
 */
export function isLostAt(lost, n) {
  return lost?.[n] === 1;
}
