"""The heads of a recording in the page: numbers, roles, and what lies under the pointer."""

import numpy as np
import pytest

from regard.recording import Layer, Recording
from viewer.map_page import log_weights
from viewer.pages import is_chosen, is_said, share, spoken

REPEATED = [" a", " b", " c", " d"] * 6

# Of each role that is written: its letters, what they take and have of room, how they are cut, and
# the label that the pointer gets.
TAGS = """() => [...document.querySelectorAll(".regard-head-tag")]
  .filter((tag) => tag.offsetHeight > 0)
  .map((tag) => {
    const letters = document.createRange();
    letters.selectNodeContents(tag);
    const {width} = letters.getBoundingClientRect();
    const {paddingLeft, paddingRight, textOverflow} = getComputedStyle(tag);
    const padding = parseFloat(paddingLeft) + parseFloat(paddingRight);
    const room = tag.getBoundingClientRect().width - padding;
    return [tag.textContent, width, room, textOverflow, tag.closest("button").title];
  })"""


@pytest.fixture
def show(serve, open_page):
    return lambda recording, hash="", **options: open_page(f"{serve(recording)}#{hash}", **options)


def looking_back(tokens, distance):
    """A head whose queries look at the token some positions before them."""
    L = len(tokens)
    key = 8 * np.eye(L, dtype="f")
    query = np.roll(key, distance, 0)
    return query, key


def test_heads_have_their_numbers_and_roles(show):
    pairs = [looking_back(REPEATED, n) for n in (0, 1, 3)]
    query, key = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
    recording = Recording(REPEATED, [Layer(query, key, causal=True, scale=1.0)])
    page = show(recording, "L0H1&query=9&key=8")
    is_chosen(page, 9, 8)
    assert page.locator(".regard-head-numbers > span").all_text_contents() == ["0", "1", "2"]
    tags = page.locator(".regard-head-tag")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.regard-head-tag')].every((tag) => tag.textContent)"
    )
    scores = recording.heads()
    assert tags.all_text_contents() == [scores.named(0, h)[0].role.short for h in range(3)]
    assert tags.all_text_contents()[1] == "prev"
    label = page.locator(".regard-head").nth(1).get_attribute("aria-label")
    assert label.startswith("L0H1, previous token")


@pytest.mark.parametrize(("heads", "height"), [(8, 12), (12, 12), (24, 0), (64, 0)])
def test_roles_are_written_where_a_thumbnail_has_room_for_them(show, heads, height):
    query, key = looking_back(REPEATED, 1)
    layer = Layer(*(np.stack([x] * heads) for x in (query, key)), causal=True, scale=1.0)
    page = show(Recording(REPEATED, [layer]), "L0H1&query=9&key=8")
    is_chosen(page, 9, 8)
    page.locator(".regard-head[aria-label^='L0H1, previous token']").wait_for()
    heights = page.evaluate(
        "() => [...document.querySelectorAll('.regard-head-tag')].map((tag) => tag.offsetHeight)"
    )
    assert heights == [height] * heads


@pytest.mark.parametrize("has_role", [True, False])
def test_the_chosen_head_has_no_tag_where_it_has_no_role(show, has_role):
    recording = spoken([f" w{n}" for n in range(24)])
    scores = recording.heads()
    h = next(h for h in range(4) if bool(scores.named(0, h)) == has_role)
    page = show(recording, f"L0H{h}&query=9&key=8")
    is_chosen(page, 9, 8)
    page.wait_for_selector(f".regard-map-says >> text={scores.says(0, h)}")
    page.wait_for_selector(".regard-head-tag:not(:empty)", state="attached")
    ground, tag, canvas = page.evaluate(
        "() => { const head = document.querySelector('.regard-head[aria-pressed=true]');"
        " return [getComputedStyle(head).backgroundColor,"
        " head.querySelector('.regard-head-tag').offsetHeight,"
        " getComputedStyle(head.querySelector('canvas')).outlineStyle]; }"
    )
    assert tag == 12  # the row keeps its height
    assert (ground != "rgba(0, 0, 0, 0)") == has_role
    assert (canvas == "solid") != has_role


