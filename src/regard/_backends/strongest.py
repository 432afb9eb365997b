"""The rows in which the strongest pairs of a matrix are: few, and the row statistics tell them.

A row's largest weight is 1 / total where the maximum is its largest score, not its sink: in all but
rows whose weights are below 2^-32. So the n strongest pairs are in the n rows with the largest.
"""

from __future__ import annotations

import math

import numpy as np

from regard._base.types import Float, Int

ROUNDING = 2.0**-20  # more than that of a total


def largest_weights(
    maximum: Float[np.ndarray, "B Hq Lq"],
    total: Float[np.ndarray, "B Hq Lq"],
    sinks: Float[np.ndarray, " Hq"] | None,
    factor: float,
) -> Float[np.ndarray, "B Hq Lq"]:
    """An upper bound of the weights of each row, and the largest of them if the sink is no maximum.

    Args:
        maximum, total: the row statistics of the kernels; 0 for rows whose total is NaN or 0.
        sinks: of the call.
        factor: from a score to the exponent of 2.
    """
    found = np.divide(1, total, out=np.zeros_like(total), where=total > 0)
    if sinks is None:
        return found
    # Where the sink is the maximum, the others share the total less its 1.
    own = sinks.astype(float) * math.log2(math.e) / float(maximum.dtype.type(factor))
    with np.errstate(over="ignore"):
        own = own[:, None].astype(maximum.dtype)
    shared = np.minimum(found, (1 - found + ROUNDING).astype(found.dtype))
    return np.where(maximum == own, shared, found)


def first_rows(largest: Float[np.ndarray, "B Hq Lq"], count: int) -> Int[np.ndarray, "B Hq count"]:
    """The ``count`` rows of each matrix with the largest numbers, rising; the first of equals."""
    Lq = largest.shape[-1]
    least = np.partition(largest, Lq - count, -1)[..., Lq - count, None]
    above, equal = largest > least, largest == least
    room = count - above.sum(-1, keepdims=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    rows = np.nonzero(chosen)[-1].reshape(*largest.shape[:-1], count)
    return np.ascontiguousarray(rows, np.int64)


def rows_that_may_count(
    largest: Float[np.ndarray, "B Hq Lq"],
    query: Int[np.ndarray, "B Hq n"],
    weight: Float[np.ndarray, "B Hq n"],
) -> int:
    """In how many rows of a matrix a pair may be as strong as the last of those that were found.

    They are the first by ``first_rows``.
    """
    row, weakest = query[..., -1:], weight[..., -1:]
    of_equals = (largest == weakest) & (np.arange(largest.shape[-1]) <= row)
    return int(((largest > weakest) | of_equals).sum(-1).max())
