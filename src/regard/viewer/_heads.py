"""Thumbnails of the weights of a layer's heads, and scores to sort heads by.

A long text is read by a sample of evenly spaced rows: 1.2 CPU seconds for a layer of 8 heads and
100,000 tokens.
"""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._weights.attention_weights import AttentionWeights
from regard.heads import mean_weights
from regard.recording import Recording

SIZE = 48  # bins on a side of a thumbnail
STEP = 64  # thumbnails are rounded to 1/64 nat, which no eye sees and which packs into a third
MOST_PRODUCTS = 2**33  # multiplications in q · k of one layer
MOST_WEIGHTS = 2**26  # of one layer: what NumPy gathers the scores from
FEWEST_ROWS = 2 * SIZE
BLOCK_WEIGHTS = 2**22  # of one block of rows: 16 MB of float32

SCORES = ("first", "previous", "induction")


class Heads:
    """The facts of each layer's heads, computed at the first request, and kept."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._known: dict[int, dict[str, Any]] = {}
        self._locks = [threading.Lock() for _ in recording.layers]

    def of(self, layer: int) -> dict[str, Any]:
        """The response ``heads`` of docs/viewer-protocol.md."""
        with self._locks[layer]:
            if layer not in self._known:
                self._known[layer] = _facts(self._recording, layer)
            return self._known[layer]


def _facts(recording: Recording, layer: int) -> dict[str, Any]:
    every = recording.weights[recording.layer_numbers[layer]]
    rows = _sample(every, int(recording.layers[layer].query.shape[-1]))
    weights = every.part(slice(rows.start, None, rows.step))
    thumbnails, *means = _measured(weights)
    packed = np.ascontiguousarray(np.round(_square(thumbnails) * STEP) / STEP, "<f4")
    scores: dict[str, Any] = dict.fromkeys(SCORES)
    if recording.query_tokens == recording.tokens:
        _, ids = np.unique(recording.tokens, return_inverse=True)
        scores = mean_weights(_blocks(weights, np.asarray(rows)), ids)
    numbers = {"entropy": means[0], "distance": means[1], **scores}
    return {
        "size": SIZE,
        "thumbnails": base64.b64encode(packed.tobytes()).decode(),
        **{name: x if x is None else [_number(n) for n in x] for name, x in numbers.items()},
        "coverage": len(rows) / len(recording.query_tokens),
        "settled": True,
    }


def _sample(weights: AttentionWeights, head_size: int) -> range:
    """All rows, or some that are evenly spaced."""
    Hq, Lq, Lk = weights.shape
    most = max(FEWEST_ROWS, min(MOST_PRODUCTS // head_size, MOST_WEIGHTS) // (Hq * Lk))
    step = max(1, -(-Lq // most))
    return range(step // 2, Lq, step)


def _measured(weights: AttentionWeights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(H, SIZE, SIZE)`` at most, of ln of the strongest weights; mean entropies; distances."""
    found = weights.summary(pool=(SIZE, SIZE), only=("pooled", "entropy", "distance"))
    entropy, distance = (to_numpy(x).mean(-1, dtype=float) for x in (found.entropy, found.distance))
    return to_numpy(found.pooled), entropy, distance


def _square(pictures: np.ndarray) -> np.ndarray:
    """``(H, SIZE, SIZE)``: where there are fewer bins, each is repeated."""
    down, across = (np.arange(SIZE) * n // SIZE for n in pictures.shape[1:])
    return pictures[:, down][:, :, across]


def _blocks(weights: AttentionWeights, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Any]]:
    """Positions of some rows, and their weights ``(H, rows, Lk)``."""
    height = max(1, BLOCK_WEIGHTS // (weights.shape[0] * weights.shape[2]))
    for start in range(0, len(rows), height):
        part = slice(start, start + height)
        yield rows[part], to_numpy(weights.part(part)[...])


def _number(x: float) -> float | None:
    return round(float(x), 6) if math.isfinite(x) else None
