"""The recording of one forward pass: its tokens, and query, key and value of every layer.

A recording is linear in the number of tokens, the weights are quadratic: each is computed from the
recording on request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.errors import RecordingError, ShapeError, a_type
from regard._base.settings import bytes_text, counted
from regard._base.types import Array, ArrayT
from regard._call.checks import read_flag
from regard.recording._checks import (
    check_key_count,
    checked_boundary,
    checked_layers,
    checked_numbers,
    checked_query_tokens,
    checked_texts,
    checked_tokens,
    place_among,
)
from regard.recording._grid import Grid, checked_grids
from regard.recording._layer import Layer
from regard.recording._layer_weights import LayerWeights
from regard.recording._showings import Showings
from regard.recording._texts import Texts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.recording._loading import MappedFile
    from regard.recording._remote import RemoteFile


class Recording(Showings[ArrayT]):
    """Tokens, and query, key and value of every layer of one forward pass.

    Layers and heads are found under their own numbers: where layers 5 and 9 were recorded,
    ``weights[9]`` is layer 9. Negative numbers count from the last recorded.

    Args:
        tokens: texts of the ``Lk`` keys, in order.
        layers: one ``Layer`` per attention layer, first layer first.
        model: name of the model, for people.
        query_tokens: texts of the ``Lq`` queries where they are not among the keys
            (cross-attention). Left out, the queries are the last ``Lq`` of ``tokens`` (of the
            first ``key_lengths`` of them), or those from ``query_start`` on, the same in each
            layer; as many as tokens are these. Masks and distances count from the layer's
            ``query_start`` in any case: a padded text with ``key_lengths`` needs 0 there.
        boundary: position of the first token that a model wrote, where the text is a prompt and
            its continuation.
        grids: where the patches of pictures are among the keys, a ``Grid`` or
            ``(start, rows, columns)`` for each picture.
        group: name of these layers, where there are others: ``"decoder"``.
        others: by name, recordings of the same pass whose layers have other tokens or lengths:
            ``{"encoder": ..., "cross": ...}``. They are saved, loaded and viewed together.

    Attributes:
        tokens: tuple of ``Lk`` texts; those of a long text are made when they are first used. As
            many others may be assigned: ``query_tokens`` that are among them follow.
        query_tokens: tuple of ``Lq`` texts, likewise.
        layers: tuple of ``Layer``. They, and everything computed from them, raise RecordingError
            where their file was cut since it was loaded.
        model: str.
        boundary: int, or None.
        grids: tuple of ``Grid``.
        group: str, empty where there is no other.

    Raises:
        ShapeError: nothing to record, or tokens and lengths disagree.
        TypeError: a token that is no text, a layer that is no ``Layer``.
        ValueError: a boundary or grid beyond the tokens, grids that overlap, two layers of one
            number, two groups of one name or without one.

    Example:
        >>> q = k = v = np.eye(3, dtype=np.float32)[None]
        >>> recording = Recording(["a", "b", "c"], [Layer(q, k, v, causal=True)])
        >>> recording
        Recording(3 tokens, 1 layer, 1 head, 108 B)
        >>> recording.weights[0].shape
        (1, 3, 3)
    """

    __slots__ = (
        "_file", "_layers", "_model", "_others", "_query_tokens", "_tokens", "_weights", "boundary",
        "grids", "group",
    )  # fmt: skip
    boundary: int | None
    grids: tuple[Grid, ...]
    group: str

    def __init__(
        self,
        tokens: Sequence[str],
        layers: Sequence[Layer[ArrayT]],
        *,
        model: str = "",
        query_tokens: Sequence[str] | None = None,
        boundary: int | None = None,
        grids: Sequence[Grid | tuple[int, int, int]] = (),
        group: str = "",
        others: Mapping[str, Recording[ArrayT]] | None = None,
    ) -> None:
        self._tokens = checked_texts("tokens", tokens)
        self._file: MappedFile | RemoteFile | None = None
        self._layers = checked_layers(layers)
        self._others: dict[str, Recording[ArrayT]] = {}
        self._model = _checked_text("model", model)
        self.group, self.boundary = group, boundary
        numbered = dict(zip(checked_numbers(self._layers), self._layers))
        check_key_count(numbered, self._tokens)
        self._query_tokens = checked_query_tokens(numbered, self._tokens, query_tokens)
        self._weights = LayerWeights(self._layers, self._tokens, self._query_tokens, model)
        self.grids = checked_grids(grids, len(self._tokens))
        self._others = _checked_others(group, others)

    def __setattr__(self, name: str, x: Any) -> None:
        check = _CHECKS.get(name)
        super().__setattr__(name, x if check is None else check(self, x))

    @classmethod
    def from_weights(
        cls,
        tokens: Sequence[str],
        weights: Iterable[Array[object]] | Mapping[int, Array[object]],
        *,
        query_tokens: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        model: str = "",
        sinks: bool = False,
        boundary: int | None = None,
        grids: Sequence[Grid | tuple[int, int, int]] = (),
    ) -> Recording[NDArray[np.floating[Any]]]:
        """A recording of weights that exist already, without query and key.

        All that weights are enough for works: ``weights``, ``heads``, ``figure``, ``view``,
        ``save``; ``steps`` and ``weights[layer].lse`` raise an UnsupportedError. Each row is
        divided by its sum, and weights come back within 1e-6 of that (1e-14 for float64).

        Args:
            tokens: texts of the ``Lk`` keys.
            weights: for each layer ``(H, Lq, Lk)`` or ``(1, H, Lq, Lk)``, NumPy arrays or torch
                tensors of any floating dtype: the ``attentions`` of transformers,
                ``[cache["pattern", n] for n in range(layers)]`` of TransformerLens, one array
                ``(layers, H, Lq, Lk)``; or a dict of layer numbers and such arrays. A layer whose
                weights after a query's position are all 0 is causal: they are masked.
            query_tokens: as of any recording; with them no layer is causal.
            names: of each layer's module.
            model: name of the model, for people.
            sinks: whether rows may sum to less than 1, the rest being that of an attention sink.
            boundary, grids: as of any recording.

        Returns:
            The recording, with NumPy arrays of its own: float32, or float64 of float64.

        Raises:
            MaterializeError: together above the limit that ``regard.limits`` sets.
            ShapeError: axes or lengths that do not fit, or more than one text.
            TypeError: no float arrays, or ``sinks`` that is no bool.
            ValueError: a weight that is not finite or below 0, or a row that does not sum to 1
                within the rounding of its dtype, nor to 0.

        Example:
            >>> halves = np.array([[[1.0, 0.0], [0.5, 0.5]]])
            >>> recording = Recording.from_weights(["a", "b"], [halves])
            >>> recording
            Recording(2 tokens, 1 layer, 1 head, 32 B)
            >>> recording.weights[0].head(0).entropy().round(4)
            array([0.    , 0.6931])
        """
        from regard.recording import _dense

        sinks = read_flag("sinks", sinks, "from_weights")
        given = _dense.listed(weights)
        tokens, queries = checked_tokens("tokens", tokens), None
        if query_tokens is not None:
            query_tokens = checked_tokens("query_tokens", query_tokens)
            queries = len(query_tokens)
        for _, what, x in given:
            _dense.check_lengths(what, x, len(tokens), queries)
        _dense.check_size([x for *_, x in given])
        causal = None if query_tokens is None else False
        layers: list[Layer[NDArray[np.floating[Any]]]] = [
            Layer(
                **_dense.arguments(what, x, causal, sinks), name=name, number=number,
                weights_only=True,
            )
            for (number, what, x), name in zip(given, _dense.names_of(names, len(given)))
        ]  # fmt: skip
        return Recording(
            tokens, layers, model=model, query_tokens=query_tokens, boundary=boundary, grids=grids
        )

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts of the ``Lk`` keys."""
        self._tokens = found = self._read_texts(self._tokens)
        return found

    @tokens.setter
    def tokens(self, texts: Sequence[str]) -> None:
        found = _as_many("tokens", texts, self._tokens)
        place = place_among(self._layers[0], self.tokens, self.query_tokens)
        if place is not None:
            self._query_tokens = found[place : place + len(self._query_tokens)]
        self._tokens = found
        self._forget_weights()

    @property
    def query_tokens(self) -> tuple[str, ...]:
        """Texts of the ``Lq`` queries."""
        self._query_tokens = found = self._read_texts(self._query_tokens)
        return found

    @query_tokens.setter
    def query_tokens(self, texts: Sequence[str]) -> None:
        self._query_tokens = _as_many("query_tokens", texts, self._query_tokens)
        self._forget_weights()

    @property
    def model(self) -> str:
        """Name of the model, for people."""
        return self._model

    @model.setter
    def model(self, name: str) -> None:
        name = _checked_text("model", name)
        if name != self._model:
            self._model = name
            self._forget_weights()

    def _forget_weights(self) -> None:
        """Weights that were made have the texts and the model's name that there were."""
        self._weights = LayerWeights(self._layers, self._tokens, self._query_tokens, self._model)

    def _read_texts(self, found: Sequence[str]) -> tuple[str, ...]:
        """Texts that may still be in a file."""
        if isinstance(found, tuple):
            return found
        self._check_file()
        try:
            return found.all() if isinstance(found, Texts) else tuple(found)
        except RecordingError:
            raise
        except ValueError as error:
            where = getattr(self._file, "address", "the file")
            raise RecordingError(f"{where} is a damaged recording: {error}") from error

    @property
    def layers(self) -> tuple[Layer[ArrayT], ...]:
        """Query, key, value and options of every layer."""
        self._check_file()
        return self._layers

    @property
    def weights(self) -> LayerWeights[ArrayT]:
        """``weights[layer]``: the layer's ``regard.AttentionWeights``, ``(Hq, Lq, Lk)``.

        Layer and head by their numbers: ``weights[5][3, 17]`` is query 17 of head 3 of layer 5.
        """
        self._check_file()
        return self._weights

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The number of each layer: its own, or where it has none its index."""
        return self._weights.numbers

    @property
    def groups(self) -> dict[str, Recording[ArrayT]]:
        """Every group by its name: this recording first, then the others.

        Raises:
            ValueError: another was given a name that there is, or none.
        """
        found = {self.group: self}
        for other in self._others.values():
            if not other.group or other.group in found:
                raise ValueError(f"recording: two groups have the name {other.group!r}.")
            found[other.group] = other
        return found

    @property
    def _is_remote(self) -> bool:
        """Whether its numbers are fetched from an address."""
        return hasattr(self._file, "address")

    def _check_file(self) -> None:
        """Raises RecordingError where the file of the arrays was cut."""
        if self._file is not None:
            self._file.check()

    def save(self, path: str | Path, *, statistics: bool = False) -> None:
        """Write the recording, with all groups, to one safetensors file, whole or not at all.

        The file appears under its name only when it is complete and on disk: a writer that is
        killed leaves the old file, or none.

        Args:
            path: file to write, ``.safetensors`` or without an ending; one that exists is replaced,
                and passes on its permissions.
            statistics: compute maximum and total of every row of every head, and keep them in the
                file: 8 bytes a query and head, with which a row or a part of a long text needs no
                pass over all of its keys before. Layers that have them keep them in any case.

        Raises:
            OSError: the folder is missing or cannot be written.
            RecordingError: the name is a link that leads back to itself, or names and options are
                more than the header of a file takes.
            ShapeError, TypeError, ValueError: a name or numbers that were assigned to a layer
                since.
            TypeError: ``statistics`` that is no bool.
            ValueError: a name of another kind of file.

        Source: docs/recording.md describes the file.
        """
        from regard.recording._saving import write

        write(self, Path(path), read_flag("statistics", statistics, "save"))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        mapped: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Recording[NDArray[np.floating[Any]]]:
        """Open a recording that ``save`` wrote.

        The arrays are mapped from the file, read-only, and come into memory as they are used.
        Meanwhile the file may be replaced or deleted, but not written into.

        Of a file at an address, such as ``https://…`` or ``s3://…``, the header is read, and later
        those heads and rows of query, key and value that are asked for. Up to 1 GiB of them is
        kept in memory.

        Args:
            path: file to open, or an address of fsspec.
            mapped: False reads all of it into memory, so that the file may change.
            storage_options: of fsspec's file system, as in pandas; for an address only.

        Returns:
            The recording, with NumPy arrays.

        Raises:
            FileNotFoundError: no file there.
            ModuleNotFoundError: fsspec, or what it needs for such an address, is not installed:
                ``pip install "regard[remote]"``.
            RecordingError: the file is no recording, a damaged one, or of a newer version; the
                address cannot be read, or not in ranges. Also by whatever asks for numbers of a
                file at an address, where they cannot be fetched, or the file was changed.
            TypeError: ``storage_options`` for a file, or no dict; ``mapped`` that is no bool.
        """
        from regard.recording._format import is_address
        from regard.recording._loading import read

        mapped = read_flag("mapped", mapped, "Recording.load")
        if is_address(path):
            from regard.recording import _remote

            if not isinstance(storage_options, (Mapping, NoneType)):
                raise TypeError(
                    f"Recording.load: storage_options is {a_type(storage_options)}; a dict is"
                    ' needed, as {"anon": True}.'
                )
            return _remote.read(str(path), mapped, storage_options)
        if storage_options is not None:
            raise TypeError(
                f"Recording.load: storage_options are of an address, as https://...; {path} is a"
                " file. Leave them out."
            )
        return read(Path(path), mapped)

    def __repr__(self) -> str:
        parts = self._told
        if self.group:
            parts = "; ".join(f"{name!r}: {found._told}" for name, found in self.groups.items())
        model = f", model={self.model!r}" if self.model else ""
        return f"Recording({parts}{model})"

    @property
    def _told(self) -> str:
        heads = sorted({layer.heads for layer in self._layers})
        count = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
        parts = [
            counted(len(self._tokens), "token"),
            counted(len(self._layers), "layer"),
            f"{count} head{'' if heads == [1] else 's'}",
            bytes_text(sum(layer.nbytes for layer in self._layers)),
        ]
        return ", ".join(parts)


def _as_many(name: str, texts: Sequence[str], before: Sequence[str]) -> Sequence[str]:
    """Texts in the place of others.

    Raises:
        ShapeError: they are not as many.
    """
    found = checked_texts(name, texts)
    if len(found) != len(before):
        raise ShapeError(f"recording: {len(found)} {name} in the place of {len(before)}.")
    return found


def _checked_text(name: str, x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"recording: {name} is {type(x).__name__}; it must be a str.")
    return x


def _checked_group(recording: Recording[Any], name: Any) -> str:
    others = [other.group for other in recording._others.values()]
    if others and (not _checked_text("group", name) or name in others):
        raise ValueError(f"recording: there are the groups {others} too; {name!r} is no new name.")
    return _checked_text("group", name)


# What is assigned to an attribute is checked as what the recording was made of.
_CHECKS: dict[str, Callable[[Recording[Any], Any], Any]] = {
    "group": _checked_group,
    "boundary": lambda recording, x: checked_boundary(x, len(recording._tokens)),
    "grids": lambda recording, x: checked_grids(x, len(recording._tokens)),
}


def _checked_others(group: str, others: Any) -> dict[str, Any]:
    """The other recordings by name, each with its name as its group."""
    if others is None:
        return {}
    if not isinstance(others, Mapping):
        raise TypeError(
            f"recording: others is {type(others).__name__}; a dict of a name and a Recording for"
            " each group is needed."
        )
    if others and not group:
        raise ValueError(
            'recording: there are others, so these layers need a name too: group="decoder".'
        )
    return {name: _named_other(group, name, found) for name, found in others.items()}


def _named_other(group: str, name: Any, found: Any) -> Recording[Any]:
    if not isinstance(name, str) or not isinstance(found, Recording):
        raise TypeError(
            f"recording: others has {type(name).__name__}: {type(found).__name__}; a name and a"
            " Recording are needed."
        )
    if not name or name == group:
        raise ValueError(f"recording: others has the name {name!r}; a new one is needed.")
    if found._others:
        raise ValueError(
            f"recording: others[{name!r}] has groups of its own; give each of"
            f" {', '.join(map(repr, found.groups))} by itself."
        )
    if found.group == name:
        return found
    renamed = copy.copy(found)
    renamed.group = name
    return renamed
