"""Gradients of the divergences of two matrices, by what their weights are made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from regard._backends.pair_terms import RowSlopes
from regard._base.errors import UnsupportedError
from regard._weights.differentiable import differentiable
from regard._weights.differentiable import with_gradient as with_own_gradient
from regard._weights.divergences import SLOPES, BothRows, DivergenceKind
from regard._weights.mix import WeightMatrix
from regard._weights.weight_rows import WeightReader

if TYPE_CHECKING:
    from regard._call.call import Call
    from regard._weights.attention_weights import AttentionWeights
    from regard._weights.compare import Comparison
    from regard._weights.pair_matrix import PairMatrix

# By a head of some weights: its place in a matrix, and its coefficient there.
Heads: TypeAlias = dict[int, tuple[int, float]]


def with_gradient(comparison: Comparison[Any], kind: DivergenceKind, value: Any) -> Any:
    """The divergences of every row, with their gradient by what both matrices are made of."""
    found, shape = value, comparison._extent.shape[:3]
    for side, term in enumerate(comparison._terms):
        for weights, heads in sources(term.matrix):
            if (graph := differentiable(weights._graph)) is None:
                continue
            _require_whole(comparison, weights)
            by = DivergenceGradient(comparison, kind, side, weights, heads, value.reshape(shape))
            found = with_own_gradient(found.reshape(shape), graph, by.of_block, by.by_backend)
            found = found.reshape(value.shape)
    return found


def _require_whole(comparison: Comparison[Any], weights: AttentionWeights[Any]) -> None:
    places = (comparison._b, comparison._h, comparison._rows)
    if any(place != range(len(place)) for place in places) or (
        weights.shape[-2:] != comparison.shape[-2:]
    ):
        raise UnsupportedError(
            "compare: a part of a comparison has no gradient. Compare the parts of the weights,"
            " a.part(rows) and b.part(rows), or compute it in torch.no_grad()."
        )


class DivergenceGradient:
    """The gradient of divergences ``(B, H, Lq)`` by some weights of one side.

    Args:
        side: 0 where the weights are of a, 1 of b.
        heads: of the weights, in that side.
        value: the divergences.
    """

    def __init__(
        self, comparison: Comparison[Any], kind: DivergenceKind, side: int,
        weights: AttentionWeights[Any], heads: Heads, value: Any,
    ) -> None:  # fmt: skip
        self._comparison, self._kind, self._side = comparison, kind, side
        self._weights, self._heads, self._value = weights, heads, value
        self._every = slice(0, len(comparison._rows))
        # Of the two derivatives of a Kullback–Leibler divergence one is a logarithm, one a ratio.
        self._is_kl = kind in ("kl", "reverse_kl")
        self._is_ratio = kind == ("kl" if side else "reverse_kl")

    def of_block(self, grad: Any, block: Any) -> Any:
        """That of a block of the weights, ``(b, h, rows, keys)``."""
        comparison, rows = self._comparison, block.rows
        xp = comparison._xp
        out = xp.full(tuple(block.weights.shape), 0.0, xp.dtype)
        for at_b, b in enumerate(range(block.b.start, block.b.stop)):
            for at_h, h in enumerate(range(block.h.start, block.h.stop)):
                if h not in self._heads:
                    continue
                own, coefficient = self._heads[h]
                both = comparison._rows_of(b, own, rows)
                by_key = SLOPES[self._kind](both)[self._side]
                by_key = by_key[:, :-1] - by_key[:, -1:]  # no key has a gradient of 0
                low = max(both.keys.start, block.keys.start)
                high = max(low, min(both.keys.stop, block.keys.stop))
                into = slice(low - block.keys.start, high - block.keys.start)
                some = by_key[:, low - both.keys.start : high - both.keys.start]
                of_rows = coefficient * xp.wide(grad[b, own, rows])[:, None]
                out[at_b, at_h, :, into] = xp.array(out, some * of_rows)
        return out

    def by_backend(self, grad: Any, names: Collection[str]) -> dict[str, Any] | None:
        """Those of the named inputs of the weights; None where the backend has none."""
        comparison, graph = self._comparison, self._weights._graph
        backend, xp = comparison._backend, comparison._xp
        if backend is None or 0 in comparison._extent.shape or not self._is_finite(grad):
            return None
        assert graph is not None
        inputs = {name: getattr(graph, name) for name in names}
        found = {name: xp.full(tuple(x.shape), 0.0, xp.dtype) for name, x in inputs.items()}
        reader = WeightReader(self._weights)
        for b in range(len(comparison._b)):
            for h, (place, coefficient) in self._heads.items():
                own, sides = reader.term(b, h, self._every), self._sides(b, place)
                alone = len(sides[self._side]) == 1
                rows = self._slopes_of_rows(b, place, coefficient * grad[b, place], alone)
                some = backend.divergence_gradients(self._kind, sides, self._side, own, rows, names)
                for name, x in found.items():
                    at = _place_of_head(graph, name, b, h)
                    x[at] += some[name].reshape(x[at].shape)
        return {name: xp.array(inputs[name], x) for name, x in found.items()}

    def _is_finite(self, grad: Any) -> bool:
        terms = self._comparison._terms
        calls = [weights._call for term in terms for weights, _ in sources(term.matrix)]
        given = [grad, *(x for call in calls for x in (call.query, call.key))]
        return all(x.sum().isfinite() or x.isfinite().all() for x in given)

    def _places(self, b: int, h: int) -> list[tuple[PairMatrix[Any], tuple[int, int, slice]]]:
        terms = self._comparison._terms
        return [(term.matrix, term.matrix._at(b, h, self._every)) for term in terms]

    def _sides(self, b: int, h: int) -> list[Any]:
        return [matrix._terms_of(*at) for matrix, at in self._places(b, h)]

    def _slopes_of_rows(self, b: int, h: int, factors: Any, alone: bool) -> RowSlopes:
        xp, side = self._comparison._xp, self._side
        shares = [matrix._elsewhere(*at) for matrix, at in self._places(b, h)]
        elsewhere = SLOPES[self._kind](BothRows.of_no_key(xp, *shares))[side][:, 0]
        value = xp.cast(self._value[b, h], "float64")
        # Where the weights are one of several terms, their own sum is not known.
        follows = alone and self._is_kl and bool(value.isfinite().all())
        delta = factors * self._delta(value, shares, elsewhere) if follows else None
        return RowSlopes(factors, elsewhere, delta)

    def _delta(self, value: Any, shares: Sequence[Any], elsewhere: Any) -> Any:
        """``Σ w·dw`` of each row over the keys, as it follows from the divergence.

        Of a logarithm it is ``Σ a·ln(a/b)``, of a ratio ``−Σ b·(a/b)``, less what no key has.
        """
        if not self._is_ratio:
            return value - elsewhere
        own, other = (1 - x[:, 0] for x in (shares[self._side], shares[1 - self._side]))
        return -other - own * elsewhere


def _place_of_head(graph: Call, name: str, b: int, h: int) -> Any:
    """Where the gradient of an input has that of a head."""
    if name == "sinks":
        return h
    x = getattr(graph, name)
    heads = h * x.shape[1] // graph.query.shape[1]
    return min(b, len(x) - 1), heads


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
