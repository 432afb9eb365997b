"""The compiled module, and calls and arrays as it reads and fills them."""

from __future__ import annotations

import atexit
import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from regard._base import loaded
from regard._base.arrays import dtype_name, is_tensor, to_numpy
from regard._base.settings import get_num_threads
from regard._call.call import Call
from regard._call.contents import check_contents
from regard._call.options import NUMBERS

FEW_PRODUCTS = 2**21  # below, starting another thread would take longer
_NOT_READ = {"key_start", "output_dtype"}  # fields that the kernels have in other forms


def _load() -> ModuleType | None:
    try:
        found = importlib.import_module("regard._kernels")
    except ImportError:  # installed without a C++ compiler that builds it
        return None
    atexit.register(found.end)
    return found


kernels = _load()
checks = kernels is not None and kernels.checks  # whether references carry their memory


def refused_target() -> str | None:
    """Why there is no instruction set for the kernels to run on; None where there is one."""
    try:
        if kernels is not None:
            kernels.target()
    except RuntimeError as error:
        return str(error)
    return None


def array_ref(x: Any) -> tuple[Any, ...] | None:
    """``(address, shape, strides, bytes of their unit, dtype, memory)``, as ``ArrayRef``."""
    if x is None:
        return None
    memory = _memory(x) if checks else None
    if is_tensor(x):
        return x.data_ptr(), x.shape, x.stride(), x.element_size(), dtype_name(x), memory
    return address_of(x), x.shape, x.strides, 1, dtype_name(x), memory


def _memory(x: Any) -> tuple[int, int]:
    """Address and size of the memory that x is a view of."""
    if is_tensor(x):
        storage = x.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    while isinstance(x.base, np.ndarray):
        x = x.base
    begin, end = np.lib.array_utils.byte_bounds(x)
    return begin, end - begin


def are_finite(*arrays: Any) -> bool:
    """Whether all numbers of arrays with four axes are finite; there may be None among them."""
    assert kernels is not None
    refs = [array_ref(x) for x in arrays if x is not None]
    return bool(kernels.are_finite(refs, get_num_threads()))


def contiguous_rows(x: Any) -> Any:
    """x with contiguous rows."""
    x = _resolved(x)
    if x is None or x.shape[-1] == 1:
        return x
    if is_tensor(x):
        return x if x.stride(-1) == 1 else x.contiguous()
    return x if x.strides[-1] == x.itemsize else x.copy()


def contiguous(x: Any) -> Any:
    x = _resolved(x)
    return x if x is None else x.contiguous() if is_tensor(x) else np.ascontiguousarray(x)


def _resolved(x: Any) -> Any:
    """x with its numbers in memory: torch may keep their sign as a flag."""
    return x.resolve_neg() if is_tensor(x) and x.is_neg() else x


def call_as_read(call: Call) -> tuple[Any, tuple[Any, ...]]:
    """The call as the kernels read it, and the arrays that must live as long."""
    assert kernels is not None
    check_contents(call)
    B, _, _, Lq, Lk = call.sizes
    q, k, v = (contiguous_rows(x) for x in (call.query, call.key, call.value))
    bias = _resolved(call.bias)
    lengths = [Lk] * B if call.key_lengths is None else call.key_lengths.tolist()
    starts = call.query_start
    starts = [n - Lq for n in lengths] if starts is None else starts.tolist()
    read = kernels.Call()
    read.query, read.key, read.value = array_ref(q), array_ref(k), array_ref(v)
    read.group_rows = call.group_rows
    read.starts, read.lengths = starts, lengths
    for field in NUMBERS:
        if field.name not in _NOT_READ and (x := getattr(call, field.name)) is not None:
            setattr(read, field.name, x)
    read.mask, read.bias = array_ref(call.mask), array_ref(bias)
    if call.edit_ranges is not None:
        read.edits = edits_as_read(call.edit_ranges.tolist(), call.edit_factors.tolist())
    if call.sinks is not None:
        read.sinks = call.sinks.tolist()
    if call.dropout:
        read.seed = int(call.seed)
        read.draw_start, read.draw_step = call.draws
    integers: tuple[np.ndarray, ...] = ()
    if call.query_segments is not None:
        ids = tuple(as_int64(x) for x in (call.query_segments, call.key_segments))
        read.query_ids, read.key_ids = (x.ctypes.data for x in ids)
        read.shared_query_ids, read.shared_key_ids = (len(x) == 1 for x in ids)
        integers += ids
    if call.interval_first is not None:
        ends = tuple(as_int64(x) for x in (call.interval_first, call.interval_last))
        read.interval_first, read.interval_last = (x.ctypes.data for x in ends)
        read.shared_interval_first, read.shared_interval_last = (len(x) == 1 for x in ends)
        integers += ends
    return read, (q, k, v, bias, integers, call)


def edits_as_read(
    ranges: Sequence[Sequence[int]], factors: Sequence[float]
) -> list[tuple[tuple[int, ...], float]]:
    """Edits as ``kernels.Call`` has them: intervals, and the factor's logarithm to base 2."""
    logs = (math.log2(factor) if factor else -math.inf for factor in factors)
    return [(tuple(ends), log) for ends, log in zip(ranges, logs)]


def as_int64(x: Any) -> np.ndarray:
    return np.require(to_numpy(x), np.int64, ["C", "A"])


def empty(call: Call, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array of the call's library, not filled."""
    if call.is_torch:
        return call.query.new_empty(shape, dtype=getattr(loaded.torch, dtype))
    return np.empty(shape, dtype)


def address_of(x: Any) -> int:
    if x is None:
        return 0
    return int(x.data_ptr() if is_tensor(x) else x.__array_interface__["data"][0])


def filled(asked: Any, fields: dict[str, Any]) -> Any:
    """What is asked for, with numbers, words and the addresses of arrays."""
    for name, x in fields.items():
        setattr(asked, name, x if isinstance(x, (int, str, tuple, list)) else address_of(x))
    return asked


def threads_of(call: Call, heads: int | None = None) -> int:
    """How many threads share a pass over a call, or over some of its heads."""
    B, Hq, _, Lq, Lk = call.sizes
    heads = B * Hq if heads is None else heads
    small = heads * Lq * Lk * (call.query.shape[-1] + 1) < FEW_PRODUCTS
    return 1 if small else get_num_threads()
