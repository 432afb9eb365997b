"""Exact self-attention that you can see, at full speed."""

from regard._attention import attention, scaled_dot_product_attention
from regard._errors import MaterializeError, RecordingError, ShapeError, UnsupportedError
from regard._settings import get_num_threads, limits, set_num_threads
from regard._weights import AttentionWeights
from regard.recording import Recording
from regard.steps import Steps, steps

__all__ = [
    "AttentionWeights",
    "MaterializeError",
    "Recording",
    "RecordingError",
    "ShapeError",
    "Steps",
    "UnsupportedError",
    "attention",
    "get_num_threads",
    "limits",
    "scaled_dot_product_attention",
    "set_num_threads",
    "steps",
]


def __getattr__(name: str) -> object:
    """``regard.lm``, ``regard.nn`` and ``regard.testing`` are loaded when they are first used."""
    if name in ("lm", "nn", "testing"):
        from importlib import import_module

        return import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
