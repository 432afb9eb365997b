"""Several heads and several queries: their means, from the server's numbers to the page."""

import json
import re

import numpy as np
import pytest

from regard.recording import Layer, Recording
from regard.viewer.answer import Answers
from viewer.map_page import assert_pixels, expected_entries, log_weights
from viewer.pages import address_of, crossed, is_chosen, is_said, share, shown_bars, spoken
from viewer.test_words import PIECES, by_words

HEADS = [0, 1, 3]


@pytest.fixture
def show(serve, open_page):
    """Opens a recording: ``show(recording, "L0H1&query=5", **page options)``."""
    return lambda recording, hash="", **options: open_page(f"{serve(recording)}#{hash}", **options)


def mean_of(recording, heads=HEADS, layer=0):
    """``(Lq, Lk)``: the mean of some heads' weights."""
    return np.nan_to_num(np.exp([log_weights(recording, head, layer) for head in heads])).mean(0)


def floats(recording, path, query):
    answers = Answers([recording])
    answer = answers.answer(path, f"layer=0&{query}")
    answers.close()
    assert answer.status == 200, answer.body
    return np.exp(np.frombuffer(answer.body, "<f4"))


def refused(query, path="row"):
    answer = Answers([spoken()]).answer(path, f"layer=0&{query}")
    assert answer.status == 400
    return answer.body.decode()


def test_rows_and_columns_of_several_heads_are_their_mean():
    recording, mean = spoken(), mean_of(spoken())
    row, column = (
        floats(recording, *asked)
        for asked in (("row", "heads=3,0,1&query=5"), ("column", "heads=0,1,3&key=2"))
    )
    assert np.isnan(row).tolist() == [False] * 6 + [True] * 2
    np.testing.assert_allclose(np.nan_to_num(row), mean[5], rtol=1e-5)
    np.testing.assert_allclose(np.nan_to_num(column), mean[:, 2], rtol=1e-5)


def broken():
    """The recording above, whose head 1 has no numbers for query 3."""
    recording = spoken()
    recording.layers[0].query[1, 3] = np.inf
    return recording


def test_a_mean_with_a_weight_that_is_no_number_is_none():
    """At the keys that the query sees, however its neighbours are asked for; others are masked."""
    recording = broken()
    for asked in ("head=1&queries=2-6", "head=1&queries=2-4,5-6", "heads=0,1&queries=2-3,3-6"):
        row = floats(recording, "row", asked)
        assert np.isinf(row).tolist() == [True] * 4 + [False] * 4, asked
        assert np.isnan(row).tolist() == [False] * 6 + [True] * 2, asked
    hidden = "heads=0,1,3&queries=2-3,4-6", "head=0&queries=2-6"
    assert all(np.isfinite(floats(recording, "row", asked)[:6]).all() for asked in hidden)
    row = floats(recording, "row", "heads=0,1,3&query=3")
    assert np.isinf(row).tolist() == [True] * 4 + [False] * 4
    column = floats(recording, "column", "heads=0,1,3&key=2")
    assert np.isinf(column).tolist() == [n == 3 for n in range(8)]
    assert np.isnan(column).tolist() == [n < 2 for n in range(8)]
    at = "heads=0,1&row=0&column=0&plane"
    for plane in ("max", "mass"):
        tile = floats(recording, "tile", f"{at}={plane}&level=1").reshape(256, 256)[:4, :4]
        lost = [[row == 1 and column <= row for column in range(4)] for row in range(4)]
        assert np.isinf(tile).tolist() == lost
        assert np.isnan(tile).tolist() == (np.tri(4) == 0).tolist()


@pytest.mark.parametrize("mask", [None, np.tri(12) > 0], ids=["causal", "mask"])
def test_words_are_seen_whether_their_weights_are_numbers_or_not(mask):
    options = {} if mask is None else {"mask": mask, "causal": False}
    recording = spoken(PIECES, **options)
    answers = [Answers([recording]).answer("visible", "layer=0&head=1&unit=word").body]
    recording.layers[0].query[1, 3] = np.nan
    answers.append(Answers([recording]).answer("visible", "layer=0&head=1&unit=word").body)
    assert answers[0] == answers[1]


NO_NUMBER = r"not a number \(NaN\)"


