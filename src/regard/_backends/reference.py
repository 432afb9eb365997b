"""The definition: the formula in float64, in NumPy. Every other backend is tested against it."""

from __future__ import annotations

from typing import Any

from regard._backends import formula
from regard._backends.block_reductions import reduce_blocks, statistics_of
from regard._backends.gather import gather_weights
from regard._backends.part_gradients import add_gradients
from regard._base import loaded
from regard._base.arrays import NumpyArrays, is_tensor, to_numpy
from regard._call.call import Call

FLOAT64 = NumpyArrays("float64")


class Reference:
    """See ``regard._backends.Backend``."""

    name = "reference"
    past_torch = True
    reads_statistics = False
    few_rows = 0
    checks_on_device = False
    wide_scores = True

    def refuses(self, call: Call) -> str | None:
        if not call.is_torch:
            return None
        from regard._base import torch_state

        if torch_state.is_recorded():
            return "it computes in NumPy, which no graph or transform of torch can hold"
        torch = loaded.torch
        tensors = call.tensors
        if any(x.device.type != "cpu" for x in tensors):
            return "it computes on the CPU; move the tensors with .cpu()"
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return "it has no gradient; detach the tensors, or use torch.no_grad()"
        return None

    def attention(self, call: Call, weights: bool) -> tuple[Any, None]:
        out = formula.attention(FLOAT64, _in_numpy(call))
        if call.is_torch:
            torch = loaded.torch
            out = torch.from_numpy(out).to(getattr(torch, call.output_name))
        return out, None

    def row_statistics(self, call: Call) -> tuple[Any, Any]:
        return statistics_of(FLOAT64, _in_numpy(call))

    def score_unit(self, call: Call) -> float:
        return 1.0

    def finds_statistics(self, call: Call, fields: dict[str, Any]) -> bool:
        return False

    def reduce(
        self, call: Call, statistics: tuple[Any, Any] | None, fields: dict[str, Any]
    ) -> None:
        into = {name: x.numpy() if is_tensor(x) else x for name, x in fields.items()}
        reduce_blocks(FLOAT64, _in_numpy(call), statistics, into)

    def add_gradients(
        self, call: Call, grad: Any, delta: Any, statistics: tuple[Any, Any], sums: dict[str, Any]
    ) -> None:
        into = {name: x.numpy() if is_tensor(x) else x for name, x in sums.items()}
        grad, delta = to_numpy(grad), to_numpy(delta)
        add_gradients(FLOAT64, _in_numpy(call), grad, delta, statistics, into)

    def gather(self, call: Call, statistics: tuple[Any, Any], queries: Any, keys: Any) -> Any:
        out = gather_weights(FLOAT64, _in_numpy(call), statistics, queries, keys)
        return loaded.torch.from_numpy(out) if call.is_torch else out


def _in_numpy(call: Call) -> Call:
    """The call on NumPy's view of its tensors."""
    if not call.is_torch:
        return call
    tensors: dict[str, Any] = {n: to_numpy(x) for n, x in vars(call).items() if is_tensor(x)}
    return call.changed(**tensors)
