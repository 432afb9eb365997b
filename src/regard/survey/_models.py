"""What reads the documents of a survey: a model of regard's own, or one of transformers."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from regard.lm import LanguageModel
from regard.recording import Layer, Recording
from regard.survey._corpus import Document as Read
from regard.survey._measure import Document
from regard.survey._sums import HeadSums

NO_MODEL = "recordings"
BUILTIN = "builtin"
FIRST_CHARACTERS = 16  # of a token: as much of a long document is read at first
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SLACK = 64  # tokens at the end of a part, which may not be those of the whole document

Measured = tuple[int, tuple[int, ...], dict[str, Any]]


class Reader(Protocol):
    """A model with its tokenizer.

    Attributes:
        sha256: of the weights and of the tokenizer.
        longest: the most tokens that it reads; None where there is no limit.
        unseen: names of modules whose attention cannot be seen.
    """

    @property
    def sha256(self) -> tuple[str, str]: ...
    @property
    def longest(self) -> int | None: ...
    @property
    def unseen(self) -> Sequence[str]: ...

    def encode(self, text: str, most: int) -> tuple[list[int], bool]:
        """Ids of the first tokens of a text, and whether there are more."""

    def tokens(self, ids: list[int]) -> list[str]:
        """The text of each."""

    def run(self, ids: list[int], on_layer: Callable[[Layer[Any]], object]) -> None:
        """Reads ids, and gives each layer as it is computed."""


class Own:
    """A ``LanguageModel``; attributes as of ``Reader``."""

    longest = None
    unseen = ()

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    @functools.cached_property
    def sha256(self) -> tuple[str, str]:
        weights = hashlib.sha256(repr(self.model.config).encode())
        for name, x in sorted(self.model.weights.items()):
            weights.update(f"{name} {x.shape}\n".encode())
            weights.update(x.tobytes())
        tokenizer = self.model.tokenizer
        written = b"".join(
            len(own).to_bytes(4, "little") + own
            for own in map(tokenizer.bytes, range(len(tokenizer)))
        )
        return weights.hexdigest(), hashlib.sha256(written).hexdigest()

    def encode(self, text: str, most: int) -> tuple[list[int], bool]:
        ids = self.model.tokenizer.encode(text, bos=True)
        return ids[:most], len(ids) > most

    def tokens(self, ids: list[int]) -> list[str]:
        return self.model.tokenizer.tokens(ids)

    def run(self, ids: list[int], on_layer: Callable[[Layer[Any]], object]) -> None:
        self.model.hidden(ids, record=on_layer)


def is_own(name: str) -> bool:
    """Whether a name is of a model of regard's own, and not of one of transformers."""
    config = Path(name) / "config.json"
    if config.is_file():
        return b'"model_type"' not in config.read_bytes()
    return name == BUILTIN or Path(name).exists() or not HUB_NAME.fullmatch(name)


@functools.lru_cache(maxsize=1)  # one process surveys with one model, shard after shard
def load(name: str, trust_remote_code: bool = False) -> Reader:
    """The model of a name: ``builtin``, a folder, or one of Hugging Face.

    Raises:
        FileNotFoundError, ValueError, UnsupportedError: no such model, or one that cannot be read.
    """
    if is_own(name):
        return Own(LanguageModel.load(name))
    from regard.hf._stream import Stream

    return Stream(name, trust_remote_code=trust_remote_code)


def first_ids(reader: Reader, text: str, most: int) -> tuple[list[int], bool]:
    """As ``Reader.encode``; of a long document no more is tokenized than is needed.

    Two tokenizers' ids of a part are those of the whole, but at the end of the part.
    """
    part = FIRST_CHARACTERS * most
    while part < len(text):
        ids, over = reader.encode(text[:part], most + SLACK)
        if over or len(ids) == most + SLACK:
            return reader.encode(text[:part], most)[0], True
        part *= 2
    return reader.encode(text, most)


def of_text(
    reader: Reader, read: Read, max_tokens: int, every: int
) -> tuple[HeadSums | None, bool]:
    """Sums of a text, None of one without a token, and whether it was cut; layer by layer."""
    ids, cut = first_ids(reader, read.text or "", max_tokens)
    if not ids:
        return None, False
    tokens = tuple(reader.tokens(ids))
    document = Document(tokens, len(ids), True, every)
    layers: list[Measured] = []

    def measure(layer: Layer[Any]) -> None:
        number = len(layers) if layer.number is None else layer.number
        weights = Recording([*tokens], [layer]).weights
        layers.append((number, layer.head_numbers, document.measured(next(iter(weights)))))

    reader.run(ids, measure)
    return HeadSums._of_document(read.number, tokens, layers), cut


def of_recording(read: Read, every: int) -> HeadSums:
    """Sums of a recording, of its first group."""
    assert read.recording is not None
    recording = read.recording
    queries, places = len(recording.query_tokens), recording.query_tokens == recording.tokens
    document = Document(recording.tokens, queries, places, every)

    def layers() -> Iterator[Measured]:
        for number, weights in zip(recording.layer_numbers, recording.weights):
            yield number, weights.head_numbers, document.measured(weights)

    return HeadSums._of_document(read.number, recording.tokens, layers())


_LOCK = threading.Lock()


def loaded(name: str, trust_remote_code: bool) -> Reader:
    """As ``load``, once for all threads of a process."""
    with _LOCK:
        return load(name, trust_remote_code)
