"""regard in models of Hugging Face transformers: their attention, and a look at any of its heads.

``import regard.hf`` registers the attention implementation ``"regard"``:

    model.set_attn_implementation("regard")
    model = AutoModel.from_pretrained(folder, attn_implementation="regard")
"""

from __future__ import annotations

from regard._base.extras import needed_by

with needed_by("regard.hf"):
    import torch  # noqa: F401
    import transformers

from transformers import AttentionInterface, AttentionMaskInterface

from regard.hf._attention import attention_function
from regard.hf._check import Checked, check
from regard.hf._masks import mask_function
from regard.hf._record import record
from regard.hf._weights import Attentions

AttentionInterface.register("regard", attention_function)
AttentionMaskInterface.register("regard", mask_function)

__all__ = ["Attentions", "Checked", "check", "record"]
