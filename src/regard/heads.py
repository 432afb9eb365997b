"""The role of every head of a recording: previous token, first token (attention sink), induction.

Scores are means of weights over queries, computed from summaries and blocks of rows, so that a
text of any length takes memory for one block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.types import Float, Int
from regard._weights.parts import place_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._base.types import Bool
    from regard.recording import Recording

__all__ = ["HeadScores", "head_scores"]

ROLES = {
    "previous": "previous token",
    "first": "first token",
    "induction": "induction",
}
LEAST_SCORE = 0.3
BLOCK_WEIGHTS = 1 << 22  # of one block of rows: 16 MB of float32

# Of the table.
COLUMNS = ("first", "previous", "induction", "entropy", "distance")
HEADING = f"{'head':8}{'role':14}{''.join(f'{name:>11}' for name in COLUMNS)}  received most"
SHOWN_KEYS = 3
MOST_LINES = 32
LONGEST_TOKEN = 14


@dataclasses.dataclass(frozen=True, repr=False)
class HeadScores:
    """Scores of every head, each ``(layers, heads)``; NaN where a score has no query to count.

    Layers and heads are in the order of ``layers`` and ``head_numbers``; a layer with fewer heads
    than another ends in NaN. In cross-attention no score by place counts.

    Attributes:
        previous: mean weight on the token just before the query's.
        first: mean weight on the first token of the text.
        induction: mean weight on the tokens that came next after earlier occurrences of the
            query's token, the previous token left out, over the queries that see one.
        entropy: mean of ``−Σ w ln w``, in nats.
        distance: mean of ``Σ w |query position − key position|``, in tokens.
        receivers: ``(layers, heads, n)``, the positions of the keys with most weight, from the
            first on; −1 where there is no head.
        received: ``(layers, heads, n)``, their mean weights over the queries.
        queries: how many queries the means are over.
        layers: number of each layer.
        head_numbers: numbers of each layer's heads.
        tokens: texts of the keys.
    """

    previous: Float[NDArray[np.float64], "layers heads"]
    first: Float[NDArray[np.float64], "layers heads"]
    induction: Float[NDArray[np.float64], "layers heads"]
    entropy: Float[NDArray[np.float64], "layers heads"]
    distance: Float[NDArray[np.float64], "layers heads"]
    receivers: Int[NDArray[np.int64], "layers heads n"]
    received: Float[NDArray[np.float64], "layers heads n"]
    queries: int
    layers: tuple[int, ...]
    head_numbers: tuple[tuple[int, ...], ...]
    tokens: tuple[str, ...]

    def role(self, layer: int, head: int) -> str:
        """``"previous token"``, ``"first token"`` or ``"induction"``: the highest score.

        Empty where no score reaches 0.3. Where induction does, the first token is left out: it is
        such a head's attention sink while no token repeats.

        Args:
            layer, head: their numbers; negative ones count from the last.

        Raises:
            IndexError: no such layer or head.
        """
        place = place_of("scores: layer", layer, self.layers)
        return self._role(place, place_of("scores: head", head, self.head_numbers[place]))

    def _role(self, *place: int) -> str:
        scores = {name: np.nan_to_num(float(getattr(self, name)[place])) for name in ROLES}
        if scores["induction"] >= LEAST_SCORE:
            scores["first"] = 0.0
        name = max(scores, key=lambda name: scores[name])
        return ROLES[name] if scores[name] >= LEAST_SCORE else ""

    def table(self) -> str:
        """A line for each head: its role, its scores, and the keys that get most weight."""
        return "\n".join([HEADING, *self._lines()])

    def _lines(self) -> Iterator[str]:
        for at, (layer, heads) in enumerate(zip(self.layers, self.head_numbers)):
            for h, head in enumerate(heads):
                numbers = (getattr(self, name)[at, h] for name in COLUMNS)
                shown = "".join("          –" if np.isnan(x) else f"{x:11.3f}" for x in numbers)
                keys = zip(self.receivers[at, h, :SHOWN_KEYS], self.received[at, h])
                received = ", ".join(f"{j} {_quoted(self.tokens[j])} {x:.3f}" for j, x in keys)
                yield f"{f'L{layer}H{head}':8}{self._role(at, h):14}{shown}  {received}"

    def __repr__(self) -> str:
        lines = list(self._lines())
        left_out = len(lines) - MOST_LINES
        more = [f"... and {left_out} more: print(scores.table())"] if left_out > 0 else []
        title = f"HeadScores, heads: {len(lines)}, means over queries: {self.queries}"
        return "\n".join([title, HEADING, *lines[:MOST_LINES], *more])


def head_scores(recording: Recording[Any], queries: int = 2048, receivers: int = 8) -> HeadScores:
    """Scores every head of a recording.

    Args:
        recording: places are scored where queries and keys are the same tokens.
        queries: the most queries to read, in evenly spaced blocks. A text of that length or less
            is scored whole.
        receivers: how many of the keys that get most weight to name.

    Raises:
        ValueError: a recording without queries, ``queries`` below 1, or ``receivers`` below 0.

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    if not recording.query_tokens:
        raise ValueError("head_scores: the recording has no queries to score.")
    if queries < 1:
        raise ValueError(f"head_scores: queries is {queries}; at least 1 is needed.")
    if receivers < 0:
        raise ValueError(f"head_scores: receivers is {receivers}; it must not be negative.")
    ids = None
    if recording.query_tokens == recording.tokens:
        _, ids = np.unique(recording.tokens, return_inverse=True)
    blocks = list(_blocks(len(recording.query_tokens), queries, len(recording.tokens)))
    most = min(receivers, len(recording.tokens))
    found = [_layer_scores(weights, ids, blocks, most) for weights in recording.weights]
    heads = max(layer.heads for layer in recording.layers)
    return HeadScores(
        **{name: _padded([layer[name] for layer in found], heads) for name in found[0]},
        queries=sum(len(block) for block in blocks),
        layers=recording.layer_numbers,
        head_numbers=tuple(layer.head_numbers for layer in recording.layers),
        tokens=recording.tokens,
    )


