"""Two heads on one map, and the map as a file."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from regard.recording import Recording
from regard.viewer._alignment import align, places
from viewer.map_page import (
    PAPER,
    MapPage,
    assert_pixels,
    constant,
    decoded,
    expected_entries,
    log_weights,
    made,
    pooled,
)
from viewer.pages import is_said, saved, share, shown_bars, spoken

TENS = np.log(10)
BOTH = [
    "<bos>",
    "The",
    " c",
    "at",
    " s",
    "at",
    " on",
    " the",
    " m",
    "at",
    " because",
    " it",
    " was",
]
TIRED, SOFT = [*BOTH, " t", "i", "red", "."], [*BOTH, " so", "ft", "."]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def text():
    return made(300, heads=3, key_heads=3, seed=1)


@pytest.fixture(scope="module")
def another():
    return made(210, heads=2, key_heads=1, seed=2)


def difference(one, other):
    """exp(one) - exp(other); what only one sees is its weight."""
    hidden = np.isnan(one) & np.isnan(other)
    found = [np.where(np.isnan(logs), 0, np.exp(logs)) for logs in (one, other)]
    return np.where(hidden, np.nan, found[0] - found[1])


def assert_differs(page, one, other, span=0.5, plane="max", lacks=((), ())):
    """The map shows one − other; bins of ``lacks``, rows and columns, are hatched."""
    level = int(page.view()["level"])
    wanted = difference(pooled(one, level, plane), pooled(other, level, plane))
    assert_shown(page, wanted, lacks, span)


def assert_shown(page, wanted, lacks, span=0.5):
    view, pixels = page.view(), page.screen(1)
    entries = expected_entries(view, pixels.shape, wanted, -span, span)
    hatched = np.zeros(wanted.shape)
    hatched[list(lacks[0])] = hatched[:, list(lacks[1])] = 1
    hatched = expected_entries(view, pixels.shape, hatched, 0, 1) > 0
    stripes = {tuple(colour) for colour in constant("HATCH")["light"]}
    assert {tuple(colour) for colour in pixels[hatched].tolist()} == (
        stripes if hatched.any() else set()
    )
    pixels = np.where(hatched[..., None], PAPER[False], pixels)
    assert_pixels(pixels, np.where(hatched, -2, entries), "DIVERGING")


def test_the_difference_is_that_of_float64(open_map, text):
    page = open_map(text, hash="L0H2&compare=difference&other=L0H0")
    one, other = log_weights(text, 2), log_weights(text, 0)
    assert_differs(page, one, other)
    page.show("L0H2&compare=difference&other=L0H0&plane=mass&x=30&y=40&zoom=9.5&span=0.1")
    assert_differs(page, one, other, 0.1, "mass")


def test_what_has_no_counterpart_in_a_shorter_text_is_hatched(open_map, text, another):
    page = open_map(text, another, hash="L0H0&compare=difference&other=L0H1@1")
    one, other = log_weights(text, 0), np.full((300, 300), np.nan)
    one[210:] = one[:, 210:] = np.nan
    other[:210, :210] = log_weights(another, 1)
    assert_differs(page, one, other, lacks=[range(210, 300)] * 2)
    assert page.page.locator(".regard-map-says").inner_text() == "90 tokens have no counterpart"
    page.page.get_by_role("button", name="Swap both heads").click()
    page.wait()
    assert_differs(page, log_weights(another, 1), one_of(text, 210))
    said = "90 tokens of the other text have no counterpart"
    assert page.page.locator(".regard-map-says").inner_text() == said


def one_of(recording, count):
    """The head 0 of the first tokens, with the weights of the whole."""
    return log_weights(recording, 0)[:count, :count]


def changed(text, seed=0):
    """The text with some tokens left out, replaced and added."""
    random = np.random.default_rng(seed)
    fates = random.choice(4, len(text), p=[0.1, 0.1, 0.1, 0.7])
    return [
        token
        for n, (token, fate) in enumerate(zip(text, fates))
        for token in ([], [f" x{n}"], [token, " new"], [token])[fate]
    ]


@pytest.mark.parametrize("plane", ["max", "mass"])
def test_the_difference_of_two_texts_is_that_of_gathered_weights(open_map, plane):
    texts = [f" w{n % 90}" for n in range(700)]
    others = changed(texts)
    recordings = [
        Recording(tokens, made(len(tokens), seed=seed).layers)
        for seed, tokens in enumerate((texts, others))
    ]
    found = align(*recordings)
    queries, keys = places(found.queries, len(texts)), places(found.keys, len(texts))
    lacks = (queries < 0)[:, None] | (keys < 0)
    one, other = (log_weights(recording, 1) for recording in recordings)
    other = other[np.ix_(np.maximum(queries, 0), np.maximum(keys, 0))]
    one, other = (np.where(lacks, np.nan, logs) for logs in (one, other))
    where = f"L0H1&compare=difference&other=L0H1@1&span=0.05&plane={plane}"
    page = open_map(*recordings, hash=where)
    assert page.view()["level"] == 1
    has = [np.add.reduceat(side >= 0, np.arange(0, 700, 2)) > 0 for side in (queries, keys)]
    none = [np.flatnonzero(~side) for side in has]
    assert_differs(page, one, other, 0.05, plane, none)
    page.show(f"{where}&x=300&y=310&zoom=3")
    assert page.view()["level"] == 0
    lacking = [np.flatnonzero(side < 0) for side in (queries, keys)]
    assert_differs(page, one, other, 0.05, plane, lacking)


def test_a_difference_is_read_out(open_map, text):
    page = open_map(text, hash="L0H1&compare=difference&other=L0H0&zoom=20")
    assert page.readout("query 299")  # what is chosen, which comes with its row
    page.page.mouse.move(*page.place(15, 4))
    one, other = (np.exp(log_weights(text, head)[15, 4]) for head in (1, 0))
    sign = "−" if one < other else "+"
    words = page.readout(f"L0H1 {share(one)} − L0H0 {share(other)}")
    assert f"{sign}{share(abs(one - other))}" in words


def test_the_colours_of_a_difference_have_a_range_in_per_cent(open_map, text):
    page = open_map(text, hash="L0H1&compare=difference&other=L0H0")
    field = page.page.get_by_label("Largest difference with a colour")
    bar = page.page.get_by_role("img", name="blue: 50 % less, red: 50 % more")
    assert (field.input_value(), bar.count()) == ("50", 1)
    field.fill("10")
    field.press("Enter")
    page.wait()
    assert page.selection()["span"] == "0.1"
    assert_differs(page, log_weights(text, 1), log_weights(text, 0), 0.1)
    field.fill("-10")
    field.press("Enter")
    is_said(page.page, "-10 is no end of these colours")
    assert field.input_value() == "10"


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
    query, key = int(first["y"]) + 5, int(first["x"]) + 5
    page.page.mouse.click(*page.place(query, key, 1))
    assert page.selection()["query"] == str(query)


def test_the_other_head_is_chosen_and_swapped(open_map, text, another):
    page = open_map(text, another, hash="L0H2")
    page.page.get_by_label("compare").select_option("difference")
    page.wait()
    assert page.selection()["other"] == "L0H1%401"
    page.page.get_by_label("of", exact=True).select_option("0")
    page.wait()
    assert page.selection()["other"] == "L0H1"
    page.page.get_by_role("button", name="Swap both heads").click()
    page.wait()
    assert page.page.evaluate("() => location.hash").startswith("#L0H1")
    assert page.selection()["other"] == "L0H2"
    assert_differs(page, log_weights(text, 1), log_weights(text, 2))


def resting(tokens, shares=(0.01,)):
    """Heads of which every query leaves such a share on each token, and the rest on the first."""
    weights = np.stack([np.tril(np.full([len(tokens)] * 2, share)) for share in shares])
    weights[:, :, 0] += 1 - weights.sum(-1)
    return Recording.from_weights(tokens, [weights.astype("f")], model="resting")


COMPARED = "L0H0&compare=difference&other=L0H0@1&query=12&key=1"
LISTED = """() => [...document.querySelectorAll(".regard-pairs button")]
  .map((node) => [node.dataset.query, node.dataset.key, node.querySelector("em").textContent])"""


def assert_compared(page):
    """What the page says of TIRED − SOFT is of counterparts alone."""
    said = "3 tokens here and 2 in the other text have no counterpart"
    assert page.page.locator(".regard-map-says").inner_text() == said
    # By position, the last query would have no counterpart, and differ by its 0.84.
    page.page.wait_for_function(f"() => ({LISTED})().length === 1")
    assert page.page.evaluate(LISTED) == [["16", "0", "−1.00 %"]]
    wanted = np.zeros((17, 17))
    wanted[16, 0] = -0.01
    wanted = np.where(np.tri(17) > 0, wanted, np.nan)
    assert_shown(page, wanted, [range(13, 16)] * 2)


def test_what_has_no_counterpart_makes_no_difference(open_map):
    page = open_map(resting(TIRED), resting(SOFT), hash=COMPARED)
    assert_compared(page)
    page.page.mouse.move(*page.place(14, 0))
    assert page.readout("no counterpart")
    page.page.mouse.move(*page.place(16, 0))
    assert page.readout("L0H0 84.00 % − L0H0 85.00 % = −1.00 %   (there: query 15 → key 0)")
    page.page.mouse.move(2, 2)
    page.page.get_by_role("button", name="auto range").click()
    assert page.selection()["span"] == "0.01"


def test_what_has_no_counterpart_is_told_in_full(open_map):
    place = "L0H0&compare=difference&other=L0H0@1"
    page = open_map(spoken(list("abcdefgh")), spoken(list("abcd")), hash=place, shared=False).page
    says = page.locator(".regard-map-says")
    says.filter(has_text="4 tokens have no counterpart").wait_for()
    says.evaluate("node => { node.textContent = '2,312 tokens here and 2,148 in the other text"
                  " have no counterpart'; }")  # fmt: skip
    for width in range(1000, 1500, 20):
        page.set_viewport_size({"width": width, "height": 720})
        assert says.evaluate("node => node.scrollHeight - node.clientHeight") == 0, width


def test_names_are_whole_beside_a_difference(open_map):
    page = open_map(spoken(), hash="L0H1&compare=difference&other=L0H0&query=7&key=3").page
    names = page.locator(".regard-differences .regard-bar-token")
    names.filter(has_text="because").wait_for()
    cut = names.evaluate_all("all => all.filter((n) => n.scrollWidth > n.clientWidth).length")
    assert cut == 0


def test_the_text_says_what_differs_and_what_has_no_counterpart(open_map):
    page = open_map(resting(TIRED), resting(SOFT), hash=COMPARED.replace("query=12", "query=16"))
    page.page.wait_for_selector(".regard-text[data-shown^='query 16 key 1 ']")
    assert shown_bars(page.page) == [(0, "−1.00 %", "84.00 % − 85.00 %")]
    lacking = page.page.locator(".regard-lacking").all_inner_texts()
    assert [text.strip() for text in lacking] == ["t", "i", "red"]
    assert "3 tokens have no counterpart" in page.page.locator(".regard-text").inner_text()
    assert "L0H0 of the other: 1.00 %" in is_said(page.page, "of the other")
    page.page.locator(".regard-token").nth(14).dblclick()
    is_said(page.page, "no counterpart")
    page.page.locator(".regard-text", has_text="It has no counterpart").wait_for()


def test_an_exported_file_compares_at_counterparts(open_page, tmp_path):
    path = tmp_path / "compared.html"
    resting(TIRED).export(path, other=resting(SOFT))
    page = MapPage(open_page(f"{path.as_uri()}#{COMPARED}"))
    assert_compared(page)
    words = page.page.locator(".regard-change p").inner_text()
    assert words == "Change of each head, most: L0H0 0.04 %."


def test_the_counterpart_of_a_pair_is_marked_on_the_other_map(open_map):
    place = "L0H0&compare=side&other=L0H0@1&query=16&key=12"
    page = open_map(resting(TIRED), resting(SOFT), hash=place)
    titles = page.page.locator(".regard-map-title").all_inner_texts()
    assert titles == ["L0H0 of resting (1)", "L0H0 of resting (2)"]
    page.page.mouse.click(*page.place(15, 3, 1))
    assert (page.selection()["query"], page.selection()["key"]) == ("16", "3")
    page.page.mouse.move(*page.place(16, 12))
    outlines = [page.page.locator(".regard-map-hover").nth(n).bounding_box() for n in (0, 1)]
    for outline, where in zip(outlines, (page.place(16, 12), page.place(15, 12, 1))):
        middle = outline["x"] + outline["width"] / 2, outline["y"] + outline["height"] / 2
        assert np.allclose(middle, where, atol=1)
    page.page.mouse.click(*page.place(13, 3, 1))
    assert page.readout("no such pair")
    page.show(place.replace("query=16", "query=14"))
    title = page.page.locator(".regard-map-title").nth(1)
    assert title.inner_text().endswith("the pair has no counterpart")
    for frame in page.page.locator(".regard-map-frame").all():
        above = frame.locator(".regard-map-title").bounding_box()
        plot = frame.locator(".regard-map-plot").bounding_box()
        assert above["y"] + above["height"] <= plot["y"]


def test_a_swap_keeps_the_pair_or_says_which_other_it_takes(open_map):
    """By position, query 16 of one text would be none of the other's."""
    place = "L0H0&compare=side&other=L0H0@1&query=16&key=12"
    page = open_map(resting(TIRED), resting(SOFT), hash=place)
    page.page.get_by_role("button", name="Swap both heads").click()
    assert page.readout("query 15 «.» → key 12 «was»")
    assert (page.selection()["query"], page.selection()["key"]) == ("15", "12")
    page.show(place.replace("query=16", "query=14"))
    page.page.get_by_role("button", name="Swap both heads").click()
    assert page.readout("query 15 «.» → key 12")


