"""Heads, text and steps in a real browser: what they show is what float64 says."""

import io
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image

from regard.recording import Layer, Recording
from regard.viewer.answer import Answers
from viewer.map_page import log_weights
from viewer.pages import (
    BAR,
    SENTENCE,
    crossed,
    is_chosen,
    is_said,
    saved,
    share,
    shown_bars,
    shown_number,
    spoken,
)


@pytest.fixture
def show(serve, open_page):
    """Opens a recording: ``show(recording, "L0H1&query=5", **page options)``."""
    return lambda recording, hash="", **options: open_page(f"{serve(recording)}#{hash}", **options)


def weights_of(recording, head, layer=0):
    return np.nan_to_num(np.exp(log_weights(recording, head, layer)))


def test_bars_are_the_weights_of_the_query(show):
    recording = spoken()
    page = show(recording, "L1H2&query=5&key=2")
    is_chosen(page, 5, 2)
    exact = weights_of(recording, 2, layer=1)[5]
    bars = shown_bars(page)
    assert [place for place, _, _ in bars] == list(np.argsort(-exact)[:6])
    for place, weight, times in bars:
        assert weight == share(exact[place])
        assert shown_number(times) == pytest.approx(6 * exact[place], rel=6e-3)
    assert f"weight {share(exact[2])}" in is_said(page, "uniform")


def test_bars_of_a_key_are_its_column(show):
    recording = spoken()
    page = show(recording, "L0H3&query=5&key=1&side=by")
    is_chosen(page, 5, 1)
    exact = weights_of(recording, 3)[:, 1]
    bars = shown_bars(page)
    assert [place for place, _, _ in bars] == list(np.argsort(-exact)[:7])
    for place, weight, times in bars:
        assert weight == share(exact[place])
        assert shown_number(times) == pytest.approx((place + 1) * exact[place], rel=6e-3)
    assert (
        f"of the {exact.sum():.4f} that it receives" in page.locator(".regard-text").text_content()
    )


def test_a_click_in_the_text_chooses_the_other_end(show):
    recording = spoken()
    page = show(recording, "L0H0&query=5&key=1")
    is_chosen(page, 5, 1)
    tokens = page.locator(".regard-token")
    assert tokens.all_text_contents() == SENTENCE
    tokens.nth(3).click()
    is_chosen(page, 5, 3)
    assert tokens.nth(3).get_attribute("aria-selected") == "true"
    page.get_by_role("button", name="attended by").click()
    page.wait_for_selector(".regard-text[data-shown$=by]")
    tokens.nth(6).click()
    is_chosen(page, 6, 3)


def test_a_click_on_an_unseen_token_looks_from_there(show):
    recording = spoken()
    page = show(recording, "L0H0&query=3&key=1")
    is_chosen(page, 3, 1)
    page.locator(".regard-token").nth(6).click()
    is_chosen(page, 6, int(weights_of(recording, 0)[6].argmax()))


def test_a_double_click_looks_from_there(show):
    recording = spoken()
    page = show(recording, "L0H0&query=6&key=1")
    is_chosen(page, 6, 1)
    page.locator(".regard-token").nth(4).dblclick()
    is_chosen(page, 4, int(weights_of(recording, 0)[4].argmax()))


def test_hovering_isolates_a_token_and_names_its_weight(show):
    recording = spoken()
    page = show(recording, "L0H0&query=6&key=1")
    is_chosen(page, 6, 1)
    page.locator(BAR).nth(2).hover()
    place = shown_bars(page)[2][0]
    is_said(page, f"key {place} .*{share(weights_of(recording, 0)[6, place])}")
    assert page.locator(".regard-isolated").count() == 1
    page.locator(".regard-title").hover()
    is_chosen(page, 6, 1)
    assert page.locator(".regard-isolated").count() == 0


def test_what_a_causal_query_sees_is_in_view_above_it(show):
    words = [f" word{n}" for n in range(600)]
    page = show(spoken(words), "L0H1&query=302&key=3")
    is_chosen(page, 302, 3)
    field = page.locator(".regard-text-page")
    token = field.locator(".regard-token").nth(302).bounding_box()
    frame = field.bounding_box()
    assert token["y"] > frame["y"] + 0.6 * frame["height"]
    assert token["y"] + token["height"] <= frame["y"] + frame["height"] + 1


