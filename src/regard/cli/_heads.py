"""The overview: what every head does, and which one tells most."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence

from rich.text import Text

from regard.cli._errors import InputError
from regard.cli._screen import Screen, busy, percent
from regard.cli._source import choose_group, read_recording
from regard.heads import LEAST_SCORE, ROLES, head_scores
from regard.recording import Recording

# Read from a long text; so many rows take seconds.
MOST_QUERIES = 1024
MIXED = "mixed"
SCORES = ("previous", "first", "induction", "entropy")
# The short word of a role, its colour, and what such a head does.
WORDS = {
    "induction": ("induct", "magenta", "what came after the same token before"),
    "previous": ("prev", "cyan", "the previous token"),
    "first": ("first", "yellow", "the first token"),
}
WHY = {
    "induction": "where a token occurred before, {} of its weight goes to what came next then",
    "previous": "{} of a token's weight goes to the one before it",
    "first": "{} of a token's weight goes to the first one",
}
CLEAR = 0.4
CELL = 9


@dataclasses.dataclass(frozen=True)
class Head:
    """One head by its numbers, and its scores as ``regard.heads.HeadScores`` has them."""

    layer: int
    head: int
    role: str  # a name of ROLES, or empty
    previous: float
    first: float
    induction: float
    entropy: float

    @property
    def name(self) -> str:
        """``L1H4``."""
        return f"L{self.layer}H{self.head}"

    @property
    def score(self) -> float:
        """The share of the weight that its role stands for."""
        return float(getattr(self, self.role)) if self.role else math.nan


def heads(argument: str, model: str, group: str | None, is_text: bool) -> None:
    """Prints a line for each head: its role, its scores, and the keys that get most weight.

    Raises:
        CommandError: with the line to print.
    """
    recording = choose_group(read_recording(argument, model, is_text), group)
    if not recording.query_tokens:
        raise InputError(f"{argument}: a recording without queries has nothing to score.")
    with busy("Looking at what every head does"):
        table = recording.heads().table()
    sys.stdout.write(table + "\n")


def overview(recording: Recording) -> list[list[Head]]:
    """Every head by layer; roles only for self-attention."""
    found = head_scores(recording, MOST_QUERIES)
    names = {role: name for name, role in ROLES.items()}
    return [
        [
            Head(
                layer, head, names.get(found.role(layer, head), ""),
                *(float(getattr(found, name)[at, h]) for name in SCORES),
            )
            for h, head in enumerate(heads)
        ]
        for at, (layer, heads) in enumerate(zip(found.layers, found.head_numbers))
    ]  # fmt: skip


def clearest(rows: Sequence[Sequence[Head]]) -> dict[str, Head]:
    """The head with the highest score of each role that any head has."""
    found: dict[str, Head] = {}
    for name in WORDS:
        heads = [head for row in rows for head in row if head.role == name]
        if heads:
            found[name] = max(heads, key=lambda head: head.score)
    return found


def most_telling(rows: Sequence[Sequence[Head]]) -> tuple[Head, str]:
    """The head to show where none is named, and why that one.

    A clear induction head tells more than one of the previous token; the first token tells least.
    """
    found = clearest(rows)
    ranked = sorted(found, key=lambda name: (name != "first", found[name].score), reverse=True)
    if "induction" in found and found["induction"].score >= CLEAR:
        ranked = ["induction"]
    if ranked:
        name, head = ranked[0], found[ranked[0]]
        return head, f"the clearest {ROLES[name]} head: {WHY[name].format(percent(head.score))}"
    sharpest = min((head for row in rows for head in row), key=lambda head: head.entropy)
    return sharpest, f"the sharpest head: its entropy is the lowest, {sharpest.entropy:.2f} nats"


def show_overview(screen: Screen, rows: Sequence[Sequence[Head]], tokens: int) -> None:
    """Prints layers x heads."""
    words = "; ".join(f"{word}: {meaning}" for word, _, meaning in WORDS.values())
    screen.title(
        "Heads",
        f"What each head looks at most, the share of its weight that goes there, and its entropy"
        f" in nats (0: one token only; {math.log(tokens):.1f}: all {tokens:,} alike). {words};"
        f" {MIXED}: none of the three gets {LEAST_SCORE:.0%}.",
    )
    screen.line()
    most = max(len(row) for row in rows)
    each = math.ceil(most / math.ceil(most / ((screen.width - 6) // CELL)))
    for start in range(0, most, each):
        blocks = [row[start : start + each] for row in rows]
        heading: list[int] = []
        for block in blocks:
            numbers = [head.head for head in block]
            if numbers != heading[: len(numbers)]:
                heading = _heading(numbers, blocks)
                names = "".join(f"H{n}".ljust(CELL) for n in heading)
                screen.line(Text("      " + names, style="dim"))
            screen.lines(_cells(block))
        screen.line()
    best = (
        f"{ROLES[name]} {head.name} {percent(head.score)}" for name, head in clearest(rows).items()
    )
    screen.beside("  Clearest", Text(", ".join(best) or "none of the three"))


def _heading(numbers: list[int], blocks: Sequence[Sequence[Head]]) -> list[int]:
    """The longest row of numbers that begins with these: one heading for all such rows."""
    every = ([head.head for head in block] for block in blocks)
    return max((row for row in every if row[: len(numbers)] == numbers), key=len)


def _cells(row: Sequence[Head]) -> Iterator[Text]:
    if not row:
        return
    roles, numbers = Text().append(f"  L{row[0].layer}".ljust(6), "dim"), Text(" " * 6)
    for head in row:
        word, ink, _ = WORDS.get(head.role, (MIXED, "dim", ""))
        roles.append(word.ljust(CELL), ink)
        share = percent(head.score) if head.role else ""
        numbers.append(f"{share:4} {head.entropy:.1f}".ljust(CELL), style="dim")
    yield roles
    yield numbers
