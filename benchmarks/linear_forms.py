"""What sums of the weights cost, and their gradients, in forward passes of their own call.

    python benchmarks/linear_forms.py [--threads N] [--dtype float32 bfloat16] [--quick]
                                      [--json FILE]

The first table is of products with one column and with eight, 100 × 100 blocks, diagonals, the mean
over the queries that see a key, and T pairs, each alone, on weights that came fresh from
``attention(..., return_weights=True)``. Beside the cost is the error, in errors of the same sums of
weights written out in float32.

The second table is what a reduction costs together with its gradient by query and key, of causal
weights; the error is that of the query's gradient at up to 2,048 tokens, in errors of float32.
"""

import common
import numpy as np
import torch
from second_pass import rows_of_weights

import regard

SHAPES = [(1, 8, 2048, 64), (1, 4, 8192, 64)]
QUICK = [(1, 2, 256, 16)]
BLOCKS = 100


def block_ids(length):
    """The block of each token, of equal ones."""
    return np.arange(length) * BLOCKS // length


def columns_of(length, n):
    """The same n columns of random numbers each time."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal((length, n)).astype("f4"))


def linear_forms(length):
    """Each by its name, for weights of as many queries and keys."""
    one, eight, ids = columns_of(length, 1), columns_of(length, 8), block_ids(length)
    i = np.arange(length)
    return {
        "W @ x": lambda weights: weights @ one,
        "W @ x, 8": lambda weights: weights @ eight,
        "W.T @ y": lambda weights: weights.T @ one,
        "W.T @ y, 8": lambda weights: weights.T @ eight,
        "blocks": lambda weights: weights.blocks(ids, ids),
        "diagonals": lambda weights: weights.diagonals().values,
        "received seen": lambda weights: weights.received("seen"),
        "at": lambda weights: weights.at(i, i // 2),
    }


def linear_written_out(q, k, causal, size=512):
    """Every linear form of one head, in the dtype of q."""
    T, dtype = len(k), q.dtype.type
    ids = block_ids(T)
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    x = {n: columns_of(T, n).numpy().astype(dtype) for n in (1, 8)}
    product, transposed = {1: [], 8: []}, {1: 0, 8: 0}
    blocks = np.zeros((ids[-1] + 1, ids[-1] + 1), dtype)
    diagonals, received, at = np.zeros(2 * T - 1, dtype), 0, []
    for low, w in zip(range(0, T, size), rows_of_weights(q, k, causal, min(size, T))):
        rows = slice(low, low + len(w))
        for n, columns in x.items():
            product[n].append(w @ columns)
            transposed[n] = transposed[n] + w.T @ columns[rows]
        np.add.at(blocks, ids[rows], np.add.reduceat(w, starts, axis=1))
        turned = np.concatenate([w[:, ::-1], np.zeros((len(w), len(w)), dtype)], 1).reshape(-1)
        sums = turned[: -len(w)].reshape(len(w), -1).sum(0)  # of the diagonals of these rows
        diagonals[low : low + len(sums)] += sums
        received = received + w.sum(0)
        at.append(w[np.arange(len(w)), np.arange(low, low + len(w)) // 2])
    seen = np.arange(T, 0, -1) if causal else T
    return {
        "W @ x": np.concatenate(product[1]), "W @ x, 8": np.concatenate(product[8]),
        "W.T @ y": transposed[1], "W.T @ y, 8": transposed[8], "blocks": blocks,
        "diagonals": diagonals[T - 1 :] if causal else diagonals,
        "received seen": received / seen, "at": np.concatenate(at),
    }  # fmt: skip


def linear_errors(weights, q, k, causal):
    """Errors of every linear form of the first head, in errors of float32."""
    one = [x[0, 0].double().numpy() for x in (q, k)]
    exact = linear_written_out(*one, causal)
    low = linear_written_out(*(x.astype(np.float32) for x in one), causal)
    lost = {}
    for name, ask in linear_forms(q.shape[2]).items():
        found = ask(weights)[0, 0].double().numpy()
        lost[name] = common.largest_error(found, exact[name])
        lost[name] /= common.largest_error(low[name], exact[name])
    return lost


def measure_linear(report, options, dtype, shape, causal):
    """One row: the forward pass, and every linear form of its weights."""
    q, k, v = common.draw(shape, shape, shape, dtype=dtype)
    weights = regard.attention(q, k, v, causal=causal, return_weights=True)[1]
    lost, forms = linear_errors(weights, q, k, causal), linear_forms(shape[2])
    runs = {"forward": lambda: regard.attention(q, k, v, causal=causal)}
    runs |= {name: lambda ask=ask: ask(weights) for name, ask in forms.items()}
    measured = common.interleave(runs, options, least=3)
    costs = {name: measured.ratio(name, to="forward")[0] for name in forms}
    report.row(
        common.shape_name(shape), common.mask_name(causal), common.ms(measured.median("forward")),
        *(f"{costs[name]:.2f} {lost[name]:.2f}x" for name in forms),
        dtype=dtype, shape=shape, causal=causal, linear_costs=costs, linear_errors=lost,
    )  # fmt: skip


def gradient_of(loss_of, weights, query, key):
    """Of a fixed weighted sum of what is asked, by query and key."""
    found = loss_of(weights)
    upstream = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).reshape(found.shape)
    return torch.autograd.grad((found * upstream).sum(), (query, key))


def sums_by_distance(w):
    """The sums along the diagonals of a causal matrix."""
    each = torch.arange(len(w))
    apart = (each[:, None] - each).abs()  # what follows has no weight
    return w.new_zeros(len(w)).index_add(0, apart.flatten(), w.flatten())


def differentiable_sums(length):
    """Reductions with a gradient, each by its name, of AttentionWeights and of a whole matrix."""
    one, ids = columns_of(length, 1), block_ids(length)
    blocks = torch.nn.functional.one_hot(torch.from_numpy(ids)).double()
    each = torch.arange(length)
    return {
        "entropy": (
            lambda w: w.entropy(), lambda w: -(w * w.clamp(min=1e-300 if w.dtype == torch.float64
                                                           else 1e-38).log()).sum(-1)),
        "received": (lambda w: w.received(), lambda w: w.sum(-2)),
        "W @ x": (lambda w: w @ one, lambda w: w @ one.to(w.dtype)),
        "W.T @ y": (lambda w: w.T @ one, lambda w: w.mT @ one.to(w.dtype)),
        f"{BLOCKS} × {BLOCKS} blocks": (
            lambda w: w.blocks(ids, ids),
            lambda w: blocks.mT.to(w.dtype) @ w @ blocks.to(w.dtype),
        ),
        "diagonals": (lambda w: w.diagonals().values, sums_by_distance),
        "distance": (
            lambda w: w.distance(), lambda w: (w * (each[:, None] - each).to(w.dtype)).sum(-1)),
    }  # fmt: skip


def gradient_errors(q, k):
    """Errors of the query's gradient of the first head, causal, in errors of float32."""
    lost, hidden = {}, ~common.lower(q.shape[2])
    for name, (ask, plainly) in differentiable_sums(q.shape[2]).items():
        found = {}
        for dtype in (torch.float64, torch.float32):
            own = [x[0, 0].to(dtype).requires_grad_() for x in (q, k)]
            scores = own[0] @ own[1].mT / q.shape[3] ** 0.5
            whole = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            found[dtype] = gradient_of(plainly, whole, *own)[0].double().numpy()
        own = [x[0, 0].clone().requires_grad_() for x in (q, k)]
        ours = gradient_of(ask, regard.AttentionWeights(*own, causal=True), *own)[0]
        exact = found[torch.float64]
        lost[name] = common.largest_error(ours, exact)
        lost[name] /= common.largest_error(found[torch.float32], exact)
    return lost


