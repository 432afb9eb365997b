"""What the benchmarks share: options, clocks, interleaving, errors, tables and JSON.

One thread is measured in process CPU time, which a busy machine does not lengthen; more threads by
the wall clock. What is compared takes turns in one run, and a ratio is the median of the rounds'
ratios. A figure after a time, as in ``6.45 ms 0.85x``, is the largest error against the exact
result, as a multiple of the error that the plain formula makes in the same dtype.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import processors
import torch
from torch.nn.functional import scaled_dot_product_attention

import regard

DTYPES = ("float32", "bfloat16", "float16", "float64")
BACKENDS = ("kernel", "torch", "reference")  # in the order in which "auto" asks them
RESULTS = processors.RESULTS
CORES = len(os.sched_getaffinity(0))


def read_options(doc, dtypes=(), threads=1, add=lambda parser: None):
    """The command line: the script's first line, and what every script understands."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, once: does it run?")
    parser.add_argument(
        "--json", type=Path, nargs="?", const=RESULTS, metavar="FILE",
        help="write the figures as well: here, or into the results of this processor",
    )  # fmt: skip
    if dtypes:
        parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(dtypes))
    add(parser)
    options = parser.parse_args()
    if options.json == RESULTS:
        variant = _variant(options.threads != threads)
        options.json = processors.folder(machine_of()) / f"{Path(parser.prog).stem}{variant}.json"
    regard.set_num_threads(options.threads)
    return options


class Report:
    """The tables of one script: printed row by row, and written as JSON at the end.

    Args:
        name: the script's.
        options: of ``read_options``.
        packages: whose versions matter besides NumPy's, torch's and regard's.
    """

    def __init__(self, name, options, packages=()):
        machine = machine_of(options.threads, ("numpy", "torch", "regard", *packages))
        self.path = options.json
        self.result = {"benchmark": name, "machine": machine, "tables": []}
        print(machine_line(self.result["machine"]))

    def table(self, title, *columns):
        """Begins a table; the first column is its rows' name."""
        self._table = {"title": title, "columns": columns, "rows": [], "notes": []}
        self.result["tables"].append(self._table)

    def row(self, *cells, **figures):
        """Prints a row of text, and keeps the figures it was made of."""
        columns = self._table["columns"]
        assert len(cells) == len(columns), (cells, columns)
        if not self._table["rows"]:
            self._widths = [max(len(name), len(cell) + 1) for name, cell in zip(columns, cells)]
            self._widths[0] = max(self._widths[0], 26)
            print(f"\n{self._table['title']}\n{self._line(columns)}")
        self._table["rows"].append({"cells": cells, **figures})
        print(self._line(cells), flush=True)

    def note(self, text):
        """Adds a note to the table, prints it at once, and returns its mark; each text once."""
        notes = self._table["notes"]
        if text not in notes:
            notes.append(text)
            print(f"[{len(notes)}] {text}", flush=True)
        return f"[{notes.index(text) + 1}]"

    def _line(self, cells):
        first, *others = (
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(cells, self._widths))
        )
        return "  ".join((first, *others)).rstrip()

    def save(self):
        """Writes the JSON file, where one was asked for."""
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")


def target():
    """The instruction set that the kernels use, or None where they were not compiled."""
    try:
        from regard import _kernels
    except ImportError:
        return None
    return _kernels.target()


def targets():
    """The instruction sets that can be asked for here; none where the kernels were not compiled."""
    try:
        from regard import _kernels
    except ImportError:
        return []
    return _kernels.targets()


def _variant(other_threads):
    """What follows a script's name where it was run otherwise than by itself."""
    asked = os.environ.get("REGARD_TARGET")
    return ("-threads" if other_threads else "") + (f"-{asked}" if asked else "")


