"""Trains the language model that the package carries, and measures it.

    python scripts/train_builtin.py [--run build/builtin] [--install]

Trains on this Python's standard library and on the prose of ``manuals.py``, without the texts that
are held out by a hash of their name, and writes model.safetensors, config.json, tokenizer.json,
training.json and the picture of the loss to the run's folder; ``--install`` copies them to
src/regard/lm/builtin and docs/. A run that was killed goes on where it stopped. On two cores of
Zen 4, which have instructions for bfloat16, it takes 75 minutes.
"""

import argparse
import dataclasses
import hashlib
import json
import platform
import shutil
from pathlib import Path

import numpy as np
import torch

from evaluation import cost, loss_in_pieces, total
from manuals import SOURCES, prose, without_repetitions
from probe import probe
from regard.lm.corpus import encode_texts, is_held_out, standard_library
from regard.lm.model import LanguageModel
from regard.lm.training import Progress, Settings, train_texts
from trigram import Trigram

ROOT = Path(__file__).parent.parent
BUILTIN = ROOT / "src" / "regard" / "lm" / "builtin"
SENTENCES = ROOT / "tests" / "lm" / "sentences.txt"
# The book whose words are those of ordinary life has three says in what is one token.
PLAIN = "sword-text-web"
# Steps of 8 pieces learn faster, a token, than steps of 16.
SETTINGS = Settings(
    steps=6600,
    finish=1980,
    batch=8,
    length=512,
    vocab_size=6144,
    embed_dim=256,
    num_heads=8,
    windows=(127, 255, None, 255),
    bfloat16=True,
    save_every=50,
)
LENGTHS = (512, 1024, 2048, 4096)
LONGEST = max(LENGTHS)
SAMPLE = 3 * LONGEST  # what a test measures again
PROMPTS = ("def ", "import ", "class ", "    def __init__(self", "The ", "She opened the door")


def report(progress: Progress) -> None:
    if progress.step % 10 == 0:
        print(f"step {progress.step} of {progress.steps}: {progress.loss:.4f} nats", flush=True)


