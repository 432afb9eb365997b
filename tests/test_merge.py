"""Attention over parts of the keys is merged to that of the whole, and its weights add up."""

import functools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from definition import define
from recordings import numbers
from regard import RowStatistics, ShapeError, UnsupportedError
from regard._backends import BACKENDS
from regard._backends.kernel_calls import call_as_read
from regard._call.checks import read_call
from regard._weights.statistics import product
from strategies import calls
from ways import NAMED, by_ways
from wholes import CASES, HKV, HQ, ORDERS, B, D, T, inputs, of_pieces, pieces_of, span, without

KERNEL, REFERENCE, TORCH = NAMED[0], NAMED[1], NAMED[3]


@functools.cache
def exact(name):
    """Output, weights and log-sum-exp of a case, by the definition; the output with dropout."""
    q, k, v, _ = inputs()
    options = CASES[name] | {"query_start": 0}
    plain = without(options, "dropout", "seed")
    out, weights, lse = define(q, k, v, **plain)
    if "dropout" in options:
        out = regard.attention(q, k, v, backend="reference", **options)
    return out, weights, lse


def tolerance(name):
    """Float64's rounding of a score, which is that of its weight."""
    return {"large scores": 1e-9, "sinks above all": 4e-14}.get(name, 4e-15)


def parts_of(way, arrays, options, queries, pieces):
    q, k, v = arrays
    options = without(options, "sinks")
    return [
        way.ask(
            q[:, :, span(queries)], k[:, :, span(keys)], v[:, :, span(keys)],
            return_statistics=True, **of_pieces(options, queries, keys),
        )
        for keys in pieces
    ]  # fmt: skip


def merged(way, arrays, name, queries, pieces):
    options = CASES[name]
    sinks = options.get("sinks")
    sinks = None if sinks is None else way.convert(np.asarray(sinks, arrays[0].dtype))
    return regard.merge(parts_of(way, arrays, options, queries, pieces), sinks)


