"""The recording of one forward pass: its tokens, and query, key and value of every layer.

A recording is linear in the number of tokens, the weights are quadratic: each is computed from the
recording on request.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from regard._base.deferred import fetched
from regard._base.errors import RecordingError, UnsupportedError
from regard._base.types import Array, ArrayT
from regard._weights.origin import Origin
from regard._weights.parts import place_of
from regard.recording._checks import (
    check_key_count,
    checked_boundary,
    checked_layers,
    checked_numbers,
    checked_query_tokens,
    checked_texts,
    checked_tokens,
)
from regard.recording._grid import Grid, checked_grids
from regard.recording._layer import Layer
from regard.recording._texts import Texts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._showing.figure import Figure, Scale
    from regard._showing.steps import Steps
    from regard._weights.attention_weights import AttentionWeights
    from regard._weights.effects import EffectKind, Effects
    from regard.heads import HeadScores
    from regard.recording._loading import MappedFile
    from regard.recording._remote import RemoteFile
    from regard.recording._words import Words
    from regard.viewer._server import Viewer


class Recording(Generic[ArrayT]):
    """Tokens, and query, key and value of every layer of one forward pass.

    Layers and heads are found under their own numbers: where layers 5 and 9 were recorded,
    ``weights[9]`` is layer 9. Negative numbers count from the last recorded.

    Args:
        tokens: texts of the ``Lk`` keys, in order.
        layers: one ``Layer`` per attention layer, first layer first.
        model: name of the model, for people.
        query_tokens: texts of the ``Lq`` queries where they are not among the keys
            (cross-attention). Left out, the queries are the last ``Lq`` of ``tokens``, or those
            from ``query_start`` on.
        boundary: position of the first token that a model wrote, where the text is a prompt and
            its continuation.
        grids: where the patches of pictures are among the keys, a ``Grid`` or
            ``(start, rows, columns)`` for each picture.
        group: name of these layers, where there are others: ``"decoder"``.
        others: by name, recordings of the same pass whose layers have other tokens or lengths:
            ``{"encoder": ..., "cross": ...}``. They are saved, loaded and viewed together.

    Attributes:
        tokens: tuple of ``Lk`` texts; those of a long text are made when they are first used.
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
        "_file", "_layers", "_others", "_query_tokens", "_tokens", "_weights", "boundary", "grids",
        "group", "model",
    )  # fmt: skip

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
        for what, text in (("model", model), ("group", group)):
            if not isinstance(text, str):
                raise TypeError(f"recording: {what} is {type(text).__name__}; it must be a str.")
        self.model, self.group = model, group
        self.boundary = checked_boundary(boundary, len(self._tokens))
        numbered = dict(zip(checked_numbers(self._layers), self._layers))
        check_key_count(numbered, self._tokens)
        self._query_tokens = checked_query_tokens(numbered, self._tokens, query_tokens)
        self._weights = LayerWeights(self._layers, self._tokens, self._query_tokens, model)
        self.grids = checked_grids(grids, len(self._tokens))
        self._others = _checked_others(group, others)

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
            TypeError: no float arrays.
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
    def tokens(self, texts: tuple[str, ...]) -> None:
        self._tokens = texts

    @property
    def query_tokens(self) -> tuple[str, ...]:
        """Texts of the ``Lq`` queries."""
        self._query_tokens = found = self._read_texts(self._query_tokens)
        return found

    @query_tokens.setter
    def query_tokens(self, texts: tuple[str, ...]) -> None:
        self._query_tokens = texts

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
        """Every group by its name: this recording first, then the others."""
        return {self.group: self} | self._others

    @property
    def _is_remote(self) -> bool:
        """Whether its numbers are fetched from an address."""
        return hasattr(self._file, "address")

    def _check_file(self) -> None:
        """Raises RecordingError where the file of the arrays was cut."""
        if self._file is not None:
            self._file.check()

    def steps(self, layer: int, head: int) -> Steps[ArrayT, ArrayT | None]:
        """Every step of one head, written out: see ``regard.Steps``.

        Args:
            layer: number; negative counts from the last.
            head: number of the query head; negative counts from the last.

        Returns:
            Steps of ``query (Lq, D)``, ``key (Lk, D)``, ``value (Lk, Dv)``, labelled with the
            tokens.

        Raises:
            IndexError: no such layer or head.
            MaterializeError: too large to be written out.
            UnsupportedError: weights alone are known.
        """
        from regard._showing.steps import steps

        found = self.layers[self._weights.place_of(layer)].head(head)
        found.require_vectors("steps")
        query, key, value = map(fetched, found._held)
        return steps(
            query[0],
            key[0],
            None if value is None else value[0],
            tokens=self.tokens,
            query_tokens=self.query_tokens,
            **found.options,
        )

    def effects(
        self, layer: int, head: int | None = None, kind: EffectKind = "knockout"
    ) -> Effects[ArrayT]:
        """What every token pair of a layer does to the number that was explained.

        Args:
            layer: number; negative counts from the last.
            head: number of the query head, or None for all; negative counts from the last.
            kind: as in ``AttentionWeights.effects``.

        Returns:
            ``(Hq, Lq, Lk)``, or ``(Lq, Lk)`` of one head, computed when asked for.

        Raises:
            IndexError: no such layer or head.
            UnsupportedError: the recording has no gradient (``record(..., explain=...)`` keeps it),
                or for ``"change"`` no values.
            ValueError: another ``kind``.
        """
        found, weights = self.layers[self._weights.place_of(layer)], self.weights[layer]
        found.require_vectors("effects")
        if found._value is None or (found._gradient is None and kind != "change"):
            missing = "values" if found._value is None else "gradients"
            way_out = "values=True" if kind == "change" else "explain=..., which keeps both"
            raise UnsupportedError(
                f"effects: this recording has no {missing}; record the pass with {way_out}."
            )
        if head is not None:
            found, weights = found.head(head), weights.head(head)
        value: Any = found.value
        gradient: Any = found.gradient
        if head is not None:
            value, gradient = value[0], None if gradient is None else gradient[0]
        return weights.effects(value, gradient, kind)

    def picture(self, layer: int, head: int, token: int, *, grid: int = 0) -> ArrayT:
        """The weights of one query on the patches of a picture.

        Only that row is computed.

        Args:
            layer, head: numbers; negative ones count from the last.
            token: position among the queries; negative counts from the last.
            grid: which of ``grids``.

        Returns:
            ``(rows, columns)``; their sum is the weight that the picture gets.

        Raises:
            IndexError: no such layer, head, token or grid.
        """
        if not self.grids:
            raise IndexError(
                "recording: it has no picture; record one with grids=[Grid(start, rows, columns)],"
                " the keys that are its patches."
            )
        found = self.grids[place_of("recording: grid", grid, range(len(self.grids)))]
        query = place_of("recording: token", token, range(len(self.query_tokens)))
        row: Any = self.weights[layer].head(head)[query, found.start : found.stop]
        picture: ArrayT = row.reshape(found.rows, found.columns)
        return picture

    def heads(self, *, queries: int | None = None, receivers: int = 8) -> HeadScores:
        """What every head does: its role, entropy, mean distance, and top receivers.

        Printed, it is a table; ``sort("induction")`` orders it, ``to_pandas()`` makes a DataFrame
        of it, and ``regard heads FILE`` shows the same. docs/heads.md has the roles.

        Args:
            queries: the most queries to read, evenly spaced; by default 512, and down to 256 of a
                text of more than 16,384 tokens.
            receivers: how many of the keys that get most weight to name.

        Returns:
            Scores as arrays ``(layers, heads)``, in the order of ``layer_numbers`` and of each
            layer's ``head_numbers``.

        Raises:
            ValueError: a recording without queries, ``queries`` below 1, or ``receivers`` below 0.
        """
        from regard.heads import head_scores

        return head_scores(self, queries, receivers)

    def figure(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        heads: Sequence[tuple[int, int]] | None = None,
        rows: slice | None = None,
        columns: slice | None = None,
        scale: Scale = "auto",
        dpi: float = 300,
        size: tuple[float, float] | None = None,
        transparent: bool = False,
    ) -> Figure:
        """Draw heads as a figure for a paper, in memory linear in the length.

        Args:
            layer, head: numbers of one head; negative ones count from the last. Of a layer alone
                all heads are drawn.
            heads: several instead, ``(layer, head)`` each, as small multiples with one colour bar.
            rows, columns: which queries and keys; by default all.
            scale: colours of the weights: ``"linear"``, from 0 to the largest; ``"log"``, from
                0.001 % to 100 %; ``"uniform"``, a weight divided by that of equal weights on all
                unmasked keys; ``"auto"``, linear below 100 keys and log from there on.
            dpi: pixels per inch, of a PNG and of the heatmaps in PDF and SVG.
            size: width and height in inches; by default as large as the tokens need.
            transparent: no white behind it.

        Returns:
            The figure: ``figure(...).save("head.pdf")``, or ``.svg`` or ``.png``; in a notebook it
            is shown. Where there are more cells than pixels, each shows its strongest weight.

        Raises:
            IndexError: no such layer or head.
            ModuleNotFoundError: matplotlib is not installed: ``pip install "regard[plot]"``.
            ShapeError: nothing to draw.
            TypeError: no head is named, or one in two ways.
            ValueError: an unknown scale, a step other than 1, or a size or dpi that is not
                positive, or too large together.
        """
        from regard._showing.figure import Figure, Panel

        chosen = self._heads_of(layer, head, heads)
        panels = [Panel(f"L{n}H{h}", self.weights[n].head(h)) for n, h in chosen]
        return Figure(
            panels, (self.query_tokens, self.tokens), rows=rows, columns=columns, scale=scale,
            dpi=dpi, size=size, transparent=transparent,
        )  # fmt: skip

    def _heads_of(
        self, layer: int | None, head: int | None, heads: Sequence[tuple[int, int]] | None
    ) -> list[tuple[int, int]]:
        """Numbers of the layers and heads that are named."""
        if heads is None and layer is not None:
            of_layer = self._layers[self._weights.place_of(layer)].head_numbers
            heads = [(layer, h) for h in (of_layer if head is None else (head,))]
        elif heads is None or layer is not None or head is not None:
            raise TypeError(
                "figure: name one head, figure(layer, head), all of a layer, figure(layer), or"
                " several, figure(heads=[(layer, head), ...])."
            )
        found = []
        for pair in heads:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"figure: heads has {pair!r}; a pair (layer, head) is needed.")
            place = self._weights.place_of(pair[0])
            numbers = self._layers[place].head_numbers
            h = numbers[place_of("recording: head", pair[1], numbers)]
            found.append((self.layer_numbers[place], h))
        if not found:
            raise TypeError("figure: heads is empty; name at least one (layer, head).")
        return found

    def in_words(self) -> Words:
        """The same weights by words: keys summed, and queries averaged, over a word's pieces.

        A view: weights are computed when they are asked for, exactly. ``recording.in_words()
        .weights[5].head(3)`` has rows, ``topk``, ``strongest`` and ``pool`` as weights of tokens.

        Raises:
            RecordingError: the file was cut since it was loaded.
        """
        from regard.recording._words import Words

        return Words(self)

    def view(
        self,
        *,
        other: Recording[Any] | None = None,
        words: bool | None = None,
        open_browser: bool = True,
        port: int = 0,
    ) -> Viewer:
        """Look at every weight, of all groups, in the browser; nothing leaves this machine.

        It serves in the background: each call starts another viewer, and all of them end with
        Python. The browser opens at the head that tells most.

        Args:
            other: a second recording, to compare this one with.
            words: whether the browser opens with the tokens of a word as one; by default below 200
                tokens. The page has a switch.
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

        return view(self, other=other, words=words, open_browser=open_browser, port=port)

    def export(
        self,
        path: str | Path,
        *,
        other: Recording[Any] | None = None,
        layers: Sequence[int] | None = None,
        limit_bytes: float = 64e6,
    ) -> None:
        """Write the viewer with this recording in it to one HTML file, which works offline.

        The file holds query, key and value, and computes the weights where it is opened. It is of
        one group: ``recording.groups[name].export(...)`` writes another.

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
            ValueError: a name of another kind of file.

        Source: docs/recording.md describes the file.
        """
        from regard.recording._saving import write

        write(self, Path(path), statistics)

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
            TypeError: ``storage_options`` for a file.
        """
        from regard.recording._format import is_address
        from regard.recording._loading import read

        if is_address(path):
            from regard.recording import _remote

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
            _counted(len(self._tokens), "token"),
            _counted(len(self._layers), "layer"),
            f"{count} head{'' if heads == [1] else 's'}",
            _size(sum(layer.nbytes for layer in self._layers)),
        ]
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        from regard._showing.picture import recording_html

        return recording_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from regard.viewer._display import recording_bundle

        return recording_bundle(self)


