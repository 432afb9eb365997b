"""The map as the tests read it: its pixels, what it says it shows, and what float64 says."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image

from regard.recording import Layer, Recording
from regard.viewer import _server

PAGE = Path(_server.__file__).parent / "page"
COLOURS = (PAGE / "drawing" / "colours.js").read_text()
ENTRIES = int(re.search(r"ENTRIES = (\d+)", COLOURS)[1])
IDLE = ".regard-map[data-idle=true]"
CELLS = ".regard-map-cells >> nth=0"
PAPER = {False: (253, 251, 246), True: (22, 21, 29)}

CANVAS = """(n) => document.querySelectorAll(".regard-map-cells")[n].toDataURL().split(",")[1]"""


def decoded(png):
    """(height, width, 3 or 4) uint8 of a PNG."""
    return np.array(Image.open(io.BytesIO(png)))


def constant(name, source=COLOURS):
    """A JSON-like constant of colours.js, or of another module's text."""
    text = re.search(rf"const {name} = (.*?);", source, re.DOTALL)[1]
    text = re.sub(r"(\w+):", r'"\1":', text)
    return json.loads(re.sub(r",(\s*[\]}])", r"\1", text))


def table(name):
    """``(ENTRIES, 3)``: the stops of colours.js, sampled as it samples them."""
    stops = np.array(constant(name), float)
    place = np.arange(ENTRIES) / (ENTRIES - 1) * (len(stops) - 1)
    low = np.minimum(np.floor(place).astype(int), len(stops) - 2)
    mixed = stops[low] + (place - low)[:, None] * (stops[low + 1] - stops[low])
    return np.floor(mixed + 0.5).astype(int)


def entries(values, low, high):
    """The entry of each value that is linear from low to high; -1 for NaN."""
    with np.errstate(invalid="ignore"):
        place = np.floor((values - low) / (high - low) * (ENTRIES - 1) + 0.5)
    return np.where(np.isnan(place), -1, np.clip(place, 0, ENTRIES - 1)).astype(int)


def made(tokens=300, heads=2, key_heads=1, seed=0, links=(), queries=None, size=16, **options):
    """A recording with one layer, whose ``links`` (query, key) have weights near 1 in head 0."""
    random = np.random.default_rng(seed)
    Lq = tokens if queries is None else queries
    query, key = (
        random.standard_normal((h, n, size)).astype("f")
        for h, n in ((heads, Lq), (key_heads, tokens))
    )
    if links:  # directions of their own, and nobody else near them
        query *= 0.3
        key *= 0.3
    for i, j in links:
        direction = random.standard_normal(size)
        query[0, i] = key[0, j] = 9 * direction / np.linalg.norm(direction)
    texts = [f" t{n}" for n in range(tokens)]
    if queries is not None:
        options["query_tokens"] = [f" q{n}" for n in range(queries)]
    named = options.pop("query_tokens", None)
    value = random.standard_normal((key_heads, tokens, 4)).astype("f")
    options = {"causal": queries is None, **options}
    return Recording(texts, [Layer(query, key, value, **options)], query_tokens=named)


