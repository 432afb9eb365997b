"""The baseline."""

import itertools

import numpy as np
import pytest

from trigram import Trigram

IDS = np.random.default_rng(0).choice(6, 400, p=[0.4, 0.3, 0.1, 0.1, 0.08, 0.02])


@pytest.mark.parametrize("context", list(itertools.product(range(7), repeat=2)))
def test_probabilities_sum_to_one_after_any_two_tokens(context):
    trigram = Trigram(IDS, 7)
    p = [np.exp(-trigram.losses(np.array([*context, c]))[0]) for c in range(7)]
    assert sum(p) == pytest.approx(1)
    assert min(p) > 0


def test_what_always_follows_is_expected():
    ids = np.array([0, 1, 2, 3] * 50)
    assert Trigram(ids, 4).losses(ids).max() < 0.02


def test_kneser_ney_by_hand():
    """Of a b a b c every n-gram is seen in one place, so the discounts are (3 + 1) / (3 + 2)."""
    trigram = Trigram(np.array([0, 1, 0, 1, 2]), 3)
    kept, freed = (1 - 0.8) / 2, 0.8  # after b, and after a b, come a and c, once each
    after_b = freed / 3 + kept * np.array([1, 0, 1])  # the unigrams are uniform here
    after_ab = freed * after_b + kept * np.array([1, 0, 1])
    found = [trigram.losses(np.array([0, 1, c]))[0] for c in range(3)]
    np.testing.assert_allclose(found, -np.log(after_ab))


def test_more_text_makes_it_better():
    random = np.random.default_rng(1)
    step = random.dirichlet(np.full(20, 0.05), size=20)
    ids = [0]
    for _ in range(6000):
        ids.append(random.choice(20, p=step[ids[-1]]))
    ids = np.array(ids)
    losses = [Trigram(ids[:n], 20).losses(ids[5000:]).mean() for n in (100, 1000, 5000)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < np.log(20) / 2
