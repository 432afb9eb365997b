"""The weights of a sequence whose tokens are on several ranks."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from regard._base.errors import MaterializeError, a_type
from regard._base.settings import require_materializable
from regard._base.types import ReceivedHow
from regard._call.visible import sees
from regard._operator.merging import merge
from regard._weights.attention_weights import AttentionWeights
from regard._weights.one_pass import WeightsSummary, names_of
from regard._weights.parts import int_of, part_of
from regard._weights.reductions import (
    Links,
    PerQuery,
    Pool,
    Received,
    Strongest,
    TopK,
    TopKeys,
    check_k,
    require_room_for_keys,
    require_room_for_pairs,
)
from regard._weights.statistics import RowStatistics
from regard._weights.written import require_unwritten, versions_of
from regard.distributed._layout import Piece, of_all_ranks
from regard.distributed._sequence import Sequence
from regard.distributed._uncompiled import uncompiled
from regard.distributed._visits import visit

_KINDS = "entropy", "received", "distance", "topk", "strongest", "pooled"


class DistributedWeights:
    """The weights ``(..., Hq, length, length)`` of a sequence over the ranks of a layout.

    ``regard.distributed.attention(..., return_weights=True)`` gives them. Every method is
    collective: each rank calls it with the same arguments. ``entropy``, ``distance`` and ``topk``
    are of this rank's queries, ``received`` of its keys, in the order of ``layout.positions``;
    ``strongest``, ``pool`` and ``row`` are of the whole, and equal on every rank. Keys travel, and
    no weights; nothing is stored. Results are float32, or float64 for a float64 query, and have no
    gradient.

    Query and key are held; ``copy`` makes weights with tensors of their own.

    Raises:
        RuntimeError: query or key were written to after the attention.
        ValueError: the ranks ask for different things; on every rank, with what each asks for.
        RankError: another rank refused the call, died or did not answer within the group's timeout.
    """

    def __init__(
        self,
        sequence: Sequence,
        query: torch.Tensor,
        key: torch.Tensor,
        statistics: RowStatistics[torch.Tensor],
        backend: Any,
    ) -> None:
        self._sequence, self._backend = sequence, backend
        self._query, self._key = query.detach(), key.detach()
        self._statistics = statistics
        self._versions = sequence.versions + versions_of({"query": self._query, "key": self._key})

    @property
    def layout(self) -> Any:
        """Which tokens of the sequence each rank has."""
        return self._sequence.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., Hq, length, length)``."""
        length = self._sequence.layout.length
        return (*self._query.shape[:-2], length, length)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which weights are given."""
        return self._statistics.maximum.dtype

    @property
    def statistics(self) -> RowStatistics[torch.Tensor]:
        """Maximum and total of this rank's queries: ``(..., Hq, count)`` each; not collective."""
        return self._statistics

    def __repr__(self) -> str:
        return f"DistributedWeights{self.shape} {self.dtype}, on rank {self.layout!r}"

    def copy(self) -> DistributedWeights:
        """The same weights with tensors of their own, which nobody else writes into."""
        query, key = self._query.clone(), self._key.clone()
        sequence = self._sequence.copy()
        return DistributedWeights(sequence, query, key, self._statistics, self._backend)

    def entropy(self) -> torch.Tensor:
        """``(..., Hq, count)``: ``−Σ w · ln w`` of this rank's queries, in nats."""
        return self._asked("entropy")[0]

    def distance(self) -> torch.Tensor:
        """``(..., Hq, count)``: the mean ``|query position − key position|``, weighted."""
        return self._asked("distance")[0]

    @property
    def lse(self) -> torch.Tensor:
        """``(..., Hq, count)``: ln of the sum of exp(score), the sink's too; not collective."""
        maximum, total = (x.double() for x in self._statistics)
        return (maximum + total.log()).to(self.dtype)

    def received(self, how: ReceivedHow = "sum", queries: slice | None = None) -> torch.Tensor:
        """``(..., Hq, count)``: what this rank's keys receive from queries of the sequence.

        Args:
            how: as in ``AttentionWeights.received``: ``"sum"``, ``"seen"``, ``"mean"``, ``"max"``.
            queries: positions of those that count, with any positive step; by default all.
        """
        return self._asked("received", how=how, queries=queries)[0]

    def topk(self, k: int) -> TopKeys[torch.Tensor, torch.Tensor]:
        """The k strongest keys of each of this rank's queries; indices are positions.

        Where fewer than k have weight the rest have 0, and their indices mean nothing.
        """
        return self._asked("topk", topk=k)[0]

    def strongest(self, n: int = 20) -> Links[torch.Tensor, torch.Tensor]:
        """The n strongest token pairs of each head of the whole, ``(..., Hq, n)``; positions."""
        return self._asked("strongest", strongest=n)[0]

    def pool(
        self, size: tuple[int, int] = (512, 512), how: Literal["max", "mass"] = "max"
    ) -> torch.Tensor:
        """``(..., Hq, R, C)``: the heatmap of the whole, as ``AttentionWeights.pool``."""
        return self._asked("pooled", pool=size, pool_how=how)[0]

    def summary(
        self,
        *,
        topk: int = 8,
        strongest: int = 20,
        pool: tuple[int, int] = (512, 512),
        only: Collection[str] = WeightsSummary._fields,
    ) -> WeightsSummary[torch.Tensor, torch.Tensor]:
        """All of these in one pass over the keys.

        Raises:
            ValueError: an unknown name in ``only``.
            TypeError: one name instead of a list.
        """
        chosen: tuple[str, ...] = ()
        error: Exception | None = None
        try:
            chosen = names_of(only)
        except (TypeError, ValueError) as found:
            error = found
        names = [name for name in _KINDS if name in chosen]
        if isinstance(topk, (int, np.integer)):
            topk = min(topk, self._sequence.layout.length)
        told: dict[str, Any] = {
            "topk": topk,
            "strongest": strongest,
            "pool": pool,
            "error": error,
        }
        answers = dict(zip(names, self._asked(*names, **told)))
        answers |= {"lse": self.lse} if "lse" in chosen else {}
        every: list[Any] = [answers.get(name) for name in WeightsSummary._fields]
        return WeightsSummary(*every)

    @uncompiled
    def row(self, position: int) -> torch.Tensor:
        """``(..., Hq, length)``: the weights of one query of the sequence, equal on every rank.

        Raises:
            IndexError: there is no such position.
            TypeError: it is no int.
            MaterializeError: it is above ``regard.limits``.
        """
        error: Exception | None = None
        try:
            position = range(self._sequence.layout.length)[int_of("row: position", position)]
            require_materializable(
                "row", self.shape[:-1], 8 * self.dtype.itemsize,
                "Compute fewer heads or elements of the batch together",
            )  # fmt: skip
        except (TypeError, MaterializeError) as found:
            error = found
        except IndexError:
            error = IndexError(
                f"row: position is {position!r}; the sequence has {self._sequence.layout.length}"
                " tokens."
            )
        self._agree({"row": str(position)}, error)
        rank, at = self._sequence.layout.holder(position)
        query, sequence = self._carried(rank, at)
        piece = Piece(range(position, position + 1), slice(0, 1))
        pairs = [sequence.seen(piece, keys) for keys in self._sequence.layout.own]
        seen = [pair for pair in pairs if pair is not None]
        rows = self._of_one_row(sequence, query, seen)
        out = torch.zeros((*query.shape[:-2], self._sequence.layout.count, 1), dtype=self.dtype)
        out = out.to(query.device)
        for pair in seen:
            part = self._part(sequence, query, rows, self._key, *pair)
            out[..., pair[1].local, 0] = part[..., 0, :]
        return of_all_ranks(out, self._sequence.layout, out.ndim - 2)[..., 0]

    def _of_one_row(
        self, sequence: Sequence, query: Any, seen: list[tuple[Piece, Piece]]
    ) -> RowStatistics[torch.Tensor]:
        """Maximum and total of a row, of the very scores that its weights are made of.

        Those of the pass over all rows are of products that were summed in another order: at scores
        of 1e5 in float32 the weights of a row were off by 3 %.
        """
        like = query.new_zeros(query.shape[:-1], dtype=self.dtype)
        parts = [RowStatistics(torch.full_like(like, -torch.inf), like)]
        parts += [self._part(sequence, query, None, self._key, *pair).statistics for pair in seen]
        own = torch.stack(merge([(None, part) for part in parts])[1])
        every = self._sequence.layout.peers.all_gather("weights", own)
        return merge([(None, RowStatistics(*x)) for x in every], self._sequence.sinks)[1]

    def _carried(self, rank: int, at: int) -> tuple[Any, Sequence]:
        """One rank's query, and options with its mask and bias."""
        sequence, layout = self._sequence, self._sequence.layout
        here = slice(at, at + 1) if layout.rank == rank else slice(0, 0)
        found = [self._query[..., here, :]]
        names = sorted(sequence.by_query)
        found += [sequence.options[name][..., here, :] for name in names]
        if layout.rank != rank:
            found = [x.new_empty((*x.shape[:-2], 1, x.shape[-1])) for x in found]
        found = [x.detach().contiguous() for x in found]
        sent = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in found]
        layout.peers.broadcast("weights", [x for x in sent if x.numel()], rank)
        query, *rows = found
        return query, replace(sequence, options=sequence.options | dict(zip(names, rows)))

    def _part(
        self, sequence: Sequence, query: Any, rows: Any, key: Any, queries: Piece, keys: Piece
    ) -> AttentionWeights[torch.Tensor]:
        options = sequence.part(queries, keys, of_weights=True)
        options = {name: x.detach() if name == "bias" else x for name, x in options.items()}
        statistics = None if rows is None else RowStatistics(*rows)
        return AttentionWeights(
            query, key[..., keys.local, :], statistics=statistics, backend=self._backend, **options
        )

    def _agree(self, fields: dict[str, str], error: Exception | None = None) -> None:
        try:
            require_unwritten(self._versions)
        except RuntimeError as found:
            error = error or found
        self._sequence.layout.peers.agree("weights", fields, self._query.device, error)

    @uncompiled
    def _asked(
        self, *names: str, how: Any = "sum", queries: Any = None, topk: Any = 8,
        strongest: Any = 20, pool: Any = (512, 512), pool_how: str = "max",
        error: Exception | None = None,
    ) -> list[Any]:  # fmt: skip
        """What is named, in one pass over the keys of every rank; or an error of this one."""
        numbers = {
            "received": (how, queries), "topk": topk, "strongest": strongest,
            "pooled": (pool, pool_how),
        }  # fmt: skip
        fields = {"what is asked": ", ".join(names)}
        fields |= {name: repr(x) for name, x in numbers.items() if name in names}
        try:
            gathered = {name: self._empty(name, numbers.get(name)) for name in names}
        except Exception as found:
            error = error or found
        self._agree(fields, error)
        received = self._visited(gathered)
        return [
            gathered[name].result(*([received] if name == "received" else [])) for name in names
        ]

    def _empty(self, name: str, number: Any) -> Any:
        if name in ("entropy", "distance"):
            return _Summed(self, name)
        if name == "received":
            return _Received(self, *number)
        if name == "topk":
            return _Top(self, number)
        return _Strongest(self, number) if name == "strongest" else _Picture(self, *number)

    def _visited(self, gathered: dict[str, Any]) -> torch.Tensor | None:
        """Asks every part; gives what the keys of this rank received."""
        own, sequence = self._sequence.layout.own, self._sequence
        received = gathered.get("received")

        def work(pieces: list[Piece], arrays: list[torch.Tensor]) -> list[torch.Tensor]:
            (k,) = arrays
            sums = [] if received is None else [received.sums(self._query, k)]
            for mine in own if received is None else map(received.among, own):
                for piece in pieces:
                    if not len(mine.positions) or (pair := sequence.seen(mine, piece)) is None:
                        continue
                    queries, keys = pair
                    rows = queries.local
                    known = [x[..., rows] for x in self._statistics]
                    query = self._query[..., rows, :]
                    part = self._part(sequence, query, known, k, queries, keys)
                    asked = {name: x.of(part) for name, x in gathered.items()}
                    found = part._ask(*asked.values())
                    for (name, x), one in zip(gathered.items(), found):
                        if name == "received":
                            x.add(sums[0], one, part, keys)
                        else:
                            x.add(one, queries, keys)
            return sums

        how = "max" if received is not None and received.how == "max" else "sum"
        found = visit(sequence, "weights", (self._key,), work, how=how)
        return found[0] if found else None


