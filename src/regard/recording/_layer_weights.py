"""The weights of every layer of a recording, made when they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from regard._base.settings import counted
from regard._base.types import ArrayT
from regard._weights.origin import Origin
from regard._weights.parts import place_of
from regard.recording._checks import checked_numbers
from regard.recording._layer import Layer

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights


class LayerWeights(Collection["AttentionWeights[ArrayT]"]):
    """The ``regard.AttentionWeights`` of each layer, made at the first request and kept.

    They are made anew where the layer was given another name, or other heads or options.

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
        self._made: dict[int, tuple[AttentionWeights[ArrayT], tuple[Any, ...]]] = {}
        self.numbers = checked_numbers(layers)

    def place_of(self, layer: int) -> int:
        """The place of the layer of that number."""
        return place_of("recording: layer", layer, self.numbers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> AttentionWeights[ArrayT]:
        place = self.place_of(layer)
        found = self._layers[place]
        now = found.name, found.head_numbers, found.options
        made, before = self._made.get(place, (None, ()))
        if made is None or any(x is not y for x, y in zip(now, before)):
            made = found._weights(self._origin(self.numbers[place], found.name))
            self._made[place] = made, now
        return made

    def _origin(self, number: int, name: str) -> Origin:
        tokens, queries = self._tokens, self._query_tokens
        rows, columns = range(len(queries)), range(len(tokens))
        return Origin(number, name, self._model, tokens, queries, rows, columns)

    def __iter__(self) -> Iterator[AttentionWeights[ArrayT]]:
        return (self[number] for number in self.numbers)

    def __reversed__(self) -> Iterator[AttentionWeights[ArrayT]]:
        return (self[number] for number in reversed(self.numbers))

    def __contains__(self, weights: object) -> bool:
        return any(weights is made for made, _ in self._made.values())

    def __repr__(self) -> str:
        return f"<weights of {counted(len(self), 'layer')}>"
