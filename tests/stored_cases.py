"""Writes tests/stored_cases.bin: calls of attention, and what the kernels should give for them.

    python tests/stored_cases.py

For builds of the kernels that no Python here could load: tests/stored_cases.cpp reads the file,
computes the calls and compares. Results are those of the reference, in float64; gradients those of
torch in float64. Each number has its bound, which follows the roundings (``bounds.Truth``); an
infinite one leaves it open.
"""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

import regard
from bounds import TO_ODD
from fuzz import Comparison
from operands import Operand
from random_calls import Call
from regard import Edit
from regard._backends import kernel
from regard._backends.kernel_calls import call_as_read
from regard._call.checks import given, read_call

PATH = Path(__file__).with_suffix(".bin")
DTYPES = "float32", "float64", "float16", "bfloat16"
LINEAR = "product", "transposed", "blocks", "blocks_max", "diagonals"


def rounded(x, dtype):
    """x in float64, with the digits that a dtype holds."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(stored_type(dtype)).astype(float)


def stored_type(dtype):
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def operand(x, dtype):
    """x as an array of a call, contiguous."""
    x = np.asarray(x)
    return Operand(x, dtype, tuple(range(x.ndim)), (1,) * x.ndim, (0,) * x.ndim)


class Case:
    """A call, by its sizes and options, and what is asked of it.

    Args:
        sizes: ``B, Hq, Hkv, Lq, Lk, D, Dv``.
        asks: of ``"weights"``, ``"sums"``, ``"pictures"``, ``"linear"``, ``"gradient"``,
            ``"pairs"``.
        spoil: a function that writes into query, key and value.
        size: of the numbers.
        options: of ``regard.attention``; arrays of NumPy, or functions of the random generator.
    """

    def __init__(self, name, dtype, sizes, asks, *, spoil=None, size=1.0, **options):
        self.name, self.dtype, self.sizes, self.asks = f"{name}-{dtype}", dtype, sizes, asks.split()
        self.rng = np.random.default_rng([len(name), *name.encode(), *dtype.encode()])
        B, Hq, Hkv, Lq, Lk, D, Dv = sizes
        shapes = {"query": (B, Hq, Lq, D), "key": (B, Hkv, Lk, D), "value": (B, Hkv, Lk, Dv)}
        arrays = {n: rounded(self.rng.normal(size=s) * size, dtype) for n, s in shapes.items()}
        if spoil:
            spoil(**arrays)
        self.call = Call("torch", dtype, {n: operand(x, dtype) for n, x in arrays.items()}, {})
        self.call.options = {n: self._option(x) for n, x in options.items()}
        self.fields = {}

    def _option(self, x):
        x = x(self.rng) if callable(x) else x
        if isinstance(x, tuple):
            return tuple(self._option(part) for part in x)
        if not isinstance(x, np.ndarray):
            return x
        dtype = {"f": self.dtype, "b": "bool", "i": "int64"}[x.dtype.kind]
        return operand(rounded(x, dtype) if x.dtype.kind == "f" else x, dtype)

    def filled(self):
        """All arrays by name: those of the call, then results and their bounds."""
        self._write_call()
        comparison = Comparison(self.call)
        comparison.precision = TO_ODD if self.dtype == "bfloat16" else comparison.precision
        comparison._truth()
        self.truth = comparison.truth
        self._write_output(comparison)
        self._write("lse", self.truth.lse[..., 0], self.truth.lse_error[..., 0], self._rows())
        for name in self.asks:
            getattr(self, f"_write_{name}")(comparison)
        return self.fields

    def _rows(self):
        return self.truth.unsure[..., 0]

    def _write(self, name, exact, bound, unsure=False):
        """A result: float32, or float64 where sums are, and its bound in bfloat16, rounded up."""
        wide = np.float64 if self.dtype == "float64" else np.float32
        with np.errstate(all="ignore"):
            right = exact.astype(wide)
            bound = bound + abs(np.nan_to_num(exact) - np.nan_to_num(right.astype(float)))
            bound = np.where(np.isfinite(exact) & np.isfinite(right), bound, 0.0)
            bound = np.where(np.broadcast_to(unsure, bound.shape), np.inf, bound * (1 + 2.0**-7))
            self.fields[f"right.{name}"] = right
            self.fields[f"bound.{name}"] = bound.astype(ml_dtypes.bfloat16)

    def _write_call(self):
        """The arrays and numbers of the call as the kernels read them."""
        placed = {n: place_in_numpy(x) for n, x in self.call.arrays.items()}
        self.fields |= {n: x.astype(stored_type(self.dtype)) for n, x in placed.items()}
        options = {n: place_in_numpy(x) for n, x in self.call.options.items()}
        arrays = [x.astype(np.float64) for x in placed.values()]
        call = read_call(*arrays, **given(**options))
        read, _held = call_as_read(call)
        for name in ("scale", "softcap", "dropout"):
            self.fields[name] = np.float64(getattr(read, name))
        for name in ("causal", "window_left", "window_right", "seed"):
            self.fields[name] = np.int64(getattr(read, name))
        plain = kernel.kernels.Call()
        self.fields = {n: x for n, x in self.fields.items() if x.shape or x != getattr(plain, n)}
        self.fields |= {n: np.array(getattr(read, n)) for n in ("starts", "lengths")}
        arrays = {
            "query_ids": call.query_segments, "key_ids": call.key_segments,
            "interval_first": call.interval_first, "interval_last": call.interval_last,
            "mask": call.mask, "sinks": call.sinks,
        }  # fmt: skip
        if call.edit_ranges is not None:
            arrays["edit_ranges"] = np.asarray(call.edit_ranges)
            arrays["edit_logs"] = np.array([log for _, log in read.edits])
        if call.bias is not None:
            arrays["bias"] = np.asarray(call.bias).astype(stored_type(self.dtype))
        self.fields |= {n: np.asarray(x) for n, x in arrays.items() if x is not None}

    def _write_output(self, comparison):
        arrays, options = comparison._wide("reference")
        exact = regard.attention(*arrays, backend="reference", **options)
        dropout = self.call.given("dropout") or 0.0
        bound, unsure = self.truth.output_bound(comparison.v, exact, dropout)
        self._write("output", exact, bound, unsure)

    def _write_weights(self, comparison):
        arrays, options = comparison._wide("reference")
        exact = np.asarray(regard.AttentionWeights(*arrays[:2], backend="reference", **options))
        self._write("weights", exact, self.truth.error, self.truth.unsure)

    def _write_sums(self, _):
        self._write("entropy", *self.truth.entropy(), self._rows())
        self._write("distance", *self.truth.distance(), self._rows())
        unsure = (self.truth.unsure & self.truth.visible).any(-2)
        if "weights" in self.asks:
            self._write("received", *self.truth.received("sum"), unsure)
            self._write("received_max", *self.truth.received("max"), unsure)

    def _write_pictures(self, _):
        bins = min(3, self.sizes[3]), min(4, self.sizes[4])
        self.fields["bins"] = np.array(bins)
        for how in ("max", "mass"):
            low, high, unsure = self.truth.pool(bins, how, slice(None), slice(None))
            with np.errstate(all="ignore"):
                middle = np.where(low == high, low, (low + high) / 2)
                unsure = unsure | (np.isinf(middle) & (low != high))
                self._write(f"pooled_{how}", middle, (high - low) / 2, unsure)

    def _write_linear(self, _):
        Lq, Lk = self.sizes[3:5]
        wide = np.float64 if self.dtype == "float64" else np.float32
        x, y = (self.rng.normal(size=(n, c)).astype(wide) for n, c in ((Lk, 2), (Lq, 1)))
        self.fields |= {"product_with": x, "transposed_with": y}
        for name, other, transposed in (("product", x, False), ("transposed", y, True)):
            self._write(name, *self.truth.product(other.astype(float), transposed))
        ids = [self.rng.integers(-1, 3, (self.sizes[0], n)) for n in (Lq, Lk)]
        counts = [int(i.max(initial=0)) + 1 for i in ids]
        self.fields |= {"query_blocks": ids[0], "key_blocks": ids[1]}
        self.fields["block_counts"] = np.array(counts)
        cells = ids[0][:, :, None] * counts[1] + ids[1][:, None]
        cells = np.where((ids[0][:, :, None] < 0) | (ids[1][:, None] < 0), -1, cells)
        for name, how in (("blocks", "sum"), ("blocks_max", "max")):
            self._write(name, *self.truth.sums(cells, math.prod(counts), how))
        cells = (np.arange(Lq)[:, None] - np.arange(Lk) + Lk - 1)[None]
        self._write("diagonals", *self.truth.sums(cells, Lq + Lk - 1, "sum"))

    def _write_gradient(self, comparison):
        call, (B, Hq, _, Lq, _, _, Dv) = self.call, self.sizes
        upstream = rounded(self.rng.normal(size=(B, Hq, Lq, Dv)), self.dtype)
        self.fields["gradient"] = upstream.astype(stored_type(self.dtype))
        call.gradient = ("query", "key", "value", *(["bias"] if "bias" in call.options else []))
        arrays, options = comparison._wide("torch")
        wide = torch.from_numpy(upstream)
        found = comparison._differentiate("torch", arrays, options, wide)[1]
        dropout = call.given("dropout") or 0.0
        bounds = self.truth.gradient_bounds(comparison.v, upstream, dropout)
        own = comparison.precision
        for name, exact in zip(call.gradient, found):
            exact = exact.numpy()
            bound, unsure = (comparison._summed(name, x, exact.shape) for x in bounds[name])
            bound = bound + (3 * own.unit + 2 * own.stored) * abs(np.nan_to_num(exact))
            bound = bound + 4 * (2 * own.flushed + own.smallest * comparison._largest())
            self._write(f"{name}_gradient", exact, bound, unsure > 0)

    def _write_pairs(self, comparison):
        """Effects of the first head, and how far the first two are apart."""
        (query, key, value), options = comparison._wide("reference")
        weights = regard.AttentionWeights(query, key, backend="reference", **options)
        gradient = self.fields["gradient"].astype(float)
        effects = np.asarray(weights.effects(value, gradient, "knockout"))[0, 0]
        unit = 1e-12 if self.dtype == "float64" else 2e-5  # as in tests/fuzz.py
        scale = value.shape[-1] * abs(gradient).max() * abs(value).max()
        self._write("knockout", effects, np.full(effects.shape, unit * max(1.0, scale)))
        apart = regard.compare(weights.mix(heads=[0]), weights.mix(heads=[1]))
        kinds = "kl", "reverse_kl", "jensen_shannon", "total_variation"
        for name, exact in apart.divergences(kinds=kinds).items():
            self._write(name, exact, unit * np.maximum(1.0, abs(exact)))


def place_in_numpy(x):
    """An option or array in NumPy, numbers in float64."""
    if isinstance(x, tuple):
        return tuple(place_in_numpy(part) for part in x)
    return x.x if isinstance(x, Operand) else x


def hide(value, key, **_):
    """What a length of 9 hides is no number."""
    key[0, :, 9:], value[0, :, 9:] = np.nan, np.inf


def hide_some(query, key, value):
    """A key that no mask shows is no number; one query is none, and shows in its row alone."""
    key[:, :, 4], value[:, :, 4] = np.nan, np.nan
    query[:, 0, 3] = np.nan


def mask_of(*shape):
    """A random mask that hides key 4, and everything from query 1."""

    def drawn(rng):
        mask = rng.random(shape) < 0.6
        mask[..., 4], mask[..., 1, :] = False, False
        return mask

    return drawn


ALL = "weights sums pictures linear gradient"
WEIGHTS = "weights sums pictures linear"
EDITS = (Edit(keys=slice(2, 9), factor=0.5), Edit(queries=slice(0, 4), keys=3, factor=0.0),
         Edit(keys=5, factor=3.0))  # fmt: skip


def cases():
    """About thirty calls: every dtype, option and way through the kernels."""
    for dtype in DTYPES:
        narrow = dtype in ("float16", "bfloat16")
        yield Case("one", dtype, (1, 1, 1, 1, 1, 1, 1), WEIGHTS + " gradient")
        yield Case("grouped", dtype, (1, 2, 1, 7, 21, 9 if narrow else 3, 3), ALL + " pairs")
        yield Case("decode", dtype, (1, 4, 2, 1, 35, 3, 5), "weights sums")
        yield Case("nothing-seen", dtype, (1, 1, 1, 10, 5, 3, 3), ALL, causal=True)
    for dtype in ("float32", "bfloat16"):
        yield Case("causal", dtype, (1, 1, 1, 21, 21, 6, 5), ALL, causal=True)
        yield Case("heads-of-64", dtype, (1, 1, 1, 9, 9, 64, 66), "weights sums")
        yield Case("many-keys", dtype, (1, 1, 1, 19, 133, 4, 3), "sums pictures linear")
        yield Case("many-queries", dtype, (1, 1, 1, 97, 7, 3, 2), "sums pictures")
        yield Case("masked-nan", dtype, (1, 2, 1, 11, 17, 6, 5), WEIGHTS, spoil=hide_some,
                   mask=mask_of(1, 2, 11, 17))  # fmt: skip
        yield Case("spread", dtype, (1, 1, 1, 17, 24, 5, 3), WEIGHTS, size=9.0)
        yield Case("dropout", dtype, (1, 2, 1, 10, 21, 5, 6), "gradient", dropout=0.3, seed=12345)
        yield Case("edits", dtype, (1, 2, 2, 9, 14, 5, 5), WEIGHTS, edits=EDITS)
    yield Case("bias", "float32", (1, 2, 2, 9, 17, 3, 4), ALL, causal=True, softcap=3.0, scale=0.7,
               window=(6, None), bias=lambda rng: rng.normal(size=(1, 2, 9, 17)))  # fmt: skip
    yield Case("bias", "bfloat16", (1, 1, 1, 11, 18, 6, 4), ALL,
               bias=lambda rng: np.where(rng.random((1, 1, 11, 18)) < 0.2, -np.inf,
                                         rng.normal(size=(1, 1, 11, 18))))  # fmt: skip
    yield Case("sinks", "bfloat16", (1, 2, 1, 9, 17, 5, 4), WEIGHTS, sinks=np.array([0.5, -3.0]))
    yield Case("lengths", "float32", (2, 2, 1, 5, 17, 5, 3), WEIGHTS, spoil=hide, causal=True,
               key_lengths=np.array([9, 16]))  # fmt: skip
    yield Case("documents", "float16", (2, 1, 1, 12, 12, 5, 5), ALL,
               segments=np.repeat([[0, 1, 2], [5, 1, 1]], 4, 1))  # fmt: skip
    yield Case("scattered-ids", "float32", (1, 2, 1, 11, 11, 5, 5), WEIGHTS,
               segments=lambda rng: rng.integers(0, 3, (1, 11)))  # fmt: skip
    yield Case("intervals", "float64", (1, 2, 2, 8, 13, 3, 2), WEIGHTS,
               intervals=lambda rng: tuple(rng.integers(n, n + 8, (1, 8))
                                           for n in (0, 5)))  # fmt: skip
    yield Case("no-keys", "float32", (1, 2, 1, 3, 0, 4, 4), "weights")
    yield Case("split-decode", "bfloat16", (1, 4, 1, 1, 2055, 2, 1), "sums")
    yield Case("split", "float16", (1, 2, 1, 5, 2055, 2, 1), "sums")


def write_case(file, name, fields):
    """A line with the name, and one for each array, which its bytes follow."""
    file.write(f"case {name}\n".encode())
    for field, x in fields.items():
        shape = "".join(f" {n}" for n in x.shape)
        file.write(f"{x.dtype.name} {field}{shape}\n".encode() + x.tobytes())


def write(path):
    with Path(path).open("wb") as file:
        for case in cases():
            write_case(file, case.name, case.filled())


if __name__ == "__main__":
    write(PATH)
    print(f"{PATH}: {PATH.stat().st_size} bytes, {sum(1 for _ in cases())} cases")
