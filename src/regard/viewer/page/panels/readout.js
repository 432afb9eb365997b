// The line that says what is chosen, and what each change did.

import { unlessSaid } from "../data/watch.js";
import { make } from "../drawing/dom.js";
import { countSeen, countText, weightWords } from "../drawing/numbers.js";

const WORDS = {
  view: { map: "Map", steps: "Steps" },
  plane: { max: "strongest link of each bin", mass: "mass of each bin" },
  scale: { weight: "scale: weight, logarithmic", uniform: "scale: times uniform" },
  side: { to: "text: what the query attends to", by: "text: what the key is attended by" },
  compare: { "": "no comparison", side: "side by side", difference: "difference" },
};
const PAIR = ["recording", "layer", "head", "query", "key"];

// {element, say(text), aside(text)}: what is said last, and beside it what goes on meanwhile.
export function makeReadout() {
  const [said, beside] = [make("span"), make("span", { class: "regard-aside" })];
  const element = make("output", { class: "regard-readout", role: "status" }, said, " ", beside);
  const write = (node) => (text) => {
    if (node.textContent !== text) node.textContent = text;
  };
  return { element, say: write(said), aside: write(beside) };
}

// Says every change of the selection.
export function describeChanges(context) {
  const { selection, say } = context;
  let latest = 0;
  const describe = async (changed) => {
    const own = ++latest;
    const parts = Object.keys(WORDS).filter((name) => changed.has(name));
    const said = parts.map((name) => WORDS[name][selection[name]]);
    if (changed.has("layer") || changed.has("head")) said.push(selection.name);
    if (context.because) said.unshift(context.because);
    context.because = ""; // what a panel wants to say first of a change that it makes
    const pair = PAIR.some((name) => changed.has(name)) || said.length;
    if (pair && selection.query !== null && selection.key !== null)
      said.push(await pairWords(context));
    if (own === latest && said.length) say(said.join(" · "));
  };
  selection.addEventListener("change", (event) => describe(event.detail).catch(unlessSaid));
  describe(new Set(["query"])).catch(unlessSaid);
}

async function pairWords({ selection, source, texts }) {
  const { query, key } = selection;
  const found = await texts(selection.recording);
  const { values } = await source.row({ ...selection.where, query });
  return pairText(found, { query, key, value: values[key], seen: countSeen(values) });
}

// `query 5 «it» → key 2 «cat»   weight 0.6443 (3.87 × uniform)`; value: ln weight.
export function pairText({ keys, queries, offset }, { query, key, value, seen }) {
  const named = (text, n, from) => `${countText(from + n)} «${text.label(n, 24)}»`;
  const pair = `query ${named(queries, query, offset ?? 0)} → key ${named(keys, key, 0)}`;
  return `${pair}   ${weightWords(value, seen)}`;
}
