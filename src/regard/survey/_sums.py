"""Sums and counts of every head, which add up in any order to the same bits."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard._base.errors import a_type
from regard._base.settings import counted
from regard._base.types import Float, Int
from regard._weights.parts import place_of
from regard.heads import HeadScores
from regard.heads._roles import BY_KEY
from regard.heads._roles import ROLES as EVERY_ROLE
from regard.survey._exact import parts_of, total_of
from regard.survey._measure import RECEIVERS
from regard.survey._statistics import STATISTICS, WEIGHT_BINS, quantiles, statistic

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

ROLES = len(EVERY_ROLE)
IS_KIND = np.array([role in BY_KEY for role in EVERY_ROLE])  # of tokens
SUMS = {  # columns of float64, and the axes after the heads
    **{f"{name}_sum": () for name in STATISTICS},
    "role_sum": (ROLES,),
    "role_even_sum": (ROLES,),
    "role_largest_sum": (ROLES,),
    "role_overlap_sum": (ROLES * ROLES,),
}
COUNTS = {
    **dict.fromkeys(("documents", "queries", "not_finite", "sees_all"), ()),
    **{f"{name}_count": () for name in STATISTICS},
    **{f"{name}_histogram": (one.bins,) for name, one in STATISTICS.items()},
    "weight_histogram": (WEIGHT_BINS,),
    "role_count": (ROLES,),
}


class TopReceiver(NamedTuple):
    """A key that many queries of its document look at.

    Attributes:
        document: number of the document in the survey.
        position: of the token in it.
        token: its text.
        received: mean weight that it gets from the queries of its document.
    """

    document: int
    position: int
    token: str
    received: float


def _rank(receiver: TopReceiver) -> tuple[float, int, int]:
    return -receiver.received, receiver.document, receiver.position


Key = tuple[int, int]  # numbers of layer and head


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeadSums:
    """What the heads of a model do, added up over documents: ``a + b`` is that of both.

    Sums and counts, so that every order and grouping gives the same bits. Results are
    ``(layers, heads)`` in the order of ``layers`` and ``head_numbers``; NaN where a layer has fewer
    heads than another, or nothing was counted.

    Attributes:
        documents, tokens: how many there are.

    Example:
        >>> import regard.survey
        >>> regard.survey.HeadSums.of_nothing().documents
        0
    """

    documents: int
    tokens: int
    _keys: tuple[Key, ...]
    _counts: Mapping[str, np.ndarray]  # (keys, ...)
    _sums: Mapping[str, np.ndarray]  # (keys, ..., 2), of ``_exact``
    _largest: np.ndarray  # (keys,): of max_score; −inf where it is not known
    _receivers: tuple[tuple[TopReceiver, ...], ...]

    @classmethod
    def of_nothing(cls) -> HeadSums:
        """Of no document: what a sum begins with."""
        return cls._made(0, 0, (), {}, {}, np.zeros(0), ())

    @classmethod
    def _made(
        cls, documents: int, tokens: int, keys: Sequence[Key],
        counts: Mapping[str, Any], sums: Mapping[str, Any], largest: Any, receivers: Any,
    ) -> HeadSums:  # fmt: skip
        """Of columns by name; one that is missing is 0, and sums are float64."""
        n = len(keys)
        zeros = {name: np.zeros((n, *axes), np.int64) for name, axes in COUNTS.items()}
        own = {
            name: np.asarray(counts[name], np.int64).reshape(zero.shape) if n else zero
            for name, zero in zeros.items()
        }
        exact = {
            name: parts_of(np.asarray(sums[name], np.float64).reshape(n, *axes))
            if n
            else np.zeros((0, *axes, 2), np.int64)
            for name, axes in SUMS.items()
        }
        return cls(documents, tokens, tuple(keys), own, exact, np.asarray(largest), receivers)

    @classmethod
    def _of_document(
        cls, document: int, tokens: Sequence[str], layers: Iterable[tuple[Any, ...]]
    ) -> HeadSums:
        """Of one document: for each layer its number, those of its heads, and what was measured."""
        keys: list[Key] = []
        found: list[dict[str, Any]] = []
        receivers: list[tuple[TopReceiver, ...]] = []
        for number, heads, measured in layers:
            keys += [(int(number), int(head)) for head in heads]
            receivers += [
                tuple(TopReceiver(document, j, tokens[j], share) for share, j in of_head)
                for of_head in measured["receivers"]
            ]
            found.append(measured)
        names = [*COUNTS, *SUMS, "max_score"]
        joined = {name: np.concatenate([x[name] for x in found]) for name in names} if found else {}
        largest = joined.get("max_score", np.zeros(0))
        return cls._made(1, len(tokens), keys, joined, joined, largest, tuple(receivers))

    def __add__(self, other: HeadSums) -> HeadSums:
        if not isinstance(other, HeadSums):
            return NotImplemented
        keys = tuple(sorted({*self._keys, *other._keys}))
        at = {key: place for place, key in enumerate(keys)}
        largest = np.full(len(keys), -np.inf)
        counts = {name: np.zeros((len(keys), *axes), np.int64) for name, axes in COUNTS.items()}
        sums = {name: np.zeros((len(keys), *axes, 2), np.int64) for name, axes in SUMS.items()}
        receivers: list[list[TopReceiver]] = [[] for _ in keys]
        for one in (self, other):
            places = [at[key] for key in one._keys]
            for columns, own in ((counts, one._counts), (sums, one._sums)):
                for name, x in columns.items():
                    x[places] += own[name]
            largest[places] = np.maximum(largest[places], one._largest)
            for place, found in zip(places, one._receivers):
                receivers[place] += found
        best = tuple(tuple(sorted(found, key=_rank)[:RECEIVERS]) for found in receivers)
        documents, tokens = self.documents + other.documents, self.tokens + other.tokens
        return HeadSums(documents, tokens, keys, counts, sums, largest, best)

    def __radd__(self, other: object) -> HeadSums:
        return self if other == 0 else NotImplemented  # of ``sum``

    def __eq__(self, other: object) -> bool:
        """Whether all sums and counts are the same bits."""
        if not isinstance(other, HeadSums):
            return NotImplemented
        mine, theirs = (x + HeadSums.of_nothing() for x in (self, other))  # in one order
        return (
            (mine.documents, mine.tokens, mine._keys, mine._receivers)
            == (theirs.documents, theirs.tokens, theirs._keys, theirs._receivers)
            and np.array_equal(mine._largest, theirs._largest)
            and all(np.array_equal(x, theirs._counts[name]) for name, x in mine._counts.items())
            and all(
                np.array_equal(total_of(x), total_of(theirs._sums[name]))
                for name, x in mine._sums.items()
            )
        )

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property  # of thousands of heads, asked for once for each
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers."""
        return tuple(sorted({layer for layer, _ in self._keys}))

    @functools.cached_property
    def head_numbers(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of each layer's heads."""
        return tuple(
            tuple(sorted(head for layer, head in self._keys if layer == number))
            for number in self.layers
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics."""
        return tuple(STATISTICS)

    @property
    def not_finite(self) -> int:
        """Queries of documents left out of a head, as one of its weights there is not finite."""
        return int(self._counts["not_finite"].max(initial=0))

    def mean(self, name: str) -> Float[NDArray[np.float64], "layers heads"]:
        """The mean of a statistic over the queries that it counts.

        Raises:
            KeyError: no such statistic.
        """
        statistic(name)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = total_of(self._sums[f"{name}_sum"]) / self._counts[f"{name}_count"]
        return self._grid(found)

    def count(self, name: str) -> Int[NDArray[np.int64], "layers heads"]:
        """Over how many queries a statistic is.

        Raises:
            KeyError: no such statistic.
        """
        statistic(name)
        return self._grid(self._counts[f"{name}_count"], 0)

    def histogram(self, name: str) -> Int[NDArray[np.int64], "layers heads bins"]:
        """How many queries have a statistic in each bin; of ``"weight"``, how many weights.

        Raises:
            KeyError: no such statistic.
        """
        if name != "weight":
            statistic(name)
        return self._grid(self._counts[f"{name}_histogram"], 0)

    @staticmethod
    def edges(name: str) -> Float[NDArray[np.float64], " bins_and_1"]:
        """Edges of a histogram's bins; the last is infinite where the last bin is open.

        Those of ``"weight"`` fall: from 1 down, each the half of the one before, to 0.

        Raises:
            KeyError: no such statistic.
        """
        if name == "weight":
            return np.append(2.0 ** -np.arange(WEIGHT_BINS), 0.0)
        return statistic(name).edges.copy()

    def quantile(self, name: str, p: float) -> Float[NDArray[np.float64], "layers heads"]:
        """The value of a statistic below which a share ``p`` of the queries lies.

        From the histogram, linear within its bin: at most the bin's width off.

        Args:
            name: of the statistic.
            p: 0.5 for the median.

        Raises:
            KeyError: no such statistic.
            TypeError: ``p`` is no number.
            ValueError: ``p`` outside 0 to 1.
        """
        found = statistic(name)
        if isinstance(p, bool) or not isinstance(p, numbers.Real):
            raise TypeError(f"survey: p is {a_type(p)}; a share from 0 to 1 is needed.")
        if not 0 <= p <= 1:
            raise ValueError(f"survey: p is {p}; a share from 0 to 1 is needed.")
        return self._grid(quantiles(self._counts[f"{name}_histogram"], found.edges, p))

    @property
    def max_score(self) -> Float[NDArray[np.float64], "layers heads"]:
        """The largest score of every head; NaN where scores are not known."""
        return self._grid(np.where(np.isneginf(self._largest), np.nan, self._largest))

    def top_receivers(self, layer: int, head: int) -> tuple[TopReceiver, ...]:
        """Up to 8 keys that get most of the weight of their document, most first.

        The first token is left out: ``mean("first")`` is its share. So are documents of fewer than
        32 queries.

        Args:
            layer, head: their numbers; negative ones count from the last.

        Raises:
            IndexError: no such layer or head.
        """
        at = place_of("survey: layer", layer, self.layers)
        of_layer = self.head_numbers[at]
        key = self.layers[at], of_layer[place_of("survey: head", head, of_layer)]
        return self._receivers[self._keys.index(key)]

    def means(self) -> HeadScores:
        """Roles and scores of every head, as ``recording.heads()`` gives them for one text.

        But entropy and distance are over the queries that see a key, where that has 0 of others.

        Raises:
            ValueError: there is no document.
        """
        if not self._keys:
            raise ValueError("survey: there is no document yet, so there is no mean.")
        count = self._counts["role_count"]
        sums = total_of(self._sums["role_sum"])
        overlap = total_of(self._sums["role_overlap_sum"]).reshape(-1, ROLES, ROLES)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = {
                "scores": sums / count,
                "even": total_of(self._sums["role_even_sum"]) / count,
                "largest": np.where(
                    IS_KIND, total_of(self._sums["role_largest_sum"]) / sums, np.nan
                ),
                "overlap": np.nan_to_num(overlap / count[:, None]),
                "counted": count.astype(np.float64),
                "sees_all": (self._counts["sees_all"] == self._counts["documents"]).astype(float),
            }
        heads = self.head_numbers
        return HeadScores(
            **{name: self._grid(x) for name, x in found.items()},
            entropy=self.mean("entropy"),
            distance=self.mean("distance"),
            receivers=np.zeros((len(heads), max(map(len, heads)), 0), np.int64),
            received=np.zeros((len(heads), max(map(len, heads)), 0)),
            queries=int(self._counts["queries"].max(initial=0)),
            layers=self.layers,
            head_numbers=heads,
            tokens=(),
            order=tuple((at, h) for at, own in enumerate(heads) for h in range(len(own))),
        )

    def role(self, layer: int, head: int) -> str:
        """The role of a head over the corpus, as ``HeadScores.role`` names it.

        Raises:
            IndexError, ValueError: no such layer or head, or no document.
        """
        return self.means().role(layer, head)

    def columns(self) -> dict[str, list[Any]]:
        """Name and values of each column, a value for each head: what data frames take.

        Layer, head, role, the means, the medians, and the largest score.
        """
        places = [(at, h) for at, own in enumerate(self.head_numbers) for h in range(len(own))]
        scores = self.means() if places else None
        layers, heads = self.layers, self.head_numbers
        found: dict[str, list[Any]] = {
            "layer": [layers[at] for at, _ in places],
            "head": [heads[at][h] for at, h in places],
            "role": [scores.role(layers[at], heads[at][h]) for at, h in places] if scores else [],
        }
        for name in STATISTICS:
            mean, median = self.mean(name), self.quantile(name, 0.5)
            found[name] = [float(mean[place]) for place in places]
            found[f"{name}_median"] = [float(median[place]) for place in places]
        largest = self.max_score
        return found | {"max_score": [float(largest[place]) for place in places]}

    def plot(self) -> Figure:
        """A heatmap of heads for each of six statistics, with its numbers, by matplotlib.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: there is no document.
        """
        from regard.survey._plot import plot_sums

        return plot_sums(self)

    def __repr__(self) -> str:
        heads = sum(map(len, self.head_numbers))
        documents, tokens = counted(self.documents, "document"), counted(self.tokens, "token")
        return f"HeadSums({counted(heads, 'head')} over {documents}, {tokens})"

    def _grid(self, x: np.ndarray, fill: float = np.nan) -> Any:
        """``(layers, heads, ...)`` of ``(keys, ...)``."""
        heads = self.head_numbers
        out = np.full((len(heads), max(map(len, heads), default=0), *x.shape[1:]), fill, x.dtype)
        for key, value in zip(self._keys, x):
            at = self.layers.index(key[0])
            out[at, heads[at].index(key[1])] = value
        return out
