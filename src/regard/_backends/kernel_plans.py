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
    kernels,
)
from regard._base import loaded
from regard._base.arrays import accumulating_name
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
    call: Call | None  # the known call without arrays; None where those of another are reshaped
    differentiable: Any  # ``kernel_ops.planned`` where the arrays are tensors
    accumulates: Any  # the dtype of the row statistics

    def output(
        self,
        query: Any,
        value: Any,
        given: Any,
        moving: Moving = NOTHING,
        statistics: tuple[Any, Any] | None = None,
    ) -> Any:
        """The output ``(..., Hq, Lq, Dv)`` of what ``kernels.given`` has read.

        ``statistics``: of ``new_statistics``, to be filled, where nothing moves.
        """
        assert kernels is not None
        if given.is_like_output and not isinstance(query, np.ndarray):
            out = loaded.torch.empty_like(query)
        else:
            out = new_output(query, value.shape[-1])
        threads = 1 if given.products < FEW_PRODUCTS else get_num_threads()
        if moving is NOTHING:
            maximum, total = map(address_of, statistics) if statistics else (0, 0)
            kernels.forward_of(self.read, given, out, maximum, total, threads)
            return out
        mask, intervals, segments, starts, lengths, edits = moving
        ends, ids = (
            [(address_of(x), len(x) == 1) for x in pair or ()] for pair in (intervals, segments)
        )
        kernels.forward_with(
            self.read, given, out, threads, array_ref(mask), starts, lengths, ends, ids, edits
        )
        return out

    def call_of(self, query: Any, key: Any, value: Any) -> Call:
        """The call of such arrays, where it is one without reshaping them."""
        assert self.call is not None
        return self.call.changed(query=query, key=key, value=value)

    def new_statistics(self, query: Any) -> tuple[Any, Any]:
        """Arrays ``(B, Hq, Lq)`` for maximum and total, which share their memory."""
        shape = 2, *query.shape[:3]
        if isinstance(query, np.ndarray):
            maximum, total = np.empty(shape, self.accumulates)
        else:
            maximum, total = query.new_empty(shape, dtype=self.accumulates).unbind()
        return maximum, total

    def gradients(
        self,
        arrays: Sequence[Any],
        needed: Sequence[bool],
        grad: Any,
        out: Any,
        maximum: Any,
        total: Any,
    ) -> list[Any] | None:
        """Of query, key and value, those needed, of a plan that has a call.

        None where something is not finite, or not to be read where it lies.

        Args:
            out, maximum, total: of ``output``.
        """
        assert kernels is not None
        assert self.call is not None
        if (given := kernels.given(*arrays, False)) is None or self.call.scale == 0.0:
            return None
        query = arrays[0]
        B = len(query)  # also of keys and values that all of the batch share: autograd sums these
        made = [x.new_empty((B, *x.shape[1:])) if need else None for x, need in zip(arrays, needed)]
        # Chunks of keys add to dQ in the dtype of the sums; the last one rounds it.
        is_exact = query.dtype == self.accumulates
        summed = made[0] if is_exact or not needed[0] else total.new_empty(query.shape)
        threads = 1 if given.products < FEW_PRODUCTS else get_num_threads()
        statistics = map(address_of, (maximum, total))
        done = kernels.backward_of(self.read, given, grad, out, *statistics, summed, *made, threads)
        return made if done else None


def plan_of(call: Call, query: Any, moves: bool = False) -> Plan | None:
    """The plan of calls like one of a query; ``moves``: some of its options are arrays."""
    if kernel_calls.checks or 0 in call.sizes:
        return None
    is_as_given = not moves and query.shape == call.query.shape
    alone = call.changed(query=None, key=None, value=None) if is_as_given else None
    differentiable, accumulates = None, accumulating_name(query)
    if call.is_torch:
        from regard._backends import kernel_ops

        differentiable = kernel_ops.planned
        accumulates = getattr(loaded.torch, accumulates)
    return Plan(call_as_read(call)[0], alone, differentiable, accumulates)
