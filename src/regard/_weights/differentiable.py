"""When what is asked of the weights becomes part of torch's graph, and how."""

from __future__ import annotations

from typing import Any

from regard._base import loaded
from regard._base.arrays import is_tensor
from regard._base.compiling import is_traced
from regard._base.errors import UnsupportedError
from regard._call.call import Call

INPUTS = ("query", "key", "bias", "sinks")


def may_differentiate(call: Call) -> bool:
    """Whether autograd may want gradients of these inputs, or torch compiles."""
    if not call.is_torch:
        return False
    given = (getattr(call, name) for name in INPUTS)
    return is_traced() or any(x is not None and x.requires_grad for x in given)


def differentiable(graph: Call | None) -> Call | None:
    """The call with its gradients, where they are wanted now."""
    if graph is None:
        return None
    return graph if loaded.torch.is_grad_enabled() else None


def needs_gradient(call: Call, x: Any) -> bool:
    """Whether the gradient of what is computed of a call, and maybe a tensor, is wanted now."""
    given = (*(getattr(call, name) for name in INPUTS), x)
    wanted = any(one is not None and one.requires_grad for one in given)
    return wanted and bool(loaded.torch.is_grad_enabled())


def is_differentiated(x: Any) -> bool:
    """Whether the gradient of what is computed of an array is wanted."""
    return is_tensor(x) and x.requires_grad and loaded.torch.is_grad_enabled()


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
    require_whole_rows(graph)
    known = _tensors(statistics)
    for name in names:
        fields[name].copy_(reduce(Asked.of(name, fields), graph, backend, known))
    return {}


def require_whole_rows(graph: Call) -> None:
    """Raises where a gradient would lack that of the keys which a part does not have."""
    if not graph.whole_rows:
        raise UnsupportedError(
            "weights: a part with some of the keys has no gradient, since its rows are not whole."
            " Take weights.mass(keys), weights.blocks(...), weights @ x, or the keys of rows,"
            " weights[..., keys]; or compute it in torch.no_grad()."
        )


def _tensors(statistics: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
    if statistics is None:
        return None
    maximum, total = map(loaded.torch.from_numpy, statistics)
    return maximum, total


def block_of(call: Call, backend: str, statistics: tuple[Any, Any] | None) -> Any:
    """All weights of a call, ``(B, Hq, Lq, Lk)``, with their gradient."""
    from regard._backends.torch_reductions import Asked, reduce

    return reduce(Asked("weights"), call, backend, _tensors(statistics))


def pairs_with_gradient(graph: Call, lse: Any, weights: Any, i: Any, j: Any) -> Any:
    """The weights of some pairs with the gradient of ``exp(s − lse)``, and their own numbers.

    Args:
        lse: ``(..., Hq, Lq)``, with its gradient.
        weights: ``(B, Hq, n)``, without.
        i, j: ``n`` indices in all, of NumPy.
    """
    from regard._backends.torch_gradients import scores_of_pairs

    torch = loaded.torch
    i, j = (torch.tensor(x.reshape(1, 1, -1), device=graph.query.device) for x in (i, j))
    used = weights != 0
    s = scores_of_pairs(graph, i, j, used)
    change = s - lse.reshape(graph.query.shape[:3])[:, :, i[0, 0]].to(s.dtype)
    change = torch.where(used, change - change.detach(), 0.0)  # 0, with a gradient
    return weights * (1 + change)


def largest_with_gradient(graph: Call, found: Any, i: Any, j: Any) -> Any:
    """The largest score of each head, ``(B, Hq)``, with the gradient of one pair's.

    Args:
        i, j: ``(B, Hq)`` int64 of NumPy: a pair that has it.
    """
    from regard._backends.torch_gradients import scores_of_pairs

    torch = loaded.torch
    i, j = (torch.tensor(x[..., None], device=graph.query.device) for x in (i, j))
    used = found.isfinite()
    s = scores_of_pairs(graph, i, j, used[..., None])[..., 0]
    change = torch.where(used, s - s.detach(), 0.0)
    return found + change


def with_gradient(value: Any, graph: Call, gradient_of_block: Any, gradients_of: Any) -> Any:
    """See ``regard._backends.torch_reductions``."""
    from regard._backends.torch_reductions import with_gradient

    return with_gradient(value, graph, gradient_of_block, gradients_of)
