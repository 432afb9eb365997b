import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from definition import assert_near, define, edit_logs, visible_pairs
from recordings import numbers
from regard import AttentionWeights
from strategies import calls, to_torch
from traced import peak_bytes
from ways import NAMED, by_ways

LIBRARIES = ["numpy", "torch"]
WAYS = st.sampled_from(NAMED)


def both(call, way):
    """The weights of a random call by that way, and the whole matrix in float64."""
    (q, k, v), options = call
    return way.weights(q, k, v, **options), *define(q, k, **options)


def close(actual, exact, tolerance=1e-11):
    np.testing.assert_allclose(np.asarray(actual), exact, rtol=1e-9, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(calls(), WAYS)
def test_whole_matrix_and_log_sum_exp(call, way):
    weights, exact, lse = both(call, way)
    assert weights.shape == exact.shape
    close(weights, exact)
    close(weights.lse, lse)
    assert type(weights[...]) is type(weights._call.query)


def exact_scores(q, k, *, bias=0.0, sinks=None, scale=None, softcap=None, edits=None, **visibility):
    """The scores ``(B, Hq, Lq, Lk)`` in float64, −inf where masked."""
    (B, Hq, Lq, D), (_, Hkv, Lk, _) = q.shape, k.shape
    keys = np.broadcast_to(k, (B, *k.shape[1:])).repeat(Hq // Hkv, 1)
    s = q @ keys.swapaxes(-1, -2) * (D**-0.5 if scale is None else scale)
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    s = s + bias + (0.0 if edits is None else edit_logs(edits, Hq, Lq, Lk))
    return np.where(visible_pairs(B, Hq, Lq, Lk, edits=edits, **visibility), s, -np.inf)


@settings(max_examples=25, deadline=None)
@given(calls(), WAYS, st.data())
def test_max_score_is_the_largest_score_of_a_head(call, way, data):
    (q, k, v), options = call
    weights = way.weights(q, k, v, **options)
    s = exact_scores(q, k, **options)
    close(weights.max_score, s.max((-1, -2), initial=-np.inf))
    rows, columns = (slice(data.draw(st.integers(0, n)), None, 3) for n in s.shape[-2:])
    part = weights.part(rows, columns)
    close(part.max_score, s[..., rows, columns].max((-1, -2), initial=-np.inf))
    close(weights.max_score, s.max((-1, -2), initial=-np.inf))  # as before


@by_ways(*NAMED)
def test_writing_into_an_answer_changes_no_later_one(way):
    weights = way.weights(*(numbers(3, 9, 4, seed=n) for n in range(3)), causal=True)
    head = weights.head(1)
    for ask in (lambda: weights.lse, lambda: weights.max_score, lambda: head.lse):
        before = np.asarray(ask()).copy()
        found = ask()
        found -= 5
        np.testing.assert_array_equal(ask(), before)


@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
def test_max_score_leaves_out_the_sinks(backend):
    q, k, sinks = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 4), torch.tensor([-9.0, 9.0, 99.0])
    found = AttentionWeights(q, k, causal=True, sinks=sinks, backend=backend)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / 2).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(found.max_score, scores.amax((-1, -2)), rtol=1e-6, atol=0)
    rows = found.part(slice(4, 7)).max_score
    torch.testing.assert_close(rows, scores[..., 4:7, :].amax((-1, -2)), rtol=1e-6, atol=0)


def test_scores_that_overflow_are_infinite_without_a_warning():
    query, key = np.array([[1.0, 2.0]]), np.array([[1.0, 1.0], [0.0, 2.0]])
    weights = AttentionWeights(query, key, scale=1e308, backend="kernel")
    assert weights.lse == np.inf
    assert weights.max_score == np.inf


@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
def test_max_score_of_scores_that_are_not_finite(backend):
    q, k = (torch.randn(1, 3, 9, 4) for _ in range(2))
    q[0, 1, 2, 0], q[0, 2, 5, 1] = torch.nan, torch.inf
    found = AttentionWeights(q, k, backend=backend).max_score
    assert found.dtype == torch.float32
    assert found.isfinite().tolist() == [[True, False, False]]
    assert found.isnan().tolist() == [[False, True, False]]
    whole = AttentionWeights(q, k, causal=True, backend=backend)
    assert whole.part(slice(2), slice(2)).max_score.isfinite().all()
    single = AttentionWeights(q[0, 0], k[0, 0], backend=backend)
    assert single.max_score.shape == ()
    torch.testing.assert_close(single.max_score, (q[0, 0] @ k[0, 0].mT / 2).max())


