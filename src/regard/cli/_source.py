"""The input of a command: a text, a file, standard input, or a recording."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from regard._base.files import LIMIT_BYTES, kind, open_file, read_at_most, read_file
from regard._base.settings import bytes_text
from regard._weights.parts import counts_from_0, listed
from regard.cli._errors import InputError, one_line, reading
from regard.cli._screen import busy
from regard.recording import Recording
from regard.recording._format import is_address

STDIN = "-"
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # of a model of Hugging Face's hub
RECORDING = ".safetensors"
# Errors of ``stat`` for a name that is no file's.
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL)
# An argument with one of these endings is a missing file, not a text.
TEXT_ENDINGS = (
    ".bin", ".c", ".cpp", ".csv", ".h", ".htm", ".html", ".ipynb", ".js", ".json", ".jsonl",
    ".log", ".md", ".npy", ".npz", ".parquet", ".pdf", ".png", ".pt", ".pth", ".py", ".rs", ".rst",
    ".sh", ".tex", ".toml", ".ts", ".tsv", ".txt", ".xml", ".yaml", ".yml",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """The model that reads a text.

    Args:
        name: ``builtin``, a folder, or a name of Hugging Face's hub.
        trust_remote_code: as in ``regard.hf.load``.
    """

    name: str = "builtin"
    trust_remote_code: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it is regard's own, and not one of transformers."""
        config = Path(self.name) / "config.json"
        if config.is_file():
            return b'"model_type"' not in config.read_bytes()
        is_builtin = self.name == "builtin"
        return is_builtin or Path(self.name).exists() or not _NAME.fullmatch(self.name)


BUILTIN = ModelChoice()


def read_source(argument: str, is_text: bool = False, command: str = "show") -> str | Recording:
    """The text, or the recording, that an argument of the command line stands for.

    Args:
        argument: ``-`` for standard input, the name of a file, the address of a recording, or a
            text.
        is_text: take it as a text, whatever it looks like.
        command: that reads it, for the way out.

    Raises:
        InputError: a missing or unreadable file or address, one that is neither text nor recording,
            one above the limit, no text.
    """
    if is_text or not argument:
        return given_text(argument, "The text")
    if argument == STDIN:
        return read_input()
    if is_address(argument):
        with reading(), busy(f"Opening {argument}"):
            return Recording.load(argument)
    mode = _mode(argument)
    if mode is None:
        if _looks_like_a_file(argument):
            raise InputError(
                f"{argument}: no such file. To show these words as a text, add --text."
            )
        return given_text(argument, "The text")
    if kind(mode):
        raise InputError(_no_ordinary_file(argument, kind(mode), command))
    return _read_file(Path(argument), command)


def _no_ordinary_file(argument: str, found: str, command: str) -> str:
    if found == "a folder":
        return f"{argument}: a folder. Name one file in it; to show the word, add --text."
    return (
        f"{argument}: {found}, no file. Name a file, or pass on what it holds:"
        f" cat {shlex.quote(argument)} | regard {command} -"
    )


def read_recording(
    argument: str, model: ModelChoice, is_text: bool, command: str = "show"
) -> Recording:
    """The recording of an argument, as of ``read_source``; a model reads a text.

    Raises:
        CommandError: with the line to print.
    """
    source = read_source(argument, is_text, command)
    require_text([source], model)
    return recorded(source, model)


def require_text(sources: Sequence[str | Recording], model: ModelChoice) -> None:
    """Refuses a model that was chosen where nothing is a text, which it would read.

    Raises:
        InputError: all are recordings.
    """
    if model.name != BUILTIN.name and not any(isinstance(source, str) for source in sources):
        raise InputError(
            f"--model {model.name} would read a text, and this is a recording, which holds what its"
            " own model computed. Leave --model out, or give the text."
        )


def recorded(source: str | Recording, model: ModelChoice, explain: int | None = None) -> Recording:
    """A recording as it is; a model reads a text.

    Args:
        explain: position of the token whose loss is explained, as in ``LanguageModel.record``.

    Raises:
        CommandError: with the line to print.
    """
    if isinstance(source, Recording):
        if explain is not None:
            raise InputError(
                "--explain is of a text that is read now; a recording has the effects that it was"
                " recorded with: LanguageModel.record(text, explain=...)."
            )
        return source
    with reading(), busy(f"Reading {len(source):,} characters") as tell:
        return _recorded(source, model, tell, explain)


