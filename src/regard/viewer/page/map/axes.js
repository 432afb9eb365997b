// The marks around and over the cells: positions and tokens, the matrix's edge, the boundary
// between read and written text, and the chosen pair.

import { fitted, isolated, textWidth } from "../drawing/marks.js";
import { countText } from "../drawing/numbers.js";
import { GUTTER } from "./frame.js";
import { positionOf } from "./layout.js";

/** @import { Mark } from "../drawing/marks.js" */
/** @import { Part } from "../data/several.js" */
/** @import { Link } from "../data/source.js" */
/** @import { Unit } from "../data/selection.js" */
/** @import { TokenText } from "../data/tokens.js" */
/** @import { Ends, Layout } from "./layout.js" */

/** @typedef {Record<"paper" | "ink" | "soft" | "line" | "accent" | "focus" | "bar", string>} Theme */

/** @typedef {{keys: TokenText, queries: TokenText, unit: Unit}} AxisTexts */

/** @type {Theme} of a picture on white paper */
export const PRINTED = {
  paper: "#ffffff",
  ink: "#1e1c32",
  soft: "#5d596b",
  line: "#c9c7d0",
  accent: "#a8123a",
  focus: "#1458b8",
  bar: "#7a2a70",
};

const NAMED_CELL = 11; // CSS pixels a token from which every token is named
const RULED_CELL = 14; // and from which cells are ruled
const TICK_ROOM = { x: 64, y: 40 }; // CSS pixels between two positions, at least
const SMALL_TEXT = 10;
/** @type {[cell: number, size: number][]} letters of the names, by the size of cells */
const NAMES = [
  [24, 13],
  [13, 11],
  [0, SMALL_TEXT],
];

/**
 * The page's own colours, by name.
 * @param {HTMLElement} root
 * @returns {Theme}
 */
export function themeOf(root) {
  const style = getComputedStyle(root);
  const colour = (/** @type {keyof Theme} */ name) => style.getPropertyValue(`--${name}`).trim();
  return {
    paper: colour("paper"),
    ink: colour("ink"),
    soft: colour("soft"),
    line: colour("line"),
    accent: colour("accent"),
    focus: colour("focus"),
    bar: colour("bar"),
  };
}

/**
 * All marks of a frame; `texts` is null while they are not known.
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {{query: number | null, several: Part[], key: number | null, rings: Link[]}} chosen
 * @param {Theme} theme
 * @returns {Mark[]}
 */
export function frameMarks(layout, texts, { query, several, key, rings }, theme) {
  /** @type {{queries: Ends[], keys: Ends[]}} */
  const clear = { queries: [], keys: [] };
  const chosen = chosenMarks(layout, texts, query, key, theme, clear);
  const isChosen = (/** @type {Ends} */ span) =>
    isIn(query, span) || several.some(([from, to]) => from <= span[1] && span[0] < to);
  return [
    ...gridMarks(layout, texts, theme),
    ...edgeMarks(layout, theme),
    ...wordMarks(layout, texts, theme),
    ...keyMarks(layout, texts, key, theme, clear.keys),
    ...queryMarks(layout, texts, isChosen, theme, clear.queries),
    ...several.flatMap((part) => severalMarks(layout, part, theme)),
    ...titleMarks(layout, theme),
    ...boundaryMarks(layout, theme),
    ...rings.flatMap(([q, k]) => ringMarks(layout, texts, q, k, theme)),
    ...chosen,
  ];
}

/**
 * The tokens of the word at a place, or the token there.
 * @param {AxisTexts | null} texts
 * @param {"keys" | "queries"} side
 * @param {number} place
 * @returns {Ends}
 */
export function spanOf(texts, side, place) {
  return texts && place < texts[side].length ? texts[side].span(place, texts.unit) : [place, place];
}

