"""``survey.json``: all that a shard's file follows from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard._base.files import open_file, quoted, replaced_when_complete
from regard.survey._corpus import Source

NAME = "survey.json"
FORMAT = 1
REST = "dropped"  # the tokens of a document beyond max_tokens
NEEDED: dict[str, dict[str, type]] = {  # what is read of each part, and its type
    "versions": {},
    "model": {"name": str},
    "settings": {
        "max_tokens": int, "every": int, "column": str, "documents": bool, "threads": int,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A survey: its model, settings, and the documents of each shard.

    Attributes:
        versions: of the packages that the numbers depend on.
        model: ``name``, and hashes of ``weights`` and ``tokenizer``; of recordings the name alone.
        settings: ``max_tokens``, ``rest``, ``every``, ``column``, ``documents`` and ``threads``.
        shards: the sources of each.
    """

    versions: dict[str, str]
    model: dict[str, str]
    settings: dict[str, Any]
    shards: tuple[tuple[Source, ...], ...]

    @property
    def _parts(self) -> dict[str, Any]:
        return {
            "format": FORMAT, "versions": self.versions, "model": self.model,
            "settings": self.settings,
            "shards": [[source.to_json() for source in shard] for shard in self.shards],
        }  # fmt: skip

    @property
    def text(self) -> str:
        """As it is written, with the hash."""
        return _written(self._parts | {"sha256": self.sha256})

    @property
    def data(self) -> bytes:
        """The text in UTF-8; of names that are none, ``\\udcff`` stands for the byte 0xff."""
        return _encoded(self.text)

    @functools.cached_property
    def sha256(self) -> str:
        """Of the text without it: what a shard's file says that it is of."""
        return hashlib.sha256(_encoded(_written(self._parts))).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes it, whole or not at all.

        Raises:
            FileExistsError: another has begun a survey in the folder.
        """
        with replaced_when_complete(folder / NAME, first=True) as file:
            file.write(self.data)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Reads that of a folder, again only where it was written anew.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is no manifest, or of another format.
        """
        path = folder / NAME
        if not path.is_file():
            raise FileNotFoundError(
                f"survey: {folder}: there is no survey ({NAME}). Name texts to begin one:"
                f" regard survey PATHS... -o {quoted(folder)}"
            )
        status = path.stat()
        return cls._read(path, status.st_mtime_ns, status.st_size)

    @classmethod
    @functools.lru_cache(maxsize=2)
    def _read(cls, path: Path, mtime_ns: int, size: int) -> Manifest:
        try:
            with open_file(path) as file:
                found = json.loads(file.read())
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}; this regard reads {FORMAT}")
            for part, types in NEEDED.items():
                own = dict(found[part])
                for name, kind in types.items():
                    if type(own[name]) is not kind:
                        raise TypeError(f"{name} is {own[name]!r}, and no {kind.__name__}")
            shards = tuple(
                tuple(Source.of_json(source) for source in shard) for shard in found["shards"]
            )
            made = cls(found["versions"], found["model"], found["settings"], shards)
            if found.get("sha256", made.sha256) != made.sha256:  # those of before have none
                raise ValueError("its checksum is another: it was changed")
            return made
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(
                f"survey: {path}: not a manifest of regard ({reason}). Put the one of the survey"
                " back, or name another folder."
            ) from error

    def require_same(self, other: Manifest, folder: Path) -> None:
        """Raises ValueError where another survey is asked for than the folder has.

        Args:
            other: what is asked for.
        """
        difference = next(self._differences(other), None)
        if difference is not None:
            raise ValueError(
                f"survey: {folder} has another survey: {difference}. Name another folder, or remove"
                " this one."
            )

    def _differences(self, other: Manifest) -> Iterator[str]:
        for part in ("model", "settings", "versions"):
            there, asked = getattr(self, part), getattr(other, part)
            for name in dict.fromkeys((*there, *asked)):  # what was asked for before what follows
                if there.get(name) != asked.get(name):
                    label = "model" if name == "name" else name
                    yield (
                        f"it has {label} {_told(there.get(name))}, and {_told(asked.get(name))} is"
                        " asked for"
                    )
        there, asked = (
            {(source.path, source.rows): source for shard in one.shards for source in shard}
            for one in (self, other)
        )
        for path, rows in sorted({*there} ^ {*asked}):
            if path in {name for name, _ in there} & {name for name, _ in asked}:
                yield f"{path} is cut into other rows"
            elif (path, rows) in there:
                yield f"it reads {path}, which is not asked for"
            else:
                yield f"it does not read {path}"
        for place, source in there.items():
            if source != dataclasses.replace(asked[place], first=source.first):
                yield f"{source.path} has changed since"
        for place, source in there.items():
            if source.first != asked[place].first:
                yield f"{source.path} stands at another place among the files"
        if self.shards != other.shards:
            yield "its documents are in other shards"


def _written(parts: dict[str, Any]) -> str:
    return json.dumps(parts, indent=1, ensure_ascii=False) + "\n"


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _told(x: object) -> str:
    return "missing" if x is None else f"{x:.12}" if isinstance(x, str) and len(x) == 64 else str(x)


def versions(*packages: str) -> dict[str, str]:
    """The versions of regard, NumPy, pyarrow and what else is named."""
    names = ("regard", "numpy", "pyarrow", *packages)
    return {name: importlib.metadata.version(name) for name in names}
