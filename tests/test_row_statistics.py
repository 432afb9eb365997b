"""What the rows of the weights need is computed where it is asked for, once, with the same bits."""

import threading

import numpy as np
import pytest
import torch

import regard
from recordings import numbers
from regard import AttentionWeights, Edit
from regard._backends import formula, kernel
from regard._backends.kernel import Kernel
from regard._base.arrays import to_numpy
from regard._call.checks import read_call
from regard._weights.statistics_cache import BLOCK, Place, StatisticsCache
from strategies import to_torch


@pytest.fixture
def computed(monkeypatch):
    """``(B, Hq, Lq)`` of every call whose row statistics the kernels were asked for."""
    shapes = []
    forward, reduce = kernel.kernels.forward, kernel.kernels.reduce

    def forward_spy(call, out, maximum, total, threads):
        if maximum:
            shapes.append(sizes.pop())
        return forward(call, out, maximum, total, threads)

    def reduce_spy(call, asked, threads):
        if asked.finds_statistics:
            shapes.append(sizes.pop())
        return reduce(call, asked, threads)

    sizes, read = [], kernel.call_as_read

    def told(call):
        sizes[:] = [tuple(call.query.shape[:3])]
        return read(call)

    monkeypatch.setattr(kernel, "call_as_read", told)
    monkeypatch.setattr(kernel.kernels, "forward", forward_spy)
    monkeypatch.setattr(kernel.kernels, "reduce", reduce_spy)
    return shapes


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_row_costs_a_block_of_rows_of_its_head_and_the_next_question_nothing(library, computed):
    q, k = numbers(2, 3, 1000, 8), numbers(2, 3, 1000, 8, seed=1)
    if library == "torch":
        q, k = torch.from_numpy(q), torch.from_numpy(k)
    weights = AttentionWeights(q, k, causal=True)
    weights[1, 2, 5]
    assert computed == [(1, 1, BLOCK)]
    weights[1, 2, 7:30:3], weights.pool((2, 9), rows=slice(0, 0)), weights[1, 2, 5]
    weights.matrix(1, 2).pool((9, 9), "mass", rows=slice(3, BLOCK))
    assert computed == [(1, 1, BLOCK)]
    weights.pool((9, 9), rows=slice(300, 556))
    assert computed[1:] == [(2, 3, 256)]
    weights[0, 0, 320], weights[:, :, 400:500:7]
    assert len(computed) == 2


def test_every_nth_row_costs_those_rows(computed):
    weights = AttentionWeights(*numbers(2, 3, 1000, 8))
    weights[1, ::10]
    assert computed == [(1, 1, 100)]
    weights.part(slice(0, None, 20)).entropy()
    assert computed[1:] == [(1, 3, 50)]


def test_a_whole_question_computes_all_that_is_missing_at_once(computed):
    weights = AttentionWeights(*numbers(2, 4, 500, 8), causal=True)
    weights[3, 100:200]
    weights.entropy()
    assert computed == [(1, 1, 100), (1, 4, 500)]
    weights.received(), weights.summary(), weights[2], np.asarray(weights), weights.copy().lse
    assert len(computed) == 2


def test_the_whole_matrix_takes_one_pass_for_all_heads(computed):
    np.asarray(AttentionWeights(*numbers(2, 4, 100, 8)))
    assert computed == [(1, 4, 100)]


def test_weights_of_an_output_have_its_statistics(computed):
    q = numbers(2, 300, 8)
    _, weights = regard.attention(q, q, q, return_weights=True)
    assert computed == [(1, 2, 300)]
    weights[0, 5], weights.entropy(), weights.part(slice(3, None, 5)).received()
    assert len(computed) == 1


