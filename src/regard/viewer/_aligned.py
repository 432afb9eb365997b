"""The weights of a head at chosen queries and keys: those that have counterparts elsewhere.

They behave as the ``AttentionWeights`` of one head do where the viewer reads these, so that its
maps, rows and pairs are computed of them as of any others. Rows are whole when they are read:
weights stay those over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._weights.attention_weights import AttentionWeights
from regard._weights.origin import seen_of
from regard._weights.reductions import Links
from regard.viewer._lost import lost_queries

if TYPE_CHECKING:
    from regard._base.types import Float, Int, PoolHow

    Picture = Float[np.ndarray, "rows columns"]

__all__ = ["AlignedWeights", "chosen", "largest_of", "weights_of"]

BLOCK_WEIGHTS = 2**21  # of rows that are read together


class AlignedWeights:
    """``(rows, columns)``: weights of a head, NaN where a token has no counterpart.

    Those that are no numbers are +∞.

    Args:
        weights: ``(Lq, Lk)``, of one head.
        rows: the query of each row, growing; −1 where it has none.
        columns: the key of each column, likewise.
    """

    def __init__(
        self,
        weights: AttentionWeights[Any],
        rows: Int[np.ndarray, " rows"],
        columns: Int[np.ndarray, " columns"],
    ) -> None:
        self._weights, self._rows, self._columns = weights, rows, columns
        self.shape = len(rows), len(columns)

    def part(self, rows: slice | None = None, columns: slice | None = None) -> AlignedWeights:
        """Some rows and columns; by default all."""
        queries = self._rows if rows is None else self._rows[rows]
        keys = self._columns if columns is None else self._columns[columns]
        return AlignedWeights(self._weights, queries, keys)

    def blocks(self, height: int | None = None) -> Iterator[tuple[int, Picture]]:
        """``(first row, ln(weight))`` of ``height`` rows at a time, by default a few megabytes."""
        height = height or max(1, BLOCK_WEIGHTS // max(1, self.shape[1], self._weights.shape[1]))
        columns = self._columns >= 0
        for low in range(0, self.shape[0], height):
            part = self._rows[low : low + height]
            rows = part >= 0
            if rows.all() and columns.all() and len(columns):
                yield low, self._logs(part, self._columns)
                continue
            logs = np.full((len(part), self.shape[1]), np.nan, np.float32)
            if rows.any() and columns.any():
                logs[np.ix_(rows, columns)] = self._logs(part[rows], self._columns[columns])
            yield low, logs

    def _logs(self, queries: np.ndarray, keys: np.ndarray) -> Picture:
        """``(queries, keys)`` of the head itself."""
        columns = slice(int(keys[0]), int(keys[-1]) + 1)
        found = np.concatenate([self._part_logs(rows, columns) for rows in _evenly(queries)])
        return found if found.shape[1] == len(keys) else np.take(found, keys - columns.start, 1)

    def _part_logs(self, rows: slice, columns: slice) -> Picture:
        """Evenly spaced queries and neighbouring keys; +∞ where a weight is no number."""
        whole = self._weights.part(rows)
        part = whole.part(columns=columns)
        found = to_numpy(part.pool((part.shape[0], part.shape[1])))
        seen, keys = seen_of(part), np.arange(part.shape[1])
        for row in lost_queries(whole):
            found[row, seen.pairs(np.full(len(keys), row), keys)[0]] = np.inf
        return found

    def pool(
        self,
        size: tuple[int, int],
        how: PoolHow | tuple[PoolHow, ...] = "max",
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Any:
        """As ``AttentionWeights.pool``; the mean over queries is over all of a bin."""
        part = self.part(rows, columns)
        edges = [
            np.arange(min(bins, n) + 1) * n // max(1, min(bins, n))
            for bins, n in zip(size, part.shape)
        ]
        planes = how if isinstance(how, tuple) else (how,)
        found = dict(zip(planes, part._pooled(planes, *edges)))
        return tuple(found[plane] for plane in how) if isinstance(how, tuple) else found[how]

    def _pooled(
        self, planes: tuple[PoolHow, ...], down: np.ndarray, across: np.ndarray
    ) -> list[Picture]:
        """Each plane in bins that start and end at these rows and columns."""
        strongest, sums = [], []
        for _, logs in self.blocks():
            strongest.append(np.fmax.reduceat(logs, across[:-1], 1))
            if "mass" in planes:
                sums.append(np.add.reduceat(weights_of(logs), across[:-1], 1, dtype=np.float64))
        largest = np.fmax.reduceat(np.concatenate(strongest), down[:-1], 0)
        if "mass" not in planes:
            return [largest for _ in planes]
        total = np.add.reduceat(np.concatenate(sums), down[:-1], 0) / np.diff(down)[:, None]
        with np.errstate(divide="ignore"):
            mass = np.where(np.isnan(largest), np.nan, np.log(total)).astype(np.float32)
        return [mass if plane == "mass" else largest for plane in planes]

    def strongest(self, n: int = 20) -> Links[np.ndarray, np.ndarray]:
        """The n strongest pairs, or fewer, strongest first."""
        numbers = ((low, np.where(np.isposinf(x), np.nan, x)) for low, x in self.blocks())
        found = largest_of(((low, np.exp(logs)) for low, logs in numbers), n)
        return Links(*found)


def weights_of(logs: Picture) -> Picture:
    """Weights of their logarithms; 0 where these are NaN."""
    return np.exp(np.where(np.isnan(logs), np.float32(-np.inf), logs))


def largest_of(
    blocks: Iterator[tuple[int, Picture]], n: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """``(rows, columns, values)`` of the n values farthest from 0, or fewer: NaN and 0 are none.

    Args:
        blocks: ``(first row, values)``, in the order of rows.
        n: how many.
    """
    rows, columns, values = np.zeros(0, int), np.zeros(0, int), np.zeros(0, np.float32)
    for low, block in blocks:
        sizes = np.nan_to_num(np.abs(block)).reshape(-1)
        places = np.argpartition(-sizes, n)[:n] if n < sizes.size else np.arange(sizes.size)
        places = np.sort(places[sizes[places] > 0])
        i, j = np.unravel_index(places, block.shape)
        rows, columns = np.concatenate([rows, low + i]), np.concatenate([columns, j])
        values = np.concatenate([values, block.reshape(-1)[places]])
        order = np.argsort(-np.abs(values), kind="stable")[:n]
        rows, columns, values = rows[order], columns[order], values[order]
    return rows, columns, values


def _evenly(places: Int[np.ndarray, " places"]) -> Iterator[slice]:
    """Growing places, as slices of evenly spaced ones."""
    at = 0
    while at < len(places):
        stop, step = at + 1, 1
        if stop < len(places):
            step = int(places[stop] - places[at])
        while stop < len(places) and places[stop] - places[stop - 1] == step:
            stop += 1
        yield slice(int(places[at]), int(places[stop - 1]) + 1, step)
        at = stop


def chosen(places: Int[np.ndarray, " places"]) -> Int[np.ndarray, " places"]:
    """The own number of each place that has a counterpart; −1 for the others."""
    return np.where(places >= 0, np.arange(len(places)), -1)