@settings(max_examples=60, deadline=None)
@given(calls(), WAYS)
def test_entropy_received_and_distance(call, way):
    weights, exact, _ = both(call, way)
    B, _, Lq, Lk = exact.shape
    logs = np.log(np.where(exact > 0, exact, 1))
    close(weights.entropy(), -(exact * logs).sum(-1))
    close(weights.received(), exact.sum(-2))
    close(weights.received("mean"), exact.sum(-2) / max(Lq, 1))
    close(weights.received("max"), exact.max(-2, initial=0))
    options = call[1]
    lengths = np.broadcast_to(options.get("key_lengths", Lk), (B,))
    starts = np.broadcast_to(options.get("query_start", lengths - Lq), (B,))
    places = starts[:, None] + np.arange(Lq)
    gap = np.abs(places[:, None, :, None] - np.arange(Lk))
    close(weights.distance(), (exact * gap).sum(-1))


@settings(max_examples=60, deadline=None)
@given(calls(), WAYS, st.integers(0, 9))
def test_topk_gives_the_strongest_keys_of_every_query(call, way, k):
    weights, exact, _ = both(call, way)
    k = min(k, exact.shape[-1])
    values, indices = (np.asarray(x) for x in weights.topk(k))
    close(values, -np.sort(-exact, -1)[..., :k])
    close(np.take_along_axis(exact, indices, -1), values)
    ordered = np.sort(indices, -1)
    assert (ordered[..., 1:] > ordered[..., :-1]).all()


@settings(max_examples=60, deadline=None)
@given(calls(), WAYS, st.integers(0, 30))
def test_strongest_gives_the_strongest_pairs_anywhere(call, way, n):
    weights, exact, _ = both(call, way)
    B, Hq, Lq, Lk = exact.shape
    query, key, weight = (np.asarray(x) for x in weights.strongest(n))
    n = min(n, Lq * Lk)
    close(weight, -np.sort(-exact.reshape(B, Hq, -1), -1)[..., :n])
    for b, h, r in np.ndindex(weight.shape):
        i, j = query[b, h, r], key[b, h, r]
        if weight[b, h, r] == 0:
            assert (i, j) == (-1, -1)
        else:
            close(exact[b, h, i, j], weight[b, h, r])
    for b, h in np.ndindex(B, Hq):
        found = [pair for pair in zip(query[b, h], key[b, h]) if pair != (-1, -1)]
        assert len(set(found)) == len(found)


