"""Attention of whole heads: each rank exchanges its tokens of all heads for all tokens of some."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from regard._base.errors import UnsupportedError
from regard._base.settings import counted
from regard._base.types import BackendName
from regard._call.edits import Edit
from regard._operator.attention import attention as attend
from regard._weights.statistics import RowStatistics
from regard._weights.written import Version
from regard.distributed._layout import Layout, of_all_ranks
from regard.distributed._peers import require_one
from regard.distributed._sequence import Sequence, gradient_told, require_as_they_were

HEADS = -3  # the axis
CODES = 255  # of calls, next to each other, that a number tells apart: exact in bfloat16


def check(sequence: Sequence, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raises UnsupportedError where heads cannot be given to the ranks."""
    size = sequence.layout.size
    counts = [x.shape[HEADS] if x.ndim > 2 else 1 for x in (query, key)]
    if any(count % size for count in counts):
        raise UnsupportedError(
            f"distributed.attention: method='heads' gives each of {size} ranks as many heads, and"
            f" there are {counted(counts[0], 'query head')} and {counted(counts[1], 'key head')};"
            " method='ring' takes any number."
        )
    if sequence.options.get("dropout"):
        raise UnsupportedError(
            "distributed.attention: method='heads' has no dropout, which is drawn by the numbers of"
            " all heads; method='ring' has."
        )


def of_heads(
    sequence: Sequence, query: Any, key: Any, value: Any, backend: BackendName
) -> tuple[torch.Tensor, RowStatistics[torch.Tensor]]:
    """Output and statistics of this rank's queries, differentiable."""
    layout = sequence.layout
    if query.ndim == 2:  # one head, so one rank
        output, statistics = of_heads(
            replace(sequence, leading=()), query[None], key[None], value[None], backend
        )
        return output[0], RowStatistics(*(x[0] for x in statistics))
    (query, key, value), sequence = _as_one(sequence, query, key, value)
    q, k, v = (_ToHeads.apply(x, layout) for x in (query, key, value))
    options: Any = _options(sequence, query.shape[HEADS])
    output, statistics = attend(
        q, k, v, query_start=0, return_statistics=True, backend=backend, **options
    )
    rows = _to_tokens(torch.stack(statistics, -1), layout)
    own: torch.Tensor = _ToTokens.apply(output, layout, _known(sequence))
    return own, RowStatistics(rows[..., 0], rows[..., 1])


def _as_one(sequence: Sequence, *arrays: Any) -> tuple[Any, Sequence]:
    """The same with gradients of one node: a rank that is asked for some exchanges those of all."""
    given: dict[Any, Any] = dict(enumerate(arrays))
    given |= {"bias": sequence.options.get("bias"), "sinks": sequence.sinks}
    needed = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    given |= dict(zip(needed, _Together.apply(*needed.values()))) if needed else {}
    bias = {} if given["bias"] is None else {"bias": given["bias"]}
    found = replace(sequence, options=sequence.options | bias, sinks=given["sinks"])
    return [given[n] for n in range(len(arrays))], found


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return given

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Together.apply(*grads)  # so are second gradients


class _Known(NamedTuple):
    """What a gradient must find on every rank: the call's number, and tensors as they were."""

    number: int
    versions: tuple[Version, ...]


def _known(sequence: Sequence) -> _Known:
    versions = (one for one in sequence.versions if one.name not in sequence.by_query)
    return _Known(sequence.number, tuple(versions))


