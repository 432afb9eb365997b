"""Gradients of the divergences of two matrices, by what their weights are made of."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeAlias

from regard._backends.pair_terms import ReadOnce, RowSlopes
from regard._base.errors import UnsupportedError
from regard._weights.differentiable import differentiable
from regard._weights.differentiable import with_gradient as with_own_gradient
from regard._weights.divergences import BothRows, DivergenceKind, is_ratio, products
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
        self._reader = WeightReader(weights)

    def of_block(self, grad: Any, block: Any) -> Any:
        """That of a block of the weights, ``(b, h, rows, keys)``, times these."""
        from regard._backends.torch_gradients import Products

        xp, rows = self._comparison._xp, block.rows
        out = xp.full(tuple(block.weights.shape), 0.0, xp.dtype)
        of_sink = out[..., :1] * 0.0
        for at_b, b in enumerate(range(block.b.start, block.b.stop)):
            for at_h, h in enumerate(range(block.h.start, block.h.stop)):
                if h not in self._heads:
                    continue
                place, coefficient = self._heads[h]
                both = self._comparison._rows_of(b, place, rows)
                low = max(both.keys.start, block.keys.start)
                high = max(low, min(both.keys.stop, block.keys.stop))
                into = slice(low - block.keys.start, high - block.keys.start)
                some = slice(low - both.keys.start, high - both.keys.start)
                w = 0 * both.a
                w[:, some] = block.weights[at_b, at_h, :, into]
                found = self._products(both, w, b, h, rows)
                found = found * coefficient * xp.wide(grad[b, place, rows])[:, None]
                out[at_b, at_h, :, into] = xp.array(out, found[:, some])
                of_sink[at_b, at_h] = xp.array(out, found[:, -1:])
        return Products(out, of_sink)

    def _products(self, both: BothRows, w: Any, b: int, h: int, rows: slice) -> Any:
        """``w`` times its derivative, and in the last column the sink's; 0 where there is none."""
        xp, sink = self._comparison._xp, self._reader.of_sink(b, h, rows)
        w[:, -1] = 0.0 if sink is None else xp.wide(sink)
        found = products(both, self._kind, self._side, w, self._is_alone(self._heads[h][0]))
        last = 0.0 if sink is None else xp.where(sink > 0, found[:, -1], 0.0)
        found[:, -1] = last  # of what sees nothing it would be the share of nothing
        return found

    def _is_alone(self, place: int) -> bool:
        """Whether one head is all that a matrix of the side has."""
        matrix = self._comparison._terms[self._side].matrix
        own = (at for _, heads in sources(matrix) for at, _ in heads.values())
        return sum(at == place for at in own) == 1

    def by_backend(self, grad: Any, names: Collection[str]) -> dict[str, Any] | None:
        """Those of the named inputs of the weights; None where the backend has none."""
        comparison, graph = self._comparison, self._weights._graph
        backend, xp = comparison._backend, comparison._xp
        if backend is None or 0 in comparison._extent.shape or not self._is_finite(grad):
            return None
        assert graph is not None
        inputs = {name: getattr(graph, name) for name in names}
        found = {name: xp.full(tuple(x.shape), 0.0, xp.dtype) for name, x in inputs.items()}
        comparison._prepare(comparison._b, comparison._h, comparison._rows)
        read: ReadOnce = {}
        places = [(b, h) for b in range(len(comparison._b)) for h in self._heads]
        for some in comparison._held_at_once(places):  # before a pass takes the caches
            asked = [
                (self._sides(b, h, read), self._reader.term(b, h, self._every, read),
                 self._slopes_of_rows(b, h, grad))
                for b, h in some
            ]  # fmt: skip
            for (b, h), (sides, own, rows) in zip(some, asked):
                of_head = backend.divergence_gradients(
                    self._kind, sides, self._side, own, rows, names
                )
                for name, x in found.items():
                    at = _place_of_head(graph, name, b, h)
                    x[at] += of_head[name].reshape(x[at].shape)
        return {name: xp.array(inputs[name], x) for name, x in found.items()}

    def _is_finite(self, grad: Any) -> bool:
        terms = self._comparison._terms
        calls = [weights._call for term in terms for weights, _ in sources(term.matrix)]
        given = [grad, *(x for call in calls for x in (call.query, call.key))]
        return all(x.sum().isfinite() or x.isfinite().all() for x in given)

    def _places(self, b: int, h: int) -> list[tuple[PairMatrix[Any], tuple[int, int, slice]]]:
        """Of a head of the weights, in both sides."""
        terms, place = self._comparison._terms, self._heads[h][0]
        return [(term.matrix, term.matrix._at(b, place, self._every)) for term in terms]

    def _sides(self, b: int, h: int, read: ReadOnce) -> list[Any]:
        return [matrix._terms_of(*at, read) for matrix, at in self._places(b, h)]

    def _shares(self, b: int, h: int) -> list[Any]:
        """Those of no key, of both sides."""
        return [matrix._elsewhere(*at) for matrix, at in self._places(b, h)]

    def _slopes_of_rows(self, b: int, h: int, grad: Any) -> RowSlopes:
        xp, (place, coefficient), of_sink = self._comparison._xp, self._heads[h], None
        factors = coefficient * grad[b, place]
        if self._weights._call.sinks is not None:
            both = BothRows.of_no_key(xp, *self._shares(b, h))
            of_sink = self._products(both, 0 * both.a, b, h, self._every)[:, -1]
            of_sink = factors * xp.cast(of_sink, "float64")
        value = xp.cast(self._value[b, place], "float64")
        # Where the weights are one of several terms, their own sum is not known.
        follows = self._kind in ("kl", "reverse_kl") and self._is_alone(place)
        if not follows or not bool(value.isfinite().all()):
            return RowSlopes(factors, of_sink, None)
        if not is_ratio(self._kind, self._side):
            return RowSlopes(factors, of_sink, factors * value)
        of_keys = factors * (self._shares(b, h)[1 - self._side][:, 0] - 1)
        return RowSlopes(factors, of_sink, of_keys if of_sink is None else of_keys + of_sink)


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
