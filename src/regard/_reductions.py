"""What can be asked of the weights in one pass over blocks of whole rows, in memory of O(T).

Each reduction starts empty, takes every block once, and gives its result as ``(B, Hq, ...)``.
``lib`` is the module that knows the array library: ``_reference`` or ``_torch``.
"""

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from regard._checks import Call, accumulating_name
from regard._errors import ShapeError
from regard._visible import WeightBlock


class TopKeys(NamedTuple):
    """The strongest keys of every query, strongest first."""

    values: Any
    """``(..., Hq, Lq, k)`` weights; 0 once the visible keys are used up."""
    indices: Any
    """``(..., Hq, Lq, k)`` key indices, int64."""


class Links(NamedTuple):
    """The strongest pairs of a matrix, strongest first; -1, -1, 0.0 once there are no more.

    Rows of NaN are left out.
    """

    query: Any
    """``(..., Hq, n)`` query indices, int64."""
    key: Any
    """``(..., Hq, n)`` key indices, int64."""
    weight: Any
    """``(..., Hq, n)`` weights."""


class Reduction(Protocol):
    """One question to the weights, answered by the compiled kernels or block by block."""

    def fields(self) -> dict[str, Any]:
        """What the kernels are asked, and the arrays that they fill; instead of any update."""

    def update(self, block: WeightBlock) -> None:
        """Takes the next rows."""

    def result(self) -> Any:
        """The answer, once every row was taken."""


def _axis(x: Any, name: str, axis: int) -> Any:
    """``x.sum``, ``x.amax`` or ``x.any`` along one axis, of either library."""
    if name == "amax" and isinstance(x, np.ndarray):
        return x.max(axis)
    return getattr(x, name)(axis)


class PerQuery:
    """One number for each query, by a function of its block."""

    def __init__(self, lib: Any, call: Call, measure: Any) -> None:
        B, Hq, _, Lq, _ = call.sizes
        self._out = lib.full(call.query, (B, Hq, Lq), 0.0, "float64")
        self._lib, self._measure = lib, measure

    def fields(self) -> dict[str, Any]:
        return {self._measure.__name__: self._out}

    def update(self, block: WeightBlock) -> None:
        if block.keys.start < block.keys.stop:
            self._out[block.index] = self._measure(self._lib, block)

    def result(self) -> Any:
        return self._out


def entropy(lib: Any, block: WeightBlock) -> Any:
    """``−Σ w · ln w`` in nats."""
    w = block.weights
    terms = w * block.log_weights
    hidden = w == 0
    terms = np.where(hidden, 0.0, terms) if lib.numpy else terms.masked_fill(hidden, 0.0)
    return -terms.sum(-1) + 0.0  # + 0.0: no negative zero


def distance(lib: Any, block: WeightBlock) -> Any:
    """``Σ w · |p − j|``, p the place of the query among the keys."""
    i = lib.full(block.shifted, (block.rows.stop - block.rows.start,), 1, "int64").cumsum(0) - 1
    j = lib.full(block.shifted, (block.keys.stop - block.keys.start,), 1, "int64").cumsum(0) - 1
    place = (block.rows.start + i) * block.step + block.start
    gap = place[:, None] - (j + block.keys.start)
    return (block.weights * abs(gap)).sum(-1)


class Received:
    """For each key the sum, mean or maximum over the queries."""

    def __init__(self, lib: Any, call: Call, how: str) -> None:
        if how not in ("sum", "mean", "max"):
            raise ValueError(f"received: how is {how!r}; 'sum', 'mean' or 'max' is needed.")
        B, Hq, _, Lq, Lk = call.sizes
        self._how, self._queries = how, max(Lq, 1)
        self._out = lib.full(call.query, (B, Hq, Lk), 0.0, "float64")  # sums over all of T rows

    def fields(self) -> dict[str, Any]:
        return {"received_max" if self._how == "max" else "received": self._out}

    def update(self, block: WeightBlock) -> None:
        at = (block.b, block.h, block.keys)
        if self._how == "max":
            self._out[at] = _maximum(self._out[at], _axis(block.weights, "amax", -2))
        else:
            self._out[at] += block.weights.sum(-2)

    def result(self) -> Any:
        return self._out / self._queries if self._how == "mean" else self._out


