"""Where weights come from: a layer of a recording, and which of its queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from regard._call.call import Call
from regard._call.visible import Seen


class Origin(NamedTuple):
    """What a recording knows of the weights of one of its layers.

    Attributes:
        number: of the layer.
        name: of the module that computed it.
        model: name of the model.
        tokens, query_tokens: texts of all keys and queries.
        rows, columns: positions of the queries and keys of these weights.
    """

    number: int
    name: str
    model: str
    tokens: Sequence[str]
    query_tokens: Sequence[str]
    rows: range
    columns: range

    def part(self, rows: slice, columns: slice) -> Origin:
        """The same of some of these queries and keys."""
        return self._replace(rows=self.rows[rows], columns=self.columns[columns])

    @property
    def row_tokens(self) -> tuple[str, ...]:
        """Texts of the queries."""
        return tuple(self.query_tokens[i] for i in self.rows)

    @property
    def column_tokens(self) -> tuple[str, ...]:
        """Texts of the keys."""
        return tuple(self.tokens[j] for j in self.columns)


def origin_of(weights: Any) -> Origin | None:
    """Where weights come from; None for those of no recording."""
    found: Origin | None = weights._origin
    return found


def call_of(weights: Any) -> Call:
    """The call that weights are of."""
    found: Call = weights._call
    return found


def seen_of(weights: Any) -> Seen:
    """Which keys the queries of weights attend to; no weight is computed."""
    return Seen(call_of(weights))
