"""``regard train``: trains a model on text files, with a progress bar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from regard._base.files import quoted
from regard._base.settings import counted
from regard.cli._errors import CommandError, InputError, one_line
from regard.cli._screen import remark, say

if TYPE_CHECKING:
    from regard.lm.training import Progress as Step
    from regard.lm.training import Settings

PLAIN_LINES = 20


def train(files: Sequence[Path], folder: Path, *, windows: str, **sizes: Any) -> None:
    """Trains, with progress on standard error.

    Raises:
        CommandError: with the line to print.
    """
    from regard._base.errors import UnsupportedError
    from regard.lm import training

    for file in files:
        if file.is_dir():
            raise InputError(
                f"{file}: a folder. Name the text files in it, as in {file / '*.txt'}."
            )
    try:
        settings = training.Settings(windows=_windows(windows), **sizes)
        with _Report(settings) as report:
            losses = training.train(files, folder, settings, report)
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(one_line(error)) from error
    except (OSError, UnsupportedError) as error:
        raise CommandError(one_line(error)) from error
    if report.first is None:
        remark(f"{folder} was finished already.")
    say(f"{folder}: {counted(len(losses), 'step')}, last loss {losses[-1]:.3f} nats per token")
    say(f'Try it: regard show "a text" --model {quoted(folder)}')


def _windows(written: str) -> tuple[int | None, ...]:
    parts = [part.strip() for part in written.split(",")]
    if not all(part == "all" or part.isdecimal() for part in parts):
        raise ValueError(
            f"--windows {written!r}: numbers or all are needed, one for each layer, as in 63,all."
        )
    return tuple(None if part == "all" else int(part) for part in parts)


class _Report:
    """A progress bar on a terminal, a line now and then elsewhere.

    Attributes:
        first: number of the first step that was taken; None before it.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.first: int | None = None
        self._began = time.monotonic()
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task("reading the texts", total=None, steps="", said="")

    def __enter__(self) -> _Report:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is KeyboardInterrupt:
            self._say("Stopped; the same command goes on from the last checkpoint.")

    def __call__(self, step: Step) -> None:
        if self.first is None:
            self.first = step.step
            self._began = time.monotonic()
            if step.step > 1:
                self._say(f"resumed at step {step.step - 1}")
            if self._bar is not None:
                self._bar.reset(self._task, total=step.steps, completed=step.step)
        said = f"loss {step.loss:.3f}  {self._speed(step.step)}"
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step.step, description="training", said=said,
                steps=f"{step.step}/{step.steps}",
            )  # fmt: skip
        elif step.step == step.steps or step.step % max(1, step.steps // PLAIN_LINES) == 0:
            self._say(f"step {step.step}/{step.steps}  {said}{self._left(step)}")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)

    def _per_second(self, step: int) -> float:
        """Steps per second, without the first, which is not timed."""
        taken = step - (self.first or 0)
        return taken / max(1e-9, time.monotonic() - self._began)

    def _speed(self, step: int) -> str:
        tokens = self.settings.batch * self.settings.length
        rate = self._per_second(step) * tokens
        return f"{rate:,.0f} tokens/s" if rate else "        "

    def _left(self, step: Step) -> str:
        rate = self._per_second(step.step)
        if not rate or step.step == step.steps:
            return ""
        seconds = round((step.steps - step.step) / rate)
        return f"  {seconds // 60}:{seconds % 60:02} left"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[steps]}"),
        TextColumn(" {task.fields[said]} "),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
