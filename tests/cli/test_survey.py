"""``regard survey``: a corpus surveyed, stopped, killed, gone on with, and shown."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.conftest import start
from recordings import numbers
from regard.recording import Layer, Recording
from regard.survey import Survey
from tiny_model import TEXT

pytestmark = pytest.mark.xdist_group("survey")  # one survey serves several of the tests
SIZES = ["--max-tokens", 100, "--shard-tokens", 1]  # a shard for each document
TEXTS = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(TEXTS):
        (folder / f"{n:02}.txt").write_text(TEXT[5 * n :][:700])
    (folder / "empty.txt").write_text("")
    return folder


@pytest.fixture(scope="module")
def done(corpus, model, tmp_path_factory):
    """An undisturbed survey."""
    folder = tmp_path_factory.mktemp("done") / "heads"
    survey = Survey(folder, model=model, corpus=corpus, max_tokens=100, shard_tokens=1)
    survey.run(workers=1)
    return folder


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "heads").glob("*.parquet")}


def begun(corpus, model, folder):
    """A survey in a process of its own, which has its first shard, and its two workers."""
    line = ["survey", corpus, "-o", folder, "--model", model, *SIZES, "--workers", 2]
    process, workers = start(*line), []
    end = time.monotonic() + 60
    while len(workers) < 2:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < end
        if any((folder / "heads").glob("*.parquet")):
            workers = workers_of(process)
        else:
            time.sleep(0.005)
    return process, workers


def workers_of(process):
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], stdout=subprocess.PIPE)
    lines = (line.split(maxsplit=2) for line in listed.stdout.decode().splitlines())
    own = (line for line in lines if int(line[1]) == process.pid)
    return [int(pid) for pid, _, command in own if "spawn_main" in command]


def test_a_driver_that_is_killed_takes_its_workers_along_and_the_next_goes_on(
    corpus, model, done, tmp_path, regard
):
    process, workers = begun(corpus, model, tmp_path)
    process.kill()
    process.communicate(timeout=60)
    end = time.monotonic() + 60
    for pid in workers:
        while _runs(pid):
            assert time.monotonic() < end, "a worker outlives its driver"
            time.sleep(0.05)
    assert len(files(tmp_path)) < TEXTS + 1
    again = regard("survey", corpus, "-o", tmp_path, "--model", model, *SIZES, "--workers", 1)
    assert again.code == 0
    assert re.search(f"of {TEXTS + 1} shards (is|are) there already", again.err)
    assert files(tmp_path) == files(done)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE).stdout
    return not state.startswith(b"Z") and bool(state)


def test_ctrl_c_leaves_whole_shards_and_says_how_to_go_on(corpus, model, done, tmp_path):
    process, workers = begun(corpus, model, tmp_path)
    for pid in [process.pid, *workers]:  # as a terminal does
        os.kill(pid, signal.SIGINT)
    out, err = (part.decode() for part in process.communicate(timeout=120))
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("Stopped with ")
    assert err.endswith(f" of {TEXTS + 1} shards; the same command goes on.\n")
    assert files(tmp_path).items() <= files(done).items()
    assert not list((tmp_path / "heads").glob(".*"))


def test_parts_of_the_shards_add_up_to_the_survey(corpus, model, done, tmp_path, regard):
    line = ["survey", corpus, "-o", tmp_path, "--model", model, *SIZES, "--workers", 1, "--json"]
    for part, done_by_then in (("0/2", 13), ("1/2", 25)):
        ran = regard(*line, "--shard", part)
        assert ran.code == 0
        assert json.loads(ran.out)["shards"] == {"done": done_by_then, "of": TEXTS + 1}
        line_of_the_end = ran.err.splitlines()[-1]
        assert line_of_the_end.startswith(f"{done_by_then} of {TEXTS + 1} shards  ")
        assert "tokens/s" in line_of_the_end
    assert files(tmp_path) == files(done)


def test_a_survey_is_shown_as_table_clearest_heads_and_picture(done, regard):
    shown = regard("survey", done)
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"{TEXTS} documents, ")
    assert "8 heads in 2 layers" in lines[0]
    text = " ".join(shown.out.split())
    assert "1 document: left out, empty: " in text
    assert "empty.txt" in text
    assert f"{TEXTS} documents: read up to 100 tokens, the rest left out" in text
    for name in ("first", "previous", "self", "induction", "entropy", "distance", "nucleus"):
        assert name in text
    assert "Clearest" in text
    assert "L1H3" in shown.out
    sums = Survey(done).heads()
    assert f"{sums.mean('entropy')[1, 3]:.3f}" in shown.out


def test_a_survey_as_json_has_every_head_and_every_document_left_out(done, regard):
    found = json.loads(regard("survey", done, "--json").out)
    sums = Survey(done).heads()
    assert (found["documents"], found["tokens"]) == (TEXTS, sums.tokens)
    assert [(row["layer"], row["head"]) for row in found["heads"]] == [
        (layer, head) for layer in range(2) for head in range(4)
    ]
    assert found["heads"][5]["entropy"] == pytest.approx(sums.mean("entropy")[1, 1], abs=1e-6)
    assert len(found["heads"][5]["top_receivers"]) == 8
    assert found["heads"][5]["top_receivers"][0]["name"].endswith(".txt")
    assert [name.rpartition("/")[2] for name in found["empty"]] == ["empty.txt"]
    assert len(found["cut"]) == TEXTS


def test_the_picture_is_drawn_into_a_file(done, regard, tmp_path):
    assert regard("survey", done, "--plot", tmp_path / "a.png").code == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    wrong = regard("survey", done, "--plot", tmp_path / "a.txt")
    assert wrong.code == 2
    assert "Name it" in wrong.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads", "heads: the name has no ending; that of a figure is .pdf, .svg or .png."),
        ("heads-3.5", "heads-3.5: the name does not end in .pdf, .svg or .png."),
        ("", "the name has no ending"),
        ("none/a.png", "none/a.png: No such file or directory"),
    ],
)
def test_where_no_picture_can_be_nothing_is_computed(
    name, message, corpus, model, regard, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ran = regard("survey", corpus, "-o", "heads", "--model", model, *SIZES, "--plot", name)
    assert ran.code in (1, 2)
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_picture_is_refused_before_anything_is_computed(
    corpus, model, regard, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = ["survey", corpus, "-o", tmp_path / "heads", "--model", model, *SIZES]
    ran = regard(*line, "--plot", tmp_path / "a.png")
    assert ran.code == 1
    assert ran.err.startswith("regard: --plot needs matplotlib. Install it with pip install")
    assert not list(tmp_path.iterdir())


def test_the_picture_of_the_terminal_has_heads_by_their_numbers(regard, tmp_path):
    layers = [
        Layer(*numbers(2, 2, 9, 4, seed=n + 1), causal=True, number=n, head_numbers=own)
        for n, own in enumerate([(0, 1), (1, 5)])
    ]
    Recording(list("abcabcabc"), layers).save(tmp_path / "a.safetensors")
    survey = Survey(tmp_path / "heads", corpus=tmp_path / "a.safetensors")
    survey.run(workers=1)
    (a, b), (c, d) = survey.heads().mean("first")
    lines = regard("survey", tmp_path / "heads").out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("      first"))
    assert lines[at + 1].split()[:3] == ["H0", "H1", "H5"]
    assert lines[at + 2][:21] == f"  L0   {a:.2f} {b:.2f}     "
    assert lines[at + 3][:21] == f"  L1        {c:.2f} {d:.2f}"


def test_names_of_files_are_shown_and_not_obeyed(model, regard, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a\x1b[31m\n.txt").write_text("")
    (tmp_path / "texts" / "b\x1b[31m\n.txt").write_text(TEXT)
    ran = regard("survey", tmp_path / "texts", "-o", tmp_path / "heads", "--model", model)
    assert r"a\x1b[31m\n.txt" in ran.out
    assert r"of b\x1b[31m\n.txt" in ran.out
    assert "\x1b" not in ran.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{corpus}"], "no survey is there. To make one, name a folder for it: regard survey"),
        (["{corpus}", "{done}"], "no survey is there"),
        (["{tmp}/heads"], "heads: no such file or folder."),
        (["{corpus}", "-o", ""], "'--output' / '-o': the name is empty; name a folder, or ."),
        (["{done}", "--workers", "2"], "only --json and --plot have a meaning"),
        (["{done}", "--threads", "1"], "only --json and --plot have a meaning"),
        (["{done}", "--column", "text"], "only --json and --plot have a meaning"),
        (["{corpus}", "-o", "{tmp}", "--shard", "3/3"], "process K of N, from 0/N to N-1/N"),
        (["{corpus}", "-o", "{tmp}", "--shard", "x"], "--shard x: K/N is needed"),
        (["{tmp}/no.txt", "-o", "{tmp}"], "no.txt: no such file or folder"),
        (["{corpus}", "-o", "{tmp}", "--model", "./no/model"], "no/model"),
        (["{corpus}", "-o", "{done}"], "has another survey: it has model "),
        (["{corpus}", "-o", "{corpus}/00.txt"], "00.txt is a file; name a folder"),
        (["{corpus}", "-o", "{tmp}", "--max-tokens", "0"], "'--max-tokens'"),
    ],
)
def test_errors_are_one_sentence_with_a_way_out(words, message, corpus, done, tmp_path, regard):
    places = {"corpus": corpus, "done": done, "tmp": tmp_path}
    ran = regard("survey", *(word.format(**places) for word in words))
    assert ran.code == 2
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_the_command_that_makes_a_survey_quotes_the_names(tmp_path, monkeypatch, regard):
    monkeypatch.chdir(tmp_path)
    Path("my texts").mkdir()
    said = regard("survey", "my texts", "--", "-x").err
    assert said.endswith("name a folder for it: regard survey 'my texts' ./-x -o heads/\n")


def test_a_damaged_file_is_told_before_anything_is_computed(corpus, model, done, tmp_path, regard):
    shutil.copytree(done, tmp_path / "heads")
    (tmp_path / "heads" / "heads" / "00003.parquet").write_bytes(b"PAR1")
    ran = regard("survey", corpus, "-o", tmp_path / "heads", "--model", model, *SIZES)
    assert ran.code == 2
    assert "00003.parquet: not a file of this survey" in ran.err
    assert "Remove it; the same command computes it again." in ran.err


def test_a_survey_of_one_document_tells_of_one(model, tmp_path, regard):
    (tmp_path / "a.txt").write_text(TEXT[:300])
    line = ["survey", tmp_path / "a.txt", "-o", tmp_path / "heads", "--model", model]
    assert regard(*line, "--workers", 1).out.startswith("1 document, ")


@pytest.mark.parametrize("json", [[], ["--json"]])
def test_a_survey_of_which_no_document_was_read_is_no_success(json, model, tmp_path, regard):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").write_text("")
    line = ["survey", tmp_path / "texts", "-o", tmp_path / "heads", "--model", model, *json]
    ran = regard(*line)
    assert (ran.code, "empty.txt" in ran.out) == (1, True)
    assert ran.err.endswith("no document was read; what is left out, and why, is told above.\n")


def test_a_file_that_changed_stops_with_its_name(model, tmp_path, regard):
    text = tmp_path / "a.txt"
    text.write_text("import os")
    line = ["survey", text, "-o", tmp_path / "heads", "--model", model]
    Survey(tmp_path / "heads", model=model, corpus=text)
    text.write_text("import sys")
    ran = regard(*line)
    assert ran.code == 2
    assert "a.txt has changed since" in ran.err
