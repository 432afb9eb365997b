"""Whether a text, or the training of a model, fits into the memory that is free."""

from __future__ import annotations

import os
from pathlib import Path

from regard._base.errors import MaterializeError
from regard._base.settings import as_float, bytes_text, counted


def free_bytes() -> int | None:
    """Memory that can be used without swapping; None where it is unknown."""
    limits = [limit for limit in (_machine_bytes(), _group_bytes()) if limit is not None]
    return min(limits, default=None)


def require_memory(tokens: int, bytes_per_token: int) -> None:
    """Raises MaterializeError where this many tokens need more than what is free."""
    free = free_bytes()
    needed = tokens * bytes_per_token
    if free is not None and needed > free:
        raise MaterializeError(
            f"The text has {tokens:,} tokens; reading them needs {as_float(needed) / 1e9:.1f} GB,"
            f" and {free / 1e9:.1f} GB are free.\n"
            f"  Give at most {counted(free // bytes_per_token, 'token')} of it at a time."
        )


def require_free(needed: int, what: str, way_out: str) -> None:
    """Raises MaterializeError where ``what`` needs more than what is free; ends in ``way_out``."""
    free = free_bytes()
    if free is not None and needed > free:
        raise MaterializeError(
            f"{what} needs {bytes_text(needed)}, and {bytes_text(free)} are free. {way_out}."
        )


def _machine_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _free_pages()


def _free_pages() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _group_bytes() -> int | None:
    """The memory that a container still allows: Linux control groups, version 2."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        return int(limit) - int(used)
    except (OSError, ValueError):
        return None