@pytest.mark.parametrize(
    ("text", "is_code"),
    [
        ("def f(x):\n    if x:\n        return 1\n    return [\n        2,\n    ]\n", True),
        ("A first line.\nA second, which is longer,\nand the last of the three.\n", False),
        ("def f(x): return x", False),
    ],
)
def test_a_program_is_set_in_one_width(show, text, is_code):
    page = show(spoken(re.findall(r"\s*\S+|\s+", text)), "L0H1&query=2&key=1")
    is_chosen(page, 2, 1)
    field = page.locator(".regard-tokens")
    assert ("mono" in field.evaluate("n => getComputedStyle(n).fontFamily").lower()) == is_code


ENGLISH = ["<bos>", "He", " said", " ש", "לום", " עולם", "!", " and", " left"]
HEBREW = ["<bos>", "הוא", " אמר", " He", "llo", " world", " ויצא", " מיד", "."]


@pytest.mark.parametrize(("tokens", "turn"), [(ENGLISH, 1), (HEBREW, -1)])
def test_words_of_another_direction_are_read_in_theirs(show, tokens, turn):
    page = show(spoken(tokens), "L0H1&query=2&key=1", size=(1400, 720))
    is_chosen(page, 2, 1)
    tokens = page.evaluate(
        "() => [...document.querySelectorAll('.regard-word')].map((word) => {"
        " const { left, right, top } = word.getBoundingClientRect();"
        " const look = getComputedStyle(word);"
        " return [left, right, top, look.borderLeftWidth, look.borderRightWidth]; })"
    )
    middles = [turn * (left + right) / 2 for left, right, *_ in tokens]
    order = sorted(range(1, 7), key=lambda n: middles[n])
    assert len({top for _, _, top, *_ in tokens[1:7]}) == 1
    assert order == [1, 2, 5, 4, 3, 6]
    *_, left, right = tokens[4]  # the hairline is where it meets the piece before it
    assert (left, right) == (("0px", "1px") if turn > 0 else ("1px", "0px"))


def test_a_passage_has_words_of_another_direction_in_theirs(show):
    tokens = [" said", " שלום", " עולם", " and"] * 600
    page = show(spoken(tokens, layers=1, heads=1, key_heads=1), "L0H0&query=2000&key=2")
    is_chosen(page, 2000, 2)
    page.wait_for_selector(".regard-place")
    places = page.evaluate(
        """() => [...document.querySelectorAll(".regard-passage")].flatMap((passage) => {
          const [before, mark] = passage.children;
          if (mark.textContent !== "עולם") return [];
          const letters = document.createRange();
          const end = before.textContent.trimEnd().length;
          letters.setStart(before.firstChild, end - 4);
          letters.setEnd(before.firstChild, end);
          const [one, other] = [letters, mark].map((part) => part.getBoundingClientRect());
          return [[one.left, other.right, one.bottom > other.top && one.top < other.bottom]];
        })"""
    )
    same_line = [(left, right) for left, right, is_same in places if is_same]
    assert same_line
    assert all(right <= left + 2 for left, right in same_line)


def test_a_query_that_sees_nothing_says_so(show):
    recording = spoken(query_start=-3, query_tokens=SENTENCE)
    page = show(recording, "L0H0&query=1&key=0")
    is_said(page, "masked")
    assert "All keys are masked: the output is 0" in page.locator(".regard-text").text_content()


def test_cross_attention_shows_both_texts(show):
    recording = crossed()
    page = show(recording, "L0H1&query=2&key=3")
    is_chosen(page, 2, 3)
    assert page.locator(".regard-token").all_text_contents() == list(recording.tokens)
    assert "q2" in page.locator(".regard-own").text_content()
    page.keyboard.press("t")
    page.wait_for_selector(".regard-text[data-shown$=by]")
    assert page.locator(".regard-token").all_text_contents() == list(recording.query_tokens)
    exact = weights_of(recording, 1)[:, 3]
    assert [place for place, _, _ in shown_bars(page)] == list(np.argsort(-exact))


def test_one_query_and_one_key_are_called_so(show):
    page = show(crossed(1, 1), "L0H1&query=0&key=0")
    is_chosen(page, 0, 0)
    assert page.locator(".regard-facts").inner_text().strip() == "1 query · 1 key"
    page = show(spoken([f" w{n}" for n in range(40)]), "L0H1&view=steps&query=0&key=0")
    is_chosen(page, 0, 0)
    assert "query 0 and its strongest key;" in page.locator(".regard-steps").text_content()