/**
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function gridMarks(layout, texts, theme) {
  if (layout.cell < RULED_CELL) return [];
  const { left, top, right, bottom } = layout;
  const look = /** @type {const} */ ({ kind: "line", colour: theme.paper, alpha: 0.75 });
  /** @type {Mark[]} */
  const marks = [];
  for (let k = layout.keys[0] + 1; k <= layout.keys[1]; k++) {
    const x = layout.xOf(k);
    if (x > left && spanOf(texts, "keys", k)[0] === k)
      marks.push({ ...look, x1: x, x2: x, y1: top, y2: bottom });
  }
  for (let q = layout.queries[0] + 1; q <= layout.queries[1]; q++) {
    const y = layout.yOf(q);
    if (y > top && spanOf(texts, "queries", q)[0] === q)
      marks.push({ ...look, x1: left, x2: right, y1: y, y2: y });
  }
  return marks;
}

/**
 * @param {Layout} layout
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function edgeMarks({ left, top, right, bottom }, { line }) {
  const box = { x: left - 0.5, y: top - 0.5, width: right - left + 1, height: bottom - top + 1 };
  return [{ kind: "box", ...box, line }];
}

/**
 * Lines beside the tokens of one word, where each token is named: " our" is no "our".
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function wordMarks(layout, texts, { soft }) {
  if (!texts || texts.unit === "word" || layout.cell < NAMED_CELL) return [];
  const { left, top, right, bottom, keys, queries } = layout;
  const look = /** @type {const} */ ({ kind: "line", colour: soft, width: 1.5 });
  const words = { ...texts, unit: /** @type {const} */ ("word") };
  /** @type {Mark[]} */
  const across = joined(keys, words, "keys").map(([from, to]) => {
    const [x1, x2] = [Math.max(left, layout.xOf(from) + 2), Math.min(right, layout.xOf(to) - 2)];
    return { ...look, x1, x2, y1: top - 3, y2: top - 3 };
  });
  /** @type {Mark[]} */
  const down = joined(queries, words, "queries").map(([from, to]) => {
    const [y1, y2] = [Math.max(top, layout.yOf(from) + 2), Math.min(bottom, layout.yOf(to) - 2)];
    return { ...look, x1: left - 3, x2: left - 3, y1, y2 };
  });
  return [...across, ...down];
}

/**
 * The words of several tokens in view: from the first to the one after the last.
 * @param {Ends} shown
 * @param {AxisTexts} words
 * @param {"keys" | "queries"} side
 * @returns {Ends[]}
 */
function joined(shown, words, side) {
  const spans = spansIn(shown, words, side).filter(([from, to]) => from < to);
  return spans.map(([from, to]) => [from, to + 1]);
}

/**
 * @param {Layout} layout
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function titleMarks({ facts }, { soft }) {
  const look = /** @type {const} */ ({ kind: "text", align: "end", colour: soft });
  const place = { size: SMALL_TEXT, x: GUTTER.left - 10 };
  return [
    { ...look, ...place, y: GUTTER.top - 22, text: "key →" },
    { ...look, ...place, y: GUTTER.top - 8, text: facts.itself ? "query ↓" : "query (own text) ↓" },
  ];
}

/**
 * Multiples of 1, 2 or 5 times a power of ten, at least `least` pixels apart.
 * @param {number} cell
 * @param {number} least
 */
export function niceStep(cell, least) {
  const needed = Math.max(1, least / cell);
  const power = 10 ** Math.floor(Math.log10(needed));
  return [1, 2, 5].map((n) => n * power).find((step) => step >= needed * 0.999) ?? 10 * power;
}

/**
 * @param {Ends} ends
 * @param {number} step
 * @param {number} offset
 */
function ticksIn([from, to], step, offset) {
  const first = Math.ceil((from + offset) / step) * step - offset;
  const found = [];
  for (let token = first; token <= to; token += step) found.push(token);
  return found;
}

/**
 * @param {Ends[]} taken
 * @param {number} at
 * @param {number} room
 */
function isFree(taken, at, room) {
  return taken.every(([from, to]) => at + room < from || at - room > to);
}

/**
 * The words of an axis that are in view, as their tokens there.
 * @param {Ends} shown
 * @param {AxisTexts | null} texts
 * @param {"keys" | "queries"} side
 * @returns {Ends[]}
 */
