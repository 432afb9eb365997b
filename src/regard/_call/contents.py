"""The numbers in the arrays of a call, which a backend checks before it reads them."""

from typing import Any

from regard._base import loaded
from regard._base.arrays import is_tensor, require_numbers
from regard._base.errors import ShapeError
from regard._call.call import Call
from regard._call.checks import LARGEST_POSITION


def check_contents(call: Call, *, on_device: bool = False) -> None:
    """Checks the numbers in arrays: key lengths past the keys, query positions far off.

    Args:
        on_device: those that are on a device are checked there, and the host does not wait: torch's
            assertion fails on the device, and in what is asked of it next.

    Raises:
        ShapeError: key lengths exceed the keys.
        ValueError: the position of a query exceeds ``LARGEST_POSITION``.
    """
    Lk, most = call.key.shape[2], LARGEST_POSITION
    found = _least_and_largest("key_lengths", call.key_lengths, (0, Lk), on_device)
    if found is not None and (found[0] < 0 or found[1] > Lk):
        raise ShapeError(
            f"attention: key_lengths are from {found[0]} to {found[1]}; "
            f"each must be between 0 and the number of keys, {Lk}."
        )
    starts = call.query_start if call.part_of is None else None
    found = _least_and_largest("query_start", starts, (-most, most), on_device)
    if found is not None and (found[0] < -most or found[1] > most):
        raise ValueError(
            f"attention: query_start is {found[0] if found[0] < -most else found[1]}; "
            "the place of a query must be between -2**53 and 2**53."
        )


def _least_and_largest(
    name: str, x: Any, allowed: tuple[int, int], on_device: bool
) -> tuple[int, int] | None:
    """The smallest and the largest of integers; None where there are none, or a device asserts."""
    if x is None or not len(x):
        return None
    if on_device and is_tensor(x) and not x.is_cpu:
        (low, high), torch = allowed, loaded.torch
        inside = ((low <= x) & (x <= high)).all()
        torch._assert_async(inside, f"attention: {name} must be {low} to {high}.")
        return None
    if is_tensor(x):
        require_numbers(x)
    found = x.tolist()
    return min(found), max(found)
