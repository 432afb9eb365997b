"""Trains the language model that the package carries, and measures it.

    python scripts/train_builtin.py [--run build/builtin]

Trains on this Python's standard library without the files that are held out by a hash of their
name, and writes model.safetensors, config.json, tokenizer.json and training.json to
src/regard/lm/builtin and the picture of the loss to docs/. A run that was killed goes on where it
stopped. About 45 minutes on two cores; the figures of training.json are those of docs/model.md.
"""

import argparse
import json
import platform
import shutil
from pathlib import Path

import numpy as np
import torch

from evaluation import loss_in_pieces
from probe import probe
from regard.lm.corpus import encode_texts, is_held_out, standard_library
from regard.lm.model import LanguageModel
from regard.lm.training import Progress, Settings, train_texts
from trigram import Trigram

ROOT = Path(__file__).parent.parent
BUILTIN = ROOT / "src" / "regard" / "lm" / "builtin"
SETTINGS = Settings(
    steps=2400,
    batch=16,
    length=512,
    vocab_size=2048,
    embed_dim=256,
    num_heads=8,
    windows=(127, 255, None, 255),
    bfloat16=True,
    save_every=100,
)
LENGTHS = (512, 1024, 2048, 4096)
LONGEST = max(LENGTHS)
SAMPLE = 3 * LONGEST  # what a test measures again
PROMPTS = ("def ", "import ", "class ", "    def __init__(self", "The ")


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
    window = 25
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=ROOT / "build" / "builtin")
    run = parser.parse_args().run
    library = standard_library()
    held = {name: text for name, text in library.items() if is_held_out(name)}
    train = {name: text for name, text in library.items() if name not in held}
    losses = train_texts(train, run, SETTINGS, report)

    BUILTIN.mkdir(exist_ok=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        shutil.copyfile(run / name, BUILTIN / name)
    model = LanguageModel.load()
    train_ids = encode_texts(train, model.tokenizer)
    held_out = figures(model, train_ids, encode_texts(held, model.tokenizer))
    summary = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "files": len(train),
        "characters": sum(map(len, train.values())),
        "tokens": len(train_ids),
        "tokens_seen": SETTINGS.steps * SETTINGS.batch * SETTINGS.length,
        "weights": sum(w.size for w in model.weights.values()),
        "held_out_files": sorted(held),
        "held_out": held_out,
        "heads": head_table(model),
        "samples": samples(model),
        "losses": [round(loss, 4) for loss in losses],
    }
    (BUILTIN / "training.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(losses, held_out, ROOT / "docs" / "model_loss.png")
    print(json.dumps({k: v for k, v in summary.items() if k != "losses"}, indent=1))


if __name__ == "__main__":
    main()
