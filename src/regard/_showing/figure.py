"""Figures of weights for papers and notebooks, drawn with matplotlib and without pyplot's state."""

from __future__ import annotations

import contextlib
import io
import math
import numbers
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.errors import ShapeError, UnsupportedError, a_type
from regard._base.extras import needed_by
from regard._base.files import check_ending, replaced_when_complete
from regard._base.settings import as_float, counted
from regard._call.checks import read_flag
from regard._showing.heatmap import (
    INCH,
    INK,
    NARROWEST,
    Part,
    Scale,
    cell_of,
    draw,
    is_square,
    label_bar,
    norm_of,
    read_picture,
    scale_of,
    set_labels,
    shown_token,
)
from regard._weights.origin import origin_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

    from regard._base.types import PoolHow
    from regard._weights.attention_weights import AttentionWeights

SCALES = ("auto", "linear", "log", "uniform")
ENDINGS = (".pdf", ".svg", ".png")
MOST_BINS = 1024  # on a side of a heatmap
MOST_PIXELS = 2**15  # on a side of a picture
LEAST_DPI = 10  # below it no letter has a pixel
# Of the drawing alone: text stays text, and equal figures are equal files.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "regard",
    "pdf.fonttype": 42,
    "text.usetex": False,
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
# For tokens in scripts that matplotlib's own font has no signs for, where they are installed.
FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans", "Noto Sans Arabic", "Noto Sans Hebrew",
    "Noto Sans Devanagari", "Noto Emoji", "Arial Unicode MS", "Hiragino Sans", "PingFang SC",
    "Microsoft YaHei", "Segoe UI Symbol", "WenQuanYi Zen Hei", "Unifont",
)  # fmt: skip
GLYPH = re.compile(r"Glyph (\d+) ")  # how matplotlib begins to say that a font lacks a sign
MOST_SIGNS = 8  # that a warning names
MOST_HEADS = 4  # that one names
METADATA: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


class FontWarning(UserWarning):
    """No font has a sign of a token."""


class LostWarning(UserWarning):
    """Weights that are no numbers are drawn as masked ones are."""


class Panel(NamedTuple):
    """One heatmap of a figure."""

    title: str
    weights: AttentionWeights[Any]  # (Lq, Lk)


class Figure:
    """Heatmaps of some heads, which ``Recording.figure`` draws.

    ``save`` writes them to a file; as the last line of a notebook's cell it is shown. There is one
    colour bar for all of them.

    Attributes:
        figure: the figure of matplotlib, to change anything in it before it is saved.

    Example:
        ``recording.figure(2, 4, scale="log").save("head.pdf")``
    """

    figure: MatplotlibFigure

    def __init__(
        self,
        panels: Sequence[Panel],
        tokens: tuple[Sequence[str], Sequence[str]],
        *,
        rows: slice | None,
        columns: slice | None,
        scale: Scale,
        dpi: float,
        size: tuple[float, float] | None,
        transparent: bool,
    ) -> None:
        with needed_by("recording.figure"):
            import matplotlib

        _check_format(scale, dpi, size)
        shape: Any = panels[0].weights.shape
        part = Part.of(shape, rows, columns, tokens)
        if 0 in part.shape:
            raise ShapeError(
                f"figure: {counted(part.shape[0], 'query', 'queries')} and"
                f" {counted(part.shape[1], 'key')} have nothing to draw;"
                f" there are {shape[0]} and {shape[1]}."
            )
        self._transparent = read_flag("transparent", transparent, "figure")
        self._dpi, self._is_tight = float(dpi), size is None
        self._told: set[str] = set()
        self._count = len(panels)
        with self._lacking_told(), matplotlib.rc_context(_style()):
            self.figure = _drawn(panels, part, scale_of(scale, part.shape[1]), self._dpi, size)
        _tell_lost(panels, part)

    def __repr__(self) -> str:
        width, height = self.figure.get_size_inches()
        return f"Figure({counted(self._count, 'heatmap')}, {width:.1f} × {height:.1f} inches)"

    def save(self, path: str | Path) -> None:
        """Write the figure, with text as text in PDF and SVG.

        The file appears under its name when it is complete, or not at all.

        Args:
            path: file to write, ``.pdf``, ``.svg`` or ``.png``; one that exists is replaced.

        Raises:
            OSError: the folder is missing or cannot be written.
            ValueError: a name that ends in anything else.
        """
        check_name(path)
        data = self._written(Path(path).suffix[1:].lower())
        with replaced_when_complete(path) as file:
            file.write(data)

    def _written(self, kind: str) -> bytes:
        import matplotlib

        file = io.BytesIO()
        tight: Any = {"bbox_inches": "tight", "pad_inches": 0.04} if self._is_tight else {}
        with self._lacking_told(), matplotlib.rc_context(_style()):
            self.figure.savefig(
                file, format=kind, dpi=self._dpi, metadata=METADATA.get(kind),
                facecolor="none" if self._transparent else "white", **tight,
            )  # fmt: skip
        return file.getvalue()

    @contextlib.contextmanager
    def _lacking_told(self) -> Iterator[None]:
        """Tells once of each sign that no font has, where matplotlib does at every drawing."""
        with warnings.catch_warnings(record=True) as found:
            warnings.filterwarnings("always", GLYPH.pattern, UserWarning)
            yield
        signs: dict[str, None] = {}
        for one in found:
            if number := GLYPH.match(str(one.message)):
                signs[chr(int(number[1]))] = None
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if lacking := [sign for sign in signs if sign not in self._told]:
            self._told.update(lacking)
            more = f" and {len(lacking) - MOST_SIGNS} more" if lacking[MOST_SIGNS:] else ""
            warnings.warn(
                f"figure: no font has {', '.join(map(repr, lacking[:MOST_SIGNS]))}{more}, and a box"
                " stands there. Name an installed font that has them in matplotlib's font.family:"
                ' matplotlib.rcParams["font.family"] = [...], or a line of the file matplotlibrc.',
                FontWarning,
                stacklevel=5,
            )

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        data = self._written("png")
        width, height = (int.from_bytes(data[n : n + 4], "big") for n in (16, 20))
        shown = {"width": round(width * 96 / self._dpi), "height": round(height * 96 / self._dpi)}
        return data, shown

    def _repr_svg_(self) -> str:
        return self._written("svg").decode()


