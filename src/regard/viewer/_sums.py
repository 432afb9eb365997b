"""Row and column sums of a head's weights, read block by block as they are asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._weights.origin import seen_of

if TYPE_CHECKING:
    from regard._base.types import Float
    from regard._weights.attention_weights import AttentionWeights

__all__ = ["Sums"]

BUDGET_S = 0.25  # of computing, for a response


class Sums:
    """Sums over the keys of each query, and over the queries of each key; the mean of some heads.

    Args:
        weights_of: the weights of some queries of each head.
        shape: queries and keys.
        step: queries that are read at once.
    """

    def __init__(
        self,
        weights_of: Callable[[slice], Sequence[AttentionWeights[Any]]],
        shape: tuple[int, ...],
        step: int,
    ) -> None:
        self._weights_of, self._step = weights_of, step
        self._rows = np.full(shape[0], np.nan)
        self._columns = np.zeros(shape[1])
        self._read = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return self._rows.nbytes + self._columns.nbytes

    def read(self) -> tuple[Float[np.ndarray, " LqLk"], float]:
        """The sums of queries, then of keys, and the fraction of rows that is in them.

        Rows that were not read yet are NaN; each call reads more of them.
        """
        until = time.monotonic() + BUDGET_S
        with self._lock:
            while self._read < len(self._rows):
                self._add(slice(self._read, min(self._read + self._step, len(self._rows))))
                if time.monotonic() > until:
                    break
            coverage = self._read / max(1, len(self._rows))
            return np.concatenate([self._rows, self._columns]), coverage

    def _add(self, part: slice) -> None:
        every = self._weights_of(part)
        self._rows[part] = np.mean([_row_sums(weights) for weights in every], 0)
        self._columns += np.mean([to_numpy(weights.received()) for weights in every], 0)
        self._read = part.stop


def _row_sums(weights: AttentionWeights[Any]) -> Float[np.ndarray, " Lq"]:
    """0 where all keys are masked, whose logarithm is NaN in a heatmap."""
    logs = to_numpy(weights.pool((max(1, weights.shape[0]), 1), "mass"))[:, 0]
    return np.where(seen_of(weights).count[0] == 0, 0.0, np.exp(logs))
