"""A shard's Parquet file: a pure function of manifest and number, and how it is read back."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard._base.errors import RecordingError
from regard._base.extras import needed_by
from regard._base.files import open_file, replaced_when_complete
from regard.survey._corpus import Document, documents, reason_of
from regard.survey._exact import total_of
from regard.survey._manifest import Manifest
from regard.survey._models import Reader, of_recording, of_text
from regard.survey._statistics import STATISTICS
from regard.survey._sums import COUNTS, SUMS, HeadSums, TopReceiver

with needed_by("regard.survey"):
    import pyarrow as pa
    from pyarrow import parquet

HEADS, DOCUMENTS = "heads", "documents"
META, META_SHA256 = b"regard", b"regard.sha256"
# Nothing twice, and pages with checksums: bits that have changed are told, not read.
WRITTEN: dict[str, Any] = {
    "compression": "zstd", "write_page_checksum": True, "store_schema": False,
}  # fmt: skip
ROWS_AT_ONCE = 256  # of documents/, which are written as they come

RECEIVER = pa.struct(
    [
        ("document", pa.int64()), ("position", pa.int64()), ("token", pa.string()),
        ("received", pa.float64()),
    ]
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a shard's file says beside its numbers.

    Attributes:
        shard: its number.
        manifest: hash of the survey's.
        documents, tokens: that count.
        cut: names of the documents of which some tokens were left out.
        empty: names of those without a token.
        unreadable: names and reasons.
    """

    shard: int
    manifest: str
    documents: int = 0
    tokens: int = 0
    cut: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()


def file_of(folder: Path, number: int, part: str = HEADS) -> Path:
    """The file of a shard."""
    return folder / part / f"{number:05}.parquet"


def write_shard(
    folder: Path, manifest: Manifest, number: int, reader: Reader | None,
    progress: Callable[[int], object],
) -> None:  # fmt: skip
    """Computes a shard and writes its file, at last; nothing else says that it is done.

    Args:
        reader: the model; None of recordings.
        progress: called with the tokens that are done.

    Raises:
        SurveyError: a file that has changed since the survey began.
        OSError: the folder cannot be written.
    """
    settings = manifest.settings
    sums, facts = HeadSums.of_nothing(), Facts(number, manifest.sha256)  # of no document
    kept = _Documents(file_of(folder, number, DOCUMENTS)) if settings["documents"] else None
    try:
        for document, own, facts in _measured(manifest, number, reader):
            if own is not None:
                sums += own
                if kept is not None:
                    kept.add(document, own)
            progress(facts.tokens)
        if kept is not None:
            kept.finish()
    finally:
        if kept is not None:
            kept.close()
    _write(_table(sums, number), facts, file_of(folder, number))


def _measured(
    manifest: Manifest, number: int, reader: Reader | None
) -> Iterator[tuple[int, HeadSums | None, Facts]]:
    """Number and sums of each document, None where it does not count; and the facts so far."""
    settings, facts = manifest.settings, Facts(number, manifest.sha256)
    for source in manifest.shards[number]:
        for read in documents(source, settings["column"]):
            own: HeadSums | None = None
            if read.reason:
                facts = _with(facts, unreadable=(read.name, read.reason))
            else:
                try:
                    own, cut = _sums(read, reader, settings)
                except RecordingError as error:  # that shows when its numbers are read
                    read = dataclasses.replace(read, reason=reason_of(error))
                    facts, cut = _with(facts, unreadable=(read.name, read.reason)), False
                facts = _with(facts, cut=read.name) if cut else facts
            if own is None:
                facts = facts if read.reason else _with(facts, empty=read.name)
            else:
                facts = dataclasses.replace(
                    facts, documents=facts.documents + 1, tokens=facts.tokens + own.tokens
                )
            yield read.number, own, facts


def _sums(
    read: Document, reader: Reader | None, settings: dict[str, Any]
) -> tuple[HeadSums | None, bool]:
    """Sums of a document, None of an empty one, and whether it was cut."""
    if read.recording is not None:
        some = bool(read.recording.query_tokens)
        return of_recording(read, settings["every"]) if some else None, False
    if not read.text:
        return None, False
    assert reader is not None
    return of_text(reader, read, settings["max_tokens"], settings["every"])


def _with(facts: Facts, **more: Any) -> Facts:
    longer: dict[str, Any] = {name: (*getattr(facts, name), x) for name, x in more.items()}
    return dataclasses.replace(facts, **longer)


def _table(sums: HeadSums, shard: int) -> pa.Table:
    n = len(sums._keys)
    columns: dict[str, Any] = {
        "shard": pa.array([shard] * n, pa.int64()),
        "layer": pa.array([layer for layer, _ in sums._keys], pa.int64()),
        "head": pa.array([head for _, head in sums._keys], pa.int64()),
    }
    for name in ("documents", "queries", "not_finite"):
        columns[name] = _array(sums._counts[name])
    for name in STATISTICS:
        columns[f"{name}_sum"] = _array(total_of(sums._sums[f"{name}_sum"]))
        columns[f"{name}_count"] = _array(sums._counts[f"{name}_count"])
        columns[f"{name}_histogram"] = _array(sums._counts[f"{name}_histogram"])
    columns["weight_histogram"] = _array(sums._counts["weight_histogram"])
    columns["max_score"] = pa.array(
        [None if x == -np.inf else x for x in sums._largest.tolist()], pa.float64()
    )
    columns["top_receivers"] = pa.array(
        [[_written(receiver) for receiver in own] for own in sums._receivers], pa.list_(RECEIVER)
    )
    for name in (*SUMS, *COUNTS):
        if name not in columns:
            x = total_of(sums._sums[name]) if name in SUMS else sums._counts[name]
            columns[name] = _array(x)
    return pa.table(columns)


