"""Muon: steps of momentum whose matrices are made orthogonal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from regard._base.extras import needed_by

with needed_by("regard.lm.muon"):
    import torch
    from torch import Tensor

if TYPE_CHECKING:
    from regard._base.types import Float

# Five of these steps bring every singular value to between 0.7 and 1.2.
STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """As ``torch.optim.Muon``, which computes in bfloat16, but in float32.

    A CPU without instructions for bfloat16 takes far less time for it.

    Args:
        matrices: parameters of two axes.
        rate: learning rate, times the root of rows over columns where these are more rows.
        momentum: share of the past steps, after Nesterov.
        weight_decay: share of each weight taken off, times the learning rate.

    Source: Jordan 2024, https://kellerjordan.github.io/posts/muon/.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        rate: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": rate, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(matrices, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Changes every matrix that has a gradient."""
        for group in self.param_groups:
            momentum, rate = group["momentum"], group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                past = state.setdefault("momentum_buffer", torch.zeros_like(matrix))
                past.lerp_(matrix.grad, 1 - momentum)
                update = orthogonal(matrix.grad.lerp(past, momentum))
                rows, columns = matrix.shape
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """The nearest matrix with singular values of about 1: Newton and Schulz's iteration."""
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if wide is not matrix else x