def figures(model: LanguageModel, train_ids: np.ndarray, held_ids: np.ndarray) -> dict:
    """Held-out nats per token of the model and of the trigram baseline, on the same tokens."""
    trigram = Trigram(train_ids, len(model.tokenizer))
    return {
        f"first {len(ids)} tokens": {
            "model_by_length": {n: round(loss_in_pieces(model, ids, n), 4) for n in LENGTHS},
            "trigram": round(float(trigram.losses(ids).mean()), 4),
        }
        for ids in (held_ids[:SAMPLE], held_ids[: len(held_ids) // LONGEST * LONGEST])
    }


def head_table(model: LanguageModel) -> dict:
    scores = probe(model)
    names = ("previous", "first", "induction", "entropy")
    return {name: getattr(scores, name).round(3).tolist() for name in names}


def samples(model: LanguageModel) -> list[dict]:
    return [
        {
            "prompt": prompt,
            "greedy": model.generate(prompt, 60),
            "temperature 0.7, seed 0": model.generate(prompt, 60, temperature=0.7, seed=0),
        }
        for prompt in PROMPTS
    ]


def plot(losses: list[float], held_out: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    window = min(25, len(losses))
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    ax.plot(losses, color="0.8", linewidth=0.7, label="training, each step")
    ax.plot(np.arange(window - 1, len(losses)), smooth, label=f"training, mean of {window} steps")
    figures = list(held_out.values())[-1]
    model = figures["model_by_length"][SETTINGS.length]
    ax.axhline(figures["trigram"], color="C3", linestyle=":", label="trigram, held out")
    ax.axhline(model, color="C2", linestyle="--", label="model at the end, held out")
    ax.set(xlabel="step", ylabel="nats per token", ylim=(1, 6), xlim=(0, len(losses)))
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def corpus(folder: Path) -> tuple[dict[str, str], dict[str, str], list[dict]]:
    """Code and prose by name, held-out texts included, and a description of every source."""
    library = standard_library()
    texts, versions = prose(folder)
    # What the manuals have of a held-out text would make it a guess from memory.
    held = [text for name, text in library.items() if is_held_out(name)]
    texts = without_repetitions(texts, known=held)
    sources = [
        {"source": "standard library", "version": platform.python_version(), **described(library)}
    ]
    for source in SOURCES:
        own = {name: text for name, text in texts.items() if name.startswith(f"{source.package}/")}
        sources.append(
            {
                "source": source.package,
                "version": versions[source.package],
                "licence": source.licence,
                **described(own),
            }
        )
    return library, texts, sources


def described(texts: dict[str, str]) -> dict:
    return {
        "texts": len(texts),
        "characters": sum(map(len, texts.values())),
        "sha256": hashlib.sha256("\0".join(texts.values()).encode()).hexdigest(),
    }


def trained_on(texts: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if not is_held_out(name)}


def mostly_code(code: dict[str, str], pages: dict[str, str]) -> dict[str, str]:
    """Nine tokens of code for one of prose: alone it would be learnt at the cost of the prose."""
    copies = {f"{name} {n}": text for n in range(3) for name, text in code.items()}
    return copies | dict(list(pages.items())[::3])


def held_out(texts: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if is_held_out(name)}


def per_character(model: LanguageModel, library: dict[str, str], manuals: dict[str, str]) -> dict:
    """Nats per character of the sentences of the tests, and of the texts that were held out."""
    sentences = SENTENCES.read_text().splitlines()
    costs = [cost(model, sentence) for sentence in sentences]
    code = [cost(model, text, SETTINGS.length) for text in code_files(library).values()]
    pages = [cost(model, text, SETTINGS.length) for text in held_out(manuals).values()]
    return {
        "sentences": round(total(costs).per_character, 4),
        "code": round(total(code).per_character, 4),
        "manuals": round(total(pages).per_character, 4),
        "most of uniform": round(max(one.of_uniform for one in costs), 4),
        "pieces per word": round(total(costs).tokens / sum(len(s.split()) for s in sentences), 4),
    }


def code_files(library: dict[str, str]) -> dict[str, str]:
    """The held-out source files that are not empty, without the topics of the documentation."""
    files = held_out(library).items()
    return {name: text for name, text in files if name.endswith(".py") and text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=ROOT / "build" / "builtin")
    parser.add_argument("--manuals", type=Path, default=ROOT / "build" / "manuals")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="fewer, for a trial")
    parser.add_argument("--threads", type=int, help="processors to use; all without it")
    parser.add_argument("--install", action="store_true", help="put the model into the package")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    share = SETTINGS.finish / SETTINGS.steps
    settings = dataclasses.replace(
        SETTINGS, steps=options.steps, finish=round(share * options.steps)
    )
    run = options.run

    library, manuals, sources = corpus(options.manuals)
    print(json.dumps(sources, indent=1), flush=True)
    train = trained_on(library | manuals)
    plain = [text for name, text in train.items() if name.startswith(f"{PLAIN}/")]
    vocabulary = [*train.values(), *plain, *plain]
    finish = mostly_code(trained_on(library), trained_on(manuals))
    losses = train_texts(train, run, settings, report, vocabulary, finish)

    model = LanguageModel.load(run)
    code_ids = encode_texts(trained_on(library), model.tokenizer)
    losses_by_length = figures(model, code_ids, encode_texts(held_out(library), model.tokenizer))
    tokens = len(encode_texts(train, model.tokenizer))
    summary = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sources": sources,
        "files": len(train),
        "characters": sum(map(len, train.values())),
        "tokens": tokens,
        "tokens_seen": settings.steps * settings.batch * settings.length,
        "weights": sum(w.size for w in model.weights.values()),
        "held_out_files": sorted(held_out(library | manuals)),
        "per_character": per_character(model, library, manuals),
        "held_out": losses_by_length,
        "heads": head_table(model),
        "samples": samples(model),
        "losses": [round(loss, 2) for loss in losses],  # a step's differs by more from the next
    }
    (run / "training.json").write_text(json.dumps(summary, separators=(",", ":")) + "\n")
    plot(losses, losses_by_length, run / "model_loss.png")
    print(json.dumps({k: v for k, v in summary.items() if k != "losses"}, indent=1))
    if options.install:
        install(run)


def install(run: Path) -> None:
    BUILTIN.mkdir(exist_ok=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "training.json"):
        shutil.copyfile(run / name, BUILTIN / name)
    shutil.copyfile(run / "model_loss.png", ROOT / "docs" / "model_loss.png")


if __name__ == "__main__":
    main()
