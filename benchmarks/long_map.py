"""How soon the viewer's map of a very long head answers, in CPU seconds.

    python benchmarks/long_map.py [--threads N] [--quick] [--json FILE]

A recording of one head is saved, loaded, and asked what the viewer's page asks: its whole picture,
which is there after the first round of rows; tiles of every level, at the middle of the diagonal
and at its end, of which the slowest is told; a row, a column and the strongest pairs. Beside a time
is the share of the rows that the answer was made of, which the page shows too: it asks again until
all are read.
"""

import tempfile
import time
from pathlib import Path

import common
import numpy as np

import regard
from regard.viewer import _collected
from regard.viewer.overview import TILE, HeadMap

LENGTHS = 100_000, 1_000_000
SIZE = 64


def saved(folder, length, causal):
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((1, length, SIZE), dtype=np.float32) for _ in range(2))
    path = Path(folder, "long.safetensors")
    tokens = [f" w{n % 1000}" for n in range(length)]
    regard.Recording(tokens, [regard.Layer(query, key, causal=causal)]).save(path)
    return path


def timed(work, *given):
    start = time.process_time()
    found = work(*given)
    return found, time.process_time() - start


def slowest_tile(head, length):
    """Seconds of the slowest tile's first answer, its share of the rows, and its level."""
    found = []
    for level in range(max(1, (length // TILE).bit_length())):
        last = (length - 1 >> level) // TILE
        for at in sorted({last // 2, last}):
            (_, coverage), seconds = timed(head.tile, "mass", level, at, at // 2)
            found.append((seconds, coverage, level))
    return max(found)


def measure(report, length, causal):
    with tempfile.TemporaryDirectory() as folder:
        path = saved(folder, length, causal)
        recording, opened = timed(regard.Recording.load, path)
        head, made = timed(HeadMap, recording, 0, 0)
        (_, first), whole = timed(head.tile, "max", length.bit_length(), 0, 0)
        head.stop()
        head._collected._rounds = []  # nothing more is read beside what is timed
        _, row = timed(head.row, length - 1)
        (_, read), column = timed(head.column, length // 3)
        (_, of_links), links = timed(head.links, 100)
        tile, coverage, level = slowest_tile(head, length)
        report.row(
            f"{length:,} tokens{', causal' * causal}", f"{opened:.2f}",
            f"{made + whole:.2f} ({first:.1%})", f"{tile:.2f} ({coverage:.1%}, level {level})",
            f"{row:.2f}", f"{column:.2f} ({read:.1%})", f"{links:.2f} ({of_links:.1%})",
            length=length, causal=causal, open=opened, picture=made + whole, tile=tile, row=row,
            column=column, links=links, coverage=first,
        )  # fmt: skip


def main():
    options = common.read_options(__doc__)
    report = common.Report("long_map", options)
    _collected.IDLE_TIMEOUT_S = 0.0  # one round at a time
    report.table(
        f"A head of {SIZE}, float32: CPU seconds, and the share of the rows that were read",
        "text", "load", "whole picture", "slowest tile", "row", "column", "100 links",
    )  # fmt: skip
    for length in (20_000,) if options.quick else LENGTHS:
        for causal in (True, False):
            measure(report, length, causal)
    report.save()


if __name__ == "__main__":
    main()
