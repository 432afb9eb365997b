"""The whole page in a real browser: its keys, its address, its looks, and what may go wrong."""

import os
import re

import numpy as np
import pytest

from regard.recording import Layer, Recording
from regard.viewer._server import Viewer
from viewer.pages import SENTENCE, STATUS, address_of, crossed, is_chosen, is_said, spoken

HOSTILE = [
    "<img src=x onerror=document.title='pwned'>",
    "</script><script>document.title='pwned'</script>",
    "&amp;", "\u202egnp.exe", "a\0b", "\x1b[31m", "x" * 5000,
    "\U0001f469\u200d\U0001f467 \U0001f3f3", "\u202e\u200b", "",
    "\n\n", "javascript:alert(1)", "'\"><svg onload=alert(1)>", "{{constructor}}", "é\u0301\u0301",
]  # fmt: skip
CONTROLS = "button, select, input, summary"
# Every control that can be seen: its name and box, and whether its text is cut off.
BOXES = """(selector) => [...document.querySelectorAll(selector)]
  .filter((node) => node.checkVisibility() && !node.closest(".regard-map, .regard-head-list"))
  .map((node) => {
    const {left, top, right, bottom} = node.getBoundingClientRect();
    const name = node.ariaLabel || node.textContent || node.className;
    const cut = node.scrollWidth > node.clientWidth + 1 && node.localName !== "input";
    const header = node.closest(".regard-header, .regard-tools, .regard-tabs") !== null;
    return {name, left, top, right, bottom, cut, header};
  })"""


@pytest.fixture
def show(serve, open_page):
    """Opens a recording: ``show(recording, "L0H1&query=5", **page options)``."""
    return lambda recording, hash="", **options: open_page(f"{serve(recording)}#{hash}", **options)


def test_a_fresh_page_looks_from_the_last_query_to_its_strongest_key(show):
    recording = spoken()
    page = show(recording, shared=False)
    last = len(SENTENCE) - 1
    best = int(np.argmax(np.asarray(recording.weights[0][0, last])))
    is_chosen(page, last, best)
    page.wait_for_function("() => location.hash.includes('query=')")
    assert page.evaluate("history.length") == 2  # the empty page, and this one
    assert re.search(rf"#L0H0&query={last}", address_of(page))


@pytest.mark.parametrize("view", ["map", "lines", "steps"])
def test_all_controls_stand_in_one_row(show, view):
    page = show(spoken(), f"L0H1&query=5&key=3&view={view}", size=(1280, 720))
    is_chosen(page, 5, 3)
    assert page.locator(".regard-header").bounding_box()["height"] <= 44


def test_the_page_says_what_the_head_does(show):
    recording = spoken()
    page = show(recording, "L1H2&query=5&key=3")
    is_chosen(page, 5, 3)
    scores = recording.heads()
    for key, head in (("", 2), ("]", 3)):
        if key:
            page.keyboard.press(key)
        page.wait_for_function(
            "(text) => document.querySelector('.regard-map-says').textContent === text",
            arg=scores.says(1, head),
        )
    page.keyboard.press("h")  # of what is left without the first token nothing is said
    page.wait_for_function("() => document.querySelector('.regard-map-says').textContent === ''")


def test_a_comparison_without_its_other_head_takes_the_next(show):
    page = show(spoken(), "L0H1&query=5&key=3&compare=side")
    is_chosen(page, 5, 3)
    page.wait_for_function("() => location.hash.includes('other=L0H2')")
    assert page.locator(".regard-map-title:visible").count() == 2


def test_a_page_without_a_query_that_sees_anything_opens(show):
    array = np.ones((1, 3, 2), np.float32)
    layer = Layer(array, array, array, key_lengths=0)
    page = show(Recording(["a", "b", "c"], [layer], query_tokens=["a", "b", "c"]))
    is_said(page, "masked")


