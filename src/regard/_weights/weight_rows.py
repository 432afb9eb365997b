"""Rows of the weights of one matrix, with what is masked, by the backend of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard._backends.pair_terms import Matrices, PairBackend, PairTerm, ReadOnce
from regard._base.arrays import arrays_of
from regard._base.deferred import DeferredArray
from regard._call.visible import Visibility
from regard._weights.statistics import sink_weights
from regard._weights.statistics_cache import Place

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights


class WeightRows(NamedTuple):
    """Some rows; all keys outside ``keys`` are masked."""

    keys: slice
    weights: Any  # (rows, keys); 0 where masked
    visible: Any  # bool (rows, keys), or None: every pair
    of_sink: Any  # (rows, 1), float64: the weight of the sink; 0 where there is none


class WeightReader:
    """Reads rows of weights, block by block.

    Args:
        weights: read in the keys that they have.
    """

    def __init__(self, weights: AttentionWeights[Any]) -> None:
        self.weights = weights
        self._xp = arrays_of(weights._call.query)

    def prepare(self, b: Sequence[int], h: Sequence[int], rows: range) -> None:
        """Computes the row statistics of what will be read at once, where they are needed."""
        statistics, place = self.weights._statistics, self.weights._place
        if statistics.backend.reads_statistics or not self.weights._call.whole_rows:
            for one in b:
                of_heads = place.h[min(h) : max(h) + 1]
                statistics.learn(Place(place.b[one : one + 1], of_heads, _of(place.rows, rows)))

    def read(self, b: int, h: int, rows: slice) -> WeightRows:
        """Evenly spaced rows of query head h of batch element b."""
        xp, part = self._xp, self.weights._head(b, h)._cut(rows)
        n, Lk = part.shape
        visibility, every = Visibility(part._call, xp.arange), slice(0, n)
        keys = visibility.keys(0, every)
        out = xp.full((1, 1, n, Lk), 0.0, xp.dtype)
        fields = {"weights": out}
        has_sink = part._call.sinks is not None
        if has_sink:
            fields["lse"] = xp.full((1, 1, n), 0.0, "float64")
        part._reduce(dict(fields))
        one = slice(0, 1)
        visible = visibility.pairs(one, one, every, keys)
        if visible is not None:
            visible = xp.broadcast(visible, (1, 1, n, keys.stop - keys.start))[0, 0]
        of_sink = self._of_sink(part, fields.get("lse"), n)
        return WeightRows(keys, out[0, 0, :, keys], visible, of_sink)

    @property
    def backend(self) -> PairBackend | None:
        """The backend, where it reduces matrices of pairs itself."""
        found = self.weights._statistics.backend
        return found if isinstance(found, PairBackend) else None

    def term(self, b: int, h: int, rows: slice, read: ReadOnce) -> PairTerm:
        """Rows of a matrix for the backend, which has been prepared for them.

        Args:
            read: what was read for other terms of this question.
        """
        call = self.weights._call
        # What is read of every head must not be more than the heads that are asked for.
        if type(call.query) is DeferredArray or (call.mask is not None and call.mask.shape[1] > 1):
            return PairTerm(_matrices(self.weights._head(b, h), rows), 0, 0)
        key = id(self.weights), rows.start, rows.stop, rows.step
        if key not in read:
            read[key] = _matrices(self.weights, rows)
        return PairTerm(read[key], b, h)

    def of_sink(self, b: int, h: int, rows: slice) -> Any:
        """``(rows,)`` float64: the weight of the sink in some rows; None where there is none."""
        if self.weights._call.sinks is None:
            return None
        part = self.weights._head(b, h).part(rows)
        lse = self._xp.full((1, 1, part.shape[0]), -np.inf, "float64")
        part._reduce({"lse": lse})
        return self._of_sink(part, lse, part.shape[0]).reshape(-1)

    def elsewhere(self, b: int, h: int, rows: slice) -> Any:
        """``(rows, 1)`` float64: the share of no key, as in ``read_logarithms``."""
        xp, weights, statistics = self._xp, self.weights, self.weights._statistics
        if weights._call.sinks is None and statistics.backend.reads_statistics:
            place = weights._place
            own = Place(place.b[b : b + 1], place.h[h : h + 1], place.rows[rows])
            total = statistics.of(own)[1]
            return xp.array(xp.full((), 0.0, "float64"), 1.0 * (total == 0)).reshape((-1, 1))
        part = weights._head(b, h).part(rows)
        n = part.shape[0]
        lse = xp.full((1, 1, n), -np.inf, "float64")
        part._reduce({"lse": lse})
        of_sink = self._of_sink(part, lse if part._call.sinks is not None else None, n)
        return xp.where((lse == -np.inf).reshape((n, 1)), 1.0, of_sink)

    def read_logarithms(self, b: int, h: int, rows: slice) -> tuple[slice, Any, Any]:
        """Keys, ln of the weights without underflow, and the share of no key ``(rows, 1)``.

        That is the sink's; 1 in a row that sees nothing.
        """
        xp, part = self._xp, self.weights._head(b, h)._cut(rows)
        n, Lk = part.shape
        keys = Visibility(part._call, xp.arange).keys(0, slice(0, n))
        picture = xp.full((1, 1, n, Lk), np.nan, xp.dtype)
        lse = xp.full((1, 1, n), -np.inf, "float64")
        fields = {"pooled_max": picture, "bins": (n, Lk), "lse": lse}
        part._reduce(fields if n and Lk else {"lse": lse})
        found = xp.where(xp.isnan(picture), -np.inf, picture)[0, 0, :, keys]
        of_rows = lse.reshape((n, 1))
        found = xp.where(
            xp.isnan(of_rows), np.nan, found
        )  # where it is no mask that NaN stands for
        of_sink = self._of_sink(part, lse if part._call.sinks is not None else None, n)
        empty = of_rows == -np.inf
        return keys, found, xp.where(empty, 1.0, of_sink)

    def _of_sink(self, part: AttentionWeights[Any], lse: Any, n: int) -> Any:
        """``exp(sink − lse)``; 0 in rows that see nothing."""
        xp, statistics = self._xp, part._statistics
        if lse is None:
            return xp.full((n, 1), 0.0, "float64")
        if statistics.backend.reads_statistics:
            known = statistics.of(part._place)
            found = sink_weights(part._call, statistics.backend, *known)
            return xp.array(xp.full((), 0.0, "float64"), found.reshape((n, 1)))
        sink = xp.cast(part._call.sinks, "float64")
        empty = lse == -float("inf")
        below = sink - xp.where(empty, 0.0, lse)
        return xp.exp(xp.where(empty, -float("inf"), below)).reshape((n, 1))


def _matrices(weights: AttentionWeights[Any], rows: slice) -> Matrices:
    """Rows of all matrices of some weights, whose statistics are known."""
    part = weights._cut(rows)
    return Matrices(part._call.in_memory(), part._statistics.kept(part._place))


def _of(place: range, rows: range) -> range:
    """The rows of a place that are at these indices of it."""
    return place[rows.start : rows.stop : rows.step]
