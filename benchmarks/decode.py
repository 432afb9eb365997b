"""Decoding: one query on many keys, beside torch's best form.

    python benchmarks/decode.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

Four query heads share a key head. torch has three ways to do that: ``enable_gqa``; heads repeated
beforehand (which is not timed); and the queries of a group as the rows of one head, which one query
without a mask allows. The ratio is to the fastest of them. Every key and value is read once; GB/s
count that, and exceed what memory gives where keys and values fit into the caches. Beside them is
what this many threads read of a memory of 1 GiB, in as many streams as are fastest, in the same
rounds.
"""

import common
import roofline
import torch
from torch.nn.functional import scaled_dot_product_attention

import regard

QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
GROUPED = (KEY_HEADS, QUERY_HEADS // KEY_HEADS, HEAD_SIZE)
LENGTHS = [4096, 32_768, 65_536]


def runs_of(q, k, v):
    """regard, and the three forms of torch, each ``(1, Hq, 1, D)``."""
    repeated = [x.repeat_interleave(GROUPED[1], 1) for x in (k, v)]
    folded = q.view(1, *GROUPED)
    return {
        "regard": lambda: regard.attention(q, k, v),
        "enable_gqa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "repeated": lambda: scaled_dot_product_attention(q, *repeated),
        "folded": lambda: scaled_dot_product_attention(folded, k, v).view(q.shape),
    }


def measure(report, options, readers, dtype, length):
    """One row."""
    held = (1, KEY_HEADS, length, HEAD_SIZE)
    q, k, v = common.draw((1, QUERY_HEADS, 1, HEAD_SIZE), held, held, dtype=dtype)
    runs = runs_of(q, k, v)
    outputs = {name: run().view(GROUPED) for name, run in runs.items()}
    error = common.multiples(outputs, q.view(GROUPED), k[0], v[0])
    backend = common.served_by(q, k, v)
    readings = {("read", n): run for n, (run, _) in readers.items()}
    measured = common.interleave(runs | readings, options)
    best = min(("enable_gqa", "repeated", "folded"), key=measured.median)
    _, figures = common.compared(measured, "regard", best, error)
    read = k.nbytes + v.nbytes
    rate, limit, share, streams = read / measured.median("regard"), None, None, None
    if readers:
        limit, streams = max((x / measured.median(("read", n)), n) for n, (_, x) in readers.items())
        share = read / readers[streams][1] * measured.ratio(("read", streams), to="regard")[0]
    report.row(
        f"{dtype}, {length} keys",
        *(common.ms(measured.median(name), error[name]) for name in runs),
        common.times(figures["ratio"], figures["spread"]),
        f"{rate / 1e9:.1f}", f"{limit / 1e9:.1f} in {streams}" if readers else "-",
        common.per_cent(share), backend,
        **figures,
        dtype=dtype, length=length, best=best, forms=measured.medians(), bytes_per_second=rate,
        limit=limit, streams=streams, share=share, backend=backend,
    )  # fmt: skip


def main():
    """One table."""
    options = common.read_options(__doc__, dtypes=["float32", "bfloat16"])
    readers = roofline.readers(options)
    report = common.Report("decode", options)
    report.table(
        f"One query, Hq = {QUERY_HEADS}, Hkv = {KEY_HEADS}, D = {HEAD_SIZE}",
        "keys", "regard", "torch enable_gqa", "torch repeated", "torch folded",
        "best torch / regard", "GB/s", "reading, streams", "of reading", "backend",
    )  # fmt: skip
    for dtype in options.dtype:
        for length in [64] if options.quick else LENGTHS:
            measure(report, options, readers, dtype, length)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
