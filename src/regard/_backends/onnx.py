"""Attention in operations that ONNX has, for ``torch.onnx.export``."""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from regard._backends.formula import capped, is_capped, scaled
from regard._base.arrays import arrays_of
from regard._base.errors import UnsupportedError
from regard._base.torch_state import scaled_dot_product_attention
from regard._call.call import Call
from regard._call.visible import window_rules


def attention(call: Call) -> Tensor:
    """``(B, Hq, Lq, Dv)``: one node ``Attention`` from opset 23 on, where it knows the options."""
    if call.dropout:
        raise UnsupportedError(
            f"attention: dropout is {call.dropout}, and ONNX has no generator that a seed governs. "
            "Export the model in eval mode, without dropout."
        )
    B, Hq, Hkv, Lq, _ = call.sizes
    k, v = (
        x if _always(x.shape[0] == B) else x.expand(B, -1, -1, -1) for x in (call.key, call.value)
    )
    added = None if _is_triangle(call) else _added(call)
    if is_capped(call) or call.sinks is not None or call.scale <= 0:
        out = _written_out(call, k, v, added)
    else:
        older = isinstance(Lq, Tensor)  # the tracing exporter, which has no shared heads
        k, v = _repeat(call, k, v) if older else (k, v)
        out = scaled_dot_product_attention(
            call.query, k, v, added, scale=call.scale,
            is_causal=_is_triangle(call), enable_gqa=not older and Hq != Hkv,
        )  # fmt: skip
    if added is None:
        return out
    seen = added if added.dtype == torch.bool else added != -torch.inf
    return torch.where(seen.any(-1, keepdim=True), out, 0.0)


def _always(holds: Any) -> bool:
    """Whether two lengths agree in every run: a traced one is a tensor, and may change."""
    return not isinstance(holds, Tensor) and statically_known_true(holds)


def _is_triangle(call: Call) -> bool:
    """Whether ``is_causal``, in which query 0 sees key 0 alone, is the whole mask."""
    _, _, _, Lq, Lk = call.sizes
    alone = call.scale > 0 and call.given <= {"causal", "scale"}
    return call.causal and alone and _always(Lq == Lk)


def _added(call: Call) -> Tensor | None:
    """The mask ``(B or 1, Hq or 1, Lq, Lk)``: floats to add to the scores, or bools."""
    visible = _visible(call)
    if call.bias is None and call.edit_ranges is None:
        return visible
    bias = _edited(call) if call.bias is None else call.bias.to(call.query.dtype)
    if call.bias is not None and call.edit_ranges is not None:
        bias = bias + _edited(call)
    if visible is not None:
        bias = bias.masked_fill(~visible, -torch.inf)
    return bias.expand(-1, -1, call.query.shape[2], call.key.shape[2])


def _edited(call: Call) -> Tensor:
    """``(1, Hq, Lq, Lk)``: what the edits add to the scores."""
    device = call.query.device
    _, Hq, _, Lq, Lk = call.sizes
    h, i, j = (torch.arange(n, device=device) for n in (Hq, Lq, Lk))
    places = h[:, None, None], i[:, None], j
    total = call.query.new_zeros(())
    for ends, factor in zip(call.edit_ranges.to(device), call.edit_factors.to(device)):
        inside = [(ends[2 * n] <= x) & (x < ends[2 * n + 1]) for n, x in enumerate(places)]
        log = factor.log().to(call.query.dtype)
        total = total + torch.where(inside[0] & inside[1] & inside[2], log, 0.0)
    return total[None]


def _visible(call: Call) -> Tensor | None:
    """Bool ``(B or 1, Hq or 1, Lq, Lk)``; None where every query sees every key."""
    Lq, Lk = call.query.shape[2], call.key.shape[2]
    i = torch.arange(Lq, device=call.query.device)[:, None]
    j = torch.arange(Lk, device=call.query.device)
    lengths, start = call.key_lengths, call.query_start
    lengths = Lk if lengths is None else lengths[:, None, None, None]
    p = i + (lengths - Lq if start is None else start[:, None, None, None])
    rules = [call.mask, *window_rules(call, p, j)]
    if call.key_lengths is not None:
        rules.append(j < lengths)
    if call.query_segments is not None:
        rules.append(call.query_segments[:, None, :, None] == call.key_segments[:, None, None])
    if call.interval_first is not None:
        rules.append(call.interval_first[:, None, :, None] <= j)
        rules.append(j < call.interval_last[:, None, :, None])
    visible = None
    for rule in rules:
        if rule is not None:
            visible = rule if visible is None else visible & rule
    if visible is None:
        return None
    visible = visible if visible.ndim == 4 else visible[None, None]
    return visible.expand(-1, -1, Lq, Lk)


def _repeat(call: Call, *tensors: Tensor) -> list[Tensor]:
    """Each of key and value with as many heads as the query."""
    group = int(call.sizes[1]) // int(call.sizes[2])
    return [x if group == 1 else x.repeat_interleave(group, 1) for x in tensors]


def _written_out(call: Call, k: Tensor, v: Tensor, added: Tensor | None) -> Tensor:
    """The formula written out: ``Attention`` caps after the mask, and has no sink."""
    k, v = _repeat(call, k, v)
    xp = arrays_of(call.query)
    s: Tensor = capped(xp, call, scaled(call, call.query @ k.transpose(-1, -2)))
    if added is not None:
        s = s.masked_fill(~added, -torch.inf) if added.dtype == torch.bool else s + added
    if call.sinks is not None:
        sinks = call.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sinks], -1)
    return torch.softmax(s, -1)[..., : k.shape[2]] @ v
