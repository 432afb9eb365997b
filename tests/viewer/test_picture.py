"""The dialog that saves a picture: its choices, read from the files."""

import io
import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from viewer.map_page import constant
from viewer.pages import is_chosen, saved, spoken

ACCENT, FOCUS = (168, 18, 58), (20, 88, 184)  # of selection and rings, on white paper
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def show(serve, open_page):
    """Opens a recording with a chosen pair: ``show("scale=log", **page options)``."""

    def start(more="", recording=None, **options):
        found = spoken() if recording is None else recording
        page = open_page(f"{serve(found)}#L0H1&query=6&key=3&{more}", **options)
        is_chosen(page, 6, 3)
        page.locator(".regard-pairs button").first.wait_for(state="attached")
        return page

    return start


def pictured(data):
    found = Image.open(io.BytesIO(data))
    return found.info["dpi"][0], np.array(found.convert("RGBA")).astype(int)


def has(pixels, colour):
    return (np.abs(pixels[..., :3] - colour).max(-1) <= 2).any()


def texts(drawn):
    return [node.text for node in drawn.iter(f"{SVG}text")]


def test_a_png_has_the_width_and_the_resolution_that_are_asked_for(show):
    page = show()
    heights = []
    for dpi in (100, 250):
        data, name = saved(page, "PNG", width=4, dpi=dpi)
        found, pixels = pictured(data)
        assert name == "spoken-L0H1.png"
        assert found == pytest.approx(dpi, abs=0.02)
        assert pixels.shape[1] == 4 * dpi
        heights.append(pixels.shape[0])
    assert heights[1] == pytest.approx(2.5 * heights[0], abs=3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_is_white_and_nothing_is_marked_unless_that_is_chosen(show, scheme):
    page = show(color_scheme=scheme)
    before = page.locator(".regard-map-cells").first.screenshot()
    _, pixels = pictured(saved(page, "PNG", dpi=96)[0])
    assert (pixels[..., 3] == 255).all()
    assert pixels[2, 2, :3].tolist() == [255, 255, 255]
    assert has(pixels, constant("INVISIBLE")["light"])  # masked cells are those of light paper
    assert not has(pixels, ACCENT)
    assert not has(pixels, FOCUS)
    _, marked = pictured(saved(page, "PNG", marks=True)[0])
    assert has(marked, ACCENT)
    assert has(marked, FOCUS)
    page.mouse.move(1, 1)
    assert page.locator(".regard-map-cells").first.screenshot() == before


def test_the_background_may_be_left_out_or_be_that_of_the_page(show):
    page = show(color_scheme="dark")
    _, pixels = pictured(saved(page, "PNG", background="transparent")[0])
    assert pixels[2, 2, 3] == 0
    assert (pixels[..., 3] == 255).any()
    _, pixels = pictured(saved(page, "PNG", background="page")[0])
    assert pixels[2, 2, :3].tolist() == [22, 21, 29]
    assert has(pixels, constant("INVISIBLE")["dark"])
    clear = ElementTree.fromstring(saved(page, "SVG", background="transparent")[0])
    white = ElementTree.fromstring(saved(page, "SVG", background="white")[0])
    papers = [drawn.find(f"{SVG}rect[@fill='#ffffff']") for drawn in (clear, white)]
    assert [paper is not None for paper in papers] == [False, True]


@pytest.mark.parametrize(
    ("scale", "ticks", "label"),
    [
        ("linear", ["0", "20", "40", "60", "80", "100"], "weight, %"),
        ("log", ["0.001", "0.01", "0.1", "1", "10", "100"], "weight, %"),
        ("uniform", ["0.01", "0.1", "1", "10", "100"], "weight, times uniform"),
        ("linear&low=0.1&high=0.4", ["10", "20", "30", "40"], "weight, %"),
        ("linear&low=0.1&high=0.1004", ["10", "10.01", "10.02", "10.03", "10.04"], "weight, %"),
        ("log&low=-0.9&high=-0.6", ["12.6", "25.1"], "weight, %"),
        ("log&low=-1&high=-0.6", ["10", "25.1"], "weight, %"),
    ],
)
def test_the_colour_bar_has_ticks(show, scale, ticks, label):
    drawn = ElementTree.fromstring(saved(show(f"scale={scale}"), "SVG")[0])
    found = [node for node in drawn.iter(f"{SVG}text") if node.get("font-size") == "9"]
    assert [node.text for node in found] == ticks
    places = [float(node.get("x")) for node in found]
    assert np.allclose(np.diff(places), np.diff(places)[0], atol=0.02)
    assert label in texts(drawn)


def test_a_difference_has_ticks_on_both_sides_of_0(show):
    drawn = ElementTree.fromstring(saved(show("compare=difference&other=L0H0"), "SVG")[0])
    found = [node.text for node in drawn.iter(f"{SVG}text") if node.get("font-size") == "9"]
    assert found == ["−40", "−20", "0", "20", "40"]
    assert "difference of the weights, %" in texts(drawn)


def test_the_numbers_of_a_bar_of_effects_do_not_touch(show):
    page = show("plane=effect", recording=spoken(explained=True))
    page.wait_for_function("document.querySelector('.regard-map-says').textContent.includes('Red')")
    drawn = ElementTree.fromstring(saved(page, "SVG")[0])
    found = [node for node in drawn.iter(f"{SVG}text") if node.get("font-size") == "9"]
    ends = sorted(
        (float(n.get("x")) - half, float(n.get("x")) + half)
        for n in found
        for half in [page.evaluate(WIDTH, [n.text, 9, 400]) / 2]
    )
    assert len(ends) >= 4
    assert all(one < other for (_, one), (other, _) in itertools.pairwise(ends))
    shown = [n.text.replace("−", "-") for n in found]
    assert sorted(map(float, shown)) == sorted(-float(text) for text in shown)
    (label,) = (n for n in drawn.iter(f"{SVG}text") if n.text == "effect (knockout)")
    label_ends = float(label.get("x")) + page.evaluate(WIDTH, [label.text, 11, 400])
    assert label_ends <= float(drawn.get("viewBox").split()[2])


@pytest.mark.parametrize("view", ["lines", "steps"])
def test_a_picture_ends_where_its_panel_does(serve, open_page, view):
    page = open_page(f"{serve(spoken(['a', ' b', ' c']))}#L0H1&query=2&key=1&view={view}")
    is_chosen(page, 2, 1)
    drawn = ElementTree.fromstring(saved(page, "SVG")[0])
    height = float(drawn.get("viewBox").split()[3])
    lowest = max(float(n.get("y")) for n in drawn.iter(f"{SVG}text"))
    assert 0 < height - lowest < 40


def test_letters_from_right_to_left_keep_their_cut_end_in_lines(serve, open_page):
    tokens = ["The", " \u0637\u0648\u064a\u0644\u0629" * 4, " cat"]
    page = open_page(f"{serve(spoken(tokens))}#L0H1&query=2&key=1&view=lines&unit=token")
    is_chosen(page, 2, 1)
    page.wait_for_selector(".regard-lines[data-shown$='query 2 key 1']")
    drawn = ElementTree.fromstring(saved(page, "SVG")[0])
    cut = [text for text in texts(drawn) if "\u0637" in text and "…" in text]
    assert cut
    assert all(re.fullmatch("\u2068[^\u2068\u2069]+…\u2069", text) for text in cut)
    assert "cat" in texts(drawn)


def test_an_svg_has_its_size_and_fonts_that_its_readers_have(show):
    page = show()
    drawn = ElementTree.fromstring(saved(page, "SVG", width=3.5)[0])
    assert drawn.get("width") == "3.5in"
    _, _, width, height = map(float, drawn.get("viewBox").split())
    assert float(drawn.get("height")[:-2]) == pytest.approx(3.5 * height / width)
    fonts = re.split(", ?", drawn.get("font-family"))
    assert fonts[0] == "Helvetica"
    assert fonts[-1] == "sans-serif"
    assert not {"system-ui", '"Segoe UI"'} & set(fonts)
    assert "\u2068slept\u2069" in texts(drawn)
    assert not list(drawn.iter(f"{SVG}circle"))
    assert not drawn.findall(".//*[@stroke='#a8123a']")
    marked = ElementTree.fromstring(saved(page, "SVG", marks=True)[0])
    assert list(marked.iter(f"{SVG}circle"))
    assert marked.findall(".//*[@stroke='#a8123a']")


def test_what_cannot_be_saved_is_said(show):
    page = show()
    page.get_by_role("button", name="Export…").click()
    dialog = page.get_by_role("dialog", name="Export a picture")
    dialog.get_by_label("pixels per inch").fill("30000")
    dialog.get_by_role("button", name="Save").click()
    told = dialog.get_by_role("status")
    assert told.inner_text().startswith("Not saved: more than 16,384 pixels on a side")
    for wrong in ("", "0", "-3"):
        dialog.get_by_label("pixels per inch").fill(wrong)
        assert dialog.get_by_role("button", name="Save").is_disabled()
    dialog.get_by_label("pixels per inch").fill("96")
    assert re.fullmatch(r"[\d,]+ × [\d,]+ pixels", told.inner_text())
    page.keyboard.press("Escape")
    assert not dialog.is_visible()


def test_an_exported_page_saves_pictures_too(open_page, tmp_path):
    spoken().export(tmp_path / "page.html")
    page = open_page((tmp_path / "page.html").as_uri() + "#L0H1&query=6&key=3", offline=True)
    is_chosen(page, 6, 3)
    dpi, pixels = pictured(saved(page, "PNG", width=2, dpi=150)[0])
    assert (round(dpi), pixels.shape[1]) == (150, 300)


def test_dark_steps_are_saved_in_the_colours_of_the_page(show):
    page = show("view=steps", color_scheme="dark")
    page.get_by_role("button", name="Export…").click()
    assert not page.get_by_label("background").is_visible()
    page.keyboard.press("Escape")
    _, pixels = pictured(saved(page, "PNG", dpi=96)[0])
    assert pixels[2, 2, :3].tolist() == [22, 21, 29]


def test_lines_are_saved_with_the_colours_of_their_heads(show):
    page = show("view=lines", color_scheme="dark")
    page.locator(".regard-lines-heads button", has_text="2").click()
    page.wait_for_selector(".regard-lines[data-shown='L0 heads 1,2 query 6 key 3']")
    drawn = ElementTree.fromstring(saved(page, "SVG")[0])

    def colour(text):
        return re.findall(r"\d+", text or "")

    lines = [colour(node.get("stroke")) for node in drawn.iter(f"{SVG}line")]
    boxes = [colour(node.get("fill")) for node in drawn.iter(f"{SVG}rect")]
    for head in (["225", "135", "30"], ["90", "255", "0"]):
        assert head in lines
        assert head in boxes  # beside its number


WIDTH = """async ([text, size, weight]) => {
  const { textWidth } = await import(new URL("drawing/marks.js", location.href));
  return textWidth(text, size, weight);
}"""


def test_the_name_of_the_last_key_ends_in_the_picture(serve, open_page):
    recording = spoken([f" a-long-word-{n}" for n in range(300)])
    page = open_page(f"{serve(recording)}#L0H1&query=299&key=299")
    is_chosen(page, 299, 299)
    page.wait_for_selector(".regard-map[data-idle=true]")
    drawn = ElementTree.fromstring(saved(page, "SVG", marks=True)[0])
    (name,) = (n for n in drawn.iter(f"{SVG}text") if n.text.startswith("299 "))
    assert name.get("text-anchor") == "middle"
    ends = float(name.get("x")) + page.evaluate(WIDTH, [name.text, 11, 700]) / 2
    assert ends <= float(drawn.get("viewBox").split()[2]) + 0.1


@pytest.mark.parametrize("more", ["", "compare=difference&other=L0H0@1"])
def test_a_caption_ends_in_the_picture(serve, open_page, more):
    names = [f"{n}: a text that was typed, and that has more words than a line" for n in (1, 2)]
    address = serve(*[spoken()] * (2 if more else 1), names=names[: 2 if more else 1])
    page = open_page(f"{address}#L0H1&query=6&key=3&{more}")
    is_chosen(page, 6, 3)
    page.wait_for_selector(".regard-map[data-idle=true]")
    drawn = ElementTree.fromstring(saved(page, "SVG")[0])
    (caption,) = (n for n in drawn.iter(f"{SVG}text") if "spoken · L0H1" in n.text)
    ends = float(caption.get("x")) + page.evaluate(WIDTH, [caption.text, 11, 400])
    assert ends <= float(drawn.get("viewBox").split()[2])
    assert more or caption.text.endswith("… · spoken · L0H1 · every weight")


def test_sums_are_saved_inside_the_picture(show):
    drawn = ElementTree.fromstring(saved(show("sums=shown"), "SVG")[0])
    width = float(drawn.get("viewBox").split()[2])
    (x,) = (float(n.get("x")) for n in drawn.iter(f"{SVG}text") if n.text == "sum")
    assert x + 36 <= width
    assert "received" in texts(drawn)


def test_steps_leave_out_the_chosen_cell_unless_it_is_asked_for(show):
    page = show("view=steps")
    plain, marked = (
        ElementTree.fromstring(saved(page, "SVG", marks=marks)[0]) for marks in (False, True)
    )
    boxes = [len([n for n in x.iter(f"{SVG}rect") if n.get("stroke")]) for x in (plain, marked)]
    assert boxes[0] < boxes[1]
