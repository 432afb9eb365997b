"""The seven promises of the operator, one test or more by the name of each."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import regard
from bounds import PRECISIONS, assert_bounded, output_bounds
from definition import define
from plain_formula import Errors, attend
from regard import Edit
from ways import DIFFERENTIABLE, NAMED, by_ways


def arrays(*shape, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [scale * rng.standard_normal(shape).astype(np.float32) for _ in range(3)]


def near_ties(length, size, seed):
    """Scores of about 8 · size², of which every row has several that are nearly its largest."""
    rng = np.random.default_rng(seed)
    about = size * rng.standard_normal((1, 2, 1, 64))
    q, k, v = rng.standard_normal((3, 1, 2, length, 64))
    return [x.astype(np.float32) for x in (about + q, about + 2 / size * k, v)]


EXACT = {
    "scores of 4": lambda length, seed: arrays(1, 2, length, 64, seed=seed),
    "scores of 70": lambda length, seed: arrays(1, 2, length, 64, seed=seed, scale=4.0),
    "scores of 80,000": lambda length, seed: near_ties(length, 100.0, seed),
    "scores of a million": lambda length, seed: near_ties(length, 350.0, seed),
}


@functools.cache
def exact_and_plain(name, length):
    """Query, key and value of some draws, and both outputs."""
    seeds = range({7: 40, 97: 4, 1025: 1}[length])
    draws = [EXACT[name](length, seed) for seed in seeds]
    return [(x, attend(*(y.astype(float) for y in x))[0], attend(*x)[0]) for x in draws]


@by_ways()
@pytest.mark.parametrize("length", [7, 97, 1025])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.xdist_group("exact")  # each way is compared with the same outputs
def test_exact(way, length, name):
    """By the errors of many draws together: of one, which is larger is luck."""
    errors = Errors()
    for qkv, exact, low in exact_and_plain(name, length):
        errors.add(way.output(*qkv), exact, low)
    assert errors.ratio < 2


@functools.cache
def bounded(length, scale):
    """Query, key and value, and what an output of float32 may be in every place."""
    qkv = arrays(1, 2, length, 64, scale=scale)
    return qkv, output_bounds(*qkv, PRECISIONS["float32"])


@by_ways()
@pytest.mark.parametrize("length", [7, 97, 1025])
@pytest.mark.parametrize("scale", [1.0, 30.0, 500.0])
@pytest.mark.xdist_group("exact")
def test_exact_in_every_place(way, length, scale):
    qkv, bounds = bounded(length, scale)
    found = way.output(*qkv)
    assert found.dtype == np.float32
    assert_bounded(found, bounds)


@by_ways()
def test_exact_for_scores_of_a_million(way):
    q, k = np.float32([[1024.0]]), np.float32([[1000.0], [999.9990234375], [0.0]])
    v = np.eye(3, dtype=np.float32)
    s = q.astype(float) @ k.T.astype(float)
    w = np.exp(s - s.max())
    np.testing.assert_allclose(way.output(q, k, v, scale=1.0), w / w.sum(), rtol=1e-6)


MASKS = {
    "causal": {"causal": True},
    "window": {"window": (5, 0)},
    "key_lengths": {"key_lengths": 30},
    "mask": {"mask": np.tri(40, dtype=bool)},
    "segments": {"segments": np.arange(40) // 13},
    "intervals": {"intervals": (np.arange(40) // 10 * 10, np.arange(40) + 5)},
    "edits": {"edits": [Edit(None, slice(5, 22), slice(9, None)), Edit(1, None, 0)]},
    "all": {"causal": True, "window": (9, None), "key_lengths": 33, "query_start": -2},
}


@by_ways()
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", MASKS)
def test_invisible_means_invisible(way, poison, name):
    q, k, v = arrays(2, 40, 8)
    options = MASKS[name]
    clean = way.output(q, k, v, **options)
    w = np.asarray(way.weights(q, k, v, **options))
    hidden_somewhere = False
    for j in (0, 17, 39):
        for poisoned in ("key", "value"):
            dirty_k, dirty_v = k.copy(), v.copy()
            (dirty_k if poisoned == "key" else dirty_v)[:, j, 3] = poison
            out = way.output(q, dirty_k, dirty_v, **options)
            hidden = w[:, :, j] == 0
            hidden_somewhere |= bool(hidden.any())
            unseen = np.broadcast_to(hidden[..., None], out.shape)
            np.testing.assert_allclose(out[unseen], clean[unseen], rtol=1e-5, atol=1e-6)
    assert hidden_somewhere


@by_ways()
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_in_a_visible_place_reaches_the_output(way, poison):
    q, k, v = arrays(1, 20, 4)
    v[0, 5, 2] = poison
    out = way.output(q, k, v, causal=True)
    exact = define(q[None], k[None], v[None], causal=True)[0][0]
    np.testing.assert_array_equal(np.isnan(out), np.isnan(exact))
    np.testing.assert_array_equal(np.isposinf(out), np.isposinf(exact))
    assert not np.isfinite(out[0, 5:, 2]).any()
    k[0, 7, 0] = np.nan
    assert np.isnan(way.output(q, k, v, causal=True)[0, 7:]).all()
    assert np.isnan(way.output(q, k, v)).all()


@pytest.mark.parametrize("large", [2e38, np.inf])
@pytest.mark.parametrize("options", [{"key_lengths": 39}, {"mask": np.arange(40) < 39}])
@by_ways()
def test_invisible_means_invisible_where_a_score_would_overflow(way, options, large):
    q, k, v = arrays(2, 1, 40, 8, scale=4.0)
    clean = way.output(q, k, v, **options)
    k[0, 0, 39] = large
    out = way.output(q, k, v, **options)
    np.testing.assert_allclose(out, clean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[1], clean[1])  # the rest of the batch keeps its bits


@by_ways()
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_nan_stays_with_the_pairs_that_see_it(way, name):
    q, k, v = arrays(1, 16, 4)
    (q if name == "query" else k)[0, 2, 1] = np.nan
    documents = np.arange(16) // 8
    weights = way.weights(q, k, v, segments=documents)
    whole = np.asarray(weights)[0]
    assert (whole[:8, 8:] == 0).all()
    assert (whole[8:, :8] == 0).all()
    assert np.isfinite(np.asarray(weights.received())[0, 8:]).all()
    if way in DIFFERENTIABLE:
        inputs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
        out = way.ask(*inputs, segments=documents)
        for grad in torch.autograd.grad(out[:, 8:].sum(), inputs):
            assert grad[:, 8:].isfinite().all()


@by_ways()
def test_a_query_that_sees_nothing(way):
    q, k, v = arrays(2, 6, 4)
    mask = np.ones((2, 6, 6), bool)
    mask[1, 2] = False
    out = way.output(q, k, v, mask=mask)
    assert (out[1, 2] == 0).all()
    assert np.isfinite(out).all()
    weights = way.weights(q, k, v, mask=mask)
    assert weights.lse[1, 2] == -np.inf
    assert (weights[1, 2] == 0).all()
    nothing = way.output(q, k[:, :0], v[:, :0])
    assert nothing.shape == (2, 6, 4)
    assert (nothing == 0).all()
    for options in (
        {"key_lengths": 0},
        {"query_start": -9, "causal": True},
        {"window": (0, 0), "query_start": 50},
        {"sinks": np.ones(2, np.float32), "key_lengths": 0},
    ):
        assert (way.output(q, k, v, **options) == 0).all()


@by_ways(*DIFFERENTIABLE)
def test_a_query_that_sees_nothing_has_gradient_zero(way):
    q, k, v = (torch.randn(2, 6, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 6, 6, requires_grad=True)
    sinks = torch.randn(2, requires_grad=True)
    mask = torch.ones(2, 6, 6, dtype=torch.bool)
    mask[:, 2] = False
    out = way.ask(q, k, v, mask=mask, bias=bias, sinks=sinks)
    poisoned = torch.where(torch.arange(6)[:, None] == 2, torch.nan, 1.0).expand(2, 6, 4)
    grads = torch.autograd.grad(out, (q, k, v, bias, sinks), poisoned)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, 2] == 0).all()
    assert (grads[3][:, 2] == 0).all()
    every = torch.autograd.grad(way.ask(q, k, v, key_lengths=0).sum(), (q, k, v), allow_unused=True)
    assert all((g == 0).all() for g in every)


@by_ways()
def test_linear_memory(way):
    """No array of Lq × Lk: 2**36 weights would be 256 GiB; more is in test_memory.py."""
    q, k = np.ones((2**17, 1), np.float32), np.ones((2**19, 1), np.float32)
    v = np.arange(2**19, dtype=np.float32)[:, None] % 2
    out = way.output(q[:64], k, v, window=(8, 0))
    np.testing.assert_allclose(out, 0.5, atol=0.06)
    assert way.weights(q[:64], k, v, window=(8, 0))[7].shape == (2**19,)
    assert regard.AttentionWeights(q, k, window=(8, 0), causal=True)[7].shape == (2**19,)


@pytest.mark.parametrize("scale", [1.0, 1e3, 2e6])
@by_ways()
def test_the_weights_are_those_of_the_forward_pass_that_ran(way, scale):
    q, k, v = arrays(2, 4, 50, 16)
    options = {"causal": True, "window": (30, 0), "scale": scale, "softcap": 3e6}
    out, weights = way.output(q, k, v, **options), way.weights(q, k, v, **options)
    whole = np.asarray(weights).astype(float)
    np.testing.assert_allclose(whole.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(whole @ v, out, atol=2e-6)
    np.testing.assert_allclose(weights[1, 2, 17], whole[1, 2, 17], rtol=1e-4, atol=1e-7)


BITS = """
import hashlib, os, sys
import numpy as np
if sys.argv[2] == "torch":
    import torch
