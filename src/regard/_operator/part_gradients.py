"""The gradients of attention over some keys, from what is known of the whole rows."""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple, Unpack

import numpy as np

from regard._backends import choose
from regard._base.arrays import accumulating_name, arrays_of, dtype_name, is_array, is_tensor
from regard._base.errors import ShapeError, UnsupportedError, a_type
from regard._base.types import Array, ArrayT, BackendName, Float
from regard._call.call import Call
from regard._call.checks import FLOATS, read_call
from regard._call.hints import unknown_option
from regard._call.options import OPTIONS, Options
from regard._call.tensors import require_dense
from regard._weights.attention_weights import detached, detached_call
from regard._weights.questions import at_once
from regard._weights.statistics import RowStatistics, of_backend

_OPTIONS = tuple(option.name for option in OPTIONS if option.name != "output_dtype")


class AttentionGradients(NamedTuple, Generic[ArrayT]):
    """Gradients of the inputs of an attention, in float32, or float64 for a float64 query."""

    query: ArrayT | None
    """``(..., Hq, Lq, D)``, as the query."""
    key: ArrayT | None
    """``(..., Hkv, Lk, D)``, as the key."""
    value: ArrayT | None
    """``(..., Hkv, Lk, Dv)``, as the value."""
    bias: ArrayT | None = None
    """As the bias; None without one."""
    sinks: ArrayT | None = None
    """``(Hq,)``; None without sinks."""


@at_once
def attention_gradients(
    query: Float[Array[ArrayT], "*B_Hq Lq D"],
    key: Float[Array[ArrayT], "*B_Hkv Lk D"],
    value: Float[Array[ArrayT], "*B_Hkv Lk Dv"],
    output: Float[Array[object], "*B_Hq Lq Dv"],
    statistics: RowStatistics[Any],
    grad_output: Float[Array[object], "*B_Hq Lq Dv"],
    *,
    into: AttentionGradients[ArrayT] | None = None,
    backend: BackendName = "auto",
    **options: Unpack[Options],
) -> AttentionGradients[ArrayT]:
    """The gradients that attention over some keys contributes to those of the whole.

    With output and statistics of the whole rows the parts add up: the gradients of a key and its
    value are complete, and that of the query is the sum over all parts of the keys. Sums are kept
    in float32, also for 16-bit inputs.

    Args:
        query: ``(..., Hq, Lq, D)``, as in ``regard.attention``.
        key: ``(..., Hkv, Lk, D)``: the keys of this part.
        value: ``(..., Hkv, Lk, Dv)``.
        output: ``(..., Hq, Lq, Dv)`` of the whole, of ``regard.merge``, in the query's dtype or
            that of sums.
        statistics: of the whole rows, ``(..., Hq, Lq)``, with the sinks where there are any.
        grad_output: ``(..., Hq, Lq, Dv)``: the gradient by that output.
        into: arrays to which the gradients are added, in the shapes of the inputs and float32
            (float64 for a float64 query); those that are None are not computed. By default new
            ones, of every input that is given.
        backend: as in ``regard.attention``.
        options: as in ``regard.attention``, those of this part; the same seed. ``sinks`` only for
            their gradient, which is that of whole rows: give them with one part.

    Returns:
        The gradients; those of ``into`` where it is given.

    Raises:
        ShapeError, TypeError, ValueError, UnsupportedError: as ``regard.attention``; tensors with a
            tangent of forward mode are refused.

    Example:
        >>> import numpy as np, regard
        >>> q, k = np.eye(2), np.eye(4)[:, :2]
        >>> out, statistics = regard.attention(q, k, k, return_statistics=True)
        >>> whole = attention_gradients(q, k, k, out, statistics, q)
        >>> parts = [attention_gradients(q, x, x, out, statistics, q) for x in (k[:1], k[1:])]
        >>> bool(np.allclose(parts[0].query + parts[1].query, whole.query))
        True

    Source: Dao et al. 2022, algorithm 4; Liu et al. 2023 (ring attention).
    """
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise unknown_option("attention_gradients", unknown, (*_OPTIONS, "into", "backend"))
    if value is None:
        raise TypeError(
            "attention_gradients: value is None; pass the values of these keys, (..., Hkv, Lk, Dv)."
        )
    call = read_call(query, key, value, **options)
    _refuse_forward_mode(call, output, statistics, grad_output, into)
    call = detached_call(call)
    _refuse_recorded(call)
    chosen = choose(call, backend)
    given: dict[str, Any] = {"query": query, "key": key, "value": value}
    given |= {name: x for name in ("bias", "sinks") if (x := options.get(name)) is not None}
    found = _buffers(call, given, into)
    out, grad = (
        _rows_of(call, name, x) for name, x in (("output", output), ("grad_output", grad_output))
    )
    xp = arrays_of(call.query)
    with np.errstate(all="ignore"):
        delta = (xp.cast(grad, "float64") * xp.cast(out, "float64")).sum(-1)
    known = of_backend(call, chosen, statistics)
    wanted = {name: x for name, x in found.items() if x is not None and name != "sinks"}
    sums = {name: _folded(call, name, x) for name, x in wanted.items()}
    if sums and 0 not in call.sizes:
        chosen.add_gradients(call, grad, xp.cast(delta, xp.dtype), known, sums)
        for name, x in wanted.items():
            _add_apart(call, x, sums[name])
    if found.get("sinks") is not None:
        found["sinks"][...] += _of_sinks(call, statistics, delta).reshape(found["sinks"].shape)
    return AttentionGradients(**found) if into is None else into


