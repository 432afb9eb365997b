// The page in a notebook: the kernel answers, in messages with numbers beside them.

import { start } from "./main.js";

/** @import { Ask, Reply } from "./data/source.js" */

/** @typedef {{id: string, error?: string, coverage: number}} Message */

/** @typedef {(message: Message, buffers: (ArrayBuffer | ArrayBufferView)[]) => void} Hear */

/**
 * What anywidget gives, as far as it is used.
 * @typedef {{send: (content: object) => void, on: (event: "msg:custom", hear: Hear) => void,
 *   off: (event: "msg:custom", hear: Hear) => void}} WidgetModel
 */

/** @typedef {{resolve: (reply: Reply) => void, reject: (why: Error) => void}} Waiting */

/**
 * The `ask` of a page whose numbers a kernel computes, and what ends it.
 * @param {WidgetModel} model
 */
export function overKernel(model) {
  /** @type {Map<string, Waiting>} by the question's id */
  const waiting = new Map();
  const page = Math.random(); // a widget may be shown twice, and hears what either asked
  /** @type {Hear} */
  const hear = (message, buffers) => {
    const asked = waiting.get(message.id);
    if (!asked) return;
    waiting.delete(message.id);
    if (message.error) asked.reject(new Error(message.error));
    else asked.resolve({ body: copyOf(buffers[0]), coverage: message.coverage });
  };
  let last = 0;
  /** @type {Ask} */
  const ask = (path, parameters) =>
    new Promise((resolve, reject) => {
      const id = `${page} ${++last}`;
      waiting.set(id, { resolve, reject });
      model.send({ id, path, parameters });
    });
  model.on("msg:custom", hear);
  return { ask, end: () => model.off("msg:custom", hear) };
}

/**
 * An ArrayBuffer of its own, whichever view of bytes the notebook gives.
 * @param {ArrayBuffer | ArrayBufferView} view
 */
function copyOf(view) {
  const bytes = "buffer" in view ? view : new Uint8Array(view);
  const copy = new Uint8Array(bytes.byteLength);
  copy.set(new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength));
  return copy.buffer;
}

/**
 * What anywidget calls for every place where the widget is shown, and what it calls in the end.
 * @param {{model: WidgetModel, el: HTMLElement}} widget
 */
export async function render({ model, el }) {
  const root = document.createElement("div");
  root.setAttribute("data-lm-suppress-shortcuts", "true"); // the notebook's own, of JupyterLab
  el.addEventListener("keydown", (event) => event.stopPropagation());
  const { ask, end } = overKernel(model);
  el.append(root);
  const page = await start(root, ask, { address: false });
  return () => {
    page?.end();
    end();
  };
}
