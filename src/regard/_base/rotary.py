"""Rotary positions: query and key rotated by angles that grow with their position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard._base.arrays import arrays_of

if TYPE_CHECKING:
    from regard._base.types import Array, ArrayT, Float


def rotate(x: Float[Array[ArrayT], "... L D"], start: int, base: float) -> Float[ArrayT, "... L D"]:
    """Rotary positions: numbers i and ``i + D/2`` of the vector at position p, rotated as a pair.

    The angle is ``p · base^(−2i/D)``, so the product of a rotated query and a rotated key
    depends on the distance of their positions alone.

    Args:
        x: ``(..., L, D)``, D even; queries or keys.
        start: the position of ``x[..., 0, :]``.
        base: of the angles, 10000 in the paper; a larger one turns slower.

    Returns:
        ``(..., L, D)`` in the dtype of ``x``, turned in float32 (float64 for float64).

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, with the halves paired as in GPT-NeoX.
    """
    xp, rows, half = arrays_of(x), x.shape[-2], x.shape[-1] // 2
    # Angles in float64: at position 100,000 those of float32 are wrong by 0.006.
    positions, pairs = (
        xp.cast(xp.arange(*span), "float64") for span in ((start, start + rows), (0, half))
    )
    angles = positions[:, None] * base ** (-pairs / half)  # (L, D / 2)
    cos, sin = xp.wide(xp.cos(angles)), xp.wide(xp.sin(angles))
    wide: Any = xp.wide(x)
    a, b = wide[..., :half], wide[..., half:]
    turned: ArrayT = xp.array(x, xp.concatenate([a * cos - b * sin, b * cos + a * sin]))
    return turned
