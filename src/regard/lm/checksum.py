"""The checksum of a safetensors file of weights, whose format has none: bits that have changed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of the metadata. Alone in that of weights: several keys are written in any order, and the same
# weights are to be the same bytes.
KEY = "sha256"


def with_checksum(
    arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The metadata of a file, with the checksum of its arrays and of the rest of the metadata."""
    metadata = {} if metadata is None else dict(metadata)
    return metadata | {KEY: _sha256(arrays, metadata)}


def require_unchanged(
    arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None
) -> None:
    """Compares the checksum of a file; those of earlier versions have none.

    Raises:
        ValueError: it is another than that of the arrays and the metadata, or has another key.
    """
    rest = {} if metadata is None else dict(metadata)
    found = rest.pop(KEY, None)
    if found is None and not any(re.fullmatch("[0-9a-f]{64}", x) for x in rest.values()):
        return
    if found != _sha256(arrays, rest):
        raise ValueError("its checksum is another: some of its bits have changed")


def _sha256(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    found = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, x in sorted(arrays.items()):
        found.update(json.dumps([name, x.dtype.name, x.shape]).encode() + x.tobytes())
    return found.hexdigest()
