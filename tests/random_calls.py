"""Random calls of the whole operator: options, memory layouts and special values, from a seed."""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from operands import Operand
from regard import Edit

LENGTHS = [1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 47, 49, 63, 64, 65, 97, 127, 128, 129, 200, 257, 300]
HEAD_SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 31, 33, 48, 64]
LARGE = {"float16": 6e4, "bfloat16": 1e30, "float32": 1e30, "float64": 1e30}
DENORMAL = {"float16": 3e-7, "bfloat16": 1e-39, "float32": 1e-42, "float64": 1e-310}
MANY_KEYS = [300, 511, 1025, 2049, 4100, 9001]  # for a few queries: pieces of 4096 and more
MOST_PRODUCTS = 2e6  # of a call, so that a hundred calls take seconds
FARTHEST = 2**53  # of a query from the keys
FAR = [FARTHEST, FARTHEST - 1, 2**40, 2**31, 2**31 - 1]
TOO_FAR = [FARTHEST + 1, 2**62, 2**63 - 1, 2**63, 2**70]
ENDS = [-(2**63), 2**63 - 1, 2**62, -(2**62), 2**53, 2**53 + 1, -(2**53) - 1, 0]  # of int64
THREADED_PRODUCTS = 2.0**22  # from here on the kernels start threads: kernels/dispatch.cpp


