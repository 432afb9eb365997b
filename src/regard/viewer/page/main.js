// The page: header, heads, map or steps, text and readout, around one selection.

import { makeAlignments } from "./data/alignment.js";
import { chooseFirst, chooseHead } from "./data/choose.js";
import { listenToEffects } from "./data/effects.js";
import { Selection } from "./data/selection.js";
import { Source } from "./data/source.js";
import { makeTexts } from "./data/tokens.js";
import { makeBanner, unlessSaid, watched } from "./data/watch.js";
import { make, makeSwitch } from "./drawing/dom.js";
import { HeadMapView } from "./map/map.js";
import { makeColourBar } from "./panels/bar.js";
import { makeCompare } from "./panels/compare.js";
import { makeExport } from "./panels/export.js";
import { makeHeader } from "./panels/header.js";
import { makeHeads } from "./panels/heads.js";
import { makeHelp } from "./panels/help.js";
import { listenToKeys } from "./panels/keyboard.js";
import { makeLines } from "./panels/lines.js";
import { printAsShown } from "./panels/print.js";
import { describeChanges, makeReadout } from "./panels/readout.js";
import { makeSteps } from "./panels/steps.js";
import { makeText } from "./panels/text.js";

/** @import { Context } from "./data/selection.js" */
/** @import { About, Place, SendRequest } from "./data/source.js" */

/** @typedef {"heads" | "pairs" | "text"} PanelName of what shares one place where the page is narrow */

/** @typedef {ReturnType<typeof makeParts>} Parts */

/** @typedef {{context: Context, end: () => void}} Page */

/**
 * @typedef {{address?: boolean, known?: About, until?: AbortSignal, besides?: (context: Context) => HTMLElement,
 *   withInput?: (root: HTMLElement, about: About) => Promise<Page | null>}} Options
 */

const FIRST_PICTURE_MS = 1500;

/**
 * Builds the page inside `root` with data from `request`; null where that fails.
 * `address`: whether it is the whole page, whose address follows the selection. `known` is what
 * `about` tells, where that is known. It ends with `until`, also where it was tried again.
 * `withInput` takes over where texts can be typed, and `besides` makes what stands below the text.
 * @param {HTMLElement} root
 * @param {SendRequest} request
 * @param {Options} [options]
 * @returns {Promise<Page | null>}
 */
export async function start(root, request, options = {}) {
  const { address = false, known, until, withInput, besides } = options;
  const banner = makeBanner();
  root.classList.add("regard");
  root.classList.toggle("regard-whole", address);
  root.replaceChildren(banner.element);
  /** @type {() => void} */
  let retry = () => start(root, request, options);
  const listening = new AbortController();
  const ended = listening.signal;
  const end = () => listening.abort();
  until?.addEventListener("abort", end, { signal: ended });
  if (until?.aborted) end();
  const fails = (/** @type {string} */ sentence) => {
    if (!ended.aborted) banner.show(sentence, retry);
  };
  const works = (/** @type {boolean} */ others) => {
    banner.hide();
    if (others) retry();
  };
  const source = new Source(watched(request, { fails, works, ended }));
  /** @type {About} */
  let about;
  /** @type {Place} */
  let opens;
  try {
    about = known ?? (await source.about());
    if (about.typed && withInput) return withInput(root, about);
    opens = await chooseHead(source, about, address ? location.hash : "");
  } catch (error) {
    unlessSaid(error);
    return null;
  }
  if (ended.aborted) return null;
  const selection = new Selection(about, address, opens);
  listenToEffects(source, selection);
  const readout = makeReadout();
  const { say, said, aside } = readout;
  const texts = makeTexts(source, about);
  const aligned = makeAlignments(source, selection);
  const data = { about, source, selection, texts, ...aligned };
  const shared = { ...data, say, said, aside, because: "", root, ended };
  const context = { ...shared, ...firstPicture() };
  retry = () => selection.again();
  const parts = makeParts(context);
  if (besides) parts.text.element.append(besides(context));
  const { frame, showPanel } = layOut(context, parts, readout.element);
  root.replaceChildren(banner.element, frame, parts.help.element, parts.pictures.element);
  listenToKeys(context, { ...parts, showPanel }, address ? document : root, ended);
  describeChanges(context);
  chooses(context);
  const { name, model } = selection.recordingFacts;
  if (address) printAsShown(ended);
  if (address) document.title = [name || model, "regard"].filter(Boolean).join(" · ");
  ended.addEventListener("abort", () => {
    selection.end();
    for (const part of [parts.heads, parts.text, parts.steps, parts.lines, parts.map]) part.end();
  });
  return { context, end };
}

// {drawn, isDrawn()}: a promise that waits for the map's first whole picture, but not for long;
// requests that it does not need come after it.
function firstPicture() {
  let isDrawn = () => {};
  /** @type {Promise<void>} */
  const drawn = new Promise((resolve) => {
    isDrawn = resolve;
  });
  setTimeout(isDrawn, FIRST_PICTURE_MS);
  return { drawn, isDrawn };
}

/** @param {Context} context */
function makeParts(context) {
  const help = makeHelp();
  const heads = makeHeads(context);
  const text = makeText(context);
  const steps = makeSteps(context);
  const lines = makeLines(context);
  const map = new HeadMapView(context);
  const colourBar = makeColourBar(context, map);
  const compare = makeCompare(context);
  const pictures = makeExport(context, { map, steps, lines });
  map.top.append(compare.other);
  const controls = [colourBar.element, map.sums.button];
  map.head.append(make("div", { class: "regard-map-controls" }, ...controls));
  const header = makeHeader(context, { compare, help, pictures });
  return { help, pictures, heads, text, steps, lines, map, compare, header };
}

/**
 * The frame of the page; where it is narrow, Heads and Text share one place, and tabs choose.
 * @param {Context} context
 * @param {Parts} parts
 * @param {HTMLElement} readout
 */
function layOut({ selection }, parts, readout) {
  const { header, heads, map, steps, lines, text } = parts;
  const views = { map: map.element, steps: steps.element, lines: lines.element };
  const centre = make("main", { class: "regard-centre" }, ...Object.values(views));
  const frame = make("div", { class: "regard-frame" });
  const showPanel = (/** @type {PanelName} */ shown) => {
    frame.dataset.panel = shown;
    tabs.show(shown);
  };
  const tabs = makeSwitch("Panel", { heads: "Heads", pairs: "Pairs", text: "Text" }, showPanel);
  tabs.element.className = "regard-tabs regard-switch";
  tabs.element.setAttribute("role", "navigation"); // all of the page lies in a landmark
  const label = { class: "regard-landmark", "aria-label": "Strongest pairs" };
  const pairs = make("aside", label, map.links.element);
  const panels = [heads.element, pairs, centre, tabs.element, text.element];
  frame.append(header.element, ...panels, readout);
  showPanel("text");
  const turn = () => {
    for (const [name, element] of Object.entries(views)) element.hidden = selection.view !== name;
  };
  selection.listen((changed) => changed.has("view") && turn());
  turn();
  return { frame, showPanel };
}

/**
 * Chooses a pair now, and again wherever there is none.
 * @param {Context} context
 */
function chooses(context) {
  const { selection } = context;
  const choose = () => chooseFirst(context).catch(unlessSaid);
  selection.listen(() => {
    if (selection.query === null || selection.key === null) choose();
  });
  choose();
}
