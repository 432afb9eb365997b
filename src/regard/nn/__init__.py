"""Attention layers for PyTorch, computed by ``regard.attention``, which gives every weight back."""

from regard._base.extras import needed_by

with needed_by("regard.nn"):
    from regard._base.cache import KeyValueCache
    from regard.nn.multi_head import MultiHeadAttention
    from regard.nn.replacement import Replaced, replace
    from regard.nn.self_attention import SelfAttention

__all__ = ["KeyValueCache", "MultiHeadAttention", "Replaced", "SelfAttention", "replace"]
