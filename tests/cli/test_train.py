"""``regard train``: progress that can be read, and a run that survives being killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from cli.conftest import command
from tiny_model import TEXT

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("train")  # one run serves several of the tests

SIZES = [
    "--steps", 40, "--batch", 2, "--length", 48, "--vocab-size", 300, "--embed-dim", 32,
    "--num-heads", 2, "--windows", "15,all", "--save-every", 4,
]  # fmt: skip
FILES = ("model.safetensors", "config.json", "tokenizer.json")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT * 2)
    return path


# Each command in a process of its own, forked from one that has loaded torch and, as training does,
# torch's compiler: that takes longer than the training.
FORKING = """
import gc, json, os, runpy, signal, sys
import torch._dynamo
gc.freeze()
for line in sys.stdin:
    arguments, *files = json.loads(line)
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
        sys.argv = ["regard", *arguments]
        try:
            runpy.run_module("regard", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


class Running:
    """A command that runs, and writes into files."""

    def __init__(self, forking, folder, arguments):
        self.forking = forking
        self.files = [folder / "out", folder / "err"]
        for path in self.files:
            path.unlink(missing_ok=True)
        words = [str(word) for word in arguments]
        print(json.dumps([words, *map(str, self.files)]), file=forking.stdin, flush=True)
        self.pid = int(forking.stdout.readline())

    def wait_for(self, text):
        """Waits until it says this on standard error."""
        end = time.monotonic() + 300
        while text not in (self.files[1].read_text() if self.files[1].exists() else ""):
            assert time.monotonic() < end
            time.sleep(0.002)

    def ended(self, signal_=None):
        """What it left, once it has ended."""
        if signal_ is not None:
            os.kill(self.pid, signal_)
        code = int(self.forking.stdout.readline())
        return SimpleNamespace(
            returncode=code, **{path.name: path.read_text() for path in self.files}
        )


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The command in another process: ``start("train", file)``."""
    folder = tmp_path_factory.mktemp("printed")
    line = [sys.executable, "-c", FORKING]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, env=command()[1], text=True, **pipes) as forking:
        yield lambda *arguments: Running(forking, folder, arguments)
        forking.stdin.close()


@pytest.fixture(scope="module")
def whole_run(text_file, tmp_path_factory, start):
    """A run that nothing disturbed: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    run = start("train", text_file, "-o", folder, *SIZES).ended()
    assert run.returncode == 0, run.err
    return folder, run


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_a_run_reports_plain_lines_and_where_the_model_is(whole_run):
    folder, run = whole_run
    lines = run.err.splitlines()
    assert len(lines) == 20
    assert re.fullmatch(r"step 4/40  loss \d\.\d{3}  [\d,]+ tokens/s  \d+:\d\d left", lines[1])
    assert re.fullmatch(r"step 40/40  loss \d\.\d{3}  [\d,]+ tokens/s", lines[-1])
    assert re.match(rf"{re.escape(str(folder))}: 40 steps, last loss \d\.\d{{3}} nats", run.out)
    assert f'regard show "a text" --model {folder}' in run.out


def test_a_killed_run_goes_on_to_the_same_bytes(whole_run, text_file, tmp_path, start):
    process = start("train", text_file, "-o", tmp_path, *SIZES)
    process.wait_for("step 10/")
    assert process.ended(signal.SIGKILL).returncode == -signal.SIGKILL
    assert not (tmp_path / "model.safetensors").exists()

    again = start("train", text_file, "-o", tmp_path, *SIZES).ended()
    assert again.returncode == 0, again.err
    resumed = int(re.match(r"resumed at step (\d+)\n", again.err)[1])
    assert resumed >= 8
    assert resumed % 4 == 0
    assert contents(tmp_path) == contents(whole_run[0])


def test_ctrl_c_says_how_to_go_on(text_file, tmp_path, start):
    process = start("train", text_file, "-o", tmp_path, *SIZES, "--steps", 400)
    process.wait_for("step")
    run = process.ended(signal.SIGINT)
    assert run.returncode == 130
    assert run.out == ""
    assert run.err.endswith("Stopped; the same command goes on from the last checkpoint.\n")
    assert "Traceback" not in run.err


def test_the_trained_model_shows_and_continues_texts(whole_run, regard):
    folder, _ = whole_run
    shown = regard("show", "import os", "--model", folder).out
    assert f"model {folder}" in " ".join(shown.split())
    assert regard("generate", "import", "--tokens", 4, "--model", folder).code == 0


def test_a_finished_run_is_not_run_again(whole_run, regard, text_file):
    folder, run = whole_run
    before = contents(folder)
    result = regard("train", text_file, "-o", folder, *SIZES)
    assert result.err == f"{folder} was finished already.\n"
    assert result.out == run.out
    assert contents(folder) == before


def test_a_terminal_gets_a_bar(regard, text_file, tmp_path, colours):
    sizes = [*SIZES, "--steps", 3]
    result = regard("train", text_file, "-o", tmp_path, *sizes)
    assert result.code == 0
    assert "━" in result.err
    assert "3/3" in result.err
    assert "reading the texts" in result.err
    assert "None" not in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", 0], "steps 0; at least 1 is needed."),
        (["--windows", "3,some"], "--windows '3,some': numbers or all are needed"),
        (["--embed-dim", 30, "--num-heads", 4], "embed_dim 30 cannot be 4 heads of even size"),
        (["--vocab-size", 20], "vocab_size 20 is too small"),
        (["--length", 4000], "The corpus is too short"),
        (["--seed", -1], "seed -1; 0 to 18446744073709551615 is possible."),
        (["--seed", 10**30], "is possible."),
    ],
)
def test_settings_that_cannot_be_are_refused(regard, text_file, tmp_path, options, message):
    result = regard("train", text_file, "-o", tmp_path / "m", *SIZES, *options)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_a_folder_without_a_name_is_not_the_current_one(regard, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = regard("train", text_file, "-o", "", *SIZES)
    assert result.code == 2
    assert "the name is empty; name a folder, or . for this one." in result.err
    assert not (tmp_path / "run.json").exists()


def test_another_run_in_the_folder_is_left_alone(whole_run, regard, text_file):
    result = regard("train", text_file, "-o", whole_run[0], *SIZES, "--seed", 1)
    assert result.code == 2
    assert "holds another run: it has seed 0, not 1" in result.err


def test_files_that_cannot_be_read_are_refused(regard, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff")
    for name, message in [
        ("missing.txt", "missing.txt: No such file or directory"),
        ("binary", "not a text; byte 0 is no UTF-8"),
        (".", "a folder. Name the text files in it"),
    ]:
        result = regard("train", tmp_path / name, "-o", tmp_path / "m")
        assert result.code == 2
        assert message in result.err
        assert result.err.count("\n") == 1


def test_without_torch_training_says_how_to_get_it(regard, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("regard.lm.training")]:
        monkeypatch.delitem(sys.modules, name)
    import regard.lm as lm

    monkeypatch.delattr(lm, "training", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = regard("train", tmp_path / "a.txt", "-o", tmp_path / "m")
    assert result.code == 1
    way_out = 'Install it with pip install "regard[torch]".'
    assert result.err == f"regard: Training a model needs torch. {way_out}\n"
