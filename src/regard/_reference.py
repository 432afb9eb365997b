"""The definition: attention and its weights on one page of NumPy, in float64.

    s = scale · q·kᵀ  →  softcap · tanh(s / softcap)  →  + bias  →  invisible keys to −∞
    w = softmax(s) over the keys and the sink  →  dropout  →  · v

It works on blocks of rows, so that nothing of size Lq × Lk is stored, and every row is whole.
Source: Vaswani et al. 2017, equation 1.
"""

import functools
from collections.abc import Iterator

import numpy as np

from regard._checks import Call, check_contents
from regard._dropout import kept
from regard._visible import Visibility, WeightBlock, blocks, part

BLOCK_ELEMENTS = 2**16  # 512 KB of float64: a block and its temporaries stay in the cache

arange = functools.partial(np.arange, dtype=np.int64)


def key_heads(x: np.ndarray, call: Call, b: slice, h: slice) -> np.ndarray:
    """The heads of key or value that the query heads h share: ``(b or 1, kv, Lk, D)`` float64."""
    group = call.sizes[1] // call.sizes[2]
    own = x[b if len(x) > 1 else slice(None), h.start // group : h.stop // group]
    return own.astype(np.float64, copy=False)


def matmul(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``x @ y`` for ``(b, h, m, n)`` and ``(b or 1, kv, n, o)``: neighbouring heads share one y.

    In panels of at most 2**17 products, which a BLAS computes in one thread: larger ones are cut by
    the number of threads, and the last bits would follow it (15 % slower than one product).
    """
    b, h, m, n = x.shape
    kv, o = y.shape[1], y.shape[-1]
    x = x.reshape(b, kv, h // kv * m, n)
    width = max(8, 2**17 // max(1, x.shape[2] * min(n, o)))
    if x.dtype == bool:
        out = x @ y
    elif n > o:  # panels of the sum
        cut = n // width * width
        out = x[..., cut:] @ y[:, :, cut:]
        if cut:
            panels = x[..., :cut].reshape(*x.shape[:3], -1, width).swapaxes(2, 3)
            out = out + (panels @ y[:, :, :cut].reshape(*y.shape[:2], -1, width, o)).sum(2)
    else:  # panels of the columns
        cut = o // width * width
        out = np.empty((*x.shape[:3], o))
        if cut:
            panels = y[..., :cut].reshape(*y.shape[:3], -1, width).swapaxes(2, 3)
            into = out[..., :cut].reshape(*x.shape[:3], -1, width).swapaxes(2, 3)
            np.matmul(x[:, :, None], panels, out=into)
        out[..., cut:] = x @ y[..., cut:]
    return out.reshape(b, h, m, o)


def scores(call: Call, k: np.ndarray, b: slice, h: slice, rows: slice, keys: slice) -> np.ndarray:
    """``(b, h, rows, keys)`` float64: scaled, capped, with bias, not yet masked."""
    q = call.query[b, h, rows].astype(np.float64)
    s = call.scale * matmul(q, k[:, :, keys].swapaxes(-1, -2))
    if call.softcap is not None:
        s = call.softcap * np.tanh(s / call.softcap)
    if call.bias is not None:
        s = s + part(call.bias, b, h, rows, keys).astype(np.float64)
    return s


def log_softmax(s: np.ndarray, sinks: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """``s − maximum``, the maximum and the sum of the exponentials of each row ``(..., 1)``.

    Where nothing is visible the maximum is −∞ and the sum 0.
    """
    maximum = s.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sink = sinks.astype(np.float64)[:, None, None]
        maximum = np.where(maximum == -np.inf, maximum, np.maximum(maximum, sink))
    s = s - np.where(maximum == -np.inf, 0.0, maximum)
    total = np.exp(s).sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.where(maximum == -np.inf, 0.0, np.exp(sink - maximum))
    return s, maximum, total


def apply(w: np.ndarray, visible: np.ndarray | None, v: np.ndarray) -> np.ndarray:
    """``w @ v`` in which an invisible value takes no part, not even as 0 · NaN or 0 · inf."""
    if visible is None or np.isfinite(v).all():
        return matmul(w, v)
    visible = np.broadcast_to(visible, w.shape)
    out = matmul(w, np.where(np.isfinite(v), v, 0.0))
    up, down = matmul(w > 0, v == np.inf), matmul(w > 0, v == -np.inf)
    undefined = matmul(visible, np.isnan(v)) | matmul(visible & (w == 0), np.isinf(v))
    undefined |= (up & down) | np.isnan(w).any(-1, keepdims=True)
    return np.where(undefined, np.nan, np.where(up, np.inf, np.where(down, -np.inf, out)))


def weight_blocks(call: Call, rows: slice | None = None) -> Iterator[WeightBlock]:
    """The weights in blocks of whole rows, in float64."""
    check_contents(call)
    visibility = Visibility(call, arange)
    held = None
    for block in blocks(call, visibility, BLOCK_ELEMENTS, rows):
        if held != (held := block[:2]):
            k = key_heads(call.key[:, :, : visibility.end(block[0].start, rows)], call, *held)
        visible = visibility.pairs(*block)
        s = scores(call, k, *block)
        if visible is not None:
            s = np.where(visible, s, -np.inf)
        sinks = None if call.sinks is None else call.sinks[block[1]]
        start = visibility.starts[block[0].start]
        yield WeightBlock(*block, start, call.query_step, visible, *log_softmax(s, sinks))


def attention(call: Call) -> np.ndarray:
    """``(B, Hq, Lq, Dv)`` in the dtype of the query."""
    B, Hq, _, Lq, _ = call.sizes
    out = np.zeros((B, Hq, Lq, call.value.shape[-1]), call.query.dtype)
    with np.errstate(all="ignore"):  # NaN and inf are answers here, not accidents
        for block in weight_blocks(call):
            w = block.weights
            if call.dropout:
                heads = np.arange(B)[block.b, None] * Hq + np.arange(Hq)[block.h]
                keep = kept(
                    call.seed, call.dropout, heads, block.rows, block.keys, arange, np.stack
                )
                w = np.where(keep, w / (1 - call.dropout), 0.0)
            v = key_heads(call.value, call, block.b, block.h)[:, :, block.keys]
            out[block.index] = apply(w, block.visible, v)
    return out


def empty(like: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A new array that something else fills."""
    return np.empty(shape, dtype)


def full(like: np.ndarray, shape: tuple[int, ...], fill: float, dtype: str) -> np.ndarray:
    """A new array beside ``like``."""
    return np.full(shape, fill, dtype)


def top(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest along the last axis, largest first, with their indices; first of equals."""
    indices = np.sort(np.argpartition(-x, k - 1, axis=-1)[..., :k] if k else x[..., :0], axis=-1)
    indices = indices.astype(np.int64)
    values = np.take_along_axis(x, indices, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(values, order, -1), np.take_along_axis(indices, order, -1)


def take(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """``x[..., indices]``."""
    return x[..., indices]


numpy = True


def array(like: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A NumPy array in the library and dtype of ``like``."""
    return x.astype(like.dtype)


def broadcast(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """x in that shape, without a copy."""
    return np.broadcast_to(x, shape)


def concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    """One behind the other along the last axis."""
    return np.concatenate(arrays, axis=-1)


def nan_to_zero(x: np.ndarray) -> np.ndarray:
    """x with 0 for NaN."""
    return np.nan_to_num(x, nan=0.0)


def gather(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """An entry of x for each index, along the last axis."""
    return np.take_along_axis(x, indices, -1)
