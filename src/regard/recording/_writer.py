"""A file of a recording that is written layer by layer, while a model runs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from regard._base.files import CHUNK_BYTES, replaced_when_complete
from regard.recording import Layer, Recording
from regard.recording import _file as file

ROOM = 1 << 16  # for what the header says beside tokens: about 500 arrays
TOKEN_BYTES = 32  # of the room, for a token: its text, quotes, and escapes
WIDEST = 8  # bytes of a number
FACTS = ("tokens", "query_tokens", "boundary", "grids")


class _Written(NamedTuple):
    """An array in the file, or in the one beside it."""

    group: str
    name: str
    kind: file.Kind
    beside: int | None  # where it is in the file beside


class Writer:
    """Writes a recording layer by layer, and keeps no layer in memory.

    The file appears under its name at the end of the ``with`` block, when it is complete and on
    disk. After an error, and without ``finish``, there is none, and one that was there stays.

    Args:
        path: file to write, ``.safetensors`` or without an ending; one that exists is replaced, and
            passes on its permissions.
        tokens: how many are expected, in all groups together. Room for them is left at the
            start of the file; where they need more, the arrays are moved once.

    Raises:
        OSError: at the start of the block, the folder is missing or cannot be written.
        RecordingError: likewise, the name is a link that leads back to itself.
        TypeError, ValueError: ``tokens`` is no number, or a name of another kind of file.

    Example:
        ``with Writer(path, tokens=3) as writer:``, then for each layer
        ``writer.add(layer, group="decoder")``, and at last
        ``writer.finish({"decoder": {"tokens": ["a", "b", "c"]}}, model="small")``.
    """

    def __init__(self, path: str | Path, *, tokens: int = 0) -> None:
        file.check_name(path)
        if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)):
            raise TypeError(f"Writer: tokens is {tokens!r}; the number that is expected is needed.")
        if tokens < 0:
            raise ValueError(f"Writer: tokens is {tokens}; it must not be negative.")
        self._path = Path(path)
        room = min(ROOM + TOKEN_BYTES * int(tokens), file.HEADER_LIMIT)
        self._start = room // file.ALIGNMENT * file.ALIGNMENT  # of the arrays
        self._layers: dict[str, list[Layer[Any]]] = {}  # without arrays
        self._written: list[_Written] = []
        self._state = "not open: it is used as with Writer(path) as writer"
        self._opened = contextlib.ExitStack()
        self._room = file.copying_room()
        self._file: BinaryIO
        self._beside: BinaryIO | None = None

    def __enter__(self) -> Writer:
        self._opened.enter_context(file.no_loop(self._path))
        self._file = self._opened.enter_context(replaced_when_complete(self._path))
        self._file.seek(self._start)
        self._state = ""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and self._state != "finished":
            error = _NotFinishedError()
        self._state = "closed"
        self._opened.__exit__(type(error) if error else None, error, trace)

    def add(self, layer: Layer[Any], *, group: str = "") -> None:
        """Writes the arrays of a layer, the next one of its group.

        Args:
            layer: its arrays may be written to afterwards.
            group: name of the layers with the same tokens; needed where there are several.

        Raises:
            OSError: the disk is full, for example.
            RuntimeError: outside of the ``with`` block, after ``finish``, or after an error.
            TypeError: no layer, or a group that is no text.
        """
        self._require_open()
        if not isinstance(layer, Layer):
            raise TypeError(
                f"Writer: layer is {type(layer).__name__}; a regard.recording.Layer(query, key,"
                " value) is needed."
            )
        if not isinstance(group, str):
            raise TypeError(f"Writer: group is {type(group).__name__}; it must be a str.")
        layers = self._layers.setdefault(group, [])
        self._state = "broken: it failed to write a layer"
        for name, kind, array in file.wide_first(file.arrays_of_layer(layer)):
            self._add(_Written(group, f"layers.{len(layers)}.{name}", kind, None), array)
        self._state = ""
        layers.append(layer._outline())

    def _add(self, written: _Written, array: Any) -> None:
        """An array that would leave the next one at an odd place goes into a file beside."""
        target = self._file
        if written.kind.nbytes % WIDEST:
            if self._beside is None:
                made = tempfile.TemporaryFile(dir=self._path.resolve().parent)  # noqa: SIM115
                self._beside = self._opened.enter_context(made)
            target = self._beside
            written = written._replace(beside=target.tell())
        file.write_array(target, array, self._room)
        self._written.append(written)

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives groups other names, before ``finish``: names that are known only at the end.

        Args:
            names: the new name of each group.

        Raises:
            RuntimeError: as ``add``.
            ValueError: the groups are not those of the layers, or two get one name.
        """
        self._require_open()
        if names.keys() != self._layers.keys() or len({*names.values()}) < len(names):
            raise ValueError(
                f"Writer: names is {dict(names)}, and the groups are {list(self._layers)}; each"
                " needs a name of its own."
            )
        self._layers = {names[group]: layers for group, layers in self._layers.items()}
        self._written = [one._replace(group=names[one.group]) for one in self._written]

    def finish(self, groups: Mapping[str, Mapping[str, Any]], *, model: str = "") -> None:
        """Writes the header, after the last layer.

        Args:
            groups: for each group its ``tokens``, and where it has them ``query_tokens``,
                ``boundary`` and ``grids``, all as in ``Recording``; the first is the recording,
                the others its ``others``.
            model: name of the model, for people.

        Raises:
            OSError: as ``add``.
            RecordingError: the tokens are more than the header of a file takes.
            RuntimeError: as ``add``.
            ShapeError, TypeError, ValueError: as ``Recording``; or the groups are not those of the
                layers.
        """
        self._require_open()
        recording = self._recording(groups, model)
        self._state = "broken: it failed to finish"
        places = {name: place for place, name in enumerate(recording.groups)}
        ragged = [found for found in self._written if found.beside is not None]
        ragged.sort(key=lambda found: -found.kind.item_size)
        for found in ragged:
            _copy(self._beside, found.beside, self._file, found.kind.nbytes)
        even = [found for found in self._written if found.beside is None]
        named = (
            (file.prefix(places[found.group]) + found.name, found.kind)
            for found in (*even, *ragged)
        )
        header = file.encoded_header(recording, named)
        room = self._start - 8
        if len(header) > room:
            _move(self._file, self._start, len(header) - room)
        self._file.seek(0)
        file.write_header(self._file, header.ljust(room))
        self._state = "finished"

    def _sync(self) -> None:
        """Waits until all is on disk, before the file takes its name."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read_back(self) -> Recording[Any]:
        """What was finished, of which no file is to be left; its arrays are mapped."""
        self._state = "read back"
        self._file.flush()
        self._file.seek(0)
        return file.map_file(self._file, self._path)()

    def _recording(self, groups: Mapping[str, Mapping[str, Any]], model: str) -> Recording[Any]:
        """The recording without its arrays, checked."""
        if not isinstance(groups, Mapping):
            raise TypeError(f"Writer: groups is {type(groups).__name__}; a dict is needed.")
        if not groups or groups.keys() != self._layers.keys():
            raise ValueError(
                f"Writer: groups is of {list(groups)}, and layers were added to"
                f" {list(self._layers)}; the tokens of each of these are needed."
            )

        def made(name: str, **more: Any) -> Recording[Any]:
            if unknown := [fact for fact in groups[name] if fact not in FACTS]:
                raise TypeError(
                    f"Writer: group {name!r} has {unknown[0]!r}; there are {', '.join(FACTS)}."
                )
            given = {"layers": self._layers[name], "model": model, "group": name, **groups[name]}
            return Recording(**given, **more)

        first, *others = groups
        return made(first, others={name: made(name) for name in others})

    def _require_open(self) -> None:
        if self._state:
            raise RuntimeError(f"Writer: {self._path} is {self._state}.")


class _NotFinishedError(Exception):
    """Ends the block of a file that is not to be kept."""


def _copy(source: Any, begin: Any, target: BinaryIO, count: int) -> None:
    source.seek(begin)
    for at in range(0, count, CHUNK_BYTES):
        target.write(source.read(min(CHUNK_BYTES, count - at)))


def _move(file: BinaryIO, start: int, by: int) -> None:
    """Moves all from ``start`` on, backwards from the end, so that nothing is written over."""
    end = file.seek(0, 2)
    for at in reversed(range(start, end, CHUNK_BYTES)):
        file.seek(at)
        part = file.read(min(CHUNK_BYTES, end - at))
        file.seek(at + by)
        file.write(part)
