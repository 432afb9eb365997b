"""First and second gradients of attention on tensors of any device, block by block.

Autograd records nothing here: ``torch_ops`` makes operators of it.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._backends.formula import (
    Finite,
    WeightBlock,
    apply,
    cap_derivatives,
    capped,
    dropped,
    is_capped,
    kept_weights,
    key_heads,
    products,
    scaled,
    weight_blocks,
)
from regard._base.arrays import arrays_of
from regard._base.torch_arrays import TorchArrays
from regard._base.torch_state import product
from regard._call.call import Call
from regard._call.visible import part

INPUTS = ("query", "key", "value", "bias", "sinks")  # of which there are gradients, in this order
Gradients = tuple[Any, ...]  # of these; None for an input that is absent or left out


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are held in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _arrays(call: Call) -> TorchArrays:
    found = arrays_of(call.query)
    assert isinstance(found, TorchArrays)
    return found


def _kept(call: Call, block: WeightBlock) -> Any:
    return kept_weights(_arrays(call), call, *block.index, block.keys)


def _drop(call: Call, keep: Any, x: Tensor) -> Tensor:
    found: Tensor = dropped(_arrays(call), call, keep, x)
    return found


def _accumulate(total: Tensor, x: Tensor, *where: slice) -> None:
    """Adds x to a part of the total, summed over the axes in which the total has size 1."""
    own = part(total, *where)
    axes = [a for a, (n, m) in enumerate(zip(x.shape, own.shape)) if m == 1 and n != 1]
    own += x.sum(axes, keepdim=True) if axes else x


def _finite(x: Tensor) -> Tensor:
    if x.is_cpu and x.isfinite().all():  # the host would wait for a device
        return x
    return torch.where(x.isfinite(), x, 0.0)


def _hide(x: Tensor, visible: Tensor | None) -> Tensor:
    return x if visible is None else x.masked_fill(~visible, 0.0)


def _outer(x: Tensor, y: Tensor, kv: slice) -> Tensor:
    """``xᵀ @ y`` summed over the heads of a group: ``(b, kv, keys, D)``."""
    b, h, m, n = x.shape
    heads = kv.stop - kv.start
    rows = h // heads * m
    x = x.reshape(b, heads, rows, n).transpose(-1, -2)
    return product(x, y.reshape(b, heads, rows, y.shape[-1]))


def _weighted(
    call: Call, w: Tensor, visible: Tensor | None, do: Tensor, kv: slice, grad: Finite
) -> Tensor:
    """``wᵀ @ do`` of a group: NaN and inf in do reach only the keys that its query sees."""
    if visible is None or grad.everywhere or do.isfinite().all():
        return _outer(w, do, kv)
    of_heads = apply(_arrays(call), w.mT, visible.expand_as(w).mT, do)
    return of_heads.unflatten(1, (kv.stop - kv.start, -1)).sum(2)


def _shared(call: Call, h: slice) -> slice:
    """The key heads that the query heads h share."""
    group = call.sizes[1] // call.sizes[2]
    return slice(h.start // group, h.stop // group)


def _sink_weight(call: Call, block: WeightBlock) -> Tensor | float:
    """``(b, h, rows, 1)``: the sink's weight in each row."""
    if call.sinks is None:
        return 0.0
    sinks = call.sinks[block.h].to(block.total.dtype)[:, None, None]
    empty = block.total == 0
    return (torch.exp(sinks - block.maximum) / block.divisor).masked_fill(empty, 0.0)


def _zeros(call: Call, needed: Collection[str] = INPUTS) -> dict[str, Tensor]:
    """Sums of the gradients of the inputs that are there, in the accumulating dtype."""
    given = {name: getattr(call, name) for name in INPUTS if name in needed}
    dtype = accumulating(call.query.dtype)
    return {n: torch.zeros_like(x, dtype=dtype) for n, x in given.items() if x is not None}


def _narrow(call: Call, sums: dict[str, Tensor]) -> Gradients:
    """The sums in the dtypes of the inputs."""
    return tuple(
        sums[name].to(getattr(call, name).dtype) if name in sums else None for name in INPUTS
    )


