"""Reductions of a matrix of signed numbers, in one pass over blocks of its rows.

What is largest, here, is what is largest in size: a strong negative number counts as much as a
positive one. Results have the sign.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np

from regard._backends.block_reductions import bins_of, gathered
from regard._backends.formula import apply
from regard._base.arrays import Arrays
from regard._base.errors import a_type
from regard._base.types import ArrayT, IndexT
from regard._weights.reductions import (
    TopKeys,
    check_k,
    is_pair_of_ints,
    require_room_for_bins,
    require_room_for_keys,
    require_room_for_pairs,
)


class TopPairs(NamedTuple, Generic[ArrayT, IndexT]):
    """The token pairs with the largest numbers, largest in size first.

    -1, -1, 0.0 once there are no more. NaN is left out.
    """

    query: IndexT
    """``(..., H, n)`` query indices, int64."""
    key: IndexT
    """``(..., H, n)`` key indices, int64."""
    value: ArrayT
    """``(..., H, n)`` numbers, with their sign."""


class Block(NamedTuple):
    """Some rows of one matrix, and the keys outside which they are masked."""

    b: int
    h: int
    rows: slice
    keys: slice
    values: Any  # (rows, keys); 0 where masked
    visible: Any  # bool (rows, keys), or None: every pair


class Extent(NamedTuple):
    """What a reduction is over."""

    xp: Arrays
    dtype: str  # of results
    shape: tuple[int, int, int, int]  # B, H, Lq, Lk


class PairReduction(Protocol):
    """One reduction of a matrix."""

    def update(self, block: Block) -> None:
        """Takes the next rows."""

    def fields(self) -> dict[str, Any] | None:
        """Numbers, and the arrays ``(B, H, ...)`` into which a backend that reduces the matrix
        itself writes (``PairBackend``); None: it takes rows.
        """

    def result(self) -> Any:
        """Its arrays ``(B, H, ...)``, after the last rows, or once these arrays are filled."""


class Dense:
    """The numbers themselves: ``(B, H, Lq, Lk)``."""

    def __init__(self, of: Extent) -> None:
        self._xp, self._out = of.xp, of.xp.full(of.shape, 0.0, of.dtype)

    def update(self, block: Block) -> None:
        part = self._out[block.b, block.h, block.rows, block.keys]
        part[...] = self._xp.array(part, block.values)

    def fields(self) -> None:
        return None

    def result(self) -> Any:
        return self._out


class TopK:
    """The k largest keys of every query: unmasked ones first, and NaN last among these."""

    def __init__(self, of: Extent, k: int) -> None:
        B, H, Lq, self._Lk = of.shape
        check_k(k, self._Lk, "keys")
        self._xp, self._k = of.xp, int(k)
        require_room_for_keys((B, H, Lq, self._k), of.dtype)
        self._values = of.xp.full((B, H, Lq, self._k), 0.0, of.dtype)
        self._indices = of.xp.full((B, H, Lq, self._k), 0, "int64")

    def update(self, block: Block) -> None:
        xp, (low, high) = self._xp, (block.keys.start, block.keys.stop)
        size = xp.where(xp.isnan(block.values), -1.0, abs(block.values))
        if block.visible is not None:
            size = xp.hide(size, block.visible, -2.0)
        k, at = min(self._k, high - low), (block.b, block.h, block.rows)
        _, indices = xp.top(size, k)
        values = xp.gather(block.values, indices)
        self._values[(*at, slice(0, k))] = xp.array(self._values, values)
        self._indices[(*at, slice(0, k))] = indices + low
        if k < self._k:  # the block is narrower: fill up with any other keys
            others = np.concatenate([np.arange(low), np.arange(high, self._Lk)])[: self._k - k]
            self._indices[(*at, slice(k, None))] = xp.array(self._indices, others)

    def fields(self) -> dict[str, Any]:
        return {"k": self._k, "top_values": self._values, "top_keys": self._indices}

    def result(self) -> TopKeys[Any, Any]:
        return TopKeys(self._values, self._indices)


class Strongest:
    """The n largest pairs of each matrix."""

    def __init__(self, of: Extent, n: int) -> None:
        B, H, Lq, Lk = of.shape
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"strongest: n is {a_type(n)}; an int is needed.")
        if n < 0:
            raise ValueError(f"strongest: n is {n}; it must not be negative.")
        self._xp, self._n = of.xp, min(int(n), Lq * Lk)
        require_room_for_pairs((B, H, self._n), of.dtype)
        self._value = of.xp.full((B, H, self._n), 0.0, of.dtype)
        self._query, self._key = (of.xp.full((B, H, self._n), -1, "int64") for _ in range(2))

    def update(self, block: Block) -> None:
        xp, width, at = self._xp, block.keys.stop - block.keys.start, (block.b, block.h)
        flat = xp.array(self._value, block.values).reshape(-1)
        if not flat.shape[0] or not self._n:
            return
        flat = xp.where(xp.isnan(flat), 0.0, flat)
        _, where = xp.top(abs(flat), min(self._n, flat.shape[0]))
        value = xp.concatenate([self._value[at], xp.gather(flat, where)])
        query = xp.concatenate([self._query[at], where // width + block.rows.start])
        key = xp.concatenate([self._key[at], where % width + block.keys.start])
        size, order = xp.top(abs(value), self._n)
        self._value[at] = xp.gather(value, order)
        self._query[at] = (xp.gather(query, order) + 1) * (size > 0) - 1
        self._key[at] = (xp.gather(key, order) + 1) * (size > 0) - 1

    def fields(self) -> dict[str, Any]:
        pairs = {"pair_query": self._query, "pair_key": self._key, "pair_value": self._value}
        return {"n": self._n, **pairs}

    def result(self) -> TopPairs[Any, Any]:
        return TopPairs(self._query, self._key, self._value)


class Received:
    """For each key the sum or mean over the queries, or the largest number."""

    def __init__(self, of: Extent, how: str) -> None:
        if how not in ("sum", "mean", "max"):
            raise ValueError(f"received: how is {how!r}; 'sum', 'mean' or 'max' is needed.")
        B, H, Lq, Lk = of.shape
        self._xp, self._how, self._queries = of.xp, how, max(1, Lq)
        self._out = of.xp.full((B, H, Lk), 0.0, "float64")

    def update(self, block: Block) -> None:
        xp, at = self._xp, (block.b, block.h, block.keys)
        if self._how == "max":
            found = xp.array(self._out, _largest(xp, block.values, 0))
            known = self._out[at]
            keep = (abs(known) >= abs(found)) | xp.isnan(known)
            self._out[at] = xp.where(keep, known, found)
        else:
            self._out[at] += block.values.sum(0)

    def fields(self) -> dict[str, Any]:
        return {"received_max" if self._how == "max" else "received": self._out}

    def result(self) -> Any:
        return self._out / self._queries if self._how == "mean" else self._out


class Pool:
    """Heatmaps of each matrix, by plane: the largest number of each bin, or the mean; NaN: all is
    masked.

    Bin r of R holds the cells from ``r·n // R`` to ``(r + 1)·n // R``.
    """

    def __init__(self, of: Extent, size: Any, planes: Collection[str]) -> None:
        if not is_pair_of_ints(size):
            raise TypeError(f"pool: size is {size!r}; a pair of ints (rows, columns) is needed.")
        if min(size) < 1:
            raise ValueError(f"pool: size is {tuple(size)}; each side must be at least 1.")
        for how in planes:
            if how not in ("max", "mass"):
                raise ValueError(f"pool: how is {how!r}; 'max' or 'mass' is needed.")
        self._xp, self._planes, self._dtype = of.xp, planes, of.dtype
        *_, self._rows, self._columns = of.shape
        self._shape = (*of.shape[:2], min(int(size[0]), self._rows), min(int(size[1]), of.shape[3]))
        require_room_for_bins(self._shape, of.dtype)
        self._found: dict[str, Any] = {}

    @cached_property
    def _largest(self) -> Any:
        """With its sign."""
        return self._zeros() if "max" in self._planes else None

    @cached_property
    def _sum(self) -> Any:
        return self._zeros() if "mass" in self._planes else None

    @cached_property
    def _count(self) -> Any:
        """Of unmasked pairs."""
        return self._zeros()

    def _zeros(self) -> Any:
        return self._xp.zeros(self._shape, "float64")

    def update(self, block: Block) -> None:
        xp, (R, C) = self._xp, self._shape[2:]
        if block.keys.start >= block.keys.stop:
            return
        down = bins_of(xp, block.rows.start, block.rows.stop, R, self._rows)
        across = bins_of(xp, block.keys.start, block.keys.stop, C, self._columns)
        at = (block.b, block.h, down[0], across[0])
        values, seen = xp.wide(block.values), block.visible
        if self._largest is not None:
            sides = []
            for x in (values, -values):
                x = x if seen is None else xp.hide(x, seen, -np.inf)
                sides.append(gathered(xp, x, xp.largest, -np.inf, down, across))
            known = self._largest[at]
            high, low = xp.maximum(sides[0], known), xp.maximum(sides[1], -known)
            self._largest[at] = xp.where(high >= low, high, -low)
        if self._sum is not None:
            self._sum[at] += gathered(xp, values, _sum, 0.0, down, across)
        count = xp.full(tuple(values.shape), 1.0, xp.dtype) if seen is None else xp.wide(seen)
        self._count[at] += gathered(xp, count, _sum, 0.0, down, across)

    def fields(self) -> dict[str, Any]:
        names = {"max": "pooled_max", "mass": "pooled_mean"}
        self._found = {how: self._xp.empty(self._shape, self._dtype) for how in self._planes}
        extent = self._rows, self._columns
        return {
            "bins": self._shape[2:],
            "extent": extent,
            **{names[how]: x for how, x in self._found.items()},
        }

    def result(self) -> dict[str, Any]:
        if self._found:
            return self._found
        xp, seen = self._xp, self._count > 0
        found = {}
        if self._largest is not None:
            found["max"] = xp.where(seen, self._largest, np.nan)
        if self._sum is not None:
            found["mass"] = xp.where(seen, self._sum / xp.where(seen, self._count, 1.0), np.nan)
        return {plane: xp.cast(x, self._dtype) for plane, x in found.items()}


class Product:
    """``matrix @ x``: ``(B, H, Lq, p)``. Rows of x that a query does not see do not count.

    Args:
        x: ``(*axes, Lk, p)``, floating.
        axes: of the matrix before ``(Lq, Lk)``.
    """

    def __init__(self, of: Extent, x: Any, axes: tuple[int, ...]) -> None:
        self._xp, self._x, self._axes, self._heads = of.xp, x, axes, of.shape[1]
        self._out = of.xp.full((*of.shape[:3], x.shape[-1]), 0.0, of.dtype)

    def _of(self, block: Block) -> Any:
        """The factor of the block's matrix."""
        place = np.unravel_index(block.b * self._heads + block.h, self._axes or (1,))
        return self._x[place] if self._axes else self._x

    def update(self, block: Block) -> None:
        xp, factor = self._xp, self._xp.wide(self._of(block)[block.keys])
        found = apply(xp, *_raised(xp.wide(block.values), block.visible, factor))[0, 0]
        self._out[block.b, block.h, block.rows] = self._xp.array(self._out, found)

    def fields(self) -> None:
        return None

    def result(self) -> Any:
        return self._out


