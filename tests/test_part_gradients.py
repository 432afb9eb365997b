"""The gradients of attention over parts of the keys add up to those of the whole."""

import functools

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from torch.fx.experimental.proxy_tensor import make_fx

import regard
from recordings import numbers
from regard import AttentionGradients, RowStatistics, ShapeError, UnsupportedError
from ways import NAMED, by_ways
from wholes import CASES, HKV, HQ, B, D, T, inputs, of_pieces, pieces_of, span

KERNEL, REFERENCE, TORCH = NAMED[0], NAMED[1], NAMED[3]
NAMES = AttentionGradients._fields


def tensors(x):
    if isinstance(x, tuple):
        return tuple(map(tensors, x))
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


@functools.cache
def exact(name):
    """The gradients of the whole, by autograd through torch's operations in float64."""
    *arrays, grad = (torch.from_numpy(x) for x in inputs())
    options = {key: tensors(x) for key, x in CASES[name].items()}
    given = dict(zip(NAMES, arrays)) | {
        key: options[key].double() for key in ("bias", "sinks") if key in options
    }
    leaves = {key: x.requires_grad_() for key, x in given.items()}
    own = options | {key: x for key, x in leaves.items() if key in options}
    out = regard.attention(*arrays, query_start=0, backend="torch", **own)
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    return {key: x.numpy() for key, x in zip(leaves, found)}


def of_whole(way, arrays, options):
    return way.ask(*arrays, query_start=0, return_statistics=True, **options)


def summed_over_parts(way, name, order, dtype="float64"):
    """The gradients of the whole, added up part by part in buffers of each piece's keys."""
    *arrays, grad = inputs(dtype=dtype)
    q, k, v = arrays
    options = {
        key: x.astype(dtype) if key in ("bias", "sinks") else x for key, x in CASES[name].items()
    }
    out, statistics = of_whole(way, arrays, options)
    found = {key: np.zeros(x.shape, dtype) for key, x in exact(name).items()}
    pieces = pieces_of(order)
    for keys in pieces:
        sums = {key: way.convert(np.zeros((B, HKV, len(keys), n), dtype))
                for key, n in (("key", D), ("value", v.shape[-1]))}  # fmt: skip
        for queries in pieces:
            own = of_pieces(options, queries, keys)
            if keys is not pieces[0]:
                own.pop("sinks", None)
            rows = slice(None), slice(None), span(queries)
            more = {"query": way.convert(np.zeros((B, HQ, len(queries), D), dtype))}
            for key in ("bias", "sinks"):
                if key in own:
                    more[key] = way.convert(np.zeros(own[key].shape, dtype))
            into = AttentionGradients(**sums, **more)
            got = regard.attention_gradients(
                *map(way.convert, (q[rows], k[:, :, span(keys)], v[:, :, span(keys)])),
                out[rows], RowStatistics(*(x[rows] for x in statistics)), way.convert(grad[rows]),
                into=into, backend=way.backend,
                **{key: way.convert(x) for key, x in own.items()},
            )  # fmt: skip
            assert got is into
            found["query"][rows] += np.asarray(into.query)
            if "bias" in more:
                found["bias"][..., span(queries), span(keys)] += np.asarray(into.bias)
            if "sinks" in more:
                found["sinks"] += np.asarray(into.sinks)
        for key in sums:
            found[key][:, :, span(keys)] += np.asarray(sums[key])
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name != "large scores"])
@pytest.mark.parametrize(
    ("way", "order"),
    [(KERNEL, "zigzag"), (KERNEL, "striped")] + [(way, "striped") for way in NAMED[1:]],
    ids=lambda x: x if isinstance(x, str) else f"{x.library}-{x.backend}",
)
def test_gradients_of_parts_add_up_to_those_of_the_whole(way, order, name):
    found = summed_over_parts(way, name, order)
    for key, expected in exact(name).items():
        np.testing.assert_allclose(found[key], expected, rtol=1e-11, atol=3e-14, err_msg=key)


