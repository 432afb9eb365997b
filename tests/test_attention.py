import functools
import importlib
import os
import subprocess
import sys
import types
import typing

import beartype
import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from bounds import PRECISIONS, assert_bounded, output_bounds
from definition import assert_near, define
from strategies import calls, to_dtype, to_torch

DTYPES = ["float16", "bfloat16", "float32", "float64"]
rng = np.random.default_rng(0)


def random(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def check(actual, q, k, v, options):
    exact = define(q, k, v, **options, dtype=np.longdouble)[0].astype(float)
    scale = options.get("scale", 1 / np.sqrt(q.shape[-1]))
    largest = abs(scale) * (
        np.sqrt((q.astype(float) ** 2).sum(-1)).max(initial=0)
        * np.sqrt((k.astype(float) ** 2).sum(-1)).max(initial=0)
    ) + np.abs(options.get("bias", np.zeros(1))).max(initial=0)
    assert_near(actual, exact, largest, np.abs(v.astype(float)).max(initial=0))


@settings(max_examples=150, deadline=None)
@given(calls(), st.sampled_from(DTYPES))
def test_numpy_matches_the_definition_with_all_options_together(call, dtype):
    arrays, options = call
    q, k, v = (to_dtype(x, dtype) for x in arrays)
    actual = regard.attention(q, k, v, **options)
    assert actual.dtype == q.dtype
    check(actual, q, k, v, options)


@settings(max_examples=150, deadline=None)
@given(calls(), st.sampled_from(DTYPES), st.sampled_from(["kernel", "torch", "reference", "auto"]))
def test_torch_matches_the_definition_with_all_options_together(call, dtype, backend):
    arrays, options = call
    if backend == "kernel":
        dtype = "float32"
        options = {n: x.astype("f") if n in ("bias", "sinks") else x for n, x in options.items()}
    tensors = [torch.from_numpy(x.copy()).to(getattr(torch, dtype)) for x in arrays]
    actual = regard.attention(*tensors, **to_torch(options), backend=backend)
    assert actual.dtype == tensors[0].dtype
    check(actual, *(x.double().numpy() for x in tensors), options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_output_of_the_kernel_is_rounded_to_the_nearest(dtype):
    """The mean of two values is exact in float32; what rounds it is the output's own dtype."""
    v = torch.randn(1, 50, 2, 37).to(dtype)
    v[..., 1] *= 1e-3
    v[..., 2] = torch.tensor([1.0, 1.0 + torch.finfo(dtype).eps]).to(dtype)  # half way: to even
    v[..., 3], v[..., 4] = torch.inf, torch.tensor([torch.inf, -torch.inf])
    v[..., 5] = torch.finfo(dtype).max / 4
    nothing = torch.zeros(1, 50, 2, 8, dtype=dtype)
    out = regard.attention(nothing, nothing, v, backend="kernel")
    mean = (0.5 * v.float()[:, :, :1] + 0.5 * v.float()[:, :, 1:]).to(dtype)
    torch.testing.assert_close(out, mean.expand_as(out), rtol=0, atol=0, equal_nan=True)


@functools.cache
def attended(lengths, causal):
    """``(inputs, bounds)`` of a call, which are the same for every backend."""
    Lq, Lk = lengths
    inputs = [random(2, 2, Lq, 24), random(2, 1, Lk, 24), random(2, 1, Lk, 24)]
    visible = np.tri(Lq, Lk, Lk - Lq, bool) if causal else True
    return inputs, output_bounds(*inputs, PRECISIONS["float32"], visible)


AWKWARD = [(97, 97), (1, 1025), (1025, 1025), (97, 1025), (1025, 97)]


def before_forks():
    """Computes what every instruction set is measured by, in the process that forks them."""
    for lengths in AWKWARD:
        for causal in (False, True):
            attended(lengths, causal)


@pytest.mark.xdist_group("awkward lengths")
@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", AWKWARD)
def test_awkward_lengths_match_the_definition(backend, causal, lengths):
    inputs, bounds = attended(lengths, causal)
    tensors = (torch.from_numpy(x) for x in inputs)
    actual = regard.attention(*tensors, causal=causal, backend=backend)
    assert_bounded(actual.numpy(), bounds)


def test_causal_mask_aligns_to_the_last_key():
    seen = regard.AttentionWeights(np.zeros((2, 1)), np.zeros((4, 1)), causal=True)[...] > 0
    assert seen.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_the_default_place_of_the_queries_counts_from_the_valid_keys():
    q, k, v = random(2, 1, 2, 4), random(2, 1, 6, 4), random(2, 1, 6, 3)
    padded = regard.attention(q, k, v, causal=True, key_lengths=[4, 6])
    alone = regard.attention(q[:1], k[:1, :, :4], v[:1, :, :4], causal=True)
    np.testing.assert_array_equal(padded[:1], alone)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_documents_are_as_if_computed_alone(dtype):
    q, k, v = (random(2, 10, 4).astype(dtype) for _ in range(3))
    packed = regard.attention(q, k, v, causal=True, segments=[7] * 4 + [3] * 6)
    first = regard.attention(q[:, :4], k[:, :4], v[:, :4], causal=True)
    second = regard.attention(q[:, 4:], k[:, 4:], v[:, 4:], causal=True)
    alone = np.concatenate([first, second], 1)
    rounding = (
        np.finfo(dtype).eps * abs(v).max()
    )  # the keys of a row may be summed in another order
    np.testing.assert_allclose(packed, alone, rtol=0, atol=4 * rounding)


@pytest.mark.parametrize("leading", [(), (2,), (3, 2), (2, 1, 3)])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_any_leading_axes_give_what_each_gives_alone(leading, convert):
    q, k, v = random(*leading, 4, 5, 8), random(*leading, 2, 6, 8), random(*leading, 2, 6, 3)
    lengths = rng.integers(0, 7, leading)
    out = np.asarray(
        regard.attention(
            *map(convert, (q, k, v)), key_lengths=convert(lengths) if leading else int(lengths)
        )
    )
    assert out.shape == (*leading, 4, 5, 3)
    for at in np.ndindex(leading):
        alone = regard.attention(q[at], k[at], v[at], key_lengths=int(lengths[at]))
        np.testing.assert_allclose(out[at], alone, rtol=1e-5, atol=1e-6)


def test_lengths_and_widths_without_heads():
    q, k, v = random(5, 8), random(7, 8), random(7, 3)
    out, weights = regard.attention(q, k, v, return_weights=True)
    assert out.shape == (5, 3)
    assert weights.shape == (5, 7)
    np.testing.assert_allclose(
        out, regard.attention(q[None], k[None], v[None])[0], rtol=1e-5, atol=1e-6
    )


def test_leading_axes_of_size_one_in_key_and_value_broadcast():
    q, k, v = random(3, 2, 4, 5, 8), random(1, 2, 4, 6, 8), random(3, 1, 4, 6, 8)
    full = (np.broadcast_to(x, (3, 2, *x.shape[2:])) for x in (k, v))
    np.testing.assert_array_equal(regard.attention(q, k, v), regard.attention(q, *full))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_empty_axes_give_empty_or_zero_outputs(shape, convert):
    x = convert(np.ones(shape, np.float32))
    out, weights = regard.attention(x, x, x, causal=True, return_weights=True)
    assert tuple(out.shape) == shape
    assert np.asarray(weights).shape == (*shape[:3], shape[2])
    assert weights.summary(topk=0).entropy.shape == shape[:3]


@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
def test_the_seed_decides_the_dropout_in_every_backend_alike(backend):
    q, k, v = (torch.randn(2, 4, 20, 8) for _ in range(3))
    first = regard.attention(q, k, v, dropout=0.4, seed=3, backend="torch")
    again = regard.attention(q, k, v, dropout=0.4, seed=3, backend=backend)
    torch.testing.assert_close(first, again)
    other = regard.attention(q, k, v, dropout=0.4, seed=4, backend=backend)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
def test_a_row_of_nan_is_nan_where_dropout_leaves_it_no_weight(backend):
    q, k, v = torch.ones(1, 2, 12, 4), torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 3)
    options = {"dropout": 0.5, "seed": 3, "backend": backend}
    assert (regard.attention(q, k, v, **options) == 0).any()
    assert regard.attention(q, k * torch.nan, v, **options).isnan().all()
    steps = regard.steps(q, k * torch.nan, v, dropout=0.5, seed=3)
    assert steps.dropped.isnan().all()


def test_dropout_drops_the_asked_share_and_keeps_the_mean():
    ones, flat = np.ones((1, 400, 1)), np.zeros((1, 400, 1))
    weights_sum = regard.attention(flat, flat, ones, dropout=0.3, seed=0)[0, :, 0]
    kept = weights_sum * 0.7  # the share of the 400 equal weights that each query keeps
    assert abs(kept.mean() - 0.7) < 4 * np.sqrt(0.21 / 400**2)
    assert kept.std() == pytest.approx(np.sqrt(0.21 / 400), rel=0.15)


def test_dropout_without_a_seed_follows_torchs_generator():
    q = torch.randn(1, 10, 4)
    torch.manual_seed(0)
    first = regard.attention(q, q, q, dropout=0.5)
    second = regard.attention(q, q, q, dropout=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, regard.attention(q, q, q, dropout=0.5))
    assert not torch.equal(first, second)


def test_dropout_without_a_seed_is_fresh_for_arrays():
    q = random(1, 10, 4)
    assert not np.array_equal(
        regard.attention(q, q, q, dropout=0.5), regard.attention(q, q, q, dropout=0.5)
    )


class TestScaledDotProductAttention:
    """It has torch's signature and meaning to the letter."""

    CASES = (
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3), {"is_causal": True}),
        ((2, 4, 7, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}),
        ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True, "scale": 0.3}),
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
        ((4, 5, 8), (4, 7, 8), (4, 7, 8), {}),
        ((5, 8), (7, 8), (7, 8), {"is_causal": True}),
        ((1, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 8), {}),
        ((2, 3, 4, 5, 8), (3, 4, 7, 8), (2, 1, 4, 7, 8), {}),
    )

    @pytest.mark.parametrize("case", CASES, ids=str)
    @pytest.mark.parametrize("mask", [None, "bool", "float"])
    def test_equals_torch(self, case, mask):
        *shapes, options = case
        q, k, v = (torch.randn(shape) for shape in shapes)
        if mask is not None and options.get("is_causal"):
            return self._refuses_both(q, k, v)
        if mask is not None:
            allowed = torch.rand(5, 7) < 0.7
            allowed[1] = False
            options = dict(options, attn_mask=allowed if mask == "bool" else torch.randn(5, 7))
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        ours = regard.scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(ours, theirs)
        options = {n: x.numpy() if torch.is_tensor(x) else x for n, x in options.items()}
        arrays = regard.scaled_dot_product_attention(q.numpy(), k.numpy(), v.numpy(), **options)
        np.testing.assert_allclose(arrays, theirs, rtol=1e-5, atol=1e-6)
        return None

    def _refuses_both(self, q, k, v):
        with pytest.raises(RuntimeError, match="attn_mask and is_causal=True were both given"):
            regard.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.ones(1, 1, dtype=torch.bool), is_causal=True
            )

    def test_dropout_is_applied(self):
        q = torch.randn(2, 4, 9, 8)
        plain = regard.scaled_dot_product_attention(q, q, q)
        assert not torch.allclose(plain, regard.scaled_dot_product_attention(q, q, q, None, 0.5))

    def test_key_and_value_heads_may_differ_where_both_divide(self):
        q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 4, 7, 8)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(
            regard.scaled_dot_product_attention(q, k, v, enable_gqa=True), theirs
        )

    def test_dropout_of_one_drops_everything(self):
        q = torch.randn(2, 4, 9, 8)
        assert (regard.scaled_dot_product_attention(q, q, q, dropout_p=1.0) == 0).all()

    def test_a_number_may_be_a_tensor_without_axes(self):
        q = torch.randn(2, 4, 9, 8)
        options = {"dropout_p": torch.tensor(0.0), "scale": 1 / torch.sqrt(torch.tensor(3.0))}
        theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, **options)
        with regard.patch_torch() as patched, regard.record():
            ours = torch.nn.functional.scaled_dot_product_attention(q, q, q, **options)
        assert patched.replaced == {"": 1}
        torch.testing.assert_close(ours, theirs)
        for x in (torch.ones(1), torch.tensor(1.0, requires_grad=True)):
            with pytest.raises(TypeError, match="scale is a Tensor; a number is needed"):
                regard.scaled_dot_product_attention(q, q, q, scale=x)

    def test_autocast_leaves_float64_alone(self):
        q = torch.randn(2, 4, 9, 8, dtype=torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            assert regard.scaled_dot_product_attention(q, q, q).dtype == torch.float64

    def test_autocast_lowers_the_dtype_as_for_torch(self):
        q, mask = torch.randn(2, 4, 9, 8), torch.randn(9, 9).bfloat16().float()
        with torch.autocast("cpu", torch.bfloat16):
            theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
            ours = regard.scaled_dot_product_attention(q, q, q, mask)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-6)

    CAUSAL = ((4, 9), (9, 4), (5, 5), (1, 7))

    @pytest.mark.parametrize("sizes", CAUSAL, ids=str)
    @pytest.mark.parametrize("name", ["causal_upper_left", "causal_lower_right"])
    # A query that sees nothing gives zeros here, and in torch since 2.5.
    @pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
    def test_causal_biases_of_torch_hide_what_their_names_say(self, name, sizes):
        mask = getattr(importlib.import_module("torch.nn.attention.bias"), name)(*sizes)
        q, (k, v) = torch.randn(2, 3, sizes[0], 8), torch.randn(2, 2, 3, sizes[1], 8)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        ours = regard.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(ours, theirs)
        assert type(ours) is torch.Tensor
        with regard.patch_torch():
            patched = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        assert torch.equal(patched, ours)

    def test_a_causal_bias_of_other_lengths_is_read_as_by_torch(self):
        from torch.nn.attention.bias import causal_lower_right, causal_upper_left

        q, k = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
        for mask in (causal_upper_left(64, 32), causal_lower_right(64, 64)):
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
            ours = regard.scaled_dot_product_attention(q, k, k, mask)
            torch.testing.assert_close(ours, theirs)
        with pytest.raises(
            regard.ShapeError, match=r"is causal_lower_right\(4, 7\), and there are 5"
        ):
            regard.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 7))
        with pytest.raises(TypeError, match="computed from a CausalBias"):
            regard.scaled_dot_product_attention(q, k, k, causal_lower_right(5, 7)[None])

    def test_a_causal_bias_is_compiled_and_exported(self):
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(4, 9)
        q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 9, 8)

        class Model(torch.nn.Module):
            def forward(self, q, k):
                return regard.scaled_dot_product_attention(q, k, k, mask)

        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
        torch._dynamo.reset()
        compiled = torch.compile(Model(), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q, k), theirs)
        exported = torch.export.export(Model(), (q, k), strict=False)
        torch.testing.assert_close(exported.module()(q, k), theirs)

    def test_leading_axes_that_do_not_broadcast_are_told(self):
        q, k = torch.randn(4, 5, 8), torch.randn(2, 5, 8)
        with pytest.raises(regard.ShapeError, match="Heads that share keys need enable_gqa=True"):
            regard.scaled_dot_product_attention(q, k, k)

    def test_axes_that_differ_are_told_with_grouped_heads_too(self):
        q, k = torch.randn(4, 5, 8), torch.randn(5, 8)
        with pytest.raises(regard.ShapeError, match="query has 3 axes and key has 2; they must"):
            regard.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
    def test_lists_are_told_whatever_the_options(self, options):
        q, k = torch.randn(5, 8), [[1.0] * 8]
        with pytest.raises(TypeError, match=r"query is a builtins\.list; NumPy arrays"):
            regard.scaled_dot_product_attention(k, k, k, **options)
        with pytest.raises(TypeError, match=r"key is a builtins\.list; NumPy arrays"):
            regard.scaled_dot_product_attention(q, k, k, **options)

    @pytest.mark.parametrize("x", ["yes", 1, None], ids=str)
    @pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
    def test_flags_are_bools_as_in_torch(self, name, x):
        q = random(1, 5, 8)
        said = f"^scaled_dot_product_attention: {name} is {x!r}; True or False"
        with pytest.raises(TypeError, match=said):
            regard.scaled_dot_product_attention(q, q, q, **{name: x})
        on = regard.scaled_dot_product_attention(q, q, q, **{name: np.True_})
        np.testing.assert_array_equal(
            on, regard.scaled_dot_product_attention(q, q, q, **{name: True})
        )

    @pytest.mark.parametrize(
        ("mask", "found"),
        [
            ([[True]], "a list"), (True, "a bool"), (np.float32(1), "a float32"),
            (np.ones((5, 5), int), "int64"), (torch.ones(5, 5, dtype=torch.int32), "int32"),
        ],
        ids=str,
    )  # fmt: skip
    def test_what_is_no_mask_is_told_by_its_name_in_torch(self, mask, found):
        q = random(1, 5, 8)
        said = f"^scaled_dot_product_attention: attn_mask is {found}; an array of bools"
        with pytest.raises(TypeError, match=said):
            regard.scaled_dot_product_attention(q, q, q, mask)


