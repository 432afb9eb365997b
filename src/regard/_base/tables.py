"""Matrices as tables: plain text, rich for a terminal, HTML for a notebook.

Numbers are always written: colour only repeats what they say. Texts of tokens are data: shown
escaped, never interpreted.
"""

from __future__ import annotations

import html as html_module
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

MOST_ROWS = 12
MOST_COLUMNS = 16
MOST_GRIDS = 4
LONGEST_LABEL = 12
TEXT_WIDTH = 100

# From blue (negative) over white (0) to red (positive), as the viewer's page has it. They are told
# apart with any colour vision.
DIVERGING = np.array(
    [
        [13, 52, 120], [33, 102, 172], [84, 151, 201], [166, 206, 227], [255, 255, 255],
        [249, 192, 163], [229, 127, 96], [186, 40, 50], [110, 8, 34],
    ],
    float,
)  # fmt: skip
INVISIBLE = "background:#e4e4e4;color:#555"

RGB = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Table:
    """One named array, its formula and the labels of its last two axes."""

    name: str
    formula: str
    numbers: np.ndarray  # float64, at least one axis
    rows: Sequence[str] | None  # None: numbered
    columns: Sequence[str] | None  # None: no header; empty: numbered
    hidden: np.ndarray | None = None  # bool, of the numbers' shape: shown grey, as masked
    note: str = ""  # under the facts

    @cached_property
    def finite(self) -> np.ndarray:
        """The numbers without NaN and infinities."""
        is_finite = np.isfinite(self.numbers)
        return self.numbers if is_finite.all() else self.numbers[is_finite]

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Smallest and largest finite number; zeros where there is none."""
        finite = self.finite
        return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)

    @property
    def facts(self) -> str:
        """Shape, range and variance of the finite numbers; the note on a line of its own."""
        facts = [f"shape {self.numbers.shape}"]
        if self.finite.size:
            facts.append(f"range {self.ends[0]:.4g} to {self.ends[1]:.4g}")
            with np.errstate(over="ignore", invalid="ignore"):  # of numbers beyond 1e154
                variance = self.finite.var() if self.ends[0] < self.ends[1] else 0.0
            facts.append(f"variance {variance:.4g}")
        return "   ".join(facts) + (f"\n  {self.note}" if self.note else "")


class Cell(NamedTuple):
    """The text of a number and its colour; None where it is hidden, or NaN."""

    text: str
    colour: RGB | None


class Grid(NamedTuple):
    """The shown part of one matrix; ``...`` marks left-out rows and columns."""

    title: str
    header: list[str] | None
    rows: list[tuple[str, list[Cell]]]


def text(tables: Iterable[Table], width: int = TEXT_WIDTH) -> str:
    """Plain text, at most ``width`` columns where a label and two numbers fit."""
    lines: list[str] = []
    for table in tables:
        lines += [_heading(table), f"  {table.facts}"]
        for grid in _grids(table, width):
            lines += _lines(grid)
        lines.append("")
    return "\n".join(lines)


def rich(tables: Iterable[Table], width: int) -> Iterator[Any]:
    """Renderables for a rich console: the same tables, coloured."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in tables:
        yield Text(table.name, style="bold") + Text(_heading(table)[len(table.name) :])
        yield Text(f"  {table.facts}", style="dim")
        for grid in _grids(table, width):
            shown = RichTable.grid(padding=(0, 1, 0, 0))
            if grid.title:
                yield Text(f"  {grid.title}")
            if grid.header is not None:
                shown.add_row("", *(Text(name, justify="right") for name in grid.header))
            for label, cells in grid.rows:
                shown.add_row(Text(f"  {label}"), *(_styled(cell, Text) for cell in cells))
            yield shown
        yield Text()


def html(tables: Iterable[Table]) -> str:
    """HTML that needs no script and no style sheet."""
    parts = []
    for table in tables:
        formula = html_module.escape(_heading(table)[len(table.name) :].strip())
        parts.append(
            f'<p style="margin:.8em 0 .2em"><b>{html_module.escape(table.name)}</b>'
            f"{formula and f' <code>{formula}</code>'}"
            f"<br><small>{html_module.escape(table.facts)}</small></p>"
        )
        parts += [_html_grid(grid) for grid in _grids(table, None)]
    return f'<div class="regard-steps">{"".join(parts)}</div>'


def _heading(table: Table) -> str:
    return f"{table.name} = {table.formula}" if table.formula else table.name


def _grids(table: Table, width: int | None) -> Iterator[Grid]:
    """The matrices of an array with any leading axes; the first few of many."""
    matrices = np.atleast_2d(table.numbers)
    leading = matrices.shape[:-2]
    for n, index in enumerate(np.ndindex(leading)):
        if n == MOST_GRIDS:
            yield Grid(f"... and {math.prod(leading) - n} more", None, [])
            return
        yield _grid(table, index, width)


