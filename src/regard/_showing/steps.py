"""One small attention written out: every intermediate kept, named, shaped and explained."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Unpack, overload

import numpy as np

from regard._backends import choose, formula
from regard._base import tables
from regard._base.arrays import Arrays, accumulating_name, arrays_of, dtype_name, is_tensor
from regard._base.errors import ShapeError, a_type
from regard._base.settings import counted, require_materializable
from regard._base.types import Array, ArrayT, InputT, OutputT
from regard._call.call import Call
from regard._call.checks import read_call
from regard._call.contents import check_contents
from regard._call.hints import unknown_option
from regard._call.options import OPTIONS, Options
from regard._call.visible import Visibility, cuts_of
from regard._showing.explain import added_names, arithmetic, numbers, scaling
from regard._weights.attention_weights import AttentionWeights
from regard._weights.written import (
    Version,
    all_written,
    first_written,
    retold,
    told,
    versions,
    versions_of,
)

if TYPE_CHECKING:
    from regard._showing.gradients import StepsGradients

__all__ = ["Steps", "steps"]

NAMES = tuple(option.name for option in OPTIONS)
MATRICES = ("scores", "scaled", "capped", "masked", "weights", "dropped")
WRITTEN = "written to since: later steps have its old numbers"


@dataclass(frozen=True, eq=False, repr=False)
class Steps(Generic[ArrayT, OutputT]):
    """Attention step by step, for reading: ``print(steps)``, or the last line of a notebook cell.

    Made by ``regard.steps`` from query, key and value, or by ``from_inputs`` from the
    vectors they are projected from. Arrays have the type and device of the query. Matrices are in
    float32, or float64 for a float64 query; weights and output are what ``regard.attention``
    gives. A step that the call does not have is None, but ``capped`` and ``masked`` are then the
    step before them. Inputs, query, key and value are the arrays that were given: a tensor that was
    written to since is printed with a note; NumPy does not count writes. ``copy.deepcopy`` makes
    steps with arrays of their own, outside of autograd's graph.

    Attributes:
        inputs: ``(..., Lq, d_in)``, from which the queries are projected, or None.
        context: ``(..., Lk, d_in)``, what keys and values are projected from where that is not
            ``inputs``, or None.
        query: ``(..., Hq, Lq, D)``.
        key: ``(..., Hkv, Lk, D)``.
        value: ``(..., Hkv, Lk, Dv)``, or None where only the weights are asked for.
        scores: ``(..., Hq, Lq, Lk)``, ``query @ key.T``.
        scaled: scores times the scale, by default ``1 / sqrt(D)``.
        capped: scaled, with all that is done to scores before the bias; printed with its formula.
        masked: with the bias and the edits, and −inf where a query may not attend.
        weights: softmax of each row of ``masked``; 0 in a fully masked row.
        dropped: the weights after dropout, or None without it.
        output: ``(..., Hq, Lq, Dv)``, weights times value, or None without a value.
        tokens: texts of the keys, or None.
        query_tokens: texts of the queries, or None.
    """

    inputs: ArrayT | None
    context: ArrayT | None
    query: ArrayT
    key: ArrayT
    value: OutputT
    scores: ArrayT
    scaled: ArrayT
    capped: ArrayT
    masked: ArrayT
    weights: ArrayT
    dropped: ArrayT | None
    output: OutputT
    tokens: tuple[str, ...] | None
    query_tokens: tuple[str, ...] | None
    _call: Call
    _formulas: dict[str, str] = field(default_factory=dict)
    _options: Options = field(default_factory=Options)  # as they were given
    _projections: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # matrix and bias
    _versions: tuple[Version, ...] = ()

    @classmethod
    def from_inputs(
        cls,
        x: Array[InputT],
        w_query: Array[InputT] | None = None,
        w_key: Array[InputT] | None = None,
        w_value: Array[InputT] | None = None,
        b_query: Array[InputT] | None = None,
        b_key: Array[InputT] | None = None,
        b_value: Array[InputT] | None = None,
        context: Array[InputT] | None = None,
        *,
        tokens: Sequence[str] | None = None,
        query_tokens: Sequence[str] | None = None,
        **options: Unpack[Options],
    ) -> Steps[InputT, InputT]:
        """Project inputs to query, key and value, then attend, step by step.

        Args:
            x: ``(..., Lq, d_in)``, or ``(d_in,)`` for one current token. Without ``context`` it is
                also what keys and values are projected from.
            w_query: ``(d_in, D)``, applied as ``x @ w``; ``(H, d_in, D)`` for several heads. A
                projection left out is the identity: all three left out is attention without
                parameters.
            w_key: ``(d_in, D)``, or ``(H, d_in, D)``.
            w_value: ``(d_in, Dv)``, or ``(H, d_in, Dv)``.
            b_query: ``(D,)``, added to the query; ``(H, D)`` for several heads.
            b_key: likewise, for the key.
            b_value: ``(Dv,)``, or ``(H, Dv)``.
            context: ``(..., Lk, d_in)`` for cross-attention: keys and values come from here.
            tokens: texts of the keys.
            query_tokens: texts of the queries, where they are not among ``tokens``.
            **options: as ``regard.attention``, except ``return_weights``, ``return_statistics``
                and ``backend``.

        Returns:
            Steps; for ``x`` of shape ``(d_in,)`` the query's arrays have no length axis.

        Raises:
            ShapeError: shapes, lengths or numbers of tokens do not fit together.
            TypeError: no floating arrays of one library and dtype, or an unknown option.
            MaterializeError: too large to be written out.

        Example:
            >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
            >>> Steps.from_inputs(x, scale=1.0).weights.round(4)
            array([[0.7311, 0.2689],
                   [0.2689, 0.7311]])

        Source: Vaswani et al. 2017, section 3.2; Phuong & Hutter 2022, algorithms 3 and 4.
        """
        projections: dict[str, tuple[Any, Any]] = {
            "query": (w_query, b_query), "key": (w_key, b_key), "value": (w_value, b_value)
        }  # fmt: skip
        _check_inputs(x, context, projections)
        rows: Any = x
        if is_one := x.ndim == 1:
            rows = rows[None]
        seen: Any = rows if context is None else context
        if any(w is not None and w.ndim == 3 for w, _ in projections.values()):
            rows, seen = rows[..., None, :, :], seen[..., None, :, :]
        name = "inputs" if context is None else "context"
        formulas = {"query": _projection("inputs", "query", *projections["query"])}
        formulas |= {part: _projection(name, part, *projections[part]) for part in ("key", "value")}
        found = _written_out(
            _project(rows, "inputs", "query", *projections["query"]),
            _project(seen, name, "key", *projections["key"]),
            _project(seen, name, "value", *projections["value"]),
            tokens, query_tokens, is_one, options,
        )  # fmt: skip
        named = {"x": x, "context": context}
        for part, (w, b) in projections.items():
            named |= {f"w_{part}": w, f"b_{part}": b}
        return replace(
            found, inputs=x, context=context, _formulas={**found._formulas, **formulas},
            _projections=projections, _versions=versions_of(named) + found._versions,
        )  # fmt: skip

    def explain(self, query: int, key: int, *, head: int | tuple[int, ...] = ()) -> str:
        """The arithmetic of one cell, from the two vectors to its share of the output.

        Args:
            query: row of the weights.
            key: column of the weights.
            head: indices of the leading axes, where there are any.

        Returns:
            A few lines of text, one per step.

        Raises:
            IndexError: no such query, key or head.
            TypeError: one of them is no int.
            RuntimeError: a tensor was written to since; NumPy does not count writes.
        """
        require_unwritten(self, "explain", "arithmetic")
        heads = tuple(head) if isinstance(head, (tuple, list)) else (head,)
        return "\n".join(arithmetic(self, query, key, heads))

    def backward(self, grad_output: Array[ArrayT] | None = None) -> StepsGradients[ArrayT]:
        """The backward pass step by step: the gradient of a loss by every step.

        Args:
            grad_output: ``(..., Hq, Lq, Dv)``, the gradient of the loss with respect to the output,
                of its shape, dtype, library and device. None is an error that says what to pass:
                which loss it is, only the caller knows.

        Returns:
            StepsGradients, to print, or to read by name, as ``gradients.d_scores``.

        Raises:
            TypeError: no gradient, or of another library, dtype or device than the output.
            ShapeError: of another shape.
            ValueError: these steps have no value, and so no output.
            RuntimeError: a tensor was written to since; NumPy does not count writes.
            MaterializeError: too large to be written out.

        Example:
            >>> steps = Steps.from_inputs(np.array([[1.0, 0.0], [0.0, 1.0]]), scale=1.0)
            >>> steps.backward(np.ones((2, 2))).d_value.round(4)
            array([[1., 1.],
                   [1., 1.]])

        Source: Vaswani et al. 2017, equation 1, by the chain rule.
        """
        from regard._showing.gradients import backward

        return backward(self, grad_output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps[ArrayT, OutputT]:
        state = self.__getstate__()
        for x in _computed(state):  # torch copies no tensor with its graph
            memo[id(x)] = copy.deepcopy(x.detach(), memo)
        made: Steps[ArrayT, OutputT] = object.__new__(type(self))
        made.__setstate__(copy.deepcopy(state, memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_versions": told(self._versions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _versions=retold(state["_versions"]))

    def __repr__(self) -> str:
        call = self._call
        _, Hq, _, Lq, Lk = call.sizes
        heads = f"{Hq} head{'s' if Hq > 1 else ''}, " if call.heads else ""
        rules = "".join(f", {rule}" for rule in _rules(call))
        return f"Steps({heads}{Lq} x {Lk}, head size {call.query.shape[-1]}{rules})"

    def __str__(self) -> str:
        return tables.text(self._tables())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        return tables.rich(self._tables(), options.max_width)

    def _repr_html_(self) -> str:
        return tables.html(self._tables())

    def _tables(self) -> Iterator[tables.Table]:
        """The steps that this call has, in order."""
        keys, queries = self.tokens, self.query_tokens
        labels: dict[str, Any] = {
            "key": (keys, None),
            "value": (keys, None),
            "context": (keys, None),
        }
        labels |= dict.fromkeys(MATRICES, (queries, keys if keys else ()))
        hidden = numbers(self.masked) == -math.inf
        written = {"inputs" if name == "x" else name for name in all_written(self._versions)}
        shown: set[int] = set()
        for name in ("inputs", "context", "query", "key", "value", *MATRICES, "output"):
            array = getattr(self, name)
            if array is None or (name in MATRICES and id(array) in shown):
                continue
            shown.add(id(array))
            rows, columns = labels.get(name, (queries, None))
            yield tables.Table(
                name,
                self._formulas.get(name, ""),
                numbers(array),
                rows,
                columns,
                hidden if name in ("weights", "dropped") else None,
                WRITTEN if name in written else "",
            )


@overload
def steps(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT],
    *,
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Steps[ArrayT, ArrayT]: ...
@overload
def steps(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Steps[ArrayT, ArrayT | None]: ...
def steps(
    query: Array[ArrayT],
    key: Array[ArrayT],
    value: Array[ArrayT] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Steps[ArrayT, Any]:
    """Attention step by step: every intermediate of ``regard.attention``, for small inputs.

    Args:
        query: ``(..., Hq, Lq, D)``, ``(Lq, D)``, or ``(D,)`` for one query.
        key: ``(..., Hkv, Lk, D)``.
        value: ``(..., Hkv, Lk, Dv)``, or None where only the weights are of interest.
        tokens: texts of the keys, to label rows and columns.
        query_tokens: texts of the queries, where they are not among ``tokens``.
        **options: as ``regard.attention``, except ``return_weights``, ``return_statistics`` and
            ``backend``.

    Returns:
        Steps, with arrays of the type and device of ``query``.

    Raises:
        ShapeError: shapes, lengths or numbers of tokens do not fit together.
        TypeError: no floating arrays of one library and dtype, or an unknown option.
        ValueError: an option out of its range.
        MaterializeError: too large to be written out.

    Example:
        >>> import numpy as np
        >>> q = k = v = np.eye(2)
        >>> print(steps(q, k, v, scale=1.0).explain(1, 0))
        query 1, key 0
        scores   0*1 + 1*0 = 0
        scaled   0 * 1 = 0
        weights  exp(0 - 1) / (exp(0 - 1) + exp(1 - 1)) = 0.26894
        output   0.26894 * value 0 + 0.73106 * value 1 = [0.26894, 0.73106]

    Source: Vaswani et al. 2017, equation 1.
    """
    rows: Any = query
    if is_one := getattr(query, "ndim", 2) == 1:
        rows = rows[None]
    return _written_out(rows, key, value, tokens, query_tokens, is_one, options)


def require_unwritten(steps: Steps[Any, Any], name: str, what: str) -> None:
    """Raises a RuntimeError if a tensor that the steps were made of was written to."""
    if (written := first_written(steps._versions)) is not None:
        raise RuntimeError(
            f"{name}: {written} was written to since these steps were made of it, and the {what}"
            " would mix old numbers with new. Make the steps anew, as after each step of gradient"
            " descent."
        )


def _computed(x: Any) -> Iterator[Any]:
    """The tensors among some values that have a graph of autograd."""
    if is_tensor(x):
        if not x.is_leaf:
            yield x
        return
    found = vars(x) if isinstance(x, Call) else x
    if isinstance(found, dict):
        found = [*found.values()]
    for one in found if isinstance(found, (tuple, list)) else ():
        yield from _computed(one)


def _written_out(
    query: Any,
    key: Any,
    value: Any,
    tokens: Sequence[str] | None,
    query_tokens: Sequence[str] | None,
    is_one: bool,
    options: Options,
) -> Steps[Any, Any]:
    """Every step; ``is_one`` takes the length axis of one query off again."""
    if unknown := [name for name in options if name not in NAMES]:
        raise unknown_option("steps", unknown, NAMES)
    call = read_call(query, key, value, **options)
    check_contents(call)
    _check_size(call)
    labels = _labels(call, tokens, query_tokens)

    def restored(x: Any) -> Any:
        x = call.restore(x)
        return x[..., 0, :] if is_one else x

    with np.errstate(all="ignore"):  # NaN and inf are valid results here
        scores, scaled, capped, masked = _scores(call)
    matrices = {"scores": restored(scores), "scaled": restored(scaled)}
    matrices["capped"] = matrices["scaled"] if capped is scaled else restored(capped)
    matrices["masked"] = matrices["capped"] if masked is capped else restored(masked)
    output, of_output = None, AttentionWeights._of(call)
    if value is not None:
        chosen = choose(call, "auto")
        output, statistics = chosen.attention(call, True)
        output, of_output = restored(output), AttentionWeights._of(call, chosen, statistics)
    weights = of_output[:]
    matrices["weights"] = weights[..., 0, :] if is_one else weights
    return Steps(
        None, None, query[..., 0, :] if is_one else query, key, value,
        **matrices,
        dropped=None if not call.dropout else restored(_dropped(call, weights)),
        output=output,
        tokens=labels[0],
        query_tokens=labels[1],
        _call=call,
        _formulas=_formulas(call),
        _options=options,
        _versions=versions(call),
    )  # fmt: skip


def _scores(call: Call) -> tuple[Any, Any, Any, Any]:
    """``(B, Hq, Lq, Lk)`` each: scores, scaled, capped, masked; equal ones are one array."""
    xp = arrays_of(call.query)
    scores = xp.matmul(xp.wide(call.query), xp.wide(call.key).swapaxes(-1, -2))
    scaled = formula.scaled(call, scores)
    capped = formula.capped(xp, call, scaled)
    B, Hq, _, Lq, Lk = call.sizes
    block = tuple(slice(0, n) for n in (B, Hq, Lq, Lk))
    edited = formula.edited(call.rectangles, formula.biased(xp, call, capped), *block)
    masked = formula.masked(xp, edited, visible_pairs(xp, call))
    return scores, scaled, capped, masked


def visible_pairs(xp: Arrays, call: Call) -> Any:
    """Bool ``(B, Hq, Lq, Lk)``; None where nothing is masked."""
    if not _rules(call):
        return None
    B, Hq, _, Lq, Lk = call.sizes
    visible = xp.full((B, Hq, Lq, Lk), False, "bool")
    visibility, rows, heads = Visibility(call, xp.arange), slice(0, Lq), slice(0, Hq)
    for b in range(B if Lq else 0):
        keys = visibility.keys(b, rows)
        pairs = visibility.pairs(slice(b, b + 1), heads, rows, keys)
        visible[b, :, :, keys] = True if pairs is None else pairs[0]
    return visible


def _dropped(call: Call, weights: Any) -> Any:
    xp, (B, Hq, _, Lq, Lk) = arrays_of(call.query), call.sizes
    keep = formula.kept_weights(xp, call, *(slice(0, n) for n in (B, Hq, Lq, Lk)))
    return formula.dropped(xp, call, keep, weights.reshape(B, Hq, Lq, Lk))


def _check_size(call: Call) -> None:
    B, Hq, _, Lq, Lk = call.sizes
    kept = 3 + formula.is_capped(call) + bool(_rules(call) or added_names(call))
    require_materializable(
        "steps: scores, weights and what lies between them",
        (kept + bool(call.dropout), B, Hq, Lq, Lk),
        8 * np.dtype(accumulating_name(call.query)).itemsize,
        "Write out one head and a part of the text; regard.AttentionWeights has any part of all",
    )


def _labels(
    call: Call, tokens: Sequence[str] | None, query_tokens: Sequence[str] | None
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Texts of keys and queries; queries that are the last of the keys take theirs."""
    _, _, _, Lq, Lk = call.sizes
    for name, texts, count, what in (
        ("tokens", tokens, Lk, "key"), ("query_tokens", query_tokens, Lq, "query"),
    ):  # fmt: skip
        if texts is not None and not hasattr(texts, "__len__"):
            raise TypeError(
                f"steps: {name} is {a_type(texts)}; a list of {count} is needed, one per {what}."
            )
        if texts is not None and (isinstance(texts, str) or len(texts) != count):
            found = "one str" if isinstance(texts, str) else counted(len(texts), "text")
            raise ShapeError(
                f"steps: {name} is {found}; a list of {count} is needed, one per {what}."
            )
        for n, text in enumerate(() if texts is None else texts):
            if not isinstance(text, str):
                raise TypeError(f"steps: {name}[{n}] is {a_type(text)}; a str is needed.")
    keys = None if tokens is None else tuple(tokens)
    if query_tokens is not None:
        return keys, tuple(query_tokens)
    are_last = call.query_start is None and call.key_lengths is None and Lq < Lk
    return keys, keys[Lk - Lq :] if keys and (Lq == Lk or are_last) else None


