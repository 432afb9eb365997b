// Arrays as an exported file holds them: base64 of deflated bytes, the first byte of every number
// first, then every second one, and so on, which deflates a fifth better.

/** @import { Numbers } from "./attention.js" */

/** @typedef {"float16" | "bfloat16" | "float32" | "float64" | "int32" | "bool"} Dtype */

/** @typedef {Uint8Array<ArrayBuffer>} Bytes */

/** @type {Record<Dtype, (bytes: Bytes) => Numbers>} */
const ARRAYS = {
  float16: fromHalves,
  bfloat16: fromBrains,
  float32: (bytes) => new Float32Array(bytes.buffer),
  float64: (bytes) => new Float64Array(bytes.buffer),
  int32: (bytes) => new Int32Array(bytes.buffer),
  bool: (bytes) => bytes,
};
/** @type {Record<Dtype, number>} */
const WIDTHS = { float16: 2, bfloat16: 2, float32: 4, float64: 8, int32: 4, bool: 1 };

/**
 * The numbers of an array; those of 16 bits as float32.
 * @param {string} text
 * @param {Dtype} dtype
 */
export async function unpackedArray(text, dtype) {
  if (typeof DecompressionStream === "undefined")
    throw new Error("This browser is too old to unpack the numbers in this file; use a newer one.");
  try {
    return ARRAYS[dtype](joinedPlanes(await inflated(fromBase64(text)), WIDTHS[dtype]));
  } catch (error) {
    const words = error instanceof Error ? error.message : String(error);
    throw new Error(`The numbers in this file are damaged (${words}); export it again.`);
  }
}

/** @param {Bytes} bytes */
async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** @param {string} text */
function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let n = 0; n < bytes.length; n++) bytes[n] = binary.charCodeAt(n);
  return bytes;
}

/**
 * @param {Bytes} planes
 * @param {number} width
 */
function joinedPlanes(planes, width) {
  if (width === 1) return planes;
  const bytes = new Uint8Array(planes.length);
  const count = planes.length / width;
  for (let plane = 0; plane < width; plane++)
    for (let n = 0; n < count; n++) bytes[n * width + plane] = planes[plane * count + n];
  return bytes;
}

/** @param {Bytes} bytes */
function fromHalves(bytes) {
  return Float32Array.from(new Uint16Array(bytes.buffer), (bits) => {
    const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
    const sign = bits >> 15 ? -1 : 1;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  });
}

/** @param {Bytes} bytes */
function fromBrains(bytes) {
  const halves = new Uint16Array(bytes.buffer);
  const wide = new Uint32Array(halves.length);
  for (let n = 0; n < halves.length; n++) wide[n] = halves[n] << 16;
  return new Float32Array(wide.buffer);
}