def log_weights(recording, head, layer=0):
    """``(Lq, Lk)`` float64 ln(weight) of one head, from q and k alone; NaN is invisible."""
    found = recording.layers[layer]
    q = found.query[head].astype(float)
    k = found.key[head // (found.heads // found.key_heads)].astype(float)
    scores = q @ k.T / np.sqrt(q.shape[1])
    options = found.options
    valid = options.get("key_lengths", len(k))
    row = (np.arange(len(q)) + (valid - len(q) if len(q) <= valid else 0))[:, None]
    row = row if options.get("causal") or options.get("window") else np.arange(len(q))[:, None]
    column = np.arange(len(k))[None]
    seen = column < valid
    seen = seen & (column <= row) if options.get("causal") else seen | (row < 0)
    if options.get("window"):
        left, right = options["window"]
        seen = seen & (column >= row - left) if left is not None else seen
        seen = seen & (column <= row + right) if right is not None else seen
    logs = np.where(seen, scores, -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):  # in place: they may be many
        logs -= logs.max(1, keepdims=True)
        logs -= np.log(np.exp(logs, out=scores).sum(1, keepdims=True))
    logs[~np.broadcast_to(seen, logs.shape)] = np.nan
    return logs


def pooled(logs, level, plane):
    """Bins of 2^level × 2^level: the strongest, or the mean over queries of the sum over keys."""
    side = 2**level
    if side == 1:
        return logs
    rows, columns = (np.arange(0, n, side) for n in logs.shape)

    def over(fold, x):
        return fold.reduceat(fold.reduceat(x, rows, 0), columns, 1)

    largest = over(np.fmax, logs)  # NaN where all are
    if plane == "max":
        return largest
    there = np.minimum(side, logs.shape[0] - rows)
    with np.errstate(divide="ignore"):
        mean = np.log(over(np.add, np.nan_to_num(np.exp(logs))) / there[:, None])
    return np.where(np.isnan(largest), np.nan, mean)


def pixel_bins(start, zoom, level, pixels, count):
    """The bin in the centre of each pixel, -1 where there is none."""
    bins = np.floor((start + (np.arange(pixels) + 0.5) / zoom) / 2**level).astype(int)
    return np.where((bins >= 0) & (bins < count), bins, -1)


class MapPage:
    """A page that shows a map."""

    def __init__(self, page):
        self.page = page
        self.wait()

    def wait(self):
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        self.page.wait_for_selector(IDLE)

    def show(self, address):
        """Goes to ``L0H0&zoom=2``, and waits until it is drawn."""
        self.page.evaluate("(hash) => { location.hash = hash; }", address)
        self.page.wait_for_timeout(30)
        self.wait()

    def view(self, n=0):
        """{x, y, zoom, level, paints}: what the map says that it shows."""
        dataset = self.page.evaluate(
            "(n) => ({...document.querySelectorAll('.regard-map-cells')[n].dataset})", n
        )
        return {name: float(value) for name, value in dataset.items()}

    def selection(self):
        """The address, as a dict."""
        self.page.wait_for_timeout(300)
        parts = self.page.evaluate("() => location.hash").lstrip("#").split("&")
        return dict(part.split("=") for part in parts if "=" in part)

    def readout(self, part=""):
        """The readout, once it has ``part``: it follows the pointer in another task."""
        self.page.wait_for_function(
            "(part) => document.querySelector('.regard-readout').textContent.includes(part)",
            arg=part,
        )
        return self.page.locator(".regard-readout").inner_text()

    def canvas(self, n=0):
        """(height, width, 4): what the map drew."""
        return decoded(base64.b64decode(self.page.evaluate(CANVAS, n)))

    def screen(self, ratio, n=0):
        """(height, width, 3): the device pixels of the screen where the cells lie."""
        self.page.evaluate("() => document.querySelector('.regard-map').classList.add('bare')")
        picture = self._screenshot()[..., :3]
        assert abs(self.page.evaluate("() => devicePixelRatio") - ratio) < 1e-6
        self.page.evaluate("() => document.querySelector('.regard-map').classList.remove('bare')")
        left, top, width, height = self.page.evaluate(
            """(n) => {
              const canvas = document.querySelectorAll(".regard-map-cells")[n];
              const box = canvas.getBoundingClientRect();
              return [box.left, box.top, canvas.width, canvas.height];
            }""",
            n,
        )
        x, y = (int(np.floor(corner * ratio + 0.5)) for corner in (left, top))
        return picture[y : y + height, x : x + width].astype(int)

    def _screenshot(self):
        """As Playwright's, with a PNG that takes half the time."""
        session = self.page.context.new_cdp_session(self.page)
        quick = {"format": "png", "optimizeForSpeed": True}
        png = session.send("Page.captureScreenshot", quick)["data"]
        session.detach()
        return decoded(base64.b64decode(png))

    def place(self, query, key, n=0):
        """CSS pixels in the window of the middle of the bin that holds a pair."""
        view = self.view(n)
        left, top, css, pixels = self.page.evaluate(
            """(n) => {
              const canvas = document.querySelectorAll(".regard-map-cells")[n];
              const box = canvas.getBoundingClientRect();
              return [box.left, box.top, box.width, canvas.width];
            }""",
            n,
        )
        side = 2 ** view["level"]
        middle = [(token // side + 0.5) * side for token in (key, query)]
        across, down = (
            (token - view[axis]) * view["zoom"] * css / pixels
            for token, axis in zip(middle, ("x", "y"), strict=True)
        )
        return left + across, top + down


def expected_entries(view, shape, values, low, high):
    """The table entry of each pixel; -1 invisible, -2 where there are no tokens."""
    rows = pixel_bins(view["y"], view["zoom"], int(view["level"]), shape[0], values.shape[0])
    columns = pixel_bins(view["x"], view["zoom"], int(view["level"]), shape[1], values.shape[1])
    found = entries(values, low, high)[rows[:, None], columns[None, :]]
    return np.where((rows < 0)[:, None] | (columns < 0)[None], -2, found)


def as_numbers(colours):
    """One number for each (..., 3) of 0 to 255."""
    return np.asarray(colours, np.int32) @ np.int32([1 << 16, 1 << 8, 1])


def assert_pixels(pixels, wanted, colours="RAMP", dark=False):
    """Each pixel has its entry's colour, or that of the entry beside it."""
    lut = as_numbers(table(f"{colours}_DARK" if dark else colours))
    invisible = constant("INVISIBLE")["dark" if dark else "light"]
    invisible, paper, found = (as_numbers(x) for x in (invisible, PAPER[dark], pixels))
    right = found == np.where(wanted == -1, invisible, paper)
    right &= wanted < 0
    for step in (-1, 0, 1):
        right |= (wanted >= 0) & (found == lut[np.clip(wanted + step, 0, ENTRIES - 1)])
    wrong = np.argwhere(~right)
    assert not len(wrong), (
        f"{len(wrong)} of {right.size} pixels are wrong, first {wrong[0]}:"
        f" {pixels[tuple(wrong[0])]} for entry {wanted[tuple(wrong[0])]}"
    )
