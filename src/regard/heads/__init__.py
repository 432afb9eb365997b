"""What every head of a recording does: its role, how sharply it looks, and how far.

One rule names heads for ``regard show``, the page and ``recording.heads()``: a role's score is the
mean, over the queries that see such a key, of the weight on the keys that it means. docs/heads.md
has the definitions and their sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.errors import a_type
from regard._base.types import Bool, Float, Int
from regard._call.checks import read_flag
from regard._weights.parts import int_of, place_of
from regard.heads._measure import measured, sampled
from regard.heads._patterns import Patterns
from regard.heads._roles import (
    CLEAR,
    EVEN,
    FEWEST,
    FIRST,
    INDUCTION,
    LEAST_PART,
    MOST_OF_ONE,
    PLACE,
    PREVIOUS,
    VARIED,
    Named,
    roles_of,
    sentence,
    shares_text,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.recording import Recording

__all__ = ["HeadScores", "Reader", "Telling", "head_scores"]

# Of the table.
COLUMNS = ("first", "previous", "induction", "entropy", "distance")
SHOWN_KEYS = 3
MOST_LINES = 32
LONGEST_TOKEN = 14
WIDEST_ROLE = 40


@dataclasses.dataclass(frozen=True)
class Telling:
    """The head to show where none is named.

    Attributes:
        layer, head: their numbers.
        role: name of its role, or of two; empty where it has none.
        says: ``"L2H4 · induction 53 %: looks at what followed the same token before"``.
    """

    layer: int
    head: int
    role: str
    says: str


@dataclasses.dataclass(frozen=True, repr=False)
class HeadScores:
    """Scores of every head; NaN where a score has no query to count.

    Layers and heads are in the order of ``layers`` and ``head_numbers``; a layer with fewer heads
    than another ends in NaN. In cross-attention no score by place counts. ``scores[name]`` is
    ``(layers, heads)``, the score of one role of ``roles``, and so are ``previous``, ``first`` and
    ``induction``. Printed, it is a table, in the order of ``sort``.

    Attributes:
        entropy: ``(layers, heads)``, mean of ``−Σ w ln w``, in nats.
        distance: mean of ``Σ w |query position − key position|``, in tokens.
        scores: ``(layers, heads, roles)``, the mean weight on the keys that a role means, over the
            queries that see one; of ``spread evenly``, the mean of exp(entropy) by the keys seen.
        even: the same, what weights that are all alike would score.
        counted: the same, over how many queries a score is.
        overlap: ``(layers, heads, a, b)``, the part of b's score on keys which a means too.
        largest: ``(layers, heads, roles)``, of a kind of tokens, the part of its score that is on
            one key, the largest; NaN for the other roles.
        sees_all: ``(layers, heads)`` bool, whether the last query sees every key before it.
        receivers: ``(layers, heads, n)``, the positions of the keys with most weight, from the
            first on; −1 where there is no head.
        received: ``(layers, heads, n)``, their mean weights over the queries.
        queries: how many queries the means are over.
        layers: number of each layer.
        head_numbers: numbers of each layer's heads.
        tokens: texts of the keys.
        order: places ``(layer, head)`` in the order in which heads are listed.
    """

    entropy: Float[NDArray[np.float64], "layers heads"]
    distance: Float[NDArray[np.float64], "layers heads"]
    scores: Float[NDArray[np.float64], "layers heads roles"]
    even: Float[NDArray[np.float64], "layers heads roles"]
    counted: Float[NDArray[np.float64], "layers heads roles"]
    overlap: Float[NDArray[np.float64], "layers heads roles roles"]
    largest: Float[NDArray[np.float64], "layers heads roles"]
    sees_all: Float[NDArray[np.float64], "layers heads"]
    receivers: Int[NDArray[np.int64], "layers heads n"]
    received: Float[NDArray[np.float64], "layers heads n"]
    queries: int
    layers: tuple[int, ...]
    head_numbers: tuple[tuple[int, ...], ...]
    tokens: tuple[str, ...]
    order: tuple[tuple[int, int], ...]

    def named(self, layer: int, head: int) -> list[Named]:
        """The roles of a head with their shares: none, one, or the two of a mixture.

        Args:
            layer, head: as in ``role``.

        Raises:
            IndexError: no such layer or head.
        """
        return self._named(*self.place(layer, head))

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles, in the order of the last axis of ``scores``."""
        return tuple(PLACE)

    def __getitem__(self, name: str) -> Float[NDArray[np.float64], "layers heads"]:
        """The scores of one role, or ``"entropy"`` or ``"distance"``.

        Raises:
            KeyError: no such role.
        """
        if name in ("entropy", "distance"):
            return self.entropy if name == "entropy" else self.distance
        role = {"previous": PREVIOUS.name, "first": FIRST.name}.get(name, name)
        if role not in PLACE:
            known = ", ".join(repr(known) for known in (*PLACE, "entropy", "distance"))
            raise KeyError(f"scores: there is no {name!r}; there are {known}.")
        return self.scores[..., PLACE[role]]

    @property
    def previous(self) -> Float[NDArray[np.float64], "layers heads"]:
        """Mean weight on the token just before the query's."""
        return self[PREVIOUS.name]

    @property
    def first(self) -> Float[NDArray[np.float64], "layers heads"]:
        """Mean weight on the first token of the text."""
        return self[FIRST.name]

    @property
    def induction(self) -> Float[NDArray[np.float64], "layers heads"]:
        """Mean weight on what came next after earlier occurrences of the query's token."""
        return self[INDUCTION.name]

    def role(self, layer: int, head: int) -> str:
        """The role of a head, as ``"induction"``; of a mixture ``"first token, previous word"``.

        Empty where none is clear, as docs/heads.md says.

        Args:
            layer, head: their numbers; negative ones count from the last.

        Raises:
            IndexError: no such layer or head.
        """
        return ", ".join(named.role.name for named in self.named(layer, head))

    def says(self, layer: int, head: int) -> str:
        """What a head does: ``"L2H4 · induction 53 %: looks at what followed …"``.

        Args:
            layer, head: as in ``role``.

        Raises:
            IndexError: no such layer or head.
        """
        return self._says(*self.place(layer, head))

    def _says(self, at: int, h: int) -> str:
        found = self._named(at, h)
        name = f"L{self.layers[at]}H{self.head_numbers[at][h]}"
        entropy = self.entropy[at, h]
        if np.isnan(entropy):
            return f"{name} · not a number (NaN): some score is NaN or infinite"
        if not self._enough(at, h).any():
            return f"{name} · too few queries to tell what it looks at, entropy {entropy:.2f} nats"
        shares = shares_text(found) or f"mixed, entropy {entropy:.2f} nats"
        return f"{name} · {shares}: {sentence(found)}"

    def telling(self, among: Collection[tuple[int, int]] | None = None) -> Telling:
        """The head that tells most about the text: the one to show first.

        A clear induction head tells most, then what finds a word, a sign or the same token, then a
        fixed place, last the first token and no place at all; among equals the higher share. Where
        a window cuts the text, a head that sees all of it comes first. Without any role it is the
        head of the lowest entropy.

        Args:
            among: numbers ``(layer, head)`` to choose from, by default all heads.

        Raises:
            ValueError: nothing to choose from.
        """
        places = [place for place in self._places() if among is None or self._at(*place) in among]
        if not places:
            raise ValueError("scores: there is no head to choose from.")
        at, h = max(places, key=lambda place: self._tells(*place))
        layer, head = self._at(at, h)
        return Telling(layer, head, self.role(layer, head), self._says(at, h))

    def _tells(self, at: int, h: int) -> tuple[Any, ...]:
        found, entropy = self._named(at, h), -np.nan_to_num(self.entropy[at, h], nan=np.inf)
        if not found or found[0].role is EVEN:
            return (-1, 0, self.sees_all[at, h] == 1, entropy)
        main = max(found, key=lambda named: (named.role.tells, named.share))
        tells = main.role.tells if main.share >= CLEAR else min(main.role.tells, 1)
        return (tells > 0, self.sees_all[at, h] == 1, tells, main.share, entropy)

    def sort(self, by: str, *, ascending: bool | None = None) -> HeadScores:
        """The same scores, listed in the order of one of them; heads without it last.

        Args:
            by: a role of ``roles``, ``"entropy"``, ``"distance"``, or ``"layer"``.
            ascending: the least first; by default for ``"entropy"`` and ``"layer"`` alone.

        Raises:
            KeyError: no such score.
            TypeError: ``ascending`` that is no bool.
        """
        if ascending is not None:
            ascending = read_flag("ascending", ascending, "sort")
        if by == "layer":
            places = tuple(self._places())
            falls = ascending is not None and not ascending
            return dataclasses.replace(self, order=places[::-1] if falls else places)
        values = self[by]
        sign = 1 if (by == "entropy" if ascending is None else ascending) else -1

        def key(place: tuple[int, int]) -> float:
            return float(np.nan_to_num(sign * values[place], nan=np.inf))

        return dataclasses.replace(self, order=tuple(sorted(self._places(), key=key)))

    def columns(self) -> dict[str, list[Any]]:
        """Name and values of each column of the table, a value for each head in its order.

        Layer, head, role, entropy, distance, each role's score, and the key with most weight:
        what ``pandas.DataFrame`` or ``polars.DataFrame`` take.
        """
        found: dict[str, list[Any]] = {
            "layer": [self.layers[at] for at, _ in self.order],
            "head": [self.head_numbers[at][h] for at, h in self.order],
            "role": [", ".join(x.role.name for x in self._named(*place)) for place in self.order],
        }
        for name in ("entropy", "distance", *PLACE):
            found[name] = [float(self[name][place]) for place in self.order]
        if self.receivers.shape[-1]:
            found["received most"] = [int(self.receivers[place][0]) for place in self.order]
        return found

    def to_pandas(self) -> Any:
        """A DataFrame of ``columns``: a row for each head, in the table's order.

        Raises:
            ModuleNotFoundError: pandas is not installed; ``columns()`` needs nothing.
        """
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ModuleNotFoundError as error:
            if error.name != "pandas":
                raise
            raise ModuleNotFoundError(
                "scores.to_pandas needs pandas. Install it with pip install pandas, or take"
                " scores.columns(), a dict of lists.",
                name="pandas",
            ) from None
        return pandas.DataFrame(self.columns())

    def table(self) -> str:
        """A line for each head: its role, its scores, and the keys that get most weight."""
        return "\n".join(self._lines(self.order))

    def _lines(self, order: tuple[tuple[int, int], ...]) -> Iterator[str]:
        roles = [shares_text(self._named(*place)) for place in order]
        width = min(WIDEST_ROLE, max([4, *map(len, roles)])) + 2
        numbers = "".join(f"{name:>11}" for name in COLUMNS)
        names = f"{'head':8}{'role':{width}}{numbers}"
        yield f"{names}  received most" if self.receivers.shape[-1] else names
        for (at, h), role in zip(order, roles):
            values = (self[name][at, h] for name in COLUMNS)
            shown = "".join("          –" if np.isnan(x) else f"{x:11.3f}" for x in values)
            keys = zip(self.receivers[at, h, :SHOWN_KEYS], self.received[at, h])
            received = ", ".join(f"{j} {_quoted(self.tokens[j])} {x:.3f}" for j, x in keys)
            layer, head = self._at(at, h)
            yield f"{f'L{layer}H{head}':8}{role:{width}}{shown}  {received}".rstrip()

    def __repr__(self) -> str:
        left_out = len(self.order) - MOST_LINES
        more = [f"... and {left_out} more: print(scores.table())"] if left_out > 0 else []
        title = f"HeadScores, heads: {len(self.order)}, means over queries: {self.queries}"
        return "\n".join([title, *self._lines(self.order[:MOST_LINES]), *more])

    def _enough(self, at: int, h: int) -> Bool[NDArray[np.bool_], " roles"]:
        """Whether the score of each role is over enough queries."""
        enough: NDArray[np.bool_] = self.counted[at, h] >= max(FEWEST, LEAST_PART * self.queries)
        return enough

    def _named(self, at: int, h: int) -> list[Named]:
        enough = self._enough(at, h)
        for role in VARIED:
            enough[PLACE[role.name]] &= not self.largest[at, h, PLACE[role.name]] > MOST_OF_ONE
        return roles_of(self.scores[at, h], self.even[at, h], self.overlap[at, h], enough)

    def place(self, layer: int, head: int) -> tuple[int, int]:
        """The index of a head in the arrays.

        Args:
            layer, head: as in ``role``.

        Raises:
            IndexError: no such layer or head.
        """
        at = place_of("scores: layer", layer, self.layers)
        return at, place_of("scores: head", head, self.head_numbers[at])

    def _places(self) -> Iterator[tuple[int, int]]:
        return ((at, h) for at, heads in enumerate(self.head_numbers) for h in range(len(heads)))

    def _at(self, at: int, h: int) -> tuple[int, int]:
        return self.layers[at], self.head_numbers[at][h]


