"""The one comparison that every numerical test of regard uses, for tests of your own as well."""

import sys
from typing import Any

import numpy as np

__all__ = ["assert_matches"]

# Stored bits of the fraction, and the exponent of the smallest normal number.
_FORMATS = {
    "float16": (10, -14),
    "bfloat16": (7, -126),
    "float32": (23, -126),
    "float64": (52, -1022),
}


def assert_matches(actual: Any, exact: Any, low_precision: Any) -> None:
    """Check a result against the exact one, with the plain computation's error as the measure.

    First, NaN and both infinities must be in the same places of ``actual`` and ``exact``. Then, in
    every place, ``|actual - exact|`` may be twice the largest error of ``low_precision`` plus
    one rounding: the distance to the next number of ``actual``'s dtype at the exact value.

    Args:
        actual: the result to test, any shape; NumPy or torch, floating.
        exact: the exact result, same shape; float64 or wider where ``actual`` is narrower.
        low_precision: the plain formula computed in ``actual``'s dtype, same shape. Places where it
            is NaN or infinite are left out of its error.

    Raises:
        AssertionError: they differ; the text names the worst place, the error there, what was
            allowed, and the low-precision error.
        TypeError: ``actual`` is not floating, or another is not of real numbers.

    Example:
        >>> import numpy as np
        >>> x = np.float32([0.1, 0.2])
        >>> assert_matches(np.exp(x), np.exp(x.astype(np.float64)), np.exp(x))

    Source: the tests of flash-attention 3, which bound the error in the same way.
    """
    dtype = _dtype_name(actual)
    if dtype not in _FORMATS:
        raise TypeError(f"actual is {dtype}; one of {', '.join(_FORMATS)} is needed.")
    for name, x in (("exact", exact), ("low_precision", low_precision)):
        if not _is_real(x):
            raise TypeError(f"{name} is {_dtype_name(x)}; real numbers are needed.")
    found, truth, low = _read(actual), _read(exact), _read(low_precision)
    if not found.shape == truth.shape == low.shape:
        raise AssertionError(
            f"shapes differ: actual {found.shape}  exact {truth.shape}  low_precision {low.shape}"
        )
    for kind, is_kind in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        _assert_same_places(kind, is_kind(found), is_kind(truth), found, truth)
    _assert_close(dtype, found, truth, low)


def _is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.") if _is_tensor(x) else np.asarray(x).dtype.name


def _is_real(x: Any) -> bool:
    name = _dtype_name(x)
    return name in _FORMATS or name.startswith(("float", "int", "uint"))


def _read(x: Any) -> np.ndarray:
    """The numbers in the widest float, so that no difference is rounded away."""
    array = x.detach().cpu().double().numpy() if _is_tensor(x) else np.asarray(x)
    return array.astype(np.longdouble)


def _assert_same_places(
    kind: str, found: np.ndarray, needed: np.ndarray, actual: np.ndarray, exact: np.ndarray
) -> None:
    different = found != needed
    if different.any():
        place = _first(different)
        raise AssertionError(
            f"{kind} in different places: actual has {found.sum()}, exact has {needed.sum()}; "
            f"{different.sum()} of {different.size} places differ.\n"
            f"  first at {place}: actual {actual[place]}  exact {exact[place]}"
        )


def _assert_close(dtype: str, actual: np.ndarray, exact: np.ndarray, low: np.ndarray) -> None:
    finite = np.isfinite(exact)
    error = _distance(actual, exact, finite)
    low_error = _distance(low, exact, finite & np.isfinite(low))
    largest = low_error.max(initial=0)
    rounding = _rounding(np.where(finite, exact, 0), dtype)
    excess = error - (2 * largest + rounding)
    if not (excess > 0).any():
        return
    worst = tuple(int(i) for i in np.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"error {error[worst]:.3g} at {worst} is over {2 * largest + rounding[worst]:.3g}: "
        f"twice the low-precision error {largest:.3g} and one {dtype} rounding "
        f"{rounding[worst]:.3g}.\n"
        f"  actual {actual[worst]:.9g}  exact {exact[worst]:.9g}  low_precision {low[worst]:.9g}\n"
        f"  {(excess > 0).sum()} of {excess.size} places are over"
    )


def _distance(x: np.ndarray, exact: np.ndarray, where: np.ndarray) -> np.ndarray:
    """``|x - exact|``, 0 where it is not asked for."""
    result = np.zeros_like(exact)
    np.subtract(x, exact, out=result, where=where)
    return np.abs(result)


def _rounding(x: np.ndarray, dtype: str) -> np.ndarray:
    """Distance from x to the next larger magnitude in a dtype."""
    fraction, smallest = _FORMATS[dtype]
    exponent = np.frexp(x)[1] - 1
    spaced = np.where(x == 0, smallest, np.maximum(exponent, smallest)) - fraction
    return np.ldexp(np.ones_like(x), spaced)


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])
