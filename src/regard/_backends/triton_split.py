"""Attention of few queries to many keys on a GPU: the kernels, in Triton.

One query of a head has one tile of rows, and one program that reads all of its keys would leave
most of a GPU idle. So the keys are split: each program attends to some of them, for the queries of
all heads that share these, and another merges what they found, in one order. How many parts there
are depends on the number of keys alone, and where they begin on what these queries see.

Source: Dao et al. 2023, Flash-Decoding.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from regard._backends.triton_jit import (
    OF_LENGTH,
    add_sink,
    attend_keys,
    bounds_of,
    clear_unless_finite,
    rows_of,
    shrink_of,
    tiles_of,
)


@triton.jit
def _part_of(first, full, edge, last, parts, BN: tl.constexpr) -> Any:
    """The tiles of one part, as ``tiles_of`` gives those of all."""
    each = tl.cdiv((last - first) // BN, parts) * BN
    begin = tl.minimum(first + tl.program_id(0) * each, last)
    end = tl.minimum(begin + each, last)
    full = tl.minimum(tl.maximum(full, begin), end)
    return begin, full, tl.maximum(tl.minimum(edge, end), full), end


@triton.jit(do_not_specialize=[*OF_LENGTH, "first_row", "first_key", "parts"])
def attend_part(
    q_ptr, k_ptr, v_ptr, sums_ptr, maxima_ptr, totals_ptr, flag_ptr, lo_ptr, hi_ptr,
    query_ids_ptr, key_ids_ptr, mask_ptr, bias_ptr, ranges_ptr, logs_ptr, seed_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column, flag_batch, bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    Hq, group, Lq, Lk, D, Dv, edits, scale, cap,
    threshold, keep, first_row, row_step, first_key, key_step, parts,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    HAS_FLAG: tl.constexpr, HAS_OUTPUT: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_EDITS: tl.constexpr, HAS_DROPOUT: tl.constexpr, EACH: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """``(B, Hq, Lq, parts, Dv)`` and ``(B, Hq, Lq, parts)``: sums and row statistics of a part.

    A program has all queries of the heads that share a key head. A value that is not finite makes
    every row so, whether it sees the value or not: it clears the flag of its element of the batch.
    """
    kv, wide_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    place, dv = tl.arange(0, BM), tl.arange(0, BDV)
    rows_in = place < group * Lq
    known = tl.minimum(place, group * Lq - 1)  # the last row again, where there is none
    rows, h = known % Lq, tl.program_id(1) * group + known // Lq
    wide_h = h[:, None].to(tl.int64)
    q = rows_of(q_ptr + wide_b * q_batch + wide_h * q_head, q_row, q_column, rows, None, D, BD)
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, rows, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    first, full, edge, last = tiles_of(lo, hi, BN)
    first, full, edge, last = _part_of(first, full, edge, last, parts, BN)
    acc, maximum, total = attend_keys(
        q, k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column,
        v_ptr + wide_b * v_batch + kv * v_head, v_row, v_column, first, full, edge, last,
        rows, rows_in, lo, hi, query_ids, key_ids_ptr + wide_b * key_ids_batch,
        mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
        bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
        ranges_ptr, logs_ptr, edits, seed_ptr, h, (tl.program_id(2) * Hq + h)[:, None],
        Lk, D, Dv, scale, cap, threshold, keep, first_row, row_step, first_key, key_step,
        BM, BN, BD, BDV, HAS_OUTPUT, HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS,
        HAS_DROPOUT, EACH, INTERPRETED,
    )  # fmt: skip
    to = ((wide_b * Hq + h) * Lq + rows) * parts + tl.program_id(0)
    tl.store(maxima_ptr + to, maximum, mask=rows_in)
    tl.store(totals_ptr + to, total, mask=rows_in)
    if HAS_OUTPUT:
        inside = rows_in[:, None] & (dv < Dv)[None, :]
        tl.store(sums_ptr + to[:, None] * Dv + dv[None, :], acc, mask=inside)
    if HAS_FLAG:
        clear_unless_finite(flag_ptr + wide_b * flag_batch, acc)


@triton.jit(do_not_specialize=["Lq", "parts"])
def merge_parts(
    out_ptr, maximum_ptr, total_ptr, sums_ptr, maxima_ptr, totals_ptr, sinks_ptr,
    out_batch, out_head, out_row, out_column, Hq, Lq, Dv, parts,
    MOST: tl.constexpr, BDV: tl.constexpr, HAS_OUTPUT: tl.constexpr, HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """Output and row statistics of one row, of up to ``MOST`` parts, always in one order."""
    i, wide_h, wide_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    wide_b = wide_b.to(tl.int64)
    n, dv = tl.arange(0, MOST), tl.arange(0, BDV)
    row = (wide_b * Hq + wide_h) * Lq + i
    maxima = tl.load(maxima_ptr + row * parts + n, mask=n < parts, other=-float("inf"))
    totals = tl.load(totals_ptr + row * parts + n, mask=n < parts, other=0.0)
    maximum = tl.max(maxima, 0)
    share = shrink_of(maxima, tl.where(maximum == -float("inf"), 0.0, maximum))
    total, shrink = tl.sum(totals * share, 0), 1.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + wide_h).to(tl.float32) * 1.4426950408889634
        maximum, total, shrink = add_sink(maximum, total, sink)
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)
    if HAS_OUTPUT:
        at = (row * parts + n)[:, None] * Dv + dv[None, :]
        inside = (n < parts)[:, None] & (dv < Dv)[None, :]
        acc = tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0) * share[:, None], 0)
        acc = acc * shrink / tl.where(total == 0, 1.0, total)
        out_ptr += wide_b * out_batch + wide_h * out_head + i.to(tl.int64) * out_row
        to = out_ptr + dv.to(tl.int64) * out_column
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=dv < Dv)
