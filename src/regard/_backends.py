"""The backends in their order of preference; each says why it refuses a call."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regard._checks import Call, is_tensor
from regard._errors import UnsupportedError

Statistics = tuple[Any, Any]  # maximum and total, (B, Hq, Lq): what the weights are computed from


@dataclass(frozen=True)
class Backend:
    """One implementation of the operator.

    ``attention`` takes a call and whether its weights will be asked for. It gives the output
    ``(B, Hq, Lq, Dv)`` and, where it has some, the row statistics.
    """

    name: str
    refuses: Callable[[Call], str | None]  # the reason, or None
    attention: Callable[[Call, bool], tuple[Any, Statistics | None]]


def _kernel_refuses(call: Call) -> str | None:
    from regard import _kernel

    return _kernel.refuses(call)


def _kernel_attention(call: Call, weights: bool) -> tuple[Any, Statistics | None]:
    if call.is_torch:
        from regard import _kernel_ops

        out, *statistics = _kernel_ops.forward(call, weights)
    else:
        from regard import _kernel

        out, *statistics = _kernel.forward(call, weights)
    return out, (statistics[0], statistics[1]) if weights else None


def _torch_refuses(call: Call) -> str | None:
    if not call.is_torch:
        return "it takes torch tensors; convert with torch.from_numpy"
    return None


def _torch_attention(call: Call, weights: bool) -> tuple[Any, None]:
    from regard import _torch_ops

    return _torch_ops.attention(call), None


def _reference_refuses(call: Call) -> str | None:
    if not call.is_torch:
        return None
    from regard import _torch_state

    if _torch_state.is_recorded():
        return "it computes in NumPy, which no graph or transform of torch can hold"
    torch = sys.modules["torch"]
    tensors = call.tensors
    if any(x.device.type != "cpu" for x in tensors):
        return "it computes on the CPU; move the tensors with .cpu()"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "it has no gradient; detach the tensors, or use torch.no_grad()"
    return None


def _reference_attention(call: Call, weights: bool) -> tuple[Any, None]:
    from regard import _reference

    if not call.is_torch:
        return _reference.attention(call), None
    torch = sys.modules["torch"]
    out = _reference.attention(_as_numpy(call))
    return torch.from_numpy(out).to(call.query.dtype), None


def _as_numpy(call: Call) -> Call:
    """The call on NumPy's view of the tensors; bfloat16, which NumPy lacks, becomes float32."""
    torch = sys.modules["torch"]

    def convert(x: Any) -> Any:
        if not is_tensor(x):
            return x
        x = x.detach()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()

    return Call(**{name: convert(x) for name, x in vars(call).items()})


BACKENDS = (
    Backend("kernel", _kernel_refuses, _kernel_attention),
    Backend("torch", _torch_refuses, _torch_attention),
    Backend("reference", _reference_refuses, _reference_attention),
)


def choose(call: Call, name: str) -> Backend:
    """The backend of that name, or the first that takes the call where it is ``auto``.

    Raises:
        ValueError: no backend has that name.
        UnsupportedError: it, or each of them, refuses; the text says why.
    """
    if name != "auto" and name not in [backend.name for backend in BACKENDS]:
        known = ", ".join(repr(backend.name) for backend in BACKENDS)
        raise ValueError(f"attention: backend is {name!r}; 'auto', {known} are known.")
    refusals = []
    for backend in BACKENDS:
        if name not in ("auto", backend.name):
            continue
        reason = backend.refuses(call)
        if reason is None:
            return backend
        refusals.append(f"\n  {backend.name}: {reason}.")
    raise UnsupportedError("attention: no backend takes this call." + "".join(refusals))