def test_the_address_says_what_is_chosen_and_back_undoes_it(show):
    page = show(spoken(), "L1H2&query=5&key=3&side=by&plane=mass&scale=uniform")
    is_chosen(page, 5, 3)
    pressed = "[aria-pressed=true]"
    for name in ("share", "attended by", "Map"):
        assert page.locator(pressed, has_text=re.compile(f"^{name}$")).count() == 1
    page.keyboard.press("]")
    is_said(page, "L1H3")
    for view in ("Lines", "Steps"):
        page.keyboard.press("v")
        is_said(page, view)
    assert "#L1H3&" in address_of(page)
    assert "view=steps" in address_of(page)
    again = address_of(page)
    page.go_back()
    is_said(page, "Lines")
    page.go_back()
    is_said(page, "Map")
    page.go_back()
    is_said(page, "L1H2")
    assert page.locator(".regard-names").get_by_label("head").input_value() == "2"
    page.go_forward()
    is_said(page, "L1H3")
    page.goto("about:blank")
    page.goto(again)
    is_said(page, "key 3")
    assert page.locator(".regard-steps").is_visible()


@pytest.mark.parametrize(
    ("place", "focus", "keys", "held"),
    [
        ("", ".regard-map-stage", (), "ArrowUp"),
        ("", ".regard-map-stage", ("Shift",), "ArrowUp"),
        ("", ".regard-token[tabindex='0']", ("Shift",), "ArrowLeft"),
        ("&view=steps", "[data-step=scores] [tabindex='0']", (), "ArrowUp"),
        ("&view=lines", ".regard-lines-query [tabindex='0']", ("Shift",), "ArrowUp"),
    ],
)
def test_a_key_that_is_held_down_is_one_step_for_back(show, place, focus, keys, held):
    page = show(spoken(), f"L1H2&query=7&key=1{place}", shared=False)
    is_chosen(page, 7, 1)
    page.locator(focus).first.focus()
    before = page.evaluate("history.length")
    for key in keys:
        page.keyboard.down(key)
    for _ in range(5):
        page.keyboard.down(held)
    page.keyboard.up(held)
    page.wait_for_function("() => !/query=7&key=1(&|$)/.test(location.hash)")
    assert page.evaluate("history.length") == before + 1
    page.go_back()
    page.wait_for_function("() => /query=7&key=1(&|$)/.test(location.hash)")


def test_a_nonsense_address_opens_what_exists_nearest_to_it(show):
    page = show(spoken(), "L99H3&query=1e9&key=abc&view=%ZZ&plane=<b>&other=L9H9@9&zoom=NaN")
    is_said(page, "query 7 ")
    assert page.locator(".regard-names").get_by_label("layer").input_value() == "1"


@pytest.mark.parametrize(
    ("scale", "bad", "usual"),
    [
        ("log", "low=1e9&high=-1e9", ["0.001", "100"]),
        ("log", "low=-1e9&high=1e9", ["0.001", "100"]),
        ("log", "low=306", ["0.001", "100"]),
        ("uniform", "low=400", ["0.01", "100"]),
        ("linear", "low=1e17", ["0", "100"]),
        ("linear", "high=1e307", ["0", "100"]),
    ],
)
def test_ends_of_the_colours_that_no_weight_is_near_are_no_ends(show, scale, bad, usual):
    page = show(spoken(), f"L0H1&query=5&key=3&scale={scale}&{bad}")
    is_chosen(page, 5, 3)
    page.wait_for_selector(".regard-map[data-idle=true]")
    names = ("Faintest colour", "Strongest colour")
    assert [page.get_by_label(name).input_value() for name in names] == usual
    assert not page.get_by_role("button", name="reset").is_visible()
    page.keyboard.press("ArrowDown")
    is_said(page, "query 6 ")
    page.wait_for_function("() => /query=6/.test(location.hash)")
    assert not re.search("low|high", address_of(page))


