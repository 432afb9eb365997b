"""Backward pass beside torch's, alone and together with forward.

    python benchmarks/backward.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

The three figures after a time are the errors of the gradients of query, key and value. FLOPs count
visible pairs only: 4 · D a pair forward, 10 · D backward.
"""

import functools

import common
import roofline
import torch

import regard

SHAPES = [(1, 8, 64, 64), (1, 8, 512, 64), (1, 8, 2048, 64)]
QUICK = [(1, 2, 97, 16)]
CONTESTANTS = {"regard": regard.attention, "torch": common.torch_attention}


def gradient_errors(inputs, upstream, causal):
    """Errors of the gradients of q, k and v by contestant, in errors of the plain formula's."""
    visible = common.lower(upstream.shape[2]) if causal else None

    def plainly(dtype):
        leaves = [x.detach()[0, 0].to(dtype).requires_grad_() for x in inputs]
        output = common.plain(*leaves, visible)
        return torch.autograd.grad(output, leaves, upstream[0, 0].to(dtype))

    exact = [x.numpy() for x in plainly(torch.float64)]
    low = [common.largest_error(x, y) for x, y in zip(plainly(upstream.dtype), exact)]
    found = {}
    for name, attend in CONTESTANTS.items():
        gradients = torch.autograd.grad(attend(*inputs, causal=causal), inputs, upstream)
        distances = [common.largest_error(x[0, 0], y) for x, y in zip(gradients, exact)]
        found[name] = [distance / error for distance, error in zip(distances, low)]
    return found


def measure(report, options, limits, dtype, shape, causal):
    """Two rows: both passes, and backward alone."""
    *inputs, upstream = common.draw(shape, shape, shape, shape, dtype=dtype)
    for x in inputs:
        x.requires_grad_()
    gradients = gradient_errors(inputs, upstream, causal)
    backend = common.served_by(*inputs, causal=causal)

    def backward(output):
        return torch.autograd.grad(output, inputs, upstream)

    runs, error = {}, {}
    for name, attend in CONTESTANTS.items():
        forward = functools.partial(attend, *inputs, causal=causal)
        runs["both", name] = lambda forward=forward: backward(forward())
        runs["backward", name] = forward, backward
        error["both", name] = error["backward", name] = gradients[name]
    measured = common.interleave(common.with_limits(runs, limits), options)
    for passes, flops in (("both", 14), ("backward", 10)):
        ours, theirs = (passes, "regard"), (passes, "torch")
        cells, figures = common.compared(measured, ours, theirs, error)
        flops *= shape[3] * common.pairs(shape, causal)
        rate = flops / measured.median(ours)
        shares, reached = common.shares(measured, ours, flops, limits)
        report.row(
            common.shape_name(shape), common.mask_name(causal), passes, *cells,
            f"{rate / 1e9:.0f}", *shares, backend, **figures, **reached, dtype=dtype,
            shape=shape, causal=causal, passes=passes, flops=rate, backend=backend,
        )  # fmt: skip


def main():
    """A table for each dtype."""
    options = common.read_options(__doc__, dtypes=["float32", "bfloat16"])
    report = common.Report("backward", options)
    for dtype in options.dtype:
        limits = roofline.contestants(dtype, options.threads)
        report.table(
            f"Backward, {dtype}",
            "B, H, T, D", "mask", "passes", "regard: dq dk dv", "torch: dq dk dv",
            "torch / regard", "GFLOP/s", *common.SHARES, "backend",
        )  # fmt: skip
        for shape in QUICK if options.quick else SHAPES:
            for causal in (False, True):
                measure(report, options, limits, dtype, shape, causal)
    report.save()


if __name__ == "__main__":
    main()
