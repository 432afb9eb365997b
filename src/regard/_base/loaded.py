"""``loaded.torch``: torch, or None where nothing has loaded it; asking loads nothing.

``loaded.torch_state`` is ``regard._base.torch_state`` likewise, which a call finds here faster than
it could import it. ``sys.modules`` torch.compile reads entry by entry, thousands of them: 20 ms of
every graph. What a module has as an attribute it reads alone.
"""

import importlib
import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("torch", "torch_state"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = sys.modules.get("torch")
    if found is None:
        return None
    if name == "torch_state":
        found = importlib.import_module("regard._base.torch_state")
    globals()[name] = found  # at once from now on
    return found
