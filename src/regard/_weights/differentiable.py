"""When what is asked of the weights becomes part of torch's graph, and how."""

from __future__ import annotations

import sys
from typing import Any

from regard._base.errors import UnsupportedError
from regard._call.call import Call

INPUTS = ("query", "key", "bias", "sinks")


def may_differentiate(call: Call) -> bool:
    """Whether autograd may want gradients of these inputs, or torch compiles."""
    if not call.is_torch:
        return False
    given = (getattr(call, name) for name in INPUTS)
    return is_traced() or any(x is not None and x.requires_grad for x in given)


def is_traced() -> bool:
    """Whether torch compiles what runs."""
    return bool(sys.modules["torch"].compiler.is_compiling())


def differentiable(graph: Call | None) -> Call | None:
    """The call with its gradients, where they are wanted now."""
    if graph is None:
        return None
    return graph if is_traced() or sys.modules["torch"].is_grad_enabled() else None


def rest_of(
    fields: dict[str, Any], graph: Call, backend: str, statistics: tuple[Any, Any] | None
) -> dict[str, Any]:
    """Fills those fields of a reduction that have a gradient, and gives the others.

    Args:
        statistics: of the rows, in NumPy, where the backend reads them.
    """
    from regard._backends.torch_reductions import FIELDS, Asked, reduce

    names = [name for name in fields if name in FIELDS]
    if not names:
        return fields
    if not graph.whole_rows:
        raise UnsupportedError(
            "weights: a part with some of the keys has no gradient, since its rows are not whole."
            " Take weights.mass(keys), weights.blocks(...), weights @ x or rows, weights[..., keys];"
            " or compute it in torch.no_grad()."
        )
    torch = sys.modules["torch"]
    known = None if statistics is None else tuple(map(torch.from_numpy, statistics))
    for name in names:
        fields[name].copy_(reduce(Asked.of(name, fields), graph, backend, known))
    return {}
