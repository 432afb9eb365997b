"""Gradients of attention on a GPU, from the row statistics: the kernels, in Triton.

Two kernels, so that no sum is of several programs, and its bits are the same in every run: one has
some queries of a head and goes over their keys, the other has some keys and goes over the queries
of all heads that share them.

Source: Dao et al. 2022.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from regard._backends.triton_jit import (
    OF_LENGTH,
    bounds_of,
    dot,
    exponent,
    kept_of,
    rows_of,
    rows_of_program,
    scores_of,
    statistics_of,
    tile_at,
    tiles_in,
    tiles_of,
)

CHUNK = tl.constexpr(1024)  # of rows, of which a program of keys looks for those that see them


@triton.jit
def _finite(x) -> Any:
    """A NaN that is seen comes back through the scores; elsewhere it would only spread."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def _are_finite(sizes_ptr, b) -> Any:
    """Whether query, key and gradient of an element of the batch are, by ``triton_jit.sizes``."""
    largest = tl.maximum(tl.load(sizes_ptr + 3 * b), tl.load(sizes_ptr + 3 * b + 1))
    return tl.maximum(largest, tl.load(sizes_ptr + 3 * b + 2)) < 2139095040  # the bits of inf


@triton.jit
def _power_below(x) -> Any:
    """The largest power of 2 that is not above a size; of one below 2^-126 it is 0."""
    x = tl.max(tl.abs(tl.zeros((1,), tl.float32) + x), 0)  # in the interpreter it is a Python float
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _factors(scale, units_ptr, b, keep, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
             HAS_EDITS: tl.constexpr, IS_HALF: tl.constexpr) -> Any:  # fmt: skip
    """Powers of 2 for weights and slopes, and what is left of the scale for gradients.

    Of the scale one is in the slopes before they are multiplied with a key or query, as the formula
    has it: what a scale of 0 meets does not overflow. float16 has few numbers near 0, so there
    weights and slopes are as large as they may be.

    Returns:
        Of weights; of slopes, in relation to those weights; of the gradients.
    """
    if not (HAS_CAP or HAS_BIAS or HAS_EDITS):  # the unit of scores is in that of a plain product
        scale = scale * 0.6931471805599453
    of_weights, of_slopes = 1.0, _power_below(scale)
    if IS_HALF:
        of_weights = _power_below(16384 / keep)
        of_slopes = tl.load(units_ptr + b)
    rest = tl.where(of_slopes > 0, scale / of_slopes, 0.0)
    return of_weights, of_slopes / of_weights, rest


@triton.jit
def _slopes(s, bent, visible, cap, base, share, dp, delta, factor, kept, keep,
            MASKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
            ) -> Any:  # fmt: skip
    """Weights as values have them, and the gradients of the scores, of a tile.

    Args:
        share: 1 / total of the rows, times the factor of weights.
        delta: times the factor of slopes.
        factor: of slopes, which is exact.
        MASKED: whether some row may not see some key.
    """
    w = tl.exp2(exponent(s, base)) * share[:, None]
    if MASKED:  # the total may be NaN, and what would reach a masked score
        w = tl.where(visible, w, 0.0)
    given = w
    if HAS_DROPOUT:
        scaled = tl.where(kept, keep, 0.0)  # a factor: NaN stays NaN
        given, dp = w * scaled, dp * scaled
    ds = w * tl.fma(dp, factor, -delta[:, None])
    if HAS_CAP:
        of_cap = bent * (1 / cap)
        ds = ds * (1 - of_cap * of_cap)
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return given, ds


