"""The keys that each role means, of the queries that are read: pairs, and sets of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from regard._base.types import Bool, Int
from regard._base.words import (
    are_function_words,
    is_newline,
    is_punctuation,
    is_special,
    word_starts,
    word_texts,
)
from regard._call.visible import Seen
from regard.heads._roles import (
    BACK,
    BY_KEY,
    FEWEST,
    FIRST,
    INDUCTION,
    LEAST_PART,
    NEXT,
    PLACE,
    PREVIOUS,
    PREVIOUS_WORD,
    SAME,
    SELF,
    WORD_START,
    Role,
)

# Pairs of a token and its earlier occurrences that are read, at most. A gather takes ten times as
# long for a weight as a pass over all of them.
PART_OF_PAIRS, FEWEST_PAIRS, MOST_PAIRS = 256, 2**14, 2**18

MOST_KEPT = 3  # kinds of layers: models alternate between a window and all

BY_TEXT = (is_newline, is_punctuation)  # and function words, in the order of BY_KEY

Found = TypeVar("Found")
Pairs = tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]


class Patterns:
    """What every role means in a text that attends to itself; the same for all layers.

    Attributes:
        rows: positions of the queries that are read.
        queries, keys: ``(n,)`` pairs, each once; queries count in ``rows``.
        kinds: ``(kinds, roles)`` bool, sets of roles that mean a pair.
        starts: ``(kinds,)``: the pairs are sorted by kind.
        sets: ``(sets, Lk)`` bool, the keys of the roles in ``BY_KEY``.
    """

    def __init__(self, tokens: Sequence[str], rows: Int[np.ndarray, " R"]) -> None:
        self.rows, self._tokens = rows, tokens
        starts = word_starts(tokens)
        self._words = np.repeat(np.arange(len(starts)), np.diff([*starts, len(tokens)]))
        self._bounds = np.append(starts, len(tokens))
        self.sets = self._by_key(word_texts(tokens, starts))
        found = [(role, *pairs) for role, pairs in self._pairs()]
        codes = np.concatenate([q * len(tokens) + k for _, q, k in found])
        marks = np.concatenate([np.full(len(q), 1 << PLACE[role.name]) for role, q, _ in found])
        codes, inverse = np.unique(codes, return_inverse=True)
        bits = np.zeros(len(codes), np.int64)
        np.bitwise_or.at(bits, inverse, marks)
        for role, keys in zip(BY_KEY, self.sets):
            bits |= keys[codes % len(tokens)].astype(np.int64) << PLACE[role.name]
        order = np.argsort(bits, kind="stable")
        kinds, self.starts = np.unique(bits[order], return_index=True)
        self.kinds = (kinds[:, None] >> np.arange(len(PLACE)) & 1).astype(bool)
        self.queries, self.keys = np.divmod(codes[order], len(tokens))
        self._known: list[tuple[Seen, Any]] = []  # the latest last

    def known(self, seen: Seen, found: Callable[[Seen, Patterns], Found]) -> Found:
        """``found(seen, self)``, kept for the layers whose queries see the same keys."""
        for one, kept in self._known:
            if one.equals(seen):
                same: Found = kept
                return same
        made = found(seen, self)
        self._known = [*self._known[1 - MOST_KEPT :], (seen, made)]
        return made

    def _by_key(self, words: Sequence[str]) -> Bool[np.ndarray, "sets Lk"]:
        """The first token is left out: it is a role of its own."""
        rules = ({token: is_(token) for token in {*self._tokens}} for is_ in BY_TEXT)
        of_tokens = [[rule[token] for token in self._tokens] for rule in rules]
        sets = np.array([*of_tokens, are_function_words(words)[self._words]], bool)
        sets[:, 0] = False
        return sets

    def _pairs(self) -> Iterator[tuple[Role, Pairs]]:
        every = np.arange(len(self.rows))
        for role, step in ((PREVIOUS, -1), (NEXT, 1), (SELF, 0)):
            yield role, self._beside(step)
        for n, role in enumerate(BACK, 2):
            yield role, self._beside(-n)
        later = self.rows > 0
        yield FIRST, (every[later], 0 * self.rows[later])
        word = self._words[self.rows]
        start = self._bounds[word]
        inside = self.rows > start
        yield WORD_START, (every[inside], start[inside])
        has_one = np.flatnonzero(word > (1 if is_special(self._tokens[0]) else 0))
        own, before = self.rows[has_one], word[has_one] - 1
        starts, ends = self._bounds[before], self._bounds[before + 1]
        differs = np.count_nonzero((starts != own - 1) | (ends != own))
        if differs < max(FEWEST, LEAST_PART * len(every)):  # it is the token before
            has_one, starts, ends = (x[:0] for x in (has_one, starts, ends))
        yield PREVIOUS_WORD, _spans(has_one, starts, ends)
        queries, earlier = self._occurrences()
        for role, step in ((SAME, 0), (INDUCTION, 1)):
            keys = earlier + step
            kept = keys < self.rows[queries] - 1  # a head of the previous token is no such head
            yield role, (queries[kept], keys[kept])

    def _beside(self, step: int) -> Pairs:
        keys = self.rows + step
        inside = (keys >= 0) & (keys < len(self._tokens))
        return np.flatnonzero(inside), keys[inside]

    def _occurrences(self) -> Pairs:
        """Earlier occurrences of each query's token; of too many, those of some of the queries."""
        numbers: dict[str, int] = {}
        ids = np.array([numbers.setdefault(token, len(numbers)) for token in self._tokens])
        order = np.argsort(ids, kind="stable")
        first = np.searchsorted(ids[order], np.arange(len(numbers)))
        rank = np.empty(len(ids), np.int64)
        rank[order] = np.arange(len(ids)) - first[ids[order]]
        queries = np.flatnonzero(rank[self.rows])
        most = min(MOST_PAIRS, max(FEWEST_PAIRS, len(ids) ** 2 // PART_OF_PAIRS))
        if len(self.rows) == len(ids):
            most = max(most, 2 * FEWEST_PAIRS)
        queries = queries[:: -(-2 * int(rank[self.rows].sum()) // most) or 1]
        at = first[ids[self.rows[queries]]]
        queries, places = _spans(queries, at, at + rank[self.rows[queries]])
        return queries, order[places]


def _spans(queries: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Pairs:
    """Every query with each number from its start to before its end."""
    counts = ends - starts
    before = np.cumsum(counts) - counts
    return np.repeat(queries, counts), np.arange(counts.sum()) + np.repeat(starts - before, counts)
