"""What is asked of weights where torch compiles: a question in words, and the shape of its answer.

A question is a path of method calls, as in ``weights.part(rows).head(2).received("seen")``, with
the numbers and tensors among their arguments apart. ``regard._backends.torch_questions`` has the
operator; it calls the methods anew.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from regard._backends import by_name, torch_questions
from regard._backends.torch_questions import Question
from regard._base import loaded
from regard._base.arrays import accumulating_name, is_tensor
from regard._call.call import Call
from regard._weights.attention_weights import AttentionWeights
from regard._weights.differentiable import needs_gradient
from regard._weights.linear_reductions import Diagonals
from regard._weights.one_pass import WeightsSummary
from regard._weights.operands import read_operand
from regard._weights.parts import basic_index
from regard._weights.reductions import Links, TopKeys, check_k

Step = tuple[str, tuple[Any, ...], dict[str, Any]]  # a method, and what it is called with
WITHOUT_GRADIENT = {"topk", "strongest", "pool", "summary", "_argmax_along"}
# Of few rows the operator computes the row statistics itself.
OF_FEW_ROWS = {"at", "__getitem__"}
LONGEST = 8  # lists that are told number by number
_OF_PART = ("_call", "_graph", "_of_part", "_statistics", "_versions", "_numbers",
            "_weights_only", "_origin", "_lse", "_max_score")  # fmt: skip


class TracedPart(AttentionWeights[Any]):
    """A part of weights that was taken where torch compiles: cut once it is needed as it is."""

    def __init__(self, source: AttentionWeights[Any], path: tuple[Step, ...]) -> None:
        self._source, self._path = source, path
        self._found: AttentionWeights[Any] | None = None

    def _as_it_is(self) -> AttentionWeights[Any]:
        if self._found is None:
            self._found = _follow(self._source, self._path)
        return self._found

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., Hq, Lq, Lk)``."""
        extent = _cut_extent(self._source._call, self._path)
        return (*_axes(extent), *_lengths(extent))

    @property
    def _tells_distances(self) -> bool:
        own = all(name != "part" for name, *_ in self._path)
        return own and self._source._tells_distances

    @property
    def device(self) -> Any:
        """That of the source."""
        return self._source.device

    @property
    def _dtype_name(self) -> str:
        return self._source._dtype_name


def _attribute_of_part(name: str) -> property:
    def get(self: TracedPart) -> Any:
        return getattr(self._as_it_is(), name)

    def put(self: TracedPart, x: Any) -> None:
        setattr(self._as_it_is(), name, x)

    return property(get, put)


for _name in _OF_PART:
    setattr(TracedPart, _name, _attribute_of_part(_name))


def _follow(weights: Any, path: Sequence[Step]) -> Any:
    for name, values, options in path:
        found = getattr(weights, name)
        weights = found(*values, **options) if callable(found) else found
    return weights


# In the graph.


