"""The kernels in Triton as a custom operator of torch: traceable, with a gradient.

Second derivatives, and gradients of a bias, are those of the torch backend.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._backends import torch_gradients, torch_ops, triton_jit, triton_split
from regard._backends.kernel import new_output
from regard._backends.kernel_ops import with_statistics
from regard._backends.torch_gradients import INPUTS
from regard._backends.torch_ops import (
    CALL_SCHEMA,
    as_told,
    empty_gradients,
    make_operator,
    map_one_by_one,
    names_of,
    pack,
    register_fake,
    unpack,
    without_gradient,
)
from regard._base.torch_state import is_watched
from regard._call.call import Call
from regard._call.contents import check_contents

LOG2_E = math.log2(math.e)
LARGEST_PRODUCT = torch.finfo(torch.float32).max / 4


def bounds(call: Call) -> tuple[Tensor, Tensor] | None:
    """``(B or 1, Lq)`` int32: the first key that each query may see, and the one after the last.

    By lengths, order, window, intervals and segments in order, on the device; None where every
    query sees every key. Masks, edits and segments in no order hide more.
    """
    rules = (
        call.causal, call.window_left, call.window_right, call.interval_first, call.query_segments
    )  # fmt: skip
    if call.key_lengths is None and all(x is None or x is False for x in rules):
        return None
    device, (*_, Lq, Lk) = call.query.device, call.sizes
    lengths = per_batch(Lk if call.key_lengths is None else call.key_lengths, device)
    starts = per_batch(call.starts, device)
    firsts, lasts = _intervals(call)
    given = [lengths, starts, firsts, lasts]
    counts = [len(x) for x in given if isinstance(x, Tensor)]
    rows = 0 if call.sizes[0] == 0 else max(counts, default=1)
    low, high = (torch.empty((rows, Lq), dtype=torch.int32, device=device) for _ in range(2))
    if low.numel():
        left, right = (x or 0 for x in (call.window_left, call.window_right))
        launch(
            triton_jit.intervals, (-(-Lq // ROWS), len(low)), low, high,
            *(x if isinstance(x, Tensor) else low for x in given),
            *(_stride_of_batch(x) for x in given),
            *(0 if isinstance(x, Tensor) else x for x in (lengths, starts)),
            Lq, Lk, call.query_step, call.key_step, left, right, BM=ROWS,
            HAS_LENGTHS=isinstance(lengths, Tensor), HAS_STARTS=isinstance(starts, Tensor),
            HAS_INTERVALS=firsts is not None, CAUSAL=call.causal,
            HAS_LEFT=call.window_left is not None, HAS_RIGHT=call.window_right is not None,
        )  # fmt: skip
    return low, high


def _intervals(call: Call) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """``(B or 1, Lq)`` int64: the keys that queries may see by intervals and segments."""
    found: list[Any] = []
    if call.interval_first is not None:
        given = call.interval_first, call.interval_last
        found.append([x.to(call.query.device).long() for x in given])
    if call.query_segments is not None:
        found.append(_of_segments(call.query_segments.long(), call.key_segments.long()))
    if not found:
        return None, None
    firsts, lasts = zip(*found)
    first = firsts[0] if len(found) == 1 else torch.maximum(*firsts)
    last = lasts[0] if len(found) == 1 else torch.minimum(*lasts)
    return first.contiguous(), last.contiguous()


def _of_segments(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Where the keys of each query's segment begin and end; all keys where they are in no order."""
    (rows,) = torch.broadcast_shapes(queries.shape[:1], keys.shape[:1])
    queries, keys = (x.expand(rows, -1).contiguous() for x in (queries, keys))
    are_ordered = (keys[:, 1:] >= keys[:, :-1]).all(1, keepdim=True)
    first = torch.where(are_ordered, torch.searchsorted(keys, queries), 0)
    last = torch.searchsorted(keys, queries, right=True)
    return first, torch.where(are_ordered, last, keys.shape[1])


ROWS = 256  # whose intervals a program computes


def per_batch(x: Any, device: torch.device) -> Tensor | int:
    """Integers ``(B,)`` on the device, or the one that all are: no copy is made of that."""
    if isinstance(x, int):
        return x
    if not isinstance(x, Tensor) or x.is_cpu:
        values = x.tolist()
        if len(set(values)) == 1:
            return int(values[0])
    return torch.as_tensor(x).to(device).long().contiguous()


