"""Attention of a rank's queries over keys that visit it, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from regard._base.arrays import accumulating_name
from regard._base.errors import UnsupportedError
from regard._base.types import BackendName
from regard._operator.attention import attention as attend
from regard._operator.merging import merge
from regard._operator.part_gradients import AttentionGradients, attention_gradients
from regard._weights.statistics import RowStatistics
from regard.distributed._layout import Piece
from regard.distributed._peers import require_one
from regard.distributed._sequence import Sequence, gradient_told, of_pairs, require_as_they_were
from regard.distributed._visits import visit

# What is computed and merged at a time, so that it takes little memory beside the tokens.
QUERIES = 2048
MERGED = 2**16  # numbers


def ring(
    sequence: Sequence, query: Any, key: Any, value: Any, ahead: int, backend: BackendName
) -> tuple[torch.Tensor, RowStatistics[torch.Tensor]]:
    """Output and statistics of this rank's queries, differentiable."""
    bias = sequence.options.get("bias")
    output, *statistics = _Ring.apply(
        query, key, value, bias, sequence.sinks, sequence, ahead, backend
    )
    return output, RowStatistics(*statistics)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, bias: Any, sinks: Any,
        sequence: Sequence, ahead: int, backend: BackendName,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        exact, maximum, total = _forward(sequence, query, key, value, sinks, ahead, backend)
        output = exact if "output_dtype" in sequence.options else exact.to(query.dtype)
        # The gradient of sinks is a sum over all rows: a narrow output's roundings are too much.
        kept = exact if sinks is not None and sinks.requires_grad else output
        ctx.save_for_backward(query, key, value, bias, sinks, kept, maximum, total)
        ctx.of, ctx.versions = (sequence, ahead, backend), sequence.versions
        ctx.mark_non_differentiable(maximum, total)
        return output, maximum, total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        given = _saved(ctx, grad)
        found = _backward(given, ctx.needs_input_grad, grad, *ctx.of)
        cast = (x if x is None else x.to(like.dtype) for x, like in zip(found, given))
        return *cast, None, None, None


def _saved(ctx: Any, grad: torch.Tensor) -> Any:
    """What the forward pass saved, once all ranks have it as it was."""
    error: Exception | None = None
    try:
        require_one("attention's gradient", grad)
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "distributed.attention: a gradient by the ring has no second one (create_graph=True"
                ' asks for it). method="heads" has, where the ranks can share the heads.'
            )
        require_as_they_were(ctx.versions)
        saved = ctx.saved_tensors
    except Exception as found:
        error = found
    sequence, *_ = ctx.of
    sequence.layout.peers.agree(
        "attention's gradient", gradient_told(sequence.number), grad.device, error
    )
    return saved


def _forward(
    sequence: Sequence,
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    ahead: int,
    backend: BackendName,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, maximum and total of this rank's queries, in the dtype of sums."""
    name, own = accumulating_name(query), sequence.layout.own
    like = query.new_zeros((), dtype=getattr(torch, name))
    output = like.new_zeros((*query.shape[:-1], value.shape[-1]))
    maximum, total = like.new_full(query.shape[:-1], -torch.inf), like.new_zeros(query.shape[:-1])
    fresh = {piece.local.start for piece in own}  # queries of which no row is known yet
    height = max(1, MERGED // max(1, math.prod(output.shape[:-2]) * output.shape[-1]))

    def add(rows: slice, found: Any, is_fresh: bool, sinks: Any = None) -> None:
        if is_fresh:
            output[..., rows, :] = found[0]
            maximum[..., rows], total[..., rows] = found[1]
            return
        for start in range(rows.start, rows.stop, height):
            some = slice(start, min(start + height, rows.stop))
            parts = [(output[..., some, :], RowStatistics(maximum[..., some], total[..., some]))]
            if found is not None:
                own = slice(some.start - rows.start, some.stop - rows.start)
                of_rows = RowStatistics(*(x[..., own] for x in found[1]))
                parts.append((found[0][..., own, :], of_rows))
            merged, statistics = merge(parts, sinks)
            output[..., some, :] = merged
            maximum[..., some], total[..., some] = statistics

    def work(pieces: list[Piece], arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        for piece in own:
            for keys in pieces:
                if (pair := sequence.seen(piece, keys)) is None:
                    continue
                k, v = (x[..., pair[1].local, :] for x in arrays)
                for queries in pair[0].blocks(QUERIES):
                    rows = queries.local
                    options: Any = sequence.part(queries, pair[1]) | {"output_dtype": name}
                    found = attend(
                        query[..., rows, :], k, v, return_statistics=True, backend=backend,
                        **options,
                    )  # fmt: skip
                    add(rows, found, piece.local.start in fresh)
                fresh.discard(piece.local.start)
        return []

    visit(sequence, "attention", (key, value), work, ahead)
    if sinks is not None:
        add(slice(0, sequence.layout.count), None, False, sinks)
    return output, maximum, total


def _backward(
    saved: Any, needed: Any, grad: Any, sequence: Sequence, ahead: int, backend: BackendName
) -> list[Any]:
    """The gradients of query, key, value, bias and sinks; None where there is no need."""
    query, key, value, bias, sinks, output, maximum, total = saved
    own, wide = sequence.layout.own, maximum.dtype
    dq, dbias, dsinks = (
        torch.zeros_like(x, dtype=wide) if needed[n] else None
        for n, x in ((0, query), (3, bias), (4, sinks))
    )

    def work(pieces: list[Piece], arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        k, v = arrays
        sums = [torch.zeros_like(x, dtype=wide) if needed[1 + n] else None
                for n, x in enumerate(arrays)]  # fmt: skip
        for queries in own:
            for piece in pieces:
                if (pair := sequence.seen(queries, piece)) is None:
                    continue
                rows, columns = (part.local for part in pair)
                options = sequence.part(*pair)
                options.pop("output_dtype", None)
                into = [dq if dq is None else dq[..., rows, :]]
                into += [x if x is None else x[..., columns, :] for x in sums]
                into += [dbias if dbias is None else of_pairs(dbias, *pair), None]
                attention_gradients(
                    query[..., rows, :], k[..., columns, :], v[..., columns, :],
                    output[..., rows, :],
                    RowStatistics(maximum[..., rows], total[..., rows]), grad[..., rows, :],
                    into=AttentionGradients(*into), backend=backend, **options,
                )  # fmt: skip
        return [x for x in sums if x is not None]

    found = visit(sequence, "attention's gradient", (key, value), work, ahead)
    dk, dv = (found.pop(0) if needed[n] else None for n in (1, 2))
    if dsinks is not None:  # it is of whole rows, and of no key
        attention_gradients(
            query, key[..., :0, :], value[..., :0, :], output, RowStatistics(maximum, total), grad,
            into=AttentionGradients(None, None, None, None, dsinks), backend=backend, sinks=sinks,
        )  # fmt: skip
    return [dq, dk, dv, dbias, dsinks]
