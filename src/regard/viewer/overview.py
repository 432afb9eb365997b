"""One head as a map: tiles of its weights at every scale, exact, and at once.

A small matrix is read when a tile is requested. For a large one a background worker pools all rows
into a coarse heatmap, from which the coarse tiles come: it reads every 32nd row first, or fewer of
a very large one, then those in between, so the heatmap is whole after the first round and exact
after the last. A finer tile is read when it is requested, from its own rows alone; where these are
many, some with each request.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.errors import UnsupportedError
from regard._weights.attention_weights import AttentionWeights
from regard._weights.origin import call_of, seen_of
from regard.viewer._aligned import AlignedWeights
from regard.viewer._bins import bins, mean_log
from regard.viewer._collected import TILE, Collected, halved, rows_of_bins
from regard.viewer._lost import lost_rows
from regard.viewer._sampled import SampledTile
from regard.viewer._sums import Sums
from regard.viewer._words import WordBlocks, lost_words, seen_words

if TYPE_CHECKING:
    from regard._base.types import Float, PoolHow
    from regard.recording import Recording, Words
    from regard.viewer._alignment import Places
    from regard.viewer._bins import HeadWeights, Picture
    from regard.viewer._lost import Lost

__all__ = ["TILE", "HeadMap", "samples_of"]

ROUNDS = 32  # at least
FIRST_ROUND = 2**36  # multiplications of the first round, if it has rows enough: 2 to 5 s
FEWEST_ROWS = 512  # of the first round
DIRECT_WORK = 2**33  # multiplications; a matrix of fewer has no worker: about 0.2 s
WORK_SLICE = 2**32  # multiplications between two looks at the stop flag: about 0.1 s
TILE_WORK = 2**35  # multiplications for an answer with a fine tile: about 0.6 s
SAMPLED_TILES = 64  # that are kept, each of half a megabyte
LINK_BINS = 512  # on a side, each of which may give a link
FEW_KEYS = 8  # of fewer, one has a large weight in any case
MEAN_PAIRS = 2**24  # of which the strongest of a mean of heads are sought
MEAN_BLOCK = 2**20  # pairs at a time


def samples_of(queries: int, keys: int, head_size: int) -> int:
    """How many samples of its rows a head's map is read in: 1 where that is the whole."""
    work, rounds = queries * keys * head_size, ROUNDS
    if work <= DIRECT_WORK:
        return 1
    while work > rounds * FIRST_ROUND and rounds * FEWEST_ROWS < queries:
        rounds *= 2
    return rounds


