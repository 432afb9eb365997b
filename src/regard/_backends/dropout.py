"""The dropout mask of a seed: the same for every backend, block and thread.

It depends on the index in the batch, so that the elements of a batch drop different weights.
"""

from collections.abc import Callable
from typing import Any

Draws = tuple[tuple[int, int], tuple[int, int]]
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
    draws: Draws = ((0, 0), (1, 1)),
) -> Any:
    """Bool ``(*heads.shape, rows, keys)``: each True with probability ``1 − dropout``.

    The decision on head n, query i, key j is word ``j % 4`` of the counter ``(j // 4, i, n, 0)``.

    Args:
        seed: () int64; its two halves are the key of the generator.
        heads: int64 numbers n of the heads, counted through the batch.
        arange: of the array library, giving int64.
        stack: of the array library.
        draws: i of the first query and j of the first key, and the steps from each to the next.
    """
    (first, first_key), (step, key_step) = draws
    n = heads[..., None, None]
    i = (arange(rows.start, rows.stop)[:, None] * step + first) & _LOW
    if key_step == 1:  # four keys of each counter
        low, high = keys.start + first_key, keys.stop + first_key
        j = arange(low // 4, -(-high // 4))[None, :]
    else:
        each = arange(keys.start, keys.stop) * key_step + first_key
        j = each[None, :] // 4
    zero = (n + i + j) * 0
    counter = [(j & _LOW) + zero, i + zero, n + zero, zero]
    words = stack(_philox(counter, seed & _LOW, (seed >> 32) & _LOW), -1)
    if key_step == 1:
        random = words.reshape((*zero.shape[:-1], 4 * zero.shape[-1]))
        skipped = low - low // 4 * 4
        random = random[..., skipped : skipped + high - low]
    else:
        random = words[..., arange(0, keys.stop - keys.start), each % 4]
    return random >= round(dropout * 2**32)