def cut(weights: Any, method: Any, values: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A part of weights in a graph."""
    source, path = _source_of(weights)
    if not _may_ask(source):
        return torch_questions.at_once(method, weights, *values, **options)
    return TracedPart(source, (*path, (method.__name__, values, options)))


def ask(weights: Any, method: Any, values: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a method of weights answers, in a graph."""
    source, path = _source_of(weights)
    if not _may_ask(source):
        return torch_questions.at_once(method, weights, *values, **options)
    name = method.__name__
    tensors: list[Any] = []
    numbers: list[Any] = []
    steps = [_told(step, tensors, numbers) for step in (*path, (name, values, options))]
    if len(tensors) > 2:
        return torch_questions.at_once(method, weights, *values, **options)
    words, (x, y) = ",".join(steps), (*tensors, None, None)[:2]
    call, has_gradient = source._call, False
    if _may_have_gradient(name, values, options):
        call = call if source._graph is None else source._graph
        has_gradient = needs_gradient(call, x)
    statistics = _statistics_of(source, bool(path) or name in OF_FEW_ROWS)
    backend = source._statistics.backend.name
    call = call.changed(query_start=_as_tensor(call.query_start))
    question = Question(f"({words},)", x, y, numbers, has_gradient)
    found = torch_questions.ask(question, call, backend, statistics)
    return _built(name, list(found), values, options)


def _source_of(weights: Any) -> tuple[Any, tuple[Step, ...]]:
    if isinstance(weights, TracedPart):
        return weights._source, weights._path
    return weights, ()


def _may_ask(weights: Any) -> bool:
    """Whether an operator can have them: no arrays of NumPy, no part of keys, no recording's."""
    call = weights._call
    plain = weights._numbers is None and not weights._weights_only
    return bool(call.is_torch and call.whole_rows and plain)


def _may_have_gradient(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> bool:
    largest = any(isinstance(x, str) and x == "max" for x in (*values, *options.values()))
    return name not in WITHOUT_GRADIENT and not largest


def _as_tensor(x: Any) -> Any:
    return x if x is None or is_tensor(x) else loaded.torch.as_tensor(x)


def _statistics_of(source: Any, of_part: bool) -> Any:
    """Those of all rows, computed once in a graph; None where the operator finds its own."""
    rows, call = source._statistics, source._call
    if not rows.backend.reads_statistics or rows.call is not call:
        return None
    kept = rows._kept
    if kept is not None and rows._missing is None and is_tensor(kept[0]):
        return kept
    if of_part or call.part_of is not None or call.query_step != 1:
        return None
    found = torch_questions.row_statistics(call, rows.backend.name)
    if not source._versions:  # made in this graph: nobody writes into its tensors later
        rows._kept = found
    return found


def _told(x: Any, tensors: list[Any], numbers: list[Any]) -> str:
    """x in words, for ``_read``; its tensors and numbers, which may be symbols, apart."""
    # What may hold symbols comes first: torch.compile looks at those of all that meets None.
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        numbers.append(x)
        return "('n',)"
    if isinstance(x, slice):
        ends = [_told(end, tensors, numbers) for end in (x.start, x.stop, x.step)]
        return f"('s',{','.join(ends)})"
    if isinstance(x, dict):
        pairs = [_told(part, tensors, numbers) for item in x.items() for part in item]
        return f"('d',{','.join(pairs)})"
    if isinstance(x, (tuple, list, range, set, frozenset)):
        if len(x) <= LONGEST:
            parts = [_told(part, tensors, numbers) for part in x]
            return f"('l',{','.join(parts)})"
        x = loaded.torch.tensor(tuple(x))
    if x is None or isinstance(x, (bool, str)):
        return repr(x)
    if x is Ellipsis:
        return "('...',)"
    tensors.append(_as_tensor(x))
    return "('t',)"


def _built(name: str, found: list[Any], values: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """An answer in its form."""
    if name == "topk":
        return TopKeys(*found)
    if name == "strongest":
        return Links(*found)
    if name == "_diagonals":
        return Diagonals(*found)
    if name == "pool":
        how = options.get("how", values[1] if len(values) > 1 else "max")
        return tuple(found) if isinstance(how, tuple) else found[0]
    if name == "summary":
        only = options.get("only", WeightsSummary._fields)
        counts = {"topk": 2, "strongest": 3}
        forms = {"topk": TopKeys, "strongest": Links}
        parts: list[Any] = []
        for field in WeightsSummary._fields:
            some = [found.pop(0) for _ in range(counts.get(field, 1) if field in only else 0)]
            if not some:
                parts.append(None)
            else:
                parts.append(forms[field](*some) if field in forms else some[0])
        return WeightsSummary(*parts)
    return found[0]


# In the operator.


@functools.lru_cache(256)
def _parsed(words: str) -> Any:
    return ast.literal_eval(words)


def _read(question: Question) -> list[Step]:
    tensors, numbers = iter((question.x, question.y)), iter(question.numbers)
    return [_thing(step, tensors, numbers) for step in _parsed(question.words)]


def _thing(told: Any, tensors: Iterator[Any], numbers: Iterator[int]) -> Any:
    """What was told in words."""
    if not isinstance(told, tuple):
        return told
    kind, *rest = told
    if kind == "n":
        return next(numbers)
    if kind == "t":
        return next(tensors)
    if kind == "...":
        return ...
    parts = [_thing(part, tensors, numbers) for part in rest]
    if kind == "s":
        return slice(*parts)
    return dict(zip(parts[::2], parts[1::2])) if kind == "d" else tuple(parts)


class Answers:
    """See ``regard._backends.torch_questions.Answers``."""

    def answer(self, question: Question, call: Call, backend: str, statistics: Any) -> list[Any]:
        weights = AttentionWeights._of(call, by_name(backend), statistics)
        found = [x.contiguous() for x in _flat(_follow(weights, _read(question)))]
        known = {id(x): x for x in found}
        return found if len(known) == len(found) else [x.clone() for x in found]

    def empty(self, question: Question, call: Call) -> list[Any]:
        *path, (name, values, options) = _read(question)
        extent = _cut_extent(call, path)
        shapes = SHAPES[name](extent, **_bound(name, values, options))
        torch, own = loaded.torch, accumulating_name(call.query)
        return [
            call.query.new_empty(shape, dtype=torch.int64 if integral else getattr(torch, own))
            for shape, integral in shapes
        ]


torch_questions.answered_by(Answers())


def _flat(x: Any) -> list[Any]:
    if isinstance(x, tuple):
        return [tensor for part in x for tensor in _flat(part)]
    return [] if x is None else [x]


# Shapes: of a call of which only query and key are cut, so that lengths may be symbols.

Shapes = list[tuple[tuple[Any, ...], bool]]  # and whether they are integers


def _bound(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(getattr(AttentionWeights, name)).bind(None, *values, **options)
    bound.apply_defaults()
    (_, *found) = bound.arguments.items()
    return dict(found)


def _cut_extent(call: Call, path: Sequence[Step]) -> Call:
    for name, values, options in path:
        call = PARTS[name](call, **_bound(name, values, options))
    return call


def _cut_part(call: Call, rows: slice | None, columns: slice | None) -> Call:
    rows, columns = (slice(None) if x is None else x for x in (rows, columns))
    cut = rows != slice(None) or columns != slice(None) or not call.whole_rows
    return call.changed(
        query=call.query[:, :, rows], key=call.key[:, :, columns], whole_rows=not cut
    )


def _cut_head(call: Call, h: int) -> Call:
    Hq = call.query.shape[1]
    if not call.heads or not -Hq <= h < Hq:
        raise IndexError(f"weights: there is no head {h} of {(*_axes(call), *_lengths(call))}.")
    return call.changed(query=call.query[:, :1], key=call.key[:, :1], heads=False)


def _cut_matrix(call: Call, index: tuple[int, ...]) -> Call:
    query, key = call.query[:1, :1], call.key[:1, :1]
    return call.changed(query=query, key=key, leading=(), heads=False)


PARTS: dict[str, Callable[..., Call]] = {
    "part": _cut_part, "head": _cut_head, "matrix": _cut_matrix,
}  # fmt: skip


def _axes(call: Call) -> tuple[Any, ...]:
    return (*call.leading, *((call.query.shape[1],) if call.heads else ()))


def _lengths(call: Call) -> tuple[Any, Any]:
    return call.query.shape[2], call.key.shape[2]


def _per_query(call: Call, **_: Any) -> Shapes:
    return [((*_axes(call), call.query.shape[2]), False)]


def _per_key(call: Call, **_: Any) -> Shapes:
    return [((*_axes(call), call.key.shape[2]), False)]


def _per_head(call: Call) -> Shapes:
    return [(_axes(call), False)]


def _shape_of_topk(call: Call, k: int) -> Shapes:
    Lq, Lk = _lengths(call)
    check_k(k, Lk, "keys")
    shape = (*_axes(call), Lq, k)
    return [(shape, False), (shape, True)]


def _shape_of_strongest(call: Call, n: int) -> Shapes:
    Lq, Lk = _lengths(call)
    shape = (*_axes(call), _less(n, Lq * Lk))
    return [(shape, True), (shape, True), (shape, False)]


def _shape_of_pool(
    call: Call, size: Any, how: Any, rows: Any, columns: Any, of: Any = None
) -> Shapes:
    lengths = _lengths(_cut_part(call, rows, columns)) if of is None else of
    shape = (*_axes(call), *(_less(n, m) for n, m in zip(size, lengths)))
    return [(shape, False)] * (len(how) if isinstance(how, tuple) else 1)


def _shape_of_summary(call: Call, topk: int, strongest: int, pool: Any, only: Any) -> Shapes:
    found = {
        "topk": _shape_of_topk(call, _less(topk, call.key.shape[2])),
        "strongest": _shape_of_strongest(call, strongest),
        "pooled": _shape_of_pool(call, pool, "max", None, None),
        "received": _per_key(call),
    }
    names = [name for name in WeightsSummary._fields if name in only]
    return [shape for name in names for shape in found.get(name, _per_query(call))]


def _shape_of_block(call: Call, index: Any) -> Shapes:
    shape = (*_axes(call), *_lengths(call))
    given = index if isinstance(index, tuple) else (index,)
    plain = tuple(0 if is_symbol(pick) else pick for pick in given)
    picks = zip(basic_index(plain, shape), shape)
    return [(tuple(_count(pick, n) for pick, n in picks if isinstance(pick, slice)), False)]


def is_symbol(x: Any) -> bool:
    """Whether x is a number that a graph does not know."""
    return isinstance(x, loaded.torch.SymInt)


def _less(x: Any, y: Any) -> Any:
    """The less of two numbers; one graph is for both cases where they are symbols."""
    return loaded.torch.sym_min(x, y)


def _more(x: Any, y: Any) -> Any:
    return loaded.torch.sym_max(x, y)


def _count(part: slice, n: Any) -> Any:
    """How many of n a slice picks."""
    step = 1 if part.step is None else part.step
    if not any(map(is_symbol, (n, part.start, part.stop, step))):
        return len(range(*part.indices(n)))
    low, high = (0, n) if step > 0 else (-1, n - 1)

    def end(x: Any, default: Any) -> Any:
        return default if x is None else _less(_more(x + n if x < 0 else x, low), high)

    first, last = (low, high) if step > 0 else (high, low)
    apart = end(part.stop, last) - end(part.start, first)
    return _more(0, -(-apart // step))


def _shape_of_product(call: Call, name: str, x: Any, of: str) -> Shapes:
    Lq, Lk = _lengths(call)
    inner, outer = (Lk, Lq) if of == "product" else (Lq, Lk)
    operand, vector = read_operand(call, name, x, inner)
    columns = () if vector else (operand.shape[3],)
    return [((*_axes(call), outer, *columns), False)]


def _shape_of_blocks(call: Call, counts: Any, **_: Any) -> Shapes:
    return [((*_axes(call), *counts), False)]


def _shape_of_pairs(call: Call, queries: Any, keys: Any) -> Shapes:
    pairs = loaded.torch.broadcast_shapes(_shape_of(queries), _shape_of(keys))
    return [((*_axes(call), *pairs), False)]


def _shape_of(x: Any) -> tuple[Any, ...]:
    if isinstance(x, tuple):
        return (len(x), *(_shape_of(x[0]) if x else ()))
    return tuple(x.shape) if is_tensor(x) else ()


def _shape_of_diagonals(call: Call, edges: Any) -> Shapes:
    count = _distances(call) if edges is None else max(0, _shape_of(edges)[0] - 1)
    return [((count,), True), ((*_axes(call), count), False)]


def _distances(call: Call) -> Any:
    """How many distances the pairs of a call have, whose queries are the last of all its keys."""
    Lq, Lk = _lengths(call)
    if 0 in (call.query.shape[0], Lq, Lk):
        return 0
    right = 0 if call.causal else call.window_right
    if call.causal and call.window_right is not None:
        right = min(0, call.window_right)
    least = 1 - Lq if right is None else _more(1 - Lq, -right)
    most = Lk - 1 if call.window_left is None else _less(Lk - 1, call.window_left)
    return _more(0, most - least + 1)


def _shape_of_fold(call: Call, name: str, axes: Any, keepdims: bool) -> Shapes:
    shape = (*_axes(call), *_lengths(call))
    kept = [1 if n in axes else size for n, size in enumerate(shape) if keepdims or n not in axes]
    return [(tuple(kept), False)]


def _shape_of_argmax(call: Call, axes: Any, keepdims: bool) -> Shapes:
    return [(_shape_of_fold(call, "max", axes, keepdims)[0][0], True)]


SHAPES: dict[str, Callable[..., Shapes]] = {
    "_lse_of_scores": _per_query, "entropy": _per_query, "distance": _per_query,
    "mass": _per_query, "received": _per_key, "_max_score_of_heads": _per_head,
    "topk": _shape_of_topk, "strongest": _shape_of_strongest, "pool": _shape_of_pool,
    "summary": _shape_of_summary, "__getitem__": _shape_of_block, "_multiply": _shape_of_product,
    "_blocks": _shape_of_blocks, "at": _shape_of_pairs, "_diagonals": _shape_of_diagonals,
    "_folded": _shape_of_fold, "_argmax_along": _shape_of_argmax,
}  # fmt: skip
