"""The options of attention over a whole sequence, and those of the parts that meet on a rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from regard._backends import choose
from regard._base.errors import ShapeError, a_type
from regard._base.settings import counted
from regard._call.checks import read_call
from regard._call.contents import check_contents
from regard._call.edits import edits_of
from regard._call.hints import unknown_option
from regard._call.options import OPTIONS, REAL_NUMBERS
from regard._call.tensors import require_dense
from regard._call.visible import Visibility
from regard._weights.written import Version, first_written, versions_of
from regard.distributed._layout import Layout, Piece
from regard.distributed._peers import disagreement

_PLACES = "query_start", "query_step", "key_start", "key_step"
NAMES = tuple(option.name for option in OPTIONS if option.name not in _PLACES)
_OF_QUERIES = "mask", "bias"  # their rows are those of the rank
_ALL, _EACH, _EITHER = range(3)  # a row is of all queries, of each its own, or there is one query
_OF_OUTPUT = "dropout", "seed", "output_dtype"
_SEEN_BY = "causal", "window", "key_lengths", "segments", "intervals"
_BY_ELEMENT = "key_lengths", "segments", "intervals"
MOST_KEPT = 2**14  # extents of pairs of pieces
Run = tuple[int, int]  # from the first to the one after the last


@dataclass(frozen=True, eq=False)
class Sequence:
    """Options of the whole, read once.

    Attributes:
        layout: which tokens each rank has.
        leading: the axes of the batch.
        options: as the operator takes them, without the sinks: these are of whole rows.
        sinks: ``(Hq,)``, or None.
        by_query: which of mask and bias have a row for each query.
        number: of the call in its group.
    """

    layout: Layout
    leading: tuple[int, ...]
    options: dict[str, Any]
    sinks: torch.Tensor | None
    cache: dict[Any, Any]
    by_query: frozenset[str] = frozenset()
    number: int = 0

    def part(self, queries: Piece, keys: Piece, *, of_weights: bool = False) -> dict[str, Any]:
        """The options of some queries of this rank and some keys, for the operator."""
        found = dict(self.options)
        rows, columns = queries.span, keys.span
        if "segments" in found:
            of_queries, of_keys = found["segments"]
            found["segments"] = of_queries[..., rows], of_keys[..., columns]
        if "intervals" in found:
            found["intervals"] = tuple(x[..., rows] for x in found["intervals"])
        for name in _OF_QUERIES:
            if name in found:
                found[name] = of_pairs(found[name], queries, keys)
        for name, piece in (("query", queries), ("key", keys)):
            found[f"{name}_start"] = piece.positions.start
            found[f"{name}_step"] = piece.positions.step
        if of_weights:
            for name in _OF_OUTPUT:
                found.pop(name, None)
        return found

    @property
    def versions(self) -> tuple[Version, ...]:
        """Those of the tensors that are read again: for gradients, and for what weights tell."""
        given = self.options | {"sinks": self.sinks}
        named = [(name, y) for name, x in given.items() for y in (x if _is_pair(x) else (x,))]
        return tuple(one for name, x in named for one in versions_of({name: x}))

    def copy(self) -> Sequence:
        """The same with tensors of its own, without gradients."""
        options = {name: _copied(x) for name, x in self.options.items()}
        return replace(self, options=options, sinks=_copied(self.sinks))

    def seen(self, queries: Piece, keys: Piece) -> tuple[Piece, Piece] | None:
        """The smallest runs of queries and keys with every pair that is unmasked; None of none."""
        asked = queries.positions, keys.positions
        if asked not in self.cache:
            if len(self.cache) > MOST_KEPT:  # of received(queries=) with ever other ones
                self.cache.clear()
            self.cache[asked] = self._extent(*asked)
        rows, columns = self.cache[asked]
        return (queries.cut(*rows), keys.cut(*columns)) if columns[0] < columns[1] else None

    def needed(self, rank: int, holder: int) -> list[Piece]:
        """The keys of one rank that queries of another see, in the order in which they are sent.

        Each is where the holder has it.
        """
        found = []
        for keys in self.layout.pieces[holder]:
            pairs = [self.seen(queries, keys) for queries in self.layout.pieces[rank]]
            runs = [pair[1].local for pair in pairs if pair is not None]
            if runs:
                ends = min(run.start for run in runs), max(run.stop for run in runs)
                found.append(keys.cut(*(end - keys.local.start for end in ends)))
        return found

    def _extent(self, queries: range, keys: range) -> tuple[Run, Run]:
        told = {name: self.options[name] for name in _SEEN_BY if name in self.options}
        alike = not any(name in told for name in _BY_ELEMENT)
        leading = () if alike else self.leading
        if 0 in leading:
            return (0, 0), (0, 0)
        rows, columns = _span(queries), _span(keys)
        if "segments" in told:
            of_queries, of_keys = told["segments"]
            told["segments"] = of_queries[..., rows].cpu(), of_keys[..., columns].cpu()
        if "intervals" in told:
            told["intervals"] = tuple(x[..., rows].cpu() for x in told["intervals"])
        if "key_lengths" in told:
            told["key_lengths"] = told["key_lengths"].cpu()
        number = torch.zeros(1)
        shapes = [(*leading, *((1,) if leading else ()), len(x), 1) for x in (queries, keys)]
        call = read_call(
            number.expand(shapes[0]), number.expand(shapes[1]), None, **told,
            query_start=queries.start, query_step=queries.step,
            key_start=keys.start, key_step=keys.step,
        )  # fmt: skip
        visible = Visibility(call, np.arange)
        runs = [_runs(visible, b, len(queries)) for b in range(call.sizes[0])]
        runs = [(rows, columns) for rows, columns in runs if columns[0] < columns[1]]
        if not runs:
            return (0, 0), (0, 0)
        ends = [tuple(zip(*axis)) for axis in zip(*runs)]
        first, second = ((min(low), max(high)) for low, high in ends)
        return first, second


def _runs(visible: Visibility, b: int, queries: int) -> tuple[Run, Run]:
    """Of one element of the batch the queries that may see some key, and the keys."""
    low, high = visible.interval(b, np.arange(queries))
    rows = np.flatnonzero(low < high)
    if not len(rows):
        return (0, 0), (0, 0)
    ends = int(rows[0]), int(rows[-1]) + 1
    keys = visible.keys(b, slice(*ends))
    return ends, (keys.start, keys.stop)


def require_as_they_were(known: tuple[Version, ...]) -> None:
    """Raises a RuntimeError if an option of a gradient was written to."""
    if (name := first_written(known)) is not None:
        raise RuntimeError(
            f"distributed.attention: {name} was written to since the output was computed, and"
            " its gradient would be of other weights. Write after backward, or into a copy."
        )


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(y, torch.Tensor) for y in x)


def _copied(x: Any) -> Any:
    if _is_pair(x):
        return tuple(map(_copied, x))
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _span(positions: range) -> slice:
    return slice(positions.start, positions.stop, positions.step)


def of_pairs(x: Any, queries: Piece, keys: Piece) -> Any:
    """A mask or bias of this rank's queries and all keys, for some of both."""
    if x.ndim and x.shape[-1] != 1:
        x = x[..., keys.span]
    if x.ndim > 1 and x.shape[-2] != 1:
        x = x[..., queries.local, :]
    return x