def test_threads_are_set_and_read_back():
    before = regard.get_num_threads()
    try:
        regard.set_num_threads(1)
        assert regard.get_num_threads() == torch.get_num_threads() == 1
    finally:
        regard.set_num_threads(before)
    code = (
        "import regard; regard.set_num_threads(1)\n"
        "import torch, regard._base.torch_arrays; print(torch.get_num_threads())"
    )
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert fresh.stdout == "1\n"
    with pytest.raises(ValueError, match="threads is 0; at least 1 is needed"):
        regard.set_num_threads(0)
    with pytest.raises(ValueError, match=r"threads is 2147483648; more than 2\*\*31 - 1"):
        regard.set_num_threads(2**31)
    assert regard.get_num_threads() == before
    with pytest.raises(TypeError, match=r"threads is float 2\.0; pass an int"):
        regard.set_num_threads(2.0)


def test_the_variable_of_openmp_is_read_as_openmp_reads_it():
    """The first of a list, of nested regions; what names no number of threads is left aside."""
    code = (
        "import os, regard, numpy as np\n"
        "x = np.ones((4, 300, 64), np.float32); regard.attention(x, x, x)\n"
        "found = regard.get_num_threads(); del os.environ['OMP_NUM_THREADS']\n"
        "print(found, found == regard.get_num_threads())"
    )
    assert run_with_threads(code, " 3,2").split()[0] == "3"
    for asked in ("4294967296", "9" * 5000, "²", "0"):
        assert run_with_threads(code, asked).split()[1] == "True", asked


