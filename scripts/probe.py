"""Random tokens, repeated once: they show whether a head is an induction head."""

from __future__ import annotations

import dataclasses

import numpy as np

from regard.heads import HeadScores, head_scores
from regard.lm.model import LanguageModel


def probe(model: LanguageModel, length: int = 60, samples: int = 4, seed: int = 0) -> HeadScores:
    """Scores of every head on ``length`` different random tokens that are repeated once.

    Nothing in such a text can be guessed from the language: a head that finds the token after the
    earlier occurrence does so by looking it up. The induction score counts the second half only.

    Args:
        model: to look into.
        length: tokens that are repeated; at most half of what the narrowest layer sees.
        samples: texts that the scores are means over.
        seed: of the tokens.

    Raises:
        ValueError: no sample, or more tokens than the vocabulary has.

    Source: Olsson et al. 2022.
    """
    known = len(model.tokenizer) - 1
    if samples < 1 or not 1 <= length <= known:
        raise ValueError(
            f"probe: samples is {samples} and length {length}; at least 1 sample is needed, and "
            f"1 to {known} tokens, which is what the vocabulary has."
        )
    random = np.random.default_rng(seed)
    tokens = [random.choice(known, length, replace=False).tolist() for _ in range(samples)]
    scores = [head_scores(model.record_ids([model.tokenizer.bos, *t, *t])) for t in tokens]
    names = ("scores", "even", "counted", "overlap", "largest", "entropy", "distance")
    means = {name: np.mean([getattr(score, name) for score in scores], axis=0) for name in names}
    # Receivers and tokens stay those of the first text.
    return dataclasses.replace(scores[0], **means, queries=sum(one.queries for one in scores))
