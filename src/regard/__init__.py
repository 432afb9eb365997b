"""Exact self-attention that you can see, at full speed."""

from typing import TYPE_CHECKING

from regard._attention import attention, scaled_dot_product_attention
from regard._errors import MaterializeError, RecordingError, ShapeError, UnsupportedError
from regard._reductions import Links, TopKeys
from regard._settings import get_num_threads, limits, set_num_threads
from regard._steps import Steps, steps
from regard._weights import AttentionWeights, WeightsSummary
from regard.recording import Layer, Recording

if TYPE_CHECKING:
    from regard import heads as heads
    from regard import lm as lm
    from regard import nn as nn
    from regard import testing as testing
    from regard import viewer as viewer
    from regard.heads import HeadScores as HeadScores
    from regard.viewer import Viewer as Viewer

    __version__: str

__all__ = [
    "AttentionWeights",
    "Layer",
    "Links",
    "MaterializeError",
    "Recording",
    "RecordingError",
    "ShapeError",
    "Steps",
    "TopKeys",
    "UnsupportedError",
    "WeightsSummary",
    "attention",
    "get_num_threads",
    "limits",
    "scaled_dot_product_attention",
    "set_num_threads",
    "steps",
]

# Loaded when they are first used: each part of the package, and what it shows at the top.
_PARTS = {
    "heads": "heads", "lm": "lm", "nn": "nn", "testing": "testing", "viewer": "viewer",
    "HeadScores": "heads", "Viewer": "viewer",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _PARTS:
        from importlib import import_module

        part = import_module(f"regard.{_PARTS[name]}")
        return part if name == _PARTS[name] else getattr(part, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("regard")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS, "__version__"})
