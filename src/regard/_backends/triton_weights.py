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
    rows_of_program,
    scores_of,
    statistics_of,
    tile_at,
    tiles_in,
    tiles_of,
)

LOWEST = tl.constexpr(-3.0e38)  # for a weight of 0, where a masked one is −inf
LEAST = tl.constexpr(-200.0)  # of exponents: 2 to it is 0
NO_KEY = tl.constexpr(1073741824)  # beyond all keys
LN2 = tl.constexpr(0.6931471805599453)


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
    x = exponent(s, base) * LN2
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
    rows = rows_of_program(BM)
    rows_in, known = rows < Lq, tl.minimum(rows, Lq - 1)
    q = rows_of(q_ptr + wide_b * q_batch + wide_h * q_head, q_row, q_column, known, None, D, BD)
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, known, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    first, full, edge, last = tiles_of(lo, hi, BN)
    at = (wide_b * Hq + h) * Lq + known
    base, divisor = statistics_of(maximum_ptr + at, total_ptr + at)
    share = tl.where(rows_in, 1 / divisor, 0.0)
    place = tl.load(starts_ptr + wide_b * starts_batch) + rows.to(tl.int64) * row_step
    of_logs, mass = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    distance, row_largest = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    of_keys = (wide_b * Hq + h) * Lk
    for masked in tl.static_range(1, -1, -1):
        for n_tile in range(tiles_in(first, full, edge, last, BN, masked)):
            start = tile_at(n_tile, first, full, edge, BN, masked)
            j = start + tl.arange(0, BN)
            s, _, visible = scores_of(
                q, k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column,
                j, j < Lk if masked else None, rows, rows_in, lo, hi, scale, cap,
                query_ids, key_ids_ptr + wide_b * key_ids_batch,
                mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
                bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
                ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, masked,
                HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
            )  # fmt: skip
            x = exponent(s, base)
            p = tl.exp2(x)
            if HAS_ENTROPY:  # of a row of NaN by its total
                of_logs += tl.sum(p * tl.maximum(x, LEAST), 1)
                mass += tl.sum(p, 1)
            if HAS_DISTANCE:  # exact to 2^24, as a number of float32 is at all
                apart = (place - start.to(tl.int64) * key_step).to(tl.float32)
                steps = (tl.arange(0, BN).to(tl.int64) * key_step).to(tl.float32)
                distance += tl.sum(p * tl.abs(apart[:, None] - steps[None, :]), 1)
            if HAS_ROW_LARGEST:  # of a row of NaN 0
                row_largest = tl.maximum(row_largest, tl.max(tl.where(p == p, p, 0.0), 1))
            if HAS_RECEIVED or HAS_LARGEST:
                w = p * share[:, None]
                if masked or HAS_IDS or HAS_MASK or HAS_EDITS:  # the total may be NaN
                    w = tl.where(visible, w, 0.0)
                mass_of_keys, inside = tl.sum(w, 0), j < Lk
                is_nan = mass_of_keys != mass_of_keys
                tl.atomic_max(undefined_ptr + of_keys + j, is_nan.to(tl.int32),
                              mask=inside & is_nan, sem="relaxed")  # fmt: skip
                if HAS_RECEIVED:
                    fixed = (tl.where(is_nan, 0.0, mass_of_keys) * 1099511627776.0).to(tl.int64)
                    tl.atomic_add(received_ptr + of_keys + j, fixed, mask=inside, sem="relaxed")
                if HAS_LARGEST:  # bits of numbers that are not negative are ordered as they are
                    largest = tl.max(tl.where(w == w, w, 0.0), 0)
                    tl.atomic_max(largest_ptr + of_keys + j, largest.to(tl.int32, bitcast=True),
                                  mask=inside, sem="relaxed")  # fmt: skip
    if HAS_ENTROPY:
        entropy = (mass * tl.log2(divisor) - of_logs) * LN2 / divisor
        tl.store(entropy_ptr + at, entropy, mask=rows_in)
    if HAS_DISTANCE:
        tl.store(distance_ptr + at, distance / divisor, mask=rows_in)
    if HAS_ROW_LARGEST:
        w = row_largest / divisor
        tl.store(row_largest_ptr + at, tl.where(w == w, w, 0.0), mask=rows_in)


