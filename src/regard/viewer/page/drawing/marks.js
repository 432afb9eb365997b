// Lines, texts and rings as a list, drawn on a canvas or written as SVG: what is seen is what is
// exported. Units are CSS pixels; `turn` is in degrees.

export const MARK_FONT = 'system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif';
const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
const measuringContext =
  typeof document === "undefined" ? null : document.createElement("canvas").getContext("2d");

export function textWidth(text, size = 11, weight = 400) {
  measuringContext.font = fontOf({ size, weight });
  return measuringContext.measureText(text).width;
}

// The text, cut with … where it is wider than `width`; empty where not even a letter fits.
export function fitted(text, width, size = 11, weight = 400) {
  if (textWidth(text, size, weight) <= width) return text;
  const letters = [...text];
  let [low, high] = [0, letters.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (textWidth(`${letters.slice(0, middle).join("")}…`, size, weight) <= width) low = middle;
    else high = middle - 1;
  }
  return low ? `${letters.slice(0, low).join("")}…` : "";
}

function fontOf({ size = 11, weight = 400 }) {
  return `${weight} ${size}px ${MARK_FONT}`;
}

export function drawMarks(context, marks) {
  for (const mark of marks) {
    context.save();
    context.globalAlpha = mark.alpha ?? 1;
    DRAWN_MARKS[mark.kind](context, mark);
    context.restore();
  }
}

const DRAWN_MARKS = {
  text(context, mark) {
    const { x, y, text, turn = 0, align = "start", colour, halo } = mark;
    context.translate(x, y);
    context.rotate((turn * Math.PI) / 180);
    context.font = fontOf(mark);
    context.direction = "ltr";
    context.textAlign = { start: "left", middle: "center", end: "right" }[align];
    context.textBaseline = "alphabetic";
    if (halo) {
      [context.strokeStyle, context.lineWidth, context.lineJoin] = [halo, 4, "round"];
      context.strokeText(text, 0, 0);
    }
    context.fillStyle = colour;
    context.fillText(text, 0, 0);
  },
  line(context, { x1, y1, x2, y2, colour, width = 1, dash }) {
    [context.strokeStyle, context.lineWidth] = [colour, width];
    if (dash) context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  },
  box(context, { x, y, width, height, colour, line, stroke = 1, round = 0 }) {
    context.beginPath();
    context.roundRect(x, y, width, height, round);
    if (colour) {
      context.fillStyle = colour;
      context.fill();
    }
    if (line) {
      [context.strokeStyle, context.lineWidth] = [line, stroke];
      context.stroke();
    }
  },
  image(context, { canvas, x, y, width, height }) {
    context.imageSmoothingEnabled = false;
    context.drawImage(canvas, x, y, width, height);
  },
  ring(context, { x, y, radius, colour, width = 2 }) {
    [context.strokeStyle, context.lineWidth] = [colour, width];
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.stroke();
  },
};

// The marks as children of an SVG element.
export function writeMarks(parent, marks) {
  for (const mark of marks) {
    const node = WRITTEN_MARKS[mark.kind](mark);
    if (mark.alpha !== undefined) node.setAttribute("opacity", mark.alpha);
    parent.append(node);
  }
}

export function svgNode(tag, attributes, text) {
  const node = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes))
    if (value !== undefined)
      node.setAttribute(name, typeof value === "number" ? shortNumber(value) : value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function shortNumber(n) {
  return String(Math.round(n * 100) / 100);
}

export function imageNode(canvas, box) {
  const href = canvas.toDataURL("image/png");
  return svgNode("image", {
    ...box,
    preserveAspectRatio: "none",
    "image-rendering": "pixelated",
    href,
  });
}

const WRITTEN_MARKS = {
  image({ canvas, x, y, width, height }) {
    return imageNode(canvas, { x, y, width, height });
  },
  text({ x, y, text, turn = 0, align = "start", colour, halo, size = 11, weight = 400 }) {
    const outline = halo && {
      stroke: halo,
      "stroke-width": 4,
      "stroke-linejoin": "round",
      "paint-order": "stroke",
    };
    return svgNode(
      "text",
      {
        x,
        y,
        fill: colour,
        "font-size": size,
        "font-weight": weight,
        "text-anchor": align,
        transform: turn ? `rotate(${turn} ${shortNumber(x)} ${shortNumber(y)})` : undefined,
        ...outline,
      },
      text,
    );
  },
  line({ x1, y1, x2, y2, colour, width = 1, dash }) {
    return svgNode("line", {
      x1,
      y1,
      x2,
      y2,
      stroke: colour,
      "stroke-width": width,
      "stroke-dasharray": dash?.join(" "),
    });
  },
  box({ x, y, width, height, colour = "none", line, stroke = 1, round = 0 }) {
    return svgNode("rect", {
      x,
      y,
      width,
      height,
      rx: round || undefined,
      fill: colour,
      stroke: line,
      "stroke-width": line && stroke,
    });
  },
  ring({ x, y, radius, colour, width = 2 }) {
    return svgNode("circle", {
      cx: x,
      cy: y,
      r: radius,
      fill: "none",
      stroke: colour,
      "stroke-width": width,
    });
  },
};
