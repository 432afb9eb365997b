"""A requested part of the weights: indices, slices, and the rows that they reach."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from regard._base.errors import a_type
from regard._base.settings import counted

MOST_LISTED = 16  # numbers in a message


def span(x: np.ndarray, step: int = 1) -> slice:
    """From the lowest to the highest number."""
    return slice(int(x.min()), int(x.max()) + 1, step)


def spaced(x: np.ndarray) -> slice:
    """Evenly spaced numbers, upwards."""
    return span(x, abs(int(x[1] - x[0])) if x.size > 1 else 1)


def picked(numbers: range, chosen: range) -> range:
    """The numbers at chosen places, which go upwards."""
    return numbers[chosen.start : chosen.stop : chosen.step]


def runs(x: np.ndarray, longest: int) -> Iterator[tuple[slice, range]]:
    """Where numbers stand, and which they are: all at once where they are evenly spaced upwards.

    Args:
        x: the numbers, at least one.
        longest: how many may be together.
    """
    steps = np.diff(x)
    if x.size <= longest and (steps == steps[:1]).all() and (steps > 0).all():
        yield slice(0, x.size), range(int(x[0]), int(x[-1]) + 1, spaced(x).step)
        return
    for at, number in enumerate(x.tolist()):
        yield slice(at, at + 1), range(number, number + 1)


def sharing_runs(heads: range, group: int) -> Iterator[range]:
    """Heads, some at a time: those that share one key head, or all the heads of several.

    Heads that share no key head are all together.

    Args:
        heads: upwards, with any step.
        group: how many neighbouring heads share a key head.
    """
    if heads.step % group == 0:
        yield heads
        return
    last = heads[-1]
    if heads.step == 1:
        low = min(-(-heads.start // group) * group, last + 1)
        high = max((last + 1) // group * group, low)
        cuts = [heads.start, low, high, last + 1]
    else:
        cuts = [heads.start, *range((heads.start // group + 1) * group, last + 1, group), last + 1]
    for start, stop in pairwise(cuts):
        start += (heads.start - start) % heads.step
        if start < stop:
            yield range(start, stop, heads.step)


def part_of(name: str, part: slice | None, n: int, what: str = "weights") -> slice:
    """A part of n rows or columns of ``what``, by default all."""
    part = slice(None) if part is None else part
    if not isinstance(part, slice):
        raise TypeError(f"{what}: {name} is {a_type(part)}; a slice is needed.")
    try:
        start, stop, step = part.indices(n)
    except (TypeError, ValueError) as error:  # its ends are no ints, or its step is 0
        raise type(error)(
            f"{what}: {name} is {part}; a slice of ints is needed, with a step of at least 1."
        ) from None
    if step < 0:
        raise ValueError(f"{what}: {name} has the step {step}; a part goes upwards.")
    return slice(start, max(start, stop), step)


def is_of_ints(part: slice) -> bool:
    """Whether the ends of a slice are ints, and its step one other than 0."""
    # Nothing is computed from them: where torch compiles, they may be symbols.
    ends = (part.start, part.stop, part.step)
    are_ints = all(isinstance(x, int) or x is None or hasattr(x, "__index__") for x in ends)
    return are_ints and (part.step is None or part.step != 0)


def int_of(what: str, number: Any) -> int:
    """An int from whatever stands for one; not a bool, though Python counts with it.

    Args:
        what: it is, as in ``"recording: layer"``.

    Raises:
        TypeError: it is none.
    """
    try:
        found = operator.index(number)
    except TypeError:
        found = None
    if found is None or isinstance(number, bool) or "bool" in str(getattr(number, "dtype", "")):
        raise TypeError(f"{what} {number!r} is {a_type(number)}; an int is needed.")
    return found


def place_of(what: str, number: Any, numbers: Sequence[int]) -> int:
    """The place of a number among some that need not be 0, 1, 2, ...

    Args:
        what: has the numbers, as in ``"recording: layer"``.
        number: one of them; a negative one counts from the last.
        numbers: distinct, none negative.

    Raises:
        IndexError: it is none of them.
        TypeError: it is no int.
    """
    found, count = int_of(what, number), len(numbers)
    if -count <= found < 0:
        return found + count
    if found in numbers:
        return numbers.index(found)
    missing = "" if counts_from_0(numbers) else " was not recorded"
    raise IndexError(f"{what} {found}{missing}; {told_numbers(numbers)}.")


def counts_from_0(numbers: Sequence[int]) -> bool:
    """Whether they are 0, 1, 2, ...: places and numbers are the same."""
    return tuple(numbers) == tuple(range(len(numbers)))


def told_numbers(numbers: Sequence[int]) -> str:
    """``there are 4, 0 to 3``, ``there are 3, 7``, or ``there are none``."""
    if not numbers:
        return "there are none"
    if counts_from_0(numbers):
        return f"there are {len(numbers)}, 0 to {len(numbers) - 1}"
    return f"there are {listed(numbers)}"


def told_heads(numbers: Sequence[int]) -> str:
    """``head 3``, or ``heads 3, 7``."""
    return f"head{'' if len(numbers) == 1 else 's'} {listed(numbers)}"


def listed(numbers: Sequence[int]) -> str:
    """``3, 7``; of more than 16 numbers the first and the last."""
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= MOST_LISTED else [*shown[:8], "...", shown[-1]])


def basic_index(
    index: Any,
    shape: tuple[int, ...],
    heads: int = -1,
    numbers: Sequence[int] | None = None,
    what: str = "weights",
) -> list[Any]:
    """One int or slice for each axis, checked.

    Args:
        index: of the caller.
        shape: of what it is an index of.
        heads: the axis of heads, where they have ``numbers`` of their own: an int is one of these,
            and all heads together are the only slice.
        numbers: of the heads.
        what: it is an index of, in words.
    """
    given = index if isinstance(index, tuple) else (index,)
    ellipses = sum(x is Ellipsis for x in given)
    if ellipses > 1 or len(given) - ellipses > len(shape):
        raise IndexError(
            f"{what}: {counted(len(given), 'index', 'indices')} for the"
            f" {counted(len(shape), 'axis', 'axes')} of {shape}."
        )
    missing = [slice(None)] * (len(shape) - len(given) + ellipses)
    if ellipses:
        at = next(i for i, x in enumerate(given) if x is Ellipsis)
        picks = [*given[:at], *missing, *given[at + 1 :]]
    else:
        picks = [*given, *missing]
    for axis, (pick, n) in enumerate(zip(picks, shape)):
        own = numbers if axis == heads else None
        if isinstance(pick, slice):
            if own is not None and pick != slice(None):
                raise IndexError(
                    f"{what}: a slice of the heads {listed(own)} would count them anew. Write :"
                    f" for all of them, or the number of one, as in {what}[{own[0]}]."
                )
            if not is_of_ints(pick):
                raise IndexError(
                    f"{what}: index {axis} is {pick}; its ends must be ints, and its step not 0."
                )
            continue
        if isinstance(pick, bool) or not isinstance(pick, (int, np.integer)):
            raise IndexError(
                f"{what}: index {axis} is {a_type(pick)}; ints, slices and ... are "
                "understood. Take a block first, and choose from it."
            )
        if own is not None:
            picks[axis] = place_of(f"{what}: head", pick, own)
        elif not -n <= pick < n:
            raise IndexError(f"{what}: index {pick} is out of range for axis {axis} of size {n}.")
    return picks


def require_ints(index: tuple[Any, ...], what: str) -> None:
    """Raises an IndexError where an index is a slice, for one element is asked for."""
    for axis, pick in enumerate(index):
        if isinstance(pick, slice) or pick is Ellipsis:
            raise IndexError(
                f"{what}: index {axis} is {a_type(pick)}; one int for each axis is needed."
            )


def element(
    index: tuple[int, ...], axes: tuple[int, ...], before: str, what: str = "weights"
) -> int:
    """The number of one element of some axes, by an int for each; those left out are 0."""
    if len(index) > len(axes):
        raise IndexError(
            f"{what}: {counted(len(index), 'index', 'indices')} for"
            f" {counted(len(axes), 'axis', 'axes')} before {before}."
        )
    require_ints(index, what)
    index = (*index, *(0 for _ in axes[len(index) :]))
    basic_index(index, axes, what=what)
    return int(np.arange(math.prod(axes)).reshape(axes)[index])