def test_a_row_that_is_no_number_is_not_said_to_be_masked(show):
    page = show(broken(), "L0H1&query=3&key=1")
    assert "masked" not in is_said(page, f"query 3 .* key 1 .* {NO_NUMBER}")
    text = page.locator(".regard-text")
    text.filter(has_text="The weights are not numbers (NaN): a score is NaN or infinite").wait_for()
    assert "masked" not in text.text_content()
    page.locator(".regard-token").nth(2).hover()
    assert "masked" not in is_said(page, f"query 3 .* key 2 .* {NO_NUMBER}")


def test_its_cells_are_not_said_to_be_masked_either(show):
    page = show(broken(), "L0H1&query=5&key=3")
    page.wait_for_selector(".regard-map[data-idle=true]")
    canvas = page.locator(".regard-map canvas[data-zoom]").first
    zoom, box = float(canvas.get_attribute("data-zoom")), canvas.bounding_box()
    for row, words in ((3, NO_NUMBER), (2, "masked"), (3, NO_NUMBER)):
        page.mouse.move(box["x"] + 3.5 * zoom, box["y"] + (row + 0.5) * zoom)
        is_said(page, f"query {row} .* key 3 .* {words}")
        page.locator(".regard-map-point", has_text=re.compile(words)).wait_for()


@pytest.mark.parametrize(
    "asked", ["H1&queries=2-4", "H0&heads=0,1&query=3", "H1&unit=word&query=3"]
)
def test_means_and_words_that_are_no_numbers_say_so(show, asked):
    query = "" if "query=3" in asked else "&query=3"
    page = show(broken(), f"L0{asked}{query}&key=1")
    assert "masked" not in is_said(page, f" key 1 .* {NO_NUMBER}")
    page.locator(".regard-text", has_text="The weights are not numbers").wait_for()


def test_a_row_of_several_queries_is_their_mean():
    recording = spoken()
    exact = mean_of(recording, [2])[[1, 2, 3, 6]].mean(0)
    row = floats(recording, "row", "head=2&queries=1-4,6-7")
    np.testing.assert_allclose(np.nan_to_num(row), exact, rtol=1e-5)
    both = floats(recording, "row", "heads=0,1,3&queries=1-4,6-7")
    exact = mean_of(recording)[[1, 2, 3, 6]].mean(0)
    np.testing.assert_allclose(np.nan_to_num(both), exact, rtol=1e-5)


def test_several_words_are_the_mean_of_their_tokens():
    recording = spoken(PIECES)
    words = np.nan_to_num(np.exp(by_words(recording, 2)))
    row = floats(recording, "row", "head=2&queries=2-4,5-8&unit=word")
    exact = words[[2, 3, 5, 6, 7]].mean(0)
    np.testing.assert_allclose(np.nan_to_num(row), exact, rtol=1e-5)


def test_a_bin_of_several_heads_is_the_mean_of_theirs():
    recording = spoken()
    tiles = {
        heads: floats(recording, "tile", f"{heads}&plane=max&level=1&row=0&column=0")
        for heads in ("heads=0,3", "head=0", "head=3")
    }
    expected = np.nan_to_num(tiles["head=0"]) / 2 + np.nan_to_num(tiles["head=3"]) / 2
    np.testing.assert_allclose(np.nan_to_num(tiles["heads=0,3"]), expected, rtol=1e-5)


def test_the_strongest_pairs_of_several_heads_are_those_of_their_mean():
    recording, mean = spoken(), mean_of(spoken())
    answer = Answers([recording]).answer("links", "layer=0&heads=0,1,3&n=3&rows=0-8&columns=1-8")
    found = re.findall(rb"\[(\d),(\d),", answer.body)
    order = np.argsort(-mean[:, 1:], axis=None)[:3]
    assert [(int(i), int(j) - 1) for i, j in found] == list(
        zip(*np.unravel_index(order, (8, 7)), strict=True)
    )


def test_a_query_counts_by_the_mean_of_the_keys_that_the_heads_see():
    texts = [str(n) for n in range(20)]
    mask = np.ones((2, 20, 20), bool)
    mask[0, 3, 8:] = mask[1, 3, 7:] = False  # 7.5 keys on average
    mask[0, 5, 9:] = mask[1, 5, 7:] = False  # 8
    array = np.random.default_rng(1).standard_normal((2, 20, 3)).astype(np.float32)
    recording = Recording(texts, [Layer(array, array, mask=mask)])
    answer = Answers([recording]).answer("links", "layer=0&heads=0,1&n=400")
    found = json.loads(answer.body)
    assert found["fewest"] == 8
    assert {query for query, _, _ in found["links"]} == set(range(20)) - {3}


