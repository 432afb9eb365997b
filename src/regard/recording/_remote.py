"""A recording at an address: its header is read, and of its numbers what is asked for."""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from regard._base.deferred import DeferredArray
from regard._base.errors import RecordingError
from regard._base.extras import MissingPackageError, needed_by
from regard.recording import _loading
from regard.recording._format import DTYPES, STATISTICS, VECTORS
from regard.recording._recording import Recording

BLOCK_BYTES = 1 << 18  # are fetched together
REQUEST_BYTES = 1 << 26  # the most in one request
CACHE_BYTES = 1 << 30  # kept in memory
# What a file system tells of a file, and tells anew where the file was changed.
VERSION_OF = (
    "size", "ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "created",
    "Content-MD5", "md5Hash", "generation", "VersionId", "version_id", "sha", "ino",
)  # fmt: skip
DEFERRED = dict.fromkeys(VECTORS, 3) | dict.fromkeys(STATISTICS, 2)


def read(address: str, mapped: bool, options: Mapping[str, Any] | None) -> Recording[Any]:
    """The recording at an address.

    Args:
        address: as fsspec has them.
        mapped: False fetches all of it now.
        options: of fsspec's file system.

    Raises:
        MissingPackageError: fsspec, or what it needs for such an address.
        RecordingError: it cannot be read, or holds no recording.
    """
    remote = RemoteFile(address, options or {})
    if remote.size < 8:
        raise RecordingError(f"{address} is no recording: it has {remote.size} bytes.")
    first = remote.read(0, 8)
    length = int.from_bytes(first, "little")
    _loading.check_length(first, remote.size, address)
    header = remote.read(8, length)
    remote.start = 8 + length
    metadata, spans = _loading.parsed(header, remote.size - remote.start, address)
    if not mapped:
        data = remote.read(remote.start, remote.size - remote.start)
        remote.opened()
        return _loading.recording_of(
            metadata,
            lambda: {n: _loading.array(data, 0, *span) for n, span in spans.items()},
            address,
        )
    found = _loading.recording_of(
        metadata, lambda: {n: _array(remote, n, *span) for n, span in spans.items()}, address
    )
    remote.opened()
    for group in found.groups.values():
        group._file = remote
    return found


