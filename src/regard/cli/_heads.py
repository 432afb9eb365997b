"""The overview: what every head does."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

from rich.text import Text

from regard.cli._errors import InputError
from regard.cli._screen import Screen, busy, percent, take_any_text
from regard.cli._source import ModelChoice, choose_group, place_of_option, read_recording
from regard.heads import HeadScores, Telling, place_to_open
from regard.recording import Recording

MIXED = "mixed"
INKS = ("yellow", "cyan", "green", "magenta")  # of a role, by how much it tells
CELL = 9


def heads(argument: str, model: ModelChoice, group: str | None, is_text: bool) -> None:
    """Prints a line for each head: its role, its scores, and the keys that get most weight.

    Raises:
        CommandError: with the line to print.
    """
    recording = choose_group(read_recording(argument, model, is_text, "heads"), group)
    if not recording.query_tokens:
        raise InputError(f"{argument}: a recording without queries has nothing to score.")
    with busy("Looking at what every head does"):
        table = recording.heads().table()
    take_any_text()
    sys.stdout.write(table + "\n")


def choose_head(
    recording: Recording, layer: int | None, head: int | None
) -> tuple[HeadScores, Telling]:
    """The scores of all heads, and the head to show: the most telling one, of those named.

    Raises:
        InputError: no such layer or head, or nothing to score.
    """
    among = _named(recording, layer, head)
    with busy("Looking at what every head does"):
        scores = recording.heads()
    return scores, scores.telling(among)


def choose_place(recording: Recording, layer: int | None, head: int | None) -> tuple[int, int]:
    """Layer and head of ``choose_head``, scored only where there is a choice; errors likewise."""
    among = _named(recording, layer, head)
    with busy("Looking at what every head does"):
        return place_to_open(recording, among)


def _named(recording: Recording, layer: int | None, head: int | None) -> list[tuple[int, int]]:
    """Layers and heads of these numbers; without one all."""
    numbers, chosen = recording.layer_numbers, slice(None)
    if layer is not None:
        place = place_of_option("--layer", layer, numbers, " layers")
        chosen = slice(place, place + 1)
    if head is not None:
        heads = {n for found in recording.layers[chosen] for n in found.head_numbers}
        place_of_option("--head", head, sorted(heads), " heads")
    if not recording.query_tokens:
        raise InputError("a recording without queries has nothing to score.")
    layers = zip(numbers[chosen], recording.layers[chosen])
    return [(n, h) for n, of in layers for h in of.head_numbers if head in (None, h)]


def show_overview(screen: Screen, scores: HeadScores) -> None:
    """Prints layers x heads."""
    found = {named.role for at in _every(scores) for named in scores.named(*at)}
    ordered = sorted(found, key=lambda role: (-role.tells, role.name))
    words = "".join(f" {role.short}: {role.keys};" for role in ordered)
    tokens = len(scores.tokens)
    screen.title(
        "Heads",
        "What each head looks at most, the share of its weight that goes there, and its entropy"
        f" in nats (0: one token only; {math.log(tokens):.1f}: all {tokens:,} alike).{words}"
        f" {MIXED}: no one kind of token; +: a second kind too, which regard heads names.",
    )
    screen.line()
    most = max(map(len, scores.head_numbers))
    each = math.ceil(most / math.ceil(most / ((screen.width - 6) // CELL)))
    for start in range(0, most, each):
        blocks = [heads[start : start + each] for heads in scores.head_numbers]
        heading: Sequence[int] = ()
        for layer, numbers in zip(scores.layers, blocks):
            if numbers != heading[: len(numbers)]:
                heading = _heading(numbers, blocks)
                names = "".join(f"H{n}".ljust(CELL) for n in heading)
                screen.line(Text("      " + names, style="dim"))
            screen.lines(_cells(scores, layer, numbers))
        screen.line()
    screen.beside("  Clearest", Text(", ".join(_clearest(scores)) or "none has a role"))


def _clearest(scores: HeadScores) -> Iterator[str]:
    """For each role that any head has, the head with the highest share."""
    best: dict[str, tuple[int, float, str]] = {}
    for layer, head in _every(scores):
        for role, share in scores.named(layer, head):
            text = f"{role.name} L{layer}H{head} {percent(share)}"
            best[role.name] = max(best.get(role.name, (0, 0.0, "")), (role.tells, share, text))
    return (text for _, _, text in sorted(best.values(), reverse=True))


def _every(scores: HeadScores) -> Iterator[tuple[int, int]]:
    """Numbers of every layer and head."""
    numbers = zip(scores.layers, scores.head_numbers)
    return ((layer, head) for layer, heads in numbers for head in heads)


def _heading(numbers: Sequence[int], blocks: Sequence[Sequence[int]]) -> Sequence[int]:
    """The longest row of numbers that begins with these: one heading for all such rows."""
    return max((row for row in blocks if row[: len(numbers)] == numbers), key=len)


def _cells(scores: HeadScores, layer: int, heads: Sequence[int]) -> Iterator[Text]:
    if not heads:
        return
    roles, numbers = Text().append(f"  L{layer}".ljust(6), "dim"), Text(" " * 6)
    for head in heads:
        found = scores.named(layer, head)
        entropy = scores.entropy[scores.place(layer, head)]
        is_number = not math.isnan(entropy)
        word, ink, share = MIXED if is_number else "NaN", "dim", ""
        if found:
            role = found[0].role
            word = role.short + ("+" if len(found) > 1 else "")
            ink, share = INKS[role.tells], percent(found[0].share)
        roles.append(word.ljust(CELL), ink)
        written = f"{entropy:.1f}" if is_number else ""
        numbers.append(f"{share:4} {written}".ljust(CELL), style="dim")
    yield roles
    yield numbers