def test_queries_from_the_middle_of_the_text_stand_at_their_tokens(show):
    words = [f" w{n}" for n in range(10)]
    full = spoken(words, layers=1)
    layer = Layer(full.layers[0].query[:, 4:8], full.layers[0].key, causal=True, query_start=4)
    page = show(Recording(words, [layer]), "L0H1&query=2&key=5")
    is_chosen(page, 2, 5, start=4)
    assert page.locator(".regard-chosen").text_content() == " w6"
    assert page.locator(".regard-unseen").all_text_contents() == words[7:]
    page.locator(".regard-token").nth(3).dblclick()  # a key, and no query
    is_chosen(page, 2, 3, start=4)
    page.keyboard.press("t")
    page.wait_for_selector(".regard-text[data-shown$=by]")
    assert page.locator(".regard-chosen").text_content() == " w3"
    assert page.locator(".regard-locked").text_content() == " w6"
    assert page.locator(".regard-unseen").all_text_contents() == words[:4] + words[8:]
    page.locator(".regard-token").nth(7).click()
    is_chosen(page, 3, 3, start=4)
    page.get_by_role("button", name="Steps").click()
    page.wait_for_selector(".regard-steps[data-shown='query 3 key 3']")
    assert "query 7 attends to key 3" in page.locator(".regard-arithmetic").text_content()


def test_the_sum_of_a_long_text_counts_every_key(show):
    recording = spoken([f" w{n}" for n in range(1200)], layers=1)
    page = show(recording, "L0H1&view=steps&query=1199&key=3")
    is_said(page, "query 1,199 .* key 3 ")
    page.wait_for_selector(".regard-steps[data-shown='query 1199 key 3']")
    assert "(1,197 more)" in page.locator(".regard-arithmetic").text_content()


def test_steps_are_saved_as_they_are_shown(show):
    page = show(spoken(), "L0H1&view=steps&query=5&key=3")
    is_chosen(page, 5, 3)
    svg, name = saved(page, "SVG")
    assert name == "spoken-L0H1.svg"
    drawn = ElementTree.fromstring(svg)
    grids = page.locator(".regard-matrix canvas:visible").count()
    assert len(drawn.findall(".//{*}image")) == grids == 6
    words = {node.text for node in drawn.findall(".//{*}text")}
    assert {"scores", "weights", "output", "softmax", "because", "tired"} <= words
    assert page.locator(".regard-arithmetic b").first.text_content() in words
    png, name = saved(page, "PNG", dpi=96)
    assert name == "spoken-L0H1.png"
    pixels = image.imread(io.BytesIO(png))
    flow, below = (
        page.locator(f".regard-{part}").evaluate("n => n.scrollHeight")
        for part in ("flow", "arithmetic")
    )
    assert pixels.shape[0] >= flow + below
    assert pixels.shape[1] == page.locator(".regard-steps").evaluate("n => n.clientWidth")
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50


def test_the_arithmetic_lies_over_no_matrix(show):
    page = show(spoken(), "L0H1&view=steps&query=5&key=3")
    is_chosen(page, 5, 3)
    flow, below = (
        page.locator(f".regard-{part}").bounding_box() for part in ("flow", "arithmetic")
    )
    assert flow["height"] > 200
    assert flow["y"] + flow["height"] <= below["y"] + 1
    assert below["y"] + below["height"] <= 720


def test_scores_that_are_no_numbers_do_no_harm(show):
    recording = spoken()
    recording.layers[0].query[:, 5] = np.nan
    for view in ("map", "steps"):
        page = show(recording, f"L0H0&query=5&key=2&view={view}")
        is_chosen(page, 5, 2)
        page.locator(".regard-token").nth(3).click()
        page.wait_for_timeout(200)


def test_a_column_that_is_not_all_read_says_so_and_is_asked_again(show):
    recording = spoken()
    page = show(recording, "L0H3&query=5&key=1")
    is_chosen(page, 5, 1)
    read = ["0.25"]

    def answer(route):
        found = route.fetch(max_retries=3)
        route.fulfill(response=found, headers={**found.headers, "regard-coverage": read[0]})

    page.route("**/data/column*", answer)
    with page.expect_response("**/data/column*") as asked:
        page.keyboard.press("t")
    assert asked.value.ok
    page.wait_for_selector("text=25 % of the rows read.")
    read[0] = "1"
    page.wait_for_selector("text=25 % of the rows read.", state="detached")
    assert len(shown_bars(page)) == 7


