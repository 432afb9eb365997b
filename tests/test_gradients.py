import contextlib
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from definition import edit_logs, visible_pairs
from plain_formula import Errors, differentiate, to_array
from regard._backends.formula import apply
from regard._base.arrays import arrays_of
from strategies import calls, to_torch

pytestmark = pytest.mark.usefixtures("by_both_backends")

GRADCHECK_OPTIONS = [
    {},
    {"causal": True},
    {"window": (3, 1), "softcap": 2.0, "key_lengths": torch.tensor([7, 4])},
    {"causal": True, "dropout": 0.3, "seed": 5},
    {"mask": torch.rand(4, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.6},
    {"segments": (torch.arange(5) // 2, torch.arange(7) // 3), "softcap": 0.7, "dropout": 0.2,
     "seed": 3, "query_start": torch.tensor([1, -2]), "causal": True},
    {"intervals": (torch.tensor([[0, 1, 3, 0, 2]]), torch.arange(10).reshape(2, 5))},
    {"edits": [regard.Edit(1, slice(1, 4), slice(2, 5)), regard.Edit(0, None, 3, 2.5),
               regard.Edit(-1, 2, None)], "softcap": 2.0},
]  # fmt: skip


def plain(q, k, v, options):
    """The formula on whole matrices in torch, for autograd to differentiate."""
    B, Hq, Lq, D = q.shape
    Hkv, Lk = k.shape[1:3]
    k, v = (x.expand(B, -1, -1, -1).repeat_interleave(Hq // Hkv, 1) for x in (k, v))
    s = (q @ k.transpose(-1, -2)) * options.get("scale", 1 / D**0.5)
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "bias" in options:
        s = s + options["bias"]
    rules = {n: x for n, x in options.items()
             if n not in ("scale", "softcap", "bias", "sinks", "dropout", "seed")}  # fmt: skip
    if "edits" in options:
        s = s + torch.from_numpy(edit_logs(options["edits"], Hq, Lq, k.shape[2]))
    visible = torch.from_numpy(visible_pairs(B, Hq, Lq, Lk, **rules))
    e = torch.where(visible, s, -torch.inf)
    top = e.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    e = torch.where(visible, torch.exp(torch.where(visible, s, 0.0) - top), 0.0)
    total = e.sum(-1, keepdim=True)
    if "sinks" in options:
        some = visible.any(-1, keepdim=True)
        total = total + torch.where(some, torch.exp(options["sinks"][:, None, None] - top), 0.0)
    w = e / torch.where(total == 0, 1.0, total)
    if "dropout" in options:  # what is kept shows where the values are the unit vectors
        zeros = torch.zeros(B, Hq, Lq, 1, dtype=q.dtype), torch.zeros(B, Hq, Lk, 1, dtype=q.dtype)
        one_hot = torch.eye(Lk, dtype=q.dtype).expand(B, Hq, Lk, Lk)
        drops = {n: options[n] for n in ("dropout", "seed")}
        w = w * (regard.attention(*zeros, one_hot, **drops) * Lk)
    return w @ v


@settings(max_examples=80, deadline=None)
@given(calls(min_length=1), st.sampled_from([None, 0.4]))
def test_gradients_equal_autograd_of_the_plain_formula(call, dropout):
    arrays, options = call
    if dropout is not None:
        options = {**options, "dropout": dropout, "seed": 7}
    q, k, v = (torch.from_numpy(x.copy()).requires_grad_() for x in arrays)
    learned = {n: torch.from_numpy(options[n]).requires_grad_()
               for n in ("bias", "sinks") if n in options}  # fmt: skip
    inputs = [q, k, v, *learned.values()]
    out = regard.attention(q, k, v, **{**to_torch(options), **learned})
    exact = plain(q, k, v, {**options, **learned})
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-11)
    upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    ours = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    theirs = torch.autograd.grad(exact, inputs, upstream, allow_unused=True)
    for mine, other, x in zip(ours, theirs, inputs):
        other = torch.zeros_like(x) if other is None else other
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)


@pytest.fixture
def checked():
    """Query, key, value, bias and sinks: heads that share keys, two biases that share a batch.

    The whole matrix of derivatives takes two calls for each number, so that there are few of them.
    """
    torch.manual_seed(0)
    return [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 4, 5, 2), (2, 2, 7, 2), (2, 2, 7, 2), (4, 5, 7), (4,))
    ]


