"""Rows of weights sum to 1, and their log-sum-exp is exact, whatever the scores and the length."""

import numpy as np
import pytest
import torch

import regard

SERVED = [("numpy", "kernel"), ("numpy", "reference"), ("torch", "kernel"), ("torch", "torch")]
LENGTHS = [129, 1000, 20_000]
FEW, MANY = 1, 70  # queries: few go another way through the kernels
ROWS = {"few": FEW, "many": MANY}


def weights_of(scores, served, rows):
    """The weights of ``(heads, length)`` scores, for ``rows`` equal queries."""
    library, backend = served
    key = np.float32(scores)[..., None]
    arrays = [np.ones((len(key), rows, 1), np.float32), key, key]
    if library == "torch":
        arrays = [torch.from_numpy(x) for x in arrays]
    return regard.attention(*arrays, scale=1.0, backend=backend, return_weights=True)[1]


def largest_errors(scores, served, rows):
    """How far any row's sum is from 1, and any log-sum-exp from the exact one."""
    weights = weights_of(scores, served, rows)
    sums = np.concatenate(
        [np.asarray(weights[h, :1]).astype(float).sum(-1) for h in range(len(scores))]
    )
    s = np.float32(scores).astype(float)
    top = s.max(-1)
    lse = top + np.log(np.exp(s - top[:, None]).sum(-1))
    found = np.asarray(weights.lse).astype(float)[:, 0]
    return abs(sums - 1).max(), (abs(found - lse) / np.maximum(1, abs(lse))).max()


def dominated(length, heads=32):
    """One key takes all, the others next to nothing: from what a sum of floats just loses, up."""
    rng = np.random.default_rng(length)
    small = np.exp(np.linspace(np.log(1e-9), np.log(1e-2), heads))
    small[::4] = 5.9e-8 * np.linspace(0.5, 8, heads)[::4]  # about half a unit in the last place
    scores = np.log(small)[:, None].repeat(length, 1)
    scores[np.arange(heads), rng.integers(length, size=heads)] = 0
    scores[:8, 0] = 0
    return scores


def rising(length, heads=16):
    """The largest score rises a little with every block of keys."""
    steps = np.linspace(1e-4, 0.2, heads)[:, None]
    return steps * (np.arange(length) // 128)


def falling_by_powers(length, heads=16):
    """Weights of every size at once, in an order of their own."""
    rng = np.random.default_rng(length)
    scores = -rng.exponential(np.linspace(0.5, 25, heads)[:, None], size=(heads, length))
    return rng.permuted(scores, axis=-1)


def equal(length, heads=16):
    """Weights all alike but one: each sum rounds the same way."""
    scores = -np.linspace(1e-3, 3, heads)[:, None].repeat(length, 1)
    scores[:, length // 2] = 0
    return scores


# Of NumPy by the kernels, which other instruction sets are asked for too, all of them; of the
# others every pair of scores, a backend, a length and a number of rows.
@pytest.mark.parametrize(
    ("draw", "served", "length", "rows"),
    [
        pytest.param(
            draw, served, length, rows, id=f"{'-'.join(served)}-{draw.__name__}-{length}-{rows}"
        )
        for n, draw in enumerate([dominated, rising, falling_by_powers, equal])
        for m, served in enumerate(SERVED)
        for k, rows in enumerate(ROWS)
        for at, length in enumerate(LENGTHS)
        if m == 0 or (n + m + k) % 3 == at
    ],
)
def test_rows_sum_to_one_whatever_the_scores(draw, served, length, rows):
    off, lse = largest_errors(draw(length), served, ROWS[rows])
    assert off < 1e-6
    assert lse < 1e-6


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("served", SERVED, ids="-".join)
def test_no_search_finds_a_row_that_does_not_sum_to_one(served, rows):
    """Climbs from random rows towards the largest error, by changes of some of their scores."""
    rng = np.random.default_rng(0)
    shape = 32, 700
    scores = -rng.exponential(10, size=shape)

    def errors(scores):
        weights = weights_of(scores, served, ROWS[rows])
        return abs(np.asarray(weights[:, 0]).astype(float).sum(-1) - 1)

    worst = errors(scores)
    for step in range(40):
        changed = np.where(rng.random(shape) < 0.1, -rng.exponential(10, size=shape), scores)
        if step % 4 == 0:  # a stretch of equal ones
            start, stop = np.sort(rng.integers(shape[1], size=2))
            changed[:, start:stop] = -rng.exponential(15, size=(shape[0], 1))
        found = errors(changed)
        better = found > worst
        scores[better], worst[better] = changed[better], found[better]
    assert worst.max() < 1e-6


def test_one_dominating_key_does_not_hide_the_others():
    """The row that was 7e-6 too large: 128 weights of half a unit of the last place beside 1."""
    key = np.full((1, 129, 1), np.log(5.5e-8), np.float32)
    key[0, 0] = 0
    query = np.ones((1, 129, 1), np.float32)
    weights = regard.AttentionWeights(query, key, scale=1.0)
    sums = np.asarray(weights).astype(float).sum(-1)
    np.testing.assert_allclose(sums, 1, atol=1e-6)
    np.testing.assert_allclose(weights.lse, np.log1p(128 * 5.5e-8), atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("served", SERVED, ids="-".join)
def test_weights_too_small_for_a_normal_number_are_zero_or_exact(served, rows):
    """A denormal number slows processors a hundredfold, and has few digits."""
    scores = np.float32([[0.0, -80.0, -87.0, -88.0, -95.0, -103.0, -1e4, -3e38] * 20])
    weights = np.asarray(weights_of(scores, served, ROWS[rows])[0, 0])
    exact = np.exp(scores[0].astype(float)) / np.exp(scores[0].astype(float)).sum()
    normal = exact > 1.2e-38
    np.testing.assert_allclose(weights[normal], exact[normal], rtol=1e-5)
    assert (weights[~normal] <= 1.2e-38).all()
