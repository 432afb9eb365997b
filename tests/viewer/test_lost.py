"""Numbers that are none though their pairs are not masked: in answers, and in the page's words."""

import json
import re
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import pytest

from regard.recording import Recording
from regard.viewer import overview
from regard.viewer.answer import Answers
from regard.viewer.overview import HeadMap
from viewer.explained import KINDS
from viewer.map_page import assert_pixels, constant, decoded, expected_entries, log_weights, made
from viewer.pages import held, is_said, saved, share, shown_bars, spoken

NONE = r"not a number \(NaN\)"
BROKEN = 5  # the query without numbers
WORDLESS = "The weights are not numbers (NaN): a score is NaN or infinite."


def broken(head=1, query=BROKEN, **more):
    """A causal recording, in which a head has no numbers for a query."""
    found = spoken(**more)
    found.layers[0].query[head, query] = np.nan
    return found


def floats(answers, path, **parameters):
    answer = answers.answer(path, urlencode(parameters))
    assert answer.status == 200, answer.body
    return np.frombuffer(answer.body, "<f4") if answer.media_type != "application/json" else answer


def told(answers, path, **parameters):
    return json.loads(floats(answers, path, **parameters).body)


def exact(head=1):
    """``(8, 8)`` ln of the weights, NaN where masked and +∞ where they are no numbers."""
    found = log_weights(spoken(), head)
    found[BROKEN, : BROKEN + 1] = np.inf
    return found


def test_weights_that_are_no_numbers_are_told_from_masked_ones():
    answers, logs, head = Answers([broken()]), exact(), {"layer": 0, "head": 1}
    for query in (4, 5, 6):
        np.testing.assert_allclose(floats(answers, "row", **head, query=query), logs[query], 1e-5)
    for key in (2, 5, 6):
        np.testing.assert_allclose(floats(answers, "column", **head, key=key), logs[:, key], 1e-5)
    tile = {**head, "plane": "max", "level": 0, "row": 0, "column": 0}
    picture = floats(answers, "tile", **tile).reshape(256, 256)[:8, :8]
    np.testing.assert_allclose(picture, logs, rtol=1e-5, atol=1e-6)
    for plane in ("max", "mass"):
        picture = floats(answers, "tile", **{**tile, "plane": plane, "level": 1})
        found = picture.reshape(256, 256)[:4, :4]
        assert np.isposinf(found).tolist() == [
            [row == 2 and key < 3 for key in range(4)] for row in range(4)
        ]
        assert np.isnan(found).tolist() == [[row < key for key in range(4)] for row in range(4)]
    for unit in ({}, {"unit": "word"}):
        pair = [floats(answers, "pair", query=BROKEN, key=key, **unit)[1] for key in (2, 6)]
        np.testing.assert_array_equal(pair, [np.inf, np.nan])


@pytest.mark.parametrize("plane", ["max", "mass"])
def test_a_heatmap_read_in_rounds_keeps_what_is_no_number(plane, monkeypatch):
    monkeypatch.setattr(overview, "DIRECT_WORK", 1000)
    found = made(1000, size=8)
    found.layers[0].query[1, 600] = np.nan
    head = HeadMap(found, 0, 1)
    while head.coverage < 1:
        head.tile(plane, 5, 0, 0)
    for level in (5, 6):
        picture, _ = head.tile(plane, level, 0, 0)
        rows, keys = np.nonzero(np.isposinf(picture))
        assert set(rows) == {600 >> level}
        assert set(keys) == set(range((600 >> level) + 1))
    assert all(np.isfinite(weight) for _, _, weight in head.links(50)[0])


@pytest.mark.parametrize("plane", ["max", "mass"])
def test_a_fine_tile_read_in_rounds_keeps_what_is_no_number(plane, monkeypatch):
    monkeypatch.setattr(overview, "TILE_WORK", 2**20)
    found = made(1000, size=8)
    found.layers[0].query[1, 601] = np.nan
    head, coverage = HeadMap(found, 0, 1), 0
    while coverage < 1:
        picture, coverage = head.tile(plane, 2, 0, 0)
    rows, keys = np.nonzero(np.isposinf(picture))
    assert set(rows) == {150}
    assert set(keys) == set(range(151))


