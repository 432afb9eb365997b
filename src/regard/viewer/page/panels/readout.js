// The status line: the chosen pair, and what each change did.

import { headsWords } from "../data/extend.js";
import { isLostAt } from "../data/lost.js";
import { EVERY } from "../data/selection.js";
import { countIn } from "../data/several.js";
import { unlessSaid } from "../data/watch.js";
import { make } from "../drawing/dom.js";
import { countSeen, countText, effectWords, weightWords } from "../drawing/numbers.js";
import { otherPairWords } from "./compared.js";
import { countLost, once } from "./line.js";

/** @import { Changed, Compare, Context, Fields } from "../data/selection.js" */
/** @import { Plane, Side, Unit, View } from "../data/selection.js" */
/** @import { Texts, TokenText } from "../data/tokens.js" */
/** @import { Scale } from "../drawing/colours.js" */

/**
 * `value`: ln of the weight; `seen`: the number of the query's unmasked keys; `lost`: whether it is
 * no number. Of several queries, `count` of them, it is the mean.
 * @typedef {{query: number, key: number, value: number, seen: number, lost: boolean,
 *   count: number}} ReadPair
 */

/**
 * @typedef {{view: Record<View, string>, plane: Record<Plane, string>,
 *   scale: Record<Scale, string>, first: Record<"" | "hidden", string>, unit: Record<Unit, string>, sums: Record<"" | "shown", string>, side: Record<Side, string>,
 *   compare: Record<Compare, string>}} Words
 */

/** @type {Words} */
const WORDS = {
  view: { map: "Map", steps: "Steps", lines: "Lines" },
  plane: { max: "strongest weight of each cell", mass: "share of each cell", effect: "effects" },
  scale: { linear: "scale: linear", log: "scale: logarithmic", uniform: "scale: times uniform" },
  first: { "": "first token shown", hidden: "first token hidden: the others share its weight" },
  unit: { token: "weights of tokens", word: "weights of words: those of their tokens, joined" },
  sums: { "": "no sums", shown: "sums of rows and columns" },
  side: { to: "text: what the query attends to", by: "text: what the key is attended by" },
  compare: { "": "no comparison", side: "side by side", difference: "difference" },
};
const ONE_HEAD = /** @type {Changed} */ (new Set(["head"]));
/** @type {(keyof Fields)[]} */
const HEAD = ["layer", "head", "heads"];
/** @type {(keyof Fields)[]} */
const PAIR = [
  "recording",
  ...HEAD,
  "query",
  "queries",
  "key",
  "plane",
  "kind",
  "first",
  "unit",
  "compare",
  "other",
];

/**
 * {element, say(text, isLate), said(), aside(text)}: the last message, and beside it the progress.
 * `isLate`: it answers something before; `said` counts the others, so that no answer takes the place
 * of what was said since.
 */
export function makeReadout() {
  const [said, beside] = [make("span"), make("span", { class: "regard-aside" })];
  const element = make("output", { class: "regard-readout", role: "status" }, said, " ", beside);
  /** @type {(node: HTMLElement) => (text: string) => void} */
  const write = (node) => (text) => {
    if (node.textContent !== text) node.textContent = text;
  };
  let count = 0;
  const say = (/** @type {string} */ text, isLate = false) => {
    if (!isLate) count++;
    write(said)(text);
  };
  return { element, say, said: () => count, aside: write(beside) };
}

/**
 * Says every change of the selection.
 * @param {Context} context
 */
export function describeChanges(context) {
  const { selection, say, said: spoken } = context;
  let latest = 0;
  const describe = async (/** @type {Changed} */ changed, since = spoken()) => {
    const { view, usedPlane: plane, effect, usedScale, first, side, compare } = selection;
    const said = [];
    if (changed.has("view")) said.push(WORDS.view[view]);
    const isOther = changed.has("plane") || changed.has("kind");
    if (isOther) said.push(effect ? `effects: ${effect}` : WORDS.plane[plane]);
    if (changed.has("scale")) said.push(WORDS.scale[usedScale]);
    if (changed.has("first")) said.push(WORDS.first[first]);
    if (changed.has("unit")) said.push(WORDS.unit[selection.usedUnit]);
    if (changed.has("sums")) said.push(WORDS.sums[selection.sums]);
    if (changed.has("side")) said.push(WORDS.side[side]);
    if (changed.has("compare")) said.push(WORDS.compare[compare]);
    if (HEAD.some((name) => changed.has(name))) said.push(headsWords(selection) || selection.name);
    if (context.because) said.unshift(context.because);
    context.because = "";
    const pair = PAIR.some((name) => changed.has(name)) || said.length;
    if (!pair) return;
    const own = ++latest;
    const { query, key } = selection;
    if (query !== null && key !== null)
      said.push(await pairWords(context, query, key).catch(unread));
    if (own === latest && since === spoken() && said.length) say(said.join(" · "), true);
  };
  selection.listen((changed, since) => {
    const named = changed === EVERY ? ONE_HEAD : changed;
    describe(named, since).catch(unlessSaid);
  });
  describe(new Set(["query"])).catch(unlessSaid);
}

/**
 * What stands in place of a pair whose request failed: nothing of the former one.
 * @param {unknown} error
 */
function unread(error) {
  unlessSaid(error);
  return "not read";
}

/**
 * @param {Context} context
 * @param {number} query
 * @param {number} key
 */
async function pairWords(context, query, key) {
  const { selection, source, texts } = context;
  const { recording, where, asked, queryParts, usedUnit: unit, effect } = selection;
  const found = await texts(recording);
  const { values, lost: none } = await source.row({ ...where, effect: undefined, ...asked });
  const effects = effect && (await source.row({ ...where, ...asked })).values;
  const before = effects ? `${effectWords(effects[key], true)} · ` : "";
  const seen = countSeen(once(values, found.keys, unit)) + countLost(none, found.keys, unit);
  const [value, lost] = [values[key], isLostAt(none, key)];
  const pair = { query, key, value, seen, lost, count: countIn(queryParts) };
  return pairText({ ...found, unit }, pair, before) + (await otherPairWords(context, query, key));
}

/**
 * `query 5 «it» → key 2 «cat»   weight 64.43 % (3.87 × uniform)`, or `mean of 4 queries → …`;
 * `before`: what else is said of the pair.
 * @param {Texts & {unit: Unit}} texts
 * @param {ReadPair} pair
 * @param {string} [before]
 */
export function pairText(texts, { query, key, value, seen, lost, count }, before = "") {
  const { keys, queries, offset, unit } = texts;
  /** @type {(text: TokenText, n: number, from: number) => string} */
  const named = (text, n, from) =>
    `${countText(from + text.first(n, unit))} «${text.label(n, 24, unit)}»`;
  const one = `query ${named(queries, query, offset ?? 0)}`;
  const from = count > 1 ? `mean of ${countText(count)} queries` : one;
  const words = Number.isNaN(value) ? "" : before;
  return `${from} → key ${named(keys, key, 0)}   ${words}${weightWords(value, seen, lost)}`;
}
