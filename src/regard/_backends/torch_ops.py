"""The three custom operators of attention in torch, and when torch's own operator serves.

Inside an operator tensors are real, so a rule may depend on their values; outside they may be
traced. Source: Dao et al. 2022 for what the fused operator does.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import register_flop_formula

from regard._backends import formula, torch_gradients
from regard._backends.torch_gradients import INPUTS
from regard._base.arrays import arrays_of
from regard._base.errors import UnsupportedError
from regard._base.torch_state import (
    exact,
    is_exported_to_onnx,
    is_recorded,
    is_rounded,
    scaled_dot_product_attention,
)
from regard._call.call import Call
from regard._call.contents import check_contents
from regard._call.options import ARRAYS, NUMBERS

_LIBRARY = torch.library.Library("regard", "FRAGMENT")
register_fake = functools.partial(torch.library.register_fake, lib=_LIBRARY)
OPERATORS: dict[str, Callable[..., Any]] = {}  # what computes each, by its name
_TENSORS = tuple(field.name for field in ARRAYS)
_FUSED = {"scale", "causal", "mask", "bias", "key_lengths"}  # its options
_FUSED_ON_DEVICES = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
_NO_KERNEL = "No available kernel", "No viable backend"  # as torch's fused operator has it
_NUMBERS = tuple(field.name for field in NUMBERS)
CALL_SCHEMA = ", ".join(f"{field.type} {field.name}" for field in (*ARRAYS, *NUMBERS))
_NO_FORWARD_MODE = (
    "attention: there is no forward-mode derivative (jvp, jacfwd, hessian); use backward mode, "
    "as in torch.autograd.grad, and jacrev(jacrev(f)) for a hessian."
)


def pack(call: Call) -> list[Any]:
    """The call as an operator takes it."""
    return [getattr(call, name) for name in _TENSORS + _NUMBERS]


def unpack(*values: Any) -> Call:
    """The call of an operator's inputs."""
    return Call(leading=values[0].shape[:1], heads=True, **dict(zip(_TENSORS + _NUMBERS, values)))


def may_fuse(call: Call) -> bool:
    """Whether torch's fused operator means the same as the call and needs only linear memory."""
    Lq, Lk = call.query.shape[2], call.key.shape[2]
    if 0 in call.query.shape or 0 in call.key.shape or call.value.shape[3] != call.query.shape[3]:
        return False
    if call.scale <= 0:
        return False  # it masks by adding -inf before it scales
    if min(Lq, Lk) < 16 and call.query.device.type == "cpu":
        return False  # one side is short: its error is up to 2.9x the plain formula's
    if call.given - _FUSED:
        return False
    given = [x for x in (call.mask, call.bias, call.key_lengths) if x is not None]
    if call.causal and Lq > 1:
        return Lq == Lk and not given
    if call.bias is not None and (call.bias.dtype != call.query.dtype or call.bias.requires_grad):
        return False
    return not given or (len(given) == 1 and (given[0].ndim == 1 or given[0].shape[-1] == Lk))


def hides(call: Call) -> bool:
    """Whether a call that ``may_fuse`` masks keys."""
    masks = call.mask is not None or call.key_lengths is not None
    return bool(masks or (call.causal and call.query.shape[2] > 1))


def _fuses_exactly(call: Call, *, differentiates: bool = False) -> Tensor | None:
    """``(B,)``: where the fused operator, and its gradient where wanted, gives our result.

    None: everywhere, whatever the numbers are, which are not read then. It adds −inf to masked
    scores, which lets NaN or an overflow through: so key and value must be finite, and no product
    of any query and key may overflow. Its gradient recomputes the weights from the log-sum-exp:
    where a rounding of the largest product is not small, they may be anything, even inf. Reads each
    once.
    """
    if not (hides(call) or differentiates):
        return None
    dtype = torch_gradients.accumulating(call.query.dtype)
    q, k, v = (
        torch.linalg.vector_norm(x.detach(), torch.inf, dim=(1, 2, 3), dtype=dtype)
        for x in (call.query, call.key, call.value)
    )
    # What overflows here is inf or, times 0, NaN: neither is below the bound.
    bound = q * k * (abs(call.scale) * call.query.shape[3])
    largest = torch.finfo(torch.float32).max / 4
    if differentiates:
        largest = min(largest, 0.01 / torch.finfo(dtype).eps)
    return (bound < largest) & v.isfinite()


