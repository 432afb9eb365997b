"""A cache of plans for repeated small calls.

Checking arguments takes longer than computing a few tokens. Where no option is an array, the result
depends on types, dtypes, shapes, strides and plain numbers alone, so it is cached by these.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from regard import _backends
from regard._backends.kernel import Plan, plan_of
from regard._call.call import Call
from regard._call.options import OPTIONS

MOST = 256  # plans; then the cache is cleared
# The exact type of an option's value: 1 and True are equal, but not both allowed.
_TYPES = {"flag": bool, "finite": float, "positive": float}
_PLAIN = {option.name: _TYPES[option.kind] for option in OPTIONS if option.kind in _TYPES}
_plans: dict[tuple[Any, ...], Plan | None] = {}  # None: there can be no plan


def key_of(
    query: Any, key: Any, value: Any, options: dict[str, Any], backend: str
) -> tuple[Any, ...] | None:
    """The cache key of a call, which decides its plan; None where the call can have none."""
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
    """The cached plan of a call."""
    return None if key is None else _plans.get(key)


def keep(key: tuple[Any, ...] | None, backend: _backends.Backend, call: Call, *arrays: Any) -> None:
    """Makes the plan of a call of these arrays, which a backend has served."""
    if key is None or key in _plans:
        return
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = plan_of(call, *arrays) if backend.name == "kernel" else None
