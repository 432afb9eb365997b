"""The attention mask: intervals of keys that skip whole blocks, and the pairs inside a block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import NumpyArrays, fold_groups, to_numpy
from regard._call.call import Call
from regard._call.edits import Rectangle

if TYPE_CHECKING:
    from regard._base.types import Bool, Int

ALL = slice(None)
BLOCK_PAIRS = 2**22  # of one block of a mask


def part(x: Any, *slices: slice) -> Any:
    """``x[slices]``, with an axis of size 1 left whole, since it is broadcast."""
    return x[tuple(ALL if n == 1 else s for n, s in zip(x.shape, slices))]


class Visibility:
    """The visible (unmasked) pairs of one call, block by block.

    Query i of batch b stands at position ``p = starts[b] + i * query_step``, key j at
    ``j * key_step``.
    """

    def __init__(self, call: Call, arange: Callable[[int, int], Any]) -> None:
        B, _, _, Lq, Lk = call.sizes
        self.call = call
        self._arange = arange
        lengths = [Lk] * B if call.key_lengths is None else call.key_lengths.tolist()
        if call.query_start is None:
            starts = [n - Lq for n in lengths]
        else:
            starts = call.query_start.tolist()
        self.lengths: list[int] = lengths
        self.starts: list[int] = starts
        self._segments: tuple[np.ndarray, np.ndarray] | None = None
        if call.query_segments is not None:
            self._segments = (to_numpy(call.query_segments), to_numpy(call.key_segments))
        self._intervals: tuple[np.ndarray, np.ndarray] | None = None
        if call.interval_first is not None:
            self._intervals = (to_numpy(call.interval_first), to_numpy(call.interval_last))
        self._cuts = cuts_of(call)
        # Batch elements with rules of their own are computed one by one, so that none depends on
        # the rest of its batch.
        given = (call.key_lengths, call.query_start, call.query_segments, call.interval_first)
        self.uniform = all(option is None for option in given)

    def interval(self, b: int, query: Any) -> tuple[Any, Any]:
        """The first key that queries of batch b may see, and the one after the last.

        For an int or an array of them, by lengths, order, window and intervals; segments and masks
        hide more.
        """
        call, place = self.call, self.starts[b] + query * self.call.query_step
        low, high, step = 0, self.lengths[b], call.key_step
        if call.causal:
            high = np.minimum(high, place // step + 1)
        if call.window_right is not None:
            high = np.minimum(high, (place + call.window_right) // step + 1)
        if call.window_left is not None:
            low = np.maximum(low, -((call.window_left - place) // step))
        if self._intervals is not None:
            first, last = (x[b if len(x) > 1 else 0][query] for x in self._intervals)
            low, high = np.maximum(low, first), np.minimum(high, last)
        high = np.maximum(high, 0 * place)
        return np.minimum(low, high), high

    def keys(self, b: int, rows: slice) -> slice:
        """The smallest interval with every key that these queries of batch b may see."""
        starts, ends = self.interval(b, self._telling(rows))
        if self._intervals is not None:
            seen = starts < ends
            starts, ends = (starts[seen], ends[seen]) if seen.any() else (ends[:1], ends[:1])
        high = int(ends.max())
        low = min(int(starts.min()), high)
        if self._segments is not None and low < high:
            of_queries, of_keys = (s[b if len(s) > 1 else 0] for s in self._segments)
            ids, others = of_queries[rows], of_keys[low:high]
            hits = np.flatnonzero((others >= ids.min()) & (others <= ids.max()))
            low, high = (low + int(hits[0]), low + int(hits[-1]) + 1) if len(hits) else (low, low)
        return slice(low, high)

    def _telling(self, rows: slice) -> np.ndarray:
        """Queries whose intervals tell the extent of all of theirs."""
        if self._intervals is None:  # they rise
            return np.array([rows.start, rows.stop - 1])
        return np.arange(rows.start, rows.stop)

    def end(self, b: int) -> int:
        """The end of the keys that any query of batch b may see."""
        return self.keys(b, slice(0, self.call.sizes[3])).stop

    def positions(self, b: int, rows: slice, keys: slice) -> tuple[Any, Any]:
        """``(rows,)`` and ``(keys,)``: the positions of some queries of batch b and some keys."""
        of_queries = self._arange(rows.start, rows.stop) * self.call.query_step + self.starts[b]
        return of_queries, self._arange(keys.start, keys.stop) * self.call.key_step

    def pairs(self, b: slice, h: slice, rows: slice, keys: slice) -> Any:
        """Bool, broadcastable to ``(b, h, rows, keys)``; None where every pair is visible.

        ``keys`` must lie within the key lengths; several batch elements need a uniform call.
        """
        call = self.call
        starts, ends = self.interval(b.start, self._telling(rows))
        rules = []
        if (ends < keys.stop).any() or (keys.start < starts).any():
            of_queries, of_keys = self.positions(b.start, rows, keys)
            of_pairs = window_rules(call, of_queries[:, None], of_keys)
            rules = [rule[None, None] for rule in of_pairs]
            if self._intervals is not None:
                j = self._arange(keys.start, keys.stop)
                first, last = (
                    part(x, b, rows)[:, None, :, None]
                    for x in (call.interval_first, call.interval_last)
                )
                rules += [first <= j, j < last]
        if call.query_segments is not None:
            of_queries = part(call.query_segments, b, rows)[:, None, :, None]
            rules.append(of_queries == part(call.key_segments, b, keys)[:, None, None, :])
        if call.mask is not None:
            rules.append(part(call.mask, b, h, rows, keys))
        block = h, rows, keys
        rules += [self._uncut(cut, *block) for cut in self._cuts if cut.meets(*block)]
        visible = None
        for rule in rules:
            visible = rule if visible is None else visible & rule
        return visible

    def _uncut(self, cut: Rectangle, *block: slice) -> Any:
        """Bool: which pairs of a block an edit that it meets does not cut."""
        inside = None
        for n, ((low, high), own_part) in enumerate(zip(cut.spans, block)):
            if low > own_part.start or high < own_part.stop:
                at = self._arange(own_part.start, own_part.stop)
                own = ((low <= at) & (at < high)).reshape(1, -1, *(1,) * (2 - n))
                inside = own if inside is None else inside & own
        if inside is None:
            return (self._arange(block[2].start, block[2].stop) < 0)[None, None, None]
        return ~inside.reshape((1,) * (4 - inside.ndim) + tuple(inside.shape))


def cuts_of(call: Call) -> list[Rectangle]:
    """The edits that make pairs invisible."""
    return [edit for edit in call.rectangles if edit.factor == 0]


def window_rules(call: Call, place: Any, of_key: Any) -> list[Any]:
    """Bool, for positions of queries and keys: what order and window allow."""
    rules = []
    if call.causal:
        rules.append(of_key <= place)
    if call.window_right is not None:
        rules.append(of_key <= place + call.window_right)
    if call.window_left is not None:
        rules.append(of_key >= place - call.window_left)
    return rules


def blocks(
    call: Call, visibility: Visibility, elements: int, tallest: int
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Cuts a call into ``(b, h, rows, keys)`` of about ``elements`` pairs each.

    A block holds whole groups of heads that share keys, and every key that its rows see; where
    there are many keys it grows to 8 times ``elements`` before its rows become fewer than
    ``tallest``. Only the lengths decide how rows are cut, so no number depends on the rest of its
    batch.
    """
    B, Hq, Hkv, Lq, Lk = call.sizes
    if 0 in (B, Hq, Lq):
        return
    group = Hq // Hkv
    height = min(max(8 * elements // (group * max(Lk, 1)), 16), tallest, Lq)
    units = max(1, elements // max(1, group * height * Lk))  # key heads in a block
    heads = min(Hkv, units)
    batch = max(1, units // Hkv) if visibility.uniform else 1
    for b in range(0, B, batch):
        for h in range(0, Hkv, heads):
            for i in range(0, Lq, height):
                rows = slice(i, min(i + height, Lq))
                yield (
                    slice(b, min(b + batch, B)),
                    slice(h * group, min(h + heads, Hkv) * group),
                    rows,
                    visibility.keys(b, rows),
                )


class Seen:
    """The keys that the queries of one call see, which has no batch; where heads agree, once.

    Attributes:
        low, high: ``(Lq,)``, the interval in which they are.
    """

    def __init__(self, call: Call) -> None:
        Lq, self._Lk = call.sizes[3:]
        low, high = Visibility(call, NumpyArrays().arange).interval(0, np.arange(Lq))
        self.low, self.high = (np.broadcast_to(x, Lq) for x in (low, high))
        self._segments = None
        if call.query_segments is not None:
            self._segments = to_numpy(call.query_segments)[0], to_numpy(call.key_segments)[0]
        self._mask = None if call.mask is None else to_numpy(call.mask)[0]
        self._cuts, self._heads = cuts_of(call), call.sizes[1]

    def equals(self, other: Seen) -> bool:
        """Whether they are known to be the same keys; masks and segments are not compared."""
        return (
            all(x is None for one in (self, other) for x in (one._segments, one._mask))
            and not (self._cuts or other._cuts)
            and self._Lk == other._Lk
            and np.array_equal(self.low, other.low)
            and np.array_equal(self.high, other.high)
        )

    def pairs(
        self, queries: Int[np.ndarray, " n"], keys: Int[np.ndarray, " n"]
    ) -> Bool[np.ndarray, "heads n"]:
        """Whether each pair is unmasked."""
        found = self._by_rules(queries, keys)[None]
        if self._mask is not None:
            found = found & picked(self._mask, queries, keys)
        if not self._cuts:
            return found
        found = np.repeat(found, self._heads // max(1, len(found)), 0)
        for (first, last), rows, columns, _ in self._cuts:
            inside = [
                (low <= i) & (i < high) for (low, high), i in ((rows, queries), (columns, keys))
            ]
            found[first:last] &= ~(inside[0] & inside[1])
        return found

    def _by_rules(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        found = (self.low[queries] <= keys) & (keys < self.high[queries])
        if self._segments is not None:
            found &= self._segments[0][queries] == self._segments[1][keys]
        return found

    @cached_property
    def count(self) -> Int[np.ndarray, "heads Lq"]:
        """How many keys each query sees."""
        if self._is_irregular:
            counts = np.zeros((self._rows_of_heads, len(self.low)), np.int64)
            for rows, seen in self._blocks():
                counts[:, rows] = seen.sum(-1)
            return counts
        if self._cuts:
            return sum(
                uncut * (self.high.clip(first, last) - self.low.clip(first, last))
                for first, last, uncut in self._spans()
            )
        if self._segments is not None:
            return self._of_segment(*self._segments)[None]
        return (self.high - self.low)[None]

    def _of_segment(self, of_queries: np.ndarray, of_keys: np.ndarray) -> Int[np.ndarray, " Lq"]:
        """The number of keys from low to high that are of the query's own segment."""
        counts = np.zeros(len(self.low), np.int64)
        for number, positions in _by_id(of_keys):
            of_it = of_queries == number
            first, last = (np.searchsorted(positions, x[of_it]) for x in (self.low, self.high))
            counts[of_it] = last - first
        return counts

    def of(self, sets: Bool[np.ndarray, "sets Lk"]) -> Int[np.ndarray, "heads Lq sets"]:
        """How many keys of each set each query sees."""
        if self._segments is None and not self._is_irregular:
            upto = np.zeros((len(sets), self._Lk + 1), np.int64)
            np.cumsum(sets, -1, out=upto[:, 1:])
            if not self._cuts:
                return (upto[:, self.high] - upto[:, self.low]).T[None]
            return sum(
                uncut[..., None]
                * (upto[:, self.high.clip(first, last)] - upto[:, self.low.clip(first, last)]).T
                for first, last, uncut in self._spans()
            )
        counts = np.zeros((self._rows_of_heads, len(self.low), len(sets)), np.int64)
        columns = sets.T.astype(np.float32)
        for rows, seen in self._blocks():
            counts[:, rows] = np.rint(seen.astype(np.float32) @ columns)
        return counts

    @cached_property
    def queries(self) -> Int[np.ndarray, "heads Lk"]:
        """How many queries see each key."""
        if self._mask is None:
            return self._uncut_queries(np.arange(len(self.low)))
        counts = np.zeros((self._rows_of_heads, self._Lk), np.int64)
        for _, seen in self._blocks():
            counts += seen.sum(1)
        return counts

    def _uncut_queries(self, some: np.ndarray) -> Int[np.ndarray, "heads Lk"]:
        """How many of some queries see each key, where no mask is."""
        if not self._cuts:
            return self._queries(some)[None]
        counts = np.zeros((self._heads, self._Lk), np.int64)
        for first, last, uncut in self._spans():
            for own, rows in zip(counts, uncut):
                own[first:last] = self._queries(some[rows[some]])[first:last]
        return counts

    def _queries(self, some: np.ndarray) -> Int[np.ndarray, " Lk"]:
        """How many of some queries see each key, without masks and cuts."""
        low, high = self.low[some], self.high[some]
        if self._segments is None:
            return _covered(low, high, self._Lk)
        of_queries, of_keys = self._segments[0][some], self._segments[1]
        counts = np.zeros(self._Lk, np.int64)
        for number, positions in _by_id(of_keys):
            of_it = of_queries == number
            first, last = (np.searchsorted(positions, x[of_it]) for x in (low, high))
            counts[positions] = _covered(first, last, len(positions))
        return counts

    def in_blocks(
        self,
        of_queries: Int[np.ndarray, " Lq"],
        of_keys: Int[np.ndarray, " Lk"],
        counts: tuple[int, int],
    ) -> Int[np.ndarray, "heads queries keys"]:
        """How many pairs of each block of queries and block of keys are unmasked.

        Args:
            of_queries, of_keys: the block of each; negative for none.
            counts: how many there are.
        """
        if self._mask is None:
            found = np.zeros((self._rows_of_heads, *counts), np.int64)
            for number, queries in _by_id(of_queries):
                if number >= 0:
                    seen = self._uncut_queries(queries)
                    found[:, number] = fold_groups(seen, of_keys, counts[1])
            return found
        found = np.zeros((self._rows_of_heads, *counts), np.int64)
        for rows, seen in self._blocks():
            cells = fold_groups(seen.astype(np.int64), of_keys, counts[1])
            columns = fold_groups(cells.swapaxes(1, 2), of_queries[rows], counts[0])
            found += columns.swapaxes(1, 2)
        return found

    def any_in_runs(
        self, of_queries: Int[np.ndarray, " queries"], of_keys: Int[np.ndarray, " keys"]
    ) -> Bool[np.ndarray, "heads queries keys"]:
        """Whether any pair of each run of queries and run of keys is unmasked.

        Args:
            of_queries, of_keys: the first of each run; they rise from 0, and none is empty.
        """
        if self._segments is None and self._mask is None and not self._cuts:
            ends = np.append(of_keys[1:], self._Lk)
            low, high = self.low[:, None], self.high[:, None]
            meets = (low < high) & (low < ends) & (of_keys < high)
            return np.logical_or.reduceat(meets, of_queries, 0)[None]
        every = [np.logical_or.reduceat(seen, of_keys, 2) for _, seen in self._blocks()]
        return np.logical_or.reduceat(np.concatenate(every, 1), of_queries, 1)

    @property
    def _is_irregular(self) -> bool:
        """Whether each pair must be looked at."""
        return self._mask is not None or (bool(self._cuts) and self._segments is not None)

    def _spans(self) -> Iterator[tuple[int, int, Bool[np.ndarray, "heads Lq"]]]:
        """Intervals of keys whose pairs of a query are cut together, and whether they are not."""
        edges = {0, self._Lk, *(min(end, self._Lk) for cut in self._cuts for end in cut.keys)}
        for first, last in itertools.pairwise(sorted(edges) if self._Lk else [0, 0]):
            uncut = np.ones((self._heads, len(self.low)), bool)
            for heads, queries, keys, _ in self._cuts:
                if keys[0] <= first and last <= keys[1]:
                    uncut[slice(*heads), slice(*queries)] = False
            yield first, last, uncut

    @property
    def _rows_of_heads(self) -> int:
        if self._cuts:
            return self._heads
        return 1 if self._mask is None else len(self._mask)

    def _blocks(self) -> Iterator[tuple[slice, Bool[np.ndarray, "heads rows Lk"]]]:
        """Whether each pair is unmasked, some rows at a time."""
        heads = self._heads if self._cuts else 1
        Lq, height = len(self.low), max(1, BLOCK_PAIRS // max(1, self._Lk * heads))
        for start in range(0, Lq, height):
            rows = slice(start, min(start + height, Lq))
            found = self._by_rules(np.arange(Lq)[rows, None], np.arange(self._Lk))[None]
            if self._mask is not None:
                found = found & part(self._mask, ALL, rows)
            block = slice(0, self._heads), slice(start, min(start + height, Lq)), slice(0, self._Lk)
            if self._cuts:
                found = np.repeat(found, self._heads // max(1, len(found)), 0)
            for cut in self._cuts:
                if cut.meets(*block):
                    found[cut.within(*block)] = False
            yield rows, found


def sees(call: Call) -> list[Seen]:
    """What each batch element of a call sees; one object where that is known to be the same."""
    B, Hq, *_ = call.sizes
    same = Visibility(call, NumpyArrays().arange).uniform
    if same and (call.mask is None or len(call.mask) == 1) and B:
        return [Seen(call.of_heads(range(1), range(Hq)))] * B
    return [Seen(call.of_heads(range(b, b + 1), range(Hq))) for b in range(B)]


def _by_id(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each id with its positions, which rise."""
    order = np.argsort(ids, kind="stable")
    found, starts = np.unique(ids[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, starts[1:]))


def _covered(low: np.ndarray, high: np.ndarray, n: int) -> np.ndarray:
    """How many of the intervals from low to high hold each of n positions."""
    steps = np.bincount(low, minlength=n + 1) - np.bincount(high, minlength=n + 1)
    return np.cumsum(steps)[:n]


def picked(x: Any, queries: np.ndarray, keys: np.ndarray) -> Any:
    """``x[:, queries, keys]`` of an array whose axes may be of size 1."""
    rows, columns = (i if n > 1 else 0 * i for n, i in zip(x.shape[1:], (queries, keys)))
    return x[:, rows, columns]
