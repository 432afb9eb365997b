"""What the layout of the arrays costs: views, in times of contiguous arrays (B, H, T, D).

    python benchmarks/layouts.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

Models pass views: projections ``(B, T, H, D)`` with the axes of heads and tokens exchanged, or the
thirds of one fused projection ``(B, T, 3, H, D)``. A row of a head then lies far from the next.
The forward pass, the backward pass and the second pass (a summary) are measured, causal.
"""

import common
import torch

import regard

LENGTHS, SIZES, HEADS = (1024, 4096), (32, 64, 128), 3
QUICK_LENGTHS, QUICK_SIZES = (64,), (16,)
VIEWS = ("view", "fused")


def layouts(shape, dtype):
    """``{name: (q, k, v)}``: the same numbers, laid out in three ways."""
    B, H, T, D = shape
    (fused,) = common.draw((B, T, 3, H, D), dtype=dtype)
    thirds = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in thirds]
    return {"contiguous": [x.contiguous() for x in thirds], "view": apart, "fused": thirds}


def passes(name, q, k, v):
    """``{(pass, name): run}`` over arrays that are laid out in one way."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    upstream = torch.ones(q.shape, dtype=q.dtype)

    def differentiable():
        with torch.enable_grad():
            return regard.attention(*leaves, causal=True)

    def weights():
        return regard.attention(q, k, v, causal=True, return_weights=True)[1]

    return {
        ("forward", name): lambda: regard.attention(q, k, v, causal=True),
        ("backward", name): (differentiable, lambda x: torch.autograd.grad(x, leaves, upstream)),
        ("summary", name): (weights, lambda w: w.summary(strongest=0)),
        ("torch", name): lambda: common.torch_attention(q, k, v, causal=True),
    }


def measure(report, options, shape, dtype):
    """One row: each pass over each view, in times of contiguous arrays."""
    runs = {}
    for name, arrays in layouts(shape, dtype).items():
        runs |= passes(name, *arrays)
    outputs = [run() for (what, _), run in runs.items() if what == "forward"]
    assert all(torch.equal(x, outputs[0]) for x in outputs), "a layout changes a bit"
    measured = common.interleave(runs, options, seconds=6.0)
    ratios = {
        (what, name): measured.ratio((what, name), to=(what, "contiguous"))
        for what, name in runs
        if name != "contiguous"
    }
    forward = measured.median(("forward", "contiguous"))
    to_torch = measured.ratio(("torch", "fused"), to=("forward", "fused"))
    order = [(what, name) for what in ("forward", "backward", "summary") for name in VIEWS]
    report.row(
        f"T = {shape[2]}, D = {shape[3]}", dtype, common.ms(forward),
        *(common.times(*ratios[key]) for key in order), common.times(*to_torch),
        shape=shape, dtype=dtype, seconds=measured.medians(), to_torch=to_torch[0],
        ratios={" ".join(key): ratio for key, (ratio, _) in ratios.items()},
    )  # fmt: skip


def main():
    """One table."""
    options = common.read_options(__doc__, dtypes=("float32",))
    report = common.Report("layouts", options)
    report.table(
        "Time of views, in times of contiguous arrays; torch's forward pass in times of regard's",
        "causal, 3 heads", "dtype", "forward, contiguous", "forward, view", "forward, fused",
        "backward, view", "backward, fused", "summary, view", "summary, fused", "torch, fused",
    )  # fmt: skip
    lengths, sizes = (QUICK_LENGTHS, QUICK_SIZES) if options.quick else (LENGTHS, SIZES)
    for dtype in options.dtype:
        for T in lengths:
            for D in sizes:
                measure(report, options, (1, HEADS, T, D), dtype)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
