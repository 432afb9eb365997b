"""Attention, its gradient and its weights on torch tensors of any device, block by block.

The blocks are those of the reference, in float32 (float64 for float64). Nothing here is recorded
by autograd: ``_torch_ops`` makes two operators of it.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._checks import Call, check_contents
from regard._dropout import kept
from regard._settings import pass_threads_to
from regard._torch_state import product
from regard._visible import Visibility, WeightBlock, blocks, part

pass_threads_to(torch)

BLOCK_ELEMENTS = 2**16  # 256 KB of float32: at 512 keys, 1.6 times as fast as blocks of 4 MB
DEVICE_BLOCK_ELEMENTS = 2**19  # up to 16 MB: a device wants few and large launches


# Of query, key, value, bias and sinks; None where the last two are absent.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are held in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def aranges(device: torch.device) -> Any:
    """``torch.arange`` on a device."""
    return functools.partial(torch.arange, device=device)


def key_heads(x: Tensor, call: Call, b: slice, h: slice) -> Tensor:
    """The heads of key or value that the query heads h share, in the accumulating dtype."""
    group = call.sizes[1] // call.sizes[2]
    own = x[b if len(x) > 1 else slice(None), h.start // group : h.stop // group]
    return own.to(accumulating(x.dtype))


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` for ``(b, h, m, n)`` and ``(b or 1, kv, n, o)``: neighbouring heads share one."""
    b, h, m, n = x.shape
    kv = y.shape[1]
    return product(x.reshape(b, kv, h // kv * m, n), y).reshape(b, h, m, y.shape[-1])


def products(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """``scale · q·kᵀ`` of a block."""
    return matmul(q, k.transpose(-1, -2)) * call.scale


def scores(call: Call, s: Tensor, *block: slice) -> Tensor:
    """Products, capped and with bias: ``(b, h, rows, keys)``, not yet masked."""
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        s = s + part(call.bias, *block).to(s.dtype)
    return s


def _sum(x: Tensor) -> Tensor:
    """The sum of each row ``(..., 1)``: one weight of 1 may stand beside a million of 1e-8.

    Stretches in the dtype of x, and these in float64, which alone would take five times as long.
    """
    n = x.shape[-1] // 256
    wide = torch.float64 if x.device.type == "cpu" else x.dtype  # a device adds in trees
    stretches = x[..., : n * 256].unflatten(-1, (n, 256)).sum(-1)
    rest = x[..., n * 256 :].sum(-1, keepdim=True)
    return (stretches.sum(-1, keepdim=True, dtype=wide) + rest).to(x.dtype)


def log_softmax(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``s − maximum``, the maximum and the sum of the exponentials of each row ``(..., 1)``.

    Where nothing is visible the maximum is −∞ and the sum 0.
    """
    if s.shape[-1] == 0:
        nothing = s.new_full((*s.shape[:-1], 1), -torch.inf)
        return s, nothing, torch.zeros_like(nothing)
    maximum = s.amax(-1, keepdim=True)
    empty = maximum == -torch.inf
    if sinks is not None:
        sink = sinks.to(s.dtype)[:, None, None]
        maximum = torch.where(empty, maximum, torch.maximum(maximum, sink))
    s = s - maximum.masked_fill(empty, 0.0)
    total = _sum(s.exp())
    if sinks is not None:
        total = total + torch.where(empty, 0.0, torch.exp(sink - maximum))
    return s, maximum, total


def weight_blocks(call: Call, rows: slice | None = None) -> Iterator[WeightBlock]:
    """The weights in blocks of whole rows, in the accumulating dtype; without a gradient."""
    check_contents(call)
    visibility = Visibility(call, aranges(call.query.device))
    dtype = accumulating(call.query.dtype)
    held = None
    on_cpu = call.query.device.type == "cpu"
    elements, tallest = (BLOCK_ELEMENTS, 128) if on_cpu else (DEVICE_BLOCK_ELEMENTS, 4096)
    for block in blocks(call, visibility, elements, rows, tallest):
        if held != (held := block[:2]):
            k = key_heads(call.key[:, :, : visibility.end(block[0].start, rows)], call, *held)
        b, h, i, j = block
        s = scores(call, products(call, call.query[b, h, i].to(dtype), k[:, :, j]), *block)
        visible = visibility.pairs(*block)
        if visible is not None:
            s = s.masked_fill(~visible, -torch.inf)
        sinks = None if call.sinks is None else call.sinks[h]
        start = visibility.starts[b.start]
        yield WeightBlock(*block, start, call.query_step, visible, *log_softmax(s, sinks))


def _apply(w: Tensor, visible: Tensor | None, v: Tensor) -> Tensor:
    """``w @ v`` in which an invisible value takes no part, not even as 0 · NaN or 0 · inf."""
    finite = torch.isfinite(v)
    if visible is None or finite.all():
        return matmul(w, v)

    def count(where: Tensor, what: Tensor) -> Tensor:
        return matmul(where.to(w.dtype), what.to(w.dtype)) > 0

    visible = visible.expand_as(w)
    out = matmul(w, v.masked_fill(~finite, 0.0))
    up = count(w > 0, v == torch.inf) | count(w < 0, v == -torch.inf)
    down = count(w > 0, v == -torch.inf) | count(w < 0, v == torch.inf)
    undefined = count(visible, v.isnan()) | count(visible & (w == 0), v.isinf())
    undefined = undefined | (up & down) | w.isnan().any(-1, keepdim=True)
    out = out.masked_fill(up, torch.inf).masked_fill(down & ~up, -torch.inf)
    return out.masked_fill(undefined, torch.nan)


def _kept(call: Call, block: WeightBlock) -> Tensor | None:
    """Bool ``(b, h, rows, keys)``: the weights that the seed keeps; None without dropout."""
    if not call.dropout:
        return None
    B, Hq = call.sizes[:2]
    arange = aranges(block.shifted.device)
    heads = arange(0, B)[block.b, None] * Hq + arange(0, Hq)[block.h]
    return kept(call.seed, call.dropout, heads, block.rows, block.keys, arange, torch.stack)


def _drop(call: Call, keep: Tensor | None, x: Tensor) -> Tensor:
    """x with 0 for what is not kept, and the rest grown by ``1 / (1 − dropout)``."""
    return x if keep is None else x.masked_fill(~keep, 0.0) / (1 - call.dropout)


def attention(call: Call) -> Tensor:
    """``(B, Hq, Lq, Dv)`` in the dtype of the query, block by block."""
    B, Hq, _, Lq, _ = call.sizes
    out = call.query.new_zeros((B, Hq, Lq, call.value.shape[-1]))
    held = None
    for block in weight_blocks(call):
        if held != (held := (block.b, block.h)):
            v = key_heads(call.value, call, *held)
        w = _drop(call, _kept(call, block), block.weights)
        out[block.index] = _apply(w, block.visible, v[:, :, block.keys]).to(out.dtype)
    return out


def _accumulate(total: Tensor, x: Tensor, *where: slice) -> None:
    """Adds x to a part of the total, summed over the axes in which the total has size 1."""
    own = part(total, *where)
    axes = [a for a, (n, m) in enumerate(zip(x.shape, own.shape)) if m == 1 and n != 1]
    own += x.sum(axes, keepdim=True) if axes else x


def _finite(x: Tensor) -> Tensor:
    return x if x.isfinite().all() else torch.where(x.isfinite(), x, 0.0)


def _hide(x: Tensor, visible: Tensor | None) -> Tensor:
    return x if visible is None else x.masked_fill(~visible, 0.0)


def _outer(x: Tensor, y: Tensor, kv: slice) -> Tensor:
    """``xᵀ @ y`` summed over the heads of a group: ``(b, kv, keys, D)``."""
    b, h, m, n = x.shape
    heads = kv.stop - kv.start
    rows = h // heads * m
    x = x.reshape(b, heads, rows, n).transpose(-1, -2)
    return product(x, y.reshape(b, heads, rows, y.shape[-1]))


def _weighted(w: Tensor, visible: Tensor | None, do: Tensor, kv: slice) -> Tensor:
    """``wᵀ @ do`` of a group: what is no number in do stays with the keys that its query sees."""
    if visible is None or do.isfinite().all():
        return _outer(w, do, kv)
    of_heads = _apply(w.mT, visible.expand_as(w).mT, do)
    return of_heads.unflatten(1, (kv.stop - kv.start, -1)).sum(2)


def _shared(call: Call, h: slice) -> slice:
    """The key heads that the query heads h share."""
    group = call.sizes[1] // call.sizes[2]
    return slice(h.start // group, h.stop // group)


def _sink_weight(call: Call, block: WeightBlock) -> Tensor | float:
    """``(b, h, rows, 1)``: what the sink takes of each row."""
    if call.sinks is None:
        return 0.0
    sinks = call.sinks[block.h].to(block.total.dtype)[:, None, None]
    empty = block.total == 0
    return (torch.exp(sinks - block.maximum) / block.divisor).masked_fill(empty, 0.0)


def _zeros(call: Call) -> Gradients:
    """Sums of gradients, in the accumulating dtype."""
    dtype = accumulating(call.query.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (call.query, call.key, call.value))
    dbias, dsinks = (
        None if x is None else torch.zeros_like(x, dtype=dtype) for x in (call.bias, call.sinks)
    )
    return dq, dk, dv, dbias, dsinks


def _narrow(call: Call, sums: Gradients) -> Gradients:
    """The sums in the dtypes of the inputs."""
    dq, dk, dv, dbias, dsinks = sums
    return (
        dq.to(call.query.dtype),
        dk.to(call.key.dtype),
        dv.to(call.value.dtype),
        None if dbias is None else dbias.to(call.bias.dtype),
        None if dsinks is None else dsinks.to(call.sinks.dtype),
    )


def gradients(call: Call, grad: Tensor) -> Gradients:
    """Gradients of query, key, value, bias and sinks (None where absent) for that of the output.

    With ``w`` the weights before and ``w'`` after dropout, row by row:
    ``dv = w'ᵀ·do``, ``dw = do·vᵀ`` through the dropout, ``ds = w · (dw − Σ w·dw)``.
    """
    dtype = accumulating(call.query.dtype)
    dq, dk, dv, dbias, dsinks = sums = _zeros(call)
    # A NaN comes back through ds where it is visible; what is left of it would only spread.
    query, key = _finite(call.query), _finite(call.key)
    held = None
    for block in weight_blocks(call):
        rows, visible = block.index, block.visible
        if held != (held := (block.b, block.h)):
            k, v = key_heads(key, call, *held), key_heads(call.value, call, *held)
        kv, keys = _shared(call, block.h), block.keys
        empty = block.total == 0
        q, do = (x[rows].to(dtype).masked_fill(empty, 0.0) for x in (query, grad))
        w, keep = block.weights, _kept(call, block)
        dw = _hide(_drop(call, keep, matmul(do, v[:, :, keys].transpose(-1, -2))), visible)
        delta = (w * dw).sum(-1, keepdim=True)
        ds = _hide(w * (dw - delta), visible)
        if dsinks is not None:
            dsinks[block.h] -= (_sink_weight(call, block) * delta).sum((0, 2, 3))
        if dbias is not None:
            _accumulate(dbias, ds, *rows, keys)
        if call.softcap is not None:
            capped = torch.tanh(products(call, q, k[:, :, keys]) / call.softcap)
            ds = _hide(ds * (1 - capped * capped), visible)
        ds = ds * call.scale
        dq[rows] = matmul(ds, k[:, :, keys])
        _accumulate(dk, _outer(ds, q, kv), block.b, kv, keys)
        _accumulate(dv, _weighted(_drop(call, keep, w), visible, do, kv), block.b, kv, keys)
    return _narrow(call, sums)


def second_gradients(
    call: Call, grad: Tensor, cotangents: Gradients
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``Σ gradients(call, grad) · cotangents``, which is linear in both.

    That sum is also ``Σ do · ȯ``, where ``ȯ`` is how fast the output moves when query, key, value,
    bias and sinks move by their cotangents, which are dotted here. Row by row, with ``s`` the
    scores, and every Σ over the sink too, whose value is 0 and whose ``ṡ`` is its cotangent:

        ṡ = scale · (q̇·kᵀ + q·k̇ᵀ), through the cap, + ḃ      dw = do·vᵀ through the dropout
        ẇ = w · (ṡ − Σ w·ṡ)                                  p  = w · (dw − Σ w·dw)
        ddo = ẇ'·v + w'·v̇                                    dv = ẇ'ᵀ·do
        g  = dw · (ṡ − Σ w·ṡ) − ṡ · Σ w·dw + do·v̇ᵀ through the dropout      the gradient of w
        ds = w · (g − Σ w·g), and what p·ṡ gives through the bend of the cap
        dq = scale · (ds·k + p·k̇)                            dk = scale · (dsᵀ·q + pᵀ·q̇)

    Args:
        grad: ``(B, Hq, Lq, Dv)``, of the output.
        cotangents: of the gradients of query, key, value, bias and sinks, in their shapes; the last
            two are None where they are absent.

    Returns:
        Gradients of grad, query, key, value, bias and sinks, the last two None where absent.
    """
    dtype = accumulating(call.query.dtype)
    dgrad = torch.zeros_like(grad, dtype=dtype)
    dq, dk, dv, dbias, dsinks = sums = _zeros(call)
    query_dot, key_dot, value_dot, bias_dot, sinks_dot = cotangents
    # As in the first gradient: what is not finite comes back through ṡ and dw where it is visible.
    query, key = _finite(call.query), _finite(call.key)
    finite_query_dot, finite_key_dot = _finite(query_dot), _finite(key_dot)
    held = None
    for block in weight_blocks(call):
        rows, keys, visible = block.index, block.keys, block.visible
        if held != (held := (block.b, block.h)):
            shared = [
                key_heads(x, call, *held)
                for x in (key, call.value, key_dot, value_dot, finite_key_dot)
            ]
        k, v, k_dot, v_dot, finite_k_dot = (x[:, :, keys] for x in shared)
        kv = _shared(call, block.h)
        empty = block.total == 0
        q, do, q_dot, finite_q_dot = (
            x[rows].to(dtype).masked_fill(empty, 0.0)
            for x in (query, grad, query_dot, finite_query_dot)
        )
        w, keep, w_sink = block.weights, _kept(call, block), _sink_weight(call, block)

        s_dot = products(call, q_dot, k) + products(call, q, k_dot)
        if call.softcap is not None:
            capped = torch.tanh(products(call, q, k) / call.softcap)
            slope = 1 - capped * capped
            bend = -2 / call.softcap * capped * slope * s_dot
            s_dot = s_dot * slope
        if bias_dot is not None:
            s_dot = s_dot + part(bias_dot, *rows, keys).to(dtype)
        s_dot = _hide(s_dot, visible)
        dw, dw_dot = (
            _hide(_drop(call, keep, matmul(do, x.transpose(-1, -2))), visible) for x in (v, v_dot)
        )
        sink_dot = 0.0 if sinks_dot is None else sinks_dot[block.h].to(dtype)[:, None, None]
        s_mean = (w * s_dot).sum(-1, keepdim=True) + w_sink * sink_dot
        delta = (w * dw).sum(-1, keepdim=True)
        w_dot = _hide(w * (s_dot - s_mean), visible)
        p = _hide(w * (dw - delta), visible)
        g = dw * (s_dot - s_mean) - s_dot * delta + dw_dot
        g_sink = -sink_dot * delta
        g_mean = (w * g).sum(-1, keepdim=True) + w_sink * g_sink
        ds = _hide(w * (g - g_mean), visible)

        if dsinks is not None:
            dsinks[block.h] += (w_sink * (g_sink - g_mean)).sum((0, 2, 3))
        if dbias is not None:
            _accumulate(dbias, ds, *rows, keys)
        if call.softcap is not None:
            ds = _hide(ds * slope + p * bend, visible)
            p = _hide(p * slope, visible)
        ds, p = ds * call.scale, p * call.scale
        w_dot = _drop(call, keep, w_dot)
        dgrad[rows] = _apply(w_dot, visible, v) + _apply(_drop(call, keep, w), visible, v_dot)
        dq[rows] = matmul(ds, k) + matmul(p, finite_k_dot)
        _accumulate(dk, _outer(ds, q, kv) + _outer(p, finite_q_dot, kv), block.b, kv, keys)
        _accumulate(dv, _outer(w_dot, do, kv), block.b, kv, keys)
    return dgrad.to(grad.dtype), *_narrow(call, sums)


def empty(like: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A new tensor on the device of ``like`` that something else fills."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def full(like: Tensor, shape: tuple[int, ...], fill: float, dtype: str) -> Tensor:
    """A new tensor on the device of ``like``; float32 where the device has no float64."""
    if dtype == "float64" and like.device.type == "mps":
        dtype = "float32"
    return torch.full(shape, fill, dtype=getattr(torch, dtype), device=like.device)


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the last axis, largest first, with their indices."""
    values, indices = x.topk(k, dim=-1)
    return values, indices


def take(x: Tensor, indices: Any) -> Tensor:
    """``x[..., indices]`` for a NumPy array of indices."""
    return x[..., torch.as_tensor(np.ascontiguousarray(indices), device=x.device)]


numpy = False


def array(like: Tensor, x: Any) -> Tensor:
    """A NumPy array in the library, dtype and device of ``like``."""
    return torch.as_tensor(x, dtype=like.dtype, device=like.device)


def broadcast(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x in that shape, without a copy."""
    return x.expand(shape)


def concatenate(arrays: list[Tensor]) -> Tensor:
    """One behind the other along the last axis."""
    return torch.cat(arrays, -1)


def nan_to_zero(x: Tensor) -> Tensor:
    """x with 0 for NaN."""
    return x.nan_to_num(nan=0.0)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """An entry of x for each index, along the last axis."""
    return x.gather(-1, indices)
