"""Reductions of the weights by kernels in Triton: what is launched for each field."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard._backends import triton_jit, triton_weights
from regard._backends.block_reductions import reduce_blocks
from regard._backends.formula import WeightBlock
from regard._backends.triton import MOST_PROGRAMS
from regard._backends.triton_ops import (
    Scores,
    device_major,
    forward,
    launch,
    of_batch,
    per_batch,
    tile,
    tile_of,
    width_of,
)
from regard._base.arrays import Arrays, arrays_of
from regard._call.call import Call
from regard._call.contents import check_contents
from regard._call.visible import Visibility, blocks

Statistics = tuple[Any, Any]
TILE = "BM", "BN", "num_warps", "num_stages"
OF_ROWS, OF_KEYS = ("entropy", "distance"), ("received", "received_max")
MOST_KEPT = 64  # top keys, and strongest pairs, of a row, which a program holds
# Of that program rows and keys, warps and stages, of 16 bits and of 32.
TOP_TILE, WIDE_TOP_TILE = (64, 64, 4, 1), (32, 32, 8, 1)
LN2 = math.log(2)  # the unit of scores
BLOCK_ELEMENTS = 2**24  # of a block of weights on a device, where each block is some launches


def tile_again(call: Call, *, of_picture: bool) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and stages, where scores are computed once more."""
    if triton_jit.INTERPRETED:
        return tile(call)
    is_narrow, major = call.query.dtype != torch.float32, device_major(call.query.device)
    head_size = call.query.shape[3]
    return tile_again_of(head_size, is_narrow=is_narrow, major=major, of_picture=of_picture)


def tile_again_of(
    head_size: int, *, is_narrow: bool, major: int = 0, of_picture: bool = False
) -> tuple[int, int, int, int]:
    """As ``triton_ops.tile_of``."""
    if not is_narrow or major != 9 or head_size > 128:
        return tile_of(head_size, is_narrow=is_narrow, major=major)
    if of_picture:
        return (64, 128, 4, 3) if head_size <= 64 else (64, 64, 4, 2)
    return 128, 64, 4, 3


class Known:
    """A call with the statistics of its rows, and what every kernel of weights is given of it."""

    def __init__(self, call: Call, statistics: Statistics) -> None:
        self.call, self.scores, device = call, Scores(call), call.query.device
        given = (torch.as_tensor(x, dtype=torch.float32) for x in statistics)
        self.maximum, self.total = (x.to(device).contiguous() for x in given)
        low, high, *others = self.scores.arrays
        self.limits, self.others = [low, high], others
        B, Hq, _, self.Lq, self.Lk = call.sizes
        self.heads = B, Hq
        self.strides = [*call.query.stride(), *of_batch(call.key, B)]

    def run(
        self, kernel: Any, tile: tuple[int, ...], rows: int, results: list[Any],
        numbers: list[Any], own: tuple[Any, ...] = (), **flags: Any,
    ) -> None:  # fmt: skip
        """Launches a kernel for all heads, for each ``rows`` tiles of rows."""
        call, (B, Hq), scores = self.call, self.heads, self.scores
        sizes: dict[str, Any] = dict(zip(TILE, tile))
        launch(
            kernel, (rows, Hq, B),
            *results, call.query, call.key, self.maximum, self.total, *own,
            *self.limits, *self.others, *self.strides, *numbers, *scores.strides,
            Hq, *scores.sizes, *scores.numbers,
            BD=width_of(call.query.shape[3]), **sizes, **scores.flags, **flags,
        )  # fmt: skip


def reduce(call: Call, statistics: Statistics, fields: dict[str, Any]) -> None:
    """Fills arrays with reductions of the weights; see ``regard._backends.Backend.reduce``.

    Products, sums of blocks and of diagonals, the weights themselves, and more than ``MOST_KEPT``
    top keys or pairs are reduced from blocks of weights, which a kernel computes.
    """
    fields = dict(fields)
    if (into := fields.pop("row_max", None)) is not None:
        _largest_scores(call, *statistics, into)
    if (into := fields.pop("lse", None)) is not None:
        _log_sum_exp(statistics, into)
    if 0 not in call.sizes:
        fields = _by_kernels(call, statistics, fields)
    if fields:
        reduce_blocks(arrays_of(call.query), call, statistics, fields, weight_blocks)


def _by_kernels(call: Call, statistics: Statistics, fields: dict[str, Any]) -> dict[str, Any]:
    """Fills what kernels reduce; the other fields."""
    check_contents(call, on_device=True)
    known, left = Known(call, statistics), dict(fields)
    for how in ("max", "mass"):
        if (into := left.pop(f"pooled_{how}", None)) is not None:
            _picture(known, how, left, into)
    for name in ("bins", "bin_extent", "bin_start", "bin_step"):
        left.pop(name, None)
    if 0 < fields.get("k", 0) <= MOST_KEPT:
        values, keys = _top_keys(known, left.pop("k"))
        left.pop("top_values")[...], left.pop("top_keys")[...] = values, keys
    in_rows = {name: left.pop(name) for name in (*OF_ROWS, *OF_KEYS) if name in left}
    is_wanted, largest = 0 < left.get("n", 0) <= MOST_KEPT, None
    if is_wanted and (call.sinks is not None or not call.whole_rows):
        largest = torch.empty((*known.heads, known.Lq), device=call.query.device)
        in_rows["row_largest"] = largest
    if in_rows:
        _reduce_rows(known, in_rows)
    if is_wanted:
        _strongest(known, largest, left)
    return left


