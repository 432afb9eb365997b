"""The gradients of a number of a model's output by the outputs of its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._base.errors import RecordingError, ShapeError, a_type
from regard.capture._taken import Taken


class Explanation:
    """Keeps the outputs of one pass, and finds their gradients when it ends, by one backward.

    Args:
        number: gives a tensor of one number for the model's output: a loss, a similarity, a class.
    """

    def __init__(self, number: Callable[[Any], Tensor]) -> None:
        if not callable(number):
            raise TypeError(
                f"record: explain is {a_type(number)}; a function of the model's output "
                "that gives one number is needed, as in explain=lambda output: output.loss."
            )
        self._number = number
        self._outputs: list[tuple[Taken | None, Tensor]] = []
        self._is_done = False

    def begin_pass(self) -> None:
        """A model is called.

        Raises:
            RecordingError: for the second time.
        """
        if self._is_done:
            raise RecordingError(
                "record: explain is of one pass, and the model was called again. Open another "
                "record for it; for a generation, record its text in one pass."
            )

    def keep(self, taken: Taken | None, output: Tensor) -> Tensor:
        """An output of attention; what the model goes on with.

        Raises:
            RecordingError: torch does not record gradients.
        """
        if not torch.is_grad_enabled():
            raise RecordingError(
                "record: explain needs gradients, and they are off; leave out torch.no_grad() and "
                "torch.inference_mode() around the model, and give checkpoints use_reentrant=False."
            )
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        self._outputs.append((taken, output))
        return output.clone()  # which the model may write into

    def end_pass(self, output: Any) -> None:
        """The model gave its output: finds the gradients.

        Raises:
            ShapeError: the number is not one.
            TypeError: it is no tensor.
            RecordingError: it does not follow from any attention.
        """
        if not self._outputs:
            return  # a module without attention
        number = self._number(output)
        if not isinstance(number, Tensor):
            raise TypeError(
                f"record: explain gave {a_type(number)}; a tensor is needed, computed "
                "from the model's output."
            )
        if number.numel() != 1:
            raise ShapeError(
                f"record: explain gave a tensor of shape {tuple(number.shape)}; one number is "
                "needed, as by .sum() or one index."
            )
        gradients = self.gradients(number)
        for (taken, kept), gradient in zip(self._outputs, gradients):
            if taken is not None:
                taken.gradient = torch.zeros_like(kept) if gradient is None else gradient
        self._outputs.clear()
        self._is_done = True

    def gradients(self, number: Tensor) -> tuple[Tensor | None, ...]:
        """Those of the outputs that were kept; None where the number does not depend on one."""
        outputs = [output for _, output in self._outputs]
        if not number.requires_grad:
            found: tuple[Tensor | None, ...] = (None,) * len(outputs)
        else:
            found = torch.autograd.grad(
                number.reshape(()), outputs, retain_graph=True, allow_unused=True
            )
        if all(gradient is None for gradient in found):
            raise RecordingError(
                "record: explain gave a number that does not depend on any recorded attention; "
                "compute it from the model's output, without .detach() or .item()."
            )
        return found

    def require_done(self) -> None:
        """Raises a RecordingError where no output of a model came."""
        if not self._is_done:
            raise RecordingError(
                "record: explain waits for the output of a model, a torch.nn.Module that is called "
                "in the with block, and there was none."
            )
