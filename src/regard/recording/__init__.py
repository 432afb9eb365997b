"""The recording of one forward pass: its tokens, and query, key and value of every layer."""

from regard.recording._layer import Layer
from regard.recording._recording import Recording

__all__ = ["Layer", "Recording"]