def pooled(exact, visible, size, how, rows, columns):
    """The definition of a picture: bin by bin."""
    exact, visible = exact[..., rows, columns], visible[..., rows, columns]
    n, m = exact.shape[-2:]
    R, C = min(size[0], n), min(size[1], m)
    out = np.full((*exact.shape[:2], R, C), np.nan)
    for b, h, r, c in np.ndindex(out.shape):
        inside = (b, h, slice(r * n // R, (r + 1) * n // R), slice(c * m // C, (c + 1) * m // C))
        if visible[inside].any():
            w = exact[inside]
            with np.errstate(divide="ignore"):
                out[b, h, r, c] = np.log(w.max() if how == "max" else w.sum(-1).mean())
    return out


@settings(max_examples=80, deadline=None)
@given(
    calls(min_length=1), WAYS, st.sampled_from(["max", "mass"]),
    st.tuples(st.integers(1, 12), st.integers(1, 40)), st.data(),
)  # fmt: skip
def test_pool_is_a_picture_of_any_part_at_any_size(call, way, how, size, data):
    from definition import visible_pairs

    weights, exact, _ = both(call, way)
    B, Hq, Lq, Lk = exact.shape
    cut = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in (Lq, Lk)]
    rows, columns = (slice(*c) for c in cut)
    rules = {n: x for n, x in call[1].items() if n not in ("bias", "sinks", "scale", "softcap")}
    visible = visible_pairs(B, Hq, Lq, Lk, **rules)
    picture = np.asarray(weights.pool(size, how, rows, columns))
    expected = pooled(exact, visible, size, how, rows, columns)
    np.testing.assert_allclose(picture, expected, rtol=1e-9, atol=1e-10)


def test_every_row_of_bins_sums_to_one_at_every_zoom():
    q, k = np.random.default_rng(0).standard_normal((2, 3, 100, 8))
    weights = AttentionWeights(q, k, causal=True)
    for size in ((7, 13), (100, 100), (33, 64), (1, 1)):
        mass = np.exp(weights.pool(size, "mass"))
        np.testing.assert_allclose(np.nansum(mass, -1), 1, atol=1e-9)


def test_pool_does_not_lose_weights_that_underflow():
    weights = AttentionWeights(np.float32([[1.0]]), np.float32([[0.0], [-500.0]]), scale=1.0)
    assert weights[0, 1] == 0
    np.testing.assert_allclose(weights.pool()[0], [0, -500])


def test_invisible_is_nan_and_a_weight_of_zero_is_minus_infinity():
    bias = np.array([[0.0, -np.inf], [0.0, 0.0]])
    weights = AttentionWeights(np.zeros((2, 1)), np.zeros((2, 1)), bias=bias)
    assert weights.pool()[0, 1] == -np.inf
    assert np.isnan(AttentionWeights(np.zeros((2, 1)), np.zeros((2, 1)), causal=True).pool()[0, 1])


@pytest.mark.parametrize("left", [1, 300])
@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_distances_far_from_the_first_key_are_exact(backend, left):
    """Where float32 has no odd numbers."""
    query, key = torch.ones(1, 4, 1, requires_grad=True), torch.full((1, 2**24 + 9, 1), -200.0)
    key[0, -2:, 0] = torch.tensor([1.0, 2.0])
    weights = AttentionWeights(query, key, causal=True, window=(left, 0), backend=backend)
    before = torch.sigmoid(torch.tensor(-1.0))  # the last query's weight of the key before
    expected = torch.tensor([[left / 2, left / 2, 0, before]])
    distance = weights.distance()
    for found in (distance.detach(), weights.summary().distance.detach()):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(distance[0, -1], query)
    torch.testing.assert_close(gradient[0, -1, 0], before * (before - 1), rtol=1e-5, atol=0)


def test_strongest_leaves_rows_of_nan_out():
    q, k = np.random.default_rng(0).standard_normal((2, 6, 4))
    clean = AttentionWeights(q[1:], k).strongest(3)
    q[0, 0] = np.nan
    for convert in (np.asarray, torch.from_numpy):
        found = AttentionWeights(convert(q), convert(k)).strongest(3)
        np.testing.assert_array_equal(found.query, clean.query + 1)
        np.testing.assert_allclose(found.weight, clean.weight)


@pytest.mark.parametrize("library", LIBRARIES)
def test_summary_gives_what_each_method_gives(library):
    q, k = np.random.default_rng(0).standard_normal((2, 2, 4, 30, 8))
    if library == "torch":
        q, k = torch.from_numpy(q), torch.from_numpy(k)
    weights = AttentionWeights(q, k, causal=True)
    summary = weights.summary(topk=5, strongest=7, pool=(6, 9))
    alone = (
        weights.lse, weights.entropy(), weights.received(), weights.distance(), *weights.topk(5),
        *weights.strongest(7), weights.pool((6, 9)),
    )  # fmt: skip
    together = (*summary[:4], *summary.topk, *summary.strongest, summary.pooled)
    for x, y in zip(alone, together):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    named = weights.summary(only=(name for name in ("lse", "received")))
    np.testing.assert_array_equal(np.asarray(named.lse), np.asarray(summary.lse))
    np.testing.assert_array_equal(np.asarray(named.received), np.asarray(summary.received))
    assert named.entropy is None


INDICES = [
    ..., 0, -1, (0, 3, 17), (0, 3), (slice(None), 1, 2), (..., 5), (..., slice(2, 9, 3), 4),
    (1, slice(None), slice(None, None, -2), slice(5, 1, -1)), (0, ..., slice(3, 3)),
    (np.int64(1), 2), (slice(0, 0),),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_any_basic_index_gives_what_it_gives_of_the_whole(index, library):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 4, 20, 8)), rng.standard_normal((2, 2, 30, 8))
    exact = define(q, k, causal=True)[0]
    weights = AttentionWeights(q, k, causal=True)
    if library == "torch":
        weights = AttentionWeights(torch.from_numpy(q), torch.from_numpy(k), causal=True)
    part = weights[index]
    assert np.asarray(part).shape == exact[index].shape
    close(part, exact[index])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 4), "index 4 is out of range for axis 1 of size 4"),
        ((0, 0, 0, 0, 0), "5 indices for the 4 axes"),
        ((..., 0, ...), "3 indices for the 4 axes"),
        (([0, 1],), "index 0 is a list; ints, slices and ... are understood"),
        ((True,), "index 0 is a bool"),
        ((None,), "index 0 is a NoneType"),
        ((slice(None, None, 0),), r"index 0 is slice\(None, None, 0\); .* its step not 0"),
        ((0, 0, slice("a", None)), r"index 2 is slice\('a', None, None\); its ends must be ints"),
    ],
)
def test_other_indices_are_refused(index, message):
    weights = AttentionWeights(np.ones((2, 4, 5, 3)), np.ones((2, 4, 5, 3)))
    with pytest.raises(IndexError, match=message.replace("...", r"\.\.\.")):
        weights[index]


