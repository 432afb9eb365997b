// The pixels per inch of a PNG, which canvases do not write. Source: RFC 2083.

const BEFORE = 33; // bytes of the signature and of the first chunk, after which it may stand
const INCH = 0.0254; // metres

/**
 * The same picture, which says how large it is in print.
 * @param {Blob} png
 * @param {number} dpi
 */
export async function withDensity(png, dpi) {
  const bytes = await png.arrayBuffer();
  const chunk = new DataView(new ArrayBuffer(21));
  chunk.setUint32(0, 9); // bytes of what follows the name
  for (const [n, letter] of [..."pHYs"].entries()) chunk.setUint8(4 + n, letter.charCodeAt(0));
  for (const at of [8, 12]) chunk.setUint32(at, Math.round(dpi / INCH));
  chunk.setUint8(16, 1); // pixels per metre
  chunk.setUint32(17, checksum(new Uint8Array(chunk.buffer, 4, 13)));
  return new Blob([bytes.slice(0, BEFORE), chunk.buffer, bytes.slice(BEFORE)], { type: png.type });
}

/**
 * The CRC of a chunk.
 * @param {Uint8Array} bytes
 */
function checksum(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}