def weights_of_part(way, q, k, name, statistics, queries, keys):
    options = of_pieces(without(CASES[name], "dropout", "seed"), queries, keys)
    return regard.AttentionWeights(
        *(way.convert(x) for x in (q[:, :, span(queries)], k[:, :, span(keys)])),
        statistics=statistics, backend=way.backend,
        **{option: way.convert(x) for option, x in options.items()},
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("way", "order"),
    [(KERNEL, order) for order in ORDERS] + [(way, "striped") for way in NAMED[1:]],
    ids=lambda x: x if isinstance(x, str) else f"{x.library}-{x.backend}",
)
def test_parts_of_the_keys_merge_to_attention_over_all(order, name, way):
    *arrays, _ = inputs()
    out, _, lse = exact(name)
    pieces = pieces_of(order)
    for queries in pieces:
        found, statistics = merged(way, arrays, name, queries, pieces)
        expected = out[:, :, span(queries)]
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=tolerance(name))
        with np.errstate(divide="ignore"):
            own = np.asarray(statistics.maximum) + np.log(np.asarray(statistics.total))
        np.testing.assert_allclose(own, lse[:, :, span(queries)], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("way", "name", "order"),
    [
        (KERNEL, name, order)
        for name in ("causal window", "lengths", "sinks", "bias", "edits", "mask")
        for order in ("zigzag", "striped")
    ]
    + [(way, "edits", "striped") for way in NAMED[1:]]
    + [(way, "sinks", "contiguous") for way in NAMED[1:]],
    ids=lambda x: x if isinstance(x, str) else f"{x.library}-{x.backend}",
)
def test_reductions_of_parts_add_up_to_those_of_the_whole(order, name, way):
    q, k, v, _ = inputs()
    _, w, _ = exact(name)
    pieces, bins = pieces_of(order), (7, 9)
    x = numbers(B, HQ, T, 3, seed=9).astype(float)
    found = {key: np.zeros((B, HQ, T)) for key in ("entropy", "distance", "sum", "received")}
    product_with = np.zeros((B, HQ, T, 3))
    largest, mass = np.full((B, HQ, *bins), np.nan), np.zeros((B, HQ, *bins))
    links, best = [], {}
    for queries in pieces:
        statistics = merged(way, (q, k, v), name, queries, pieces)[1]
        rows, tops = (slice(None), slice(None), span(queries)), []
        for keys in pieces:
            columns = slice(None), slice(None), span(keys)
            part = weights_of_part(way, q, k, name, statistics, queries, keys)
            block = w[rows][..., span(keys)]
            np.testing.assert_allclose(np.asarray(part), block, rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(
                np.asarray(part.at(np.arange(5), np.arange(5))),
                np.diagonal(block[..., :5, :5], axis1=-2, axis2=-1), rtol=1e-12, atol=1e-15,
            )  # fmt: skip
            found["entropy"][rows] += np.asarray(part.entropy())
            found["distance"][rows] += np.asarray(part.distance())
            found["sum"][rows] += np.asarray(part.mass(slice(None)))
            found["received"][columns] += np.asarray(part.received())
            product_with[rows] += np.asarray(part @ way.convert(x[columns]))
            pooled = [np.asarray(y) for y in part.pool(bins, ("max", "mass"), of=(T, T))]
            largest = np.fmax(largest, pooled[0])
            mass += np.nan_to_num(np.exp(pooled[1]))
            tops.append(np.asarray(part.topk(3).values))
            i, j, strength = (np.asarray(y)[0, 1] for y in part.strongest(4))
            links += [(s, queries[a], keys[b]) for a, b, s in zip(i, j, strength) if a >= 0]
        best[queries] = np.sort(np.concatenate(tops, -1))[..., ::-1][..., :3]
    i, j = np.arange(T)[:, None], np.arange(T)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(w > 0, np.log(w), 0)
    expected = {
        "entropy": -(w * logs).sum(-1), "distance": (w * abs(i - j)).sum(-1), "sum": w.sum(-1),
        "received": w.sum(-2),
    }  # fmt: skip
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-13, atol=1e-14, err_msg=key)
    np.testing.assert_allclose(product_with, w @ x, rtol=1e-12, atol=1e-14)
    for queries, values in best.items():
        of_rows = np.sort(w[:, :, span(queries)])[..., ::-1][..., :3]
        np.testing.assert_allclose(values, of_rows, rtol=1e-12, atol=1e-15)
    for strength, a, b in sorted(links, reverse=True)[:4]:
        np.testing.assert_allclose(w[0, 1, a, b], strength, rtol=1e-12)
    np.testing.assert_allclose(
        [s for s, *_ in sorted(links, reverse=True)[:4]], np.sort(w[0, 1].ravel())[:-5:-1],
        rtol=1e-12,
    )  # fmt: skip
    plain = without(CASES[name], "dropout", "seed")
    whole = regard.AttentionWeights(q, k, query_start=0, backend="reference", **plain)
    of_max, of_mass = whole.pool(bins, ("max", "mass"))
    np.testing.assert_allclose(largest, of_max, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(mass, np.nan_to_num(np.exp(of_mass)), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("way", "length"),
    [(way, length) for way in NAMED for length in (0, 1, 7, 97)] + [(KERNEL, 1025)],
    ids=lambda x: str(x) if isinstance(x, int) else f"{x.library}-{x.backend}",
)
def test_bins_of_the_whole_for_every_size_and_step(length, way):
    q, k = numbers(1, length, 8), numbers(1, length, 8, seed=1)
    whole = regard.AttentionWeights(
        *map(way.convert, (q, k)), causal=True, window=(60, 0), backend=way.backend
    )
    sizes = [(length + 3, 4), (5, 300), (16, 64)] if length < 1000 else [(64, 16), (33, 1025)]
    for size in sizes:
        expected = [np.asarray(x) for x in whole.pool(size, ("max", "mass"))]
        for step in (1, 2, 5):
            largest = np.full(expected[0].shape, np.nan)
            mass = np.zeros(expected[0].shape)
            for first in range(step):
                columns = slice(first, None, step)
                pooled = whole.pool(size, ("max", "mass"), columns=columns, of=(length, length))
                x, y = (np.asarray(part) for part in pooled)
                largest, mass = np.fmax(largest, x), mass + np.nan_to_num(np.exp(y))
            np.testing.assert_allclose(largest, expected[0], rtol=1e-6, atol=1e-6)
            assert_same = np.nan_to_num(np.exp(expected[1]))
            np.testing.assert_allclose(mass, assert_same, rtol=1e-5, atol=1e-7)


def counts_from_the_start(edit):
    spans = [x if isinstance(x, slice) else slice(x, x) for x in (edit.queries, edit.keys)]
    return all(end is None or end >= 0 for x in spans for end in (x.start, x.stop))


@settings(max_examples=40, deadline=None)
@given(call=calls(), data=st.data())
def test_any_call_cut_anywhere_is_merged_to_the_whole(call, data):
    (q, k, v), options = call
    Lq, Lk = q.shape[2], k.shape[2]
    if data.draw(st.booleans()):
        options |= {"dropout": 0.3, "seed": 5}
    start = data.draw(st.integers(0 if "dropout" in options else -3, Lk + 3))
    options.pop("query_start", None)
    edits = [edit for edit in options.get("edits", []) if counts_from_the_start(edit)]
    options |= {"edits": edits}
    # Edits of queries count positions, of the whole too.
    whole, known = regard.attention(
        q, k, v, query_start=start, key_start=0, backend="reference", return_statistics=True,
        **options,
    )  # fmt: skip
    sinks = options.pop("sinks", None)
    step, query_step = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    for queries in (range(first, Lq, query_step) for first in range(query_step)):
        parts, rows = [], (slice(None), slice(None), span(queries))
        for first in range(step):
            every = range(first, max(first, Lk), step)
            cut = data.draw(st.integers(0, len(every)))
            for keys in (every[:cut], every[cut:]):
                own = of_pieces(options, queries, keys, start)
                arrays = q[rows], k[:, :, span(keys)], v[:, :, span(keys)]
                parts.append(regard.attention(*arrays, return_statistics=True, **own))
        found, statistics = regard.merge(parts, sinks)
        np.testing.assert_allclose(found, whole[rows], atol=1e-12)
        np.testing.assert_allclose(statistics.maximum, known.maximum[rows], atol=1e-12)
        np.testing.assert_allclose(statistics.total, known.total[rows], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_partial_outputs_in_the_dtype_of_sums_keep_their_digits(dtype, backend):
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in inputs()[:3])
    ask = functools.partial(regard.attention, causal=True, backend=backend)
    wide = regard.attention(q.double(), k.double(), v.double(), causal=True)
    one = ask(q, k, v, output_dtype="float32")
    assert one.dtype == torch.float32
    assert torch.equal(one.to(q.dtype), ask(q, k, v))
    assert torch.equal(ask(q, k, v, output_dtype=q.dtype), ask(q, k, v))
    parts = [
        ask(
            q, k[:, :, span(keys)], v[:, :, span(keys)], query_start=0, key_start=keys.start,
            key_step=keys.step, output_dtype=torch.float32, return_statistics=True,
        )
        for keys in pieces_of("striped")
    ]  # fmt: skip
    found = regard.merge(parts)[0]
    assert found.dtype == torch.float32

    def rms(x):
        return float((x.double() - wide).square().mean().sqrt())

    assert rms(found) <= 1.5 * rms(one)
    assert rms(one) <= rms(ask(q, k, v))


@by_ways(*NAMED)
@pytest.mark.parametrize("largest", [6e4, 1e5])
def test_parts_are_as_exact_as_the_whole_at_any_size_of_scores(largest, way):
    q, k, v, _ = inputs(dtype="float32")
    scale = largest / float(np.abs(np.einsum("bhid,bhjd->bhij", q, k.repeat(2, 1))).max())
    options = {"causal": True, "scale": scale, "query_start": 0}
    out, _, _ = define(q, k, v, **options)
    pieces = pieces_of("contiguous")
    parts = [
        way.ask(
            q, k[:, :, span(keys)], v[:, :, span(keys)], return_statistics=True,
            key_start=keys.start, **options,
        )
        for keys in pieces
    ]  # fmt: skip
    one = way.output(q, k, v, **options)
    found, statistics = regard.merge(parts)
    error, whole = (np.sqrt(np.mean((np.asarray(x) - out) ** 2)) for x in (found, one))
    assert error <= 2 * whole + 1e-7
    total = np.zeros((B, HQ, T))
    for keys in pieces:
        part = regard.AttentionWeights(
            *map(way.convert, (q, k[:, :, span(keys)])), statistics=statistics,
            key_start=keys.start, backend=way.backend, **options,
        )  # fmt: skip
        total += np.asarray(part.mass(slice(None)))
    np.testing.assert_allclose(total, 1, atol=2e-6)


@by_ways(*NAMED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("largest", [1e6, 1e8, 3e9, 1e18, 1e30])
def test_statistics_that_are_handed_in_give_the_weights_at_any_size_of_scores(largest, dtype, way):
    """In heads without a sink, with one below the scores, and with one that is the maximum.

    Matrix products of torch and NumPy may round a score differently when other keys are beside it.
    """
    q, k, _, _ = map(way.convert, inputs(dtype=dtype))
    unit = {"kernel": 0.0, "reference": 2.0**-52}.get(way.backend, np.finfo(dtype).eps)
    roundings = 2 * (D + 4) * unit * largest  # of a score; the reference's are float64's
    options = {"causal": True, "scale": largest / 7, "query_start": 0, "backend": way.backend}
    sinks = np.asarray(regard.AttentionWeights(q, k, **options).max_score)[0]
    for some in (None, 0.3 * sinks, 1.5 * abs(sinks)):
        if some is not None:
            options["sinks"] = way.convert(some)
        whole = regard.AttentionWeights(q, k, **options)
        statistics = whole.statistics
        if way.backend == "reference" and dtype == "float32" and largest > 1e9:
            with pytest.raises(ValueError, match="statistics: a maximum is"):
                regard.AttentionWeights(q, k, statistics=statistics, **options)
            continue
        expected = np.asarray(whole)
        error = 1e-6 if dtype == "float32" else 1e-13
        for keys in (slice(0, None), slice(0, 20), slice(20, None)):
            part = regard.AttentionWeights(
                q, k[:, :, keys], key_start=keys.start, statistics=statistics, **options
            )
            found, right = np.asarray(part), expected[..., keys]
            assert ((0 <= found) & (found <= 1 + error)).all()
            slope = np.expm1(min(roundings, 1.0))  # of one more, every weight from 0 to 1 may be
            np.testing.assert_allclose(found, right, rtol=error + slope, atol=error)


@by_ways(*NAMED)
@pytest.mark.parametrize("largest", [1e12, 1e30])
def test_totals_are_numbers_where_a_rounding_of_the_maximum_is_more_than_any_exponential(
    largest, way
):
    q, k, v, _ = inputs(dtype="float32")
    _, weights, (maximum, total) = way.ask(
        q, k, v, scale=largest, return_weights=True, return_statistics=True
    )
    assert np.isfinite(np.asarray(maximum)).all()
    assert np.isfinite(np.asarray(total)).all()
    assert (np.asarray(total) > 0).all()
    chosen = np.asarray(weights.at(*np.indices((T, T)).reshape(2, -1)))
    assert ((chosen >= 0) & (chosen <= 1)).all()


@by_ways(*NAMED)
@pytest.mark.parametrize("sink", [30.0, 1000.1, 1e9, 1e20])
def test_a_sink_that_is_far_above_the_scores_is_the_maximum_and_the_only_term(sink, way):
    q, k, v, _ = inputs(dtype="float32")
    sinks = np.full(HQ, sink, np.float32)
    _, (maximum, total) = way.ask(q, k, v, sinks=sinks, return_statistics=True)
    np.testing.assert_array_equal(maximum, np.broadcast_to(sinks[:, None], maximum.shape))
    np.testing.assert_allclose(total, 1, rtol=1e-4)


@by_ways(*NAMED)
def test_statistics_come_with_weights_and_from_them(way):
    q, k, v, _ = inputs(dtype="float32")
    sinks = numbers(HQ, seed=3)
    for options in ({"causal": True}, {"softcap": 2.0, "sinks": sinks}, {"scale": -0.5}):
        alone = way.ask(q, k, v, return_statistics=True, **options)
        output, weights, statistics = way.ask(
            q, k, v, return_weights=True, return_statistics=True, **options
        )
        plain = way.ask(q, k, v, **options)
        for x in (alone[0], output):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(plain))
        for found in (alone[1], statistics, weights.statistics):
            assert type(found) is RowStatistics
            assert type(found.maximum) is type(plain)
            assert str(found.total.dtype).endswith("float32")
            for x, y in zip(found, statistics):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        _, _, lse = define(q, k, v, **options)
        own = np.asarray(statistics.maximum, float) + np.log(np.asarray(statistics.total, float))
        np.testing.assert_allclose(own, lse, atol=2e-6)
        largest = np.asarray(weights.part(slice(2, 3)).statistics.maximum)
        np.testing.assert_array_equal(largest, np.asarray(statistics.maximum)[..., 2:3])


@by_ways()
def test_the_maximum_is_the_largest_score_or_the_sink_and_the_total_relative_to_it(way):
    q, k, v, _ = inputs()
    scores = np.einsum("bhid,bhjd->bhij", q, k.repeat(2, 1)) * 2
    # Of rows whose maxima are from 4 to 27: below all, and from within to far above.
    for above in (None, -50.0, 0.0, 10.0, 20.0, 25.0, 30.0, 400.0):
        sinks = None if above is None else above + np.arange(float(HQ))
        of_sinks = np.full(HQ, -np.inf) if sinks is None else sinks
        maximum = np.maximum(scores.max(-1), of_sinks[:, None])
        terms = np.exp(scores - maximum[..., None]).sum(-1)
        total = terms + np.exp(of_sinks[:, None] - maximum)
        found = way.ask(q, k, v, return_statistics=True, scale=2.0, sinks=sinks)[1]
        np.testing.assert_allclose(np.asarray(found.maximum), maximum, rtol=1e-13)
        np.testing.assert_allclose(np.asarray(found.total), total, rtol=1e-12)


def test_what_makes_scores_of_maxima_is_the_kernels_own():
    kernel, q, k = BACKENDS[0], *inputs()[:2]
    edits = [regard.Edit(keys=1, factor=2.0)]
    some = {"softcap": 2.0}, {"bias": numbers(T, T)}, {"edits": edits}
    for options in ({}, {"scale": 3.0}, {"scale": -3.0}, {"scale": 0.0}, *some,
                    {"edits": edits, "scale": 1e-35}):  # fmt: skip
        call = read_call(q, k, None, **options)
        read, _ = call_as_read(call)
        np.testing.assert_allclose(kernel.score_unit(call), read.factor * np.log(2))


def test_a_product_and_its_error_are_exact():
    x = np.random.default_rng(0).standard_normal(1000) * 1e5
    found, error = product(np, x, 0.1767766952966369)
    for one, p, e in zip(x[:50].tolist(), found.tolist(), error.tolist()):
        assert Fraction(one) * Fraction(0.1767766952966369) == Fraction(p) + Fraction(e)
    with np.errstate(all="ignore"):
        assert product(np, np.array([np.inf, np.nan]), 2.0)[1].tolist() == [0, 0]


@by_ways(KERNEL, REFERENCE, TORCH)
def test_merging_goes_on_and_takes_the_sinks_at_the_end(way):
    *arrays, _ = inputs()
    sinks = numbers(HQ, seed=3).astype(float)
    pieces = pieces_of("contiguous")
    parts = parts_of(way, arrays, {"causal": True}, range(T), pieces)
    at_once = regard.merge(parts, way.convert(sinks))
    step = regard.merge(parts[:1])
    for part in parts[1:]:
        step = regard.merge([step, part])
    step = regard.merge([step], way.convert(sinks))
    backwards = regard.merge(parts[::-1], way.convert(sinks))
    expected, _, lse = define(*arrays, causal=True, sinks=sinks)
    for out, statistics in (at_once, step, backwards):
        np.testing.assert_allclose(np.asarray(out), expected, atol=4e-15)
        own = np.asarray(statistics.maximum) + np.log(np.asarray(statistics.total))
        np.testing.assert_allclose(own, lse, rtol=1e-14, atol=1e-14)
    alone = regard.merge([(None, statistics) for _, statistics in parts], way.convert(sinks))
    assert alone[0] is None
    for x, y in zip(alone[1], at_once[1]):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@by_ways(*NAMED)
def test_parts_without_keys_queries_or_heads(way):
    q, k, v = (x.copy() for x in inputs()[:3])
    none = way.ask(q, k[:, :, :0], v[:, :, :0], return_statistics=True)
    assert (np.asarray(none[0]) == 0).all()
    assert (np.asarray(none[1].maximum) == -np.inf).all()
    assert (np.asarray(none[1].total) == 0).all()
    some = way.ask(q, k, v, return_statistics=True)
    for parts in ([none, some], [some, none], [none, none, some]):
        for x, y in zip(regard.merge(parts)[1], some[1]):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        np.testing.assert_allclose(np.asarray(regard.merge(parts)[0]), np.asarray(some[0]))
    twice = regard.merge([none, none])
    assert (np.asarray(twice[0]) == 0).all()
    assert (np.asarray(twice[1].total) == 0).all()
    of_sinks = regard.merge([none, none], way.convert(np.ones(HQ)))
    assert (np.asarray(of_sinks[0]) == 0).all()
    assert (np.asarray(of_sinks[1].maximum) == -np.inf).all()
    for empty in (q[:, :, :0], q[:0]):
        keys = (k[: len(empty)], v[: len(empty)])
        part = way.ask(empty, *keys, return_statistics=True)
        out, statistics = regard.merge([part, part])
        assert out.shape == (*empty.shape[:3], 5)
        assert statistics.total.shape == empty.shape[:3]
        weights = regard.AttentionWeights(
            *map(way.convert, (empty, keys[0])), statistics=statistics, backend=way.backend
        )
        assert weights.entropy().shape == empty.shape[:3]
    of_nothing = regard.AttentionWeights(
        *map(way.convert, (q, k[:, :, :0])), statistics=some[1], query_start=0, key_start=9,
        backend=way.backend,
    )  # fmt: skip
    assert (np.asarray(of_nothing.entropy()) == 0).all()
    assert np.isnan(np.asarray(of_nothing.pool((3, 4), of=(T, T)))).all()


@by_ways(*NAMED)
def test_nan_and_infinities_of_a_part_are_those_of_the_whole(way):
    q, k, v = (x[:, :, :9].copy() for x in inputs()[:3])
    k[0, 0, 2], v[0, 1, 3, 0], v[1, 0, 4, 1] = np.nan, np.nan, np.inf
    k[1, 1, 6], bias = 1e308, np.zeros((9, 9))
    bias[3:5, 7], bias[5, :] = np.inf, -np.inf
    for options in ({}, {"causal": True}, {"bias": bias}):
        whole, known = way.ask(q, k, v, query_start=0, return_statistics=True, **options)
        parts = []
        for keys in (slice(0, 3), slice(3, 7), slice(7, 9)):
            own = {name: x[:, keys] if name == "bias" else x for name, x in options.items()}
            parts.append(
                way.ask(
                    q, k[:, :, keys], v[:, :, keys], query_start=0, key_start=keys.start,
                    return_statistics=True, **own,
                )
            )  # fmt: skip
        found, statistics = regard.merge(parts)
        np.testing.assert_allclose(np.asarray(found), np.asarray(whole), atol=1e-14)
        with np.errstate(all="ignore"):
            lse, own = (
                np.asarray(x.maximum) + np.log(np.asarray(x.total)) for x in (known, statistics)
            )
        np.testing.assert_allclose(own, lse, rtol=1e-14)


def test_a_single_matrix_without_heads():
    q, k, v = (x[0, 0] for x in inputs()[:3])
    sink = np.array(0.5)
    parts = [
        regard.attention(q, k[s], v[s], query_start=0, key_start=s.start, return_statistics=True)
        for s in (slice(0, 20), slice(20, T))
    ]
    assert parts[0][1].maximum.shape == (T,)
    out, statistics = regard.merge(parts, sink)
    np.testing.assert_allclose(out, regard.attention(q, k, v, sinks=sink), atol=1e-15)
    part = regard.AttentionWeights(
        q, k[:20], query_start=0, key_start=0, statistics=statistics, sinks=sink
    )
    whole = regard.AttentionWeights(q, k, sinks=sink)
    np.testing.assert_allclose(part[:], whole[:, :20], rtol=1e-12)
    np.testing.assert_allclose(part.lse, whole.lse, rtol=1e-14)
    np.testing.assert_allclose(part.copy().entropy(), whole.part(columns=slice(20)).entropy())
    assert part.part(slice(2, 9), slice(3, 7)).shape == (7, 4)
    np.testing.assert_allclose(part.part(slice(2, 9), slice(3, 7))[1], whole[3, 3:7], rtol=1e-12)


@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_positions_and_statistics_are_compiled_in_one_graph(backend):
    q, k, v = (torch.from_numpy(x) for x in inputs()[:3])

    @torch.compile(fullgraph=True, backend="eager")
    def attend(q, k, v):
        return regard.attention(
            q, k, v, causal=True, query_start=4, query_step=2, key_start=1, key_step=3,
            return_statistics=True, output_dtype="float64", backend=backend,
        )  # fmt: skip

    plain = regard.attention(
        q, k, v, causal=True, query_start=4, query_step=2, key_start=1, key_step=3,
        return_statistics=True, backend=backend,
    )  # fmt: skip
    out, statistics = attend(q, k, v)
    assert torch.equal(out, plain[0])
    assert torch.equal(statistics.total, plain[1].total)


def test_what_gradients_of_parts_would_lack_is_refused():
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in inputs()[:3])
    whole = regard.AttentionWeights(q, k, causal=True)
    part = whole.part(columns=slice(3, 12))
    given = regard.AttentionWeights(
        q, k[:, :, 3:12], query_start=0, key_start=3, causal=True, statistics=whole.statistics
    )
    for weights in (part, given):
        for ask in (lambda w: w[0, 0, 5], lambda w: w.entropy(), lambda w: w.at([5], [2])):
            with pytest.raises(UnsupportedError, match="a part with some of the keys has no grad"):
                ask(weights)
        with torch.no_grad():
            expected = whole[0, 0, 5, 3:12]
            np.testing.assert_allclose(weights[0, 0, 5], expected, rtol=1e-12)
    parts = [regard.attention(q, k, v, return_statistics=True)]
    assert not parts[0][1].total.requires_grad
    with pytest.raises(UnsupportedError, match=r"autograd records an output.*attention_gradients"):
        regard.merge(parts)
    with torch.no_grad():
        assert not regard.merge(parts)[0].requires_grad
    parts, sinks = [(x.detach(), one) for x, one in parts], torch.ones(q.shape[1]).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"autograd records the sinks.*attention_gradients"):
        regard.merge(parts, sinks)
    assert not regard.merge([(None, one) for _, one in parts], sinks)[1].total.requires_grad


