"""Everyone can use the page: axe-core finds nothing, and all text can be read."""

import pytest
from axe_playwright_python.base import AXE_SCRIPT

from regard.viewer._readings import Readings, reader_of
from regard.viewer._server import Viewer
from tiny_model import tiny_model
from viewer.pages import is_chosen, is_said, spoken

PAIR = "query=6&key=3"
NARROW = (600, 900)
AXE = """async () => {
  const {violations, incomplete} = await axe.run({resultTypes: ["violations", "incomplete"]});
  const named = (found) =>
    found.map(({id, nodes}) => [id, nodes.map(({html, failureSummary}) => [html, failureSummary])]);
  return [named(violations), named(incomplete)];
}"""
# Elements that show text of their own, with the contrast of each to what is behind it.
CONTRASTS = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const channel = (c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(at).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll(".regard *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".regard-hidden")) continue;
    const [a, b] = [numbers(getComputedStyle(node).color), behind(node)].map(luminance);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([contrast, `${node.className} ${node.textContent.slice(0, 30)}`]);
  }
  return found;
}"""
# The least contrast of ink on any colour of a cell or of a token's tint, at every level.
INKS = """async ({dark}) => {
  const at = (file) => import(new URL(file, location.href));
  const [{ENTRIES, INVISIBLE, RANGES, signedColour, weightColour}, {inkOn}] =
    await Promise.all([at("drawing/colours.js"), at("panels/line.js")]);
  const colours = [INVISIBLE[dark ? "dark" : "light"]];
  for (let n = 0; n < ENTRIES; n++) {
    const part = n / (ENTRIES - 1);
    colours.push(signedColour(2 * part - 1, {span: 1, decades: 0}, dark));
    for (const [scale, [low, high]] of Object.entries(RANGES)) {
      const range = {low, high, linear: scale === "linear"};
      const value = low + part * (high - low);
      colours.push(weightColour(range.linear ? Math.log(value) : value * Math.LN10, range, dark));
    }
  }
  const channel = (c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const contrasts = colours.map((colour) => {
    const light = luminance(colour);
    return inkOn(colour) === "#000" ? (light + 0.05) / 0.05 : 1.05 / (light + 0.05);
  });
  return [new Set(colours.map(String)).size, Math.min(...contrasts)];
}"""
# The contrasts of the colours in which the map writes its labels.
LABELS = """() => {
  const style = getComputedStyle(document.querySelector(".regard"));
  return ["ink", "soft", "accent", "focus"].map((name) => {
    const node = document.createElement("span");
    node.style.color = style.getPropertyValue(`--${name}`);
    node.textContent = name;
    document.querySelector(".regard-map-frame").append(node);
    return name;
  });
}"""


def search(page):
    page.locator(".regard-search input").fill("t")
    is_said(page, "found")


def open_export(page):
    page.get_by_role("button", name="Export…").click()


def open_help(page):
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()


def sort_heads(page):
    page.get_by_label("order").select_option("induction")


# The places of the page, and how to get there; the last ones cover it.
STATES = {
    "map": (f"L0H1&{PAIR}", None),
    "column": (f"L0H1&{PAIR}&side=by", None),
    "lines": (f"L0H1&{PAIR}&view=lines&heads=1,2", None),
    "sums": (f"L0H1&{PAIR}&sums=shown", None),
    "steps": (f"L0H1&{PAIR}&view=steps", None),
    "side by side": (f"L0H1&{PAIR}&compare=side&other=L1H2", None),
    "difference": (f"L0H1&{PAIR}&compare=difference&other=L1H2", None),
    "effects": (f"L0H1&{PAIR}&plane=effect", None),
    "sorted": (f"L0H1&{PAIR}", sort_heads),
    "searched": (f"L0H1&{PAIR}", search),
    "export": (f"L0H1&{PAIR}", open_export),
    "help": (f"L0H1&{PAIR}", open_help),
}


# Contrast changes while a colour fades into another.
SETTLED = "Promise.all(document.getAnimations().map(animation => animation.finished))"


def assert_accessible(page, scheme, state, least=20):
    page.evaluate(SETTLED)
    if scheme == "light":  # a dark page has the elements of a light one, in other colours
        if not page.evaluate("() => 'axe' in window"):
            page.evaluate(AXE_SCRIPT)
        violations, incomplete = page.evaluate(AXE)
        assert violations == [], state
        # axe-core leaves the contrast of short words and of what lies over others to the reader.
        assert {rule for rule, _ in incomplete} <= {"color-contrast"}, state
    found = page.evaluate(CONTRASTS)
    assert len(found) > least, state
    assert [text for contrast, text in found if contrast < 4.5] == [], state


def go(page, place):
    page.evaluate("(place) => { location.hash = place; }", place)
    page.wait_for_selector(".regard-text[data-shown^='query 6 key 3 ']")
    if "view=steps" in place:
        page.wait_for_selector(".regard-steps[data-shown='query 6 key 3']:visible")
    elif "view=lines" in place:
        page.wait_for_selector(".regard-lines[data-shown$='query 6 key 3']:visible")
    else:
        page.wait_for_selector(".regard-map[data-idle=true]:visible")


@pytest.fixture
def show(serve, open_page):
    """Opens a recording: ``show(recording, "L0H1&query=5", **page options)``."""
    return lambda recording, hash="", **options: open_page(f"{serve(recording)}#{hash}", **options)


@pytest.mark.parametrize("scheme", ["light", "dark"])
class TestPage:
    @pytest.mark.slow
    def test_it_can_be_read_and_used_by_everyone(self, show, scheme):
        page = show(spoken(boundary=5, explained=True), f"L0H1&{PAIR}", color_scheme=scheme)
        for state, (place, act) in STATES.items():
            go(page, place)
            if act:
                act(page)
            assert_accessible(page, scheme, state)

    def test_so_can_a_narrow_one(self, show, scheme):
        page = show(spoken(explained=True), f"L0H1&{PAIR}", size=NARROW, color_scheme=scheme)
        is_chosen(page, 6, 3)
        for panel in ("Heads", "Pairs", "Text"):
            page.locator(".regard-tabs").get_by_role("button", name=panel).click()
            assert_accessible(page, scheme, panel)
        for view in ("view=lines", "view=steps", "plane=effect"):
            go(page, f"L0H1&{PAIR}&{view}")
            assert_accessible(page, scheme, view)

    def test_so_can_a_long_text(self, show, scheme):
        words = [f" w{n}" for n in range(2100)]
        recording = spoken(words, layers=1, heads=1, key_heads=1)
        page = show(recording, "L0H0&query=2000&key=700", color_scheme=scheme)
        is_chosen(page, 2000, 700)
        page.wait_for_selector(".regard-place")
        assert_accessible(page, scheme, "passages")

    def test_so_can_an_exported_file(self, open_page, tmp_path, scheme):
        path = tmp_path / "page.html"
        spoken().export(path)
        page = open_page(f"{path.as_uri()}#L0H1&{PAIR}", offline=True, color_scheme=scheme)
        is_chosen(page, 6, 3)
        page.wait_for_selector(".regard-map[data-idle=true]")
        assert_accessible(page, scheme, "map")
        go(page, f"L0H1&{PAIR}&view=steps")
        assert_accessible(page, scheme, "steps")

    def test_so_can_a_page_with_an_input(self, open_page, scheme):
        readings = Readings(reader_of(tiny_model("tiny")))
        with Viewer((), None, 0, readings) as viewer:
            page = open_page(viewer.address, color_scheme=scheme)
            page.wait_for_selector("[data-state=empty]")
            assert_accessible(page, scheme, "empty", least=3)
            page.locator("textarea").fill("import os, import sys")
            page.wait_for_selector("[data-state=read]")
            page.wait_for_selector(".regard-map[data-idle=true]")
            page.wait_for_selector(".regard-next-share")
            assert_accessible(page, scheme, "typed")
            page.locator("textarea").fill("x" * 2500)
            page.wait_for_selector("[data-state=failed]")
            assert_accessible(page, scheme, "too long")

    def test_ink_can_be_read_on_every_colour(self, show, scheme):
        page = show(spoken(), f"L0H1&{PAIR}", color_scheme=scheme)
        is_chosen(page, 6, 3)
        count, least = page.evaluate(INKS, {"dark": scheme == "dark"})
        assert count > 1000
        assert least >= 4.5
        names = page.evaluate(LABELS)
        found = {text.strip(): contrast for contrast, text in page.evaluate(CONTRASTS)}
        assert [name for name in names if found[name] < 4.5] == []


def test_only_the_keyboard_shows_the_focus(show):
    page = show(spoken(), f"L0H1&{PAIR}")
    is_chosen(page, 6, 3)
    stage = page.locator(".regard-map-stage")
    outline = "n => getComputedStyle(n).outlineStyle"
    box = page.locator(".regard-map-cells").first.bounding_box()
    for _ in range(2):
        page.mouse.click(box["x"] + 20, box["y"] + 200)
        assert stage.evaluate("n => n === document.activeElement")
        assert stage.evaluate(outline) == "none"
        page.keyboard.press("ArrowDown")
        assert stage.evaluate(outline) == "solid"


def test_colours_that_are_numbers_stay_where_the_system_forces_others(serve, open_page):
    address = f"{serve(spoken())}#L0H1&query=5&key=3"
    page = open_page(address, forced_colors="active")
    page.wait_for_selector(".regard-bar-row")
    bar = "getComputedStyle(document.querySelector('.regard-bar'), '::before').backgroundColor"
    assert page.evaluate(bar) == "rgb(122, 42, 112)"
    grounds = "n => n.map((node) => getComputedStyle(node).backgroundColor)"
    words = page.locator(".regard-token:not(.regard-unseen) > .regard-word")
    assert len(set(words.evaluate_all(grounds))) == words.count() == 6
