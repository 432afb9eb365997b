"""Arrays that lie in memory in every way that NumPy and torch know."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Operand:
    """An array of a call: what it holds, and how it lies in memory."""

    x: np.ndarray  # float64 that ``dtype`` holds exactly, or bool, or int64
    dtype: str
    order: tuple[int, ...] = ()  # the axes in memory, outermost first
    steps: tuple[int, ...] = ()  # along each axis; negative: from the end
    around: tuple[int, ...] = ()  # places left out before and behind, along each axis
    trick: str = ""  # "read-only", "unaligned", "in records", "shared along AXIS"

    def __repr__(self):
        plain = not self.trick and self.order == tuple(range(self.x.ndim))
        plain &= set(self.steps) <= {1} and not any(self.around)
        text = f"{self.dtype}{list(self.x.shape)}"
        if plain:
            return text
        return f"{text}(order {self.order} steps {self.steps} around {self.around} {self.trick})"

    def place(self, library, device="cpu"):
        """It in that library; what lies around it in memory would show if it were read."""
        torch = library == "torch"
        dtype = np.float64 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        with np.errstate(all="ignore"):  # float64 to narrower: it fits
            x = self.x.astype(dtype)
        if self.trick.startswith("shared"):
            axis = int(self.trick.split()[-1])
            return self._shared(x.take([0], axis), library, device)
        memory = self._memory(x)
        if torch:
            from torch import from_numpy

            memory = from_numpy(memory)
            memory = memory.bfloat16() if self.dtype == "bfloat16" else memory
            memory = memory.to(device)
        view = memory[self._slices]
        back = tuple(np.argsort(self.order).tolist())
        view = view.permute(back) if torch else view.transpose(back)
        return self._with_trick(view)

    def _memory(self, x):
        fill = {"f": np.nan, "b": True, "i": 12345}[x.dtype.kind]
        sizes = [x.shape[a] * abs(self.steps[a]) + 2 * self.around[a] for a in self.order]
        memory = np.full(sizes, fill % 100 if x.dtype.kind == "i" else fill, x.dtype)
        memory[self._slices] = x.transpose(self.order)
        return memory

    @property
    def _slices(self):
        return (*(self._slice(axis) for axis in self.order), ...)

    def _slice(self, axis):
        n, step, around = self.x.shape[axis], self.steps[axis], self.around[axis]
        if n == 0:
            return slice(0, 0)
        if step > 0:
            return slice(around, around + n * step, step)
        first = around + n * -step - 1
        stop = first + n * step
        return slice(first, stop if stop >= 0 else None, step)

    def _shared(self, x, library, device):
        if library == "numpy":
            return np.broadcast_to(x, self.x.shape)
        from torch import from_numpy

        tensor = from_numpy(x)
        tensor = tensor.bfloat16() if self.dtype == "bfloat16" else tensor
        return tensor.to(device).expand(self.x.shape)

    def _with_trick(self, x):
        if self.trick == "read-only":
            x.flags.writeable = False
        elif self.trick == "unaligned":
            moved = np.ndarray(x.shape, x.dtype, bytearray(x.nbytes + 1), 1)
            moved[...] = x
            return moved
        elif self.trick == "in records":
            records = np.zeros(x.shape, [("tag", "i1"), ("x", x.dtype)])
            records["x"] = x
            return records["x"]
        return x
