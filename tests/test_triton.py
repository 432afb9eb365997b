"""The kernels in Triton, which its interpreter runs on the CPU: ``TRITON_INTERPRET=1 pytest``.

Tests that are marked ``interpreted`` run there and nowhere else (``conftest.py``).
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fuzz
import regard
import stand
import test_attention as plain
from definition import define
from layouts import strides
from plain_formula import Errors
from regard._backends import by_name, choose, torch_ops
from regard._backends import triton as backend_module
from regard._call.options import OPTIONS as OPTIONS_OF_ATTENTION
from regard._weights.statistics_cache import Place
from strategies import calls, to_dtype, to_torch

INSTALLED = importlib.util.find_spec("triton") is not None
if INSTALLED:
    from regard._backends import (
        triton_backward,
        triton_gradients,
        triton_jit,
        triton_ops,
        triton_reduce,
        triton_split,
        triton_weights,
    )


def draw(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attend(*inputs, **options):
    return regard.attention(*inputs, backend="triton", **options)


def shifted(x):
    """x in memory of other strides, which Triton takes for any."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
    wide[..., 1::2] = x
    return wide[..., 1::2]


@pytest.mark.interpreted
@settings(max_examples=15, deadline=None)
@given(calls(), st.sampled_from(["float32", "float16"]))
def test_it_matches_the_definition_with_all_options_together(call, dtype):
    (q, k, v), options = call
    q, k, v = (to_dtype(x, dtype) for x in (q, k, v))
    tensors = [torch.from_numpy(x.copy()) for x in (q, k, v)]
    out, weights = attend(*tensors, **to_torch(options), return_weights=True)
    assert weights._statistics.backend.name == "triton"
    plain.check(out, q, k, v, options)
    exact = define(q, k, **options)[0]
    np.testing.assert_allclose(np.asarray(weights), exact, rtol=1e-4, atol=3e-6)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (70, 3)},
    "lengths": {"causal": True, "key_lengths": torch.tensor([97, 5])},
    "packed": {"segments": (torch.arange(80) // 30, torch.arange(97) // 31)},
    "capped": {"softcap": 4.0, "sinks": torch.tensor([1.0, -2.0, 30.0, 0.0])},
    "dropped": {"dropout": 0.4, "seed": -123456789012345},
    "edited": {"edits": [regard.Edit(1, slice(3, 70), slice(2, 90), 0.0),
                         regard.Edit(2, slice(9, 80), slice(60), 3.0)]},
    "part": {"query_start": 9, "key_start": 3, "key_step": 2, "dropout": 0.2, "seed": 5,
             "causal": True},
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_at_lengths_that_no_tile_divides(name):
    q, k, v = draw((2, 4, 80, 40), (2, 2, 97, 40), (2, 2, 97, 24))
    options = OPTIONS[name]
    out, weights, rows = attend(
        shifted(q), shifted(k), shifted(v), **options, return_weights=True, return_statistics=True
    )
    exact = [x.double() for x in (q, k, v)]
    options = {n: x.double() if n == "sinks" else x for n, x in options.items()}
    expected, other, of_rows = regard.attention(
        *exact, **options, backend="torch", return_weights=True, return_statistics=True
    )
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(weights[...].double(), other[...], rtol=2e-5, atol=1e-6)
    for x, y in zip(rows, of_rows):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_a_gradient_that_is_nan_where_nothing_is_seen_reaches_no_sink():
    q, k, v = draw(*3 * [(1, 2, 5, 4)])
    nothing, grad = torch.zeros(5, 5, dtype=torch.bool), torch.full((1, 2, 5, 4), torch.nan)
    for found in first_gradients((q, k, v), "triton", grad, mask=nothing, sinks=torch.ones(2)):
        assert (found == 0).all()


@pytest.mark.interpreted
def test_intervals_that_begin_with_the_batch_and_end_without_it():
    q, k, v = draw((2, 2, 9, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    first, last = torch.arange(18).reshape(2, 1, 9) // 3, torch.arange(4, 13).reshape(1, 1, 9)
    first = torch.stack([first, first], -1)[..., 0]  # in memory of other strides
    found = attend(q[:, None], k[:, None], v[:, None], intervals=(first, last))
    expected = regard.attention(
        q[:, None], k[:, None], v[:, None], intervals=(first, last), backend="torch"
    )
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


FARTHEST = 2**31 + 2**20  # beyond what 32 bits count; memory that is not written to is not there


def far_apart(x, axis, memory):
    """x in memory, its numbers along an axis as far from each other as there is room for."""
    strides, n = [0] * x.ndim, max(x.shape[axis] - 1, 1)
    strides[axis], step = (FARTHEST - x.numel()) // n, 1
    for other in reversed(range(x.ndim)):
        if other != axis:
            strides[other], step = step, step * x.shape[other]
    found = memory.as_strided(x.shape, strides)
    found.copy_(x)
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize("axis", ["batch", "head", "row", "column"])
def test_tensors_may_reach_beyond_32_bits(axis):
    axis, Lq, Lk = ["batch", "head", "row", "column"].index(axis), 65, 40
    shapes = (2, 2, Lq, 4), (2, 2, Lk, 4), (2, 2, Lk, 4), (2, 2, Lq, 4), (2, 2, Lq, Lk)
    near = draw(*shapes, dtype=torch.float16)
    far = [far_apart(x, axis, torch.empty(FARTHEST, dtype=torch.float16)) for x in near]

    def everything(q, k, v, grad, bias):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, bias=bias)
        weights = regard.AttentionWeights(q, k, bias=bias, backend="triton")
        asked = weights.summary(topk=2, strongest=2, pool=(3, 3)), weights[...]
        fused = regard.attention(q, k, v, key_lengths=9, backend="fused")
        return out, torch.autograd.grad(out, leaves, grad), asked, fused

    torch.testing.assert_close(everything(*far), everything(*near), rtol=0, atol=0)


BESIDE_TILES = {
    "plain": {}, "lengths": {"key_lengths": torch.tensor([97])},
    "pairs": {"mask": torch.eye(70, 97) == 0, "bias": torch.ones(2, 70, 97),
              "segments": (torch.arange(70) % 3, torch.arange(97) % 3)},
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("name", BESIDE_TILES)
def test_no_kernel_reads_or_writes_beyond_its_tensors(name, monkeypatch):
    import interpreter

    given, found, own = [], set(), triton_ops.launch

    def launch(kernel, grid, *arguments, **options):
        given[:] = [x for x in arguments if isinstance(x, torch.Tensor)]
        own(kernel, grid, *arguments, **options)

    for module in (triton_ops, triton_backward, triton_reduce):
        monkeypatch.setattr(module, "launch", launch)
    q, k, v = draw((1, 2, 70, 8), (1, 1, 97, 8), (1, 1, 97, 5))
    q[0, 1, 5], v[0, 0, 96] = np.inf, np.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with interpreter.told_of_what_is_beyond(given, found):
        out, weights = attend(*leaves, **BESIDE_TILES[name], return_weights=True)
        torch.autograd.grad(out.nan_to_num().sum(), leaves)
        weights.summary(topk=3, strongest=4, pool=(7, 5))
        weights.pool((3, 9), how="mass")
        weights[...]
        attend(*(x.detach() for x in (q[:, :, :2], *(x.repeat(1, 1, 6, 1) for x in (k, v)))))
    assert found == set()


@pytest.mark.interpreted
def test_dropout_of_keys_that_begin_near_the_end_of_32_bits():
    q, k, v = draw((1, 1, 9, 8), (1, 1, 97, 8), (1, 1, 97, 8))
    for start, step in ((2**31 - 64, 1), (2**31 - 63, 1), (2**40, 2)):
        options = {"key_start": start, "query_start": start, "key_step": step}
        options |= {"dropout": 0.5, "seed": 3}
        found = attend(q, k, v, **options)
        expected = regard.attention(q, k, v, **options, backend="torch")
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.interpreted
def test_scores_of_any_size_have_rows_that_sum_to_one():
    q, k, v = draw((1, 2, 70, 16), (1, 2, 130, 16), (1, 2, 130, 16))
    for size in (1.0, 30.0, 1e3, 1e10, 1e18):
        out, weights = attend(q * size, k * size, v, causal=True, return_weights=True)
        whole = weights[...].double()
        torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole[..., 0]), atol=1e-6, rtol=0)
        torch.testing.assert_close(out.double(), whole @ v.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_no_sum_overflows_at_biases_and_values_of_any_size():
    q, k, v = draw((1, 2, 9, 8), (1, 2, 70, 8), (1, 2, 70, 5))
    (bias,) = draw((9, 70))
    for size in (1e10, 1e20, 1e37):
        found = attend(q, k, 1e30 * v, bias=size * bias)
        expected = regard.attention(q, k, 1e30 * v, bias=size * bias, backend="torch")
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e24)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["causal", "packed", "dropped", "edited"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(name):
    q, k, v = draw((2, 4, 80, 8), (2, 2, 97, 8), (2, 2, 97, 5))
    v[0, 0, 40, 0], v[0, 1, 96, 1], v[1, 0, 50:60, 2] = np.nan, np.inf, -np.inf
    v[1, 0, 55, 2], k[1, 1, 70], q[0, 3, 20] = np.inf, np.nan, np.nan
    found = attend(q, k, v, **OPTIONS[name])
    expected = regard.attention(q, k, v, **OPTIONS[name], backend="torch")
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.interpreted
def test_rows_beside_one_of_nan_have_weights_of_their_own_statistics():
    """Values are computed anew for a row of NaN; statistics of other tiles have other roundings."""
    q, k, v = draw((1, 8, 60, 4), (1, 8, 60, 4), (1, 8, 60, 4))
    q = 100 * q
    q[:, :, 40] = np.nan
    for query in (q, q[:, :, 40:42]):  # and of keys that are split
        keys, values = (x.repeat(1, 1, 10 if query is not q else 1, 1) for x in (k, v))
        out, weights = attend(query, keys, values, key_lengths=55, return_weights=True)
        found = weights[...].double()
        sums = found.sum(-1)[~query.isnan().any(-1)]
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-6, rtol=0)
        assert out.isnan().any()


@pytest.mark.interpreted
def test_a_query_that_sees_nothing_and_empty_axes():
    q, k, v = draw((1, 2, 5, 4), (1, 2, 9, 4), (1, 2, 9, 3))
    nothing = torch.zeros(5, 9, dtype=torch.bool)
    out, rows = attend(q, k, v, mask=nothing, sinks=torch.ones(2), return_statistics=True)
    assert (out == 0).all()
    assert (rows.maximum == -torch.inf).all()
    assert (rows.total == 0).all()
    assert (attend(q, k[:, :, :0], v[:, :, :0]) == 0).all()
    assert attend(q[:, :, :0], k, v).shape == (1, 2, 0, 3)
    assert attend(q[:0], k[:0], v[:0]).shape == (0, 2, 5, 3)
    ends = torch.zeros(0, 5, dtype=torch.long), torch.full((1, 5), 3)
    weights = regard.AttentionWeights(q[:0], k[:0], intervals=ends, backend="triton")
    assert weights[...].shape == (0, 2, 5, 9)


@pytest.mark.interpreted
def test_everything_that_is_asked_of_weights_is_what_the_torch_backend_gives():
    q, k, v = draw((1, 2, 70, 8), (1, 2, 90, 8), (1, 2, 90, 8))
    options = {"causal": True, "softcap": 3.0, "sinks": torch.tensor([0.5, -1.0])}
    own, other = (
        regard.AttentionWeights(q, k, **options, backend=name) for name in ("triton", "torch")
    )
    for ask in (
        lambda w: w.summary(topk=3, strongest=4, pool=(7, 5)), lambda w: w @ v, lambda w: w.lse,
        lambda w: w.pool((3, 9), how="mass"), lambda w: w.max_score, lambda w: w.T @ v[:, :, :70],
        lambda w: w.at(torch.arange(9), torch.arange(9)), lambda w: w.diagonals()[1],
        lambda w: w.part(slice(3, 60, 4), slice(9, None, 3)).entropy(), lambda w: w[0, 1, 69, 4:9],
    ):  # fmt: skip
        torch.testing.assert_close(ask(own), ask(other), rtol=1e-5, atol=2e-6, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "key_lengths": torch.tensor([40, 90])},
        {"softcap": 2.0, "sinks": torch.tensor([1.0, -2.0, 9.0, 0.0]), "mask": torch.eye(90) == 0},
        {"window": (40, 5), "query_start": 3, **OPTIONS["edited"]},
        {"bias": torch.eye(90).log()},  # -inf: a weight of 0 that is seen
    ],
    ids=["lengths", "mask", "window", "bias"],
)
def test_what_one_pass_reduces_with_rows_of_nan_and_in_parts(options):
    q, k = draw((2, 4, 90, 8), (2, 2, 90, 8))
    q[0, 1, 5] = np.nan
    own, other = (
        regard.AttentionWeights(q, k, **options, backend=name) for name in ("triton", "torch")
    )
    part = slice(3, 80, 4), slice(9, None, 3)
    for x, y in ((own, other), (own.part(*part), other.part(*part))):
        for ask in (
            lambda w: w.summary(only=["entropy", "distance", "received", "lse"]),
            lambda w: w.received(how="max"),
        ):
            torch.testing.assert_close(ask(x), ask(y), rtol=1e-5, atol=2e-6, equal_nan=True)


