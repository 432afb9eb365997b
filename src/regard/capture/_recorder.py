"""From calls of attention, module by module, to recordings: a pass, or every step of a generation."""

from __future__ import annotations

import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard._base.arrays import is_tensor
from regard._base.errors import RecordingError
from regard._call.call import Call
from regard._call.checks import read_call
from regard.capture._rows import Rows, Span, Step, joined
from regard.recording import Grid, Layer, Recording, Writer

CROSS = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)


class Described(NamedTuple):
    """What is known of the tokens of a group's queries and keys, before padding is cut off."""

    keys: Sequence[str] | None = None
    queries: Sequence[str] | None = None  # where they are others
    grids: tuple[Grid, ...] = ()


Describe = Callable[[str, int], Described]


class Taken:
    """What the attention of one module has had, over one pass or every step of a generation."""

    def __init__(self, name: str, pattern: str, number: int, call: Call, rows: list[Rows]) -> None:
        self.name, self.pattern, self.number = name, pattern, number
        Lq, Lk = call.sizes[3:]
        self.is_cross = bool(CROSS.search(name))
        self.first_keys = Lk if self.is_cross else min(Lk, max(0, rows[0].start) + Lq)
        self.keys = self.first_keys  # of all calls so far, padding included
        self.queries = Lq
        self.spans: list[tuple[Span, Span]] = []  # of queries and keys that are no padding
        self.calls = [(rows, 0)]
        self.later: list[tuple[Any, Any, Any, Any]] = []  # query, new keys, their values, bias
        self.firsts: list[Layer[Any]] = []
        self._last_key = call.key[:, :, self.keys - 1 : self.keys].clone() if is_tensor(call.key) else None

    def go_on(self, call: Call, rows: list[Rows], heads: _Heads) -> None:
        """Takes a further step of a generation.

        Raises:
            RecordingError: it does not continue what was taken.
        """
        Lq, Lk = call.sizes[3:]
        if len(call.query) != len(self.spans) or self._last_key is None:
            raise self._no_step("its batch is another")
        if self.is_cross:
            if Lk != self.first_keys:
                raise self._no_step(f"it has {Lk} keys, not {self.first_keys}")
            new, offset = slice(0, 0), 0
        else:
            start = rows[0].start
            new, offset = slice(start, start + Lq), self.keys - start
            if start < 1 or offset < 0 or start + Lq > Lk:
                raise self._no_step("its queries are not the next")
            if not bool((call.key[:, :, start - 1 : start] == self._last_key).all()):
                raise self._no_step("the keys before it are others, as beam search leaves them")
            self._last_key = call.key[:, :, start + Lq - 1 : start + Lq].clone()
            self.keys += Lq
        self.queries += Lq
        self.calls.append((rows, offset))
        value = None if call.value is None else call.value[:, heads.shared, new].clone()
        bias = None if call.bias is None else call.bias[..., : offset + Lk].clone()
        self.later.append(
            (call.query[:, heads.own].clone(), call.key[:, heads.shared, new].clone(), value, bias)
        )

    def _no_step(self, reason: str) -> RecordingError:
        return RecordingError(
            f"record: {self.name or 'the model'} computed attention again, and this is no further "
            f"step of one generation: {reason}. A recording holds one pass, or one generation "
            "without beams; open another record for the next."
        )

    def kept(self, b: int) -> np.ndarray:
        """Bool, one for each key of all calls: no padding of the first."""
        kept = np.ones(self.keys, bool)
        low, high = self.spans[b][1]
        kept[:low] = kept[high : self.first_keys] = False
        return kept

    def queries_of(self, b: int) -> slice:
        """The queries of the first call that are no padding."""
        return slice(*self.spans[b][0])

    def options(self, b: int, heads: int) -> dict[str, Any]:
        """What the queries of all calls see."""
        steps = [
            Step(rows[b], self.queries_of(b) if n == 0 else slice(None), offset)
            for n, (rows, offset) in enumerate(self.calls)
        ]
        return joined(steps, self.kept(b), heads)

    def layer(self, b: int, heads: _Heads) -> Layer[Any]:
        """The layer of all calls."""
        first = self.firsts[b]
        if not self.later:
            return first
        import torch

        def whole(start: Any, n: int) -> Any:
            parts = [torch.as_tensor(start), *(later[n][b] for later in self.later)]
            return torch.cat([x.to(parts[1]) for x in parts], 1)

        query, key = whole(first.query, 0), whole(first.key, 1)
        value = None if first.value is None else whole(first.value, 2)
        options = {n: first.options[n] for n in ("scale", "softcap", "sinks") if n in first.options}
        options |= self.options(b, len(query))
        if "bias" in first.options:
            raise RecordingError(
                f"record: {self.name} adds a bias to the scores of each step; a generation with "
                "one is not recorded. Record one pass over the whole text."
            )
        return Layer(
            query, key, value, name=first.name, number=first.number,
            head_numbers=first.head_numbers, **options,
        )  # fmt: skip


