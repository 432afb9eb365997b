"""The tokens of two recordings beside one another: which token of one is which of the other.

A longest common subsequence (LCS) pairs equal tokens in their order, as diff does; a token that two
passages without anything else in common share is chance, and not paired. Between two of its pairs,
as many tokens of one text as of the other have replaced each other, and are paired too, if they are
few: *cat* and *dog*. Any other token has no counterpart.

Source: Hyyrö 2004, Bit-parallel LCS-length computation revisited: a row of the table of lengths is
one integer, and takes four operations on it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regard.viewer import _facts

if TYPE_CHECKING:
    from regard._base.types import Int
    from regard.recording import Recording

    Places = Int[np.ndarray, " tokens"]

__all__ = ["Alignment", "Alignments", "Run", "align", "places", "runs_of"]

MOST_REPLACED = 8  # tokens, in a row: as many others may stand for a phrase, not for a passage
MOST_PAIRS = 2**34  # of tokens that are compared: 130,000 of either text
MASKS = 4096  # of tokens, kept: 64 MB for the longest texts
# Byte-level vocabularies write a space as Ġ, a line's end as Ċ and a tab as ĉ; others write ▁.
SPELLED = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})


class Run(NamedTuple):
    """``length`` tokens from ``start`` on, and their counterparts from ``there`` on."""

    start: int
    there: int
    length: int


class Alignment(NamedTuple):
    """The counterparts of a recording's queries, and of its keys, in another recording."""

    queries: tuple[Run, ...]
    keys: tuple[Run, ...]

    def turned(self) -> Alignment:
        """The same, seen from the other recording."""
        return Alignment(*(tuple(Run(there, at, n) for at, there, n in side) for side in self))


class Alignments:
    """``alignments[one, other]`` of some recordings, by their numbers; each is made once."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings
        self._made: dict[tuple[int, int], Alignment] = {}
        self._lock = threading.Lock()

    def __getitem__(self, pair: tuple[int, int]) -> Alignment:
        low, high = sorted(pair)
        with self._lock:
            if (low, high) not in self._made:
                found = align(self._recordings[low], self._recordings[high])
                self._made[low, high] = found
            found = self._made[low, high]
        return found if pair == (low, high) else found.turned()

    def places(self, one: int, other: int) -> tuple[Places, Places]:
        """The counterparts of each query and of each key of one in another; −1: none."""
        found, recording = self[one, other], self._recordings[one]
        queries = places(found.queries, len(recording.query_tokens))
        return queries, places(found.keys, len(recording.tokens))


def align(one: Recording, other: Recording) -> Alignment:
    """The counterparts of one recording's tokens in another.

    A token has the same counterpart as a query and as a key, where both recordings attend to
    themselves; the queries of cross-attention are aligned by their own text.
    """
    keys = runs_of(one.tokens, other.tokens)
    places = _facts.place(one), _facts.place(other)
    if None in places:
        return Alignment(runs_of(one.query_tokens, other.query_tokens), keys)
    start, there = (int(place or 0) for place in places)
    inside = (start, len(one.query_tokens)), (there, len(other.query_tokens))
    return Alignment(tuple(_part(keys, *inside)), keys)


def _part(runs: Sequence[Run], *spans: tuple[int, int]) -> list[Run]:
    """The runs among the ``count`` tokens from ``start`` on of either text, counted from there."""
    found = []
    (start, count), (there, others) = spans
    for run in runs:
        skipped = max(0, start - run.start, there - run.there)
        a, b = run.start - start + skipped, run.there - there + skipped
        if (left := min(run.length - skipped, count - a, others - b)) > 0:
            found.append(Run(a, b, left))
    return found


def places(runs: Sequence[Run], count: int) -> Int[np.ndarray, " count"]:
    """The counterpart of each of ``count`` tokens; −1 where there is none."""
    found = np.full(count, -1)
    for start, there, n in runs:
        found[start : start + n] = np.arange(there, there + n)
    return found


def runs_of(one: Sequence[str], other: Sequence[str]) -> tuple[Run, ...]:
    """The tokens of one text that have counterparts in another, in runs.

    Args:
        one, other: texts of the tokens; spaces may be written as tokenizers write them.
    """
    lengths = len(one), len(other)
    equal = _without_chance(_joined(_common(*_numbered(one, other))), *lengths)
    return tuple(_joined(_with_replaced(equal, *lengths)))


def _numbered(*texts: Sequence[str]) -> list[Int[np.ndarray, " L"]]:
    """A number for each token, the same for equal ones."""
    numbers: dict[str, int] = {}

    def number(token: str) -> int:
        return numbers.setdefault(token.translate(SPELLED), len(numbers))

    return [np.array([number(token) for token in text], int) for text in texts]


def _common(a: np.ndarray, b: np.ndarray) -> list[Run]:
    """Runs of an LCS: the common beginning and end, and an LCS of what is between."""
    least = min(len(a), len(b))
    first = _equal(a[:least], b[:least])
    last = _equal(a[first:][::-1][: least - first], b[first:][::-1][: least - first])
    middle = a[first : len(a) - last], b[first : len(b) - last]
    found = [Run(0, 0, first)]
    if len(middle[0]) * len(middle[1]) <= MOST_PAIRS:
        found += [Run(first + i, first + j, 1) for i, j in _subsequence(*middle)]
    return [*found, Run(len(a) - last, len(b) - last, last)]


def _equal(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens at the beginning are equal."""
    unlike = np.flatnonzero(a != b)
    return int(unlike[0]) if len(unlike) else len(a)


