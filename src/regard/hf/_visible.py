"""Which keys a query sees, read from a mask function of transformers without evaluating it.

A mask function says of (batch, head, query, key) whether the query sees the key. It is called once,
with tensors for batch and query, and for the key with a tensor that has no numbers but notes what
is done to it. Almost every mask is an interval of keys for each query, and is found in O(B · Lq)
for any length. What cannot be read so raises ``UnreadableError``, and is evaluated instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten: Any = torch.ops.aten
FAR = 2**40  # no text is that long


class UnreadableError(Exception):
    """The mask function does something that no interval of keys expresses."""


class Among(NamedTuple):
    """The keys with ``low <= table[b, key] < high``: an interval only among some neighbours."""

    table: Tensor  # (B, Lk)
    low: Tensor | None  # (B or 1, Lq or 1)
    high: Tensor | None


class Visible(NamedTuple):
    """The keys ``first <= key < last`` of every query, as far as ``keys`` has them."""

    first: Tensor  # (B or 1, Lq or 1), and last
    last: Tensor
    keys: Tensor | None = None  # (B, Lk), bool
    unknown: Tensor | None = None  # where no interval says it: like first
    among: tuple[Among, ...] = ()

    def __and__(self, other: Visible) -> Visible:
        first, last = torch.maximum(self.first, other.first), torch.minimum(self.last, other.last)
        return Visible(
            first,
            last,
            _both(self.keys, other.keys, torch.logical_and),
            _both(self.unknown, other.unknown, torch.logical_or),
            self.among + other.among,
        )

    def __or__(self, other: Visible) -> Visible:
        one, two = self.settled(), other.settled()
        if one.keys is not None or two.keys is not None:
            raise UnreadableError
        empty, other_empty = one.first >= one.last, two.first >= two.last
        apart = (one.first > two.last) | (two.first > one.last)
        unknown = _both(one.unknown, two.unknown, torch.logical_or)
        unknown = _both(unknown, apart & ~empty & ~other_empty, torch.logical_or)
        found = Visible(
            torch.where(empty, two.first, torch.minimum(one.first, two.first)),
            torch.where(empty, two.last, torch.maximum(one.last, two.last)),
        )
        first = torch.where(other_empty, one.first, found.first)
        last = torch.where(other_empty, one.last, found.last)
        for part in (one, two):  # what is unknown of the other lies within it
            covers = (part.first <= first) & (part.last >= last)
            known = covers if part.unknown is None else covers & ~part.unknown
            unknown = _both(unknown, ~known, torch.logical_and)
        return Visible(first, last, unknown=unknown)

    def settled(self) -> Visible:
        """The same without ``among``, each of them an interval within the interval found."""
        found = self._replace(among=())
        for among in self.among:
            found = found & _equal(among)
        for among in self.among:
            found = _within(found, among)
        if found.unknown is not None:
            found = found._replace(unknown=found.unknown & (found.first < found.last))
        return found

    def intervals(self) -> Visible:
        """The same, ``keys`` in the intervals where they are neighbours.

        Raises:
            UnreadableError: some query sees keys that are no interval.
        """
        found = self.settled()
        if found.keys is not None:
            count = found.keys.sum(-1, keepdim=True)
            numbers = found.keys.to(torch.uint8)
            first = numbers.argmax(-1, keepdim=True)
            last = found.keys.shape[-1] - numbers.flip(-1).argmax(-1, keepdim=True)
            if bool(((last - first == count) | (count == 0)).all()):
                padded = Visible(first, torch.where(count == 0, first, last))
                found = found._replace(keys=None) & padded
        if found.unknown is not None and bool((found.unknown & (found.first < found.last)).any()):
            raise UnreadableError
        return found._replace(unknown=None)


def read(
    function: Callable[..., Tensor], batch: Tensor, queries: Tensor, keys: int, start: int
) -> Visible:
    """What ``function`` shows, of ``batch (B,)``, ``queries (Lq,)`` and keys from ``start`` on.

    Raises:
        UnreadableError: no intervals express it.
    """
    key = Symbol.of(_Key(keys, add=start), (1, 1, 1, keys), torch.int64, batch.device)
    head = Symbol.of(None, (1, 1, 1, 1), torch.int64, batch.device)
    shown = function(batch[:, None, None, None], head, queries[None, None, :, None], key)
    return _visible(shown, keys).intervals()


class _Key(NamedTuple):
    """The number ``(sign · base + add) // divisor`` of a key, or its absolute value.

    The base is the key's own index, or its number in a table.
    """

    keys: int
    table: Tensor | None = None
    sign: int = 1
    add: int | Tensor = 0
    divisor: int = 1
    absolute: bool = False

    def between(self, low: Any, high: Any) -> Visible:
        """The keys with ``low <= number < high``, where these are given."""
        if self.absolute:
            if low is not None or high is None:
                raise UnreadableError
            low = 1 - high
        add, divisor = self.add, self.divisor
        low, high = (None if x is None else x * divisor - add for x in (low, high))
        if self.sign < 0:
            low, high = None if high is None else 1 - high, None if low is None else 1 - low
        low, high = (None if x is None else _rows(x) for x in (low, high))
        if self.table is not None:
            everything = _constant(True, self.keys, self.table.device)
            return everything._replace(among=(Among(self.table, low, high),))
        given = low if low is not None else high
        assert given is not None
        first = torch.zeros_like(given) if low is None else low.clamp(0, self.keys)
        last = torch.full_like(given, self.keys) if high is None else high.clamp(0, self.keys)
        return Visible(first, last)


class Symbol(Tensor):
    """The key of a mask function, or what became of it; it has a shape and no numbers."""

    content: _Key | Visible | None

    @staticmethod
    def of(content: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> Symbol:
        """A symbol for ``content``."""
        symbol = Tensor._make_wrapper_subclass(Symbol, shape, dtype=dtype, device=device)
        symbol.content = content
        return symbol

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Notes what is done to the key."""
        rule = _RULES.get(func.overloadpacket)
        if rule is None or kwargs:
            raise UnreadableError(str(func))
        found = rule(*args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        shape: Any = torch.broadcast_shapes(*(x.shape for x in tensors))
        if func.overloadpacket is aten.index:
            shape = torch.broadcast_shapes(*(x.shape for x in args[1]))
        dtype = torch.int64 if isinstance(found, _Key) else torch.bool
        return cls.of(found, shape, dtype, tensors[0].device)


def _key(x: Any) -> _Key:
    if not isinstance(x, Symbol) or not isinstance(x.content, _Key):
        raise UnreadableError
    return x.content


def _rows(x: Any) -> Tensor:
    """A number, or one for each batch and query, as ``(B or 1, Lq or 1)``."""
    if isinstance(x, Symbol):
        raise UnreadableError
    x = torch.as_tensor(x)
    if x.is_floating_point():
        raise UnreadableError
    if x.ndim == 0:
        return x.reshape(1, 1).long()
    if x.ndim == 2:
        return x.long()
    if x.ndim != 4 or x.shape[1] != 1 or x.shape[3] != 1:
        raise UnreadableError
    return x[:, 0, :, 0].long()


def _constant(x: Any, count: int, device: Any) -> Visible:
    rows = _rows(x).to(device)
    return Visible(torch.zeros_like(rows), rows * count)


def _visible(x: Any, count: int) -> Visible:
    """What a result shows; a tensor of bools shows all keys to a query, or none."""
    if not isinstance(x, Symbol):
        if not isinstance(x, Tensor) or x.dtype != torch.bool:
            raise UnreadableError
        return _constant(x, count, x.device)
    if not isinstance(x.content, Visible):
        raise UnreadableError
    return x.content


def _sum(x: Any, y: Any, alpha: int = 1) -> _Key:
    if isinstance(x, Symbol):
        key, other = _key(x), y
    else:
        key, other = _key(y), x
    if isinstance(other, Symbol) or key.divisor != 1 or key.absolute or alpha != 1:
        raise UnreadableError
    return key._replace(add=_shift(other) + key.add)


def _difference(x: Any, y: Any, alpha: int = 1) -> _Key:
    if isinstance(y, Symbol):
        y_key = _key(y)
        if y_key.divisor != 1 or y_key.absolute or isinstance(x, Symbol) or alpha != 1:
            raise UnreadableError
        return y_key._replace(sign=-y_key.sign, add=_shift(x) - y_key.add)
    return _sum(x, -y, alpha)


def _shift(x: Any) -> Any:
    return _rows(x) if isinstance(x, Tensor) else x


def _quotient(x: Any, y: Any) -> _Key:
    key = _key(x)
    if isinstance(y, Tensor) and y.numel() == 1 and not isinstance(y, Symbol):
        y = int(y)
    if not isinstance(y, int) or y < 1 or key.divisor != 1 or key.absolute:
        raise UnreadableError
    return key._replace(divisor=y)


def _absolute(x: Any) -> _Key:
    return _key(x)._replace(absolute=True)


def _indexed(table: Any, indices: list[Any]) -> _Key | Visible:
    """``table[batch, key]``: the key's number in a table, or whether it is seen at all."""
    if isinstance(table, Symbol) or table.ndim != 2 or len(indices) != 2:
        raise UnreadableError
    batch, key = indices[0], _key(indices[1])
    plain = key == _Key(key.keys, add=key.add) and isinstance(key.add, int)
    if not plain or isinstance(batch, Symbol) or batch.numel() != batch.shape[0]:
        raise UnreadableError
    own = table[batch.reshape(-1), key.add : key.add + key.keys]
    if own.shape[-1] != key.keys:
        raise UnreadableError
    if own.dtype == torch.bool:
        return _constant(True, key.keys, own.device)._replace(keys=own)
    if own.is_floating_point():
        raise UnreadableError
    return _Key(key.keys, table=own)


def _whole(x: Any) -> int:
    """A number that keys are compared with; infinity lies beyond them all."""
    if isinstance(x, float) and math.isinf(x):
        return FAR if x > 0 else -FAR
    if x != int(x):
        raise UnreadableError
    return int(x)


def _comparison(name: str) -> Callable[[Any, Any], Visible]:
    mirrored = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}

    def rule(x: Any, y: Any) -> Visible:
        how = name
        if not isinstance(x, Symbol):
            x, y, how = y, x, mirrored[name]
        key, y = _key(x), _rows(y) if isinstance(y, Tensor) else _whole(y)
        low = {"ge": y, "gt": y + 1, "eq": y}.get(how)
        high = {"lt": y, "le": y + 1, "eq": y + 1}.get(how)
        return key.between(low, high)

    return rule


