"""``loaded.torch``: torch, or None where nothing has loaded it; asking loads nothing.

``sys.modules`` torch.compile reads entry by entry, thousands of them: 20 ms of every graph. What a
module has as an attribute it reads alone.
"""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "torch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = sys.modules.get("torch")
    if found is not None:
        globals()["torch"] = found  # at once from now on
    return found
