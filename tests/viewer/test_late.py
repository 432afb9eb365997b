"""Answers that come late, in another order, or after what asked for them has gone."""

import json
import re

import numpy as np
import pytest

from viewer.map_page import made
from viewer.pages import address_of, held, is_chosen, is_said, spoken
from viewer.test_alignment import spelled
from viewer.test_lines import is_drawn, token

WAITING = ".regard-map-waiting"
PICTURE_MS = 1600  # after which the first picture is no longer waited for


def asked(page, path, since=0):
    return [url for url in page.requests[since:] if f"/data/{path}?" in url]


def test_heads_of_a_recording_that_was_left_are_not_asked_of_another(serve, open_page):
    address = serve(spoken(layers=4), spoken(layers=1, heads=2, key_heads=2))
    page = open_page(f"{address}#L3H0&query=5&key=2")
    is_chosen(page, 5, 2)
    page.requests.clear()
    page.route("**/data/tile?*", lambda route: route.abort())  # no first picture
    page.reload()
    page.get_by_label("recording").select_option("1")
    page.wait_for_timeout(PICTURE_MS)
    page.wait_for_selector(".regard-head-numbers, .regard-head-tag:not(:empty)")
    assert all("layer=0" in url for url in asked(page, "heads") if "recording=1" in url)
    assert page.get_by_role("alert").filter(has_text="layer").count() == 0
    assert all("ERR_FAILED" in text for text in page.complaints)
    page.complaints.clear()


def test_the_change_of_a_layer_is_not_asked_of_a_recording_that_lacks_it(serve, open_page):
    address = serve(spoken(layers=3), spoken(layers=3, seed=1), spoken(layers=1))
    page = open_page(f"{address}#L2H0&query=5&key=2&compare=side&other=L2H0@1")
    is_chosen(page, 5, 2)
    with held(page, "/data/heads.*recording=0.*first=hidden"):
        page.keyboard.press("h")
        page.wait_for_timeout(100)
        page.get_by_label("recording").select_option("2")
        page.wait_for_selector(".regard-heads >> text=Heads · 1 × 4")
    page.wait_for_timeout(300)
    changes = [url for url in asked(page, "change") if "recording=2" in url]
    assert all("layer=0" in url for url in changes)


def test_lines_of_a_recording_that_was_left_ask_for_no_head_of_another(serve, open_page):
    page = open_page(
        f"{serve(spoken(heads=8), spoken(heads=2, key_heads=2))}#L0H1&view=lines&query=5&key=2"
    )
    is_drawn(page, "L0 heads 1 query 5 key 2")
    with held(page, "/data/tokens.*recording=1"):
        page.get_by_label("recording").select_option("1")
        page.wait_for_timeout(100)
        page.get_by_label("recording").select_option("0")
        page.get_by_label("head", exact=True).first.select_option("7")
        is_drawn(page, "L0 heads 7 query 5 key 2")
    page.wait_for_timeout(300)
    assert not [url for url in asked(page, "tile") if "recording=1" in url and "head=7" in url]


