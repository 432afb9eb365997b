"""``regard show``: tokens, heads, weights and steps of a text in the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from regard._showing.steps import MATRICES, Steps
from regard._weights.attention_weights import AttentionWeights
from regard.cli import _heads, _links, _matrix
from regard.cli._errors import InputError, reading, writing
from regard.cli._screen import Screen, busy, label, labels_width
from regard.cli._source import read_recording
from regard.recording import Recording
from regard.recording._file import check_name

MOST_STEPS = 64  # tokens whose steps can be followed
MOST_WEIGHTS = 64  # tokens whose weights stand in the JSON
MOST_TOKEN_LINES = 4
WIDEST_TOKEN = 8


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What was asked for on the command line."""

    model: str = "builtin"
    layer: int | None = None
    head: int | None = None
    query: str | None = None
    steps: bool = False
    save: Path | None = None
    json: bool = False
    width: int | None = None
    is_text: bool = False


@dataclasses.dataclass(frozen=True)
class Shown:
    """One head of a recording, chosen by the user or for what it does."""

    recording: Recording
    rows: list[list[_heads.Head]]
    layer: int
    head: int
    why: str

    @property
    def name(self) -> str:
        """``L1H4``."""
        return f"L{self.layer}H{self.head}"

    @property
    def weights(self) -> AttentionWeights:
        """``(Lq, Lk)``."""
        return _matrix.weights_of(self.recording, self.layer, self.head)

    @property
    def is_itself(self) -> bool:
        """Whether the text was read by itself."""
        return self.recording.query_tokens == self.recording.tokens


def show(argument: str, wishes: Wishes) -> None:
    """Prints what was asked for.

    Raises:
        CommandError: with the line to print.
    """
    if wishes.save is not None:
        with reading():
            check_name(wishes.save)
    recording = read_recording(argument, wishes.model, wishes.is_text)
    if wishes.save is not None:
        with writing():
            recording.save(wishes.save)
    with busy("Looking at what every head does"):
        shown = _choose(recording, wishes)
    asked = None if wishes.query is None else _links.find_query(wishes.query, recording)
    if wishes.steps and max(map(len, (recording.tokens, recording.query_tokens))) > MOST_STEPS:
        raise InputError(
            f"--steps writes out every number, for up to {MOST_STEPS} tokens; these are"
            f" {len(recording.tokens):,}. Give a part of the text, or use --query instead."
        )
    if wishes.json:
        sys.stdout.write(
            json.dumps(_document(shown, asked, wishes.steps), allow_nan=False, indent=1) + "\n"
        )
    else:
        _print(Screen(wishes.width), shown, asked, wishes.steps)
    if wishes.save is not None:
        sys.stderr.write(f"Saved; regard show {wishes.save} shows it again.\n")


def _choose(recording: Recording, wishes: Wishes) -> Shown:
    """The head that was named; what is left open falls to the most telling one."""
    counts = [layer.heads for layer in recording.layers]
    _check_index("--layer", wishes.layer, len(counts), "layers")
    rows = _heads.overview(recording)
    open_rows = rows if wishes.layer is None else [rows[wishes.layer]]
    _check_index("--head", wishes.head, min(map(len, open_rows)), "heads")
    if wishes.head is not None:
        open_rows = [[row[wishes.head]] for row in open_rows]
    head, why = _heads.most_telling(open_rows)
    if wishes.layer is not None and wishes.head is not None:
        why = "the one you chose"
    return Shown(recording, rows, head.layer, head.head, why)


def _check_index(option: str, index: int | None, count: int, what: str) -> None:
    if index is not None and not 0 <= index < count:
        raise InputError(f"{option} {index}: there are {count} {what}, 0 to {count - 1}.")


def _print(screen: Screen, shown: Shown, asked: _links.Asked | None, steps: bool) -> None:
    recording = shown.recording
    counts = {len(row) for row in shown.rows}
    heading = Text().append(f"{len(recording.tokens):,} tokens", "bold")
    heading.append(f", {len(shown.rows)} layers of {' or '.join(map(str, sorted(counts)))} heads")
    heading.append(f", model {recording.model}" if recording.model else "")
    screen.lines(screen.wrapped(heading))
    if asked is None and not steps:
        _show_tokens(screen, recording)
        _heads.show_overview(screen, shown.rows, len(recording.tokens))
        _show_weights(screen, shown)
        return
    remark = asked.remark if asked else ""
    screen.title(shown.name, f"{shown.why.capitalize()}. {remark}".strip())
    links: list[_links.Link] = []
    if asked is not None:
        links, _ = _links.show_query(screen, shown.weights, recording, asked.position)
    if steps:
        written_out = recording.steps(shown.layer, shown.head)
        screen.title("Steps", "From the vectors of the tokens to the weights and the output.")
        screen.line()
        screen.console.print(written_out)
    if steps and links:
        which, *lines = written_out.explain(*links[0][:2]).splitlines()
        screen.title("Arithmetic", f"Of the strongest link: {which}.")
        for line in lines:
            name, formula = line.split(maxsplit=1)
            screen.beside(f"  {name:8}", Text(formula))