import regard
def digest_of(backend, threads):
    regard.set_num_threads(threads)
    if "torch" in sys.modules:
        torch.set_num_threads(threads)
    digest = hashlib.sha256()
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        for B, H, L, D in ((3, 2, 97, 64), (2, 2, 128, 32), (1, 1, 1025, 64)):
            q, k, v = (rng.standard_normal((B, H, L, D)).astype(dtype) for _ in range(3))
            if sys.argv[2] == "torch":
                q, k, v = (torch.from_numpy(x).requires_grad_() for x in (q, k, v))
            for options in ({}, {"causal": True}, {"window": (50, 0), "softcap": 5.0}):
                options |= {"backend": backend, "return_weights": True}
                out, weights = regard.attention(q, k, v, **options)
                found = [out]
                if backend != "torch":
                    found += [weights.received(), weights.entropy()]
                if (sys.argv[2], backend) == ("torch", "kernel"):
                    found += torch.autograd.grad(out.square().sum(), (q, k, v))
                for x in found:
                    x = x.detach().numpy() if hasattr(x, "detach") else x
                    digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()
for backend in sys.argv[3].split(","):
    print(*(digest_of(backend, int(threads)) for threads in sys.argv[1].split(",")))
"""


@functools.cache
def digests(library, *backends):
    """For each backend, a digest of its outputs on one, two and three threads."""
    found = {backend: [] for backend in backends}
    # NumPy's library of matrix products takes its threads when it is loaded.
    for threads in ("1,2,3",) if library == "torch" else ("1", "2", "3"):
        settings = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads[-1]
        )
        done = subprocess.run(
            [sys.executable, "-c", BITS, threads, library, ",".join(backends)],
            env=os.environ | settings, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for backend, line in zip(backends, done.stdout.splitlines(), strict=True):
            found[backend] += line.split()
    return found


@by_ways(*NAMED)
@pytest.mark.xdist_group("bits")  # one process that loads torch serves both of its backends
def test_deterministic_for_any_number_of_threads(way):
    """Of the torch backend the output alone: torch's own gradient and long sums are not."""
    backends = ("kernel", "torch") if way.library == "torch" else (way.backend,)
    found = digests(way.library, *backends)[way.backend]
    assert len(found) == 3
    assert len(set(found)) == 1


