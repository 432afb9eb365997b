"""What the queries of recorded calls see, on the tokens that a recording keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from regard._base import loaded
from regard._base.arrays import is_tensor, to_numpy
from regard._call.call import Call
from regard._call.visible import Visibility
from regard.capture._kind import are_in_order, has_order

Span = tuple[int, int]
FoundT = TypeVar("FoundT")
# The options that say which keys a query sees.
SIGHT = ("causal", "window", "mask", "key_lengths", "segments", "intervals", "query_start")


class Rows(NamedTuple):
    """The keys that the queries of one call and batch element see."""

    first: np.ndarray  # (Lq,)
    last: np.ndarray  # (Lq,), the key after the last
    mask: np.ndarray | None  # (1 or Hq, 1 or Lq, Lk), bool: which of them
    start: int  # the position of the first query among the keys
    keys: int  # Lk
    is_ordered: bool = True  # whether the call itself says that queries have positions among keys

    @classmethod
    def of(cls, call: Call) -> list[Rows]:
        """Those of every batch element."""
        is_ordered = has_order(call)
        visibility, (B, _, _, Lq, Lk) = Visibility(call, np.arange), call.sizes
        found = []
        for b in range(B):
            first, last = visibility.interval(b, np.arange(Lq))
            first, last = np.broadcast_to(first, (Lq,)), np.broadcast_to(last, (Lq,))
            masks = [] if call.mask is None else [to_numpy(_element(call.mask, b))]
            if call.query_segments is not None:
                pair = (call.query_segments, call.key_segments)
                queries, keys = (to_numpy(_element(ids, b)) for ids in pair)
                masks.append((queries[:, None] == keys)[None])
            mask = masks[0] if len(masks) == 1 else masks[0] & masks[1] if masks else None
            found.append(cls(first, last, mask, visibility.starts[b], Lk, is_ordered))
        return found if is_ordered or call.sizes[3] == 1 else placed(found)

    def position(self) -> int:
        """That of the first query; of as many queries as keys without an order, the first key's."""
        return 0 if len(self.first) == self.keys and not self.is_ordered else self.start

    def seen(self) -> Seen:
        """Which keys any query sees, and how far each query does."""
        queries, own = len(self.first), self.position() + np.arange(len(self.first))
        is_key = (0 <= own) & (own < self.keys)
        at = np.where(is_key, own, 0)
        if self.mask is None:
            some = self.first < self.last
            change = np.zeros(self.keys + 1, np.int64)
            np.add.at(change, self.first[some], 1)
            np.add.at(change, self.last[some], -1)
            by_any, last = change.cumsum()[:-1] > 0, np.where(some, self.last, 0)
            by_own = np.asarray((self.first <= own) & (own < self.last))
        else:
            j = np.arange(self.keys)
            mask = np.broadcast_to(self.mask.any(0), (queries, self.keys))
            mask = mask & (self.first[:, None] <= j) & (j < self.last[:, None])
            by_any, by_own = np.asarray(mask.any(0)), np.asarray(mask[np.arange(queries), at])
            last = np.where(mask.any(1), self.keys - mask[:, ::-1].argmax(1), 0)
        (places,) = np.nonzero(by_any)
        span = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, self.keys)
        return Seen(span, last, bool((by_own | ~is_key | ~by_any[at]).all()))


class Seen(NamedTuple):
    """What the queries of one call and batch element see, in short."""

    span: Span  # the keys from the first to the last that any query sees; all where none sees one
    last: np.ndarray  # (Lq,), the key after the last that each query sees; 0 where there is none
    is_own: bool  # whether every token whose key is seen sees its own: then the others are padding


def placed(texts: list[Rows]) -> list[Rows]:
    """Of a cache with unused places, which a mask hides: at the last keys that they see.

    Queries that see nothing, or no more than those before them, are padding. One query alone may
    see all keys of another text: it stays.
    """
    count = len(texts[0].first)
    if not count < texts[0].keys or any(rows.mask is None for rows in texts):
        return texts
    lasts, i = [rows.seen().last for rows in texts], np.arange(count)
    start = max(int((last - 1 - i)[last > 0].max(initial=-1)) for last in lasts)
    are_next = start >= 0 and any(are_in_order(start, last) for last in lasts)
    for last in lasts:
        are_next &= bool(((last == 0) | (last == np.minimum(start + 1 + i, last.max()))).all())
    return [rows._replace(start=start, is_ordered=True) if are_next else rows for rows in texts]