def _show_tokens(screen: Screen, recording: Recording) -> None:
    tokens = recording.tokens
    screen.title("Tokens", "The pieces the text was cut into, by position; · is a space.")
    digits = len(str(len(tokens) - 1))
    width = labels_width(tokens, WIDEST_TOKEN)
    each = max(1, (screen.width - 2) // (digits + width + 3))
    lines = list(range(0, len(tokens), each))
    first = lines if len(lines) <= MOST_TOKEN_LINES else lines[: MOST_TOKEN_LINES - 1]
    for start in [*first, *([] if first == lines else [None, lines[-1]])]:
        if start is None:
            left_out = lines[-1] - first[-1] - each
            screen.line(Text(f"  … {left_out:,} more …", style="dim"))
            continue
        line = Text("  ")
        for n in range(start, min(start + each, len(tokens))):
            line.append(f"{n:>{digits}} ", style="dim").append(label(tokens[n], width) + "  ")
        screen.line(line)


def _show_weights(screen: Screen, shown: Shown) -> None:
    recording = shown.recording
    choice = f"{shown.why.capitalize()}. --layer and --head choose another."
    if _matrix.is_short(screen, recording):
        screen.title(
            shown.name,
            f"{choice} Each row is a token, and how many per cent of its attention go to which"
            " token; blank is out of its sight.",
        )
        screen.line()
        _matrix.show_table(screen, shown.weights, recording)
        return
    screen.title(shown.name, f"{choice} {_matrix.explain_picture(recording)}")
    screen.line()
    with busy("Reading every weight of the head"):
        weights = shown.weights
        links = _links.strongest_links(weights)
    _matrix.show_picture(screen, weights, recording)
    screen.title(
        "Strongest links",
        "The token that looks, the token it looks at, and the words up to there."
        + (" Links to token 0, where heads rest, are left out." if links[0].key else ""),
    )
    _links.show_links(screen, links, recording)


def _document(shown: Shown, asked: _links.Asked | None, steps: bool) -> dict[str, Any]:
    """All that is shown, for programs; docs/cli.md describes it."""
    recording, weights = shown.recording, shown.weights
    document: dict[str, Any] = {
        "model": recording.model,
        "tokens": list(recording.tokens),
        "query_tokens": None if shown.is_itself else list(recording.query_tokens),
        "heads": [_head_facts(head) for row in shown.rows for head in row],
        "shown": {"layer": shown.layer, "head": shown.head, "why": shown.why},
        "weights": None,
        "links": list(_link_facts(_links.strongest_links(weights), recording)),
        "query": None,
        "steps": _step_facts(recording.steps(shown.layer, shown.head)) if steps else None,
    }
    if max(weights.shape) <= MOST_WEIGHTS:
        document["weights"] = _numbers(weights)
    if asked is not None:
        to, by = _links.query_links(weights, recording, asked.position)
        document["query"] = {
            "position": asked.position,
            "remark": asked.remark,
            "attends_to": list(_link_facts(to, recording)),
            "attended_by": list(_link_facts(by, recording)),
        }
    return document


def _head_facts(head: _heads.Head) -> dict[str, Any]:
    facts = dataclasses.asdict(head)
    return {
        name: (None if math.isnan(fact) else round(fact, 6)) if isinstance(fact, float) else fact
        for name, fact in facts.items()
    }


def _step_facts(steps: Steps) -> dict[str, Any]:
    names = ("query", "key", "value", *MATRICES, "output")
    arrays = {name: getattr(steps, name) for name in names}
    return {name: _numbers(array) for name, array in arrays.items() if array is not None}


def _numbers(array: Any) -> list[Any]:
    """Nested lists; None where a number is no number, or infinite."""
    numbers = np.asarray(array, np.float64).round(6)
    found = numbers.astype(object)
    found[~np.isfinite(numbers)] = None
    return list(found.tolist())


def _link_facts(links: list[_links.Link], recording: Recording) -> Iterator[dict[str, Any]]:
    for query, key, weight in links:
        yield {
            "query": query,
            "key": key,
            "weight": round(weight, 6),
            "query_token": recording.query_tokens[query],
            "key_token": recording.tokens[key],
        }
