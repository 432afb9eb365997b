"""Lines: each weight from 1 % on has one, in its head's colour, on the page and in pictures."""

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from viewer.map_page import PAGE, constant, log_weights
from viewer.pages import SENTENCE, crossed, held, is_chosen, is_said, share, spoken
from viewer.test_panels import saved
from viewer.test_words import PIECES, WORDS, by_words

LINES = ".regard-lines"
PALETTE = (PAGE / "drawing" / "palette.js").read_text()
# What the columns show beside each token while another one is pointed at.
SHARES = """(side) => [...document.querySelectorAll(`.regard-lines-${side} .regard-lines-token`)]
  .map((node) => node.querySelector(".regard-lines-shares").textContent)"""
# How far each number is inside the panel: from its left edge, and less than 0 from its right one.
EDGES = """() => [...document.querySelectorAll(".regard-lines-place")].map((node) => {
  const [own, row] = [node, node.parentElement].map((one) => one.getBoundingClientRect());
  const all = document.querySelector(".regard-lines").getBoundingClientRect();
  return [own.left - Math.max(row.left, all.left), own.right - Math.min(row.right, all.right)];
})"""
# Linear light, as each kind of colour blindness sees it (Machado 2009, of full severity).
SEEN_AS = [
    np.eye(3),
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
     [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
     [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
     [0.004733, 0.691367, 0.303900]],
]  # fmt: skip
PAPER = {"light": (253, 251, 246), "dark": (22, 21, 29)}


@pytest.fixture
def show(serve, open_page):
    """Opens Lines of a recording: ``show(recording, "L0H1&query=5", **page options)``."""
    return lambda recording, hash, **options: open_page(
        f"{serve(recording)}#{hash}&view=lines", **options
    )


def weights_of(recording, head, layer=0):
    return np.nan_to_num(np.exp(log_weights(recording, head, layer)))


def is_drawn(page, shown):
    page.wait_for_selector(f"{LINES}[data-shown='{shown}']")


def count_lines(page):
    return int(page.locator(".regard-lines-canvas").get_attribute("data-lines"))


def token(page, side, n):
    return page.locator(f".regard-lines-{side} .regard-lines-token").nth(n)


def percents(weights):
    """``53 %`` of each weight from 1 % on."""
    texts = [
        f"{100 * w:.1f}".removesuffix(".0") if w < 0.0995 else f"{100 * w:.0f}" for w in weights
    ]
    return [f"{text} %" if w >= 0.01 else "" for text, w in zip(texts, weights, strict=True)]


def test_each_weight_from_one_per_cent_on_has_a_line(show):
    recording = spoken()
    page = show(recording, "L1H2&query=5&key=3")
    is_drawn(page, "L1 heads 2 query 5 key 3")
    weights = weights_of(recording, 2, layer=1)
    assert 0 < count_lines(page) == (weights >= 0.01).sum() < np.tri(8).sum()
    assert "Masked pairs and weights under 1 % have none." in page.locator(LINES).text_content()
    assert page.locator(".regard-map").is_hidden()
    selected = page.locator(f"{LINES} [aria-selected=true]").all_text_contents()
    assert selected == ["5it", "slept3"]


def test_a_token_that_is_pointed_at_has_its_own_lines_and_per_cents(show):
    recording = spoken()
    page = show(recording, "L0H1&heads=1,3&query=5&key=3")
    is_drawn(page, "L0 heads 1,3 query 5 key 3")
    one, other = (weights_of(recording, head) for head in (1, 3))
    every = (one >= 0.01).sum() + (other >= 0.01).sum()
    assert count_lines(page) == every
    for side, n in (("query", 6), ("key", 2)):
        token(page, side, n).hover()
        is_said(page, f"^{side} {n} «")
        lines = (one[n], other[n]) if side == "query" else (one[:, n], other[:, n])
        assert count_lines(page) == sum((line >= 0.01).sum() for line in lines)
        wanted = [
            "".join(text for _, text in sorted(zip(pair, texts, strict=True), reverse=True))
            for pair, texts in zip(
                zip(*lines, strict=True), zip(*map(percents, lines), strict=True), strict=True
            )
        ]
        assert page.evaluate(SHARES, "key" if side == "query" else "query") == wanted
        assert not any(page.evaluate(SHARES, side))
    page.locator(".regard-title").hover()
    page.wait_for_function(
        "(count) => document.querySelector('.regard-lines-canvas').dataset.lines === count",
        arg=str(every),
    )


# Of each token: the shares that are in sight, from its word on, and whether each is whole.
IN_SIGHT = """() => [...document.querySelectorAll(".regard-lines-query .regard-lines-shares")]
  .map((shares) => {
    const frame = shares.getBoundingClientRect();
    return [...shares.children].map((node) => [node, node.getBoundingClientRect()])
      .filter(([, box]) => box.top < frame.bottom)
      .sort(([, one], [, other]) => other.right - one.right)
      .map(([node, box]) => [node.textContent, box.left >= frame.left - 0.5]);
  })"""


def test_of_many_heads_the_largest_shares_are_beside_their_token(show):
    recording = spoken(heads=8)
    every = range(8)
    page = show(recording, f"L0H1&heads={','.join(map(str, every))}&query=5&key=3")
    is_drawn(page, "L0 heads 0,1,2,3,4,5,6,7 query 5 key 3")
    token(page, "key", 2).hover()
    is_said(page, "^key 2 «.*; and 4 more")
    found = page.evaluate(IN_SIGHT)
    assert max(map(len, found)) < 8
    for query, shares in enumerate(found):
        exact = sorted((weights_of(recording, head)[query, 2] for head in every), reverse=True)
        assert [text for text, _ in shares] == percents(exact)[: len(shares)]
        assert all(is_whole for _, is_whole in shares)
        assert len(shares) > 1 or query < 2


def test_long_tokens_leave_their_numbers_room_in_a_window_of_any_width(show):
    recording = spoken([" WWWWWWWWWWWWWWWW", *SENTENCE[1:], " internationally"])
    page = show(recording, "L0H1&query=8&key=0", shared=False)
    is_drawn(page, "L0 heads 1 query 8 key 0")
    for width in (320, 360, 412, 700, 1000, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        edges = page.evaluate(EDGES)
        assert len(edges) == 2 * 9
        assert min(left for left, _ in edges) >= 0, width
        assert max(right for _, right in edges) <= 0, width


def test_a_click_chooses_a_token_everywhere(show):
    recording = spoken()
    page = show(recording, "L0H1&query=5&key=3")
    is_drawn(page, "L0 heads 1 query 5 key 3")
    token(page, "query", 6).click()
    is_chosen(page, 6, int(weights_of(recording, 1)[6].argmax()))
    token(page, "key", 2).click()
    is_chosen(page, 6, 2)
    token(page, "key", 7).click()  # query 6 may not attend to it
    is_chosen(page, 7, 7)
    token(page, "query", 5).click(modifiers=["Shift"])
    is_said(page, "mean of 3 queries")
    assert page.locator(".regard-lines-query [aria-selected=true]").count() == 3
    token(page, "query", 2).click(modifiers=["Control"])
    is_said(page, "mean of 4 queries")


def test_the_keyboard_does_the_same(show):
    recording = spoken()
    page = show(recording, "L0H1&query=5&key=3")
    is_drawn(page, "L0 heads 1 query 5 key 3")
    token(page, "query", 5).focus()
    page.keyboard.press("ArrowUp")
    is_said(page, "^query 4 «because» attends to: head 1 ")
    page.keyboard.press("Enter")
    best = int(weights_of(recording, 1)[4].argmax())
    is_chosen(page, 4, best)
    page.keyboard.press("ArrowRight")
    is_said(page, "^key 4 «because» is attended by: head 1 ")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    is_chosen(page, 4, 0)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("End")
    is_said(page, "^query 7 ")
    token(page, "query", 4).focus()
    page.keyboard.press("Shift+ArrowDown")
    is_said(page, "mean of 2 queries")


def test_what_is_pointed_at_stays_in_the_status_line_when_an_earlier_answer_comes(show):
    page = show(spoken(), "L1H2&query=5&key=3")
    is_drawn(page, "L1 heads 2 query 5 key 3")
    is_said(page, "^query 5 .* key 3 ")
    with held(page, "/row"):
        page.keyboard.press("ArrowUp")
        is_drawn(page, "L1 heads 2 query 4 key 3")
        token(page, "query", 6).hover()
        words = is_said(page, "^query 6 «was» attends to")
    page.wait_for_selector(".regard-text[data-shown^='query 4 key 3 ']")
    assert page.locator(".regard-readout").text_content().strip() == words.strip()


@pytest.mark.parametrize("view", ["map", "lines", "steps"])
def test_a_drawing_of_any_token_and_name_is_xml(serve, open_page, view):
    recording = spoken([*SENTENCE[:6], " \ufffe", "\uffff\x1b"])
    address = serve(recording, names=["a\x1bb\ufffe"])
    page = open_page(f"{address}#L0H1&query=7&key=6&view={view}")
    is_chosen(page, 7, 6)
    ElementTree.fromstring(saved(page, "SVG drawing")[0])


def test_heads_are_put_in_and_taken_out(show):
    page = show(spoken(), "L1H2&query=5&key=3")
    is_drawn(page, "L1 heads 2 query 5 key 3")
    chip = page.locator(f"{LINES} .regard-lines-heads").get_by_role("button")
    chip.nth(0).click()
    is_drawn(page, "L1 heads 0,2 query 5 key 3")
    colours = page.locator(".regard-lines-heads [aria-pressed=true] i").evaluate_all(
        "nodes => nodes.map(node => getComputedStyle(node).backgroundColor)"
    )
    assert len(set(colours)) == 2
    page.wait_for_function("() => location.hash.includes('heads=0,2')")
    chip.nth(2).click()
    is_drawn(page, "L1 heads 0 query 5 key 3")
    is_said(page, "^L1H0 .*query 5")
    chip.nth(0).click()
    is_said(page, "one head stays chosen")
    chip.nth(4).click()  # all
    is_drawn(page, "L1 heads 0,1,2,3 query 5 key 3")
    chip.nth(4).click()
    is_drawn(page, "L1 heads 0 query 5 key 3")


def test_the_hidden_first_token_has_no_line(show):
    recording = spoken()
    page = show(recording, "L0H1&query=5&key=3&first=hidden")
    is_drawn(page, "L0 heads 1 query 5 key 3")
    others = weights_of(recording, 1)[:, 1:]
    shared = others[1:] / others[1:].sum(1, keepdims=True)
    assert count_lines(page) == (shared >= 0.01).sum()
    assert "The first token is hidden." in page.locator(LINES).text_content()


def test_more_tokens_than_sixty_are_some_around_the_pair(show):
    recording = spoken([f" w{n}" for n in range(300)])
    page = show(recording, "L0H1&query=290&key=5")
    is_drawn(page, "L0 heads 1 query 290 key 5")
    note = page.locator(f"{LINES} .regard-note").text_content()
    assert "Of 300 tokens, these are 60 queries and 60 keys around the chosen pair." in note
    weights = weights_of(recording, 1)[240:300, :60]  # from two tiles
    assert count_lines(page) == (weights >= 0.01).sum()
    for key, query in (("ArrowUp", 289), ("PageUp", 279)):
        page.keyboard.press(key)
        is_drawn(page, f"L0 heads 1 query {query} key 5")
        assert token(page, "query", 0).text_content().startswith("240")


def test_words_are_one_token_each(show):
    recording = spoken(PIECES)
    page = show(recording, "L0H1&query=5&key=2&unit=word")
    is_drawn(page, "L0 heads 1 query 5 key 2")
    words = page.locator(".regard-lines-query .regard-lines-word").all_text_contents()
    assert words == WORDS
    starts = recording.in_words().starts
    weights = np.nan_to_num(np.exp(by_words(recording, 1)))[np.ix_(starts, starts)]
    assert count_lines(page) == (weights >= 0.01).sum()


def test_queries_with_a_text_of_their_own_stand_left(show):
    page = show(crossed(), "L0H1&query=3&key=6")
    is_drawn(page, "L0 heads 1 query 3 key 6")
    words = page.locator(".regard-lines-query .regard-lines-word").all_text_contents()
    assert words == [f"q{n}" for n in range(5)]
    assert page.locator(".regard-lines-key .regard-lines-token").count() == 7


def test_an_exported_file_has_lines_and_means(open_page, tmp_path):
    recording = spoken()
    recording.export(tmp_path / "page.html")
    address = (tmp_path / "page.html").as_uri()
    page = open_page(f"{address}#L0H1&heads=1,3&query=5&queries=4-6&key=3&view=lines")
    is_drawn(page, "L0 heads 1,3 query 5 key 3")
    heads = [weights_of(recording, head) for head in (1, 3)]
    assert count_lines(page) == sum((weights >= 0.01).sum() for weights in heads)
    exact = np.mean(heads, 0)[4:6].mean(0)[3]
    assert share(exact) in is_said(page, "mean of 2 queries → key 3 ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_are_saved_as_lines(show, scheme):
    recording = spoken()
    page = show(recording, "L0H1&heads=1,3&query=5&key=3", color_scheme=scheme)
    is_drawn(page, "L0 heads 1,3 query 5 key 3")
    svg, name = saved(page, "SVG drawing")
    assert name == "spoken-L0H1.svg"
    drawn = ElementTree.fromstring(svg)
    lines = [node for node in drawn.iter() if node.tag.endswith("line")]
    assert len(lines) == count_lines(page)
    wanted = [w for head in (1, 3) for w in weights_of(recording, head).flat if w >= 0.01]
    widths = sorted(float(line.get("stroke-width")) for line in lines)
    assert widths == pytest.approx([0.6 + 3.4 * w for w in sorted(wanted)], abs=0.006)
    palette = constant("HEAD_COLOURS", PALETTE)[scheme]
    assert {line.get("stroke") for line in lines} == {
        f"rgb({' '.join(map(str, palette[place]))})" for place in (1, 3)
    }
    texts = " ".join(node.text or "" for node in drawn.iter())
    assert re.search("Lines of layer 0, heads 1, 3", texts)
    assert saved(page, "PNG picture")[0].startswith(b"\x89PNG")


def linear(colour):
    c = np.array(colour) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def oklab(light):
    to_cones = [
        [0.41222, 0.53633, 0.05145],
        [0.21190, 0.68070, 0.10740],
        [0.08830, 0.28172, 0.62998],
    ]
    to_lab = [
        [0.21045, 0.79362, -0.00407],
        [1.97800, -2.42859, 0.45059],
        [0.02590, 0.78277, -0.80868],
    ]
    return np.cbrt(np.clip(light, 0, None) @ np.transpose(to_cones)) @ np.transpose(to_lab)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_heads_differ_for_everyone(scheme):
    colours = constant("HEAD_COLOURS", PALETTE)[scheme]
    assert len(colours) == 8
    for matrix in SEEN_AS:
        seen = [oklab(np.clip(np.array(matrix) @ linear(c), 0, 1)) for c in colours]
        for one, other in itertools.combinations(seen, 2):
            assert np.linalg.norm(one - other) > 0.12
    for colour in colours:
        bright, dim = sorted(
            (float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (colour, PAPER[scheme])),
            reverse=True,
        )
        assert (bright + 0.05) / (dim + 0.05) >= 3


def test_a_difference_turns_words_into_tokens(show):
    page = show(spoken(PIECES), "L0H1&query=7&key=2&unit=word")
    page.wait_for_selector(f"{LINES}[data-shown]")
    assert page.locator(".regard-lines-key .regard-lines-token").count() < len(PIECES)
    page.get_by_role("combobox", name="compare").select_option("difference")
    nth = f".regard-lines-key .regard-lines-token:nth-child({len(PIECES)})"
    page.wait_for_selector(nth)
