"""Errors of a command: one line for people, and an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from regard._base.errors import RecordingError


class CommandError(Exception):
    """The command cannot be carried out; exit code 1."""

    code = 1


class InputError(CommandError):
    """The input has to be changed; exit code 2."""

    code = 2


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Errors in this block are those of the user's input."""
    try:
        yield
    except (OSError, ValueError, IndexError) as error:
        raise InputError(one_line(error)) from error


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Errors of the disk in this block are no fault of the input."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, RecordingError) as error:
        raise CommandError(one_line(error)) from error


def one_line(error: Exception) -> str:
    """The error's own words; a system's error as ``FILE: what is wrong``."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
