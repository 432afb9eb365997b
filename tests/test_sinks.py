"""A sink beside scores of −∞, and the gradient of sinks."""

import numpy as np
import pytest
import torch

import regard

SERVED = [("numpy", "kernel"), ("numpy", "reference"), ("torch", "kernel"), ("torch", "torch")]


@pytest.mark.parametrize("few", [True, False], ids=["few queries", "many queries"])
@pytest.mark.parametrize("with_sink", [True, False])
@pytest.mark.parametrize("served", SERVED, ids="-".join)
def test_where_every_score_is_minus_infinity_there_is_no_weight_with_or_without_a_sink(
    served, with_sink, few
):
    """A row that a bias of −∞ hides whole is as one that a mask hides."""
    library, backend = served
    rows, keys = (2, 200) if few else (90, 60)
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((2, n, 4)).astype(np.float32) for n in (rows, keys, keys)
    )
    bias = np.zeros((rows, keys), np.float32)
    bias[1] = -np.inf
    options = {"bias": bias} | ({"sinks": np.float32([3.0, -2.0])} if with_sink else {})
    hidden = {"mask": bias == 0} | {n: x for n, x in options.items() if n == "sinks"}
    found = []
    for given in (options, hidden):
        arrays = [query, key, value]
        if library == "torch":
            arrays = [torch.from_numpy(x) for x in arrays]
            given = {n: torch.from_numpy(x) for n, x in given.items()}
        out, weights = regard.attention(*arrays, backend=backend, return_weights=True, **given)
        found.append([np.asarray(x) for x in (out, weights.lse, weights[...])])
    for out, lse, weights in found:
        assert (out[:, 1] == 0).all()
        assert (lse[:, 1] == -np.inf).all()
        assert (weights[:, 1] == 0).all()
        assert np.isfinite(lse[:, 0]).all()
    for biased, masked in zip(*found):
        np.testing.assert_allclose(biased, masked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("large", [1e13, -1e15, 1e16, -1e20, 1e30])
def test_a_sink_beside_a_score_as_large_has_half_of_the_row(large, dtype):
    query, key = torch.ones(2, 1, 1, 4, dtype=dtype)
    bias, sinks = torch.full((1, 1), large, dtype=dtype), torch.full((1,), large, dtype=dtype)
    out = regard.attention(query * 0, key, key, bias=bias, sinks=sinks, backend="kernel")
    assert (out == 0.5).all()
    out = regard.attention(query * large / 4, key, key, scale=1.0, sinks=sinks, backend="kernel")
    assert (out == 0.5).all()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 2, 90, 130), (8, 2, 2, 300)])
def test_the_gradient_of_sinks_does_not_feel_the_rounding_of_the_output(shape, dtype, dropout):
    """Of inputs that are exact in the narrow dtype; the sums of many rows show the rounding."""
    Hq, Hkv, Lq, Lk = shape
    torch.manual_seed(0)
    q, upstream = (torch.randn(1, Hq, Lq, 16).to(dtype) for _ in range(2))
    k = torch.randn(1, Hkv, Lk, 16).to(dtype)
    v = (torch.randn(1, Hkv, Lk, 16) + 8).to(dtype)  # large outputs, of which little is left
    sinks = torch.linspace(-1, 4, Hq)
    options = {"causal": True, "dropout": dropout, "seed": 3} if dropout else {"causal": True}

    def gradient(kind, backend):
        leaf = sinks.to(kind).requires_grad_()
        arrays = [x.to(kind) for x in (q, k, v)]
        out = regard.attention(*arrays, sinks=leaf, backend=backend, **options)
        return torch.autograd.grad(out, leaf, upstream.to(kind))[0].double()

    def gradient_of_wide_sinks():
        leaf = sinks.clone().requires_grad_()
        out = regard.attention(q, k, v, sinks=leaf, backend="kernel", **options)
        return torch.autograd.grad(out, leaf, upstream)[0].double()

    exact = gradient(torch.float64, "torch")
    error = (gradient_of_wide_sinks() - exact).abs() / exact.abs().max()
    assert error.max() < 3e-5, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 2, 90, 130), (8, 2, 2, 300)])
def test_sinks_from_none_of_the_weight_to_nearly_all_of_it(shape, dtype):
    """Output, weights and gradients of the formula, wherever the sink becomes the maximum."""
    Hq, Hkv, Lq, Lk = shape
    torch.manual_seed(1)
    arrays = [torch.randn(1, H, L, 8).to(dtype) for H, L in ((Hq, Lq), (Hkv, Lk), (Hkv, Lk))]
    for low in (-60.0, 0.0, 15.0, 30.0, 60.0):  # e^22 is 2^32
        sinks = torch.linspace(low, low + 15, Hq, dtype=torch.float64)
        found = [x.clone().requires_grad_() for x in (*arrays, sinks.to(arrays[0].dtype))]
        out, weights = regard.attention(*found[:3], sinks=found[3], return_weights=True)
        out.double().sum().backward()
        leaves = [x.detach().double().requires_grad_() for x in found]
        q, k, v, s = leaves
        k, v = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v))
        scores = torch.cat([q @ k.mT / 8**0.5, s[None, :, None, None].expand(1, Hq, Lq, 1)], -1)
        exact = scores.softmax(-1)[..., :-1]
        (exact @ v).sum().backward()
        error = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
        weight_error = 1e-12 if dtype == torch.float64 else 3e-5
        torch.testing.assert_close(
            weights[...].double(), exact, rtol=weight_error, atol=1e-37, check_dtype=False
        )
        torch.testing.assert_close(weights.lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)
        pairs = [(out.double(), (exact @ v).detach())]
        pairs += [(x.grad.double(), y.grad) for x, y in zip(found, leaves)]
        for x, y in pairs:
            torch.testing.assert_close(x, y, rtol=error, atol=error * float(y.abs().amax()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_a_sink_of_minus_infinity_has_no_weight_beside_a_large_one(dtype, backend):
    random = np.random.default_rng(0)
    q, other, k, v, g = (random.standard_normal((2, 9, 4)).astype(dtype) for _ in range(5))
    k[:, 4] *= 9  # half of all queries give it nearly all of their weight
    none = np.full(2, -np.inf, dtype)
    with_sinks, without = (
        [
            regard.AttentionWeights(*map(torch.from_numpy, (x, k)), backend=backend, **options)
            for x in (q, other)
        ]
        for options in ({"sinks": torch.from_numpy(none)}, {})
    )
    for kind in ("kl", "total_variation"):
        found, right = (regard.divergence(*pair, kind) for pair in (with_sinks, without))
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
    found, right = (
        pair[0].effects(*map(torch.from_numpy, (v, g)), "knockout")[:]
        for pair in (with_sinks, without)
    )
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [1, 40, 200])
def test_a_head_with_an_infinite_sink_has_sums_of_nan_and_leaves_the_others_theirs(keys, dtype):
    q, k = (torch.randn(2, n, 16).to(dtype) for n in (70, keys))
    sinks = torch.tensor([np.inf, 1.0], dtype=dtype)
    weights = regard.AttentionWeights(q, k, sinks=sinks, backend="kernel")
    other = regard.AttentionWeights(q[1:], k[1:], sinks=sinks[1:], backend="kernel")
    for ask in ("entropy", "distance", "received"):
        found, right = getattr(weights, ask)(), getattr(other, ask)()
        assert found[0].isnan().all(), ask
        assert found[1].equal(right[0]), ask
    whole = weights.summary()
    assert whole.distance[0].isnan().all()
    assert whole.received[0].isnan().all()
    assert whole.distance[1].equal(other.summary().distance[0])
