"""``regard generate``: a text and its continuation, as it comes."""

from __future__ import annotations

import sys
from pathlib import Path

from regard.cli._errors import reading, writing
from regard.cli._source import STDIN, given_text, read_input


def generate(
    prompt: str, tokens: int, temperature: float, seed: int, model: str, record: Path | None
) -> None:
    """Prints the prompt and what the model continues it with.

    Raises:
        CommandError: with the line to print.
    """
    from regard.lm import LanguageModel

    text = read_input() if prompt == STDIN else given_text(prompt, "The prompt")
    with reading():
        loaded = LanguageModel.load(model)
        pieces = loaded.stream(text, tokens, temperature=temperature, seed=seed)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # what a model can read again
    sys.stdout.write(text)
    sys.stdout.flush()
    for piece in pieces:
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
