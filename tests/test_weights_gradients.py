"""What is asked of the weights has the gradient of the same formula on the whole matrix."""

import functools
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch

import regard
from definition import visible_pairs

B, HQ, HKV, LQ, LK, D = 2, 4, 2, 37, 45, 6
RANDOM = torch.Generator().manual_seed(5)


def draw(*shape, scale=1.0):
    return scale * torch.randn(shape, generator=RANDOM, dtype=torch.float64)


QUERY, KEY = draw(B, HQ, LQ, D), draw(B, HKV, LK, D)
BIAS, SINKS = draw(1, HQ, LQ, LK), draw(HQ)
X, Y = draw(B, HQ, LK, 3), draw(LQ, 2)
QUERY_IDS, KEY_IDS = np.arange(LQ) % 4 - 1, np.arange(LK) // 9
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (9, 0), "softcap": 1.5},
    "mask": {"mask": torch.rand(HQ, LQ, LK, generator=RANDOM) < 0.4},  # some rows see nothing
    "lengths": {"key_lengths": torch.tensor([LK, 20]), "causal": True},
    "bias": {"bias": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "all": {"sinks": True, "bias": True, "softcap": 2.0, "window": (20, 3), "scale": 0.7},
}
OPTIONS["mask"]["mask"][:, 3] = False


def dense(query, key, bias, sinks, options):
    """Weights and lse, stored."""
    scores = query @ key.repeat_interleave(HQ // HKV, 1).mT * options.get("scale", D**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if bias is not None:
        scores = scores + bias
    seen = {n: x for n, x in options.items() if n not in ("scale", "softcap", "bias", "sinks")}
    visible = torch.from_numpy(visible_pairs(B, HQ, LQ, LK, **seen)).broadcast_to(scores.shape)
    scores = scores.masked_fill(~visible, -torch.inf)
    some = visible.any(-1, keepdim=True)
    full = scores.masked_fill(~some, 0.0)
    if sinks is not None:
        full = torch.cat([full, sinks[:, None, None].expand(B, -1, LQ, 1)], -1)
    weights = torch.where(some, full.softmax(-1)[..., :LK], 0.0)
    lse = torch.where(some[..., 0], full.logsumexp(-1), -torch.inf)
    return weights, lse, visible


def plain_entropy(weights):
    return -(weights * weights.clamp(min=1e-300).log()).sum(-1)


def plain_scores(weights, lse, visible):
    seen = visible & (weights > 0)
    return torch.where(seen, torch.where(seen, weights, 1.0).log() + lse[..., None], -torch.inf)


def plain_blocks(weights):
    queries, keys = (
        torch.nn.functional.one_hot(torch.from_numpy(ids).clamp(min=0)).double()
        * torch.from_numpy(ids >= 0)[:, None]
        for ids in (QUERY_IDS, KEY_IDS)
    )
    return queries.mT @ weights @ keys


def plain_distance(weights, options):
    lengths = options.get("key_lengths", torch.full((B,), LK))
    position = lengths[:, None] - LQ + torch.arange(LQ)
    apart = (position[:, None, :, None] - torch.arange(LK)).abs()
    return (weights * apart).sum(-1)


def plain_diagonals(weights, options, edges):
    lengths = options.get("key_lengths", torch.full((B,), LK))
    apart = (lengths[:, None] - LQ + torch.arange(LQ))[:, :, None] - torch.arange(LK)
    parts = [(apart >= a) & (apart < b) for a, b in pairwise(edges)]
    return torch.stack([(weights * part[:, None]).sum((-1, -2)) for part in parts], -1)


PAIRS = np.array([0, 5, 36, 36, 3, 7]), np.array([0, 44, 1, 9, 3, 7])
EDGES = (-3, 0, 4, 30)
# name: of AttentionWeights, and of weights, lse, visible and options.
ASKED = {
    "lse": (lambda w: w.lse, lambda w, lse, _, o: lse),
    "entropy": (lambda w: w.entropy(), lambda w, *_: plain_entropy(w)),
    "distance": (lambda w: w.distance(), lambda w, lse, _, o: plain_distance(w, o)),
    "received": (lambda w: w.received(), lambda w, *_: w.sum(-2)),
    "received seen": (
        lambda w: w.received("seen", queries=slice(4, 30, 3)),
        lambda w, lse, v, o: w[:, :, 4:30:3].sum(-2) / v[:, :, 4:30:3].sum(-2).clamp(min=1),
    ),
    "product": (lambda w: w @ X.to(w.dtype), lambda w, *_: w @ X),
    "transposed": (lambda w: w.T @ Y.to(w.dtype), lambda w, *_: w.mT @ Y),
    "mass": (lambda w: w.mass(slice(2, 30, 5)), lambda w, *_: w[..., 2:30:5].sum(-1)),
    "blocks": (lambda w: w.blocks(QUERY_IDS, KEY_IDS), lambda w, *_: plain_blocks(w)),
    "diagonals": (
        lambda w: w.diagonals(EDGES).values,
        lambda w, lse, _, o: plain_diagonals(w, o, EDGES),
    ),
    "at": (lambda w: w.at(*PAIRS), lambda w, *_: w[:, :, PAIRS[0], PAIRS[1]]),
    "max_score": (
        lambda w: w.max_score,
        lambda w, lse, v, o: plain_scores(w, lse, v).amax((-1, -2)),
    ),
    "rows": (lambda w: w[1, 2, 30:3:-4, 5:40], lambda w, *_: w[1, 2].flip(0)[6:33:4, 5:40]),
    "backwards": (lambda w: w[..., ::-1], lambda w, *_: w.flip(-1)),
    "row": (lambda w: w[:, 3, -1], lambda w, *_: w[:, 3, -1]),
    "whole": (lambda w: w[...], lambda w, *_: w),
    "mean": (lambda w: w.mean(-2), lambda w, *_: w.mean(-2)),
    "of a head": (lambda w: w.head(2).entropy(), lambda w, *_: plain_entropy(w)[:, 2]),
    "of some rows": (
        lambda w: w.part(slice(3, 20, 2)).received(),
        lambda w, *_: w[:, :, 3:20:2].sum(-2),
    ),
}


def leaves(dtype, options):
    given = {"query": QUERY, "key": KEY}
    given |= {n: x for n, x in (("bias", BIAS), ("sinks", SINKS)) if n in options}
    return {name: x.detach().to(dtype).clone().requires_grad_() for name, x in given.items()}


@functools.cache
def stored(option, dtype):
    """Inputs as exact as the dtype, in float64, and their weights."""
    options = OPTIONS[option]
    own = {n: x.detach().double().requires_grad_() for n, x in leaves(dtype, options).items()}
    return own, dense(*(own.get(n) for n in ("query", "key", "bias", "sinks")), options)


@functools.cache
def expected(name, option, dtype):
    """The value and the gradients of a fixed sum of it, from inputs rounded to the dtype."""
    own, weights = stored(option, dtype)
    value = ASKED[name][1](*weights, OPTIONS[option])
    finite = torch.where(value.isfinite(), value, 0.0)
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).double()
    total = (finite * upstream).sum()
    return value.detach(), torch.autograd.grad(total, own.values(), retain_graph=True), upstream


