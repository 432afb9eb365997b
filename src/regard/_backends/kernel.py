"""Attention on the CPU by the compiled kernels: the backend and each of its calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from regard._backends.formula import is_capped
from regard._backends.kernel_calls import (
    FEW_PRODUCTS,
    address_of,
    are_finite,
    array_ref,
    as_int64,
    call_as_read,
    contiguous,
    contiguous_rows,
    empty,
    filled,
    kernels,
    threads_of,
)
from regard._backends.pair_terms import Matrices, PairTerm, RowSlopes, Terms
from regard._backends.part_gradients import add_gradients as by_formula
from regard._backends.strongest import first_rows, largest_weights, rows_that_may_count
from regard._base import loaded
from regard._base.arrays import accumulating_name, arrays_of, dtype_name, is_tensor, to_numpy
from regard._base.settings import get_num_threads
from regard._call.call import Call
from regard._call.options import NUMBERS

FEWER_ROWS = 4  # times fewer than all: then the strongest pairs are searched for in these alone
LARGEST_SINK = 32.5  # exponent of a sink's term in the denominator, with its rounding
LARGEST_NUMBER = 1e30  # largest factor of scores in float32
LARGEST_HEAD = 576  # the largest that models have: MLA of DeepSeek
_FLOATS = tuple(field.name for field in NUMBERS if field.type.startswith("float"))
MOST_BINS = 4096  # of a row of a heatmap that finds the row statistics too: each row has its own


class Kernel:
    """See ``regard._backends.Backend``."""

    name = "kernel"
    past_torch = True
    reads_statistics = True
    few_rows = 64  # a block of the widest instruction set
    checks_on_device = False
    wide_scores = False
    pair_kinds = frozenset(
        {"weight", "knockout", "contribution", "relevance", "gradient", "change"}
    )

    def refuses(self, call: Call) -> str | None:
        return _refuses(call)

    def attention(self, call: Call, weights: bool) -> tuple[Any, tuple[Any, Any] | None]:
        if call.is_torch:
            from regard._backends import kernel_ops

            out, *statistics = kernel_ops.forward(call, weights)
        else:
            out, *statistics = forward(call, weights)
        return out, (statistics[0], statistics[1]) if weights else None

    def row_statistics(self, call: Call) -> tuple[Any, Any]:
        """As ``forward`` gives them.

        Rows of a part have the bits that they have in the whole, whichever are computed together;
        where no more than ``few_rows`` share their keys, only if these are computed together.
        """
        return forward(call.without_value())[1:]

    def score_unit(self, call: Call) -> float:
        """1, or the scale where scores are plain products: see ``raw_scores`` in attention.h."""
        return score_unit(call)

    def finds_statistics(self, call: Call, fields: dict[str, Any]) -> bool:
        """For the heatmap of the largest weights: scores are compared before they are weights."""
        return (
            fields.keys() == {"pooled_max", "bins"}
            and 0 < fields["bins"][1] <= MOST_BINS
            and call.group_rows > self.few_rows
        )

    def reduce(
        self, call: Call, statistics: tuple[Any, Any] | None, fields: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if statistics is not None:
            reduce(call, *statistics, fields)
            return None
        assert self.finds_statistics(call, fields)
        shape = call.query.shape[:3]
        maximum, total = (np.empty(shape, accumulating_name(call.query)) for _ in range(2))
        reduce(call, maximum, total, fields, finds_statistics=True)
        return maximum, total

    def add_gradients(
        self, call: Call, grad: Any, delta: Any, statistics: tuple[Any, Any], sums: dict[str, Any]
    ) -> None:
        # Masked values that are not finite must not spread: the formula takes care of that.
        if are_finite(call.query, call.key, call.value, grad):
            add_gradients(call, grad, delta, *statistics, sums)
        else:
            known = in_scores(self.score_unit(call), *statistics)
            by_formula(arrays_of(call.query), call, grad, delta, known, sums)

    def gather(self, call: Call, statistics: tuple[Any, Any], queries: Any, keys: Any) -> Any:
        return gather(call, *statistics, queries, keys)

    def reduce_pairs(self, matrices: Sequence[tuple[Terms, dict[str, Any]]]) -> None:
        reduce_pairs(matrices)

    def diverge(self, pairs: Sequence[tuple[Terms, Terms, dict[str, Any]]]) -> None:
        diverge(pairs)

    def divergence_gradients(
        self, kind: str, sides: Sequence[Terms], side: int, own: PairTerm,
        rows: RowSlopes, needed: Collection[str],
    ) -> dict[str, Any]:  # fmt: skip
        return divergence_gradients(kind, sides, side, own, rows, needed)


def score_unit(call: Call) -> float:
    """See ``Kernel``. A bias is one, be it of no key, whose numbers have no address."""
    raw = call.bias is None and not is_capped(call) and call.scale > 1e-30
    return call.scale if raw else 1.0


def _refuses(call: Call) -> str | None:
    if kernels is None:
        found = "it is not in this install, which found no C++ compiler that builds it"
        return f"{found}; install g++ 11 or newer and regard anew"
    Dv = 0 if call.value is None else call.value.shape[3]
    sizes = call.query.shape[3], Dv
    if max(sizes) > LARGEST_HEAD:
        return f"its head sizes D and Dv go up to {LARGEST_HEAD}, these are {sizes}"
    if accumulating_name(call.query) == "float32":
        for name in _FLOATS:
            if abs(getattr(call, name) or 0.0) > LARGEST_NUMBER:
                return f"{name} is {getattr(call, name)}, and it computes in float32"
    if call.sizes[4] >= 2**31:
        return f"it counts keys up to {2**31 - 1}, these are {call.sizes[4]}"
    return _refuses_tensors(call) if call.is_torch else None


def _refuses_tensors(call: Call) -> str | None:
    torch = loaded.torch
    tensors = call.tensors
    if any(x.device.type != "cpu" for x in tensors):
        return "it computes on the CPU; move the tensors with .cpu()"
    if any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return "it takes plain tensors"
    compiles = torch.compiler.is_compiling()
    if not compiles and torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward-mode derivative"
    if compiles or torch._C._get_tracing_state() is not None:
        from regard._base.torch_state import is_exported_to_onnx

        if is_exported_to_onnx():
            return "ONNX has no such operator"
    return None


def new_output(query: Any, Dv: Any, dtype: Any = None) -> Any:
    """An array ``(..., Hq, Lq, Dv)``, with tokens outside of heads in memory where the query's are.

    Models make ``(B, L, H, D)`` and exchange the axes: what they get back they merge without a
    copy. Of the query's dtype where no other is named.
    """
    if dtype is not None:
        query = _empty_like(query, dtype)
    *heads, L, D = query.shape
    numpy = isinstance(query, np.ndarray)
    if not numpy and D == Dv and query.is_contiguous():  # the quickest way
        return loaded.torch.empty_like(query)
    strides = query.strides if numpy else query.stride()
    inside = len(strides) > 2 and 0 < strides[-3] < strides[-2]
    if inside and not numpy and len(strides) == 4:  # in one step: it is what models pass
        (B, H), row = heads, heads[1] * Dv
        return query.new_empty_strided((B, H, L, Dv), (L * row, Dv, row, 1))
    shape = (*heads[:-1], L, heads[-1], Dv) if inside else (*heads, L, Dv)
    out = np.empty(shape, query.dtype) if numpy else query.new_empty(shape)
    return out.swapaxes(-3, -2) if inside else out


def _empty_like(x: Any, dtype: str) -> Any:
    """A new array of x's layout in memory."""
    if is_tensor(x):
        return loaded.torch.empty_like(x, dtype=getattr(loaded.torch, dtype))
    return np.empty_like(x, dtype)


