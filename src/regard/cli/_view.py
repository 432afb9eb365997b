"""``regard view``: a recording, or what a model attends to in a text, in the browser."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard._base.files import check_ending, check_place
from regard.cli._errors import CommandError, InputError, one_line, reading, writing
from regard.cli._heads import choose_place
from regard.cli._screen import busy, remark, say
from regard.cli._source import (
    BUILTIN,
    STDIN,
    ModelChoice,
    choose_group,
    has_input,
    place_of_option,
    read_source,
    recorded,
    require_text,
)
from regard.recording import Recording

if TYPE_CHECKING:
    from regard.viewer._heads import Corpus
    from regard.viewer._readings import Reading, Readings
    from regard.viewer._server import Viewer

INTERRUPTED = 130  # as a shell has it: 128 + SIGINT
PAGE_ENDINGS = (".html", ".htm")
SIDES = ("rows", "columns")  # of a figure
SCORES = ("entropy", "distance", "first", "previous", "induction")  # that the page shows
SIDE = re.compile(r"([0-9]{1,16})?:([0-9]{1,16})?")


@dataclasses.dataclass(frozen=True)
class ViewOptions:
    """The options of ``regard view``."""

    other: str | None = None
    model: ModelChoice = BUILTIN
    is_text: bool = False
    layer: int | None = None
    head: int | None = None
    query: str | None = None
    port: int = 0
    open_browser: bool = True
    export: Path | None = None
    group: str | None = None
    rows: str | None = None
    columns: str | None = None
    scale: str | None = None
    words: bool | None = None
    explain: int | None = None
    survey: Path | None = None

    @property
    def is_figure(self) -> bool:
        """Whether a figure is written, and not a page."""
        if self.export is None:  # what draws figures takes a while to load
            return False
        from regard._showing.figure import ENDINGS

        return self.export.suffix.lower() in ENDINGS


def view(argument: str | None, options: ViewOptions) -> None:
    """Serves until Ctrl-C, or writes one file: a page, or a figure of one head.

    Raises:
        CommandError: with the line to print.
    """
    if argument is None:
        _check_nothing_given(options)
        _check_survey(options)
        _serve(_viewer(options, readings=_readings(options)), "", options.open_browser)
        return
    sources = [argument] if options.other is None else [argument, options.other]
    if not options.is_text and sources.count(STDIN) > 1:
        raise InputError("standard input can be read once; give the other text as a file.")
    _check_export(options)
    if options.export is not None:
        with writing():
            check_place(options.export)
    names = [_name(source, options.is_text) for source in sources]
    if options.other is None and options.export is None and options.explain is None:
        _open(read_source(argument, options.is_text, "view"), names[0], options)
        return
    read = [read_source(source, options.is_text, "view") for source in sources]
    require_text(read, options.model)
    recordings = [recorded(source, options.model, options.explain) for source in read]
    chosen = choose_group(recordings[0], options.group)
    if options.is_figure:
        _draw(chosen, options)
        return
    if options.export is not None:
        if options.layer is not None:
            place_of_option("--layer", options.layer, chosen.layer_numbers, " layers")
        others = [found.groups.get(chosen.group, found) for found in recordings[1:]]
        _export([chosen, *others], names, options.layer, options.export)
        return
    _check_survey(options, recordings)
    place = _place(recordings[0], chosen, options)
    _serve(_viewer(options, recordings, names), place, options.open_browser)


def _open(source: str | Recording, name: str, options: ViewOptions) -> None:
    """Opens one recording, or a text: with an input where that can hold it."""
    from regard.viewer._readings import MAX_CHARACTERS

    if isinstance(source, str) and len(source) <= MAX_CHARACTERS:
        readings = _readings(options, source, name)
        recording = cast("Reading", readings.first).recording
        shown: dict[str, Any] = {"readings": readings}
    else:
        require_text([source], options.model)
        recording = recorded(source, options.model)
        shown = {"recordings": [recording], "names": [name]}
    _check_survey(options, [recording])
    place = _place(recording, choose_group(recording, options.group), options)
    _serve(_viewer(options, **shown), place, options.open_browser)


def _readings(options: ViewOptions, text: str = "", name: str = "") -> Readings:
    """What the page's input reads texts with, and the first of them."""
    from regard.viewer._readings import Readings, reader_of, transformers_reader

    corpus = _corpus(options)
    with reading(), busy(f"Reading {len(text):,} characters" if text else "Loading the model"):
        model = options.model
        if model.is_own:
            from regard.lm import LanguageModel

            return Readings(reader_of(LanguageModel.load(model.name)), text, name, corpus)
        trusted = model.trust_remote_code
        reader = transformers_reader(model.name, trust_remote_code=trusted)
        return Readings(reader, text, name, corpus)


