"""A requested part of the weights: indices, slices, and the rows that they reach."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def span(x: np.ndarray, step: int = 1) -> slice:
    """From the lowest to the highest number."""
    return slice(int(x.min()), int(x.max()) + 1, step)


def spaced(x: np.ndarray) -> slice:
    """Evenly spaced numbers, upwards."""
    return span(x, abs(int(x[1] - x[0])) if x.size > 1 else 1)


def part_of(name: str, part: slice | None, n: int) -> slice:
    """A part of n rows or columns, by default all."""
    part = slice(None) if part is None else part
    if not isinstance(part, slice):
        raise TypeError(f"weights: {name} is a {type(part).__name__}; a slice is needed.")
    start, stop, step = part.indices(n)
    if step < 0:
        raise ValueError(f"weights: {name} has the step {step}; a part goes upwards.")
    return slice(start, max(start, stop), step)


def basic_index(index: Any, shape: tuple[int, ...]) -> list[Any]:
    """One int or slice for each axis, checked."""
    given = index if isinstance(index, tuple) else (index,)
    ellipses = sum(x is Ellipsis for x in given)
    if ellipses > 1 or len(given) - ellipses > len(shape):
        raise IndexError(f"weights: {len(given)} indices for the {len(shape)} axes of {shape}.")
    missing = [slice(None)] * (len(shape) - len(given) + ellipses)
    if ellipses:
        at = next(i for i, x in enumerate(given) if x is Ellipsis)
        picks = [*given[:at], *missing, *given[at + 1 :]]
    else:
        picks = [*given, *missing]
    for axis, (pick, n) in enumerate(zip(picks, shape)):
        if isinstance(pick, slice):
            continue
        if isinstance(pick, bool) or not isinstance(pick, (int, np.integer)):
            raise IndexError(
                f"weights: index {axis} is a {type(pick).__name__}; ints, slices and ... are "
                "understood. Take a block first, and choose from it."
            )
        if not -n <= pick < n:
            raise IndexError(f"weights: index {pick} is out of range for axis {axis} of size {n}.")
    return picks


def element(index: tuple[int, ...], axes: tuple[int, ...], before: str) -> int:
    """The number of one element of some axes, by an int for each; those left out are 0."""
    if len(index) > len(axes):
        raise IndexError(f"weights: {len(index)} indices for {len(axes)} axes before {before}.")
    index = (*index, *(0 for _ in axes[len(index) :]))
    basic_index(index, axes)
    return int(np.arange(math.prod(axes)).reshape(axes)[index])