@pytest.mark.parametrize("how", ["on", "against"])
def test_several_heads_are_not_compared(how):
    wanted = "on and against compare one head; give head in place of heads."
    assert refused(f"heads=0,1&query=1&{how}=0") == wanted


def test_several_that_are_not_there_are_refused():
    assert refused("heads=0,4&query=1") == "heads is 4; there are 4, 0 to 3."
    assert refused("heads=0,1&head=1&query=1") == "'head' is not a parameter of this endpoint."
    assert refused("head=0&queries=3-2").startswith("queries is '3-2'; a-b is needed")
    assert refused("head=0&queries=1-4,3-5") == "queries has 3 twice; give each query once."
    many = spoken([" a"] * 4200, layers=1, heads=2, key_heads=1, size=2, values=False)
    answer = Answers([many]).answer("links", "layer=0&heads=0,1&n=3")
    assert answer.status == 400
    assert "request a part of at most 16,777,216 pairs" in answer.body.decode()


def test_ctrl_and_click_shows_the_mean_of_heads(open_map):
    recording = spoken()
    page = open_map(recording, hash="L0H1&query=5&key=3&unit=token")
    for head in (0, 3):
        cell = page.page.locator(f".regard-head[aria-label^='L0H{head}']")
        cell.click(modifiers=["Control"])
    is_said(page.page, "mean of 3 heads of layer 0: 0, 1, 3 · query 5 .* key 3 ")
    page.wait()
    assert page.selection()["heads"] == "0,1,3"
    assert page.page.locator(".regard-head[aria-pressed=true]").count() == 3
    assert "mean of 3 heads of layer 0: 0, 1, 3" in page.page.locator(".regard-map").text_content()
    of_four_keys = mean_of(recording)[3:, 1:]
    query, key = np.unravel_index(of_four_keys.argmax(), of_four_keys.shape)
    strongest = f".regard-pairs li:first-child [data-query='{query + 3}'][data-key='{key + 1}'] em"
    page.page.locator(strongest, has_text=share(of_four_keys.max())).wait_for()
    with np.errstate(divide="ignore"):
        logs = np.where(np.tri(8, dtype=bool), np.log(mean_of(recording)), np.nan)
    view, pixels = page.view(), page.screen(1)
    wanted = expected_entries(view, pixels.shape, np.exp(logs), 0, 1)
    assert_pixels(pixels, wanted)
    bars = shown_bars(page.page)
    exact = mean_of(recording)[5]
    assert [weight for _, weight, _ in bars] == [share(exact[place]) for place, _, _ in bars]
    cell.click(modifiers=["Control"])
    is_said(page.page, "mean of 2 heads of layer 0: 0, 1 ")
    page.page.go_back()
    is_said(page.page, "mean of 3 heads")
    page.page.keyboard.press("]")
    is_said(page.page, "^L0H2 ")
    assert "heads" not in page.selection()


def test_the_strongest_pairs_of_a_mean_are_not_looked_for_in_long_texts(show):
    many = spoken([" a"] * 4200, layers=1, heads=2, key_heads=1, size=2, values=False)
    page = show(many, "L0H1&heads=0,1&query=5&key=3")
    said = "of a mean of heads up to 16,777,216 pairs; choose one head"
    page.locator(".regard-pairs li", has_text=said).wait_for()


def test_steps_of_several_heads_are_of_one_and_say_so(show):
    page = show(spoken(), "L0H3&heads=0,1,3&query=5&key=3&view=steps")
    is_chosen(page, 5, 3)
    steps = page.locator(".regard-steps")
    assert "Steps of L0H3" in steps.text_content()
    assert "Of 3 chosen heads, this is one." in steps.text_content()


def check_mean(page, recording, queries, head=2):
    """The text panel has the mean over these queries."""
    is_said(page, f"mean of {len(queries)} queries")
    exact = mean_of(recording, [head])[queries].mean(0)
    page.wait_for_function(
        "(count) => document.querySelectorAll('.regard-token.regard-chosen').length === count",
        arg=len(queries),
    )
    title = page.locator(".regard-text h2").text_content()
    assert f"what {len(queries)} tokens attend to" in title
    for place, weight, _ in shown_bars(page):
        assert weight == share(exact[place])


