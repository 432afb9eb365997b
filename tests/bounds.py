"""Attention in float64 on whole matrices, and how far a narrower computation may be from it.

Each bound follows the roundings: a score errs with its dot product, a weight with its score, a sum
with its terms. A sum of n terms takes at most n roundings, and more than 6·√n of them at once in
less than one of 10⁷ sums. Source: Higham & Mary 2019.
"""

import math
import platform
from dataclasses import dataclass, replace

import numpy as np

from plain_formula import to_array


@dataclass(frozen=True)
class Precision:
    """What a dtype of the query allows: that of the sums, and that of what is stored."""

    unit: float  # relative error of a rounding of the sums, the float64 truth's included
    smallest: float  # what is below may become zero
    largest: float
    stored: float  # relative error of storing a weight or a result; 0: as the sums
    flushed: float  # a weight below may become zero
    stored_largest: float

    @property
    def least(self) -> float:
        """What is below may become zero of a weight, which is relative to more than the largest.

        In kernels/forward-inl.h to 2⁸ times more at most: ``kMargin``.
        """
        return 2.0**8 * self.smallest


def _precision(unit: float, smallest: float, largest: float, *stored: float) -> Precision:
    return Precision(unit + 2.0**-53, smallest, largest, *(stored or (0.0, smallest, largest)))


_SINGLE = 2.0**-24, 2.0**-126, float(np.finfo(np.float32).max)
PRECISIONS = {
    "float64": _precision(2.0**-53, 2.0**-1022, float(np.finfo(np.float64).max)),
    "float32": _precision(*_SINGLE),
    "float16": _precision(*_SINGLE, 2.0**-11, 2.0**-24, 65504.0),
    "bfloat16": _precision(*_SINGLE, 2.0**-8, 2.0**-126, 3.38e38),
}
# Of dot products of bfloat16 pairs on ARM, which are rounded to odd: by a whole unit, not by half.
TO_ODD = replace(PRECISIONS["bfloat16"], unit=2.0**-23 + 2.0**-53)
if platform.machine() in ("aarch64", "arm64"):
    PRECISIONS["bfloat16"] = TO_ODD


def roundings(n: int) -> float:
    """How many roundings of one size a sum of n terms takes at most."""
    return min(n, 6 * math.sqrt(n))


def assert_between(what, found, low, high, unsure=False):
    """``low ≤ found ≤ high``, and NaN where these are NaN, except where unsure.

    Raises:
        AssertionError: names the worst place, the number and what is right.
    """
    if found.shape != low.shape:
        raise AssertionError(f"{what}: shape {found.shape}, {low.shape} is right")
    with np.errstate(all="ignore"):
        right = ((low <= found) & (found <= high)) | (np.isnan(found) & np.isnan(low)) | unsure
        if right.all():
            return
        outside = np.maximum(low - found, found - high) / (high - low + 1e-300)
        badness = np.where(right, -np.inf, np.nan_to_num(outside, nan=np.inf))
    at = tuple(int(n) for n in np.unravel_index(badness.argmax(), found.shape))
    raise AssertionError(
        f"{what} at {at}: {found[at]:.9g}; {low[at]:.9g} to {high[at]:.9g} is right; "
        f"{(~right).sum()} of {right.size} places are wrong"
    )


def assert_within(what, found, exact, bound, unsure=False):
    """``|found − exact| ≤ bound``, and NaN and infinities in the same places, but where unsure."""
    with np.errstate(invalid="ignore"):
        bound = np.where(np.isfinite(exact) & ~np.isnan(bound), bound, 0.0)
    assert_between(what, found, exact - bound, exact + bound, unsure)


PAIRS = 2**17  # at a time: of more, memory is most of the time


def _finite(x):
    return np.where(np.isfinite(x), x, 0.0)


def _log_sum_exp(x, *more):
    """``ln Σ exp(x)`` along the last axis and over ``more``, kept as an axis."""
    x = np.concatenate([x, *more], axis=-1)
    top = x.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    return top + np.log(np.exp(x - top).sum(-1, keepdims=True))


def assert_attends(found, query, key, value, visible=True, **options):
    """An output to the bound that follows each rounding of its dtype.

    Sound on every processor, where twice the error of another computation is a matter of luck.

    Args:
        found: ``(B, Hq, Lq, Dv)``.
        query, key, value: ``(B, H, L, D)``, arrays or tensors, as they were attended.
        visible: broadcastable to the weights.
        options: scale, softcap, bias and sinks.
    """
    found = to_array(found)
    bounds = output_bounds(query, key, value, PRECISIONS[found.dtype.name], visible, **options)
    assert_bounded(found, bounds)


