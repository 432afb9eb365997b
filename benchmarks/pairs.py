"""What effects, means over heads and comparisons cost, in forward passes of their own call.

    python benchmarks/pairs.py [--threads N] [--quick] [--json FILE]

Each question is asked alone, in float32, of weights that came from
``attention(..., return_weights=True)``. Effects are knockouts: sums of every key, the eight
strongest keys of each query, a heatmap of 512 × 512, and the 20 strongest pairs, once the sums over
rows are known from an earlier question; then the sums of every key as a first question, and as one
that is given the output. Of changes of the output too: once the outputs are known from an earlier
question, and for the first one, which computes them. The eight strongest keys of the mean over all
heads are counted in the time of those of the heads themselves.
Comparisons are with the weights of other queries and the same keys: the 20 pairs that differ most,
the Kullback–Leibler divergence of every row, that with the total variation and the overlap of the
eight strongest keys, and all divergences; then its gradient by the queries and keys of the other
weights alone, and by those of both, from the tensors on: row statistics, divergence, backward.
Beside the sums of effects and the divergence is their error, in errors of the formulas written out
in float32. Last, the heatmap of the effects of one long head, a first question without and with the
output, in the time of those of its weights: of the largest, which are found by
their scores alone, and of the mass, for which every weight is computed, as for effects.
"""

import common
import numpy as np
import torch
from second_pass import rows_of_weights

import regard

SHAPES = [(1, 8, 2048, 64), (1, 4, 8192, 64)]
LONG = 1, 1, 100_000, 64
QUICK = [(1, 2, 256, 16)]
NAMES = (
    "effects", "top-8", "picture", "strongest", "first effects", "given the output", "changes",
    "top-8 of changes", "picture of changes", "first changes", "difference", "KL",
    "KL, TV, overlap", "all divergences",
)  # fmt: skip
PICTURES = (
    "of weights", "of their mass", "of effects", "given the output", "effects in weights",
    "given the output in weights", "effects in mass", "given the output in mass",
)  # fmt: skip
SIDES = "gradient of KL by one", "by both"


def questions(weights, value, gradient, output, other):
    """Those of ``NAMES``."""
    effects, difference = weights.effects(value, gradient), regard.compare(weights, other)
    changes = weights.effects(value, kind="change")
    asked = (
        effects.received,
        lambda: effects.topk(8),
        lambda: effects.pool((512, 512)),
        lambda: effects.strongest(20),
        lambda: weights.effects(value, gradient).received(),
        lambda: weights.effects(value, gradient, output=output).received(),
        changes.received,
        lambda: changes.topk(8),
        lambda: changes.pool((512, 512)),
        lambda: weights.effects(value, kind="change").received(),
        lambda: difference.strongest(20),
        lambda: difference.divergence("kl"),
        lambda: difference.divergences(8, kinds=("kl", "total_variation", "overlap")),
        lambda: difference.divergences(8),
    )
    return dict(zip(NAMES, asked))


def gradients(q, k, other, keys, causal):
    """By ``SIDES``, of weights that have no key in common."""

    def gradient(by_both):
        given = q, k, other, keys
        wanted = given if by_both else given[2:]
        with torch.enable_grad():
            for x in given:
                x.requires_grad_(any(x is one for one in wanted))
            a, b = (
                regard.AttentionWeights(*pair, causal=causal) for pair in (given[:2], given[2:])
            )
            torch.autograd.grad(regard.divergence(a, b).sum(), wanted)

    return {name: lambda both=both: gradient(both) for name, both in zip(SIDES, (False, True))}


