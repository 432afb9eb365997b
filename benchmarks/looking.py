"""What it costs to look: a call that keeps its row statistics, in times of the same call without.

    python benchmarks/looking.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

``return_weights=True`` keeps two numbers a row, and gives the same bits of output. Few queries on
many keys are computed in another way than many, so both are here.

The second table is what rows of some heads take, after such a call and without one, beside the
softmax of q kᵀ of the same heads and rows in torch; the third has the times of a transcript's words
by ``align``.
"""

import common
import numpy as np
import torch

import regard

SHAPES = [  # of query, and of key and value
    ((1, 8, 2048, 64), (1, 8, 2048, 64)),
    ((1, 8, 512, 64), (1, 8, 512, 64)),
    ((1, 32, 1, 128), (1, 8, 32_768, 128)),
    ((1, 32, 1, 128), (1, 8, 512, 128)),
]
QUICK = [((1, 2, 64, 16), (1, 2, 64, 16)), ((1, 2, 1, 16), (1, 1, 256, 16))]
CROSS, CROSS_QUICK = (20, 448, 1500, 64), (4, 16, 60, 16)  # heads, queries, keys, D: as Whisper's


def heads_of(H):
    """Name and index of the rows that are asked for."""
    return {
        "half of the heads": np.s_[0, H // 4 : H // 4 + H // 2],
        "every other head": np.s_[0, ::2],
        "of these 64 rows": np.s_[0, ::2, 5:69],
        "one head": np.s_[0, 3],
        "one row of all": np.s_[0, :, 5:6],
        "one row of one": np.s_[0, 3, 5:6],
    }


def measure_rows(report, options, dtype, sizes):
    """A row for each index; refuses to time what gives other weights."""
    H, Lq, Lk, D = sizes
    q, k = common.draw((1, H, Lq, D), (1, H, Lk, D), dtype=dtype)
    known = regard.attention(q, k, k, return_weights=True)[1]
    for name, index in heads_of(H).items():
        heads = index[:2]

        def dense(of_query=q[index], of_key=k[heads]):
            return (of_query @ of_key.mT / D**0.5).softmax(-1)

        runs = {
            "known": lambda index=index: known[index],
            "fresh": lambda index=index: regard.AttentionWeights(q, k)[index],
            "torch": dense,
        }
        bound = 1e-4 if dtype == "float32" else 2e-2
        torch.testing.assert_close(runs["known"](), dense().float(), atol=bound, rtol=bound)
        measured = common.interleave(runs, options)
        ratios = [measured.ratio("torch", to=to) for to in ("known", "fresh")]
        report.row(
            f"{dtype}, {name}", *(common.ms(measured.median(run)) for run in runs),
            *(common.times(*ratio) for ratio in ratios),
            dtype=dtype, rows=name, sizes=sizes, seconds=measured.medians(), ratios=ratios,
        )  # fmt: skip


def dense_times(w, width=7):
    """What Whisper's own code makes of weights before it warps: ``(Lq, Lk)``."""
    std, mean = torch.std_mean(w, dim=-2, keepdim=True, unbiased=False)
    w = torch.nn.functional.pad((w - mean) / std, (width // 2,) * 2, mode="reflect")
    return w.unfold(-1, width, 1).sort()[0][..., width // 2].mean(0)


def measure_times(report, options, sizes):
    """One row: the alignment, beside the matrix alone as Whisper's own code makes it."""
    H, Lq, Lk, D = sizes
    q, k = common.draw((1, H, Lq, D), (1, H, Lk, D), dtype="float32")
    known = regard.attention(q, k, k, return_weights=True)[1]
    heads = list(range(0, H, 2))
    runs = {
        "regard": lambda: known.align(heads),
        "torch": lambda: dense_times((q[0, heads] @ k[0, heads].mT / D**0.5).softmax(-1)),
    }
    error = common.largest_error(runs["regard"]().matrix[0], runs["torch"]().double().numpy())
    assert error < 1e-3, error
    measured = common.interleave(runs, options)
    ratio, spread = measured.ratio("torch", to="regard")
    report.row(
        f"{len(heads)} of {H} heads, {Lq} x {Lk}",
        *(common.ms(measured.median(run)) for run in runs), common.times(ratio, spread),
        sizes=sizes, seconds=measured.medians(), ratio=ratio, spread=spread,
    )  # fmt: skip


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
    sizes = CROSS_QUICK if options.quick else CROSS
    report.table(
        "Rows of {} heads, {} queries, {} keys, D = {}".format(*sizes),
        "dtype, rows", "after a call", "without", "torch", "torch / after a call",
        "torch / without",
    )  # fmt: skip
    for dtype in options.dtype:
        measure_rows(report, options, dtype, sizes)
    report.table("Times of words", "heads", "align", "torch, without the path", "torch / align")
    measure_times(report, options, sizes)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
