"""Who looks on at calls of ``regard.attention``: recorders and watches, or nobody."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Called with query, key, value and the options that are given, before the call is checked. It may
# return a function that the output is handed through.
Watcher = Callable[[Any, Any, Any, dict[str, Any]], Callable[[Any], Any] | None]
watchers: tuple[Watcher, ...] = ()
# Of each thread, the module whose attention is called, where the caller knows it.
modules: dict[int, Any] = {}
# Likewise the options of its call before those that choose among the keys, where there are any.
allowed: dict[int, dict[str, Any] | None] = {}
_lock = threading.Lock()


class Called:
    """Tells in the block whose attention this thread calls.

    Args:
        module: as in ``modules``.
        options: as in ``allowed``.
    """

    def __init__(self, module: Any, options: dict[str, Any] | None) -> None:
        self._module, self._options = module, options

    def __enter__(self) -> None:
        thread = threading.get_ident()
        modules[thread], allowed[thread] = self._module, self._options

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        del modules[thread], allowed[thread]


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Lets a watcher look on in the block, at the calls of all threads."""
    global watchers
    with _lock:
        watchers = (*watchers, watcher)
    try:
        yield
    finally:
        with _lock:
            watchers = tuple(one for one in watchers if one is not watcher)