def test_the_limit_refuses_the_whole_and_names_the_way_out():
    weights = AttentionWeights(*np.zeros((2, 1, 32, 16384, 2), np.float32))
    assert weights.shape == (1, 32, 16384, 16384)
    assert weights.nbytes == 34_359_738_368
    with pytest.raises(regard.MaterializeError) as caught:
        np.asarray(weights)
    assert str(caught.value) == (
        "weights: (1, 32, 16384, 16384) float32 is 34.4 GB, limit 2.0 GB.\n"
        "  Ask for a part: weights[0, head, i], weights.pool(...); "
        "or raise regard.limits(weights_bytes=...)."
    )
    assert weights[0, 3, 17].shape == (16384,)


READERS = [torch.as_tensor, torch.tensor, torch.asarray, torch.from_dlpack, np.from_dlpack]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_torch_and_whoever_reads_dlpack_get_the_whole_matrix_up_to_the_limit(library, read):
    q = numbers(2, 3, 5, 4).astype(np.float32)
    weights = AttentionWeights(
        *(torch.from_numpy(q) if library == "torch" else q,) * 2, causal=True
    )
    parts = weights.part(slice(1, 4)), weights.head(1), weights.T, weights.mix()
    for matrix in (weights, *parts):
        found = read(matrix)
        assert isinstance(found, np.ndarray if read is np.from_dlpack else torch.Tensor)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(matrix))
        with regard.limits(weights_bytes=100), pytest.raises(regard.MaterializeError):
            read(matrix)


def test_a_tensor_without_the_gradient_is_not_handed_over():
    q = torch.from_numpy(numbers(5, 4)).requires_grad_()
    weights = AttentionWeights(q, q)
    for matrix in (weights, weights.T):
        with pytest.raises(BufferError, match=r"gradient.*weights\[\.\.\.\]"):
            torch.as_tensor(matrix)
    with torch.no_grad():
        np.testing.assert_array_equal(torch.as_tensor(weights), weights[...])
    with pytest.raises(BufferError, match="so an array is a copy"):
        np.from_dlpack(weights.copy(), copy=False)


def test_a_heatmap_above_the_limit_is_refused_before_it_takes_memory():
    weights = AttentionWeights(*np.zeros((2, 4, 100_000, 1), np.float32))
    for matrix in (weights, weights.mix(), weights.mix([0, 1])):
        with pytest.raises(regard.MaterializeError) as caught:
            matrix.pool((100_000, 100_000))
        axes = (*((1, 4) if matrix is weights else (1, 1)), 100_000, 100_000)
        assert str(caught.value).startswith(f"pool: {axes} float32 is {40 * axes[1]}.0 GB, limit")
        assert "fewer bins" in str(caught.value)
    with pytest.raises(regard.MaterializeError, match="pool"):
        weights.summary(pool=(100_000, 100_000), only=["pooled"])
    small = weights.part(slice(0, 8))
    with pytest.raises(regard.MaterializeError, match="pool"):
        small.pool((10**6, 10**6), of=(10**6, 10**6))
    assert small.pool((10**9, 8)).shape == (4, 8, 8)


def test_more_pairs_than_the_limit_holds_are_refused_before_they_take_memory():
    weights = AttentionWeights(*np.zeros((2, 4, 100_000, 1), np.float32))
    for matrix, heads in ((weights, 4), (weights.mix(), 1)):
        with pytest.raises(regard.MaterializeError) as caught:
            matrix.strongest(10**12)
        assert str(caught.value).startswith(
            f"strongest: (1, {heads}, 10000000000) pairs of 20 bytes is {200 * heads}.0 GB, limit"
        )
    assert weights.part(slice(0, 1), slice(0, 3)).strongest(10**12).weight.shape == (4, 3)