class RemoteFile:
    """A file that is read in ranges, and what was read of it; safe for several threads.

    Args:
        address: as fsspec has them.
        options: of fsspec's file system.

    Attributes:
        size: bytes.
        start: of its arrays.

    Raises:
        MissingPackageError, RecordingError: as ``read``.
    """

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        with needed_by(f"Recording.load of {address}"):
            import fsspec
        self.address, self.start, self._is_opening = address, 0, True
        self._lock = threading.RLock()
        self._kept: collections.OrderedDict[tuple[int, int], _Head] = collections.OrderedDict()
        try:
            if address.startswith(("http://", "https://")):  # ranges of the file, not compressed
                headers = {"Accept-Encoding": "identity", **options.get("headers", {})}
                options = {**options, "headers": headers}
            self._system, self._path = fsspec.core.url_to_fs(address, **options)
        except ImportError as error:
            if (error.name or "").partition(".")[0] == "aiohttp" or "aiohttp" in str(error):
                with needed_by(f"Recording.load of {address}"):
                    raise ModuleNotFoundError(str(error), name="aiohttp") from error
            raise MissingPackageError(
                f"Recording.load of {address} needs a package that no extra of regard brings:"
                f" {error}. Install it with pip, beside regard[remote].",
                name=error.name,
            ) from error
        except ValueError as error:
            raise RecordingError(
                f"{address} cannot be read: {error}. Name another address that fsspec reads, or"
                " download the file."
            ) from error
        except Exception as error:  # some connect at once
            raise self._unreadable(error) from error
        told = self._told()
        if not isinstance(told.get("size"), int):
            raise RecordingError(
                f"{address} cannot be read in parts: its server does not say how large it is."
                " Download it, and load the file."
            )
        self.size, self._version = int(told["size"]), _version(told)
        if told.get("partial") is False:
            raise self._without_ranges()
        try:
            # One request for each range, of that size.
            self._open = self._system.open(self._path, "rb", cache_type="none")
        except Exception as error:
            raise self._unreadable(error) from error

    def _told(self) -> dict[str, Any]:
        try:
            self._system.invalidate_cache(self._path)
            found: dict[str, Any] = self._system.info(self._path)
        except Exception as error:
            raise self._unreadable(error) from error
        if found.get("type") == "directory":
            raise RecordingError(f"{self.address} is a folder; the address of a file is needed.")
        return found

    def read(self, begin: int, count: int) -> bytes:
        """Bytes from ``begin`` on.

        Raises:
            RecordingError: they cannot be had, or the file is another one by now.
        """
        with self._lock:
            parts = [
                self._range(at, min(begin + count, at + REQUEST_BYTES))
                for at in range(begin, begin + count, REQUEST_BYTES)
            ]
            if not self._is_opening:
                self._require_unchanged()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _range(self, begin: int, end: int) -> bytes:
        try:
            self._open.seek(begin)
            data: bytes = self._open.read(end - begin)
        except Exception as error:
            if "support range requests" in str(error):
                raise self._without_ranges() from error
            self._require_unchanged()
            raise RecordingError(
                f"{self.address}: bytes {begin} to {end} could not be fetched"
                f" ({_reason(error)}). What was fetched is kept; ask again."
            ) from error
        if len(data) != end - begin:
            self._require_unchanged()
            raise RecordingError(
                f"{self.address}: of bytes {begin} to {end} only {len(data)} came; ask again."
            )
        return data

    def opened(self) -> None:
        """Checks that all that was read until now is of one file."""
        self._is_opening = False
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        """Checks after a request, so that no numbers of another file are used."""
        found = _version(self._told())
        if found != self._version:
            names = [
                n for n in found.keys() | self._version if found.get(n) != self._version.get(n)
            ]
            raise RecordingError(
                f"{self.address} was changed while it was open: its {', '.join(sorted(names))} is"
                " another. Load it again."
            )

    def _unreadable(self, error: Exception) -> RecordingError:
        return RecordingError(
            f"{self.address} cannot be read ({_reason(error)}). Check the address, the connection,"
            " and who may read it. A password or a key is given in Python: Recording.load(address,"
            " storage_options={...}), with what fsspec takes for such an address."
        )

    def _without_ranges(self) -> RecordingError:
        return RecordingError(
            f"{self.address} cannot be read in parts: its server sends whole files only (no HTTP"
            " range requests). Download it, and load the file."
        )

    def check(self) -> None:
        """Each request is checked by itself."""

    def head(self, source: Remote, h: int) -> _Head:
        """What is kept of a head of an array; the lock is held."""
        key = source.begin, h
        found = self._kept.pop(key, None) or _Head(source.shape[1:], source.dtype)
        self._kept[key] = found
        return found

    def drop_oldest(self, used: _Head) -> None:
        """Forgets what was not used for longest, down to the limit; the lock is held."""
        total = sum(head.nbytes for head in self._kept.values())
        while total > CACHE_BYTES and (oldest := next(iter(self._kept.values()))) is not used:
            self._kept.popitem(last=False)
            total -= oldest.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a recording has its arrays in memory


