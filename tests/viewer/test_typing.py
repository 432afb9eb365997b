"""Texts that are typed in the page: who may send one, what is read, and what the page shows."""

import http.client
import itertools
import json
import re
import socket
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest

from regard.lm import model as language_model
from regard.viewer import _readings, _server
from regard.viewer._bundle import bundle
from regard.viewer._readings import MAX_CHARACTERS, MAX_KEPT, Read, Readings, SupersededError
from regard.viewer._server import Viewer
from regard.viewer.answer import Answers
from tiny_model import tiny_model
from viewer.pages import address_of, held, is_said
from viewer.test_server import Reply, all_at_once, ask, settles

TEXT = "import os, import sys"
READ = ".regard-typed[data-state=read]"
FAILED = ".regard-typed[data-state=failed]"


@pytest.fixture(scope="session")
def model():
    return tiny_model("tiny")


@pytest.fixture
def type_in(model):
    """Serves a page with an input, ``type_in(text="", reader=None) -> address``."""
    viewers = []

    def start(text="", reader=None):
        readings = Readings(reader or _readings.reader_of(model), text)
        viewers.append(Viewer((), None, 0, readings))
        return viewers[-1].address

    yield start
    for viewer in viewers:
        viewer.close()


def send(address, text=TEXT, body=None, path="data/read", **headers):
    """A text as a page of the viewer sends it, or with other headers; None leaves one out."""
    parts = urlsplit(address)
    given = {"Content-Type": "application/json", "Origin": f"http://{parts.netloc}", **headers}
    named = {name.replace("_", "-"): x for name, x in given.items() if x is not None}
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    body = json.dumps({"text": text}) if body is None else body
    connection.request("POST", parts.path + path, body=body, headers=named)
    try:
        return Reply(connection.getresponse())
    finally:
        connection.close()


def about(address, query=""):
    return json.loads(ask(address, f"data/about{query}").body)


def softmax(model, text, query):
    """``[(token, probability), …]`` after a query, likeliest first, in float64."""
    ids = model.tokenizer.encode(text, bos=True)
    logits = model.logits(model.hidden(ids)[query]).astype(float)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")[:10]
    return list(zip(model.tokenizer.tokens(order.tolist()), shares[order], strict=True))


def test_a_text_is_read_and_answered_like_a_recording(type_in, model):
    address = type_in()
    assert about(address)["recordings"] == []
    found = json.loads(send(address).body)
    typed, (facts,) = found["typed"], found["recordings"]
    assert (typed["text"], typed["next"], typed["characters"]) == (TEXT, True, MAX_CHARACTERS)
    recording = model.record(TEXT)
    assert (facts["name"], facts["model"], facts["tokens"]) == (TEXT, "tiny", len(recording.tokens))
    expected = Answers([recording]).answer("row", "layer=1&head=2&query=5")
    row = ask(address, f"data/row?layer=1&head=2&query=5&reading={typed['reading']}")
    assert row.body == expected.body
    assert about(address, f"?reading={typed['reading']}") == found


def test_the_text_that_it_opens_with_is_read_before(type_in):
    address = type_in(TEXT)
    first = about(address)
    assert first["typed"]["text"] == TEXT
    send(address, "import sys")
    assert about(address) == first


@pytest.mark.parametrize("query", [0, 3])
def test_next_tokens_are_the_softmax_of_the_logits(type_in, model, query):
    address = type_in(TEXT)
    found = json.loads(ask(address, f"data/next?query={query}").body)["next"]
    expected = softmax(model, TEXT, query)
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert np.allclose([p for _, p in found], [p for _, p in expected], rtol=1e-5)
    assert ask(address, "data/next?query=99").status == 400


