"""The coarse heatmap of a large matrix, and the worker that reads its rows in the background.

It reads every nth row first, then those in between, so the heatmap is whole after the first round
and exact after the last.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from regard._base.types import Float

    Picture = Float[np.ndarray, "rows columns"]

__all__ = ["TILE", "Collected", "halved", "rows_of_bins", "spread"]

TILE = 256  # bins on a side
LARGEST_SIDE = 4096  # bins of the coarse heatmap
IDLE_TIMEOUT_S = 5.0  # the worker ends when no request came for so long


class Collected:
    """Bins of 2^level rows and columns of a matrix, from the rows that the worker has read.

    Args:
        shape: queries and keys.
        rounds: in which rows are read, a power of two.
        rows_at_once: to read between two looks at the stop flag.
    """

    def __init__(self, shape: tuple[int, int], rounds: int, rows_at_once: int) -> None:
        self._shape, self._rounds_count, self._at_once = shape, rounds, rows_at_once
        largest, bits = max(shape), round(math.log2(rounds))
        self.level = max(bits, math.ceil(math.log2(largest / LARGEST_SIDE)))
        self._size = -(-shape[0] >> self.level), -(-shape[1] >> self.level)
        self._read = np.zeros(self._size[0], np.int64)  # rows of every bin
        self._rounds = spread(rounds)  # those between last
        self._done = 0
        self._levels: dict[tuple[str, int], tuple[int, Picture]] = {}
        self._lock = threading.Lock()
        self._first = threading.Event()
        self._stopped = threading.Event()
        self._worker: threading.Thread | None = None
        self._failure: Exception | None = None
        self._last_request = 0.0

    def _pooled(self, rows: slice) -> Any:
        """What is kept of some rows, evenly spaced: those of some whole bands of bins."""
        raise NotImplementedError

    def _take(self, at: int, pooled: Any) -> None:
        """Adds what was kept of rows to the bins from ``at`` on."""
        raise NotImplementedError

    def _at_level(self, plane: str, level: int) -> Picture:
        """The whole heatmap of a plane at a level; ``"max"`` at its own one is the array itself."""
        raise NotImplementedError

    @property
    def _rows_of_bin(self) -> int:
        """Rows that a round reads of each bin."""
        return (1 << self.level) // self._rounds_count

    @property
    def coverage(self) -> float:
        """The fraction of rows that were read."""
        return float(self._read.sum()) / self._shape[0]

    @property
    def _bytes_of_levels(self) -> int:
        return sum(picture.nbytes for _, picture in list(self._levels.values()))

    def parts_read(self, rows: slice) -> list[slice]:
        """Slices of what was read of some rows from the start of a bin on.

        They are few, since rounds that lie evenly are one.
        """
        self._keep_alive()
        order, done, parts = spread(self._rounds_count), self._done, []
        at = 0
        while at < done:
            size = 1 << (done - at).bit_length() - 1
            parts.append(slice(rows.start + order[at], rows.stop, self._rounds_count // size))
            at += size
        return parts

    def tile(self, plane: str, level: int, row: int, column: int) -> tuple[Picture, float]:
        """256 × 256 bins of the heatmap at a level, and the fraction of rows that is in them."""
        self._keep_alive()
        out = np.full((TILE, TILE), np.nan, np.float32)
        with self._lock:
            coverage = self.coverage
            picture = self._picture(plane, level)
            part = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
            out[: part.shape[0], : part.shape[1]] = part
        return out, coverage

    def _picture(self, plane: str, level: int) -> Picture:
        """The whole heatmap at a level, cached until the next round is read."""
        version = self._done
        kept = self._levels.get((plane, level))
        if kept is not None and kept[0] == version:
            return kept[1]
        picture = self._at_level(plane, level)
        if level > self.level or plane != "max":  # which is an array of its own
            self._levels[plane, level] = (version, picture)
        return picture

    def _keep_alive(self) -> None:
        """Keeps the worker running, and waits for its first round or its end."""
        self._last_request = time.monotonic()
        with self._lock:
            alive = self._worker is not None and self._worker.is_alive()
            if self._rounds and not alive:
                self._stopped.clear()
                if not self._done:
                    self._first.clear()
                self._worker = threading.Thread(target=self._run, daemon=True, name="regard map")
                self._worker.start()
        self._first.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """Ends the worker; what it has read stays."""
        with self._lock:  # in which it is made and started
            self._stopped.set()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def _run(self) -> None:
        try:
            while self._rounds and self._read_round(self._rounds[0]):
                self._rounds.pop(0)
                self._first.set()
                if time.monotonic() - self._last_request > IDLE_TIMEOUT_S:
                    return
        except Exception as error:  # the next request raises it
            self._failure = error
        finally:
            self._first.set()  # wakes the requests that wait

    def _read_round(self, start: int) -> bool:
        """Reads every nth row from ``start`` on, slice by slice; False where it was stopped."""
        every, step = 1 << self.level, self._rounds_count
        height = max(1, self._at_once // self._rows_of_bin) * every
        pieces = []
        for low in range(0, self._shape[0], height):
            if self._stopped.is_set():
                return False
            rows = slice(low + start, min(low + height, self._shape[0]), step)
            if rows.start < rows.stop:
                read = rows_of_bins(rows, self._rows_of_bin)
                pieces.append((low >> self.level, read, self._pooled(rows)))
        with self._lock:
            for at, read, pooled in pieces:
                self._take(at, pooled)
                self._read[at : at + len(read)] += read
            self._done += 1
        return True


def spread(count: int) -> list[int]:
    """The numbers below a power of two, each of them as far from those before as can be."""
    bits = count.bit_length() - 1
    return [int(f"{n:0{bits}b}"[::-1], 2) for n in range(count)] if bits else [0]


def rows_of_bins(rows: slice, down: int) -> np.ndarray:
    """How many of some rows are in each bin of ``down`` of them."""
    count = len(range(rows.start, rows.stop, rows.step))
    return np.diff(np.minimum(np.arange(-(-count // down) + 1) * down, count))


def halved(x: np.ndarray, join: Any) -> np.ndarray:
    """Neighbours on both axes joined; a last one without a neighbour stays."""
    for axis in (0, 1):
        if x.shape[axis] == 1:
            continue
        pairs = x.shape[axis] // 2 * 2
        first, second = (x[(slice(None),) * axis + (slice(at, pairs, 2),)] for at in (0, 1))
        rest = x[(slice(None),) * axis + (slice(pairs, None),)]
        x = np.concatenate([join(first, second), rest], axis)
    return x