def test_more_top_keys_than_the_limit_holds_are_refused_before_they_take_memory():
    q = np.zeros((2, 1000, 8), np.float32)
    weights = AttentionWeights(q, q, causal=True)

    def ask(of, k):
        with regard.limits(weights_bytes=10**6), pytest.raises(regard.MaterializeError) as caught:
            of.topk(k)
        return str(caught.value)

    assert peak_bytes(lambda: ask(weights, 1000)) < 1e6
    assert ask(weights, 1000) == (
        "topk: (1, 2, 1000, 1000) keys of 12 bytes is 24.0 MB, limit 1.0 MB.\n"
        "  Ask for fewer keys, of one head or of a part:"
        " weights.head(h).part(rows=slice(...)).topk(k); or raise regard.limits(weights_bytes=...)."
    )
    assert ask(weights.mix(), 1000).startswith("topk: (1, 1, 1000, 1000) keys of 12 bytes is")
    with regard.limits(weights_bytes=10**6), pytest.raises(regard.MaterializeError, match="topk"):
        weights.summary(topk=1000)
    words = regard.Recording([" a"] * 1000, [regard.recording.Layer(q, q)]).in_words()
    assert ask(words.weights[0], 1000).startswith("topk: (2, 1000, 1000) keys of 12 bytes is")


def test_the_strongest_key_alone_has_no_limit():
    q = numbers(2, 5, 4)
    with regard.limits(weights_bytes=1):
        assert AttentionWeights(q, q).topk(1).indices.shape == (2, 5, 1)
        assert AttentionWeights(q, q).argmax(-1).shape == (2, 5)


def test_the_limit_is_moved_and_taken_back():
    weights = AttentionWeights(*np.zeros((2, 10, 2), np.float32))
    with regard.limits(weights_bytes=399), pytest.raises(regard.MaterializeError, match="limit"):
        np.asarray(weights)
    assert np.asarray(weights).shape == (10, 10)
    regard.limits(weights_bytes=399)
    try:
        with pytest.raises(regard.MaterializeError):
            weights[...]
    finally:
        regard.limits(weights_bytes=2e9)
    with regard.limits(weights_bytes=float("inf")):
        assert np.asarray(weights).shape == (10, 10)
    with pytest.raises(ValueError, match="weights_bytes is 0; it must be positive"):
        regard.limits(weights_bytes=0)
    with pytest.raises(TypeError, match="weights_bytes is True; a number is needed"):
        regard.limits(weights_bytes=True)
    with pytest.raises(TypeError, match="weights_bytes is '8e9'; a number is needed"):
        regard.limits(weights_bytes="8e9")