@by_ways(*NAMED)
def test_gradients_at_large_scores_are_as_exact_as_those_of_one_process(way):
    *arrays, grad = inputs()
    options = CASES["large scores"]
    expected, found = exact("large scores"), summed_over_parts(way, "large scores", "zigzag")
    out, statistics = of_whole(way, arrays, options)
    one = regard.attention_gradients(
        *map(way.convert, arrays), out, statistics, way.convert(grad), query_start=0,
        backend=way.backend, **options,
    )  # fmt: skip
    for key in ("query", "key", "value"):
        errors = [
            np.sqrt(np.mean((np.asarray(x) - expected[key]) ** 2))
            for x in (found[key], getattr(one, key))
        ]
        assert errors[0] <= 2 * errors[1] + 1e-9


@by_ways(*NAMED)
def test_gradients_are_new_arrays_where_none_are_given(way):
    *arrays, grad = inputs()
    bias, sinks = numbers(1, T, seed=1).astype(float), numbers(HQ, seed=2).astype(float)
    options = {"causal": True, "bias": bias, "sinks": sinks}
    out, statistics = of_whole(way, arrays, options)
    given = {key: way.convert(x) for key, x in options.items()}
    ask = functools.partial(
        regard.attention_gradients, *map(way.convert, arrays), out, statistics, way.convert(grad),
        query_start=0, backend=way.backend,
    )  # fmt: skip
    found = ask(**given)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (*arrays, bias, sinks)]
    of_torch = regard.attention(
        *leaves[:3], causal=True, bias=leaves[3], sinks=leaves[4], backend="torch"
    )
    expected = torch.autograd.grad(of_torch, leaves, torch.from_numpy(grad))
    for name, x, exactly in zip(NAMES, found, expected):
        assert tuple(x.shape) == tuple(exactly.shape)
        np.testing.assert_allclose(np.asarray(x), exactly, rtol=1e-11, atol=3e-14, err_msg=name)
    without_bias = ask(causal=True, bias=given["bias"])
    assert without_bias.sinks is None
    for name in NAMES[:4]:
        np.testing.assert_array_equal(
            np.asarray(getattr(without_bias, name)), np.asarray(getattr(found, name))
        )
    twice = ask(**given, into=ask(**given))
    for x, y in zip(twice, found):
        np.testing.assert_allclose(np.asarray(x), 2 * np.asarray(y), rtol=1e-12, atol=1e-15)


@by_ways(KERNEL, REFERENCE, TORCH)
def test_only_those_that_have_a_buffer_are_computed(way):
    *arrays, grad = inputs()
    out, statistics = of_whole(way, arrays, {"causal": True})
    arguments = *map(way.convert, arrays), out, statistics, way.convert(grad)
    options = {"causal": True, "query_start": 0, "backend": way.backend}
    whole = regard.attention_gradients(*arguments, **options)
    for wanted in NAMES[:3]:
        like = np.asarray(getattr(whole, wanted))
        buffers = dict.fromkeys(NAMES[:3]) | {wanted: way.convert(np.ones(like.shape))}
        found = regard.attention_gradients(
            *arguments, into=AttentionGradients(**buffers), **options
        )
        assert [getattr(found, name) is None for name in NAMES[:3]].count(False) == 1
        np.testing.assert_allclose(np.asarray(getattr(found, wanted)), like + 1, atol=1e-14)