@pytest.mark.parametrize(
    ("scale", "given", "ends"),
    [
        ("linear", "low=0.8&high=0.2", ["20", "80"]),
        ("log", "low=-1&high=-3", ["0.1", "10"]),
        ("uniform", "low=3", ["100", "1000"]),  # above the usual end
        ("linear", "low=0.5&high=0.5", ["0", "100"]),
    ],
)
def test_the_colours_of_an_address_begin_at_its_smaller_end(show, scale, given, ends):
    page = show(spoken(), f"L0H1&query=5&key=3&scale={scale}&{given}")
    is_chosen(page, 5, 3)
    names = ("Faintest colour", "Strongest colour")
    assert [page.get_by_label(name).input_value() for name in names] == ends


def test_every_key_does_what_it_says_and_says_what_it_did(show):
    page = show(spoken(), "L0H1&query=5&key=3")
    is_chosen(page, 5, 3)
    said = {
        "m": "share of each cell", "s": "scale: logarithmic", "t": "attended by", "]": "L0H2",
        "}": "L1H2", "{": "L0H2", "[": "L0H1", "p": "this pair", "o": "entropy",
        "c": "side by side", "v": "Lines", "ArrowDown": "query 6 ", "ArrowRight": "key 4 ",
        "PageUp": "query 0 ", "Shift+ArrowDown": "mean of 2 queries",
    }  # fmt: skip
    for key, words in said.items():
        page.keyboard.press(key)
        is_said(page, words)
    page.keyboard.press("v")
    is_said(page, "Steps")
    page.keyboard.press("v")
    is_said(page, "Map")
    page.keyboard.press("PageDown")
    is_said(page, "query 7 ")
    page.keyboard.press("Control+m")  # the browser's, not ours
    assert page.locator(".regard [aria-pressed=true]", has_text="share").count() == 1


def test_help_lists_the_keys_and_closes(show):
    page = show(spoken())
    is_said(page, "query")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    text = dialog.text_content()
    assert all(key in text for key in ("← ↑ → ↓", "Enter", "[ ]", "{ }", "Esc"))
    assert dialog.evaluate("n => [n.scrollTop, n.scrollHeight > n.clientHeight]") == [0, True]
    page.keyboard.press("m")
    assert page.locator(".regard [aria-pressed=true]", has_text="share").count() == 0
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")


def test_typing_a_search_presses_no_keys(show):
    page = show(spoken(), "L0H1&query=5&key=3")
    is_chosen(page, 5, 3)
    page.keyboard.press("/")
    page.keyboard.type("msv[]{}tpo?c+-0")
    is_said(page, "not found")
    assert page.evaluate("location.hash") == "#L0H1&query=5&key=3"


def test_the_tab_key_reaches_everything(show):
    page = show(spoken(), "L0H1&query=5&key=3&view=steps")
    is_chosen(page, 5, 3)
    page.wait_for_selector(".regard-grid")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "() => { const at = document.activeElement;"
                " const ring = getComputedStyle(at).outlineStyle;"
                " return [at.ariaLabel || at.labels?.[0]?.textContent || at.textContent, ring] }"
            )
        )
        if seen[-1] == seen[0] and len(seen) > 1:
            break
    names = " | ".join(name for name, _ in seen)
    for name in (
        "Map", "Lines", "Steps", "layer", "head", "compare", "Export",
        "Keys", "order", "this pair in every head", "L0H1, ", "attends to", "attended by",
        "Search the text", "masked, 8 × 8", "weights, 8 × 8", "output, 8 × 8", " it",
    ):  # fmt: skip
        assert name in names, name
    assert all(ring != "none" for name, ring in seen if len(name) < 500)


def test_arrows_walk_through_heads_and_tokens(show):
    page = show(spoken(), "L0H1&query=5&key=3")
    is_chosen(page, 5, 3)
    page.locator(".regard-head[aria-pressed=true]").focus()
    for key, words in [("ArrowRight", "^L0H2"), ("ArrowDown", "^L1H2"), ("ArrowLeft", "^L1H1")]:
        page.keyboard.press(key)
        is_said(page, words)
    page.keyboard.press("Enter")
    is_said(page, "L1H1.*query 5 ")
    page.locator(".regard-token[tabindex='0']").focus()
    page.keyboard.press("ArrowLeft")
    is_said(page, "key 4 ")
    page.keyboard.press("Enter")
    is_chosen(page, 5, 4)
    page.keyboard.press("Home")
    page.keyboard.press("Shift+Enter")
    is_said(page, "query 0 .*key 0 ")


