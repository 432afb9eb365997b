"""What effects follow from beside their pair, kept from one question to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard._backends.pair_terms import Rest
from regard._base.arrays import Arrays, is_tensor
from regard._weights.operands import contiguous

MOST = 2.0**40  # the largest size of values whose squares are left as they are, and 1 / the least
LARGEST = {"float32": 120, "float64": 1000}  # powers of 2 by which numbers of a dtype are scaled


class Values(NamedTuple):
    """Values of a head as the kernels read them, divided by a power of 2."""

    numbers: Any  # (Lk, Dv)
    squares: Any  # (Lk,): of their sizes
    unit: float


class Outputs:
    """What all questions to the effects of one attention share: of changes the outputs, half a
    forward pass; of knockouts the sums over a row.

    Args:
        value: ``(B or 1, Hkv, Lk, Dv)``.
        others: what else these follow from.
        queries: Lq.
        counts_writes: whether the caller knows when these were written to.
    """

    def __init__(
        self, xp: Arrays, value: Any, others: Sequence[Any], queries: int, counts_writes: bool
    ) -> None:
        self._xp, self._value, self._queries = xp, value, queries
        self._held, self._counts_writes = (value, *others), counts_writes
        self._before: list[Any] = []
        self._values: dict[tuple[int, int], Values] = {}
        self._rests: dict[tuple[int, int], Rest] = {}

    def prepare(self) -> None:
        """Forgets what was of other numbers: NumPy does not count writes."""
        if self._counts_writes or (self._before and all(map(_equal, self._before, self._held))):
            return
        self._before = [x.clone() if is_tensor(x) else x.copy() for x in self._held]
        self._values, self._rests = {}, {}

    def values(self, b: int, h: int) -> Values:
        """Of a head of values."""
        if (b, h) not in self._values:
            self._values[b, h] = self._scaled(self._value[b, h])
        return self._values[b, h]

    def _scaled(self, value: Any) -> Values:
        xp, v = self._xp, self._xp.wide(value)
        if (unit := unit_of(xp, v, LARGEST[xp.dtype])) != 1:
            v = xp.wide(xp.cast(v, "float64") / unit)
        return Values(v, (v * v).sum(-1), unit)

    def rest(self, b: int, h: int, rows: slice, size: int) -> Rest | None:
        """Of some rows of a query head; None where all would not be computed.

        Args:
            size: Dv.
        """
        found = self._rests.get((b, h))
        if found is not None and found.is_known:
            return Rest(contiguous(found.numbers[rows]), True)
        if len(range(self._queries)[rows]) < self._queries:
            return None
        numbers = self._xp.empty((self._queries, size), self._xp.dtype)
        self._rests[b, h] = Rest(numbers, False)
        return self._rests[b, h]

    def sums(self, b: int, h: int, rows: slice, first: Callable[[], Any]) -> Rest | None:
        """Of some rows of a query head; None where all would not be computed.

        Args:
            first: gives those that are known at first, of all rows.
        """
        found = self._rests.get((b, h))
        if len(range(self._queries)[rows]) < self._queries:
            return None if found is None else Rest(contiguous(found.numbers[rows]), False)
        if found is None:
            found = self._rests[b, h] = Rest(first(), False)
        return found


def unit_of(xp: Arrays, value: Any, most: int = LARGEST["float64"]) -> float:
    """The power of 2 by which values are divided before they are squared; 1 for most."""
    finite = xp.where(xp.isfinite(value), value, 0.0)
    size = float(abs(finite).max()) if math.prod(value.shape) else 0.0
    if not size or 1 / MOST < size < MOST:
        return 1.0
    return 2.0 ** min(most, max(-most, math.frexp(size)[1]))


def _equal(x: Any, y: Any) -> bool:
    return bool((x == y).all()) if is_tensor(x) else np.array_equal(x, y)
