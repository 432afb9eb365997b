"""Attention on a GPU: the kernels, in Triton.

One program computes some rows of one head: online softmax (FlashAttention) over tiles of keys. A
query sees the keys from ``lo`` to ``hi``; tiles inside of all its rows' intervals are not masked.
Scores are in units of ln 2: exponentials are powers of 2, and one product scales a score. The
maximum and total of a row are of its final scores and the sink.

Where a masked value is not finite, NaN and inf must reach the rows that see them and no others.
Whether any is, the device alone knows: two kernels are launched, and the second returns at once for
each element of the batch that the first found finite.

Source: Milakov & Gimelshein 2018; Dao et al. 2022; Salmon et al. 2011 for the dropout.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# For a new length all would be compiled anew, were it a multiple of 16 or not.
OF_LENGTH = ["Lq", "Lk", "edits", "bounds_batch", "query_ids_batch", "key_ids_batch"]


@triton.jit
def dot(x, y, INTERPRETED: tl.constexpr) -> Any:
    """``x @ y``; the interpreter multiplies the bits of bfloat16 as if they were integers."""
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def rows_of_program(BM: tl.constexpr) -> Any:
    """``(BM,)``: the rows of a program; the last first, which in causal order see the most keys."""
    return (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)


@triton.jit
def rows_of(x_ptr, row, column, places, inside, count, WIDTH: tl.constexpr) -> Any:
    """``(places, WIDTH)``: rows of ``count`` numbers of a matrix, and 0 beside them.

    Args:
        inside: which places have a row, the others 0; None: all have one.
    """
    d = tl.arange(0, WIDTH)
    mask = (d < count)[None, :]
    if inside is not None:
        mask &= inside[:, None]
    at = places[:, None].to(tl.int64) * row + d[None, :].to(tl.int64) * column
    return tl.load(x_ptr + at, mask=mask, other=0.0)


@triton.jit
def statistics_of(maximum_ptr, total_ptr) -> Any:
    """What exponents of rows are relative to, and what divides their exponentials."""
    maximum, total = tl.load(maximum_ptr), tl.load(total_ptr)
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    return base, tl.where(total == 0, 1.0, total)


@triton.jit
def _tanh(x) -> Any:
    """From exp2, and as a polynomial where 1 − tanh would cancel."""
    size = tl.abs(x)
    of_large = 1 - 2 / (tl.exp2(size * 2.8853900817779268) + 1)
    y = x * x
    p = tl.fma(y, -1382.0 / 155925, 62.0 / 2835)
    p = tl.fma(p, y, -17.0 / 315)
    p = tl.fma(p, y, 2.0 / 15)
    p = tl.fma(p, y, -1.0 / 3)
    of_small = tl.fma(x * y, p, x)
    return tl.where(size >= 0.25, tl.where(x < 0, -of_large, of_large), of_small)


@triton.jit
def exponent(s, maximum) -> Any:
    """Of 2, of scores in relation to the maxima of their rows: of the maximum itself exactly 0.

    So a row's largest weight is 1 / total. The compiler may not fuse the product by which scores
    are scaled with the difference (``WITHOUT_FUSION``), which would then be of unrounded scores.
    """
    return s - maximum[:, None]


@triton.jit
def kept_of(
    rows, start, n, seed_ptr, threshold, first_row, row_step, first_key, key_step,
    BM: tl.constexpr, BN: tl.constexpr, EACH: tl.constexpr,
) -> Any:  # fmt: skip
    """Bool ``(BM, BN)``: the weights that dropout keeps; see ``regard._backends.dropout``."""
    seed = tl.load(seed_ptr)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    i = (rows.to(tl.int64) * row_step + first_row).to(tl.uint32)[:, None]
    if EACH:
        j = (start + tl.arange(0, BN)).to(tl.int64)[None, :] * key_step + first_key
        zero = tl.zeros((BM, BN), tl.uint32)
        counter, word = (j // 4).to(tl.uint32), (j % 4).to(tl.int32)
    else:  # four keys of each counter, of which the first is a multiple of 4
        zero = tl.zeros((BM, BN // 4), tl.uint32)
        counter = (start // 4 + tl.arange(0, BN // 4)).to(tl.uint32)[None, :]
        counter += (first_key // 4).to(tl.uint32)
    counter, i, head = counter + zero, i + zero, n.to(tl.uint32) + zero
    a, b, c, d = tl.philox_impl(counter, i, head, zero, low + zero, high + zero, 10)
    if EACH:
        words = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    else:
        words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return words.to(tl.int64) >= threshold


@triton.jit
def scores_of(
    q, k_ptr, k_row, k_column, j, inside, rows, rows_in, lo, hi, scale, cap,
    query_ids, key_ids_ptr, mask_ptr, mask_row, mask_key, bias_ptr, bias_row, bias_key,
    ranges_ptr, logs_ptr, edits, h, D,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EDGE: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_EDITS: tl.constexpr, INTERPRETED: tl.constexpr,
) -> Any:  # fmt: skip
    """Scores ``(BM, BN)`` in units of ln 2, −inf where masked; before the bias; who sees whom.

    Args:
        j, inside: the keys of the tile, and which of them are there; None: all are.
        EDGE: whether a row may not see a key by its interval. Where that is False and there are no
            other masks, rows that are not there have scores too.
    """
    k = rows_of(k_ptr, k_row, k_column, j, inside, D, BD)
    s = dot(q, tl.trans(k), INTERPRETED)
    pairs = rows_in[:, None] & (j == j)[None, :]
    if inside is not None:
        pairs = rows_in[:, None] & inside[None, :]
    visible = pairs
    if EDGE:  # as one comparison, of how far a key is in an interval; none goes beyond the keys
        seen = tl.where(rows_in, tl.maximum(hi - lo, 0), 0).to(tl.uint32, bitcast=True)
        visible = (j[None, :] - lo[:, None]).to(tl.uint32, bitcast=True) < seen[:, None]
    if HAS_IDS:
        if inside is None:
            key_ids = tl.load(key_ids_ptr + j)
        else:
            key_ids = tl.load(key_ids_ptr + j, mask=inside, other=0)
        visible &= query_ids[:, None] == key_ids[None, :]
    at_row, at_key = rows[:, None].to(tl.int64), j[None, :].to(tl.int64)
    if HAS_MASK:
        at = at_row * mask_row + at_key * mask_key
        visible &= tl.load(mask_ptr + at, mask=pairs, other=0) != 0
    s = s * scale  # of a plain product in units of ln 2 already
    if HAS_CAP:
        s = cap * _tanh(s * (1 / cap))
    bent = s
    if HAS_BIAS:
        at = at_row * bias_row + at_key * bias_key
        s += tl.load(bias_ptr + at, mask=pairs, other=0.0).to(tl.float32)
    if HAS_EDITS:
        added = tl.zeros((BM, BN), tl.float32)
        for n in range(edits):
            r = ranges_ptr + 6 * n
            in_head = (tl.load(r) <= h) & (h < tl.load(r + 1))
            end = tl.where(in_head, tl.load(r + 3), 0)  # no row of another head
            in_rows = (tl.load(r + 2) <= rows) & (rows < end)
            in_keys = (tl.load(r + 4) <= j) & (j < tl.load(r + 5))
            added += tl.where(in_rows[:, None] & in_keys[None, :], tl.load(logs_ptr + n), 0.0)
        visible &= added > -float("inf")
        s += tl.where(visible, added, 0.0)
    if HAS_CAP or HAS_BIAS or HAS_EDITS:
        s = s * 1.4426950408889634
    if EDGE or HAS_IDS or HAS_MASK or HAS_EDITS:
        s = tl.where(visible, s, -float("inf"))
    return s, bent, visible


@triton.jit
def bounds_of(
    lo_ptr, hi_ptr, query_ids_ptr, b, bounds_batch, query_ids_batch, rows, known, Lk,
    BM: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_IDS: tl.constexpr,
) -> Any:  # fmt: skip
    """For each row the first key that it may see, the one after the last, and its segment."""
    lo, hi, query_ids = tl.zeros((BM,), tl.int32), tl.zeros((BM,), tl.int32) + Lk, rows
    if HAS_BOUNDS:
        lo = tl.load(lo_ptr + b * bounds_batch + known)
        hi = tl.load(hi_ptr + b * bounds_batch + known)
    if HAS_IDS:
        query_ids = tl.load(query_ids_ptr + b * query_ids_batch + known)
    return lo, hi, query_ids


@triton.jit
def tiles_of(lo, hi, BN: tl.constexpr) -> Any:
    """Where tiles of keys begin, are seen by all rows, are so no more, and end."""
    first, last = tl.min(lo, 0) // BN * BN, tl.max(hi, 0)
    last = tl.maximum(first, tl.cdiv(last, BN) * BN)
    full = tl.minimum(tl.cdiv(tl.max(lo, 0), BN) * BN, last)
    edge = tl.maximum(tl.minimum(tl.min(hi, 0) // BN * BN, last), full)
    return first, full, edge, last


@triton.jit
def tiles_in(first, full, edge, last, BN: tl.constexpr, MASKED: tl.constexpr) -> Any:
    """How many tiles there are before and after those that all rows see, or of those."""
    count = (edge - full) // BN
    if MASKED:
        count = (last - first) // BN - count
    return count


@triton.jit
def tile_at(n, first, full, edge, BN: tl.constexpr, MASKED: tl.constexpr) -> Any:
    """Where the n-th of them begins."""
    start = full + n * BN
    if MASKED:
        start = first + n * BN
        start = tl.where(start < full, start, start - full + edge)
    return start


@triton.jit
def shrink_of(maximum, base) -> Any:
    """What becomes of exponentials relative to a maximum where that is the base."""
    return tl.exp2(tl.where(maximum == -float("inf"), -float("inf"), maximum - base))


@triton.jit
def _softmax_step(s, maximum, total, rest) -> Any:
    """The exponentials of a tile, by how much earlier ones shrink, and the new row statistics."""
    largest = tl.max(s, 1)  # of numbers; a row of NaN keeps −inf, and its total tells
    largest = tl.maximum(maximum, tl.where(largest == largest, largest, -float("inf")))
    base = tl.where(largest == -float("inf"), 0.0, largest)
    p = tl.exp2(exponent(s, base))
    shrink = shrink_of(maximum, base)
    # Compensated: a long row has thousands of tiles. Source: Kahan 1965.
    y = tl.sum(p, 1) - rest * shrink
    before = total * shrink
    total = before + y
    rest = (total - before) - y
    return p, shrink, largest, total, tl.where(rest == rest, rest, 0.0)


@triton.jit
def add_sink(maximum, total, sink) -> Any:
    """Maximum and total with the sink's, and by how much the sum of values shrinks."""
    empty = (total == 0) & (maximum == -float("inf"))
    largest = tl.where(empty, maximum, tl.maximum(maximum, sink))
    base = tl.where(largest == -float("inf"), 0.0, largest)
    shrink = tl.where(maximum == -float("inf"), 1.0, shrink_of(maximum, base))
    return largest, total * shrink + tl.where(empty, 0.0, shrink_of(sink, base)), shrink


