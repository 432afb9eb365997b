// Colours of heads that are drawn over one another: any two differ for every kind of colour
// blindness, and each from the paper by 3 to 1.

/** @typedef {[r: number, g: number, b: number]} Colour */

/** @type {Record<"light" | "dark", Colour[]>} */
export const HEAD_COLOURS = {
  light: [
    [0, 0, 255],
    [240, 105, 15],
    [120, 0, 15],
    [105, 135, 255],
    [135, 75, 165],
    [180, 45, 0],
    [165, 135, 150],
    [75, 45, 105],
  ],
  dark: [
    [135, 150, 255],
    [225, 135, 30],
    [90, 255, 0],
    [255, 255, 255],
    [195, 45, 15],
    [0, 120, 135],
    [150, 0, 240],
    [210, 195, 195],
  ],
};
export const MOST_HEADS = HEAD_COLOURS.light.length;

/**
 * The entry of each head: that of its place, or the next that none before it has.
 * @param {number[]} places at most MOST_HEADS
 */
export function entriesOf(places) {
  /** @type {Set<number>} */
  const taken = new Set();
  return places.map((place) => {
    let entry = place % MOST_HEADS;
    while (taken.has(entry)) entry = (entry + 1) % MOST_HEADS;
    taken.add(entry);
    return entry;
  });
}
