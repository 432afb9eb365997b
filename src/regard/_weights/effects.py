"""Effects: what each weight, or cutting its token pair, does to the output and to a loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from regard._backends.formula import apply
from regard._backends.pair_terms import PairBackend, PairTerm, ReadOnce
from regard._base.arrays import Arrays, dtype_name, is_array, is_tensor
from regard._base.errors import ShapeError, UnsupportedError, a_type
from regard._base.settings import counted
from regard._base.types import ArrayT
from regard._call.checks import FLOATS
from regard._call.tensors import require_dense
from regard._weights.outputs import Outputs, unit_of
from regard._weights.pair_matrix import PairMatrix, Rows
from regard._weights.weight_rows import WeightReader, WeightRows
from regard._weights.written import Version, refuse_recorded, require_unwritten, version_of

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights

# The weight above which 1 − w is the sum of the others: at most one of a row's, though each of two
# equal ones may be rounded to a little more than 1/2.
FIRST = 0.5625
CLEARLY_BELOW_HALF = 2.01  # a row with this total has no such weight: none exceeds 1 / total
CLOSE = {"float32": 1e-4, "float64": 1e-10}  # errors of an output, in the size of the values

EffectKind: TypeAlias = Literal["knockout", "contribution", "relevance", "gradient", "change"]


class Effects(PairMatrix[ArrayT]):
    """What every token pair does to a loss, ``(..., Hq, Lq, Lk)``, computed on request.

    ``weights.effects(value, gradient)`` makes it. With the weights ``w``, the values ``v``, the
    output ``o = w @ v`` and ``g = ∂loss/∂o`` of this attention, pair (i, j) has

    - ``"knockout"``: ``w/(1−w) · (g_i·o_i − g_i·v_j)``, how much the loss rises when the pair is
      cut and its row renormalises: exact for the output, first order for what follows it;
    - ``"contribution"``: ``w · g_i·v_j``; ``"relevance"``: the positive part of it;
    - ``"gradient"``: ``g_i·v_j``, the derivative of the loss by the weight;
    - ``"change"``: ``w/(1−w) · ‖o_i − v_j‖``, how far cutting the pair moves the output; without
      a gradient.

    Masked pairs have 0. A pair that is alone in its row leaves 0 as the output when it is cut; so
    does one beside which all other weights of the row are 0 in the dtype. The weight of a sink is
    one of the others: it renormalises with them. Weights are those before dropout, so the gradient
    should be one without dropout.

    Above w = 9/16 both 1−w and g·o − g·v_j are sums over the other weights, so effects are exact
    near w = 1.

    The first question to knockouts of whole rows needs each row's sum ``g_i·o_i`` first, and keeps
    a row of pairs until it is known; the object keeps the sums for the next questions, which take
    a tenth less time. With the ``output``, as attention gave it, so does the first, in long texts.

    Source: Geva et al. 2023 (knockout); Chefer et al. 2021 (relevance); docs/effects.md.
    """

    _name = "effects"

    def __init__(
        self,
        weights: AttentionWeights[ArrayT],
        value: Any,
        gradient: Any = None,
        kind: EffectKind = "knockout",
        output: Any = None,
    ) -> None:
        if kind not in list(KINDS):
            raise ValueError(f"effects: kind is {kind!r}; {', '.join(map(repr, KINDS))} are known.")
        call = weights._call
        if not call.whole_rows:
            raise UnsupportedError(
                f"effects: {weights.shape} are weights of some keys, and an effect follows from a "
                "whole row. Take the part of the effects: weights.effects(...).part(rows, columns)."
            )
        if gradient is None and kind != "change":
            raise TypeError(
                f"effects: {kind!r} needs a gradient, ∂loss/∂output of this attention; 'change' "
                "alone needs none."
            )
        self._start(call, numbers=weights._numbers)
        self._kind, self._reader = kind, WeightReader(weights)
        self._value = _folded(_checked("value", value, weights), weights)
        self._gradient: Any = None
        if kind != "change":
            self._gradient = _folded(_checked("gradient", gradient, weights), weights)
            if (n := self._value.shape[-1]) != (m := self._gradient.shape[-1]):
                raise ShapeError(
                    f"effects: value vectors have {counted(n, 'number')} and gradient vectors {m};"
                    " the gradient is that of the output, which has as many as the values."
                )
        self._output = None if output is None else self._checked_output(output, weights)
        self._start_outputs()

    def _checked_output(self, output: Any, weights: AttentionWeights[ArrayT]) -> Any:
        """``(B, Hq, Lq, Dv)``, for knockouts."""
        found = _folded(_checked("output", output, weights), weights)
        if (n := self._value.shape[-1]) != (m := found.shape[-1]):
            raise ShapeError(
                f"effects: value vectors have {counted(n, 'number')} and output vectors {m}; the"
                " output is that of this attention, which has as many as the values."
            )
        if (name := dtype_name(found)) != self._dtype_name:
            raise TypeError(
                f"effects: output is {name}, rounded more than effects may be; {self._dtype_name}"
                " is needed. Leave it out, and the first question computes what is needed of it."
            )
        return found if self._kind == "knockout" else None

    def _start_outputs(self) -> None:
        """Versions of what is held, and what questions share."""
        self._versions = self._now()
        others = [x for name, x in self._given() if name != "value" and self._kind == "knockout"]
        counts = len(self._versions) == len(self._given())
        queries = self._reader.weights._call.sizes[3]
        self._outputs = Outputs(self._xp, self._value, others, queries, counts)

    def _given(self) -> list[tuple[str, Any]]:
        given = ("value", self._value), ("gradient", self._gradient), ("output", self._output)
        return [(name, x) for name, x in given if x is not None]

    def _now(self) -> tuple[Version, ...]:
        """How often value, gradient and output were written to."""
        found = (version_of(name, x) for name, x in self._given())
        return tuple(version for version in found if version is not None)

    def __getstate__(self) -> dict[str, Any]:
        require_unwritten(self._versions)
        return {name: x for name, x in vars(self).items() if name not in ("_versions", "_outputs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_outputs()

    @property
    def kind(self) -> EffectKind:
        """Which effect it is of."""
        return self._kind

    @property
    def _told(self) -> str:
        return f" of kind {self._kind!r}"

    def _require_now(self) -> None:
        weights = self._reader.weights
        weights._require_now()
        require_unwritten(self._versions)
        refuse_recorded(weights._call, False)

    def _prepare(self, b: Sequence[int], h: Sequence[int], rows: range) -> None:
        self._reader.prepare(b, h, rows)
        self._outputs.prepare()

    @property
    def _backend(self) -> PairBackend | None:
        found = self._reader.backend
        if found is None or self._kind not in found.pair_kinds:
            return None
        # Differences of infinities are NaN by the formula, in whatever order others subtract.
        subtracts = self._kind in ("knockout", "change")
        return None if subtracts and self._is_infinite() else found

    def _is_infinite(self) -> bool:
        """Whether a value or gradient is."""
        given = (x for x in (self._value, self._gradient) if x is not None)
        with np.errstate(all="ignore"):  # a sum may overflow; a finite one is of finite numbers
            return any(not math.isfinite(x.sum()) and bool(self._xp.isinf(x).any()) for x in given)

    def _terms_of(self, b: int, h: int, rows: slice, read: ReadOnce) -> list[PairTerm]:
        of_value = b if len(self._value) > 1 else 0, self._value_head(h)
        of_sink = self._reader.of_sink(b, h, rows)
        term = self._reader.term(b, h, rows, read)._replace(kind=self._kind, of_sink=of_sink)
        if self._kind != "change":
            value, gradient = self._value[of_value], self._gradient[b, h, rows]
            term = term._replace(value=self._xp.wide(value), gradient=self._xp.wide(gradient))
            if self._kind == "knockout":
                first = functools.partial(self._sums, b, h, term)
                term = term._replace(rest=self._outputs.sums(b, h, rows, first))
            return [term]
        value, squares, unit = self._outputs.values(*of_value)
        rest = self._outputs.rest(b, h, rows, value.shape[-1])
        return [term._replace(coefficient=unit, value=value, squares=squares, rest=rest)]

    def _sums(self, b: int, h: int, term: PairTerm) -> Any:
        """What the output says of the sums of ``Rest``, of all rows: NaN where it says too little.

        Raises:
            ValueError: the output is another.
        """
        xp = self._xp
        Lq = len(term.total)
        sums = xp.full((Lq, 3), np.nan, "float64")
        if self._output is None or not Lq:
            return sums
        output = self._output[b, h]
        self._require_own(b, h, Lq // 2, output, term.value)
        of_rows = xp.cast((output * term.gradient).sum(-1), "float64")
        may_be_first = xp.array(sums, 1.0 * (term.total < CLEARLY_BELOW_HALF))
        sums[:, 0] = xp.where(may_be_first > 0, np.nan, of_rows)
        sums[:, 1], sums[:, 2] = 0.0, 1.0
        return sums

    def _require_own(self, b: int, h: int, row: int, output: Any, value: Any) -> None:
        """Raises where the output of a row is not that of the weights and values."""
        xp, found = self._xp, self._reader.read(b, h, slice(row, row + 1))
        if not math.prod(value.shape):
            return
        own = xp.matmul(found.weights[None, None], value[None, None, found.keys])[0, 0, 0]
        size, apart = (float(abs(x).max()) for x in (value, own - output[row]))
        if apart > CLOSE[self._dtype_name] * size:
            weights = self._reader.weights
            where = f"query {row} of head {weights.head_numbers[h]}"
            where += f" of batch element {b}" if weights._call.sizes[0] > 1 else ""
            raise ValueError(
                f"effects: the output is not that of these weights and values: in {where} it is"
                f" off by {apart:.3g}, where values are up to {size:.3g}. Pass what attention gave"
                " for this query, key and value, without dropout, or leave it out."
            )

    def _value_head(self, h: int) -> int:
        """The head of the values that a query head reads."""
        _, Hq, Hkv, *_ = self._reader.weights._call.sizes
        return h // (Hq // Hkv)

    def _compute(self, b: int, h: int, rows: slice) -> Rows:
        found = self._reader.read(b, h, rows)
        if found.keys.start >= found.keys.stop:
            return Rows(found.keys, found.weights, found.visible)
        v = self._value[b if len(self._value) > 1 else 0, self._value_head(h), found.keys]
        g = None if self._gradient is None else self._gradient[b, h, rows]
        tile = _Tile(self._xp, found, v, g)
        return Rows(found.keys, tile.hidden(KINDS[self._kind](tile)), found.visible)


class _Tile:
    """Whole rows of the weights, ``(rows, keys)``, with the values of their keys.

    Args:
        found: the weights.
        v: ``(keys, Dv)``.
        g: ``(rows, Dv)``, or None.
    """

    def __init__(self, xp: Arrays, found: WeightRows, v: Any, g: Any) -> None:
        self.xp, self.w, self._visible, self._of_sink = xp, *found[1:]
        self._v, self._g = v, g

    def hidden(self, x: Any) -> Any:
        """x, and 0 where masked."""
        return x if self._visible is None else self.xp.hide(x, self._visible, 0.0)

    @cached_property
    def gv(self) -> Any:
        """``g_i·v_j``; 0 where masked."""
        g, v = self.xp.wide(self._g), self.xp.wide(self._v)
        return self.hidden(self.xp.matmul(g[None, None], v.swapaxes(0, 1)[None, None])[0, 0])

    @cached_property
    def is_first(self) -> Any:
        """Bool: weights above 9/16, one in a row at most."""
        return self.w > FIRST

    @cached_property
    def rest(self) -> Any:
        """The weights up to 9/16."""
        return self.xp.where(self.is_first, 0.0, self.w)

    @cached_property
    def beside_first(self) -> Any:
        """``(rows, 1)``: the sum of the weights up to 9/16, the sink's included."""
        return self.xp.row_sum(self.rest) + self.xp.wide(self._of_sink)

    @cached_property
    def beside(self) -> Any:
        """1 − w: the sum of the others above 9/16, where a difference would not be exact."""
        return self.xp.where(self.is_first, self.beside_first, 1 - self.w)

    def without(self, of_rest: Any, of_first: Any, own: Any) -> Any:
        """What a row's mean is once a pair is cut; 0 where no weight is left.

        Args:
            of_rest, of_first: ``(rows, 1)``, the weighted sum of the weights up to 9/16, and the
                term of the one above it.
            own: each pair's term.
        """
        xp = self.xp
        others = xp.where(self.is_first, of_rest, of_rest + of_first - own)
        return xp.where(self.beside == 0, 0.0, others / self.beside)