@dataclass
class Call:
    """One call of attention and what is asked of it."""

    library: str
    dtype: str
    arrays: dict[str, Operand]  # query, key, value
    options: dict[str, object]  # as passed, with Operand for arrays
    threads: int = 1
    gradient: tuple[str, ...] = ()  # the arrays that need one
    upstream: Operand | None = None
    weights: bool = False
    questions: int = 0  # seed of what is asked of the weights
    notes: list[str] = field(default_factory=list)
    refused: bool = False  # its query_start is beyond the limit

    def __repr__(self):
        given = {**self.arrays, **self.options}
        text = ", ".join(f"{name}={x!r}" for name, x in given.items())
        more = f" threads={self.threads}"
        more += f" gradient={' '.join(self.gradient)} upstream={self.upstream}" * bool(
            self.gradient
        )
        more += " weights" * self.weights
        notes = f"\n  {'; '.join(self.notes)}" * bool(self.notes)
        return f"{self.library}: attention({text}){more}{notes}"

    @property
    def leading(self):
        """The axes in front of the heads."""
        return self.arrays["query"].x.shape[:-3]

    @property
    def sizes(self):
        """``B, Hq, Hkv, Lq, Lk``."""
        q, k = self.arrays["query"].x.shape, self.arrays["key"].x.shape
        heads = (q[-3], k[-3]) if len(q) > 2 else (1, 1)
        return math.prod(self.leading), *heads, q[-2], k[-2]

    def given(self, name):
        """An option's value in NumPy, or None."""
        x = self.options.get(name)
        if isinstance(x, tuple):
            return tuple(part.x if isinstance(part, Operand) else part for part in x)
        return x.x if isinstance(x, Operand) else x

    def heads(self, name):
        """query, key or value as ``(B, Hq, L, D)``, heads repeated."""
        x = self.arrays[name].x
        B, Hq, *_ = self.sizes
        if x.ndim == 2:
            return x[None, None]
        x = np.broadcast_to(x, self.leading + x.shape[-3:]).reshape(B, *x.shape[-3:])
        return x.repeat(Hq // max(x.shape[1], 1), 1)

    def pairs(self, x):
        """A mask or bias as ``(B, Hq, Lq, Lk)``."""
        B, Hq, _, Lq, Lk = self.sizes
        public = (Lq, Lk) if self.arrays["query"].x.ndim == 2 else (*self.leading, Hq, Lq, Lk)
        return np.broadcast_to(x, public).reshape(B, Hq, Lq, Lk)

    def per_batch(self, x, *tail):
        """Integers as ``(B, *tail)``."""
        return np.broadcast_to(x, (*self.leading, *tail)).reshape(self.sizes[0], *tail)

    @property
    def starts(self):
        """``(B,)``: the place of query 0 among the keys."""
        _, _, _, Lq, Lk = self.sizes
        start, lengths = self.given("query_start"), self.given("key_lengths")
        if start is None:
            start = (Lk if lengths is None else np.asarray(lengths)) - Lq
        return self.per_batch(start)

    def visible(self):
        """``(B, Hq, Lq, Lk)``: who sees whom."""
        B, Hq, _, Lq, Lk = self.sizes
        p = (self.starts[:, None] + np.arange(Lq))[:, None, :, None]
        j = np.arange(Lk)
        visible = np.ones((B, Hq, Lq, Lk), bool)
        sides = self.options.get("window") or (None, None)
        left, right = (None if n is None else min(n, 4 * FARTHEST) for n in sides)
        if self.options.get("causal"):
            visible &= j <= p
        if left is not None:
            visible &= j >= p - left
        if right is not None:
            visible &= j <= p + right
        if (lengths := self.given("key_lengths")) is not None:
            visible &= j < self.per_batch(lengths)[:, None, None, None]
        if (segments := self.given("segments")) is not None:
            pair = segments if isinstance(segments, tuple) else (segments, segments)
            of_queries, of_keys = (self.per_batch(x, n) for x, n in zip(pair, (Lq, Lk)))
            visible &= of_queries[:, None, :, None] == of_keys[:, None, None, :]
        if (intervals := self.given("intervals")) is not None:
            first, last = (self.per_batch(x, Lq)[:, None, :, None] for x in intervals)
            visible &= (first <= j) & (j < last)
        if (mask := self.given("mask")) is not None:
            visible &= self.pairs(mask)
        for inside, factor in self._rectangles():
            visible[(slice(None), *inside)] &= factor > 0
        return visible

    def _rectangles(self):
        """Index in the heads, queries and keys, and factor, of each edit."""
        for edit in self.options.get("edits", ()):
            spans = (
                slice(span, span + 1 or None) if isinstance(span, int) else span or slice(None)
                for span in (edit.heads, edit.queries, edit.keys)
            )
            yield tuple(spans), edit.factor

    def added_logs(self):
        """``(Hq, Lq, Lk)`` of the edits: the sum of ln(factor), that of its sizes, and how many."""
        logs, sizes, counts = np.zeros((3, self.sizes[1], *self.sizes[3:]))
        for inside, factor in self._rectangles():
            log = math.log(factor) if factor else 0.0  # of a pair that is cut nothing is asked
            logs[inside] += log
            sizes[inside] += abs(log)
            counts[inside] += 1
        return logs, sizes, counts


class Draw:
    """Draws one call."""

    def __init__(self, seed, number, library=None, large=False):
        self.rng = np.random.default_rng([seed, number])
        self.edits_rng = np.random.default_rng([seed, number, 1])  # leaves the other draws alone
        self.library = library or self.pick(["numpy", "torch"])
        self.large = large or self.chance(0.02)

    def chance(self, p):
        return bool(self.rng.random() < p)

    def pick(self, options):
        return options[int(self.rng.integers(len(options)))]

    def between(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def call(self):
        """The call."""
        rare = ["float64", "float16", "bfloat16" if self.library == "torch" else "float16"]
        self.dtype = "float32" if self.chance(0.7) else self.pick(rare)
        self._sizes()
        arrays = {"query": self._vectors((*self.leading, *self.Hq, self.Lq, self.D))}
        for name, d in (("key", self.D), ("value", self.Dv)):
            leading = tuple(n if self.chance(0.8) else 1 for n in self.leading)
            arrays[name] = self._vectors((*leading, *self.Hkv, self.Lk, d))
        call = Call(self.library, self.dtype, arrays, {})
        call.options = self._options()
        self._scale(call)
        if self.edits_rng.random() < 0.2:
            counts = math.prod(self.Hq), self.Lq, self.Lk
            factors = (*FACTORS, 1e-300, 1e300)
            call.options["edits"] = edits(self.edits_rng, *counts, factors=factors)
        if self.chance(0.05):
            self._first_token(call)
        if self.chance(0.3):
            self._special_values(call)
        if self.chance(0.35):
            self._poison_what_is_hidden(call)
        call.threads = 3 if self.large else self.pick([1, 1, 1, 2])
        call.weights = self.chance(0.35)
        call.questions = self.between(0, 2**31)
        if self.library == "torch" and self.chance(0.4):
            self._gradient(call)
        if self.leading.count(0) == 0 and self.chance(0.02):
            call.options["query_start"] = self.pick(TOO_FAR) * self.pick([-1, 1])
            call.refused = True
        return call

    def _sizes(self):
        axes = self.pick([2, 3, 4, 4, 4, 5])
        most, small = 30 * MOST_PRODUCTS, MOST_PRODUCTS
        while True:
            self.leading = tuple(self.pick([1, 2, 3]) for _ in range(axes - 3))
            Hkv, group = self.pick([1, 1, 2, 3]), self.pick([1, 1, 2, 3, 5])
            self.Hkv, self.Hq = ((), ()) if axes == 2 else ((Hkv,), (Hkv * group,))
            self.Lq, self.Lk = self.pick(LENGTHS), self.pick(LENGTHS)
            if self.chance(0.3):
                self.Lk = self.Lq
            elif self.chance(0.1):
                self.Lq, self.Lk = self.pick([1, 1, 2, 5]), self.pick(MANY_KEYS)
            self.D, self.Dv = self._head_size(), self._head_size()
            if self.chance(0.4):
                self.Dv = self.D
            products = math.prod([*self.leading, *self.Hq, self.Lq, self.Lk, self.D + self.Dv])
            if self.large and THREADED_PRODUCTS <= products < most:
                return
            if not self.large and products < small:
                break
        if self.chance(0.06):
            setattr(self, *self.pick([("Lq", 0), ("Lk", 0), ("Dv", 0), ("Lk", 0), ("Lq", 0)]))
        if self.leading and self.chance(0.03):
            self.leading = (0, *self.leading[1:])
        if axes > 2 and self.chance(0.01):
            self.Hq = self.Hkv = (0,)

    def _head_size(self):
        if self.chance(0.02):
            return 257
        if self.chance(0.05):
            return self.between(257, 576)
        return self.between(1, 256) if self.chance(0.25) else self.pick(HEAD_SIZES)

    def _rounded(self, x, dtype):
        with np.errstate(all="ignore"):
            if dtype == "bfloat16":
                import ml_dtypes

                return x.astype(ml_dtypes.bfloat16).astype(np.float64)
            return x.astype(dtype).astype(np.float64)

    def _vectors(self, shape):
        kinds = ["large", "small", "whole", "equal", "aligned", "spread", "spread"]
        kind = self.pick(["normal"] * 6 + kinds)
        x = self.rng.standard_normal(shape)
        if kind == "whole":
            x = x.round()
        elif kind == "equal":
            x = np.full(shape, 0.7)
        elif kind == "aligned":  # scores that rise with the key, so that the maximum moves
            x = abs(x) + np.arange(shape[-2])[:, None] / 16
        x *= {"large": 30.0, "small": 1e-3}.get(kind, 1.0)
        if kind == "spread":  # scores of that standard deviation, by rows or all
            rows = (*shape[:-1], 1) if self.chance(0.5) else ()
            x *= 10 ** self.rng.uniform(0, 4, rows)
        return self._operand(self._rounded(x, self.dtype), self.dtype)

    def _operand(self, x, dtype):
        """x in a random layout."""
        x = np.array(x)
        axes = tuple(range(x.ndim))
        ones, zeros = (1,) * x.ndim, (0,) * x.ndim
        plain = Operand(x, dtype, axes, ones, zeros)
        kind = self.pick(["plain"] * 4 + ["heads inside", "fused", "part", "any", "any", "trick"])
        if kind in ("heads inside", "fused") and x.ndim > 2:  # (B, L, H, D) in memory
            plain.order = (*axes[:-3], axes[-2], axes[-3], axes[-1])
            if kind == "fused":  # the middle of three, in (B, L, 3, H, D) or (B, L, H, 3 D)
                axis = self.pick([-3, -1])
                plain.around = tuple(x.shape[axis] if a == axes[axis] else 0 for a in axes)
        elif kind == "part" and x.ndim > 1:  # of longer rows, more rows or more heads
            axis = self.pick(axes[-3:])
            plain.around = tuple(self.between(1, 9) if a == axis else 0 for a in axes)
        elif kind == "any" and x.size < 2**16:
            steps = [1, 1, 1, 2, 3] + ([-1, -2] if self.library == "numpy" else [])
            plain.order = tuple(self.rng.permutation(x.ndim).tolist())
            plain.steps = tuple(self.pick(steps) for _ in axes)
            plain.around = tuple(self.pick([0, 0, 1, 2]) for _ in axes)
        elif kind == "trick" and x.size:
            tricks = ["shared"]
            if self.library == "numpy" and dtype != "bfloat16":
                tricks += ["read-only", "unaligned", "in records"]
            plain.trick = self.pick(tricks)
            if plain.trick == "shared":
                axis = self.between(0, max(x.ndim - 1, 0))
                if x.ndim > 2 and self.chance(0.5):
                    axis = x.ndim - 3  # heads
                if not x.ndim:
                    plain.trick = ""
                else:
                    plain.trick = f"shared along {axis}"
                    plain.x = np.repeat(x.take([0], axis), x.shape[axis], axis)
        return plain

    def _integers(self, low, high, shape):
        dtype = self.pick(["int64", "int64", "int32"])
        x = self.rng.integers(low, high + 1, shape)
        return self._operand(x.astype(np.int64), dtype)

    def _pair_shape(self):
        """A shape that broadcasts to the weights'."""
        full = (*self.leading, *self.Hq, self.Lq, self.Lk)
        if self.chance(0.4):
            return full
        shape = [n if self.chance(0.6) else 1 for n in full]
        return tuple(shape[self.between(0, len(shape)) :])

    def _options(self):
        options = {"causal": True} if self.chance(0.3) else {}
        for name, p in (
            ("window", 0.2), ("mask", 0.2), ("bias", 0.25), ("key_lengths", 0.2),
            ("segments", 0.15), ("intervals", 0.15), ("query_start", 0.2), ("sinks", 0.2),
            ("scale", 0.3), ("softcap", 0.15), ("dropout", 0.1)
        ):  # fmt: skip
            if self.chance(p):
                options[name] = getattr(self, f"_draw_{name}")()
        if "dropout" in options:
            options["seed"] = self.pick([*ENDS, -1, self.between(0, 2**40)])
        return options

    def _draw_window(self):
        sides = [None, 0, 1, 3, 9, 40, 130, *FAR, *TOO_FAR]
        return self.pick(sides), self.pick(sides)

    def _draw_mask(self):
        shape = self._pair_shape()
        mask = self.rng.random(shape) < self.pick([0.0, 0.1, 0.7, 0.7, 0.95, 1.0])
        if len(shape) > 1 and self.chance(0.5):  # intervals and blocks, whole or with holes
            i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
            size, sees = self.between(1, 140), np.zeros(shape, bool) if self.chance(0.3) else ~mask
            chunks, diagonals = i // size == j // size, (i + j) // size % 3 < 1
            kinds = (j <= i + size, abs(i - j) < size, chunks, diagonals)
            mask = self.pick(kinds) & (mask | sees)
        if len(shape) > 1 and self.chance(0.3):
            mask &= self.rng.random((*shape[:-1], 1)) < 0.8  # rows that see nothing
        return self._operand(np.asarray(mask), "bool")

    def _draw_bias(self):
        x = np.asarray(self.rng.standard_normal(self._pair_shape())) * self.pick([1, 1, 30, 1e4])
        dtype = self._option_dtype()
        if self.chance(0.2):
            x = np.where(self.rng.random(x.shape) < 0.3, -np.inf, x)
        return self._operand(self._rounded(x, dtype), dtype)

    def _option_dtype(self):
        if self.chance(0.9):
            return self.dtype
        return self.pick(["float16", "float32", "float64"])

    def _draw_key_lengths(self):
        return self._per_batch(0, self.Lk)

    def _draw_query_start(self):
        if self.chance(0.15):
            return self.pick(FAR) * self.pick([-1, 1])
        starts = self._per_batch(-self.Lq - 3, self.Lk + 3)
        if isinstance(starts, Operand) and starts.dtype == "int64" and self.chance(0.15):
            starts.x = np.where(starts.x % 2, starts.x, self.pick(FAR) * self.pick([-1, 1]))
        return starts

    def _per_batch(self, low, high):
        if not self.leading or self.chance(0.3):
            return self.between(low, high)
        shape = [n if self.chance(0.8) else 1 for n in self.leading]
        return self._integers(low, high, tuple(shape[self.between(0, len(shape) - 1) :]))

    def _draw_segments(self):
        few = self.pick([1, 2, 3, 8])
        sort, far = self.chance(0.6), self.chance(0.3)

        def ids(n):
            leading = tuple(m if self.chance(0.7) else 1 for m in self.leading)
            leading = leading[self.between(0, len(leading)) :]
            operand = self._integers(-1, few, (*leading, n))
            if operand.dtype == "int64" and far:  # the same ids, but at the ends
                operand.x = np.array(ENDS)[operand.x % len(ENDS)]
            if sort:
                operand.x = np.sort(operand.x, -1)
            return operand

        if self.Lq == self.Lk and self.chance(0.5):
            return ids(self.Lq)
        return ids(self.Lq), ids(self.Lk)

    def _draw_intervals(self):
        kind = self.pick(["any", "a prefix", "chunks", "far"])

        def ends(of):
            leading = tuple(m if self.chance(0.7) else 1 for m in self.leading)
            size, i = self.between(1, 40), np.arange(self.Lq)
            x = {
                "any": self.rng.integers(-3, self.Lk + 4, (*leading, self.Lq)),
                "a prefix": of * np.maximum(i, size),
                "chunks": i // size * size + of * size,
                "far": ENDS[of],
            }[kind]
            x = np.broadcast_to(x, (*leading, self.Lq)).astype(np.int64)
            return self._operand(x, "int64" if kind == "far" else self.pick(["int64", "int32"]))

        return ends(0), ends(1)

    def _draw_sinks(self):
        shape = self.Hq or self.pick([(), (1,)])
        x = np.asarray(self.rng.standard_normal(shape)) * self.pick([1, 1, 10, 100])
        dtype = self._option_dtype()
        if self.chance(0.1):
            x = np.where(self.rng.random(shape) < 0.5, -np.inf, x)
        return self._operand(self._rounded(x, dtype), dtype)

    def _draw_scale(self):
        return self.pick([0, 0.0, 1.0, -0.5, 3.0, 1e-3, "to a million"])

    def _draw_softcap(self):
        return self.pick([0.5, 5.0, 30.0, 1e-3, 1e6])

    def _draw_dropout(self):
        return self.pick([0.0, 0.1, 0.5, 0.9])

    def _scale(self, call):
        """The scale that makes a score 1e6 where query and key point the same way, if drawn."""
        if call.options.get("scale") == "to a million":
            q, k = (np.linalg.norm(call.arrays[name].x, axis=-1) for name in ("query", "key"))
            largest = q.max(initial=0) * k.max(initial=0)
            call.options["scale"] = float(1e6 / largest) if largest > 1e-6 else 1.0

    def _first_token(self, call):
        """In every row one key takes all, the others next to nothing: e⁻¹⁷ is 4e-8."""
        q, k = (call.arrays[name] for name in ("query", "key"))
        if any(operand.trick.startswith("shared") for operand in (q, k)):
            return
        q.x = np.zeros_like(q.x)
        q.x[..., 0] = 1.0
        least = np.log(self.pick([1e-9, 5e-8, 5.9e-8, 1e-6, 1e-3]))
        k.x[..., 0] = self._rounded(least + self.rng.uniform(-0.5, 0.5, k.x.shape[:-1]), k.dtype)
        k.x[..., self.between(0, 3) : 1 + self.between(0, 3), 0] = 0.0
        call.options["scale"] = 1.0
        for name in ("bias", "softcap", "sinks", "edits"):
            call.options.pop(name, None)

    def _special_values(self, call):
        """A few NaN, infinities, large or tiny numbers anywhere."""
        kinds = {
            "NaN": [np.nan], "inf": [np.inf], "-inf": [-np.inf], "infinities": [np.inf, -np.inf],
            "large": [LARGE[self.dtype], -LARGE[self.dtype]], "denormal": [DENORMAL[self.dtype]],
            "zero": [0.0, -0.0],
        }  # fmt: skip
        kind = self.pick(list(kinds))
        named = {**call.arrays, **{n: x for n, x in call.options.items() if n in ("bias", "sinks")}}
        for name in self.rng.choice(list(named), self.between(1, 2), replace=False):
            operand = named[name]
            for _ in range(self.between(1, 3)):
                self._set(call, name, operand, self.pick(kinds[kind]))

    def _set(self, call, name, operand, value):
        x = operand.x
        if not x.size or operand.trick.startswith("shared"):
            return
        index = tuple(self.between(0, n - 1) for n in x.shape)
        x[index] = self._rounded(np.asarray(value), operand.dtype)
        call.notes.append(f"{name}{list(index)} = {x[index]}")

    def _poison_what_is_hidden(self, call):
        """NaN, inf or large numbers wherever no visible pair reads them."""
        visible = call.visible()
        B, _, Hkv, _, Lk = call.sizes
        if not visible.size:
            return
        seen = visible.any(2).reshape(B, Hkv, -1, Lk).any(2)[..., None]
        sees = visible.any(-1)[..., None]
        bias = {"bias": visible} if "bias" in call.options else {}
        for name, read in {"query": sees, "key": seen, "value": seen, **bias}.items():
            operand = call.arrays.get(name) or call.options[name]
            if operand.trick.startswith("shared") or self.chance(0.3):
                continue
            hidden = ~self._reduced(call, read, operand.x.shape)
            value = self.pick([np.nan, np.inf, -np.inf, LARGE[self.dtype]])
            if hidden.any():
                operand.x = np.where(
                    hidden, self._rounded(np.asarray(value), operand.dtype), operand.x
                )
                call.notes.append(f"hidden {name} = {value}")

    def _reduced(self, call, read, shape):
        """Whether any of the pairs, vectors or numbers that broadcast to a place is read."""
        public = read.reshape((*call.leading, *read.shape[1:]) if len(shape) > 2 else read.shape)
        while public.ndim > len(shape):
            public = public.any(0)
        for axis, n in enumerate(shape):
            if n == 1 or public.shape[axis] == 1:
                public = public.any(axis, keepdims=True)
        return np.broadcast_to(public, shape)

    def _gradient(self, call):
        names = [*call.arrays, *(n for n in ("bias", "sinks") if n in call.options)]
        chosen = names if self.chance(0.6) else [n for n in names if self.chance(0.5)]
        call.gradient = tuple(chosen) or ("query",)
        shape = (*call.arrays["query"].x.shape[:-1], self.Dv)
        x = np.ones(shape) if self.chance(0.2) else self.rng.standard_normal(shape)
        call.upstream = self._operand(self._rounded(x, self.dtype), self.dtype)
        empty = ~call.visible().any(-1)[..., None].reshape((*shape[:-1], 1))
        if empty.any() and self.chance(0.4) and not call.upstream.trick:
            call.upstream.x = np.where(empty, np.nan, call.upstream.x)
            call.notes.append("upstream = NaN where nothing is seen")


FACTORS = (0, 0.0, 0.0, 0.5, 1.0, 3.0, 1e-3, 40.0)


def edits(rng, *counts, factors=FACTORS):
    """Up to four edits of so many heads, queries and keys: of one, some or all of them."""

    def span(count):
        kind = rng.integers(4 if count else 3)
        if kind == 3:
            return int(rng.integers(-count, count))
        low, high = sorted(rng.integers(0, count + 1, 2).tolist())
        low -= count * int(low < count and rng.random() < 0.3)
        return None if kind == 0 else slice(low, high if kind == 1 else None)

    return [
        Edit(*map(span, counts), factors[rng.integers(len(factors))])
        for _ in range(rng.integers(5))
    ]


def draw(seed, number, library=None, large=False):
    """Call ``number`` of a seed."""
    return Draw(seed, number, library, large).call()


def calls(seed, library=None, large=False):
    """``number, call`` without end."""
    for number in itertools.count():
        yield number, draw(seed, number, library, large)