function spansIn([from, to], texts, side) {
  /** @type {Ends[]} */
  const spans = [];
  for (let at = from; at <= to; ) {
    const last = Math.min(to, spanOf(texts, side, at)[1]);
    spans.push([at, last]);
    at = last + 1;
  }
  return spans;
}

/**
 * @param {number | null} place
 * @param {Ends} span
 */
function isIn(place, [from, to]) {
  return place !== null && from <= place && place <= to;
}

/**
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {number | null} chosen
 * @param {Theme} theme
 * @param {Ends[]} taken
 * @returns {Mark[]}
 */
function keyMarks(layout, texts, chosen, theme, taken) {
  const { cell, left, right, keys } = layout;
  /** @type {Mark[]} */
  const marks = [];
  const inside = (/** @type {number} */ key) =>
    layout.xOf(key + 0.5) >= left && layout.xOf(key + 0.5) <= right;
  if (cell >= NAMED_CELL) {
    for (const span of spansIn(keys, texts, "keys"))
      if (inside((span[0] + span[1]) / 2))
        marks.push(...namedKey(layout, texts, span, isIn(chosen, span), theme));
    return marks;
  }
  const look = /** @type {const} */ ({
    kind: "text",
    align: "middle",
    colour: theme.soft,
    size: SMALL_TEXT,
    y: GUTTER.top - 9,
  });
  for (const key of ticksIn(keys, niceStep(cell, TICK_ROOM.x), 0)) {
    const x = layout.xOf(key + 0.5);
    if (!inside(key)) continue;
    marks.push({
      kind: "line",
      colour: theme.soft,
      x1: x,
      x2: x,
      y1: GUTTER.top - 5,
      y2: GUTTER.top,
    });
    if (isFree(taken, x, 22)) marks.push({ ...look, x, text: countText(key) });
  }
  return marks;
}

/** @param {number} cell */
function nameSize(cell) {
  return NAMES.find(([least]) => cell >= least)?.[1] ?? SMALL_TEXT;
}

/**
 * A key's position and text, upright beside one another, read from below; of a word its first.
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {Ends} span
 * @param {boolean} chosen
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function namedKey(layout, texts, [key, last], chosen, theme) {
  const x = layout.xOf((key + last + 1) / 2) + 4;
  const look = /** @type {const} */ ({ kind: "text", turn: -90, x });
  const weight = chosen ? 700 : 400;
  const size = nameSize(layout.cell);
  const number = countText(key);
  const width = textWidth(number, SMALL_TEXT);
  const room = GUTTER.top - 13 - width;
  const label = texts?.keys.label(key, 24, texts.unit) ?? "";
  const text = fitted(label, room, size, weight);
  return [
    {
      ...look,
      y: GUTTER.top - 6,
      text: number,
      size: SMALL_TEXT,
      colour: chosen ? theme.accent : theme.soft,
    },
    {
      ...look,
      y: GUTTER.top - 12 - width,
      text: isolated(text),
      weight,
      size,
      colour: chosen ? theme.accent : theme.ink,
    },
  ];
}

/**
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {(span: Ends) => boolean} isChosen
 * @param {Theme} theme
 * @param {Ends[]} taken
 * @returns {Mark[]}
 */
function queryMarks(layout, texts, isChosen, theme, taken) {
  const { cell, top, bottom, queries, facts } = layout;
  /** @type {Mark[]} */
  const marks = [];
  const inside = (/** @type {number} */ query) =>
    layout.yOf(query + 0.5) >= top && layout.yOf(query + 0.5) <= bottom;
  if (cell >= NAMED_CELL) {
    for (const span of spansIn(queries, texts, "queries"))
      if (inside((span[0] + span[1]) / 2))
        marks.push(...namedQuery(layout, texts, span, isChosen(span), theme));
    return marks;
  }
  const look = /** @type {const} */ ({
    kind: "text",
    align: "end",
    colour: theme.soft,
    size: SMALL_TEXT,
    x: GUTTER.left - 9,
  });
  const offset = positionOf(0, facts);
  for (const query of ticksIn(queries, niceStep(cell, TICK_ROOM.y), offset)) {
    const y = layout.yOf(query + 0.5);
    if (!inside(query)) continue;
    marks.push({
      kind: "line",
      colour: theme.soft,
      x1: GUTTER.left - 5,
      x2: GUTTER.left,
      y1: y,
      y2: y,
    });
    if (isFree(taken, y, 7))
      marks.push({ ...look, y: y + 3.5, text: countText(positionOf(query, facts)) });
  }
  return marks;
}