def test_a_limit_is_entered_again_and_within_itself(monkeypatch):
    monkeypatch.setattr("regard._base.settings._weights_bytes", 2e9)  # which is put back
    weights = AttentionWeights(*np.zeros((2, 10, 2), np.float32))

    def is_refused():
        try:
            return not np.asarray(weights).size
        except regard.MaterializeError:
            return True

    small = regard.limits(weights_bytes=399)
    assert is_refused()
    for _ in range(2):
        with small:
            with small:
                assert is_refused()
            assert is_refused()
            with regard.limits(weights_bytes=400):
                assert not is_refused()
            assert is_refused()
        assert not is_refused()
    small = regard.limits(weights_bytes=399)
    regard.limits(weights_bytes=400)
    with small:
        assert is_refused()
    assert not is_refused()
    with pytest.raises(regard.MaterializeError, match=r"limit 400 B"):
        np.asarray(AttentionWeights(*np.zeros((2, 11, 2), np.float32)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_comes_back_has_the_library_and_the_accumulating_dtype(dtype, library):
    x = np.random.default_rng(0).standard_normal((2, 9, 4)).astype(dtype)
    x = torch.from_numpy(x) if library == "torch" else x
    weights = AttentionWeights(x, x, causal=True)
    expected = "float64" if dtype == "float64" else "float32"
    summary = weights.summary()
    found = [weights[0], weights[0, 3, 2], *summary[:4], summary.topk.values, summary.pooled]
    for part in found:
        assert str(part.dtype).endswith(expected)
    assert torch.is_tensor(found[0]) == (library == "torch")
    assert weights.dtype == found[0].dtype
    np.testing.assert_allclose(np.asarray(weights[...]).sum(-1), 1, atol=1e-6)


def test_it_behaves_like_an_array():
    q, k = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    weights = AttentionWeights(q, k)
    whole = np.asarray(weights)
    assert (weights.ndim, weights.size, len(weights)) == (3, 75, 3)
    np.testing.assert_array_equal(np.stack(list(weights)), whole)
    assert np.asarray(weights, dtype=np.float16).dtype == np.float16
    np.testing.assert_allclose(weights @ np.ones(5), 1)
    with pytest.raises(ValueError, match="an array is a copy"):
        np.array(weights, copy=False)
    line, *numbers = repr(weights).splitlines()
    assert line == "AttentionWeights(3, 5, 5) float64, computed when asked for; whole: 600 B"
    assert len(numbers) == 3 * 5 + 2  # rows, and a line between matrices


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda w: w.received("median"), ValueError, "'median'; 'sum', 'seen', 'mean'"),
        (lambda w: w.received(queries=3), TypeError, "queries is an int; a slice is needed"),
        (lambda w: w.pool(how="sum"), ValueError, "how is 'sum'; 'max' or 'mass'"),
        (lambda w: w.pool(64), TypeError, "size is 64; a pair of ints"),
        (lambda w: w.pool((0, 3)), ValueError, "each side must be at least 1"),
        (lambda w: w.pool(rows=3), TypeError, "rows is an int; a slice is needed"),
        (lambda w: w.pool(rows=slice(5, 0, -2)), ValueError, "rows has the step -2"),
        (lambda w: w.topk(6), regard.ShapeError, "k is 6; it must be between 0 and .* 5"),
        (lambda w: w.topk(1.0), TypeError, "k is a float; an int is needed"),
        (lambda w: w.strongest(-1), ValueError, "n is -1; it must not be negative"),
        (lambda w: w.strongest("3"), TypeError, "n is a str; an int is needed"),
        (lambda w: w.summary(topk="8"), TypeError, "k is a str; an int is needed"),
        (lambda w: w.summary(only=3), TypeError, "only is an int; a list of names is needed"),
        (lambda w: w.summary(only="lse"), TypeError, r"a list of names is needed, as in \['lse'\]"),
        (lambda w: w.pool((True, True)), TypeError, r"size is \(True, True\); a pair of ints"),
    ],
)
def test_bad_questions_get_clear_answers(ask, error, message):
    with pytest.raises(error, match=message):
        ask(AttentionWeights(np.ones((5, 3)), np.ones((5, 3))))


@pytest.mark.parametrize("library", LIBRARIES)
def test_numbers_are_not_compared_with_weights_that_are_not_stored(library):
    x = np.eye(3) if library == "numpy" else torch.eye(3)
    weights = AttentionWeights(x, x)
    for other in (weights[...], 0.5, 0):
        for compare in (lambda a, b: a == b, lambda a, b: a != b, lambda a, b: b == a):
            with pytest.raises(TypeError, match=r"== and != of numbers need the matrix"):
                compare(weights, other)
    assert weights == weights
    assert weights != AttentionWeights(x, x)
    assert {weights: 1}[weights] == 1
    assert weights not in (None, "x")


@pytest.mark.parametrize("library", LIBRARIES)
def test_numbers_are_not_compared_with_what_is_made_of_weights_either(library):
    x = np.eye(3)[None] if library == "numpy" else torch.eye(3)[None]
    weights = AttentionWeights(x, x)
    for made in (
        weights.T, weights.mix(), weights.effects(x, x), regard.compare(weights, weights)
    ):  # fmt: skip
        for other in (weights[0], 0.5, 0):
            for compare in (lambda a, b: a == b, lambda a, b: a != b, lambda a, b: b == a):
                with pytest.raises(TypeError, match=r"== and != of numbers need the matrix"):
                    compare(made, other)
        assert {made: 1}[made] == 1
        assert made not in (None, "x", weights)


@pytest.mark.parametrize(
    "ask",
    [
        lambda w: w.head(slice(1)), lambda w: w.head(...), lambda w: w.matrix(slice(1), 0),
        lambda w: w.effects(w._call.key, w._call.query).head(slice(1)),
        lambda w: w.effects(w._call.key, w._call.query).matrix(0, slice(1)),
    ],
)  # fmt: skip
def test_one_head_is_not_a_slice_of_them(ask):
    x = np.ones((2, 3, 5, 4))
    with pytest.raises(IndexError, match="one int for each axis is needed"):
        ask(AttentionWeights(x, x))


