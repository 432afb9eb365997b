"""The map in a real browser: every pixel against float64, and all that pointer and keys do."""

import functools
import re

import numpy as np
import pytest

from regard._base.tables import DIVERGING
from regard._showing.picture import INVISIBLE, RAMP
from regard.recording import Layer, Recording
from viewer.map_page import (
    ENTRIES,
    PAPER,
    assert_pixels,
    constant,
    expected_entries,
    log_weights,
    made,
    pooled,
    table,
)
from viewer.pages import STATUS, address_of, held, is_said, is_shown, saved, share

LINKS = [(4000, 17), (3999, 2100), (1234, 1233), (2777, 640), (4095, 3001)]
TENS = np.log(10)


@pytest.fixture(scope="module")
def text():
    return made(300, heads=2, key_heads=1, causal=True)


@pytest.fixture(scope="module")
def long_text():
    return made(4096, heads=1, links=LINKS, causal=True)


@functools.lru_cache(maxsize=3)
def logs_of(recording, head):
    """``log_weights``, which of a long text take a second."""
    return log_weights(recording, head)


@functools.lru_cache(maxsize=4)
def bins_of(recording, head, level, plane):
    return pooled(logs_of(recording, head), level, plane)


def assert_drawn(page, recording, head=0, ratio=1, plane="max"):
    view = page.view()
    pixels = page.screen(ratio)
    bins = bins_of(recording, head, int(view["level"]), plane)
    assert_pixels(pixels, expected_entries(view, pixels.shape, bins, -5 * TENS, 0))
    return view


def test_the_ramp_is_that_of_every_other_picture():
    assert constant("RAMP") == RAMP.tolist()
    assert constant("DIVERGING") == DIVERGING.tolist()
    assert constant("INVISIBLE")["light"] == INVISIBLE.tolist()
    assert ENTRIES == 1024


@pytest.mark.parametrize("ratio", [1, 1.25, 1.5, 2])
def test_every_device_pixel_is_a_weight_of_float64(open_map, text, ratio):
    page = open_map(text, hash="L0H1", device_scale_factor=ratio, size=(1280, 720))
    levels = [assert_drawn(page, text, 1, ratio)["level"]]
    for view in ("x=31.7&y=12.2&zoom=7.3", "x=100&y=200.5&zoom=33", "x=3&y=4&zoom=2.0625"):
        page.show(f"L0H1&{view}")
        levels.append(assert_drawn(page, text, 1, ratio)["level"])
    assert set(levels) == {0}


@pytest.mark.parametrize("ratio", [1, 1.25])
@pytest.mark.parametrize("plane", ["max", "mass"])
def test_bins_of_several_cells_are_exact_on_both_planes(open_map, long_text, ratio, plane):
    page = open_map(long_text, hash=f"L0H0&plane={plane}", device_scale_factor=ratio)
    levels = [assert_drawn(page, long_text, 0, ratio, plane)["level"]]
    page.show(f"L0H0&plane={plane}&x=801.3&y=1000.9&zoom=0.37")
    levels.append(assert_drawn(page, long_text, 0, ratio, plane)["level"])
    assert levels[0] >= 3
    assert levels[1] == 2


@pytest.mark.parametrize(
    "options",
    [
        {"window": (20, 0)},
        {"causal": False, "window": (10, 30)},
        {"causal": False, "key_lengths": 170},
        {"causal": False, "queries": 90},
        {"heads": 6, "key_heads": 2},
    ],
    ids=["windowed", "two-sided", "padded", "cross", "grouped"],
)
def test_every_kind_of_recording_is_drawn_right(open_map, options):
    recording = made(230, seed=3, **options)
    head = recording.layers[0].heads - 1
    page = open_map(recording, hash=f"L0H{head}")
    assert_drawn(page, recording, head)
    page.show(f"L0H{head}&plane=mass&x=20.2&y=10.7&zoom=5.3")
    assert_drawn(page, recording, head, plane="mass")


def test_times_uniform_shifts_each_row_by_what_it_sees(open_map, text):
    page = open_map(text, hash="L0H0&scale=uniform")
    logs = logs_of(text, 0)
    shifted = logs + np.log((~np.isnan(logs)).sum(1, keepdims=True))
    view, pixels = page.view(), page.screen(1)
    assert_pixels(pixels, expected_entries(view, pixels.shape, shifted, -2 * TENS, 2 * TENS))


