"""The role of every head of a recording: previous token, first token (attention sink), induction.

Scores are means of weights over queries, computed from blocks of rows, so that a text of any
length takes memory for one block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.types import Float

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._base.types import Bool, Int
    from regard.recording import Recording

__all__ = ["HeadScores", "head_scores"]

ROLES = {
    "previous": "previous token",
    "first": "first token",
    "induction": "induction",
}
LEAST_SCORE = 0.3
BLOCK_WEIGHTS = 1 << 22  # of one block of rows: 16 MB of float32


@dataclasses.dataclass(frozen=True)
class HeadScores:
    """Scores of every head, each ``(layers, heads)``; NaN where a score has no query to count.

    Attributes:
        previous: mean weight on the token just before the query's.
        first: mean weight on the first token of the text.
        induction: mean weight on the tokens that came next after earlier occurrences of the
            query's token, the previous token left out, over the queries that see one.
        entropy: mean of ``−Σ w ln w``, in nats.
        queries: how many queries the means are over.
    """

    previous: Float[NDArray[np.float64], "layers heads"]
    first: Float[NDArray[np.float64], "layers heads"]
    induction: Float[NDArray[np.float64], "layers heads"]
    entropy: Float[NDArray[np.float64], "layers heads"]
    queries: int

    def role(self, layer: int, head: int) -> str:
        """``"previous token"``, ``"first token"`` or ``"induction"``: the highest score.

        Empty where no score reaches 0.3. Where induction does, the first token is left out: it is
        such a head's attention sink while no token repeats.
        """
        scores = {name: np.nan_to_num(float(getattr(self, name)[layer, head])) for name in ROLES}
        if scores["induction"] >= LEAST_SCORE:
            scores["first"] = 0.0
        name = max(scores, key=lambda name: scores[name])
        return ROLES[name] if scores[name] >= LEAST_SCORE else ""


def head_scores(recording: Recording[Any], queries: int = 2048) -> HeadScores:
    """Scores every head of a recording.

    Args:
        recording: of self-attention: queries and keys are the same tokens.
        queries: the most queries to read, in evenly spaced blocks. A text of that length or less
            is scored whole.

    Raises:
        ValueError: a cross-attention recording, or ``queries`` below 1.

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    if recording.query_tokens != recording.tokens:
        raise ValueError(
            "head_scores: the queries of this recording are not its keys; scores by place need a "
            "text that was read by itself."
        )
    if queries < 1:
        raise ValueError(f"head_scores: queries is {queries}; at least 1 is needed.")
    _, ids = np.unique(recording.tokens, return_inverse=True)
    blocks = list(_blocks(len(ids), queries))
    layers = [_layer_scores(weights, ids, blocks) for weights in recording.weights]
    scores = {name: np.array([layer[name] for layer in layers]) for name in layers[0]}
    return HeadScores(**scores, queries=sum(len(block) for block in blocks))


def _blocks(length: int, queries: int) -> Iterator[range]:
    """Ranges of rows, evenly spaced, about ``queries`` rows together."""
    rows = max(1, min(64, BLOCK_WEIGHTS // length, queries))
    count = min(-(-length // rows), max(1, queries // rows))
    if length <= queries:
        count = -(-length // rows)
    for n in range(count):
        start = n * rows if length <= queries else n * (length - rows) // max(1, count - 1)
        yield range(start, min(start + rows, length))


def _layer_scores(
    weights: Any, ids: Int[np.ndarray, " L"], blocks: list[range]
) -> dict[str, Float[np.ndarray, " heads"]]:
    parts = [weights.part(slice(block.start, block.stop)) for block in blocks]
    rows = ((np.array(block), to_numpy(part[...])) for block, part in zip(blocks, parts))
    entropy = np.concatenate([to_numpy(part.entropy()) for part in parts], -1)
    return {**mean_weights(rows, ids), "entropy": entropy.mean(-1, dtype=np.float64)}


def mean_weights(
    blocks: Iterable[tuple[Int[np.ndarray, " R"], Float[np.ndarray, "heads R L"]]],
    ids: Int[np.ndarray, " L"],
) -> dict[str, Float[np.ndarray, " heads"]]:
    """``previous``, ``first`` and ``induction`` of ``HeadScores``: ``(heads,)`` each.

    Args:
        blocks: positions of some queries, and their weights.
        ids: of the tokens; equal ones are the same token.
    """
    sums: dict[str, Any] = dict.fromkeys(("previous", "first", "induction"), 0.0)
    counts: dict[str, Any] = dict.fromkeys(sums, 0)
    for rows, weights in blocks:
        query, key = np.nonzero(_follows_same(ids, rows))
        later = rows > 0
        for head, w in enumerate(weights):
            looked_up = np.bincount(query, w[query, key], minlength=len(rows))
            sees_one = np.bincount(query, w[query, key] > 0, minlength=len(rows)) > 0
            found = {
                "previous": w[later, rows[later] - 1],
                "first": w[later, 0],
                "induction": looked_up[sees_one],
            }
            one = np.arange(len(weights)) == head
            for name, values in found.items():
                sums[name] = sums[name] + one * values.sum(dtype=np.float64)
                counts[name] = counts[name] + one * len(values)
    with np.errstate(invalid="ignore"):
        return {name: sums[name] / counts[name] for name in sums}


def _follows_same(
    ids: Int[np.ndarray, " L"], rows: Int[np.ndarray, " R"]
) -> Bool[np.ndarray, "R L"]:
    """Whether key j follows an earlier occurrence of query i's token: ``ids[j - 1] == ids[i]``.

    Not where j is i − 1 or i, to which a head for the previous token, or its own, attends too.
    """
    before = np.concatenate([[-1], ids[:-1]])
    return (before == ids[rows][:, None]) & (np.arange(len(ids)) < rows[:, None] - 1)
