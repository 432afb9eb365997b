"""What the layers are called with, checked before torch's own functions see it."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from regard._base.arrays import dtype_name
from regard._base.autocast import is_autocast
from regard._base.cache import KeyValueCache
from regard._base.errors import UnsupportedError, a_type
from regard._call.hints import unknown_option

OF_LAYER = dict.fromkeys(
    ("causal", "is_causal"), "It is the layer's own: give causal=True where the layer is made."
)


def check_counts(layer: str, **counts: object) -> None:
    """Raises a TypeError for what is no integer, nor None."""
    for name, x in counts.items():
        if x is not None and (isinstance(x, bool) or not isinstance(x, numbers.Integral)):
            raise TypeError(f"{layer}: {name} is {x!r}, {a_type(x)}; an int is needed.")


def check_names(layer: str, more: tuple[Any, ...], unknown: Any, known: Iterable[str]) -> None:
    """Refuses what a layer does not take: tensors after the context, and options by other names.

    Raises:
        TypeError: with the way out.
    """
    if more:
        raise TypeError(
            f"{layer}: {2 + len(more)} arguments are given in order, and there are x and context."
            " It projects query, key and value itself: call layer(x), or layer(x, context) where"
            " keys and values are of another sequence."
        )
    if unknown:
        raise unknown_option(layer, unknown, known, OF_LAYER)


def check_tensor(layer: str, name: str, x: Any, weight: Any) -> None:
    """Refuses what cannot be multiplied with a weight.

    Args:
        weight: a parameter; whatever stands in its place, as where it is quantized, takes any
            dtype.

    Raises:
        TypeError: no tensor, or one of another dtype.
        UnsupportedError: a nested tensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{layer}: {name} is {a_type(x, whole=True)}; a torch tensor is needed, as in"
            f" torch.as_tensor({name}).float()."
        )
    if x.is_nested:
        raise UnsupportedError(
            f"{layer}: {name} is a nested tensor; dense tensors are needed. Pad it,"
            f" {name}.to_padded_tensor(0.0), and hide the padding by key_lengths=."
        )
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return
    if x.dtype != weight.dtype and not is_autocast(x.device.type):
        raise TypeError(
            f"{layer}: {name} is {dtype_name(x)} and the parameters are {dtype_name(weight)}; one"
            f" dtype is needed: {name}.to(torch.{dtype_name(weight)}), or layer.to({name}.dtype)."
        )


def check_cache(cache: Any) -> None:
    """Raises a TypeError for what is no cache."""
    if not isinstance(cache, KeyValueCache):
        raise TypeError(
            f"MultiHeadAttention: cache is {a_type(cache)}; that of this layer is needed:"
            " layer.new_cache()."
        )


def check_own(cache: KeyValueCache, layer: Module) -> None:
    """Raises a ValueError for a cache that another layer has filled."""
    filled_by = None if cache._layer is None else cache._layer()
    if filled_by is not None and filled_by is not layer:
        raise ValueError(
            "MultiHeadAttention: the cache holds the tokens of another layer. Each layer needs"
            " a cache of its own: layer.new_cache()."
        )
