"""Linear forms of the weights, which are sums of them, as reductions: what a backend fills.

Products with vectors, sums over blocks of queries and keys, and sums along diagonals.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, NamedTuple

import numpy as np

from regard._base.arrays import accumulating_name, arrays_of
from regard._base.types import ArrayT, BlocksHow, IndexT
from regard._call.call import Call
from regard._call.visible import Visibility, sees


class Diagonals(NamedTuple, Generic[ArrayT, IndexT]):
    """Sums of the weights by distance, the query's position less the key's."""

    distances: IndexT
    """``(n,)`` int64: the distance of each sum; of a range its first."""
    values: ArrayT
    """``(..., Hq, n)`` sums of weights."""


def _operand(name: str, x: Any) -> dict[str, Any]:
    """Fields for ``(B or 1, Hq or 1, L, columns)``, contiguous, that weights are multiplied by."""
    B, Hq, L, columns = x.shape
    strides = (Hq * L * columns if B > 1 else 0, L * columns if Hq > 1 else 0)
    return {f"{name}_with": x, f"{name}_strides": strides, f"{name}_columns": columns}


class Product:
    """``W @ x``.

    Args:
        x: ``(B or 1, Hq or 1, Lk, columns)`` in the dtype of sums, contiguous.
    """

    columns = 512  # in one pass: a thread holds them for a tile of queries

    def __init__(self, call: Call, x: Any) -> None:
        B, Hq, _, Lq, _ = call.sizes
        shape = (B, Hq, Lq, x.shape[3])
        self._x, self._out = x, arrays_of(call.query).full(shape, 0.0, accumulating_name(x))

    def fields(self) -> dict[str, Any]:
        return {"product": self._out, **_operand("product", self._x)} if self._x.shape[3] else {}

    def result(self) -> Any:
        return self._out


class TransposedProduct:
    """``Wᵀ @ y``.

    Args:
        y: ``(B or 1, Hq or 1, Lq, columns)`` in the dtype of sums, contiguous.
    """

    columns = 128  # in one pass: each chunk of rows has them for all keys

    def __init__(self, call: Call, y: Any) -> None:
        B, Hq, _, _, Lk = call.sizes
        shape = (B, Hq, Lk, y.shape[3])
        self._y, self._out = y, arrays_of(call.query).full(shape, 0.0, "float64")

    def fields(self) -> dict[str, Any]:
        if not self._y.shape[3]:
            return {}
        return {"transposed": self._out, **_operand("transposed", self._y)}

    def result(self) -> Any:
        return self._out


class Blocks:
    """For each block of queries and block of keys a number made of their weights.

    Args:
        queries, keys: ``(B, Lq)`` and ``(B, Lk)``, int64: the block of each; negative for none.
        counts: how many blocks of queries and of keys there are.
    """

    def __init__(
        self, call: Call, queries: np.ndarray, keys: np.ndarray, counts: tuple[int, int],
        how: BlocksHow,
    ) -> None:  # fmt: skip
        B, Hq = call.sizes[:2]
        self._call, self._queries, self._keys, self._how = call, queries, keys, how
        self._out = arrays_of(call.query).full((B, Hq, *counts), 0.0, "float64")

    def fields(self) -> dict[str, Any]:
        counts = tuple(self._out.shape[2:])
        if 0 in counts:
            return {}
        ids = {"query_blocks": self._queries, "key_blocks": self._keys, "block_counts": counts}
        return {"blocks_max" if self._how == "max" else "blocks": self._out, **ids}

    def result(self) -> Any:
        if self._how in ("sum", "max") or 0 in self._out.shape:
            return self._out
        return self._out / arrays_of(self._call.query).array(self._out, self._divisors())

    def _divisors(self) -> np.ndarray:
        """The number of unmasked pairs of each block, or of queries; 1 where there are none."""
        counts = tuple(self._out.shape[2:])
        if self._how == "mass":
            found = np.stack([_count(ids, counts[0]) for ids in self._queries])[:, None, :, None]
        else:
            seen = zip(sees(self._call), self._queries, self._keys)
            found = np.stack([x.in_blocks(q, k, counts) for x, q, k in seen])
        return np.maximum(found, 1)


def _count(ids: np.ndarray, n: int) -> np.ndarray:
    return np.bincount(ids[ids >= 0], minlength=n)


class ByDistance:
    """The sum of the weights at each distance.

    Args:
        edges: ``(n + 1,)`` int64, the ranges of distances to sum over; by default each alone.
    """

    def __init__(self, call: Call, edges: np.ndarray | None) -> None:
        B, Hq = call.sizes[:2]
        self._call, self._edges = call, edges
        self._step = math.gcd(call.query_step, call.key_step)
        self._found = distances_of(call, self._step)
        self._first = np.array([x[0] if len(x) else 0 for x in self._found], np.int64)
        count = max([1, *map(len, self._found)])  # one of no pair has a gradient too, of 0
        self._out = arrays_of(call.query).full((B, Hq, count), 0.0, "float64")

    def fields(self) -> dict[str, Any]:
        count = self._out.shape[2]
        names = {"first_distances": self._first, "distance_step": self._step, "distances": count}
        return {"diagonals": self._out, **names}

    @cached_property
    def distances(self) -> np.ndarray:
        """``(n,)``: the distance of each sum, or the first of its range."""
        if self._edges is not None:
            return self._edges[:-1]
        if not self._found:
            return np.zeros(0, np.int64)
        same = all(x is self._found[0] for x in self._found)
        return self._found[0] if same else np.unique(np.concatenate(self._found))

    def result(self) -> Any:
        xp, each = arrays_of(self._call.query), self.distances
        out = xp.full((*self._out.shape[:2], len(each)), 0.0, "float64")
        for b, found in enumerate(self._found):
            sums = self._out[b]
            if self._edges is None:
                at = np.searchsorted(each, found)
                out[b][:, at] = sums[:, : len(found)]
                continue
            starts = np.searchsorted(found, self._edges)
            for n, (i, j) in enumerate(pairwise(starts)):
                out[b, :, n] = sums[:, i:j].sum(-1)
        return out


def distances_of(call: Call, step: int) -> list[np.ndarray]:
    """For each batch element the distances of all pairs, from the smallest to the largest.

    Of those pairs that lengths, order, window and intervals leave.
    """
    B, _, _, Lq, _ = call.sizes
    visibility, nothing = Visibility(call, np.arange), np.zeros(0, np.int64)
    found: list[np.ndarray] = []
    for b in range(B):
        if visibility.uniform and found:
            found.append(found[0])
            continue
        low, high = (np.broadcast_to(x, Lq) for x in visibility.interval(b, np.arange(Lq)))
        some = low < high
        at = visibility.starts[b] + np.arange(Lq)[some] * call.query_step
        if not len(at):
            found.append(nothing)
            continue
        least = int((at - (high[some] - 1) * call.key_step).min())
        most = int((at - low[some] * call.key_step).max())
        found.append(np.arange(least, most + 1, step))
    return found
