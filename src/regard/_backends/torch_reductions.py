"""Reductions of the weights as operators of torch: traceable, with a gradient.

Every one that is a sum has its gradient in one more pass over the weights. With ``dw`` the gradient
of the weights it is ``ds = w · (dw − Σ w·dw)``, attention's own. The kernels' backward computes it
where ``dw`` is a rule of query and key that it knows, or a product of vectors of each, which it
takes for gradient and value; all else goes block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._backends import kernel, torch_gradients
from regard._backends.formula import WeightBlock
from regard._backends.torch_gradients import INPUTS
from regard._backends.torch_ops import (
    CALL_SCHEMA,
    as_told,
    by_input,
    differentiable,
    empty_gradients,
    make_operator,
    map_one_by_one,
    names_of,
    needed_of,
    pack,
    refuse_second,
    register_fake,
    tensors_of,
    unpack,
    without_second,
)
from regard._base.arrays import accumulating_name, to_numpy
from regard._base.torch_arrays import dtype_on
from regard._base.torch_state import product
from regard._call.call import Call

# The reductions that have a gradient, by their field.
FIELDS = ("lse", "entropy", "distance", "received", "product", "transposed", "blocks", "diagonals",
          "weights")  # fmt: skip
FEW_COLUMNS = 8  # of vectors whose products are a rule of the kernels
_ASKED = "str field, Tensor? x, Tensor? ids, Tensor? more_ids, int[] numbers"
# How it is computed: of which rows of which call, by what, from which row statistics, if any.
_HOW = "str backend, Tensor? maximum, Tensor? total, int group_rows"
_SCHEMA = f"{_ASKED}, {_HOW}, {CALL_SCHEMA}"


def _on_the_cpu(x: Any) -> Tensor:
    """A copy of an array of NumPy, whatever the default device is."""
    return torch.tensor(x, device="cpu")


class Asked(NamedTuple):
    """One reduction, as the operator takes it."""

    field: str
    x: Tensor | None = None  # that the weights are multiplied with
    ids: Tensor | None = None  # int64
    more_ids: Tensor | None = None
    numbers: Sequence[int] = ()

    @classmethod
    def of(cls, field: str, fields: dict[str, Any]) -> Asked:
        """From the fields of a backend's ``reduce``."""
        if field in ("product", "transposed"):
            return cls(field, fields[f"{field}_with"])
        if field == "blocks":
            ids, more = (_on_the_cpu(fields[f"{name}_blocks"]) for name in ("query", "key"))
            return cls(field, None, ids, more, fields["block_counts"])
        if field == "diagonals":
            numbers = fields["distance_step"], fields["distances"]
            return cls(field, None, _on_the_cpu(fields["first_distances"]), None, numbers)
        return cls(field)

    def fields(self, out: Tensor) -> dict[str, Any]:
        """For a backend's ``reduce``."""
        found: dict[str, Any] = {self.field: out}
        if self.x is not None:
            B, Hq, L, columns = self.x.shape
            strides = L * columns * Hq * (B > 1), L * columns * (Hq > 1)
            found |= {f"{self.field}_with": self.x, f"{self.field}_strides": strides}
            found[f"{self.field}_columns"] = columns
        if self.field == "blocks":
            assert self.ids is not None
            assert self.more_ids is not None
            found |= {"query_blocks": self.ids.numpy(), "key_blocks": self.more_ids.numpy()}
            found["block_counts"] = tuple(self.numbers)
        if self.field == "diagonals":
            assert self.ids is not None
            step, count = self.numbers
            found |= {"first_distances": self.ids.numpy(), "distance_step": step}
            found["distances"] = count
        return found

    def empty(self, call: Call) -> Tensor:
        """An array for the result."""
        (B, Hq, Lq, _), Lk = call.query.shape, call.key.shape[2]
        columns = () if self.x is None else self.x.shape[3:]
        rest: dict[str, Any] = {
            "received": (Lk,), "product": (Lq, *columns), "transposed": (Lk, *columns),
            "blocks": tuple(self.numbers), "diagonals": tuple(self.numbers[1:]),
            "weights": (Lq, Lk),
        }  # fmt: skip
        wide = self.field in ("product", "weights")
        name = accumulating_name(call.query) if wide else "float64"
        dtype = dtype_on(call.query.device, name)
        return call.query.new_zeros((B, Hq, *rest.get(self.field, (Lq,))), dtype=dtype)