def test_the_part_that_a_model_wrote_is_marked(show):
    page = show(spoken(boundary=5), "L0H0&query=6&key=1")
    is_chosen(page, 6, 1)
    assert page.locator(".regard-written").all_text_contents() == SENTENCE[5:]
    assert "The model wrote from position 5 on" in page.locator(".regard-text").text_content()


def test_search_finds_phrases_across_tokens(show):
    words = ["The", " cat", "ch", "es", " a", " CAT", ".", "\n", "ca", "t"]
    page = show(spoken(words), "L0H0&query=9&key=0&unit=token")
    is_chosen(page, 9, 0)
    page.keyboard.press("/")
    page.keyboard.type("cat")
    is_said(page, "3 found")
    places = page.locator(".regard-hit").evaluate_all("n => n.map(x => x.dataset.place)")
    hits = [int(n) for n in places]
    assert hits == [1, 5, 8, 9]
    for key, at, query in [("Enter", 1, 1), ("Enter", 2, 5), ("Shift+Enter", 1, 1)]:
        page.keyboard.press(key)
        is_said(page, rf"{at} of 3: .*query {query} ")
    page.keyboard.press("Shift+Enter")
    is_said(page, "3 of 3: .*query 8 ")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("nowhere")
    is_said(page, "not found")
    page.keyboard.press("Escape")
    is_said(page, "search closed")
    assert page.locator(".regard-hit").count() == 0


def test_a_long_text_shows_passages_and_a_strip(show):
    words = [f" w{n}" for n in range(2100)]
    recording = spoken(words, layers=1, heads=1, key_heads=1)
    page = show(recording, "L0H0&query=2000&key=700")
    is_chosen(page, 2000, 700)
    exact = weights_of(recording, 0)[2000]
    page.wait_for_selector(".regard-place")
    best = int(exact.argmax())
    first = page.locator(".regard-place", has_text=f"{best:,} ·").first
    assert first.locator("b").text_content() == share(exact[best])
    around = "".join(words[best - 8 : best + 9]).strip()
    assert around in first.text_content()
    top = np.sort(exact)[::-1][:12]
    said = page.locator(".regard-text").text_content()
    assert f"{share(top[top >= 5e-5].sum())} of its attention" in said
    strip = page.get_by_role("slider", name="The whole text")
    box = strip.bounding_box()
    strip.click(position={"x": 8, "y": box["height"] * 0.5})
    is_said(page, r"query 2,000 .* key 1,0[3-6]\d ")
    before = int(strip.get_attribute("aria-valuenow"))
    strip.press("ArrowDown")
    page.wait_for_function(
        "n => +document.querySelector('[role=slider]').ariaValueNow > n", arg=before
    )


def test_the_number_of_a_passage_stands_in_one_line(show):
    recording = spoken([f" w{n}" for n in range(2100)], layers=1, heads=1, key_heads=1)
    query, key = recording.layers[0].query, recording.layers[0].key
    key[:, 2000] = -query[:, 2000]  # a weight of many letters
    page = show(recording, "L0H0&query=2000&key=700")
    is_chosen(page, 2000, 700)
    own = page.locator(".regard-place", has_text="the token itself").locator("b")
    assert re.fullmatch(r"\d\.\de−\d+ %", own.text_content())
    lines = page.locator(".regard-place b").evaluate_all(
        """(all) => all.map((node) => {
          const range = document.createRange();
          range.selectNodeContents(node);
          return range.getClientRects().length;
        })"""
    )
    assert set(lines) == {1}


# Every cell of a grid, walked through by its keys: its text, its row and its column.
WALK = """(grid) => {
  const press = (key, shiftKey = false) =>
    grid.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey, bubbles: true }));
  const [rows, columns] = ["row", "col"].map((side) => +grid.getAttribute(`aria-${side}count`));
  const found = [];
  grid.focus();
  for (let n = 0; n <= rows / 10; n++) press("ArrowUp", true);
  for (let row = 0; row < rows; row++) {
    press("Home");
    for (let column = 0; column < columns; column++) {
      const [line, cell] = ["row", "gridcell"].map((role) => grid.querySelector(`[role=${role}]`));
      found.push([cell.textContent, line.ariaRowIndex - 1, cell.ariaColIndex - 1]);
      if (column < columns - 1) press("ArrowRight");
    }
    press("ArrowDown");
  }
  return [rows, columns, found];
}"""


