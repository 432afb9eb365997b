"""Attention on GPUs by kernels in Triton: the backend."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from regard._backends.gather import gather_weights
from regard._backends.kernel import LARGEST_NUMBER, in_scores
from regard._backends.part_gradients import add_gradients
from regard._base import loaded
from regard._base.arrays import arrays_of, dtype_name, to_numpy
from regard._call.call import Call
from regard._call.options import REAL_NUMBERS

LARGEST_HEAD = 256
MOST_PROGRAMS = 2**16 - 1  # along the second and third axis of a grid
DEVICES = ("cuda", "xpu")  # cuda is AMD's too


class Triton:
    """See ``regard._backends.Backend``.

    Kernels compute output, row statistics, gradients, reductions, and blocks of weights, from which
    sums of weights are read. Second gradients and those of a bias are the torch backend's.
    """

    name = "triton"
    past_torch = False
    reads_statistics = True
    few_rows = 64  # of a tile of queries that share a key head, whose keys are split
    checks_on_device = True
    wide_scores = False

    def refuses(self, call: Call) -> str | None:
        if not call.is_torch:
            return "it takes torch tensors; convert with torch.from_numpy"
        return _refuses_numbers(call) or _refuses_device(call) or _refuses_state(call)

    def attention(self, call: Call, weights: bool) -> tuple[Any, tuple[Any, Any] | None]:
        from regard._backends import triton_ops

        out, maximum, total = triton_ops.attention(call)
        return out, (maximum, total) if weights else None

    def row_statistics(self, call: Call) -> tuple[Any, Any]:
        from regard._backends import triton_ops

        return triton_ops.forward(call.without_value())[1:]

    def score_unit(self, call: Call) -> float:
        return math.log(2)

    def finds_statistics(self, call: Call, fields: dict[str, Any]) -> bool:
        return False

    def reduce(
        self, call: Call, statistics: tuple[Any, Any] | None, fields: dict[str, Any]
    ) -> None:
        from regard._backends import triton_reduce

        assert statistics is not None
        triton_reduce.reduce(call, statistics, fields)

    def add_gradients(
        self, call: Call, grad: Any, delta: Any, statistics: tuple[Any, Any], sums: dict[str, Any]
    ) -> None:
        from regard._backends import triton_backward, triton_reduce

        if "bias" in sums:  # a number for each pair, maybe summed over some axes
            xp, blocks_of = arrays_of(call.query), triton_reduce.weight_blocks
            add_gradients(xp, call, grad, delta, statistics, sums, blocks_of)
            return
        given = grad.resolve_neg(), delta, statistics
        dtype = next(iter(sums.values())).dtype
        found = triton_backward.gradients(call, *given, sums.keys(), dtype)
        for name, x in found.items():
            sums[name] += x

    def gather(self, call: Call, statistics: tuple[Any, Any], queries: Any, keys: Any) -> Any:
        known = in_scores(self.score_unit(call), *map(to_numpy, statistics))
        return gather_weights(arrays_of(call.query), call, known, queries, keys)


class Fused(Triton):
    """torch's fused operator for plain outputs; all else as ``Triton``, which it extends.

    Where keys are masked, the operator lets NaN and overflows through: a kernel tells on the device
    which elements of the batch may have such, another computes these anew, and returns at once for
    the others. The host waits for nothing.
    """

    name = "fused"

    def refuses(self, call: Call) -> str | None:
        return super().refuses(call) or _refuses_fusing(call)

    def attention(self, call: Call, weights: bool) -> tuple[Any, tuple[Any, Any] | None]:
        from regard._backends import triton_ops

        return super().attention(call, True) if weights else (triton_ops.fused(call), None)


def _refuses_fusing(call: Call) -> str | None:
    if call.value is None:
        return "it computes outputs, and weights alone are asked for"
    torch = loaded.torch
    inputs = (call.query, call.key, call.value, call.bias, call.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return "its gradients have other bits in every run; the triton backend has gradients"
    from regard._backends import torch_ops, triton_ops

    if triton_ops.has_few_rows(call) and call.sizes[3] < call.sizes[4]:
        return "few queries of many keys are for the triton backend, without a plan per length"
    if not torch_ops.may_fuse(call):
        return "torch's fused operator does not mean the same with these sizes and options"
    return None


def _refuses_numbers(call: Call) -> str | None:
    if dtype_name(call.query) == "float64":
        return "it computes in float32; float64 is for the torch backend"
    sizes = call.query.shape[3], 0 if call.value is None else call.value.shape[3]
    if max(sizes) > LARGEST_HEAD:
        return f"its head sizes D and Dv go up to {LARGEST_HEAD}, these are {sizes}"
    if max(sizes := call.sizes[:2]) > MOST_PROGRAMS:
        return f"its batch and its heads go up to {MOST_PROGRAMS}, these are {sizes}"
    for name in REAL_NUMBERS:
        if abs(found := getattr(call, name) or 0.0) > LARGEST_NUMBER:
            return f"{name} is {found}, and it computes in float32"
    return None


def _refuses_device(call: Call) -> str | None:
    device = call.query.device.type
    if device != "cpu" and device not in DEVICES:
        return f"Triton has no kernels for {device}; it has for {', '.join(DEVICES)}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; it comes with torch for GPUs, or by pip install triton"
    if device == "cpu":
        from regard._backends import triton_jit

        if not triton_jit.INTERPRETED:
            return (
                "it computes on a GPU; move the tensors with .cuda(), or set TRITON_INTERPRET=1 "
                "before Python starts, and it is interpreted, slowly"
            )
    return None


def _is_plain(x: Any) -> bool:
    torch = loaded.torch
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _refuses_state(call: Call) -> str | None:
    torch = loaded.torch
    if not all(map(_is_plain, call.tensors)):
        return "it takes plain tensors"
    if torch._C._are_functorch_transforms_active():
        return "transforms of torch.func are for the torch backend"
    if not torch.compiler.is_compiling():
        if torch.autograd.forward_ad._current_level >= 0:
            return "it has no forward-mode derivative"
        if any(x.is_neg() for x in call.tensors):
            return "it reads memory, in which torch has yet to negate a tensor; see resolve_neg()"
    from regard._base.torch_state import is_exported_to_onnx, is_recorded

    if is_recorded() and is_exported_to_onnx():
        return "ONNX has no such operator"
    return None
