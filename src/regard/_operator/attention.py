"""The operator: reads the call, chooses a backend, gives the result the caller's axes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Literal, Unpack, overload

import numpy as np

from regard._backends import Backend, Statistics, choose
from regard._base import loaded
from regard._base.arrays import dtype_name, is_array, is_tensor
from regard._base.autocast import is_autocast
from regard._base.compiling import is_traced
from regard._base.errors import ShapeError, a_type
from regard._base.settings import counted
from regard._base.types import (
    Array,
    ArrayT,
    BackendName,
    Bool,
    Float,
    Integers,
    Intervals,
    NoOption,
    Segments,
    Window,
)
from regard._call.call import Call
from regard._call.checks import FLOATS, given, kind_of, read_call, read_flag
from regard._call.edits import Edit
from regard._call.hints import unknown_option
from regard._call.options import OPTIONS, Options
from regard._call.tensors import is_causal_bias
from regard._operator import plans, watching
from regard._weights.attention_weights import AttentionWeights, detached, detached_call
from regard._weights.statistics import RowStatistics, in_scores
from regard._weights.written import refuse_recorded

_OPTIONS = tuple(option.name for option in OPTIONS)
_TORCHS = "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
_OF_ATTENTION = {
    "causal": "Here it is is_causal=True, as in torch; regard.attention has causal=.",
    "mask": "Here it is attn_mask=, as in torch; regard.attention has mask=.",
    "bias": "Here it is attn_mask=, as in torch; regard.attention has bias=.",
    "dropout": "Here it is dropout_p=, as in torch; regard.attention has dropout=.",
} | dict.fromkeys(
    (
        "return_weights",
        "return_statistics",
        *sorted({*_OPTIONS} - {"causal", "mask", "bias", "dropout", "scale"}),
    ),
    "regard.attention has it; this function has torch's options alone.",
)


@overload
def attention(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT],
    *,
    return_weights: Literal[False] = False,
    return_statistics: Literal[False] = False,
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> ArrayT: ...
@overload
def attention(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT],
    *,
    return_weights: Literal[True],
    return_statistics: Literal[False] = False,
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> tuple[ArrayT, AttentionWeights[ArrayT]]: ...
@overload
def attention(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT],
    *,
    return_weights: Literal[False] = False,
    return_statistics: Literal[True],
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> tuple[ArrayT, RowStatistics[ArrayT]]: ...
@overload
def attention(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT],
    *,
    return_weights: Literal[True],
    return_statistics: Literal[True],
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> tuple[ArrayT, AttentionWeights[ArrayT], RowStatistics[ArrayT]]: ...
@overload
def attention(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT],
    *,
    return_weights: bool,
    return_statistics: Literal[False] = False,
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> ArrayT | tuple[ArrayT, AttentionWeights[ArrayT]]: ...
def attention(
    query: Float[Array[ArrayT], "*B_Hq Lq D"],
    key: Float[Array[ArrayT], "*B_Hkv Lk D"],
    value: Float[Array[ArrayT], "*B_Hkv Lk Dv"],
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Bool[Array[object], "*_mask"] | None = None,
    bias: Float[Array[object], "*_bias"] | None = None,
    key_lengths: Integers | None = None,
    segments: Segments | None = None,
    intervals: Intervals | None = None,
    query_start: Integers | None = None,
    query_step: int = 1,
    key_start: int | None = None,
    key_step: int = 1,
    sinks: Float[Array[object], " Hq"] | None = None,
    edits: Sequence[Edit] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    output_dtype: object = None,
    return_weights: bool = False,
    return_statistics: bool = False,
    backend: BackendName = "auto",
    **unknown: NoOption,
) -> ArrayT | tuple[Any, ...]:
    """Exact attention: ``softmax(scale * query @ key.T + bias) @ value``, in linear memory.

    In this order: scores, scale, softcap, bias, edits, masked keys to −∞, softmax over the keys and
    the sink, dropout, values. A query sees (attends to) a key only if every option allows it; one
    that sees none gives zeros. NaN and inf in a masked key or value never reach the output. (A bias
    of −∞ gives a weight of 0, but masks nothing.) In torch it is differentiable in backward mode.

    Args:
        query: ``(..., Hq, Lq, D)``; also ``(Lq, D)``. A NumPy array or torch tensor of float16,
            bfloat16, float32 or float64, any strides.
        key: ``(..., Hkv, Lk, D)``; ``Hkv`` divides ``Hq``, and query head h uses key head
            ``h // (Hq // Hkv)``. Leading axes of size 1 broadcast.
        value: ``(..., Hkv, Lk, Dv)``.
        causal: query i sees key j when ``j <= query_start + i``.   Lq=2, Lk=4:  1 1 1 0
                                                                                 1 1 1 1
        window: ``(left, right)``: keys ``[p − left, p + right]`` around the query's position
            ``p = query_start + i``; None leaves a side open.
        mask: bool, True = may attend, broadcastable to ``(..., Hq, Lq, Lk)``.
        bias: floating, added to the scores, broadcastable likewise; differentiable.
        key_lengths: int or ``(B,)``; keys past the length do not exist.
        segments: int ids ``(B, L)``, or a pair for queries and keys; only equal ids see each other.
        intervals: ``(first, last)``, ints ``(Lq,)`` or ``(B, Lq)``: query i sees the keys
            ``first[i] <= j < last[i]``.
        query_start: int or ``(B,)``, the position of the first query among the keys. By default the
            queries are the last of the valid keys.
        query_step, key_start, key_step: the queries and keys are some tokens of a whole: query i is
            at ``query_start + i · query_step``, key j at ``key_start + j · key_step``, with
            ``query_start`` an int. Order, window, lengths, intervals, edits, distances and dropout
            then count the tokens of the whole; masks, bias and segments are of the given ones.
        sinks: ``(Hq,)`` logits of attention sinks: they take weight and give no value;
            differentiable.
        edits: rectangles of the weights times a factor, after which each row is normalised anew;
            with a factor of 0 its pairs are masked. See ``regard.Edit``.
        scale: factor of the scores, by default ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        dropout: probability with which a weight is dropped; the others grow by ``1 / (1 − p)``.
        seed: of the dropout; the same seed drops the same weights in every backend, others in
            each element of a batch. By default drawn from torch's generator for tensors, freshly
            for arrays.
        output_dtype: the query's, or that of sums, float32 (float64 for float64), as a name or a
            dtype; by default the query's. Partial outputs that are merged keep their digits so.
        return_weights: give ``(output, weights)``, the weights as they are before dropout.
        return_statistics: give ``(output, statistics)``, the ``regard.RowStatistics`` of every
            query, for ``regard.merge``; with weights ``(output, weights, statistics)``.
        backend: ``"auto"``, or the name of one.

    Returns:
        ``(..., Hq, Lq, Dv)``, array type, device and dtype of the query; with ``return_weights``
        also the AttentionWeights.

    Raises:
        ShapeError: shapes, lengths or heads that do not fit together.
        TypeError: wrong types or dtypes, or several libraries or devices.
        ValueError: an option out of its range, or an unknown backend.
        UnsupportedError: no backend, or not the one named, takes the call; lists each refusal.

    Example:
        >>> import numpy as np
        >>> q = k = v = np.eye(3)
        >>> attention(q, k, v, causal=True, scale=1.0).round(2)
        array([[1.  , 0.  , 0.  ],
               [0.27, 0.73, 0.  ],
               [0.21, 0.21, 0.58]])

    Source: Vaswani et al. 2017, equation 1; Milakov & Gimelshein 2018.
    """
    if unknown:
        returns = "return_weights", "return_statistics", "backend"
        raise unknown_option("attention", unknown, (*_OPTIONS, *returns))
    if type(return_weights) is not bool or type(return_statistics) is not bool:
        return_weights = read_flag("return_weights", return_weights)
        return_statistics = read_flag("return_statistics", return_statistics)
    values = (
        causal, window, mask, bias, key_lengths, segments, intervals, query_start, query_step,
        key_start, key_step, sinks, edits, scale, softcap, dropout, seed, output_dtype,
    )  # fmt: skip
    options: dict[str, Any] = {}
    if not all(map(is_, values, _DEFAULTS)):
        others = zip(_OPTIONS, values, _DEFAULTS)
        options = given(**{name: x for name, x, default in others if x is not default})
    hand_on: list[Any] = []
    if watching.watchers:
        through = [watcher(query, key, value, options) for watcher in watching.watchers]
        hand_on = [one for one in through if one is not None]
    is_plain = not (return_statistics or hand_on)
    known = plans.known(query, key, value, options, backend) if is_plain else None
    output: ArrayT
    if return_weights:
        if (served := plans.with_statistics(known, query, key, value)) is not None:
            output, call, chosen, known_statistics = served
            return output, AttentionWeights._of(call, chosen, known_statistics)
    elif (output := plans.output(known, query, key, value)) is not None:
        return output
    if value is None:
        raise TypeError(
            "attention: value is None; an array is needed. The weights alone, of query and key, "
            "are regard.AttentionWeights(query, key)."
        )
    call = read_call(query, key, value, **options)
    chosen = choose(call, backend)
    found, statistics = chosen.attention(call, return_weights or return_statistics)
    output = call.restore(found)
    for one in hand_on:
        output = one(output)
    if return_statistics:
        if statistics is None:
            statistics = _row_statistics(detached_call(call.without_value()), chosen)
        maximum, total = statistics
        of_rows = in_scores(call, chosen, (detached(maximum), detached(total)))
    plans.keep(known, chosen, call, query)
    if return_weights:
        weights = AttentionWeights._of(call, chosen, statistics)
        return (output, weights, of_rows) if return_statistics else (output, weights)
    return (output, of_rows) if return_statistics else output


_DEFAULTS = [(attention.__kwdefaults__ or {})[name] for name in _OPTIONS]


def _row_statistics(call: Call, backend: Backend) -> Statistics:
    """Those of a call, of a backend whose output comes without them."""
    if not (call.is_torch and is_traced()):
        refuse_recorded(call, backend.past_torch)
        return backend.row_statistics(call)
    from regard._backends import torch_questions

    return torch_questions.row_statistics(call, backend.name)


def scaled_dot_product_attention(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT],
    attn_mask: Array[object] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: NoOption,
) -> ArrayT:
    """``torch.nn.functional.scaled_dot_product_attention``, computed by ``regard.attention``.

    For code that is moved over by changing one import. It differs from ``attention`` where torch
    does: ``is_causal`` aligns query 0 with key 0, a floating ``attn_mask`` is added, leading axes
    broadcast from every side, and heads are only grouped with ``enable_gqa``.

    Args:
        query: ``(..., Hq, Lq, D)``.
        key: ``(..., H, Lk, D)``.
        value: ``(..., H, Lk, Dv)``.
        attn_mask: bool (True = may attend) or floating (added), broadcastable to
            ``(..., Hq, Lq, Lk)``.
        dropout_p: probability of dropping a weight, applied whenever it is positive.
        is_causal: query i sees keys ``j <= i``.   Lq=2, Lk=4:  1 0 0 0
                                                                1 1 0 0
        scale: by default ``1 / sqrt(D)``.
        enable_gqa: key and value heads may be fewer; they must divide the query's.

    Returns:
        ``(..., Hq, Lq, Dv)``, of the query's array type and dtype.

    Raises:
        ShapeError, TypeError, ValueError: as ``attention``.
        RuntimeError: ``attn_mask`` together with ``is_causal``, as in torch.

    Source: torch.nn.functional, 2.13.
    """
    if unknown:
        raise unknown_option("scaled_dot_product_attention", unknown, _TORCHS, _OF_ATTENTION)
    for name, x in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        read_flag(name, x, "scaled_dot_product_attention")
    q, k, v, options = torch_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    output: ArrayT = attention(q, k, v, **options)
    return output


def torch_call(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Query, key, value and options of ``attention`` for a call of torch's operator."""
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: attn_mask and is_causal=True were both given; torch "
            "allows one. regard.attention(..., mask=..., causal=True) takes both."
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        kind_of(name, x)
    q, k, v = _autocast(*_broadcast_leading(query, key, value, enable_gqa))
    if enable_gqa and min(q.ndim, k.ndim, v.ndim) > 2 and k.shape[-3] != v.shape[-3]:
        k, v = (_repeat_heads(x, q.shape[-3]) for x in (k, v))
    dropout_p, scale = _number(dropout_p), _number(scale)
    if dropout_p == 1.0:  # every weight is dropped
        v, dropout_p = 0.0 * v, 0.0
    options: dict[str, Any] = {"dropout": dropout_p, "scale": scale}
    if attn_mask is not None:
        options |= _masked(attn_mask, q, k)
    elif is_causal:
        options |= _causal(q, k)
    return q, k, v, options


