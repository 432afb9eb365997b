"""Small calls beside torch's: a few tokens, and the steps of a generation with a growing cache.

    python benchmarks/small.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

What is measured is how long Python takes around the kernels: a model calls them once a layer. The
cache grows by one key a step; the time is that of a step. A window is said by another mask in every
step, or by intervals; what of a cache of fixed size is filled, by causal order and ``query_start``.
torch gets the same as a mask. The last table is a model's: each layer writes the token's key and
value into its own cache and attends to what is filled. Masks and intervals are made beforehand.
Calls are of tensors; beside them stand those of NumPy arrays, and those that give weights too.
"""

import common
import torch
from torch.nn.functional import scaled_dot_product_attention

import regard

# (B, H, Lq, D) and keys
CALLS = [
    ((1, 4, 1, 64), 1), ((1, 12, 1, 64), 1), ((1, 4, 8, 64), 8), ((1, 12, 8, 64), 8),
    ((1, 12, 32, 64), 32), ((1, 12, 1, 64), 128), ((1, 12, 1, 64), 1024), ((4, 8, 1, 32), 280),
]  # fmt: skip
HEADS, HEAD_SIZE, STEPS, WINDOW = 12, 64, 600, 256
MODEL_STEPS, LAYERS = 1000, 12


def us(seconds, error):
    """``58.1 µs 0.93x``."""
    return f"{seconds * 1e6:.1f} µs {error:.2f}x"


def row(report, name, measured, ours, theirs, error, **figures):
    """A comparison in µs."""
    _, found = common.compared(measured, ours, theirs, error)
    report.row(
        *name, us(measured.median(ours), error[ours]), us(measured.median(theirs), error[theirs]),
        common.times(found["ratio"], found["spread"]), **found, **figures,
    )  # fmt: skip


def measure_call(report, options, dtype, shape, keys):
    """A row of the first table."""
    held = (*shape[:2], keys, shape[3])
    q, k, v = common.draw(shape, held, held, dtype=dtype)
    runs = {
        "regard": lambda: regard.attention(q, k, v),
        "torch": lambda: scaled_dot_product_attention(q, k, v),
    }
    error = common.multiples({name: run()[0] for name, run in runs.items()}, q[0], k[0], v[0])
    of_arrays = dtype == "float32" and [x.numpy() for x in (q, k, v)]
    if of_arrays:
        runs["arrays"] = lambda: regard.attention(*of_arrays)
    runs["weights"] = lambda: regard.attention(q, k, v, return_weights=True)
    measured = common.interleave(runs, options)
    arrays, weights = (measured.median(x) if x in runs else None for x in ("arrays", "weights"))
    others = (f"{x * 1e6:.1f} µs" if x else "-" for x in (arrays, weights))
    name = common.shape_name(shape), str(keys), dtype, *others
    row(
        report, name, measured, "regard", "torch", error, shape=shape, keys=keys, dtype=dtype,
        arrays=arrays, weights=weights,
    )  # fmt: skip