class _Heads(NamedTuple):
    """The heads that are recorded, of one layer."""

    own: Any  # of the query: a slice, or numbers
    shared: Any  # of the key
    numbers: list[int] | None


class Recorder:
    """Takes calls of attention and makes recordings of them.

    Args:
        layers, heads: numbers of those to keep, by default all.
        values: whether to keep the values.
        path: a file that the layers are written to as they come.
    """

    def __init__(
        self,
        *,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
        values: bool = False,
        path: str | Path | None = None,
    ) -> None:
        self._layers, self._heads, self._values = layers, heads, values
        self._thread = threading.get_ident()
        self._taken: dict[tuple[str, int], Taken] = {}
        self._occurrences: Counter[str] = Counter()
        self._rows: dict[Any, tuple[list[Rows], Any]] = {}

    def begin_pass(self) -> None:
        """A model is called: its modules' attention is at its first occurrence again."""
        self._occurrences.clear()
        self._rows.clear()

    def take(
        self, name: str, places: dict[str, tuple[str, int]], query: Any, key: Any, value: Any,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        """Takes a call of attention in the module ``name``."""
        if threading.get_ident() != self._thread:
            return
        occurrence = self._occurrences[name]
        self._occurrences[name] += 1
        pattern, number = places.get(name, (name, occurrence))
        if occurrence and name in places:
            pattern = f"{pattern} {occurrence + 1}"
        if self._layers is not None and number not in self._layers:
            return
        arrays = (x.detach() if is_tensor(x) else x for x in (query, key, value))
        kept = {n: x for n, x in options.items() if n not in ("dropout", "seed")}
        call = read_call(*arrays, **kept)
        if min(call.sizes) == 0:
            return
        rows = self._rows_of(call, kept)
        heads = self._heads_of(call)
        taken = self._taken.get((name, occurrence))
        if taken is not None:
            taken.go_on(call, rows, heads)
            return
        taken = self._taken[name, occurrence] = Taken(name, pattern, number, call, rows)
        taken.spans = self._spans(taken, rows, call.sizes[3])
        is_whole = {"segments", "mask", "intervals"}.isdisjoint(kept) and heads.numbers is None
        for b in range(call.sizes[0]):
            taken.firsts.append(self._layer(taken, call, b, heads, is_whole))

    def _rows_of(self, call: Call, options: dict[str, Any]) -> list[Rows]:
        """What the queries see, found once for layers that are given the same arrays."""
        seen = ("causal", "window", "mask", "key_lengths", "segments", "intervals", "query_start")
        given = {n: options[n] for n in seen if options.get(n) is not None}
        cached = (call.sizes[0], *call.sizes[3:], *((n, _identity(x)) for n, x in given.items()))
        if cached not in self._rows:  # the arrays are held: their identities stay their own
            self._rows[cached] = Rows.of(call), given
        return self._rows[cached][0]

    def _heads_of(self, call: Call) -> _Heads:
        if self._heads is None:
            return _Heads(slice(None), slice(None), None)
        _, Hq, Hkv, _, _ = call.sizes
        numbers = sorted({int(h) % Hq for h in self._heads if -Hq <= h < Hq})
        if not numbers:
            raise IndexError(f"record: heads {sorted(self._heads)}; the layer has {Hq}.")
        return _Heads(numbers, [h // (Hq // Hkv) for h in numbers], numbers)

    def _spans(self, taken: Taken, rows: list[Rows], queries: int) -> list[tuple[Span, Span]]:
        found = []
        for b, one in enumerate(rows):
            low, high = one.seen()
            low, high = min(low, taken.first_keys - 1), min(high, taken.first_keys)
            if taken.is_cross:
                found.append((self._query_span(b, len(rows), queries), (low, high)))
                continue
            ends = (max(0, min(queries, end - one.start)) for end in (low, high))
            found.append(((next(ends), next(ends)), (low, high)))
        return found

    def _query_span(self, b: int, batch: int, queries: int) -> Span:
        """Which of the queries of cross-attention are no padding: as in their self-attention."""
        for taken in reversed(self._taken.values()):
            rows = taken.calls[0][0]
            if not taken.is_cross and len(rows) == batch and len(rows[0].first) == queries:
                if taken.spans:
                    return taken.spans[b][0]
        return 0, queries

    def _layer(self, taken: Taken, call: Call, b: int, heads: _Heads, is_whole: bool) -> Layer[Any]:
        (low, high), (first, last) = taken.spans[b]
        queries, keys = slice(low, high), slice(first, last)
        k = b if len(call.key) > 1 else 0
        value = None
        if self._values and call.value is not None:
            value = _copied(call.value[k][heads.shared, keys])
        every = call.options_of(b)
        options = {n: every[n] for n in ("scale", "softcap", "sinks") if n in every}
        if "sinks" in options:
            options["sinks"] = options["sinks"][heads.own]
        uncut = (high - low, last - first) == call.sizes[3:]
        if is_whole and uncut:
            options = every
        else:
            options |= taken.options(b, call.sizes[1])
            if heads.numbers is not None and "mask" in options and len(options["mask"]) > 1:
                options["mask"] = options["mask"][heads.own]
            if is_tensor(call.query):
                options = {n: _as_tensors(x, call.query.device) for n, x in options.items()}
            if "bias" in every:
                options["bias"] = _cut_bias(every["bias"], heads, queries, keys, call.sizes)
        return Layer(
            _copied(call.query[b][heads.own, queries]), _copied(call.key[k][heads.shared, keys]),
            value, name=taken.name, number=taken.number, head_numbers=heads.numbers, **options,
        )  # fmt: skip

    def finished(self, describe: Describe, model: str = "") -> list[Recording[Any]]:
        """The recording of each batch element.

        Args:
            describe: gives the tokens of a group and batch element.
            model: its name, for people.

        Raises:
            RecordingError: no attention was computed.
        """
        groups = self._groups()
        if not groups:
            raise RecordingError(
                "record: no attention was computed within it"
                + (" in the chosen layers." if self._layers is not None else ".")
                + " It sees torch.nn.functional.scaled_dot_product_attention, regard.attention and "
                "layers built on them; models that multiply query and key by themselves need "
                "regard.nn.replace, or for Hugging Face regard.hf."
            )
        main = next(iter(groups))
        batch = len(groups[main][0].firsts)
        for name in [name for name, layers in groups.items() if len(layers[0].firsts) != batch]:
            left = groups.pop(name)
            warnings.warn(
                f"record: {left[0].name} and {len(left) - 1} more are left out: they work on "
                f"{len(left[0].firsts)} pieces, and the model on {batch} texts.",
                stacklevel=4,
            )
        return [self._recording(groups, b, describe, model) for b in range(batch)]

    def _groups(self) -> dict[str, list[Taken]]:
        """Layers of one kind and the same tokens, the text's own first, in the order of the model."""
        found: dict[tuple[Any, ...], list[Taken]] = {}
        for taken in self._taken.values():
            sizes = (len(taken.firsts), taken.queries, taken.keys)
            found.setdefault((taken.pattern, *sizes), []).append(taken)
        patterns = [key[0] for key in found]
        names = group_names(patterns)
        named: dict[str, list[Taken]] = {}
        for name, layers in zip(names, found.values()):
            named[name] = layers
        main = max(named, key=lambda name: (_is_causal(named[name][0]), not named[name][0].is_cross))
        return {main: named[main], **{n: x for n, x in named.items() if n != main}}

    def _recording(
        self, groups: dict[str, list[Taken]], b: int, describe: Describe, model: str
    ) -> Recording[Any]:
        others: dict[str, Recording[Any]] = {}
        for name, layers in reversed(groups.items()):
            made, settings = self._group(layers, b, describe(name, b))
            if name == next(iter(groups)):
                others = dict(reversed(others.items()))
                return Recording(made, **settings, model=model, group=name, others=others)
            others[name] = Recording(made, **settings, model=model, group=name)
        raise AssertionError("there is a group")
