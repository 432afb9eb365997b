"""Models of Hugging Face transformers on regard, beside torch's operator (sdpa) and eager.

    python benchmarks/huggingface.py [--only forward generation padding memory] [--threads N]
                                     [--quick] [--json FILE]

The models are made of their configs with random weights, float32: GPT-2 small (of 4,096 tokens 3 of
its 12 layers, which are alike), an encoder of MiniLM's size, and for generation a Llama and a
Mistral of 4 layers, 256 wide, 8 query heads on 2 key heads. Errors are those of the last hidden
state against float64, in times of eager's. "All summaries" is a pass with
``output_attentions=True`` and ``weights.summary()`` of every layer: each reduction of all heads;
"recorded" is a pass in ``regard.hf.record(model, path=...)``, a new file included, and "its file
alone" what no recording can be below: as many bytes written, synced and renamed. Memory is what a
process of its own rises by at its peak above the model, where the C library gives back every array
of a megabyte at once: what it keeps otherwise differs by tens from run to run. Linux only.
"""

import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import memory
import torch

IMPLEMENTATIONS = ("regard", "sdpa", "eager")
TABLES = ("forward", "padding", "generation", "memory")
SUMMARIES, RECORDED, ATTENTIONS = "all summaries", "recorded", "eager with attentions"
FILE = "its file alone"
CONTESTANTS = (*IMPLEMENTATIONS, SUMMARIES, RECORDED, ATTENTIONS)

# (model, tokens, layers): of more tokens fewer layers, for eager's memory.
PASSES = [
    ("MiniLM", 128, 6), ("GPT-2", 128, 12), ("MiniLM", 1024, 6), ("GPT-2", 1024, 12),
    ("GPT-2", 4096, 3),
]  # fmt: skip
BATCH, NEW, LEFT = 4, 24, (0, 100, 7, 0)  # of a generation; LEFT is padding


def model_of(kind, quick, layers=None, tokens=4096):
    """A model with random weights; of generation with its head."""
    import transformers

    import regard.hf  # noqa: F401  registers "regard"

    torch.manual_seed(0)
    small = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None} if quick else {}
    if kind == "GPT-2":
        sizes = {"n_embd": 32, "n_head": 2} if quick else {}
        config = transformers.GPT2Config(
            n_layer=1 if quick else layers, n_positions=tokens, **sizes, **small
        )
        return transformers.GPT2Model(config).eval()
    if kind == "MiniLM":
        width, heads = (32, 2) if quick else (384, 12)
        config = transformers.BertConfig(
            hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
            num_hidden_layers=1 if quick else layers, max_position_embeddings=tokens, **small,
        )  # fmt: skip
        return transformers.BertModel(config, add_pooling_layer=False).eval()
    width = 32 if quick else 256
    sizes = {
        "hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 1 if quick else 4, "vocab_size": 2048,
        "max_position_embeddings": tokens, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    if kind == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    config = transformers.MistralConfig(**sizes, sliding_window=8 if quick else 64)
    return transformers.MistralForCausalLM(config).eval()


def draw_ids(*shape):
    """Token ids, the same in every run."""
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(0))


def on(model, implementation, run):
    """A contestant of ``common.interleave``: the model is put on the implementation untimed."""
    return functools.partial(model.set_attn_implementation, implementation), lambda _: run()


def passes(model, ids, folder):
    """What the first table times."""

    def summaries():
        found = model(ids, output_attentions=True)
        return found, [layer.weights.summary() for layer in found.attentions]

    path = Path(folder) / "pass.safetensors"

    def recorded(_):
        import regard.hf

        with regard.hf.record(model, path=path):
            return model(ids)

    def without_file():
        model.set_attn_implementation("regard")
        path.unlink(missing_ok=True)

    runs = {name: on(model, name, lambda: model(ids)) for name in IMPLEMENTATIONS}
    return runs | {
        SUMMARIES: on(model, "regard", summaries),
        RECORDED: (without_file, recorded),
        ATTENTIONS: on(model, "eager", lambda: model(ids, output_attentions=True)),
    }


