"""``regard.hf.record``: the attention of a model of transformers as a recording."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig, PreTrainedModel

from regard._base.errors import UnsupportedError
from regard._base.settings import counted
from regard._operator.torch_calls import Hook, Shared
from regard.capture._calls import left_out
from regard.capture._groups import names_of
from regard.capture._record import model_followed, recording_of
from regard.capture._taken import Described, Taken
from regard.hf._check import that_ask, with_own_attention
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
    ``grids``. Modules that compute their own attention are left out, and a warning names them: see
    ``check``. The model runs on regard in this thread and the block. Other threads that run it get
    what they did before, uncompiled, and are not recorded.

    Args:
        model: of transformers, or what ``torch.compile`` makes of one, which runs uncompiled.
        tokenizer: gives the tokens' texts, or a processor that has one; by default their ids.
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
    asking = that_ask(frozenset(map(type, names)))
    attending = [module for module in names if type(module) in asking]
    with _on_regard(model, models, attending):
        inputs, generation = Inputs(model, tokenizer, models), Generation()

        def describe(group: str, taken: Taken, b: int) -> Described:
            return inputs.describe(group, taken, b)._replace(prompt=generation.prompt)

        following = functools.partial(model_followed, names, inputs.roots, inputs.note, attending)
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        choice = layers, heads, values, path, explain
        with (
            recording_of(
                describe, choice, following, name, names[_reader(model, models)]
            ) as recording,
            inputs.noted(names),
            generation.noted(inputs.roots),
            _own_attention_told(with_own_attention(names, asking)),
        ):
            yield recording
        if inputs.unnamed is not None:
            keys, given = inputs.unnamed
            warnings.warn(
                f"record: positions stand for the texts of tokens: there are {keys} keys, and the "
                f"model was called with {counted(given, 'token')}. Those that a cache had before "
                "are unknown.",
                stacklevel=3,
            )


@contextlib.contextmanager
def _own_attention_told(own: Mapping[Module, str]) -> Iterator[None]:
    """Warns of those of these modules that run in the block: nothing is seen of their attention."""
    called: dict[str, dict[str, None]] = {}  # names of modules, by class
    thread = get_ident()

    def note(module: Module, *given: Any) -> None:
        if get_ident() == thread:
            called.setdefault(type(module).__name__, {})[own[module]] = None

    hooks = [module.register_forward_pre_hook(Hook(note)) for module in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for kind, names in called.items():
        warnings.warn(
            f"record: {left_out(names)} left out: {kind} computes its own attention, of which "
            "nothing is seen. print(regard.hf.check(model)) lists all such modules.",
            stacklevel=5,
        )


def _reader(model: PreTrainedModel, models: list[PreTrainedModel]) -> PreTrainedModel:
    """The innermost of the models that a model is made of that embeds its tokens, or the model.

    Of an encoder–decoder its decoder, which writes: the other half may embed tokens of its own.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        decoder = model.get_decoder()
        if decoder in models:
            return decoder
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
def _on_regard(
    model: PreTrainedModel, models: list[Any], attending: list[Module]
) -> Iterator[None]:
    """The model, and those that it is made of, on regard in this thread.

    Args:
        model, models: it, and those that it is made of.
        attending: modules that ask the interface. Where a model got another config after it was
            made, as the encoder of an ``EncoderDecoderModel``, they have the one before.
    """
    configs = _configs([one.config for one in models])
    known = {id(one) for one in configs}
    theirs = (vars(one).get("config") for one in attending)
    others = {id(x): x for x in theirs if isinstance(x, PreTrainedConfig)}
    before = [one for key, one in others.items() if key not in known]
    current = [one.config for one in models] + before
    if all(one._attn_implementation == "regard" for one in current):
        yield
        return
    given = {(get_ident(), id(one)): getattr(one, INTERNAL, None) for one in configs + before}
    own = _IMPLEMENTATION.own
    outer = {key: own[key] for key in given if key in own}
    _BY_THREAD.enter()
    try:
        own.update(given)
        model.set_attn_implementation("regard")
        for one in before:
            setattr(one, INTERNAL, "regard")
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
