"""Keys that visit a rank: each other rank's, fetched while those before are in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import torch

from regard.distributed._layout import Piece
from regard.distributed._peers import Pending
from regard.distributed._sequence import Sequence

# Called with the keys' pieces, where they are in the arrays, and the arrays.
Work = Callable[[list[Piece], list[torch.Tensor]], list[torch.Tensor]]
TOKENS = -2  # the axis of the tokens
LARGE = 2**20  # bytes of a head's tokens from which on they are sent without a copy


def visit(
    sequence: Sequence,
    what: str,
    tensors: Several[torch.Tensor],
    work: Work,
    ahead: int = 1,
    how: str = "sum",
) -> list[torch.Tensor]:
    """Works with the keys of this rank, then with those of the ranks before it, one by one.

    Only what some query sees is sent. Messages are posted before the work that they hide behind.

    Args:
        tensors: what each key has: ``(..., count, n)``.
        work: may give sums for the keys, ``(..., keys, n)``; those of other ranks are sent to them.
        ahead: of how many ranks keys are fetched in advance: 1 needs two buffers.
        how: whether these are added, or the "max" of them is taken.

    Returns:
        The sums of all ranks' work for the keys of this rank.
    """
    layout = sequence.layout
    _me, size = layout.rank, layout.size
    back: list[Any] = []
    steps = deque(range(1, size))
    coming: deque[Any] = deque()
    while steps and len(coming) < ahead:
        coming.append(_fetch(sequence, what, tensors, steps.popleft()))
    returned = work(layout.own, list(tensors))
    for step in range(1, size):
        pieces, arrived, pending = coming.popleft()
        pending.wait()
        if steps:
            coming.append(_fetch(sequence, what, tensors, steps.popleft()))
        results = work(pieces, arrived)
        del arrived, pending
        if returned:
            _settle(back, returned, how)
            back.append(_give_back(sequence, what, step, results, returned))
        del results
    _settle(back, returned, how)
    return returned


def _fetch(sequence: Sequence, what: str, tensors: Any, step: int) -> Any:
    """Starts to send to the rank ``step`` behind this one, and to receive from the one before."""
    layout = sequence.layout
    target, source = ((layout.rank + n) % layout.size for n in (step, -step))
    asked = sequence.needed(target, layout.rank)
    sends = [(target, message) for x in tensors for message in _messages(x, asked)]
    pieces = side_by_side(sequence.needed(layout.rank, source))
    arrived = [_empty(x, pieces) for x in tensors]
    receives = [(source, x) for whole in arrived for x in _places(whole, pieces)]
    pending = layout.peers.exchange(what, sends, receives)
    return pieces, arrived, pending


def _give_back(
    sequence: Sequence, what: str, step: int, results: Any, returned: Any
) -> tuple[list[Piece], list[torch.Tensor], Pending]:
    layout = sequence.layout
    target, source = ((layout.rank + n) % layout.size for n in (step, -step))
    pieces = sequence.needed(target, layout.rank)
    arrived = [_empty(x, pieces) for x in returned]
    sends = [(source, x.contiguous()) for x in results]
    pending = layout.peers.exchange(what, sends, [(target, x) for x in arrived])
    return pieces, arrived, pending


def _settle(back: list[Any], returned: Any, how: str) -> None:
    """Adds what came back to the sums."""
    while back:
        pieces, arrived, pending = back.pop()
        pending.wait()
        for sums, x in zip(returned, arrived):
            for at, piece in zip(side_by_side(pieces), pieces):
                own, more = sums[..., piece.local, :], x[..., at.local, :]
                torch.maximum(own, more, out=own) if how == "max" else own.add_(more)


def _messages(x: torch.Tensor, pieces: list[Piece]) -> list[torch.Tensor]:
    """Some tokens, contiguous: large runs as they are, small ones in one copy."""
    if not _are_large(x, pieces):
        return [taken(x, pieces)]
    return [run.contiguous() for run in _runs(x, pieces)]


def _places(x: torch.Tensor, pieces: list[Piece]) -> list[torch.Tensor]:
    """Where these messages go in a new tensor."""
    return _runs(x, pieces) if _are_large(x, pieces) else [x]


def _are_large(x: torch.Tensor, pieces: list[Piece]) -> bool:
    least = min((len(piece.positions) for piece in pieces), default=0)
    return least * x.shape[-1] * x.element_size() >= LARGE


def _runs(x: torch.Tensor, pieces: list[Piece]) -> list[torch.Tensor]:
    """``(tokens, n)`` of each head and piece."""
    heads = [x[at] for at in np.ndindex(*x.shape[:TOKENS])]
    return [head[piece.local] for head in heads for piece in pieces]


def taken(x: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
    """Some tokens, contiguous; the tensor itself where they are all of it."""
    count = sum(len(piece.positions) for piece in pieces)
    if count == x.shape[TOKENS]:
        return x.contiguous()
    if not pieces:
        return x[..., :0, :]
    return torch.cat([x[..., piece.local, :] for piece in pieces], TOKENS)


def side_by_side(pieces: list[Piece]) -> list[Piece]:
    """The pieces, where they are in an array of them alone."""
    found, start = [], 0
    for piece in pieces:
        stop = start + len(piece.positions)
        found.append(Piece(piece.positions, slice(start, stop)))
        start = stop
    return found


def _empty(x: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
    shape = list(x.shape)
    shape[TOKENS] = sum(len(piece.positions) for piece in pieces)
    return x.new_empty(shape)
