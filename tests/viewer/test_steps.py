"""Steps of small texts: all of them in sight at once, with numbers that can be read."""

import re

import numpy as np
import pytest

from regard import Edit, Layer, Recording
from viewer.pages import is_chosen, spoken

BOXES = """(selector) => [...document.querySelectorAll(selector)]
  .filter((node) => node.checkVisibility())
  .map((node) => node.getBoundingClientRect())
  .map(({x, y, right, bottom}) => [x, y, right, bottom])"""
# What is written into cells as they are drawn anew: [number, its colour, its cell's colour].
WRITTEN = """() => {
  document.regardPage = null; // no other test has the document
  window.written = [];
  const pen = CanvasRenderingContext2D.prototype;
  const {fillRect, fillText} = pen;
  let cell = "";
  pen.fillRect = function (...box) { cell = this.fillStyle; fillRect.apply(this, box); };
  pen.fillText = function (text, ...place) {
    window.written.push([text, this.fillStyle, cell]);
    fillText.call(this, text, ...place);
  };
}"""
EVERYTHING = {"softcap": 5.0, "sinks": np.ones(4, "f"), "window": (7, 0)}


@pytest.fixture
def show(serve, open_page):
    """Opens the steps of a text of so many tokens, at its last query."""

    def start(tokens, screen=(1280, 720), scheme="light", **options):
        recording = spoken([f" word{n}" for n in range(tokens)], layers=1, **options)
        address = f"{serve(recording)}#L0H1&view=steps&query={tokens - 1}&key={tokens - 1}"
        page = open_page(address, size=screen, color_scheme=scheme)
        is_chosen(page, tokens - 1, tokens - 1)
        return page, recording

    return start


def boxes(page, selector):
    return np.reshape(page.evaluate(BOXES, selector), (-1, 4))


SCREENS = [(1280, 720), (820, 1180)]


# Every pair of a length, options and a screen; of the longest all three.
@pytest.mark.parametrize(
    ("tokens", "options", "screen"),
    [
        (tokens, options, screen)
        for n, tokens in enumerate([1, 3, 8, 9, 16])
        for m, options in enumerate([{}, {"size": 128}, EVERYTHING])
        for k, screen in enumerate(SCREENS)
        if tokens == 16 or (n + m + k) % 2 == 0
    ],
)
def test_all_steps_of_a_small_text_are_in_sight(show, tokens, options, screen):
    bias = np.linspace(-1, 1, tokens**2, dtype="f").reshape(1, tokens, tokens)
    page, _ = show(tokens, screen, **options, **({"bias": bias} if "softcap" in options else {}))
    page.wait_for_selector(".regard-band")
    room = page.locator(".regard-flow").bounding_box()
    left, top = room["x"], room["y"]
    right, bottom = left + room["width"], top + room["height"]
    shown = boxes(page, ".regard-flow :is(.regard-grid, figcaption, .regard-shape, .regard-stages)")
    assert (shown[:, :2] >= [left, top]).all()
    assert (shown[:, 2:] <= [right, bottom + 0.5]).all()
    assert bottom <= boxes(page, ".regard-arithmetic")[0, 1] + 0.5
    arithmetic = page.locator(".regard-arithmetic")
    assert arithmetic.evaluate("n => n.scrollHeight <= n.clientHeight + 1")
    grids = boxes(page, ".regard-grid")
    for n, (x, y, end, foot) in enumerate(grids):
        others = np.delete(grids, n, 0)
        apart = (others[:, 0] >= end) | (others[:, 2] <= x)
        assert (apart | (others[:, 1] >= foot) | (others[:, 3] <= y)).all()
    scores = page.get_by_role("grid", name=re.compile("^(scaled|biased|masked)"))
    assert scores.bounding_box()["width"] / tokens >= 11


def test_a_number_lies_where_its_row_and_its_column_meet(show):
    page, _ = show(7)
    named = {
        name: page.get_by_role("grid", name=re.compile(rf"^{name}, ")).bounding_box()
        for name in ("q", "kᵀ", "masked", "weights", "v", "output")
    }
    for across in (["q", "masked", "weights", "output"],):
        assert len({(named[n]["y"], named[n]["height"]) for n in across}) == 1
    for down in (["kᵀ", "masked"], ["v", "output"]):
        assert len({(named[n]["x"], named[n]["width"]) for n in down}) == 1


