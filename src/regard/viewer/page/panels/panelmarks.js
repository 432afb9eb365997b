// A panel of the page as marks: its words, canvases and boxes, also those that are scrolled away.

// {width, height, marks}, in CSS pixels of the panel's whole content.
export function panelMarks(element) {
  element.classList.add("regard-pictured"); // nothing floats over the rest
  const origin = element.getBoundingClientRect();
  const [left, top] = [element.scrollLeft - origin.left, element.scrollTop - origin.top];
  const placed = ({ x, y, width, height }) => ({ x: x + left, y: y + top, width, height });
  const marks = [];
  const add = (parent) => {
    for (const node of parent.childNodes) {
      if (node.nodeType === Node.TEXT_NODE) marks.push(...wordMarks(node, placed));
      else if (isShown(node)) {
        marks.push(...boxMarks(node, placed));
        add(node);
      }
    }
  };
  add(element);
  element.classList.remove("regard-pictured");
  return { width: element.scrollWidth, height: element.scrollHeight, marks };
}

function isShown(node) {
  return (
    node.nodeType === Node.ELEMENT_NODE &&
    !node.classList.contains("regard-hidden") &&
    node.checkVisibility()
  );
}

function boxMarks(node, placed) {
  const box = placed(node.getBoundingClientRect());
  if (node instanceof HTMLCanvasElement)
    return node.width && node.height ? [{ kind: "image", canvas: node, ...box }] : [];
  const style = getComputedStyle(node);
  const stroke = parseFloat(style.borderTopWidth);
  const colour = isClear(style.backgroundColor) ? undefined : style.backgroundColor;
  if (!colour && !stroke) return [];
  const line = stroke ? style.borderTopColor : undefined;
  const round = parseFloat(style.borderTopLeftRadius) || 0;
  return [{ kind: "box", ...box, colour, line, stroke, round }];
}

function isClear(colour) {
  return colour === "transparent" || /, 0\)$/.test(colour);
}

// Each word by itself, where the page has put it; the labels of columns run upwards.
function wordMarks(node, placed) {
  const style = getComputedStyle(node.parentElement);
  const size = parseFloat(style.fontSize);
  const look = { kind: "text", colour: style.color, size, weight: Number(style.fontWeight) };
  const isUpright = node.parentElement.closest(".regard-column-labels") !== null;
  const range = document.createRange();
  return [...node.data.matchAll(/\S+/g)].flatMap(({ index, 0: text }) => {
    range.setStart(node, index);
    range.setEnd(node, index + text.length);
    const { x, y, width, height } = placed(range.getBoundingClientRect());
    if (!width || !height) return [];
    const middle = 0.35 * size; // from the middle of a line to the foot of its letters
    if (isUpright) return [{ ...look, x: x + width / 2 + middle, y: y + height, text, turn: -90 }];
    return [{ ...look, x, y: y + height / 2 + middle, text }];
  });
}
