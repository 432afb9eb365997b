"""A file of a recording that is written layer by layer, while a model runs."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from regard._base.files import CHUNK_BYTES, replaced_when_complete
from regard._call.checks import read_flag
from regard.recording import Layer, Recording, _loading, _saving
from regard.recording._format import (
    ALIGNMENT,
    BLOCK_BYTES,
    HEADER_LIMIT,
    MOST_CHARACTERS,
    Kind,
    check_name,
    no_loop,
    prefix,
)

ROOM = 1 << 16  # for what the header says beside tokens: about 500 arrays
TOKEN_BYTES = 32  # of the room, for a token: its text, quotes, and escapes
WIDEST = 8  # bytes of a number
FACTS = ("tokens", "query_tokens", "boundary", "grids")


_Named = list[tuple[str, np.ndarray]]
_Kind = tuple[str, Kind]


class Group:
    """The layers with the same tokens; their name may change."""

    def __init__(self, name: str) -> None:
        self.name = name


class Form(NamedTuple):
    """What layers are that differ in name, number and the numbers in their arrays alone."""

    outline: Layer[Any]
    arrays: tuple[tuple[str, Kind], ...]  # by their names in a layer
    is_even: bool  # whether the next array may follow each of them

    @classmethod
    def of(cls, layer: Layer[Any]) -> tuple[Form, list[Any]]:
        """That of a layer, and its arrays."""
        named = [*_saving.arrays_of_layer(layer)]
        kinds = tuple((name, Kind.of(array)) for name, array in named)
        is_even = all(kind.nbytes % WIDEST == 0 for _, kind in kinds)
        return cls(layer._outline(), kinds, is_even), [array for _, array in named]


class _Added(NamedTuple):
    """A layer in the file."""

    group: Group
    form: Form
    name: str
    number: int | None


class _Aside(NamedTuple):
    """An array in the file beside."""

    layer: int
    name: str
    kind: Kind
    begin: int


class Writer:
    """Writes a recording layer by layer, and keeps none in memory but the last few small ones.

    Small arrays are gathered, up to 4 MiB, and written together. The file appears under its name
    at the end of the ``with`` block, when it is complete and on disk. After an error, and without
    ``finish``, there is none, and one that was there stays.

    Args:
        path: file to write, ``.safetensors`` or without an ending; one that exists is replaced, and
            passes on its permissions.
        tokens: how many are expected, in all groups together. Room for the texts of up to 65,536
            is left at the start of the file, where other programs find them most easily. More texts
            than fit there are arrays, so it need not be known.
        statistics: compute the row statistics of each layer that has none, and keep them in the
            file, as ``Recording.save`` does.

    Raises:
        OSError: at the start of the block, the folder is missing or cannot be written.
        RecordingError: likewise, the name is a link that leads back to itself.
        TypeError, ValueError: ``tokens`` is no number, ``statistics`` no bool, or a name of another
            kind of file.

    Example:
        ``with Writer(path, tokens=3) as writer:``, then for each layer
        ``writer.add(layer, group="decoder")``, and at last
        ``writer.finish({"decoder": {"tokens": ["a", "b", "c"]}}, model="small")``.
    """

    def __init__(self, path: str | Path, *, tokens: int = 0, statistics: bool = False) -> None:
        check_name(path)
        if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)):
            raise TypeError(f"Writer: tokens is {tokens!r}; the number that is expected is needed.")
        if tokens < 0:
            raise ValueError(f"Writer: tokens is {tokens}; it must not be negative.")
        self._path = Path(path)
        self._keeps_statistics = read_flag("statistics", statistics, "Writer")
        texts = int(tokens) if tokens <= MOST_CHARACTERS else 0
        room = min(ROOM + TOKEN_BYTES * texts, HEADER_LIMIT)
        self._start = room // ALIGNMENT * ALIGNMENT  # of the arrays
        self._groups: dict[str, Group] = {}
        self._added: list[_Added] = []
        self._aside: list[_Aside] = []
        self._state = "not open: it is used as with Writer(path) as writer"
        self._opened = contextlib.ExitStack()
        self._parts = 1  # how many writers share the memory that one has
        self._file: BinaryIO
        self._target: _saving.Target
        self._beside: BinaryIO | None = None
        self._header: bytes

    def __enter__(self) -> Writer:
        with contextlib.ExitStack() as opened:  # an error here ends what was entered
            opened.enter_context(no_loop(self._path))
            self._file = opened.enter_context(replaced_when_complete(self._path, buffering=0))
            room = opened.enter_context(_saving.room(self._parts))
            self._target = _saving.Target(self._file, room, self._start)
            self._opened = opened.pop_all()
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
            ShapeError, ValueError: numbers that were assigned to the layer since it was made.
            TypeError: no layer, or a group or the name of the layer that is no text.
        """
        self._require_open()
        if not isinstance(layer, Layer):
            raise TypeError(
                f"Writer: layer is {type(layer).__name__}; a regard.recording.Layer(query, key,"
                " value) is needed."
            )
        if not isinstance(group, str):
            raise TypeError(f"Writer: group is {type(group).__name__}; it must be a str.")
        layer._check_names()
        if self._keeps_statistics:
            layer = layer._with_statistics()
        form, arrays = Form.of(layer)
        self._write(self._group(group), form, arrays, layer.name, layer.number)

    def _group(self, name: str) -> Group:
        if (found := self._groups.get(name)) is None:
            found = self._groups[name] = Group(name)
        return found

    def _write(
        self, group: Group, form: Form, arrays: Sequence[Any], name: str, number: int | None
    ) -> None:
        """Writes the arrays of a layer of that form."""
        self._state = "broken: it failed to write a layer"
        if form.is_even:
            for array in arrays:
                self._target.add(array)
        else:
            for (what, kind), array in zip(form.arrays, arrays):
                if kind.nbytes % WIDEST:
                    self._set_aside(what, kind, array)
                else:
                    self._target.add(array)
        self._added.append(_Added(group, form, name, number))
        self._state = ""

    def _set_aside(self, name: str, kind: Kind, array: Any) -> None:
        """Writes an array that would leave the next one at an odd place into a file beside."""
        if self._beside is None:
            made = tempfile.TemporaryFile(dir=self._path.resolve().parent)  # noqa: SIM115
            self._beside = self._opened.enter_context(made)
        self._aside.append(_Aside(len(self._added), name, kind, self._beside.tell()))
        beside = _saving.Target(self._beside, _saving.Room(BLOCK_BYTES))
        beside.add(array)
        beside.flush()

    def _add_aside(self, begin: int, count: int) -> None:
        beside: Any = self._beside
        beside.seek(begin)
        for at in range(0, count, CHUNK_BYTES):
            part = beside.read(min(CHUNK_BYTES, count - at))
            self._target.add(np.frombuffer(part, np.uint8))

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives groups other names, before ``finish``: names that are known only at the end.

        Args:
            names: the new name of each group.

        Raises:
            RuntimeError: as ``add``.
            ValueError: the groups are not those of the layers, or two get one name.
        """
        self._require_open()
        if names.keys() != self._groups.keys() or len({*names.values()}) < len(names):
            raise ValueError(
                f"Writer: names is {dict(names)}, and the groups are {list(self._groups)}; each"
                " needs a name of its own."
            )
        for old, group in self._groups.items():
            group.name = names[old]
        self._groups = {group.name: group for group in self._groups.values()}

    def finish(self, groups: Mapping[str, Mapping[str, Any]], *, model: str = "") -> None:
        """Writes the header, after the last layer.

        Args:
            groups: for each group its ``tokens``, and where it has them ``query_tokens``,
                ``boundary`` and ``grids``, all as in ``Recording``; the first is the recording,
                the others its ``others``.
            model: name of the model, for people.

        Raises:
            OSError: as ``add``.
            RecordingError: names and options are more than the header of a file takes.
            RuntimeError: as ``add``.
            ShapeError, TypeError, ValueError: as ``Recording``; or the groups are not those of the
                layers.
        """
        self._require_open()
        sketch, recording = self._recording(groups, model)
        self._state = "broken: it failed to finish"
        self._aside.sort(key=lambda one: -one.kind.item_size)
        room = self._start - 8
        wide, narrow = _texts(recording)
        header = self._header_with(sketch, recording, wide, narrow)
        if self._target.has_begun and len(header) > room:
            wide, narrow = _texts(recording, 0)
            header = self._header_with(sketch, recording, wide, narrow)
        for _, array in wide:
            self._target.add(array)
        for one in self._aside:
            self._add_aside(one.begin, one.kind.nbytes)
        for _, array in narrow:
            self._target.add(array)
        if not self._target.has_begun:  # then there is no room that must be filled
            room = len(header)
            _saving.reserve(self._file, 8 + room + self._target.filled)
        elif len(header) > room:
            self._target.flush()
            _move(self._file, self._start, len(header) - room)
        self._target.flush(8 + room)
        self._header = header.ljust(room)
        self._file.seek(0)
        _saving.write_header(self._file, self._header)
        self._state = "finished"

    def _header_with(
        self, sketch: _Sketch, recording: Recording[Any], wide: _Named, narrow: _Named
    ) -> bytes:
        """The header of a file that has these arrays too, before and after those set aside."""
        first, last = ([(name, Kind.of(x)) for name, x in texts] for texts in (wide, narrow))
        aside = [(sketch.befores[one.layer] + one.name, one.kind) for one in self._aside]
        named = [*sketch.even, *first, *aside, *last]
        return _saving.encoded_header(recording, named, _facts_of)

    def _sync(self) -> None:
        """Waits until all is on disk, before the file takes its name."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _mapped(self) -> Callable[[], Recording[Any]]:
        """Makes the recording of what was finished, whatever becomes of the file's name."""
        return _loading.map_later(self._header, self._file, self._path)

    def _drop(self) -> None:
        """Lets what was finished leave no file."""
        self._state = "read back"

    def _recording(
        self, groups: Mapping[str, Mapping[str, Any]], model: str
    ) -> tuple[_Sketch, Recording[Any]]:
        """The recording without its arrays, checked."""
        if not isinstance(groups, Mapping):
            raise TypeError(f"Writer: groups is {type(groups).__name__}; a dict is needed.")
        if not groups or groups.keys() != self._groups.keys():
            raise ValueError(
                f"Writer: groups is of {list(groups)}, and layers were added to"
                f" {list(self._groups)}; the tokens of each of these are needed."
            )

        place = {name: n for n, name in enumerate(groups)}
        sketch = _sketched(tuple((place[one.group.name], *one[1:]) for one in self._added))
        layers = dict(zip(groups, sketch.layers))

        def made(name: str, **more: Any) -> Recording[Any]:
            if unknown := [fact for fact in groups[name] if fact not in FACTS]:
                raise TypeError(
                    f"Writer: group {name!r} has {unknown[0]!r}; there are {', '.join(FACTS)}."
                )
            given = {"layers": layers[name], "model": model, "group": name, **groups[name]}
            return Recording(**given, **more)

        first, *others = groups
        return sketch, made(first, others={name: made(name) for name in others})

    def _require_open(self) -> None:
        if self._state:
            raise RuntimeError(f"Writer: {self._path} is {self._state}.")


