"""Methods of weights where torch compiles: a question becomes an operator, or ends the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from regard._base.compiling import is_plain, is_traced

Method = TypeVar("Method", bound=Callable[..., Any])
QUESTIONS: set[str] = set()  # the names of methods whose answers ``traced`` knows the shapes of
PARTS: set[str] = set()  # of those that give parts


def question(method: Method) -> Method:
    """A method whose answer is tensors: in a graph one operator, which calls it."""
    QUESTIONS.add(method.__name__)
    return _handed_over(method, "ask")


def parting(method: Method) -> Method:
    """A method that gives a part of weights: in a graph it is cut once it is asked."""
    PARTS.add(method.__name__)
    return _handed_over(method, "cut")


def _handed_over(method: Method, name: str) -> Method:
    @functools.wraps(method)
    def call(self: Any, *values: Any, **options: Any) -> Any:
        if is_plain():
            return method(self, *values, **options)
        if not is_traced():
            return _outside(method, self, *values, **options)
        from regard._weights import traced

        return getattr(traced, name)(self, method, values, options)

    return call  # type: ignore[return-value]


def at_once(function: Method) -> Method:
    """A function that looks at values: the graph ends before it."""

    @functools.wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        if is_plain():
            return function(*values, **options)
        return _outside(function, *values, **options)

    return call  # type: ignore[return-value]


def _outside(function: Any, *values: Any, **options: Any) -> Any:
    """Calls it where torch neither compiles nor waits for functions to compile."""
    from regard._backends.torch_questions import at_once

    return at_once(function, *values, **options)
