"""Tensors that are no dense arrays of numbers: which they are, and what to pass in their place."""

from typing import Any

from regard._base import loaded
from regard._base.errors import UnsupportedError


def require_dense(name: str, x: Any, function: str = "attention") -> None:
    """Refuses a tensor that does not hold every number at its place.

    Raises:
        UnsupportedError: it is nested, or of a layout other than strided.
    """
    if x.is_nested:
        raise UnsupportedError(
            f"{function}: {name} is a nested tensor, of layout {x.layout}; dense tensors are "
            f"needed. Pad it, {name}.to_padded_tensor(0.0), and hide the padding by key_lengths=; "
            f"or attend to each of {name}.unbind()."
        )
    if x.layout is not loaded.torch.strided:
        raise UnsupportedError(
            f"{function}: {name} is a tensor of layout {x.layout}; dense tensors are needed. "
            f"Convert it, as in {name}.to_dense()."
        )


def is_causal_bias(x: Any) -> bool:
    """Whether x is a mask of ``torch.nn.attention.bias``: a tensor whose numbers are not set."""
    torch = loaded.torch
    if torch is None or type(x) is torch.Tensor:
        return False
    bias = getattr(torch.nn.attention, "bias", None)  # where something has loaded it
    return bias is not None and isinstance(x, bias.CausalBias)


def refuse_causal_bias(name: str, x: Any) -> None:
    """Refuses a tensor whose numbers are not set.

    Raises:
        TypeError: with the way out.
    """
    if is_causal_bias(x):
        raise TypeError(
            f"attention: {name} is a CausalBias of torch, which holds no numbers. Pass causal=True "
            "in its place, which is causal_lower_right; with query_start=0 it is "
            "causal_upper_left."
        )
