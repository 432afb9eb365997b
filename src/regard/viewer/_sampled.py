"""A tile of so many rows that one answer reads only some of them, and the next one more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from regard.viewer._collected import TILE, rows_of_bins, spread

if TYPE_CHECKING:
    from regard._base.types import PoolHow
    from regard.viewer._bins import Picture

__all__ = ["SampledTile"]


class SampledTile:
    """Bins of 2^level rows and columns, from the rows that were read so far.

    Args:
        plane: of the tile.
        read: gives planes of some rows in bins of so many: ``read(rows, planes, down)``.
        rows: of the tile.
        level: at least 1.
        rounds: in which they are read, evenly spread: a power of two up to 2^level.
    """

    def __init__(
        self,
        plane: PoolHow,
        read: Callable[[slice, tuple[PoolHow, ...], int], list[Picture]],
        rows: slice,
        level: int,
        rounds: int,
    ) -> None:
        self._read, self._rows, self._count = read, rows, rounds
        self._height = rows.stop - rows.start
        self._planes: tuple[PoolHow, ...] = ("max",) if plane == "max" else ("max", plane)
        self._down = (1 << level) // rounds
        self._rounds = spread(rounds)
        self._lock = threading.Lock()
        self._max = np.full((TILE, TILE), np.nan, np.float32)
        self._sum = np.zeros((TILE, TILE), np.float32)
        self._rows_read = np.zeros(TILE, np.int64)

    @property
    def nbytes(self) -> int:
        return self._max.nbytes + self._sum.nbytes

    def next(self) -> tuple[Picture, float]:
        """The tile after one more round, and the fraction of its rows that is in it."""
        with self._lock:
            if self._rounds:
                self._add(self._rounds[0])
                self._rounds.pop(0)
            return self._picture(), float(self._rows_read.sum()) / self._height

    def _add(self, start: int) -> None:
        rows = slice(self._rows.start + start, self._rows.stop, self._count)
        if rows.start >= rows.stop:
            return
        strongest, *mass = self._read(rows, self._planes, self._down)
        height, width = strongest.shape
        counts = rows_of_bins(rows, self._down)
        self._rows_read[:height] += counts
        np.fmax(self._max[:height, :width], strongest, out=self._max[:height, :width])
        for shares in mass:
            with np.errstate(invalid="ignore"):
                found = np.nan_to_num(np.exp(shares), posinf=np.inf)
                self._sum[:height, :width] += found * counts[:, None]

    def _picture(self) -> Picture:
        if len(self._planes) == 1:
            return self._max.copy()
        with np.errstate(divide="ignore", invalid="ignore"):
            picture = np.log(self._sum / self._rows_read[:, None], dtype=np.float32)
        return np.where(np.isnan(self._max), np.float32(np.nan), picture)
