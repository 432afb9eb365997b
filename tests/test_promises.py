"""The seven promises of the operator, one test or more by the name of each."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import regard
from definition import define
from regard.testing import assert_matches

BACKENDS = ["kernel", "torch", "reference", "auto"]


def arrays(*shape, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [scale * rng.standard_normal(shape).astype(np.float32) for _ in range(3)]


def run(backend, q, k, v, **options):
    """NumPy in and out, whichever the backend; ``auto`` is the default one of NumPy."""
    if backend == "torch":
        options = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x
                   for n, x in options.items()}  # fmt: skip
        out = regard.attention(*(torch.from_numpy(x) for x in (q, k, v)), **options)
        return out.numpy()
    return regard.attention(q, k, v, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [7, 97, 1025])
@pytest.mark.parametrize("scale", [1.0, 30.0, 500.0])
def test_exact(backend, length, scale):
    q, k, v = arrays(1, 2, length, 64, scale=scale)
    s = q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 8
    w = np.exp(s - s.max(-1, keepdims=True))
    exact = (w / w.sum(-1, keepdims=True)) @ v.astype(float)
    q32, k32, v32 = (torch.from_numpy(x) for x in (q, k, v))
    low = (q32 @ k32.transpose(-1, -2) / 8).softmax(-1) @ v32
    assert scale < 500 or abs(s).max() > 1e5
    assert_matches(run(backend, q, k, v), exact, low)


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_for_scores_of_a_million(backend):
    q, k = np.float32([[1024.0]]), np.float32([[1000.0], [999.9990234375], [0.0]])
    v = np.eye(3, dtype=np.float32)
    s = q.astype(float) @ k.T.astype(float)
    w = np.exp(s - s.max())
    np.testing.assert_allclose(run(backend, q, k, v, scale=1.0), w / w.sum(), rtol=1e-6)


MASKS = {
    "causal": {"causal": True},
    "window": {"window": (5, 0)},
    "key_lengths": {"key_lengths": 30},
    "mask": {"mask": np.tri(40, dtype=bool)},
    "segments": {"segments": np.arange(40) // 13},
    "all": {"causal": True, "window": (9, None), "key_lengths": 33, "query_start": -2},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", MASKS)
def test_invisible_means_invisible(backend, poison, name):
    q, k, v = arrays(2, 40, 8)
    options = MASKS[name]
    clean = run(backend, q, k, v, **options)
    w = np.asarray(regard.AttentionWeights(q, k, **options))
    hidden_somewhere = False
    for j in (0, 17, 39):
        for poisoned in ("key", "value"):
            dirty_k, dirty_v = k.copy(), v.copy()
            (dirty_k if poisoned == "key" else dirty_v)[:, j, 3] = poison
            out = run(backend, q, dirty_k, dirty_v, **options)
            hidden = w[:, :, j] == 0
            hidden_somewhere |= bool(hidden.any())
            unseen = np.broadcast_to(hidden[..., None], out.shape)
            np.testing.assert_allclose(out[unseen], clean[unseen], rtol=1e-5, atol=1e-6)
    assert hidden_somewhere


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_in_a_visible_place_reaches_the_output(backend, poison):
    q, k, v = arrays(1, 20, 4)
    v[0, 5, 2] = poison
    out = run(backend, q, k, v, causal=True)
    exact = define(q[None], k[None], v[None], causal=True)[0][0]
    np.testing.assert_array_equal(np.isnan(out), np.isnan(exact))
    np.testing.assert_array_equal(np.isposinf(out), np.isposinf(exact))
    assert not np.isfinite(out[0, 5:, 2]).any()
    k[0, 7, 0] = np.nan
    assert np.isnan(run(backend, q, k, v, causal=True)[0, 7:]).all()
    assert np.isnan(run(backend, q, k, v)).all()


@pytest.mark.parametrize("large", [2e38, np.inf])
@pytest.mark.parametrize("options", [{"key_lengths": 39}, {"mask": np.arange(40) < 39}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_invisible_means_invisible_where_a_score_would_overflow(backend, options, large):
    q, k, v = arrays(2, 1, 40, 8, scale=4.0)
    clean = run(backend, q, k, v, **options)
    k[0, 0, 39] = large
    out = run(backend, q, k, v, **options)
    np.testing.assert_allclose(out, clean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[1], clean[1])  # the rest of the batch keeps its bits


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_nan_stays_with_the_pairs_that_see_it(convert, name):
    q, k, v = arrays(1, 16, 4)
    (q if name == "query" else k)[0, 2, 1] = np.nan
    documents = convert(np.arange(16) // 8)
    weights = regard.AttentionWeights(convert(q), convert(k), segments=documents)
    whole = np.asarray(weights)[0]
    assert (whole[:8, 8:] == 0).all()
    assert (whole[8:, :8] == 0).all()
    assert np.isfinite(np.asarray(weights.received())[0, 8:]).all()
    if convert is torch.from_numpy:
        inputs = [convert(x).requires_grad_() for x in (q, k, v)]
        out = regard.attention(*inputs, segments=documents)
        for grad in torch.autograd.grad(out[:, 8:].sum(), inputs):
            assert grad[:, 8:].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing(backend):
    q, k, v = arrays(2, 6, 4)
    mask = np.ones((2, 6, 6), bool)
    mask[1, 2] = False
    out = run(backend, q, k, v, mask=mask)
    assert (out[1, 2] == 0).all()
    assert np.isfinite(out).all()
    weights = regard.AttentionWeights(q, k, mask=mask)
    assert weights.lse[1, 2] == -np.inf
    assert (weights[1, 2] == 0).all()
    nothing = run(backend, q, k[:, :0], v[:, :0])
    assert nothing.shape == (2, 6, 4)
    assert (nothing == 0).all()
    for options in (
        {"key_lengths": 0},
        {"query_start": -9, "causal": True},
        {"window": (0, 0), "query_start": 50},
        {"sinks": np.ones(2, np.float32), "key_lengths": 0},
    ):
        assert (run(backend, q, k, v, **options) == 0).all()


def test_a_query_that_sees_nothing_has_gradient_zero():
    q, k, v = (torch.randn(2, 6, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 6, 6, requires_grad=True)
    sinks = torch.randn(2, requires_grad=True)
    mask = torch.ones(2, 6, 6, dtype=torch.bool)
    mask[:, 2] = False
    out = regard.attention(q, k, v, mask=mask, bias=bias, sinks=sinks)
    poisoned = torch.where(torch.arange(6)[:, None] == 2, torch.nan, 1.0).expand(2, 6, 4)
    grads = torch.autograd.grad(out, (q, k, v, bias, sinks), poisoned)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, 2] == 0).all()
    assert (grads[3][:, 2] == 0).all()
    every = torch.autograd.grad(
        regard.attention(q, k, v, key_lengths=0).sum(), (q, k, v), allow_unused=True
    )
    assert all((g == 0).all() for g in every)


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_memory(backend):
    """No array of Lq × Lk: 2**36 weights would be 256 GiB; more is in test_memory.py."""
    q, k = np.ones((2**17, 1), np.float32), np.ones((2**19, 1), np.float32)
    v = np.arange(2**19, dtype=np.float32)[:, None] % 2
    out = run(backend, q[:64], k, v, window=(8, 0))
    np.testing.assert_allclose(out, 0.5, atol=0.06)
    assert regard.AttentionWeights(q, k, window=(8, 0), causal=True)[7].shape == (2**19,)


@pytest.mark.parametrize("scale", [1.0, 1e3, 2e6])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_the_weights_are_those_of_the_forward_pass_that_ran(scale, convert):
    q, k, v = (convert(x) for x in arrays(2, 4, 50, 16))
    options = {"causal": True, "window": (30, 0), "scale": scale, "softcap": 3e6}
    out, weights = regard.attention(q, k, v, return_weights=True, **options)
    whole = np.asarray(weights).astype(float)
    np.testing.assert_allclose(whole.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(whole @ np.asarray(v), out, atol=2e-6)
    np.testing.assert_allclose(weights[1, 2, 17], whole[1, 2, 17], rtol=1e-4, atol=1e-7)


BITS = """
import hashlib, os, sys
import numpy as np
threads = int(sys.argv[1])
if sys.argv[2] == "torch":
    import torch
