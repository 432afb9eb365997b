"""A recording is read from its file, mapped or in memory."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from regard._base.errors import RecordingError
from regard._base.files import open_file
from regard._call import edits
from regard._call.options import RECORDED_ARRAYS, RECORDED_NUMBERS, RECORDED_PAIRS
from regard._weights.statistics import RowStatistics
from regard.recording import Layer, Recording
from regard.recording._format import (
    DTYPES,
    FACTS,
    FORMAT,
    HEADER_LIMIT,
    KNOWN,
    NEEDED,
    OF_LAYERS,
    STATISTICS,
    TEXTS,
    TEXTS_VERSION,
    VECTORS,
    VERSION,
    VERSIONS,
    no_loop,
    prefix,
    quoted,
)
from regard.recording._texts import Texts


def read(path: Path, mapped: bool = True) -> Recording:
    """Open the recording at ``path``; its arrays are read-only, in the mapped file or in memory."""
    if mapped:
        return opened(path)()
    with _open(path) as file:
        header = _read_header(file, path)
        size = os.fstat(file.fileno()).st_size - file.tell()
        metadata, spans = parsed(header, size, path)
        data = file.read(size)
    if len(data) < size:
        raise RecordingError(f"{path} was cut while it was read; load it again once it is written.")
    return recording_of(metadata, functools.partial(arrays_of, spans, data, 0), path)


def opened(path: Path) -> Callable[[], Recording]:
    """Maps a file; what is given makes the recording of it, whatever has its name by then."""
    with _open(path) as file:
        return map_file(file, path)


def map_file(file: BinaryIO, path: Path) -> Callable[[], Recording]:
    """The same of a file that is open, at its start."""
    header = _read_header(file, path)
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return functools.partial(_of_mapped, header, MappedFile(data, path), 8 + len(header), path)


def map_later(header: bytes, file: BinaryIO, path: Path) -> Callable[[], Recording]:
    """The same of a file that was just written: most are not read at once, and not mapped then."""
    held = HeldFile(file, path)
    return lambda: _of_mapped(header, held.mapped(), 8 + len(header), path)


def _of_mapped(header: bytes, file: MappedFile, start: int, path: Path) -> Recording:
    metadata, spans = parsed(header, len(file.data) - start, path)
    file.check()  # for arrays of bools are read
    recording = recording_of(metadata, functools.partial(arrays_of, spans, file.data, start), path)
    for group in recording.groups.values():
        group._file = file
    return recording


class MappedFile:
    """The mapped file of arrays: reading beyond its cut end would end Python by a signal."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self._path = data, path

    def check(self) -> None:
        """Checks that all of it is still there, with one system call.

        Raises:
            RecordingError: it is shorter than when it was loaded.
        """
        _check_size(self._path, self.data.size(), len(self.data))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a recording has its arrays in memory


class HeldFile:
    """An open file, whatever becomes of its name."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._path, self._size = path, os.fstat(file.fileno()).st_size
        self._handle = os.dup(file.fileno())

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    def mapped(self) -> MappedFile:
        """All of it.

        Raises:
            RecordingError: it was cut meanwhile.
        """
        _check_size(self._path, os.fstat(self._handle).st_size, self._size)
        data = mmap.mmap(self._handle, self._size, access=mmap.ACCESS_READ)
        return MappedFile(data, self._path)


def _check_size(path: Path, found: int, needed: int) -> None:
    if found < needed:
        raise RecordingError(
            f"{path} was cut to {found} bytes while it was open; {needed} are needed. Write it anew"
            " and load it again; Recording.load(path, mapped=False) keeps the numbers of a file"
            " that others may change."
        )


def _open(path: Path) -> BinaryIO:
    try:
        with no_loop(path):
            return open_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; Recording.save writes one.") from None
    except ValueError as error:
        raise RecordingError(str(error)) from None


def _read_header(file: BinaryIO, path: Path) -> bytes:
    """The header, after which the arrays begin."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise RecordingError(f"{path} is empty; a recording is a safetensors file.")
    first = file.read(8)
    check_length(first, size, path)
    return file.read(int.from_bytes(first, "little"))


