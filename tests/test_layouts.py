"""Where numbers lie in memory changes nothing: views of all kinds, and of every dtype."""

import ml_dtypes
import numpy as np
import pytest
import torch

import regard
from plain_formula import to_array
from regard._backends import kernel_ops, torch_ops  # noqa: F401
from regard._call.checks import read_call
from ways import Way, by_ways

B, H, L, D = 2, 3, 37, 8
DTYPES = ["float16", "bfloat16", "float32", "float64"]

# Each takes new memory full of numbers of that size, and gives a view of shape (B, H, L, D).
LAYOUTS = {
    "heads behind lengths": lambda new: new(B, L, H, D).swapaxes(1, 2),
    "fused, of (B, L, 3, H, D)": lambda new: new(B, L, 3, H, D)[:, :, 1].swapaxes(1, 2),
    "fused, of (B, L, H, 3 D)": lambda new: new(B, L, H, 3 * D)[..., D : 2 * D].swapaxes(1, 2),
    "lengths outermost": lambda new: new(L, B, H, D).swapaxes(0, 1).swapaxes(1, 2),
    "numbers before lengths": lambda new: new(B, H, D, L).swapaxes(2, 3),
    "part of longer and wider rows": lambda new: new(B, H, L + 9, D + 5)[:, :, 4:-5, 3:-2],
    "every third row": lambda new: new(B, H, 3 * L, D)[:, :, ::3],
    "every second number": lambda new: new(B, H, L, 2 * D)[..., 1::2],
    "part of a batch and of its heads": lambda new: new(B + 2, H + 2, L, D)[1:-1, 2:],
    "every other head": lambda new: new(B, 2 * H, L, D)[:, ::2],
}
SHARED = {
    "one head for all": ((B, 1, L, D), 1),
    "one batch element for all": ((1, H, L, D), 0),
    "one row for all": ((B, H, 1, D), 2),
}
REVERSED = {
    "rows from the last": np.s_[:, :, ::-1],
    "heads from the last": np.s_[:, ::-1],
    "numbers from the last": np.s_[..., ::-1],
    "all from the last, every second row": np.s_[::-1, ::-1, ::-2, ::-1],
}


def memory(dtype):
    """Makes arrays in turn, each full of other numbers."""
    rng = np.random.default_rng(0)
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return lambda *shape: rng.standard_normal(shape).astype(numpy_dtype)


def tensor(x):
    """The same memory as a tensor, strides and all."""
    if x.dtype.name != "bfloat16":
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def assert_same_bits(x, y):
    np.testing.assert_array_equal(to_array(x).astype(float), to_array(y).astype(float))


def ask(qkv, backend):
    """The output, and much of what can be asked of the weights."""
    out, weights = regard.attention(*qkv, causal=True, return_weights=True, backend=backend)
    picture = weights.pool((5, 4), "mass")
    found = [out, weights[...], weights.lse, weights.received(), weights.distance(), picture]
    return [to_array(x).astype(float) for x in found]


def assert_layout_does_not_matter(view, place, backend):
    """For query, key and value that lie so, all three and one of them."""
    plain = [np.ascontiguousarray(x) for x in view]
    right = ask([place(x) for x in plain], backend)
    for so in ((0, 1, 2), (0,), (1,), (2,)):
        mixed = [place(view[n] if n in so else plain[n]) for n in range(3)]
        for x, y in zip(ask(mixed, backend), right):
            np.testing.assert_array_equal(x, y)


KERNEL_AND_TORCH = Way("numpy", "kernel"), Way("torch", "kernel")


