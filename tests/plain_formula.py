"""The plain formula in a narrow dtype, the same numbers on every machine, and errors beside its.

Every product and every sum is rounded, in the order in which it is written down: no BLAS, whose
order, fused operations and instruction set differ from one processor to the next. Products of
float16 and bfloat16 are summed in float32, and every stage is rounded to the dtype.
"""

import ml_dtypes
import numpy as np

BLOCK = 128  # a long sum is made of sums of as many terms, as matrix libraries do
CACHED = 2**14  # numbers


def to_array(x):
    """A tensor or array in NumPy, detached."""
    if not hasattr(x, "detach"):
        return np.asarray(x)
    x = x.detach()
    is_bfloat16 = str(x.dtype) == "torch.bfloat16"
    return x.float().numpy().astype(ml_dtypes.bfloat16) if is_bfloat16 else x.numpy()


def multiply(x, y):
    """``x @ y`` in float32 (float64 for float64), rounded to the dtype of x."""
    sums = np.float64 if x.dtype == np.float64 else np.float32
    columns = np.ascontiguousarray(np.moveaxis(x.astype(sums), -1, 0))
    other = y.astype(sums, order="C")  # in memory as they are read, which y transposed is not
    total = np.zeros((*x.shape[:-1], y.shape[-1]), sums)
    # As many rows at a time as stay in the cache: nothing but the order of places changes.
    rows = max(1, CACHED // max(1, total[..., :1, :].size))
    for first in range(0, x.shape[-2], rows):
        part = slice(first, first + rows)
        block = np.empty_like(total[..., part, :])
        product = np.empty_like(block)
        for start in range(0, x.shape[-1], BLOCK):
            block[...] = 0
            for n in range(start, min(start + BLOCK, x.shape[-1])):
                np.multiply(columns[n][..., part, None], other[..., n, None, :], out=product)
                block += product
            total[..., part, :] += block
    return total.astype(x.dtype)


def add_up(x):
    """The sum of each row ``(..., 1)``: ``multiply`` by ones, with the blocks side by side."""
    wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    total = np.zeros(x.shape[:-1], wide.dtype)
    whole = x.shape[-1] // BLOCK * BLOCK
    for start, stop in ((0, whole), (whole, x.shape[-1])):
        if start == stop:
            continue
        length = min(BLOCK, stop - start)
        terms = wide[..., start:stop].reshape(*x.shape[:-1], (stop - start) // length, length)
        blocks = np.zeros(terms.shape[:-1], wide.dtype)
        for n in range(terms.shape[-1]):
            blocks += terms[..., n]
        for n in range(blocks.shape[-1]):
            total += blocks[..., n]
    return total[..., None].astype(x.dtype)


def transposed(x):
    return x.swapaxes(-1, -2)


def attend(q, k, v, visible=True, scale=None):
    """Output and weights of ``(..., L, D)`` arrays."""
    scale = q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    s = np.where(visible, multiply(q, transposed(k)) * scale, q.dtype.type(-np.inf))
    shifted = (s - s.max(-1, keepdims=True)).astype(float)
    e = np.exp(shifted).astype(q.dtype)  # by way of float64: the libraries' float32 ones differ
    w = e / add_up(e)
    return multiply(w, v), w


def differentiate(q, k, v, grad, visible=True, scale=None):
    """Gradients of query, key and value for that of the output."""
    scale = q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    _, w = attend(q, k, v, visible, scale)
    dw = multiply(grad, transposed(v))
    ds = w * (dw - add_up(w * dw)) * scale
    return multiply(ds, k), multiply(transposed(ds), q), multiply(transposed(w), grad)


class Errors:
    """Errors of a result and of the plain formula, over many draws.

    The largest error of one draw is luck: it may be three times that of the plain formula and mean
    nothing. The root of the mean square over thousands of numbers is not.
    """

    def __init__(self):
        self.squares, self.plain_squares, self.count = 0.0, 0.0, 0

    def add(self, found, exact, plain):
        """One draw; all in float64."""
        found, exact, plain = (to_array(x).astype(float) for x in (found, exact, plain))
        assert np.isfinite(found).all()
        self.squares += ((found - exact) ** 2).sum()
        self.plain_squares += ((plain - exact) ** 2).sum()
        self.count += exact.size

    @property
    def ratio(self):
        """How many times the error of the plain formula it is."""
        return (self.squares / self.plain_squares) ** 0.5
