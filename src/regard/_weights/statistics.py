"""Row statistics in units of final scores, and as a backend has them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple

import numpy as np

from regard._backends import Backend, Statistics
from regard._backends.kernel import LARGEST_SINK, MOST_ROUNDED, rounded_away
from regard._base.arrays import (
    accumulating_name,
    arrays_of,
    dtype_name,
    is_array,
    is_tensor,
    to_numpy,
)
from regard._base.errors import ShapeError, a_type
from regard._base.types import ArrayT
from regard._call.call import Call
from regard._call.checks import FLOATS

MOST_BELOW_A_SINK = LARGEST_SINK * math.log(2)  # a maximum that is not the sink


class RowStatistics(NamedTuple, Generic[ArrayT]):
    """Maximum and total of every query's scores, from which its weights are exact at any size.

    ``exp(score − maximum) / total`` is a weight, and ``maximum + ln(total)`` the log-sum-exp. Both
    are float32, or float64 for a float64 query. They have no gradient.

    Source: Milakov & Gimelshein 2018.
    """

    maximum: ArrayT
    """``(..., Hq, Lq)``: the largest score, or the sink's logit above it; −inf where all is masked.

    Of final scores: after scale, cap, bias and edits."""
    total: ArrayT
    """``(..., Hq, Lq)``: Σ exp(score − maximum) over the keys and the sink; 0 where all is masked.

    NaN where a score is NaN or +inf."""


def in_scores(call: Call, backend: Backend, statistics: Statistics) -> RowStatistics[Any]:
    """What a backend has of the rows of a call, in units of final scores, with the caller's axes.

    The maximum is rounded to the dtype of sums, and the total taken relative to that number: a
    maximum of 6e4 in float32 is off by 0.002, which would be the error of every weight.
    """
    xp = arrays_of(call.query)
    like = xp.full((0,), 0.0, xp.dtype)
    maximum, total = (x if is_tensor(x) == call.is_torch else xp.array(like, x) for x in statistics)
    with nullcontext() if call.is_torch else np.errstate(all="ignore"):
        before, rest = product(xp, xp.cast(maximum, "float64"), backend.score_unit(call))
        top = before
        if call.sinks is not None:
            sink = xp.cast(call.sinks, "float64")[:, None]
            top = xp.where(before == -np.inf, before, xp.maximum(before, sink))
            # A sink that is the backend's maximum was rounded to its dtype and its unit.
            is_sink = (before < sink) & ((total < 1.5) | (sink - before > MOST_BELOW_A_SINK))
            before, rest = xp.where(is_sink, top, before), xp.where(is_sink, 0.0, rest)
        found = moved(xp, before, total, top, xp.dtype, rest)
        return RowStatistics(*map(call.restore, found))


def of_backend(call: Call, backend: Backend, statistics: RowStatistics[Any]) -> Statistics:
    """Statistics that a caller gave as a backend has them: ``(B, Hq, Lq)`` of NumPy, contiguous.

    Raises:
        ShapeError, TypeError, ValueError: they are not those of the rows of the call.
    """
    maximum, total = _checked(call, statistics)
    if backend.wide_scores and maximum.dtype != np.float64:
        _refuse_coarse(backend, maximum)
    return in_unit_of(call, backend, maximum, total)


def _refuse_coarse(backend: Backend, maximum: np.ndarray) -> None:
    """Raises where rounding took more from a maximum than its total makes up for."""
    with np.errstate(all="ignore"):
        coarse = np.isfinite(maximum) & (np.spacing(abs(maximum)) / 2 > MOST_ROUNDED)
    if coarse.any():
        found = maximum[coarse][0]
        raise ValueError(
            f"statistics: a maximum is {found:.6g} in {maximum.dtype}, rounded to the nearest"
            f" {np.spacing(abs(found)):.6g}, and the {backend.name} backend has scores in float64:"
            " no weight follows from it. Give queries and statistics in float64, or name another"
            " backend."
        )


def in_unit_of(
    call: Call, backend: Backend, maximum: np.ndarray, total: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Maximum and total of final scores, ``(B, Hq, Lq)``, as a backend has them.

    The maximum is the very number that the backend had, which at 1e9 is a question of all or
    nothing: ``in_scores`` rounds at most two to one. It is the upper one where the total still has
    the largest term, 1, relative to it.
    """
    xp = arrays_of(np.zeros(0, accumulating_name(call.query)))
    with np.errstate(all="ignore"):
        before, unit = maximum.astype(np.float64), backend.score_unit(call)

        def in_unit(x: Any) -> tuple[Any, Any]:
            """x in units of scores, and the total relative to that."""
            after, rest = product(xp, x.astype(np.float64), unit)
            return after, total * xp.exp(rounded_away(xp, before - after - rest))

        near = (before / unit).astype(xp.dtype)
        exact, rest = product(xp, near.astype(np.float64), unit)
        lower = np.where(exact - before + rest > 0, np.nextafter(near, -np.inf), near)
        upper = np.nextafter(lower, np.inf)
        after, of_upper = in_unit(upper)
        is_upper = (after.astype(xp.dtype) == before.astype(xp.dtype)) & (of_upper > 0.99)
        found = np.where(is_upper, upper, lower)
        total = np.where(is_upper, of_upper, in_unit(lower)[1])
    return np.ascontiguousarray(found, xp.dtype), np.ascontiguousarray(total, xp.dtype)


