"""The files of a recording that is written while its model runs."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from regard._base.files import check_ending
from regard.capture._taken import Described, Taken
from regard.recording import Layer, Recording
from regard.recording._file import opened
from regard.recording._writer import Writer

Facts = dict[str, dict[str, Any]]
Unread = Callable[[], Recording[Any]]  # a file in its place, read where that is called


class Files:
    """A file for each batch element, which has its name when all are whole.

    Args:
        path: of the file; of several, each gets its number: ``name-0.safetensors``.

    Raises:
        OSError: no such folder, or it cannot be written.
        ValueError: a name of another kind of file.
    """

    def __init__(self, path: str | Path) -> None:
        check_ending(path, (".safetensors",), "a recording")
        self._path = Path(path).resolve()
        folder = self._path.parent
        if not folder.is_dir():
            raise FileNotFoundError(f"record: {folder}: no such folder, for {path}.")
        if self._path.is_dir():
            raise IsADirectoryError(f"record: {path} is a folder; name a file.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        self._writing = contextlib.ExitStack()
        self._writers: dict[tuple[int, int], Writer] = {}  # by batch and element
        self.was_read = False

    def add(self, layer: Layer[Any], taken: Taken, b: int) -> None:
        """Writes the first call's layer of a batch element."""
        place = taken.batch, b
        if place not in self._writers:
            writer = Writer(self._place(b, taken.batch), tokens=3 * layer.query.shape[1])
            self._writers[place] = self._writing.enter_context(writer)
        self._writers[place].add(layer, group=repr(taken.group))

    def read_back(self, taken: Iterable[Taken]) -> None:
        """Gives all that was written to those it is of: a generation goes on with them."""
        self.was_read = True
        taken = [one for one in taken if not one.firsts]
        for (batch, b), writer in self._writers.items():
            own = {repr(one.group): one for one in taken if one.batch == batch}
            writer.finish({name: one.facts(b, Described()) for name, one in own.items()})
            with warnings.catch_warnings():  # of bfloat16 without ml_dtypes, which is put back
                warnings.simplefilter("ignore")
                groups = writer._read_back().groups
            layers = {name: iter(group.layers) for name, group in groups.items()}
            for one in taken:
                if one.batch == batch:
                    one.firsts.append(next(layers[repr(one.group)]))
        self._writing.close()
        self._writers = {}

    def finished(
        self, facts: list[Facts], names: dict[str, tuple[Any, ...]], model: str
    ) -> list[Unread]:
        """Puts the files in their places; those of other batches are left out.

        Args:
            facts: of each batch element, by the names of the groups.
            names: the groups of these names.
        """
        count = len(facts)
        for b in range(count):
            writer = self._writers[count, b]
            writer.rename({repr(group): name for name, group in names.items()})
            writer.finish(facts[b], model=model)
        if count > 1:  # all of them, or none
            for b in range(count):
                self._writers[count, b]._sync()
        self._writing.close()
        return self._opened(count)

    def saved(self, recordings: list[Recording[Any]]) -> list[Unread]:
        """Writes recordings that were finished in memory."""
        for b, recording in enumerate(recordings):
            recording.save(self._place(b, len(recordings)))
        return self._opened(len(recordings))

    def close(self, error: BaseException | None = None) -> None:
        """Removes whatever is unfinished."""
        kind = None if error is None else type(error)
        self._writing.__exit__(kind, error, None if error is None else error.__traceback__)

    def _opened(self, count: int) -> list[Unread]:
        return [opened(self._place(b, count)) for b in range(count)]

    def _place(self, b: int, count: int) -> Path:
        name = self._path.with_suffix(".safetensors")
        return name if count == 1 else name.with_stem(f"{name.stem}-{b}")
