"""One layer of a recording: query, key, value and the options of its attention, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from regard._errors import ShapeError

FLOATS = ("float16", "bfloat16", "float32", "float64")
# Positions stay exact in float64 and JSON, and position + window never leaves int64.
LARGEST_INT = 2**53


class Layer:
    """Query, key and value of one attention layer, and the options it was called with.

    Arrays (NumPy or torch) are kept as they are, not copied.

    Args:
        query: ``(Hq, Lq, D)``, float, as it enters the scores: after rotation or normalisation.
        key: ``(Hkv, Lk, D)``, same dtype; ``Hkv`` divides ``Hq``.
        value: ``(Hkv, Lk, Dv)`` or None where only the weights matter.
        **options: of :func:`regard.attention`, without a batch: ``causal``, ``window``, ``scale``,
            ``softcap``, ``query_start`` (int), ``key_lengths`` (one int), ``segments`` (``(L,)``
            ids, or a pair for queries and keys), ``sinks`` (``(Hq,)``), and ``bias`` and
            ``mask``, broadcastable to ``(Hq, Lq, Lk)``.

    Raises:
        ShapeError: axes, heads, head sizes or lengths disagree.
        TypeError: not a float array, or an unknown option or one of a wrong type.
        ValueError: an option out of its range.
    """

    __slots__ = ("key", "options", "query", "value")

    def __init__(self, query: Any, key: Any, value: Any = None, **options: Any) -> None:
        self.query, self.key, self.value = query, key, value
        _check_arrays(query, key, value)
        self.options = _checked_options(self, options)

    @property
    def heads(self) -> int:
        """Number of query heads, ``Hq``."""
        return int(self.query.shape[0])

    @property
    def key_heads(self) -> int:
        """Number of key heads, ``Hkv``; query head h uses key head ``h // (Hq // Hkv)``."""
        return int(self.key.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of query, key and value."""
        held = (self.query, self.key, self.value)
        return sum(int(array.nbytes) for array in held if array is not None)

    def options_of(self, head: int) -> dict[str, Any]:
        """The options for one query head alone: arrays lose their head axis."""
        options = dict(self.options)
        for name in ("bias", "mask"):
            if name in options and len(shape(options[name])) == 3:
                array = options[name]
                options[name] = array[head if shape(array)[0] > 1 else 0]
        if "sinks" in options:
            options["sinks"] = options["sinks"][head : head + 1]
        return options

    def __repr__(self) -> str:
        shapes = [f"query {shape(self.query)}", f"key {shape(self.key)}"]
        if self.value is not None:
            shapes.append(f"value {shape(self.value)}")
        shapes += [f"{name}={brief(value)}" for name, value in self.options.items()]
        return f"Layer({', '.join(shapes)})"


def shape(array: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in array.shape)


def dtype_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_tensor(value: Any) -> bool:
    # By name, so that a recording never loads torch by itself.
    return any(
        base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__
    )


def _check_arrays(query: Any, key: Any, value: Any) -> None:
    held = {"query": query, "key": key, "value": value}
    given = {name: array for name, array in held.items() if array is not None or name != "value"}
    for name, array in given.items():
        if not is_array(array):
            raise TypeError(
                f"layer: {name} is {type(array).__name__}; a NumPy array or torch tensor is needed."
            )
        if dtype_name(array) not in FLOATS:
            raise TypeError(
                f"layer: {name} is {dtype_name(array)}; {', '.join(FLOATS)} are possible."
                f" Convert it, for example with astype(np.float32)."
            )
    kinds = {(is_tensor(array), dtype_name(array)) for array in given.values()}
    if len(kinds) > 1:
        found = ", ".join(
            f"{name} {'torch' if is_tensor(array) else 'NumPy'} {dtype_name(array)}"
            for name, array in given.items()
        )
        raise TypeError(f"layer: {found}; all must be of one array type and dtype.")
    _check_shapes({name: shape(array) for name, array in given.items()})


def _check_shapes(shapes: dict[str, tuple[int, ...]]) -> None:
    read = "  ".join(f"{name} {found}" for name, found in shapes.items()) + "  read as (H, L, D)"
    for name, found in shapes.items():
        if len(found) != 3:
            raise ShapeError(
                f"layer: {name} has {len(found)} axes, 3 are needed: one forward pass, no batch;"
                f" pick one text, as in {name}[0].\n  {read}"
            )
    (heads, _, size), (key_heads, length, key_size) = shapes["query"], shapes["key"]
    if size != key_size:
        raise ShapeError(
            f"layer: query vectors of {size} numbers and key vectors of {key_size};"
            f" both must be of one size.\n  {read}"
        )
    if heads == 0 or key_heads == 0 or heads % key_heads:
        raise ShapeError(
            f"layer: {heads} query heads cannot share {key_heads} key heads;"
            f" {heads} must be a multiple of {key_heads}, and neither 0.\n  {read}"
        )
    if "value" in shapes and shapes["value"][:2] != (key_heads, length):
        raise ShapeError(
            f"layer: value has {shapes['value'][0]} heads of length {shapes['value'][1]};"
            f" as many as the key are needed, {key_heads} of length {length}.\n  {read}"
        )


def _checked_options(layer: Layer, options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - set(_CHECKS))
    if unknown:
        raise TypeError(f"layer: unknown option {unknown[0]!r}; possible are {', '.join(_CHECKS)}.")
    checked = {}
    for name, value in options.items():
        if value is not None:
            checked[name] = _CHECKS[name](layer, name, value)
    return checked


def _checked_bool(layer: Layer, name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"layer: {name} is {brief(value)}; True or False is needed.")
    return bool(value)


def _checked_int(layer: Layer, name: str, value: Any) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = int(operator.index(value))
    except TypeError:
        raise TypeError(f"layer: {name} is {brief(value)}; one int is needed.") from None
    if abs(number) > LARGEST_INT:
        raise ValueError(f"layer: {name} is beyond ±2**53; no text has such a position.")
    return number


def _checked_length(layer: Layer, name: str, value: Any) -> int:
    number, length = _checked_int(layer, name, value), shape(layer.key)[1]
    if not 0 <= number <= length:
        raise ValueError(
            f"layer: {name} is {number}; 0 to {length}, the keys there are, is needed."
        )
    return number


def _checked_float(layer: Layer, name: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.floating, np.integer)
    ):
        raise TypeError(f"layer: {name} is {brief(value)}; one number is needed.")
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError(f"layer: {name} is beyond ±2**53; a float is needed.")
    if not math.isfinite(value) or (name == "softcap" and value <= 0):
        kind = "positive and finite" if name == "softcap" else "finite"
        raise ValueError(f"layer: {name} is {value}; it must be {kind}.")
    return float(value)


def _checked_window(layer: Layer, name: str, value: Any) -> tuple[int | None, int | None]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"layer: {name} is {brief(value)}; a pair (left, right) of ints is needed,"
            " None for an open side."
        )
    left, right = (None if side is None else _checked_int(layer, name, side) for side in value)
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"layer: {name} is {(left, right)}; neither side may be negative.")
    return left, right


def _checked_segments(layer: Layer, name: str, value: Any) -> Any:
    lengths = shape(layer.query)[1], shape(layer.key)[1]
    if isinstance(value, (tuple, list)) and len(value) == 2 and not np.isscalar(value[0]):
        pair = [
            _checked_ids(side, ids, length)
            for side, ids, length in zip(("query", "key"), value, lengths, strict=True)
        ]
        return tuple(pair)
    if lengths[0] != lengths[1]:
        raise ShapeError(
            f"layer: {name} for {lengths[0]} queries and {lengths[1]} keys;"
            " a pair is needed, (query ids, key ids)."
        )
    return _checked_ids("key", value, lengths[1])


def _checked_ids(side: str, ids: Any, length: int) -> Any:
    ids = ids if is_array(ids) else np.asarray(ids)
    if not dtype_name(ids).startswith(("int", "uint")):
        raise TypeError(f"layer: segments of the {side} are {dtype_name(ids)}; ints are needed.")
    if shape(ids) != (length,):
        raise ShapeError(
            f"layer: segments of the {side} have shape {shape(ids)}; ({length},) is needed,"
            " one id per position."
        )
    return ids


def _checked_sinks(layer: Layer, name: str, value: Any) -> Any:
    value = _float_array(name, value)
    if shape(value) != (layer.heads,):
        raise ShapeError(
            f"layer: {name} has shape {shape(value)}; ({layer.heads},) is needed,"
            " one logit per query head."
        )
    return value


def _checked_bias(layer: Layer, name: str, value: Any) -> Any:
    return _broadcastable(layer, name, _float_array(name, value))


def _checked_mask(layer: Layer, name: str, value: Any) -> Any:
    if not is_array(value) or dtype_name(value) != "bool":
        kind = dtype_name(value) if is_array(value) else type(value).__name__
        raise TypeError(
            f"layer: {name} is {kind}; a bool array is needed, True where a query may attend."
            " Floats that are added to the scores are a bias."
        )
    return _broadcastable(layer, name, value)


def _float_array(name: str, value: Any) -> Any:
    if not is_array(value) or dtype_name(value) not in FLOATS:
        kind = dtype_name(value) if is_array(value) else type(value).__name__
        raise TypeError(f"layer: {name} is {kind}; a float array is needed.")
    return value


def _broadcastable(layer: Layer, name: str, value: Any) -> Any:
    whole = (layer.heads, shape(layer.query)[1], shape(layer.key)[1])
    found = shape(value)
    padded = (1,) * (3 - len(found)) + found
    if len(padded) != 3 or any(have not in (1, need) for have, need in zip(padded, whole)):
        raise ShapeError(
            f"layer: {name} has shape {found}; it must broadcast to (Hq, Lq, Lk) = {whole}."
        )
    return value


_CHECKS = {
    "causal": _checked_bool,
    "window": _checked_window,
    "scale": _checked_float,
    "softcap": _checked_float,
    "query_start": _checked_int,
    "key_lengths": _checked_length,
    "segments": _checked_segments,
    "sinks": _checked_sinks,
    "bias": _checked_bias,
    "mask": _checked_mask,
}


def brief(value: Any) -> str:
    if is_array(value):
        return f"{dtype_name(value)} {shape(value)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
