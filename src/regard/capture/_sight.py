"""What the queries of a call see, in short: their first keys, and which are those of tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from regard._base.arrays import Arrays, arrays_of, to_numpy
from regard._call.call import Call
from regard._call.visible import Visibility, cuts_of
from regard.capture._kind import are_in_order, has_order

BLOCK_PAIRS = 2**22  # of a mask that are looked at together


class Sight(NamedTuple):
    """What the queries of one call see; the first two axes are 1 where all agree."""

    seen: np.ndarray  # (B or 1, Hq or 1, Lq): how many keys
    first: np.ndarray  # likewise: the first of them; any where there is none
    is_token: np.ndarray  # bool (B or 1, Lq): False for padding, the key of which nobody sees
    in_order: bool  # whether what the queries see shows that they have positions among the keys

    @classmethod
    def of(cls, call: Call) -> Sight:
        """That of a call whose queries are among its keys, in memory linear in the lengths."""
        xp = arrays_of(call.query)
        visibility = Visibility(call, xp.arange)
        is_one = visibility.uniform and (call.mask is None or len(call.mask) == 1)
        is_interval = call.mask is None and call.query_segments is None and not cuts_of(call)
        find = _by_interval if is_interval else _by_pairs
        found = [find(xp, call, visibility, b) for b in range(1 if is_one else call.sizes[0])]
        seen, first = (
            np.stack([getattr(one, name) for one in found]) for name in ("seen", "first")
        )
        in_order = has_order(call) or any(
            are_in_order(_start(call, visibility, b), one.last) for b, one in enumerate(found)
        )
        return cls(seen, first, np.stack([one.is_token for one in found]), in_order)


class _One(NamedTuple):
    """The same of one batch element."""

    seen: np.ndarray  # (Hq or 1, Lq)
    first: np.ndarray  # likewise
    last: np.ndarray  # (Lq,): the key after the last that any head sees; 0 where there is none
    is_token: np.ndarray  # (Lq,)

    @classmethod
    def of(
        cls, seen: np.ndarray, first: np.ndarray, last: np.ndarray, by_own: np.ndarray,
        own: np.ndarray, by_any: np.ndarray,
    ) -> _One:  # fmt: skip
        """From whether queries see their own keys (Lq,), which these are, and all that are seen."""
        is_key = (0 <= own) & (own < len(by_any))
        own_seen = by_any[np.where(is_key, own, 0)] if len(by_any) else is_key
        is_token = ~is_key | own_seen
        if not (by_own | ~is_key | ~own_seen).all():  # a key that nobody sees may be a token's
            is_token = np.ones(len(own), bool)
        return cls(seen, first, last, is_token)


def _start(call: Call, visibility: Visibility, b: int) -> int:
    """The first query's position; of as many queries as keys without an order, the first key's."""
    Lq, Lk = call.sizes[3:]
    return 0 if Lq == Lk and not has_order(call) else visibility.starts[b]


def _by_interval(xp: Arrays, call: Call, visibility: Visibility, b: int) -> _One:
    """That of batch element b."""
    Lq, Lk = call.sizes[3:]
    low, high = (np.broadcast_to(x, (Lq,)) for x in visibility.interval(b, np.arange(Lq)))
    some, own = low < high, _start(call, visibility, b) + np.arange(Lq)
    change = np.zeros(Lk + 1, np.int64)
    np.add.at(change, low[some], 1)
    np.add.at(change, high[some], -1)
    return _One.of(
        (high - low)[None], np.where(some, low, 0)[None], np.where(some, high, 0),
        (low <= own) & (own < high), own, change.cumsum()[:-1] > 0,
    )  # fmt: skip


def _by_pairs(xp: Arrays, call: Call, visibility: Visibility, b: int) -> _One:
    """The same with masks, segments and cuts."""
    Lq, Lk = call.sizes[3:]
    heads = 1 if call.mask is None else call.mask.shape[1]
    heads = call.sizes[1] if cuts_of(call) else heads
    keys = slice(0, min(Lk, visibility.lengths[b]))
    height = max(1, BLOCK_PAIRS // max(1, heads * Lk))
    counts, firsts, lasts, by_own = [], [], [], []
    seen, own = np.zeros(Lk, bool), _start(call, visibility, b) + np.arange(Lq)
    at = np.clip(own, 0, max(0, keys.stop - 1))
    for start in range(0, Lq, height):
        rows = slice(start, min(start + height, Lq))
        shape = (1, heads, rows.stop - rows.start, keys.stop)
        pairs = visibility.pairs(slice(b, b + 1), slice(0, heads), rows, keys)
        j = xp.arange(0, keys.stop)
        pairs = xp.broadcast((j >= 0)[None] if pairs is None else pairs, shape)[0]
        counts.append(to_numpy(pairs.sum(-1)))
        firsts.append(to_numpy(xp.cast(pairs, "uint8").argmax(-1)) if keys.stop else counts[-1])
        by_any = pairs.any(0)  # head
        seen[keys] |= to_numpy(by_any.any(0))
        if keys.stop:
            ends = to_numpy(((j + 1) * by_any).argmax(-1)) + 1
            lasts.append(np.where(to_numpy(by_any.any(-1)), ends, 0))
            places = np.arange(len(ends)), at[rows]
            by_own.append(to_numpy(by_any[places]) & (at[rows] == own[rows]))
    if not keys.stop:
        lasts, by_own = [np.zeros(Lq, np.int64)], [np.zeros(Lq, bool)]
    return _One.of(
        np.concatenate(counts, 1), np.concatenate(firsts, 1), np.concatenate(lasts),
        np.concatenate(by_own), own, seen,
    )  # fmt: skip
