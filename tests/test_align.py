"""Alignments: a plain dense formula, written out, gives the same matrix and the same path."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from recordings import numbers
from regard import AttentionWeights
from regard._base.arrays import to_numpy
from regard._weights.alignment import path
from ways import NAMED, by_ways


def averaged(w, width, normalise=True):
    """``(heads, Lq, Lk)`` in float64, standardised, smoothed and averaged: number by number."""
    heads, Lq, Lk = w.shape
    total = np.zeros((Lq, Lk))
    for h in range(heads):
        z = w[h].copy()
        for j in range(Lk if normalise else 0):
            deviation = np.sqrt(((w[h, :, j] - w[h, :, j].mean()) ** 2).mean())
            z[:, j] = (w[h, :, j] - w[h, :, j].mean()) / deviation if deviation else 0
        half = width // 2
        for j in range(Lk):
            around = [abs(x) for x in range(j - half, j + half + 1)]
            around = [x if x < Lk else 2 * (Lk - 1) - x for x in around]
            total[:, j] += np.median(z[:, around], -1) if Lk > half else z[:, j]
    return total / heads


def best_sum(matrix):
    """The largest sum of any path, pair by pair."""
    best = np.full(matrix.shape, -np.inf)
    for i, j in np.ndindex(matrix.shape):
        before = [best[i - x, j - y] for x, y in ((1, 1), (1, 0), (0, 1)) if i >= x and j >= y]
        best[i, j] = matrix[i, j] + max(before, default=0)
    return best[-1, -1]


def assert_is_path(queries, keys, Lq, Lk):
    steps = set(zip(np.diff(queries).tolist(), np.diff(keys).tolist()))
    assert steps <= {(1, 1), (1, 0), (0, 1)}
    assert (queries[0], keys[0]) == (0, 0)
    assert (queries[-1], keys[-1]) == (Lq - 1, Lk - 1)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(NAMED), st.sampled_from([(1, 1), (1, 9), (9, 1), (7, 17), (17, 7)]),
    st.sampled_from([1, 3, 7, 9]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_it_is_the_path_of_the_plain_formula(way, sizes, width, normalise, seed):
    Lq, Lk = sizes
    q, k = (numbers(2, H, L, 5, dtype=float, seed=seed + H) for H, L in ((6, Lq), (3, Lk)))
    weights = way.weights(2 * q, k, k)
    heads = [0, 5, 3]
    found = weights.align(heads, median_filter_width=width, normalise=normalise)
    query, key, first, matrix = (to_numpy(x) for x in found)
    assert [x.dtype for x in (query, key, first, matrix)] == [np.int64] * 3 + [np.float64]
    exact = [averaged(w[heads], width, normalise) for w in np.asarray(weights)]
    np.testing.assert_allclose(matrix, exact, rtol=1e-7, atol=1e-7)
    for b, (i, j) in enumerate(zip(query, key)):
        i, j = i[i >= 0], j[j >= 0]
        assert_is_path(i, j, Lq, Lk)
        np.testing.assert_allclose(matrix[b, i, j].sum(), best_sum(matrix[b]), rtol=1e-9)
        assert first[b].tolist() == [j[i == x].min() for x in range(Lq)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_no_other_path_costs_less(Lq, Lk, seed):
    cost = np.random.default_rng(seed).integers(0, 4, (Lq, Lk)).astype(float)
    queries, keys = path(cost)
    assert_is_path(queries, keys, Lq, Lk)
    assert cost[queries, keys].sum() == -best_sum(-cost)


def test_of_equal_paths_it_stays_with_its_query_and_else_goes_to_both():
    assert path(np.zeros((3, 3))) == ([0, 1, 2, 2, 2], [0, 0, 0, 1, 2])
    assert path(np.float64([[0, 1], [1, 0]])) == ([0, 1], [0, 1])


@by_ways(*NAMED)
def test_the_shape_and_kind_of_the_weights_come_back(way):
    q, k = numbers(2, 3, 4, 6, 5), numbers(2, 3, 2, 8, 5, seed=1)
    weights = AttentionWeights(*map(way.convert, (q, k)), backend=way.backend)
    every = weights.align()
    assert every.matrix.shape == (2, 3, 6, 8)
    assert every.first.shape == (2, 3, 6)
    assert every.query.shape == every.key.shape
    assert type(every.matrix) is type(every.query) is type(weights[0])
    assert every.matrix.dtype == weights.dtype
    one = weights.matrix(1, 2, 3).align()
    assert one.matrix.shape == (6, 8)
    assert one.query.ndim == 1
    same = AttentionWeights(*map(way.convert, (q[1, 2], k[1, 2])), backend=way.backend).align([3])
    np.testing.assert_allclose(to_numpy(same.matrix), to_numpy(one.matrix), atol=1e-5)
    np.testing.assert_array_equal(to_numpy(same.query), to_numpy(one.query))


def test_paths_of_a_batch_are_those_of_each_and_shorter_ones_end_with_minus_one():
    q, k = numbers(5, 2, 9, 4, seed=4), numbers(5, 2, 12, 4, seed=5)
    together = AttentionWeights(4 * q, k).align()
    lengths = set()
    for b in range(5):
        alone = AttentionWeights(4 * q[b], k[b]).align()
        n = len(alone.query)
        lengths.add(n)
        np.testing.assert_array_equal(together.query[b, :n], alone.query)
        np.testing.assert_array_equal(together.key[b, :n], alone.key)
        assert (together.query[b, n:] == -1).all()
        assert (together.key[b, n:] == -1).all()
        np.testing.assert_array_equal(together.first[b], alone.first)
    assert len(lengths) > 1
    assert together.query.shape[1] == max(lengths)


def test_a_diagonal_is_found_and_hidden_keys_count_nothing():
    Lq, Lk = 12, 60
    bias = np.zeros((Lq, Lk), np.float32)
    for i, j in itertools.product(range(Lq), range(50)):
        bias[i, j] = 5 if j // 5 == min(i, 9) else 0
    weights = AttentionWeights(np.zeros((Lq, 4)), np.zeros((Lk, 4)), bias=bias, key_lengths=50)
    found = weights.align(median_filter_width=3)
    assert np.isfinite(found.matrix).all()
    assert (found.matrix[:, 52:] == 0).all()
    np.testing.assert_array_equal(found.first[:10], 5 * np.arange(10))


def test_keys_that_all_queries_weight_alike_count_nothing():
    for seed in range(20):
        query, keys = numbers(1, 8, dtype=float, seed=seed), numbers(60, 8, dtype=float, seed=99)
        found = AttentionWeights(np.repeat(query, 20, 0), keys).align()
        assert (found.matrix == 0).all()


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_without_queries_or_keys_there_is_no_pair(sizes):
    q, k = (np.ones((2, 3, L, 4), np.float32) for L in sizes)
    for convert in (np.asarray, torch.from_numpy):
        found = AttentionWeights(convert(q), convert(k)).align([0, 2])
        assert tuple(found.query.shape) == tuple(found.key.shape) == (2, 0)
        assert found.first.tolist() == 2 * [sizes[0] * [-1]]
        assert tuple(found.matrix.shape) == (2, *sizes)
    assert AttentionWeights(q[:0], k[:0]).align().query.shape == (0, 0)


def test_heads_of_several_layers_are_one_mean():
    layers = [
        AttentionWeights(3 * numbers(4, 8, 6, seed=n), numbers(2, 15, 6, seed=9 + n), causal=n > 0)
        for n in range(3)
    ]
    found = regard.align(layers, [[0, 1], (2, 3), torch.tensor([-1, -4])], median_filter_width=5)
    chosen = np.stack([layers[0][1], layers[2][3], layers[2][0]])
    np.testing.assert_allclose(found.matrix, averaged(chosen.astype(float), 5), atol=1e-6)
    for x, y in zip(layers[1].align([2, 0]), regard.align(layers, [(1, 2), (1, 0)])):
        np.testing.assert_array_equal(x, y)


def test_layers_and_heads_are_taken_from_whatever_holds_several():
    class Counted:
        """Of the old protocol of sequences."""

        def __init__(self, items):
            self.items = items

        def __len__(self):
            return len(self.items)

        def __getitem__(self, place):
            return self.items[place]

    layers = [AttentionWeights(numbers(3, 9, 5, seed=n), numbers(3, 9, 5)) for n in range(2)]
    pairs = (0, 2), (1, 0)
    expected = regard.align(layers, pairs).matrix
    for held in (tuple, iter, Counted):
        found = regard.align(held(layers), held(pairs)).matrix
        np.testing.assert_array_equal(found, expected)
    for held in (tuple, iter, Counted, np.array, torch.tensor):
        np.testing.assert_array_equal(regard.align(layers, held(pairs)).matrix, expected)
        found = layers[1].align(held((2, 0))).matrix
        np.testing.assert_array_equal(found, layers[1].align([2, 0]).matrix)


def test_parts_and_heads_with_numbers_of_their_own():
    q, k = numbers(3, 20, 6), numbers(3, 30, 6, seed=1)
    weights = AttentionWeights(q, k)
    part = weights.part(slice(4, None), slice(0, 25))
    found, chosen = part.align([1]), weights[1, 4:, :25].astype(float)
    np.testing.assert_allclose(found.matrix, averaged(chosen[None], 7), atol=1e-6)
    layer = regard.Layer(q, k[:, :20], k[:, :20], head_numbers=(2, 5, 7))
    recorded = regard.Recording([str(i) for i in range(20)], [layer]).weights[0]
    for x, y in zip(recorded.align([7]), recorded.head(7).align()):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(IndexError, match="head 1 was not recorded; there are 2, 5, 7"):
        recorded.align([1])


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda w: w.align(how="mas"), ValueError, "how is 'mas'; 'dtw' is needed"),
        (lambda w: w.align(median_filter_width=4), ValueError, "is 4; an odd one from 1 on"),
        (lambda w: w.align(median_filter_width=-1), ValueError, "is -1; an odd one from 1 on"),
        (lambda w: w.align(median_filter_width=3.0), TypeError, "is a float; an int is needed"),
        (lambda w: w.align([]), ValueError, "no head was chosen; at least one is needed"),
        (lambda w: w.align(3), TypeError, r"heads is 3, an int; a list is needed: \[3\]"),
        (lambda w: w.align(1.5), TypeError, "heads is a float; a list of ints is needed"),
        (lambda w: w.align(np.array(1)), TypeError, "heads is an ndarray; a list of ints"),
        (lambda w: w.align([None]), TypeError, "head None is a NoneType; an int is needed"),
        (lambda w: w.align(normalise="no"), TypeError, "normalise is 'no'; True or False"),
        (lambda w: regard.align(None, [(0, 0)]), TypeError, "layers is a NoneType; a list of Att"),
        (lambda w: regard.align([w], None), TypeError, r"heads is a NoneType; a list of pairs \("),
        (lambda w: regard.align([], [(0, 0)]), IndexError, "layer 0; there are none"),
        (lambda w: w.align([4]), IndexError, "index 4 is out of range"),
        (lambda w: w.head(0).align([0]), IndexError, "has no axis of heads; leave heads out"),
        (lambda w: regard.align([w], [3]), TypeError, r"has 3; pairs \(layer, head\) are needed"),
        (lambda w: regard.align([w], [(1, 0)]), IndexError, "layer 1; there are 1, 0 to 0"),
        (lambda w: w.align(np.int64(1)), TypeError, r"heads is 1, an int; a list is needed"),
        (lambda w: regard.align([w], [(0, True)]), TypeError, "head True is a bool; an int is"),
        (lambda w: regard.align([w], [(0, 1.0)]), TypeError, "head 1.0 is a float; an int is"),
        (lambda w: regard.align([w], np.arange(2)), TypeError, r"pairs \(layer, head\) are needed"),
        (lambda w: regard.align(w, [(0, 0)]), TypeError, "layers has an ndarray; AttentionWeights"),
        (
            lambda w: regard.align([w, w.part(slice(3))], [(0, 0), (1, 0)]),
            regard.ShapeError, r"layers of \(9, 9\) and \(3, 9\), without heads",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_aligned_is_told(ask, error, message):
    q = numbers(4, 9, 5)
    with pytest.raises(error, match=message):
        ask(AttentionWeights(q, q))


def test_weights_of_nan_and_a_matrix_above_the_limit_are_refused():
    q = numbers(2, 9, 5)
    q[1, 4] = np.nan
    weights = AttentionWeights(q, numbers(2, 7, 5))
    weights.align([0])
    with pytest.raises(ValueError, match="weights of head 1 are NaN for query 4; a path needs"):
        weights.align()
    long = AttentionWeights(np.zeros((2, 40_000, 4)), np.zeros((2, 40_000, 4)))
    with pytest.raises(regard.MaterializeError, match=r"Align a part: weights\.part"):
        long.align([0])