def _check_inputs(x: Any, context: Any, projections: dict[str, tuple[Any, Any]]) -> None:
    """One library and one floating dtype for all, and the axes that each may have."""
    named = {"x": (x, (1, 2, 3, 4)), "context": (context, (2, 3, 4))}
    for part, (w, b) in projections.items():
        named |= {f"w_{part}": (w, (2, 3)), f"b_{part}": (b, (1, 2))}
    for name, (array, axes) in named.items():
        if array is None and name != "x":
            continue
        if not isinstance(array, np.ndarray) and not is_tensor(array):
            raise TypeError(
                f"steps: {name} is {type(array).__name__}; a NumPy array or torch tensor is needed."
            )
        if not dtype_name(array).startswith(("float", "bfloat")):
            raise TypeError(
                f"steps: {name} is {dtype_name(array)}; floating numbers are needed."
                " Convert it, as in x.astype(np.float64)."
            )
        if is_tensor(array) != is_tensor(x) or array.dtype != x.dtype:
            raise TypeError(
                f"steps: x is {_kind(x)} and {name} is {_kind(array)};"
                " all must be of one library and dtype."
            )
        if array.ndim not in axes:
            raise ShapeError(
                f"steps: {name} {tuple(array.shape)} has {counted(array.ndim, 'axis', 'axes')};"
                f" {', '.join(map(str, axes))} are possible."
            )


