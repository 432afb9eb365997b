"""The recording of one forward pass: its tokens, and query, key and value of every layer.

A recording is linear in the number of tokens, the weights are quadratic: each is computed from the
recording on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from regard._base.errors import ShapeError
from regard._base.types import ArrayT
from regard.recording._layer import Layer, index_of, shape_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._showing.steps import Steps
    from regard._weights.attention_weights import AttentionWeights
    from regard.recording._file import MappedFile
    from regard.viewer._server import Viewer


class Recording(Generic[ArrayT]):
    """Tokens, and query, key and value of every layer of one forward pass.

    Args:
        tokens: texts of the ``Lk`` keys, in order.
        layers: one ``Layer`` per attention layer, first layer first.
        model: name of the model, for people.
        query_tokens: texts of the ``Lq`` queries where they are not among the keys
            (cross-attention). Left out, the queries are the last ``Lq`` of ``tokens``, or those
            from ``query_start`` on.
        boundary: position of the first token that a model wrote, where the text is a prompt and
            its continuation.

    Attributes:
        tokens: tuple of ``Lk`` texts.
        query_tokens: tuple of ``Lq`` texts.
        layers: tuple of ``Layer``. They, and everything computed from them, raise RecordingError
            where their file was cut since it was loaded.
        model: str.
        boundary: int, or None.

    Raises:
        ShapeError: nothing to record, or tokens and lengths disagree.
        TypeError: a token that is no text, a layer that is no ``Layer``.
        ValueError: a boundary beyond the tokens.

    Example:
        >>> q = k = v = np.eye(3, dtype=np.float32)[None]
        >>> recording = Recording(["a", "b", "c"], [Layer(q, k, v, causal=True)])
        >>> recording
        Recording(3 tokens, 1 layer, 1 head, 108 B)
        >>> recording.weights[0].shape
        (1, 3, 3)
    """

    __slots__ = ("_file", "_layers", "_weights", "boundary", "model", "query_tokens", "tokens")

    def __init__(
        self,
        tokens: Sequence[str],
        layers: Sequence[Layer[ArrayT]],
        *,
        model: str = "",
        query_tokens: Sequence[str] | None = None,
        boundary: int | None = None,
    ) -> None:
        self.tokens = _checked_tokens("tokens", tokens)
        self._file: MappedFile | None = None
        self._layers = _checked_layers(layers)
        if not isinstance(model, str):
            raise TypeError(f"recording: model is {type(model).__name__}; it must be a str.")
        self.model = model
        self.boundary = _checked_boundary(boundary, len(self.tokens))
        _check_key_count(self._layers, self.tokens)
        self.query_tokens = _checked_query_tokens(self._layers, self.tokens, query_tokens)
        self._weights = LayerWeights(self._layers)

    @property
    def layers(self) -> tuple[Layer[ArrayT], ...]:
        """Query, key, value and options of every layer."""
        self._check_file()
        return self._layers

    @property
    def weights(self) -> LayerWeights[ArrayT]:
        """``weights[layer]``: the layer's ``regard.AttentionWeights``, ``(Hq, Lq, Lk)``."""
        self._check_file()
        return self._weights

    def _check_file(self) -> None:
        """Raises RecordingError where the file of the arrays was cut."""
        if self._file is not None:
            self._file.check()

    def steps(self, layer: int, head: int) -> Steps[ArrayT, ArrayT | None]:
        """Every step of one head, written out: see ``regard.Steps``.

        Args:
            layer: index; negative counts from the last.
            head: query head; negative counts from the last. Its key head is
                ``head // (Hq // Hkv)``.

        Returns:
            Steps of ``query (Lq, D)``, ``key (Lk, D)``, ``value (Lk, Dv)``, labelled with the
            tokens.

        Raises:
            IndexError: no such layer or head.
            MaterializeError: too large to be written out.
        """
        from regard._showing.steps import steps

        found = self.layers[index_of("layer", layer, len(self.layers))].head(head)
        query, key, value = found._held
        return steps(
            query[0],
            key[0],
            None if value is None else value[0],
            tokens=self.tokens,
            query_tokens=self.query_tokens,
            **found.options,
        )

    def view(
        self, *, other: Recording[Any] | None = None, open_browser: bool = True, port: int = 0
    ) -> Viewer:
        """Look at every weight in the browser; nothing leaves this machine.

        It serves in the background: the call returns at once, each call starts another viewer, and
        all of them end with Python.

        Args:
            other: a second recording, to compare this one with.
            open_browser: False opens none; the address is the result's ``repr``.
            port: to serve on; 0 takes one that is free.

        Returns:
            The viewer, with its ``address`` and ``close()``; usable in a ``with`` block.

        Raises:
            ValueError: a recording without queries.
            OSError: the port is taken.

        Source: docs/viewer.md describes the page.
        """
        from regard.viewer import view

        return view(self, other=other, open_browser=open_browser, port=port)

    def export(
        self,
        path: str | Path,
        *,
        other: Recording[Any] | None = None,
        layers: Sequence[int] | None = None,
        limit_bytes: float = 64e6,
    ) -> None:
        """Write the viewer with this recording in it to one HTML file, which works offline.

        The file holds query, key and value, and computes the weights where it is opened.

        Args:
            path: file to write, ``.html``; one that exists is replaced.
            other: a second recording, to compare this one with.
            layers: numbers of the layers to write, which keep them; by default all.
            limit_bytes: of the file.

        Raises:
            IndexError: no such layer.
            MaterializeError: the file would be above the limit.
            OSError: the folder is missing or cannot be written.
            ValueError: a recording without queries, no layers are left, or a name of another
                kind of file.

        Source: docs/viewer-export.md describes the file.
        """
        from regard.viewer.export import export

        export(self, path, other=other, layers=layers, limit_bytes=limit_bytes)

    def save(self, path: str | Path) -> None:
        """Write the recording to one safetensors file, whole or not at all.

        The file appears under its name only when it is complete and on disk: a writer that is
        killed leaves the old file, or none.

        Args:
            path: file to write, ``.safetensors`` or without an ending; one that exists is replaced,
                and passes on its permissions.

        Raises:
            OSError: the folder is missing or cannot be written.
            RecordingError: the name is a link that leads back to itself, or the tokens are more
                than the header of a file takes.
            ValueError: a name of another kind of file.

        Source: docs/recording.md describes the file.
        """
        from regard.recording._file import write

        write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, *, mapped: bool = True) -> Recording[NDArray[np.floating[Any]]]:
        """Open a recording that ``save`` wrote.

        The arrays are mapped from the file, read-only, and come into memory as they are used.
        Meanwhile the file may be replaced or deleted, but not written into.

        Args:
            path: file to open.
            mapped: False reads all of it into memory, so that the file may change.

        Returns:
            The recording, with NumPy arrays.

        Raises:
            FileNotFoundError: no file there.
            RecordingError: the file is no recording, a damaged one, or of a newer version.
        """
        from regard.recording._file import read

        return read(Path(path), mapped)

    def __repr__(self) -> str:
        heads = sorted({layer.heads for layer in self._layers})
        count = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
        size = sum(layer.nbytes for layer in self._layers)
        parts = [
            _counted(len(self.tokens), "token"),
            _counted(len(self._layers), "layer"),
            f"{count} head{'' if heads == [1] else 's'}",
            _size(size),
        ]
        if self.model:
            parts.append(f"model={self.model!r}")
        return f"Recording({', '.join(parts)})"

    def _repr_html_(self) -> str:
        from regard._showing.picture import recording_html

        return recording_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from regard.viewer._display import recording_bundle

        return recording_bundle(self)