@by_ways()
@pytest.mark.parametrize("shape", [(3, 2, 33, 16), (4, 8, 128, 32), (2, 1, 1025, 64)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 0), "softcap": 9.0}])
def test_deterministic_in_any_batch(way, shape, options):
    q, k, v = arrays(*shape)
    together = way.output(q, k, v, **options)
    for b in range(shape[0]):
        alone = way.output(*(x[b : b + 1] for x in (q, k, v)), **options)
        np.testing.assert_array_equal(together[b : b + 1], alone)
    lengths = np.arange(shape[0]) + shape[2] - 5
    padded = way.output(q, k, v, key_lengths=lengths, **options)
    for b in range(shape[0]):
        one = way.output(*(x[b : b + 1] for x in (q, k, v)), key_lengths=lengths[b : b + 1],
                  **options)  # fmt: skip
        np.testing.assert_array_equal(padded[b : b + 1], one)


def test_never_a_silent_fallback():
    q = np.ones((2, 3, 4), np.float32)
    with pytest.raises(regard.UnsupportedError) as caught:
        regard.attention(q, q, q, backend="torch")
    assert str(caught.value) == (
        "attention: backend='torch' does not take this call."
        "\n  torch: it takes torch tensors; convert with torch.from_numpy."
    )
    grad = torch.ones(2, 3, 4, requires_grad=True)
    with pytest.raises(regard.UnsupportedError, match="reference: it has no gradient; detach"):
        regard.attention(grad, grad, grad, backend="reference")
    names = "'auto', 'kernel', 'torch', 'fused', 'triton', 'reference'"
    known = f"backend is 'flash'; {names} are known"
    with pytest.raises(ValueError, match=known):
        regard.attention(q, q, q, backend="flash")
