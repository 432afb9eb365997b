"""The checksum of a safetensors file of weights, whose format has none: bits that have changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY = "sha256"  # of the metadata
# Says that there must be one: a file with a changed bit in the key would be one of before.
MARK = {"checksum": KEY}


def with_checksum(
    arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The metadata of a file, with the checksum of its arrays and of the rest of the metadata."""
    metadata = MARK if metadata is None else {**metadata, **MARK}
    return metadata | {KEY: _sha256(arrays, metadata)}


def require_unchanged(
    arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None
) -> None:
    """Compares the checksum of a file; those of earlier versions have none.

    Raises:
        ValueError: it is another than that of the arrays and the metadata, or is not there and
            must be.
    """
    rest = {} if metadata is None else dict(metadata)
    found = rest.pop(KEY, None)
    if found is None and not MARK.items() <= rest.items():
        return
    if found != _sha256(arrays, rest):
        raise ValueError("its checksum is another: some of its bits have changed")


def _sha256(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    found = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, x in sorted(arrays.items()):
        found.update(json.dumps([name, x.dtype.name, x.shape]).encode() + x.tobytes())
    return found.hexdigest()
