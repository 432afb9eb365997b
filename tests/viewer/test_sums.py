"""Sums of rows and columns: exact at once or block by block, and beside the cells that they sum."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from regard.viewer import overview
from regard.viewer.answer import Answers
from viewer.map_page import log_weights
from viewer.pages import SENTENCE, STATUS, is_said, spoken
from viewer.test_panels import saved

SINKS = np.float32([0, 1, -1, 2])
BAR = "#7a2a70"


@pytest.fixture(scope="module")
def recording():
    return spoken(sinks=SINKS)


def weights_of(recording, head):
    """``(Lq, Lk)``: the weights, of which the sink has taken its share."""
    logs = log_weights(recording, head)
    layer = recording.layers[0]
    q, k = (x[head].astype(float) for x in (layer.query, layer.key))
    scores = np.where(np.isnan(logs), -np.inf, q @ k.T / np.sqrt(8))
    total = np.exp(scores).sum(1) + np.exp(float(layer.options["sinks"][head]))
    return np.exp(scores) / total[:, None]


def sums(answers, query):
    answer = answers.answer("sums", f"layer=0&{query}")
    assert answer.status == 200, answer.body
    found = np.frombuffer(answer.body, "<f4")
    return found[: len(SENTENCE)], found[len(SENTENCE) :], answer.coverage


def test_rows_and_columns_sum_up(recording):
    answers = Answers([recording])
    for asked, weights in (
        ("head=1", weights_of(recording, 1)),
        ("heads=1,3", (weights_of(recording, 1) + weights_of(recording, 3)) / 2),
    ):
        rows, columns, coverage = sums(answers, asked)
        assert coverage == 1
        np.testing.assert_allclose(rows, weights.sum(1), rtol=1e-5)
        np.testing.assert_allclose(columns, weights.sum(0), rtol=1e-5, atol=1e-7)
        assert (rows < 0.999).any()  # the sink has the rest


def test_a_masked_row_sums_to_0_and_the_first_token_can_be_hidden():
    answers = Answers([spoken()])
    rows, columns, _ = sums(answers, "head=0&first=hidden")
    assert rows[0] == 0
    np.testing.assert_allclose(rows[1:], 1, rtol=1e-5)
    assert columns[0] == 0


def test_sums_are_read_block_by_block(recording, monkeypatch):
    monkeypatch.setattr(overview, "WORK_SLICE", 1)
    monkeypatch.setattr("regard.viewer._sums.BUDGET_S", 0)
    answers, weights = Answers([recording]), weights_of(recording, 2)
    for read in range(1, len(SENTENCE) + 1):
        rows, columns, coverage = sums(answers, "head=2")
        assert coverage == read / len(SENTENCE)
        np.testing.assert_allclose(rows[:read], weights[:read].sum(1), rtol=1e-5)
        assert np.isnan(rows[read:]).all()
        np.testing.assert_allclose(columns, weights[:read].sum(0), rtol=1e-5, atol=1e-7)
    assert sums(answers, "head=2")[2] == 1


def bars(svg):
    """``[(x, y, width, height), …]`` of the bars in a drawing."""
    drawn = ElementTree.fromstring(svg).iter()
    boxes = [node for node in drawn if node.get("fill") == BAR]
    return [tuple(float(box.get(n)) for n in ("x", "y", "width", "height")) for box in boxes]


def test_bars_stand_by_their_cells(open_map, recording):
    page = open_map(recording, hash="L0H1&query=5&key=3")
    asked = [url for url in page.page.requests if "data/sums" in url]
    assert not asked  # off, it costs nothing
    before = page.canvas().shape
    page.page.get_by_role("button", name="sums", exact=True).click()
    is_said(page.page, "sums of rows and columns")
    page.page.wait_for_function("() => location.hash.includes('sums=shown')")
    page.wait()
    assert page.canvas().shape < before  # they take room beside the cells, none of them
    weights = weights_of(recording, 1)
    rows, columns = weights.sum(1), weights.sum(0)
    for zoom in ("", "&zoom=96&x=2&y=3"):
        page.show(f"L0H1&query=5&key=3&sums=shown{zoom}")
        view = page.view()
        svg = saved(page.page, "SVG drawing")[0]
        assert "received" in svg.decode()
        found = bars(svg)
        tall = [box for box in found if box[3] <= 7 < box[2]]
        wide = [box for box in found if box[2] <= 7 and box not in tall]
        first = int(view["y"])
        for n, (_, y, width, height) in enumerate(tall, first):
            assert width == pytest.approx(36 * rows[n], abs=0.01)
            middle = 84 + (n + 0.5 - view["y"]) * view["zoom"]
            assert y + height / 2 == pytest.approx(middle, abs=1)
        assert len(tall) >= 4
        for x, _, width, height in wide:
            key = int(view["x"] + (x + width / 2 - 112) / view["zoom"])
            assert height == pytest.approx(36 * columns[key] / columns.max(), abs=0.01)
        assert len(wide) >= 4


def test_the_pointer_reads_a_sum(open_map, recording):
    """Also one that was not known when it came to rest there."""
    page = open_map(recording, hash="L0H1&query=5&key=3")
    held = []
    page.page.route(re.compile("data/sums"), lambda route: held.append(route))
    page.show("L0H1&query=5&key=3&sums=shown")
    weights = weights_of(recording, 1)
    right, y = page.place(4, 7)
    page.page.mouse.move(right + page.view()["zoom"], y)
    while not held:
        page.page.wait_for_timeout(5)
    assert "weights sum to" not in page.page.locator(STATUS).text_content()
    for route in held:
        route.continue_()
    said = is_said(page.page, "query 4 «because»: weights sum to")
    assert float(re.search(r"to ([\d.]+)", said)[1]) == pytest.approx(weights[4].sum(), rel=6e-3)
    assert page.page.locator(".regard-sums-label").inner_text() in said
    x, bottom = page.place(7, 2)
    page.page.mouse.move(x, bottom + page.view()["zoom"])
    said = is_said(page.page, "key 2 «cat»: receives")
    assert float(re.search(r"es ([\d.]+)", said)[1]) == pytest.approx(weights[:, 2].sum(), rel=6e-3)
    page.page.mouse.move(x, bottom)
    page.page.locator(".regard-sums-label").wait_for(state="hidden")


def test_a_difference_has_no_sums(open_map, recording):
    page = open_map(recording, hash="L0H1&query=5&key=3&sums=shown&compare=difference&other=L0H2")
    assert not bars(saved(page.page, "SVG drawing")[0])
    button = page.page.get_by_role("button", name="sums", exact=True)
    assert button.is_disabled()
    assert button.get_attribute("title") == "Sums are those of one head"
