"""Which tokens of a sequence each rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.autograd.function import once_differentiable

from regard._base.errors import ShapeError, a_type
from regard._base.settings import counted
from regard._weights.parts import int_of
from regard.distributed._peers import Peers, require_one
from regard.distributed._uncompiled import uncompiled

Order = Literal["zigzag", "contiguous", "striped"]


class Piece(NamedTuple):
    """Some tokens: their positions in the sequence, and where they are in an array."""

    positions: range
    local: slice

    @property
    def span(self) -> slice:
        """Its positions, as an index of the whole."""
        return slice(self.positions.start, self.positions.stop, self.positions.step)

    def cut(self, low: int, high: int) -> Piece:
        """Its tokens from ``low`` up to ``high``."""
        start, step = self.local.start, self.local.step or 1
        return Piece(self.positions[low:high], slice(start + low * step, start + high * step, step))

    def blocks(self, height: int) -> Iterator[Piece]:
        """Its tokens, so many at a time."""
        for low in range(0, len(self.positions), height):
            yield self.cut(low, min(low + height, len(self.positions)))

    def among(self, chosen: range) -> Piece:
        """Its tokens whose positions are among these, which rise."""
        low, high = (
            min(len(self.positions), max(0, -((self.positions.start - end) // self.positions.step)))
            for end in (chosen.start, chosen.stop)
        )
        every = chosen.step // math.gcd(chosen.step, self.positions.step)
        runs = range(low, min(high, low + every))
        first = next((n for n in runs if self.positions[n] in chosen), high)
        start = self.local.start
        return Piece(self.positions[first:high:every], slice(start + first, start + high, every))


class Layout:
    """Which tokens of one sequence are on which rank of a group.

    Args:
        length: tokens of the whole sequence, any number; a rank may have none.
        mesh: a ``DeviceMesh`` of one dimension, as ``mesh["cp"]``, or a ``ProcessGroup``; None for
            all processes.
        order: ``"zigzag"``: of 2n pieces rank r has r and 2n − 1 − r, so that causal attention is
            the same work for each; where 2n divides the length it is the order of torch's
            head-tail load balancer. ``"contiguous"``: n pieces. ``"striped"``: every n-th token.

    Attributes:
        length: of the whole sequence.
        order: as given.
        rank, size: of this process in the group, and of the group.
        count: tokens that this rank has.

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not in the group; a
            negative length, another order, or a mesh of several dimensions.
        TypeError: no int, or no mesh or group.

    Source: Brandon et al. 2023 (striped), Zhu 2024 (zigzag).
    """

    def __init__(self, length: int, mesh: Any = None, order: Order = "zigzag") -> None:
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"Layout: length is {a_type(length)}; an int is needed.")
        if length < 0:
            raise ValueError(f"Layout: length is {length}; it must not be negative.")
        if order not in get_args(Order):
            known = ", ".join(map(repr, get_args(Order)))
            raise ValueError(f"Layout: order is {order!r}; one of {known} is needed.")
        self.peers = Peers(mesh)
        self.length, self.order = length, order
        self.rank, self.size = self.peers.rank, self.peers.size
        self.pieces = [_pieces(length, self.size, rank, order) for rank in range(self.size)]
        self.counts = [sum(len(piece.positions) for piece in own) for own in self.pieces]
        self.count = self.counts[self.rank]
        self.seen: dict[Any, Any] = {}  # which keys are visible to whom, by options

    def __repr__(self) -> str:
        return (
            f"Layout({self.length}, order={self.order!r}): rank {self.rank} of {self.size} has"
            f" {counted(self.count, 'token')}"
        )

    @property
    def own(self) -> list[Piece]:
        """The pieces of this rank."""
        return self.pieces[self.rank]

    @property
    def positions(self) -> torch.Tensor:
        """``(count,)`` int64: the positions of this rank's tokens in the sequence."""
        return self._positions(self.rank)

    def _positions(self, rank: int) -> torch.Tensor:
        runs = [
            torch.arange(piece.positions.start, piece.positions.stop, piece.positions.step)
            for piece in self.pieces[rank]
        ]
        return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)

    def holder(self, position: int) -> tuple[int, int]:
        """The rank that has the token at a position, and where it has it."""
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                if position in piece.positions:
                    return rank, piece.local.start + piece.positions.index(position)
        raise IndexError(
            f"there is no position {position} in a sequence of {counted(self.length, 'token')}."
        )

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens of a whole: ``length`` along ``dim`` becomes ``count``.

        Raises:
            ShapeError: x is not as long as the sequence.
            TypeError: x is no tensor.
        """
        self._check("shard", x, dim, self.length)
        return _taken(x, dim, self.own)

    def tokens(self, x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """The tokens of one rank, of a whole that is not checked."""
        return _taken(x, dim, self.pieces[rank])

    @uncompiled
    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole of every rank's tokens: ``count`` along ``dim`` becomes ``length``.

        Collective: every rank calls it and gets the same. It is differentiable: the gradient is
        that of the sum of all ranks' losses.

        Raises:
            ShapeError: x has another number of tokens than this rank.
            TypeError: x is no tensor.
            ValueError: shapes or dtypes differ between ranks.
            RankError: another rank refused the call, died or did not answer.
        """
        error: Exception | None = None
        fields, device = {}, torch.device("cpu")
        try:
            self._check("gather", x, dim, self.count)
            dim, device = dim % x.ndim, x.device
            shape = (*x.shape[:dim], self.length, *x.shape[dim + 1 :])
            fields = {"layout": self.told, "dim": str(dim), "dtype": str(x.dtype)}
            fields |= {"shape": str(shape)}
            fields["requires_grad"] = str(torch.is_grad_enabled() and x.requires_grad)
        except Exception as found:
            error = found
        self.peers.agree("Layout.gather", fields, device, error)
        return of_all_ranks(x, self, dim)

    @property
    def told(self) -> str:
        return f"{counted(self.length, 'token')}, {self.order}"

    def _check(self, name: str, x: Any, dim: int, count: int) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"Layout.{name}: x is {a_type(x)}; a tensor is needed.")
        if not -x.ndim <= int_of(f"Layout.{name}: dim", dim) < x.ndim:
            axes = counted(x.ndim, "axis", "axes")
            raise ShapeError(f"Layout.{name}: dim is {dim}, and x has {axes}.")
        if x.shape[dim] != count:
            raise ShapeError(
                f"Layout.{name}: x {tuple(x.shape)} has {counted(x.shape[dim], 'token')} along axis"
                f" {dim}; {count} {'is' if count == 1 else 'are'} needed: rank {self.rank} of"
                f" {self.size} has {self.count} of {counted(self.length, 'token')}."
            )