def forward(call: Call, statistics: bool = True) -> tuple[Any, Any, Any]:
    """``(output, maximum, total)``: the output and, where requested, the row statistics.

    The row statistics ``maximum`` and ``total`` are ``(B, Hq, Lq)`` in the accumulating dtype: the
    largest score, and the sum of the exponentials relative to it. A call without a value has them
    alone.
    """
    assert kernels is not None
    B, Hq, _, Lq, _ = call.sizes
    shape, out = (B, Hq, Lq), None
    if call.value is not None:
        out = new_output(call.query, call.value.shape[-1], call.output_dtype)
    dtype = accumulating_name(call.query)
    maximum, total = (empty(call, shape, dtype) if statistics else None for _ in range(2))
    read, _held = call_as_read(call)
    if 0 not in shape:
        into = array_ref(out), address_of(maximum), address_of(total)
        kernels.forward(read, *into, threads_of(call))
    return out, maximum, total


def reduce(
    call: Call, maximum: Any, total: Any, fields: dict[str, Any], finds_statistics: bool = False
) -> None:
    """Fills arrays with reductions of the weights, in one pass.

    Args:
        maximum, total: the row statistics of ``forward``, in NumPy.
        fields: by the names of ``kernels.Asked``; numbers, and the arrays that take the results.
            Besides ``lse`` and ``row_max``, ``(B, Hq, Lq)``.
        finds_statistics: whether it writes them; for ``pooled_max`` alone.
    """
    assert kernels is not None
    read, _held = call_as_read(call.without_value())
    if (lse := fields.pop("lse", None)) is not None:
        with np.errstate(divide="ignore", over="ignore"):
            into = lse.numpy() if call.is_torch else lse
            into[...] = maximum
            into *= score_unit(call)
            into += np.log(total.astype(float))
    if not finds_statistics:
        _reduce_few_rows(call, read, maximum, total, fields)
    if (row_max := fields.pop("row_max", None)) is not None:
        into = row_max.numpy() if call.is_torch else row_max
        _largest_scores(call, maximum, total, read.factor, into)
    if fields and 0 not in call.sizes:
        asked = filled(kernels.Asked(), fields)
        asked.maximum, asked.total = address_of(maximum), address_of(total)
        asked.finds_statistics, asked.whole_rows = finds_statistics, call.whole_rows
        kernels.reduce(read, asked, threads_of(call))