@by_ways(*NAMED)
@pytest.mark.parametrize("given", ["bias", "mask", "none"])
def test_a_part_of_no_keys_has_the_log_sum_exp_of_its_rows(way, given):
    q, k = numbers(2, 4, 6, 8, dtype=np.float64)
    options = {"bias": numbers(4, 1, 6, seed=1)} if given == "bias" else {}
    options |= {"mask": np.arange(6) > 1} if given == "mask" else {}
    options = {name: way.convert(x) for name, x in options.items()}
    arrays = way.convert(q), way.convert(k)
    weights = AttentionWeights(*arrays, scale=0.4, backend=way.backend, **options)
    part = AttentionWeights(*arrays, scale=0.4, backend=way.backend, **options)
    part = part.part(columns=slice(3, 3))
    close(part.lse, np.asarray(weights.lse))
    close(part.summary(topk=0).lse, np.asarray(weights.lse))


def test_large_scores_keep_exact_weights_where_log_sum_exp_would_not():
    q = np.float32([[2048.0]])
    k = np.float32([[1000.0], [1000.0 - 2.0**-11], [0.0]])
    weights = AttentionWeights(torch.from_numpy(q), torch.from_numpy(k), scale=1.0)
    exact = define(q[None, None], k[None, None], scale=1.0)[0][0, 0]
    assert_near(weights[...], exact, 1, 1)


def test_html_shows_pictures_and_never_the_whole():
    long = AttentionWeights(*np.zeros((2, 12, 200_000, 1), np.float32)[:, :, :300])
    html = long._repr_html_()
    assert html.count("<img") == 8
    assert "and 4 more" in html
    assert "AttentionWeights(12, 300, 300)" in html
    assert len(html) < 20_000
    empty = AttentionWeights(np.zeros((2, 0, 3)), np.zeros((2, 0, 3)))._repr_html_()
    assert "AttentionWeights(2, 0, 0)" in empty


def test_html_picture_is_a_png_that_a_reader_opens():
    import base64
    import io
    import re

    from matplotlib import image

    from regard._showing.picture import INVISIBLE, RAMP

    weights = AttentionWeights(np.zeros((2, 1)), np.zeros((2, 1)), causal=True)
    data = re.search(r"base64,([^\"]+)", weights._repr_html_()).group(1)
    pixels = (image.imread(io.BytesIO(base64.b64decode(data))) * 255).round()
    assert pixels.shape == (2, 2, 3)
    np.testing.assert_array_equal(pixels[0], [RAMP[-1], INVISIBLE])  # weight 1; invisible
    assert (pixels[1, 0] == pixels[1, 1]).all()


