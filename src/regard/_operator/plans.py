"""A cache of plans: calls that differ from a known one in lengths, strides and arrays alone.

Checking arguments takes longer than computing a few tokens. A plan is cached by types, dtypes,
heads, plain numbers and the names of the options that are arrays; what is left is checked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regard import _backends
from regard._backends.kernel_calls import edits_as_read, kernels
from regard._backends.kernel_plans import NOTHING, Moving, Plan, plan_of
from regard._base import loaded
from regard._base.arrays import dtype_name
from regard._call import edits
from regard._call.call import Call
from regard._call.checks import LARGEST_POSITION
from regard._call.options import OPTIONS

MOST = 256  # plans; then the cache is cleared
# The exact type of an option's value: 1 and True are equal, but not both allowed.
_TYPES = {"flag": bool, "finite": float, "positive": float}
_PLAIN = {option.name: _TYPES[option.kind] for option in OPTIONS if option.kind in _TYPES}
_plans: dict[tuple[Any, ...], Plan | None] = {}  # None: there can be no plan


# What finds the plan of a call, the arrays of the call as the kernels read them, and its options
# that are arrays.
Known = tuple[tuple[Any, ...], Any, Moving]


def known(query: Any, key: Any, value: Any, options: dict[str, Any], backend: str) -> Known | None:
    """What decides the plan of a call; None where the call can have none."""
    library = type(query)
    if kernels is None or type(backend) is not str:
        return None
    if type(key) is not library or type(value) is not library:
        return None
    is_plain: Plain
    if library is np.ndarray:
        is_plain, records = _is_array, False
    else:
        state = loaded.torch_state
        if state is None or library is not state.Tensor or not state.is_quiet():
            return None
        is_plain, records = state.is_plain, state.records_gradients()
    given = kernels.given(query, key, value, records)
    if given is None:
        return None
    if not options:
        return (_backends.BACKENDS, backend, given.kind), given, NOTHING
    parts: list[Any] = []
    moving: dict[str, Any] = {}
    for name, x in options.items():
        if type(x) is _PLAIN.get(name) or (name == "window" and _is_window(x)):
            parts.append((name, x))
        elif query.ndim == 4 and not given.differentiates and (read := _READ.get(name)):
            found = read(x, is_plain, (*query.shape[:3], key.shape[2]))
            if found is None:
                return None
            moving[name] = found
        else:
            return None
    cached = _backends.BACKENDS, backend, given.kind, *parts, *moving
    return cached, given, Moving(**moving) if moving else NOTHING


def _is_array(*arrays: object) -> bool:
    return all(type(x) is np.ndarray for x in arrays)


def _is_window(x: Any) -> bool:
    return (
        type(x) is tuple
        and len(x) == 2
        and all(side is None or (type(side) is int and 0 <= side < LARGEST_POSITION) for side in x)
    )


# Of an option, what tells plain arrays, and (B, Hq, Lq, Lk): the option where it is read as it is.
Sizes = tuple[int, int, int, int]
Plain = Callable[..., bool]


def _mask(x: Any, is_plain: Plain, sizes: Sizes) -> Any:
    if not is_plain(x) or dtype_name(x) != "bool" or x.ndim != 4:
        return None
    return x if all(n in (1, m) for n, m in zip(x.shape, sizes)) else None


def _intervals(x: Any, is_plain: Plain, sizes: Sizes) -> Any:
    if type(x) is not tuple or len(x) != 2 or not is_plain(*x):
        return None
    B, _, Lq, _ = sizes
    return x if all(_are_read(end, B, Lq) for end in x) else None


def _segments(x: Any, is_plain: Plain, sizes: Sizes) -> Any:
    B, _, Lq, Lk = sizes
    if type(x) is not tuple:
        if Lq != Lk or not is_plain(x):
            return None
        return (x, x) if _are_read(x, B, Lq) else None
    if len(x) != 2 or not is_plain(*x):
        return None
    return x if _are_read(x[0], B, Lq) and _are_read(x[1], B, Lk) else None


def _are_read(x: Any, B: int, length: int) -> bool:
    """Whether integers ``(B or 1, length)`` are read where they are."""
    fits = x.ndim == 2 and x.shape[1] == length and x.shape[0] in (1, B)
    return fits and dtype_name(x) == "int64" and _is_contiguous(x)


def _is_contiguous(x: Any) -> bool:
    return bool(x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous())


def _places(x: Any, is_plain: Plain, sizes: Sizes) -> list[int] | None:
    B = sizes[0]
    if type(x) is int:
        found = [x] * B
    elif is_plain(x) and dtype_name(x) == "int64" and x.ndim == 1 and x.shape[0] in (1, B):
        found = x.tolist() * (B if x.shape[0] == 1 else 1)
    else:
        return None
    return found if all(-LARGEST_POSITION <= n <= LARGEST_POSITION for n in found) else None


def _lengths(x: Any, is_plain: Plain, sizes: Sizes) -> list[int] | None:
    found = _places(x, is_plain, sizes)
    return found if found and all(0 <= n <= sizes[3] for n in found) else None


def _edits(x: Any, is_plain: Plain, sizes: Sizes) -> list[Any] | None:
    try:
        return edits_as_read(*edits.read(x, *sizes[1:]))
    except (TypeError, ValueError):  # which reading the call raises again
        return None


_READ: dict[str, Callable[[Any, Plain, Any], Any]] = {
    "mask": _mask,
    "intervals": _intervals,
    "segments": _segments,
    "query_start": _places,
    "key_lengths": _lengths,
    "edits": _edits,
}


def output(found: Known | None, query: Any, key: Any, value: Any) -> Any:
    """The output of a call that has a plan; None where it has none."""
    if found is None or not (plan := _plans.get(found[0])):
        return None
    _, given, moving = found
    if not given.differentiates:
        return plan.output(query, value, given, moving)
    if plan.call is None:
        return None
    return plan.differentiable(query, key, value, plan, given, plan.new_statistics(query))


def with_statistics(
    found: Known | None, query: Any, key: Any, value: Any
) -> tuple[Any, Call, _backends.Backend, _backends.Statistics] | None:
    """Output, call, its backend and row statistics, where a call has a plan that gives them."""
    if found is None or not (plan := _plans.get(found[0])):
        return None
    _, given, moving = found
    if moving is not NOTHING or plan.call is None:  # it is to be read first
        return None
    statistics = plan.new_statistics(query)
    if given.differentiates:
        out = plan.differentiable(query, key, value, plan, given, statistics)
    else:
        out = plan.output(query, value, given, NOTHING, statistics)
    return out, plan.call_of(query, key, value), _backends.by_name("kernel"), statistics


def keep(found: Known | None, backend: _backends.Backend, call: Call, query: Any) -> None:
    """Makes the plan of calls like one that a backend has served."""
    if found is None:
        return
    key, _, moving = found
    if key in _plans:
        return
    if len(_plans) >= MOST:
        _plans.clear()
    moves = moving is not NOTHING
    _plans[key] = plan_of(call, query, moves) if backend.name == "kernel" else None
