"""Calls that end a graph of torch's compiler: ranks wait for each other between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from regard._base.compiling import is_plain

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which runs as it is also where torch compiles what calls it."""

    @functools.wraps(function)
    def call(*given: P.args, **options: P.kwargs) -> R:
        if is_plain():
            return function(*given, **options)
        from regard.distributed._graph_end import at_once  # it loads torch's compiler

        found: R = at_once(function, *given, **options)
        return found

    return call