def _subsequence(a: np.ndarray, b: np.ndarray) -> list[tuple[int, int]]:
    """An LCS, as pairs of places.

    Bit j of row i is 0 where the LCS of ``a[:i]`` and ``b[:j + 1]`` is longer than that of
    ``a[:i]`` and ``b[:j]``. Every √n-th row is kept, and those between are computed again.
    """
    every = (1 << len(b)) - 1
    kept_step = math.isqrt(len(a)) + 1

    @lru_cache(MASKS)
    def mask(token: int) -> int:
        return int.from_bytes(np.packbits(b == token, bitorder="little").tobytes(), "little")

    def rows(row: int, low: int, high: int) -> list[int]:
        """The rows after ``row``, of ``a[low:high]``."""
        found = [row]
        for token in a[low:high].tolist():
            both = row & (own := mask(token))
            row = (row + both | row & ~own) & every
            found.append(row)
        return found

    kept = [every]
    for low in range(0, len(a), kept_step):
        kept.append(rows(kept[-1], low, low + kept_step)[-1])
    pairs, j = [], len(b)
    for n in reversed(range(len(kept) - 1)):
        block = rows(kept[n], n * kept_step, (n + 1) * kept_step)
        for i in reversed(range(1, len(block))):
            j = (~block[i] & (1 << j) - 1).bit_length()  # the last token that made it longer
            if j and block[i - 1] >> j - 1 & 1:  # and not without a[i − 1]
                j -= 1
                pairs.append((n * kept_step + i - 1, j))
    return pairs[::-1]


def _without_chance(runs: list[Run], *lengths: int) -> list[Run]:
    """The runs that are no chance: not much shorter than what differs on both of their sides."""
    while True:
        gaps = [max(gap) for gap in _gaps(runs, *lengths)]
        kept = [
            run
            for run, before, after in zip(runs, gaps, gaps[1:])
            if run.length * MOST_REPLACED >= min(before, after)
        ]
        if len(kept) == len(runs):
            return runs
        runs = kept


def _gaps(runs: list[Run], *lengths: int) -> list[tuple[int, int]]:
    """How many tokens of either text are before the first run, between two, and after the last."""
    ends = [(0, 0), *((at + n, there + n) for at, there, n in runs)]
    starts = [*((at, there) for at, there, _ in runs), lengths]
    return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(ends, starts)]


def _with_replaced(runs: Sequence[Run], length: int, other: int) -> list[Run]:
    """The runs, and between two of them the few tokens that replaced as many others."""
    found, a, b = [], 0, 0
    for run in [*runs, Run(length, other, 0)]:
        if run.start - a == run.there - b <= MOST_REPLACED:
            found.append(Run(a, b, run.start - a))
        found.append(run)
        a, b = run.start + run.length, run.there + run.length
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Runs without empty ones, and neighbours as one."""
    found: list[Run] = []
    for run in runs:
        before = found[-1] if found else Run(-1, -1, 0)
        ends = before.start + before.length, before.there + before.length
        if found and (run.start, run.there) == ends:
            found[-1] = before._replace(length=before.length + run.length)
        elif run.length:
            found.append(run)
    return found