def reduce(
    asked: Asked, call: Call, backend: str, statistics: tuple[Any, Any] | None = None
) -> Tensor:
    """One reduction, differentiable in query, key, bias, sinks and x, and traceable."""
    maximum, total = statistics or (None, None)
    how = backend, maximum, total, call.group_rows
    starts = call.query_start
    if starts is not None and not isinstance(starts, Tensor):
        starts = _on_the_cpu(starts)
    plain = call.changed(value=call.key[..., :0].detach(), query_start=starts)
    found: Tensor = _ask(*asked, *how, *pack(plain))
    return found


def _computed(asked: Asked, call: Call, backend: str, statistics: Any) -> Tensor:
    from regard._backends import by_name  # which imports those who import this

    own, out = by_name(backend), asked.empty(call)
    call = call.changed(value=None)
    if out.numel() and call.key.shape[2]:
        if statistics[0] is None and own.reads_statistics:
            statistics = own.row_statistics(call)
        maximum, total = (None if x is None else to_numpy(x) for x in statistics)
        own.reduce(call, None if maximum is None else (maximum, total), asked.fields(out))
    elif asked.field == "lse":
        out.fill_(-torch.inf)
    return out


N_ASKED, N_OWN = len(Asked._fields), len(Asked._fields) + _HOW.count(",") + 1


def _read(inputs: tuple[Any, ...]) -> tuple[Asked, Call, str, tuple[Any, Any]]:
    """What an operator was called with: the reduction, the call, backend and row statistics."""
    backend, maximum, total, rows = inputs[N_ASKED:N_OWN]
    call = unpack(*inputs[N_OWN:]).changed(part_of=rows)
    return Asked(*inputs[:N_ASKED]), call, backend, (maximum, total)


@make_operator("reduce_weights", _SCHEMA, "Tensor", products=(1, 0))
def _reduce(*inputs: Any) -> Tensor:
    return _computed(*_read(inputs))


@register_fake(_reduce)
def _(*inputs: Any) -> Tensor:
    asked, call, _, _ = _read(inputs)
    return asked.empty(call)


