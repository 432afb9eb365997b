"""The scores of a layer's heads: one pass over the weights of some rows, and a gather of pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.types import Float, Int
from regard._call.visible import Seen
from regard._weights.origin import seen_of
from regard._weights.pairs import weights_at
from regard.heads._patterns import Patterns
from regard.heads._roles import BY_KEY, EVEN, PLACE, ROLES

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights
    from regard._weights.one_pass import Reduced

MOST_QUERIES, FEWEST_QUERIES = 512, 256
MOST_WEIGHTS = 2**23  # of one head, from which on the queries become fewer
EVEN_AT = PLACE[EVEN.name]  # the last
READ: tuple[Reduced, ...] = ("lse", "entropy", "distance", "received")


def sampled(length: int, keys: int, queries: int | None) -> range:
    """The queries to read: all, or evenly spaced ones.

    The step is a prime, so that in a text of lines of one length every place of a line is met.
    """
    most = min(MOST_QUERIES, max(FEWEST_QUERIES, MOST_WEIGHTS // max(1, keys)))
    step = -(-length // (most if queries is None else queries))
    if step > 1:
        step = next(n for n in range(max(3, step), 2 * step + 3) if _is_prime(n))
    return range(step // 2, length, step)


def _is_prime(n: int) -> bool:
    return all(n % divisor for divisor in range(2, int(n**0.5) + 1))


class Pass(NamedTuple):
    """What is read of a layer's weights, before anything is a mean.

    Attributes:
        part: the weights of the rows.
        found: ``lse``, ``entropy``, ``distance`` ``(heads, rows)``; ``received`` ``(heads, Lk)``,
            the sum over the rows.
        seen: what the rows see.
        pairs: ``(heads, n)``, the weights of the patterns' pairs; None without patterns.
        is_seen: ``(heads or 1, n)``, which of these pairs are seen by a query that has a choice.
        counted, even: ``(heads or 1, roles)``, as in ``HeadScores``.
    """

    part: AttentionWeights[Any]
    found: dict[str, Any]
    seen: Seen
    pairs: Float[np.ndarray, "heads n"] | None
    is_seen: np.ndarray
    counted: np.ndarray
    even: np.ndarray


def read_pass(weights: AttentionWeights[Any], rows: range, patterns: Patterns | None) -> Pass:
    """Reads the weights of some rows; arguments as of ``measured``."""
    part = weights.part(slice(rows.start, rows.stop, rows.step))
    summary = part.summary(only=READ)
    found: dict[str, Any] = {
        name: to_numpy(part._lse_of_scores() if x is None else x)
        for name, x in ((name, getattr(summary, name)) for name in READ)
    }
    seen, none = seen_of(part), np.zeros((1, 0))
    if patterns is None:
        return Pass(part, found, seen, None, none, none, none)
    is_seen, n, shares = patterns.known(seen, _seen_by)
    w = weights_at(part._call, found["lse"], patterns.queries, patterns.keys, is_seen)
    return Pass(part, found, seen, w, is_seen, n, shares)


def measured(
    weights: AttentionWeights[Any], rows: range, patterns: Patterns | None, receivers: int
) -> dict[str, Any]:
    """Each score of a layer's heads: ``(heads,)``, ``(heads, roles)``, ``(heads, receivers)``.

    Args:
        weights: of the layer.
        rows: the queries to read.
        patterns: of the text; None in cross-attention, which has no roles by place.
        receivers: how many of the keys with most weight to name.
    """
    read = read_pass(weights, rows, patterns)
    received = read.found["received"].astype(np.float64) / len(rows)
    order = np.argsort(-received, -1, kind="stable")[:, :receivers].astype(np.int64)
    return {
        **means_of(read, rows, patterns),
        "receivers": order, "received": np.take_along_axis(received, order, -1),
    }  # fmt: skip


def means_of(read: Pass, rows: range, patterns: Patterns | None) -> dict[str, Any]:
    """``measured`` without the receivers, of a pass."""
    found, seen = read.found, read.seen
    means = {name: found[name].mean(-1, dtype=np.float64) for name in ("entropy", "distance")}
    # A window, a mask or documents hide some of what stands before the last query, or after it.
    Lk = read.part.shape[-1]
    causal_end = rows[-1] + 1 if seen.high[-1] < Lk else Lk
    sees_all = np.broadcast_to(seen.count[:, -1] >= causal_end, len(means["entropy"]))
    return {**means, **_roles(read, patterns), "sees_all": sees_all.astype(np.float64)}


def _roles(read: Pass, patterns: Patterns | None) -> dict[str, Any]:
    """``scores``, ``even``, ``counted``, ``overlap``, ``largest`` of ``HeadScores``, of a layer."""
    found, seen = read.found, read.seen
    heads, rows = found["entropy"].shape
    received = found["received"].astype(np.float64) / rows
    scores, even, largest = np.full((3, heads, len(ROLES)), np.nan)
    overlap = np.zeros((heads, len(ROLES), len(ROLES)))
    counted = np.zeros((heads, len(ROLES)))
    with np.errstate(invalid="ignore", divide="ignore"):
        some = seen.count > 1
        spread = np.where(some, np.exp(found["entropy"], dtype=np.float64) / seen.count, 0)
        scores[:, EVEN_AT] = spread.sum(-1) / some.sum(-1)
    even[:, EVEN_AT], counted[:, EVEN_AT] = 0, some.sum(-1)
    out = {
        "scores": scores, "even": even, "counted": counted, "overlap": overlap, "largest": largest,
    }  # fmt: skip
    if patterns is None or read.pairs is None:
        return out
    by_kind = np.add.reduceat(read.pairs, patterns.starts, -1, dtype=np.float64)
    kinds = patterns.kinds.astype(np.float64)
    sums = by_kind @ kinds
    for role, keys in zip(BY_KEY, patterns.sets):
        sums[:, PLACE[role.name]] = (received @ keys) * rows
        with np.errstate(invalid="ignore"):
            of_one = (received * keys).max(-1, initial=0)
            largest[:, PLACE[role.name]] = of_one * rows / sums[:, PLACE[role.name]]
    n = read.counted
    with np.errstate(invalid="ignore", divide="ignore"):
        counted[:, :EVEN_AT] = n[:, :EVEN_AT]
        scores[:, :EVEN_AT] = (sums / n)[:, :EVEN_AT]
        even[:, :EVEN_AT] = read.even[:, :EVEN_AT]
        both = kinds.T @ (by_kind[..., None] * kinds)
        overlap[...] = np.nan_to_num(both / n[:, None])
    return out


def _seen_by(seen: Seen, patterns: Patterns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What of the roles' keys is seen, by heads, or once where they agree.

    Which pairs ``(heads, n)``; how many queries see a key of each role, and what even weights would
    score there, ``(heads, roles)``.
    """
    some = seen.count > 1
    is_seen = seen.pairs(patterns.queries, patterns.keys) & some[:, patterns.queries]
    counts = _counts(seen, is_seen, patterns)
    told = counts > 0
    n = told.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return is_seen, n, np.where(told, counts / seen.count[..., None], 0).sum(1) / n


def _counts(
    seen: Seen, is_seen: np.ndarray, patterns: Patterns
) -> Int[np.ndarray, "heads rows roles"]:
    """How many keys of each role each query sees."""
    counts = np.zeros((len(is_seen), len(patterns.rows), len(ROLES)), np.int64)
    ends = [*patterns.starts[1:], len(patterns.queries)]
    for kind, start, end in zip(patterns.kinds, patterns.starts, ends):
        queries, of_kind = patterns.queries[start:end], np.flatnonzero(kind)
        for h, seen_by in enumerate(is_seen[:, start:end]):
            found = np.bincount(queries[seen_by], minlength=len(patterns.rows))
            counts[h][:, of_kind] += found[:, None]
    at = [PLACE[role.name] for role in BY_KEY]
    counts[..., at] = seen.of(patterns.sets)
    return counts
