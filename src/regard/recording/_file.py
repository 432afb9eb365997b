"""The file of a recording: safetensors, one tensor per array, everything else as JSON.

Written and read here rather than by the safetensors library, for two reasons: arrays of any strides
are written one at a time, so that saving never holds a second copy of the recording; and a file is
opened once, so that the checked bytes are the ones read, even if the file is replaced meanwhile.
Each library reads what the other writes; a test checks both. docs/recording.md describes the file.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import mmap
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np

from regard._base.arrays import is_tensor
from regard._base.deferred import fetched
from regard._base.errors import RecordingError
from regard._base.files import check_ending, open_file, replaced_when_complete
from regard._call import edits
from regard._call.options import RECORDED_ARRAYS, RECORDED_NUMBERS, RECORDED_PAIRS
from regard._weights.parts import counts_from_0
from regard._weights.statistics import RowStatistics
from regard.recording import Layer, Recording
from regard.recording._texts import Texts, arrays_of

FORMAT = "regard-recording"
VERSION = 1
GROUPS_VERSION = 2  # of a file with several groups of layers
GRADIENT_VERSION = 3  # of one with the gradients of outputs
TEXTS_VERSION = 4  # of one with texts of tokens as arrays, or with row statistics
VERSIONS = VERSION, GROUPS_VERSION, GRADIENT_VERSION, TEXTS_VERSION
ENDING = ".safetensors"
# The safetensors library refuses longer headers too.
HEADER_LIMIT = 100_000_000
# Of the texts of a list in the header; each token counts as one more. Longer lists are arrays.
MOST_CHARACTERS = 65_536
ALIGNMENT = 64
ROOM_BYTES = 1 << 22  # of what is written together
LEAST_ROOM = 1 << 16
BLOCK_BYTES = 1 << 18  # of a larger array
# What the header says of a group of layers, as JSON of these types.
FACTS = {
    "model": str,
    "tokens": list,
    "options": list,
    "query_tokens": list,
    "boundary": int,
    "names": list,
    "numbers": list,
    "head_numbers": list,
    "weights_only": list,
    "grids": list,
    "group": str,
}
NEEDED = ("model", "tokens", "options")
TEXTS = ("tokens", "query_tokens")
OF_LAYERS = {
    "names": "name",
    "numbers": "number",
    "head_numbers": "head_numbers",
    "weights_only": "weights_only",
}

VECTORS = ("query", "key", "value", "gradient")  # arrays of a layer beside those of its options

STATISTICS = RowStatistics._fields

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES = {
    code: np.dtype(np.uint16 if name == "bfloat16" else name).newbyteorder("<")
    for name, code in CODES.items()
}
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(::[a-zA-Z0-9+.-]+)*://\S+")
_ENCODER = json.JSONEncoder(separators=(",", ":"))
# To name a file that is not safetensors.
KNOWN = {
    b"\x89PNG": "a PNG picture",
    b"\x93NUMPY": "a NumPy array",
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
    b"\x80": "a pickle, which regard never reads",
}


def write(recording: Recording, path: Path, statistics: bool = False) -> None:
    """Write ``recording`` to ``path``: the whole file under that name, or nothing."""
    check_name(path)
    arrays = [
        (f"{prefix(place)}layers.{index}.{name}", array)
        for place, group in enumerate(recording.groups.values())
        for index, layer in enumerate(_layers_to_write(group, statistics))
        for name, array in arrays_of_layer(layer)
    ]
    named = wide_first([*arrays, *arrays_of_texts(recording)])
    header = encoded_header(recording, ((name, kind) for name, kind, _ in named))
    with room() as gathered, no_loop(path), replaced_when_complete(path, buffering=0) as file:
        write_header(file, header)
        target = Target(file, gathered)
        for *_, array in named:
            target.add(array)
        target.flush()


def _layers_to_write(group: Recording, statistics: bool) -> Iterable[Layer]:
    if not statistics:
        return group.layers
    return (one._with_statistics(weights) for one, weights in zip(group.layers, group.weights))


def is_address(path: object) -> bool:
    """Whether that is an address of fsspec, ``https://…``, and no name of a file."""
    return isinstance(path, str) and "://" in path and _ADDRESS.fullmatch(path) is not None


