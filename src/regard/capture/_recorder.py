"""From calls of attention, module by module, to recordings."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard._base.arrays import is_tensor
from regard._base.errors import RecordingError, UnsupportedError
from regard._base.settings import counted
from regard._call.call import Call
from regard._call.checks import read_call, read_flag
from regard._call.contents import check_contents
from regard._call.options import OPTIONS, REAL_NUMBERS
from regard._operator.torch_calls import is_in_backward
from regard._weights.parts import listed
from regard.capture._calls import NOT_SEEN
from regard.capture._files import Files, Mold, Unread
from regard.capture._groups import Occurrences, Place, group_names
from regard.capture._kind import is_beside
from regard.capture._rows import SIGHT, BySight, Rows, Seen, Span, identity
from regard.capture._taken import Described, Heads, Taken, copied
from regard.recording import Layer, Recording

if TYPE_CHECKING:
    from regard.capture._explanation import Explanation

ALIKE = {*SIGHT, *REAL_NUMBERS}  # options of which no layer has arrays of its own
OF_OUTPUT = tuple(option.name for option in OPTIONS if not option.of_weights)
MOST = 64  # kinds of calls that are known; then they are forgotten
Arrays = tuple[Any, Any, Any]  # query, key, and value or None
Describe = Callable[[str, Taken, int], Described]


class Alike(NamedTuple):
    """Calls from which the same follows.

    Attributes:
        taken: the first of them.
        layers: for each batch element, the options of their layers.
        writes: likewise, what writes such a layer; empty where they are kept in memory.
        options: of the calls, held so that what is identified stays what it is.
    """

    taken: Taken
    layers: list[dict[str, Any]]
    writes: Sequence[Callable[[Sequence[Any], str, int], None]]
    options: dict[str, Any]


class Plain(NamedTuple):
    """Calls without arrays among their options, in any pass.

    Attributes:
        taken, layers: as of ``Alike``.
        molds: of the layers, for each batch element; none until they were written to a file.
    """

    taken: Taken
    layers: list[dict[str, Any]]
    molds: list[Mold]


_plain: dict[Any, Plain] = {}


class Sink:
    """Takes the layers of one pass, each as it is computed.

    Args:
        take: is given each layer, with what is known of its call.
    """

    def __init__(self, take: Callable[[Layer[Any], Taken], object]) -> None:
        self._take = take

    def add(
        self, taken: Taken, layers: list[Layer[Any]]
    ) -> list[Callable[[Sequence[Any], str, int], None]]:
        """As ``Files.add``."""
        for layer in layers:
            self._take(layer, taken)
        return [functools.partial(self._add_another, taken, layer) for layer in layers]

    def _add_another(
        self, taken: Taken, layer: Layer[Any], vectors: Sequence[Any], name: str, number: int
    ) -> None:
        another = taken.another(name, number)
        self._take(another.layer_of(vectors, layer.options), another)

    def read_back(self, taken: object) -> None:
        """Refuses a second pass.

        Raises:
            RecordingError: always.
        """
        raise RecordingError("record: the model computed attention again; one pass is read.")


class Recorder:
    """Takes the calls of one pass, or of the steps of one generation, and makes recordings.

    Args:
        layers, heads: numbers of those to take, by default all.
        values: whether to take the values.
        path: of a file that layers are written to as they come.
        explanation: that finds the gradients of the outputs; the file is written at the end then.
        sink: instead of files, takes each layer as it comes; no recording is made.
        text: the name of the module whose layers read the text; by default that of the whole model.
    """

    def __init__(
        self,
        *,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
        values: bool = False,
        path: str | Path | None = None,
        explanation: Explanation | None = None,
        sink: Sink | None = None,
        text: str = "",
    ) -> None:
        self._layers, self._heads = _numbers("layers", layers), _numbers("heads", heads)
        self._others: set[int] = set()  # numbers of layers that are not among these
        self._values = read_flag("values", values, "record") or explanation is not None
        self._explanation, self._text = explanation, text
        self._files: Any = sink if path is None else Files(path)
        # What each array of a layer becomes: one that is used at once is not copied before.
        self._keep = copied if self._files is None or explanation is not None else _same
        self._thread = threading.get_ident()
        self._taken: dict[tuple[str, int], Taken] = {}
        self._occurrences = Occurrences()
        self._rows = BySight(_rows_and_seen)
        self._spans_of: dict[str, list[tuple[Span, Span]]] = {}  # by group
        self._alike: dict[tuple[Any, ...], Alike] = {}  # of this pass, by what they have in common

    @property
    def explains(self) -> bool:
        """Whether a number is explained."""
        return self._explanation is not None

    def begin_pass(self) -> None:
        """A model is called: the attention of its modules occurs for the first time again."""
        if self._explanation is not None:
            self._explanation.begin_pass()
        self._occurrences.clear()
        self._rows.clear()
        self._alike.clear()

    def end_pass(self, output: Any) -> None:
        """A model gave its output; None where it raised."""
        if self._explanation is not None and output is not None:
            self._explanation.end_pass(output)

    def take(
        self,
        name: str,
        places: Mapping[str, Place],
        query: Any,
        key: Any,
        value: Any,
        options: dict[str, Any],
        are_of_one: Callable[[], bool],
        allowed: dict[str, Any] | None = None,
    ) -> Callable[[Any], Any] | None:
        """Takes a call of attention in the module of that name, where it is wanted.

        Args:
            name: of the module.
            places: of the modules of that kind.
            query, key, value, options: what attention is called with.
            are_of_one: tells whether queries and keys are known to be of the same tokens.
            allowed: the options before those that choose among the keys for each query; None where
                they are the same.

        Returns:
            What its output is to be handed through, where it is to be explained.
        """
        if threading.get_ident() != self._thread or is_in_backward():
            return None
        occurrence, (pattern, number) = self._occurrences.next(name, places, len(self._taken))
        if (known := self._taken.get((name, occurrence))) is not None:
            number = known.number
        if self._layers is not None and number not in self._layers:
            self._others.add(number)
            return None
        arrays = query, key, value if self._values else None
        if known is not None:
            self._go_on(known, arrays, options)
            return None
        likeness = _likeness(pattern or name, arrays, options)
        alike = None
        if likeness is not None and allowed is None:
            alike = self._alike.get(likeness)
        if alike is None or not alike.taken.is_of(are_of_one):
            taken = self._begin(
                name, pattern, number, arrays, options, likeness, are_of_one, allowed
            )
            if taken is None:
                return None
        else:
            taken = alike.taken.another(name, number)
            for b, own in enumerate(alike.layers):
                if alike.writes:
                    alike.writes[b](taken.vectors(b, arrays), name, number)
                else:
                    taken.firsts.append(taken.first(b, arrays, own, self._keep))
        self._taken[name, occurrence] = taken
        if self._explanation is None:
            return None
        return functools.partial(self._explanation.keep, taken)

    def _begin(
        self, name: str, pattern: str, number: int, arrays: Arrays, options: dict[str, Any],
        likeness: tuple[Any, ...] | None, are_of_one: Callable[[], bool],
        allowed: dict[str, Any] | None,
    ) -> Taken | None:  # fmt: skip
        """The first call of a layer; None where there is nothing to attend to."""
        known = (likeness, self._heads)
        plain, taken = None if allowed is not None else _plain.get(known), None
        if plain is not None and plain.taken.is_of(are_of_one):
            taken, layers = plain.taken.another(name, number), plain.layers
        if taken is None or self._in_group(taken, taken.spans) != taken.spans:
            plain = None
            call, given = _read(name, arrays, options)
            if min(call.sizes) == 0:
                return None
            rows, seen = self._rows.of(call, given)
            if allowed is not None:
                seen = self._rows.of(*_read(name, arrays, allowed))[1]
            heads = self._heads_of(call)
            taken = Taken(name, pattern, number, call, rows, seen, heads, are_of_one)
            spans = self._spans(taken, rows, seen, are_of_one)
            of_group = self._in_group(taken, spans)
            layers = taken.begin(call, of_group, self._keep)
            arrays = call.query, call.key, call.value
            is_alone = of_group == spans and allowed is None and not taken.is_cross
            if likeness is not None and is_alone and _are_plain(options):
                if len(_plain) >= MOST:
                    _plain.clear()
                plain = _plain[known] = Plain(taken.another("", 0), layers, [])
        writes = self._begin_layers(taken, arrays, layers, [] if plain is None else plain.molds)
        if likeness is not None and allowed is None and not taken.is_cross:
            self._alike[likeness] = Alike(taken, layers, writes, options)
        return taken

    def _begin_layers(
        self, taken: Taken, arrays: Arrays, layers: list[dict[str, Any]], molds: list[Mold]
    ) -> Sequence[Callable[[Sequence[Any], str, int], None]]:
        """Keeps or writes the first layers of their kind; gives what writes others of it.

        Args:
            taken, arrays, layers: the call, and the options of its layers.
            molds: of the layers, where they are known; they are added where they are found.
        """
        to_files = isinstance(self._files, Files) and self._keep is not copied
        if to_files and molds:
            writes = self._files.writes(taken, molds)
            for b, write in enumerate(writes):
                write(taken.vectors(b, arrays), taken.name, taken.number)
            return writes
        firsts = [taken.first(b, arrays, own, self._keep) for b, own in enumerate(layers)]
        if self._files is None or self._keep is copied:
            taken.firsts = firsts
            return []
        writes = self._files.add(taken, firsts)
        if to_files:
            molds += [write.mold for write in writes]
        return writes

    def _go_on(self, known: Taken, arrays: Arrays, options: dict[str, Any]) -> None:
        """A further step of a generation."""
        call, given = _read(known.name, arrays, options)
        if min(call.sizes) == 0:
            return
        if self._files is not None and not known.firsts:
            self._files.read_back(self._taken.values())
            self._keep = copied
            self._alike.clear()
        known.go_on(call, self._rows.of(call, given)[0])

    def _heads_of(self, call: Call) -> Heads:
        if self._heads is None:
            return Heads(slice(None), slice(None), None)
        _, Hq, Hkv, _, _ = call.sizes
        numbers = sorted(set(self._heads))
        if numbers[-1] >= Hq:
            raise IndexError(
                f"record: there is no head {numbers[-1]}; the layer has {Hq}, 0 to {Hq - 1}."
            )
        return Heads(numbers, [h // (Hq // Hkv) for h in numbers], numbers)

    def _spans(
        self, taken: Taken, rows: list[Rows], seen: list[Seen], are_of_one: Callable[[], bool]
    ) -> list[tuple[Span, Span]]:
        """The queries and keys of each batch element that are known to be no padding.

        A key that nobody sees is padding, at an end of the others; a query is where its key is.
        """
        every = 0, taken.queries
        spans = [
            (every, (min(low, taken.first_keys - 1), min(high, taken.first_keys)))
            for low, high in (own.span for own in seen)
        ]
        if taken.is_cross:
            queries = self._query_spans(taken) or [every] * taken.batch
            return [(own, keys) for own, (_, keys) in zip(queries, spans)]
        whole = 0, taken.first_keys
        if not taken.in_order:
            if taken.queries == 1 or all(keys == whole for _, keys in spans):
                return spans
            taken.of_one = are_of_one()
        if taken.of_one is False or not all(own.is_own for own in seen):
            spans = [(every, whole)] * taken.batch
        found = []
        for one, (_, keys) in zip(rows, spans):
            low, high = (max(0, min(taken.queries, end - one.position())) for end in keys)
            found.append(((low, high), keys))
        return found

    def _query_spans(self, cross: Taken) -> list[Span] | None:
        """The queries of cross-attention that are no padding: those of their self-attention."""
        for taken in reversed(self._taken.values()):
            alike = taken.batch == cross.batch and taken.first_queries == cross.queries
            alike = alike and not taken.is_cross and taken.first_keys == taken.first_queries
            if alike and is_beside(cross.name, taken.name):
                return [queries for queries, _ in taken.spans]
        return None

    def _in_group(self, taken: Taken, spans: list[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
        """The spans of a layer's group, where they hold its own; else it begins another."""
        taken.group, count = taken.kind, 1
        while (known := self._spans_of.setdefault(taken.group, spans)) is not spans:
            inside = (
                low <= own_low and own_high <= high
                for of_group, own in zip(known, spans)
                for (low, high), (own_low, own_high) in zip(of_group, own)
            )
            if all(inside):
                return known
            count += 1
            taken.group = f"{taken.kind} {count}"
        return spans

    def finished(self, describe: Describe, model: str = "") -> Sequence[Recording[Any] | Unread]:
        """The recording of each batch element, on disk where there is a path.

        Args:
            describe: gives the tokens of a group, by its name and first layer, and a batch element.
            model: its name, for people.

        Raises:
            RecordingError: no attention was computed.
            ShapeError: tokens are described, and they are not as many as the keys.
        """
        groups = self.groups()
        if self._explanation is not None:
            self._explanation.require_done()
        main, *others = groups
        groups[main][0].is_main = True
        batch = groups[main][0].batch
        for name in others:
            if (own := groups[name][0].batch) != batch:
                count = len(groups.pop(name))
                work = "is left out: it works" if count == 1 else "are left out: they work"
                warnings.warn(
                    f"record: {counted(count, 'layer')} {name!r} {work} on"
                    f" {counted(own, 'piece')} at once, and {main!r} on {counted(batch, 'text')}.",
                    stacklevel=5,
                )
        facts = [
            {
                name: layers[0].facts(b, describe(name, layers[0], b))
                for name, layers in groups.items()
            }
            for b in range(batch)
        ]
        in_memory = self._explanation is not None
        in_memory = in_memory or any(taken.later for taken in self._taken.values())
        if self._files is not None and not in_memory:
            names = {name: layers[0].group for name, layers in groups.items()}
            return self._files.finished(facts, names, model)
        made = []
        for b, of_groups in enumerate(facts):
            parts: dict[str, dict[str, Any]] = {
                name: {"layers": [one.layer(b) for one in layers], "model": model, "group": name}
                for name, layers in groups.items()
            }
            rest = {
                name: Recording(**parts[name], **of_groups[name])
                for name in others
                if name in groups
            }
            made.append(Recording(**parts[main], **of_groups[main], others=rest))
        return made if self._files is None else self._files.saved(made)

    def groups(self) -> dict[str, list[Taken]]:
        """Layers of one kind and of the same tokens, by name; the text's own first."""
        if not self._taken:
            chosen = "" if self._layers is None else f" in layers {sorted(self._layers)}"
            if self._others:
                raise RecordingError(
                    f"record: no attention was computed{chosen}; it was in"
                    f" {listed(sorted(self._others))}."
                )
            raise RecordingError(
                f"record: no attention was computed{chosen} by this thread. {NOT_SEEN}"
            )
        found: dict[str, list[Taken]] = {}
        for taken in self._taken.values():
            found.setdefault(taken.group, []).append(taken)
        firsts = [own[0] for own in found.values()]
        crosses = [taken.is_cross for taken in firsts]
        named = dict(zip(group_names([taken.pattern for taken in firsts], crosses), found.values()))
        main, *others = named
        if others:
            main = max(named, key=lambda name: _rank(name, named[name][0], self._text))
        return {main: named[main]} | named

    def close(self, error: BaseException | None = None) -> None:
        """Removes what is unfinished on disk."""
        if self._files is not None:
            self._files.close(error)


