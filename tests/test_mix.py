"""Means over heads and layers, and rollouts, against sums and products of whole matrices."""

import numpy as np
import pytest
import torch

import regard
from recordings import numbers
from regard import AttentionWeights, Layer, Recording
from test_effects import PLAIN, TWO, check
from ways import NAMED, by_ways

B, Hq, Hkv, Lq, Lk, D = 2, 4, 2, 23, 26, 8
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "query_start": 1},
    "window": {"window": (4, 1)},
    "mask of heads": {"mask": np.random.default_rng(5).random((Hq, Lq, Lk)) < 0.4},
    "sinks": {"sinks": numbers(Hq, seed=7, dtype=np.float64)},
}
C = [0.5, -2.0, 0.0, 1.25]


def weights_of(way, seed=0, **options):
    q = 3 * numbers(B, Hq, Lq, D, dtype=np.float64, seed=seed)
    k = numbers(B, Hkv, Lk, D, dtype=np.float64, seed=seed + 1)
    options = {name: way.convert(x) for name, x in options.items()}
    return AttentionWeights(way.convert(q), way.convert(k), backend=way.backend, **options)


@by_ways(*TWO)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_mix_of_heads_is_the_sum_of_their_weights(name, way):
    weights = weights_of(way, **OPTIONS[name])
    whole = np.asarray(weights)
    np.testing.assert_allclose(weights.mix(), whole.mean(1), atol=1e-14)
    right = np.einsum("h,bhij->bij", C, whole)
    np.testing.assert_allclose(weights.mix(coefficients=C), right, atol=1e-14)
    some = weights.mix([3, -4], np.array([1.0, 3.0]))
    np.testing.assert_allclose(some, whole[:, 3] + 3 * whole[:, 0], atol=1e-14)
    seen = ~np.isnan(np.asarray(weights.pool((Lq, Lk))))
    pooled = np.asarray(weights.mix().pool((Lq, Lk)))
    np.testing.assert_array_equal(~np.isnan(pooled), seen.any(1))


@by_ways(*NAMED)
def test_a_mix_answers_every_question(way):
    weights = weights_of(way, causal=True, query_start=2)
    right = np.einsum("h,bhij->bij", C, np.asarray(weights))
    mixed = weights.mix(coefficients=C)
    check(mixed.matrix(1), right[1])
    if way != PLAIN:
        return
    check(mixed, right)
    check(mixed.part(slice(2, 20, 3), slice(1, 25, 2)), right[:, 2:20:3, 1:25:2])
    part = weights.part(slice(4, None, 2), slice(3, 20, 2))
    check(part.mix(coefficients=C), right[:, 4::2, 3:20:2])


@pytest.mark.parametrize("name", ["plain", "causal", "window"])
@pytest.mark.parametrize("queries", [1, 96, 301])
def test_a_long_mix_is_that_of_its_tiles(name, queries):
    """The kernels sum several tiles of queries at a time, and the last ones are fewer."""
    q = 3 * numbers(Hq, queries, D, dtype=np.float64)
    k = numbers(Hkv, 310, D, dtype=np.float64, seed=1)
    weights = AttentionWeights(q, k, **OPTIONS[name])
    right = np.einsum("h,hij->ij", C, np.asarray(weights))
    mixed = weights.mix(coefficients=C)
    np.testing.assert_allclose(mixed, right, atol=1e-14)
    np.testing.assert_allclose(mixed.received(), right.sum(0), atol=1e-12)
    if queries > 9:
        check(mixed, right)


@by_ways(*NAMED)
def test_a_mix_of_layers_keeps_the_heads(way):
    layers = [weights_of(way, seed, causal=seed == 4) for seed in (0, 2, 4)]
    whole = np.stack([np.asarray(one) for one in layers])
    np.testing.assert_allclose(regard.mix(layers), whole.mean(0), atol=1e-14)
    mixed = regard.mix(layers, [1.0, 0.0, -2.0])
    if way == PLAIN:
        check(mixed, whole[0] - 2 * whole[2])
    check(mixed.matrix(1, 2), (whole[0] - 2 * whole[2])[1, 2])
    both = regard.mix([one.mix() for one in layers])
    np.testing.assert_allclose(both, whole.mean((0, 2)), atol=1e-14)
    np.testing.assert_allclose(mixed.mix([1, 2]), (whole[0] - 2 * whole[2])[:, 1:3].mean(1))
    parts = regard.mix([one.part(slice(9)) for one in layers])
    np.testing.assert_allclose(parts, whole.mean(0)[..., :9, :], atol=1e-14)


