"""The viewer in JupyterLab itself: its widths, its heights, its colours, and what it is called."""

import re

import pytest

from regard._base.tables import DIVERGING
from viewer.conftest import is_required
from viewer.jupyter import Lab

pytestmark = pytest.mark.xdist_group("lab")

MADE = """
import numpy as np
from regard.recording import Layer, Recording

tokens = ["The", " tired", " cat", " sle", "pt", " because", " it", " was", " warm"]
random = np.random.default_rng(0)
numbers = lambda: (1.4 * random.standard_normal((4, len(tokens), 8))).astype("f")
layers = [Layer(numbers(), numbers(), numbers(), causal=True) for _ in range(2)]
recording = Recording(tokens, layers, model="spoken")
"""
CELLS = {
    "recording": "recording",
    "layer": "recording.weights[1]",
    "head": "recording.weights[1].head(2)",
    "words": "recording.in_words().weights[1]",
    "steps": "recording.steps(1, 2)",
}
ORDER = [None, *CELLS]  # the first cell makes the recording
IDLE = ".regard-map[data-idle=true]"
BOXES = """(root) => Object.fromEntries(
  ["heads", "centre", "text", "pairs", "map-cells", "header", "frame"].map((name) => {
    const box = root.querySelector(`.regard-${name}`).getBoundingClientRect();
    return [name, [box.left, box.top, box.right, box.bottom]];
  })
)"""

HAS_PIXEL = """([canvas, colour]) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let n = 0; n < data.length; n += 4)
    if (colour.every((value, channel) => data[n + channel] === value)) return true;
  return false;
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    pytest.importorskip("regard.viewer.notebook", reason="anywidget is not installed")
    if not is_required():
        pytest.importorskip("jupyterlab", reason="pip install jupyterlab, of the test extra")
    found = Lab(tmp_path_factory.mktemp("lab"))
    try:
        found.wait()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def notebook(lab, browser):
    """A page whose cells have run, what its console said, and where its requests went."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.set_default_timeout(60_000)
    page.complaints, page.elsewhere = [], []
    own = (lab.address, lab.address.replace("http", "ws"), "data:", "blob:")
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    # JupyterLab warns of its own slowness on a machine that is busy.
    page.on("console", lambda told: told.type == "error" and page.complaints.append(told.text))
    page.on("request", lambda told: told.url.startswith(own) or page.elsewhere.append(told.url))
    lab.run(page, lab.write("attention.ipynb", MADE, *CELLS.values()))
    yield page
    page.context.close()


@pytest.fixture
def output(notebook):
    """What a cell shows: ``output("layer")``, drawn, in a window of a width."""

    def find(name, width=1280):
        notebook.set_viewport_size({"width": width, "height": 900})
        cell = notebook.locator(".jp-Notebook .jp-CodeCell").nth(ORDER.index(name))
        cell.scroll_into_view_if_needed()
        shown = cell.locator(".jp-OutputArea")
        if name != "steps":
            shown.locator(IDLE).wait_for()
        return shown

    return find


def boxes(shown):
    return shown.locator(".regard").evaluate(BOXES)


def apart(one, other):
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@pytest.mark.parametrize("width", [1000, 820])
def test_heads_are_a_strip_and_the_text_stands_beside_the_map(output, width):
    shown = output("recording", width)
    found = boxes(shown)
    left, _, right, _ = found["frame"]
    assert 640 <= right - left < 1000
    assert right - left >= 0.95 * shown.locator(".jp-OutputArea-output").bounding_box()["width"]
    assert found["heads"][2] - found["heads"][0] >= 0.95 * (right - left)  # a strip above
    assert found["heads"][3] <= found["centre"][1]
    assert found["text"][0] >= found["centre"][2] - 1
    assert found["text"][1] < found["centre"][3]


def test_in_a_wide_cell_heads_map_and_text_stand_side_by_side(output):
    found = boxes(output("recording", 1280))
    assert found["frame"][2] - found["frame"][0] >= 1000
    assert found["heads"][2] <= found["centre"][0] + 1
    assert found["centre"][2] <= found["text"][0] + 1


@pytest.mark.parametrize("width", [1280, 1000, 820])
def test_the_height_follows_the_map(output, width):
    left, top, right, bottom = boxes(output("recording", width))["map-cells"]
    assert 0.75 < (right - left) / (bottom - top) < 1.34


@pytest.mark.parametrize("width", [1280, 1000, 820])
def test_no_list_covers_a_cell_of_the_map(output, width):
    shown = output("recording", width)
    if width < 1280:
        shown.get_by_role("button", name="Pairs").click()
    shown.locator(".regard-pairs button").first.wait_for()
    found = boxes(shown)
    assert found["pairs"][2] > found["pairs"][0]
    assert apart(found["pairs"], found["map-cells"])


def test_it_opens_at_the_head_that_tells_most(output):
    made = {}
    exec(MADE, made)
    told = made["recording"].heads().telling()
    assert (told.layer, told.head) != (0, 0)
    says = output("recording").locator(".regard-map-says").inner_text()
    assert says.startswith(f"L{told.layer}H{told.head} ·")


@pytest.mark.parametrize(
    ("name", "says", "caption", "tokens"),
    [
        ("layer", r"L1H\d ·", "L1H", 9),
        ("head", r"L1H2 ·", "L1H2 ·", 9),
        ("words", r"L1H\d ·", "L1H", 8),
    ],
)
def test_weights_keep_layer_head_and_tokens(output, name, says, caption, tokens):
    shown = output(name)
    assert re.match(says, shown.locator(".regard-map-says").inner_text())
    assert shown.locator(".regard-map-caption").inner_text().startswith(caption)
    texts = shown.locator(".regard-token").all_inner_texts()
    assert len(texts) == tokens
    assert "".join(texts).startswith("The tired cat slept")
    assert "spoken" in shown.locator(".regard-title").inner_text()


def test_controls_have_the_looks_of_the_page(output):
    shown = output("recording")
    button = shown.get_by_role("button", name="sums")
    assert button.evaluate("n => getComputedStyle(n).borderRadius") == "7px"
    soft = shown.locator(".regard-facts").evaluate("n => getComputedStyle(n).color")
    field = shown.get_by_role("searchbox")
    assert field.evaluate("n => getComputedStyle(n, '::placeholder').color") == soft


def test_steps_have_no_empty_formula(output):
    formulas = output("steps").locator(".regard-steps code").all_text_contents()
    assert len(formulas) >= 4
    assert all(text.strip() for text in formulas)


def test_a_sign_has_one_colour_in_tables_and_on_the_page(output):
    table = output("steps").locator("table").first  # of the query
    cells = table.locator("td[style*=background]").evaluate_all(
        "all => all.map(c => [Number(c.textContent), getComputedStyle(c).backgroundColor])"
    )
    largest = max(cells, key=lambda cell: abs(cell[0]))
    end = DIVERGING[-1 if largest[0] > 0 else 0].astype(int)
    assert largest[1] == f"rgb({', '.join(map(str, end))})"
    shown = output("head")
    shown.get_by_role("button", name="Steps").click()
    canvas = shown.locator(".regard-steps canvas").first  # of the query too
    canvas.page.wait_for_function(HAS_PIXEL, arg=[canvas.element_handle(), end.tolist()])


def test_the_console_is_empty_and_nothing_is_asked_elsewhere(notebook, output):
    output("words")
    assert notebook.complaints == []
    assert notebook.elsewhere == []