def test_shift_and_ctrl_choose_queries_in_the_text(show):
    recording = spoken()
    page = show(recording, "L0H2&query=5&key=1")
    is_chosen(page, 5, 1)
    tokens = page.locator(".regard-token")
    tokens.nth(3).click(modifiers=["Shift"])
    check_mean(page, recording, [3, 4, 5])
    tokens.nth(7).click(modifiers=["Control"])
    check_mean(page, recording, [3, 4, 5, 7])
    tokens.nth(5).click(modifiers=["Control"])  # the chosen one: another takes its place
    check_mean(page, recording, [3, 4, 7])
    page.wait_for_function("() => location.hash.includes('queries=3-5,7-8')")
    again = address_of(page)
    page.goto("about:blank")
    page.goto(again)
    check_mean(page, recording, [3, 4, 7])
    tokens.nth(1).click()  # a key: the queries stay
    is_said(page, "mean of 3 queries → key 1 ")
    tokens.nth(6).dblclick()
    is_said(page, "query 6 ")
    assert "queries" not in address_of(page)


def test_shift_and_arrows_choose_queries(show):
    recording = spoken()
    page = show(recording, "L0H2&query=4&key=1")
    is_chosen(page, 4, 1)
    for key, queries in [("Down", [4, 5]), ("Down", [4, 5, 6]), ("Up", [4, 5])]:
        page.keyboard.press(f"Shift+Arrow{key}")
        check_mean(page, recording, queries)
    for key, queries in [("Up", None), ("Up", [3, 4])]:
        page.keyboard.press(f"Shift+Arrow{key}")
        if queries:
            check_mean(page, recording, queries)
        else:
            is_said(page, "query 4 ")
    page.locator(".regard-token").nth(4).focus()
    page.keyboard.press("Shift+ArrowRight")
    check_mean(page, recording, [4, 5])


def test_the_axes_choose_tokens(open_map):
    recording = spoken()
    page = open_map(recording, hash="L0H2&query=7&key=1")
    is_chosen(page.page, 7, 1)
    best = int(mean_of(recording, [2])[3].argmax())

    def click(query=None, key=None, *modifiers):
        x, y = page.place(query or 0, key or 0)
        left, top = page.page.evaluate(
            "() => { const box = document.querySelector('.regard-map-frame')"
            ".getBoundingClientRect(); return [box.left, box.top]; }"
        )
        for name in modifiers:
            page.page.keyboard.down(name)
        page.page.mouse.click(left + 60 if key is None else x, top + 40 if query is None else y)
        for name in modifiers:
            page.page.keyboard.up(name)

    click(3)
    is_chosen(page.page, 3, best)
    click(5, None, "Shift")
    check_mean(page.page, recording, [3, 4, 5])
    click(7, None, "Control")
    check_mean(page.page, recording, [3, 4, 5, 7])
    click(None, 2)
    is_said(page.page, "mean of 4 queries → key 2 ")


def test_whole_words_are_chosen_by_words(show):
    page = show(spoken(PIECES), "L0H2&query=2&key=1&unit=word")
    is_chosen(page, 2, 1)
    page.keyboard.press("Shift+ArrowDown")
    is_said(page, "mean of 3 queries")  # ti·red, and cat
    assert "queries=2-5" in page.evaluate("location.hash")
    page.locator(".regard-token").nth(6).click(modifiers=["Control"])
    page.wait_for_function("() => location.hash.includes('queries=2-8')")


def test_one_head_and_one_query_are_compared(open_map):
    page = open_map(spoken(), hash="L0H1&query=5&key=3&unit=token&heads=0,1&queries=4-6")
    is_said(page.page, "mean of 2 queries")
    page.page.get_by_label("compare").select_option("side")
    is_said(page.page, "side by side")
    assert not {"heads", "queries"} & set(page.selection())
    page.page.locator(".regard-head[aria-label^='L0H3']").click(modifiers=["Control"])
    is_said(page.page, "mean of 2 heads of layer 0: 1, 3 ")
    assert "compare" not in page.selection()
    page.page.get_by_label("compare").select_option("difference")
    page.page.locator(".regard-map-stage").focus()
    page.page.keyboard.press("Shift+ArrowDown")
    is_said(page.page, "mean of 2 queries")
    assert "compare" not in page.selection()


def test_a_nonsense_address_of_several_is_mended(show):
    page = show(spoken(), "L0H1&heads=2,3&query=5&key=3&queries=1-3,6-99")
    is_chosen(page, 5, 3)
    assert page.locator(".regard-head[aria-pressed=true]").count() == 1


def test_queries_with_a_text_of_their_own_are_chosen_on_the_axis(show):
    page = show(crossed(), "L0H0&query=3&key=2&queries=2-5")
    is_said(page, "mean of 3 queries → key 2 ")
    assert "what 3 tokens attend to" in page.locator(".regard-text h2").text_content()
