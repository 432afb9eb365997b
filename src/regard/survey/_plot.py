"""The picture of a survey: small heatmaps of heads, one for each of six statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regard._base.extras import needed_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regard.survey._sums import HeadSums

SHOWN = ("first", "previous", "induction", "entropy", "distance", "nucleus")
UNITS = {"entropy": "nats", "distance": "tokens", "nucleus": "keys"}
MOST_NUMBERS = 16  # heads side by side with their numbers
ACROSS = 3


def plot_sums(sums: HeadSums) -> Figure:
    """As ``HeadSums.plot``."""
    if not sums.layers:
        raise ValueError("survey: there is no document yet, so there is nothing to draw.")
    with needed_by("HeadSums.plot"):
        from matplotlib.figure import Figure

    heads, layers = max(map(len, sums.head_numbers)), len(sums.layers)
    wide, high = max(2.6, 0.45 * heads) + 1, max(1.4, 0.34 * layers) + 0.8
    figure = Figure(figsize=(ACROSS * wide, 2 * high), layout="constrained")
    for axes, name in zip(figure.subplots(2, ACROSS).flat, SHOWN):
        _draw(axes, name, sums)
    figure.suptitle(f"{sums.documents:,} documents, {sums.tokens:,} tokens", fontsize=10)
    return figure


def _draw(axes: Axes, name: str, sums: HeadSums) -> None:
    grid = sums.mean(name)
    unit = UNITS.get(name, "share of weight")
    top = 1.0 if name not in UNITS else max(1e-9, float(np.nanmax(grid, initial=1e-9)))
    axes.imshow(np.ma.masked_invalid(grid), cmap="magma", vmin=0, vmax=top, aspect="auto")
    axes.set_title(f"{name}, {unit}", fontsize=9)
    axes.set_yticks(range(len(sums.layers)), [f"L{n}" for n in sums.layers], fontsize=7)
    numbers = sums.head_numbers[0]
    same = all(own == numbers for own in sums.head_numbers)
    step = max(1, len(numbers) // MOST_NUMBERS)
    names = [f"H{n}" for n in numbers[::step]] if same else []
    axes.set_xticks(range(0, len(numbers), step) if same else [], names, fontsize=7)
    axes.tick_params(length=0)
    if grid.shape[1] > MOST_NUMBERS:
        return
    for (at, h), x in np.ndenumerate(grid):
        if np.isfinite(x):
            text = f"{x:.2f}" if x < 10 else f"{x:.0f}"
            ink = "black" if x > 0.6 * top else "white"
            axes.text(h, at, text, ha="center", va="center", fontsize=6.5, color=ink)
