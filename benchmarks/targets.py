"""Every instruction set that runs here beside the others: which is the fastest for which dtype.

    python benchmarks/targets.py [--threads N] [--dtype float32 bfloat16 float16 float64]
                                 [--quick] [--json FILE]

The figures of the table in ``kernels/preferences.h``, which says in what order processors try the
instruction sets. Each runs in a process of its own, forked from this one; they take turns, and a
ratio is to the one in use. The whole cost of an order is that of its first: the last rows name the
fastest of each dtype.
"""

import contextlib
import multiprocessing
import os

import common
import torch

import regard

SHAPE, QUICK = (1, 8, 1024, 64), (1, 2, 97, 16)
LONG, QUICK_LONG = 16_384, 128  # keys of one query
JOBS = ("forward", "forward, causal", "backward, causal", "one query", "summary, causal")


def job(name, dtype, quick):
    """A function that does it."""
    shape = QUICK if quick else SHAPE
    if name == "one query":
        held = (1, shape[1], QUICK_LONG if quick else LONG, shape[3])
        q, k, v = common.draw((1, shape[1], 1, shape[3]), held, held, dtype=dtype)
        return lambda: regard.attention(q, k, v)
    q, k, v, g = common.draw(*[shape] * 4, dtype=dtype)
    causal = name.endswith("causal")
    if name.startswith("summary"):
        return lambda: regard.attention(q, k, v, causal=causal, return_weights=True)[1].summary()
    if name.startswith("forward"):
        return lambda: regard.attention(q, k, v, causal=causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(regard.attention(*leaves, causal=causal), leaves, g)


def serve(target, connection, asking, threads, quick):
    """Answers each ``(job, dtype)`` with the seconds of a call, until there is none.

    Args:
        target: the instruction set.
        connection: gives the jobs, and takes the seconds.
        asking: the other ends of this connection and of those before it, which a fork has too.
            They are closed: then this process ends with the one that asks, however that ends.
        threads, quick: as of the options.
    """
    for end in asking:
        end.close()
    os.environ["REGARD_TARGET"] = target
    regard.set_num_threads(threads)
    assert common.target() == target
    runs = {}
    with contextlib.suppress(EOFError):
        while True:
            asked = connection.recv()
            if asked not in runs:
                runs[asked] = job(*asked, quick)
                runs[asked]()
            connection.send(common.turn(runs[asked], threads, quick))


class Target:
    """A process that uses one instruction set, forked before this one has chosen its own.

    Args:
        name: of the instruction set.
        options: of the benchmark.
        before: those that were started before.
    """

    def __init__(self, name, options, before):
        forking = multiprocessing.get_context("fork")
        self._connection, other = forking.Pipe()
        asking = [self._connection, *(target._connection for target in before)]
        words = name, other, asking, options.threads, options.quick
        self._process = forking.Process(target=serve, args=words, daemon=True)
        self._process.start()
        other.close()  # a process that died is an EOFError here

    def seconds(self, name, dtype):
        """Of one call, the mean of a turn."""
        self._connection.send((name, dtype))
        return self._connection.recv()

    def end(self):
        """Ends the process."""
        self._connection.close()
        self._process.join()


def measure(report, targets, options, dtype, name):
    """A row: every target's time, and the fastest."""
    rounds = 1 if options.quick else 7
    seconds = {target: [] for target in targets}
    for _ in range(rounds):
        for target, process in targets.items():
            seconds[target].append(process.seconds(name, dtype))
    measured = common.Times(seconds)
    used = common.target()
    ratios = {target: measured.ratio(target, to=used) for target in targets}
    fastest = min(targets, key=lambda target: ratios[target][0])
    cells = [f"{measured.median(x) * 1e3:.2f} ms {common.times(*ratios[x])}" for x in targets]
    report.row(
        name, dtype, *cells, fastest, job=name, dtype=dtype, seconds=measured.medians(),
        ratios={target: ratio for target, (ratio, _) in ratios.items()}, fastest=fastest,
    )  # fmt: skip


def main():
    """One table."""
    options = common.read_options(__doc__, dtypes=common.DTYPES)
    names = [name for name in common.targets() if not name.endswith("_emulated")]
    targets = {}
    for name in names:
        targets[name] = Target(name, options, targets.values())
    report = common.Report("targets", options)
    report.table(
        f"Time of (B, H, T, D) = {SHAPE}, one query on {LONG} keys, in times of the first",
        "call", "dtype", *names, "fastest",
    )  # fmt: skip
    try:
        for dtype in options.dtype:
            for name in JOBS:
                measure(report, targets, options, dtype, name)
    finally:
        for process in targets.values():
            process.end()
    report.save()


if __name__ == "__main__":
    main()
