"""The data endpoints of the viewer: one function from a request to its response, without I/O.

docs/viewer-protocol.md lists them; the server, a notebook and the tests call them here.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import numpy as np

from regard._base.errors import RecordingError, UnsupportedError, a_type
from regard._base.settings import counted
from regard._base.types import PoolHow
from regard._weights.effects import KINDS
from regard.recording import Recording
from regard.viewer import _facts, _steps
from regard.viewer._alignment import Alignments
from regard.viewer._differences import Differences, Place
from regard.viewer._effects import largest_effects, pair_effects, thumbnails
from regard.viewer._heads import SIZE, Corpus, Heads, packed_text
from regard.viewer._maps import Maps, Where
from regard.viewer._words import pair_of_words, seen_words

if TYPE_CHECKING:
    from regard._weights.effects import EffectKind

__all__ = ["Answer", "Answers"]

JSON = "application/json"
FLOATS = "application/octet-stream"
TEXT = "text/plain; charset=utf-8"
SIDE = 256  # bins of a tile
MAX_LINKS = 512
MAX_STEPS = 64  # queries, and keys
MAX_QUERY_LENGTH = 4096
# One more than the largest position, 2**53, has digits.
INTEGER = re.compile(r"[0-9]{1,16}")
PART = re.compile(r"([0-9]{1,16})-([0-9]{1,16})")
PLANES: tuple[PoolHow, ...] = ("max", "mass")
SIDES = ("key", "query")
FIRST = ("shown", "hidden")
UNITS = ("token", "word")
WordT = TypeVar("WordT", bound=str)


class Answer(NamedTuple):
    """The response to a request.

    Attributes:
        status: as in HTTP: 200, 400 for bad parameters, 404 for an unknown endpoint, 410 where the
            recording's file was cut.
        media_type: of the body.
        body: numbers as float32, JSON in UTF-8, or one sentence that says what is wrong.
        coverage: the fraction of rows that it has read, 0 to 1.
    """

    status: int
    media_type: str
    body: bytes
    coverage: float = 1.0


class RequestError(ValueError):
    """A request that cannot be answered; the message says why."""


class Answers:
    """Answers about one recording, or about several side by side.

    Threads may share one. ``close`` ends what it does in the background.

    Args:
        recordings: at least one.
        names: what people call them; by default the names of their models.
        corpus: means of a survey by the numbers of layer and head, and the name of a score, to be
            shown beside the recordings' own.

    Raises:
        TypeError: something that is no recording, one text as names, or a name that is no text.
        ValueError: no recording, one without queries, or another number of names.

    Example:
        >>> from regard.recording import Layer
        >>> q = np.eye(3, dtype=np.float32)[None]
        >>> answers = Answers([Recording(["a", "b", "c"], [Layer(q, q, causal=True)])])
        >>> answer = answers.answer("row", "layer=0&head=0&query=1")
        >>> np.exp(np.frombuffer(answer.body, "<f4")).round(3)
        array([0.36, 0.64,  nan], dtype=float32)
        >>> answers.answer("row", "layer=0&head=7&query=1").body.decode()
        'head is 7; there is 1, number 0.'
    """

    def __init__(
        self,
        recordings: Sequence[Recording[Any]],
        names: Sequence[str] | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        self.recordings = tuple(recordings)
        if not self.recordings:
            raise ValueError("viewer: there is no recording to show; give at least one.")
        self.names = _names_of(self.recordings, names)
        for name, found in zip(self.names, self.recordings):
            if not found.query_tokens:
                raise ValueError(f"viewer: {name or 'the recording'} has no queries to show.")
        hidden = (_facts.without_first_token(found) for found in self.recordings)
        self._shown = (*self.recordings, *hidden)
        self._alignments = Alignments(self.recordings)
        self._maps = Maps(self._shown, self._alignments)
        self._differences = Differences(self._shown, self._alignments)
        self._heads = [Heads(found, corpus) for found in self._shown]
        self._largest: dict[tuple[int, str], list[Any]] = {}  # effects
        self._thumbnails: dict[tuple[int, int, str], dict[str, Any]] = {}
        self._largest_lock, self._thumbnails_lock = threading.Lock(), threading.Lock()

    @classmethod
    def of_groups(
        cls,
        recordings: Sequence[Recording[Any]],
        names: Sequence[str] | None = None,
        corpus: Corpus | None = None,
    ) -> Answers:
        """Answers about every group of some recordings; arguments and errors as the class has."""
        named = [
            (group, name)
            for found, name in zip(recordings, _names_of(recordings, names))
            for group in found.groups.values()
        ]
        return cls([group for group, _ in named], [name for _, name in named], corpus)

    def answer(self, path: str, query: str = "") -> Answer:
        """The response to ``path?query``; a bad request gets a sentence.

        Args:
            path: an endpoint of docs/viewer-protocol.md.
            query: its parameters as a query string, ``layer=0&head=3``.
        """
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            return _sentence(404, f"there is no endpoint of that name; {_one_of(self._endpoints)}.")
        try:
            return endpoint(self, Parameters(query, self._shown))
        except (RequestError, UnsupportedError) as problem:
            return _sentence(400, str(problem))
        except RecordingError as problem:
            return _sentence(410, str(problem))

    def close(self) -> None:
        """Ends what is computed in the background."""
        self._maps.close()

    def _about(self, parameters: Parameters) -> Answer:
        parameters.done()
        named = zip(self.recordings, self.names)
        facts = [_facts.about(recording, name) for recording, name in named]
        return _json({"version": 1, "recordings": facts})

    def _tokens(self, parameters: Parameters) -> Answer:
        recording, side = self._shown[parameters.recording()], parameters.word("side", SIDES)
        parameters.done()
        return _json(recording.tokens if side == "key" else recording.query_tokens)

    def _words(self, parameters: Parameters) -> Answer:
        recording = parameters.recording()
        parameters.done()
        words = self._maps.words(recording)
        return _json({"key": words.starts.tolist(), "query": words.query_starts.tolist()})

    def _tile(self, parameters: Parameters) -> Answer:
        where = parameters.map()
        plane = parameters.word("plane", PLANES if where.effect is None else PLANES[:1])
        level = parameters.number("level", 32)
        rows, columns = (-(-count // (SIDE << level)) for count in parameters.counts)
        row, column = parameters.number("row", rows), parameters.number("column", columns)
        parameters.done()
        return _floats(*self._maps[where].tile(plane, level, row, column))

    def _row(self, parameters: Parameters) -> Answer:
        where, queries = parameters.map(), parameters.queries()
        parameters.done()
        return _floats(self._maps[where].mean_row(queries))

    def _column(self, parameters: Parameters) -> Answer:
        where, key = parameters.map(), parameters.key()
        parameters.done()
        return _floats(*self._maps[where].column(key))

    def _sums(self, parameters: Parameters) -> Answer:
        where = Where(*parameters.heads())
        parameters.done()
        return _floats(*self._maps.weights(where).sums())

    def _visible(self, parameters: Parameters) -> Answer:
        recording, layer, heads = parameters.heads()
        by_words = parameters.by_words()
        parameters.done()
        heads = (heads,) if isinstance(heads, int) else heads
        counts = [self._seen(recording, layer, head, by_words) for head in heads]
        return _floats(np.mean(counts, 0))

    def _seen(self, recording: int, layer: int, head: int, by_words: bool) -> np.ndarray:
        """The number of unmasked keys, or words, of each query of a head."""
        found = self._shown[recording]
        if not by_words:
            return _facts.visible(found.layers[layer], head)
        call, words = _facts.call_of(found.layers[layer], head), self._maps.words(recording)
        return seen_words(words, call)

    def _links(self, parameters: Parameters) -> Answer:
        where, n = parameters.map(), parameters.number("n", MAX_LINKS + 1)
        queries, keys = parameters.counts
        rows, columns = parameters.part("rows", queries), parameters.part("columns", keys)
        parameters.done()
        if rows is not None or columns is not None:
            rows, columns = rows or slice(0, queries), columns or slice(0, keys)
        head = self._maps[where]
        links, coverage = head.links(n, rows, columns)
        found = [[int(query), int(key), _told_number(weight)] for query, key, weight in links]
        fewest = head.fewest if rows is None else 0
        return _json({"links": found, "fewest": fewest, "coverage": coverage}, coverage)

    def _head_facts(self, parameters: Parameters) -> Answer:
        recording, layer, effect = parameters.recording(), parameters.layer(), parameters.effect()
        parameters.done()
        if effect is not None:
            return self._effect_pictures(recording, layer, effect)
        facts = self._heads[recording].of(layer)
        return _json(facts, facts["coverage"])

    def _effect_pictures(self, recording: int, layer: int, effect: EffectKind) -> Answer:
        where = recording, layer, effect
        with self._thumbnails_lock:
            if where not in self._thumbnails:
                found, coverage = thumbnails(self._shown[recording], layer, effect)
                packed = {"thumbnails": packed_text(found), "coverage": coverage}
                self._thumbnails[where] = {"size": SIZE, **packed, "settled": True}
            kept = self._thumbnails[where]
        return _json(kept, kept["coverage"])

    def _roles(self, parameters: Parameters) -> Answer:
        recording = parameters.recording()
        parameters.done()
        return _json(self._heads[recording].roles())

    def _pair(self, parameters: Parameters) -> Answer:
        recording, query, key = parameters.recording(), parameters.query(), parameters.key()
        effect, by_words = parameters.effect(), parameters.by_words()
        parameters.done()
        if effect is not None:
            return _floats(pair_effects(self._shown[recording], effect, query, key))
        if by_words:
            return _floats(pair_of_words(self._maps.words(recording), query, key))
        return _floats(_facts.pair(self._shown[recording], query, key))

    def _effects(self, parameters: Parameters) -> Answer:
        recording, effect = parameters.recording(), parameters.needed_effect()
        parameters.done()
        with self._largest_lock:
            if (recording, effect) not in self._largest:
                found = largest_effects(self._shown[recording], effect)
                self._largest[recording, effect] = found
        return _json({"largest": self._largest[recording, effect]})

    def _alignment(self, parameters: Parameters) -> Answer:
        recording, other = parameters.recording(), parameters.other()
        parameters.done()
        count = len(self.recordings)
        return _json(self._alignments[recording % count, other % count]._asdict())

    def _change(self, parameters: Parameters) -> Answer:
        recording, layer, other = parameters.recording(), parameters.layer(), parameters.other()
        parameters.done()
        facts = self._differences.change(recording, layer, other)
        return _json(facts, facts["coverage"])

    def _changed(self, parameters: Parameters) -> Answer:
        one, other = parameters.head(), parameters.other_head()
        n = parameters.number("n", MAX_LINKS + 1)
        parameters.done()
        facts = self._differences.pairs(Place(*one), Place(*other), n)
        return _json(facts, facts["coverage"])

    def _written_out(self, parameters: Parameters) -> Answer:
        recording, layer, head = parameters.head()
        tokens = self._shown[recording].tokens, self._shown[recording].query_tokens
        queries = parameters.numbers("queries", len(tokens[1]), MAX_STEPS)
        keys = parameters.numbers("keys", len(tokens[0]), MAX_STEPS)
        parameters.done()
        found = self._shown[recording].layers[layer]
        found.require_vectors("steps")
        return _json(_steps.steps(found, head, queries, keys))

    _endpoints: ClassVar[dict[str, Callable[[Answers, Parameters], Answer]]] = {
        "about": _about,
        "tokens": _tokens,
        "words": _words,
        "tile": _tile,
        "row": _row,
        "column": _column,
        "sums": _sums,
        "visible": _visible,
        "links": _links,
        "heads": _head_facts,
        "roles": _roles,
        "pair": _pair,
        "effects": _effects,
        "alignment": _alignment,
        "change": _change,
        "changed": _changed,
        "steps": _written_out,
    }


class Parameters:
    """The parameters of one request, each taken once and checked where it is taken."""

    def __init__(self, query: str, recordings: Sequence[Recording]) -> None:
        if len(query) > MAX_QUERY_LENGTH:
            raise RequestError(
                f"the query string is longer than {MAX_QUERY_LENGTH} characters;"
                " send a shorter one."
            )
        pairs = parse_qsl(query, keep_blank_values=True)
        self._left = dict(pairs)
        if len(self._left) < len(pairs):
            twice = next(name for n, (name, _) in enumerate(pairs) if name in dict(pairs[:n]))
            raise RequestError(f"{_quoted(twice)} is given twice; give it once.")
        self._recordings = recordings  # as they are, then without their first tokens
        self._recording = 0
        self._layer = 0
        self._on: int | None = None

    def done(self) -> None:
        """Refuses whatever was not taken."""
        if self._left:
            raise RequestError(
                f"{_quoted(next(iter(self._left)))} is not a parameter of this endpoint."
            )

    def recording(self) -> int:
        """The number of a recording, by default the first; of it without its first token."""
        count = len(self._recordings) // 2
        if "recording" in self._left:
            self._recording = self.number("recording", count)
        if "first" in self._left and self.word("first", FIRST) == "hidden":
            self._recording += count
        return self._recording

    def layer(self) -> int:
        """A layer of the recording that was taken."""
        self._layer = self.number("layer", len(self._found.layers))
        return self._layer

    def head(self) -> tuple[int, int, int]:
        """Recording, layer and head."""
        recording, layer = self.recording(), self.layer()
        return recording, layer, self.number("head", self._found.layers[layer].heads)

    def map(self) -> Where:
        """A head or several, on the tokens of another recording, or where these have counterparts.

        Only one head is compared so.
        """
        recording, layer, head = self.heads()
        if (effect := self.effect()) is not None:
            return Where(recording, layer, head, effect=effect)
        count = len(self._recordings) // 2
        self._on = self.number("on", count) if "on" in self._left else None
        against = self.number("against", count) if "against" in self._left else None
        if self._on is not None and against is not None:
            raise RequestError("on and against are two ways to compare; give one of them.")
        if isinstance(head, tuple) and (self._on is not None or against is not None):
            raise RequestError("on and against compare one head; give head in place of heads.")
        by_words = self.by_words()
        if by_words and (self._on is not None or against is not None):
            raise RequestError("on and against compare tokens; leave unit=word out.")
        return Where(recording, layer, head, self._on, against, by_words)

    def effect(self) -> EffectKind | None:
        """The kind of effects, where these are wanted in place of weights."""
        return self.needed_effect() if "effect" in self._left else None

    def needed_effect(self) -> EffectKind:
        """The kind of effects that are wanted."""
        found = self.word("effect", tuple(KINDS))
        if self._recording >= len(self._recordings) // 2:
            raise RequestError("effects are of the pass as it was; leave first=hidden out.")
        if other := [name for name in ("on", "against", "unit") if name in self._left]:
            raise RequestError(f"effects are of a head's own tokens; leave {other[0]} out.")
        return found

    def by_words(self) -> bool:
        """Whether weights of words are asked for."""
        return "unit" in self._left and self.word("unit", UNITS) == "word"

    def other(self) -> int:
        """The number of the recording to compare with, as that of the recording that was taken."""
        count = len(self._recordings) // 2
        return self.number("with", count) + self._recording // count * count

    def other_head(self) -> tuple[int, int, int]:
        """Recording, layer and head to compare with."""
        other = self.other()
        layers = self._recordings[other].layers
        layer = self.number("with_layer", len(layers))
        return other, layer, self.number("with_head", layers[layer].heads)

    @property
    def counts(self) -> tuple[int, int]:
        """Queries and keys of the recording that positions are of."""
        found = self._found if self._on is None else self._recordings[self._on]
        return len(found.query_tokens), len(found.tokens)

    def heads(self) -> tuple[int, int, int | tuple[int, ...]]:
        """Recording, layer, and the head, or those of ``heads`` in place of ``head``."""
        if "heads" not in self._left:
            return self.head()
        recording, layer = self.recording(), self.layer()
        count = self._found.layers[layer].heads
        return recording, layer, tuple(sorted(set(self.numbers("heads", count, count))))

    def queries(self) -> list[slice]:
        """The query, or the parts ``a-b`` of ``queries`` in its place."""
        count, _ = self.counts
        if "queries" not in self._left:
            query = self.query()
            return [slice(query, query + 1)]
        texts = self._text("queries").split(",")
        parts = sorted((_part("queries", text, count) for text in texts), key=lambda p: p.start)
        for before, after in pairwise(parts):
            if before.stop > after.start:
                raise RequestError(f"queries has {after.start} twice; give each query once.")
        return parts

    def query(self) -> int:
        """The position of a query in the recording that was taken."""
        return self.number("query", self.counts[0])

    def key(self) -> int:
        """The position of a key in the recording that was taken."""
        return self.number("key", self.counts[1])

    @property
    def _found(self) -> Recording:
        return self._recordings[self._recording]

    def number(self, name: str, count: int) -> int:
        """An integer from 0 to ``count − 1``."""
        return _number_below(name, self._text(name), count)

    def numbers(self, name: str, count: int, most: int) -> list[int]:
        """One to ``most`` integers from 0 to ``count − 1``, with commas between them."""
        parts = self._text(name).split(",")
        if len(parts) > most:
            raise RequestError(f"{name} are {len(parts)}; request at most {most} at a time.")
        return [_number_below(name, part, count) for part in parts]

    def part(self, name: str, count: int) -> slice | None:
        """``a-b``, the positions a to b − 1 of ``count``; None where it is not given."""
        return _part(name, self._text(name), count) if name in self._left else None

    def word(self, name: str, known: Sequence[WordT]) -> WordT:
        """One of the words that are known."""
        text = self._text(name)
        for word in known:
            if word == text:
                return word
        raise RequestError(f"{name} is {_quoted(text)}; {_one_of(known)}.")

    def _text(self, name: str) -> str:
        if name not in self._left:
            raise RequestError(f"{name} is missing; this endpoint needs it.")
        return self._left.pop(name)


def _names_of(recordings: Sequence[Any], names: Sequence[str] | None) -> tuple[str, ...]:
    """A name for each recording; raises as ``Answers``."""
    for found in recordings:
        if not isinstance(found, Recording):
            raise TypeError(
                f"viewer: {a_type(found)} is no Recording; Recording.load(path) reads one"
                " from a file, and Recording(tokens, [weights.layer()]) is one of weights."
            )
    if isinstance(names, str):
        raise TypeError(f"viewer: names is one text, {names!r}; a list is needed: [{names!r}].")
    if names is None:
        return tuple(found.model for found in recordings)
    names = list(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"viewer: names has {name!r}; a text is needed for each recording.")
    if len(names) != len(recordings):
        raise ValueError(
            f"viewer: {counted(len(names), 'name')} for {counted(len(recordings), 'recording')};"
            " one for each is needed."
        )
    return tuple(names)


def _part(name: str, text: str, count: int) -> slice:
    found = PART.fullmatch(text)
    low, high = (int(side) for side in found.groups()) if found else (0, 0)
    if not low < high <= count:
        raise RequestError(
            f"{name} is {_quoted(text)}; a-b is needed, with 0 ≤ a < b ≤ {count}, as in 0-{count}."
        )
    return slice(low, high)


def _number_below(name: str, text: str, count: int) -> int:
    if not INTEGER.fullmatch(text):
        raise RequestError(f"{name} is {_quoted(text)}; a decimal integer is needed.")
    number = int(text)
    if number >= count:
        there = "is 1, number 0" if count == 1 else f"are {count}, 0 to {count - 1}"
        raise RequestError(f"{name} is {number}; there {there}.")
    return number


def _one_of(names: Any) -> str:
    return f"there are {', '.join(names)}"


def _quoted(text: str) -> str:
    """At most 40 characters, escaped: input is shown, never interpreted."""
    shown = ascii(text)
    return shown if len(shown) <= 40 else f"{shown[:36]}...'"


def _sentence(status: int, text: str) -> Answer:
    return Answer(status, TEXT, text.encode())


def _json(value: Any, coverage: float = 1.0) -> Answer:
    # Escaped, so that unpaired surrogates survive; no NaN, which is no JSON.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Answer(200, JSON, text.encode("ascii"), coverage)


def _floats(values: np.ndarray, coverage: float = 1.0) -> Answer:
    return Answer(200, FLOATS, np.ascontiguousarray(values, "<f4").tobytes(), coverage)


def _told_number(x: float) -> float | str:
    """``"NaN"`` for what JSON has no number for."""
    return float(f"{x:.9g}") if np.isfinite(x) else "NaN"