@pytest.mark.parametrize("hash", ["L0H0&query=14&unit=token", "L0H0&query=14&view=steps"])
def test_hostile_tokens_are_text_and_do_nothing(show, hash):
    page = show(spoken(HOSTILE, layers=1, heads=1, key_heads=1), hash)
    is_said(page, "query 14 ")
    page.wait_for_selector(".regard-text[data-shown]")
    for place in range(len(HOSTILE)):
        page.locator(".regard-token").nth(place).focus()
        page.keyboard.press("Enter")
    is_said(page, "key 14 ")
    page.wait_for_timeout(200)
    assert "pwned" not in page.title()
    assert page.locator(".regard img, .regard script, .regard svg").count() == 0
    shown = page.locator(".regard-token").all_text_contents()
    assert shown[:3] == HOSTILE[:3]
    assert shown[3:6] == ["⟨202E⟩gnp.exe", "a␀b", "␛[31m"]
    assert shown[7:10] == [HOSTILE[7], "⟨202E⟩⟨200B⟩", "∅"]
    for text in page.locator("body").all_inner_texts():
        assert not re.search("[\u202e\0\x1b\u200b]", text)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_a_lone_surrogate_is_shown(show):
    page = show(spoken(["a", "\ud83d", "b"], layers=1), "L0H0&query=2&key=1")
    is_said(page, "key 1 «.»")


def test_light_and_dark_follow_the_system(show):
    page = show(spoken(), "L0H1&query=6&key=3")
    is_chosen(page, 6, 3)
    backgrounds = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(100)
        style = "() => getComputedStyle(document.querySelector('.regard')).backgroundColor"
        backgrounds[scheme] = [int(c) for c in re.findall(r"\d+", page.evaluate(style))]
    assert min(backgrounds["light"]) > 230
    assert max(backgrounds["dark"]) < 40
    hidden = page.locator(".regard-word").nth(7)
    assert "141, 138, 154" in hidden.evaluate("n => getComputedStyle(n).color")


def assert_apart(boxes):
    for n, one in enumerate(boxes):
        for other in boxes[n + 1 :]:
            apart = (
                one["right"] <= other["left"] + 1 or other["right"] <= one["left"] + 1
                or one["bottom"] <= other["top"] + 1 or other["bottom"] <= one["top"] + 1
            )  # fmt: skip
            assert apart, (one, other)


WIDTHS = [320, 360, 412, 640, 700, 820, 1000, 1180, *range(1200, 1460, 20)]


@pytest.mark.parametrize("names", [None, ["a-recording-of-another-long-text", "of-a-second-text"]])
def test_names_give_way_and_numbers_stay_whole_in_a_window_of_any_width(serve, open_page, names):
    recordings = [crossed(5, 12)] * len(names or [1])
    page = open_page(f"{serve(*recordings, names=names)}#L0H1&query=3&key=2", shared=False)
    is_chosen(page, 3, 2)
    caption = page.locator(".regard-map-caption")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 720})
        boxes = page.evaluate(BOXES, f"{CONTROLS}, .regard-facts span")
        assert_apart([box for box in boxes if box["header"]])
        assert {"5 queries ·", "12 keys"} <= {box["name"] for box in boxes if not box["cut"]}
        assert max(box["right"] for box in boxes if box["header"]) <= width, width
        assert caption.evaluate("(n) => n.clientWidth >= Math.min(n.scrollWidth, 180)"), width


