// The tiles of one head that a map shows: requested from the middle outwards, again while the
// response has not read all rows, and aborted once the map has moved on.

import { isLostAt } from "./lost.js";
import { headName, TILE } from "./source.js";
import { isAbort } from "./watch.js";

/** @import { Floats, MapPlace, Source, TilePlace } from "./source.js" */

/** @typedef {readonly [from: number, to: number]} Span from a bin to the one before another */

const TILES_AT_ONCE = 6;
const TILE_AGAIN_MS = 400;
const TILE_RETRY_MS = 3000;

export class Tiles {
  /**
   * `changed()`: another tile has come.
   * @param {Source} source
   * @param {() => void} changed
   */
  constructor(source, changed) {
    this.source = source;
    this.changed = changed;
    this.head = ""; // whose tiles these are
    /** @type {(MapPlace & {plane: TilePlace["plane"]}) | null} */
    this.where = null;
    this.level = 0;
    /** @type {Map<string, {where: TilePlace, middle: number}>} by name */
    this.wanted = new Map();
    /** @type {Map<string, AbortController>} */
    this.flying = new Map();
    /** @type {Map<string, Floats>} the latest responses that have not read all rows */
    this.partial = new Map();
    /** @type {Map<string, Floats>} the exact responses among those wanted */
    this.shown = new Map();
    /** @type {Set<string>} not to be requested again before the next round */
    this.resting = new Set();
    /** @type {unknown} */
    this.error = null;
  }

  /**
   * Sets the tiles that the map shows: bins of 2^level tokens, [from, to) of each side.
   * @param {MapPlace} where
   * @param {TilePlace["plane"]} plane
   * @param {number} level
   * @param {Span} rows
   * @param {Span} columns
   */
  want(where, plane, level, rows, columns) {
    const whole = { ...where, plane };
    this.where = whole;
    this.level = level;
    const head = `${headName(where)}/${where.on}/${where.against}/${plane}`;
    if (head !== this.head) this.#clear();
    this.head = head;
    /** @type {typeof this.wanted} */
    const wanted = new Map();
    const [r0, r1, c0, c1] = [...rows, ...columns].map((bin) => bin / TILE);
    for (let row = Math.floor(r0); row < r1; row++)
      for (let column = Math.floor(c0); column < c1; column++) {
        const where = { ...whole, level, row, column };
        const middle = Math.hypot(row + 0.5 - (r0 + r1) / 2, column + 0.5 - (c0 + c1) / 2);
        wanted.set(tileName(level, row, column), { where, middle });
      }
    this.wanted = wanted;
    for (const name of this.shown.keys()) if (!wanted.has(name)) this.shown.delete(name);
    for (const [name, flight] of this.flying) if (!wanted.has(name)) flight.abort();
    this.#request();
  }

  /**
   * {values, coverage} of a tile where it is known.
   * @param {number} level
   * @param {number} row
   * @param {number} column
   * @returns {Floats | undefined}
   */
  known(level, row, column) {
    const name = tileName(level, row, column);
    const shown = this.shown.get(name);
    if (shown) return shown;
    if (!this.where) return undefined;
    const exact = this.source.knownTile({ ...this.where, level, row, column });
    if (exact && this.wanted.has(name)) this.shown.set(name, exact);
    return exact ?? this.partial.get(name);
  }

  /**
   * ln(weight) of a bin at the level shown, or undefined while it is not known.
   * @param {number} row
   * @param {number} column
   */
  valueAt(row, column) {
    return this.tileOf(row, column)?.values[placeInTile(row, column)];
  }

  /**
   * Whether the number of a bin at the level shown is known to be none, though not all is masked.
   * @param {number} row
   * @param {number} column
   */
  isLost(row, column) {
    return isLostAt(this.tileOf(row, column)?.lost ?? null, placeInTile(row, column));
  }

  /**
   * The tile of a bin at the level shown, where it is known.
   * @param {number} row
   * @param {number} column
   */
  tileOf(row, column) {
    return this.known(this.level, Math.floor(row / TILE), Math.floor(column / TILE));
  }

  // {read, missing}: the fraction of rows that the known tiles have read, null where there is
  // none, and how many tiles are missing.
  get progress() {
    /** @type {number | null} */
    let read = null;
    let missing = 0;
    for (const { where } of this.wanted.values()) {
      const answer = this.known(where.level, where.row, where.column);
      if (answer) read = Math.min(read ?? 1, answer.coverage);
      else missing++;
    }
    return { read, missing };
  }

  // Requests nothing until tiles are wanted again.
  pause() {
    this.wanted.clear();
    for (const flight of this.flying.values()) flight.abort();
    this.flying.clear();
  }

  end() {
    this.wanted.clear();
    this.#clear();
  }

  #request() {
    const open = [...this.wanted]
      .filter(([name, { where }]) => {
        if (this.flying.has(name) || this.resting.has(name)) return false;
        const answer = this.known(where.level, where.row, where.column);
        return !(answer?.coverage === 1);
      })
      .sort(([a, one], [b, other]) => {
        const later = Number(this.partial.has(a)) - Number(this.partial.has(b));
        return later || one.middle - other.middle;
      });
    for (const [name, { where }] of open) {
      if (this.flying.size >= TILES_AT_ONCE) break;
      this.#fetch(name, where);
    }
  }

  /**
   * @param {string} name
   * @param {TilePlace} where
   */
  async #fetch(name, where) {
    const flight = new AbortController();
    this.flying.set(name, flight);
    let rest = 0;
    try {
      const answer = await this.source.tile(where, flight.signal);
      if (flight.signal.aborted) return;
      this.error = null;
      if (answer.coverage < 1) {
        this.partial.set(name, answer);
        rest = TILE_AGAIN_MS;
      } else this.partial.delete(name);
      this.changed();
    } catch (error) {
      if (flight.signal.aborted) return;
      rest = TILE_AGAIN_MS;
      if (isAbort(error)) return; // the page has ended
      this.error = error;
      rest = TILE_RETRY_MS;
      this.changed();
    } finally {
      if (this.flying.get(name) === flight) this.flying.delete(name);
      if (rest) this.#rest(name, rest);
      this.#request();
    }
  }

  /**
   * @param {string} name
   * @param {number} milliseconds
   */
  #rest(name, milliseconds) {
    this.resting.add(name);
    setTimeout(() => {
      this.resting.delete(name);
      this.#request();
    }, milliseconds);
  }

  #clear() {
    for (const flight of this.flying.values()) flight.abort();
    this.flying.clear();
    this.partial.clear();
    this.shown.clear();
    this.resting.clear();
    this.error = null;
  }
}

/**
 * The index of a bin in its tile.
 * @param {number} row
 * @param {number} column
 */
export function placeInTile(row, column) {
  return (row % TILE) * TILE + (column % TILE);
}

/**
 * @param {number} level
 * @param {number} row
 * @param {number} column
 */
function tileName(level, row, column) {
  return `${level}/${row}/${column}`;
}