def test_a_hidden_first_token_is_grey_and_the_others_share_its_weight(open_map, text):
    page = open_map(text, hash="L0H1&query=200&key=7")
    heads = "() => [...document.querySelectorAll('.regard-head canvas')].map(c => c.toDataURL())"
    page.page.wait_for_timeout(300)
    before = page.page.evaluate(heads)
    page.page.keyboard.press("h")
    page.wait()
    assert page.selection()["first"] == "hidden"
    assert "first token hidden" in page.page.locator(".regard-map-caption").inner_text()
    logs = logs_of(text, 1)
    with np.errstate(divide="ignore"):
        others = logs - np.log1p(-np.exp(logs[:, :1]))
    others[:, 0] = np.nan
    view, pixels = page.view(), page.screen(1)
    assert_pixels(pixels, expected_entries(view, pixels.shape, others, -5 * TENS, 0))
    page.page.wait_for_function(
        "(text) => document.querySelector('.regard-text').textContent.includes(text)",
        arg=share(np.exp(np.nanmax(others[200]))),
    )
    page.page.wait_for_timeout(300)
    assert page.page.evaluate(heads) != before
    page.page.get_by_role("button", name="hide first").click()
    page.wait()
    assert_drawn(page, text, 1)
    page.page.wait_for_timeout(300)
    assert page.page.evaluate(heads) == before


def test_an_edited_range_moves_the_colours_and_only_then(open_map, text):
    page = open_map(text)
    page.page.get_by_label("Faintest colour").fill("0.1")  # per cent
    page.page.keyboard.press("Enter")
    page.wait()
    view, pixels = page.view(), page.screen(1)
    assert_pixels(pixels, expected_entries(view, pixels.shape, logs_of(text, 0), -3 * TENS, 0))
    assert page.selection()["low"] == "-3"
    page.page.get_by_role("button", name="auto range").click()
    page.wait()
    fitted = {name: float(page.selection()[name]) for name in ("low", "high")}
    logs = logs_of(text, 0) / TENS
    assert fitted["high"] == pytest.approx(np.nanmax(logs), abs=0.11)
    assert fitted["low"] == pytest.approx(np.nanquantile(logs, 0.02), abs=0.2)


def test_ends_of_the_colours_that_are_no_range_are_told(open_map):
    page = open_map(made(40, heads=1))
    low, high = (page.page.get_by_label(f"{name} colour") for name in ("Faintest", "Strongest"))

    def typed(field, number, words):
        field.fill(number)
        field.press("Enter")
        is_said(page.page, words)
        return [low.input_value(), high.input_value()]

    high.fill("50")
    high.press("Enter")
    assert typed(low, "80", "both ends changed places") == ["50", "80"]
    assert typed(low, "80", "80 % is the other end") == ["50", "80"]
    page.page.get_by_label("scale").select_option("log")
    assert typed(low, "0", "0 is no end of these colours") == ["0.001", "100"]


def test_the_colours_of_the_faintest_weights_end_where_an_address_may(open_map):
    query = 1e4 * np.eye(6, dtype="f")[None]  # scores of 1e8
    recording = Recording(list("abcdef"), [Layer(query, query, scale=1.0)])
    page = open_map(recording, hash="L0H0&scale=log")
    page.page.get_by_role("button", name="auto range").click()
    page.wait()
    assert (page.selection()["low"], page.selection()["high"]) == ("-999999.5", "0")


def test_what_is_typed_as_a_range_stays_while_the_page_changes(open_map, text):
    page = open_map(text)
    field = page.page.get_by_label("Faintest colour")
    field.fill("0.1")
    page.show("#L0H1&query=200&key=7")
    assert field.input_value() == "0.1"
    field.press("Enter")
    assert page.selection()["low"] == "-3"
    page.page.get_by_role("button", name="reset").click()
    assert field.input_value() != "0.1"


def test_few_keys_are_coloured_in_proportion_to_their_weights(open_map):
    recording = made(40, heads=1)
    page = open_map(recording)
    weights = np.exp(logs_of(recording, 0))
    view, pixels = page.view(), page.screen(1)
    assert_pixels(pixels, expected_entries(view, pixels.shape, weights, 0, 1))
    assert page.page.get_by_label("scale").input_value() == "linear"
    page.page.get_by_role("button", name="auto range").click()
    page.wait()
    highest = float(page.selection()["high"])
    assert highest == pytest.approx(np.nanmax(weights), rel=1e-5)
    view, pixels = page.view(), page.screen(1)
    assert_pixels(pixels, expected_entries(view, pixels.shape, weights, 0, highest))
    page.page.keyboard.press("s")
    page.wait()
    assert page.selection()["scale"] == "log"
    assert "high" not in page.selection()  # of the other scale
    assert_drawn(page, recording)


