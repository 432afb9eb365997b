"""The viewer in Chromium: how soon there is a picture, and how fast it answers.

    python benchmarks/viewer.py [--threads N] [--quick] [--json FILE]

The server is `regard view` in a process of its own, and a page is timed by its own clock, from the
beginning of its navigation. A picture is whole when every tile that is shown has come; it is exact
when every row has been read. Pans and zooms are made by the wheel and by dragging, at places drawn
by chance, and are answered when the picture is whole again. A repaint is the work that the page
does in one frame, a hover all that it does after the pointer has moved.

A sentence is timed from the start of the command, in a browser that runs already: until its address
is printed, and until its picture is whole; then from a key pressed in the page's input, after which
the page waits 0.2 s for another, to the picture of the longer text.

BertViz and CircuitsVis are given the weights of the same layers. Both load scripts from a public
server, without which their pages stay empty: what is timed is making the page and opening it.
"""

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import common
import numpy as np
from playwright.sync_api import sync_playwright

from regard.recording import Layer, Recording

CHROMIUMS = "chromium-headless-shell", "chromium", "chromium-browser"
SIZE = {"width": 1400, "height": 900}
LARGEST_PAGE = 500e6  # bytes that a peer's page may have to be opened at all
MOVES = 60
SENTENCE = "the cat saw the dog and the cat saw the bird"
STARTS = 7

# Counts what the page does in frames and after the pointer moved, and when its map was what.
WATCH = """
(() => {
  const seen = (window.seen = { frames: [], moves: [], whole: null, exact: null, idle: null });
  const request = window.requestAnimationFrame.bind(window);
  let frame = 0;
  window.requestAnimationFrame = (callback) => request((at) => {
    const start = performance.now();
    callback(at);
    const spent = performance.now() - start;
    if (at === frame) seen.frames[seen.frames.length - 1] += spent;
    else seen.frames.push(spent);
    frame = at;
  });
  const add = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, listener, options) {
    if (type !== "pointermove") return add.call(this, type, listener, options);
    return add.call(this, type, function (event) {
      const start = performance.now();
      listener.call(this, event);
      seen.moves.push(performance.now() - start);
    }, options);
  };
  const look = () => {
    const map = document.querySelector("[data-idle]");
    const now = performance.now();
    if (map) {
      const { idle, missing, read } = map.dataset;
      if (missing === "0" && Number(read) > 0) seen.whole ??= now;
      if (idle === "true") seen.exact ??= now;
      seen.missing = Number(missing);
    }
    request(look);
  };
  request(look);
})();
"""


def recording(layers, heads, tokens, size=64):
    """Random queries and keys, causal."""
    random = np.random.default_rng(0)

    def numbers():
        return random.standard_normal((heads, tokens, size), dtype=np.float32)

    made = [Layer(numbers(), numbers(), causal=True) for _ in range(layers)]
    return Recording([f" t{n}" for n in range(tokens)], made, model="random")


