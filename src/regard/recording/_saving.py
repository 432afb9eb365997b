"""A recording is written to its file."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from regard._base.arrays import is_tensor
from regard._base.deferred import fetched
from regard._base.errors import RecordingError, a_type
from regard._base.files import replaced_when_complete
from regard._call import edits
from regard._call.options import RECORDED_ARRAYS, RECORDED_NUMBERS, RECORDED_PAIRS
from regard._weights.parts import counts_from_0
from regard.recording import Layer, Recording
from regard.recording._format import (
    ALIGNMENT,
    BLOCK_BYTES,
    FACTS,
    FORMAT,
    GRADIENT_VERSION,
    GROUPS_VERSION,
    HEADER_LIMIT,
    LEAST_ROOM,
    MOST_CHARACTERS,
    ROOM_BYTES,
    STATISTICS,
    TEXTS_VERSION,
    VECTORS,
    VERSION,
    Kind,
    check_name,
    code_of,
    no_loop,
    prefix,
)
from regard.recording._texts import arrays_of, has_pair

_ENCODER = json.JSONEncoder(separators=(",", ":"))


def write(recording: Recording, path: Path, statistics: bool = False) -> None:
    """Write ``recording`` to ``path``: the whole file under that name, or nothing."""
    check_name(path)
    for group in recording.groups.values():
        _check_layers(group)
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


def _check_layers(group: Recording) -> None:
    """Checks that what was assigned to layers since is what the recording's own numbers say."""
    for at, (number, layer) in enumerate(zip(group.layer_numbers, group.layers)):
        if not isinstance(layer.name, str):
            raise TypeError(
                f"recording: the name of layer {number} is {a_type(layer.name)}; it must be a str."
            )
        if number != (at if layer.number is None else layer.number):
            raise ValueError(
                f"recording: layer {number} was given the number {layer.number} since the recording"
                " was made. Make another, Recording(tokens, layers), or give it back its own."
            )
        layer._check_names()


def _layers_to_write(group: Recording, statistics: bool) -> Iterable[Layer]:
    if not statistics:
        return group.layers
    return (one._with_statistics(weights) for one, weights in zip(group.layers, group.weights))


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
    """The arrays of the lists of texts of all groups that do not go into the header.

    Args:
        recording: whose.
        most: characters of a list in the header; each token counts as one more.
            One in which JSON would change a text never is there.
    """
    for place, group in enumerate(recording.groups.values()):
        for name, texts in _texts_of(group).items():
            if len(texts) + sum(map(len, texts)) > most or has_pair(texts):
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


def facts_of(layers: Sequence[Layer]) -> dict[str, str]:
    """What the header says of the layers of a group, each as JSON; what is as usual is left out."""
    facts: dict[str, Any] = {"options": [_numbers_of(layer) for layer in layers]}
    if any(layer.name for layer in layers):
        facts["names"] = [layer.name for layer in layers]
    if any(layer.number is not None for layer in layers):
        facts["numbers"] = [layer.number for layer in layers]
    if not all(counts_from_0(layer.head_numbers) for layer in layers):
        facts["head_numbers"] = [layer.head_numbers for layer in layers]
    if any(layer.weights_only for layer in layers):
        facts["weights_only"] = [layer.weights_only for layer in layers]
    return {name: json.dumps(fact) for name, fact in facts.items()}


def encoded_header(
    recording: Recording,
    named: Iterable[tuple[str, Kind]],
    layers_facts: Callable[[tuple[Layer, ...]], dict[str, str]] = facts_of,
) -> bytes:
    """The header of a file of a recording, with all groups.

    Args:
        recording: its arrays are not read.
        named: name and kind of each array, in the order of the data.
        layers_facts: ``facts_of``, or one that remembers.

    Raises:
        RecordingError: it is longer than a header may be.
    """
    named = tuple(named)
    arrays = _listed(named)
    first, *others = (
        _in_order(_facts(group, prefix(place), arrays.texts) | layers_facts(group.layers))
        for place, group in enumerate(recording.groups.values())
    )
    version = max(arrays.version, GROUPS_VERSION if others else VERSION)
    metadata = {"format": FORMAT, "version": str(version)} | first
    if others:
        metadata["others"] = f"[{', '.join(map(_object, others))}]"
    told = _ENCODER.encode({"__metadata__": metadata})
    encoded = f"{told[:-1]}{arrays.entries}}}".encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    if len(encoded) > HEADER_LIMIT:
        raise RecordingError(
            f"recording: what is known of it beside its arrays takes {len(encoded)} bytes, and"
            f" {HEADER_LIMIT} fit into a safetensors header; save parts of the text, or some of the"
            " layers, as recordings of their own."
        )
    return encoded


