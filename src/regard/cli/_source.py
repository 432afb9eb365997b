"""What ``regard show`` was given: a text, a file, standard input, or a recording."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from regard.cli._errors import InputError, reading
from regard.cli._screen import busy
from regard.recording import Recording

STDIN = "-"
RECORDING = ".safetensors"
# Endings by which a file that is missing is told from a text.
TEXT_ENDINGS = (
    ".bin", ".c", ".cpp", ".csv", ".h", ".htm", ".html", ".ipynb", ".js", ".json", ".log", ".md",
    ".pdf", ".png", ".py", ".rs", ".rst", ".sh", ".tex", ".toml", ".ts", ".tsv", ".txt", ".xml",
    ".yaml", ".yml",
)  # fmt: skip


def read_source(argument: str, is_text: bool = False) -> str | Recording:
    """The text, or the recording, that an argument of the command line stands for.

    Args:
        argument: ``-`` for standard input, the name of a file, or a text.
        is_text: take it as a text, whatever it looks like.

    Raises:
        InputError: a missing or unreadable file, one that is neither text nor recording, no text.
    """
    if is_text or not argument:
        return given_text(argument, "The text")
    if argument == STDIN:
        return read_input()
    mode = _mode(argument)
    if mode is None:
        if _looks_like_a_file(argument):
            raise InputError(
                f"{argument}: no such file. To show these words as a text, add --text."
            )
        return given_text(argument, "The text")
    if stat.S_ISDIR(mode):
        raise InputError(
            f"{argument}: a folder. Name one file in it; to show the word, add --text."
        )
    return _read_file(Path(argument))


def read_recording(argument: str, model: str, is_text: bool) -> Recording:
    """The recording that an argument stands for; a text is read by a model.

    Raises:
        CommandError: with the line to print.
    """
    source = read_source(argument, is_text)
    if isinstance(source, Recording):
        return source
    from regard.lm import LanguageModel

    with reading(), busy(f"Reading {len(source):,} characters"):
        return LanguageModel.load(model).record(source)


def read_input() -> str:
    """The text on standard input.

    Raises:
        InputError: none, or no text.
    """
    return _not_empty(_decoded(sys.stdin.buffer.read(), "standard input"), "Standard input")


def given_text(argument: str, name: str) -> str:
    """A text that is itself the argument; a command line may hold bytes that are none.

    Raises:
        InputError: it is empty, or no text.
    """
    return _not_empty(_decoded(os.fsencode(argument), name), name)


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: not a text; byte {error.start} is no UTF-8. Convert it to UTF-8 first."
        ) from error
    if "\0" in text:
        place = data.index(b"\0")
        raise InputError(f"{name}: not a text; byte {place} is zero. Give a text file in UTF-8.")
    return text


def _read_file(path: Path) -> str | Recording:
    with reading():
        if path.suffix == RECORDING:
            return Recording.load(path)
        data = path.read_bytes()
        # A safetensors file under another name: the length of its header, then JSON.
        if data[8:9] == b"{" and b"\0" in data[:8]:
            return Recording.load(path)
    return _not_empty(_decoded(data, str(path)), str(path))


def _not_empty(text: str, name: str) -> str:
    if not text:
        raise InputError(f"{name} is empty; at least one character is needed.")
    return text


def _mode(argument: str) -> int | None:
    try:
        return Path(argument).stat().st_mode
    except (OSError, ValueError):  # a text may be too long for a name, or hold what none may
        return None


def _looks_like_a_file(argument: str) -> bool:
    separators = os.sep + (os.altsep or "")
    is_one_word = len(argument.split()) == 1
    if is_one_word and any(separator in argument for separator in separators):
        return True
    return "\n" not in argument and argument.lower().endswith((*TEXT_ENDINGS, RECORDING))
