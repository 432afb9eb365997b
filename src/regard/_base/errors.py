"""The errors that regard raises, besides plain TypeError for values of a wrong type."""


class ShapeError(ValueError):
    """Shapes, lengths or head counts that do not fit together."""


class UnsupportedError(NotImplementedError):
    """No backend, or not the one that was named, takes the call; the text lists each refusal."""


class MaterializeError(ValueError):
    """A result would be stored whole and is larger than the limit."""


class RecordingError(ValueError):
    """A file that is no recording, or a damaged one."""
