"""Gradients of sums of the weights that the kernels compute by a rule of query and key."""

from functools import cache

import numpy as np
import pytest
import torch

import regard
from definition import edit_logs, visible_pairs
from recordings import numbers

B, HQ, HKV, D = 2, 4, 2, 5
EDITS = [regard.Edit(None, slice(3, 90), slice(10, 40), 0.0), regard.Edit(1, 7, None, 3.0)]


def mask(Lq, Lk):
    found = torch.rand(HQ, Lq, Lk, generator=torch.Generator().manual_seed(3)) < 0.3
    found[:, Lq // 2] = False  # a row that sees nothing
    return found


# sizes, and options; a tile has 64 queries and 128 keys.
CASES = {
    "few queries": (3, 301, {}),
    "many queries": (201, 5, {}),
    "tiles of several heads": (97, 130, {"causal": True}),
    "one of each": (1, 1, {}),
    "queries before the keys": (70, 40, {"causal": True, "query_start": 11}),
    "window": (150, 150, {"causal": True, "window": (20, 0), "softcap": 1.5}),
    "mask": (66, 140, {"mask": mask(66, 140)}),
    "lengths": (45, 133, {"key_lengths": torch.tensor([133, 50]), "causal": True, "sinks": True}),
    "segments": (129, 129, {"segments": torch.arange(129)[None] // 31, "causal": True}),
    "intervals": (40, 90, {"intervals": (torch.arange(40)[None], torch.arange(40)[None] * 2)}),
    "edits": (100, 100, {"edits": EDITS, "bias": True, "causal": True}),
    "all": (80, 144, {"bias": True, "sinks": True, "softcap": 2.0, "window": (60, 7), "scale": 0.6,
                      "edits": EDITS[1:]}),
}  # fmt: skip
PART = slice(3, 90, 2)  # of the queries


def ids_of(kind, length):
    """The block of each token, of one batch element or of each."""
    random, each = np.random.default_rng(length), np.arange(length)
    return {
        "sorted": each * 3 // length,
        "scattered": random.integers(-1, 19, length),
        "many": random.integers(0, 400, length) - 50,
        "each": each[::-1].copy(),
        "batch": random.integers(-1, 4, (B, length)),
    }[kind]


def one_hot(ids, count):
    """``(B, L, count)``, zeros for what has no block."""
    ids = torch.from_numpy(np.broadcast_to(ids, (B, ids.shape[-1])).copy())
    return torch.nn.functional.one_hot(ids.clamp(min=0), count) * (ids >= 0)[..., None].double()


def plain_blocks(w, queries, keys):
    of_queries, of_keys = (
        one_hot(ids_of(kind, n), int(ids_of(kind, n).max()) + 1)[:, None]
        for kind, n in ((queries, w.shape[2]), (keys, w.shape[3]))
    )
    return of_queries.mT @ w @ of_keys


def blocks(queries, keys):
    return (
        lambda w: w.blocks(ids_of(queries, w.shape[2]), ids_of(keys, w.shape[3])),
        lambda w, *_: plain_blocks(w, queries, keys),
    )


def plain_diagonals(w, apart, edges):
    count = len(edges) - 1
    at = torch.bucketize(apart.contiguous(), torch.tensor(edges), right=True) - 1
    at = torch.where((at >= 0) & (at < count), at, count).long()[:, None].expand_as(w)
    sums = w.new_zeros(*w.shape[:2], count + 1)
    return sums.scatter_add(2, at.flatten(2), w.flatten(2))[..., :count]


def columns(length, n):
    return torch.randn(B, HQ, length, n, generator=torch.Generator().manual_seed(n)).double()


UNEVEN = (-40, -7, 0, 1, 2, 19, 64, 65, 1000)
ASKED = {
    "sorted blocks": blocks("sorted", "sorted"),
    "scattered blocks": blocks("scattered", "scattered"),
    "many blocks": blocks("many", "many"),
    "a block for each": blocks("sorted", "each"),
    "blocks of a batch": blocks("batch", "batch"),
    "diagonals": (
        lambda w: w.diagonals(UNEVEN).values,
        lambda w, _, apart: plain_diagonals(w, apart, UNEVEN),
    ),
    "every diagonal": (
        lambda w: w.diagonals(range(-200, 301)).values,
        lambda w, _, apart: plain_diagonals(w, apart, list(range(-200, 301))),
    ),
    "distance": (
        lambda w: w.distance(),
        lambda w, _, apart: (w * apart.abs()[:, None]).sum(-1),
    ),
    "entropy": (lambda w: w.entropy(), lambda w, *_: -torch.special.xlogy(w, w).sum(-1)),
    "lse": (lambda w: w.lse, lambda w, lse, _: lse),
    "received": (lambda w: w.received(), lambda w, *_: w.sum(-2)),
    "product": (
        lambda w: w @ columns(w.shape[3], 8).to(w.dtype),
        lambda w, *_: w @ columns(w.shape[3], 8),
    ),
    "transposed": (
        lambda w: w.T @ columns(w.shape[2], 2)[:1, :1].to(w.dtype),
        lambda w, *_: w.mT @ columns(w.shape[2], 2)[:1, :1],
    ),
    "transposed by more": (
        lambda w: w.T @ columns(w.shape[2], 9).to(w.dtype),
        lambda w, *_: w.mT @ columns(w.shape[2], 9),
    ),
}


@cache
def drawn(case, dtype):
    """Query and key, and bias and sinks where the case has them: float64, as exact as the dtype."""
    Lq, Lk, options = CASES[case]
    random = torch.Generator().manual_seed(Lq)
    shapes = {"query": (B, HQ, Lq, D), "key": (B, HKV, Lk, D), "bias": (HQ, 1, Lk), "sinks": (HQ,)}
    found = {n: torch.randn(shape, generator=random).to(dtype) for n, shape in shapes.items()}
    wanted = ("query", "key", *(n for n in ("bias", "sinks") if n in options))
    return {name: found[name].double().requires_grad_() for name in wanted}


@cache
def visible_of(case):
    Lq, Lk, options = CASES[case]
    known = ("causal", "window", "mask", "key_lengths", "segments", "intervals", "query_start")
    seen = {n: x for n, x in options.items() if n in (*known, "edits")}
    return torch.from_numpy(visible_pairs(B, HQ, Lq, Lk, **seen))


def positions(case):
    Lq, Lk, options = CASES[case]
    lengths = options.get("key_lengths", torch.full((B,), Lk))
    start = options.get("query_start", lengths - Lq)
    return (start + torch.zeros(B))[:, None] + torch.arange(Lq), torch.arange(Lk)


@cache
def dense(case, dtype):
    """Weights, lse and the distance of each pair, whole and in float64."""
    (Lq, Lk, options), own = CASES[case], drawn(case, dtype)
    scores = own["query"] @ own["key"].repeat_interleave(HQ // HKV, 1).mT
    scores = scores * options.get("scale", D**-0.5)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    scores = scores + own.get("bias", 0.0)
    scores = scores + torch.from_numpy(edit_logs(options.get("edits", ()), HQ, Lq, Lk))
    visible = visible_of(case)
    some = visible.any(-1, keepdim=True)
    full = scores.masked_fill(~visible, -torch.inf).masked_fill(~some, 0.0)
    if "sinks" in own:
        full = torch.cat([full, own["sinks"][:, None, None].expand(B, -1, Lq, 1)], -1)
    weights = torch.where(some & visible, full.softmax(-1)[..., :Lk], 0.0)
    i, j = positions(case)
    return weights, full.logsumexp(-1).masked_fill(~some[..., 0], 0.0), i[..., None] - j


def asked_of(case, dtype):
    """Weights, and what they have gradients of."""
    narrow = dtype if dtype.itemsize < 4 else torch.float32
    own = {n: x.detach().to(dtype).requires_grad_() for n, x in drawn(case, narrow).items()}
    rest = {n: x for n, x in CASES[case][2].items() if n not in own}
    return regard.AttentionWeights(**own, **rest, backend="kernel"), own


def gradients(value, own):
    """Of a fixed sum of what is finite."""
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).double()
    found = (torch.where(value.isfinite(), value, 0.0) * upstream).sum()
    return torch.autograd.grad(found, own.values(), retain_graph=True)


@cache
def exact(name, case, dtype):
    return gradients(ASKED[name][1](*dense(case, dtype)), drawn(case, dtype))


def assert_close(found, right, own, limit, largest=1):
    """Args: largest: gradient of a weight; what is left of it may be little, or nothing."""
    for name, x, y in zip(own, found, right):
        assert x.dtype == own[name].dtype
        scale = y.abs().max().item() + largest / 10
        torch.testing.assert_close(x.double(), y.double(), atol=limit * scale, rtol=0, msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ASKED)
def test_a_gradient_is_that_of_the_plain_formula(name, case):
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        weights, own = asked_of(case, dtype)
        largest = max(CASES[case][:2]) if name == "distance" else 1
        found, right = gradients(ASKED[name][0](weights), own), exact(name, case, torch.float32)
        assert_close(found, right, own, limit, largest)


@pytest.mark.parametrize("case", ["tiles of several heads", "all", "lengths"])
@pytest.mark.parametrize("name", ["distance", "entropy", "lse", "received", "diagonals", "product"])
def test_a_gradient_of_some_rows_is_that_of_the_plain_formula(name, case):
    """Neighbouring queries of the part are two positions apart."""
    ask, plainly = ASKED[name]
    weights, own = asked_of(case, torch.float64)
    whole, lse, apart = dense(case, torch.float32)
    value = plainly(whole[:, :, PART], lse[:, :, PART], apart[:, PART])
    right = gradients(value, drawn(case, torch.float32))
    assert_close(gradients(ask(weights.part(PART)), own), right, own, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ASKED)
def test_a_narrow_gradient_is_as_exact_as_its_dtype(name, dtype):
    for case in ("tiles of several heads", "all"):
        weights, own = asked_of(case, dtype)
        found, right = gradients(ASKED[name][0](weights), own), exact(name, case, dtype)
        assert_close(found, right, own, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["scattered blocks", "diagonals", "distance", "entropy"])
def test_a_gradient_has_the_same_bits_with_any_number_of_threads(name):
    Lq = Lk = 600  # more than one chunk of keys
    query, key = (x.float() for x in (columns(Lq, 16), columns(Lk, 17)[..., :16]))
    own = {"query": query.requires_grad_(), "key": key.requires_grad_()}
    found = []
    before = regard.get_num_threads()
    try:
        for threads in (1, 3, 3):
            regard.set_num_threads(threads)
            weights = regard.AttentionWeights(**own, causal=True, backend="kernel")
            found.append(gradients(ASKED[name][0](weights), own))
    finally:
        regard.set_num_threads(before)
    for again in found[1:]:
        for x, y in zip(found[0], again):
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", ASKED)
def test_an_additive_mask_is_a_mask(name):
    seen = CASES["mask"][2]["mask"]
    found = []
    for given in ({"mask": seen}, {"bias": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)}):
        shared = drawn("mask", torch.float32)
        own = {n: shared[n].detach().float().requires_grad_() for n in ("query", "key")}
        weights = regard.AttentionWeights(**own, **given, backend="kernel")
        found.append(gradients(ASKED[name][0](weights), own))
    assert_close(found[1], found[0], own, 1e-6)


def test_what_is_not_finite_is_computed_block_by_block():
    query, key = (columns(9, n).requires_grad_() for n in (4, 5))
    own = {"query": query, "key": key.detach()[..., :4].clone().requires_grad_()}
    with torch.no_grad():
        query[0, 0, 3] = torch.inf
    found = [
        gradients(ASKED["sorted blocks"][0](regard.AttentionWeights(**own, backend=way)), own)
        for way in ("kernel", "torch")
    ]
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, equal_nan=True)
        assert not x.isfinite().all()


@pytest.mark.parametrize("backend", ["kernel", "torch"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_chosen_pair_that_is_masked_gives_no_gradient_whatever_its_key_is(backend, poison):
    hidden = {"mask": torch.arange(6) != 4}, {"edits": [regard.Edit(keys=4)]}
    for options in (*hidden, {"causal": True, "query_start": -2}):
        grads = []
        for at in (0.0, poison):
            query, key = (numbers(2, 6, 8, dtype=float, seed=n) for n in (4, 5))
            key[:, 4] = at
            query, key = (torch.from_numpy(x).requires_grad_() for x in (query, key))
            weights = regard.AttentionWeights(query, key, backend=backend, **options)
            chosen = weights.at([2, 5, 5], [1, 4, 0])
            grads.append(torch.autograd.grad(chosen.sum(), (query, key)))
        for clean, poisoned in zip(*grads):
            torch.testing.assert_close(poisoned, clean)


@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_the_largest_score_of_a_head_that_sees_nothing_has_a_gradient_of_0(backend):
    query, key = (torch.randn(2, 6, 8, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        key[0] = torch.nan
    mask = torch.tensor([False, True])[:, None, None].expand(2, 6, 6)
    largest = regard.AttentionWeights(query, key, mask=mask, backend=backend).max_score
    for gradient in torch.autograd.grad(largest[1], (query, key)):
        assert (gradient[0] == 0).all()
        assert (gradient[1] != 0).any()


@pytest.mark.parametrize("backend", ["kernel", "torch"])
@pytest.mark.parametrize("beside", ["a sink", "a key of the whole"])
def test_the_gradient_of_the_largest_score_is_its_pairs_however_small_its_weight(backend, beside):
    query, key = (torch.from_numpy(numbers(n, 8, dtype=float, seed=n)).abs() for n in (4, 7))
    sinks = torch.tensor([1e4]) if beside == "a sink" else None
    key[6] = 1e-3 if beside == "a sink" else 1e4
    query.requires_grad_(), key.requires_grad_()
    weights = regard.AttentionWeights(query, key, sinks=sinks, backend=backend)
    some = weights.part(columns=slice(0, 6))
    assert not some.copy()[:].any()
    found = torch.autograd.grad(some.max_score, (query, key))
    expected = torch.autograd.grad((query @ key[:6].mT / 8**0.5).max(), (query, key))
    for x, exact in zip(found, expected):
        torch.testing.assert_close(x, exact)


@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_pairs_of_no_heads_are_none_where_a_gradient_is_needed(backend):
    query, key = (torch.ones(2, 0, 3, 4, requires_grad=True) for _ in range(2))
    weights = regard.AttentionWeights(query, key, backend=backend)
    assert weights.at([0, 2], [1, 2]).shape == (2, 0, 2)


def test_blocks_of_no_keys_and_of_no_queries():
    own = {"query": columns(4, 6).requires_grad_(), "key": columns(7, 6).requires_grad_()}
    weights = regard.AttentionWeights(**own, backend="kernel")
    for ids in ((np.full(4, -1), np.zeros(7, int)), (np.zeros(4, int), np.full(7, -1))):
        with pytest.raises(RuntimeError, match="grad"):  # no number of it depends on them
            weights.blocks(*ids).sum().backward()