class TransposedProduct(Product):
    """``x @ matrix``: ``(B, H, p, Lk)``; x is ``(*axes, p, Lq)``."""

    def __init__(self, of: Extent, x: Any, axes: tuple[int, ...]) -> None:
        super().__init__(of, x.swapaxes(-1, -2), axes)
        B, H, _, Lk = of.shape
        self._dtype, self._out = of.dtype, of.xp.full((B, H, Lk, x.shape[-2]), 0.0, "float64")

    def update(self, block: Block) -> None:
        xp, factor = self._xp, self._xp.wide(self._of(block)[block.rows])
        seen = None if block.visible is None else block.visible.swapaxes(-1, -2)
        found = apply(xp, *_raised(xp.wide(block.values).swapaxes(-1, -2), seen, factor))[0, 0]
        self._out[block.b, block.h, block.keys] += found

    def result(self) -> Any:
        return self._xp.cast(self._out.swapaxes(-1, -2), self._dtype)


def _raised(w: Any, visible: Any, x: Any) -> tuple[Any, Any, Any]:
    """The three with the axes of batch and heads in front."""
    return w[None, None], None if visible is None else visible[None, None], x[None, None]


def _largest(xp: Arrays, x: Any, axis: int) -> Any:
    """The number of largest size along an axis; 0 of none, the positive one of equals."""
    if not x.shape[axis]:
        return x.sum(axis)
    high, low = xp.largest(x, axis), xp.largest(-x, axis)
    return xp.where(high >= low, high, -low)


def _sum(x: Any, axis: int) -> Any:
    return x.sum(axis)
