"""The backward pass of a small attention written out: the gradient of every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from regard._backends import formula
from regard._base import tables
from regard._base.arrays import accumulating_name, arrays_of, dtype_name, is_tensor
from regard._base.errors import ShapeError, a_type
from regard._base.settings import require_materializable
from regard._base.types import ArrayT
from regard._call.call import Call
from regard._call.options import ARRAYS
from regard._showing.explain import gradient_arithmetic, numbers, of_softmax, scaling, sharing
from regard._showing.steps import Steps, require_unwritten, visible_pairs

__all__ = ["StepsGradients"]

MATRICES = ("d_dropped", "d_weights", "d_masked", "d_capped", "d_scaled", "d_scores")
PROJECTED = ("query", "key", "value")
LEARNED = tuple(f"d_{kind}_{part}" for kind in "wb" for part in PROJECTED)
NAMES = (
    "d_output", *MATRICES, "d_query", "d_key", "d_value", "d_bias", "d_sinks", *LEARNED, "d_inputs",
    "d_context",
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class StepsGradients(Generic[ArrayT]):
    """The gradients of a loss by every step of an attention: ``print(gradients)`` to read them.

    Made by ``steps.backward(grad_output)``, in the order in which they follow from each other. Each
    has the shape of the step that it is named after. Matrices are in float32, or float64 for a
    float64 query; the others have the dtype of their step. Where queries, heads or batch elements
    share an array, its gradient is the sum of theirs. Tensors have no gradient of their own.

    Attributes:
        d_output: ``(..., Hq, Lq, Dv)``, the gradient that was given.
        d_dropped: ``(..., Hq, Lq, Lk)``, ``d_output @ value.T``; None without dropout.
        d_weights: ``(..., Hq, Lq, Lk)``, ``d_output @ value.T``, through the dropout; of masked
            pairs as well, where it has no effect.
        d_masked: ``weights * (d_weights - sum(weights * d_weights))`` with the sum over each row;
            0 where a query may not attend.
        d_capped: the same array: neither bias, edits nor mask changes a gradient.
        d_scaled: through all that is done to scores before the bias; without it, the same array.
        d_scores: d_scaled times the scale.
        d_query: ``(..., Hq, Lq, D)``, ``d_scores @ key``.
        d_key: ``(..., Hkv, Lk, D)``, ``d_scores.T @ query``.
        d_value: ``(..., Hkv, Lk, Dv)``, ``weights.T @ d_output``, with the weights after dropout.
        d_bias: in the shape of the bias, d_masked summed where it is broadcast; or None.
        d_sinks: ``(Hq,)``, or None.
        d_w_query, d_w_key, d_w_value: of the projections, ``inputs.T @ d_query``; None where left
            out.
        d_b_query, d_b_key, d_b_value: of their biases, the sum of the rows; or None.
        d_inputs: ``(..., Lq, d_in)``, or None where there are no inputs.
        d_context: ``(..., Lk, d_in)``, or None.
        steps: the steps of the forward pass.

    Source: Vaswani et al. 2017, equation 1, by the chain rule; Dao et al. 2022, appendix B.2.
    """

    d_output: ArrayT
    d_dropped: ArrayT | None
    d_weights: ArrayT
    d_masked: ArrayT
    d_capped: ArrayT
    d_scaled: ArrayT
    d_scores: ArrayT
    d_query: ArrayT
    d_key: ArrayT
    d_value: ArrayT
    d_bias: ArrayT | None
    d_sinks: ArrayT | None
    d_w_query: ArrayT | None
    d_w_key: ArrayT | None
    d_w_value: ArrayT | None
    d_b_query: ArrayT | None
    d_b_key: ArrayT | None
    d_b_value: ArrayT | None
    d_inputs: ArrayT | None
    d_context: ArrayT | None
    steps: Steps[ArrayT, ArrayT]

    def explain(self, query: int, key: int, *, head: int | tuple[int, ...] = ()) -> str:
        """The arithmetic of one cell, from the gradient of its weight to that of its vectors.

        Args:
            query: row of the weights.
            key: column of the weights.
            head: indices of the leading axes, where there are any.

        Returns:
            A few lines of text, one per step.

        Raises:
            IndexError: no such query, key or head.
            TypeError: one of them is no int.
            RuntimeError: as ``steps.explain``.
        """
        require_unwritten(self.steps, "explain", "arithmetic")
        heads = tuple(head) if isinstance(head, (tuple, list)) else (head,)
        with np.errstate(all="ignore"):  # NaN and inf are valid here
            return "\n".join(gradient_arithmetic(self, query, key, heads))

    def __repr__(self) -> str:
        return repr(self.steps).replace("Steps(", "StepsGradients(", 1)

    def __str__(self) -> str:
        return tables.text(self._tables())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        return tables.rich(self._tables(), options.max_width)

    def _repr_html_(self) -> str:
        return tables.html(self._tables())

    def _tables(self) -> Iterator[tables.Table]:
        """The gradients of the steps that this call has, in order; equal ones are one table."""
        keys, queries = self.steps.tokens, self.steps.query_tokens
        labels: dict[str, Any] = dict.fromkeys(("d_output", "d_query", "d_inputs"), (queries, None))
        labels |= dict.fromkeys(("d_key", "d_value", "d_context"), (keys, None))
        labels |= dict.fromkeys((*MATRICES, "d_bias"), (queries, keys if keys else ()))
        labels["d_sinks"] = (None, ())
        hidden = numbers(self.steps.masked) == -np.inf
        same, formulas = of_softmax(self.steps), _formulas(self)
        for name in NAMES:
            if (array := getattr(self, name)) is None or name not in formulas:
                continue
            rows, columns = labels.get(name, (None, None))
            yield tables.Table(
                " = ".join(same) if name == same[0] else name,
                formulas[name],
                np.atleast_1d(numbers(array)),
                rows,
                columns,
                hidden if name in MATRICES else None,
            )


def backward(steps: Steps[Any, Any], grad_output: Any) -> StepsGradients[Any]:
    """``steps.backward(grad_output)``."""
    _check(steps, grad_output)
    _check_size(steps._call)
    with np.errstate(all="ignore"):  # NaN and inf are valid results here
        chain = _Chain(steps, grad_output)
        found = {"d_output": _detached(grad_output), **chain.matrices(), **chain.vectors()}
        found |= chain.projections(found)
    return StepsGradients(**dict.fromkeys(NAMES) | found, steps=steps)


class _Chain:
    """The chain rule on arrays ``(B, H, L, ·)`` in the accumulating dtype.

    Attributes:
        seen: bool ``(B, Hq, Lq, Lk)``: the pairs that a gradient passes through. Not those of a
            row without any weight, whose gradient may be NaN.
        row_dot: ``(B, Hq, Lq, 1)``: the sum of weights · d_weights in each row.
    """

    def __init__(self, steps: Steps[Any, Any], grad_output: Any) -> None:
        call = steps._call
        arrays = {field.name: _detached(getattr(call, field.name)) for field in ARRAYS}
        self.call = call = call.changed(**arrays)
        self.xp = xp = arrays_of(call.query)
        self.steps = steps
        self.is_one = steps.query.ndim < steps.key.ndim
        B, Hq, _, Lq, Lk = call.sizes
        self.q, self.k, self.v = (xp.wide(x) for x in (call.query, call.key, call.value))
        self.do = xp.wide(_detached(grad_output)).reshape(B, Hq, Lq, self.v.shape[-1])
        visible = visible_pairs(xp, call)
        if visible is None:
            visible = xp.full((B, Hq, Lq, Lk), True, "bool")
        self.seen = visible & ~(xp.largest(self._of("masked"), -1, keep=True) == -np.inf)
        self._through_softmax()

    def _through_softmax(self) -> None:
        """From the output to the scores."""
        xp, call = self.xp, self.call
        B, Hq, _, Lq, Lk = call.sizes
        self.d_dropped = xp.matmul(self.do, self.v.swapaxes(-1, -2))
        keep = formula.kept_weights(xp, call, *(slice(0, n) for n in (B, Hq, Lq, Lk)))
        self.d_weights = formula.dropped(xp, call, keep, self.d_dropped)
        weights, dw = self._of("weights"), xp.hide(self.d_weights, self.seen, 0.0)
        self.row_dot = xp.row_sum(weights * dw)
        self.d_masked = self.d_scaled = xp.hide(weights * (dw - self.row_dot), self.seen, 0.0)
        if formula.is_capped(call):
            slope, _ = formula.cap_derivatives(xp, call, self._of("scaled"))
            self.d_scaled = xp.hide(self.d_masked * slope, self.seen, 0.0)
        self.d_scores = formula.scaled(call, self.d_scaled)

    def _of(self, name: str) -> Any:
        """A matrix of the steps as ``(B, Hq, Lq, Lk)``."""
        B, Hq, _, Lq, Lk = self.call.sizes
        return _detached(getattr(self.steps, name)).reshape(B, Hq, Lq, Lk)

    def matrices(self) -> dict[str, Any]:
        """The gradients ``(..., Hq, Lq, Lk)``; equal ones are one array."""

        def restored(x: Any) -> Any:
            x = self.call.restore(x)
            return x[..., 0, :] if self.is_one else x

        d_weights, d_masked = restored(self.d_weights), restored(self.d_masked)
        return {
            "d_dropped": restored(self.d_dropped) if self.call.dropout else None,
            "d_weights": d_weights,
            "d_masked": d_masked,
            "d_capped": d_masked,
            "d_scaled": restored(self.d_scaled) if formula.is_capped(self.call) else d_masked,
            "d_scores": restored(self.d_scores),
        }

    def vectors(self) -> dict[str, Any]:
        """Those of query, key, value, bias and sinks, each in the shape and dtype of its own."""
        xp, steps, call = self.xp, self.steps, self.call
        dropped = self._of("weights" if steps.dropped is None else "dropped")
        # An unmasked NaN comes back through d_scores; elsewhere it would only spread.
        q, k = (xp.where(xp.isfinite(x), x, 0.0) for x in (self.q, self.k))
        d_query = xp.matmul(self.d_scores, k)
        d_key = xp.matmul(self.d_scores.swapaxes(-1, -2), q)
        seen, do = self.seen.swapaxes(-1, -2), self.do
        d_value = formula.apply(xp, dropped.swapaxes(-1, -2), seen, do)
        found = {
            "d_query": xp.array(steps.query, d_query.reshape(tuple(steps.query.shape))),
            "d_key": self._like(steps.key, self._of_groups(d_key)),
            "d_value": self._like(steps.value, self._of_groups(d_value)),
        }
        if call.bias is not None:
            found["d_bias"] = self._like(steps._options["bias"], self.d_masked)
        if call.sinks is not None:
            found["d_sinks"] = self._sinks(steps._options["sinks"])
        return found

    def _of_groups(self, x: Any) -> Any:
        """``(B, Hq, Lk, ·)`` summed over the query heads that share a key head."""
        B, Hq, Hkv, _, Lk = self.call.sizes
        return x.reshape(B, Hkv, Hq // max(Hkv, 1), Lk, x.shape[-1]).sum(2)

    def _like(self, given: Any, x: Any) -> Any:
        """``(B, H, ...)`` in the shape and dtype of what the caller gave."""
        return self.xp.array(given, _summed(self.call.restore(x), tuple(given.shape)))

    def _sinks(self, given: Any) -> Any:
        """The sink's value is 0, so that its d_weights are; its softmax is that of its row."""
        xp, sinks = self.xp, self.call.sinks
        _, maximum, total = formula.log_softmax(xp, self._of("masked"), sinks)
        empty = maximum == -np.inf
        weight = xp.exp(xp.wide(sinks)[:, None, None] - maximum) / total
        d_sink = xp.where(empty, 0.0, -weight * self.row_dot)
        return xp.array(given, _summed(d_sink, (len(sinks), 1, 1)).reshape(tuple(given.shape)))

    def projections(self, found: dict[str, Any]) -> dict[str, Any]:
        """Those of matrices and biases, and of the inputs, from d_query, d_key and d_value."""
        xp, steps, given = self.xp, self.steps, self.steps._projections
        learned: dict[str, Any] = {}
        sums: dict[str, Any] = {}
        for part, (w, b) in given.items():
            name = "inputs" if part == "query" or steps.context is None else "context"
            x = self._rows(name)
            dy = xp.wide(found[f"d_{part}"])
            dy = dy[..., None, :] if self.is_one and part == "query" else dy
            dx = dy
            if w is not None:
                d_w = _summed(x.swapaxes(-1, -2) @ dy, tuple(w.shape))
                learned[f"d_w_{part}"] = xp.array(w, d_w)
                dx = dy @ xp.wide(_detached(w)).swapaxes(-1, -2)
            if b is not None:
                rows = (*b.shape[:-1], 1, b.shape[-1])
                learned[f"d_b_{part}"] = xp.array(b, _summed(dy, rows).reshape(tuple(b.shape)))
            dx = _summed(dx, tuple(x.shape))
            sums[f"d_{name}"] = dx if f"d_{name}" not in sums else sums[f"d_{name}"] + dx
        for name, dx in sums.items():
            x = getattr(steps, name.removeprefix("d_"))
            learned[name] = xp.array(x, dx.reshape(tuple(x.shape)))
        return learned

    def _rows(self, name: str) -> Any:
        """Inputs or context as they were projected: with a length axis, and one for the heads."""
        x = self.xp.wide(_detached(getattr(self.steps, name)))
        x = x[None] if x.ndim == 1 else x
        return x[..., None, :, :] if _has_heads(self.steps) else x