def file_alone(passes, folder):
    """Writes the bytes of a recording in its place, and does nothing else."""
    prepare, run = passes[RECORDED]
    run(prepare())
    (path,) = Path(folder).iterdir()
    data, new = path.read_bytes(), path.with_suffix(".new")

    def write(_):
        with new.open("xb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        new.replace(path)
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    return functools.partial(path.unlink, missing_ok=True), write


def errors_of(model, ids):
    """Largest error of each implementation's last hidden state, in times of eager's."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("sdpa")
    exact = exact(ids).last_hidden_state.numpy()
    found = {}
    for name in IMPLEMENTATIONS:
        model.set_attn_implementation(name)
        found[name] = common.largest_error(model(ids).last_hidden_state, exact)
    return {name: error / found["eager"] for name, error in found.items()}


def measure_forward(report, options):
    """The first table."""
    report.table(
        "Forward pass, one text",
        "model, T", *IMPLEMENTATIONS, "regard, in times of sdpa", SUMMARIES, "in times of regard",
        RECORDED, "in times of regard", FILE, "in times of regard", ATTENTIONS,
        "summaries are faster",
    )  # fmt: skip
    for kind, tokens, layers in PASSES[:2] if options.quick else PASSES:
        tokens = 16 if options.quick else tokens
        model, ids = model_of(kind, options.quick, layers, tokens), draw_ids(1, tokens)
        error = errors_of(model, ids)
        with tempfile.TemporaryDirectory() as folder:
            runs = passes(model, ids, folder)
            runs[FILE] = file_alone(runs, folder)
            measured = common.interleave(runs, options, seconds=20.0)
        ratios = {
            "sdpa": measured.ratio("regard", to="sdpa"),
            SUMMARIES: measured.ratio(SUMMARIES, to="regard"),
            RECORDED: measured.ratio(RECORDED, to="regard"),
            FILE: measured.ratio(FILE, to="regard"),
            ATTENTIONS: measured.ratio(ATTENTIONS, to=SUMMARIES),
        }
        shown = (SUMMARIES, RECORDED, FILE, ATTENTIONS)
        took = {name: common.ms(measured.median(name)) for name in shown}
        report.row(
            f"{kind}, {tokens}, {model.config.num_hidden_layers} layers",
            *(common.ms(measured.median(name), error[name]) for name in IMPLEMENTATIONS),
            common.times(*ratios["sdpa"]),
            *(x for n in shown for x in (took[n], common.times(*ratios[n]))),
            model=kind, length=tokens, dtype="float32", seconds=measured.medians(), error=error,
            ratios=ratios,
        )  # fmt: skip


def padded(side, lengths, tokens):
    """Ids and mask ``(B, tokens)`` with so much padding at a side."""
    ids, mask = draw_ids(len(lengths), tokens), torch.ones(len(lengths), tokens, dtype=torch.long)
    for b, n in enumerate(lengths):
        where = slice(0, n) if side == "left" else slice(tokens - n, tokens)
        ids[b, where], mask[b, where] = 0, 0
    return ids, mask


def measure_padding(report, options):
    """Half of the tokens of half of the batch are padding."""
    report.table(
        f"A batch of {BATCH}, half of the tokens of half of it padding",
        "model, T", "regard, no padding", "regard, padding", "in times of none", "sdpa, no padding",
        "sdpa, padding", "in times of none", "padding: regard, in times of sdpa",
    )  # fmt: skip
    for kind, side in (("Llama", "left"), ("Mistral", "left"), ("MiniLM", "right")):
        tokens = 32 if options.quick else 1024
        model = model_of(kind, options.quick, 6, tokens)
        ids, mask = padded(side, (0, tokens // 2, 0, tokens // 2), tokens)
        runs = {}
        for name in ("regard", "sdpa"):
            runs[name, "none"] = on(model, name, functools.partial(model, ids))
            masked = functools.partial(model, ids, attention_mask=mask)
            runs[name, side] = on(model, name, masked)
        measured = common.interleave(runs, options, seconds=15.0)
        cells, ratios = [], {}
        for name in ("regard", "sdpa"):
            ratios[name] = measured.ratio((name, side), to=(name, "none"))
            cells += [common.ms(measured.median((name, x))) for x in ("none", side)]
            cells.append(common.times(*ratios[name]))
        ratios["padded"] = measured.ratio(("regard", side), to=("sdpa", side))
        report.row(
            f"{kind}, {tokens}, padded {side}", *cells, common.times(*ratios["padded"]),
            model=kind, length=tokens, dtype="float32", seconds=measured.medians(), ratios=ratios,
        )  # fmt: skip


def measure_generation(report, options):
    """Tokens of greedy generation, with each cache, padded or not."""
    tokens, new = (16, 2) if options.quick else (256, NEW)
    report.table(
        f"Greedy generation, batch of {BATCH}, {tokens} + {new} tokens: tokens a second",
        "model, cache", "padded left", *IMPLEMENTATIONS, "regard, in times of sdpa",
        "regard, in times of eager", "equal to eager's",
    )  # fmt: skip
    for kind in ("Llama", "Mistral"):
        model = model_of(kind, options.quick, tokens=512)
        for cache in ("dynamic", "static"):
            for lengths in ((0,) * BATCH, LEFT):
                lengths = tuple(n // 16 for n in lengths) if options.quick else lengths
                ids, mask = padded("left", lengths, tokens)
                generate = functools.partial(
                    model.generate, ids, attention_mask=mask, do_sample=False,
                    max_new_tokens=new, min_new_tokens=new, cache_implementation=cache,
                )  # fmt: skip
                measure_one_generation(report, options, model, generate, (kind, cache, lengths))


def measure_one_generation(report, options, model, generate, case):
    """A row."""
    kind, cache, lengths = case
    runs = {name: on(model, name, generate) for name in IMPLEMENTATIONS}
    texts = {}
    for name, (prepare, run) in runs.items():
        texts[name] = run(prepare())
    equal = {name: torch.equal(texts[name], texts["eager"]) for name in ("regard", "sdpa")}
    measured = common.interleave(runs, options, seconds=15.0)
    count = BATCH * (NEW if not options.quick else 2)
    rates = {name: count / measured.median(name) for name in IMPLEMENTATIONS}
    faster = {name: measured.ratio(name, to="regard") for name in ("sdpa", "eager")}
    report.row(
        f"{kind}, {cache}", ", ".join(map(str, lengths)) if any(lengths) else "no",
        *(f"{rates[name]:.0f}" for name in IMPLEMENTATIONS),
        *(common.times(*faster[name]) for name in ("sdpa", "eager")),
        "yes" if all(equal.values()) else f"no: {equal}",
        model=kind, cache=cache, padded=any(lengths), tokens_per_second=rates, faster=faster,
        equal=equal, dtype="float32",
    )  # fmt: skip


def measure_memory(report, options):
    """Peaks of one pass, each contestant in a process of its own."""
    tokens = 256 if options.quick else 4096
    report.table(
        f"Peak memory of a pass above the model, GPT-2 with 3 layers, T = {tokens}",
        "pass", "memory", "in times of regard", "in times of eager with attentions",
    )  # fmt: skip
    found = {}
    for name in ("regard", RECORDED, ATTENTIONS) if options.quick else CONTESTANTS:
        command = [sys.executable, __file__, "--child", name, str(tokens), *["-q"] * options.quick]
        given_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
        out = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=given_back
        ).stdout
        found[name] = json.loads(out)["bytes"]
    for name, size in found.items():
        report.row(
            name, f"{size / 1e6:.1f} MB", f"{size / found['regard']:.2f}x",
            f"{size / found[ATTENTIONS]:.2f}x", contestant=name, length=tokens, dtype="float32",
            bytes=size,
        )  # fmt: skip


def child(name, tokens, quick):
    """Prints the bytes that memory rose by in one pass."""
    torch.set_num_threads(1)
    model = model_of("GPT-2", quick, 3, tokens)
    with tempfile.TemporaryDirectory() as folder:
        for length in (64, tokens):  # what is loaded at the first call is no memory of attention's
            prepare, run = passes(model, draw_ids(1, length), folder)[name]
            given = prepare()
            before = memory.reset_peak()
            result = run(given)
            risen = memory.peak() - before
            del result
    print(json.dumps({"bytes": risen}))


def main():
    """Four tables."""

    def add(parser):
        parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES)

    options = common.read_options(__doc__, add=add)
    torch.set_num_threads(options.threads)
    report = common.Report("huggingface", options, packages=("transformers",))
    measures = (measure_forward, measure_padding, measure_generation, measure_memory)
    for name, measure in zip(TABLES, measures):
        if name in options.only:
            measure(report, options)
    report.save()


if __name__ == "__main__":
    with torch.no_grad():
        if sys.argv[1:2] == ["--child"]:
            name, tokens, *quick = sys.argv[2:]
            child(name, int(tokens), bool(quick))
        else:
            main()
