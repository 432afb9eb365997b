"""One sequence over many processes: attention, its gradients and weights, by torch.distributed."""

from regard._base.extras import needed_by

with needed_by("regard.distributed"):
    from regard.distributed._attention import attention
    from regard.distributed._layout import Layout
    from regard.distributed._peers import RankError
    from regard.distributed._weights import DistributedWeights

__all__ = ["DistributedWeights", "Layout", "RankError", "attention"]
