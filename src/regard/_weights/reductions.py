"""Reductions of the weights: for each the arrays that a backend fills.

Each names its fields, numbers and arrays ``(B, Hq, ...)``, and makes its result of them.
"""

from typing import Any, Generic, NamedTuple, Protocol

import numpy as np

from regard._base.arrays import accumulating_name, arrays_of
from regard._base.errors import ShapeError, a_type
from regard._base.settings import require_materializable
from regard._base.types import ArrayT, IndexT
from regard._call.call import Call
from regard._call.visible import sees


class TopKeys(NamedTuple, Generic[ArrayT, IndexT]):
    """The strongest keys of every query, strongest first."""

    values: ArrayT
    """``(..., Hq, Lq, k)`` weights; 0 once the visible keys are used up."""
    indices: IndexT
    """``(..., Hq, Lq, k)`` key indices, int64."""


class Links(NamedTuple, Generic[ArrayT, IndexT]):
    """The strongest token pairs of a matrix, strongest first; -1, -1, 0.0 once there are no more.

    Of equal weights the lower query is first, then the lower key. Rows of NaN are left out.
    """

    query: IndexT
    """``(..., Hq, n)`` query indices, int64."""
    key: IndexT
    """``(..., Hq, n)`` key indices, int64."""
    weight: ArrayT
    """``(..., Hq, n)`` weights."""


class Reduction(Protocol):
    """One reduction of the weights of a call."""

    def fields(self) -> dict[str, Any]:
        """A backend's fields, by name: numbers, and the arrays that it fills."""

    def result(self) -> Any:
        """The result, once they are filled."""


def _written_by_backends(call: Call, shape: tuple[int, ...], fill: float, dtype: str) -> Any:
    """An array that is filled by whoever is asked; at once where there is no pair to ask about."""
    xp = arrays_of(call.query)
    return xp.full(shape, fill, dtype) if 0 in call.sizes else xp.empty(shape, dtype)


class PerQuery:
    """One number for each query: ``lse``, ``row_max``, ``entropy`` or ``distance``.

    ``row_max`` is the largest score among the keys, a part's its own.
    """

    def __init__(self, call: Call, name: str) -> None:
        B, Hq, _, Lq, _ = call.sizes
        fill = -np.inf if name in ("lse", "row_max") else 0.0
        self._out = arrays_of(call.query).full((B, Hq, Lq), fill, "float64")
        self._name = name

    def fields(self) -> dict[str, Any]:
        return {self._name: self._out}

    def result(self) -> Any:
        return self._out


class Received:
    """For each key the sum, mean or maximum over the queries; "seen": the mean over its own."""

    def __init__(self, call: Call, how: str) -> None:
        if how not in ("sum", "seen", "mean", "max"):
            raise ValueError(f"received: how is {how!r}; 'sum', 'seen', 'mean' or 'max' is needed.")
        B, Hq, _, Lq, Lk = call.sizes
        self._call, self._how, self._queries = call, how, max(Lq, 1)
        self._out = arrays_of(call.query).full((B, Hq, Lk), 0.0, "float64")  # sums over T rows

    def fields(self) -> dict[str, Any]:
        return {"received_max" if self._how == "max" else "received": self._out}

    def result(self) -> Any:
        if self._how == "seen" and self._call.sizes[0]:
            queries = np.stack([np.maximum(x.queries, 1) for x in sees(self._call)])
            return self._out / arrays_of(self._call.query).array(self._out, queries)
        return self._out / self._queries if self._how == "mean" else self._out


def is_pair_of_ints(x: Any) -> bool:
    """Whether x is a pair of ints, none of them a bool."""
    return (
        isinstance(x, (tuple, list))
        and len(x) == 2
        and all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in x)
    )


def check_k(k: int, count: int, of: str, what: str = "topk") -> None:
    """Raises TypeError or ShapeError where there are no k strongest ``of`` these."""
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
        raise TypeError(f"{what}: k is {a_type(k)}; an int is needed.")
    if not 0 <= k <= count:
        raise ShapeError(f"{what}: k is {k}; it must be between 0 and the number of {of}, {count}.")


def require_room_for_pairs(shape: tuple[int, ...], dtype: str) -> None:
    """Raises MaterializeError where the strongest pairs are above the limit: ``(B, H, n)``."""
    size = 2 * 8 + np.dtype(dtype).itemsize  # query, key and number
    require_materializable(
        "strongest", shape, 8 * size,
        "Ask for fewer pairs, or of one head: weights.head(h).strongest(n)",
        f"pairs of {size} bytes",
    )  # fmt: skip


OF_A_PART = ", of one head or of a part: weights.head(h).part(rows=slice(...)).topk(k)"


def require_room_for_keys(shape: tuple[int, ...], dtype: str, fewer: str = OF_A_PART) -> None:
    """Raises MaterializeError where the top keys are above the limit: ``(B, H, Lq, k)``.

    One key of each query is no matter of a limit, as entropies are none.

    Args:
        fewer: how there are fewer, beside a smaller k.
    """
    size = 8 + np.dtype(dtype).itemsize  # key and number
    if shape[-1] > 1:
        require_materializable(
            "topk", shape, 8 * size, f"Ask for fewer keys{fewer}", f"keys of {size} bytes"
        )