def fused(call: Call) -> Tensor | None:
    """The fused operator's output; None where this device has none for these tensors."""
    B, Hq, Hkv, Lq, Lk = call.sizes
    q, k, v = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (call.query, call.key, call.value)
    )
    mask, seen = call.mask, None
    if call.key_lengths is not None:
        lengths = call.key_lengths.to(q.device)
        mask = torch.arange(Lk, device=q.device) < lengths[:, None, None, None]
    if mask is not None:
        seen = mask.any(-1, keepdim=True)
    elif call.bias is not None:
        mask, seen = call.bias, (call.bias != -torch.inf).any(-1, keepdim=True)
    operator = functools.partial(
        scaled_dot_product_attention,
        q, k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1), mask,
        is_causal=call.causal and Lq > 1, scale=call.scale, enable_gqa=Hq != Hkv,
    )  # fmt: skip
    with exact(q.device.type):
        if q.device.type == "cpu":
            out = operator()
        else:
            try:
                with warnings.catch_warnings(), sdpa_kernel(_FUSED_ON_DEVICES):
                    warnings.simplefilter("ignore")  # torch warns of each kernel that it rules out
                    out = operator()
            except RuntimeError as error:  # a full memory and a fault of the device are such too
                if not str(error).startswith(_NO_KERNEL):
                    raise
                return None
    return out if seen is None else torch.where(seen, out, 0.0)


def _is_eager(call: Call) -> bool:
    """Whether tensors may be read here: nothing records, maps, fakes or counts them."""
    if is_recorded() or torch._C._len_torch_dispatch_stack():
        return False
    tensors = (call.query, call.key, call.value)
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    return plain and call.query.device.type != "meta"


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """An operator without a forward-mode rule would give derivatives of zero in silence."""
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError(_NO_FORWARD_MODE)


def attention(call: Call) -> Tensor:
    """``(B, Hq, Lq, Dv)`` in the dtype of the query; differentiable twice."""
    inputs = (call.query, call.key, call.value, call.bias, call.sinks)
    refuse_forward_mode(*inputs)
    if is_recorded() and is_exported_to_onnx():
        from regard._backends import onnx  # what it needs takes torch long to load

        return onnx.attention(call)
    if _is_eager(call) and may_fuse(call):
        check_contents(call)
        differentiates = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in inputs
        )
        exactly = _fuses_exactly(call, differentiates=differentiates)
        if (exactly is None or exactly.all()) and (out := fused(call)) is not None:
            return _Fused.apply(out, *pack(call)) if out.requires_grad else out
    return _attend(*pack(call))


def names_of(needed: int) -> tuple[str, ...]:
    """The inputs whose gradients are needed, of the bits in which operators are told them."""
    return tuple(name for bit, name in enumerate(INPUTS) if needed >> bit & 1)


def needed_of(ctx: Any) -> int:
    """The bits of the inputs whose gradients autograd needs."""
    wanted = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(_TENSORS + _NUMBERS) :]
    return sum(wanted[_TENSORS.index(name)] << bit for bit, name in enumerate(INPUTS))


def _hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch's compiler does not look into; it is not loaded for that."""
    hide = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def call(*values: Any) -> Any:
        return (hide() if "torch._dynamo" in sys.modules else function)(*values)

    return call


