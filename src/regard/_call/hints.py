"""What is meant by the name of an option that a function does not have: other libraries' names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

MASKS = {"mask": "mask= of bools, True = may attend", "bias": "bias= of numbers that are added"}
BIAS = {"bias": "bias="}
LENGTHS = {"key_lengths": "key_lengths="}
DOCUMENTS = {"segments": "segments=, the number of its document for each token"}
WINDOW = {"window": "window=(left, right)"}
DROPOUT = {"dropout": "dropout="}
STATISTICS = {"return_statistics": "return_statistics=True, for (output, statistics)"}
WEIGHTS = {"return_weights": "return_weights=True, for (output, weights)"}
# By the name elsewhere: options here, and how each is given.
ELSEWHERE = {
    "is_causal": {"causal": "causal=True, and with query_start=0 as in torch: query 0 at key 0"},
    "attn_mask": MASKS,
    "attention_mask": MASKS,
    "attn_bias": BIAS,
    "position_bias": BIAS,
    "alibi_slopes": {"bias": "bias= of numbers that are added, −slope · distance"},
    "key_padding_mask": {
        "key_lengths": "key_lengths=", "mask": "mask=, which is False where there is padding",
    },
    "cache_seqlens": LENGTHS,
    "cu_seqlens": DOCUMENTS,
    "cu_seqlens_q": DOCUMENTS,
    "cu_seqlens_k": DOCUMENTS,
    "window_size": WINDOW,
    "sliding_window": WINDOW,
    "softmax_scale": {"scale": "scale="},
    "dropout_p": DROPOUT,
    "p": DROPOUT,
    "op": {"backend": "backend="},
    "need_weights": WEIGHTS,
    "output_attentions": WEIGHTS,
    "return_attn_probs": WEIGHTS,
    "return_aux": STATISTICS,
    "return_lse": STATISTICS,
}  # fmt: skip
NEEDLESS = {
    "enable_gqa": "Leave it out: fewer key heads than query heads are shared without it.",
    "deterministic": "Leave it out: equal input gives equal bits without it.",
}


def unknown_option(
    function: str,
    unknown: Iterable[str],
    known: Iterable[str],
    own: Mapping[str, str] | None = None,
) -> TypeError:
    """The error for options that a function does not have, of which the first is told.

    Args:
        function: its name.
        unknown: what it was given.
        known: its options.
        own: what to do about some names, a sentence each.
    """
    name, known = next(iter(unknown)), list(known)
    here = [form for option, form in ELSEWHERE.get(name, {}).items() if option in known]
    near = difflib.get_close_matches(name, known, n=1)
    if own is not None and name in own:
        way_out = own[name]
    elif name in NEEDLESS:
        way_out = NEEDLESS[name]
    elif here:
        way_out = f"Here it is {', or '.join(here)}."
    elif near:
        way_out = f"Is {near[0]} meant?"
    else:
        way_out = f"There are {', '.join(known)}."
    return TypeError(f"{function}: there is no option {name!r}. {way_out}")
