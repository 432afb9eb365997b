"""Parts of weights: some queries, some keys, one head; each with the numbers of the whole."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from definition import define
from recordings import numbers
from regard import AttentionWeights
from regard._backends.kernel import Kernel
from regard.recording import Layer
from strategies import to_dtype, to_torch
from ways import NAMED, by_ways

Lq, Lk = 150, 170
ROWS = [None, slice(3, 140), slice(20, 21), slice(2, None, 7), slice(150, 150), slice(-9, None)]
COLUMNS = [
    None, slice(0, 60), slice(33, 169), slice(5, 6), slice(40, 40),
    slice(1, None, 3), slice(7, 99, 40),
]  # fmt: skip
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (30, 20), "causal": False},
    "ends inside": {"causal": True, "key_lengths": np.array([170, 90])},
    "places": {"causal": True, "query_start": np.array([-3, 40])},
    "segments": {"segments": (np.arange(Lq) // 40, np.arange(Lk) // 40)},
    "intervals": {"intervals": (np.arange(Lq) % 70, 171 - np.arange(2 * Lq).reshape(2, Lq) // 3)},
    "mask": {"mask": np.random.default_rng(5).random((4, Lq, Lk)) < 0.6},
    "bias and sinks": {"bias": numbers(1, Lk, seed=6), "sinks": numbers(4, seed=7)},
}


def weights_by(way, **options):
    q, k = numbers(2, 4, Lq, 8), numbers(2, 2, Lk, 8, seed=1)
    return way.weights(q, k, k, **options)


def cut(whole, rows, columns):
    return whole[..., rows or slice(None), columns or slice(None)]


@by_ways(*NAMED)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_part_has_the_numbers_of_the_whole(name, way):
    weights = weights_by(way, **OPTIONS[name])
    whole = np.asarray(weights)
    for rows in ROWS:
        for columns in COLUMNS:
            part = weights.part(rows, columns)
            expected = cut(whole, rows, columns)
            assert part.shape == expected.shape
            np.testing.assert_allclose(np.asarray(part), expected, rtol=1e-6, atol=1e-9)


@by_ways(*NAMED)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("columns", [slice(30, 165), slice(11, 170, 4)], ids=["some", "each 4th"])
def test_questions_to_a_part_are_about_its_pairs(name, way, columns):
    weights = weights_by(way, **OPTIONS[name])
    rows = slice(4, 140, 3)
    part, whole = weights.part(rows, columns), cut(np.asarray(weights, float), rows, columns)
    found = part.summary(topk=3, strongest=4, pool=(7, 9))
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(whole > 0, whole * np.log(whole), 0).sum(-1)
    np.testing.assert_allclose(found.entropy, entropy, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(found.received, whole.sum(-2), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.lse, np.asarray(weights.lse)[..., rows], rtol=1e-6)
    best = np.sort(whole, -1)[..., ::-1][..., :3]
    np.testing.assert_allclose(found.topk.values, best, rtol=1e-5, atol=1e-9)
    at = np.take_along_axis(whole, np.asarray(found.topk.indices), -1)
    np.testing.assert_allclose(at, best, rtol=1e-5, atol=1e-9)
    links = [np.asarray(x) for x in found.strongest]
    for b, h in np.ndindex(2, 4):
        at = whole[b, h, links[0][b, h], links[1][b, h]]
        np.testing.assert_allclose(links[2][b, h], at, rtol=1e-5)
        np.testing.assert_allclose(at, np.sort(whole[b, h].ravel())[::-1][:4], rtol=1e-5)
    of_part = part.pool((7, 9), ("max", "mass"))
    np.testing.assert_array_equal(found.pooled, of_part[0])
    assert of_part[0].shape == of_part[1].shape == (2, 4, 7, 9)
    one = np.asarray(weights.pool((99, 199), rows=rows, columns=columns))
    assert one.shape == whole.shape
    seen = ~np.isnan(one)
    np.testing.assert_allclose(np.exp(one[seen]), whole[seen], rtol=1e-5, atol=1e-9)


def test_distances_in_a_part_are_those_of_the_places_in_the_whole():
    q = numbers(2, 60, 8)
    weights, i, j = AttentionWeights(q, q, causal=True), np.arange(60)[:, None], np.arange(60)
    for columns in (slice(5, 40), slice(5, 52, 3)):
        part = weights.part(slice(10, 50, 2), columns)
        expected = (np.asarray(weights, float) * abs(i - j))[:, 10:50:2, columns].sum(-1)
        np.testing.assert_allclose(part.distance(), expected, rtol=1e-5)
        reference = AttentionWeights(q, q, causal=True, backend="reference")
        of_reference = reference.part(slice(10, 50, 2), columns).distance()
        np.testing.assert_allclose(of_reference, expected, rtol=1e-5)


@by_ways(*NAMED)
def test_parts_of_parts(way):
    weights = weights_by(way, causal=True)
    part = weights.part(slice(10, 140, 2), slice(8, 160, 2)).part(
        slice(3, None, 4), slice(5, 50, 3)
    )
    expected = np.asarray(weights)[..., 10:140:2, 8:160:2][..., 3::4, 5:50:3]
    np.testing.assert_allclose(np.asarray(part), expected, rtol=1e-6, atol=1e-9)
    one = part.head(-1)
    np.testing.assert_allclose(np.asarray(one), expected[:, 3], rtol=1e-6, atol=1e-9)
    assert one.shape == (2, *expected.shape[2:])
    np.testing.assert_array_equal(np.asarray(part.copy()), np.asarray(part))
    np.testing.assert_array_equal(one[1], part[1, 3])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_part_of_what_nothing_is_known_of(library):
    q, k = numbers(2, 90, 8), numbers(2, 90, 8, seed=1)
    if library == "torch":
        q, k = torch.from_numpy(q), torch.from_numpy(k)
    for backend in ("kernel", "reference"):
        weights = AttentionWeights(q, k, causal=True, backend=backend)
        part = weights.part(slice(40, 80), slice(20, 70))
        expected = np.asarray(AttentionWeights(q, k, causal=True))[:, 40:80, 20:70]
        copied = AttentionWeights(q, k, causal=True, backend=backend).part(columns=slice(20, 70))
        np.testing.assert_allclose(np.asarray(part), expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(
            np.asarray(copied.copy())[:, 40:80], expected, rtol=1e-5, atol=1e-7
        )


def test_heads_and_matrices():
    q, k = numbers(2, 3, 4, 9, 8), numbers(2, 3, 2, 9, 8, seed=1)
    weights = AttentionWeights(q, k)
    whole = np.asarray(weights)
    np.testing.assert_array_equal(np.asarray(weights.head(2)), whole[..., 2, :, :])
    np.testing.assert_array_equal(np.asarray(weights.matrix(1, 2, 3)), whole[1, 2, 3])
    np.testing.assert_array_equal(np.asarray(weights.matrix()), whole[0, 0, 0])
    np.testing.assert_array_equal(np.asarray(weights.matrix(1)), whole[1, 0, 0])
    assert weights.head(0).matrix(1, 1).shape == (9, 9)
    for asked in (lambda: weights.head(4), lambda: weights.head(True), lambda: weights.matrix(2)):
        with pytest.raises(IndexError, match="weights: "):
            asked()
    with pytest.raises(IndexError, match="no axis of heads"):
        weights.matrix().head(0)


def test_parts_that_cannot_be_are_refused():
    weights = AttentionWeights(np.eye(5), np.eye(5))
    with pytest.raises(ValueError, match=r"rows has the step -1; a part goes upwards"):
        weights.part(slice(None, None, -1))
    with pytest.raises(ValueError, match=r"columns has the step -2; a part goes upwards"):
        weights.part(columns=slice(None, None, -2))
    with pytest.raises(TypeError, match="rows is an int; a slice is needed"):
        weights.part(3)
    with pytest.raises(ValueError, match="there is no 'lses'; there are lse, entropy"):
        weights.summary(only=("lses",))


def test_a_summary_of_some():
    weights = AttentionWeights(np.eye(5), np.eye(5))
    found = weights.summary(only=("entropy", "topk"), topk=2)
    np.testing.assert_array_equal(found.entropy, weights.entropy())
    np.testing.assert_array_equal(found.topk.indices, weights.topk(2).indices)
    assert found.lse is found.received is found.distance is found.strongest is found.pooled is None


def test_a_head_of_a_layer_is_the_layer_of_that_head():
    q, k = numbers(4, 9, 8), numbers(2, 9, 8, seed=1)
    options = {"bias": numbers(4, 9, 9), "sinks": numbers(4), "mask": numbers(1, 9, 9) < 1}
    options |= {"causal": True, "segments": np.arange(9) // 5}
    for convert in (lambda x: x, to_torch):
        given = convert(dict(options))
        x, y = (q, k) if convert is not to_torch else (torch.from_numpy(q), torch.from_numpy(k))
        layer = Layer(x, y, y, **given)
        whole = np.asarray(AttentionWeights(x, y, **given))
        for h in range(4):
            one = layer.head(h - 4)
            assert (one.heads, one.key_heads) == (1, 1)
            np.testing.assert_array_equal(one.value, layer.value[h // 2 : h // 2 + 1])
            found = np.asarray(AttentionWeights(one.query, one.key, **one.options))[0]
            np.testing.assert_allclose(found, whole[h], rtol=1e-6)
    with pytest.raises(IndexError, match="head 4"):
        layer.head(4)


def test_the_statistics_of_a_whole_and_its_parts_are_shared():
    q = numbers(2, 300, 8)
    weights = AttentionWeights(q, q, causal=True)
    weights.part(slice(100, 200)).entropy()
    missing = weights._statistics._missing
    assert not missing[:, :, 100:200].any()
    assert missing[:, :, 256:].all()
    assert regard.AttentionWeights(q, q, causal=True)._statistics._missing is None


def test_a_part_of_the_keys_is_not_shown_as_if_it_were_whole():
    from regard.viewer._display import recording_of

    q = numbers(2, 30, 8)
    weights = AttentionWeights(q, q, causal=True)
    assert recording_of(weights.part(slice(3, 20))) is not None
    for part in (weights.part(columns=slice(0, 12)), weights.part(slice(0, None, 2))):
        with pytest.raises(ValueError, match="a layer has whole rows and neighbouring queries"):
            part.layer()
        assert recording_of(part) is None
        assert "<img" in part._repr_html_()


def test_the_layer_of_some_weights_gives_the_same_weights():
    q, k = numbers(2, 3, 4, 9, 8), numbers(2, 3, 2, 9, 8, seed=1)
    weights = AttentionWeights(q, k, causal=True, key_lengths=np.arange(2, 8).reshape(2, 3))
    recording = regard.Recording(list("abcdefghi"), [weights.layer(1, 2), weights.layer()])
    np.testing.assert_array_equal(np.asarray(recording.weights[0]), np.asarray(weights)[1, 2])
    np.testing.assert_array_equal(np.asarray(recording.weights[1]), np.asarray(weights)[0, 0])
    part = weights.part(slice(4, 7)).layer(1)
    assert part.query_start == weights.layer(1).query_start + 4
    q[...] = 0  # the layer has copies
    assert recording.layers[0].query.any()
    for asked in (lambda: weights.layer(0, 0, 0), lambda: weights.layer(2)):
        with pytest.raises(IndexError, match="weights: "):
            asked()


def an_index(draw, n):
    """An int or a slice of an axis, in any direction."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.integers(-n, n - 1))
    ends = st.one_of(st.none(), st.integers(-n - 1, n + 1))
    return slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1, 2, 3, 5, -1, -2])))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(NAMED))
