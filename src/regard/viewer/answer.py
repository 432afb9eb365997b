"""What the viewer's page asks of recordings, answered by one function that touches nothing else.

docs/viewer-protocol.md lists the questions; the server, a notebook and the tests ask them here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import numpy as np

from regard._base.errors import RecordingError
from regard._base.types import PoolHow
from regard.recording import Recording
from regard.viewer import _facts, _steps
from regard.viewer._heads import Heads
from regard.viewer._maps import Maps

__all__ = ["Answer", "Answers"]

JSON = "application/json"
FLOATS = "application/octet-stream"
TEXT = "text/plain; charset=utf-8"
SIDE = 256  # bins of a tile
MOST_LINKS = 512
MOST_STEPS = 64  # queries, and keys
LONGEST_QUERY = 4096
# One more than the largest position, 2**53, has digits.
INTEGER = re.compile(r"[0-9]{1,16}")
PART = re.compile(r"([0-9]{1,16})-([0-9]{1,16})")
PLANES: tuple[PoolHow, ...] = ("max", "mass")
SIDES = ("key", "query")
WordT = TypeVar("WordT", bound=str)


class Answer(NamedTuple):
    """What a question gets.

    Attributes:
        status: as HTTP has it: 200, 400 for a question that makes no sense, 404 for none, 410 where
            the file that is asked about was cut.
        media_type: of the body.
        body: numbers as float32, JSON in UTF-8, or one sentence that says what is wrong.
        coverage: the part of the rows that it has read, 0 to 1.
    """

    status: int
    media_type: str
    body: bytes
    coverage: float = 1.0


class QueryError(ValueError):
    """A question that cannot be answered; the message says why."""


class Answers:
    """Answers about one recording, or about several side by side.

    May be asked from several threads at once. ``close`` ends what it does in the background.

    Args:
        recordings: at least one.
        names: what people call them; by default the names of their models.

    Raises:
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
        self, recordings: Sequence[Recording[Any]], names: Sequence[str] | None = None
    ) -> None:
        self.recordings = tuple(recordings)
        if not self.recordings:
            raise ValueError("viewer: there is no recording to show; give at least one.")
        names = [found.model for found in self.recordings] if names is None else list(names)
        if len(names) != len(self.recordings):
            raise ValueError(
                f"viewer: {len(names)} names for {len(self.recordings)} recordings;"
                " one for each is needed."
            )
        for name, found in zip(names, self.recordings):
            if not found.query_tokens:
                raise ValueError(f"viewer: {name or 'the recording'} has no queries to show.")
        self.names = tuple(names)
        self._maps = Maps(self.recordings)
        self._heads = [Heads(found) for found in self.recordings]

    def answer(self, path: str, query: str = "") -> Answer:
        """The answer to ``path?query``; a question that makes no sense gets a sentence.

        Args:
            path: one of those that docs/viewer-protocol.md lists.
            query: its parameters as in an address, ``layer=0&head=3``.
        """
        ask = self._questions.get(path)
        if ask is None:
            return _sentence(404, f"there is no question of that name; {_one_of(self._questions)}.")
        try:
            return ask(self, Parameters(query, self.recordings))
        except QueryError as problem:
            return _sentence(400, str(problem))
        except RecordingError as problem:
            return _sentence(410, str(problem))

    def close(self) -> None:
        """Ends what is computed in the background."""
        self._maps.close()

    def _about(self, asked: Parameters) -> Answer:
        asked.done()
        named = zip(self.recordings, self.names)
        facts = [_facts.about(recording, name) for recording, name in named]
        return _json({"version": 1, "recordings": facts})

    def _tokens(self, asked: Parameters) -> Answer:
        recording, side = self.recordings[asked.recording()], asked.word("side", SIDES)
        asked.done()
        return _json(recording.tokens if side == "key" else recording.query_tokens)

    def _tile(self, asked: Parameters) -> Answer:
        where = asked.head()
        plane, level = asked.word("plane", PLANES), asked.number("level", 32)
        recording = self.recordings[where[0]]
        counts = len(recording.query_tokens), len(recording.tokens)
        rows, columns = (-(-count // (SIDE << level)) for count in counts)
        row, column = asked.number("row", rows), asked.number("column", columns)
        asked.done()
        return _floats(*self._maps[where].tile(plane, level, row, column))

    def _row(self, asked: Parameters) -> Answer:
        where, query = asked.head(), asked.query()
        asked.done()
        return _floats(self._maps[where].row(query))

    def _column(self, asked: Parameters) -> Answer:
        where, key = asked.head(), asked.key()
        asked.done()
        return _floats(*self._maps[where].column(key))

    def _visible(self, asked: Parameters) -> Answer:
        recording, layer, head = asked.head()
        asked.done()
        return _floats(_facts.visible(self.recordings[recording].layers[layer], head))

    def _links(self, asked: Parameters) -> Answer:
        where, n = asked.head(), asked.number("n", MOST_LINKS + 1)
        recording = self.recordings[where[0]]
        rows = asked.part("rows", len(recording.query_tokens))
        columns = asked.part("columns", len(recording.tokens))
        asked.done()
        if rows is not None or columns is not None:
            rows = rows or slice(0, len(recording.query_tokens))
            columns = columns or slice(0, len(recording.tokens))
        links, coverage = self._maps[where].links(n, rows, columns)
        found = [[int(query), int(key), _number(weight)] for query, key, weight in links]
        return _json({"links": found, "coverage": coverage}, coverage)

    def _head_facts(self, asked: Parameters) -> Answer:
        recording, layer = asked.recording(), asked.layer()
        asked.done()
        facts = self._heads[recording].of(layer)
        return _json(facts, facts["coverage"])

    def _pair(self, asked: Parameters) -> Answer:
        recording, query, key = asked.recording(), asked.query(), asked.key()
        asked.done()
        return _floats(_facts.pair(self.recordings[recording], query, key))

    def _written_out(self, asked: Parameters) -> Answer:
        recording, layer, head = asked.head()
        tokens = self.recordings[recording].tokens, self.recordings[recording].query_tokens
        queries = asked.numbers("queries", len(tokens[1]), MOST_STEPS)
        keys = asked.numbers("keys", len(tokens[0]), MOST_STEPS)
        asked.done()
        return _json(_steps.steps(self.recordings[recording].layers[layer], head, queries, keys))

    _questions: ClassVar[dict[str, Callable[[Answers, Parameters], Answer]]] = {
        "about": _about,
        "tokens": _tokens,
        "tile": _tile,
        "row": _row,
        "column": _column,
        "visible": _visible,
        "links": _links,
        "heads": _head_facts,
        "pair": _pair,
        "steps": _written_out,
    }


class Parameters:
    """The parameters of one question, each taken once and checked where it is taken."""

    def __init__(self, query: str, recordings: Sequence[Recording]) -> None:
        if len(query) > LONGEST_QUERY:
            raise QueryError(
                f"the question is longer than {LONGEST_QUERY} signs; ask a shorter one."
            )
        pairs = parse_qsl(query, keep_blank_values=True)
        self._left = dict(pairs)
        if len(self._left) < len(pairs):
            twice = next(name for n, (name, _) in enumerate(pairs) if name in dict(pairs[:n]))
            raise QueryError(f"{_quoted(twice)} is given twice; give it once.")
        self._recordings = recordings
        self._recording = 0
        self._layer = 0

    def done(self) -> None:
        """Refuses whatever was not taken."""
        if self._left:
            raise QueryError(f"{_quoted(next(iter(self._left)))} is no parameter of this question.")

    def recording(self) -> int:
        """The number of a recording, by default the first."""
        if "recording" in self._left:
            self._recording = self.number("recording", len(self._recordings))
        return self._recording

    def layer(self) -> int:
        """A layer of the recording that was taken."""
        self._layer = self.number("layer", len(self._found.layers))
        return self._layer

    def head(self) -> tuple[int, int, int]:
        """Recording, layer and head."""
        recording, layer = self.recording(), self.layer()
        return recording, layer, self.number("head", self._found.layers[layer].heads)

    def query(self) -> int:
        """The position of a query in the recording that was taken."""
        return self.number("query", len(self._found.query_tokens))

    def key(self) -> int:
        """The position of a key in the recording that was taken."""
        return self.number("key", len(self._found.tokens))

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
            raise QueryError(f"{name} are {len(parts)}; ask for at most {most} at a time.")
        return [_number_below(name, part, count) for part in parts]

    def part(self, name: str, count: int) -> slice | None:
        """``a-b``, the positions a to b − 1 of ``count``; None where it is not given."""
        if name not in self._left:
            return None
        text = self._text(name)
        found = PART.fullmatch(text)
        low, high = (int(side) for side in found.groups()) if found else (0, 0)
        if not low < high <= count:
            raise QueryError(
                f"{name} is {_quoted(text)}; a-b is needed, with 0 ≤ a < b ≤ {count}, as in"
                f" 0-{count}."
            )
        return slice(low, high)

    def word(self, name: str, known: Sequence[WordT]) -> WordT:
        """One of the words that are known."""
        text = self._text(name)
        for word in known:
            if word == text:
                return word
        raise QueryError(f"{name} is {_quoted(text)}; {_one_of(known)}.")

    def _text(self, name: str) -> str:
        if name not in self._left:
            raise QueryError(f"{name} is missing; this question needs it.")
        return self._left.pop(name)


def _number_below(name: str, text: str, count: int) -> int:
    if not INTEGER.fullmatch(text):
        raise QueryError(f"{name} is {_quoted(text)}; a decimal integer is needed.")
    number = int(text)
    if number >= count:
        there = "is 1, number 0" if count == 1 else f"are {count}, 0 to {count - 1}"
        raise QueryError(f"{name} is {number}; there {there}.")
    return number


def _one_of(names: Any) -> str:
    return f"there are {', '.join(names)}"


def _quoted(text: str) -> str:
    """At most 40 signs, escaped: what is asked is shown, never interpreted."""
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


def _number(x: float) -> float | None:
    return float(f"{x:.9g}") if np.isfinite(x) else None
