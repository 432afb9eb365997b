"""regard in models of Hugging Face transformers: their attention, and a look at any of its heads.

``import regard.hf`` registers the attention implementation ``"regard"``:

    model.set_attn_implementation("regard")
    model = AutoModel.from_pretrained(folder, attn_implementation="regard")
"""

from __future__ import annotations

import warnings

from regard._base.extras import needed_by

with needed_by("regard.hf"):
    import torch  # noqa: F401
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    from regard.hf._attention import attention_function
    from regard.hf._check import Checked, check
    from regard.hf._load import load, read
    from regard.hf._masks import mask_function
    from regard.hf._record import record
    from regard.hf._weights import Attentions

TESTED = (5, 10), (5, 23)  # versions of transformers, both included


def _warn_of(version: str) -> None:
    """Warns of a version of transformers that no test has seen."""
    least, most = (".".join(map(str, end)) for end in TESTED)
    if not TESTED[0] <= tuple(int(part) for part in version.split(".")[:2]) <= TESTED[1]:
        warnings.warn(
            f"regard.hf is tested with transformers {least} to {most}, and this is {version}: "
            'compare a model with its attn_implementation="eager" before you rely on it.',
            stacklevel=3,
        )


_warn_of(transformers.__version__)
AttentionInterface.register("regard", attention_function)
AttentionMaskInterface.register("regard", mask_function)

__all__ = ["Attentions", "Checked", "check", "load", "read", "record"]
