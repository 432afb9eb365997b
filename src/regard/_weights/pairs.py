"""Weights at chosen pairs: a gather of O(pairs · D), without the rows that they are in."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard._backends.formula import capped
from regard._base.arrays import NumpyArrays, to_numpy
from regard._base.types import Bool, Float, Int
from regard._call.call import Call
from regard._call.visible import Visibility

ELEMENTS = 2**17  # of one gathered block, which stays in the cache: 1.3 times over 2**20
BLOCK_PAIRS = 2**22  # of one block of a mask


class Seen:
    """The keys that the queries of one call see, which has no batch; where heads agree, once.

    Attributes:
        low, high: ``(Lq,)``, the interval in which they are.
        count: ``(H or 1, Lq)``, how many.
    """

    def __init__(self, call: Call) -> None:
        Lq, self._Lk = call.sizes[3:]
        self._call, rows = call, np.arange(Lq)
        low, high = Visibility(call, NumpyArrays().arange).interval(0, rows)
        self.low, self.high = (np.broadcast_to(x, Lq) for x in (low, high))
        self._segments = None
        if call.query_segments is not None:
            self._segments = to_numpy(call.query_segments)[0], to_numpy(call.key_segments)[0]
        self._mask = None if call.mask is None else to_numpy(call.mask)[0]
        self.count = self.of(np.ones((1, self._Lk), bool))[..., 0]

    def equals(self, other: Seen) -> bool:
        """Whether they are known to be the same keys; masks and segments are not compared."""
        return (
            all(x is None for one in (self, other) for x in (one._segments, one._mask))
            and self._Lk == other._Lk
            and np.array_equal(self.low, other.low)
            and np.array_equal(self.high, other.high)
        )

    def pairs(
        self, queries: Int[np.ndarray, " n"], keys: Int[np.ndarray, " n"]
    ) -> Bool[np.ndarray, "heads n"]:
        """Whether each pair is unmasked."""
        found = (self.low[queries] <= keys) & (keys < self.high[queries])
        if self._segments is not None:
            found &= self._segments[0][queries] == self._segments[1][keys]
        found = found[None]
        return found if self._mask is None else found & _picked(self._mask, queries, keys)

    def of(self, sets: Bool[np.ndarray, "sets Lk"]) -> Int[np.ndarray, "heads Lq sets"]:
        """How many keys of each set each query sees."""
        if self._segments is None and self._mask is None:
            upto = np.zeros((len(sets), self._Lk + 1), np.int64)
            np.cumsum(sets, -1, out=upto[:, 1:])
            return (upto[:, self.high] - upto[:, self.low]).T[None]
        heads, Lq, every = self._heads, len(self.low), np.arange(self._Lk)
        counts = np.zeros((heads, Lq, len(sets)), np.int64)
        columns, height = sets.T.astype(np.float32), max(1, BLOCK_PAIRS // max(1, self._Lk))
        for start in range(0, Lq, height):
            rows = np.arange(start, min(start + height, Lq))
            queries, keys = (x.reshape(-1) for x in np.meshgrid(rows, every, indexing="ij"))
            seen = self.pairs(queries, keys).reshape(-1, len(rows), self._Lk)
            counts[:, rows] = np.rint(seen.astype(np.float32) @ columns)
        return counts

    @property
    def _heads(self) -> int:
        return 1 if self._mask is None else len(self._mask)


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
            scores = scores + _picked(to_numpy(call.bias)[0], queries, keys)
        found = np.exp(scores - lse[:, queries])
    return np.where(seen, np.minimum(found, 1), 0)


def _by_token(x: Any) -> Float[np.ndarray, "L HD"]:
    """The vectors of all heads side by side, so that a token's are gathered at once."""
    x = to_numpy(x)[0].swapaxes(0, 1)
    wide = x if x.dtype == np.float64 else x.astype(np.float32, copy=False)
    return np.ascontiguousarray(wide).reshape(len(x), -1)


def _picked(x: Any, queries: np.ndarray, keys: np.ndarray) -> Any:
    """``x[:, queries, keys]`` of an array whose axes may be of size 1."""
    rows, columns = (i if n > 1 else 0 * i for n, i in zip(x.shape[1:], (queries, keys)))
    return x[:, rows, columns]
