"""The recording of one forward pass: its tokens, and query, key and value of every layer."""

from typing import TYPE_CHECKING

from regard.recording._grid import Grid
from regard.recording._layer import Layer
from regard.recording._recording import Recording

if TYPE_CHECKING:
    from regard._showing.figure import Figure as Figure
    from regard.recording._writer import Writer as Writer
else:

    def __getattr__(name):
        """``Figure`` and ``Writer`` are loaded when they are first used, with what they need."""
        if name == "Figure":
            from regard._showing.figure import Figure

            return Figure
        if name == "Writer":
            from regard.recording._writer import Writer

            return Writer
        raise AttributeError(f"module 'regard.recording' has no attribute {name!r}")


__all__ = ["Figure", "Grid", "Layer", "Recording", "Writer"]
