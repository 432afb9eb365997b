"""NumPy and torch under one set of names, for the formula and the reductions of weights."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from regard._base import loaded
from regard._base.deferred import fetched
from regard._base.errors import UnsupportedError

# NumPy takes a few microseconds to build a name.
_NUMPY_NAMES = {np.dtype(name): name for name in ("float16", "float32", "float64", "bool")}


def to_numpy(x: Any) -> np.ndarray:
    """x on the CPU, without its gradient; numbers that NumPy lacks become float32.

    Raises:
        UnsupportedError: x is on meta.
    """
    if not is_tensor(x):
        return np.asarray(fetched(x))
    require_numbers(x)
    x = x.detach().cpu().resolve_neg()
    return np.asarray((x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy())


def arrays_of(x: Any) -> Arrays:
    """The names for the library and device of x, with the dtype of sums over it."""
    if is_tensor(x):
        from regard._base.torch_arrays import TorchArrays

        return TorchArrays(x.device, accumulating_name(x))
    return NumpyArrays(accumulating_name(x))


class Arrays(Protocol):
    """The interface of ``NumpyArrays`` and ``TorchArrays``.

    Attributes:
        dtype: that sums are held in, by name.
        block_elements: pairs of a query and a key that are computed together.
        tallest_block: rows that are.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def block_elements(self) -> int: ...
    @property
    def tallest_block(self) -> int: ...

    # As NumPy has them.
    def exp(self, x: Any, /) -> Any: ...
    def log(self, x: Any, /) -> Any: ...
    def tanh(self, x: Any, /) -> Any: ...
    def cos(self, x: Any, /) -> Any: ...
    def sin(self, x: Any, /) -> Any: ...
    def isfinite(self, x: Any, /) -> Any: ...
    def isnan(self, x: Any, /) -> Any: ...
    def isinf(self, x: Any, /) -> Any: ...
    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...
    def maximum(self, x: Any, y: Any, /) -> Any: ...
    def stack(self, arrays: list[Any], axis: int, /) -> Any: ...

    def arange(self, start: int, stop: int) -> Any:
        """int64 ``(stop − start,)``."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array that something else fills."""

    def full(self, shape: tuple[int, ...], fill: float, dtype: str) -> Any:
        """A new array that holds one number."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array of zeros, whose memory is touched when it is written to if the system can."""

    def cast(self, x: Any, dtype: str) -> Any:
        """x in a dtype; float32 for float64 on a device that has none."""

    def wide(self, x: Any) -> Any:
        """x in the accumulating dtype."""

    def array(self, like: Any, x: Any) -> Any:
        """An array of NumPy or the library, in the dtype of ``like``."""

    def hide(self, x: Any, visible: Any, fill: float) -> Any:
        """x, and ``fill`` where masked."""

    def matmul(self, x: Any, y: Any) -> Any:
        """``x @ y`` for ``(b, h, m, n)`` and ``(b or 1, kv, n, o)``: neighbouring heads share y."""

    def any_product(self, x: Any, y: Any) -> Any:
        """``x @ y`` of bools, as ``matmul`` has it: whether any n is True in both."""

    def row_sum(self, x: Any) -> Any:
        """``(..., 1)``: the sum of each row."""

    def largest(self, x: Any, axis: int, *, keep: bool = False) -> Any:
        """The maximum along an axis; −∞ of none."""

    def top(self, x: Any, k: int) -> tuple[Any, Any]:
        """The k largest along the last axis, largest first, with their indices.

        Any of equals; the first of them where k is 1.
        """

    def first_top(self, x: Any, k: int) -> tuple[Any, Any]:
        """``top``, but of equals the first; of those that are 0, any. No NaN, k at least 1."""

    def take(self, x: Any, indices: Any) -> Any:
        """``x[..., indices]`` for indices of NumPy or the library."""

    def flip(self, x: Any, axes: list[int]) -> Any:
        """A copy, backwards along some axes."""

    def gather(self, x: Any, indices: Any) -> Any:
        """An entry of x for each index, along the last axis."""

    def gather_rows(self, x: Any, indices: Any) -> Any:
        """``(..., n, m)`` of ``(..., L, m)``: the row of each index ``(..., n)``."""

    def sort(self, x: Any) -> Any:
        """x, rising along its last axis."""

    def fold_groups(self, x: Any, ids: np.ndarray, count: int, *, largest: bool = False) -> Any:
        """``(..., count)``: the sum, or the largest and 0, of the entries of each id.

        Along the last axis; NaN where one is NaN. Entries of negative ids are left out.
        """

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        """x in that shape, without a copy."""

    def concatenate(self, arrays: list[Any]) -> Any:
        """One behind the other along the last axis."""


