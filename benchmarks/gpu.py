"""On a GPU: outputs, gradients, weights and heatmaps, beside cuDNN and FlashAttention of torch.

    python benchmarks/gpu.py OUT.json [--minutes 9] [--quick] [--device cuda] [--only forward ...]

What is compiled is compiled first, by a process for each part, side by side. Contestants take turns
call by call, with a cold L2; times are the device's, between two events.
Shares are of the rate of a product of bfloat16 matrices in the same run. OUT.json is written anew
after each row, so that a run that is cut off has given what it measured; rows that would begin
after the minutes are left out and named. With TRITON_INTERPRET=1, ``--quick --device cpu`` shows
that it runs, without a GPU.
"""

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import common
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import regard

COLD_BYTES = 256 * 2**20  # more than any L2
SECONDS = 0.4  # about what all rounds of a row may take
TOKENS, WIDTH = 16_384, 2048  # of a batch; of all heads


class Clock:
    """Times of runs on one device, each a median of rounds in which all take turns."""

    def __init__(self, device, once):
        self._is_gpu, self._once = device.type != "cpu", once
        size = COLD_BYTES if self._is_gpu else 1024
        self._cold = torch.empty(size, dtype=torch.uint8, device=device)

    def _time(self, run):
        """Seconds; a function that gives them, where only the device knows."""
        self._cold.zero_()
        if not self._is_gpu:
            start = time.perf_counter()
            run()
            took = time.perf_counter() - start
            return lambda: took
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def _wait(self):
        if self._is_gpu:
            torch.cuda.synchronize()

    def on_the_host(self, run):
        """Seconds of one run until the device is done, all that is compiled with it."""
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def of(self, runs):
        """Medians by name."""
        for run in runs.values():
            run()  # which compiles
        warm = {name: self._time(run) for name, run in runs.items()}
        self._wait()
        rounds = int(SECONDS / max(sum(took() for took in warm.values()), 1e-6))
        rounds = 1 if self._once else max(3, min(30, rounds))
        times = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(self._time(run))
        self._wait()
        return {name: statistics.median(took() for took in own) for name, own in times.items()}


