"""The questions to a matrix with a number for every token pair."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, overload

import numpy as np

from regard._base.arrays import Arrays, dtype_name, is_tensor, read_array
from regard._base.errors import ShapeError
from regard._base.types import Array, ArrayT, FloatingT, PoolHow, ReceivedHow
from regard._call.checks import FLOATS
from regard._call.tensors import require_dense
from regard._weights.operands import Unstored
from regard._weights.pair_reductions import (
    Extent,
    PairReduction,
    Pool,
    Product,
    Received,
    Strongest,
    TopK,
    TopPairs,
    TransposedProduct,
)
from regard._weights.reductions import TopKeys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._weights.mix import Mix


class PairQuestions(Unstored, Generic[ArrayT]):
    """What is asked of numbers for token pairs; ``PairMatrix`` has it."""

    if TYPE_CHECKING:
        _like: Any
        _rows: range
        _columns: range

        @property
        def _xp(self) -> Arrays: ...
        @property
        def _axes(self) -> tuple[int, ...]: ...
        @property
        def _extent(self) -> Extent: ...
        @property
        def shape(self) -> tuple[int, ...]: ...
        def part(self, rows: slice | None = None, columns: slice | None = None) -> Self: ...
        def _ask(self, *reductions: PairReduction) -> list[Any]: ...
        def _ask_raw(self, *reductions: PairReduction) -> list[Any]: ...
        def _give(self, x: Any) -> Any: ...

    @overload
    def topk(
        self: PairQuestions[NDArray[FloatingT]], k: int
    ) -> TopKeys[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def topk(self, k: int) -> TopKeys[ArrayT, ArrayT]: ...
    def topk(self, k: int) -> TopKeys[Any, Any]:
        """The k keys of every query with the largest numbers: ``(values, indices)``.

        Each is ``(..., H, Lq, k)``, largest in size first, with the sign. Masked keys, of 0, come
        last.

        Raises:
            ShapeError: k is larger than Lk, or negative.
            MaterializeError: the result is above the limit.
        """
        (found,) = self._ask(TopK(self._extent, k))
        return found

    @overload
    def strongest(
        self: PairQuestions[NDArray[FloatingT]], n: int = 20
    ) -> TopPairs[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def strongest(self, n: int = 20) -> TopPairs[ArrayT, ArrayT]: ...
    def strongest(self, n: int = 20) -> TopPairs[Any, Any]:
        """The n pairs of each matrix with the largest numbers: ``(query, key, value)``.

        Each is ``(..., H, n)``, largest in size first, with the sign, at most ``Lq · Lk``;
        −1, −1, 0.0 where no pair other than 0 is left.

        Raises:
            ValueError: n is negative.
            MaterializeError: the pairs are above the limit.
        """
        (found,) = self._ask(Strongest(self._extent, n))
        return found

    def received(self, how: ReceivedHow = "sum") -> ArrayT:
        """``(..., H, Lk)``: the numbers of every key over all queries.

        Args:
            how: ``"sum"``, ``"mean"`` over the Lq queries, or ``"max"``, the one of largest size.

        Raises:
            ValueError: another ``how``.
        """
        (found,) = self._ask(Received(self._extent, how))
        return found

    @overload
    def pool(
        self,
        size: tuple[int, int] = (512, 512),
        how: PoolHow = "max",
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> ArrayT: ...
    @overload
    def pool(
        self,
        size: tuple[int, int] = (512, 512),
        *,
        how: tuple[PoolHow, ...],
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> tuple[ArrayT, ...]: ...
    def pool(
        self,
        size: tuple[int, int] = (512, 512),
        how: PoolHow | tuple[PoolHow, ...] = "max",
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> ArrayT | tuple[ArrayT, ...]:
        """A heatmap of the matrix, or a part of it: ``(..., H, R, C)``, the numbers themselves.

        Bin r holds the rows from ``r·n // R`` to ``(r + 1)·n // R`` of the n rows, and likewise for
        columns. NaN: all pairs of the bin are masked. (``AttentionWeights.pool`` gives logarithms,
        which these numbers have not.)

        Args:
            size: ``(R, C)``; a side that exceeds its part becomes one bin for each row or column.
            how: ``"max"``, the number of largest size in the bin, with its sign; or ``"mass"``, the
                mean over its unmasked pairs. A tuple of both gives a tuple of heatmaps, in one
                pass.
            rows, columns: the part's queries and keys, as in ``part``; by default all.

        Raises:
            ValueError: another ``how``, a size below 1, or a negative step.
            MaterializeError: the heatmap is above the limit.
        """
        part = self.part(rows, columns)
        planes = how if isinstance(how, tuple) else (how,)
        (found,) = part._ask_raw(Pool(part._extent, size, planes))
        pictures = {plane: part._give(x) for plane, x in found.items()}
        return tuple(pictures[plane] for plane in how) if isinstance(how, tuple) else pictures[how]

    def __matmul__(self, x: Array[Any]) -> ArrayT:
        """``matrix @ x``: for ``(Lk,)``, ``(Lk, p)`` or ``(..., Lk, p)``, without a stored matrix.

        Rows of x that a query does not see do not count, be they NaN.
        """
        factor = self._factor(x, -2, len(self._columns))
        if factor is None:
            return NotImplemented
        if is_vector := factor.ndim == 1:
            factor = factor[:, None]
        (found,) = self._ask(Product(self._extent, self._broadcast(factor), self._axes))
        return found[..., 0] if is_vector else found

    def __rmatmul__(self, x: Array[Any]) -> ArrayT:
        """``x @ matrix``: for ``(Lq,)``, ``(p, Lq)`` or ``(..., p, Lq)``."""
        factor = self._factor(x, -1, len(self._rows))
        if factor is None:
            return NotImplemented
        if is_vector := factor.ndim == 1:
            factor = factor[None]
        product = TransposedProduct(self._extent, self._broadcast(factor), self._axes)
        (found,) = self._ask(product)
        return found[..., 0, :] if is_vector else found

    def _factor(self, x: Any, axis: int, needed: int) -> Any:
        """x, checked; None for what is no array."""
        if not (is_tensor(x) or isinstance(x, np.ndarray)):
            return None
        x = x if is_tensor(x) else read_array(f"{self._name}: @", x)
        if is_tensor(x) != is_tensor(self._like) or (is_tensor(x) and x.device != self._xp_device):
            own = f"tensors on {self._xp_device}" if is_tensor(self._like) else "NumPy arrays"
            raise TypeError(f"{self._name}: @ of another library or device; it is of {own}.")
        if is_tensor(x):
            require_dense("x", x, self._name)
        if dtype_name(x) not in FLOATS:
            raise TypeError(f"{self._name}: @ of {dtype_name(x)}; floating numbers are needed.")
        found = x.shape[axis if x.ndim > 1 else 0] if x.ndim else 0
        axes = tuple(x.shape[:-2])
        fits = x.ndim and found == needed and len(axes) <= len(self._axes)
        if not fits or any(n not in (m, 1) for n, m in zip(axes[::-1], self._axes[::-1])):
            raise ShapeError(
                f"{self._name}: @ of {self.shape} and {tuple(x.shape)}; {needed} numbers along "
                "the inner axis are needed, and leading axes that are equal, or 1."
            )
        return x.detach() if is_tensor(x) else x

    @property
    def _xp_device(self) -> Any:
        return self._like.device if is_tensor(self._like) else None

    def _broadcast(self, x: Any) -> Any:
        return self._xp.broadcast(x, (*self._axes, *x.shape[-2:]))

    def mix(
        self,
        heads: Collection[int] | None = None,
        coefficients: Sequence[float] | Array[Any] | None = None,
    ) -> Mix[ArrayT]:
        """The weighted sum over heads, ``(..., Lq, Lk)``, computed when asked: by default the mean.

        Args:
            heads: which, of ``head_numbers``; by default all.
            coefficients: a number for each of these; by default 1/n.

        Raises:
            IndexError: no such head, or no axis of heads.
            ShapeError: the coefficients are not as many as the heads.
            ValueError: no head, or a coefficient that is not finite.
        """
        from regard._weights.mix import mixed_heads

        matrix: Any = self
        return mixed_heads(matrix, heads, coefficients)
