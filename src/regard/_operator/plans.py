"""A cache of plans: calls that differ from a known one in lengths and strides alone.

Checking arguments takes longer than computing a few tokens. Where no option is an array, what is
checked depends on types, dtypes, heads and plain numbers, so a plan is cached by these.
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
    if type(backend) is not str:
        return None
    for name, x in options.items():
        if type(x) is not _PLAIN.get(name):
            return None
    if type(query) is type(key) is type(value) is np.ndarray:
        pass
    elif not (torch := sys.modules.get("regard._base.torch_state")) or not torch.is_plain(
        query, key, value
    ):
        return None
    axes = query.ndim
    if not 2 <= axes <= 4 or axes != key.ndim or axes != value.ndim:
        return None
    *heads, Lq, D = query.shape
    *key_heads, Lk, key_size = key.shape
    *value_heads, values, Dv = value.shape
    if values != Lk or not (0 < Lq and 0 < Lk < 2**31):
        return None
    dtypes, sizes = (query.dtype, key.dtype, value.dtype), (axes, D, key_size, Dv)
    return (
        _backends.BACKENDS, backend, *options.items(), dtypes, sizes,
        *heads, *key_heads, *value_heads,
    )  # fmt: skip


def find(key: tuple[Any, ...] | None) -> Plan | None:
    """The cached plan of a call."""
    return None if key is None else _plans.get(key)


def keep(key: tuple[Any, ...] | None, backend: _backends.Backend, call: Call, query: Any) -> None:
    """Makes the plan of calls like one that a backend has served."""
    if key is None or key in _plans:
        return
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = plan_of(call, query) if backend.name == "kernel" else None
