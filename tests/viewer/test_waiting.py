"""What the page shows while it waits, where there is nothing, and when nobody responds."""

import contextlib
import json

import numpy as np
import pytest

from regard.recording import Layer, Recording
from viewer.pages import is_chosen, is_said, spoken

WAITING = ".regard-map-waiting"


@pytest.fixture
def held(serve, open_page):
    """A page whose tiles wait, and a function that lets them come."""

    def start(recording, samples=1):
        routes = []
        page = open_page(f"{serve(recording)}#L0H0&query=5&key=3")

        def about(route):
            found = route.fetch(max_retries=3)
            facts = json.loads(found.body())
            facts["recordings"][0]["layers"][0]["samples"] = samples
            route.fulfill(response=found, body=json.dumps(facts))

        page.route("**/data/about*", about)
        page.route("**/data/tile*", lambda route: routes.append(route))
        page.reload()
        page.wait_for_selector(WAITING)

        def let():
            page.unroute("**/data/tile*")
            for route in routes:
                route.continue_()
            page.wait_for_selector(WAITING, state="hidden")

        return page, let

    return start


@pytest.mark.parametrize(
    ("samples", "words"),
    [(1, "reading the rows"), (32, "reading the first of 32 samples of the rows")],
)
def test_a_map_that_is_not_read_yet_shows_its_shape(held, samples, words):
    page, let = held(spoken(layers=1), samples)
    assert page.locator(WAITING).first.text_content() == words
    shape = page.locator(".regard-map-shape").first
    assert shape.evaluate("n => getComputedStyle(n).clipPath").startswith("polygon(")
    box, cells = (
        page.locator(name).first.bounding_box()
        for name in (".regard-map-shape", ".regard-map-cells")
    )
    assert box["x"] == cells["x"]
    assert box["y"] == cells["y"]
    assert box["height"] > 0.9 * cells["height"]
    let()


def test_a_head_that_sees_everything_waits_as_a_square(held):
    page, let = held(spoken(layers=1, causal=False))
    shape = page.locator(".regard-map-shape").first
    assert shape.evaluate("n => getComputedStyle(n).clipPath") == "none"
    let()


def test_no_strongest_pairs_are_said_to_be_none(serve, open_page):
    array = np.ones((1, 3, 2), np.float32)
    layer = Layer(array, array, array, key_lengths=0)
    page = open_page(serve(Recording(["a", "b", "c"], [layer], query_tokens=["a", "b", "c"])))
    page.wait_for_selector(".regard-pairs >> text=no pair above 0 %")


def test_nothing_of_the_former_head_stays_when_nobody_responds(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H1&query=6&key=3")
    is_chosen(page, 6, 3)
    page.wait_for_selector(".regard-pairs button")
    page.route("**/data/tile?*", lambda route: route.abort())  # asked for again by itself
    page.route("**/data/**", lambda route: route.abort())
    page.keyboard.press("]")
    page.get_by_role("alert").wait_for()
    page.wait_for_selector(".regard-text >> text=not read")
    page.wait_for_selector(".regard-pairs >> text=not read")
    page.wait_for_selector(f"{WAITING} >> text=no response")
    is_said(page, "^L0H2 · not read ")
    page.keyboard.press("ArrowUp")
    is_said(page, "^not read ")
    with page.expect_event("requestfailed", lambda request: "/links?" in request.url):
        page.keyboard.press("ArrowDown")
    for name in (".regard-bar-row", ".regard-token", ".regard-pairs button"):
        assert page.locator(name).count() == 0
    page.unroute("**/data/**")
    page.get_by_role("alert").get_by_role("button", name="Try again").click()
    assert is_chosen(page, 6, 3).startswith("L0H2 · query 6 ")
    page.wait_for_selector(".regard-pairs button")
    page.unroute("**/data/tile?*")
    page.wait_for_selector(WAITING, state="hidden")
    assert all("ERR_FAILED" in text for text in page.complaints)
    page.complaints.clear()


def test_all_that_was_not_read_is_read_once_the_server_responds_again(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H1&query=6&key=3")
    is_chosen(page, 6, 3)
    page.wait_for_selector(".regard-pairs button")
    with contextlib.ExitStack() as failures:
        for path in ("/data/row?", "/data/tile?"):
            page.route(f"**{path}*", lambda route: route.abort(), times=1)
            failures.enter_context(
                page.expect_console_message(lambda said, path=path: path in said.location["url"])
            )
        page.keyboard.press("]")
    page.wait_for_selector(".regard-pairs button")
    assert is_chosen(page, 6, 3).startswith("L0H2 · query 6 ")
    page.wait_for_selector(WAITING, state="hidden")
    page.get_by_role("alert").wait_for(state="hidden")
    assert len(page.complaints) == 2
    page.complaints.clear()
