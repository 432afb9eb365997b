"""Parts of attention as one: outputs over parts of the keys, merged by maximum and total."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from regard._base import loaded
from regard._base.arrays import arrays_of, dtype_name, is_array, is_tensor
from regard._base.errors import ShapeError, UnsupportedError, a_type
from regard._base.types import Array, ArrayT, Float, OutputT
from regard._call.checks import FLOATS
from regard._call.tensors import require_dense
from regard._weights.questions import at_once
from regard._weights.statistics import RowStatistics, moved

Part = tuple[Any, RowStatistics[Any]]
_NO_GRADIENT = (
    ", and statistics have no gradient, so that of the whole would be wrong. Merge within"
    " torch.no_grad(), and compute the gradients of each part with regard.attention_gradients."
)


@at_once
def merge(
    parts: Sequence[tuple[OutputT, RowStatistics[ArrayT]]],
    sinks: Float[Array[object], " Hq"] | None = None,
) -> tuple[OutputT, RowStatistics[ArrayT]]:
    """Attention over all keys, from attention of the same queries over parts of them.

    Exact for scores of any size: ``output = Σ wₚ · outputₚ`` with the share of a part
    ``wₚ = totalₚ · exp(maximumₚ − maximum) / total``. By log-sum-exps in float32 it is wrong by
    0.003 at scores of 6e4. Rows that see nothing in a part take nothing from it; a NaN that one
    sees is NaN in the whole, and so is a total below 0, which none has. It can be continued: what
    it gives is a part again.

    Args:
        parts: ``(output, statistics)`` pairs of
            ``regard.attention(..., sinks=None, return_statistics=True)``: ``(..., Hq, Lq, Dv)`` and
            ``(..., Hq, Lq)``. The keys are in one part each. Of 16-bit inputs take parts with
            ``output_dtype="float32"``, or each is rounded. An output may be None in all of them:
            then the statistics alone are merged.
        sinks: ``(Hq,)`` logits of attention sinks, once, where the last parts are merged; the parts
            have none.

    Returns:
        ``(output, statistics)`` of the whole, in the dtypes of the first part.

    Raises:
        ValueError: no part.
        ShapeError, TypeError: the parts do not fit together.
        UnsupportedError: autograd records an output or the sinks, or a part or the sinks have a
            tangent of forward mode; ``regard.attention_gradients`` has the gradients of a part.

    Example:
        >>> import numpy as np, regard
        >>> q, k = np.eye(2), np.eye(4)[:, :2]
        >>> parts = [
        ...     regard.attention(q, x, x, return_statistics=True) for x in (k[:1], k[1:])
        ... ]
        >>> bool(np.allclose(merge(parts)[0], regard.attention(q, k, k)))
        True

    Source: Milakov & Gimelshein 2018, section 3.1; Liu et al. 2023 (ring attention).
    """
    outputs, statistics = _checked(parts)
    if outputs[0] is not None and _is_recorded(sinks):
        raise UnsupportedError(f"merge: autograd records the sinks{_NO_GRADIENT}")
    first = statistics[0].maximum
    xp, logits = arrays_of(first), None if sinks is None else _read_sinks(sinks, first)
    with np.errstate(all="ignore"):  # of rows that see nothing, NaN and infinities
        maximum, totals, total = _totals(xp, statistics, logits)
        shares = (own / xp.where(total == 0, 1.0, total) for own in totals)
        output: Any = None if outputs[0] is None else _weighted(outputs, shares)
        found = moved(xp, maximum, total, maximum, dtype_name(first))
    return output, RowStatistics(*found)


def _totals(xp: Any, statistics: Sequence[Any], logits: Any) -> tuple[Any, list[Any], Any]:
    """The maximum of all, the totals of the parts relative to it, and their sum; in float64."""
    wide = [tuple(xp.cast(x, "float64") for x in one) for one in statistics]
    maximum = wide[0][0]
    for other, _ in wide[1:]:
        maximum = xp.maximum(maximum, other)
    if logits is not None:
        maximum = xp.where(maximum == -np.inf, maximum, xp.maximum(maximum, logits))
    totals = [xp.where(total < 0, np.nan, total) * _rise(xp, own, maximum) for own, total in wide]
    total = sum(totals[1:], totals[0])
    if logits is not None:
        total = total + xp.where(maximum == -np.inf, 0.0, xp.exp(logits - maximum))
    return maximum, totals, total


def _weighted(outputs: Sequence[Any], shares: Iterable[Any]) -> Any:
    """The sum of outputs times their shares; a visible NaN stays, even times 0."""
    xp, found = arrays_of(outputs[0]), None
    for output, share in zip(outputs, shares):
        term = xp.wide(output) * xp.wide(share)[..., None]
        found = term if found is None else found + term
    return xp.cast(found, dtype_name(outputs[0]))


def _rise(xp: Any, own: Any, maximum: Any) -> Any:
    """exp(own − maximum) of a part: 0 where it sees nothing."""
    return xp.exp(xp.where(own == -np.inf, -np.inf, own - maximum))


def _read_sinks(sinks: Any, maximum: Any) -> Any:
    """``(Hq, 1)`` float64, or ``(1,)`` without heads."""
    if is_tensor(sinks) != is_tensor(maximum) or not (is_tensor(sinks) or is_array(sinks)):
        raise TypeError(
            f"merge: sinks is {a_type(sinks)}; an array of the library of the parts is needed."
        )
    if dtype_name(sinks) not in FLOATS:
        raise TypeError(f"merge: sinks is {dtype_name(sinks)}; floating numbers are needed.")
    _refuse_forward_mode(sinks)
    heads = maximum.shape[-2] if maximum.ndim > 1 else 1
    if tuple(sinks.shape) != (heads,) and not (maximum.ndim == 1 and sinks.ndim == 0):
        raise ShapeError(
            f"merge: sinks has shape {tuple(sinks.shape)}; one logit per query head is needed:"
            f" ({heads},)."
        )
    wide = arrays_of(maximum).cast(sinks.detach() if is_tensor(sinks) else sinks, "float64")
    return wide.reshape((heads, 1) if maximum.ndim > 1 else (1,))


def _checked(parts: Any) -> tuple[list[Any], list[RowStatistics[Any]]]:
    """Outputs and statistics of parts that fit together."""
    if not isinstance(parts, (list, tuple)):
        raise TypeError(
            f"merge: parts is {a_type(parts)}; a list of (output, statistics) is needed."
        )
    if not parts:
        raise ValueError("merge: there is no part; at least one (output, statistics) is needed.")
    for n, part in enumerate(parts):
        pair = isinstance(part, tuple) and len(part) == 2 and not isinstance(part, RowStatistics)
        if not (pair and isinstance(part[1], tuple) and len(part[1]) == 2):
            of = f" of {a_type(part[0])} and {a_type(part[1])}" if pair else ""
            raise TypeError(
                f"merge: part {n} is {a_type(part)}{of}; (output, statistics) is needed, as"
                " regard.attention(..., return_statistics=True) gives it."
            )
        _check_arrays(n, part, parts[0])
    outputs = [output for output, _ in parts]
    return outputs, [RowStatistics(*one) for _, one in parts]


def _check_arrays(n: int, part: Part, first: Part) -> None:
    output, statistics = part
    arrays = {"maximum": statistics[0], "total": statistics[1]}
    expected = {"maximum": first[1][0], "total": first[1][0]}
    if (output is None) != (first[0] is None):
        raise TypeError("merge: some parts have an output and others have None; all or none may.")
    if output is not None:
        arrays["output"], expected["output"] = output, first[0]
    for name, x in arrays.items():
        like = expected[name]
        allowed = FLOATS if name == "output" else ("float32", "float64")
        if not (is_tensor(x) or is_array(x)) or dtype_name(x) not in FLOATS:
            found = getattr(x, "dtype", "") if is_array(x) or is_tensor(x) else type(x).__name__
            raise TypeError(f"merge: {name} of part {n} is {found}; floating arrays are needed.")
        if is_tensor(x):
            require_dense(f"{name} of part {n}", x, "merge")
        if dtype_name(x) not in allowed:
            raise TypeError(
                f"merge: {name} of part {n} is {dtype_name(x)}, rounded more than shares may be;"
                f" {' or '.join(allowed)} is needed, as attention gives it."
            )
        if is_tensor(x) != is_tensor(like) or dtype_name(x) != dtype_name(like):
            raise TypeError(
                f"merge: {name} of part {n} is {type(x).__name__} of {dtype_name(x)} and that of"
                f" part 0 {type(like).__name__} of {dtype_name(like)}; all must be alike."
            )
        if is_tensor(x) and x.device != like.device:
            raise TypeError(
                f"merge: {name} of part {n} is on {x.device} and that of part 0 on {like.device};"
                " all must be on one device."
            )
        if tuple(x.shape) != tuple(like.shape):
            raise ShapeError(
                f"merge: {name} of part {n} has shape {tuple(x.shape)}, that of part 0"
                f" {tuple(like.shape)}; the parts are of the same queries."
            )
    if output is not None and _place(output) != _place(statistics[0]):
        raise TypeError(
            f"merge: the output of part {n} is {_place(output)} and its statistics"
            f" {_place(statistics[0])}; both must be of one library and device."
        )
    if output is not None and tuple(output.shape[:-1]) != tuple(statistics[0].shape):
        raise ShapeError(
            f"merge: the output of part {n} has shape {tuple(output.shape)} and its statistics"
            f" {tuple(statistics[0].shape)}; (..., Hq, Lq, Dv) and (..., Hq, Lq) are needed."
        )
    _refuse_forward_mode(*arrays.values())
    if _is_recorded(output):
        raise UnsupportedError(f"merge: autograd records an output{_NO_GRADIENT}")


def _is_recorded(x: Any) -> bool:
    return is_tensor(x) and x.requires_grad and loaded.torch.is_grad_enabled()


def _refuse_forward_mode(*arrays: Any) -> None:
    """Refuses tensors with a tangent, which the statistics would lose."""
    if tensors := [x for x in arrays if is_tensor(x)]:
        from regard._backends.torch_ops import refuse_forward_mode

        refuse_forward_mode(*tensors)


def _place(x: Any) -> str:
    """The library of an array and, of a tensor, its device."""
    return f"a tensor on {x.device}" if is_tensor(x) else "a NumPy array"
