import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from definition import visible_pairs
from strategies import calls, to_torch


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (3, 1), "softcap": 2.0, "key_lengths": torch.tensor([7, 4])},
        {"causal": True, "dropout": 0.3, "seed": 5},
        {"mask": torch.rand(4, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.6},
    ],
    ids=lambda options: " ".join(options) or "none",
)
def test_gradcheck(options):
    torch.manual_seed(0)
    q, k, v, bias, sinks = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), (4, 5, 7), (4,))
    )
    assert torch.autograd.gradcheck(lambda q, k, v: regard.attention(q, k, v, **options), (q, k, v))
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias, sinks: regard.attention(q, k, v, bias=bias, sinks=sinks, **options),
        (q, k, v, bias, sinks),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_narrow_dtypes_are_within_twice_the_plain_formulas_error(dtype):
    torch.manual_seed(1)
    wide = [torch.randn(1, 2, 60, 16).to(dtype).double().requires_grad_() for _ in range(3)]
    options = {"causal": True}
    exact = torch.autograd.grad(plain(*wide, options).square().sum(), wide)
    narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
    low = torch.autograd.grad(plain(*narrow, options).square().sum(), narrow)
    for backend_options in (options, {**options, "window": (60, None)}):
        ours = torch.autograd.grad(
            regard.attention(*narrow, **backend_options).square().sum(), narrow
        )
        for mine, plainly, truth in zip(ours, low, exact):
            error, allowed = ((x - truth).abs().max() for x in (mine, plainly))
            assert mine.dtype == dtype
            assert error <= 2 * allowed + truth.abs().max() * torch.finfo(dtype).eps


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = (torch.randn(1, 5, 4) for _ in range(3))
    k.requires_grad_()
    out = regard.attention(q, k, v, window=(2, 0), bias=torch.zeros(5, 5))
    out.sum().backward()
    assert k.grad.shape == k.shape
    assert q.grad is None
    assert v.grad is None


def test_weights_carry_no_gradient():
    q = torch.randn(1, 5, 4, requires_grad=True)
    out, weights = regard.attention(q, q, q, return_weights=True)
    assert out.requires_grad
    assert not weights[...].requires_grad
    assert not weights.entropy().requires_grad


def test_gradients_do_not_depend_on_the_blocks(monkeypatch):
    from regard import _torch

    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 50, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grads = []
    for elements in (2**4, 2**10, 2**20):
        monkeypatch.setattr(_torch, "BLOCK_ELEMENTS", elements)
        out = regard.attention(*tensors, window=(20, 0), dropout=0.2, seed=1)
        grads.append(torch.autograd.grad(out.square().sum(), tensors))
    for other in grads[1:]:
        for x, y in zip(grads[0], other):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
