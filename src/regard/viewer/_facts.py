"""Facts of a recording that need few of its weights: sizes, options, unmasked keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from regard._backends.formula import capped_text, is_capped
from regard._base.arrays import is_tensor, to_numpy
from regard._base.words import word_starts
from regard._call.call import Call
from regard._call.checks import read_call
from regard._call.options import REAL_NUMBERS, RECORDED_ARRAYS
from regard._call.visible import Seen
from regard._weights.attention_weights import AttentionWeights
from regard.recording import Layer, Recording
from regard.viewer._effects import kinds_of
from regard.viewer._lost import sees_any
from regard.viewer.overview import samples_of

OF_WEIGHTS = ("bias", "scale")  # options that stand for weights that were given


def call_of(layer: Layer, head: int | None = None) -> Call:
    """The call of a layer, or of one head of it alone, by its place, in arrays of NumPy."""
    found = layer if head is None else layer.head(layer.head_numbers[head])
    arrays = (None if x is None else to_numpy(x) for x in (found.query, found.key, found.value))
    return read_call(*arrays, **{name: _plain(option) for name, option in found.options.items()})


def _plain(option: Any) -> Any:
    if isinstance(option, tuple):
        return tuple(_plain(part) for part in option)
    return to_numpy(option) if is_tensor(option) else option


def without_first_token(recording: Recording) -> Recording:
    """The recording with its first key hidden: each row's weights are shared by the others."""
    Lq, Lk = len(recording.query_tokens), len(recording.tokens)
    ends = np.ones(Lq, np.int64), np.full(Lq, max(1, Lk))
    layers = [_without_first_key(layer, ends) for layer in recording.layers]
    return Recording(
        recording.tokens, layers, query_tokens=recording.query_tokens, model=recording.model,
        boundary=recording.boundary, group=recording.group, grids=recording.grids,
    )  # fmt: skip


def _without_first_key(layer: Layer, ends: tuple[np.ndarray, np.ndarray]) -> Layer:
    first, last = ends
    if "intervals" in layer.options:
        before, after = (to_numpy(x) for x in layer.options["intervals"])
        first, last = np.maximum(first, before), np.maximum(1, after)
    found = copy.copy(layer)
    found.statistics = None  # they are of all keys
    found.options = {**layer.options, "intervals": (first, last)}
    return found


def about(recording: Recording, name: str) -> dict[str, Any]:
    """Sizes and options of a recording."""
    start = place(recording)
    return {
        "name": name,
        "model": recording.model,
        "group": recording.group,
        "tokens": len(recording.tokens),
        "queries": len(recording.query_tokens),
        "words": len(word_starts(recording.tokens)),
        "itself": start is not None,
        "start": start or 0,
        "boundary": recording.boundary,
        "layers": [
            {"number": number, "name": layer.name, **_layer(layer)}
            for number, layer in zip(recording.layer_numbers, recording.layers)
        ],
    }


def place(recording: Recording) -> int | None:
    """The position of the first query among the keys, or None for cross-attention."""
    count, options = len(recording.query_tokens), recording.layers[0].options
    tokens = len(recording.tokens)
    usual = 0 if count == tokens else options.get("key_lengths", tokens) - count
    start = int(options.get("query_start", usual))
    is_inside = 0 <= start <= tokens - count
    if is_inside and recording.tokens[start : start + count] == recording.query_tokens:
        return start
    return 0 if recording.tokens == recording.query_tokens else None


def _layer(layer: Layer) -> dict[str, Any]:
    head_size = int(layer._query.shape[-1])
    numbers = {name: layer.options[name] for name in REAL_NUMBERS if name in layer.options}
    call = Call.of(**numbers)  # without arrays: reading those of a layer may convert all of them
    return {
        "heads": layer.heads,
        "head_numbers": layer.head_numbers,
        "key_heads": layer.key_heads,
        "head_size": head_size,
        "value_size": None if layer._value is None else int(layer._value.shape[-1]),
        "samples": samples_of(layer._query.shape[1], layer._key.shape[1], head_size),
        "scale": float(layer.options.get("scale", head_size**-0.5)),
        "capped": capped_text(call, "{}") if is_capped(call) else None,
        "causal": bool(layer.options.get("causal", False)),
        "weights_only": layer.weights_only,
        "effects": kinds_of(layer),
        "options": list(_options(layer)),
    }


def _options(layer: Layer) -> Iterator[str]:
    """The options as they were given; arrays by their names."""
    for name, value in layer.options.items():
        if layer.weights_only and name in OF_WEIGHTS:
            continue
        if isinstance(value, bool):
            if value:
                yield name
        elif name in RECORDED_ARRAYS or name == "edits":
            yield name
        else:
            shown = f"{value:g}" if isinstance(value, float) else f"{value}"
            yield f"{name}={shown}"


def visible(layer: Layer, head: int) -> np.ndarray:
    """``(Lq,)``: the number of unmasked keys of each query of a head."""
    return Seen(call_of(layer, head)).count[0]


def pair(recording: Recording, query: int, key: int) -> np.ndarray:
    """ln of the weight of a pair in every head, layer after layer.

    NaN where it is masked, +∞ where it is no number.
    """
    return np.concatenate([_pair(weights, query, key) for weights in recording.weights])


def _pair(weights: AttentionWeights, query: int, key: int) -> np.ndarray:
    """``(Hq,)``; no other row is read."""
    one = weights.part(slice(query, query + 1), slice(key, key + 1))
    logs = to_numpy(one.pool((1, 1)))[:, 0, 0]
    return np.where(np.isnan(logs) & sees_any(one), np.float32(np.inf), logs)
