"""The weights of a head in bins, and the means of several heads, as logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._weights.attention_weights import AttentionWeights
from regard.viewer._aligned import AlignedWeights
from regard.viewer._words import WordBlocks

if TYPE_CHECKING:
    from regard._base.types import Float, PoolHow

    HeadWeights = AttentionWeights[Any] | WordBlocks | AlignedWeights
    Picture = Float[np.ndarray, "rows columns"]

__all__ = ["bins", "mean_log"]


def bins(
    weights: HeadWeights, planes: tuple[PoolHow, ...], down: int, across: int, columns: slice
) -> list[Picture]:
    """All rows and some columns of a matrix in bins of ``(down, across)``; the last are smaller."""
    bands = []
    for rows in _whole_and_rest(slice(0, weights.shape[0]), down):
        beside = []
        for part in _whole_and_rest(columns, across):
            height, width = rows.stop - rows.start, part.stop - part.start
            size = (max(1, height // down), max(1, width // across))
            beside.append(list(map(to_numpy, weights.pool(size, planes, rows, part))))
        bands.append([np.concatenate(pictures, 1) for pictures in zip(*beside)])
    return [np.concatenate(pictures) for pictures in zip(*bands)]


def mean_log(logs: Sequence[np.ndarray], counts: Sequence[int] | None = None) -> np.ndarray:
    """ln of the mean of weights, from their logarithms.

    Args:
        logs: arrays of one shape; NaN counts as 0 beside numbers, and +∞, no number, as +∞.
        counts: how many weights each stands for; by default one.
    """
    if len(logs) == 1:
        return logs[0]
    every = np.array(logs, np.float64)
    hidden = np.isnan(every)
    shares = np.array([1] * len(logs) if counts is None else counts, np.float64)
    shares = np.log(shares / shares.sum()).reshape(-1, *[1] * (every.ndim - 1))
    found = np.logaddexp.reduce(np.where(hidden, -np.inf, every) + shares)
    return np.where(hidden.all(0), np.nan, found).astype(np.float32)


def _whole_and_rest(part: slice, side: int) -> list[slice]:
    middle = part.stop - (part.stop - part.start) % side
    halves = (slice(part.start, middle), slice(middle, part.stop))
    return [half for half in halves if half.start < half.stop]
