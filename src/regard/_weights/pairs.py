"""Weights at chosen pairs: a gather of O(pairs · D), without the rows that they are in."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard._backends.formula import capped, edited_pairs
from regard._base.arrays import NumpyArrays, to_numpy
from regard._base.types import Bool, Float, Int
from regard._call.call import Call
from regard._call.visible import picked

ELEMENTS = 2**17  # of one gathered block, which stays in the cache: 1.3 times over 2**20


def weights_at(
    call: Call,
    lse: Float[np.ndarray, "heads Lq"],
    queries: Int[np.ndarray, " n"],
    keys: Int[np.ndarray, " n"],
    seen: Bool[np.ndarray, "heads n"],
) -> Float[np.ndarray, "heads n"]:
    """The weights of some pairs, by q·k and the ``lse`` of the rows; 0 where masked.

    Args:
        call: without a batch.
        lse: of each row.
        queries, keys: indices of the pairs.
        seen: ``Seen.pairs`` of them.
    """
    _, Hq, Hkv, *_ = call.sizes
    q, k = _by_token(call.query), _by_token(call.key)
    D = q.shape[-1] // max(1, Hq)
    s = np.empty((len(queries), Hkv, Hq // max(1, Hkv)), q.dtype)
    each = max(1, ELEMENTS // max(1, Hq * D))
    with np.errstate(all="ignore"):  # of masked pairs
        for start in range(0, len(queries), each):
            part = slice(start, start + each)
            of_q = q.take(queries[part], 0).reshape(-1, *s.shape[1:], D)
            of_k = k.take(keys[part], 0).reshape(-1, Hkv, D)
            np.einsum("nkgd,nkd->nkg", of_q, of_k, out=s[part])
        scores = capped(NumpyArrays(), call, s.reshape(-1, Hq).T * call.scale)
        if call.bias is not None:
            scores = scores + picked(to_numpy(call.bias)[0], queries, keys)
        if call.rectangles:
            scores = scores + edited_pairs(call, queries, keys)
        found = np.exp(scores - lse[:, queries])
    weighs = lse[:, queries] != -np.inf  # a row whose every score is −inf has no weight
    return np.where(seen & weighs, np.minimum(found, 1), 0)


def _by_token(x: Any) -> Float[np.ndarray, "L HD"]:
    """The vectors of all heads side by side, so that a token's are gathered at once."""
    x = to_numpy(x)[0].swapaxes(0, 1)
    wide = x if x.dtype == np.float64 else x.astype(np.float32, copy=False)
    return np.ascontiguousarray(wide).reshape(len(x), -1)