def test_a_head_to_compare_with_that_is_not_there_is_replaced_by_one_that_is(open_map, text):
    page = open_map(text, hash="L0H2&compare=difference&other=L7H9&zoom=2")
    assert page.selection()["other"] == "L0H0"
    assert_differs(page, log_weights(text, 2), log_weights(text, 0))
    page.show("L0H1&compare=side&other=nothing&zoom=2")
    assert page.selection()["other"] == "L0H2"
    assert page.page.locator(".regard-map-title").nth(1).inner_text() == "L0H2"


def test_what_has_no_counterpart_is_not_said_to_be_masked(open_map):
    page = open_map(resting(TIRED), resting(SOFT), hash=COMPARED)
    page.page.mouse.move(*page.place(14, 0))
    page.page.locator(".regard-map-point", has_text="no counterpart").wait_for()


def test_texts_without_a_counterpart_are_not_said_to_be_equal(open_map):
    others = [f" x{n}" for n in range(9)]
    page = open_map(resting(TIRED), resting(others), hash=COMPARED)
    page.page.locator(".regard-pairs", has_text="no pair has a counterpart").wait_for()


def test_the_controls_take_one_row(open_map):
    for way in ("", "&compare=side&other=L0H0@1", "&compare=difference&other=L0H0@1"):
        page = open_map(resting(TIRED), resting(SOFT), hash=f"L0H0{way}").page
        assert page.locator(".regard-header").bounding_box()["height"] <= 44, way
        assert page.get_by_label("recording").locator("option").all_inner_texts() == [
            "resting (1)",
            "resting (2)",
        ]
        assert page.get_by_label("with layer").is_visible() == bool(way)