def gradients(call: Call, grad: Tensor, needed: Collection[str]) -> Gradients:
    """Gradients of query, key, value, bias and sinks, those needed, for that of the output.

    With ``w`` the weights before and ``w'`` after dropout, row by row:
    ``dv = w'ᵀ·do``, ``dw = do·vᵀ`` through the dropout, ``ds = w · (dw − Σ w·dw)``.
    """
    xp, dtype = _arrays(call), accumulating(call.query.dtype)
    sums = _zeros(call, needed)
    # An unmasked NaN comes back through ds; elsewhere it would only spread.
    query, key = _finite(call.query), _finite(call.key)
    held, finite = None, Finite(xp, grad)
    for block in weight_blocks(xp, call):
        rows, visible = block.index, block.visible
        if held != (block.b, block.h):
            held = block.b, block.h
            k, v = (key_heads(xp, call, x, *held) for x in (key, call.value))
        kv, keys = _shared(call, block.h), block.keys
        empty = block.total == 0
        q, do = (x[rows].to(dtype).masked_fill(empty, 0.0) for x in (query, grad))
        w, keep = block.weights, _kept(call, block)
        if "value" in sums:
            dv = _weighted(call, _drop(call, keep, w), visible, do, kv, finite)
            _accumulate(sums["value"], dv, block.b, kv, keys)
        if sums.keys() <= {"value"}:
            continue
        dw = _drop(call, keep, xp.matmul(do, v[:, :, keys].transpose(-1, -2)))
        _add_of_weights(call, sums, block, q, k[:, :, keys], _hide(dw, visible))
    return _narrow(call, sums)


class Products(NamedTuple):
    """Weights times their gradients, where a weight may be too small for its dtype."""

    of_keys: Tensor
    """``(b, h, rows, keys)``: w·dw."""
    of_sink: Tensor
    """``(b, h, rows, 1)``: likewise of the sink; 0 where there is none."""