def infinite():
    """A recording with effects, and a value of ∞ for key 3."""
    found = spoken(layers=1, explained=True)
    found.layers[0].value[1, 3, 2] = np.inf
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_effect_that_is_not_finite_is_told_alike_wherever_it_is_asked_for(kind):
    answers = Answers([infinite()])
    where = {"layer": 0, "head": 1, "effect": kind}
    tile = floats(answers, "tile", **where, plane="max", level=0, row=0, column=0)
    tile = tile.reshape(256, 256)[:8, :8]
    assert np.isnan(tile).tolist() == (np.tri(8) == 0).tolist()
    assert not np.isneginf(tile).any()
    assert np.isposinf(tile).any()
    for query in range(8):
        np.testing.assert_allclose(floats(answers, "row", **where, query=query), tile[query], 1e-4)
    for key in range(8):
        np.testing.assert_allclose(floats(answers, "column", **where, key=key), tile[:, key], 1e-4)
    for query, key in ((6, 3), (6, 2), (2, 3)):
        found = floats(answers, "pair", query=query, key=key, effect=kind)[1]
        np.testing.assert_allclose(found, tile[query, key], rtol=1e-4)
    links = told(answers, "links", **where, n=64)["links"]
    assert all(isinstance(effect, float) or effect == "NaN" for *_, effect in links)


def test_a_head_without_numbers_has_no_change_and_the_queries_are_counted():
    answers = Answers([broken(), spoken(seed=1)])
    change = told(answers, "change", layer=0, **{"with": 1})["change"]
    assert [x == "NaN" for x in change] == [False, True, False, False]
    where = {"layer": 0, "head": 1, "with": 1, "with_layer": 0, "with_head": 1, "n": 64}
    found = told(answers, "changed", **where)
    assert found["lost"] == 1
    assert {query for query, *_ in found["links"]} == set(range(8)) - {0, BROKEN}
    assert told(answers, "changed", **{**where, "head": 0})["lost"] == 0


DIFFERENCE = "L0H1&compare=difference&other=L0H2&unit=token"


def test_a_difference_of_what_is_no_number_is_none(open_map):
    page = open_map(broken(), hash=f"{DIFFERENCE}&query={BROKEN}&key=2")
    one, other = (np.exp(log_weights(spoken(), head)) for head in (1, 2))
    wanted = one - other
    wanted[BROKEN] = np.nan
    view, pixels = page.view(), page.screen(1)
    assert_pixels(pixels, expected_entries(view, pixels.shape, wanted, -0.5, 0.5), "DIVERGING")
    page.page.mouse.move(*page.place(BROKEN, 2))
    said = page.readout(f"L0H1 not a number (NaN) − L0H2 {share(other[BROKEN, 2])}")
    assert "=" not in said
    page.page.locator(".regard-map-point", has_text=re.compile(NONE)).wait_for()
    page.page.mouse.move(*page.place(BROKEN, 6))
    assert "=" not in page.readout("L0H1 masked − L0H2 masked")
    page.page.locator(".regard-map-point", has_text="masked").wait_for()
    page.page.mouse.move(2, 2)
    page.page.get_by_role("button", name="auto range").click()
    assert float(page.selection()["span"]) == pytest.approx(np.nanmax(abs(wanted)), rel=0.02)
    page.page.locator(".regard-text", has_text=WORDLESS).wait_for()
    assert not shown_bars(page.page)
    note = page.page.locator(".regard-pairs .regard-note")
    assert note.inner_text() == "Weights of 1 query are not numbers (NaN)."
    listed = page.page.locator(".regard-pairs button")
    assert str(BROKEN) not in {button.get_attribute("data-query") for button in listed.all()}


def test_the_picture_of_a_difference_has_no_colour_where_there_is_no_number(open_map):
    page = open_map(broken(), hash=f"{DIFFERENCE}&query={BROKEN}&key=2")
    picture = decoded(saved(page.page, "PNG", dpi=96)[0])
    zoom = page.view()["zoom"]
    cell = picture[84 + int((BROKEN + 0.5) * zoom), 112 + int(2.5 * zoom)]
    assert cell[:3].tolist() == constant("INVISIBLE")["light"]


