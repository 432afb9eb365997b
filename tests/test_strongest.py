"""The strongest pairs of a matrix, from the few rows that can have them, or from all: the same."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from definition import define
from recordings import numbers
from regard import AttentionWeights
from regard._backends import kernel
from regard._backends.strongest import first_rows, largest_weights
from regard._base.arrays import to_numpy
from strategies import calls, to_dtype
from ways import NAMED, by_ways

ALL_ROWS = 10**9  # times fewer: never


def by_rows_that_are(times_fewer):
    return mock.patch.object(kernel, "FEWER_ROWS", times_fewer)


def in_order(query, key, weight):
    """Whether pairs are strongest first, of equals the lower query, then the lower key."""
    order = np.lexsort((key, query, -weight), axis=-1)
    return (order == np.arange(weight.shape[-1])).all()


def first_of_matrix(w, n):
    """Query, key and weight of the n largest of a matrix, by a stable sort; NaN is none."""
    flat = np.where(np.isnan(w), 0, w).reshape(*w.shape[:2], -1)
    at = np.argsort(-flat, axis=-1, kind="stable")[..., :n]
    weight = np.take_along_axis(flat, at, -1)
    width = max(w.shape[-1], 1)
    return *(np.where(weight > 0, x, -1) for x in (at // width, at % width)), weight


@settings(max_examples=60, deadline=None)
@given(calls(), st.sampled_from(["float32", "float64", "bfloat16", "float16"]), st.data())
def test_few_rows_give_the_bits_that_all_of_them_give(call, dtype, data):
    (q, k, _), options = call
    q = q * data.draw(st.sampled_from([0.0, 0.3, 1.0, 30.0, 1000.0]))
    if data.draw(st.booleans()):  # ties
        q, k = np.round(q), np.round(k)
    if q.size and data.draw(st.booleans()):
        q = q.copy()
        q[-1, 0, q.shape[2] // 2] = np.nan
    arrays = [to_dtype(x, dtype) for x in (q, k)]
    weights = AttentionWeights(*arrays, **options)
    n = data.draw(st.integers(0, 12))
    rows = slice(None, None, data.draw(st.integers(1, 3)))
    for asked in (weights, weights.part(rows)):
        with by_rows_that_are(ALL_ROWS):
            every = asked.strongest(n)
        with by_rows_that_are(1):
            few = asked.strongest(n)
            with_more = asked.summary(strongest=n, only=["strongest", "entropy"])
        for x, y, z in zip(few, every, with_more.strongest):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_array_equal(x, z)
        np.testing.assert_array_equal(with_more.entropy, asked.entropy())
        whole = np.asarray(asked)
        assert in_order(*few)
        expected = first_of_matrix(whole, n)[2]
        np.testing.assert_allclose(few.weight, expected, rtol=2e-6, atol=1e-37)
        for b, h, r in np.argwhere(few.weight > 0):
            at = whole[b, h, few.query[b, h, r], few.key[b, h, r]]
            np.testing.assert_allclose(few.weight[b, h, r], at, rtol=2e-6)


@pytest.mark.parametrize("n", [3, 60, 300])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 9)}], ids=str)
def test_long_matrices_have_the_same_pairs_by_few_rows_by_all_and_in_order(n, options):
    q, k = np.round(numbers(2, 1300, 3)), np.round(numbers(2, 1300, 3, seed=1))
    weights = AttentionWeights(q, k, **options)
    few = weights.strongest(n)
    with by_rows_that_are(ALL_ROWS):
        for x, y in zip(few, weights.strongest(n)):
            np.testing.assert_array_equal(x, y)
    assert in_order(*few)
    whole = np.sort(np.asarray(weights).reshape(2, -1))[:, ::-1][:, :n]
    np.testing.assert_allclose(few.weight, whole, rtol=2e-6)


@settings(max_examples=10, deadline=None)
@given(calls(min_length=1), st.sampled_from(NAMED), st.integers(1, 9), st.data())
def test_pairs_of_some_keys_are_those_of_the_matrix(call, way, n, data):
    (q, k, v), options = call
    weights, exact = way.weights(q, k, v, **options), define(q, k, **options)[0]
    part = slice(data.draw(st.integers(0, 3)), None, data.draw(st.integers(1, 3)))
    found = [to_numpy(x) for x in weights.part(columns=part).strongest(n)]
    exact = exact[..., part]
    n = min(n, exact.shape[-1] * exact.shape[-2])
    np.testing.assert_allclose(found[2], first_of_matrix(exact, n)[2], rtol=1e-9, atol=1e-11)
    for b, h, r in np.argwhere(found[2] > 0):
        np.testing.assert_allclose(
            exact[b, h, found[0][b, h, r], found[1][b, h, r]], found[2][b, h, r]
        )


@by_ways(*NAMED)
@pytest.mark.parametrize("n", [1, 5, 97, 400])
def test_of_equal_weights_the_lower_query_is_first_then_the_lower_key(n, way):
    q, k = np.zeros((1, 2, 97, 4), np.float32), numbers(1, 1, 40, 4)
    q[0, 1, 7::9] = 4.0  # in the second head some rows are stronger than the others, and alike
    k[0, 0, 5::6] = k[0, 0, 5]
    weights = way.weights(q, k, k)
    found, whole = [to_numpy(x) for x in weights.strongest(n)], np.asarray(weights)
    for x, y in zip(found, first_of_matrix(whole, n)):
        np.testing.assert_array_equal(x, y)
    assert in_order(*found)


def test_the_reference_gives_the_first_of_what_it_gives_of_the_matrix():
    for seed in range(5):  # of float32, whose ties its float64 does not have
        q, k = np.round(2 * numbers(2, 3, 60, 3, seed=seed)), numbers(2, 3, 30, 3, seed=9)
        weights = AttentionWeights(q, np.round(k), causal=True, backend="reference")
        for x, y in zip(weights.strongest(50), first_of_matrix(np.asarray(weights), 50)):
            np.testing.assert_array_equal(x, y)


@pytest.fixture
def read(monkeypatch):
    """How many rows of each matrix the kernels read at each question; 0: all."""
    counts, reduce = [], kernel.kernels.reduce

    def spy(call, asked, threads):
        counts.append(asked.row_count)
        return reduce(call, asked, threads)

    monkeypatch.setattr(kernel.kernels, "reduce", spy)
    return counts


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_as_many_rows_are_read_as_pairs_are_asked_for(library, read):
    q, k = numbers(2, 4, 300, 8), numbers(2, 2, 300, 8, seed=1)
    if library == "torch":
        q, k = torch.from_numpy(q), torch.from_numpy(k)
    weights = AttentionWeights(q, k, causal=True, mask=None)
    weights.strongest(7)
    weights.part(slice(50, 250)).strongest(7)
    assert read == [7, 7]
    weights.part(columns=slice(3, 250)).strongest(7)
    weights.strongest(76)  # more than a quarter
    assert read[2:] == [0, 0]
    weights.summary(topk=3, strongest=7)
    assert read[4:] == [7, 0]
    weights.summary(strongest=0, only=["strongest"])
    assert len(read) == 6


def test_rows_whose_sink_is_stronger_are_read_where_they_may_count(read):
    q, k = numbers(1, 400, 8), numbers(1, 400, 8, seed=1)
    exponentials = np.exp(q[0].astype(float) @ k[0].T / np.sqrt(8))
    for sink, enough in ((-20.0, [7]), (1.0, [7]), (15.0, [7]), (40.0, [7, 0])):
        found = AttentionWeights(q, k, sinks=np.float32([sink])).strongest(7)
        exact = exponentials / (exponentials.sum(-1, keepdims=True) + np.exp(sink))
        assert read == enough, sink
        read.clear()
        np.testing.assert_allclose(found.weight[0], -np.sort(-exact.ravel())[:7], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [0.0, 1.0, 3e3])
def test_one_over_the_denominator_is_the_largest_weight_to_the_bit(dtype, size):
    for Lq, options in ((3, {}), (200, {"causal": True}), (97, {"softcap": 3.0, "scale": -0.7})):
        q, k = (to_dtype(numbers(2, 4, L, 20, seed=L) * size, dtype) for L in (Lq, 333))
        weights = AttentionWeights(q, k, **options)
        largest = largest_weights(*weights._statistics.of(weights._place), None, 1.0)
        np.testing.assert_array_equal(weights.strongest(1).weight[..., 0], largest.max(-1))
        np.testing.assert_array_equal(np.asarray(weights).max(-1), largest)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_score_just_below_the_maximum_has_no_larger_weight(dtype):
    for size in 2.0 ** np.arange(-30, 8):
        eps = np.finfo(dtype).eps
        k = (size * (1 - eps * np.arange(200)))[:, None].astype(dtype)
        weights = AttentionWeights(np.ones((70, 1), dtype), k, scale=1.0)
        largest = largest_weights(*weights._statistics.of(weights._place), None, 1.0)
        assert (np.asarray(weights) <= largest[0, 0][:, None]).all()


def test_sinks_of_any_size_warn_of_nothing():
    q = numbers(1, 90, 4)
    for sink in (3e38, -3e38, -np.inf):
        found = AttentionWeights(q, q, sinks=np.float32([sink]), scale=1e-3).strongest(2)
        assert (found.weight > 0).all() == (sink < 0)


def test_the_first_of_equal_rows_are_chosen():
    largest = np.array([[[0.5, 0.7, 0.5, 0.2, 0.7, 0.5]]])
    for count, rows in ((1, [1]), (2, [1, 4]), (3, [0, 1, 4]), (4, [0, 1, 2, 4])):
        np.testing.assert_array_equal(first_rows(largest, count)[0, 0], rows)
    assert first_rows(np.zeros((2, 3, 5)), 2).tolist() == 2 * [3 * [[0, 1]]]


def test_a_mask_of_every_pair_and_no_pair_at_all_have_no_strongest():
    q, k = numbers(2, 40, 4), numbers(2, 30, 4, seed=1)
    for found in (
        AttentionWeights(q, k, mask=np.zeros((40, 30), bool)).strongest(3),
        AttentionWeights(q, k, bias=np.float32(-np.inf)[None, None]).strongest(3),
        AttentionWeights(q * np.float32(np.nan), k).strongest(3),
    ):
        assert (found.query == -1).all()
        assert (found.key == -1).all()
        assert (found.weight == 0).all()
    assert AttentionWeights(q, k[:, :0]).strongest(3).query.shape == (2, 0)
    seen = np.zeros((40, 30), bool)
    seen[[7, 31], 5] = True
    for convert in (np.asarray, torch.from_numpy):
        found = AttentionWeights(*map(convert, (q, k)), mask=convert(seen)).strongest(3)
        assert found.query.tolist() == 2 * [[7, 31, -1]]
        assert found.weight.tolist() == 2 * [[1, 1, 0]]


@by_ways(*NAMED)
@pytest.mark.parametrize("n", [1, 9, 120])
@pytest.mark.parametrize("sinks", [None, -3.0, 2.0, 30.0])
def test_every_backend_finds_the_pairs_in_the_rows_that_can_have_them(sinks, n, way):
    q, k = numbers(2, 2, 150, 8), numbers(2, 2, 90, 8, seed=1)
    q[0, 1, 70], q[1, 0, 3] = np.nan, 0.0
    mask = np.ones((150, 90), bool)
    mask[[5, 149]] = False  # rows without a pair
    options = {} if sinks is None else {"sinks": np.float32([sinks, -sinks])}
    weights = way.weights(q, k, k, mask=mask, softcap=2.0, **options)
    found, whole = [to_numpy(x) for x in weights.strongest(n)], np.asarray(weights)
    assert in_order(*found)
    np.testing.assert_allclose(found[2], first_of_matrix(whole, n)[2], rtol=1e-6)
    b, h = np.ogrid[:2, :2]
    at = whole[b[..., None], h[..., None], found[0], found[1]]
    np.testing.assert_allclose(found[2], at, rtol=1e-6)
