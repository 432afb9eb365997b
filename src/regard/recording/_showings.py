"""What a recording shows: steps, effects, pictures, figures, heads, words and the viewer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from regard._base.deferred import fetched
from regard._base.errors import UnsupportedError, a_type
from regard._base.types import ArrayT
from regard._weights.parts import place_of
from regard.recording._grid import Grid
from regard.recording._layer import Layer
from regard.recording._layer_weights import LayerWeights

if TYPE_CHECKING:
    from regard._showing.figure import Figure
    from regard._showing.heatmap import Scale
    from regard._showing.steps import Steps
    from regard._weights.effects import EffectKind, Effects
    from regard.heads import HeadScores
    from regard.recording._recording import Recording
    from regard.recording._words import Words
    from regard.viewer._server import Viewer


class Showings(Generic[ArrayT]):
    """What is shown of a recording; ``Recording`` has it."""

    __slots__ = ()

    if TYPE_CHECKING:
        grids: tuple[Grid, ...]
        _layers: tuple[Layer[ArrayT], ...]
        _weights: LayerWeights[ArrayT]

        @property
        def tokens(self) -> tuple[str, ...]: ...
        @property
        def query_tokens(self) -> tuple[str, ...]: ...
        @property
        def layers(self) -> tuple[Layer[ArrayT], ...]: ...
        @property
        def weights(self) -> LayerWeights[ArrayT]: ...
        @property
        def layer_numbers(self) -> tuple[int, ...]: ...

    @property
    def _own(self) -> Recording[ArrayT]:
        """The recording that this is of."""
        own: Any = self
        return own

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
            TypeError: ``queries`` or ``receivers`` are no ints.
            ValueError: a recording without queries, ``queries`` below 1, or ``receivers`` below 0.
        """
        from regard.heads import head_scores

        return head_scores(self._own, queries, receivers)

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
            Weights that are no numbers are grey as masked pairs are, with a warning.

        Raises:
            IndexError: no such layer or head.
            ModuleNotFoundError: matplotlib is not installed: ``pip install "regard[plot]"``.
            ShapeError: nothing to draw.
            TypeError: no head is named, or one in two ways; ``transparent`` that is no bool.
            ValueError: an unknown scale, a step other than 1, or a size or dpi that is not
                positive, too large together, or without room for the heatmaps.
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
        if not isinstance(heads, Iterable):
            raise TypeError(f"figure: heads is {a_type(heads)}; a list of (layer, head) is needed.")
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

        return Words(self._own)

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
            TypeError: ``other`` is no recording, the port no int, or ``words`` or ``open_browser``
                no bool.
            ValueError: a recording without queries, or a port above 65535 or below 0.
            OSError: the port is taken.

        Source: docs/viewer.md describes the page.
        """
        from regard.viewer import view

        return view(self._own, other=other, words=words, open_browser=open_browser, port=port)

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
            TypeError: ``other`` is no recording, layers are no list of ints, or the limit is no
                number.
            ValueError: a recording without queries, no layers are left, a limit that is NaN or not
                above 0, or a name of another kind of file.

        Source: docs/viewer-export.md describes the file.
        """
        from regard.viewer.export import export

        export(self._own, path, other=other, layers=layers, limit_bytes=limit_bytes)

    def _repr_html_(self) -> str:
        from regard._showing.picture import recording_html

        return recording_html(self._own)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from regard.viewer._display import recording_bundle

        return recording_bundle(self._own)
