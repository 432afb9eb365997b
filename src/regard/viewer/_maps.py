"""An LRU cache of the heads' maps, by tokens and by words, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast

from regard.recording import Recording, Words
from regard.viewer._aligned import chosen
from regard.viewer._alignment import Alignments
from regard.viewer._effects import EffectMap
from regard.viewer.overview import HeadMap

if TYPE_CHECKING:
    from regard._weights.effects import EffectKind
    from regard.viewer._alignment import Places

MAX_BYTES = 512_000_000


class Where(NamedTuple):
    """A head, or several for their mean, and which of the pairs are wanted.

    Attributes:
        recording, layer, head: by their places.
        on: the recording whose tokens rows and columns are; by default its own.
        against: a recording in which query and key need counterparts.
        by_words: whether each pair of pieces has the weight of its words.
        effect: the kind of effects that are wanted in place of weights; then by itself.
    """

    recording: int
    layer: int
    head: int | tuple[int, ...]
    on: int | None = None
    against: int | None = None
    by_words: bool = False
    effect: EffectKind | None = None


class Maps:
    """``maps[where]``, made on the first request.

    The most recently used map is kept, whatever its size.

    Args:
        recordings: as they are, then without their first tokens.
        alignments: of them as they are.
        max_bytes: of all maps.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        alignments: Alignments,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._recordings, self._alignments = recordings, alignments
        self._max_bytes = max_bytes
        self._made: OrderedDict[Where, HeadMap | EffectMap] = OrderedDict()  # the latest last
        self._lock = threading.Lock()
        self.words = cache(self._words)

    def _words(self, recording: int) -> Words:
        """A recording by words."""
        return self._recordings[recording].in_words()

    def __getitem__(self, where: Where) -> HeadMap | EffectMap:
        with self._lock:
            if where not in self._made:
                self._made[where] = self._make(where)
            self._made.move_to_end(where)
            found, evicted = self._made[where], self._evict()
        for other in evicted:  # outside the lock: a worker may take its time to end
            other.stop()
        return found

    def weights(self, where: Where) -> HeadMap:
        """The map of the weights, where effects are not asked for."""
        return cast("HeadMap", self[where._replace(effect=None)])

    def _make(self, where: Where) -> HeadMap | EffectMap:
        recording = self._recordings[where.recording]
        if where.effect is not None:
            return EffectMap(recording, where.layer, where.head, where.effect)
        words = self.words(where.recording) if where.by_words else None
        return HeadMap(recording, where.layer, where.head, self._places(where), words)

    def _places(self, where: Where) -> tuple[Places, Places] | None:
        """The query of each row and the key of each column, where not all are wanted."""
        own = where.recording % (len(self._recordings) // 2)
        if where.on is not None:
            return self._alignments.places(where.on, own)
        if where.against is not None:
            queries, keys = self._alignments.places(own, where.against)
            return chosen(queries), chosen(keys)
        return None

    def _evict(self) -> list[HeadMap | EffectMap]:
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
