"""The tokens of a forward pass of transformers, as texts, and where its pictures are."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.nn import Module

from regard.capture._taken import Described, Taken
from regard.recording import Grid


class Inputs:
    """What a model is called with: the ids of its tokens, and its pictures.

    Args:
        model: of transformers.
        tokenizer: of transformers, or None: ids stand for texts.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._config, self._tokenizer = model.config, tokenizer
        self._modules: dict[str, Module] = {"": model}
        if getattr(model.config, "is_encoder_decoder", False):
            self._modules |= {"encoder": model.get_encoder(), "decoder": model.get_decoder()}
        self._names = {module: name for name, module in self._modules.items()}
        self._ids: dict[str, list[Tensor]] = {name: [] for name in self._modules}
        self._pixels: tuple[int, int] | None = None  # height and width of a picture
        self._patches: Any = None  # (pictures, 3): time, rows and columns of patches

    @property
    def roots(self) -> list[Module]:
        """The model, and the modules of it that are called by themselves."""
        base = getattr(self._modules[""], "base_model", None)
        found = [*self._modules.values()] + ([base] if isinstance(base, Module) else [])
        return [*dict.fromkeys(found)]

    @contextlib.contextmanager
    def noted(self, modules: Iterable[Module]) -> Iterator[None]:
        """Notes what those of these modules, but the roots, are called with that see pictures."""
        kinds = _that_see(frozenset(map(type, modules)))
        if not kinds:
            yield
            return
        thread, roots = get_ident(), self.roots

        def note(module: Module, args: Any, kwargs: Any) -> None:
            if get_ident() == thread:
                self.note(module, args, kwargs)

        with contextlib.ExitStack() as stack:
            for module in modules:
                if type(module) not in kinds or module in roots:
                    continue
                hook = module.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def note(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what a module of the model is called with."""
        kind: Any = type(module)
        _, *parameters = _parameters(kind)
        given = dict(zip(parameters, args)) | kwargs
        ids = given.get("input_ids")
        name = self._names.get(module)
        if name is not None and isinstance(ids, Tensor) and ids.ndim == 2:
            self._ids[name].append(ids.detach().cpu())
        if isinstance(pixels := given.get("pixel_values"), Tensor) and pixels.ndim >= 4:
            self._pixels = int(pixels.shape[-2]), int(pixels.shape[-1])
        if isinstance(patches := given.get("image_grid_thw"), Tensor):
            self._patches = patches.tolist()

    def describe(self, group: str, taken: Taken, b: int) -> Described:
        """The tokens of a group of layers, where they are as many as its keys."""
        if "encoder" in self._modules:
            keys = self._texts("decoder" if group == "decoder" else "encoder", b)
            queries = self._texts("decoder", b) if taken.is_cross else None
        else:
            keys, queries = self._texts("", b), None
        found = Described(
            keys if keys and len(keys) == taken.keys else None,
            queries if queries and len(queries) == taken.queries else None,
        )
        if found.keys is not None:
            return found._replace(grids=self._pictures_among(b))
        return found._replace(grids=self._picture_of(taken.keys))

    def _joined(self, name: str, b: int) -> list[int]:
        """Empty where the model was called with embeddings, or has made more texts of them."""
        if any(1 < len(ids) <= b for ids in self._ids[name]):
            return []
        of_batch = (ids[b if len(ids) > 1 else 0] for ids in self._ids[name])
        return [number for ids in of_batch for number in ids.tolist()]

    def _texts(self, name: str, b: int) -> list[str]:
        return texts(self._tokenizer, self._joined(name, b))

    def _pictures_among(self, b: int) -> tuple[Grid, ...]:
        """The runs of a picture's token, each a grid of its patches."""
        names = ("image_token_id", "image_token_index")
        token = next((x for name in names if (x := getattr(self._config, name, None))), None)
        if token is None:
            return ()
        runs, start = [], None
        for place, number in enumerate([*self._joined("", b), None]):
            if number == token and start is None:
                start = place
            elif number != token and start is not None:
                runs.append((start, place - start))
                start = None
        merged = _of_vision(self._config, "spatial_merge_size") or 1
        sizes = [(t * h // merged, w // merged) for t, h, w in self._patches or ()]
        grids = []
        for n, (start, count) in enumerate(runs):
            side = math.isqrt(count)
            rows, columns = sizes[n] if n < len(sizes) else (side, side)
            if rows * columns == count:
                grids.append(Grid(start, rows, columns))
        return tuple(grids)

    def _picture_of(self, keys: int) -> tuple[Grid, ...]:
        """The patches of a vision model, after its class token and registers."""
        patch = _of_vision(self._config, "patch_size")
        if self._pixels is None or not isinstance(patch, int) or not patch:
            return ()
        rows, columns = (side // patch for side in self._pixels)
        before = keys - rows * columns
        return (Grid(before, rows, columns),) if rows * columns and 0 <= before <= 8 else ()


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """What the modules of a class are called with."""
    code = kind.forward
    return tuple(inspect.signature(getattr(code, "__wrapped__", code)).parameters)


@functools.lru_cache(64)
def _that_see(kinds: frozenset[type]) -> frozenset[type]:
    """Those of these classes that are called with pictures."""
    return frozenset(kind for kind in kinds if "pixel_values" in _parameters(kind))


def _of_vision(config: Any, name: str) -> Any:
    return getattr(getattr(config, "vision_config", config), name, None)


def texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token, with the spaces that it stands for.

    Args:
        tokenizer: of transformers; None gives the ids.
        ids: numbers of tokens.
    """
    if tokenizer is None:
        return [str(number) for number in ids]
    known: dict[int, str] = {}
    for number, token in zip(ids, tokenizer.convert_ids_to_tokens(ids)):
        if number in known:
            continue
        text = str(token)
        if "▁" in text:
            text = text.replace("▁", " ")
        elif _is_of_bytes(tokenizer):
            decoded = tokenizer.decode([number], clean_up_tokenization_spaces=False)
            text = decoded if decoded and "\ufffd" not in decoded else text
        known[number] = text
    return [known[number] for number in ids]


def _is_of_bytes(tokenizer: Any) -> bool:
    """Whether tokens are written with a letter for each byte, as in GPT-2."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in type(getattr(backend, "decoder", None)).__name__ or hasattr(
        tokenizer, "byte_decoder"
    )