def _corpus(options: ViewOptions) -> Corpus | None:
    """The means of a survey by layer, head and score.

    Raises:
        InputError: there is no survey, or nothing in it yet.
    """
    if options.survey is None:
        return None
    from regard.survey import Survey

    with reading():
        sums = Survey(options.survey).heads()
    if not sums.documents:
        raise InputError(f"--survey {options.survey}: no document is in it yet; run it first.")
    columns = sums.columns()
    keys = zip(columns["layer"], columns["head"])
    return {key: {name: columns[name][n] for name in SCORES} for n, key in enumerate(keys)}


def _check_survey(options: ViewOptions, recordings: Sequence[Recording] = ()) -> None:
    """Refuses a survey of other heads than those that are shown; warns of one of another model.

    Raises:
        InputError: a head is shown of which the survey has nothing.
    """
    if options.survey is None:
        return
    from regard.survey import Survey
    from regard.survey._models import NO_MODEL

    known = _corpus(options) or {}
    surveyed = Survey(options.survey).manifest.model["name"]
    for recording in recordings:
        for layer, number in zip(recording.layers, recording.layer_numbers):
            for head in layer.head_numbers:
                if (number, head) not in known:
                    raise InputError(
                        f"--survey {options.survey} is of {surveyed}, and has nothing of"
                        f" layer {number}, head {head}, which is shown. Give a survey of the same"
                        " model, or leave it out."
                    )
    shown = {recording.model for recording in recordings} or {options.model.name}
    others = [name for name in sorted(shown) if name and Path(name).name != Path(surveyed).name]
    if others and surveyed != NO_MODEL:
        say(
            f"The means of --survey {options.survey} are of {surveyed}, and what is shown is of"
            f" {others[0]}."
        )


def _check_nothing_given(options: ViewOptions) -> None:
    """Refuses what needs a text where there is none.

    Raises:
        InputError: with the way out.
    """
    if has_input():
        raise InputError("Missing argument 'TEXT|FILE|-'.")
    usual = ViewOptions(
        model=options.model, port=options.port, open_browser=options.open_browser,
        survey=options.survey,
    )  # fmt: skip
    if options != usual:
        raise InputError(
            "without a text, only --model, --port, --survey and --no-open have a meaning: the page"
            " has an input to type one. Give a text, or leave the others out."
        )


def _viewer(
    options: ViewOptions,
    recordings: Sequence[Recording] = (),
    names: list[str] | None = None,
    readings: Readings | None = None,
) -> Viewer:
    from regard.viewer._server import Viewer

    try:
        return Viewer(recordings, names, options.port, readings, _corpus(options))
    except OSError as error:
        why = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise CommandError(
            f"port {options.port} cannot be used: {one_line(why)}. Leave --port out to take a"
            " free one."
        ) from error
    except ValueError as error:
        raise InputError(one_line(error)) from error


def _check_export(options: ViewOptions) -> None:
    """Refuses a name of another kind of file, and what is not for the kind that it has.

    Raises:
        InputError: with the way out.
    """
    told = {name: getattr(options, name) for name in ("rows", "columns", "scale")}
    if options.words is not None and options.export is not None:
        raise InputError(
            "--words and --pieces tell how the browser opens; leave them out with --export."
        )
    if options.is_figure:
        if options.survey is not None:
            raise InputError("--survey is of the page in the browser; leave it out with --export.")
        if options.explain is not None:
            raise InputError("--explain is of the page: a figure has weights alone.")
        from regard._showing.figure import SCALES

        for name in SIDES:
            _side(name, told[name])
        if options.scale not in (None, *SCALES):
            raise InputError(f"--scale {options.scale}: there are {', '.join(SCALES)}.")
        if options.other is not None or options.query is not None:
            raise InputError("a figure is of one recording: leave out --with and --query.")
        return
    if given := [name for name, x in told.items() if x is not None]:
        raise InputError(
            f"--{given[0]} is of a figure; name one: --export fig.pdf, fig.svg or fig.png."
        )
    if options.export is None:
        return
    if options.survey is not None:
        raise InputError("--survey is of the page in the browser; leave it out with --export.")
    if options.head is not None or options.query is not None:
        raise InputError(
            "--head and --query tell where the browser opens; leave them out with --export, or"
            " name a figure: fig.pdf, fig.svg or fig.png."
        )
    from regard._showing.figure import ENDINGS

    with reading():
        check_ending(options.export, (*PAGE_ENDINGS, *ENDINGS), "a page or a figure")