def _stride_of_batch(x: Any) -> int:
    return int(x.stride(0)) if isinstance(x, Tensor) and len(x) > 1 else 0


def width_of(D: int) -> int:
    """The width of a tile that holds vectors of D numbers."""
    return max(16, 1 << (D - 1).bit_length())


def tile(call: Call) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and stages."""
    if triton_jit.INTERPRETED:
        return 64, 64, 4, 1
    wide = max(call.query.shape[3], _value_size(call))
    major = device_major(call.query.device)
    return tile_of(wide, is_narrow=call.query.dtype != torch.float32, major=major)


def device_major(device: torch.device) -> int:
    """Of the compute capability of NVIDIA's; 0 for others."""
    if device.type != "cuda" or not torch.version.cuda:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def tile_of(head_size: int, *, is_narrow: bool, major: int = 0) -> tuple[int, int, int, int]:
    """By head size, dtype and GPU: a search for the fastest would change bits between runs.

    Of 16 bits on capability 9 the fastest of those that were tried there; else the largest that
    spill no registers where they multiply, as ``scripts/compile_kernels`` reads.

    Args:
        major: of the compute capability of NVIDIA's.
    """
    if not is_narrow:
        if head_size <= 64:
            return 64, 32, 8, 2
        return (32, 64, 8, 2) if head_size <= 128 else (32, 16, 8, 2)
    if head_size <= 64:
        return 128, 64, 8, 3
    if head_size > 128:
        return 64, 32, 8, 2
    return (128, 32, 8, 2) if major == 12 else (128, 64, 8, 3 if major == 9 else 2)


def small_tile_of(head_size: int) -> tuple[int, int, int, int]:
    """Of the kernel for values that are not finite, which holds more sums.

    Of wide heads 64 rows would take minutes to compile.
    """
    return (64, 32, 4, 1) if head_size <= 128 else (32, 32, 8, 1)


def _value_size(call: Call) -> int:
    return 0 if call.value is None else int(call.value.shape[3])


