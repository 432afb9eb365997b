"""Training a language model: the same texts and settings give the same weights, killed or not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from regard._base.extras import needed_by
from regard._base.files import check_folder, open_file, read_file, replaced_when_complete
from regard._base.settings import as_float, counted
from regard.lm.checksum import require_unchanged, with_checksum
from regard.lm.config import WIDEST, Config, LayerConfig
from regard.lm.corpus import Batches, encode_texts, read_texts
from regard.lm.memory import require_free
from regard.lm.model import FLOAT_BYTES, GRAPH_VECTORS, in_float16
from regard.lm.tokenizer import BytePairTokenizer

with needed_by("Training a model"):
    import torch
    from safetensors.torch import save

    from regard.lm.decoder import Decoder, default_modes
    from regard.lm.muon import Muon

RUN, TOKENIZER, CHECKPOINT = "run.json", "tokenizer.json", "checkpoint.safetensors"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# What _Run's two optimizers keep of a parameter.
STATES = (("momentum_buffer",), ("step", "exp_avg", "exp_avg_sq"))
COPIES = 3  # of the weights, at least: they, their gradients and an optimizer's state
RATES = ("muon_rate", "adam_rate", "weight_decay")
SMALLER = "Train in another folder, with a smaller adam_rate or muon_rate for example"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that, with the texts, decide the result of a training run.

    Attributes:
        steps: optimizer steps; the learning rates fall to zero at the last one.
        batch: pieces of text per step.
        length: tokens per piece.
        repeats: pieces of every batch that repeat their beginning; see ``Batches``.
        windows: keys before its own that each layer's queries see; None for all of them, without
            positions.
        finish: steps, the last ones, that read other texts than those before, without repeats.
        muon_rate: learning rate of the matrices; ``adam_rate``: of the embedding and the norms.
        bfloat16: multiply matrices in bfloat16, faster where the CPU has instructions for it.
        save_every: steps between two checkpoints.

    Raises:
        TypeError: no int, or no number.
        ValueError: sizes that do not fit together, or a rate that is negative or not finite.
    """

    steps: int = 400
    batch: int = 8
    length: int = 256
    repeats: int = 1
    finish: int = 0
    vocab_size: int = 1024
    embed_dim: int = 128
    num_heads: int = 4
    windows: tuple[int | None, ...] = (63, 127, None, 127)
    rope: float = 10_000.0
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    weight_decay: float = 0.05
    bfloat16: bool = False
    save_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        counts = ("steps", "batch", "length", "embed_dim", "num_heads", "save_every")
        low = [f"{name} {getattr(self, name)}" for name in counts if getattr(self, name) < 1]
        if low or not self.windows:
            raise ValueError(f"Settings: {', '.join(low) or 'no layers'}; at least 1 is needed.")
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(
                f"Settings: embed_dim {self.embed_dim} cannot be {counted(self.num_heads, 'head')}"
                f" of even size; take a multiple of {2 * self.num_heads}."
            )
        if not 0 <= self.repeats <= self.batch or (self.repeats and self.length < 32):
            raise ValueError(
                f"Settings: {counted(self.repeats, 'repeat')} in a batch of {self.batch}, length "
                f"{self.length}; repeats must be 0 to {self.batch}, and need a length of 32."
            )
        if not 0 <= self.finish <= self.steps:
            raise ValueError(
                f"Settings: finish {self.finish}; 0 to {self.steps}, the steps, is possible."
            )
        if self.vocab_size > 2**16:
            raise ValueError(
                f"Settings: vocab_size {self.vocab_size}; at most {2**16} is possible."
            )
        if not 0 <= self.seed < 2**64:  # what NumPy and torch both take
            raise ValueError(f"Settings: seed {self.seed}; 0 to {2**64 - 1} is possible.")
        self._check_rates()

    def _check_types(self) -> None:
        whole = {name: x for name, x in vars(self).items() if name not in (*RATES, "rope")}
        for n, window in enumerate(whole.pop("windows")):
            whole |= {} if window is None else {f"windows[{n}]": window}
        flag = whole.pop("bfloat16")
        if not isinstance(flag, bool):
            raise TypeError(f"Settings: bfloat16 is {flag!r}; True or False is needed.")
        for name, x in whole.items():
            if isinstance(x, bool) or not isinstance(x, int):
                raise TypeError(f"Settings: {name} is {x!r}; an int is needed.")

    def _check_rates(self) -> None:
        for name in (*RATES, "rope"):
            x: Any = getattr(self, name)
            if isinstance(x, bool) or not isinstance(x, numbers.Real):
                raise TypeError(f"Settings: {name} is {x!r}; a number is needed.")
            if not 0 <= as_float(x) < math.inf or (name == "rope" and x == 0):
                least = "more than 0" if name == "rope" else "0 or more"
                raise ValueError(f"Settings: {name} {x}; {least}, and finite, is needed.")
        if wrong := [x for x in self.windows if x is not None and not 0 <= x <= WIDEST]:
            raise ValueError(
                f"Settings: windows has {wrong[0]}; 0 or more, up to {WIDEST}, or None, is needed."
            )

    def config(self, vocab_size: int) -> Config:
        """The model that these settings train."""
        layers = (LayerConfig(w, None if w is None else self.rope) for w in self.windows)
        return Config(
            vocab_size=vocab_size,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            hidden_dim=4 * self.embed_dim,
            train_length=self.length,
            layers=tuple(layers),
        )

    def rate(self, step: int) -> float:
        """Factor of the learning rates: up in 20 steps, level, down to zero over the last half."""
        return min(1.0, (step + 1) / 20, 2 * (1 - step / self.steps))


