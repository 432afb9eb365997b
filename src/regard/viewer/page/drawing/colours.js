// From ln(weight) to colour: tables of 1,024 entries, so that every drawing agrees.

// From paper to ink, as regard/_picture.py has it.
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
// From blue (less) over white (equal) to red (more).
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
export const INVISIBLE = { light: [226, 226, 230], dark: [44, 43, 54] };
// log10 where nobody edited the range.
export const RANGES = { weight: [-5, 0], uniform: [-2, 2] };
export const SPAN = 0.5;

// The stops, sampled to bytes r, g, b of each entry.
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

// One pixel of ImageData, read as a little-endian Uint32.
function packed(r, g, b) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

// Uint32Array(ENTRIES) of pixels.
export function pixelTable(signed) {
  const bytes = signed ? DIVERGING_BYTES : RAMP_BYTES;
  return Uint32Array.from({ length: ENTRIES }, (_, i) =>
    packed(bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2]),
  );
}

export function invisiblePixel(dark) {
  return packed(...INVISIBLE[dark ? "dark" : "light"]);
}

// {low, high}: log10 at both ends of the ramp.
export function colourRange(selection) {
  const [low, high] = RANGES[selection.scale];
  const range = { low: selection.low ?? low, high: selection.high ?? high };
  return range.high > range.low ? range : { low: range.low, high: range.low + 1 };
}

// How far a difference goes before its colour is the last one.
export function colourSpan(selection) {
  return selection.span > 0 ? selection.span : SPAN;
}

// The entry of a value that is linear from `low` to `high`; weights just above 1 are the last.
export function entryOf(value, low, high) {
  const place = Math.floor(((value - low) / (high - low)) * (ENTRIES - 1) + 0.5);
  return Math.max(0, Math.min(ENTRIES - 1, place));
}

// "rgb(…)" of ln(weight) in a range of log10; NaN is invisible.
export function weightColour(logWeight, { low, high }, dark) {
  const at = 3 * entryOf(logWeight / Math.LN10, low, high);
  const bytes = Number.isNaN(logWeight)
    ? INVISIBLE[dark ? "dark" : "light"]
    : RAMP_BYTES.subarray(at, at + 3);
  return `rgb(${bytes.join(" ")})`;
}

// "rgb(…)" of a number between −span and span.
export function signedColour(value, span) {
  const at = 3 * entryOf(value, -span, span);
  return `rgb(${DIVERGING_BYTES.subarray(at, at + 3).join(" ")})`;
}

// Whether the page is dark, and a call whenever that changes, until the signal `ended`.
export function watchTheme(ended, changed) {
  const query = matchMedia("(prefers-color-scheme: dark)");
  query.addEventListener("change", () => changed(query.matches), { signal: ended });
  return query.matches;
}