class BySight(Generic[FoundT]):
    """What follows from the keys that queries see, found once for layers with the same arrays.

    Args:
        find: gives it, for a call.
    """

    def __init__(self, find: Callable[[Call], FoundT]) -> None:
        self._find = find
        self._known: dict[Any, tuple[FoundT, Any]] = {}

    def clear(self) -> None:
        """Forgets all, and the arrays."""
        self._known.clear()

    def of(self, call: Call, options: dict[str, Any]) -> FoundT:
        """What was found for a call with such options, or is now."""
        given = {name: options[name] for name in SIGHT if options.get(name) is not None}
        B, _, _, Lq, Lk = call.sizes
        known = (B, Lq, Lk, *((name, identity(x)) for name, x in given.items()))
        if known not in self._known:  # which holds the arrays: their identities stay their own
            self._known[known] = self._find(call), given
        return self._known[known][0]


def identity(x: Any) -> Any:
    """A number's own; an array's, for as long as it is held and not written to.

    Torch counts no writes into tensors of its inference mode: they have that of their numbers.
    """
    if isinstance(x, (bool, int, float)):
        return x
    if isinstance(x, tuple):
        return tuple(identity(part) for part in x)
    if is_tensor(x) and x.is_inference():
        if not x.is_cpu:
            return object()  # like no other: the host would wait for its numbers
        data = x.contiguous().flatten().view(loaded.torch.uint8).numpy()
        return x.shape, x.dtype, hashlib.blake2b(data, digest_size=16).digest()
    return id(x), x._version if is_tensor(x) else 0


class Step(NamedTuple):
    """One call: what its queries see, which of them are kept, and where its first key lies."""

    rows: Rows
    queries: slice
    offset: int  # of its first key among the keys of all calls


def joined(steps: Sequence[Step], kept: np.ndarray) -> dict[str, Any]:
    """The options of a ``Layer`` that show what the kept queries see of the kept keys.

    Args:
        kept: bool, one for each key of all calls.
    """
    place = np.concatenate(([0], np.cumsum(kept)))
    count = int(place[-1])
    firsts, lasts, masks = [], [], []
    for rows, queries, offset in steps:
        ends = (np.clip(x[queries] + offset, 0, len(kept)) for x in rows[:2])
        first, last = (place[x] for x in ends)
        firsts.append(first)
        lasts.append(last)
        masks.append(_kept_mask(rows, queries, offset, kept))
    first, last = np.concatenate(firsts), np.concatenate(lasts)
    if all(mask is None for mask in masks):
        return simplified(first, last, count)
    per_head = max(mask.shape[0] for mask in masks if mask is not None)
    mask = np.zeros((per_head, len(first), count), bool)
    low = 0
    for one, part in zip(masks, firsts):
        mask[:, low : low + len(part)] = True if one is None else one
        low += len(part)
    j = np.arange(count)
    mask &= (first[:, None] <= j) & (j < last[:, None])
    if per_head == 1:
        seen = mask[0].sum(-1)
        begin, end = mask[0].argmax(-1), count - mask[0, :, ::-1].argmax(-1)
        end = np.where(seen == 0, begin, end)
        if (end - begin == seen).all():
            return simplified(begin, end, count)
    return {"mask": mask} | _start(len(first), count)


def _kept_mask(rows: Rows, queries: slice, offset: int, kept: np.ndarray) -> np.ndarray | None:
    """Its mask of the kept queries and keys; keys that it has not are not seen."""
    if rows.mask is None:
        return None
    heads, Lq, Lk = rows.mask.shape
    own = rows.mask if Lq == 1 else rows.mask[:, queries]
    whole = np.zeros((heads, own.shape[1], len(kept)), bool)
    there = min(rows.keys, len(kept) - offset)
    whole[..., offset : offset + there] = own if Lk == 1 else own[..., :there]
    found = whole[..., kept]
    return np.broadcast_to(found, (heads, len(rows.first[queries]), found.shape[-1]))


def simplified(first: np.ndarray, last: np.ndarray, keys: int) -> dict[str, Any]:
    """The fewest options that show these intervals: nothing, causal, a window, or themselves."""
    Lq = len(first)
    if Lq == 0 or ((first == 0) & (last == keys)).all():
        return _start(Lq, keys)
    i = np.arange(Lq)
    start = int(last[-1]) - Lq
    if start >= 0 and (last == start + i + 1).all():
        options: dict[str, Any] = {"causal": True} | _start(Lq, keys, start)
        if (first == 0).all():
            return options
        left = int((start + i - first).max())
        if left >= 0 and (first == np.maximum(0, start + i - left)).all():
            return options | {"window": (left, 0)}
    return {"intervals": (first.astype(np.int64), last.astype(np.int64))} | _start(Lq, keys)


def _start(Lq: int, keys: int, start: int | None = None) -> dict[str, int]:
    return {} if start is None or start == keys - Lq else {"query_start": start}


def _element(x: Any, b: int) -> Any:
    return x[b if len(x) > 1 else 0]