class Reader:
    """Scores the layers of a recording, each when it is asked for: all of them read the same rows.

    Args:
        recording: places are scored where queries and keys are the same tokens.
        queries, receivers: as in ``head_scores``.

    Raises:
        TypeError, ValueError: as ``head_scores``.
    """

    def __init__(
        self, recording: Recording[Any], queries: int | None = None, receivers: int = 8
    ) -> None:
        _require_recording(recording)
        queries = None if queries is None else int_of("head_scores: queries", queries)
        receivers = int_of("head_scores: receivers", receivers)
        length, keys = len(recording.query_tokens), len(recording.tokens)
        if not length:
            raise ValueError("head_scores: the recording has no queries to score.")
        if queries is not None and queries < 1:
            raise ValueError(f"head_scores: queries is {queries}; at least 1 is needed.")
        if receivers < 0:
            raise ValueError(f"head_scores: receivers is {receivers}; it must not be negative.")
        self._recording, self._receivers = recording, min(receivers, keys)
        self.rows = sampled(length, keys, queries)
        self._patterns: Patterns | None = None
        if recording.query_tokens == recording.tokens:
            self._patterns = Patterns(recording.tokens, np.array(self.rows))

    def layers(self, *numbers: int) -> HeadScores:
        """The scores of the layers of these numbers, by default of all."""
        recording = self._recording
        numbers = numbers or recording.layer_numbers
        every = [recording.weights[number] for number in numbers]
        found = [measured(w, self.rows, self._patterns, self._receivers) for w in every]
        heads = tuple(weights.head_numbers for weights in every)
        most = max(map(len, heads))
        return HeadScores(
            **{name: _padded([layer[name] for layer in found], most) for name in found[0]},
            queries=len(self.rows),
            layers=tuple(numbers),
            head_numbers=heads,
            tokens=recording.tokens,
            order=tuple((at, h) for at, own in enumerate(heads) for h in range(len(own))),
        )


