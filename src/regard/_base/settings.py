"""Settings of the process: the size limit and the number of threads."""

import math
import numbers
import os
import re
from types import ModuleType
from typing import Any

from regard._base import loaded
from regard._base.errors import MaterializeError

MOST_THREADS = 2**31 - 1  # that torch and the kernels count

_weights_bytes: float = 2e9
_num_threads: int | None = None


class limits:  # noqa: N801 - used like a function, and as a context manager
    """Sets the size above which whole matrices are refused.

    Takes effect at once and stays; as a context manager it is taken back at the end:
    ``with regard.limits(weights_bytes=8e9): np.asarray(weights)``. It may be entered again.

    Args:
        weights_bytes: bytes that one materialised matrix of weights, or one Steps, may take
            (2 GB unless it is set).

    Raises:
        ValueError: a size that is not positive.
        TypeError: not a number.
    """

    def __init__(self, *, weights_bytes: float) -> None:
        global _weights_bytes
        if not isinstance(weights_bytes, numbers.Real) or isinstance(weights_bytes, bool):
            raise TypeError(f"limits: weights_bytes is {weights_bytes!r}; a number is needed.")
        if not weights_bytes > 0:
            raise ValueError(
                f"limits: weights_bytes is {weights_bytes}; it must be positive. "
                "Pass a number of bytes, such as weights_bytes=8e9."
            )
        self._limit: float = as_float(weights_bytes)
        self._replaced: float | None = _weights_bytes  # until a block takes it back
        self._before: list[float] = []  # of the blocks that are open
        _weights_bytes = self._limit

    def __enter__(self) -> None:
        global _weights_bytes
        before = _weights_bytes
        if self._replaced is not None and before == self._limit:
            before = self._replaced
        self._before.append(before)
        self._replaced, _weights_bytes = None, self._limit

    def __exit__(self, *_: object) -> None:
        global _weights_bytes
        _weights_bytes = self._before.pop()


def as_float(x: Any) -> float:
    """A number as a float; ±∞ where it is too large for one."""
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def counted(count: int, noun: str, several: str = "") -> str:
    """``1 token`` or ``1,024 tokens``; ``several``: the plural that does not end in s alone."""
    number = "{:,}".format(int(count))  # noqa: UP032 - an f-string of a dynamic size fails in torch
    return f"{number} {noun if count == 1 else several or noun + 's'}"


def bytes_text(size: float) -> str:
    """A number of bytes for people: ``34.4 GB``."""
    size = as_float(size)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def require_materializable(
    what: str, shape: tuple[int, ...], bits: int, way_out: str, of: str | None = None
) -> None:
    """Raises MaterializeError where an array of this shape and item size is above the limit.

    Args:
        of: what its items are, where they are no floats of so many bits.
    """
    size = bits // 8
    for n in shape:
        size *= int(n)
    if size > _weights_bytes:
        raise MaterializeError(
            f"{what}: {tuple(int(n) for n in shape)} {of or f'float{bits}'} is {bytes_text(size)}, "
            f"limit {bytes_text(_weights_bytes)}.\n"
            f"  {way_out}; or raise regard.limits(weights_bytes=...)."
        )


def set_num_threads(threads: int) -> None:
    """Sets how many CPU threads attention uses, torch's intra-op threads included.

    Torch may be loaded before or after.
    NumPy's own products follow the variable of their BLAS (``OMP_NUM_THREADS`` for most), which
    is read when NumPy is loaded.

    Raises:
        TypeError: not an int.
        ValueError: less than one, or more than 2**31 - 1.
    """
    global _num_threads
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise TypeError(
            f"set_num_threads: threads is {type(threads).__name__} {threads!r}; pass an int."
        )
    if threads < 1:
        raise ValueError(f"set_num_threads: threads is {threads}; at least 1 is needed.")
    if threads > MOST_THREADS:
        raise ValueError(
            f"set_num_threads: threads is {threads}; more than 2**31 - 1 cannot be counted."
        )
    _num_threads = threads
    if (torch := loaded.torch) is not None:
        torch.set_num_threads(threads)


def pass_threads_to(torch: ModuleType) -> None:
    """Gives torch, which was just loaded, the number of threads that was set before."""
    if _num_threads is not None:
        torch.set_num_threads(_num_threads)


def get_num_threads() -> int:
    """How many CPU threads attention uses.

    What ``set_num_threads`` set, else torch's setting when torch is loaded, else
    ``OMP_NUM_THREADS`` (the first of a list), else every core that this process may run on.
    """
    if _num_threads is not None:
        return _num_threads
    if (torch := loaded.torch) is not None:
        return int(torch.get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if re.fullmatch("[0-9]{1,10}", asked) and 0 < int(asked) <= MOST_THREADS:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
