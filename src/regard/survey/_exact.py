"""Sums of float64 that are the same bits in every order and grouping.

Floating-point addition depends on the order. Each number is therefore cut once, to a multiple of
2^-20, and kept as two int64: its whole part and its 2^-20ths. Integers add exactly; a total is
rounded once, when it is read. What is cut off is at most 2^-21 of a document's sum, in nats, tokens
or queries: below the rounding of the float32 weights. The parts hold 2^43 documents.
"""

from __future__ import annotations

import numpy as np

from regard._base.types import Float, Int

BITS = 20


def parts_of(x: Float[np.ndarray, "*_"]) -> Int[np.ndarray, "*_ 2"]:
    """Whole part and 2^-20ths of finite numbers below 2^63."""
    whole = np.floor(x)
    rest = np.rint((x - whole) * 2**BITS)
    return np.stack([whole, rest], -1).astype(np.int64)


def total_of(parts: Int[np.ndarray, "*_ 2"]) -> Float[np.ndarray, "*_"]:
    """The number, rounded once."""
    whole = parts[..., 0] + (parts[..., 1] >> BITS)
    rest = parts[..., 1] & (2**BITS - 1)
    # Above 2^33 both have bits that float64 cannot hold together: one rounding, that of this sum.
    total: np.ndarray = whole.astype(np.float64) + rest.astype(np.float64) / 2**BITS
    return total