class _Head:
    """The rows of one head of an array: room for all of them, of which some are there."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.rows = np.empty(shape, dtype)  # pages of memory that are not written to take none
        self._block = max(1, BLOCK_BYTES // max(1, self.rows[:1].nbytes))
        self._is_there = np.zeros(-(-len(self.rows) // self._block), bool)

    @property
    def nbytes(self) -> int:
        return int(self._is_there.sum()) * self._block * self.rows[:1].nbytes

    def missing(self, rows: range) -> list[slice]:
        """The runs of rows, of whole blocks, that must be fetched to have some."""
        first, last = min(rows[0], rows[-1]), max(rows[0], rows[-1])
        blocks = range(first // self._block, last // self._block + 1)
        wanted = [n for n in blocks if not self._is_there[n]]
        runs: list[list[int]] = []
        for n in wanted:
            if runs and runs[-1][1] == n:
                runs[-1][1] = n + 1
            else:
                runs.append([n, n + 1])
        return [slice(a * self._block, min(b * self._block, len(self.rows))) for a, b in runs]

    def put(self, part: slice, numbers: np.ndarray) -> None:
        self.rows[part] = numbers
        self._is_there[part.start // self._block : -(-part.stop // self._block)] = True


class Remote:
    """An array ``(H, L, ...)`` of a file: a ``regard._base.deferred.Source``."""

    def __init__(self, file: RemoteFile, code: str, shape: tuple[int, ...], begin: int) -> None:
        self.begin, self.shape = begin, shape
        self._file, self._code = file, code
        self.dtype = _loading.array(b"", 0, code, (0,), 0).dtype

    def read(self, heads: range, rows: range) -> np.ndarray:
        """``(heads, rows, ...)``, read-only; of one head a view of what is kept."""
        found = [self._read_head(h, rows) for h in heads]
        whole = found[0][None] if len(found) == 1 else np.stack(found)
        whole.flags.writeable = False
        return whole

    def _read_head(self, h: int, rows: range) -> np.ndarray:
        with self._file._lock:
            head = self._file.head(self, h)
            for part in head.missing(rows):
                head.put(part, self._fetch(h, part))
            self._file.drop_oldest(head)
        return head.rows[rows.start : rows.stop : rows.step]

    def _fetch(self, h: int, part: slice) -> np.ndarray:
        _, L, *rest = self.shape
        each = math.prod(rest) * DTYPES[self._code].itemsize
        begin = self._file.start + self.begin + (h * L + part.start) * each
        data = self._file.read(begin, (part.stop - part.start) * each)
        found: np.ndarray = _loading.array(data, 0, self._code, (part.stop - part.start, *rest), 0)
        return found


class _Later:
    """The numbers of an array of one axis, fetched as a whole when they are used."""

    def __init__(self, file: RemoteFile, code: str, shape: tuple[int, ...], begin: int) -> None:
        self.dtype, self.shape = _loading.array(b"", 0, code, (0,), 0).dtype, shape
        self._of = file, code, begin

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found: np.ndarray = _whole(*self._of[:2], self.shape, self._of[2])
        return found if dtype is None else found.astype(dtype)

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()


def _array(file: RemoteFile, name: str, code: str, shape: tuple[int, ...], begin: int) -> Any:
    """An array of the file: later, where it is one of vectors, statistics or texts; else now."""
    field = name.rpartition(".")[2]
    if len(shape) == DEFERRED.get(field) and 0 not in shape:
        source = Remote(file, code, shape, begin)
        return DeferredArray.of(source, shape, source.dtype)
    if field in ("bytes", "offsets") and len(shape) == 1:
        return _Later(file, code, shape, begin)
    return _whole(file, code, shape, begin)


def _whole(file: RemoteFile, code: str, shape: tuple[int, ...], begin: int) -> Any:
    size = math.prod(shape) * DTYPES[code].itemsize
    data = file.read(file.start + begin, size) if size else b""
    return _loading.array(data, 0, code, shape, 0)


def _version(told: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(told[name]) for name in VERSION_OF if told.get(name) is not None}


def _reason(error: BaseException) -> str:
    """What went wrong, in one line; fsspec hides it behind a FileNotFoundError."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    status, text = getattr(cause, "status", None), " ".join(str(cause).split())
    if isinstance(status, int) and status:
        return f"HTTP {status} {getattr(cause, 'message', '')}".strip()
    return f"{type(cause).__name__}: {text}"[:200] if text else type(cause).__name__