def make_operator(
    name: str, inputs: str, outputs: str, products: tuple[int, int]
) -> Callable[..., Any]:
    """Makes an operator of torch of a function.

    ``torch.library.custom_op`` would load torch's compiler at the first call: two seconds.

    ``products`` are for torch's counter of operations: how many matrix products with D and with Dv
    numbers to a query and key it takes. Like torch's own attention it counts every pair, seen or
    not. An operator looks into its tensors, which no CUDA graph can hold: torch.compile cuts them
    there.
    """
    schema = f"({inputs}) -> {outputs}"

    def count(*inputs: Any, **_: Any) -> int:
        (B, Hq, Lq, D), (_, _, Lk, _), (*_, Dv) = inputs[-len(_TENSORS + _NUMBERS) :][:3]
        return 2 * B * Hq * Lq * Lk * (products[0] * D + products[1] * Dv)

    def make(function: Callable[..., Any]) -> Any:
        tags = torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag
        _LIBRARY.define(f"{name}{schema}", tags=tags)
        OPERATORS[name] = function
        _LIBRARY.impl(name, _hidden(function), "CompositeExplicitAutograd")
        packet = getattr(torch.ops.regard, name)
        register_flop_formula(packet)(count)
        return packet.default

    return make


def _by_blocks(call: Call) -> Tensor:
    out: Tensor = formula.attention(arrays_of(call.query), call)
    return out


@make_operator("attention", CALL_SCHEMA, "Tensor", products=(1, 1))
def _forward(*values: Any) -> Tensor:
    call = unpack(*values)
    check_contents(call)
    if not may_fuse(call):
        return _by_blocks(call)
    exactly = _fuses_exactly(call)
    if exactly is None or exactly.all():
        out = fused(call)
        return _by_blocks(call) if out is None else out.contiguous()
    # Each batch element is computed as it would be alone.
    q, k, v = (_select(exactly, x) for x in (call.query, call.key, call.value))
    out, exact = (
        fused(call.changed(query=q, key=k, value=v)),
        _by_blocks(call),
    )
    mixed = exact if out is None else torch.where(exactly[:, None, None, None], out, exact)
    return mixed.contiguous()


def _select(chosen: Tensor, x: Tensor) -> Tensor:
    """x with zeros in the batch elements that are not chosen; an axis of size 1 stays."""
    chosen = chosen if len(x) > 1 else chosen.any(0, keepdim=True)
    return torch.where(chosen[:, None, None, None], x, 0.0)


@register_fake(_forward)
def _(*values: Any) -> Tensor:
    call = unpack(*values)
    shape = (*call.query.shape[:3], call.value.shape[3])
    return call.query.new_empty(shape, dtype=getattr(torch, call.output_name))


@make_operator(
    "attention_backward",
    f"int needed, Tensor grad, {CALL_SCHEMA}",
    "({})".format(", ".join(5 * ["Tensor"])),
    products=(3, 2),
)
def _backward(needed: int, grad: Tensor, *values: Any) -> tuple[Tensor, ...]:
    return as_told(grad, torch_gradients.gradients(unpack(*values), grad, names_of(needed)))


@register_fake(_backward)
def _(needed: int, grad: Tensor, *values: Any) -> tuple[Tensor, ...]:
    return empty_gradients(unpack(*values), names_of(needed))


