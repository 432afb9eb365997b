"""Effects, mixes and comparisons by the kernels, on sizes of several tiles, against float64."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import regard
from definition import define, visible_pairs
from recordings import numbers
from regard import AttentionWeights
from regard._weights.compare import Comparison
from test_compare import KINDS, distributions, right
from test_effects import SHOWN, scale_of
from traced import peak_bytes

Hq, Hkv, Lq, Lk, D, Dv = 4, 2, 301, 333, 16, 7
MASK = np.random.default_rng(5).random((Hq, Lq, Lk)) < 0.7
OPTIONS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (70, 0)},
    "mask": {"mask": MASK},
    "sinks": {"causal": True, "sinks": numbers(Hq, seed=3)},
    "segments": {"segments": (np.arange(Lq) // 90, np.arange(Lk) // 101)},
    "bias and softcap": {"bias": 2 * numbers(Lq, Lk, seed=6), "softcap": 3.0},
}


@pytest.fixture(autouse=True)
def never_in_blocks(monkeypatch):
    """The tests fail where rows are computed block by block."""

    def blocks(self):
        raise AssertionError("the kernels do not serve this")

    monkeypatch.setattr(regard.PairMatrix, "_blocks", blocks)
    monkeypatch.setattr(Comparison, "_both", blocks)


def operands():
    """The first key draws most of the weight of every third query."""
    q, k = numbers(Hq, Lq, D, seed=1), numbers(Hkv, Lk, D, seed=2)
    k[:, 0] = 2 * numbers(D, seed=3)
    q[:, ::3] += numbers(D, seed=3)
    return q, k, numbers(Hkv, Lk, Dv, seed=4), numbers(Hq, Lq, Dv, seed=5)


class OneHead:
    """A matrix with an axis of heads."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __getattr__(self, name):
        def ask(*args):
            found = getattr(self.matrix, name)(*args)
            return tuple(x[None] for x in found) if isinstance(found, tuple) else found[None]

        return ask