def _rank(name: str, taken: Taken, text: str) -> tuple[bool, bool, bool]:
    """Larger for the layers that are a recording's own: those of a text, and one that is written.

    Args:
        name, taken: of a group, and one of its layers.
        text: the name of the module whose layers read the text.
    """
    of_text = not text or f"{taken.name}.".startswith(f"{text}.")
    rows, _ = taken.calls[0]
    last = rows[0].last
    is_causal = bool((last[:-1] <= last[1:]).all() and last[0] < last[-1])
    begins = name == "decoder" and len(last) == 1  # one query alone does not show that it is causal
    return not taken.is_cross, of_text, is_causal or begins or bool(taken.later)


def _same(x: Any) -> Any:
    return x


def _read(name: str, arrays: Arrays, options: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
    """A call, checked, and the options that its weights follow from."""
    given = {name: x for name, x in options.items() if name not in OF_OUTPUT}
    call = read_call(*(x.detach() if is_tensor(x) else x for x in arrays), **given)
    if call.key_start is not None:
        raise UnsupportedError(
            f"record: {name or 'attention'} is called on a part of its tokens (key_start,"
            " query_step or key_step); a recording has whole rows. Record the model in one"
            " process, where it attends to all of them."
        )
    check_contents(call)
    return call, given


def _likeness(kind: str, arrays: Arrays, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """The same for calls of one pass from which the same follows; None of any other call."""
    parts: list[Any] = [kind]
    for name, x in options.items():
        if x is None or name in OF_OUTPUT:
            continue
        if name not in ALIKE:
            return None
        parts += name, identity(x)
    for x in arrays:
        if x is None:
            continue
        if not is_tensor(x) or x.ndim != 4:
            return None
        parts += x.shape, x.dtype, x.device
    return tuple(parts)


def _are_plain(options: dict[str, Any]) -> bool:
    """Whether there are no arrays among them."""
    parts = (part for x in options.values() for part in (x if isinstance(x, tuple) else (x,)))
    return all(x is None or type(x) in (bool, int, float) for x in parts)


def _rows_and_seen(call: Call) -> tuple[list[Rows], list[Seen]]:
    """What the queries see."""
    rows = Rows.of(call)
    return rows, [one.seen() for one in rows]


def _numbers(name: str, given: Any) -> frozenset[int] | None:
    if given is None:
        return None
    numbers = None
    if not isinstance(given, (str, int)):
        numbers = [n.tolist() if hasattr(n, "tolist") else n for n in given]  # of an array
    if numbers is None or not all(type(n) is int and n >= 0 for n in numbers):
        raise TypeError(f"record: {name} is {given!r}; numbers from 0 on are needed, as in [3, 5].")
    if not numbers:
        raise ValueError(f"record: {name} are none; leave them out to record all.")
    return frozenset(numbers)
