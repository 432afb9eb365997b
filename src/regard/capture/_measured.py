"""What a watch measures of one call of attention, and the first score that is not finite."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from regard._backends.formula import capped
from regard._backends.gather import pair_scores
from regard._base.arrays import NumpyArrays, accumulating_name, arrays_of, to_numpy
from regard._call.call import Call
from regard._call.visible import Seen, picked
from regard._weights.attention_weights import AttentionWeights
from regard._weights.reductions import PerQuery
from regard.capture._sight import Sight

MEASURES = ("max_score", "entropy_mean", "entropy_min", "first_token", "distance")
MOST_LOOKED_AT = 16  # rows without a finite score, which a bias of −∞ may explain


class NonFinite(NamedTuple):
    """The first score that was NaN or infinite, and what made it so; ``print`` it."""

    step: int
    """The step of the watch."""
    layer: str
    """The name of the module."""
    batch: int
    """Which element of the batch."""
    head: int
    """The query head."""
    query: int
    """The query's index."""
    key: int
    """The key's index; −1 where it is the sink."""
    score: float
    """The score: NaN, inf or −inf."""
    cause: str
    """``"query"``, ``"key"``, ``"bias"`` or ``"sink"``, which holds such a number already; or
    ``"score"``, whose product overflows."""

    def __str__(self) -> str:
        where = f"step {self.step}: {self.layer or 'the model'}, head {self.head}"
        if self.cause == "sink":
            return f"{where}: the logit of its sink is {self.score}."
        why = "query and key are finite, and their product overflows"
        if self.cause != "score":
            why = f"the {self.cause} holds NaN or inf already"
        return (
            f"{where}: the score of query {self.query} and key {self.key} of batch element "
            f"{self.batch} is {self.score}; {why}."
        )


class Rows(NamedTuple):
    """Numbers of every query of a call, each ``(B, Hq, Lq)`` in float64."""

    row_max: np.ndarray  # the largest score
    lse: np.ndarray
    entropy: np.ndarray
    distance: np.ndarray
    first_token: np.ndarray  # the weight of the first key that is seen

    @classmethod
    def of(cls, call: Call, sight: Sight) -> Rows:
        """Those of a call without a value, detached; in memory linear in the lengths."""
        names = ("row_max", "lse", "entropy", "distance")
        B, Hq, _, Lq, _ = call.sizes
        found = AttentionWeights._of(call)._ask(*(PerQuery(call, name) for name in names))
        row_max, lse, entropy, distance = (
            to_numpy(x).reshape(B, Hq, Lq).astype(np.float64) for x in found
        )
        with np.errstate(all="ignore"):
            first_token = np.minimum(np.exp(_first_scores(call, sight) - lse), 1)
        return cls(row_max, lse, entropy, distance, first_token)

    def measures(self, sight: Sight, is_token: np.ndarray) -> dict[str, np.ndarray]:
        """Each of ``MEASURES``, ``(Hq,)``; NaN of a head where no query counts.

        Args:
            is_token: bool ``(B or 1, Lq)``, False for padding.
        """
        is_token = is_token[:, None]
        several = np.broadcast_to(is_token & (sight.seen > 1), self.lse.shape)
        some = np.broadcast_to(is_token & (sight.seen > 0), self.lse.shape)
        means = (_mean(x, several) for x in (self.entropy, self.first_token, self.distance))
        entropy, first_token, distance = means
        least = np.where(several, self.entropy, np.inf).min((0, 2))
        found = {
            "max_score": np.where(some, self.row_max, -np.inf).max((0, 2)),
            "entropy_mean": entropy,
            "entropy_min": np.where(several.any((0, 2)), least, np.nan),
            "first_token": first_token,
            "distance": distance,
        }
        assert tuple(found) == MEASURES
        return found


def _mean(x: np.ndarray, where: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(where, x, 0).sum((0, 2)) / where.sum((0, 2))


def _first_scores(call: Call, sight: Sight) -> np.ndarray:
    """``(B, Hq, Lq)``: the score of each query with the first key that it sees."""
    xp, (B, Hq, _, Lq, _) = arrays_of(call.query), call.sizes
    rows = []
    for b in range(B):
        first = sight.first[b if len(sight.first) > 1 else 0]
        one = call.of_heads(range(b, b + 1), range(Hq))
        parts = [one] if len(first) == 1 else [one.head(h) for h in range(Hq)]
        found = [
            to_numpy(pair_scores(xp, part, np.arange(Lq), keys))[0]
            for part, keys in zip(parts, first)
        ]
        rows.append(np.concatenate(found).astype(np.float64))
    return np.stack(rows)


def first_nonfinite(
    call: Call, sight: Sight, rows: Rows, is_token: np.ndarray, step: int, layer: str
) -> NonFinite | None:
    """The first score of a call that is NaN or infinite.

    First by batch element, head, query and key. −∞ is a weight of 0: it counts where all scores of
    a query are −∞, and no bias made them so. Padding is left out, as in ``Rows.measures``.
    """
    seeing = np.broadcast_to(is_token[:, None] & (sight.seen > 0), rows.lse.shape)
    for certain, where in (
        (True, seeing & ~np.isfinite(rows.lse) & (rows.lse != -np.inf)),
        (False, seeing & (rows.lse == -np.inf)),
    ):
        for place in np.argwhere(where)[: 1 if certain else MOST_LOOKED_AT]:
            found = _explained(call, certain, *map(int, place))
            if found is not None:
                key, score, cause = found
                b, h, i = map(int, place)
                return NonFinite(step, layer, b, h, i, key, score, cause)
    return None


def _explained(call: Call, certain: bool, b: int, h: int, i: int) -> tuple[int, float, str] | None:
    """Key, score and cause of the first such score of a query; None where there is none."""
    sink = -np.inf if call.sinks is None else float(to_numpy(call.sinks[h : h + 1])[0])
    one = call.of_heads(range(b, b + 1), range(h, h + 1)).rows(slice(i, i + 1))
    dtype = accumulating_name(call.query)
    q, k = (to_numpy(x)[0, 0].astype(dtype) for x in (one.query, one.key))
    keys = np.arange(len(k))
    bias = np.zeros(len(k), dtype)
    if one.bias is not None:
        bias = bias + to_numpy(picked(one.bias[0], 0 * keys, keys))[0]
    with np.errstate(all="ignore"):
        s = capped(NumpyArrays(dtype), call, (k @ q[0]) * call.scale) + bias
    seen = Seen(one).pairs(0 * keys, keys)[0]
    bad = seen & (np.isnan(s) | (s == np.inf) if certain else ~np.isfinite(s) & (bias != -np.inf))
    if not bad.any():
        if np.isnan(sink) or sink == np.inf:
            return -1, sink, "sink"
        if not certain:
            return None
        # Another order of the sum overflowed: the largest is the one.
        exact = k.astype(np.float64) @ q[0].astype(np.float64) * call.scale
        j = int(np.where(seen, abs(exact), -1).argmax())
        return j, float(np.copysign(np.inf, exact[j])), "score"
    j = int(bad.argmax())
    causes = {"query": q[0], "key": k[j], "bias": bias[j]}
    cause = next((name for name, x in causes.items() if not np.isfinite(x).all()), "score")
    return j, float(s[j]), cause