def test_a_column_of_differences_says_that_some_are_no_numbers(open_map):
    page = open_map(broken(), hash=f"{DIFFERENCE}&query=6&key=2&side=by").page
    page.locator(".regard-text", has_text="Some weights are not numbers (NaN).").wait_for()
    assert BROKEN not in {place for place, *_ in shown_bars(page)}
    page.evaluate("() => { location.hash = 'L0H1&unit=token&query=6&key=2&side=by'; }")
    page.locator(".regard-text", has_text="Some of its weights are not numbers (NaN).").wait_for()


def test_a_head_without_numbers_is_said_to_have_no_change(open_map):
    page = open_map(broken(), spoken(seed=1), hash="L0H1&compare=difference&other=L0H1@1").page
    words = page.locator(".regard-change p")
    page.locator(".regard-change p", has_text="there is none").wait_for()
    assert re.search(r"most: L\dH\d [\d.]+ %", words.inner_text())
    assert words.inner_text().endswith("Where weights are not numbers (NaN), there is none.")
    box = page.locator(".regard-change-grid").bounding_box()
    page.mouse.move(box["x"] + 1.5 * 13, box["y"] + 5)
    title = page.locator(".regard-change-grid").get_attribute("title")
    assert title == "L0H1 not a number (NaN)"
    page.get_by_label("order").select_option("change")
    page.wait_for_function(  # the last, once all are known
        "() => [...document.querySelectorAll('.regard-head-score')].at(-1).textContent === 'NaN'"
    )


def test_masked_keys_of_a_query_without_numbers_are_said_to_be_masked(open_map):
    page = open_map(broken(), hash=f"L0H1&query={BROKEN}&key=2&unit=token")
    for key, words in ((2, NONE), (6, "masked"), (5, NONE), (7, "masked")):
        page.page.mouse.move(*page.place(BROKEN, key))
        is_said(page.page, f"query {BROKEN} .* key {key} .* {words}")
        page.page.locator(".regard-map-point", has_text=re.compile(words)).wait_for()
    page.page.mouse.move(2, 2)
    for key, words in ((6, "masked"), (2, NONE)):
        page.page.locator(".regard-token").nth(key).hover()
        is_said(page.page, f"query {BROKEN} .* key {key} .* {words}")
    page.show(f"L0H1&query={BROKEN}&key=6&unit=token")
    is_said(page.page, f"query {BROKEN} .* key 6 .*masked")
    page.page.get_by_role("button", name="this pair in every head").click()
    page.page.locator("button[aria-label*='L0H1'][aria-label*='masked']").first.wait_for()
    page.show(f"L0H1&query={BROKEN}&key=2&unit=token")
    page.page.locator("button[aria-label*='L0H1'][aria-label*='not a number']").first.wait_for()


def test_a_chosen_token_whose_weight_is_no_number_stays_one_of_the_pair(open_map):
    page = open_map(broken(), hash=f"L0H1&query={BROKEN}&key=2&unit=token").page
    page.wait_for_selector(f".regard-text[data-shown^='query {BROKEN} key 2 ']")
    page.locator(".regard-token").nth(4).click()
    page.wait_for_selector(f".regard-text[data-shown^='query {BROKEN} key 4 ']")


def test_a_bin_is_read_out_while_others_of_its_row_are_awaited(open_map):
    """It is neither masked nor a number, whatever the tiles beside it will say."""
    found = made(1500)
    found.layers[0].query[1, 601] = np.nan
    page = open_map(found, hash="L0H0")
    level = int(page.view()["level"])
    assert level > 0
    with held(page.page, r"data/tile\?.*head=1.*column=1"):
        tile = rf"head=1.*level={level}&row={601 // 256 >> level}&column=0"
        with page.page.expect_response(re.compile(tile)):
            page.page.evaluate("() => { location.hash = 'L0H1&query=1200&key=700'; }")
        page.page.wait_for_timeout(100)
        for row, column, words in ((601, 100, NONE), (601, 1300, "…"), (100, 300, "masked")):
            page.page.mouse.move(*page.place(row, column))
            is_said(page.page, f"queries {row >> level << level:,}–.* {words}")
    page.wait()
    page.page.mouse.move(*page.place(601, 100))
    is_said(page.page, f"queries 600–.* {NONE}   strongest: 600 ")


