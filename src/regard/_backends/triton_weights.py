"""Reductions of the weights on a GPU, from the row statistics: the kernels, in Triton.

Each program has some rows of one head, and goes once over the keys that they see. What is summed
over programs is integers; what is not, is summed in one order: all have the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from regard._backends.triton_jit import (
    OF_LENGTH,
    bounds_of,
    exponent,
    rows_of,
    scores_of,
    statistics_of,
    tiles_of,
)

LOWEST = tl.constexpr(-3.0e38)  # for a weight of 0, where a masked one is −inf


@triton.jit(
    do_not_specialize=[
        *OF_LENGTH, "out_batch", "out_head", "out_row", "b0", "h0", "heads", "row0", "rows_end",
        "key0", "keys_end",
    ]
)  # fmt: skip
def logarithms(
    out_ptr, q_ptr, k_ptr, maximum_ptr, lo_ptr, hi_ptr,
    query_ids_ptr, key_ids_ptr, mask_ptr, bias_ptr, ranges_ptr, logs_ptr,
    out_batch, out_head, out_row, q_batch, q_head, q_row, q_column,
    k_batch, k_head, k_row, k_column, bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    b0, h0, heads, row0, rows_end, key0, keys_end, Hq, group, Lq, Lk, D, edits, scale, cap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_EDITS: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """``ln`` of the weights of a block times their total, from the maxima of the rows.

    Of the tiles that the row statistics are of: so products have the same bits.
    """
    h, b = h0 + tl.program_id(2) % heads, b0 + tl.program_id(2) // heads
    kv, wide_b, wide_h = (h // group).to(tl.int64), b.to(tl.int64), h.to(tl.int64)
    rows = row0 // BM * BM + tl.program_id(0) * BM + tl.arange(0, BM)
    rows_in, known = (row0 <= rows) & (rows < rows_end), tl.minimum(rows, Lq - 1)
    q = rows_of(q_ptr + wide_b * q_batch + wide_h * q_head, q_row, q_column, known, None, D, BD)
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, known, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    j = key0 // BN * BN + tl.program_id(1) * BN + tl.arange(0, BN)
    s, _, visible = scores_of(
        q, k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column,
        j, j < Lk, rows, rows_in, lo, hi, scale, cap,
        query_ids, key_ids_ptr + wide_b * key_ids_batch,
        mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
        bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
        ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, True,
        HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
    )  # fmt: skip
    maximum = tl.load(maximum_ptr + (wide_b * Hq + h) * Lq + known)
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    x = exponent(s, base) * 0.6931471805599453
    at = (b - b0).to(tl.int64) * out_batch + (h - h0).to(tl.int64) * out_head
    tl.store(
        out_ptr + at + (rows - row0)[:, None].to(tl.int64) * out_row + (j - key0)[None, :],
        tl.where(visible, x, -float("inf")),
        mask=rows_in[:, None] & ((key0 <= j) & (j < keys_end))[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=OF_LENGTH)
def reductions(
    entropy_ptr, distance_ptr, row_largest_ptr, received_ptr, largest_ptr, undefined_ptr,
    q_ptr, k_ptr, maximum_ptr, total_ptr, starts_ptr, lo_ptr, hi_ptr,
    query_ids_ptr, key_ids_ptr, mask_ptr, bias_ptr, ranges_ptr, logs_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    starts_batch, row_step, key_step, bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    Hq, group, Lq, Lk, D, edits, scale, cap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_EDITS: tl.constexpr, INTERPRETED: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_ROW_LARGEST: tl.constexpr, HAS_RECEIVED: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
) -> None:  # fmt: skip
    """Reductions of the weights of some rows of one head, from their maxima and totals.

    Sums over queries are of integers, 2^40 to a weight of 1: they have the same bits in any order.
    """
    h, b = tl.program_id(1), tl.program_id(2)
    kv, wide_b, wide_h = (h // group).to(tl.int64), b.to(tl.int64), h.to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    rows_in, known = rows < Lq, tl.minimum(rows, Lq - 1)
    q = rows_of(q_ptr + wide_b * q_batch + wide_h * q_head, q_row, q_column, known, None, D, BD)
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, known, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    first, full, edge, last = tiles_of(lo, hi, BN)
    at = (wide_b * Hq + h) * Lq + known
    base, divisor = statistics_of(maximum_ptr + at, total_ptr + at)
    place = tl.load(starts_ptr + wide_b * starts_batch) + rows.to(tl.int64) * row_step
    of_logs, mass = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    distance, row_largest = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    of_keys = (wide_b * Hq + h) * Lk
    for part in tl.static_range(3):  # masked tiles, tiles that all rows see, masked tiles
        begin = first if part == 0 else (full if part == 1 else edge)
        end = full if part == 0 else (edge if part == 1 else last)
        for start in range(begin, end, BN):
            j = start + tl.arange(0, BN)
            s, _, visible = scores_of(
                q, k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column,
                j, j < Lk, rows, rows_in, lo, hi, scale, cap,
                query_ids, key_ids_ptr + wide_b * key_ids_batch,
                mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
                bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
                ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, part != 1,
                HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
            )  # fmt: skip
            x = exponent(s, base)
            p = tl.where(visible, tl.exp2(x), 0.0)
            if HAS_ENTROPY:
                of_logs += tl.sum(tl.where(p == 0, 0.0, p * x), 1)
                mass += tl.sum(p, 1)
            if HAS_DISTANCE:
                apart = place[:, None] - j[None, :].to(tl.int64) * key_step
                distance += tl.sum(p * tl.abs(apart).to(tl.float32), 1)
            if HAS_ROW_LARGEST:  # of a row of NaN 0
                row_largest = tl.maximum(row_largest, tl.max(tl.where(p == p, p, 0.0), 1))
            if HAS_RECEIVED or HAS_LARGEST:
                w = tl.where(visible, p / divisor[:, None], 0.0)  # the total may be NaN
                undefined = tl.max((w != w).to(tl.int32), 0)
                w = tl.where(w == w, w, 0.0)
                inside = j < Lk
                tl.atomic_max(undefined_ptr + of_keys + j, undefined, mask=inside, sem="relaxed")
                if HAS_RECEIVED:
                    fixed = (tl.sum(w, 0) * 1099511627776.0).to(tl.int64)
                    tl.atomic_add(received_ptr + of_keys + j, fixed, mask=inside, sem="relaxed")
                if HAS_LARGEST:  # bits of numbers that are not negative are ordered as they are
                    bits = tl.max(w, 0).to(tl.int32, bitcast=True)
                    tl.atomic_max(largest_ptr + of_keys + j, bits, mask=inside, sem="relaxed")
    if HAS_ENTROPY:
        entropy = (mass * tl.log2(divisor) - of_logs) * 0.6931471805599453 / divisor
        tl.store(entropy_ptr + at, entropy, mask=rows_in)
    if HAS_DISTANCE:
        tl.store(distance_ptr + at, distance / divisor, mask=rows_in)
    if HAS_ROW_LARGEST:
        w = row_largest / divisor
        tl.store(row_largest_ptr + at, tl.where(w == w, w, 0.0), mask=rows_in)


@triton.jit
def _bin_start(n, bins, extent, start, step, length) -> Any:
    """The first index of bin n, of cells every ``step`` from ``start`` on."""
    edge = n.to(tl.int64) * extent // bins - start
    return tl.minimum(tl.maximum((edge + step - 1) // step, 0), length).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        *OF_LENGTH, "R", "C", "row_extent", "column_extent", "row_start", "column_start",
        "row_chunks", "column_chunks",
    ]
)  # fmt: skip
def picture(
    out_ptr, q_ptr, k_ptr, maximum_ptr, total_ptr, lo_ptr, hi_ptr,
    query_ids_ptr, key_ids_ptr, mask_ptr, bias_ptr, ranges_ptr, logs_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    R, C, row_chunks, column_chunks, row_extent, column_extent, row_start, column_start,
    row_step, column_step, bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    Hq, group, Lq, Lk, D, edits, scale, cap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, NR: tl.constexpr, NC: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_EDITS: tl.constexpr,
    INTERPRETED: tl.constexpr, HAS_MASS: tl.constexpr,
) -> None:  # fmt: skip
    """Cells of a heatmap, ``(B, Hq, R, row_chunks, C)``, over some rows of a bin each.

    A tile has NR bins of rows and NC of keys, each padded, or a chunk of one. The largest
    logarithm, −inf where all is masked; of masses the sum of weights, −1 where all is masked.
    """
    WR: tl.constexpr = BM // NR
    WC: tl.constexpr = BN // NC
    h, b = tl.program_id(1), tl.program_id(2)
    kv, wide_b, wide_h = (h // group).to(tl.int64), b.to(tl.int64), h.to(tl.int64)
    r, column = tl.arange(0, BM), tl.arange(0, BN)
    chunk, of_rows = tl.program_id(0) % row_chunks, tl.program_id(0) // row_chunks * NR
    row_bin = of_rows + r // WR
    rows = _bin_start(row_bin, R, row_extent, row_start, row_step, Lq) + chunk * WR + r % WR
    rows_in = rows < _bin_start(row_bin + 1, R, row_extent, row_start, row_step, Lq)
    rows_in = rows_in & (row_bin < R)
    known = tl.minimum(rows, Lq - 1)
    q = rows_of(q_ptr + wide_b * q_batch + wide_h * q_head, q_row, q_column, known, None, D, BD)
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, known, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    at = (wide_b * Hq + h) * Lq + known
    base, divisor = statistics_of(maximum_ptr + at, total_ptr + at)
    log_divisor = tl.log2(divisor)
    first = tl.min(tl.where(rows_in, lo, Lk), 0)
    last = tl.max(tl.where(rows_in, hi, 0), 0)
    begin, end = column_start + first.to(tl.int64) * column_step, last.to(tl.int64) - 1
    begin, end = (begin + 1) * C - 1, (column_start + end * column_step + 1) * C - 1
    first_bin = (begin // column_extent).to(tl.int32) // NC
    last_bin = tl.where(first < last, (end // column_extent).to(tl.int32) // NC + 1, first_bin)
    cell, seen = tl.zeros((NR, NC), tl.float32), tl.zeros((NR, NC), tl.int32)
    of_cells = (wide_b * Hq + h) * R
    cell_row, cell_column = of_rows + tl.arange(0, NR), tl.arange(0, NC)
    for tile in range(first_bin * column_chunks, last_bin * column_chunks):
        of_columns, part = tile // column_chunks * NC, tile % column_chunks
        key_bin = of_columns + column // WC
        j = _bin_start(key_bin, C, column_extent, column_start, column_step, Lk)
        j += part * WC + column % WC
        after = _bin_start(key_bin + 1, C, column_extent, column_start, column_step, Lk)
        inside = (j < after) & (key_bin < C)
        s, _, visible = scores_of(
            q, k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column,
            j, inside, rows, rows_in, lo, hi, scale, cap,
            query_ids, key_ids_ptr + wide_b * key_ids_batch,
            mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
            bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
            ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, True,
            HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
        )  # fmt: skip
        x = exponent(s, base)
        if HAS_MASS:
            w = tl.where(visible, tl.exp2(x) / divisor[:, None], 0.0)
            own = tl.sum(tl.sum(w.reshape(NR, WR, NC, WC), 3), 1)
            some = tl.max(tl.max(visible.to(tl.int32).reshape(NR, WR, NC, WC), 3), 1)
            cell = tl.where(part == 0, own, cell + own)
            seen = tl.where(part == 0, some, tl.maximum(seen, some))
            found = tl.where(seen > 0, cell, -1.0)
        else:
            y = x - log_divisor[:, None]
            y = tl.where(y == y, tl.where(y < LOWEST, LOWEST, y), float("inf"))
            y = tl.where(visible, y, -float("inf"))
            own = tl.max(tl.max(y.reshape(NR, WR, NC, WC), 3), 1)
            cell = tl.where(part == 0, own, tl.maximum(cell, own))
            found = cell
        cells = ((of_cells + cell_row[:, None]) * row_chunks + chunk) * C
        cells += of_columns + cell_column[None, :]
        there = (cell_row < R)[:, None] & (of_columns + cell_column < C)[None, :]
        tl.store(out_ptr + cells, found, mask=there)


@triton.jit(do_not_specialize=[*OF_LENGTH, "count", "k"])
def top_keys(
    values_ptr, keys_ptr, rows_ptr, q_ptr, k_ptr, maximum_ptr, total_ptr, lo_ptr, hi_ptr,
    query_ids_ptr, key_ids_ptr, mask_ptr, bias_ptr, ranges_ptr, logs_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    count, k, bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    Hq, group, Lq, Lk, D, edits, scale, cap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, KEPT: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_EDITS: tl.constexpr,
    INTERPRETED: tl.constexpr, HAS_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """The k strongest keys of ``count`` rows of each head, strongest first, the first of equals.

    A weight and its key are one integer, the weight's bits above what is left from the key to 2^31.
    """
    h, b = tl.program_id(1), tl.program_id(2)
    kv, wide_b, wide_h = (h // group).to(tl.int64), b.to(tl.int64), h.to(tl.int64)
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    rows, rows_in = place, place < count
    of_places = (wide_b * Hq + h) * count
    if HAS_ROWS:
        rows = tl.load(rows_ptr + of_places + place, mask=rows_in, other=0).to(tl.int32)
    known = tl.minimum(rows, Lq - 1)
    q = rows_of(q_ptr + wide_b * q_batch + wide_h * q_head, q_row, q_column, known, None, D, BD)
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, known, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    at = (wide_b * Hq + h) * Lq + known
    base, divisor = statistics_of(maximum_ptr + at, total_ptr + at)
    # As many keys as are wanted, seen or not.
    first = tl.minimum(tl.min(lo, 0), tl.maximum(Lk - k, 0)) // BN * BN
    last = tl.maximum(tl.max(hi, 0), tl.minimum(first + k + BN, Lk))
    lowest = tl.full((BM, BN), -1099511627776, tl.int64)
    best = tl.zeros((BM, KEPT), tl.int64) - 1 - tl.arange(0, KEPT)[None, :]
    for start in range(first, last, BN):
        j = start + tl.arange(0, BN)
        s, _, visible = scores_of(
            q, k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column,
            j, j < Lk, rows, rows_in, lo, hi, scale, cap,
            query_ids, key_ids_ptr + wide_b * key_ids_batch,
            mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
            bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
            ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, True,
            HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
        )  # fmt: skip
        x = exponent(s, base)
        # Rounded as 1 / total is, by which rows are chosen.
        w = tl.div_rn(tl.exp2(x), tl.zeros((BM, BN), tl.float32) + divisor[:, None])
        w = tl.where(visible, w, 0.0)
        w = tl.where(w == w, w, float("nan"))  # of one sign: above all others
        bits = w.to(tl.int32, bitcast=True).to(tl.int64) << 32
        found = tl.where((j < Lk)[None, :], bits | (0x7FFFFFFF - j)[None, :].to(tl.int64), lowest)
        weakest, strongest = tl.min(best, 1), tl.max(found, 1)
        while tl.max((strongest > weakest).to(tl.int32), 0) > 0:
            is_new = (strongest > weakest)[:, None]
            best = tl.where(is_new & (best == weakest[:, None]), strongest[:, None], best)
            found = tl.where(found == strongest[:, None], lowest, found)
            weakest, strongest = tl.min(best, 1), tl.max(found, 1)
    for n in range(k):
        strongest = tl.max(best, 1)
        best = tl.where(best == strongest[:, None], -1099511627776, best)
        value = (strongest >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        to = (of_places + place) * k + n
        tl.store(values_ptr + to, value, mask=rows_in)
        tl.store(keys_ptr + to, 0x7FFFFFFF - (strongest & 0x7FFFFFFF), mask=rows_in)