def _maximum(x: Any, y: Any) -> Any:
    return np.maximum(x, y) if isinstance(x, np.ndarray) else x.maximum(y.to(x.dtype))


class TopK:
    """The k strongest keys of every query."""

    def __init__(self, lib: Any, call: Call, dtype: str, k: int) -> None:
        B, Hq, _, Lq, Lk = call.sizes
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
            raise TypeError(f"topk: k is a {type(k).__name__}; an int is needed.")
        if not 0 <= k <= Lk:
            raise ShapeError(f"topk: k is {k}; it must be between 0 and the number of keys, {Lk}.")
        self._lib, self._k, self._Lk = lib, int(k), Lk
        self._values = lib.full(call.query, (B, Hq, Lq, k), 0.0, dtype)
        self._indices = lib.full(call.query, (B, Hq, Lq, k), 0, "int64")

    def fields(self) -> dict[str, Any]:
        if not self._k:
            return {}
        return {"k": self._k, "top_values": self._values, "top_keys": self._indices}

    def update(self, block: WeightBlock) -> None:
        low, high = block.keys.start, block.keys.stop
        k = min(self._k, high - low)
        values, indices = self._lib.top(block.weights, k)
        self._values[(*block.index, slice(0, k))] = values
        self._indices[(*block.index, slice(0, k))] = indices + low
        if k < self._k:  # the block is narrower: any other keys, which weigh 0
            others = np.concatenate([np.arange(low), np.arange(high, self._Lk)])[: self._k - k]
            rest = self._indices[(*block.index, slice(k, None))]
            rest += self._lib.array(rest, others)

    def result(self) -> TopKeys:
        return TopKeys(self._values, self._indices)