class _Listed(NamedTuple):
    """What the header says of the arrays."""

    entries: str  # after its first
    texts: frozenset[str]  # the lists of texts that are arrays
    version: int  # the least that has such arrays


@functools.lru_cache(4)
def _listed(named: tuple[tuple[str, Kind], ...]) -> _Listed:
    found, end = {}, 0
    for name, kind in named:
        begin, end = end, end + kind.nbytes
        found[name] = {"dtype": kind.code, "shape": kind.shape, "data_offsets": [begin, end]}
    endings = {name.rpartition(".")[2] for name in found}
    version = GRADIENT_VERSION if "gradient" in endings else VERSION
    version = version if endings.isdisjoint(("offsets", "maximum")) else TEXTS_VERSION
    texts = (name.removesuffix(".offsets") for name in found if name.endswith(".offsets"))
    entries = f",{_ENCODER.encode(found)[1:-1]}" if found else ""
    return _Listed(entries, frozenset(texts), version)


def _in_order(facts: dict[str, str]) -> dict[str, str]:
    return {name: facts[name] for name in FACTS if name in facts}


def _object(parts: dict[str, str]) -> str:
    """An object of JSON, of parts that are JSON."""
    return f"{{{', '.join(f'{json.dumps(name)}: {part}' for name, part in parts.items())}}}"


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


def _facts(recording: Recording, before: str, apart: Collection[str]) -> dict[str, str]:
    """What the header says of a group but its layers, likewise.

    Args:
        recording: the group.
        before: what the names of its arrays begin with.
        apart: the lists of texts that are arrays.
    """
    facts: dict[str, Any] = {"model": recording.model}
    for name, texts in _texts_of(recording).items():
        if f"{before}{name}" not in apart:
            facts[name] = texts
    if recording.boundary is not None:
        facts["boundary"] = recording.boundary
    if recording.grids:
        facts["grids"] = recording.grids
    if recording.group:
        facts["group"] = recording.group
    return {name: json.dumps(fact) for name, fact in facts.items()}


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


class Room:
    """Memory that arrays are copied into, for NumPy and for torch."""

    def __init__(self, size: int) -> None:
        self.data = np.empty(size, np.uint8)
        self._tensors: dict[Any, Any] = {}  # the same, by torch's dtypes

    def __len__(self) -> int:
        return len(self.data)

    def tensor(self, dtype: Any) -> Any:
        """All of it as a tensor of a dtype of torch."""
        if (found := self._tensors.get(dtype)) is None:
            torch = sys.modules["torch"]
            with torch.inference_mode(False):  # so that it may be written to in any mode
                found = self._tensors[dtype] = torch.from_numpy(self.data).view(dtype)
        return found


_spare: list[Room] = []  # the last room that was used


@contextlib.contextmanager
def room(parts: int = 1) -> Iterator[Room]:
    """Memory for a ``Target``, kept for the next one: new pages cost more than copying does.

    Args:
        parts: how many targets share what one has.
    """
    if parts > 1:
        yield Room(max(ROOM_BYTES // parts, LEAST_ROOM) // ALIGNMENT * ALIGNMENT)
        return
    try:
        found = _spare.pop()
    except IndexError:
        found = Room(ROOM_BYTES)
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

    def __init__(self, file: BinaryIO, room: Room, start: int | None = None) -> None:
        self._file, self._room, self._start = file, room, start
        self.filled = 0
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
            room = self._room.data[start : self.filled].view(array.dtype.newbyteorder("<"))
            np.copyto(room.reshape(array.shape), array)

    def _gather(self, x: Any, start: int) -> None:
        """Copies a tensor into the room by torch: amid a model its code is at hand, NumPy's not."""
        room = self._room.tensor(x.dtype)
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
        block = self._room.data[:BLOCK_BYTES]
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
            self._write(self._room.data[:filled].data)

    def _write(self, data: memoryview) -> None:
        if not self.has_begun and self._start is not None:
            self._file.seek(self._start)
        self.has_begun = True
        write_all(self._file, data)


def _on_cpu(array: Any) -> np.ndarray:
    """An array of NumPy with these numbers; those of bfloat16 as integers, where it has none."""
    if is_tensor(array):
        if code_of(array.dtype) == "BF16":
            array = array.detach().view(sys.modules["torch"].int16)
        array = array.numpy(force=True)
    found: np.ndarray = array
    return found


def bytes_of(array: Any) -> memoryview:
    flat = np.ascontiguousarray(_on_cpu(array)).reshape(-1)
    return flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8).data