@pytest.mark.parametrize("size", [(1280, 720), (820, 1180), (1180, 820)])
@pytest.mark.parametrize("view", ["map", "steps"])
def test_no_control_is_cut_off_or_covered(show, size, view):
    touch = size != (1280, 720)
    words = [f" word{n}" for n in range(40)]
    recording = spoken(words, layers=12, heads=12, key_heads=12)
    page = show(recording, f"L0H1&query=6&key=3&view={view}", size=size, has_touch=touch)
    is_chosen(page, 6, 3)
    width, height = page.evaluate("[document.documentElement.scrollWidth, scrollY]")
    assert width <= size[0]
    assert height == 0
    boxes = page.evaluate(BOXES, CONTROLS)
    assert len(boxes) > 12
    for box in boxes:
        assert not box["cut"], box
        assert 0 <= box["left"] < box["right"] <= size[0] + 0.5, box
    header = [box for box in boxes if box["header"]]
    assert_apart(header)
    for one in header:
        assert 0 <= one["top"] < one["bottom"] <= size[1], one
    centre = page.locator(".regard-centre").bounding_box()
    assert centre["width"] >= 500
    assert centre["height"] >= 400


def test_a_tablet_shows_heads_as_a_strip_above_the_map(show):
    page = show(spoken(), "L0H1&query=6&key=3", size=(820, 1180))
    is_chosen(page, 6, 3)
    heads, map_ = (page.locator(f".regard-{part}").bounding_box() for part in ("heads", "map"))
    assert heads["y"] + heads["height"] <= map_["y"]
    assert heads["height"] < 80
    assert heads["width"] > 800
    assert page.locator(".regard-head").first.is_visible()
    assert not page.locator(".regard-head-numbers").is_visible()
    assert page.locator(".regard-text").is_visible()
    assert not page.locator(".regard-tabs").get_by_role("button", name="Heads").is_visible()


def test_a_small_window_shows_one_panel_at_a_time(show):
    page = show(spoken(), "L0H1&query=6&key=3", size=(600, 900))
    is_chosen(page, 6, 3)
    assert page.locator(".regard-text").is_visible()
    assert not page.locator(".regard-heads").is_visible()
    page.locator(".regard-tabs").get_by_role("button", name="Heads").click()
    assert page.locator(".regard-heads").is_visible()
    assert not page.locator(".regard-text").is_visible()
    page.keyboard.press("/")
    page.keyboard.type("cat")
    is_said(page, "1 found")


SMALL = [(320, 256), (320, 568), (360, 640), (568, 320), (667, 375), (740, 360), (1280, 300)]


@pytest.mark.parametrize("size", SMALL)
def test_the_map_of_the_smallest_window_has_room_and_the_rest_scrolls(show, size):
    page = show(spoken(), "L0H1&query=6&key=3", size=size)
    is_chosen(page, 6, 3)
    cells, says, text = (
        page.locator(f".regard-{name}") for name in ("map-cells", "map-says", "text")
    )
    assert cells.first.bounding_box()["height"] >= 100
    assert says.bounding_box()["height"] >= 18
    assert text.bounding_box()["height"] >= 160
    assert page.evaluate(
        """() => {
          const frame = document.querySelector(".regard-frame");
          frame.scrollTop = frame.scrollHeight;
          const last = document.querySelector(".regard-readout").getBoundingClientRect();
          return Math.abs(last.bottom - innerHeight) < 1 && frame.scrollWidth <= innerWidth;
        }"""
    )


@pytest.mark.parametrize("size", [(375, 812), (640, 600), (1024, 600), (1280, 720)])
def test_a_usual_window_has_room_for_everything_at_once(show, size):
    page = show(spoken(), "L0H1&query=6&key=3", size=size)
    is_chosen(page, 6, 3)
    frame = page.locator(".regard-frame")
    assert frame.evaluate("(frame) => frame.scrollHeight - frame.clientHeight") == 0


@pytest.mark.parametrize(("size", "side"), [((375, 667), 200), ((375, 812), 200)])
def test_one_map_takes_most_of_the_width_of_a_telephone(show, size, side):
    page = show(spoken(layers=1, heads=1, key_heads=1), "L0H0&query=6&key=3", size=size)
    is_chosen(page, 6, 3)
    page.wait_for_selector(".regard-map[data-idle=true]")
    cells = page.locator(".regard-map-cells").first
    assert len(SENTENCE) * float(cells.get_attribute("data-zoom")) >= side
    assert page.locator(".regard-text").bounding_box()["height"] >= 160