def test_a_role_of_two_words_stands_in_one_line(show):
    query, key = looking_back(REPEATED, 2)
    layer = Layer(*(np.stack([x] * 8) for x in (query, key)), causal=True, scale=1.0)
    page = show(Recording(REPEATED, [layer]), "L0H1&query=9&key=7", size=(1024, 700))
    is_chosen(page, 9, 7)
    tag = page.locator(".regard-head-tag", has_text="2 back").first
    tag.wait_for()
    assert tag.evaluate("tag => tag.scrollHeight") == tag.evaluate("tag => tag.clientHeight")


@pytest.mark.parametrize("heads", [8, 12])
def test_a_role_without_room_ends_in_an_ellipsis_and_short_ones_are_whole(show, heads):
    pairs = [looking_back(REPEATED, n % 4) for n in range(heads)]
    layer = Layer(*(np.stack(side) for side in zip(*pairs, strict=True)), causal=True, scale=1.0)
    page = show(Recording(REPEATED, [layer]), "L0H1&query=9&key=8", size=(1024, 720), shared=False)
    is_chosen(page, 9, 8)
    page.locator(".regard-head[aria-label^='L0H1, previous token']").wait_for()
    cut = set()
    for width in (1000, 1024, 1100, 1140, 1180, 1280):
        page.set_viewport_size({"width": width, "height": 720})
        for text, written, has, end, title in page.evaluate(TAGS):
            if written > has + 0.1:
                cut.add(width)
                assert len(text) > 4, (width, text, written, has)
                assert end == "ellipsis"
                assert text in title
    assert heads == 12 or 1024 in cut


def test_means_of_a_survey_stand_in_brackets_beside_a_heads_own(serve, open_page):
    recording = spoken()
    corpus = {(0, 1): {"entropy": 0.875, "distance": 2.5, "first": 0.25, "previous": 0.125}}
    page = open_page(f"{serve(recording, corpus=corpus)}#L0H1&query=5&key=3")
    is_chosen(page, 5, 3)
    head = page.locator(".regard-head[aria-label^='L0H1']")
    page.locator(".regard-heads .regard-note", has_text="mean over the survey's corpus").wait_for()
    entropy = recording.heads().entropy[0, 1]
    assert f"entropy {entropy:.3f} (0.875)" in head.get_attribute("aria-label")
    assert "first token" in head.get_attribute("aria-label")
    assert "(25.00 %)" in head.get_attribute("aria-label")
    other = page.locator(".regard-head[aria-label^='L0H0']").get_attribute("aria-label")
    assert "(" not in other


def test_numbers_of_heads_that_share_keys_are_not_over_columns(show):
    page = show(spoken(key_heads=2), "L0H1&query=5&key=3")
    is_chosen(page, 5, 3)
    assert page.locator(".regard-head-numbers").count() == 0


@pytest.mark.parametrize("side", ["", "&compare=side&other=L1H0"], ids=["one", "two"])
def test_a_label_at_the_pointer_names_the_pair_and_its_weight(show, side):
    recording = spoken()
    page = show(recording, f"L0H1&query=5&key=3{side}")
    is_chosen(page, 5, 3)
    page.wait_for_selector(".regard-map[data-idle=true]")
    canvas = page.locator(".regard-map canvas[data-zoom]").first
    zoom, box = float(canvas.get_attribute("data-zoom")), canvas.bounding_box()
    page.mouse.move(box["x"] + 2.5 * zoom, box["y"] + 6.5 * zoom)
    shown = [0, 1] if side else [0]
    for frame, (layer, head) in zip(shown, [(0, 1), (1, 0)]):
        weight = np.exp(log_weights(recording, head, layer)[6, 2])
        label = page.locator(".regard-map-point").nth(frame)
        label.filter(has_text=f"{100 * weight:.2f} %").wait_for()
        assert "was\u2069 → \u2068cat" in label.text_content()
    page.mouse.move(box["x"] + 6.5 * zoom, box["y"] + 2.5 * zoom)
    page.locator(".regard-map-point", has_text="masked").first.wait_for()