def test_effects_are_mixed_as_weights_are():
    q, k = numbers(2, Hq, Lq, D, seed=0), numbers(2, Hkv, Lk, D, seed=1)
    v, g = numbers(2, Hkv, Lk, 3, seed=2), numbers(2, Hq, Lq, 3, seed=3)
    relevance = AttentionWeights(q, k).effects(v, g, "relevance")
    right = np.asarray(relevance).mean(1)
    np.testing.assert_allclose(relevance.mix(), right, atol=1e-6)
    np.testing.assert_allclose(regard.mix([relevance.mix()] * 2, [2, 1]), 3 * right, atol=1e-5)


def test_heads_of_a_recording_are_mixed_by_their_numbers():
    q, k = numbers(3, 5, 4), numbers(3, 5, 4, seed=1)
    recording = Recording(list("abcde"), [Layer(q, k, head_numbers=[1, 4, 9])] * 1)
    weights = recording.weights[0]
    np.testing.assert_allclose(weights.mix([9]), weights[9], atol=1e-7)
    assert regard.mix([weights, weights]).head_numbers == (1, 4, 9)
    with pytest.raises(IndexError, match="mix: head 2 was not recorded; there are 1, 4, 9"):
        weights.mix([2])
    assert repr(weights.mix()).startswith("Mix(5, 5) float32, computed when asked for; whole: 100")
    of_torch = AttentionWeights(torch.from_numpy(q), torch.from_numpy(k))
    assert isinstance(of_torch.mix(coefficients=torch.ones(3))[0], torch.Tensor)


def test_faults_of_mixes_are_named():
    q, k = numbers(2, Hq, Lq, D), numbers(2, Hkv, Lk, D, seed=1)
    weights = AttentionWeights(q, k)
    tensors = AttentionWeights(torch.from_numpy(q), torch.from_numpy(k))
    for error, ask, text in [
        (IndexError, lambda: weights.mix([4]), "mix: head 4; there are 4, 0 to 3"),
        (IndexError, lambda: weights.head(0).mix(), "has no axis of heads"),
        (IndexError, lambda: weights.mix().mix(), "has no axis of heads"),
        (TypeError, lambda: weights.mix(2), r"heads is 2, an int; a list is needed: \[2\]"),
        (TypeError, lambda: weights.mix([True, False]), "head True is a bool; an int is needed"),
        (TypeError, lambda: weights.mix(np.arange(4) > 1), "is a bool; an int is needed"),
        (TypeError, lambda: tensors.mix(torch.arange(4) > 1), r"head tensor\(False\) is a Tensor"),
        (TypeError, lambda: weights.mix([1.0]), "head 1.0 is a float; an int is needed"),
        (TypeError, lambda: weights.mix([1], ["1"]), "coefficients are <U1; real numbers"),
        (TypeError, lambda: weights.mix([1], np.array([1j])), "coefficients are complex128; real"),
        (TypeError, lambda: weights.mix([1], torch.tensor([1j])), "coefficients are complex64"),
        (TypeError, lambda: weights.mix([1], [True]), "coefficients are bool; real numbers"),
        (TypeError, lambda: weights.mix([1], np.ma.ones(1)), "coefficients: a masked array is"),
        (TypeError, lambda: weights.mix().pool((True, 2)), r"size is \(True, 2\); a pair of ints"),
        (ValueError, lambda: weights.mix([]), "heads are none"),
        (regard.ShapeError, lambda: weights.mix(coefficients=[1, 2]), "one for each of 4 heads"),
        (ValueError, lambda: weights.mix([1], [np.inf]), "must be finite"),
        (ValueError, lambda: regard.mix([]), "no matrices"),
        (TypeError, lambda: weights.mix(1.5), "heads is a float; a list of ints is needed"),
        (TypeError, lambda: regard.mix([q]), "ndarray is no matrix of weights"),
        (TypeError, lambda: regard.mix(weights), r"is an AttentionWeights; a list is .* \[a, b\]"),
        (TypeError, lambda: regard.mix(weights.mix()), "matrices is a Mix; a list is needed"),
        (TypeError, lambda: regard.mix(None), "matrices is a NoneType; a list is needed"),
        (TypeError, lambda: regard.mix([weights, tensors]), "several libraries"),
        (regard.ShapeError, lambda: regard.mix([weights, weights.mix()]), "must be of one shape"),
        (regard.ShapeError, lambda: regard.mix([weights], [1, 2]), "one for each of 1 matrices"),
        (IndexError, lambda: weights.mix()[0, 99], "mix: index 99 is out of range"),
    ]:
        with pytest.raises(error, match=text):
            ask()
    query = torch.from_numpy(q).clone()
    mixed = AttentionWeights(query, torch.from_numpy(k)).mix()
    query.add_(1)
    with pytest.raises(RuntimeError, match="query was written to"):
        mixed.received()
    empty = AttentionWeights(q[:, :, :0], k).mix()
    assert empty.topk(3).values.shape == (2, 0, 3)


