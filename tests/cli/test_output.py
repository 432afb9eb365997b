"""Output that cannot be written is said in one sentence, by every command."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from cli.conftest import start
from regard.cli import main

FULL = Path("/dev/full")
FULL_SAID = b"regard: the output cannot be written: No space left on device.\n"
COMMANDS = {
    "show": ["show", "RECORDING"],
    "query": ["show", "RECORDING", "--query", "b", "--steps"],
    "json": ["show", "RECORDING", "--json"],
    "view": ["view", "RECORDING", "--no-open"],
    "export": ["view", "RECORDING", "--export", "FOLDER/page.html"],
    "generate": ["generate", "import", "--tokens", "2", "--model", "MODEL"],
    "version": ["--version"],
    "help": ["--help"],
    "help of show": ["show", "--help"],
    "nothing": [],
}


@pytest.fixture
def line(request, planted_file, model, tmp_path):
    """The command line of that name."""
    given = {"RECORDING": str(planted_file), "MODEL": str(model)}
    return [given.get(word, word.replace("FOLDER", str(tmp_path))) for word in request.param]


ENDING = {name: words for name, words in COMMANDS.items() if name != "view"}  # by themselves
commands = pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS, indirect=True)


@commands
@pytest.mark.skipif(not FULL.exists(), reason="needs the full device of Linux")
def test_a_full_disk_is_said_in_one_sentence(line):
    with FULL.open("wb") as full:
        process = start(*line, stdout=full)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, FULL_SAID)


@pytest.mark.skipif(not FULL.exists(), reason="needs the full device of Linux")
def test_a_full_disk_under_what_train_prints_is_said_in_one_sentence(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "a.txt").write_text("import os\n" * 99)
    sizes = "--steps 1 --batch 1 --length 32 --vocab-size 260 --embed-dim 8 --num-heads 1"
    line = ["train", tmp_path / "a.txt", "-o", tmp_path / "model", *sizes.split()]
    with FULL.open("wb") as full:
        process = start(*line, "--windows", "all", "--repeats", "0", stdout=full)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err.endswith(FULL_SAID)
    assert b"Traceback" not in err
    assert (tmp_path / "model" / "model.safetensors").exists()


class Broken(io.RawIOBase):
    """A place to write to that fails."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def writable(self):
        return True

    def write(self, data):
        raise OSError(self.number, os.strerror(self.number))


def run_into(monkeypatch, capsys, out, line):
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as end:
        main(line)
    monkeypatch.undo()
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("line_buffering", [False, True])  # fails at the end, or at once
@pytest.mark.parametrize("line", ENDING.values(), ids=ENDING, indirect=True)
def test_any_failure_of_the_output_is_said(monkeypatch, capsys, line, line_buffering):
    out = io.TextIOWrapper(
        io.BufferedWriter(Broken(errno.EIO), 10**6), line_buffering=line_buffering
    )
    said = f"regard: the output cannot be written: {os.strerror(errno.EIO)}.\n"
    assert run_into(monkeypatch, capsys, out, line) == (1, said)
    out.buffer.raw.write = len  # what is left goes nowhere


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@commands
def test_a_reader_that_went_away_is_not_complained_about(line):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*line, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, b"")


def test_output_that_is_closed_is_said(monkeypatch, capsys, planted_file):
    assert run_into(monkeypatch, capsys, None, ["show", str(planted_file)]) == (
        1, "regard: standard output is closed; open it, or give it a file.\n",
    )  # fmt: skip


@pytest.mark.skipif(not FULL.exists(), reason="needs the full device of Linux")
def test_the_exit_code_stays_where_there_is_no_room_for_the_error():
    with FULL.open("wb") as full:
        process = start("show", "missing.txt", stderr=full)
        assert process.communicate(timeout=120) == (b"", None)
    assert process.returncode == 2


def test_what_is_said_beside_the_output_needs_no_standard_error(
    regard, monkeypatch, planted_file, tmp_path
):
    """As after ``2>&-``."""
    monkeypatch.setattr(sys, "stderr", None)
    assert regard("show", planted_file, "--save", tmp_path / "a.safetensors").code == 0
    assert (tmp_path / "a.safetensors").exists()


@pytest.mark.skipif(not FULL.exists(), reason="needs the full device of Linux")
def test_a_full_disk_under_standard_error_is_no_failure(planted_file, tmp_path):
    with FULL.open("wb") as full:
        process = start("show", planted_file, "--save", tmp_path / "a.safetensors", stderr=full)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"induction" in out