def read(
    layout: Layout, query: Any, key: Any, value: Any, options: dict[str, Any], backend: str
) -> Sequence:
    """The options, checked against the whole sequence as the operator checks them.

    Raises:
        ShapeError, TypeError, ValueError: as ``regard.attention``; tokens that are not those of the
            layout; options of positions, which the layout has.
        UnsupportedError: no backend takes it.
    """
    if not isinstance(layout, Layout):
        raise TypeError(
            f"distributed.attention: layout is {a_type(layout)}; a"
            " regard.distributed.Layout is needed, as in Layout(length, mesh['cp'])."
        )
    for name in _PLACES:
        if options.pop(name, None) is not None:
            raise ValueError(
                f"distributed.attention: {name} is given; the layout says where the tokens are."
            )
    if unknown := [name for name in options if name not in NAMES]:
        raise unknown_option("distributed.attention", unknown, (*NAMES, "layout", "method"))
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check(layout, name, x)
    options = {name: x for name, x in options.items() if x is not None}
    whole = [_of_length(x, layout.length) for x in (query, key, value)]
    own = {name: options.pop(name) for name in _OF_QUERIES if name in options}
    seed = {"seed": 0} if "dropout" in options else {}  # it would draw one here
    call = read_call(*whole, query_start=0, **seed | options)
    check_contents(call)  # parts have no length of the whole to check them against
    read_call(query.detach(), *whole[1:], query_start=0, **own)
    of_scores = {name: options[name] for name in REAL_NUMBERS if name in options}
    # One that is refused later, on some ranks, would leave the others waiting.
    with torch.no_grad():
        choose(read_call(query, key, value, **of_scores), backend)
    if "seed" in options:
        options["seed"] = int(options["seed"])
    options.pop("output_dtype", None)
    if call.output_dtype is not None:  # another than the query's; by name, whatever it came as
        options["output_dtype"] = call.output_dtype
    if call.edit_ranges is not None:  # positions are counted from the start
        options["edits"] = edits_of(call.edit_ranges, call.edit_factors)
    for name in ("segments", "intervals"):
        if name in options:
            options[name] = _pair(name, options[name], query.device)
    if "key_lengths" in options:
        options["key_lengths"] = torch.as_tensor(options["key_lengths"], device=query.device)
    sinks = options.pop("sinks", None)
    plain = not any(name in options for name in _BY_ELEMENT)
    told = (options.get("causal", False), tuple(options.get("window") or ()))
    cache = layout.seen.setdefault(told, {}) if plain else {}
    return Sequence(layout, tuple(query.shape[:-3]), options | own, sinks, cache)


