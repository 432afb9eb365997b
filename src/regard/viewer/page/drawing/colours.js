// From ln(weight) to colour: tables of 1,024 entries, so that every drawing agrees.

/** @typedef {[r: number, g: number, b: number]} Colour */

/** @typedef {"linear" | "log" | "uniform"} Scale */

/**
 * What the ends of the ramp stand for: weights where it is linear, else log10 of them.
 * @typedef {{low: number, high: number, linear: boolean}} Range
 */

/**
 * What sets the range of colours; null where it was not edited.
 * @typedef {{usedScale: Scale, low: number | null, high: number | null}} Scaled
 */

/**
 * What sets the colours of signed numbers: a difference of weights, or effects, whose largest is
 * undefined while it is not known.
 * @typedef {{span: number | null, effect?: string, largestEffect?: number, usedScale?: Scale}} Signed
 */

/**
 * The number that has the last colour, and the powers of ten below it that have others: 0 where
 * colours are in proportion.
 * @typedef {{span: number, decades: number}} SignedRange
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
 * The same on dark paper: from its colour to a bright one.
 * @type {Colour[]}
 */
export const RAMP_DARK = [
  [22, 21, 29],
  [58, 28, 84],
  [110, 35, 112],
  [165, 44, 110],
  [215, 70, 92],
  [246, 120, 68],
  [253, 184, 108],
  [255, 243, 215],
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
/**
 * The same on dark paper, over its colour.
 * @type {Colour[]}
 */
export const DIVERGING_DARK = [
  [180, 214, 255],
  [106, 168, 236],
  [52, 112, 188],
  [34, 62, 108],
  [27, 26, 35],
  [108, 44, 46],
  [176, 70, 60],
  [236, 122, 96],
  [255, 204, 182],
];
/**
 * Hatching of what has no counterpart: its ground and its stripes.
 * @type {Record<"light" | "dark", [ground: Colour, stripe: Colour]>}
 */
export const HATCH = {
  light: [
    [253, 251, 246],
    [176, 172, 184],
  ],
  dark: [
    [22, 21, 29],
    [92, 90, 106],
  ],
};
export const ENTRIES = 1024;
/** @type {Record<"light" | "dark", Colour>} */
export const INVISIBLE = { light: [226, 226, 230], dark: [44, 43, 54] };
/**
 * The range that was not edited.
 * @type {Record<Scale, [low: number, high: number]>}
 */
export const RANGES = { linear: [0, 1], log: [-5, 0], uniform: [-2, 2] };
/** @type {[least: number, most: number]} of an end: no weight is near, and 10 to its power is a number */
export const ENDS = [-1e6, 300];
export const FEW_KEYS = 100; // from here on weights are small, and their scale is logarithmic
export const SPAN = 0.5;
const DECADES = 3; // of effects, on the logarithmic scale

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

const BYTES = {
  light: { ramp: sampled(RAMP), diverging: sampled(DIVERGING) },
  dark: { ramp: sampled(RAMP_DARK), diverging: sampled(DIVERGING_DARK) },
};

/**
 * @param {boolean} signed
 * @param {boolean} dark
 */
function bytesOf(signed, dark) {
  return BYTES[dark ? "dark" : "light"][signed ? "diverging" : "ramp"];
}

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
 * @param {boolean} dark
 */
export function pixelTable(signed, dark) {
  const bytes = bytesOf(signed, dark);
  return Uint32Array.from({ length: ENTRIES }, (_, i) =>
    packed(bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2]),
  );
}

/** @param {boolean} dark */
export function invisiblePixel(dark) {
  return packed(...INVISIBLE[dark ? "dark" : "light"]);
}

/**
 * @param {boolean} dark
 * @returns {[ground: number, stripe: number]}
 */
export function hatchPixels(dark) {
  const [ground, stripe] = HATCH[dark ? "dark" : "light"];
  return [packed(...ground), packed(...stripe)];
}

/** @param {number} end */
export function isEnd(end) {
  return ENDS[0] <= end && end <= ENDS[1];
}

/**
 * @param {Scaled} selection
 * @returns {Range}
 */
export function colourRange(selection) {
  const [least, most] = RANGES[selection.usedScale];
  const { low, high } = selection;
  return { low: low ?? least, high: high ?? most, linear: selection.usedScale === "linear" };
}

/**
 * The range of pictures with no colour bar beside them.
 * @param {number} keys
 * @returns {Range}
 */
export function usualRange(keys) {
  const scale = usualScale(keys);
  return colourRange({ usedScale: scale, low: null, high: null });
}

/**
 * @param {number} keys
 * @returns {Scale}
 */
export function usualScale(keys) {
  return keys < FEW_KEYS ? "linear" : "log";
}

/**
 * The range of signed numbers; by itself that of effects reaches to the largest.
 * @param {Signed} selection
 * @returns {SignedRange}
 */
export function signedRange({ span, effect, largestEffect, usedScale }) {
  const usual = effect ? roundedUp(largestEffect || 1) : SPAN;
  const decades = effect && usedScale === "log" ? DECADES : 0;
  return { span: span !== null && span > 0 ? span : usual, decades };
}

/**
 * The next number of two digits.
 * @param {number} x
 */
function roundedUp(x) {
  const unit = 10 ** (Math.floor(Math.log10(x)) - 1);
  return Number((Math.ceil(x / unit - 1e-6) * unit).toPrecision(2));
}

/**
 * The entry of a signed number; 0 has the middle one.
 * @param {number} value
 * @param {SignedRange} range
 */
export function signedEntry(value, { span, decades }) {
  if (!decades) return entryOf(value, -span, span);
  const part = Math.max(0, 1 + Math.log10(Math.abs(value) / span) / decades);
  return entryOf(Math.sign(value) * Math.min(1, part), -1, 1);
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
 * The entry of ln(weight).
 * @param {number} logWeight
 * @param {Range} range
 */
export function weightEntry(logWeight, { low, high, linear }) {
  return entryOf(linear ? Math.exp(logWeight) : logWeight / Math.LN10, low, high);
}

/**
 * The colour of ln(weight); NaN is masked.
 * @param {number} logWeight
 * @param {Range} range
 * @param {boolean} dark
 */
export function weightColour(logWeight, range, dark) {
  if (Number.isNaN(logWeight)) return INVISIBLE[dark ? "dark" : "light"];
  return colourAt(bytesOf(false, dark), weightEntry(logWeight, range));
}

/**
 * The colour of a number between −span and span.
 * @param {number} value
 * @param {SignedRange} range
 * @param {boolean} dark
 */
export function signedColour(value, range, dark) {
  return colourAt(bytesOf(true, dark), signedEntry(value, range));
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
