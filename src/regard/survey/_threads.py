"""How many threads the products of a survey take, on which their last bits depend."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from regard._base.extras import needed_by

with needed_by("regard.survey"):
    from threadpoolctl import ThreadpoolController, threadpool_limits

_CHANGED = threading.Condition()
_inside = 0  # threads of this process that compute a shard
_limits: Any = None
_count = 0


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """NumPy's products, and torch's where it is loaded, take so many threads in the block.

    NumPy's setting is the process': whoever asks for another number waits for the others to leave.
    """
    with _own_threads(count):
        _enter(count)
        try:
            with _torch_threads(count):
                yield
        finally:
            _leave()


def _enter(count: int) -> None:
    global _inside, _limits, _count
    with _CHANGED:
        _CHANGED.wait_for(lambda: not _inside or _count == count)
        if not _inside:
            _let_any_thread_set()
            _limits, _count = threadpool_limits(count, user_api="blas"), count
        _inside += 1


def _leave() -> None:
    global _inside
    with _CHANGED:
        _inside -= 1
        if not _inside:
            _let_any_thread_set()
            _limits.restore_original_limits()
            _let_any_thread_set()
            _CHANGED.notify_all()


def _let_any_thread_set() -> None:
    """From threadpoolctl 3.8 on, all but the thread that came first set nothing, in silence."""
    for library in ThreadpoolController().lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


@contextlib.contextmanager
def _own_threads(count: int) -> Iterator[None]:
    """Those of an OpenBLAS that is built on OpenMP, a setting of each thread."""
    own = [
        library
        for library in ThreadpoolController().lib_controllers
        if library.internal_api == "openblas" and library.threading_layer == "openmp"
    ]
    before = [library.num_threads for library in own]
    for library in own:
        library.set_num_threads(count)
    try:
        yield
    finally:
        for library, number in zip(own, before):
            library.set_num_threads(number)


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """torch's, a setting of each thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
