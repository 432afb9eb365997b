"""What changed from one recording to another: the difference of their weights at counterparts.

The difference of two heads is that of their weights where query and key have counterparts; a
masked pair has weight 0, and where a weight is no number the difference is none. A head changed
by the mean over the queries of ½ Σ \\|difference\\|: the total variation distance of two rows, if
all of their keys have counterparts. 0 is no change, 1 that all weight went elsewhere.

A long text is read by a sample of evenly spaced queries.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard._base.types import Float
from regard._weights.attention_weights import AttentionWeights
from regard.recording import Recording
from regard.viewer._aligned import BLOCK_WEIGHTS, AlignedWeights, largest_of, weights_of
from regard.viewer._alignment import Alignments

Blocks = Iterator[tuple[int, Float[np.ndarray, "rows columns"]]]

MOST_WEIGHTS = 2**24  # of a layer, or of one head: about half a second
FEWEST_QUERIES = 96


class Place(NamedTuple):
    """A head, by the numbers of its recording and layer, and its own, from 0 on."""

    recording: int
    layer: int
    head: int


class Differences:
    """The differences of any two heads of some recordings; safe for several threads.

    Args:
        recordings: at their places; those with a hidden token after all others.
        alignments: of the recordings without one.
    """

    def __init__(self, recordings: Sequence[Recording], alignments: Alignments) -> None:
        self._recordings, self._alignments = recordings, alignments
        self._changes: dict[tuple[int, int, int], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def pairs(self, one: Place, other: Place, n: int) -> dict[str, Any]:
        """The response ``changed`` of docs/viewer-protocol.md."""
        (rows, columns), there = self._counterparts(one.recording, other.recording)
        taken = _sample(len(rows), len(columns), 1)
        lost: list[int] = []  # queries of each block with differences that are no numbers

        def blocks() -> Blocks:
            for low, block in self._blocks(one, other, taken, ((rows, columns), there)):
                lost.append(int(np.isnan(block).any(-1).sum()))
                yield low, block

        i, j, difference = largest_of(blocks(), n)
        links = zip(rows[taken][i].tolist(), columns[j].tolist(), difference.tolist())
        return {
            "links": [[query, key, float(f"{x:.9g}")] for query, key, x in links],
            "lost": sum(lost),
            "coverage": _coverage(taken, len(rows)),
            "settled": True,
        }

    def change(self, recording: int, layer: int, other: int) -> dict[str, Any]:
        """The response ``change``: how much each head of a layer changed, ``"NaN"``, or null."""
        with self._lock:
            where = recording, layer, other
            if where not in self._changes:
                self._changes[where] = self._change(*where)
            return self._changes[where]

    def _change(self, recording: int, layer: int, other: int) -> dict[str, Any]:
        found = self._recordings[recording].layers[layer]
        counterparts = self._counterparts(recording, other)
        rows, columns = counterparts[0]
        taken = _sample(len(rows), len(columns), found.heads)
        heads = (self._same(recording, layer, head, other) for head in range(found.heads))
        changes = [
            self._mean(Place(recording, layer, head), there, taken, counterparts)
            for head, there in enumerate(heads)
        ]
        return {"change": changes, "coverage": _coverage(taken, len(rows)), "settled": True}

    def _mean(
        self, one: Place, other: Place | None, taken: slice, counterparts: Any
    ) -> float | str | None:
        """How much a head changed; None without another, or without queries to compare.

        ``"NaN"`` where a weight of these queries is no number.
        """
        count = len(counterparts[0][0][taken])
        if other is None or not count:
            return None
        blocks = self._blocks(one, other, taken, counterparts)
        total = sum(float(np.abs(block).sum(dtype=np.float64)) for _, block in blocks)
        mean = total / 2 / count
        return "NaN" if math.isnan(mean) else round(mean, 6)

    def _same(self, recording: int, layer: int, head: int, other: int) -> Place | None:
        """The place of the head of the same numbers."""
        one, there = self._recordings[recording], self._recordings[other]
        number, h = one.layer_numbers[layer], one.layers[layer].head_numbers[head]
        if number not in there.layer_numbers:
            return None
        place = there.layer_numbers.index(number)
        numbers = there.layers[place].head_numbers
        return Place(other, place, numbers.index(h)) if h in numbers else None

    def _counterparts(
        self, one: int, other: int
    ) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Queries and keys of one that have counterparts, and these."""
        count = len(self._recordings) // 2
        sides = self._alignments.places(one % count, other % count)
        rows, columns = (np.flatnonzero(side >= 0) for side in sides)
        return (rows, columns), (sides[0][rows], sides[1][columns])

    def _blocks(self, one: Place, other: Place, taken: slice, counterparts: Any) -> Blocks:
        """``(first row, difference)`` at counterparts, of some of their rows at a time.

        NaN where a weight is no number.
        """
        sides = [
            AlignedWeights(self._weights(place), rows[taken], columns)
            for place, (rows, columns) in zip((one, other), counterparts)
        ]
        widest = max(self._weights(place).shape[1] for place in (one, other))
        height = max(1, BLOCK_WEIGHTS // widest)
        for (low, a), (_, b) in zip(*(side.blocks(height) for side in sides)):
            with np.errstate(invalid="ignore"):
                difference = weights_of(a) - weights_of(b)
            yield low, np.where(np.isfinite(difference), difference, np.float32(np.nan))

    def _weights(self, place: Place) -> AttentionWeights:
        recording = self._recordings[place.recording]
        recording._check_file()
        number = recording.layers[place.layer].head_numbers[place.head]
        return recording.weights[recording.layer_numbers[place.layer]].head(number)


def _sample(rows: int, columns: int, heads: int) -> slice:
    """All rows, or some that are evenly spaced."""
    most = max(FEWEST_QUERIES, MOST_WEIGHTS // max(1, heads * columns))
    step = max(1, -(-rows // most))
    return slice(step // 2, None, step)


def _coverage(taken: slice, rows: int) -> float:
    return len(range(*taken.indices(rows))) / rows if rows else 1.0