def as_told(grad: Tensor, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Gradients in memory as torch's compiler is told of them, for which none is empty."""
    return tuple(grad.new_empty(0) if x is None else x.contiguous() for x in found)


def empty_gradients(call: Call, needed: Collection[str] = INPUTS) -> tuple[Tensor, ...]:
    """Like the gradients of query, key, value, bias and sinks; empty for those left out."""
    inputs = (getattr(call, name) if name in needed else None for name in INPUTS)
    return tuple(
        call.query.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs
    )


@make_operator(
    "attention_double_backward",
    "Tensor query_dot, Tensor key_dot, Tensor value_dot, Tensor bias_dot, Tensor sinks_dot, "
    f"Tensor grad, {CALL_SCHEMA}",
    "({})".format(", ".join(6 * ["Tensor"])),
    products=(7, 5),
)
def _double_backward(
    query_dot: Tensor, key_dot: Tensor, value_dot: Tensor, bias_dot: Tensor, sinks_dot: Tensor,
    grad: Tensor, *values: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = unpack(*values)
    cotangents = (
        query_dot, key_dot, value_dot,
        None if call.bias is None else bias_dot,
        None if call.sinks is None else sinks_dot,
    )  # fmt: skip
    return as_told(grad, torch_gradients.second_gradients(call, grad, cotangents))


@register_fake(_double_backward)
def _(
    query_dot: Tensor, key_dot: Tensor, value_dot: Tensor, bias_dot: Tensor, sinks_dot: Tensor,
    grad: Tensor, *values: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dgrad = torch.empty_like(grad, memory_format=torch.contiguous_format)
    return dgrad, *empty_gradients(unpack(*values))


def tensors_of(inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors that an operator was called with, and the numbers behind them."""
    return inputs[: -len(_NUMBERS)], inputs[-len(_NUMBERS) :]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps the inputs of an operator: tensors, and then the numbers of the call."""
    tensors, ctx.numbers = tensors_of(inputs)
    ctx.save_for_backward(*tensors)


def by_input(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias and sinks in the order of an operator's inputs.

    None for those that need none, which may hold nothing.
    """
    needed = names_of(needed_of(ctx))
    found: dict[str, Tensor | None] = dict.fromkeys(_TENSORS + _NUMBERS)
    return tuple((found | {n: x for n, x in zip(INPUTS, gradients) if n in needed}).values())


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    refuse_forward_mode(grad, *saved)
    return by_input(ctx, *attend_backward(needed_of(ctx), grad, *saved, *ctx.numbers))


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.needed, *rest = inputs
    _save(ctx, tuple(rest), output)


def _differentiate_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    grad, *tensors = ctx.saved_tensors
    return None, *differentiate_twice(ctx, grad, tensors, cotangents)


def differentiate_twice(
    ctx: Any, grad: Tensor, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of grad and the inputs, of those of the gradients that were needed."""
    refuse_forward_mode(*cotangents, grad, *tensors)
    needed = names_of(ctx.needed)
    given = dict(zip(_TENSORS, tensors))
    dots = (
        torch.zeros_like(given[name]) if given[name] is not None and name not in needed else x
        for name, x in zip(INPUTS, cotangents)
    )
    dgrad, *rest = attend_double_backward(*dots, grad, *tensors, *ctx.numbers)
    return dgrad, *by_input(ctx, *rest)


def _refuse_third(ctx: Any, *_: Tensor) -> None:
    raise UnsupportedError(
        "attention: there are first and second derivatives and no third. Detach the second ones, "
        "or write the formula in torch's own operations, which store the whole matrix."
    )


class _Fused(torch.autograd.Function):
    """The fused operator's output as it is; torch can differentiate that once and not twice.

    Its gradient is torch's own, or that of ``regard::attention`` where the gradient itself is to be
    differentiated, where torch would round its products, or where NaN would reach masked keys.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Any) -> Tensor:
        _save(ctx, inputs, out)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or (
            grad.is_cpu and (is_rounded("cpu") or not grad.sum().isfinite())
        ):
            return None, *_differentiate(ctx, grad)
        return grad, *[None] * len(_TENSORS + _NUMBERS)


def _fold(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Any, ...]) -> list[Any]:
    """Moves the mapped axis of every tensor into its batch axis, so that one call serves all."""
    n, folded = info.batch_size, []
    B = tensors[0].shape[1 if in_dims[0] == 0 else 0]
    for (_, _, axes), x, axis in zip(ARRAYS, tensors, in_dims):
        shared = axis is None and axes[:1] == "b" and x is not None and x.shape[0] == 1
        if x is None or shared or axes[:1].upper() != "B":
            folded.append(x)
        else:
            x = x.expand(n, *x.shape) if axis is None else x.movedim(axis, 0)
            folded.append(x.expand(n, B, *x.shape[2:]).reshape(n * B, *x.shape[2:]))
    return folded


def map_as_one(
    apply: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *values: Any
) -> tuple[Any, Any]:
    """The batching rule of attention: one call for all, where they can be one batch."""
    # A batch shares its sinks, and its seed drops different weights in each element.
    if in_dims[_TENSORS.index("sinks")] is not None or values[_TENSORS.index("seed")] is not None:
        return map_one_by_one(apply, info, in_dims, *values)
    tensors = _fold(info, in_dims, values[: len(_TENSORS)])
    out = apply(*tensors, *values[len(_TENSORS) :])

    def unfold(x: Tensor) -> Tensor:
        return x.reshape(info.batch_size, len(x) // info.batch_size, *x.shape[1:])

    if isinstance(out, Tensor):
        return unfold(out), 0
    return tuple(map(unfold, out)), (0,) * len(out)


def map_one_by_one(
    apply: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *values: Any
) -> tuple[Any, Any]:
    """The batching rule of gradients: one batch would sum those of arrays that it shares."""
    results = [
        apply(*(x if axis is None else x.select(axis, n) for x, axis in zip(values, in_dims)))
        for n in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results)), (0,) * len(results[0])


def differentiable(
    operator: Any,
    backward: Callable[..., Any],
    rule: Callable[..., tuple[Any, Any]],
    save: Callable[..., None] = _save,
) -> Callable[..., Any]:
    """Gives an operator its gradient and its batching rule; returns what calls it.

    ``torch.func.grad`` refuses what ``torch.library`` makes of these: an ``autograd.Function``
    without ``setup_context``. So inside of torch.func's transforms the operator is called by one
    that has it, and that torch.compile takes as it is.
    """

    class Function(torch.autograd.Function):
        setup_context = staticmethod(save)

        @staticmethod
        def forward(*values: Any) -> Any:
            found = operator(*values)
            return tuple(found) if isinstance(found, list) else found

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise UnsupportedError(_NO_FORWARD_MODE)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *values: Any) -> tuple[Any, Any]:
            return rule(Function.apply, info, in_dims, *values)

    def allow(_: Any) -> None:
        torch.compiler.allow_in_graph(Function)

    def apply(*values: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return operator(*values)
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime  # torch loads it when it compiles

            comptime(allow)
        return Function.apply(*values)

    torch.library.register_autograd(operator, backward, setup_context=save, lib=_LIBRARY)
    torch.library.register_vmap(operator, functools.partial(rule, operator), lib=_LIBRARY)
    return apply


_attend = differentiable(_forward, _differentiate, map_as_one)
attend_backward = differentiable(_backward, _differentiate_twice, map_one_by_one, _save_gradient)
attend_double_backward = differentiable(_double_backward, _refuse_third, map_one_by_one)


def without_second(backward: Any) -> Callable[..., Any]:
    """What calls the backward operator of what is asked of weights: it has no gradient."""
    return differentiable(backward, refuse_second, map_one_by_one, _save_nothing)


def without_gradient(operator: Any) -> Any:
    """An operator that is asked for where no gradient is needed."""

    def refuse(ctx: Any, *_: Any) -> None:
        raise UnsupportedError(f"{operator} has no gradient.")

    torch.library.register_autograd(operator, refuse, setup_context=_save_nothing, lib=_LIBRARY)
    return operator


def refuse_second(ctx: Any, *_: Any) -> None:
    raise UnsupportedError(
        "weights: reductions have a first derivative and no second. Write what is to be "
        "differentiated twice with weights @ x, or in torch's own operations."
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...
