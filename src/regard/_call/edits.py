"""Edits of the weights: a factor for the pairs of a rectangle, before each row is normalised."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from regard._base.errors import ShapeError, a_type
from regard._base.settings import as_float

Span: TypeAlias = int | slice | None

# The end of a range that has none. Not the length, which a traced call must not depend on.
OPEN = 2**53
AXES = ("heads", "queries", "keys")


@dataclass(frozen=True)
class Edit:
    """The weights of a rectangle times a factor; every row is normalised anew.

    A factor of 0 is a knockout: a pair is cut, as by a mask. Others steer: 2 doubles the weights
    before they share the row again. In the scores it is ``ln(factor)``, added after the bias.
    Several edits of a pair multiply; the logit of a sink stays.

    Args:
        heads: of the query, an int, a slice of step 1, or None for all. Negative numbers count from
            the end, here and below.
        queries: which rows, likewise.
        keys: which columns, likewise.
        factor: finite, at least 0.

    Raises:
        TypeError: no int, slice or None, or no number.
        ValueError: a step other than 1, or a factor that is negative or not finite.

    Example:
        >>> import numpy as np, regard
        >>> x = np.eye(3)
        >>> weights = regard.AttentionWeights(x, x, scale=0.0, edits=[Edit(queries=2, keys=0)])
        >>> weights[:].round(2)
        array([[0.33, 0.33, 0.33],
               [0.33, 0.33, 0.33],
               [0.  , 0.5 , 0.5 ]])

    Source: Geva et al. 2023 for knockouts; Zhang et al. 2023 (PASTA) for steering.
    """

    heads: Span = None
    queries: Span = None
    keys: Span = None
    factor: float = 0.0

    def __post_init__(self) -> None:
        for name in AXES:
            _check_span(name, getattr(self, name))
        _check_factor(self.factor)

    def __hash__(self) -> int:
        # A slice has none before Python 3.12.
        spans = (getattr(self, name) for name in AXES)
        ends = ((x.start, x.stop, x.step) if isinstance(x, slice) else x for x in spans)
        return hash((*ends, self.factor))


class Rectangle(NamedTuple):
    """An edit of a call: half-open intervals, and the factor."""

    heads: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    factor: float

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Of heads, queries and keys."""
        return self.heads, self.queries, self.keys

    def meets(self, *block: slice) -> bool:
        """Whether it has any pair of a block ``(heads, queries, keys)``."""
        return all(
            max(low, part.start) < min(high, part.stop)
            for (low, high), part in zip(self.spans, block)
        )

    def within(self, *block: slice) -> tuple[slice, ...]:
        """Its index in an array of a block that it meets."""
        return tuple(
            slice(max(low, part.start) - part.start, min(high, part.stop) - part.start)
            for (low, high), part in zip(self.spans, block)
        )


