"""The file of a recording: safetensors, one tensor per array, everything else as JSON.

Written and read here rather than by the safetensors library, for two reasons: arrays of any strides
are written one at a time, so that saving never holds a second copy of the recording; and a file is
opened once, so that the checked bytes are the ones read, even if the file is replaced meanwhile.
Each library reads what the other writes; a test checks both. docs/recording.md describes the file.
``_saving`` writes it, ``_loading`` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard._base.errors import RecordingError
from regard._base.files import check_ending
from regard._weights.statistics import RowStatistics

FORMAT = "regard-recording"
VERSION = 1
GROUPS_VERSION = 2  # of a file with several groups of layers
GRADIENT_VERSION = 3  # of one with the gradients of outputs
TEXTS_VERSION = 4  # of one with texts of tokens as arrays, or with row statistics
VERSIONS = VERSION, GROUPS_VERSION, GRADIENT_VERSION, TEXTS_VERSION
ENDING = ".safetensors"
# The safetensors library refuses longer headers too.
HEADER_LIMIT = 100_000_000
# Of the texts of a list in the header; each token counts as one more. Longer lists are arrays.
MOST_CHARACTERS = 65_536
ALIGNMENT = 64
ROOM_BYTES = 1 << 22  # of what is written together
LEAST_ROOM = 1 << 16
BLOCK_BYTES = 1 << 18  # of a larger array
# What the header says of a group of layers, as JSON of these types.
FACTS = {
    "model": str,
    "tokens": list,
    "options": list,
    "query_tokens": list,
    "boundary": int,
    "names": list,
    "numbers": list,
    "head_numbers": list,
    "weights_only": list,
    "grids": list,
    "group": str,
}
NEEDED = ("model", "tokens", "options")
TEXTS = ("tokens", "query_tokens")
OF_LAYERS = {
    "names": "name",
    "numbers": "number",
    "head_numbers": "head_numbers",
    "weights_only": "weights_only",
}

VECTORS = ("query", "key", "value", "gradient")  # arrays of a layer beside those of its options

STATISTICS = RowStatistics._fields

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES = {
    code: np.dtype(np.uint16 if name == "bfloat16" else name).newbyteorder("<")
    for name, code in CODES.items()
}
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(::[a-zA-Z0-9+.-]+)*://\S+")
# To name a file that is not safetensors.
KNOWN = {
    b"\x89PNG": "a PNG picture",
    b"\x93NUMPY": "a NumPy array",
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
    b"\x80": "a pickle, which regard never reads",
}


def is_address(path: object) -> bool:
    """Whether that is an address of fsspec, ``https://…``, and no name of a file."""
    return isinstance(path, str) and "://" in path and _ADDRESS.fullmatch(path) is not None


def check_name(path: str | Path) -> None:
    """Refuses a name of another kind of file.

    Raises:
        ValueError: with a name that fits.
    """
    if not str(path).endswith(ENDING):
        check_ending(path, (ENDING,), "a recording")


@contextlib.contextmanager
def no_loop(path: Path) -> Iterator[None]:
    """Says in words that a link leads back to itself."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RecordingError(
            f"{path} is a link that leads back to itself, so there is no file; remove it, or give"
            " another name."
        ) from None


class Kind(NamedTuple):
    """What the header says of an array."""

    code: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> Kind:
        return cls(code_of(array.dtype), tuple(array.shape))

    @property
    def item_size(self) -> int:
        return DTYPES[self.code].itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_size


@functools.cache
def code_of(dtype: Any) -> str:
    return CODES[str(dtype).removeprefix("torch.")]


def prefix(place: int) -> str:
    """What the names of a group's arrays begin with; the first group is at place 0."""
    return f"others.{place - 1}." if place else ""


def quoted(value: Any) -> str:
    """At most 60 characters, escaped: what a file says is shown, never interpreted."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
