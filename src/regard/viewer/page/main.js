// The page: header, heads, map or steps, text and readout, around one selection.

import { chooseFirst } from "./data/choose.js";
import { Selection } from "./data/selection.js";
import { Source } from "./data/source.js";
import { makeTexts } from "./data/tokens.js";
import { makeBanner, unlessSaid, watched } from "./data/watch.js";
import { make } from "./drawing/dom.js";
import { makeMap } from "./map/map.js";
import { makeColourBar } from "./panels/bar.js";
import { makeCompare } from "./panels/compare.js";
import { makeHeader } from "./panels/header.js";
import { makeHeads } from "./panels/heads.js";
import { makeHelp } from "./panels/help.js";
import { listenToKeys } from "./panels/keyboard.js";
import { savePng, saveSvg } from "./panels/picture.js";
import { describeChanges, makeReadout } from "./panels/readout.js";
import { makeSteps } from "./panels/steps.js";
import { makeText } from "./panels/text.js";

const FIRST_PICTURE_MS = 1500;

// Builds the page inside `root` from the numbers that `ask` gives, and returns {context, end()}.
// `address`: whether it is the whole page, and the page's address says what is chosen.
export async function start(root, ask, { address = false } = {}) {
  const banner = makeBanner();
  root.classList.add("regard");
  root.classList.toggle("regard-whole", address);
  root.replaceChildren(banner.element);
  let retry = () => start(root, ask, { address });
  const fails = (sentence) => banner.show(sentence, retry);
  const source = new Source(watched(ask, { fails, works: banner.hide }));
  let about;
  try {
    about = await source.about();
  } catch (error) {
    unlessSaid(error);
    return null;
  }
  const selection = new Selection(about, address);
  const readout = makeReadout();
  const { say, aside } = readout;
  const texts = makeTexts(source, about);
  const listening = new AbortController();
  const ended = listening.signal;
  const context = { about, source, selection, texts, say, aside, root, ended, ...firstPicture() };
  retry = () => selection.again();
  const parts = makeParts(context);
  root.replaceChildren(banner.element, parts.frame(readout.element), parts.help.element);
  listenToKeys(context, parts, address ? document : root, ended);
  describeChanges(context);
  chooses(context);
  const { name, model } = selection.recordingFacts;
  if (address) document.title = [name || model, "regard"].filter(Boolean).join(" · ");
  const end = () => {
    listening.abort();
    selection.end();
    for (const part of Object.values(parts)) part.end?.();
  };
  return { context, end };
}

// {drawn, isDrawn()}: a promise that waits for the map's first whole picture, but not for long; what
// is not needed for it is asked for behind it.
function firstPicture() {
  let isDrawn;
  const drawn = new Promise((resolve) => (isDrawn = resolve));
  setTimeout(isDrawn, FIRST_PICTURE_MS);
  return { drawn, isDrawn };
}

function makeParts(context) {
  const help = makeHelp();
  const parts = { help, heads: makeHeads(context), text: makeText(context) };
  parts.steps = makeSteps(context);
  parts.map = makeMap(context);
  parts.colourBar = makeColourBar(context);
  parts.compare = makeCompare(context);
  parts.savers = {
    "PNG picture": () => savePng(context, parts),
    "SVG drawing": () => saveSvg(context, parts),
  };
  parts.header = makeHeader(context, parts);
  parts.frame = (readout) => layOut(context, parts, readout);
  return parts;
}

// The frame of the page; where it is narrow, Heads and Text share one place, and tabs choose.
function layOut({ selection }, parts, readout) {
  const { header, heads, map, steps, text } = parts;
  const centre = make("main", { class: "regard-centre" }, map.element, steps.element);
  const frame = make("div", { class: "regard-frame" });
  const tabs = Object.entries({ heads: "Heads", text: "Text" }).map(([name, label]) => {
    const tab = make("button", { type: "button", text: label });
    tab.addEventListener("click", () => show(name));
    return [name, tab];
  });
  const show = (shown) => {
    frame.dataset.panel = shown;
    for (const [name, tab] of tabs) tab.setAttribute("aria-pressed", String(name === shown));
  };
  const group = { class: "regard-tabs regard-switch", role: "group", "aria-label": "Panel" };
  const buttons = make("div", group, ...tabs.map(([, tab]) => tab));
  frame.append(header.element, heads.element, centre, buttons, text.element, readout);
  parts.showPanel = show;
  show("text");
  const turn = () => {
    map.element.hidden = selection.view !== "map";
    steps.element.hidden = selection.view !== "steps";
  };
  selection.addEventListener("change", ({ detail }) => detail.has("view") && turn());
  turn();
  return frame;
}

// Chooses a pair now, and again wherever there is none.
function chooses(context) {
  const { selection } = context;
  const choose = () => chooseFirst(context).catch(unlessSaid);
  selection.addEventListener("change", () => {
    if (selection.query === null || selection.key === null) choose();
  });
  choose();
}
