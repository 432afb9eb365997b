"""The files of a recording that is written while its model runs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from regard._base.files import check_ending
from regard.capture._taken import Described, Taken
from regard.recording import Layer, Recording, Writer

Facts = dict[str, dict[str, Any]]


class Files:
    """A file for each batch element, in a folder beside its place until it is whole.

    Args:
        path: of the file; of several, each gets its number: ``name-0.safetensors``.

    Raises:
        OSError: no such folder, or it cannot be written.
        ValueError: a name of another kind of file.
    """

    def __init__(self, path: str | Path) -> None:
        check_ending(path, (".safetensors",), "a recording")
        self._path = Path(path).resolve()
        self._folder = tempfile.TemporaryDirectory(prefix=".regard-", dir=self._path.parent)
        self._writing = contextlib.ExitStack()
        self._writers: list[Writer] = []

    def add(self, layer: Layer[Any], group: tuple[Any, ...], b: int) -> None:
        """Writes the first call's layer of a batch element."""
        if b == len(self._writers):
            writer = Writer(self._part(b), tokens=3 * layer.query.shape[1])
            self._writers.append(self._writing.enter_context(writer))
        self._writers[b].add(layer, group=repr(group))

    def read_back(self, taken: Iterable[Taken]) -> None:
        """Gives all that was written to those it is of: a generation goes on with them."""
        taken = list(taken)
        first = {repr(one.group): one for one in taken}
        for b, writer in enumerate(self._writers):
            writer.finish({name: one.facts(b, Described()) for name, one in first.items()})
        self._writing.close()
        for b in range(len(self._writers)):
            with warnings.catch_warnings():  # of bfloat16 without ml_dtypes, which is put back
                warnings.simplefilter("ignore")
                groups = Recording.load(self._part(b)).groups
            layers = {name: iter(groups[name].layers) for name in first}
            for one in taken:
                one.firsts.append(next(layers[repr(one.group)]))
        self._writers = []

    def finished(
        self, facts: list[Facts], names: dict[str, tuple[Any, ...]], model: str
    ) -> list[Recording[Any]]:
        """Puts the files in their places.

        Args:
            facts: of each batch element, by the names of the groups.
            names: the groups of these names.
        """
        for writer, of_groups in zip(self._writers, facts):
            writer.rename({repr(group): name for name, group in names.items()})
            writer.finish(of_groups, model=model)
        self._writing.close()
        for b in range(len(facts)):
            if self._place(b, len(facts)).exists():
                shutil.copymode(self._place(b, len(facts)), self._part(b))
            self._part(b).replace(self._place(b, len(facts)))
        return self._loaded(len(facts))

    def saved(self, recordings: list[Recording[Any]]) -> list[Recording[Any]]:
        """Writes recordings that were finished in memory."""
        for b, recording in enumerate(recordings):
            recording.save(self._place(b, len(recordings)))
        return self._loaded(len(recordings))

    def close(self, error: BaseException | None = None) -> None:
        """Removes whatever is unfinished."""
        kind = None if error is None else type(error)
        self._writing.__exit__(kind, error, None if error is None else error.__traceback__)
        self._folder.cleanup()

    def _loaded(self, count: int) -> list[Recording[Any]]:
        return [Recording.load(self._place(b, count)) for b in range(count)]

    def _part(self, b: int) -> Path:
        return Path(self._folder.name) / f"{b}.safetensors"

    def _place(self, b: int, count: int) -> Path:
        name = self._path.with_suffix(".safetensors")
        return name if count == 1 else name.with_stem(f"{name.stem}-{b}")