def check_name(path: str | Path) -> None:
    """Refuses a name of another kind of file.

    Raises:
        ValueError: with a name that fits.
    """
    check_ending(path, (ENDING,), "a recording")


@contextlib.contextmanager
def no_loop(path: Path) -> Iterator[None]:
    """Says in words that a link leads back to itself."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RecordingError(
            f"{path} is a link that leads back to itself, so there is no file; remove it, or give"
            " another name."
        ) from None


class Kind(NamedTuple):
    """What the header says of an array."""

    code: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> Kind:
        return cls(_code_of(array.dtype), tuple(array.shape))

    @property
    def item_size(self) -> int:
        return DTYPES[self.code].itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_size


@functools.cache
def _code_of(dtype: Any) -> str:
    return CODES[str(dtype).removeprefix("torch.")]


def prefix(place: int) -> str:
    """What the names of a group's arrays begin with; the first group is at place 0."""
    return f"others.{place - 1}." if place else ""


def arrays_of_layer(layer: Layer) -> Iterator[tuple[str, Any]]:
    """The arrays of a layer, by their names in the file."""
    for name in VECTORS:
        if (array := getattr(layer, f"_{name}")) is not None:
            yield name, array
    if layer.statistics is not None:
        yield from zip(STATISTICS, layer.statistics)
    for name in RECORDED_ARRAYS:
        if (found := layer.options.get(name)) is None:
            continue
        if isinstance(found, tuple):
            yield from zip(RECORDED_PAIRS[name], found)
        else:
            yield name, found


