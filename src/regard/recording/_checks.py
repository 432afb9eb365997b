"""What a recording is made of, checked: tokens, and the layers' numbers and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from regard._base.errors import ShapeError, a_type
from regard._base.settings import counted
from regard._base.types import ArrayT
from regard.recording._layer import Layer, shape_of
from regard.recording._texts import Texts


def checked_texts(name: str, tokens: Sequence[str]) -> Sequence[str]:
    """The same, or those of a file as they are."""
    return tokens if isinstance(tokens, Texts) and len(tokens) else checked_tokens(name, tokens)


def checked_tokens(name: str, tokens: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        found = "one str" if isinstance(tokens, str) else a_type(tokens)
        raise TypeError(f"recording: {name} is {found}; a list with one str per token is needed.")
    tokens = tuple(tokens)
    for index, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(
                f"recording: {name}[{index}] is {type(token).__name__}; every token must be a str:"
                " give texts, not ids."
            )
    if not tokens and name == "tokens":
        raise ShapeError("recording: no tokens; at least one is needed.")
    return tokens


def checked_layers(layers: Sequence[Layer[ArrayT]]) -> tuple[Layer[ArrayT], ...]:
    if isinstance(layers, Layer):
        raise TypeError("recording: layers is one Layer; a list is needed: [layer].")
    if not isinstance(layers, Iterable):
        raise TypeError(f"recording: layers is {a_type(layers)}; a list of Layer is needed.")
    layers = tuple(layers)
    for index, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(
                f"recording: layers[{index}] is {type(layer).__name__}; every layer must be a"
                " regard.recording.Layer(query, key, value)."
            )
    if not layers:
        raise ShapeError("recording: no layers; at least one is needed.")
    return layers


def checked_numbers(layers: Sequence[Layer]) -> tuple[int, ...]:
    found = tuple(n if layer.number is None else layer.number for n, layer in enumerate(layers))
    if len(set(found)) < len(found):
        twice = [number for number, count in Counter(found).items() if count > 1]
        first, second, *_ = (n for n, number in enumerate(found) if number == twice[0])
        raise ValueError(
            f"recording: layers[{first}] and layers[{second}] both have the number {twice[0]}; each"
            " layer has its own. Layer(..., number=None) is numbered by its place."
        )
    return found


def checked_boundary(boundary: Any, count: int) -> int | None:
    if boundary is None:
        return None
    if isinstance(boundary, bool) or not isinstance(boundary, (int, np.integer)):
        raise TypeError(
            f"recording: boundary is {type(boundary).__name__}; an int is needed, the position of"
            " the first token that a model wrote."
        )
    if not 0 <= boundary < count:
        raise ValueError(
            f"recording: boundary is {boundary}; there are {count} tokens, 0 to {count - 1}."
            " Leave it out where no model wrote any of them."
        )
    return int(boundary)


def check_key_count(layers: Mapping[int, Layer], tokens: Sequence[str]) -> None:
    for number, layer in layers.items():
        if shape_of(layer._key)[1] != len(tokens):
            raise ShapeError(
                f"recording: {counted(len(tokens), 'token')}, but layer {number} has"
                f" {counted(shape_of(layer._key)[1], 'key')}; one token per key is needed."
                f"\n  key {shape_of(layer._key)} read as (Hkv, Lk, D)"
            )


def checked_query_tokens(
    layers: Mapping[int, Layer],
    tokens: Sequence[str],
    query_tokens: Sequence[str] | None,
) -> Sequence[str]:
    (first, one), *_ = layers.items()
    count = shape_of(one._query)[1]
    for number, layer in layers.items():
        if shape_of(layer._query)[1] != count:
            raise ShapeError(
                f"recording: layer {number} has"
                f" {counted(shape_of(layer._query)[1], 'query', 'queries')} and layer"
                f" {first} has {count}; make one recording for each, which can be groups of one:"
                " others={name: recording}."
            )
    if query_tokens is not None:
        named = checked_texts("query_tokens", query_tokens)
        if len(named) != count:
            raise ShapeError(
                f"recording: {len(named)} query_tokens, but {counted(count, 'query', 'queries')};"
                f" one token per query is needed.\n  query {shape_of(one._query)}"
                " read as (Hq, Lq, D)"
            )
        return named
    start = _place_of(one, len(tokens))
    for number, layer in layers.items():
        place = _place_of(layer, len(tokens))
        if place < 0 or place + count > len(tokens):
            raise ShapeError(
                f"recording: {counted(count, 'query', 'queries')} from position {place} on, but"
                f" {counted(len(tokens), 'token')}; queries with tokens of their own"
                " (cross-attention) need query_tokens."
            )
        if place != start:
            raise ShapeError(
                f"recording: queries of layer {number} are from position {place} on and those of"
                f" layer {first} from {start}; give query_tokens, or make one recording for each,"
                " which can be groups of one: others={name: recording}."
            )
    return tokens[start : start + count]


def place_among(layer: Layer, tokens: Sequence[str], queries: Sequence[str]) -> int | None:
    """Of which token the first query is, where all of them are tokens; None of cross-attention."""
    place, count = _place_of(layer, len(tokens)), len(queries)
    if 0 <= place <= len(tokens) - count and tokens[place : place + count] == queries:
        return place
    return 0 if tokens == queries else None


def _place_of(layer: Layer, tokens: int) -> int:
    """Of which token the first query is; as many queries as tokens are these tokens."""
    count = shape_of(layer._query)[1]
    usual = 0 if count == tokens else layer.options.get("key_lengths", tokens) - count
    place: int = layer.options.get("query_start", usual)
    return place
