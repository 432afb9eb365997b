"""Every step of some queries and keys of one head, in float64, for texts of any length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard._backends.formula import apply, capped, edited_pairs, is_capped, scaled, weight_blocks
from regard._base.arrays import NumpyArrays
from regard._call.call import Call
from regard.recording import Layer
from regard.viewer._facts import call_of

DIGITS = 9  # more than float32 has
FLOAT64 = NumpyArrays("float64")


def steps(layer: Layer, head: int, queries: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
    """The numbers of the formula, by the names of ``regard.Steps``; None for −∞.

    Weights and outputs are those over all keys.

    Args:
        layer: of a recording.
        head: of its query heads.
        queries: the rows.
        keys: the columns.
    """
    call = _in_float64(call_of(layer, head))
    i, j = np.asarray(queries), np.asarray(keys)
    q, k = call.query[0, 0, i], call.key[0, 0, j]
    with np.errstate(all="ignore"):  # NaN and inf are valid results here
        matrices = _scores(call, q, k, i, j)
        rows = [_row(call, query, j) for query in queries]
    visible, weights, outputs = (np.array(part) for part in zip(*rows))
    last = next(x for x in reversed(matrices.values()) if x is not None)
    found = {"query": q, "key": k, "value": None if call.value is None else call.value[0, 0, j]}
    found |= {**matrices, "masked": np.where(visible, last, -np.inf), "weights": weights}
    found["output"] = None if call.value is None else outputs
    return {"queries": [*queries], "keys": [*keys]} | {n: _numbers(x) for n, x in found.items()}


def _in_float64(call: Call) -> Call:
    value = None if call.value is None else call.value.astype(np.float64)
    query, key = call.query.astype(np.float64), call.key.astype(np.float64)
    return dataclasses.replace(call, query=query, key=key, value=value)


def _scores(call: Call, q: Any, k: Any, i: np.ndarray, j: np.ndarray) -> dict[str, Any]:
    """``(queries, keys)`` each, before the mask; None for a step that the call does not have."""
    names = ("scores", "scaled", "capped", "biased", "edited")
    found = dict.fromkeys(names) | {"scores": np.einsum("id,jd->ij", q, k)}
    found["scaled"] = scaled(call, found["scores"])
    last = capped(FLOAT64, call, found["scaled"])
    if is_capped(call):
        found["capped"] = last
    if call.bias is not None:
        down, across = (x if n > 1 else 0 * x for x, n in zip((i, j), call.bias.shape[2:]))
        found["biased"] = last = last + call.bias[0, 0][np.ix_(down, across)].astype(np.float64)
    if call.rectangles:
        found["edited"] = last + edited_pairs(call, i[:, None], j)[0]
    return found


def _row(call: Call, query: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which of the keys are unmasked for a query, their weights, and its output."""
    (block,) = weight_blocks(FLOAT64, call.rows(slice(query, query + 1)))
    *_, Lk = call.sizes
    visible, weights = np.zeros(Lk, bool), np.zeros(Lk)
    visible[block.keys] = True if block.visible is None else block.visible[0, 0, 0]
    weights[block.keys] = block.weights[0, 0, 0]
    output = np.zeros(0)
    if call.value is not None:
        v = call.value[:, :, block.keys]
        output = apply(FLOAT64, block.weights, block.visible, v)[0, 0, 0]
    return visible[keys], weights[keys], output


def _numbers(array: np.ndarray | None) -> list[Any] | None:
    """Nested lists; None for −∞, and words for NaN and ∞, which JSON lacks."""
    if array is None:
        return None
    return [[_number(float(x)) for x in row] for row in array]


def _number(x: float) -> float | str | None:
    if math.isfinite(x):
        return float(f"{x:.{DIGITS}g}")
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else None