SEEN = {
    "all": {},
    "causal": {"causal": True, "key_lengths": 60, "query_start": 20},
    "mask": {"mask": torch.eye(90)[:70] == 0, "window": (30, 4)},
    "edits": {"segments": (torch.arange(70) // 30, torch.arange(90) // 31),
              "edits": [regard.Edit(0, slice(3, 60), slice(2, 80), 0.0),
                        regard.Edit(1, slice(9, 70), slice(60), 3.0)]},
    "bias": {"bias": torch.eye(90)[:70].log(), "sinks": torch.tensor([1.0, 9.0])},
}  # fmt: skip


def both(name):
    """The weights of two backends; a row of one head is NaN."""
    q, k = draw((1, 2, 70, 8), (1, 1, 90, 8))
    q[0, 1, 5] = np.nan
    return [regard.AttentionWeights(q, k, **SEEN[name], backend=x) for x in ("triton", "torch")]


@pytest.mark.interpreted
@pytest.mark.parametrize("how", ["max", "mass"])
@pytest.mark.parametrize("name", SEEN)
def test_pictures_of_any_size_and_of_parts(name, how):
    asked = [lambda w, size=size: w.pool(size, how=how)
             for size in ((1, 1), (9, 40), (70, 2))]  # fmt: skip
    asked.append(lambda w: w.pool((5, 7), how=how, rows=slice(3, 60), columns=slice(1, 80)))
    if name in ("all", "mask", "edits"):
        asked.append(lambda w: w.part(slice(1, None, 3)).pool((9, 7), how=how, of=(90, 90)))
    own, other = both(name)
    for ask in asked:
        torch.testing.assert_close(ask(own), ask(other), rtol=1e-5, atol=4e-6, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", SEEN)
def test_top_keys_and_strongest_pairs(name):
    own, other = both(name)
    for k in (1, 3, 70):
        found, expected = own.topk(k), other.topk(k)
        torch.testing.assert_close(
            found.values, expected.values, rtol=1e-5, atol=2e-6, equal_nan=True
        )
        assert all(len(set(row)) == k for row in found.indices.flatten(0, -2).tolist())
        of_keys = own[...].gather(-1, found.indices)
        torch.testing.assert_close(of_keys, found.values, rtol=1e-5, atol=2e-6, equal_nan=True)
    for n in (5, 80):
        found, expected = own.strongest(n), other.strongest(n)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.interpreted
def test_a_block_of_very_many_small_matrices_is_computed_in_several_launches(monkeypatch):
    """The third axis of a grid has 65,535 programs at most."""
    q, k = draw((3, 2, 5, 4), (3, 2, 7, 4))
    monkeypatch.setattr(triton_reduce, "MOST_PROGRAMS", 5)
    weights, grids, own = [], [], triton_reduce.launch

    def launch(kernel, grid, *arguments, **options):
        grids.append(grid)
        own(kernel, grid, *arguments, **options)

    monkeypatch.setattr(triton_reduce, "launch", launch)
    weights = regard.AttentionWeights(q, k, causal=True, backend="triton")[...]
    assert grids == [(1, 1, 4), (1, 1, 2)]
    expected = regard.AttentionWeights(q, k, causal=True, backend="torch")[...]
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.interpreted
def test_equal_weights_are_the_first_ones():
    q, k = torch.zeros(1, 2, 70, 4), torch.zeros(1, 1, 130, 4)
    own, other = (
        regard.AttentionWeights(q, k, causal=True, backend=name) for name in ("triton", "torch")
    )
    assert own.topk(3).indices[0, 0, 9].tolist() == [0, 1, 2]
    torch.testing.assert_close(own.strongest(17), other.strongest(17), rtol=1e-6, atol=0)
    few = regard.AttentionWeights(q[:, :, :2], k[:, :, :2], causal=True, backend="triton")
    assert few.strongest(4).query[0, 0].tolist() == [0, 1, 1, -1]
    assert few.strongest(4).key[0, 0].tolist() == [0, 0, 1, -1]


@pytest.mark.interpreted
def test_strongest_pairs_of_equal_weights_are_those_of_the_compiled_kernels():
    q, k = draw((1, 2, 130, 8), (1, 1, 130, 8))
    documents = torch.arange(130) // 4  # in each the first token sees itself alone: a weight of 1
    for options in (
        {"causal": True},
        {"causal": True, "segments": documents, "sinks": torch.tensor([0.0, -200.0])},
        {"mask": torch.arange(130)[:, None] % 7 == torch.arange(130) % 13},
    ):
        for n in (1, 9, 60):
            own, other = (
                regard.AttentionWeights(0 * q, k, **options, backend=name).strongest(n)
                for name in ("triton", "kernel")
            )
            assert all(map(torch.equal, own, other))


@pytest.mark.interpreted
@pytest.mark.parametrize("n", [20, 66])  # from rows of a kernel's, and from blocks of weights
def test_the_strongest_pairs_at_large_scores_are_those_of_the_matrix(n):
    q, k = draw((1, 1, 70, 16), (1, 1, 200, 16))
    k = k[:, :, :1] + 0.003 * k  # scores of 1e3 that differ by 1
    weights = regard.AttentionWeights(q * 300, k, backend="triton", scale=1.0)
    found = weights.strongest(n)
    exact = weights[...].flatten().topk(n)
    torch.testing.assert_close(found.weight.flatten(), exact.values, rtol=3e-7, atol=0)
    assert torch.equal((found.query * 200 + found.key).flatten(), exact.indices)


LARGEST = {
    "plain": {}, "causal": {"causal": True}, "bias": {"bias": torch.linspace(-9, 9, 97)},
    "capped": {"softcap": 3.0, "scale": -0.7}, "edited": OPTIONS["edited"],
    "seen": {"mask": torch.arange(80)[:, None] % 7 == torch.arange(97) % 13},
}  # fmt: skip


def totals(weights):
    """Of the rows, as the backend has them: relative to maxima in its unit."""
    known = weights._statistics
    return torch.from_numpy(known.of(Place.whole(known.call))[1])


@pytest.mark.interpreted
@pytest.mark.parametrize("name", LARGEST)
def test_one_over_the_total_is_the_largest_weight_to_the_bit(name):
    for size in (0.0, 1.0, 3e3, 1e9):
        q, k = draw((1, 4, 80, 20), (1, 2, 97, 20))
        weights = regard.AttentionWeights(q * size, k, **LARGEST[name], backend="triton")
        total = totals(weights)
        largest = torch.where(total > 0, 1 / total, 0.0)
        assert torch.equal(weights.topk(1).values[..., 0], largest)
        assert torch.equal(weights[...].amax(-1), largest)


@pytest.mark.interpreted
def test_one_over_the_total_is_the_largest_weight_of_split_keys():
    q, k = draw((1, 4, 2, 20), (1, 2, 700, 20))
    weights = regard.AttentionWeights(q * 3e3, k, backend="triton")
    assert torch.equal(weights.topk(1).values[..., 0], 1 / totals(weights))


@pytest.mark.interpreted
@pytest.mark.parametrize("n", [1, 5, 64])
def test_strongest_pairs_are_searched_for_in_as_many_rows_as_pairs_by_their_totals(n):
    x = OnDevice(130)
    for options, others in (
        ({"causal": True}, {}),
        ({"softcap": 2.0, "edits": EDITS}, {}),
        ({"sinks": x.sinks}, {"reductions": 1}),  # the sink may be the maximum
    ):
        grids = {}
        with stand.device(), stand.with_triton(grids):
            weights = regard.AttentionWeights(x.q, x.k, **options)
            weights.lse  # noqa: B018 - the row statistics
            grids.clear()
            weights.strongest(n)
        grids.pop("intervals", None)  # of what rows see, not of pairs
        assert {name: len(found) for name, found in grids.items()} == {"top_keys": 1, **others}
        assert grids["top_keys"] == [(1, H, 1)]  # a tile of rows: all would be 3


@pytest.mark.interpreted
@pytest.mark.parametrize("ask", [
    lambda w: w.pool((9, 7)), lambda w: w.topk(4), lambda w: w.strongest(5),
    lambda w: w.pool((9, 7), how="mass"),
    lambda w: w.summary(topk=3, strongest=5, pool=(5, 5)),
])  # fmt: skip
def test_what_is_reduced_by_kernels_makes_no_block_of_weights(ask, monkeypatch):
    def fail(*_):
        raise AssertionError("a block of weights")

    monkeypatch.setattr(triton_reduce, "weight_blocks", fail)
    ask(both("causal")[0])


def first_gradients(inputs, backend, upstream, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    if "sinks" in options:
        leaves.append(options.pop("sinks").to(inputs[0].dtype).requires_grad_())
        options["sinks"] = leaves[-1]
    out = regard.attention(*leaves[:3], **options, backend=backend)
    return torch.autograd.grad(out, leaves, upstream.to(out.dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_with_each_option(name, dtype):
    inputs = draw((2, 4, 80, 24), (2, 2, 97, 24), (2, 2, 97, 20), dtype=dtype)
    (upstream,) = draw((2, 4, 80, 20), dtype=dtype)
    found = first_gradients(inputs, "triton", upstream, **OPTIONS[name])
    plain = first_gradients(inputs, "torch", upstream, **OPTIONS[name])
    exact = [x.double() for x in inputs]
    expected = first_gradients(exact, "torch", upstream.double(), **OPTIONS[name])
    for x, y, z in zip(found[:3], plain, expected):
        rounding = 4 * torch.finfo(dtype).eps * z.abs().max()
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + rounding


@pytest.mark.interpreted
@pytest.mark.parametrize("options", [{}, {"dropout": 0.9, "seed": 3}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize(
    "sizes", [(1e-3, 1e3, 1e-2, 1e-3), (1, 1, 1, 1), (0.005, 0.005, 2e3, 2e3)], ids=str
)
def test_gradients_of_float16_are_as_exact_where_slopes_are_small_or_large(sizes, options):
    """A slope of 1e-7 is among the last numbers of float16 above 0, one of 1e5 beyond it."""
    *inputs, upstream = (x * size for x, size in zip(draw(*4 * [(1, 2, 90, 16)]), sizes))
    inputs, upstream = [x.half() for x in inputs], upstream.half()
    found = first_gradients(inputs, "triton", upstream, **options)
    exact = [x.double() for x in inputs]
    expected = first_gradients(exact, "torch", upstream.double(), **options)
    for x, y in zip(found, expected):
        rounding = 4 * torch.finfo(torch.float16).eps * y.abs().max() + 2.0**-24
        assert (x - y).abs().max() <= rounding


@pytest.mark.interpreted
def test_gradients_at_a_scale_of_0_are_0_whatever_they_would_be_times():
    q, k, v, upstream = draw(*4 * [(1, 2, 20, 8)])
    k[0, 0, 3, 1], v[0, 0, 4, 6], q[0, 1, 5, 2] = 1e30, -1e30, 1e30
    found = first_gradients((q, k, v), "triton", upstream, scale=0.0)
    assert all((x == 0).all() for x in found[:2])
    assert found[2].isfinite().all()


@pytest.mark.interpreted
def test_a_hidden_query_that_is_infinite_changes_no_gradient_at_scores_of_any_size():
    """Rows of others have weights of their own statistics, of which 1e30 is a rounding apart."""
    q, k, v, upstream = draw((1, 1, 257, 48), (1, 1, 1, 48), (1, 1, 1, 24), (1, 1, 257, 24))
    k[..., [35, 20, 37]] = torch.tensor([-1e30, 1e30, 1e30])
    hidden = torch.ones(257, 1, dtype=torch.bool)
    hidden[200:] = False
    finite = first_gradients((q, k, v), "triton", upstream, mask=hidden)
    q[:, :, 230] = np.inf
    found = first_gradients((q, k, v), "triton", upstream, mask=hidden)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[2], finite[2], rtol=1e-6, atol=1e-6)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_of_sinks_are_as_exact_as_the_plain_formulas(dtype):
    """Of so many heads that no error is one head's luck."""
    *inputs, upstream = draw(*4 * [(2, 24, 20, 8)], dtype=dtype)
    options, errors = {"softcap": 4.0, "sinks": torch.linspace(-2, 3, 24)}, Errors()
    found, plain = (
        first_gradients(inputs, name, upstream, **options)[3] for name in ("triton", "torch")
    )
    exact = [x.double() for x in inputs]
    errors.add(found, first_gradients(exact, "torch", upstream.double(), **options)[3], plain)
    assert errors.ratio < 2


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["causal", "packed", "dropped", "edited"])
def test_gradients_reach_no_pair_that_is_masked(name):
    q, k, v = draw((2, 4, 80, 8), (2, 2, 97, 8), (2, 2, 97, 5))
    (upstream,) = draw((2, 4, 80, 5))
    v[0, 1, 96, 1], k[1, 1, 96], q[0, 3, 20] = np.inf, np.nan, np.nan
    upstream[0, 0, 3, 1], upstream[1, 2, 40, 0], upstream[1, 2, 41, 0] = np.inf, np.inf, -np.inf
    upstream[0, 2, 9, 3] = np.nan
    if name == "dropped":  # a dropped inf is NaN in the output, and here so in the gradient
        v[0, 1, 96, 1] = 1.0
    for grad in (torch.ones_like(upstream), upstream):
        found = first_gradients((q, k, v), "triton", grad, **OPTIONS[name])
        expected = first_gradients((q, k, v), "torch", grad, **OPTIONS[name])
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.interpreted
def test_gradients_of_keys_that_a_batch_shares_and_of_a_bias():
    inputs = draw((3, 4, 33, 8), (1, 2, 40, 8), (1, 2, 40, 8))
    (upstream,) = draw((3, 4, 33, 8))
    for x, y in zip(*(first_gradients(inputs, n, upstream) for n in ("triton", "torch"))):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    bias = torch.zeros(4, 1, 40, requires_grad=True)
    found = [
        torch.autograd.grad((attend(*inputs, bias=bias) * upstream).sum(), bias),
        torch.autograd.grad(
            (regard.attention(*inputs, bias=bias, backend="torch") * upstream).sum(), bias
        ),
    ]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_it_has_first_and_second_gradients_and_adds_those_of_parts():
    inputs = draw((1, 2, 9, 4), (1, 2, 11, 4), (1, 2, 11, 3))

    def gradients(backend, dtype):
        numbers = [x.to(dtype).requires_grad_() for x in inputs]
        out = regard.attention(*numbers, causal=True, backend=backend)
        first = torch.autograd.grad(out.square().sum(), numbers, create_graph=True)
        return out, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), numbers)

    plain, exact = (gradients("torch", dtype) for dtype in (torch.float32, torch.float64))
    for x, y, z in zip(gradients("triton", torch.float32), plain, exact):
        rounding = 4 * torch.finfo(torch.float32).eps * z.abs().max()
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + rounding
    q, k, v = (x.detach() for x in inputs)
    out, rows = attend(q, k, v, return_statistics=True)
    found = regard.attention_gradients(q, k, v, out, rows, torch.ones_like(out), backend="triton")
    other = regard.attention_gradients(q, k, v, out, rows, torch.ones_like(out), backend="torch")
    for x, y in zip(found[:3], other):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_the_batch_changes_no_bit():
    q, k, v = draw((3, 2, 70, 8), (3, 2, 90, 8), (3, 2, 90, 8))
    v[0, 0, 3, 1] = np.nan  # another kernel computes that element
    whole = attend(q, k, v, causal=True)
    assert torch.equal(whole[1:2], attend(q[1:2], k[1:2], v[1:2], causal=True))
    (grad,) = draw((3, 2, 70, 8))
    grad[0, 0, 3, 1] = np.nan
    whole = first_gradients((q, k, v), "triton", grad, causal=True)
    alone = first_gradients([x[1:2] for x in (q, k, v)], "triton", grad[1:2], causal=True)
    for x, y in zip(whole, alone):
        assert torch.equal(x[1:2], y)


FUSED = {
    "plain": {}, "causal": {"causal": True},
    "lengths": {"key_lengths": torch.tensor([97, 5, 60])},
    "mask": {"mask": torch.eye(97) == 0},
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("name", FUSED)
def test_what_torchs_fused_operator_has_wrong_is_computed_anew(name):
    q, k, v = draw((3, 4, 97, 8), (3, 2, 97, 8), (3, 2, 97, 8))
    plain = regard.attention(q, k, v, **FUSED[name], backend="fused")
    expected = regard.attention(q, k, v, **FUSED[name], backend="torch")
    torch.testing.assert_close(plain, expected, rtol=2e-6, atol=2e-6)
    v[1, 0, 90, 1], k[2, 1, 96] = np.nan, 2e37  # products that may overflow
    found = regard.attention(q, k, v, **FUSED[name], backend="fused")
    expected = regard.attention(q, k, v, **FUSED[name], backend="torch")
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert torch.equal(found[0], plain[0])


@pytest.mark.interpreted
def test_results_lie_in_memory_as_a_compiler_is_told(monkeypatch):
    fused = torch_ops.scaled_dot_product_attention

    def in_other_order(*arguments, **options):
        return fused(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch_ops, "scaled_dot_product_attention", in_other_order)
    inputs = draw(*3 * [(2, 40, 4, 8)])
    for q, k, v in (inputs, [x.transpose(1, 2) for x in inputs]):
        call = regard._operator.attention.read_call(q, k, v, causal=True)
        found, expected = strides(triton_ops._fuse, *torch_ops.pack(call))
        assert found == expected
        bias = torch.zeros(call.sizes[3], call.sizes[4])
        call = regard._operator.attention.read_call(q, k, v, bias=bias)
        statistics = triton_ops.forward(call)
        given = statistics[0], *statistics, *torch_ops.pack(call)
        for needed in (7, 15):  # without the bias, and with it
            found, expected = strides(triton_ops._backward, needed, *given)
            assert found == expected


@pytest.mark.interpreted
def test_weights_and_gradients_of_fused_calls_are_those_of_triton():
    q, k, v = draw(*3 * [(1, 2, 40, 8)])
    _, own = regard.attention(q, k, v, causal=True, backend="fused", return_weights=True)
    _, other = attend(q, k, v, causal=True, return_weights=True)
    assert torch.equal(own.entropy(), other.entropy())
    with pytest.raises(regard.UnsupportedError, match="other bits in every run; the triton"):
        regard.attention(q.requires_grad_(), k, v, backend="fused")
    with pytest.raises(regard.UnsupportedError, match="does not mean the same"):
        regard.attention(q.detach(), k, v, softcap=2.0, backend="fused")
    with pytest.raises(regard.UnsupportedError, match="weights alone are asked for"):
        regard.AttentionWeights(q, k, backend="fused")


@pytest.mark.interpreted
def test_on_a_device_auto_takes_the_fused_operator_for_plain_outputs_then_triton(monkeypatch):
    q, k, v = (x.to("meta") for x in draw(*3 * [(1, 2, 40, 8)]))
    call = regard._operator.attention.read_call(q, k, v, causal=True)
    capped = regard._operator.attention.read_call(q, k, v, softcap=2.0)
    wide = regard._operator.attention.read_call(*3 * [torch.zeros(1, 2, 40, 300, device="meta")])
    assert [choose(x, "auto").name for x in (call, capped, wide)] == ["torch"] * 3
    monkeypatch.setattr(backend_module, "DEVICES", ("meta",))
    assert choose(call, "auto").name == "fused"
    assert choose(capped, "auto").name == "triton"
    assert choose(call.without_value(), "auto").name == "triton"
    assert choose(wide, "auto").name == "torch"
    q.requires_grad_()
    assert choose(regard._operator.attention.read_call(q, k, v), "auto").name == "triton"
    on_cpu = regard._operator.attention.read_call(*3 * [torch.zeros(1, 2, 40, 8)])
    assert choose(on_cpu, "auto").name == "kernel"


B, H, D = 2, 4, 8
DEVICE_CALLS = {
    "plain": lambda x: x.attend(),
    "causal": lambda x: x.attend(causal=True),
    "mask": lambda x: x.attend(mask=x.mask),
    "window": lambda x: x.attend(causal=True, window=(5, 3)),
    "bias": lambda x: x.attend(bias=x.bias),
    "softcap": lambda x: x.attend(softcap=3.0, causal=True),
    "sinks": lambda x: x.attend(sinks=x.sinks),
    "dropout": lambda x: x.attend(dropout=0.1, seed=3),
    "statistics": lambda x: x.attend(causal=True, return_statistics=True),
    "gradient": lambda x: x.differentiate(causal=True),
    "gradient, window": lambda x: x.differentiate(window=(5, 3)),
    "gradient, sinks": lambda x: x.differentiate(sinks=x.sinks),
    "lse": lambda x: x.weights.lse,
    "entropy": lambda x: x.weights.entropy(),
    "received": lambda x: x.weights.received(),
    "topk": lambda x: x.weights.topk(3),
    "strongest": lambda x: x.weights.strongest(5),
    "pool": lambda x: x.weights.pool((9, 7)),
    "masses": lambda x: x.weights.pool((9, 7), how="mass"),
    "summary": lambda x: x.weights.summary(topk=3, strongest=5, pool=(5, 5)),
    "decode": lambda x: regard.attention(x.q[:, :, :1], x.k, x.v),
    "segments": lambda x: x.attend(segments=x.ids),
    "intervals": lambda x: x.attend(intervals=(x.ids, x.ids + 5)),
    "key lengths": lambda x: x.attend(key_lengths=x.lengths),
    "lengths and order": lambda x: x.attend(key_lengths=x.lengths, causal=True),
    "starts": lambda x: x.attend(query_start=x.lengths, causal=True),
    "gradient, segments": lambda x: x.differentiate(segments=x.ids),
    "gradient, lengths": lambda x: x.differentiate(key_lengths=x.lengths, causal=True),
    "summary, segments": lambda x: x.ask(segments=x.ids),
    "summary, intervals": lambda x: x.ask(intervals=(x.ids, x.ids + 5)),
    "summary, lengths": lambda x: x.ask(key_lengths=x.lengths, causal=True),
    "summary, mask": lambda x: x.ask(mask=x.mask),
    "summary, sinks": lambda x: x.ask(sinks=x.sinks),
    "scale": lambda x: x.attend(scale=0.3, causal=True),
    "part": lambda x: x.attend(query_start=3, query_step=2, key_start=1, key_step=2, causal=True),
    "output dtype": lambda x: x.halved().attend(causal=True, output_dtype="float32"),
    "gradient, bias": lambda x: x.differentiate(bias=x.bias),
    "distance": lambda x: x.weights.distance(),
    "received, largest": lambda x: x.weights.received(how="max"),
    "max score": lambda x: x.weights.max_score,
    "rows": lambda x: x.weights[0, 1, 3],
}
EDITS = [regard.Edit(0, slice(2, 5), slice(0, 3), 0.0), regard.Edit(1, slice(3), slice(2), 2.0)]
# What the host was given and the device needs is uploaded, once: for edits, in each pass.
UPLOADS = {
    "segments": (1, lambda x: x.attend(segments=stand.on_cpu(x.ids))),
    "intervals": (2, lambda x: x.attend(intervals=(stand.on_cpu(x.ids), stand.on_cpu(x.ids) + 5))),
    "key lengths": (1, lambda x: x.attend(key_lengths=stand.on_cpu(x.lengths))),
    "lengths and order": (0, lambda x: x.attend(key_lengths=stand.on_cpu(x.lengths), causal=True)),
    "edits": (1, lambda x: x.attend(edits=EDITS)),
    "gradient, edits": (2, lambda x: x.differentiate(edits=EDITS)),
    "summary, edits": (2, lambda x: x.ask(edits=EDITS)),
}


class OnDevice:
    """Tensors of one length, on the device that is none."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: stand.on_device(torch.randn(shape, generator=generator))  # noqa: E731
        self.q, self.k, self.v, self.grad = (draw(1, H, length, D) for _ in range(4))
        self.mask = stand.on_device(torch.rand(length, length, generator=generator) < 0.5)
        self.bias, self.sinks = draw(H, 1, length), draw(H)
        self.ids = stand.on_device(torch.arange(length) // 9)
        self.lengths = stand.on_device(torch.tensor([length - 7]))

    def halved(self):
        self.q, self.k, self.v = (x.half() for x in (self.q, self.k, self.v))
        return self

    def attend(self, **options):
        return regard.attention(self.q, self.k, self.v, **options)

    def differentiate(self, **options):
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        return torch.autograd.grad(regard.attention(*leaves, **options), leaves, self.grad)

    @property
    def weights(self):
        return regard.AttentionWeights(self.q, self.k, causal=True)

    def ask(self, **options):
        weights = regard.AttentionWeights(self.q, self.k, **options)
        return weights.summary(topk=3, strongest=5, pool=(5, 5))


def test_every_option_is_among_the_calls_on_a_device():
    asked, x = set(), mock.MagicMock()
    for method in (x.attend, x.differentiate, x.ask, x.halved().attend):
        method.side_effect = lambda **options: asked.update(options)
    with mock.patch.object(regard, "attention"), mock.patch.object(stand, "on_cpu"):
        for call in (*DEVICE_CALLS.values(), *(call for _, call in UPLOADS.values())):
            call(x)
    assert asked - {"return_statistics"} == {option.name for option in OPTIONS_OF_ATTENTION}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", DEVICE_CALLS)
def test_on_a_device_the_host_never_waits_and_launches_do_not_grow_with_the_length(name):
    launches = []
    for length in (40, 130):  # one tile of rows, and several
        x = OnDevice(length)
        with stand.device() as seen, stand.with_triton():
            DEVICE_CALLS[name](x)
        assert sum(seen.waits.values()) == 0, seen.waits
        assert sum(seen.uploads.values()) == 0, seen.uploads
        launches.append(seen.launches)
    assert launches[0] == launches[1], seen.operations


@pytest.mark.interpreted
def test_documents_in_order_bound_the_keys_of_their_queries():
    ids = torch.tensor([[0, 0, 1, 4, 4], [1, 0, 1, 0, 2]])
    asked = torch.tensor([[4, 1, 3], [0, 2, 0]])
    q, k = draw((2, 1, 3, 4), (2, 1, 5, 4))
    call = regard._operator.attention.read_call(q, k, k, segments=(asked, ids))
    low, high = triton_ops.bounds(call)
    assert low.tolist() == [[3, 2, 3], [0, 0, 0]]
    assert high.tolist() == [[5, 3, 3], [5, 5, 5]]
    windowed = regard._operator.attention.read_call(q, k, k, segments=(asked, ids), window=(0, 1))
    assert triton_ops.bounds(windowed)[1].tolist() == [[4, 3, 3], [4, 5, 5]]


@pytest.mark.interpreted
@pytest.mark.parametrize("name", UPLOADS)
def test_what_the_host_was_given_is_uploaded_once_and_it_does_not_wait(name):
    expected, call = UPLOADS[name]
    x = OnDevice(70)
    with stand.device() as seen, stand.with_triton():
        call(x)
    assert sum(seen.waits.values()) == 0, seen.waits
    assert sum(seen.uploads.values()) == expected, seen.uploads


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["key_lengths", "query_start"])
def test_integers_on_a_device_that_are_out_of_range_fail_there(name):
    x, most = OnDevice(40), {"key_lengths": 40, "query_start": 2**53}[name]
    for n in (-1 if name == "key_lengths" else -most - 1, most + 1):
        far = stand.on_device(torch.tensor([n]))
        with (
            stand.device(), stand.with_triton(),
            pytest.raises(RuntimeError, match=f"{name} must be .*{most}"),
        ):  # fmt: skip
            x.attend(**{name: far}, causal=True, softcap=2.0)
        with stand.device(), stand.with_triton(), pytest.raises(RuntimeError, match=name):
            x.ask(**{name: far}, causal=True)


@pytest.mark.interpreted
def test_a_plain_call_on_a_device_is_the_fused_operator_and_a_masked_one_some_launches_more():
    of_mask = ["zeros", "sizes", "intervals", "attend"]
    for options, others in (({}, []), ({"causal": True}, of_mask)):
        x = OnDevice(40)
        with stand.device() as seen, stand.with_triton():
            x.attend(**options)
        assert seen.operations == dict.fromkeys(["scaled_dot_product_attention", *others], 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("name", DEVICE_CALLS)
def test_a_cuda_graph_holds_every_call(name):
    x, graph = OnDevice(300), torch.cuda.CUDAGraph()
    for attribute, y in vars(x).items():
        setattr(x, attribute, stand.on_cpu(y).cuda())
    expected = stand.leaves(DEVICE_CALLS[name](x))  # which compiles
    with torch.cuda.graph(graph):
        found = stand.leaves(DEVICE_CALLS[name](x))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not INSTALLED, reason="it reads what triton is given")
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    current, seen = ["another"], []

    @contextlib.contextmanager
    def device(one):
        current.append(one)
        yield
        current.pop()

    monkeypatch.setattr(torch, "get_device_module", lambda one: SimpleNamespace(device=device))
    x = torch.zeros(1, device="meta")
    triton_ops.launch({(1,): lambda *_, **__: seen.append(current[-1])}, (1,), x)
    assert seen == [x.device]
    assert current == ["another"]


@pytest.mark.skipif(not INSTALLED, reason="it reads what triton is given")
def test_kernels_are_launched_as_they_are_built():
    given = {}
    kernel = {(3,): lambda *arguments, **options: given.update(options, arguments=arguments)}
    x = torch.zeros(1)
    triton_ops.launch(kernel, (3,), x, 7, BM=16)
    unfused = {"enable_fp_fusion": False}  # as the script that reads their code
    assert given == {"arguments": (x, 7), "BM": 16, "INTERPRETED": False, **unfused}


def asked_of_every_kernel(length):
    """Calls whose only difference is the length."""
    q, k, v = (torch.ones(2, 4, length, 32) for _ in range(3))
    places, ends = torch.zeros(2, length, dtype=torch.long), torch.full((2, length), 5)
    more = {"intervals": (places, ends), "segments": (places, places), "causal": True}
    more["key_lengths"] = torch.tensor([length, 9])
    for few in (length, length - 1, 1):
        own = {"intervals": tuple(x[:, :few] for x in (places, ends))}
        own["segments"] = places[:, :few], places
        leaves = [x.clone().requires_grad_() for x in (q[:, :, :few], k, v)]
        torch.autograd.grad(attend(*leaves, **more | own).sum(), leaves)
        queries = q[:, :, :few].clone()
        weights = regard.AttentionWeights(queries, k, **more | own, backend="triton")
        weights.summary(topk=3, strongest=4, pool=(1, 1))
        weights.pool((1, 1), how="mass")
        weights[...]
        weights[:, 1:3, :, few // 2 :]


@pytest.mark.skipif(not INSTALLED, reason="it reads what triton is given")
def test_no_kernel_is_compiled_anew_for_another_length(monkeypatch):
    """Triton does for an integer that is 1, or a multiple of 16, if it may specialise on it."""
    variants, results = {}, ("maximum", "total", "out", "values", "keys", "row_largest")

    def launch(kernel, grid, *arguments, **options):
        for parameter, x in zip(kernel.params, arguments):
            if parameter.name.removesuffix("_ptr") in results and x.is_floating_point():
                x.numpy(force=True).fill(1)  # it is not computed
            elif type(x) is int and not parameter.do_not_specialize:
                own = variants.setdefault((kernel.__name__, parameter.name), {})
                own.setdefault(length, set()).add((x == 1, x % 16 == 0))

    monkeypatch.setattr(backend_module.Triton, "refuses", lambda backend, call: None)
    for module in (triton_ops, triton_backward, triton_reduce):
        monkeypatch.setattr(module, "launch", launch)
    lengths = 640, 641, 655
    for length in lengths:
        asked_of_every_kernel(length)
    assert len({kernel for kernel, _ in variants}) == 12  # all
    assert {place for place, own in variants.items() if own[640] != own[641]} == set()
    assert {place for place, own in variants.items() if own[641] != own[655]} == set()


def compile_script(monkeypatch):
    path = Path(__file__).parent.parent / "scripts" / "compile_kernels"
    loader = importlib.machinery.SourceFileLoader("compile_kernels", str(path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    script = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("compile_kernels", loader)
    )
    loader.exec_module(script)
    return script


def to_ir(source, target):
    """What Triton makes of the Python of a kernel, for every GPU the same: a string."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": 4})
    more = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(target, options, *more, context))


@pytest.mark.skipif(not INSTALLED, reason="it compiles with triton")
def test_every_kernel_is_python_that_triton_knows_with_all_options_and_any_number_being_1(
    monkeypatch,
):
    """It makes constants of integers that are 1, and these have no methods."""
    script = compile_script(monkeypatch)
    for kernel, clean in itertools.product(script.KERNELS, (False, True)):
        source = script.source(kernel, "bf16", 16, dict.fromkeys(("BM", "BN", "BD", "BDV"), 16))
        for n, parameter in enumerate(kernel.params):
            name = parameter.name
            if name.startswith("HAS_") or name in ("CLEAN", "EACH", "CAUSAL"):
                source.constants[n,] = clean if name in ("CLEAN", "EACH", "HAS_SIZES") else True
            elif name in ("NR", "NC", "KEPT", "MOST"):
                source.constants[n,] = 2
            elif source.signature[name] == "i32" and not parameter.do_not_specialize:
                source.signature[name], source.constants[n,] = "constexpr", 1
                source.attrs.pop((n,), None)
        assert f"tt.func public @{kernel.__name__}" in to_ir(source, script.TARGETS["sm_90"][0])


@pytest.mark.skipif(not INSTALLED, reason="it compiles with triton")
def test_the_script_builds_for_no_number_that_is_not_specialised_on(monkeypatch):
    script = compile_script(monkeypatch)
    for kernel in script.KERNELS:
        source = script.source(kernel, "bf16", 64, {})
        known = {kernel.params[n].name for (n,) in (*source.attrs, *source.constants)}
        assert not known & {x.name for x in kernel.params if x.do_not_specialize}


def jit_kernels(*modules):
    """Those that the host launches: they return nothing."""
    functions = (x for module in modules for x in vars(module).values())
    return {
        x
        for x in functions
        if hasattr(x, "params") and x.fn.__annotations__.get("return") == "None"
    }


@pytest.mark.skipif(not INSTALLED, reason="it compiles with triton")
def test_the_script_builds_every_kernel(monkeypatch):
    script = compile_script(monkeypatch)
    modules = triton_jit, triton_gradients, triton_split, triton_weights
    assert jit_kernels(*modules) == set(script.KERNELS)


@pytest.mark.skipif(not INSTALLED, reason="it compiles with triton")
def test_kernels_are_built_for_gpus_that_are_not_there(monkeypatch, tmp_path):
    script = compile_script(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    build = functools.partial(script.faults, script.triton_jit.attend, "bf16", 64, "sm_90")
    assert build() == []
    monkeypatch.setattr(script, "MOST_SPILLED", -1)
    monkeypatch.setitem(script.TARGETS, "sm_90", (script.TARGETS["sm_90"][0], "UTCHMMA"))
    monkeypatch.setattr(script.triton_jit, "WITHOUT_FUSION", {})
    assert build() == ["0 registers spilled in a loop", "no UTCHMMA", "products fused with sums"]
    monkeypatch.setitem(script.MEMORY, "sm_90", 1024)
    assert re.fullmatch(r"\d+ bytes shared", build()[0])


@pytest.mark.skipif(not INSTALLED, reason="it compiles with triton")
def test_a_kernel_that_adds_floats_in_no_order_is_found(monkeypatch, tmp_path):
    import triton
    import triton.language as tl

    @triton.jit
    def planted(out_ptr, Lq, BM: tl.constexpr):
        tl.atomic_add(out_ptr + Lq, 1.0, sem="relaxed")

    script = compile_script(monkeypatch)
    monkeypatch.setattr(script, "WITHOUT_PRODUCT", (planted,))
    monkeypatch.setattr(script, "NOT_AHEAD", (planted,))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert script.faults(planted, "bf16", 64, "sm_90") == ["floats added in no order"]


def check_on_a_device(call, own=fuzz.check):
    with stand.device(), stand.with_triton():
        return own(call)


@pytest.mark.interpreted
@pytest.mark.xdist_group("interpreted calls")
@pytest.mark.parametrize("words", ["--calls 120 --seed 5", "--calls 25 --seed 2 --device stand:0"])
def test_random_calls_are_within_the_bounds_of_every_rounding(words, monkeypatch, capsys):
    calls = ["--backend", "triton", *words.split()]
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *calls])
    for name in fuzz.ASKED:
        monkeypatch.setitem(fuzz.ASKED, name, None)  # and back
    if "stand" in words:
        monkeypatch.setattr(fuzz, "check", check_on_a_device)
    status, said = fuzz.main(), capsys.readouterr().out
    assert status == 0, said
    served = re.findall(r"(\d+) of (\d+) (?:output|gradient|weights)", said)
    assert len(served) == 3
    assert all(int(n) >= 0.9 * int(asked) for n, asked in served), said  # no wider heads than 256


