"""Effects of token pairs against the dense formula in float64, and against real cuts."""

import copy
import functools
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import regard
from definition import define, visible_pairs
from recordings import numbers
from regard import AttentionWeights
from strategies import calls
from traced import peak_bytes
from ways import NAMED, Way, by_ways

B, Hq, Hkv, Lq, Lk, D, Dv = 2, 4, 2, 23, 26, 8, 5
PLAIN = Way("numpy", "kernel")  # the way of the tests that need no more than one
TWO = PLAIN, Way("torch", "torch")  # those with code of their own
KINDS = ["knockout", "contribution", "relevance", "gradient", "change"]
SHOWN = {"mask", "causal", "window", "key_lengths", "segments", "intervals", "query_start"}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 2), "causal": False},
    "lengths": {"causal": True, "key_lengths": np.array([26, 13])},
    "places": {"causal": True, "query_start": np.array([-3, 5])},
    "segments": {"segments": (np.arange(Lq) // 7, np.arange(Lk) // 7)},
    "intervals": {"intervals": (np.arange(Lq) % 12, 26 - np.arange(2 * Lq).reshape(2, Lq) // 3)},
    "mask": {"mask": np.random.default_rng(5).random((Hq, Lq, Lk)) < 0.6},
    "bias": {"bias": 2 * numbers(1, Lk, seed=6)},
    "sinks": {"sinks": numbers(Hq, seed=7), "causal": True},
    "softcap": {"softcap": 1.5, "scale": 0.7},
    "edits": {"edits": [regard.Edit(heads=1, queries=slice(3, 20), keys=slice(2, 9), factor=0.2)]},
}


def operands(dtype=np.float64):
    q, k = 3 * numbers(B, Hq, Lq, D), numbers(B, Hkv, Lk, D, seed=1)
    v, g = numbers(B, Hkv, Lk, Dv, seed=2), numbers(B, Hq, Lq, Dv, seed=3)
    return tuple(x.astype(dtype) for x in (q, k, v, g))


def dense(kind, q, k, v, g, **options):
    """The effects from whole matrices; 1 − w as the sum of the others."""
    w, lse = define(q, k, **options)
    seen = {name: x for name, x in options.items() if name in SHOWN}
    visible = visible_pairs(*q.shape[:2], q.shape[2], k.shape[2], **seen)
    v = np.broadcast_to(v, (len(q), *v.shape[1:])).repeat(q.shape[1] // v.shape[1], 1)
    w, v, g = w.astype(float), v.astype(float), g.astype(float)
    gv = np.where(visible, g @ v.swapaxes(-1, -2), 0)
    if kind in ("contribution", "relevance", "gradient"):
        return gv if kind == "gradient" else np.maximum(w * gv, 0 if kind == "relevance" else -9e99)
    of_sink = 0.0
    if (sinks := options.get("sinks")) is not None:
        with np.errstate(all="ignore"):
            of_sink = np.where(np.isinf(lse), 0, np.exp(sinks[:, None] - lse))[..., None]
    others = np.broadcast_to(1 - np.eye(w.shape[-1]), (*w.shape, w.shape[-1]))  # j, k
    rest = (w[..., None, :] * others).sum(-1) + of_sink
    rest[rest == 0] = np.inf  # the output is 0 then
    if kind == "knockout":
        left = (w * gv)[..., None, :] * others
        return np.where(visible, w * (left.sum(-1) / rest - gv), 0)
    left = np.einsum("bhijk,bhkd->bhijd", w[..., None, :] * others, v) / rest[..., None]
    return np.where(visible, w * np.linalg.norm(left - v[:, :, None], axis=-1), 0)


@functools.cache
def exact_of(kind, name):
    return dense(kind, *operands(), **OPTIONS[name])


def scale_of(v, g):
    """The largest size that a product g·v may have."""
    return np.linalg.norm(g, axis=-1).max() * np.linalg.norm(v, axis=-1).max()


def effects_by(way, kind, q, k, v, g, output=None, **options):
    q, k, v, g = (way.convert(x) for x in (q, k, v, g))
    options = {name: way.convert(x) for name, x in options.items()}
    weights = AttentionWeights(q, k, backend=way.backend, **options)
    return weights.effects(v, None if kind == "change" else g, kind, output)


@by_ways(*TWO)
@pytest.mark.parametrize("name", OPTIONS)
def test_effects_are_those_of_the_dense_formula(name, way):
    for kind in KINDS if way == PLAIN else ("knockout", "change"):
        exact = exact_of(kind, name)
        found = np.asarray(effects_by(way, kind, *operands(), **OPTIONS[name]))
        np.testing.assert_allclose(found, exact, atol=1e-12 * scale_of(*operands()[2:]), rtol=0)


@by_ways(*NAMED)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_within_a_millionth(kind, way):
    given_ = operands(np.float32)
    exact = dense(kind, *given_, causal=True)
    effects = effects_by(way, kind, *given_, causal=True)
    assert effects.dtype == (torch.float32 if way.library == "torch" else np.float32)
    error = abs(np.asarray(effects, float) - exact)
    assert error.max() < 1e-6 * scale_of(*given_[2:])
    again = np.asarray(effects)
    np.testing.assert_array_equal(again, np.asarray(effects))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@by_ways(Way("torch", "kernel"), Way("torch", "torch"))
def test_narrow_dtypes_give_effects_in_float32(dtype, way):
    narrow = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in operands()]
    exact = dense("knockout", *(x.double().numpy() for x in narrow), causal=True)
    weights = AttentionWeights(*narrow[:2], causal=True, backend=way.backend)
    found = weights.effects(*narrow[2:])[...]
    assert found.dtype == torch.float32
    half = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    scale = scale_of(*(x.double().numpy() for x in narrow[2:]))
    assert np.abs(found.double().numpy() - exact).max() < half * scale
    wide = weights.effects(*(x.float() for x in narrow[2:]))[...]  # of other dtypes than the query
    np.testing.assert_array_equal(found, wide)


def cut(b, h, i, j, q, k, v, **options):
    """The output once a pair is cut, and its row renormalises."""
    mask = np.broadcast_to(options.pop("mask", True), (*q.shape[:3], k.shape[2])).copy()
    mask[b, h, i, j] = False
    return regard.attention(q, k, v, mask=mask, backend="reference", **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_knockout_is_what_cutting_the_pair_does_to_a_linear_loss(name):
    q, k, v, g = operands()
    options = OPTIONS[name]
    before = regard.attention(q, k, v, backend="reference", **options)
    weights = AttentionWeights(q, k, **options)
    knockout, change = weights.effects(v, g), weights.effects(v, kind="change")
    rng = np.random.default_rng(0)
    for b, h, i in [(0, 0, 0), (1, 3, Lq - 1), *zip(*(rng.integers(0, n, 4) for n in (B, Hq, Lq)))]:
        for j in rng.integers(0, Lk, 5):
            after = cut(b, h, i, j, q, k, v, **options)
            assert np.isclose(knockout[b, h, i, j], (g * (after - before)).sum(), atol=1e-11)
            moved = np.linalg.norm(after - before)
            assert np.isclose(change[b, h, i, j], moved, atol=1e-7 * (moved + 1))


@settings(max_examples=25)
@given(calls(min_length=1))
def test_a_knockout_is_the_cut_whatever_the_options(call):
    (q, k, v), options = call
    g = np.random.default_rng(1).standard_normal((*q.shape[:3], v.shape[3]))
    before = regard.attention(q, k, v, backend="reference", **options)
    effects = np.asarray(AttentionWeights(q, k, **options).effects(v, g))
    rng = np.random.default_rng(2)
    b, h, i, j = (int(rng.integers(0, n)) for n in effects.shape)
    right = (g * (cut(b, h, i, j, q, k, v, **options) - before)).sum()
    assert np.isclose(effects[b, h, i, j], right, rtol=1e-9, atol=1e-11)


def test_the_gradient_is_that_of_the_weights():
    q, k, v, g = (torch.from_numpy(x) for x in operands())
    w = AttentionWeights(q, k, causal=True)
    dense_w = w[...].requires_grad_()
    output = dense_w @ v.repeat_interleave(2, 1)
    (right,) = torch.autograd.grad((output * g).sum(), dense_w)
    seen = ~np.isnan(w.pool((Lq, Lk)).numpy())
    np.testing.assert_allclose(w.effects(v, g, "gradient")[...][seen], right[seen], atol=1e-12)


@by_ways(*NAMED)
def test_knockouts_are_exact_where_a_weight_is_almost_1(way):
    """In float32 1 − w would be a multiple of 6e-8, and o − v noise."""
    q = np.array([[[1.0]], [[0.5]]], np.float32)[:, None]  # (2, 1, 1, 1)
    k = np.zeros((2, 1, 20, 1), np.float32)
    k[:, :, 7] = 40.0
    v, g = numbers(2, 1, 20, 3, dtype=np.float32, seed=1), numbers(2, 1, 1, 3, seed=2)
    g = g.astype(np.float32)
    for kind in ("knockout", "change"):
        exact = dense(kind, q, k, v, g, scale=1.0)
        found = np.asarray(effects_by(way, kind, q, k, v, g, scale=1.0))
        np.testing.assert_allclose(found[..., 7], exact[..., 7], rtol=2e-6)
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=1e-22)


@pytest.mark.parametrize("kind", ["knockout", "change"])
@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [3, 30, 100])
def test_two_equal_weights_leave_each_other(size, dtype, backend, kind):
    """Each of them may be rounded to a little more than 1/2."""
    q, k, v, g = (torch.from_numpy(numbers(1, 1, n, 4, seed=n)) for n in (64, 48, 49, 65))
    k[:, :, 1::2] = k[:, :, ::2]
    arrays = size * q, size * k, v[:, :, :48], g[:, :, :64]
    q, k, v, g = (x.to(getattr(torch, dtype)) for x in arrays)
    weights = AttentionWeights(q, k, backend=backend)
    found = weights.effects(v, None if kind == "change" else g, kind=kind)[0, 0].double()
    w, v, g = (x[0, 0].double() for x in (weights[...], v, g))
    for i, row in enumerate(w):
        for key in row.argsort(descending=True)[:2]:
            others = torch.arange(48) != key
            if row[others].sum() < 0.4:
                continue
            left = row[others] @ v[others] / row[others].sum() - v[key]
            right = row[key] * (left.norm() if kind == "change" else g[i] @ left)
            torch.testing.assert_close(found[i, key], right, rtol=1e-5, atol=3e-6)


@by_ways(*NAMED)
def test_a_pair_alone_in_its_row_leaves_nothing(way):
    q, k, v, g = operands()
    output = regard.attention(q, k, v, causal=True, window=(0, 0))
    for kind, right in (
        ("knockout", -(g * output).sum(-1)),
        ("change", np.linalg.norm(output, axis=-1)),
    ):
        found = np.asarray(effects_by(way, kind, q, k, v, g, causal=True, window=(0, 0)))
        np.testing.assert_allclose(found.sum(-1), right, atol=1e-7)
        assert ((found != 0).sum(-1) == 1).all()
    # Beside it others are visible, but have no weight that float64 holds.
    far = np.array([0.0, 800.0, 0.0])[:, None]
    weights = AttentionWeights(*(way.convert(x) for x in (np.ones((1, 1)), far)), scale=1.0)
    value, gradient = numbers(3, 2, seed=4), numbers(1, 2, seed=5)
    found = np.asarray(weights.effects(*(way.convert(x) for x in (value, gradient))))
    np.testing.assert_allclose(found, [[0, -gradient[0] @ value[1], 0]])


@by_ways(*TWO)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_masked_has_no_effect_be_it_nan(kind, way):
    q, k, v, g = operands()
    exact = dense(kind, q, k, v, g, key_lengths=14, query_start=-5, causal=True)
    v[:, :, 14:], v[:, :, 20] = np.nan, np.inf
    effects = effects_by(way, kind, q, k, v, g, key_lengths=14, query_start=-5, causal=True)
    np.testing.assert_allclose(np.asarray(effects), exact, atol=1e-7)
    assert not np.asarray(effects)[:, :, :5].any()  # rows that see nothing
    assert not np.asarray(effects)[..., 14:].any()
    pooled = np.asarray(effects.pool((Lq, Lk)))
    assert np.isnan(pooled[..., 14:]).all()
    assert np.isfinite(pooled[:, :, 22, :14]).all()


@by_ways(*NAMED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1.0, 30.0])  # of scores: weights below 1/2, and above
def test_the_first_key_has_no_effect_where_it_is_masked_be_it_nan(size, kind, way):
    q, k, v, g = operands()
    mask = np.ones((Lq, Lk), bool)
    mask[3:, 0] = False
    exact = dense(kind, size * q, k, v, g, mask=mask)[:, :, 3:]
    k[:, :, 0], v[:, :, 0] = np.nan, np.nan
    found = np.asarray(effects_by(way, kind, size * q, k, v, g, mask=mask))[:, :, 3:]
    np.testing.assert_allclose(found, exact, atol=1e-6)


def test_nan_in_a_gradient_stays_in_its_row():
    q, k, v, g = operands()
    g[1, 2, 3] = np.nan
    effects = AttentionWeights(q, k, causal=True).effects(v, g)
    whole = np.asarray(effects)
    assert np.isnan(whole[1, 2, 3, :7]).all()
    assert np.isnan(whole).sum() == 7
    assert np.isfinite(effects.strongest(5).value).all()
    assert np.isnan(effects.topk(2).values[1, 2, 3]).all()


@by_ways(*NAMED)
def test_questions_are_answered_with_signs(way):
    options = {"causal": True, "query_start": 2, "sinks": numbers(Hq, seed=7)}
    exact = dense("knockout", *operands(), **options)
    effects = effects_by(way, "knockout", *operands(), **options)
    check(effects.matrix(1, 2), exact[1, 2])
    if way != PLAIN:
        return
    for rows, columns in [(None, None), (slice(3, 20), slice(1, 24, 3)), (slice(1, 22, 4), None)]:
        part, whole = effects.part(rows, columns), exact[..., rows or slice(None), :]
        check(part, whole[..., columns or slice(None)])
    check(effects.head(-1), exact[:, 3])
    check(effects.head(1).matrix(1), exact[1, 1])


@by_ways(*TWO)
def test_questions_are_answered_in_blocks_of_rows(way, monkeypatch):
    monkeypatch.setattr(regard.PairMatrix, "_lowest", 5)
    monkeypatch.setattr(regard.PairMatrix, "_tallest", 5)
    exact = exact_of("knockout", "causal")
    effects = effects_by(way, "knockout", *operands(), causal=True)
    check(effects.matrix(0, 1), exact[0, 1])
    check(effects.head(2).part(slice(1, 22, 2), slice(2, 25)), exact[:, 2, 1:22:2, 2:25])


def check(found, whole):
    """Every question to a matrix of effects."""
    assert found.shape == whole.shape
    *axes, m, n = whole.shape
    np.testing.assert_allclose(np.asarray(found), whole, atol=1e-12)
    np.testing.assert_allclose(np.asarray(found[..., 2:9:3, -1]), whole[..., 2:9:3, -1], atol=1e-12)
    np.testing.assert_allclose(np.asarray(found[..., ::-2, :4]), whole[..., ::-2, :4], atol=1e-12)
    values, indices = (np.asarray(x) for x in found.topk(3))
    best = np.sort(abs(whole), -1)[..., ::-1][..., :3]
    np.testing.assert_allclose(abs(values), best, atol=1e-12)
    np.testing.assert_allclose(np.take_along_axis(whole, indices, -1), values, atol=1e-12)
    query, key, value = (np.asarray(x).reshape(-1, 6) for x in found.strongest(6))
    flat = whole.reshape(-1, m, n)
    for at, one in enumerate(flat):
        np.testing.assert_allclose(one[query[at], key[at]], value[at], atol=1e-12)
        ordered = np.sort(abs(one).reshape(-1))[::-1]
        np.testing.assert_allclose(abs(value[at]), ordered[:6], atol=1e-12)
    np.testing.assert_allclose(np.asarray(found.received()), whole.sum(-2), atol=1e-11)
    np.testing.assert_allclose(np.asarray(found.received("mean")), whole.mean(-2), atol=1e-12)
    at = abs(whole).argmax(-2)[..., None, :]
    largest = np.take_along_axis(whole, at, -2)[..., 0, :]
    np.testing.assert_allclose(np.asarray(found.received("max")), largest, atol=1e-12)
    top, mean = (np.asarray(x) for x in found.pool((5, 4), ("max", "mass")))
    seen = ~np.isnan(np.asarray(found.pool((m, n))))
    assert not whole[~seen].any()
    for r, c in np.ndindex(5, 4):
        rows = slice(r * m // 5, (r + 1) * m // 5)
        columns = slice(c * n // 4, (c + 1) * n // 4)
        bins, inside = whole[..., rows, columns], seen[..., rows, columns]
        bins, inside = (x.reshape(*axes, -1) for x in (bins, inside))
        with np.errstate(all="ignore"):
            right = np.where(inside.any(-1), bins.sum(-1) / inside.sum(-1), np.nan)
        np.testing.assert_allclose(mean[..., r, c], right, atol=1e-12)
        high = np.take_along_axis(bins, abs(bins).argmax(-1)[..., None], -1)[..., 0]
        np.testing.assert_allclose(top[..., r, c], np.where(inside.any(-1), high, np.nan))
    like = found[..., :1, :1]
    x, y = numbers(*axes, n, 2, seed=8), numbers(3, m, seed=9)
    x, y = (torch.from_numpy(z) if isinstance(like, torch.Tensor) else z for z in (x, y))
    np.testing.assert_allclose(np.asarray(found @ x), whole @ np.asarray(x), atol=1e-11)
    np.testing.assert_allclose(np.asarray(y @ found), np.asarray(y) @ whole, atol=1e-11)
    np.testing.assert_allclose(np.asarray(y[0] @ found), np.asarray(y[0]) @ whole, atol=1e-11)
    vector = x.reshape(-1, n, 2)[0, :, 0]
    np.testing.assert_allclose(np.asarray(found @ vector), whole @ np.asarray(vector), atol=1e-11)


def test_masked_rows_of_a_factor_do_not_count():
    q, k, v, g = operands()
    effects = AttentionWeights(q, k, causal=True, query_start=0).effects(v, g)
    x = numbers(Lk, 2, seed=8)
    right = np.asarray(effects) @ x
    x[Lq:] = np.nan
    np.testing.assert_allclose(effects @ x, right, atol=1e-12)


def test_two_axes_and_many_axes_are_as_those_of_the_weights():
    q, k, v, g = operands()
    right = np.asarray(AttentionWeights(q, k).effects(v, g))
    one = AttentionWeights(q[1, 2], k[1, 1]).effects(v[1, 1], g[1, 2])
    np.testing.assert_allclose(np.asarray(one), right[1, 2], atol=1e-13)
    five = (x[:, None] for x in (q, k, v, g))
    many = AttentionWeights(*(next(five), next(five))).effects(*five)
    np.testing.assert_allclose(many[1, 0], right[1], atol=1e-13)
    shared = AttentionWeights(q, k[:1]).effects(v[:1], g)
    right = np.asarray(AttentionWeights(q, k[[0, 0]]).effects(v[[0, 0]], g))
    np.testing.assert_allclose(np.asarray(shared), right, atol=1e-13)
    of_rows = AttentionWeights(q, k).part(slice(3, 20, 4)).effects(v, g[:, :, 3:20:4])
    right = np.asarray(AttentionWeights(q, k).effects(v, g))
    np.testing.assert_allclose(np.asarray(of_rows), right[:, :, 3:20:4], atol=1e-13)


@by_ways(*NAMED)
@pytest.mark.parametrize("empty", [{"Lq": 0}, {"Lk": 0}, {"B": 0}])
def test_empty_inputs_have_empty_effects(empty, way):
    n = {"B": 2, "Lq": 3, "Lk": 4} | empty
    q, v = np.ones((n["B"], 2, n["Lq"], 3)), np.ones((n["B"], 2, n["Lk"], 3))
    effects = effects_by(way, "knockout", q, v, v, q)
    assert np.asarray(effects).shape == (n["B"], 2, n["Lq"], n["Lk"])
    assert np.asarray(effects.received()).tolist() == np.zeros((n["B"], 2, n["Lk"])).tolist()
    assert effects.topk(0).values.shape == (n["B"], 2, n["Lq"], 0)
    assert effects.strongest(3).key.shape[:2] == (n["B"], 2)
    assert effects.pool((2, 2)).shape == (n["B"], 2, min(2, n["Lq"]), min(2, n["Lk"]))


def test_heads_of_a_recording_are_found_by_their_numbers():
    q, k, v, g = (x[0] for x in operands())
    layer = regard.Layer(q[[0, 2]], k, v, head_numbers=[3, 7])
    recording = regard.Recording([str(n) for n in range(Lk)], [layer])
    effects = recording.weights[0].effects(v, g[[0, 2]])
    right = AttentionWeights(q[[0, 2]], k).effects(v, g[[0, 2]])
    assert effects.head_numbers == (3, 7)
    np.testing.assert_array_equal(effects[7, 4], right[1, 4])
    np.testing.assert_array_equal(effects.head(7)[4], right[1, 4])
    np.testing.assert_array_equal(effects.matrix(7)[4], right[1, 4])
    assert len(list(effects)) == 2
    assert repr(effects) == (
        "Effects(2, 23, 26) float64 of kind 'knockout' of heads 3, 7, computed when asked for; "
        "whole: 9.6 kB"
    )
    with pytest.raises(IndexError, match="effects: head 2 was not recorded; there are 3, 7"):
        effects.head(2)


def test_memory_is_linear():
    T = 2048
    q, k, v, g = (numbers(1, T, 8, dtype=np.float32, seed=n) for n in range(4))
    effects = AttentionWeights(q, k, causal=True).effects(v, g)
    effects[0, 5]
    peak = peak_bytes(lambda: (effects.strongest(5), effects.pool((16, 16))))
    assert peak < 4 * T * T, "the matrix itself would be as large"


@by_ways(*TWO)
@pytest.mark.parametrize("name", ["plain", "places", "lengths", "mask", "sinks"])
def test_the_output_changes_nothing_but_the_time(name, way):
    q, k, v, g = operands()
    output = way.convert(regard.attention(q, k, v, **OPTIONS[name], backend="reference"))
    alone = effects_by(way, "knockout", q, k, v, g, **OPTIONS[name])
    effects = effects_by(way, "knockout", q, k, v, g, output, **OPTIONS[name])
    bound = {"rtol": 0, "atol": 1e-12 * scale_of(v, g)}
    np.testing.assert_allclose(effects.received(), alone.received(), **bound)
    np.testing.assert_allclose(np.asarray(effects), np.asarray(alone), **bound)


def test_the_output_of_a_row_that_sees_nothing_is_0():
    q, k, v, g = (x[:1, :1, :n] for x, n in zip(operands(), (9, 9, 9, 9)))
    seen = np.arange(9) % 2
    options = {"intervals": (0 * seen, 9 * seen)}  # the row in the middle sees nothing
    output, weights = regard.attention(q, k, v, **options, return_weights=True)
    assert not output[0, 0, 4].any()
    found = weights.effects(v, g, output=output).received()
    np.testing.assert_allclose(found, weights.effects(v, g).received(), rtol=0, atol=1e-12)
    output[0, 0, 4] = 1
    with pytest.raises(ValueError, match=r"in query 4 of head 0 it is off by 1,"):
        weights.effects(v, g, output=output).received()


def test_what_was_written_to_is_not_read():
    q, k, v, g = (torch.from_numpy(x) for x in operands())
    output = regard.attention(q, k, v)
    for name, x in {"output": output, "value": v, "gradient": g, "query": q}.items():
        effects = AttentionWeights(q, k).effects(v, g, output=output)
        x.add_(1)
        with pytest.raises(RuntimeError, match=f"{name} was written to"):
            effects.received()


@by_ways(*TWO)
def test_effects_are_copied_and_pickled(way):
    effects = effects_by(way, "knockout", *operands(), causal=True)
    whole = np.asarray(effects)
    for same in (copy.deepcopy(effects), pickle.loads(pickle.dumps(effects)), copy.copy(effects)):
        found = np.asarray(same.part(slice(4)))
        np.testing.assert_allclose(found, whole[:, :, :4], atol=1e-13)
        assert same.kind == "knockout"


def test_effects_have_no_gradient_of_their_own():
    q, k, v, g = (torch.from_numpy(x).requires_grad_() for x in operands())
    assert not AttentionWeights(q, k).effects(v, g)[0].requires_grad


def test_the_table_of_the_docs_is_that_of_the_benchmark():
    root = Path(__file__).parent.parent
    text = (root / "docs" / "effects.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| ([\w ,]+) \|(.* \|)$", text.partition("## How well")[2], re.MULTILINE)
    paths = (root / "benchmarks/results").glob("*/effects.json")  # of every processor
    results = [json.loads(path.read_text(encoding="utf-8"))["tables"] for path in paths]
    shown = {}
    for name, cells in table:
        name = "weight" if "weight" in name else name.split(",")[0]
        shown[name] = tuple(cell.strip() for cell in cells.split("|")[:-1])
    assert len(shown) == 5
    assert shown.items() in [{name: cells_of(tables)[name] for name in shown}.items()
                             for tables in results]  # fmt: skip
    for tables in results:
        for of_model, least in zip(tables, (0.95, 0.97)):
            texts = of_model["rows"][0]["texts"].values()
            assert min(one["random"]["signed"] for one in texts) >= least


def cells_of(tables):
    """What the page shows of the benchmark's tables, by kind."""
    found = {}
    for of_model in tables:
        for row in of_model["rows"]:
            name, *figures = row["cells"]
            how = slice(0, None, 2) if figures[0] != "–" else slice(1, None, 2)
            found[name] = found.get(name, ()) + tuple(figures[how])
    return found


def test_faults_are_named():
    q, k, v, g = operands()
    weights = AttentionWeights(q, k)
    for error, arguments, text in [
        (ValueError, (v, g, "cut"), "kind is 'cut'; 'knockout', 'contribution'"),
        (ValueError, (v, g, ["knockout"]), r"kind is \['knockout'\]; 'knockout', "),
        (TypeError, (v,), "'knockout' needs a gradient"),
        (TypeError, (np.ma.array(v), g), "value is a numpy.ma"),
        (TypeError, (v, np.ma.array(g)), "gradient is a numpy.ma"),
        (TypeError, (v, torch.from_numpy(g)), "gradient is a torch.Tensor; a NumPy array"),
        (TypeError, ([1.0], g), "value is a builtins.list"),
        (TypeError, (v.astype(int), g), "value is int64; floating"),
        (regard.ShapeError, (v[:, :, 1:], g), r"\(2, 2, 25, 5\); \(..., Hkv, Lk, Dv\)"),
        (regard.ShapeError, (v, g[:, 1:]), r"gradient has shape .* \(2, 4, 23\) and Dv"),
        (regard.ShapeError, (v, g[:1]), "gradient has shape"),
        (regard.ShapeError, (v, g[..., 1:]), "value vectors have 5 numbers and gradient .* 4"),
        (regard.ShapeError, (v, g, "knockout", g[..., 1:]), "5 numbers and output vectors 4"),
        (regard.ShapeError, (v[..., :1], g), "have 1 number and gradient vectors 5"),
        (regard.ShapeError, (v[..., :1], None, "change", g), "have 1 number and output vectors 5"),
        (regard.ShapeError, (v, g, "change", g[:1]), "output has shape"),
        (TypeError, (v, g, "knockout", g.astype("f4")), "output is float32, .* float64 is needed"),
    ]:
        with pytest.raises(error, match=text):
            weights.effects(*arguments)
    with pytest.raises(regard.UnsupportedError, match=r"some keys.*\n?.*part\(rows, columns\)"):
        weights.part(columns=slice(3)).effects(v[:, :, :3], g)
    dropped, weights = regard.attention(q, k, v, dropout=0.1, seed=1, return_weights=True)
    with pytest.raises(ValueError, match="output is not that of these weights and values"):
        weights.effects(v, g, output=dropped).received()
    effects = weights.effects(v, g)
    for error, ask, text in [
        (IndexError, lambda: effects[2], "effects: index 2 is out of range"),
        (IndexError, lambda: effects.head(0).head(0), "effects: .* has no axis of heads"),
        (IndexError, lambda: effects.matrix(0, 0, 0), "effects: 3 indices for 2 axes"),
        (TypeError, lambda: effects.part(3), "effects: rows is an int"),
        (ValueError, lambda: effects.part(slice(None, None, -1)), "effects: rows has the step"),
        (regard.ShapeError, lambda: effects.topk(27), "topk: k is 27"),
        (ValueError, lambda: effects.strongest(-1), "strongest: n is -1"),
        (TypeError, lambda: effects.strongest(1.0), "strongest: n is a float"),
        (ValueError, lambda: effects.received("seen?"), "received: how is 'seen\\?'"),
        (ValueError, lambda: effects.pool((0, 1)), "each side must be at least 1"),
        (TypeError, lambda: effects.pool(3), "a pair of ints"),
        (ValueError, lambda: effects.pool((3, 3), "sum"), "pool: how is 'sum'"),
        (ValueError, lambda: effects.pool((3, 3), ["max"]), r"pool: how is \['max'\]"),
        (regard.ShapeError, lambda: effects @ g, "effects: @ of"),
        (TypeError, lambda: effects @ torch.ones(Lk), "another library or device; .* NumPy"),
        (TypeError, lambda: effects @ np.ones(Lk, int), "@ of int64"),
        (TypeError, lambda: effects @ "x", "unsupported operand"),
        (ValueError, lambda: np.array(effects, copy=False), "so an array is a copy"),
    ]:
        with pytest.raises(error, match=text):
            ask()
    with regard.limits(weights_bytes=100), pytest.raises(regard.MaterializeError, match="effects"):
        effects[...]


@by_ways(*NAMED)
@pytest.mark.parametrize("kind", ["knockout", "contribution", "relevance", "gradient"])
@pytest.mark.parametrize("of", ["value", "gradient"])
def test_what_is_infinite_is_so_in_every_answer(of, kind, way):
    q, k, v, g = operands()
    (v if of == "value" else g)[..., 3:9:2, 1] = np.inf
    arrays = [way.convert(x) for x in (q, k, v, g)]
    weights = AttentionWeights(*arrays[:2], causal=True, backend=way.backend)
    effects = weights.effects(*arrays[2:], kind)
    exact = AttentionWeights(q, k, causal=True, backend="reference").effects(v, g, kind)
    whole = np.asarray(exact)
    np.testing.assert_allclose(np.asarray(effects), whole, rtol=1e-8, atol=1e-12)
    with np.errstate(invalid="ignore"):
        sums = whole.sum(-2)
    np.testing.assert_allclose(np.asarray(effects.received()), sums, rtol=1e-8, atol=1e-10)
    for ask in (lambda x: x.topk(3).values, lambda x: x.strongest(5).value,
                lambda x: x.pool((4, 5), "mass")):  # fmt: skip
        np.testing.assert_allclose(
            abs(np.asarray(ask(effects))), abs(np.asarray(ask(exact))), rtol=1e-8, atol=1e-10
        )


@by_ways(*NAMED)
@pytest.mark.parametrize("size", [1.0, 12.0])  # of scores: weights below 1/2, and above
@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_a_change_of_an_infinite_output_is_infinite_and_undefined_at_its_infinite_values(
    infinite, size, way
):
    q, k, v, _ = operands()
    v[:, :, 3:9:2, 1] = infinite
    arrays = [way.convert(x) for x in (size * q, k, v)]
    weights = AttentionWeights(*arrays[:2], causal=True, query_start=0, backend=way.backend)
    effects = weights.effects(arrays[2], kind="change")
    seen = np.tri(Lq, Lk, dtype=bool)
    reached = (seen & ~np.isfinite(v[0, 0]).all(-1)).any(-1)[:, None]
    exact = np.where(reached & seen, np.inf, 0.0)
    exact[np.broadcast_to(seen, exact.shape) & ~np.isfinite(v[0, 0]).all(-1)] = np.nan
    found, rows = np.asarray(effects), reached[:, 0]
    np.testing.assert_array_equal(
        found[..., rows, :], np.broadcast_to(exact, found.shape)[..., rows, :]
    )
    assert np.isfinite(found[..., ~rows, :]).all()
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(np.asarray(effects.received()), found.sum(-2), rtol=1e-9)
    assert np.isposinf(np.asarray(effects.strongest(9).value)).all()
    assert np.isposinf(np.asarray(effects.topk(2).values)[..., rows, :]).all()


@by_ways(*NAMED)
@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_a_change_is_as_exact_with_values_whose_squares_no_number_holds(size, way):
    q, k, v, g = operands()
    exact = dense("change", q, k, v, g, causal=True)
    effects = effects_by(way, "change", q, k, size * v, g, causal=True)
    np.testing.assert_allclose(np.asarray(effects) / size, exact, atol=1e-11)


def test_a_large_sink_of_a_row_that_sees_nothing_overflows_nothing():
    query, key, value, gradient = (np.ones((1, n, 4), np.float32) for n in (3, 2, 2, 3))
    weights = regard.AttentionWeights(
        query, key, sinks=np.array([1e4], np.float32), intervals=([[0, 0, 0]], [[2, 0, 2]])
    )
    effects = weights.effects(value, gradient, kind="knockout")
    assert not np.asarray(effects)[0, 1].any()


@pytest.mark.parametrize("sink", [1e6, 1.0000001e30])
@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_a_sink_that_is_nearly_all_of_a_row_weighs_one(sink, backend):
    query, key = (np.full((1, n, 4), 0.7, np.float32) for n in (9, 3))
    sinks = np.array([sink], np.float32)
    one, other = (
        regard.AttentionWeights(query, key, sinks=sinks, scale=scale, backend=backend)
        for scale in (0.3, 0.7)
    )
    assert not one[0].any()
    found = regard.compare(one.mix(), other.mix())
    assert (found.divergences().kl == 0).all()
    assert np.isfinite(np.asarray(one.effects(key, query, kind="knockout"))).all()
