"""Gradients of attention over some keys from the row statistics of all, for NumPy and torch alike.

With delta ``Σ w·dw`` of the whole rows, which is ``do · o``, no other key is needed: row by row
``dv = w'ᵀ·do``, ``dw = do·vᵀ`` through the dropout, ``ds = w · (dw − delta)``.
Source: Dao et al. 2022.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard._backends.formula import (
    BlocksOf,
    Finite,
    WeightBlock,
    apply,
    cap_derivatives,
    dropped,
    is_capped,
    kept_weights,
    key_heads,
    products,
    weight_blocks,
)
from regard._base.arrays import Arrays
from regard._call.call import Call
from regard._call.visible import part

Sums = dict[str, Any]  # by input: what its gradient is added to, in that input's shape


def add_gradients(
    xp: Arrays, call: Call, grad: Any, delta: Any, statistics: tuple[Any, Any], sums: Sums,
    blocks_of: BlocksOf = weight_blocks,
) -> None:  # fmt: skip
    """Adds the gradients of query, key, value and bias, block by block.

    Args:
        grad: ``(B, Hq, Lq, Dv)``, of the output of the whole.
        delta: ``(B, Hq, Lq)``, ``Σ grad · output`` of the whole.
        statistics: of the whole rows, ``(B, Hq, Lq)`` each.
        sums: by input.
        blocks_of: makes the blocks of weights, and knows the unit of the statistics.
    """
    query, key = (_finite(xp, x) for x in (call.query, call.key))
    whole = Finite(xp, grad)
    with np.errstate(all="ignore"):  # NaN and inf are valid results here
        for block in blocks_of(xp, call, statistics):
            b, h, keys = block.b, block.h, block.keys
            empty = block.total == 0
            q, do = (xp.where(empty, 0.0, xp.wide(x[block.index])) for x in (query, grad))
            keep = kept_weights(xp, call, *block.index, keys)
            if "value" in sums:
                w = dropped(xp, call, keep, block.weights)
                dv = apply(xp, _turned(w), _turned_mask(xp, block), do, whole)
                _add_to_keys(call, sums["value"], dv, b, h, keys)
            if sums.keys() <= {"value"}:
                continue
            v, k = (key_heads(xp, call, x, b, h)[:, :, keys] for x in (call.value, key))
            dw = dropped(xp, call, keep, xp.matmul(do, _turned(v)))
            own = xp.array(dw, delta[block.index][..., None])
            ds = _hidden(xp, block, block.weights * (_hidden(xp, block, dw) - own))
            if "bias" in sums:
                _accumulate(sums["bias"], ds, *block.index, keys)
            if is_capped(call):
                slope, _ = cap_derivatives(xp, call, products(xp, call, q, k))
                ds = _hidden(xp, block, ds * slope)
            ds = ds * call.scale
            if "query" in sums:
                _accumulate(sums["query"], xp.matmul(ds, k), *block.index, slice(None))
            if "key" in sums:
                _add_to_keys(call, sums["key"], xp.matmul(_turned(ds), q), b, h, keys)


def _finite(xp: Arrays, x: Any) -> Any:
    """A NaN that is seen comes back through the scores; elsewhere it would only spread."""
    return xp.where(xp.isfinite(x), x, 0.0)


def _turned(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def _turned_mask(xp: Arrays, block: WeightBlock) -> Any:
    if block.visible is None:
        return None
    return _turned(xp.broadcast(block.visible, block.shifted.shape))


def _hidden(xp: Arrays, block: WeightBlock, x: Any) -> Any:
    return x if block.visible is None else xp.hide(x, block.visible, 0.0)


def _add_to_keys(call: Call, total: Any, x: Any, b: slice, h: slice, keys: slice) -> None:
    """Adds ``(b, h, keys, D)`` to those of key heads, summed over the heads that share them."""
    group = call.sizes[1] // call.sizes[2]
    kv = slice(h.start // group, h.stop // group)
    shared = x.reshape((x.shape[0], kv.stop - kv.start, group, *x.shape[2:])).sum(2)
    _accumulate(total, shared, b, kv, keys, slice(None))


def _accumulate(total: Any, x: Any, *where: slice) -> None:
    """Adds x to a part of the total, summed over the axes in which the total has size 1."""
    own = part(total, *where)
    axes = tuple(a for a, (n, m) in enumerate(zip(x.shape, own.shape)) if m == 1 and n != 1)
    own += x.sum(axes).reshape(own.shape) if axes else x
