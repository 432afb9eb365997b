"""``regard.hf.check``: which attention of a model regard computes, and which it does not."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

from torch.nn import Module
from transformers import PreTrainedModel

from regard._base.settings import counted
from regard.capture._kind import is_attention


class Checked(NamedTuple):
    """The modules of a model that compute attention.

    Attributes:
        served: names of those whose attention regard computes.
        own: names of those that compute it by themselves, each with its class.
    """

    served: tuple[str, ...]
    own: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        """Whether regard computes all attention of the model."""
        return bool(self.served) and not self.own

    def __str__(self) -> str:
        lines = [f"regard computes the attention of {counted(len(self.served), 'module')}."]
        if not self.served and not self.own:
            return "The model has no attention that transformers knows of."
        if self.own:
            compute = "1 computes its" if len(self.own) == 1 else f"{len(self.own)} compute their"
            lines.append(f"{compute} own, and nothing of it is seen:")
            lines += [f"  {name or '(the model)'}  {kind}" for name, kind in self.own]
        return "\n".join(lines)


def check(model: Module) -> Checked:
    """Tells which attention of a model goes through transformers' interface.

    Args:
        model: of transformers.

    Returns:
        A ``Checked``, true where regard computes all of it; ``print`` it.

    Raises:
        TypeError: no model of transformers.
    """
    model = getattr(model, "_orig_mod", model)  # of what torch.compile gives
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"check: {type(model).__name__} is no model of transformers; regard.patch_torch and "
            "regard.record serve other models of torch."
        )
    served, own = [], []
    named = dict(model.named_modules())
    for name, module in named.items():
        kind = type(module)
        if _asks_interface(kind):
            served.append(name)
        elif is_attention(kind) and not _has_attention(module):
            own.append((name, kind.__name__))
    return Checked(tuple(served), tuple(own))


@functools.lru_cache(64)
def that_ask(kinds: frozenset[type]) -> frozenset[type]:
    """Those of these classes of modules that ask the interface for a function."""
    return frozenset(kind for kind in kinds if _asks_interface(kind))


def with_own_attention(names: Mapping[Module, str], asking: Collection[type]) -> dict[Module, str]:
    """Those modules that compute attention by themselves, as ``check`` finds them.

    Args:
        names: of the modules of a model, each before those within it.
        asking: classes that ask the interface.
    """
    named = {module: name for module, name in names.items() if is_attention(type(module))}
    return {
        module: name
        for (module, name), (_, after) in pairwise([*named.items(), (None, "")])
        if module is not None and type(module) not in asking and not after.startswith(f"{name}.")
    }


def _asks_interface(kind: type) -> bool:
    """Whether a method of the class asks the interface for a function."""
    for base in kind.__mro__:
        if base is PreTrainedModel:  # which knows it, and asks for nobody's attention
            return False
        for method in vars(base).values():
            code = getattr(method, "__code__", None)
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
    return False


def _has_attention(module: Module) -> bool:
    """Whether another module within it is the one that computes."""
    return any(is_attention(type(child)) for child in module.modules() if child is not module)
