"""What the commands read: files that end, and standard input up to a limit."""

import io
import os
import threading

import pytest

from cli.test_messages import refusal
from range_server import Server

posix = pytest.mark.skipif(os.name != "posix", reason="pipes, links and devices of POSIX")


class Endless(io.RawIOBase):
    """Input without an end; whoever reads far beyond the limit is stopped."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def readable(self):
        return True

    def readinto(self, buffer):
        self.count += len(buffer)
        assert self.count < 200_000
        buffer[:] = b"a" * len(buffer)
        return len(buffer)


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr("regard.cli._source.LIMIT_BYTES", 100_000)


@posix
@pytest.mark.parametrize("line", [["show"], ["heads"], ["view", "--no-open"]])
def test_a_device_or_pipe_is_refused_with_the_way_to_pass_on_what_it_holds(regard, tmp_path, line):
    pipe = tmp_path / "a pipe"
    os.mkfifo(pipe)
    assert refusal(regard(*line, "/dev/zero")) == (
        "/dev/zero: a device, no file. Name a file, or pass on what it holds:"
        f" cat /dev/zero | regard {line[0]} -"
    )
    assert refusal(regard(*line, pipe)) == (
        f"{pipe}: a pipe, no file. Name a file, or pass on what it holds:"
        f" cat '{pipe}' | regard {line[0]} -"
    )


@posix
def test_a_link_that_leads_back_to_itself_is_no_text(regard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    assert refusal(regard("show", "one")) == "one: Too many levels of symbolic links"


@pytest.mark.parametrize("line", [["show"], ["heads"], ["view", "--no-open"]])
def test_a_file_above_the_limit_is_refused_with_a_part_of_it_as_the_way_out(
    regard, tmp_path, small_limit, line
):
    path = tmp_path / "a b.txt"
    path.write_bytes(b"a" * 100_001)
    assert refusal(regard(*line, path)) == (
        f"{path} holds more than 100.0 kB, the limit. Take a part of it:"
        f" head -c 100000 '{path}' | regard {line[0]} -"
    )


@pytest.mark.parametrize("command", ["show", "view", "generate"])
def test_input_without_an_end_is_refused_once_the_limit_is_passed(
    regard, monkeypatch, capsys, small_limit, command
):
    endless = Endless()
    monkeypatch.setattr("regard.cli._source.read_at_most", _of(endless))
    assert refusal(regard(command, "-")) == (
        "standard input holds more than 100.0 kB, the limit. Pass on a part of it, as"
        " head -c 100000 does."
    )
    assert endless.count > 100_000


def _of(endless):
    from regard._base.files import read_at_most

    return lambda _, count: read_at_most(endless, count)


def test_input_that_is_closed_is_said(regard, monkeypatch):
    monkeypatch.setattr("io.TextIOWrapper", lambda *_, **__: None)  # what the fixture puts there
    message = refusal(regard("show", "-"))
    assert message == "standard input is closed; pass a text to it, or name a file."


def test_a_recording_of_any_size_and_name_is_no_text(regard, planted_file, tmp_path, monkeypatch):
    monkeypatch.setattr("regard.cli._source.LIMIT_BYTES", 10)
    path = tmp_path / "planted"
    path.write_bytes(planted_file.read_bytes())
    assert regard("show", path).out == regard("show", planted_file).out


@posix
def test_pipes_and_devices_are_no_models_and_no_texts_to_train_on(regard, model, tmp_path):
    pytest.importorskip("torch")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for source, kind in ((pipe, "a pipe"), ("/dev/zero", "a device")):
        message = refusal(regard("train", source, "-o", tmp_path / "m"))
        assert message == f"{source} is {kind}; the name of a file is needed."
    assert not (tmp_path / "m").exists()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / name).unlink()
        os.mkfifo(folder / name)
        said = refusal(regard("show", "text", "--model", folder))
        is_missing = name == "config.json"  # a folder without that file is no model at all
        assert ("no language model there" if is_missing else f"{name} is a pipe") in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["show", "text", "--save", "own.npz"], "own.npz: the name ends in .npz; that of a"),
        (["generate", "text", "--record", "own.txt"], "own.txt: the name ends in .txt; that of a"),
        (["view", "text", "--export", "own.bmp"], "own.bmp: the name ends in .bmp; that of a page"),
        (["view", "text", "--export", "a.png", "--rows", "1-2"], "--rows 1-2: A:B is needed"),
        (
            ["view", "text", "--export", "a.png", "--scale", "ln"],
            "--scale ln: there are auto, linear",
        ),
        (["view", "text", "--export", "a.svg", "--query", "2"], "a figure is of one recording"),
        (
            ["view", "text", "--export", "a.html", "--scale", "log"],
            "--scale is of a figure; name one",
        ),
        (
            ["view", "text", "--columns", "1:2"],
            "--columns is of a figure; name one: --export fig.pdf",
        ),
    ],
)
def test_a_name_that_says_another_kind_of_file_is_refused_before_anything_is_read(
    regard, monkeypatch, line, message
):
    monkeypatch.setattr("regard.lm.LanguageModel.load", None)
    assert refusal(regard(*line)).startswith(message)


def test_a_model_has_the_name_of_a_folder(regard, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "a.txt").write_text("import os\n" * 99)
    message = refusal(regard("train", tmp_path / "a.txt", "-o", tmp_path / "m.safetensors"))
    assert message.endswith(f"and a model is a folder of files. Name it {tmp_path / 'm'}.")
    message = refusal(regard("train", tmp_path / "a.txt", "-o", tmp_path / "a.txt"))
    assert message.endswith("a.txt is a file, and a model is a folder. Give another name.")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_recording_that_is_cut_while_it_is_shown_is_said(regard, planted_file, monkeypatch):
    from regard import RecordingError

    def cut(*_):
        raise RecordingError("a.safetensors was cut to 9 bytes while it was open.")

    monkeypatch.setattr("regard.recording.Recording.heads", cut)
    assert refusal(regard("show", planted_file), code=1).startswith("a.safetensors was cut to 9")


def test_a_text_too_long_for_a_recording_is_said(regard, model, tmp_path, monkeypatch):
    monkeypatch.setattr("regard.recording._saving.HEADER_LIMIT", 100)
    message = refusal(
        regard("show", "text", "--model", model, "--save", tmp_path / "a.safetensors"), code=1
    )
    assert "100 fit into a safetensors header; save parts of the text" in message


def test_an_address_is_that_of_a_recording(regard, planted_file, tmp_path):
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.data = planted_file.read_bytes()
        for command in (["show"], ["heads"]):
            one, other = (regard(*command, source) for source in (planted_file, server.address))
            assert (one.code, one.out) == (other.code, other.out)
        page = tmp_path / "a.html"
        assert regard("view", server.address, "--export", page).code == 0
        assert page.stat().st_size > 10_000
        server.status = 404
        message = refusal(regard("view", server.address, "--no-open"))
        assert message.startswith(f"{server.address} cannot be read (HTTP 404")
        server.shutdown()
    assert "tokens" in regard("show", "see https://example.com for more", "--head", 0).out


def test_an_address_may_be_a_text(regard):
    assert regard("show", "https://a.b/c", "--text").code == 0


@pytest.mark.parametrize("command", ["show", "heads", "view"])
def test_a_model_that_would_read_nothing_is_refused(regard, model, planted_file, command):
    said = refusal(regard(command, planted_file, "--model", model))
    assert f"--model {model} would read a text, and this is a recording" in said
    if command == "view":
        said = refusal(regard(command, planted_file, "--with", planted_file, "--model", model))
        assert "Leave --model out, or give the text." in said
