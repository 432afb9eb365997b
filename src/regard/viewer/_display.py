"""The display of a recording or of weights in a notebook: the viewer, or a heatmap without it."""

from __future__ import annotations

import sys
from typing import Any

from regard._showing.picture import recording_html, weights_html
from regard._weights.attention_weights import AttentionWeights
from regard.recording import Recording


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
    """Weights as a recording whose tokens are positions; None where there is nothing to show.

    A batch gives its first element. None for more axes before the heads, for a part of the keys,
    and for every nth query, which no recording has. The arrays are copied: the view stays open.
    """
    if not weights.size or weights.ndim > 4:
        return None
    try:
        layer = weights.layer()
    except ValueError:
        return None
    *_, Lq, Lk = weights.shape
    start = layer.query_start
    tokens = [str(n) for n in range(max(Lq, Lk))]
    own = None if 0 <= start <= Lk - Lq else tokens[:Lq]
    return Recording(tokens[:Lk], [layer], query_tokens=own or tokens[start : start + Lq])
