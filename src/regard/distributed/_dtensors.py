"""DTensors: sharded by batch or heads their local parts are computed, anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from regard._base.errors import UnsupportedError

_BY_BATCH = "mask", "bias", "key_lengths", "segments", "intervals", "dropout"
_BY_HEAD = "mask", "bias", "sinks", "edits", "dropout"


def to_local(
    arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[torch.Tensor], Any]]:
    """Plain tensors of this rank, and what makes the output what the query was.

    Raises:
        TypeError: some are DTensors and others not, or they are laid out differently.
        UnsupportedError: they are sharded by anything but batch and heads, or options are given
            that would have to be cut as they are.
    """
    if not any(isinstance(x, DTensor) for x in arrays.values()):
        return arrays, lambda x: x
    query = arrays["query"]
    for name, x in arrays.items():
        alike = isinstance(query, DTensor) and isinstance(x, DTensor)
        if not alike or (x.device_mesh, x.placements) != (query.device_mesh, query.placements):
            raise TypeError(
                f"distributed.attention: query is {_told(query)} and {name} {_told(x)}; all three"
                " need to be DTensors of one mesh and placement, or plain tensors."
            )
    for dim, placement in enumerate(query.placements):
        _check(arrays, options, placement, query.device_mesh.size(dim))
    mesh, placements = query.device_mesh, query.placements
    local = {name: x.to_local() for name, x in arrays.items()}
    return local, lambda x: DTensor.from_local(x, mesh, placements, run_check=False)


def _check(arrays: dict[str, Any], options: dict[str, Any], placement: Any, size: int) -> None:
    if isinstance(placement, Replicate):
        return
    query = arrays["query"]
    axis = placement.dim % query.ndim if type(placement) is Shard else query.ndim
    if axis > query.ndim - 3:
        raise UnsupportedError(
            f"distributed.attention: query is a DTensor with the placement {placement}; it can be"
            " sharded by batch or heads. Tokens are where the layout has them: pass plain tensors,"
            " of layout.shard(x, dim=-2)."
        )
    of_heads = axis == query.ndim - 3
    uneven = [name for name, x in arrays.items() if x.shape[axis] % size]
    if uneven:
        raise UnsupportedError(
            f"distributed.attention: {uneven[0]} {tuple(arrays[uneven[0]].shape)} is sharded along"
            f" axis {axis} over {size} ranks, which does not divide."
        )
    for name in _BY_HEAD if of_heads else _BY_BATCH:
        if options.get(name) is not None and not (name == "dropout" and not options[name]):
            raise UnsupportedError(
                f"distributed.attention: {name} is given, and the DTensors are sharded by"
                f" {'heads' if of_heads else 'batch'}; pass x.to_local() and the part of {name}"
                " that belongs to it."
            )


def _told(x: Any) -> str:
    return f"a DTensor of {x.placements}" if isinstance(x, DTensor) else f"a {type(x).__name__}"