@triton.jit(do_not_specialize=[*OF_LENGTH, "first_row", "first_key"])
def of_queries(
    dq_ptr, sizes_ptr, units_ptr, q_ptr, k_ptr, v_ptr, grad_ptr,
    maximum_ptr, total_ptr, delta_ptr, lo_ptr, hi_ptr, query_ids_ptr, key_ids_ptr,
    mask_ptr, bias_ptr, ranges_ptr, logs_ptr, seed_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column, grad_batch, grad_head, grad_row, grad_column,
    bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    Hq, group, Lq, Lk, D, Dv, edits, scale, cap,
    threshold, keep, first_row, row_step, first_key, key_step,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    CLEAN: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_EDITS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, EACH: tl.constexpr, IS_HALF: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """``(B, Hq, Lq, D)``, contiguous: the gradient of some queries of one head.

    ``CLEAN``: the kernel for keys that are not finite, which the other leaves to it.
    """
    h, b = tl.program_id(1), tl.program_id(2)
    if _are_finite(sizes_ptr, b) == CLEAN:
        return
    kv, wide_b, wide_h = (h // group).to(tl.int64), b.to(tl.int64), h.to(tl.int64)
    rows, d = rows_of_program(BM), tl.arange(0, BD)
    rows_in, known = rows < Lq, tl.minimum(rows, Lq - 1)
    q = rows_of(q_ptr + wide_b * q_batch + wide_h * q_head, q_row, q_column, known, None, D, BD)
    do = rows_of(grad_ptr + wide_b * grad_batch + wide_h * grad_head, grad_row, grad_column,
                 known, None, Dv, BDV)  # fmt: skip
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, known, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    first, full, edge, last = tiles_of(lo, hi, BN)
    at = (wide_b * Hq + h) * Lq + known
    base, divisor = statistics_of(maximum_ptr + at, total_ptr + at)
    of_weights, factor, rest = _factors(
        scale, units_ptr, b, keep, HAS_CAP, HAS_BIAS, HAS_EDITS, IS_HALF
    )
    share, delta = of_weights / divisor, tl.load(delta_ptr + at) * factor
    dq, n = tl.zeros((BM, BD), tl.float32), b * Hq + h
    for masked in tl.static_range(1, -1, -1):
        for n_tile in range(tiles_in(first, full, edge, last, BN, masked)):
            start = tile_at(n_tile, first, full, edge, BN, masked)
            j = start + tl.arange(0, BN)
            inside = j < Lk if masked else None
            s, bent, visible = scores_of(
                q, k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column,
                j, inside, rows, rows_in, lo, hi, scale, cap,
                query_ids, key_ids_ptr + wide_b * key_ids_batch,
                mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
                bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
                ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, masked,
                HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
            )  # fmt: skip
            v = rows_of(v_ptr + wide_b * v_batch + kv * v_head, v_row, v_column, j, inside, Dv, BDV)
            dp, kept = dot(do, tl.trans(v), INTERPRETED), visible
            if HAS_DROPOUT:
                kept = kept_of(rows, start, n, seed_ptr, threshold, first_row, row_step,
                               first_key, key_step, BM, BN, EACH)  # fmt: skip
            _, ds = _slopes(
                s, bent, visible, cap, base, share, dp, delta, factor, kept, keep,
                masked or HAS_IDS or HAS_MASK or HAS_EDITS, HAS_CAP, HAS_DROPOUT,
            )  # fmt: skip
            k = rows_of(k_ptr + wide_b * k_batch + kv * k_head, k_row, k_column, j, inside, D, BD)
            if CLEAN:
                k = _finite(k).to(k.dtype)
            dq += dot(ds.to(k.dtype), k, INTERPRETED)
    to = (wide_b * Hq + h) * Lq + rows.to(tl.int64)
    tl.store(
        dq_ptr + to[:, None] * D + d[None, :], (dq * rest).to(dq_ptr.dtype.element_ty),
        mask=rows_in[:, None] & (d < D)[None, :],
    )  # fmt: skip


@triton.jit
def _seeing_rows(lo_ptr, hi_ptr, first_key, end_key, Lq, Lk, HAS_BOUNDS: tl.constexpr) -> Any:
    """Rows that see some keys: the first, those from begin to end, which see all, and the last.

    None sees all of a tile that ends beyond the keys.

    Returns:
        First, begin, end, last; end and last are after those.
    """
    first, begin, last = 0, 0, Lq
    end = tl.where(end_key <= Lk, Lq, 0)
    if HAS_BOUNDS:
        seeing, seen = tl.full((CHUNK,), 1073741824, tl.int32), tl.zeros((CHUNK,), tl.int32)
        for start in range(0, Lq, CHUNK):
            rows = start + tl.arange(0, CHUNK)
            lo = tl.load(lo_ptr + rows, mask=rows < Lq, other=0)
            hi = tl.load(hi_ptr + rows, mask=rows < Lq, other=0)
            meets = (lo < end_key) & (hi > first_key) & (lo < hi)
            seeing = tl.minimum(seeing, tl.where(meets, rows, 1073741824))
            seen = tl.maximum(seen, tl.where(meets, rows + 1, 0))
        last = tl.max(seen, 0)
        first = tl.minimum(tl.min(seeing, 0), last)
        # Those around the middle: of order, windows and lengths there is one such run of rows.
        middle = (first + last) // 2
        before, after = tl.zeros((CHUNK,), tl.int32), tl.full((CHUNK,), 1073741824, tl.int32)
        for start in range(first // CHUNK * CHUNK, last, CHUNK):
            rows = start + tl.arange(0, CHUNK)
            lo = tl.load(lo_ptr + rows, mask=rows < Lq, other=0)
            hi = tl.load(hi_ptr + rows, mask=rows < Lq, other=0)
            lacks = (lo > first_key) | (hi < end_key)
            before = tl.maximum(before, tl.where(lacks & (rows <= middle), rows + 1, 0))
            after = tl.minimum(after, tl.where(lacks & (rows > middle), rows, 1073741824))
        begin = tl.maximum(tl.max(before, 0), first)
        end = tl.maximum(tl.minimum(tl.min(after, 0), last), begin)
    return first, begin, end, last


@triton.jit(do_not_specialize=[*OF_LENGTH, "first_row", "first_key"])
def of_keys(
    dk_ptr, dv_ptr, sizes_ptr, units_ptr, q_ptr, k_ptr, v_ptr, grad_ptr,
    maximum_ptr, total_ptr, delta_ptr, lo_ptr, hi_ptr, query_ids_ptr, key_ids_ptr,
    mask_ptr, bias_ptr, ranges_ptr, logs_ptr, seed_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column, grad_batch, grad_head, grad_row, grad_column,
    bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    Hq, group, Lq, Lk, D, Dv, edits, scale, cap,
    threshold, keep, first_row, row_step, first_key, key_step,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    CLEAN: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_EDITS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, EACH: tl.constexpr, IS_HALF: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """``(B, Hkv, Lk, D)`` and ``(B, Hkv, Lk, Dv)``, contiguous: those of some keys and values.

    ``CLEAN``: the kernel for queries and gradients of the output that are not finite, which reach
    what these queries see and no more; the other leaves these elements of the batch to it.
    """
    kv, b = tl.program_id(1), tl.program_id(2)
    if _are_finite(sizes_ptr, b) == CLEAN:
        return
    wide_b, wide_kv = b.to(tl.int64), kv.to(tl.int64)
    j, d, dv = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    inside = j < Lk
    k_ptr += wide_b * k_batch + wide_kv * k_head
    v = rows_of(v_ptr + wide_b * v_batch + wide_kv * v_head, v_row, v_column, j, inside, Dv, BDV)
    of_batch = wide_b * bounds_batch
    start = tl.program_id(0) * BN
    first, begin, end, last = _seeing_rows(
        lo_ptr + of_batch, hi_ptr + of_batch, start, start + BN, Lq, Lk, HAS_BOUNDS,
    )  # fmt: skip
    # Tiles of rows, of which those from begin to end see all of the keys.
    first, end_row = first // BM * BM, last
    last = tl.maximum(tl.cdiv(last, BM) * BM, first)
    begin = tl.minimum(tl.cdiv(begin, BM) * BM, last)
    end = tl.maximum(end // BM * BM, begin)
    dk, dvalue = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BDV), tl.float32)
    up, down = tl.zeros((BN, BDV), tl.float32), tl.zeros((BN, BDV), tl.float32)
    undefined = tl.zeros((BN, BDV), tl.float32)
    of_weights, factor, rest = _factors(
        scale, units_ptr, b, keep, HAS_CAP, HAS_BIAS, HAS_EDITS, IS_HALF
    )
    for g in range(group):
        h = kv * group + g
        wide_h, n = h.to(tl.int64), b * Hq + h
        q_of_head = q_ptr + wide_b * q_batch + wide_h * q_head
        grad_of_head = grad_ptr + wide_b * grad_batch + wide_h * grad_head
        of_head = (wide_b * Hq + h) * Lq
        for masked in tl.static_range(1, -1, -1):
            for n_tile in range(tiles_in(first, begin, end, last, BM, masked)):
                rows = tile_at(n_tile, first, begin, end, BM, masked) + tl.arange(0, BM)
                rows_in, known = rows < end_row, tl.minimum(rows, Lq - 1)
                q = rows_of(q_of_head, q_row, q_column, known, None, D, BD)
                do = rows_of(grad_of_head, grad_row, grad_column, known,
                             rows_in if masked else None, Dv, BDV)  # fmt: skip
                lo, hi, query_ids = bounds_of(
                    lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch,
                    rows, known, Lk, BM, HAS_BOUNDS, HAS_IDS,
                )  # fmt: skip
                base, divisor = statistics_of(
                    maximum_ptr + of_head + known, total_ptr + of_head + known
                )
                share, delta = of_weights / divisor, tl.load(delta_ptr + of_head + known) * factor
                s, bent, visible = scores_of(
                    q, k_ptr, k_row, k_column, j, inside if masked else None, rows, rows_in,
                    lo, hi, scale, cap, query_ids, key_ids_ptr + wide_b * key_ids_batch,
                    mask_ptr + wide_b * mask_batch + wide_h * mask_head, mask_row, mask_key,
                    bias_ptr + wide_b * bias_batch + wide_h * bias_head, bias_row, bias_key,
                    ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, masked,
                    HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
                )  # fmt: skip
                dp, kept = dot(do, tl.trans(v), INTERPRETED), visible
                if HAS_DROPOUT:
                    kept = kept_of(rows, start, n, seed_ptr, threshold, first_row, row_step,
                                   first_key, key_step, BM, BN, EACH)  # fmt: skip
                w, ds = _slopes(
                    s, bent, visible, cap, base, share, dp, delta, factor, kept, keep,
                    masked or HAS_IDS or HAS_MASK or HAS_EDITS, HAS_CAP, HAS_DROPOUT,
                )  # fmt: skip
                if CLEAN:
                    x = do.to(tl.float32)
                    is_nan, infinite = x != x, tl.abs(x) == float("inf")
                    x = tl.where(is_nan | infinite, 0.0, x)
                    dvalue += dot(tl.trans(w), x, INTERPRETED)
                    some = tl.trans((w > 0).to(tl.float32))
                    none = tl.trans((visible & (w == 0)).to(tl.float32))
                    seen = tl.trans(visible.to(tl.float32))
                    up += dot(some, (do == float("inf")).to(tl.float32), INTERPRETED)
                    down += dot(some, (do == -float("inf")).to(tl.float32), INTERPRETED)
                    undefined += dot(seen, is_nan.to(tl.float32), INTERPRETED)
                    undefined += dot(none, infinite.to(tl.float32), INTERPRETED)
                    undefined += tl.max((w != w).to(tl.float32), 0)[:, None]
                else:
                    dvalue += dot(tl.trans(w).to(do.dtype), do, INTERPRETED)
                if CLEAN:
                    q = _finite(q).to(q.dtype)
                dk += dot(tl.trans(ds).to(q.dtype), q, INTERPRETED)
    if CLEAN:
        dvalue = tl.where(up > 0, float("inf"), tl.where(down > 0, -float("inf"), dvalue))
        undefined += up * down
        dvalue = tl.where(undefined > 0, float("nan"), dvalue)
    to = (wide_b * tl.num_programs(1) + kv) * Lk + j.to(tl.int64)
    tl.store(
        dk_ptr + to[:, None] * D + d[None, :], (dk * rest).to(dk_ptr.dtype.element_ty),
        mask=inside[:, None] & (d < D)[None, :],
    )  # fmt: skip
    tl.store(
        dv_ptr + to[:, None] * Dv + dv[None, :], (dvalue / of_weights).to(dv_ptr.dtype.element_ty),
        mask=inside[:, None] & (dv < Dv)[None, :],
    )  # fmt: skip
