"""Attention over a sequence whose tokens are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, Unpack, get_args, overload

import torch

from regard._base.errors import UnsupportedError
from regard._base.types import BackendName
from regard._call.checks import read_flag
from regard._call.options import Options
from regard._operator import watching
from regard.distributed import _heads, _sequence
from regard.distributed._dtensors import to_local
from regard.distributed._heads import of_heads
from regard.distributed._layout import Layout
from regard.distributed._ring import ring
from regard.distributed._uncompiled import uncompiled
from regard.distributed._weights import DistributedWeights

Method = Literal["ring", "gather", "heads"]


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    layout: Layout,
    method: Method = "ring",
    return_weights: Literal[False] = False,
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> torch.Tensor: ...
@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    layout: Layout,
    method: Method = "ring",
    return_weights: Literal[True],
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> tuple[torch.Tensor, DistributedWeights]: ...
@uncompiled
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    layout: Layout,
    method: Method = "ring",
    return_weights: bool = False,
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> torch.Tensor | tuple[torch.Tensor, DistributedWeights]:
    """Attention of every token of a sequence to all of it, of tokens that are on several ranks.

    It gives what ``regard.attention(..., query_start=0)`` gives of the whole sequence, to the last
    roundings: output, gradients and weights. Collective: every rank of the layout calls it with its
    own tokens and the same options, and calls ``backward`` too. Gradients are those of the sum of
    all ranks' losses; those of ``sinks`` and ``bias`` are what this rank's queries contribute.

    Args:
        query: ``(..., Hq, count, D)``: the tokens that this rank has by the layout. DTensors may be
            sharded by batch or heads, all three alike; the output is one then.
        key: ``(..., Hkv, count, D)``, likewise.
        value: ``(..., Hkv, count, Dv)``.
        layout: which tokens of the sequence each rank has.
        method: ``"ring"``: keys come rank by rank while those before are in use, in two buffers;
            ``"gather"``: all are fetched first. Only keys that a rank's queries see are sent.
            ``"heads"``: ranks exchange their tokens of all heads for all tokens of some heads, and
            back; the ranks divide the heads, and there is no dropout. A mask or bias of queries is
            exchanged too, whole where it is of all heads.
        return_weights: give ``(output, weights)``, the ``DistributedWeights``.
        backend: as in ``regard.attention``.
        options: as in ``regard.attention``, and of the whole sequence: windows in tokens,
            ``segments`` and ``intervals`` ``(B, length)``, lengths and the places of edits in
            positions. The rows of ``mask`` and ``bias`` are this rank's queries, their columns all
            keys: ``(..., count or 1, length or 1)``. Without a seed, dropout has rank 0's.

    Returns:
        ``(..., Hq, count, Dv)``, as ``regard.attention``.

    Raises:
        ShapeError, TypeError, ValueError, UnsupportedError: as ``regard.attention``; tokens that
            are not those of the layout.
        ValueError: the ranks disagree; on every rank, with what each has.
        RankError: another rank refused the call, died or did not answer within the group's timeout.

    Source: Liu et al. 2023 (ring attention), Brandon et al. 2023, Milakov & Gimelshein 2018.
    """
    given = {"query": query, "key": key, "value": value}
    flag = "return_weights", return_weights
    sequence, (q, k, v), restore = _agreed(layout, method, given, dict(options), backend, flag)
    if method == "heads":
        output, statistics = of_heads(sequence, q, k, v, backend)
    else:
        ahead = 1 if method == "ring" else layout.size
        output, statistics = ring(sequence, q, k, v, ahead, backend)
    output = restore(output)
    if not return_weights:
        return output
    return output, DistributedWeights(sequence, q, k, statistics, backend)


def _agreed(
    layout: Layout,
    method: str,
    given: dict[str, Any],
    options: dict[str, Any],
    backend: str,
    flag: tuple[str, Any],
) -> tuple[_sequence.Sequence, Iterable[torch.Tensor], Callable[[torch.Tensor], Any]]:
    """Options, plain tensors and what the output is made from them by, once all ranks agree.

    An error on one rank is an error on all.
    """
    error, fields, seed, rows = None, {}, 0, 0
    try:
        read_flag(*flag, "distributed.attention")
        if watching.watchers:
            raise UnsupportedError(
                "distributed.attention: regard.record or regard.watch looks on, and would take the"
                " parts that a rank computes for whole sequences. Leave its block, and ask the"
                " weights of return_weights=True."
            )
        if method not in get_args(Method):
            known = ", ".join(map(repr, get_args(Method)))
            raise ValueError(
                f"distributed.attention: method is {method!r}; one of {known} is needed."
            )
        arrays, restore = to_local(given, options)
        q, k, v = arrays.values()
        sequence = _sequence.read(layout, q, k, v, options, backend)
        if method == "heads":
            _heads.check(sequence, q, k)
        fields, rows = _sequence.told(sequence, method, arrays), _sequence.rows_told(sequence)
        seed = int(sequence.options.get("seed", 0))
        if sequence.options.get("dropout") and "seed" not in sequence.options:
            seed = int(torch.randint(2**62, ()))
    except Exception as found:
        if not isinstance(layout, Layout):
            raise
        error = found
    device = getattr(given["query"], "device", torch.device("cpu"))
    agreed, *every = layout.peers.agree("attention", fields, device, error, (seed, rows))
    if "seed" not in sequence.options and sequence.options.get("dropout"):
        sequence.options["seed"] = agreed[0]
    by_query = _sequence.rows_agreed([of_rank[1] for of_rank in (agreed, *every)])
    sequence = replace(sequence, by_query=by_query, number=layout.peers.next_call())
    return sequence, arrays.values(), restore
