"""The display of a recording or of weights in a notebook: the viewer, or a heatmap without it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from regard._showing.picture import recording_html, weights_html
from regard._weights.attention_weights import AttentionWeights
from regard._weights.origin import origin_of
from regard.recording import Layer, Recording
from regard.recording._words import WordWeights

MOST_OF_WORDS = 2**24  # weights that are computed at once
WHOLE = 1 - 1e-4  # a row of less has given some of its weight to a sink


def recording_bundle(recording: Recording) -> dict[str, Any]:
    """By MIME type: the viewer where a kernel can serve it, and a text in any case."""
    shown = {"text/plain": repr(recording)}
    widget = _widget(recording)
    return shown | widget | ({"text/html": recording_html(recording)} if widget else {})


def weights_bundle(weights: AttentionWeights) -> dict[str, Any]:
    """The same for weights of up to three axes, and for the first of a batch."""
    shown = {"text/plain": repr(weights)}
    recording = recording_of(weights) if is_in_kernel() else None
    widget = {} if recording is None else _widget(recording)
    return shown | widget | ({"text/html": weights_html(weights)} if widget else {})


def words_bundle(weights: WordWeights) -> dict[str, Any]:
    """The same for weights of words that are not too many to be computed at once."""
    shown = {"text/plain": repr(weights)}
    is_shown = is_in_kernel() and 0 < weights.size <= MOST_OF_WORDS
    return shown | (_widget(recording_of_words(weights)) if is_shown else {})


def recording_of_words(weights: WordWeights) -> Recording[Any]:
    """Weights of words as a recording of one layer, whose tokens are the words."""
    dense, (queries, keys) = np.asarray(weights), weights._texts
    dense = dense.reshape(-1, *dense.shape[-2:])
    sums, origin = dense.sum(-1), origin_of(weights._pieces)
    layer = Layer.from_weights(
        dense,
        head_numbers=weights.head_numbers,
        causal=None if queries == keys else False,
        sinks=bool(((sums > 0) & (sums < WHOLE)).any()),
    )
    if origin is not None:
        layer.number, layer.name = origin.number, origin.name
    return Recording(keys, [layer], query_tokens=queries, model=origin.model if origin else "")


def is_in_kernel() -> bool:
    """Whether a notebook's kernel runs this code; IPython is not loaded to find out."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _widget(recording: Recording) -> dict[str, Any]:
    """The widget's own MIME types; none outside of a kernel, or where anywidget is missing."""
    groups = recording.groups.values()
    if not is_in_kernel() or not all(group.query_tokens for group in groups):
        return {}
    try:
        from regard.viewer.notebook import RecordingWidget
    except ModuleNotFoundError:
        return {}
    found = RecordingWidget(recording)._repr_mimebundle_()
    data = found[0] if isinstance(found, tuple) else found or {}
    return {kind: value for kind, value in data.items() if kind != "text/plain"}


def recording_of(weights: AttentionWeights) -> Recording | None:
    """Weights as a recording of one layer; None where there is nothing to show.

    Those of a recording have its tokens and the layer's number; the tokens of others are positions.
    A batch gives its first element. None for more axes before the heads, for a part of the keys,
    and for every nth query, which no recording has. The arrays are copied: the view stays open.
    """
    if not weights.size or weights.ndim > 4:
        return None
    try:
        layer = weights.layer()
    except ValueError:
        return None
    if (origin := origin_of(weights)) is not None:
        layer.number, layer.name = origin.number, origin.name
        return Recording(
            origin.column_tokens, [layer], query_tokens=origin.row_tokens, model=origin.model
        )
    *_, Lq, Lk = weights.shape
    start = layer.query_start
    tokens = [str(n) for n in range(max(Lq, Lk))]
    own = None if 0 <= start <= Lk - Lq else tokens[:Lq]
    return Recording(tokens[:Lk], [layer], query_tokens=own or tokens[start : start + Lq])
