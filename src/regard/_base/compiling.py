"""Whether torch compiles what runs; torch is not loaded to find out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard._base import loaded

# Of torch, once ``torch_state`` is loaded: looking them up takes longer than the calls.
_compiles: Callable[[], bool] | None = None
_compiler: Callable[[], Any]


def bind(compiles: Callable[[], bool], compiler: Callable[[], Any]) -> None:
    """Says how torch tells that it compiles, and which compiler waits for functions."""
    global _compiles, _compiler
    _compiles, _compiler = compiles, compiler


def is_traced() -> bool:
    """Whether torch compiles what runs."""
    torch = loaded.torch
    return torch is not None and bool(torch.compiler.is_compiling())


def is_plain() -> bool:
    """Whether torch compiles neither what runs nor, as it comes to them, the functions it calls."""
    if _compiles is not None:
        return not _compiles() and _compiler() is None
    if (torch := loaded.torch) is None:
        return True
    waits = torch._C._dynamo.eval_frame.get_eval_frame_callback
    return not torch.compiler.is_compiling() and waits() is None
