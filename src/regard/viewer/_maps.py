"""The maps of heads that were looked at, as many as fit into the memory that they may take."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard._weights import AttentionWeights
from regard.recording import Recording
from regard.viewer._facts import numpy_array

SIDE = 256  # bins of a tile
MOST_MAPS = 64

Coverage = float
Part = tuple[int, int]


class Maps:
    """``maps[recording, layer, head]``, made when it is first asked for."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings
        self._made: OrderedDict[tuple[int, int, int], HeadMap] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, where: tuple[int, int, int]) -> HeadMap:
        recording, layer, head = where
        with self._lock:
            if where not in self._made:
                self._made[where] = HeadMap(self._recordings[recording], layer, head)
            self._made.move_to_end(where)
            if len(self._made) > MOST_MAPS:
                self._made.popitem(last=False)
            return self._made[where]

    def close(self) -> None:
        """Forgets every map."""
        with self._lock:
            self._made.clear()


class HeadMap:
    """The weights of one head, read off where they are asked for."""

    def __init__(self, recording: Recording, layer: int, head: int) -> None:
        self._weights: AttentionWeights = recording.weights[layer]._matrix((head,))
        self._shape = self._weights.shape

    def tile(self, plane: str, level: int, row: int, column: int) -> tuple[np.ndarray, Coverage]:
        """256 × 256 bins of ``2^level`` queries and keys each, NaN where there are none."""
        tile = np.full((SIDE, SIDE), np.nan, np.float32)
        for rows, down in _bins(self._shape[0], level, row):
            for columns, across in _bins(self._shape[1], level, column):
                size = down.stop - down.start, across.stop - across.start
                tile[down, across] = self._pool(plane, size, rows, columns)
        return tile, 1.0

    def row(self, query: int) -> np.ndarray:
        """What a query gives to every key."""
        return self._pool("max", (1, self._shape[1]), slice(query, query + 1), None)[0]

    def column(self, key: int) -> tuple[np.ndarray, Coverage]:
        """What a key gets from every query."""
        found = self._pool("max", (self._shape[0], 1), None, slice(key, key + 1))
        return found[:, 0], 1.0

    def links(
        self, n: int, rows: Part | None = None, columns: Part | None = None
    ) -> tuple[list[tuple[int, int, float]], Coverage]:
        """The n strongest links, or those of a part."""
        if rows is None and columns is None:
            found = [numpy_array(x) for x in self._weights.strongest(max(n, 512))]
            links = [(int(q), int(k), float(np.log(w))) for q, k, w in zip(*found) if w > 0]
            return ([link for link in links if link[1]] or links)[:n], 1.0
        low, high = rows or (0, self._shape[0])
        left, right = columns or (0, self._shape[1])
        picture = self._pool(
            "max", (high - low, right - left), slice(low, high), slice(left, right)
        )
        order = np.argsort(-np.nan_to_num(picture, nan=-np.inf), axis=None, kind="stable")[:n]
        down, across = np.unravel_index(order, picture.shape)
        found = [(int(q) + low, int(k) + left, float(picture[q, k])) for q, k in zip(down, across)]
        return [link for link in found if np.isfinite(link[2])], 1.0

    def _pool(self, plane: str, size: tuple[int, int], rows: Any, columns: Any) -> np.ndarray:
        return numpy_array(self._weights.pool(size, plane, rows, columns))


def _bins(length: int, level: int, number: int) -> list[tuple[slice, slice]]:
    """The tokens of a tile's side and its bins: whole bins, and the rest as one bin."""
    start = (SIDE << level) * number
    stop = min(start + (SIDE << level), length)
    whole = (stop - start) >> level
    middle = start + (whole << level)
    parts = []
    if whole:
        parts.append((slice(start, middle), slice(0, whole)))
    if middle < stop:
        parts.append((slice(middle, stop), slice(whole, whole + 1)))
    return parts