def test_lines_say_which_weights_are_no_numbers(serve, open_page):
    page = open_page(f"{serve(broken())}#L0H1&view=lines&unit=token&query={BROKEN}&key=2")
    note = page.locator(".regard-lines .regard-note", has_text="not numbers (NaN)")
    note.wait_for()
    page.locator(".regard-lines-query .regard-lines-token").nth(BROKEN).hover()
    is_said(page, f"query {BROKEN} .* attends to: head 1 {NONE}")
    page.locator(".regard-lines-query .regard-lines-token").nth(4).hover()
    assert "NaN" not in is_said(page, "query 4 .* attends to: head 1 ")


def test_an_effect_that_is_not_finite_is_said_to_be_none(open_map):
    page = open_map(infinite(), hash="L0H1&plane=effect&kind=gradient&query=6&key=3")
    none = "effect not a finite number"
    is_said(page.page, f"key 3 .* {none} · weight")
    page.page.mouse.move(*page.place(6, 3))
    is_said(page.page, f"query 6 .* key 3 .* {none}")
    page.page.mouse.move(*page.place(2, 3))
    is_said(page.page, "query 2 .* key 3 .* masked")
    page.page.locator(".regard-text", has_text="Some effects are not finite numbers.").wait_for()
    listed = page.page.locator(".regard-pairs button em")
    assert "not finite" in listed.all_inner_texts()


def test_rows_of_a_column_that_were_not_read_make_no_difference(serve, open_page):
    """A response without all rows has NaN for the others, as for masked ones."""
    address = f"{serve(spoken(), spoken(seed=1))}#L0H1&compare=difference&other=L0H1@1"

    def half(route):
        found = route.fetch(max_retries=3)
        if parse_qs(urlsplit(route.request.url).query).get("recording") != ["1"]:
            return route.fulfill(response=found)
        numbers = np.frombuffer(found.body(), "<f4").copy()
        numbers[5:] = np.nan
        headers = {**found.headers, "regard-coverage": "0.625"}
        return route.fulfill(response=found, headers=headers, body=numbers.tobytes())

    page = open_page(address)
    page.wait_for_selector(".regard-text[data-shown]")
    page.route(re.compile("data/column"), half)
    page.get_by_role("button", name="attended by").click()
    page.locator(".regard-text", has_text="62 % of the rows read.").wait_for()
    assert {place for place, *_ in shown_bars(page)} <= set(range(5))
    page.unroute(re.compile("data/column"))
    page.wait_for_function(
        "() => !document.querySelector('.regard-text').textContent.includes('rows read')"
    )


def test_weights_that_exist_have_sums():
    weights = np.tril(np.full((1, 4, 4), 0.5))
    weights[0, range(4), range(4)] += 1 - weights[0].sum(-1)
    weights = np.clip(weights, 0, None)
    weights /= weights.sum(-1, keepdims=True)
    found = Recording.from_weights(list("abcd"), [weights.astype("f")])
    sums = floats(Answers([found]), "sums", layer=0, head=0)
    np.testing.assert_allclose(sums, [*np.ones(4), *weights[0].sum(0)], rtol=1e-5)


def test_the_exported_file_tells_them_apart_too(open_page, tmp_path):
    path = tmp_path / "broken.html"
    broken().export(path, other=spoken(seed=1))
    page = open_page(f"{path.as_uri()}#L0H1&compare=difference&other=L0H1@1&query={BROKEN}&key=2")
    page.locator(".regard-text", has_text=WORDLESS).wait_for()
    note = page.locator(".regard-pairs .regard-note")
    page.locator(".regard-pairs button").first.wait_for()
    assert note.inner_text() == "Weights of 1 query are not numbers (NaN)."
    page.locator(".regard-change p", has_text="there is none").wait_for()
