"""What scores that spread cost: the time of scores times 30, in times of the same call times 1.

    python benchmarks/spread.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

Scores of a trained model spread over hundreds of nats, so most weights are too small for the
exponent of a float32. The forward pass, the forward pass that keeps row statistics, the backward
pass, the second pass (a summary) and one query on many keys are measured, on every instruction set
of this processor, each in a process of its own. Beside them is torch's forward pass.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import torch

import regard

SHAPE, DECODE = (1, 2, 1024, 64), (1, 2, 16384, 64)
QUICK_SHAPE, QUICK_DECODE = (1, 1, 128, 16), (1, 1, 256, 16)
SPREADS = (1.0, 30.0)


def passes(options, dtype, spread):
    """``{name: run}``: every pass over scores whose standard deviation is ``spread``."""
    shape, long = (QUICK_SHAPE, QUICK_DECODE) if options.quick else (SHAPE, DECODE)
    q, k, v, upstream = common.draw(*[shape] * 4, dtype=dtype)
    one, keys, values = common.draw((*long[:2], 1, long[3]), long, long, dtype=dtype)
    q, one = q * spread, one * spread
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def differentiable():
        with torch.enable_grad():
            return regard.attention(*leaves)

    def weights():
        return regard.attention(q, k, v, return_weights=True)[1]

    return {
        "forward": functools.partial(regard.attention, q, k, v),
        "causal": functools.partial(regard.attention, q, k, v, causal=True),
        "with statistics": weights,
        "backward": (differentiable, lambda out: torch.autograd.grad(out, leaves, upstream)),
        "summary": (weights, lambda w: w.summary(strongest=0 if options.quick else 20)),
        "decode": functools.partial(regard.attention, one, keys, values),
        "torch": lambda: common.torch_attention(q, k, v),
    }


def measure(report, options, dtype):
    """One row: the ratio of each pass."""
    runs = {}
    for spread in SPREADS:
        for name, run in passes(options, dtype, spread).items():
            runs[name, spread] = run
    measured = common.interleave(runs, options, seconds=4.0, least=3)
    names = [name for name, spread in runs if spread == 1.0]
    ratios = {name: measured.ratio((name, SPREADS[1]), to=(name, SPREADS[0])) for name in names}
    report.row(
        common.target() or "none", dtype, *(common.times(*ratios[name]) for name in names),
        target=common.target(), dtype=dtype, ratios={n: r for n, (r, _) in ratios.items()},
        seconds=measured.medians(),
    )  # fmt: skip


def on_every_target(options):
    """The rows of every instruction set, each measured by this script in another process."""
    rows = []
    for target in common.targets():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "one.json"
            command = [sys.executable, __file__, "--one", "--json", str(file)]
            command += ["--threads", str(options.threads), "--dtype", *options.dtype]
            subprocess.run(
                command + ["--quick"] * options.quick,
                env={**os.environ, "REGARD_TARGET": target}, stdout=subprocess.DEVNULL, check=True,
            )  # fmt: skip
            rows += json.loads(file.read_text("utf-8"))["tables"][0]["rows"]
    return rows


def main():
    """One table; ``--one`` measures the instruction set that is in use."""
    options = common.read_options(
        __doc__, dtypes=common.DTYPES, add=lambda parser: parser.add_argument(
            "--one", action="store_true", help="only the instruction set in use"
        ),
    )  # fmt: skip
    report = common.Report("spread", options)
    report.table(
        "Time of scores of standard deviation 30, in times of standard deviation 1",
        "target", "dtype", "forward", "forward, causal", "with statistics", "backward", "summary",
        "decode", "torch's forward",
    )  # fmt: skip
    if options.one or not common.targets():
        for dtype in options.dtype:
            measure(report, options, dtype)
    else:
        for row in on_every_target(options):
            report.row(*row.pop("cells"), **row)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
