"""Weights of unmasked pairs that are no numbers: responses have +∞ for them, and NaN is masked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.errors import UnsupportedError
from regard._weights.origin import seen_of

if TYPE_CHECKING:
    from regard._base.types import Bool, Int
    from regard._weights.attention_weights import AttentionWeights

    Lost = Iterator[tuple[int, Bool[np.ndarray, " keys"]]]

__all__ = ["lost_queries", "lost_rows", "sees_any"]

ALL = slice(None)


def lost_queries(weights: AttentionWeights[Any]) -> Int[np.ndarray, " n"]:
    """The queries of a head whose weights are no numbers: a score is NaN or infinite."""
    try:
        lse = to_numpy(weights.lse)
    except UnsupportedError:  # weights that were given are numbers, and have no scores
        return np.zeros(0, int)
    return np.flatnonzero(~np.isfinite(lse) & ~np.isneginf(lse))


def lost_rows(weights: AttentionWeights[Any], rows: slice, columns: slice = ALL) -> Lost:
    """The same of some queries, and which of some keys each of them sees."""
    places, part = range(weights.shape[0])[rows], weights.part(rows)
    if not len(found := lost_queries(part)):
        return
    seen, keys = seen_of(part), np.arange(weights.shape[1])[columns]
    for at in found:
        yield places[at], seen.pairs(np.full(len(keys), at), keys)[0]


def sees_any(weights: AttentionWeights[Any]) -> Bool[np.ndarray, " heads"]:
    """Whether any pair of some weights is unmasked; one for all heads where they agree."""
    pairs = np.indices(weights.shape[-2:]).reshape(2, -1)
    return np.logical_or.reduce(seen_of(weights).pairs(*pairs), -1)