class HeadMap:
    """Tiles, rows, columns and links of one head, in ln(weight); safe for several threads.

    Several heads are their mean: a pair that some of them mask counts as 0 there. In a tile, each
    bin is the mean of the heads' bins. A mean with a weight that is no number is none.

    Args:
        recording: where the head is.
        layer, head: which one, by their places; or which ones.
        places: the query of each row and the key of each column, −1 for none; by default all.
        words: the recording by words, where each pair of pieces has the weight of its words; then
            without ``places``.

    NaN is masked; +inf is unmasked and no number, −inf unmasked with weight 0.
    """

    def __init__(
        self,
        recording: Recording,
        layer: int,
        head: int | tuple[int, ...],
        places: tuple[Places, Places] | None = None,
        words: Words | None = None,
    ) -> None:
        self._recording, self._words = recording, words
        found = recording.layers[layer]
        layer_number = recording.layer_numbers[layer]
        weights = recording.weights[layer_number]
        numbers = [found.head_numbers[h] for h in ((head,) if isinstance(head, int) else head)]
        self._numbers = [(layer_number, number) for number in numbers]
        self._pieces = [weights.head(number) for number in numbers]
        self._places = places
        self._weights = [self._of_head(*of) for of in zip(self._pieces, self._numbers)]
        self._head_size = int(found._query.shape[-1])
        self.query_start = found.query_start
        self.shape = self._weights[0].shape
        self._sums: Sums | None = None
        self._collected: _CollectedWeights | None = None
        self._sampled: OrderedDict[tuple[str, int, int, int], SampledTile] = OrderedDict()
        self._lock = threading.Lock()
        queries, keys = self.shape
        if (rounds := samples_of(queries, keys, self._head_size)) > 1:
            self._collected = _CollectedWeights(self, rounds)

    def _of_head(self, pieces: AttentionWeights[Any], numbers: tuple[int, int]) -> HeadWeights:
        """The weights of a head; by words, or at the chosen places, where these are wanted."""
        if self._words is not None:
            return WordBlocks.of(self._words, pieces, *numbers)
        return pieces if self._places is None else AlignedWeights(pieces, *self._places)

    def _weights_of(self, rows: slice) -> list[HeadWeights]:
        """Each head's weights of some queries, if the file still holds the whole recording."""
        self._recording._check_file()
        return [weights.part(rows) for weights in self._weights]

    def _pieces_of(self, rows: slice) -> list[AttentionWeights]:
        """The same by tokens, whatever the map is of."""
        self._recording._check_file()
        return [weights.part(rows) for weights in self._pieces]

    def _bins(
        self, rows: slice, planes: tuple[PoolHow, ...], down: int, across: int, columns: slice
    ) -> list[Picture]:
        """``bins`` of some queries, the mean of the heads."""
        pictures = [bins(w, planes, down, across, columns) for w in self._weights_of(rows)]
        found = [mean_log(same) for same in zip(*pictures)]
        if self._places is not None:  # which tells of itself what is no number
            return found
        lefts = np.arange(0, columns.stop - columns.start, across)
        for plane, picture in zip(planes, found):
            for row, keys in self._lost(rows, plane, columns):
                at = range(self.shape[0])[rows].index(row) // down
                picture[at, np.logical_or.reduceat(keys, lefts)] = np.inf
        return found

    def _lost(self, rows: slice, plane: PoolHow, columns: slice) -> Lost:
        """Those of some rows with weights of a head that are no numbers, and at which columns."""
        for pieces in self._pieces:
            if self._words is not None and plane == "max":
                yield from lost_words(self._words, pieces, rows, columns)
            else:
                yield from lost_rows(pieces, rows, columns)

    def _work(self, rows: int, columns: int) -> int:
        return rows * columns * self._head_size * len(self._weights)

    @property
    def nbytes(self) -> int:
        """Bytes kept, without those that the recording's weights keep."""
        every = (self._collected, self._sums, *list(self._sampled.values()))
        return sum(kept.nbytes for kept in every if kept is not None)

    @property
    def coverage(self) -> float:
        """The fraction of rows that is in the coarse tiles."""
        return 1.0 if self._collected is None else self._collected.coverage

    def stop(self) -> None:
        """Ends the worker; what it has read stays."""
        if self._collected is not None:
            self._collected.stop()

    def tile(
        self, plane: PoolHow, level: int, row: int, column: int
    ) -> tuple[Float[np.ndarray, "256 256"], float]:
        """Bins of ``2^level`` queries and keys each, and the fraction of rows that is in them.

        Args:
            plane: ``"max"``, the strongest weight, or ``"mass"``, the mean over the bin's queries
                of the sum over its keys.
            level: from 0 on.
            row, column: of the tile; bins beyond the matrix are NaN.
        """
        if self._collected is not None and level >= self._collected.level:
            return self._collected.tile(plane, level, row, column)
        out = np.full((TILE, TILE), np.nan, np.float32)
        rows, columns = (
            slice(min(n, (at * TILE) << level), min(n, ((at + 1) * TILE) << level))
            for n, at in zip(self.shape, (row, column))
        )
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return out, 1.0
        side, rounds = 1 << level, 1
        while self._work(rows.stop - rows.start, self.shape[1]) > rounds * TILE_WORK:
            rounds *= 2
        if min(rounds, side) > 1:
            return self._sampled_tile(plane, level, row, column, rows, columns, min(rounds, side))
        shown: PoolHow = plane if level else "max"  # the share of one weight is itself
        (picture,) = self._bins(rows, (shown,), side, side, columns)
        out[: picture.shape[0], : picture.shape[1]] = picture
        return out, 1.0

    def _sampled_tile(
        self, plane: PoolHow, level: int, row: int, column: int, rows: slice, columns: slice,
        rounds: int,
    ) -> tuple[Float[np.ndarray, "256 256"], float]:  # fmt: skip
        """A tile after one more round."""

        def read(rows: slice, planes: tuple[PoolHow, ...], down: int) -> list[Picture]:
            return self._bins(rows, planes, down, 1 << level, columns)

        name = (plane, level, row, column)
        with self._lock:
            tile = self._sampled.pop(name, None) or SampledTile(plane, read, rows, level, rounds)
            self._sampled[name] = tile
            while len(self._sampled) > SAMPLED_TILES:
                self._sampled.popitem(last=False)
        return tile.next()

    def row(self, query: int) -> Float[np.ndarray, " Lk"]:
        """The weights of one query over all keys."""
        return self.mean_row([slice(query, query + 1)])

    def mean_row(self, parts: Sequence[slice]) -> Float[np.ndarray, " Lk"]:
        """The mean of the weights of some queries over all keys."""
        keys = slice(0, self.shape[1])
        if self._words is not None:  # the share of several tokens is no weight of words
            parts = [slice(q, q + 1) for part in parts for q in range(part.start, part.stop)]
        counts = [part.stop - part.start for part in parts]
        rows = [
            self._bins(part, ("max" if count == 1 else "mass",), count, 1, keys)[0][0]
            for part, count in zip(parts, counts)
        ]
        return mean_log(rows, counts)

    def column(self, key: int) -> tuple[Float[np.ndarray, " Lq"], float]:
        """The weights of one key from all queries; NaN also for rows that were not read yet."""
        out = np.full(self.shape[0], np.nan, np.float32)
        parts = [slice(0, self.shape[0])]
        if self._collected is not None:
            parts = self._collected.parts_read(parts[0])
        for part in parts:
            out[part] = self._bins(part, ("max",), 1, 1, slice(key, key + 1))[0][:, 0]
        return out, sum(len(out[part]) for part in parts) / max(1, len(out))

    def sums(self) -> tuple[Float[np.ndarray, " LqLk"], float]:
        """The sum of each query's weights, then of each key's, and the fraction of rows in them.

        A key's are those of the rows read so far, a query's NaN until it is read.
        """
        if self._sums is None:
            step = max(1, WORK_SLICE // (self._work(1, self.shape[1]) + 1))
            self._sums = Sums(self._pieces_of, self.shape, step)
        return self._sums.read()

    def links(
        self, n: int, rows: slice | None = None, columns: slice | None = None
    ) -> tuple[list[tuple[int, int, float]], float]:
        """The strongest token pairs ``(query, key, ln weight)`` of a part, or of the whole.

        The whole leaves out queries that see fewer than ``fewest`` keys, and pairs with the first
        token or word, the usual attention sink, unless there are no others. A large matrix gives at
        most one pair per bin, and keeps half of the n for pairs that are more than a hundredth of
        the text apart.

        Raises:
            UnsupportedError: a part of more than ``MEAN_PAIRS`` of several heads.
        """
        if rows is None or columns is None:
            whole = slice(0, self.shape[0])
            if self._collected is not None and len(self._weights) == 1:
                return self._collected.links(n)
            others = self._notable(n, whole, slice(self.first_keys, self.shape[1]))
            return others or self._notable(n, whole, slice(0, self.first_keys)), 1.0
        return self._strongest(n, rows, columns), 1.0

    @property
    def first_keys(self) -> int:
        """How many keys the first token, or word, has."""
        starts = [0, 1] if self._words is None else self._words.starts
        return int(starts[1]) if len(starts) > 1 else self.shape[1]

    @cached_property
    def fewest(self) -> int:
        """The least number of keys that a query of a notable pair sees; 0: that is all queries."""
        fewest = min(FEW_KEYS, int(self._seen.max(initial=0)) // 2)
        return fewest if (self._seen < fewest).any() else 0

    @cached_property
    def _seen(self) -> np.ndarray:
        """How many keys, or words, each query sees: the mean of the heads."""
        every = [self._seen_by(pieces) for pieces in self._pieces]
        counts = np.mean(every, 0) if len(every) > 1 else every[0]
        if self._places is None:
            return counts
        queries, _ = self._places
        return np.where(queries >= 0, counts[queries], 0)

    def _seen_by(self, pieces: AttentionWeights[Any]) -> np.ndarray:
        if self._words is None:
            return seen_of(pieces).count[0]
        return seen_words(self._words, call_of(pieces))

    def _notable(self, n: int, rows: slice, columns: slice) -> list[tuple[int, int, float]]:
        """The strongest pairs of the queries that see enough keys."""
        runs = _runs(self._seen[rows] >= self.fewest, rows)
        found = [link for run in runs for link in self._strongest(n, run, columns)]
        return sorted(found, key=lambda link: -link[2])[:n]

    def _strongest(self, n: int, rows: slice, columns: slice) -> list[tuple[int, int, float]]:
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return []
        if len(self._weights) > 1:
            return self._strongest_of_mean(n, rows, columns)
        found = self._weights_of(rows)[0].part(columns=columns).strongest(n)
        pairs = zip(*(to_numpy(x).reshape(-1).tolist() for x in found))
        return [
            (rows.start + query * (rows.step or 1), columns.start + key, math.log(weight))
            for query, key, weight in pairs
            if weight
        ]

    def _strongest_of_mean(
        self, n: int, rows: slice, columns: slice
    ) -> list[tuple[int, int, float]]:
        """The same of several heads, block by block: no head's own strongest pairs tell it."""
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if height * width > MEAN_PAIRS:
            raise UnsupportedError(
                f"links of several heads: these are {height:,} queries and {width:,} keys; request"
                f" a part of at most {MEAN_PAIRS:,} pairs with rows and columns, or one head."
            )
        found: list[tuple[int, int, float]] = []
        step = max(1, MEAN_BLOCK // width)
        for low in range(rows.start, rows.stop, step):
            block = slice(low, min(low + step, rows.stop))
            (picture,) = self._bins(block, ("max",), 1, 1, columns)
            if self._words is not None:
                picture = _at_first(picture, self._words, block, columns, rows.start)
            for row, column in _largest(
                np.nan_to_num(picture, nan=-np.inf, neginf=-np.inf, posinf=-np.inf), n
            ):
                found.append((low + row, columns.start + column, float(picture[row, column])))
            found = sorted(found, key=lambda link: -link[2])[:n]
        return found


class _CollectedWeights(Collected):
    """The coarse heatmap of the weights of a large head."""

    def __init__(self, whole: HeadMap, rounds: int) -> None:
        queries, keys = whole.shape
        super().__init__((queries, keys), rounds, WORK_SLICE // (whole._work(1, keys) + 1))
        self._whole = whole
        self._max = np.full(self._size, np.nan, np.float32)
        # Of the first column of bins that has keys behind the first token or word, these alone.
        self._beside_at = min(whole.first_keys >> self.level, self._size[1] - 1)
        self._beside = self._max[:, 0].copy()
        self._lost = np.zeros(self._size, bool)  # bins with weights that are no numbers
        self._sum = np.zeros(self._size, np.float32)  # of the weights that were read

    @property
    def nbytes(self) -> int:
        return self._max.nbytes + self._lost.nbytes + self._sum.nbytes + self._bytes_of_levels

    def links(self, n: int) -> tuple[list[tuple[int, int, float]], float]:
        self._keep_alive()
        with self._lock:
            coverage, finest = self.coverage, self._max.copy()
            finest[:, : self._beside_at] = np.nan
            finest[:, self._beside_at] = self._beside
        only_sink = not np.isfinite(finest).any()  # all weight is on the first
        if only_sink:
            finest = self._max.copy()
        strength = finest
        level = self.level + max(0, math.ceil(math.log2(max(finest.shape) / LINK_BINS)))
        for _ in range(level - self.level):
            strength = halved(strength, np.fmax)
        strength = np.where(np.isnan(strength), -np.inf, strength)
        start = self._whole.query_start
        queries, keys = ((np.arange(size) << level) for size in strength.shape)
        gap = abs(queries[:, None] + start - keys)
        far = np.where(gap * 100 > max(self._shape), strength, -np.inf)
        found: set[tuple[int, int, float]] = set()
        for bin_ in dict.fromkeys([*_largest(far, n // 2), *_largest(strength, n)]):
            if len(found) < n:
                first = 0 if only_sink else self._whole.first_keys
                found.update(self._strongest_of(bin_, level, finest, first, n))
        return sorted(found, key=lambda link: -link[2]), coverage

    def _strongest_of(
        self, bin_: tuple[int, int], level: int, finest: Picture, first: int, n: int
    ) -> list[tuple[int, int, float]]:
        """The notable pair of a bin from key ``first`` on: that of its strongest finest bin.

        Where the rows of n such bins are too many to be read at once, that of the rows read so far.
        """
        side = 1 << level - self.level
        top, left = bin_[0] * side, bin_[1] * side
        part = finest[top : top + side, left : left + side]
        row, column = np.unravel_index(np.nanargmax(part), part.shape)
        rows, columns = (
            slice(at << self.level, min(n, (at + 1) << self.level))
            for at, n in zip((int(row) + top, int(column) + left), self._shape)
        )
        columns = slice(max(first, columns.start), columns.stop)
        parts = [rows]
        if n * self._whole._work(rows.stop - rows.start, self._shape[1]) > TILE_WORK:
            parts = self.parts_read(rows)
        found = [pair for part in parts for pair in self._whole._notable(1, part, columns)]
        return sorted(found, key=lambda pair: -pair[2])[:1]

    def _at_level(self, plane: str, level: int) -> Picture:
        strongest, total, read = self._max, self._sum, self._read
        if self._lost.any():
            strongest = np.where(self._lost, np.float32(np.inf), strongest)
        for _ in range(level - self.level):
            strongest = halved(strongest, np.fmax)
            total = halved(total, np.add)
            read = halved(read[:, None], np.add)[:, 0]
        if plane == "max":
            return strongest
        with np.errstate(divide="ignore", invalid="ignore"):
            picture = np.log(total / read[:, None], dtype=np.float32)
        return np.where(np.isnan(strongest), np.float32(np.nan), picture)

    def _pooled(self, rows: slice) -> tuple[Picture, np.ndarray, Picture]:
        """Per bin of some rows: maximum, that of ``_beside``, sum."""
        columns = slice(0, self._shape[1])
        down, across = self._rows_of_bin, 1 << self.level
        strongest, mass = self._whole._bins(rows, ("max", "mass"), down, across, columns)
        beside = np.full(len(strongest), np.nan, np.float32)
        end = min((self._beside_at + 1) * across, columns.stop)
        if (start := self._whole.first_keys) < end:
            first = slice(start, end)
            beside = self._whole._bins(rows, ("max",), down, across, first)[0][:, 0]
        with np.errstate(invalid="ignore"):
            shares = np.nan_to_num(np.exp(mass), posinf=np.inf)
            total = shares * rows_of_bins(rows, down)[:, None]
        return strongest, beside, total

    def _take(self, at: int, pooled: tuple[Picture, np.ndarray, Picture]) -> None:
        strongest, beside, total = pooled
        bands = slice(at, at + len(strongest))
        self._lost[bands] |= np.isposinf(strongest)
        for kept, found in ((self._max, strongest), (self._beside, beside)):
            numbers = np.where(np.isposinf(found), np.float32(np.nan), found)
            np.fmax(kept[bands], numbers, out=kept[bands])
        self._sum[bands] += total


def _at_first(picture: Picture, words: Words, rows: slice, columns: slice, top: int) -> Picture:
    """The weights at the first pieces of their words, or of the part from row ``top`` on."""
    is_first = [
        np.isin(range(part.start, part.stop), [*starts, first])
        for part, starts, first in (
            (rows, words.query_starts, top),
            (columns, words.starts, columns.start),
        )
    ]
    return np.where(np.outer(*is_first), picture, np.float32(np.nan))


def _runs(chosen: np.ndarray, rows: slice) -> Iterator[slice]:
    """Stretches of neighbours that are chosen among some rows."""
    edges = np.flatnonzero(np.diff(np.r_[False, chosen, False])).reshape(-1, 2)
    step = rows.step or 1
    starts, stops = rows.start + step * edges[:, 0], rows.start + step * (edges[:, 1] - 1) + 1
    return (slice(low, high, rows.step) for low, high in zip(starts.tolist(), stops.tolist()))


def _largest(x: Picture, n: int) -> list[tuple[int, int]]:
    """Indices of the n largest numbers, largest first, without −inf."""
    flat = x.reshape(-1)
    places = np.argpartition(flat, -n)[-n:] if 0 < n < len(flat) else np.arange(len(flat))[: n or 0]
    places = places[np.isfinite(flat[places])]
    places = places[np.argsort(-flat[places], kind="stable")]
    rows, columns = np.unravel_index(places, x.shape)
    return list(zip(rows.tolist(), columns.tolist()))