SHAPES = {  # B, Hq, Hkv, Lq, Lk: keys to split, tiles of rows with several heads
    "long": (2, 4, 2, 300, 2500),
    "few rows": (2, 4, 2, 7, 2500),
    "few rows of a head": (1, 6, 2, 33, 2500),
    "one row": (1, 4, 1, 1, 2500),
}
OPTIONS = {
    "none": lambda Lq, Lk: {},
    "causal": lambda Lq, Lk: {"causal": True},
    "window": lambda Lq, Lk: {"causal": True, "window": (333, 0)},
    "segments": lambda Lq, Lk: {"segments": (np.arange(Lq) * 7 // Lq, np.arange(Lk) * 7 // Lk)},
    "scattered": lambda Lq, Lk: {"segments": (np.arange(Lq) % 3, np.arange(Lk) % 3)},
    "mask": lambda Lq, Lk: {"mask": numbers(1, 1, Lq, Lk, seed=5) > 0.5},
    "bias": lambda Lq, Lk: {"bias": numbers(Lq, Lk, seed=6), "softcap": 5.0},
    "edits": lambda Lq, Lk: {
        "edits": [
            Edit(1, slice(Lq // 2, None), slice(0, 1700)),
            Edit(None, -1, slice(99, 700), 2.0),
        ]
    },
}


# Every pair of options, a shape and a dtype.
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        (name, shape, ["float32", "float64", "bfloat16"][(n + m) % 3])
        for n, name in enumerate(OPTIONS)
        for m, shape in enumerate(SHAPES)
    ],
)
def test_a_row_has_the_same_bits_in_the_kernel_whatever_is_asked_first(name, shape, dtype):
    B, Hq, Hkv, Lq, Lk = SHAPES[shape]
    options = OPTIONS[name](Lq, Lk)
    options["sinks"] = numbers(Hq, seed=7)
    q, k = 3 * numbers(B, Hq, Lq, 24), numbers(B, Hkv, Lk, 24, seed=1)
    if B > 1 and "segments" not in options:
        options["key_lengths"] = np.array([Lk, Lk - 300])
    q, k = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (q, k))
    call = read_call(q, k, None, **to_torch(options))
    whole = Place.whole(call)
    expected = StatisticsCache(call, Kernel()).of(whole)
    rng, asked = np.random.default_rng(0), StatisticsCache(call, Kernel())
    for _ in range(12):
        b, h, i, n, step = rng.integers((B, Hq, Lq, Lq + 1, 9))
        place = Place(range(b, b + 1), range(h, h + 1), range(i, min(i + n, Lq), 1 + step))
        found = asked.of(place)
        for x, y in zip(found, expected):
            np.testing.assert_array_equal(x, y[place.slices])
    for x, y in zip(asked.of(whole), expected):
        np.testing.assert_array_equal(x, y)


# Every pair of options, a shape and a dtype.
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        (name, ("long", "few rows of a head", "few rows")[(n + m) % 3], dtype)
        for n, name in enumerate(OPTIONS)
        for m, dtype in enumerate(("float32", "float64", "bfloat16", "float16"))
    ],
)
def test_a_picture_has_the_same_bits_whether_its_rows_were_known(name, shape, dtype, computed):
    rng = np.random.default_rng(3)
    B, Hq, Hkv, Lq, Lk = SHAPES[shape]
    options = OPTIONS[name](Lq, Lk)
    options["sinks"] = numbers(Hq, seed=7)
    q, k = 3 * numbers(B, Hq, Lq, 24), numbers(B, Hkv, Lk, 24, seed=1)
    q[0, 0, Lq // 2] = np.nan
    q, k = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (q, k))
    fresh, known = (AttentionWeights(q, k, **to_torch(options)) for _ in range(2))
    assert known.lse is not None
    for R, C in ((1, 1), (Lq, 64), (17, 100), (40, 2500), (Lq, 625)):
        low = rng.integers(Lq)
        high = rng.integers(low, Lq) + 1
        step = int(rng.integers(1, 4))
        fresh._statistics = StatisticsCache(fresh._call, Kernel())
        asked = (x.part(slice(low, high, step)).pool((R, C)) for x in (fresh, known))
        np.testing.assert_array_equal(*(to_numpy(x) for x in asked))
        place = fresh.part(slice(low, high, step))._place
        for x, y in zip(*(w._statistics.of(place) for w in (fresh, known))):
            np.testing.assert_array_equal(x, y)
        assert fresh._statistics.known(place)
    assert len(computed) == 1 + 5  # and no question twice


def test_a_picture_of_very_many_bins_and_one_of_a_part_of_the_keys_know_the_rows_first(computed):
    q, k = numbers(200, 4), numbers(5000, 4, seed=1)
    for ask in (
        lambda weights: weights.pool((200, 5000)),
        lambda weights: weights.pool((9, 9), columns=slice(7, 70)),
        lambda weights: weights.pool((9, 9), ("max", "mass")),
    ):
        weights = AttentionWeights(q, k)
        picture = ask(weights)
        np.testing.assert_array_equal(ask(weights), picture)
    assert computed == 3 * [(1, 1, 200)]
    empty = AttentionWeights(q, k[:0])
    assert empty.pool((3, 3)).shape == (3, 0)
    assert (empty.lse == -np.inf).all()


