"""The display of a recording or of weights in a notebook: the viewer, or a heatmap without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from regard._showing.picture import MOST_OF_WORDS, recording_html, weights_html
from regard._weights.attention_weights import AttentionWeights
from regard._weights.origin import origin_of
from regard.recording import Layer, Recording
from regard.recording._words import WordWeights

# Metadata too, where a front end needs them: Colab, to find the widget's page.
Bundle: TypeAlias = dict[str, Any] | tuple[dict[str, Any], dict[str, Any]]
WHOLE = 1 - 1e-4  # a row of less has given some of its weight to a sink


def recording_bundle(recording: Recording) -> Bundle:
    """By MIME type: the viewer where a kernel can serve it, and a text in any case."""
    return _bundle(recording, recording, lambda: recording_html(recording))


def weights_bundle(weights: AttentionWeights) -> Bundle:
    """The same for weights of up to three axes, and for the first of a batch."""
    recording = recording_of(weights) if is_in_kernel() else None
    return _bundle(weights, recording, lambda: weights_html(weights))


def words_bundle(weights: WordWeights) -> Bundle:
    """The same for weights of words that are not too many to be computed at once."""
    if not (is_in_kernel() and 0 < weights.size <= MOST_OF_WORDS):
        return _bundle(weights, None)
    recording = recording_of_words(weights)
    return _bundle(weights, recording, lambda: recording_html(recording))


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


def _bundle(shown: Any, recording: Recording | None, html: Callable[[], str] = str) -> Bundle:
    """A text, and in a kernel the widget, with a picture for where a notebook is only read.

    The text alone outside of a kernel, and where anywidget is missing.
    """
    text = {"text/plain": repr(shown)}
    if recording is None or not is_in_kernel():
        return text
    if not all(group.query_tokens for group in recording.groups.values()):
        return text
    try:
        from regard.viewer.notebook import RecordingWidget
    except ModuleNotFoundError:
        return text
    data, metadata = RecordingWidget(recording).mimebundle(html)
    return (data | text, metadata) if metadata else data | text


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