# What loads the decompositions of forward mode uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("dual", ["output", "maximum", "total", "sinks"])
def test_tangents_are_refused_not_lost(dual):
    x = torch.from_numpy(inputs()[0])
    output, (maximum, total) = regard.attention(x, x, x, return_statistics=True)
    sinks = torch.zeros(x.shape[1], dtype=x.dtype)
    given = {"output": output, "maximum": maximum, "total": total, "sinks": sinks}

    def ask():
        known = regard.RowStatistics(given["maximum"], given["total"])
        return regard.merge([(given["output"], known)], given["sinks"])

    with torch.autograd.forward_ad.dual_level():
        ask()
        given[dual] = torch.autograd.forward_ad.make_dual(given[dual], given[dual])
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            ask()


def test_a_recording_refuses_parts_of_a_text():
    x = torch.from_numpy(inputs()[0])[0, 0]
    with (
        pytest.raises(UnsupportedError, match=r"part of its tokens \(key_start, query_step"),
        regard.record(),
    ):
        regard.attention(x, x, x, query_start=0, key_start=5)
    weights = regard.AttentionWeights(x, x, query_start=0, key_step=2)
    with pytest.raises(ValueError, match="a part with a step"):
        weights.layer()
    moved = regard.AttentionWeights(x, x, causal=True, query_start=9, key_start=4)
    layer = moved.layer()
    again = regard.AttentionWeights(layer.query, layer.key, **layer.options)
    np.testing.assert_array_equal(np.asarray(again)[0], np.asarray(moved))


