"""What is passed to the linear forms of weights: vectors, ids, pairs, sets of keys, axes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard._base import loaded
from regard._base.arrays import (
    accumulating_name,
    arrays_of,
    dtype_name,
    is_tensor,
    read_array,
    to_numpy,
)
from regard._base.errors import ShapeError, a_type
from regard._base.settings import counted
from regard._call.call import Call
from regard._call.tensors import require_dense
from regard._weights.parts import is_of_ints


def read_operand(call: Call, name: str, x: Any, length: int) -> tuple[Any, bool]:
    """``(B or 1, Hq or 1, L, columns)`` in the dtype of sums, and whether x is a vector.

    Args:
        x: ``(L,)`` or ``(..., L, columns)``, whose leading axes are those of the weights or 1.
    """
    x = _numbers(call, name, x)
    if x.ndim == 0:
        raise ShapeError(f"weights: {name} is a number; a vector ({length},) is needed.")
    vector = x.ndim == 1
    if vector:
        x = x[:, None]
    if x.shape[-2] != length:
        raise ShapeError(
            f"weights: {name} has {counted(x.shape[-2], 'row')}, in shape {tuple(x.shape)};"
            f" {length} are needed."
        )
    Hq = call.sizes[1]
    own = (*call.leading, *((Hq,) if call.heads else ()))
    lead = (1,) * (len(own) - x.ndim + 2) + tuple(x.shape[:-2])
    if len(lead) > len(own) or any(n not in (1, full) for n, full in zip(lead, own)):
        raise ShapeError(
            f"weights: {name} has the leading axes {tuple(x.shape[:-2])}; those of the weights, "
            f"{own}, or 1 are needed."
        )
    batch, heads = (lead[:-1], lead[-1:]) if call.heads else (lead, (1,))
    if any(n != 1 for n in batch):
        batch = call.leading
    tail = (*heads, *x.shape[-2:])
    x = arrays_of(call.query).broadcast(x.reshape((*lead[: len(batch)], *tail)), (*batch, *tail))
    return contiguous(x.reshape((math.prod(batch), *tail))), vector


def _numbers(call: Call, name: str, x: Any) -> Any:
    """An array of the call's library, in the dtype of sums."""
    if is_tensor(x) != call.is_torch:
        if call.is_torch:
            need = "a tensor is needed, as the query is. Convert it with torch.as_tensor"
        else:
            need = "an array is needed, as the query is. Convert it with tensor.numpy()"
        raise TypeError(f"weights: {name} is {a_type(x)}; {need}.")
    if not call.is_torch:
        x = read_array(f"weights: {name}", x)
        if x.dtype.kind not in "biuf" and dtype_name(x) != "bfloat16":
            raise TypeError(f"weights: {name} is {dtype_name(x)}; real numbers are needed.")
        return x.astype(accumulating_name(call.query))
    require_dense(name, x, "weights")
    if x.is_complex():
        raise TypeError(f"weights: {name} is {dtype_name(x)}; real numbers are needed.")
    if x.device != call.query.device:
        raise TypeError(
            f"weights: {name} is on {x.device} and the query on {call.query.device}; move it with "
            f"{name}.to(weights.device)."
        )
    # Backends read memory, where the numbers of a conjugate's ``imag`` have the other sign.
    return x.to(getattr(loaded.torch, accumulating_name(call.query))).resolve_neg()


def contiguous(x: Any) -> Any:
    """x, or a copy with its numbers in order."""
    return x.contiguous() if is_tensor(x) else np.ascontiguousarray(x)


def _read(name: str, x: Any) -> np.ndarray:
    """An array of NumPy from whatever holds one."""
    if not is_tensor(x):
        return read_array(f"weights: {name}", x)
    require_dense(name, x, "weights")
    return to_numpy(x)


def read_integers(name: str, x: Any, error: type[Exception] = ValueError) -> np.ndarray:
    """An array of int64, of ints in any form; an error of that type says what is no int64."""
    found = _read(name, x)
    if not found.size:
        return np.zeros(found.shape, np.int64)
    if found.dtype.kind not in "iu":
        raise TypeError(f"weights: {name} are {dtype_name(found)}; ints are needed.")
    if found.dtype.kind == "u" and (most := int(found.max())) > np.iinfo(np.int64).max:
        raise error(f"weights: {name} has {most}; ints up to 2**63 - 1 are understood.")
    return found.astype(np.int64)


