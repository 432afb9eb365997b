"""One call of attention, checked and in one form, and the parts that it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard._base import loaded
from regard._base.arrays import dtype_name, is_tensor
from regard._base.deferred import DeferredArray, fetched
from regard._call.edits import Rectangle, edits_of
from regard._call.options import ARRAYS, OPTIONS, RECORDED, Given

ALL = slice(None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Call(Given):
    """One checked call. Arrays are of one library, with axes ``(B, H, L, D)``; see DESIGN names.

    ``key``, ``value``, ``mask``, ``bias``, the segments and the intervals keep leading axes of size
    1 as they are: they broadcast.
    """

    query: Any  # (B, Hq, Lq, D)
    key: Any  # (B or 1, Hkv, Lk, D)
    value: Any  # (B or 1, Hkv, Lk, Dv), or None where only the weights are wanted
    leading: tuple[int, ...]  # the axes that B stands for
    heads: bool  # whether the caller's arrays have a head axis
    part_of: int | None = None  # for a part of a call: the ``group_rows`` of the whole
    whole_rows: bool = True  # False where the call has only some of the keys

    @classmethod
    def of(cls, **fields: Any) -> Call:
        """A call of these fields and the others' defaults; quicker than the constructor."""
        call = cls.__new__(cls)
        vars(call).update(fields)
        return call

    def changed(self, **fields: Any) -> Call:
        """The same call but for these fields; quicker than ``dataclasses.replace``.

        That sets each field by itself, which was half of all that torch.compile traced.
        """
        return Call.of(**vars(self) | fields)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """``B, Hq, Hkv, Lq, Lk``."""
        B, Hq, Lq, _ = self.query.shape
        return B, Hq, self.key.shape[1], Lq, self.key.shape[2]

    @property
    def group_rows(self) -> int:
        """The queries that share a key head, in the whole call: they decide how it is computed."""
        if self.part_of is not None:
            return self.part_of
        _, Hq, Hkv, Lq, _ = self.sizes
        return Hq // Hkv * Lq if Hkv else 0

    @property
    def is_torch(self) -> bool:
        """Whether the arrays are torch tensors."""
        return not isinstance(self.query, np.ndarray)

    @property
    def tensors(self) -> list[Any]:
        """Every torch tensor of the call."""
        if (torch := loaded.torch) is None:
            return []
        return [x for x in vars(self).values() if isinstance(x, torch.Tensor)]

    @property
    def given(self) -> frozenset[str]:
        """Names of the options' fields that are not as they are by default; the scale is one."""
        fields = ((option, field) for option in OPTIONS for field in option.fields)
        return frozenset(
            field.name
            for option, field in fields
            if (x := getattr(self, field.name)) is not None
            and (field in ARRAYS or x != option.default)
        )

    def options_of(self, b: int) -> dict[str, Any]:
        """The options of one batch element, as ``regard.recording.Layer`` takes them."""
        found: dict[str, Any] = {}
        held = vars(self).keys()  # the others are as by default
        for option, names in RECORDED:
            if names.isdisjoint(held) and option.default is None:
                continue
            if option.name == "edits":
                if self.edit_ranges is not None:
                    found["edits"] = edits_of(self.edit_ranges, self.edit_factors)
                continue
            parts = []
            for name, _, axes in option.fields:
                x = getattr(self, name)
                if x is not None and axes[:1].upper() == "B":
                    x = x[b if len(x) > 1 else 0]
                parts.append(int(x) if x is not None and axes == "B" else x)
            if any(x is not None for x in parts):
                found[option.name] = parts[0] if len(parts) == 1 else tuple(parts)
        return found

    def restore(self, x: Any) -> Any:
        """``(B, Hq, ...)`` with the caller's own leading axes."""
        if self.heads and len(self.leading) == 1:
            return x
        tail = tuple(x.shape[1:]) if self.heads else tuple(x.shape[2:])
        return x.reshape(self.leading + tail)

    def head(self, h: int) -> Call:
        """Query head h alone, as if it had been passed as ``(..., L, D)``."""
        alone = self.of_heads(range(len(self.query)), range(h, h + 1))
        return alone.changed(leading=self.leading, heads=False)

    def matrix(self, b: int, h: int) -> Call:
        """Query head h of batch element b alone, as if it had been passed as ``(L, D)``."""
        alone = self.of_heads(range(b, b + 1), range(h, h + 1))
        return alone.changed(leading=(), heads=False)

    def of_heads(self, b: range, h: range) -> Call:
        """Some batch elements and query heads, with any steps.

        The heads share one key head, or none, or are all that share some.
        """
        group = self.sizes[1] // max(self.sizes[2], 1)
        apart = h.step // group if group and h.step % group == 0 else 1
        end = h[-1] + 1 if h else h.stop  # a stop may lie beyond the group
        shared = slice(h.start // group, -(-end // group), apart) if group else slice(0, 0)
        batch, own = slice(b.start, b.stop, b.step), slice(h.start, h.stop, h.step)
        return self._part(B=batch, H=own, G=shared, leading=(len(b),), heads=True)

    def rows(self, part: slice) -> Call:
        """Some of the queries, with what they see; ``part`` may have a step."""
        start, _, step = part.indices(self.sizes[3])
        starts, step = self.starts + start * self.query_step, step * self.query_step
        return self._part(Q=part, query_start=starts, query_step=step)

    def columns(self, part: slice) -> Call:
        """Some of the keys, and who sees them; ``part`` may have a step. Rows are not whole."""
        keys = range(*part.indices(self.sizes[4]))
        if len(keys) == self.sizes[4]:
            return self

        ends = ("key_lengths", "interval_first", "interval_last")
        told = {name: _before(x, keys) for name in ends if (x := getattr(self, name)) is not None}
        told["key_start"] = (self.key_start or 0) + keys.start * self.key_step
        cut = self._part(
            K=slice(keys.start, max(keys.start, keys.stop), keys.step),
            query_start=self.starts - keys.start * self.key_step,
            key_step=keys.step * self.key_step, whole_rows=False,
        )  # fmt: skip
        return cut.changed(**told)

    @property
    def starts(self) -> Any:
        """``(B,)``: the position of the first query among the keys."""
        if self.query_start is not None:
            return self.query_start
        B, _, _, Lq, Lk = self.sizes
        return np.full(B, Lk - Lq) if self.key_lengths is None else self.key_lengths - Lq

    def _part(
        self, *, B: slice = ALL, H: slice = ALL, G: slice = ALL, Q: slice = ALL, K: slice = ALL,
        **changed: Any,
    ) -> Call:  # fmt: skip
        """The arrays cut along their axes, by the letters of ``regard._call.options``."""
        cut = {"B": B, "H": H, "G": G, "Q": Q, "K": K}
        cut = {axis: part for axis, part in cut.items() if part != ALL}
        fields: dict[str, Any] = {"part_of": self.group_rows}
        for name, _, axes in ARRAYS:
            x = getattr(self, name)
            if x is None or cut.keys().isdisjoint(axes.upper()):
                continue
            fields[name] = x[
                tuple(
                    ALL if axis.islower() and n == 1 else cut.get(axis.upper(), ALL)
                    for axis, n in zip(axes, x.shape)
                )
            ]
        if self.edit_ranges is not None:
            fields["edit_ranges"] = self._moved_edits(cut)
        return self.changed(**fields | changed)

    def _moved_edits(self, cut: dict[str, slice]) -> Any:
        """The intervals of the edits in a part, of all of them: some may have no pair there."""
        _, Hq, _, Lq, Lk = self.sizes
        ranges = self.edit_ranges + 0
        for n, (axis, count) in enumerate((("H", Hq), ("Q", Lq), ("K", Lk))):
            if axis in cut:
                ends = slice(2 * n, 2 * n + 2)
                ranges[:, ends] = _before(ranges[:, ends], range(*cut[axis].indices(count)))
        return ranges

    @property
    def rectangles(self) -> list[Rectangle]:
        """The edits, as numbers."""
        if self.edit_ranges is None:
            return []
        found = zip(self.edit_ranges.tolist(), self.edit_factors.tolist())
        return [Rectangle((a, b), (c, d), (e, f), factor) for (a, b, c, d, e, f), factor in found]

    @property
    def positions(self) -> tuple[range, range] | None:
        """Of the queries and the keys in the whole; None where elements of the batch differ."""
        _, _, _, Lq, Lk = self.sizes
        starts, first_key = set(self.starts.tolist()), self.key_start or 0
        if len(starts) > 1:
            return None
        first, step, key_step = first_key, self.query_step, self.key_step
        first += min(starts, default=-first_key)  # of no element from the start of the whole
        return (
            range(first, first + Lq * step, step),
            range(first_key, first_key + Lk * key_step, key_step),
        )

    @property
    def output_name(self) -> str:
        """The dtype of the output."""
        return self.output_dtype or dtype_name(self.query)

    @property
    def draws(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where dropout counts the first query and the first key, and from each to the next.

        Those of a part stand where they do in the whole; others are counted by themselves.
        """
        if self.key_start is None:
            return (0, 0), (1, 1)
        first = int(self.query_start[0]) if len(self.query_start) else 0
        return (first + self.key_start, self.key_start), (self.query_step, self.key_step)

    def copy(self) -> Call:
        """The same call on copies of its arrays."""
        return Call(**{name: _copied(x) for name, x in vars(self).items()})

    def in_memory(self) -> Call:
        """The same call with the numbers of arrays that are elsewhere."""
        if type(self.query) is not DeferredArray and type(self.key) is not DeferredArray:
            return self
        numbers = {"query": fetched(self.query), "key": fetched(self.key)}
        return self.changed(**numbers)

    def without_value(self) -> Call:
        """The same call without its value."""
        return self.changed(value=None, dropout=0.0, seed=None, output_dtype=None)


def placed(
    sizes: tuple[int, int],
    query_start: int,
    key_start: int,
    steps: tuple[int, int],
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Fields of a call on a part of a whole, whose options count the tokens of the whole.

    Args:
        sizes: how many queries and keys the part has.
        query_start, key_start: positions of the first ones.
        steps: from a query, and from a key, to the position of the next.
        fields: those that were read.

    Returns:
        Those that change: they count the keys of the part, and positions from its first key.
    """
    queries, keys = (
        range(start, start + count * step, step)
        for start, count, step in zip((query_start, key_start), sizes, steps)
    )
    found: dict[str, Any] = {"query_start": fields["query_start"] - key_start}
    found["key_start"] = key_start
    for name in ("key_lengths", "interval_first", "interval_last"):
        if fields.get(name) is not None:
            found[name] = _before(fields[name], keys)
    if fields.get("edit_ranges") is not None:
        ranges = fields["edit_ranges"] + 0
        for at, part in ((2, queries), (4, keys)):
            ranges[:, at : at + 2] = _before(ranges[:, at : at + 2], part)
        found["edit_ranges"] = ranges
    return found


def _before(x: Any, part: range) -> Any:
    """How many of a part of the tokens or heads come before some numbers."""
    ahead = x.clip(part.start, max(part.start, part.stop)) - part.start
    return (ahead + part.step - 1) // part.step


def _copied(x: Any) -> Any:
    """A copy; broadcast axes stay broadcast."""
    if not (isinstance(x, np.ndarray) or is_tensor(x)):
        return x
    x = fetched(x)
    strides = x.stride() if is_tensor(x) else x.strides
    cell = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    if is_tensor(x):
        return cell.clone().expand(x.shape)
    return np.broadcast_to(cell.copy(), x.shape)
