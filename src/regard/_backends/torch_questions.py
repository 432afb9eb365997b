"""Whatever is asked of weights as an operator of torch: one graph, which looks at no value.

The operator has the question in words, with its numbers and tensors, and the call. It asks weights
of the call, as they are asked without a graph; its gradient asks them once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from regard._backends.torch_gradients import INPUTS
from regard._backends.torch_ops import (
    CALL_SCHEMA,
    by_input,
    differentiable,
    empty_gradients,
    make_operator,
    map_one_by_one,
    names_of,
    needed_of,
    pack,
    register_fake,
    tensors_of,
    unpack,
    without_gradient,
    without_second,
)
from regard._base.arrays import accumulating_name
from regard._call.call import Call

# The first two tensors have no gradient but x, which weights are multiplied with.
_QUESTION = "str words, Tensor? x, Tensor? y, SymInt[] numbers, bool has_gradient"
_OF = (
    "SymInt[] leading, bool heads, SymInt? group_rows, str backend, Tensor? maximum, Tensor? total"
)
_OWN = f"{_QUESTION}, {_OF}"
_SCHEMA = f"{_OWN}, {CALL_SCHEMA}"
_N_OWN = _OWN.count(",") + 1


_NO_TENSORS: list[Tensor] = []


class Question(NamedTuple):
    """What is asked, in the words of whoever answers."""

    words: str
    x: Tensor | None
    y: Tensor | None
    numbers: Sequence[int]
    has_gradient: bool  # whether it is asked for its gradient too: some are computed another way


N_QUESTION = len(Question._fields)


class Answers(Protocol):
    """Who knows weights, which are above the operators."""

    def answer(
        self, question: Question, call: Call, backend: str, statistics: tuple[Tensor, Tensor] | None
    ) -> list[Tensor]:
        """The results, with their gradient where autograd records."""

    def empty(self, question: Question, call: Call) -> list[Tensor]:
        """Tensors of their shapes and dtypes."""


_ANSWERS: list[Answers] = []


def answered_by(answers: Answers) -> None:
    """Says who answers."""
    _ANSWERS[:] = [answers]


def _read(inputs: tuple[Any, ...]) -> tuple[Question, Call, str, tuple[Tensor, Tensor] | None]:
    """What an operator was called with."""
    leading, heads, rows, backend, maximum, total = inputs[N_QUESTION:_N_OWN]
    call = unpack(*inputs[_N_OWN:]).changed(
        value=None, leading=tuple(leading), heads=heads, part_of=rows
    )
    return (
        Question(*inputs[:N_QUESTION]),
        call,
        backend,
        None if maximum is None else (maximum, total),
    )


def _recorded(
    inputs: tuple[Any, ...], names: Sequence[str]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Some inputs of a call as leaves of autograd, and the results of a question, which follow."""
    question, call, backend, statistics = _read(inputs)
    given = {name: getattr(call, name) for name in INPUTS} | {"x": question.x}
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    own = {name: x for name, x in leaves.items() if name != "x"}
    asked = question._replace(x=leaves.get("x", question.x))
    return leaves, _ANSWERS[0].answer(asked, call.changed(**own), backend, statistics)


def _records() -> Any:
    """Lets autograd record in an operator, which runs below it."""
    functionality = torch._C.DispatchKey.AutogradFunctionality
    return torch._C._SetExcludeDispatchKeyGuard(functionality, False)


@make_operator("ask_weights", _SCHEMA, "Tensor[]", products=(1, 0))
def _ask(*inputs: Any) -> list[Tensor]:
    question, call, backend, statistics = _read(inputs)
    if not question.has_gradient:
        return _ANSWERS[0].answer(question, call, backend, statistics)
    with _records(), torch.enable_grad():
        return [x.detach() for x in _recorded(inputs, ["query"])[1]]


@register_fake(_ask)
def _(*inputs: Any) -> list[Tensor]:
    question, call, _, _ = _read(inputs)
    return _ANSWERS[0].empty(question, call)


