"""torch under the names of ``NumpyArrays``, on one device; autograd records nothing here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._base.settings import pass_threads_to
from regard._base.torch_state import product

pass_threads_to(torch)

STRETCH = 256  # numbers of a long sum that are added in their own dtype


def dtype_on(device: torch.device, name: str) -> torch.dtype:
    """The dtype of that name; float32 for float64 on a device that has none."""
    if name == "float64" and not _has_float64(device):
        name = "float32"
    found: torch.dtype = getattr(torch, name)
    return found


def _has_float64(device: torch.device) -> bool:
    if device.type == "xpu":  # Intel's for data centres has it, Arc does not
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


class TorchArrays:
    """Tensors on a device.

    Args:
        device: where new tensors are.
        dtype: that sums are held in, by name.
    """

    exp, log, tanh = staticmethod(torch.exp), staticmethod(torch.log), staticmethod(torch.tanh)
    cos, sin = staticmethod(torch.cos), staticmethod(torch.sin)
    isfinite, isnan, isinf = (
        staticmethod(torch.isfinite), staticmethod(torch.isnan), staticmethod(torch.isinf),
    )  # fmt: skip
    where: Any = staticmethod(torch.where)
    stack: Any = staticmethod(torch.stack)

    def __init__(self, device: torch.device, dtype: str = "float32") -> None:
        self.device, self.dtype = device, dtype
        on_cpu = device.type == "cpu"
        # 256 KB of float32: at 512 keys, 1.6 times as fast as blocks of 4 MB. A device needs few
        # and large launches: up to 16 MB.
        self.block_elements, self.tallest_block = (2**16, 128) if on_cpu else (2**19, 4096)

    def _dtype(self, name: str) -> torch.dtype:
        return dtype_on(self.device, name)

    def arange(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=self._dtype(dtype), device=self.device)

    def full(self, shape: tuple[int, ...], fill: float, dtype: str) -> Tensor:
        return torch.full(shape, fill, dtype=self._dtype(dtype), device=self.device)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        if self.device.type == "cpu":  # torch would write the zeros
            return torch.from_numpy(np.zeros(shape, dtype))
        return self.full(shape, 0.0, dtype)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(self._dtype(dtype))

    def wide(self, x: Tensor) -> Tensor:
        return self.cast(x, self.dtype)

    def array(self, like: Tensor, x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=like.dtype, device=like.device)

    def maximum(self, x: Tensor, y: Tensor) -> Tensor:
        return x.maximum(y.to(x.dtype))

    def hide(self, x: Tensor, visible: Tensor, fill: float) -> Tensor:
        return x.masked_fill(~visible, fill)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        b, h, m, n = x.shape
        kv = y.shape[1]
        return product(x.reshape(b, kv, h // max(1, kv) * m, n), y).reshape(b, h, m, y.shape[-1])

    def any_product(self, x: Tensor, y: Tensor) -> Tensor:
        return self.matmul(self.wide(x), self.wide(y)) > 0

    def row_sum(self, x: Tensor) -> Tensor:
        """One weight of 1 may stand beside a million of 1e-8.

        So stretches in the dtype of x, and these in float64, which alone would take five times as
        long.
        """
        n = x.shape[-1] // STRETCH
        wide = torch.float64 if x.device.type == "cpu" else x.dtype  # a device adds in trees
        stretches = x[..., : n * STRETCH].unflatten(-1, (n, STRETCH)).sum(-1)
        rest = x[..., n * STRETCH :].sum(-1, keepdim=True)
        return (stretches.sum(-1, keepdim=True, dtype=wide) + rest).to(x.dtype)

    def largest(self, x: Tensor, axis: int, *, keep: bool = False) -> Tensor:
        if x.shape[axis]:
            return x.amax(axis, keepdim=keep)
        shape = [n for a, n in enumerate(x.shape) if a != axis % x.ndim]
        if keep:
            shape.insert(axis % x.ndim, 1)
        return x.new_full(shape, -torch.inf)

    def top(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = x.max(-1, keepdim=True) if k == 1 else x.topk(k, dim=-1)
        return values, indices

    def first_top(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self.device.type != "cpu":
            return self._first_top_at_once(x, k)
        values, indices = x.topk(k, dim=-1)
        least = values[..., -1:]
        if (((x >= least).sum(-1, keepdim=True) > k) & (least > 0)).any():
            above, equal = x > least, x == least
            room = k - above.sum(-1, keepdim=True)
            chosen = above | (equal & (equal.cumsum(-1) <= room))
            indices = chosen.nonzero(as_tuple=True)[-1].reshape(values.shape)
        else:
            indices = indices.sort(-1).values
        values, order = x.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
        return values, indices.gather(-1, order)

    def _first_top_at_once(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The same without a look at x, for which the host would wait."""
        if x.dtype == torch.float32:  # whose bits, where it is not negative, order it as integers
            place = torch.arange(2**31 - 1, 2**31 - 1 - x.shape[-1], -1, device=x.device)
            order = (x.view(torch.int32).long() << 32 | place).topk(k, dim=-1).values
            indices = 2**31 - 1 - (order & 0xFFFFFFFF)
        else:
            indices = x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return x.gather(-1, indices), indices

    def take(self, x: Tensor, indices: Any) -> Tensor:
        if not isinstance(indices, Tensor):
            indices = torch.as_tensor(np.ascontiguousarray(indices), device=x.device)
        return x[..., indices]

    def flip(self, x: Tensor, axes: list[int]) -> Tensor:
        return x.flip(axes)

    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        return x.gather(-1, indices)

    def gather_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        return torch.take_along_dim(x, indices[..., None], -2)

    def sort(self, x: Tensor) -> Tensor:
        return x.sort(-1).values

    def fold_groups(
        self, x: Tensor, ids: np.ndarray, count: int, *, largest: bool = False
    ) -> Tensor:
        kept = np.flatnonzero(ids >= 0)
        index = torch.as_tensor(ids[kept], device=x.device)
        x = self.cast(self.take(x, kept), "float64")  # sums of many in their order
        out = x.new_zeros((*x.shape[:-1], count))
        if largest:
            return out.scatter_reduce_(-1, index.expand(x.shape), x, "amax")
        return out.index_add_(-1, index, x)

    def broadcast(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.expand(shape)

    def concatenate(self, arrays: list[Tensor]) -> Tensor:
        return torch.cat(arrays, -1)
