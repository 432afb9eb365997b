"""``regard view``: one address, the page behind it, and an end when it is asked for."""

import contextlib
import http.client
import io
import json
import os
import shutil
import signal
import sys
import threading
import urllib.request
import warnings

import numpy as np
import pytest

from cli.conftest import start
from regard.cli import _view, main
from regard.cli._source import has_input
from regard.lm import LanguageModel
from regard.recording import Layer, Recording


class Served:
    """What ``regard view`` would have served."""

    def __init__(self, recordings, names, port, readings=None, corpus=None):
        first = [] if readings is None or readings.first is None else [readings.first]
        self.recordings = [x.recording for x in first] or recordings
        self.names = [x.names[0] for x in first] or names
        self.port, self.readings, self.corpus = port, readings, corpus
        self.address = "http://127.0.0.1:1/token/"

    def wait(self):
        raise KeyboardInterrupt

    def close(self):
        return True


@pytest.fixture
def served(monkeypatch):
    """The viewers that were made, and the addresses that were opened; each ends by Ctrl-C."""
    made, opened = [], []

    def viewer(*arguments):
        made.append(Served(*arguments))
        return made[-1]

    monkeypatch.setattr("regard.viewer._server.Viewer", viewer)
    monkeypatch.setattr("webbrowser.open", opened.append)
    return made, opened


@pytest.fixture
def running(request):
    """A viewer in a process of its own, as ``running(*arguments) -> (process, address)``."""
    processes = []

    def begin(*arguments):
        process = start("view", *arguments, "--no-open")
        processes.append(process)
        address = process.stdout.readline().decode().strip()
        return process, address.partition("#")[0]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def get(address, path):
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        return answer.read()


def test_it_serves_until_ctrl_c(running, planted_file):
    process, address = running(planted_file)
    facts = json.loads(get(address, "data/about"))["recordings"]
    assert [(found["name"], found["tokens"]) for found in facts] == [("planted.safetensors", 9)]
    assert b"<html" in get(address, "")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


def test_ctrl_c_ends_it_while_answers_are_under_way(running, tmp_path):
    path = tmp_path / "long.safetensors"
    q = np.random.default_rng(0).standard_normal((8, 12_000, 8)).astype(np.float32)
    Recording(["a"] * q.shape[1], [Layer(q, q, causal=True)]).save(path)
    process, address = running(path)

    def ask():
        with contextlib.suppress(OSError, http.client.HTTPException):  # broken off
            get(address, LONG)

    asking = threading.Thread(target=ask)
    asking.start()
    threading.Event().wait(0.3)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130
    asking.join()


LONG = "data/links?layer=0&head=0&n=9&rows=0-12000"


def test_the_address_is_all_that_is_printed_and_it_is_opened(regard, served, planted_file):
    made, opened = served
    result = regard("view", planted_file)
    assert (result.code, result.out, result.err) == (130, f"{made[0].address}#L0H2\n", "")
    assert opened == [f"{made[0].address}#L0H2"]


def test_no_open_opens_nothing(regard, served, planted_file):
    assert regard("view", planted_file, "--no-open").out == "http://127.0.0.1:1/token/#L0H2\n"
    assert served[1] == []


def test_it_opens_at_the_head_and_token_that_are_named(regard, served, planted_file):
    line = ["view", planted_file, "--head", 2, "--query", "a"]
    assert regard(*line).out == "http://127.0.0.1:1/token/#L0H2&query=5\n"
    assert served[1] == ["http://127.0.0.1:1/token/#L0H2&query=5"]
    assert regard(*line, "--words").out.endswith("#L0H2&query=5&unit=word\n")
    assert regard(*line, "--pieces").out.endswith("#L0H2&query=5&unit=token\n")


def test_a_text_is_read_by_the_model(regard, served, model):
    regard("view", "import os", "--model", model)
    (viewer,) = served[0]
    assert "".join(viewer.recordings[0].tokens[1:]) == "import os"
    assert viewer.names == ["import os"]


def test_standard_input_is_a_text(regard, served, model):
    regard("view", "-", "--model", model, stdin=b"import os")
    (viewer,) = served[0]
    assert "".join(viewer.recordings[0].tokens[1:]) == "import os"
    assert viewer.names == ["standard input"]


