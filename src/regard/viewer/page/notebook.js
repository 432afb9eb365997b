// The page in a notebook: the kernel answers, in messages with numbers beside them.

import { start } from "./main.js";

// The `ask` of a page whose numbers a kernel computes.
export function overKernel(model) {
  const waiting = new Map();
  let last = 0;
  model.on("msg:custom", (message, buffers) => {
    const asked = waiting.get(message.id);
    if (!asked) return;
    waiting.delete(message.id);
    if (message.error) asked.reject(new Error(message.error));
    else asked.resolve({ body: copyOf(buffers[0]), coverage: message.coverage });
  });
  return (path, parameters) =>
    new Promise((resolve, reject) => {
      const id = `${model.model_id ?? ""} ${++last} ${Math.random()}`;
      waiting.set(id, { resolve, reject });
      model.send({ id, path, parameters });
    });
}

// An ArrayBuffer of its own, whichever view of bytes the notebook gives.
function copyOf(view) {
  const buffer = view.buffer ?? view;
  return buffer.slice(view.byteOffset ?? 0, (view.byteOffset ?? 0) + view.byteLength);
}

// What anywidget calls for every place where the widget is shown.
export async function render({ model, el }) {
  const root = document.createElement("div");
  el.append(root);
  await start(root, overKernel(model), { address: false });
}
