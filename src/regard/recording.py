"""What one forward pass attended with: its tokens, and query, key and value of every layer.

A recording is linear in the number of tokens where the weights it stands for are quadratic: every
weight is computed from it when it is asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._errors import ShapeError
from regard._layer import Layer, shape

if TYPE_CHECKING:
    from regard._weights import AttentionWeights
    from regard.steps import Steps

__all__ = ["Layer", "Recording"]


class Recording:
    """Tokens, and query, key and value of every layer of one forward pass.

    Args:
        tokens: texts of the ``Lk`` keys, in order.
        layers: one :class:`Layer` per attention layer, first layer first.
        model: name of the model, for people.
        query_tokens: texts of the ``Lq`` queries where they are not among the keys
            (cross-attention). Left out, the queries are the last ``Lq`` of ``tokens``, or those
            from ``query_start`` on.

    Attributes:
        tokens: tuple of ``Lk`` texts.
        query_tokens: tuple of ``Lq`` texts.
        layers: tuple of :class:`Layer`.
        model: str.

    Raises:
        ShapeError: nothing to record, or tokens and lengths disagree.
        TypeError: a token that is no text, a layer that is no :class:`Layer`.

    Example:
        >>> import numpy as np, regard
        >>> from regard.recording import Layer
        >>> q = k = v = np.eye(3, dtype=np.float32)[None]
        >>> recording = regard.Recording(["a", "b", "c"], [Layer(q, k, v, causal=True)])
        >>> recording.weights[0].shape
        (1, 3, 3)
    """

    __slots__ = ("_weights", "layers", "model", "query_tokens", "tokens")

    def __init__(
        self,
        tokens: Sequence[str],
        layers: Sequence[Layer],
        *,
        model: str = "",
        query_tokens: Sequence[str] | None = None,
    ) -> None:
        self.tokens = _checked_tokens("tokens", tokens)
        self.layers = _checked_layers(layers)
        if not isinstance(model, str):
            raise TypeError(f"recording: model is {type(model).__name__}; it must be a str.")
        self.model = model
        _check_key_count(self.layers, self.tokens)
        self.query_tokens = _checked_query_tokens(self.layers, self.tokens, query_tokens)
        self._weights = LayerWeights(self.layers)

    @property
    def weights(self) -> LayerWeights:
        """``weights[layer]``: the layer's :class:`regard.AttentionWeights`, ``(Hq, Lq, Lk)``."""
        return self._weights

    def steps(self, layer: int, head: int) -> Steps:
        """Every step of one head, written out: see :class:`regard.Steps`.

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
        from regard.steps import steps

        found = self.layers[_index("layer", layer, len(self.layers))]
        head = _index("head", head, found.heads)
        shared = head // (found.heads // found.key_heads)
        value = None if found.value is None else found.value[shared]
        return steps(
            found.query[head],
            found.key[shared],
            value,
            **found.options_of(head),
        ).labelled(self.query_tokens, self.tokens)

    def save(self, path: str | Path) -> None:
        """Write the recording to one safetensors file, whole or not at all.

        The file appears under its name only when it is complete and on disk: a writer that is
        killed leaves the old file, or none.

        Args:
            path: file to write; one that exists is replaced.

        Raises:
            OSError: the folder is missing or cannot be written.

        Source: docs/recording.md describes the file.
        """
        from regard._recording_file import write

        write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Open a recording that :meth:`save` wrote.

        The arrays are mapped from the file and read when they are used; changing them never
        changes the file.

        Args:
            path: file to open.

        Returns:
            The recording, with NumPy arrays.

        Raises:
            FileNotFoundError: no file there.
            RecordingError: the file is no recording, a damaged one, or of a newer version.
        """
        from regard._recording_file import read

        return read(Path(path))

    def __repr__(self) -> str:
        heads = sorted({layer.heads for layer in self.layers})
        count = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
        size = sum(layer.nbytes for layer in self.layers)
        parts = [
            _counted(len(self.tokens), "token"),
            _counted(len(self.layers), "layer"),
            f"{count} head{'' if heads == [1] else 's'}",
            _size(size),
        ]
        if self.model:
            parts.append(f"model={self.model!r}")
        return f"Recording({', '.join(parts)})"


class LayerWeights(Sequence["AttentionWeights"]):
    """The :class:`regard.AttentionWeights` of each layer, made when first asked for and kept."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._made: dict[int, AttentionWeights] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: Any) -> Any:
        index = _index("layer", layer, len(self._layers))
        if index not in self._made:
            from regard._weights import AttentionWeights

            found = self._layers[index]
            self._made[index] = AttentionWeights(found.query, found.key, **found.options)
        return self._made[index]

    def __iter__(self) -> Iterator[AttentionWeights]:
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


def _checked_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
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


def _check_key_count(layers: Sequence[Layer], tokens: Sequence[str]) -> None:
    for index, layer in enumerate(layers):
        if shape(layer.key)[1] != len(tokens):
            raise ShapeError(
                f"recording: {len(tokens)} tokens, but layer {index} has {shape(layer.key)[1]}"
                f" keys; one token per key is needed.\n  key {shape(layer.key)}"
                " read as (Hkv, Lk, D)"
            )


def _checked_query_tokens(
    layers: Sequence[Layer], tokens: tuple[str, ...], query_tokens: Sequence[str] | None
) -> tuple[str, ...]:
    count = shape(layers[0].query)[1]
    for index, layer in enumerate(layers):
        if shape(layer.query)[1] != count:
            raise ShapeError(
                f"recording: layer {index} has {shape(layer.query)[1]} queries and layer 0 has"
                f" {count}; make one recording for each."
            )
    if query_tokens is not None:
        named = _checked_tokens("query_tokens", query_tokens)
        if len(named) != count:
            raise ShapeError(
                f"recording: {len(named)} query_tokens, but {count} queries;"
                f" one token per query is needed.\n  query {shape(layers[0].query)}"
                " read as (Hq, Lq, D)"
            )
        return named
    valid = layers[0].options.get("key_lengths", len(tokens))
    start = layers[0].options.get("query_start", valid - count)
    if start < 0 or start + count > len(tokens):
        raise ShapeError(
            f"recording: {count} queries from position {start} on, but {len(tokens)} tokens;"
            " queries with tokens of their own (cross-attention) need query_tokens."
        )
    return tokens[start : start + count]


def _index(name: str, index: Any, count: int) -> int:
    found = operator.index(index)
    if not -count <= found < count:
        raise IndexError(f"recording: {name} {found}; there are {count}, 0 to {count - 1}.")
    return found % count


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _size(size: int) -> str:
    power = 0 if size < 1000 else min(3, (len(str(size)) - 1) // 3)
    unit = ("B", "kB", "MB", "GB")[power]
    return f"{size} B" if power == 0 else f"{size / 1000**power:.1f} {unit}"