def test_without_a_text_the_page_has_an_input(regard, served, model):
    result = regard("view", "--model", model, "--port", 8123)
    assert (result.code, result.out) == (130, "http://127.0.0.1:1/token/\n")
    (viewer,) = served[0]
    assert viewer.readings.first is None
    assert viewer.port == 8123
    assert served[1] == [viewer.address]
    found = json.loads(viewer.readings.read(b'{"text": "import os"}').body)
    assert found["recordings"][0]["tokens"] == len(
        LanguageModel.load(model).record("import os").tokens
    )


def test_the_input_has_the_text_that_was_given(regard, served, model, tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("import sys\n")
    regard("view", "import os", "--model", model)
    regard("view", path, "--model", model)
    regard("view", "-", "--model", model, stdin=b"import re")
    texts = [(viewer.readings.first.text, viewer.names[0]) for viewer in served[0]]
    assert texts == [
        ("import os", "import os"), ("import sys\n", "story.txt"), ("import re", "standard input")
    ]  # fmt: skip


def test_no_input_where_it_could_not_hold_the_text_or_there_is_no_model(
    regard, served, model, planted_file
):
    regard("view", "import os\n" * 300, "--model", model)
    regard("view", "import os", "--with", "import sys", "--model", model)
    regard("view", planted_file)
    assert [viewer.readings for viewer in served[0]] == [None] * 3


def test_without_a_text_a_pipe_is_not_read(regard, served):
    process = start("view")
    out, err = process.communicate(b"import os", timeout=60)
    assert (process.returncode, out) == (2, b"")
    assert err == b"regard: Missing argument 'TEXT|FILE|-'.\n"


@pytest.mark.parametrize(
    "options", [["--layer", 1], ["--with", "a text"], ["--export", "a.html"], ["--text"]]
)
def test_options_that_need_a_text_are_refused_without_one(regard, served, options):
    result = regard("view", *options)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(
        "regard: without a text, only --model, --port, --survey and --no-open "
    )
    assert result.err.count("\n") == 1
    assert served == ([], [])


def test_an_unknown_model_is_refused_before_the_page_opens(regard, served, tmp_path):
    result = regard("view", "--model", tmp_path)
    assert result.code == 2
    assert "no language model there" in result.err
    assert served == ([], [])


def test_input_is_a_pipe_or_a_file_that_is_not_empty(monkeypatch, tmp_path):
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.touch()
    full.write_text("a text")
    read, write = os.pipe()
    main, terminal = os.openpty()
    descriptors = {
        read: True, terminal: False, os.open(os.devnull, os.O_RDONLY): False,
        os.open(empty, os.O_RDONLY): False, os.open(full, os.O_RDONLY): True,
    }  # fmt: skip
    for descriptor, expected in descriptors.items():
        with os.fdopen(descriptor) as file:
            monkeypatch.setattr("sys.stdin", file)
            assert has_input() == expected
        assert not has_input()  # it is closed
    monkeypatch.setattr("sys.stdin", None)
    assert not has_input()
    os.close(write)
    os.close(main)


def test_a_long_text_is_called_by_its_beginning(regard, served, model):
    regard("view", "import os\n" * 20, "--model", model)
    (name,) = served[0][0].names
    assert len(name) == 60
    assert name.startswith("import os import os")
    assert name.endswith("…")


def test_two_can_be_compared(regard, served, planted_file, model):
    regard("view", planted_file, "--with", "import", "--model", model, "--port", 8123)
    (viewer,) = served[0]
    assert [len(found.layers) for found in viewer.recordings] == [1, 2]
    assert viewer.names == ["planted.safetensors", "import"]
    assert viewer.port == 8123
    assert served[1][0].endswith("&compare=side")


def test_the_means_of_a_survey_are_shown_beside_the_heads_own(regard, served, model, tmp_path):
    from regard.survey import Survey

    (tmp_path / "a.txt").write_text("import os\n" * 30)
    survey = Survey(tmp_path / "heads", model=model, corpus=tmp_path / "a.txt")
    line = ["view", "import sys", "--model", model, "--no-open", "--survey"]
    none = regard(*line, survey.folder)
    assert none.code == 2
    assert none.err.endswith("heads: no document is in it yet; run it first.\n")
    survey.run(workers=1)
    assert regard(*line, survey.folder).code == 130
    (found,), _ = served
    entropy = survey.heads().mean("entropy")
    assert found.corpus[1, 3]["entropy"] == entropy[1, 3]
    told = json.loads(found.readings.first.answer("heads", "layer=1").body)
    assert told["corpus"]["entropy"][3] == pytest.approx(entropy[1, 3], abs=1e-6)
    for text in ["import sys"], []:
        none = regard("view", *text, "--model", model, "--survey", tmp_path)
        assert (none.code, "there is no survey" in none.err) == (2, True)
    pictured = regard(*line, survey.folder, "--export", tmp_path / "a.html")
    assert pictured.err.startswith("regard: --survey is of the page in the browser")


def test_a_survey_of_another_model_is_refused_or_said(regard, served, model, tmp_path):
    from regard.survey import Survey

    (tmp_path / "a.txt").write_text("import os\n" * 30)
    survey = Survey(tmp_path / "heads", model=model, corpus=tmp_path / "a.txt")
    survey.run(workers=1)
    other = regard("view", "import sys", "--no-open", "--survey", survey.folder)
    assert other.code == 2
    assert "has nothing of layer 0, head 4, which is shown. Give a survey of the same" in other.err
    alike = shutil.copytree(model, tmp_path / "alike")
    for text in ["import sys"], []:
        line = ["view", *text, "--model", alike, "--no-open", "--survey", survey.folder]
        assert f"are of {model}, and what is shown is of {alike}.\n" in regard(*line).out
    assert "and what is shown" not in regard(*line[:2], "--model", model, *line[-3:]).out


def test_an_explained_text_opens_with_its_effects(regard, served, model, tmp_path):
    regard("view", "import os", "--model", model, "--explain", -1)
    (viewer,) = served[0]
    assert viewer.readings is None
    (recording,) = viewer.recordings
    assert all(layer.gradient is not None for layer in recording.layers)
    assert served[1][0].endswith("&plane=effect")
    path = tmp_path / "page.html"
    assert regard("view", "import os", "--model", model, "--explain", 2, "--export", path).code == 0
    assert '"gradient":' in path.read_text(encoding="utf-8")


def test_a_position_that_nothing_predicts_is_refused(regard, served, model):
    result = regard("view", "import os", "--model", model, "--explain", 0)
    assert (result.code, served) == (2, ([], []))
    assert "explain is 0; a position from 1 to" in result.err


def test_a_stroke_may_be_a_text(regard, served, model):
    regard("view", "-", "--text", "--model", model)
    assert served[0][0].names == ["-"]


def test_standard_input_is_read_once(regard, served, model):
    result = regard("view", "-", "--with", "-", "--model", model, stdin=b"import os")
    assert result.code == 2
    assert "standard input can be read once" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", 1], "--layer 1: there is 1 layer, number 0."),
        (["--layer", -1], "--layer -1: there is 1 layer, number 0."),
        (["--head", 4], "--head 4: there are 4 heads, 0 to 3."),
        (["--query", "9"], "--query 9: the text has 9 tokens"),
        (["--query", "nothing"], "--query"),
        (["--port", 70000], "less than or equal to 65535"),
        (["--export", "a.html", "--head", 1], "leave them out with --export"),
        (["--export", "a.png", "--pieces"], "--words and --pieces tell how the browser opens"),
        (["--export", "a.html", "--layer", 1], "--layer 1: there is 1 layer, number 0."),
        (["--explain", -1], "--explain is of a text that is read now; a recording has the effects"),
        (["--explain", -1, "--export", "a.png"], "a figure has weights alone"),
        (["--with", "missing.safetensors"], "missing.safetensors: no such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(regard, served, planted_file, arguments, message):
    result = regard("view", planted_file, *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert served == ([], [])


def test_a_port_that_is_taken_is_said_in_one_line(regard, planted_file, monkeypatch):
    from regard.viewer import view

    with view(Recording.load(planted_file), open_browser=False) as viewer:
        port = viewer.address.split(":")[2].split("/")[0]
        result = regard("view", planted_file, "--no-open", "--port", port)
    assert (result.code, result.out) == (1, "")
    assert f"port {port} cannot be used: [Errno" in result.err
    assert "in use. Leave --port out" in result.err
    assert result.err.count("\n") == 1


def test_an_answer_that_does_not_end_does_not_hold_it_up(regard, served, planted_file, monkeypatch):
    ended = []
    monkeypatch.setattr(Served, "close", lambda self: False)
    monkeypatch.setattr(_view.os, "_exit", ended.append)
    regard("view", planted_file)
    assert ended == [130]


def test_one_file_is_written_instead(regard, served, model, tmp_path):
    path = tmp_path / "page.html"
    result = regard("view", "import os", "--model", model, "--export", path)
    assert (result.code, result.out, result.err) == (0, f"{path}\n", "")
    assert served == ([], [])
    whole = path.read_text(encoding="utf-8")
    assert "import os" in whole
    assert regard("view", "import os", "--model", model, "--export", path, "--layer", 1).code == 0
    assert len(path.read_text(encoding="utf-8")) < len(whole)


def test_a_figure_is_written_of_the_head_that_show_tells_of(regard, served, model, tmp_path):
    text = "the cat saw the cat"
    path = tmp_path / "head.svg"
    result = regard("view", text, "--model", model, "--export", path)
    assert (result.code, result.out, result.err) == (0, f"{path}\n", "")
    assert served == ([], [])
    assert regard("show", text, "--model", model, "--save", tmp_path / "a.safetensors").code == 0
    recording = Recording.load(tmp_path / "a.safetensors")
    shown = recording.heads().telling()
    assert path.read_text() == recording.figure(shown.layer, shown.head)._repr_svg_()
    line = ("--layer", 1, "--head", 2, "--rows", "1:", "--columns", ":4", "--scale", "log")
    assert regard("view", tmp_path / "a.safetensors", "--export", path, *line).code == 0
    of_part = recording.figure(1, 2, rows=slice(1, None), columns=slice(4), scale="log")
    assert path.read_text() == of_part._repr_svg_()
    result = regard("view", text, "--model", model, "--export", path, "--rows", "900:")
    assert result.code == 2
    assert result.err.startswith("regard: figure: 0 queries and ")


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_the_name_of_what_is_written_is_said_where_the_output_lacks_a_sign(
    monkeypatch, planted_file, tmp_path, ending
):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    with pytest.raises(SystemExit) as end:
        main(["view", str(planted_file), "--export", str(tmp_path / f"猫.{ending}")])
    assert not end.value.code
    assert sys.stdout.buffer.getvalue().decode() == f"{tmp_path}/?.{ending}\n"
    assert (tmp_path / f"猫.{ending}").exists()


def test_signs_that_no_font_has_are_told_in_one_line(regard, planted_file, tmp_path, monkeypatch):
    found = Recording.load(planted_file)
    monkeypatch.setattr("regard._showing.figure.FALLBACKS", ())
    tokens = ["🐈", *found.tokens[1:]]
    Recording(tokens, found.layers).save(tmp_path / "a.safetensors")
    result = regard("view", tmp_path / "a.safetensors", "--export", tmp_path / "a.png")
    assert (result.code, result.out) == (0, f"{tmp_path / 'a.png'}\n")
    assert result.err.startswith("regard: figure: no font has '🐈', and a box stands there.")
    assert result.err.count("\n") == 1


def test_weights_of_a_figure_that_are_no_numbers_are_told_in_one_line(regard, tmp_path):
    x = np.random.default_rng(0).standard_normal((1, 5, 4))
    x[0, 2] = np.nan
    Recording(list("abcde"), [Layer(x, x, causal=True)]).save(tmp_path / "a.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = regard("view", tmp_path / "a.safetensors", "--export", tmp_path / "a.png")
    assert (result.code, result.out) == (0, f"{tmp_path / 'a.png'}\n")
    assert result.err.startswith("regard: figure: the weights of 3 queries of L0H0 are not numbers")
    assert result.err.count("\n") == 1


def test_a_file_that_would_be_too_large_is_refused(regard, model, tmp_path, monkeypatch):
    from regard._base.errors import MaterializeError

    def export(*arguments, **options):
        raise MaterializeError("export: too large.\n  Choose a layer.")

    monkeypatch.setattr("regard.viewer.export.export", export)
    result = regard("view", "import os", "--model", model, "--export", tmp_path / "a.html")
    assert (result.code, result.err) == (2, "regard: export: too large. Choose a layer.\n")


@pytest.mark.parametrize("name", ["a.html", "a.png"])
def test_a_folder_that_is_missing_is_said_before_the_model_is_read(regard, tmp_path, name):
    path = tmp_path / "missing" / name
    result = regard("view", "import os", "--model", tmp_path / "none", "--export", path)
    assert result.code == 1
    assert "No such file or directory" in result.err
