"""The calls of attention that modules of torch make, handed over under the modules' names."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_gradtrackingtensor,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from regard._base.arrays import is_tensor
from regard._base.errors import UnsupportedError
from regard._operator import watching
from regard._operator.attention import torch_call
from regard._operator.torch_calls import Running, TorchAttention
from regard.capture._kind import is_attention

# Called with the name of a module, the query, key, value and options of its attention, and a
# function that tells whether queries and keys are known to be of the same tokens. It may return a
# function that the output is handed through.
AreOfOne = Callable[[], bool]
Take = Callable[[str, Any, Any, Any, dict[str, Any], AreOfOne], Callable[[Any], Any] | None]

SEEN = (
    "What is seen is regard.attention, torch.nn.functional.scaled_dot_product_attention, and what "
    "is built on them"
)
NOT_SEEN = f"{SEEN}; a model that multiplies query and key by itself is not."
WITHOUT_NUMBERS = (
    "called where tensors hold no numbers of their own: while torch records a graph "
    "(torch.export), within torch.vmap, or on the device meta."
)


@contextlib.contextmanager
def calls_taken(
    running: Running,
    take: Take,
    refuse: Callable[[str, Exception], None] | None = None,
    explains: bool = False,
) -> Iterator[None]:
    """Hands every call of attention in this thread to ``take``.

    Args:
        running: knows the names of modules.
        take: gets what torch's operator is called with as it would be for ``regard.attention``.
        refuse: gets the name of a module and why its call cannot be that; by default it is raised.
        explains: whether outputs must be handed through what ``take`` returns.
    """
    calls = _Calls(running, take, refuse, explains)
    with (
        running.followed(),
        TorchAttention(calls.compute, calls.weigh, calls.leave_other),
        watching.watched(calls.take),
    ):
        yield
    calls.leave_unseen()


class _Calls:
    """The calls of attention in one thread; arguments as of ``calls_taken``."""

    def __init__(
        self,
        running: Running,
        take: Take,
        refuse: Callable[[str, Exception], None] | None,
        explains: bool,
    ) -> None:
        self._running, self._take = running, take
        self._refuse, self._explains = refuse, explains
        self._is_taken = False  # the call that is being computed, maybe by regard
        self._called: set[str] = set()  # names of the modules that made calls
        self._thread = threading.get_ident()

    def take(self, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
        """Takes a call of regard's operator."""
        if self._is_taken or threading.get_ident() != self._thread:
            return None
        name = self._running.name
        self._called.add(name)
        if has_no_numbers(query, key):
            self._leave(UnsupportedError(WITHOUT_NUMBERS))
            return None
        are_of_one = functools.partial(self._running.are_of_one, query, key, value)
        if not torch._C._are_functorch_transforms_active():
            return self._take(name, query, key, value, options, are_of_one)
        query, key, value = (untracked(x) for x in (query, key, value))
        options = {option: untracked(x) for option, x in options.items()}
        with temporarily_clear_interpreter_stack():
            return self._take(name, query, key, value, options, are_of_one)

    def _leave(self, error: Exception) -> None:
        if self._refuse is None:
            raise error
        self._called.add(self._running.name)
        self._refuse(self._running.name, error)

    def leave_other(self, function: str) -> None:
        """Another function of torch that computes attention is called."""
        if not self._is_taken:
            self._leave(UnsupportedError(f"{function} is called. {SEEN}."))

    def leave_unseen(self) -> None:
        """At the end: modules that are attention, and in which no call was seen."""
        if self._refuse is not None:
            for name in _unseen(self._running, self._called):
                error = UnsupportedError(f"no call of attention is seen there. {SEEN}.")
                self._refuse(name, error)

    def compute(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes a call of torch's operator, which computes it."""
        query: Any = None
        hand_on: Any = None
        try:
            query, key, value, options = self._read(*args, **kwargs)
        except Exception as error:
            self._leave(error)
        else:
            hand_on = self.take(query, key, value, options)
        before, self._is_taken = self._is_taken, True
        try:
            output = operator(*args, **kwargs)
        finally:
            self._is_taken = before
        if hand_on is None:
            return output
        if query.ndim != 4 or query.shape[1:3] == output.shape[1:3]:
            return hand_on(output)
        unpacked = output.reshape(len(output), *query.shape[1:3], output.shape[-1])
        return hand_on(unpacked).reshape(output.shape)

    def _read(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """A call of torch's operator as one of regard's."""
        module = self._running.modules.get(self._running.name)
        groups = getattr(module, "num_key_value_groups", 1)
        query, key, value, options = by_group(groups, *torch_call(*args, **kwargs))
        if "bias" in options:
            options |= {"bias": None} | mask_and_bias(options["bias"])
        return query, key, value, options

    def weigh(self, function: Any, named: dict[str, Any], within: Any) -> Any:
        """Takes a call of ``torch.nn.MultiheadAttention`` that returns weights."""
        if self._explains:
            raise UnsupportedError(
                "record: explain does not see what torch.nn.MultiheadAttention computes where it "
                "returns weights; call it with need_weights=False."
            )
        # Torch follows the mask where it returns weights, and else the hint that it is causal.
        quiet = {"need_weights": False, "is_causal": False, "dropout_p": 0.0, "training": False}
        with torch.no_grad():  # once more, for its query and key
            within(function, named | quiet)
        return function(**named)


def _unseen(running: Running, called: set[str]) -> list[str]:
    """Names of modules that are attention and ran, without any of these that made calls.

    None where there are no calls at all.
    """
    named = [name for name, x in running.modules.items() if x in running.ran]
    named = [name for name in named if is_attention(type(running.modules[name]))]
    return [
        name
        for name, after in pairwise([*named, ""])
        if called
        and not after.startswith(f"{name}.")
        and name.rpartition(".")[0] not in called
        and not any(is_within(own, name) for own in called)
    ]


def is_within(name: str, outer: str) -> bool:
    """Whether a module of that name is another, or in it."""
    return not outer or f"{name}.".startswith(f"{outer}.")


def by_group(
    groups: Any, query: Any, key: Any, value: Any, options: dict[str, Any]
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """A call with every key head once, and the query heads of each beside each other.

    Transformers repeats the key heads for torch, or packs the query heads of one of them in the
    place of queries, where there is one query: which it does depends on the mask of each call.

    Args:
        groups: query heads of one key head, as the module says; 1 where it says nothing.
        query, key, value, options: as for ``regard.attention``.
    """
    if type(groups) is not int or groups < 2 or not query.ndim == key.ndim == 4:
        return query, key, value, options
    (B, Hq, Lq, D), Hkv = query.shape, key.shape[1]
    if Hq != Hkv:
        return query, key, value, options
    if Hkv % groups == 0 and all(_are_repeated(x, groups) for x in (key, value)):
        return query, key[:, ::groups], value[:, ::groups], options
    if Lq != groups:
        return query, key, value, options
    options = dict(options)
    for name in ("mask", "bias"):
        x = options.get(name)
        if x is not None and x.ndim == 4 and (x.shape[1] > 1 or x.shape[2] > 1):
            whole = x.expand(-1, Hkv, groups, -1)
            options[name] = whole.reshape(len(x), Hkv * groups, 1, -1)
    return query.reshape(B, Hkv * groups, 1, D), key, value, options


def _are_repeated(x: Tensor, groups: int) -> bool:
    """Whether every so many heads are the same."""
    return torch.equal(x[:, ::groups], x[:, groups - 1 :: groups])


def mask_or_bias(numbers: Tensor) -> dict[str, Tensor]:
    """The option that a floating mask is: of bools, where it holds zeros and numbers that hide."""
    hidden = numbers <= torch.finfo(numbers.dtype).min / 2
    return {"mask": ~hidden} if bool(((numbers == 0) | hidden).all()) else {"bias": numbers}


def mask_and_bias(numbers: Tensor) -> dict[str, Tensor]:
    """The same where it holds others too: both, of which the mask tells what is padding."""
    found = mask_or_bias(numbers)
    hidden = numbers <= torch.finfo(numbers.dtype).min / 2
    if "mask" in found or not bool(hidden.any()):
        return found
    return {"mask": ~hidden, "bias": numbers.masked_fill(hidden, 0.0)}


def left_out(names: Collection[str]) -> str:
    """Names of modules as the subject of a sentence, with its verb."""
    first, *others = names
    if not others:
        return f"{first or 'the model'} is"
    more = f" and {len(others)} more" if len(others) > 1 else f" and {others[0]}"
    return f"{first or 'the model'}{more} are"


def has_no_numbers(*arrays: Any) -> bool:
    """Whether these stand for others: on no device, in ``vmap``, or while a graph is recorded."""
    if not is_tensor(arrays[0]):
        return False
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._are_functorch_transforms_active():
        transforms = get_interpreter_stack() or ()
        if any(one.key() == TransformType.Vmap for one in transforms):
            return True
    modes = torch._C._len_torch_dispatch_stack()
    if modes and any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()):
        return True
    return any(is_tensor(x) and x.is_meta for x in arrays)


def untracked(x: Any) -> Any:
    """An option, or what holds its numbers where ``torch.func.grad`` and its like follow it."""
    if isinstance(x, tuple):
        return tuple(untracked(part) for part in x)
    while is_tensor(x) and is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    return x


def allowed() -> dict[str, Any] | None:
    """The options of the call in this thread before those that choose among the keys."""
    return watching.allowed.get(threading.get_ident())