def test_a_model_that_predicts_nothing_says_so(type_in, model):
    address = type_in(TEXT, lambda text, _: Read(model.record(text), None))
    assert not about(address)["typed"]["next"]
    found = ask(address, "data/next?query=1")
    assert (found.status, found.sentence) == (400, "this model predicts no next token.")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": None},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://{}"},
        {"Origin": None, "Sec_Fetch_Site": "cross-site"},
        {"Origin": None, "Sec_Fetch_Site": "same-site"},
        {"Origin": None, "Sec_Fetch_Site": "none"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Origin": "null", "Sec_Fetch_Site": "same-origin"},
        {"Origin": "http://evil.example", "Sec_Fetch_Site": "same-origin"},
    ],
)
def test_no_other_page_may_send_a_text(type_in, headers):
    address = type_in()
    host = urlsplit(address).netloc
    given = {name: value and value.format(host) for name, value in headers.items()}
    found = send(address, **given)
    assert (found.status, found.sentence) == (
        403,
        "A text is taken from this viewer's own page alone.\n",
    )
    assert send(address, Sec_Fetch_Site="same-origin").status == 200
    assert send(address, Origin=None, Sec_Fetch_Site="same-origin").status == 200


def test_who_does_not_know_the_token_can_send_nothing(type_in):
    address = type_in()
    token = urlsplit(address).path.strip("/")
    for wrong in ("", f"{token[:-1]}/", f"{token}x/"):
        elsewhere = address.replace(f"{token}/", wrong)
        assert send(elsewhere).status == 405
    assert send(address, Host="evil.example").status == 403
    assert about(address)["recordings"] == []


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"]
)
def test_a_text_comes_as_json_alone(type_in, kind):
    # A form or a plain text is what another page could send without asking first.
    found = send(type_in(), Content_Type=kind, **{"Content-Type": None})
    assert (found.status, found.sentence) == (415, "A text is taken as application/json alone.\n")


def test_texts_are_sent_to_one_place_alone(type_in, recording):
    address = type_in()
    asked = ask(address, "data/read")
    assert (asked.status, asked.headers["Allow"]) == (405, "POST")
    for path in ("data/about", "", "data/reads"):
        assert send(address, path=path).status == 405
    with Viewer([recording]) as viewer:
        assert send(viewer.address).status == 405


