"""Reductions of the weights in one pass over blocks of whole rows, in memory of O(T).

Each reduction takes every block once, and fills the arrays that it was given, ``(B, Hq, ...)``.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from regard._backends.formula import BlocksOf, WeightBlock, weight_blocks
from regard._backends.linear_blocks import LINEAR
from regard._base.arrays import Arrays
from regard._call.call import Call

Fields = dict[str, Any]


def statistics_of(xp: Arrays, call: Call) -> tuple[Any, Any]:
    """Maximum and total of each row: ``(B, Hq, Lq)`` each, in the dtype that sums are held in."""
    B, Hq, _, Lq, _ = call.sizes
    maximum, total = (xp.full((B, Hq, Lq), fill, xp.dtype) for fill in (-np.inf, 0.0))
    with np.errstate(all="ignore"):
        for block in weight_blocks(xp, call):
            maximum[block.index] = block.maximum[..., 0]
            total[block.index] = block.total[..., 0]
    return maximum, total


def reduce_blocks(
    xp: Arrays,
    call: Call,
    statistics: tuple[Any, Any] | None,
    fields: Fields,
    blocks_of: BlocksOf = weight_blocks,
) -> None:
    """Fills arrays with reductions of the weights; see ``regard._backends.Backend.reduce``.

    Args:
        blocks_of: makes the blocks of weights, and knows the unit of the statistics.
    """
    if "row_max" in fields and (call.sinks is not None or statistics is not None):
        # The statistics include the sink, and those of a part are of the whole rows.
        fields = dict(fields)
        maximum, _ = statistics_of(xp, call.changed(sinks=None))
        into = fields.pop("row_max")
        into[...] = xp.array(into, maximum)
        if not fields:
            return
    wanted = [
        reduction(xp, call, fields) for name, reduction in REDUCTIONS.items() if name in fields
    ]
    with np.errstate(all="ignore"):  # NaN and inf are valid results here
        for block in blocks_of(xp, call, statistics):
            for reduction in wanted:
                reduction.update(block)
        for reduction in wanted:
            reduction.finish()


class BlockReduction(Protocol):
    """One reduction of the weights."""

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None: ...

    def update(self, block: WeightBlock) -> None:
        """Takes the next rows."""

    def finish(self) -> None:
        """Ends the reduction, after the last rows."""


def per_query(name: str, measure: Any) -> Any:
    """One number for each query, by a function of its block."""

    class PerQuery:
        def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
            self._out = fields[name]

        def update(self, block: WeightBlock) -> None:
            self._out[block.index] = measure(block)

        def finish(self) -> None: ...

    return PerQuery


def _log_sum_exp(block: WeightBlock) -> Any:
    return (block.maximum + block.xp.log(block.total))[..., 0]


def _largest_score(block: WeightBlock) -> Any:
    return block.maximum[..., 0]


def _entropy(block: WeightBlock) -> Any:
    """``−Σ w · ln w`` in nats."""
    w = block.weights
    return -block.xp.where(w == 0, 0.0, w * block.log_weights).sum(-1) + 0.0  # no negative zero


def _distance(block: WeightBlock) -> Any:
    """``Σ w · |p − j|`` of the positions p of the query and j of the key."""
    of_queries, of_keys = block.positions
    return (block.weights * abs(of_queries[:, None] - of_keys)).sum(-1)


class _Weights:
    """The weights themselves."""

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._out = xp, fields["weights"]

    def update(self, block: WeightBlock) -> None:
        part = self._out[(*block.index, block.keys)]
        part[...] = self._xp.array(part, block.weights)

    def finish(self) -> None: ...


class _Received:
    """For each key the sum over the queries."""

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._out = fields["received"]

    def update(self, block: WeightBlock) -> None:
        self._out[block.b, block.h, block.keys] += block.weights.sum(-2)

    def finish(self) -> None: ...


class _ReceivedMax:
    """For each key the maximum over the queries."""

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._out = xp, fields["received_max"]

    def update(self, block: WeightBlock) -> None:
        at = (block.b, block.h, block.keys)
        self._out[at] = self._xp.maximum(self._out[at], self._xp.largest(block.weights, -2))

    def finish(self) -> None: ...


class _TopK:
    """The k strongest keys of every query."""

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._k, self._Lk = xp, fields["k"], call.sizes[4]
        self._values, self._indices = fields["top_values"], fields["top_keys"]

    def update(self, block: WeightBlock) -> None:
        low, high = block.keys.start, block.keys.stop
        k = min(self._k, high - low)
        values, indices = self._xp.top(block.weights, k)
        keys = indices + low
        if self._k == 1:  # of equal weights the first, which is looked for
            keys = self._xp.where(values == 0, 0, keys)
        self._values[(*block.index, slice(0, k))] = self._xp.array(self._values, values)
        self._indices[(*block.index, slice(0, k))] = keys
        if k < self._k:  # the block is narrower: fill up with any other keys, of weight 0
            others = np.concatenate([np.arange(low), np.arange(high, self._Lk)])[: self._k - k]
            rest = (*block.index, slice(k, None))
            self._values[rest] = 0
            self._indices[rest] = self._xp.array(self._indices, others)

    def finish(self) -> None: ...


class _Strongest:
    """The n strongest token pairs of each head; of equal weights the lower query, then key.

    They are in the n rows of a block whose own largest weights are the largest: only these are
    searched. Where no sink may be the maximum, and no other key, that weight is 1 / total.
    """

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._n = xp, fields["n"]
        self._totals_tell = call.sinks is None and call.whole_rows
        self._weight = fields["pair_weight"]
        self._query, self._key = fields["pair_query"], fields["pair_key"]

    def update(self, block: WeightBlock) -> None:
        xp, width, at = self._xp, block.keys.stop - block.keys.start, (block.b, block.h)
        if 0 in block.shifted.shape:
            return
        weights, rows = self._rows(block)
        flat = self._given(weights).reshape((*weights.shape[:2], -1))
        new, where = xp.first_top(flat, min(self._n, flat.shape[-1]))
        weight, order = xp.first_top(xp.concatenate([self._weight[at], new]), self._n)
        query = xp.concatenate([self._query[at], xp.gather(rows, where // width)])
        key = xp.concatenate([self._key[at], where % width + block.keys.start])
        present = weight > 0
        self._weight[at] = weight
        self._query[at] = (xp.gather(query, order) + 1) * present - 1
        self._key[at] = (xp.gather(key, order) + 1) * present - 1

    def _rows(self, block: WeightBlock) -> tuple[Any, Any]:
        """``(b, h, rows, keys)`` and ``(b, h, rows)``: the weights of those rows, and which."""
        xp, (b, h, height, _) = self._xp, block.shifted.shape
        if height <= self._n:
            rows = xp.arange(block.rows.start, block.rows.stop)
            return block.weights, xp.broadcast(rows, (b, h, height))
        if self._totals_tell:
            largest = (xp.where(block.total == 0, 0.0, 1 / block.divisor))[..., 0]
        else:
            largest = xp.largest(block.weights, -1)
        _, rows = xp.first_top(self._given(largest), self._n)
        rows = xp.sort(rows)
        shifted, divisor = (xp.gather_rows(x, rows) for x in (block.shifted, block.divisor))
        return xp.exp(shifted) / divisor, rows + block.rows.start

    def _given(self, weights: Any) -> Any:
        """Weights in the dtype in which they are given, which decides what is equal; no NaN."""
        found = self._xp.where(self._xp.isnan(weights), 0.0, weights)
        return self._xp.array(self._weight, found)

    def finish(self) -> None: ...


class _Pool:
    """A heatmap of each matrix in ln(weight): NaN where all is masked.

    Bin r of R holds the cells from ``r·n // R`` to ``(r + 1)·n // R``.
    """

    how = "max"

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._into = xp, fields[f"pooled_{self.how}"]
        extent = fields.get("bin_extent", call.sizes[3:])
        places = fields.get("bin_start", (0, 0)), fields.get("bin_step", (1, 1))
        self._rows, self._has_gaps = extent[0], places[1] != (1, 1)
        self._axes = tuple(zip(self._into.shape[-2:], extent, *places))
        fill = -np.inf if self.how == "max" else 0.0
        self._out = xp.full(tuple(self._into.shape), fill, "float64")
        self._seen = xp.full(tuple(self._into.shape), 0, "bool")

    def update(self, block: WeightBlock) -> None:
        if block.keys.start >= block.keys.stop:
            return
        down, across = (
            bins_of(self._xp, part.start, part.stop, *axis)
            for part, axis in zip((block.rows, block.keys), self._axes)
        )
        at = (block.b, block.h, down[0], across[0])
        if self.how == "max":
            cells = gathered(self._xp, block.log_weights, self._xp.largest, -np.inf, down, across)
            self._out[at] = self._xp.maximum(self._out[at], cells)
        else:
            self._out[at] += gathered(self._xp, block.weights, _sum, 0.0, down, across)
        visible = block.visible
        if visible is None and not self._has_gaps:
            self._seen[at] = True
            return
        if visible is None:  # between two cells there may be bins of none
            visible = self._xp.full((1, 1, 1, 1), True, "bool")
        visible = self._xp.broadcast(visible, block.shifted.shape)
        self._seen[at] |= gathered(self._xp, visible, _any, False, down, across)

    def finish(self) -> None:
        out = self._out
        if self.how == "mass":
            R, n = out.shape[-2], self._rows
            heights = np.diff(np.arange(R + 1) * n // R) if R else np.ones(0)
            out = self._xp.log(out / self._xp.array(out, heights)[:, None])
        self._into[...] = self._xp.array(self._into, self._xp.where(self._seen, out, np.nan))


class _PoolMass(_Pool):
    how = "mass"


def _sum(x: Any, axis: int) -> Any:
    return x.sum(axis)


def _any(x: Any, axis: int) -> Any:
    return x.any(axis)


def _name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def gathered(xp: Arrays, x: Any, fold: Any, fill: Any, down: Any, across: Any) -> Any:
    """Cells ``(..., rows, keys)`` folded into bins: pairs of ``bins_of``, down and across."""
    for (_, cells), axis in ((across, -1), (down, -2)):
        if cells is None:  # one cell a bin
            continue
        x = x.swapaxes(axis, -1)
        pad = xp.full((*x.shape[:-1], 1), fill, _name(x))
        x = fold(xp.take(xp.concatenate([x, pad]), cells), -1)
        x = x.swapaxes(-1, axis) if axis == -2 else x
    return x


def bins_of(
    xp: Arrays, low: int, high: int, bins: int, n: int, start: int = 0, step: int = 1
) -> tuple[slice, Any]:
    """The bins that hold cells low to high, and a table of the cells in each.

    The table is ``(bins, widest)``: indices counted from low, ``high − low`` stands for no cell.

    Args:
        n: how many cells the bins are of, of which these are every ``step`` from ``start`` on.
    """
    first, last = (start + step * cell for cell in (low, high - 1))
    if bins == n:
        return slice(first, last + 1, step), None
    down, up = (((cell + 1) * bins - 1) // n for cell in (first, last))  # the bins of these
    widest = min(((n + bins - 1) // bins + step - 1) // step, high - low)
    each = xp.arange(down, up + 2) * n // bins  # the first cell of each bin
    edges = (-((first - each) // step)).clip(0, high - low)
    table = edges[:-1, None] + xp.arange(0, widest)
    return slice(down, up + 1), xp.where(table < edges[1:, None], table, high - low)


# By the field that requests each.
REDUCTIONS: dict[str, Any] = {
    "lse": per_query("lse", _log_sum_exp),
    "row_max": per_query("row_max", _largest_score),
    "entropy": per_query("entropy", _entropy),
    "distance": per_query("distance", _distance),
    "weights": _Weights,
    "received": _Received,
    "received_max": _ReceivedMax,
    "k": _TopK,
    "n": _Strongest,
    "pooled_max": _Pool,
    "pooled_mass": _PoolMass,
    **LINEAR,
}