class _Summed:
    """A number for each query that is a sum over the keys."""

    def __init__(self, weights: DistributedWeights, name: str) -> None:
        self._name, self._dtype = name, weights.dtype
        self._sum = torch.zeros_like(weights.statistics.maximum, dtype=torch.float64)

    def of(self, part: Any) -> PerQuery:
        return PerQuery(part._call, self._name)

    def add(self, found: Any, queries: Piece, keys: Piece) -> None:
        self._sum[..., queries.local] += found

    def result(self) -> torch.Tensor:
        return self._sum.to(self._dtype)


class _Received:
    """What keys receive; sums go back to the rank that has them."""

    def __init__(self, weights: DistributedWeights, how: Any, queries: Any) -> None:
        if how not in get_args(ReceivedHow):
            known = ", ".join(map(repr, get_args(ReceivedHow)))
            raise ValueError(f"received: how is {how!r}; one of {known} is needed.")
        self.how, self._dtype, length = how, weights.dtype, weights.layout.length
        some = part_of("queries", queries, length)
        self._queries = range(length)[some]

    def among(self, mine: Piece) -> Piece:
        """Those of this rank's queries that count."""
        return mine.among(self._queries)

    def of(self, part: Any) -> Received:
        return Received(part._call, "max" if self.how == "max" else "sum")

    def sums(self, query: Any, key: Any) -> torch.Tensor:
        """Of each key what it received and, for "seen", from how many queries."""
        shape = (*query.shape[:-2], key.shape[-2], 1 + (self.how == "seen"))
        return torch.zeros(shape, dtype=torch.float64, device=key.device)

    def add(self, sums: Any, found: Any, part: Any, keys: Piece) -> None:
        own = sums[..., keys.local, 0]
        if self.how == "max":
            torch.maximum(own, found.to(own.dtype), out=own)
        else:
            own += found
        if self.how == "seen" and found.numel():
            counts = np.stack([of_batch.queries for of_batch in sees(part._call)])
            B, Hq, _, _, Lk = part._call.sizes
            of_all = torch.from_numpy(counts).to(own.device).expand(B, Hq, Lk)
            sums[..., keys.local, 1] += of_all.reshape(own.shape)

    def result(self, found: torch.Tensor) -> torch.Tensor:
        given = found[..., 0]
        if self.how == "mean":
            given = given / max(len(self._queries), 1)
        if self.how == "seen":
            given = given / found[..., 1].clamp(min=1)
        return given.to(self._dtype)


