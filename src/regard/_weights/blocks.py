"""Blocks of weights as arrays: rows, columns and whole matrices."""

from __future__ import annotations

from collections.abc import Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from regard._base import loaded
from regard._base.arrays import arrays_of, to_numpy
from regard._base.settings import require_materializable
from regard._base.types import ArrayT
from regard._call.call import Call
from regard._weights.differentiable import block_of, differentiable, require_whole_rows
from regard._weights.exchange import capsule
from regard._weights.parts import basic_index, runs, sharing_runs, spaced, span
from regard._weights.questions import at_once, question
from regard._weights.sections import Sections
from regard._weights.statistics_cache import Place

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

Pick: TypeAlias = int | np.integer[Any] | slice | EllipsisType


class Blocks(Sections[ArrayT]):
    """Weights that are given as they are; ``AttentionWeights`` has them."""

    if TYPE_CHECKING:

        def _reduce(self, fields: dict[str, Any]) -> None: ...

    @question
    def __getitem__(self, index: Pick | tuple[Pick, ...]) -> ArrayT:
        """Any basic index: ints, slices and ``...``; a head by its number in ``head_numbers``.

        Raises:
            IndexError: out of range, or not a basic index; no head of that number, or a slice of
                heads that do not count from 0.
            MaterializeError: the part is above the limit.
        """
        self._require_now()
        xp, picks = arrays_of(self._call.query), self._picks(index)
        call, lead = self._call, len(self._call.leading)
        B, Hq, _, Lq, Lk = call.sizes
        batch = np.arange(B).reshape(call.leading)[tuple(picks[:lead])]
        heads = np.arange(Hq)[picks[lead]] if call.heads else np.asarray(0)
        rows, columns = np.arange(Lq)[picks[-2]], np.arange(Lk)[picks[-1]]
        shape = (*batch.shape, *heads.shape, *rows.shape, *columns.shape)
        require_materializable(
            "weights", shape, 8 * np.dtype(self._dtype_name).itemsize,
            "Ask for a part: weights[0, head, i], weights.pool(...)",
        )  # fmt: skip
        axes = [x.reshape(-1) for x in (batch, heads, rows, columns)]
        if (graph := differentiable(self._graph)) is not None and all(x.size for x in axes):
            return self._differentiable_block(graph, *axes).reshape(shape)
        out = xp.zeros(tuple(x.size for x in axes), self._dtype_name)
        if 0 not in out.shape:
            self._fill(out, *axes)
            if down := [axis for axis in (1, 2, 3) if axes[axis][0] > axes[axis][-1]]:
                out = xp.flip(out, down)
        found: ArrayT = out.reshape(shape) if shape or self._call.is_torch else out.reshape(())[()]
        return found

    def _differentiable_block(
        self, graph: Call, batch: np.ndarray, heads: np.ndarray, rows: np.ndarray,
        columns: np.ndarray,
    ) -> Any:  # fmt: skip
        """The weights of chosen rows and columns, with their gradient."""
        require_whole_rows(graph)
        _, Hq, Hkv, *_ = graph.sizes
        b = range(int(batch.min()), int(batch.max()) + 1)
        h = range(int(heads.min()), int(heads.max()) + 1)
        if len(h) > 1:  # all that share their keys
            group = Hq // Hkv
            h = range(h.start // group * group, -(-h.stop // group) * group)
        some, known = spaced(rows), None
        if self._statistics.backend.reads_statistics:
            own = self._place
            of = Place(own.b[b.start : b.stop], own.h[h.start : h.stop], own.rows[some])
            known = self._statistics.of(of)
        call = graph.of_heads(b, h).rows(some)
        found = block_of(call, self._statistics.backend.name, known)
        places = (batch - b.start, heads - h.start, np.argsort(np.argsort(rows)), columns)
        for axis, place in enumerate(places):
            if not np.array_equal(place, np.arange(found.shape[axis])):
                indices = np.ascontiguousarray(place)  # torch has no strides that are negative
                chosen = loaded.torch.tensor(indices, device=found.device)
                found = found.index_select(axis, chosen)
        return found

    def _picks(self, index: Any) -> list[Any]:
        """One int or slice for each axis; heads by place."""
        heads = len(self._call.leading) if self._call.heads else -1
        return basic_index(index, self.shape, heads, self._numbers)

    def _fill(
        self, out: Any, batch: np.ndarray, heads: np.ndarray, rows: np.ndarray, columns: np.ndarray
    ) -> None:
        """Writes chosen weights, with heads, rows and columns upwards: as many as can be at once.

        Heads, rows and columns are evenly spaced; elements of the batch need not be.
        """
        call, (h, i, j) = self._call, (spaced(x) for x in (heads, rows, columns))
        _, Hq, Hkv, *_ = call.sizes
        if self._statistics.backend.reads_statistics:  # of all heads together
            asked = zip(self._place, (span(batch), h, i))
            self._statistics.learn(Place(*(part[x] for part, x in asked)))
        sharing = list(sharing_runs(range(Hq)[h], Hq // Hkv))
        for at, b in runs(batch, 1 if len(sharing) > 1 else batch.size):
            done = 0
            for some in sharing:
                of = slice(done, done := done + len(some))
                self._of_heads(b, some)._cut(i)._write(out[at, of], j)

    def _write(self, out: Any, columns: slice) -> None:
        """Writes the weights of some keys into zeros ``(B, Hq, Lq, keys)``, contiguous."""
        *_, Lq, Lk = self._call.sizes
        every = len(range(*columns.indices(Lk))) == Lk
        if every or self._statistics.backend.reads_statistics:
            self._cut(None, columns)._reduce({"weights": out})
            return
        for b, h in np.ndindex(*out.shape[:2]):  # it would compute the rows for their statistics
            for low in range(0, Lq, height := max(64, 2**20 // Lk)):
                part = self._head(b, h)._cut(slice(low, low + height))
                block = arrays_of(out).zeros((1, 1, *part.shape), self._dtype_name)
                part._reduce({"weights": block})
                out[b, h, low : low + height] = block[0, 0, :, columns]

    @at_once
    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.floating[Any]]:
        """The whole matrix; refused above the limit that ``regard.limits`` sets."""
        if copy is False:
            raise ValueError("weights: they are computed when asked for, so an array is a copy.")
        whole = to_numpy(self[...])
        return whole if dtype is None else whole.astype(dtype)

    @at_once
    def __dlpack__(self, *, copy: bool | None = None, **options: Any) -> Any:
        """The whole matrix, as ``torch.as_tensor`` asks for it; refused as ``np.asarray`` is."""
        return capsule(lambda: self[...], "weights", copy, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        found: tuple[int, int] = self._call.query.__dlpack_device__()
        return found

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ArrayT]:
        is_by_head = self._call.heads and not self._call.leading
        return (self[i] for i in (self.head_numbers if is_by_head else range(len(self))))
