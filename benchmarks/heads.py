"""What it costs to name every head: ``recording.heads()`` in times of the attention of its layers,
and of the pass of the built-in model that made the recording.

    python benchmarks/heads.py [--threads N] [--quick] [--json FILE]

CPU time of the process, since the scores take several libraries and their threads. The tokens are
drawn by Zipf's law, so that some repeat as often as those of a text; no two runs share the row
statistics of their weights.
"""

import time

import common
import numpy as np

import regard

LAYERS, HEADS, WORDS = 4, 8, 2000
SHAPES = [(256, 32), (2048, 32), (2048, 64), (16_384, 32), (16_384, 64)]
QUICK = [(256, 16)]
TOKENS = [16, 256, 2048]  # of a text that the model reads
QUICK_TOKENS = [16]
TEXT = "The old clock in the hall had stopped, and the old clock maker in the town had gone. "
RUNS = 3


def recording(length, head_size, seed=0):
    """Layers of random numbers, and tokens that repeat as words do."""
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, WORDS + 1)
    ids = random.choice(WORDS, length, p=share / share.sum())
    shape = (LAYERS, 3, HEADS, length, head_size)
    arrays = random.standard_normal(shape, np.float32)
    layers = [regard.Layer(*qkv, causal=True) for qkv in arrays]
    return regard.Recording([f" w{n}" for n in ids], layers)


def attend(made):
    """The attention of every layer."""
    for layer in made.layers:
        regard.attention(layer.query, layer.key, layer.value, causal=True)


def cpu_seconds(run, made):
    """CPU time of one run on weights that know nothing yet."""
    fresh = regard.Recording(made.tokens, made.layers)
    start = time.process_time()
    run(fresh)
    return time.process_time() - start


def in_turn(options, made, runs):
    """The median CPU seconds of each, and the last in times of the first."""
    count = 1 if options.quick else RUNS
    taken = {name: [] for name in runs}
    for _ in range(count + 1):  # the first warms up
        for name, run in runs.items():
            taken[name].append(cpu_seconds(run, made))
    seconds = {name: float(np.median(found[1:])) for name, found in taken.items()}
    first, *_, last = seconds.values()
    return seconds, last / first


def measure(report, options, length, head_size):
    """One row: the attention of random numbers, and their heads."""
    made = recording(length, head_size)
    runs = {"attention": attend, "heads": lambda fresh: fresh.heads()}
    seconds, ratio = in_turn(options, made, runs)
    report.row(
        f"{length:,}", str(head_size), *(common.ms(x) for x in seconds.values()), f"{ratio:.2f}",
        length=length, head_size=head_size, cpu_seconds=seconds, ratio=ratio,
    )  # fmt: skip


def measure_model(report, options, model, tokens):
    """One row: the model's pass, and its heads."""
    text = TEXT * (tokens // 8 + 1)  # more than enough, of which the first are read
    while len(model.tokenizer.encode(text)) > tokens:
        text = text[: int(0.9 * len(text))]
    made = model.record(text)
    runs = {"pass": lambda _: model.record(text), "heads": lambda fresh: fresh.heads()}
    seconds, ratio = in_turn(options, made, runs)
    report.row(
        f"{len(made.tokens):,}", *(common.ms(x) for x in seconds.values()), f"{ratio:.2f}",
        tokens=len(made.tokens), cpu_seconds=seconds, ratio=ratio,
    )  # fmt: skip


def main():
    """Two tables."""
    options = common.read_options(__doc__)
    report = common.Report("heads", options)
    report.table(
        f"Scores of all heads, {LAYERS} layers of {HEADS} heads, CPU time",
        "tokens", "head size", "attention", "heads()", "heads / attention",
    )  # fmt: skip
    for shape in QUICK if options.quick else SHAPES:
        measure(report, options, *shape)
    model = regard.lm.LanguageModel.load("builtin")
    report.table(
        "Scores of all heads of the built-in model, CPU time",
        "tokens", "forward pass", "heads()", "heads / pass",
    )  # fmt: skip
    for tokens in QUICK_TOKENS if options.quick else TOKENS:
        measure_model(report, options, model, tokens)
    report.save()


if __name__ == "__main__":
    main()
