"""Which backend serves a call, on which instruction set, and why not the others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Unpack

from regard._backends import choose, in_order
from regard._backends.kernel_calls import kernels
from regard._base.extras import NOT_BUILT
from regard._base.types import Array, ArrayT, BackendName
from regard._call.checks import given, read_call
from regard._call.hints import unknown_option
from regard._call.options import OPTIONS, Options


@dataclass(frozen=True)
class Explanation:
    """What serves a call of attention; as text, a line for each that does not."""

    backend: str
    """Its name."""
    target: str | None
    """The instruction set of the kernels; None where they do not serve the call."""
    others: dict[str, str]
    """Why each other backend does not serve it."""
    other_targets: dict[str, str]
    """Why the kernels do not use each other instruction set."""

    def __str__(self) -> str:
        by = f", with the instruction set {self.target}" if self.target else ""
        lines = [f"{self.backend} serves this call{by}."]
        for title, reasons in (("", self.others), ("instruction set ", self.other_targets)):
            lines += [f"  {title}{name}: {reason}." for name, reason in reasons.items()]
        return "\n".join(lines)


def explain(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT] | None = None,
    *,
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> Explanation:
    """Which backend serves a call, on which instruction set, and why not the others.

    Nothing is computed. What autograd, ``torch.compile`` or a transform of ``torch.func`` change
    is seen where it is called inside of them.

    Args:
        query, key, value: as in ``regard.attention``; without a value the weights alone are asked
            for, as of ``regard.AttentionWeights``.
        backend: ``"auto"``, or the name of one.
        options: as ``regard.attention``, except ``return_weights`` and ``return_statistics``.

    Raises:
        ShapeError, TypeError, ValueError: as ``regard.attention``.
        UnsupportedError: no backend, or not the one named, takes the call.

    Example:
        >>> import numpy as np
        >>> x = np.eye(3)
        >>> explain(x, x, x, backend="reference").backend
        'reference'
    """
    names = [option.name for option in OPTIONS]
    if unknown := options.keys() - names:
        raise unknown_option("explain", unknown, (*names, "backend"))
    call = read_call(query, key, value, **given(**options))
    chosen = choose(call, backend)
    others, is_before = {}, True
    for one in in_order(call):
        if one is chosen:
            is_before = False
            continue
        named = f"the call names {backend!r}" if backend != "auto" else None
        later = None if is_before else f"{chosen.name} comes before it"
        others[one.name] = named or one.refuses(call) or later or ""
    by_kernels = chosen.name == "kernel"
    target, other_targets = _targets() if by_kernels else (None, {})
    return Explanation(chosen.name, target, others, other_targets)


def _targets() -> tuple[str, dict[str, str]]:
    """The instruction set of the kernels, and why not each other one."""
    assert kernels is not None
    used, obstacles = kernels.target(), kernels.obstacles()
    asked = os.environ.get("REGARD_TARGET")
    reasons: dict[str, Any] = {}
    for name in kernels.preference(""):
        if name in obstacles:
            reasons[name] = obstacles[name]
        elif asked:
            reasons[name] = f"REGARD_TARGET={asked} names another"
        else:
            reasons[name] = f"{used} comes before it on this processor"
    reasons |= dict.fromkeys(kernels.targets_left_out(), NOT_BUILT)
    reasons.pop(used)
    return used, reasons