import regard
regard.set_num_threads(threads)
digest = hashlib.sha256()
rng = np.random.default_rng(0)
for dtype in (np.float32, np.float64):
    for B, H, L, D in ((3, 2, 97, 64), (2, 2, 128, 32), (1, 1, 1025, 64)):
        q, k, v = (rng.standard_normal((B, H, L, D)).astype(dtype) for _ in range(3))
        if sys.argv[2] == "torch":
            q, k, v = (torch.from_numpy(x).requires_grad_() for x in (q, k, v))
        for options in ({}, {"causal": True}, {"window": (50, 0), "softcap": 5.0}):
            out, weights = regard.attention(q, k, v, return_weights=True, **options)
            found = [out, weights.received(), weights.entropy()]
            if sys.argv[2] == "torch":
                found += torch.autograd.grad(out.square().sum(), (q, k, v))
            for x in found:
                x = x.detach().numpy() if hasattr(x, "detach") else x
                digest.update(np.ascontiguousarray(x).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_deterministic_for_any_number_of_threads(library):
    digests = set()
    for threads in ("1", "2", "3"):
        settings = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads
        )
        done = subprocess.run(
            [sys.executable, "-c", BITS, threads, library],
            env=os.environ | settings, capture_output=True, text=True, check=True,
        )  # fmt: skip
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 2, 33, 16), (4, 8, 128, 32), (2, 1, 1025, 64)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 0), "softcap": 9.0}])
def test_deterministic_in_any_batch(backend, shape, options):
    q, k, v = arrays(*shape)
    together = run(backend, q, k, v, **options)
    for b in range(shape[0]):
        alone = run(backend, *(x[b : b + 1] for x in (q, k, v)), **options)
        np.testing.assert_array_equal(together[b : b + 1], alone)
    lengths = np.arange(shape[0]) + shape[2] - 5
    padded = run(backend, q, k, v, key_lengths=lengths, **options)
    for b in range(shape[0]):
        one = run(backend, *(x[b : b + 1] for x in (q, k, v)), key_lengths=lengths[b : b + 1],
                  **options)  # fmt: skip
        np.testing.assert_array_equal(padded[b : b + 1], one)


def test_never_a_silent_fallback():
    q = np.ones((2, 3, 4), np.float32)
    with pytest.raises(regard.UnsupportedError) as caught:
        regard.attention(q, q, q, backend="torch")
    assert "torch: it takes torch tensors; convert with torch.from_numpy." in str(caught.value)
    grad = torch.ones(2, 3, 4, requires_grad=True)
    with pytest.raises(regard.UnsupportedError, match="reference: it has no gradient; detach"):
        regard.attention(grad, grad, grad, backend="reference")
    known = "backend is 'flash'; 'auto', 'kernel', 'torch', 'reference' are known"
    with pytest.raises(ValueError, match=known):
        regard.attention(q, q, q, backend="flash")