@by_ways(KERNEL, TORCH)
def test_buffers_of_any_strides_and_of_keys_that_a_batch_shares(way):
    q, k, v, grad = inputs()
    k, v = k[:1], v[:1]
    out, statistics = way.ask(q, k, v, return_statistics=True)
    arguments = *map(way.convert, (q, k, v)), out, statistics, way.convert(grad)
    found = regard.attention_gradients(*arguments, backend=way.backend)
    assert found.key.shape == k.shape
    repeated = [np.repeat(x, B, 0) for x in (k, v)]
    every = regard.attention_gradients(
        way.convert(q), *map(way.convert, repeated), out, statistics, way.convert(grad),
        backend=way.backend,
    )  # fmt: skip
    for name in ("key", "value"):
        both = np.asarray(getattr(every, name)).sum(0, keepdims=True)
        np.testing.assert_allclose(np.asarray(getattr(found, name)), both, atol=1e-13)
    wide = [np.zeros((*x.shape[:-1], 2 * x.shape[-1])) for x in (q, k, v)]
    into = AttentionGradients(*(way.convert(x)[..., ::2] for x in wide))
    regard.attention_gradients(*arguments, into=into, backend=way.backend)
    for x, y in zip(into[:3], found[:3]):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-14)
    for x in wide:
        assert not np.asarray(x)[..., 1::2].any()
    five = [x.reshape(1, B, *x.shape[1:]) for x in map(way.convert, (q, *repeated))]
    of_five = regard.attention_gradients(
        *five, out[None], RowStatistics(*(x[None] for x in statistics)),
        way.convert(grad)[None], backend=way.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(of_five.key)[0], np.asarray(every.key))


@by_ways(KERNEL, TORCH)
def test_a_buffer_of_a_bias_that_several_axes_share_may_be_strided(way):
    q, k, v, grad = (np.stack([x, x]) for x in inputs())
    bias = numbers(1, 1, HQ, 1, T, seed=4)
    out, statistics = way.ask(q, k, v, bias=bias, return_statistics=True)
    arguments = *map(way.convert, (q, k, v)), out, statistics, way.convert(grad)
    options = {"bias": way.convert(bias), "backend": way.backend}
    found = regard.attention_gradients(*arguments, **options)
    wide = way.convert(np.zeros((1, 1, HQ, 1, 2 * T)))
    into = AttentionGradients(None, None, None, wide[..., ::2])
    regard.attention_gradients(*arguments, into=into, **options)
    assert np.asarray(into.bias).any()
    np.testing.assert_allclose(np.asarray(into.bias), np.asarray(found.bias), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_sums_over_parts_of_16_bit_inputs_are_float32(dtype, backend):
    narrow = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in inputs()]
    q, k, v, grad = narrow
    options = {"causal": True, "backend": backend}
    out, statistics = regard.attention(
        q, k, v, return_statistics=True, output_dtype="float32", **options
    )
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exactly = torch.autograd.grad(regard.attention(*wide, causal=True), wide, grad.double())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    of_torch = torch.autograd.grad(regard.attention(*leaves, **options), leaves, grad)
    found = AttentionGradients(*(torch.zeros(x.shape) for x in (q, k, v)))
    for keys in pieces_of("striped"):
        part = regard.attention_gradients(
            q, k[:, :, span(keys)], v[:, :, span(keys)], out, statistics, grad, query_start=0,
            key_start=keys.start, key_step=keys.step, **options,
        )  # fmt: skip
        assert {x.dtype for x in part[:3]} == {torch.float32}
        found.query.add_(part.query)
        found.key[:, :, span(keys)] = part.key
        found.value[:, :, span(keys)] = part.value
    for x, one, y in zip(found, of_torch, exactly):
        errors = [float((z.double() - y).square().mean().sqrt()) for z in (x, one)]
        assert errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_the_gradient_of_an_output_of_more_digits(backend):
    narrow = [torch.from_numpy(x).bfloat16() for x in inputs()]
    *arrays, grad = narrow
    sinks = torch.from_numpy(numbers(HQ))
    leaves = [x.clone().requires_grad_() for x in (*arrays, sinks)]
    wide = [x.double().requires_grad_() for x in (*arrays, sinks)]
    for some, options in ((leaves, {"output_dtype": "float32"}), (wide, {})):
        out = regard.attention(*some[:3], sinks=some[3], causal=True, backend=backend, **options)
        assert out.dtype == (torch.float32 if options else torch.float64)
        out.backward(grad.to(out.dtype))
    for x, y in zip(leaves, wide):
        assert x.grad.dtype == x.dtype
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0.02, atol=0.03)


