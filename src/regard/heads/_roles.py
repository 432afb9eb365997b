"""The roles of heads: what each is called, which keys it means, and which of them a head has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from regard._base.types import Bool, Float

LEAST_SCORE = 0.3  # of a role that is named
LEAST_EXCESS = 0.2  # of what even weights leave to be won: (score − even) / (1 − even)
LEAST_EVENNESS = 0.5
FEWEST, LEAST_PART = 2, 0.05  # queries that a score is over, and their part of those read
MOST_OF_ONE = 0.75  # of the score of a kind of tokens, on one of them
MARGIN = 0.05  # by which the excess of a role beats that of one that means fewer keys
CLEAR = 0.4  # a score from which a head is worth opening for what it looks up or joins
FARTHEST = 8  # tokens back


class Role(NamedTuple):
    """One role.

    Attributes:
        name: as it is shown.
        short: in at most 8 letters.
        keys: what such a head looks at.
        tells: the higher, the sooner such a head is the one to show.
    """

    name: str
    short: str
    keys: str
    tells: int = 2


PREVIOUS = Role("previous token", "prev", "the token just before", 1)
NEXT = Role("next token", "next", "the token just after", 1)
BACK = tuple(
    Role(f"{n} back", f"{n} back", f"the token {n} positions back", 1)
    for n in range(2, FARTHEST + 1)
)
SELF = Role("self", "self", "the token itself", 1)
INDUCTION = Role("induction", "induct", "what followed the same token before", 3)
SAME = Role("same token", "same", "earlier occurrences of the same token")
WORD_START = Role("word start", "start", "the first piece of its own word", 1)
PREVIOUS_WORD = Role("previous word", "prev wd", "the word before its own")
NEWLINE = Role("newline", "newline", "line breaks")
PUNCTUATION = Role("punctuation", "punct", "punctuation")
FUNCTION_WORD = Role("function word", "function", "function words such as the, of and to")
FIRST = Role("first token", "first", "the first token, its attention sink", 0)
EVEN = Role("spread evenly", "even", "all that it sees, about evenly", 0)

# Those that mean fewer keys first: of two that fit alike, the first is named.
ROLES = (
    PREVIOUS, NEXT, *BACK, SELF, INDUCTION, SAME, WORD_START, PREVIOUS_WORD, NEWLINE, PUNCTUATION,
    FUNCTION_WORD, FIRST, EVEN,
)  # fmt: skip
PLACE = {role.name: place for place, role in enumerate(ROLES)}
# Found by a key's own text, whatever the query is.
BY_KEY = (NEWLINE, PUNCTUATION, FUNCTION_WORD)
# Kinds of many different tokens: a head of one key alone is none of them.
VARIED = (PUNCTUATION, FUNCTION_WORD)
# Of some queries alone; between them such a head rests on the first token.
CONDITIONAL = (INDUCTION, SAME)


class Named(NamedTuple):
    """A role that a head has, and the share of its weight that it stands for."""

    role: Role
    share: float


def roles_of(
    scores: Float[np.ndarray, " roles"],
    even: Float[np.ndarray, " roles"],
    overlap: Float[np.ndarray, "roles roles"],
    enough: Bool[np.ndarray, " roles"],
) -> list[Named]:
    """The roles of one head: none, one, or the two of a mixture, the larger share first.

    Args:
        scores: of each role; NaN where there is none.
        even: what even weights would score.
        overlap: ``[a, b]``, the part of b's score that is on keys which a means too.
        enough: whether each is over enough queries.
    """
    fitting = {
        role: excess
        for at, role in enumerate(ROLES)
        if role is not EVEN and enough[at] and (excess := _excess(scores[at], even[at])) is not None
    }
    if not fitting:
        evenness = float(scores[PLACE[EVEN.name]])
        is_even = evenness >= LEAST_EVENNESS and enough[PLACE[EVEN.name]]
        return [Named(EVEN, evenness)] if is_even else []
    if any(role in fitting for role in CONDITIONAL):
        fitting.pop(FIRST, None)
    main = next(iter(fitting))
    for role, excess in fitting.items():
        if excess > fitting[main] + MARGIN:
            main = role
    at = PLACE[main.name]
    found = [Named(main, float(scores[at]))]
    rest = {role: scores[n := PLACE[role.name]] - overlap[at, n] for role in fitting}
    second = max(rest, key=lambda role: rest[role] if role is not main else -1)
    share = float(rest[second])
    fits = second is not main and _excess(share, even[PLACE[second.name]]) is not None
    # Roles of different queries may add up to more than there is: no mixture.
    if fits and found[0].share + share <= 1:
        found.append(Named(second, share))
    return sorted(found, key=lambda named: -named.share)


def _excess(score: float, even: float) -> float | None:
    """The share that is won of what even weights leave; None where it is too little for a name."""
    if not score >= LEAST_SCORE or not even < 1:
        return None
    excess = float((score - even) / (1 - even))
    return excess if excess >= LEAST_EXCESS else None


def shares_text(found: Sequence[Named]) -> str:
    """``induction 53 %``, or ``first token 41 %, previous word 37 %``; empty without a role."""
    return ", ".join(f"{named.role.name} {named.share:.0%}".replace("%", " %") for named in found)


def sentence(found: Sequence[Named]) -> str:
    """``looks at what followed the same token before``."""
    if not found:
        return "looks at no one kind of token"
    return f"looks at {' and '.join(named.role.keys for named in found)}"
