"""The compiled kernels as custom operators of torch: traceable, with a gradient.

Second derivatives are those of the torch backend's operators.
"""

from typing import Any

import torch
from torch import Tensor

from regard import _kernel, _torch
from regard._checks import Call, accumulating_name
from regard._torch_ops import (
    BIAS,
    CALL_SCHEMA,
    attend_backward,
    by_input,
    make_operator,
    pack,
    refuse_forward_mode,
    tensors_of,
    unpack,
)


@make_operator("kernel_attention", CALL_SCHEMA, "(Tensor, Tensor, Tensor)")
def _forward(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _kernel.forward(unpack(*values))


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.new_empty(query.shape[:3], dtype=getattr(torch, accumulating_name(query)))
    return query.new_empty((*query.shape[:3], value.shape[3])), rows, torch.empty_like(rows)


@make_operator(
    "kernel_attention_backward",
    f"bool bias_needed, Tensor grad, Tensor out, Tensor maximum, Tensor total, {CALL_SCHEMA}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    bias_needed: bool, grad: Tensor, out: Tensor, maximum: Tensor, total: Tensor, *values: Any
) -> tuple[Tensor, ...]:
    call = unpack(*values)
    # What is hidden and not finite must not spread: the other backend sees to that.
    if all(_is_finite(x) for x in (call.query, call.key, call.value, grad)):
        found = _kernel.gradients(call, grad, out, maximum, total, bias_needed)
    else:
        found = _torch.gradients(call, grad)
    inputs = (call.query, call.key, call.value, call.bias, call.sinks)
    return tuple(
        grad.new_empty(0) if x is None or like is None else x.to(like.dtype)
        for x, like in zip(found, inputs)
    )


def _is_finite(x: Tensor) -> bool:
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


@_backward.register_fake
def _(bias_needed: bool, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    call = unpack(*rest[3:])
    bias = call.bias if bias_needed else None
    return tuple(
        grad.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (call.query, call.key, call.value, bias, call.sinks)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.numbers = tensors_of(inputs)
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    out, maximum, total, *tensors = ctx.saved_tensors
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    refuse_forward_mode(grad, *tensors)
    if torch.is_grad_enabled():  # a graph of the gradient is asked for
        return by_input(ctx, *attend_backward(grad, *tensors, *ctx.numbers))
    return by_input(
        ctx,
        *_backward(ctx.needs_input_grad[BIAS], grad, out, maximum, total, *tensors, *ctx.numbers),
    )


_forward.register_autograd(_differentiate, setup_context=_save)


def forward(call: Call, statistics: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As ``_kernel.forward``, differentiable and traceable."""
    differentiable = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad
        for x in (call.query, call.key, call.value, call.bias, call.sinks)
    )
    if differentiable or torch.compiler.is_compiling():
        return _forward(*pack(call))
    return _kernel.forward(call, statistics)
