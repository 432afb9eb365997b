"""Weights as an operator: products, blocks, diagonals, pairs, sets of keys, and axes."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from definition import define, visible_pairs
from recordings import numbers
from regard import AttentionWeights, Edit
from strategies import calls, to_torch
from traced import peak_bytes
from ways import NAMED, by_ways

WAYS = st.sampled_from(NAMED)
SEEDS = st.integers(0, 2**32)
OF_PAIRS = ("bias", "sinks", "scale", "softcap")  # options that mask nothing


def close(actual, exact, tolerance=1e-11):
    np.testing.assert_allclose(np.asarray(actual), exact, rtol=1e-9, atol=tolerance)


def both(call, way):
    """The weights of a random call by that way, the whole matrix in float64, and who sees whom."""
    (q, k, v), options = call
    exact = define(q, k, **options)[0]
    rules = {name: x for name, x in options.items() if name not in OF_PAIRS}
    return way.weights(q, k, v, **options), exact, visible_pairs(*exact.shape, **rules)


def part_of(data, weights, exact, visible, options):
    """A random part of all three, and the distances of its pairs ``(B, 1, Lq, Lk)``."""
    B, _, Lq, Lk = exact.shape
    starts = np.broadcast_to(options.get("key_lengths", Lk), (B,)) - Lq
    starts = np.broadcast_to(options.get("query_start", starts), (B,))
    distances = starts[:, None, None, None] + np.arange(Lq)[:, None] - np.arange(Lk)
    cut = [slice(None), slice(None)]
    if data.draw(st.booleans()):
        for axis, n in enumerate((Lq, Lk)):
            low, high = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            cut[axis] = slice(low, high, data.draw(st.sampled_from([1, 1, 2, 3])))
    return weights.part(*cut), *(x[..., cut[0], cut[1]] for x in (exact, visible, distances))


@settings(max_examples=40, deadline=None)
@given(calls(), WAYS, st.sampled_from([None, 0, 1, 2, 3, 4, 7, 17]), SEEDS, st.data())
def test_products_are_those_of_the_matrix(call, way, columns, seed, data):
    weights, exact, _, _ = part_of(data, *both(call, way), call[1])
    B, Hq, Lq, Lk = exact.shape
    rng = np.random.default_rng(seed)
    tail = () if columns is None else (columns,)
    lead = () if columns is None else data.draw(
        st.sampled_from([(), (1,), (Hq,), (B, 1), (1, Hq), (B, Hq)])
    )  # fmt: skip
    x, y = (rng.standard_normal((*lead, n, *tail)) for n in (Lk, Lq))
    transposed = exact.swapaxes(-1, -2)
    close(weights @ way.convert(x), exact @ x)
    close(weights.T @ way.convert(y), transposed @ y)
    if columns is not None:
        x, y = (np.ascontiguousarray(z.swapaxes(-1, -2)) for z in (x, y))
    close(way.convert(y) @ weights, y @ exact)
    close(way.convert(x) @ weights.T, x @ transposed)


def of_blocks(exact, visible, of_queries, of_keys, how):
    """The definition, block by block, for ids ``(B, Lq)`` and ``(B, Lk)``."""
    B, Hq = exact.shape[:2]
    counts = (of_queries.max(initial=-1) + 1, of_keys.max(initial=-1) + 1)
    out = np.zeros((B, Hq, *counts))
    for b, n, m in itertools.product(range(B), *map(range, counts)):
        rows, columns = of_queries[b] == n, of_keys[b] == m
        w, seen = (x[b][:, rows][:, :, columns] for x in (exact, visible))
        if how == "max":
            out[b, :, n, m] = w.max((-1, -2), initial=0)
            continue
        divisor = {"sum": 1, "mean": seen.sum((-1, -2)), "mass": rows.sum()}[how]
        out[b, :, n, m] = w.sum((-1, -2)) / np.maximum(divisor, 1)
    return out


@settings(max_examples=40, deadline=None)
@given(
    calls(), WAYS, st.sampled_from(["sum", "mean", "max", "mass"]), st.integers(1, 20),
    st.sampled_from(["runs", "scattered", "of a batch"]), SEEDS, st.data(),
)  # fmt: skip
def test_blocks_are_sums_of_the_pairs_of_both(call, way, how, most, order, seed, data):
    weights, exact, visible, _ = part_of(data, *both(call, way), call[1])
    B, _, Lq, Lk = exact.shape
    rng = np.random.default_rng(seed)
    shape = (B,) if order == "of a batch" else ()
    ids = [rng.integers(-2, most, (*shape, n)) for n in (Lq, Lk)]
    if order == "runs":
        ids = [np.sort(x, axis=-1) for x in ids]
    found = weights.blocks(way.convert(ids[0]), ids[1] if order == "runs" else ids[1].tolist(), how)
    of_queries, of_keys = (np.broadcast_to(x, (B, n)) for x, n in zip(ids, (Lq, Lk)))
    close(found, of_blocks(exact, visible, of_queries, of_keys, how))


def test_counts_say_how_many_blocks_there_are():
    x = np.random.default_rng(0).normal(size=(2, 7, 4))
    weights, ids = regard.AttentionWeights(x, x, causal=True), [0, 0, 1, 1, -1, 2, 2]
    for how in ("sum", "mean", "max", "mass"):
        wide, own = weights.blocks(ids, ids, how, counts=(4, 6)), weights.blocks(ids, ids, how)
        np.testing.assert_array_equal(wide[:, :3, :3], own)
        assert wide.shape == (2, 4, 6)
        assert not wide[:, 3:].any()
        assert not wide[:, :, 3:].any()
    with pytest.raises(ValueError, match="key_ids go up to 2, and counts says that there are 2"):
        weights.blocks(ids, ids, counts=(3, 2))
    with pytest.raises(TypeError, match="counts is 3; a pair of ints"):
        weights.blocks(ids, ids, counts=3)
    with pytest.raises(TypeError, match="counts has a float"):
        weights.blocks(ids, ids, counts=(3.0, 3))


@settings(max_examples=40, deadline=None)
@given(calls(), WAYS, st.data())
def test_diagonals_are_sums_at_each_distance(call, way, data):
    weights, exact, visible, apart = part_of(data, *both(call, way), call[1])
    distances, values = (np.asarray(x) for x in weights.diagonals())
    assert values.shape == (*exact.shape[:2], len(distances))
    assert (np.diff(distances) > 0).all()
    assert np.isin(np.broadcast_to(apart, visible.shape)[visible], distances).all()
    assert np.isin(distances, apart).all() or call[1].keys() & {"window", "intervals", "causal"}
    for n, distance in enumerate(distances):
        close(values[..., n], (exact * (apart == distance)).sum((-1, -2)))
    edges = sorted(data.draw(st.sets(st.integers(-40, 40), min_size=2, max_size=6)))
    first, sums = (np.asarray(x) for x in weights.diagonals(edges))
    assert first.tolist() == edges[:-1]
    for n, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = (low <= apart) & (apart < high)
        close(sums[..., n], (exact * inside).sum((-1, -2)))


@settings(max_examples=40, deadline=None)
@given(calls(min_length=1), WAYS, SEEDS, st.data())
def test_pairs_and_shares_are_those_of_the_matrix(call, way, seed, data):
    weights, exact, _, _ = part_of(data, *both(call, way), call[1])
    Lq, Lk = exact.shape[-2:]
    rng = np.random.default_rng(seed)
    if Lq and Lk:
        i, j = rng.integers(-Lq, Lq, 40), rng.integers(-Lk, Lk, 40)
        close(weights.at(i, j.tolist()), exact[..., i, j])
        close(weights.at(way.convert(i[:, None]), j[:3]), exact[..., i[:, None], j[:3]])
        close(weights.at(-1, 0), exact[..., -1, 0])
    assert weights.at([], []).shape == (*exact.shape[:2], 0)
    mask = rng.random(Lk) < 0.4
    several = rng.integers(-Lk, Lk, 5) if Lk else np.zeros(0, int)
    for keys in (mask, several, several.tolist(), slice(1, 9, 2), slice(None, None, -3)):
        chosen = np.zeros(Lk, bool)
        chosen[np.asarray(keys) if isinstance(keys, list) and Lk else keys] = True
        close(weights.mass(way.convert(keys)), exact[..., chosen].sum(-1))


@settings(max_examples=40, deadline=None)
@given(calls(), WAYS, st.data())
def test_received_by_the_queries_that_see_a_key(call, way, data):
    weights, exact, visible, _ = part_of(data, *both(call, way), call[1])
    seen = np.maximum(visible.sum(-2), 1)
    close(weights.received("seen"), exact.sum(-2) / seen)
    some = slice(data.draw(st.integers(0, 9)), None, data.draw(st.sampled_from([None, 2, 5])))
    rows, seen = exact[..., some, :], np.maximum(visible[..., some, :].sum(-2), 1)
    close(weights.received("seen", queries=some), rows.sum(-2) / seen)
    close(weights.received(queries=some), rows.sum(-2))
    close(weights.received("max", some), rows.max(-2, initial=0))
    close(weights.received("mean", some), rows.sum(-2) / max(1, rows.shape[-2]))


@by_ways(*NAMED)
def test_of_equal_weights_the_first_is_the_largest(way):
    q, k = np.zeros((2, 300, 8)), numbers(2, 300, 8, dtype=float)
    equal = way.weights(q, k, k)
    assert (np.asarray(equal.argmax(-1)) == 0).all()
    assert int(equal.argmax()) == 0
    q[0, 7], k[0, 20], k[0, 30] = 9, 9, 9
    weights = way.weights(q, k, k, window=(5, None))
    assert np.asarray(weights.argmax(-1))[0, [7, 50]].tolist() == [20, 45]
    assert int(weights.argmax()) == 7 * 300 + 20
    none = way.weights(q, k, k, mask=np.zeros((300, 300), bool), window=(5, None))
    assert (np.asarray(none.argmax(-1)) == 0).all()


@settings(max_examples=30, deadline=None)
@given(calls(min_length=1), WAYS, st.booleans())
def test_axes_are_reduced_as_those_of_an_array(call, way, keepdims):
    weights, exact, _ = both(call, way)
    if not exact.size:
        return
    several = [None, -1, 2, (-2, -1), (0, 3), (1, -2), (0, 1, 2), (-1, 0, 1, 2)]
    for axis, name in itertools.product(several, ("sum", "mean", "max")):
        found = getattr(weights, name)(axis, keepdims=keepdims)
        close(found, getattr(exact, name)(axis, keepdims=keepdims))
    for axis in (-1, -2):
        found = np.asarray(weights.argmax(axis, keepdims=keepdims))
        assert found.shape == exact.max(axis, keepdims=keepdims).shape
        at = found if keepdims else np.expand_dims(found, axis)
        close(np.take_along_axis(exact, at, axis), exact.max(axis, keepdims=True))
    close(exact.reshape(-1)[int(weights.argmax())], exact.max())


LONG = {"many": (1, 2, 1, 1025, 700), "few": (2, 2, 2, 3, 1025), "odd": (1, 2, 1, 97, 1300)}
OPTIONS = {
    "none": lambda Lq, Lk: {},
    "causal": lambda Lq, Lk: {"causal": True, "sinks": numbers(2, seed=7)},
    "window": lambda Lq, Lk: {"causal": True, "window": (200, 0), "softcap": 3.0},
    "mask": lambda Lq, Lk: {"mask": numbers(1, 1, Lq, Lk, seed=5) > 0.3},
    "segments": lambda Lq, Lk: {"segments": (np.arange(Lq) * 5 // Lq, np.arange(Lk) * 5 // Lk)},
    "bias": lambda Lq, Lk: {"bias": numbers(Lq, Lk, seed=6)},
}


def drawn(shape, dtype, options):
    B, Hq, Hkv, Lq, Lk = LONG[shape]
    q, k = 2 * numbers(B, Hq, Lq, 24), numbers(B, Hkv, Lk, 24, seed=1)
    q, k = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (q, k))
    return q, k, to_torch(OPTIONS[options](Lq, Lk))


CASES = [
    *((options, "many", "float32") for options in OPTIONS), ("none", "few", "float32"),
    ("causal", "odd", "float32"), ("none", "many", "bfloat16"), ("causal", "many", "float16"),
    ("mask", "few", "bfloat16"), ("bias", "odd", "float16"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "shape", "dtype"), CASES)
def test_long_sums_in_the_kernels_err_by_a_millionth(options, shape, dtype):
    """Against the same weights, which other tests hold to float64, summed in float64."""
    q, k, given = drawn(shape, dtype, options)
    weights = AttentionWeights(q, k, **given, backend="kernel")
    w = weights[...].double()
    Lq, Lk = w.shape[-2:]
    x, y = torch.from_numpy(numbers(Lk, 18, seed=3)), torch.from_numpy(numbers(Lq, 18, seed=4))
    for columns in (slice(0, 1), slice(0, 2), slice(None)):
        for found, matrix, other in (
            (weights @ x[:, columns], w, x[:, columns].double()),
            (weights.T @ y[:, columns], w.mT, y[:, columns].double()),
        ):
            assert ((found - matrix @ other).abs() <= 1e-6 * (matrix @ other.abs() + 1)).all()
    ids = np.arange(Lq) * 7 // Lq, np.arange(Lk) * 90 // Lk
    rows, columns = (torch.from_numpy(np.eye(x.max() + 1)[x]) for x in ids)
    exact = rows.mT @ w @ columns
    assert ((weights.blocks(*ids) - exact).abs() <= 1e-6 * (exact + 1)).all()
    distances, values = weights.diagonals()
    apart = torch.arange(Lq)[:, None] + Lk - Lq - torch.arange(Lk)
    flat = torch.zeros(*w.shape[:2], Lq + Lk, dtype=torch.float64)
    flat.index_add_(-1, (apart + Lq).reshape(-1), w.flatten(-2))
    exact = flat[..., distances + Lq]
    assert ((values - exact).abs() <= 1e-6 * (exact + 1)).all()
    assert abs(flat.sum() - exact.sum()) <= 1e-9 * flat.sum()


@pytest.mark.parametrize(("options", "shape", "dtype"), [*CASES, ("mask", "odd", "float64")])
def test_pairs_have_the_bits_that_they_have_in_the_matrix(options, shape, dtype):
    q, k, given = drawn(shape, dtype, options)
    weights = AttentionWeights(q, k, **given, backend="kernel")
    Lq, Lk = weights.shape[-2:]
    i, j = (torch.from_numpy(np.random.default_rng(n).integers(n, size=700)) for n in (Lq, Lk))
    fresh = AttentionWeights(q, k, **given, backend="kernel").at(i, j)
    assert torch.equal(fresh, weights[...][..., i, j])
    part = weights.part(slice(1, None, 2), slice(3, None, 3))
    i, j = i % part.shape[-2], j % part.shape[-1]
    assert torch.equal(part.at(i, j), part[...][..., i, j])


def answers(weights, x, y, ids):
    return [
        weights @ x, weights @ x[:, 0], weights.T @ y, weights.T @ y[:, 0],
        weights.blocks(ids, ids), weights.blocks(ids, ids, "max"), weights.diagonals().values,
        weights.received("seen"),
        weights.part(slice(0, None, 3)).diagonals().values, weights.at(ids, ids),
        weights.mass(slice(0, 90)), weights.sum(), weights.argmax(),
    ]  # fmt: skip


def test_threads_change_no_bit():
    q = numbers(3, 1100, 16)
    x, ids = numbers(1100, 20, seed=1), np.arange(1100) // 37
    threads = regard.get_num_threads()
    try:
        found = []
        for n in (1, 2, 5):
            regard.set_num_threads(n)
            found.append(answers(AttentionWeights(q, q, causal=True), x, x, ids))
    finally:
        regard.set_num_threads(threads)
    for one, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_array_equal(one, other)


@by_ways(*NAMED)
@pytest.mark.parametrize("options", ["causal", "mask", "segments", "edits"])
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_what_is_masked_counts_for_nothing_even_as_nan(way, options, columns):
    Lq = Lk = 70
    q, k = numbers(2, Lq, 8, dtype=float), numbers(2, Lk, 8, dtype=float, seed=1)
    given = {
        "causal": {"causal": True},
        "mask": {"mask": numbers(Lq, Lk, seed=5) > 0.5},
        "segments": {"segments": np.arange(Lq) % 3},
        "edits": {"edits": [Edit(queries=slice(9, 60), keys=40), Edit(queries=40, keys=slice(50))]},
    }[options]
    weights = way.weights(q, k, k, **given)
    w, visible = np.asarray(weights), visible_pairs(1, 1, Lq, Lk, **given)[0, 0]
    for name, bad in (("x", np.nan), ("x", np.inf), ("y", np.nan), ("y", -np.inf)):
        x = numbers(Lk, columns, dtype=float, seed=3)
        x[40] = bad
        matrix, seen = (w, visible) if name == "x" else (w.swapaxes(-1, -2), visible.T)
        found = np.asarray((weights if name == "x" else weights.T) @ way.convert(x))
        clean = np.where(np.isfinite(x), x, 0)
        reached = seen[:, 40]
        assert (~reached).any()
        close(found[:, ~reached], (matrix @ clean)[:, ~reached])
        expected = bad if np.isinf(bad) else np.nan
        np.testing.assert_array_equal(found[:, reached], np.full_like(found[:, reached], expected))


@by_ways(*NAMED)
def test_a_row_of_nan_reaches_what_it_sees_and_no_more(way):
    q, k = numbers(2, 90, 8, dtype=float), numbers(2, 90, 8, dtype=float, seed=1)
    q[0, 30] = np.nan
    weights = way.weights(q, k, k, causal=True)
    ones, ids = way.convert(np.ones(90)), np.arange(90) // 10
    touched = np.arange(90) <= 30

    def is_nan(x):
        return np.isnan(np.asarray(x))

    assert is_nan(weights @ ones).tolist() == [(np.arange(90) == 30).tolist(), [False] * 90]
    for received in (weights.T @ ones, weights.received("seen"), weights.max(-2)):
        assert is_nan(received).tolist() == [touched.tolist(), [False] * 90]
    for how in ("sum", "mean", "max", "mass"):
        wrong = is_nan(weights.blocks(ids, ids, how))
        assert wrong[0, 3, :4].all()
        assert wrong.sum() == 4
    distances, values = (np.asarray(x) for x in weights.diagonals())
    assert is_nan(values).tolist() == [(distances <= 30).tolist(), [False] * 90]
    np.testing.assert_array_equal(weights.at([30, 30, 31], [30, 31, 30])[0, :2], [np.nan, 0])
    assert is_nan(weights.max(-1)).tolist() == is_nan(weights.sum(-1)).tolist()
    for keys, reached in (([5, 6, 9], [30]), ([33, 35, 80], []), ([29, 31, 40], [30])):
        assert np.flatnonzero(is_nan(weights.mass(keys))[0]).tolist() == reached
    assert is_nan(weights.max())
    assert int(weights.argmax()) == 30 * 90
    assert int(weights.argmax(-2)[0, 5]) == 30


@by_ways(*NAMED)
def test_nothing_is_empty_in_the_shapes_that_arrays_have(way):
    for B, H, Lq, Lk in [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)]:
        q, k = np.ones((B, H, Lq, 4)), np.ones((B, H, Lk, 4))
        weights = way.weights(q, k, k)
        assert (weights @ way.convert(np.ones((Lk, 5)))).shape == (B, H, Lq, 5)
        assert (weights.T @ way.convert(np.ones((Lq, 5)))).shape == (B, H, Lk, 5)
        assert (weights @ way.convert(np.ones((Lk, 0)))).shape == (B, H, Lq, 0)
        assert weights.mass([]).shape == (B, H, Lq)
        assert weights.received("seen").shape == (B, H, Lk)
        blocks = weights.blocks(np.arange(Lq), np.zeros(Lk, int), "mean")
        assert blocks.shape == (B, H, Lq, min(Lk, 1))
        distances, values = weights.diagonals()
        assert values.shape == (B, H, len(distances))
        assert weights.diagonals([0, 1]).values.shape == (B, H, 1)
        assert weights.sum().shape == ()
        assert weights.sum(-1).shape == (B, H, Lq)
        assert weights.at([], []).shape == (B, H, 0)


def test_many_columns_take_several_passes():
    weights = AttentionWeights(*numbers(2, 60, 8, dtype=float), causal=True)
    x = numbers(60, 1100, dtype=float, seed=2)
    close(weights @ x, np.asarray(weights) @ x)
    close(weights.T @ x, np.asarray(weights).T @ x)


def test_ints_and_bools_are_numbers_and_lists_are_arrays():
    weights = AttentionWeights(*numbers(2, 9, 4), causal=True)
    assert (weights @ np.arange(9)).dtype == np.float32
    close(weights @ list(range(9)), weights @ np.arange(9.0))
    close(weights @ (np.arange(9) < 4), weights.mass(slice(0, 4)), 1e-6)
    torch_weights = AttentionWeights(*torch.from_numpy(numbers(2, 9, 4)), causal=True)
    assert (torch_weights @ torch.arange(9)).dtype == torch.float32
    assert torch_weights.device == torch.device("cpu")
    assert weights.device == "cpu"


def test_a_head_and_a_part_have_all_of_it():
    weights = AttentionWeights(numbers(2, 4, 30, 8), numbers(2, 2, 40, 8, seed=1), causal=True)
    x, w = numbers(40, 3, seed=2), np.asarray(weights)
    np.testing.assert_allclose(weights.head(3) @ x, w[:, 3] @ x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights.matrix(1, 2) @ x, w[1, 2] @ x, rtol=1e-5, atol=1e-6)
    per_batch = numbers(2, 40, 3, seed=3)
    np.testing.assert_allclose(weights.head(1) @ per_batch, w[:, 1] @ per_batch, atol=1e-5)
    assert weights.matrix(1, 2).at(29, 5) == w[1, 2, 29, 5]


def test_the_transpose_is_a_view():
    weights = AttentionWeights(*numbers(2, 1, 5, 4), causal=True)
    turned = weights.T
    assert turned.shape == (1, 5, 5)
    assert turned.ndim == 3
    assert turned.dtype == np.float32
    assert turned.T is weights
    assert turned.mT is weights
    assert weights.mT.shape == turned.shape
    np.testing.assert_array_equal(np.asarray(turned), np.asarray(weights).swapaxes(-1, -2))
    assert repr(turned).startswith("AttentionWeights(1, 5, 5) float32, computed when asked for")
    assert repr(turned).endswith("transposed to (1, 5, 5)")
    assert AttentionWeights(np.ones((2, 3)), np.ones((4, 3))).T.shape == (4, 2)


def test_few_weights_are_printed_with_their_numbers():
    weights = AttentionWeights(np.eye(2), np.eye(2), scale=1.0, causal=True)
    assert str(weights) == repr(weights)
    assert repr(weights).splitlines() == [
        "AttentionWeights(2, 2) float64, computed when asked for; whole: 32 B",
        "[[1.     0.    ]",
        " [0.2689 0.7311]]",
    ]
    tensors = AttentionWeights(torch.eye(2), torch.eye(2), scale=1.0, causal=True)
    assert "[0.2689 0.7311]" in repr(tensors)
    assert "\n" not in repr(AttentionWeights(np.eye(32), np.eye(32)))
    assert "\n" in repr(AttentionWeights(np.eye(31), np.eye(31)))
    assert "\n" not in repr(AttentionWeights(np.ones((0, 2)), np.ones((3, 2))))
    query = torch.eye(3)
    weights = AttentionWeights(query, torch.eye(3))
    query += 1
    assert "\n" not in repr(weights)


def test_functions_of_numpy_take_weights():
    weights = AttentionWeights(*numbers(2, 6, 4, dtype=float))
    w = np.asarray(weights)
    for function in (np.sum, np.mean, np.max, np.argmax):
        close(function(weights), function(w))
        close(function(weights, axis=-1), function(w, axis=-1))
    close(np.std(weights), np.std(w))
    with pytest.raises(TypeError, match="weights: dtype is not taken"):
        weights.sum(dtype=np.float64)
    with pytest.raises(TypeError, match="weights: out is not taken"):
        weights.argmax(out=np.zeros(6))


def test_methods_of_arrays_that_are_missing_say_what_answers():
    weights = AttentionWeights(*numbers(2, 6, 4, dtype=float))
    answers = {
        "reshape": "np.asarray", "numpy": "np.asarray", "tolist": "np.asarray", "std": "entropy",
        "sort": r"topk\(k\)", "transpose": r"weights\.T ", "dot": "weights @ x",
        "diagonal": "diagonals", "cumsum": "mass", "min": "max",
    }  # fmt: skip
    for name, answer in answers.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*{answer}"):
            getattr(weights, name)
    with pytest.raises(AttributeError, match=r"no attribute 'entropi'$"):
        weights.entropi()
    assert not hasattr(weights, "__array_interface__")


def test_along_heads_or_a_batch_alone_it_is_a_matrix():
    weights = AttentionWeights(*numbers(2, 2, 3, 6, 4))
    for axis, name in itertools.product((0, 1, -3, (0, 1)), ("sum", "mean", "max")):
        if axis in (1, -3) and name != "max":  # of heads: a mix
            right = getattr(np.asarray(weights), name)(axis)
            np.testing.assert_allclose(getattr(weights, name)(axis), right, rtol=1e-5)
            continue
        with pytest.raises(regard.UnsupportedError, match=r"is a matrix again.*Take rows"):
            getattr(weights, name)(axis)
    with pytest.raises(regard.UnsupportedError, match="is a matrix again"):
        weights.mean(1, keepdims=True)
    with pytest.raises(regard.UnsupportedError, match="is a matrix again"):
        weights.head(1).mean(0)
    with pytest.raises(regard.UnsupportedError, match="argmax along axis 1"):
        weights.argmax(1)


FEW_SEEN = {
    "window": {"causal": True, "window": (5, 0)},
    "sinks": {"window": (3, 2), "sinks": numbers(2)},
    "segments": {"segments": (np.arange(700) // 300, np.arange(650) // 250)},
    "intervals": {"intervals": (np.arange(700) % 500, np.arange(700) % 500 + 9)},
    "lengths": {"causal": True, "key_lengths": 480},
}


@by_ways(*NAMED)
@pytest.mark.parametrize("name", FEW_SEEN)
def test_the_query_of_the_largest_weight_is_looked_for_where_a_key_is_seen(name, way, monkeypatch):
    q, k = numbers(2, 700, 4), numbers(2, 650, 4, seed=1)
    q[1, 400] = np.nan
    options = {option: way.convert(x) for option, x in FEW_SEEN[name].items()}
    weights = AttentionWeights(*map(way.convert, (q, k)), backend=way.backend, **options)
    whole, areas, backend = np.asarray(weights), [], type(weights._statistics.backend)
    plain = backend.reduce
    monkeypatch.setattr(
        backend, "reduce", lambda *a: [areas.append(math.prod(a[1].sizes[3:])), plain(*a)][1]
    )
    np.testing.assert_array_equal(weights.argmax(-2), whole.argmax(-2))
    assert sum(areas) < 0.8 * whole.size
    part = weights.part(slice(1, None, 3), slice(100, 600, 2))
    np.testing.assert_array_equal(part.argmax(-2), np.asarray(part).argmax(-2))


@pytest.fixture
def some():
    return AttentionWeights(numbers(2, 4, 6, 8), numbers(2, 2, 9, 8, seed=1))


ERRORS = [
    (lambda w: w @ np.ones(6), regard.ShapeError, r"x has 6 rows, in shape \(6, 1\); 9 are needed"),
    (lambda w: w @ np.ones(1), regard.ShapeError, r"x has 1 row, in shape \(1, 1\); 9 are needed"),
    (lambda w: np.ones((2, 1)) @ w, regard.ShapeError, "x has 1 column, in shape"),
    (lambda w: w.T @ np.ones(9), regard.ShapeError, "y has 9 rows.*6 are needed"),
    (lambda w: np.ones((2, 9)) @ w, regard.ShapeError, r"x has 9 columns, in shape \(2, 9\); 6"),
    (lambda w: w @ 3, regard.ShapeError, r"x is a number; a vector \(9,\) is needed"),
    (lambda w: 3 @ w, regard.ShapeError, r"x is a number; a vector \(6,\) is needed"),
    (lambda w: w @ np.ones((3, 9, 1)), regard.ShapeError, r"leading axes \(3,\).*\(2, 4\), or 1"),
    (lambda w: w @ np.ones((1, 1, 1, 9, 1)), regard.ShapeError, r"leading axes \(1, 1, 1\)"),
    (lambda w: w @ np.ones(9, complex), TypeError, "x is complex128; real numbers are needed"),
    (lambda w: w @ torch.ones(9), TypeError, r"x is a Tensor; an array.*tensor.numpy\(\)"),
    (lambda w: w.blocks(np.arange(5), np.arange(9)), regard.ShapeError,
     r"query_ids have the shape \(5,\); \(6,\), or \(2, 6\), is needed"),
    (lambda w: w.blocks(np.arange(6), np.zeros((3, 9), int)), regard.ShapeError, "key_ids have"),
    (lambda w: w.blocks(np.ones(6), np.arange(9)), TypeError, "query_ids are float64; ints"),
    (lambda w: w.blocks(np.arange(6), np.arange(9) > 3), TypeError, "key_ids are bool; ints"),
    (lambda w: w.blocks(range(6), range(9), "median"), ValueError, "how is 'median'"),
    (lambda w: w.blocks(np.arange(6) + 10**9, np.arange(9)), regard.MaterializeError,
     r"blocks: .*\n +Number the blocks 0, 1, 2"),
    (lambda w: w.diagonals([3]), ValueError, r"edges are \[3\]; two or more rising ints"),
    (lambda w: w.diagonals([3, 3]), ValueError, "two or more rising ints"),
    (lambda w: w.diagonals([2**63 - 1, -(2**63)]), ValueError, "two or more rising ints"),
    (lambda w: w.diagonals(np.array([0, 2**63], "u8")), ValueError, r"has 9223372036854775808; "),
    (lambda w: w.at(np.array([2**64 - 1], "u8"), [0]), IndexError, r"ints up to 2\*\*63 - 1"),
    (lambda w: w.diagonals([0.5, 3]), TypeError, "edges are float64; ints"),
    (lambda w: w.at([6], [0]), IndexError, "queries has 6; there are 6, 0 to 5"),
    (lambda w: w.at([0], [-10]), IndexError, "keys has -10; there are 9, 0 to 8"),
    (lambda w: w.at([0.0], [1]), TypeError, "queries are float64; ints"),
    (lambda w: w.at([0, 1], [1, 2, 3]), regard.ShapeError, "do not broadcast"),
    (lambda w: w.mass(np.ones(5, bool)), regard.ShapeError, r"mask of shape \(5,\); \(9,\)"),
    (lambda w: w.mass([9]), IndexError, "keys has 9; there are 9"),
    (lambda w: w.mass([0.5]), TypeError, "keys are float64"),
    (lambda w: w.at([[0], [0, 1]], 0), TypeError, "queries: lists of several lengths are given"),
    (lambda w: w.part(slice(0)).at(0, 0), IndexError, "queries has 0; there are none"),
    (lambda w: w.at(np.ma.arange(2), 0), TypeError, "queries: a masked array is given"),
    (lambda w: w.mass(np.ma.ones(9, bool)), TypeError, "keys: a masked array is given"),
    (lambda w: w.blocks(np.ma.arange(6), np.arange(9)), TypeError, "query_ids: a masked array"),
    (lambda w: w @ np.ma.ones(9), TypeError, "x: a masked array is given, whose mask would not"),
    (lambda w: w.T @ np.ma.ones(6), TypeError, "y: a masked array is given"),
    (lambda w: np.ma.ones(6) @ w, TypeError, "a masked array is given"),
    (lambda w: w.mix() @ np.ma.ones(9), TypeError, "mix: @: a masked array is given"),
    (lambda w: w.mass(slice(None, None, 0)), TypeError, r"slice\(None, None, 0\); .* not 0"),
    (lambda w: w.mass(torch.zeros(9).bool().to_sparse()), regard.UnsupportedError, "keys is a ten"),
    (lambda w: w.at(torch.zeros(2).int().to_sparse(), 0), regard.UnsupportedError, "queries is a"),
    (lambda w: w.sum(-1, keepdims="no"), TypeError, "keepdims is 'no'; True or False is needed"),
    (lambda w: w.argmax(-1, keepdims=1), TypeError, "keepdims is 1; True or False is needed"),
    (lambda w: w.received("median"), ValueError, "how is 'median'; 'sum', 'seen'"),
    (lambda w: w.received(queries=3), TypeError, "queries is an int; a slice"),
    (lambda w: w.sum(4), IndexError, r"axis 4 is out of range for the 4 axes of \(2, 4, 6, 9\)"),
    (lambda w: w.max(1.0), TypeError, "axis is a float"),
    (lambda w: w.mean((-1, 3)), ValueError, "one of them twice"),
    (lambda w: w.argmax((0, 1)), TypeError, "argmax takes one axis"),
    (lambda w: w.part(slice(0, 0)).max(-2), ValueError, "axis of size 0"),
    (lambda w: w.part(slice(0, 0)).argmax(), ValueError, "axis of no weights"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_what_does_not_fit_is_told(some, number):
    ask, kind, text = ERRORS[number]
    with pytest.raises(kind, match=text):
        ask(some)


def test_edges_are_rising_however_far_they_are_apart(some):
    ends = np.iinfo(np.int64)
    sums = some.diagonals([ends.min, 0, ends.max]).values
    np.testing.assert_allclose(sums.sum(-1), np.asarray(some).sum((-1, -2)), rtol=1e-6)


def test_arrays_and_tensors_do_not_mix():
    weights = AttentionWeights(torch.eye(3), torch.eye(3))
    with pytest.raises(TypeError, match=r"x is an ndarray; a tensor.*torch.as_tensor"):
        weights @ np.ones(3)
    with pytest.raises(TypeError, match="x is complex64; real numbers"):
        weights @ torch.ones(3, dtype=torch.complex64)
    with pytest.raises(TypeError, match="x is on meta and the query on cpu"):
        weights @ torch.ones(3, device="meta")


@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
def test_operands_whose_sign_is_kept_beside_their_numbers_are_read_with_it(backend):
    """As torch keeps the imaginary part of a conjugate."""
    query, key = torch.from_numpy(numbers(2, 2, 6, 4, dtype=float))
    weights = AttentionWeights(query, key, backend=backend)
    x = torch._neg_view(torch.from_numpy(numbers(6, 3, dtype=float)))
    assert x.is_neg()
    assert x.is_contiguous()
    for form in (weights, weights.T):
        close(form @ x, form @ x.resolve_neg())


def test_what_was_written_to_gives_no_sums():
    query = torch.eye(3)
    weights = AttentionWeights(query, torch.eye(3))
    query += 1
    asked = [
        lambda: weights @ torch.ones(3), lambda: weights.T @ torch.ones(3),
        lambda: weights.at(0, 0), lambda: weights.mass([0]), weights.diagonals, weights.sum,
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(RuntimeError, match="query was written to"):
            ask()


def test_a_batch_far_apart_takes_no_room_between():
    """Distances from nearly 0 and from 2⁴⁰ stand side by side."""
    q, k = numbers(2, 1, 3, 4), numbers(2, 1, 5, 4, seed=1)
    for backend in ("kernel", "reference"):
        weights = AttentionWeights(q, k, query_start=np.array([2, 2**40]), backend=backend)
        distances, values = weights.diagonals()
        near, far = np.arange(-2, 5), np.arange(2**40 - 4, 2**40 + 3)
        np.testing.assert_array_equal(distances, np.concatenate([near, far]))
        np.testing.assert_allclose(values.sum(-1), 3, rtol=1e-5)
        assert (values[0, 0, 7:] == 0).all()
        assert (values[1, 0, :7] == 0).all()


def test_sums_of_many_take_linear_memory():
    T = 6000
    weights = AttentionWeights(*numbers(2, T, 8), causal=True)
    ids = np.arange(T) // 100

    def sums():
        weights @ np.ones(T), weights.T @ np.ones(T), weights.blocks(ids, ids, "mean")
        weights.diagonals(), weights.received("seen"), weights.at(np.arange(T), np.arange(T))

    assert peak_bytes(sums) < T * T / 8  # bytes: the matrix has 4 T²
