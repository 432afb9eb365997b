"""Exact self-attention that you can see, at full speed."""

from regard._errors import MaterializeError, RecordingError, ShapeError, UnsupportedError

__all__ = [
    "MaterializeError",
    "RecordingError",
    "ShapeError",
    "UnsupportedError",
]
