"""regard's operator in models of torch that call torch's: for a while, or in their modules."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module, MultiheadAttention, TransformerEncoder, TransformerEncoderLayer

from regard._base.errors import UnsupportedError
from regard._operator.attention import scaled_dot_product_attention
from regard._operator.torch_calls import Running, TorchAttention

WEIGHTS = "returns weights, which torch computes past its operator: need_weights=False"
OPERATOR = "scaled_dot_product_attention"
# What lets torch's layers go past their attention in evaluation.
QUICK_WAYS = (
    (TransformerEncoderLayer, "activation_relu_or_gelu"),
    (TransformerEncoder, "use_nested_tensor"),
)


class Replaced:
    """What regard computes of a model's attention, and what torch still does; ``print`` it.

    Attributes:
        replaced: for each module by name, its calls that regard computed; or 0 before any.
        left: for each module by name, why torch computes it.
    """

    def __init__(self, undo: Callable[[], None] = lambda: None) -> None:
        self.replaced: Counter[str] = Counter()
        self.left: dict[str, str] = {}
        self._undo = undo

    def undo(self) -> None:
        """Puts torch's operator back, where modules of a model were changed."""
        self._undo()

    def __enter__(self) -> Replaced:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{_counted(len(self.replaced), 'module')} computed by regard"]
        lines += [
            f"  {name or '(the model)'}  {_counted(n, 'call')}" for name, n in self.replaced.items()
        ]
        lines += [f"{len(self.left)} left to torch"] if self.left else []
        return "\n".join(
            lines + [f"  {name or '(the model)'}  {x}" for name, x in self.left.items()]
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


@contextlib.contextmanager
def patch_torch() -> Iterator[Replaced]:
    """Computes torch's attention with regard in the ``with`` block, in this thread.

        with regard.patch_torch() as patched:
            model(x)
        print(patched)

    That is every call of ``torch.nn.functional.scaled_dot_product_attention``, by whatever module
    and under whatever name it was imported, and of ``torch.nn.MultiheadAttention`` without weights.
    A compiled model runs uncompiled in it; ``regard.nn.replace`` is for those.

    Yields:
        A ``Replaced``: the modules that called it, and those that torch computed, with the reason.
    """
    running, replaced = Running(), Replaced()
    with (
        torch.compiler.set_stance("force_eager"),
        running.followed(),
        _by_regard(replaced, lambda: running.name),
    ):
        yield replaced


def replace(model: Module) -> Replaced:
    """Puts regard's operator into the modules of a model that call torch's.

    They stay the modules that they are, with their parameters, hooks and places, and compute their
    attention with ``regard.attention``. Used in a ``with`` statement, it is for that block.

    Args:
        model: of torch, changed in place.

    Returns:
        A ``Replaced``, whose ``undo()`` puts torch's operator back.

    Raises:
        TypeError: no module of torch.
        UnsupportedError: no module of it calls torch's operator.
    """
    if not isinstance(model, Module):
        raise TypeError(f"replace: {type(model).__name__} is no torch.nn.Module.")
    undone: list[Callable[[], None]] = []

    def undo() -> None:
        while undone:
            undone.pop()()

    report = Replaced(undo)
    for name, module in model.named_modules():
        for quick, attribute in QUICK_WAYS:
            if isinstance(module, quick):
                value = getattr(module, attribute)
                undone.append(functools.partial(setattr, module, attribute, value))
                setattr(module, attribute, type(value)(0))
        if "_regard_replaced" in vars(module):  # by an earlier call, which puts it back
            report.replaced[name] = 0
        elif _calls_operator(type(module)):
            kind: Any = type(module)
            undone.append(functools.partial(setattr, module, "__class__", kind))
            module.__class__ = _computed_by_regard(kind)
            module._regard_replaced = report, name
            report.replaced[name] = 0
        elif "Attention" in type(module).__name__ and not any(module.children()):
            report.left[name] = f"{type(module).__name__} does not call torch's operator"
    if not report.replaced:
        raise UnsupportedError(
            f"replace: no module of {type(model).__name__} calls torch's operator. "
            "regard.patch_torch() finds the calls of other functions while it runs; a model of "
            'Hugging Face takes model.set_attn_implementation("regard") after import regard.hf.'
        )
    return report


def _calls_operator(kind: Any) -> bool:
    if issubclass(kind, MultiheadAttention):
        return True
    code = getattr(kind.forward, "__code__", None)
    return code is not None and OPERATOR in code.co_names


@functools.cache
def _computed_by_regard(kind: Any) -> type:
    """A class of the same name whose ``forward`` computes attention with regard."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        report, name = self._regard_replaced
        with _by_regard(report, lambda: name):
            return kind.forward(self, *args, **kwargs)

    functools.update_wrapper(forward, kind.forward)
    members = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)


def _by_regard(report: Replaced, name: Callable[[], str]) -> TorchAttention:
    def compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            output: Any = scaled_dot_product_attention(*args, **kwargs)
        except UnsupportedError as error:
            report.left[name()] = str(error).partition("\n")[0]
            return operator(*args, **kwargs)
        report.replaced[name()] += 1
        return output

    def weigh(function: Any, named: dict[str, Any], within: Any) -> Any:
        report.left[name()] = WEIGHTS
        return function(**named)

    return TorchAttention(compute, weigh)