def _grid(table: Table, index: tuple[int, ...], width: int | None) -> Grid:
    matrix = np.atleast_2d(table.numbers)[index]
    hidden = None if table.hidden is None else np.atleast_2d(table.hidden)[index]
    row_names = _labels(table.rows, matrix.shape[0])
    names = None if table.columns is None else _labels(table.columns, matrix.shape[1])
    write, colour = _writer(table), _colourer(table)
    rows, most = _shown(matrix.shape[0], MOST_ROWS), MOST_COLUMNS
    if width is not None:
        numbers = (*map(write, table.ends), "-inf")
        widest = max(map(_width, (*numbers, *(names or ()))))
        label = max((_width(row_names[i]) for i in rows if i is not None), default=0)
        most = max(2, (width - label - 2) // (widest + 2))
    columns = _shown(matrix.shape[1], most)

    def cell(i: int | None, j: int | None) -> Cell:
        if i is None or j is None:
            return Cell("...", None)
        x = float(matrix[i, j])
        is_hidden = not math.isfinite(x) or (hidden is not None and hidden[i, j])
        return Cell(write(x), None if is_hidden else colour(x))

    return Grid(
        f"[{', '.join(map(str, index))}]" if index else "",
        None if names is None else ["..." if j is None else names[j] for j in columns],
        [("..." if i is None else row_names[i], [cell(i, j) for j in columns]) for i in rows],
    )


def _shown(count: int, most: int) -> list[int | None]:
    """Indices of the first and last of ``count``, None between them where some are left out."""
    if count <= most:
        return list(range(count))
    first = most // 2
    return [*range(first), None, *range(count - (most - 1 - first), count)]


def _labels(names: Sequence[str] | None, count: int) -> list[str]:
    if not names or len(names) != count:
        return [str(n) for n in range(count)]
    return [printable(name) for name in names]


def escaped(text: str) -> str:
    """A text on one line, with control characters escaped: a terminal would obey them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable(token: str) -> str:
    """A token on one short line: control characters escaped, outer spaces as dots."""
    shown = escaped(token)
    inner = shown.strip(" ")
    before = len(shown) - len(shown.lstrip(" "))
    shown = "·" * before + inner + "·" * (len(shown) - len(inner) - before)
    return shown if len(shown) <= LONGEST_LABEL else f"{shown[: LONGEST_LABEL - 2]}.."


def _width(shown: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in shown
    )


def _writer(table: Table) -> Callable[[float], str]:
    """How all numbers of one array are written: with five figures of the largest."""
    finite, largest = table.finite, max(map(abs, table.ends))
    if largest < 1e6 and np.array_equal(finite, np.rint(finite)):
        form = ".0f"
    elif largest >= 1e5 or largest < 1e-3:
        form = ".3e"
    else:
        form = f".{4 - max(0, math.floor(math.log10(largest)))}f"
    return lambda x: format(x + 0.0, form)  # + 0.0: no minus before a zero


def _colourer(table: Table) -> Callable[[float], RGB]:
    """From white for 0 to dark red for the largest number, dark blue for its negative."""
    largest, middle = max(map(abs, table.ends)), len(DIVERGING) // 2
    places = np.arange(len(DIVERGING))

    def colour(x: float) -> RGB:
        place = middle * (1 + x / largest) if largest else middle
        red, green, blue = (round(float(np.interp(place, places, c))) for c in DIVERGING.T)
        return red, green, blue

    return colour


def _ink(colour: RGB) -> str:
    """Black or white, whichever reads better on the colour."""
    red, green, blue = colour
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def _lines(grid: Grid) -> Iterator[str]:
    if grid.title:
        yield f"  {grid.title}"
    left = max((_width(label) for label, _ in grid.rows), default=0)
    table = [[cell.text for cell in cells] for _, cells in grid.rows]
    every = table if grid.header is None else [grid.header, *table]
    widths = [max(map(_width, column)) for column in zip(*every)]
    labels = [label for label, _ in grid.rows]
    for label, texts in zip(labels if grid.header is None else ["", *labels], every):
        padded = (" " * (w - _width(text)) + text for w, text in zip(widths, texts))
        yield "  ".join(["  " + label + " " * (left - _width(label)), *padded]).rstrip()


def _styled(cell: Cell, make_text: Any) -> Any:
    if cell.colour is None:
        return make_text(cell.text, justify="right", style="dim")
    red, green, blue = cell.colour
    style = f"{_ink(cell.colour)} on rgb({red},{green},{blue})"
    return make_text(f" {cell.text}", justify="right", style=style)


def _html_grid(grid: Grid) -> str:
    th = '<th scope="{}" style="text-align:{};padding:1px 6px;font-weight:normal">{}</th>'
    rows = []
    if grid.header is not None:
        names = "".join(th.format("col", "right", html_module.escape(n)) for n in grid.header)
        rows.append(f"<tr><td></td>{names}</tr>")
    for label, cells in grid.rows:
        head = th.format("row", "left", html_module.escape(label))
        rows.append(f"<tr>{head}{''.join(map(_html_cell, cells))}</tr>")
    caption = f"<caption>{html_module.escape(grid.title)}</caption>" if grid.title else ""
    return (
        '<table style="border-collapse:collapse;font-family:monospace;font-size:90%;margin:0">'
        f"{caption}{''.join(rows)}</table>"
    )


def _html_cell(cell: Cell) -> str:
    style = INVISIBLE
    if cell.colour is not None:
        red, green, blue = cell.colour
        style = f"background:#{red:02x}{green:02x}{blue:02x};color:{_ink(cell.colour)}"
    return f'<td style="{style};text-align:right;padding:1px 6px">{cell.text}</td>'