def _is_int(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _check_span(name: str, span: Any) -> None:
    is_slice = isinstance(span, slice)
    ends = (span.start, span.stop) if is_slice else (span,)
    if not all(end is None or _is_int(end) for end in ends):
        found = repr(span) if is_slice else a_type(span)
        raise TypeError(
            f"Edit: {name} is {found}; an int, a slice of ints, or None for all is needed. "
            "Several rectangles are several edits."
        )
    if is_slice and span.step not in (None, 1):
        raise ValueError(
            f"Edit: {name} is {span}; its step must be 1, for an edit is a rectangle. "
            "Several rectangles are several edits."
        )


def _check_factor(factor: Any) -> None:
    if not isinstance(factor, numbers.Real) or isinstance(factor, bool):
        raise TypeError(f"Edit: factor is {a_type(factor)}; a number is needed.")
    if not 0 <= (number := as_float(factor)) < math.inf:
        raise ValueError(
            f"Edit: factor is {number}; it must be at least 0 and finite. 0 cuts, 1 changes "
            "nothing, 2 doubles weights before they are normalised."
        )


def read(
    edits: Any, heads: int, queries: int, keys: int
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Half-open intervals of heads, queries and keys, and the factor, of each edit.

    Args:
        edits: as the caller gave them.
        heads, queries, keys: how many there are.

    Raises:
        TypeError: no sequence of edits.
        ShapeError: an edit reaches past the heads, queries or keys.
    """
    if not isinstance(edits, (list, tuple)):
        raise TypeError(
            f"attention: edits is of type {type(edits).__name__}; a list is needed, as in "
            "edits=[regard.Edit(heads=0, keys=3)]."
        )
    counts = (heads, queries, keys)
    ranges, factors = [], []
    for n, edit in enumerate(edits):
        if not isinstance(edit, Edit):
            raise TypeError(
                f"attention: edits[{n}] is of type {type(edit).__name__}; a regard.Edit is needed, "
                "as in edits=[regard.Edit(heads=0, keys=3)]."
            )
        spans = zip(AXES, (edit.heads, edit.queries, edit.keys), counts)
        ranges.append(tuple(end for one in spans for end in _ends(n, *one)))
        factors.append(float(edit.factor))
    return ranges, factors


def refuse_from_the_end(edits: Any) -> None:
    """Raises ValueError where an edit counts queries or keys from the end of a whole."""
    for n, edit in enumerate(edits if isinstance(edits, (list, tuple)) else ()):
        for name in AXES[1:] if isinstance(edit, Edit) else ():
            span = getattr(edit, name)
            ends = (span.start, span.stop) if isinstance(span, slice) else (span,)
            if any(end is not None and end < 0 for end in ends):
                raise ValueError(
                    f"attention: edits[{n}]: {name} is {span}; with key_start, query_step or"
                    " key_step it is of positions, which are counted from the start."
                )


def _ends(n: int, name: str, span: Any, count: int) -> tuple[int, int]:
    first = -OPEN if count == OPEN else 0  # positions may be negative
    if span is None:
        return first, OPEN
    if not isinstance(span, slice):
        start = operator.index(span)
        if not -count <= start < count:
            raise ShapeError(
                f"attention: edits[{n}]: {name} is {span}; there are {count}"
                + (f", {-count} to {count - 1}." if count else ".")
            )
        start += count if start < 0 else 0
        return start, start + 1
    start, stop = (
        default if end is None else operator.index(end) + (count if end < 0 else 0)
        for end, default in ((span.start, first), (span.stop, OPEN))
    )
    if not first <= start <= count or not (stop == OPEN or 0 <= stop <= count):
        raise ShapeError(
            f"attention: edits[{n}]: {name} is {span}; there are {count}, and it must lie within "
            "them. An end is left open with None."
        )
    return start, max(start, stop)


def edits_of(ranges: Any, factors: Any) -> tuple[Edit, ...]:
    """The edits of a call's fields, without those of no pair."""
    found = []
    for (*ends,), factor in zip(ranges.tolist(), factors.tolist()):
        heads, queries, keys = (_span(*ends[n : n + 2]) for n in (0, 2, 4))
        if all(low < high for low, high in zip(ends[::2], ends[1::2])):
            found.append(Edit(heads, queries, keys, factor))
    return tuple(found)


def _span(start: int, stop: int) -> slice | None:
    if stop == OPEN:
        return None if start == 0 else slice(start, None)
    return slice(start, stop)


def of_head(edits: Sequence[Edit], h: int) -> tuple[Edit, ...]:
    """Edits that were read, for head h alone."""
    return tuple(
        Edit(None, edit.queries, edit.keys, edit.factor)
        for edit in edits
        if not isinstance(edit.heads, slice) or h in range(edit.heads.stop or OPEN)[edit.heads]
    )


def to_json(edits: Sequence[Edit]) -> list[list[Any]]:
    """Edits that were read, as ``[heads, queries, keys, factor]``; a range is [start, stop]."""
    return [[*(_to_json(getattr(edit, name)) for name in AXES), edit.factor] for edit in edits]


def _to_json(span: Any) -> list[int | None] | None:
    return [span.start, span.stop] if isinstance(span, slice) else span


def from_json(found: Any) -> list[Edit]:
    """Edits of such lists.

    Raises:
        TypeError, ValueError: it is no such list.
    """
    if not isinstance(found, list) or not all(isinstance(x, list) and len(x) == 4 for x in found):
        raise ValueError("edits: lists of heads, queries, keys and factor are needed.")
    return [
        Edit(_from_json(heads), _from_json(queries), _from_json(keys), factor)
        for heads, queries, keys, factor in found
    ]


def _from_json(span: Any) -> Any:
    return slice(*span) if isinstance(span, list) and len(span) == 2 else span
