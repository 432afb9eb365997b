"""Weighted sums of matrices: the mean over heads, over layers, or any mix of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard._backends.pair_terms import PairBackend, PairTerm, ReadOnce
from regard._base.arrays import dtype_name, is_tensor, read_array, to_numpy
from regard._base.errors import ShapeError, a_type
from regard._base.types import Array, ArrayT
from regard._weights.pair_matrix import Logarithms, PairMatrix, Rows, rows_in
from regard._weights.parts import place_of
from regard._weights.questions import at_once
from regard._weights.weight_rows import WeightReader
from regard._weights.written import refuse_recorded

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights


class WeightMatrix(PairMatrix[ArrayT]):
    """Attention weights as a matrix like any other."""

    _name = "weights"

    def __init__(self, weights: AttentionWeights[ArrayT]) -> None:
        self._start(weights._call, numbers=weights._numbers)
        self._reader = WeightReader(weights)

    def _require_now(self) -> None:
        weights = self._reader.weights
        weights._require_now()
        refuse_recorded(weights._call, False)

    def _prepare(self, b: Sequence[int], h: Sequence[int], rows: range) -> None:
        self._reader.prepare(b, h, rows)

    @property
    def _backend(self) -> PairBackend | None:
        return self._reader.backend

    def _terms_of(self, b: int, h: int, rows: slice, read: ReadOnce) -> list[PairTerm]:
        return [self._reader.term(b, h, rows, read)]

    def _compute(self, b: int, h: int, rows: slice) -> Rows:
        return Rows(*self._reader.read(b, h, rows)[:3])

    @property
    def _are_distributions(self) -> bool:
        return self._reader.weights._call.whole_rows

    def _logarithms(self, b: int, h: int, rows: slice) -> Logarithms:
        return Logarithms(*self._reader.read_logarithms(b, h, rows))

    def _elsewhere(self, b: int, h: int, rows: slice) -> Any:
        return self._reader.elsewhere(b, h, rows)


class Term(NamedTuple):
    """One summand: the matrix of a head, or of the head that is asked for."""

    matrix: PairMatrix[Any]
    head: int | None
    coefficient: float


class Mix(PairMatrix[ArrayT]):
    """A weighted sum of matrices, ``(..., Lq, Lk)`` or ``(..., H, Lq, Lk)``, computed on request.

    ``weights.mix()`` is the mean over heads, ``regard.mix([...])`` that over layers; both take
    coefficients, and both mix effects too. It has rows, ``topk``, ``strongest``, ``received``,
    ``pool``, ``part`` and ``@``; each block of rows is summed before it is looked at, so memory is
    linear in the lengths. A pair is masked where it is masked in every term, those with a
    coefficient of 0 left out. Numbers are as they are, in heatmaps too: no logarithms.
    """

    _name = "mix"

    def __init__(self, terms: Sequence[Term], has_heads: bool) -> None:
        wide = [term.matrix for term in terms if term.matrix._dtype_name == "float64"]
        first = (wide or [terms[0].matrix])[0]
        self._terms = [term for term in terms if term.coefficient != 0.0]
        self._like, self._leading, self._has_heads = first._like, first._leading, has_heads
        same = {term.matrix._numbers for term in terms}
        self._numbers = same.pop() if has_heads and len(same) == 1 else None
        self._b = range(len(first._b))
        self._h = range(len(first._h) if has_heads else 1)
        self._rows, self._columns = range(len(first._rows)), range(len(first._columns))
        self._width = max(term.matrix._width for term in terms)

    def _require_now(self) -> None:
        for term in self._terms:
            term.matrix._require_now()

    def _prepare(self, b: Sequence[int], h: Sequence[int], rows: range) -> None:
        for matrix in {id(term.matrix): term.matrix for term in self._terms}.values():
            heads = [term.head for term in self._terms if term.matrix is matrix]
            own = h if None in heads else [one for one in heads if one is not None]
            at = matrix._rows[rows.start : rows.stop : rows.step]
            matrix._prepare([matrix._b[x] for x in b], [matrix._h[x] for x in own], at)

    @property
    def _backend(self) -> PairBackend | None:
        matrices = [term.matrix for term in self._terms]
        same = {(one._backend, dtype_name(one._like), one._width) for one in matrices}
        whole = all(one._has_all_keys for one in matrices)
        return same.pop()[0] if len(same) == 1 and whole else None

    def _terms_of(self, b: int, h: int, rows: slice, read: ReadOnce) -> list[PairTerm]:
        return [
            term._replace(coefficient=coefficient * term.coefficient)
            for matrix, head, coefficient in self._terms
            for term in matrix._terms_of(*matrix._at(b, h if head is None else head, rows), read)
        ]

    @property
    def _term_count(self) -> int:
        return sum(term.matrix._term_count for term in self._terms)

    def _compute(self, b: int, h: int, rows: slice) -> Rows:
        xp, found = self._xp, []
        for matrix, head, coefficient in self._terms:
            part = matrix._compute(*matrix._at(b, h if head is None else head, rows))
            found.append((coefficient, matrix._cut(part)))
        n = rows_in(rows)
        spans = [rows.keys for _, rows in found if rows.keys.start < rows.keys.stop]
        low = min((keys.start for keys in spans), default=0)
        high = max((keys.stop for keys in spans), default=low)
        out = xp.full((n, high - low), 0.0, xp.dtype)
        plain = all(rows.visible is None and rows.keys == slice(low, high) for _, rows in found)
        seen = None if plain else xp.full((n, high - low), 0, "bool")
        for coefficient, (keys, values, visible) in found:
            own_keys = slice(max(0, keys.start - low), max(0, keys.stop - low))
            if own_keys.start >= own_keys.stop:
                continue
            out[:, own_keys] += xp.wide(values) * coefficient
            if seen is not None:
                seen[:, own_keys] |= True if visible is None else visible
        return Rows(slice(low, high), out, seen)

    @property
    def _are_distributions(self) -> bool:
        fine = (term.matrix._are_distributions and term.coefficient > 0 for term in self._terms)
        return all(fine) and math.isclose(sum(x for *_, x in self._terms), 1, rel_tol=1e-6)

    def _logarithms(self, b: int, h: int, rows: slice) -> Logarithms:
        if len(self._terms) == 1:  # exact where a weight is too small for its dtype
            matrix, head, _ = self._terms[0]
            return matrix._logarithms(*matrix._at(b, h if head is None else head, rows))
        keys, values, _ = self._compute(b, h, rows)
        return Logarithms(keys, self._xp.log(values), self._elsewhere(b, h, rows))

    def _elsewhere(self, b: int, h: int, rows: slice) -> Any:
        shares = (
            coefficient * matrix._elsewhere(*matrix._at(b, h if head is None else head, rows))
            for matrix, head, coefficient in self._terms
        )
        return sum(shares, start=self._xp.full((rows_in(rows), 1), 0.0, "float64"))


def mixed_heads(
    matrix: Any,
    heads: Collection[int] | None,
    coefficients: Sequence[float] | Array[Any] | None,
) -> Mix[Any]:
    """The sum over heads of weights or of a matrix of pairs; see ``AttentionWeights.mix``."""
    found = as_pairs(matrix)
    if not found._has_heads:
        raise IndexError(f"mix: {found.shape} has no axis of heads before (Lq, Lk).")
    numbers = found.head_numbers
    if isinstance(heads, (int, np.integer)):
        raise TypeError(f"mix: heads is {heads}, an int; a list is needed: [{heads}].")
    if heads is not None and not isinstance(heads, Iterable):
        raise TypeError(f"mix: heads is {a_type(heads)}; a list of ints is needed.")
    if isinstance(heads, Set) and coefficients is not None:
        raise TypeError("mix: heads is a set, which has no order; a list is needed.")
    chosen = numbers if heads is None else tuple(heads)
    places = [place_of("mix: head", h, numbers) for h in chosen]
    if not places:
        raise ValueError("mix: heads are none; name at least one, or leave them out for all.")
    values = _coefficients(coefficients, len(places), "heads")
    return Mix([Term(found, *pair) for pair in zip(places, values)], has_heads=False)


@at_once
def mix(
    matrices: Sequence[AttentionWeights[ArrayT] | PairMatrix[ArrayT]],
    coefficients: Sequence[float] | Array[Any] | None = None,
) -> Mix[ArrayT]:
    """The weighted sum of several matrices of one shape, as of layers, computed on request.

    Args:
        matrices: ``AttentionWeights``, mixes of their heads, or ``Effects``, of one shape
            ``(..., H, Lq, Lk)``, library and device.
        coefficients: a number for each; by default 1/n, the mean.

    Returns:
        A matrix of that shape, with ``topk``, ``strongest`` and all that ``Mix`` has.

    Raises:
        ShapeError: the shapes differ, or the coefficients are not as many.
        TypeError: what is no such matrix, or several libraries or devices.
        ValueError: no matrix, or a coefficient that is not finite.

    Example:
        >>> import regard
        >>> x = np.eye(2)
        >>> layers = [regard.AttentionWeights(x, x), regard.AttentionWeights(-x, x)]
        >>> mix(layers)[0].round(4)
        array([0.5, 0.5])
    """
    from regard._weights.attention_weights import AttentionWeights

    is_one = isinstance(matrices, (AttentionWeights, PairMatrix))
    if is_one or not isinstance(matrices, Iterable):
        raise TypeError(
            f"mix: matrices is {a_type(matrices)}; a list is needed, as in [a, b]."
            " The mean over the heads of one is weights.mix()."
        )
    found = [as_pairs(one) for one in matrices]
    if not found:
        raise ValueError("mix: no matrices; at least one is needed.")
    require_alike("mix", [f"matrices[{n}]" for n in range(len(found))], found)
    values = _coefficients(coefficients, len(found), "matrices")
    return Mix([Term(one, None, c) for one, c in zip(found, values)], found[0]._has_heads)


def require_alike(what: str, names: Sequence[str], matrices: Sequence[PairMatrix[Any]]) -> None:
    """Raises where matrices have not one shape, library and device."""
    first, *others = matrices
    for name, one in zip(names[1:], others):
        if is_tensor(one._like) != is_tensor(first._like) or one._xp_device != first._xp_device:
            raise TypeError(f"{what}: {names[0]} and {name} are of several libraries or devices.")
        if one.shape != first.shape or one._has_heads != first._has_heads:
            raise ShapeError(
                f"{what}: {names[0]} is {first.shape} and {name} {one.shape}; they must be of one "
                "shape. weights.mix() and weights.head(h) have no axis of heads."
            )


def as_pairs(matrix: Any) -> PairMatrix[Any]:
    """Weights or a matrix of pairs as the latter.

    Raises:
        TypeError: it is neither.
    """
    from regard._weights.attention_weights import AttentionWeights

    if isinstance(matrix, AttentionWeights):
        return WeightMatrix(matrix)
    if isinstance(matrix, PairMatrix):
        return matrix
    raise TypeError(
        f"{type(matrix).__name__} is no matrix of weights or effects; AttentionWeights are needed, "
        "as of regard.AttentionWeights(query, key)."
    )


def _coefficients(given: Any, count: int, of: str) -> list[float]:
    if given is None:
        return [1 / count] * count
    values = to_numpy(given) if is_tensor(given) else read_array("mix: coefficients", given)
    if values.size and values.dtype.kind not in "iuf" and dtype_name(values) != "bfloat16":
        raise TypeError(f"mix: coefficients are {dtype_name(values)}; real numbers are needed.")
    values = values.astype(np.float64)
    if values.shape != (count,):
        raise ShapeError(
            f"mix: coefficients have shape {values.shape}; one for each of {count} {of} is needed."
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(f"mix: coefficients are {values.tolist()}; they must be finite.")
    found: list[float] = values.tolist()
    return found
