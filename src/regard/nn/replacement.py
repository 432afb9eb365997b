"""regard's operator in models of torch that call torch's: for a while, or in their modules."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import (
    Module,
    MultiheadAttention,
    TransformerEncoder,
    TransformerEncoderLayer,
    functional,
)
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from regard._base import torch_state
from regard._base.errors import ShapeError, UnsupportedError
from regard._base.settings import counted
from regard._operator.attention import scaled_dot_product_attention
from regard._operator.torch_calls import Running, TorchAttention, uncompiled

WEIGHTS = "returns weights, which torch computes past its operator: need_weights=False"
NESTED = "is called with nested tensors, which torch computes past its operator: pad them"
OWN = "has a forward of its own beside its class's, which stays torch's: regard.patch_torch()"
SCRIPTED = "is TorchScript, whose calls stay torch's: replace what it was made of"
OF_ANY_CLASS = ("__dict__", "__weakref__")
OPERATOR = "scaled_dot_product_attention"
# What lets torch's layers go past their attention in evaluation, and what forbids it.
QUICK_WAYS: tuple[tuple[type, str, int], ...] = (
    (TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (TransformerEncoder, "use_nested_tensor", False),
)


class Replaced:
    """What regard computes of a model's attention, and what torch still does; ``print`` it.

    Attributes:
        replaced: for each module by name, its calls that regard computed; or 0 before any. Those
            in a compiled graph are not counted.
        left: for each module by name, why torch computes it.
    """

    def __init__(self) -> None:
        self.replaced: Counter[str] = Counter()
        self.left: dict[str, str] = {}
        self._changed: list[Module] = []

    def undo(self) -> None:
        """Puts torch's operator back, where this call changed modules of a model."""
        while self._changed:
            module: Any = self._changed.pop()
            module.__class__ = _swapped(module, _without)
            del module._regard_replaced

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_changed": []}  # a module that is copied would bring all others

    def __repr__(self) -> str:
        return f"Replaced({counted(len(self.replaced), 'module')}, {len(self.left)} left to torch)"

    def __enter__(self) -> Replaced:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{counted(len(self.replaced), 'module')} computed by regard"]
        lines += [
            f"  {name or '(the model)'}  {counted(n, 'call')}" for name, n in self.replaced.items()
        ]
        lines += [f"{len(self.left)} left to torch"] if self.left else []
        return "\n".join(
            lines + [f"  {name or '(the model)'}  {x}" for name, x in self.left.items()]
        )


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

    Raises:
        UnsupportedError: a ``torch.nn.MultiheadAttention`` is called with nested tensors.
    """
    running, replaced = Running(), Replaced()
    with (
        _nested_refused(),
        uncompiled(),
        running.followed(),
        _by_regard(replaced, lambda: running.name),
    ):
        yield replaced


@contextlib.contextmanager
def _nested_refused() -> Iterator[None]:
    """Says in words of its own what torch asserts of nested tensors in the block."""
    try:
        yield
    except AssertionError as error:
        if "does not support NestedTensor" not in str(error):
            raise
        raise UnsupportedError(
            "patch_torch: a torch.nn.MultiheadAttention is called with nested tensors, which torch"
            " computes past its operator, and not in this block. Pad them, or take"
            " regard.nn.replace(model), which leaves such calls to torch."
        ) from error


def replace(model: Module) -> Replaced:
    """Puts regard's operator into the modules of a model that call torch's.

    They stay the modules that they are, with their parameters, hooks and places, and compute their
    attention with ``regard.attention``; so do deep copies of them. ``torch.compile`` makes one
    graph of them as of torch's, but where ``torch.utils.checkpoint`` calls them: those run
    uncompiled. ``torch.save`` and pickle keep torch's modules. Used in a ``with`` statement, it is
    for that block.

    What an earlier call replaced stays as it is, until the report of that call puts it back.

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
    report, changed, calls_operator = Replaced(), [], functools.cache(_calls_operator)
    for name, module in model.named_modules():
        kind = _torchs(module)
        is_own = "forward" in vars(module) and not isinstance(module, ScriptModule)
        is_computed = calls_operator(kind) and not is_own
        if is_computed:
            report.replaced[name] = 0
        elif is_own:
            if calls_operator(kind) or _names_operator(module.forward, set()):
                report.left[name] = OWN
        elif issubclass(kind, ScriptModule):
            if hasattr(module, "forward") and OPERATOR in str(module.graph):
                report.left[name] = SCRIPTED
        elif "Attention" in kind.__name__ and not any(module.children()):
            report.left[name] = f"{kind.__name__} does not call torch's operator"
        is_quick = any(issubclass(kind, quick) for quick, *_ in QUICK_WAYS)
        if (is_computed or is_quick) and not _is_changed(module):
            changed.append((name, module))
    if not report.replaced:
        raise UnsupportedError(
            f"replace: no module of {type(model).__name__} calls torch's operator. "
            "regard.patch_torch() finds the calls of other functions while it runs; a model of "
            'Hugging Face takes model.set_attn_implementation("regard") after import regard.hf.'
        )
    try:
        for name, module in changed:
            _change(module, report, name)
    except BaseException:  # of a class that refuses to be derived from
        report.undo()
        raise
    return report