T = 19


def a_recording(options, layers=3, dtype=np.float64, library="numpy"):
    def made(seed):
        q, k = (
            numbers(4, T, 6, dtype=dtype, seed=seed),
            numbers(2, T, 6, dtype=dtype, seed=seed + 9),
        )
        arrays = (
            (2 * q, k) if library == "numpy" else (torch.from_numpy(2 * q), torch.from_numpy(k))
        )
        return Layer(*arrays, **options)

    return Recording([str(n) for n in range(T)], [made(n) for n in range(layers)])


def dense_rollout(recording, residual):
    whole = np.eye(T)
    for weights in recording.weights:
        a = residual * np.eye(T) + (1 - residual) * np.asarray(weights, float).mean(0)
        total = a.sum(-1, keepdims=True)
        whole = np.where(total == 0, np.eye(T), a / np.where(total == 0, 1, total)) @ whole
    return whole


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("residual", [0.5, 0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"mask": np.tri(T, k=-2, dtype=bool)}, {"window": (3, 0)}],
    ids=["full", "causal", "rows that see nothing", "window"],
)
def test_a_rollout_is_the_product_over_layers(options, residual, library):
    given = dict(options)
    if library == "torch" and "mask" in given:
        given["mask"] = torch.from_numpy(given["mask"])
    recording = a_recording(given, library=library)
    found, right = regard.rollout(recording, residual), dense_rollout(recording, residual)
    np.testing.assert_allclose(np.asarray(found), right, atol=1e-13)
    np.testing.assert_allclose(np.asarray(found[7]), right[7], atol=1e-13)
    np.testing.assert_allclose(np.asarray(found[:, 3]), right[:, 3], atol=1e-13)
    np.testing.assert_allclose(np.asarray(found[2:18:5, 4]), right[2:18:5, 4], atol=1e-13)
    np.testing.assert_allclose(np.asarray(found[::-1, 4:1:-1]), right[::-1, 4:1:-1], atol=1e-13)
    assert np.isclose(float(found[5, 2]), right[5, 2], atol=1e-13)


def test_a_rollout_answers_every_question_in_blocks(monkeypatch):
    recording = a_recording({"causal": True, "sinks": numbers(4, dtype=np.float64)})
    right = dense_rollout(recording, 0.5)
    found = regard.rollout(recording)
    check(found, right)
    monkeypatch.setattr(regard.Rollout, "_block", T)
    monkeypatch.setattr(regard.Rollout, "_lowest", 4)
    check(found.part(slice(3, 18, 2), slice(1, 17)), right[3:18:2, 1:17])
    np.testing.assert_allclose(np.asarray(found).sum(-1), 1)
    assert repr(found) == "Rollout(19, 19) float64, computed when asked for; whole: 2.9 kB"


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("residual", [0.5, 0])
def test_a_token_of_nan_is_in_the_rollout_of_those_that_reach_it(library, residual):
    q, k, v = numbers(3, 2, T, 4, dtype=np.float64)
    q[:, 7] = np.nan
    if library == "torch":
        q, k, v = map(torch.from_numpy, (q, k, v))
    layer = regard.Layer(q, k, v, causal=True)
    found = regard.rollout(Recording([str(n) for n in range(T)], [layer, layer]), residual)
    rows = np.stack([np.asarray(found[i]) for i in range(T)])
    assert np.isnan(rows).any(-1).tolist() == [n >= 7 for n in range(T)]
    np.testing.assert_allclose(np.asarray(found), rows, atol=1e-13)
    np.testing.assert_allclose(np.asarray(found[:, 3]), rows[:, 3], atol=1e-13)
    largest = np.asarray(found.topk(1).values)[:7, 0]
    np.testing.assert_allclose(largest, rows[:7].max(-1), atol=1e-13)


