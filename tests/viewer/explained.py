"""Recordings with effects, and the dense formulas of these in float64."""

import functools

import numpy as np

from definition import define, visible_pairs
from regard import Edit
from regard.recording import Layer, Recording

KINDS = ("knockout", "contribution", "relevance", "gradient", "change")
SHOWN = ("causal", "window", "mask", "key_lengths", "segments", "intervals", "query_start", "edits")


def numbers(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def explained(Lq=45, Lk=None, heads=4, key_heads=2, size=6, seed=0, **options):
    """A layer with values and a gradient; each row's gradient is of another size."""
    Lk = Lk or Lq
    sizes = np.exp(np.random.default_rng(seed).standard_normal((1, Lq, 1))).astype(np.float32)
    return Layer(
        1.5 * numbers(heads, Lq, size, seed=seed + 1),
        1.5 * numbers(key_heads, Lk, size, seed=seed + 2),
        numbers(key_heads, Lk, 3, seed=seed + 3),
        gradient=0.1 * sizes * numbers(heads, Lq, 3, seed=seed + 4), **options,
    )  # fmt: skip


def of(*layers, **more):
    return Recording([f" t{n}" for n in range(layers[0].key.shape[1])], layers, **more)


@functools.cache
def weights_of(found, head):
    """Weights and unmasked pairs of a head."""
    one = found.head(found.head_numbers[head])
    q, k = (np.asarray(x, float)[None] for x in (one.query, one.key))
    options = {name: x for name, x in one.options.items() if name in SHOWN}
    visible = visible_pairs(1, 1, q.shape[2], k.shape[2], **options)[0, 0]
    return define(q, k, **one.options)[0][0, 0], visible


@functools.cache
def dense(found, head, kind="knockout"):
    """``(Lq, Lk)`` float64 of the plain formulas, 1 − w as the sum of the others; NaN is masked."""
    one = found.head(found.head_numbers[head])
    v, g = (np.asarray(x[0], float) for x in (one.value, one.gradient))
    w, visible = weights_of(found, head)
    gv, first = g @ v.T, w == w.max(1, keepdims=True)
    small = np.where(first, 0, w)  # a row without its largest weight, whose 1 − w may be tiny
    of_sink = np.where(visible.any(1), 1 - w.sum(1), 0)[:, None] if "sinks" in one.options else 0
    rest = np.where(first, small.sum(1, keepdims=True) + of_sink, 1 - w)
    rest = np.where(rest < 1e-300, np.inf, rest)  # the output is 0 then
    output = (w @ v)[:, None] - w[..., None] * v
    left = np.where(first[..., None], (small @ v)[:, None], output) / rest[..., None]
    values = {
        "knockout": w * ((g[:, None] * left).sum(-1) - gv),
        "contribution": w * gv,
        "relevance": np.maximum(w * gv, 0),
        "gradient": gv,
        "change": w * np.linalg.norm(left - v, axis=-1),
    }
    return np.where(visible, values[kind], np.nan)


def binned(x, side):
    """The number of largest size in bins of ``side`` × ``side``; NaN where all is masked."""
    rows, columns = (-(-n // side) for n in x.shape)
    padded = np.full((rows * side, columns * side), np.nan)
    padded[: x.shape[0], : x.shape[1]] = x
    bins = padded.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(rows, columns, -1)
    at = np.nan_to_num(abs(bins), nan=-1).argmax(-1)
    return np.take_along_axis(bins, at[..., None], -1)[..., 0]


def mean(*matrices):
    """What some heads have on average; a pair that some mask counts as 0 there."""
    found = np.array(matrices)
    return np.where(np.isnan(found).all(0), np.nan, np.nan_to_num(found).mean(0))


def strongest(x, n, rows=slice(None), columns=slice(None)):
    """``[(query, key, number), …]``, largest in size first."""
    part = np.nan_to_num(x[rows, columns])
    flat = np.argsort(-abs(part).reshape(-1), kind="stable")[:n]
    top, left = rows.start or 0, columns.start or 0
    return [(i + top, j + left, part[i, j]) for i, j in zip(*np.unravel_index(flat, part.shape))]


def close(found, exact, layer, kind="knockout"):
    """Within what float32 gives of the largest product of a value and a gradient."""
    sizes = (
        np.linalg.norm(np.asarray(x, float), axis=-1).max() for x in (layer.value, layer.gradient)
    )
    scale = np.prod(list(sizes)) if kind != "change" else np.linalg.norm(layer.value, axis=-1).max()
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * scale)


L = 45
NO_LAST = np.ones((L, L), bool)
NO_LAST[5] = False  # a query that sees nothing
NO_LAST[:, 30] = False
RECORDINGS = {
    "causal": of(explained(causal=True)),
    "one token": of(explained(1, causal=True)),
    "later queries": of(explained(9, L, causal=True)),
    "cross": of(explained(L, 11), query_tokens=[f"q{n}" for n in range(L)]),
    "sinks": of(explained(causal=True, window=(4, 0), sinks=numbers(4, seed=4))),
    "mask": of(explained(mask=NO_LAST)),
    "mask of heads": of(explained(mask=numbers(4, 1, L, seed=5) > 0)),
    "edits": of(explained(causal=True, edits=[Edit(None, slice(9, None), 5, 4.0), Edit(3, 30)])),
    "all at once": of(
        explained(
            causal=True, window=(9, 0), softcap=4.0, scale=0.9, key_lengths=37, query_start=0,
            segments=np.arange(L) // 20, sinks=numbers(4, seed=8), bias=numbers(1, L, L, seed=7),
        )
    ),
    "near 1": of(explained(size=40, causal=True)),
    "several tiles": of(explained(270, heads=2, causal=True)),
}  # fmt: skip