@pytest.mark.parametrize(
    ("size", "side"),
    [
        ((375, 812), 160),
        ((640, 600), 160),
        ((850, 720), 260),
        ((1024, 768), 160),
        ((1280, 720), 240),
    ],
)
def test_two_maps_are_as_large_as_the_window_allows(show, size, side):
    page = show(spoken(), "L0H1&query=6&key=3&compare=side&other=L0H2", size=size)
    is_chosen(page, 6, 3)
    page.wait_for_selector(".regard-map[data-idle=true]")
    for cells in page.locator(".regard-map-cells").all():
        assert len(SENTENCE) * float(cells.get_attribute("data-zoom")) >= side
    assert page.evaluate(
        """() => {
          const frame = document.querySelector(".regard-frame");
          frame.scrollTop = frame.scrollHeight;
          const last = document.querySelector(".regard-readout").getBoundingClientRect();
          return Math.abs(last.bottom - innerHeight) < 1 && frame.scrollWidth <= innerWidth;
        }"""
    )


@pytest.mark.parametrize("size", [(375, 812), (850, 720)])
def test_two_maps_take_room_while_they_are_shown(show, size):
    place = "L0H1&query=6&key=3&compare=side&other=L0H2"
    page = show(spoken(), f"{place}&view=lines", size=size)
    is_chosen(page, 6, 3)
    frame = page.locator(".regard-frame")
    hidden = "(frame) => frame.scrollHeight - frame.clientHeight"
    assert frame.evaluate(hidden) == 0
    page.get_by_role("button", name="Map", exact=True).click()
    page.wait_for_selector(".regard-map[data-idle=true]")
    assert frame.evaluate(hidden) > 0


@pytest.mark.parametrize("size", [(1280, 720), (820, 1180), (850, 560), (640, 600)])
def test_nothing_lies_over_the_map(show, size):
    page = show(spoken(), "L0H1&query=6&key=3", size=size)
    is_chosen(page, 6, 3)
    page.wait_for_selector(".regard-pairs button", state="attached")
    covered = page.evaluate(
        """() => {
          const {left, top, width, height} =
            document.querySelector(".regard-map-cells").getBoundingClientRect();
          const steps = Array.from({length: 21}, (_, n) => n / 20);
          const points = steps.flatMap((x) => steps.map((y) => [x, y]));
          return points
            .map(([x, y]) => document.elementFromPoint(left + 2 + x * (width - 4),
                                                       top + 2 + y * (height - 4)))
            .filter((node) => !node.closest(".regard-map-frame")).map((node) => node.className);
        }"""
    )
    assert covered == []


@pytest.mark.parametrize("size", [(850, 560), (640, 600)])
def test_a_low_page_has_the_heads_above_and_the_text_beside_the_map(show, size):
    page = show(spoken(), "L0H1&query=6&key=3", size=size)
    is_chosen(page, 6, 3)
    heads, centre, text = (
        page.locator(f".regard-{name}").bounding_box() for name in ("heads", "centre", "text")
    )
    assert heads["y"] + heads["height"] <= centre["y"] + 1
    assert centre["x"] + centre["width"] <= text["x"] + 1
    assert heads["height"] < 60
    assert centre["height"] > 0.5 * size[1]
    assert page.locator(".regard-head").first.is_visible()
    page.locator(".regard-tabs").get_by_role("button", name="Pairs").click()
    assert page.locator(".regard-pairs").is_visible()
    assert not page.locator(".regard-text").is_visible()
    page.keyboard.press("p")
    is_said(page, "this pair")
    assert page.locator(".regard-text").is_visible()


