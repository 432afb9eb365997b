"""One heatmap of a figure: the weights of a part in bins, their colours, labels and colour bar."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.tables import escaped
from regard._showing.picture import INVISIBLE, LOG_FLOOR, colours
from regard._weights.origin import seen_of
from regard._weights.parts import part_of

if TYPE_CHECKING:
    from regard._base.types import PoolHow
    from regard._weights.attention_weights import AttentionWeights

Scale: TypeAlias = Literal["auto", "linear", "log", "uniform"]
LINEAR_KEYS = 100  # "auto" is linear below, where a row's weights are of one order
NUMBERED = 12  # queries and keys up to which the cells have room for their numbers
INCH = 72  # points
LONGEST = 14  # characters of a token
SMALLEST, LARGEST = 5.0, 8.0  # points of a label
BETWEEN = 1.0  # points between two labels, at least
NARROWEST = 0.2  # of a heatmap: its shorter side, of the longer one
INK = "#1e1c32"


class Part(NamedTuple):
    """The queries and keys that are drawn: their positions, and their tokens where they are known.

    ``names`` are None, or as many as there are positions.
    """

    rows: range
    columns: range
    names: tuple[Sequence[str] | None, Sequence[str] | None]

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        rows: slice | None,
        columns: slice | None,
        names: tuple[Sequence[str] | None, Sequence[str] | None],
    ) -> Part:
        down = _neighbours("rows", rows, shape[0])
        across = _neighbours("columns", columns, shape[1])
        of_rows, of_columns = (
            None if x is None else x[side.start : side.stop]
            for x, side in zip(names, (down, across))
        )
        return cls(down, across, (of_rows, of_columns))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, right, bottom and top: positions are the middles of cells."""
        rows, columns = self.rows, self.columns
        return columns.start - 0.5, columns.stop - 0.5, rows.stop - 0.5, rows.start - 0.5


class Picture(NamedTuple):
    """What the colours of one heatmap stand for."""

    values: np.ndarray  # (R, C): weights, or × uniform; NaN where all is masked
    bins: tuple[int, int]  # queries and keys in one value, at most


def scale_of(scale: Scale, keys: int) -> str:
    if scale != "auto":
        return scale
    return "linear" if keys < LINEAR_KEYS else "log"


def _neighbours(name: str, side: slice | None, n: int) -> range:
    found = part_of(name, side, n)
    if found.step != 1:
        raise ValueError(f"figure: {name} has the step {found.step}; neighbours alone are drawn.")
    return range(found.start, found.stop)


def is_square(part: Part) -> bool:
    """Whether cells are squares: not where that leaves a thread."""
    return min(part.shape) >= NARROWEST * max(part.shape)


