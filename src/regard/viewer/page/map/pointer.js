// Wheel, drag, pinch and clicks on a frame of the map.

/** @import { Frame } from "./frame.js" */
/** @import { HeadMapView } from "./map.js" */

/** @typedef {{x: number, y: number}} Point in device pixels of the cells */

const FAR = 3; // CSS pixels that turn a press into a drag
const WHEEL = 0.0016; // ln of the zoom for a pixel of the wheel
const PINCH = 0.01; // and of a trackpad's pinch
const LINE = 16; // CSS pixels

/**
 * @param {Frame} frame
 * @param {HeadMapView} map
 */
export function listenToPointer(frame, map) {
  const canvas = frame.cells;
  /** @type {Map<number, Point>} where each pointer is that is pressed */
  const pressed = new Map();
  /** @type {{start: Point, far: boolean} | null} */
  let drag = null;

  // The browser draws the canvas from the device pixel that is nearest to its corner.
  const placeOf = (/** @type {MouseEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    const { ratio } = frame.size;
    return {
      x: event.clientX * ratio - Math.round(box.left * ratio),
      y: event.clientY * ratio - Math.round(box.top * ratio),
    };
  };
  const hover = (/** @type {Point | null} */ place) => {
    frame.pointer = place;
    map.hover(frame);
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    map.stage.blur(); // the focus comes anew, without the ring that the keyboard left
    canvas.setPointerCapture(event.pointerId);
    const place = placeOf(event);
    pressed.set(event.pointerId, place);
    drag = { start: place, far: pressed.size > 1 || Boolean(drag?.far && pressed.size > 1) };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag || !pressed.has(event.pointerId)) return hover(placeOf(event));
    const [before, place] = [spanOf(pressed), placeOf(event)];
    pressed.set(event.pointerId, place);
    const after = spanOf(pressed);
    const moved = Math.hypot(place.x - drag.start.x, place.y - drag.start.y);
    if (!drag.far && moved < FAR * frame.size.ratio) return;
    if (!drag.far && pressed.size === 1) [before.x, before.y] = [drag.start.x, drag.start.y];
    drag.far = true;
    hover(null);
    map.panBy(after.x - before.x, after.y - before.y);
    if (pressed.size > 1 && before.apart > 0)
      map.zoomAt(after.apart / before.apart, after.x, after.y);
  });
  const release = (/** @type {PointerEvent} */ event) => {
    if (!pressed.delete(event.pointerId)) return;
    if (pressed.size) return;
    const bin = event.type === "pointerup" && !drag?.far ? frame.binAt(placeOf(event)) : null;
    drag = null;
    if (bin) map.choose(frame, bin.row, bin.column);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("dblclick", (event) => {
    const { x, y } = placeOf(event);
    map.zoomAt(event.shiftKey ? 0.5 : 2, x, y);
  });
  const wheel = (/** @type {WheelEvent} */ event) => {
    event.preventDefault();
    const pixels = event.deltaY * (event.deltaMode === 1 ? LINE : event.deltaMode === 2 ? 400 : 1);
    const speed = event.ctrlKey && Math.abs(pixels) < 50 ? PINCH : WHEEL;
    const { x, y } = placeOf(event);
    map.zoomAt(Math.exp(-pixels * speed), x, y);
  };
  canvas.addEventListener("wheel", wheel, { passive: false });
}

/**
 * The middle of the pressed pointers, and how far apart they are.
 * @param {Map<number, Point>} pressed
 */
function spanOf(pressed) {
  const places = [...pressed.values()];
  const mean = (/** @type {"x" | "y"} */ name) =>
    places.reduce((sum, place) => sum + place[name], 0) / places.length;
  const [a, b = a] = places;
  return { x: mean("x"), y: mean("y"), apart: Math.hypot(a.x - b.x, a.y - b.y) };
}
