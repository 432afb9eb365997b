"""How far two rows of weights are apart, and the derivatives of that."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from regard._base.arrays import Arrays
from regard._weights.pair_matrix import Logarithms

DivergenceKind: TypeAlias = Literal["kl", "reverse_kl", "jensen_shannon", "total_variation"]


class BothRows:
    """The same rows of a and b: ``(rows, keys + 1)`` each, no key last.

    Attributes:
        keys: which these are.
        log_a, log_b: logarithms; −inf where masked.
        a, b: the weights.
    """

    def __init__(self, xp: Arrays, a: Logarithms, b: Logarithms) -> None:
        self.xp = xp
        low = min(a.keys.start, b.keys.start)
        high = max(a.keys.stop, b.keys.stop, low)
        self.keys = slice(low, high)
        self.log_a, self.log_b = (self._joined(one, low, high) for one in (a, b))
        self.a, self.b = xp.exp(self.log_a), xp.exp(self.log_b)

    @classmethod
    def of_no_key(cls, xp: Arrays, a: Any, b: Any) -> BothRows:
        """Of the shares of no key alone, ``(rows, 1)``."""
        return cls(xp, *(Logarithms(slice(0, 0), x[:, :0], x) for x in (a, b)))

    def _joined(self, one: Logarithms, low: int, high: int) -> Any:
        xp, n = self.xp, one.of_keys.shape[0]
        out = xp.full((n, high - low + 1), -np.inf, xp.dtype)
        out[:, one.keys.start - low : one.keys.stop - low] = xp.wide(one.of_keys)
        out[:, -1:] = xp.wide(xp.log(one.elsewhere))
        return out

    @cached_property
    def log_ratio(self) -> Any:
        """``ln(a / b)``; 0 where both are masked."""
        hidden = (self.log_a == -np.inf) & (self.log_b == -np.inf)
        return self.xp.where(hidden, 0.0, self.log_a - self.log_b)


Measure: TypeAlias = Callable[[BothRows], Any]


def _kl(xp: Arrays, log_ratio: Any, a: Any, b: Any) -> Any:
    """``Σ a · ln(a/b) − a + b``: no term is negative, and a rounded sum of a adds no error."""
    terms = a * xp.where(log_ratio == -np.inf, 0.0, log_ratio) - a + b
    least = 4 * float(np.finfo(xp.dtype).tiny)  # a smaller weight counts as none, whatever b is
    terms = xp.where(a < least, b, terms)
    return xp.maximum(xp.row_sum(terms), 0 * a[:, :1])[:, 0]


def _forward(rows: BothRows) -> Any:
    return _kl(rows.xp, rows.log_ratio, rows.a, rows.b)


def _reverse(rows: BothRows) -> Any:
    return _kl(rows.xp, -rows.log_ratio, rows.b, rows.a)


def _jensen_shannon(rows: BothRows) -> Any:
    """``Σ (a+b)/4 · ((1+u) ln(1+u) + (1−u) ln(1−u))`` with ``u = (a−b)/(a+b)``."""
    xp, both = rows.xp, rows.a + rows.b
    u = (rows.a - rows.b) / (both + (both == 0))
    terms = 0.0
    for one in (1 + u, 1 - u):
        terms = terms + one * xp.log(one + (one == 0))
    return xp.maximum(xp.row_sum(both * terms / 4), 0 * u[:, :1])[:, 0]


def _total_variation(rows: BothRows) -> Any:
    return rows.xp.row_sum(abs(rows.a - rows.b))[:, 0] / 2


def overlap(rows: BothRows, k: int) -> Any:
    """The share of the k strongest keys in common."""
    xp, (of_a, of_b) = rows.xp, (rows.log_a[:, :-1], rows.log_b[:, :-1])
    k = min(k, of_a.shape[1])
    (a, keys_a), (b, keys_b) = xp.top(of_a, k), xp.top(of_b, k)
    a, b = a > -np.inf, b > -np.inf
    common = 0 * a.sum(-1)
    for one in range(k):
        there = ((keys_b == keys_a[:, one : one + 1]) & b).any(-1)
        common = common + (there & a[:, one])
    a_count, b_count = a.sum(-1), b.sum(-1)
    most = xp.where(a_count > b_count, a_count, b_count)
    return xp.where(most == 0, 1.0, xp.wide(common) / xp.wide(most))


MEASURES: dict[str, Measure] = {
    "kl": _forward,
    "reverse_kl": _reverse,
    "jensen_shannon": _jensen_shannon,
    "total_variation": _total_variation,
}


def _slope_of_logarithm(rows: BothRows) -> tuple[Any, Any]:
    """Of a Kullback–Leibler divergence by the first of its two, be that a or b."""
    xp, log_ratio = rows.xp, rows.log_ratio
    log_ratio = xp.where(xp.isfinite(log_ratio), log_ratio, 0.0)
    return log_ratio, -log_ratio


def _slopes_of_jensen_shannon(rows: BothRows) -> tuple[Any, Any]:
    xp, both = rows.xp, rows.a + rows.b
    ratios = (2 * one / (both + (both == 0)) for one in (rows.a, rows.b))
    by_a, by_b = (xp.where(x > 0, xp.log(x + (x == 0)), 0.0) / 2 for x in ratios)
    return by_a, by_b


def _slopes_of_total_variation(rows: BothRows) -> tuple[Any, Any]:
    sign = (1.0 * (rows.a > rows.b) - 1.0 * (rows.a < rows.b)) / 2
    return sign, -sign


SLOPES: dict[str, Callable[[BothRows], tuple[Any, Any]]] = {
    "kl": _slope_of_logarithm,
    "reverse_kl": _slope_of_logarithm,
    "jensen_shannon": _slopes_of_jensen_shannon,
    "total_variation": _slopes_of_total_variation,
}
assert set(get_args(DivergenceKind)) == set(MEASURES) == set(SLOPES)


def is_ratio(kind: DivergenceKind, side: int) -> bool:
    """Whether the derivative by side 0 or 1 is the ratio of ``Σ a·ln(a/b)`` by b, ``−a/b``."""
    return kind == ("kl" if side else "reverse_kl")


def products(rows: BothRows, kind: DivergenceKind, side: int, w: Any, is_alone: bool) -> Any:
    """Weights times the derivative of a divergence by them, ``(rows, keys + 1)``.

    0 where either side is masked. A ratio is never written out, for it may exceed its dtype where
    its weight falls below it: ``b · a/b`` is a.

    Args:
        w: weights that are side 0 or 1, a or b, or that are in it.
        is_alone: whether nothing else is.
    """
    xp = rows.xp
    if not is_ratio(kind, side):
        return w * SLOPES[kind](rows)[side]
    own, other = (rows.b, rows.a) if side else (rows.a, rows.b)
    share = 1.0 if is_alone else xp.where(own > 0, w / (own + (own == 0)), 0.0)
    return xp.where(xp.isfinite(rows.log_ratio), -share * other, 0.0)