@triton.jit(do_not_specialize=["bins", "extent", "start", "length"])
def bin_edges(
    edges_ptr, bins, extent, start, step, length, BM: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """``(bins + 1,)`` int32: the first index of each bin, of cells a step apart from start on."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    edge = n.to(tl.int64) * extent // bins - start
    index = tl.minimum(tl.maximum((edge + step - 1) // step, 0), length)
    tl.store(edges_ptr + n, index.to(tl.int32), mask=n <= bins)


@triton.jit
def _bin_of(index, bins, extent, start, step) -> Any:
    """The bin of an index."""
    cell = start + index.to(tl.int64) * step
    return (((cell + 1) * bins - 1) // extent).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        *OF_LENGTH, "R", "C", "column_extent", "column_start", "row_chunks", "column_chunks",
    ]
)  # fmt: skip
def picture(
    out_ptr, row_edges_ptr, column_edges_ptr, q_ptr, k_ptr, maximum_ptr, total_ptr, lo_ptr, hi_ptr,
    query_ids_ptr, key_ids_ptr, mask_ptr, bias_ptr, ranges_ptr, logs_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    R, C, row_chunks, column_chunks, column_extent, column_start, column_step,
    bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    Hq, group, Lq, Lk, D, edits, scale, cap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, NR: tl.constexpr, NC: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_EDITS: tl.constexpr,
    INTERPRETED: tl.constexpr, HAS_MASS: tl.constexpr,
) -> None:  # fmt: skip
    """Cells of a heatmap, ``(B, Hq, R, row_chunks, C)``, over some rows of a bin each.

    A tile has NR bins of rows and NC of keys, each padded, or a chunk of one. The largest logarithm
    to base 2, −inf where all is masked, inf of NaN; of masses the sum of weights, −1 where all is
    masked.
    """
    WR: tl.constexpr = BM // NR
    WC: tl.constexpr = BN // NC
    h, b = tl.program_id(1), tl.program_id(2)
    kv, wide_b, wide_h = (h // group).to(tl.int64), b.to(tl.int64), h.to(tl.int64)
    r, column = tl.arange(0, BM), tl.arange(0, BN)
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last first, as rows_of_program
    chunk, of_rows = program % row_chunks, program // row_chunks * NR
    row_bin = tl.minimum(of_rows + r // WR, R)
    rows = tl.load(row_edges_ptr + row_bin) + chunk * WR + r % WR
    rows_in = rows < tl.load(row_edges_ptr + tl.minimum(row_bin + 1, R))
    known = tl.minimum(rows, Lq - 1)
    q = rows_of(q_ptr + wide_b * q_batch + wide_h * q_head, q_row, q_column, known, None, D, BD)
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, known, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    at = (wide_b * Hq + h) * Lq + known
    base, divisor = statistics_of(maximum_ptr + at, total_ptr + at)
    share, log_divisor = 1 / divisor, tl.where(rows_in, tl.log2(divisor), float("inf"))
    undefined = rows_in & (divisor != divisor)
    some_rows = tl.max(rows_in.to(tl.int32).reshape(NR, WR), 1) > 0
    # Tiles of bins of keys: those that some row sees, of which all rows see some in full.
    first, last = tl.min(tl.where(rows_in, lo, Lk), 0), tl.max(tl.where(rows_in, hi, 0), 0)
    all_from, all_to = tl.max(tl.where(rows_in, lo, 0), 0), tl.min(tl.where(rows_in, hi, Lk), 0)
    begin = _bin_of(first, C, column_extent, column_start, column_step) // NC
    end = _bin_of(last - 1, C, column_extent, column_start, column_step) // NC + 1
    end = tl.where(first < last, end, begin)
    full = _bin_of(all_from - 1, C, column_extent, column_start, column_step) + 1
    full = tl.cdiv(tl.where(all_from > 0, full, 0), NC)
    edge = _bin_of(all_to, C, column_extent, column_start, column_step) // NC
    edge = tl.where(all_to < Lk, edge, end)
    begin, end, full, edge = (
        begin * column_chunks, end * column_chunks, full * column_chunks, edge * column_chunks,
    )  # fmt: skip
    full = tl.minimum(tl.maximum(full, begin), end)
    edge = tl.minimum(tl.maximum(edge, full), end)
    cell, seen = tl.zeros((NR, NC), tl.float32), tl.zeros((NR, NC), tl.int32)
    of_cells = (wide_b * Hq + h) * R
    cell_row, cell_column = of_rows + tl.arange(0, NR), tl.arange(0, NC)
    for masked in tl.static_range(1, -1, -1):
        for n_tile in range(tiles_in(begin, full, edge, end, 1, masked)):
            tile = tile_at(n_tile, begin, full, edge, 1, masked)
            of_columns, part = tile // column_chunks * NC, tile % column_chunks
            key_bin = tl.minimum(of_columns + column // WC, C)
            j = tl.load(column_edges_ptr + key_bin) + part * WC + column % WC
            after = tl.load(column_edges_ptr + tl.minimum(key_bin + 1, C))
            inside = j < after
            j = tl.maximum(tl.minimum(j, after - 1), 0)  # the last key again, where there is none
            s, _, visible = scores_of(
                q, k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column,
                j, None, rows, rows_in, lo, hi, scale, cap,
                query_ids, key_ids_ptr + wide_b * key_ids_batch,
                mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
                bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
                ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, masked,
                HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
            )  # fmt: skip
            x = exponent(s, base)
            some_keys = tl.max(inside.to(tl.int32).reshape(NC, WC), 1) > 0
            some = some_rows[:, None] & some_keys[None, :]
            if HAS_MASS:
                w = tl.where(rows_in[:, None] & inside[None, :], tl.exp2(x) * share[:, None], 0.0)
                if masked or HAS_IDS or HAS_MASK or HAS_EDITS:
                    visible &= inside[None, :]
                    w = tl.where(visible, w, 0.0)
                    some = tl.max(tl.max(visible.to(tl.int32).reshape(NR, WR, NC, WC), 3), 1) > 0
                own = tl.sum(tl.sum(w.reshape(NR, WR, NC, WC), 3), 1)
                cell = tl.where(part == 0, own, cell + own)
                seen = tl.where(part == 0, some.to(tl.int32), tl.maximum(seen, some.to(tl.int32)))
                found = tl.where(seen > 0, cell, -1.0)
            else:  # a key that is there twice is no stronger
                y = x - log_divisor[:, None]
                if masked or HAS_IDS or HAS_MASK or HAS_EDITS:
                    y = tl.where(visible, tl.maximum(y, LOWEST), -float("inf"))
                    y = tl.where(visible & undefined[:, None], float("inf"), y)
                    own = tl.max(tl.max(y.reshape(NR, WR, NC, WC), 3), 1)
                else:
                    y = tl.where(undefined[:, None], float("inf"), y)
                    own = tl.max(tl.max(y.reshape(NR, WR, NC, WC), 3), 1)
                    own = tl.maximum(tl.where(own == own, own, LOWEST), LOWEST)
                own = tl.where(some, own, -float("inf"))
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

    They are found by their exponents, and put in order as integers, the bits of a weight above what
    is left from its key to 2^31.
    """
    h, b = tl.program_id(1), tl.program_id(2)
    kv, wide_b, wide_h = (h // group).to(tl.int64), b.to(tl.int64), h.to(tl.int64)
    place = rows_of_program(BM)
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
    undefined = divisor != divisor
    # As many keys as are wanted, seen or not.
    first = tl.minimum(tl.min(lo, 0), tl.maximum(Lk - k, 0)) // BN * BN
    last = tl.maximum(tl.max(hi, 0), tl.minimum(first + k + BN, Lk))
    best = tl.zeros((BM, KEPT), tl.float32) - float("inf")
    best_keys = tl.zeros((BM, KEPT), tl.int32) + tl.arange(0, KEPT)[None, :] + NO_KEY
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
        x = tl.where(visible & undefined[:, None], float("inf"), exponent(s, base))
        x = tl.where((j < Lk)[None, :], tl.maximum(x, LEAST), -float("inf"))
        weakest, strongest = tl.min(best, 1), tl.max(x, 1)
        while tl.max((strongest > weakest).to(tl.int32), 0) > 0:
            key = tl.min(tl.where(x == strongest[:, None], j[None, :], NO_KEY), 1)
            # The last of the weakest gives its place.
            given_up = tl.max(tl.where(best == weakest[:, None], best_keys, -1), 1)
            is_given_up = (best_keys == given_up[:, None]) & (strongest > weakest)[:, None]
            best = tl.where(is_given_up, strongest[:, None], best)
            best_keys = tl.where(is_given_up, key[:, None], best_keys)
            x = tl.where(j[None, :] == key[:, None], -float("inf"), x)
            weakest, strongest = tl.min(best, 1), tl.max(x, 1)
    # Rounded as 1 / total is, by which rows are chosen.
    w = tl.div_rn(tl.exp2(best), tl.zeros((BM, KEPT), tl.float32) + divisor[:, None])
    w = tl.where(best == LEAST, 0.0, tl.where(w == w, w, float("nan")))  # NaN of one sign: first
    found = w.to(tl.int32, bitcast=True).to(tl.int64) << 32
    found = tl.where(best == -float("inf"), -1099511627776, found)
    found = found | (0x7FFFFFFF - best_keys).to(tl.int64)
    for n in range(k):
        strongest = tl.max(found, 1)
        found = tl.where(found == strongest[:, None], -1099511627776, found)
        value = (strongest >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        to = (of_places + place) * k + n
        tl.store(values_ptr + to, value, mask=rows_in)
        tl.store(keys_ptr + to, 0x7FFFFFFF - (strongest & 0x7FFFFFFF), mask=rows_in)