def _has_heads(steps: Steps[Any, Any]) -> bool:
    """Whether a projection has a matrix for each head."""
    return any(w is not None and w.ndim == 3 for w, _ in steps._projections.values())


def _detached(x: Any) -> Any:
    return x.detach() if is_tensor(x) else x


def _summed(x: Any, shape: tuple[int, ...]) -> Any:
    """x summed over the axes in which an array of that shape is broadcast to it."""
    more = x.ndim - len(shape)
    axes = [a for a, n in enumerate(x.shape) if a < more or (shape[a - more] == 1 and n != 1)]
    return (x.sum(tuple(axes)) if axes else x).reshape(shape)


def _check(steps: Steps[Any, Any], grad: Any) -> None:
    """One number for each of the output, of its library, dtype and device."""
    output = steps.output
    if output is None:
        raise ValueError(
            "backward: these steps have no value, and so no output. Pass one, as in"
            " regard.steps(query, key, value)."
        )
    needed = f"{_kind(output)} {tuple(output.shape)}, as steps.output"
    if grad is None:
        library = "torch" if is_tensor(output) else "np"
        raise TypeError(
            "backward: grad_output is None; the gradient of a loss with respect to the output is"
            f" needed, {needed}. For the sum of the output as the loss it is"
            f" {library}.ones_like(steps.output)."
        )
    if not _is_dense(grad):
        raise TypeError(
            f"backward: grad_output is {a_type(grad, whole=True)}; an array is needed, {needed}."
        )
    if _kind(grad) != _kind(output):
        way_out = f"np.asarray(grad_output, {dtype_name(output)!r})"
        if is_tensor(output):
            way_out = "torch.as_tensor(grad_output).to(steps.output)"
        raise TypeError(
            f"backward: grad_output is {_kind(grad)} and the output {_kind(output)}; both must be"
            f" of one library, dtype and device. Convert it, as in {way_out}."
        )
    if tuple(grad.shape) != tuple(output.shape):
        raise ShapeError(
            f"backward: grad_output has shape {tuple(grad.shape)}; {tuple(output.shape)} is needed,"
            " one number for each of steps.output."
        )
    require_unwritten(steps, "backward", "gradient")