@by_ways(*NAMED)
def test_masked_keys_that_are_not_finite_reach_no_gradient(way):
    q, k, v, grad = (x.copy() for x in inputs())
    k[0, 0, 40], v[1, 1, 45:] = np.nan, np.inf
    options = {"key_lengths": np.array([40, 45]), "query_start": 0, "causal": True}
    out, statistics = way.ask(q, k, v, return_statistics=True, **options)
    found = regard.attention_gradients(
        *map(way.convert, (q, k, v)), out, statistics, way.convert(grad), backend=way.backend,
        **{key: way.convert(x) for key, x in options.items()},
    )  # fmt: skip
    clean = [np.nan_to_num(x, posinf=0) for x in (k, v)]
    expected = regard.attention_gradients(
        *map(way.convert, (q, *clean)), out, statistics, way.convert(grad), backend=way.backend,
        **{key: way.convert(x) for key, x in options.items()},
    )  # fmt: skip
    for x, y in zip(found[:3], expected[:3]):
        assert np.isfinite(np.asarray(x)).all()
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-14)


@by_ways(*NAMED)
def test_gradients_of_nothing_are_zeros(way):
    q, k, v, grad = inputs()
    for queries, keys, batch in ((0, T, B), (T, 0, B), (T, T, 0)):
        some = q[:batch, :, :queries], *(x[:batch, :, :keys] for x in (k, v))
        out, statistics = way.ask(*some, return_statistics=True)
        own = way.convert(grad[:batch, :, :queries])
        found = regard.attention_gradients(
            *map(way.convert, some), out, statistics, own, backend=way.backend
        )
        for x, like in zip(found, some):
            assert tuple(x.shape) == like.shape
            assert not np.asarray(x).any()


