// The line that says what is chosen, and what each change did.

import { make } from "./dom.js";
import { countText, countSeen, weightWords } from "./numbers.js";
import { unlessSaid } from "./watch.js";

const WORDS = {
  view: { map: "Map", steps: "Steps" },
  plane: { max: "strongest link of each bin", mass: "mass of each bin" },
  scale: { weight: "scale: weight, logarithmic", uniform: "scale: times uniform" },
  side: { to: "text: what the query attends to", by: "text: what the key is attended by" },
  compare: { "": "no comparison", side: "side by side", difference: "difference" },
};
const PAIR = ["recording", "layer", "head", "query", "key"];

export function makeReadout() {
  return make("output", { class: "regard-readout", role: "status" });
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
    const pair = PAIR.some((name) => changed.has(name)) || said.length;
    if (pair && selection.query !== null && selection.key !== null)
      said.push(await pairWords(context));
    if (own === latest && said.length) say(said.join(" · "));
  };
  selection.addEventListener("change", (event) => describe(event.detail).catch(unlessSaid));
  describe(new Set(["query"])).catch(unlessSaid);
}

// `query 5 «it» → key 2 «cat»   weight 0.6443 (3.87 × uniform)`, of the chosen pair or another.
export async function pairWords({ selection, source, texts }, pair = selection) {
  const { query, key } = pair;
  const { keys, queries } = await texts(selection.recording);
  const { values } = await source.row({ ...selection.where, query });
  const named = (text, n) => `${countText(n)} «${text.label(n, 24)}»`;
  const words = weightWords(values[key], countSeen(values));
  return `query ${named(queries, query)} → key ${named(keys, key)}   ${words}`;
}