def _strides(x: Tensor) -> list[int]:
    """Of an array that is broadcast along axes of size 1."""
    return [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride())]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs a kernel on the device of the query that it is given."""
    x = next(x for x in arguments if isinstance(x, Tensor))
    options |= triton_jit.WITHOUT_FUSION | {"INTERPRETED": triton_jit.INTERPRETED}
    with _on_device_of(x):
        kernel[grid](*arguments, **options)


@contextlib.contextmanager
def _on_device_of(x: Tensor) -> Iterator[None]:
    """Triton launches on the current device; its interpreter warns where NumPy does."""
    if x.is_cpu:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN")  # which a largest number ignores
            yield
    else:
        with torch.get_device_module(x.device).device(x.device):
            yield


def forward(call: Call) -> tuple[Any, Tensor, Tensor]:
    """Output, maximum, in units of ln 2, and total. No output without a value."""
    check_contents(call, on_device=True)
    (B, Hq, _, Lq, Lk), device = call.sizes, call.query.device
    q, v = call.query, call.value
    out = None if v is None else new_output(q, v.shape[3], call.output_dtype)
    if 0 in (B, Hq, Lq, Lk):
        nothing = torch.full((B, Hq, Lq), -torch.inf, device=device)
        return (None if out is None else out.zero_()), nothing, torch.zeros_like(nothing)
    maximum, total = (torch.empty((B, Hq, Lq), device=device) for _ in range(2))
    if splits(call):
        _forward_in_parts(call, out, maximum, total)
        return out, maximum, total
    arguments, flags = _arguments(call, [out, maximum, total])
    _attend(call, arguments, flags, clean=False)
    if flags["HAS_FLAG"]:
        _attend(call, arguments, flags, clean=True)
    return out, maximum, total


def _attend(call: Call, arguments: list[Any], flags: dict[str, bool], *, clean: bool) -> None:
    """Launches the kernel for values that are finite where they are masked, or for others.

    That one's row statistics, of smaller tiles, are not those of which weights are computed.
    """
    B, Hq, _, Lq, _ = call.sizes
    flags = flags | {"HAS_STATISTICS": not clean}
    wide = max(call.query.shape[3], _value_size(call))
    BM, BN, warps, stages = small_tile_of(wide) if clean else tile(call)
    launch(
        triton_jit.attend, (-(-Lq // BM), Hq, B), *arguments, **widths_of(call), **flags,
        CLEAN=clean, BM=BM, BN=BN, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def widths_of(call: Call) -> dict[str, int]:
    """Of tiles of queries and keys, and of values."""
    return {"BD": width_of(call.query.shape[3]), "BDV": width_of(max(_value_size(call), 1))}


def _arguments(
    call: Call, results: list[Any], flag: Tensor | None = None, *, whole: bool = True,
    given: "tuple[Scores, Drawn] | None" = None,
) -> tuple[list[Any], dict[str, bool]]:  # fmt: skip
    """What the kernel takes, in its order, and what it is compiled for.

    Args:
        results: output or sums of values, maximum and total.
        flag: tells which elements of the batch were found finite; by default a new one, that all.
        whole: for the kernel that has all keys of a row.
        given: where another kernel is given the same.
    """
    q, v = call.query, call.key if call.value is None else call.value
    scores, drawn = given or (Scores(call), Drawn(call))
    has_flag = call.value is not None and scores.hides
    if flag is None:
        flag = torch.ones(len(q), dtype=torch.int32, device=q.device) if has_flag else q
    arrays = [q, call.key, v, *(q if x is None else x for x in results), flag]
    arrays += [*scores.arrays, drawn.seed]
    strides = [*q.stride(), *of_batch(call.key, len(q)), *of_batch(v, len(q))]
    numbers = [q.shape[1], *scores.sizes, _value_size(call), *scores.numbers, *drawn.numbers]
    flags = {**scores.flags, **drawn.flags, "HAS_FLAG": has_flag}
    flags["HAS_OUTPUT"] = call.value is not None
    if whole:
        arrays.append(q if call.sinks is None else call.sinks.contiguous())
        strides += [0] * 4 if results[0] is None else results[0].stride()
        flags |= {"HAS_SIZES": False, "HAS_STATISTICS": True, "HAS_SINKS": call.sinks is not None}
        numbers.append(0.0)
    strides.append(int(len(flag) > 1))
    return [*arrays, *strides, *scores.strides, *numbers], flags


PART_KEYS, MOST_PARTS = 256, 64  # of keys that are split


def has_few_rows(call: Call) -> bool:
    """Whether one tile has all the queries that share a key head."""
    is_narrow = call.query.dtype.itemsize < 4
    return call.group_rows <= split_tile_of(16, call.group_rows, is_narrow=is_narrow)[0]


def splits(call: Call) -> bool:
    """Whether the keys of a call are split among programs: few queries of many keys."""
    return has_few_rows(call) and call.sizes[-1] >= 2 * PART_KEYS


def split_tile_of(
    head_size: int, rows: int, *, is_narrow: bool, major: int = 0
) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and stages, as ``tile_of``, for some rows.

    Of 16 bits the rows are padded: so products are of the same instructions as in larger tiles.
    """
    if not is_narrow:
        of_rows = 16 if rows <= 16 else 32
        if head_size <= 64:
            return of_rows, 32, 4, 2
        return of_rows, 2 * of_rows if head_size <= 128 else 16, 8, 2
    return 64, 64 if head_size <= 128 else 32, 8 if major == 12 else 4, 2


def _split_tile(call: Call) -> tuple[int, int, int, int]:
    if triton_jit.INTERPRETED:
        return 64, 64, 4, 1
    wide, is_narrow = max(call.query.shape[3], _value_size(call)), call.query.dtype.itemsize < 4
    major = device_major(call.query.device)
    return split_tile_of(wide, call.group_rows, is_narrow=is_narrow, major=major)