def gather(call: Call, maximum: Any, total: Any, queries: np.ndarray, keys: np.ndarray) -> Any:
    """``(B, Hq, n)``: the weights of some pairs, by their indices; 0 where masked.

    Args:
        maximum, total: the row statistics of ``forward``, in NumPy.
    """
    assert kernels is not None
    shape = (*call.query.shape[:2], len(queries))
    out = _zeros(call, shape, accumulating_name(call.query))
    read, _held = call_as_read(call.without_value())
    if 0 not in shape:
        queries, keys = (as_int64(x) for x in (queries, keys))
        given = (address_of(x) for x in (maximum, total, queries, keys))
        kernels.gather(read, *given, len(queries), address_of(out), threads_of(call))
    return out


def reduce_pairs(matrices: Sequence[tuple[Terms, dict[str, Any]]]) -> None:
    """See ``regard._backends.pair_terms.PairBackend``."""
    assert kernels is not None
    # All are read before a pass takes the caches: reading the next one would take far longer then.
    passes = [
        (*_read_terms(terms), filled(kernels.PairsAsked(), fields), _threads_of(terms))
        for terms, fields in matrices
    ]
    for (given, _held, asked, threads), (terms, _) in zip(passes, matrices):
        kernels.reduce_pairs(given, asked, threads)
        for term in terms:
            if term.rest is not None:
                term.rest.is_known = True


def diverge(pairs: Sequence[tuple[Terms, Terms, dict[str, Any]]]) -> None:
    """See ``regard._backends.pair_terms.PairBackend``."""
    assert kernels is not None
    passes = [
        (_read_terms(a), _read_terms(b), filled(kernels.DivergencesAsked(), fields), _threads_of(a))
        for a, b, fields in pairs
    ]
    for (of_a, _held_a), (of_b, _held_b), asked, threads in passes:
        kernels.diverge(of_a, of_b, asked, threads)


def _threads_of(terms: Terms) -> int:
    return threads_of(terms[0].of.call, heads=1)