def cells(page, name):
    """The number of every cell of a matrix of the steps, or of a stage of the scores."""
    stage = page.locator(f".regard-stages [data-stage='{name}']:visible")
    if stage.count():
        stage.click()
    grid = page.get_by_role("grid", name=re.compile(rf"^{name}, "))
    rows, columns, found = grid.evaluate(WALK)
    assert [place for _, *place in found] == [[i, j] for i in range(rows) for j in range(columns)]
    return np.reshape([cell_number(text) for text, *_ in found], (rows, columns))


def cell_number(text):
    number = text.split(": ")[-1].split(",")[0].replace("−", "-")
    return -np.inf if number == "-∞" else float(number)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "sinks": np.ones(4, "f")}])
def test_steps_are_those_of_regard_steps(show, options):
    words = SENTENCE[:3]
    bias = np.linspace(-1, 1, 9, dtype="f").reshape(1, 3, 3)
    recording = spoken(words, layers=1, size=3, **options, **({"bias": bias} if options else {}))
    page = show(recording, "L0H2&view=steps&query=0&key=0")
    is_chosen(page, 0, 0)
    steps = recording.steps(0, 2)
    names = {"q": "query", "v": "value", "scores": "scores", "scaled": "scaled"}
    names |= {"masked": "masked", "weights": "weights", "output": "output"}
    names |= {"capped": "capped"} if options else {}
    for shown, name in names.items():
        np.testing.assert_allclose(cells(page, shown), getattr(steps, name), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cells(page, "kᵀ"), steps.key.T, rtol=1e-4, atol=1e-5)
    assert page.locator("[data-stage=capped]:visible").count() == bool(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask": np.arange(8)[:, None] != 5}, "Rows that see no key lack 50.00 %."),
        ({"sinks": np.full(4, 50, "f")}, "The sink takes 100.00 %."),
    ],
)
def test_what_is_missing_is_the_sinks_only_where_there_is_one(show, options, said):
    page = show(spoken(causal=False, **options), "L0H0&query=5&queries=4-6&key=2")
    page.wait_for_selector(f".regard-text >> text={said}")


def test_choosing_a_cell_writes_out_its_arithmetic(show):
    recording = spoken()
    page = show(recording, "L0H1&view=steps&query=7&key=0")
    is_chosen(page, 7, 0)
    grid = page.get_by_role("grid", name=re.compile("^weights"))
    box = grid.locator("canvas").bounding_box()
    grid.click(position={"x": 2.5 * box["width"] / 8, "y": 5.5 * box["height"] / 8})
    is_chosen(page, 5, 2)
    steps = recording.steps(0, 1)
    text = page.locator(".regard-arithmetic").text_content().replace("−", "-")
    page.wait_for_selector(".regard-arithmetic >> text=q[it]")
    assert "q[it]·k[cat]" in text
    for number in (steps.query[5, 0], steps.key[2, 0], steps.scores[5, 2], steps.scaled[5, 2]):
        assert f"{number:.3g}" in text
    assert f"{weights_of(recording, 1)[5, 2]:.4f}" in text
    assert f"uniform would be 1/6 = {1 / 6:.4f}" in text
    is_said(page, "^weights, query «it», key «cat»: .* · query 5 ")
    grid.press("ArrowLeft")
    is_said(page, "^weights, query «it», key «tired»: .* · query 5 .* key 1 ")
    page.get_by_role("grid", name=re.compile("^output")).press("ArrowRight")
    said = is_said(page, "^output, query «it», column 1: ")
    assert cell_number(said.split(" · ")[0]) == pytest.approx(steps.output[5, 1], rel=1e-3)
    assert "o[it], column 1 = " in page.locator(".regard-arithmetic").text_content()
    outlined = page.locator(".regard-outlines > div").count()
    assert outlined == 6  # q, k, scores, weights, v, output
    for key, place in [
        ("Home", "query 5 .* key 0 "), ("ArrowDown", "query 6 "), ("Shift+ArrowUp", "query 0 "),
    ]:  # fmt: skip
        grid.press(key)
        is_said(page, f"^weights, .* · {place}")


