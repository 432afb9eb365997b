"""The script that trains the built-in model, on a small corpus."""

import json
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import train_builtin
from regard.lm import LanguageModel
from regard.lm.training import Settings

CODE = "def run(self):\n    return self.value\n\n"
PROSE = "The old man went home. He was tired, and the door was open.\n"
HELD_OUT = "traceback.py", "sword-text-web/ot.bzz/2"
LIBRARY = {f"a{n}.py": CODE * 30 for n in range(4)} | {HELD_OUT[0]: CODE * 40, "empty.py": ""}
BOOKS = ("first", "second", "third")
MANUALS = {
    f"sword-text-web/ot.bzz/{n}": f"This is the {book} book of all. {PROSE}" * 30
    for n, book in enumerate(BOOKS)
}
SETTINGS = Settings(
    steps=3,
    finish=1,
    batch=2,
    length=48,
    vocab_size=300,
    embed_dim=32,
    num_heads=2,
    windows=(15, None),
)
SMALL = {"SETTINGS": SETTINGS, "LENGTHS": (48, 96), "LONGEST": 96, "SAMPLE": 96}
VERSIONS = {source.package: "1.2" for source in train_builtin.SOURCES}


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script with a small corpus and model, and a package of its own to install it to."""
    for name, value in SMALL.items():
        monkeypatch.setattr(train_builtin, name, value)
    monkeypatch.setattr(train_builtin, "standard_library", lambda: LIBRARY)
    monkeypatch.setattr(train_builtin, "prose", lambda folder: (MANUALS, VERSIONS))
    monkeypatch.setattr(train_builtin, "is_held_out", lambda name: name in HELD_OUT)
    monkeypatch.setattr(train_builtin, "BUILTIN", tmp_path / "builtin")
    monkeypatch.setattr(train_builtin, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()

    def run(*words):
        command = ["train_builtin.py", "--run", str(tmp_path / "run"), *words]
        monkeypatch.setattr(sys, "argv", command)
        train_builtin.main()
        return json.loads((tmp_path / "run" / "training.json").read_text())

    return run


def test_the_last_steps_read_code_with_some_prose():
    code, pages = {"a.py": CODE}, {f"page {n}": f"{n}. {PROSE}" for n in range(7)}
    found = list(train_builtin.mostly_code(code, pages).values())
    assert found == [CODE] * 3 + [f"{n}. {PROSE}" for n in (0, 3, 6)]


def test_one_command_trains_and_measures_the_model(script, tmp_path):
    summary = script()
    model = LanguageModel.load(tmp_path / "run")
    assert not (tmp_path / "builtin").exists()
    assert len(summary["losses"]) == 3
    assert summary["tokens_seen"] == 3 * 2 * 48
    assert summary["weights"] == sum(weight.size for weight in model.weights.values())
    assert summary["held_out_files"] == sorted(HELD_OUT)
    sources = {one["source"]: one for one in summary["sources"]}
    assert sources["standard library"]["texts"] == len(LIBRARY)
    assert sources["sword-text-web"]["version"] == "1.2"
    assert sources["sword-text-web"]["licence"] == "public domain"
    assert len(sources["sword-text-web"]["sha256"]) == 64
    figures = summary["per_character"]
    assert figures.keys() == {
        "sentences", "code", "manuals", "most of uniform", "pieces per word"
    }  # fmt: skip
    assert 0 < figures["code"] < 8
    assert (tmp_path / "run" / "model_loss.png").is_file()


def test_a_finished_model_is_installed_where_asked(script, tmp_path):
    losses = script("--steps", "2")["losses"]
    assert script("--steps", "2", "--install")["losses"] == losses
    files = {"config.json", "model.safetensors", "tokenizer.json", "training.json"}
    assert {path.name for path in (tmp_path / "builtin").iterdir()} == files
    assert (tmp_path / "docs" / "model_loss.png").is_file()


def test_what_a_manual_has_of_a_held_out_text_is_not_trained_on(script, monkeypatch):
    manual = {"jargon-text/a": f"Nobody knows of this yet.\n\n{CODE.strip()}.\n"}
    monkeypatch.setattr(train_builtin, "prose", lambda folder: (manual, VERSIONS))
    _, manuals, _ = train_builtin.corpus("somewhere")
    assert manuals == {"jargon-text/a": "Nobody knows of this yet.\n"}