@pytest.mark.parametrize(
    ("text", "status", "sentence"),
    [
        ("", 400, "The text is empty; at least one letter or sign is needed."),
        (" \n\t", 400, "The text is empty; at least one letter or sign is needed."),
        ("cat\ud800", 400, "Character 4 is half of a surrogate pair, which stands for nothing;"),
        ("ä" * (MAX_CHARACTERS + 1), 413, "The text has 2,001 characters; the page reads at most"),
        ("ä" * 10 * MAX_CHARACTERS, 413, "The text has too many characters; the page reads at"),
        (7, 400, 'The body is not {"text": "…"} in JSON.'),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_with_the_reason(type_in, text, status, sentence):
    found = send(type_in(), text)
    assert found.status == status
    assert found.sentence.startswith(sentence)
    if status == 413:
        assert "regard view FILE" in found.sentence


@pytest.mark.parametrize("body", ["", "{", "[]", '"text"', "{}", "[" * 9999, b"\xff\xfe"])
def test_a_body_of_another_form_is_refused(type_in, body):
    assert send(type_in(), body=body).status == 400


def test_the_longest_text_that_is_told_is_read(type_in):
    assert send(type_in(), "😀" * MAX_CHARACTERS).status == 200


def test_a_body_that_does_not_come_is_not_waited_for(type_in, monkeypatch):
    monkeypatch.setattr(_server, "REQUEST_TIMEOUT_S", 0.1)
    parts = urlsplit(type_in())
    head = (
        f"POST {parts.path}data/read HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Origin: http://{parts.netloc}\r\nContent-Type: application/json\r\n"
        "Content-Length: 99\r\n\r\n{"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(99).startswith(b"HTTP/1.1 408 ")


def test_an_error_of_the_model_is_said_and_survived(type_in, model, capsys):
    read = _readings.reader_of(model)

    def fails(text, go_on):
        if text == "fail":
            raise RuntimeError("out of order")
        if text == "refuse":
            raise ValueError("The text has 9 tokens;\n  8 at most.")
        return read(text, go_on)

    address = type_in(reader=fails)
    found = send(address, "fail")
    assert (found.status, found.sentence) == (500, "RuntimeError: out of order")
    assert "out of order" in capsys.readouterr().err
    found = send(address, "refuse")
    assert (found.status, found.sentence) == (400, "The text has 9 tokens; 8 at most.")
    assert send(address).status == 200


def test_one_text_is_read_at_a_time_and_a_later_one_ends_it(model):
    begun, at_once, most = threading.Semaphore(0), [], []
    read, go = _readings.reader_of(model), threading.Event()

    def slowly(text, go_on):
        at_once.append(text)
        most.append(len(at_once))
        begun.release()
        try:
            if text == "first":
                assert go.wait(30)
            return read(text, go_on)
        finally:
            at_once.remove(text)

    readings, found = Readings(slowly), {}
    with Viewer((), None, 0, readings) as viewer:

        def client(text):
            found[text] = send(viewer.address, text)

        threads = [threading.Thread(target=client, args=(text,)) for text in ("first", "second")]
        threads[0].start()
        assert begun.acquire(timeout=30)
        threads[1].start()
        assert settles(lambda: readings._latest == 2)
        go.set()
        for thread in threads:
            thread.join()
    assert found["first"].status == 409
    assert found["first"].sentence.startswith("A later text was typed")
    assert json.loads(found["second"].body)["typed"]["text"] == "second"
    assert most == [1, 1]


def test_the_model_ends_between_its_layers(model, monkeypatch):
    computed, attention = [], language_model.attention
    monkeypatch.setattr(
        language_model, "attention", lambda *a, **b: computed.append(1) or attention(*a, **b)
    )
    calls = []

    def go_on():
        calls.append(1)
        if len(calls) == 2:
            raise SupersededError

    with pytest.raises(SupersededError):
        _readings.reader_of(model)(TEXT, go_on)
    assert len(model.config.layers) == 2
    assert len(computed) == 1


def test_texts_of_many_pages_do_not_mix(type_in, model):
    address = type_in()
    texts = [f"import os{n}" for n in range(MAX_KEPT)]
    ids = [json.loads(send(address, text).body)["typed"]["reading"] for text in texts]
    rows = all_at_once(
        4 * MAX_KEPT,
        lambda n: ask(address, f"data/row?layer=1&head=0&query=4&reading={ids[n % MAX_KEPT]}"),
    )
    for n, row in enumerate(rows):
        recording = model.record(texts[n % MAX_KEPT])
        assert row.body == Answers([recording]).answer("row", "layer=1&head=0&query=4").body


def test_a_text_that_is_no_longer_kept_is_not_answered_with_another(type_in):
    address = type_in()
    old = json.loads(send(address).body)["typed"]["reading"]
    assert ask(address, "data/row?layer=0&head=0&query=1").status == 400
    for n in range(MAX_KEPT):
        send(address, f"import {n}")
    found = ask(address, f"data/row?layer=0&head=0&query=1&reading={old}")
    assert (found.status, found.sentence) == (
        410,
        "This text is no longer kept: press Enter in the input to read it again.",
    )
    assert json.loads(send(address).body)["typed"]["reading"] == old
    assert ask(address, "data/about?reading=another").status == 410


def test_a_language_model_opens_a_page_that_it_reads_texts_of(model, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    with model.view() as viewer:
        assert opened == [viewer.address]
        assert about(viewer.address)["recordings"] == []
        assert send(viewer.address).status == 200
    with model.view(TEXT, open_browser=False) as viewer:
        assert about(viewer.address)["typed"]["text"] == TEXT
    assert len(opened) == 1
    with pytest.raises(ValueError, match=r"record\(text\).view\(\) shows it"):
        model.view("a" * (MAX_CHARACTERS + 1))
    with pytest.raises(TypeError, match="view: the text is of type int; a str is needed"):
        model.view(3)


# In the browser.


def type_text(page, text):
    page.locator("textarea").fill(text)


def is_read(page, text):
    """Waits until a text is shown: in the panels, and by its next tokens."""
    page.wait_for_selector(READ)
    page.wait_for_function(
        "(text) => [...document.querySelectorAll('.regard-stage')].length === 1"
        " && document.querySelector('.regard-tokens')?.textContent === `<bos>${text}`",
        arg=text.replace("\n", "⏎\n"),
    )
    page.wait_for_selector(".regard-map[data-idle=true]")


def shown_next(page):
    """``[(token, per cent), …]`` as the page shows them."""
    rows = page.locator(".regard-next-bars li").evaluate_all(
        "rows => rows.map(row => [row.firstChild.textContent, row.lastChild.textContent,"
        " row.children[1].getBoundingClientRect().width])"
    )
    return [(token, float(share.removesuffix(" %")), width) for token, share, width in rows]


def pixels(page):
    return page.evaluate("() => document.querySelector('.regard-map-cells').toDataURL()")


def test_what_is_typed_is_shown(type_in, model, open_page):
    page = open_page(type_in())
    page.wait_for_selector(".regard-empty")
    page.locator("textarea").press_sequentially("import os")
    is_read(page, "import os")
    before = pixels(page)
    page.locator("textarea").press_sequentially(", sys")
    is_read(page, "import os, sys")
    assert pixels(page) != before
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    asked = [url for url in page.requests if "/data/" in url]
    named = re.compile(r"reading=[0-9a-f]{16}|/data/(read|about)\?*$")
    assert all(named.search(url) for url in asked)


def test_next_tokens_of_the_chosen_query_are_shown(type_in, model, open_page):
    page = open_page(f"{type_in(TEXT)}#L1H2")
    is_read(page, TEXT)
    last = len(model.record(TEXT).tokens) - 1
    for query in (last, 3):
        if query != last:
            page.evaluate("(query) => { location.hash = `L1H2&query=${query}&key=0`; }", query)
        page.wait_for_selector(f".regard-next[data-shown='query {query}']")
        found, expected = shown_next(page), softmax(model, TEXT, query)
        assert len(found) == 10
        for (token, share, _), (wanted, p) in zip(found, expected, strict=True):
            assert token.replace("·", " ") == re.sub(
                r"[\0-\x08\x0b-\x1f]",
                lambda sign: chr(0x2400 + ord(sign[0])),
                wanted.replace("\n", "⏎").replace("\t", "⇥"),
            )
            assert share == pytest.approx(100 * p, abs=0.0051)  # two decimals
        widths = [width for *_, width in found]
        assert widths == sorted(widths, reverse=True)
        title = page.locator(".regard-next h2").text_content()
        assert title.startswith(f"Next token · after {query} ")


def test_a_telephone_has_room_for_the_text_above_its_next_tokens(type_in, open_page):
    page = open_page(f"{type_in(TEXT)}#L1H2", size=(390, 844))
    is_read(page, TEXT)
    page.wait_for_selector(".regard-next-share")
    for part in ("page", "body"):  # a line of the text, and a bar
        assert page.locator(f".regard-text-{part}").evaluate("n => n.clientHeight") >= 28


def test_an_input_that_was_emptied_stays_empty(type_in, open_page):
    page = open_page(type_in("import os"))
    is_read(page, "import os")
    page.locator("textarea").fill("")
    page.wait_for_selector(".regard-empty")
    page.reload()
    page.wait_for_selector(".regard-empty")
    assert page.locator("textarea").input_value() == ""
    page.locator("textarea").press_sequentially("import os")
    is_read(page, "import os")
    assert "text=" not in address_of(page)


def test_enter_reads_at_once(type_in, open_page):
    page = open_page(type_in())
    page.evaluate(
        "() => { const real = setTimeout;"
        " window.setTimeout = (f, ms) => (ms === 200 ? 0 : real(f, ms)); }"
    )
    page.locator("textarea").press_sequentially("import os")
    page.wait_for_timeout(400)
    assert page.locator(".regard-empty").is_visible()
    page.locator("textarea").press("Shift+Enter")
    assert page.locator("textarea").input_value() == "import os\n"
    page.locator("textarea").press("Enter")
    page.wait_for_selector(READ)
    assert page.locator("textarea").input_value() == "import os\n"


def test_the_address_has_the_text(type_in, open_page):
    text = "os & sys = 100% #1\nimport +%20"
    page = open_page(type_in("import os"))
    is_read(page, "import os")
    assert "text=" not in address_of(page)
    type_text(page, text)
    page.wait_for_function("() => location.hash.includes('text=')")
    is_read(page, text)
    page.reload()
    is_read(page, text)
    assert page.locator("textarea").input_value() == text


def test_back_reads_the_text_of_that_time(type_in, open_page):
    page = open_page(f"{type_in('import os')}#L0H1")
    is_read(page, "import os")
    page.locator("main").click()
    page.keyboard.press("]")  # a choice that Back undoes
    page.wait_for_function("() => location.hash.startsWith('#L0H2')")
    type_text(page, "import sys")
    is_read(page, "import sys")
    page.go_back()
    is_read(page, "import os")
    assert page.locator("textarea").input_value() == "import os"
    assert address_of(page).endswith("#L0H1") or "#L0H1&" in address_of(page)


def test_a_head_that_was_chosen_stays_and_another_follows_the_text(type_in, model, open_page):
    page = open_page(type_in())
    told = [model.record(text).heads().telling() for text in ("sys sys", TEXT)]
    type_text(page, "sys sys")
    is_read(page, "sys sys")
    assert f"#L{told[0].layer}H{told[0].head}&" in address_of(page)
    type_text(page, TEXT)
    is_read(page, TEXT)
    assert f"#L{told[1].layer}H{told[1].head}&" in address_of(page)
    other = next(
        (n, h)
        for n in (0, 1)
        for h in range(4)
        if (n, h) not in [(one.layer, one.head) for one in told]
    )
    page.evaluate("([n, h]) => { location.hash = `L${n}H${h}&text=a%20sys`; }", other)
    is_read(page, "a sys")
    type_text(page, "sys sys")
    is_read(page, "sys sys")
    assert "#L{}H{}&".format(*other) in address_of(page)


HOLD = """() => {
  const real = setTimeout;
  window.setTimeout = (f, ms) => real(f, ms === 200 ? 1e6 : ms);
}"""


@pytest.mark.parametrize("text", ["import sys", ""])
def test_a_setting_changed_just_before_a_text_is_typed_stays(type_in, open_page, text):
    page = open_page(type_in(TEXT), shared=False)
    is_read(page, TEXT)
    page.evaluate(HOLD)  # what is held back for 200 ms would come late
    page.get_by_role("button", name="share").click()
    assert "plane=mass" not in address_of(page)
    type_text(page, text)
    page.locator("textarea").press("Enter")
    is_read(page, text) if text else page.wait_for_selector(".regard-empty")
    assert "plane=mass" in address_of(page)
    type_text(page, "import os")
    page.locator("textarea").press("Enter")
    is_read(page, "import os")
    pressed = page.get_by_role("button", name="share").get_attribute("aria-pressed")
    assert pressed == "true"


def test_a_setting_changed_just_before_back_leaves_the_address_of_that_time(type_in, open_page):
    page = open_page(type_in(TEXT), shared=False)
    is_read(page, TEXT)
    page.locator("main").click()
    page.keyboard.press("]")
    type_text(page, "import sys")
    is_read(page, "import sys")
    page.evaluate(HOLD)
    page.get_by_role("button", name="share").click()
    page.go_back()
    is_read(page, TEXT)
    assert "plane=mass" not in address_of(page)


def test_the_empty_page_offers_texts_to_try(type_in, open_page):
    page = open_page(type_in(TEXT))
    is_read(page, TEXT)
    for nothing in ("", " \n "):
        type_text(page, nothing)
        page.wait_for_selector(".regard-empty")
        assert page.locator(".regard-stage").count() == 0
    type_text(page, "import sys")
    is_read(page, "import sys")
    type_text(page, "")
    page.wait_for_selector(".regard-empty")
    assert address_of(page).endswith("&text=")
    offered = page.locator(".regard-empty button").first.text_content()
    page.locator(".regard-empty button").first.click()
    is_read(page, offered)
    assert page.locator("textarea").input_value() == offered


def test_an_example_that_is_clicked_while_a_letter_waits_is_read_once(type_in, open_page):
    page = open_page(type_in())
    page.wait_for_selector(".regard-empty")
    offered = page.evaluate(
        "() => {"
        " const area = document.querySelector('textarea');"
        " area.value = 'x';"
        " area.dispatchEvent(new Event('input'));"
        " const example = document.querySelector('.regard-empty button');"
        " example.click();"
        " return example.textContent; }"
    )
    is_read(page, offered)
    page.wait_for_timeout(400)  # twice what a letter waits
    is_read(page, offered)
    assert len([url for url in page.requests if "/data/read" in url]) == 1


def status(page):
    page.wait_for_selector(FAILED)
    return page.locator(".regard-typing-status").text_content()


def test_a_text_that_cannot_be_read_is_said_and_the_one_before_is_grey(type_in, model, open_page):
    read = _readings.reader_of(model)

    def reader(text, go_on):
        if text == "fail":
            raise RuntimeError("out of order")
        return read(text, go_on)

    page = open_page(type_in(reader=reader))
    type_text(page, "ä" * (MAX_CHARACTERS + 1))
    assert status(page) == (
        "The text has 2,001 characters; the page reads at most 2,000. Save it as a file, and open"
        " that with regard view FILE."
    )
    type_text(page, TEXT)
    is_read(page, TEXT)
    type_text(page, "fail")
    assert status(page) == "RuntimeError: out of order. Below is the text before."
    grey = "() => getComputedStyle(document.querySelector('.regard-stage')).filter"
    assert page.evaluate(grey) == "grayscale(1)"
    page.locator("textarea").evaluate(
        "(area) => { area.value = 'x\\ud800'; area.dispatchEvent(new Event('input')); }"
    )
    page.wait_for_function(
        "() => /Character 2 is half/.test("
        "document.querySelector('.regard-typing-status').textContent)"
    )
    type_text(page, "import sys")
    is_read(page, "import sys")
    assert page.evaluate(grey) == "none"
    assert len(page.complaints) == 2  # the browser's own, of status 500 and 400
    page.complaints.clear()


def test_a_page_whose_text_is_no_longer_kept_says_so_and_reads_it_again(type_in, open_page):
    address = type_in()
    page = open_page(address)
    type_text(page, TEXT)
    is_read(page, TEXT)
    for n in range(MAX_KEPT):  # in other windows
        send(address, f"import {n}")
    page.locator("main").click()
    page.keyboard.press("}")
    page.keyboard.press("]")
    banner = page.locator(".regard-banner")
    banner.wait_for()
    assert "This text is no longer kept: press Enter in the input" in banner.text_content()
    page.keyboard.press("ArrowUp")
    is_said(page, "^not read ")
    page.wait_for_selector(".regard-next >> text=not read")
    assert page.locator(".regard-next").inner_text() == "Next token\nnot read"
    page.evaluate("() => { document.querySelector('.regard-stage').dataset.before = 1; }")
    page.locator("textarea").press("Enter")
    page.wait_for_selector(".regard-stage:not([data-before])")
    is_read(page, TEXT)
    assert not banner.is_visible()
    assert page.complaints
    assert all("410" in text for text in page.complaints)
    page.complaints.clear()


def test_a_server_that_has_ended_is_said(model, open_page):
    with Viewer((), None, 0, Readings(_readings.reader_of(model), TEXT)) as viewer:
        page = open_page(viewer.address)
        is_read(page, TEXT)
    type_text(page, "import sys")
    assert status(page).startswith("The server has ended: run regard view again.")
    page.complaints.clear()


def test_another_page_in_the_browser_can_send_nothing(model, open_page, empty_page):
    read = []
    with Viewer((), None, 0, Readings(lambda text, _: read.append(text))) as viewer:
        address = viewer.address
        page = open_page(empty_page, shared=False)
        tries = [
            {
                "method": "POST",
                "mode": mode,
                "body": '{"text": "evil"}',
                "headers": {"Content-Type": x},
            }
            for mode in ("cors", "no-cors")
            for x in ("application/json", "text/plain")
        ]
        for options in tries:
            page.evaluate(
                "([url, options]) => fetch(url, options).catch(() => {})",
                [f"{address}data/read", options],
            )
        assert read == []
        page.complaints.clear()
        page.requests.clear()


def test_the_input_is_not_where_no_model_is(serve, recording, open_page):
    page = open_page(serve(recording))
    page.wait_for_selector(".regard-map[data-idle=true]")
    assert page.locator("textarea").count() == 0
    for entry in ("offline", "notebook"):
        assert "makeInput" not in bundle(entry)


def test_the_next_token_is_left_out_where_the_model_predicts_none(type_in, recording, open_page):
    address = type_in("anything", lambda text, _: Read(recording, None))
    page = open_page(f"{address}#L0H0")
    page.wait_for_selector(".regard-map[data-idle=true]")
    assert page.locator(".regard-next").count() == 0


def telling(model, text):
    """``L1H2``, the head that tells most of a text."""
    found = model.record(text).heads().telling()
    return f"L{found.layer}H{found.head}"


TELLING = ["sys sys", TEXT, "a sys", "import os", "for for", "os os os os", "x = 1", "a, b, c"]


def test_a_text_that_was_typed_over_leaves_the_others_their_heads(type_in, model, open_page):
    heads = {text: telling(model, text) for text in TELLING}
    first, over, second = next(
        texts
        for texts in itertools.permutations(TELLING, 3)
        if len({heads[text] for text in texts}) == 3
    )
    page = open_page(type_in())
    type_text(page, first)
    is_read(page, first)
    with held(page, "/data/roles"):
        type_text(page, over)
        page.wait_for_timeout(700)
        type_text(page, first)
        page.wait_for_timeout(700)
    is_read(page, first)
    page.wait_for_timeout(200)
    type_text(page, second)
    is_read(page, second)
    assert f"#{heads[second]}&" in address_of(page)


def test_a_head_that_is_chosen_while_a_text_is_read_stays(type_in, model, open_page):
    first, second = "sys sys", TEXT
    other = next(
        name
        for name in ("L0H0", "L0H1", "L0H2")
        if name not in (telling(model, first), telling(model, second))
    )
    page = open_page(type_in())
    type_text(page, first)
    is_read(page, first)
    with held(page, "/data/roles"):
        type_text(page, second)
        page.wait_for_timeout(700)
        page.get_by_role("banner").get_by_label("layer").select_option("0")
        page.get_by_role("banner").get_by_label("head").select_option(other[-1])
        assert f"#{other}&" in address_of(page)
    is_read(page, second)
    assert f"#{other}&" in address_of(page)
