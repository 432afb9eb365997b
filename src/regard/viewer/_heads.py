"""What every head of a layer does: a thumbnail of its weights, and scores to sort heads by."""

from __future__ import annotations

import base64
import math
import threading
from typing import Any

import numpy as np

from regard.heads import head_scores
from regard.recording import Recording
from regard.viewer._facts import numpy_array

SIZE = 48  # bins on a side of a thumbnail
STEP = 64  # thumbnails are rounded to 1/64 nat, which no eye sees and which packs into a third
MOST_QUERIES = 1024

SCORES = ("first", "previous", "induction")


class Heads:
    """The facts of each layer's heads, computed when they are first asked for, and kept."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._known: dict[int, dict[str, Any]] = {}
        self._locks = [threading.Lock() for _ in recording.layers]

    def of(self, layer: int) -> dict[str, Any]:
        """What docs/viewer-protocol.md calls ``heads``."""
        with self._locks[layer]:
            if layer not in self._known:
                self._known[layer] = _facts(self._recording, layer)
            return self._known[layer]


def _facts(recording: Recording, layer: int) -> dict[str, Any]:
    weights = recording.weights[layer]
    thumbnails = _square(numpy_array(weights.pool((SIZE, SIZE))))
    packed = np.ascontiguousarray(np.round(thumbnails * STEP) / STEP, "<f4").tobytes()
    found = {name: numpy_array(getattr(weights, name)()).mean(-1) for name in MEANS}
    facts = {name: [_number(x) for x in values] for name, values in found.items()}
    facts |= _scores(recording, layer)
    return {
        "size": SIZE,
        "thumbnails": base64.b64encode(packed).decode(),
        **facts,
        "coverage": 1.0,
    }


MEANS = ("entropy", "distance")


def _square(pictures: np.ndarray) -> np.ndarray:
    """``(H, SIZE, SIZE)``: where there are fewer bins, each stands several times."""
    down, across = (np.arange(SIZE) * n // SIZE for n in pictures.shape[1:])
    return pictures[:, down][:, :, across]


def _scores(recording: Recording, layer: int) -> dict[str, Any]:
    """Scores by place; None where the queries are no keys."""
    if recording.query_tokens != recording.tokens:
        return dict.fromkeys(SCORES)
    own = recording.query_tokens
    one = Recording(recording.tokens, [recording.layers[layer]], query_tokens=own)
    found = head_scores(one, MOST_QUERIES)
    return {name: [_number(x) for x in getattr(found, name)[0]] for name in SCORES}


def _number(x: float) -> float | None:
    return round(float(x), 6) if math.isfinite(x) else None
