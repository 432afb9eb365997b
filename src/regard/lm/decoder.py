"""The language model in torch, on ``regard.nn``: the weights of ``regard.lm.model``, trainable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from regard._base.extras import needed_by
from regard._operator import watching
from regard.lm.config import NORM_EPSILON, Config, LayerConfig
from regard.lm.model import BUILTIN, LanguageModel

with needed_by("regard.lm.decoder"):
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from regard.nn import MultiHeadAttention

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from regard._base.types import Float, Float32, Int


ROWS_AT_ONCE = 512  # of logits, in the loss


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + down(relu(up(norm(x)))²)``."""

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__()
        d, hidden = config.embed_dim, config.hidden_dim
        self.attention_norm = nn.RMSNorm(d, eps=NORM_EPSILON)
        self.attention = MultiHeadAttention(
            d, config.num_heads, bias=False, rope=layer.rope, **layer.visible
        )
        self.mlp_norm = nn.RMSNorm(d, eps=NORM_EPSILON)
        self.up = nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Float[Tensor, "*B L d"]) -> Float[Tensor, "*B L d"]:
        """One layer of the decoder."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(_SquaredReLU.apply(self.up(self.mlp_norm(x))))

    def weights(self) -> dict[str, Tensor]:
        """Its parameters by the names that they are stored under."""
        qkv = self.attention.in_proj_weight
        assert qkv is not None  # queries, keys and values are all projected from x
        return {
            "attention_norm": self.attention_norm.weight,
            "qkv": qkv,
            "out": self.attention.out_proj.weight,
            "mlp_norm": self.mlp_norm.weight,
            "up": self.up.weight,
            "down": self.down.weight,
        }


class _SquaredReLU(torch.autograd.Function):
    """``relu(x)²``, which keeps one array for its derivative instead of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (gradient * positive).mul_(2)


class _CrossEntropy(torch.autograd.Function):
    """Mean of ``logsumexp(logits) - logits[target]``, ``logits = hidden @ embedding.T``.

    The derivative is computed with the loss, from a block of rows while it is in the cache: all
    logits of 16 x 512 tokens and a vocabulary of 6,144 would be 200 MB.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        by_hidden = torch.empty_like(hidden)
        by_embedding = torch.zeros_like(embedding)
        for start in range(0, len(hidden), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            h, target = hidden[rows], targets[rows, None]
            logits = F.linear(h, embedding).to(wide)
            highest = logits.amax(-1, keepdim=True)
            found = logits.gather(-1, target)
            weights = logits.sub_(highest).exp_()
            sums = weights.sum(-1, keepdim=True)
            total += (highest + sums.log() - found).sum()
            weights.div_(sums).scatter_add_(-1, target, -torch.ones_like(sums))
            weights = weights.to(embedding.dtype)
            by_hidden[rows] = weights @ embedding
            by_embedding += weights.T @ h
        ctx.save_for_backward(by_hidden, by_embedding)
        ctx.count = len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        by_hidden, by_embedding = ctx.saved_tensors
        factor = gradient / ctx.count
        return by_hidden * factor, by_embedding * factor, None


@contextlib.contextmanager
def default_modes() -> Iterator[None]:
    """Torch's modes by default, whatever those of the caller: on the CPU, with gradients, exact."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        yield


def gradients(
    model: LanguageModel, ids: Sequence[int], position: int
) -> list[Float32[NDArray[np.float32], "H L D"]]:
    """∂loss/∂output of every layer's attention, for the loss of the token at a position.

    Later tokens do not count, and get 0.
    """
    outputs: list[Tensor] = []

    def keep(output: Tensor) -> Tensor:
        outputs.append(output if output.requires_grad else output.requires_grad_())
        return output

    with default_modes(), watching.watched(lambda *call: keep):
        decoder = Decoder.of(model).requires_grad_(False)
        hidden = decoder.hidden(torch.tensor(list(ids[:position])))
        logits = F.linear(hidden[-1:], decoder.embedding.weight)
        loss = F.cross_entropy(logits, torch.tensor([ids[position]]))
        found = torch.autograd.grad(loss, outputs)
    after = (0, 0, 0, len(ids) - position)
    return [F.pad(x.reshape(x.shape[-3:]), after).numpy() for x in found]


class Decoder(nn.Module):
    """A decoder-only transformer: token ids to the logits of the next token.

    Args:
        config: its sizes. The weights are random, those that add to the residual stream zero.

    Example:
        >>> decoder = Decoder.load("builtin")
        >>> decoder(torch.tensor([[6143, 300, 301]])).shape
        torch.Size([1, 3, 6144])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        d = config.embed_dim
        self.embedding = nn.Embedding(config.vocab_size, d)
        self.layers = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = nn.RMSNorm(d, eps=NORM_EPSILON)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, weight in self.weights().items():
            if name.endswith(("qkv", "up")):
                nn.init.normal_(weight, std=d**-0.5)
            if name.endswith(("out", "down")):
                nn.init.zeros_(weight)

    @classmethod
    def load(cls, folder: str | Path = BUILTIN) -> Self:
        """The model of a folder; errors as ``LanguageModel.load``."""
        return cls.of(LanguageModel.load(folder))

    @classmethod
    def of(cls, model: LanguageModel) -> Self:
        """The same model in torch, with float32 weights of its own."""
        with torch.device("meta"):  # draws no random numbers, for all are copied
            decoder = cls(model.config)
        decoder.float().to_empty(device=torch.get_default_device())
        with torch.no_grad():
            for name, weight in decoder.weights().items():
                weight.copy_(torch.from_numpy(model.weights[name]))
        return decoder

    @property
    def blocks(self) -> list[Block]:
        """Its layers, first layer first."""
        return [block for block in self.layers if isinstance(block, Block)]

    def forward(self, ids: Int[Tensor, "*B L"]) -> Float[Tensor, "*B L vocab_size"]:
        """Logits of the next token."""
        return F.linear(self.hidden(ids), self.embedding.weight)

    def hidden(self, ids: Int[Tensor, "*B L"]) -> Float[Tensor, "*B L d"]:
        """The vectors that the logits are read from."""
        x = self.embedding(ids)
        x = F.rms_norm(x, x.shape[-1:], eps=NORM_EPSILON)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def loss(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, ""]:
        """Mean nats of every id after the first of its row, without holding all logits at once."""
        hidden = self.hidden(ids[:, :-1]).flatten(0, 1)
        return _CrossEntropy.apply(hidden, self.embedding.weight, ids[:, 1:].flatten())

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by the name that it is stored under."""
        weights: dict[str, Tensor] = {"embedding": self.embedding.weight, "norm": self.norm.weight}
        for i, block in enumerate(self.blocks):
            weights |= {f"layers.{i}.{name}": weight for name, weight in block.weights().items()}
        return weights