X = np.ones((HQ, 3, D))
STATISTICS = RowStatistics(np.zeros((HQ, 3)), np.ones((HQ, 3)))
PART = (X, STATISTICS)
TENSORS = torch.from_numpy(X), RowStatistics(*map(torch.from_numpy, STATISTICS))
ON_META = TENSORS[0].to("meta"), RowStatistics(*(x.to("meta") for x in TENSORS[1]))


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ([], ValueError, "there is no part"),
        (None, TypeError, r"parts is a NoneType; a list of \(output, statistics\)"),
        (PART, TypeError, r"part 0 is an ndarray; \(output, statistics\) is needed"),
        ([STATISTICS], TypeError, r"part 0 is a RowStatistics; \(output, statistics\)"),
        ([(X, X)], TypeError, r"part 0 is a tuple"),
        ([(X, [*STATISTICS])], TypeError, r"part 0 is a tuple of an ndarray and a list; \(output"),
        ([PART, (None, STATISTICS)], TypeError, "some parts have an output and others have None"),
        ([PART, (X[:, :2], STATISTICS)], ShapeError, r"output of part 1 has shape \(4, 2, 8\)"),
        ([(X[0], STATISTICS)], ShapeError, r"output of part 0 .* \(3, 8\) and its statistics"),
        ([PART, (X.astype("float32"), STATISTICS)], TypeError, "ndarray of float32 and that of"),
        ([PART, (torch.ones(4, 3, 8).double(), STATISTICS)], TypeError, "Tensor of float64 and"),
        ([(X.astype(int), STATISTICS)], TypeError, "output of part 0 is int64; floating"),
        ([(np.ma.array(X), STATISTICS)], TypeError, "output of part 0 is MaskedArray; floating"),
        ([(X, RowStatistics(*(x.astype("f2") for x in STATISTICS)))], TypeError,
         "maximum of part 0 is float16, rounded more than shares may be; float32 or float64"),
        ([(TENSORS[0], STATISTICS)], TypeError,
         "output of part 0 is a tensor on cpu and its statistics a NumPy array; both must be"),
        ([(X, TENSORS[1])], TypeError, "is a NumPy array and its statistics a tensor on cpu"),
        ([(ON_META[0], TENSORS[1])], TypeError, "a tensor on meta and its statistics a tensor on"),
        ([TENSORS, ON_META], TypeError, "maximum of part 1 is on meta and that of part 0"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(parts, error, said):
    with pytest.raises(error, match=f"^merge: .*{said}"):
        regard.merge(parts)


@pytest.mark.parametrize(
    ("sinks", "error", "said"),
    [
        (1.0, TypeError, "sinks is a float; an array of the library"),
        (torch.ones(HQ), TypeError, "sinks is a Tensor"),
        (np.ma.ones(HQ), TypeError, "sinks is a MaskedArray"),
        (np.ones(HQ, complex), TypeError, "sinks is complex128; floating numbers are needed"),
        (np.ones(HQ, bool), TypeError, "sinks is bool; floating numbers are needed"),
        (
            np.ones(3),
            ShapeError,
            r"sinks has shape \(3,\); one logit per query head is needed: \(4",
        ),
    ],
)
def test_sinks_that_do_not_fit_are_named(sinks, error, said):
    with pytest.raises(error, match=f"^merge: {said}"):
        regard.merge([PART], sinks)


@pytest.mark.parametrize(
    ("statistics", "error", "said"),
    [
        (X, TypeError, r"an ndarray is given; RowStatistics\(maximum, total\) is needed"),
        ((1.0, 2.0), TypeError, "maximum is a float; an array is needed"),
        ((X[..., 0].astype(int), X[..., 0]), TypeError, "maximum is int64; floating numbers"),
        ((X[..., 0], X[:2, :, 0]), ShapeError, r"total has shape \(2, 3\); .* needed: \(4, 3\)"),
        ((X[..., 0], -X[..., 0]), ValueError, "a total is negative"),
        ((np.ma.array(X[..., 0]), X[..., 0]), TypeError, "maximum is a MaskedArray; an array"),
        ((X[..., 0], X[..., 0].astype("f4")), TypeError, "total is float32, rounded more than"),
    ],
)
def test_statistics_that_do_not_fit_are_named(statistics, error, said):
    with pytest.raises(error, match=f"^statistics: {said}"):
        regard.AttentionWeights(X, X, statistics=statistics)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_of_16_bits_would_make_other_weights(dtype):
    x = torch.ones(2, 3, 4)
    statistics = RowStatistics(*(torch.ones(2, 3, dtype=getattr(torch, dtype)) for _ in range(2)))
    with pytest.raises(TypeError, match=f"maximum is {dtype}, .* float32 is needed"):
        regard.AttentionWeights(x, x, statistics=statistics)
    wide = RowStatistics(*(one.double() for one in statistics))
    assert regard.AttentionWeights(x, x, statistics=wide)[...].shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"key_start": 3}, TypeError, "query_start is missing; with key_start, query_step or"),
        ({"key_step": 2}, TypeError, "query_start is missing"),
        ({"key_start": 3, "query_start": np.array([1])}, TypeError, "query_start is an ndarray"),
        ({"key_start": 1.5, "query_start": 0}, TypeError, "key_start is a float; an int is needed"),
        ({"key_start": True, "query_start": 0}, TypeError, "key_start is a bool"),
        ({"key_step": 0, "query_start": 0}, ValueError, r"key_step is 0; it must be from 1 to"),
        ({"query_step": -1, "query_start": 0}, ValueError, r"query_step is -1; it must be from 1"),
        ({"key_start": 2**54, "query_start": 0}, ValueError, "key_start is .* between"),
        ({"key_start": 0, "query_start": 2**54}, ValueError, "query_start is 180"),
        ({"key_start": -2, "query_start": 0, "dropout": 0.5}, ValueError, "key_start is -2; "),
        ({"key_start": 1, "query_start": -3, "dropout": 0.5}, ValueError, "query_start is -3; w"),
        ({"key_start": 1, "query_start": 0, "edits": [regard.Edit(keys=-1)]}, ValueError,
         r"edits\[0\]: keys is -1; with key_start, .* counted from the start"),
        ({"output_dtype": "int8"}, ValueError, "output_dtype is int8; of a query of float64"),
        ({"output_dtype": "float32"}, ValueError,
         "output_dtype is float32; of a query of float64 it can be float64"),
        ({"output_dtype": np.float64(2)}, TypeError, r"output_dtype is .*; a dtype is needed"),
        ({"output_dtype": torch.ones(2)}, TypeError, r"output_dtype is .*; a dtype is needed"),
        ({"output_dtype": 3}, TypeError, r"output_dtype is 3; a dtype is needed"),
    ],
)  # fmt: skip
def test_positions_and_dtypes_that_cannot_be_are_named(options, error, said):
    with pytest.raises(error, match=f"^attention: {said}"):
        regard.attention(X, X, X, **options)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"of": 5}, TypeError, r"of is 5; a pair of ints \(rows, columns\) is needed"),
        ({"of": (20, 20.0)}, TypeError, "of is"),
        ({"of": (13, 20)}, ValueError, r"queries are at positions 10 to 14, and of is \(13, 20\)"),
        ({"of": (20, 3)}, ValueError, "keys are at positions 4 to 6"),
    ],
)
def test_bins_of_a_whole_that_do_not_fit_are_named(options, error, said):
    weights = regard.AttentionWeights(X, X, query_start=10, query_step=2, key_start=4)
    with pytest.raises(error, match=f"^pool: {said}"):
        weights.pool((2, 2), **options)