def written_out(q, k, v, g, other, causal, dtype, size=512):
    """Sums of the effects of one head, and its KL, in a dtype."""
    q, k, v, g, other = (x[0, 0].double().numpy().astype(dtype) for x in (q, k, v, g, other))
    size = min(size, len(k))
    sums, kl = 0, []
    both = zip(rows_of_weights(q, k, causal, size), rows_of_weights(other, k, causal, size))
    for low, (a, b) in zip(range(0, len(k), size), both):
        gv = g[low : low + len(a)] @ v.T
        row = (a * gv).sum(-1, keepdims=True)
        with np.errstate(all="ignore"):  # of keys that alone are seen, and of masked ones
            effects = np.where(a < 1, a / (1 - a) * (row - gv), -a * gv)
            kl.append(np.where(a > 0, a * np.log(a / b), 0).sum(-1))
        sums = sums + effects.sum(0)
    return {"effects": sums, "KL": np.concatenate(kl)}


def errors(found, *arrays):
    """In errors of the formulas in float32."""
    exact, low = (written_out(*arrays, dtype) for dtype in (np.float64, np.float32))
    return {
        name: common.largest_error(found[name][0, 0].double().numpy(), exact[name])
        / common.largest_error(low[name], exact[name])
        for name in exact
    }


def measure(report, options, shape, causal):
    """One row."""
    q, k, v, g, other = common.draw(*[shape] * 5, dtype="float32")
    output, weights = regard.attention(q, k, v, causal=causal, return_weights=True)
    others = regard.attention(other, k, v, causal=causal, return_weights=True)[1]
    asked = questions(weights, v, g, output, others) | gradients(
        q.clone(), k.clone(), other.clone(), v.clone(), causal
    )
    runs = {"forward": lambda: regard.attention(q, k, v, causal=causal)} | asked
    runs |= {"of heads": lambda: weights.topk(8), "of their mean": lambda: weights.mix().topk(8)}
    measured = common.interleave(runs, options, least=3)
    costs = {name: measured.ratio(name, to="forward")[0] for name in asked}
    mean = measured.ratio("of their mean", to="of heads")[0]
    lost = errors({name: asked[name]() for name in ("effects", "KL")}, q, k, v, g, other, causal)
    texts = [
        f"{costs[name]:.2f}" + (f" {lost[name]:.2f}x" if name in lost else "") for name in asked
    ]
    report.row(
        common.shape_name(shape), common.mask_name(causal), common.ms(measured.median("forward")),
        *texts, f"{mean:.2f}",
        dtype="float32", shape=shape, causal=causal, costs=costs, mean_top=mean, errors=lost,
    )  # fmt: skip


def measure_picture(report, options, shape):
    """One row: of weights and of effects, all from the row statistics on."""
    q, k, v, g = common.draw(*[shape] * 4, dtype="float32")
    output, weights = regard.attention(q, k, v, causal=True, return_weights=True)
    runs = {
        "weights": lambda: weights.pool((512, 512)),
        "mass": lambda: weights.pool((512, 512), "mass"),
        "effects": lambda: weights.effects(v, g).pool((512, 512)),
        "given the output": lambda: weights.effects(v, g, output=output).pool((512, 512)),
    }
    measured = common.interleave(runs, options, least=1)
    ratios = [
        measured.ratio(name, to=own)[0]
        for own in ("weights", "mass")
        for name in ("effects", "given the output")
    ]
    report.row(
        common.shape_name(shape), *(common.ms(measured.median(name)) for name in runs),
        *(f"{ratio:.2f}" for ratio in ratios),
        dtype="float32", shape=shape, causal=True, picture=ratios,
    )  # fmt: skip


def main():
    """Two tables."""
    options = common.read_options(__doc__)
    report = common.Report("pairs", options)
    report.table(
        "Matrices of pairs in forward passes, float32", "B, H, T, D", "mask", "forward", *NAMES,
        *SIDES, "top-8 of the mean",
    )  # fmt: skip
    for shape in QUICK if options.quick else SHAPES:
        for causal in (False, True):
            measure(report, options, shape, causal)
    report.table("Heatmaps of a long head, causal, float32", "B, H, T, D", *PICTURES)
    measure_picture(report, options, QUICK[0] if options.quick else LONG)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        main()
