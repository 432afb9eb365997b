"""The statistics of a survey: what each counts, in which unit, and the bins of its histogram."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from regard._base.types import Float, Int
from regard.heads._roles import FIRST, INDUCTION, PLACE, PREVIOUS, PREVIOUS_WORD, SELF

NUCLEUS = 0.9  # of a query's weight, held by its strongest keys
SHARE_BINS = 20  # of 0.05; the last holds 1 too
ENTROPY_BINS, PER_NAT = 64, 4  # of 0.25 nats; the last is open
DISTANCE_BINS = 32  # [0, 1), [1, 2), [2, 4), ...; the last is open
NUCLEUS_BINS = 64  # from 2^(n/2) on to before 2^((n+1)/2); the last is open
WEIGHT_BINS = 64  # from 2^-(n+1) on to before 2^-n; the first holds 1 too, the last 0
SIGN_BITS = 23  # of the mantissa of float32


class Statistic(NamedTuple):
    """One number for each query that it counts.

    Attributes:
        name: of its columns.
        unit: for people.
        edges: of the bins, one more than there are; the last is open where it is infinite.
        role: the place of the role whose share it is; None for others.
    """

    name: str
    unit: str
    edges: Float[np.ndarray, " bins_and_1"]
    role: int | None = None

    @property
    def bins(self) -> int:
        """How many there are."""
        return len(self.edges) - 1

    def places(self, values: np.ndarray) -> Int[np.ndarray, "*_"]:
        """The bin of each value."""
        found: np.ndarray
        if self.name == "distance":  # the exponent of 2
            found = np.frexp(values)[1]
        elif self.name == "nucleus":
            found = np.searchsorted(self.edges, values, side="right") - 1
        else:
            found = (values * (PER_NAT if self.name == "entropy" else SHARE_BINS)).astype(np.int64)
        return found.clip(0, self.bins - 1)


def _share(name: str, role: str) -> Statistic:
    return Statistic(name, "share", np.linspace(0, 1, SHARE_BINS + 1), PLACE[role])


STATISTICS = {
    statistic.name: statistic
    for statistic in (
        Statistic("entropy", "nats", np.append(np.arange(ENTROPY_BINS) / PER_NAT, np.inf)),
        Statistic(
            "distance", "tokens", np.array([0, *(2.0**n for n in range(DISTANCE_BINS - 1)), np.inf])
        ),
        _share("first", FIRST.name),
        _share("previous", PREVIOUS.name),
        _share("self", SELF.name),
        _share("induction", INDUCTION.name),
        _share("previous_word", PREVIOUS_WORD.name),
        Statistic("nucleus", "keys", np.append(2.0 ** (np.arange(NUCLEUS_BINS) / 2), np.inf)),
    )
}


def statistic(name: str) -> Statistic:
    """The statistic of that name.

    Raises:
        KeyError: there is none.
    """
    if name not in STATISTICS:
        known = ", ".join(repr(known) for known in STATISTICS)
        raise KeyError(f"survey: there is no statistic {name!r}; there are {known}.")
    return STATISTICS[name]


def histogram(places: Int[np.ndarray, "heads n"], bins: int) -> Int[np.ndarray, "heads bins"]:
    """How many of each head's values are in each bin."""
    heads = len(places)
    of_heads = places + bins * np.arange(heads)[:, None]
    return np.bincount(of_heads.ravel(), minlength=heads * bins).reshape(heads, bins)


def weight_histogram(weights: Float[np.ndarray, "heads Lq Lk"]) -> Int[np.ndarray, "heads bins"]:
    """How many weights have each exponent of 2."""
    exponents = weights.astype(np.float32, copy=False).view(np.int32) >> SIGN_BITS
    places = np.clip(126 - exponents, 0, WEIGHT_BINS - 1).reshape(len(weights), -1)
    return histogram(places, WEIGHT_BINS)


def nucleus_sizes(weights: Float[np.ndarray, "*_ Lk"]) -> Int[np.ndarray, "*_"]:
    """The fewest keys that hold 90 % of what each query gives to keys."""
    falling = np.sort(weights, -1)[..., ::-1]
    held = np.cumsum(falling, -1, dtype=np.float64)
    found: np.ndarray = (held < NUCLEUS * held[..., -1:]).sum(-1) + 1
    return found


def quantiles(
    counts: Int[np.ndarray, "*_ bins"], edges: Float[np.ndarray, " bins_and_1"], p: float
) -> Float[np.ndarray, "*_"]:
    """The value below which a share p of the counted lies: linear within its bin; NaN of none.

    In an open last bin it is that bin's lower edge.
    """
    upto = np.cumsum(counts, -1)
    total = upto[..., -1:]
    before_p = (upto < p * total) | (upto == 0)  # the smallest value lies in the first bin with any
    at = np.minimum(before_p.sum(-1), counts.shape[-1] - 1)[..., None]
    inside = np.take_along_axis(counts, at, -1)
    before = np.take_along_axis(upto, at, -1) - inside
    low, high = edges[at], edges[at + 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(inside > 0, (p * total - before) / inside, 0)
        found = np.where(np.isfinite(high), low + part * (high - low), low)
    return np.where(total > 0, found, np.nan)[..., 0]


@functools.cache
def is_prime(n: int) -> bool:
    """Whether n is one."""
    return n > 1 and all(n % divisor for divisor in range(2, int(n**0.5) + 1))


def spacing(max_tokens: int) -> int:
    """Of how many queries one is read whole: a prime, so that every place of a line is met."""
    return next(n for n in range(max(7, max_tokens // 64), 2 * max_tokens + 12) if is_prime(n))
