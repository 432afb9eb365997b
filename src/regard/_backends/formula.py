"""Attention, once for NumPy and torch: scores, softmax, weights in blocks of rows, output.

    s = scale · q·kᵀ  →  softcap · tanh(s / softcap)  →  + bias  →  + ln(factor) of the edits
      →  invisible keys to −∞
    w = softmax(s) over the keys and the sink  →  dropout  →  · v

``xp`` is the result of ``arrays_of``. Nothing of size Lq × Lk is stored, and every row is whole.
Source: Vaswani et al. 2017, equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from regard._backends.dropout import kept
from regard._base.arrays import Arrays
from regard._call.call import Call
from regard._call.contents import check_contents
from regard._call.edits import Rectangle
from regard._call.visible import Visibility, blocks, part


def scaled(call: Call, products: Any) -> Any:
    """``q·kᵀ`` times the scale."""
    return products * call.scale


def capped(xp: Arrays, call: Call, s: Any) -> Any:
    """Scaled scores, bounded by the softcap where there is one."""
    return s if call.softcap is None else xp.tanh(s / call.softcap) * call.softcap


def is_capped(call: Call) -> bool:
    """Whether anything but the scale is done to scores before the bias."""
    return call.softcap is not None


def capped_text(call: Call, x: str) -> str:
    """``capped`` in words, for scaled scores that are called x."""
    return x if call.softcap is None else f"{call.softcap:g} * tanh({x} / {call.softcap:g})"


def cap_slope_text(call: Call, x: str) -> str:
    """The first of ``cap_derivatives`` in words, where scores are capped."""
    return f"1 - tanh({x} / {call.softcap:g})**2"


def cap_derivatives(xp: Arrays, call: Call, s: Any) -> tuple[Any, Any]:
    """First and second derivative of ``capped`` at scaled scores, where it ``is_capped``."""
    cap: Any = call.softcap
    t = xp.tanh(s / cap)
    slope = 1 - t * t
    return slope, -2 / cap * t * slope


def biased(xp: Arrays, call: Call, s: Any, *block: slice) -> Any:
    """Capped scores of a block ``(b, h, rows, keys)``, with the bias where there is one."""
    return s if call.bias is None else s + xp.wide(part(call.bias, *block))


def edited(edits: Sequence[Rectangle], s: Any, b: slice, *block: slice) -> Any:
    """Biased scores of a block ``(b, h, rows, keys)`` with the edits that meet it.

    Those of factor 0 make their pairs invisible: see ``Visibility.pairs``.
    """
    found = s
    for edit in edits:
        if edit.factor not in (0, 1) and edit.meets(*block):
            found = s + 0.0 if found is s else found
            found[(slice(None), *edit.within(*block))] += math.log(edit.factor)
    return found


def edited_pairs(call: Call, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """``(heads, *pairs)``: what the edits add to the scores of some pairs; −∞ where they cut.

    Args:
        call: without a batch.
        queries, keys: indices that broadcast to the pairs.
    """
    Hq = call.sizes[1]
    added = np.zeros((Hq, *np.broadcast_shapes(queries.shape, keys.shape)))
    for (first, last), rows, columns, factor in call.rectangles:
        inside = (rows[0] <= queries) & (queries < rows[1]) & (columns[0] <= keys)
        log = math.log(factor) if factor else -math.inf
        added[first:last] += np.where(inside & (keys < columns[1]), log, 0)
    return added


def products(xp: Arrays, call: Call, q: Any, k: Any) -> Any:
    """``scale · q·kᵀ`` of a block."""
    return scaled(call, xp.matmul(q, k.swapaxes(-1, -2)))


def masked(xp: Arrays, s: Any, visible: Any) -> Any:
    """Scores with −∞ where masked; ``visible`` None: no pair is."""
    return s if visible is None else xp.hide(s, visible, -np.inf)


def key_heads(xp: Arrays, call: Call, x: Any, b: slice, h: slice) -> Any:
    """The heads of key or value that the query heads h share: ``(b or 1, kv, Lk, D)``, wide."""
    group = call.sizes[1] // call.sizes[2]
    return xp.wide(x[b if len(x) > 1 else slice(None), h.start // group : h.stop // group])


def log_softmax(xp: Arrays, s: Any, sinks: Any) -> tuple[Any, Any, Any]:
    """``s − maximum``, the maximum and the sum of the exponentials of each row ``(..., 1)``.

    Where all is masked the maximum is −∞ and the sum 0.
    """
    maximum = xp.largest(s, -1, keep=True)
    empty = maximum == -np.inf
    if sinks is not None:
        sink = xp.wide(sinks)[:, None, None]
        maximum = xp.where(empty, maximum, xp.maximum(maximum, sink))
    s = shifted(xp, s, maximum)
    total = xp.row_sum(xp.exp(s))
    if sinks is not None:
        total = total + xp.where(empty, 0.0, xp.exp(sink - maximum))
    return s, maximum, total


def shifted(xp: Arrays, s: Any, maximum: Any) -> Any:
    """``s − maximum``; −∞ where all is masked."""
    return s - xp.where(maximum == -np.inf, 0.0, maximum)


def shifted_by(xp: Arrays, s: Any, maximum: Any, total: Any) -> Any:
    """``shifted`` by the statistics of other products, whose bits differ: no weight above 1."""
    found, largest = shifted(xp, s, maximum), xp.log(total + (total == 0))
    return xp.where(found > largest, largest, found)


@dataclass(frozen=True)
class WeightBlock:
    """Some whole rows of the weights, all of which mask the keys outside ``keys``."""

    xp: Arrays
    b: slice
    h: slice
    rows: slice
    keys: slice
    positions: tuple[Any, Any]  # of its queries and keys
    visible: Any  # bool, broadcastable to (b, h, rows, keys); None: every pair
    shifted: Any  # (b, h, rows, keys): score − maximum, −inf where masked
    maximum: Any  # (b, h, rows, 1), of the scores and the sink; −inf where all is masked
    total: Any  # (b, h, rows, 1), of exp(score − maximum), the sink's included

    @property
    def index(self) -> tuple[slice, slice, slice]:
        """Index of its rows in an array ``(B, Hq, Lq, ...)``."""
        return self.b, self.h, self.rows

    @cached_property
    def divisor(self) -> Any:
        """The total, with 1 where all is masked."""
        return self.total + (self.total == 0)

    @cached_property
    def weights(self) -> Any:
        """``(b, h, rows, keys)``; 0 where masked."""
        return self._hidden(self.xp.exp(self.shifted) / self.divisor, 0.0)

    @cached_property
    def log_weights(self) -> Any:
        """``ln`` of the weights, without underflow; −inf where masked."""
        return self._hidden(self.shifted - self.xp.log(self.divisor), -np.inf)

    def _hidden(self, x: Any, fill: float) -> Any:
        """x with ``fill`` where masked, where a NaN of the row would be otherwise."""
        return x if self.visible is None else self.xp.hide(x, self.visible, fill)


def weight_blocks(
    xp: Arrays, call: Call, statistics: tuple[Any, Any] | None = None
) -> Iterator[WeightBlock]:
    """The weights in blocks of whole rows, wide; without a gradient.

    ``statistics``, maximum and total ``(B, Hq, Lq)`` of the rows, must be given where the call has
    only some of their keys.
    """
    check_contents(call)
    visibility, edits = Visibility(call, xp.arange), call.rectangles
    held = None
    for block in blocks(call, visibility, xp.block_elements, xp.tallest_block):
        b, h, rows, keys = block
        if held != (b, h):
            held = b, h
            k = key_heads(xp, call, call.key[:, :, : visibility.end(b.start)], b, h)
        s = capped(xp, call, products(xp, call, xp.wide(call.query[b, h, rows]), k[:, :, keys]))
        visible = visibility.pairs(*block)
        s = masked(xp, edited(edits, biased(xp, call, s, *block), *block), visible)
        if statistics is None:
            sinks = None if call.sinks is None else call.sinks[h]
            of_rows = log_softmax(xp, s, sinks)
        else:
            maximum, total = (xp.array(s, x[b, h, rows][..., None]) for x in statistics)
            of_rows = shifted_by(xp, s, maximum, total), maximum, total
        positions = visibility.positions(b.start, rows, keys)
        yield WeightBlock(xp, *block, positions, visible, *of_rows)


BlocksOf = Callable[[Arrays, Call, Any], Iterator[WeightBlock]]


def kept_weights(xp: Arrays, call: Call, b: slice, h: slice, rows: slice, keys: slice) -> Any:
    """Bool ``(b, h, rows, keys)``: the weights that the seed keeps; None without dropout."""
    if not call.dropout:
        return None
    B, Hq = call.sizes[:2]
    heads = xp.arange(0, B)[b, None] * Hq + xp.arange(0, Hq)[h]
    return kept(call.seed, call.dropout, heads, rows, keys, xp.arange, xp.stack, call.draws)


def dropped(xp: Arrays, call: Call, keep: Any, x: Any) -> Any:
    """x with 0 for dropped weights, and the others scaled by ``1 / (1 − dropout)``; NaN stays."""
    return x if keep is None else x * keep / (1 - call.dropout)


class Finite:
    """Whether an array is finite; read at most once, since the host waits for a device then."""

    def __init__(self, xp: Arrays, x: Any) -> None:
        self._xp, self._x = xp, x

    @cached_property
    def everywhere(self) -> bool:
        """Whether all of it is."""
        return bool(self._xp.isfinite(self._x).all())


def apply(xp: Arrays, w: Any, visible: Any, v: Any, whole: Finite | None = None) -> Any:
    """``w @ v`` without the masked values, which do not count even as 0 · NaN or 0 · inf.

    Args:
        whole: of which v is a part.
    """
    if visible is None or (whole is not None and whole.everywhere):
        return xp.matmul(w, v)
    finite = xp.isfinite(v)
    if finite.all():
        return xp.matmul(w, v)
    visible = xp.broadcast(visible, w.shape)
    out = xp.matmul(w, xp.where(finite, v, 0.0))
    up = xp.any_product(w > 0, v == np.inf) | xp.any_product(w < 0, v == -np.inf)
    down = xp.any_product(w > 0, v == -np.inf) | xp.any_product(w < 0, v == np.inf)
    undefined = xp.any_product(visible, xp.isnan(v)) | (up & down)
    undefined = undefined | xp.any_product(visible & (w == 0), xp.isinf(v))
    undefined = undefined | xp.isnan(w).any(-1)[..., None]
    out = xp.where(up, np.inf, xp.where(down, -np.inf, out))
    return xp.where(undefined, np.nan, out)


def attention(xp: Arrays, call: Call) -> Any:
    """``(B, Hq, Lq, Dv)`` in the dtype of the output, block by block."""
    B, Hq, _, Lq, _ = call.sizes
    out = xp.full((B, Hq, Lq, call.value.shape[-1]), 0.0, call.output_name)
    held, finite = None, Finite(xp, call.value)
    with np.errstate(all="ignore"):  # NaN and inf are valid results here
        for block in weight_blocks(xp, call):
            if held != (block.b, block.h):
                held = block.b, block.h
                v = key_heads(xp, call, call.value, *held)
            keep = kept_weights(xp, call, *block.index, block.keys)
            w = dropped(xp, call, keep, block.weights)
            out[block.index] = apply(xp, w, block.visible, v[:, :, block.keys], finite)
    return out