class Bench:
    """What all parts share: the device, sizes, clock and report."""

    def __init__(self, options):
        self.device, self.quick = torch.device(options.device), options.quick
        self.end = time.monotonic() + 60 * options.minutes - 20
        self.clock, self.left_out = Clock(self.device, self.quick or options.once), []
        self.dtype = torch.float16 if options.device == "cpu" else torch.bfloat16
        self.report = common.Report("gpu", options, packages=("triton",))
        self.report.result["machine"]["clock"] = "events of the device"
        name = "none" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self.report.result["machine"]["gpu"] = name
        self.failed = self.report.result["failed"] = {}
        self.peak = self.bytes = math.nan

    def row(self, name, measure):
        """One row of the table, by a function that gives its cells and figures."""

        def add():
            cells, figures = measure()
            self.report.row(name, *cells, **figures)

        self.attempt(name, add)

    def attempt(self, name, run):
        """Runs what has a name while there is time, and saves; the others run if it fails."""
        if time.monotonic() > self.end:
            self.left_out.append(name)
            self.report.result["left_out"] = self.left_out
        else:
            try:
                run()
            except Exception as error:
                traceback.print_exc()
                self.failed[name] = f"{type(error).__name__}: {error}"[:500]
        self.report.save()

    def draw(self, *shapes, dtype=None):
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = dtype or self.dtype
        return [torch.randn(shape, device=self.device, generator=generator).to(dtype)
                for shape in shapes]  # fmt: skip

    def qkv(self, length, head_size, dtype=None):
        """Of as many heads and sequences as give ``TOKENS`` of ``WIDTH``."""
        heads, batch = (2, 1) if self.quick else (WIDTH // head_size, max(1, TOKENS // length))
        return self.draw(*3 * [(batch, heads, length, head_size)], dtype=dtype)

    def lengths(self, *lengths):
        return [40] if self.quick else lengths

    def head_sizes(self):
        return [16] if self.quick else [64, 128]

    def share(self, flops, seconds):
        return f"{flops / seconds / self.peak:.2f}"


def fused(kernel, q, k, v, causal):
    """torch's operator, by one of its kernels."""
    if q.is_cpu:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(kernel):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def contestants(q, k, v, causal, own=("auto", "triton", "torch")):
    """Outputs: torch's, and regard's by its backends."""
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    runs = {n: lambda x=x: fused(x, q, k, v, causal) for n, x in kernels.items()}
    for name in own:
        runs[name] = lambda name=name: regard.attention(q, k, v, causal=causal, backend=name)
    return {name: run for name, run in runs.items() if runs_here(run)}


def runs_here(run):
    """Whether a kernel of torch takes the tensors of this GPU."""
    try:
        run()
    except RuntimeError as error:
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            return False
        raise
    return True


def cells_of(times, names):
    return [f"{times[name] * 1e3:.3f}" if name in times else "-" for name in names]


def peaks(bench):
    """The rates that shares are of."""
    bench.report.table("Rates", "", "ms", "rate")
    n = 64 if bench.quick else 8192
    a, b = bench.draw((n, n), (n, n))
    x = torch.empty(1024 if bench.quick else 2**29, dtype=torch.uint8, device=bench.device)

    def product():
        took = bench.clock.of({"product": lambda: a @ b})["product"]
        bench.peak = 2 * n**3 / took
        return [f"{took * 1e3:.3f}", f"{bench.peak / 1e12:.0f} TFLOP/s"], {"rate": bench.peak}

    def copy():
        took = bench.clock.of({"copy": lambda: x.clone()})["copy"]
        bench.bytes = 2 * x.nbytes / took
        return [f"{took * 1e3:.3f}", f"{bench.bytes / 1e12:.2f} TB/s"], {"rate": bench.bytes}

    bench.row("product of matrices", product)
    bench.row("copy", copy)


NAMES = ("cudnn", "flash", "auto", "triton", "torch")


def forward(bench):
    """Plain outputs; ``triton`` has row statistics with them."""
    bench.report.table("Forward, ms", "", *NAMES, "auto/best", "triton: best", "of peak")
    for head_size in bench.head_sizes():
        for length in bench.lengths(512, 4096, 16_384):
            for causal in (True, False):

                def measure(head_size=head_size, length=length, causal=causal):
                    q, k, v = bench.qkv(length, head_size)
                    times = bench.clock.of(contestants(q, k, v, causal))
                    best = min(times[n] for n in ("cudnn", "flash") if n in times)
                    flops = 4 * head_size * common.pairs(q.shape, causal)
                    more = [f"{times['auto'] / best:.2f}", f"{best / times['triton']:.2f}"]
                    more.append(bench.share(flops, times["triton"]))
                    return [*cells_of(times, NAMES), *more], {"seconds": times, "flops": flops}

                mask = common.mask_name(causal)
                bench.row(f"T={length} D={head_size} {mask}", measure)


def options(bench):
    """What options cost for each visible pair, of what it costs in a plain call."""
    bench.report.table("Options of the triton backend, causal", "", "ms", "per pair, of plain")
    length = bench.lengths(8192)[0]
    q, k, v = bench.qkv(length, bench.head_sizes()[-1])
    heads, window = q.shape[1], length // 8
    documents = torch.arange(length, device=bench.device) // window
    (bias,) = bench.draw((heads, 1, length))
    given = {
        "plain": {}, "window": {"window": (window - 1, 0)}, "packed": {"segments": documents},
        "softcap": {"softcap": 20.0}, "bias": {"bias": bias},
        "sinks": {"sinks": torch.zeros(heads, device=bench.device)},
        "dropout": {"dropout": 0.1, "seed": 1},
    }  # fmt: skip
    pairs = dict.fromkeys(given, length * (length + 1) / 2)
    pairs["window"] = window * length - window * (window - 1) / 2
    pairs["packed"] = length * (window + 1) / 2
    first = {}

    def measure(name):
        run = lambda: regard.attention(q, k, v, causal=True, backend="triton", **given[name])  # noqa: E731
        took = bench.clock.of({name: run})[name]
        first.setdefault("plain", took)
        share = took / pairs[name] * pairs["plain"] / first["plain"]
        return [f"{took * 1e3:.3f}", f"{share:.2f}"], {"seconds": took, "per_pair": share}

    for name in given:
        bench.row(name, lambda name=name: measure(name))


def backward(bench):
    """Gradients of query, key and value; torch's also where they must have the same bits."""
    names = ("cudnn", "flash", "flash, same bits", "triton")
    bench.report.table("Backward, ms", "", *names, "triton: best", "triton: same bits")
    for head_size in bench.head_sizes():
        for length in bench.lengths(4096, 16_384):

            def measure(head_size=head_size, length=length):
                q, k, v = bench.qkv(length, head_size)
                (grad,) = bench.draw(q.shape)
                leaves = [x.requires_grad_() for x in (q, k, v)]
                runs = {}
                for name, forward in contestants(*leaves, True, own=["triton"]).items():
                    out = forward()
                    runs[name] = lambda out=out: torch.autograd.grad(
                        out, leaves, grad, retain_graph=True
                    )
                if "flash" in runs:
                    runs["flash, same bits"] = lambda run=runs["flash"]: with_same_bits(run)
                times = bench.clock.of(runs)
                best = min(times[name] for name in ("cudnn", "flash") if name in times)
                same = times.get("flash, same bits", math.nan)
                more = [f"{x / times['triton']:.2f}" for x in (best, same)]
                return [*cells_of(times, names), *more], {"seconds": times}

            bench.row(f"T={length} D={head_size} causal", measure)


def with_same_bits(run):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(before)


QUESTIONS = {
    "lse": lambda w: w.summary(only=["lse"]),
    "heatmap": lambda w: w.pool((512, 512)),
    "masses": lambda w: w.pool((512, 512), how="mass"),
    "entropy, distance, received": lambda w: w.summary(only=["entropy", "distance", "received"]),
    "top 8": lambda w: w.topk(8),
    "strongest 20": lambda w: w.strongest(20),
    "summary": lambda w: w.summary(topk=8, strongest=20, pool=(512, 512)),
}


def second_pass(bench):
    """What is asked of weights whose row statistics are known, in forward passes of its own."""
    bench.report.table("Weights, causal", "", "ms", "forward passes")
    length = bench.lengths(8192)[0]
    for head_size in bench.head_sizes():
        q, k, v = bench.qkv(length, head_size)

        def own(q=q, k=k, v=v):
            return regard.attention(q, k, v, causal=True, backend="triton", return_weights=True)

        for name, ask in QUESTIONS.items():

            def measure(ask=ask, own=own):
                _, weights = own()
                weights.lse  # noqa: B018 - the statistics are there
                times = bench.clock.of({"forward": own, "asked": lambda: ask(weights)})
                share = times["asked"] / times["forward"]
                return [f"{times['asked'] * 1e3:.3f}", f"{share:.2f}"], {"seconds": times}

            bench.row(f"{name}, D={head_size}", measure)


def picture(bench):
    """The heatmap of one head of a long text, from its query and key."""
    bench.report.table("Heatmap of 512 x 512, one head of 64, causal", "", "ms", "with the copy")
    length, size = (60, (9, 9)) if bench.quick else (100_000, (512, 512))
    q, k = bench.draw(*2 * [(1, 1, length, 64)])

    def show():
        return regard.AttentionWeights(q, k, causal=True, backend="triton").pool(size)

    def measure():
        times = bench.clock.of({"device": show, "with copy": lambda: show().cpu()})
        return cells_of(times, times), {"seconds": times}

    bench.row(f"{length} tokens", measure)


def decode(bench):
    """One query, whose keys are split, and the first call with one key more."""
    titles = *NAMES, "GB/s of auto", "of copy", "auto, new length"
    bench.report.table("One query, 32 heads on 8 of 128, ms", "", *titles)
    for length, batch in ((600, 2), (70, 1)) if bench.quick else ((32_768, 1), (4096, 16)):

        def measure(length=length, batch=batch):
            q, k, v = bench.draw((batch, 32, 1, 128), *2 * [(batch, 8, length, 128)])
            repeated = [x.repeat_interleave(4, 1) for x in (k, v)]
            times = bench.clock.of(
                contestants(q, *repeated, False, own=())
                | {n: lambda n=n: regard.attention(q, k, v, backend=n) for n in NAMES[2:]}
            )
            rate = 2 * k.nbytes / times["auto"]
            longer = bench.draw(*2 * [(batch, 8, length + 1, 128)])
            first = bench.clock.on_the_host(lambda: regard.attention(q, *longer))
            more = [f"{rate / 1e9:.0f}", f"{rate / bench.bytes:.2f}", f"{first * 1e3:.3f}"]
            figures = {"seconds": times, "bytes_per_second": rate, "first_seconds": first}
            return [*cells_of(times, NAMES), *more], figures

        bench.row(f"{length} keys, batch of {batch}", measure)


def exactness(bench):
    """Errors, of the plain formula's in the same dtype."""
    bench.report.table("Error, in errors of the plain formula", "", "auto", "triton", "ms")
    for dtype in (torch.float32, bench.dtype):

        def measure(dtype=dtype):
            q, k, v = bench.qkv(bench.lengths(2048)[0], bench.head_sizes()[0], dtype)
            runs = contestants(q, k, v, False, own=("auto", "triton"))
            some = slice(1), slice(2)  # of the heads: the plain formula is the host's
            outputs = {name: runs[name]()[some].cpu() for name in ("auto", "triton")}
            error = common.errors(outputs, *(x[some].cpu() for x in (q, k, v)))
            took = bench.clock.of({"triton": runs["triton"]})["triton"]
            cells = [f"{error[name]:.2f}" for name in outputs]
            return [*cells, f"{took * 1e3:.3f}"], {"error": error, "seconds": took}

        bench.row(str(dtype).removeprefix("torch."), measure)


def everything(q, k, v, grad):
    """Tensors that must have the same bits in every run."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, weights = regard.attention(*leaves, causal=True, return_weights=True)
    found = [out, *torch.autograd.grad(out, leaves, grad), *weights.topk(8)]
    found += [weights.entropy(), weights.received(), weights.received(how="max")]
    found += [weights.pool((9, 9)), weights.pool((9, 9), how="mass"), *weights.strongest(9)]
    with torch.no_grad():
        return [x.detach() for x in found] + [regard.attention(q, k, v, causal=True)]


def same_bits(bench):
    """Ten runs, and one element of the batch alone."""
    bench.report.table("Equal bits", "", "equal", "of")
    q, k, v = bench.qkv(bench.lengths(2048)[0], bench.head_sizes()[-1])
    if bench.quick:
        q, k, v = (x.repeat(2, 1, 1, 1) for x in (q, k, v))
    (grad,) = bench.draw(q.shape)
    first = everything(q, k, v, grad)

    def again():
        runs = 2 if bench.quick else 10
        same = sum(all(map(same_tensor, first, everything(q, k, v, grad))) for _ in range(runs))
        return [f"{same}", f"{runs}"], {"equal": same, "runs": runs}

    def alone():
        found = everything(*(x[:1] for x in (q, k, v, grad)))
        same = sum(same_tensor(x[:1], y) for x, y in zip(first, found))
        return [f"{same}", f"{len(found)}"], {"equal": same, "runs": len(found)}

    bench.row("runs", again)
    bench.row("results of one element of the batch", alone)


def same_tensor(x, y):
    return torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))


def graphs(bench):
    """One capture of each in a CUDA graph, which no wait of the host would allow."""
    bench.report.table("CUDA graph", "", "largest difference of a replay")
    q, k, v = bench.qkv(bench.lengths(512)[0], bench.head_sizes()[0])
    runs = {
        "auto": lambda: regard.attention(q, k, v),
        "auto, causal": lambda: regard.attention(q, k, v, causal=True),
        "softcap": lambda: regard.attention(q, k, v, causal=True, softcap=20.0),
        "heatmap": lambda: regard.AttentionWeights(q, k, causal=True).pool((9, 9)),
    }

    def measure(run):
        expected = run()
        if bench.device.type == "cpu":
            return ["-"], {}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        graph.replay()
        torch.cuda.synchronize()
        difference = (found.float() - expected.float()).nan_to_num().abs().max().item()
        return [f"{difference:g}"], {"difference": difference}

    for name, run in runs.items():
        bench.row(name, lambda run=run: measure(run))


PARTS = {
    "peaks": peaks, "forward": forward, "picture": picture, "decode": decode, "backward": backward,
    "second_pass": second_pass, "same_bits": same_bits, "graphs": graphs, "exactness": exactness,
    "options": options,
}  # fmt: skip


def measure(bench, names, parts):
    """Some of the parts."""
    for name in names:
        with torch.enable_grad() if name in ("backward", "same_bits") else torch.no_grad():
            bench.attempt(name, lambda name=name: parts[name](bench))


def compile_beforehand(asked):
    """Runs each part once, in processes side by side: Triton keeps what it compiled on disk."""
    begin = [sys.executable, __file__]
    end = ["--once", "--device", asked.device, "--minutes", str(asked.minutes), "--only"]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            subprocess.Popen([*begin, f"{folder}/{part}.json", *end, part],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for part in asked.only
        ]  # fmt: skip
        for run in runs:
            run.wait()


def main():
    """All parts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, metavar="OUT.json", help="where the figures are written")
    parser.add_argument("--minutes", type=float, default=9.0, help="in which it must end")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, once: does it run?")
    parser.add_argument("--once", action="store_true", help="each run once: what is to be compiled")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    asked = parser.parse_args()
    asked.threads = 1
    bench = Bench(asked)
    if bench.device.type != "cpu" and not (asked.quick or asked.once):
        compile_beforehand(asked)
    with contextlib.suppress(KeyboardInterrupt):
        measure(bench, ["peaks", *(name for name in asked.only if name != "peaks")], PARTS)
    bench.report.save()
    for name, error in bench.failed.items():
        print(f"failed: {name}: {error}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