X = np.ones((HQ, 3, D))
STATISTICS = RowStatistics(np.zeros((HQ, 3)), np.ones((HQ, 3)))
READ_ONLY = np.zeros((HQ, 3, D))
READ_ONLY.flags.writeable = False
BROADCAST = as_strided(np.zeros(D), X.shape, (0, 0, 8))


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"output": X[:, :2]}, ShapeError, r"output has shape \(4, 2, 8\); \(4, 3, 8\) is needed"),
        ({"output": torch.ones(4, 3, 8)}, TypeError, "output is a Tensor; a NumPy array as the"),
        ({"grad_output": None}, TypeError, "grad_output is a NoneType"),
        ({"grad_output": X.astype(int)}, TypeError, "grad_output is int64; float16 or"),
        ({"into": (X, X, X)}, TypeError, r"into is a tuple; regard.AttentionGradients"),
        ({"into": AttentionGradients(X, X, X.astype("float32"))}, TypeError,
         "into.value is float32; float64 is needed"),
        ({"into": AttentionGradients(X, X[:2], X)}, ShapeError, r"into.key has shape \(2, 3, 8\)"),
        ({"into": AttentionGradients(X, X, X, X)}, TypeError, "into has bias, and no bias is g"),
        ({"into": AttentionGradients(READ_ONLY, X, X)}, ValueError, "into.query is read-only"),
        ({"into": AttentionGradients(X, BROADCAST, X)}, ValueError, "into.key is broadcast: sev"),
        ({"grad_output": np.ma.array(X)}, TypeError, "grad_output is a MaskedArray; a NumPy"),
        ({"casual": True}, TypeError, "there is no option 'casual'. Is causal meant"),
        ({"output_dtype": "float64"}, TypeError, "there is no option 'output_dtype'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(given, error, said):
    named = {"output": X, "statistics": STATISTICS, "grad_output": X}
    with pytest.raises(error, match=f"^attention_gradients: {said}"):
        regard.attention_gradients(X, X, X, **(named | given))


def test_statistics_and_inputs_are_checked_as_elsewhere():
    few = RowStatistics(*(x[0] for x in STATISTICS))
    with pytest.raises(ShapeError, match=r"^statistics: maximum has shape \(3,\)"):
        regard.attention_gradients(X, X, X, X, few, X)
    with pytest.raises(ShapeError, match=r"^attention: 4 query heads cannot share 3"):
        regard.attention_gradients(X, X[:3], X[:3], X, STATISTICS, X)
    with pytest.raises(UnsupportedError, match="torch: it takes torch tensors"):
        regard.attention_gradients(X, X, X, X, STATISTICS, X, backend="torch")
    with pytest.raises(TypeError, match="attention_gradients: value is None"):
        regard.attention_gradients(X, X, None, X, STATISTICS, X)
    of_one = torch.zeros(D).double().expand(X.shape)
    tensor, known = torch.from_numpy(X), RowStatistics(*map(torch.from_numpy, STATISTICS))
    with pytest.raises(UnsupportedError, match=r"output is a tensor of layout torch\.sparse_coo"):
        regard.attention_gradients(tensor, tensor, tensor, tensor.to_sparse(), known, tensor)
    into = AttentionGradients(of_one, None, None)
    with pytest.raises(ValueError, match=r"into\.query is broadcast: several of its numbers"):
        regard.attention_gradients(tensor, tensor, tensor, tensor, known, tensor, into=into)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # it is what is tried
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("backend", ["auto", "kernel", "torch"])
@pytest.mark.parametrize("record", ["trace", "make_fx", "vmap"])
def test_a_graph_or_a_transform_is_refused(record, backend):
    x = torch.ones(2, 5, 4)

    def gradient(q):
        known = RowStatistics(q[..., 0] * 0, q[..., 0] * 0 + 5)
        return regard.attention_gradients(q, q, q, q, known, q, backend=backend).query

    recorded = {
        "trace": lambda: torch.jit.trace(gradient, x, check_trace=False),
        "make_fx": lambda: make_fx(gradient)(x),
        "vmap": lambda: torch.func.vmap(gradient)(x[None]),
    }
    with pytest.raises(UnsupportedError, match="attention_gradients: it reads and writes"):
        recorded[record]()


# What loads the decompositions of forward mode uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dual", ["query", "value", "bias", "output", "maximum", "grad", "into"])
def test_tangents_are_refused_not_lost(dual, backend):
    given = {name: torch.ones(2, 5, 4) for name in ("query", "value", "output", "grad", "into")}
    given |= {"bias": torch.ones(2, 5, 5), "maximum": torch.zeros(2, 5)}

    def ask():
        x, into = given, AttentionGradients(None, None, given["into"])
        known = RowStatistics(x["maximum"], x["maximum"] + 5)
        return regard.attention_gradients(
            x["query"], x["query"], x["value"], x["output"], known, x["grad"],
            bias=x["bias"], into=into, backend=backend,
        )  # fmt: skip

    with torch.autograd.forward_ad.dual_level():
        ask()
        given[dual] = torch.autograd.forward_ad.make_dual(given[dual], given[dual])
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            ask()


@by_ways(*NAMED)
def test_statistics_may_be_of_the_other_library(way):
    q, k, v, grad = (numbers(HQ, 5, D, seed=seed) for seed in range(4))
    sinks = numbers(HQ, seed=9)
    output, known = way.ask(q, k, v, sinks=sinks, return_statistics=True)
    q, k, v, grad, sinks = map(way.convert, (q, k, v, grad, sinks))
    moved = torch.from_numpy if isinstance(known.total, np.ndarray) else np.asarray
    other = RowStatistics(*map(moved, known))
    found, right = (
        regard.attention_gradients(q, k, v, output, one, grad, sinks=sinks, backend=way.backend)
        for one in (other, known)
    )
    for x, y in zip(found, right):
        np.testing.assert_array_equal(x, y)
