"""Rotary positions: query and key rotated by angles that grow with their position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard._base.types import Float


def rotate(x: Float[Tensor, "... L D"], start: int, base: float) -> Float[Tensor, "... L D"]:
    """Rotary positions: numbers i and ``i + D/2`` of the vector at position p, rotated as a pair.

    The angle is ``p · base^(−2i/D)``, so the product of a rotated query and a rotated key
    depends on the distance of their places alone.

    Args:
        x: ``(..., L, D)``, D even; queries or keys.
        start: the place of ``x[..., 0, :]``.
        base: of the angles, 10000 in the paper; a larger one turns slower.

    Returns:
        ``(..., L, D)`` in the dtype of ``x``, turned in float32 (float64 for float64).

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, with the halves paired as in GPT-NeoX.
    """
    half = x.shape[-1] // 2
    # Angles in float64: at position 100,000 those of float32 are wrong by 0.006.
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    places = torch.arange(start, start + x.shape[-2], dtype=exact, device=x.device)
    speeds = base ** (-torch.arange(half, dtype=exact, device=x.device) / half)
    angles = places[:, None] * speeds  # (L, D / 2)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    a, b = x.to(dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