@make_operator(
    "ask_weights_backward",
    f"int needed, Tensor[] grads, {_SCHEMA}",
    "({})".format(", ".join(6 * ["Tensor"])),
    products=(4, 0),
)
def _ask_backward(needed: int, grads: Sequence[Tensor], *inputs: Any) -> tuple[Tensor, ...]:
    names = names_of(needed) + (("x",) if needed >> len(INPUTS) & 1 else ())
    with _records(), torch.enable_grad():
        leaves, results = _recorded(inputs, names)
        pairs = [(x, grad) for x, grad in zip(results, grads) if x.requires_grad]
        found: Sequence[Tensor] = [torch.zeros_like(x) for x in leaves.values()]
        if pairs:
            outputs, own = zip(*pairs)
            found = torch.autograd.grad(
                outputs, list(leaves.values()), own, allow_unused=True, materialize_grads=True
            )
    by_name = dict(zip(leaves, (x.contiguous() for x in found)))
    return tuple(by_name[n] if n in by_name else grads[0].new_empty(0) for n in (*INPUTS, "x"))


@register_fake(_ask_backward)
def _(needed: int, grads: Sequence[Tensor], *inputs: Any) -> tuple[Tensor, ...]:
    question, call, *_ = _read(inputs)
    x = question.x if needed >> len(INPUTS) & 1 else None
    dx = call.query.new_empty(0) if x is None else x.new_empty(x.shape)
    return *empty_gradients(call, names_of(needed)), dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.numbers = tensors_of(inputs[_N_OWN:])
    own = inputs[:_N_OWN]
    ctx.own = tuple(None if isinstance(x, Tensor) else x for x in own)
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in own), *tensors)


def _differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    as_lists = len(grads) == 1 and isinstance(grads[0], (list, tuple))  # as operators have them
    given = grads[0] if as_lists else grads
    saved = ctx.saved_tensors
    own = (y if x is None else x for x, y in zip(saved, ctx.own))
    of_x = bool(ctx.needs_input_grad[1])
    needed = needed_of(ctx) | of_x << len(INPUTS)
    *found, dx = _backward(needed, list(given), *own, *saved[_N_OWN:], *ctx.numbers)
    # torch takes an empty list for one of tensors.
    none = [_NO_TENSORS if as_lists and x == [] else None for x in ctx.own[2:]]
    return None, dx if of_x else None, *none, *by_input(ctx, *found)


_call: Callable[..., Any] = differentiable(_ask, _differentiate, map_one_by_one, _save)
_backward: Callable[..., Any] = without_second(_ask_backward)


def ask(
    question: Question, call: Call, backend: str, statistics: tuple[Any, Any] | None
) -> Sequence[Tensor]:
    """The results of a question to the weights of a call, in a graph.

    Args:
        statistics: of its rows, where they are known.
    """
    maximum, total = statistics or (None, None)
    own = call.leading, call.heads, call.part_of, backend, maximum, total
    found: Sequence[Tensor] = _call(*question, *own, *pack(_with_value(call)))
    return found


def _with_value(call: Call) -> Call:
    """A call as operators take it: with a value, of no columns."""
    value = call.key[..., :0].detach()
    return call.changed(value=value, dropout=0.0, seed=None, output_dtype=None)


@without_gradient
@make_operator("row_statistics", f"str backend, {CALL_SCHEMA}", "(Tensor, Tensor)", products=(1, 0))
def _row_statistics(backend: str, *values: Any) -> tuple[Tensor, Tensor]:
    from regard._backends import by_name  # which imports those who import this

    maximum, total = by_name(backend).row_statistics(unpack(*values).changed(value=None))
    return maximum, total


@register_fake(_row_statistics)
def _(backend: str, query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = query.new_empty(query.shape[:3], dtype=getattr(torch, accumulating_name(query)))
    return rows, torch.empty_like(rows)


def row_statistics(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Those of a whole call, in a graph; without a gradient."""
    found: tuple[Tensor, Tensor] = _row_statistics(backend, *pack(_with_value(call)))
    return found


def _run(function: Callable[..., Any], *values: Any, **options: Any) -> Any:
    return function(*values, **options)


at_once = torch.compiler.disable(
    _run, reason="regard computes this at once; docs/attention.md lists what becomes a graph"
)
"""Calls a function outside of the graph, which ends there."""
blocks_at_once = torch.compiler.disable(
    _run, reason="the ids are tensors: weights.blocks(..., counts=(rows, columns)) tells the shape"
)
diagonals_at_once = torch.compiler.disable(
    _run, reason="the distances depend on values: weights.diagonals(edges) tells how many there are"
)
