"""Whether weights can still be computed: no tensor was written to, and no graph is recorded.

torch counts writes into tensors; NumPy does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from regard._base import loaded
from regard._base.arrays import is_tensor
from regard._call.call import Call
from regard._call.options import OPTION_OF


class Version(NamedTuple):
    """A tensor, and how often it was written to when this was made."""

    name: str
    tensor: Any
    writes: int


def versions(call: Call) -> tuple[Version, ...]:
    """Those of all tensors that count writes: not in inference mode, nor while torch compiles."""
    if not call.is_torch or loaded.torch.compiler.is_compiling():
        return ()
    return versions_of(vars(call))


def versions_of(named: Mapping[str, Any]) -> tuple[Version, ...]:
    """Those of the tensors among some values that count writes."""
    told = ((name, x, _writes(x)) for name, x in named.items() if is_tensor(x))
    return tuple(Version(name, x, writes) for name, x, writes in told if writes is not None)


def version_of(name: str, x: Any) -> Version | None:
    """That of an array of the caller's; None where writes are not counted."""
    if not is_tensor(x) or loaded.torch.compiler.is_compiling():
        return None
    writes = _writes(x)
    return None if writes is None else Version(name, x, writes)


def _writes(x: Any) -> int | None:
    return None if x.is_inference() else x._version


def require_unwritten(known: tuple[Version, ...]) -> None:
    """Raises a RuntimeError if a tensor was written to."""
    if (name := first_written(known)) is not None:
        raise RuntimeError(
            f"weights: {name} was written to after they were made of it, and they are computed "
            "when asked for.\n  Ask before you write, or keep them: "
            "kept = weights.copy(), which has its own query and key."
        )


def told(known: tuple[Version, ...]) -> tuple[Version, ...]:
    """The same to be copied or stored: the counts of a copied tensor are its own.

    They have, in place of a count, how many writes they are behind.
    """
    return tuple(one._replace(writes=one.writes - one.tensor._version) for one in known)


def retold(found: tuple[Version, ...]) -> tuple[Version, ...]:
    """Those of tensors that were copied or read, from what ``told`` gave."""
    now = ((one, _writes(one.tensor)) for one in found)
    return tuple(one._replace(writes=one.writes + n) for one, n in now if n is not None)


def first_written(known: tuple[Version, ...]) -> str | None:
    """The name of a tensor that was written to, or None."""
    return next(all_written(known), None)


def all_written(known: tuple[Version, ...]) -> Iterator[str]:
    """The names of the tensors that were written to."""
    for name, tensor, writes in known:
        if tensor._version != writes:
            yield OPTION_OF.get(name, name)


def refuse_recorded(call: Call, past_torch: bool) -> None:
    """Raises an UnsupportedError where torch records a graph.

    Args:
        past_torch: whether the backend writes where torch does not see it.
    """
    if call.is_torch:
        from regard._base import torch_state

        torch_state.refuse_recorded(past_torch)
