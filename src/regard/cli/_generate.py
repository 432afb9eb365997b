"""``regard generate``: a text and its continuation, as it comes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from regard.cli._errors import InputError, reading, writing
from regard.cli._source import STDIN, decoded


def generate(
    prompt: str, tokens: int, temperature: float, seed: int, model: str, record: Path | None
) -> None:
    """Prints the prompt and what the model continues it with.

    Raises:
        CommandError: with the line to print.
    """
    from regard.lm import LanguageModel

    if prompt == STDIN:
        prompt = decoded(sys.stdin.buffer.read(), "standard input")
    if not prompt:
        raise InputError("The prompt is empty; at least one character is needed.")
    with reading():
        loaded = LanguageModel.load(model)
        pieces = loaded.stream(prompt, tokens, temperature=temperature, seed=seed)
    text = ""
    for piece in itertools.chain([prompt], pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()
        text += piece
    if sys.stdout.isatty() and not text.endswith("\n"):
        sys.stdout.write("\n")
    if record is not None:
        with reading():
            recording = loaded.record(text)
        with writing():
            recording.save(record)