def _check_size(call: Call) -> None:
    B, Hq, _, Lq, Lk = call.sizes
    require_materializable(
        "steps.backward: the gradients of weights, scores and what lies between them",
        (3 + formula.is_capped(call) + bool(call.dropout), B, Hq, Lq, Lk),
        8 * np.dtype(accumulating_name(call.query)).itemsize,
        "Write out one head and a part of the text",
    )


def _is_dense(x: Any) -> bool:
    if is_tensor(x):
        return str(x.layout) == "torch.strided"
    if type(x) is np.ndarray:
        return True
    return isinstance(x, np.ndarray) and not isinstance(x, (np.ma.MaskedArray, np.matrix))


def _kind(x: Any) -> str:
    return f"torch {dtype_name(x)} on {x.device}" if is_tensor(x) else f"NumPy {dtype_name(x)}"


def _formulas(gradients: StepsGradients[Any]) -> dict[str, str]:
    """By the name of each gradient that has a table of its own."""
    steps, call = gradients.steps, gradients.steps._call
    same = of_softmax(steps)
    found = {"d_output": "", "d_dropped": "d_output @ value.T", "d_weights": "d_output @ value.T"}
    if steps.dropped is not None:
        kept = f"d_dropped / {1 - call.dropout:g}"
        found["d_weights"] = f"{kept} where the weight was kept, 0 where it was dropped"
    found[same[0]] = "weights * (d_weights - the sum of weights * d_weights in its row)"
    if formula.is_capped(call):
        found["d_scaled"] = f"{same[-1]} * ({formula.cap_slope_text(call, 'scaled')})"
    found["d_scores"] = f"d_scaled {scaling(call)}"
    found["d_query"] = "d_scores @ key"
    weights = "weights" if steps.dropped is None else "dropped"
    for name, product in (("key", "d_scores.T @ query"), ("value", f"{weights}.T @ d_output")):
        count = sharing(steps, name)
        more = f", summed over the {count} heads that share it" if count > 1 else ""
        found[f"d_{name}"] = product + more
    found["d_bias"] = "d_masked"
    if gradients.d_bias is not None and gradients.d_bias.shape != gradients.d_masked.shape:
        found["d_bias"] += ", summed where the bias is broadcast"
    found["d_sinks"] = (
        "minus the sum, over the queries, of the sink's weight * the sum of weights * d_weights"
    )
    return found | _projection_formulas(steps)


def _projection_formulas(steps: Steps[Any, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    terms: dict[str, list[str]] = {"inputs": [], "context": []}
    for part, (w, b) in steps._projections.items():
        name = "inputs" if part == "query" or steps.context is None else "context"
        terms[name].append(f"d_{part}" + ("" if w is None else f" @ w_{part}.T"))
        found |= {} if w is None else {f"d_w_{part}": f"{name}.T @ d_{part}"}
        found |= {} if b is None else {f"d_b_{part}": f"sum of the rows of d_{part}"}
    heads = ", summed over the heads" if _has_heads(steps) else ""
    return found | {f"d_{name}": " + ".join(sums) + heads for name, sums in terms.items() if sums}
