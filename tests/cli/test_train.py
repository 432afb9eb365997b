"""``regard train``: progress that can be read, and a run that survives being killed."""

import re
import signal
import subprocess
import sys

import pytest

from cli.conftest import command, start
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


@pytest.fixture(scope="module")
def whole_run(text_file, tmp_path_factory):
    """A run that nothing disturbed: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    line, surroundings = command("train", text_file, "-o", folder, *SIZES)
    run = subprocess.run(line, env=surroundings, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return folder, run


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_a_run_reports_plain_lines_and_where_the_model_is(whole_run):
    folder, run = whole_run
    lines = run.stderr.splitlines()
    assert len(lines) == 20
    assert re.fullmatch(r"step 4/40  loss \d\.\d{3}  [\d,]+ tokens/s  \d+:\d\d left", lines[1])
    assert re.fullmatch(r"step 40/40  loss \d\.\d{3}  [\d,]+ tokens/s", lines[-1])
    assert re.match(rf"{re.escape(str(folder))}: 40 steps, last loss \d\.\d{{3}} nats", run.stdout)
    assert f'regard show "a text" --model {folder}' in run.stdout


def test_a_killed_run_goes_on_to_the_same_bytes(whole_run, text_file, tmp_path):
    process = start("train", text_file, "-o", tmp_path, *SIZES)
    for line in process.stderr:
        if line.startswith(b"step 10/"):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "model.safetensors").exists()

    line, surroundings = command("train", text_file, "-o", tmp_path, *SIZES)
    again = subprocess.run(line, env=surroundings, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    resumed = int(re.match(r"resumed at step (\d+)\n", again.stderr)[1])
    assert resumed >= 8
    assert resumed % 4 == 0
    assert contents(tmp_path) == contents(whole_run[0])


def test_ctrl_c_says_how_to_go_on(text_file, tmp_path):
    process = start("train", text_file, "-o", tmp_path, *SIZES, "--steps", 400)
    for line in process.stderr:
        if line.startswith(b"step"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    assert err.endswith(b"Stopped; the same command goes on from the last checkpoint.\n")
    assert b"Traceback" not in err


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
    assert result.out == run.stdout
    assert contents(folder) == before


def test_a_terminal_gets_a_bar(regard, text_file, tmp_path, colours):
    sizes = [*SIZES, "--steps", 3]
    result = regard("train", text_file, "-o", tmp_path, *sizes)
    assert result.code == 0
    assert "━" in result.err
    assert "3/3" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", 0], "steps 0; at least 1 is needed."),
        (["--windows", "3,some"], "--windows '3,some': numbers or all are needed"),
        (["--embed-dim", 30, "--num-heads", 4], "embed_dim 30 cannot be 4 heads of even size"),
        (["--vocab-size", 20], "vocab_size 20 is too small"),
        (["--length", 4000], "The corpus is too short"),
    ],
)
def test_settings_that_cannot_be_are_refused(regard, text_file, tmp_path, options, message):
    result = regard("train", text_file, "-o", tmp_path / "m", *SIZES, *options)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


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
