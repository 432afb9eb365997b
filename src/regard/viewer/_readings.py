"""The texts that are typed in the page: each is read by the model, and kept under an id.

One text is read at a time, and a later one ends it: at the model's next layer, or, where the model
cannot be ended, by dropping its result.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import parse_qsl, urlencode

import numpy as np

from regard.recording import Layer, Recording
from regard.viewer import _facts
from regard.viewer._heads import Corpus
from regard.viewer.answer import (
    MAX_QUERY_LENGTH,
    Answer,
    Answers,
    Parameters,
    RequestError,
    _json,
    _sentence,
)

if TYPE_CHECKING:
    from regard.lm import LanguageModel

MAX_CHARACTERS = 2000  # so few that each pause in typing can be followed by a reading
MAX_BODY_BYTES = 16 * MAX_CHARACTERS  # of JSON, where a character takes up to 12
MAX_KEPT = 4  # texts, beside the first
LIKELIEST = 10
LONGEST_NAME = 60

NextTokens = list[tuple[str, float]]


class Read(NamedTuple):
    """What a model made of a text.

    Attributes:
        recording: of its forward pass.
        next_tokens: the ten likeliest tokens after a query, with their probabilities; None for a
            model that predicts none.
    """

    recording: Recording[Any]
    next_tokens: Callable[[int], NextTokens] | None


# Reads a text, and calls its second argument now and then, which raises to end it.
Reader = Callable[[str, Callable[[], None]], Read]


class SupersededError(Exception):
    """A later text is to be read."""


class Reading(Answers):
    """Answers about one text: those about its recording, and the model's next tokens.

    Equal texts have equal ids, and no other text has that id.
    """

    def __init__(self, text: str, name: str, read: Read, corpus: Corpus | None = None) -> None:
        groups = list(read.recording.groups.values())
        super().__init__(groups, [name] * len(groups), corpus)
        self.text, self.id = text, id_of(text)
        self.recording = read.recording
        self._next_tokens = read.next_tokens

    def _about(self, parameters: Parameters) -> Answer:
        parameters.done()
        facts = [_facts.about(found, name) for found, name in zip(self.recordings, self.names)]
        return _about(facts, self.id, self.text, self._next_tokens is not None)

    def _next(self, parameters: Parameters) -> Answer:
        query = parameters.query()
        parameters.done()
        if self._next_tokens is None:
            raise RequestError("this model predicts no next token.")
        found = self._next_tokens(query)
        return _json({"next": [[token, float(f"{p:.9g}")] for token, p in found]})

    _endpoints: ClassVar[dict[str, Callable[[Any, Parameters], Answer]]] = {
        **Answers._endpoints,
        "about": _about,
        "next": _next,
    }


class Readings:
    """Answers about the texts of one viewer.

    Args:
        reader: reads a text; ``reader_of`` makes one of a model.
        text: the one that the page opens with; an empty one opens an empty page.
        name: what people call that text, by default its beginning.
        corpus: as of ``Answers``.

    Raises:
        ValueError: the model cannot read that text.
    """

    def __init__(
        self,
        reader: Reader,
        text: str = "",
        name: str | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        self._reader, self._corpus = reader, corpus
        self._lock = threading.Lock()  # of what is kept, and of its order
        self._kept: OrderedDict[str, Reading] = OrderedDict()  # the latest used last
        self._latest = 0
        self._model = threading.Lock()  # held while it reads
        self.first: Reading | None = None
        if text:
            read = reader(text, lambda: None)
            self.first = Reading(text, short_name(text) if name is None else name, read, corpus)

    def answer(self, path: str, query: str = "") -> Answer:
        """As ``Answers.answer``, about the text with the id ``reading``, by default the first."""
        reading, others = _reading_of(query)
        found = self._find(reading) if reading else self.first
        if found is not None:
            return found.answer(path, others)
        if reading:
            return _sentence(
                410, "This text is no longer kept: press Enter in the input to read it again."
            )
        if path == "about":
            return _about([], None, "", False)
        return _sentence(400, "no text is read yet.")

    def read(self, body: bytes) -> Answer:
        """Reads the text of ``{"text": …}``, and tells about it as ``about`` does.

        Status 400 and 413 with a sentence for a text that cannot be read, and 409 where a later one
        came meanwhile.
        """
        text = _text_of(body)
        if text is None:
            return _sentence(400, 'The body is not {"text": "…"} in JSON.')
        if len(text) > MAX_CHARACTERS:
            return _sentence(413, too_long(f"{len(text):,}"))
        if problem := _problem(text):
            return _sentence(400, problem)
        try:
            return self._of(text).answer("about")
        except SupersededError:
            return _sentence(409, "A later text was typed, perhaps in another window.")
        except ValueError as error:
            return _sentence(400, " ".join(str(error).split()))

    def close(self) -> None:
        """Ends what is computed in the background."""
        with self._lock:
            self._latest += 1
            found = [*self._kept.values()]
        for reading in [self.first, *found]:
            if reading is not None:
                reading.close()

    def _find(self, id: str) -> Reading | None:
        if self.first is not None and id == self.first.id:
            return self.first
        with self._lock:
            if id in self._kept:
                self._kept.move_to_end(id)
            return self._kept.get(id)

    def _of(self, text: str) -> Reading:
        """The reading of a text, made unless it is kept."""
        with self._lock:
            self._latest += 1
            mine = self._latest

        def go_on() -> None:
            if mine != self._latest:
                raise SupersededError

        if known := self._find(id_of(text)):
            return known
        with self._model:
            go_on()
            read = self._reader(text, go_on)
            made = Reading(text, short_name(text), read, self._corpus)
            go_on()
            self._keep(made)
        return made

    def _keep(self, made: Reading) -> None:
        with self._lock:
            self._kept[made.id] = made
            count = len(self._kept) - MAX_KEPT
            dropped = [self._kept.popitem(last=False)[1] for _ in range(count)]
        for reading in dropped:
            reading.close()


def reader_of(model: LanguageModel) -> Reader:
    """Reads texts with a model of regard's own; ends between its layers."""

    def read(text: str, go_on: Callable[[], None]) -> Read:
        layers: list[Layer[Any]] = []

        def record(layer: Layer[Any]) -> None:
            go_on()
            layers.append(layer)

        ids = model.tokenizer.encode(text, bos=True)
        hidden = model.hidden(ids, record=record)

        def next_tokens(query: int) -> NextTokens:
            found, probabilities = likeliest(model.logits(hidden[query]))
            return list(zip(model.tokenizer.tokens(found), probabilities))

        recording = Recording(model.tokenizer.tokens(ids), layers, model=model.name)
        return Read(recording, next_tokens)

    return read


