"""The keys and values of the tokens so far, so that generation projects every token once."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, Self

from regard._base import loaded
from regard._base.arrays import arrays_of, dtype_name, is_tensor
from regard._base.compiling import is_traced
from regard._base.errors import ShapeError, a_type
from regard._base.types import ArrayT

if TYPE_CHECKING:
    from regard._base.types import Array, Float


class KeyValueCache:
    """Keys and values of one layer's earlier tokens; ``layer.new_cache()`` makes one.

    Arrays of NumPy or tensors. Memory is taken at the first append and grows by doubling. What was
    given out is never written over, so weights of earlier steps stay true. There is no gradient.
    ``copy.copy(cache)`` is a branch, for another continuation of the same tokens.

    Args:
        keep: earlier tokens that a new one can still see, where a window limits them; older ones
            are dropped when memory runs out. None keeps all.
        capacity: tokens to take memory for at once, where their number is known.

    Raises:
        TypeError: ``keep`` or ``capacity`` is no int.
        ValueError: one of them is negative.

    Example:
        >>> import numpy as np
        >>> cache = KeyValueCache()
        >>> key, value = cache.append(np.ones((2, 3, 4)), np.ones((2, 3, 4)))
        >>> key, value = cache.append(np.ones((2, 1, 4)), np.ones((2, 1, 4)))
        >>> cache.length, key.shape
        (4, (2, 4, 4))
    """

    def __init__(self, keep: int | None = None, capacity: int = 0) -> None:
        for name, x in (("keep", 0 if keep is None else keep), ("capacity", capacity)):
            if isinstance(x, bool) or not isinstance(x, numbers.Integral):
                raise TypeError(f"cache: {name} is {x!r}, {a_type(x)}; an int is needed.")
        if capacity < 0 or (keep is not None and keep < 0):
            raise ValueError(
                f"cache: keep is {keep} and capacity {capacity}; neither may be negative."
            )
        self._keep, self._capacity = keep, capacity
        self._key: Any = None
        self._value: Any = None
        self._start, self._length = 0, 0
        self._layer: Any = None  # a weak reference to the layer whose tokens these are

    @property
    def length(self) -> int:
        """Tokens appended so far, dropped ones included: the position of the next token."""
        return self._length

    @property
    def start(self) -> int:
        """The position of the oldest token that is still held; above 0 only with ``keep``."""
        return self._start

    def __copy__(self) -> Self:
        """A branch: it goes on by itself, and shares what is held so far."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        if self._key is not None:  # no room for more: the next tokens get memory of their own
            held = self._length - self._start
            made._key, made._value = (x[..., :held, :] for x in (self._key, self._value))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_layer": None}  # weak references cannot be copied

    def append(
        self, key: Float[Array[ArrayT], "*B Hkv L D"], value: Float[Array[ArrayT], "*B Hkv L Dv"]
    ) -> tuple[Float[ArrayT, "*B Hkv Lk D"], Float[ArrayT, "*B Hkv Lk Dv"]]:
        """Adds the keys and values of L tokens.

        Args:
            key: ``(..., Hkv, L, D)``, already rotated where the layer has rotary positions.
            value: ``(..., Hkv, L, Dv)``.

        Returns:
            All that is held, oldest first: keys ``(..., Hkv, Lk, D)`` and values.

        Raises:
            ShapeError: the batch, the heads or their size are not those of the tokens before.
            TypeError: two libraries, or another dtype or device than the tokens before.
            RuntimeError: the keys or values need a gradient.
        """
        held = self._joined(key, value)
        self._count(key.shape[-2])
        return held

    def _joined(self, key: Any, value: Any) -> tuple[Any, Any]:
        """The result of ``append``; new tokens are only kept once they are counted."""
        if self._length == 0:
            self._key = self._value = None  # a first call that failed may have been another batch's
        self._check(key, value)
        new, old = key.shape[-2], self._length - self._start
        if self._key is None or old + new > self._key.shape[-2] or _is_read_only(self._key):
            self._move(key, value)
            old = self._length - self._start
        held = []
        for buffer, x in ((self._key, key), (self._value, value)):
            buffer[..., old : old + new, :] = x
            # With its own count of writes: later tokens write behind these.
            held.append((buffer.data if is_tensor(buffer) else buffer)[..., : old + new, :])
        return held[0], held[1]

    def _count(self, new: int) -> None:
        self._length += new

    def _move(self, key: Any, value: Any) -> None:
        """Moves into larger memory, without tokens that no later one can attend to."""
        old = self._length - self._start
        kept = old if self._keep is None else min(old, self._keep)
        needed = kept + key.shape[-2]
        size = self._capacity if self._key is None and self._capacity >= needed else 2 * needed
        moved = []
        for buffer, x in ((self._key, key), (self._value, value)):
            larger = arrays_of(x).empty((*x.shape[:-2], size, x.shape[-1]), dtype_name(x))
            if kept:
                larger[..., :kept, :] = buffer[..., old - kept : old, :]
            moved.append(larger)
        self._key, self._value = moved
        self._start = self._length - kept

    def _check(self, key: Any, value: Any) -> None:
        if _needs_gradient(key, value):
            raise RuntimeError(
                "cache: these keys or values need a gradient, and a cache keeps none. "
                "Generate under torch.inference_mode() or torch.no_grad()."
            )
        if is_tensor(key) != is_tensor(value):
            raise TypeError(
                f"cache: key is {_kind(key)} and value {_kind(value)}; both must be of one library."
            )
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                f"cache: key {tuple(key.shape)} and value {tuple(value.shape)} differ before the "
                "last axis; every key needs its own value."
            )
        if self._key is None:
            return
        for name, x, buffer in (("key", key, self._key), ("value", value, self._value)):
            found, needed = ((*t.shape[:-2], t.shape[-1]) for t in (x, buffer))
            if found != needed:
                raise ShapeError(
                    f"cache: {name} {tuple(x.shape)} does not continue what is held, "
                    f"{tuple(buffer.shape[:-2])} of vectors of {buffer.shape[-1]} numbers. "
                    "Each layer and each batch needs a cache of its own: layer.new_cache()."
                )
            if _kind(x) != _kind(buffer):
                raise TypeError(
                    f"cache: {name} is {_kind(x)}, what is held {_kind(buffer)}; "
                    "a new dtype or device needs a new cache."
                )

    def __repr__(self) -> str:
        if self._key is None:
            return "KeyValueCache(empty)"
        held = self._key[..., : self._length - self._start, :]
        return f"KeyValueCache(length={self._length}, key {tuple(held.shape)}, {held.dtype})"


def _needs_gradient(*arrays: Any) -> bool:
    tensors = [x for x in arrays if is_tensor(x)]
    return any(x.requires_grad for x in tensors) and loaded.torch.is_grad_enabled()


def _is_read_only(x: Any) -> bool:
    """Whether it was made in ``torch.inference_mode()``, outside of which nothing is written."""
    if not is_tensor(x) or is_traced():  # torch.compile cannot read it
        return False
    return x.is_inference() and not loaded.torch.is_inference_mode_enabled()


def _kind(x: Any) -> str:
    return f"{x.dtype} on {x.device}" if is_tensor(x) else f"{x.dtype} of NumPy"
