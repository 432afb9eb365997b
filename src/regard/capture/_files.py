"""The files of a recording that is written while its model runs."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.capture._taken import Described, Taken
from regard.recording import Layer, Recording
from regard.recording._format import ENDING, check_name
from regard.recording._loading import opened
from regard.recording._writer import Form, Group, Writer

Facts = dict[str, dict[str, Any]]
Mold = tuple[Form, list[Any]]  # of layers, with their arrays after the vectors
Unread = Callable[[], Recording[Any]]  # a file in its place, read where that is called


class Write(NamedTuple):
    """What writes layers of one mold, which differ in their vectors, name and number."""

    writer: Writer
    group: Group
    mold: Mold

    def __call__(self, vectors: Sequence[Any], name: str, number: int | None) -> None:
        form, rest = self.mold
        self.writer._write(self.group, form, (*vectors, *rest), name, number)


class Files:
    """A file for each batch element, which has its name when all are whole.

    Args:
        path: of the file; of several, each gets its number: ``name-0.safetensors``.

    Raises:
        OSError: no such folder, or it cannot be written.
        ValueError: a name of another kind of file.
    """

    def __init__(self, path: str | Path) -> None:
        check_name(path)
        self._path = Path(path).absolute()
        folder = self._path.parent
        if not os.access(f"{folder}/.", os.W_OK | os.X_OK):
            if not folder.is_dir():
                raise FileNotFoundError(f"record: {folder}: no such folder, for {path}.")
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if os.access(f"{self._path}/.", os.F_OK):
            raise IsADirectoryError(f"record: {path} is a folder; name a file.")
        self._writing = contextlib.ExitStack()
        self._writers: dict[tuple[int, int], Writer] = {}  # by batch and element

    def add(self, taken: Taken, layers: list[Layer[Any]]) -> list[Write]:
        """Writes the first call's layer of each batch element.

        Returns:
            For each element, what writes a layer that differs in its vectors, name and number.
        """
        found = []
        for b, layer in enumerate(layers):
            writer, count = self._writer(taken, b), 2 if layer._value is None else 3
            form, arrays = Form.of(layer)
            found.append(Write(writer, writer._group(taken.group), (form, arrays[count:])))
            found[b](arrays[:count], layer.name, layer.number)
        return found

    def writes(self, taken: Taken, molds: list[Mold]) -> list[Write]:
        """For each batch element, what writes such layers into its file."""
        writers = [self._writer(taken, b) for b in range(len(molds))]
        return [Write(x, x._group(taken.group), mold) for x, mold in zip(writers, molds)]

    def _writer(self, taken: Taken, b: int) -> Writer:
        if (writer := self._writers.get((taken.batch, b))) is None:
            writer = Writer(self._place(b, taken.batch), tokens=3 * taken.queries)
            writer._parts = taken.batch
            self._writers[taken.batch, b] = self._writing.enter_context(writer)
        return writer

    def read_back(self, taken: Iterable[Taken]) -> None:
        """Gives all that was written to those it is of: a generation goes on with them."""
        taken = [one for one in taken if not one.firsts]
        for (batch, b), writer in self._writers.items():
            own = {one.group: one for one in taken if one.batch == batch}
            writer.finish({name: one.facts(b, Described()) for name, one in own.items()})
            with warnings.catch_warnings():  # of bfloat16 without ml_dtypes, which is put back
                warnings.simplefilter("ignore")
                groups = writer._mapped()().groups
            writer._drop()
            layers = {name: iter(group.layers) for name, group in groups.items()}
            for one in taken:
                if one.batch == batch:
                    one.firsts.append(next(layers[one.group]))
        self._writing.close()
        self._writers = {}

    def finished(self, facts: list[Facts], names: dict[str, str], model: str) -> list[Unread]:
        """Puts the files in their places; those of other batches are left out.

        Args:
            facts: of each batch element, by the names of the groups.
            names: the groups of these names.
        """
        writers = [self._writers[len(facts), b] for b in range(len(facts))]
        for writer, own in zip(writers, facts):
            writer.rename({group: name for name, group in names.items()})
            writer.finish(own, model=model)
        if len(writers) > 1:  # all of them, or none
            for writer in writers:
                writer._sync()
        # Windows gives a mapped file no other name.
        mapped = [writer._mapped() for writer in writers] if os.name == "posix" else []
        self._writing.close()
        self._tell_of_older(len(facts))
        return mapped or self._opened(len(facts))

    def saved(self, recordings: list[Recording[Any]]) -> list[Unread]:
        """Writes recordings that were finished in memory."""
        for b, recording in enumerate(recordings):
            recording.save(self._place(b, len(recordings)))
        self._tell_of_older(len(recordings))
        return self._opened(len(recordings))

    def _tell_of_older(self, count: int) -> None:
        """Warns of a file of the next number, which who reads all of them would take for one."""
        if count > 1 and (older := self._place(count, count + 1)).exists():
            warnings.warn(
                f"record: {older} was there before; it is none of these {count} texts. Remove it,"
                " or record to another name.",
                stacklevel=8,
            )

    def close(self, error: BaseException | None = None) -> None:
        """Removes whatever is unfinished."""
        kind = None if error is None else type(error)
        self._writing.__exit__(kind, error, None if error is None else error.__traceback__)

    def _opened(self, count: int) -> list[Unread]:
        return [opened(self._place(b, count)) for b in range(count)]

    def _place(self, b: int, count: int) -> Path:
        name = self._path
        if name.suffix.lower() != ENDING:  # numbers are no ending: gpt-3.5
            name = name.with_name(f"{name.name}{ENDING}")
        return name if count == 1 else name.with_stem(f"{name.stem}-{b}")
