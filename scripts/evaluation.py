"""Figures of a language model on texts that were held out."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from regard.lm.model import LanguageModel

if TYPE_CHECKING:
    from regard._base.types import Int


def loss_in_pieces(model: LanguageModel, ids: Int[np.ndarray, " tokens"], length: int) -> float:
    """Mean nats per token where the model reads ``ids`` in pieces of ``length``, BOS before each.

    Of the same ids, longer pieces give every token more context: a model that reads far has no
    higher loss at 4096 than at 512. What is left after the last whole piece is not read.

    Raises:
        ValueError: not one whole piece.
    """
    pieces = len(ids) // length
    if pieces < 1:
        raise ValueError(f"loss_in_pieces: {len(ids)} tokens are no piece of {length}; give more.")
    rows = ids[: pieces * length].reshape(pieces, length).tolist()
    losses = [model.losses_ids([model.tokenizer.bos, *row]) for row in rows]
    return float(np.mean(losses, dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a text costs a model.

    Nats per token depend on what a token is; nats per character compare two models.
    """

    nats: float
    tokens: int
    characters: int
    vocab_size: int

    @property
    def per_character(self) -> float:
        """Nats per character."""
        return self.nats / self.characters

    @property
    def of_uniform(self) -> float:
        """Share of the nats that guessing every token with the same probability would cost."""
        return self.nats / (self.tokens * math.log(self.vocab_size))


def cost(model: LanguageModel, text: str, length: int | None = None) -> Cost:
    """Nats, tokens and characters of a text.

    Args:
        length: tokens that are read at a time, BOS before them; None for the whole text at once.

    Raises:
        ValueError: ``text`` is empty.
    """
    ids = model.tokenizer.encode(text)
    if not ids:
        raise ValueError("cost: the text is empty; at least one character is needed.")
    step = length or len(ids)
    pieces = [ids[start : start + step] for start in range(0, len(ids), step)]
    bos = model.tokenizer.bos
    nats = sum(model.losses_ids([bos, *piece]).sum(dtype=np.float64) for piece in pieces)
    return Cost(float(nats), len(ids), len(text), len(model.tokenizer))


def total(costs: list[Cost]) -> Cost:
    """What several texts cost together, each read by itself."""
    return Cost(
        nats=sum(one.nats for one in costs),
        tokens=sum(one.tokens for one in costs),
        characters=sum(one.characters for one in costs),
        vocab_size=costs[0].vocab_size,
    )
