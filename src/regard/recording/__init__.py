"""The recording of one forward pass: its tokens, and query, key and value of every layer."""

from typing import TYPE_CHECKING

from regard.recording._grid import Grid
from regard.recording._layer import Layer
from regard.recording._recording import Recording

if TYPE_CHECKING:
    from regard._showing.figure import Figure as Figure
    from regard.recording._words import Words as Words
    from regard.recording._words import WordWeights as WordWeights
    from regard.recording._writer import Writer as Writer
else:

    def __getattr__(name):
        """Some names are loaded when they are first used, with what they need."""
        if name == "Figure":
            from regard._showing.figure import Figure

            return Figure
        if name == "Writer":
            from regard.recording._writer import Writer

            return Writer
        if name in ("Words", "WordWeights"):
            from regard.recording import _words

            return getattr(_words, name)
        raise AttributeError(f"module 'regard.recording' has no attribute {name!r}")


__all__ = ["Figure", "Grid", "Layer", "Recording", "WordWeights", "Words", "Writer"]
