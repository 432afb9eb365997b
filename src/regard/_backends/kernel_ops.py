"""The compiled kernels as custom operators of torch: traceable, with a gradient.

Second derivatives are those of the torch backend's operators.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._backends import kernel, torch_gradients
from regard._backends.kernel_calls import are_finite
from regard._backends.kernel_plans import NOTHING, Plan
from regard._backends.torch_gradients import INPUTS
from regard._backends.torch_ops import (
    CALL_SCHEMA,
    as_told,
    by_input,
    differentiable,
    differentiate_twice,
    empty_gradients,
    make_operator,
    map_as_one,
    map_one_by_one,
    names_of,
    needed_of,
    pack,
    refuse_forward_mode,
    register_fake,
    tensors_of,
    unpack,
)
from regard._base.arrays import accumulating_name
from regard._base.torch_state import is_real, is_watched
from regard._call.call import Call


@make_operator("kernel_attention", CALL_SCHEMA, "(Tensor, Tensor, Tensor)", products=(1, 1))
def _forward(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    return kernel.forward(unpack(*values))


@register_fake(_forward)
def _(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = unpack(*values)
    query, value = call.query, call.value
    rows = query.new_empty(query.shape[:3], dtype=getattr(torch, accumulating_name(query)))
    out = kernel.new_output(query, value.shape[3], call.output_dtype)
    return out, rows, torch.empty_like(rows)


@make_operator(
    "kernel_attention_backward",
    f"int needed, Tensor grad, Tensor out, Tensor maximum, Tensor total, {CALL_SCHEMA}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    products=(3, 2),
)
def _backward(
    needed: int, grad: Tensor, out: Tensor, maximum: Tensor, total: Tensor, *values: Any
) -> tuple[Tensor, ...]:
    return as_told(grad, _gradients(needed, grad, out, maximum, total, *values))


def _gradients(
    needed: int, grad: Tensor, out: Tensor, maximum: Tensor, total: Tensor, *values: Any
) -> list[Tensor | None]:
    """Of query, key, value, bias and sinks in their dtypes; None for those that are not needed."""
    call, names = unpack(*values), names_of(needed)
    # Masked values that are not finite must not spread: the torch backend takes care of that.
    if are_finite(call.query, call.key, call.value, grad):
        found: tuple[Any, ...] = kernel.gradients(call, grad, out, maximum, total, names)
    else:
        found = torch_gradients.gradients(call, grad, names)
    return [None if x is None else x.to(getattr(call, n).dtype) for n, x in zip(INPUTS, found)]


@register_fake(_backward)
def _(needed: int, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return empty_gradients(unpack(*rest[3:]), names_of(needed))


def with_statistics(forward: Any, backward: Any, rule: Any) -> tuple[Any, Any]:
    """What calls an operator that gives output, maximum and total, and what its gradient does.

    It is differentiable twice.

    Args:
        backward: the operator that gives the gradients of query, key, value, bias and sinks, of
            ``(needed, grad, output, maximum, total, *call)``.
        rule: of batching the forward.
    """

    attend_backward = differentiable(backward, _differentiate_twice, map_one_by_one, _save_gradient)
    differentiate = functools.partial(_differentiate, attend_backward)
    return differentiable(forward, differentiate, rule, _save), attend_backward


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.numbers = tensors_of(inputs)
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(
    backward: Callable[..., Any], ctx: Any, grad: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    out, maximum, total, *tensors = ctx.saved_tensors
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    refuse_forward_mode(grad, *tensors)
    saved = grad, out, maximum, total, *tensors, *ctx.numbers
    return by_input(ctx, *backward(needed_of(ctx), *saved))


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needed, grad, _, _, _, *call = inputs
    tensors, ctx.numbers = tensors_of(tuple(call))
    ctx.save_for_backward(grad, *tensors)


def _differentiate_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    """Treats output, maximum and total as functions of the other inputs."""
    grad, *tensors = ctx.saved_tensors
    dgrad, *rest = differentiate_twice(ctx, grad, tensors, cotangents)
    return None, dgrad, None, None, None, *rest


_attend, _attend_backward = with_statistics(_forward, _backward, map_as_one)


class _Unwatched(torch.autograd.Function):
    """The same where nothing watches the operators: dispatch takes as long as a small call."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = kernel.forward(unpack(*values))
        _save(ctx, values, found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return _differentiate(_gradients if _is_own(grad) else _attend_backward, ctx, grad)


def _is_own(grad: Tensor | None) -> bool:
    """Whether nothing watches or differentiates a gradient, so that no operator need compute it."""
    return not (torch.is_grad_enabled() or is_watched()) and (grad is None or is_real(grad))


class _Planned(torch.autograd.Function):
    """The same for a call that has a plan: reading it takes as long as a small one."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: Plan, given: Any, statistics: Any
    ) -> Any:
        out = plan.output(query, value, given, NOTHING, statistics)
        ctx.plan = plan
        # As ``_save``: what a checkpoint computes again may have got its plan in the meantime.
        ctx.save_for_backward(out, *statistics, query, key, value)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needs)
        out, maximum, total, *arrays = ctx.saved_tensors
        refuse_forward_mode(grad, *arrays)
        is_own, saved = _is_own(grad), (grad, out, maximum, total)
        found = ctx.plan.gradients(arrays, needs, *saved) if is_own else None
        if found is None:
            gradients = _gradients if is_own else _attend_backward
            needed = sum(need << bit for bit, need in enumerate(needs[:3]))
            found = gradients(needed, *saved, *pack(ctx.plan.call_of(*arrays)))
        return *(x if need else None for x, need in zip(found, needs[:3])), None, None, None


# As ``Plan.output``, differentiable: of query, key, value, the plan, what is given and the
# statistics that it fills.
planned = _Planned.apply


def forward(call: Call, statistics: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As ``kernel.forward``, differentiable and traceable."""
    differentiates = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad
        for x in (call.query, call.key, call.value, call.bias, call.sinks)
    )
    if is_watched():
        return _attend(*pack(call))
    return _Unwatched.apply(*pack(call)) if differentiates else kernel.forward(call, statistics)
