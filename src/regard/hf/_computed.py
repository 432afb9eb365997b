"""A tensor whose numbers are computed when they are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Computed(Tensor):
    """A tensor with a shape and a dtype, whose numbers are there when somebody reads them.

    torch computes with ``numbers()``; what reads memory past torch gets theirs too.
    """

    def numbers(self) -> Tensor:
        """The numbers: an ordinary tensor."""
        raise NotImplementedError

    @staticmethod
    def plain(x: Any) -> Any:
        """x with the numbers of every such tensor in it, in lists, tuples and dicts too."""
        return torch.utils._pytree.tree_map_only(Computed, lambda found: found.numbers(), x)

    def numpy(self, *, force: bool = False) -> Any:
        """The numbers as a NumPy array."""
        return self.numbers().numpy(force=force)

    def tolist(self) -> Any:
        """The numbers as lists of floats."""
        return self.numbers().tolist()

    def share_memory_(self) -> Tensor:
        """The numbers in shared memory."""
        return self.numbers().share_memory_()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the numbers."""
        return self.numbers().untyped_storage()

    def data_ptr(self) -> int:
        """The address of the numbers."""
        return self.numbers().data_ptr()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numbers().__dlpack__(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy(force=True)
        return array if dtype is None else array.astype(dtype)
