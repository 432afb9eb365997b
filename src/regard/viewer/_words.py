"""One head by words, at the places of their pieces: the viewer's tiles, rows and pairs of words."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._call.visible import Seen, Visibility, cuts_of
from regard._weights.reductions import Links
from regard.viewer._lost import lost_rows, sees_any

if TYPE_CHECKING:
    from regard._base.types import Bool, Float, Int, PoolHow
    from regard._call.call import Call
    from regard._weights.attention_weights import AttentionWeights
    from regard.recording import Words, WordWeights
    from regard.viewer._lost import Lost

__all__ = ["WordBlocks", "lost_words", "pair_of_words", "seen_words"]

ALL = slice(None)


class WordBlocks:
    """``(Lq, Lk)``: each pair of pieces has the weight of its pair of words.

    The parts of ``AttentionWeights`` that a map reads, in its terms.

    Args:
        words: the weights of a head by words.
        pieces: the same head, or a part of it.
        down: ``(Lq,)``, the word of each of these queries; ``across``: ``(Lk,)``, of each key.
    """

    def __init__(
        self,
        words: WordWeights,
        pieces: AttentionWeights[Any],
        down: Int[np.ndarray, " Lq"],
        across: Int[np.ndarray, " Lk"],
    ) -> None:
        self._words, self._pieces = words, pieces
        self._down, self._across = down, across

    @classmethod
    def of(cls, words: Words, pieces: AttentionWeights[Any], layer: int, head: int) -> WordBlocks:
        """Those of a whole head, by the numbers of layer and head."""
        starts = words.query_starts, words.starts
        down, across = (word_of(*side) for side in zip(starts, pieces.shape))
        return cls(words.weights[layer].head(head), pieces, down, across)

    @property
    def shape(self) -> tuple[int, ...]:
        """Queries and keys."""
        return self._pieces.shape

    def part(self, rows: slice = ALL, columns: slice = ALL) -> WordBlocks:
        """Some queries and keys."""
        pieces = self._pieces.part(rows, columns)
        return WordBlocks(self._words, pieces, self._down[rows], self._across[columns])

    def pool(
        self,
        size: tuple[int, int],
        how: PoolHow | tuple[PoolHow, ...] = "max",
        rows: slice = ALL,
        columns: slice = ALL,
    ) -> Any:
        """A heatmap in ln(weight); a tuple of ``how`` gives as many.

        The share of a bin is what its tokens have, whatever words they are of.
        """
        if isinstance(how, tuple):
            return [self.pool(size, one, rows, columns) for one in how]
        part = self.part(rows, columns)
        if how == "mass":
            return part._pieces.pool(size, how)
        return part._pooled(*(min(n, most) for n, most in zip(size, part.shape)))

    def strongest(self, n: int) -> Links[Any, Any]:
        """The n strongest pairs of words that have a piece here, at the first of these pieces."""
        whole = (slice(words[0], words[-1] + 1) for words in (self._down, self._across))
        found = self._words.part(*whole).strongest(n)
        kept = found.weight > 0
        query, key = (
            np.searchsorted(words, words[0] + places[kept])
            for words, places in ((self._down, found.query), (self._across, found.key))
        )
        return Links(query, key, found.weight[kept])

    def _pooled(self, R: int, C: int) -> Float[np.ndarray, "R C"]:
        """The strongest weight of each of ``R × C`` bins, NaN where all of it is masked."""
        out = np.full((R, C), np.nan, np.float32)
        if not R or not C:
            return out
        left = self._across[0]
        lefts = np.arange(C) * len(self._across) // C
        bins = np.arange(len(self._down)) * R // len(self._down)
        words = self._words.part(columns=slice(left, self._across[-1] + 1))
        for word, row in words.rows(np.unique(self._down)):
            strongest = np.fmax.reduceat(row[self._across - left], lefts)
            own = np.unique(bins[slice(*np.searchsorted(self._down, [word, word + 1]))])
            out[own] = np.fmax(out[own], strongest)
        with np.errstate(divide="ignore"):
            return np.log(out)


def word_of(starts: Int[np.ndarray, " words"], count: int) -> Int[np.ndarray, " count"]:
    """The word of each of ``count`` pieces."""
    return np.repeat(np.arange(len(starts)), np.diff(starts, append=count))


def lost_words(words: Words, weights: AttentionWeights[Any], rows: slice, columns: slice) -> Lost:
    """``lost_rows`` by words: each query has the keys of all words whose weights are no numbers."""
    Lq, Lk = weights.shape
    down, across = word_of(words.query_starts, Lq), word_of(words.starts, Lk)
    places, ends = range(Lq)[rows], np.append(words.query_starts, Lq).tolist()
    lost: dict[int, Bool[np.ndarray, " Lk"]] = {}
    chosen = np.unique(down[rows])
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1) if len(chosen) else ():
        for at, keys in lost_rows(weights, slice(ends[run[0]], ends[run[-1] + 1])):
            lost[down[at]] = lost.get(down[at], False) | keys
    for word, keys in lost.items():
        of_words = np.logical_or.reduceat(keys, words.starts)[across][columns]
        yield from ((at, of_words) for at in range(*ends[word : word + 2]) if at in places)


def pair_of_words(words: Words, query: int, key: int) -> Float[np.ndarray, " heads"]:
    """ln of the weight between the words of two pieces in every head.

    NaN where it is masked, +∞ where it is no number.
    """
    at = (
        slice(word, word + 1)
        for word in (
            int(np.searchsorted(words.query_starts, query, "right")) - 1,
            int(np.searchsorted(words.starts, key, "right")) - 1,
        )
    )
    rows, columns = at
    found = []
    for part in (weights.part(rows, columns) for weights in words.weights):
        logs = part.pool((1, 1))[:, 0, 0]
        is_lost = np.isnan(logs) & sees_any(part._pieces)
        found.append(np.where(is_lost, np.float32(np.inf), logs))
    return np.concatenate(found)


def seen_words(words: Words, call: Call) -> Int[np.ndarray, " Lq"]:
    """The number of unmasked words of each query's word."""
    starts, count = words.query_starts, call.sizes[3]
    sizes = np.diff(starts, append=count)
    given = call.mask, call.query_segments, call.interval_first
    if all(x is None for x in given) and not cuts_of(call):
        low, high = Visibility(call, np.arange).interval(0, np.arange(count))
        low, high = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
        key = word_of(words.starts, call.sizes[4])
        seen = np.where(low < high, key[high - 1] - key[np.minimum(low, len(key) - 1)] + 1, 0)
    else:
        found, keys = Seen(call), np.arange(call.sizes[4])
        of_queries = (found.pairs(np.full(len(keys), i), keys)[0] for i in range(count))
        of_words = (np.logical_or.reduceat(row, words.starts) for row in of_queries)
        seen = np.array([np.any([*islice(of_words, n)], 0).sum() for n in sizes])
    return np.repeat(seen, sizes)