def _reduce_rows(known: Known, fields: dict[str, Tensor]) -> None:
    """Fills what one pass reduces."""
    call, (B, Hq), Lq, Lk = known.call, known.heads, known.Lq, known.Lk
    device = call.query.device
    given = per_batch(call.starts, device)
    starts = given if isinstance(given, Tensor) else torch.full((1,), given, device=device)
    of_rows = [torch.empty((B, Hq, Lq), device=device) if name in fields else known.maximum
               for name in (*OF_ROWS, "row_largest")]  # fmt: skip
    received, largest, undefined = (
        torch.zeros((B, Hq, Lk), dtype=dtype, device=device)
        for dtype in (torch.int64, torch.int32, torch.int32)
    )
    sizes = tile_again(call, of_picture=False)
    known.run(
        triton_weights.reductions, sizes, -(-Lq // sizes[0]),
        [*of_rows, received, largest, undefined],
        [int(len(starts) > 1), call.query_step, call.key_step], own=(starts,),
        HAS_ENTROPY="entropy" in fields, HAS_DISTANCE="distance" in fields,
        HAS_ROW_LARGEST="row_largest" in fields, HAS_RECEIVED="received" in fields,
        HAS_LARGEST="received_max" in fields,
    )  # fmt: skip
    for name, found in zip((*OF_ROWS, "row_largest"), of_rows):
        if name in fields:
            fields[name].copy_(found)
    sums = {"received": received.to(torch.float32) * 2.0**-40}
    sums["received_max"] = largest.view(torch.float32)
    for name in OF_KEYS:
        if name in fields:
            fields[name].copy_(torch.where(undefined != 0, torch.nan, sums[name]))


def _top_keys(known: Known, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(B, Hq, rows, k)``: the largest weights of every row, or of some, and their keys.

    Args:
        rows: ``(B, Hq, count)`` int64.
    """
    count = known.Lq if rows is None else rows.shape[2]
    shape, device = (*known.heads, count, k), known.call.query.device
    values = torch.empty(shape, device=device)
    keys = torch.empty(shape, dtype=torch.int64, device=device)
    results = [values, keys, keys if rows is None else rows.contiguous()]
    # In the interpreter products have the bits of the row statistics in tiles of one size alone.
    is_wide = known.call.query.dtype == torch.float32 and not triton_jit.INTERPRETED
    sizes = WIDE_TOP_TILE if is_wide else TOP_TILE
    known.run(
        triton_weights.top_keys, sizes, -(-count // sizes[0]), results, [count, k],
        KEPT=max(2, 1 << (k - 1).bit_length()), HAS_ROWS=rows is not None,
    )  # fmt: skip
    return values, keys


def _strongest(known: Known, largest: Tensor | None, fields: dict[str, Any]) -> None:
    """Fills the strongest pairs: they are in the rows with the largest weights.

    Args:
        largest: of each row; None: 1 / total, where the maximum is a score of the keys of the call.
    """
    xp, n = arrays_of(known.call.query), fields.pop("n")
    if largest is None:  # 0 where nothing is seen, and in rows of NaN
        largest = torch.where(known.total > 0, 1 / known.total, 0.0)
    query, key, weight = (fields.pop(f"pair_{x}") for x in ("query", "key", "weight"))
    _, rows = xp.first_top(largest, min(n, known.Lq))
    rows = rows.sort(-1).values
    values, keys = _top_keys(known, min(n, known.Lk), rows)
    values = torch.where(values.isnan(), 0.0, values).flatten(2)
    found, order = xp.first_top(values, min(n, values.shape[2]))
    at = order // keys.shape[3]
    is_pair, some = found > 0, slice(found.shape[2])
    weight[..., some] = found
    query[..., some] = torch.where(is_pair, rows.gather(2, at), -1)
    key[..., some] = torch.where(is_pair, keys.flatten(2).gather(2, order), -1)


def _picture(known: Known, how: str, fields: dict[str, Any], into: Tensor) -> None:
    """Fills a heatmap."""
    (R, C), extent = into.shape[2:], fields.get("bin_extent", (known.Lq, known.Lk))
    start, step = fields.get("bin_start", (0, 0)), fields.get("bin_step", (1, 1))
    BM, BN, *_ = sizes = tile_again(known.call, of_picture=True)
    rows, columns = (
        _chunks(size, n, bins, by)
        for size, n, bins, by in zip((BM, BN), extent, (R, C), step)
    )  # fmt: skip
    edges = [
        _edges(known, *given)
        for given in zip((R, C), extent, start, step, (known.Lq, known.Lk))
    ]  # fmt: skip
    shape = (*known.heads, R, rows[1], C)
    fill = -torch.inf if how == "max" else -1.0
    cells = torch.full(shape, fill, device=into.device)
    known.run(
        triton_weights.picture, sizes, -(-R // rows[0]) * rows[1], [cells, *edges],
        [R, C, rows[1], columns[1], extent[1], start[1], step[1]],
        NR=rows[0], NC=columns[0], HAS_MASS=how == "mass",
    )  # fmt: skip
    if how == "max":
        found = cells.amax(3)
        known_cells = torch.where(found > triton_weights.LOWEST.value, found * LN2, -torch.inf)
        seen = found > -torch.inf
        found = torch.where(found == torch.inf, torch.nan, known_cells)
    else:
        xp = arrays_of(known.call.query)
        wide = xp.cast(torch.where(cells < 0, 0.0, cells), "float64").sum(3)
        heights = torch.arange(R + 1, device=into.device) * extent[0] // max(R, 1)
        seen = ((cells >= 0) | cells.isnan()).any(3)
        found = (wide / heights.diff()[:, None]).log()
    into.copy_(torch.where(seen, found, torch.nan))


def _edges(known: Known, bins: int, extent: int, start: int, step: int, length: int) -> Tensor:
    """``(bins + 1,)`` int32: the first row or key of each bin."""
    edges = torch.empty(bins + 1, dtype=torch.int32, device=known.call.query.device)
    launch(
        triton_weights.bin_edges, (-(-(bins + 1) // EDGES),), edges,
        bins, extent, start, step, length, BM=EDGES,
    )  # fmt: skip
    return edges


EDGES = 512  # of bins, that a program computes


def _chunks(size: int, extent: int, bins: int, step: int) -> tuple[int, int]:
    """How many bins a tile has, a power of 2, and in how many chunks of a tile a bin is."""
    of_bin = -(-extent // max(bins, 1))
    widest = max(1, -(-of_bin // step))
    padded = 1 << (widest - 1).bit_length()
    return (size // padded, 1) if padded <= size else (1, -(-widest // size))


def _log_sum_exp(statistics: Statistics, into: Tensor) -> None:
    """Fills ``(B, Hq, Lq)`` with ln of the sum of exp(score)."""
    maximum, total = (torch.as_tensor(x).to(into.device, into.dtype) for x in statistics)
    into[...] = maximum * LN2 + total.log()


def _largest_scores(call: Call, maximum: Any, total: Any, into: Tensor) -> None:
    """Fills ``(B, Hq, Lq)`` with the largest score of each row among the keys of the call."""
    if call.sinks is not None or not call.whole_rows:
        _, maximum, total = forward(call.without_value().changed(sinks=None))
    maximum, total = (torch.as_tensor(x).to(into.device) for x in (maximum, total))
    found = maximum.to(into.dtype) * LN2
    into[...] = torch.where(total.isnan() & (found < torch.inf), torch.nan, found)


def weight_blocks(xp: Arrays, call: Call, statistics: Statistics) -> Iterator[WeightBlock]:
    """The weights in blocks of whole rows, from the scores that a kernel computes once more."""
    check_contents(call, on_device=True)
    known, visibility = Known(call, statistics), Visibility(call, xp.arange)
    elements = xp.block_elements if call.query.is_cpu else BLOCK_ELEMENTS
    for block in blocks(call, visibility, elements, xp.tallest_block):
        b, h, rows, keys = block
        shifted = torch.empty([x.stop - x.start for x in block], device=call.query.device)
        if shifted.numel():
            _logarithms(known, shifted, *block)
        positions, visible = visibility.positions(b.start, rows, keys), visibility.pairs(*block)
        of_rows = (x[b, h, rows][..., None] for x in (known.maximum * LN2, known.total))
        yield WeightBlock(xp, *block, positions, visible, shifted, *of_rows)


def _logarithms(known: Known, out: Tensor, b: slice, h: slice, rows: slice, keys: slice) -> None:
    """Fills a block, ``(b, h, rows, keys)``: at once, but for very many small matrices."""
    call, scores, (BM, BN, warps, _) = known.call, known.scores, tile(known.call)
    heads, each = out.shape[1], MOST_PROGRAMS // out.shape[1]
    for n, part in enumerate(out.split(each)):
        place = [b.start + n * each, h.start, heads, rows.start, rows.stop]
        launch(
            triton_weights.logarithms, (_tiles(rows, BM), _tiles(keys, BN), len(part) * heads),
            part, call.query, call.key, known.maximum, *known.limits, *known.others,
            *part.stride()[:3], *known.strides, *scores.strides, *place, keys.start, keys.stop,
            known.heads[1], *scores.sizes, *scores.numbers, **scores.flags,
            BM=BM, BN=BN, BD=width_of(call.query.shape[3]), num_warps=warps,
        )  # fmt: skip


def _tiles(part: slice, size: int) -> int:
    """How many tiles a part meets, of those from 0 on."""
    return -(-int(part.stop) // size) - int(part.start) // size
