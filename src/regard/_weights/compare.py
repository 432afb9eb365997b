"""Two matrices of weights: their difference pair by pair, and how far their rows are apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, overload

import numpy as np

from regard._backends.pair_terms import PairBackend, PairTerm, ReadOnce
from regard._base.errors import UnsupportedError, a_type
from regard._base.types import ArrayT
from regard._weights.divergence_gradients import with_gradient
from regard._weights.divergences import MEASURES, BothRows, DivergenceKind, overlap
from regard._weights.mix import Mix, Term, as_pairs, require_alike
from regard._weights.questions import at_once
from regard._weights.reductions import check_k

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights
    from regard._weights.pair_matrix import PairMatrix

    Matrix: TypeAlias = AttentionWeights[ArrayT] | PairMatrix[ArrayT]


MeasureName: TypeAlias = DivergenceKind | Literal["overlap"]


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
        _require_known(kind, MEASURES, "divergence")
        return with_gradient(self, kind, self._measured([kind])[0])

    def _rows_of(self, b: int, h: int, rows: slice) -> BothRows:
        pair = [term.matrix._logarithms(*term.matrix._at(b, h, rows)) for term in self._terms]
        return BothRows(self._xp, *pair)

    @at_once
    def overlap(self, k: int = 8) -> ArrayT:
        """``(..., H, Lq)``: the share of the k strongest keys that a and b have in common.

        Of keys with a weight; of the greater number where there are fewer than k; 1 where neither
        has any.

        Raises:
            ShapeError: k is larger than Lk, or negative.
            UnsupportedError: rows are no distributions.
        """
        check_k(k, len(self._columns), "keys", "overlap")
        return self._measured(["overlap"], int(k))[0]

    @overload
    def divergences(self, k: int = 8) -> Divergences[ArrayT]: ...
    @overload
    def divergences(self, k: int = 8, *, kinds: Collection[MeasureName]) -> dict[str, ArrayT]: ...

    @at_once
    def divergences(
        self, k: int = 8, *, kinds: Collection[MeasureName] | None = None
    ) -> Divergences[ArrayT] | dict[str, ArrayT]:
        """Divergences and the overlap of the k strongest keys, in one pass.

        Args:
            k: of the overlap; no more than there are keys.
            kinds: some fields of ``Divergences``; they are given by name then.

        Raises:
            UnsupportedError: rows are no distributions.
            ValueError: another kind.
            TypeError: one name instead of a list.
        """
        if isinstance(kinds, str):
            raise TypeError(
                f"divergences: kinds is a str; a list of names is needed, as in [{kinds!r}]."
            )
        if kinds is not None:
            if not isinstance(kinds, Iterable):
                raise TypeError(
                    f"divergences: kinds is {a_type(kinds)}; a list of names is needed."
                )
            kinds = tuple(kinds)  # what gives its names once would be read twice
        for kind in kinds or ():
            _require_known(kind, Divergences._fields, "divergences")
        Lk = len(self._columns)
        k = min(k, Lk) if isinstance(k, (int, np.integer)) else k
        check_k(k, Lk, "keys", "divergences")
        if kinds is not None:
            names = list(dict.fromkeys(kinds))
            return dict(zip(names, self._measured(names, int(k) * ("overlap" in names))))
        return Divergences(*self._measured(Divergences._fields, int(k)))

    def _measured(self, names: Sequence[str], k: int = 0) -> list[ArrayT]:
        """Measures of every row, in one pass; k is that of the overlap."""
        self._require_distributions()
        self._require_now()
        xp, shape = self._xp, self._extent.shape[:3]
        found = {name: xp.full(shape, 0.0, "float64") for name in names}
        measures = {name: MEASURES.get(name, lambda rows: overlap(rows, k)) for name in names}
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
        read: ReadOnce = {}
        for some in self._matrices_at_once():
            sides = [
                [
                    (term.matrix, term.matrix._at(self._b[b], self._h[h], own))
                    for term in self._terms
                ]
                for b, h in some
            ]
            terms = [[matrix._terms_of(*at, read) for matrix, at in pair] for pair in sides]
            fields = ({"k": k, **{name: x[at] for name, x in found.items()}} for at in some)
            backend.diverge([(of_a, of_b, into) for (of_a, of_b), into in zip(terms, fields)])
            for at, pair, (of_a, of_b) in zip(some, sides, terms):
                if all(map(_are_whole, (*of_a, *of_b))):
                    continue
                none = [matrix._elsewhere(*place) for matrix, place in pair]
                if not any((share != 0).any() for share in none):
                    continue
                no_key = BothRows.of_no_key(xp, *none)
                for name in MEASURES.keys() & found.keys():
                    found[name][at] += MEASURES[name](no_key)
        for name in MEASURES.keys() & found.keys():
            found[name] = xp.where(found[name] < 0, 0.0, found[name])

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

    def _both(self) -> Iterator[tuple[tuple[int, int, slice], BothRows]]:
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


def _are_whole(term: PairTerm) -> bool:
    """Whether all of each row is on its keys: no sink, and none that sees nothing."""
    return term.of.call.sinks is None and bool(term.total.min(initial=1) > 0)


def _require_known(kind: Any, known: Collection[str], what: str) -> None:
    if kind not in list(known):
        names = ", ".join(map(repr, known))
        raise ValueError(f"{what}: kind is {kind!r}; {names} are known.")
