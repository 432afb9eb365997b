"""A call of known heads and options is computed without being checked anew, and nothing else is."""

import contextlib
import ctypes
import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

import regard
from recordings import numbers
from regard import Edit, _backends
from regard._backends import kernel_calls, kernel_plans
from regard._operator import plans
from strategies import to_torch

OPTIONS = [{}, {"causal": True}, {"scale": 0.3, "softcap": 2.0}]
LAYOUTS = {
    "contiguous": lambda B, H, L, D, seed: numbers(B, H, L, D, seed=seed),
    "(B, L, H, D)": lambda B, H, L, D, seed: numbers(B, L, H, D, seed=seed).swapaxes(1, 2),
    "every other row": lambda B, H, L, D, seed: numbers(B, H, 2 * L, D, seed=seed)[:, :, ::2],
    "columns": lambda B, H, L, D, seed: numbers(B, H, D, L, seed=seed).swapaxes(2, 3),
    "backwards": lambda B, H, L, D, seed: numbers(B, H, L, D, seed=seed)[:, :, ::-1],
    "one row": lambda B, H, L, D, seed: np.broadcast_to(numbers(D, seed=seed), (B, H, L, D)),
}


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """Calls that a plan computed; none is known before."""
    monkeypatch.setattr(plans, "_plans", {})
    seen, output = [], kernel_plans.Plan.output

    def spy(self, *arrays):
        found = output(self, *arrays)
        if found is not None:
            seen.append(tuple(arrays[0].shape))
        return found

    monkeypatch.setattr(kernel_plans.Plan, "output", spy)
    return seen


def drawn(layout, library, dtype="float32"):
    for seed in (0, 5):
        arrays = [LAYOUTS[layout](2, h, n, 8, seed + h + n) for h, n in ((4, 5), (2, 7), (2, 7))]
        if library == "torch":
            arrays = [torch.from_numpy(x if min(x.strides) > 0 else x.copy()) for x in arrays]
            yield [x.to(getattr(torch, dtype)) for x in arrays]
        else:
            yield [x.astype(dtype, order="K") for x in arrays]


NO_PLANS = kernel_calls.kernels is None or kernel_calls.checks


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_second_call_has_the_bits_of_the_first(layout, library, options, planned):
    for dtype in ("float32", "float64", "float16") + ("bfloat16",) * (library == "torch"):
        first, other = drawn(layout, library, dtype)
        expected = [regard.attention(*first, **options)]
        plans._plans.clear()
        expected.append(regard.attention(*other, **options))
        for arrays, right in zip((first, other), expected):
            found = regard.attention(*arrays, **options)
            assert type(found) is type(right)
            assert found.dtype == right.dtype
            np.testing.assert_array_equal(
                *(x if library == "numpy" else x.float() for x in (found, right))
            )
    if layout == "columns":  # its rows are copied
        assert not planned
    elif layout != "one row":
        assert planned


def unaligned(x):
    memory = np.empty(x.nbytes + 1, np.uint8)[1:]
    found = memory.view(x.dtype).reshape(x.shape)
    found[:] = x
    assert not found.flags.aligned
    return found


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


