"""The layers of a model by the names of its modules: numbers of layers, and groups of a kind."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from torch import nn
from torch.nn import Module

from regard.capture._kind import CROSS

Place = tuple[str, int]
# They have no attention, and no modules of their own.
SIMPLEST = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.Dropout}


def names_of(model: Module) -> dict[Module, str]:
    """The modules of a model in their order, each by its first name, without torch's simplest.

    A third of ``named_modules``' time.
    """
    found: dict[Module, str] = {}
    left = [("", model)]
    while left:
        name, module = left.pop()
        if module in found:
            continue
        found[module] = name
        before = f"{name}." if name else ""
        own = reversed(module._modules.items())
        left += [(before + n, x) for n, x in own if x is not None and type(x) not in SIMPLEST]
    return found


def places(modules: Mapping[str, Module]) -> dict[str, Place]:
    """For each module of a model, by its name in it, its pattern and its number as a layer.

    The pattern is the name without numbers; modules of one class and pattern are layers of one
    kind. A layer's number is the one in its name that is another in each, as 5 in
    ``"model.layers.5.self_attn"``; where there is none they are counted.
    """
    kinds: dict[type, list[str]] = defaultdict(list)
    for name, module in modules.items():
        kinds[type(module)].append(name)
    found: dict[str, Place] = {}
    for names in kinds.values():
        found |= _of_one_class(tuple(names))
    return found


@functools.lru_cache(64)
def _of_one_class(names: tuple[str, ...]) -> dict[str, Place]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"\d+", "*", name)].append(name)
    found = {}
    for pattern, members in kinds.items():
        numbers = [[int(n) for n in re.findall(r"\d+", name)] for name in members]
        own = next((column for column in zip(*numbers) if len(set(column)) == len(members)), None)
        for name, number in zip(members, own or range(len(members))):
            found[name] = pattern, number
    return found


class Occurrences:
    """Which layer each call of attention in a pass is: a module may compute several."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def clear(self) -> None:
        """A pass begins: the attention of every module occurs for the first time again."""
        self._count.clear()

    def next(self, name: str, places: Mapping[str, Place], others: int) -> tuple[int, Place]:
        """The next call's occurrence in the module of that name, and its place.

        Args:
            places: of the modules of that kind.
            others: the number of a layer outside modules.
        """
        occurrence = self._count.get(name, 0)
        self._count[name] = occurrence + 1
        pattern, number = places.get(name, ("", others))
        if occurrence and sum(own == pattern for own, _ in places.values()) == 1:
            number += occurrence  # one module is all the layers, as in ALBERT
        elif occurrence:
            pattern = f"{pattern} {occurrence + 1}"
        return occurrence, (pattern, number)


def group_names(patterns: list[str], crosses: Iterable[bool] = ()) -> list[str]:
    """A short name for each group of layers: none where there is one group.

    Calls outside modules have none of their own: they are ``"call"``, ``"call 2"``.

    Args:
        patterns: of the groups.
        crosses: of each, whether it is known to be cross-attention, for those of one pattern.
    """
    if len(patterns) == 1:
        return [""]
    patterns = [pattern if pattern.split(" ")[0] else f"call{pattern}" for pattern in patterns]
    parts = [pattern.split(".") for pattern in patterns]
    names: list[str] = []
    has_decoder = any("decoder" in own for own in parts)
    for own, crosses_one in zip_longest(parts, crosses):
        told = [word for word in own if any(word not in other for other in parts)]
        if has_decoder and ("decoder" in own or "encoder" in own):
            side = "decoder" if "decoder" in own else "encoder"
            is_cross = CROSS.search(own[-1]) or CROSS.search(".".join(told))
            name = "cross" if is_cross or (crosses_one and parts.count(own) > 1) else side
        else:
            name = told[0] if told else ".".join(own)
        names.append(name)
    for n, name in enumerate(names):
        if names.count(name) > 1:
            names[n] = patterns[n]
    given = [*names]
    for n, name in enumerate(given):
        count = 1
        while names[n] in names[:n] or (count > 1 and names[n] in given):
            count += 1
            names[n] = f"{name} {count}"
    return names