def check_name(path: str | Path) -> None:
    """Refuses a name that is not of a figure.

    Raises:
        ValueError: with the endings that there are.
    """
    if not Path(path).suffix:
        raise ValueError(f"{path}: the name has no ending; that of a figure is .pdf, .svg or .png.")
    check_ending(path, ENDINGS, "a figure")
    if Path(path).suffix.lower() not in ENDINGS:  # of digits, as in v1.5
        raise ValueError(f"{path}: the name does not end in .pdf, .svg or .png.")


def plot_weights(
    weights: AttentionWeights[Any],
    index: tuple[int, ...],
    how: PoolHow,
    tokens: Sequence[str] | None,
    ax: Any,
) -> Any:
    """Draws one matrix into matplotlib Axes, and gives them back."""
    with needed_by("weights.plot"):
        from matplotlib import pyplot

    matrix = weights.matrix(*index)
    Lq, Lk = matrix.shape
    if not matrix.size:
        raise ShapeError(f"plot: a matrix of shape {(Lq, Lk)} has nothing to draw.")
    if tokens is not None and not _are_strings(tokens):
        raise TypeError(
            f"plot: tokens is {a_type(tokens)}; a list of strings is needed, one for each key or"
            " query."
        )
    if tokens is not None and len(tokens) not in (Lq, Lk):
        raise ShapeError(
            f"plot: {counted(len(tokens), 'token')} for {counted(Lq, 'query', 'queries')} and"
            f" {counted(Lk, 'key')}."
        )
    of_queries = tokens if tokens is not None and len(tokens) == Lq else None
    of_keys = tokens if tokens is not None and len(tokens) == Lk else None
    if tokens is None and (origin := origin_of(weights)) is not None:
        of_queries, of_keys = origin.row_tokens, origin.column_tokens
    part = Part.of((Lq, Lk), None, None, (of_queries, of_keys))
    if ax is None:
        ax = pyplot.subplots(layout=_layout(part))[1]
    scale = scale_of("auto", Lk)
    picture = read_picture(matrix, part, 512, scale, how)
    image = draw(ax, picture, part, norm_of(scale, [picture]))
    set_labels(ax, part, cell_of(ax, part))
    label_bar(ax.figure.colorbar(image, ax=ax), scale, [picture], how)
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    return ax


def _are_strings(tokens: Any) -> bool:
    """Whether it is a list of strings, or anything else that holds and counts them."""
    is_list = isinstance(tokens, Sized) and isinstance(tokens, Iterable)
    return is_list and all(isinstance(token, str) for token in tokens)


def _style() -> Any:
    """The style, and fonts after those that are set."""
    import matplotlib
    from matplotlib import font_manager

    families = list(matplotlib.rcParams["font.family"])
    there = {font.name for font in font_manager.fontManager.ttflist}
    return STYLE | {"font.family": families + [name for name in FALLBACKS if name in there]}


def _check_format(scale: Any, dpi: Any, size: Any) -> None:
    if scale not in SCALES:
        raise ValueError(f"figure: scale is {scale!r}; there are {', '.join(map(repr, SCALES))}.")
    if not _is_positive(dpi) or dpi < LEAST_DPI:
        raise ValueError(
            f"figure: dpi is {dpi!r}; a number of pixels per inch is needed, at least {LEAST_DPI}."
        )
    if size is None:
        return
    sides = size if isinstance(size, (tuple, list)) else ()
    if len(sides) != 2 or not all(map(_is_positive, sides)):
        raise ValueError(f"figure: size is {size!r}; (width, height) in inches is needed.")
    _check_pixels(sides, dpi)


def _check_pixels(size: Sequence[float], dpi: float) -> None:
    if max(size) * dpi > MOST_PIXELS:
        raise ValueError(
            f"figure: {size[0]:g} × {size[1]:g} inches of {dpi:g} dpi are more than"
            f" {MOST_PIXELS} pixels on a side; give a smaller size or dpi."
        )