class _Sketch(NamedTuple):
    """A file without the texts of tokens and the numbers in its arrays."""

    layers: tuple[tuple[Layer[Any], ...], ...]  # of each group
    befores: list[str]  # of each layer, what the names of its arrays begin with
    even: list[_Kind]  # name and kind of each array that is not set aside, in their order


@functools.lru_cache(8)  # for passes of one model
def _sketched(added: tuple[tuple[int, Form, str, int | None], ...]) -> _Sketch:
    """That of a file.

    Args:
        added: the place of the group, form, name and number of each layer.
    """
    layers: list[list[Layer[Any]]] = [[] for _ in {place for place, *_ in added}]
    befores, even = [], []
    for place, form, own, number in added:
        befores.append(f"{prefix(place)}layers.{len(layers[place])}.")
        layers[place].append(form.outline._named(own, number))
        for name, kind in form.arrays:
            if kind.nbytes % WIDEST == 0:
                even.append((befores[-1] + name, kind))
    return _Sketch(tuple(map(tuple, layers)), befores, even)


# Of layers of a sketch, which hold no arrays.
_facts_of = functools.lru_cache(8)(_saving.facts_of)


def _texts(recording: Recording[Any], most: int = MOST_CHARACTERS) -> tuple[_Named, _Named]:
    """The texts that are arrays: where they begin, and their bytes."""
    found = [*_saving.arrays_of_texts(recording, most)]
    return found[::2], found[1::2]


class _NotFinishedError(Exception):
    """Ends the block of a file that is not to be kept."""


def _move(file: BinaryIO, start: int, by: int) -> None:
    """Moves all from ``start`` on, backwards from the end, so that nothing is written over."""
    end = file.seek(0, 2)
    for at in reversed(range(start, end, CHUNK_BYTES)):
        file.seek(at)
        part = file.read(min(CHUNK_BYTES, end - at))
        file.seek(at + by)
        _saving.write_all(file, part)