class Strongest:
    """The n strongest pairs of each head."""

    def __init__(self, lib: Any, call: Call, dtype: str, n: int) -> None:
        B, Hq, _, Lq, Lk = call.sizes
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"strongest: n is a {type(n).__name__}; an int is needed.")
        if n < 0:
            raise ValueError(f"strongest: n is {n}; it must not be negative.")
        n = min(int(n), Lq * Lk)
        self._lib, self._n = lib, n
        self._weight = lib.full(call.query, (B, Hq, n), 0.0, dtype)
        self._query = lib.full(call.query, (B, Hq, n), -1, "int64")
        self._key = lib.full(call.query, (B, Hq, n), -1, "int64")

    def fields(self) -> dict[str, Any]:
        if not self._n:
            return {}
        arrays = {"pair_query": self._query, "pair_key": self._key, "pair_weight": self._weight}
        return {"n": self._n, **arrays}

    def update(self, block: WeightBlock) -> None:
        width = block.keys.stop - block.keys.start
        flat = self._lib.nan_to_zero(block.weights).reshape((*block.weights.shape[:2], -1))
        new, where = self._lib.top(flat, min(self._n, flat.shape[-1]))
        if not self._n or not flat.shape[-1]:
            return
        at = (block.b, block.h)
        join = self._lib.concatenate
        weight, order = self._lib.top(join([self._weight[at], new]), self._n)
        query = join([self._query[at], where // width + block.rows.start])
        key = join([self._key[at], where % width + block.keys.start])
        present = weight > 0
        self._weight[at] = weight
        self._query[at] = (self._lib.gather(query, order) + 1) * present - 1
        self._key[at] = (self._lib.gather(key, order) + 1) * present - 1

    def result(self) -> Links:
        return Links(self._query, self._key, self._weight)


class Pool:
    """A picture of a part of each matrix, in ln(weight): NaN where nothing is visible.

    Bin r of R holds the cells from ``r·n // R`` to ``(r + 1)·n // R``.
    """

    def __init__(
        self, lib: Any, call: Call, size: tuple[int, int], how: str, rows: slice, columns: slice
    ) -> None:
        if how not in ("max", "mass"):
            raise ValueError(f"pool: how is {how!r}; 'max' or 'mass' is needed.")
        B, Hq = call.sizes[:2]
        self._lib, self._how = lib, how
        self.rows, self.columns = rows, columns
        R, C = (min(n, part.stop - part.start) for n, part in zip(size, (rows, columns)))
        self._call, self._shape = call, (B, Hq, R, C)
        self._picture: Any = None  # by the kernels

    def fields(self) -> dict[str, Any]:
        dtype = accumulating_name(self._call.query)
        self._picture = self._lib.empty(self._call.query, self._shape, dtype)
        return {f"pooled_{self._how}": self._picture, "bins": self._shape[2:]}

    @cached_property
    def _out(self) -> Any:
        fill = -np.inf if self._how == "max" else 0.0
        return self._lib.full(self._call.query, self._shape, fill, "float64")

    @cached_property
    def _seen(self) -> Any:
        return self._lib.full(self._call.query, self._shape, 0, "bool")

    def update(self, block: WeightBlock) -> None:
        low, high = (max(block.rows.start, self.rows.start), min(block.rows.stop, self.rows.stop))
        left = max(block.keys.start, self.columns.start)
        right = min(block.keys.stop, self.columns.stop)
        R, C = self._out.shape[-2:]
        if low >= high or left >= right:
            return
        inside = (
            slice(None),
            slice(None),
            slice(low - block.rows.start, high - block.rows.start),
            slice(left - block.keys.start, right - block.keys.start),
        )
        down = _bins(low - self.rows.start, high - self.rows.start, R, self.rows)
        across = _bins(left - self.columns.start, right - self.columns.start, C, self.columns)
        at = (block.b, block.h, down[0], across[0])
        if self._how == "max":
            cells = self._gather(block.log_weights[inside], "amax", -np.inf, down, across)
            self._out[at] = _maximum(self._out[at], cells)
        else:
            self._out[at] += self._gather(block.weights[inside], "sum", 0.0, down, across)
        if block.visible is None:
            self._seen[at] = True
        else:
            shape = block.shifted.shape
            visible = self._lib.broadcast(block.visible, shape)[inside]
            self._seen[at] |= self._gather(visible, "any", False, down, across)

    def _gather(self, x: Any, how: str, fill: Any, down: Any, across: Any) -> Any:
        for (_, cells), axis in ((across, -1), (down, -2)):
            if cells is None:  # one cell a bin
                continue
            x = x.swapaxes(axis, -1)
            pad = self._lib.full(x, (*x.shape[:-1], 1), fill, _name(x))
            x = self._lib.take(self._lib.concatenate([x, pad]), cells)
            x = _axis(x, how, -1).swapaxes(-1, axis) if axis == -2 else _axis(x, how, -1)
        return x

    def result(self) -> Any:
        if self._picture is not None:
            return self._picture
        out = self._out
        numpy = isinstance(out, np.ndarray)
        if self._how == "mass":
            R, n = out.shape[-2], self.rows.stop - self.rows.start
            heights = np.diff(np.arange(R + 1) * n // R) if R else np.ones(0)
            out = out / self._lib.array(out, heights)[:, None]
            with np.errstate(divide="ignore"):
                out = np.log(out) if numpy else out.log()
        return np.where(self._seen, out, np.nan) if numpy else out.masked_fill(~self._seen, np.nan)


def _name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _bins(low: int, high: int, bins: int, part: slice) -> tuple[slice, np.ndarray | None]:
    """The bins that hold cells low to high of a part, and a table of the cells in each.

    The table is ``(bins, widest)``: indices counted from low, ``high − low`` standing for no cell.
    """
    n = part.stop - part.start
    if bins == n:
        return slice(low, high), None
    number = (np.arange(low + 1, high + 1) * bins - 1) // n  # the bin of each cell
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    stops = np.append(starts[1:], high - low)
    table = starts[:, None] + np.arange((stops - starts).max())
    return (
        slice(int(number[0]), int(number[-1]) + 1),
        np.where(table < stops[:, None], table, high - low),
    )
