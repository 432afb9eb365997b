"""The arithmetic behind one attention weight and its gradient, as a line for each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._backends.formula import cap_slope_text, capped_text, is_capped
from regard._base.arrays import dtype_name, is_tensor
from regard._base.errors import a_type
from regard._call.call import Call

if TYPE_CHECKING:
    from regard._showing.gradients import StepsGradients
    from regard._showing.steps import Steps

# Longer sums leave out terms in the middle.
LONGEST_SUM = 6
# Scores that differ by it have exponentials that differ by a factor of e, however large they are.
OF_SCORES = 1.0


def arithmetic(steps: Steps, i: int, j: int, head: tuple[int, ...]) -> Iterator[str]:
    """The lines of ``steps.explain(i, j)``."""
    matrices = {name: _head(steps, name, head) for name in _MATRICES}
    masked, weights = matrices["masked"], matrices["weights"]
    i, j = _index("query", i, len(masked)), _index("key", j, masked.shape[1])
    score, scaled, capped, last = (matrices[name][i, j] for name in _MATRICES[:4])
    q, k = _head(steps, "query", head)[i], _head(steps, "key", head)[j]
    call = steps._call
    yield f"query {_named(i, steps.query_tokens)}, key {_named(j, steps.tokens)}"
    yield f"scores   {_sum(f'{_factor(a, b)}*{_factor(b, a)}' for a, b in zip(q, k))} = {_s(score)}"
    yield f"scaled   {_s(score)} {scaling(call)} = {_s(scaled)}"
    if is_capped(call):
        yield f"capped   {capped_text(call, _s(scaled))} = {_s(capped)}"
    if last == -math.inf:
        yield f"masked   -inf: query {i} does not attend to key {j}"
    elif added := added_names(call):
        names = " and ".join(f"the {name}" for name in added)
        share = f"{_s(last - capped)} of {names}" if math.isfinite(capped) else names
        yield f"masked   {_s(capped)} + {share} = {_s(last)}"
    elif steps.masked is not steps.capped:
        yield f"masked   {_s(last)}: query {i} attends to key {j}"
    yield f"weights  {_softmax(masked[i], j, _sink(call, head))} = {_n(weights[i, j])}"
    if steps.dropped is not None:
        weights = _head(steps, "dropped", head)
        yield f"dropped  {_n(weights[i, j])}"
    if steps.value is not None:
        output = _head(steps, "output", head)[i]
        seen = [n for n, weight in enumerate(weights[i]) if weight]
        shares = _sum((f"{_n(weights[i, n])} * value {n}" for n in seen), "nothing")
        yield f"output   {shares} = {_list(output)}"


def gradient_arithmetic(
    gradients: StepsGradients[Any], i: int, j: int, head: tuple[int, ...]
) -> Iterator[str]:
    """The lines of ``gradients.explain(i, j)``."""
    steps, call = gradients.steps, gradients.steps._call
    masked, weights = (_head(steps, name, head) for name in ("masked", "weights"))
    d_weights, d_masked, d_scaled, d_scores = (
        _head(steps, name, head, gradients)
        for name in ("d_weights", "d_masked", "d_scaled", "d_scores")
    )
    i, j = _index("query", i, len(masked)), _index("key", j, masked.shape[1])
    yield f"query {_named(i, steps.query_tokens)}, key {_named(j, steps.tokens)}"
    yield from _of_weight(gradients, i, j, head)
    seen, name = masked[i] != -math.inf, f"{of_softmax(steps)[0]:9}"  # NaN is seen
    if seen[j]:
        terms = [(w, d) for w, d in zip(weights[i][seen], d_weights[i][seen])]
        row_sum = sum(w * d for w, d in terms)
        # The digits that make the difference are written, and not those of rounding.
        rounding = 1000 * np.finfo(dtype_name(steps.weights)).eps * abs(row_sum)
        unit = max(abs(d_weights[i, j] - row_sum), rounding)
        yield f"row sum    {_sum(f'{_n(w)}*{_n(d)}' for w, d in terms)} = {_n(row_sum, unit)}"
        less = f"{_n(d_weights[i, j], unit)} {_minus(row_sum, unit)}"
        result = f"{_n(d_masked[i, j])}{_meaning(d_masked[i, j])}"
        yield f"{name}  {_n(weights[i, j])} * ({less}) = {result}"
    else:
        yield f"{name}  0: query {i} does not attend to key {j}"
    if is_capped(call):
        slope = cap_slope_text(call, _n(_head(steps, "scaled", head)[i, j]))
        yield f"d_scaled   {_n(d_masked[i, j])} * ({slope}) = {_n(d_scaled[i, j])}"
    yield f"d_scores   {_n(d_scaled[i, j])} {scaling(call)} = {_n(d_scores[i, j])}"
    terms_of_query = _sum((f"{_n(d_scores[i, n])} * key {n}" for n in np.flatnonzero(seen)), "0")
    yield f"d_query    {terms_of_query} = {_list(_head(steps, 'd_query', head, gradients)[i])}"
    yield from _of_key(gradients, j, head)


def of_softmax(steps: Steps[Any, Any]) -> list[str]:
    """The names under which the gradient through the softmax is that of a step."""
    names = ["d_masked"] if steps.masked is not steps.capped else []
    names += ["d_capped"] if steps.capped is not steps.scaled else []
    return names if is_capped(steps._call) else [*names, "d_scaled"]


def sharing(steps: Steps[Any, Any], name: str) -> int:
    """How many query heads, of all batch elements, share a head of ``key`` or ``value``."""
    of_queries, own = (math.prod(n) for n in (_leading(steps), getattr(steps, name).shape[:-2]))
    return of_queries // max(own, 1)


def _of_weight(
    gradients: StepsGradients[Any], i: int, j: int, head: tuple[int, ...]
) -> Iterator[str]:
    """The product of two vectors that is the gradient of a weight, and what dropout makes of it."""
    steps = gradients.steps
    do, v = _head(steps, "d_output", head, gradients)[i], _head(steps, "value", head)[j]
    product = _sum(f"{_n(a)}*{_n(b)}" for a, b in zip(do, v))
    d_weight = _head(steps, "d_weights", head, gradients)[i, j]
    if gradients.d_dropped is None:
        yield f"d_weights  {product} = {_n(d_weight)}"
        return
    d_dropped = _head(steps, "d_dropped", head, gradients)[i, j]
    yield f"d_dropped  {product} = {_n(d_dropped)}"
    if d_dropped and not d_weight:
        yield "d_weights  0: the weight was dropped"
    else:
        yield f"d_weights  {_n(d_dropped)} / {1 - steps._call.dropout:g} = {_n(d_weight)}"


def _meaning(d_score: float) -> str:
    """What the sign of a gradient says to gradient descent."""
    if not d_score or math.isnan(d_score):
        return ""
    loss, score = ("raise", "lowers") if d_score > 0 else ("lower", "raises")
    return (
        f": more of this weight would {loss} the loss, so a step of gradient descent {score} the"
        " score"
    )


def _of_key(gradients: StepsGradients[Any], j: int, head: tuple[int, ...]) -> Iterator[str]:
    """Key and value get a share from each query that attends to them, of every head."""
    steps = gradients.steps
    seen = np.flatnonzero(_head(steps, "masked", head)[:, j] != -math.inf)
    weights = _head(steps, "weights" if steps.dropped is None else "dropped", head)
    d_scores = _head(steps, "d_scores", head, gradients)
    d_output = _head(steps, "d_output", head, gradients)
    for name, what, factors, vectors in (
        ("key", "query", d_scores[seen, j], _head(steps, "query", head)[seen]),
        ("value", "d_output", weights[seen, j], d_output[seen]),
    ):
        terms = _sum((f"{_n(x)} * {what} {n}" for n, x in zip(seen, factors)), "0")
        count = sharing(steps, name)
        others = "1 other that shares" if count == 2 else f"{count - 1} others that share"
        more = f", and with the {others} the {name}" if count > 1 else ""
        own = f" = {_list(factors @ vectors)}" if more else ""
        total = _list(_head(steps, f"d_{name}", head, gradients)[j])
        yield f"{f'd_{name}':9}  {terms}{own}{more} = {total}"


_MATRICES = ("scores", "scaled", "capped", "masked", "weights")


def added_names(call: Call) -> list[str]:
    """The options that add to capped scores."""
    steers = any(edit.factor not in (0, 1) for edit in call.rectangles)
    return ["bias"] * (call.bias is not None) + ["edits"] * steers


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
    logits = [*row[row != -math.inf], *([] if sink is None else [sink])]
    most = float(np.max(logits))  # NaN where one is
    off = _minus(most, OF_SCORES)
    terms = _sum(f"exp({_s(score)} {off})" for score in logits)
    return f"exp({_s(row[j])} {off}) / ({terms})"


def _sink(call: Call, head: tuple[int, ...]) -> float | None:
    if call.sinks is None:
        return None
    return float(numbers(call.sinks)[head[-1] if head else 0])


def _head(
    steps: Steps[Any, Any],
    name: str,
    head: tuple[int, ...],
    gradients: StepsGradients[Any] | None = None,
) -> np.ndarray:
    """One head of an array, ``(L, ·)``; fewer key heads and axes of size 1 are shared."""
    array = numbers(getattr(steps if gradients is None else gradients, name))
    is_one_query = steps.query.ndim < steps.key.ndim
    if is_one_query and name.removeprefix("d_") not in ("key", "value"):
        array = array[..., None, :]
    leading = _leading(steps)
    if len(head) != len(leading):
        raise IndexError(
            f"explain: head {head}; one index is needed for each of the leading axes {leading},"
            f" as in head={(0,) * len(leading)}."
        )
    for n, count in zip(head, leading):
        _index("head", n, count)
    own = (n % all_ * size // all_ for n, size, all_ in zip(head, array.shape, leading))
    return array[tuple(own)]


def _leading(steps: Steps[Any, Any]) -> tuple[int, ...]:
    """The axes of the weights before queries and keys."""
    return steps._call.leading + ((steps._call.sizes[1],) if steps._call.heads else ())


def _index(name: str, index: Any, count: int) -> int:
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise TypeError(f"explain: {name} is {a_type(index)}; an int is needed.")
    if not -count <= index < count:
        raise IndexError(f"explain: {name} {index}; there are {count}.")
    return int(index) % count


def _named(index: int, tokens: Sequence[str] | None) -> str:
    return f"{index}" if tokens is None else f"{index} {tokens[index]!r}"


def _sum(terms: Any, empty: str = "0", sign: str = " + ") -> str:
    terms = list(terms)
    if len(terms) > LONGEST_SUM:
        terms = [*terms[: LONGEST_SUM // 2], "...", *terms[-LONGEST_SUM // 2 + 1 :]]
    return sign.join(terms) or empty


def _minus(x: float, unit: float) -> str:
    return f"{'+' if x < 0 else '-'} {_n(abs(x), unit)}"


def _list(vector: np.ndarray) -> str:
    return f"[{_sum(map(_n, vector), '', ', ')}]"


def _s(score: float) -> str:
    return _n(score, OF_SCORES)


def _factor(x: float, other: float) -> str:
    """A factor of a term of a score, with the digits that the term has."""
    return _n(x, OF_SCORES / abs(other) if other else math.inf)


def _n(x: float, unit: float = math.inf) -> str:
    """Five digits of a number, or up to twelve: those of thousandths of the unit."""
    digits = 5
    if x and math.isfinite(x) and 0 < unit < math.inf:
        digits = max(digits, math.floor(math.log10(abs(x))) - math.floor(math.log10(unit)) + 4)
    return f"{x + 0.0:.{min(digits, 12)}g}"  # + 0.0: no minus before a zero
