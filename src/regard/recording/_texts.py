"""Texts of many tokens as two arrays: bytes of UTF-8, and where each text begins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np

ERRORS = "surrogatepass"  # an unpaired surrogate is a text too, of three bytes
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Texts(Sequence[str]):
    """The texts of a file; made when they are first used, for a million takes a second.

    Args:
        name: of the texts, in messages.
        data: ``(bytes,)`` of uint8, one text after the other, in UTF-8.
        offsets: ``(n + 1,)`` of int64: text i is ``data[offsets[i] : offsets[i + 1]]``.

    Raises:
        ValueError: other dtypes or axes.
    """

    def __init__(self, name: str, data: Any, offsets: Any) -> None:
        self._name, self._data, self._offsets = name, data, offsets
        self._made: tuple[str, ...] | None = None
        for what, x, dtype in (("bytes", data, np.uint8), ("offsets", offsets, np.int64)):
            if x is None or x.dtype != dtype or len(x.shape) != 1:
                found = "missing" if x is None else f"{x.dtype} of shape {tuple(x.shape)}"
                raise ValueError(
                    f"{name}.{what} is {found}; {np.dtype(dtype).name} of one axis is needed."
                )
        if not len(offsets):
            raise ValueError(f"{name}.offsets is empty; one more than there are texts are needed.")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, int) or index.indices(len(self)) != (0, len(self), 1):
            return self.all()[index]
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(self.all())

    def check(self) -> None:
        """Checks that the arrays hold texts.

        Raises:
            ValueError: offsets that fall, leave bytes out, or cut a character; no UTF-8.
        """
        self._decoded()

    def all(self) -> tuple[str, ...]:
        """Every text; equal ones are one object.

        Raises:
            ValueError: as ``check``.
        """
        if self._made is None:
            text, ends = self._decoded()
            known: dict[str, str] = {}
            pieces = (text[a:b] for a, b in pairwise(ends.tolist()))
            self._made = tuple(known.setdefault(piece, piece) for piece in pieces)
        return self._made

    def _decoded(self) -> tuple[str, np.ndarray]:
        """All texts as one, and where each begins and ends in it, in characters."""
        data, offsets = np.asarray(self._data), np.asarray(self._offsets)
        if offsets[0] != 0 or offsets[-1] != len(data) or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(
                f"{self._name}.offsets do not rise from 0 to {len(data)}, the number of bytes."
            )
        try:
            text = str(data.data, "utf-8", ERRORS)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._name}.bytes are no UTF-8 at byte {error.start} ({error.reason})."
            ) from None
        if len(text) == len(data):  # ASCII
            return text, offsets
        starts = _starts(data)
        inner = offsets[offsets < len(data)]
        if not starts[inner].all():
            place = int(inner[~starts[inner]][0])
            raise ValueError(f"{self._name}.offsets has {place}, which is inside of a character.")
        before = np.zeros(len(data) + 1, np.int64)  # how many characters begin before a byte
        np.cumsum(starts, out=before[1:])
        return text, before[offsets]


def arrays_of(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and offsets of texts, as ``Texts`` takes them."""
    whole = "".join(texts)
    data = np.frombuffer(whole.encode("utf-8", ERRORS), np.uint8)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
    if len(data) > len(whole):
        offsets = np.append(np.flatnonzero(_starts(data)), len(data))[offsets]
    return data, offsets


def has_pair(texts: Sequence[str]) -> bool:
    """Whether a text has two surrogates that JSON would join into one character."""
    whole = " ".join(texts)
    return not whole.isascii() and _PAIR.search(whole) is not None


def _starts(data: np.ndarray) -> np.ndarray:
    """Which bytes a character begins with."""
    return (data & 0xC0) != 0x80