@pytest.mark.parametrize("size", [1.0, 2e6])
def test_rows_that_are_asked_for_alone_sum_to_one_at_any_size_of_the_scores(size):
    q, k = numbers(2, 300, 16), numbers(2, 2500, 16, seed=1)
    weights = AttentionWeights(q * np.float32(size), k, scale=1.0)
    assert abs(weights.copy().lse).max() > size
    for rows in (5, slice(70, 71), slice(3, None, 50)):
        np.testing.assert_allclose(weights[1, rows].sum(-1, dtype=np.float64), 1, atol=1e-6)
    np.testing.assert_allclose(weights[...].sum(-1, dtype=np.float64), 1, atol=1e-6)


# Scores of key j: slope * j + offset. A row's largest lies far above or below those that came
# before, by up to where their weights are infinite, and every row's elsewhere.
SLOPES = [0, 0, 0.5, -0.5, 3, -3, 100, -100, 0, 2e36]


@pytest.mark.parametrize("hidden", [0, 70])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_row_whose_scores_rise_has_its_own_maximum_and_bits(dtype, hidden):
    Lk, slopes = 333, np.resize(SLOPES[: 9 if dtype == "float16" else None], 37)
    q, k, v = np.zeros((1, 1, 37, 8)), np.zeros((1, 1, Lk, 8)), numbers(1, 1, Lk, 8)
    q[..., 0], q[..., 1] = slopes, 1
    k[..., 0], k[..., 1] = np.arange(Lk) // 2, 5 * np.sin(np.arange(Lk))
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (q, k, v))
    low = np.arange(37) % 2 * hidden  # every other row lacks the first keys
    call = {"scale": 1.0, "intervals": (low, np.full(37, Lk)), "backend": "kernel"}
    out = regard.attention(q, k, v, **call)

    scores = np.einsum("bhid,bhjd->bhij", q.double(), k.double())
    scores[..., np.arange(Lk) < low[:, None]] = -np.inf
    maximum = scores.max(-1)
    weights = np.exp(scores - maximum[..., None])
    weights /= weights.sum(-1, keepdims=True)
    error = {"float64": 1e-11, "float32": 3e-3}.get(dtype, 0.02)
    np.testing.assert_allclose(out.double(), weights @ v.double().numpy(), rtol=0, atol=error)

    again, statistics = regard.attention(q, k, v, return_statistics=True, **call)
    assert torch.equal(out, again)
    np.testing.assert_allclose(statistics.maximum.double(), maximum, rtol=1e-6, atol=1e-6)
    for row in (0, 4, 6, 35):
        one = slice(row, row + 1)
        alone = call | {"intervals": (np.full(33, low[row]), np.full(33, Lk))}
        part = regard.attention(q[:, :, one].expand(1, 1, 33, 8), k, v, **alone)
        assert torch.equal(part[:, :, :1], out[:, :, one]), row


