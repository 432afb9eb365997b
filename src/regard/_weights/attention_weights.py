"""AttentionWeights: the matrix that is never stored, and still gives back every weight."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from regard._backends import Backend, Statistics, choose
from regard._base.arrays import accumulating_name, arrays_of, is_tensor, to_numpy
from regard._base.settings import bytes_text, require_materializable
from regard._base.types import (
    AlignHow,
    Array,
    ArrayT,
    BackendName,
    Float,
    FloatingT,
    Integers,
    Intervals,
    NoOption,
    PoolHow,
    Segments,
    Window,
)
from regard._call.call import Call
from regard._call.checks import read_call
from regard._call.edits import Edit
from regard._call.hints import unknown_option
from regard._call.options import OPTIONS
from regard._weights.alignment import Alignment, aligned, chosen_heads
from regard._weights.differentiable import (
    block_of,
    differentiable,
    may_differentiate,
    require_whole_rows,
    rest_of,
)
from regard._weights.kept_statistics import KeptStatistics
from regard._weights.linear import described
from regard._weights.one_pass import Reductions
from regard._weights.origin import Origin
from regard._weights.parts import (
    basic_index,
    counts_from_0,
    element,
    part_of,
    picked,
    runs,
    sharing_runs,
    spaced,
    span,
    told_heads,
)
from regard._weights.questions import at_once, parting, question
from regard._weights.reductions import (
    Reduction,
)
from regard._weights.statistics import RowStatistics, of_backend
from regard._weights.statistics_cache import Place, StatisticsCache
from regard._weights.written import refuse_recorded, require_unwritten, versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import DTypeLike, NDArray

    from regard._weights.effects import EffectKind, Effects
    from regard._weights.mix import Mix
    from regard.recording import Layer

Pick: TypeAlias = int | np.integer[Any] | slice | EllipsisType


class AttentionWeights(Reductions[ArrayT]):
    """The weights ``(..., Hq, Lq, Lk)`` of an attention, computed on request.

    Rows, blocks, products, reductions and heatmaps are recomputed exactly from query and key, in
    memory linear in the lengths. Results have the array type and device of the query, and float32,
    or float64 for a float64 query. The weights are those before dropout.

    What is a sum of weights has a gradient where query, key, bias or sinks need one: rows and
    blocks, ``at``, ``@``, ``T @``, ``entropy``, ``lse``, ``max_score``, ``distance``, ``received``
    (but ``"max"``), ``mass``, ``blocks`` (but ``"max"``), ``diagonals``, ``sum`` and ``mean``. The
    others have none, nor has ``summary``.

    Query, key and the other arrays are held, not copied; ``copy`` makes weights with arrays of
    their own. Writes into tensors are detected, writes into NumPy arrays and tensors of
    ``torch.inference_mode`` are not: copy the weights before you write into these.

    Args:
        query: ``(..., Hq, Lq, D)`` or ``(Lq, D)``.
        key: ``(..., Hkv, Lk, D)``; ``Hkv`` divides ``Hq``.
        causal, window, mask, bias, key_lengths, segments, intervals, query_start: as in
            ``regard.attention``.
        query_step, key_start, key_step: as in ``regard.attention``: the queries and keys are some
            tokens of a whole.
        sinks, edits, scale, softcap: as in ``regard.attention``.
        statistics: of whole rows of which the keys are a part: ``regard.RowStatistics`` with
            ``(..., Hq, Lq)``, of ``regard.merge``. Weights are those of the whole, so they need not
            sum to 1 here, and the sums, entropies and distances of all parts add up to the whole's.
            They have no gradient.
        backend: that computes them: ``"auto"``, or the name of one.

    Raises:
        ShapeError, TypeError, ValueError, UnsupportedError: as ``regard.attention``.
        RuntimeError: by whatever computes weights, when a tensor was written to in the meantime.

    Example:
        >>> weights = AttentionWeights(np.eye(2), np.eye(2), scale=1.0, causal=True)
        >>> weights[1].round(4)
        array([0.2689, 0.7311])

    Source: Rabe & Staats 2021 for attention from its rows in linear memory.
    """

    __array_priority__ = 100
    _numbers: tuple[int, ...] | None = None  # of the query heads, where they are not 0, 1, 2, ...
    _weights_only = False  # True where query and key are not known, and scores stand for weights
    _origin: Origin | None = None  # where they are of a recording
    _of_part: Place | None = None  # where they are in the call of the statistics; None: all of it
    _graph: Call | None = None  # the call with the gradients of its inputs, where any is needed

    def __init__(
        self,
        query: Float[Array[ArrayT], "*_B_Hq Lq D"],
        key: Float[Array[ArrayT], "*_B_Hkv Lk D"],
        *,
        causal: bool = False,
        window: Window | None = None,
        mask: Array[object] | None = None,
        bias: Array[object] | None = None,
        key_lengths: Integers | None = None,
        segments: Segments | None = None,
        intervals: Intervals | None = None,
        query_start: Integers | None = None,
        query_step: int = 1,
        key_start: int | None = None,
        key_step: int = 1,
        sinks: Array[object] | None = None,
        edits: Sequence[Edit] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        statistics: RowStatistics[Any] | None = None,
        backend: BackendName = "auto",
        **unknown: NoOption,
    ) -> None:
        if unknown:
            names = (option.name for option in OPTIONS if option.of_weights)
            known = (*names, "statistics", "backend")
            raise unknown_option("AttentionWeights", unknown, known)
        call = read_call(
            query, key, None,
            causal=causal, window=window, mask=mask, bias=bias, key_lengths=key_lengths,
            segments=segments, intervals=intervals, query_start=query_start,
            query_step=query_step, key_start=key_start, key_step=key_step,
            sinks=sinks, edits=edits, scale=scale, softcap=softcap,
        )  # fmt: skip
        chosen = choose(call, backend)
        if statistics is None:
            self._start(call, chosen)
        else:
            self._start_part(call, chosen, statistics)

    @at_once
    def _start_part(self, call: Call, backend: Backend, statistics: RowStatistics[Any]) -> None:
        """The weights of some keys, from the statistics of whole rows."""
        known = of_backend(call, backend, statistics)
        self._start(replace(call, whole_rows=False), backend, known)

    @classmethod
    def _of(
        cls, call: Call, backend: Backend | None = None, statistics: Statistics | None = None
    ) -> AttentionWeights[Any]:
        """The weights of a call that was read already, by the backend of its output.

        ``statistics`` are that output's: maximum and total of each row, ``(B, Hq, Lq)``.
        """
        weights = cls.__new__(cls)
        weights._start(call.without_value(), backend, statistics)
        return weights

    def _start(
        self, call: Call, backend: Backend | None = None, statistics: Statistics | None = None
    ) -> None:
        self._call = detached_call(call)
        self._graph = call.without_value() if may_differentiate(call) else None
        backend = backend or choose(self._call, "auto")
        known = None if statistics is None else (detached(statistics[0]), detached(statistics[1]))
        self._statistics = StatisticsCache(self._call, backend, known)
        self._lse: Any = None
        self._max_score: Any = None
        self._versions = versions(self._call)

    @property
    def _place(self) -> Place:
        """Of which heads and queries they are, in the call of the statistics."""
        if self._of_part is None:  # not before it is asked: torch.compile has lengths as symbols
            self._of_part = Place.whole(self._call)
        return self._of_part

    def _part(
        self, call: Call, place: Place, graph: Call | None = None
    ) -> AttentionWeights[ArrayT]:
        """The weights of a part of the call, with the statistics of the whole."""
        part = AttentionWeights.__new__(AttentionWeights)
        part._call, part._of_part, part._lse, part._graph = call, place, None, graph
        part._max_score = None
        part._statistics, part._versions = self._statistics, self._versions
        part._numbers, part._weights_only = self._numbers, self._weights_only
        part._origin = self._origin
        return part

    def _recorded(
        self,
        numbers: tuple[int, ...],
        weights_only: bool,
        origin: Origin | None,
        statistics: RowStatistics[Any] | None,
    ) -> AttentionWeights[ArrayT]:
        """These weights, with what a recording knows of their layer."""
        if statistics is not None:
            of_batch = RowStatistics(*(detached(x)[None] for x in statistics))
            self._statistics.given = KeptStatistics(of_batch)
        self._numbers = None if counts_from_0(numbers) else numbers
        self._weights_only, self._origin = weights_only, origin
        return self

    @at_once
    def copy(self) -> AttentionWeights[ArrayT]:
        """The same weights with arrays of their own, which nobody else writes into.

        Raises:
            RuntimeError: a tensor of theirs was written to already.
        """
        require_unwritten(self._versions)
        if not self._call.whole_rows:  # a copy has no other keys to compute its rows from
            self._statistics.learn(self._place)
        call = self._call.copy()
        copy = self._part(call, Place.whole(call))
        copy._statistics = self._statistics.copy(call, self._place)
        copy._versions = versions(call)
        return copy

    def __deepcopy__(self, memo: Any) -> AttentionWeights[ArrayT]:
        return self.copy()

    @at_once
    def __getstate__(self) -> dict[str, Any]:
        require_unwritten(self._versions)
        left_out = ("_versions", "_graph")  # a graph of autograd can be neither copied nor stored
        return {name: x for name, x in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._versions = versions(self._statistics.call)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., Hq, Lq, Lk)``, with the leading axes of the query."""
        _, Hq, _, Lq, Lk = self._call.sizes
        return (*self._call.leading, *((Hq,) if self._call.heads else ()), Lq, Lk)

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """``Hq`` numbers by which heads are asked for; the order of the axis of heads.

        0, 1, 2, ... but for the weights of a recording of chosen heads. These are found under their
        numbers in the model: ``weights[7]`` and ``weights.head(7)`` are head 7.
        """
        return tuple(range(self._call.sizes[1])) if self._numbers is None else self._numbers

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype in which weights are given: float32, or float64 for a float64 query."""
        if self._call.is_torch:
            return getattr(sys.modules["torch"], self._dtype_name)
        return np.dtype(self._dtype_name)

    @property
    def nbytes(self) -> int:
        """The bytes that the whole matrix would take."""
        return self.size * np.dtype(self._dtype_name).itemsize

    @property
    def _dtype_name(self) -> str:
        return accumulating_name(self._call.query)

    def _ask(self, *reductions: Reduction) -> list[Any]:
        """The results of all of them, in one pass."""
        graph = differentiable(self._graph)
        self._require_now()
        asked: dict[str, Any] = {}
        for reduction in reductions:
            fields = reduction.fields()
            asked |= fields if graph is None else self._without_gradient(graph, fields)
        if asked:
            self._reduce(asked)
        return [self._give(reduction.result()) for reduction in reductions]

    def _without_gradient(self, graph: Call, fields: dict[str, Any]) -> dict[str, Any]:
        """Fills the fields that have a gradient, and gives the others."""
        backend, statistics = self._statistics.backend, None
        if backend.reads_statistics:
            statistics = self._statistics.of(self._place)
        return rest_of(fields, graph, backend.name, statistics)

    def _require_now(self) -> None:
        """Raises where weights cannot be computed here and now."""
        require_unwritten(self._versions)
        refuse_recorded(self._call, self._statistics.backend.past_torch)

    def _reduce(self, fields: dict[str, Any]) -> None:
        rows, place, call = self._statistics, self._place, self._call.in_memory()
        backend = rows.backend
        if call.whole_rows and backend.finds_statistics(call, fields) and not rows.known(place):
            if (found := backend.reduce(call, None, fields)) is not None:
                rows.keep(place, found)
            return
        needs_them = backend.reads_statistics or not call.whole_rows
        backend.reduce(call, rows.on_device(place) if needs_them else None, fields)

    def _give(self, x: Any) -> Any:
        """A result with the caller's axes, and floats in the dtype of the weights."""
        if isinstance(x, tuple):
            return type(x)(*(self._give(part) for part in x))
        if str(x.dtype).endswith("float64") and self._dtype_name != "float64":
            x = x.to(self.dtype) if is_tensor(x) else x.astype(self.dtype)
        return self._call.restore(x)

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
        found = self._lse
        return found

    @property
    def max_score(self) -> ArrayT:
        """``(..., Hq)``: the largest score of each head, over all unmasked pairs of its matrix.

        After scale, softcap and bias; the sinks are no pairs. It is what grows before a training
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
        found: ArrayT = self._max_score
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
        part = self if queries is None else self._cut(queries)
        (found,) = part._ask(Received(part._call, how))
        return found

    @overload
    def topk(
        self: AttentionWeights[NDArray[FloatingT]], k: int
    ) -> TopKeys[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def topk(self, k: int) -> TopKeys[ArrayT, ArrayT]: ...
    @question
    def topk(self, k: int) -> TopKeys[Any, Any]:
        """The k strongest keys of every query: ``(values, indices)``, each ``(..., Hq, Lq, k)``.

        Strongest first. Where fewer than k keys are visible, others follow with weight 0.

        Raises:
            ShapeError: k is larger than Lk, or negative.
        """
        (found,) = self._ask(TopK(self._call, k))
        return found

    @overload
    def strongest(
        self: AttentionWeights[NDArray[FloatingT]], n: int = 20
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
        """
        part = self._cut(rows, columns)
        planes = how if isinstance(how, tuple) else (how,)
        pools = {plane: Pool(part._call, size, plane, of) for plane in planes}
        pictures = dict(zip(pools, part._ask(*pools.values())))
        return tuple(pictures[plane] for plane in how) if isinstance(how, tuple) else pictures[how]

    @overload
    def align(
        self: AttentionWeights[NDArray[FloatingT]],
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def align(
        self,
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[ArrayT, ArrayT]: ...
    @at_once
    def align(
        self,
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[Any, Any]:
        """Aligns queries to keys, as the words of a transcript are to their times in the sound.

        The weights of each head are standardised, smoothed, and averaged over the heads; through
        that matrix goes the path with the largest sum, from the first pair to the last. Of equal
        paths it stays with its query. Time and memory are those of one matrix: ``Lq · Lk``.

        Args:
            heads: which, of ``head_numbers``; by default all. ``regard.align`` takes heads of
                several layers.
            how: ``"dtw"``, dynamic time warping: the path goes on by one query, one key or both.
            median_filter_width: in keys, odd; 1 leaves the weights as they are. Ends are
                reflected; fewer keys than half of it are not smoothed.
            normalise: whether weights count by their difference from the key's mean over the
                queries, in its standard deviations (z-score). A key of equal weights counts 0.

        Returns:
            ``(query, key, first, matrix)``: the path, ``first`` the key at which each query begins.

        Raises:
            IndexError: no such head, or heads of weights without that axis.
            TypeError: heads is an int, or the width is none.
            ValueError: another ``how``, an even width, no head, or weights of NaN.
            MaterializeError: a matrix is above the limit.

        Source: Radford et al. 2022, whose implementation is whisper/timing.py.
        """
        return aligned(list(chosen_heads(self, heads)), how, median_filter_width, normalise)

    @overload
    def summary(
        self: AttentionWeights[NDArray[FloatingT]],
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
        """Every reduction in one pass over the weights.

        Args:
            topk: how many keys of each query; no more than there are.
            strongest: how many links of each matrix.
            pool: the size of the heatmap, which shows the strongest link of each bin.
            only: names of the reductions to compute, by default all; the others are None, and so
                is ``lse`` where weights alone are known.

        Raises:
            ValueError: an unknown name in ``only``.
        """
        call = self._call
        reductions: dict[str, Callable[[], Reduction]] = {
            "lse": lambda: PerQuery(call, "lse"),
            "entropy": lambda: PerQuery(call, "entropy"),
            "received": lambda: Received(call, "sum"),
            "distance": lambda: PerQuery(call, "distance"),
            "topk": lambda: TopK(call, min(topk, call.sizes[4])),
            "strongest": lambda: Strongest(call, strongest),
            "pooled": lambda: Pool(call, pool, "max"),
        }
        if unknown := [name for name in only if name not in reductions]:
            raise ValueError(
                f"summary: there is no {unknown[0]!r}; there are {', '.join(reductions)}."
            )
        if self._weights_only:
            del reductions["lse"]
        names = [name for name in reductions if name in only]
        whole = self._part(call, self._place)  # without a gradient: all of it is one pass
        answers = dict(zip(names, whole._ask(*(reductions[name]() for name in names))))
        every: list[Any] = [answers.get(name) for name in WeightsSummary._fields]
        return WeightsSummary(*every)

    @question
    def __getitem__(self, index: Pick | tuple[Pick, ...]) -> ArrayT:
        """Any basic index: ints, slices and ``...``; a head by its number in ``head_numbers``.

        Raises:
            IndexError: out of range, or not a basic index; no head of that number, or a slice of
                heads that do not count from 0.
            MaterializeError: the part is above the limit.
        """
        self._require_now()
        xp, picks = arrays_of(self._call.query), self._picks(index)
        call, lead = self._call, len(self._call.leading)
        B, Hq, _, Lq, Lk = call.sizes
        batch = np.arange(B).reshape(call.leading)[tuple(picks[:lead])]
        heads = np.arange(Hq)[picks[lead]] if call.heads else np.asarray(0)
        rows, columns = np.arange(Lq)[picks[-2]], np.arange(Lk)[picks[-1]]
        shape = (*batch.shape, *heads.shape, *rows.shape, *columns.shape)
        require_materializable(
            "weights", shape, 8 * np.dtype(self._dtype_name).itemsize,
            "Ask for a part: weights[0, head, i], weights.pool(...)",
        )  # fmt: skip
        axes = [x.reshape(-1) for x in (batch, heads, rows, columns)]
        if (graph := differentiable(self._graph)) is not None and all(x.size for x in axes):
            return self._differentiable_block(graph, *axes).reshape(shape)
        out = xp.zeros(tuple(x.size for x in axes), self._dtype_name)
        if 0 not in out.shape:
            self._fill(out, *axes)
            if down := [axis for axis in (1, 2, 3) if axes[axis][0] > axes[axis][-1]]:
                out = xp.flip(out, down)
        found: ArrayT = out.reshape(shape) if shape or self._call.is_torch else out.reshape(())[()]
        return found

    def _differentiable_block(
        self, graph: Call, batch: np.ndarray, heads: np.ndarray, rows: np.ndarray,
        columns: np.ndarray,
    ) -> Any:  # fmt: skip
        """The weights of chosen rows and columns, with their gradient."""
        require_whole_rows(graph)
        _, Hq, Hkv, *_ = graph.sizes
        b = range(int(batch.min()), int(batch.max()) + 1)
        h = range(int(heads.min()), int(heads.max()) + 1)
        if len(h) > 1:  # all that share their keys
            group = Hq // Hkv
            h = range(h.start // group * group, -(-h.stop // group) * group)
        some, known = spaced(rows), None
        if self._statistics.backend.reads_statistics:
            own = self._place
            of = Place(own.b[b.start : b.stop], own.h[h.start : h.stop], own.rows[some])
            known = self._statistics.of(of)
        call = graph.of_heads(b, h).rows(some)
        found = block_of(call, self._statistics.backend.name, known)
        places = (batch - b.start, heads - h.start, np.argsort(np.argsort(rows)), columns)
        for axis, place in enumerate(places):
            if not np.array_equal(place, np.arange(found.shape[axis])):
                found = found.index_select(axis, found.new_tensor(place).long())
        return found

    def _picks(self, index: Any) -> list[Any]:
        """One int or slice for each axis; heads by place."""
        heads = len(self._call.leading) if self._call.heads else -1
        return basic_index(index, self.shape, heads, self._numbers)

    def _fill(
        self, out: Any, batch: np.ndarray, heads: np.ndarray, rows: np.ndarray, columns: np.ndarray
    ) -> None:
        """Writes chosen weights, with heads, rows and columns upwards: as many as can be at once.

        Heads, rows and columns are evenly spaced; elements of the batch need not be.
        """
        call, (h, i, j) = self._call, (spaced(x) for x in (heads, rows, columns))
        _, Hq, Hkv, *_ = call.sizes
        if self._statistics.backend.reads_statistics:  # of all heads together
            asked = zip(self._place, (span(batch), h, i))
            self._statistics.learn(Place(*(part[x] for part, x in asked)))
        sharing = list(sharing_runs(range(Hq)[h], Hq // Hkv))
        for at, b in runs(batch, 1 if len(sharing) > 1 else batch.size):
            done = 0
            for some in sharing:
                of = slice(done, done := done + len(some))
                self._of_heads(b, some)._cut(i)._write(out[at, of], j)

    def _write(self, out: Any, columns: slice) -> None:
        """Writes the weights of some keys into zeros ``(B, Hq, Lq, keys)``, contiguous."""
        *_, Lq, Lk = self._call.sizes
        every = len(range(*columns.indices(Lk))) == Lk
        if every or self._statistics.backend.reads_statistics:
            self._cut(None, columns)._reduce({"weights": out})
            return
        for b, h in np.ndindex(*out.shape[:2]):  # it would compute the rows for their statistics
            for low in range(0, Lq, height := max(64, 2**20 // Lk)):
                part = self._head(b, h)._cut(slice(low, low + height))
                block = arrays_of(out).zeros((1, 1, *part.shape), self._dtype_name)
                part._reduce({"weights": block})
                out[b, h, low : low + height] = block[0, 0, :, columns]

    @at_once
    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.floating[Any]]:
        """The whole matrix; refused above the limit that ``regard.limits`` sets."""
        if copy is False:
            raise ValueError("weights: they are computed when asked for, so an array is a copy.")
        whole = to_numpy(self[...])
        return whole if dtype is None else whole.astype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ArrayT]:
        is_by_head = self._call.heads and not self._call.leading
        return (self[i] for i in (self.head_numbers if is_by_head else range(len(self))))

    @property
    def _line(self) -> str:
        heads = "" if self._numbers is None else f" of {told_heads(self._numbers)}"
        return (
            f"AttentionWeights{self.shape} {self._dtype_name}{heads}, computed when asked for; "
            f"whole: {bytes_text(self.nbytes)}"
        )

    @at_once
    def __repr__(self) -> str:
        """One line, and below it the numbers of up to 1,000 weights."""
        return described(self, self._line)

    @at_once
    def _repr_html_(self) -> str:
        from regard._showing.picture import weights_html

        return weights_html(self)

    @at_once
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from regard.viewer._display import weights_bundle

        return weights_bundle(self)

    @overload
    def align(
        self: AttentionWeights[NDArray[FloatingT]],
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def align(
        self,
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[ArrayT, ArrayT]: ...
    @at_once
    def align(
        self,
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[Any, Any]:
        """Aligns queries to keys, as the words of a transcript are to their times in the sound.

        The weights of each head are standardised, smoothed, and averaged over the heads; through
        that matrix goes the path with the largest sum, from the first pair to the last. Of equal
        paths it stays with its query. Time and memory are those of one matrix: ``Lq · Lk``.

        Args:
            heads: which, of ``head_numbers``; by default all. ``regard.align`` takes heads of
                several layers.
            how: ``"dtw"``, dynamic time warping: the path goes on by one query, one key or both.
            median_filter_width: in keys, odd; 1 leaves the weights as they are. Ends are
                reflected; fewer keys than half of it are not smoothed.
            normalise: whether weights count by their difference from the key's mean over the
                queries, in its standard deviations (z-score). A key of equal weights counts 0.

        Returns:
            ``(query, key, first, matrix)``: the path, ``first`` the key at which each query begins.

        Raises:
            IndexError: no such head, or heads of weights without that axis.
            TypeError: heads is an int, or the width is none.
            ValueError: another ``how``, an even width, no head, or weights of NaN.
            MaterializeError: a matrix is above the limit.

        Source: Radford et al. 2022, whose implementation is whisper/timing.py.
        """
        return aligned(list(chosen_heads(self, heads)), how, median_filter_width, normalise)

    @at_once
    def plot(
        self,
        *index: int,
        how: PoolHow = "max",
        tokens: Sequence[str] | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Draws one matrix with matplotlib, pooled to at most 512 × 512 bins.

        Colours are linear below 100 keys and logarithmic from there on, in per cent; cells of up to
        12 × 12 show their numbers.

        Args:
            index: which matrix: one int for each axis before ``Lq``; by default the first.
            how: as in ``pool``.
            tokens: labels of the keys, and of the queries where they are as many; by default those
                of the recording that the weights are of. Positions where they have no room.
            ax: the matplotlib Axes to draw into; by default a new figure's.

        Returns:
            The Axes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            IndexError: no such matrix.
            ShapeError: the tokens are neither as many as the keys nor as the queries.
        """
        from regard._showing.figure import plot_weights

        return plot_weights(self, index, how, tokens, ax)

    @at_once
    def effects(
        self,
        value: Float[Array[ArrayT], "*_B_Hkv Lk Dv"],
        gradient: Float[Array[ArrayT], "*_B_Hq Lq Dv"] | None = None,
        kind: EffectKind = "knockout",
    ) -> Effects[ArrayT]:
        """What every token pair does to a loss, ``(..., Hq, Lq, Lk)``, computed when asked.

        Args:
            value: ``(..., Hkv, Lk, Dv)`` of this attention, of the query's array type.
            gradient: ``(..., Hq, Lq, Dv)``: ∂loss/∂output of this attention. ``"change"`` reads
                none.
            kind: ``"knockout"``, the rise of the loss when the pair is cut; ``"contribution"``,
                ``"relevance"``, ``"gradient"`` or ``"change"``; see ``regard.Effects``.

        Raises:
            ShapeError: value or gradient do not fit the weights.
            TypeError: no floating arrays of the query's library and device, or no gradient.
            UnsupportedError: these are weights of some keys, and no whole rows.
            ValueError: another ``kind``.

        Example:
            >>> q = k = v = np.eye(2)
            >>> weights = AttentionWeights(q, k, scale=1.0)
            >>> weights.effects(v, np.array([[1.0, 0.0], [0.0, 1.0]]))[0].round(4)
            array([-0.7311,  0.2689])
        """
        from regard._weights.effects import Effects

        return Effects(self, value, gradient, kind)

    @at_once
    def mix(
        self,
        heads: Collection[int] | None = None,
        coefficients: Sequence[float] | Array[Any] | None = None,
    ) -> Mix[ArrayT]:
        """The weighted sum over heads, ``(..., Lq, Lk)``, computed when asked: by default the mean.

        ``regard.mix([...])`` is that over layers.

        Args:
            heads: which, of ``head_numbers``; by default all.
            coefficients: a number for each of these; by default 1/n.

        Raises:
            IndexError: no such head, or no axis of heads.
            ShapeError: the coefficients are not as many as the heads.
            ValueError: no head, or a coefficient that is not finite.
        """
        from regard._weights.mix import mixed_heads

        return mixed_heads(self, heads, coefficients)

    @parting
    def part(
        self, rows: slice | None = None, columns: slice | None = None
    ) -> AttentionWeights[ArrayT]:
        """The weights of some queries and keys: ``(..., Hq, rows, columns)``, computed when asked.

        They are those of the whole rows, so rows of a part need not sum to 1; reductions are over
        the pairs in it, but ``lse`` stays that of the whole rows. A part and the whole share the
        row statistics that they compute.

        Args:
            rows: which queries, with any positive step; by default all.
            columns: which keys, likewise.

        Raises:
            TypeError: no slices.
            ValueError: a negative step.
        """
        return self._cut(rows, columns)

    def _cut(
        self, rows: slice | None = None, columns: slice | None = None
    ) -> AttentionWeights[ArrayT]:
        """``part``, where torch compiles nothing."""
        *_, Lq, Lk = self._call.sizes
        rows = part_of("rows", rows, Lq)
        columns = part_of("columns", columns, Lk)
        call, place = self._call, self._place
        graph = self._graph
        if rows != slice(0, Lq, 1):
            call, place = call.rows(rows), place._replace(rows=place.rows[rows])
            graph = None if graph is None else graph.rows(rows)
        graph = None if graph is None else graph.columns(columns)
        part = self._part(call.columns(columns), place, graph)
        if self._origin is not None:
            part._origin = self._origin.part(rows, columns)
        return part

    @parting
    def head(self, h: int) -> AttentionWeights[ArrayT]:
        """The weights of one query head: ``(..., Lq, Lk)``, computed when asked.

        Args:
            h: which, of ``head_numbers``; negative counts from the last.

        Raises:
            IndexError: no such head, or no axis of heads.
        """
        Hq = self._call.sizes[1]
        if not self._call.heads:
            raise IndexError(f"weights: {self.shape} has no axis of heads before (Lq, Lk).")
        h = range(Hq)[basic_index(h, (Hq,), 0, self._numbers)[0]]
        place = self._place._replace(h=self._place.h[h : h + 1])
        graph = None if self._graph is None else self._graph.head(h)
        return self._of_head(h, self._part(self._call.head(h), place, graph))

    @parting
    def matrix(self, *index: int) -> AttentionWeights[ArrayT]:
        """One ``(Lq, Lk)`` of several: one int for each axis before, by default the first.

        A head is one of ``head_numbers``.

        Raises:
            IndexError: no such matrix.
        """
        axes = self.shape[:-2]
        if self._numbers is not None and len(index) == len(axes) > 0:
            *before, h = index
            index = (*before, basic_index(h, axes[-1:], 0, self._numbers)[0])
        return self._head(*divmod(element(index, axes, "(Lq, Lk)"), self._call.sizes[1]))

    @at_once
    def layer(self, *index: int) -> Layer[ArrayT]:
        """What these weights are computed from, copied: a layer for ``regard.Recording``.

        Args:
            index: which element of the batch: one int for each axis before the heads; by default
                the first.

        Raises:
            IndexError: no such element.
            ValueError: a part with a step, or of some keys only; no layer has such weights.
        """
        from regard.recording import Layer

        call, axes = self._call, self._call.leading
        if (call.query_step, call.key_step) != (1, 1) or not call.whole_rows:
            raise ValueError(
                f"weights: {self.shape} are a part with a step, or of some keys; a layer has whole "
                "rows and neighbouring queries. Take the layer of the whole."
            )
        b = element(index, axes, "the heads")
        place = self._place._replace(b=self._place.b[b : b + 1])
        one = call.of_heads(range(b, b + 1), range(call.sizes[1]))
        one = self._part(one, place).copy()._call
        found = one.query[0], one.key[0], None
        options = one.options_of(0)
        return Layer(*found, head_numbers=self._numbers, weights_only=self._weights_only, **options)

    def _of_heads(self, b: range, h: range) -> AttentionWeights[ArrayT]:
        """Those of some batch elements and of heads that share keys, or share none."""
        place = self._place._replace(b=picked(self._place.b, b), h=picked(self._place.h, h))
        return self._part(self._call.of_heads(b, h), place)

    def _head(self, b: int, h: int) -> AttentionWeights[ArrayT]:
        """The matrix of query head h of batch element b."""
        place = self._place._replace(b=self._place.b[b : b + 1], h=self._place.h[h : h + 1])
        graph = None if self._graph is None else self._graph.matrix(b, h)
        return self._of_head(h, self._part(self._call.matrix(b, h), place, graph))

    def _of_head(self, h: int, part: AttentionWeights[ArrayT]) -> AttentionWeights[ArrayT]:
        """A part that is head h alone, with its number where they have any."""
        if self._numbers is not None or self._origin is not None:
            number = self.head_numbers[h : h + 1]
            part._numbers = None if counts_from_0(number) else number
        return part


def detached_call(call: Call) -> Call:
    if not call.is_torch:
        return call
    return Call(**{name: detached(x) for name, x in vars(call).items()})


def detached(x: Any) -> Any:
    return x.detach() if is_tensor(x) else x
