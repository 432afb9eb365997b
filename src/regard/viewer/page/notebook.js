// The page in a notebook: the kernel answers, in messages with numbers beside them.

import { start } from "./main.js";

// The `ask` of a page whose numbers a kernel computes, and what ends it.
export function overKernel(model) {
  const waiting = new Map();
  const page = Math.random(); // a widget may be shown twice, and hears what either asked
  const hear = (message, buffers) => {
    const asked = waiting.get(message.id);
    if (!asked) return;
    waiting.delete(message.id);
    if (message.error) asked.reject(new Error(message.error));
    else asked.resolve({ body: copyOf(buffers[0]), coverage: message.coverage });
  };
  let last = 0;
  const ask = (path, parameters) =>
    new Promise((resolve, reject) => {
      const id = `${page} ${++last}`;
      waiting.set(id, { resolve, reject });
      model.send({ id, path, parameters });
    });
  model.on("msg:custom", hear);
  return { ask, end: () => model.off("msg:custom", hear) };
}

// An ArrayBuffer of its own, whichever view of bytes the notebook gives.
function copyOf(view) {
  const buffer = view.buffer ?? view;
  return buffer.slice(view.byteOffset ?? 0, (view.byteOffset ?? 0) + view.byteLength);
}

// What anywidget calls for every place where the widget is shown, and what it calls in the end.
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