class LayerWeights(Sequence["AttentionWeights[ArrayT]"]):
    """The ``regard.AttentionWeights`` of each layer, made at the first request and kept."""

    def __init__(self, layers: Sequence[Layer[ArrayT]]) -> None:
        self._layers = layers
        self._made: dict[int, AttentionWeights[ArrayT]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> AttentionWeights[ArrayT]:  # type: ignore[override]
        index = index_of("layer", layer, len(self._layers))
        if index not in self._made:
            from regard._weights.attention_weights import AttentionWeights

            found = self._layers[index]
            query, key, _ = found._held
            self._made[index] = AttentionWeights(query, key, **found.options)
        return self._made[index]

    def __iter__(self) -> Iterator[AttentionWeights[ArrayT]]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<weights of {_counted(len(self), 'layer')}>"


def _checked_tokens(name: str, tokens: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tokens, str):
        raise TypeError(f"recording: {name} is one str; a list with one str per token is needed.")
    tokens = tuple(tokens)
    for index, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(
                f"recording: {name}[{index}] is {type(token).__name__}; every token must be a str:"
                " give texts, not ids."
            )
    if not tokens:
        raise ShapeError(f"recording: no {name}; at least one is needed.")
    return tokens


def _checked_layers(layers: Sequence[Layer[ArrayT]]) -> tuple[Layer[ArrayT], ...]:
    layers = tuple(layers)
    for index, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(
                f"recording: layers[{index}] is {type(layer).__name__}; every layer must be a"
                " regard.recording.Layer(query, key, value)."
            )
    if not layers:
        raise ShapeError("recording: no layers; at least one is needed.")
    return layers


def _checked_boundary(boundary: Any, count: int) -> int | None:
    if boundary is None:
        return None
    if isinstance(boundary, bool) or not isinstance(boundary, (int, np.integer)):
        raise TypeError(
            f"recording: boundary is {type(boundary).__name__}; an int is needed, the position of"
            " the first token that a model wrote."
        )
    if not 0 <= boundary < count:
        raise ValueError(
            f"recording: boundary is {boundary}; there are {count} tokens, 0 to {count - 1}."
            " Leave it out where no model wrote any of them."
        )
    return int(boundary)


def _check_key_count(layers: Sequence[Layer], tokens: Sequence[str]) -> None:
    for index, layer in enumerate(layers):
        if shape_of(layer.key)[1] != len(tokens):
            raise ShapeError(
                f"recording: {len(tokens)} tokens, but layer {index} has {shape_of(layer.key)[1]}"
                f" keys; one token per key is needed.\n  key {shape_of(layer.key)}"
                " read as (Hkv, Lk, D)"
            )


def _checked_query_tokens(
    layers: Sequence[Layer], tokens: tuple[str, ...], query_tokens: Sequence[str] | None
) -> tuple[str, ...]:
    count = shape_of(layers[0].query)[1]
    for index, layer in enumerate(layers):
        if shape_of(layer.query)[1] != count:
            raise ShapeError(
                f"recording: layer {index} has {shape_of(layer.query)[1]} queries and layer 0 has"
                f" {count}; make one recording for each."
            )
    if query_tokens is not None:
        named = _checked_tokens("query_tokens", query_tokens)
        if len(named) != count:
            raise ShapeError(
                f"recording: {len(named)} query_tokens, but {count} queries;"
                f" one token per query is needed.\n  query {shape_of(layers[0].query)}"
                " read as (Hq, Lq, D)"
            )
        return named
    valid = layers[0].options.get("key_lengths", len(tokens))
    usual = 0 if count == len(tokens) else valid - count
    start = layers[0].options.get("query_start", usual)
    if start < 0 or start + count > len(tokens):
        raise ShapeError(
            f"recording: {count} queries from position {start} on, but {len(tokens)} tokens;"
            " queries with tokens of their own (cross-attention) need query_tokens."
        )
    return tokens[start : start + count]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _size(size: int) -> str:
    power = 0 if size < 1000 else min(3, (len(str(size)) - 1) // 3)
    unit = ("B", "kB", "MB", "GB")[power]
    return f"{size} B" if power == 0 else f"{size / 1000**power:.1f} {unit}"
