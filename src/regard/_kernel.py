"""Attention on the CPU by the compiled kernels: float32, forward."""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np

from regard._checks import Call, check_contents, dtype_name, is_tensor
from regard._settings import get_num_threads

LARGEST_HEAD = 256  # one sum over more numbers than these is less exact than the plain formula's


def _load() -> ModuleType | None:
    try:
        return importlib.import_module("regard._kernels")
    except ImportError:  # installed without a C++ compiler
        return None


kernels = _load()


def refuses(call: Call) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    if kernels is None:
        return "it is not in this install, which found no C++ compiler; install g++ and regard anew"
    if dtype_name(call.query) != "float32":
        return f"it computes float32, not {dtype_name(call.query)}"
    sizes = call.query.shape[3], call.value.shape[3]
    if max(sizes) > LARGEST_HEAD:
        return f"its head sizes D and Dv go up to {LARGEST_HEAD}, these are {sizes}"
    if call.dropout:
        return "it has no dropout"
    for name in ("bias", "sinks"):
        x = getattr(call, name)
        if x is not None and dtype_name(x) != "float32":
            return f"{name} is {dtype_name(x)}, and it reads float32"
    return _refuses_tensors(call) if call.is_torch else None


def _refuses_tensors(call: Call) -> str | None:
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "it cannot be traced"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward-mode derivative"
    tensors = [x for x in vars(call).values() if is_tensor(x)]
    if any(x.device.type != "cpu" for x in tensors):
        return "it computes on the CPU; move the tensors with .cpu()"
    if any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return "it takes plain tensors"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "it has no gradient; detach the tensors, or use torch.no_grad()"
    return None


def _array(x: Any, axes: int | None = None) -> tuple[int, list[int]]:
    """``(address, strides in elements)``; 0 for an axis of size 1, which is broadcast."""
    if is_tensor(x):
        address, strides = x.data_ptr(), x.stride()
    else:
        address = x.__array_interface__["data"][0]
        strides = tuple(n // x.itemsize for n in x.strides)
    return address, [0 if n == 1 else s for n, s in zip(x.shape, strides)][:axes]


def _rows(x: Any) -> Any:
    """x with its last axis contiguous."""
    if is_tensor(x):
        return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    plain = x.shape[-1] == 1 or (x.strides[-1] == x.itemsize and x.flags.aligned)
    return x if plain and all(n % x.itemsize == 0 for n in x.strides) else x.copy()


def _to_numpy(x: Any, dtype: Any) -> Any:
    x = x.numpy() if is_tensor(x) else x
    return np.ascontiguousarray(x, dtype)


def attention(call: Call) -> Any:
    """``(B, Hq, Lq, Dv)`` in float32."""
    assert kernels is not None
    check_contents(call)
    B, Hq, Hkv, Lq, Lk = call.sizes
    q, k, v = (_rows(x) for x in (call.query, call.key, call.value))
    Dv = v.shape[-1]
    shape = (B, Hq, Lq, Dv)
    out = q.new_empty(shape) if call.is_torch else np.empty(shape, np.float32)
    lengths = np.full(B, Lk) if call.key_lengths is None else _to_numpy(call.key_lengths, np.int64)
    starts = lengths - Lq if call.query_start is None else _to_numpy(call.query_start, np.int64)
    segments = (call.query_segments, call.key_segments)
    held = [None if x is None else _to_numpy(x, np.int64) for x in segments]
    sinks = None if call.sinks is None else _to_numpy(call.sinks, np.float32)
    if 0 in shape:
        return out
    with np.errstate(all="ignore"):  # one read; a sum that overflows only costs the careful way
        finite = math.isfinite(v.sum())
    kernels.forward(
        query=_array(q, 3), key=_array(k, 3), value=_array(v, 3), out=_array(out)[0],
        sizes=(B, Hq, Hkv, Lq, Lk, q.shape[-1], Dv), scale=call.scale, softcap=call.softcap or 0.0,
        causal=call.causal, left=-1 if call.left is None else call.left,
        right=-1 if call.right is None else call.right, starts=_array(starts),
        lengths=_array(lengths), query_segments=None if held[0] is None else _array(held[0]),
        key_segments=None if held[1] is None else _array(held[1]),
        mask=None if call.mask is None else _array(call.mask),
        bias=None if call.bias is None else _array(call.bias),
        sinks=None if sinks is None else _array(sinks),
        finite=finite, threads=get_num_threads(),
    )  # fmt: skip
    return out
