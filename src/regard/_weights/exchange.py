"""A computed matrix for whoever takes arrays by DLPack, as ``torch.as_tensor`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard._base.arrays import is_tensor


def capsule(whole: Callable[[], Any], name: str, copy: bool | None, options: dict[str, Any]) -> Any:
    """The whole matrix, an array of its own, as ``__dlpack__`` gives it.

    Args:
        whole: computes it.
        name: of the matrix, in messages.
        copy, options: of the caller of ``__dlpack__``.

    Raises:
        BufferError: it has a gradient, which no capsule has, or is to be no copy.
    """
    if copy is False:
        raise BufferError(f"{name}: computed when asked for, so an array is a copy.")
    found = whole()
    if is_tensor(found) and found.requires_grad:
        raise BufferError(
            f"{name}: they have a gradient, which would be lost here. {name}[...] is the tensor"
            " with its gradient; under torch.no_grad() they have none."
        )
    return found.__dlpack__(**options)
