"""Text to token ids and back: whole words, or byte pairs that give any text back."""

from __future__ import annotations

import builtins
import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard._base.extras import needed_by
from regard._base.files import read_file, replaced_when_complete
from regard._base.settings import counted
from regard._call.checks import read_flag
from regard._weights.parts import int_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
SHOWN = 12  # words of a tokenizer's repr
MOST_IDS = 2**22  # memory for as many is taken at once; where there is none, the process ends
LONGEST_WORD = 1000  # characters: the merges of a word take the square of its length
NO_TOKENIZER = "Cannot instantiate Tokenizer from buffer: "  # how the library's errors begin
# The way out where a file of a model is damaged.
PUT_BACK = (
    "Put back the file that was saved with the model, or train the model anew; to have that of the"
    " built-in model back, install regard again: pip install --force-reinstall regard."
)
LONG_RUN = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}|(?<!\s)\s{{{LONGEST_WORD + 1},}}")


class WordTokenizer:
    """Lower-cased words split at white space, numbered as they first appear after BOS 0, EOS 1.

    Args:
        text: the words to know, in one text.

    Attributes:
        words: each id's, in order.

    Raises:
        TypeError: ``text`` is no str.
        ValueError: ``text`` holds no word.

    >>> words = WordTokenizer("How are you doing ?")
    >>> words.encode("you are doing", bos=True)
    [0, 4, 3, 5]
    >>> words.decode([4, 3, 5])
    'You are doing'
    >>> words
    WordTokenizer(7 ids: 0 'BOS', 1 'EOS', 2 'how', 3 'are', 4 'you', 5 'doing', 6 '?')
    """

    bos = 0
    eos = 1

    def __init__(self, text: str) -> None:
        words = dict.fromkeys(_split(text))
        if not words:
            raise ValueError("WordTokenizer: the text holds no word; give at least one to know.")
        self.words = ["BOS", "EOS", *words]
        self._ids = {word: i for i, word in enumerate(self.words) if i > self.eos}

    def __len__(self) -> int:
        """Number of ids, BOS and EOS included."""
        return len(self.words)

    def __repr__(self) -> str:
        shown = ", ".join(f"{i} {word!r}" for i, word in enumerate(self.words[:SHOWN]))
        more = f", … {len(self) - 1} {self.words[-1]!r}" if len(self) > SHOWN else ""
        return f"WordTokenizer({len(self)} ids: {shown}{more})"

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of the words of ``text``, between BOS and EOS where asked.

        Raises:
            TypeError: ``text`` is no str, or ``bos`` or ``eos`` no bool.
            ValueError: a word that is not in the vocabulary; names the nearest known ones.
        """
        bos, eos = (read_flag(*flag, "encode") for flag in (("bos", bos), ("eos", eos)))
        ids = [self._id(word) for word in _split(text)]
        return [self.bos] * bos + ids + [self.eos] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """The sentence, capitalised; BOS and EOS are left out.

        Raises:
            TypeError: an id that is no int.
            ValueError: an id outside the vocabulary.
        """
        found = [int_of("WordTokenizer: id", i) for i in ids]
        words = [self._word(i) for i in found if i not in (self.bos, self.eos)]
        return " ".join(words).capitalize()

    def _id(self, word: str) -> int:
        if word not in self._ids:
            near = difflib.get_close_matches(word, self._ids, n=3, cutoff=0.4)
            known = f"nearest known words: {', '.join(near)}" if near else "no known word is near"
            raise ValueError(
                f"WordTokenizer: unknown word {word!r}; {known}. "
                f"It knows the {counted(len(self._ids), 'word')} of the text that it was made from."
            )
        return self._ids[word]

    def _word(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise ValueError(
                f"WordTokenizer: id {i} is outside the vocabulary, 0 to {len(self) - 1}."
            )
        return self.words[i]


def _split(text: str) -> list[str]:
    require_text("WordTokenizer: the text", text)
    return text.lower().split()


def require_text(what: str, text: object) -> None:
    """Raises a TypeError where what is to be read is no text; ``what`` begins the message."""
    if not isinstance(text, str):
        decoded = " Decode it: text.decode()." if isinstance(text, bytes) else ""
        raise TypeError(f"{what} is of type {type(text).__name__}; a str is needed.{decoded}")


class BytePairTokenizer:
    """Byte-level byte pairs: any text, back byte for byte.

    The last id, ``bos``, marks where a text begins. It stands for no characters, so that no text
    can contain it.

    Args:
        tokenizer: of the ``tokenizers`` library, with a byte-level alphabet.

    Source: Sennrich 2016 (byte pairs); Radford 2019 (over bytes).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos = tokenizer.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BytePairTokenizer:
        """Merges the most frequent pairs of ``texts`` up to ``vocab_size`` ids, BOS included.

        Of a word of more than 1,000 characters no pair is merged across each thousandth.

        Raises:
            TypeError: one str instead of several, a text that is no str, or a size that is no int.
            ValueError: ``vocab_size`` leaves no room for the 256 bytes and BOS, or is above
                4,194,304; a lone surrogate, which stands for no bytes.
        """
        if isinstance(texts, str):  # whose characters would be texts
            raise TypeError(
                "BytePairTokenizer: texts is one str; a list of texts is needed: [text]."
            )
        vocab_size = int_of("BytePairTokenizer: vocab_size", vocab_size)
        if vocab_size <= BYTES:
            raise ValueError(
                f"BytePairTokenizer: vocab_size {vocab_size} is too small; "
                f"{BYTES} bytes and BOS need at least {BYTES + 1}."
            )
        if vocab_size > MOST_IDS:
            raise ValueError(
                f"BytePairTokenizer: vocab_size {vocab_size} is too large; at most "
                f"{MOST_IDS} ids are possible."
            )
        with needed_by("BytePairTokenizer"):
            from tokenizers import Tokenizer
            from tokenizers.decoders import ByteLevel as ByteLevelDecoder
            from tokenizers.models import BPE
            from tokenizers.pre_tokenizers import ByteLevel
            from tokenizers.trainers import BpeTrainer

        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        alphabet = sorted(ByteLevel.alphabet())
        trainer = BpeTrainer(
            vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((part for text in texts for part in _parts(text)), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | Path) -> BytePairTokenizer:
        """Reads a ``tokenizer.json``.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is no tokenizer.
        """
        with needed_by("BytePairTokenizer"):
            from tokenizers import Tokenizer

        text = read_file(path)
        try:
            found = cls(Tokenizer.from_buffer(text))
        except Exception as error:  # the library raises plain Exception
            raise _no_tokenizer(path, str(error).removeprefix(NO_TOKENIZER)) from error
        try:
            found._spelled  # noqa: B018
        except KeyError as error:
            reason = f"a token has the character {error}, which stands for no byte"
            raise _no_tokenizer(path, reason) from error
        return found

    def save(self, path: str | Path) -> None:
        """Writes a ``tokenizer.json``."""
        with replaced_when_complete(path) as file:
            file.write(self._tokenizer.to_str().encode())

    def __len__(self) -> int:
        """Number of ids, BOS included."""
        return self.bos + 1

    def __repr__(self) -> str:
        return f"BytePairTokenizer({len(self)} ids: {BYTES} bytes, merges of them, <bos>)"

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Ids of ``text``, after BOS where asked.

        Raises:
            TypeError: no str, or ``bos`` that is no bool.
            ValueError: a lone surrogate, which stands for no bytes.
        """
        _require_utf8(text)
        return [self.bos] * read_flag("bos", bos, "encode") + self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text without BOS; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.bytes(i) for i in ids).decode("utf-8", errors="replace")

    def bytes(self, i: int) -> builtins.bytes:
        """The bytes that id ``i`` stands for: none for BOS.

        Raises:
            TypeError: no int.
            ValueError: an id outside the vocabulary.
        """
        i = int_of("BytePairTokenizer: id", i)
        if not 0 <= i < len(self):
            raise ValueError(
                f"BytePairTokenizer: id {i} is outside the vocabulary, 0 to {self.bos}."
            )
        return self._spelled[i]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The label of each id: its text, or ``<bos>``.

        Bytes that are no whole character become ``\\xNN``.
        """
        return [
            "<bos>" if i == self.bos else self.bytes(i).decode("utf-8", errors="backslashreplace")
            for i in ids
        ]

    @functools.cached_property
    def _spelled(self) -> list[builtins.bytes]:
        signs = _byte_of_sign()
        tokens = (self._tokenizer.id_to_token(i) or "" for i in range(self.bos))
        return [*(bytes(signs[sign] for sign in token) for token in tokens), b""]


def _no_tokenizer(path: str | Path, reason: str) -> ValueError:
    return ValueError(f"{path}: not a byte-pair tokenizer ({reason.rstrip('.')}). {PUT_BACK}")


def _parts(text: str) -> Iterator[str]:
    """The text, cut inside of runs without an end of a word, as of a line of base64."""
    _require_utf8(text)
    start = 0
    for run in LONG_RUN.finditer(text):
        for end in range(run.start() + LONGEST_WORD, run.end(), LONGEST_WORD):
            yield text[start:end]
            start = end
    yield text[start:]


def _require_utf8(text: str) -> None:
    require_text("BytePairTokenizer: the text", text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"BytePairTokenizer: character {error.start} is {text[error.start]!r}, half of a "
            "surrogate pair, which UTF-8 cannot write. Read the text with errors='replace'."
        ) from error


def _byte_of_sign() -> dict[str, int]:
    """The byte of each of the 256 characters of a byte-level vocabulary.

    Printable bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(BYTES) if b not in printable)
    return {chr(b): b for b in printable} | {chr(BYTES + n): b for n, b in enumerate(others)}
