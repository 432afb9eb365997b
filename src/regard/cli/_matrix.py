"""The weights of one head: a table of numbers for a short text, a heatmap for a long one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from regard._base.settings import counted
from regard._weights.attention_weights import AttentionWeights
from regard.cli._screen import RGB, Screen, colour, ink_on, label, labels_width, style
from regard.recording import Recording, Words, WordWeights

if TYPE_CHECKING:
    from regard._base.types import Float

    Pooled = Float[np.ndarray, "rows columns"]

MOST_ROWS = 32  # of a table
MOST_LINES = 40  # of a heatmap that names its tokens
WIDEST_CELL = 8
NARROWEST_CELL = 4
MOST_COLUMNS = 80  # of a heatmap
DECADES = 4  # of its colours: from 0.01 % to all
LEVELS = (0.001, 0.01, 0.1, 0.5)  # of its five shades where there are no colours


def is_short(screen: Screen, recording: Recording | Words) -> bool:
    """Whether every weight can be written out as a number."""
    queries, keys = recording.query_tokens, recording.tokens
    room = screen.width - _margin(queries)
    return max(len(queries), len(keys)) <= min(MOST_ROWS, room // NARROWEST_CELL)


def show_table(
    screen: Screen, weights: AttentionWeights | WordWeights, recording: Recording | Words
) -> None:
    """Prints every weight in per cent; masked pairs stay blank."""
    queries, keys = recording.query_tokens, recording.tokens
    margin = _margin(queries)
    cell = min(WIDEST_CELL, (screen.width - margin) // len(keys))
    cell = min(cell, max(NARROWEST_CELL, labels_width(keys, WIDEST_CELL) + 1))
    numbers = Text("".join(f"{j} ".rjust(cell) for j in range(len(keys))), style="dim")
    names = "".join(_right(label(token, cell - 1).rstrip(), cell - 1) + " " for token in keys)
    screen.line(" " * margin, numbers)
    screen.line(" " * margin, names)
    table = np.asarray(weights, np.float64)
    is_unmasked = ~np.isnan(np.asarray(weights.pool((len(queries), len(keys)))))
    digits = len(str(len(queries) - 1))
    for i, row in enumerate(table):
        text = (
            Text().append(f"  {i:>{digits}} ", "dim").append(label(queries[i], margin - digits - 4))
        )
        text.append(" ")
        for weight, is_shown in zip(row, is_unmasked[i] | np.isnan(row)):
            text.append(*(_cell(screen, weight, cell) if is_shown else (" " * cell, None)))
        screen.line(text)


def show_picture(
    screen: Screen, weights: AttentionWeights | WordWeights, recording: Recording | Words
) -> None:
    """Prints a heatmap: the strongest weight of each bin, or every weight where there is room."""
    queries, keys = weights.shape
    margin = _margin(recording.query_tokens)
    if queries <= MOST_LINES and 2 * keys <= screen.width - margin:
        _show_blocks(screen, weights, recording.query_tokens, margin)
        return
    margin = len(f"{queries - 1:,}") + 4
    columns = min(keys, screen.width - margin, MOST_COLUMNS)
    lines = min(-(-min(columns, queries) // 2), max(16, screen.height - 8))
    rows = min(queries, 2 * lines) if screen.has_colours else lines
    picture = np.asarray(weights.pool((rows, columns)), np.float64)
    drawn = _half_blocks(picture) if screen.has_colours else _shades(screen, picture)
    for n, line in enumerate(drawn):
        first = (2 * n if screen.has_colours else n) * queries // rows
        mark = f"{first:,} ┤" if n % 4 == 0 else "│"
        screen.line(Text(f"{mark:>{margin}}"), line)
    _show_legend(screen, _axis(keys, columns), margin)


def _show_blocks(
    screen: Screen, weights: AttentionWeights | WordWeights, queries: Sequence[str], margin: int
) -> None:
    """A line for each query, two columns for each key."""
    keys = weights.shape[1]
    picture = np.asarray(weights.pool((len(queries), keys)), np.float64)
    digits = len(str(len(queries) - 1))
    for i, row in enumerate(picture):
        line = Text().append(f"  {i:>{digits}} ", "dim")
        line.append(label(queries[i], margin - digits - 4)).append(" ")
        for weight in row:
            if math.isnan(weight):
                line.append("  ")
            elif screen.has_colours:
                line.append("  ", style(None, colour(_share(weight))))
            else:
                line.append(2 * _shade(screen, weight))
        screen.line(line)
    _show_legend(screen, _axis(keys, 2 * keys), margin)


def explain_picture(recording: Recording | Words) -> str:
    """One sentence that says what the heatmap shows."""
    return (
        f"Heatmap. Down: the {counted(len(recording.query_tokens), 'query', 'queries')}; across:"
        f" the {counted(len(recording.tokens), 'key')}. Each spot shows the strongest weight in it;"
        " blank is masked."
    )


def _margin(queries: Sequence[str]) -> int:
    return len(str(len(queries) - 1)) + labels_width(queries, 12) + 4


def _right(shown: str, width: int) -> str:
    return " " * (width - cell_len(shown)) + shown


def _cell(screen: Screen, weight: float, width: int) -> tuple[str, Style | None]:
    text = f"{100 * weight:.0f} ".rjust(width)
    if not screen.has_colours or math.isnan(weight):
        return text, None
    paper = colour(math.sqrt(weight))
    return text, style(ink_on(paper), paper)


def _share(log_weight: float) -> float:
    """The position of a weight on the colour ramp: 0 for 0.01 % or less, 1 for all."""
    return 1 + log_weight / (DECADES * math.log(10))


def _half_blocks(picture: Pooled) -> Iterator[Text]:
    """``▀`` has two halves: its ink is the upper row, its paper the lower."""
    if len(picture) % 2:
        picture = np.vstack([picture, np.full((1, picture.shape[1]), np.nan)])
    for upper, lower in zip(picture[::2], picture[1::2]):
        line = Text()
        for pair in zip(upper, lower):
            ink, paper = (None if math.isnan(x) else colour(_share(x)) for x in pair)
            line.append(*_halves(ink, paper))
        yield line


def _halves(upper: RGB | None, lower: RGB | None) -> tuple[str, Style | None]:
    if upper is None:
        return (" ", None) if lower is None else ("▄", style(lower, None))
    return "▀", style(upper, lower)


def _shades(screen: Screen, picture: Pooled) -> Iterator[Text]:
    for row in picture:
        yield Text("".join(" " if math.isnan(x) else _shade(screen, x) for x in row))


def _shade(screen: Screen, log_weight: float) -> str:
    return screen.shades[int(np.searchsorted(LEVELS, math.exp(log_weight), "right"))]


def _axis(keys: int, columns: int) -> str:
    """Positions under the columns where their bins begin."""
    axis, step = "", max(16, columns // 10 * 2)
    for column in range(0, columns - 5, step):
        axis = axis.ljust(column) + f"└{column * keys // columns:,}"
    return axis


def _show_legend(screen: Screen, axis: str, margin: int) -> None:
    screen.line(Text(" " * margin + axis, style="dim"))
    screen.line(" " * margin, *_legend(screen))


def _legend(screen: Screen) -> list[Text]:
    if not screen.has_colours:
        names = ("less", *(f"{level:.1%}".replace(".0%", "%") for level in LEVELS))
        return [Text("   ".join(f"{sign} {name}" for sign, name in zip(screen.shades, names)))]
    parts = [Text().append("0.01% ", "dim")]
    parts += [Text("█", style=style(colour(n / 23), None)) for n in range(24)]
    return [*parts, Text().append(" 100%", "dim")]
