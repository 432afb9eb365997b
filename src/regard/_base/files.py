"""Files that a user names: only ordinary files are read, and files are replaced whole or not."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from regard._base.settings import bytes_text

LIMIT_BYTES = 64_000_000  # of a text: about 20 million tokens
CHUNK_BYTES = 1 << 20
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
MODEL_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".npz", ".json")


def kind(mode: int) -> str:
    """The kind of anything but an ordinary file, ``"a pipe"``; empty for an ordinary file."""
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no ordinary file")


def open_file(path: str | Path) -> BinaryIO:
    """Opens an ordinary file to be read; never waits for a pipe's writer.

    Raises:
        OSError: there is none, or it may not be read.
        ValueError: a folder, a pipe, a socket or a device.
    """
    _refuse_kind(path, Path(path).stat())
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    try:
        _refuse_kind(path, os.fstat(file.fileno()))  # it may have been replaced meanwhile
    except ValueError:
        file.close()
        raise
    return file


def _refuse_kind(path: str | Path, found: os.stat_result) -> None:
    if kind(found.st_mode):
        raise ValueError(f"{path} is {kind(found.st_mode)}; the name of a file is needed.")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_file(
    path: str | Path, limit_bytes: int = LIMIT_BYTES, way_out: str = "Give a part of it."
) -> bytes:
    """The content of an ordinary file, also of one without a size, as in ``/proc``.

    Raises:
        OSError, ValueError: as ``open_file``.
        ValueError: more than ``limit_bytes``.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size <= limit_bytes:
            data = read_at_most(file, limit_bytes + 1)
            if len(data) <= limit_bytes:
                return data
    raise ValueError(f"{path} holds more than {bytes_text(limit_bytes)}, the limit. {way_out}")


def read_at_most(file: BinaryIO, count: int) -> bytes:
    """The next ``count`` bytes, or those up to the end."""
    parts = []
    while count and (part := file.read(min(count, CHUNK_BYTES))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def quoted(path: str | Path) -> str:
    """The name as a shell takes it in a command: no option, and one word."""
    name = str(path)
    return shlex.quote(f".{os.sep}{name}" if name.startswith("-") else name)


def check_ending(path: str | Path, endings: tuple[str, ...], what: str) -> None:
    """Refuses a name of another kind of file; one without an ending is any kind.

    Numbers are no ending: ``gpt-3.5``.

    Raises:
        ValueError: with a name that fits.
    """
    ending = Path(path).suffix
    if (name := Path(path).name.lower()) in endings:  # of a variable that is empty
        raise ValueError(
            f"{path}: the name is an ending alone; a name before it is needed: x{name}"
        )
    if ending.lower() in endings or not any(sign.isalpha() for sign in ending):
        return
    raise ValueError(
        f"{path}: the name ends in {ending}; that of {what} ends in {' or '.join(endings)}."
        f" Name it {Path(path).with_suffix(endings[0])}."
    )


def check_folder(path: str | Path) -> None:
    """Refuses a folder for a model that is a file, or has a file's name.

    Raises:
        ValueError: with what is needed.
    """
    if Path(path).suffix.lower() in MODEL_ENDINGS and not Path(path).is_dir():
        raise ValueError(
            f"{path}: the name ends in {Path(path).suffix}, and a model is a folder of files."
            f" Name it {Path(path).with_suffix('')}."
        )
    if Path(path).exists() and not Path(path).is_dir():
        raise ValueError(f"{path} is a file, and a model is a folder. Give another name.")


@contextlib.contextmanager
def replaced_when_complete(
    path: str | Path, buffering: int = -1, *, first: bool = False
) -> Iterator[BinaryIO]:
    """A new file that takes the name once it is complete and on disk, and else leaves no trace.

    A link stays, and what it points to is replaced. A file that was there passes on who may read
    and write it.

    Args:
        path: of the file.
        buffering: as of ``open``.
        first: replace nothing: of several that write the name at once one gets it. A file system
            without hard links cannot tell which, within a moment, and the last gets it there.

    Raises:
        FileExistsError: another file has the name, and this is to be the first.
        OSError: about ``path`` as it was given, whatever the new file is called meanwhile.
    """
    with _told_of(path), _beside(path, buffering, first) as file:
        yield file


def check_place(path: str | Path) -> None:
    """Refuses what ``replaced_when_complete`` would, before anything is computed for the file.

    Raises:
        OSError: about ``path``: its folder is missing, or it is there and no ordinary file.
    """
    with _told_of(path):
        place = _place(path)
        _replaceable(place, path)
        if not place.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


@contextlib.contextmanager
def _told_of(path: str | Path) -> Iterator[None]:
    """Errors of the system name the path as it was given."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _place(path: str | Path) -> Path:
    """Where the file is: a link stays, and what it points to is replaced."""
    place = Path(path).absolute()
    return Path(os.path.realpath(place)) if place.is_symlink() else place


@contextlib.contextmanager
def _beside(path: str | Path, buffering: int, first: bool) -> Iterator[BinaryIO]:
    place = _place(path)
    old = _replaceable(place, path)
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode)
    # Short, since a name of 255 bytes leaves no room for another character.
    temporary = place.with_name(f".regard-{secrets.token_hex(8)}.tmp")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        with open(temporary, "x+b", buffering, opener=opener) as file:
            if old is not None:
                _pass_on(old, temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not (first and _linked(temporary, place)):
            temporary.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        _sync_folder(place.parent)


def _linked(file: Path, place: Path) -> bool:
    """Moves a file to a name that is free; False where the system has no hard links."""
    try:
        os.link(file, place)
    except OSError:
        if os.path.lexists(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place)) from None
        return False
    with contextlib.suppress(OSError):
        file.unlink()
    return True


def _replaceable(place: Path, path: str | Path) -> os.stat_result | None:
    """The status of an existing file; None where there is none."""
    try:
        old = place.stat()
    except FileNotFoundError:
        return None
    if kind(old.st_mode):
        raise OSError(f"{path} is {kind(old.st_mode)}; saving needs the name of a file.")
    return old


def _pass_on(old: os.stat_result, path: Path) -> None:
    """Gives a file the permissions of another, and its owner where that is allowed."""
    new = path.stat()
    if hasattr(os, "chown") and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(path, old.st_uid, old.st_gid)
    path.chmod(stat.S_IMODE(old.st_mode))


def _sync_folder(folder: Path) -> None:
    # Without it a power cut may undo the renaming, as a whole.
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder may be writable but not listable
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