def test_lines_of_a_head_that_was_left_are_no_longer_asked_for(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H0&view=lines&query=5&key=2")
    is_drawn(page, "L0 heads 0 query 5 key 2")

    def part(route):
        found = route.fetch(max_retries=3)
        route.fulfill(response=found, headers={**found.headers, "regard-coverage": "0.5"})

    page.route(re.compile("/data/tile.*head=1&"), part)
    with page.expect_request(re.compile("/data/tile.*head=1&")):
        page.keyboard.press("]")
    page.keyboard.press("]")
    is_drawn(page, "L0 heads 2 query 5 key 2")
    page.wait_for_timeout(300)  # for what is under way
    before = len(page.requests)
    page.wait_for_timeout(900)
    assert not asked(page, "tile", before)


@pytest.mark.parametrize("late", ["query", "key"])
def test_a_choice_that_waited_leaves_a_later_one(serve, open_page, late):
    page = open_page(f"{serve(spoken(causal=True))}#L0H0&view=lines&query=3&key=2")
    is_drawn(page, "L0 heads 0 query 3 key 2")
    path = "/data/row.*query=6" if late == "query" else "/data/column.*key=6"
    with held(page, path):
        token(page, late, 6).click()
        page.wait_for_timeout(50)
        token(page, "query", 4).click()
        page.wait_for_selector(".regard-lines[data-shown^='L0 heads 0 query 4 ']")
        shown = page.locator(".regard-lines").get_attribute("data-shown")
    page.wait_for_timeout(300)
    assert page.locator(".regard-lines").get_attribute("data-shown") == shown


def test_a_choice_that_waited_leaves_an_arrow_that_came_later(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H0&view=lines&query=3&key=2")
    is_drawn(page, "L0 heads 0 query 3 key 2")
    with held(page, "/data/row.*query=6"):
        token(page, "query", 6).click()
        page.wait_for_timeout(50)
        page.keyboard.press("Escape")
        page.locator(".regard-lines h2").click()
        page.evaluate("() => document.activeElement.blur()")
        page.keyboard.press("ArrowLeft")
        is_drawn(page, "L0 heads 0 query 3 key 1")
    page.wait_for_timeout(300)
    assert page.locator(".regard-lines").get_attribute("data-shown").endswith("query 3 key 1")


def test_a_click_on_the_map_that_waited_leaves_another_head_its_pair(open_map):
    page = open_map(made(tokens=1500), hash="L0H0&query=700&key=300")
    is_chosen(page.page, 700, 300)
    with held(page.page, "/data/links.*n=1&rows"):
        page.page.mouse.click(*page.place(1200, 200))
        page.page.wait_for_timeout(100)
        page.page.locator(".regard-head").nth(1).click()
        page.page.wait_for_function("() => location.hash.startsWith('#L0H1')")
    page.page.wait_for_timeout(300)
    assert page.selection()["query"] == "700"


def test_of_two_clicks_on_the_map_the_later_one_counts(open_map):
    page = open_map(made(tokens=1500), hash="L0H0&query=700&key=300")
    is_chosen(page.page, 700, 300)
    with held(page.page, "/data/links.*n=1&rows=1[12]"):
        page.page.mouse.click(*page.place(1200, 200))
        page.page.wait_for_timeout(100)
        page.page.mouse.click(*page.place(400, 200))
        is_said(page.page, "^query (39|40)")
    page.page.wait_for_timeout(300)
    assert page.selection()["query"][:2] in ("39", "40")


def test_steps_keep_the_name_of_the_head_that_they_show(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H1&view=steps&query=5&key=2")
    is_chosen(page, 5, 2)
    title = page.locator(".regard-steps h2")
    with held(page, "/data/steps.*head=2"):
        page.locator(".regard-head").nth(2).click()
        page.wait_for_function("() => location.hash.startsWith('#L0H2')")
        size = page.viewport_size
        page.set_viewport_size({"width": size["width"] - 200, "height": size["height"]})
        page.wait_for_timeout(200)
        assert title.text_content().startswith("Steps of L0H1 ")
        page.set_viewport_size(size)
    page.wait_for_function(
        "() => document.querySelector('.regard-steps h2').textContent.includes('L0H2')"
    )


def test_a_head_that_is_read_does_not_fail_for_the_one_before(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H0&query=5&key=2")
    is_chosen(page, 5, 2)
    page.route("**/data/tile?*head=1&*", lambda route: route.fulfill(status=500, body="broken"))
    page.evaluate("() => { location.hash = 'L0H1&query=5&key=2'; }")
    page.wait_for_selector(f"{WAITING} >> text=no response", timeout=10_000)
    with held(page, "/data/tile.*head=2"):
        page.evaluate("() => { location.hash = 'L0H2&query=5&key=2'; }")
        page.wait_for_selector(f"{WAITING} >> text=reading the rows", timeout=3000)
    assert all("500" in text for text in page.complaints)
    page.complaints.clear()


def test_sums_that_were_hidden_half_read_are_read_when_they_are_shown(open_map):
    page = open_map(spoken(), hash="L0H0&query=5&key=2")
    parts = []

    def part(route):
        found = route.fetch(max_retries=3)
        parts.append(route)
        coverage = "0.5" if len(parts) == 1 else "1"
        route.fulfill(response=found, headers={**found.headers, "regard-coverage": coverage})

    page.page.route("**/data/sums?*", part)
    sums = page.page.get_by_role("button", name="sums", exact=True)
    with page.page.expect_response("**/data/sums?*"):
        sums.click()
    sums.click()
    page.page.wait_for_timeout(800)
    with page.page.expect_response("**/data/sums?*"):
        sums.click()


@pytest.mark.parametrize("path", ["tile", "sums"])
def test_a_hidden_map_asks_for_nothing_and_goes_on_where_it_is_shown(open_map, path):
    page = open_map(spoken(), hash="L0H0&query=5&key=2&sums=shown").page
    coverage = "0.5"

    def part(route):
        found = route.fetch(max_retries=3)
        route.fulfill(response=found, headers={**found.headers, "regard-coverage": coverage})

    page.route(re.compile(f"/data/{path}[?]"), part)
    with page.expect_response(re.compile(f"/data/{path}[?]")):
        page.keyboard.press("]")
    page.get_by_role("button", name="Steps").click()
    page.wait_for_selector(".regard-map", state="hidden")
    page.wait_for_timeout(700)  # for what is on its way
    before = asked(page, path)
    page.wait_for_timeout(1200)
    assert asked(page, path) == before
    with page.expect_response(re.compile(f"/data/{path}[?]")):
        page.get_by_role("button", name="Map", exact=True).click()
    coverage = "1"
    page.wait_for_selector(".regard-map[data-idle=true]")
    assert page.locator(".regard-map").get_attribute("data-read") == "1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("L0H0&compare=difference&other=L0H0@1", "L0H0"),
        ("L0H0&compare=difference&other=L0H0@1", "L0H0&compare=difference&other=L0H0@2"),
        (
            "L0H0&compare=difference&other=L0H0@2",
            "L0H0&recording=1&compare=difference&other=L0H0@2",
        ),
    ],
)
def test_a_map_is_of_the_counterparts_in_the_text_beside_it(open_map, before, after):
    one = [f" w{n}" for n in range(1500)]
    others = [[token for n, token in enumerate(one) if n % 3 != out] for out in (0, 1)]
    recordings = [spelled(one), *(spelled(other, seed=1) for other in others)]
    page = open_map(*recordings, hash=f"{before}&query=9&key=3")
    page.show(f"{after}&query=9&key=3")
    found = page.canvas()
    page.page.reload()
    page.wait()
    assert np.array_equal(page.canvas(), found)


def test_a_pair_of_the_list_leaves_a_hidden_map_its_view(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H0&view=lines&query=5&key=2&zoom=80&x=1&y=1")
    is_drawn(page, "L0 heads 0 query 5 key 2")
    page.locator(".regard-pairs button").last.click()
    page.wait_for_timeout(400)
    assert {"zoom=80", "x=1", "y=1"} <= set(address_of(page).split("#")[1].split("&"))


def test_effects_that_are_half_read_are_asked_for_once_at_a_time(serve, open_page):
    page = open_page(f"{serve(spoken(layers=1, explained=True))}#L0H0&query=5&key=2&plane=effect")
    is_chosen(page, 5, 2)

    def part(route):
        found = route.fetch(max_retries=3)
        facts = json.loads(found.body()) | {"coverage": 0.5, "settled": False}
        route.fulfill(response=found, body=json.dumps(facts))

    page.route("**/data/heads?*effect=gradient*", part)
    page.keyboard.press("e")
    page.evaluate("() => { document.regardPage.context.selection.set({ kind: 'gradient' }); }")
    for _ in range(5):
        page.wait_for_timeout(150)
        page.evaluate("() => document.regardPage.context.selection.again()")
    page.wait_for_timeout(300)
    before = len(page.requests)
    page.wait_for_timeout(2300)
    assert 1 <= len(asked(page, "heads", before)) <= 3


def test_lines_of_a_tile_that_the_map_no_longer_needs_are_drawn(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H0&query=5&key=2&unit=token")
    is_chosen(page, 5, 2)
    with held(page, "/data/tile.*head=1"):
        page.keyboard.press("]")
        is_said(page, "L0H1")
        page.keyboard.press("v")
        page.wait_for_selector(".regard-lines:visible")
    is_drawn(page, "L0 heads 1 query 5 key 2")