def machine_of(threads=1, packages=()):
    """The processor, how it was used, and versions: the head of every result."""
    try:
        from regard import _kernels
    except ImportError:  # installed without a C++ compiler
        cpu, numbers = platform.processor() or platform.machine(), ("", 0, 0)
    else:
        cpu, numbers = _kernels.cpu_name(), _kernels.processor()
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    clock = "process CPU time" if threads == 1 else "wall clock"
    return {
        "cpu": cpu,
        "architecture": processors.architecture(*numbers),
        "target": target(),
        "threads": threads,
        "clock": clock,
        "versions": versions,
    }


def machine_line(machine):
    """``AMD EPYC (Zen 5), avx512_bf16, 1 thread, process CPU time; python 3.11.2, ...``."""
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    kernels = machine["target"] or "no compiled module"
    return f"{processors.name(machine)}, {kernels}, {threads}, {machine['clock']}; {versions}"


class Times:
    """Seconds of everything that was measured, a list of rounds under each name."""

    def __init__(self, seconds):
        self.seconds = seconds

    def median(self, name):
        """The median time, in seconds."""
        return statistics.median(self.seconds[name])

    def medians(self):
        """Every median, for the JSON."""
        return {str(name): self.median(name) for name in self.seconds}

    def ratio(self, name, to):
        """``(median, half the distance of the quartiles)`` of name's time over to's."""
        ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[to])]
        low, middle, high = statistics.quantiles(ratios * (2 if len(ratios) == 1 else 1), n=4)
        return middle, (high - low) / 2


TURN = 0.02  # seconds


def interleave(runs, options, seconds=2.0, least=5):
    """Times of all runs, one after the other in every round, each time in another order.

    What runs before has its share: after one that waited for a disk a pass took 5 % longer.

    Args:
        runs: functions by name; or pairs of functions, of which the first is not timed and gives
            the second its argument.
        options: of ``read_options``: threads choose the clock, ``quick`` makes one round.
        seconds: about what all rounds may take; 40 rounds at most.
        least: rounds, however long they take.

    A run of less than ``TURN`` is called again and again until that is over, and its turn gives the
    mean of its calls: each is then measured with its own data in the caches.
    """
    clock = time.process_time if options.threads == 1 else time.perf_counter
    took = {name: _warm_up(run) for name, run in runs.items()}
    calls = {name: 1 if options.quick else math.ceil(TURN / x) for name, x in took.items()}
    a_round = sum(took[name] * calls[name] for name in runs)
    rounds = 1 if options.quick else max(least, min(40, int(seconds / a_round)))
    measured, order, chance = {name: [] for name in runs}, [*runs], random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            measured[name].append(_seconds(runs[name], clock, calls[name]))
    return Times(measured)


def _warm_up(run):
    """Seconds of a call; not of the first, which may load or compile what it needs."""
    first = _seconds(run, time.perf_counter, 1)
    return first if first > 1 else _seconds(run, time.perf_counter, 1)


def turn(run, threads, quick=False):
    """Seconds of a call: the mean of one turn, for processes that take turns with each other."""
    clock = time.process_time if threads == 1 else time.perf_counter
    return _seconds(run, clock, 1 if quick else math.ceil(TURN / _warm_up(run)))


def _seconds(run, clock, calls):
    prepare, run = run if isinstance(run, tuple) else (None, run)
    elapsed = 0.0
    for _ in range(calls):
        given = () if prepare is None else (prepare(),)
        start = clock()
        result = run(*given)
        elapsed += clock() - start
        del result  # freed outside the time
    return max(elapsed / calls, 1e-9)


def draw(*shapes, dtype):
    """Normal numbers, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes]


def torch_attention(q, k, v, causal=False):
    """What regard is measured against."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def served_by(*tensors, **options):
    """Which backend ``"auto"`` finds for a call: the first that takes it."""
    for name in BACKENDS:
        try:
            regard.attention(*tensors, **options, backend=name)
        except regard.UnsupportedError:
            continue
        return name
    raise AssertionError("no backend takes this call")


def plain(q, k, v, visible=None):
    """The formula in torch, written out, in the dtype of q."""
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    return s.softmax(-1) @ v


