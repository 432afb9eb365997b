"""Calls of torch's own attention: the modules that make them, and a function in their place."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module, functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from regard._base.torch_state import scaled_dot_product_attention

Source = tuple[StorageWeakRef, Any, torch.Size, tuple[int, ...]]


class Hook(functools.partial[None]):
    """A hook that copies and pickles of a module do not have: what it does, which gives None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _ignoring, ()


def _ignoring() -> Callable[..., None]:
    return _ignore


def _ignore(*given: Any) -> None:
    """A hook that stayed behind."""


class Sources:
    """The modules that run in a thread, and what their projections are made of.

    Attributes:
        ran: the modules that were called.
    """

    def __init__(self) -> None:
        self.ran: set[Module] = set()
        self._thread = threading.get_ident()
        self._stack: list[Module] = []
        # For each of them, what its projections were called with, the memory that they gave, and
        # how many numbers.
        self._fed: list[list[tuple[Source, StorageWeakRef, int]]] = []

    @contextlib.contextmanager
    def followed(self, modules: Iterable[Module] | None = None) -> Iterator[None]:
        """Follows the modules that are called in the block: these and their projections, or all."""
        if modules is None:
            hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
        else:
            hooks = []
            enter, leave, note = Hook(self._enter), Hook(self._leave), Hook(self._note)
            for module in modules:
                hooks.append(module.register_forward_pre_hook(enter))
                hooks.append(module.register_forward_hook(leave, always_call=True))
                for projection in filter(_is_projection, module.children()):
                    hooks.append(projection.register_forward_hook(note))
        try:
            with warnings.catch_warnings():  # the hooks see a compiled model and what it compiles
                warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when")
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._stack.clear()
            self._fed.clear()

    def _enter(self, module: Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._stack and self._stack[0] is module and not is_running(module):
            self._stack.clear()  # which an interruption left
            self._fed.clear()
        if not self._stack:
            self._begun(module)
        self._stack.append(module)
        self._fed.append([])
        self.ran.add(module)

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or not taken_away(self._stack, module):
            return
        del self._fed[len(self._stack) :]
        if not self._stack:
            self._ended(output)
        elif _is_projection(module):
            self._note(module, args, output)

    def _note(self, projection: Module, args: Any, output: Any) -> None:
        """A projection in the innermost of the modules gave its output."""
        if threading.get_ident() != self._thread or not (self._fed and args):
            return
        x = args[0]
        given, made = _memory(x), _memory(output)
        if given is not None and made is not None:
            source = given, x.storage_offset(), x.shape, x.stride()
            self._fed[-1].append((source, made, output.numel()))

    def _begun(self, module: Module) -> None:
        """The outermost module is called."""

    def _ended(self, output: Any) -> None:
        """It gave this; None where it raised."""

    def are_of_one(self, query: Any, key: Any, value: Any = None) -> bool:
        """Whether query and key are known to be made of one array, and so of the same tokens.

        Known are parts of one memory, as of one projection; what modules that run made of one
        array; and what is made in a module whose projections all were of one array, where they gave
        enough numbers beside those of which the place is known.
        """
        if query is key:
            return True
        own, of_key = _memory(query), _memory(key)
        if own is None or of_key is None:
            return False
        if own == of_key or not self._fed:
            return own == of_key
        for fed in self._fed:
            made = {out: source for source, out, _ in fed}
            if own in made and of_key in made:
                return made[own] == made[of_key]
        made = {out: source for source, out, _ in self._fed[-1]}
        left = sum(count for *_, count in self._fed[-1])
        left -= sum(_distinct(x) for x in (query, key, value) if _memory(x) in made)
        of_key_head = key.shape[:-3].numel() * key.shape[-2:].numel()  # the others may repeat it
        numbers = (own, query.numel()), (of_key, of_key_head)
        is_seen = not any(child._modules for child in self._stack[-1].children())  # no adapters
        if is_seen and sum(count for memory, count in numbers if memory not in made) > left:
            return False  # of a parameter, or of another module
        return len({source for source in made.values() if source[0] not in made}) == 1


class Running(Sources):
    """The modules that run, from the model to the one that is at work.

    Args:
        begin: called when a model is called, where none is given.
        end: called with what that model gave; with None where it raised.
        model: whose modules are named; by default those of the module that is called first.

    Attributes:
        model: the same, or the module that was called first.
        modules: of it, by name.
    """

    def __init__(
        self,
        begin: Callable[[], None] = lambda: None,
        model: Module | None = None,
        end: Callable[[Any], None] = lambda output: None,
    ) -> None:
        super().__init__()
        self._begin, self._end = begin, end
        self._is_given = model is not None
        self.model: Module | None = None
        self.modules: dict[str, Module] = {}
        self._names: dict[int, str] = {}
        if model is not None:
            self._name(model)

    def _name(self, model: Module) -> None:
        if self.model is not model:
            self.model = model
            self.modules = dict(model.named_modules())
            self._names = {id(module): name for name, module in self.modules.items()}

    @property
    def name(self) -> str:
        """The name of the innermost module that has one; empty for the model, and outside it."""
        for module in reversed(self._stack):
            if id(module) in self._names:
                return self._names[id(module)]
        return ""

    def _begun(self, module: Module) -> None:
        if not (self._is_given or is_in_backward()):
            self._name(module)
            self._begin()

    def _ended(self, output: Any) -> None:
        if not (self._is_given or is_in_backward()):
            self._end(output)


def is_in_backward() -> bool:
    """Whether torch computes gradients, where checkpoints compute once more."""
    return torch._C._current_graph_task_id() != -1


def is_running(module: Module) -> bool:
    """Whether a call of a module runs in this thread, beside the one that begins."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        is_call = frame.f_code is Module._call_impl.__code__
        count += is_call and frame.f_locals["self"] is module
        frame = frame.f_back  # type: ignore[assignment]
    return count > 1


def taken_away(running: list[Module], module: Module) -> bool:
    """Takes a module that ends from those that run, and those within it; whether it is there.

    It is not where a hook of others raised before the one that would have noted it.
    """
    if running and running[-1] is module:
        running.pop()
        return True
    if not any(one is module for one in running):
        return False
    while running.pop() is not module:
        pass
    return True


def _is_projection(module: Module) -> bool:
    parameters = module._parameters  # TorchScript's have no ``get``
    weight = parameters["weight"] if "weight" in parameters else None  # noqa: SIM401
    return weight is not None and weight.ndim > 1 and not module._modules


def _memory(x: Any) -> StorageWeakRef | None:
    """Where the numbers of a tensor are, which it does not keep alive; None where nobody knows."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    try:
        return StorageWeakRef(x.untyped_storage())
    except (NotImplementedError, RuntimeError):  # of vmap, or of a class of its own
        return None


def _distinct(x: Tensor) -> int:
    """How many numbers it has, those counted once that a broadcast axis repeats."""
    return math.prod(n for n, step in zip(x.shape, x.stride()) if step)


class TorchAttention(TorchFunctionMode):
    """Hands calls of torch's attention in this thread to a function.

    Args:
        compute: called with torch's operator and the arguments of a call; gives its result.
        weigh: called for ``torch.nn.MultiheadAttention`` that returns weights, which torch computes
            past its operator: with the function of torch, its arguments by name, and ``within``,
            which calls that function so that its operator is handed over, to nobody else.
        leave: called with the name of any other function that computes attention, such as
            ``flex_attention``, before it does.
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        weigh: Callable[..., Any],
        leave: Callable[[str], object] = lambda name: None,
    ) -> None:
        super().__init__()
        self._compute, self._weigh, self._leave = compute, weigh, leave

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hands it over, or calls whatever else torch was asked for."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._compute(func, *args, **kwargs)
        if func is functional.multi_head_attention_forward:
            named = _SIGNATURE.bind(*args, **kwargs).arguments
            if named.get("need_weights", True):
                return self._weigh(func, named, self._alone)
            return self._within(func, named)
        if any(func is backward for backward in _BACKWARD):  # where checkpoints compute once more
            with _handed(self._compute):
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if "attention" in name or "attn" in name:
            if any(func is operator for operator in _ATEN):
                return self._compute(func, *args, **kwargs)
            if "backward" not in name and getattr(func, "namespace", "") != "regard":
                self._leave(name.partition(".")[0])
        return func(*args, **kwargs)

    def _within(self, func: Any, named: dict[str, Any]) -> Any:
        """Calls a function of torch that is written in Python: what it calls passes no mode."""
        with _handed(self._compute):
            return func(**named)

    def _alone(self, func: Any, named: dict[str, Any]) -> Any:
        """The same for a call that no other mode shall see."""
        with torch._C.DisableTorchFunction(), _handed(self._compute, alone=True):
            return func(**named)

    def __enter__(self) -> Any:
        _FAST.enter()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Takes it away.

        Raises:
            RuntimeError: in another thread than that of ``__enter__``, whose calls it no more sees.
        """
        _FAST.leave()
        if _is_taken_away(self):
            return
        self._compute, self._weigh, self._leave = _as_it_is, _as_it_is_by_name, _ignore
        if kind is None:
            raise RuntimeError(
                "The with block was entered in one thread and left in another. Nothing is handed "
                "over any more, but a mode of torch that does nothing stays in the first thread. "
                "Enter and leave the block in one thread."
            )


def _is_taken_away(mode: TorchFunctionMode) -> bool:
    """Takes a mode from those of this thread, wherever it is among them; whether it was there."""
    modes = _get_current_function_mode_stack()
    if not any(one is mode for one in modes):
        return False
    above = []
    while (last := _pop_mode()) is not mode:
        above.append(last)
    for one in reversed(above):
        _push_mode(one)
    return True


def _as_it_is(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _as_it_is_by_name(func: Any, named: dict[str, Any], within: Any) -> Any:
    return func(**named)


_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# The operator as ``torch.export`` writes it into a graph.
_ATEN = (
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class Shared:
    """A setting for all threads: the first changes it, the last puts it back."""

    def __init__(self, change: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        self._change, self._restore = change, restore
        self._lock, self._inside = threading.Lock(), 0

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = self._change()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._restore(self._before)


def _without_fast_path() -> bool:
    before: bool = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it goes past the operator
    return before


def _divert() -> Any:
    operator = functional.scaled_dot_product_attention

    def of_thread(*args: Any, **kwargs: Any) -> Any:
        compute = getattr(_COMPUTE, "now", None)
        return operator(*args, **kwargs) if compute is None else compute(operator, *args, **kwargs)

    functional.scaled_dot_product_attention = of_thread
    return operator


def _put_back(operator: Any) -> None:
    functional.scaled_dot_product_attention = operator


def _run_eagerly() -> Any:
    return torch.compiler.set_stance("force_eager")  # of all threads


def _run_as_before(stance: Any) -> None:
    stance.__exit__(None, None, None)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Runs what ``torch.compile`` made as it was."""
    _EAGER.enter()
    try:
        yield
    finally:
        _EAGER.leave()


_EAGER = Shared(_run_eagerly, _run_as_before)
_FAST = Shared(_without_fast_path, torch.backends.mha.set_fastpath_enabled)
_DIVERTED = Shared(_divert, _put_back)
_COMPUTE = threading.local()


@contextlib.contextmanager
def _handed(compute: Callable[..., Any], alone: bool = False) -> Iterator[None]:
    """Hands what functions of torch call to ``compute``, in this thread.

    Within another such block that one gets them first, as modes do, unless it is ``alone``.
    """
    _DIVERTED.enter()
    before = getattr(_COMPUTE, "now", None)
    _COMPUTE.now = compute if before is None or alone else _through(before, compute)
    try:
        yield
    finally:
        _COMPUTE.now = before
        _DIVERTED.leave()


def _through(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """Hands a call to ``first``, for which ``then`` is the operator."""

    def compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
        return first(functools.partial(then, operator), *args, **kwargs)

    return compute


_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)
