"""The dropout mask of a seed: the same for every backend, block and thread.

It depends on the index in the batch, so that the elements of a batch drop different weights.
"""

from collections.abc import Callable
from typing import Any

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def _philox(x: list[Any], k0: Any, k1: Any) -> list[Any]:
    """Four random 32-bit words for each counter of four, ten rounds.

    The arrays are int64 that hold 32-bit words: a product wraps around in 64 bits, and its two
    halves are what the method needs. Source: Salmon et al. 2011, "Parallel random numbers: as easy
    as 1, 2, 3", Philox-4x32-10.
    """
    for _ in range(10):
        p0, p1 = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        x = [
            ((p1 >> 32) & _LOW) ^ x[1] ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ x[3] ^ k1,
            p0 & _LOW,
        ]
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return x


def kept(
    seed: Any,
    dropout: float,
    heads: Any,
    rows: slice,
    keys: slice,
    arange: Callable[[int, int], Any],
    stack: Callable[..., Any],
) -> Any:
    """Bool ``(*heads.shape, rows, keys)``: each True with probability ``1 − dropout``.

    The decision on head n, query i, key j is word ``j % 4`` of the counter ``(j // 4, i, n, 0)``.

    Args:
        seed: () int64; its two halves are the key of the generator.
        heads: int64 numbers n of the heads, counted through the batch.
        arange: of the array library, giving int64.
        stack: of the array library.
    """
    n = heads[..., None, None]
    i = arange(rows.start, rows.stop)[:, None]
    j = arange(keys.start // 4, -(-keys.stop // 4))[None, :]
    zero = (n + i + j) * 0
    words = _philox([j + zero, i + zero, n + zero, zero], seed & _LOW, (seed >> 32) & _LOW)
    random = stack(words, -1).reshape((*zero.shape[:-1], 4 * zero.shape[-1]))
    skipped = keys.start - keys.start // 4 * 4
    random = random[..., skipped : skipped + keys.stop - keys.start]
    return random >= round(dropout * 2**32)