def _options(sequence: Sequence, heads: int) -> dict[str, Any]:
    """The options of this rank's heads."""
    rank, size = sequence.layout.rank, sequence.layout.size
    own = slice(rank * heads // size, (rank + 1) * heads // size)
    found = dict(sequence.options)
    if sequence.sinks is not None:
        found["sinks"] = sequence.sinks.reshape(-1)[own]
    if "edits" in found:
        found["edits"] = [x for edit in found["edits"] for x in _moved(edit, own, heads)]
    for name in ("mask", "bias"):
        x = found.get(name)
        if x is None:
            continue
        if name in sequence.by_query:
            found[name] = _of_all_queries(x, sequence.layout)
        elif x.ndim > 2 and x.shape[HEADS] != 1:
            found[name] = x[..., own, :, :]
    return found


def _of_all_queries(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A mask or bias of this rank's heads and all queries, of one of its queries."""
    sent = x.view(torch.uint8) if x.dtype == torch.bool else x
    own = x.ndim > 2 and x.shape[HEADS] != 1
    found: torch.Tensor = (
        _ToHeads.apply(sent, layout) if own else of_all_ranks(sent, layout, x.ndim - 2)
    )
    return found.view(torch.bool) if x.dtype == torch.bool else found


def _moved(edit: Edit, own: slice, heads: int) -> list[Edit]:
    """An edit in some of the heads, if it is in any of them."""
    span = edit.heads if isinstance(edit.heads, slice) else slice(None)
    of = range(heads)[span]
    low, high = max(of.start, own.start) - own.start, min(of.stop, own.stop) - own.start
    return [replace(edit, heads=slice(low, high))] if low < high else []


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layout: Layout, known: _Known | None = None
    ) -> torch.Tensor:
        ctx.layout = layout
        return _to_heads(x, layout, known)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _ToTokens.apply(grad, ctx.layout), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layout: Layout, known: _Known | None = None
    ) -> torch.Tensor:
        ctx.layout, ctx.known = layout, known
        return _to_tokens(x, layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        require_one("attention's gradient", grad)
        return _ToHeads.apply(grad, ctx.layout, ctx.known), None, None


def _to_heads(x: torch.Tensor, layout: Layout, known: _Known | None = None) -> torch.Tensor:
    """``(..., H, count, n)`` of each rank becomes ``(..., H / ranks, length, n)``.

    Args:
        known: of a gradient, what must be so on all ranks.
    """
    parts = list(x.chunk(layout.size, HEADS))
    shape = list(parts[0].shape)
    arrived = []
    for count in layout.counts:
        shape[-2] = count
        arrived.append(x.new_empty(shape if known is None else math.prod(shape) + 1))
    if known is None:
        _all_to_all(layout, [part.contiguous() for part in parts], arrived)
    else:
        arrived = _told_to_all(layout, known, parts, arrived)
    shape[-2] = layout.length
    whole = x.new_empty(shape)
    for part, pieces in zip(arrived, layout.pieces):
        for piece in pieces:
            whole[..., piece.span, :] = part[..., piece.local, :]
    return whole


def _told_to_all(
    layout: Layout,
    known: _Known,
    parts: list[torch.Tensor],
    arrived: list[torch.Tensor],
) -> list[torch.Tensor]:
    """``_all_to_all``, where a number after each message tells the call, or 0 of a refusal.

    Args:
        arrived: of one axis, with a place for that number; what comes back has the parts' axes.

    Raises:
        RankError: another rank cannot go on; on that rank it is its own error.
        ValueError: another rank has the gradient of another call.
    """
    error = None
    try:
        require_as_they_were(known.versions)
    except RuntimeError as found:
        error = found
    messages, code = [], 0 if error else 1 + known.number % CODES
    for part in parts:
        message = part.new_empty(part.numel() + 1)
        message[:-1].view(part.shape).copy_(part)
        message[-1] = code
        messages.append(message)
    _all_to_all(layout, messages, arrived)
    if error or {*torch.stack([message[-1] for message in arrived]).tolist()} != {code}:
        told = gradient_told(known.number)
        layout.peers.agree("attention's gradient", told, parts[0].device, error)
    *leading, _, n = parts[0].shape
    return [x[:-1].view(*leading, count, n) for x, count in zip(arrived, layout.counts)]


def _to_tokens(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``(..., H / ranks, length, n)`` of each rank becomes ``(..., H, count, n)``."""
    parts = [layout.tokens(x, -2, rank).contiguous() for rank in range(layout.size)]
    arrived = [torch.empty_like(parts[layout.rank]) for _ in parts]
    _all_to_all(layout, parts, arrived)
    return torch.cat(arrived, HEADS)


def _all_to_all(layout: Layout, parts: list[torch.Tensor], arrived: list[torch.Tensor]) -> None:
    peers = layout.peers
    sends = [(rank, parts[rank]) for rank in peers.others]
    peers.exchange("attention", sends, [(rank, arrived[rank]) for rank in peers.others]).wait()
    arrived[layout.rank] = parts[layout.rank]
