"""Weights that exist, as a layer: they are the softmax of the scores ``ln(weight)``.

So query and key are zeros, the logarithms are the bias, and all that reads a layer computes the
weights again, by the same code as those of any other: a format, a backend and a page of their own
would be needed otherwise. A row is divided by its sum, which repairs its rounding. Beyond that a
weight comes back with the rounding of its logarithm: within 3e-7, and 4e-6 of it above 1e-6, in
float32 and rows of 800 keys; 2e-15 and 2e-14 in float64 (tests/test_recording_from_weights.py).

The rest of a row that sums to less than 1 is that of an attention sink. Its logit is one number for
a head and the rest is another for each row, so each row of scores is shifted by the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from regard._base.arrays import dtype_name, is_tensor, to_numpy
from regard._base.errors import ShapeError, a_type
from regard._base.settings import counted, require_materializable

WAY_OUT = (
    "Give fewer layers or heads of them; record query and key instead, which are linear in the"
    " length (regard.record)"
)

EAGER = (
    'A model of transformers gives its attentions with attn_implementation="eager" and'
    " output_attentions=True."
)


def listed(weights: Any) -> list[tuple[int | None, str, Any]]:
    """Number, name for messages and array ``(H, Lq, Lk)`` of each layer."""
    if is_array(weights) and weights.ndim not in (4, 5):
        raise ShapeError(
            f"from_weights: weights {_shape(weights)} are not read as (layers, H, Lq, Lk); give one"
            " array (H, Lq, Lk) for each layer, in a list: [weights] of one layer."
        )
    if isinstance(weights, (str, bytes)) or not isinstance(weights, Iterable):
        raise TypeError(
            f"from_weights: weights is {type(weights).__name__}; one array (H, Lq, Lk) for each"
            " layer is needed, in a list or a dict of layer numbers."
        )
    numbered = weights.items() if isinstance(weights, Mapping) else enumerate(weights)
    found = [(n, f"weights[{n!r}]", x) for n, x in numbered]
    if not found:
        raise ShapeError(
            f"from_weights: weights is empty; one array for each layer is needed. {EAGER}"
        )
    is_usual = not isinstance(weights, Mapping)
    return [(None if is_usual else n, what, of_one_text(what, x)) for n, what, x in found]


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_tensor(x)


def of_one_text(what: str, weights: Any) -> Any:
    """``(H, Lq, Lk)``, without the axis of a batch of one."""
    if weights is None:
        raise TypeError(f"from_weights: {what} is None; an array (H, Lq, Lk) is needed. {EAGER}")
    if not is_array(weights):
        raise TypeError(
            f"from_weights: {what} is {type(weights).__name__}; a NumPy array or torch tensor"
            " (H, Lq, Lk) is needed."
        )
    if dtype_name(weights) not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(
            f"from_weights: {what} is of {dtype_name(weights)}; float16, bfloat16, float32 or"
            " float64 is needed."
        )
    if weights.ndim == 4 and len(weights) > 1:
        raise ShapeError(
            f"from_weights: {what} {_shape(weights)} is of {len(weights)} texts; make one recording"
            " for each: from_weights(tokens, [w[i] for w in weights])."
        )
    if weights.ndim not in (3, 4) or 0 in weights.shape[:-2]:
        raise ShapeError(
            f"from_weights: {what} {_shape(weights)} is not read as (H, Lq, Lk) or (1, H, Lq, Lk)"
            " with at least one head; weights[None] adds the axis of a single one."
        )
    return weights[0] if weights.ndim == 4 else weights


def check_lengths(what: str, weights: Any, keys: int, queries: int | None) -> None:
    """Refuses weights ``(H, Lq, Lk)`` whose lengths are not those of the tokens."""
    _, Lq, Lk = _shape(weights)
    if Lk != keys:
        needed = f"there are {keys} tokens; one for each key is needed."
    elif queries is not None and Lq != queries:
        needed = f"there are {queries} query_tokens; one for each query is needed."
    elif queries is None and Lq > Lk:
        needed = "queries that are not among the tokens need query_tokens."
    else:
        return
    raise ShapeError(f"from_weights: {what} {_shape(weights)} is read as (H, Lq, Lk); {needed}")


def check_size(layers: Sequence[Any]) -> None:
    """Refuses weights ``(H, Lq, Lk)`` that take too much memory, all layers together."""
    is_wide = any(dtype_name(x) == "float64" for x in layers)
    shape = (sum(map(len, layers)), *_shape(layers[0])[1:])
    require_materializable("from_weights", shape, 64 if is_wide else 32, WAY_OUT)


def arguments(what: str, weights: Any, causal: bool | None, sinks: bool) -> dict[str, Any]:
    """What ``Layer`` makes these weights ``(H, Lq, Lk)`` of.

    Args:
        what: they are called in messages.
        weights: of one layer.
        causal: None for whether every weight after its query's position is 0.
        sinks: whether rows may sum to less than 1.
    """
    H, Lq, Lk = _shape(weights)
    dtype = np.dtype("float64" if dtype_name(weights) == "float64" else "float32")
    scores, logits = np.empty((H, Lq, Lk), dtype), np.full(H, -np.inf, dtype)
    later = np.arange(Lk) > np.arange(Lk - Lq, Lk)[:, None]
    is_causal = Lq <= Lk and bool(later.any())
    for h in range(H):
        w = to_numpy(weights[h]).astype(dtype, copy=False)
        rest = _rests(f"{what} head {h}", w, sinks)
        is_causal = is_causal and not w[later].any()
        with np.errstate(divide="ignore"):
            logs = np.log(w, dtype=np.float64)
        if rest.any():
            shift = np.log(np.maximum(rest, np.finfo(dtype).epsneg))
            logits[h] = (shift.min() + shift.max()) / 2  # then the scores are smallest
            logs += (logits[h] - shift)[:, None]
        scores[h] = logs
    if causal and not is_causal and later.any():
        raise ValueError(
            f"from_weights: {what} has weights after its queries' positions, and causal is True;"
            " leave it out, or set them to 0: np.tril."
        )
    query, key = (np.broadcast_to(dtype.type(0), (H, L, 1)) for L in (Lq, Lk))
    found = {"query": query, "key": key, "bias": scores, "scale": 1.0}
    if causal or (causal is None and is_causal):
        found["causal"] = True
    if np.isfinite(logits).any():
        found["sinks"] = logits
    return found


def _rests(what: str, w: np.ndarray, sinks: bool) -> np.ndarray:
    """``(Lq,)``: what each row leaves to an attention sink; 0 where there is none."""
    bad = ~(np.isfinite(w) & (w >= 0))
    if bad.any():
        i, j = (int(n) for n in np.argwhere(bad)[0])
        way_out = "Scores become weights by a softmax."
        if np.isnan(w[i, j]):
            way_out = "Rows that see nothing are 0: np.nan_to_num(weights)."
        raise ValueError(
            f"from_weights: {what} query {i} key {j} is {w[i, j]}; weights are finite and not"
            f" negative. {way_out}"
        )
    sums = w.sum(-1, dtype=np.float64)
    slack = 2 * _rounding(w) + (8 + w.shape[-1]) * 2**-24  # and that of the sum it was divided by
    for i in np.flatnonzero(sums > 1 + slack)[:1]:
        raise ValueError(
            f"from_weights: {what} query {i} sums to {sums[i]:.6g}; the weights of a query sum to"
            " 1. Take them without dropout (model.eval()), or as w / w.sum(-1, keepdims=True)."
        )
    if sinks:
        return (1 - sums).clip(0)
    for i in np.flatnonzero((sums > 0) & (sums < 1 - slack))[:1]:
        raise ValueError(
            f"from_weights: {what} query {i} sums to {sums[i]:.6g}; the weights of a query sum to"
            " 1, or to 0 where it sees nothing. If an attention sink takes the rest, say"
            " sinks=True; if keys are missing, give all of them."
        )
    return np.zeros(len(w))


def _rounding(w: np.ndarray) -> float:
    """Half a unit in the last place of the coarsest dtype that holds all of these, below 1.

    Weights of half precision are often handed on in a wider dtype.
    """
    single = w.astype(np.float32)
    if not (single.view(np.uint32) & 0xFFFF).any():
        return 2.0**-8  # bfloat16
    return 2.0**-11 if (single.astype(np.float16) == w).all() else 2.0**-24


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in x.shape)


def names_of(names: Sequence[str] | None, count: int) -> Sequence[str]:
    """The name of each layer's module, by default none."""
    if names is None:
        return [""] * count
    if not hasattr(names, "__len__"):
        raise TypeError(f"from_weights: names is {a_type(names)}; a list is needed.")
    if isinstance(names, str) or len(names) != count:
        told = "one str" if isinstance(names, str) else f"{len(names)} of them"
        raise ShapeError(
            f"from_weights: names is {told}; {counted(count, 'layer')}"
            f" {'needs' if count == 1 else 'need'} one each."
        )
    return names
