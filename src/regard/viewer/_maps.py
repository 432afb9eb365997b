"""The maps of the heads that were looked at last, as many as fit into the memory for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from regard.recording import Recording
from regard.viewer.overview import HeadMap

MOST_BYTES = 512_000_000


class Maps:
    """``maps[recording, layer, head]``, made when it is first asked for.

    The map that was asked for last is kept, whatever it takes.
    """

    def __init__(self, recordings: Sequence[Recording], most_bytes: int = MOST_BYTES) -> None:
        self._recordings, self._most_bytes = recordings, most_bytes
        self._made: OrderedDict[tuple[int, int, int], HeadMap] = OrderedDict()  # the latest last
        self._lock = threading.Lock()

    def __getitem__(self, where: tuple[int, int, int]) -> HeadMap:
        recording, layer, head = where
        with self._lock:
            if where not in self._made:
                self._made[where] = HeadMap(self._recordings[recording], layer, head)
            self._made.move_to_end(where)
            found, left_over = self._made[where], self._taken_out()
        for other in left_over:  # outside the lock: a worker may take its time to end
            other.stop()
        return found

    def _taken_out(self) -> list[HeadMap]:
        """The maps asked for longest ago, until the others fit."""
        # Maps grow while they are read, so all are measured anew.
        total = sum(found.nbytes for found in self._made.values())
        left_over = []
        while total > self._most_bytes and len(self._made) > 1:
            left_over.append(self._made.popitem(last=False)[1])
            total -= left_over[-1].nbytes
        return left_over

    def close(self) -> None:
        """Forgets every map, and ends their workers."""
        with self._lock:
            forgotten = list(self._made.values())
            self._made.clear()
        for found in forgotten:
            found.stop()
