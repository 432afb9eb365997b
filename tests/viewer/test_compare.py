"""Two heads on one map, and the map as a file."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from viewer.map_page import (
    assert_pixels,
    decoded,
    expected_entries,
    log_weights,
    made,
    pooled,
)

TENS = np.log(10)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def text():
    return made(300, heads=3, key_heads=3, seed=1)


@pytest.fixture(scope="module")
def another():
    return made(210, heads=2, key_heads=1, seed=2)


def difference(one, other):
    """exp(one) - exp(other) of the larger matrix; what only one sees is its weight."""
    shape = np.maximum(one.shape, other.shape)
    weights = []
    for logs in (one, other):
        whole = np.full(shape, np.nan)
        whole[: logs.shape[0], : logs.shape[1]] = logs
        weights.append(whole)
    hidden = np.isnan(weights[0]) & np.isnan(weights[1])
    found = [np.where(np.isnan(logs), 0, np.exp(logs)) for logs in weights]
    return np.where(hidden, np.nan, found[0] - found[1])


def assert_differs(page, one, other, span=0.5, plane="max"):
    view, pixels = page.view(), page.screen(1)
    level = int(view["level"])
    wanted = difference(pooled(one, level, plane), pooled(other, level, plane))
    assert_pixels(pixels, expected_entries(view, pixels.shape, wanted, -span, span), "DIVERGING")


def test_the_difference_is_that_of_float64(open_map, text):
    page = open_map(text, hash="L0H2&compare=difference&other=L0H0")
    one, other = log_weights(text, 2), log_weights(text, 0)
    assert_differs(page, one, other)
    page.show("L0H2&compare=difference&other=L0H0&plane=mass&x=30&y=40&zoom=9.5&span=0.1")
    assert_differs(page, one, other, 0.1, "mass")


def test_recordings_of_other_lengths_are_compared(open_map, text, another):
    page = open_map(text, another, hash="L0H0&compare=difference&other=L0H1@1")
    assert_differs(page, log_weights(text, 0), log_weights(another, 1))


def test_a_difference_is_read_out(open_map, text):
    page = open_map(text, hash="L0H1&compare=difference&other=L0H0&zoom=20")
    page.page.mouse.move(*page.place(15, 4))
    one, other = (np.exp(log_weights(text, head)[15, 4]) for head in (1, 0))
    sign = "−" if one < other else "+"
    words = page.readout()
    assert f"L0H1 {one:.4f} − L0H0 {other:.4f}" in words
    assert f"{sign}{abs(one - other):.4f}" in words


def test_two_maps_share_one_view(open_map, text):
    page = open_map(text, hash="L0H1&compare=side&other=L0H2&x=20.5&y=30&zoom=8")
    for n, head in ((0, 1), (1, 2)):
        view, pixels = page.view(n), page.screen(1, n)
        assert (view["x"], view["y"], view["zoom"]) == (20.5, 30, 8)
        logs = log_weights(text, head)
        assert_pixels(pixels, expected_entries(view, pixels.shape, logs, -5 * TENS, 0))
    box = page.page.locator(".regard-map-cells").nth(1).bounding_box()
    page.page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.page.mouse.wheel(0, -400)
    page.wait()
    first, second = page.view(0), page.view(1)
    assert first["zoom"] > 8
    assert [first[name] for name in "xy"] == [second[name] for name in "xy"]
    page.page.mouse.click(*page.place(45, 40, 1))
    assert page.selection()["query"] == "45"


def test_the_other_head_is_chosen_and_swapped(open_map, text, another):
    page = open_map(text, another, hash="L0H2")
    choices = page.page.locator(".regard-compare select")
    choices.first.select_option("difference")
    page.wait()
    assert page.selection()["other"] == "L0H1%401"
    choices.last.select_option("0")
    page.wait()
    assert page.selection()["other"] == "L0H1"
    page.page.get_by_role("button", name="Swap both heads").click()
    page.wait()
    assert page.page.evaluate("() => location.hash").startswith("#L0H1")
    assert page.selection()["other"] == "L0H2"
    assert_differs(page, log_weights(text, 1), log_weights(text, 2))


def saved(page, name):
    page.page.locator(".regard-menu > summary").first.click()
    with page.page.expect_download() as download:
        page.page.get_by_role("button", name=name).click()
    return download.value


def test_the_png_is_the_canvas_with_axes(open_map, text, tmp_path):
    page = open_map(text, hash="L0H1&x=20.5&y=30&zoom=8&query=250&key=200")
    page.page.locator(".regard-pairs").evaluate("(panel) => { panel.open = false; }")
    page.wait()
    download = saved(page, "PNG")
    download.save_as(tmp_path / "map.png")
    assert re.fullmatch(r".*L0H1\.png", download.suggested_filename)
    picture = decoded((tmp_path / "map.png").read_bytes())
    canvas = page.canvas()
    height, width = canvas.shape[:2]
    inside = picture[84 + 1 : 84 + height, 112 + 1 : 112 + width]
    assert np.array_equal(inside, canvas[1:, 1:])
    assert picture.shape[0] > height + 84
    assert (picture[:84, 112:, :3] != picture[0, 0, :3]).any()


@pytest.mark.parametrize("zoom", ["8", "64"], ids=["picture", "rectangles"])
def test_the_svg_has_vector_axes_and_every_cell(open_map, text, tmp_path, zoom):
    page = open_map(text, hash=f"L0H1&zoom={zoom}")
    download = saved(page, "SVG")
    download.save_as(tmp_path / "map.svg")
    root = ET.parse(tmp_path / "map.svg").getroot()
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert any("L0H1" in text for text in texts)
    if zoom == "8":
        assert "50" in texts
    else:
        assert any("t3" in text for text in texts)
        fills = [
            node.get("fill") for node in root.iter(f"{SVG}rect") if node.get("shape-rendering")
        ]
        canvas = page.canvas()
        r, g, b = canvas[10, 10, :3]
        assert fills[0] == f"rgb({r},{g},{b})"
        assert len(fills) > 30
    assert len(list(root.iter(f"{SVG}image"))) == (2 if zoom == "8" else 1)
