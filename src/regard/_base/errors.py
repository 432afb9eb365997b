"""The errors that regard raises, besides plain TypeError for values of a wrong type."""

import re

# A name that begins with a vowel where it is read: an int, an ndarray, an LSTM.
_BEGINS_WITH_VOWEL = re.compile("[aeioAEIO]|ndarray|[FHLMNRSX](?=[A-Z])")


def a_type(x: object, *, whole: bool = False) -> str:
    """What was found in the place of something else: ``an int``, ``a list``.

    Args:
        x: that was found.
        whole: with the module that its type is of: ``a torch.Tensor``.
    """
    kind = type(x)
    name = f"{kind.__module__}.{kind.__qualname__}" if whole else kind.__name__
    return f"{'an' if _BEGINS_WITH_VOWEL.match(name) else 'a'} {name}"


class ShapeError(ValueError):
    """Shapes, lengths or head counts that do not fit together."""


class UnsupportedError(NotImplementedError):
    """No backend, or not the one that was named, takes the call; the text lists each refusal."""


class MaterializeError(ValueError):
    """A result would be stored whole and is larger than the limit."""


class RecordingError(ValueError):
    """A file that is no recording, or a damaged one."""
