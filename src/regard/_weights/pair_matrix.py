"""A matrix with a number for every token pair, computed on request in blocks of whole rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np

from regard._backends.pair_terms import PairBackend, PairTerm, ReadOnce
from regard._base import loaded
from regard._base.arrays import Arrays, accumulating_name, arrays_of, dtype_name, is_tensor
from regard._base.settings import bytes_text, require_materializable
from regard._base.types import ArrayT
from regard._call.call import Call
from regard._weights.exchange import capsule
from regard._weights.pair_questions import PairQuestions
from regard._weights.pair_reductions import Block, Dense, Extent, PairReduction
from regard._weights.parts import basic_index, element, part_of, require_ints, told_heads
from regard._weights.questions import at_once

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


Pick: TypeAlias = int | np.integer[Any] | slice | EllipsisType

BLOCK = 2**18  # numbers of a block of rows: 1 MB of float32
LOWEST, TALLEST = 64, 512  # rows of one
TOKENS = 2**16  # whose operands are held at once


class Rows(NamedTuple):
    """Whole rows of one matrix: all keys outside ``keys`` are masked."""

    keys: slice
    values: Any  # (rows, keys); 0 where masked
    visible: Any  # bool (rows, keys), or None: every pair


class Logarithms(NamedTuple):
    """Rows as distributions over keys, and over what is no key: a sink, or nothing to see."""

    keys: slice
    of_keys: Any  # (rows, keys): ln, −inf where masked
    elsewhere: Any  # (rows, 1): the share of no key


class PairMatrix(PairQuestions[ArrayT]):
    """A number for each pair of a query and a key, ``(..., H, Lq, Lk)``, computed on request.

    The base of ``Effects``: what they answer, in memory linear in the lengths. Numbers may be
    negative: what is strongest, or the maximum, is largest in size, and is given with its sign.
    Results have the array type and device of the query of the weights, and their dtype; there is
    no gradient.
    """

    __array_priority__ = 100
    _name = "matrix"  # in messages
    _block, _lowest, _tallest = BLOCK, LOWEST, TALLEST

    def _start(
        self, call: Call, *, heads: bool | None = None, numbers: tuple[int, ...] | None = None
    ) -> None:
        """Axes of a call's weights.

        Args:
            heads: whether there is an axis of them, where that is not as in the call.
            numbers: of the heads, where they are not 0, 1, 2, ...
        """
        B, H, _, Lq, Lk = call.sizes
        self._like, self._leading = call.query, call.leading
        self._has_heads = call.heads if heads is None else heads
        self._numbers = numbers if self._has_heads else None
        # What is asked for, of the source: batch elements, heads, queries and keys.
        self._b: Sequence[int] = range(B)
        self._h: Sequence[int] = range(H if heads is not False else 1)
        self._rows, self._columns = range(Lq), range(Lk)
        self._width = Lk  # of the rows that are computed

    def _compute(self, b: int, h: int, rows: slice) -> Rows:
        """Some rows of one matrix of the source, evenly spaced."""
        raise NotImplementedError

    @property
    def _backend(self) -> PairBackend | None:
        """The one that reduces the matrix itself, or None."""
        return None

    def _terms_of(self, b: int, h: int, rows: slice, read: ReadOnce) -> list[PairTerm]:
        """Some rows of one matrix of the source, as sums that the backend computes.

        Args:
            read: what was read for other matrices of this question.
        """
        raise NotImplementedError

    @property
    def _term_count(self) -> int:
        """How many sums ``_terms_of`` gives."""
        return 1

    def _logarithms(self, b: int, h: int, rows: slice) -> Logarithms:
        """Some rows of one matrix of the source, which must be distributions."""
        raise NotImplementedError

    def _elsewhere(self, b: int, h: int, rows: slice) -> Any:
        """The last of ``_logarithms`` alone."""
        return self._logarithms(b, h, rows).elsewhere

    @property
    def _are_distributions(self) -> bool:
        """Whether rows, with what is no key, sum to 1, and no number is negative."""
        return False

    def _prepare(self, b: Sequence[int], h: Sequence[int], rows: range) -> None:
        """Called once before rows are computed block by block."""

    def _require_now(self) -> None:
        """Raises where numbers cannot be computed here and now."""

    @property
    def _xp(self) -> Arrays:
        return arrays_of(self._like)

    @property
    def _axes(self) -> tuple[int, ...]:
        """The axes before ``(Lq, Lk)``."""
        return (*self._leading, *((len(self._h),) if self._has_heads else ()))

    @property
    def _extent(self) -> Extent:
        shape = len(self._b), len(self._h), len(self._rows), len(self._columns)
        return Extent(self._xp, self._dtype_name, shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., H, Lq, Lk)``."""
        return (*self._axes, len(self._rows), len(self._columns))

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """Numbers by which heads are asked for, as of the weights."""
        return tuple(range(len(self._h))) if self._numbers is None else self._numbers

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of results: float32, or float64 for a float64 query."""
        if is_tensor(self._like):
            return getattr(loaded.torch, self._dtype_name)
        return np.dtype(self._dtype_name)

    @property
    def nbytes(self) -> int:
        """The bytes that the whole matrix would take."""
        return self.size * np.dtype(self._dtype_name).itemsize

    @property
    def _dtype_name(self) -> str:
        return accumulating_name(self._like)

    def _same(self) -> Self:
        """The same matrix, for another part of it."""
        found = type(self).__new__(type(self))
        vars(found).update(vars(self))
        return found

    def part(self, rows: slice | None = None, columns: slice | None = None) -> Self:
        """The same of some queries and keys, ``(..., H, rows, columns)``, computed when asked.

        Args:
            rows, columns: which queries and keys, with any positive step; by default all.

        Raises:
            TypeError: no slices.
            ValueError: a negative step.
        """
        part = self._same()
        part._rows = self._rows[part_of("rows", rows, len(self._rows), self._name)]
        part._columns = self._columns[part_of("columns", columns, len(self._columns), self._name)]
        return part

    def head(self, h: int) -> Self:
        """The same of one head, ``(..., Lq, Lk)``, computed when asked.

        Args:
            h: which, of ``head_numbers``; negative counts from the last.

        Raises:
            IndexError: no such head, or no axis of heads.
        """
        if not self._has_heads:
            raise IndexError(f"{self._name}: {self.shape} has no axis of heads before (Lq, Lk).")
        require_ints((h,), self._name)
        places = range(len(self._h))
        at = places[basic_index(h, (len(places),), 0, self._numbers, self._name)[0]]
        part = self._same()
        part._h, part._has_heads, part._numbers = self._h[at : at + 1], False, None
        return part

    def matrix(self, *index: int) -> Self:
        """One ``(Lq, Lk)`` of several: one int for each axis before, by default the first.

        A head is one of ``head_numbers``.

        Raises:
            IndexError: no such matrix.
        """
        axes = self._axes
        if self._numbers is not None and len(index) == len(axes):
            require_ints(index, self._name)
            *before, h = index
            found = basic_index(h, axes[-1:], 0, self._numbers, self._name)
            index = (*before, *found)
        place = element(index, axes, "(Lq, Lk)", self._name)
        b, h = divmod(place, len(self._h))
        part = self._same()
        part._b, part._h, part._leading = self._b[b : b + 1], self._h[h : h + 1], ()
        part._has_heads, part._numbers = False, None
        return part

    def __getitem__(self, index: Pick | tuple[Pick, ...]) -> ArrayT:
        """Any basic index: ints, slices and ``...``; a head by its number in ``head_numbers``.

        Raises:
            IndexError: out of range, or not a basic index.
            MaterializeError: the part is above the limit.
        """
        lead = len(self._leading)
        heads = lead if self._has_heads else -1
        picks = basic_index(index, self.shape, heads, self._numbers, self._name)
        chosen = [np.arange(n)[pick] for n, pick in zip(self.shape, picks)]
        shape = (*(n for x in chosen for n in x.shape),)
        require_materializable(
            self._name, shape, 8 * np.dtype(self._dtype_name).itemsize,
            f"Ask for a part: {self._name}[0, head, i], {self._name}.pool(...)",
        )  # fmt: skip
        batch = np.arange(len(self._b)).reshape(self._leading)[tuple(picks[:lead])]
        part = self._same()
        part._b = [self._b[b] for b in batch.reshape(-1).tolist()]
        if self._has_heads:
            part._h = [self._h[h] for h in chosen[lead].reshape(-1).tolist()]
        rows, columns = (_upwards(x) for x in chosen[-2:])
        part._rows, part._columns = self._rows[rows], self._columns[columns]
        (whole,) = part._ask_raw(Dense(part._extent))
        for axis, x in ((2, chosen[-2]), (3, chosen[-1])):
            if x.ndim and x.size > 1 and x[0] > x[1]:
                whole = whole.flip(axis) if is_tensor(whole) else np.flip(whole, axis)
        found: ArrayT = whole.reshape(shape)
        return found if shape or is_tensor(found) else whole.reshape(())[()]

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.floating[Any]]:
        """The whole matrix; refused above the limit that ``regard.limits`` sets."""
        if copy is False:
            raise ValueError(f"{self._name}: computed when asked for, so an array is a copy.")
        whole: Any = self[...]
        whole = whole.cpu().numpy() if is_tensor(whole) else np.asarray(whole)
        return whole if dtype is None else whole.astype(dtype)

    def __dlpack__(self, *, copy: bool | None = None, **options: Any) -> Any:
        """The whole matrix, as ``torch.as_tensor`` asks for it; refused as ``np.asarray`` is."""
        return capsule(lambda: self[...], self._name, copy, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        found: tuple[int, int] = self._like.__dlpack_device__()
        return found

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ArrayT]:
        is_by_head = self._has_heads and not self._leading
        return (self[i] for i in (self.head_numbers if is_by_head else range(len(self))))

    def __repr__(self) -> str:
        heads = "" if self._numbers is None else f" of {told_heads(self._numbers)}"
        return (
            f"{type(self).__name__}{self.shape} {self._dtype_name}{self._told}{heads}, computed "
            f"when asked for; whole: {bytes_text(self.nbytes)}"
        )

    @property
    def _told(self) -> str:
        """What its ``repr`` says beside the shape."""
        return ""

    def _ask(self, *reductions: PairReduction) -> list[Any]:
        """The results of all of them, in one pass, with the caller's axes."""
        return [self._give(found) for found in self._ask_raw(*reductions)]

    @at_once
    def _ask_raw(self, *reductions: PairReduction) -> list[Any]:
        self._require_now()
        left = self._reduced_by_backend(reductions)
        with np.errstate(all="ignore"):  # NaN and inf are valid results here
            for block in self._blocks() if left else ():
                for reduction in left:
                    reduction.update(block)
        return [reduction.result() for reduction in reductions]

    def _reduced_by_backend(self, reductions: Sequence[PairReduction]) -> list[PairReduction]:
        """What the backend does not reduce; the others have their results."""
        backend = self._backend if self._has_all_keys and 0 not in self._extent.shape else None
        if backend is None:
            return list(reductions)
        asked = [(one, one.fields()) for one in reductions]
        passes = _passes([fields for _, fields in asked if fields is not None])
        self._prepare(self._b, self._h, self._rows)
        rows = slice(self._rows.start, self._rows.stop, self._rows.step)
        read: ReadOnce = {}
        for some in self._matrices_at_once():
            backend.reduce_pairs(
                [
                    (terms, {name: x if isinstance(x, (int, tuple)) else x[at] for name, x in own})
                    for at in some
                    for terms in [self._terms_of(self._b[at[0]], self._h[at[1]], rows, read)]
                    for own in (fields.items() for fields in passes)
                ]
            )
        return [one for one, fields in asked if fields is None]

    def _matrices_at_once(self) -> Iterator[list[tuple[int, int]]]:
        """The places of matrices whose operands are held together."""
        yield from self._held_at_once(
            [(b, h) for b in range(len(self._b)) for h in range(len(self._h))]
        )

    def _held_at_once(self, places: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Places, some at a time: of a long matrix its own alone."""
        step = max(1, TOKENS // max(1, (len(self._rows) + self._width) * self._term_count))
        for low in range(0, len(places), step):
            yield places[low : low + step]

    @property
    def _has_all_keys(self) -> bool:
        return self._columns == range(self._width)

    def _give(self, x: Any) -> Any:
        """A result with the caller's axes, and floats in the dtype of the matrix."""
        if isinstance(x, tuple):
            return type(x)(*(self._give(part) for part in x))
        if dtype_name(x) == "float64":
            x = self._xp.cast(x, self._dtype_name)
        return x.reshape((*self._axes, *x.shape[2:]))

    def _blocks(self) -> Iterator[Block]:
        """All asked rows, some at a time."""
        if 0 in self._extent.shape:
            return
        self._prepare(self._b, self._h, self._rows)
        height = min(self._tallest, max(self._lowest, self._block // max(1, self._width)))
        for at_b, b in enumerate(self._b):
            for at_h, h in enumerate(self._h):
                for low in range(0, len(self._rows), height):
                    rows = self._rows[low : low + height]
                    found = self._compute(b, h, slice(rows.start, rows.stop, rows.step))
                    yield Block(at_b, at_h, slice(low, low + len(rows)), *self._cut(found))

    def _at(self, b: int, h: int, rows: slice) -> tuple[int, int, slice]:
        """What of the source a matrix and some rows of this one are."""
        own = self._rows[rows]
        return self._b[b], self._h[h], slice(own.start, own.stop, own.step)

    def _cut(self, found: Rows) -> Rows:
        """The asked columns of some rows."""
        keys, columns = found.keys, self._columns
        if columns.step == 1 and columns.start <= keys.start and keys.stop <= columns.stop:
            return found._replace(keys=slice(keys.start - columns.start, keys.stop - columns.start))
        low, high = (
            min(len(columns), max(0, -((columns.start - key) // columns.step)))
            for key in (keys.start, keys.stop)
        )
        high = max(low, high)
        chosen = columns[low:high]
        at = slice(chosen.start - keys.start, max(0, chosen.stop - keys.start), chosen.step)
        if not chosen:
            at = slice(0, 0)
        visible = None if found.visible is None else found.visible[:, at]
        return Rows(slice(low, high), found.values[:, at], visible)


def _passes(asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked for, together where no name comes twice."""
    found: list[dict[str, Any]] = []
    for fields in asked:
        fits = (one for one in found if not one.keys() & fields.keys())
        if (one := next(fits, None)) is None:
            found.append(dict(fields))
        else:
            one.update(fields)
    return found


def rows_in(rows: slice) -> int:
    """How many rows a slice with both ends is."""
    return len(range(rows.start, rows.stop, rows.step))


def _upwards(x: np.ndarray) -> slice:
    """Evenly spaced indices as a slice with a positive step."""
    x = np.sort(x.reshape(-1))
    if not x.size:
        return slice(0, 0)
    return slice(int(x[0]), int(x[-1]) + 1, int(x[1] - x[0]) if x.size > 1 else 1)
