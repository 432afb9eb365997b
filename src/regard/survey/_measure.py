"""What a survey adds up of one layer of one document: sums and counts, head by head.

All of it comes from one pass over the weights and a gather of the roles' pairs, as in
``regard.heads``; nucleus sizes and the histogram of weights from the whole rows of some queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.errors import UnsupportedError
from regard.heads._measure import Pass, means_of, read_pass
from regard.heads._patterns import Patterns
from regard.survey._statistics import (
    STATISTICS,
    WEIGHT_BINS,
    histogram,
    nucleus_sizes,
    weight_histogram,
)

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights

FEWEST_QUERIES = 32  # of a document whose keys may be among the top receivers
RECEIVERS = 8
ELEMENTS = 2**20  # of the whole rows that are read at once

Found = dict[str, Any]


class Document:
    """Measures the layers of one document, one after the other.

    Args:
        tokens: texts of the keys.
        queries: how many there are.
        places: whether queries and keys are the same tokens.
        every: of how many queries one is read whole.
    """

    def __init__(self, tokens: tuple[str, ...], queries: int, places: bool, every: int) -> None:
        self.tokens, self._rows = tokens, range(queries)
        self._whole = range(min(every // 2, max(0, queries - 1)), queries, every)
        self._patterns = Patterns(tokens, np.arange(queries)) if places else None
        self._pairs_of: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def measured(self, weights: AttentionWeights[Any]) -> Found:
        """Sums, counts and histograms of a layer's heads, each ``(heads, ...)``.

        A head with a weight that is not finite counts in ``not_finite`` alone.
        """
        read = read_pass(weights, self._rows, self._patterns)
        heads, queries = read.found["entropy"].shape
        finite = np.isfinite(read.found["received"]).all(-1) & np.isfinite(
            read.found["entropy"]
        ).all(-1)
        with np.errstate(invalid="ignore", over="ignore"):
            found = {
                "queries": np.full(heads, queries),
                "not_finite": np.full(heads, 0),
                "documents": np.full(heads, 1),
                **self._per_query(read),
                **self._roles(read),
                **self._whole_rows(weights, read),
                "max_score": _largest_score(weights, heads),
            }
        for name, x in found.items():
            if not finite.all():
                x[~finite] = -np.inf if name == "max_score" else 0
        found["not_finite"][~finite] = queries
        found["receivers"] = [
            self._receivers(row) if ok else [] for row, ok in zip(read.found["received"], finite)
        ]
        return found

    def _per_query(self, read: Pass) -> Found:
        sees = np.broadcast_to(read.seen.count > 0, read.found["entropy"].shape)
        found: Found = {}
        for name in ("entropy", "distance"):
            values = np.where(sees, read.found[name], 0).astype(np.float64)
            found[f"{name}_sum"] = values.sum(-1)
            found[f"{name}_count"] = sees.sum(-1)
            found[f"{name}_histogram"] = self._histogram(name, values, sees)
        return found

    def _histogram(self, name: str, values: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Of the values that count; the others, which are 0, are taken off again."""
        statistic = STATISTICS[name]
        places = statistic.places(np.nan_to_num(values))
        counts = histogram(places, statistic.bins)
        counts[:, int(statistic.places(np.zeros(1))[0])] -= (~counted).sum(-1)
        return counts

    def _roles(self, read: Pass) -> Found:
        """Sums of every role, and the shares of those that are statistics."""
        means = means_of(read, self._rows, self._patterns)
        count = means["counted"]
        sums = np.nan_to_num(means["scores"] * count)
        found: Found = {
            "role_sum": sums,
            "role_count": count.astype(np.int64),
            "role_even_sum": np.nan_to_num(means["even"] * count),
            "role_largest_sum": np.nan_to_num(means["largest"] * sums),
            "role_overlap_sum": (means["overlap"] * count[:, None]).reshape(len(sums), -1),
            "sees_all": means["sees_all"].astype(np.int64),
        }
        for name, statistic in STATISTICS.items():
            if statistic.role is None:
                continue
            found[f"{name}_sum"] = sums[:, statistic.role].copy()
            found[f"{name}_count"] = found["role_count"][:, statistic.role].copy()
            shares, told = self._shares(read, statistic.role)
            found[f"{name}_histogram"] = self._histogram(name, shares, told)
        return found

    def _shares(self, read: Pass, role: int) -> tuple[np.ndarray, np.ndarray]:
        """``(heads, queries)``: the weight on a role's keys, and which queries see one."""
        heads, queries = read.found["entropy"].shape
        shares, told = np.zeros((heads, queries)), np.zeros((heads, queries), bool)
        if read.pairs is None:
            return shares, told
        of_role, rows = self._pairs(role)
        is_seen = read.is_seen[:, of_role]
        if len(rows) == len(np.unique(rows)):
            shares[:, rows] = read.pairs[:, of_role]
        else:
            for head, own in zip(shares, read.pairs[:, of_role]):
                head += np.bincount(rows, own, queries)
        for head, seen in zip(told if len(is_seen) > 1 else told[:1], is_seen):
            head[rows[seen]] = True
        return shares, told if len(is_seen) > 1 else np.repeat(told[:1], heads, 0)

    def _pairs(self, role: int) -> tuple[np.ndarray, np.ndarray]:
        """Places of a role's pairs among the patterns', and their queries."""
        assert self._patterns is not None
        if role not in self._pairs_of:
            starts, queries = self._patterns.starts, self._patterns.queries
            ends = np.append(starts[1:], len(queries))
            kinds = np.flatnonzero(self._patterns.kinds[:, role])
            runs = [np.arange(starts[kind], ends[kind]) for kind in kinds]
            places = np.concatenate([*runs, np.zeros(0, np.int64)]).astype(np.int64)
            self._pairs_of[role] = places, queries[places]
        return self._pairs_of[role]

    def _whole_rows(self, weights: AttentionWeights[Any], read: Pass) -> Found:
        """Nucleus sizes, and the histogram of weights, of every so many queries."""
        heads = len(read.found["entropy"])
        counts = np.zeros((heads, WEIGHT_BINS), np.int64)
        sizes, sees = [np.zeros((heads, 0), np.int64)], [np.zeros((heads, 0), bool)]
        for rows, columns in self._blocks(read, heads):
            block = to_numpy(weights.part(slice(rows[0], rows[-1] + 1, rows.step), columns)[...])
            seen = np.broadcast_to(
                read.seen.count[:, rows[0] : rows[-1] + 1 : rows.step], block.shape[:2]
            )
            counts += weight_histogram(block)
            counts[:, -1] -= block[0].size - seen.sum(-1)  # those that are masked
            sizes.append(nucleus_sizes(block))
            sees.append(seen > 0)
        found, counted = np.concatenate(sizes, 1), np.concatenate(sees, 1)
        found = np.where(counted, found, 0)
        return {
            "nucleus_sum": found.sum(-1).astype(np.float64),
            "nucleus_count": counted.sum(-1),
            "nucleus_histogram": self._histogram("nucleus", found, counted),
            "weight_histogram": counts,
        }

    def _blocks(self, read: Pass, heads: int) -> Iterator[tuple[range, slice]]:
        """Rows to read whole, some at a time, and the keys that they see."""
        low, high = read.seen.low, read.seen.high
        at = 0
        while at < len(self._whole):
            first = self._whole[at]
            width = max(1, int(high[first] - low[first]) + self._whole.step)
            some = self._whole[at : at + max(1, ELEMENTS // (heads * width))]
            if len(some) > 16 and width < read.part.shape[-1] // 4:  # of a window, near each other
                some = some[: max(16, width // self._whole.step)]
            start, end = int(low[some].min()), int(high[some].max())
            yield some, slice(start, max(end, start + 1))
            at += len(some)

    def _receivers(self, received: np.ndarray) -> list[tuple[float, int]]:
        """Share of the document's weight and position of the keys with most, the first left out."""
        if len(self._rows) < FEWEST_QUERIES:
            return []
        shares = received[1:].astype(np.float64) / len(self._rows)
        order = np.argsort(-shares, kind="stable")[:RECEIVERS]
        return [(float(shares[j]), int(j) + 1) for j in order]


def _largest_score(weights: AttentionWeights[Any], heads: int) -> np.ndarray:
    """``(heads,)``; −inf where scores are not known."""
    try:
        return np.array(to_numpy(weights.max_score), np.float64)
    except UnsupportedError:
        return np.full(heads, -np.inf)
