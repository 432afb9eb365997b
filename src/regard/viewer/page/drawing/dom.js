// Elements without markup: tokens may be hostile, so text is always set as text.

/**
 * Properties of an element: attributes, `class` and `text`; those that are null are left out.
 * @typedef {{[name: string]: string | number | boolean | (() => void) | null | undefined}}
 *   Properties
 */

/** @typedef {readonly [value: string | number, text: string | number]} Option */

/**
 * make("button", {class: "x", text: "y", "aria-label": "z", onclick: f}, child, …)
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Properties} [properties]
 * @param {...(Node | string | null | undefined)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "class") node.className = String(value);
    else if (name === "text") node.textContent = String(value);
    else if (name.includes("-") || !(name in node)) node.setAttribute(name, String(value));
    else Object.assign(node, { [name]: value });
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/**
 * A row of buttons of which one is pressed: {element, buttons, show(value)}.
 * @template {string} Value
 * @param {string} label
 * @param {Record<Value, string>} choices
 * @param {(value: Value) => void} choose
 */
export function makeSwitch(label, choices, choose) {
  const values = /** @type {Value[]} */ (Object.keys(choices));
  const buttons = new Map(
    values.map((value) => {
      const onclick = () => choose(value);
      return [value, make("button", { type: "button", text: choices[value], onclick })];
    }),
  );
  const element = make(
    "div",
    { class: "regard-switch", role: "group", "aria-label": label },
    ...buttons.values(),
  );
  /** @param {Value} chosen */
  const show = (chosen) => {
    for (const [value, button] of buttons)
      button.setAttribute("aria-pressed", String(value === chosen));
  };
  return { element, buttons, show };
}

/**
 * A labelled <select>: {element, fill(options), show(value)}; options: [[value, text], …].
 * @param {string} label
 * @param {(value: string) => void} choose
 */
export function makePicker(label, choose) {
  const select = make("select", { "aria-label": label, onchange: () => choose(select.value) });
  const element = make("label", { class: "regard-picker" }, make("span", { text: label }), select);
  /** @param {readonly Option[]} options */
  const fill = (options) => {
    select.replaceChildren(...options.map(([value, text]) => make("option", { value, text })));
  };
  /** @param {string | number} value */
  const show = (value) => {
    select.value = String(value);
  };
  return { element, fill, show };
}

/**
 * Scrolls `scroller`, and nothing around it, until `node` is in view.
 * @param {HTMLElement} scroller
 * @param {HTMLElement} node
 */
export function showInside(scroller, node) {
  const frame = scroller.getBoundingClientRect();
  const box = node.getBoundingClientRect();
  if (box.top < frame.top) scroller.scrollTop -= frame.top - box.top + 8;
  else if (box.bottom > frame.bottom) scroller.scrollTop += box.bottom - frame.bottom + 8;
}

/**
 * The nearest of `nodes` to the one at `at`, in the line above (−1) or below (1).
 * @template {HTMLElement} Node
 * @param {Node[]} nodes
 * @param {number} at
 * @param {-1 | 1} way
 * @returns {Node | undefined}
 */
export function nextInLine(nodes, at, way) {
  const here = nodes[at].getBoundingClientRect();
  const boxes = nodes.map((node) => node.getBoundingClientRect());
  const beyond = boxes.map((box) => way * (box.top - here.top));
  const nearest = Math.min(...beyond.filter((far) => far > 2));
  const off = (/** @type {number} */ n) => Math.abs(boxes[n].left - here.left);
  const line = nodes.map((_, n) => n).filter((n) => Math.abs(beyond[n] - nearest) <= 2);
  return nodes[line.sort((a, b) => off(a) - off(b))[0]];
}

/**
 * The line that an arrow key leads to: above (−1) or below (1).
 * @param {string} key
 * @returns {-1 | 1 | undefined}
 */
export function lineStep(key) {
  if (key === "ArrowUp") return -1;
  return key === "ArrowDown" ? 1 : undefined;
}

/** @typedef {{shift: boolean, control: boolean}} Modifiers of a click or a key */

/**
 * @param {MouseEvent | KeyboardEvent} event
 * @returns {Modifiers}
 */
export function modifiersOf(event) {
  return { shift: event.shiftKey, control: event.ctrlKey || event.metaKey };
}

/**
 * The drawing context of a canvas.
 * @param {HTMLCanvasElement} canvas
 */
export function penOf(canvas) {
  const pen = canvas.getContext("2d");
  if (!pen) throw new Error("This browser cannot draw on a canvas; use another one.");
  return pen;
}

/**
 * The element of that id, which the page must have.
 * @param {string} id
 */
export function elementOf(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`The page has no element #${id}.`);
  return element;
}
