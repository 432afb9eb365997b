"""What a text costs a model, per character, and the sentences that models are compared by."""

import json
import platform
import re
from pathlib import Path

import numpy as np
import pytest

from evaluation import Cost, cost, loss_in_pieces, total
from manuals import SOURCES, prose
from regard.lm.corpus import is_held_out, standard_library

HERE = Path(__file__).parent
SENTENCES = (HERE / "sentences.txt").read_text().splitlines()
WORDS = (HERE / "words.txt").read_text().split()
MANUALS = HERE.parents[1] / "build" / "manuals"
BASELINE = json.loads((HERE / "baseline.json").read_text())
TEXT = "def run(self):\n    return 1\n" * 8


def test_a_cost_is_the_loss_of_all_its_tokens(tiny):
    one = cost(tiny, TEXT)
    losses = tiny.losses(TEXT)
    assert (one.tokens, one.characters, one.vocab_size) == (
        len(losses),
        len(TEXT),
        len(tiny.tokenizer),
    )
    assert one.nats == pytest.approx(losses.sum(), rel=1e-6)
    assert one.per_character == one.nats / len(TEXT)
    assert one.of_uniform == pytest.approx(losses.mean() / np.log(one.vocab_size), rel=1e-6)


def test_a_cost_in_pieces_counts_the_last_one_too(tiny):
    ids = tiny.tokenizer.encode(TEXT)
    length = len(ids) // 3 + 1
    whole, pieces = cost(tiny, TEXT), cost(tiny, TEXT, length)
    assert pieces.tokens == whole.tokens == len(ids) > 2 * length
    read = loss_in_pieces(tiny, np.array(ids), length) * 2 * length
    last = tiny.losses_ids([tiny.tokenizer.bos, *ids[2 * length :]]).sum()
    assert pieces.nats == pytest.approx(read + last, rel=1e-5)


def test_costs_add_up():
    costs = [Cost(2.0, 3, 10, 300), Cost(4.0, 5, 14, 300)]
    assert total(costs) == Cost(6.0, 8, 24, 300)
    assert total(costs).per_character == 0.25


def test_an_empty_text_costs_an_error(tiny):
    with pytest.raises(ValueError, match="cost: the text is empty; at least one character"):
        cost(tiny, "")


def test_there_are_sixty_different_sentences():
    assert len(set(SENTENCES)) == len(SENTENCES) == 60
    assert all(re.fullmatch(r'["A-Z].*[.?!"]', s) and 9 <= len(s.split()) <= 20 for s in SENTENCES)


def letters(text):
    return re.sub(r"[^a-z]", "", text.lower())


def sentences_in(texts):
    wanted = {sentence: letters(sentence) for sentence in SENTENCES}
    return [s for text in map(letters, texts) for s, one in wanted.items() if one in text]


def test_no_sentence_is_in_the_standard_library():
    assert not sentences_in(standard_library().values())


@pytest.mark.slow
def test_no_sentence_is_in_the_manuals():
    if not all(list(MANUALS.glob(f"{source.package}_*.deb")) for source in SOURCES):
        pytest.skip(f"the manuals are not in {MANUALS}: scripts/train_builtin.py gets them")
    assert not sentences_in(prose(MANUALS)[0].values())


def test_the_baseline_is_of_these_sentences():
    assert len(BASELINE["sentences"]) == len(BASELINE["tokens"]) == 60
    characters = sum(map(len, SENTENCES))
    stored = BASELINE["nats_per_character"]
    assert sum(BASELINE["sentences"]) / characters == pytest.approx(stored, abs=1e-4)


def test_sentences_cost_15_per_cent_less_a_character_than_the_baseline(builtin):
    costs = [cost(builtin, sentence) for sentence in SENTENCES]
    assert total(costs).per_character <= 0.85 * BASELINE["nats_per_character"]
    assert all(one.of_uniform < 1 for one in costs)


def test_sentences_take_at_most_1_6_pieces_a_word(builtin):
    pieces = sum(len(builtin.tokenizer.encode(sentence)) for sentence in SENTENCES)
    assert pieces <= 1.6 * sum(len(sentence.split()) for sentence in SENTENCES)


def test_95_per_cent_of_frequent_words_are_one_or_two_pieces(builtin):
    assert len(WORDS) == 1000
    few = [word for word in WORDS if len(builtin.tokenizer.encode(f" {word}")) <= 2]
    assert len(few) >= 950


def test_code_costs_no_more_a_character_than_the_baseline(builtin):
    if platform.python_version() != BASELINE["code"]["python"]:
        pytest.skip(f"the baseline is of Python {BASELINE['code']['python']}'s library")
    library = standard_library().items()
    text = "".join(t for name, t in library if is_held_out(name) and name.endswith(".py"))
    stored = BASELINE["code"]["first 40000 characters"]
    assert cost(builtin, text[:40_000], 512).per_character <= stored