class Server:
    """`regard view` on a recording, or on a text."""

    def __init__(self, source, threads):
        command = [sys.executable, "-m", "regard", "view", str(source), "--no-open"]
        environment = {**common.os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        line = ""
        while not (found := re.search(r"http://\S+", line)):
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("regard view ended before it printed its address.")
        self.address = found[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    @property
    def largest_bytes(self):
        """The most memory that it has held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


def new_page(browser):
    """A page that watches itself, and a list that takes the bytes of every answer."""
    page = browser.new_context(viewport=SIZE, bypass_csp=True).new_page()
    page.add_init_script(WATCH)
    taken = []
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: taken.append(event["encodedDataLength"]))
    return page, taken


def opened(browser, server):
    """Milliseconds to a whole picture, seconds to an exact one, bytes of all answers, the page."""
    page, taken = new_page(browser)
    page.goto(server.address)
    page.wait_for_function("seen.exact !== null", timeout=300_000)
    page.wait_for_timeout(1500)  # the thumbnails of the last layers
    seen = page.evaluate("seen")
    return seen["whole"], seen["exact"], sum(taken), page


def moved(page, moves):
    """Milliseconds from every pan or zoom to a whole picture, and those of repaints and hovers."""
    random = np.random.default_rng(0)
    box = page.locator(".regard-map-cells").first.bounding_box()
    waits, hovers, repaints = [], [], []
    for n in range(moves):
        x, y = (
            box[a] + box[b] * random.uniform(0.1, 0.9) for a, b in (("x", "width"), ("y", "height"))
        )
        page.evaluate("seen.moves = [], seen.frames = []")
        page.mouse.move(x, y)
        page.wait_for_timeout(30)
        seen = page.evaluate("seen")
        hovers.append(sum(seen["moves"]) + sum(seen["frames"]))
        page.evaluate("seen.frames = []")
        if n % 3:
            page.mouse.wheel(0, float(random.choice([-400, -200, 200])))
        else:
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            page.mouse.up()
        start = time.perf_counter()
        page.wait_for_function("new Promise(r => requestAnimationFrame(() => r(true)))")
        page.wait_for_function("seen.missing === 0", timeout=60_000)
        waits.append(1000 * (time.perf_counter() - start))
        repaints.append(max(page.evaluate("seen.frames"), default=0.0))
    return waits, hovers, repaints


def high(numbers):
    """The 95th percentile."""
    return statistics.quantiles(numbers, n=20)[-1] if len(numbers) > 1 else numbers[0]


def measure(report, options, browser, layers, heads, tokens):
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.safetensors"
        recording(layers, heads, tokens).save(path)
        with Server(path, options.threads) as server:
            whole, exact, taken, page = opened(browser, server)
            waits, hovers, repaints = moved(page, 2 if options.quick else MOVES)
            page.context.close()
            memory = server.largest_bytes
    figures = {
        "whole_ms": whole, "exact_ms": exact, "bytes": taken, "answer_ms": high(waits),
        "hover_ms": high(hovers), "repaint_ms": high(repaints), "server_bytes": memory,
    }  # fmt: skip
    report.row(
        f"{layers} x {heads} heads, T = {tokens}", f"{whole:.0f} ms", f"{exact / 1000:.2f} s",
        f"{taken / 1e6:.2f} MB", f"{high(waits):.0f} ms", f"{high(hovers):.1f} ms",
        f"{high(repaints):.1f} ms", f"{memory / 1e6:.0f} MB",
        **figures, layers=layers, heads=heads, tokens=tokens,
    )  # fmt: skip


def sentence(browser, threads):
    """Seconds from the command to its address and a whole picture, and from a key to the next."""
    start = time.time()
    with Server(SENTENCE, threads) as server:
        printed = time.time() - start
        page, _ = new_page(browser)
        page.goto(server.address)
        page.wait_for_function("seen.whole !== null", timeout=60_000)
        origin = page.evaluate("performance.timeOrigin + seen.whole") / 1000
        page.wait_for_selector("[data-state=read]")
        page.locator("textarea").press("End")
        pressed = time.perf_counter()
        page.locator("textarea").press("s")
        page.wait_for_function(
            f"document.querySelector('.regard-tokens')?.textContent.endsWith('{SENTENCE[-4:]}s')"
            " && document.querySelector('[data-idle=true]')"
        )
        typed = time.perf_counter() - pressed
        page.context.close()
    return printed, origin - start, typed


def measure_sentence(report, options, browser):
    """One row: medians of several starts."""
    runs = [sentence(browser, options.threads) for _ in range(1 if options.quick else STARTS)]
    printed, whole, typed = (statistics.median(column) for column in zip(*runs))
    report.row(
        f"{len(SENTENCE.split())} words", f"{printed:.2f} s", f"{whole:.2f} s", f"{typed:.2f} s",
        printed_s=printed, whole_s=whole, typed_s=typed, runs=runs,
    )  # fmt: skip


def bertviz(weights, tokens):
    """The page of BertViz's head view."""
    import torch
    from bertviz import head_view

    layers = [torch.from_numpy(x)[None] for x in weights]
    return head_view(layers, tokens, html_action="return").data


def circuitsvis(weights, tokens):
    """The page of CircuitsVis's attention heads, one layer."""
    from circuitsvis.attention import attention_heads

    return str(attention_heads(attention=weights[0], tokens=tokens))


PEERS = {"bertviz": bertviz, "circuitsvis": circuitsvis}


def measure_peer(report, browser, name, layers, heads, tokens):
    """One row: making its page, and opening it."""
    if find_spec(name) is None:
        report.note(f"{name} is not installed.")
        return
    made = recording(layers, heads, tokens)
    weights = [np.asarray(x) for x in made.weights]
    start = time.perf_counter()
    text = PEERS[name](weights, list(made.tokens))
    seconds = time.perf_counter() - start
    opening = None
    if len(text) <= LARGEST_PAGE:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            path.write_text(f"<meta charset=utf-8>{text}", "utf-8")
            page, _ = new_page(browser)
            page.goto(path.as_uri(), wait_until="domcontentloaded", timeout=300_000)
            opening = page.evaluate("performance.now()")
            page.context.close()
    report.row(
        f"{name}, {layers} x {heads} heads, T = {tokens}", f"{seconds:.2f} s",
        f"{len(text) / 1e6:.1f} MB",
        "not tried: too large" if opening is None else f"{opening / 1000:.2f} s",
        peer=name, layers=layers, heads=heads, tokens=tokens, seconds=seconds, bytes=len(text),
        opening_ms=opening,
    )  # fmt: skip


def main():
    """Three tables."""
    options = common.read_options(__doc__, threads=common.CORES)
    report = common.Report("viewer", options, packages=("starlette", "playwright"))
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        report.table(
            "The viewer", "recording", "whole picture", "exact", "over the wire",
            "answer, 95 %", "hover, 95 %", "repaint, 95 %", "server's memory",
        )  # fmt: skip
        shapes = [(12, 12, 512), (1, 1, 8192), (1, 1, 100_000)]
        for shape in [(1, 2, 40)] if options.quick else shapes:
            measure(report, options, browser, *shape)
        report.table(
            "A sentence", "text", "address printed", "whole picture", "picture after a key"
        )
        measure_sentence(report, options, browser)
        report.table(
            "Other viewers' pages", "viewer", "making it", "its size", "opening it",
        )  # fmt: skip
        peers = [("bertviz", 12, 12, 128), ("bertviz", 12, 12, 512)]
        peers += [("circuitsvis", 1, 12, 128), ("circuitsvis", 1, 12, 512)]
        for peer in [("bertviz", 1, 2, 40)] if options.quick else peers:
            measure_peer(report, browser, *peer)
        browser.close()
    report.save()


if __name__ == "__main__":
    main()