def _check(layout: Layout, name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"distributed.attention: {name} is {a_type(x)}; a torch tensor is needed.")
    require_dense(name, x, "distributed.attention")
    if x.ndim < 2:
        raise ShapeError(
            f"distributed.attention: {name} has {counted(x.ndim, 'axis', 'axes')};"
            " at least (L, D) is needed."
        )
    if x.shape[-2] != layout.count:
        raise ShapeError(
            f"distributed.attention: {name} {tuple(x.shape)} has {counted(x.shape[-2], 'token')};"
            f" rank {layout.rank} of {layout.size} has {layout.count} of {layout.length}."
            " layout.shard(x, dim=-2) gives them."
        )


def _of_length(x: torch.Tensor, length: int) -> torch.Tensor:
    """A tensor of that many tokens without their memory, to check options against."""
    return x.new_zeros(1, requires_grad=False).expand(*x.shape[:-2], length, x.shape[-1])


def _pair(name: str, x: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x if isinstance(x, tuple) or name == "intervals" else (x, x)
    return torch.as_tensor(first, device=device), torch.as_tensor(second, device=device)


def gradient_told(number: int) -> dict[str, str]:
    """What all ranks must have alike of a gradient: the number of the call that it is of."""
    return {"the call that it is of": f"number {number}"}


def told(sequence: Sequence, method: str, arrays: dict[str, torch.Tensor]) -> dict[str, str]:
    """What all ranks need to agree about, in words."""
    grad = torch.is_grad_enabled()
    found = {"layout": sequence.layout.told, "method": method}
    for name, x in arrays.items():
        shape = (*x.shape[:-2], "L", x.shape[-1])
        found[f"the shape of {name}"] = f"({', '.join(map(str, shape))})"
        found[f"the dtype of {name}"] = str(x.dtype)
    given = sequence.options | ({} if sequence.sinks is None else {"sinks": sequence.sinks})
    for name in NAMES:
        if name in given:
            found[name] = str(int(given[name])) if name == "seed" else _words(name, given[name])
    for name, x in (arrays | given).items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            found[f"requires_grad of {name}"] = str(grad and x.requires_grad)
    return found


def rows_told(sequence: Sequence) -> int:
    """Whether mask and bias have rows for queries, as far as this rank can tell; two bits each."""
    count, found = sequence.layout.count, 0
    for n, name in enumerate(_OF_QUERIES):
        x = sequence.options.get(name)
        if x is not None and x.ndim > 1:
            kind = _EACH if x.shape[-2] != 1 else _EITHER if count == 1 else _ALL
            found |= kind << 2 * n
    return found


def rows_agreed(told: list[int]) -> frozenset[str]:
    """Which of mask and bias have a row for each query, of what every rank told.

    Raises:
        ValueError: the ranks disagree.
    """
    found = set()
    for n, name in enumerate(_OF_QUERIES):
        kinds = [(of_rank >> 2 * n) & 3 for of_rank in told]
        if {_ALL, _EACH} <= {*kinds}:
            words = {_ALL: "one row for all queries", _EACH: "a row for each query"}
            words[_EITHER] = "one row for one query"
            fields = [{f"the rows of {name}": words[kind]} for kind in kinds]
            raise disagreement("attention", fields)
        if _ALL not in kinds:
            found.add(name)
    return frozenset(found)


def _words(name: str, x: Any) -> str:
    if name in _OF_QUERIES:
        shape: list[Any] = [*x.shape]
        shape[-2:-1] = ["L" for _ in shape[-2:-1]]
        return f"one of {x.dtype} and shape ({', '.join(map(str, shape))})"
    if isinstance(x, tuple) and x and isinstance(x[0], torch.Tensor):
        return ", ".join(_words("", y) for y in x[: 1 if x[0] is x[1] else 2])
    if isinstance(x, torch.Tensor):
        if x.numel() <= 4:
            return str(x.tolist())
        numbers = x.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
        digest = hashlib.blake2b(numbers.tobytes(), digest_size=4).hexdigest()
        return f"{x.dtype} of shape {tuple(x.shape)} and digest {digest}"
    return repr(x)