def run_with_threads(code, asked):
    """What a fresh process prints where ``OMP_NUM_THREADS`` is this."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": asked},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def annotated(function):
    """The function with its shape annotations evaluated and enforced."""
    hints = typing.get_type_hints(function, {**function.__globals__, **vars(jaxtyping)})

    checked = types.FunctionType(
        function.__code__, function.__globals__, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    checked.__kwdefaults__, checked.__annotations__ = function.__kwdefaults__, hints
    return jaxtyping.jaxtyped(typechecker=beartype.beartype)(checked)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_shape_annotations_say_what_is_taken(convert):
    checked = annotated(regard.attention)
    q, k, v = (convert(random(*s)) for s in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)))
    sinks = convert(random(4))
    assert checked(q, k, v, causal=True, window=(3, None), sinks=sinks).shape == (2, 4, 5, 3)
    assert checked(q[0, 0], k[0, 0], v[0, 0], scale=0.5, seed=1, dropout=0.1).shape == (5, 3)
    for wrong in ((q, k, v[:, :, :6]), (q, k[..., :4], v), (q, [1.0], v)):
        with pytest.raises(jaxtyping.TypeCheckError):
            checked(*wrong)


@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_a_softcap_that_is_0_in_float32_leaves_scores_that_are_alike(backend):
    x = torch.zeros(1, 3, 4, requires_grad=True)  # of which every score is 0
    value = torch.arange(12.0).reshape(1, 3, 4)
    output = regard.attention(x, x, value, softcap=1e-60, backend=backend)
    torch.testing.assert_close(output, value.mean(1, keepdim=True).expand(1, 3, 4))
    output.sum().backward()
    assert x.grad.isfinite().all()
    numbers = np.ones((1, 3, 4), np.float32)
    found = regard.attention(numbers, numbers, value.numpy(), softcap=1e-60, backend="reference")
    np.testing.assert_allclose(found, output.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("scale", [5e-324, 1e-46, -1e-46, 1e-40, 1e-31])
def test_a_scale_that_float32_does_not_hold_makes_weights_alike(scale, library):
    x = np.eye(3, dtype=np.float32)
    arrays = [torch.from_numpy(x).requires_grad_() if library == "torch" else x] * 3
    out, weights = regard.attention(*arrays, scale=scale, backend="kernel", return_weights=True)
    if library == "torch":
        (gradient,) = torch.autograd.grad(out[0, 0], arrays[0])
        assert gradient.isfinite().all()
    found = [out, weights[...], weights.lse]
    out, whole, lse = (x.detach().numpy() if library == "torch" else x for x in found)
    np.testing.assert_allclose(out, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(whole, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(3), rtol=1e-6)


@pytest.mark.parametrize("options", [{"softcap": 1e39}, {"scale": -1e39}], ids=str)
def test_numbers_that_float32_does_not_hold_are_for_float64(options):
    x = torch.eye(2)
    for backend in ("torch", "kernel"):
        with pytest.raises(regard.UnsupportedError, match="and it computes in float32"):
            regard.attention(x, x, x, backend=backend, **options)
    exact = regard.attention(x.double(), x.double(), x.double(), **options)
    assert exact.isfinite().all()
    torch.testing.assert_close(regard.attention(x, x, x, **options), exact.float())
