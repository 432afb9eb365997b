"""A decoder-only transformer with regard's attention, beside the same one with torch's.

    python benchmarks/end_to_end.py [--threads N] [--dtype float32 bfloat16] [--quick] [--json FILE]

``regard.lm.decoder.Decoder`` with 4 layers of 8 heads of 64 and rotary positions; the other has the
same weights, and its layers call torch's scaled_dot_product_attention. The error is that of the
logits against the same model in float64, in errors of the one with torch's attention.
"""

import copy
import functools

import common
import torch
import torch.nn.functional as F
from torch import nn

from regard._base.rotary import rotate
from regard.lm.config import Config, LayerConfig
from regard.lm.decoder import Decoder

LENGTHS = [512, 2048, 8192]


class TorchAttention(nn.Module):
    """A causal ``regard.nn.MultiHeadAttention`` without biases, computed by torch's operator."""

    def __init__(self, layer):
        super().__init__()
        self.in_proj_weight, self.out_proj = layer.in_proj_weight, layer.out_proj
        self.num_heads, self.rope = layer.num_heads, layer.rope

    def forward(self, x):
        """``(B, L, embed_dim)``."""
        qkv = F.linear(x, self.in_proj_weight).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.movedim(-3, 0).transpose(-3, -2)  # each (B, H, L, D)
        q, k = rotate(q, 0, self.rope), rotate(k, 0, self.rope)
        heads = common.torch_attention(q, k, v, causal=True)
        return self.out_proj(heads.transpose(-3, -2).flatten(-2))


def models(layers, dtype):
    """The decoder and its twin, with the same weights."""
    torch.manual_seed(0)
    layer = LayerConfig(rope=10_000.0)
    ours = Decoder(Config(2048, 512, 8, 2048, 512, layers=(layer,) * layers))
    for name, weight in ours.weights().items():
        if name.endswith(("out", "down")):  # zero at the start of a training
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    ours = ours.to(getattr(torch, dtype))
    theirs = copy.deepcopy(ours)
    for block in theirs.blocks:
        block.attention = TorchAttention(block.attention)
    return {"regard": ours, "torch": theirs}


def predict(model, ids):
    """Logits, without gradients."""
    with torch.no_grad():
        return model(ids)


def step(model, ids):
    """The gradients of one training step."""
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    return torch.autograd.grad(loss, list(model.parameters()))


PASSES = {"forward": predict, "forward + backward": step}


def logit_errors(both, ids):
    """Largest error of each model's logits, in errors of the one with torch's attention."""
    exact = predict(copy.deepcopy(both["torch"]).double(), ids).numpy()
    found = {name: common.largest_error(predict(x, ids), exact) for name, x in both.items()}
    return {name: error / found["torch"] for name, error in found.items()}


def measure(report, options, dtype, both, length):
    """A row for each of the passes."""
    ids = torch.randint(2048, (1, length), generator=torch.Generator().manual_seed(0))
    error = logit_errors(both, ids)
    for passes, run in PASSES.items():
        runs = {name: functools.partial(run, model, ids) for name, model in both.items()}
        measured = common.interleave(runs, options, least=3)
        cells, figures = common.compared(measured, "regard", "torch", error)
        report.row(
            f"{passes}, T = {length}", dtype, *cells, f"{length / measured.median('regard'):.0f}",
            **figures, dtype=dtype, length=length, passes=passes,
        )  # fmt: skip


def main():
    """One table."""
    options = common.read_options(__doc__, dtypes=["float32"])
    report = common.Report("end_to_end", options)
    layers = 1 if options.quick else 4
    report.table(
        f"A decoder of {layers} layers, 8 heads of 64",
        "passes", "dtype", "regard", "torch", "torch / regard", "tokens/s",
    )  # fmt: skip
    for dtype in options.dtype:
        both = models(layers, dtype)
        for length in [64] if options.quick else LENGTHS:
            measure(report, options, dtype, both, length)
    report.save()


if __name__ == "__main__":
    main()
