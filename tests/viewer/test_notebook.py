"""A recording and weights show themselves in a notebook, with anywidget and without."""

import base64
import json
import subprocess
import sys
from types import SimpleNamespace
from urllib.parse import urlencode

import numpy as np
import pytest
import torch

import regard
from regard.recording import Layer, Recording
from regard.viewer import _display
from regard.viewer.answer import Answers

WIDGET = "application/vnd.jupyter.widget-view+json"


def recording(tokens=5, **options):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, tokens, 4)).astype(np.float32)
    return Recording([f"<x-token>{n}" for n in range(tokens)], [Layer(q, k, v, **options)])


@pytest.fixture
def kernel(monkeypatch):
    """As in a notebook: IPython with a kernel."""
    pytest.importorskip("regard.viewer.notebook", reason="anywidget is not installed")
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


class Line:
    """The line between a widget and its page, from the page's side."""

    def __init__(self, widget):
        self.sent, self.comm_id = [], "here"
        widget.comm = self

    def send(self, data=None, metadata=None, buffers=None):
        self.sent.append((data["content"], buffers))

    def on_msg(self, receive):
        self.receive = receive

    def close(self, *_, **__):
        pass

    def ask(self, **content):
        message = {"content": {"data": {"method": "custom", "content": content}}, "buffers": []}
        self.receive(message)
        return self.sent.pop() if self.sent else None


@pytest.fixture
def widget(kernel):
    from regard.viewer.notebook import RecordingWidget

    made = RecordingWidget(recording(causal=True), names=["a story"])
    yield made
    made.close()


def test_the_kernel_answers_the_page_as_the_server_does(widget):
    line, answers = Line(widget), Answers([recording(causal=True)], ["a story"])
    requests = {
        "about": {},
        "tokens": {"side": "key"},
        "tile": {"layer": 0, "head": 1, "plane": "max", "level": 0, "row": 0, "column": 0},
        "row": {"layer": 0, "head": 1, "query": 3},
    }
    for number, (path, parameters) in enumerate(requests.items()):
        content, buffers = line.ask(id=f"q{number}", path=path, parameters=parameters)
        expected = answers.answer(path, urlencode(parameters))
        assert content == {"id": f"q{number}", "coverage": 1.0}
        assert bytes(buffers[0]) == expected.body


def test_parameters_that_are_null_are_left_out(widget):
    content, buffers = Line(widget).ask(
        id="1", path="tokens", parameters={"side": "query", "recording": None}
    )
    assert content["coverage"] == 1.0
    assert json.loads(bytes(buffers[0])) == [f"<x-token>{n}" for n in range(5)]


def test_a_bad_request_gets_a_sentence_and_no_numbers(widget):
    line = Line(widget)
    wrong = [
        ("row", {"layer": 7, "head": 0, "query": 0}),
        ("nothing", {}),
        ("row", None),
        (["row"], "layer=0"),
    ]
    for path, parameters in wrong:
        content, buffers = line.ask(id=1, path=path, parameters=parameters)
        assert content["id"] == 1
        assert content["error"].endswith(".")
        assert not buffers


def test_what_is_no_request_is_left_alone(widget):
    line = Line(widget)
    assert line.ask(kind="anywidget-command", id="1") is None
    assert line.ask() is None


