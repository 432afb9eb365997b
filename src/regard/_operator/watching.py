"""Who looks on at calls of ``regard.attention``: the recorder of ``regard.record``, or nobody."""

from collections.abc import Callable
from typing import Any

# Called with query, key, value and the options that are given, before the call is checked. It may
# return a function that the output is handed through.
watcher: Callable[[Any, Any, Any, dict[str, Any]], Callable[[Any], Any] | None] | None = None
# Of each thread, the module whose attention is called, where the caller knows it.
modules: dict[int, Any] = {}
