"""How much memory a call takes."""

import tracemalloc
from collections.abc import Callable


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes of Python and NumPy at one time: the least of three calls, since what other
    threads of the process allocate meanwhile is counted too."""
    return min(_peak(call) for _ in range(3))


def _peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
