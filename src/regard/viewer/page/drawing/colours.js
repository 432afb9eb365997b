// From ln(weight) to colour: tables of 1,024 entries, so that every drawing agrees.

/** @typedef {[r: number, g: number, b: number]} Colour */

/**
 * A colour range: log10 at both ends of the ramp.
 * @typedef {{low: number, high: number}} Range
 */

/**
 * The fields of the selection that set the range of colours; null where it was not edited.
 * @typedef {{scale: "weight" | "uniform", low: number | null, high: number | null}} Scaled
 */

/**
 * From paper to ink, as regard/_showing/picture.py has it.
 * @type {Colour[]}
 */
export const RAMP = [
  [255, 249, 236],
  [254, 219, 163],
  [253, 174, 97],
  [244, 109, 67],
  [213, 62, 96],
  [150, 35, 112],
  [84, 30, 108],
  [30, 28, 50],
];
/**
 * From blue (less) over white (equal) to red (more).
 * @type {Colour[]}
 */
export const DIVERGING = [
  [13, 52, 120],
  [33, 102, 172],
  [84, 151, 201],
  [166, 206, 227],
  [255, 255, 255],
  [249, 192, 163],
  [229, 127, 96],
  [186, 40, 50],
  [110, 8, 34],
];
export const ENTRIES = 1024;
/** @type {Record<"light" | "dark", Colour>} */
export const INVISIBLE = { light: [226, 226, 230], dark: [44, 43, 54] };
/**
 * log10 of the default range.
 * @type {Record<"weight" | "uniform", [low: number, high: number]>}
 */
export const RANGES = { weight: [-5, 0], uniform: [-2, 2] };
export const SPAN = 0.5;

/**
 * The stops, sampled to bytes r, g, b of each entry.
 * @param {Colour[]} stops
 */
function sampled(stops) {
  const bytes = new Uint8Array(3 * ENTRIES);
  for (let i = 0; i < ENTRIES; i++) {
    const place = (i / (ENTRIES - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    for (let c = 0; c < 3; c++) {
      const mixed = stops[low][c] + (place - low) * (stops[low + 1][c] - stops[low][c]);
      bytes[3 * i + c] = Math.round(mixed);
    }
  }
  return bytes;
}

const RAMP_BYTES = sampled(RAMP);
const DIVERGING_BYTES = sampled(DIVERGING);

/**
 * One pixel of ImageData, read as a little-endian Uint32.
 * @param {number} r
 * @param {number} g
 * @param {number} b
 */
function packed(r, g, b) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/**
 * Uint32Array(ENTRIES) of pixels.
 * @param {boolean} signed
 */
export function pixelTable(signed) {
  const bytes = signed ? DIVERGING_BYTES : RAMP_BYTES;
  return Uint32Array.from({ length: ENTRIES }, (_, i) =>
    packed(bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2]),
  );
}

/** @param {boolean} dark */
export function invisiblePixel(dark) {
  return packed(...INVISIBLE[dark ? "dark" : "light"]);
}

/**
 * {low, high}: log10 at both ends of the ramp.
 * @param {Scaled} selection
 * @returns {Range}
 */
export function colourRange(selection) {
  const [low, high] = RANGES[selection.scale];
  const range = { low: selection.low ?? low, high: selection.high ?? high };
  return range.high > range.low ? range : { low: range.low, high: range.low + 1 };
}

/**
 * The difference that has the last colour.
 * @param {{span: number | null}} selection
 */
export function colourSpan(selection) {
  return selection.span !== null && selection.span > 0 ? selection.span : SPAN;
}

/**
 * The entry of a value that is linear from `low` to `high`; weights just above 1 are the last.
 * @param {number} value
 * @param {number} low
 * @param {number} high
 */
export function entryOf(value, low, high) {
  const place = Math.floor(((value - low) / (high - low)) * (ENTRIES - 1) + 0.5);
  return Math.max(0, Math.min(ENTRIES - 1, place));
}

/**
 * The colour of ln(weight) in a range of log10; NaN is masked.
 * @param {number} logWeight
 * @param {Range} range
 * @param {boolean} dark
 */
export function weightColour(logWeight, { low, high }, dark) {
  if (Number.isNaN(logWeight)) return INVISIBLE[dark ? "dark" : "light"];
  return colourAt(RAMP_BYTES, entryOf(logWeight / Math.LN10, low, high));
}

/**
 * The colour of a number between −span and span.
 * @param {number} value
 * @param {number} span
 */
export function signedColour(value, span) {
  return colourAt(DIVERGING_BYTES, entryOf(value, -span, span));
}

/**
 * @param {Uint8Array} bytes
 * @param {number} entry
 * @returns {Colour}
 */
function colourAt(bytes, entry) {
  return [bytes[3 * entry], bytes[3 * entry + 1], bytes[3 * entry + 2]];
}

/**
 * Whether the page is dark; calls `changed` whenever that changes, until the signal `ended`.
 * @param {AbortSignal} ended
 * @param {(dark: boolean) => void} changed
 */
export function watchTheme(ended, changed) {
  const query = matchMedia("(prefers-color-scheme: dark)");
  query.addEventListener("change", () => changed(query.matches), { signal: ended });
  return query.matches;
}
