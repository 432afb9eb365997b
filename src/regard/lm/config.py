"""The shape of a language model: the content of its folder's ``config.json``."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from pathlib import Path
from typing import Any

from regard._base.errors import a_type
from regard._base.files import read_file, replaced_when_complete
from regard._base.settings import counted
from regard.lm.tokenizer import PUT_BACK

NORM_EPSILON = 1e-6
WIDEST = 2**53  # of a window; what a recording can hold


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer: causal, over ``window`` keys, with or without positions.

    Attributes:
        window: how many keys before its own a query sees; None for all.
        rope: base of the rotary position embedding; None for no positions at all.

    Raises:
        TypeError: no int, or no number.
        ValueError: a window that is negative or above 2**53, or a base that is not positive and
            finite.
    """

    window: int | None = None
    rope: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            _require_int("window", self.window, 0)
            if self.window > WIDEST:
                raise ValueError(f"window is {self.window}; at most {WIDEST} is possible.")
        if self.rope is None:
            return
        if isinstance(self.rope, bool) or not isinstance(self.rope, numbers.Real):
            raise TypeError(f"rope is {self.rope!r}; a number is needed.")
        if not 0 < self.rope < math.inf:
            raise ValueError(f"rope is {self.rope}; it must be positive and finite.")

    @property
    def visible(self) -> dict[str, Any]:
        """The options of ``regard.attention`` that mask keys."""
        window = None if self.window is None else (self.window, 0)
        return {"causal": True, "window": window}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a decoder; see ``LayerConfig`` for its layers.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size below 1, or vectors that are not divided among the heads, or among pairs
            of numbers where there are rotary positions.
    """

    vocab_size: int
    embed_dim: int
    num_heads: int
    hidden_dim: int
    train_length: int
    layers: tuple[LayerConfig, ...]

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_heads", "hidden_dim", "train_length"):
            _require_int(name, getattr(self, name), 1)
        turned = any(layer.rope is not None for layer in self.layers)
        parts = self.num_heads * (2 if turned else 1)
        if self.embed_dim % parts:
            what = counted(self.num_heads, "head") + (" of even size" if turned else "")
            raise ValueError(f"embed_dim {self.embed_dim} cannot be {what}.")

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, as stored in ``model.safetensors``."""
        d, hidden = self.embed_dim, self.hidden_dim
        layer = {
            "attention_norm": (d,),
            "qkv": (3 * d, d),
            "out": (d, d),
            "mlp_norm": (d,),
            "up": (hidden, d),
            "down": (d, hidden),
        }
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, d), "norm": (d,)}
        for i in range(len(self.layers)):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def save(self, path: str | Path) -> None:
        """Writes ``config.json``."""
        with replaced_when_complete(path) as file:
            file.write((json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Reads ``config.json``.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file does not describe a model.
        """
        try:
            text = read_file(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: no such file. {PUT_BACK}") from None
        way_out = PUT_BACK
        try:
            found = json.loads(text)
            if isinstance(found, dict) and "model_type" in found:
                way_out = "It is of a model of transformers, which regard.hf.load reads."
            layers = _fields("", found, cls)["layers"]
            if not isinstance(layers, list):
                raise TypeError(f"layers is {a_type(layers)}; a list is needed")
            each = [_fields(f"layer {n}: ", x, LayerConfig) for n, x in enumerate(layers)]
            return cls(**found | {"layers": tuple(LayerConfig(**x) for x in each)})
        except (ValueError, TypeError, RecursionError) as error:
            why = str(error).removesuffix(".")
            raise ValueError(
                f"{path}: not the config.json of a regard model ({why}). {way_out}"
            ) from error


def _fields(where: str, found: Any, kind: type[Config] | type[LayerConfig]) -> dict[str, Any]:
    """What the file says, if it has all that is needed, and nothing else.

    Raises:
        TypeError: no object.
        ValueError: something is missing, or unknown.
    """
    if not isinstance(found, dict):
        raise TypeError(f"{where}{a_type(found)} was found; an object is needed")
    fields = dataclasses.fields(kind)
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in found:
            raise ValueError(f"{where}it has no {field.name}")
    if unknown := [name for name in found if name not in {field.name for field in fields}]:
        names = ", ".join(ascii(name[:40]) for name in unknown[:3])
        raise ValueError(
            f"{where}it has {names}, which this version of regard does not know; upgrade regard if"
            " a newer one wrote it"
        )
    return found


def _require_int(name: str, x: Any, least: int) -> None:
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name} is {x!r}; an int is needed.")
    if x < least:
        raise ValueError(f"{name} is {x}; at least {least} is needed.")
