"""What masks and edits cost, in times of the options that say the same, and of none.

    python benchmarks/masks.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

A bool mask is read once: intervals replace it where it says no more, and blocks of keys that it
hides are skipped. Intervals say what causal order and windows cannot: a causal text in which the
tokens of a picture see each other. Beside them is torch's operator with the mask.

An edit multiplies the weights of a rectangle before they are normalised: only tiles of pairs that
it meets take longer, and no mask is made. The same knockout by a bool mask is beside it.
"""

import common
import torch
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import Edit

SHAPE, WINDOW, PICTURE = (2, 4, 2048, 64), 256, (600, 856)
QUICK_SHAPE = (1, 1, 64, 16)
EDITED, QUICK_EDITED = [(1, 4, 2048, 64), (1, 1, 8192, 64)], [QUICK_SHAPE]


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


def edits(H, T):
    """By name; in order: one pair, some rows, some keys, all pairs of some heads, many."""
    low, high = T // 4, T // 2
    few = [Edit(n % H, slice(n * T // 32, (n + 1) * T // 32), slice(0, low)) for n in range(32)]
    return {
        "a pair": [Edit(0, high, low)],
        "knockout: a quarter of the queries and keys": [Edit(None, slice(high, -low), slice(low))],
        "steering: a quarter of the queries and keys": [
            Edit(None, slice(high, -low), slice(low), 2.0)
        ],
        "steering: a key": [Edit(None, None, 0, 0.5)],
        "steering: all keys of a head": [Edit(0, None, None, 2.0)],
        "knockout: 32 rectangles": few,
    }


def measure_edits(report, options, dtype, shape):
    """The rows of one dtype and shape."""
    q, k, v = common.draw(*[shape] * 3, dtype=dtype)
    H, T = shape[1:3]
    for name, given in edits(H, T).items():
        mask = torch.ones(H, T, T, dtype=torch.bool)
        for edit in given:
            spans = (
                slice(x, x + 1) if isinstance(x, int) else x or slice(None)
                for x in (edit.heads, edit.queries, edit.keys)
            )
            mask[tuple(spans)] = edit.factor > 0
        runs = {
            "edited": lambda x=given: regard.attention(q, k, v, causal=True, edits=x),
            "plain": lambda: regard.attention(q, k, v, causal=True),
        }
        if not mask.all():
            runs["masked"] = lambda x=mask: regard.attention(q, k, v, causal=True, mask=x)
        measured = common.interleave(runs, options, seconds=6.0)
        ratio = measured.ratio("edited", to="plain")
        masked = measured.ratio("masked", to="plain") if "masked" in runs else None
        report.row(
            common.shape_name(shape), name, dtype, common.ms(measured.median("edited")),
            common.times(*ratio), common.times(*masked) if masked else "-",
            kind=name, dtype=dtype, shape=shape, seconds=measured.medians(), ratio=ratio[0],
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
    report.table(
        "Causal forward pass with edits",
        "shape", "edits", "dtype", "regard", "time, in times of no edit", "by a bool mask",
    )  # fmt: skip
    for dtype in options.dtype:
        for shape in QUICK_EDITED if options.quick else EDITED:
            measure_edits(report, options, dtype, shape)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