class LayerWeights(Collection["AttentionWeights[ArrayT]"]):
    """The ``regard.AttentionWeights`` of each layer, made at the first request and kept.

    Asked for by the layers' numbers; in their order where one goes through all of them.
    """

    def __init__(
        self,
        layers: Sequence[Layer[ArrayT]],
        tokens: Sequence[str],
        query_tokens: Sequence[str],
        model: str,
    ) -> None:
        self._layers = layers
        self._tokens, self._query_tokens, self._model = tokens, query_tokens, model
        self._made: dict[int, AttentionWeights[ArrayT]] = {}
        self.numbers = checked_numbers(layers)

    def place_of(self, layer: int) -> int:
        """The place of the layer of that number."""
        return place_of("recording: layer", layer, self.numbers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> AttentionWeights[ArrayT]:
        place = self.place_of(layer)
        if place not in self._made:
            found = self._layers[place]
            self._made[place] = found._weights(self._origin(self.numbers[place], found.name))
        return self._made[place]

    def _origin(self, number: int, name: str) -> Origin:
        tokens, queries = self._tokens, self._query_tokens
        rows, columns = range(len(queries)), range(len(tokens))
        return Origin(number, name, self._model, tokens, queries, rows, columns)

    def __iter__(self) -> Iterator[AttentionWeights[ArrayT]]:
        return (self[number] for number in self.numbers)

    def __reversed__(self) -> Iterator[AttentionWeights[ArrayT]]:
        return (self[number] for number in reversed(self.numbers))

    def __contains__(self, weights: object) -> bool:
        return any(weights is made for made in self._made.values())

    def __repr__(self) -> str:
        return f"<weights of {_counted(len(self), 'layer')}>"


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


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _size(size: int) -> str:
    power = 0 if size < 1000 else min(3, (len(str(size)) - 1) // 3)
    unit = ("B", "kB", "MB", "GB")[power]
    return f"{size} B" if power == 0 else f"{size / 1000**power:.1f} {unit}"
