"""Gradients of divergences by the kernels, on sizes of several tiles, against the plain formula."""

import pytest
import torch

import regard
from test_compare import KINDS
from test_reduction_gradients import CASES, HQ, asked_of, assert_close, dense, drawn, gradients


@pytest.fixture(autouse=True)
def never_in_blocks(monkeypatch):
    """The tests fail where a gradient is computed block by block."""

    def blocks(*_):
        raise AssertionError("the kernels do not serve this")

    monkeypatch.setattr("regard._backends.torch_gradients.weights_gradients", blocks)


def others_of(case, dtype):
    """Weights of the same size, of a key head for each query head, and what they are made of."""
    own = {n: x.detach().flip(2) / 2 for n, x in drawn(case, torch.float32).items() if x.ndim == 4}
    own["key"] = own["key"].repeat_interleave(2, 1) * torch.tensor([1, -1, 0.5, 1])[:, None, None]
    own = {n: x.to(dtype).requires_grad_() for n, x in own.items() if n in ("query", "key")}
    return regard.AttentionWeights(**own, scale=0.7, backend="kernel"), own


def with_rest(weights, of_sink):
    """Whole rows, ``(..., Lk + 1)``: the last is the share of no key."""
    sees_nothing = (weights == 0).all(-1, keepdim=True)
    return torch.cat([weights, torch.where(sees_nothing, 1.0, of_sink)], -1)


def rows_of(case, dtype):
    weights, lse, _ = dense(case, dtype)
    own = drawn(case, dtype)
    if "sinks" not in own:
        return with_rest(weights, torch.zeros(()).double())
    return with_rest(weights, (own["sinks"][:, None] - lse).exp()[..., None])


def rows_of_others(own):
    scores = own["query"] @ own["key"].mT * 0.7
    return with_rest(scores.softmax(-1), torch.zeros(()).double())


def divergences(kind, a, b):
    """inf where a row has weight on what the other masks."""
    if kind == "reverse_kl":
        return divergences("kl", b, a)
    if kind == "total_variation":
        return (a - b).abs().sum(-1) / 2
    if kind == "jensen_shannon":
        mean = torch.where((a > 0) | (b > 0), (a + b) / 2, 1.0)
        return sum(torch.xlogy(x, torch.where(x > 0, x / mean, 1.0)).sum(-1) for x in (a, b)) / 2
    both = (a > 0) & (b > 0)
    found = torch.where(both, a * torch.where(both, a / torch.where(both, b, 1.0), 1.0).log(), 0.0)
    return found.sum(-1).masked_fill(((a > 0) & (b == 0)).any(-1), torch.inf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_that_of_the_plain_formula(case, kind):
    wide = {n: x.double().requires_grad_() for n, x in plain_others(case).items()}
    plain = divergences(kind, rows_of(case, torch.float32), rows_of_others(wide))
    right = gradients(plain, drawn(case, torch.float32) | {f"of_{n}": x for n, x in wide.items()})
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        (weights, own), (others, of_others) = asked_of(case, dtype), others_of(case, dtype)
        found = regard.divergence(weights, others, kind)
        torch.testing.assert_close(found.double(), plain, atol=limit, rtol=limit)
        given = own | {f"of_{n}": x for n, x in of_others.items()}
        assert_close(gradients(found, given), right, given, limit)


def plain_others(case):
    return {n: x.detach() for n, x in others_of(case, torch.float32)[1].items()}


@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_of_means_over_heads_and_layers(kind):
    case, some = "all", [0.25, 0.75]
    wide = {n: x.double().requires_grad_() for n, x in plain_others(case).items()}
    a, b = rows_of(case, torch.float32), rows_of_others(wide)
    plain = divergences(kind, (0.5 * a + 0.5 * b).mean(1), some[0] * b[:, 0] + some[1] * b[:, 3])
    inputs = drawn(case, torch.float32) | {f"of_{n}": x for n, x in wide.items()}
    right = gradients(plain, inputs)
    (weights, own), (others, of_others) = (
        asked_of(case, torch.float64),
        others_of(case, torch.float64),
    )
    mean = regard.mix([weights.mix(), others.mix()])
    found = regard.divergence(mean, others.mix([0, 3], some), kind)
    given = own | {f"of_{n}": x for n, x in of_others.items()}
    assert_close(gradients(found, given), right, given, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_gradient_is_as_exact_as_its_dtype(kind, dtype):
    case = "tiles of several heads"
    (weights, own), (others, of_others) = asked_of(case, dtype), others_of(case, dtype)
    wide = {n: x.detach().double().requires_grad_() for n, x in of_others.items()}
    plain = divergences(kind, rows_of(case, dtype), rows_of_others(wide))
    given = own | {f"of_{n}": x for n, x in of_others.items()}
    inputs = drawn(case, dtype) | {f"of_{n}": x for n, x in wide.items()}
    found = gradients(regard.divergence(weights, others, kind), given)
    assert_close(found, gradients(plain, inputs), given, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_weights_have_no_gradient(kind, dtype):
    """A total variation of rounding errors would have that of their signs."""
    for case in ("few queries", "tiles of several heads", "all"):
        (a, own), (b, _) = asked_of(case, dtype), asked_of(case, dtype)
        for found in gradients(regard.divergence(a, b, kind), own):
            limit = 0 if kind == "total_variation" else 1e-6
            assert found.abs().max() <= limit


def test_weights_that_underflow_leave_gradients_finite():
    x = torch.eye(HQ, dtype=torch.float32)[None].repeat(1, 1, 1)
    query, other = (300 * x).requires_grad_(), (-300 * x).requires_grad_()
    a, b = (regard.AttentionWeights(q, x, scale=1.0, backend="kernel") for q in (query, other))
    for kind in KINDS:
        value = regard.divergence(a, b, kind).sum()
        for found in torch.autograd.grad(value, (query, other)):
            assert found.isfinite().all()


@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
def test_any_number_of_threads_gives_the_same_bits(kind):
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 600, 16, generator=random).requires_grad_() for _ in range(4)]
    found, before = [], regard.get_num_threads()
    try:
        for threads in (1, 3, 3):
            regard.set_num_threads(threads)
            a, b = (
                regard.AttentionWeights(*pair, causal=True, backend="kernel")
                for pair in (given[:2], given[2:])
            )
            found.append(torch.autograd.grad(regard.divergence(a, b, kind).sum(), given))
    finally:
        regard.set_num_threads(before)
    for again in found[1:]:
        for x, y in zip(found[0], again):
            assert torch.equal(x, y)
