"""What a backend is asked of a matrix of token pairs that is a sum of weights or their effects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from regard._call.call import Call


@dataclass
class Rest:
    """What a pass over effects leaves for the next one, which then needs no whole rows.

    Attributes:
        numbers: contiguous. Of changes ``(Lq, Dv)``, in the accumulating dtype: the sums of weight
            times value over the weights up to 9/16. Of knockouts ``(Lq, 3)`` float64: the sums of
            ``w g·v`` over the weights up to 9/16, of the same over the one above, and of the
            weights up to 9/16 and the sink's; NaN where they are not known.
        is_known: whether those of changes are; a backend that fills them says so.
    """

    numbers: Any
    is_known: bool


@dataclass
class Matrices:
    """The weights of every head of a call, which terms of one question share.

    Attributes:
        call: of all of them.
        statistics: maximum and total ``(B, Hq, Lq)`` in NumPy, contiguous; known where a term is.
        read: what a backend makes of both when it reads the first term.
    """

    call: Call
    statistics: tuple[Any, Any]
    read: Any = None


# What terms of one question share, by what it is of.
ReadOnce = dict[Any, Matrices]


class PairTerm(NamedTuple):
    """A summand of one matrix ``(Lq, Lk)``: a factor, and the weights or effects of a head.

    Attributes:
        of: the matrices of which it is one.
        b, h: batch element and query head among them.
        coefficient: the factor.
        kind: ``"weight"``, or a kind of effect.
        value: ``(Lk, Dv)``, in the accumulating dtype; None for weights.
        gradient: ``(Lq, Dv)``, likewise.
        of_sink: ``(Lq,)`` float64: the weight of the sink; None where there is none.
        squares: ``(Lk,)``: of the sizes of the values, in their dtype; None but for changes.
        rest: of changes and knockouts; None where no later pass asks for it.
    """

    of: Matrices
    b: int
    h: int
    coefficient: float = 1.0
    kind: str = "weight"
    value: Any = None
    gradient: Any = None
    of_sink: Any = None
    squares: Any = None
    rest: Rest | None = None

    @property
    def total(self) -> Any:
        """``(Lq,)``: the row statistic."""
        return self.of.statistics[1][self.b, self.h]


Terms = Sequence[PairTerm]


class RowSlopes(NamedTuple):
    """What the gradient of a divergence has of every row, ``(Lq,)`` tensors.

    Attributes:
        factors: the gradient of the row's divergence, times the weights' coefficient.
        of_sink: the weight of the sink times its gradient; None where there is none.
        delta: the sum of such products over the keys and the sink; None where it is not known.
    """

    factors: Any
    of_sink: Any
    delta: Any


@runtime_checkable
class PairBackend(Protocol):
    """A backend that reads such matrices itself; for others they are computed in blocks."""

    pair_kinds: frozenset[str]

    def reduce_pairs(self, matrices: Sequence[tuple[Terms, dict[str, Any]]]) -> None:
        """Fills arrays with reductions of matrices, each in one pass.

        Args:
            matrices: for each its terms, of one size and dtype, of the kinds that it knows; and by
                name numbers, and result arrays: ``k``, ``top_values`` and ``top_keys`` ``(Lq, k)``;
                ``n``, ``pair_query``, ``pair_key`` and ``pair_value`` ``(n,)``; ``received`` or
                ``received_max`` ``(Lk,)`` float64, zeros; ``bins``, and of that shape
                ``pooled_max`` and ``pooled_mean``, with the ``extent`` that bins divide. What is
                largest is so in size, and has its sign.
        """

    def diverge(self, pairs: Sequence[tuple[Terms, Terms, dict[str, Any]]]) -> None:
        """Fills arrays with how far the rows of two sums of weights are apart, over their keys.

        Args:
            pairs: for each both sums, terms of one size and dtype, all weights; and by name float64
                ``(Lq,)``: ``kl``, ``Σ a ln(a/b) − a + b``, and ``reverse_kl``;
                ``jensen_shannon``, ``total_variation``, and with ``k`` the ``overlap``, as in
                ``regard.compare``.
        """

    def divergence_gradients(
        self, kind: str, sides: Sequence[Terms], side: int, own: PairTerm,
        rows: RowSlopes, needed: Collection[str],
    ) -> dict[str, Any]:  # fmt: skip
        """The gradient of a divergence by what one term's weights are made of, for finite tensors.

        Args:
            kind: as a field of ``diverge``.
            sides: a and b.
            side: 0 where it is a term of a, 1 of b.
            own: that term.
            needed: of ``"query"``, ``"key"``, ``"bias"`` and ``"sinks"``.

        Returns:
            Those needed, each of one head; others may be there too.
        """
