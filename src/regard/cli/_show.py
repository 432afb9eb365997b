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

from regard._base.errors import UnsupportedError
from regard._base.files import check_place, quoted
from regard._base.settings import counted
from regard._base.tables import escaped
from regard._showing.steps import MATRICES, Steps
from regard._weights.attention_weights import AttentionWeights
from regard.cli import _heads, _links, _matrix
from regard.cli._errors import InputError, one_line, reading, writing
from regard.cli._screen import Screen, busy, label, labels_width, remark
from regard.cli._source import BUILTIN, ModelChoice, choose_group, read_recording
from regard.heads import HeadScores, Telling
from regard.recording import Recording, Words, WordWeights
from regard.recording._format import check_name, no_loop

MAX_STEPS = 64  # of a text whose steps are written out
MAX_WORDS = 200  # tokens of a text that is shown in words by default
MAX_WEIGHTS = 64  # of a text whose weights are in the JSON
MOST_TOKEN_LINES = 4
WIDEST_TOKEN = 8


@dataclasses.dataclass(frozen=True)
class ShowOptions:
    """The options of ``regard show``."""

    model: ModelChoice = BUILTIN
    layer: int | None = None
    head: int | None = None
    query: str | None = None
    steps: bool = False
    save: Path | None = None
    json: bool = False
    width: int | None = None
    is_text: bool = False
    group: str | None = None
    words: bool | None = None


@dataclasses.dataclass(frozen=True)
class Shown:
    """One head of a recording, named by the user or chosen for what it does."""

    recording: Recording
    text: Recording | Words  # whose tokens and weights are shown
    scores: HeadScores
    telling: Telling

    @property
    def layer(self) -> int:
        """Its number."""
        return self.telling.layer

    @property
    def head(self) -> int:
        """Its number."""
        return self.telling.head

    @property
    def weights(self) -> AttentionWeights | WordWeights:
        """``(Lq, Lk)``, in tokens or in words."""
        return self.text.weights[self.layer].head(self.head)

    @property
    def unit(self) -> str:
        """What is a row of the weights."""
        return "words" if isinstance(self.text, Words) else "tokens"

    @property
    def is_itself(self) -> bool:
        """Whether it is self-attention: queries and keys are the same tokens."""
        return self.recording.query_tokens == self.recording.tokens


def show(argument: str, options: ShowOptions) -> None:
    """Prints tokens, heads and weights, as the options say.

    Raises:
        CommandError: with the line to print.
    """
    if options.save is not None:
        with reading():
            check_name(options.save)
        with writing(), no_loop(options.save):
            check_place(options.save)
    recording = read_recording(argument, options.model, options.is_text)
    if options.save is not None:
        with writing():
            recording.save(options.save)
    recording = choose_group(recording, options.group)
    scored = _heads.choose_head(recording, options.layer, options.head)
    shown = Shown(recording, _text(recording, options), *scored)
    chosen = None if options.query is None else _links.find_query(options.query, shown.text)
    if options.steps and max(map(len, (recording.tokens, recording.query_tokens))) > MAX_STEPS:
        raise InputError(
            f"--steps writes out every number, for up to {MAX_STEPS} tokens; these are"
            f" {len(recording.tokens):,}. Give a part of the text, or use --query instead."
        )
    if options.steps:
        try:
            recording.layers[recording.layer_numbers.index(shown.layer)].require_vectors("--steps")
        except UnsupportedError as error:
            raise InputError(one_line(error)) from error
    if options.json:
        sys.stdout.write(
            json.dumps(_document(shown, chosen, options.steps), allow_nan=False, indent=1) + "\n"
        )
    else:
        _print(Screen(options.width), shown, chosen, options.steps)
    if options.save is not None:
        remark(f"Saved; regard show {quoted(options.save)} shows it again.")


def _text(recording: Recording, options: ShowOptions) -> Recording | Words:
    """The recording, or its words: where they are asked for, or it is short and has some.

    Raises:
        InputError: steps are asked for too.
    """
    if options.words and options.steps:
        raise InputError("--steps writes out the pieces of words; leave --words out.")
    is_short = len(recording.tokens) < MAX_WORDS and not (options.json or options.steps)
    if not (is_short if options.words is None else options.words):
        return recording
    words = recording.in_words()
    is_same = len(words.tokens) == len(recording.tokens)
    return recording if is_same and not options.words else words