def divergence_gradients(
    kind: str, sides: Sequence[Terms], side: int, own: PairTerm, rows: RowSlopes,
    needed: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    """See ``regard._backends.pair_terms.PairBackend``; of tensors."""
    torch = loaded.torch
    (of_a, _held_a), (of_b, _held_b) = map(_read_terms, sides)
    call = own.of.call.matrix(own.b, own.h).without_value()
    dtype = getattr(torch, accumulating_name(call.query))
    numbers, of_sink, delta = (
        None if x is None else x.to(dtype).contiguous().reshape(call.query.shape[:3]) for x in rows
    )
    rule = {"rule": kind, "side_a": of_a, "side_b": of_b, "side": side, "numbers": numbers}
    maximum, total = (
        torch.from_numpy(x[own.b : own.b + 1, own.h : own.h + 1]) for x in own.of.statistics
    )
    found = rule_gradients(call, rule, delta, maximum, total, needed, of_sink)
    return dict(zip(("query", "key", "value", "bias", "sinks"), found))


def _read_terms(terms: Terms) -> tuple[list[Any], list[Any]]:
    """The terms as the kernels read them, and the arrays that must live as long."""
    assert kernels is not None
    given, held = [], []
    for one in terms:
        if one.of.read is None:
            one.of.read = _read_matrices(one.of)
        term, value, gradient = kernels.PairTerm(), contiguous(one.value), contiguous(one.gradient)
        (term.call, term.maximum, term.total), _ = one.of.read
        term.b, term.h, term.coefficient, term.kind = one.b, one.h, one.coefficient, one.kind
        if value is not None:
            term.value, term.value_size = address_of(value), value.shape[-1]
        if gradient is not None:
            term.gradient = address_of(gradient)
        if one.of_sink is not None:
            term.of_sink = address_of(one.of_sink)
        if one.squares is not None:
            term.squares = address_of(one.squares)
        if one.rest is not None:
            term.rest, term.rest_is_known = address_of(one.rest.numbers), one.rest.is_known
        given.append(term)
        held.append((one, value, gradient))
    return given, held


def _read_matrices(of: Matrices) -> tuple[tuple[Any, int, int], tuple[Any, ...]]:
    """The call and the addresses of its statistics for terms, and what must live as long."""
    assert kernels is not None
    read, arrays = call_as_read(of.call.without_value())
    return (kernels.ReadCall(read, threads_of(of.call)), *map(address_of, of.statistics)), arrays


def _reduce_few_rows(
    call: Call, read: Any, maximum: Any, total: Any, fields: dict[str, Any]
) -> None:
    """Takes the strongest pairs out of the fields and fills them, where few rows can have them."""
    assert kernels is not None
    B, Hq, _, Lq, Lk = call.sizes
    if "n" not in fields or not call.whole_rows or 0 in call.sizes:
        return
    n = fields["n"]
    pairs = {name: to_numpy(x) for name, x in fields.items() if name.startswith("pair_")}
    sinks = None if call.sinks is None else to_numpy(call.sinks)
    largest = largest_weights(maximum, total, sinks, read.factor)
    while n * FEWER_ROWS <= Lq:
        rows, asked = first_rows(largest, n), kernels.Asked()
        asked.maximum, asked.total = address_of(maximum), address_of(total)
        asked.rows, asked.row_count, asked.n = address_of(rows), n, fields["n"]
        for name, x in pairs.items():
            setattr(asked, name, address_of(x))
        small = B * Hq * n * Lk * (call.query.shape[-1] + 1) < FEW_PRODUCTS
        kernels.reduce(read, asked, 1 if small else get_num_threads())
        enough = rows_that_may_count(largest, pairs["pair_query"], pairs["pair_weight"])
        if enough <= n:
            for name in ("n", *pairs):
                del fields[name]
            return
        n = enough


def _largest_scores(call: Call, maximum: Any, total: Any, factor: float, into: Any) -> None:
    """Fills ``(B, Hq, Lq)`` with the largest score of each row, from its statistics.

    These are of whole rows and include the sink: computed anew for a part, and where there is one.
    """
    if call.sinks is not None or not call.whole_rows:
        call = call.without_value().changed(sinks=None)
        maximum, total = map(to_numpy, forward(call)[1:])
    into[...] = maximum
    with np.errstate(invalid="ignore", over="ignore"):  # invalid: infinities, with a scale of 0
        into *= factor * math.log(2)
    into[np.isnan(total) & (into < np.inf)] = np.nan  # the kernels' maximum passes over NaN


def gradients(
    call: Call, grad: Any, out: Any, maximum: Any, total: Any, needed: Collection[str]
) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients of query, key, value, bias and sinks, those needed, for that of the output.

    ``out``, ``maximum`` and ``total`` are what ``forward`` gave. Everything must be finite.
    """
    own, sums = dtype_name(call.query), accumulating_name(call.query)
    delta = None
    if dtype_name(out) != own:  # of more digits than the kernels would read
        given = (grad.double() * out.double()).sum(-1).to(out.dtype)
        grad = contiguous_rows(grad.to(call.query.dtype))
        arrays: dict[str, Any] = {"grad": array_ref(grad), "given_delta": given}
    else:
        grad = contiguous_rows(grad)
        arrays = {"grad": array_ref(grad), "out": array_ref(out)}
    # Σ w·dw of a row from the output has its rounding, too much in a narrow dtype.
    if "sinks" in needed and own != sums and dtype_name(out) == own:
        delta = _zeros(call, tuple(call.query.shape[:3]), sums)
    found, read = _backward(call, arrays, maximum, total, needed, delta)
    if "sinks" not in needed:
        return *found, None
    delta = (grad.double() * out.double()).sum(-1) if delta is None else delta.double()
    return *found, _sinks_gradient(call, delta, maximum, total, read)


def rule_gradients(
    call: Call, rule: dict[str, Any], delta: Any, maximum: Any, total: Any, needed: Collection[str],
    of_sink: Any = None,
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """Gradients as of ``gradients`` for that of the weights, which is a rule of query and key.

    Args:
        call: without value and dropout.
        rule: its name and arrays by the names of ``kernels.Gradients``; of ``Rule`` in attention.h.
        delta: ``(B, Hq, Lq)`` in the dtype of sums: Σ w·dw; None: it takes one more pass.
        maximum, total: row statistics that ``forward`` gave.
        of_sink: ``(B, Hq, Lq)``: of the sum that of the sink, w·dw; None: 0.
    """
    if delta is None:
        delta = _zeros(call, tuple(call.query.shape[:3]), accumulating_name(call.query))
        _backward(call, rule, maximum, total, (), delta)
        delta = delta if of_sink is None else delta + of_sink
    found, read = _backward(call, {**rule, "given_delta": delta}, maximum, total, needed)
    if "sinks" not in needed:
        return *found, None
    sinks = _sinks_gradient(call, delta.double(), maximum, total, read)
    return *found, sinks if of_sink is None else sinks + of_sink.double().sum((0, 2))


def _backward(
    call: Call, fields: dict[str, Any], maximum: Any, total: Any, needed: Collection[str],
    delta: Any = None,
) -> tuple[tuple[Any, Any, Any, Any], Any]:  # fmt: skip
    """Gradients of query, key, value and bias, those needed, and the call as it was read.

    Args:
        delta: ``(B, Hq, Lq)`` zeros, to which the sums of ``w·dw`` are added.
    """
    assert kernels is not None
    B, Hq, Hkv, Lq, Lk = call.sizes
    D, Dv = call.query.shape[-1], 0 if call.value is None else call.value.shape[-1]
    own, sums = dtype_name(call.query), accumulating_name(call.query)
    runs = 0 not in (B, Hq, Lq, Lk)
    written = empty if runs else _zeros  # every number by the kernels
    dq, dk, dv, dbias = (
        make(call, shape, dtype) if name in needed else None
        for name, make, shape, dtype in (
            ("query", written, (B, Hq, Lq, D), own),
            ("key", written, (B, Hkv, Lk, D), own),
            ("value", written, (B, Hkv, Lk, Dv), own),
            ("bias", _zeros, () if call.bias is None else tuple(call.bias.shape), sums),
        )
    )
    read, _held = call_as_read(call)
    if runs:
        arrays = filled(kernels.Gradients(), fields)
        arrays.bias_grad = array_ref(dbias)
        arrays.maximum, arrays.total = address_of(maximum), address_of(total)
        # Chunks of keys add to dQ in `sums`; the last one rounds it.
        of_chunks = dq if dq is None or own == sums else empty(call, tuple(dq.shape), sums)
        arrays.query_sum, arrays.query_grad = address_of(of_chunks), address_of(dq)
        arrays.delta = address_of(delta)
        arrays.key_grad, arrays.value_grad = address_of(dk), address_of(dv)
        kernels.backward(read, arrays, threads_of(call))
    if call.scale == 0.0:  # the kernels scale last, and an overflow before that would give NaN
        dq, dk = (
            None if x is None else _zeros(call, tuple(x.shape), dtype_name(x)) for x in (dq, dk)
        )
    return (dq, dk, dv, dbias), read


def add_gradients(
    call: Call, grad: Any, delta: Any, maximum: Any, total: Any, sums: dict[str, Any]
) -> None:
    """Adds gradients of attention over some keys; see ``regard._backends.Backend``.

    Everything must be finite.
    """
    assert kernels is not None
    B = len(call.query)
    if call.scale == 0.0:  # the kernels scale last, and an overflow before that would give NaN
        sums = {name: x for name, x in sums.items() if name not in ("query", "key")}
    dtype = accumulating_name(call.query)
    own = {}  # of each element of the batch, where they share keys
    for name in ("key", "value"):
        if name in sums and len(sums[name]) != B:
            own[name] = _zeros(call, (B, *sums[name].shape[1:]), dtype)
    into = sums | own
    read, _held = call_as_read(call)
    grad = contiguous_rows(arrays_of(call.query).cast(grad, dtype_name(call.query)))
    delta = contiguous(delta)
    arrays = kernels.Gradients()
    arrays.grad, arrays.given_delta = array_ref(grad), address_of(delta)
    arrays.maximum, arrays.total = address_of(maximum), address_of(total)
    arrays.query_sum, arrays.bias_grad = address_of(into.get("query")), array_ref(into.get("bias"))
    arrays.key_grad, arrays.value_grad = address_of(into.get("key")), address_of(into.get("value"))
    arrays.adds = True
    kernels.backward(read, arrays, threads_of(call))
    for name, x in own.items():
        sums[name][...] += x.sum(0)[None]


# By exp of how a maximum was rounded, its total is changed. From 3e8 on a rounding is more than
# that: nothing makes up for it there, but a total is a number.
MOST_ROUNDED = 20.0


def rounded_away(xp: Any, change: Any) -> Any:
    """What rounding took from a maximum, bounded by ``MOST_ROUNDED``; 0 if it is no number."""
    change = xp.where(xp.isfinite(change), change, 0.0)
    change = xp.where(change > MOST_ROUNDED, MOST_ROUNDED, change)
    return xp.where(change < -MOST_ROUNDED, -MOST_ROUNDED, change)


def in_scores(unit: float, maximum: Any, total: Any) -> tuple[Any, Any]:
    """Row statistics as the formula has them: of final scores."""
    with np.errstate(all="ignore"):
        exact = maximum.astype(np.float64) * unit
        rounded = exact.astype(maximum.dtype)
        change = rounded_away(np, exact - rounded)
        return rounded, (total * np.exp(change)).astype(total.dtype)


def _sinks_gradient(call: Call, delta: Any, maximum: Any, total: Any, read: Any) -> Any:
    """``(Hq,)``: the sink's weight takes ``delta`` from every row, the sum of ``w·dw``."""
    maximum, total = maximum.double(), total.double()
    exponent = call.sinks.double()[:, None] * math.log2(math.e) - maximum * read.factor
    weight = (exponent.clamp(max=LARGEST_SINK).exp2() / total).masked_fill(total == 0, 0.0)
    return -(weight * delta).sum((0, 2))


def _zeros(call: Call, shape: tuple[int, ...], dtype: str) -> Any:
    x = empty(call, shape, dtype)
    return x.zero_() if call.is_torch else np.zeros_like(x)
