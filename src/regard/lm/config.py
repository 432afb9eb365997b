"""The shape of a language model: the content of its folder's ``config.json``."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from pathlib import Path
from typing import Any

from regard._base.files import read_file, replaced_when_complete

NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer: causal, over ``window`` keys, with or without positions.

    Attributes:
        window: how many keys before its own a query sees; None for all.
        rope: base of the rotary position embedding; None for no positions at all.

    Raises:
        TypeError: no int, or no number.
        ValueError: a negative window, or a base that is not positive and finite.
    """

    window: int | None = None
    rope: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            _require_int("window", self.window, 0)
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
            what = f"{self.num_heads} heads" + (" of even size" if turned else "")
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
        text = read_file(path)
        try:
            fields = json.loads(text)
            layers = tuple(LayerConfig(**layer) for layer in fields.pop("layers"))
            return cls(layers=layers, **fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = str(error).removesuffix(".")
            raise ValueError(f"{path}: not the config.json of a regard model ({why}).") from error


def _require_int(name: str, x: Any, least: int) -> None:
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name} is {x!r}; an int is needed.")
    if x < least:
        raise ValueError(f"{name} is {x}; at least {least} is needed.")
