"""Links, which are token pairs: the strongest of a head, and those of one token."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from regard._base.words import spelled
from regard._weights.attention_weights import AttentionWeights
from regard.cli._errors import InputError
from regard.cli._screen import Screen, label, labels_width
from regard.recording import Recording, Words, WordWeights

MOST_LINKS = 12
CANDIDATES = 512
LEAST = 0.001
BAR = 20
WIDEST_LABEL = 12
WIDEST_CONTEXT = 60
MOST_DIGITS = 16  # of a position


class Link(NamedTuple):
    """A token pair: a query, a key, and its weight."""

    query: int
    key: int
    weight: float


def strongest_links(weights: AttentionWeights | WordWeights, most: int = MOST_LINKS) -> list[Link]:
    """The strongest token pairs, without those of the first key, the usual attention sink.

    Those stay where there are no others among the strongest.
    """
    found = weights.strongest(CANDIDATES)
    links = [Link(int(q), int(k), float(w)) for q, k, w in zip(*map(np.asarray, found)) if w > 0]
    return ([link for link in links if link.key] or links)[:most]


def show_links(screen: Screen, links: Sequence[Link], recording: Recording | Words) -> None:
    """Prints a line for each link, with the words that lead up to the key."""
    queries, keys = recording.query_tokens, recording.tokens
    digits = len(str(max(len(queries), len(keys)) - 1))
    left = labels_width((queries[link.query] for link in links), WIDEST_LABEL)
    right = labels_width((keys[link.key] for link in links), WIDEST_LABEL)
    for query, key, weight in links:
        line = Text(f"  {weight:5.1%}".rjust(8))
        line.append(f"  {query:>{digits}} ", style="dim").append(label(queries[query], left))
        line.append(f" → {key:>{digits}} ", style="dim").append(label(keys[key], right))
        screen.line(line, "  ", _words_up_to(keys, key, screen.width - line.cell_len - 2))


@dataclasses.dataclass(frozen=True)
class ChosenToken:
    """The token that ``--query`` stands for, and what to say about the choice."""

    position: int
    remark: str


def find_query(written: str, recording: Recording | Words) -> ChosenToken:
    """A token by its position, by its text, or by a word or passage that ends in it.

    The last of several is taken: it attends to most tokens.

    Raises:
        InputError: no such position or text, or an empty one.
    """
    tokens = recording.query_tokens
    if not written:
        raise InputError(
            f"--query is empty. Give a word of the text, or a position, 0 to {len(tokens) - 1}."
        )
    unit = "word" if isinstance(recording, Words) else "token"
    if (digits := written.strip()).isdecimal():
        position = int(digits) if len(digits) <= MOST_DIGITS else len(tokens)
        if position >= len(tokens):
            there = f"{len(tokens):,} {unit}" + ("s, 0 to " if len(tokens) > 1 else ", ")
            raise InputError(f"--query {digits}: the text has {there}{len(tokens) - 1}.")
        return ChosenToken(position, "")
    wanted = written.strip() or written
    places = [i for i, token in enumerate(tokens) if wanted in (token, token.strip())]
    first = places[-1] if places else -1
    if not places:
        ends, first = _passages(tokens, wanted)
        places = list(dict.fromkeys(ends))  # a token may have it several times
    if not places:
        raise InputError(f"--query {written!r}: not in the text. {_nearest(tokens, wanted)}")
    last, remarks = places[-1], []
    if len(places) > 1:
        others = ", ".join(map(str, places[-5:-1]))
        remarks.append(
            f"{wanted!r} occurs {len(places)} times; the last is taken (others: {others})."
        )
    if first < last:
        remarks.append(f"{wanted!r} is {unit}s {first} to {last}; the last of them is shown.")
    return ChosenToken(last, " ".join(remarks))


def show_query(
    screen: Screen,
    weights: AttentionWeights | WordWeights,
    recording: Recording | Words,
    position: int,
) -> tuple[list[Link], list[Link]]:
    """Prints what a token attends to and what attends to it, as ranked bars.

    Returns:
        The links of both lists.
    """
    to, by = query_links(weights, recording, position)
    tokens = recording.query_tokens
    name = f"{position} {label(tokens[position], WIDEST_LABEL).strip()}"
    screen.title("Attends to", f"The keys of query {name}, strongest first.")
    _show_ranked(screen, [(link.key, link.weight) for link in to], recording.tokens)
    if recording.query_tokens == recording.tokens:
        screen.title("Attended by", f"The queries of key {name}, strongest first.")
        _show_ranked(screen, [(link.query, link.weight) for link in by], tokens)
    return to, by


def query_links(
    weights: AttentionWeights | WordWeights, recording: Recording | Words, position: int
) -> tuple[list[Link], list[Link]]:
    """The strongest links from a token, and to it where the queries are the keys."""
    row = np.asarray(weights[position])
    to = [Link(position, int(j), float(row[j])) for j in _ranked(row)]
    if recording.query_tokens != recording.tokens:
        return to, []
    column = np.asarray(weights[:, position])
    return to, [Link(int(i), position, float(column[i])) for i in _ranked(column)]


def _ranked(shares: np.ndarray) -> list[int]:
    order = np.argsort(-shares, kind="stable")[:MOST_LINKS]
    return [int(i) for i in order if shares[i] >= LEAST]


def _show_ranked(screen: Screen, found: Sequence[tuple[int, float]], tokens: Sequence[str]) -> None:
    if not found:
        screen.line(f"  none with {LEAST:.1%} or more")
        return
    digits = len(str(len(tokens) - 1))
    width = labels_width((tokens[i] for i, _ in found), WIDEST_LABEL)
    for i, weight in found:
        line = Text().append(f"  {i:>{digits}} ", "dim").append(label(tokens[i], width))
        line.append(f"  {weight:6.1%}  ").append(screen.bar(weight, BAR).ljust(BAR), "magenta")
        screen.line(line, "  ", _words_up_to(tokens, i, screen.width - line.cell_len - 2))


def _words_up_to(tokens: Sequence[str], position: int, width: int) -> Text:
    """A token on one line, and as much of the text before it as there is room for."""
    width, tokens = min(width, WIDEST_CONTEXT), spelled(tokens[: position + 1])
    token = text = _one_line(tokens[position])
    for start in range(position - 1, -1, -1):
        longer = _one_line(tokens[start] + text)
        if cell_len(longer) >= width:
            text = "…" + text
            break
        text = longer
    if cell_len(text) > width:
        return Text()
    ends_in = len(token) if text.endswith(token) else 0
    return Text.assemble((text[: len(text) - ends_in], "dim"), text[len(text) - ends_in :])


def _one_line(text: str) -> str:
    shown = re.sub(r"\s*\n\s*", "⏎", text)
    return "".join(c if c.isprintable() else " " for c in re.sub(r"\s+", " ", shown))


def _passages(tokens: Sequence[str], wanted: str) -> tuple[list[int], int]:
    """The last token of each occurrence of a passage, and the first token of the last one."""
    tokens = spelled(tokens)
    ends = np.cumsum([len(token) for token in tokens])
    text = "".join(tokens)
    places, first, at = [], 0, text.find(wanted)
    while at >= 0:
        first = int(np.searchsorted(ends, at, "right"))
        places.append(int(np.searchsorted(ends, at + len(wanted) - 1, "right")))
        at = text.find(wanted, at + 1)
    return places, first


def _nearest(tokens: Sequence[str], wanted: str) -> str:
    tokens = spelled(tokens)
    words = dict.fromkeys([*"".join(tokens).split(), *(token.strip() for token in tokens)])
    near = difflib.get_close_matches(wanted, list(words), n=3, cutoff=0.5)
    if near:
        return f"Nearest: {', '.join(map(repr, near))}."
    return f"Give a word of it, or a position, 0 to {len(tokens) - 1}."
