"""Random calls of attention, its gradient and its weights, compared with float64.

    python tests/fuzz.py --seconds 30 --seed 0
    python tests/fuzz.py --seed 0 --only 137       one of them again
    python tests/fuzz.py --backend triton --device cuda --seconds 120

Each call is asked of the kernels, and of the other backends where these refuse. REGARD_TARGET
chooses the kernels' instruction set. Another backend gets tensors alone, of its dtypes; with
TRITON_INTERPRET=1 short ones.
"""

import argparse
import collections
import functools
import os
import sys
import time
import traceback
import warnings
from unittest import mock

import numpy as np

import regard
from bounds import PRECISIONS, Truth, assert_between, assert_within
from operands import Operand
from random_calls import calls, draw
from regard._backends import kernel
from regard._weights.divergence_gradients import DivergenceGradient

ASKED = {"backend": "kernel", "device": "cpu"}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MOST_PRODUCTS, MOST_HEADS = 5e4, 6  # of a call that is interpreted; heads of all its batch
QUESTIONS = (
    "matrix", "index", "per_query", "received", "topk", "strongest", "pool", "summary", "products",
    "sums", "pairs", "matrices",
)  # fmt: skip
ASKED_INTERPRETED = 4  # of them, of a call whose weights are interpreted


def to_numpy(x):
    """Any result as float64 or int64."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return x.double().numpy() if x.is_floating_point() else x.numpy()
    return np.asarray(x, np.float64 if np.asarray(x).dtype.kind == "f" else np.int64)


def dtype_name(x):
    return str(x.dtype).removeprefix("torch.")


def place(x, library):
    """An option or array as the caller would pass it."""
    if isinstance(x, tuple):
        return tuple(place(part, library) for part in x)
    return x.place(library, ASKED["device"]) if isinstance(x, Operand) else x


def widened(x, library):
    """The same in float64, contiguous: what the truth is computed from."""
    if isinstance(x, tuple):
        return tuple(widened(part, library) for part in x)
    if not isinstance(x, Operand):
        return x
    if library == "numpy":
        return np.array(x.x)
    import torch

    return torch.from_numpy(np.array(x.x))


def ask(*arrays, backend=None, **options):
    """What attention gives, and whether the backend that is fuzzed gave it."""
    backend = backend or ASKED["backend"]
    try:
        return regard.attention(*arrays, backend=backend, **options), True
    except regard.UnsupportedError:
        return regard.attention(*arrays, backend="auto", **options), False


class Comparison:
    """One call, asked in every way that it is meant for."""

    def __init__(self, call):
        self.call = call
        self.placed = {name: place(x, call.library) for name, x in self._given().items()}
        self.arrays = [self.placed[name] for name in ("query", "key", "value")]
        self.options = {name: self.placed[name] for name in call.options}
        self.precision = PRECISIONS[call.dtype]
        self.served = {}  # what was asked: whether the kernels answered
        self.rng = np.random.default_rng(call.questions)

    def _given(self):
        return {**self.call.arrays, **self.call.options}

    def run(self):
        """Raises AssertionError where an answer is wrong."""
        self._truth()
        self.output()
        if self.call.weights:
            self.weights()
        if self.call.gradient:
            self.gradient()
            if self.call.questions % 4 == 0:  # of all calls it would take longer than all else
                self._divergence_gradient()
        self.nothing_was_written()

    def is_refused(self):
        """By every backend and by the weights, in words and not with wrong numbers."""
        weights = {n: x for n, x in self.options.items() if n not in ("dropout", "seed")}
        asked = {
            name: functools.partial(ask, *self.arrays, backend=name, **self.options)
            for name in (ASKED["backend"], "torch", "reference")
        }
        asked["weights"] = lambda: regard.AttentionWeights(*self.arrays[:2], **weights).lse
        for what, question in asked.items():
            try:
                said = f"an answer: {question()}"
            except ValueError as error:
                said = str(error)
            assert said.startswith("attention: query_start is "), f"{what} gave {said}"

    def _truth(self):
        call = self.call
        bias, sinks, scale = (call.given(name) for name in ("bias", "sinks", "scale"))
        q, k, self.v = (call.heads(name) for name in ("query", "key", "value"))
        self.truth = Truth(
            q, k, call.visible(), call.starts, self.precision,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            softcap=call.given("softcap"),
            bias=None if bias is None else call.pairs(bias),
            sinks=None if sinks is None else np.reshape(sinks, call.sizes[1:2]),
            edits=call.added_logs() if "edits" in call.options else None,
        )  # fmt: skip

    def _wide(self, backend):
        """The call in float64, in the library that the backend takes."""
        library = "torch" if backend == "torch" else "numpy"
        given = {name: widened(x, library) for name, x in self._given().items()}
        arrays = [given.pop(name) for name in ("query", "key", "value")]
        return arrays, given

    def output(self):
        arrays, options = self._wide("reference")
        exact = regard.attention(*arrays, backend="reference", **options)
        found, self.served["output"] = ask(*self.arrays, **self.options)
        self._compare_output("output", found, exact)
        self.exact = exact

    def _compare_output(self, what, found, exact):
        call, query = self.call, self.arrays[0]
        assert type(found) is type(query), f"{what} is a {type(found)}"
        assert dtype_name(found) == call.dtype, f"{what} is {dtype_name(found)}"
        shape = (*call.sizes[:2], *exact.shape[-2:])
        folded = exact.reshape(shape)
        bound, unsure = self.truth.output_bound(self.v, folded, call.given("dropout") or 0.0)
        assert found.shape == exact.shape, f"{what} has shape {tuple(found.shape)}"
        assert_within(what, to_numpy(found).reshape(shape), folded, bound, unsure)

    def gradient(self):
        call = self.call
        arrays, options = self._wide("torch")
        exact = self._differentiate("torch", arrays, options, widened(call.upstream, "torch"))[1]
        placed = self.options, place(call.upstream, "torch")
        out, found, served = self._differentiate(None, self.arrays, *placed)
        self.served["gradient"] = served
        self._compare_output("output with a gradient", out.detach(), self.exact)
        upstream = call.upstream.x.reshape(*call.sizes[:2], call.sizes[3], self.v.shape[-1])
        dropout = call.given("dropout") or 0.0
        folded = self.exact.reshape(*call.sizes[:2], *self.exact.shape[-2:])
        overflow = self.truth.output_bound(self.v, folded, dropout)[1].any(-1, keepdims=True)
        bounds = self.truth.gradient_bounds(self.v, upstream, dropout, overflow)
        for name, mine, right in zip(call.gradient, found, exact):
            operand = self._given()[name]
            assert dtype_name(mine) == operand.dtype, f"gradient of {name} is {dtype_name(mine)}"
            bound, unsure = (self._summed(name, x, operand.x.shape) for x in bounds[name])
            self._compare_gradient(name, operand.dtype, to_numpy(mine), to_numpy(right), bound,
                                   unsure > 0)  # fmt: skip

    def _divergence_gradient(self):
        """Of the mean over the heads from one of them, in float64: by the kernels as by blocks."""
        import torch

        arrays, options = self._wide("torch")
        options = {n: x for n, x in options.items() if n not in ("dropout", "seed", "backend")}
        leaves = [x.detach().clone().requires_grad_() for x in arrays[:2]]
        if 0 in self.call.sizes or 0 in leaves[0].shape or leaves[0].ndim < 3:
            return
        plain = torch.stack([torch.nan_to_num(x.detach()).abs().max() for x in leaves])
        kind = str(self.rng.choice(["kl", "reverse_kl", "jensen_shannon", "total_variation"]))

        def gradients():
            weights = regard.AttentionWeights(*leaves, **options)
            found = regard.divergence(weights.mix(), weights.mix(heads=[0]), kind)
            # Where the two agree to the rounding, the total variation has no one gradient.
            found = torch.where(found.isfinite() & (found > 1e-12), found, 0.0)
            return torch.autograd.grad(found.sum(), leaves), abs(found.detach()).max().item()

        found, largest = gradients()
        with mock.patch.object(DivergenceGradient, "by_backend", return_value=None):
            exact, _ = gradients()
        size = max(1, min(plain.max().item(), 1e30))
        scale = max(1, abs(self.call.given("scale") or 0))  # a factor of each gradient
        bound = 1e-9 * size**3 * max(1, largest) * max(self.call.sizes) * scale
        for name, mine, right in zip(("query", "key"), found, exact):
            if right.isfinite().all():
                assert_within(f"{kind} gradient of {name}", to_numpy(mine), to_numpy(right), bound)

    def _compare_gradient(self, name, dtype, mine, right, bound, unsure):
        """In the dtype of the array, which may be narrower than the query's."""
        own, p = PRECISIONS[dtype], self.precision
        with np.errstate(all="ignore"):
            size = abs(np.nan_to_num(right))
            bound = bound + (2 * p.unit + p.stored + own.unit + own.stored) * size
            bound = bound + 4 * (own.flushed + p.flushed + p.smallest * self._largest())
            unsure = unsure | ~(size + bound < min(own.stored_largest, p.largest / 8))
        assert_within(f"gradient of {name}", mine, right, bound, unsure)

    def _largest(self):
        """The largest number that an underflow may be multiplied by."""
        given = [self.call.arrays[name].x for name in ("query", "key", "value")]
        return 1e3 * max(abs(np.nan_to_num(x, posinf=0, neginf=0)).max(initial=1) for x in given)

    def _differentiate(self, backend, arrays, options, upstream):
        import torch

        given = dict(zip(("query", "key", "value"), arrays)) | options
        leaves = {name: given[name].detach().requires_grad_() for name in self.call.gradient}
        given |= leaves
        arrays = [given.pop(name) for name in ("query", "key", "value")]
        out, served = ask(*arrays, backend=backend, **given)
        inputs = list(leaves.values())
        assert out.requires_grad, "the output carries no gradient"
        found = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
        found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]
        return out, found, served

    def _summed(self, name, x, shape):
        """A bound ``(B, Hq, ...)`` summed to an array that is broadcast or shared by heads."""
        call = self.call
        x = x.astype(float)
        B, Hq, Hkv, _, _ = call.sizes
        if name == "sinks":
            return np.broadcast_to(x, call.sizes[:2] + x.shape[2:]).sum((0, 2)).reshape(shape)
        if name in ("key", "value"):
            x = x.reshape(B, Hkv, Hq // max(Hkv, 1), *x.shape[2:]).sum(2)
        two = call.arrays["query"].x.ndim == 2
        x = x[0, 0] if two else x.reshape(*call.leading, *x.shape[1:])
        x = x.sum(tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
        for axis, n in enumerate(shape):
            if n == 1 and x.shape[axis] != 1:
                x = x.sum(axis, keepdims=True)
        return np.broadcast_to(x, shape)

    def weights(self):
        call = self.call
        options = {**self.options, "return_weights": True}
        (out, weights), self.served["weights"] = ask(*self.arrays, **options)
        self._compare_output("output with weights", out, self.exact)
        more = {n: x for n, x in self.options.items() if n not in ("dropout", "seed")}
        if self.served["weights"]:
            more["backend"] = ASKED["backend"]
        self.alone = lambda: regard.AttentionWeights(*self.arrays[:2], **more)
        if self.rng.random() < 0.3:
            weights = self.alone()
        public = (*call.leading, *call.sizes[1:2], *call.sizes[3:])
        self.public = public[-2:] if call.arrays["query"].x.ndim == 2 else public
        assert weights.shape == self.public, f"weights have shape {weights.shape}"
        names = QUESTIONS
        if INTERPRETED:  # all would take longer than ten calls
            some = self.rng.choice(len(names), ASKED_INTERPRETED, replace=False)
            names = [names[n] for n in sorted(some)]
        for name in names:
            getattr(self, f"_{name}")(weights)

    def _folded(self, x):
        """A result ``(..., Hq, ...)`` as ``(B, Hq, ...)``, its type checked."""
        same_library = hasattr(x, "detach") == (self.call.library == "torch")
        wide = "float64" if self.call.dtype == "float64" else "float32"
        assert same_library, f"weights gave a {type(x)}"
        assert dtype_name(x) in (wide, "int64"), f"weights gave {dtype_name(x)}"
        assert x.shape[: len(self.public) - 2] == self.public[:-2], f"weights gave {x.shape}"
        return to_numpy(x).reshape(*self.call.sizes[:2], *x.shape[len(self.public) - 2 :])

    def _matrix(self, weights):
        arrays, options = self._wide("reference")
        options = {n: x for n, x in options.items() if n not in ("dropout", "seed")}
        wide = np.asarray(regard.AttentionWeights(*arrays[:2], **options))
        truth, found = self.truth, np.asarray(weights)
        assert found.shape == self.public, f"the matrix has shape {found.shape}"
        for what, x in (("matrix", found), ("float64 matrix", wide)):
            x = x.astype(float).reshape(truth.weights.shape)
            assert_within(what, x, truth.weights, truth.error, truth.unsure)
        self._row_sums(found.astype(float).reshape(truth.weights.shape))

    def _row_sums(self, weights):
        """They are 1 within 10⁻⁶, whatever the scores, but for what the sink takes."""
        truth, known = self.truth, self._known_rows() & ~self.truth.empty[..., 0]
        sums = weights.sum(-1) + np.where(truth.empty, 0.0, truth.sink_weight)[..., 0]
        bound = (1e-6 + truth.sink_error)[..., 0]
        assert_within("row sum", sums[known], np.ones(known.sum()), bound[known])

    def _index(self, weights):
        """A random block by ints and slices."""
        index = tuple(self._pick(n) for n in self.public)
        if self.rng.random() < 0.3:
            index = (..., *index[-int(self.rng.integers(1, len(index) + 1)) :])
        unsure = np.broadcast_to(self.truth.unsure, self.truth.weights.shape)
        exact = (self.truth.weights, self.truth.error, unsure)
        right, bound, unsure = (x.reshape(self.public)[index] for x in exact)
        found = to_numpy(weights[index])
        right, bound, unsure, found = map(np.asarray, (right, bound, unsure, found))
        assert_within(f"weights[{index}]", found, right, bound, unsure)

    def _pick(self, n):
        if n and self.rng.random() < 0.4:
            return int(self.rng.integers(-n, n))
        ends = [None, *(int(x) for x in self.rng.integers(-n - 1, n + 2, 2))]
        start, stop = self.rng.choice(np.array(ends, object), 2)
        return slice(start, stop, [None, 1, 2, -1, -3][int(self.rng.integers(5))])

    def _per_query(self, weights, summary=None):
        truth, unsure = self.truth, self.truth.unsure[..., 0]
        ask_for = summary or weights
        entropy, distance = (x if summary else x() for x in (ask_for.entropy, ask_for.distance))
        lse, error = truth.lse[..., 0], truth.lse_error[..., 0]
        assert_within("lse", self._folded(ask_for.lse), lse, error, unsure)
        assert_within("entropy", self._folded(entropy), *truth.entropy(), unsure)
        assert_within("distance", self._folded(distance), *truth.distance(), unsure)

    def _received(self, weights):
        for how in ("sum", "mean", "max", "seen"):
            self._compare_received(how, weights.received(how))

    def _compare_received(self, how, found):
        unsure = (self.truth.unsure & self.truth.visible).any(-2)
        exact, bound = self.truth.received(how)
        if how != "max" and ASKED["backend"] == "triton":  # sums of 32 rows or more, of 2^-40
            bound = bound + 2.0**-40 * (1 + self.public[-2] // 32)
        assert_within(f"received({how!r})", self._folded(found), exact, bound, unsure)

    def _known_rows(self):
        """``(B, Hq, Lq)``: rows that are numbers and not unsure."""
        return ~self.truth.unsure[..., 0] & ~np.isnan(self.truth.weights).any(-1)

    def _topk(self, weights):
        k = int(self.rng.integers(0, min(12, self.public[-1]) + 1))
        self._compare_topk(k, weights.topk(k))

    def _compare_topk(self, k, found):
        values, indices = (self._folded(x) for x in found)
        w, e, known = self.truth.weights, self.truth.error, self._known_rows()
        assert indices.shape == values.shape == (*known.shape, k), f"topk gave {values.shape}"
        self._compare_largest(f"topk({k})", values[known], indices[known], w[known], e[known])

    def _compare_largest(self, what, values, indices, w, e):
        """The largest of each row of w, and where they are: ties may come in any order."""
        right = -np.sort(-w, axis=-1)[:, : values.shape[-1]]
        assert_within(f"{what} values", values, right, e.max(-1, keepdims=True, initial=0.0))
        rounding = 4 * self.precision.unit * values[:, 1:]  # two scores may round to either order
        assert (np.diff(values) <= rounding).all(), f"{what} values are not in order"
        assert ((indices >= 0) & (indices < w.shape[-1])).all(), f"{what}: index out of range"
        assert (np.diff(np.sort(indices)) > 0).all(), f"{what}: an index comes twice"
        at, error = (np.take_along_axis(x, indices, -1) for x in (w, e))
        assert_within(f"{what} at its indices", values, at, error)

    def _strongest(self, weights):
        n = int(self.rng.integers(0, 30))
        self._compare_strongest(n, weights.strongest(n))

    def _compare_strongest(self, n, found):
        queries, keys, values = (self._folded(x) for x in found)
        Lq, Lk = self.public[-2:]
        n = min(n, Lq * Lk)
        assert queries.shape == keys.shape == values.shape == (*self.call.sizes[:2], n)
        for at in np.ndindex(*self.call.sizes[:2]):
            if self.truth.unsure[at].any():
                continue
            none = queries[at] == -1
            assert ((keys[at] == -1) == none).all(), "strongest: a query without a key"
            assert (values[at][none] == 0).all(), "strongest: a weight without a query"
            w, e = (
                np.nan_to_num(x[at]).reshape(1, -1) for x in (self.truth.weights, self.truth.error)
            )
            right = -np.sort(-w, axis=-1)[:, :n]
            assert_within("strongest", values[at][None], right, e.max(initial=0.0))
            some = ~none
            indices = (queries[at] * Lk + keys[at])[some][None]
            assert (keys[at][some] < Lk).all(), "strongest: key out of range"
            right_there = values[at][some][None]
            self._compare_largest("strongest", right_there, indices, w, e)

    def _pool(self, weights):
        for how in ("max", "mass"):
            size = tuple(int(n) for n in self.rng.integers(1, 40, 2))
            rows, columns = (self._span(n) for n in self.public[-2:])
            found = weights.pool(size, how, rows, columns)
            self._compare_pool(size, how, rows, columns, found)
        if self.rng.random() < 0.3:  # of rows that nothing is known of
            found = self.alone().pool(size, "max", rows)
            self._compare_pool(size, "max", rows, slice(None), found)

    def _span(self, n):
        if self.rng.random() < 0.4:
            return slice(None)
        start, stop = sorted(int(x) for x in self.rng.integers(0, n + 1, 2))
        step = int(self.rng.integers(2, 9)) if self.rng.random() < 0.3 else None
        return slice(start, stop, step)

    def _compare_pool(self, size, how, rows, columns, found):
        what = f"pool({size}, {how!r}, {rows}, {columns})"
        assert_between(what, self._folded(found), *self.truth.pool(size, how, rows, columns))

    def _summary(self, weights):
        topk, strongest = (int(n) for n in self.rng.integers(0, 12, 2))
        size = tuple(int(n) for n in self.rng.integers(1, 40, 2))
        found = weights.summary(topk=topk, strongest=strongest, pool=size)
        self._per_query(weights, found)
        self._compare_received("sum", found.received)
        self._compare_topk(min(topk, self.public[-1]), found.topk)
        self._compare_strongest(strongest, found.strongest)
        self._compare_pool(size, "max", slice(None), slice(None), found.pooled)

    def _products(self, weights):
        """``W @ x`` and ``Wᵀ @ y`` with vectors of any sizes."""
        Lq, Lk = self.public[-2:]
        columns = int(self.rng.choice([1, 1, 2, 3, 4, 9, 17]))
        x, y = (self.rng.normal(size=(n, columns)).astype("f4") for n in (Lk, Lq))
        x, y = (z * np.float32(10.0) ** self.rng.integers(-3, 4, z.shape) for z in (x, y))
        given = [x, y]
        if self.call.library == "torch":
            from torch import from_numpy

            given = [from_numpy(z).to(ASKED["device"]) for z in (x, y)]
        forms = {
            "weights @ x": (weights @ given[0], x, False),
            "weights.T @ y": (weights.T @ given[1], y, True),
        }
        for what, (found, other, transposed) in forms.items():
            exact, bound, unsure = self.truth.product(other.astype(float), transposed)
            assert_within(what, self._folded(found), exact, bound, unsure)

    def _sums(self, weights):
        """Of some keys, of blocks, and along diagonals."""
        Lq, Lk = self.public[-2:]
        keys = self.rng.random(Lk) < 0.5
        expected = self.truth.sums(np.where(keys, np.arange(Lq)[:, None], -1)[None], Lq, "sum")
        assert_within("mass", self._folded(weights.mass(keys)), *expected)
        ids = [self.rng.integers(-1, int(self.rng.integers(1, 20)), n) for n in (Lq, Lk)]
        if self.rng.random() < 0.5:
            ids = [np.sort(x) for x in ids]
        counts = [x.max(initial=-1) + 1 for x in ids]
        cells = np.where(ids[0] < 0, -1, ids[0] * counts[1])[:, None] + ids[1]
        cells = np.where((ids[0] < 0)[:, None] | (ids[1] < 0), -1, cells)[None]
        for how in ("sum", "max"):
            found = self._folded(weights.blocks(*ids, how))
            count = int(np.prod(counts))
            expected = self.truth.sums(cells, count, how)
            assert_within(f"blocks(how={how!r})", found.reshape(*found.shape[:2], count), *expected)
        distances, values = (to_numpy(x) for x in weights.diagonals())
        values = self._folded(weights.diagonals().values)
        starts = np.asarray(self.call.starts)[:, None, None]
        apart = starts + np.arange(Lq)[:, None] - np.arange(Lk)
        cells = np.searchsorted(distances, apart)
        known = np.append(distances, np.iinfo(np.int64).max)[cells] == apart
        assert (known[:, None] | ~self.truth.visible).all(), "a distance is missing"
        expected = self.truth.sums(np.where(known, cells, -1), len(distances), "sum")
        assert_within("diagonals", values, *expected)

    def _pairs(self, weights):
        """Some of them, which have the bits of the matrix where the kernels answer."""
        Lq, Lk = self.public[-2:]
        i, j = (self.rng.integers(-n, n, 30 if Lq and Lk else 0) for n in (Lq, Lk))
        found = self._folded(weights.at(i, j))
        pairs = (self.truth.weights, self.truth.error, self.truth.unsure & self.truth.visible)
        assert_within("at", found, *(x[..., i, j] for x in pairs))
        if weights._statistics.backend.name == "kernel":
            whole = to_numpy(weights[...]).reshape(self.truth.weights.shape)
            same = np.array_equal(found, whole[..., i, j], equal_nan=True)
            assert same, "at: other bits than those of the matrix"

    def _matrices(self, weights):
        """An effect, a mix or a difference: reduced by the kernels as in blocks of rows.

        One of them for each call: what they are asked takes longer than all else that a call is.
        """
        kinds = "knockout", "contribution", "relevance", "gradient", "change"
        value = self.arrays[2]
        g = self.rng.standard_normal((*weights.shape[:-1], value.shape[-1]))
        plain = tuple(range(g.ndim)), (1,) * g.ndim, (0,) * g.ndim
        gradient = place(Operand(g, self.call.dtype, *plain), self.call.library)
        kind, which = str(self.rng.choice(kinds)), int(self.rng.integers(4))
        gradient = None if kind == "change" else gradient
        if which == 0 or weights.ndim == 2 or not self.call.sizes[1]:
            matrix = weights.effects(value, gradient, kind)
        elif which == 1:
            matrix = weights.mix(coefficients=self.rng.standard_normal(self.call.sizes[1]))
        elif which == 2:
            matrix = regard.mix([weights.effects(value, gradient, kind), weights], [1, -2])
        else:
            mean = regard.mix([weights.mix()] * 2)
            self._compare_divergences(regard.compare(mean, weights.mix(heads=[-1])))
            return
        sizes = abs(np.nan_to_num(self.v.astype(float), posinf=0.0, neginf=0.0))
        scale = value.shape[-1] * abs(g).max(initial=0.0) * sizes.max(initial=0.0)
        if kind == "change":  # blocks of rows subtract squares in float64, which the kernels do not
            exact = 1e5 if dtype_name(matrix) == "float64" else 1.0
            scale = exact * value.shape[-1] * sizes.max(initial=0.0)
        self._compare_matrix(matrix, max(1.0, scale))

    def _compare_matrix(self, matrix, scale):
        """What the kernels reduce against the numbers themselves."""
        Lq, Lk = matrix.shape[-2:]
        count = int(np.prod(matrix.shape[:-2]))
        exact = np.asarray(matrix).astype(float).reshape(count, Lq, Lk)
        finite = np.isfinite(exact).all()
        bound = self._unit_of(matrix) * scale
        k, n = (int(x) for x in self.rng.integers(0, 80, 2))
        size = tuple(int(x) for x in self.rng.integers(1, 40, 2))
        top, strong = matrix.topk(min(k, Lk)), matrix.strongest(n)
        sums, largest = matrix.received(), matrix.received("max")
        pooled, means = matrix.pool(size, ("max", "mass"))
        if not finite:
            return
        values, keys = (to_numpy(x).reshape(count, Lq, x.shape[-1]) for x in top)
        at_keys = np.take_along_axis(exact, keys, -1)
        assert_within("topk of pairs", values, at_keys, bound)
        sizes = -np.sort(-abs(exact), -1)[..., : min(k, Lk)]
        assert_within("sizes of topk of pairs", abs(values), sizes, bound)
        i, j, values = (to_numpy(x).reshape(count, x.shape[-1]) for x in strong)
        flat = exact.reshape(count, Lq * Lk)
        found = np.where(i < 0, 0.0, np.take_along_axis(flat, np.maximum(i * Lk + j, 0), -1))
        assert_within("strongest pairs", values, found, bound)
        sizes = -np.sort(-abs(flat), -1)[:, : values.shape[1]]
        assert_within("sizes of the strongest pairs", abs(values), sizes, bound)
        self._compare_columns(exact, bound, to_numpy(sums), to_numpy(largest))
        self._compare_pictures(matrix, size, to_numpy(pooled), to_numpy(means), bound)

    def _compare_columns(self, exact, bound, sums, largest):
        Lq, Lk = exact.shape[1:]
        sums, largest = (x.reshape(len(exact), Lk) for x in (sums, largest))
        assert_within("received of pairs", sums, exact.sum(1), bound * Lq)
        assert_within("largest of pairs", abs(largest), abs(exact).max(1, initial=0.0), bound)

    def _compare_pictures(self, matrix, size, pooled, means, bound):
        """With those of its blocks of rows."""
        with mock.patch.object(type(matrix), "_backend", None):
            exact = [to_numpy(x) for x in matrix.pool(size, ("max", "mass"))]
        assert_within("heatmap of pairs", abs(pooled), abs(exact[0]), bound)
        assert_within("mean heatmap of pairs", means, exact[1], bound)

    def _unit_of(self, matrix):
        """The error of a number of a matrix, as a share of its terms."""
        return 1e-12 if dtype_name(matrix) == "float64" else 2e-5

    def _compare_divergences(self, comparison):
        found = comparison.divergences(4)
        with mock.patch.object(type(comparison), "_backend", None):
            exact = comparison.divergences(4)
        for name, x, right in zip(found._fields, map(to_numpy, found), map(to_numpy, exact)):
            if name == "overlap":  # of equals any
                assert ((x >= 0) & (x <= 1)).all(), "overlap is no share"
                continue
            bound = self._unit_of(comparison) * np.maximum(1, abs(np.nan_to_num(right)))
            assert_within(name, x, right, bound)

    def nothing_was_written(self):
        """Into what the caller passed."""
        for name, given in self._given().items():
            pairs = zip(given, self.placed[name]) if isinstance(given, tuple) else None
            for operand, placed in pairs or [(given, self.placed[name])]:
                if isinstance(operand, Operand):
                    same = np.array_equal(to_numpy(placed), operand.x, equal_nan=True)
                    assert same, f"{name} was written to"


def check(call):
    """Raises where an answer to the call is wrong; tells which the kernels gave."""
    regard.set_num_threads(call.threads)
    if "torch" in sys.modules:  # its own threads would wait for each other on small tensors
        sys.modules["torch"].set_num_threads(1)
    comparison = Comparison(call)
    if call.refused:
        comparison.is_refused()
        return {}
    comparison.run()
    return comparison.served


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of all calls")
    parser.add_argument("--seconds", type=float, help="ends after that time")
    parser.add_argument("--calls", type=int, help="ends after that many")
    parser.add_argument("--only", type=int, metavar="N", help="call N of the seed alone")
    parser.add_argument("--library", choices=["numpy", "torch"], help="only its arrays")
    parser.add_argument("--large", action="store_true", help="calls for which threads start")
    parser.add_argument("--backend", choices=["kernel", "triton", "auto"], default="kernel")
    parser.add_argument("--device", default="cpu", help="of the tensors")
    parser.add_argument("--verbose", action="store_true", help="print each call before it runs")
    options = parser.parse_args()
    if options.backend == "triton" and options.device == "cpu" and not INTERPRETED:
        parser.error("triton needs --device cuda, or its interpreter: set TRITON_INTERPRET=1")
    return options


def chosen(options):
    """``number, call`` for as long as was asked: 30 seconds where nothing was."""
    seconds = options.seconds or (None if options.calls else 30.0)
    end = None if seconds is None else time.monotonic() + seconds
    more = {"library": options.library, "large": options.large}
    if options.only is not None:
        yield options.only, draw(options.seed, options.only, **more)
        return
    asked = 0
    for number, call in calls(options.seed, **more):
        over = options.calls is not None and asked >= options.calls
        if over or (end is not None and time.monotonic() >= end):
            return
        if is_for(options.backend, call):
            asked += 1
            yield number, call


def is_for(backend, call):
    """Whether a call is one for the backend; for the kernels all are."""
    if backend == "kernel":
        return True
    B, Hq, _, Lq, Lk = call.sizes
    if call.library != "torch" or call.refused or call.dtype == "float64":
        return False
    # The interpreter cuts bfloat16 off where a device rounds it.
    is_short = B * Hq * Lq * Lk * call.arrays["query"].x.shape[-1] <= MOST_PRODUCTS
    is_short &= B * Hq <= MOST_HEADS
    return not INTERPRETED or (is_short and call.dtype != "bfloat16")


def main():
    """Prints every failure with the words that run it again; 1 where there is one."""
    options = parse()
    ASKED.update(backend=options.backend, device=options.device)
    if INTERPRETED and options.backend == "triton":
        import interpreter

        interpreter.hasten()
    return run(options)


def run(options):
    """The calls; 1 where one fails."""
    warnings.simplefilter("error")
    asked, served, failures, count = collections.Counter(), collections.Counter(), 0, 0
    started = time.monotonic()
    for number, call in chosen(options):
        count += 1
        if options.verbose:
            print(f"{number} {call}", flush=True)
        try:
            answers = check(call)
        except Exception as error:
            failures += 1
            report(options, number, call, error)
            continue
        for what, by_kernels in answers.items():
            asked[what] += 1
            served[what] += by_kernels
    target = kernel.kernels.target() if kernel.kernels else "no kernels"
    parts = ", ".join(f"{served[what]} of {asked[what]} {what}" for what in asked)
    print(
        f"{target}: {count} calls in {time.monotonic() - started:.0f} s, {failures} failures; "
        f"by the kernels: {parts}"
    )
    return 1 if failures else 0


def report(options, number, call, error):
    """One failure."""
    again = [f"--seed {options.seed} --only {number}"]
    again += [f"--library {options.library}"] * bool(options.library)
    again += ["--large"] * options.large
    again += [f"--backend {options.backend}"] * (options.backend != "kernel")
    again += [f"--device {options.device}"] * (options.device != "cpu")
    print(f"FAILED {type(error).__name__}: {error}\n  {call!r}")
    if not isinstance(error, AssertionError):
        traceback.print_exception(error, limit=-4, file=sys.stdout)
    print(f"  python tests/fuzz.py {' '.join(again)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