def _kind(x: Any) -> str:
    return f"{'torch' if is_tensor(x) else 'NumPy'} {dtype_name(x)}"


def _project(x: Any, name: str, part: str, w: Any, b: Any) -> Any:
    """``x @ w + b``: ``(..., L, d_in)`` to ``(..., L, D)``."""
    if w is not None:
        if x.shape[-1] != w.shape[-2]:
            raise ShapeError(
                f"steps: vectors of {x.shape[-1]} numbers in {name}, but w_{part}"
                f" {tuple(w.shape)} takes {w.shape[-2]}; it is applied as {name} @ w_{part}."
            )
        product = x @ w
        # NumPy multiplies the bfloat16 of ml_dtypes to float32.
        x = product if is_tensor(x) else product.astype(x.dtype, copy=False)
    if b is not None:
        heads = len(w) if w is not None and w.ndim == 3 else None
        if b.shape[-1] != x.shape[-1] or (b.ndim == 2 and heads != len(b)):
            raise ShapeError(
                f"steps: b_{part} {tuple(b.shape)} is added to vectors of {x.shape[-1]} numbers;"
                f" ({x.shape[-1]},) is needed, or one such row per head of w_{part}."
            )
        x = x + (b[:, None, :] if b.ndim == 2 else b)
    return x


