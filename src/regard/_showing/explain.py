"""The arithmetic behind one attention weight, as a line for each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._backends.formula import capped_text, is_capped
from regard._base.arrays import is_tensor
from regard._call.call import Call

if TYPE_CHECKING:
    from regard._showing.steps import Steps

# Longer sums leave out terms in the middle.
LONGEST_SUM = 6


def arithmetic(steps: Steps, i: int, j: int, head: tuple[int, ...]) -> Iterator[str]:
    """The lines of ``steps.explain(i, j)``."""
    matrices = {name: _head(steps, name, head) for name in _MATRICES}
    masked, weights = matrices["masked"], matrices["weights"]
    i, j = _index("query", i, len(masked)), _index("key", j, masked.shape[1])
    score, scaled, capped, last = (matrices[name][i, j] for name in _MATRICES[:4])
    q, k = _head(steps, "query", head)[i], _head(steps, "key", head)[j]
    call = steps._call
    yield f"query {_named(i, steps.query_tokens)}, key {_named(j, steps.tokens)}"
    yield f"scores   {_sum(f'{_n(a)}*{_n(b)}' for a, b in zip(q, k))} = {_n(score)}"
    yield f"scaled   {_n(score)} {scaling(call)} = {_n(scaled)}"
    if is_capped(call):
        yield f"capped   {capped_text(call, _n(scaled))} = {_n(capped)}"
    if last == -math.inf:
        yield f"masked   -inf: query {i} does not attend to key {j}"
    elif call.bias is not None:
        yield f"masked   {_n(capped)} + {_n(last - capped)} of the bias = {_n(last)}"
    elif steps.masked is not steps.capped:
        yield f"masked   {_n(last)}: query {i} attends to key {j}"
    yield f"weights  {_softmax(masked[i], j, _sink(call, head))} = {_n(weights[i, j])}"
    if steps.dropped is not None:
        weights = _head(steps, "dropped", head)
        yield f"dropped  {_n(weights[i, j])}"
    if steps.value is not None:
        output = _head(steps, "output", head)[i]
        seen = [n for n, weight in enumerate(weights[i]) if weight]
        shares = _sum((f"{_n(weights[i, n])} * value {n}" for n in seen), "nothing")
        yield f"output   {shares} = [{_sum(map(_n, output), '', ', ')}]"


_MATRICES = ("scores", "scaled", "capped", "masked", "weights")


def scaling(call: Call) -> str:
    """The scaling of the scores: by default they are divided by the root of the head size."""
    D = call.query.shape[-1]
    return f"/ sqrt({D})" if call.scale == 1 / math.sqrt(D) else f"* {call.scale:g}"


def numbers(x: Any) -> np.ndarray:
    """The numbers of x for people to read: float64 on the CPU."""
    if is_tensor(x):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x, np.float64)


def _softmax(row: np.ndarray, j: int, sink: float | None) -> str:
    """The quotient of exponentials; the row's maximum is subtracted, so that none overflows."""
    if row[j] == -math.inf:
        return "nothing is left of exp(-inf)"
    logits = [*row[row > -math.inf], *([] if sink is None else [sink])]
    most = max(logits)
    off = f"{'+' if most < 0 else '-'} {_n(abs(most))}"
    terms = _sum(f"exp({_n(score)} {off})" for score in logits)
    return f"exp({_n(row[j])} {off}) / ({terms})"


def _sink(call: Call, head: tuple[int, ...]) -> float | None:
    if call.sinks is None:
        return None
    return float(numbers(call.sinks)[head[-1] if head else 0])


def _head(steps: Steps, name: str, head: tuple[int, ...]) -> np.ndarray:
    """One head of an array, ``(L, ·)``; fewer key heads and axes of size 1 are shared."""
    array = numbers(getattr(steps, name))
    is_one_query = steps.query.ndim < steps.key.ndim
    if is_one_query and name not in ("key", "value"):
        array = array[..., None, :]
    leading = steps._call.leading + ((steps._call.sizes[1],) if steps._call.heads else ())
    if len(head) != len(leading):
        raise IndexError(
            f"explain: head {head}; one index is needed for each of the leading axes {leading}."
        )
    for n, count in zip(head, leading):
        _index("head", n, count)
    own = (n % all_ * size // all_ for n, size, all_ in zip(head, array.shape, leading))
    return array[tuple(own)]


def _index(name: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise IndexError(f"explain: {name} {index}; there are {count}.")
    return index % count


def _named(index: int, tokens: Sequence[str] | None) -> str:
    return f"{index}" if tokens is None else f"{index} {tokens[index]!r}"


def _sum(terms: Any, empty: str = "0", sign: str = " + ") -> str:
    terms = list(terms)
    if len(terms) > LONGEST_SUM:
        terms = [*terms[: LONGEST_SUM // 2], "...", *terms[-LONGEST_SUM // 2 + 1 :]]
    return sign.join(terms) or empty


def _n(x: float) -> str:
    return f"{x + 0.0:.5g}"  # + 0.0: no minus before a zero