def _sha256(meta: bytes) -> bytes:
    return hashlib.sha256(meta).hexdigest().encode()


def _written(receiver: TopReceiver) -> dict[str, Any]:
    """As parquet takes it: an unpaired surrogate, which is no UTF-8, is escaped."""
    return receiver._asdict() | {"token": receiver.token.encode(errors="backslashreplace").decode()}


def _array(x: np.ndarray) -> Any:
    if x.ndim == 1:
        return pa.array(x)
    ends = (np.arange(len(x) + 1) * x.shape[1]).astype(np.int32)
    return pa.ListArray.from_arrays(ends, pa.array(x.ravel()))


def _write(table: pa.Table, facts: Facts, path: Path) -> None:
    buffer = io.BytesIO()
    told = json.dumps(dataclasses.asdict(facts), ensure_ascii=False)
    meta = told.encode(errors="backslashreplace")
    with parquet.ParquetWriter(buffer, table.schema, **WRITTEN) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({META: meta, META_SHA256: _sha256(meta)})
    with replaced_when_complete(path) as file:
        file.write(buffer.getbuffer())


class _Documents:
    """``documents/``: a row for each document, with the sums of each head, written as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[list[Any]] = []
        self._file = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
        names = [f"{name}_{what}" for name in STATISTICS for what in ("sum", "count")]
        types = [pa.list_(pa.float32() if "_sum" in name else pa.int64()) for name in names]
        self._names = names
        self._schema = pa.schema(
            [("document", pa.int64()), ("tokens", pa.int64()), *zip(names, types)]
        )
        self._writer = parquet.ParquetWriter(self._file, self._schema, **WRITTEN)

    def add(self, document: int, own: HeadSums) -> None:
        """Adds one; its heads in the order of their numbers."""
        own = own + HeadSums.of_nothing()
        row: list[Any] = [document, own.tokens]
        for name in self._names:
            x = total_of(own._sums[name]) if name in SUMS else own._counts[name]
            row.append(x.tolist())
        self._rows.append(row)
        if len(self._rows) == ROWS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        columns = [list(column) for column in zip(*self._rows)]
        if columns:
            arrays = [pa.array(x, field.type) for x, field in zip(columns, self._schema)]
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []

    def finish(self) -> None:
        """Puts the file in its place."""
        self._flush()
        self._writer.close()
        self._file.seek(0)
        with replaced_when_complete(self._path) as file:
            while part := self._file.read(2**20):
                file.write(part)

    def close(self) -> None:
        """Lets go of what is not in its place."""
        self._file.close()


def read_facts(path: Path) -> Facts:
    """What a shard's file says beside its numbers.

    Raises:
        ValueError: a file that is none of a survey.
    """
    with _of_survey(path):
        with open_file(path) as file:  # pyarrow takes no name that is not UTF-8
            metadata = parquet.read_metadata(file).metadata or {}
        meta = metadata[META]
        if metadata.get(META_SHA256, _sha256(meta)) != _sha256(meta):
            raise ValueError("what it says of its documents is damaged")
        found = json.loads(meta)
        found["unreadable"] = [tuple(pair) for pair in found["unreadable"]]
        for name in ("cut", "empty", "unreadable"):
            found[name] = tuple(found[name])
        return Facts(**found)


def read_sums(path: Path) -> HeadSums:
    """The sums of a shard's file.

    Raises:
        ValueError: a file that is none of a survey.
    """
    facts = read_facts(path)
    with _of_survey(path):
        with open_file(path) as file:
            table = parquet.read_table(file, page_checksum_verification=True)
        keys = list(zip(table["layer"].to_pylist(), table["head"].to_pylist()))
        counts = {name: _column(table, name, axes) for name, axes in COUNTS.items()}
        sums = {name: _column(table, name, axes) for name, axes in SUMS.items()}
        largest = [-np.inf if x is None else x for x in table["max_score"].to_pylist()]
        receivers = tuple(
            tuple(TopReceiver(**one) for one in own) for own in table["top_receivers"].to_pylist()
        )
        return HeadSums._made(
            facts.documents, facts.tokens, keys, counts, sums, np.array(largest, float), receivers
        )


def _column(table: pa.Table, name: str, axes: tuple[int, ...]) -> np.ndarray:
    """``(rows, *axes)``."""
    column = table[name].combine_chunks()
    flat = column.flatten() if axes else column
    found: np.ndarray = flat.to_numpy(zero_copy_only=False)
    return found.reshape(len(column), *axes)


@contextlib.contextmanager
def _of_survey(path: Path) -> Iterator[None]:
    """Says of a file that cannot be read that it is none of a survey."""
    try:
        yield
    except (pa.ArrowException, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's, not pyarrow's
            raise
        raise ValueError(
            f"survey: {path}: not a file of this survey ({reason_of(error)}). Remove it; the same"
            " command computes it again."
        ) from error


def names_of(folder: Path) -> Sequence[int]:
    """Numbers of the shards that are done; a file by another name, as ``1.parquet``, is none."""
    found = ((path, path.stem) for path in (folder / HEADS).glob("*.parquet"))
    return sorted(
        int(stem) for path, stem in found if stem.isdecimal() and path == file_of(folder, int(stem))
    )