def _is_positive(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and 0 < as_float(x) < math.inf


def _drawn(
    panels: Sequence[Panel],
    part: Part,
    scale: str,
    dpi: float,
    size: tuple[float, float] | None,
) -> MatplotlibFigure:
    from matplotlib.figure import Figure

    across = 1 if len(panels) == 1 else min(len(panels), 4, math.ceil(math.sqrt(1.5 * len(panels))))
    down = -(-len(panels) // across)
    across = -(-len(panels) // down)  # of four, two and two
    width, height = (
        _panel(part, len(panels)) if size is None else (size[0] / across, size[1] / down)
    )
    bins = min(MOST_BINS, max(64, round(dpi * max(width, height))))
    pictures = [read_picture(panel.weights, part, bins, scale, "max") for panel in panels]
    norm = norm_of(scale, pictures)
    if size is None:
        left, below = (_room(names) for names in part.names)
        size = across * (width + 0.12) + left + 1.1, down * (height + 0.3) + below + 0.4
        _check_pixels(size, dpi)
    figure = Figure(figsize=size, dpi=dpi, layout=_layout(part))
    grid = figure.subplots(down, across, squeeze=False)
    every = list(grid.flat)
    for ax, panel, picture in zip(every, panels, pictures):
        image = draw(ax, picture, part, norm)
        if panel.title:
            ax.set_title(panel.title)
    for ax in every[len(panels) :]:
        ax.remove()
    every = every[: len(panels)]
    bar = figure.colorbar(
        image, ax=every, shrink=min(1.0, max(0.4, 1.6 / down)) if down > 1 else 1.0,
        aspect=24, pad=0.02, fraction=0.05,
    )  # fmt: skip
    label_bar(bar, scale, pictures, "max")
    for at, ax in enumerate(every):
        if at % across == 0:
            ax.set_ylabel("query")
        if at + across >= len(every):
            ax.set_xlabel("key")
    cell = min(width / part.shape[1], height / part.shape[0]) * INCH
    engine: Any = figure.get_layout_engine()
    for _ in range(2):  # labels take room, which changes what fits
        for at, ax in enumerate(every):
            set_labels(ax, part, cell, at % across == 0, at + across >= len(every))
        _lay_out(figure, engine)
        for ax in every:
            ax.apply_aspect()
        found = cell_of(every[0], part)
        if found > 0.9 * cell:
            break
        cell = found
    figure.set_layout_engine("none")  # it is laid out; each drawing would do it again
    return figure


def _lay_out(figure: MatplotlibFigure, engine: Any) -> None:
    """Gives each part its place.

    Raises:
        ValueError: the size has no room for them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*constrained_layout not applied", UserWarning)
        try:
            engine.execute(figure)
        except UserWarning as warning:
            if "constrained_layout" not in str(warning):
                raise
            width, height = figure.get_size_inches()
            raise ValueError(
                f"figure: {width:g} × {height:g} inches have no room for the heatmaps beside their"
                " labels; give a larger size, fewer heads, or no size."
            ) from None


def _panel(part: Part, count: int) -> tuple[float, float]:
    """Inches of a heatmap: its cells have room for labels, where that is not too large."""
    most = max(part.shape)
    side = min(max(0.165 * most, 2.4), 4.5) if count == 1 else min(max(0.13 * most, 1.5), 2.2)
    if count == 1 and most <= 64:
        side = max(side, 0.094 * most)
    rows, columns = (max(n / most, NARROWEST) for n in part.shape)
    return side * columns, side * rows


def _room(names: Sequence[str] | None) -> float:
    """Inches for the longest label."""
    return 0.3 + 0.055 * max((len(shown_token(name)) for name in (names or ())[:200]), default=4)


def _layout(part: Part) -> Literal["compressed", "constrained"]:
    """Maps of square cells are narrower than their room: "compressed" closes the gaps."""
    return "compressed" if is_square(part) else "constrained"


def _tell_lost(panels: Sequence[Panel], part: Part) -> None:
    """Warns of queries whose weights are no numbers, after ``read_picture`` has read the heads."""
    rows = slice(part.rows.start, part.rows.stop)
    lost = []
    for panel in panels:
        try:
            lse = to_numpy(panel.weights.part(rows).lse)
        except UnsupportedError:  # weights that were given are numbers, and have no scores
            continue
        if count := int(np.sum(~np.isfinite(lse) & ~np.isneginf(lse))):
            lost.append(f"{count:,} {'query' if count == 1 else 'queries'} of {panel.title}")
    if lost:
        more = f" and {len(lost) - MOST_HEADS} more heads" if lost[MOST_HEADS:] else ""
        warnings.warn(
            f"figure: the weights of {', '.join(lost[:MOST_HEADS])}{more} are not numbers: a score"
            " is NaN or infinite. They are grey, as masked pairs are; recording.weights[layer].lse"
            " tells which queries they are.",
            LostWarning,
            stacklevel=4,
        )