def check_length(first: bytes, size: int, path: Path | str) -> None:
    """Refuses a file of that size whose first 8 bytes are no length of a header.

    Raises:
        RecordingError: it says what the file is.
    """
    length = int.from_bytes(first, "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
        is_known = [text for magic, text in KNOWN.items() if first.startswith(magic)]
        raise RecordingError(
            f"{path} is no recording: "
            + (is_known[0] if is_known else f"{size} bytes, no safetensors file or a truncated one")
            + "; Recording.save writes one."
        )


def parsed(encoded: bytes, size: int, path: Path | str) -> tuple[dict[str, str], dict[str, Span]]:
    """What a header says of the recording, and of its arrays in the ``size`` bytes that follow."""
    try:
        header = json.loads(encoded.decode())
    except (ValueError, RecursionError) as error:
        raise RecordingError(
            f"{path} is no recording: its safetensors header is no JSON ({error})."
        ) from error
    if not isinstance(header, dict):
        raise RecordingError(f"{path} is no recording: its safetensors header is no JSON object.")
    metadata = _read_metadata(header.pop("__metadata__", None), path)
    return metadata, _read_spans(header, size, path)


def _read_metadata(metadata: Any, path: Path | str) -> dict[str, str]:
    found = metadata if isinstance(metadata, dict) else {}
    if found.get("format") != FORMAT:
        raise RecordingError(
            f"{path} is a safetensors file but no recording: its format is"
            f" {quoted(found.get('format'))}, not {FORMAT!r}; Recording.save writes one."
        )
    version = found.get("version")
    if version not in [str(known) for known in VERSIONS]:
        is_newer = isinstance(version, str) and version.isascii() and version.isdigit()
        way_out = "upgrade regard to read it" if is_newer else "the file is damaged"
        raise RecordingError(
            f"{path} is a recording of version {quoted(version)}, this regard reads {VERSION} to"
            f" {VERSIONS[-1]}; {way_out}."
        )
    needed = [x for x in NEEDED if x not in TEXTS or version != str(TEXTS_VERSION)]
    for name in (*FACTS, "others"):
        if not isinstance(found.get(name, None if name in needed else ""), str):
            raise RecordingError(f"{path} is a damaged recording: its header has no {name}.")
    return found


Span = tuple[str, tuple[int, ...], int]  # safetensors dtype, shape, offset in the data


def _read_spans(header: Mapping[str, Any], size: int, path: Path | str) -> dict[str, Span]:
    """The span of each tensor. Together they must fill the data: no gap, no overlap, no rest."""
    spans: dict[str, Span] = {}
    entries = {name: _entry(name, entry, path) for name, entry in header.items()}
    end = 0
    for name, (code, sizes, begin, stop) in sorted(entries.items(), key=lambda e: e[1][2:]):
        if begin != end or stop - begin != math.prod(sizes) * DTYPES[code].itemsize:
            raise RecordingError(
                f"{path} is a damaged recording: tensor {quoted(name)}, {code} {sizes}, lies at"
                f" {begin} to {stop}; it must start at {end} and fill its shape."
            )
        spans[name], end = (code, sizes, begin), stop
    if end != size:
        kind = "truncated" if end > size else "damaged"
        raise RecordingError(
            f"{path} is a {kind} recording: {size} bytes of numbers, {end} are needed;"
            " record or copy it again."
        )
    return spans


def _entry(name: str, entry: Any, path: Path | str) -> tuple[str, tuple[int, ...], int, int]:
    found = entry if isinstance(entry, dict) else {}
    code, sizes, offsets = (found.get(field) for field in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(code, str)
        or code not in DTYPES
        or not _are_counts(sizes)
        or not _are_counts(offsets)
        or len(offsets) != 2
    ):
        raise RecordingError(
            f"{path} is a damaged recording: tensor {quoted(name)} is {quoted(entry)}; a dtype"
            f" ({', '.join(DTYPES)}), a shape and two offsets are needed."
        )
    return code, tuple(sizes), offsets[0], offsets[1]


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


def array(
    data: mmap.mmap | bytes, start: int, code: str, sizes: tuple[int, ...], begin: int
) -> Any:
    if 0 in sizes:
        array = np.empty(sizes, DTYPES[code])
    else:
        array = np.frombuffer(data, DTYPES[code], math.prod(sizes), start + begin).reshape(sizes)
    if not array.flags.aligned:
        array = array.copy()
    if code == "BOOL":
        # A byte other than 0 and 1 is no bool; NumPy would compute with it.
        return np.asarray(array.view(np.uint8) != 0)  # of no axes it would be a scalar
    return _bfloat16(array) if code == "BF16" else array


def _bfloat16(bits: Any) -> Any:
    try:
        import ml_dtypes
    except ImportError:
        warnings.warn(
            "recording: stored as bfloat16, which NumPy lacks; widened to float32, exactly, at"
            " twice the memory. Install ml_dtypes to keep bfloat16.",
            stacklevel=7,
        )
        return np.asarray(bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(ml_dtypes.bfloat16)


def arrays_of(spans: Mapping[str, Span], data: mmap.mmap | bytes, start: int) -> dict[str, Any]:
    return {name: array(data, start, *span) for name, span in spans.items()}


def recording_of(
    metadata: Mapping[str, str], arrays: Callable[[], dict[str, Any]], path: Path | str
) -> Recording:
    """The recording of a header and of the arrays, by their names, that it tells of.

    Raises:
        RecordingError: they do not fit together.
    """
    try:
        return _of_arrays(metadata, arrays())
    except RecordingError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        text = str(error)
        text = text if len(text) <= 500 else f"{text[:497]}..."
        raise RecordingError(f"{path} is a damaged recording: {text}") from error


def _of_arrays(metadata: Mapping[str, str], arrays: dict[str, Any]) -> Recording:
    first = {name: _json(name, metadata[name]) for name in FACTS if name in metadata}
    found = _typed("others", _json("others", metadata.get("others", "[]")), list)
    given = [_group(first, arrays, 0)]
    for place, facts in enumerate(found, 1):
        with _in_other(place):
            given.append(_group(_typed("it", facts, dict), arrays, place))
    if arrays:
        raise ValueError(f"tensor {quoted(min(arrays))} belongs to no layer.")
    others: dict[str, Recording] = {}
    for place, facts in enumerate(given[1:], 1):
        with _in_other(place):
            group = Recording(**facts)
        if group.group in others:
            raise ValueError(f"there are two groups {quoted(group.group)}.")
        others[group.group] = group
    return Recording(**given[0], others=others)


@contextlib.contextmanager
def _in_other(place: int) -> Iterator[None]:
    """Says in which group a fault is."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"others[{place - 1}]: {error}") from error


def _group(facts: dict[str, Any], arrays: dict[str, Any], place: int) -> dict[str, Any]:
    """What a group is made of; the arrays of its layers are taken out of ``arrays``."""
    texts = _texts(facts, arrays, prefix(place))
    for name in NEEDED:
        if name not in facts and name not in texts:
            raise ValueError(f"it has no {name}.")
    given = {name: _typed(name, facts[name], kind) for name, kind in FACTS.items() if name in facts}
    given |= texts
    options = given.pop("options")
    told: list[dict[str, Any]] = [{} for _ in options]  # of each layer: name, number, head_numbers
    for name, argument in OF_LAYERS.items():
        values = given.pop(name, [None] * len(options))
        if len(values) != len(options):
            raise ValueError(f"{name} are {len(values)}, and there are {len(options)} layers.")
        for own, value in zip(told, values):
            own |= {} if value is None else {argument: value}
    layers = [_layer(n, *own, arrays, prefix(place)) for n, own in enumerate(zip(options, told))]
    return {"query_tokens": given["tokens"], **given, "layers": layers}


def _texts(facts: dict[str, Any], arrays: dict[str, Any], before: str) -> dict[str, Texts]:
    """The lists of texts of a group that are arrays, which are taken out of ``arrays``."""
    found = {}
    for name in TEXTS:
        data, offsets = (arrays.pop(f"{before}{name}.{x}", None) for x in ("bytes", "offsets"))
        if data is None and offsets is None:
            continue
        if name in facts:
            raise ValueError(f"{name} are in the header, and in arrays too; one is needed.")
        found[name] = Texts(f"{before}{name}", data, offsets)
        if isinstance(offsets, np.ndarray):
            found[name].check()
    return found


def _layer(
    index: int, scalars: Any, own: dict[str, Any], arrays: dict[str, Any], before: str
) -> Layer:
    """Layer ``index`` of a group; its arrays are taken out of ``arrays``."""
    if not isinstance(scalars, dict) or not set(scalars) <= set(RECORDED_NUMBERS):
        raise ValueError(
            f"layer {index} has options {quoted(scalars)}; {', '.join(RECORDED_NUMBERS)} are known."
        )
    fields = [field for pair in RECORDED_PAIRS.values() for field in pair]
    names = (*VECTORS, *RECORDED_ARRAYS, *fields)
    found = {name: arrays.pop(f"{before}layers.{index}.{name}", None) for name in names}
    for name, pair in RECORDED_PAIRS.items():
        both = tuple(found.pop(field) for field in pair)
        if any(x is not None for x in both):
            found[name] = both
    kept = {name: arrays.pop(f"{before}layers.{index}.{name}", None) for name in STATISTICS}
    if missing := [name for name, x in kept.items() if x is None]:
        if len(missing) < len(kept):
            raise ValueError(f"layer {index} has row statistics without a {missing[0]}.")
    else:
        found["statistics"] = RowStatistics(**kept)
    for name in ("query", "key"):
        if found[name] is None:
            raise ValueError(f"layer {index} has no {name}.")
    try:
        if "edits" in scalars:
            scalars = scalars | {"edits": edits.from_json(scalars["edits"])}
        return Layer(**scalars, **found, **own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"layer {index}: {error}") from error


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({error}).") from error


def _typed(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {type(value).__name__}; {kind.__name__} is needed.")
    return value