def name_options(options):
    return " ".join(options) or "none"


@pytest.mark.parametrize("options", GRADCHECK_OPTIONS, ids=name_options)
def test_gradcheck(options, checked):
    def attend(q, k, v, bias=None, sinks=None):
        return regard.attention(q, k, v, bias=bias, sinks=sinks, **options)

    assert torch.autograd.gradcheck(attend, checked[:3])
    assert torch.autograd.gradcheck(attend, checked, fast_mode=True)


@pytest.mark.parametrize("options", GRADCHECK_OPTIONS, ids=name_options)
def test_gradgradcheck(options, checked):
    def attend(q, k, v, bias=None, sinks=None):
        return regard.attention(q, k, v, bias=bias, sinks=sinks, **options)

    assert torch.autograd.gradgradcheck(attend, checked[:3], fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, checked, fast_mode=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": torch.ones(17, 17).tril() > 0}])
def test_gradgradcheck_where_torch_fuses(options):
    torch.manual_seed(0)
    q = torch.randn(1, 2, 17, 2, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(2, 1, 1, 17, 2, dtype=torch.float64, requires_grad=True)

    def attend(q, kv):
        return regard.attention(q, *kv, **options)

    assert torch.autograd.gradgradcheck(attend, (q, kv), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"window": (60, None)}], ids=name_options)
def test_gradients_of_narrow_dtypes_are_within_twice_the_plain_formulas_error(dtype, options):
    """By the errors of 20 draws together: of one, which is larger is luck."""
    errors = [Errors() for _ in range(3)]
    for _ in range(20):
        wide = [torch.randn(1, 2, 60, 16).to(dtype).double().requires_grad_() for _ in range(3)]
        upstream = torch.randn(1, 2, 60, 16).to(dtype)
        exact = torch.autograd.grad(plain(*wide, {"causal": True}), wide, upstream.double())
        narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
        out = regard.attention(*narrow, causal=True, **options)
        ours = torch.autograd.grad(out, narrow, upstream)
        assert all(x.dtype == dtype for x in ours)
        arrays = (to_array(x) for x in (*narrow, upstream))
        low = differentiate(*arrays, visible=np.tri(60, dtype=bool))
        for error, *found in zip(errors, ours, exact, low):
            error.add(*found)
    assert max(error.ratio for error in errors) < 2, [error.ratio for error in errors]


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = (torch.randn(1, 5, 4) for _ in range(3))
    k.requires_grad_()
    out = regard.attention(q, k, v, window=(2, 0), bias=torch.zeros(5, 5))
    out.sum().backward()
    assert k.grad.shape == k.shape
    assert q.grad is None
    assert v.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 1.5, "dropout": 0.3, "seed": 1}, {"scale": 0.0}]
)
def test_a_gradient_that_is_asked_for_alone_has_the_bits_that_it_has_with_the_others(
    dtype, options
):
    random = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=random).to(dtype)

    inputs = draw(2, 4, 70, 20), draw(2, 2, 300, 20), draw(2, 2, 300, 12), draw(4, 70, 300), draw(4)
    grad = draw(2, 4, 70, 12)

    def gradients(*chosen):
        own = [x.clone().requires_grad_(n in chosen) for n, x in enumerate(inputs)]
        *qkv, bias, sinks = own
        out = regard.attention(*qkv, bias=bias, sinks=sinks, causal=True, **options)
        return torch.autograd.grad(out, [own[n] for n in chosen], grad)

    together = gradients(0, 1, 2, 3, 4)
    for chosen in ((0,), (1,), (2,), (3,), (4,), (0, 1), (2, 3), (1, 4)):
        for n, x in zip(chosen, gradients(*chosen)):
            assert torch.equal(x, together[n]), (chosen, n)


