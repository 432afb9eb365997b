"""Row statistics of the weights, maximum and total: computed on request, and cached."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from regard._backends import Backend, Statistics
from regard._base.arrays import is_tensor, to_numpy
from regard._call.call import Call
from regard._call.contents import check_contents
from regard._weights.kept_statistics import KeptStatistics

BLOCK = 64  # queries are computed together where a few are requested: it takes little longer
# One for all, so that weights can be copied and pickled; held for a moment.
_lock = threading.Lock()


class Place(NamedTuple):
    """The heads and queries of a call that some weights are of."""

    b: range
    h: range
    rows: range

    @classmethod
    def whole(cls, call: Call) -> Place:
        """All of a call."""
        B, Hq, _, Lq, _ = call.sizes
        return cls(range(B), range(Hq), range(Lq))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its index in an array ``(B, Hq, Lq)``."""
        return tuple(slice(x.start, x.stop, x.step) for x in self)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, Hq, Lq)`` of the part."""
        return tuple(len(x) for x in self)


def _is_on_device(statistics: Statistics) -> bool:
    """Whether they are tensors that the host would wait for."""
    return all(is_tensor(x) and x.device.type != "cpu" for x in statistics)


def _rises(place: Place) -> bool:
    """Whether torch can cut it out."""
    return all(x.step > 0 for x in place)


def _in_numpy(statistics: Statistics) -> tuple[np.ndarray, np.ndarray]:
    maximum, total = map(to_numpy, statistics)
    return maximum, total


def _zeros_like(x: Any, shape: tuple[int, ...]) -> Any:
    return x.new_zeros(shape) if is_tensor(x) else np.zeros_like(x, shape=shape)


class StatisticsCache:
    """Largest score and sum of the exponentials of each row, as a backend has them.

    All parts of some weights share one; safe for several threads. In the kernels a row's bits are
    the same whatever was requested before; matrix products of torch and NumPy round by their size.

    Args:
        call: whose rows.
        backend: that computes them.
        known: maximum and total ``(B, Hq, Lq)`` of all of them; by default none is known.

    Attributes:
        given: those that a recording keeps, which are read instead of computed.
    """

    def __init__(self, call: Call, backend: Backend, known: Statistics | None = None) -> None:
        self.call, self.backend = call, backend
        self.given: KeptStatistics | None = None
        self._kept = known
        # bool (B, Hq, Lq); None before the first request, and when every row is kept.
        self._missing: np.ndarray | None = None

    def of(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
        """``(b, h, rows)`` of both, contiguous."""
        self.learn(place)
        if self._kept is None:  # a place without rows
            return np.zeros(place.shape), np.zeros(place.shape)
        return self._in_numpy(place)

    def on_device(self, place: Place) -> Statistics:
        """As ``of``, but on the device where they were computed there: the host does not wait."""
        self.learn(place)
        if self._kept is None or not _is_on_device(self._kept) or not _rises(place):
            return self.of(place)
        maximum, total = (x[place.slices].contiguous() for x in self._kept)
        return maximum, total

    def kept(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
        """As ``of``, with zeros where nothing is kept; none is computed."""
        return self._in_numpy(place)

    def _in_numpy(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
        assert self._kept is not None
        maximum, total = (np.ascontiguousarray(to_numpy(x)[place.slices]) for x in self._kept)
        return maximum, total

    def learn(self, place: Place) -> None:
        """Computes the missing rows of a place, all at once."""
        with _lock:
            wanted = self._wanted(place)
        if wanted is None:
            return
        check_contents(self.call, on_device=self.backend.checks_on_device)
        call = self.call
        if wanted != Place.whole(call):
            call = call.of_heads(wanted.b, wanted.h).rows(wanted.slices[2])
        call = call.in_memory()
        found = None if self.given is None else self.given.of(call, wanted, self.backend)
        self.keep(wanted, self.backend.row_statistics(call) if found is None else found)

    def keep(self, place: Place, found: Statistics) -> None:
        """Stores computed rows; known rows are not touched, since others may read them."""
        stays = _is_on_device(found) and _rises(place)
        found = found if stays else _in_numpy(found)
        with _lock:
            table, held = self._not_kept(), self._kept
            if table is None:  # another thread was faster
                return
            stays = stays and (held is None or _is_on_device(held))
            arrays = found if stays else _in_numpy(found)
            if held is None:
                held = _zeros_like(arrays[0], table.shape), _zeros_like(arrays[1], table.shape)
            elif _is_on_device(held) and not stays:
                held = _in_numpy(held)
            self._kept, missing = held, table[place.slices]
            for kept, x in zip(held, arrays):
                if stays:  # of rows that are known the same bits
                    kept[place.slices] = x
                else:
                    np.copyto(kept[place.slices], x, where=missing)
            missing[...] = False
            if not table.any():
                self._missing = None

    def known(self, place: Place) -> bool:
        """Whether any row of a place is kept or given, or the place has no rows."""
        if self.given is not None:
            return True
        with _lock:
            missing = self._not_kept()
            return missing is None or not missing[place.slices].all() or 0 in place.shape

    @property
    def _few(self) -> bool:
        """Whether the queries that share keys are few enough to be computed together."""
        return self.call.group_rows <= self.backend.few_rows

    def _not_kept(self) -> np.ndarray | None:
        """Bool ``(B, Hq, Lq)``: which rows are missing; None where every one is kept."""
        if self._missing is None and self._kept is None:
            self._missing = np.ones(Place.whole(self.call).shape, bool)
        return self._missing

    def _wanted(self, place: Place) -> Place | None:
        """The place to compute for another: all its missing rows; None where none is missing."""
        table = self._not_kept()
        if table is None:
            return None
        (missing,) = np.nonzero(table[place.slices].any((0, 1)))
        if not missing.size:
            return None
        _, Hq, Hkv, Lq, _ = self.call.sizes
        b, h, rows = place
        rows = rows[int(missing[0]) : int(missing[-1]) + 1]
        group = Hq // Hkv
        if group > 1 and (self._few or (len(h) > 1 and h.step % group)):
            h = range(h.start // group * group, (h[-1] // group + 1) * group)
        if self._few:
            rows = range(Lq)
        elif len(rows) < BLOCK and rows.step == 1:
            rows = range(rows.start // BLOCK * BLOCK, min(Lq, -(-rows.stop // BLOCK) * BLOCK))
        return Place(b, h, rows)

    def copy(self, call: Call, place: Place) -> StatisticsCache:
        """Those of a place, for a copy of its call."""
        copy = StatisticsCache(call, self.backend)
        if self.given is not None:
            copy.given = self.given.part(place.slices)
        with _lock:
            if self._kept is not None:
                maximum, total = (to_numpy(x)[place.slices].copy() for x in self._kept)
                copy._kept = maximum, total
            if self._missing is not None:
                copy._missing = self._missing[place.slices].copy()
        return copy
