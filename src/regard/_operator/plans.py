"""Small calls that come again: what was found out once for some shapes is not found out anew.

Checking what was passed takes longer than computing a few tokens. It follows from types, dtypes,
shapes, strides and plain numbers alone where no option is an array, so its result is kept for them.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from regard import _backends
from regard._backends.kernel import Plan, plan_of
from regard._call.call import Call
from regard._call.options import OPTIONS

MOST = 256  # plans; then all are forgotten
# The exact type of what is given under a name: 1 and True are equal, and not both allowed.
_TYPES = {"flag": bool, "finite": float, "positive": float}
_PLAIN = {option.name: _TYPES[option.kind] for option in OPTIONS if option.kind in _TYPES}
_plans: dict[tuple[Any, ...], Plan | None] = {}  # None: there can be no plan


def key_of(
    query: Any, key: Any, value: Any, options: dict[str, Any], backend: str
) -> tuple[Any, ...] | None:
    """What decides everything about a call but its numbers; None where that is more."""
    if type(backend) is not str or any(type(x) is not _PLAIN.get(n) for n, x in options.items()):
        return None
    if type(query) is type(key) is type(value) is np.ndarray:
        strides: Any = query.strides, key.strides, value.strides
    elif (torch := sys.modules.get("regard._base.torch_state")) and torch.is_plain(
        query, key, value
    ):
        strides = query.stride(), key.stride(), value.stride()
    else:
        return None
    dtypes, shapes = (query.dtype, key.dtype, value.dtype), (query.shape, key.shape, value.shape)
    return _backends.BACKENDS, backend, *options.items(), dtypes, shapes, strides


def find(key: tuple[Any, ...] | None) -> Plan | None:
    """The plan of a call that came before."""
    return None if key is None else _plans.get(key)


def keep(key: tuple[Any, ...] | None, backend: _backends.Backend, call: Call, *arrays: Any) -> None:
    """Makes the plan of a call of these arrays, which a backend has served."""
    if key is None or key in _plans:
        return
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = plan_of(call, *arrays) if backend.name == "kernel" else None
