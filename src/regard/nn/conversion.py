"""Layers of other libraries read as ``MultiHeadAttention``: arguments, state dict and mode."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from regard._base.errors import ShapeError, UnsupportedError, a_type

# How the names of a projection's parameters begin, parametrized ones included.
OF_LINEAR = ("weight", "bias", "parametrizations.")
# The projections of query, key and value of torch's module, which may have one matrix or three.
IN_ONE = ("in_proj_weight",)
APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
Reading = tuple[dict[str, Any], dict[str, Tensor], bool]


def from_torch(module: nn.MultiheadAttention) -> Reading:
    """Reads ``torch.nn.MultiheadAttention``, whose parameters have the same names and layout."""
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(
            f"MultiHeadAttention.from_torch: got {a_type(module)}; "
            "a torch.nn.MultiheadAttention is needed."
        )
    if module.bias_k is not None or module.add_zero_attn:
        option = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
        raise UnsupportedError(
            f"MultiHeadAttention.from_torch: the module was made with {option}=True, which appends "
            "a key that is no token to every sequence; its weights would belong to nothing. "
            "Only modules without it can be moved over."
        )
    options = {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "kdim": module.kdim,
        "vdim": module.vdim,
        "bias": module.in_proj_bias is not None,
        "dropout": module.dropout,
    }
    names = _names(module)
    _require_own(module, names)
    state: dict[str, Any] = {
        name: functools.reduce(getattr, name.split("."), module) for name in names
    }
    return options, copied(state), module.training


def _names(module: nn.Module) -> list[str]:
    """Those of the state dict; what is parametrized has the name that the module computes with."""
    found: dict[str, None] = {}
    for name in module.state_dict():
        owner, _, parametrized = name.partition("parametrizations.")
        found[owner + parametrized.partition(".")[0] if parametrized else name] = None
    return [*found]


def _require_own(module: nn.MultiheadAttention, names: list[str]) -> None:
    """Raises an UnsupportedError unless the tensors are those of torch's own module."""
    same = module.embed_dim == module.kdim == module.vdim
    needed = {"out_proj.weight", *(IN_ONE if same else APART)}
    if module.in_proj_bias is not None:
        needed |= {"in_proj_bias", "out_proj.bias"}
    others, missing = [name for name in names if name not in needed], needed.difference(names)
    if others or missing:
        found = f"has {', '.join(others)}, which torch.nn.MultiheadAttention has not"
        if not others:
            found = f"has no {' and no '.join(sorted(missing))}"
        raise UnsupportedError(
            f"MultiHeadAttention.from_torch: {a_type(module, whole=True)} {found}, and a layer of"
            " the rest would compute other numbers. Move the module over before it is prepared for"
            " quantization, or take off what was added to it, as by prune.remove,"
            " remove_weight_norm, or merge_and_unload of peft."
        )


def from_gpt2(c_attn: nn.Module, c_proj: nn.Module, num_heads: int) -> Reading:
    """Reads the fused projection and the output's projection of GPT-2's attention."""
    in_weight, in_bias = _read_linear("c_attn", c_attn)
    out_weight, out_bias = _read_linear("c_proj", c_proj)
    embed_dim = in_weight.shape[1]
    for name, weight, needed in (
        ("c_attn", in_weight, (3 * embed_dim, embed_dim)),
        ("c_proj", out_weight, (embed_dim, embed_dim)),
    ):
        if tuple(weight.shape) != needed:
            kind = "(out, in), as torch.nn.Linear has it"
            if not isinstance(c_attn if name == "c_attn" else c_proj, nn.Linear):
                kind = "(in, out), as GPT-2's Conv1D has it: only a torch.nn.Linear is (out, in)"
                weight, needed = weight.mT, (needed[1], needed[0])
            raise ShapeError(
                f"MultiHeadAttention.from_gpt2: the weight of {name} has shape "
                f"{tuple(weight.shape)}, read as {kind}; {needed} is needed."
            )
    state = {"in_proj_weight": in_weight, "out_proj.weight": out_weight}
    biased = in_bias is not None or out_bias is not None
    if biased:  # one of them may have none, which equals a bias of 0
        state["in_proj_bias"] = in_weight.new_zeros(3 * embed_dim) if in_bias is None else in_bias
        state["out_proj.bias"] = out_weight.new_zeros(embed_dim) if out_bias is None else out_bias
    options = {"embed_dim": embed_dim, "num_heads": num_heads, "bias": biased}
    return options, copied(state), c_attn.training


def _read_linear(name: str, module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight ``(out, in)`` and bias."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    check_alone("MultiHeadAttention.from_gpt2", name, module)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise TypeError(
            f"MultiHeadAttention.from_gpt2: {name} is {a_type(module)} without a matrix "
            "named weight; a torch.nn.Linear or GPT-2's Conv1D is needed."
        )
    return (weight if isinstance(module, nn.Linear) else weight.mT), bias


def check_alone(what: str, name: str, projection: Any) -> None:
    """Raises an UnsupportedError for a projection with parameters beside its weight and bias."""
    names = (
        [n for n, _ in projection.named_parameters()] if isinstance(projection, nn.Module) else []
    )
    if others := [n for n in names if not n.startswith(OF_LINEAR)]:
        raise UnsupportedError(
            f"{what}: {name} has {', '.join(others)} beside its weight and bias, and the layer "
            "would compute without them. Merge an adapter into the weight first, as by "
            "merge_and_unload() of peft."
        )


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share nothing with the tensors and have no gradient yet."""
    return {
        name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()
    }