@by_ways(*KERNEL_AND_TORCH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_give_the_bits_of_copies(way, dtype, layout):
    new = memory(dtype)
    view = [LAYOUTS[layout](new) for _ in range(3)]
    assert all(x.shape == (B, H, L, D) and not x.flags.c_contiguous for x in view)
    place = tensor if way.library == "torch" else np.asarray
    assert_layout_does_not_matter(view, place, way.backend)


@by_ways(*KERNEL_AND_TORCH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", SHARED)
def test_expanded_axes_give_the_bits_of_copies(way, dtype, layout):
    shape, axis = SHARED[layout]
    new = memory(dtype)
    view = [np.broadcast_to(new(*shape), (B, H, L, D)) for _ in range(3)]
    assert all(x.strides[axis] == 0 for x in view)

    def place(x):
        if way.library == "numpy":
            return x
        part = np.ascontiguousarray(x.take([0], axis))
        return tensor(part).expand(x.shape) if x.strides[axis] == 0 else tensor(x)

    assert_layout_does_not_matter(view, place, way.backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", REVERSED)
def test_arrays_from_the_last_to_the_first_give_the_bits_of_copies(dtype, layout):
    new = memory(dtype)
    view = [new(B, H, L, D)[REVERSED[layout]] for _ in range(3)]
    assert all(min(x.strides) < 0 for x in view)
    assert_layout_does_not_matter(view, np.asarray, "kernel")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_views_have_the_bits_of_those_of_copies(dtype, layout):
    new = memory(dtype)
    view = [tensor(LAYOUTS[layout](new)) for _ in range(4)]
    plain = [x.contiguous() for x in view]

    def differentiate(q, k, v, upstream):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = regard.attention(*inputs, window=(20, 3), backend="kernel")
        return torch.autograd.grad(out, inputs, upstream)

    right = differentiate(*plain)
    for so in ((0, 1, 2, 3), (0,), (1,), (2,), (3,)):
        mixed = [view[n] if n in so else plain[n] for n in range(4)]
        for x, y in zip(differentiate(*mixed), right):
            assert_same_bits(x, y)


@pytest.mark.parametrize("upstream", ["one number for all", "one row for all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expanded_gradient_of_the_output_is_read(dtype, upstream):
    """That of ``out.sum()`` has no memory of its own."""
    new = memory(dtype)
    inputs = [tensor(new(B, H, L, D)).requires_grad_() for _ in range(3)]
    shape = (1, 1, 1, 1) if upstream == "one number for all" else (B, H, 1, D)
    grad = tensor(new(*shape)).expand(B, H, L, D)
    out = regard.attention(*inputs, causal=True, backend="kernel")
    found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    for x, y in zip(found, torch.autograd.grad(out, inputs, grad.contiguous())):
        assert_same_bits(x, y)


@by_ways(*KERNEL_AND_TORCH)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_masks_and_biases_may_lie_anyhow(way, dtype):
    new = memory(dtype)
    q, k, v = (new(B, H, L, D) for _ in range(3))
    layouts = {
        "keys outermost": lambda new: new(L, L, H, B).transpose(3, 2, 1, 0),
        "part": lambda new: new(B, H + 1, L + 2, L + 3)[:, 1:, 1:-1, 2:-1],
        "every second": lambda new: new(B, 2 * H, 2 * L, 2 * L)[:, ::2, ::2, ::2],
        "one head": lambda new: shared(new(B, 1, L, L)),
        "one query": lambda new: shared(new(B, H, 1, L)),
    }
    for lay in layouts.values():
        bias = lay(new)
        for options in (
            {"bias": bias},
            {"mask": bias > -0.5},
            {"mask": lay(new) > 0, "bias": bias},
        ):
            options = {n: x if n == "bias" else as_laid(x, bias) for n, x in options.items()}
            copies = {n: np.ascontiguousarray(x) for n, x in options.items()}
            found, right = (way.output(q, k, v, **given) for given in (options, copies))
            np.testing.assert_array_equal(found, right)


def shared(x):
    """``(B, H, L, L)`` with one memory along the axes of size 1, which may be written to."""
    strides = np.broadcast_to(x, (B, H, L, L)).strides
    return np.lib.stride_tricks.as_strided(x, (B, H, L, L), strides)


def as_laid(mask, like):
    """A mask that lies in memory as another array does."""
    item = like.itemsize
    raw = np.zeros(
        sum((n - 1) * abs(s) for n, s in zip(like.shape, like.strides)) // item + 1, bool
    )
    strides = [s // item for s in like.strides]
    view = np.lib.stride_tricks.as_strided(raw, like.shape, strides)
    view[...] = mask
    return view


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (3, 0), "return_weights": True}]
)
@pytest.mark.parametrize("lengths", [(9, 9), (1, 200), (300, 300)])
def test_heads_inside_of_tokens_come_back_so_and_are_merged_without_a_copy(lengths, options):
    shapes = [(2, L, h, 8) for h, L in zip((4, 2, 2), (lengths[0], lengths[1], lengths[1]))]
    for library in ("numpy", "torch"):
        inside = [
            np.random.default_rng(n).standard_normal(x).astype("f") for n, x in enumerate(shapes)
        ]
        inside = [torch.from_numpy(x) for x in inside] if library == "torch" else inside
        views = [x.swapaxes(1, 2) for x in inside]
        plain = [x.contiguous() if library == "torch" else x.copy() for x in views]
        for _ in range(2):  # read in full, and by a plan
            found, expected = (regard.attention(*x, **options) for x in (views, plain))
            if "return_weights" in options:
                found, expected = found[0], expected[0]
            np.testing.assert_array_equal(found, expected)
            merged = found.swapaxes(1, 2)
            if library == "torch":
                assert merged.is_contiguous()
                assert expected.is_contiguous()
            else:
                assert merged.flags.c_contiguous
                assert expected.flags.c_contiguous
        alone, one = (regard.attention(*(x[0] for x in arrays)) for arrays in (views, plain))
        np.testing.assert_array_equal(alone, one)
        assert alone.swapaxes(0, 1).reshape(-1).shape == one.reshape(-1).shape


def test_the_graph_knows_the_order_of_the_output():
    def merged(x):
        q, k, v = (part.view(2, 9, 4, 8).transpose(1, 2) for part in x.chunk(3, -1))
        return regard.attention(q, k, v, causal=True).transpose(1, 2).view(2, 9, 32) * 2

    x = torch.randn(2, 9, 96, requires_grad=True)
    expected = merged(x)
    torch._dynamo.reset()
    found = torch.compile(merged, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for out in (expected, found):
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert grad.isfinite().all()
    q = x.detach().view(2, 9, 3, 4, 8)[:, :, 0].transpose(1, 2)
    inputs = torch_ops.pack(read_call(q, q, q))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.regard.kernel_attention.default, inputs, test_utils=tests)
