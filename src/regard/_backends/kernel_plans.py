"""Calls that differ from a known one in little, computed by what was read of that one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from regard._backends import kernel_calls
from regard._backends.kernel import new_output
from regard._backends.kernel_calls import (
    FEW_PRODUCTS,
    address_of,
    array_ref,
    call_as_read,
    empty,
    kernels,
)
from regard._base.arrays import accumulating_name, dtype_name
from regard._base.settings import get_num_threads
from regard._call.call import Call


class Moving(NamedTuple):
    """The options of a call that are arrays, as ``regard._operator.plans`` has checked them."""

    mask: Any = None  # (B or 1, Hq or 1, Lq or 1, Lk or 1)
    intervals: Any = None  # a pair of (B or 1, Lq), int64 and contiguous
    segments: Any = None  # ids of queries and keys: (B or 1, Lq) and (B or 1, Lk), likewise
    query_start: Sequence[int] = ()  # B numbers, or none
    key_lengths: Sequence[int] = ()  # likewise
    edits: Sequence[tuple[tuple[int, ...], float]] = ()  # of ``edits_as_read``


NOTHING = Moving()


class Plan(NamedTuple):
    """How to compute calls that differ from a known one in lengths, strides and arrays alone."""

    read: Any  # the known call as the kernels read it
    dtype: str
    unit: int  # bytes of a stride's unit
    row_stride: int  # the last stride of arrays that are read where they are
    call: Call | None  # the known call without arrays; None where those of another are reshaped

    def output(
        self,
        query: Any,
        key: Any,
        value: Any,
        moving: Moving = NOTHING,
        statistics: tuple[Any, Any] | None = None,
    ) -> Any:
        """The output ``(..., Hq, Lq, Dv)``; None for arrays whose rows would be copied first.

        ``statistics``: arrays ``(B, Hq, Lq)`` that take maximum and total, where nothing moves.
        """
        assert kernels is not None
        read, dtype, unit, row_stride, _ = self
        refs = []
        for x in (query, key, value):
            shape = x.shape
            if unit == 1:
                address, strides = x.__array_interface__["data"][0], x.strides
            else:
                address, strides = x.data_ptr(), x.stride()
            if strides[-1] != row_stride and shape[-1] != 1:
                return None
            if missing := 4 - len(shape):
                shape, strides = (1,) * missing + shape, (0,) * missing + strides
            refs.append((address, shape, strides, unit, dtype, None))
        out = new_output(query, value.shape[-1])
        (_, (B, Hq, Lq, D), _, _, _, _), (_, (_, _, Lk, _), _, _, _, _), _ = refs
        shape, strides = out.shape, out.strides if unit == 1 else out.stride()
        if missing := 4 - len(shape):
            shape, strides = (1,) * missing + shape, (0,) * missing + strides
        address = out.__array_interface__["data"][0] if unit == 1 else out.data_ptr()
        refs.append((address, shape, strides, unit, dtype, None))
        threads = 1 if B * Hq * Lq * Lk * (D + 1) < FEW_PRODUCTS else get_num_threads()
        if moving is NOTHING:
            found = (0, 0) if statistics is None else map(address_of, statistics)
            kernels.forward_of(read, *refs, *found, threads)
            return out
        mask, intervals, segments, starts, lengths, edits = moving
        ends, ids = (
            [(address_of(x), len(x) == 1) for x in pair or ()] for pair in (intervals, segments)
        )
        kernels.forward_with(
            read, *refs, threads, array_ref(mask), starts, lengths, ends, ids, edits
        )
        return out

    def call_of(self, query: Any, key: Any, value: Any) -> Call:
        """The call of such arrays, where it is one without reshaping them."""
        assert self.call is not None
        return self.call.changed(query=query, key=key, value=value)

    def with_statistics(
        self, query: Any, key: Any, value: Any
    ) -> tuple[Any, Call, tuple[Any, Any]] | None:
        """The output, the call and its row statistics; None where the call is to be read first."""
        if self.call is None:
            return None
        call, dtype = self.call_of(query, key, value), accumulating_name(query)
        maximum, total = (empty(call, query.shape[:3], dtype) for _ in range(2))
        out = self.output(query, key, value, NOTHING, (maximum, total))
        return None if out is None else (out, call, (maximum, total))


def plan_of(call: Call, query: Any, moves: bool = False) -> Plan | None:
    """The plan of calls like one of a query; ``moves``: some of its options are arrays."""
    if kernel_calls.checks or 0 in call.sizes:
        return None
    unit, row_stride = (1, query.itemsize) if isinstance(query, np.ndarray) else (query.itemsize, 1)
    is_as_given = not moves and query.shape == call.query.shape
    alone = call.changed(query=None, key=None, value=None) if is_as_given else None
    return Plan(call_as_read(call)[0], dtype_name(query), unit, row_stride, alone)
