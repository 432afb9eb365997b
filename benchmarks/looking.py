"""What it costs to look: a call that keeps its row statistics, in times of the same call without.

    python benchmarks/looking.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

``return_weights=True`` keeps two numbers a row, and gives the same bits of output. Few queries on
many keys are computed in another way than many, so both are here.
"""

import common
import torch

import regard

SHAPES = [  # of query, and of key and value
    ((1, 8, 2048, 64), (1, 8, 2048, 64)),
    ((1, 8, 512, 64), (1, 8, 512, 64)),
    ((1, 32, 1, 128), (1, 8, 32_768, 128)),
    ((1, 32, 1, 128), (1, 8, 512, 128)),
]
QUICK = [((1, 2, 64, 16), (1, 2, 64, 16)), ((1, 2, 1, 16), (1, 1, 256, 16))]


def measure(report, options, dtype, of_query, of_key):
    """One row; refuses to time what gives other bits."""
    q, k, v = common.draw(of_query, of_key, of_key, dtype=dtype)
    runs = {
        "plain": lambda: regard.attention(q, k, v),
        "kept": lambda: regard.attention(q, k, v, return_weights=True),
    }
    assert torch.equal(runs["plain"](), runs["kept"]()[0]), "looking changed the output"
    measured = common.interleave(runs, options)
    ratio, spread = measured.ratio("kept", to="plain")
    report.row(
        f"{dtype}, {common.shape_name(of_query)}", common.shape_name(of_key),
        *(common.ms(measured.median(name)) for name in runs), common.times(ratio, spread),
        dtype=dtype, query=of_query, key=of_key, seconds=measured.medians(), ratio=ratio,
        spread=spread,
    )  # fmt: skip


def main():
    """One table."""
    options = common.read_options(__doc__, dtypes=["float32", "bfloat16"])
    report = common.Report("looking", options)
    report.table(
        "Calls that keep their row statistics",
        "dtype, query", "key", "plain", "with statistics", "with / plain",
    )  # fmt: skip
    for dtype in options.dtype:
        for shapes in QUICK if options.quick else SHAPES:
            measure(report, options, dtype, *shapes)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
