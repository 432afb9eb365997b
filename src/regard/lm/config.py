"""The shape of a language model: the content of its folder's ``config.json``."""

from __future__ import annotations

import dataclasses
import json
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
    """

    window: int | None = None
    rope: float | None = None

    @property
    def visible(self) -> dict[str, Any]:
        """The options of ``regard.attention`` that mask keys."""
        window = None if self.window is None else (self.window, 0)
        return {"causal": True, "window": window}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a decoder; see ``LayerConfig`` for its layers."""

    vocab_size: int
    embed_dim: int
    num_heads: int
    hidden_dim: int
    train_length: int
    layers: tuple[LayerConfig, ...]

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
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not the config.json of a regard model ({error}).") from error
