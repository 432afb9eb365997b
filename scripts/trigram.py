"""The baseline that a language model must beat: a trigram model with the best known smoothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from regard._base.types import Float, Int

    Ids = Int[np.ndarray, " tokens"]


@dataclasses.dataclass(frozen=True)
class _Level:
    """Counts of n-grams, packed into one integer each; contexts are ``packed // vocab_size``."""

    packed: Int[np.ndarray, " grams"]
    counts: Int[np.ndarray, " grams"]

    @property
    def discount(self) -> float:
        """The discount of every count (Ney, Essen & Kneser 1994); 1/2 where no n-gram is rare."""
        ones, twos = (int((self.counts == n).sum()) for n in (1, 2))
        return (ones + 1) / (ones + 2 * twos + 2)

    def mixed(
        self, grams: Ids, vocab_size: int, lower: Float[np.ndarray, " tokens"]
    ) -> Float[np.ndarray, " tokens"]:
        """Probability of each n-gram's last token; ``lower`` gets the discounted mass."""
        contexts, first = np.unique(self.packed // vocab_size, return_index=True)
        totals = np.add.reduceat(self.counts, first)
        kinds = np.diff(np.append(first, len(self.packed)))
        count = _lookup(self.packed, self.counts, grams)
        total = _lookup(contexts, totals, grams // vocab_size)
        kind = _lookup(contexts, kinds, grams // vocab_size)
        discount = self.discount
        kept = np.maximum(count - discount, 0) + discount * kind * lower
        return np.where(total > 0, kept / np.maximum(total, 1), lower)


def _lookup(keys: Ids, values: Ids, wanted: Ids) -> Ids:
    """The value of each wanted key, 0 where it is not among the sorted keys."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


class Trigram:
    """Interpolated Kneser-Ney over token ids.

    Args:
        ids: the training text.
        vocab_size: number of ids; at most 2,000,000, so that three fit into one integer.

    Source: Kneser & Ney 1995; Chen & Goodman 1999, interpolated form.
    """

    def __init__(self, ids: Ids, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        trigrams = np.unique(_pack(ids, 3, vocab_size), return_counts=True)
        # Lower orders count the different contexts of an n-gram, not its occurrences.
        bigrams = np.unique(trigrams[0] % vocab_size**2, return_counts=True)
        unigrams = np.unique(bigrams[0] % vocab_size, return_counts=True)
        self._levels = [_Level(*grams) for grams in (unigrams, bigrams, trigrams)]

    def losses(self, ids: Ids) -> Float[np.ndarray, " tokens_less_2"]:
        """``−ln p(token | the two before it)`` of every token from the third on, in nats."""
        grams = _pack(ids, 3, self.vocab_size)
        p = np.full(len(grams), 1 / self.vocab_size)
        for n, level in enumerate(self._levels, start=1):
            p = level.mixed(grams % self.vocab_size**n, self.vocab_size, p)
        return -np.log(p)


def _pack(ids: Ids, n: int, vocab_size: int) -> Ids:
    wide = ids.astype(np.int64)
    parts = (wide[k : len(ids) - n + 1 + k] * vocab_size ** (n - 1 - k) for k in range(n))
    return np.sum(list(parts), axis=0)