@dataclasses.dataclass(frozen=True)
class Progress:
    """The report of ``train`` after every step: ``loss`` in nats per token."""

    step: int
    steps: int
    loss: float


def train(
    files: Iterable[str | Path],
    folder: str | Path,
    settings: Settings | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[float]:
    """Trains a model on files and writes it to ``folder``; resumes a killed run.

    Returns:
        The loss of every step, in nats per token.

    Raises:
        FileNotFoundError: a file that is not there.
        TypeError: one name instead of a list of files.
        ValueError: no text, a file that is no text, too little of it, a folder with another run or
            a model of another origin, a damaged checkpoint, a loss that is not finite, weights that
            are not finite in float16, or a file instead of a folder.
        MaterializeError: a model, or a batch, that needs more memory than is free.
    """
    return train_texts(read_texts(files), folder, settings, progress)


def train_texts(
    texts: Mapping[str, str],
    folder: str | Path,
    settings: Settings | None = None,
    progress: Callable[[Progress], None] | None = None,
    vocabulary: Iterable[str] | None = None,
    finish: Mapping[str, str] | None = None,
) -> list[float]:
    """As ``train``, on texts by name.

    Args:
        vocabulary: texts that the tokenizer is made of, where these are not the ones trained on:
            a text that comes twice has twice the say in which words are one token.
        finish: what the last ``settings.finish`` steps read; by default the same texts.
    """
    settings = settings or Settings()
    check_folder(folder)
    folder = Path(folder)
    vocabulary = None if vocabulary is None else list(vocabulary)
    written = _written(settings, texts, vocabulary, finish)
    _require_same(folder, written)
    tokenizer = _tokenizer(folder, settings, texts.values() if vocabulary is None else vocabulary)

    def batches(read: Mapping[str, str], repeats: int) -> Batches:
        return Batches(
            encode_texts(read, tokenizer),
            tokenizer.bos,
            size=settings.batch,
            length=settings.length,
            repeats=repeats,
            seed=settings.seed,
        )

    first = batches(texts, settings.repeats)
    last = batches(texts if finish is None else finish, 0) if settings.finish else first
    run = _Run(settings, len(tokenizer))
    run.load(folder / CHECKPOINT)
    _claim(folder, written, tokenizer)  # once nothing is left that could be refused
    while len(run.losses) < settings.steps:
        is_first = len(run.losses) < settings.steps - settings.finish
        run.step(first if is_first else last)
        if progress:
            progress(Progress(len(run.losses), settings.steps, run.losses[-1]))
        if len(run.losses) % settings.save_every == 0:
            run.save(folder / CHECKPOINT)
    weights = {name: w.detach().numpy() for name, w in run.model.weights().items()}
    half = in_float16(weights, SMALLER)
    run.save(folder / CHECKPOINT)
    run.model.config.save(folder / CONFIG)
    _write(folder / WEIGHTS, safetensors.numpy.save(half, with_checksum(half)))
    return run.losses


def _written(
    settings: Settings,
    texts: Mapping[str, str],
    vocabulary: list[str] | None,
    finish: Mapping[str, str] | None,
) -> str:
    """What a run's result follows from, as its folder keeps it."""
    read: list[object] = list(texts.values())
    if vocabulary is not None or finish is not None:
        read = [read, vocabulary, None if finish is None else list(finish.values())]
    digest = hashlib.sha256(json.dumps(read).encode()).hexdigest()
    return json.dumps(dataclasses.asdict(settings) | {"texts": digest}, indent=2) + "\n"


def _require_same(folder: Path, written: str) -> None:
    """Raises ValueError where a folder holds another run, or files of something else."""
    path = folder / RUN
    if not path.exists():  # it is written first
        names = (WEIGHTS, CONFIG, TOKENIZER, CHECKPOINT)
        if found := [name for name in names if (folder / name).exists()]:
            raise ValueError(
                f"{folder} holds something else: it has {', '.join(found)} and no {RUN}, which a "
                "run to go on with has. Give another folder."
            )
        return
    run = json.loads(written)
    try:
        other = dataclasses.asdict(Settings()) | dict(json.loads(read_file(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not the settings of a run ({error}); give another folder."
        ) from error
    changed = [
        "other texts" if name == "texts" else f"{name} {other.get(name)}, not {run[name]}"
        for name in run
        if other.get(name) != run[name]
    ]
    if changed:
        raise ValueError(
            f"{folder} holds another run: it has {'; '.join(changed)}. "
            "Give the same files and settings to go on with it, or another folder."
        )


def _tokenizer(folder: Path, settings: Settings, texts: Iterable[str]) -> BytePairTokenizer:
    """The folder's, or one that is made of the texts."""
    path = folder / TOKENIZER
    if path.exists():
        return BytePairTokenizer.load(path)
    return BytePairTokenizer.train(texts, settings.vocab_size)


def _claim(folder: Path, written: str, tokenizer: BytePairTokenizer) -> None:
    """Makes the folder that of the run, where it is not."""
    _require_same(folder, written)  # another run may have begun while the texts were read
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RUN).exists():
        try:
            with replaced_when_complete(folder / RUN, first=True) as file:
                file.write(written.encode())
        except FileExistsError:
            _require_same(folder, written)
    if not (folder / TOKENIZER).exists():
        tokenizer.save(folder / TOKENIZER)


def _write(path: Path, data: bytes) -> None:
    with replaced_when_complete(path) as file:
        file.write(data)


def _require_memory(settings: Settings, config: Config) -> None:
    """Raises MaterializeError where weights and one batch need more memory than is free."""
    weights = sum(math.prod(shape) for shape in config.shapes().values())
    tokens = settings.batch * settings.length
    kept = tokens * len(config.layers) * GRAPH_VECTORS * config.embed_dim
    require_free(
        FLOAT_BYTES * (COPIES * weights + kept),
        f"Training: a model of {weights:,} weights, with {tokens:,} tokens in a step,",
        "Take a smaller embed_dim, batch or length, or fewer layers",
    )


def _new_decoder(config: Config, seed: int) -> Decoder:
    """A decoder in float32; the caller's dtype and random numbers stay as they were."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return Decoder(config)
    finally:
        torch.set_default_dtype(before)


class _Run:
    """Model, optimizers and losses so far: everything that the next step depends on."""

    @default_modes()
    def __init__(self, settings: Settings, vocab_size: int) -> None:
        config = settings.config(vocab_size)
        _require_memory(settings, config)
        self.settings = settings
        self.model = _new_decoder(config, settings.seed)
        self.losses: list[float] = []
        hidden = [p for p in self.model.layers.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if all(p is not h for h in hidden)]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (Muon(hidden, weight_decay=settings.weight_decay), settings.muon_rate),
            (torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0), settings.adam_rate),
        ]

    @default_modes()
    def step(self, batches: Batches) -> None:
        """One optimizer step, on the batch of its number."""
        step = len(self.losses)
        ids = torch.from_numpy(batches[step].astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.bfloat16):
            loss = self.model.loss(ids)
        self._require_finite(loss.item())
        loss.backward()
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.settings.rate(step)
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise ValueError(
                f"Training: the loss of step {len(self.losses) + 1} of {self.settings.steps} is"
                f" {loss}: weights have become too large for their numbers. {SMALLER}."
            )

    def save(self, path: Path) -> None:
        """Writes the checkpoint, whole or not at all."""
        tensors = self._tensors()
        metadata = with_checksum(_arrays(tensors), {"losses": json.dumps(self.losses)})
        _write(path, save(tensors, metadata))

    @default_modes()
    def load(self, path: Path) -> None:
        """Loads the checkpoint, if there is one."""
        if not path.exists():
            return
        open_file(path).close()  # fails for a pipe instead of waiting
        try:
            with safe_open(path, "pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata()
            losses = self._losses(metadata)
            self._require_whole(stored)
            require_unchanged(_arrays(stored), metadata)
        except (
            SafetensorError,
            ValueError,
            TypeError,
        ) as error:  # TypeError: a dtype NumPy has not
            raise ValueError(
                f"{path}: a damaged checkpoint ({error}). Delete it to start the run anew."
            ) from error
        self.losses = losses
        with torch.no_grad():
            for name, weight in self.model.weights().items():
                weight.copy_(stored.pop(name))
        states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in self.optimizers]
        for name, tensor in stored.items():
            _, number, parameter, key = name.split(".")
            states[int(number)].setdefault(int(parameter), {})[key] = tensor
        for (optimizer, _), state in zip(self.optimizers, states):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _losses(self, metadata: Mapping[str, str] | None) -> list[float]:
        losses = json.loads((metadata or {}).get("losses", "null"))
        if not isinstance(losses, list) or not all(isinstance(loss, float) for loss in losses):
            raise ValueError("it has no losses")
        if not 1 <= len(losses) <= self.settings.steps:
            raise ValueError(
                f"it has {counted(len(losses), 'loss', 'losses')} of"
                f" {counted(self.settings.steps, 'step')}"
            )
        return losses

    def _require_whole(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError unless these are the tensors of a checkpoint."""
        needed = {name: tuple(w.shape) for name, w in self.model.weights().items()}
        for number, (optimizer, _) in enumerate(self.optimizers):
            for parameter, weight in enumerate(optimizer.param_groups[0]["params"]):
                for key in STATES[number]:
                    shape = () if key == "step" else tuple(weight.shape)
                    needed[f"optimizer.{number}.{parameter}.{key}"] = shape
        found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        for name in needed | found:
            if found.get(name) != needed.get(name):
                raise ValueError(
                    f"{name} is {found.get(name, 'missing')}, "
                    f"needed {needed.get(name, 'not at all')}"
                )

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {name: w.detach() for name, w in self.model.weights().items()}
        for number, (optimizer, _) in enumerate(self.optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{parameter}.{k}": t for k, t in state.items()}
        return tensors


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in tensors.items()}