def sink_weights(call: Call, backend: Backend, maximum: np.ndarray, total: np.ndarray) -> Any:
    """The weights of the sinks, float64 ``(B, Hq, Lq)``, of what a backend has of the rows.

    A sink that is the maximum was rounded to its dtype and its unit: then it has the whole total.
    """
    before = maximum.astype(np.float64) * backend.score_unit(call)
    sink = to_numpy(call.sinks).astype(np.float64)[:, None]
    rounding = 2 * np.finfo(maximum.dtype).eps * abs(sink)
    with np.errstate(all="ignore"):
        below = sink - before
        is_maximum = np.isfinite(below) & (abs(below) <= rounding) & (total < 1.5)
        below = np.where(is_maximum, 0.0, below)
        return np.where(total == 0, 0.0, np.exp(below) / total.astype(np.float64))


def moved(
    xp: Any, before: Any, total: Any, maximum: Any, dtype: str, rest: Any = 0.0
) -> tuple[Any, Any]:
    """The maximum rounded to a dtype, and the total relative to what it then is.

    Args:
        before: what ``total`` is relative to, with ``rest``, the error of its rounding; float64.
        maximum: the new one, float64: a sink may lie far above ``before``.
    """
    rounded = xp.cast(maximum, dtype)
    change = xp.where(xp.isfinite(before - maximum), before - maximum, 0.0)
    change = change + rounded_away(xp, maximum - xp.cast(rounded, "float64") + rest)
    return rounded, xp.cast(xp.cast(total, "float64") * xp.exp(change), dtype)


def product(xp: Any, x: Any, y: float) -> tuple[Any, Any]:
    """``x·y`` of float64 and its rounding error, exactly: at 1e5 the error is that of a weight.

    Source: Dekker 1971.
    """
    found = x * y
    (a, b), (c, d) = _halves(x), _halves(y)
    error = ((a * c - found) + a * d + b * c) + b * d
    return found, xp.where(xp.isfinite(error), error, 0.0)


def _halves(x: Any) -> tuple[Any, Any]:
    """Two numbers of 26 bits whose sum is x."""
    high = x * 134217729.0
    high = high - (high - x)
    return high, x - high


def _checked(call: Call, statistics: Any) -> list[np.ndarray]:
    """Maximum and total, ``(B, Hq, Lq)`` of NumPy."""
    if not isinstance(statistics, tuple) or len(statistics) != 2:
        raise TypeError(
            f"statistics: {a_type(statistics)} is given; RowStatistics(maximum, total) is"
            " needed, as regard.attention(..., return_statistics=True) and regard.merge give it."
        )
    B, Hq, _, Lq, _ = call.sizes
    needed = (*call.leading, *((Hq,) if call.heads else ()), Lq)
    found, sums = [], accumulating_name(call.query)
    for name, x in zip(RowStatistics._fields, statistics):
        if not is_array(x) and not is_tensor(x):
            raise TypeError(f"statistics: {name} is {a_type(x)}; an array is needed.")
        if dtype_name(x) not in FLOATS:
            raise TypeError(f"statistics: {name} is {dtype_name(x)}; floating numbers are needed.")
        if dtype_name(x) not in (sums, "float64"):
            raise TypeError(
                f"statistics: {name} is {dtype_name(x)}, rounded more than weights may be; {sums}"
                " is needed, in which sums of this query are."
            )
        if tuple(x.shape) != needed:
            raise ShapeError(
                f"statistics: {name} has shape {tuple(x.shape)}; one number for each row of the"
                f" weights is needed: {needed}."
            )
        found.append(to_numpy(x).reshape(B, Hq, Lq))
    if (found[1] < 0).any():
        raise ValueError("statistics: a total is negative; it is a sum of exponentials.")
    return found
