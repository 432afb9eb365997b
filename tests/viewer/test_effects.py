"""Effects in the viewer: what the server answers, and what the page shows of it."""

import base64
import itertools
import json
import re
from urllib.parse import urlencode

import numpy as np
import pytest
import torch

from regard.recording import Layer, Recording
from regard.viewer import _effects
from regard.viewer.answer import Answers
from viewer.explained import (
    KINDS,
    RECORDINGS,
    L,
    binned,
    close,
    dense,
    explained,
    mean,
    numbers,
    of,
    strongest,
    weights_of,
)
from viewer.map_page import MapPage, assert_pixels, entries, expected_entries, table
from viewer.pages import SENTENCE, is_said, saved, spoken

SIDE = 256


def asked(answers, path, **parameters):
    answer = answers.answer(path, urlencode(parameters))
    assert answer.status == 200, answer.body
    return answer


def floats(answers, path, **parameters):
    """The float32 of a response, once it has read all rows."""
    while (answer := asked(answers, path, **parameters)).coverage < 1:
        pass
    return np.frombuffer(answer.body, "<f4")


def whole(answers, rows, columns, level, **parameters):
    """All tiles of a level, as one picture."""
    side = SIDE << level
    down, across = (range(-(-n // side)) for n in (rows, columns))
    tiles = [
        [
            floats(
                answers, "tile", level=level, row=r, column=c, plane="max", **parameters
            ).reshape(SIDE, SIDE)
            for c in across
        ]
        for r in down
    ]
    return np.block(tiles)[: -(-rows >> level), : -(-columns >> level)]


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_number_is_that_of_the_dense_formula(name):
    recording = RECORDINGS[name]
    (layer,), answers = recording.layers, Answers([recording])
    Lq, Lk, last = layer.query.shape[1], layer.key.shape[1], layer.heads - 1
    for kind in KINDS:
        exact, head = dense(layer, last, kind), {"layer": 0, "head": last, "effect": kind}
        for level in {0, 1, 3, max(Lq, Lk).bit_length()}:
            close(whole(answers, Lq, Lk, level, **head), binned(exact, 1 << level), layer, kind)
        close(floats(answers, "row", query=Lq // 2, **head), exact[Lq // 2], layer, kind)
        close(floats(answers, "column", key=Lk // 3, **head), exact[:, Lk // 3], layer, kind)
        pair = floats(answers, "pair", query=Lq - 1, key=Lk - 1, effect=kind)
        close(pair[last], exact[Lq - 1, Lk - 1], layer, kind)
        links = json.loads(asked(answers, "links", n=5, **head).body)
        assert links["fewest"] == 0
        found = [(i, j, exact[i, j]) for i, j, _ in links["links"]]
        close([x for *_, x in links["links"]], [x for *_, x in found], layer, kind)
        best = [abs(x) for *_, x in strongest(exact, 5) if x]
        close([abs(x) for *_, x in found][: len(best)], best[: len(found)], layer, kind)
        assert len(found) <= len(best)
    answers.close()


def test_several_heads_and_queries_are_their_means():
    (layer,), answers = RECORDINGS["mask of heads"].layers, Answers([RECORDINGS["mask of heads"]])
    exact = mean(dense(layer, 1), dense(layer, 3))
    heads = {"layer": 0, "heads": "3,1", "effect": "knockout"}
    close(whole(answers, L, L, 2, **heads), binned(exact, 4), layer)
    close(floats(answers, "column", key=7, **heads), exact[:, 7], layer)
    rows = [1, 2, 20]
    close(floats(answers, "row", queries="20-21,1-3", **heads), mean(*exact[rows]), layer)
    part = {"rows": "8-16", "columns": "4-8"}
    ((query, key, effect),) = json.loads(asked(answers, "links", n=1, **part, **heads).body)[
        "links"
    ]
    assert (query, key) == strongest(exact, 1, slice(8, 16), slice(4, 8))[0][:2]
    close(effect, exact[query, key], layer)


@pytest.mark.parametrize("few", [0, 2**30])
def test_a_large_head_is_read_in_samples_until_it_is_exact(monkeypatch, few):
    monkeypatch.setattr(_effects, "DIRECT_PAIRS", 1000)
    monkeypatch.setattr(_effects, "FEW_PAIRS", few)
    monkeypatch.setattr(_effects, "PAIRS_SLICE", 2**12)
    (layer,), answers = RECORDINGS["several tiles"].layers, Answers([RECORDINGS["several tiles"]])
    exact, head = dense(layer, 1), {"layer": 0, "head": 1, "effect": "knockout"}
    first = asked(answers, "tile", plane="max", level=5, row=0, column=0, **head)
    assert 0 < first.coverage <= 1
    for level in (2, 3, 5, 6, 9):
        close(whole(answers, 270, 270, level, **head), binned(exact, 1 << level), layer)
    found = json.loads(asked(answers, "links", n=20, **head).body)
    assert [(i, j) for i, j, _ in found["links"]] == [link[:2] for link in strongest(exact, 20)]
    monkeypatch.setattr(_effects, "BUDGET_S", -1.0)
    shares = [asked(answers, "column", key=3, **head).coverage for _ in range(3)]
    assert 0 < shares[0] < shares[1] < shares[2] < 1
    close(floats(answers, "column", key=3, **head), exact[:, 3], layer)
    answers.close()


def test_the_largest_effects_are_those_of_every_head(monkeypatch):
    monkeypatch.setattr(_effects, "FEW_QUERIES", 80)
    later, plain = explained(90, seed=7, causal=True), Layer(*(numbers(2, 90, 6, seed=1),) * 3)
    answers = Answers([of(later, plain)])
    facts = json.loads(asked(answers, "about").body)["recordings"][0]["layers"]
    assert [found["effects"] for found in facts] == [list(KINDS), []]
    for kind in ("knockout", "change"):
        largest = json.loads(asked(answers, "effects", effect=kind).body)["largest"]
        assert largest[1] is None
        exact = np.array([np.nanmax(abs(dense(later, h, kind))) for h in range(4)])
        rows = np.square(later.gradient).sum((0, 2)).argsort()[-16:]
        read = np.array([np.nanmax(abs(dense(later, h, kind)[rows])) for h in range(4)])
        close(largest[0], read, later, kind)
        if kind == "knockout":  # those of the rows with the largest gradients are nearly all
            assert (read > 0.5 * exact).all()
    pair = floats(answers, "pair", query=3, key=1, effect="knockout")
    assert np.isnan(pair[4:]).all()
    assert np.isfinite(pair[:4]).all()


@pytest.mark.parametrize("most", [2**26, 96])
def test_thumbnails_are_of_effects(monkeypatch, most):
    monkeypatch.setattr(_effects, "THUMBNAIL_PAIRS", most)
    monkeypatch.setattr(_effects, "THUMBNAIL_ROWS", most)
    recording = RECORDINGS["several tiles"]
    (layer,), answers = recording.layers, Answers([recording])
    facts = json.loads(asked(answers, "heads", layer=0, effect="knockout").body)
    pictures = np.frombuffer(base64.b64decode(facts["thumbnails"]), "<f4").reshape(2, 48, 48)
    edges = np.arange(49) * 270 // 48
    exact = dense(layer, 1)
    if most == 96:  # one row of each bin, that with the largest gradients
        sizes = np.square(layer.gradient).sum((0, 2))
        read = {low + sizes[low:high].argmax() for low, high in itertools.pairwise(edges)}
        exact = np.where(np.isin(np.arange(270), list(read))[:, None], exact, np.nan)
    assert facts["coverage"] == (1 if most > 96 else 48 / 270)
    assert facts["settled"]
    for r, (top, bottom) in enumerate(itertools.pairwise(edges)):
        for c, (left, right) in enumerate(itertools.pairwise(edges)):
            close(pictures[1, r, c], binned(exact[top:bottom, left:right], 8)[0, 0], layer)


def test_tensors_have_effects_too():
    found = explained(causal=True)
    tensors = (torch.from_numpy(x) for x in (found.query, found.key, found.value))
    layer = Layer(*tensors, gradient=torch.from_numpy(found.gradient), causal=True)
    answers = Answers([of(layer)])
    for level in (0, 2):
        picture = whole(answers, L, L, level, layer=0, head=2, effect="knockout")
        close(picture, binned(dense(found, 2), 1 << level), found)


BAD = {
    "tile?layer=0&head=0&plane=mass&level=0&row=0&column=0&effect=knockout": "plane is 'mass'",
    "row?layer=0&head=0&query=0&effect=ablation": "effect is 'ablation'; there are knockout,",
    "row?layer=0&head=0&query=0&effect=knockout&first=hidden": "leave first=hidden out",
    "row?layer=0&head=0&query=0&effect=knockout&unit=word": "leave unit out",
    "links?layer=0&head=0&n=1&effect=knockout&on=0": "leave on out",
    "sums?layer=0&head=0&effect=knockout": "'effect' is not a parameter",
    "row?layer=1&head=0&query=0&effect=knockout": "this recording has no gradients",
    "effects?recording=0": "effect is missing",
}


def test_what_has_no_effects_is_refused_with_a_sentence():
    plain = Layer(*(numbers(4, L, 6, seed=1),) * 3)
    answers = Answers([of(explained(causal=True), plain)])
    for request, sentence in BAD.items():
        answer = answers.answer(*request.split("?"))
        assert answer.status == 400
        assert sentence in answer.body.decode()


SHOWN = spoken(SENTENCE * 5, layers=2, heads=2, key_heads=1, explained=True)


def text_of(x):
    """An effect as the page writes it, of those above 0.001."""
    return f"{x:+.3g}".replace("-", "−")


def drawn(page, exact, span, decades=0, dark=False):
    """Checks each pixel of the map against float64."""
    view, pixels = page.view(), page.screen(1)
    values = binned(exact, 1 << int(view["level"])) / span
    if decades:
        with np.errstate(divide="ignore"):
            values = np.sign(values) * np.maximum(0, 1 + np.log10(abs(values)) / decades)
    wanted = expected_entries(view, pixels.shape, np.clip(values, -1, 1), -1, 1)
    assert_pixels(pixels, wanted, "DIVERGING", dark)


def largest_span():
    """The largest effect of the recording, rounded up to two digits."""
    most = max(np.nanmax(abs(dense(layer, head))) for layer in SHOWN.layers for head in range(2))
    unit = 10 ** (np.floor(np.log10(most)) - 1)
    return float(f"{np.ceil(most / unit) * unit:.2g}")


def test_every_pixel_of_the_plane_is_an_effect(open_map):
    page = open_map(SHOWN, hash="L1H1&plane=effect")
    exact, span = dense(SHOWN.layers[1], 1), largest_span()
    drawn(page, exact, span, 3)
    page.page.emulate_media(color_scheme="dark")
    page.wait()
    drawn(page, exact, span, 3, dark=True)
    page.page.emulate_media(color_scheme="light")
    page.show("L1H1&plane=effect&scale=linear&span=0.02&x=3&y=9&zoom=31")
    drawn(page, exact, 0.02)
    page.show("L1H1&heads=0,1&plane=effect&scale=linear&span=0.02")
    drawn(page, mean(dense(SHOWN.layers[1], 0), exact), 0.02)
    page.show("L1H1&plane=effect&kind=gradient&scale=linear&span=0.5")
    drawn(page, dense(SHOWN.layers[1], 1, "gradient"), 0.5)
    body, _ = saved(page.page, "SVG")
    assert "effect (gradient)" in body.decode()
    assert "Red: the number rises; blue: it falls." in body.decode()


def test_the_panels_are_of_effects(open_map):
    page = open_map(SHOWN, hash="L1H1&scale=linear")
    exact, (query, key, most) = dense(SHOWN.layers[1], 1), *strongest(dense(SHOWN.layers[1], 1), 1)
    one = page.page
    plane = one.get_by_role("group", name="Plane")
    page.page.keyboard.press("m")
    page.page.keyboard.press("m")
    is_said(one, "effects: knockout")
    says = one.locator(".regard-map-says").text_content()
    assert re.fullmatch("Knockout: .* Red: the number rises; blue: it falls.", says)
    assert plane.get_by_role("button", name="effect").get_attribute("aria-pressed") == "true"
    assert page.selection()["plane"] == "effect"

    pairs = one.locator(".regard-pairs")
    pairs.get_by_text("Strongest effects").wait_for()
    listed = pairs.locator("li em").all_text_contents()
    assert listed == [text_of(x) for *_, x in strongest(exact, 8)]
    pairs.get_by_role("button").first.click()
    said = is_said(one, rf"query {query} .* key {key} .*effect")
    weight = weights_of(SHOWN.layers[1], 1)[0][query, key]
    assert f"effect {text_of(most)} · weight {100 * weight:.2f} %" in said

    text = one.locator(".regard-text")
    text.get_by_text(": effects").wait_for()
    bars = text.locator(".regard-bar-weight").all_text_contents()
    row = sorted(np.nan_to_num(exact[query]), key=abs, reverse=True)
    assert bars == [text_of(x) for x in row[:12] if abs(x) >= 0.001 * abs(most)]
    assert text.locator(".regard-bar-times").first.text_content() == f"{100 * weight:.2f} %"
    tint = (
        text.locator(".regard-token").nth(key).evaluate("n => n.style.getPropertyValue('--back')")
    )
    entry = entries(most / largest_span(), -1, 1)
    assert tint in [
        f"rgb({' '.join(map(str, c))})" for c in table("DIVERGING")[entry - 1 : entry + 2]
    ]

    one.mouse.move(*page.place(query, key))
    said = is_said(one, "effect .* weight")
    assert said.strip().endswith(f"effect {text_of(most)} · weight {100 * weight:.2f} %")
    assert text_of(most) in one.locator(".regard-map-point").first.text_content()

    colours = one.get_by_role("img", name="Knockout: ")
    assert re.search("Red: .*; blue: .* ±.*linear", colours.get_attribute("aria-label"))
    assert one.get_by_role("button", name="sums").is_disabled()
    assert not one.get_by_role("button", name="hide first").is_visible()
    one.get_by_label("order").select_option("effect")
    heads = one.locator(".regard-head-score").all_text_contents()
    sizes = sorted(
        (np.nanmax(abs(dense(x, h))) for x in SHOWN.layers for h in range(2)), reverse=True
    )
    assert [float(x) for x in heads] == pytest.approx(sizes, rel=0.01)

    one.mouse.move(5, 5)  # what is under the pointer would be said instead
    one.keyboard.press("e")
    is_said(one, "effects: contribution")
    assert page.selection()["kind"] == "contribution"
    one.keyboard.press("v")  # Lines are of weights
    one.locator(".regard-lines").wait_for()
    is_said(one, rf"query {query} .* key {key} .*   weight")
    one.keyboard.press("v")
    one.keyboard.press("v")
    text.get_by_text(": effects").wait_for()
    one.keyboard.press("c")
    one.keyboard.press("c")
    is_said(one, "difference")
    assert plane.get_by_role("button", name="effect").is_disabled()
    one.locator(".regard-pairs").get_by_text("Largest differences").wait_for()


def test_without_a_gradient_there_is_no_such_plane(open_map):
    layers = spoken(explained=True).layers[0], spoken().layers[1]
    page = open_map(Recording(SENTENCE, layers), hash="L1H0&plane=effect")
    planes = page.page.get_by_role("group", name="Plane").get_by_role("button")
    caption = page.page.locator(".regard-map-caption")
    for key, count, words in (("", 2, "every weight"), ("{", 3, "knockout of every pair")):
        if key:
            page.page.keyboard.press(key)
            page.wait()
        assert planes.count() == count
        assert words in caption.text_content()
    page.page.keyboard.press("}")
    page.wait()
    assert planes.count() == 2
    assert page.selection()["plane"] == "effect"


def test_an_exported_page_shows_the_same_effects(open_page, tmp_path):
    path = tmp_path / "page.html"
    SHOWN.export(path)
    page = MapPage(open_page(f"{path.as_uri()}#L1H1&plane=effect&scale=linear&span=0.02"))
    drawn(page, dense(SHOWN.layers[1], 1), 0.02)
    exact = dense(SHOWN.layers[1], 1)
    listed = page.page.locator(".regard-pairs li em")
    listed.first.wait_for()
    assert listed.all_text_contents() == [text_of(x) for *_, x in strongest(exact, 8)]