HASTENED = """
import os, runpy, sys
import interpreter
interpreter.hasten()
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


BITS = """
import hashlib, os, sys, torch, regard, interpreter
if os.fork():  # the child computes as Triton does, before this process
    assert os.wait()[1] == 0
    interpreter.hasten()
torch.manual_seed(0)
for dtype, options in ((torch.float32, {"causal": True, "dropout": 0.25, "seed": 3}),
                       (torch.bfloat16, {"window": (9, 4), "softcap": 5.0})):
    q, k, v = (torch.randn(1, 1, 19, 8).to(dtype).requires_grad_() for _ in range(3))
    out, w = regard.attention(q, k, v, **options, backend="triton", return_weights=True)
    found = [out, *torch.autograd.grad(out.sum(), (q, k, v)), w.received(), w.entropy()]
    found += [*w.topk(3), w.pool((7, 5), "max"), *w.effects(v.detach(), out.detach()).topk(2)]
    for x in found:
        print(hashlib.sha256(x.detach().contiguous().view(torch.uint8).numpy()).hexdigest())
"""


@pytest.mark.interpreted
def test_the_hastened_interpreter_gives_the_bits_of_triton_s_own():
    done = subprocess.run(
        [sys.executable, "-c", BITS], cwd=Path(__file__).parent, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    printed = done.stdout.splitlines()
    assert len(printed) == 2 * 22
    assert printed[22:] == printed[:22]


@pytest.mark.interpreted
def test_the_benchmark_of_gpus_runs_whole_without_one(tmp_path):
    tests = Path(__file__).parent
    script, path = tests.parent / "benchmarks" / "gpu.py", tmp_path / "gpu.json"
    parts = "forward", "picture", "decode", "backward", "graphs"
    words = [script, path, "--quick", "--device", "cpu", "--only", *parts]
    done = subprocess.run(
        [sys.executable, "-c", HASTENED, *words], cwd=tests, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert [len(table["rows"]) for table in found["tables"]] == [2, 2, 1, 2, 1, 4]
    assert found["failed"] == {}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The benchmark's module, and what makes a bench of it that has some minutes."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    module = importlib.import_module("gpu")
    options = {"device": "cpu", "quick": True, "json": tmp_path / "gpu.json", "threads": 1}
    yield module, lambda minutes: module.Bench(SimpleNamespace(**options, minutes=minutes))
    for name in ("gpu", "common", "processors"):
        sys.modules.pop(name, None)


def fail():
    raise RuntimeError("no such kernel")


def test_the_benchmark_of_gpus_writes_each_row_at_once_and_goes_on_where_one_fails(gpu, tmp_path):
    bench = gpu[1](9.0)
    bench.report.table("Table", "", "ms")
    rows = {"first": lambda: (["1"], {}), "second": fail, "third": lambda: (["3"], {})}
    for n, (name, measure) in enumerate(rows.items()):
        bench.row(name, measure)
        found = json.loads((tmp_path / "gpu.json").read_text())
        assert [row["cells"][0] for row in found["tables"][0]["rows"]] == ["first", "third"][
            : n or 1
        ]
    assert found["failed"] == {"second": "RuntimeError: no such kernel"}


def test_the_benchmark_of_gpus_begins_no_row_and_no_part_after_its_minutes(gpu, tmp_path):
    module, make = gpu
    bench = make(0.3)  # of which it keeps a third of a minute
    bench.report.table("Table", "", "ms")
    bench.row("late", fail)
    module.measure(bench, ["forward"], {"forward": lambda bench: fail()})
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["left_out"] == ["late", "forward"]
    assert found["failed"] == {}


def test_the_benchmark_of_gpus_goes_on_where_a_part_fails(gpu, tmp_path):
    module, make = gpu
    parts = {"forward": lambda bench: fail(), "decode": lambda bench: bench.report.table("D", "")}
    module.measure(make(9.0), ["forward", "decode"], parts)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failed"] == {"forward": "RuntimeError: no such kernel"}
    assert [table["title"] for table in found["tables"]] == ["D"]


REFUSED = {
    "it takes torch tensors": (np.zeros((2, 3), np.float32), {}),
    "float64 is for the torch backend": (torch.zeros(2, 3, dtype=torch.float64), {}),
    "head sizes D and Dv go up to 256": (torch.zeros(2, 257), {}),
    "scale is -1e\\+39, and it computes in float32": (torch.zeros(2, 3), {"scale": -1e39}),
    "softcap is 1e\\+38, and it computes in float32": (torch.zeros(2, 3), {"softcap": 1e38}),
    r"heads go up to 65535, these are \(65536, 1\)": (torch.zeros(65536, 1, 2, 3), {}),
    r"heads go up to 65535, these are \(1, 65536\)": (torch.zeros(65536, 2, 3), {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses_is_said_in_words(words):
    x, options = REFUSED[words]
    with pytest.raises(regard.UnsupportedError, match=words):
        attend(x, x, x, **options)


def test_tensors_on_the_cpu_are_refused():
    x = torch.zeros(2, 3)
    needed = "set TRITON_INTERPRET=1" if INSTALLED else "triton is not installed"
    with pytest.raises(regard.UnsupportedError, match=needed):
        attend(x, x, x)


def test_without_triton_and_on_other_devices_it_says_so(monkeypatch):
    call = regard._operator.attention.read_call(*3 * [torch.zeros(2, 3, device="meta")])
    assert "Triton has no kernels for meta" in by_name("triton").refuses(call)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(regard.UnsupportedError, match="triton is not installed"):
        attend(*3 * [torch.zeros(2, 3)])


@pytest.mark.interpreted
def test_tensors_that_torch_has_yet_to_negate():
    """Whose memory holds the numbers before that."""
    q, k, v, x, y = draw(*5 * [(1, 2, 9, 4)])
    negated = torch.complex(x, y).conj().imag
    assert negated.is_neg()
    for inputs in ((negated, k, v), (q, k, negated)):
        with pytest.raises(regard.UnsupportedError, match=r"yet to negate a tensor; see resolve"):
            attend(*inputs)
    out, rows = attend(q, k, v, return_statistics=True)
    found, expected = (
        regard.attention_gradients(q, k, v, out, rows, grad, backend="triton")
        for grad in (negated, negated.resolve_neg())
    )
    assert all(map(torch.equal, found[:3], expected))


@pytest.mark.interpreted
def test_transforms_and_forward_mode_are_refused(monkeypatch):
    x = torch.randn(1, 3, 4)
    with pytest.raises(regard.UnsupportedError, match=r"transforms of torch\.func"):
        torch.func.grad(lambda y: attend(y, y, y).sum())(x)
    monkeypatch.setattr(torch.autograd.forward_ad, "_current_level", 0)  # as in dual_level()
    with pytest.raises(regard.UnsupportedError, match="no forward-mode derivative"):
        attend(x, x, x)