def _draw(recording: Recording, options: ViewOptions) -> None:
    """Writes the figure of the head that was named, or of the most telling one."""
    from regard._base.errors import ShapeError
    from regard._showing.figure import FontWarning, LostWarning

    if not recording.query_tokens:
        raise InputError("a recording without queries has nothing to draw.")
    rows, columns = (_side(name, getattr(options, name)) for name in SIDES)
    scale: Any = options.scale or "auto"
    try:
        with (
            writing(),
            busy("Drawing the figure"),
            warnings.catch_warnings(record=True) as remarks,
        ):
            for kind in (FontWarning, LostWarning):
                warnings.simplefilter("always", kind)
            place = choose_place(recording, options.layer, options.head)
            figure = recording.figure(*place, rows=rows, columns=columns, scale=scale)
            figure.save(cast("Path", options.export))
    except (ShapeError, ValueError) as error:
        raise InputError(one_line(error)) from error
    for one in remarks:
        remark(f"regard: {one.message}")
    say(str(options.export))


def _side(name: str, text: str | None) -> slice | None:
    """``A:B``, the positions A to B − 1."""
    if text is None:
        return None
    found = SIDE.fullmatch(text)
    if not found:
        raise InputError(f"--{name} {text}: A:B is needed, from A up to before B, as in 10:40.")
    start, stop = (int(side) if side else None for side in found.groups())
    return slice(start, stop)


def _export(recordings: list[Recording], names: list[str], layer: int | None, path: Path) -> None:
    """Writes one file: of all layers, or of the one that was named."""
    from regard._base.errors import MaterializeError
    from regard.viewer.export import export

    try:
        with writing(), busy("Writing the page"):
            export(
                recordings[0],
                path,
                other=recordings[1] if recordings[1:] else None,
                layers=None if layer is None else [layer],
                names=names,
            )
    except (MaterializeError, IndexError, ValueError) as error:
        raise InputError(one_line(error)) from error
    say(str(path))


def _place(recording: Recording, group: Recording, options: ViewOptions) -> str:
    """The fragment of an address that opens the chosen group and token, and the telling head."""
    from regard.viewer import unit_in_address

    layer, head = choose_place(group, options.layer, options.head)
    parts = [f"L{layer}H{head}"]
    if options.explain is not None:
        parts.append("plane=effect")
    if at := list(recording.groups).index(group.group):
        parts.append(f"recording={at}")
    if options.other is not None:
        parts.append("compare=side")
    if options.query is not None:
        from regard.cli import _links

        parts.append(f"query={_links.find_query(options.query, group).position}")
    return f"#{'&'.join(parts)}{unit_in_address(options.words)}"


def _name(source: str, is_text: bool) -> str:
    """The name of a file, or the beginning of a text."""
    from regard.viewer._readings import short_name

    if source == STDIN and not is_text:
        return "standard input"
    with contextlib.suppress(OSError, ValueError):  # a text may be no name of a file at all
        if not is_text and Path(source).is_file():
            return Path(source).name
    return short_name(source)


def _serve(viewer: Viewer, place: str, open_browser: bool) -> None:
    sys.stdout.write(f"{viewer.address}{place}\n")
    sys.stdout.flush()
    try:
        if open_browser:
            import webbrowser

            webbrowser.open(viewer.address + place)
        viewer.wait()
    finally:
        if not viewer.close():  # a response in progress would keep Python from ending
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(INTERRUPTED)
