"""Gradients of attention by kernels in Triton: what is launched."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from regard._backends import triton_gradients, triton_jit
from regard._backends.triton_ops import (
    LOG2_E,
    Drawn,
    Scores,
    device_major,
    launch,
    of_batch,
    size_bits,
    width_of,
)
from regard._call.call import Call
from regard._call.contents import check_contents


def tile_of(
    head_size: int, *, is_narrow: bool, major: int = 0, of_keys: bool = False
) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and stages, as ``triton_ops.tile_of``."""
    if not is_narrow:
        if head_size > 64:
            return 16, 32 if head_size <= 128 else 16, 8, 2
        return 32, 32, 8, 3 if major == 10 else 2
    if head_size > 128:
        return 32, 32, 8, 2
    if head_size <= 64:
        return 64, 32 if major == 12 else 64, 4, 3 if major == 9 else 2
    if major == 9:
        return 128, 64 if of_keys else 128, 8, 2
    return 64, 32, 8, 2


def small_tile_of(head_size: int, *, is_narrow: bool) -> tuple[int, int, int, int]:
    """Of the kernel for gradients that are not finite, which holds more sums.

    As many rows as make products of the same instructions as those of the row statistics, where 99
    KB of memory that a program shares, as GPUs for games have it, are enough for them.
    """
    if is_narrow and head_size <= 128:
        return 64, 32, 4, 1
    return *tile_of(head_size, is_narrow=is_narrow, of_keys=True)[:3], 1


def gradients(
    call: Call, grad: Tensor, delta: Tensor, statistics: tuple[Any, Any],
    needed: Collection[str], dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of query, key, value and sinks, those needed, for that of the output.

    Args:
        grad: ``(B, Hq, Lq, Dv)``.
        delta: ``(B, Hq, Lq)``, ``Σ grad · output``.
        statistics: of the whole rows.
        dtype: of the gradients, by default those of the inputs.
    """
    check_contents(call, on_device=True)
    given = {name: getattr(call, name) for name in ("query", "key", "value", "sinks")}
    shapes = {name: x.shape for name, x in given.items() if x is not None}
    dtypes = {name: dtype or given[name].dtype for name in shapes}
    if 0 in call.sizes:
        zeros = {n: call.query.new_zeros(shapes[n], dtype=dtypes[n]) for n in shapes}
        return {name: x for name, x in zeros.items() if name in needed}
    if grad.dtype != call.value.dtype:  # products are of one dtype
        wide = (x.float() for x in (call.query, call.key, call.value, grad))
        q, k, v, grad = wide
        call = call.changed(query=q, key=k, value=v)
    device = call.query.device
    maximum, total = (
        torch.as_tensor(x, dtype=torch.float32).to(device).contiguous() for x in statistics
    )
    delta = delta.float().contiguous()
    found = {}
    if "query" in needed:
        found["query"] = torch.empty(shapes["query"], dtype=dtypes["query"], device=device)
    if not {"key", "value"}.isdisjoint(needed):
        for name in ("key", "value"):
            rest, whole = shapes[name][1:], len(given[name]) == len(call.query)
            own = dtypes[name] if whole else torch.float32
            found[name] = torch.empty((len(call.query), *rest), dtype=own, device=device)
    _launch(call, grad, [maximum, total, delta], found)
    if "sinks" in needed:
        found["sinks"] = _of_sinks(call, maximum, total, delta)
    for name in ("key", "value"):
        if name in found and found[name].shape != shapes[name]:  # of keys that a batch shares
            found[name] = found[name].sum(0, keepdim=True)
    return {name: x.to(dtypes[name]) for name, x in found.items() if name in needed}


def _launch(call: Call, grad: Tensor, of_rows: list[Tensor], found: dict[str, Tensor]) -> None:
    """Fills the gradients of query, or of key and value."""
    (B, Hq, Hkv, Lq, Lk), (q, k, v) = call.sizes, (call.query, call.key, call.value)
    scores, drawn, Dv = Scores(call), Drawn(call), v.shape[3]
    low, high, *others = scores.arrays
    arrays = [q, k, v, grad, *of_rows, low, high, *others, drawn.seed]
    strides = [*q.stride(), *of_batch(k, B), *of_batch(v, B), *grad.stride(), *scores.strides]
    numbers = [Hq, *scores.sizes, Dv, *scores.numbers, *drawn.numbers]
    given = [*arrays, *strides, *numbers]
    flags: dict[str, Any] = {**scores.flags, **drawn.flags}
    flags |= {"BD": width_of(q.shape[3]), "BDV": width_of(Dv)}
    bits = size_bits(call, grad)
    flags["IS_HALF"] = q.dtype == torch.float16
    units = _units_of_slopes(call, grad) if flags["IS_HALF"] else bits
    given = [bits, units, *given]
    for clean in (False, True):
        flags["CLEAN"] = clean
        if "query" in found:
            BM, BN, warps, stages = tile(call, of_keys=False)
            launch(
                triton_gradients.of_queries, (-(-Lq // BM), Hq, B), found["query"], *given,
                **flags, BM=BM, BN=BN, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        if "key" in found:
            BM, BN, warps, stages = tile(call, of_keys=True, clean=clean)
            launch(
                triton_gradients.of_keys, (-(-Lk // BN), Hkv, B),
                found["key"], found["value"], *given, **flags,
                BM=BM, BN=BN, num_warps=warps, num_stages=stages,
            )  # fmt: skip


def _units_of_slopes(call: Call, grad: Tensor) -> Tensor:
    """``(B,)``: powers of 2 times which gradients of scores are below 2^15, as float16 needs it.

    A product of vectors is at most that of their lengths.
    """
    if 0 in call.value.shape:
        return grad.new_ones(len(grad), dtype=torch.float32)
    lengths = (
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).flatten(1).amax(1)
        for x in (call.value, grad)
    )
    bound = math.prod(lengths) * (2 / (1 - call.dropout))
    units = torch.exp2(14 - bound.log2().ceil())
    return torch.where((bound > 0) & (bound < torch.inf), units, 1.0)


def tile(call: Call, *, of_keys: bool, clean: bool = False) -> tuple[int, int, int, int]:
    """That of a call, for the gradient of keys and values or for that of queries."""
    if triton_jit.INTERPRETED:
        return 64, 64, 4, 1
    wide, is_narrow = max(call.query.shape[3], call.value.shape[3]), call.query.dtype.itemsize < 4
    if clean:
        return small_tile_of(wide, is_narrow=is_narrow)
    major = device_major(call.query.device)
    return tile_of(wide, is_narrow=is_narrow, major=major, of_keys=of_keys)


def _of_sinks(call: Call, maximum: Tensor, total: Tensor, delta: Tensor) -> Tensor:
    """``(Hq,)``: minus the sum over rows of the sink's weight and delta."""
    w = (call.sinks.float()[:, None] * LOG2_E - maximum).exp2() / total
    return -torch.where(total == 0, 0.0, w * delta).sum((0, 2))