@by_ways(*NAMED)
@pytest.mark.parametrize("how", ["max", "mass"])
def test_bins_between_the_tokens_of_a_part_are_of_no_pair(way, how):
    q, k = numbers(1, 3, D), numbers(1, 4, D, seed=1)
    options = {"query_start": 1, "query_step": 5, "key_start": 2, "key_step": 4}
    weights = way.weights(q, k, k, **options)
    found = np.asarray(weights.pool((9, 10), how, of=(18, 20)))[0]
    queries, keys = (np.isin(np.arange(n), at) for n, at in ((9, (0, 3, 5)), (10, (1, 3, 5, 7))))
    np.testing.assert_array_equal(np.isnan(found), ~(queries[:, None] & keys))


def test_bins_of_a_whole_need_one_place_for_the_batch():
    x = np.ones((2, HQ, 3, D))
    weights = regard.AttentionWeights(x, x, query_start=np.array([0, 1]))
    with pytest.raises(ValueError, match="have queries at several positions"):
        weights.pool((2, 2), of=(9, 9))
    assert weights.matrix(1, 0).pool((2, 2), of=(9, 9)).shape == (2, 2)
    assert HKV == 2


@by_ways(*NAMED)
def test_a_batch_of_no_element_has_bins_of_a_whole_wherever_its_part_is(way):
    x = np.ones((0, HQ, 3, D))
    weights = way.weights(x, x, x, query_start=0, query_step=2, key_start=4)
    assert weights.pool((2, 4), of=(5, 7)).shape == (0, HQ, 2, 4)