def _add_of_weights(
    call: Call, sums: dict[str, Tensor], block: WeightBlock, q: Tensor, k: Tensor, dw: Tensor,
    delta: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds what follows from the gradient of a block's weights.

    Args:
        q, k: its queries and keys, wide.
        dw: ``(b, h, rows, keys)``, 0 where masked.
        delta: ``(b, h, rows, 1)``, by default ``Σ w·dw``.
    """
    w = block.weights
    delta = (w * dw).sum(-1, keepdim=True) if delta is None else delta
    _add_of_scores(call, sums, block, q, k, w * (dw - delta), -_sink_weight(call, block) * delta)


def _add_of_products(
    call: Call, sums: dict[str, Tensor], block: WeightBlock, q: Tensor, k: Tensor, wdw: Products
) -> None:
    """As ``_add_of_weights``."""
    of_keys = _hide(wdw.of_keys, block.visible)
    delta = of_keys.sum(-1, keepdim=True) + wdw.of_sink
    of_sink = wdw.of_sink - _sink_weight(call, block) * delta
    _add_of_scores(call, sums, block, q, k, of_keys - block.weights * delta, of_sink)


def _add_of_scores(
    call: Call, sums: dict[str, Tensor], block: WeightBlock, q: Tensor, k: Tensor, ds: Tensor,
    of_sink: Tensor,
) -> None:  # fmt: skip
    """Adds what follows from the gradient of a block's scores.

    Args:
        of_sink: ``(b, h, rows, 1)``, that of the sink's logit.
    """
    visible, kv = block.visible, _shared(call, block.h)
    ds = _hide(ds, visible)
    if "sinks" in sums:
        sums["sinks"][block.h] += of_sink.sum((0, 2, 3))
    if "bias" in sums:
        _accumulate(sums["bias"], ds, *block.index, block.keys)
    if is_capped(call):
        slope, _ = cap_derivatives(_arrays(call), call, products(_arrays(call), call, q, k))
        ds = _hide(ds * slope, visible)
    ds = ds * call.scale
    if "query" in sums:
        sums["query"][block.index] = _arrays(call).matmul(ds, k)
    if "key" in sums:
        _accumulate(sums["key"], _outer(ds, q, kv), block.b, kv, block.keys)


def weights_gradients(
    call: Call,
    gradient_of: Callable[[WeightBlock], Tensor | Products],
    delta: Tensor | None,
    needed: Collection[str],
) -> Gradients:
    """Gradients of query, key, bias and sinks, those needed, for that of the weights.

    Args:
        gradient_of: gives it for a block, ``(b, h, rows, keys)`` or what broadcasts to it; or its
            products with the weights.
        delta: ``(B, Hq, Lq)``: what the gradient of each score lacks of it, by default ``Σ w·dw``.
    """
    xp, dtype, held = _arrays(call), accumulating(call.query.dtype), None
    sums = _zeros(call, set(needed) - {"value"})
    query, key = _finite(call.query), _finite(call.key)
    for block in weight_blocks(xp, call):
        if held != (block.b, block.h):
            held = block.b, block.h
            k = key_heads(xp, call, key, *held)
        q = query[block.index].to(dtype).masked_fill(block.total == 0, 0.0)
        found, some = gradient_of(block), k[:, :, block.keys]
        if isinstance(found, Products):
            _add_of_products(call, sums, block, q, some, found)
            continue
        dw = found.to(dtype).expand_as(block.weights)
        own = None if delta is None else delta[block.index][..., None].to(dtype)
        _add_of_weights(call, sums, block, q, some, _hide(dw, block.visible), own)
    return _narrow(call, sums)


def second_gradients(call: Call, grad: Tensor, cotangents: Gradients) -> Gradients:
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
    xp, dtype = _arrays(call), accumulating(call.query.dtype)
    dgrad = torch.zeros_like(grad, dtype=dtype)
    sums = _zeros(call)
    query_dot, key_dot, value_dot, bias_dot, sinks_dot = cotangents
    # As in the first gradient: unmasked NaN and inf come back through ṡ and dw.
    query, key = _finite(call.query), _finite(call.key)
    finite_query_dot, finite_key_dot = _finite(query_dot), _finite(key_dot)
    held = None
    for block in weight_blocks(xp, call):
        rows, keys, visible = block.index, block.keys, block.visible
        if held != (block.b, block.h):
            held = block.b, block.h
            shared = [
                key_heads(xp, call, x, *held)
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

        s_dot, slope, bend = _scores_dot(call, block, (q, k), (q_dot, k_dot), bias_dot)
        dw, dw_dot = (
            _hide(_drop(call, keep, xp.matmul(do, x.transpose(-1, -2))), visible)
            for x in (v, v_dot)
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

        if "sinks" in sums:
            sums["sinks"][block.h] += (w_sink * (g_sink - g_mean)).sum((0, 2, 3))
        if "bias" in sums:
            _accumulate(sums["bias"], ds, *rows, keys)
        if slope is not None and bend is not None:
            ds = _hide(ds * slope + p * bend, visible)
            p = _hide(p * slope, visible)
        ds, p = ds * call.scale, p * call.scale
        w_dot = _drop(call, keep, w_dot)
        dgrad[rows] = apply(xp, w_dot, visible, v) + apply(xp, _drop(call, keep, w), visible, v_dot)
        sums["query"][rows] = xp.matmul(ds, k) + xp.matmul(p, finite_k_dot)
        dk = _outer(ds, q, kv) + _outer(p, finite_q_dot, kv)
        _accumulate(sums["key"], dk, block.b, kv, keys)
        _accumulate(sums["value"], _outer(w_dot, do, kv), block.b, kv, keys)
    return dgrad.to(grad.dtype), *_narrow(call, sums)


def _scores_dot(
    call: Call, block: WeightBlock, at: tuple[Tensor, Tensor], dot: tuple[Tensor, Tensor],
    bias_dot: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """``(ṡ, slope, bend)`` of a block: how fast its scores move, 0 where masked; and of the cap.

    Args:
        at, dot: query and key, and their cotangents, wide.
    """
    xp, (q, k), (q_dot, k_dot) = _arrays(call), at, dot
    slope = bend = None
    s_dot = products(xp, call, q_dot, k) + products(xp, call, q, k_dot)
    if is_capped(call):
        slope, curvature = cap_derivatives(xp, call, products(xp, call, q, k))
        bend = curvature * s_dot
        s_dot = s_dot * slope
    if bias_dot is not None:
        s_dot = s_dot + part(bias_dot, *block.index, block.keys).to(s_dot.dtype)
    return _hide(s_dot, block.visible), slope, bend


def scores_of_pairs(call: Call, i: Tensor, j: Tensor, used: Tensor) -> Tensor:
    """``(B, Hq, n)``: the scores of some pairs, wide; autograd differentiates them.

    Args:
        i, j: ``(B or 1, Hq or 1, n)`` int64, queries and keys.
        used: bool ``(B, Hq, n)``: those whose scores are used. A query or key of the others may be
            NaN, which a gradient of 0 would not stop.
    """
    xp, dtype = _arrays(call), accumulating(call.query.dtype)
    B, Hq, Hkv, *_ = call.sizes
    b, h = (
        torch.arange(B, device=i.device)[:, None, None],
        torch.arange(Hq, device=i.device)[:, None],
    )
    group = max(1, Hq // max(Hkv, 1))
    q, k = call.query[b, h, i], call.key.expand(B, -1, -1, -1)[b, h // group, j]
    q, k = (x.to(dtype).masked_fill(~used[..., None], 0.0) for x in (q, k))
    s = capped(xp, call, scaled(call, (q * k).sum(-1)))
    if call.bias is None:
        return s
    places = (x.clamp(max=n - 1) for x, n in zip((b, h, i, j), call.bias.shape))
    return s + call.bias[tuple(places)].to(dtype)