def _recorded(
    text: str, model: ModelChoice, tell: Callable[[str], None], explain: int | None
) -> Recording:
    """The recording of a text by a model of regard's own, or one of transformers."""
    if model.is_own:
        from regard.lm import LanguageModel

        return LanguageModel.load(model.name).record(
            text, lambda done, layers: tell(f"layer {done + 1} of {layers}"), explain
        )
    if explain is not None:
        raise InputError(
            f"--explain is of regard's own models; with {model.name}, record the pass in Python:"
            " regard.hf.record(model, tokenizer=tokenizer, explain=...), and view its file."
        )
    from regard.hf import read

    return read(model.name, text, trust_remote_code=model.trust_remote_code)


def choose_group(recording: Recording, name: str | None) -> Recording:
    """The group of that name, by default the first.

    Raises:
        InputError: there is none.
    """
    if name is None:
        return recording
    if name not in recording.groups:
        names = ", ".join(repr(group) for group in recording.groups if group)
        there = f"there are {names}" if names else "it has no groups; leave it out"
        raise InputError(f"--group {name}: {there}.")
    return recording.groups[name]


def place_of_option(option: str, number: int, numbers: Sequence[int], what: str = "") -> int:
    """The place of the layer or head of a number.

    Raises:
        InputError: there is none of that number.
    """
    if number not in numbers:
        count = len(numbers)
        there = f"are {count}{what}, 0 to {count - 1}"
        if not counts_from_0(numbers):
            there = f"are{what} {listed(numbers)}"
        elif count == 1:
            there = f"is 1{what.removesuffix('s')}, number 0"
        raise InputError(f"{option} {number}: there {there}.")
    return numbers.index(number)


def has_input() -> bool:
    """Whether standard input is a pipe, or a file that is not empty."""
    try:
        status = os.fstat(sys.stdin.fileno())
    except (AttributeError, OSError, ValueError):  # it is closed
        return False
    is_pipe = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
    return is_pipe or (stat.S_ISREG(status.st_mode) and status.st_size > 0)


def read_input() -> str:
    """The text on standard input.

    Raises:
        InputError: none, no text, or more than the limit: it may have no end.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed; pass a text to it, or name a file.")
    with reading():
        data = read_at_most(sys.stdin.buffer, LIMIT_BYTES + 1)
    if len(data) > LIMIT_BYTES:
        raise InputError(
            f"standard input holds more than {bytes_text(LIMIT_BYTES)}, the limit. Pass on a part"
            " of it, as head -c 100000 does."
        )
    return _not_empty(_decoded(data, "standard input"), "Standard input")


def given_text(argument: str, name: str) -> str:
    """The argument as a text; the bytes of a command line may not be UTF-8.

    Raises:
        InputError: it is empty, or no text.
    """
    return _not_empty(_decoded(os.fsencode(argument), name), name)


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode().removeprefix("\ufeff")  # not by utf-8-sig, which counts from behind it
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: not a text; byte {error.start} is no UTF-8. Convert it to UTF-8 first."
        ) from error
    if "\0" in text:
        place = data.index(b"\0")
        raise InputError(f"{name}: not a text; byte {place} is zero. Give a text file in UTF-8.")
    return text


def _read_file(path: Path, command: str) -> str | Recording:
    part = f"head -c 100000 {shlex.quote(str(path))}"
    way_out = f"Take a part of it: {part} | regard {command} -"
    with reading():
        if path.suffix == RECORDING or _is_recording(path):
            return Recording.load(path)
        data = read_file(path, LIMIT_BYTES, way_out)
    return _not_empty(_decoded(data, str(path)), str(path))


def _is_recording(path: Path) -> bool:
    """Whether it is a safetensors file of another ending: the header's length, then JSON."""
    with open_file(path) as file:
        data = file.read(9)
    return data[8:] == b"{" and b"\0" in data[:8]


def _not_empty(text: str, name: str) -> str:
    if not text:
        raise InputError(f"{name} is empty; at least one character is needed.")
    return text


def _mode(argument: str) -> int | None:
    """The mode of the file of that name; None where there is none."""
    try:
        return Path(argument).stat().st_mode
    except ValueError:  # a text may hold characters that no name may
        return None
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise InputError(one_line(error)) from error


def _looks_like_a_file(argument: str) -> bool:
    separators = os.sep + (os.altsep or "")
    is_one_word = len(argument.split()) == 1
    if is_one_word and any(separator in argument for separator in separators):
        return True
    return "\n" not in argument and argument.lower().endswith((*TEXT_ENDINGS, RECORDING))