def _projection(name: str, part: str, w: Any, b: Any) -> str:
    return (
        name + (f" @ w_{part}" if w is not None else "") + (f" + b_{part}" if b is not None else "")
    )


def _rules(call: Call) -> list[str]:
    """The options that limit what a query sees, as they were given."""
    window = f"window=({call.window_left}, {call.window_right})"
    given = {
        "causal": call.causal,
        window: call.window_left is not None or call.window_right is not None,
        "mask": call.mask is not None,
        "key_lengths": call.key_lengths is not None,
        "segments": call.query_segments is not None,
        "intervals": call.interval_first is not None,
        "edits": bool(cuts_of(call)),
    }
    return [name for name, is_given in given.items() if is_given]


def _formulas(call: Call) -> dict[str, str]:
    before = "capped" if formula.is_capped(call) else "scaled"
    words = {"bias": "bias", "edits": "ln(factor) of the edits"}
    masked = " + ".join([before, *(words[name] for name in added_names(call))])
    rules = _rules(call)
    if rules:
        masked += f", -inf where a query must not look: {', '.join(rules)}"
    last = "masked" if rules or added_names(call) else before
    weights = "dropped" if call.dropout else "weights"
    return {
        "scores": "query @ key.T",
        "scaled": f"scores {scaling(call)}",
        "capped": formula.capped_text(call, "scaled"),
        "masked": masked,
        "weights": f"softmax of each row of {last}"
        + (", with a sink that takes a share" if call.sinks is not None else ""),
        "dropped": f"weights, each set to 0 with probability {call.dropout:g}, the others"
        f" / {1 - call.dropout:g}",
        "output": f"{weights} @ value",
    }
