"""Parts of weights: some queries and keys, a head, one matrix of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from regard._base.types import ArrayT
from regard._call.call import Call
from regard._weights.one_pass import Reductions
from regard._weights.origin import Origin
from regard._weights.parts import (
    basic_index,
    counts_from_0,
    element,
    part_of,
    picked,
    require_ints,
)
from regard._weights.questions import parting
from regard._weights.statistics_cache import Place


class Sections(Reductions[ArrayT]):
    """The parts of weights, which are weights too; ``AttentionWeights`` has them."""

    if TYPE_CHECKING:
        _numbers: tuple[int, ...] | None
        _origin: Origin | None

        @property
        def head_numbers(self) -> tuple[int, ...]: ...
        def _part(self, call: Call, place: Place, graph: Call | None = None) -> Self: ...

    @parting
    def part(self, rows: slice | None = None, columns: slice | None = None) -> Self:
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

    def _cut(self, rows: slice | None = None, columns: slice | None = None) -> Self:
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
    def head(self, h: int) -> Self:
        """The weights of one query head: ``(..., Lq, Lk)``, computed when asked.

        Args:
            h: which, of ``head_numbers``; negative counts from the last.

        Raises:
            IndexError: no such head, or no axis of heads.
        """
        Hq = self._call.sizes[1]
        if not self._call.heads:
            raise IndexError(f"weights: {self.shape} has no axis of heads before (Lq, Lk).")
        require_ints((h,), "weights")
        h = range(Hq)[basic_index(h, (Hq,), 0, self._numbers)[0]]
        place = self._place._replace(h=self._place.h[h : h + 1])
        graph = None if self._graph is None else self._graph.head(h)
        return self._of_head(h, self._part(self._call.head(h), place, graph))

    @parting
    def matrix(self, *index: int) -> Self:
        """One ``(Lq, Lk)`` of several: one int for each axis before, by default the first.

        A head is one of ``head_numbers``.

        Raises:
            IndexError: no such matrix.
        """
        axes = self.shape[:-2]
        if self._numbers is not None and len(index) == len(axes) > 0:
            require_ints(index, "weights")
            *before, h = index
            index = (*before, basic_index(h, axes[-1:], 0, self._numbers)[0])
        return self._head(*divmod(element(index, axes, "(Lq, Lk)"), self._call.sizes[1]))

    def _of_heads(self, b: range, h: range) -> Self:
        """Those of some batch elements and of heads that share keys, or share none."""
        place = self._place._replace(b=picked(self._place.b, b), h=picked(self._place.h, h))
        return self._part(self._call.of_heads(b, h), place)

    def _head(self, b: int, h: int) -> Self:
        """The matrix of query head h of batch element b."""
        place = self._place._replace(b=self._place.b[b : b + 1], h=self._place.h[h : h + 1])
        graph = None if self._graph is None else self._graph.matrix(b, h)
        return self._of_head(h, self._part(self._call.matrix(b, h), place, graph))

    def _of_head(self, h: int, part: Self) -> Self:
        """A part that is head h alone, with its number where they have any."""
        if self._numbers is not None or self._origin is not None:
            number = self.head_numbers[h : h + 1]
            part._numbers = None if counts_from_0(number) else number
        return part