def test_names_of_texts_leave_the_other_head_its_controls(serve, open_page):
    names = [
        f"The animal did not cross the street, for it was too {end}" for end in ("far", "wide")
    ]
    address = serve(spoken(), spoken(seed=1), names=names)
    page = open_page(f"{address}#L0H1&compare=side&other=L0H1@1", shared=False)
    swap, centre = (
        page.get_by_role("button", name="Swap both heads"),
        page.locator(".regard-centre"),
    )
    for width in (320, 412, 700, 820, 1000, 1180, 1280):
        page.set_viewport_size({"width": width, "height": 720})
        control, around = swap.bounding_box(), centre.bounding_box()
        assert control["x"] + control["width"] <= around["x"] + around["width"], width


def test_the_heads_say_how_much_they_changed(open_map):
    shares = (0.0, 0.02, 0.01)
    page = open_map(resting(TIRED, shares), resting(SOFT, shares), hash="L0H0")
    assert not page.page.locator(".regard-change").is_visible()
    page.page.get_by_label("compare").select_option("difference")
    page.wait()
    page.page.wait_for_function(
        "() => document.querySelector('.regard-change p').textContent.endsWith('L0H1 0.07 %.')"
    )
    order = page.page.get_by_label("order")
    order.select_option("change")
    names = page.page.locator(".regard-head-name").all_inner_texts()
    scores = page.page.locator(".regard-head-score").all_inner_texts()
    assert list(zip(names, scores)) == [("L0H1", "0.07 %"), ("L0H2", "0.04 %"), ("L0H0", "0 %")]
    box = page.page.locator(".regard-change-grid").bounding_box()
    page.page.mouse.click(box["x"] + 2.5 * 13, box["y"] + 5)
    page.page.wait_for_function("() => location.hash.startsWith('#L0H2')")
    page.page.get_by_label("compare").select_option("")
    page.wait()
    assert not page.page.locator(".regard-change").is_visible()
    assert "change" not in order.inner_text()