/**
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {Ends} span
 * @param {boolean} chosen
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function namedQuery(layout, texts, [query, last], chosen, theme) {
  const y = layout.yOf((query + last + 1) / 2) + 4;
  const look = /** @type {const} */ ({ kind: "text", align: "end", y });
  const weight = chosen ? 700 : 400;
  const size = nameSize(layout.cell);
  const number = countText(positionOf(query, layout.facts));
  const widest = textWidth(countText(positionOf(layout.queries[1], layout.facts)), SMALL_TEXT);
  const room = GUTTER.left - 20 - widest;
  const label = texts?.queries.label(query, 24, texts.unit) ?? "";
  const text = fitted(label, room, size, weight);
  const x = GUTTER.left - 7;
  return [
    { ...look, x, text: number, size: SMALL_TEXT, colour: chosen ? theme.accent : theme.soft },
    {
      ...look,
      x: x - widest - 6,
      text: isolated(text),
      weight,
      size,
      colour: chosen ? theme.accent : theme.ink,
    },
  ];
}

/**
 * Dashed lines where a model began to write.
 * @param {Layout} layout
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function boundaryMarks(layout, theme) {
  const { facts, left, top, right, bottom } = layout;
  if (facts.boundary === null || facts.boundary === undefined) return [];
  /** @type {Mark[]} */
  const marks = [];
  const look = /** @type {const} */ ({
    kind: "line",
    colour: theme.focus,
    width: 1.5,
    dash: [6, 4],
  });
  const label = /** @type {const} */ ({
    kind: "text",
    colour: theme.focus,
    halo: theme.paper,
    weight: 600,
    text: "written by the model →",
  });
  const x = layout.xOf(facts.boundary);
  if (x >= left && x <= right) {
    marks.push({ ...look, x1: x, x2: x, y1: top - 60, y2: bottom });
    const fits = x + 140 < right;
    const y = layout.cell < NAMED_CELL ? top - 50 : top + 14;
    marks.push({ ...label, x: fits ? x + 6 : x - 6, y, align: fits ? "start" : "end" });
  }
  const y = layout.yOf(facts.boundary - facts.start);
  if (facts.itself && y >= top && y <= bottom) {
    marks.push({ ...look, x1: left - 14, x2: right, y1: y, y2: y });
    marks.push({ ...label, x: left + 6, y: y + 14, text: "written by the model ↓" });
  }
  return marks;
}

/**
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {number} query
 * @param {number} key
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function ringMarks(layout, texts, query, key, theme) {
  const middle = ([from, to] = [0, 0]) => (from + to + 1) / 2;
  const x = layout.xOf(middle(spanOf(texts, "keys", key)));
  const y = layout.yOf(middle(spanOf(texts, "queries", query)));
  if (!layout.shows(x, y)) return [];
  const radius = Math.max(7, Math.min(11, layout.cell * 0.72));
  const ring = /** @type {const} */ ({ kind: "ring", x, y, radius });
  return [
    { ...ring, colour: theme.paper, width: 4.5, alpha: 0.85 },
    { ...ring, colour: theme.focus, width: 2 },
  ];
}

/**
 * Hairlines of the chosen query and key, their names on the axes, and a box where they meet.
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {number | null} query
 * @param {number | null} key
 * @param {Theme} theme
 * @param {{queries: Ends[], keys: Ends[]}} clear
 * @returns {Mark[]}
 */