def check(matrix, exact, scale):
    """Everything that the kernels reduce, of matrices ``(Lq, Lk)`` in float64, NaN where masked."""
    if exact.ndim == 2:
        matrix, exact = OneHead(matrix), exact[None]
    bound = {"rtol": 0, "atol": 1e-6 * scale}
    seen = ~np.isnan(exact)
    exact = np.nan_to_num(exact)
    for k in (5, 70):
        values, keys = matrix.topk(k)
        np.testing.assert_allclose(values, np.take_along_axis(exact, keys, -1), **bound)
        np.testing.assert_allclose(abs(values), -np.sort(-abs(exact), -1)[..., :k], **bound)
        assert (np.diff(np.sort(keys, -1), axis=-1) > 0).all()
    i, j, values = matrix.strongest(40)
    flat = abs(exact).reshape(len(exact), -1)
    for h in range(len(exact)):
        np.testing.assert_allclose(values[h], exact[h, i[h], j[h]], **bound)
        np.testing.assert_allclose(abs(values[h]), -np.sort(-flat[h])[:40], **bound)
    sums, largest = matrix.received(), matrix.received("max")
    of_sums = 1e-6 * scale * exact.shape[-2] ** 0.5  # roundings of as many numbers, of either sign
    np.testing.assert_allclose(sums, exact.sum(-2), rtol=0, atol=of_sums)
    np.testing.assert_allclose(abs(largest), abs(exact).max(-2), **bound)
    assert (abs(largest[:, None] - exact).min(1) <= 1e-6 * scale).all()
    for size in [(50, 64), (301, 333), (1, 1)]:
        edges = [np.arange(n + 1) * m // n for n, m in zip(size, exact.shape[-2:])]
        found = matrix.pool(size, ("max", "mass"))
        for r, c in {*map(tuple, np.random.default_rng(0).integers(0, size, (25, 2)).tolist())}:
            bin_ = np.s_[:, edges[0][r] : edges[0][r + 1], edges[1][c] : edges[1][c + 1]]
            x, visible = exact[bin_], seen[bin_]
            count = visible.sum((1, 2))
            assert (np.isnan(found[0][:, r, c]) == (count == 0)).all()
            most = np.where(count, abs(x).max((1, 2)), np.nan)
            np.testing.assert_allclose(abs(found[0][:, r, c]), most, **bound)
            mean = np.where(count, x.sum((1, 2)) / np.maximum(count, 1), np.nan)
            np.testing.assert_allclose(found[1][:, r, c], mean, **bound)


def visible(options):
    seen = {name: x for name, x in options.items() if name in SHOWN}
    return np.broadcast_to(visible_pairs(1, Hq, Lq, Lk, **seen)[0], (Hq, Lq, Lk))


def whole(q, k, **options):
    """Weights and log-sum-exp in float64."""
    return [x[0] for x in define(q[None], k[None], **options)]


def others(x):
    """Along each row the sums of all but one, without a difference."""
    before, after = np.cumsum(x, -1), np.cumsum(x[..., ::-1], -1)[..., ::-1]
    nothing = np.zeros((*x.shape[:-1], 1))
    return np.concatenate([nothing, before[..., :-1]], -1) + np.concatenate(
        [after[..., 1:], nothing], -1
    )


def dense(kind, q, k, v, g, **options):
    """Effects from whole matrices in float64; NaN where masked."""
    w, lse = whole(q, k, **options)
    seen = visible(options)
    gv = np.where(seen, g.astype(float) @ v.astype(float).repeat(Hq // Hkv, 0).swapaxes(1, 2), 0)
    of_sink = np.exp(options["sinks"][:, None] - lse)[..., None] if "sinks" in options else 0.0
    if kind == "knockout":
        x = w * (others(w * gv) / np.maximum(others(w) + of_sink, 1e-300) - gv)
    else:
        x = {"contribution": w * gv, "relevance": np.maximum(w * gv, 0), "gradient": gv}[kind]
    return np.where(seen, x, np.nan)


@pytest.mark.parametrize("name", OPTIONS)
def test_effects_are_those_of_the_dense_formula(name):
    options, (q, k, v, g) = OPTIONS[name], operands()
    weights = AttentionWeights(q, k, **options)
    assert name in ("segments", "mask") or (np.asarray(weights) > 0.5).any()
    exact = dense("knockout", q, k, v, g, **options)
    check(weights.effects(v, g), exact, scale_of(v, g))


@pytest.mark.parametrize("kind", ["contribution", "relevance", "gradient"])
def test_other_kinds_too(kind):
    q, k, v, g = operands()
    exact = dense(kind, q, k, v, g, causal=True)
    check(AttentionWeights(q, k, causal=True).effects(v, g, kind), exact, scale_of(v, g))


def changes(q, k, v, **options):
    """The changes by outputs without each pair, in float64; NaN where masked."""
    w, lse = whole(q, k, **options)
    v = v.astype(float).repeat(len(q) // len(v), 0)[:, None]
    with np.errstate(all="ignore"):
        of_sink = np.exp(options["sinks"][:, None] - lse)[..., None] if "sinks" in options else 0.0
        left = others((w[..., None] * v).swapaxes(2, 3)).swapaxes(2, 3)
        left = np.nan_to_num(left / (others(w) + of_sink)[..., None], posinf=0.0)
    seen = {name: x for name, x in options.items() if name in SHOWN}
    seen = np.broadcast_to(visible_pairs(1, *w.shape, **seen)[0], w.shape)
    return np.where(seen, w * np.linalg.norm(left - v, axis=-1), np.nan)


def size_of(v):
    return np.linalg.norm(v.astype(float), axis=-1).max()


def asked_whole(matrix):
    """Every number, from the kernels' top-k."""
    values, keys = (np.asarray(x) for x in matrix.topk(matrix.shape[-1]))
    found = np.full(values.shape, np.nan)
    np.put_along_axis(found, keys, values, -1)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_changes_are_those_of_outputs_without_the_pair(name):
    options, (q, k, v, _) = OPTIONS[name], (x.astype(float) for x in operands())
    effects = AttentionWeights(q, k, **options).effects(v, kind="change")
    exact = changes(q, k, v, **options)
    for rows in (slice(7, 290, 3), slice(None), slice(5, None, 2)):  # the last ones know outputs
        if rows == slice(None):
            check(effects, exact, size_of(v))
        found, right_ = asked_whole(effects.part(rows)), np.nan_to_num(exact[:, rows])
        np.testing.assert_allclose(found, right_, rtol=0, atol=1e-12 * size_of(v))


VALUES = {
    "alike": lambda v: 1e-3 * v + 5,
    "equal": lambda v: 0 * v + 3,
    "of the first key": lambda v: np.where(np.arange(Lk)[:, None] % 3, v, v[:, :1]),
    "zero": lambda v: 0 * v,
    "tiny": lambda v: 1e-35 * v,
    "huge": lambda v: 1e30 * v,
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("size", [0.1, 1.0, 2.0])  # of scores
def test_changes_in_float32_are_within_a_millionth_of_the_values(name, size):
    q, k, v, _ = (x.astype(np.float32) for x in operands())
    q, v = (size * q).astype(np.float32), VALUES[name](v.astype(float)).astype(np.float32)
    exact = np.nan_to_num(changes(q, k, v, causal=True))
    effects = AttentionWeights(q, k, causal=True).effects(v, kind="change")
    for _ in range(2):
        assert (abs(asked_whole(effects) - exact) <= 1e-6 * size_of(v)).all()


@pytest.mark.parametrize("n", [0, 1, 7, 97, 1025])
@pytest.mark.parametrize("Dv", [1, 3, 130])
def test_changes_of_any_size(n, Dv):
    q, k, v = (numbers(1, n, d, seed=n + d).astype(np.float32) for d in (5, 5, Dv))
    exact = np.zeros((1, n, n))
    for i in range(0, n, 8):  # few rows, whose n changes each of the values stay in a cache
        rows = changes(2 * q[:, i : i + 8], k, v, causal=True, query_start=i)
        exact[:, i : i + 8] = np.nan_to_num(rows)
    found = AttentionWeights(2 * q, k, causal=True).effects(v, kind="change")
    bound = 1e-6 * size_of(v) if n else 0.0
    assert found.shape == exact.shape
    assert not n or (abs(asked_whole(found) - exact) <= bound).all()


def test_changes_have_every_digit_where_a_weight_is_almost_1():
    q, k = np.ones((1, 70, 1), np.float32), np.zeros((1, 300, 1), np.float32)
    k[:, 7] = 25
    v = numbers(1, 300, 5, seed=1).astype(np.float32)
    exact = changes(q, k, v, scale=1.0)
    found = AttentionWeights(q, k, scale=1.0).effects(v, kind="change")
    np.testing.assert_allclose(asked_whole(found), exact, rtol=2e-5)
    alone = AttentionWeights(q, 8 * k, scale=1.0).effects(v, kind="change")
    size = np.linalg.norm(v[0, 7])
    np.testing.assert_allclose(asked_whole(alone)[..., 7], size, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_changes_of_narrow_dtypes_are_in_float32(dtype):
    given = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in operands()[:3]]
    q, k, v = (x.double().numpy() for x in given)
    found = AttentionWeights(*given[:2], causal=True).effects(given[2], kind="change")
    half = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    exact = np.nan_to_num(changes(q, k, v, causal=True))
    assert (abs(asked_whole(found) - exact) <= half * size_of(v)).all()


@pytest.mark.parametrize("size", [1.0, 30.0])  # of scores: weights below 1/2, and above
def test_changes_of_values_that_are_nan(size):
    q, k, v, _ = (x.astype(float) for x in operands())
    options = {"causal": True, "query_start": 0, "mask": np.arange(Lk) != 40}
    exact = changes(size * q, k, v, **options)
    v[:, 40], v[:, 200] = np.nan, np.nan
    effects = AttentionWeights(size * q, k, **options).effects(v, kind="change")
    found = asked_whole(effects)
    np.testing.assert_allclose(found[:, :200], np.nan_to_num(exact[:, :200]), atol=1e-11)
    assert np.isnan(found[:, 200:, 200]).all()
    assert np.isfinite(found[:, :, 201:][np.isnan(exact[:, :, 201:])]).all()
    assert np.isnan(effects.received()[:, 200]).all()


def test_changes_follow_values_that_were_written_to():
    q, k, v, _ = (x.astype(float) for x in operands())
    effects = AttentionWeights(q, k, causal=True).effects(v, kind="change")
    effects.received()
    v[:, 3:50] = v[:, 60:107][..., ::-1]
    bound = {"rtol": 0, "atol": 1e-12 * size_of(v)}
    exact = np.nan_to_num(changes(q, k, v, causal=True))
    np.testing.assert_allclose(asked_whole(effects), exact, **bound)
    twin = pickle.loads(pickle.dumps(effects))
    np.testing.assert_allclose(asked_whole(twin), exact, **bound)


def answers(effects):
    found = [*effects.topk(5), *effects.topk(70), *effects.strongest(9), effects.received(),
             effects.received("max"), *effects.pool((30, 40), ("max", "mass"))]  # fmt: skip
    rows = effects.part(slice(40, 290, 3))
    return [*found, *rows.topk(4), rows.received()]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_later_question_has_the_bits_of_the_first(name):
    """The sums of a row are known then, and nothing of a whole row is kept."""
    q, k, v, g = operands()
    for kind in ("knockout", "change"):
        weights = AttentionWeights(q, k, **OPTIONS[name])
        effects = weights.effects(v, g, kind)
        first, again = answers(effects), answers(effects)
        for n, (x, y) in enumerate(zip(first, again)):
            alone = answers(weights.effects(v, g, kind))[n] if n in (1, 4, 7, 9) else x
            np.testing.assert_array_equal(x, y)
            np.testing.assert_array_equal(x, alone)


def test_questions_at_once_have_the_bits_of_one_alone():
    q, k, v, g = operands()
    weights = AttentionWeights(q, k, causal=True)
    alone = weights.effects(v, g).received()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            effects = weights.effects(v, g)
            for found in pool.map(lambda _, one=effects: one.received(), range(4)):
                np.testing.assert_array_equal(found, alone)


def test_knockouts_follow_arrays_that_were_written_to():
    """NumPy counts no writes."""
    given = [x.astype(float) for x in operands()]
    for n in (2, 3):
        q, k, v, g = given
        effects = AttentionWeights(q, k, causal=True).effects(v, g)
        effects.received()
        given[n][:, 3:50] = given[n][:, 60:107][..., ::-1]
        exact = np.nan_to_num(dense("knockout", q, k, v, g, causal=True))
        bound = {"rtol": 0, "atol": 1e-11 * scale_of(v, g)}
        np.testing.assert_allclose(effects.received(), exact.sum(-2), **bound)
        twin = pickle.loads(pickle.dumps(effects))
        np.testing.assert_allclose(twin.received(), exact.sum(-2), **bound)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_with_the_output_effects_are_the_same(name, dtype):
    q, k, v, g = (x.astype(dtype) for x in operands())
    options = {name: x.astype(dtype) if name == "bias" else x for name, x in OPTIONS[name].items()}
    output, weights = regard.attention(q, k, v, **options, return_weights=True)
    exact = dense("knockout", q, k, v, g, **options)
    check(weights.effects(v, g, output=output), exact, scale_of(v, g))
    bound = {"rtol": 0, "atol": (1e-6 if dtype == "float32" else 1e-13) * scale_of(v, g)}
    for _ in range(2):
        effects = weights.effects(v, g, output=output)
        alone = weights.effects(v, g)
        np.testing.assert_allclose(abs(effects.topk(9)[0]), abs(alone.topk(9)[0]), **bound)
    head = weights.effects(v, g, output=output).head(2)
    np.testing.assert_array_equal(head.topk(9)[0], effects.topk(9)[0][2])


def test_an_output_of_another_attention_is_found():
    q, k, v, g = operands()
    output, weights = regard.attention(q, k, v, causal=True, return_weights=True)
    off = output.copy()
    off[2] *= 1.01
    effects = weights.effects(v, g, output=off)
    effects.head(1).received()
    with pytest.raises(ValueError, match=r"not that of these .* in query 150 of head 2 it is off"):
        effects.received()
    with pytest.raises(ValueError, match=r"not that of these weights and values"):
        weights.effects(v, g, output=regard.attention(q[::-1], k, v)).strongest(3)


def test_sums_of_changes_and_others():
    q, k, v, g = operands()
    weights, scale = AttentionWeights(q, k, causal=True), scale_of(v, g)
    terms = weights.effects(v, kind="change"), weights, weights.effects(v, g)
    exact = 2 * changes(q, k, v, causal=True) + whole(q, k, causal=True)[0]
    exact = exact - dense("knockout", q, k, v, g, causal=True) / scale
    for _ in range(2):
        check(regard.mix(terms, [2, 1, -1 / scale]), exact, 2 * size_of(v) + 2)


@pytest.mark.parametrize("name", ["causal", "mask", "sinks"])
def test_mixes_are_sums(name):
    options, (q, k, v, g) = OPTIONS[name], operands()
    weights = AttentionWeights(q, k, **options)
    other = AttentionWeights(2 * q, k, window=(40, None), causal=True)
    seen, w = visible(options), whole(q, k, **options)[0]
    mean = np.where(seen.any(0), w.mean(0), np.nan)
    check(regard.mix([weights.mix()]), mean, 1)
    effects = np.nan_to_num(dense("knockout", q, k, v, g, **options)) / scale_of(v, g)
    of_other = whole(2 * q, k, window=(40, None), causal=True)[0]
    seen = seen | visible({"window": (40, None), "causal": True})
    found = regard.mix([other, weights.effects(v, g)], [2, -1 / scale_of(v, g)])
    check(found, np.where(seen, 2 * of_other - effects, np.nan), 3)


@pytest.mark.parametrize("name", ["causal", "mask", "sinks"])
def test_divergences_of_several_tiles(name):
    options, (q, k, *_) = OPTIONS[name], operands()
    other = q + numbers(*q.shape, seed=9) / 2
    pair = [AttentionWeights(x, k, **options) for x in (q, other)]
    a, b = (distributions(x[None], k[None], **options)[0] for x in (q, other))
    found = regard.compare(*pair).divergences(70)
    mean = regard.compare(*(one.mix() for one in pair)).divergences(3)
    for kind in KINDS:
        for x, exact in ((found, right(kind, a, b)), (mean, right(kind, a.mean(0), b.mean(0)))):
            wanted = np.maximum(1, exact)
            assert (abs(getattr(x, kind) - exact) <= 1e-6 * wanted).all(), kind
    best = [np.argsort(-x[..., :-1], -1, kind="stable")[..., :70] for x in (a, b)]
    counts = [np.minimum((x[..., :-1] > 0).sum(-1), 70) for x in (a, b)]
    for h, i in [(0, 0), (1, 20), (2, 150), (3, 300)]:
        of_a, of_b = (set(at[h, i][: n[h, i]]) for at, n in zip(best, counts))
        share = len(of_a & of_b) / max(len(of_a), len(of_b), 1)
        assert abs(found.overlap[h, i] - share) <= 1.5 / 70  # the 70th may be equal to the 71st


@pytest.mark.parametrize("kind", ["knockout", "change"])
def test_any_number_of_threads_gives_the_same_bits(kind):
    q, k, v, g = operands()
    before, found = regard.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            regard.set_num_threads(threads)
            weights = AttentionWeights(q, k, causal=True)
            effects = weights.effects(v, None if kind == "change" else g, kind)
            found.append([*effects.topk(3), *effects.strongest(9), effects.received(),
                          *effects.pool((30, 40), ("max", "mass"))])  # fmt: skip
    finally:
        regard.set_num_threads(before)
    for one in found[1:]:
        for x, y in zip(found[0], one):
            np.testing.assert_array_equal(x, y)


B = 2
COUNT = np.stack([np.arange(Lq)] * B)
OF_HEADS = {  # options that differ between batch elements or heads
    "key lengths": {"key_lengths": [333, 170], "causal": True},
    "intervals": {"intervals": (COUNT + [[-40], [0]], COUNT + [[30], [60]])},
    "segments": {"segments": (COUNT // 90 % [[2], [3]], np.arange(Lk) // 101 % [[2], [3]])},
    "mask of each batch element": {"mask": np.stack([MASK[:1], MASK[1:2]])},
    "causal mask of one": {"mask": np.stack([np.tri(Lq, Lk, dtype=bool), MASK[0]])[:, None]},
    "mask of each head": {"mask": np.stack([MASK, MASK[::-1]])},
    "bias of each head": {"bias": numbers(B, Hq, Lq, Lk, seed=8)},
    "sinks": {"sinks": numbers(Hq, seed=3)},
    "edits": {
        "edits": [
            regard.Edit(heads=slice(1, 3), queries=slice(20, 200), keys=slice(0, 90), factor=0.0),
            regard.Edit(heads=2, keys=slice(50, 60), factor=3.0),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OF_HEADS)
def test_a_head_among_others_has_the_bits_of_one_alone(name):
    def several(x, seed):
        return np.stack([x, x + 0.1 * numbers(*x.shape, seed=seed)])

    q, k, v, g = (several(x, seed) for seed, x in enumerate(operands(), 30))
    options = OF_HEADS[name]
    weights = regard.AttentionWeights(q, k, **options)
    others = regard.AttentionWeights(q - 0.1 * g[..., :1], k, **options)
    rows, same = slice(7, None, 3), np.testing.assert_array_equal
    effects, compared = weights.effects(v, g), regard.compare(weights, others)
    sums, of_rows = effects.received(), effects.part(rows).received()
    far = compared.divergences(8)
    mean = weights.mix(heads=[0, 2]).received()
    exact = np.asarray(weights, np.float64)[:, [0, 2]].mean(1).sum(1)
    np.testing.assert_allclose(mean, exact, rtol=0, atol=1e-4)
    for b, h in np.ndindex(B, Hq):
        own = weights.matrix(b, h)
        alone = own.effects(v[b, h // 2], g[b, h])
        same(sums[b, h], alone.received())
        same(of_rows[b, h], alone.part(rows).received())
        for of_all, one in zip(far, regard.compare(own, others.matrix(b, h)).divergences(8)):
            same(of_all[b, h], one)
        if h == 0:
            both = regard.mix([own, weights.matrix(b, 2)])
            same(mean[b], both.received())


def test_a_mix_of_many_effects_has_the_operands_of_a_few_matrices_in_memory():
    n, count = 512, 16
    q, k, v, g = (numbers(32, n, size, seed=size).astype(np.float16) for size in (8, 9, 64, 64))
    effects = AttentionWeights(q, k[..., :8]).effects(v, g, kind="contribution")
    mix = regard.mix([effects] * count)
    mix.received()
    one = count * 2 * n * 64 * 4  # of 32: value and gradient of each term, as the kernels read them
    assert peak_bytes(mix.received) < 8 * one


def test_nan_is_behind_all_others_and_seen_in_sums():
    q, k, v, g = operands()
    v[0, 40] = np.nan
    effects = AttentionWeights(q, k, causal=True).effects(v, g, "contribution")
    values, keys = effects.topk(Lk)
    first = np.argmax(np.isnan(values[0]), -1)
    for i in (50, 200):
        visible = i + 1 + Lk - Lq
        assert keys[0, i, visible - 1] == 40
        assert first[i] == visible - 1
    assert np.isnan(effects.received()[0, 40])
    assert not np.isnan(effects.received()[0, 41])
    pooled = effects.pool((Lq, Lk))
    assert np.isnan(pooled[0, 100, 40])
    assert np.isfinite(pooled[0, 100, 41])
    assert not (effects.strongest(50).key[0] == 40).any()
