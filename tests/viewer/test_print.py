"""The page as the browser prints it."""

import re

import pytest

from viewer.pages import is_chosen, spoken

CELLS = "document.querySelector('.regard-map-cells').getBoundingClientRect().toJSON()"
PAPER = {"width": 718, "height": 1047}  # A4 without its margins


@pytest.fixture
def printed(serve, open_page):
    page = open_page(f"{serve(spoken())}#L0H1&query=6&key=3", size=(1280, 800), shared=False)
    is_chosen(page, 6, 3)
    page.wait_for_selector(".regard-map[data-idle=true]")
    return page


def test_paper_has_the_shape_of_the_page(printed):
    data = printed.pdf(prefer_css_page_size=True)
    sides = [re.findall(rb"[\d.]+", box) for box in re.findall(rb"/MediaBox ?\[([^]]+)\]", data)]
    assert [[float(n) for n in box[2:]] for box in sides] == [[960, 600]]  # points, one sheet


def test_on_other_paper_a_cell_stays_a_square_at_its_labels(printed):
    before = printed.evaluate(CELLS)
    printed.evaluate("dispatchEvent(new Event('beforeprint'))")
    printed.emulate_media(media="print")
    printed.set_viewport_size(PAPER)
    assert printed.evaluate(CELLS) == before


def test_tints_and_bars_are_printed(printed):
    adjust = "n => getComputedStyle(n).printColorAdjust"
    for part in (".regard-token", ".regard-bar-row", ".regard-switch button"):
        assert printed.locator(part).first.evaluate(adjust) == "exact"
