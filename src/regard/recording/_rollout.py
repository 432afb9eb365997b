"""Attention rollout: how much of each input token reaches each position through all layers."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.errors import ShapeError, a_type
from regard._base.settings import counted
from regard._base.types import Array, ArrayT
from regard._weights.mix import Mix, mixed_heads
from regard._weights.pair_matrix import Logarithms, PairMatrix, Rows
from regard._weights.pair_reductions import Block

if TYPE_CHECKING:
    from regard.recording._recording import Recording


def rollout(recording: Recording[ArrayT], residual: float = 0.5) -> Rollout[ArrayT]:
    """Attention rollout: how much of each input token reaches each position through all layers.

    The product over layers of ``residual · I + (1 − residual) · mean over heads``, each row divided
    by its sum, or that of I where it is 0. No matrix is stored: a row is multiplied through the
    layers from the last to the first, a column from the first to the last.

    Args:
        recording: of self-attention: every query is one of the tokens.
        residual: share of the residual connection, from 0 to 1.

    Returns:
        ``(tokens, tokens)``, computed when asked for: ``rollout[-1]`` is what the last position is
        made of.

    Raises:
        ShapeError: the queries are not all of the tokens.
        TypeError, ValueError: residual is no number from 0 to 1.
        TypeError: there is no Recording, but weights for instance.

    Source: Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers".
    """
    from regard.recording._recording import Recording

    if not isinstance(recording, Recording):
        raise TypeError(
            f"rollout: {a_type(recording)} is no Recording; regard.record makes one, and"
            " Recording(tokens, [weights.layer(), ...]) one of the weights of layers."
        )
    if not isinstance(residual, numbers.Real) or isinstance(residual, bool):
        raise TypeError(f"rollout: residual is {a_type(residual)}; a number is needed.")
    if not 0 <= residual <= 1:
        raise ValueError(f"rollout: residual is {residual}; a share from 0 to 1 is needed.")
    for number, layer in zip(recording.layer_numbers, recording.layers):
        Lq, Lk = layer._query.shape[1], layer._key.shape[1]
        if Lq != Lk or layer.query_start != 0:
            raise ShapeError(
                f"rollout: layer {number} has {counted(Lq, 'query', 'queries')} from position"
                f" {layer.query_start} on, and {counted(Lk, 'key')}; every token must be"
                " a query, as in a pass over the whole text."
            )
    return Rollout([mixed_heads(w, None, None) for w in recording.weights], float(residual))


class Rollout(PairMatrix[ArrayT]):
    """How much of each input token reaches each position, ``(tokens, tokens)``.

    ``regard.rollout(recording)`` makes it. Rows sum to 1. Some rows, some columns and products by
    ``@`` cost one pass over the weights of all layers; ``topk``, ``strongest``, ``received`` and
    ``pool`` one for each block of rows: 1 up to 2,048 tokens, 64 for 16,384.
    """

    _name = "rollout"
    _block = _tallest = 2**22  # numbers: a block costs a pass over all weights

    def __init__(self, layers: Sequence[Mix[ArrayT]], residual: float) -> None:
        first = layers[0]
        self._layers, self._residual = layers, residual
        self._read = layers if residual < 1 else ()  # no weight is in a product of I alone
        self._like, self._leading, self._has_heads = first._like, (), False
        self._numbers, self._b, self._h = None, range(1), range(1)
        self._rows, self._columns = first._rows, first._columns
        self._width = len(first._columns)

    def _require_now(self) -> None:
        for layer in self._layers:
            layer._require_now()

    def _compute(self, b: int, h: int, rows: slice) -> Rows:
        x = self._one_hot(range(rows.start, rows.stop, rows.step))
        return Rows(slice(0, self._width), self._rows_of(x), None)

    @property
    def _are_distributions(self) -> bool:
        return True

    def _logarithms(self, b: int, h: int, rows: slice) -> Logarithms:
        keys, values, _ = self._compute(b, h, rows)
        elsewhere = self._xp.full((len(values), 1), 0.0, self._xp.dtype)
        return Logarithms(keys, self._xp.log(values), elsewhere)

    def _blocks(self) -> Iterator[Block]:
        """All asked rows, some at a time; in one block where the columns are fewer."""
        m, n = len(self._rows), len(self._columns)
        if not 0 < n < m or n * self._width > self._block:
            yield from super()._blocks()
            return
        found = self._columns_of(self._one_hot(self._columns).swapaxes(0, 1))
        yield Block(0, 0, slice(0, m), slice(0, n), found[_sliced(self._rows)], None)

    def _one_hot(self, places: range) -> Any:
        """``(places, tokens)``: 1 at each place."""
        xp, (first, last) = self._xp, (min(places), max(places))
        x = xp.full((last - first + 1, self._width), 0.0, xp.dtype)
        at = xp.arange(0, last - first + 1)
        x[at, at + first] = 1.0
        return x[:: places.step]

    def _totals(self, values: Any) -> Any:
        """The sum of each row of a layer, with the residual."""
        return self._residual + (1 - self._residual) * self._xp.row_sum(values)

    def _rows_of(self, x: Any) -> Any:
        """``x @ rollout`` for ``(n, tokens)``: from the last layer to the first."""
        xp, share = self._xp, self._residual
        for layer in reversed(self._read):
            there = np.flatnonzero(to_numpy((x != 0).any(0)))
            y = xp.full(tuple(x.shape), 0.0, xp.dtype)
            if not there.size:
                return y
            low = int(there[0])
            for block in layer.part(slice(low, int(there[-1]) + 1))._blocks():
                rows = slice(block.rows.start + low, block.rows.stop + low)
                values = xp.array(x, block.values)
                total = self._totals(values).swapaxes(0, 1)
                of_rows = xp.where((total == 0) | (x[:, rows] == 0), 0.0, x[:, rows] / total)
                y[:, rows] += xp.where(total == 0, x[:, rows], share * of_rows if share else 0.0)
                y[:, block.keys] += (1 - share) * self._summed(of_rows, values)
            x = y
        return x

    def _summed(self, factors: Any, rows: Any) -> Any:
        """``factors @ rows``, where 0 times NaN is 0."""
        xp, pair = self._xp, (factors, rows)
        missing = [xp.isnan(x) for x in pair]
        if not any(x.any() for x in missing):
            return xp.matmul(factors[None, None], rows[None, None])[0, 0]
        found = self._summed(*(xp.where(here, 0.0, x) for here, x in zip(missing, pair)))
        of_factors, of_rows = (1.0 * here for here in missing)
        reached = self._summed(1.0 * (factors != 0), of_rows)
        reached = reached + self._summed(of_factors, 1.0 * (rows != 0))
        return xp.where(reached > 0, np.nan, found)

    def _columns_of(self, x: Any) -> Any:
        """``rollout @ x`` for ``(tokens, n)``: from the first layer to the last."""
        xp, share = self._xp, self._residual
        for layer in self._read:
            y = xp.full(tuple(x.shape), 0.0, xp.dtype)
            for block in layer._blocks():
                values = xp.array(x, block.values)
                total = self._totals(values)
                found = (1 - share) * self._summed(values, x[block.keys])
                found = found + (share * x[block.rows] if share else 0.0)
                found = xp.where(found == 0, 0.0, found / total)
                y[block.rows] = xp.where(total == 0, x[block.rows], found)
            x = y
        return x

    def __matmul__(self, x: Array[Any]) -> ArrayT:
        """``rollout @ x``: for ``(tokens,)`` or ``(tokens, p)``, in one pass."""
        factor = self._factor(x, -2, len(self._columns))
        if factor is None:
            return NotImplemented
        one = factor[:, None] if factor.ndim == 1 else factor
        whole = self._xp.full((self._width, one.shape[1]), 0.0, self._xp.dtype)
        whole[_sliced(self._columns)] = self._xp.array(whole, one)
        return self._product(lambda: self._columns_of(whole)[_sliced(self._rows)], factor, -1)

    def __rmatmul__(self, x: Array[Any]) -> ArrayT:
        """``x @ rollout``: for ``(tokens,)`` or ``(p, tokens)``, in one pass."""
        factor = self._factor(x, -1, len(self._rows))
        if factor is None:
            return NotImplemented
        one = factor[None] if factor.ndim == 1 else factor
        whole = self._xp.full((one.shape[0], self._width), 0.0, self._xp.dtype)
        whole[:, _sliced(self._rows)] = self._xp.array(whole, one)
        return self._product(lambda: self._rows_of(whole)[:, _sliced(self._columns)], factor, 0)

    def _product(self, compute: Callable[[], Any], factor: Any, axis: int) -> Any:
        """A product, without the axis of a vector."""
        self._require_now()
        with np.errstate(all="ignore"):
            found = self._xp.cast(compute(), self._dtype_name)
        if factor.ndim > 1:
            return found
        return found[:, 0] if axis else found[0]


def _sliced(places: range) -> slice:
    return slice(places.start, places.stop, places.step)
