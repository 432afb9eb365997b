"""What the queries of a call see, in short: their first keys, and which are those of tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from regard._base.arrays import Arrays, arrays_of, to_numpy
from regard._call.call import Call
from regard._call.visible import Visibility, cuts_of

BLOCK_PAIRS = 2**22  # of a mask that are looked at together


class Sight(NamedTuple):
    """What the queries of one call see; the first two axes are 1 where all agree."""

    seen: np.ndarray  # (B or 1, Hq or 1, Lq): how many keys
    first: np.ndarray  # likewise: the first of them; any where there is none
    is_token: np.ndarray  # bool (B or 1, Lq): False for padding, the key of which nobody sees

    @classmethod
    def of(cls, call: Call) -> Sight:
        """That of a call whose queries are among its keys, in memory linear in the lengths."""
        xp = arrays_of(call.query)
        visibility = Visibility(call, xp.arange)
        is_one = visibility.uniform and (call.mask is None or len(call.mask) == 1)
        is_interval = call.mask is None and call.query_segments is None and not cuts_of(call)
        find = _by_interval if is_interval else _by_pairs
        found = [find(xp, call, visibility, b) for b in range(1 if is_one else call.sizes[0])]
        seen, first, keys = (np.stack(x) for x in zip(*found))
        tokens = [_tokens(start, call.sizes[3], own) for start, own in zip(visibility.starts, keys)]
        return cls(seen, first, np.stack(tokens))


def _by_interval(
    xp: Arrays, call: Call, visibility: Visibility, b: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts and first keys ``(1, Lq)``, and which keys are seen ``(Lk,)``, of batch element b."""
    Lq, Lk = call.sizes[3:]
    low, high = (np.broadcast_to(x, (Lq,)) for x in visibility.interval(b, np.arange(Lq)))
    some = low < high
    change = np.zeros(Lk + 1, np.int64)
    np.add.at(change, low[some], 1)
    np.add.at(change, high[some], -1)
    return (high - low)[None], np.where(some, low, 0)[None], change.cumsum()[:-1] > 0


def _by_pairs(
    xp: Arrays, call: Call, visibility: Visibility, b: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same with masks, segments and cuts, counts and first keys ``(Hq or 1, Lq)``."""
    Lq, Lk = call.sizes[3:]
    heads = 1 if call.mask is None else call.mask.shape[1]
    heads = call.sizes[1] if cuts_of(call) else heads
    keys = slice(0, min(Lk, visibility.lengths[b]))
    height = max(1, BLOCK_PAIRS // max(1, heads * Lk))
    counts, firsts, seen = [], [], np.zeros(Lk, bool)
    for start in range(0, Lq, height):
        rows = slice(start, min(start + height, Lq))
        shape = (1, heads, rows.stop - rows.start, keys.stop)
        pairs = visibility.pairs(slice(b, b + 1), slice(0, heads), rows, keys)
        pairs = xp.broadcast(pairs, shape)[0]
        counts.append(to_numpy(pairs.sum(-1)))
        firsts.append(to_numpy(xp.cast(pairs, "uint8").argmax(-1)) if keys.stop else counts[-1])
        seen[keys] |= to_numpy(pairs.any(1).any(0))
    return np.concatenate(counts, 1), np.concatenate(firsts, 1), seen


def _tokens(start: int, queries: int, seen: np.ndarray) -> np.ndarray:
    """Whether the keys at the queries' own positions are seen; True where there is none."""
    own = start + np.arange(queries)
    is_key = (0 <= own) & (own < len(seen))
    return np.where(is_key, seen[np.where(is_key, own, 0)] if len(seen) else True, True)
