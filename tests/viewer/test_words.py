"""The viewer by words: tiles, rows, pairs and the page, where some words have several pieces."""

import json
import time
from urllib.parse import urlencode

import numpy as np
import pytest

from regard.recording import Layer, Recording
from regard.viewer import overview
from regard.viewer.answer import Answers
from viewer.pages import BAR, is_said, is_shown, share, shown_bars, spoken

PIECES = ["<bos>", "The", " ti", "red", " cat", " sl", "ep", "t", " bec", "ause", " it", "."]
STARTS = [0, 1, 2, 4, 5, 8, 10, 11]
WORDS = ["<bos>", "The", "tired", "cat", "slept", "because", "it", "."]


def by_tokens(recording, head, layer=0):
    answers, where = Answers([recording]), {"layer": layer, "head": head, "unit": "token"}
    queries = range(len(recording.query_tokens))
    return np.array([floats(answers, "row", **where, query=n) for n in queries])


def by_words(recording, head, layer=0):
    """ln of the weights of words, NaN where masked, at the places of their pieces."""
    words = recording.in_words()
    logs = by_tokens(recording, head, layer)
    weights, sees = np.nan_to_num(np.exp(logs)), ~np.isnan(logs)
    sides = (words.query_starts, words.starts)
    counts = [np.diff(x, append=n) for x, n in zip(sides, logs.shape)]
    joined = np.add.reduceat(np.add.reduceat(weights, sides[1], 1), sides[0], 0)
    joined /= counts[0][:, None]
    seen = np.logical_or.reduceat(np.logical_or.reduceat(sees, sides[1], 1), sides[0], 0)
    with np.errstate(divide="ignore"):
        of_words = np.where(seen, np.log(joined), np.nan)
    return np.repeat(np.repeat(of_words, counts[0], 0), counts[1], 1)


def floats(answers, path, **parameters):
    query = urlencode({"unit": "word", **parameters})
    answer = answers.answer(path, query)
    while answer.coverage < 1:
        time.sleep(0.01)
        answer = answers.answer(path, query)
    assert answer.status == 200, answer.body
    return np.frombuffer(answer.body, "<f4")


