"""One attention layer of a recording: query, key, value, and the options it was called with."""

from __future__ import annotations

import copy
import functools
import numbers
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Unpack

import numpy as np

from regard._base.arrays import dtype_name, is_tensor
from regard._base.deferred import fetched
from regard._base.errors import ShapeError, UnsupportedError, a_type
from regard._base.settings import as_float, counted
from regard._base.types import Array, ArrayT
from regard._call import edits
from regard._call.checks import FLOATS, LARGEST_POSITION, read_call, read_flag
from regard._call.contents import check_contents
from regard._call.options import (
    REAL_NUMBERS,
    RECORDED_ARRAYS,
    RECORDED_NUMBERS,
    RECORDED_PAIRS,
    WeightsOptions,
)
from regard._weights.kept_statistics import checked
from regard._weights.parts import listed, place_of
from regard._weights.statistics import RowStatistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._weights.attention_weights import AttentionWeights
    from regard._weights.origin import Origin


class Options(dict[str, Any]):
    """The options of a layer, which are replaced together: weights may be made of them already."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError(
            "Layer: options are not changed one by one; assign all of them, which are checked then:"
            ' layer.options = {**layer.options, "scale": 1.0}.'
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Options, (dict(self),)


class Layer(Generic[ArrayT]):
    """Query, key and value of one attention layer, and the options it was called with.

    Arrays are kept, not copied: do not write into them afterwards.

    Args:
        query: ``(Hq, Lq, D)``, float, as it enters the scores: after rotation or normalisation.
            A NumPy array or torch tensor.
        key: ``(Hkv, Lk, D)``, same type and dtype; ``Hkv`` divides ``Hq``.
        value: ``(Hkv, Lk, Dv)`` or None where only the weights matter.
        gradient: ``(Hq, Lq, Dv)``, the derivative of a number of the pass by the output of this
            attention, for ``Recording.effects``; with a value only. Float, of the same type.
        name: of the module that computed it, as in ``"model.layers.5.self_attn"``.
        number: of the layer in its model; by default its index among the layers of a recording.
        head_numbers: of the ``Hq`` query heads in the model, by default 0 to Hq − 1. Where they
            are some of a model's heads, ``key`` has those that they use, with
            ``Hkv`` dividing ``Hq`` here too.
        weights_only: True where query and key are not known: ``from_weights`` makes such layers.
        statistics: ``regard.RowStatistics`` of ``(Hq, Lq)`` each, as ``regard.attention(...,
            return_statistics=True)`` gives them; float32, or float64 of a float64 query. Weights
            are made of them without a pass over all keys. By default they are computed on request.
        **options: of ``regard.AttentionWeights``, without a batch: ``query_start`` and
            ``key_lengths`` are one int, ``segments`` ids ``(L,)`` or a pair for queries and keys,
            ``intervals`` a pair of ``(Lq,)``, ``bias`` and ``mask`` broadcastable to
            ``(Hq, Lq, Lk)``; heads in ``edits`` are counted among the ``Hq``.

    Raises:
        ShapeError: axes, heads, head sizes or lengths disagree.
        TypeError: not a float array, or an unknown option or one of a wrong type.
        ValueError: an option or a number out of its range, or two heads of one number.
    """

    __slots__ = (
        "_gradient", "_key", "_options", "_query", "_value", "head_numbers", "name", "number",
        "statistics", "weights_only",
    )  # fmt: skip

    name: str
    number: int | None
    head_numbers: tuple[int, ...]
    weights_only: bool
    statistics: RowStatistics[Any] | None

    def __init__(
        self,
        query: Array[ArrayT],
        key: Array[ArrayT],
        value: Array[ArrayT] | None = None,
        *,
        gradient: Array[ArrayT] | None = None,
        name: str = "",
        number: int | None = None,
        head_numbers: Sequence[int] | None = None,
        weights_only: bool = False,
        statistics: RowStatistics[Any] | None = None,
        **options: Unpack[WeightsOptions],
    ) -> None:
        given: Any = query, key, value
        self._query, self._key, self._value = given
        self.options = {**options}
        if query.ndim != 3 or len(query) == 0:
            raise ShapeError(
                f"Layer: query {shape_of(query)} is not read as (H, L, D) with at least one head;"
                " record one text at a time, with its heads, as in query[0]."
            )
        self.name, self.number = name, number
        heads: Any = range(len(query)) if head_numbers is None else head_numbers
        self.head_numbers = heads
        self._check_names()
        self.weights_only = read_flag("weights_only", weights_only, "Layer")
        if weights_only and "bias" not in self.options:
            raise ValueError("Layer: weights_only without a bias; Layer.from_weights makes it.")
        self._gradient = None
        self._gradient = self._checked_gradient(gradient)
        self.statistics = None if statistics is None else checked(statistics, query, "Layer")

    @classmethod
    def _of_checked(
        cls, query: Any, key: Any, value: Any, options: dict[str, Any], *, name: str,
        number: int | None, head_numbers: tuple[int, ...], weights_only: bool = False,
    ) -> Layer[Any]:  # fmt: skip
        """A layer of what is known to fit together: of a call that was checked."""
        made: Layer[Any] = cls.__new__(cls)
        made._query, made._key, made._value = query, key, value
        made._gradient = made.statistics = None
        made._options, made.name, made.number = Options(options), name, number
        made.head_numbers, made.weights_only = head_numbers, weights_only
        return made

    @classmethod
    def from_weights(
        cls,
        weights: Array[object],
        *,
        name: str = "",
        number: int | None = None,
        head_numbers: Sequence[int] | None = None,
        causal: bool | None = None,
        sinks: bool = False,
    ) -> Layer[NDArray[np.floating[Any]]]:
        """A layer of weights that exist, as ``Recording.from_weights`` makes of each.

        Args:
            weights: ``(H, Lq, Lk)`` or ``(1, H, Lq, Lk)``, float: a NumPy array or torch tensor.
            name, number, head_numbers: as of any layer.
            causal: whether keys after a query's position are masked; by default, whether all their
                weights are 0.
            sinks: whether rows may sum to less than 1, the rest being that of an attention sink.

        Returns:
            A layer whose ``bias`` is the logarithm of the weights, and whose query and key are 0.

        Raises:
            MaterializeError: above the limit that ``regard.limits`` sets.
            ShapeError: other axes, more than one text, or no head.
            TypeError: no float array, or ``causal`` or ``sinks`` that are no bools.
            ValueError: a weight that is not finite or below 0, or a row that does not sum to 1.
        """
        from regard.recording import _dense

        sinks = read_flag("sinks", sinks, "from_weights")
        if causal is not None:
            causal = read_flag("causal", causal, "from_weights")
        found = _dense.of_one_text("weights", weights)
        _dense.check_size([found])
        made: Any = cls(
            **_dense.arguments("weights", found, causal, sinks),
            name=name, number=number, head_numbers=head_numbers, weights_only=True,
        )  # fmt: skip
        return made

    @property
    def options(self) -> dict[str, Any]:
        """The options that it was called with, but those left out.

        Others may be assigned, all together; statistics, of the options before, go.
        """
        return self._options

    @options.setter
    def options(self, options: dict[str, Any]) -> None:
        options = _checked_options({**options})
        given: Any = self._held
        call = read_call(*given, **options)
        check_contents(call)
        if (read := call.edit_ranges) is not None:  # so that a head's are known, and a file's
            options["edits"] = edits.edits_of(read, call.edit_factors)
            if not options["edits"]:
                del options["edits"]
        self._options, self.statistics = Options(options), None

    def _check_names(self) -> None:
        """Checks name and numbers, which may be assigned at any time, and makes tuples of lists."""
        if not isinstance(self.name, str):
            raise TypeError(f"Layer: name is {type(self.name).__name__}; it must be a str.")
        self.number = None if self.number is None else _natural("number", self.number)
        self.head_numbers = _checked_heads(self.head_numbers, len(self._query))

    @property
    def heads(self) -> int:
        """Number of query heads, ``Hq``."""
        return len(self._query)

    @property
    def key_heads(self) -> int:
        """Number of key heads, ``Hkv``; query head h uses key head ``h // (Hq // Hkv)``."""
        return len(self._key)

    @property
    def query_start(self) -> int:
        """The position of the first query among the keys."""
        *_, Lq, _ = self._query.shape
        valid = self.options.get("key_lengths", self._key.shape[1])
        return int(self.options.get("query_start", valid - Lq))

    @property
    def nbytes(self) -> int:
        """Bytes of query, key, value and gradient; of the weights, where these alone are known."""
        gradient: Any = self._gradient
        held = (self.options.get("bias"),) if self.weights_only else (*self._held, gradient)
        return sum(int(array.nbytes) for array in held if array is not None)

    @property
    def _held(self) -> tuple[Any, Any, Any]:
        return self._query, self._key, self._value

    @property
    def query(self) -> ArrayT:
        """``(Hq, Lq, D)``."""
        found: ArrayT = fetched(self._query)
        return found

    @property
    def key(self) -> ArrayT:
        """``(Hkv, Lk, D)``."""
        found: ArrayT = fetched(self._key)
        return found

    @property
    def value(self) -> ArrayT | None:
        """``(Hkv, Lk, Dv)``, or None."""
        found: ArrayT | None = fetched(self._value)
        return found

    @property
    def gradient(self) -> ArrayT | None:
        """``(Hq, Lq, Dv)``, or None."""
        found: ArrayT | None = fetched(self._gradient)
        return found

    def head(self, h: int) -> Layer[ArrayT]:
        """One query head alone, with the key head that it uses: a layer of one head.

        It keeps the numbers of the layer and of the head.

        Args:
            h: which, of ``head_numbers``; negative counts from the last.

        Raises:
            IndexError: no such head.
        """
        h = place_of("recording: head", h, self.head_numbers)
        shared = h // (self.heads // self.key_heads)
        options = dict(self.options)
        for name in ("bias", "mask"):
            if name in options and options[name].ndim == 3:
                options[name] = options[name][h if len(options[name]) > 1 else 0]
        if "sinks" in options:
            options["sinks"] = options["sinks"][h : h + 1]
        if "edits" in options:
            options["edits"] = edits.of_head(options["edits"], h)
        query, key, value = self._held
        gradient: Any = self._gradient
        own, used = slice(h, h + 1), slice(shared, shared + 1)
        return Layer(
            query[own], key[used], None if value is None else value[used],
            gradient=None if gradient is None else gradient[own],
            name=self.name, number=self.number, head_numbers=self.head_numbers[own],
            weights_only=self.weights_only,
            statistics=self.statistics and RowStatistics(*(x[own] for x in self.statistics)),
            **options,
        )  # fmt: skip

    def require_vectors(self, what: str) -> None:
        """Refuses to show what query and key are needed for, where weights alone are known.

        Raises:
            UnsupportedError: with the way out.
        """
        if self.weights_only:
            raise UnsupportedError(
                f"{what}: query and key are not known, for this recording was made of weights"
                " (from_weights); record the model's pass itself, with regard.record."
            )

    def _weights(self, origin: Origin | None = None) -> AttentionWeights[ArrayT]:
        """Its weights, computed on request."""
        from regard._weights.attention_weights import AttentionWeights

        query, key, _ = self._held
        weights: AttentionWeights[ArrayT] = AttentionWeights(query, key, **self.options)
        return weights._recorded(self.head_numbers, self.weights_only, origin, self.statistics)

    def _with_statistics(self, weights: AttentionWeights[Any] | None = None) -> Layer[Any]:
        """The same layer with statistics: those of its weights, where it has none."""
        if self.statistics is not None:
            return self
        found: Layer[Any] = copy.copy(self)
        found.statistics = (weights or self._weights())._public_statistics()
        return found

    def _with_gradient(self, gradient: Any) -> Layer[Any]:
        """The same layer with a gradient."""
        found: Layer[Any] = copy.copy(self)
        found._gradient = self._checked_gradient(gradient)
        return found

    def _checked_gradient(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        if self._value is None:
            raise ValueError("Layer: a gradient without a value; effects need both. Give value=.")
        value: Any = self._value
        if is_tensor(gradient) != is_tensor(value) or not hasattr(gradient, "dtype"):
            raise TypeError(
                f"Layer: gradient is {a_type(gradient)}, and value {a_type(value)}; both must be of"
                " one library."
            )
        if dtype_name(gradient) not in FLOATS:
            raise TypeError(f"Layer: gradient is {dtype_name(gradient)}; floats are needed.")
        needed = (*shape_of(self._query)[:2], shape_of(value)[2])
        if shape_of(gradient) != needed:
            raise ShapeError(
                f"Layer: gradient has shape {shape_of(gradient)}; (Hq, Lq, Dv) is needed, as the "
                f"output has: {needed}."
            )
        return gradient

    def _outline(self) -> Layer[Any]:
        """Its shapes, numbers and options without arrays: what the header of a file is made of."""
        options = {name: x for name, x in self.options.items() if name in RECORDED_NUMBERS}
        return Layer._of_checked(
            _outline(shape_of(self._query)), _outline(shape_of(self._key)), None, options,
            name=self.name, number=self.number, head_numbers=self.head_numbers,
            weights_only=self.weights_only,
        )  # fmt: skip

    def _named(self, name: str, number: int | None) -> Layer[Any]:
        """The same of another name and number."""
        return Layer._of_checked(
            self._query, self._key, self._value, self.options, name=name, number=number,
            head_numbers=self.head_numbers, weights_only=self.weights_only,
        )  # fmt: skip

    def __repr__(self) -> str:
        parts = [f"query {shape_of(self._query)}", f"key {shape_of(self._key)}"]
        if self.weights_only:
            parts = [f"weights {(self.heads, self._query.shape[1], self._key.shape[1])}"]
        if self._value is not None:
            parts.append(f"value {shape_of(self._value)}")
        if self._gradient is not None:
            parts.append("gradient")
        if self.statistics is not None:
            parts.append("statistics")
        told = {"name": self.name, "number": self.number, "heads": self.head_numbers}
        is_usual = {"name": "", "number": None, "heads": tuple(range(self.heads))}
        parts += [f"{name}={x!r}" for name, x in told.items() if x != is_usual[name]]
        for name, value in self.options.items():
            if not self.weights_only or name not in ("bias", "scale"):
                parts.append(name if name in RECORDED_ARRAYS else f"{name}={value!r}")
        return f"Layer({', '.join(parts)})"


def shape_of(array: Any) -> tuple[int, ...]:
    return tuple(map(int, array.shape))


@functools.lru_cache(64)
def _outline(shape: tuple[int, ...]) -> np.ndarray:
    """An array of that shape, without memory of its own."""
    return np.broadcast_to(np.float32(0), shape)


def _natural(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"Layer: {name} is {value!r}; an int is needed.")
    if not 0 <= value <= LARGEST_POSITION:
        raise ValueError(f"Layer: {name} is {value}; a number from 0 to 2**53 is needed.")
    return int(value)


def _checked_heads(head_numbers: Any, count: int) -> tuple[int, ...]:
    if isinstance(head_numbers, str) or not hasattr(head_numbers, "__iter__"):
        raise TypeError(
            f"Layer: head_numbers is {head_numbers!r}; one int for each query head is needed."
        )
    found = tuple(_natural("head_numbers", number) for number in head_numbers)
    if len(found) != count:
        raise ShapeError(
            f"Layer: {len(found)} head_numbers for {counted(count, 'query head')}; one each is"
            " needed."
        )
    if len(set(found)) < count:
        raise ValueError(f"Layer: head_numbers are {listed(found)}; each head has its own number.")
    return found


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are given, as plain Python values and arrays."""
    checked = {name: value for name, value in options.items() if value is not None}
    if isinstance(checked.get("edits"), (tuple, list)) and not checked["edits"]:
        del checked["edits"]
    for name in checked:
        if name not in RECORDED_NUMBERS + RECORDED_ARRAYS:
            raise TypeError(
                f"Layer: there is no option {name!r} to record;"
                f" there are {', '.join(RECORDED_NUMBERS + RECORDED_ARRAYS)}."
            )
    for name in ("query_start", "key_lengths"):
        if name in checked:
            checked[name] = _position(name, checked[name])
    if isinstance(checked.get("window"), (tuple, list)):
        sides = [None if side is None else _position("window", side) for side in checked["window"]]
        checked["window"] = tuple(sides)
    for name in RECORDED_PAIRS:
        if name in checked:
            pair = checked[name]
            checked[name] = (
                tuple(_integers(name, x) for x in pair)
                if isinstance(pair, (tuple, list)) and len(pair) == 2
                else _integers(name, pair)
            )
    for name in REAL_NUMBERS:
        if isinstance(checked.get(name), numbers.Real) and not isinstance(checked[name], bool):
            checked[name] = as_float(checked[name])
    if isinstance(checked.get("causal"), np.bool_):
        checked["causal"] = bool(checked["causal"])
    return checked


def _integers(name: str, values: Any) -> Any:
    ids = values if is_tensor(values) else np.asarray(values)
    if isinstance(ids, np.ndarray):
        ids = ids.astype(ids.dtype.newbyteorder("="), copy=False)
    if ids.ndim != 1:
        raise ShapeError(
            f"Layer: {name} have shape {shape_of(ids)}; (L,) is needed, one number each."
        )
    return ids


def _position(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"Layer: {name} is {value!r}; an int is needed, for there is no batch.")
    if abs(number) > LARGEST_POSITION:
        raise ValueError(f"Layer: {name} lies beyond 2**53; no text is that long.")
    return number
