"""The command line as a user has it: run in this process, or in one of its own."""

import io
import os
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

from regard.cli import main
from regard.recording import Layer, Recording
from tiny_model import tiny_model

BIG = 1e4  # a score that leaves nothing to the others


class Result(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def regard(capsys, monkeypatch):
    """Runs a command in this process: ``regard("show", "a text", stdin=b"")``."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        return Result(end.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def colours(monkeypatch):
    """As on a terminal that shows every colour."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")


def command(*arguments):
    """A command line for another process, and its surroundings."""
    line = [sys.executable, "-m", "regard", *map(str, arguments)]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    return line, surroundings


def start(*arguments, **options):
    """The command in another process, with pipes of bytes; it listens to Ctrl-C."""
    line, surroundings = command(*arguments)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # A process inherits that Ctrl-C is ignored, but no handler. Not as its preexec_fn: Python must
    # not run in the fork of a process with threads, such as those that serve the viewer.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(line, env=surroundings, **{**pipes, **options})
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a tiny model with random weights: 2 layers of 4 heads."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save(folder)
    return folder


TOKENS = ["<bos>", "a", " b", " c", " d", " a", " b", " c", " d"]


def looks_at(places):
    """One head whose queries each look at one place."""
    return np.eye(len(places))[places]


def recording_of(weights, tokens, **options):
    """A recording whose one layer has these weights, ``(heads, L, L)``: ln(weight) as the query."""
    with np.errstate(divide="ignore"):
        query = np.maximum(np.log(weights), -BIG)
    key = np.broadcast_to(np.eye(weights.shape[-1]), query.shape)
    layer = Layer(query, key, key, causal=True, scale=1.0, **options)
    return Recording(tokens, [layer], model="made")


def planted():
    """Four heads: previous token, first token, induction, and all tokens alike."""
    i = np.arange(len(TOKENS))
    uniform = np.tril(np.ones((len(i), len(i))))
    heads = [
        looks_at(np.maximum(i - 1, 0)),
        looks_at(0 * i),
        looks_at(np.where(i > 4, i - 3, 0)),
        uniform / uniform.sum(-1, keepdims=True),
    ]
    return recording_of(np.stack(heads), TOKENS)


@pytest.fixture(scope="session")
def planted_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("recordings") / "planted.safetensors"
    planted().save(path)
    return path