def _torchs(module: Any) -> Any:
    """The class of a module without regard's operator, and without what was put over that."""
    kind = type(module)
    return next((_without(base) for base in kind.__mro__ if "_kind" in vars(base)), kind)


def _without(kind: Any) -> Any:
    return vars(kind).get("_kind", kind)


def _computed(kind: Any) -> type:
    return _computed_by_regard(_without(kind))


def _swapped(module: Any, change: Callable[[Any], Any]) -> Any:
    """A module's class, changed; where it is parametrized, torch's class for that over it.

    From that class torch takes off what it parametrized, so it has to be the module's own.
    """
    kind = type(module)
    if not is_parametrized(module):
        return change(kind)
    members = {name: x for name, x in vars(kind).items() if name not in OF_ANY_CLASS}
    return type(kind.__name__, tuple(map(change, kind.__bases__)), members)


def _change(module: Any, report: Replaced, name: str) -> None:
    module.__class__ = _swapped(module, _computed)
    module._regard_replaced = report, name
    report._changed.append(module)


def _is_changed(module: Any) -> bool:
    """Whether an earlier report puts the module back; none does that of a copy."""
    report, _ = vars(module).get("_regard_replaced", (None, ""))
    return report is not None and any(x is module for x in report._changed)


def _calls_operator(kind: Any) -> bool:
    """Whether the methods of a class name torch's operator, or what they are written with does."""
    if issubclass(kind, MultiheadAttention):
        return True
    if issubclass(kind, ScriptModule):  # whose forward is no function
        return False
    seen: set[Any] = set()
    own = (base for base in kind.__mro__ if base not in (Module, object))
    return any(_names_operator(x, seen) for base in own for x in vars(base).values())


def _names_operator(function: Any, seen: set[Any]) -> bool:
    """The same of a function: with those in it, those it decorates, and those of its module."""
    if isinstance(function, (staticmethod, classmethod, MethodType)):
        function = function.__func__
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    known = [function.__globals__.get(name) for name in names]
    builtin = {x.__name__ for x in known if isinstance(x, BuiltinFunctionType)}
    if OPERATOR in names | builtin:
        return True
    others = [x for x in known if isinstance(x, FunctionType)]
    others = [x for x in others if x.__module__ == function.__module__]
    cells = [cell for cell in function.__closure__ or () if cell != CellType()]  # but empty ones
    return any(_names_operator(x, seen) for x in (*others, *(x.cell_contents for x in cells)))