def generations(q, k, v, steps):
    """``{name: (run of regard, run of torch, what is seen)}``: every run gives all outputs."""
    i, j = torch.arange(steps)[:, None], torch.arange(steps)
    causal = j <= i
    window = causal & (j > i - min(WINDOW, steps // 2))
    rows = [q[:, :, n : n + 1] for n in range(steps)]
    grown = [(k[:, :, : n + 1], v[:, :, : n + 1]) for n in range(steps)]
    masks = [window[None, None, n : n + 1, : n + 1].clone() for n in range(steps)]
    fixed = [causal[None, None, n : n + 1].clone() for n in range(steps)]
    first = window.long().argmax(-1)
    intervals = [(first[None, n : n + 1].clone(), torch.tensor([[n + 1]])) for n in range(steps)]

    def regard_steps(options, arrays=grown):
        def run():
            return [regard.attention(x, *y, **o) for x, y, o in zip(rows, arrays, options)]

        return run

    def torch_steps(masks, arrays=grown):
        def run():
            triples = zip(rows, arrays, masks)
            return [scaled_dot_product_attention(x, *y, attn_mask=m) for x, y, m in triples]

        return run

    whole = [(k, v)] * steps
    starts = [{"causal": True, "query_start": n} for n in range(steps)]
    windowed = torch_steps(masks)
    return {
        "growing, all keys": (regard_steps([{}] * steps), torch_steps([None] * steps), causal),
        "growing, a mask": (regard_steps([{"mask": m} for m in masks]), windowed, window),
        "growing, intervals": (
            regard_steps([{"intervals": x} for x in intervals]),
            windowed,
            window,
        ),
        "fixed, query_start": (regard_steps(starts, whole), torch_steps(fixed, whole), causal),
    }


def measure_generations(report, options, dtype):
    """The second table."""
    steps = 8 if options.quick else STEPS
    q, k, v = common.draw(*[(1, HEADS, steps, HEAD_SIZE)] * 3, dtype=dtype)
    for name, (ours, theirs, seen) in generations(q, k, v, steps).items():
        runs = {"regard": ours, "torch": theirs}
        outputs = {x: torch.cat(run(), 2) for x, run in runs.items()}
        error = common.errors(outputs, q, k, v, seen)
        measured = common.interleave(runs, options)
        a_step = common.Times({x: [s / steps for s in measured.seconds[x]] for x in runs})
        row(
            report, (name, dtype), a_step, "regard", "torch", error, generation=name, steps=steps,
            dtype=dtype,
        )  # fmt: skip


def model_steps(attend, inputs, steps):
    """Steps of all layers of a model: each writes its key and value, and attends to all so far."""
    caches = [(torch.empty_like(k), torch.empty_like(v)) for _, k, v in inputs]

    def run():
        for n in range(steps):
            for (q, k, v), (keys, values) in zip(inputs, caches):
                here = slice(n, n + 1)
                keys[:, :, here], values[:, :, here] = k[:, :, here], v[:, :, here]
                output = attend(q[:, :, here], keys[:, :, : n + 1], values[:, :, : n + 1])
        return output

    return run


def measure_model(report, options, dtype):
    """The third table."""
    steps, layers = (8, 2) if options.quick else (MODEL_STEPS, LAYERS)
    drawn = common.draw(*[(1, HEADS, steps, HEAD_SIZE)] * 3 * layers, dtype=dtype)
    inputs = list(zip(*[iter(drawn)] * 3))
    attends = {"regard": regard.attention, "torch": scaled_dot_product_attention}
    runs = {name: model_steps(attend, inputs, steps) for name, attend in attends.items()}
    q, k, v = (x[0] for x in inputs[-1])
    error = common.multiples({name: run()[0] for name, run in runs.items()}, q[:, -1:], k, v)
    measured = common.interleave(runs, options, seconds=30.0)
    each = common.Times({x: [s / steps for s in measured.seconds[x]] for x in runs})
    row(report, (dtype,), each, "regard", "torch", error, steps=steps, layers=layers, dtype=dtype)


def main():
    """Three tables."""
    options = common.read_options(__doc__, dtypes=["float32"])
    report = common.Report("small", options)
    report.table(
        "One call", "B, H, Lq, D", "keys", "dtype", "of arrays", "with weights", "regard", "torch",
        "torch / regard",
    )  # fmt: skip
    for dtype in options.dtype:
        for shape, keys in CALLS[:2] if options.quick else CALLS:
            measure_call(report, options, dtype, shape, keys)
    steps = 8 if options.quick else STEPS
    report.table(
        f"A step of {steps} of a generation, {HEADS} heads of {HEAD_SIZE}",
        "cache", "dtype", "regard", "torch", "torch / regard",
    )  # fmt: skip
    for dtype in options.dtype:
        measure_generations(report, options, dtype)
    steps, layers = (8, 2) if options.quick else (MODEL_STEPS, LAYERS)
    report.table(
        f"Attention of a token, {steps} steps of {layers} layers, {HEADS} heads of {HEAD_SIZE}",
        "dtype", "regard", "torch", "torch / regard",
    )  # fmt: skip
    for dtype in options.dtype:
        measure_model(report, options, dtype)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