def _forward_in_parts(call: Call, out: Tensor | None, maximum: Tensor, total: Tensor) -> None:
    """Fills output and row statistics, the keys split."""
    (B, Hq, Hkv, Lq, Lk), q, Dv = call.sizes, call.query, _value_size(call)
    parts, widths = min(MOST_PARTS, -(-Lk // PART_KEYS)), widths_of(call)
    maxima, totals = (q.new_empty((B, Hq, Lq, parts), dtype=torch.float32) for _ in range(2))
    sums = maxima if out is None else maxima.new_empty((B, Hq, Lq, parts, Dv))
    flag = torch.ones(B, dtype=torch.int32, device=q.device)
    given = Scores(call), Drawn(call)
    arguments, flags = _arguments(call, [sums, maxima, totals], flag, whole=False, given=given)
    BM, BN, warps, stages = _split_tile(call)
    launch(
        triton_split.attend_part, (parts, Hkv, B), *arguments, parts, **widths, **flags,
        BM=BM, BN=BN, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    launch(
        triton_split.merge_parts, (Lq, Hq, B), q if out is None else out, maximum, total,
        sums, maxima, totals, q if call.sinks is None else call.sinks.contiguous(),
        *([0] * 4 if out is None else out.stride()), Hq, Lq, Dv, parts, MOST=MOST_PARTS,
        BDV=widths["BDV"], HAS_OUTPUT=out is not None, HAS_SINKS=call.sinks is not None,
    )  # fmt: skip
    if flags["HAS_FLAG"]:
        _attend(call, *_arguments(call, [out, maximum, total], flag, given=given), clean=True)


SIZE_ROWS = 128  # of query, key or value, whose sizes a program looks at


def size_bits(call: Call, x: Tensor) -> Tensor:
    """``(B, 3)`` int32: the bits of the largest size in query, key and x, of each in the batch."""
    B, (q, k) = call.sizes[0], (call.query, call.key)
    bits = torch.zeros((B, 3), dtype=torch.int32, device=q.device)
    tiles = [-(-y.shape[1] * y.shape[2] // SIZE_ROWS) for y in (q, k, x)]
    heads, lengths = ([y.shape[axis] for y in (q, k, x)] for axis in (1, 2))
    launch(
        triton_jit.sizes, (sum(tiles), B), bits, q, k, x,
        *q.stride(), *of_batch(k, B), *of_batch(x, B), *tiles[:2], *heads, *lengths,
        q.shape[3], x.shape[3], BM=SIZE_ROWS, BD=width_of(q.shape[3]), BDV=width_of(x.shape[3]),
    )  # fmt: skip
    return bits


def _mend(call: Call, out: Tensor) -> None:
    """Computes anew the elements of the batch that torch's fused operator may have wrong.

    It adds −inf to masked scores, which lets NaN and an overflow of any query and key through.
    """
    (B, Hq, _, Lq, _), (q, _, v) = call.sizes, (call.query, call.key, call.value)
    bits = size_bits(call, v)
    widths = {"BD": width_of(q.shape[3]), "BDV": width_of(v.shape[3])}
    arguments, flags = _arguments(call, [out, q, q], bits)
    arguments[-1] = LARGEST_PRODUCT / (abs(call.scale) * q.shape[3])
    BM, BN, warps, stages = small_tile_of(q.shape[3])
    launch(
        triton_jit.attend, (-(-Lq // BM), Hq, B), *arguments, **widths,
        **flags | {"HAS_SIZES": True, "HAS_STATISTICS": False, "HAS_FLAG": False}, CLEAN=True,
        BM=BM, BN=BN, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _fused(call: Call) -> Tensor:
    check_contents(call, on_device=True)
    out = torch_ops.fused(call)
    if out is None:  # torch has no kernel for these tensors
        return forward(call)[0]
    if torch_ops.hides(call):
        _mend(call, out)
    return out


@without_gradient
@make_operator("fused_attention", CALL_SCHEMA, "Tensor", products=(1, 1))
def _fuse(*values: Any) -> Tensor:
    call = unpack(*values)
    out = _fused(call)
    told = new_output(call.query, call.value.shape[3], call.output_dtype)
    return out if out.stride() == told.stride() else told.copy_(out)  # torch's are in any layout


@register_fake(_fuse)
def _(*values: Any) -> Tensor:
    call = unpack(*values)
    return new_output(call.query, call.value.shape[3], call.output_dtype)


def fused(call: Call) -> Tensor:
    """torch's fused operator, exactly: without a gradient."""
    found: Tensor = _fuse(*pack(call)) if is_watched() else _fused(call)
    return found


class Drawn:
    """What kernels take of a call for its dropout."""

    def __init__(self, call: Call) -> None:
        (first_row, first_key), (row_step, key_step) = call.draws
        keep = 1 / (1 - call.dropout)
        q, seed = call.query, call.seed
        if seed is None:
            self.seed = q
        elif seed.is_cpu:  # a number, for which nothing is uploaded
            self.seed = torch.full((1,), int(seed), dtype=torch.int64, device=q.device)
        else:
            self.seed = seed
        self.numbers = [round(call.dropout * 2**32), keep]
        self.numbers += [first_row, row_step, first_key, key_step]
        self.flags = {
            "HAS_DROPOUT": call.dropout > 0, "EACH": key_step != 1 or first_key % 4 != 0,
        }  # fmt: skip


class Scores:
    """What all kernels take of a call for its scores, in the order of their parameters."""

    def __init__(self, call: Call) -> None:
        q, device, limits = call.query, call.query.device, bounds(call)
        low, high = (q, q) if limits is None else limits
        ids = call.query_segments, call.key_segments
        of_queries, of_keys = (q if x is None else x.long().contiguous() for x in ids)
        mask = q[:1, :1, :1, :1] if call.mask is None else call.mask.view(torch.uint8)
        bias = q[:1, :1, :1, :1] if call.bias is None else call.bias
        ranges, logs, edits = q, q, 0
        if call.edit_ranges is not None:
            (ranges, logs), edits = _uploaded(call, device), len(call.edit_ranges)
        _, Hq, Hkv, Lq, Lk = call.sizes
        given = (limits, *ids, call.mask, call.edit_ranges)
        self.hides = any(x is not None for x in given)
        self.arrays = [low, high, of_queries, of_keys, mask, bias, ranges, logs]
        self.strides = [
            0 if x is None or len(y) == 1 else y.stride(0)
            for x, y in zip(given, (low, of_queries, of_keys))
        ] + [*_strides(mask), *_strides(bias)]
        self.sizes = [Hq // max(Hkv, 1), Lq, Lk, q.shape[3]]
        is_product = call.bias is None and call.softcap is None and not edits
        scale = call.scale * LOG2_E if is_product else call.scale
        self.numbers = [edits, scale, call.softcap or 1.0]
        self.flags = {
            "HAS_BOUNDS": limits is not None, "HAS_IDS": ids[0] is not None,
            "HAS_MASK": call.mask is not None, "HAS_BIAS": call.bias is not None,
            "HAS_CAP": call.softcap is not None, "HAS_EDITS": edits > 0,
        }  # fmt: skip


def _uploaded(call: Call, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rectangles of the edits, and logarithms of their factors, in one upload."""
    bits = call.edit_factors.log().float().view(torch.int32).long()
    found = torch.cat([call.edit_ranges, bits[:, None]], 1).to(device)
    return found[:, :-1].contiguous(), found[:, -1].to(torch.int32).view(torch.float32)


def of_batch(x: Tensor, B: int) -> list[int]:
    """Strides of keys or values that a batch may share."""
    batch, *rest = x.stride()
    return [batch if len(x) == B else 0, *rest]


@make_operator("triton_attention", CALL_SCHEMA, "(Tensor, Tensor, Tensor)", products=(1, 1))
def _forward(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    return forward(unpack(*values))


@register_fake(_forward)
def _(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = unpack(*values)
    rows = call.query.new_empty(call.query.shape[:3], dtype=torch.float32)
    out = new_output(call.query, call.value.shape[3], call.output_dtype)
    return out, rows, torch.empty_like(rows)


@make_operator(
    "triton_attention_backward",
    f"int needed, Tensor grad, Tensor out, Tensor maximum, Tensor total, {CALL_SCHEMA}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    products=(3, 2),
)
def _backward(
    needed: int, grad: Tensor, out: Tensor, maximum: Tensor, total: Tensor, *values: Any
) -> tuple[Tensor, ...]:
    from regard._backends import triton_backward  # which imports this

    call, names = unpack(*values), names_of(needed)
    if "bias" in names:  # a number for each pair, maybe summed over some axes
        found = dict(zip(INPUTS, torch_gradients.gradients(call, grad, names)))
    else:
        delta = (grad.float() * out.float()).sum(-1)
        # Each weight's gradient is infinite there: less another infinity it is NaN.
        delta = torch.where(grad.isfinite().all(-1), delta, torch.nan)
        found = triton_backward.gradients(call, grad, delta, (maximum, total), names)
    return as_told(grad, [found.get(name) for name in INPUTS])


@register_fake(_backward)
def _(needed: int, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return empty_gradients(unpack(*rest[3:]), names_of(needed))


_differentiable, _ = with_statistics(_forward, _backward, map_one_by_one)


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """As ``forward``, differentiable twice and traceable."""
    inputs = (call.query, call.key, call.value, call.bias, call.sinks)
    differentiates = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in inputs
    )
    if not (differentiates or is_watched()):
        return forward(call)
    found: tuple[Tensor, Tensor, Tensor] = _differentiable(*pack(call))
    return found