def test_long_texts_show_one_query_and_its_strongest_keys(show):
    words = [f" w{n}" for n in range(60)]
    recording = spoken(words, layers=1)
    page = show(recording, "L0H1&view=steps&query=50")
    exact = weights_of(recording, 1)[50]
    strongest = sorted(np.argsort(-exact)[:12])
    is_chosen(page, 50, int(exact.argmax()))
    labels = page.locator(".regard-matrix", has_text=re.compile("^k")).first
    shown = labels.locator(".regard-row-labels > span").all_text_contents()
    assert [int(label.split()[0]) for label in shown] == strongest
    assert "query 50 and its 12 strongest keys" in page.locator(".regard-steps").text_content()
    np.testing.assert_allclose(cells(page, "weights")[:, 0], exact[strongest], rtol=1e-4)


def test_steps_without_values_end_at_the_weights(show):
    page = show(spoken(values=False), "L0H1&view=steps&query=5&key=1")
    is_chosen(page, 5, 1)
    page.wait_for_selector("text=No values were recorded")
    assert page.get_by_role("grid", name=re.compile("^(v|output)")).count() == 0
    assert page.get_by_role("grid", name=re.compile("^weights")).count() == 1


def test_steps_of_nan_say_so(show):
    recording = spoken(SENTENCE[:3], layers=1, heads=1, key_heads=1, size=2)
    recording.layers[0].query[0, 1] = np.nan, 1
    page = show(recording, "L0H0&view=steps&query=1&key=0")
    page.wait_for_selector(".regard-steps[data-shown='query 1 key 0']")
    text = page.locator(".regard-arithmetic").text_content()
    assert "= NaN" in text
    assert "kept, NaN" in text
    assert "NaN" in text
    found = np.array(cells(page, "masked"), float)
    np.testing.assert_array_equal(found[1], [np.nan, np.nan, -np.inf])


def heads_shown(page):
    """The heads in their order, as ``(layer, head)``."""
    names = page.locator(".regard-head").evaluate_all("n => n.map(x => x.ariaLabel)")
    return [tuple(map(int, re.match(r"L(\d+)H(\d+)", name).groups())) for name in names], names


def facts_of(recording):
    answers = Answers([recording])
    layers = range(len(recording.layers))
    found = [json.loads(answers.answer("heads", f"layer={n}").body) for n in layers]
    answers.close()
    return found


def test_heads_are_named_by_their_scores_and_sorted_by_them(show):
    recording = spoken([f" w{n % 5}" for n in range(30)])
    page = show(recording)
    page.wait_for_selector(".regard-head[aria-label^='L1H3, entropy']")
    facts = facts_of(recording)
    order, names = heads_shown(page)
    assert order == [(layer, head) for layer in range(2) for head in range(4)]
    for (layer, head), name in zip(order, names):
        assert f"first token {share(facts[layer]['first'][head])}" in name
        assert f"previous token {share(facts[layer]['previous'][head])}" in name
    ways = {"entropy": 1, "distance": -1, "first": -1, "previous": -1, "induction": -1}
    for score, way in ways.items():
        page.get_by_label("order").select_option(score)
        found = [way * facts[layer][score][head] for layer, head in heads_shown(page)[0]]
        assert found == sorted(found)
    page.get_by_label("order").select_option("layer")
    page.get_by_role("button", name=re.compile("^L1H2")).click()
    is_said(page, "L1H2")
    assert page.locator(".regard-head[aria-pressed=true]").get_attribute("aria-label")[:4] == "L1H2"


def test_heads_tell_the_weight_of_the_chosen_pair(show):
    recording = spoken()
    page = show(recording, "L0H0&query=6&key=2")
    is_chosen(page, 6, 2)
    page.keyboard.press("p")
    page.wait_for_selector(".regard-head[aria-label*='weight']")
    order, names = heads_shown(page)
    for (layer, head), name in zip(order, names):
        assert f"weight {share(weights_of(recording, head, layer)[6, 2])}" in name


def test_heads_that_share_keys_are_grouped(show):
    page = show(spoken(heads=6, key_heads=2))
    page.wait_for_selector(".regard-head-group")
    groups = page.locator(".regard-layer").first.locator(".regard-head-group")
    assert groups.evaluate_all("n => n.map(x => x.querySelectorAll('button').length)") == [3, 3]
    assert "share their keys" in page.locator(".regard-heads").text_content()