@pytest.mark.parametrize("name", ["RAMP", "RAMP_DARK"])
def test_a_stronger_weight_is_further_from_the_paper(name):
    light = table(name) / 255
    light = np.where(light <= 0.04045, light / 12.92, ((light + 0.055) / 1.055) ** 2.4)
    steps = np.diff(light @ [0.2126, 0.7152, 0.0722])
    assert (steps <= 1e-3).all() if name == "RAMP" else (steps >= -1e-3).all()
    paper = PAPER[name == "RAMP_DARK"]
    assert abs(np.subtract(table(name)[0], paper)).max() <= 12


def test_the_dark_theme_turns_the_ramp_and_darkens_the_invisible(open_map, text):
    page = open_map(text, color_scheme="dark", hash="L0H0&zoom=9")
    view, pixels = page.view(), page.screen(1)
    wanted = expected_entries(view, pixels.shape, logs_of(text, 0), -5 * TENS, 0)
    assert (wanted == -1).any()
    assert_pixels(pixels, wanted, dark=True)


def test_a_lone_link_is_seen_at_every_zoom(open_map, long_text):
    page = open_map(long_text)
    ink = np.array(constant("RAMP")[-1])
    weights = np.exp(logs_of(long_text, 0))
    for query, key in LINKS:
        assert weights[query, key] > 0.98
    for zoom in (None, 0.171, 0.25, 0.333, 0.51, 0.77, 1.001, 1.7, 6.3):
        for query, key in LINKS if zoom in (None, 0.171, 0.77) else LINKS[:1]:
            if zoom is not None:
                page.show(f"L0H0&x={key - 150.3 / zoom}&y={query - 100.7 / zoom}&zoom={zoom}")
            x, y = page.place(query, key)
            box = page.page.locator(".regard-map-cells").first.bounding_box()
            pixels = page.canvas()[..., :3].astype(int)
            row, column = int(y - box["y"]), int(x - box["x"])
            near = pixels[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
            assert (np.abs(near - ink).max(-1) <= 6).any(), (zoom, query, key)


def test_the_whole_matrix_is_shown_and_never_less_of_it(open_map, long_text):
    page = open_map(long_text)
    fit = page.view()
    page.show("L0H0&x=-500&y=9999999&zoom=0.0001")
    assert {name: page.view()[name] for name in ("x", "y", "zoom")} == {
        "x": 0, "y": 0, "zoom": fit["zoom"],
    }  # fmt: skip
    page.show("L0H0&x=1e300&y=-1e300&zoom=1e9")
    view = page.view()
    assert view["zoom"] == 64
    assert 4000 < view["x"] < 4096
    assert view["y"] == 0


def test_the_wheel_zooms_where_the_pointer_is(open_map, long_text):
    page = open_map(long_text)
    box = page.page.locator(".regard-map-cells").first.bounding_box()
    before = page.view()
    across, down = round(box["x"]) + 300, round(box["y"]) + 200
    page.page.mouse.move(across, down)
    for _ in range(4):
        page.page.mouse.wheel(0, -300)
    page.wait()
    after = page.view()
    assert after["zoom"] > 3 * before["zoom"]
    for axis, at in (("x", 300), ("y", 200)):
        stood = before[axis] + at / before["zoom"]
        assert after[axis] + at / after["zoom"] == pytest.approx(stood, abs=1 / after["zoom"])
    page.page.mouse.wheel(0, 99999)
    page.wait()
    assert page.view()["zoom"] == before["zoom"]


def test_a_drag_pans_and_chooses_nothing(open_map, long_text):
    page = open_map(long_text, hash="L0H0&x=1000&y=2000&zoom=2&query=7&key=5")
    box = page.page.locator(".regard-map-cells").first.bounding_box()
    page.page.mouse.move(box["x"] + 200, box["y"] + 150)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 260, box["y"] + 130, steps=4)
    page.page.mouse.up()
    page.wait()
    view = page.view()
    assert (view["x"], view["y"]) == (970, 2010)
    assert page.selection()["query"] == "7"


