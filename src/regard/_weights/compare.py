"""Two matrices of weights: their difference pair by pair, and how far their rows are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from regard._backends.pair_terms import PairBackend
from regard._base.arrays import Arrays
from regard._base.errors import UnsupportedError
from regard._base.types import ArrayT
from regard._weights.differentiable import differentiable, with_gradient
from regard._weights.mix import Mix, Term, WeightMatrix, as_pairs, require_alike
from regard._weights.pair_matrix import Logarithms
from regard._weights.questions import at_once
from regard._weights.reductions import check_k

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights
    from regard._weights.pair_matrix import PairMatrix

    Matrix: TypeAlias = AttentionWeights[ArrayT] | PairMatrix[ArrayT]

Heads: TypeAlias = dict[int, tuple[int, float]]
DivergenceKind: TypeAlias = Literal["kl", "reverse_kl", "jensen_shannon", "total_variation"]


class Divergences(NamedTuple, Generic[ArrayT]):
    """How far the rows of two matrices are apart, for every query ``(..., H, Lq)``."""

    kl: ArrayT
    """``Σ a · ln(a / b)``, in nats; inf where a has weight on a key that b masks."""
    reverse_kl: ArrayT
    """``Σ b · ln(b / a)``."""
    jensen_shannon: ArrayT
    """The mean of the two to ``(a + b) / 2``: from 0 to ln 2."""
    total_variation: ArrayT
    """``½ Σ |a − b|``: the weight that is on other keys, from 0 to 1."""
    overlap: ArrayT
    """The share of the k strongest keys of a that are among those of b, from 0 to 1."""


@at_once
def compare(a: Matrix[ArrayT], b: Matrix[ArrayT]) -> Comparison[ArrayT]:
    """Two matrices of weights: their difference, and the divergences of their rows.

    Args:
        a, b: ``AttentionWeights``, or mixes of them, of one shape ``(..., H, Lq, Lk)``; the
            difference is also that of ``Effects``. Heads of different number are compared by their
            means: ``a.mix()`` and ``b.mix()``.

    Returns:
        ``a − b``, computed when asked for, with ``divergences()`` and ``overlap()``.

    Raises:
        ShapeError: the shapes differ.
        TypeError: what is no such matrix, or several libraries or devices.

    Example:
        >>> import regard
        >>> x = np.eye(2)
        >>> one = regard.AttentionWeights(x, x, scale=1.0)
        >>> other = regard.AttentionWeights(x, x, scale=2.0)
        >>> compare(one, other).divergence("kl").round(4)
        array([0.0826, 0.0826])
    """
    return Comparison(a, b)


@at_once
def divergence(a: Matrix[ArrayT], b: Matrix[ArrayT], kind: DivergenceKind = "kl") -> ArrayT:
    """How far the rows of two matrices of weights are apart: ``(..., H, Lq)``.

    Args:
        a, b: as in ``compare``.
        kind: ``"kl"``, ``"reverse_kl"``, ``"jensen_shannon"`` or ``"total_variation"``, as in
            ``Divergences``.

    Returns:
        In nats, but the total variation; of tensors with its gradient by query, key, bias and sinks
        of both, in linear memory. There is no second derivative, and a pair that either masks has a
        gradient of 0.

    Raises:
        ShapeError, TypeError: as ``compare``.
        UnsupportedError: rows are no distributions: of effects, or of some keys.
        ValueError: another ``kind``.
    """
    return Comparison(a, b).divergence(kind)


class Comparison(Mix[ArrayT]):
    """The difference ``a − b`` of two matrices, ``(..., H, Lq, Lk)``, computed on request.

    ``regard.compare(a, b)`` makes it. ``strongest`` are the pairs that differ most, with the sign;
    ``pool``, ``topk``, ``received`` and rows are those of the difference. The divergences compare
    rows as distributions over the keys, and over one more outcome that stands for no key: a sink,
    and all of a row that sees nothing. So they are finite where one row alone sees nothing, but for
    the Kullback–Leibler divergences.

    Source: Kullback & Leibler 1951; Lin 1991 for Jensen–Shannon.
    """

    _name = "comparison"

    def __init__(self, a: Matrix[ArrayT], b: Matrix[ArrayT]) -> None:
        pair = [as_pairs(one) for one in (a, b)]
        require_alike("compare", ("a", "b"), pair)
        super().__init__([Term(pair[0], None, 1.0), Term(pair[1], None, -1.0)], pair[0]._has_heads)

    @at_once
    def divergence(self, kind: DivergenceKind) -> ArrayT:
        """``(..., H, Lq)``: how far the rows are apart, as ``Divergences`` says.

        Raises:
            UnsupportedError: rows are no distributions: of effects, or of some keys.
            ValueError: another ``kind``.
        """
        if kind not in MEASURES:
            known = ", ".join(map(repr, MEASURES))
            raise ValueError(f"divergence: kind is {kind!r}; {known} are known.")
        return self._with_gradient(kind, self._measured([kind])[0])

    def _with_gradient(self, kind: DivergenceKind, value: Any) -> Any:
        """The divergences of every row, with their gradient by what the weights are made of."""
        found = value
        for side, term in enumerate(self._terms):
            for weights, heads in sources(term.matrix):
                if (graph := differentiable(weights._graph)) is None:
                    continue
                self._require_whole(weights)
                of_block = partial(self._gradient_of_block, kind, side, heads)
                shape = self._extent.shape[:3]
                found = with_gradient(found.reshape(shape), graph, of_block).reshape(value.shape)
        return found

    def _require_whole(self, weights: AttentionWeights[Any]) -> None:
        places = (self._b, self._h, self._rows)
        if any(place != range(len(place)) for place in places) or (
            weights.shape[-2:] != self.shape[-2:]
        ):
            raise UnsupportedError(
                "compare: a part of a comparison has no gradient. Compare the parts of the weights,"
                " a.part(rows) and b.part(rows), or compute it in torch.no_grad()."
            )

    def _gradient_of_block(
        self, kind: DivergenceKind, side: int, heads: Heads, grad: Any,
        block: Any,
    ) -> Any:  # fmt: skip
        """The gradient of a block of the weights of a (side 0) or b, ``(b, h, rows, keys)``."""
        xp, rows = self._xp, block.rows
        out = xp.full(tuple(block.weights.shape), 0.0, xp.dtype)
        for at_b, b in enumerate(range(block.b.start, block.b.stop)):
            for at_h, h in enumerate(range(block.h.start, block.h.stop)):
                if h not in heads:
                    continue
                own, coefficient = heads[h]
                both = self._rows_of(b, own, rows)
                by_key = SLOPES[kind](both)[side]
                by_key = by_key[:, :-1] - by_key[:, -1:]  # no key has a gradient of 0
                low = max(both.keys.start, block.keys.start)
                high = max(low, min(both.keys.stop, block.keys.stop))
                into = slice(low - block.keys.start, high - block.keys.start)
                some = by_key[:, low - both.keys.start : high - both.keys.start]
                of_rows = coefficient * xp.wide(grad[b, own, rows])[:, None]
                out[at_b, at_h, :, into] = xp.array(out, some * of_rows)
        return out

    def _rows_of(self, b: int, h: int, rows: slice) -> _Both:
        pair = [term.matrix._logarithms(*term.matrix._at(b, h, rows)) for term in self._terms]
        return _Both(self._xp, *pair)

    @at_once
    def overlap(self, k: int = 8) -> ArrayT:
        """``(..., H, Lq)``: the share of the k strongest keys that a and b have in common.

        Of keys with a weight; of the greater number where there are fewer than k; 1 where neither
        has any.

        Raises:
            ShapeError: k is larger than Lk, or negative.
            UnsupportedError: rows are no distributions.
        """
        check_k(k, len(self._columns), "keys")
        return self._measured(["overlap"], int(k))[0]

    @at_once
    def divergences(self, k: int = 8) -> Divergences[ArrayT]:
        """All divergences and the overlap of the k strongest keys, in one pass.

        Args:
            k: of the overlap; no more than there are keys.

        Raises:
            UnsupportedError: rows are no distributions.
        """
        check_k(k := min(k, len(self._columns)), len(self._columns), "keys")
        return Divergences(*self._measured([*MEASURES, "overlap"], int(k)))

    def _measured(self, names: Sequence[str], k: int = 0) -> list[ArrayT]:
        """Measures of every row, in one pass; k is that of the overlap."""
        self._require_distributions()
        self._require_now()
        xp, shape = self._xp, self._extent.shape[:3]
        found = {name: xp.full(shape, 0.0, "float64") for name in names}
        measures = {name: MEASURES.get(name, lambda rows: _overlap(rows, k)) for name in names}
        with np.errstate(all="ignore"):
            if self._backend is not None and 0 not in self._extent.shape:
                self._diverge(self._backend, found, k)
            else:
                for at, rows in self._both():
                    for name, measure in measures.items():
                        found[name][at] = measure(rows)
        return [self._give(out) for out in found.values()]

    def _diverge(self, backend: PairBackend, found: dict[str, Any], k: int) -> None:
        """Has the backend measure the rows over their keys, and adds what no key has."""
        xp, own = self._xp, slice(self._rows.start, self._rows.stop, self._rows.step)
        self._prepare(self._b, self._h, self._rows)
        for at_b, b in enumerate(self._b):
            for at_h, h in enumerate(self._h):
                pair = [(term.matrix, term.matrix._at(b, h, own)) for term in self._terms]
                fields = {name: out[at_b, at_h] for name, out in found.items()}
                of_a, of_b = (matrix._terms_of(*at) for matrix, at in pair)
                backend.diverge(of_a, of_b, {"k": k, **fields})
                none = [matrix._elsewhere(*at) for matrix, at in pair]
                no_key = _Both(xp, *(Logarithms(slice(0, 0), x[:, :0], x) for x in none))
                for name in MEASURES.keys() & found.keys():
                    sums = found[name][at_b, at_h]
                    total = sums + MEASURES[name](no_key)
                    sums[...] = xp.where(total < 0, 0.0, total)

    def _require_distributions(self) -> None:
        whole = all(
            len(self._columns) == len(term.matrix._columns) == term.matrix._width
            for term in self._terms
        )
        if not whole or not all(term.matrix._are_distributions for term in self._terms):
            raise UnsupportedError(
                "compare: divergences are of whole rows of weights, or of mixes whose coefficients "
                "are positive and sum to 1. Compare these, and take .part(rows) of the comparison."
            )

    def _both(self) -> Iterator[tuple[tuple[int, int, slice], _Both]]:
        """Rows of a and b, some at a time, with their place in a result."""
        if 0 in self._extent.shape[:3]:
            return
        self._prepare(self._b, self._h, self._rows)
        height = min(self._tallest, max(self._lowest, self._block // max(1, self._width)))
        for at_b, b in enumerate(self._b):
            for at_h, h in enumerate(self._h):
                for low in range(0, len(self._rows), height):
                    rows = self._rows[low : low + height]
                    part = slice(rows.start, rows.stop, rows.step)
                    yield (at_b, at_h, slice(low, low + len(rows))), self._rows_of(b, h, part)


class _Both:
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


Measure: TypeAlias = Callable[[_Both], Any]


def _kl(xp: Arrays, log_ratio: Any, a: Any, b: Any) -> Any:
    """``Σ a · ln(a/b) − a + b``: no term is negative, and a rounded sum of a adds no error."""
    terms = a * xp.where(log_ratio == -np.inf, 0.0, log_ratio) - a + b
    least = 4 * float(np.finfo(xp.dtype).tiny)  # a smaller weight counts as none, whatever b is
    terms = xp.where(a < least, b, terms)
    return xp.maximum(xp.row_sum(terms), 0 * a[:, :1])[:, 0]


def _forward(rows: _Both) -> Any:
    return _kl(rows.xp, rows.log_ratio, rows.a, rows.b)


def _reverse(rows: _Both) -> Any:
    return _kl(rows.xp, -rows.log_ratio, rows.b, rows.a)


def _jensen_shannon(rows: _Both) -> Any:
    """``Σ (a+b)/4 · ((1+u) ln(1+u) + (1−u) ln(1−u))`` with ``u = (a−b)/(a+b)``."""
    xp, both = rows.xp, rows.a + rows.b
    u = (rows.a - rows.b) / (both + (both == 0))
    terms = 0.0
    for one in (1 + u, 1 - u):
        terms = terms + one * xp.log(one + (one == 0))
    return xp.maximum(xp.row_sum(both * terms / 4), 0 * u[:, :1])[:, 0]


def _total_variation(rows: _Both) -> Any:
    return rows.xp.row_sum(abs(rows.a - rows.b))[:, 0] / 2


def _overlap(rows: _Both, k: int) -> Any:
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
    return xp.where(most == 0, 1.0, common / most)


MEASURES: dict[str, Measure] = {
    "kl": _forward,
    "reverse_kl": _reverse,
    "jensen_shannon": _jensen_shannon,
    "total_variation": _total_variation,
}


def _slopes_of_kl(log_ratio: Any, xp: Arrays) -> tuple[Any, Any]:
    """Of ``Σ a · ln(a/b)`` by a and b, where rows sum to 1; 0 where either is masked."""
    finite = xp.isfinite(log_ratio)
    log_ratio = xp.where(finite, log_ratio, 0.0)
    return log_ratio, xp.where(finite, -xp.exp(log_ratio), 0.0)


def _slopes_of_jensen_shannon(rows: _Both) -> tuple[Any, Any]:
    xp, both = rows.xp, rows.a + rows.b
    ratios = (2 * one / (both + (both == 0)) for one in (rows.a, rows.b))
    by_a, by_b = (xp.where(x > 0, xp.log(x + (x == 0)), 0.0) / 2 for x in ratios)
    return by_a, by_b


def _slopes_of_total_variation(rows: _Both) -> tuple[Any, Any]:
    sign = (1.0 * (rows.a > rows.b) - 1.0 * (rows.a < rows.b)) / 2
    return sign, -sign


SLOPES: dict[str, Callable[[_Both], tuple[Any, Any]]] = {
    "kl": lambda rows: _slopes_of_kl(rows.log_ratio, rows.xp),
    "reverse_kl": lambda rows: _slopes_of_kl(-rows.log_ratio, rows.xp)[::-1],
    "jensen_shannon": _slopes_of_jensen_shannon,
    "total_variation": _slopes_of_total_variation,
}
assert set(get_args(DivergenceKind)) == set(MEASURES) == set(SLOPES)


def sources(matrix: PairMatrix[Any]) -> list[tuple[AttentionWeights[Any], Heads]]:
    """The weights that a matrix is a sum of: for each their heads' place in it and coefficient."""
    if isinstance(matrix, WeightMatrix):
        weights = matrix._reader.weights
        return [(weights, {h: (h, 1.0) for h in range(weights._call.sizes[1])})]
    found: dict[int, tuple[AttentionWeights[Any], Heads]] = {}
    for term in getattr(matrix, "_terms", ()):
        for weights, heads in sources(term.matrix):
            own = found.setdefault(id(weights), (weights, {}))[1]
            for h, (place, coefficient) in heads.items():
                if term.head in (None, place):
                    before = own.get(h, (0, 0.0))[1]
                    at = place if term.head is None else 0
                    own[h] = at, before + term.coefficient * coefficient
    return list(found.values())
