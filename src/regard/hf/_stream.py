"""A model of transformers reads one text after another, and gives each layer as it is computed."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from regard._base.errors import UnsupportedError
from regard.capture._groups import names_of
from regard.capture._record import model_followed
from regard.capture._recorder import Recorder, Sink
from regard.capture._taken import Taken
from regard.hf._check import that_ask, with_own_attention
from regard.hf._load import _loaded, _longest
from regard.hf._record import _on_regard
from regard.hf._tokens import Inputs, texts
from regard.recording import Layer

_ONE = threading.Lock()  # a model is followed in one thread at a time


class Stream:
    """A model and its tokenizer, loaded.

    Args:
        name, trust_remote_code: as in ``regard.hf.load``.

    Attributes:
        longest: the most tokens that it reads.
        unseen: names of the modules that compute their own attention, and give no layer.

    Raises:
        FileNotFoundError, ValueError: as ``regard.hf.load``.
        UnsupportedError: an encoder–decoder, which answers a text.
    """

    def __init__(self, name: str | Path, *, trust_remote_code: bool = False) -> None:
        self._model, self._tokenizer = _loaded(name, trust_remote_code)
        self._tokenizer.truncation_side = "right"  # the first tokens are read
        if self._model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"survey: {name} is an encoder–decoder, which answers a text. Record its passes"
                " with regard.hf.record, and survey the folder of recordings."
            )
        self.longest = _longest(self._model, self._tokenizer)

    @property
    def unseen(self) -> list[str]:
        names = names_of(self._model)
        return [*with_own_attention(names, that_ask(frozenset(map(type, names)))).values()]

    @functools.cached_property
    def sha256(self) -> tuple[str, str]:
        """Hashes of the weights and of the tokenizer."""
        weights = hashlib.sha256()
        for key, x in sorted(self._model.state_dict().items()):
            weights.update(f"{key} {x.dtype} {tuple(x.shape)}\n".encode())
            weights.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        tokenizer = getattr(self._tokenizer, "backend_tokenizer", None)
        vocabulary = self._tokenizer.get_vocab().items()
        written = tokenizer.to_str() if tokenizer else repr(sorted(vocabulary))
        return weights.hexdigest(), hashlib.sha256(written.encode()).hexdigest()

    def encode(self, text: str, most: int) -> tuple[list[int], bool]:
        """Ids of the first tokens of a text, and whether there are more."""
        whole = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        if len(whole) <= most:
            return list(whole), False
        return list(self._tokenizer(text, truncation=True, max_length=most)["input_ids"]), True

    def tokens(self, ids: list[int]) -> list[str]:
        """The text of each."""
        return texts(self._tokenizer, ids)

    def run(self, ids: list[int], on_layer: Callable[[Layer[Any]], object]) -> None:
        """Reads ids; layers of other tokens, as those of a picture, are left out."""
        model = self._model
        names = {module: name for name, module in model.named_modules()}
        models = [module for module in names if isinstance(module, PreTrainedModel)]
        asking = that_ask(frozenset(map(type, names)))
        attending = [module for module in names if type(module) in asking]

        def take(layer: Layer[Any], taken: Taken) -> None:
            if not taken.is_cross and layer.key.shape[1] == len(ids):
                on_layer(layer)

        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if hasattr(model.config, "use_cache"):
            given["use_cache"] = False
        with _ONE, torch.no_grad(), _on_regard(model, models, attending):
            inputs = Inputs(model, self._tokenizer)
            recorder = Recorder(sink=Sink(take))
            with model_followed(names, inputs.roots, inputs.note, (), recorder):
                model(**given)
