"""What masks cost: intervals and bool masks, in times of the options that say the same.

    python benchmarks/masks.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

A bool mask is read once: intervals replace it where it says no more, and blocks of keys that it
hides are skipped. Intervals say what causal order and windows cannot: a causal text in which the
tokens of a picture see each other. Beside them is torch's operator with the mask.
"""

import common
import torch
from torch.nn.functional import scaled_dot_product_attention

import regard

SHAPE, WINDOW, PICTURE = (2, 4, 2048, 64), 256, (600, 856)
QUICK_SHAPE = (1, 1, 64, 16)


def kinds(T):
    """``{name: (options, options that cost what it may cost, mask)}``."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    causal = j <= i
    window = causal & (j > i - WINDOW)
    begin, end = (n * T // 2048 for n in PICTURE)
    last = torch.where((begin <= i) & (i < end), end, i + 1)
    pictured = {"intervals": (torch.zeros(T, dtype=torch.long), last[:, 0])}
    blocks = (i // 256 + j // 256) % 4 == 0
    plain, windowed = {"causal": True}, {"causal": True, "window": (WINDOW - 1, 0)}
    return {
        "mask: causal": ({"mask": causal}, plain, causal),
        f"mask: causal window of {WINDOW}": ({"mask": window}, windowed, window),
        "mask: a quarter of the blocks": ({"mask": blocks}, {}, blocks),
        "mask: every other pair": ({"mask": (i + j) % 2 == 0}, {}, (i + j) % 2 == 0),
        "intervals: a picture in a text": (pictured, plain, j < last),
        "mask: a picture in a text": ({"mask": j < last}, plain, j < last),
    }


def measure(report, options, dtype):
    """The rows of one dtype."""
    shape = QUICK_SHAPE if options.quick else SHAPE
    q, k, v = common.draw(*[shape] * 3, dtype=dtype)
    for name, (masked, plain, mask) in kinds(shape[2]).items():
        runs = {
            "masked": lambda x=masked: regard.attention(q, k, v, **x),
            "plain": lambda x=plain: regard.attention(q, k, v, **x),
            "torch": lambda x=mask: scaled_dot_product_attention(q, k, v, attn_mask=x),
        }
        measured = common.interleave(runs, options, seconds=3.0)
        outputs = {x: runs[x]() for x in ("masked", "torch")}
        error = common.errors(outputs, q, k, v, mask)
        ratio, to_torch = (
            measured.ratio(a, to=b) for a, b in (("masked", "plain"), ("torch", "masked"))
        )
        told = " ".join(f"{n}={x}" for n, x in plain.items()) or "no mask"
        report.row(
            name, dtype, common.ms(measured.median("masked"), error["masked"]), told,
            common.times(*ratio), common.ms(measured.median("torch"), error["torch"]),
            common.times(*to_torch),
            kind=name, dtype=dtype, shape=shape, seconds=measured.medians(), error=error,
            ratio=ratio[0], to_torch=to_torch[0],
        )  # fmt: skip


def main():
    """One table."""
    options = common.read_options(__doc__, dtypes=("float32",))
    report = common.Report("masks", options)
    report.table(
        f"Forward pass of (B, H, T, D) = {SHAPE} under a mask",
        "mask", "dtype", "regard", "compared with", "time, in times of that", "torch",
        "regard is faster",
    )  # fmt: skip
    for dtype in options.dtype:
        measure(report, options, dtype)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
