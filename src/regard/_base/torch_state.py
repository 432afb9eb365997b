"""The state of torch around a call: who records or watches it, what would round its products."""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from regard._base import compiling
from regard._base.autocast import is_autocast
from regard._base.errors import UnsupportedError

# Bound once: a plain call calls them all, and looking them up takes longer than the calls.
_compiles = torch.compiler.is_compiling
_transforms = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiles = torch._C._autograd._profiler_enabled
is_batch = torch._C._functorch.is_legacy_batchedtensor
records_gradients = torch.is_grad_enabled
_forward_mode = torch.autograd.forward_ad
# That of torch.nn.functional, where another stands for a while: see ``torch_calls``.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
compiling.bind(_compiles, torch._C._dynamo.eval_frame.get_eval_frame_callback)


def is_recorded() -> bool:
    """Whether torch records a graph, or one run stands for many: values must decide nothing."""
    if _compiles() or _transforms() or _tracing_state() is not None:
        return True
    return _dispatch_modes() > 0 and any(
        mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()
    )


def is_watched() -> bool:
    """Whether something watches the operators: it would miss writes past torch."""
    return (
        _compiles()
        or _transforms()
        or _tracing_state() is not None
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _profiles()
    )


def is_real(x: Tensor) -> bool:
    """Whether it is a tensor of its own: no subclass, and no batch of ``is_grads_batched``."""
    return type(x) is Tensor and not is_batch(x)


def is_quiet() -> bool:
    """Whether nothing watches the operators or differentiates forwards; gradients may be wanted."""
    return not is_watched() and bool(_forward_mode._current_level < 0)


def is_plain(*tensors: object) -> bool:
    """Whether all are tensors in CPU memory that nothing watches or differentiates."""
    if not is_quiet():
        return False
    records, strided = records_gradients(), torch.strided
    for x in tensors:  # twice as fast as a generator
        if type(x) is not Tensor or x.layout is not strided or not x.is_cpu or x.is_neg():
            return False
        if records and x.requires_grad:
            return False
    return True


def is_exported_to_onnx() -> bool:
    """Whether the recorded graph becomes an ONNX model."""
    return torch.onnx.is_in_onnx_export()


# What torch.compiler.assume_constant_result sets, which loads the compiler: two seconds.
is_exported_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_recorded(past_torch: bool) -> None:
    """Refuses a graph: weights depend on values, and may be written past torch."""
    if torch.compiler.is_dynamo_compiling():
        return  # it breaks the graph there, and runs as it is
    if _tracing_state() is not None or _transforms() or (past_torch and is_recorded()):
        raise UnsupportedError(
            "weights: what is asked of them is computed at once, and cannot become part of a graph "
            "or a transform (torch.jit.trace, make_fx, torch.vmap). Return query and key from "
            "there, and ask regard.AttentionWeights(query, key) outside; or use torch.compile."
        )


_LOCK = threading.Lock()
_inside = 0
_found: tuple[str | None, list[str]] = None, []


# Where torch keeps the precision of float32 products: for the CPU and for CUDA.
_SETTINGS = ("mkldnn", "matmul"), ("cuda", "matmul")
_precision, _set_precision = (
    torch._C._get_fp32_precision_getter,  # a tenth of the time of torch.backends' attributes
    torch._C._set_fp32_precision_setter,
)


def is_rounded(device: str) -> bool:
    """Whether autocast or a lower precision would round the factors of float32 products."""
    if is_autocast(device):
        return True
    with _LOCK:
        return _inside > 0 or any(_precision(*x) not in ("none", "ieee") for x in _SETTINGS)


def _raise_precision() -> tuple[str | None, list[str]]:
    """Sets the highest precision; returns what was set: by the older interface, by the newer."""
    found = [_precision(*setting) for setting in _SETTINGS]
    try:
        older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:  # the newer one was used, and says something else
        older = None
    for setting in _SETTINGS:
        _set_precision(*setting, "ieee")
    return older, found


def _lower_precision(older: str | None, found: list[str]) -> None:
    """Restores the settings that ``_raise_precision`` found; inherited ones are inherited again."""
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for setting, value in zip(_SETTINGS, found):
        _set_precision(*setting, "none")
        if _precision(*setting) != value:
            _set_precision(*setting, value)


@contextlib.contextmanager
def exact(device: str) -> Iterator[None]:
    """Computes products in the dtype of their factors, whatever the process has set.

    Autocast belongs to the thread. The precision of float32 products is one for all threads, so the
    first that comes here raises it, and the last that leaves puts back what the first found.
    """
    global _inside, _found
    if not is_rounded(device):
        yield
        return
    with _LOCK:
        if _inside == 0:
            _found = _raise_precision()
        _inside += 1
    is_cast = is_autocast(device)
    try:
        with torch.autocast(device, enabled=False) if is_cast else contextlib.nullcontext():
            yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0:
                _lower_precision(*_found)


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``, exact in their dtype."""
    if not is_rounded(x.device.type):
        return x @ y
    with exact(x.device.type):
        return x @ y