def test_one_picture_has_every_stage_of_the_scores(show):
    page, recording = show(5, softcap=5.0)
    steps = recording.steps(0, 1)
    stages = page.locator(".regard-stages button:visible")
    assert stages.all_text_contents() == ["scores", "÷ √8", "tanh", "mask"]
    assert page.locator(".regard-stages [aria-pressed=true]").text_content() == "mask"
    for name in ("scores", "scaled", "capped", "masked"):
        page.locator(f"[data-stage={name}]").click()
        grid = page.get_by_role("grid", name=re.compile(f"^{name}, 5 × 5"))
        said = grid.locator("[role=gridcell]").text_content()
        value = float(said.split(": ")[1].replace("−", "-"))
        assert value == pytest.approx(getattr(steps, name)[4, 4], rel=1e-3)
    assert page.locator(".regard-matrix:visible").count() == 6


def test_edits_are_a_stage_and_a_line_of_the_arithmetic(show):
    edits = [Edit(keys=4, factor=2.0), Edit(queries=4, keys=0)]
    page, recording = show(5, causal=False, edits=edits)
    stages = page.locator(".regard-stages button:visible")
    assert stages.all_text_contents() == ["scores", "÷ √8", "+ edits", "mask"]
    assert "+ ln(edits) + mask" in page.locator(".regard-steps h2").text_content()
    line = page.locator(".regard-arithmetic [data-line=edited]")
    assert "+ 0.693 of the edits" in line.text_content()
    page.locator("[data-stage=edited]").click()
    grid = page.get_by_role("grid", name=re.compile("^edited, 5 × 5"))
    value = grid.locator("[role=gridcell]").text_content().split(": ")[1]
    expected = recording.steps(0, 1).masked[4, 4]
    assert float(value.replace("−", "-")) == pytest.approx(expected, rel=1e-3)


def test_a_text_without_masked_pairs_has_no_such_stage(show):
    page, _ = show(4, causal=False)
    assert page.locator(".regard-stages button:visible").all_text_contents() == ["scores", "÷ √8"]


def luminance(colour):
    part = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    part = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return part @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cells_of_up_to_eight_tokens_have_their_numbers(show, scheme):
    page, recording = show(8, scheme=scheme)
    page.evaluate(WRITTEN)
    page.locator("[data-stage=scaled]").click()
    written = page.evaluate("() => window.written")
    numbers = np.array([float(text.replace("−", "-")) for text, *_ in written])
    assert len(numbers) == 3 * 64  # kᵀ, scores and weights; the others find no room
    steps = recording.steps(0, 1)
    weights = np.asarray(steps.weights).ravel()
    np.testing.assert_allclose(numbers[128:], weights, atol=0.006)
    scaled = np.asarray(steps.scaled).ravel()
    np.testing.assert_allclose(numbers[64:128], scaled, rtol=0.06, atol=0.5)
    for _, ink, paper in written:
        light, dark = sorted(map(luminance, (ink, paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_cells_of_more_tokens_have_none(show):
    page, _ = show(9)
    page.evaluate(WRITTEN)
    page.locator("[data-stage=scaled]").click()
    assert page.evaluate("() => window.written") == []


def test_the_formula_names_the_sink(show):
    page, _ = show(5, sinks=np.ones(4, "f"))
    assert "with sink" in page.locator(".regard-steps h2").text_content()
    weight = page.locator("[data-line=weight]").text_content()
    assert "(Σⱼ e^sⱼ + e^sink)" in weight


def test_powers_of_scores_far_below_0_are_written_less_the_largest(serve, open_page):
    query, key = np.full((1, 3, 1), 40, "f"), np.float32([-25, -25.02, -25.05]).reshape(1, 3, 1)
    recording = Recording([" a", " b", " c"], [Layer(query, key, key, causal=True, scale=1.0)])
    page = open_page(f"{serve(recording)}#L0H0&view=steps&query=2&key=1")
    is_chosen(page, 2, 1)
    total = np.exp([0, -0.8, -2]).sum()
    words = "e^(−1000.8 + 1000) ÷ Σⱼ e^(sⱼ + 1000)"
    found = f"{words} = {np.exp(-0.8):.3g} ÷ {total:.3g} = {np.exp(-0.8) / total:.4f}"
    assert found in page.locator("[data-line=weight]").text_content()