def _combined(how: Callable[[Visible, Visible], Visible]) -> Callable[[Any, Any], Visible]:
    def rule(x: Any, y: Any) -> Visible:
        count = (x if isinstance(x, Symbol) else y).shape[-1]
        return how(_visible(x, count), _visible(y, count))

    return rule


_RULES: dict[Any, Callable[..., _Key | Visible]] = {
    aten.add: _sum,
    aten.sub: _difference,
    aten.rsub: lambda x, y, alpha=1: _difference(y, x, alpha),
    aten.floor_divide: _quotient,
    aten.abs: _absolute,
    aten.index: _indexed,
    **{getattr(aten, name): _comparison(name) for name in ("lt", "le", "gt", "ge", "eq")},
    aten.bitwise_and: _combined(Visible.__and__),
    aten.logical_and: _combined(Visible.__and__),
    aten.bitwise_or: _combined(Visible.__or__),
    aten.logical_or: _combined(Visible.__or__),
}


def _both(x: Tensor | None, y: Tensor | None, how: Callable[..., Tensor]) -> Tensor | None:
    return how(x, y) if x is not None and y is not None else (x if y is None else y)


def _equal(among: Among) -> Visible:
    """The keys of equal numbers, where they are neighbours; everything for another ``among``."""
    table, low, high = among
    count = table.shape[-1]
    if low is None or high is None or not torch.equal(high - low, torch.ones_like(low)):
        return _constant(True, count, table.device)
    numbers, order = table.sort(dim=-1, stable=True)
    low = low.expand(len(table), -1).contiguous()
    begin = torch.searchsorted(numbers, low)
    end = torch.searchsorted(numbers, low, right=True)
    first = order.gather(-1, begin.clamp(max=count - 1))
    last = order.gather(-1, (end - 1).clamp(min=0)) + 1
    apart = (last - first != end - begin) & (begin < end)
    last = torch.where(begin < end, last, first)
    # Where equal keys lie apart, the interval around them all: what is cut from it may be one.
    return Visible(first, last, unknown=apart)


def _within(found: Visible, among: Among) -> Visible:
    """``found`` with the keys of ``among``, whose numbers must rise by one there, key by key."""
    table, low, high = among
    count = table.shape[-1]
    if low is not None and high is not None and torch.equal(high - low, torch.ones_like(low)):
        return found  # _equal said it
    rise = table - torch.arange(count, device=table.device)
    runs = torch.nn.functional.pad((rise.diff(dim=-1) != 0).cumsum(-1), (1, 0))
    shape = torch.broadcast_shapes(found.first.shape, found.last.shape, (len(table), 1))
    first, last = found.first.expand(shape), found.last.expand(shape)
    begin, end = first.clamp(0, count - 1), (last - 1).clamp(0, count - 1)
    broken = (runs.gather(-1, begin) != runs.gather(-1, end)) & (first < last)
    shift = rise.gather(-1, begin)
    if low is not None:  # what is broken stays as it is: unknown, and not empty
        first = torch.where(broken, first, torch.maximum(first, low - shift))
    if high is not None:
        last = torch.where(broken, last, torch.minimum(last, high - shift))
    unknown = _both(found.unknown, broken, torch.logical_or)
    return found._replace(first=first, last=last, unknown=unknown)
