"""The picture of a survey: small heatmaps of heads, one for each of six statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regard._base.extras import needed_by
from regard._base.settings import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regard.survey._sums import HeadSums

SHOWN = ("first", "previous", "induction", "entropy", "distance", "nucleus")
UNITS = {"entropy": "nats", "distance": "tokens", "nucleus": "keys"}
MOST_NUMBERS = 16  # heads side by side with their numbers; more have a bar of colours
NOTHING = "0.75"  # a grey, which the colours do not have
ACROSS = 3


def plot_sums(sums: HeadSums) -> Figure:
    """As ``HeadSums.plot``."""
    if not sums.layers:
        raise ValueError("survey: there is no document yet, so there is nothing to draw.")
    with needed_by("HeadSums.plot"):
        from matplotlib.figure import Figure

    numbers = numbers_of(sums)
    numbered = len(numbers) <= MOST_NUMBERS
    across, down = (0.45, 0.34) if numbered else (0.16, 0.16)  # inches of a cell
    wide, high = max(2.6, across * len(numbers)) + 1, max(1.4, down * len(sums.layers)) + 0.8
    figure = Figure(figsize=(ACROSS * wide, 2 * high), layout="constrained")
    for axes, name in zip(figure.subplots(2, ACROSS).flat, SHOWN):
        _draw(axes, name, sums, numbers, numbered)
    figure.suptitle(
        f"{counted(sums.documents, 'document')}, {counted(sums.tokens, 'token')}", fontsize=10
    )
    return figure


def numbers_of(sums: HeadSums) -> list[int]:
    """Numbers of the heads that any layer has: the columns of a picture."""
    return sorted({number for own in sums.head_numbers for number in own})


def by_number(sums: HeadSums, name: str) -> tuple[np.ndarray, float]:
    """Means of a statistic by layer and number of the head, and what the brightest stands for.

    NaN where a layer has no head of that number, or nothing was counted.
    """
    numbers, means = numbers_of(sums), sums.mean(name)
    grid = np.full((len(sums.layers), len(numbers)), np.nan)
    for row, own, values in zip(grid, sums.head_numbers, means):
        row[np.searchsorted(numbers, own)] = values[: len(own)]
    return grid, 1.0 if name not in UNITS else max(1e-9, float(np.nanmax(grid, initial=1e-9)))


def _draw(axes: Axes, name: str, sums: HeadSums, numbers: list[int], numbered: bool) -> None:
    grid, top = by_number(sums, name)
    axes.set_facecolor(NOTHING)
    shown = np.ma.masked_invalid(grid)
    image = axes.imshow(shown, cmap="magma", vmin=0, vmax=top, aspect="auto", origin="upper")
    axes.set_title(f"{name}, {UNITS.get(name, 'share of weight')}", fontsize=9)
    axes.set_yticks(range(len(sums.layers)), [f"L{n}" for n in sums.layers], fontsize=7)
    named = range(0, len(numbers), -(-len(numbers) // MOST_NUMBERS))
    axes.set_xticks(named, [f"H{numbers[at]}" for at in named], fontsize=7)
    axes.grid(False)  # of a style
    axes.tick_params(length=0)
    if not numbered:
        axes.figure.colorbar(image, ax=axes, aspect=30, pad=0.01).ax.tick_params(labelsize=7)
        return
    for at, own in enumerate(sums.head_numbers):
        for h in np.searchsorted(numbers, own):
            x = grid[at, h]
            text = "–" if np.isnan(x) else f"{x:.2f}" if x < 10 else f"{x:.0f}"
            ink = "white" if x <= 0.6 * top else "black"
            axes.text(h, at, text, ha="center", va="center", fontsize=6.5, color=ink)