function chosenMarks(layout, texts, query, key, theme, clear) {
  const { left, top, right, bottom, cell } = layout;
  /** @type {Mark[]} */
  const marks = [];
  const [x, y] = [layout.xOf((key ?? 0) + 0.5), layout.yOf((query ?? 0) + 0.5)];
  const seesKey = key !== null && x >= left && x <= right;
  const seesQuery = query !== null && y >= top && y <= bottom;
  const hair = /** @type {const} */ ({ kind: "line", colour: theme.accent, alpha: 0.6 });
  if (seesQuery && cell < NAMED_CELL) {
    marks.push({ ...hair, x1: left, x2: right, y1: y, y2: y });
    marks.push(...queryChip(layout, texts, query, y, theme));
    clear.queries.push([y - 8, y + 8]);
  }
  if (seesKey && cell < NAMED_CELL) {
    marks.push({ ...hair, alpha: 0.4, x1: x, x2: x, y1: top, y2: bottom });
    marks.push(...keyChip(layout, texts, key, x, theme));
    clear.keys.push([x, x]);
  }
  const spans = [spanOf(texts, "keys", key ?? 0), spanOf(texts, "queries", query ?? 0)];
  if (seesKey && seesQuery) marks.push(...boxMarks(layout, spans, theme));
  return marks;
}

/**
 * A bar beside the rows of several chosen queries.
 * @param {Layout} layout
 * @param {Part} part
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function severalMarks(layout, [from, to], theme) {
  const top = Math.max(layout.top, layout.yOf(from));
  const bottom = Math.min(layout.bottom, layout.yOf(to));
  if (bottom <= top) return [];
  const height = Math.max(1.5, bottom - top);
  return [{ kind: "box", x: layout.left - 4, y: top, width: 3, height, colour: theme.accent }];
}

/**
 * The box around a pair of tokens, or of words.
 * @param {Layout} layout
 * @param {Ends[]} spans
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function boxMarks(layout, [keys, queries], theme) {
  const [width, height] = [keys, queries].map(([from, to]) =>
    Math.max((to - from + 1) * layout.cell, 9),
  );
  const x = layout.xOf((keys[0] + keys[1] + 1) / 2) - width / 2;
  const y = layout.yOf((queries[0] + queries[1] + 1) / 2) - height / 2;
  const box = /** @type {const} */ ({ kind: "box", x, y, width, height });
  return [
    { ...box, line: theme.paper, stroke: 4, alpha: 0.9 },
    { ...box, line: theme.accent, stroke: 2 },
  ];
}

/**
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {number} query
 * @param {number} y
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function queryChip(layout, texts, query, y, theme) {
  const first = texts?.queries.first(query, texts.unit) ?? query;
  const number = countText(positionOf(first, layout.facts));
  const room = GUTTER.left - 22 - textWidth(number, 11, 700);
  const label = texts?.queries.label(query, 24, texts.unit) ?? "";
  const text = fitted(label, room, 11, 700);
  const style = /** @type {const} */ ({ kind: "text", align: "end", weight: 700 });
  const look = { ...style, colour: theme.accent, y: y + 4 };
  return [
    { ...look, x: GUTTER.left - 9, text: number },
    { ...look, x: GUTTER.left - 15 - textWidth(number, 11, 700), text: isolated(text) },
  ];
}

/**
 * @param {Layout} layout
 * @param {AxisTexts | null} texts
 * @param {number} key
 * @param {number} x
 * @param {Theme} theme
 * @returns {Mark[]}
 */
function keyChip(layout, texts, key, x, theme) {
  const name = texts ? ` ${isolated(texts.keys.label(key, 24, texts.unit))}` : "";
  const text = `${countText(texts?.keys.first(key, texts.unit) ?? key)}${name}`;
  const half = textWidth(text, 11, 700) / 2;
  const middle = Math.max(GUTTER.left - 60 + half, Math.min(x, layout.right + 8 - half));
  return [
    {
      kind: "text",
      align: "middle",
      colour: theme.accent,
      weight: 700,
      x: middle,
      y: GUTTER.top - 32,
      text,
    },
    { kind: "line", colour: theme.accent, x1: x, x2: x, y1: GUTTER.top - 27, y2: GUTTER.top },
  ];
}