@triton.jit
def attend_keys(
    q, k_ptr, k_row, k_column, v_ptr, v_row, v_column, first, full, edge, last,
    rows, rows_in, lo, hi, query_ids, key_ids_ptr, mask_ptr, mask_row, mask_key,
    bias_ptr, bias_row, bias_key, ranges_ptr, logs_ptr, edits, seed_ptr, h, n,
    Lk, D, Dv, scale, cap, threshold, keep, first_row, row_step, first_key, key_step,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    HAS_OUTPUT: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_EDITS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, EACH: tl.constexpr, INTERPRETED: tl.constexpr,
) -> Any:  # fmt: skip
    """Sum of values times exponentials, and the row statistics, of the tiles from first to last.

    Args:
        h, n: the head, also counted through the batch: a number, or ``(BM,)`` and ``(BM, 1)``,
            with pointers ``(BM, 1)`` to masks and biases, where rows are of several heads.
    """
    maximum = tl.zeros((BM,), tl.float32) - float("inf")
    total, rest = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BDV), tl.float32)
    for masked in tl.static_range(1, -1, -1):
        for n_tile in range(tiles_in(first, full, edge, last, BN, masked)):
            start = tile_at(n_tile, first, full, edge, BN, masked)
            j = start + tl.arange(0, BN)
            inside = j < Lk if masked else None
            s, _, _ = scores_of(
                q, k_ptr, k_row, k_column, j, inside, rows, rows_in, lo, hi, scale, cap,
                query_ids, key_ids_ptr, mask_ptr, mask_row, mask_key, bias_ptr, bias_row, bias_key,
                ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, masked,
                HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
            )  # fmt: skip
            p, shrink, maximum, total, rest = _softmax_step(s, maximum, total, rest)
            if HAS_OUTPUT:
                if HAS_DROPOUT:
                    kept = kept_of(rows, start, n, seed_ptr, threshold, first_row, row_step,
                                   first_key, key_step, BM, BN, EACH)  # fmt: skip
                    p = tl.where(kept, p * keep, 0.0)
                v = rows_of(v_ptr, v_row, v_column, j, inside, Dv, BDV)
                acc = acc * shrink[:, None] + dot(p.to(v.dtype), v, INTERPRETED)
    return acc, maximum, total