@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (3,), (4,), (1, 3)])
def test_a_gradient_that_was_asked_for_alone_is_differentiated_too(checked_inputs, chosen):
    def alone(*some):
        own = [x.detach() for x in checked_inputs]
        for n, x in zip(chosen, some):
            own[n] = x
        *qkv, bias, sinks = own
        return regard.attention(*qkv, bias=bias, sinks=sinks, causal=True, softcap=2.0)

    torch.autograd.gradgradcheck(alone, [checked_inputs[n] for n in chosen])


@pytest.fixture
def checked_inputs():
    random = torch.Generator().manual_seed(2)
    shapes = ((1, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2), (2, 4, 5), (2,))
    return [
        torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": torch.ones(4)}], ids=str)
def test_gradients_are_the_same_where_something_watches(options, dtype):
    made = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 4, 40, 8, generator=made).to(dtype) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = []
    for watched in (False, True, False):
        with torch.profiler.profile() if watched else contextlib.nullcontext():
            out = regard.attention(*inputs, **options)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for own, watched, again in zip(*found):
        assert torch.equal(own, watched)
        assert torch.equal(own, again)


def test_what_a_gradient_keeps_goes_through_torchs_hooks():
    """As offloading and checkpoints need it."""
    inputs = [torch.randn(2, 2, 20, 4, requires_grad=True) for _ in range(3)]
    kept = []

    def pack(x):
        kept.append(x.clone())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        out = regard.attention(*inputs)
    expected = torch.autograd.grad(regard.attention(*inputs).sum(), inputs)
    for x in inputs:
        x.data.zero_()
    for own, exact in zip(torch.autograd.grad(out.sum(), inputs), expected):
        assert torch.equal(own, exact)


def test_gradients_do_not_depend_on_the_blocks(monkeypatch):
    from regard._base import torch_arrays

    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 50, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grads = []
    own = torch_arrays.TorchArrays.__init__
    for elements in (2**4, 2**10, 2**20):

        def sized(self, device, dtype, elements=elements):
            own(self, device, dtype)
            self.block_elements = elements

        monkeypatch.setattr(torch_arrays.TorchArrays, "__init__", sized)
        out = regard.attention(*tensors, window=(20, 0), dropout=0.2, seed=1)
        grads.append(torch.autograd.grad(out.square().sum(), tensors))
    for other in grads[1:]:
        for x, y in zip(grads[0], other):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def second_derivatives(out, inputs, seed=0):
    """Of the output, of a random sum of its gradients, for the output's gradient and the inputs."""
    generator = torch.Generator().manual_seed(seed)

    def random(x):
        return torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype)

    upstream = random(out).requires_grad_()
    first = torch.autograd.grad(out, inputs, upstream, create_graph=True, materialize_grads=True)
    total = sum((random(g) * g).sum() for g in first)
    asked = [upstream, *inputs]
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in asked]
    return torch.autograd.grad(total, asked, materialize_grads=True)