class TestPlot:
    @pytest.fixture(autouse=True)
    def without_a_screen(self):
        import matplotlib
        from matplotlib import pyplot

        matplotlib.use("agg")
        yield
        pyplot.close("all")

    def test_draws_the_asked_matrix(self):
        q, k = np.random.default_rng(0).standard_normal((2, 2, 3, 5, 4))
        weights = AttentionWeights(q, k, causal=True)
        ax = weights.plot(1, 2, tokens=list("a$_$\\"))
        drawn = ax.images[0].get_array()
        expected = np.where(np.tri(5), weights[1, 2], np.nan)
        np.testing.assert_allclose(drawn.filled(np.nan), expected, rtol=1e-6)
        assert [label.get_text() for label in ax.get_xticklabels()] == list("a$_$\\")
        assert [label.get_text() for label in ax.get_yticklabels()] == list("a$_$\\")
        numbers = [f"{100 * x:.1f}" for x in expected[np.tri(5, dtype=bool)]]
        assert [text.get_text() for text in ax.texts] == numbers
        assert ax.images[0].colorbar.ax.get_yticklabels()[-1].get_text() == "100%"
        ax.figure.canvas.draw()

    def test_positions_are_whole_and_long_rows_are_logarithmic(self):
        short = AttentionWeights(np.eye(4), np.eye(4)).plot()
        assert [label.get_text() for label in short.get_xticklabels()] == ["0", "1", "2", "3"]
        long = AttentionWeights(np.eye(120), np.eye(120)).plot()
        assert all(tick == int(tick) for tick in long.get_xticks())
        assert not long.texts
        assert (long.images[0].norm.vmin, long.images[0].norm.vmax) == (pytest.approx(1e-5), 1)
        labels = [text.get_text() for text in long.images[0].colorbar.ax.get_yticklabels()]
        assert [label for label in labels if label in ("0.1%", "1%", "10%")] == [
            "0.1%",
            "1%",
            "10%",
        ]

    def test_a_style_neither_turns_it_over_nor_strikes_it_through(self):
        from matplotlib import pyplot

        with pyplot.rc_context({"image.origin": "lower", "axes.grid": True}):
            ax = AttentionWeights(np.eye(4), np.eye(4), causal=True).plot()
            assert ax.images[0].origin == "upper"
            assert not any(line.get_visible() for line in ax.get_xgridlines())

    def test_draws_into_given_axes_and_by_mass(self):
        from matplotlib import pyplot

        _, ax = pyplot.subplots()
        weights = AttentionWeights(torch.randn(600, 4), torch.randn(700, 4))
        assert weights.plot(how="mass", ax=ax) is ax
        assert ax.images[0].get_array().shape == (512, 512)

    def test_refuses_what_does_not_fit(self):
        weights = AttentionWeights(np.ones((3, 5, 4)), np.ones((3, 5, 4)))
        with pytest.raises(regard.ShapeError, match="2 tokens for 5 queries and 5 keys"):
            weights.plot(tokens=["a", "b"])
        for tokens in ([1, 2, 3, 4, 5], 5, iter("abcde")):
            with pytest.raises(TypeError, match=r"plot: tokens is .*; a list of strings is needed"):
                weights.plot(tokens=tokens)
        with pytest.raises(IndexError, match="index 3 is out of range"):
            weights.plot(3)
        with pytest.raises(IndexError, match="2 indices for 1 axis"):
            weights.plot(0, 0)
        with pytest.raises(regard.ShapeError, match="has nothing to draw"):
            AttentionWeights(np.ones((0, 4)), np.ones((0, 4))).plot()

    def test_without_matplotlib_the_error_names_the_extra(self, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ModuleNotFoundError, match=r'pip install "regard\[plot\]"'):
            AttentionWeights(np.ones((3, 4)), np.ones((3, 4))).plot()


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window": (5, 0), "sinks": numbers(4, seed=7)},
    {"window": (3, 9), "query_start": np.array([4, 11])},
    {"key_lengths": np.array([40, 23]), "causal": True},
    {"segments": (np.arange(37)[None] // 9, np.arange(41)[None] // 9), "softcap": 3.0},
    {"mask": numbers(2, 1, 37, 41, seed=5) > 0, "bias": numbers(1, 4, 37, 41, seed=6)},
]


@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
@pytest.mark.parametrize("part", [slice(0, 37), slice(7, 8), slice(3, 37, 4), slice(30, 30)])
def test_some_rows_see_what_they_see_in_the_whole(backend, options, part):
    q, k = numbers(2, 4, 37, 8), numbers(2, 2, 41, 8, seed=1)
    if backend == "torch":
        q, k = torch.from_numpy(q), torch.from_numpy(k)
        options = to_torch(options)
    _, weights = regard.attention(q, k, k, **options, return_weights=True, backend=backend)
    whole, distance = np.asarray(weights), np.asarray(weights.distance())
    alone = AttentionWeights(q, k, **options, backend=backend)
    for of_all in (weights, alone):  # the statistics of the rows of the output, or their own
        some = of_all.part(part)
        np.testing.assert_allclose(np.asarray(some), whole[:, :, part], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(some.distance(), distance[:, :, part], rtol=1e-5, atol=1e-5)
    again = alone.part(part).part(slice(1, None, 2))
    np.testing.assert_allclose(
        np.asarray(again), whole[:, :, part][:, :, 1::2], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_one_pass_gives_both_pictures(backend):
    q, k = numbers(2, 4, 1300, 8), numbers(2, 2, 700, 8, seed=1)
    _, weights = regard.attention(
        q, k, k, causal=True, query_start=-200, return_weights=True, backend=backend
    )
    part = slice(100, 1250), slice(5, 690)
    both = weights.pool((90, 70), ("max", "mass"), *part)
    for picture, how in zip(both, ("max", "mass"), strict=True):
        np.testing.assert_array_equal(picture, weights.pool((90, 70), how, *part))
    for picture in weights.pool((90, 70), ("mass", "mass"), *part):
        np.testing.assert_array_equal(picture, both[1])
    assert weights.pool((90, 70), ()) == ()
