"""Arrays whose numbers are elsewhere, and are fetched when they are used."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

_empty = np.zeros(0, np.uint8)  # bytes that are NaN in every floating dtype; grows


class Source(Protocol):
    """Where the numbers of an array ``(H, L, ...)`` are."""

    def read(self, heads: range, rows: range) -> np.ndarray:
        """``(heads, rows, ...)``, read-only."""


class DeferredArray(np.ndarray):
    """Some heads and rows of an array ``(H, L, D)`` or ``(H, L)`` of a source.

    An array of NaN with the shape and dtype of the numbers, so that it is read, cut and given axes
    as any other. Its place in memory says which heads and rows it is of: ``fetched`` gives the
    numbers. Whatever forgets to ask for them computes NaN.
    """

    _source: Source | None
    _count: int  # of rows, in the whole
    _memory: Any  # that all are views of; a copy is not
    _width: int  # D; 0 of (H, L)

    @classmethod
    def of(cls, source: Source, shape: tuple[int, ...], dtype: Any) -> DeferredArray:
        """All of a source's array."""
        global _empty
        dtype, size = np.dtype(dtype), math.prod(shape[:2])
        if len(_empty) < size + dtype.itemsize:
            _empty = np.full(size + dtype.itemsize, 255, np.uint8)
        strides = (shape[1], 1, 0)[: len(shape)]
        found = np.ndarray.__new__(cls, shape, dtype, _empty, 0, strides)
        found._source, found._count, found._memory = source, shape[1], _empty
        found._width = shape[2] if len(shape) > 2 else 0
        found.flags.writeable = False
        return found

    def __array_finalize__(self, other: Any) -> None:
        self._source = getattr(other, "_source", None)
        for name in ("_count", "_memory", "_width"):
            setattr(self, name, getattr(other, name, 0))

    def __array_ufunc__(self, ufunc: Any, method: str, *values: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*map(fetched, values), **options)

    def __array_function__(self, function: Any, types: Any, values: Any, options: Any) -> Any:
        if function in (np.shape, np.ndim, np.size):
            return super().__array_function__(function, types, values, options)
        return function(*_each_fetched(values), **options)

    def __reduce__(self) -> Any:
        return np.array(fetched(self)).__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return np.array(fetched(self))

    def copy(self, order: Any = "C") -> Any:
        """The numbers."""
        return np.array(fetched(self), order=order)

    def astype(self, dtype: Any, *values: Any, **options: Any) -> Any:
        """The numbers in another dtype."""
        return fetched(self).astype(dtype, *values, **options)

    def swapaxes(self, *axes: Any) -> Any:
        """The numbers with other axes."""
        return fetched(self).swapaxes(*axes)

    def transpose(self, *axes: Any) -> Any:
        """The numbers with other axes."""
        return fetched(self).transpose(*axes)

    def _fetched(self) -> np.ndarray:
        assert self._source is not None
        if not self.size:
            return np.empty(self.shape, self.dtype)
        shape, strides = self.shape, self.strides
        whole = shape[-1] == self._width and (self._width == 1 or not strides[-1])
        if self._width:
            shape, strides = shape[:-1], strides[:-1]
        before, shape, strides = shape[:-2], (1, 1, *shape)[-2:], (0, 0, *strides)[-2:]
        steps = [
            1 if n == 1 else step for n, step in zip(shape, (strides[0] // self._count, strides[1]))
        ]
        if not (
            (whole or not self._width)
            and all(n == 1 for n in before)
            and _owner(self) is self._memory
            and min(steps) > 0
        ):
            raise RuntimeError("a deferred array was copied or reshaped before it was fetched.")
        begin = _address_of(self) - _address_of(self._memory)
        heads, rows = (
            range(first, first + n * step, step)
            for first, n, step in zip(divmod(begin, self._count), shape, steps)
        )
        return self._source.read(heads, rows).reshape(self.shape)


def fetched(x: Any) -> Any:
    """The numbers of an array, wherever they are; anything else as it is."""
    return x._fetched() if type(x) is DeferredArray and x._source is not None else x


def _each_fetched(values: Any) -> Any:
    if isinstance(values, (tuple, list)):
        return type(values)(map(_each_fetched, values))
    return fetched(values)


def _owner(x: Any) -> Any:
    """The array whose memory x is a view of."""
    while x.base is not None:
        x = x.base
    return x


def _address_of(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])