def test_a_double_click_zooms_in(open_map, long_text):
    page = open_map(long_text, hash="L0H0&x=1000&y=2000&zoom=2")
    box = page.page.locator(".regard-map-cells").first.bounding_box()
    page.page.mouse.dblclick(box["x"] + 100, box["y"] + 100)
    page.wait()
    assert page.view()["zoom"] == 4


def test_the_pointer_names_the_strongest_pair_and_repaints_nothing(open_map, long_text):
    page = open_map(long_text)
    query, key = LINKS[3]
    paints = page.view()["paints"]
    page.page.mouse.move(*page.place(query, key))
    page.page.wait_for_function(
        "() => document.querySelector('.regard-readout').textContent.includes('2,777')"
    )
    words = page.readout()
    side = 2 ** int(page.view()["level"])
    (row, column), last = (n // side * side for n in (query, key)), side - 1
    assert f"queries {row:,}–{row + last:,} → keys {column}–{column + last}" in words
    assert re.search("2,777 «.?t2777.?» → 640 «.?t640.?»", words)
    exact = np.exp(logs_of(long_text, 0)[query, key])
    assert f"= {share(exact)}" in words
    for step in range(12):
        page.page.mouse.move(page.place(query, key)[0] + step, page.place(query, key)[1])
    page.wait()
    assert page.view()["paints"] == paints
    page.page.mouse.click(*page.place(query, key))
    page.page.wait_for_function("() => location.hash.includes('query=2777')")
    assert page.selection()["key"] == "640"
    page.wait()
    assert page.view()["paints"] == paints


def test_every_pair_is_read_out_with_its_exact_weight(open_map, text):
    page = open_map(text, hash="L0H1&zoom=20&x=0&y=3")
    page.page.mouse.move(*page.place(12, 9))
    words = is_said(page.page, "query 12 .* × uniform")
    logs = logs_of(text, 1)
    assert "query 12 «t12» → key 9 «t9»" in re.sub("[\u2066-\u2069]", "", words)
    assert f"weight {share(np.exp(logs[12, 9]))}" in words
    page.page.mouse.move(*page.place(9, 12))
    page.page.wait_for_function(
        "() => document.querySelector('.regard-readout').textContent.includes('masked')"
    )


def test_a_map_whose_tokens_are_not_read_is_not_idle(open_map, text):
    page = open_map(text)
    evaluate = page.page.evaluate
    with held(page.page, "/tokens"):
        evaluate("() => document.regardPage.end()")
        evaluate("() => document.regardMount()")
        page.page.wait_for_selector(".regard-map[data-missing='0'][data-read='1']")
        page.page.wait_for_timeout(100)
        assert page.page.locator(".regard-map").get_attribute("data-idle") == "false"
    page.wait()


def test_what_comes_after_the_end_of_a_page_changes_nothing(open_map, text):
    page = open_map(text)
    is_shown(page.page, 299)
    page.page.wait_for_function("() => location.hash.includes('query=299')")
    address, asked = address_of(page.page), len(page.page.requests)
    page.page.evaluate(
        """() => {
          const { context, end } = document.regardPage;
          end();
          context.selection.set({ head: 1, query: 5, key: 3 }); // a choice that waited for numbers
          context.selection.again(); // the server is back
        }"""
    )
    later = "() => new Promise((resolve) => setTimeout(() => resolve(true), 500))"
    page.page.wait_for_function(later, timeout=10_000)
    assert address_of(page.page) == address
    assert len(page.page.requests) == asked


def test_the_pair_that_the_page_chooses_leaves_the_status_line_to_the_pointer(open_map, text):
    page = open_map(text, hash="L0H1&zoom=20&x=0&y=3&query=20&key=5")
    with held(page.page, "/row"):
        page.show("L0H1&zoom=20&x=0&y=3")
        page.page.mouse.move(*page.place(12, 9))
        words = is_said(page.page, "query 12 .* key 9 .* × uniform")
    is_shown(page.page, 299)
    assert page.page.locator(STATUS).text_content() == words


def test_a_clicked_cell_leaves_the_status_line_to_what_is_pointed_at_since(open_map, long_text):
    page = open_map(long_text, hash="L0H0&query=20&key=5")
    is_said(page.page, "query 20 .* key 5 ")
    row = 3000 // 2 ** int(page.view()["level"]) * 2 ** int(page.view()["level"])
    with held(page.page, "/links"):
        page.page.mouse.click(*page.place(*LINKS[3]))
        page.page.mouse.move(*page.place(row, 1000))
        is_said(page.page, f"^queries {row:,}–")
    is_shown(page.page, LINKS[3][0])
    is_said(page.page, f"^queries {row:,}–.* = ")
    page.wait()
    is_said(page.page, f"^queries {row:,}–.* = ")


def test_keys_do_what_the_pointer_does(open_map, long_text):
    page = open_map(long_text, hash="L0H0&query=2800&key=600")
    stage = page.page.locator(".regard-map-stage")
    stage.focus()
    side = 2 ** page.view()["level"]
    press = page.page.keyboard.press
    press("ArrowDown")
    press("ArrowRight")
    assert page.selection()["query"] == str(2800 + int(side))
    press("PageUp")
    chosen = page.selection()
    assert (chosen["query"], chosen["key"]) == (str(2800 - 9 * int(side)), str(600 + int(side)))
    page.show("L0H0&query=2780&key=644")
    press("Enter")
    page.page.wait_for_function("() => location.hash.includes('query=2777')")
    assert page.selection()["key"] == "640"
    before = page.view()
    press("+")
    page.wait()
    after = page.view()
    assert after["zoom"] == pytest.approx(2 * before["zoom"])
    assert after["x"] < 640 < after["x"] + 600 / after["zoom"]
    press("-")
    page.wait()
    press("0")
    page.wait()
    assert page.view()["zoom"] == before["zoom"]
    press("End")
    assert page.selection()["key"] == "4095"
    press("Home")
    assert page.selection()["key"] == "0"


def test_the_chosen_cell_comes_into_sight(open_map, long_text):
    page = open_map(long_text, hash="L0H0&x=0&y=0&zoom=8&query=10&key=5")
    page.page.locator(".regard-map-stage").focus()
    for _ in range(8):
        page.page.keyboard.press("PageDown")
    page.wait()
    view = page.view()
    height = page.canvas().shape[0]
    assert view["y"] < 90 < view["y"] + height / view["zoom"]


def test_the_strongest_links_are_listed_and_ringed(open_map, long_text):
    page = open_map(long_text)
    panel = page.page.locator(".regard-pairs")
    buttons = panel.locator("button")
    buttons.first.wait_for()
    listed = {
        tuple(int(button.get_attribute(f"data-{name}")) for name in ("query", "key"))
        for button in buttons.all()
    }
    far = {(i, j) for i, j in LINKS if i - j > 41}
    assert far <= listed
    assert "distant" in panel.locator("summary").inner_text().lower()
    buttons.first.focus()
    page.page.keyboard.press("Enter")
    query = buttons.first.get_attribute("data-query")
    assert page.selection()["query"] == query
    assert buttons.first.get_attribute("aria-current") == "true"


def test_the_list_says_which_pairs_it_leaves_out(open_map):
    page = open_map(made(40, causal=True))
    panel = page.page.locator(".regard-pairs")
    panel.locator("button").first.wait_for()
    note = panel.locator(".regard-note")
    queries = "Of queries that see at least 8 keys."
    assert note.inner_text() == f"{queries} Pairs with the first token are left out."
    pairs = panel.locator("button").evaluate_all(
        "all => all.map(({ dataset }) => [Number(dataset.query), Number(dataset.key)])"
    )
    assert min(query for query, _ in pairs) >= 7
    assert min(key for _, key in pairs) >= 1
    page.page.get_by_role("button", name="hide first").click()  # which the caption says
    note.filter(has_text=re.compile(f"^{queries}$")).wait_for()


def test_the_map_says_how_much_it_has_read(open_map, text, serve, open_page):
    page = open_map(text)
    rounds = []

    def partly(route):
        answer = route.fetch(max_retries=3)
        rounds.append(route.request.url)
        share = "0.28" if len(rounds) < 8 else "1"
        route.fulfill(response=answer, headers={**answer.headers, "Regard-Coverage": share})

    page.page.route("**/data/tile*", partly)
    page.page.evaluate("() => { location.hash = 'L0H0&plane=mass'; }")
    caption = page.page.locator(".regard-map-caption")
    page.page.wait_for_function(
        "() => document.querySelector('.regard-map-caption').textContent.includes('28 % of rows')"
    )
    page.wait()
    assert "rows read" not in caption.inner_text()
    assert_drawn(page, text, plane="mass")


def test_only_what_is_seen_is_asked_for(open_map, long_text):
    page = open_map(long_text)
    page.page.requests.clear()
    page.show("L0H0&x=1000&y=2000&zoom=3")
    tiles = [url for url in page.page.requests if "/tile?" in url]
    assert 0 < len(tiles) <= 4
    assert all("level=0" in url for url in tiles)


def test_many_zooms_between_two_frames_are_one_repaint(open_map, long_text):
    page = open_map(long_text, hash="L0H0&x=1000&y=2000&zoom=3")
    before = page.view()
    page.page.requests.clear()
    page.page.evaluate(
        """() => {
          const map = document.querySelector(".regard-map-cells");
          const box = map.getBoundingClientRect();
          const at = { clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
          for (let step = 0; step < 12; step++)
            map.dispatchEvent(new WheelEvent("wheel",
              { ...at, deltaY: -3, bubbles: true, cancelable: true }));
        }"""
    )
    page.wait()
    after = page.view()
    assert after["zoom"] > before["zoom"]
    assert [url for url in page.page.requests if "/tile?" in url] == []  # each known one: no more
    assert after["paints"] == before["paints"] + 1


def test_hostile_tokens_stay_text(open_map):
    recording = made(12)
    hostile = ["<img src=x onerror=alert(1)>", "</script>", "\u202eabc", "\u0000", "&lt;", "\ud83d"]
    tokens = tuple(hostile[n % len(hostile)] for n in range(12))
    recording.tokens = recording.query_tokens = tokens
    page = open_map(recording)
    page.page.mouse.move(*page.place(6, 2))
    assert page.page.locator(".regard img").count() == 0
    assert "\u202e" not in page.readout()


def test_two_fingers_zoom_where_they_are(open_map, long_text):
    page = open_map(long_text, hash="L0H0&x=1000&y=2000&zoom=2", has_touch=True)
    box = page.page.locator(".regard-map-cells").first.bounding_box()
    left, top = round(box["x"]), round(box["y"])
    session = page.page.context.new_cdp_session(page.page)

    def touch(kind, *places):
        points = [{"x": left + x, "y": top + y, "id": n} for n, (x, y) in enumerate(places)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", (200, 200), (240, 200))
    for spread in (10, 20, 30, 40):
        touch("touchMove", (200 - spread, 200), (240 + spread, 200))
    touch("touchEnd")
    page.wait()
    view = page.view()
    assert view["zoom"] == pytest.approx(6, rel=0.05)
    assert view["x"] + 220 / view["zoom"] == pytest.approx(1000 + 220 / 2, abs=2)
    assert "query=7" not in address_of(page.page)


def test_a_coarser_picture_stands_until_the_finer_has_come(open_map, long_text):
    page = open_map(long_text)
    level = int(page.view()["level"])
    held = []
    page.page.route("**/data/tile*level=0*", lambda route: held.append(route))
    page.page.evaluate("() => { location.hash = 'L0H0&x=1000&y=2000&zoom=3'; }")
    page.page.wait_for_function(
        "() => document.querySelector('.regard-map-cells').dataset.level === '0'"
    )
    page.page.wait_for_timeout(100)
    assert page.page.locator(".regard-map").get_attribute("data-idle") == "false"
    logs = logs_of(long_text, 0)
    pixels = page.canvas()[..., :3].astype(int)
    view = page.view()
    wanted = expected_entries(view, pixels.shape, logs, -5 * TENS, 0)
    coarse = pooled(logs, level, "max").repeat(2**level, 0).repeat(2**level, 1)
    assert_pixels(pixels, expected_entries(view, pixels.shape, coarse, -5 * TENS, 0))
    for route in held:
        route.continue_()
    page.page.unroute("**/data/tile*level=0*")
    page.wait()
    assert_pixels(page.canvas()[..., :3].astype(int), wanted)


def test_generated_text_is_marked_on_both_axes(open_map):
    plain = made(64, seed=5)
    recording = Recording(plain.tokens, plain.layers, boundary=40)
    page = open_map(recording)
    drawing = saved(page.page, "SVG")[0].decode()
    assert "written by the model →" in drawing
    assert "written by the model ↓" in drawing
    assert drawing.count("stroke-dasharray") == 2