@triton.jit
def clear_unless_finite(flag_ptr, acc) -> Any:
    """Clears a flag where a sum of values is not finite, whether its row sees why or not."""
    finite = tl.min(tl.min((tl.abs(acc) < float("inf")).to(tl.int32), 1), 0)
    tl.atomic_min(flag_ptr, finite, mask=finite == 0, sem="relaxed")


@triton.jit
def _exact_output(
    q, k_ptr, k_row, k_column, v_ptr, v_row, v_column, first, last,
    rows, rows_in, lo, hi, query_ids, key_ids_ptr, mask_ptr, mask_row, mask_key,
    bias_ptr, bias_row, bias_key, ranges_ptr, logs_ptr, edits, seed_ptr, h, n,
    Lk, D, Dv, scale, cap, threshold, keep, first_row, row_step, first_key, key_step,
    maximum, divisor, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_EDITS: tl.constexpr, HAS_DROPOUT: tl.constexpr, EACH: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> Any:  # fmt: skip
    """The output of values that may not be finite, by the final weights."""
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    up, down = tl.zeros((BM, BDV), tl.float32), tl.zeros((BM, BDV), tl.float32)
    undefined, acc = tl.zeros((BM, BDV), tl.float32), tl.zeros((BM, BDV), tl.float32)
    for start in range(first, last, BN):
        j = start + tl.arange(0, BN)
        s, _, visible = scores_of(
            q, k_ptr, k_row, k_column, j, j < Lk, rows, rows_in, lo, hi, scale, cap,
            query_ids, key_ids_ptr, mask_ptr, mask_row, mask_key, bias_ptr, bias_row, bias_key,
            ranges_ptr, logs_ptr, edits, h, D, BM, BN, BD, True,
            HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS, INTERPRETED,
        )  # fmt: skip
        w = tl.where(visible, tl.exp2(exponent(s, base)) / divisor[:, None], 0.0)
        if HAS_DROPOUT:
            kept = kept_of(rows, start, n, seed_ptr, threshold, first_row, row_step,
                           first_key, key_step, BM, BN, EACH)  # fmt: skip
            w = tl.where(kept, w * keep, 0.0)
        v = rows_of(v_ptr, v_row, v_column, j, j < Lk, Dv, BDV).to(tl.float32)
        is_nan, infinite = v != v, tl.abs(v) == float("inf")
        acc += dot(w, tl.where(is_nan | infinite, 0.0, v), INTERPRETED)
        some, none = (w > 0).to(tl.float32), (visible & (w == 0)).to(tl.float32)
        up += dot(some, (v == float("inf")).to(tl.float32), INTERPRETED)
        down += dot(some, (v == -float("inf")).to(tl.float32), INTERPRETED)
        undefined += dot(visible.to(tl.float32), is_nan.to(tl.float32), INTERPRETED)
        undefined += dot(none, infinite.to(tl.float32), INTERPRETED)
    acc = tl.where(up > 0, float("inf"), tl.where(down > 0, -float("inf"), acc))
    undefined += up * down
    return tl.where(undefined > 0, float("nan"), acc)


@triton.jit(do_not_specialize=[*OF_LENGTH, "first_row", "first_key"])
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, maximum_ptr, total_ptr, flag_ptr, lo_ptr, hi_ptr,
    query_ids_ptr, key_ids_ptr, mask_ptr, bias_ptr, ranges_ptr, logs_ptr, seed_ptr, sinks_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column, out_batch, out_head, out_row, out_column,
    flag_batch, bounds_batch, query_ids_batch, key_ids_batch,
    mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row, bias_key,
    Hq, group, Lq, Lk, D, Dv, edits, scale, cap,
    threshold, keep, first_row, row_step, first_key, key_step, largest,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, CLEAN: tl.constexpr,
    HAS_FLAG: tl.constexpr, HAS_SIZES: tl.constexpr, HAS_OUTPUT: tl.constexpr,
    HAS_STATISTICS: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_EDITS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    EACH: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """Output and row statistics of some rows of one head.

    ``CLEAN``: the kernel for masked values that are not finite, which make outputs of the other so,
    and clear the flag of their element of the batch; it goes over the keys twice, since what
    0 · inf is depends on the final weights. With ``HAS_SIZES`` it computes what torch's fused
    operator may have wrong, in that one's place.
    """
    if HAS_SIZES:
        if is_exact(flag_ptr, tl.program_id(2), largest):
            return
    elif HAS_FLAG and CLEAN:  # noqa: SIM102 - which is known as it compiles
        if tl.load(flag_ptr + tl.program_id(2) * flag_batch) != 0:
            return
    h, b = tl.program_id(1), tl.program_id(2)
    kv, wide_b = (h // group).to(tl.int64), b.to(tl.int64)
    rows, dv = rows_of_program(BM), tl.arange(0, BDV)
    rows_in = rows < Lq
    known = tl.minimum(rows, Lq - 1)  # the last row again, where there is none
    q_ptr += wide_b * q_batch + h.to(tl.int64) * q_head
    q = rows_of(q_ptr, q_row, q_column, known, None, D, BD)
    k_ptr += wide_b * k_batch + kv * k_head
    v_ptr += wide_b * v_batch + kv * v_head
    mask_ptr += wide_b * mask_batch + h.to(tl.int64) * mask_head
    bias_ptr += wide_b * bias_batch + h.to(tl.int64) * bias_head
    key_ids_ptr += wide_b * key_ids_batch
    lo, hi, query_ids = bounds_of(
        lo_ptr, hi_ptr, query_ids_ptr, wide_b, bounds_batch, query_ids_batch, rows, known, Lk,
        BM, HAS_BOUNDS, HAS_IDS,
    )  # fmt: skip
    first, full, edge, last = tiles_of(lo, hi, BN)
    n = b * Hq + h
    acc, maximum, total = attend_keys(
        q, k_ptr, k_row, k_column, v_ptr, v_row, v_column, first, full, edge, last,
        rows, rows_in, lo, hi, query_ids, key_ids_ptr, mask_ptr, mask_row, mask_key,
        bias_ptr, bias_row, bias_key, ranges_ptr, logs_ptr, edits, seed_ptr, h, n,
        Lk, D, Dv, scale, cap, threshold, keep, first_row, row_step, first_key, key_step,
        BM, BN, BD, BDV, HAS_OUTPUT and not CLEAN, HAS_IDS, HAS_MASK, HAS_BIAS, HAS_CAP, HAS_EDITS,
        HAS_DROPOUT, EACH, INTERPRETED,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + h).to(tl.float32) * 1.4426950408889634
        maximum, total, shrink = add_sink(maximum, total, sink)
        acc = acc * shrink[:, None]
    at = (wide_b * Hq + h) * Lq + rows
    if HAS_STATISTICS:
        tl.store(maximum_ptr + at, maximum, mask=rows_in)
        tl.store(total_ptr + at, total, mask=rows_in)
    if HAS_OUTPUT:
        divisor = tl.where(total == 0, 1.0, total)
        if CLEAN:
            acc = _exact_output(
                q, k_ptr, k_row, k_column, v_ptr, v_row, v_column, first, last,
                rows, rows_in, lo, hi, query_ids, key_ids_ptr, mask_ptr, mask_row, mask_key,
                bias_ptr, bias_row, bias_key, ranges_ptr, logs_ptr, edits, seed_ptr, h, n,
                Lk, D, Dv, scale, cap, threshold, keep, first_row, row_step,
                first_key, key_step, maximum, divisor, BM, BN, BD, BDV, HAS_IDS, HAS_MASK,
                HAS_BIAS, HAS_CAP, HAS_EDITS, HAS_DROPOUT, EACH, INTERPRETED,
            )  # fmt: skip
            acc = tl.where((total != total)[:, None], float("nan"), acc)
        else:
            if HAS_FLAG:
                clear_unless_finite(flag_ptr + b * flag_batch, acc)
            acc = acc / divisor[:, None]
        out_ptr += wide_b * out_batch + h.to(tl.int64) * out_head
        tl.store(
            out_ptr + rows[:, None].to(tl.int64) * out_row + dv[None, :].to(tl.int64) * out_column,
            acc.to(out_ptr.dtype.element_ty), mask=rows_in[:, None] & (dv < Dv)[None, :],
        )  # fmt: skip


@triton.jit
def _floor(x, by) -> Any:
    """``x / by`` rounded down, of integers; by is positive."""
    return tl.where(x < 0, -((by - 1 - x) // by), x // by)


@triton.jit(
    do_not_specialize=[
        *OF_LENGTH, "length", "start", "left", "right", "firsts_batch", "lasts_batch",
    ]
)  # fmt: skip
def intervals(
    low_ptr, high_ptr, lengths_ptr, starts_ptr, firsts_ptr, lasts_ptr,
    lengths_batch, starts_batch, firsts_batch, lasts_batch, length, start, Lq, Lk,
    row_step, key_step, left, right, BM: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_INTERVALS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """``(B or 1, Lq)`` int32: the first key that each query may see, and the one after the last.

    By lengths, order, window and intervals.
    """
    b, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    inside, zeros = i < Lq, tl.zeros((BM,), tl.int64)
    if HAS_LENGTHS:
        length = tl.load(lengths_ptr + b * lengths_batch)
    if HAS_STARTS:
        start = tl.load(starts_ptr + b * starts_batch)
    place = i.to(tl.int64) * row_step + start
    low, high = zeros, zeros + length
    if CAUSAL:
        high = tl.minimum(high, _floor(place, key_step) + 1)
    if HAS_RIGHT:
        high = tl.minimum(high, _floor(place + right, key_step) + 1)
    if HAS_LEFT:
        low = tl.maximum(low, -_floor(left - place, key_step))
    if HAS_INTERVALS:
        first = tl.load(firsts_ptr + b * firsts_batch + i, mask=inside, other=0)
        last = tl.load(lasts_ptr + b * lasts_batch + i, mask=inside, other=0)
        low, high = tl.maximum(low, first), tl.minimum(high, last)
    high = tl.minimum(tl.maximum(high, 0), Lk)
    low = tl.minimum(tl.maximum(low, 0), high)
    at = b * Lq + i
    tl.store(low_ptr + at, low.to(tl.int32), mask=inside)
    tl.store(high_ptr + at, high.to(tl.int32), mask=inside)


@triton.jit
def _largest_bits(x_ptr, x_batch, x_head, x_row, x_column, b, tile, rows, L, columns,
                  BM: tl.constexpr, BD: tl.constexpr) -> Any:  # fmt: skip
    """The bits of the largest size in some rows of all heads, as an integer; NaN is above all."""
    row, d = tile * BM + tl.arange(0, BM), tl.arange(0, BD)
    at = (row // L).to(tl.int64) * x_head + (row % L).to(tl.int64) * x_row
    x = tl.load(
        x_ptr + b.to(tl.int64) * x_batch + at[:, None] + d[None, :].to(tl.int64) * x_column,
        mask=(row < rows)[:, None] & (d < columns)[None, :], other=0.0,
    )  # fmt: skip
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits, 1), 0)


@triton.jit(do_not_specialize=["Lq", "Lk", "Lv", "q_tiles", "k_tiles"])
def sizes(
    sizes_ptr, q_ptr, k_ptr, v_ptr, q_batch, q_head, q_row, q_column,
    k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    q_tiles, k_tiles, Hq, Hkv, Hv, Lq, Lk, Lv, D, Dv,
    BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """``(B, 3)`` int32: the bits of the largest size in query, key and another; zeros before."""
    n, b = tl.program_id(0), tl.program_id(1)
    sizes_ptr += 3 * b
    if n < q_tiles:
        found = _largest_bits(q_ptr, q_batch, q_head, q_row, q_column, b, n, Hq * Lq, Lq, D,
                              BM, BD)  # fmt: skip
        tl.atomic_max(sizes_ptr, found, sem="relaxed")
    elif n < q_tiles + k_tiles:
        found = _largest_bits(k_ptr, k_batch, k_head, k_row, k_column, b, n - q_tiles,
                              Hkv * Lk, Lk, D, BM, BD)  # fmt: skip
        tl.atomic_max(sizes_ptr + 1, found, sem="relaxed")
    else:
        found = _largest_bits(v_ptr, v_batch, v_head, v_row, v_column, b, n - q_tiles - k_tiles,
                              Hv * Lv, Lv, Dv, BM, BDV)  # fmt: skip
        tl.atomic_max(sizes_ptr + 2, found, sem="relaxed")


@triton.jit
def is_exact(sizes_ptr, b, largest) -> Any:
    """Whether torch's fused operator is exact: no product overflows, and all values are finite."""
    q = tl.load(sizes_ptr + 3 * b).to(tl.float32, bitcast=True)
    k = tl.load(sizes_ptr + 3 * b + 1).to(tl.float32, bitcast=True)
    v = tl.load(sizes_ptr + 3 * b + 2).to(tl.float32, bitcast=True)
    return (q * k < largest) & (v < float("inf"))


# What kernels are compiled with: products and sums are rounded one by one, as they are written.
WITHOUT_FUSION = {"enable_fp_fusion": False}
INTERPRETED = not isinstance(attend, triton.runtime.JITFunction)