def _pieces(length: int, size: int, rank: int, order: Order) -> list[Piece]:
    if order == "striped":
        runs = [range(rank, length, size)]
    else:
        parts = 2 * size if order == "zigzag" else size
        own = (rank, parts - 1 - rank) if order == "zigzag" else (rank,)
        runs = [range(n * length // parts, (n + 1) * length // parts) for n in own]
        if len(runs) > 1 and runs[0].stop == runs[1].start:
            runs = [range(runs[0].start, runs[1].stop)]
    found, start = [], 0
    for run in runs:
        if len(run):
            found.append(Piece(run, slice(start, start := start + len(run))))
    return found


def _taken(x: torch.Tensor, dim: int, pieces: list[Piece]) -> torch.Tensor:
    before = (slice(None),) * (dim % x.ndim)
    parts = [x[(*before, piece.span)] for piece in pieces]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x[(*before, slice(0, 0))]


def of_all_ranks(x: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
    """``Layout.gather`` of what was checked; dim is not negative."""
    found: torch.Tensor = _Gather.apply(x, layout, dim)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
        ctx.layout, ctx.dim = layout, dim
        shape = list(x.shape)
        parts = []
        for count in layout.counts:
            shape[dim] = count
            parts.append(x.new_empty(shape))
        parts[layout.rank] = x.resolve_conj().contiguous()
        others = layout.peers.others
        sends = [(rank, parts[layout.rank]) for rank in others]
        got = [(rank, parts[rank]) for rank in others]
        layout.peers.exchange("Layout.gather", sends, got).wait()
        shape[dim] = layout.length
        whole, before = x.new_empty(shape), (slice(None),) * dim
        for part, pieces in zip(parts, layout.pieces):
            for piece in pieces:
                whole[(*before, piece.span)] = part[(*before, piece.local)]
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, dim = ctx.layout, ctx.dim
        require_one("Layout.gather", grad)
        others = layout.peers.others
        grad = grad.resolve_conj()
        own = _taken(grad, dim, layout.own).contiguous()
        sends = [(rank, _taken(grad, dim, layout.pieces[rank]).contiguous()) for rank in others]
        got = {rank: torch.empty_like(own) for rank in others}
        layout.peers.exchange("Layout.gather", sends, list(got.items())).wait()
        got[layout.rank] = own
        total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
        for rank in range(layout.size):
            total += got[rank]
        return total.to(grad.dtype), None, None
