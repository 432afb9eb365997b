"""``regard generate``: a text and its continuation, printed as it is generated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from regard._base.files import check_place
from regard.cli._errors import reading, writing
from regard.cli._source import STDIN, given_text, read_input
from regard.recording import Recording
from regard.recording._format import check_name, no_loop

if TYPE_CHECKING:
    from regard.lm import LanguageModel


def generate(
    prompt: str, tokens: int, temperature: float, seed: int, model: str, record: Path | None
) -> None:
    """Prints the prompt and the model's continuation.

    Raises:
        CommandError: with the line to print.
    """
    from regard.lm import LanguageModel

    if record is not None:
        with reading():
            check_name(record)
        with writing(), no_loop(record):
            check_place(record)
    text = read_input() if prompt == STDIN else given_text(prompt, "The prompt")
    with reading():
        loaded = LanguageModel.load(model)
        pieces = loaded.stream(text, tokens, temperature=temperature, seed=seed)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # the bytes of the text itself
    sys.stdout.write(text)
    sys.stdout.flush()
    written = ""
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
        written += piece
    text += written
    if sys.stdout.isatty() and not text.endswith("\n"):
        sys.stdout.write("\n")
    if record is not None:
        with reading():
            recording = _recorded(loaded, text, len(text) - len(written))
        with writing():
            recording.save(record)


def _recorded(model: LanguageModel, text: str, prompt: int) -> Recording:
    """The recording of the whole text; its boundary is the first token beyond the prompt."""
    recording = model.record(text)
    end, length = 0, len(text[:prompt].encode())
    for position, i in enumerate(model.tokenizer.encode(text, bos=True)):
        end += len(model.tokenizer.bytes(i))
        if end > length:
            return Recording(
                recording.tokens, recording.layers, model=recording.model, boundary=position
            )
    return recording