def _print(screen: Screen, shown: Shown, chosen: _links.ChosenToken | None, steps: bool) -> None:
    recording = shown.recording
    counts = {*map(len, shown.scores.head_numbers)}
    heading = Text().append(counted(len(recording.tokens), "token"), "bold")
    if shown.unit == "words":
        heading.append(f" in {counted(len(shown.text.tokens), 'word')}")
    heads = [*map(str, sorted(counts)[:-1]), counted(max(counts), "head")]
    heading.append(f", {counted(len(shown.scores.layers), 'layer')} of {' or '.join(heads)}")
    heading.append(f", model {escaped(recording.model)}" if recording.model else "")
    screen.lines(screen.wrapped(heading))
    if chosen is None and not steps:
        _show_tokens(screen, shown)
        _heads.show_overview(screen, shown.scores)
        _show_weights(screen, shown)
        return
    screen.headline(shown.telling.says, chosen.remark if chosen else "")
    links: list[_links.Link] = []
    if chosen is not None:
        links, _ = _links.show_query(screen, shown.weights, shown.text, chosen.position)
    if steps:
        written_out = recording.steps(shown.layer, shown.head)
        screen.title("Steps", "From the vectors of the tokens to the weights and the output.")
        screen.line()
        screen.console.print(written_out)
    if steps and links:
        which, *lines = written_out.explain(*links[0][:2]).splitlines()
        screen.title("Arithmetic", f"The strongest link: {which}.")
        for line in lines:
            name, formula = line.split(maxsplit=1)
            screen.beside(f"  {name:8}", Text(formula))


def _show_tokens(screen: Screen, shown: Shown) -> None:
    tokens = shown.text.tokens
    if shown.unit == "words":
        screen.title("Words", "By position; · is a space. --pieces shows what they were cut into.")
    else:
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
    recording = shown.text
    choice = "--layer and --head choose another."
    if _matrix.is_short(screen, recording):
        screen.headline(
            shown.telling.says,
            f"{choice} Down: queries; across: keys; each number: per cent of the query's"
            " attention on that key; blank is masked.",
        )
        screen.line()
        _matrix.show_table(screen, shown.weights, recording)
        return
    screen.headline(shown.telling.says, f"{choice} {_matrix.explain_picture(recording)}")
    screen.line()
    with busy("Reading every weight of the head"):
        weights = shown.weights
        links = _links.strongest_links(weights)
    _matrix.show_picture(screen, weights, recording)
    screen.title(
        "Strongest links",
        "Token pairs: the query, the key it attends to, and the words up to the key."
        + (" Pairs with token 0, the attention sink, are left out." if links[0].key else ""),
    )
    _links.show_links(screen, links, recording)


def _document(shown: Shown, chosen: _links.ChosenToken | None, steps: bool) -> dict[str, Any]:
    """All of it, for programs; docs/cli.md describes it."""
    recording, weights = shown.text, shown.weights
    starts = recording.starts.tolist() if isinstance(recording, Words) else None
    document: dict[str, Any] = {
        "model": shown.recording.model,
        "tokens": list(recording.tokens),
        "words": starts
        and [[a, b] for a, b in zip(starts, [*starts[1:], len(shown.recording.tokens)])],
        "query_tokens": None if shown.is_itself else list(recording.query_tokens),
        "heads": list(_head_facts(shown.scores)),
        "shown": dataclasses.asdict(shown.telling),
        "weights": None,
        "links": list(_link_facts(_links.strongest_links(weights), recording)),
        "query": None,
        "steps": _step_facts(shown.recording.steps(shown.layer, shown.head)) if steps else None,
    }
    if max(weights.shape) <= MAX_WEIGHTS:
        document["weights"] = _numbers(weights)
    if chosen is not None:
        to, by = _links.query_links(weights, recording, chosen.position)
        document["query"] = {
            "position": chosen.position,
            "remark": chosen.remark,
            "attends_to": list(_link_facts(to, recording)),
            "attended_by": list(_link_facts(by, recording)),
        }
    return document


def _head_facts(scores: HeadScores) -> Iterator[dict[str, Any]]:
    columns = scores.columns()
    for n, (layer, head, role) in enumerate(zip(*(columns[x] for x in ("layer", "head", "role")))):
        facts: dict[str, Any] = {"layer": layer, "head": head, "role": role}
        yield (
            facts
            | {name: _number(columns[name][n]) for name in ("entropy", "distance")}
            | {"scores": {name: _number(columns[name][n]) for name in scores.roles}}
        )


def _number(x: float) -> float | None:
    return round(x, 6) if math.isfinite(x) else None


def _step_facts(steps: Steps) -> dict[str, Any]:
    names = ("query", "key", "value", *MATRICES, "output")
    arrays = {name: getattr(steps, name) for name in names}
    return {name: _numbers(array) for name, array in arrays.items() if array is not None}


def _numbers(array: Any) -> list[Any]:
    """Nested lists; None for NaN and infinity."""
    numbers = np.asarray(array, np.float64).round(6)
    found = numbers.astype(object)
    found[~np.isfinite(numbers)] = None
    return list(found.tolist())


def _link_facts(links: list[_links.Link], recording: Recording | Words) -> Iterator[dict[str, Any]]:
    for query, key, weight in links:
        yield {
            "query": query,
            "key": key,
            "weight": round(weight, 6),
            "query_token": recording.query_tokens[query],
            "key_token": recording.tokens[key],
        }
