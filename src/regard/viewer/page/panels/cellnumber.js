// The number of a cell, with as many digits as the cell has room for: in the end rounded to 1.

import { textWidth } from "../drawing/marks.js";
import { stepText } from "../drawing/numbers.js";

const DIGITS = [4, 3, 2, 1, 0];
const SIZES = { least: 9, most: 11 }; // CSS pixels of the letters
const LETTERS = 2.7; // of which a cell shall have that many
const LEAST = { width: 20, height: 12 }; // CSS pixels of a cell that has a number

/**
 * The text and its size, or null where there is no room; null is −∞, or a masked weight.
 * @param {number | null} value
 * @param {{width: number, height: number}} cell
 * @param {boolean} isWeight
 * @returns {{text: string, size: number} | null}
 */
export function numberIn(value, { width, height }, isWeight) {
  if (width < LEAST.width || height < LEAST.height) return null;
  const size = Math.max(SIZES.least, Math.min(SIZES.most, Math.floor(width / LETTERS)));
  const texts = DIGITS.map((digits) => written(value, digits, isWeight));
  const text = texts.find((text) => textWidth(text, size) <= width - 1);
  return text === undefined ? null : { text, size };
}

/**
 * @param {number | null} value
 * @param {number} digits
 * @param {boolean} isWeight
 */
function written(value, digits, isWeight) {
  if (value === null) return isWeight ? "0" : stepText(value);
  if (isWeight && value >= 0.5 * 0.1 ** digits) return value.toFixed(digits);
  return digits && !isWeight ? stepText(value, digits) : stepText(Number(value.toFixed(digits)));
}