def test_the_png_is_the_canvas_with_axes(open_map, text, tmp_path):
    page = open_map(text, hash="L0H1&x=20.5&y=30&zoom=8&query=250&key=200")
    page.page.locator(".regard-pairs").evaluate("(panel) => { panel.open = false; }")
    page.wait()
    data, name = saved(page.page, "PNG", dpi=96)
    assert re.fullmatch(r".*L0H1\.png", name)
    picture = decoded(data)
    canvas = page.canvas()
    height, width = canvas.shape[:2]
    inside = picture[84 + 1 : 84 + height, 112 + 1 : 112 + width]
    assert np.array_equal(inside, canvas[1:, 1:])
    assert picture.shape[0] > height + 84
    assert (picture[:84, 112:, :3] != picture[0, 0, :3]).any()


@pytest.mark.parametrize("zoom", ["6", "64"], ids=["picture", "rectangles"])
def test_the_svg_has_vector_axes_and_every_cell(open_map, text, tmp_path, zoom):
    page = open_map(text, hash=f"L0H1&zoom={zoom}")
    root = ET.fromstring(saved(page.page, "SVG")[0])
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert any("L0H1" in text for text in texts)
    if zoom == "6":
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
    assert len(list(root.iter(f"{SVG}image"))) == (2 if zoom == "6" else 1)