@functools.cache
def _computed_by_regard(kind: Any) -> type:
    """A class of the same name whose ``forward`` computes attention with regard.

    A module of it holds what it held as torch's, and its deep copy is of it too. What is pickled of
    it, as by ``torch.save``, is torch's module, which is read where there is no regard.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_regard_replaced" not in vars(self):  # put back, but for a class put over this one
            return kind.forward(self, *args, **kwargs)
        is_left = is_multi_head and any(_is_nested(x) for x in (*args, *kwargs.values()))
        if torch.compiler.is_compiling() and not is_left:
            with _Traced():
                return kind.forward(self, *args, **kwargs)
        report, name = self._regard_replaced
        if is_left:
            report.left[name] = NESTED
            return kind.forward(self, *args, **kwargs)
        with _by_regard(report, lambda: name):
            return kind.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        # By later protocols than 1 the class must be the module's own.
        make, args, *rest = kind.__reduce_ex__(self, 1)
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: x for name, x in rest[0].items() if name != "_regard_replaced"}
        return (make, tuple(kind if x is type(self) else x for x in args), *rest)

    def deepcopied(self: Any, memo: dict[int, Any]) -> Any:
        made: Any
        if hasattr(kind, "__deepcopy__"):
            made = kind.__deepcopy__(self, memo)
        elif is_parametrized(self):  # it is copied, but never pickled
            made = memo[id(self)] = object.__new__(type(self))
            vars(made).update(copy.deepcopy(vars(self), memo))
        else:
            make, args, state, *_ = self.__reduce_ex__(1)
            made = memo[id(self)] = make(*args)
            made.__setstate__(copy.deepcopy(state, memo))
        made.__class__ = _swapped(made, _computed)
        if "_regard_replaced" in vars(self):
            made._regard_replaced = copy.deepcopy(self._regard_replaced, memo)
        return made

    is_multi_head = issubclass(kind, MultiheadAttention)
    members = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"_kind": kind, "__reduce_ex__": reduce, "__deepcopy__": deepcopied}
    if _calls_operator(kind):
        members["forward"] = functools.update_wrapper(forward, kind.forward)
    for quick, attribute, value in QUICK_WAYS:
        if issubclass(kind, quick):
            members[attribute] = _hidden(attribute, value)
    return type(kind.__name__, (kind,), members)


def _hidden(name: str, value: int) -> property:
    """An attribute that reads as a value, whatever the module holds and is given."""
    return property(lambda self: value, lambda self, x: vars(self).update({name: x}))


def _is_nested(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_nested


def _check_padding(mask: Tensor, keys: int, batch: int) -> None:
    if mask.shape != (batch, keys):
        raise ShapeError(
            f"replace: key_padding_mask has shape {tuple(mask.shape)}; {(batch, keys)} is needed,"
            " a row for each element of the batch."
        )


def _with_operator(function: Any) -> Any:
    """A function of torch that calls regard's operator for torch's, and that can be compiled."""
    own = function.__globals__ | {
        OPERATOR: scaled_dot_product_attention,
        "has_torch_function": lambda given: False,  # it is what a mode calls
        "_check_key_padding_mask": _check_padding,  # torch's makes its message in a closure
    }
    del own["__name__"]  # by which the compiler would find torch's own
    made = FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_multi_head = _with_operator(functional.multi_head_attention_forward)


class _Traced(TorchFunctionMode):
    """As ``TorchAttention`` with regard's operator, where torch's compiler records a graph.

    It follows no locks, and nothing that is one thread's.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls regard's operator for torch's."""
        kwargs = kwargs or {}
        if func is torch_state.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return _multi_head(*args, **kwargs)
        if func is Tensor.unflatten:  # whose Python the compiler does not follow
            func = torch.unflatten
        # Functions that another is to call, as checkpoints and conditions, pass no mode there.
        return func(*map(_traced, args), **{name: _traced(x) for name, x in kwargs.items()})


def _traced(x: Any) -> Any:
    """An argument; a function such that it calls regard's operator."""
    if not isinstance(x, (FunctionType, MethodType, Module)):
        return x

    def call(*args: Any, **kwargs: Any) -> Any:
        with _Traced():
            return x(*args, **kwargs)

    return call


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

    def leave(function: str) -> None:
        report.left[name()] = f"calls {function}, which stays torch's"

    return TorchAttention(compute, weigh, leave)