def found(name, option, dtype, backend):
    options = OPTIONS[option]
    own = leaves(dtype, options)
    rest = {n: x for n, x in options.items() if n not in own}
    query, key, *more = own.values()
    weights = regard.AttentionWeights(
        query, key, **rest, **dict(zip(list(own)[2:], more)), backend=backend
    )
    value = ASKED[name][0](weights)
    finite = torch.where(value.isfinite(), value, 0.0)
    return value, finite, own


@pytest.mark.parametrize("backend", ["kernel", "torch"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ASKED)
def test_the_gradient_is_that_of_the_plain_formula(name, option, backend):
    for dtype, limit in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        value, gradients, upstream = expected(name, option, dtype)
        ours, finite, own = found(name, option, dtype, backend)
        torch.testing.assert_close(ours.double(), value, atol=limit, rtol=limit)
        got = torch.autograd.grad((finite * upstream).sum(), own.values(), allow_unused=True)
        for which, x, y in zip(own, got, gradients):
            if x is None:  # the largest score does not depend on the sinks
                assert (name, which, y.abs().max() < 1e-14) == ("max_score", "sinks", True)
                continue
            assert x.dtype == dtype
            torch.testing.assert_close(
                x.double(), y, atol=limit * y.abs().max().item(), rtol=limit, msg=which
            )


@pytest.mark.parametrize("backend", ["kernel", "torch"])
@pytest.mark.parametrize("name", sorted(ASKED.keys() - {"product", "transposed"}))
def test_the_default_device_changes_nothing(name, backend):
    def asked():
        value, finite, own = found(name, "causal", torch.float64, backend)
        return value, *torch.autograd.grad(finite, own.values(), torch.ones_like(finite))

    plain = asked()
    with torch.device("meta"):
        moved = asked()
    for x, y in zip(plain, moved):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["lse", "entropy", "received", "transposed", "blocks"])