@settings(max_examples=60, deadline=None)
@given(calls(min_length=1), st.sampled_from([None, 0.4]))
def test_second_derivatives_equal_those_of_the_plain_formula(call, dropout):
    arrays, options = call
    if dropout is not None:
        options = {**options, "dropout": dropout, "seed": 7}
    q, k, v = (torch.from_numpy(x.copy()).requires_grad_() for x in arrays)
    learned = {n: torch.from_numpy(options[n]).requires_grad_()
               for n in ("bias", "sinks") if n in options}  # fmt: skip
    inputs = [q, k, v, *learned.values()]
    ours = second_derivatives(regard.attention(q, k, v, **{**to_torch(options), **learned}), inputs)
    exact = second_derivatives(plain(q, k, v, {**options, **learned}), inputs)
    for mine, other in zip(ours, exact):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("length", [7, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_second_derivatives_are_within_twice_the_plain_formulas_error(dtype, length):
    """Both are torch's products, on whatever processor it is."""
    errors = [Errors() for _ in range(4)]
    for _ in range(20):
        wide = [torch.randn(1, 2, length, 16).to(dtype).double().requires_grad_() for _ in range(3)]
        narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
        options = {"causal": True}
        exact = second_derivatives(plain(*wide, options), wide)
        low = second_derivatives(plain(*narrow, options), narrow)
        ours = second_derivatives(regard.attention(*narrow, **options), narrow)
        assert all(x.dtype == dtype for x in ours)
        for error, *found in zip(errors, ours, exact, low):
            error.add(*found)
    assert max(error.ratio for error in errors) < 2, [error.ratio for error in errors]


def poisoned_derivatives(name, poison, documents, **options):
    """First and second ones, with a poison in document 1 and in all of its cotangents."""
    torch.manual_seed(0)
    q, k, v, *dots = 2 * torch.randn(6, 2, len(documents), 8)
    x = {"query": q, "key": k, "value": v}[name]
    x[:, documents == 1, 3:5] = poison * torch.tensor([1.0, -1.0])  # sums of inf and −inf
    inputs = [x.requires_grad_() for x in (q, k, v)]
    upstream = torch.randn(q.shape, requires_grad=True)
    out = regard.attention(*inputs, segments=documents, **options)
    first = torch.autograd.grad(out, inputs, upstream, create_graph=True)
    dots = [torch.where(documents[:, None] == 1, poison, x) for x in dots]
    return first, torch.autograd.grad(first, [upstream, *inputs], dots)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0, "sinks": torch.ones(2)}], ids=name_options
)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_hidden_reaches_no_derivative(name, poison, options):
    documents = torch.arange(20) // 7  # whose edges lie inside of a block
    others = documents != 1
    dirty, clean = (poisoned_derivatives(name, x, documents, **options) for x in (poison, 1.0))
    for x, y in zip((*dirty[0], *dirty[1]), (*clean[0], *clean[1])):
        torch.testing.assert_close(x[:, others], y[:, others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=name_options)
def test_a_hidden_score_of_inf_minus_inf_reaches_no_gradient(name, dtype, options):
    documents = torch.arange(20) // 7
    gradients = []
    for poison in (3e38, 1.0):
        torch.manual_seed(0)
        q, k, v, upstream = 2 * torch.randn(4, 2, len(documents), 256)
        x = {"query": q, "key": k}[name]
        x[:, documents == 1, 0], x[:, documents == 1, 200] = poison, -poison  # summed in two parts
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = regard.attention(*inputs, segments=documents, **options)
        gradients.append(torch.autograd.grad(out, inputs, upstream.to(dtype)))
    for x, y in zip(*gradients):
        torch.testing.assert_close(x[:, documents != 1], y[:, documents != 1])


@pytest.mark.parametrize(
    "options", [{"segments": np.arange(200) // 7}, {"window": (3, 0)}, {"causal": True}]
)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_gradient_that_is_no_number_stays_with_what_its_queries_see(options, poison, heads):
    inputs = [torch.randn(1, n, 200, 8, requires_grad=True) for n in (2, heads, heads)]
    upstream = torch.randn(1, 2, 200, 8)
    poisoned = upstream.clone()
    poisoned[:, :, 9:12] = poison
    given = {n: torch.from_numpy(x) if n == "segments" else x for n, x in options.items()}
    clean, dirty = (
        torch.autograd.grad(regard.attention(*inputs, **given), inputs, x)
        for x in (upstream, poisoned)
    )
    queries = torch.zeros(200, dtype=torch.bool)
    queries[9:12] = True
    keys = torch.from_numpy(visible_pairs(1, 1, 200, 200, **options)[0, 0, 9:12].any(0))
    for x, y, reached in zip(dirty, clean, (queries, keys, keys)):
        torch.testing.assert_close(x[:, :, ~reached], y[:, :, ~reached])
        assert not x[:, :, reached].isfinite().any()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_in_a_visible_place_reaches_the_derivatives(name):
    documents = torch.arange(20) // 7
    (dq, dk, dv), second = poisoned_derivatives(name, np.nan, documents)
    seen = (dq, dk) if name == "value" else (dq, dk, dv)
    for x in (*seen, *second):
        assert x[:, documents == 1].isnan().any(-1).all()
    assert name != "value" or dv.isfinite().all()


def test_a_query_that_sees_nothing_has_second_derivative_zero():
    torch.manual_seed(0)
    shapes = [(2, 6, 4)] * 3 + [(2, 6, 6), (2,)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    for empty, options in (
        ([2], {"mask": mask}),
        ([], {}),
        ([0, 1, 2, 3, 4, 5], {"key_lengths": 0}),
    ):
        out = regard.attention(*inputs[:3], bias=inputs[3], sinks=inputs[4], **options)
        upstream = torch.randn_like(out)
        upstream[:, empty] = torch.nan
        upstream.requires_grad_()
        first = torch.autograd.grad(out, inputs, upstream, create_graph=True)
        dots = [torch.randn_like(x) for x in first]
        dgrad, dq, dk, dv, dbias, dsinks = torch.autograd.grad(first, [upstream, *inputs], dots)
        for x in (dgrad, dq, dbias):
            assert (x[:, empty] == 0).all()
        for x in (dgrad, dq, dk, dv, dbias, dsinks):
            assert x.isfinite().all()
            assert (x != 0).any() != (len(empty) == 6)


def test_derivatives_of_weights_apply_to_infinite_values_by_their_sign():
    torch.manual_seed(0)
    w, v = torch.randn(1, 2, 9, 6).round(decimals=0), torch.randn(1, 2, 6, 40)
    for fill in (torch.inf, -torch.inf, torch.nan):
        v[torch.rand(v.shape) < 0.1] = fill
    visible = torch.rand(9, 6) < 0.7
    out = apply(arrays_of(w), w.masked_fill(~visible, 0.0), visible, v)
    for i, seen in enumerate(visible):
        torch.testing.assert_close(
            out[:, :, i], (w[:, :, i, None, seen] @ v[:, :, seen])[:, :, 0], equal_nan=True
        )


def test_a_first_gradient_alone_is_that_of_torchs_fused_operator():
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
    found = []
    ours = functools.partial(regard.attention, backend="torch")
    for attend in (ours, torch.nn.functional.scaled_dot_product_attention):
        found.append(torch.autograd.grad(attend(*tensors).square().sum(), tensors))
    for ours, theirs in zip(*found):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e5, 1e30])
def test_of_large_products_the_gradient_is_still_a_number(size, dtype):
    """torch's fused operator makes weights of their log-sum-exp, which is rounded: even inf."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, n, 3, dtype=dtype) for n in (47, 16, 16)]
    tensors[1][1, 0, 11, 2] = -size
    found = {}
    for backend in ("torch", "kernel"):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = regard.attention(*leaves, backend=backend)
        found[backend] = torch.autograd.grad(out.square().sum(), leaves)
    for ours, theirs in zip(*found.values()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("hidden_by", ["segments", "edits"])
@pytest.mark.parametrize("length", [17, 41])  # one query more than vectors of 4, 8 or 16 have
def test_a_hidden_nan_of_the_bias_reaches_no_gradient(length, hidden_by, dtype):
    torch.manual_seed(0)
    arrays = [torch.randn(1, 2, length, 8, dtype=dtype).requires_grad_() for _ in range(3)]
    ids = torch.arange(length)[None] % 5  # no interval of keys says as much
    if hidden_by == "segments":
        hidden, options = ids[0][:, None] != ids[0], {"segments": ids}
    else:
        hidden = (torch.arange(length) == 3).expand(length, length)
        options = {"edits": [regard.Edit(None, None, 3, 0.0)]}
    found = []
    for unseen in (torch.nan, 0.0):
        bias = torch.zeros(1, 2, length, length, dtype=dtype)
        bias[..., hidden] = unseen
        out, weights = regard.attention(
            *arrays, bias=bias, backend="kernel", return_weights=True, **options
        )
        kl = regard.divergence(weights.mix(heads=[0]), weights.mix(heads=[1]), "reverse_kl")
        found.append(
            torch.autograd.grad(out.float().sum() + kl.float().sum(), arrays) + (out.detach(),)
        )
    assert all(x.isfinite().all() for x in found[0])
    assert all(torch.equal(x, y) for x, y in zip(*found))