def _knockout(tile: _Tile) -> Any:
    """``w · (g·o′ − g·v)`` with the output o′ that is left, which is w/(1−w) · (g·o − g·v)."""
    terms = tile.w * tile.gv
    of_rest = tile.xp.row_sum(tile.rest * tile.gv)
    of_first = tile.xp.row_sum(tile.xp.where(tile.is_first, terms, 0.0))
    return tile.w * (tile.without(of_rest, of_first, terms) - tile.gv)


def _contribution(tile: _Tile) -> Any:
    return tile.w * tile.gv


def _relevance(tile: _Tile) -> Any:
    found = tile.w * tile.gv
    return tile.xp.where(found < 0, 0.0, found)


def _gradient(tile: _Tile) -> Any:
    return tile.gv


def _change(tile: _Tile) -> Any:
    """``w/(1−w) · ‖o − v‖``; for a weight above 9/16 as ``w · ‖o′ − v‖``.

    In float64, since the squares of o and v cancel where these are close. An infinite o is
    infinitely far from a finite v; how far from an infinite one is undefined.
    """
    xp, visible = tile.xp, tile._visible
    v, w, rest = (xp.cast(x, "float64") for x in (tile._v, tile.w, tile.rest))
    if (unit := unit_of(xp, v)) != 1:
        v = v / unit
    raised = None if visible is None else visible[None, None]
    of_rest = apply(xp, rest[None, None], raised, v[None, None])[0, 0]
    has_first = tile.is_first.any(-1)[:, None]
    first = xp.where(has_first, v[(tile.is_first * xp.arange(0, len(v))).sum(-1)], 0.0)
    o = of_rest + xp.where(tile.is_first, w, 0.0).sum(-1)[:, None] * first
    finite = xp.isfinite(v)
    seen = xp.where(finite, v, np.nan)
    products = xp.matmul(o[None, None], seen.swapaxes(0, 1)[None, None])[0, 0]
    squares = (o * o).sum(-1)[:, None] - 2 * products + (seen * seen).sum(-1)
    if not finite.all():
        whole = apply(xp, w[None, None], raised, v[None, None])[0, 0]
        infinite = (xp.isinf(whole).any(-1) & ~xp.isnan(whole).any(-1))[:, None]
        squares = xp.where(infinite & finite.all(-1), np.inf, squares)
    far = xp.where(squares < 0, 0.0, squares) ** 0.5 / (1 - xp.where(tile.is_first, 0.0, w))
    beside = xp.cast(tile.beside_first, "float64")
    left = xp.where(beside == 0, 0.0, of_rest / xp.where(beside == 0, 1.0, beside))
    of_first = ((left - first) ** 2).sum(-1)[:, None] ** 0.5
    return xp.wide(unit * (w * xp.where(tile.is_first, of_first, far)))


