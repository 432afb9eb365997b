"""Who looks on at calls of ``regard.attention``: the recorder of ``regard.record``, or nobody."""

from collections.abc import Callable
from typing import Any

# Called with query, key, value and the options that are given, before the call is checked.
watcher: Callable[[Any, Any, Any, dict[str, Any]], None] | None = None
# Of each thread, the module whose attention is called, where the caller knows it.
modules: dict[int, Any] = {}