def test_narrow_inputs_have_gradients_as_exact_as_their_dtype(name, dtype):
    _, gradients, upstream = expected(name, "sinks", dtype)
    _, finite, own = found(name, "sinks", dtype, "auto")
    got = torch.autograd.grad((finite * upstream).sum(), own.values())
    for x, y in zip(got, gradients):
        assert x.dtype == dtype
        # Half a unit in the last place of the largest, and of what the row statistics round.
        limit = 2 * torch.finfo(dtype).eps * y.abs().max().item()
        torch.testing.assert_close(x.double(), y, atol=limit, rtol=0)


def test_the_weights_of_an_output_have_gradients_too():
    query, key = (x.float().requires_grad_() for x in (QUERY, KEY))
    output, weights = regard.attention(query, key, key, causal=True, return_weights=True)
    alone = regard.AttentionWeights(query, key, causal=True)
    loss = weights.entropy().sum() + output.sum()
    both = torch.autograd.grad(loss, (query, key))
    parts = [
        torch.autograd.grad(x.sum(), (query, key))
        for x in (alone.entropy(), regard.attention(query, key, key, causal=True))
    ]
    for x, *y in zip(both, *parts):
        torch.testing.assert_close(x, sum(y))


def test_nothing_has_a_gradient_that_needs_none():
    query, key = (x.float().requires_grad_() for x in (QUERY, KEY))
    weights = regard.AttentionWeights(query, key)
    with torch.no_grad():
        assert not weights.entropy().requires_grad
    assert weights.entropy().requires_grad
    assert not regard.AttentionWeights(query.detach(), key.detach()).entropy().requires_grad
    for asked in (weights.topk(2).values, weights.pool((4, 4)), weights.received("max")):
        assert not asked.requires_grad
    assert not weights.summary().entropy.requires_grad
    assert not weights.copy().entropy().requires_grad
    assert isinstance(np.asarray(weights), np.ndarray)
    (alone,) = torch.autograd.grad(weights.entropy().sum(), key)
    assert torch.equal(alone, torch.autograd.grad(weights.entropy().sum(), (query, key))[1])


def test_weights_of_which_a_gradient_is_needed_are_pickled_without_it():
    weights = regard.AttentionWeights(QUERY.clone().requires_grad_(), KEY)
    again = pickle.loads(pickle.dumps(weights))
    torch.testing.assert_close(again.entropy(), weights.entropy().detach())
    assert not again.entropy().requires_grad


def test_a_part_of_the_keys_says_what_has_a_gradient():
    weights = regard.AttentionWeights(QUERY.clone().requires_grad_(), KEY)
    part = weights.part(columns=slice(3, 9))
    with pytest.raises(regard.UnsupportedError, match=r"weights\.mass\(keys\)"):
        part.received()
    with torch.no_grad():
        torch.testing.assert_close(part.received(), weights.received()[..., 3:9])


def test_there_is_no_second_derivative():
    query = QUERY.clone().requires_grad_()
    entropy = regard.AttentionWeights(query, KEY).entropy().sum()
    (first,) = torch.autograd.grad(entropy, query, create_graph=True)
    with pytest.raises(regard.UnsupportedError, match="no second"):
        first.sum().backward()


@pytest.mark.parametrize("alone", [False, True])
def test_an_operand_has_its_gradient(alone):
    for name, weigh in (("x", lambda w, x: w @ x), ("y", lambda w, y: w.T @ y)):
        operand = (X if name == "x" else Y).clone().requires_grad_()
        upstream = torch.randn(B, HQ, *((LQ, 3) if name == "x" else (LK, 2))).double()
        query = QUERY.clone().requires_grad_(not alone)
        weights = regard.AttentionWeights(query, KEY, causal=True)
        (got,) = torch.autograd.grad((weigh(weights, operand) * upstream).sum(), operand)
        whole = torch.from_numpy(np.asarray(weights))
        product = (whole if name == "x" else whole.mT) @ operand
        (plain,) = torch.autograd.grad((product * upstream).sum(), operand)
        torch.testing.assert_close(got, plain)


@pytest.mark.parametrize("backend", ["kernel", "torch"])
@pytest.mark.parametrize(
    ("keys", "options"),
    [(0, {}), (3, {"query_start": -9, "causal": True}), (3, {"key_lengths": 0})],
)
def test_diagonals_of_no_pair_have_a_gradient_of_0(keys, options, backend):
    query, key = (torch.ones(1, 2, n, 4, requires_grad=True) for n in (3, keys))
    weights = regard.AttentionWeights(query, key, backend=backend, **options)
    loss = weights.diagonals([0, 1, 5]).values.sum()
    assert loss == 0
    for found in torch.autograd.grad(loss, (query, key)):
        assert not found.any()