def plain_numpy(q, k, v, visible=None):
    """The formula in NumPy, written out, in the dtype of q."""
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.dtype.type(q.shape[-1]))
    if visible is not None:
        s = np.where(visible, s, s.dtype.type(-np.inf))
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def lower(length):
    """``(length, length)``: what causal attention sees."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def errors(outputs, q, k, v, visible=None):
    """Largest error of each output, in errors of the plain formula in the dtype of q.

    Args:
        outputs: by name, ``(B, H, L, Dv)``; the first head is looked at, in 256 of its rows.
        visible: bool ``(L, L)``, or None for all.
    """
    rows = torch.linspace(0, q.shape[-2] - 1, min(q.shape[-2], 256)).long()
    q, k, v = q[0, 0, rows], k[0, 0], v[0, 0]
    visible = None if visible is None else visible[rows]
    return multiples(
        {name: output[0, 0][rows] for name, output in outputs.items()}, q, k, v, visible
    )


def multiples(outputs, q, k, v, visible=None):
    """As ``errors``, of whole arrays."""
    wide = np.longdouble if q.dtype == torch.float64 else np.float64
    exact = plain_numpy(*(x.double().numpy().astype(wide) for x in (q, k, v)), visible)
    # Of one key the formula is exact; its error is then taken to be a rounding.
    low = largest_error(plain(q, k, v, visible), exact) or torch.finfo(q.dtype).eps
    return {name: largest_error(output, exact) / low for name, output in outputs.items()}


def largest_error(x, exact):
    """``max |x − exact|``, of tensors or arrays."""
    x = x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)
    return float(np.abs(x - exact).max())


def pairs(shape, causal):
    """Visible pairs of all heads."""
    B, H, L, _ = shape
    return B * H * L * (L + 1) // 2 if causal else B * H * L * L


def compared(measured, ours, theirs, error):
    """What two contestants of ``interleave`` give a table's row.

    Args:
        measured: Times.
        ours, theirs: their names.
        error: by name, a multiple or several.

    Returns:
        ``(cells, figures)``: both times with their errors, and how many times as fast ours is.
    """
    ratio, spread = measured.ratio(theirs, to=ours)
    names = {"regard": ours, "torch": theirs}
    figures = {
        "seconds": {key: measured.median(name) for key, name in names.items()},
        "error": {key: error[name] for key, name in names.items()},
        "ratio": ratio,
        "spread": spread,
    }
    cells = [ms(measured.median(name), error[name]) for name in names.values()]
    return [*cells, times(ratio, spread)], figures


def ms(seconds, error=()):
    """``6.45 ms 0.85x``: a time, and the error or errors of what was computed in it."""
    several = error if isinstance(error, (list, tuple)) else [error]
    figures = " ".join(f"{e:.2f}" if e < 1000 else f"{e:.0e}" for e in several)
    return f"{seconds * 1e3:.2f} ms {figures}x" if several else f"{seconds * 1e3:.2f} ms"


def times(ratio, spread):
    """``1.20x ±0.02``."""
    return f"{ratio:.2f}x ±{spread:.2f}"


SHARES = ("of reachable", "of peak")  # columns: of ``roofline.contestants``, in this order


def with_limits(runs, limits):
    """The runs, and ``roofline.contestants`` where there are any."""
    return runs | {name: run for name, (run, _) in limits.items()}


def shares(measured, name, flops, limits):
    """``(cells, figures)``: what name reached of each limit in the same rounds."""
    found = {
        limit: flops / limits[limit][1] * measured.ratio(limit, to=name)[0] if limits else None
        for limit in SHARES
    }
    figures = {"share": found[SHARES[0]], "share_of_peak": found[SHARES[1]]}
    return [per_cent(share) for share in found.values()], figures


def per_cent(share):
    """``85%``; '-' where there is no figure."""
    return "-" if share is None else f"{share:.0%}"


def shape_name(shape):
    """``1, 8, 2048, 64``."""
    return ", ".join(map(str, shape))


def mask_name(causal):
    """The two masks that everything is measured with."""
    return "causal" if causal else "full"
