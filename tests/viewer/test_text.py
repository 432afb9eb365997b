"""The text panel: words on one ground, the query filled, the future without any."""

import pytest

from viewer.pages import is_chosen, spoken

PIECES = ["The", " t", "ir", "ed", " cat", ".", " It", " is"]
CLEAR = "rgba(0, 0, 0, 0)"
STYLES = """(names) => [...document.querySelectorAll(".regard-word")].map((node) => {
  const style = getComputedStyle(node);
  const {left, right} = node.getBoundingClientRect();
  return {left, right, ...Object.fromEntries(names.map((name) => [name, style[name]]))};
})"""


@pytest.fixture
def words(serve, open_page):
    """The looks of each token: of a text, and of the chosen pair in it."""

    def start(place, *names):
        page = open_page(f"{serve(spoken(PIECES))}#L0H1&{place}&unit=token")
        is_chosen(page, *(int(part.split("=")[1]) for part in place.split("&")))
        return page, page.evaluate(STYLES, names)

    return start


def test_the_tokens_of_a_word_stand_on_one_ground(words):
    _, looks = words(
        "query=6&key=0", "borderTopLeftRadius", "borderTopRightRadius", "borderLeftWidth"
    )
    assert [look["borderTopLeftRadius"] for look in looks] == ["5px", "5px", "0px", "0px"] + 4 * [
        "5px"
    ]
    rounded = [look["borderTopRightRadius"] for look in looks]
    assert rounded == ["5px", "0px", "0px", "5px", "5px", "5px", "5px", "5px"]
    hairlines = [n for n, look in enumerate(looks) if look["borderLeftWidth"] == "1px"]
    assert hairlines == [2, 3]
    for one, other in ((1, 2), (2, 3)):
        assert looks[one]["right"] == pytest.approx(looks[other]["left"], abs=0.1)


def test_the_query_is_filled_and_the_future_has_no_ground(words):
    page, looks = words("query=4&key=0", "backgroundColor", "color")
    accent = page.evaluate(
        "() => getComputedStyle(document.querySelector('.regard')).getPropertyValue('--accent')"
    )
    assert looks[4]["backgroundColor"] == "rgb({}, {}, {})".format(
        *(int(accent[n : n + 2], 16) for n in (1, 3, 5))
    )
    assert [look["backgroundColor"] for look in looks[5:]] == [CLEAR] * 3
    assert all(look["backgroundColor"] != CLEAR for look in looks[:5])
    assert len({look["color"] for look in looks[5:]}) == 1


def test_by_words_the_whole_word_is_filled(serve, open_page):
    page = open_page(f"{serve(spoken(PIECES))}#L0H1&query=3&key=0&unit=word")
    page.wait_for_selector(".regard-chosen")
    assert page.locator(".regard-chosen").all_text_contents() == PIECES[1:4]


def test_a_text_from_right_to_left_is_read_and_walked_that_way(serve, open_page):
    tokens = ["<bos>", "שלום", " עו", "לם", " אני"]
    page = open_page(f"{serve(spoken(tokens))}#L0H1&query=4&key=1&unit=token")
    is_chosen(page, 4, 1)
    looks = page.evaluate(STYLES, ["borderRightWidth"])
    lefts = [look["left"] for look in looks]
    assert lefts == sorted(lefts, reverse=True)
    assert [n for n, look in enumerate(looks) if look["borderRightWidth"] == "1px"] == [3]
    page.locator(".regard-token").nth(1).focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("() => document.activeElement.textContent") == " עו"