def read_picture(
    weights: AttentionWeights[Any], part: Part, bins: int, scale: str, how: PoolHow
) -> Picture:
    """Reads the weights of a part in at most ``bins`` bins on a side; memory is linear."""
    rows, columns = (slice(side.start, side.stop) for side in (part.rows, part.columns))
    if scale != "uniform":
        values = _pooled(weights, (bins, bins), how, rows, columns)
    else:
        values = _times_uniform(weights, bins, how, rows, columns)
    return Picture(values, (-(-part.shape[0] // bins), -(-part.shape[1] // bins)))


def _pooled(
    weights: AttentionWeights[Any],
    bins: tuple[int, int],
    how: PoolHow,
    rows: slice,
    columns: slice,
) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.exp(to_numpy(weights.pool(bins, how, rows, columns)).astype(float))


def _times_uniform(
    weights: AttentionWeights[Any], bins: int, how: PoolHow, rows: slice, columns: slice
) -> np.ndarray:
    """The same of weights times the number of keys that their query sees.

    Means are times the mean number of a bin; of what is largest, each query has its own.
    """
    counts = seen_of(weights).count[0][rows]
    height = min(bins, len(counts))
    edges = np.arange(height + 1) * len(counts) // height
    if how != "max" or height == len(counts):
        means = np.add.reduceat(counts, edges[:-1]) / np.diff(edges)
        return _pooled(weights, (bins, bins), how, rows, columns) * means[:, None]
    found = []
    for low, high in itertools.pairwise(edges.tolist()):
        part = slice(rows.start + low, rows.start + high)
        of_queries = _pooled(weights, (high - low, bins), how, part, columns)
        found.append(np.fmax.reduce(of_queries * counts[low:high, None], 0))
    return np.array(found)


def norm_of(scale: str, pictures: Sequence[Picture]) -> Any:
    """From values to places on the ramp."""
    from matplotlib.colors import LogNorm, Normalize

    if scale == "log":
        return LogNorm(math.exp(LOG_FLOOR), 1, clip=True)
    if scale == "uniform":
        return LogNorm(0.01, 100, clip=True)
    return Normalize(
        0, _rounded_up(max(_largest(picture.values) for picture in pictures)), clip=True
    )


def _largest(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def _rounded_up(x: float) -> float:
    """The next of 1, 2, 4, 5, 6, 8 in front of zeros, at most 1."""
    if not 0 < x < 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(x))
    return next((n * power for n in (1, 2, 3, 4, 5, 6, 8) if x <= n * power * 1.0001), 10 * power)


def draw(ax: Any, picture: Picture, part: Part, norm: Any) -> Any:
    """One heatmap, without labels."""
    from matplotlib.colors import ListedColormap

    listed = ListedColormap(colours(np.linspace(LOG_FLOOR, 0, 256)) / 255, "regard")
    ramp = listed.with_extremes(bad=tuple(INVISIBLE / 255))
    values = np.maximum(picture.values, norm.vmin)  # a logarithm has no 0; NaN stays
    image = ax.imshow(
        values, ramp, norm, extent=part.extent, origin="upper", interpolation="nearest",
        aspect="equal" if is_square(part) else "auto",
    )  # fmt: skip
    ax.grid(False)  # a style's lines would strike the numbers through
    ax.tick_params(length=2, pad=2)
    return image


def cell_of(ax: Any, part: Part) -> float:
    """Points of the shorter side of a cell, as the axes are now."""
    box = ax.get_window_extent()
    sides = [x / n for x, n in zip((box.height, box.width), part.shape)]
    return float(min(sides) / ax.figure.dpi * INCH)


def set_labels(ax: Any, part: Part, cell: float, left: bool = True, below: bool = True) -> None:
    """Ticks: every token where there is room, else whole positions; numbers in large cells."""
    for axis, side, names, on in (
        (ax.yaxis, part.rows, part.names[0], left),
        (ax.xaxis, part.columns, part.names[1], below),
    ):
        _set_ticks(axis, side, names, cell if is_square(part) else _along(ax, axis, side), on)
    for text in [*ax.texts]:
        text.remove()
    is_linear = ax.images[0].norm.vmin == 0
    if is_linear and max(part.shape) <= NUMBERED and cell >= 2.4 * SMALLEST:
        _write_numbers(ax, part, cell)


def _along(ax: Any, axis: Any, side: range) -> float:
    box = ax.get_window_extent()
    inches = (box.width if axis is ax.xaxis else box.height) / ax.figure.dpi
    return float(inches * INCH / len(side))


def _set_ticks(axis: Any, side: range, names: Sequence[str] | None, cell: float, on: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    font = min(LARGEST, 0.9 * cell)
    is_down = axis.axis_name == "x"
    if font >= SMALLEST and (names is not None or len(side) <= NUMBERED):
        labels = [str(n) for n in side] if names is None else [shown_token(name) for name in names]
        is_turned = on and is_down and _widest(axis.axes.figure, labels, font) > cell - BETWEEN
        turned: Any = {"rotation": 90} if is_turned else {}
        if on:
            axis.set_ticks([*side], labels, parse_math=False, fontsize=font, **turned)
        else:
            axis.set_ticks([])
        axis.set_tick_params(length=0)
        return
    most = max(2, min(8, int(cell * len(side) / (30 if is_down else 18))))
    ticks = MaxNLocator(most, integer=True, steps=[1, 2, 5, 10]).tick_values(side[0], side[-1])
    inside = [int(n) for n in ticks if int(n) == n and int(n) in side]
    axis.set_ticks(inside, [f"{n:,}" for n in inside] if on else [""] * len(inside))
    axis.set_tick_params(length=2)


def _widest(figure: Any, labels: Sequence[str], font: float) -> float:
    """Points of the widest label: letters differ, and those of some scripts are squares."""
    from matplotlib.text import Text

    look: Any = {"fontsize": font, "parse_math": False, "figure": figure}
    texts = (Text(text=label, **look) for label in dict.fromkeys(labels))
    widths = [text.get_window_extent().width for text in texts]
    return float(max(widths) / figure.dpi * INCH)


def _write_numbers(ax: Any, part: Part, cell: float) -> None:
    """The number of each cell, in per cent."""
    (image,) = ax.images
    values = image.get_array()
    digits = 1 if cell >= 26 else 0
    for r, i in enumerate(part.rows):
        for c, j in enumerate(part.columns):
            if values.mask is not np.ma.nomask and values.mask[r, c]:
                continue
            x = float(values[r, c])
            red, green, blue, _ = image.cmap(image.norm(x))
            is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
            ax.text(
                j, i, f"{100 * x:.{digits}f}",
                ha="center", va="center", fontsize=min(LARGEST, cell / 2.6),
                color=INK if is_light else "white",
            )  # fmt: skip


def label_bar(bar: Any, scale: str, pictures: Sequence[Picture], how: PoolHow) -> None:
    """Ticks in per cent, or × uniform, and what a colour stands for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    is_uniform = scale == "uniform"
    name = "weight ÷ uniform weight" if is_uniform else "weight"
    down, across = (max(sides) for sides in zip(*(picture.bins for picture in pictures)))
    if (down, across) != (1, 1):
        rule = f"strongest of up to {down} × {across} pairs"
        name = f"{name}, {'mean over queries, sum over keys' if how == 'mass' else rule}"
    bar.set_label(name)
    bar.locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]) if scale == "linear" else LogLocator(10)
    bar.minorlocator = NullLocator()
    bar.formatter = FuncFormatter(
        lambda x, _: f"{x:g}×" if is_uniform else f"{float(f'{100 * x:.6g}'):g}%"
    )
    bar.outline.set_linewidth(0.4)
    bar.update_ticks()


def shown_token(token: str) -> str:
    """A token as a label: one line of at most 14 signs, with a dot for a space."""
    text = token.replace(" ", "·").replace("\n", "⏎").replace("\t", "→")
    text = escaped(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
