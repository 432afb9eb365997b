// What each key does, wherever the focus is, unless something is being typed.

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const TYPED = "input:not([type=checkbox]), select, textarea, [contenteditable]";
const PRESSED = "button, a, summary";

// Listens until `signal` ends it. `parts`: {map, text, heads, compare, help, showPanel(name)}.
export function listenToKeys(context, parts, target, signal) {
  const { selection, root } = context;
  const down = (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = event.composedPath()[0];
    if (at instanceof Element && (at.closest(TYPED) || at.closest("dialog"))) return;
    const presses = at instanceof Element && at.closest(PRESSED);
    if (event.key === "Enter" && presses) return;
    selection.repeats = event.repeat;
    if (acts(event, context, parts)) event.preventDefault();
    selection.repeats = false;
  };
  target.addEventListener("keydown", down, { signal });
  if (target === root && !root.hasAttribute("tabindex")) root.tabIndex = -1;
}

// Does what the key says: whether it says anything.
function acts(event, context, parts) {
  const arrow = ARROWS[event.key];
  const { selection } = context;
  if (arrow) {
    const [across, down] = arrow.map((way) => way * (event.shiftKey ? 10 : 1));
    if (selection.view === "map") parts.map.move(across, down);
    else moveBy(context, across, down);
    return true;
  }
  const act = actions(context, parts)[event.key];
  act?.();
  return act !== undefined;
}

function moveBy({ selection }, across, down) {
  selection.set({ query: (selection.query ?? 0) + down, key: (selection.key ?? 0) + across });
}

function actions({ selection }, { map, text, heads, compare, help, showPanel }) {
  const set = (fields) => selection.set(fields);
  const other = (name, one, two) => () => set({ [name]: selection[name] === one ? two : one });
  const layer = (by) => () => set({ layer: Math.max(0, selection.layer + by) });
  const head = (by) => () => set({ head: Math.max(0, selection.head + by) });
  const onMap = (act) => (selection.view === "map" ? act : undefined);
  const inPanel = (name, act) => () => {
    showPanel(name);
    act();
  };
  return {
    "+": onMap(() => map.zoomBy(2)),
    "=": onMap(() => map.zoomBy(2)),
    "-": onMap(() => map.zoomBy(0.5)),
    0: onMap(() => map.fit()),
    Enter: onMap(() => map.enter()),
    m: other("plane", "max", "mass"),
    s: other("scale", "weight", "uniform"),
    v: other("view", "map", "steps"),
    t: inPanel("text", other("side", "to", "by")),
    "[": head(-1),
    "]": head(1),
    "{": layer(-1),
    "}": layer(1),
    "/": inPanel("text", () => text.search()),
    p: inPanel("heads", () => heads.togglePair()),
    o: inPanel("heads", () => heads.nextOrder()),
    c: () => compare.toggle(),
    "?": () => help.open(),
  };
}
