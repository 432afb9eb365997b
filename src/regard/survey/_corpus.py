"""The documents of a survey: where they are, and how they are cut into shards."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard._base.errors import RecordingError
from regard._base.extras import needed_by
from regard._base.files import LIMIT_BYTES, kind, open_file, read_file
from regard._base.types import Int
from regard.recording import Recording

with needed_by("regard.survey"):
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

TEXT, LINES, TABLE, RECORDING = "text", "jsonl", "parquet", "recording"
LEFT_OUT = "left out"
KINDS = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".parquet": TABLE,
    ".safetensors": RECORDING,
}
TOKEN_BYTES = 4  # of a token of text, about: shards need no more
MAGIC = frozenset("*?[")


class SurveyError(RuntimeError):
    """A shard that could not be computed; the text says which, why, and the way out."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file, or some rows of one.

    Attributes:
        path: absolute.
        kind: ``text``, ``jsonl``, ``parquet``, ``recording`` or ``left out``.
        bytes, mtime_ns: of the file, when the survey began.
        first: number of the document in row 0.
        rows: from which row on, and before which; a text and a recording are one row.
        offset: of the first row in a jsonl file, in bytes.
        tokens: that are read of it, about.
        reason: why it is left out; empty where it is read.
    """

    path: str
    kind: str
    bytes: int
    mtime_ns: int
    first: int
    rows: tuple[int, int] = (0, 1)
    offset: int = 0
    tokens: int = 0
    reason: str = ""

    def name(self, row: int) -> str:
        """Of a document, for people: ``texts.jsonl:17``, from 1 on."""
        return f"{self.path}:{row + 1}" if self.kind in (LINES, TABLE) else self.path

    def check(self) -> None:
        """Raises SurveyError where the file is not what it was."""
        if self.kind == LEFT_OUT:
            return
        try:
            found = Path(self.path).stat()
        except OSError as error:
            raise SurveyError(
                f"{self.path}: {error.strerror}; it was there when the survey began. Put it back,"
                " or survey what there is into another folder."
            ) from error
        for now, then, what in (
            (found.st_size, self.bytes, "bytes"),
            (found.st_mtime_ns, self.mtime_ns, "ns as its time of change"),
        ):
            if now != then:
                raise SurveyError(
                    f"{self.path} has changed since the survey began: it has {now:,} {what}, and"
                    f" had {then:,}. Put the old file back, copied with its times, or survey the"
                    " new one into another folder."
                )

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        found = dataclasses.asdict(self) | {"rows": list(self.rows)}
        return found if self.reason else {name: x for name, x in found.items() if name != "reason"}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Source:
        """Of the manifest."""
        return cls(**(found | {"rows": tuple(found["rows"])}))


@dataclasses.dataclass(frozen=True)
class Document:
    """One document, read.

    Attributes:
        number: in the survey.
        name: for people.
        text: None of a recording, and where it cannot be read.
        recording: None of a text.
        reason: why it cannot be read; empty where it can.
    """

    number: int
    name: str
    text: str | None = None
    recording: Recording[Any] | None = None
    reason: str = ""


class LeftOut(NamedTuple):
    """What lies in a folder and cannot be read: its absolute path, and why."""

    path: str
    reason: str


def found_files(paths: Sequence[str | Path], survey: Path) -> tuple[list[Path], list[LeftOut]]:
    """The files that are named, in order and each once, and what is left out.

    Args:
        paths: files, folders, patterns such as ``texts/*.txt``.
        survey: a folder whose files are none of them.

    Raises:
        FileNotFoundError: nothing is there under a name.
        ValueError: no file at all, or the name of a pipe or device.
    """
    files: dict[Path, None] = {}
    left_out: dict[str, LeftOut] = {}
    for path in paths:
        for found in _matches(path):
            inside = _in_folder(found) if found.is_dir() else [(found, _why_not(found))]
            for file, reason in inside:
                place = Path(os.path.realpath(file))  # it ends, whatever links lead to
                if survey in place.parents:
                    continue
                if not reason:
                    files[place] = None
                elif file == Path(path) and not file.is_dir():
                    raise ValueError(f"survey: {file} is {reason}; name files, or folders of them.")
                else:
                    name = str(Path(os.path.realpath(file.parent), file.name))  # the link itself
                    left_out[name] = LeftOut(name, reason)
        for error in _closed(path):
            name = os.path.realpath(error.filename)
            left_out.setdefault(name, LeftOut(name, _all_in(error)))
    if not files:
        raise ValueError(_nothing(paths, [*left_out.values()]))
    return list(files), list(left_out.values())


def _nothing(paths: Sequence[str | Path], left_out: Sequence[LeftOut]) -> str:
    if left_out:
        name, reason = left_out[0]
        more = f", and {len(left_out) - 1:,} more" if left_out[1:] else ""
        return (
            f"survey: there is no file to read: {name} ({reason}){more}. Name others, or see to it"
            " that they can be read."
        )
    named = ", ".join(str(path) for path in paths) or "nothing was named"
    return (
        f"survey: there is no file to read ({named}). Name files, or folders of them; of"
        " folders hidden files, compiled Python and the survey itself are left out."
    )


def _why_not(file: Path) -> str:
    """Why it is no document: empty for an ordinary file."""
    try:
        return kind(file.stat().st_mode)
    except FileNotFoundError:
        return f"a link to {file.readlink()}, which is not there" if file.is_symlink() else "gone"
    except OSError as error:  # of links that lead to themselves too
        return str(error.strerror)


def _matches(path: str | Path) -> list[Path]:
    if Path(path).exists():
        return [Path(path)]
    if MAGIC & set(str(path)):
        found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute too
        if found:
            return [Path(name) for name in found]
        closed = "".join(f" {error.filename}: {error.strerror}." for error in _closed(path)[:1])
        raise FileNotFoundError(f"survey: {path}: no file matches.{closed}")
    fetched = " An address is fetched first: a survey reads files." if "://" in str(path) else ""
    raise FileNotFoundError(f"survey: {path}: no such file or folder.{fetched}")


def _closed(path: str | Path) -> list[OSError]:
    """Of folders that a pattern looks into and that cannot be read, which ``glob`` passes over."""
    found: list[OSError] = []
    parts = () if Path(path).exists() else Path(path).parts
    for n, part in enumerate(parts):
        above = str(Path(*parts[:n]))
        if not MAGIC & {*above, *part}:
            continue
        for folder in glob.glob(above, recursive=True):  # noqa: PTH207 - absolute too
            try:
                if part == "**":
                    for _ in os.walk(folder, onerror=found.append):
                        pass
                elif MAGIC & set(part):
                    os.scandir(folder).close()
                else:
                    os.lstat(Path(folder, part))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                error.filename = folder
                found.append(error)
    return list({error.filename: error for error in found}.values())


def _all_in(error: OSError) -> str:
    return f"all in this folder: {error.strerror}"


def _in_folder(folder: Path) -> Iterator[tuple[Path, str]]:
    """All files in it, but hidden ones and compiled Python, and why one cannot be read."""
    closed: list[OSError] = []
    for above, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = sorted(x for x in folders if x[0] != "." and x != "__pycache__")
        for name in folders:
            if Path(above, name).is_symlink():
                yield Path(above, name), "a link to a folder, which is not followed"
        for name in sorted(names):
            if name[0] != ".":
                yield Path(above, name), _why_not(Path(above, name))
    for error in closed:
        yield Path(error.filename), _all_in(error)


def cut(
    files: Sequence[Path], left_out: Sequence[LeftOut],
    column: str, max_tokens: int, shard_tokens: int | None, shards: int,
) -> list[list[Source]]:  # fmt: skip
    """The documents of each shard, by an estimate of their tokens.

    Args:
        left_out: what the last shard names as left out.
        column: of the text, in files of rows.
        max_tokens: that are read of a document.
        shard_tokens: about how many a shard gets; by default a million, or less, so that there are
            ``shards``.
    """
    rows: dict[Path, Rows] = {}
    left_out = [*left_out]
    for file in files:
        try:
            rows[file] = _rows_of(file, column)
        except PermissionError as error:
            left_out.append(LeftOut(str(file), str(error.strerror)))
        else:
            if not len(rows[file].sizes):
                left_out.append(LeftOut(str(file), "it has no rows"))
    _warn_of_models([own.model for own in rows.values() if own.model is not None])
    estimates = [
        own.sizes if own.kind == RECORDING else np.minimum(own.sizes // TOKEN_BYTES + 1, max_tokens)
        for own in rows.values()
    ]
    total = sum(int(x.sum()) for x in estimates)
    each = shard_tokens or min(1_000_000, max(1, -(-total // shards)))
    made: list[list[Source]] = [[]]
    room, number = each, 0
    for (file, (kind_, sizes, starts, _)), tokens in zip(rows.items(), estimates):
        status, upto, start = file.stat(), np.cumsum(tokens), 0
        while start < len(sizes):
            done = int(upto[start - 1]) if start else 0
            stop = min(len(sizes), int(np.searchsorted(upto, done + room)) + 1)
            made[-1].append(
                Source(
                    str(file), kind_, status.st_size, status.st_mtime_ns, number,
                    (start, stop), int(starts[start]), int(upto[stop - 1]) - done,
                )
            )  # fmt: skip
            room -= int(upto[stop - 1]) - done
            start = stop
            if room <= 0:
                made.append([])
                # What one has too much the next has less: there are as many as were asked for.
                room = room + each if room + each > 0 else each
        number += len(sizes)
    made = [shard for shard in made if shard]
    if left_out:
        made = made or [[]]
        made[-1] += [
            Source(name, LEFT_OUT, 0, 0, number + n, reason=reason)
            for n, (name, reason) in enumerate(left_out)
        ]
    return made


class Rows(NamedTuple):
    """The documents of a file."""

    kind: str
    sizes: Int[np.ndarray, " n"]  # bytes of each, or tokens of a recording
    starts: Int[np.ndarray, " n"]  # offsets in bytes
    model: str | None = None  # of a recording


def _warn_of_models(models: Sequence[str]) -> None:
    """Warns of recordings of several models, whose heads have the same numbers."""
    names = sorted({*models})
    if len(names) > 1:
        told = f"{', '.join(map(repr, names[:3]))}{', ...' if names[3:] else ''}"
        warnings.warn(
            f"survey: the recordings are of {len(names)} models ({told}), and heads of the same"
            " number are added up. Survey each model's into a folder of its own.",
            stacklevel=4,
        )


def _rows_of(file: Path, column: str) -> Rows:
    kind_ = KINDS.get(file.suffix.lower(), TEXT)
    nowhere = np.zeros(1, np.int64)
    if kind_ == LINES:
        ends = _line_ends(file)
        starts = np.concatenate([nowhere, ends[:-1]])[: len(ends)]
        return Rows(kind_, ends - starts, starts)
    if kind_ == TABLE:
        count, each = _table_size(file, column)
        return Rows(kind_, np.full(count, each), np.zeros(count, np.int64))
    if kind_ == RECORDING:
        try:
            found = Recording.load(file)
            return Rows(kind_, np.array([len(found.query_tokens)]), nowhere, found.model)
        except (RecordingError, OSError, ValueError):
            return Rows(kind_, nowhere, nowhere)
    return Rows(kind_, np.array([file.stat().st_size]), nowhere)


def _line_ends(file: Path) -> Int[np.ndarray, " lines"]:
    ends, done = [], 0
    with open_file(file) as lines:
        while data := lines.read(2**24):
            ends.append(np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + done + 1)
            done += len(data)
    found = np.concatenate([*ends, np.zeros(0, np.int64)]).astype(np.int64)
    return found if not done or (len(found) and found[-1] == done) else np.append(found, done)


def _table_size(file: Path, column: str) -> tuple[int, int]:
    """Rows of a Parquet file, and bytes of the text of one, about."""
    try:
        with open_file(file) as opened, ParquetFile(opened) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise ValueError(
                    f"survey: {file} has no column {column!r}; there are {', '.join(names)}."
                    " Name the one of the texts: --column."
                )
            if (count := names.count(column)) > 1:
                raise ValueError(
                    f"survey: {file} has {count} columns {column!r}; the one of the texts needs a"
                    " name of its own. Rename the others, or name another: --column."
                )
            rows = table.metadata.num_rows
            groups = (table.metadata.row_group(n) for n in range(table.num_row_groups))
            every = [group.column(n) for group in groups for n in range(group.num_columns)]
            size = sum(
                own.total_uncompressed_size
                for own in every
                if f"{own.path_in_schema}.".startswith(f"{column}.")
            )
    except (ArrowException, OSError) as error:
        if _is_of_system(error):
            raise
        raise ValueError(
            f"survey: {file}: not a Parquet file ({reason_of(error)}). Put a whole one in its"
            " place, or leave it out: name the other files, or move it out of the folder."
        ) from error
    return rows, size // max(1, rows)


def documents(source: Source, column: str) -> Iterator[Document]:
    """The documents of a source, one after the other.

    Raises:
        SurveyError: the file is not what it was when the survey began.
    """
    source.check()
    read = {
        TEXT: _text, LINES: _lines, TABLE: _table, RECORDING: _recording, LEFT_OUT: _left_out,
    }[source.kind]  # fmt: skip
    for row, found in zip(range(*source.rows), read(source, column)):
        number = source.first + row
        if isinstance(found, Exception):
            yield Document(number, source.name(row), reason=reason_of(found))
        elif isinstance(found, Recording):
            yield Document(number, source.name(row), recording=found)
        else:
            yield Document(number, source.name(row), text=found)


Read = Iterator[str | Recording[Any] | Exception]


def _text(source: Source, column: str) -> Read:
    try:
        yield _decoded(read_file(source.path, LIMIT_BYTES, "Cut it into several files."))
    except (OSError, ValueError) as error:
        yield error


def _decoded(data: bytes) -> str:
    text = data.decode().removeprefix("\ufeff")  # not by utf-8-sig, which counts from behind it
    if "\0" in text:
        place = data.index(b"\0")
        raise ValueError(f"byte {place} is zero, so it is no text")
    return text


def _lines(source: Source, column: str) -> Read:
    with open_file(source.path) as file:
        file.seek(source.offset)
        for _ in range(*source.rows):
            try:
                yield _field(file.readline(), column)
            except (ValueError, RecursionError) as error:
                yield error


def _field(line: bytes, column: str) -> str:
    if not line.strip():
        return ""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"an object with {column!r} is needed, and it is {type(found).__name__}")
    if not found:
        raise ValueError(f"an object with {column!r} is needed, and it has nothing")
    if column not in found:
        names = ", ".join(repr(name[:40]) for name in [*found][:4])
        raise ValueError(f"there is no {column!r} in it; --column names another, of {names}")
    return _string(found[column], column)


def _string(found: Any, column: str) -> str:
    if found is None:
        return ""
    if not isinstance(found, str):
        raise ValueError(f"{column!r} is no text, but {type(found).__name__}")
    try:
        found.encode()
    except UnicodeEncodeError as error:  # JSON can write it, UTF-8 cannot
        raise ValueError(f"character {error.start} is half of a surrogate pair") from error
    return found


def _table(source: Source, column: str) -> Read:
    first, last = source.rows
    try:
        # Opened here: pyarrow takes no name that is not UTF-8.
        with (
            open_file(source.path) as opened,
            ParquetFile(opened, page_checksum_verification=True) as table,
        ):
            sizes = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
            ends = np.cumsum(sizes)
            groups = [n for n, end in enumerate(ends) if end > first and end - sizes[n] < last]
            row = int(ends[groups[0]] - sizes[groups[0]]) if groups else last
            for batch in table.iter_batches(64, row_groups=groups, columns=[column]):
                for value in batch.column(0):
                    if first <= row < last:
                        try:
                            yield _string(value.as_py(), column)
                        except ValueError as error:
                            yield error
                    row += 1
    except (ArrowException, OSError) as error:
        if _is_of_system(error):
            raise
        raise SurveyError(
            f"{source.path}: rows {first + 1} to {last} cannot be read ({reason_of(error)}). Put a"
            " whole file in its place, or leave it out, and survey into another folder."
        ) from error


def _is_of_system(error: Exception) -> bool:
    """Whether an error is the system's, and not pyarrow's, which has damaged files in OSErrors."""
    return isinstance(error, OSError) and error.errno is not None


def _recording(source: Source, column: str) -> Read:
    try:
        yield Recording.load(source.path)
    except (RecordingError, OSError, ValueError) as error:
        yield error


def _left_out(source: Source, column: str) -> Read:
    yield ValueError(source.reason)


def reason_of(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is no UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())