@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "window": (50, 0)}])
@pytest.mark.parametrize("hides", [False, True], ids=["finite", "nan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_output_has_the_bits_that_it_has_without_statistics(dtype, hides, options):
    """Where scores rise from key to key, and where values are NaN that some of the rows see.

    Tiles of queries follow one another without a pause: alone they have the same numbers.
    """
    T, error = 256, 1e-6 if dtype == "float32" else 0.01
    q, k, v = (torch.from_numpy(numbers(1, 2, T, 64, seed=n)) for n in range(3))
    q[..., 0], k[..., 0] = 8, torch.linspace(0, 30, T)
    if hides:
        v[..., [70, 131, T - 1], :] = torch.nan
        v[:, 1, [64, 200]] = torch.inf
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    out = regard.attention(q, k, v, backend="kernel", **options)
    again, _ = regard.attention(q, k, v, backend="kernel", return_statistics=True, **options)
    torch.testing.assert_close(again, out, rtol=0, atol=0, equal_nan=True)
    for row in range(0, T, 32):
        some = {"query_start": row, "backend": "kernel", **options}
        part = regard.attention(q[:, :, row : row + 32], k, v, **some)
        there = out[:, :, row : row + 32]
        torch.testing.assert_close(part, there, rtol=error, atol=error, equal_nan=True)


@pytest.mark.parametrize("hides", [False, True], ids=["finite", "nan"])
@pytest.mark.parametrize("Lk", [256, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_queries_that_see_no_key_leave_those_before_them_alone(dtype, Lk, hides):
    """Whole tiles of them, after queries whose scores rise or that are computed anew for a NaN."""
    T, error = 256, {"float32": 1e-4, "float16": 2e-3}.get(dtype, 0.02)
    q, k, v = (
        torch.from_numpy(numbers(1, h, n, 16, seed=h)) for h, n in ((6, T), (2, Lk), (2, Lk))
    )
    q[..., 0], k[..., 0] = 8, torch.linspace(0, 30, Lk)
    if hides:
        v[..., 0, :] = torch.nan  # which no query sees
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    for period in (33, 64, 97, 131):
        last = np.where(np.arange(T) % period < 33, Lk, 0)
        options = {"intervals": (np.ones(T, int), last)}
        out = regard.attention(q, k, v, backend="kernel", **options)
        wide = regard.attention(*(x.double() for x in (q, k, v)), backend="reference", **options)
        torch.testing.assert_close(out.double(), wide, rtol=error, atol=error)


def test_large_values_do_not_overflow_where_scores_rise():
    q, k = torch.ones(1, 1, 40, 8).bfloat16(), torch.zeros(1, 1, 256, 8).bfloat16()
    k[:, :, 64:] = 2
    v = torch.full((1, 1, 256, 8), 1e32).bfloat16()
    out = regard.attention(q, k, v, scale=1.0, backend="kernel")
    torch.testing.assert_close(out, v[:, :, :40], rtol=0.01, atol=0)


def test_threads_that_ask_together_get_what_one_gets():
    q, k = numbers(3, 700, 16), numbers(3, 700, 16, seed=1)
    alone, shared = (AttentionWeights(q, k, causal=True, window=(99, 0)) for _ in range(2))
    expected, found = np.asarray(alone), {}
    orders = [np.random.default_rng(n).permutation(30) for n in range(4)]

    def ask(n):
        for at in orders[n]:
            head, start = at % 3, at // 3 * 70
            found[n, at] = head, start, shared[head, start : start + 70]
        found[n, "entropy"] = shared.entropy()

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 31
    entropy = alone.entropy()
    for (_, at), part in found.items():
        if at == "entropy":
            np.testing.assert_array_equal(part, entropy)
        else:
            head, start, rows = part
            np.testing.assert_array_equal(rows, expected[head, start : start + 70])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_other_backends_compute_only_the_blocks_that_are_asked_for(backend, monkeypatch):
    q, k = numbers(2, 3, 1000, 8), numbers(2, 3, 1000, 8, seed=1)
    if backend == "torch":
        q, k = torch.from_numpy(q), torch.from_numpy(k)
    weights = AttentionWeights(q, k, causal=True, backend=backend)
    pairs, log_softmax = [], formula.log_softmax

    def spy(xp, s, sinks):
        pairs.append(tuple(s.shape))
        return log_softmax(xp, s, sinks)

    monkeypatch.setattr(formula, "log_softmax", spy)
    weights[1, 2, 5]
    assert pairs == [(1, 1, 1, 6)]
    weights[1, 2, 5:900:100]
    assert sum(b * h * rows for b, h, rows, _ in pairs[1:]) == 9


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_parts_of_what_is_empty_are_empty(library):
    for B, H, Lq, Lk in [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 0, 3, 4)]:
        q, k = np.ones((B, H, Lq, 4), np.float32), np.ones((B, H, Lk, 4), np.float32)
        if library == "torch":
            q, k = torch.from_numpy(q), torch.from_numpy(k)
        weights = AttentionWeights(q, k)
        assert tuple(weights[...].shape) == np.asarray(weights).shape == (B, H, Lq, Lk)
        assert tuple(weights[:, :, 1:2].shape) == (B, H, min(1, Lq), Lk)
        assert weights.part(slice(0, None, 2)).entropy().shape == (B, H, -(-Lq // 2))
        assert weights.copy().lse.shape == (B, H, Lq)
        assert len(weights) == len(list(weights)) == B