class _Top:
    """The strongest keys of each query."""

    def __init__(self, weights: DistributedWeights, k: int) -> None:
        check_k(k, weights.layout.length, "keys")
        self._k, shape = k, (*weights.statistics.maximum.shape, k)
        require_room_for_keys(shape, str(weights.dtype).removeprefix("torch."), fewer="")
        device = weights.statistics.maximum.device
        self._values = torch.zeros(shape, dtype=weights.dtype, device=device)
        self._keys = torch.zeros(shape, dtype=torch.int64, device=device)

    def of(self, part: Any) -> TopK:
        return TopK(part._call, min(self._k, part.shape[-1]))

    def add(self, found: Any, queries: Piece, keys: Piece) -> None:
        rows, positions = queries.local, keys.positions
        values = torch.cat([self._values[..., rows, :], found.values], -1)
        own = positions.start + found.indices * positions.step
        indices = torch.cat([self._keys[..., rows, :], own], -1)
        best, at = values.topk(self._k)
        self._values[..., rows, :] = best
        self._keys[..., rows, :] = indices.gather(-1, at)

    def result(self) -> TopKeys[torch.Tensor, torch.Tensor]:
        return TopKeys(self._values, self._keys)


class _Strongest:
    """The strongest pairs of each head of the whole."""

    def __init__(self, weights: DistributedWeights, n: Any) -> None:
        self._peers, length = weights.layout.peers, weights.layout.length
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"strongest: n is {a_type(n)}; an int is needed.")
        if n < 0:
            raise ValueError(f"strongest: n is {n}; it must not be negative.")
        self._n = min(int(n), length * length)
        like = weights.statistics.maximum
        shape = (*like.shape[:-1], self._n)
        require_room_for_pairs(shape, str(like.dtype).removeprefix("torch."))
        none = torch.full(shape, -1, dtype=torch.int64, device=like.device)
        self._found = Links(none, none, torch.zeros(shape, dtype=like.dtype, device=like.device))

    def of(self, part: Any) -> Strongest:
        return Strongest(part._call, self._n)

    def add(self, found: Any, queries: Piece, keys: Piece) -> None:
        rows, columns = (
            torch.where(x < 0, x, piece.positions.start + x * piece.positions.step)
            for x, piece in zip(found[:2], (queries, keys))
        )
        self._found = self._best([self._found, Links(rows, columns, found.weight)])

    def _best(self, found: Several[Any]) -> Links[torch.Tensor, torch.Tensor]:
        """Of equal weights the lower query is first, then the lower key; no pairs are last."""
        query, key, weight = (torch.cat([one[n] for one in found], -1) for n in range(3))
        weight = torch.where(query < 0, -1.0, weight)
        best = [key, query, weight]
        for n in range(3):  # the last sort decides, and equals stay as the ones before have them
            order = best[n].sort(dim=-1, descending=n == 2, stable=True).indices
            best = [x.gather(-1, order) for x in best]
        key, query, weight = best
        query, key, weight = (x[..., : self._n] for x in (query, key, weight))
        return Links(query, key, weight.clamp(min=0.0))

    def result(self) -> Links[torch.Tensor, torch.Tensor]:
        if not self._n:
            return self._found
        query, key, weight = self._found
        bits = torch.stack([query, key, weight.double().view(torch.int64)])  # one message
        found = self._peers.all_gather("weights", bits)
        return self._best([Links(x[0], x[1], x[2].view(torch.float64).to(weight)) for x in found])