OPTIONS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window": (2, 0)},
    "sinks": {"causal": True, "sinks": np.ones(4, "f")},
    "mask": {"causal": False, "mask": np.arange(12) % 5 > 0},
    "intervals": {
        "causal": False,
        "intervals": (np.arange(12) % 4, np.arange(12) % 4 + np.arange(12) % 3 * 4),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_pair_of_pieces_has_the_weight_of_its_words(name):
    recording = spoken(PIECES, **OPTIONS[name])
    answers = Answers([recording])
    assert json.loads(answers.answer("words").body) == {"key": STARTS, "query": STARTS}
    assert json.loads(answers.answer("about").body)["recordings"][0]["words"] == len(WORDS)
    exact = by_words(recording, 2, layer=1)
    where = {"layer": 1, "head": 2}
    bounds = {"rtol": 1e-5, "atol": 1e-5}
    tile = floats(answers, "tile", **where, plane="max", level=0, row=0, column=0)
    np.testing.assert_allclose(tile.reshape(256, 256)[:12, :12], exact, **bounds)
    share = floats(answers, "tile", **where, plane="mass", level=0, row=0, column=0)
    np.testing.assert_array_equal(share, tile)
    for n in (0, 6, 11):
        np.testing.assert_allclose(floats(answers, "row", **where, query=n), exact[n], **bounds)
        np.testing.assert_allclose(floats(answers, "column", **where, key=n), exact[:, n], **bounds)
        found = floats(answers, "pair", query=n, key=5)
        assert found[4 + 2] == pytest.approx(exact[n, 5], rel=1e-5, nan_ok=True)
    words = np.isfinite(exact)[:, STARTS].sum(1)
    np.testing.assert_array_equal(floats(answers, "visible", **where), words)


def test_the_strongest_words_are_named_by_their_first_pieces():
    recording = spoken(PIECES)
    answers = Answers([recording])
    exact = np.nan_to_num(by_words(recording, 1), nan=-np.inf)[np.ix_(STARTS, STARTS)]
    exact[:, 0] = -np.inf  # the usual sink
    exact[:3] = -np.inf  # queries that see fewer than 4 words, half of the most
    best = np.argsort(-exact, None, kind="stable")[:6]
    found = json.loads(answers.answer("links", "layer=0&head=1&n=6&unit=word").body)["links"]
    rows, columns = np.unravel_index(best, exact.shape)
    assert [link[:2] for link in found] == [[STARTS[i], STARTS[j]] for i, j in zip(rows, columns)]
    part = "layer=0&head=1&n=1&rows=6-8&columns=3-6&unit=word"
    (link,) = json.loads(answers.answer("links", part).body)["links"]
    assert link[0] == 6
    assert link[1] in (3, 4, 5)


@pytest.mark.parametrize(
    ("pieces", "count", "heads"),
    [(1, 12, "0"), (2, 12, "0"), (2, 12, "0,1"), (3, 500, "0"), (70, 500, "0")],
)
def test_the_strongest_words_leave_out_a_first_word_of_several_tokens(
    pieces, count, heads, monkeypatch
):
    if count > 100:  # read in rounds
        monkeypatch.setattr(overview, "DIRECT_WORK", 1000)
    tokens = ["x"] * pieces + [f" w{n}" for n in range(pieces, count)]
    random = np.random.default_rng(1)
    key = 0.3 * random.standard_normal((2, count, 1)).astype("f")
    key[:, 0] = 6  # the attention sink
    key[:, count // 2] = 3
    query = np.ones((2, count, 1), "f")
    answers = Answers([Recording(tokens, [Layer(query, key, key, causal=True)])])
    end, coverage = time.monotonic() + 60, 0.0
    while coverage < 1 and time.monotonic() < end:
        asked = f"layer=0&{'heads' if ',' in heads else 'head'}={heads}&n=4&unit=word"
        answer = json.loads(answers.answer("links", asked).body)
        coverage = answer["coverage"]
    answers.close()
    keys = {link[1] for link in answer["links"]}
    assert len(answer["links"]) == 4
    assert min(keys) >= pieces
    assert count // 2 in keys


def test_queries_may_have_words_of_their_own():
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((2, n, 4)).astype("f") for n in (4, 12))
    recording = Recording(PIECES, [Layer(q, k)], query_tokens=[" a", "b", " c", " d"])
    answers = Answers([recording])
    assert json.loads(answers.answer("words").body)["query"] == [0, 2, 3]
    row = floats(answers, "row", layer=0, head=1, query=1)
    np.testing.assert_allclose(row, by_words(recording, 1)[1], rtol=1e-5)


def test_a_long_map_by_words_is_read_in_rounds(monkeypatch):
    monkeypatch.setattr(overview, "DIRECT_WORK", 1000)
    tokens = [(" wo", "rd", "s", " a")[n * n % 7 % 4] for n in range(700)]
    recording = spoken(tokens, heads=1, key_heads=1, layers=1)
    answers = Answers([recording])
    exact = by_words(recording, 0)
    level = 5
    side = 1 << level
    found = floats(answers, "tile", layer=0, head=0, plane="max", level=level, row=0, column=0)
    answers.close()
    count = -(-700 // side)
    padded = np.full((count * side, count * side), np.nan)
    padded[:700, :700] = exact
    with np.errstate(invalid="ignore"):
        strongest = np.fmax.reduce(padded.reshape(count, side, count, side), (1, 3))
    shown = found.reshape(256, 256)[:count, :count]
    np.testing.assert_allclose(shown, strongest, rtol=1e-5, atol=1e-5)


def test_words_without_the_first_token_share_its_weight():
    recording = spoken(PIECES)
    row = np.exp(floats(Answers([recording]), "row", layer=0, head=0, query=9, first="hidden"))
    assert np.isnan(row[0])
    assert np.nansum(row[STARTS]) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("way", ["on", "against"])
def test_texts_are_compared_by_tokens(way):
    answers = Answers([spoken(PIECES), spoken(PIECES)])
    asked = {"recording": 1, "layer": 0, "head": 0, "query": 3, way: 0}
    assert answers.answer("row", urlencode(asked)).status == 200
    refused = answers.answer("row", urlencode({**asked, "unit": "word"}))
    assert refused.status == 400
    assert refused.body.decode() == "on and against compare tokens; leave unit=word out."


@pytest.fixture
def show(serve, open_page):
    return lambda recording, hash="", **options: open_page(f"{serve(recording)}#{hash}", **options)


def test_a_short_text_opens_by_words_and_a_key_shows_its_pieces(show):
    recording = spoken(PIECES)
    page = show(recording, "L0H1&query=9&key=5")
    is_shown(page, 9)
    exact = np.exp(by_words(recording, 1)[9])
    seen = [n for n in STARTS if not np.isnan(exact[n])]
    bars = shown_bars(page)
    assert [place for place, _, _ in bars] == sorted(seen, key=lambda n: -exact[n])
    assert [weight for _, weight, _ in bars] == [share(exact[place]) for place, _, _ in bars]
    assert set(page.locator(f"{BAR} .regard-bar-token").all_text_contents()) == set(WORDS[:6])
    assert "these 6 words" in page.locator(".regard-text").inner_text()
    assert "query 8 «because» → key 5 «slept»" in is_said(page, "uniform")
    assert "every weight of words" in page.locator(".regard-map-caption").inner_text()
    page.keyboard.press("w")
    is_said(page, "weights of tokens")
    page.wait_for_function("() => location.hash.includes('unit=token')")
    assert "query 9 «ause» → key 5 «sl»" in is_said(page, "uniform")
    pieces = np.exp(by_tokens(recording, 1)[9])
    assert max(shown_bars(page), key=lambda bar: float(bar[1].split()[0]))[1] == share(
        np.nanmax(pieces)
    )


@pytest.mark.parametrize("view", ["map", "lines"])
def test_arrows_move_from_word_to_word(show, view):
    page = show(spoken(PIECES), f"L0H1&query=9&key=6&view={view}")
    is_said(page, "^query 8 «because» → key 5 «slept»")
    if view == "map":
        page.wait_for_selector(".regard-map[data-idle=true]")
    moves = {
        "ArrowUp": "^query 5 «slept» → key 5 ", "ArrowLeft": "^query 5 «slept» → key 4 ",
        "ArrowDown": "^query 8 «because» → key 4 ", "Shift+ArrowRight": "→ key 11 «.»",
    }  # fmt: skip
    for key, words in moves.items():
        page.keyboard.press(key)
        is_said(page, words)


def test_the_pointer_on_a_word_reads_its_tokens_too(show):
    recording = spoken(PIECES)
    page = show(recording, "L0H1&query=9&key=5")
    is_shown(page, 9)
    canvas = page.locator(".regard-map canvas[data-zoom]").first
    page.wait_for_selector(".regard-map[data-idle=true]")
    zoom, box = float(canvas.get_attribute("data-zoom")), canvas.bounding_box()
    page.mouse.move(box["x"] + 6.5 * zoom, box["y"] + 8.5 * zoom)
    weight = np.exp(by_tokens(recording, 1)[8, 6])
    said = is_said(page, "its tokens")
    assert "query 8 «\u2068because\u2069» → key 5 «\u2068slept\u2069»" in said
    assert f"its tokens bec → ep: {share(weight)}" in said


def test_characters_of_several_tokens_are_whole_in_words(show):
    page = show(spoken(["<bos>", "na", r"\xc3", r"\xaf", "ve", " cat"]), "L0H1&query=5&key=2")
    is_said(page, "key 1 «naïve»")
    page.locator(".regard-search input").fill("naïve")
    is_said(page, "1 found")


def test_steps_and_links_are_of_the_right_unit(show):
    recording = spoken(PIECES)
    page = show(recording, "L0H1&query=9&key=5")
    is_shown(page, 9)
    page.wait_for_selector(".regard-pairs li button")
    names = page.locator(".regard-pairs bdi").all_text_contents()
    assert set(names) <= set(WORDS)
    page.get_by_role("button", name="Steps").click()
    page.wait_for_selector(".regard-steps[data-shown='query 9 key 5']")
    exact = np.exp(by_tokens(recording, 1)[9, 5])
    assert f"= {exact:.4f}" in page.locator(".regard-arithmetic").inner_text()
    assert f"«sl»   weight {share(exact)}" in is_said(page, "query 9 «ause» → key 5 ")
    page.wait_for_selector(f"{BAR}[aria-pressed=true] >> text={share(exact)}")


def test_a_long_text_lists_a_word_once(show):
    recording = spoken(PIECES * 180, layers=1, heads=1, key_heads=1)
    query = len(recording.tokens) - 1
    row = floats(Answers([recording]), "row", layer=0, head=0, query=query)
    starts = recording.in_words().starts
    best = starts[np.argsort(-row[starts])[:12]]
    word = next(place for place in best if place + 1 not in starts)
    page = show(recording, f"L0H0&query={query}&key={word + 1}&unit=word")
    page.wait_for_selector(".regard-place")
    listed = page.locator(".regard-passage-head").all_text_contents()
    places = [int(text.split(" ·")[0].replace(",", "")) for text in listed]
    assert places == [*({query} - set(best)), *best]
    chosen = page.locator(".regard-place[aria-pressed=true]").all_text_contents()
    assert [text.split(" ·")[0] for text in chosen] == [f"{word:,}"]


@pytest.mark.parametrize(
    ("tokens", "state"),
    [(PIECES * 20, "false"), (["a", "b", "c"], None)],
    ids=["a long text", "no words"],
)
def test_the_switch_says_what_is_shown(show, tokens, state):
    page = show(spoken(tokens), "L0H1")
    button = page.get_by_role("button", name="words", exact=True)
    if state is None:
        assert button.is_disabled()
        assert button.get_attribute("title") == "Each token is a word"
    else:
        assert button.get_attribute("aria-pressed") == state
        button.click()
        page.wait_for_function("() => location.hash.includes('unit=word')")
        page.wait_for_selector(".regard-map[data-idle=true]")
        assert "of words" in page.locator(".regard-map-caption").inner_text()
