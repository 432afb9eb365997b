"""Forward pass beside torch's, and the time of a visible pair.

    python benchmarks/forward.py [--threads N] [--dtype float32 bfloat16 float16 float64]
                                 [--quick] [--json FILE]

``REGARD_TARGET=avx2`` in front measures that instruction set, in shares of its own peak.
FLOPs count visible pairs only: 2 · (D + Dv) a pair. Of the smallest calls much of the time is that
of Python and of making the output. The second table is of ``return_weights=True``, which keeps the
row statistics of the weights, beside torch's output alone. The others take windows, padding and
packed documents, which cost what is visible; torch is given the same as a mask of (T, T). With more
than one thread the last column of all tells how many times as fast they are as one.
"""

import common
import roofline
import torch
from torch.nn.functional import scaled_dot_product_attention

import regard

SHAPES = [
    (1, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 8192, 64), (1, 8, 2048, 128), (1, 8, 777, 80),
    (1, 8, 1000, 96), (1, 4, 1500, 256), (8, 12, 128, 64), (1, 4, 8, 64),
]  # fmt: skip
# Heads wider than 256, as some models have them; the last is (D, Dv) = (576, 512), latent keys.
WIDE = [(1, 4, 1024, 320), (1, 4, 1024, 512), (1, 4, 1024, 576, 512)]
KEPT = SHAPES[:2]  # with row statistics
QUICK = [(1, 2, 97, 16)]


def contestants(ours, theirs, threads):
    """regard and torch with all threads, and regard with one where that is another number."""

    def on(n, attend):
        return lambda: regard.set_num_threads(n), lambda _: attend()

    runs = {"regard": on(threads, ours), "torch": on(threads, theirs)}
    return runs | ({"one thread": on(1, ours)} if threads > 1 else {})


def measure_shape(report, options, limits, dtype, shape, causal, keeps=False):
    """One row of a table; a shape ``(B, H, T, D)`` or, with other values, with ``Dv``.

    Args:
        keeps: whether regard gives the weights too, with their row statistics.
    """
    held, value_size = shape[:4], shape[-1]
    q, k, v = common.draw(held, held, (*held[:3], value_size), dtype=dtype)

    def ours():
        found = regard.attention(q, k, v, causal=causal, return_weights=keeps)
        return found[0] if keeps else found

    runs = contestants(
        ours,
        lambda: common.torch_attention(q, k, v, causal=causal),
        options.threads,
    )
    outputs = {name: run(None) for name, (_, run) in runs.items()}
    error = common.errors(outputs, q, k, v, common.lower(shape[2]) if causal else None)
    backend = common.served_by(q, k, v, causal=causal)
    measured = common.interleave(common.with_limits(runs, limits), options)
    cells, figures = common.compared(measured, "regard", "torch", error)
    flops = 2 * (shape[3] + value_size) * common.pairs(held, causal)
    rate = flops / measured.median("regard")
    shares, reached = common.shares(measured, "regard", flops, limits)
    cells += [f"{rate / 1e9:.0f}", *shares, backend]
    if "one thread" in runs:
        cells.append(common.times(*measured.ratio("one thread", to="regard")))
        figures["speedup"] = measured.ratio("one thread", to="regard")[0]
    report.row(
        common.shape_name(shape), common.mask_name(causal), *cells, **figures,
        dtype=dtype, shape=shape, causal=causal, statistics=keeps, flops=rate, backend=backend,
        **reached,
    )  # fmt: skip


def cases(length):
    """What a query may see, by name; options of ``regard.attention``."""
    window, document = length // 32, length // 16
    documents = {"segments": torch.arange(length)[None] // document}
    return {
        "full": {},
        "causal": {"causal": True},
        f"causal window of {window}": {"causal": True, "window": (window - 1, 0)},
        "half of the keys padding": {"key_lengths": length // 2},
        f"documents of {document}": documents,
        f"causal documents of {document}": {"causal": True, **documents},
    }


def visible(length, causal=False, window=None, key_lengths=None, segments=None):
    """The options of ``cases`` as a mask ``(length, length)``."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = j <= i if causal else torch.ones(length, length, dtype=torch.bool)
    if window is not None:
        seen = seen & (j >= i - window[0])
    if key_lengths is not None:
        seen = seen & (j < key_lengths)
    if segments is not None:
        seen = seen & (segments[0][:, None] == segments[0])
    return seen


def measure_cases(report, options, dtype, shape):
    """The second table: every case in one run."""
    q, k, v = common.draw(shape, shape, shape, dtype=dtype)
    torch_has = {"full": False, "causal": True}  # without a mask
    runs, masks, error = {}, {}, {}
    for case, allowed in cases(shape[2]).items():
        mask = masks[case] = visible(shape[2], **allowed)

        def ours(allowed=allowed):
            return regard.attention(q, k, v, **allowed)

        def theirs(case=case, mask=mask):
            if case in torch_has:
                return common.torch_attention(q, k, v, causal=torch_has[case])
            return scaled_dot_product_attention(q, k, v, mask)

        found = contestants(ours, theirs, options.threads)
        outputs = {(case, name): run(None) for name, (_, run) in found.items()}
        error |= common.errors(outputs, q, k, v, mask)
        runs |= {(case, name): run for name, run in found.items()}
    measured = common.interleave(runs, options, seconds=10)
    for case, mask in masks.items():
        ours, theirs = (case, "regard"), (case, "torch")
        cells, figures = common.compared(measured, ours, theirs, error)
        part = float(mask.sum()) / mask.numel()
        per_pair = [x / part for x in measured.ratio(ours, to=("full", "regard"))]
        cells += [common.times(*per_pair)]
        if options.threads > 1:
            speedup = measured.ratio((case, "one thread"), to=ours)
            cells, figures = [*cells, common.times(*speedup)], figures | {"speedup": speedup[0]}
        report.row(
            case, f"{part:.3f}", *cells, **figures,
            dtype=dtype, shape=shape, case=case, visible=part, per_pair=per_pair[0],
        )  # fmt: skip


def main():
    """Four tables for each dtype."""
    options = common.read_options(__doc__, dtypes=["float32"])
    report = common.Report("forward", options)
    columns = ["B, H, T, D", "mask", "regard", "torch", "torch / regard", "GFLOP/s"]
    more = ["1 thread / all"] if options.threads > 1 else []
    columns += [*common.SHARES, "backend", *more]
    for dtype in options.dtype:
        limits = roofline.contestants(dtype, options.threads)
        report.table(f"Forward, {dtype}", *columns)
        for shape in QUICK if options.quick else SHAPES + WIDE:
            for causal in (False, True):
                measure_shape(report, options, limits, dtype, shape, causal)
        report.table(f"Forward with row statistics, {dtype}", *columns)
        for shape in QUICK if options.quick else KEPT:
            for causal in (False, True):
                measure_shape(report, options, limits, dtype, shape, causal, keeps=True)
        # The arrays of one head fit into the caches of most processors, those of four do not: there
        # a window that is narrow waits for memory.
        for heads in (1, 4):
            shape = (1, heads, 256, 16) if options.quick else (1, heads, 8192, 64)
            report.table(
                f"Time of a visible pair, {dtype}, B, H, T, D = {common.shape_name(shape)}",
                "a query sees", "of all pairs", "regard", "torch", "torch / regard",
                "a pair / full's", *more,
            )  # fmt: skip
            measure_cases(report, options, dtype, shape)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