def arrays_of_texts(
    recording: Recording, most: int = MOST_CHARACTERS
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of the lists of texts of all groups that are too long for the header.

    Args:
        recording: whose.
        most: characters of a list in the header; each token counts as one more.
    """
    for place, group in enumerate(recording.groups.values()):
        for name, texts in _texts_of(group).items():
            if len(texts) + sum(map(len, texts)) > most:
                data, offsets = arrays_of(texts)
                yield f"{prefix(place)}{name}.offsets", offsets
                yield f"{prefix(place)}{name}.bytes", data


def _texts_of(recording: Recording) -> dict[str, tuple[str, ...]]:
    """The lists of texts of a group, by their names in the file."""
    tokens, queries = recording.tokens, recording.query_tokens
    return {"tokens": tokens} if queries == tokens else {"tokens": tokens, "query_tokens": queries}


def wide_first(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Kind, Any]]:
    """Wide numbers first: then every array starts at a multiple of its own item size."""
    found = [(name, Kind.of(array), array) for name, array in named]
    return sorted(found, key=lambda one: -one[1].item_size)


def encoded_header(recording: Recording, named: Iterable[tuple[str, Kind]]) -> bytes:
    """The header of a file of a recording, with all groups.

    Args:
        recording: its arrays are not read.
        named: name and kind of each array, in the order of the data.

    Raises:
        RecordingError: it is longer than a header may be.
    """
    named = list(named)
    apart = {name.removesuffix(".offsets") for name, _ in named if name.endswith(".offsets")}
    first, *others = (
        {
            name: fact
            for name, fact in _facts(group).items()
            if f"{prefix(place)}{name}" not in apart
        }
        for place, group in enumerate(recording.groups.values())
    )
    version = GROUPS_VERSION if others else VERSION
    if any(name.endswith(".gradient") for name, _ in named):
        version = GRADIENT_VERSION
    if apart or any(name.endswith(".maximum") for name, _ in named):
        version = TEXTS_VERSION
    metadata = {"format": FORMAT, "version": str(version)}
    metadata |= {name: json.dumps(fact) for name, fact in first.items()}
    if others:
        metadata["others"] = json.dumps(others)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, kind in named:
        begin, end = end, end + kind.nbytes
        header[name] = {"dtype": kind.code, "shape": kind.shape, "data_offsets": [begin, end]}
    encoded = _ENCODER.encode(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    if len(encoded) > HEADER_LIMIT:
        raise RecordingError(
            f"recording: what is known of it beside its arrays takes {len(encoded)} bytes, and"
            f" {HEADER_LIMIT} fit into a safetensors header; save parts of the text, or some of the"
            " layers, as recordings of their own."
        )
    return encoded


def write_header(file: BinaryIO, header: bytes) -> None:
    """Writes it and its length to the start of a file."""
    write_all(file, len(header).to_bytes(8, "little") + header)


def reserve(file: BinaryIO, size: int) -> None:
    """Finds room on the disk for all that will be written: writing it is a third quicker then."""
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        os.posix_fallocate(file.fileno(), 0, size)


def write_all(file: BinaryIO, data: Any) -> None:
    """Writes all of it to an unbuffered file, which may take less than it is given."""
    data = memoryview(data)
    while data:
        data = data[file.write(data) :]


def _facts(recording: Recording) -> dict[str, Any]:
    """What the header says of a group, in JSON's types; what is as usual is left out."""
    layers = recording.layers
    texts = _texts_of(recording)
    facts: dict[str, Any] = {
        "model": recording.model,
        "tokens": texts.pop("tokens"),
        "options": [_numbers_of(layer) for layer in layers],
        **texts,
    }
    if recording.boundary is not None:
        facts["boundary"] = recording.boundary
    if any(layer.name for layer in layers):
        facts["names"] = [layer.name for layer in layers]
    if any(layer.number is not None for layer in layers):
        facts["numbers"] = [layer.number for layer in layers]
    if not all(counts_from_0(layer.head_numbers) for layer in layers):
        facts["head_numbers"] = [layer.head_numbers for layer in layers]
    if any(layer.weights_only for layer in layers):
        facts["weights_only"] = [layer.weights_only for layer in layers]
    if recording.grids:
        facts["grids"] = recording.grids
    if recording.group:
        facts["group"] = recording.group
    return facts


def _numbers_of(layer: Layer) -> dict[str, Any]:
    """The options of a layer that are no arrays, in JSON's types."""
    found = {name: layer.options[name] for name in RECORDED_NUMBERS if name in layer.options}
    if "edits" in found:
        found["edits"] = edits.to_json(found["edits"])
    return found


@functools.lru_cache(64)
def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


_spare: list[np.ndarray] = []  # the last room that was used


@contextlib.contextmanager
def room(parts: int = 1) -> Iterator[np.ndarray]:
    """Memory for a ``Target``, kept for the next one: new pages cost more than copying does.

    Args:
        parts: how many targets share what one has.
    """
    if parts > 1:
        yield np.empty(max(ROOM_BYTES // parts, LEAST_ROOM) // ALIGNMENT * ALIGNMENT, np.uint8)
        return
    try:
        found = _spare.pop()
    except IndexError:
        found = np.empty(ROOM_BYTES, np.uint8)
    try:
        yield found
    finally:
        _spare[:] = [found]


class Target:
    """A file that arrays of any strides are written to; those that are small, together.

    Args:
        file: unbuffered.
        room: memory to copy in.
        start: where the first array is written.

    Attributes:
        has_begun: whether anything was written.
        filled: bytes that were not.
    """

    def __init__(self, file: BinaryIO, room: np.ndarray, start: int | None = None) -> None:
        self._file, self._room, self._start = file, room, start
        self.filled = 0
        self._tensors: dict[Any, Any] = {}  # the room, by torch's dtypes
        self.has_begun = False

    def add(self, array: Any) -> None:
        """Writes an array, now or later; it may be written to afterwards."""
        array = fetched(array)
        size = array.nbytes
        if size > len(self._room) - self.filled:
            self.flush()
            if size > len(self._room):
                self._write_large(_on_cpu(array))
                return
        start, self.filled = self.filled, self.filled + size
        if is_tensor(array):
            self._gather(array, start)
        else:
            room = self._room[start : self.filled].view(array.dtype.newbyteorder("<"))
            np.copyto(room.reshape(array.shape), array)

    def _gather(self, x: Any, start: int) -> None:
        """Copies a tensor into the room by torch: amid a model its code is at hand, NumPy's not."""
        if (room := self._tensors.get(x.dtype)) is None:
            torch = sys.modules["torch"]
            with torch.inference_mode(False):  # so that it may be written to in any mode
                room = self._tensors[x.dtype] = torch.from_numpy(self._room).view(x.dtype)
        place = room.as_strided(x.shape, _steps(x.shape), start // room.itemsize)
        place.copy_(x.detach() if x.requires_grad else x)

    def _write_large(self, x: np.ndarray) -> None:
        dtype = x.dtype.newbyteorder("<")
        if x.flags.c_contiguous and x.dtype == dtype:
            self._write(x.reshape(-1).view(np.uint8).data)
        else:
            self._write_copied(x, dtype)

    def _write_copied(self, x: np.ndarray, dtype: np.dtype) -> None:
        """Block by block, each still in a core's cache when it is written."""
        block = self._room[:BLOCK_BYTES]
        if x.nbytes <= len(block):
            block = block[: x.nbytes]
            np.copyto(block.view(dtype).reshape(x.shape), x)
            self._write(block.data)
            return
        count = len(block) * len(x) // x.nbytes
        for part in (x[n : n + count] for n in range(0, len(x), count)) if count else x:
            self._write_copied(part, dtype)

    def flush(self, start: int | None = None) -> None:
        """Writes what was gathered.

        Args:
            start: where the first array is written, where that is known only now.
        """
        if start is not None:
            self._start = start
        if self.filled:
            filled, self.filled = self.filled, 0
            self._write(self._room[:filled].data)

    def _write(self, data: memoryview) -> None:
        if not self.has_begun and self._start is not None:
            self._file.seek(self._start)
        self.has_begun = True
        write_all(self._file, data)


def _on_cpu(array: Any) -> np.ndarray:
    """An array of NumPy with these numbers; those of bfloat16 as integers, where it has none."""
    if is_tensor(array):
        if _code_of(array.dtype) == "BF16":
            array = array.detach().view(sys.modules["torch"].int16)
        array = array.numpy(force=True)
    found: np.ndarray = array
    return found


def _bytes(array: Any) -> memoryview:
    flat = np.ascontiguousarray(_on_cpu(array)).reshape(-1)
    return flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


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
    return recording_of(metadata, functools.partial(_arrays, spans, data, 0), path)


def opened(path: Path) -> Callable[[], Recording]:
    """Maps a file; what is given makes the recording of it, whatever has its name by then."""
    with _open(path) as file:
        return map_file(file, path)


def map_file(file: BinaryIO, path: Path) -> Callable[[], Recording]:
    """The same of a file that is open, at its start."""
    return map_after(_read_header(file, path), file, path)


def map_after(header: bytes, file: BinaryIO, path: Path) -> Callable[[], Recording]:
    """The same where its header is known."""
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return functools.partial(_of_mapped, header, MappedFile(data, path), 8 + len(header), path)


def _of_mapped(header: bytes, file: MappedFile, start: int, path: Path) -> Recording:
    metadata, spans = parsed(header, len(file.data) - start, path)
    file.check()  # for arrays of bools are read
    recording = recording_of(metadata, functools.partial(_arrays, spans, file.data, start), path)
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
        found = self.data.size()
        if found < len(self.data):
            raise RecordingError(
                f"{self._path} was cut to {found} bytes while it was open; {len(self.data)} are"
                " needed. Write it anew and load it again; Recording.load(path, mapped=False)"
                " keeps the numbers of a file that others may change."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a recording has its arrays in memory


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
            f" {_quoted(found.get('format'))}, not {FORMAT!r}; Recording.save writes one."
        )
    version = found.get("version")
    if version not in [str(known) for known in VERSIONS]:
        is_newer = isinstance(version, str) and version.isascii() and version.isdigit()
        way_out = "upgrade regard to read it" if is_newer else "the file is damaged"
        raise RecordingError(
            f"{path} is a recording of version {_quoted(version)}, this regard reads {VERSION} to"
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
                f"{path} is a damaged recording: tensor {_quoted(name)}, {code} {sizes}, lies at"
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
            f"{path} is a damaged recording: tensor {_quoted(name)} is {_quoted(entry)}; a dtype"
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
        return array.view(np.uint8) != 0
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
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(ml_dtypes.bfloat16)


def _arrays(spans: Mapping[str, Span], data: mmap.mmap | bytes, start: int) -> dict[str, Any]:
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
        raise ValueError(f"tensor {_quoted(min(arrays))} belongs to no layer.")
    others: dict[str, Recording] = {}
    for place, facts in enumerate(given[1:], 1):
        with _in_other(place):
            group = Recording(**facts)
        if group.group in others:
            raise ValueError(f"there are two groups {_quoted(group.group)}.")
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
            f"layer {index} has options {_quoted(scalars)}; "
            f"{', '.join(RECORDED_NUMBERS)} are known."
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


def _quoted(value: Any) -> str:
    """At most 60 characters, escaped: what a file says is shown, never interpreted."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
