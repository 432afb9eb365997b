"""What the weights' reductions cost, in forward passes of their own call.

    python benchmarks/second_pass.py [--threads N] [--dtype float32 bfloat16] [--quick]
                                     [--json FILE]

Each is timed alone, on weights that came fresh from ``attention(..., return_weights=True)``. Beside
the cost is the error, in errors of the same weights written out in float32. The last columns are
the output and a summary of its weights together, beside torch's output alone: torch has no weights.

The second table is what a part of the weights costs that nothing is known of yet: from query and
key alone, making the weights included. Pictures are of all heads.
"""

import common
import numpy as np
import torch

import regard

SHAPES = [(1, 8, 2048, 64), (1, 4, 8192, 64)]
QUICK = [(1, 2, 256, 16)]
LONG, LONG_QUICK = (1, 2, 65_536, 64), (1, 2, 512, 16)
PAIRS = 20
PICTURE = 256  # rows, and bins on a side
REDUCTIONS = {
    "received": lambda weights: weights.received(),
    "entropy": lambda weights: weights.entropy(),
    "pool max": lambda weights: weights.pool((512, 512), how="max"),
    "pool mass": lambda weights: weights.pool((512, 512), how="mass"),
    "topk": lambda weights: weights.topk(8),
    "strongest": lambda weights: weights.strongest(PAIRS),
    "summary": lambda weights: weights.summary(),
}


def rows_of_weights(q, k, causal, size):
    """The weights of one head, written out, ``size`` rows at a time, in the dtype of q."""
    for start in range(0, len(q), size):
        yield some_rows(q, k, causal, slice(start, start + size))


def some_rows(q, k, causal, rows):
    """Some rows of the weights of one head, written out, in the dtype of q."""
    s = q[rows] @ k.T / np.sqrt(q.dtype.type(q.shape[1]))
    if causal:
        s[np.arange(len(k)) > np.arange(rows.start, rows.start + len(s))[:, None]] = -np.inf
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def written_out(q, k, causal, bins=512, size=512):
    """Every reduction of one head, in the dtype of q; ``bins`` divide the length."""
    found = {name: [] for name in ("entropy", "pool max", "pool mass", "topk", "strongest")}
    received, bins = 0, min(bins, len(k))
    edge = len(k) // bins  # of a bin of the picture
    for w in rows_of_weights(q, k, causal, min(size, len(q))):
        received = received + w.sum(0)
        found["entropy"].append(-(w * np.log(np.where(w > 0, w, 1))).sum(-1))
        found["topk"].append(-np.partition(-w, 8, axis=-1)[:, :8])
        found["strongest"].append(-np.partition(-w, PAIRS, axis=None)[:PAIRS])
        cells = w.reshape(-1, edge, bins, edge)
        with np.errstate(divide="ignore"):  # ln of invisible bins
            found["pool max"].append(np.log(cells.max((1, 3))))
            found["pool mass"].append(np.log(cells.sum((1, 3)) / edge))
    found["topk"] = [-np.sort(-np.concatenate(found["topk"]), axis=-1)]
    found["strongest"] = [-np.sort(-np.concatenate(found["strongest"]))[:PAIRS]]
    return {"received": received} | {name: np.concatenate(parts) for name, parts in found.items()}


def reduction_errors(weights, q, k, causal):
    """Errors of every reduction of the first head, in errors of float32."""
    one = [x[0, 0].double().numpy() for x in (q, k)]
    exact = written_out(*one, causal)
    low = written_out(*(x.astype(np.float32) for x in one), causal)
    found = {}
    for name in exact:
        result = REDUCTIONS[name](weights)
        result = {"topk": "values", "strongest": "weight"}.get(name, "real"), result
        result = getattr(result[1], result[0])[0, 0].double().numpy()
        seen = np.isfinite(exact[name])
        truth = exact[name][seen]
        distance, least = (np.abs(x[seen] - truth).max() for x in (result, low[name]))
        found[name] = float(distance / least)
    return found