def assert_bounded(found, bounds):
    """The same of bounds that are known: ``output_bounds`` of what was attended."""
    group = found.shape[1] // (1 + max((h for _, h in bounds), default=0))
    for (b, h), (exact, bound) in bounds.items():
        rows = found[b, h * group : (h + 1) * group].reshape(exact.shape)
        assert_within(f"output of {b}, key head {h}", rows.astype(float), exact, bound)


def output_bounds(query, key, value, precision, visible=True, **options):
    """``(b, key head) → (exact, bound)``, each ``(1, 1, rows, Dv)`` of all queries of that head."""
    scale, softcap, bias, sinks = (
        options.get(name) for name in ("scale", "softcap", "bias", "sinks")
    )
    q, k, v = (to_array(x) for x in (query, key, value))
    pairs, found = (*q.shape[:3], k.shape[2]), {}
    seen = np.broadcast_to(visible, pairs)
    bias = None if bias is None else np.broadcast_to(to_array(bias), pairs)
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale

    def rows(x):  # of the heads that share keys, as those of one
        return (
            None if x is None else x[b, h * group : (h + 1) * group].reshape(1, 1, -1, x.shape[-1])
        )

    for b, h in np.ndindex(len(q), k.shape[1]):
        shared = b if len(k) > 1 else 0
        keys, values = (x[shared, h][None, None].astype(float) for x in (k, v))
        per_head = None if sinks is None else to_array(sinks)[None, h * group : (h + 1) * group]
        per_row = None if sinks is None else per_head.astype(float).repeat(q.shape[2], 1)
        given, parts = (rows(q), rows(seen), rows(bias)), []
        count, step = given[0].shape[2], max(1, PAIRS // max(1, k.shape[2]))
        for start in range(0, max(1, count), step):
            part = slice(start, start + step)
            queries, sees, added = (None if x is None else x[:, :, part] for x in given)
            truth = Truth(
                queries.astype(float), keys, sees, np.zeros(1), precision, scale=scale,
                softcap=softcap, bias=None if added is None else added.astype(float),
                sinks=None if per_row is None else per_row[:, part],
            )  # fmt: skip
            exact = truth.weights @ values
            bound, unsure = truth.output_bound(values, exact, 0.0)
            assert not unsure.any()
            parts.append((exact, bound))
        found[b, h] = tuple(np.concatenate(x, 2) for x in zip(*parts))
    return found


class Truth:
    """Weights ``(B, Hq, Lq, Lk)`` in float64 and their bounds; rows ``(B, Hq, Lq, 1)``.

    Args:
        q, k: ``(B, Hq, L, D)`` float64, the heads of k repeated.
        visible: ``(B, Hq, Lq, Lk)``.
        starts: ``(B,)``.
        bias: broadcastable to the weights, or None.
        sinks: ``(Hq,)`` or ``(Hq, Lq)``, or None.
        edits: what they add to the scores, the sizes of that, and how many they are; or None.
        precision: of what is compared.
    """

    @np.errstate(all="ignore")
    def __init__(
        self, q, k, visible, starts, precision, *, scale, softcap, bias, sinks, edits=None
    ):
        self.q, self.k, self.visible, self.starts = q, k, visible, starts
        self.precision, self.scale, self.softcap = precision, scale, softcap
        s, e, overflow = self._scores(bias)
        if edits is not None:  # each adds to the score, and rounds what it adds
            logs, sizes, counts = edits
            e = e + precision.unit * counts * (abs(_finite(s)) + 3 * sizes)
            s = s + logs
        e = np.where(visible & np.isfinite(s), e, 0.0)
        s = np.where(visible, s, -np.inf)
        self.unsure = (overflow & visible).any(-1, keepdims=True)
        self._softmax(s, e, sinks)

    def _scores(self, bias):
        """Scores, their error, and where an intermediate may overflow."""
        p, q, k, scale = self.precision, self.q, self.k, abs(self.scale)
        kt = k.swapaxes(-1, -2)
        size = abs(_finite(q)) @ abs(_finite(kt))
        s = self.scale * (q @ kt)
        sums = (
            q.shape[-1] + abs(_finite(q)).sum(-1)[..., None] + abs(_finite(k)).sum(-1)[..., None, :]
        )
        e = p.unit * (roundings(q.shape[-1]) + 4) * scale * size + p.smallest * (1 + scale) * sums
        largest = p.largest / 8
        overflow = size * max(1.0, scale) > largest
        overflow |= abs(_finite(q)).max(-1, keepdims=True) * scale > largest
        self.scaled, self.scaled_error = s, e
        if self.softcap is not None:
            low, s, high = (self.softcap * np.tanh(x / self.softcap) for x in (s - e, s, s + e))
            e = np.maximum(high - s, s - low) + 8 * p.unit * abs(s) + p.smallest
        if bias is not None:
            e = e + p.unit * (2 * abs(bias) + abs(s + bias)) + p.smallest
            overflow = overflow | (np.isfinite(bias) & (abs(bias) > largest))
            s = s + bias
        return s, e, overflow

    def _softmax(self, s, e, sinks):
        p = self.precision
        top = s.max(-1, keepdims=True, initial=-np.inf)
        self.empty = top == -np.inf
        sink = np.full_like(top, -np.inf)
        if sinks is not None:
            sink = np.where(
                self.empty, -np.inf, sinks.reshape(sinks.shape + (1,) * (3 - sinks.ndim))
            )
            self.unsure |= np.isfinite(sink) & (abs(sink) > p.largest / 8)
            top = np.maximum(top, sink)
        shift, sink_shift = s - np.where(self.empty, 0.0, top), sink - np.where(self.empty, 0, top)
        total = np.exp(shift).sum(-1, keepdims=True) + np.exp(sink_shift)
        log_total = np.log(np.where(self.empty, 1.0, total))
        self.lse = np.where(self.empty, -np.inf, top + log_total)
        self.log_weights = np.where(self.visible, shift - log_total, -np.inf)
        self.weights = np.exp(self.log_weights)
        self.peak = np.exp(shift)  # before the division
        e = e + p.unit * (3 * np.where(np.isfinite(shift), abs(shift), 0.0) + 4)
        log_sink = sink_shift - log_total
        at_sink = p.unit * (3 * _finite(abs(sink_shift)) + 2 * _finite(abs(sink)) + 4)
        sums = p.unit * (roundings(s.shape[-1]) + 8)
        up = _log_sum_exp(self.log_weights + e, log_sink + at_sink) + sums
        down = -_log_sum_exp(self.log_weights - e, log_sink - at_sink) + sums
        up, down = (np.where(self.empty, 0.0, x) for x in (up, down))
        size = abs(_finite(top)) + abs(_finite(self.lse))
        self.lse_error = np.maximum(up, down) + 4 * p.unit * size
        self.error = self._weight_error(self.log_weights, e + up, e + down)
        self.log_error = e + np.maximum(up, down) + 4 * p.unit * (abs(shift) + abs(log_total))
        self.sink_weight = np.exp(log_sink)
        self.sink_error = self._weight_error(log_sink, at_sink + up, at_sink + down)

    def _weight_error(self, log_weight, less, more):
        """Of ``exp(log_weight)``, whose logarithm may be ``less`` below and ``more`` above."""
        w = np.exp(log_weight)
        grown = w * np.expm1(np.minimum(more, -log_weight))
        grown = np.where(log_weight > -700, grown, np.exp(np.minimum(log_weight + more, 0.0)))
        error = np.maximum(grown, -w * np.expm1(-less)) + self.precision.least
        return np.where(np.isneginf(log_weight), 0.0, error)

    @np.errstate(all="ignore")
    def output_bound(self, v, out, dropout):
        """The bound of ``out`` and where it is unsure, for values ``(B, Hq, Lk, Dv)``."""
        p, grown, size = self.precision, 1 / (1 - dropout), abs(_finite(v))
        bound = (np.nan_to_num(self.error) @ size) * grown
        terms = p.unit * (roundings(v.shape[-2]) + 8) + 2 * p.stored
        bound += terms * grown * (np.nan_to_num(self.weights) @ size)
        bound += (2 * p.unit + p.stored) * abs(_finite(out))
        flushed = max(p.flushed, p.least)
        bound += flushed * (1 + grown * (self.visible @ size))
        unsure = self.unsure | (grown * (np.nan_to_num(self.peak) @ size) > p.largest / 8)
        unsure = unsure | (np.isfinite(out) & (abs(out) + bound > p.stored_largest))
        if dropout:  # a row of NaN whose every key is dropped may give NaN or 0
            unsure = unsure | (np.isnan(self.weights).any(-1, keepdims=True) & (out == 0))
        vanishing = (self.weights - self.error < 4 * flushed) & (self.log_weights > -np.inf)
        return bound, unsure | (vanishing.astype(float) @ np.isinf(v) > 0)

    @np.errstate(all="ignore")
    def entropy(self):
        """Exact and bound, ``(B, Hq, Lq)``."""
        w, e = self.weights, self.error
        exact = -_times_log(w, self.log_weights)
        bound = np.zeros_like(w)
        for other in (np.maximum(w - e, 0.0), np.minimum(w + e, 1.0)):
            bound = np.maximum(bound, abs(exact + _times_log(other, np.log(other))))
        peak = (w - e < 1 / np.e) & (1 / np.e < w + e)
        bound = np.where(peak, np.maximum(bound, 1 / np.e - exact), bound)
        bound += w * self.precision.unit * _finite(4 * abs(self.log_weights))
        bound += self.precision.unit * roundings(w.shape[-1]) * exact
        return exact.sum(-1), bound.sum(-1)

    @np.errstate(all="ignore")
    def distance(self):
        """Exact and bound, ``(B, Hq, Lq)``."""
        Lq, Lk = self.weights.shape[-2:]
        gap = abs(self.starts[:, None, None, None] + np.arange(Lq)[:, None] - np.arange(Lk))
        terms = self.precision.unit * (roundings(Lk) + 4) * self.weights
        return (self.weights * gap).sum(-1), ((self.error + terms) * gap).sum(-1)

    @np.errstate(all="ignore")
    def received(self, how):
        """Exact and bound, ``(B, Hq, Lk)``."""
        w, Lq = self.weights, self.weights.shape[-2]
        if how == "max":
            return w.max(-2, initial=0.0), self.error.max(-2, initial=0.0)
        divisor = max(Lq, 1) if how == "mean" else 1
        if how == "seen":
            divisor = np.maximum(self.visible.sum(-2), 1)
        terms = self.precision.unit * (roundings(Lq) + 4) * w
        return w.sum(-2) / divisor, (self.error + terms).sum(-2) / divisor

    @np.errstate(all="ignore")
    def product(self, x, transposed):
        """Exact, bound and unsure of ``W @ x``, or of ``Wᵀ @ x``: ``(B, Hq, L, columns)``."""
        w, e, unsure = self.weights, np.nan_to_num(self.error), self.visible & self.unsure
        if transposed:
            w, e, unsure = (z.swapaxes(-1, -2) for z in (w, e, unsure))
        e = e + self.precision.unit * (roundings(len(x)) + 8) * np.nan_to_num(w)
        return w @ x, e @ abs(x), unsure.any(-1)[..., None]

    @np.errstate(all="ignore")
    def sums(self, cells, count, how):
        """Exact, bound and unsure ``(B, Hq, count)``: the weights of each cell, added or compared.

        ``cells`` ``(B or 1, Lq, Lk)`` are that of each pair; -1: none.
        """
        w, e = self.weights, self.error
        if how == "sum":
            e = e + self.precision.unit * (roundings(w[0, 0].size if w.size else 0) + 8) * w
        fold = np.add if how == "sum" else np.maximum
        found = np.zeros((3, *w.shape[:2], count + 1))
        at = np.broadcast_to(cells, (len(w), *cells.shape[1:]))
        for b, h in np.ndindex(*w.shape[:2]):
            fold.at(found[0, b, h], at[b], w[b, h])
            fold.at(found[1, b, h], at[b], np.nan_to_num(e[b, h]))
            np.maximum.at(found[2, b, h], at[b], (self.visible & self.unsure)[b, h])
        exact, bound, unsure = found[..., :count]
        return exact, bound, unsure > 0

    @np.errstate(all="ignore")
    def pool(self, size, how, rows, columns):
        """Lowest, highest and unsure, ``(B, Hq, R, C)`` in ln(weight)."""
        part = (..., rows, columns)
        visible = self.visible[part]
        down, across = (_edges(n, bins) for n, bins in zip(visible.shape[-2:], size))

        def over(ufunc, x):
            if not x.size:
                return np.zeros((*x.shape[:-2], len(down), len(across)), x.dtype)
            return ufunc.reduceat(ufunc.reduceat(x, down, -2), across, -1)

        if how == "max":
            logs, error = self.log_weights[part], np.nan_to_num(self.log_error[part])
            low, high = over(np.maximum, logs - error), over(np.maximum, logs + error)
        else:
            heights = np.diff(np.append(down, visible.shape[-2]))[:, None]
            w, e = self.weights[part], self.error[part]
            e = e + self.precision.unit * (roundings(visible.shape[-2] * visible.shape[-1]) + 8) * w
            mass, error = over(np.add, w) / heights, over(np.add, e) / heights
            low, high = np.log(np.maximum(mass - error, 0.0)), np.log(mass + error)
            low, high = low - self._of_log(low), high + self._of_log(high)
        seen = over(np.logical_or, visible)
        unsure = over(np.logical_or, visible & self.unsure[:, :, rows])
        return np.where(seen, low, np.nan), np.where(seen, high, np.nan), unsure

    def _of_log(self, x):
        """The error of storing a logarithm."""
        return 4 * self.precision.unit * (1 + abs(_finite(x)))

    @np.errstate(all="ignore")
    def gradient_bounds(self, v, grad, dropout, overflow=False):
        """``name → (bound, unsure)`` for query, key, value ``(B, Hq, L, D)``, bias and sinks.

        ``overflow`` ``(B, Hq, Lq, 1)``: the rows whose output may be past the largest number.
        With dw = grad·vᵀ, delta = Σ w·dw and ds = w·(dw − delta), as in the torch backend.
        """
        p, w, e = self.precision, np.nan_to_num(self.weights), np.nan_to_num(self.error)
        u, stored, grown = p.unit, 3 * p.stored, 1 / (1 - dropout)
        Lq, Lk = w.shape[-2:]
        grad = np.where(self.empty, 0.0, grad)
        q, k, size_v, size_g = (abs(_finite(x)) for x in (self.q, self.k, v, grad))
        dw = grown * (size_g @ size_v.swapaxes(-1, -2))
        dw_error = dw * u * (roundings(v.shape[-1]) + 4)
        delta = (w * dw).sum(-1, keepdims=True)
        delta_error = (e * dw + w * dw_error).sum(-1, keepdims=True)
        delta_error += (u * (roundings(Lk) + 8) + stored) * delta
        ds = w * (dw + delta)
        ds_error = (e + (4 * u + stored) * w) * (dw + delta) + w * (dw_error + delta_error)
        capped, capped_error = self._through_softcap(ds, ds_error)
        rows, columns = u * (roundings(Lq) + 8), u * (roundings(Lk) + 8)
        scale = abs(self.scale)
        size = scale * max(k.max(initial=0), q.max(initial=0), 1)
        unsure = (
            self._spoiled(v, grad)
            | overflow
            | ((dw.sum(-1, keepdims=True) * size) > p.largest / 1e6)
        )
        pairs = self.visible & unsure
        columns_unsure = pairs.any(-2)[..., None]
        weighted = e + (rows + stored) * w + p.flushed * self.visible
        # Slopes are stored in units that the largest possible one is below 2^15 of.
        lengths = (
            np.sqrt((x**2).sum(-1)).max((1, 2), initial=0)[:, None, None, None]
            for x in (size_g, size_v)
        )
        capped_error = capped_error + p.flushed * 2.0**-12 * grown * math.prod(lengths)
        sinks = self.sink_error * delta + self.sink_weight * (delta_error + rows * delta)
        return {
            "query": (scale * (capped_error + (columns + stored) * capped) @ k, unsure),
            "key": (
                scale * (capped_error + (rows + stored) * capped).swapaxes(-1, -2) @ q,
                columns_unsure,
            ),
            "value": (grown * weighted.swapaxes(-1, -2) @ size_g, columns_unsure),
            "bias": (ds_error + rows * ds, pairs),
            "sinks": (np.nan_to_num(sinks[..., 0]), unsure[..., 0]),
        }

    def _through_softcap(self, ds, error):
        """ds and its error times ``1 − tanh²`` of the score."""
        if self.softcap is None:
            return ds, error
        e = self.scaled_error + 4 * self.precision.unit * abs(_finite(self.scaled))
        low, at, high = (
            1 - np.tanh(x / self.softcap) ** 2
            for x in (self.scaled - e, self.scaled, self.scaled + e)
        )
        steepest = np.where(abs(self.scaled) <= e, 1.0, np.maximum(low, high))
        slope_error = np.nan_to_num(np.maximum(steepest - at, at - np.minimum(low, high)))
        slope_error += 8 * self.precision.unit
        slope = np.nan_to_num(at)
        return ds * slope, error * (slope + slope_error) + ds * slope_error

    def _spoiled(self, v, grad):
        """Rows ``(B, Hq, Lq, 1)`` whose gradient is no number, or may be none."""
        bad = np.isnan(self.weights).any(-1, keepdims=True) | np.isinf(self.lse) | self.unsure
        for x in (self.q, grad):
            bad = bad | ~np.isfinite(x).all(-1, keepdims=True)
        for x in (self.k, v):
            others = ~np.isfinite(x).all(-1)[..., None, :]
            bad = bad | (self.visible & others).any(-1, keepdims=True)
        return bad & ~self.empty


def _times_log(w, log):
    return np.where(w == 0, 0.0, w * log)


def _edges(n, bins):
    bins = min(n, bins)
    return np.arange(bins) * n // max(bins, 1)