def head_scores(
    recording: Recording[Any], queries: int | None = None, receivers: int = 8
) -> HeadScores:
    """Scores every head of a recording; from 2,048 tokens on in less than its attention takes.

    Args:
        recording: places are scored where queries and keys are the same tokens.
        queries: the most queries to read, evenly spaced; by default 512, and down to 256 of a text
            of more than 16,384 tokens.
        receivers: how many of the keys that get most weight to name.

    Raises:
        TypeError: there is no Recording, but weights for instance; or counts are no ints.
        ValueError: a recording without queries, ``queries`` below 1, or ``receivers`` below 0.

    Source: docs/heads.md has one for each role; Olsson et al. 2022 for induction.
    """
    return Reader(recording, queries, receivers).layers()


def place_to_open(
    recording: Recording[Any], among: Collection[tuple[int, int]] | None = None
) -> tuple[int, int]:
    """Numbers of the layer and the head to show first, scored only where there is a choice.

    Of a recording at an address the first, so that not every head is fetched.

    Args:
        among: as in ``HeadScores.telling``.

    Raises:
        TypeError, ValueError: as ``head_scores`` and ``HeadScores.telling``.
    """
    _require_recording(recording)
    if among is None:
        layers = zip(recording.layer_numbers, recording.layers)
        among = [(number, head) for number, layer in layers for head in layer.head_numbers]
    if recording.query_tokens and among and (len(among) == 1 or recording._is_remote):
        return next(iter(among))
    told = head_scores(recording).telling(among)
    return told.layer, told.head


def _require_recording(x: object) -> None:
    from regard.recording import Recording

    if not isinstance(x, Recording):
        raise TypeError(
            f"head_scores: {a_type(x)} is no Recording; regard.record makes one, and"
            " Recording(tokens, [weights.layer(), ...]) one of the weights of layers."
        )


def _padded(of_layers: list[Any], heads: int) -> Any:
    """``(layers, heads, ...)``; NaN, or −1, where a layer has fewer heads."""
    first = of_layers[0]
    fill = -1 if first.dtype == np.int64 else np.nan
    out = np.full((len(of_layers), heads, *first.shape[1:]), fill, first.dtype)
    for row, x in zip(out, of_layers):
        row[: len(x)] = x
    return out


def _quoted(token: str) -> str:
    """A token in at most 14 characters, escaped."""
    shown = ascii(token) if not token.isprintable() else repr(token)
    return shown if len(shown) <= LONGEST_TOKEN else f"{shown[: LONGEST_TOKEN - 4]}...'"