def _number(x: Any) -> Any:
    """What torch takes for a number: a tensor without axes and gradient, too."""
    return x.item() if is_tensor(x) and x.ndim == 0 and not x.requires_grad else x


def _masked(mask: Any, q: Any, k: Any) -> dict[str, Any]:
    """The options that torch's ``attn_mask`` is."""
    if is_causal_bias(mask):
        return _causal(q, k, is_lower_right=_is_lower_right(mask, q, k))
    of_library = is_tensor(mask) or is_array(mask)
    found = dtype_name(mask) if of_library else a_type(mask)
    if found not in ("bool", *FLOATS):
        raise TypeError(
            f"scaled_dot_product_attention: attn_mask is {found}; an array of bools, True where a "
            "query may attend, or of floating numbers, which are added to the scores, is needed."
        )
    return {"mask" if found == "bool" else "bias": mask}


def _causal(q: Any, k: Any, is_lower_right: bool = False) -> dict[str, Any]:
    """The options that align query 0 with key 0, or the last query with the last key."""
    square = q.shape[-2] == k.shape[-2]
    # Traced lengths are tensors, and may differ later.
    if is_lower_right or (not is_tensor(square) and square):
        return {"causal": True}  # and the default query_start, which backends need not check
    return {"causal": True, "query_start": 0}


