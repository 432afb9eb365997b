"""What is computed of weights by one pass over them: rows, keys, pairs and heatmaps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, overload

import numpy as np

from regard._base.arrays import arrays_of, is_tensor, to_numpy
from regard._base.errors import UnsupportedError, a_type
from regard._base.types import ArrayT, FloatingT, IndexT, PoolHow, ReceivedHow
from regard._call.call import Call
from regard._weights.differentiable import differentiable, largest_with_gradient
from regard._weights.linear import LinearForms
from regard._weights.parts import part_of
from regard._weights.questions import at_once, question
from regard._weights.reductions import (
    Links,
    PerQuery,
    Pool,
    Received,
    Reduction,
    Strongest,
    TopK,
    TopKeys,
)
from regard._weights.statistics import RowStatistics, in_scores

if TYPE_CHECKING:
    from numpy.typing import NDArray

Reduced: TypeAlias = Literal[
    "lse", "entropy", "received", "distance", "topk", "strongest", "pooled"
]


class WeightsSummary(NamedTuple, Generic[ArrayT, IndexT]):
    """Several reductions of one pass over the weights; each as its own method gives it."""

    lse: ArrayT
    entropy: ArrayT
    received: ArrayT
    distance: ArrayT
    topk: TopKeys[ArrayT, IndexT]
    strongest: Links[ArrayT, IndexT]
    pooled: ArrayT


class Reductions(LinearForms[ArrayT]):
    """The reductions of weights; ``AttentionWeights`` has them."""

    if TYPE_CHECKING:
        _lse: Any
        _max_score: Any
        _weights_only: bool

        def _of_call(self, call: Call) -> Any: ...

    @property
    def lse(self) -> ArrayT:
        """``(..., Hq, Lq)``: ln of the sum of exp(score), the sink's included.

        −inf where all keys are masked. Weights are not computed from it: for large scores
        ``exp(score − lse)`` is less exact than maximum and sum apart.

        Raises:
            UnsupportedError: weights alone are known (``Recording.from_weights``).
        """
        self._require_scores("lse")
        return self._lse_of_scores()

    @property
    def statistics(self) -> RowStatistics[ArrayT]:
        """Maximum and total of the scores of every query: ``(..., Hq, Lq)`` each.

        A part's are those of the whole rows.

        Raises:
            UnsupportedError: weights alone are known (``Recording.from_weights``).
        """
        self._require_scores("statistics")
        return self._public_statistics()

    @at_once
    def _public_statistics(self) -> RowStatistics[ArrayT]:
        self._require_now()
        known = self._statistics.on_device(self._place)
        return in_scores(self._call, self._statistics.backend, known)

    def _require_scores(self, name: str) -> None:
        if self._weights_only:
            raise UnsupportedError(
                f"{name}: the scores are not known, for these weights were given as they are"
                " (from_weights); record the model's pass itself, with regard.record."
            )

    @question
    def _lse_of_scores(self) -> ArrayT:
        """``lse`` of the scores that the weights are computed from, whatever those are."""
        found: ArrayT
        if differentiable(self._graph) is not None:  # one that is kept would keep its graph
            (found,) = self._ask(PerQuery(self._call, "lse"))
            return found
        if self._lse is None:
            (self._lse,) = self._ask(PerQuery(self._call, "lse"))
        found = _copied(self._lse)
        return found

    @property
    def max_score(self) -> ArrayT:
        """``(..., Hq)``: the largest score of each head, over all unmasked pairs of its matrix.

        Scaled, capped and with its bias; the sinks are no pairs. It is what grows before a training
        diverges. −inf where all pairs are masked, NaN where a score is. Where the row statistics
        are known it costs next to nothing.

        Raises:
            UnsupportedError: weights alone are known (``Recording.from_weights``).

        Source: Dehghani et al. 2023 (the growth of the logits), Kimi team 2025 (QK-clip).
        """
        self._require_scores("max_score")
        return self._max_score_of_heads()

    @question
    def _max_score_of_heads(self) -> ArrayT:
        graph = differentiable(self._graph)
        if self._max_score is None or graph is not None:
            (rows,) = self._ask(PerQuery(self._call, "row_max"))
            self._max_score = arrays_of(rows).largest(rows, -1)
        found: ArrayT = _copied(self._max_score)
        return found if graph is None else self._largest_with_gradient(graph, rows, found)

    def _largest_with_gradient(self, graph: Call, rows: Any, found: Any) -> Any:
        B, Hq, _, Lq, Lk = self._call.sizes
        if 0 in (B, Hq, Lq, Lk):
            return found
        queries = to_numpy(rows).reshape(B, Hq, Lq).argmax(-1)
        keys = np.zeros_like(queries)
        for b, h in np.ndindex(B, Hq):
            i = int(queries[b, h])
            row = self._head(b, h)._cut(slice(i, i + 1))
            if row._call.sinks is not None or not row._call.whole_rows:
                # Beside a sink, or other keys of the whole, the largest weight may be 0.
                row = self._of_call(row._call.changed(sinks=None, whole_rows=True))
            keys[b, h] = int(row._ask(TopK(row._call, 1))[0].indices[0, 0])
        largest = largest_with_gradient(graph, found.reshape(B, Hq), queries, keys)
        return largest.reshape(found.shape)

    @question
    def entropy(self) -> ArrayT:
        """``(..., Hq, Lq)``: ``−Σ w · ln w`` of every query, in nats; 0 where all is masked."""
        (found,) = self._ask(PerQuery(self._call, "entropy"))
        return found

    @question
    def distance(self) -> ArrayT:
        """``(..., Hq, Lq)``: the mean ``|query position − key position|``, weighted, in tokens.

        The position of query i is ``query_start + i``.
        """
        (found,) = self._ask(PerQuery(self._call, "distance"))
        return found

    @question
    def received(self, how: ReceivedHow = "sum", queries: slice | None = None) -> ArrayT:
        """``(..., Hq, Lk)``: the weights that every key receives from all queries, or from some.

        Args:
            how: ``"sum"``; ``"seen"``, the mean over the queries that see the key, 0 of none;
                ``"mean"`` over all queries, also those to which it is masked; or ``"max"``.
            queries: from which, with any positive step; by default all.

        Raises:
            ValueError: another ``how``, or a negative step.
            TypeError: no slice.

        Source: Zhang et al. 2023 (H2O) for sums, Li et al. 2024 (SnapKV) for the last queries.
        """
        rows = part_of("queries", queries, self._call.sizes[3])
        part = self if queries is None else self._cut(rows)
        (found,) = part._ask(Received(part._call, how))
        return found

    @overload
    def topk(
        self: Reductions[NDArray[FloatingT]], k: int
    ) -> TopKeys[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def topk(self, k: int) -> TopKeys[ArrayT, ArrayT]: ...
    @question
    def topk(self, k: int) -> TopKeys[Any, Any]:
        """The k strongest keys of every query: ``(values, indices)``, each ``(..., Hq, Lq, k)``.

        Strongest first. Where fewer than k keys are visible, others follow with weight 0.

        Raises:
            ShapeError: k is larger than Lk, or negative.
            MaterializeError: the result is above the limit.
        """
        (found,) = self._ask(TopK(self._call, k))
        return found

    @overload
    def strongest(
        self: Reductions[NDArray[FloatingT]], n: int = 20
    ) -> Links[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def strongest(self, n: int = 20) -> Links[ArrayT, ArrayT]: ...
    @question
    def strongest(self, n: int = 20) -> Links[Any, Any]:
        """The n strongest token pairs of each matrix: ``(query, key, weight)``, ``(..., Hq, n)``.

        Strongest first, of equal weights the lower query, then the lower key; at most ``Lq · Lk``;
        −1, −1, 0.0 where no pair with a weight is left. Where the row statistics are known, as
        after a forward pass, it reads about n rows.

        Raises:
            ValueError: n is negative.
            MaterializeError: the pairs are above the limit.
        """
        (found,) = self._ask(Strongest(self._call, n))
        return found

    @overload
    def pool(
        self,
        size: tuple[int, int] = (512, 512),
        how: PoolHow = "max",
        rows: slice | None = None,
        columns: slice | None = None,
        of: tuple[int, int] | None = None,
    ) -> ArrayT: ...
    @overload
    def pool(
        self,
        size: tuple[int, int],
        how: tuple[PoolHow, ...],
        rows: slice | None = None,
        columns: slice | None = None,
        of: tuple[int, int] | None = None,
    ) -> tuple[ArrayT, ...]: ...
    @overload
    def pool(
        self,
        size: tuple[int, int] = (512, 512),
        *,
        how: tuple[PoolHow, ...],
        rows: slice | None = None,
        columns: slice | None = None,
        of: tuple[int, int] | None = None,
    ) -> tuple[ArrayT, ...]: ...
    @question
    def pool(
        self,
        size: tuple[int, int] = (512, 512),
        how: PoolHow | tuple[PoolHow, ...] = "max",
        rows: slice | None = None,
        columns: slice | None = None,
        of: tuple[int, int] | None = None,
    ) -> ArrayT | tuple[ArrayT, ...]:
        """A heatmap of the matrix, or a part of it, in ln(weight): ``(..., Hq, R, C)``.

        Bin r holds the rows from ``r·n // R`` to ``(r + 1)·n // R`` of the n rows, and likewise for
        columns. NaN: all pairs of the bin are masked. −inf: unmasked, with weight 0.

        Args:
            size: ``(R, C)``; a side that exceeds its part becomes one bin for each row or column.
            how: ``"max"``, the strongest link in the bin, so no lone link is lost; or ``"mass"``,
                the mean over the bin's queries of the sum over its keys: every row of bins sums
                to 1. A tuple of both gives a tuple of heatmaps, in one pass.
            rows, columns: the part's queries and keys, as in ``part``; by default all.
            of: ``(rows, columns)`` of the whole of which these are a part: the bins are those of
                the whole, ``(..., Hq, R, C)``, and hold queries and keys at their positions; NaN
                where the part has none. The largest of the parts' bins, or the sum of their masses
                ``exp(bin)``, is the heatmap of the whole.

        Raises:
            ValueError: another ``how``, a size below 1, a negative step, or positions outside of
                the whole.
            MaterializeError: the heatmap is above the limit.
        """
        part = self._cut(rows, columns)
        planes = how if isinstance(how, tuple) else (how,)
        pools = {plane: Pool(part._call, size, plane, of) for plane in planes}
        pictures = dict(zip(pools, part._ask(*pools.values())))
        return tuple(pictures[plane] for plane in how) if isinstance(how, tuple) else pictures[how]

    @overload
    def summary(
        self: Reductions[NDArray[FloatingT]],
        *,
        topk: int = 8,
        strongest: int = 20,
        pool: tuple[int, int] = (512, 512),
        only: Collection[Reduced] = ...,
    ) -> WeightsSummary[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def summary(
        self,
        *,
        topk: int = 8,
        strongest: int = 20,
        pool: tuple[int, int] = (512, 512),
        only: Collection[Reduced] = ...,
    ) -> WeightsSummary[ArrayT, ArrayT]: ...
    @question
    def summary(
        self,
        *,
        topk: int = 8,
        strongest: int = 20,
        pool: tuple[int, int] = (512, 512),
        only: Collection[str] = WeightsSummary._fields,
    ) -> WeightsSummary[Any, Any]:
        """``lse``, entropy, received, distance, top keys, links and a heatmap, in one pass.

        Args:
            topk: how many keys of each query; no more than there are.
            strongest: how many links of each matrix.
            pool: the size of the heatmap, which shows the strongest link of each bin.
            only: names of the reductions to compute, by default all; the others are None, and so
                is ``lse`` where weights alone are known.

        Raises:
            ValueError: an unknown name in ``only``.
            TypeError: one name instead of a list.
            MaterializeError: as ``topk``, ``strongest`` and ``pool``.
        """
        call = self._call
        if isinstance(topk, (int, np.integer)):
            topk = min(topk, call.sizes[4])
        reductions: dict[str, Callable[[], Reduction]] = {
            "lse": lambda: PerQuery(call, "lse"),
            "entropy": lambda: PerQuery(call, "entropy"),
            "received": lambda: Received(call, "sum"),
            "distance": lambda: PerQuery(call, "distance"),
            "topk": lambda: TopK(call, topk),
            "strongest": lambda: Strongest(call, strongest),
            "pooled": lambda: Pool(call, pool, "max"),
        }
        only = names_of(only)
        if self._weights_only:
            del reductions["lse"]
        names = [name for name in reductions if name in only]
        whole = self._part(call, self._place)  # without a gradient: all of it is one pass
        answers = dict(zip(names, whole._ask(*(reductions[name]() for name in names))))
        every: list[Any] = [answers.get(name) for name in WeightsSummary._fields]
        return WeightsSummary(*every)


def names_of(only: Any) -> tuple[str, ...]:
    """The names of ``only``, checked; what gives them once would be read twice."""
    if isinstance(only, str):
        raise TypeError(f"summary: only is a str; a list of names is needed, as in [{only!r}].")
    if not isinstance(only, Iterable):
        raise TypeError(f"summary: only is {a_type(only)}; a list of names is needed.")
    names, known = tuple(only), WeightsSummary._fields
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"summary: there is no {unknown[0]!r}; there are {', '.join(known)}.")
    return names


def _copied(x: Any) -> Any:
    """What is kept, as the caller's own, who may write into it."""
    return x.clone() if is_tensor(x) else x.copy()
