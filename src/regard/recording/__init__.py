"""The recording of one forward pass: its tokens, and query, key and value of every layer."""

from typing import TYPE_CHECKING

from regard.recording._grid import Grid
from regard.recording._layer import Layer
from regard.recording._recording import Recording

if TYPE_CHECKING:
    from regard.recording._writer import Writer as Writer
else:

    def __getattr__(name):
        """``Writer`` is loaded when it is first used, with what reads and writes files."""
        if name == "Writer":
            from regard.recording._writer import Writer

            return Writer
        raise AttributeError(f"module 'regard.recording' has no attribute {name!r}")


__all__ = ["Grid", "Layer", "Recording", "Writer"]
