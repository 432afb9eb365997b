"""Whether a call of attention is of one text or of two, so that no query of another is cut off."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from regard._call.call import Call

CROSS = re.compile(r"cross|enc(oder)?_?dec|encoder_attn|multihead_attn", re.IGNORECASE)

# How names of classes end that are parts of an attention, and compute none.
BESIDE = "Bias", "Mask", "MLP", "Norm", "Output", "Projection", "Structure", "Subsample"


def is_attention(kind: type) -> bool:
    """Whether modules of a class are attention by its name, and not a part beside it."""
    return "Attention" in kind.__name__ and not kind.__name__.endswith(BESIDE)


def has_order(call: Call) -> bool:
    """Whether the options of a call give its queries positions among the keys."""
    return call.causal or call.window_left is not None or call.window_right is not None


def are_in_order(start: int, last: np.ndarray) -> bool:
    """Whether some queries see up to their own keys, each one key further than the one before.

    Args:
        start: the position of the first query among the keys.
        last: of each query the key after the last that it sees.
    """
    own = last == start + 1 + np.arange(len(last))
    return bool((own[1:] & own[:-1]).any())


def is_cross(
    name: str, queries: int, keys: int, in_order: bool, are_of_one: Callable[[], bool]
) -> bool:
    """Whether the queries are not among the keys.

    A name tells it where nothing else does: of queries as many as keys, and of a single one, which
    all stay in either case. A name around the layer may be of all its attention, as
    ``"cross_layers.0.self"``: not where queries and keys are of the same tokens.

    Args:
        name: of the module.
        queries, keys: how many.
        in_order: whether what is seen shows that queries have positions among the keys.
        are_of_one: tells whether queries and keys are known to be of the same tokens.
    """
    if queries > keys or in_order:
        return queries > keys
    if 1 < queries < keys or not CROSS.search(name):
        return 1 < queries < keys
    own = re.split(r"\.\d+\.", name)[-1]
    return queries != keys or bool(CROSS.search(own)) or not are_of_one()


def is_beside(name: str, other: str) -> bool:
    """Whether two modules are of one layer: parts of one number, or where there is none of one."""
    own, parts = name.split(".")[:-1], other.split(".")[:-1]
    count = next((n + 1 for n, part in enumerate(own) if re.search(r"\d", part)), None)
    return own[:count] == parts[:count]