def _is_lower_right(mask: Any, q: Any, k: Any) -> bool:
    """Whether a ``CausalBias`` aligns the last query with the last key, as torch reads it.

    Torch takes one of as many queries as keys for ``is_causal``, like every ``causal_upper_left``,
    and does not look at the lengths of those.
    """
    variant = getattr(mask, "variant", None)
    if variant is None:
        raise TypeError(
            "scaled_dot_product_attention: attn_mask was computed from a CausalBias of torch, "
            "which holds no numbers. Pass the CausalBias itself, or a mask of bools."
        )
    L, S = mask.seq_len_q, mask.seq_len_kv
    if L == S or variant == type(variant).UPPER_LEFT:
        return False
    if (q.shape[-2], k.shape[-2]) != (L, S):
        raise ShapeError(
            f"scaled_dot_product_attention: attn_mask is causal_lower_right({L}, {S}), and there "
            f"are {counted(q.shape[-2], 'query', 'queries')} and {counted(k.shape[-2], 'key')}; it"
            " must be of these."
        )
    return True


def _repeat_heads(x: Any, heads: int) -> Any:
    """x with each of its heads repeated, ``heads`` in all; as it is where they do not divide."""
    if x.shape[-3] == 0 or heads % x.shape[-3]:
        return x
    times = heads // x.shape[-3]
    return x.repeat_interleave(times, -3) if is_tensor(x) else x.repeat(times, -3)


