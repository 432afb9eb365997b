"""DTensors: sharded by batch or heads their local parts are computed, anything else is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from regard._base.errors import UnsupportedError, a_type

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
    if not any(map(_is_one, arrays.values())):
        return arrays, lambda x: x
    from torch.distributed.tensor import DTensor  # 0.6 s: whoever has one has loaded it

    query = arrays["query"]
    for name, x in arrays.items():
        alike = _is_one(query) and _is_one(x)
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
    if placement.is_replicate():
        return
    query, is_shard = arrays["query"], type(placement).__name__ == "Shard"
    axis = placement.dim % query.ndim if is_shard else query.ndim
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
    return f"a DTensor of {x.placements}" if _is_one(x) else a_type(x)


def _is_one(x: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
