"""Forward pass in float32 beside torch's, on one thread by default.

    python benchmarks/forward.py [--threads N] [--json FILE]

Process CPU time, the two interleaved in one run, the median of several. Each cell has the time and,
beside it, the largest error against float64 as a multiple of that of the plain formula in float32.
FLOPs count visible pairs only: 4 · D a pair.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import _kernels

SHAPES = [
    (1, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 8192, 64), (1, 8, 2048, 128), (1, 8, 777, 80),
    (1, 8, 1000, 96), (1, 4, 1500, 256), (8, 12, 128, 64),
]  # fmt: skip


def plain(q, k, v, causal):
    """The formula, written out."""
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return s.softmax(-1) @ v


def measure(shape, causal, clock):
    """Times in seconds, their ratio, and errors, of regard and of torch."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape) for _ in range(3))
    run = {
        "regard": lambda: regard.attention(q, k, v, causal=causal, backend="kernel"),
        "torch": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
    }
    one = [x[:1, :1] for x in (q, k, v)]
    exact = plain(*(x.double() for x in one), causal)
    low = (plain(*one, causal) - exact).abs().max()
    times = {name: [] for name in run}
    errors = {n: float((f()[:1, :1] - exact).abs().max() / low) for n, f in run.items()}
    pairs = shape[0] * shape[1] * shape[2] * ((shape[2] + 1) / 2 if causal else shape[2])
    rounds = max(5, min(40, int(1e11 / (pairs * 4 * shape[3]))))
    for _ in range(rounds):
        for name, function in run.items():
            start = clock()
            function()
            times[name].append(clock() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "shape": shape,
        "causal": causal,
        "seconds": medians,
        "error": errors,
        "ratio": statistics.median(t / r for r, t in zip(times["regard"], times["torch"])),
        "gflops": 4 * shape[3] * pairs / medians["regard"] / 1e9,
    }


def main():
    """Prints the machine, then a row for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    regard.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    machine = {
        "cpu": _kernels.cpu_name(),
        "target": _kernels.target(),
        "threads": options.threads,
        "torch": torch.__version__,
    }
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    print(
        f"{'B, H, T, D':>18}  {'':6}  {'regard':>16}  {'torch':>16}  {'ratio':>6}  {'GFLOP/s':>7}"
    )
    rows = []
    for shape in SHAPES:
        for causal in (False, True):
            row = measure(shape, causal, clock)
            rows.append(row)
            cells = [f"{row['seconds'][n] * 1e3:7.2f} ms {row['error'][n]:4.2f}x" for n in
                     ("regard", "torch")]  # fmt: skip
            print(f"{str(shape)[1:-1]:>18}  {'causal' if causal else 'full':6}  {cells[0]:>16}  "
                  f"{cells[1]:>16}  {row['ratio']:5.2f}x  {row['gflops']:7.0f}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
