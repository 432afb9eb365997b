"""Attention on tensors of any device by torch's own operations: the backend."""

from __future__ import annotations

from typing import Any

from regard._backends.block_reductions import reduce_blocks, statistics_of
from regard._backends.gather import gather_weights
from regard._backends.part_gradients import add_gradients
from regard._base.arrays import accumulating_name, arrays_of
from regard._call.call import Call
from regard._call.options import REAL_NUMBERS

LARGEST = 3.4e38  # of what float32 holds


class Torch:
    """See ``regard._backends.Backend``."""

    name = "torch"
    past_torch = False
    reads_statistics = False
    few_rows = 0
    checks_on_device = False
    wide_scores = False

    def refuses(self, call: Call) -> str | None:
        if not call.is_torch:
            return "it takes torch tensors; convert with torch.from_numpy"
        if accumulating_name(call.query) == "float32":
            for name in REAL_NUMBERS:
                if abs(found := getattr(call, name) or 0.0) > LARGEST:
                    return f"{name} is {found}, and it computes in float32"
        return None

    def attention(self, call: Call, weights: bool) -> tuple[Any, None]:
        from regard._backends import torch_ops

        return torch_ops.attention(call), None

    def row_statistics(self, call: Call) -> tuple[Any, Any]:
        return statistics_of(arrays_of(call.query), call)

    def score_unit(self, call: Call) -> float:
        return 1.0

    def finds_statistics(self, call: Call, fields: dict[str, Any]) -> bool:
        return False

    def reduce(
        self, call: Call, statistics: tuple[Any, Any] | None, fields: dict[str, Any]
    ) -> None:
        reduce_blocks(arrays_of(call.query), call, statistics, fields)

    def add_gradients(
        self, call: Call, grad: Any, delta: Any, statistics: tuple[Any, Any], sums: dict[str, Any]
    ) -> None:
        add_gradients(arrays_of(call.query), call, grad, delta, statistics, sums)

    def gather(self, call: Call, statistics: tuple[Any, Any], queries: Any, keys: Any) -> Any:
        return gather_weights(arrays_of(call.query), call, statistics, queries, keys)
