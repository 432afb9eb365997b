"""Weights of chosen pairs by the formula: a gather of O(pairs · D), given the row statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard._backends.formula import capped, edited_pairs, scaled, shifted_by
from regard._base.arrays import Arrays
from regard._base.types import Int
from regard._call.call import Call
from regard._call.contents import check_contents
from regard._call.visible import picked, sees

ELEMENTS = 2**20  # of the vectors that are gathered at once


def gather_weights(
    xp: Arrays,
    call: Call,
    statistics: tuple[Any, Any],
    queries: Int[np.ndarray, " n"],
    keys: Int[np.ndarray, " n"],
) -> Any:
    """``(B, Hq, n)``: the weights of some pairs; 0 where masked.

    Args:
        statistics: maximum and total ``(B, Hq, Lq)`` of the rows.
        queries, keys: indices of the pairs, not negative.
    """
    check_contents(call)
    B, Hq, *_ = call.sizes
    out = xp.full((B, Hq, len(queries)), 0.0, xp.dtype)
    if 0 in out.shape:
        return out
    seen = sees(call)
    each = max(1, ELEMENTS // max(1, B * Hq * call.query.shape[3]))
    with np.errstate(all="ignore"):  # of masked pairs
        for start in range(0, len(queries), each):
            i, j = queries[start : start + each], keys[start : start + each]
            s = pair_scores(xp, call, i, j)
            maximum, total = (xp.array(s, np.asarray(x)[:, :, i]) for x in statistics)
            w = xp.exp(shifted_by(xp, s, maximum, total)) / (total + (total == 0))
            visible = np.stack([np.broadcast_to(x.pairs(i, j), s.shape[1:]) for x in seen])
            out[:, :, start : start + each] = xp.where(xp.cast(_like(xp, visible), "bool"), w, 0.0)
    return out


def _like(xp: Arrays, x: np.ndarray) -> Any:
    """An array of NumPy in the library of ``xp``."""
    return xp.array(xp.empty((0,), "bool"), x)


def pair_scores(xp: Arrays, call: Call, i: Int[np.ndarray, " n"], j: Int[np.ndarray, " n"]) -> Any:
    """``(B, Hq, n)``: the scores of some pairs, masked ones too, by all of their vectors at once.

    Args:
        i, j: indices of queries and keys, not negative.
    """
    B, Hq, Hkv, *_ = call.sizes
    q, k = xp.wide(call.query[:, :, i]), xp.wide(call.key[:, :, j])
    q = q.reshape((B, Hkv, Hq // max(Hkv, 1), *q.shape[2:]))
    s = capped(xp, call, scaled(call, (q * k[:, :, None]).sum(-1).reshape((B, Hq, -1))))
    if call.bias is not None:
        bias = [picked(x, i, j) for x in call.bias]
        s = s + xp.wide(bias[0][None] if len(bias) == 1 else xp.stack(bias, 0))
    return s + xp.array(s, edited_pairs(call, i, j)) if call.rectangles else s
