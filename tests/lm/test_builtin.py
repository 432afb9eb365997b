"""The model in the package keeps what docs/model.md says of it."""

import ast
import json
import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from evaluation import loss_in_pieces
from probe import probe
from regard.lm.corpus import encode_texts, is_held_out, standard_library
from train_builtin import SETTINGS
from trigram import Trigram

FOLDER = Path(sys.modules["regard"].__file__).parent / "lm" / "builtin"
DOCS = Path(__file__).parents[2] / "docs" / "model.md"
TRAINING = json.loads((FOLDER / "training.json").read_text())
SENTENCES = Path(__file__).parent / "sentences.txt"
BASELINE = json.loads((Path(__file__).parent / "baseline.json").read_text())
SAMPLE = 3 * 4096
pytestmark = pytest.mark.xdist_group("builtin")  # what is measured serves several of the tests


@pytest.fixture(scope="module")
def library():
    return standard_library()


@pytest.fixture(scope="module")
def held_ids(builtin, library):
    """Tokens of files that were held out of training, of whatever Python runs the tests."""
    held = {name: text for name, text in library.items() if is_held_out(name)}
    return encode_texts(held, builtin.tokenizer)[:SAMPLE]


@pytest.fixture(scope="module")
def measured(builtin, held_ids):
    return {length: loss_in_pieces(builtin, held_ids, length) for length in (512, 4096)}


def test_the_model_takes_at_most_11_mb():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 11_000_000
    assert {path.suffix for path in FOLDER.iterdir()} == {".json", ".safetensors"}


def test_held_out_files_are_clearly_better_guessed_than_by_a_trigram(
    builtin, library, held_ids, measured
):
    train = {name: text for name, text in library.items() if not is_held_out(name)}
    trigram = Trigram(encode_texts(train, builtin.tokenizer), len(builtin.tokenizer))
    baseline = trigram.losses(held_ids).mean()
    assert measured[512] < baseline - 1.2
    assert measured[4096] < baseline - 1.3
    if platform.python_version() == TRAINING["python"]:
        stored = TRAINING["held_out"][f"first {SAMPLE} tokens"]["trigram"]
        assert baseline == pytest.approx(stored, abs=1e-4)


def test_texts_eight_times_longer_than_trained_on_cost_no_more_per_token(builtin, measured):
    assert builtin.config.train_length == 512
    assert measured[4096] <= measured[512]


def test_the_stored_figures_are_those_of_the_stored_weights(measured):
    if platform.python_version() != TRAINING["python"]:
        pytest.skip(f"the figures are of Python {TRAINING['python']}'s library")
    stored = TRAINING["held_out"][f"first {SAMPLE} tokens"]["model_by_length"]
    for length, loss in measured.items():
        assert loss == pytest.approx(stored[str(length)], abs=2e-4)


def test_def_is_continued_into_a_function(builtin):
    first, *lines = ("def " + builtin.generate("def ", 60)).split("\n")
    assert isinstance(ast.parse(first + "\n    pass").body[0], ast.FunctionDef)
    assert lines[0].startswith("    ")


def test_import_is_continued_into_modules_that_exist(builtin):
    lines = ("import " + builtin.generate("import ", 40)).split("\n")[:-1]
    nodes = [ast.parse(line).body[0] for line in lines if line]
    modules = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    assert modules
    assert modules <= sys.stdlib_module_names


def test_a_previous_token_head_and_an_induction_head_are_found(builtin):
    scores = probe(builtin)
    assert scores.previous.max() > 0.9
    assert scores.induction.max() > 0.5
    roles = {scores.role(layer, head) for layer in range(4) for head in range(8)}
    assert {"previous token", "induction"} <= roles


def test_random_tokens_are_guessed_once_they_have_been_said(builtin):
    random = np.random.default_rng(3)
    tokens = random.choice(2000, 60, replace=False).tolist()
    losses = builtin.losses_ids([builtin.tokenizer.bos, *tokens, *tokens])
    assert losses[61:].mean() < losses[:60].mean() - 5


def test_the_loss_curve_is_that_of_the_run():
    losses = TRAINING["losses"]
    assert len(losses) == SETTINGS.steps
    assert losses[0] == pytest.approx(np.log(SETTINGS.vocab_size), abs=0.2)
    assert np.mean(losses[-100:]) < 2.2


def test_the_document_has_the_figures_of_the_training():
    text = DOCS.read_text()
    for figures in TRAINING["held_out"].values():
        for figure in [*figures["model_by_length"].values(), figures["trigram"]]:
            assert f"{figure:.3f}" in text
    for name in ("weights", "files", "characters", "tokens", "tokens_seen"):
        assert f"{TRAINING[name]:,}" in text
    assert f"{SETTINGS.steps:,} steps" in text
    assert f"last {SETTINGS.finish:,} steps" in text
    assert f"The {len(TRAINING['held_out_files'])} texts" in text
    for source in TRAINING["sources"]:
        assert f"| {source['texts']:,} | {source['characters'] / 1e6:.1f} million |" in text
    assert (DOCS.parent / "model_loss.png").is_file()


def test_the_document_has_what_a_character_costs_this_model_and_the_one_before():
    text, own = DOCS.read_text(), TRAINING["per_character"]
    before = {"sentences": BASELINE["nats_per_character"], "code": BASELINE["code"]["all"]}
    for name in before:
        assert f"| **{own[name]:.3f}** | {before[name]:.3f} |" in text
        assert own[name] <= before[name]
    assert f"**{own['manuals']:.3f}**" in text
    assert f"costs {own['most of uniform']:.0%} of".replace("%", " %") in text
    words = sum(len(sentence.split()) for sentence in SENTENCES.read_text().splitlines())
    pieces = sum(BASELINE["tokens"]) / words
    assert f"have {own['pieces per word']:.2f} tokens a word" in text
    assert f"before it: {pieces:.2f})" in text


def test_the_document_has_the_heads_and_the_samples_of_the_training():
    text, heads = DOCS.read_text(), TRAINING["heads"]
    rows = re.findall(r"^\| L(\d)H(\d) \| (.*) \|$", text, re.MULTILINE)
    for layer, head, row in rows:
        found = [float(figure.strip("* ")) for figure in row.split("|")]
        stored = [heads[name][int(layer)][int(head)] for name in ("previous", "first", "induction")]
        assert found == pytest.approx(stored, abs=0.0051)
    named = np.maximum(heads["previous"], heads["induction"]) >= 0.3
    assert len(rows) == named.sum()
    samples = re.findall(r"^`(.*)`, (.*):\n\n```\n((?s:.*?))\n```$", text, re.MULTILINE)
    stored = {sample["prompt"]: sample for sample in TRAINING["samples"]}
    assert len(samples) >= 4
    assert all(shown == prompt + stored[prompt][kind] for prompt, kind, shown in samples)
