"""The end of a graph of torch's compiler, for ``_uncompiled``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _run(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    return function(*given, **options)


at_once = torch.compiler.disable(
    _run, reason="regard.distributed is collective: it runs between graphs, without fullgraph=True"
)
"""Calls a function outside of the graph, which ends there."""