class _Picture:
    """A heatmap of the whole, in ln(weight)."""

    def __init__(self, weights: DistributedWeights, size: Any, how: str) -> None:
        layout = weights.layout
        self._peers, self._size, self._how = layout.peers, size, how
        self._of, like = (layout.length, layout.length), weights.statistics.maximum
        number = torch.zeros(1, dtype=like.dtype, device=like.device)
        whole = AttentionWeights(
            *(number.expand(*like.shape[:-1], layout.length, 1) for _ in range(2))
        )
        Pool(whole._call, size, how)  # which refuses what is no size
        shape = (*like.shape[:-1], *_sides(size, self._of))
        self._sum = torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)

    def of(self, part: Any) -> Pool:
        return Pool(part._call, self._size, self._how, self._of)

    def add(self, found: Any, queries: Piece, keys: Piece) -> None:
        self._sum = self._both(self._sum, found)

    def _both(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self._how == "max":
            return torch.fmax(x, y)
        none = x.isnan(), y.isnan()
        return torch.where(none[0], y, torch.where(none[1], x, torch.logaddexp(x, y)))

    def result(self) -> torch.Tensor:
        first, *others = self._peers.all_gather("weights", self._sum)
        for x in others:
            first = self._both(first, x)
        return first


def _sides(size: Any, of: tuple[int, int]) -> tuple[int, int]:
    return min(int(size[0]), of[0]), min(int(size[1]), of[1])
