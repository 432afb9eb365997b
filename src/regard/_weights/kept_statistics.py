"""Row statistics that were kept beside query and key: checked before weights are made of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard._backends import Backend, Statistics
from regard._base.arrays import accumulating_name, to_numpy
from regard._base.errors import RecordingError, ShapeError, a_type
from regard._call.call import Call
from regard._weights.statistics import RowStatistics, in_scores, in_unit_of

# How far a log-sum-exp may be from one that is computed anew, on any processor: relative to the
# largest score, and in itself. That of other vectors is further away.
RELATIVE, ABSOLUTE = 1e-5, 0.02


class KeptStatistics:
    """Maximum and total of every row of a call, ``(B, Hq, Lq)``, in units of final scores.

    One row of each head is computed anew where its statistics are first used. Rows whose
    statistics are NaN are computed anew as well: a score is NaN there, or they are unknown. So are
    those of scores that every processor rounds otherwise: weights are as far off as exp of that.

    Args:
        statistics: of arrays of any library; they are read where they are used.
    """

    def __init__(self, statistics: RowStatistics[Any]) -> None:
        self._found = statistics
        self._trusted: set[tuple[int, int]] = set()  # batch elements and heads

    def part(self, slices: tuple[slice, ...]) -> KeptStatistics:
        """Copies of those of a part."""
        return KeptStatistics(RowStatistics(*(x.copy() for x in self._read(slices))))

    def _read(self, slices: tuple[slice, ...]) -> list[np.ndarray]:
        return [to_numpy(x[slices]) for x in self._found]  # fetched, where they are elsewhere

    def of(self, call: Call, place: Any, backend: Backend) -> Statistics | None:
        """Those of a place as a backend has them; None where one is NaN or too large.

        Args:
            call: of the place.
            place: the ``Place`` in the whole call.

        Raises:
            RecordingError: they are not those of the call's query and key.
        """
        maximum, total = self._read(place.slices)
        if np.isnan(total).any() or not _fine(maximum).all():
            return None
        _refuse_impossible(maximum, total, call.sizes[4])
        heads = {(b, h) for b in place.b for h in place.h}
        if not heads <= self._trusted and maximum.size:
            self._compare(call, backend, maximum[..., -1:], total[..., -1:])
            self._trusted |= heads
        return in_unit_of(call, backend, maximum, total)

    def _compare(
        self, call: Call, backend: Backend, maximum: np.ndarray, total: np.ndarray
    ) -> None:
        """Compares the last row of each head with what its query and key give."""
        Lq = call.sizes[3]
        last = call.rows(slice(Lq - 1, Lq))
        found = in_scores(last, backend, backend.row_statistics(last))
        known, needed = (
            np.asarray(x, np.float64).reshape(maximum.shape)
            for x in (_lse(maximum, total), _lse(*map(to_numpy, found)))
        )
        with np.errstate(invalid="ignore"):
            near = abs(known - needed) <= ABSOLUTE + RELATIVE * abs(needed)
        wrong = ~(near | (known == needed))
        if wrong.any():
            b, h, _ = np.argwhere(wrong)[0]
            raise _misfit(
                f"of a row of head {h} say that the log-sum-exp is {known[b, h, 0]:.6g}, and its"
                f" query and the keys give {needed[b, h, 0]:.6g}"
            )


def _fine(maximum: np.ndarray) -> Any:
    """Whether a rounding of a score is less than ``ABSOLUTE``; False of NaN."""
    return (abs(maximum) < ABSOLUTE / np.finfo(maximum.dtype).eps) | np.isinf(maximum)


def _refuse_impossible(maximum: np.ndarray, total: np.ndarray, keys: int) -> None:
    """Every term is at most 1, but for the rounding of the maximum, and the largest is one."""
    with np.errstate(over="ignore", invalid="ignore"):
        slack = np.exp(abs(maximum.astype(np.float64)) * (8 * np.finfo(maximum.dtype).eps))
        most = (keys + 1) * 1.001 * slack
        possible = np.where(maximum == -np.inf, total == 0, (total > 0) & (total <= most))
        possible &= maximum < np.inf
    if not possible.all():
        place = tuple(np.argwhere(~possible)[0])
        raise _misfit(f"have the maximum {maximum[place]:.6g} and the total {total[place]:.6g}")


def _misfit(what: str) -> RecordingError:
    return RecordingError(
        f"weights: the row statistics that were kept {what}; they are not those of this layer."
        " Save the recording again with statistics=True where it was made, or make the layer"
        " without statistics."
    )


def _lse(maximum: Any, total: Any) -> Any:
    with np.errstate(divide="ignore"):
        return np.asarray(maximum, np.float64) + np.log(np.asarray(total, np.float64))


def checked(statistics: Any, query: Any, what: str) -> RowStatistics[Any]:
    """Row statistics of a query ``(H, L, D)``; their numbers are checked when they are used.

    Raises:
        ShapeError: other shapes.
        TypeError: other types.
    """
    if not isinstance(statistics, tuple) or len(statistics) != 2:
        raise TypeError(
            f"{what}: statistics is {a_type(statistics)}; RowStatistics(maximum, total) is"
            " needed, as regard.attention(..., return_statistics=True) gives it."
        )
    dtype, needed = accumulating_name(query), tuple(map(int, query.shape[:2]))
    for name, x in zip(RowStatistics._fields, statistics):
        if type(x) is not type(query) and not isinstance(x, type(query)):
            raise TypeError(
                f"{what}: {name} of statistics is {a_type(x)}, and query {a_type(query)}; both must"
                " be of one library."
            )
        found = str(x.dtype).removeprefix("torch.")
        if found != dtype:
            raise TypeError(
                f"{what}: {name} of statistics is {found}; {dtype} is needed, in which sums of"
                " this query are."
            )
        if tuple(map(int, x.shape)) != needed:
            raise ShapeError(
                f"{what}: {name} of statistics has shape {tuple(x.shape)}; one number for each"
                f" query of each head is needed: {needed}."
            )
    return RowStatistics(*statistics)
