"""Figures of a language model on texts that were held out."""

from __future__ import annotations

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
