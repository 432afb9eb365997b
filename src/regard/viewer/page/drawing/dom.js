// Elements without markup: tokens are hostile, so text is always set as text.

// make("button", {class: "x", text: "y", "aria-label": "z", onclick: f}, child, …)
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name.includes("-") || !(name in node)) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A row of buttons of which one is pressed: {element, show(value)}.
export function makeSwitch(label, choices, choose) {
  const buttons = new Map();
  for (const [value, text] of Object.entries(choices)) {
    const button = make("button", { type: "button", text, onclick: () => choose(value) });
    buttons.set(value, button);
  }
  const element = make(
    "div",
    { class: "regard-switch", role: "group", "aria-label": label },
    ...buttons.values(),
  );
  const show = (chosen) => {
    for (const [value, button] of buttons)
      button.setAttribute("aria-pressed", String(value === chosen));
  };
  return { element, show };
}

// A labelled <select>: {element, fill(options), show(value)}; options: [[value, text], …].
export function makePicker(label, choose) {
  const select = make("select", { "aria-label": label, onchange: () => choose(select.value) });
  const element = make("label", { class: "regard-picker" }, make("span", { text: label }), select);
  const fill = (options) => {
    select.replaceChildren(...options.map(([value, text]) => make("option", { value, text })));
  };
  const show = (value) => {
    select.value = String(value);
  };
  return { element, fill, show };
}

// Scrolls `scroller`, and nothing around it, until `node` is seen in it.
export function showInside(scroller, node) {
  const frame = scroller.getBoundingClientRect();
  const box = node.getBoundingClientRect();
  if (box.top < frame.top) scroller.scrollTop -= frame.top - box.top + 8;
  else if (box.bottom > frame.bottom) scroller.scrollTop += box.bottom - frame.bottom + 8;
}

// The one of `nodes` that stands nearest to the one at `at` in the line above (−1) or below (1).
export function nextInLine(nodes, at, way) {
  const here = nodes[at].getBoundingClientRect();
  const boxes = nodes.map((node) => node.getBoundingClientRect());
  const beyond = boxes.map((box) => way * (box.top - here.top));
  const nearest = Math.min(...beyond.filter((far) => far > 2));
  const off = (n) => Math.abs(boxes[n].left - here.left);
  const line = nodes.map((_, n) => n).filter((n) => Math.abs(beyond[n] - nearest) <= 2);
  return nodes[line.sort((a, b) => off(a) - off(b))[0]];
}
