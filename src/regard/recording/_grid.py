"""Where the patches of a picture are among the keys of a recording."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class Grid(NamedTuple):
    """Where the patches of a picture are among the keys: ``rows · columns`` of them, row by row."""

    start: int
    """Position of the first patch."""
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """The position after the last patch."""
        return self.start + self.rows * self.columns


def checked_grids(grids: Any, count: int) -> tuple[Grid, ...]:
    if not isinstance(grids, (tuple, list)):
        raise TypeError(f"recording: grids is {type(grids).__name__}; a list of Grid is needed.")
    found = tuple(_checked_grid(n, grid, count) for n, grid in enumerate(grids))
    ordered = sorted(found)
    for before, after in pairwise(ordered):
        if after.start < before.stop:
            raise ValueError(
                f"recording: {before} ends before token {before.stop}, and {after} begins at"
                f" {after.start}; a token is a patch of one picture."
            )
    return found


def _checked_grid(n: int, grid: Any, count: int) -> Grid:
    parts = tuple(grid) if isinstance(grid, (tuple, list)) else ()
    is_int = [isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in parts]
    if len(parts) != 3 or not all(is_int):
        raise TypeError(
            f"recording: grids[{n}] is {grid!r}; a Grid(start, rows, columns) of ints is needed."
        )
    found = Grid(*map(int, parts))
    if min(found.rows, found.columns) < 1 or not 0 <= found.start < found.stop <= count:
        raise ValueError(
            f"recording: grids[{n}] is {found}, the tokens {found.start} to {found.stop - 1}; there"
            f" are {count}, and a picture has at least one patch."
        )
    return found
