"""``regard.hf.record``: the attention of a model of transformers as a recording."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from threading import get_ident
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from regard._base.errors import UnsupportedError
from regard._operator.torch_calls import Shared
from regard.capture._groups import names_of
from regard.capture._record import model_followed, recording_of
from regard.capture._taken import Described, Taken
from regard.hf._check import that_ask
from regard.hf._generation import Generation
from regard.hf._tokens import Inputs
from regard.recording import Recording


@contextlib.contextmanager
def record(
    model: Any,
    *,
    tokenizer: Any = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    values: bool = False,
    path: str | Path | None = None,
    explain: Callable[[Any], Tensor] | None = None,
) -> Iterator[Recording[Tensor]]:
    """Records the attention of a model of transformers that runs in the ``with`` block.

        with regard.hf.record(model, tokenizer=tokenizer) as recording:
            model(**tokenizer(text, return_tensors="pt"))
        recording.weights[5][3, 17]

    One pass or one generation, of any batch; padding is cut off. Encoder, decoder and
    cross-attention are ``groups`` of the recording, each with its tokens; pictures are its
    ``grids``. Modules that compute their own attention are left out: see ``check``. The model runs
    on regard in this thread and the block. Other threads that run it get what they did before,
    uncompiled, and are not recorded.

    Args:
        model: of transformers, or what ``torch.compile`` makes of one, which runs uncompiled.
        tokenizer: gives the tokens' texts; by default their ids.
        layers, heads, values, path, explain: as in ``regard.record``: for a token's loss
            ``explain=lambda output: cross_entropy(output.logits[0, 5:6], ids[0, 6:7])``.

    Yields:
        The recording, as ``regard.record`` does.

    Raises:
        UnsupportedError: attention of the model goes past transformers' interface; see ``check``.
        RecordingError, ShapeError, TypeError, ValueError: as ``regard.record``.

    Source: docs/huggingface.md.
    """
    model = getattr(model, "_orig_mod", model)  # of what torch.compile gives
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"record: {type(model).__name__} is no model of transformers; regard.record takes "
            "other models of torch."
        )
    names = names_of(model)
    models = [module for module in names if isinstance(module, PreTrainedModel)]
    with _on_regard(model, models):
        inputs, generation = Inputs(model, tokenizer), Generation()

        def describe(group: str, taken: Taken, b: int) -> Described:
            return inputs.describe(group, taken, b)._replace(prompt=generation.prompt)

        asking = that_ask(frozenset(map(type, names)))
        attending = [module for module in names if type(module) in asking]
        following = functools.partial(model_followed, names, inputs.roots, inputs.note, attending)
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        choice = layers, heads, values, path, explain
        with (
            recording_of(
                describe, choice, following, name, names[_reader(model, models)]
            ) as recording,
            inputs.noted(names),
            generation.noted(model),
        ):
            yield recording


def _reader(model: PreTrainedModel, models: list[PreTrainedModel]) -> PreTrainedModel:
    """The innermost of the models that a model is made of that embeds its tokens, or the model."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return model
    within = (one for one in reversed(models) if any(x is embedding for x in one.modules()))
    return next(within, model)


INTERNAL = "_attn_implementation_internal"  # attribute of a config


class _Implementation:
    """In the place of a config's implementation: that of this thread, where it has its own."""

    def __init__(self) -> None:
        self.own: dict[tuple[int, int], str | None] = {}  # by thread and config

    def __get__(self, config: Any, kind: type) -> Any:
        key = get_ident(), id(config)
        if key in self.own:
            return self.own[key]
        try:
            return vars(config)[INTERNAL]
        except KeyError:
            raise AttributeError(INTERNAL) from None

    def __set__(self, config: Any, name: str | None) -> None:
        key = get_ident(), id(config)
        if key in self.own:
            self.own[key] = name
        else:
            vars(config)[INTERNAL] = name


_IMPLEMENTATION = _Implementation()
_BY_THREAD = Shared(
    lambda: setattr(PreTrainedConfig, INTERNAL, _IMPLEMENTATION),
    lambda _: delattr(PreTrainedConfig, INTERNAL),
)


@contextlib.contextmanager
def _on_regard(model: PreTrainedModel, models: list[Any]) -> Iterator[None]:
    """The model, and those that it is made of, on regard in this thread."""
    if all(one.config._attn_implementation == "regard" for one in models):
        yield
        return
    configs = _configs([one.config for one in models])
    given = {(get_ident(), id(one)): getattr(one, INTERNAL, None) for one in configs}
    own = _IMPLEMENTATION.own
    outer = {key: own[key] for key in given if key in own}
    _BY_THREAD.enter()
    try:
        own.update(given)
        model.set_attn_implementation("regard")
        if all(one.config._attn_implementation != "regard" for one in models):
            raise UnsupportedError(
                f"record: {type(model).__name__} does not let its attention be chosen; "
                "regard.hf.check(model) tells which of its layers compute their own."
            )
        yield
    finally:
        for key in given:
            del own[key]
        own.update(outer)
        _BY_THREAD.leave()


def _configs(given: list[Any]) -> list[Any]:
    """These and the configs within them, each once."""
    found: dict[int, Any] = {}
    left = [*given]
    while left:
        one = left.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            left += (getattr(one, name, None) for name in getattr(one, "sub_configs", ()))
    return [*found.values()]