def test_a_failure_is_told_to_the_page_too(widget, monkeypatch):
    line = Line(widget)
    monkeypatch.setattr(widget._answers, "answer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        widget._answer(widget, {"id": 3, "path": "about", "parameters": {}}, [])
    (content, _), *_ = line.sent
    assert content == {"id": 3, "error": "ZeroDivisionError: division by zero"}


def test_an_interrupt_is_told_to_the_page(widget, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    line = Line(widget)
    monkeypatch.setattr(widget._answers, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        widget._answer(widget, {"id": 3, "path": "about", "parameters": {}}, [])
    (content, _), *_ = line.sent
    assert content["id"] == 3
    assert content["error"] == (
        "The notebook's kernel was interrupted while it computed this: try again."
    )


NOTEBOOK = """
const heard = [];
const model = {
  on: (_, listener) => heard.push(listener),
  off: (_, listener) => heard.splice(heard.indexOf(listener), 1),
  async send(content) {
    const [answer, text] = JSON.parse(await window.kernel(JSON.stringify(content)));
    const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
    for (const listener of heard) listener(answer, [new DataView(bytes.buffer)]);
  },
};
const el = document.getElementById("cell");
let end;
window.show = async () => { end = await widget.render({ model, el }); };
await window.show();
window.ended = () => { end(); return heard.length; };
"""


def test_the_page_in_a_notebook_shows_what_the_kernel_answers(widget, open_page, tmp_path):
    line = Line(widget)

    def kernel(text):
        content, buffers = line.ask(**json.loads(text))
        return json.dumps([content, base64.b64encode(b"".join(buffers or [])).decode()])

    module = widget._esm.replace("export default", "const widget =")
    path = tmp_path / "notebook.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,><style>{widget._css}"
        "</style><p>before</p><div id=cell></div>"
    )
    page = open_page(path.as_uri(), shared=False)
    page.expose_function("kernel", kernel)
    page.add_script_tag(content=module + NOTEBOOK, type="module")
    page.wait_for_selector("#cell .regard-frame")
    page.wait_for_timeout(300)
    assert "a story" in page.inner_text("#cell")
    assert page.evaluate("location.hash") == ""
    assert page.evaluate("document.querySelectorAll('x-token').length") == 0
    assert page.evaluate("ended()") == 0


@pytest.fixture
def in_notebook(widget, open_page, tmp_path):
    """The page in a cell whose kernel is there until ``window.state`` is "closed" or "silent"."""
    line = Line(widget)

    def kernel(text):
        content, buffers = line.ask(**json.loads(text))
        return json.dumps([content, base64.b64encode(b"".join(buffers or [])).decode()])

    path = tmp_path / "notebook.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,><style>{widget._css}"
        "</style><div id=cell></div>"
    )
    page = open_page(path.as_uri(), shared=False)
    page.expose_function("kernel", kernel)
    page.clock.install()
    module = widget._esm.replace("export default", "const widget =")
    model = NOTEBOOK.replace(
        "async send(content) {",
        """send(content) {
    window.sent = (window.sent ?? 0) + 1;
    if (window.state === "closed") throw new Error("Cannot send");
    if (window.state !== "silent") this.respond(content);
  },
  async respond(content) {""",
    )
    page.add_script_tag(content=module + model, type="module")
    page.wait_for_selector("#cell .regard-map[data-idle=true]")
    return page


def test_a_kernel_that_was_restarted_is_said_with_the_way_out(in_notebook):
    page = in_notebook
    page.evaluate("window.state = 'closed'")
    page.get_by_role("button", name="Steps").click()
    page.get_by_role("alert").wait_for()
    assert "The notebook's kernel has ended or was restarted: run this cell again." in (
        page.get_by_role("alert").inner_text()
    )


def test_a_page_that_was_tried_again_ends_with_its_widget(in_notebook):
    page = in_notebook
    page.evaluate("() => { ended(); document.getElementById('cell').replaceChildren(); }")
    page.evaluate("() => { window.state = 'closed'; show(); }")
    page.get_by_role("alert").wait_for()
    page.evaluate("window.state = 'there'")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("#cell .regard-map[data-idle=true]")
    page.evaluate("() => { ended(); window.sent = 0; }")
    page.locator(".regard-head").nth(1).click()
    page.locator(".regard-map-stage").press("ArrowUp")
    page.wait_for_timeout(500)
    assert page.evaluate("window.sent") == 0


def test_a_kernel_that_does_not_respond_is_said_until_it_does(in_notebook):
    page, told = in_notebook, in_notebook.get_by_text("has not responded for 10 seconds")
    assert told.is_hidden()
    page.clock.fast_forward(60_000)
    assert told.is_hidden()  # nothing was asked
    page.evaluate("window.state = 'silent'")
    page.get_by_role("button", name="Steps").click()
    page.clock.run_for(4_000)  # time goes on besides
    assert told.is_hidden()
    page.clock.run_for(7_000)
    assert told.is_visible()
    assert "run this cell again" in told.inner_text()
    page.evaluate("window.state = 'there'")
    for n in (0, 1):
        page.locator(".regard-head").nth(n).click()
    told.wait_for(state="hidden")


def test_in_a_kernel_a_recording_shows_the_viewer_and_a_picture_for_elsewhere(kernel):
    shown = recording()._repr_mimebundle_()
    assert shown.keys() == {"text/plain", "text/html", WIDGET}
    assert shown["text/plain"] == "Recording(5 tokens, 1 layer, 2 heads, 480 B)"
    assert shown["text/html"].count("<img") == 2
    assert "<x-token>" not in shown["text/html"]


@pytest.mark.parametrize(
    ("shape", "heads"), [((7, 3), 1), ((2, 7, 3), 2), ((4, 2, 7, 3), 2), ((5, 4, 2, 7, 3), None)]
)
def test_weights_of_up_to_one_batch_axis_show_the_viewer(kernel, shape, heads):
    q, k = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    weights = regard.AttentionWeights(q, k, causal=True)
    shown = weights._repr_mimebundle_()
    assert shown["text/plain"] == repr(weights)
    assert (WIDGET in shown) == (heads is not None)
    if heads is not None:
        assert _display.recording_of(weights).layers[0].heads == heads


SPOKEN = ["The", " tired", " cat", " sle", "pt"]


def spoken(**options):
    q, k = np.random.default_rng(0).standard_normal((2, 4, 5, 3)).astype(np.float32)
    layers = [Layer(q[:2], k[:2], number=3), Layer(q, k, name="own", number=7, **options)]
    return Recording(SPOKEN, layers, model="a model")


@pytest.mark.parametrize(
    ("part", "heads", "queries"),
    [
        (lambda weights: weights, (0, 1, 2, 3), SPOKEN),
        (lambda weights: weights.head(2), (2,), SPOKEN),
        (lambda weights: weights.head(2).copy(), (2,), SPOKEN),
        (lambda weights: weights.matrix(1), (1,), SPOKEN),
        (lambda weights: weights.part(slice(1, 4)).head(-1).part(slice(1, 3)), (3,), SPOKEN[2:4]),
    ],
)
def test_weights_of_a_recording_keep_their_layer_their_heads_and_their_tokens(part, heads, queries):
    weights = part(spoken(causal=True).weights[7])
    made = _display.recording_of(weights)
    assert (made.layer_numbers, made.layers[0].name, made.model) == ((7,), "own", "a model")
    assert made.layers[0].head_numbers == heads
    assert (made.tokens, made.query_tokens) == (tuple(SPOKEN), tuple(queries))
    whole = np.asarray(made.weights[7])
    np.testing.assert_array_equal(whole.reshape(weights.shape), np.asarray(weights))


def test_weights_of_words_are_shown_by_words(kernel):
    words = spoken(causal=True).in_words()
    for weights in (words.weights[7], words.weights[7].head(2)):
        made = _display.recording_of_words(weights)
        assert made.tokens == made.query_tokens == ("The", " tired", " cat", " slept")
        assert made.layer_numbers == (7,)
        assert made.layers[0].head_numbers == weights.head_numbers
        assert made.layers[0].options["causal"]
        np.testing.assert_allclose(
            np.asarray(made.weights[7]).reshape(weights.shape), np.asarray(weights), atol=1e-6
        )
        assert WIDGET in weights._repr_mimebundle_()


def test_a_notebook_without_its_kernel_has_pictures_of_a_widget_and_of_words(kernel, widget):
    from regard.viewer.notebook import RecordingWidget

    assert widget._repr_mimebundle_()[0]["text/html"].count("<img") == 2
    both = RecordingWidget(spoken(), other=recording())
    shown, _ = both._repr_mimebundle_(include=None, exclude=None)
    assert shown[WIDGET]["model_id"] == both.model_id
    assert shown["text/html"].count("<img") == 6 + 2
    words = spoken().in_words().weights[7]
    assert words._repr_mimebundle_()["text/html"].count("<img") == 4


def test_colab_is_told_where_the_page_of_a_widget_is_from(kernel, monkeypatch):
    told = {WIDGET: {"colab": {"custom_widget_manager": {"url": "https://here"}}}}
    monkeypatch.setattr("anywidget.widget.repr_mimebundle", lambda **_: ({}, told))
    weights = spoken().weights[7]
    for found in (recording(), weights, weights.head(2), spoken().in_words().weights[7]):
        data, metadata = found._repr_mimebundle_()
        assert data["text/plain"] == repr(found)
        assert metadata == told


def test_weights_of_very_many_words_are_a_text(kernel, monkeypatch):
    weights = spoken().in_words().weights[3]
    monkeypatch.setattr(_display, "MOST_OF_WORDS", weights.size - 1)
    assert weights._repr_mimebundle_() == {"text/plain": repr(weights)}


def test_words_of_a_layer_with_a_sink_show_what_is_left():
    recording = spoken(sinks=np.ones(4, np.float32))
    weights = recording.in_words().weights[7]
    shown = np.asarray(_display.recording_of_words(weights).weights[7])
    np.testing.assert_allclose(shown, np.asarray(weights), atol=1e-6)


OPTIONS = {
    "window": {"window": (2, 1)},
    "padding": {"key_lengths": np.array([6, 3]), "causal": True, "query_start": np.array([0, 1])},
    "segments": {"segments": np.arange(14).reshape(2, 7) // 3},
    "bias and mask": {
        "bias": np.random.default_rng(1).standard_normal((2, 1, 7, 7)).astype(np.float32),
        "mask": np.arange(49).reshape(7, 7) % 3 > 0,
        "sinks": np.float32([0.5, -1, 2, 0]),
        "scale": 0.3,
        "softcap": 5.0,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_weights_and_the_recording_made_of_them_are_the_same_numbers(options, library):
    q, k = np.random.default_rng(0).standard_normal((2, 2, 4, 7, 3)).astype(np.float32)
    arrays = {
        name: library(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    weights = regard.AttentionWeights(library(q), library(k[:, :2]), **arrays)
    made = _display.recording_of(weights)
    assert made.tokens == tuple("0123456")
    np.testing.assert_array_equal(np.asarray(made.weights[0]), np.asarray(weights)[0])


def test_queries_that_are_no_keys_have_positions_of_their_own():
    x = np.ones((9, 2))
    assert _display.recording_of(regard.AttentionWeights(x, x[:4])).query_tokens[-1] == "8"
    assert _display.recording_of(regard.AttentionWeights(x[:4], x)).query_tokens == tuple("5678")
    assert _display.recording_of(regard.AttentionWeights(x[:0], x)) is None


def test_outside_of_a_kernel_there_is_a_picture_and_no_widget(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert recording()._repr_mimebundle_().keys() == {"text/plain"}
    assert recording()._repr_html_().count("<img") == 2


def test_without_anywidget_there_is_a_picture_and_no_error(kernel, monkeypatch):
    monkeypatch.delitem(sys.modules, "regard.viewer.notebook", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    weights = recording().weights[0]
    assert recording()._repr_mimebundle_() == {"text/plain": repr(recording())}
    assert weights._repr_mimebundle_() == {"text/plain": repr(weights)}
    with pytest.raises(ModuleNotFoundError, match=r'pip install "regard\[jupyter\]"'):
        import regard.viewer.notebook  # noqa: F401


def test_a_picture_of_a_long_recording_is_of_some_of_its_queries():
    html = recording(5000, causal=True)._repr_html_()
    assert "L0H1, 1 of 3 queries" in html
    many = Recording(["a"], [Layer(*np.ones((2, 30, 1, 1), np.float32))])
    assert many._repr_html_().count("<img") == 24
    assert "and 6 more" in many._repr_html_()


def test_showing_nothing_loads_no_widget_and_no_server():
    code = (
        "import sys, numpy as np, regard\n"
        "from regard.recording import Layer, Recording\n"
        "x = np.ones((1, 2, 2))\n"
        "Recording(['a', 'b'], [Layer(x, x)])._repr_mimebundle_()\n"
        "found = {'anywidget', 'ipywidgets', 'IPython', 'uvicorn', 'starlette'} & {*sys.modules}\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
