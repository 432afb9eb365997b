"""The terminal: its width and colours, and how labels, bars and titles look there."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from regard._base.tables import escaped, printable

NARROWEST = 60
# From weight 0 to 1, dark to bright: readable with any colour vision, and in grey.
RAMP = ((34, 28, 70), (96, 32, 118), (182, 54, 108), (244, 124, 84), (254, 236, 168))
EIGHTHS = "▏▎▍▌▋▊▉█"
SHADES, ASCII_SHADES = "·░▒▓█", ".-+#@"

RGB = tuple[int, int, int]


class Screen:
    """Standard output, for lines of a known width.

    Args:
        width: columns; by default the terminal's, or 80 where there is none.
    """

    def __init__(self, width: int | None = None) -> None:
        take_any_text()
        self.console = Console(width=width, highlight=False, markup=False, emoji=False)
        self.width = self.console.width = max(NARROWEST, self.console.width)
        self.height = self.console.height
        self.has_colours = self.console.color_system is not None and not self.console.no_color
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        self.has_signs = encoding.lower().replace("-", "").startswith("utf")

    @property
    def shades(self) -> str:
        """Five signs for a weight, weakest first."""
        return SHADES if self.has_signs else ASCII_SHADES

    def line(self, *parts: str | Text) -> None:
        """Prints one line as it is; without colours, without the spaces at its end."""
        text = Text.assemble(*parts)
        if not self.has_colours:
            text.rstrip()
        self.console.print(text, soft_wrap=True)

    def lines(self, texts: Iterable[Text]) -> None:
        """Prints lines."""
        for text in texts:
            self.line(text)

    def title(self, name: str, explanation: str) -> None:
        """Begins a section: its name, and what is shown, wrapped beside it."""
        self.line()
        self.beside(name, Text(explanation, style="dim"))

    def headline(self, name: str, explanation: str) -> None:
        """Begins a section with a sentence, and under it what is shown, set in."""
        self.line()
        for n, part in enumerate(self.wrapped(Text(name, style="bold"), self.width - 2)):
            self.line("  " if n else "", part)
        if explanation:
            for part in self.wrapped(Text(explanation, style="dim"), self.width - 2):
                self.line("  ", part)

    def beside(self, name: str, text: Text) -> None:
        """Prints a name, and a text wrapped beside it."""
        indent = cell_len(name) + 2
        for n, part in enumerate(self.wrapped(text, self.width - indent)):
            self.line(Text(name, style="bold") if n == 0 else " " * (indent - 2), "  ", part)

    def wrapped(self, text: Text, width: int | None = None) -> Iterable[Text]:
        """The text in lines of this width, by default the screen's."""
        return text.wrap(self.console, width or self.width)

    def bar(self, share: float, width: int) -> str:
        """A bar of up to ``width`` columns for a share of 1."""
        if not self.has_signs:
            return "#" * round(share * width)
        full, rest = divmod(round(min(1.0, share) * width * 8), 8)
        return EIGHTHS[-1] * full + (EIGHTHS[rest - 1] if rest else "")


def say(line: str) -> None:
    """Prints one line, of any length."""
    take_any_text()
    sys.stdout.write(escaped(line) + "\n")


def remark(line: str) -> None:
    """Prints one line on standard error, where that is open and has room."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def take_any_text() -> None:
    """Signs that the output has not are ``?`` from here on."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # the terminal may lack a character


@contextlib.contextmanager
def busy(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what it is busy with, until that is done.

    Yields what is called with how far it is, ``layer 2 of 4``.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(Text(what, style="dim")) as status:
        yield lambda part: status.update(Text(f"{what}: {part}", style="dim"))


def label(token: str, width: int) -> str:
    """A token on one line of exactly ``width`` columns: spaces at its ends as dots."""
    shown = printable(token)
    if cell_len(shown) > width:
        shown = set_cell_size(shown, width - 1).rstrip() + "…"
    return set_cell_size(shown, width)


def labels_width(tokens: Iterable[str], most: int) -> int:
    """Columns that the longest of these labels takes, at most ``most``."""
    return min(most, max(cell_len(printable(token)) for token in tokens))


def colour(share: float) -> RGB:
    """The ramp at 0 to 1."""
    place = min(1.0, max(0.0, share)) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - low)) for a, b in zip(RAMP[low], RAMP[low + 1])
    )
    return red, green, blue


def style(ink: RGB | None, paper: RGB | None) -> Style:
    """A style of two colours; None leaves the terminal's own."""
    return Style(color=_written(ink), bgcolor=_written(paper))


def ink_on(paper: RGB) -> RGB:
    """Black or white, whichever reads better."""
    red, green, blue = paper
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)


def percent(share: float) -> str:
    """``67%``; ``-`` for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.0f}%"


def _written(rgb: RGB | None) -> str | None:
    return None if rgb is None else f"rgb({rgb[0]},{rgb[1]},{rgb[2]})"