@by_ways(*NAMED)
def test_a_sink_of_infinity_is_nan_in_the_whole_where_something_is_seen(way):
    q, k = numbers(HQ, 6, D), numbers(HKV, 9, D, seed=1)
    sinks = np.array([np.inf, 1, np.nan, -np.inf], "f")
    options = {"causal": True, "query_start": -2}
    parts = [
        way.ask(q, some, some, return_statistics=True, key_start=start, **options)
        for some, start in ((k[:, :4], 0), (k[:, 4:], 4))
    ]
    merged, statistics = regard.merge(parts, way.convert(sinks))
    whole, of_whole = way.ask(q, k, k, return_statistics=True, sinks=sinks, **options)
    assert np.isnan(np.asarray(whole)[[0, 2], 2:]).all()
    np.testing.assert_allclose(np.asarray(merged), np.asarray(whole), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(statistics.total, of_whole.total, rtol=1e-5)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_total_below_0_is_nan_in_the_whole(library):
    x = np.random.default_rng(0).standard_normal((2, 5, 4)).astype("f")
    x = x if library == "numpy" else torch.from_numpy(x)
    parts = [regard.attention(x, y, y, return_statistics=True) for y in (x[:, :2], x[:, 2:])]
    (output, (maximum, total)), other = parts
    wrong = total * 1
    wrong[1, 3] = -wrong[1, 3]
    found, statistics = regard.merge([(output, (maximum, wrong)), other])
    right, _ = regard.merge(parts)
    assert np.isnan(np.asarray(found[1, 3])).all()
    assert np.isnan(float(statistics.total[1, 3]))
    assert np.isnan(np.asarray(found)).sum() == 4
    np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(right[0]))
