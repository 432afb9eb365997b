"""Attention of a whole text cut into pieces of its tokens, as processes would have them."""

from __future__ import annotations

import itertools

import numpy as np

import regard
from recordings import numbers

B, HQ, HKV, T, D, DV = 2, 4, 2, 53, 8, 5
EDITS = [
    regard.Edit(1, slice(3, 40), slice(5, 30), 0.3),
    regard.Edit(queries=slice(20, None), keys=7),
    regard.Edit(queries=11, factor=2.5),
]
CASES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "causal window": {"causal": True, "window": (12, None)},
    "lengths": {"causal": True, "key_lengths": np.array([53, 31])},
    "documents": {"causal": True, "segments": np.sort(np.arange(T) * 7 % 5)},
    "scattered ids": {"segments": (np.arange(2 * T).reshape(2, T) % 3, np.arange(T) % 4)},
    "intervals": {"intervals": (np.arange(T) // 2, 60 - np.arange(2 * T).reshape(2, T) // 3)},
    "mask": {"mask": np.random.default_rng(5).random((HQ, T, T)) < 0.4},
    "bias": {"causal": True, "bias": numbers(HQ, T, T, seed=6)},
    "sinks": {"causal": True, "sinks": 2 * numbers(HQ, seed=7)},
    "cap": {"causal": True, "softcap": 1.5},
    "edits": {"edits": EDITS},
    "dropout": {"causal": True, "dropout": 0.4, "seed": 3},
    "large scores": {"causal": True, "scale": 3e4},
    "sinks above all": {"sinks": np.array([60.0, -60.0, 3.0, 0.0]), "scale": 3.0},
    "nobody sees": {"intervals": (np.arange(T) % 5 * 20, np.arange(T) % 7 * 9)},
}  # fmt: skip
ORDERS = ("contiguous", "zigzag", "striped", "uneven")


def pieces_of(order, length=T):
    """Ranges of positions that together are the whole."""
    if order == "striped":
        return [range(first, length, 3) for first in range(3)]
    shares = {"contiguous": (0, 1, 2, 3), "zigzag": (0, 1, 2, 3, 4), "uneven": (0, 0.1, 0.9, 3)}
    ends = [int(x * length / shares[order][-1]) for x in shares[order]]
    found = [range(low, high) for low, high in itertools.pairwise(ends)]
    return [found[n] for n in (0, 3, 1, 2)] if order == "zigzag" else found


def span(piece):
    return slice(piece.start, piece.stop, piece.step)


def inputs(seed=0, dtype="float64"):
    """Query, key, value and the gradient of the output."""
    shapes = (HQ, D), (HKV, D), (HKV, DV), (HQ, DV)
    return [
        numbers(B, heads, T, size, seed=seed + n).astype(dtype)
        for n, (heads, size) in enumerate(shapes)
    ]


def along(x, axis, piece):
    """The piece's part of an axis, where x has it and is not broadcast along it."""
    if x.ndim < -axis or x.shape[axis] == 1:
        return x
    return x.swapaxes(axis, -1)[..., span(piece)].swapaxes(axis, -1)


def of_pieces(options, queries, keys, start=0):
    """The options of a part: positions, and what is an array of its tokens.

    Query 0 of the whole is at ``start``.
    """
    found = dict(options)
    if "segments" in found:
        ids = found["segments"]
        of_queries, of_keys = ids if isinstance(ids, tuple) else (ids, ids)
        found["segments"] = of_queries[..., span(queries)], of_keys[..., span(keys)]
    if "intervals" in found:
        found["intervals"] = tuple(x[..., span(queries)] for x in found["intervals"])
    for name in ("mask", "bias"):
        if name in found:
            found[name] = along(along(found[name], -2, queries), -1, keys)
    places = {"query_start": start + queries.start, "query_step": queries.step}
    return found | places | {"key_start": keys.start, "key_step": keys.step}


def without(options, *names):
    return {name: x for name, x in options.items() if name not in names}
