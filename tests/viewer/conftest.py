"""The viewer as a user has it: served from this process, in a real browser."""

import collections
import http.server
import os
import shutil
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest

from regard.recording import Layer, Recording
from regard.viewer._server import Viewer
from viewer.map_page import MapPage
from viewer.stage import END, MOUNT, Stage

WORDS = ["the", "cat", "saw", "the", "dog", "and", "the", "bird", "saw", "the", "cat"]


def made(tokens=24, layers=2, heads=4, key_heads=2, size=8, seed=0, dtype=np.float32, **options):
    """A recording of random numbers, with weights that are not all alike."""
    random = np.random.default_rng(seed)

    def numbers(*shape):
        return (1.5 * random.standard_normal(shape)).astype(dtype)

    texts = [(" " if n else "") + WORDS[n % len(WORDS)] for n in range(tokens)]
    made = [
        Layer(
            numbers(heads, tokens, size),
            numbers(key_heads, tokens, size),
            numbers(key_heads, tokens, size),
            **{"causal": True, **options},
        )
        for _ in range(layers)
    ]
    return Recording(texts, made, model="made")


@pytest.fixture(scope="session")
def recording():
    """24 tokens, 2 layers of 4 heads that share 2 key heads, causal."""
    return made()


@pytest.fixture(scope="session")
def stage():
    """What most tests are served by, and their pages stay in."""
    stage = Stage(made(4))
    yield stage
    stage.close()


@pytest.fixture
def serve(stage):
    """Serves recordings, ``serve(recording, another) -> address``, until the test ends."""
    viewers = []
    stage.is_free = True

    def start(*recordings, names=None, corpus=None):
        if stage.is_free:
            stage.serve(recordings, names, corpus)
            return stage.address
        viewers.append(Viewer(recordings, names, corpus=corpus))
        return viewers[-1].address

    yield start
    for viewer in viewers:
        viewer.close()


def _chromium():
    """Path of a Chromium on this machine, or None for Playwright's own.

    The one without windows takes a fifth less of the processor for the same pages.
    """
    names = ("chromium-headless-shell", "chromium", "chromium-browser")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="session")
def browsers():
    """Chromium at a device-pixel ratio, ``browsers(1.25)``: started once for each.

    The ratio is that of the whole browser; emulated ratios hide faults.
    """
    playwright_api = pytest.importorskip("playwright.sync_api")
    started = {}
    with playwright_api.sync_playwright() as playwright:

        def start(device_scale_factor):
            if device_scale_factor not in started:
                arguments = ["--no-sandbox", f"--force-device-scale-factor={device_scale_factor}"]
                try:
                    started[device_scale_factor] = playwright.chromium.launch(
                        executable_path=_chromium(), args=arguments
                    )
                except playwright_api.Error as error:
                    _no_browser(str(error).splitlines()[0])
            return started[device_scale_factor]

        yield start
        for browser in started.values():
            browser.close()


def is_required():
    """Whether what is not installed fails, as in CI, instead of being skipped."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def _no_browser(reason):
    if is_required():
        pytest.fail(f"CI needs a Chromium: {reason}")
    pytest.skip(f"no Chromium to test in: {reason}; apt-get install chromium-headless-shell")


@pytest.fixture(scope="session")
def browser(browsers):
    """Chromium at the device-pixel ratio 1."""
    return browsers(1)


@pytest.fixture(scope="session")
def idle_pages():
    """Pages that tests are done with, by how they were opened.

    Opening the viewer in one of them takes less than half the work of a new one, and again less
    than half where the page is on the stage.
    """
    return collections.defaultdict(list)


class _Empty(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def empty_page():
    """Address of a page with nothing on it, of the viewer's host.

    A page that waits there keeps its process: after about:blank, opening the viewer costs 1.7 times
    as much.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def open_page(browsers, idle_pages, empty_page, stage, serve):
    """Opens an address, ``open_page(address, device_scale_factor=1, size=(1280, 720))``.

    When the test ends, the console must be empty and every request must have gone to the server.
    What a test expects there it takes out of ``page.complaints``; ``page.requests`` has every URL.
    With ``shared=False`` no other test has the page before or after.
    """
    opened = []

    def open_one(address, device_scale_factor=1, size=(1280, 720), shared=True, **options):
        idle = idle_pages[device_scale_factor, size, *sorted(options.items())] if shared else []
        page = idle.pop() if idle else _new_page(browsers, device_scale_factor, size, options)
        page.complaints, page.requests = [], []
        listeners = {
            "console": lambda message: page.complaints.append(message.text),
            "pageerror": lambda error: page.complaints.append(str(error)),
            "request": lambda request: page.requests.append(request.url),
        }
        for event, listener in listeners.items():
            page.on(event, listener)
        scheme = options.get("color_scheme", "null")
        opened.append((page, address, listeners, idle if shared else None, scheme))
        _show(page, address, stage)
        return page

    yield open_one
    for page, address, listeners, idle, scheme in opened:
        complaints, requests = list(page.complaints), list(page.requests)
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        if idle is None:
            page.context.close()
        else:
            _leave(page, empty_page if address.startswith("http") else "about:blank", scheme, stage)
            idle.append(page)
        assert not complaints
        assert not [url for url in requests if not _is_own(url, address)]


def _new_page(browsers, device_scale_factor, size, options):
    # A viewport of Playwright's own emulates a ratio of 1: other ratios need a real window.
    real = device_scale_factor != 1
    viewport = {"no_viewport": True} if real else {"viewport": dict(zip(("width", "height"), size))}
    page = browsers(device_scale_factor).new_context(**options, **viewport).new_page()
    if real:
        _size_window(page, *size)
    return page


def _show(page, address, stage):
    """Opens the address; on the stage, where a page has been ended, by mounting another."""
    place, _, hash = address.partition("#")
    if page.url == stage.address == place:
        page.evaluate(MOUNT, hash and f"#{hash}")
    else:
        page.goto(address)


def _leave(page, place, scheme, stage):
    """Takes what a test did to the page back: its routes, its media, the pointer, the history."""
    page.unroute_all(behavior="ignoreErrors")
    if not (page.url.startswith(stage.address) and page.evaluate(END)):
        page.goto(place)
    page.emulate_media(color_scheme=scheme)
    page.mouse.move(-1, -1)
    session = page.context.new_cdp_session(page)
    session.send("Page.resetNavigationHistory")
    session.detach()


def _size_window(page, width, height):
    """Gives the page's window the size, in CSS pixels, in which the page has about as much."""
    session = page.context.new_cdp_session(page)
    window = session.send("Browser.getWindowForTarget")["windowId"]
    frame = page.evaluate("() => [outerWidth - innerWidth, outerHeight - innerHeight]")
    bounds = {"width": width + round(frame[0]), "height": height + round(frame[1])}
    session.send("Browser.setWindowBounds", {"windowId": window, "bounds": bounds})
    session.detach()


@pytest.fixture
def open_map(serve, open_page):
    """Opens the map of recordings: ``open_map(recording, …, hash="L0H1", **page options)``."""

    def open_one(*recordings, hash="L0H0", **options):
        return MapPage(open_page(f"{serve(*recordings)}#{hash}", **options))

    return open_one


def _is_own(url, address):
    """Whether a request stays with the server, or in the page itself."""
    if url.startswith(("data:", "blob:")):
        return True
    there, here = urlsplit(url), urlsplit(address)
    if there.scheme == "file":
        return there.path == here.path
    return (there.scheme, there.netloc) == (here.scheme, here.netloc)
