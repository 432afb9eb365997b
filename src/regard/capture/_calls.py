"""The calls of attention that modules of torch make, handed over under the modules' names."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard._base.errors import UnsupportedError
from regard._operator import watching
from regard._operator.attention import torch_call
from regard._operator.torch_calls import Running, TorchAttention

# Called with the name of a module, the query, key, value and options of its attention, and a
# function that tells whether queries and keys are known to be of the same tokens. It may return a
# function that the output is handed through.
AreOfOne = Callable[[], bool]
Take = Callable[[str, Any, Any, Any, dict[str, Any], AreOfOne], Callable[[Any], Any] | None]

NOT_SEEN = (
    "What is seen is regard.attention, torch.nn.functional.scaled_dot_product_attention, and what "
    "is built on them; a model that multiplies query and key by itself is not."
)


@contextlib.contextmanager
def calls_taken(
    running: Running,
    take: Take,
    refuse: Callable[[str, Exception], None] | None = None,
    explains: bool = False,
) -> Iterator[None]:
    """Hands every call of attention to ``take``: torch's of this thread, regard's of all.

    Args:
        running: knows the names of modules.
        take: gets what torch's operator is called with as it would be for ``regard.attention``.
        refuse: gets the name of a module and why its call cannot be that; by default it is raised.
        explains: whether outputs must be handed through what ``take`` returns.
    """

    taken = False  # a call that is being computed, maybe by regard

    def take_own(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
        are_of_one = functools.partial(running.are_of_one, query, key)
        return None if taken else take(running.name, query, key, value, options, are_of_one)

    def compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        hand_on = None
        try:
            q, k, v, options = torch_call(*args, **kwargs)
            if "bias" in options:
                options |= {"bias": None} | mask_and_bias(options["bias"])
        except Exception as error:
            if refuse is None:
                raise
            refuse(running.name, error)
        else:
            hand_on = take_own(q, k, v, options)
        taken, before = True, taken
        try:
            output = operator(*args, **kwargs)
        finally:
            taken = before
        return output if hand_on is None else hand_on(output)

    def weigh(function: Any, named: dict[str, Any], within: Any) -> Any:
        if explains:
            raise UnsupportedError(
                "record: explain does not see what torch.nn.MultiheadAttention computes where it "
                "returns weights; call it with need_weights=False."
            )
        quiet = {"need_weights": False, "dropout_p": 0.0, "training": False}
        with torch.no_grad():  # once more, for its query and key
            within(function, named | quiet)
        return function(**named)

    with running.followed(), TorchAttention(compute, weigh), watching.watched(take_own):
        yield


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


def is_in_backward() -> bool:
    """Whether torch computes gradients, where checkpoints compute once more."""
    return torch._C._current_graph_task_id() != -1


def allowed() -> dict[str, Any] | None:
    """The options of the call in this thread before those that choose among the keys."""
    return watching.allowed.get(threading.get_ident())