UNUSUAL = {
    "unaligned": unaligned,
    "read-only": read_only,
    "a field of records": lambda x: np.stack([x, x], -1).view("f4,f4")[..., 0]["f0"],
    "with a sign kept apart": lambda x: torch.complex(*map(torch.from_numpy, (x, -x))).conj().imag,
    "a parameter": lambda x: torch.nn.Parameter(torch.from_numpy(x)),
    "expanded": lambda x: torch.from_numpy(x[:1, :1]).expand(x.shape),
    "one column": lambda x: torch.from_numpy(x)[..., :1],
    "from the middle": lambda x: torch.from_numpy(np.stack([x, x, x]))[1],
    "batch inside heads": lambda x: torch.from_numpy(x.swapaxes(0, 1).copy()).transpose(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_arrays_are_computed_as_their_copies(name):
    arrays = [UNUSUAL[name](numbers(2, h, n, 8, seed=n)) for h, n in ((4, 5), (2, 7), (2, 7))]
    copies = [x.detach().resolve_neg().clone() if torch.is_tensor(x) else x.copy() for x in arrays]
    with torch.no_grad():
        expected = regard.attention(*copies)
        for _ in range(3):
            np.testing.assert_array_equal(regard.attention(*arrays), expected)
            np.testing.assert_array_equal(regard.attention(*copies), expected)


ORDERS = {
    "heads outside": lambda *axes: torch.ones(*axes),
    "tokens outside": lambda B, H, L, D: torch.ones(B, L, H, D).transpose(1, 2),
    "a slice": lambda B, H, L, D: torch.ones(B, H, 3 * L, D)[:, :, L : 2 * L],
    "batch inside": lambda B, H, L, D: torch.ones(H, B, L, D).transpose(0, 1),
    "one for all": lambda B, H, L, D: torch.ones(1, 1, L, D).expand(B, H, L, D),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axes", [(2, 4, 5, 8), (2, 4, 1, 8), (1, 4, 5, 8), (2, 1, 5, 8)], ids=str)
def test_a_plan_lays_out_the_output_as_a_first_call_does(axes, order, planned):
    x = ORDERS[order](*axes)
    y = torch.ones(*axes[:3], 6)
    for value in (x, y):
        first, second = (regard.attention(x, x, value) for _ in range(2))
        sizes = [n for n, size in enumerate(first.shape) if size > 1]
        assert [first.stride(n) for n in sizes] == [second.stride(n) for n in sizes]
    assert len(planned) == (0 if NO_PLANS else 2)


class Stand:
    """A tensor of a library without DLPack's table: it is read by its attributes."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


class Newer(Stand):
    """One whose table is of a DLPack that is not known."""

    table = np.array([2 | 7 << 32, 0, 1, 1, 1, 1, 1], np.uint64)
    ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
    __dlpack_c_exchange_api__ = ctypes.pythonapi.PyCapsule_New(
        ctypes.c_void_p(table.ctypes.data), b"dlpack_exchange_api", None
    )


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("stand", [Stand, Newer])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_tensors_without_a_table_are_read_alike(stand, dtype):
    given = kernel_calls.kernels.given
    q, k, v = (torch.from_numpy(numbers(2, h, n, 8)) for h, n in ((4, 5), (2, 7), (2, 7)))
    q, k, v = (x.to(getattr(torch, dtype)).requires_grad_(x is k) for x in (q, k, v))
    for arrays in ((q, k, v), (q[0], k[0], v[0]), (q, k.transpose(0, 1), v)):
        stands = [stand(x) for x in arrays]
        for recording in (False, True):
            read, right = given(*stands, recording), given(*arrays, recording)
            for name in ("kind", "products", "is_like_output", "differentiates"):
                assert getattr(read, name) == getattr(right, name)
            assert right.differentiates == recording
    regard.attention(*(x.detach() for x in (q, k, v)))
    (plan,) = plans._plans.values()
    out = torch.empty_like(q)
    kernel_calls.kernels.forward_of(plan.read, given(*map(stand, (q, k, v)), False), out, 0, 0, 1)
    assert out.equal(regard.attention(*(x.detach() for x in (q, k, v))))
    for x in (q.to("meta"), q.to_sparse(), q.int(), q[0, 0, 0], q.transpose(2, 3)):
        assert given(*map(stand, (x, k, v)), False) is None
        assert given(x, k, v, False) is None


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4)])
def test_the_output_has_the_axes_of_the_query(shape, planned):
    x = numbers(*shape)
    first, second = regard.attention(x, x, x), regard.attention(x, x, x)
    assert first.shape == second.shape == shape
    np.testing.assert_array_equal(first, second)
    assert planned == [shape]
    tall = numbers(*shape[:-1], 3, seed=2)
    assert regard.attention(x, x, tall).shape == regard.attention(x, x, tall).shape == tall.shape


def test_what_was_refused_is_refused_again(planned):
    x = numbers(2, 5, 4)
    for options in ({}, {"causal": True}, {"scale": 1.0}):
        regard.attention(x, x, x, **options)
    t = torch.from_numpy(x)
    regard.attention(t, t, t)
    for error, arrays, options in [
        (TypeError, (x, x, x), {"causal": 1}),
        (TypeError, (x, x, x), {"scale": True}),
        (ValueError, (x, x, x), {"scale": float("nan")}),
        (ValueError, (x, x, x), {"backend": "kernle"}),
        (ValueError, (x, x, x), {"backend": ["auto"]}),
        (TypeError, (x, t, x), {}),
        (TypeError, (x, x.astype(">f4"), x), {}),
        (TypeError, (np.ma.array(x),) * 3, {}),
        (regard.UnsupportedError, (t.to_sparse(), t, t), {}),
        (TypeError, (x, x, None), {}),
    ]:  # fmt: skip
        for _ in range(2):
            with pytest.raises(error):
                regard.attention(*arrays, **options)
    assert not planned


def test_who_watches_sees_the_operator(planned):
    x = torch.from_numpy(numbers(1, 2, 5, 4))
    expected = regard.attention(x, x, x)
    y = x.clone().requires_grad_()
    assert not planned
    with torch.profiler.profile() as profile:
        regard.attention(x, x, x)
    assert any("regard" in event.name for event in profile.events())
    batch = x[None].expand(3, -1, -1, -1, -1)
    mapped = torch.vmap(lambda x: regard.attention(x, x, x))(batch)
    torch.testing.assert_close(mapped[1], expected, rtol=0, atol=0)
    with warnings.catch_warnings(), torch.autograd.forward_ad.dual_level():
        warnings.simplefilter("ignore")  # torch's own, of what it will drop
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises((RuntimeError, NotImplementedError, regard.UnsupportedError)):
            regard.attention(dual, dual, dual, backend="kernel")
    assert not planned
    with torch.no_grad():
        torch.testing.assert_close(regard.attention(y, y, y), expected, rtol=0, atol=0)
    assert planned == [(1, 2, 5, 4)]


def test_backends_and_options_with_arrays_are_chosen_anew(monkeypatch, planned):
    x = numbers(1, 2, 5, 4)
    regard.attention(x, x, x), regard.attention(x, x, x, backend="reference")
    monkeypatch.setattr(_backends, "BACKENDS", _backends.BACKENDS[1:])
    with pytest.raises(ValueError, match="'torch', 'fused', 'triton', 'reference' are known"):
        regard.attention(x, x, x, backend="kernel")
    regard.attention(x, x, x)  # by the reference: the kernels are gone
    monkeypatch.undo()
    regard.attention(x, x, x, backend="reference")
    bias = np.ones((5, 5), np.float32)
    for _ in range(2):
        regard.attention(x, x, x, bias=bias), regard.attention(x, x, x, segments=np.arange(5))
        regard.attention(x, x, x, dropout=0.5, seed=1), regard.attention(x, x, x, sinks=bias[0, :2])
    assert not planned


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_plan_serves_every_length_and_layout(library, options, planned):
    lengths = [(1, 1), (1, 2), (1, 700), (3, 5), (40, 40), (300, 700), (5, 3), (1, 5000)]
    calls = []
    for n, (Lq, Lk) in enumerate(lengths):
        layout = list(LAYOUTS.values())[n % 3]
        arrays = [layout(2, h, L, 8, n + h) for h, L in ((4, Lq), (2, Lk), (2, Lk))]
        calls.append([torch.from_numpy(x) for x in arrays] if library == "torch" else arrays)
    regard.attention(*calls[0], **options)
    for (Lq, _), arrays in zip(lengths, calls):
        found = regard.attention(*arrays, **options)
        assert planned.pop() == (2, 4, Lq, 8)
        assert not planned
        plans._plans.clear()
        expected = regard.attention(*arrays, **options)
        assert type(found) is type(expected)
        np.testing.assert_array_equal(found, expected)
    wrong = [calls[2][0], calls[2][1], calls[3][2]]
    with pytest.raises(regard.ShapeError, match="700 keys and 5 values"):
        regard.attention(*wrong, **options)


def test_empty_calls_and_those_of_many_axes_have_no_plan_and_plans_are_few(planned):
    for shape in ((1, 2, 0, 4), (0, 2, 3, 4), (1, 2, 3, 5, 4)):
        x = numbers(*shape)
        for _ in range(3):
            regard.attention(x, x, x)
    assert not planned
    for n in range(1, plans.MOST + 50):
        x = numbers(2, n)
        regard.attention(x, x, x)
        assert len(plans._plans) <= plans.MOST
    regard.attention(x, x, x)
    assert planned == [(2, n)]


def moving(n, Lq, Lk):
    """Options that are arrays, for calls of two batch elements and four heads."""
    rng = np.random.default_rng(n)
    first = rng.integers(-3, Lk, (2, Lq))
    ids = np.sort(rng.integers(0, 4, (2, Lq))), np.sort(rng.integers(0, 4, (1, Lk)))
    return {
        "mask": {"mask": rng.random((2, 1, Lq, Lk)) < 0.7},
        "mask of keys": {"mask": rng.random((1, 4, 1, Lk)) < 0.7, "causal": True},
        "intervals": {"intervals": (first, first[:1] + rng.integers(0, 9, (1, Lq)))},
        "segments": {"segments": ids, "causal": True},
        "scattered segments": {"segments": (ids[0][:1], rng.integers(0, 4, (2, Lk)))},
        "lengths": {"key_lengths": rng.integers(0, Lk + 1, 2), "causal": True},
        "one length": {"key_lengths": int(rng.integers(0, Lk + 1))},
        "places": {"query_start": rng.integers(-3, Lk, 2), "window": (5, None)},
        "one place": {"query_start": int(rng.integers(-3, Lk)), "causal": True},
        "edits": {"edits": [Edit(-1, slice(0, Lq // 2 + 1), slice(Lk // 2), n % 2), Edit(keys=-1)]},
        "all": {
            "edits": [Edit(slice(n % 3), None, slice(n, None), 2.0)],
            "mask": rng.random((2, 4, Lq, Lk)) < 0.9,
            "intervals": (first, first + 30),
            "segments": ids,
            "key_lengths": rng.integers(Lk // 2, Lk + 1, 1),
            "query_start": rng.integers(0, Lk, 1),
            "window": (40, 3),
        },
    }


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", moving(0, 3, 4))
def test_a_plan_takes_other_arrays_of_the_same_options(name, library, planned):
    for n, (Lq, Lk) in enumerate([(3, 40), (1, 300), (70, 70), (1, 7), (140, 300)]):
        arrays = [numbers(2, h, L, 8, seed=n + h) for h, L in ((4, Lq), (2, Lk), (2, Lk))]
        options = moving(n, Lq, Lk)[name]
        if library == "torch":
            arrays, options = [torch.from_numpy(x) for x in arrays], to_torch(options)
        found = regard.attention(*arrays, **options)
        assert planned == ([] if n == 0 else [(2, 4, Lq, 8)])
        planned.clear()
        expected, _ = regard.attention(*arrays, **options, return_weights=True)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_packed_documents_of_one_array_have_a_plan(library, planned):
    q, k, v = numbers(2, 4, 9, 8), *(numbers(2, 2, 9, 8, seed=n) for n in (1, 2))
    for n in (1, 2, 3):
        ids = np.arange(9)[None] // n
        x = q, k, v, ids
        *arrays, ids = map(torch.from_numpy, x) if library == "torch" else x
        found = regard.attention(*arrays, segments=ids)
        expected, _ = regard.attention(*arrays, segments=(ids, ids), return_weights=True)
        np.testing.assert_array_equal(found, expected)
    assert planned == [(2, 4, 9, 8)] * 2


def test_arrays_that_a_plan_cannot_read_are_read_in_full(planned):
    q, k = numbers(2, 4, 3, 8), numbers(2, 2, 40, 8)
    first = np.zeros((2, 3), np.int64)
    good = {
        "mask": np.ones((2, 1, 3, 40), bool),
        "intervals": (first, first + 20),
        "segments": (first, np.zeros((1, 40), np.int64)),
        "key_lengths": np.array([30, 40]),
        "query_start": np.array([0, 9]),
    }
    for name, x in good.items():
        regard.attention(q, k, k, **{name: x})
    same = {
        "mask": good["mask"][0, 0],
        "intervals": (first[0], (first + 20).astype(np.int32)),
        "segments": (first.astype(np.int32), np.zeros((1, 40), np.int64)),
        "key_lengths": np.array([30, 40], np.int32),
        "query_start": [0, 9],
    }
    for name, x in same.items():
        found = regard.attention(q, k, k, **{name: x})
        assert not planned
        np.testing.assert_array_equal(found, regard.attention(q, k, k, **{name: good[name]}))
        planned.clear()
    for error, message, options in [
        (TypeError, "mask is float32; a mask is bool", {"mask": np.ones((2, 1, 3, 40), "f")}),
        (regard.ShapeError, "cannot be broadcast", {"mask": np.ones((2, 1, 3, 41), bool)}),
        (regard.ShapeError, "from 30 to 41; each must", {"key_lengths": np.array([30, 41])}),
        (regard.ShapeError, "from -1 to -1; each must", {"key_lengths": -1}),
        (ValueError, "between -2..53 and 2..53", {"query_start": np.array([0, 2**54])}),
        (regard.ShapeError, "intervals has shape", {"intervals": (first[:, :2], first)}),
        (TypeError, "a pair is needed", {"intervals": first}),
        (regard.ShapeError, "segments is one array", {"segments": first}),
        (regard.ShapeError, "segments has shape", {"segments": (first, first)}),
        (ValueError, "must not be negative", {"window": (-1, 0)}),
        (regard.ShapeError, "keys is 40; there are 40", {"edits": [Edit(keys=40)]}),
        (TypeError, "edits is of type Edit; a list", {"edits": Edit(keys=1)}),
    ]:
        with pytest.raises(error, match=message):
            regard.attention(q, k, k, **options)
    assert not planned


@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_tensors_that_are_negated_by_a_flag(backend):
    D, options = 4, {"backend": backend, "scale": 0.7}
    x = [torch.from_numpy(numbers(1, 2, 5, D, seed=n)) for n in range(3)]
    regard.attention(*x, **options)
    flagged = [torch._neg_view(y) for y in x]
    right = regard.attention(*(-y for y in x), **options)
    torch.testing.assert_close(regard.attention(*flagged, **options), right, rtol=0, atol=0)
    bias = torch.from_numpy(numbers(5, 5))
    right = regard.attention(*x, bias=-bias, **options)
    found = regard.attention(*x, bias=torch._neg_view(bias), **options)
    torch.testing.assert_close(found, right, rtol=0, atol=0)
    thin = torch.randn(1, 1, 5, 1, dtype=torch.complex64).conj().imag
    right = regard.attention(thin.clone(), thin.clone(), thin.clone(), **options)
    torch.testing.assert_close(regard.attention(thin, thin, thin, **options), right)
    y = [torch._neg_view(y).requires_grad_() for y in x]
    z = [(-y).requires_grad_() for y in x]
    grad = torch.from_numpy(numbers(1, 2, 5, D, seed=9))
    found = torch.autograd.grad(regard.attention(*y, **options), y, torch._neg_view(grad))
    right = torch.autograd.grad(regard.attention(*z, **options), z, -grad)
    for a, b in zip(found, right):
        torch.testing.assert_close(a, b)
    weights = [regard.AttentionWeights(*w[:2], backend=backend) for w in (flagged, [-y for y in x])]
    torch.testing.assert_close(weights[0][0, 1], weights[1][0, 1])
    torch.testing.assert_close(weights[0].entropy(), weights[1].entropy())


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("options", [*OPTIONS, {"window": (3, 0), "causal": True}], ids=str)
@pytest.mark.parametrize("layout", ["(B, L, H, D)", "columns"])
def test_a_plan_gives_the_gradients_too(layout, options, planned):
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for needed in ((True,) * 3, (True, False, False), (False, True, True)):
            first, _ = drawn(layout, "torch", dtype)
            found = []
            for _ in range(2):
                arrays = [x.detach().requires_grad_(need) for x, need in zip(first, needed)]
                out = regard.attention(*arrays, **options)
                out.backward(torch.ones_like(out) * out.detach())
                found.append([out.detach(), *(x.grad for x in arrays)])
            for x, y in zip(*found):
                assert (x is None) == (y is None)
                np.testing.assert_array_equal(*(0 if z is None else as_numpy(z) for z in (x, y)))
    assert bool(planned) == (layout != "columns")  # whose rows are copied


GRADIENTS = {
    "dense": lambda x: x,
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "one row": lambda x: x[:, :, :1].expand(x.shape),
    "tokens outside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda x: x.mT.contiguous().mT,
    "with a sign kept apart": torch._neg_view,
    "not finite": lambda x: x.where(x < 1, x.new_tensor(float("inf"))),
    "a not finite column": lambda x: x.where(x[..., :1] < 9, x.new_tensor(float("nan"))),
}


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [0.5, 0.0])
def test_a_plan_takes_every_gradient_of_the_output(scale, dtype, kind, planned):
    for arrays in drawn("contiguous", "torch", dtype):
        grad = GRADIENTS[kind](arrays[0] + 0.25)
        plans._plans.clear()
        found = []
        for _ in range(2):
            inputs = [x.detach().requires_grad_() for x in arrays]
            out = regard.attention(*inputs, causal=True, scale=scale)
            found.append(torch.autograd.grad(out, inputs, grad))
        for x, y in zip(*found):
            np.testing.assert_array_equal(as_numpy(x), as_numpy(y))
    assert planned


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("batches", [(3, 1), (1, 3), (1, 1)])
def test_keys_and_values_that_a_batch_shares_have_their_gradients(batches, planned):
    q = torch.from_numpy(numbers(3, 4, 33, 8))
    k, v = (torch.from_numpy(numbers(B, 2, 40, 8, seed=B)) for B in batches)
    found = []
    for _ in range(3):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        found.append(torch.autograd.grad(regard.attention(*inputs), inputs, q))
    assert planned
    for first, *others in zip(*found):
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
def test_tensors_that_were_saved_elsewhere_come_back(planned):
    arrays = [numbers(1, 2, 5, 4, seed=seed) for seed in range(3)]
    inputs = [torch.from_numpy(x).requires_grad_() for x in arrays]
    grad = torch.ones(1, 2, 5, 4)
    expected = torch.autograd.grad(regard.attention(*inputs), inputs, grad)
    assert not planned

    def pack(x):
        return x.detach().contiguous().numpy().tobytes(), x.shape, x.dtype

    def unpack(kept):
        data, shape, dtype = kept
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = regard.attention(*inputs)
    assert planned
    for x, y in zip(torch.autograd.grad(out, inputs, grad), expected):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_number_is_looked_at(dtype):
    shape = 2, 3, 40, 24
    for layout in LAYOUTS.values():
        whole = layout(*shape, 1)
        base = torch.from_numpy(whole if min(whole.strides) > 0 else whole.copy())
        x = base.to(getattr(torch, dtype)).detach()
        assert kernel_calls.are_finite(x, None, x.abs() * 1e4)
        for value in ("inf", "-inf", "nan"):
            for place in ((0, 0, 0, 0), (1, 2, 39, 23), (0, 1, 17, 5), (1, 0, 20, 16)):
                y = x.clone()
                y[place] = float(value)
                assert not kernel_calls.are_finite(x, y)
                if dtype in ("float32", "float64", "float16"):
                    assert not kernel_calls.are_finite(y.numpy())
    big = torch.zeros(1, 2, 3000, 100)
    big[0, 1, 2999, 99] = float("nan")
    assert not kernel_calls.are_finite(big)
    assert kernel_calls.are_finite(big[:, :1], torch.full(shape, 3e38), big[:, :, :0])


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("first", ["unknown", "watched", "planned"])
@pytest.mark.parametrize("return_weights", [False, True])
def test_a_checkpoint_computes_again_by_a_plan_or_without(return_weights, first, planned):
    """It compares number and shapes of what is saved, as torch's hooks may keep it elsewhere."""

    def attend(*inputs):
        found = regard.attention(*inputs, causal=True, return_weights=return_weights)
        return found[0] if return_weights else found

    made = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, 2, 9, 4, generator=made, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(attend(*inputs).sin().sum(), inputs)
    if first == "unknown":
        plans._plans.clear()
    with BaseTorchFunctionMode() if first == "watched" else contextlib.nullcontext():
        out = checkpoint(attend, *inputs, use_reentrant=False)
    if first == "planned":
        plans._plans.clear()
    for x, y in zip(torch.autograd.grad(out.sin().sum(), inputs), expected):
        assert torch.equal(x, y)
    assert planned


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("which", ["query", "key", "value", "gradient"])
def test_the_gradients_of_a_plan_are_right_wherever_one_number_is_not_finite(which, dtype, planned):
    arrays = [torch.from_numpy(numbers(2, H, 600, 20, seed=H)) for H in (4, 2, 2, 4)]
    arrays = [x.to(getattr(torch, dtype)) for x in arrays]
    index = ["query", "key", "value", "gradient"].index(which)
    heads = arrays[index].shape[1]
    for place in [(0, 0, 0, 0), (1, heads - 1, 599, 19), (0, 1, 300, 17), (1, 0, 597, 3)]:
        given = [x.clone() for x in arrays]
        given[index][place] = float("nan" if place[2] == 300 else "inf")
        found = []
        plans._plans.clear()
        for _ in range(2):
            inputs = [x.requires_grad_() for x in given[:3]]
            out = regard.attention(*inputs, window=(2, 1))
            found.append(torch.autograd.grad(out, inputs, given[3]))
        for x, y in zip(*found):
            assert x.isfinite().any()
            np.testing.assert_array_equal(as_numpy(x), as_numpy(y))
    assert planned


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
def test_the_gradients_of_a_plan_are_differentiable_and_watched(planned):
    q, k, v = to_torch({n: numbers(1, 2, 5, 4, seed=i) for i, n in enumerate("qkv")}).values()
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    regard.attention(*inputs, causal=True)
    assert torch.autograd.gradcheck(lambda *x: regard.attention(*x, causal=True), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: regard.attention(*x, causal=True), inputs)
    planned.clear()
    out, weights = regard.attention(*inputs, causal=True, return_weights=True)
    assert planned
    both = out.sum() + weights.entropy().sum()
    found = torch.autograd.grad(both, inputs, retain_graph=True)
    right = regard.AttentionWeights(*inputs[:2], causal=True)
    expected = (right @ inputs[2]).sum() + right.entropy().sum()
    for x, y in zip(found, torch.autograd.grad(expected, inputs)):
        torch.testing.assert_close(x, y)
    grads = torch.eye(out.numel(), dtype=out.dtype)[:3].reshape(3, *out.shape)
    batched = torch.autograd.grad(out, inputs, grads, retain_graph=True, is_grads_batched=True)
    for n, one in enumerate(grads):
        for x, y in zip(batched, torch.autograd.grad(out, inputs, one, retain_graph=True)):
            torch.testing.assert_close(x[n], y)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(out, inputs, grads[0], retain_graph=True)
    assert any("kernel_attention_backward" in event.name for event in profile.events())
    with torch.no_grad():
        inputs[0][0, 0, 0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, inputs, grads[0])
    value = inputs[2].detach().clone()
    value[0, 0, 4] = np.inf  # which the last query alone sees
    value.requires_grad_()
    out = regard.attention(q.double(), k.double(), value, causal=True)
    (found,) = torch.autograd.grad(out[:, :, :4].sum(), value)
    assert found.isfinite().all()


def as_numpy(x):
    return x.float().numpy() if isinstance(x, torch.Tensor) else x


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
@pytest.mark.parametrize("options", [*OPTIONS, {"window": (3, 0), "causal": True}], ids=str)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_plan_gives_the_weights_too(library, options, planned):
    for dtype in ("float32", "float64", "float16") + ("bfloat16",) * (library == "torch"):
        first, other = drawn("(B, L, H, D)", library, dtype)
        regard.attention(*first, **options, return_weights=True)
        planned.clear()
        for q, k, v in (first, other, [x[:, :, -3:] for x in other]):
            out, weights = regard.attention(q, k, v, **options, return_weights=True)
            assert planned.pop() == tuple(q.shape)
            right = regard.AttentionWeights(q, k, **options)
            for found, x in (
                (out, regard.attention(q, k, v, **options, return_statistics=True)[0]),
                (weights[...], right[...]),
                (weights.lse, right.lse),
                (weights.max_score, right.max_score),
            ):
                assert (type(found), found.dtype) == (type(x), x.dtype)
                np.testing.assert_array_equal(as_numpy(found), as_numpy(x))


def test_the_weights_of_a_plan_see_writes_and_gradients(planned):
    q, k, v = to_torch({n: numbers(1, 2, 5, 4, seed=i) for i, n in enumerate("qkv")}).values()
    regard.attention(q, k, v, causal=True)
    _, weights = regard.attention(q, k, v, causal=True, return_weights=True)
    q[0, 0, 0] = 1
    with pytest.raises(RuntimeError, match="query was written to"):
        weights.entropy()
    q.requires_grad_()
    with torch.no_grad():
        _, weights = regard.attention(q, k, v, causal=True, return_weights=True)
    (found,) = torch.autograd.grad(weights.entropy().sum(), q)
    right = regard.AttentionWeights(q, k, causal=True).entropy().sum()
    torch.testing.assert_close(found, torch.autograd.grad(right, q)[0])
    assert len(planned) == (0 if NO_PLANS else 2)


@pytest.mark.skipif(NO_PLANS, reason="there are no plans")
def test_plans_hold_no_array_and_others_than_four_axes_have_weights_too(planned):
    x = numbers(2, 3, 5, 4)
    held = weakref.ref(x)
    regard.attention(x, x, x, causal=True, return_weights=True)
    gc.collect()
    del x
    gc.collect()
    assert held() is None
    for shape in ((5, 4), (3, 5, 4)):
        x = numbers(*shape)
        for _ in range(2):
            _, weights = regard.attention(x, x, x, causal=True, return_weights=True)
            assert weights.shape == (*shape[:-2], 5, 5)
            np.testing.assert_allclose(weights[...].sum(-1), 1, rtol=1e-6)
    x = numbers(2, 3, 5, 4)
    for mask in (numbers(2, 1, 5, 5) > 0, numbers(2, 3, 5, 5) > 0):
        _, weights = regard.attention(x, x, x, mask=mask, return_weights=True)
        assert not np.where(mask, 0, weights[...]).any()
    assert not planned


def test_weights_are_those_of_a_call_that_had_a_plan():
    q, k, v = to_torch({n: numbers(2, 5, 4, seed=i) for i, n in enumerate("qkv")}).values()
    regard.attention(q, k, v), regard.attention(q, k, v)
    out, weights = regard.attention(q, k, v, return_weights=True)
    torch.testing.assert_close(weights[...] @ v, out)