class NumpyArrays:
    """Arrays of NumPy.

    Args:
        dtype: that sums are held in, by name.
    """

    block_elements = 2**16  # 512 KB of float64: a block and its temporaries stay in the cache
    tallest_block = 128  # rows

    exp, log, tanh = staticmethod(np.exp), staticmethod(np.log), staticmethod(np.tanh)
    cos, sin = staticmethod(np.cos), staticmethod(np.sin)
    isfinite, isnan, isinf = (
        staticmethod(np.isfinite), staticmethod(np.isnan), staticmethod(np.isinf),
    )  # fmt: skip
    where: Any = staticmethod(np.where)
    maximum: Any = staticmethod(np.maximum)
    stack: Any = staticmethod(np.stack)

    def __init__(self, dtype: str = "float64") -> None:
        self.dtype = dtype

    def arange(self, start: int, stop: int) -> Any:
        return np.arange(start, stop, dtype=np.int64)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.empty(shape, dtype)

    def full(self, shape: tuple[int, ...], fill: float, dtype: str) -> Any:
        return np.full(shape, fill, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype, copy=False)

    def wide(self, x: Any) -> Any:
        return self.cast(x, self.dtype)

    def array(self, like: Any, x: Any) -> Any:
        return np.asarray(x).astype(like.dtype, copy=False)

    def hide(self, x: Any, visible: Any, fill: float) -> Any:
        return np.where(visible, x, fill)

    def matmul(self, x: Any, y: Any) -> Any:
        """In panels of at most 2**17 products, which a BLAS computes in one thread: larger ones are
        cut by the number of threads, and the last bits would follow it (15 % slower than one
        product).
        """
        b, h, m, n = x.shape
        kv, o = y.shape[1], y.shape[-1]
        x = x.reshape(b, kv, h // max(1, kv) * m, n)
        width = max(8, 2**17 // max(1, x.shape[2] * min(n, o)))
        if x.dtype == bool:
            out = x @ y
        elif n > o:  # panels of the sum
            cut = n // width * width
            out = x[..., cut:] @ y[:, :, cut:]
            if cut:
                panels = x[..., :cut].reshape(*x.shape[:3], -1, width).swapaxes(2, 3)
                out = out + (panels @ y[:, :, :cut].reshape(*y.shape[:2], -1, width, o)).sum(2)
        else:  # panels of the columns
            cut = o // width * width
            out = np.empty((*x.shape[:3], o), np.result_type(x, y))
            if cut:
                panels = y[..., :cut].reshape(*y.shape[:3], -1, width).swapaxes(2, 3)
                into = out[..., :cut].reshape(*x.shape[:3], -1, width).swapaxes(2, 3)
                np.matmul(x[:, :, None], panels, out=into)
            out[..., cut:] = x @ y[..., cut:]
        return out.reshape(b, h, m, o)

    def any_product(self, x: Any, y: Any) -> Any:
        return self.matmul(x, y)

    def row_sum(self, x: Any) -> Any:
        return x.sum(-1, keepdims=True)

    def largest(self, x: Any, axis: int, *, keep: bool = False) -> Any:
        return x.max(axis, keepdims=keep, initial=-np.inf)

    def top(self, x: Any, k: int) -> tuple[Any, Any]:
        if k == 1:
            indices = x.argmax(-1, keepdims=True)
            return np.take_along_axis(x, indices, -1), indices
        falling = np.where(np.isnan(x), -np.inf, -x)  # NaN first, as torch has it
        indices = np.argpartition(falling, k - 1, axis=-1)[..., :k] if k else x[..., :0]
        indices = np.sort(indices, axis=-1).astype(np.int64)
        values = np.take_along_axis(x, indices, -1)
        order = np.argsort(np.take_along_axis(falling, indices, -1), axis=-1, kind="stable")
        return np.take_along_axis(values, order, -1), np.take_along_axis(indices, order, -1)

    def first_top(self, x: Any, k: int) -> tuple[Any, Any]:
        values, indices = self.top(x, k)
        least = values[..., -1:]
        if (((x >= least).sum(-1, keepdims=True) > k) & (least > 0)).any():
            above, equal = x > least, x == least
            room = k - above.sum(-1, keepdims=True)
            chosen = above | (equal & (equal.cumsum(-1) <= room))
            indices = np.nonzero(chosen)[-1].reshape(values.shape)
            values = np.take_along_axis(x, indices, -1)
            order = np.argsort(-values, axis=-1, kind="stable")
            values, indices = (np.take_along_axis(y, order, -1) for y in (values, indices))
        return values, indices

    def take(self, x: Any, indices: Any) -> Any:
        return x[..., indices]

    def flip(self, x: Any, axes: list[int]) -> Any:
        return np.flip(x, tuple(axes)).copy()

    def gather(self, x: Any, indices: Any) -> Any:
        return np.take_along_axis(x, indices, -1)

    def gather_rows(self, x: Any, indices: Any) -> Any:
        return np.take_along_axis(x, indices[..., None], -2)

    def sort(self, x: Any) -> Any:
        return np.sort(x, -1)

    def fold_groups(self, x: Any, ids: np.ndarray, count: int, *, largest: bool = False) -> Any:
        return fold_groups(x, ids, count, np.maximum if largest else np.add)

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        return np.broadcast_to(x, shape)

    def concatenate(self, arrays: list[Any]) -> Any:
        return np.concatenate(arrays, axis=-1)


def fold_groups(x: np.ndarray, ids: np.ndarray, count: int, fold: np.ufunc = np.add) -> np.ndarray:
    """``(..., count)``: the entries of each id along the last axis, folded; 0 of none.

    Entries of negative ids are left out.
    """
    out = np.zeros((*x.shape[:-1], count), x.dtype)
    order = np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]
    found, starts = np.unique(ids[order], return_index=True)
    if len(found):
        out[..., found] = fold.reduceat(x[..., order], starts, -1)
    return out


def is_array(x: object) -> bool:
    """Whether x is an array of NumPy with any axes, all of whose numbers count."""
    if type(x) is np.ndarray:  # first: np.ma takes 70 ms to load
        return True
    return isinstance(x, np.ndarray) and not isinstance(x, (np.ma.MaskedArray, np.matrix))


def read_array(what: str, x: Any) -> np.ndarray:
    """What a caller gives as an array of NumPy, a list or a number; its dtype is not checked.

    Raises:
        TypeError: a masked array, or lists of several lengths.
    """
    if isinstance(x, np.ndarray) and type(x) is not np.ndarray and np.ma.isMaskedArray(x):
        raise TypeError(
            f"{what}: a masked array is given, whose mask would not count. Pass an array without"
            " a mask."
        )
    try:
        return np.asarray(x)
    except ValueError:
        raise TypeError(
            f"{what}: lists of several lengths are given; an array is needed."
        ) from None


def require_numbers(x: Any) -> None:
    """Refuses a tensor on meta, where its numbers are to be read.

    Raises:
        UnsupportedError: with the way out.
    """
    if x.is_meta:
        raise UnsupportedError(
            f"regard: the numbers of a tensor {tuple(x.shape)} are read here, and it is on meta, "
            "where tensors have shapes and dtypes alone. Pass tensors on a device that holds their "
            "numbers."
        )


def dtype_name(x: Any) -> str:
    """``float32`` for NumPy's and torch's alike."""
    if isinstance(x, np.ndarray) and (name := _NUMPY_NAMES.get(x.dtype)):
        return name
    return str(x.dtype).removeprefix("torch.")


def accumulating_name(x: Any) -> str:
    """The dtype of sums over x: float64 for float64, else float32."""
    return "float64" if dtype_name(x) == "float64" else "float32"


def is_tensor(x: object) -> bool:
    """Whether x is a torch tensor; torch is not loaded to find out."""
    torch = loaded.torch
    return torch is not None and isinstance(x, torch.Tensor)
