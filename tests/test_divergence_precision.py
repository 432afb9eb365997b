"""Gradients of divergences where the weights of one side are far below those of the other."""

import math

import pytest
import torch

import regard
from test_compare import KINDS

B, H, T, D = 1, 2, 70, 16
BACKENDS = pytest.mark.parametrize("backend", ["kernel", "torch"])
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


def drawn(size, sink):
    """Query, key and sinks of a and b; scores of b are larger, and its sink lower."""
    random = torch.Generator().manual_seed(1)
    q, k, other, keys = (torch.randn(B, H, T, D, generator=random) for _ in range(4))
    a, b = [q, k], [size * other, keys]
    if sink is not None:
        a, b = [*a, torch.zeros(H)], [*b, torch.full((H,), float(sink))]
    return a, b


def logarithms(query, key, sinks=None, causal=True):
    scores = query @ key.mT / math.sqrt(D)
    if causal:
        scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -1e30)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(B, H, T, 1)], -1)
    return scores.log_softmax(-1)


def plain(kind, a, b):
    """Of logarithms."""
    if kind == "reverse_kl":
        return plain("kl", b, a)
    if kind == "total_variation":
        return (a.exp() - b.exp()).abs().sum(-1) / 2
    if kind == "jensen_shannon":
        mean = torch.logaddexp(a, b) - math.log(2)
        return (plain("kl", a, mean) + plain("kl", b, mean)) / 2
    return (a.exp() * (a - b)).sum(-1)


def gradients(found, inputs):
    upstream = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).reshape(found.shape)
    return torch.autograd.grad((found * upstream).sum(), inputs)


def both_ways(kind, given, dtype, backend, mixed=False):
    """The gradients by regard, and those of logarithms in float64."""
    a, b = ([x.to(dtype).requires_grad_() for x in side] for side in given)
    weights = [
        regard.AttentionWeights(
            q, k, sinks=sinks[0] if sinks else None, causal=True, backend=backend
        )
        for q, k, *sinks in (a, b)
    ]
    if mixed:
        weights = [one.mix([0, 1], [0.25, 0.75]) for one in weights]
    found = gradients(regard.divergence(*weights, kind), [*a, *b])
    a, b = ([x.double().requires_grad_() for x in side] for side in given)
    logs = [logarithms(*side) for side in (a, b)]
    if mixed:
        part = torch.tensor([0.25, 0.75]).double().log()[:, None, None]
        logs = [torch.logsumexp(one + part, 1) for one in logs]
    return found, gradients(plain(kind, *logs), [*a, *b])


def assert_near(found, exact, limit):
    for one, right in zip(found, exact, strict=True):
        assert (one.double() - right).abs().max() <= limit * right.abs().max()


@BACKENDS
@ALL_KINDS
@pytest.mark.parametrize("size", [1.0, 10.0, 30.0])  # of scores: weights down to 1e-100
def test_a_gradient_by_weights_below_their_dtype_is_that_of_their_scores(size, kind, backend):
    found, exact = both_ways(kind, drawn(size, None), torch.float32, backend)
    assert_near(found, exact, 3e-5)


@BACKENDS
@ALL_KINDS
@pytest.mark.parametrize("sink", [-10.0, -20.0, -60.0])
def test_a_sink_of_almost_no_weight_costs_no_precision(sink, kind, backend):
    given = drawn(1.0, sink)
    for dtype, limit in ((torch.float32, 5e-6), (torch.float64, 1e-13)):
        for mixed in (False, True):
            found, exact = both_ways(kind, given, dtype, backend, mixed)
            assert_near(found, exact, limit)