def _refuse_forward_mode(call: Call, *given: Any) -> None:
    """Refuses tensors with a tangent, which the gradients would lose."""
    parts = (x if isinstance(x, tuple) else (x,) for x in (*vars(call).values(), *given))
    tensors = [x for part in parts for x in part if is_tensor(x)]
    if tensors:
        from regard._backends.torch_ops import refuse_forward_mode

        refuse_forward_mode(*tensors)


def _refuse_recorded(call: Call) -> None:
    """Refuses a graph: it would hold the statistics of this call, and none of the sums."""
    if not call.is_torch:
        return
    from regard._base import torch_state

    if torch_state.is_recorded():
        raise UnsupportedError(
            "attention_gradients: it reads and writes numbers at once, and cannot become part of a"
            " graph or a transform (torch.jit.trace, make_fx, torch.vmap). Call it outside, or use"
            " torch.compile; the gradient of regard.attention goes through transforms."
        )


def _rows_of(call: Call, name: str, x: Any) -> Any:
    """``(B, Hq, Lq, Dv)`` of an array of the caller."""
    shape = (*call.leading, *((call.sizes[1],) if call.heads else ()), call.sizes[3])
    _check(call, name, x, (*shape, call.value.shape[3]), FLOATS)
    B, Hq, _, Lq, _ = call.sizes
    return detached(x).reshape((B, Hq, Lq, x.shape[-1]))


def _check(call: Call, name: str, x: Any, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    kind = "tensor" if call.is_torch else "NumPy array"
    if is_tensor(x) != call.is_torch or not (is_tensor(x) or is_array(x)):
        raise TypeError(
            f"attention_gradients: {name} is {a_type(x)}; a {kind} as the query is needed."
        )
    if is_tensor(x):
        require_dense(name, x, "attention_gradients")
    if dtype_name(x) not in dtypes:
        raise TypeError(
            f"attention_gradients: {name} is {dtype_name(x)}; {' or '.join(dtypes)} is needed."
        )
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(
            f"attention_gradients: {name} has shape {tuple(x.shape)}; {tuple(shape)} is needed."
        )
    if is_tensor(x) and x.device != call.query.device:
        raise TypeError(
            f"attention_gradients: {name} is on {x.device} and the query on {call.query.device};"
            " all must be on one device."
        )


def _buffers(call: Call, given: dict[str, Any], into: Any) -> dict[str, Any]:
    """What the gradient of each input is added to; None for those that are not wanted."""
    dtype = accumulating_name(call.query)
    if into is None:
        xp = arrays_of(call.query)
        return {name: xp.full(tuple(x.shape), 0.0, dtype) for name, x in given.items()}
    if not isinstance(into, AttentionGradients):
        raise TypeError(
            f"attention_gradients: into is {a_type(into)}; regard.AttentionGradients of"
            " arrays is needed, as an earlier call gave it."
        )
    found = into._asdict()
    for name, x in found.items():
        if x is None:
            continue
        if name not in given:
            raise TypeError(f"attention_gradients: into has {name}, and no {name} is given.")
        _check(call, f"into.{name}", x, tuple(given[name].shape), (dtype,))
        if is_array(x) and not x.flags.writeable:
            raise ValueError(
                f"attention_gradients: into.{name} is read-only, and gradients are added to it."
                " Pass an array that can be written to."
            )
        strides = x.stride() if is_tensor(x) else x.strides
        if any(step == 0 and n > 1 for step, n in zip(strides, x.shape)) and math.prod(x.shape):
            raise ValueError(
                f"attention_gradients: into.{name} is broadcast: several of its numbers are one in"
                " memory, and each needs its own. Pass a copy of it."
            )
    return {name: None if x is None else detached(x) for name, x in found.items()}


def _folded(call: Call, name: str, x: Any) -> Any:
    """A buffer in the shape in which the call has its input: the same memory where it can be."""
    shape = tuple(getattr(call, name).shape)
    contiguous = x.is_contiguous() if is_tensor(x) else x.flags.c_contiguous
    if contiguous and math.prod(shape) == math.prod(x.shape):
        return x.reshape(shape)
    return arrays_of(x).full(shape, 0.0, dtype_name(x))


def _add_apart(call: Call, x: Any, folded: Any) -> None:
    """Adds to a buffer what was summed in other memory."""
    address = (lambda y: y.data_ptr()) if is_tensor(x) else (lambda y: y.ctypes.data)
    if address(x) == address(folded):
        return
    leading = call.leading if len(folded) == math.prod(call.leading) else (1,) * len(call.leading)
    apart = folded.reshape((*leading, *folded.shape[1:]))
    own = (1,) * (apart.ndim - x.ndim) + tuple(x.shape)
    axes = tuple(n for n, size in enumerate(own[: apart.ndim]) if size == 1 != apart.shape[n])
    x[...] += (apart.sum(axes) if axes else apart).reshape(x.shape)


def _of_sinks(call: Call, statistics: RowStatistics[Any], delta: Any) -> Any:
    """``(Hq,)``: a sink's weight takes ``delta`` from every row."""
    xp = arrays_of(call.query)
    B, Hq, _, Lq, _ = call.sizes
    maximum, total = (xp.array(delta, detached(x)).reshape((B, Hq, Lq)) for x in statistics)
    with np.errstate(all="ignore"):
        sink = xp.cast(call.sinks, "float64")[:, None]
        weight = xp.where(total == 0, 0.0, xp.exp(sink - maximum) / total)
        return xp.cast(-(weight * delta).sum((0, 2)), xp.dtype)