def measure(report, options, dtype, shape, causal):
    """One row: the forward pass, every reduction, all together, and torch's output."""
    q, k, v = common.draw(shape, shape, shape, dtype=dtype)

    def both():
        return regard.attention(q, k, v, causal=causal, return_weights=True)

    def summarised():
        output, weights = both()
        return output, weights.summary()

    runs = {
        "forward": lambda: regard.attention(q, k, v, causal=causal),
        "regard": summarised,
        "torch": lambda: common.torch_attention(q, k, v, causal),
    }
    for name, reduce in REDUCTIONS.items():
        runs[name] = lambda: both()[1], reduce
    outputs = {"regard": summarised()[0], "torch": runs["torch"]()}
    error = common.errors(outputs, q, k, v, common.lower(shape[2]) if causal else None)
    lost = reduction_errors(both()[1], q, k, causal)
    backend = common.served_by(q, k, v, causal=causal, return_weights=True)
    measured = common.interleave(runs, options, least=3)
    cells, figures = common.compared(measured, "regard", "torch", error)
    costs = {name: measured.ratio(name, to="forward")[0] for name in REDUCTIONS}
    report.row(
        common.shape_name(shape), common.mask_name(causal),
        common.ms(measured.median("forward")),
        *(f"{costs[name]:.2f} {lost[name]:.2f}x" for name in lost), f"{costs['summary']:.2f}",
        *cells, backend, **figures,
        dtype=dtype, shape=shape, causal=causal, costs=costs, cost_errors=lost, backend=backend,
    )  # fmt: skip


def parts_of(length):
    """Name, rows, and the question, of each part that is asked for."""
    middle = slice(length // 2, length // 2 + PICTURE)
    last = slice(length - PICTURE, length)
    rows = {
        "row 5": slice(5, 6), "last row": slice(length - 1, length), "256-row picture": middle,
        "of the last rows": last,
    }  # fmt: skip

    def ask(weights, rows):
        if rows in (middle, last):
            return weights.pool((PICTURE, PICTURE), rows=rows)
        return weights[:, 0, rows.start]

    return rows, ask


def part_errors(found, q, k, parts):
    """Errors of the parts of the first head, in errors of float32."""
    one = [x[0, 0].double().numpy() for x in (q, k)]
    lost = {}
    for name, rows in parts.items():
        exact, low = (
            some_rows(*(x.astype(dtype) for x in one), True, rows) for dtype in ("f8", "f4")
        )
        if len(exact) == 1:
            lost[name] = common.largest_error(found[name][0], exact[0])
            lost[name] /= common.largest_error(low[0], exact[0])
            continue
        with np.errstate(divide="ignore"):  # ln of invisible bins
            exact, low = (np.log(w.reshape(len(w), PICTURE, -1).max(-1)) for w in (exact, low))
        seen = np.isfinite(exact)
        lost[name] = common.largest_error(found[name][0, 0].numpy()[seen], exact[seen])
        lost[name] /= common.largest_error(low[seen], exact[seen])
    return lost


def measure_parts(report, options, dtype, shape):
    """One row: parts of causal weights that nothing is known of."""
    q, k = common.draw(shape, shape, dtype=dtype)
    parts, ask = parts_of(shape[2])

    def part(rows):
        return ask(regard.AttentionWeights(q, k, causal=True), rows)

    lost = part_errors({name: part(rows) for name, rows in parts.items()}, q, k, parts)
    runs = {name: lambda rows=rows: part(rows) for name, rows in parts.items()}
    measured = common.interleave(runs, options)
    report.row(
        common.shape_name(shape),
        *(common.ms(measured.median(name), lost[name]) for name in parts),
        dtype=dtype, shape=shape, parts=measured.medians(), part_errors=lost,
    )  # fmt: skip


def main():
    """Two tables for each dtype."""
    options = common.read_options(__doc__, dtypes=["float32", "bfloat16"])
    report = common.Report("second_pass", options)
    for dtype in options.dtype:
        report.table(
            f"Reductions in forward passes, {dtype}",
            "B, H, T, D", "mask", "forward", *REDUCTIONS, "output and summary", "torch's output",
            "torch / regard", "backend",
        )  # fmt: skip
        for shape in QUICK if options.quick else SHAPES:
            for causal in (False, True):
                measure(report, options, dtype, shape, causal)
        shape = LONG_QUICK if options.quick else LONG
        names = parts_of(shape[2])[0]
        report.table(f"Parts of causal weights alone, {dtype}", "B, H, T, D", *names)
        measure_parts(report, options, dtype, shape)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
