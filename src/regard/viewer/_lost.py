"""Weights of unmasked pairs that are no numbers, which pictures show as they show masked ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._weights.origin import seen_of
from regard.viewer._words import word_of

if TYPE_CHECKING:
    from regard._base.types import Bool
    from regard._weights.attention_weights import AttentionWeights
    from regard.recording import Words

    Lost = Iterator[tuple[int, Bool[np.ndarray, " Lk"]]]

__all__ = ["lost_rows", "lost_words"]


def lost_rows(weights: AttentionWeights[Any], rows: slice) -> Lost:
    """Queries of a head whose weights are NaN, and the keys that each of them sees."""
    places = range(weights.shape[0])[rows]
    part = weights.part(rows)
    sums = to_numpy(part.pool((max(1, len(places)), 1), "mass"))
    seen, keys = seen_of(part), np.arange(weights.shape[1])
    for at in np.flatnonzero(np.isnan(sums).any(-1) & (seen.count[0] > 0)):
        yield places[at], seen.pairs(np.full(len(keys), at), keys)[0]


def lost_words(words: Words, weights: AttentionWeights[Any], rows: slice) -> Lost:
    """The same by words: each query has the keys of all words whose weights are NaN."""
    Lq, Lk = weights.shape
    down, across = word_of(words.query_starts, Lq), word_of(words.starts, Lk)
    places, ends = range(Lq)[rows], np.append(words.query_starts, Lq).tolist()
    for word in np.unique(down[rows]):
        pieces = slice(ends[word], ends[word + 1])
        if lost := [keys for _, keys in lost_rows(weights, pieces)]:
            of_words = np.logical_or.reduceat(np.any(lost, 0), words.starts)
            yield from ((at, of_words[across]) for at in range(Lq)[pieces] if at in places)
