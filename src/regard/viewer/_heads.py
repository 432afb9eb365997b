"""Thumbnails of the weights of a layer's heads, their roles, and scores to sort heads by.

A long text is read by a sample of evenly spaced rows: 1.2 CPU seconds for a layer of 8 heads and
100,000 tokens.
"""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._weights.attention_weights import AttentionWeights
from regard.heads import HeadScores, Reader
from regard.heads._roles import Named
from regard.recording import Recording

SIZE = 48  # bins on a side of a thumbnail
STEP = 64  # thumbnails are rounded to 1/64 nat, which no eye sees and which packs into a third
MOST_PRODUCTS = 2**33  # multiplications in q · k of one layer
MOST_WEIGHTS = 2**26  # of one layer
FEWEST_ROWS = 2 * SIZE

SCORES = ("first", "previous", "induction")

# By the numbers of layer and head, and the name of a score.
Corpus = Mapping[tuple[int, int], Mapping[str, float]]


class Heads:
    """The facts of each layer's heads, computed at the first request, and kept.

    Args:
        recording: whose heads.
        corpus: means of a survey, to be shown beside them.
    """

    def __init__(self, recording: Recording, corpus: Corpus | None = None) -> None:
        self._recording, self._corpus = recording, corpus
        self._known: dict[int, dict[str, Any]] = {}
        self._roles: dict[str, Any] = {}
        self._locks = [threading.Lock() for _ in recording.layers]
        self._all = threading.Lock()

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._recording, receivers=0)

    def of(self, layer: int) -> dict[str, Any]:
        """The response ``heads`` of docs/viewer-protocol.md."""
        with self._locks[layer]:
            if layer not in self._known:
                number = self._recording.layer_numbers[layer]
                scores = self._reader.layers(number)
                found = _facts(self._recording, layer, scores)
                if self._corpus is not None:
                    found["corpus"] = self._of_corpus(number, scores.head_numbers[0])
                self._known[layer] = found
            return self._known[layer]

    def _of_corpus(self, number: int, heads: Sequence[int]) -> dict[str, Any]:
        """The corpus' means of each head of a layer; null where it has none."""
        means = [(self._corpus or {}).get((number, head), {}) for head in heads]
        return {
            name: [_number(own.get(name, math.nan)) for own in means]
            for name in ("entropy", "distance", *SCORES)
        }

    def roles(self) -> dict[str, Any]:
        """The response ``roles``: the head to open at, and what each head is called."""
        with self._all:
            if not self._roles:
                self._roles = roles_of(self._reader.layers())
            return self._roles


def roles_of(scores: HeadScores) -> dict[str, Any]:
    """Roles and sentences of every head, and the place of the one to open at."""
    told = scores.telling()
    layer, head = scores.place(told.layer, told.head)
    numbers = list(zip(scores.layers, scores.head_numbers))
    return {
        "opens": {"layer": layer, "head": head},
        "roles": [[scores.role(n, h) for h in heads] for n, heads in numbers],
        "tags": [[_tag(scores.named(n, h)) for h in heads] for n, heads in numbers],
        "says": [[scores.says(n, h) for h in heads] for n, heads in numbers],
    }


def _tag(named: Sequence[Named]) -> str:
    """A head's main role in at most 8 letters, empty where it has none."""
    return named[0].role.short if named else ""


def _facts(recording: Recording, layer: int, scores: HeadScores) -> dict[str, Any]:
    every = recording.weights[recording.layer_numbers[layer]]
    rows = _sample(every, int(recording.layers[layer]._query.shape[-1]))
    weights = every.part(slice(rows.start, None, rows.step))
    found = weights.summary(pool=(SIZE, SIZE), only=("pooled", "entropy", "distance"))
    packed = np.round(square(to_numpy(found.pooled)) * STEP) / STEP
    means: dict[str, Any] = {
        "entropy": to_numpy(found.entropy).mean(-1, dtype=float),
        "distance": to_numpy(found.distance).mean(-1, dtype=float),
        **{name: scores[name][0] for name in SCORES},
    }
    numbers: dict[str, Any] = {name: [_number(x) for x in of] for name, of in means.items()}
    if recording.query_tokens != recording.tokens:
        numbers |= dict.fromkeys(SCORES)
    return {
        "size": SIZE,
        "thumbnails": packed_text(packed),
        **numbers,
        "coverage": len(rows) / len(recording.query_tokens),
        "settled": True,
    }


def _sample(weights: AttentionWeights, head_size: int) -> range:
    """All rows, or some that are evenly spaced."""
    Hq, Lq, Lk = weights.shape
    most = max(FEWEST_ROWS, min(MOST_PRODUCTS // head_size, MOST_WEIGHTS) // (Hq * Lk))
    step = max(1, -(-Lq // most))
    return range(step // 2, Lq, step)


def packed_text(pictures: np.ndarray) -> str:
    """base64 of float32."""
    return base64.b64encode(pictures.astype("<f4").tobytes()).decode()


def square(pictures: np.ndarray) -> np.ndarray:
    """``(H, SIZE, SIZE)``: where there are fewer bins, each is repeated."""
    down, across = (np.arange(SIZE) * n // SIZE for n in pictures.shape[1:])
    return pictures[:, down][:, :, across]


def _number(x: float) -> float | None:
    return float(f"{x:.9g}") if math.isfinite(x) else None
