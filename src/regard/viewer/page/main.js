// The page: header, heads, map or steps, text and readout, around one selection.

import { makeHeader } from "./header.js";
import { make } from "./dom.js";
import { Selection } from "./selection.js";
import { Source } from "./source.js";

// Builds the page inside `root`, from the numbers that `ask` gives. `address`: whether the page's
// address says what is chosen.
export async function start(root, ask, { address = false } = {}) {
  const source = new Source(ask);
  const about = await source.about();
  const selection = new Selection(about, address);
  const readout = make("output", { class: "regard-readout", role: "status" });
  const say = (text) => {
    readout.textContent = text;
  };
  const context = { about, source, selection, say, root };
  const header = makeHeader(context);
  const heads = make("section", { class: "regard-heads", "aria-label": "Heads" });
  const centre = make("main", { class: "regard-centre" }, make("p", { text: "The map comes here." }));
  const text = make("section", { class: "regard-text", "aria-label": "Text" });
  const frame = make("div", { class: "regard-frame" }, header.element, heads, centre, text, readout);
  root.classList.add("regard");
  root.classList.toggle("regard-whole", address);
  root.replaceChildren(frame);
  return context;
}