@pytest.mark.parametrize("residual", [0, 0.5, 1])
def test_rows_and_columns_of_a_rollout_have_their_nan_where_a_share_of_it_is(residual):
    q, k, v = numbers(3, 2, T, 4, dtype=np.float64)
    q[:, 7] = np.nan
    own = np.eye(T, dtype=bool)
    own[0, 0] = False  # which sees nothing else
    layer = regard.Layer(q, k, v, mask=np.tri(T, dtype=bool) & ~own)
    found = regard.rollout(Recording([str(n) for n in range(T)], [layer, layer]), residual)
    rows = np.stack([found[i] for i in range(T)])
    own_nan = np.isnan(rows.diagonal()).tolist()
    assert own_nan == [residual == 0.5 and n == 7 for n in range(T)]
    assert np.isnan(rows).any(-1).tolist() == [residual < 1 and n >= 7 for n in range(T)]
    columns = np.stack([found[:, j] for j in range(T)], -1)
    for whole in (np.asarray(found), columns, found @ np.eye(T)):
        np.testing.assert_allclose(whole, rows, atol=1e-13)


def test_a_rollout_of_float32_is_within_a_millionth():
    recording = a_recording({"causal": True}, layers=5, dtype=np.float32)
    error = np.abs(np.asarray(regard.rollout(recording)) - dense_rollout(recording, 0.5))
    assert error.max() < 1e-6


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("first", [np.float32, np.float64])
def test_a_rollout_of_layers_of_other_dtypes_has_that_of_the_first(first, library):
    both = {np.float32: a_recording({}, library=library, dtype=np.float32)}
    both[np.float64] = a_recording({}, library=library)
    other = np.float64 if first is np.float32 else np.float32
    layers = [both[first].layers[0], both[other].layers[1], both[other].layers[2]]
    recording = Recording([str(n) for n in range(T)], layers)
    found, right = regard.rollout(recording), dense_rollout(recording, 0.5)
    for rows in (7, slice(None)):
        got = np.asarray(found[rows])
        assert got.dtype == first
        np.testing.assert_allclose(got, right[rows], atol=1e-6)
    np.testing.assert_allclose(np.asarray(found[:, 3]), right[:, 3], atol=1e-6)


def test_faults_of_rollouts_are_named():
    recording = a_recording({})
    for error, residual, text in [
        (TypeError, "0.5", "residual is a str"),
        (TypeError, True, "residual is a bool"),
        (ValueError, 1.5, "residual is 1.5; a share from 0 to 1"),
        (ValueError, -0.5, "residual is -0.5; a share from 0 to 1"),
        (ValueError, float("nan"), "residual is nan"),
    ]:
        with pytest.raises(error, match=text):
            regard.rollout(recording, residual)
    for weights in (recording.weights, recording.weights[0], []):
        with pytest.raises(TypeError, match=r"rollout: an? .* is no Recording; regard.record"):
            regard.rollout(weights)
    q, k = numbers(2, 3, 4), numbers(2, 5, 4)
    with pytest.raises(regard.ShapeError, match="layer 0 has 3 queries from position 2 on"):
        regard.rollout(Recording(list("abcde"), [Layer(q, k)]))
    found = regard.rollout(recording)
    with pytest.raises(regard.ShapeError, match="rollout: @ of"):
        found @ np.ones(3)
    with pytest.raises(IndexError, match=r"rollout: .* has no axis of heads"):
        found.head(0)
    with pytest.raises(IndexError, match="rollout: index 19 is out of range"):
        found[19]


def test_a_set_of_heads_has_no_order_for_coefficients():
    weights = AttentionWeights(*numbers(2, 3, 5, 4))
    assert weights.mix({2, 0}).shape == (5, 5)
    with pytest.raises(
        TypeError, match="mix: heads is a set, which has no order; a list is needed"
    ):
        weights.mix({2, 0}, [0.25, 0.75])
