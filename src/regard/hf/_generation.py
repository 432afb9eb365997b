"""What a model of transformers is asked to generate while it is recorded."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

from torch import Tensor

from regard._base.errors import RecordingError

# Arguments of generate with which tokens are guessed, and dropped again where they are not right.
GUESSES = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


class _Noting:
    """In the place of a model's ``generate``; copies and pickles of the model have their own."""

    def __init__(self, model: Any, noting: Callable[..., Any]) -> None:
        self._model, self._noting = model, noting
        functools.update_wrapper(self, model.generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._noting(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(memo.get(id(self._model), self._model), "generate")  # noqa: B009

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, "generate")


class Generation:
    """A call of a model's ``generate``.

    Attributes:
        prompt: how many tokens it was given, where it reads them in several passes; else None.
    """

    def __init__(self) -> None:
        self.prompt: int | None = None

    @contextlib.contextmanager
    def noted(self, models: Iterable[Any]) -> Iterator[None]:
        """Notes what ``generate`` of these models is called with in the block.

        Raises:
            RecordingError: it is asked for beams, or tokens that are guessed and dropped again.
        """
        with contextlib.ExitStack() as stack:
            for model in models:
                if hasattr(model, "generate"):
                    stack.enter_context(self._noted_of(model))
            yield

    @contextlib.contextmanager
    def _noted_of(self, model: Any) -> Iterator[None]:
        """Notes what ``generate`` of a model is called with."""
        generate, own = model.generate, vars(model).get("generate")
        signature, thread = inspect.signature(generate), get_ident()
        rest = [x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD]

        def noting(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return generate(*args, **kwargs)
            given = signature.bind_partial(*args, **kwargs).arguments
            for name in rest:
                given |= given.get(name, {})
            self._note(model, given)
            return generate(*args, **kwargs)

        model.generate = _Noting(model, noting) if own is None else noting
        try:
            yield
        finally:
            if own is None:
                del model.generate
            else:
                model.generate = own

    def _note(self, model: Any, given: dict[str, Any]) -> None:
        configs = given.get("generation_config"), getattr(model, "generation_config", None)

        def chosen(name: str) -> Any:
            if name in given:
                return given[name]
            found = (getattr(config, name, None) for config in configs)
            return next((x for x in found if x is not None), None)

        if guess := next((name for name in GUESSES if chosen(name)), None):
            raise RecordingError(
                f"record: generate(..., {guess}=...) guesses tokens and drops those that are not "
                "right; a recording holds tokens that stay. Generate without it, or record the "
                "finished text in one pass."
            )
        if (beams := chosen("num_beams")) is not None and beams > 1:
            raise RecordingError(
                f"record: generate(..., num_beams={beams}) is beam search, which copies and drops "
                "what it began; a recording holds tokens that stay. Generate with num_beams=1, or "
                "record the finished text in one pass."
            )
        if chosen("prefill_chunk_size"):
            names = ("inputs_embeds", "input_ids", "inputs")
            found = [given[name] for name in names if isinstance(given.get(name), Tensor)]
            self.prompt = int(found[0].shape[1]) if found and found[0].ndim > 1 else None