def measure_gradients(report, options, shape):
    """One row: causal weights of a forward pass, each reduction and its gradient."""
    with torch.enable_grad():
        query, key, value = common.draw(shape, shape, shape, dtype="float32")
        sums, lost = (
            differentiable_sums(shape[2]),
            gradient_errors(*(x[:, :1, :2048] for x in (query, key))),
        )
        own = [x.requires_grad_() for x in (query, key)]
        weights = regard.attention(*own, value, causal=True, return_weights=True)[1]

        def forward():
            with torch.no_grad():
                return regard.attention(*own, value, causal=True)

        runs = {"forward": forward}
        runs |= {
            name: lambda ask=ask: gradient_of(ask, weights, *own) for name, (ask, _) in sums.items()
        }
        measured = common.interleave(runs, options, least=3)
    costs = {name: measured.ratio(name, to="forward")[0] for name in sums}
    report.row(
        common.shape_name(shape), common.ms(measured.median("forward")),
        *(f"{costs[name]:.2f} {lost[name]:.2f}x" for name in sums),
        dtype="float32", shape=shape, gradient_costs=costs, gradient_errors=lost,
    )  # fmt: skip


def main():
    """Two tables: the second of float32."""
    options = common.read_options(__doc__, dtypes=["float32", "bfloat16"])
    report = common.Report("linear_forms", options)
    for dtype in options.dtype:
        report.table(
            f"Linear forms in forward passes, {dtype}", "B, H, T, D", "mask", "forward",
            *linear_forms(1),
        )  # fmt: skip
        for shape in QUICK if options.quick else SHAPES:
            for causal in (False, True):
                measure_linear(report, options, dtype, shape, causal)
        if dtype == "float32":
            names = differentiable_sums(BLOCKS)
            title = "Gradients in forward passes, causal, float32"
            report.table(title, "B, H, T, D", "forward", *names)
            for shape in QUICK if options.quick else SHAPES:
                measure_gradients(report, options, shape)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
