"""The effects of a head as a map: signed tiles, rows, columns and links, exact, and at once.

What is largest, here, is largest in size, and is given with its sign. NaN is masked, and +∞ is no
finite number: a score, a value or a gradient is NaN, infinite or too large. Rows are read whole,
since an effect follows from all weights of its query; of a large head a background worker reads
them into a coarse heatmap, as it does the weights (``overview``).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import dtype_name, to_numpy
from regard._weights.effects import KINDS
from regard._weights.origin import seen_of
from regard.viewer._collected import TILE, Collected, halved
from regard.viewer._heads import SIZE, square
from regard.viewer._lost import lost_queries, sees_any

if TYPE_CHECKING:
    from regard._base.types import Float
    from regard._weights.effects import EffectKind
    from regard._weights.pair_matrix import PairMatrix
    from regard._weights.pair_reductions import Block
    from regard.recording import Layer, Recording
    from regard.viewer._collected import Picture

    Link = tuple[int, int, float]

__all__ = [
    "EffectMap", "has_effects", "kinds_of", "largest_effects", "pair_effects", "thumbnails",
]  # fmt: skip

DIRECT_PAIRS = 2**23  # a matrix of fewer has no worker: 20 ns for a pair where keys are left out
ROUNDS, FEW_ROUNDS = 32, 8
FEW_PAIRS = 2**30  # of fewer, an eighth is read soon, and finer tiles come from the heatmap
PAIRS_SLICE = 2**22  # between two looks at the stop flag: about 0.1 s
BUDGET_S = 0.25  # of computing, for the response of a column
MAX_COLUMNS = 4  # that are kept
MAX_LINKS = 512
FEW_QUERIES = 512  # all of which are read for the largest effect
SAMPLE = 16  # of more
THUMBNAIL_PAIRS = 2**26  # of a layer's heads, of which all are read for thumbnails: 0.8 s
THUMBNAIL_ROWS, THUMBNAIL_KEYS = 2**10, 2**22  # that are read of more, of all heads: about 0.5 s


def kinds_of(layer: Layer) -> list[str]:
    """The kinds of effects that a layer has: none without a gradient."""
    return list(KINDS) if has_effects(layer) else []


def has_effects(layer: Layer) -> bool:
    """Whether a layer keeps a gradient, and the values that are needed with it."""
    found: Any = layer._value, layer._gradient
    return all(x is not None for x in found) and not layer.weights_only


class EffectMap:
    """Tiles, rows, columns and links of the effects of a head; safe for several threads.

    Several heads are their mean: a pair that some of them mask counts as 0 there.

    Args:
        recording: where the head is.
        layer, head: which one, by their places; or which ones.
        kind: of effect.

    Raises:
        UnsupportedError: the layer has no gradient.
    """

    fewest = 0  # the least number of keys that a query of a link sees

    def __init__(
        self, recording: Recording, layer: int, head: int | tuple[int, ...], kind: EffectKind
    ) -> None:
        self._recording, self._layer = recording, recording.layers[layer]
        number, numbers = recording.layer_numbers[layer], self._layer.head_numbers
        self._effects: PairMatrix[Any]
        if isinstance(head, int):
            self._effects = recording.effects(number, numbers[head], kind)
        else:
            every = recording.effects(number, None, kind)
            self._effects = every.mix([numbers[h] for h in head])
        every_head = (head,) if isinstance(head, int) else head
        self._weights = [recording.weights[number].head(numbers[h]) for h in every_head]
        self.shape = self._effects.shape[0], self._effects.shape[1]
        heads = 1 if isinstance(head, int) else len(head)
        self._rows_at_once = max(1, PAIRS_SLICE // (heads * max(1, self.shape[1])))
        self._columns: OrderedDict[int, _Column] = OrderedDict()
        self._lock = threading.Lock()
        self._collected: _CollectedEffects | None = None
        if (pairs := heads * self.shape[0] * self.shape[1]) > DIRECT_PAIRS:
            rounds = FEW_ROUNDS if pairs <= FEW_PAIRS else ROUNDS
            self._collected = _CollectedEffects(self, rounds, self._rows_at_once)

    @property
    def nbytes(self) -> int:
        """Bytes kept, without those that the recording's weights keep."""
        kept = 0 if self._collected is None else self._collected.nbytes
        return kept + sum(column.values.nbytes for column in list(self._columns.values()))

    @property
    def dtype(self) -> np.dtype:
        """Of the effects."""
        return np.dtype(dtype_name(self._effects))

    @property
    def coverage(self) -> float:
        """The fraction of rows that is in the coarse tiles."""
        return 1.0 if self._collected is None else self._collected.coverage

    def stop(self) -> None:
        """Ends the worker; what it has read stays."""
        if self._collected is not None:
            self._collected.stop()

    def _read(self, reductions: Sequence[Any], rows: slice, columns: slice | None = None) -> None:
        """One pass over some rows, if the file still holds the whole recording."""
        self._recording._check_file()
        self._effects.part(rows, columns)._ask_raw(*reductions)

    def bins(
        self, rows: slice, columns: slice, down: int, across: int, links: Largest | None = None
    ) -> Picture:
        """The effect of largest size in each bin of ``(down, across)``; the last are smaller.

        Args:
            links: takes the largest pairs of the same rows and columns.
        """
        count = len(range(rows.start, rows.stop, rows.step or 1))
        shape = count, columns.stop - columns.start
        found = Bins(shape, down, across, self.dtype)
        self._read([found] if links is None else [found, links], rows, columns)
        return self._with_lost(found.result(), rows, columns, down, across)

    def _with_lost(
        self, picture: Picture, rows: slice, columns: slice, down: int, across: int
    ) -> Picture:
        """+∞ in the bins with an unmasked pair whose effect is no finite number."""
        picture = np.where(np.isinf(picture), np.float32(np.inf), picture)
        if self._is_finite(rows):
            return picture
        lefts = np.arange(0, columns.stop - columns.start, across)
        for at, sees in self._unmasked(rows, columns):
            bins = picture[at // down]
            bins[np.isnan(bins) & np.logical_or.reduceat(sees, lefts)] = np.inf
        return picture

    def _is_finite(self, rows: slice) -> bool:
        """Whether the effects of some queries follow from numbers of usual size alone."""
        is_usual = np.isfinite(self._most)
        return bool(is_usual) and not any(len(lost_queries(w.part(rows))) for w in self._weights)

    @cached_property
    def _most(self) -> np.float32:
        """More than the size of any effect; in float32, so that it is ∞ where it may overflow."""
        layer: Any = self._layer
        value, gradient = (
            np.abs(to_numpy(x)).max(initial=0).astype(np.float64)
            for x in (layer.value, layer.gradient)
        )
        with np.errstate(over="ignore"):
            return np.float32(8 * layer.value.shape[-1] * value * (value + gradient))

    def _unmasked(self, rows: slice, columns: slice) -> Iterator[tuple[int, np.ndarray]]:
        """Each of some rows, counted from 0, and which of some keys any head sees from it."""
        keys = np.arange(columns.start, columns.stop)
        for seen in (seen_of(weights.part(rows)) for weights in self._weights):
            for at in range(len(range(self.shape[0])[rows])):
                yield at, seen.pairs(np.full(len(keys), at), keys)[0]

    def tile(
        self, plane: str, level: int, row: int, column: int
    ) -> tuple[Float[np.ndarray, "256 256"], float]:
        """Bins of ``2^level`` queries and keys each, and the fraction of rows that is in them."""
        if self._collected is not None and level >= self._collected.level:
            return self._collected.tile(plane, level, row, column)
        out = np.full((TILE, TILE), np.nan, np.float32)
        rows, columns = (
            slice(min(n, (at * TILE) << level), min(n, ((at + 1) * TILE) << level))
            for n, at in zip(self.shape, (row, column))
        )
        if rows.start < rows.stop and columns.start < columns.stop:
            picture = self.bins(rows, columns, 1 << level, 1 << level)
            out[: picture.shape[0], : picture.shape[1]] = picture
        return out, 1.0

    def mean_row(self, parts: Sequence[slice]) -> Float[np.ndarray, " Lk"]:
        """The mean of the effects of some queries.

        NaN where all of them mask the key, +∞ where an effect is no finite number.
        """
        sums = KeySums(self.shape[1])
        for part in parts:
            self._read([sums], part)
        return sums.result() / sum(part.stop - part.start for part in parts)

    def column(self, key: int) -> tuple[Float[np.ndarray, " Lq"], float]:
        """The effects of one key on all queries, and the fraction of rows that was read.

        Those that were not read yet are NaN; each call reads more of them.
        """
        until = time.monotonic() + BUDGET_S
        with self._lock:
            found = self._columns.pop(key, None) or _Column(self.shape[0])
            self._columns[key] = found
            if len(self._columns) > MAX_COLUMNS:
                self._columns.popitem(last=False)
            while found.read < self.shape[0]:
                rows = slice(found.read, min(found.read + self._rows_at_once, self.shape[0]))
                found.values[rows] = self.bins(rows, slice(key, key + 1), 1, 1)[:, 0]
                found.read = rows.stop
                if time.monotonic() > until:
                    break
            return found.values.copy(), found.read / max(1, self.shape[0])

    def links(
        self, n: int, rows: slice | None = None, columns: slice | None = None
    ) -> tuple[list[Link], float]:
        """The pairs ``(query, key, effect)`` of largest size, of a part or of the whole."""
        is_whole = rows is None or columns is None
        if is_whole and self._collected is not None:
            return self._collected.links(n)
        rows, columns = rows or slice(0, self.shape[0]), columns or slice(0, self.shape[1])
        found = Largest(n, rows, columns.start, self.dtype)
        self._read([found], rows, columns)
        return found.result(), 1.0


class _Column:
    """The effects of a key, as far as they are read."""

    def __init__(self, count: int) -> None:
        self.values, self.read = np.full(count, np.nan, np.float32), 0


class _CollectedEffects(Collected):
    """The coarse heatmap of the effects of a large head, and its largest pairs."""

    def __init__(self, whole: EffectMap, rounds: int, rows_at_once: int) -> None:
        super().__init__(whole.shape, rounds, rows_at_once)
        self._whole = whole
        self._largest = np.full(self._size, np.nan, np.float32)
        self._links: list[Link] = []

    @property
    def nbytes(self) -> int:
        return self._largest.nbytes + self._bytes_of_levels

    def links(self, n: int) -> tuple[list[Link], float]:
        self._keep_alive()
        with self._lock:
            return self._links[:n], self.coverage

    def _at_level(self, plane: str, level: int) -> Picture:
        found = self._largest
        for _ in range(level - self.level):
            found = halved(found, larger)
        return found

    def _pooled(self, rows: slice) -> tuple[Picture, list[Link]]:
        links = Largest(MAX_LINKS, rows, 0, self._whole.dtype)
        columns = slice(0, self._shape[1])
        bins = self._whole.bins(rows, columns, self._rows_of_bin, 1 << self.level, links)
        return bins, links.result()

    def _take(self, at: int, pooled: tuple[Picture, list[Link]]) -> None:
        found, links = pooled
        bands = slice(at, at + len(found))
        self._largest[bands] = larger(self._largest[bands], found)
        self._links = sorted([*self._links, *links], key=_rank)[:MAX_LINKS]


class Bins:
    """The number of largest size in each bin of ``(down, across)``, with its sign.

    NaN where all of a bin is masked, or where a number is NaN.
    """

    def __init__(self, shape: tuple[int, int], down: int, across: int, dtype: np.dtype) -> None:
        self._down, self._across, self._dtype = down, across, dtype
        self._size = -(-shape[0] // down), -(-shape[1] // across)
        self._high, self._low = (np.full(self._size, -np.inf, np.float32) for _ in range(2))
        self._found: np.ndarray | None = None

    def update(self, block: Block) -> None:
        """Takes the next rows."""
        values, seen = _numpy(block)
        if not values.size:
            return
        (rows, tops), (columns, lefts) = (
            _bins(part, side)
            for part, side in ((block.rows, self._down), (block.keys, self._across))
        )
        for kept, x in ((self._high, values), (self._low, -values)):
            x = x if seen is None else np.where(seen, x, np.float32(-np.inf))
            folded = np.maximum.reduceat(np.maximum.reduceat(x, lefts, 1), tops, 0)
            kept[rows, columns] = np.maximum(kept[rows, columns], folded)

    def fields(self) -> dict[str, Any]:
        """What the kernels fill."""
        self._found = np.empty(self._size, self._dtype)
        extent = self._size[0] * self._down, self._size[1] * self._across
        return {"bins": self._size, "extent": extent, "pooled_max": self._found[None, None]}

    def result(self) -> Picture:
        """``(bins down, bins across)``."""
        if self._found is not None:
            return self._found.astype(np.float32, copy=False)
        found = np.where(self._high >= self._low, self._high, -self._low)
        found[np.isnan(self._high) | (np.maximum(self._high, self._low) == -np.inf)] = np.nan
        return found


class Largest:
    """The n pairs ``(query, key, number)`` of largest size; of equal ones the first in the text.

    Args:
        n: how many, at most; numbers of 0 and NaN are none.
        rows: that are read, by their positions.
        left: the first key.
        dtype: of the numbers that are read.
    """

    def __init__(self, n: int, rows: slice, left: int, dtype: np.dtype) -> None:
        self._n, self._left, self._dtype = n, left, dtype
        self._rows = range(rows.start, rows.stop, rows.step or 1)
        self._found: list[Link] = []
        self._floor = 0.0
        self._pairs: tuple[np.ndarray, ...] = ()

    def update(self, block: Block) -> None:
        """Takes the next rows."""
        values, _ = _numpy(block)  # 0 where masked
        flat = np.abs(values).reshape(-1)
        at = np.flatnonzero(flat > self._floor)
        if not self._n or not at.size:
            return
        if at.size > self._n:
            least = np.partition(flat[at], -self._n)[-self._n]
            at = at[flat[at] >= least]
        i, j = np.divmod(at, values.shape[1])
        queries = [self._rows[block.rows.start + int(n)] for n in i]
        keys = (j + block.keys.start + self._left).tolist()
        numbers = values.reshape(-1)[at].tolist()
        self._found = sorted([*self._found, *zip(queries, keys, numbers)], key=_rank)[: self._n]
        if len(self._found) == self._n:
            self._floor = abs(self._found[-1][2])

    def fields(self) -> dict[str, Any]:
        """What the kernels fill."""
        query, key = (np.full((1, 1, self._n), -1, np.int64) for _ in range(2))
        self._pairs = query, key, np.zeros((1, 1, self._n), self._dtype)
        names = "pair_query", "pair_key", "pair_value"
        return {"n": self._n, **dict(zip(names, self._pairs))}

    def result(self) -> list[Link]:
        """Largest first."""
        if self._pairs:
            pairs = zip(*(x[0, 0].tolist() for x in self._pairs))
            found = [(self._rows[i], j + self._left, x) for i, j, x in pairs if i >= 0]
            return [(i, j, float(np.float32(x))) for i, j, x in found]
        return self._found


class KeySums:
    """The sum of each key's numbers over the queries.

    NaN where all of them mask it, +∞ where it is no finite number.
    """

    def __init__(self, keys: int) -> None:
        self._sums, self._seen = np.zeros(keys), np.zeros(keys, bool)

    def fields(self) -> None:
        """Rows are taken."""

    def update(self, block: Block) -> None:
        """Takes the next rows."""
        values, seen = _numpy(block)
        self._sums[block.keys] += values.sum(0, dtype=np.float64)
        self._seen[block.keys] |= len(values) > 0 if seen is None else seen.any(0)

    def result(self) -> Float[np.ndarray, " Lk"]:
        """Sums."""
        with np.errstate(over="ignore"):
            sums = self._sums.astype(np.float32)
        sums[~np.isfinite(sums)] = np.inf
        return np.where(self._seen, sums, np.float32(np.nan))


def larger(a: Picture, b: Picture) -> Picture:
    """The number of larger size, the first of equal ones; NaN counts for none."""
    take = np.isnan(a) | (np.abs(b) > np.abs(a)) | ((b == -a) & (b > a))
    return np.where(take, b, a)


def largest_effects(recording: Recording, kind: EffectKind) -> list[list[float | None] | None]:
    """For each layer the size of the largest effect of each head; None without a gradient.

    Of more than ``FEW_QUERIES`` those with the largest gradients are read.
    """
    return [
        _largest_of(recording, number, layer, kind) if has_effects(layer) else None
        for number, layer in zip(recording.layer_numbers, recording.layers)
    ]


def _largest_of(
    recording: Recording, number: int, layer: Layer, kind: EffectKind
) -> list[float | None]:
    recording._check_file()
    effects = recording.effects(number, None, kind)
    most = np.zeros(layer.heads)
    for rows in _telling_rows(layer):
        found = to_numpy(effects.part(rows).strongest(1).value)
        most = np.fmax(most, np.abs(found).max(-1, initial=0.0))
    return [float(f"{x:.9g}") if np.isfinite(x) else None for x in most]


def _telling_rows(layer: Layer) -> list[slice]:
    """All rows, or those with the largest gradients of all heads."""
    count = layer._query.shape[1]
    if count <= FEW_QUERIES:
        return [slice(0, count)]
    rows = np.sort(np.argsort(-_gradient_sizes(layer), kind="stable")[:SAMPLE])
    return [slice(row, row + 1) for row in rows.tolist()]


def _gradient_sizes(layer: Layer) -> Float[np.ndarray, " Lq"]:
    """The squares of each query's gradients, summed over all heads."""
    gradient = to_numpy(layer.gradient).astype(np.float32)
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.square(gradient).sum((0, 2)))


def thumbnails(recording: Recording, place: int, kind: EffectKind) -> tuple[np.ndarray, float]:
    """``(H, SIZE, SIZE)`` effects of each head of a layer, and the fraction of rows in them.

    Of a long text each bin has the rows with the largest gradients.
    """
    recording._check_file()
    layer = recording.layers[place]
    effects = recording.effects(recording.layer_numbers[place], None, kind)
    H, Lq, Lk = effects.shape
    if H * Lq * Lk <= THUMBNAIL_PAIRS:
        return square(_finite(to_numpy(effects.pool((SIZE, SIZE))))), 1.0
    sizes, bins = _gradient_sizes(layer), min(SIZE, Lq)
    count = max(1, min(THUMBNAIL_ROWS, THUMBNAIL_KEYS // Lk) // (H * bins))
    out = np.full((H, bins, min(SIZE, Lk)), np.nan, np.float32)
    read = 0
    for at in range(bins):
        low, high = at * Lq // bins, (at + 1) * Lq // bins
        for row in low + np.argsort(-sizes[low:high], kind="stable")[:count]:
            found = to_numpy(effects.part(slice(int(row), int(row) + 1)).pool((1, SIZE)))
            out[:, at] = larger(out[:, at], _finite(found[:, 0]))
            read += 1
    return square(out), read / Lq


def pair_effects(recording: Recording, kind: EffectKind, query: int, key: int) -> np.ndarray:
    """The effect of a pair in every head, layer after layer.

    NaN where masked or unknown, +∞ where it is no finite number.
    """
    found = []
    for number, layer in zip(recording.layer_numbers, recording.layers):
        if not has_effects(layer):
            found.append(np.full(layer.heads, np.nan, np.float32))
            continue
        at = slice(query, query + 1), slice(key, key + 1)
        effects = to_numpy(recording.effects(number, None, kind).part(*at).pool((1, 1)))[:, 0, 0]
        is_lost = ~np.isfinite(effects) & sees_any(recording.weights[number].part(*at))
        found.append(np.where(is_lost, np.float32(np.inf), effects))
    return np.concatenate(found)


def _finite(effects: np.ndarray) -> np.ndarray:
    """NaN in place of ∞, which a picture without words would show as the largest effects."""
    return np.where(np.isfinite(effects), effects, np.float32(np.nan))


def _numpy(block: Block) -> tuple[np.ndarray, np.ndarray | None]:
    """Numbers in float32, and which are unmasked."""
    seen = None if block.visible is None else to_numpy(block.visible)
    return to_numpy(block.values).astype(np.float32, copy=False), seen


def _bins(part: slice, side: int) -> tuple[slice, np.ndarray]:
    """The bins that some neighbours are in, and where each of them begins among these."""
    first, last = part.start // side, -(-part.stop // side)
    edges = np.arange(first, last) * side - part.start
    return slice(first, last), np.maximum(edges, 0)


def _rank(link: Link) -> tuple[float, int, int]:
    return -abs(link[2]), link[0], link[1]
