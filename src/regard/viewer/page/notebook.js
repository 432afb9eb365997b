// The page in a notebook: the kernel responds, in messages with buffers.

import { make } from "./drawing/dom.js";
import { start } from "./main.js";

/** @import { SendRequest, Reply } from "./data/source.js" */

/** @typedef {{id: string, error?: string, coverage: number}} Message */

/** @typedef {(message: Message, buffers: (ArrayBuffer | ArrayBufferView)[]) => void} Hear */

/**
 * The part of anywidget's model that is used.
 * @typedef {{send: (content: object) => void, on: (event: "msg:custom", hear: Hear) => void,
 *   off: (event: "msg:custom", hear: Hear) => void}} WidgetModel
 */

/** @typedef {{resolve: (reply: Reply) => void, reject: (why: Error) => void}} Waiting */

const PATIENCE_MS = 10_000;
const SILENT =
  "The notebook's kernel has not responded for 10 seconds: it is running another cell, or has" +
  " ended. If it has, run this cell again.";
const ENDED = "The notebook's kernel has ended or was restarted: run this cell again.";

/**
 * Requests to a notebook's kernel, and a function that ends them. `tell` hears whether the kernel
 * keeps the page waiting.
 * @param {WidgetModel} model
 * @param {(silent: boolean) => void} tell
 */
export function overKernel(model, tell) {
  /** @type {Map<string, Waiting>} by the request's id */
  const waiting = new Map();
  const page = Math.random(); // a widget may be shown twice, and hears the responses to both
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    if (waiting.size) timer = setTimeout(() => tell(true), PATIENCE_MS);
  };
  /** @type {Hear} */
  const hear = (message, buffers) => {
    tell(false); // a response to the other page tells too that the kernel is there
    const pending = waiting.get(message.id);
    if (pending) waiting.delete(message.id);
    wait();
    if (!pending) return;
    if (message.error) pending.reject(new Error(message.error));
    else pending.resolve({ body: copyOf(buffers[0]), coverage: message.coverage });
  };
  let last = 0;
  /** @type {SendRequest} */
  const request = (path, parameters) =>
    new Promise((resolve, reject) => {
      const id = `${page} ${++last}`;
      waiting.set(id, { resolve, reject });
      if (waiting.size === 1) wait();
      try {
        model.send({ id, path, parameters });
      } catch {
        waiting.delete(id);
        reject(new Error(ENDED)); // JupyterLab has closed the line
      }
    });
  const end = () => {
    model.off("msg:custom", hear);
    clearTimeout(timer);
  };
  model.on("msg:custom", hear);
  return { request, end };
}

/**
 * Copies any view of bytes into an ArrayBuffer.
 * @param {ArrayBuffer | ArrayBufferView} view
 */
function copyOf(view) {
  const bytes = "buffer" in view ? view : new Uint8Array(view);
  const copy = new Uint8Array(bytes.byteLength);
  copy.set(new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength));
  return copy.buffer;
}

/**
 * anywidget calls this wherever the widget is shown, and the returned function at the end.
 * @param {{model: WidgetModel, el: HTMLElement}} widget
 */
export async function render({ model, el }) {
  const root = document.createElement("div");
  root.setAttribute("data-lm-suppress-shortcuts", "true"); // the notebook's own, of JupyterLab
  el.addEventListener("keydown", (event) => event.stopPropagation());
  const silent = make("p", { class: "regard-note", role: "status", hidden: true, text: SILENT });
  const { request, end } = overKernel(model, (isSilent) => {
    silent.hidden = !isSilent;
  });
  // The cell has a width, from which the height follows.
  const cell = document.createElement("div");
  cell.className = "regard-cell";
  cell.append(silent, root);
  el.append(cell);
  const showing = new AbortController();
  await start(root, request, { address: false, until: showing.signal });
  return () => {
    showing.abort();
    end();
  };
}