def test_several_heads_at_once_have_the_weights_of_each(data, way):
    group, Hkv = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    sizes = (3, group * Hkv, data.draw(st.sampled_from([2, 9, 97])), 33)
    q, k = numbers(*sizes[:3], 5), numbers(3, Hkv, 33, 5, seed=1)
    options = {"causal": True, "bias": numbers(sizes[1], 1, 33, seed=2), "sinks": numbers(sizes[1])}
    weights, whole = way.weights(q, k, k, **options), define(q, k, **options)[0]
    index = tuple(an_index(data.draw, n) for n in sizes)
    found = np.asarray(weights[index])
    assert found.shape == whole[index].shape
    np.testing.assert_allclose(found, whole[index], rtol=2e-5, atol=1e-7)
    if way.backend == "kernel":  # the bits as well, in whatever company rows are computed
        each = [weights._head(b, h).part()[:] for b, h in np.ndindex(sizes[:2])]
        expected = np.stack([np.asarray(x) for x in each]).reshape(sizes)[index]
        np.testing.assert_array_equal(found, expected)


@by_ways(*NAMED)
@pytest.mark.parametrize("group", [2, 3, 5])
def test_every_nth_head_of_a_part_is_that_of_the_whole(group, way):
    q, k = numbers(2 * group, 7, 4), numbers(2, 9, 4, seed=1)
    for first, step in itertools.product((0, 1), (2, 3, 4)):
        weights = way.weights(q, k, k)
        found = weights.part(slice(1, None, 2), slice(0, 8))[first::step, :, ::2]
        np.testing.assert_allclose(found, weights[...][first::step, 1::2, :8:2], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("D", [1, 17, 128, 301])
def test_a_few_rows_have_the_bits_of_all(D, dtype):
    """Keys are in the lanes for up to four rows, queries for more; sums are added in one order."""
    q, k = (to_dtype(numbers(1, H, L, D), dtype) for H, L in ((4, 70), (2, 301)))
    k[0, 0, 290] = np.nan
    for options in ({}, {"causal": True, "softcap": 4.0}, {"key_lengths": 290, "window": (99, 3)}):
        weights = AttentionWeights(q, k, **options)
        whole = np.asarray(weights)
        for rows in (0, 69, slice(3, 5), slice(60, 63), slice(10, None, 17), slice(40, 45)):
            np.testing.assert_array_equal(weights[:, :, rows], whole[:, :, rows])


@pytest.mark.parametrize(
    ("index", "passes"),
    [
        ((0, slice(3, 10)), 3),  # of groups of four: the end of one, one, and the start of one
        ((slice(None), slice(4, 12)), 1),
        ((slice(None, None, 2), slice(None, None, 4), 5), 1),
        ((0, slice(None, None, 3), slice(3)), 3),
        ((2, 7), 1),
        ((..., 5), 1),
        ((slice(None, None, -1), slice(1)), 3),
    ],
    ids=str,
)
def test_heads_that_share_keys_and_heads_that_share_none_are_one_pass(index, passes, monkeypatch):
    q, k = numbers(3, 12, 9, 4), numbers(3, 3, 40, 4, seed=1)
    weights = AttentionWeights(q, k)
    whole, asked, reduce = np.asarray(weights), [], Kernel.reduce
    monkeypatch.setattr(Kernel, "reduce", lambda *a: [asked.append(a[1].sizes), reduce(*a)][1])
    np.testing.assert_array_equal(weights[index], whole[index])
    assert len(asked) == passes
    assert sum(B * Hq * Lq * Lk for B, Hq, _, Lq, Lk in asked) == whole[index].size
