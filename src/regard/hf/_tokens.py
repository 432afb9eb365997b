"""What a model of transformers is called with: its tokens as texts, and its pictures."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, cast

from torch import Tensor
from torch.nn import Module
from transformers import GenerationMixin, PreTrainedModel

from regard._base.errors import RecordingError
from regard._operator.torch_calls import Hook
from regard.capture._taken import Described, Taken
from regard.hf import _pictures
from regard.hf._attention import watched
from regard.hf._pictures import Pictures
from regard.recording import Grid

READS = "convert_ids_to_tokens"  # what tokenizers of transformers have, and processors have not
SINK = "<sink>"  # the name of a key of which each query has a score, and which is no token
# Parts of a model that is called with tokens and pictures, by their names.
OF_PICTURES = re.compile("vis(ion|ual)|image|pixel|patch", re.IGNORECASE)


@dataclass
class Calls:
    """What a module is called with, one call after another."""

    ids: list[Tensor] = field(default_factory=list)  # (B, T) each
    has_embeddings: bool = False
    pictures: list[Pictures] = field(default_factory=list)


class Inputs:
    """What a model is called with: the ids of its tokens, and its pictures.

    Args:
        model: of transformers.
        tokenizer: of transformers, or a processor with one, or None: ids stand for texts.
        models: those that the model is made of.

    Raises:
        TypeError: anything else.
    """

    def __init__(self, model: Any, tokenizer: Any, models: Sequence[Module] = ()) -> None:
        self._model, self._config = model, model.config
        self._writers = [one for one in models if isinstance(one, GenerationMixin)]
        self._tokenizer = tokenizer_of(tokenizer)
        self._encoder: Module | None = None
        self._decoder: Module | None = None
        if getattr(model.config, "is_encoder_decoder", False):
            self._encoder, self._decoder = model.get_encoder(), model.get_decoder()
        self._noted: dict[str, Module] = {}
        self._names: Mapping[Module, str] = {}
        self._calls: dict[Module, Calls] = {}
        self._shapes: Any = None  # (pictures, 3): time, rows and columns of patches
        # Keys of the text, and tokens that the model was called with, where these are fewer.
        self.unnamed: tuple[int, int] | None = None

    @property
    def roots(self) -> list[Module]:
        """The model, and the modules of it that are called by themselves."""
        base = getattr(self._model, "base_model", None)
        found = (self._model, self._encoder, self._decoder, base, *self._writers)
        return [*dict.fromkeys(x for x in found if isinstance(x, Module))]

    @contextlib.contextmanager
    def noted(self, names: Mapping[Module, str]) -> Iterator[None]:
        """Notes what those of these modules, but the roots, are called with that read or see."""
        kinds = _that_read_or_see(frozenset(map(type, names)))
        thread, roots, self._names = get_ident(), self.roots, names
        watched.calls.clear()
        self._noted = {name: module for module, name in names.items() if type(module) in kinds} | {
            names[module]: module for module in roots if module in names
        }

        def note(module: Module, args: Any, kwargs: Any) -> None:
            if get_ident() == thread:
                self.note(module, args, kwargs)

        with contextlib.ExitStack() as stack:
            for module in self._noted.values():
                if module not in roots:
                    hook = module.register_forward_pre_hook(Hook(note), with_kwargs=True)
                    stack.callback(hook.remove)
            yield

    def note(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what a module of the model is called with."""
        kind: Any = type(module)
        _, *parameters = _parameters(kind)
        given = dict(zip(parameters, args)) | kwargs
        calls = self._calls.setdefault(module, Calls())
        if isinstance(ids := given.get("input_ids"), Tensor) and ids.ndim == 2 and not ids.is_meta:
            calls.ids.append(ids.detach().cpu())
        calls.has_embeddings |= given.get("inputs_embeds") is not None
        if (pictures := _pictures.pictures_of(given)) is not None:
            calls.pictures.append(pictures)
        shapes = given.get("image_grid_thw")
        if shapes is None and self._shapes is None:  # generate calls the tower by itself
            shapes = given.get("grid_thw")
        if isinstance(shapes, Tensor):
            self._shapes = shapes.tolist()

    def describe(self, group: str, taken: Taken, b: int) -> Described:
        """The tokens of a group of layers, where they are as many as its keys."""
        own = self._ids_of(taken.name)
        beside: str | None = taken.name
        if not taken.is_cross:
            found = self._described(own, taken, b)
        else:
            encoder = None if self._encoder is None else self._names.get(self._encoder)
            found = self._described([] if encoder is None else self._ids_of(encoder), taken, b)
            queries = texts(self._tokenizer, _joined(own, b, taken.batch))
            found = found._replace(queries=queries if len(queries) == taken.queries else None)
            beside = self._tower if encoder is None else encoder
        if found.keys is None and beside is not None:
            return found._replace(grids=self._patches_of(beside, taken.keys))
        return found

    def _described(self, ids: list[Tensor], taken: Taken, b: int) -> Described:
        numbers, sinks = _joined(ids, b, taken.batch), self._sinks(taken.name)
        count = taken.keys - sinks
        named = texts(self._tokenizer, numbers)
        if taken.is_main and 0 < len(numbers) < count:
            self.unnamed = count, len(numbers)
        if not numbers or len(numbers) != count:
            return Described([SINK] * sinks + [*map(str, range(count))] if sinks else None)
        grids = self._among(ids, taken.batch, b)
        return Described(
            [SINK] * sinks + named, grids=tuple(x._replace(start=x.start + sinks) for x in grids)
        )

    def _sinks(self, name: str) -> int:
        """How many keys of a module are sinks of its queries; they are before its tokens."""
        found = 0
        for module, calls in watched.calls.items():
            if module not in self._names:
                continue
            if calls.forgot:
                raise RecordingError(
                    f"record: the cache of {self._names[module]} forgot its first keys, and its "
                    "queries have sinks of their own; no recording holds both. Record one pass "
                    "over the whole text."
                )
            if self._names[module] == name:
                found = calls.sinks
        return found

    def _around(self, name: str) -> Iterator[tuple[str, Module]]:
        """The noted modules that a module of that name is in, or is, from the inside."""
        parts = name.split(".") if name else []
        for count in range(len(parts), -1, -1):
            outer = ".".join(parts[:count])
            if outer in self._noted:
                yield outer, self._noted[outer]

    def _ids_of(self, name: str) -> list[Tensor]:
        """The ids of the tokens of a module, of each call.

        They are what it is called with, or a module around it, whose embeddings it has. A module
        that has neither has other tokens. Parts of one may be called past it.
        """
        for outer, module in self._around(name):
            calls = self._calls.get(module)
            if calls is None:
                calls = Calls(has_embeddings=_reads(type(module)))
            if calls.ids:
                sees = calls.pictures and OF_PICTURES.search(name[len(outer) :])
                return [] if sees else calls.ids
            if not calls.has_embeddings or module is self._decoder:
                return []
        return []

    def _among(self, ids: list[Tensor], batch: int, b: int) -> tuple[Grid, ...]:
        """The grids of pictures among the tokens of text b."""
        names = ("image_token_id", "image_token_index")
        token = next((x for name in names if (x := getattr(self._config, name, None))), None)
        if token is None:
            return ()
        every = [_joined(ids, n, batch) for n in range(batch)]
        if self._shapes is not None:
            merge = _pictures.merge_of(self._config)
            sizes = [(t * (h // merge), w // merge) for t, h, w in self._shapes]
        elif (tower := self._tower) is not None:
            module = self._noted[tower]
            vision = getattr(module, "config", self._config)
            count = sum(text.count(token) for text in every)
            seen = self._calls[module].pictures
            sizes = _pictures.sizes_in_patches(self._config, vision, seen, count)
        else:
            return ()
        found = _pictures.among(every, token, sizes)
        return found[b] if found else ()

    @functools.cached_property
    def _tower(self) -> str | None:
        """The name of the innermost module that is called with pictures, where it is one."""
        seeing = [name for name, x in self._noted.items() if self._calls.get(x, Calls()).pictures]
        inner = [
            name
            for name in seeing
            if not any(other != name and _is_in(other, name) for other in seeing)
        ]
        return inner[0] if len(inner) == 1 else None

    def _patches_of(self, name: str, keys: int) -> tuple[Grid, ...]:
        """The patches among the keys of a module that sees nothing else."""
        for _, module in self._around(name):
            calls = self._calls.get(module)
            if calls is None or calls.ids or calls.has_embeddings:
                return ()
            if calls.pictures:
                config = getattr(module, "config", self._config)
                one = len(set(calls.pictures)) == 1
                return _pictures.patches(config, calls.pictures[0], keys) if one else ()
        return ()


def _is_in(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _joined(ids: list[Tensor], b: int, batch: int) -> list[int]:
    """The ids of text b of a batch, of all calls; empty where texts have not one row each."""
    if any(len(of_batch) not in (1, batch) for of_batch in ids):
        return []
    own = (of_batch[b if len(of_batch) > 1 else 0] for of_batch in ids)
    return [number for row in own for number in row.tolist()]


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """What the modules of a class are called with."""
    code = kind.forward
    return tuple(inspect.signature(getattr(code, "__wrapped__", code)).parameters)


def _reads(kind: Any) -> bool:
    """Whether modules of a class are called with tokens, and not with pictures."""
    given = {*_parameters(kind)}
    return "pixel_values" not in given and not given.isdisjoint({"input_ids", "inputs_embeds"})


@functools.lru_cache(64)
def _that_read_or_see(kinds: frozenset[type]) -> frozenset[type]:
    """Models, and other classes that are called with the ids of tokens or with pictures."""
    given = {"input_ids", "pixel_values"}
    return frozenset(
        kind
        for kind in kinds
        if issubclass(kind, PreTrainedModel) or not given.isdisjoint(_parameters(cast(Any, kind)))
    )


def tokenizer_of(given: Any) -> Any:
    """The tokenizer, also of a processor of texts and pictures; None where there is none.

    Raises:
        TypeError: neither.
    """
    found = given if hasattr(given, READS) else getattr(given, "tokenizer", None)
    if given is not None and not hasattr(found, READS):
        raise TypeError(
            f"record: tokenizer is of type {type(given).__name__}; one of transformers is needed, "
            "as AutoTokenizer.from_pretrained(...) gives it, or None."
        )
    return found


def texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token, with the spaces that it stands for; its number where it has none.

    Args:
        tokenizer: of transformers; None gives the ids.
        ids: numbers of tokens.
    """
    if tokenizer is None:
        return [str(number) for number in ids]
    known: dict[int, str] = {}
    given = [number for number in ids if number >= 0]  # others stand for pictures
    for number, token in zip(given, tokenizer.convert_ids_to_tokens(given)):
        if number in known or token is None:
            continue
        text = str(token)
        if "▁" in text:
            text = text.replace("▁", " ")
        elif _is_of_bytes(tokenizer):
            decoded = tokenizer.decode([number], clean_up_tokenization_spaces=False)
            text = decoded if decoded and "\ufffd" not in decoded else text
        known[number] = text
    return [known.get(number, str(number)) for number in ids]


def _is_of_bytes(tokenizer: Any) -> bool:
    """Whether tokens are written with a letter for each byte, as in GPT-2."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in type(getattr(backend, "decoder", None)).__name__ or hasattr(
        tokenizer, "byte_decoder"
    )