@make_operator(
    "reduce_weights_backward",
    f"int needed, Tensor grad, Tensor out, {_SCHEMA}",
    "({})".format(", ".join(6 * ["Tensor"])),
    products=(3, 0),
)
def _reduce_backward(needed: int, grad: Tensor, out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    asked, call, backend, statistics = _read(inputs)
    names, dx = names_of(needed), None
    if out.numel() and call.key.shape[2]:
        found = Gradient(asked, call, grad, out, backend, statistics).of(names)
    else:
        found = tuple(torch.zeros_like(getattr(call, n)) if n in names else None for n in INPUTS)
    if needed >> len(INPUTS) & 1:
        dx = _gradient_of_operand(asked, call, grad, backend, statistics)
    return as_told(grad, (*found, dx))


@register_fake(_reduce_backward)
def _(needed: int, grad: Tensor, out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    asked, call, *_ = _read(inputs)
    dx = grad.new_empty(0)
    if needed >> len(INPUTS) & 1 and asked.x is not None:
        dx = torch.empty_like(asked.x, memory_format=torch.contiguous_format)
    return *empty_gradients(call, names_of(needed)), dx


def _gradient_of_operand(
    asked: Asked, call: Call, grad: Tensor, backend: str, statistics: Any
) -> Tensor:
    """That of x: of ``W @ x`` it is ``Wᵀ @ grad``, and the other way round."""
    assert asked.x is not None
    other = "transposed" if asked.field == "product" else "product"
    own = grad.to(asked.x.dtype).contiguous()
    found = _computed(Asked(other, own), call, backend, statistics)
    axes = [axis for axis in (0, 1) if asked.x.shape[axis] < found.shape[axis]]
    return (found.sum(axes, keepdim=True) if axes else found).to(asked.x.dtype)


class Gradient:
    """The gradient of query, key, bias and sinks for that of one reduction.

    Args:
        grad, out: ``(B, Hq, ...)``: of the result, and the result.
        statistics: of the rows; of None, None are computed where they are needed.
    """

    def __init__(
        self, asked: Asked, call: Call, grad: Tensor, out: Tensor, backend: str, statistics: Any
    ) -> None:
        self._asked, self._call = asked, call.changed(value=None)
        self._dtype = getattr(torch, accumulating_name(call.query))
        self._grad, self._out = grad.to(self._dtype), out
        self._backend, self._statistics = backend, statistics

    def of(self, needed: tuple[str, ...]) -> tuple[Tensor | None, ...]:
        """Those needed, in the order of ``INPUTS``."""
        needed = tuple(name for name in needed if name != "value")
        if not needed:
            return (None,) * len(INPUTS)
        if self._backend == "kernel" and (rule := self._rule()) is not None:
            return self._by_rule(*rule, needed)
        vectors = {"product": self._of_product, "transposed": self._of_transposed}
        if make := vectors.get(self._asked.field):
            return self._of_vectors(*make(), needed)
        blocks = getattr(self, f"_{self._asked.field}_of_block")
        delta = -self._grad if self._asked.field == "lse" else None
        return torch_gradients.weights_gradients(self._call, blocks, delta, needed)

    # ``dw`` as a rule of the kernels, and ``Σ w·dw`` where it is known.

    def _rule(self) -> tuple[dict[str, Any], Tensor | None] | None:
        rules = {
            "lse": self._rule_of_lse, "entropy": self._rule_of_entropy,
            "distance": self._rule_of_distance, "received": self._rule_of_received,
            "diagonals": self._rule_of_table, "blocks": self._rule_of_table,
            "product": self._rule_of_vectors, "transposed": self._rule_of_vectors,
        }  # fmt: skip
        if not (make := rules.get(self._asked.field)):
            return None
        if (found := make()) is None:
            return None
        given = (self._call.query, self._call.key, self._grad, self._asked.x, found[1])
        finite = all(x is None or x.sum().isfinite() or x.isfinite().all() for x in given)
        return found if finite else None

    def _rule_of_lse(self) -> tuple[dict[str, Any], Tensor]:
        return {"rule": "nothing"}, -self._grad

    def _rule_of_entropy(self) -> tuple[dict[str, Any], Tensor]:
        """``dw = −c · (ln w + 1)``."""
        call, c = self._call, self._grad
        delta = c * (self._out.to(self._dtype) - 1)
        if call.sinks is not None:  # the weights sum to less than 1
            lse = _computed(Asked("lse"), call, self._backend, self._statistics).to(self._dtype)
            of_sink = torch.exp(call.sinks.to(self._dtype)[:, None] - lse)
            delta = delta + c * of_sink.masked_fill(lse == -torch.inf, 0.0)
        return {"rule": "logarithms", "numbers": -c}, delta

    def _rule_of_distance(self) -> tuple[dict[str, Any], Tensor]:
        delta = self._grad * self._out.to(self._dtype)
        return {"rule": "distances", "numbers": self._grad}, delta

    def _rule_of_vectors(self) -> tuple[dict[str, Any], Tensor | None] | None:
        """Of few columns: more are quicker as gradient and value of attention."""
        x, grad, delta = self._asked.x, self._grad, None
        assert x is not None
        B, Hq, L, columns = x.shape
        if columns > FEW_COLUMNS:
            return None
        if self._asked.field == "product":
            numbers, other, delta = grad, x, (grad * self._out).sum(-1)
        else:
            numbers, other = x.expand(*self._call.query.shape[:2], -1, -1), grad
            B, Hq, L, _ = grad.shape
        strides = L * columns * Hq * (B > 1), L * columns * (Hq > 1)
        rule = {"rule": "vectors", "numbers": numbers, "other": other, "columns": columns}
        return rule | {"other_strides": strides}, delta

    def _rule_of_received(self) -> tuple[dict[str, Any], None]:
        """All queries are one block, and each key is one."""
        counts = 1, self._call.key.shape[2]
        return {"rule": "blocks", "numbers": self._grad, "block_counts": counts}, None

    def _rule_of_table(self) -> tuple[dict[str, Any], None]:
        """Of diagonals or blocks."""
        fields = self._asked.fields(self._grad)
        return {"rule": self._asked.field, "numbers": fields.pop(self._asked.field), **fields}, None

    # ``dw = a · b`` for vectors a of each query and b of each key, and ``Σ w·dw``.

    def _of_product(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self._asked.x is not None
        return self._grad, self._asked.x, (self._grad * self._out).sum(-1)

    def _of_transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self._asked.x is not None
        y = self._asked.x.expand(*self._call.query.shape[:2], -1, -1)
        return y, self._grad, (y * self._multiplied(self._grad)).sum(-1)

    def _multiplied(self, b: Tensor) -> Tensor:
        """``W @ b``."""
        asked = Asked("product", b.contiguous())
        return _computed(asked, self._call, self._backend, self._statistics).to(self._dtype)

    # ``dw`` of a block.

    def _lse_of_block(self, block: WeightBlock) -> Tensor:
        return torch.zeros_like(block.weights)

    def _distance_of_block(self, block: WeightBlock) -> Tensor:
        of_queries, of_keys = block.positions
        apart = abs(of_queries[:, None] - of_keys)
        return self._grad[block.index][..., None] * apart

    def _entropy_of_block(self, block: WeightBlock) -> Tensor:
        c = self._grad[block.index][..., None]
        logs = block.log_weights
        return torch.where(logs == -torch.inf, 0.0, -c * (logs + 1))

    def _received_of_block(self, block: WeightBlock) -> Tensor:
        return self._grad[(*block.index[:2], block.keys)][:, :, None]

    def _weights_of_block(self, block: WeightBlock) -> Tensor:
        return self._grad[(*block.index, block.keys)]

    def _blocks_of_block(self, block: WeightBlock) -> Tensor:
        queries, keys = self._asked.ids, self._asked.more_ids
        assert queries is not None
        assert keys is not None
        found = []
        for b in range(block.b.start, block.b.stop):
            i, j = (x.to(self._grad.device) for x in (queries[b, block.rows], keys[b, block.keys]))
            own = self._grad[b, block.h].index_select(1, i.clamp(min=0))
            own = own.index_select(2, j.clamp(min=0))
            found.append(own.masked_fill((i[:, None] < 0) | (j < 0), 0.0))
        return torch.stack(found)

    def _diagonals_of_block(self, block: WeightBlock) -> Tensor:
        of_queries, of_keys = block.positions
        assert self._asked.ids is not None
        first, (step, count) = self._asked.ids[block.b.start], self._asked.numbers
        at = (of_queries[:, None] - of_keys - int(first)).div(step, rounding_mode="floor").long()
        inside = (at >= 0) & (at < count)
        grad = self._grad[block.b, block.h]
        return grad[..., at.clamp(0, max(count - 1, 0))].masked_fill(~inside, 0.0)

    # By the kernels.

    def _by_rule(
        self, rule: dict[str, Any], delta: Tensor | None, needed: tuple[str, ...]
    ) -> tuple[Tensor | None, ...]:
        call = self._call.without_value()
        rule = {n: x.contiguous() if isinstance(x, Tensor) else x for n, x in rule.items()}
        delta = None if delta is None else delta.contiguous()
        maximum, total = self._statistics
        if maximum is None:
            maximum, total = kernel.forward(call)[1:]
        found = kernel.rule_gradients(call, rule, delta, maximum, total, needed)
        given = (call.query, call.key, None, call.bias, call.sinks)
        return tuple(None if x is None else x.to(y.dtype) for x, y in zip(found, given))

    def _of_vectors(
        self, a: Tensor, b: Tensor, delta: Tensor, needed: tuple[str, ...]
    ) -> tuple[Tensor | None, ...]:
        """By attention's backward, with a as the output's gradient and b as the values."""
        call = self._call
        fits = a.shape[-1] < kernel.LARGEST_HEAD and self._backend == "kernel"
        if not fits or not all(x.isfinite().all() for x in (call.query, call.key, a, b, delta)):

            def of_block(block: WeightBlock) -> Tensor:
                kv = b[block.b if len(b) > 1 else slice(None)]
                group = call.query.shape[1] // b.shape[1]
                kv = kv.repeat_interleave(group, 1)[:, block.h, block.keys]
                return product(a[block.index], kv.transpose(-1, -2))

            return torch_gradients.weights_gradients(call, of_block, delta, needed)
        return self._by_kernel(a, b, delta, needed)

    def _by_kernel(
        self, a: Tensor, b: Tensor, delta: Tensor, needed: tuple[str, ...]
    ) -> tuple[Tensor | None, ...]:
        call, shared = self._call, self._call.key.shape[1]
        spread = b.shape[1] not in (1, shared)  # each query head has values of its own
        keys = call.key.repeat_interleave(b.shape[1] // shared, 1) if spread else call.key
        b = b.expand(-1, keys.shape[1], -1, -1)
        narrow = call.query.dtype != self._dtype
        query, keys = (x.to(self._dtype) for x in (call.query, keys))
        # Its sum Σ w·dw is that of gradient and output: in a column of its own, where values are 0.
        value = torch.cat([b, torch.zeros_like(b[..., :1])], -1)
        grad = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        out = torch.cat([torch.zeros_like(a), delta[..., None]], -1)
        own = call.changed(query=query, key=keys, value=value)
        maximum, total = self._statistics
        if maximum is None or narrow:
            maximum, total = kernel.forward(own.changed(value=None))[1:]
        found = kernel.gradients(own, grad, out, maximum, total, needed)
        dq, dk, _, dbias, dsinks = found
        if dk is not None and spread:
            dk = dk.unflatten(1, (shared, -1)).sum(2)
        given = (call.query, call.key, None, call.bias, call.sinks)
        return tuple(
            None if x is None else x.to(like.dtype)
            for x, like in zip((dq, dk, None, dbias, dsinks), given)
        )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.numbers = tensors_of(inputs[N_OWN:])
    own = inputs[:N_OWN]
    ctx.own = tuple(None if isinstance(x, Tensor) else x for x in own)
    ctx.save_for_backward(output, *(x if isinstance(x, Tensor) else None for x in own), *tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    out, *saved = ctx.saved_tensors
    own = (y if x is None else x for x, y in zip(saved, ctx.own))
    needed = needed_of(ctx) | ctx.needs_input_grad[1] << len(INPUTS)
    *found, dx = _ask_backward(needed, grad, out, *own, *saved[N_OWN:], *ctx.numbers)
    dx = dx if ctx.needs_input_grad[1] else None
    return None, dx, *[None] * (N_OWN - 2), *by_input(ctx, *found)


_ask: Callable[..., Any] = differentiable(_reduce, _differentiate, map_one_by_one, _save)
_ask_backward: Callable[..., Any] = without_second(_reduce_backward)


class _Value(torch.autograd.Function):
    """A number that was computed, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient_of: Any, *inputs: Tensor) -> Tensor:
        ctx.gradient_of = gradient_of
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            refuse_second(ctx)
        of_value = grad if ctx.needs_input_grad[0] else None
        return of_value, None, *ctx.gradient_of(grad, ctx.needs_input_grad[2:])


def with_gradient(
    value: Tensor,
    call: Call,
    gradient_of_block: Callable[[Tensor, WeightBlock], torch_gradients.Products],
    gradients_of: Callable[[Tensor, Sequence[str]], dict[str, Tensor] | None],
) -> Tensor:
    """A value ``(B, H, ...)``, also with its gradient by a call's query, key, bias and sinks.

    Args:
        gradient_of_block: gives that of a block's weights, times these, for that of the value.
        gradients_of: gives those of the named inputs, or None where it has to go by blocks.
    """
    names = [name for name in INPUTS if name != "value" and getattr(call, name) is not None]

    def gradient_of(grad: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        wanted = [name for name, is_needed in zip(names, needed) if is_needed]
        if (at_once := gradients_of(grad, wanted)) is not None:
            return tuple(at_once[name] if name in wanted else None for name in names)
        found = torch_gradients.weights_gradients(
            call.changed(value=None), lambda block: gradient_of_block(grad, block), None, wanted
        )
        return tuple(dict(zip(INPUTS, found))[name] for name in names)

    inputs = (getattr(call, name) for name in names)
    return _Value.apply(value, gradient_of, *inputs)
