"""The whole page as the tests of it read it, and what they show in it."""

import contextlib
import re
import time
from pathlib import Path

import numpy as np

from regard.recording import Layer, Recording

SENTENCE = ["The", " tired", " cat", " slept", " because", " it", " was", " warm"]
STATUS = ".regard-readout"
BAR = ".regard-bar-row"


def spoken(
    tokens=SENTENCE, layers=2, heads=4, key_heads=4, size=8, seed=0, values=True, explained=False,
    **options,
):  # fmt: skip
    """A causal recording of these tokens, with weights that are not all alike."""
    random = np.random.default_rng(seed)

    def numbers(count):
        return (1.4 * random.standard_normal((count, len(tokens), size))).astype("f")

    named = {n: options.pop(n) for n in ("boundary", "query_tokens") if n in options}
    made = [
        Layer(
            numbers(heads), numbers(key_heads), numbers(key_heads) if values else None,
            gradient=0.1 * numbers(heads) if explained else None,
            **{"causal": True, **options},
        )
        for _ in range(layers)
    ]  # fmt: skip
    return Recording(tokens, made, model="spoken", **named)


def crossed(queries=5, keys=7, size=8, seed=1):
    """Queries with a text of their own."""
    random = np.random.default_rng(seed)

    def numbers(count):
        return random.standard_normal((2, count, size)).astype("f")

    layer = Layer(numbers(queries), numbers(keys), numbers(keys))
    texts = [f" k{n}" for n in range(keys)]
    return Recording(texts, [layer], query_tokens=[f" q{n}" for n in range(queries)])


def is_said(page, pattern):
    """Waits until the readout says this, and gives all that it says."""
    page.wait_for_function(
        "([selector, pattern]) =>"
        " new RegExp(pattern).test(document.querySelector(selector)?.textContent ?? '')",
        arg=[STATUS, pattern],
    )
    return page.locator(STATUS).text_content()


def is_chosen(page, query, key, start=0):
    """Waits until this pair is chosen, and the panels show it; query 0 is token ``start``."""
    page.wait_for_selector(f".regard-text[data-shown^='query {query} key {key} ']")
    if "view=steps" in address_of(page):
        page.wait_for_selector(f".regard-steps[data-shown='query {query} key {key}']")
    return is_said(page, rf"query {start + query:,} .* key {key:,} ")


def is_shown(page, query):
    """Waits until the text panel shows this query."""
    page.wait_for_selector(f".regard-text[data-shown^='query {query} key ']")


def address_of(page):
    """The page's address as it is now; ``page.url`` is a copy, which comes a moment later."""
    return page.evaluate("() => location.href")


@contextlib.contextmanager
def held(page, path):
    """Requests of this path wait until the block ends, and a first one has come."""
    routes = []
    page.route(re.compile(path), lambda route: routes.append(route))
    yield
    end = time.monotonic() + 30
    while not routes:  # a request may be heard of after what the page does next
        assert time.monotonic() < end, f"no request of {path} within 30 s, after {asked(page)}"
        page.wait_for_timeout(10)
    for route in routes:
        route.continue_()
    page.unroute(re.compile(path))


def asked(page):
    """The addresses of the last requests that the page has the answers of."""
    entries = "performance.getEntriesByType('resource').slice(-8).map(entry => entry.name)"
    return [name.rpartition("/")[2] for name in page.evaluate(entries)]


def shown_bars(page):
    """The ranked bars: ``[(position, weight text, × uniform text), …]``."""
    rows = page.locator(BAR).evaluate_all(
        "nodes => nodes.map(n => ['place', 'weight', 'times'].map("
        "part => n.querySelector(`.regard-bar-${part}`).textContent))"
    )
    return [(int(place.replace(",", "")), weight, times) for place, weight, times in rows]


def share(weight):
    """A weight as the page writes it."""
    return f"{100 * weight:.2f} %".replace("-", "−")


def shown_number(text):
    """The float that the page wrote."""
    return float(re.sub(r"[ ×]+$", "", text).replace("−", "-").replace(",", ""))


def saved(page, kind, **choices):
    """Bytes and name of the picture that the dialog saves: ``saved(page, "PNG", dpi=96)``."""
    page.get_by_role("button", name="Export…").click()
    dialog = page.get_by_role("dialog", name="Export a picture")
    dialog.get_by_role("button", name=kind).click()
    labels = {"width": "width, inches", "dpi": "pixels per inch"}
    for name, value in choices.items():
        if name == "marks":
            dialog.get_by_label("selection, rings").set_checked(value)
        elif name == "background":
            dialog.get_by_label("background").select_option(value)
        else:
            dialog.get_by_label(labels[name]).fill(str(value))
    with page.expect_download() as download:
        dialog.get_by_role("button", name="Save").click()
    is_said(page, f"saved: {kind}")
    assert not dialog.is_visible()
    return Path(download.value.path()).read_bytes(), download.value.suggested_filename