def test_the_label_of_several_weights_says_what_a_cell_shows(show):
    recording = spoken([f" w{n}" for n in range(901)], heads=1, key_heads=1, layers=1)
    page = show(recording, "L0H0&query=800&key=3")
    is_chosen(page, 800, 3)
    page.wait_for_selector(".regard-map[data-idle=true]")
    canvas = page.locator(".regard-map canvas[data-zoom]").first
    zoom, box = float(canvas.get_attribute("data-zoom")), canvas.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 300)
    page.locator(".regard-map-point", has_text="strongest").wait_for()
    page.keyboard.press("m")
    page.locator(".regard-map-point", has_text="share").wait_for()
    is_said(page, r"queries \d+–\d+ → keys \d+–\d+   share ")
    page.mouse.move(box["x"] + 20, box["y"] + 900.5 * zoom)
    is_said(page, r"query 900 → keys \d+–\d+   share ")


def test_the_label_of_a_difference_has_its_sign(show):
    recording = spoken()
    page = show(recording, "L0H1&query=5&key=3&compare=difference&other=L0H0")
    is_chosen(page, 5, 3)
    page.wait_for_selector(".regard-map[data-idle=true]")
    canvas = page.locator(".regard-map canvas[data-zoom]").first
    zoom, box = float(canvas.get_attribute("data-zoom")), canvas.bounding_box()
    one, other = (np.exp(log_weights(recording, head)) for head in (1, 0))
    for place in (np.nanargmax(one - other), np.nanargmin(one - other)):
        row, column = divmod(int(place), len(one))
        page.mouse.move(box["x"] + (column + 0.5) * zoom, box["y"] + (row + 0.5) * zoom)
        words = f"{100 * (one - other)[row, column]:+.2f} %".replace("-", "−")
        page.locator(".regard-map-point", has_text=words).first.wait_for()


def test_the_columns_of_a_list_of_pairs_are_straight(show):
    page = show(spoken(explained=True), "L0H1&query=5&key=3&plane=effect")
    is_chosen(page, 5, 3)
    page.locator(".regard-pairs em", has_text="−").first.wait_for()
    rows = page.locator(".regard-pairs button").evaluate_all(
        """(all) => all.map((row) => {
          const boxes = [...row.children].map((n) => n.getBoundingClientRect());
          const edges = [...boxes.slice(0, 3).map((box) => box.left), boxes[3].right];
          return [row.children[3].textContent.length, ...edges];
        })"""
    )
    assert len({length for length, *_ in rows}) > 1
    assert len({tuple(edges) for _, *edges in rows}) == 1


def test_the_pair_in_every_head_is_of_words_or_of_tokens_as_the_map_is(show):
    recording = spoken(["The", " t", "ir", "ed", " cat"])
    page = show(recording, "L0H1&query=4&key=2&unit=word")
    page.wait_for_selector(".regard-text[data-shown^='query 4 key 2 ']")
    page.get_by_role("button", name="this pair in every head").click()
    weights = np.exp(log_weights(recording, 1)[4])
    head = ".regard-head[title^='L0H1'][title*='{}']"
    page.wait_for_selector(head.format(f"weight {share(weights[1:4].sum())}"))
    page.keyboard.press("w")
    page.wait_for_selector(head.format(f"weight {share(weights[2])}"))


def test_the_pair_in_every_head_is_no_effect_in_a_difference(show):
    recording = spoken(explained=True)
    page = show(recording, "L0H1&query=5&key=3&plane=effect")
    is_chosen(page, 5, 3)
    page.get_by_role("button", name="this pair in every head").click()
    page.wait_for_selector(".regard-head[title^='L0H1'][title*=', effect ']")
    page.get_by_role("combobox", name="compare").select_option("difference")
    weight = share(np.exp(log_weights(recording, 1)[5, 3]))
    page.wait_for_selector(f".regard-head[title^='L0H1'][title*='weight {weight}']")


def test_layers_of_different_numbers_of_heads_are_counted(show):
    layers = [spoken(heads=n, key_heads=n, layers=1).layers[0] for n in (2, 1)]
    page = show(Recording(spoken().tokens, layers), "L0H1&query=5&key=3")
    is_chosen(page, 5, 3)
    assert page.locator(".regard-heads h2").text_content() == "Heads · 2 × 1 to 2"
    assert page.locator(".regard-facts").get_attribute("title") == "8 tokens · 2 × 1 to 2 heads"