def test_targets_are_large_enough_for_fingers(show):
    recording = spoken(layers=12, heads=12, key_heads=12)
    page = show(recording, size=(820, 1180), has_touch=True, is_mobile=True)
    is_said(page, "query")
    sizes = page.locator(f".regard-header :is({CONTROLS}), .regard-head").evaluate_all(
        "nodes => nodes.filter(n => n.checkVisibility() && !n.closest('.regard-colours')"
        " && !n.closest('.regard-menu-list'))"
        ".map(n => [n.getBoundingClientRect(), n.textContent])"
        ".map(([{width, height}, name]) => [width, height, name])"
    )
    assert len(sizes) > 150
    assert [found for found in sizes if min(found[:2]) < 32] == []


def test_a_server_that_ended_is_said_and_nothing_is_lost(open_page):
    viewer = Viewer([spoken()])
    page = open_page(f"{viewer.address}#L0H1&query=6&key=3")
    is_chosen(page, 6, 3)
    viewer.close()
    page.keyboard.press("]")
    banner = page.get_by_role("alert")
    banner.wait_for()
    assert "The server has ended: run regard view again." in banner.text_content()
    assert page.locator(".regard-map").is_visible()
    banner.get_by_role("button", name="Close").click()
    banner.wait_for(state="hidden")
    page.wait_for_timeout(300)
    ended = "ERR_CONNECTION_", "ERR_EMPTY_RESPONSE", "503"  # before, and where it was ending
    assert all(any(word in text for word in ended) for text in page.complaints)
    page.complaints.clear()


def test_a_server_that_ended_before_it_was_asked_is_said(open_page):
    viewer = Viewer([spoken()])
    page = open_page(viewer.address)
    is_said(page, "query")
    page.route("**/data/about*", lambda route: route.fulfill(status=400, body="layer is 7."))
    page.reload()
    banner = page.get_by_role("alert")
    banner.wait_for()
    assert "layer is 7." in banner.text_content()
    page.unroute("**/data/about*")
    banner.get_by_role("button", name="Try again").click()
    is_said(page, "query 7 ")
    viewer.close()
    assert all("400" in text for text in page.complaints)
    page.complaints.clear()


def test_a_file_that_was_cut_while_it_is_looked_at_is_said(open_page, tmp_path):
    path = tmp_path / "spoken.safetensors"
    spoken().save(path)
    with Viewer([Recording.load(path)]) as viewer:
        page = open_page(f"{viewer.address}#L0H1&query=6&key=3")
        is_chosen(page, 6, 3)
        os.truncate(path, 64)
        page.keyboard.press("]")
        banner = page.get_by_role("alert")
        banner.wait_for()
        assert "spoken.safetensors was cut to 64 bytes while it was open" in banner.text_content()
    assert all("410" in text or "REFUSED" in text for text in page.complaints)
    page.complaints.clear()


def test_two_pages_in_one_document_do_not_meet(show):
    page = show(spoken(), "L0H1&query=6&key=3")
    is_chosen(page, 6, 3)
    page.evaluate("""async () => {
      const { start } = await import(new URL("main.js", location.href));
      const { overHttp } = await import(new URL("data/source.js", location.href));
      document.body.style.overflow = "auto";
      document.getElementById("regard").remove();
      window.parts = [];
      for (const id of ["one", "two"]) {
        const root = document.createElement("div");
        root.id = id;
        document.body.append(root);
        window.parts.push(await start(root, overHttp()));
      }
    }""")
    for root in ("#one", "#two"):
        page.wait_for_function(
            "(root) => /query 7 /.test("
            "document.querySelector(`${root} .regard-readout`).textContent)",
            arg=root,
        )
    before = page.evaluate("location.hash")
    page.locator("#two .regard-map-stage").focus()
    page.keyboard.press("]")
    page.wait_for_function(
        "() => /L0H1/.test(document.querySelector('#two .regard-readout').textContent)"
    )
    assert "L0H1" not in page.locator(f"#one {STATUS}").text_content()
    assert page.evaluate("location.hash") == before
    page.evaluate("() => window.parts[1].end()")
    page.keyboard.press("]")
    page.wait_for_timeout(200)
    assert "L0H2" not in page.locator(f"#two {STATUS}").text_content()
