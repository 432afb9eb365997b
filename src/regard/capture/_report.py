"""What a watched step gives: arrays by name, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.capture._measured import MEASURES, NonFinite

# For each measure its heading, the head that a table shows of each layer, and the format.
COLUMNS = {
    "max_score": ("largest score", "most", "{:.4g}"),
    "entropy_mean": ("mean entropy", "least", "{:.3f}"),
    "entropy_min": ("least entropy", "least", "{:.3f}"),
    "first_token": ("first token", "most", "{:.1%}"),
    "distance": ("distance", "most", "{:.1f}"),
}


class WatchReport(dict[str, NDArray[np.float64]]):
    """The numbers of one step: float64 arrays ``(layers, heads)`` by name; ``print`` it.

    ``"max_score"``, ``"entropy_mean"``, ``"entropy_min"``, ``"first_token"`` and ``"distance"``. A
    model with several kinds of attention has them for each, as ``"decoder/max_score"`` and
    ``"cross/max_score"``. Of layers with fewer heads than others the rest is NaN.

    Attributes:
        step: which.
        layers: names of the layers' modules, in the order in which they were called, by kind;
            ``""`` where there is one kind.
        nonfinite: the first score of all steps that is NaN or infinite, where it is of this step.
    """

    def __init__(
        self,
        step: int,
        kinds: dict[str, list[tuple[str, dict[str, np.ndarray]]]],
        nonfinite: NonFinite | None,
    ) -> None:
        super().__init__()
        self.step, self.nonfinite = step, nonfinite
        self.layers: dict[str, tuple[str, ...]] = {}
        self._heads: dict[str, list[int]] = {}  # of each layer
        for kind, rows in kinds.items():
            self.layers[kind] = tuple(name for name, _ in rows)
            self._heads[kind] = [len(found[MEASURES[0]]) for _, found in rows]
            for measure in MEASURES:
                self[_key(kind, measure)] = _stacked([found[measure] for _, found in rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (dict(self), vars(self))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in self.items())
        return f"WatchReport(step {self.step}: {shapes})"

    def __str__(self) -> str:
        """A table: for each layer the head that stands out, with its number."""
        header = [f"step {self.step}", *(heading for heading, _, _ in COLUMNS.values())]
        lines = []
        for kind, names in self.layers.items():
            for n, name in enumerate(names):
                rows = {measure: self[_key(kind, measure)][n] for measure in COLUMNS}
                own = slice(self._heads[kind][n])
                cells = [_cell(row[own], measure) for measure, row in rows.items()]
                lines.append([name or "(the model)", *cells])
        widths = [max(map(len, column)) for column in zip(header, *lines)]
        text = [_line(cells, widths) for cells in (header, *lines)]
        return "\n".join(text if self.nonfinite is None else [*text, str(self.nonfinite)])


def _restored(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> WatchReport:
    report = WatchReport.__new__(WatchReport)
    report.update(arrays)
    vars(report).update(facts)
    return report


def _key(kind: str, measure: str) -> str:
    return f"{kind}/{measure}" if kind else measure


def _stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """``(layers, heads)``, with NaN for heads that a layer does not have."""
    out = np.full((len(rows), max(map(len, rows))), np.nan)
    for into, row in zip(out, rows):
        into[: len(row)] = row
    return out


def _cell(row: np.ndarray, measure: str) -> str:
    """The number of the head that stands out; one that is NaN does."""
    _, which, form = COLUMNS[measure]
    h = int(row.argmax() if which == "most" else row.argmin())  # or the first NaN
    if np.isnan(row[h]):
        return "nan" if np.isnan(row).all() else f"nan (head {h})"
    return f"{form.format(row[h])} (head {h})"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    parts = [first.ljust(widths[0]), *(x.rjust(width) for x, width in zip(others, widths[1:]))]
    return "  ".join(parts)
