"""Weights as an operator: products, sums of blocks, diagonals, pairs and axes, never stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeAlias, overload

import numpy as np

from regard._base.arrays import arrays_of, dtype_name, is_tensor, to_numpy
from regard._base.compiling import is_traced
from regard._base.errors import ShapeError, UnsupportedError
from regard._base.settings import require_materializable
from regard._base.types import Array, ArrayT, BlocksHow, FloatingT, Int, Integers
from regard._call.call import Call
from regard._call.checks import read_flag
from regard._call.visible import Visibility
from regard._weights.array_names import missing
from regard._weights.differentiable import differentiable, is_differentiated, pairs_with_gradient
from regard._weights.linear_reductions import (
    Blocks,
    ByDistance,
    Diagonals,
    Product,
    TransposedProduct,
)
from regard._weights.operands import (
    Unstored,
    contiguous,
    read_axes,
    read_edges,
    read_ids,
    read_indices,
    read_operand,
    read_set,
    refuse,
)
from regard._weights.questions import question
from regard._weights.reductions import Received, Reduction, TopK
from regard._weights.transposed import TransposedWeights, from_left

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from regard._weights.statistics_cache import Place, StatisticsCache

Axes: TypeAlias = int | tuple[int, ...] | None
MOST_SHOWN = 1000  # weights that are printed
# Rows that are written out together: with a window few of the keys are any row's, and of all keys
# a block stays in the cache.
TALLEST_BLOCK, LEAST_ROWS, BLOCK_WEIGHTS = 256, 64, 2**20


class LinearForms(Unstored, Generic[ArrayT]):
    """The questions to weights that are sums of them; ``AttentionWeights`` has them."""

    if TYPE_CHECKING:
        _call: Call
        _graph: Call | None
        _statistics: StatisticsCache

        @property
        def _place(self) -> Place: ...
        @property
        def _dtype_name(self) -> str: ...
        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> Any: ...
        def _ask(self, *reductions: Reduction) -> list[Any]: ...
        def _require_now(self) -> None: ...
        def _give(self, x: Any) -> Any: ...
        def _lse_of_scores(self) -> Any: ...
        def _part(self, call: Call, place: Place, graph: Call | None = None) -> Any: ...
        def _head(self, b: int, h: int) -> Any: ...
        def _reduce(self, fields: dict[str, Any]) -> None: ...
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
        def _cut(self, rows: slice | None = None, columns: slice | None = None) -> Any: ...

        @property
        def size(self) -> int: ...
        @property
        def _line(self) -> str: ...

    @property
    def _tells_distances(self) -> bool:
        """Whether lengths, order and window alone say which distances their pairs have."""
        call = self._call
        given = (call.key_lengths, call.query_start, call.interval_first)
        return call.whole_rows and call.query_step == 1 and all(x is None for x in given)

    @property
    def device(self) -> Any:
        """The device that answers are on; ``"cpu"`` for NumPy."""
        return self._call.query.device if self._call.is_torch else "cpu"

    # Products.

    def __matmul__(self, x: ArrayLike | Array[ArrayT]) -> ArrayT:
        """``weights @ x``: the weighted sums of some rows, one for each key.

        Args:
            x: ``(Lk,)``, ``(Lk, p)`` or ``(..., Lk, p)``, with the leading axes of the weights or
                1; of NumPy or torch as the query, on its device, of any real dtype. A masked key's
                row counts for nothing, even where it is NaN.

        Returns:
            ``(..., Hq, Lq, p)``, of a vector without p.

        Raises:
            ShapeError, TypeError: x does not fit.
        """
        found: ArrayT = self._multiply("x", x, "product")
        return found

    def __rmatmul__(self, x: ArrayLike | Array[ArrayT]) -> ArrayT:
        """``x @ weights``, of ``(Lq,)`` or ``(..., p, Lq)``: ``(..., Hq, p, Lk)``, or without p."""
        found: ArrayT = from_left(x, self.shape[-2], lambda y: self._multiply("x", y, "transposed"))
        return found

    @question
    def _multiply(self, name: str, x: Any, of: Literal["product", "transposed"]) -> Any:
        self._require_now()
        product: Any = Product if of == "product" else TransposedProduct
        length = self._call.sizes[4 if product is Product else 3]
        operand, vector = read_operand(self._call, name, x, length)
        weights: Any = self
        if not is_differentiated(operand):
            operand = operand.detach() if is_tensor(operand) else operand
        elif self._graph is None:
            weights = self._part(self._call, self._place, self._call)
        xp, found, most = arrays_of(operand), [], product.columns
        for start in range(0, max(1, operand.shape[3]), most):
            some = contiguous(operand[..., start : start + most])
            found += weights._ask(product(self._call, some))
        out = found[0] if len(found) == 1 else xp.concatenate(found)
        return out[..., 0] if vector else out

    @property
    def T(self) -> TransposedWeights[ArrayT]:  # noqa: N802 - as arrays have it
        """The weights with queries and keys exchanged, ``(..., Hq, Lk, Lq)``, not stored either.

        ``weights.T @ y`` sums rows of y, one for each query, into the keys.
        """
        return TransposedWeights(self)

    @property
    def mT(self) -> TransposedWeights[ArrayT]:  # noqa: N802
        """The same as ``T``."""
        return self.T

    # Sums of parts.

    def blocks(
        self,
        query_ids: Int[Array[object], " Lq"] | Sequence[int],
        key_ids: Int[Array[object], " Lk"] | Sequence[int],
        how: BlocksHow = "sum",
        counts: tuple[int, int] | None = None,
    ) -> ArrayT:
        """One number for each block of queries and block of keys: ``(..., Hq, Nq, Nk)``.

        Sentence by sentence, or answer by document, where the ids number them.

        Args:
            query_ids, key_ids: the block of each query and key, from 0 on, in any order; a negative
                one is left out. ``(Lq,)`` and ``(Lk,)``, or with the leading axes of a batch.
            how: of the pairs of both blocks ``"sum"``, the sum of the weights; ``"mean"``, that
                divided by the number of pairs that are not masked; ``"max"``, the largest weight;
                or ``"mass"``, the sum divided by the number of queries in the block, masked or
                not: what a query gives to the keys of the block, on average. 0 without a pair.
            counts: ``(Nq, Nk)``, how many blocks there are; by default as many as the largest id
                and one. In one graph of ``torch.compile`` it is needed where ids are tensors.

        Raises:
            ShapeError, TypeError: ids do not fit.
            ValueError: another ``how``, or an id that is above the counts.
            MaterializeError: the result is above the limit.
        """
        if how not in ("sum", "mean", "max", "mass"):
            raise ValueError(f"blocks: how is {how!r}; 'sum', 'mean', 'max' or 'mass' is needed.")
        if counts is not None and (not isinstance(counts, (tuple, list)) or len(counts) != 2):
            raise TypeError(f"blocks: counts is {counts!r}; a pair of ints is needed.")
        if counts is None and is_traced():
            counts = _counts_in_graph(query_ids, key_ids)
            if counts is None:
                from regard._backends.torch_questions import blocks_at_once

                found: ArrayT = blocks_at_once(self._blocks, query_ids, key_ids, how, None)
                return found
        return self._blocks(query_ids, key_ids, how, counts)

    @question
    def _blocks(
        self, query_ids: Any, key_ids: Any, how: BlocksHow, counts: tuple[int, int] | None
    ) -> Any:
        self._require_now()
        call = self._call
        B, Hq, _, Lq, Lk = call.sizes
        most = (None, None) if counts is None else counts
        queries, rows = read_ids(call, "query_ids", query_ids, Lq, most[0])
        keys, columns = read_ids(call, "key_ids", key_ids, Lk, most[1])
        require_materializable(
            "blocks", (B, Hq, rows, columns), 64,
            "Number the blocks 0, 1, 2, ..., as np.unique(ids, return_inverse=True)[1] does",
        )  # fmt: skip
        (found,) = self._ask(Blocks(call, queries, keys, (rows, columns), how))
        return found

    @overload
    def diagonals(
        self: LinearForms[NDArray[FloatingT]],
        edges: Int[Array[object], " n+1"] | Sequence[int] | None = None,
    ) -> Diagonals[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def diagonals(
        self, edges: Int[Array[object], " n+1"] | Sequence[int] | None = None
    ) -> Diagonals[ArrayT, ArrayT]: ...
    def diagonals(self, edges: Any = None) -> Diagonals[Any, Any]:
        """The sum of the weights at each distance: ``(distances, values)``.

        The distance of a pair is the position of its query, ``query_start + i``, less that of its
        key: 1 for the token before, 0 for itself, negative for what follows.

        Args:
            edges: rising ints e₀ < e₁ < …: sums over the distances from e₀ to e₁ − 1, from e₁ to
                e₂ − 1, ...; by default each distance alone.

        Returns:
            ``distances`` ``(n,)``, of ranges their first; ``values`` ``(..., Hq, n)``. Without
            edges all distances that order, window, lengths and intervals leave, rising: 0 to
            ``Lq − 1`` for causal weights of a text.

        Raises:
            TypeError, ValueError: edges are not two or more rising ints.
        """
        if edges is None and is_traced() and not self._tells_distances:
            from regard._backends.torch_questions import diagonals_at_once

            found: Diagonals[Any, Any] = diagonals_at_once(self._diagonals, None)
            return found
        return self._diagonals(edges)

    @question
    def _diagonals(self, edges: Any) -> Diagonals[Any, Any]:
        self._require_now()
        reduction = ByDistance(self._call, read_edges(edges))
        (values,) = self._ask(reduction)
        return Diagonals(self._integers(reduction.distances), values)

    @question
    def at(self, queries: Integers, keys: Integers) -> ArrayT:
        """The weights of chosen pairs: ``(..., Hq, n)``; 0 where masked.

        It takes n vectors of query and key each, after the row statistics. The kernels give the
        bits of ``weights[...]``.

        Args:
            queries, keys: indices of the pairs, ``(n,)`` ints each or of any shapes that broadcast,
                which the result has instead of n. Negative ones count from the last.

        Raises:
            IndexError: out of range.
            TypeError: no ints.
            ShapeError: they do not broadcast.
        """
        self._require_now()
        *_, Lq, Lk = self._call.sizes
        i, j = _broadcast(read_indices("queries", queries, Lq), read_indices("keys", keys, Lk))
        low, high = (int(i.min()), int(i.max()) + 1) if i.size else (0, 0)
        part = self._cut(slice(low, high))  # the only rows whose statistics it takes
        statistics = part._statistics.of(part._place)
        backend = self._statistics.backend
        found = backend.gather(
            part._call.in_memory(), statistics, i.reshape(-1) - low, j.reshape(-1)
        )
        if (graph := differentiable(self._graph)) is not None:
            found = pairs_with_gradient(graph, self._lse_of_scores(), found, i, j)
        weights = self._give(found.reshape((*found.shape[:2], *i.shape)))
        single = not weights.ndim and not self._call.is_torch
        chosen: ArrayT = weights[()] if single else weights
        return chosen

    @question
    def mass(self, keys: slice | Array[object] | Sequence[int] | Sequence[bool]) -> ArrayT:
        """The share of a set of keys: for each query the sum of its weights on them.

        Args:
            keys: a slice, a bool mask ``(Lk,)``, or indices, of which negative ones count from the
                last; twice the same counts once.

        Returns:
            ``(..., Hq, Lq)``.

        Raises:
            ShapeError, TypeError, IndexError: keys do not fit.
        """
        self._require_now()
        found, xp = read_set(keys, self._call.sizes[4]), arrays_of(self._call.query)
        if differentiable(self._graph) is not None:
            member = np.zeros(self._call.sizes[4])
            member[found] = 1
            share: ArrayT = self @ xp.array(xp.empty((0,), self._dtype_name), member)
            return share
        low, high = (int(found[0]), int(found[-1]) + 1) if found.size else (0, 0)
        steps = np.unique(np.diff(found))
        step = int(steps[0]) if len(steps) == 1 else 1
        part = self._cut(columns=slice(low, high, step))
        if len(found) == part.shape[-1]:  # of the only keys that count
            shares = part @ xp.full((len(found),), 1.0, self._dtype_name)
        else:  # not by a factor of 0, which NaN times 0 would not leave out
            chosen = np.full(high - low, -1)
            chosen[found - low] = 0
            shares = part.blocks(np.arange(self._call.sizes[3]), chosen)[..., 0]
        return shares

    # What arrays have.

    def sum(
        self, axis: Axes = None, dtype: None = None, out: None = None, keepdims: bool = False
    ) -> ArrayT:
        """The sum along some axes, by default all: along queries or keys nothing is stored.

        Args:
            axis: one or several; the last is that of the keys, the one before that of the queries.
                Along a batch only with one of these; along heads alone it is a ``Mix``.
            dtype, out: None; NumPy's functions pass them.
            keepdims: whether they stay, of size 1: True or False, as in torch, where NumPy takes
                numbers too.

        Raises:
            UnsupportedError: along a batch alone, or heads with ``keepdims``: that is a matrix.
            IndexError, TypeError, ValueError: no such axes.
        """
        refuse(dtype=dtype, out=out)
        return self._along("sum", axis, keepdims)

    def mean(
        self, axis: Axes = None, dtype: None = None, out: None = None, keepdims: bool = False
    ) -> ArrayT:
        """The mean along some axes, as ``sum``; masked pairs count with their weight of 0.

        ``received(how="seen")`` is the mean over the queries that see a key.
        """
        refuse(dtype=dtype, out=out)
        return self._along("mean", axis, keepdims)

    def max(
        self, axis: Axes = None, dtype: None = None, out: None = None, keepdims: bool = False
    ) -> ArrayT:
        """The largest weight along some axes, as ``sum``; NaN where one is NaN."""
        refuse(dtype=dtype, out=out)
        return self._along("max", axis, keepdims)

    @overload
    def argmax(
        self: LinearForms[NDArray[FloatingT]],
        axis: int | None = None,
        out: None = None,
        keepdims: bool = False,
    ) -> NDArray[np.int64]: ...
    @overload
    def argmax(
        self, axis: int | None = None, out: None = None, keepdims: bool = False
    ) -> ArrayT: ...
    def argmax(self, axis: Any = None, out: None = None, keepdims: bool = False) -> Any:
        """The index of the largest weight along an axis, int64; flat, of the whole, by default.

        Of equal weights along the keys the first of the largest score, else the first.
        """
        refuse(out=out)
        if isinstance(axis, tuple):
            raise TypeError("weights: argmax takes one axis, an int, or None for all.")
        keepdims = read_flag("keepdims", keepdims, "weights")
        axes, shape = read_axes(axis, self.shape), self.shape
        if 0 in (shape[n] for n in axes):
            raise ValueError(f"weights: argmax of {shape}, an axis of no weights.")
        if axis is not None and axes[0] < len(shape) - 2:
            return self._over_heads("argmax", axes)
        return self._argmax_along(axes, keepdims)

    @question
    def _argmax_along(self, axes: tuple[int, ...], keepdims: bool) -> Any:
        """Along all axes, the keys or the queries."""
        shape = self.shape
        if len(axes) > 1:
            found = self._flat_argmax()
        elif axes == (len(shape) - 1,):
            found = self._ask(TopK(self._call, 1))[0].indices[..., 0]
        else:
            found = self._argmax_of_queries()
        return _kept(found, axes, shape) if keepdims else found

    def _along(self, name: str, axis: Any, keepdims: bool) -> Any:
        keepdims = read_flag("keepdims", keepdims, "weights")
        axes, shape = read_axes(axis, self.shape), self.shape
        queries, keys = len(shape) - 2, len(shape) - 1
        if queries not in axes and keys not in axes:
            return self._over_heads(name, axes, keepdims)
        if name == "max" and 0 in (shape[n] for n in axes):
            raise ValueError(f"weights: max of {shape} along an axis of size 0.")
        return self._folded(name, axes, keepdims)

    @question
    def _folded(self, name: str, axes: tuple[int, ...], keepdims: bool) -> Any:
        """Along some axes, that of the queries or the keys among them."""
        shape = self.shape
        queries, keys = len(shape) - 2, len(shape) - 1
        if queries in axes:
            (found,) = self._ask(Received(self._call, "max" if name == "max" else "sum"))
        elif name == "max":
            found = self._ask(TopK(self._call, 1))[0].values[..., 0]
        else:
            found = self.mass(slice(None))
        rest = tuple(n for n in axes if n < queries)
        found = _fold(found, (*rest, queries) if queries in axes and keys in axes else rest, name)
        if name == "mean":
            found = found / max(1, math.prod(shape[n] for n in axes))
        return _kept(found, axes, shape) if keepdims else found

    def _over_heads(self, name: str, axes: tuple[int, ...], keepdims: bool = False) -> Any:
        """Along heads or a batch alone the result is a matrix again; a sum of heads is a mix."""
        of_heads = self._call.heads and axes == (len(self.shape) - 3,)
        if name in ("sum", "mean") and of_heads and not keepdims:
            from regard._weights.mix import mixed_heads

            count = self.shape[-3]
            return mixed_heads(self, None, [1.0] * count if name == "sum" else None)
        raise UnsupportedError(
            f"weights: {name} along axis {', '.join(map(str, axes))} of {self.shape} is a matrix"
            f" again, which is not stored. Take rows, as in weights[..., i, :].{name}(-2), or of a"
            f" small one all: weights[...].{name}(-3)."
        )

    def _flat_argmax(self) -> Any:
        values, indices = (to_numpy(x)[..., 0] for x in self._ask(TopK(self._call, 1))[0])
        row = int(values.argmax())
        return self._integers(np.int64(row * self.shape[-1] + indices.flat[row]))

    def _argmax_of_queries(self) -> Any:
        """Block by block of rows, and of the keys that they may see."""
        B, Hq, _, _, Lk = self._call.sizes
        found, largest = np.zeros((B, Hq, Lk), np.int64), np.zeros((B, Hq, Lk), self._dtype_name)
        if self._statistics.backend.reads_statistics:
            self._statistics.learn(self._place)
        for b, h in np.ndindex(B, Hq):
            for low, keys, w in self._head(b, h)._seen_blocks():
                own, top = largest[b, h, keys], w.max(0)
                (higher,) = np.nonzero((top > own) | (np.isnan(top) & ~np.isnan(own)))
                found[b, h, keys][higher] = low + w[:, higher].argmax(0)
                own[higher] = top[higher]
        return self._give(self._integers(found))

    def _seen_blocks(self) -> Iterator[tuple[int, slice, np.ndarray]]:
        """Blocks of one matrix: their first row, the keys that their rows may see, the weights."""
        call, xp = self._call, arrays_of(self._call.query)
        visible, Lq, low = Visibility(call, xp.arange), call.sizes[3], 0
        while low < Lq:
            rows = slice(low, min(Lq, low + TALLEST_BLOCK))
            keys = visible.keys(0, rows)
            height = max(LEAST_ROWS, BLOCK_WEIGHTS // max(1, keys.stop - keys.start))
            if height < rows.stop - low:
                rows = slice(low, low + height)
                keys = visible.keys(0, rows)
            if keys.start < keys.stop:
                part = self._cut(rows)
                seen = part._call.columns(keys).changed(whole_rows=call.whole_rows)
                block = xp.zeros((1, 1, *part.shape[:1], keys.stop - keys.start), self._dtype_name)
                self._part(seen, part._place)._reduce({"weights": block})
                yield low, keys, to_numpy(block)[0, 0]
            low = rows.stop

    def _integers(self, x: Any) -> Any:
        """int64 of NumPy in the library of the weights."""
        if not self._call.is_torch:
            return x
        xp = arrays_of(self._call.query)
        return xp.array(xp.empty((0,), "int64"), x)

    if not TYPE_CHECKING:  # a checker that saw it would take any name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(missing(name), name=name, obj=self)


def described(weights: Any, line: str) -> str:
    """A line, and below it the numbers of few weights that can be computed here and now."""
    if not 0 < weights.size <= MOST_SHOWN:
        return line
    try:
        whole = np.asarray(weights)
    except (RuntimeError, UnsupportedError):  # written to, or a graph is recorded
        return line
    return f"{line}\n{np.array2string(whole, precision=4, suppress_small=True)}"


def _fold(x: Any, axes: tuple[int, ...], name: str) -> Any:
    """The sum, in float64, or the largest along some axes."""
    if not axes:
        return x
    if name == "max":
        return x.amax(axes) if is_tensor(x) else x.max(axes)
    xp = arrays_of(x)
    return xp.cast(xp.cast(x, "float64").sum(axes), dtype_name(x))


def _kept(x: Any, axes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """x with the axes that were reduced, of size 1."""
    return x.reshape(tuple(1 if n in axes else size for n, size in enumerate(shape)))


def _counts_in_graph(query_ids: Any, key_ids: Any) -> tuple[int, int] | None:
    """How many blocks each of two lists of ids has; None where they are arrays."""
    if any(is_tensor(x) or isinstance(x, np.ndarray) for x in (query_ids, key_ids)):
        return None
    return max([*query_ids, -1]) + 1, max([*key_ids, -1]) + 1


def _broadcast(i: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    try:
        queries, keys = np.broadcast_arrays(i, j)
    except ValueError:
        raise ShapeError(
            f"weights: queries {i.shape} and keys {j.shape} do not broadcast to one shape of pairs."
        ) from None
    return queries, keys
