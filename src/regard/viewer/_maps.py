"""An LRU cache of the heads' maps, by tokens and by words, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from regard.recording import Recording, Words
from regard.viewer.overview import HeadMap

MAX_BYTES = 512_000_000


class HeadPlace(NamedTuple):
    """A head, or several for their mean, by the places of recording, layer and head.

    ``by_words``: whether it is read by words.
    """

    recording: int
    layer: int
    head: int | tuple[int, ...]
    by_words: bool = False


class Maps:
    """``maps[place]``, made on the first request.

    The most recently used map is kept, whatever its size.
    """

    def __init__(self, recordings: Sequence[Recording], max_bytes: int = MAX_BYTES) -> None:
        self._recordings, self._max_bytes = recordings, max_bytes
        self._made: OrderedDict[HeadPlace, HeadMap] = OrderedDict()  # the latest last
        self._lock = threading.Lock()
        self.words = cache(self._words)

    def _words(self, recording: int) -> Words:
        """A recording by words."""
        return self._recordings[recording].in_words()

    def __getitem__(self, where: HeadPlace) -> HeadMap:
        recording, layer, head, by_words = where
        with self._lock:
            if where not in self._made:
                words = self.words(recording) if by_words else None
                self._made[where] = HeadMap(self._recordings[recording], layer, head, words)
            self._made.move_to_end(where)
            found, evicted = self._made[where], self._evict()
        for other in evicted:  # outside the lock: a worker may take its time to end
            other.stop()
        return found

    def _evict(self) -> list[HeadMap]:
        """The least recently used maps, removed until the others fit."""
        # Maps grow while they are read, so all are measured anew.
        total = sum(found.nbytes for found in self._made.values())
        evicted = []
        while total > self._max_bytes and len(self._made) > 1:
            evicted.append(self._made.popitem(last=False)[1])
            total -= evicted[-1].nbytes
        return evicted

    def close(self) -> None:
        """Drops every map, and ends their workers."""
        with self._lock:
            dropped = list(self._made.values())
            self._made.clear()
        for found in dropped:
            found.stop()