def read_ids(
    call: Call, name: str, x: Any, length: int, count: int | None = None
) -> tuple[np.ndarray, int]:
    """``(B, length)`` ids of blocks, and how many blocks there are.

    Of ``(length,)`` ids, or some for each batch element.

    Args:
        count: of the blocks; by default as many as the largest id and one.
    """
    found, shape = read_integers(name, x), (*call.leading, length)
    if found.ndim == 0 or found.shape[-1] != length:
        raise _misfit(name, found, shape)
    try:
        every = np.broadcast_to(found, shape)
    except ValueError:
        raise _misfit(name, found, shape) from None
    needed = int(found.max(initial=-1)) + 1
    if count is None:
        count = needed
    elif isinstance(count, bool) or not isinstance(count, (int, np.integer)):
        raise TypeError(f"blocks: counts has {a_type(count)}; two ints are needed.")
    elif needed > count:
        raise ValueError(
            f"blocks: {name} go up to {needed - 1}, and counts says that there are {count}; "
            f"at least {needed} are needed."
        )
    return np.ascontiguousarray(every.reshape(call.sizes[0], length)), count


def _misfit(name: str, x: np.ndarray, shape: tuple[int, ...]) -> ShapeError:
    per_batch = f", or {shape}," if len(shape) > 1 else ""
    return ShapeError(
        f"weights: {name} have the shape {x.shape}; {shape[-1:]}{per_batch} is needed."
    )


def read_indices(name: str, x: Any, n: int) -> np.ndarray:
    """Indices of n queries or keys, from 0; negative ones count from the last."""
    found = read_integers(name, x, IndexError)
    if (wrong := found[(found < -n) | (found >= n)]).size:
        there = f"there are {n}, 0 to {n - 1}" if n else "there are none"
        raise IndexError(f"weights: {name} has {wrong.flat[0]}; {there}.")
    return np.where(found < 0, found + n, found)


def read_set(x: Any, n: int) -> np.ndarray:
    """The rising positions of some of n keys, of a slice, a mask or indices."""
    if isinstance(x, slice):
        if not is_of_ints(x):
            raise TypeError(f"weights: keys is {x}; its ends must be ints, and its step not 0.")
        return np.sort(np.arange(n)[x])
    found = _read("keys", x)
    if found.dtype == bool:
        if found.shape != (n,):
            raise ShapeError(f"weights: keys is a mask of shape {found.shape}; ({n},) is needed.")
        return np.flatnonzero(found)
    return np.unique(read_indices("keys", found, n))


def read_edges(x: Any) -> np.ndarray | None:
    """``(n + 1,)`` rising ends of n ranges of distances, or None."""
    if x is None:
        return None
    found = read_integers("edges", x)
    if found.ndim != 1 or len(found) < 2 or (found[1:] <= found[:-1]).any():
        raise ValueError(
            f"diagonals: edges are {np.asarray(x)}; two or more rising ints are needed, as in"
            " [0, 1, 64, 512]."
        )
    return found


def read_axes(axis: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """The axes that an array's method reduces, rising, from 0; None for all."""
    if axis is None:
        return tuple(range(len(shape)))
    given = axis if isinstance(axis, tuple) else (axis,)
    for n in given:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"weights: axis is {a_type(n)}; an int or a tuple is needed.")
        if not -len(shape) <= n < len(shape):
            raise IndexError(
                f"weights: axis {n} is out of range for the {len(shape)} axes of {tuple(shape)}."
            )
    found = sorted(int(n) % len(shape) for n in given)
    if len(set(found)) < len(found):
        raise ValueError(f"weights: axis {axis} has one of them twice.")
    return tuple(found)


class Unstored:
    """A matrix that is not stored, and is compared with no numbers."""

    _name = "weights"  # in messages

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object; numbers are compared in the matrix.

        Raises:
            TypeError: they are an array, or a number: an answer of yes or no would be wrong.
        """
        if is_tensor(other) or isinstance(other, (np.ndarray, numbers.Number)):
            raise TypeError(
                f"{self._name}: == and != of numbers need the matrix, which is not stored. Compare"
                f" that of small {self._name}, {self._name}[...] == x, or a part of it."
            )
        return NotImplemented

    __hash__ = object.__hash__


def refuse(**given: object) -> None:
    """Raises a TypeError for what NumPy's methods take and those of weights do not."""
    for name, x in given.items():
        if x is not None:
            raise TypeError(
                f"weights: {name} is not taken, the result is a new array in the dtype of the"
                " weights. Convert it, or write weights[...] for the whole as an array."
            )
