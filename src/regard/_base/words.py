"""Words of a text that was cut into pieces (tokens): which pieces make a word.

One rule for the roles of heads, for weights by words and for the command line.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from regard._base.types import Bool, Int

SPACES = " ▁Ġ"  # a space, and how SentencePiece and byte-level tokenizers write it
NEWLINES = "\nĊ\r"
A_NEWLINE = re.compile(f"[{NEWLINES}]")
OF_A_WORD = re.compile("[\\w\ufffd]")  # a letter, digit, underscore, or a part of a character
BYTES = re.compile(r"(?:\\x[0-9a-f]{2})+")  # of characters that tokens have parts of
SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z_]+[0-9]*\]")  # <bos>, <|endoftext|>, [CLS]
END = "</w>"  # of a word, in tokenizers that mark the last piece
INNER = "##"  # of a piece that begins no word, in WordPiece
# Scripts without spaces between words: each piece is taken as one.
UNSPACED = re.compile("[\u0e00-\u0eff\u1780-\u17ff\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff]")
ENGLISH = """
    a about after all also an and any are as at be because been before but by can could did do does
    each for from had has have he her his how i if in into is it its may me more most my no nor not
    of on only or other our over shall she should so some such than that the their them then there
    these they this those through to too under up us was we were what when where which while who
    whom whose why will with would you your
"""
FUNCTION_WORDS = frozenset(ENGLISH.split())


def word_starts(tokens: Sequence[str]) -> Int[np.ndarray, " words"]:
    """The position of the first piece of each word; the first is 0.

    A word is a run of pieces of which none after the first begins with white space. Punctuation,
    white space, newlines and special tokens such as ``<bos>`` stand alone; so does each piece of a
    script that has no spaces. ``##ing`` and ``ing</w>`` are read as their tokenizers mean them.
    Where no token has white space or such a mark, tokens are words already.
    """
    return _starts(tuple(tokens))


@functools.lru_cache(maxsize=2)  # one text is asked for by words, roles and the page
def _starts(tokens: tuple[str, ...]) -> Int[np.ndarray, " words"]:
    starts = np.flatnonzero(_begins(tokens))
    starts.flags.writeable = False
    return starts


def word_texts(tokens: Sequence[str], starts: Int[np.ndarray, " words"]) -> tuple[str, ...]:
    """The text of each word: its pieces joined."""
    ends, tokens = [*starts[1:].tolist(), len(tokens)], spelled(tokens)
    return tuple("".join(_joined(tokens[a:b])) for a, b in zip(starts.tolist(), ends))


def spelled(tokens: Sequence[str]) -> Sequence[str]:
    """The tokens so that they are the text when they are joined.

    Where several have the bytes of a character, as ``\\xc3`` and ``\\xa9``, the last has all of it.
    """
    whole = "".join(tokens)
    if "\\x" not in whole:
        return tokens
    ends, found, done = [*itertools.accumulate(map(len, tokens))], [""] * len(tokens), 0
    for run in BYTES.finditer(whole):
        start, stop = run.span()
        inner = ends[bisect.bisect_right(ends, start) : bisect.bisect_left(ends, stop)]
        if not inner or any((end - start) % 4 for end in inner):  # written so in the text
            continue
        try:
            characters = bytes.fromhex(run[0].replace("\\x", "")).decode()
        except UnicodeDecodeError:
            continue
        _spread(whole, done, start, ends, found)
        done = start
        for character in characters:
            done += 4 * len(character.encode())
            found[bisect.bisect_left(ends, done)] += character
    _spread(whole, done, len(whole), ends, found)
    return found


def _spread(whole: str, start: int, stop: int, ends: list[int], found: list[str]) -> None:
    """Gives a part of the whole text to the tokens that it is of."""
    while start < stop:
        n = bisect.bisect_right(ends, start)
        found[n] += whole[start : min(stop, ends[n])]
        start = ends[n]


def is_special(token: str) -> bool:
    """Whether it is a token such as ``<bos>`` or ``[CLS]``, which stands for no text."""
    return token[:1] in ("<", "[") and SPECIAL.fullmatch(token) is not None


def is_newline(token: str) -> bool:
    """Whether it has a line break in it, and no letters."""
    return A_NEWLINE.search(token) is not None and not _is_word_piece(token)


def is_punctuation(token: str) -> bool:
    """Whether it is of signs alone: neither letters and digits, nor white space, nor special."""
    if _is_word_piece(token) or not token.strip(SPACES).strip():
        return False
    return not (is_special(token) or is_newline(token))


def plain(word: str) -> str:
    """A word without white space and marks, in lower case."""
    return word.removesuffix(END).strip(SPACES).strip().lower()


def are_function_words(words: Iterable[str]) -> Bool[np.ndarray, " words"]:
    """Whether each is one of the small words of English that hold sentences together."""
    return np.array([plain(word) in FUNCTION_WORDS for word in words], bool)


def _begins(tokens: Sequence[str]) -> Bool[np.ndarray, " L"]:
    """Whether each token begins a word."""
    texts = set(tokens)
    joined = "\0".join(texts)  # in which a mark is looked for sooner than text by text
    if INNER in joined and any(token.startswith(INNER) and token != INNER for token in texts):
        found = np.array([not token.startswith(INNER) for token in tokens])
    elif END in joined and any(token.endswith(END) for token in texts):
        ends = {token: token.endswith(END) or not _is_word_piece(token) for token in texts}
        found = np.array([True, *(ends[token] for token in tokens[:-1])])
    elif any(_opens(token) or token[-1].isspace() for token in texts if token):
        of_texts = {token: _sides(token) for token in texts}
        sides = np.array([of_texts[token] for token in tokens])
        found = sides[:, 0]
        found[1:] |= sides[:-1, 1]
    else:
        found = np.ones(len(tokens), bool)
    found[:1] = True
    return found


def _sides(token: str) -> tuple[bool, bool]:
    """Whether words end before it, and after it."""
    if token.isascii() and token[1:].isalnum():  # most, soonest
        return token[0].isspace(), False
    if UNSPACED.match(token) or not _is_word_piece(token):
        return True, True
    return _opens(token), token[-1].isspace()


def _opens(token: str) -> bool:
    """Whether it begins with white space."""
    return token[:1].isspace() or token[:1] in ("▁", "Ġ")


def _is_word_piece(token: str) -> bool:
    """Whether it has a letter, digit, underscore, or a part of a character, and is not special."""
    signs = token.strip(SPACES + NEWLINES)
    return OF_A_WORD.search(signs) is not None and not is_special(token)


def _joined(pieces: Sequence[str]) -> Iterable[str]:
    for n, piece in enumerate(pieces):
        yield (piece.removeprefix(INNER) if n else piece).removesuffix(END)
