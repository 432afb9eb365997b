"""Linear forms of the weights over blocks of whole rows; see ``block_reductions``."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard._backends.formula import Finite, WeightBlock, apply
from regard._base.arrays import Arrays
from regard._call.call import ALL, Call

Fields = dict[str, Any]


def _of_heads(x: Any, block: WeightBlock) -> Any:
    """``(b or 1, h or 1, ...)`` of an operand ``(B or 1, Hq or 1, ...)``."""
    return x[block.b if len(x) > 1 else ALL, block.h if x.shape[1] > 1 else ALL]


class Product:
    """``W @ x``."""

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._out, self._x = xp, fields["product"], xp.wide(fields["product_with"])
        self._finite = Finite(xp, self._x)

    def update(self, block: WeightBlock) -> None:
        x = _of_heads(self._x, block)[:, :, block.keys]
        found = apply(self._xp, block.weights, block.visible, x, self._finite)
        self._out[block.index] = self._xp.array(self._out, found)

    def finish(self) -> None: ...


class TransposedProduct:
    """``Wᵀ @ y``."""

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._out = xp, fields["transposed"]
        self._y = xp.wide(fields["transposed_with"])
        self._finite = Finite(xp, self._y)

    def update(self, block: WeightBlock) -> None:
        y, visible = _of_heads(self._y, block)[:, :, block.rows], block.visible
        visible = None if visible is None else visible.swapaxes(-1, -2)
        found = apply(self._xp, block.weights.swapaxes(-1, -2), visible, y, self._finite)
        self._out[block.b, block.h, block.keys] += found

    def finish(self) -> None: ...


class Blocks:
    """Sums over the pairs of a block of queries and a block of keys."""

    largest = False

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._counts = xp, fields["block_counts"]
        self._queries, self._keys = fields["query_blocks"], fields["key_blocks"]
        self._out = fields["blocks_max" if self.largest else "blocks"]

    def update(self, block: WeightBlock) -> None:
        for b in range(block.b.start, block.b.stop):
            w = block.weights[b - block.b.start]
            w = self._fold(w, self._keys[b, block.keys], self._counts[1]).swapaxes(-1, -2)
            w = self._fold(w, self._queries[b, block.rows], self._counts[0]).swapaxes(-1, -2)
            at = b, block.h
            out = self._out[at]
            self._out[at] = self._xp.maximum(out, w) if self.largest else out + w

    def _fold(self, x: Any, ids: np.ndarray, count: int) -> Any:
        return self._xp.fold_groups(x, ids, count, largest=self.largest)

    def finish(self) -> None: ...


class LargestOfBlocks(Blocks):
    """The largest weight of them."""

    largest = True


class Diagonals:
    """Sums along diagonals: by the position of the query less that of the key."""

    def __init__(self, xp: Arrays, call: Call, fields: Fields) -> None:
        self._xp, self._call, self._out = xp, call, fields["diagonals"]
        self._first, self._step = fields["first_distances"], fields["distance_step"]
        self._starts = call.starts.tolist()

    def update(self, block: WeightBlock) -> None:
        w = block.weights
        if 0 in w.shape:
            return
        steps = self._call.query_step, self._call.key_step
        of_queries, of_keys = (
            np.arange(part.start, part.stop) * step
            for part, step in zip((block.rows, block.keys), steps)
        )
        of_queries += self._starts[block.b.start]
        if self._call.query_step == self._call.key_step:
            w = self._skewed(w)  # distances fall with the keys, from the first query's on
            rest = of_queries[1:] - of_keys[0]
            distances = np.concatenate([of_queries[0] - of_keys[::-1], rest])
        else:
            distances = (of_queries[:, None] - of_keys).reshape(-1)
            w = w.reshape((*w.shape[:2], -1))
        at = (distances - self._first[block.b.start]) // self._step
        at[(at < 0) | (at >= self._out.shape[2])] = -1
        self._out[block.b, block.h] += self._xp.fold_groups(w, at, self._out.shape[2])

    def _skewed(self, w: Any) -> Any:
        """``(b, h, rows + keys - 1)``: the sums along the diagonals.

        Each row, its keys turned around, is moved by one more than the row before.
        """
        *heads, R, K = w.shape
        turned = self._xp.take(w, np.arange(K - 1, -1, -1))
        moved = self._xp.full((*heads, R, R), 0.0, str(w.dtype).removeprefix("torch."))
        flat = self._xp.concatenate([turned, moved]).reshape((*heads, -1))
        square = flat[..., : R * (K + R - 1)].reshape((*heads, R, K + R - 1))
        return self._xp.cast(square, "float64").sum(-2)

    def finish(self) -> None: ...


# By the field that requests each.
LINEAR: dict[str, Any] = {
    "product": Product,
    "transposed": TransposedProduct,
    "blocks": Blocks,
    "blocks_max": LargestOfBlocks,
    "diagonals": Diagonals,
}
