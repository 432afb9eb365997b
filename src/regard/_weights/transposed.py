"""The transpose of weights, which is not stored either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from regard._base.arrays import is_tensor, read_array
from regard._base.errors import ShapeError
from regard._base.settings import counted
from regard._base.types import Array, ArrayT
from regard._weights.exchange import capsule
from regard._weights.operands import Unstored
from regard._weights.questions import at_once

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from regard._weights.linear import LinearForms

__all__ = ["TransposedWeights"]


class TransposedWeights(Unstored, Generic[ArrayT]):
    """``weights.T``, ``(..., Hq, Lk, Lq)``: what sums rows of queries into keys.

    Example:
        >>> import regard
        >>> weights = regard.AttentionWeights(np.eye(2), np.eye(2), scale=1.0, causal=True)
        >>> (weights.T @ np.ones(2)).round(4)  # weights.received()
        array([1.2689, 0.7311])
    """

    __array_priority__ = 100

    def __init__(self, weights: LinearForms[ArrayT]) -> None:
        self._weights = weights

    @property
    def T(self) -> LinearForms[ArrayT]:  # noqa: N802 - as arrays have it
        """The weights themselves."""
        return self._weights

    @property
    def mT(self) -> LinearForms[ArrayT]:  # noqa: N802
        """The same as ``T``."""
        return self._weights

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., Hq, Lk, Lq)``."""
        *leading, Lq, Lk = self._weights.shape
        return (*leading, Lk, Lq)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """As that of the weights."""
        return self._weights.dtype

    def __matmul__(self, y: ArrayLike | Array[ArrayT]) -> ArrayT:
        """``weights.T @ y``: into each key the sum of the rows of y, weighted.

        Args:
            y: ``(Lq,)``, ``(Lq, p)`` or ``(..., Lq, p)``, with the leading axes of the weights or
                1; as x of ``weights @ x``. A query's row counts for nothing where a key is masked
                to it, even where it is NaN.

        Returns:
            ``(..., Hq, Lk, p)``, of a vector without p.

        Raises:
            ShapeError, TypeError: y does not fit.
        """
        found: ArrayT = self._weights._multiply("y", y, "transposed")
        return found

    def __rmatmul__(self, x: ArrayLike | Array[ArrayT]) -> ArrayT:
        """``x @ weights.T``, of ``(Lk,)`` or ``(..., p, Lk)``: ``(..., Hq, p, Lq)``."""
        found: ArrayT = from_left(
            x, self.shape[-2], lambda y: self._weights._multiply("x", y, "product")
        )
        return found

    @at_once
    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.floating[Any]]:
        """The whole matrix; refused above the limit that ``regard.limits`` sets."""
        return self._weights.__array__(dtype, copy).swapaxes(-1, -2)

    @at_once
    def __dlpack__(self, *, copy: bool | None = None, **options: Any) -> Any:
        """The whole matrix, as ``torch.as_tensor`` asks for it; refused as ``np.asarray`` is."""
        whole: Any = self._weights
        return capsule(lambda: whole[...].swapaxes(-1, -2), "weights", copy, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        whole: Any = self._weights
        found: tuple[int, int] = whole.__dlpack_device__()
        return found

    def __repr__(self) -> str:
        return f"{self._weights._line}, transposed to {self.shape}"


def from_left(x: Any, length: int, multiply: Any) -> Any:
    """``x @ W`` of so many rows by a function that multiplies ``Wᵀ @ y``."""
    x = x if is_tensor(x) else read_array("weights: x", x)
    if x.ndim and x.shape[-1] != length:
        raise ShapeError(
            f"weights: x has {counted(x.shape[-1], 'column')}, in shape {tuple(x.shape)};"
            f" {length} are needed."
        )
    return multiply(x) if x.ndim < 2 else multiply(x.swapaxes(-1, -2)).swapaxes(-1, -2)