def require_room_for_bins(shape: tuple[int, ...], dtype: str) -> None:
    """Raises MaterializeError where a heatmap is above the limit: ``(B, H, R, C)``."""
    require_materializable(
        "pool", shape, 8 * np.dtype(dtype).itemsize,
        "Ask for fewer bins, of one head or of a part: weights.head(h).pool(size, rows=slice(...))",
    )  # fmt: skip


class TopK:
    """The k strongest keys of every query."""

    def __init__(self, call: Call, k: int) -> None:
        B, Hq, _, Lq, Lk = call.sizes
        check_k(k, Lk, "keys")
        self._k, shape = int(k), (B, Hq, Lq, int(k))
        require_room_for_keys(shape, accumulating_name(call.query))
        self._values = _written_by_backends(call, shape, 0.0, accumulating_name(call.query))
        self._indices = _written_by_backends(call, shape, 0, "int64")

    def fields(self) -> dict[str, Any]:
        if not self._k:
            return {}
        return {"k": self._k, "top_values": self._values, "top_keys": self._indices}

    def result(self) -> TopKeys[Any, Any]:
        return TopKeys(self._values, self._indices)


class Strongest:
    """The n strongest pairs of each head."""

    def __init__(self, call: Call, n: int) -> None:
        B, Hq, _, Lq, Lk = call.sizes
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"strongest: n is {a_type(n)}; an int is needed.")
        if n < 0:
            raise ValueError(f"strongest: n is {n}; it must not be negative.")
        self._n = n = min(int(n), Lq * Lk)
        xp, dtype = arrays_of(call.query), accumulating_name(call.query)
        require_room_for_pairs((B, Hq, n), dtype)
        self._weight = xp.full((B, Hq, n), 0.0, dtype)
        self._query, self._key = (xp.full((B, Hq, n), -1, "int64") for _ in range(2))

    def fields(self) -> dict[str, Any]:
        if not self._n:
            return {}
        arrays = {"pair_query": self._query, "pair_key": self._key, "pair_weight": self._weight}
        return {"n": self._n, **arrays}

    def result(self) -> Links[Any, Any]:
        return Links(self._query, self._key, self._weight)


class Pool:
    """A heatmap of each matrix, in ln(weight): NaN where all is masked.

    Bin r of R holds the cells from ``r·n // R`` to ``(r + 1)·n // R``.

    Args:
        of: ``(rows, columns)`` of the whole whose bins these are; by default the call's own.
    """

    def __init__(self, call: Call, size: Any, how: str, of: Any = None) -> None:
        if not is_pair_of_ints(size):
            raise TypeError(f"pool: size is {size!r}; a pair of ints (rows, columns) is needed.")
        if min(size) < 1:
            raise ValueError(f"pool: size is {tuple(size)}; each side must be at least 1.")
        if how not in ("max", "mass"):
            raise ValueError(f"pool: how is {how!r}; 'max' or 'mass' is needed.")
        B, Hq, _, Lq, Lk = call.sizes
        self._how, self._places = how, {}
        rows, columns = Lq, Lk
        if of is not None:
            self._places = _places_in(call, of)
            rows, columns = self._places["bin_extent"]
        shape = (B, Hq, min(int(size[0]), rows), min(int(size[1]), columns))
        dtype = accumulating_name(call.query)
        require_room_for_bins(shape, dtype)
        self._picture = _written_by_backends(call, shape, np.nan, dtype)

    def fields(self) -> dict[str, Any]:
        bins = tuple(self._picture.shape[2:])
        return {f"pooled_{self._how}": self._picture, "bins": bins, **self._places}

    def result(self) -> Any:
        return self._picture


def _places_in(call: Call, of: Any) -> dict[str, tuple[int, int]]:
    """Fields that say where queries and keys are in a whole: its lengths, first ones and steps."""
    if not is_pair_of_ints(of):
        raise TypeError(f"pool: of is {of!r}; a pair of ints (rows, columns) is needed.")
    positions = call.positions
    if positions is None:
        raise ValueError(
            "pool: the elements of the batch have queries at several positions; with of= they need"
            " to be at the same ones. Take the elements one by one, as weights.matrix(b, h)."
        )
    for name, part, n in zip(("queries", "keys"), positions, of):
        if part and not (0 <= part[0] and part[-1] < n):
            raise ValueError(
                f"pool: {name} are at positions {part[0]} to {part[-1]}, and of is {tuple(of)};"
                " the whole has positions from 0 up to its lengths."
            )
    starts, steps = (tuple(getattr(x, end) for x in positions) for end in ("start", "step"))
    return {"bin_extent": (int(of[0]), int(of[1])), "bin_start": starts, "bin_step": steps}
