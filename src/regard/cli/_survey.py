"""``regard survey``: what every head does over a corpus, and what a survey has found."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import io
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from regard._base.errors import ShapeError, UnsupportedError
from regard._base.extras import needed_by
from regard._base.files import check_place, quoted, replaced_when_complete
from regard._base.settings import counted
from regard._base.tables import escaped
from regard._showing.figure import check_name
from regard.cli._errors import CommandError, InputError, one_line, writing
from regard.cli._screen import Screen, busy, ink_on, percent, style
from regard.cli._screen import colour as ramp
from regard.heads._roles import shares_text

if TYPE_CHECKING:
    from regard.survey import Facts, HeadSums, Progress, Survey

MANIFEST = "survey.json"
SHARD = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
PLAIN_SECONDS = 10  # between two lines, where there is no terminal
NAMED = 5  # documents that are left out
COLUMNS = ("first", "previous", "self", "induction", "entropy", "distance", "nucleus")
CELL = 5


@dataclasses.dataclass(frozen=True)
class SurveyOptions:
    """The options of ``regard survey``."""

    output: Path | None = None
    model: str | None = None
    max_tokens: int | None = None
    shard_tokens: int | None = None
    column: str | None = None
    documents: bool = False
    threads: int | None = None
    workers: int | None = None
    shard: str | None = None
    json: bool = False
    plot: Path | None = None
    trust_remote_code: bool = False


def survey(paths: Sequence[str], options: SurveyOptions) -> None:
    """Surveys a corpus, or shows what a survey has found.

    Raises:
        CommandError: with the line to print.
    """
    from regard.survey import Survey, SurveyError

    if options.plot is not None:
        with _as_input():
            check_name(options.plot)
        with writing():
            check_place(options.plot)
        with needed_by("--plot"):
            import matplotlib  # noqa: F401 - before anything is computed
    if options.output is None:
        _show(Survey, paths, options)
        return
    part = _part(options.shard)
    with _as_input():
        made = Survey(
            options.output, model=options.model, corpus=paths, max_tokens=options.max_tokens,
            shard_tokens=options.shard_tokens, column=options.column, documents=options.documents,
            threads=options.threads, trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        made.facts()  # a damaged file is told before anything is computed
    numbers = range(len(made)) if part is None else range(part[0], len(made), part[1])
    try:
        with _Report(made) as report:
            made.run(workers=options.workers, shards=numbers, progress=report)
    except (SurveyError, OSError, UnsupportedError, ShapeError) as error:
        raise CommandError(one_line(error).removeprefix("survey: ")) from error
    if not _tell(made, options) and part is None:
        raise CommandError("no document was read; what is left out, and why, is told above.")


@contextlib.contextmanager
def _as_input() -> Iterator[None]:
    """Errors in this block are those of the input."""
    try:
        yield
    except (OSError, ValueError, UnsupportedError) as error:
        raise InputError(one_line(error).removeprefix("survey: ")) from error


def _part(written: str | None) -> tuple[int, int] | None:
    """``3/24``: of 24 processes that share the shards, that of number 3, from 0 on."""
    if written is None:
        return None
    found = SHARD.fullmatch(written)
    if not found or not int(found[1]) < int(found[2]):
        raise InputError(
            f"--shard {written}: K/N is needed, process K of N, from 0/N to N-1/N, as in 3/24."
        )
    return int(found[1]), int(found[2])


def _show(kind: type[Survey], paths: Sequence[str], options: SurveyOptions) -> None:
    if len(paths) != 1 or not (Path(paths[0]) / MANIFEST).is_file():
        if not any(glob.has_magic(path) or Path(path).exists() for path in paths):
            raise InputError(f"{' '.join(paths)}: no such file or folder.")
        raise InputError(
            f"{' '.join(paths)}: no survey is there. To make one, name a folder for it: regard"
            f" survey {' '.join(map(quoted, paths))} -o heads/"
        )
    usual = SurveyOptions(json=options.json, plot=options.plot)
    if options != usual:
        raise InputError(
            "to show a survey, only --json and --plot have a meaning; with -o FOLDER it is made."
        )
    with _as_input():
        found = kind(paths[0])
    _tell(found, options)


def _tell(made: Survey, options: SurveyOptions) -> int:
    """Prints what there is: a table, the clearest heads, a picture; or JSON. Counts documents."""
    with _as_input(), busy("Adding up"):
        sums, facts = made.heads(), made.facts()
    if options.plot is not None:
        if not sums.documents:
            raise CommandError("there is no document yet, so there is nothing to draw.")
        _draw(sums, options.plot)
    if options.json:
        sys.stdout.write(json.dumps(_document(made, sums, facts), indent=1) + "\n")
        return sums.documents
    screen = Screen()
    _summary(screen, made, sums, facts)
    if sums.documents:
        _table(screen, sums)
        _clearest(screen, made, sums)
        _picture(screen, sums)
    return sums.documents


def _draw(sums: HeadSums, path: Path) -> None:
    picture = io.BytesIO()
    sums.plot().savefig(picture, format=path.suffix[1:].lower(), dpi=150)
    with writing(), replaced_when_complete(path) as file:
        file.write(picture.getbuffer())


def _summary(screen: Screen, made: Survey, sums: HeadSums, facts: dict[int, Facts]) -> None:
    settings, model = made.manifest.settings, made.manifest.model["name"]
    heads = sum(map(len, sums.head_numbers))
    of = "recordings" if model == "recordings" else f"model {escaped(model)}"
    screen.line(
        f"{counted(sums.documents, 'document')}, {counted(sums.tokens, 'token')},"
        f" {counted(heads, 'head')} in {counted(len(sums.layers), 'layer')}, {of}"
    )
    if missing := len(made) - len(facts):
        are = "is" if missing == 1 else "are"
        screen.line(
            f"{missing} of {counted(len(made), 'shard')} {are} still to come: the command that"
            " began it goes on."
        )
    cut = [name for found in facts.values() for name in found.cut]
    empty = [name for found in facts.values() for name in found.empty]
    unreadable = [f"{name} ({why})" for found in facts.values() for name, why in found.unreadable]
    most = settings["max_tokens"]
    for words, names in (
        (f"read up to {most:,} tokens, the rest left out", cut),
        ("left out, empty", empty),
        ("left out, cannot be read", unreadable),
    ):
        if names:
            more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
            shown = ", ".join(map(escaped, names[:NAMED])) + more
            what = counted(len(names), "document")
            screen.beside(f"{what}:", Text(f"{words}: {shown}"))
    if sums.not_finite:
        are = "is" if sums.not_finite == 1 else "are"
        screen.line(
            f"{counted(sums.not_finite, 'query', 'queries')} {are} left out of a head: a weight"
            " there is not finite."
        )


def _table(screen: Screen, sums: HeadSums) -> None:
    scores, means = sums.means(), {name: sums.mean(name) for name in COLUMNS}
    roles = [shares_text(scores.named(*key)) for key in _every(sums)]
    width = min(40, max(4, *map(len, roles))) + 2
    screen.title(
        "Heads",
        "Means over all queries: role, shares of weight, entropy in nats, distance in tokens, and"
        " nucleus, the keys that hold 90 % of the weight.",
    )
    names = "".join(f"{name:>10}" for name in COLUMNS)
    screen.line(Text(f"{'head':8}{'role':{width}}{names}", style="dim"))
    for (layer, head), role in zip(_every(sums), roles):
        at = scores.place(layer, head)
        numbers = "".join(_number(means[name][at]) for name in COLUMNS)
        screen.line(f"{f'L{layer}H{head}':8}{role:{width}}{numbers}")


def _number(x: float) -> str:
    return f"{'–':>10}" if math.isnan(x) else f"{x:10.3f}" if abs(x) < 100 else f"{x:10,.0f}"


def _clearest(screen: Screen, made: Survey, sums: HeadSums) -> None:
    """Of each role the head with the highest share, and what that head looks at most."""
    scores = sums.means()
    best: dict[str, tuple[int, float, tuple[int, int]]] = {}
    for key in _every(sums):
        for role, share in scores.named(*key):
            own = role.tells, share, key
            best[role.name] = max(best.get(role.name, (0, 0.0, key)), own)
    screen.title("Clearest", "Of each role one head, and the token that gets most of its weight.")
    for name, (_, share, key) in sorted(best.items(), key=lambda item: item[1], reverse=True):
        line = f"  {name} L{key[0]}H{key[1]} {percent(share)}"
        if receivers := sums.top_receivers(*key):
            top = receivers[0]
            place = escaped(Path(made.document(top.document)).name)
            line += f"  {top.token!r} at {top.position} of {place}, {percent(top.received)}"
        screen.line(line)
    if not best:
        screen.line("  none has a role")


def _picture(screen: Screen, sums: HeadSums) -> None:
    """A row of cells for each layer, for each of some statistics side by side."""
    from regard.survey._plot import SHOWN, by_number, numbers_of

    numbers = numbers_of(sums)
    wide = max(len(numbers) * CELL, *map(len, SHOWN))
    if 6 + wide > screen.width:
        screen.line()
        screen.line(Text("  --plot FILE.png draws the picture of so many heads.", style="dim"))
        return
    together = max(1, (screen.width - 6) // (wide + 2))
    heads = "".join(f"H{number}".center(CELL) for number in numbers).ljust(wide)
    for start in range(0, len(SHOWN), together):
        names = SHOWN[start : start + together]
        grids = [by_number(sums, name) for name in names]
        screen.line()
        heading = "  ".join(name.ljust(wide) for name in names)
        screen.line(Text("      " + heading, style="bold"))
        screen.line(Text("      " + "  ".join([heads] * len(names)), style="dim"))
        for at, layer in enumerate(sums.layers):
            line = Text(f"  L{layer}".ljust(6), style="dim")
            for grid, top in grids:
                for x in grid[at]:
                    line.append_text(_cell(screen, x, top))
                line.append(" " * (wide - len(numbers) * CELL + 2))
            screen.line(line)


def _cell(screen: Screen, x: float, top: float) -> Text:
    if math.isnan(x):
        return Text(" " * CELL)
    shown = f"{x:.2f}" if x < 10 else f"{x:.0f}"
    if screen.has_colours:
        paper = ramp(x / top)
        return Text(shown.center(CELL), style=style(ink_on(paper), paper))
    return Text(shown.center(CELL))


def _every(sums: HeadSums) -> Iterable[tuple[int, int]]:
    return [(n, head) for n, heads in zip(sums.layers, sums.head_numbers) for head in heads]


def _document(made: Survey, sums: HeadSums, facts: dict[int, Facts]) -> dict[str, Any]:
    columns = sums.columns()
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    for row in rows:
        for name, x in row.items():
            if isinstance(x, float):
                row[name] = round(x, 6) if math.isfinite(x) else None
        row["top_receivers"] = [
            one._asdict() | {"name": made.document(one.document)}
            for one in sums.top_receivers(row["layer"], row["head"])
        ]
    left_out = list(facts.values())
    return {
        "model": made.manifest.model,
        "settings": made.manifest.settings,
        "documents": sums.documents,
        "tokens": sums.tokens,
        "shards": {"done": len(facts), "of": len(made)},
        "cut": [name for found in left_out for name in found.cut],
        "empty": [name for found in left_out for name in found.empty],
        "unreadable": [
            {"name": name, "reason": why} for found in left_out for name, why in found.unreadable
        ],
        "heads": rows,
    }


class _Report:
    """A progress bar on a terminal, a line now and then elsewhere; in tokens."""

    def __init__(self, made: Survey) -> None:
        self._made, self._console = made, Console(stderr=True, highlight=False)
        self._bar: Bar | None = None
        self._last = -math.inf
        self._unsaid = ""
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(bar_width=None),
                TextColumn("{task.fields[said]}"), console=self._console, expand=True,
            )  # fmt: skip
            self._task = self._bar.add_task("surveying", total=None, said="")

    def __enter__(self) -> _Report:
        if self._bar is not None:
            self._bar.start()
        missing, of = len(self._made.missing()), len(self._made)
        if missing < of:
            are = "is" if of - missing == 1 else "are"
            self._say(f"{of - missing} of {counted(of, 'shard')} {are} there already")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._unsaid:
            self._say(self._unsaid)
        if kind is KeyboardInterrupt:
            missing, of = len(self._made.missing()), len(self._made)
            self._say(
                f"Stopped with {of - missing} of {counted(of, 'shard')}; the same command goes on."
            )

    def __call__(self, progress: Progress) -> None:
        said = (
            f"{progress.tokens:,} of {progress.total:,} tokens  {progress.rate:,.0f} tokens/s"
            f"{_left(progress.seconds)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.tokens, total=progress.total, said=said)
            return
        self._unsaid = f"{progress.shards} of {counted(progress.of, 'shard')}  {said}"
        if time.monotonic() - self._last > PLAIN_SECONDS or progress.shards == progress.of:
            self._last = time.monotonic()
            self._say(self._unsaid)
            self._unsaid = ""

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


def _left(seconds: float | None) -> str:
    if seconds is None or seconds < 1:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"  {hours}:{minutes:02}:{rest:02} left" if hours else f"  {minutes}:{rest:02} left"
