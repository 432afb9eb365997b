"""Memory is linear in the length: 32,768 tokens of one head would be 4.3 GB as a float32 matrix."""

import functools
import subprocess
import sys

import pytest

# Each question runs in a process of its own, whose high-water mark is read before and after; they
# are forked from one that has loaded the library.
PROBE = """
import os, resource, sys
import numpy as np
import regard
library, *questions = sys.argv[1:]
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 32768, 16), dtype=np.float32) for _ in range(3))
options = {"causal": True}
if library == "torch":
    import torch
    q, k, v = (torch.from_numpy(x) for x in (q, k, v))
    import regard._backends.torch_ops  # as the first call would, and the first gradient
def run(what, q, k, v):
    if what == "attention":
        regard.attention(q, k, v, **options)
    elif what == "gradient":
        for x in (q, k, v):
            x.requires_grad_()
        regard.attention(q, k, v, **options).sum().backward()
    elif what == "every option":
        n = q.shape[1]
        extra = {"window": (n // 2, 0), "dropout": 0.1, "seed": 1, "softcap": 20.0,
                 "segments": np.arange(n) // (n // 4), "key_lengths": n - 1,
                 "edits": [regard.Edit(0, slice(n // 3, None), slice(n // 2))]}
        if library == "torch":
            extra["segments"] = torch.from_numpy(extra["segments"])
            extra["sinks"] = torch.zeros(1, requires_grad=True)
            regard.attention(q, k, v[..., :8], **extra).sum().backward()
        else:
            regard.attention(q, k, v[..., :8], **extra)
    elif what == "gradient of weights":  # of 8,192 tokens: a matrix has 268 MB
        q, k = (x[:, :8192].clone().requires_grad_() for x in (q, k))
        weights = regard.AttentionWeights(q, k, **options)
        (weights.entropy().sum() + weights.diagonals().values.square().sum()).backward()
    elif what == "second derivatives":
        inputs = [x[:, :6144].clone().requires_grad_() for x in (q, k, v)]
        out = regard.attention(*inputs, causal=True, softcap=20.0)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
    elif what == "watch":
        class Model(torch.nn.Module):
            def forward(self, *arrays):
                return regard.attention(*arrays, **options).sum()
        with regard.watch(Model()) as watch:  # a dense matrix would be 268 MB
            watch._model(*(x[:, :8192].requires_grad_() for x in (q, k, v))).backward()
        assert watch.last["distance"].shape == (1, 1)
    else:
        weights = regard.AttentionWeights(q, k, **options)
        weights.summary()
        weights[0, 17], weights.pool((512, 512), "mass", rows=slice(0, 4096))
for what in questions:
    if os.fork():
        if os.wait()[1]:
            sys.exit(what)
        continue
    run(what, *(x[:, :64] for x in (q, k, v)))  # what a first call loads is not its memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(what, q, k, v)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, flush=True)
    os._exit(0)
"""
QUESTIONS = {
    "numpy": ["attention", "every option", "reductions"],
    "torch": [
        "attention",
        "gradient",
        "every option",
        "reductions",
        "gradient of weights",
        "watch",
        "second derivatives",
    ],
}


@functools.cache
def megabytes(library):
    """What each question took."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, library, *QUESTIONS[library]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(QUESTIONS[library], map(float, done.stdout.split()), strict=True))


@pytest.mark.parametrize(
    ("library", "what"),
    [
        pytest.param(library, what, marks=pytest.mark.xdist_group(f"memory in {library}"))
        for library, questions in QUESTIONS.items()
        for what in questions
        if what != "second derivatives"  # which have a bound of their own
    ],
)
def test_32768_tokens_stay_within_200_megabytes(library, what):
    assert megabytes(library)[what] < 200


@pytest.mark.xdist_group("memory in torch")
def test_second_derivatives_of_6144_tokens_stay_within_140_megabytes():
    """One matrix would be 151 MB, and the plain formula keeps many."""
    assert megabytes("torch")["second derivatives"] < 140
