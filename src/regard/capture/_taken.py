"""What the attention of one module is called with, over one pass or the steps of a generation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard._base.arrays import dtype_name, is_tensor
from regard._base.errors import RecordingError, ShapeError
from regard._call.call import Call
from regard._call.edits import OPEN, Edit, Rectangle, edits_of
from regard._call.options import REAL_NUMBERS
from regard.capture._kind import CROSS, are_in_order, is_cross
from regard.capture._rows import Rows, Seen, Span, Step, joined
from regard.recording import Grid, Layer


class Heads(NamedTuple):
    """The heads of a layer that are recorded."""

    own: Any  # of the query: a slice, or numbers
    shared: Any  # of the key, for them
    numbers: list[int] | None  # None where they are all


class Described(NamedTuple):
    """What is known of the tokens of a group, padding included; numbers stand for what is not."""

    keys: Sequence[str] | None = None
    queries: Sequence[str] | None = None  # of cross-attention
    grids: tuple[Grid, ...] = ()
    prompt: int | None = None  # how many keys there were before the model wrote; None: of one call


class Part(NamedTuple):
    """What a further step of a generation adds."""

    query: Any  # (B, H, Lq, D)
    key: Any  # (B, H, Lq, D), or of no keys in cross-attention
    value: Any
    bias: Any  # (B or 1, Hq or 1, Lq or 1, keys of the cache), or None


class Taken:
    """The attention of one module.

    Attributes:
        name: of the module.
        pattern: the name without its numbers.
        number: of the layer in the model.
        is_main: whether its group is the recording itself.
        is_cross: whether the queries are not among the keys.
        in_order: whether what the queries see shows that they are.
        of_one: whether queries and keys are known to be of the same tokens; None where nothing
            depends on it.
        kind: the same for layers of as many tokens.
        group: the same for the layers of one group, whose padding is the same.
        keys: how many, of all calls; padding and unused places of a cache at the end left out.
        queries: how many, of all calls.
        spans: for each batch element, the queries and keys of the first call that are no padding.
        calls: what each call's queries see, and where its first key is among all.
        edits: of each call.
        firsts: the layer of the first call for each batch element; none where a file has them.
        later: what the further calls added.
        gradient: of an explained number by the output of the call; None where nothing is.
    """

    def __init__(
        self, name: str, pattern: str, number: int, call: Call, rows: list[Rows],
        seen: list[Seen], heads: Heads, are_of_one: Callable[[], bool],
    ) -> None:  # fmt: skip
        Lq, Lk = call.sizes[3:]
        self.name, self.pattern, self.number, self.heads = name, pattern, number, heads
        self._head_numbers = tuple(heads.numbers or range(call.sizes[1]))
        self.in_order = any(one.is_ordered for one in rows)
        self.in_order |= any(are_in_order(x.position(), own.last) for x, own in zip(rows, seen))
        self.is_cross = is_cross(name, Lq, Lk, self.in_order, are_of_one)
        self.of_one: bool | None = None
        if not self.is_cross and CROSS.search(name):
            self.of_one = are_of_one()
        self.first_queries = self.queries = Lq
        self._sizes = call.sizes[1:3]  # heads of the queries and of the keys
        # A text of which nothing is seen, beside others: its first queries are padding alone.
        unseen = [not own.last.any() for own in seen]
        self._begins_with_padding = any(unseen) and not all(unseen)
        last = min(Lk, max(one.position() for one in rows) + Lq)
        if self.is_cross or any(own.span[1] > last for own in seen if own.last.any()):
            last = Lk
        self.first_keys = self.keys = max(1, last)
        self.batch = call.sizes[0]
        self.group = self.kind = repr((pattern, self.batch, self.is_cross, Lq, self.first_keys))
        self.is_main = False
        self.spans: list[tuple[Span, Span]] = []
        self.calls: list[tuple[list[Rows], int]] = [(rows, 0)]
        self.edits: list[list[Rectangle]] = [call.rectangles]
        self.firsts: list[Layer[Any]] = []
        self.later: list[Part] = []
        self.gradient: Any = None
        self._last_key: Any = None  # of the last step

    def begin(
        self, call: Call, spans: list[tuple[Span, Span]], keep: Callable[[Any], Any]
    ) -> list[dict[str, Any]]:
        """The options of the layer of the first call, for each batch element.

        Args:
            call: the first.
            spans: for each batch element, its queries and keys that are no padding.
            keep: what each array becomes.
        """
        self.spans = spans
        whole = (0, self.first_queries), (0, call.sizes[4])
        self._is_whole = self.heads.numbers is None and all(span == whole for span in spans)
        return [self._first_options(call, b, keep) for b in range(self.batch)]

    def is_of(self, are_of_one: Callable[[], bool]) -> bool:
        """Whether what is known of the same tokens, where it matters, is the same for a call."""
        return self.of_one is None or self.of_one == are_of_one()

    def another(self, name: str, number: int) -> Taken:
        """The attention of another module, of which the first call is alike."""
        made = Taken.__new__(Taken)
        vars(made).update(vars(self), name=name, number=number)
        made.calls, made.edits, made.firsts, made.later = [*self.calls], [*self.edits], [], []
        return made

    def vectors(self, b: int, arrays: Sequence[Any]) -> Sequence[Any]:
        """Query, key and maybe value of the first call, of batch element b, without padding.

        Args:
            b: which.
            arrays: query, key and value or None, ``(B, H, L, D)``; key and value of one batch
                element may be those of all.

        Returns:
            ``(H, L, D)``; of one text without padding the arrays themselves.
        """
        given = arrays if arrays[2] is not None else arrays[:2]
        if self._is_whole:
            return given if self.batch == 1 else [x[b if len(x) > 1 else 0] for x in given]
        queries, keys = (slice(*span) for span in self.spans[b])
        parts = (self.heads.own, queries), (self.heads.shared, keys), (self.heads.shared, keys)
        return [x[(b if len(x) > 1 else 0, *part)] for x, part in zip(given, parts)]

    def first(
        self, b: int, arrays: Sequence[Any], options: dict[str, Any], keep: Callable[[Any], Any]
    ) -> Layer[Any]:
        """The layer of the first call, of batch element b and without its padding.

        Args:
            b, arrays: as of ``vectors``.
            options: of the layer.
            keep: what each array becomes.
        """
        return self.layer_of([keep(x) for x in self.vectors(b, arrays)], options)

    def layer_of(self, vectors: Sequence[Any], options: dict[str, Any]) -> Layer[Any]:
        """A layer of what ``vectors`` gives."""
        query, key, *value = (x[0] if x.ndim == 4 else x for x in vectors)
        return Layer._of_checked(
            query, key, value[0] if value else None, options.copy(),
            name=self.name, number=self.number, head_numbers=self._head_numbers,
        )  # fmt: skip

    def _first_options(self, call: Call, b: int, keep: Any) -> dict[str, Any]:
        queries, keys = (slice(*span) for span in self.spans[b])
        every, heads = call.options_of(b), self.heads
        uncut = (queries.stop - queries.start, keys.stop - keys.start) == call.sizes[3:]
        rows = self.calls[0][0][b]
        uncut = uncut and heads.numbers is None and rows.position() == rows.start
        if uncut and {"mask", "segments", "intervals"}.isdisjoint(every):
            options = {name: _kept(x, keep) for name, x in every.items()}
        else:
            options = self._options(every, self._visible(b), call.query)
            if "bias" in every:
                whole = every["bias"].detach() if is_tensor(every["bias"]) else every["bias"]
                whole = whole[heads.own] if len(whole) > 1 else whole
                whole = whole[:, queries] if whole.shape[1] > 1 else whole
                options["bias"] = keep(whole[..., keys] if whole.shape[2] > 1 else whole)
            if any(self.edits):
                options["edits"] = self._edits(b)
        if not options.get("edits", True):  # none that is of kept tokens
            del options["edits"]
        return options

    def go_on(self, call: Call, rows: list[Rows]) -> None:
        """Takes a further step of a generation.

        Raises:
            RecordingError: it does not continue what was taken.
        """
        Lq, Lk = call.sizes[3:]
        if call.sizes[0] != self.batch or not is_tensor(call.query):
            raise self._no_step("its batch is another")
        if call.sizes[1:3] != self._sizes:
            raise self._no_step(
                "it has other heads, as transformers packs them for one query past a mask; record "
                "such a model by regard.hf.record"
            )
        if self._begins_with_padding:
            raise self._no_step(
                "the first queries of a text are padding alone, and only the first call tells what"
                " is padding; take a prefill_chunk_size above it"
            )
        if self.first_queries == 1 and not self.later and Lk == self.first_keys > 1:
            self._tell_cache(call.key, rows)
        if self.is_cross:
            if Lk != self.first_keys or not self._has_same_keys(call.key):
                raise self._no_step("it attends to other keys")
            if not all(map(self._sees_kept_keys, range(self.batch), rows)):
                raise self._no_step("it sees keys that the first queries did not see")
            new, offset = slice(0, 0), 0
        else:
            rows = [self._placed(one) for one in rows]
            start = rows[0].start
            if any(one.start != start for one in rows):
                raise self._no_step("its texts go on at different places")
            new, offset = slice(start, start + Lq), self.keys - start
            if start < 1 or offset < 0 or start + Lq > Lk:
                raise self._no_step("its queries are not the next ones")
            if not self._follows(call.key, start - 1):
                raise self._no_step(
                    "the keys before it are others, as beam search and dropped guesses leave them"
                )
            self._last_key = copied(call.key[:, :, start + Lq - 1])
            self.keys += Lq
        self.queries += Lq
        self.calls.append((rows, offset))
        self.edits.append(call.rectangles)
        value = None if call.value is None else copied(call.value[:, self.heads.shared, new])
        query, key = call.query[:, self.heads.own], call.key[:, self.heads.shared, new]
        bias = None if call.bias is None else copied(call.bias.detach())
        self.later.append(Part(copied(query), copied(key), value, bias))

    def _tell_cache(self, key: Any, rows: list[Rows]) -> None:
        """Tells by the second call what one query did not show: cross-attention, or a cache."""
        filled, *others = {stop for _, (_, stop) in self.spans}
        are_next = not (self.is_cross or others)
        for one in rows:
            last = one.seen().last
            are_next &= bool((last == filled + 1 + np.arange(len(last))).all())
        if are_next:  # of unused places, which a mask hides
            self.first_keys = self.keys = filled
        else:
            self.is_cross |= self._has_same_keys(key)

    def _follows(self, key: Any, place: int) -> bool:
        """Whether the last key that was taken is at a place, and the last that is no padding."""
        if self._last_key is not None:
            return bool((key[:, :, place] == self._last_key).all())
        for b, (first, (_, (_, stop))) in enumerate(zip(self.firsts, self.spans)):
            at = place - (self.first_keys - stop)
            if at < 0:  # dropped from the cache
                continue
            last = _tensor(first.key)[:, -1].to(key.device)
            own = key[b if len(key) > 1 else 0][self.heads.shared, at]
            if not bool((own == last).all()):
                return False
        return True

    def _has_same_keys(self, key: Any) -> bool:
        """Whether the keys that are kept of the first call are those of a further one."""
        for b, (first, (_, span)) in enumerate(zip(self.firsts, self.spans)):
            own = key[b if len(key) > 1 else 0][self.heads.shared, slice(*span)]
            if not bool((own == _tensor(first.key).to(key.device)).all()):
                return False
        return True

    def _sees_kept_keys(self, b: int, rows: Rows) -> bool:
        """Whether a further call of cross-attention sees no key but those kept."""
        (low, high), seen = self.spans[b][1], rows.seen()
        return not seen.last.any() or (low <= seen.span[0] and seen.span[1] <= high)

    def _placed(self, rows: Rows) -> Rows:
        """The next queries of a cache with unused places, which a mask hides."""
        if rows.is_ordered or rows.mask is None or len(rows.first) == rows.keys:
            return rows
        are_next = rows.seen().last == self.keys + 1 + np.arange(len(rows.first))
        return rows._replace(start=self.keys) if are_next.all() else rows

    def _no_step(self, reason: str) -> RecordingError:
        return RecordingError(
            f"record: {self.name or 'the model'} computed attention again, and that is no further "
            f"step of one generation: {reason}. A recording holds one pass, or one generation "
            "with a cache and without beams; open another record for the next. One pass is one "
            "call of the model, model(x): what model.forward(x) calls counts by itself."
        )

    def layer(self, b: int) -> Layer[Any]:
        """The layer of all calls, of batch element b."""
        first = self.firsts[b]
        if self.gradient is not None:
            return first._with_gradient(self._gradient(b))
        if not self.later:
            return first
        import torch

        def whole(start: Any, name: str) -> Any:
            parts = [getattr(part, name)[b] for part in self.later]
            return torch.cat([_tensor(start).to(parts[0]), *parts], 1)

        query, key = whole(first.query, "query"), whole(first.key, "key")
        options = self._options(first.options, self._visible(b), query)
        if "bias" in first.options or any(part.bias is not None for part in self.later):
            options["bias"] = self._bias(first, b, key.shape[1]).to(query.device)
        if any(self.edits):
            options["edits"] = self._edits(b)
        return Layer(
            query, key, None if first.value is None else whole(first.value, "value"),
            name=first.name, number=first.number, head_numbers=first.head_numbers, **options,
        )  # fmt: skip

    def _gradient(self, b: int) -> Any:
        """``(Hq, Lq, Dv)`` of batch element b, of the recorded heads and without padding."""
        x = self.gradient
        whole = x.reshape((self.batch, -1, *x.shape[-2:]))[b]
        return copied(whole[self.heads.own, slice(*self.spans[b][0])])

    def _bias(self, first: Layer[Any], b: int, count: int) -> Any:
        """``(Hq, Lq, Lk)``: what all calls add to the scores of kept keys."""
        import torch

        place = np.concatenate(([0], np.cumsum(self.kept(b))))
        given = [_tensor(first.options["bias"])] if "bias" in first.options else []
        dtypes = [x.dtype for x in (*given, *(part.bias for part in self.later)) if x is not None]
        zeros = functools.partial(torch.zeros, dtype=functools.reduce(torch.promote_types, dtypes))
        rows = zeros(first.heads, first.query.shape[1], count)
        for known in given:
            rows[..., : first.key.shape[1]] = known
        parts = [rows]
        for part, (_, offset) in zip(self.later, self.calls[1:]):
            rows = zeros(first.heads, part.query.shape[2], count)
            if part.bias is not None:
                own = part.bias[b if len(part.bias) > 1 else 0]
                own = own[self.heads.own] if len(own) > 1 else own
                there = min(own.shape[-1], self.keys - offset)
                columns = np.arange(offset, offset + there)
                columns = columns[self.kept(b)[columns]]
                rows[..., place[columns]] = own[..., columns - offset].to(rows)
            parts.append(rows)
        return torch.cat(parts, 1)

    def _edits(self, b: int) -> tuple[Edit, ...]:
        """Those of all calls, on the kept heads, queries and keys."""
        place = np.concatenate(([0], np.cumsum(self.kept(b))))
        ranges: list[list[int]] = []  # of heads, queries and keys
        factors: list[float] = []
        done = 0  # queries of the calls before
        for n, (own, (rows, offset)) in enumerate(zip(self.edits, self.calls)):
            kept = slice(0, len(rows[b].first)) if n else self.kept_queries(b)
            for heads, queries, keys, factor in own:
                if self.heads.numbers is not None:
                    heads = tuple(np.searchsorted(self.heads.numbers, heads).tolist())
                low, high = (min(max(x, kept.start), kept.stop) - kept.start for x in queries)
                across = [
                    x if x == OPEN else int(place[min(x + offset, len(place) - 1)]) for x in keys
                ]
                found = [*heads, done + low, done + high, *across]
                for known, other in zip(ranges, factors):  # the same of the call before goes on
                    same = known[:2] == found[:2] and known[4:] == found[4:] and other == factor
                    if same and known[3] == found[2]:
                        known[3] = found[3]
                        break
                else:
                    ranges.append(found)
                    factors.append(factor)
            done += kept.stop - kept.start
        return edits_of(np.array(ranges).reshape(-1, 6), np.array(factors))

    def kept(self, b: int) -> np.ndarray:
        """Bool, one for each key of all calls: no padding of the first."""
        kept = np.ones(self.keys, bool)
        low, high = self.spans[b][1]
        kept[:low] = kept[high : self.first_keys] = False
        return kept

    def kept_queries(self, b: int) -> slice:
        """The queries of the first call that are no padding."""
        return slice(*self.spans[b][0])

    def facts(self, b: int, described: Described) -> dict[str, Any]:
        """Tokens, boundary and grids of the group of these layers, without padding.

        Raises:
            ShapeError: tokens are described, and they are not as many.
        """
        (low, high), first = self.spans[b][1], self.first_queries
        keys = _texts("tokens", described.keys, self.keys, self.name)
        facts: dict[str, Any] = {"tokens": keys[low:high] + keys[self.first_keys :]}
        if self.is_cross:
            asking = _texts("query tokens", described.queries, self.queries, self.name)
            facts["query_tokens"] = asking[:first][self.kept_queries(b)] + asking[first:]
        elif self.later:
            given = self.first_keys if described.prompt is None else described.prompt
            facts["boundary"] = int(self.kept(b)[:given].sum())
        if described.grids:
            kept = self.kept(b)
            place = np.concatenate(([0], np.cumsum(kept)))
            facts["grids"] = [
                grid._replace(start=int(place[grid.start]))
                for grid in described.grids
                if kept[grid.start : grid.stop].all()
            ]
        return facts

    def _visible(self, b: int) -> dict[str, Any]:
        """The options that show what the queries of all calls see."""
        everything = slice(None)
        return joined(
            [
                Step(rows[b], everything if n else self.kept_queries(b), offset)
                for n, (rows, offset) in enumerate(self.calls)
            ],
            self.kept(b),
        )

    def _options(self, given: dict[str, Any], visible: dict[str, Any], like: Any) -> dict[str, Any]:
        """The options of a layer: numbers as given, and what is seen."""
        options = {name: given[name] for name in REAL_NUMBERS if name in given}
        if "sinks" in given:
            whole = len(given["sinks"]) != len(self.heads.numbers or given["sinks"])
            sinks = given["sinks"][self.heads.own] if whole else given["sinks"]
            options["sinks"] = (
                copied(_tensor(sinks).detach().to(like.device)) if is_tensor(like) else sinks
            )
        if "mask" in visible and len(visible["mask"]) > 1:
            visible["mask"] = visible["mask"][self.heads.own]
        if is_tensor(like):
            visible = {name: _as_tensors(x, like.device) for name, x in visible.items()}
        return options | visible


def _texts(what: str, given: Sequence[str] | None, count: int, name: str) -> list[str]:
    if given is None:
        return [str(n) for n in range(count)]
    if len(given) != count:
        raise ShapeError(
            f"record: {len(given)} {what} are given, and {name or 'attention'} has {count}; one "
            "text for each is needed. Without them, they are numbered."
        )
    return list(given)


def _kept(x: Any, keep: Any) -> Any:
    """An option of a layer: arrays kept as the layer's others are."""
    if isinstance(x, tuple):
        return tuple(_kept(part, keep) for part in x)
    if is_tensor(x):
        return keep(x.detach())
    return keep(x) if isinstance(x, np.ndarray) else x


def copied(x: Any) -> Any:
    """A copy that nobody else writes into."""
    return x.detach().clone() if is_tensor(x) else x.copy()


def _tensor(x: Any) -> Any:
    """x as a tensor of its own, where it is an array of a file; numbers of bfloat16 as float32."""
    if is_tensor(x):
        return x
    import torch

    return torch.from_numpy(x.astype("float32" if dtype_name(x) == "bfloat16" else x.dtype))


def _as_tensors(x: Any, device: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_as_tensors(part, device) for part in x)
    if not isinstance(x, np.ndarray):
        return x
    import torch

    return torch.from_numpy(x).to(device)