KINDS: dict[EffectKind, Callable[[_Tile], Any]] = {
    "knockout": _knockout,
    "contribution": _contribution,
    "relevance": _relevance,
    "gradient": _gradient,
    "change": _change,
}
assert set(get_args(EffectKind)) == set(KINDS)


def _checked(name: str, x: Any, weights: AttentionWeights[Any]) -> Any:
    """The value ``(..., Hkv, Lk, Dv)`` or the gradient ``(..., Hq, Lq, Dv)`` of some weights."""
    call = weights._call
    if not (is_tensor(x) or is_array(x)) or is_tensor(x) != call.is_torch:
        kind = "a torch tensor" if call.is_torch else "a NumPy array"
        raise TypeError(
            f"effects: {name} is {a_type(x, whole=True)}; {kind} is needed, as the query is."
        )
    if call.is_torch:
        require_dense(name, x, "effects")
    if call.is_torch and x.device != call.query.device:
        raise TypeError(
            f"effects: {name} is on {x.device} and the query on {call.query.device}; move it with "
            f"{name}.to(query.device)."
        )
    if dtype_name(x) not in FLOATS:
        raise TypeError(f"effects: {name} is {dtype_name(x)}; floating numbers are needed.")
    _, Hq, Hkv, Lq, Lk = call.sizes
    heads, length = (Hkv, Lk) if name == "value" else (Hq, Lq)
    axes = (*((heads,) if call.heads else ()), length)
    lead, own = call.leading, tuple(x.shape[: max(0, x.ndim - len(axes) - 1)])
    fits = x.ndim == len(lead) + len(axes) + 1 and tuple(x.shape[len(lead) : -1]) == axes
    may_be_shared = name == "value" and len(own) == len(lead)
    fits &= own == lead or (may_be_shared and all(n in (m, 1) for n, m in zip(own, lead)))
    if not fits:
        letters = f"{'Hkv, ' if name == 'value' else 'Hq, '}" if call.heads else ""
        letters += "Lk" if name == "value" else "Lq"
        raise ShapeError(
            f"effects: {name} has shape {tuple(x.shape)}; (..., {letters}, Dv) is needed: "
            f"{(*lead, *axes)} and Dv."
        )
    return x.detach() if is_tensor(x) else x


def _folded(x: Any, weights: AttentionWeights[Any]) -> Any:
    """x with axes ``(B or 1, H, L, Dv)``."""
    call = weights._call
    x = x if call.heads else x[..., None, :, :]
    lead, tail = tuple(x.shape[:-3]), tuple(x.shape[-3:])
    if all(n == 1 for n in lead):
        return x.reshape((1, *tail))
    if lead != call.leading:
        whole = (*call.leading, *tail)
        x = x.expand(whole) if is_tensor(x) else np.broadcast_to(x, whole)
    return x.reshape((math.prod(call.leading), *tail))