def _padded(of_layers: list[Any], heads: int) -> Any:
    """``(layers, heads, ...)``; NaN, or −1, where a layer has fewer heads."""
    first = of_layers[0]
    fill = -1 if first.dtype == np.int64 else np.nan
    out = np.full((len(of_layers), heads, *first.shape[1:]), fill, first.dtype)
    for row, x in zip(out, of_layers):
        row[: len(x)] = x
    return out


def _quoted(token: str) -> str:
    """A token in at most 14 characters, escaped."""
    shown = ascii(token) if not token.isprintable() else repr(token)
    return shown if len(shown) <= LONGEST_TOKEN else f"{shown[: LONGEST_TOKEN - 4]}...'"


def _blocks(length: int, queries: int, keys: int = 1) -> Iterator[range]:
    """Ranges of rows, evenly spaced, about ``queries`` rows together."""
    rows = max(1, min(64, BLOCK_WEIGHTS // keys, queries))
    count = min(-(-length // rows), max(1, queries // rows))
    if length <= queries:
        count = -(-length // rows)
    for n in range(count):
        start = n * rows if length <= queries else n * (length - rows) // max(1, count - 1)
        yield range(start, min(start + rows, length))


def _layer_scores(
    weights: Any, ids: Int[np.ndarray, " L"] | None, blocks: list[range], receivers: int
) -> dict[str, Any]:
    """Each score of a layer's heads: ``(heads,)``, and ``(heads, receivers)``."""
    parts = [weights.part(slice(block.start, block.stop)) for block in blocks]
    Hq, _, Lk = weights.shape
    sums = {"entropy": np.zeros(Hq), "distance": np.zeros(Hq), "received": np.zeros((Hq, Lk))}
    for part in parts:
        found = part.summary(only=tuple(sums))
        sums["received"] += to_numpy(found.received)
        for name in ("entropy", "distance"):
            sums[name] += to_numpy(getattr(found, name)).sum(-1, dtype=np.float64)
    means = {name: x / sum(map(len, blocks)) for name, x in sums.items()}
    order = np.argsort(-means["received"], -1, kind="stable")[:, :receivers].astype(np.int64)
    places = {name: np.full(Hq, np.nan) for name in ROLES}
    if ids is not None:
        rows = ((np.array(block), to_numpy(part[...])) for block, part in zip(blocks, parts))
        places = mean_weights(rows, ids)
    received = np.take_along_axis(means["received"], order, -1)
    return {**places, **means, "receivers": order, "received": received}


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