def transformers_reader(name: str, *, trust_remote_code: bool = False) -> Reader:
    """Reads texts with a model of transformers, which cannot be ended; as ``regard.hf.load``.

    Raises:
        FileNotFoundError, ValueError: as ``regard.hf.load``.
    """
    from regard.hf._load import Reader
    from regard.hf._tokens import texts

    model = Reader(name, predicts=True, trust_remote_code=trust_remote_code)

    def read(text: str, _: Callable[[], None]) -> Read:
        recording, logits = model.read(text)
        if logits is None:
            return Read(recording, None)

        def next_tokens(query: int) -> NextTokens:
            found, probabilities = likeliest(logits[query].double().numpy(force=True))
            return list(zip(texts(model.tokenizer, found), probabilities))

        return Read(recording, next_tokens)

    return read


def likeliest(logits: np.ndarray) -> tuple[list[int], list[float]]:
    """The ids of the ten largest of one row of logits, largest first, and their softmax."""
    exact = logits.astype(np.float64)
    exponentials = np.exp(exact - exact.max())
    ids = np.argsort(-exact, kind="stable")[:LIKELIEST]
    return ids.tolist(), (exponentials[ids] / exponentials.sum()).tolist()


def short_name(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_NAME else f"{line[: LONGEST_NAME - 1]}…"


def too_long(count: str) -> str:
    """What is said of a text of so many characters."""
    return (
        f"The text has {count} characters; the page reads at most {MAX_CHARACTERS:,}."
        " Save it as a file, and open that with regard view FILE."
    )


def id_of(text: str) -> str:
    """The id of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _about(facts: list[dict[str, Any]], id: str | None, text: str, has_next: bool) -> Answer:
    typed = {"reading": id, "text": text, "next": has_next, "characters": MAX_CHARACTERS}
    return _json({"version": 1, "recordings": facts, "typed": typed})


def _text_of(body: bytes) -> str | None:
    try:
        text = json.loads(body)["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return text if isinstance(text, str) else None


def _problem(text: str) -> str:
    """Why no model can read a text; nothing where one may."""
    if not text.strip():
        return "The text is empty; at least one letter or sign is needed."
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"Character {error.start + 1} is half of a surrogate pair, which stands for nothing;"
            " delete it."
        )
    return ""


def _reading_of(query: str) -> tuple[str, str]:
    """The parameter ``reading``, or nothing, and the query string without it."""
    pairs = parse_qsl(query[: MAX_QUERY_LENGTH + 1], keep_blank_values=True)
    found = [value for name, value in pairs if name == "reading"]
    if not found:
        return "", query
    return found[0], urlencode([pair for pair in pairs if pair[0] != "reading"])