def _autocast(*arrays: Any) -> tuple[Any, ...]:
    """Tensors in the dtype of ``torch.autocast`` where it is on, as torch's own operator does."""
    if not all(map(is_tensor, arrays)):
        return arrays
    torch, device = loaded.torch, arrays[0].device.type
    if not is_autocast(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in arrays)


def _broadcast_leading(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Any, Any, Any]:
    """The three with equal leading axes (heads too, unless they are grouped)."""
    arrays = [query, key, value]
    kept = 3 if enable_gqa else 2
    if min(query.ndim, key.ndim, value.ndim) < kept:
        return query, key, value
    leading = [x.shape[:-kept] for x in arrays]
    if leading[0] == leading[1] == leading[2]:
        return query, key, value
    leading = [tuple(axes) for axes in leading]
    try:
        full = np.broadcast_shapes(*leading)
    except ValueError:
        raise ShapeError(
            f"scaled_dot_product_attention: leading axes {leading[0]}, {leading[1]} and "
            f"{leading[2]} of query, key and value cannot be broadcast together."
            + ("" if enable_gqa else " Heads that share keys need enable_gqa=True.")
        ) from None
    expanded = []
    for x in arrays:
        shape = (*full, *x.shape[-kept:])
        expanded.append(x.expand(shape) if is_tensor(x) else np.broadcast_to(x, shape))
    return expanded[0], expanded[1], expanded[2]
