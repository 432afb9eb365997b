"""Texts to train on: files read as UTF-8, some of them held out, and batches drawn from them."""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from regard._base.files import read_file
from regard._base.settings import counted
from regard.lm.tokenizer import BytePairTokenizer

if TYPE_CHECKING:
    from regard._base.types import UInt16

LIMIT_BYTES = 1_000_000_000  # of one file
# Tests and generated tables teach a model nothing about the language.
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib2to3"}
TOPICS = "pydoc_data/topics.py"


def read_texts(files: Iterable[str | Path]) -> dict[str, str]:
    """The text of each file, by its path as given, in order; without a byte order mark.

    Raises:
        FileNotFoundError: a file that is not there.
        TypeError: one name instead of a list.
        ValueError: a pipe or device, a file that is not UTF-8, has a zero byte or is above the
            limit, or no file that holds any text.
    """
    if isinstance(files, (str, bytes, os.PathLike)):
        raise TypeError(f"read_texts: files is {files!r}, one name; a list is needed: [{files!r}].")
    texts = {}
    for file in files:
        try:
            data = read_file(file, LIMIT_BYTES, "Cut it into several files.")
            texts[str(file)] = data.decode().removeprefix("\ufeff")
            if (place := data.find(b"\0")) >= 0:  # of UTF-16, or of no text at all
                raise ValueError(
                    f"{file}: not a text; byte {place} is zero. Leave the file out, or convert it."
                )
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file}: not a text; byte {error.start} is no UTF-8. "
                "Leave the file out, or convert it."
            ) from error
    if not any(texts.values()):
        raise ValueError("No text to train on: name at least one file that is not empty.")
    return texts


def standard_library() -> dict[str, str]:
    """Source and documentation of this Python, by path relative to its library folder.

    Without tests and generated tables. The documentation's topics are texts of their own.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.as_posix() for path in sorted(_sources(root))]
    texts = read_texts(root / name for name in names)
    library = dict(zip(names, texts.values()))
    return library | dict(_topics(library.pop(TOPICS, "")))


def _sources(root: Path) -> Iterator[Path]:
    """Files of Python relative to the folder; those left out, which may be many, are not listed."""
    for above, folders, files in os.walk(root):
        folders[:] = set(folders) - LEFT_OUT
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigd"):
                yield Path(above, name).relative_to(root)


def _topics(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                yield f"{TOPICS}/{name}", text


def is_held_out(name: str, share: float = 0.05) -> bool:
    """Whether the text of this name is kept from training: by its hash, so the choice is fixed."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < share * 2**32


def encode_texts(
    texts: Mapping[str, str], tokenizer: BytePairTokenizer
) -> UInt16[np.ndarray, " tokens"]:
    """All texts one after the other, BOS before each."""
    ids = [i for text in texts.values() for i in tokenizer.encode(text, bos=True)]
    return np.array(ids, dtype=np.uint16)


class Batches:
    """Batch number ``step`` of a run: a pure function of the corpus, the seed and the step.

    Every epoch cuts the corpus into pieces of ``length`` at another offset and shuffles them.

    Args:
        ids: ``(tokens,)``, the corpus.
        bos: goes before each piece.
        size: pieces per batch.
        length: tokens per piece.
        repeats: pieces of every batch that say their first tokens, 16 to half a piece of them, over
            and over: what a model learns to look for earlier occurrences from.
    """

    def __init__(
        self,
        ids: UInt16[np.ndarray, " tokens"],
        bos: int,
        *,
        size: int,
        length: int,
        repeats: int = 0,
        seed: int = 0,
    ) -> None:
        self.ids, self.bos, self.size, self.length = ids, bos, size, length
        self.repeats, self.seed = repeats, seed
        self.pieces = (len(ids) - length) // length
        if self.pieces < 1:
            raise ValueError(
                f"The corpus is too short: {counted(len(ids), 'token')}, and pieces of {length}"
                f" need {2 * length}. Give more text, or a smaller length."
            )
        self._epoch, self._starts = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, step: int) -> UInt16[np.ndarray, "size length_and_1"]:
        """``(size, 1 + length)``: in each row BOS and a piece."""
        numbers = range(step * self.size, (step + 1) * self.size)
        starts = [self._start(*divmod(n, self.pieces)) for n in numbers]
        rows = np.stack([self.ids[start : start + self.length] for start in starts])
        random = np.random.default_rng([self.seed, 0, step])
        for row in rows[self.size - self.repeats :]:
            row[:] = np.resize(row[: random.integers(16, self.length // 2 + 1)], self.length)
        return np.pad(rows, ((0, 0), (1, 0)), constant_values=self.bos)

    def _start(self, epoch: int, n: int) -> int:
        if epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            offset = random.integers(len(self.ids) - self.pieces * self.length + 1)
            self._starts = offset + self.length * random.permutation(self.pieces)
            self._epoch = epoch
        return int(self._starts[n])
