"""What ``regard.watch`` costs the training of a small GPT, in shares of a training step.

    python benchmarks/watch.py [--every N] [--threads N] [--dtype ...] [--quick] [--json FILE]

A training step is the model's pass, its gradients and those of AdamW, in float32 or under autocast.
A watched step and one that is not watched take turns with a step without any watch; a step beside
the watched ones is so little more expensive that it is measured by itself, as a call of a model
that computes nothing. The share of all steps follows from both.
"""

import common
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import regard

VOCABULARY = 97  # of characters
# layers, heads, numbers of a vector, tokens, texts of a batch
MODELS = [(4, 4, 128, 64, 12), (6, 6, 384, 256, 8), (6, 6, 384, 1024, 2), (4, 8, 256, 4096, 1)]
QUICK = [(2, 2, 16, 16, 2)]
CALLS = 2000  # of a model that computes nothing


class Attention(nn.Module):
    """Causal self-attention, as GPT-2's."""

    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.c_proj(self.attend(q, k, v).transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Attention and two layers, each beside its input."""

    def __init__(self, width, heads, attend):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads, attend)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A small GPT, which gives its loss."""

    def __init__(self, layers, heads, width, length, attend):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, attend) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Nothing(nn.Module):
    """A model that computes nothing."""

    def forward(self, loss):
        return loss


ATTEND = {
    "torch": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    "regard": lambda q, k, v: regard.attention(q, k, v, causal=True),
}


def training(model, shape, dtype):
    """A function that does one step of a training."""
    length, batch = shape[3:]
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(VOCABULARY, (batch, length + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    narrow = dtype != "float32"

    def step():
        with torch.autocast("cpu", getattr(torch, dtype), enabled=narrow):
            loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def watched(step, model, every):
    """The same under a watch that begins anew."""

    def run():
        with regard.watch(model, every=every):
            step()

    return run


def unwatched_step(options):
    """Seconds that a step takes longer because a watch is open that does not measure it."""
    model, loss = Nothing(), torch.zeros(())
    calls = 1 if options.quick else CALLS

    def run():
        for _ in range(calls):
            model(loss)

    def watched():
        with regard.watch(model, every=2**62, start=1):
            run()

    measured = common.interleave({"plain": run, "watched": watched}, options)
    return (measured.median("watched") - measured.median("plain")) / calls


def measure(report, options, shape, dtype, name, between):
    """A row of the table."""
    torch.manual_seed(0)
    model = GPT(*shape[:4], ATTEND[name])
    step = training(model, shape, dtype)
    runs = {"plain": step, "watched": watched(step, model, 1)}
    measured = common.interleave(runs, options, seconds=4.0)
    ratio, spread = measured.ratio("watched", to="plain")
    plain = measured.median("plain")
    share = (ratio - 1) / options.every + between / plain
    layers, heads, width, length, batch = shape
    report.row(
        f"{layers} x {heads} heads, width {width}", f"{batch} x {length}", dtype, name,
        f"{plain * 1e3:.1f} ms", f"{ratio:.3f} ±{spread:.3f}", f"{share:.3%}",
        shape=shape, dtype=dtype, attention=name, seconds=plain, ratio=ratio, spread=spread,
        share=share,
    )  # fmt: skip


def main():
    """One table."""
    options = common.read_options(
        __doc__, dtypes=["float32"],
        add=lambda parser: parser.add_argument("--every", type=int, default=100),
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    report = common.Report("watch", options)
    between = unwatched_step(options)
    report.table(
        f"regard.watch(model, every={options.every})", "model", "batch", "dtype", "attention",
        "a step", "a watched step", "share of all",
    )  # fmt: skip
    report.note(f"A step that is not watched takes {between * 1e6:.1f} µs longer.")
    for dtype in options.dtype:
        for shape in QUICK if options.quick else MODELS:
            for name in ATTEND:
                measure(report, options, shape, dtype, name, between)
    report.save()


if __name__ == "__main__":
    main()
