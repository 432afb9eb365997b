"""AttentionWeights: the matrix that is never stored, and still gives back every weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._backends import Backend, Statistics, choose
from regard._base import loaded
from regard._base.arrays import accumulating_name, is_tensor
from regard._base.settings import bytes_text
from regard._base.types import (
    Array,
    ArrayT,
    BackendName,
    Float,
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
from regard._weights.derived import Derived
from regard._weights.differentiable import differentiable, may_differentiate, rest_of
from regard._weights.kept_statistics import KeptStatistics
from regard._weights.linear import described
from regard._weights.origin import Origin
from regard._weights.parts import counts_from_0, element, told_heads
from regard._weights.questions import at_once
from regard._weights.reductions import Reduction
from regard._weights.statistics import RowStatistics, of_backend
from regard._weights.statistics_cache import Place, StatisticsCache
from regard._weights.written import refuse_recorded, require_unwritten, versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regard.recording import Layer


class AttentionWeights(Derived[ArrayT]):
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
        self._start(call.changed(whole_rows=False), backend, known)

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

    def _of_call(self, call: Call) -> AttentionWeights[ArrayT]:
        """The weights of another call, by the same backend, with statistics of its own."""
        return AttentionWeights._of(call, self._statistics.backend)

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
            return getattr(loaded.torch, self._dtype_name)
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
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from regard.viewer._display import weights_bundle

        return weights_bundle(self)

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


def detached_call(call: Call) -> Call:
    if not call.is_torch:
        return call
    return call.changed(**{name: x.detach() for name, x in vars(call).items() if is_tensor(x)})


def detached(x: Any) -> Any:
    return x.detach() if is_tensor(x) else x
