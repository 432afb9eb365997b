"""Models of transformers from a folder or the hub's cache, and their recordings of a text."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Embedding
from transformers.utils.hub import cached_file

from regard._call.checks import read_flag
from regard.hf._record import record
from regard.recording import Recording

MOST_WRITTEN = 128  # tokens of an answer
# Names of files with the words of a tokenizer, which its settings are not.
VOCABULARY = re.compile(
    r"^(?!added_tokens|special_tokens|tokenizer_config|.*\.py$).*"
    r"(vocab|token|merges|bpe|piece|tekken|dict\.txt|\.model$)"
)
CAUSAL = "ForCausalLM", "LMHeadModel"  # how architectures end that predict the next token
ENCODER = "EncoderModel"  # likewise, that are half of an encoder–decoder
POSITIONS = "position_embeddings"  # the name of a module with a vector for each position


def load(name: str | Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A model of transformers on regard, and its tokenizer.

    Args:
        name: a folder that ``save_pretrained`` wrote, or a name of the hub; what the hub's cache
            has is not asked for again.
        trust_remote_code: run Python that comes with the model. Without it such a model is refused.

    Returns:
        ``(model, tokenizer)``, in evaluation mode; weights from safetensors where there are any.

    Raises:
        FileNotFoundError: no such folder, and no such name, or the hub is not reachable.
        ValueError: a model that transformers cannot load, with its reason, or one that has no
            tokenizer.
        TypeError: ``trust_remote_code`` that is no bool.
    """
    return _loaded(name, trust_remote_code)


def _loaded(name: str | Path, trust_remote_code: bool, predicts: bool = False) -> tuple[Any, Any]:
    trust_remote_code = read_flag("trust_remote_code", trust_remote_code, "load")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with _quiet(), _told(name):
        config, options = _config(name, options)
        kind: Any = transformers.AutoModel
        if config.is_encoder_decoder:
            kind = transformers.AutoModelForSeq2SeqLM
        elif any(x.endswith(ENCODER) for x in config.architectures or ()):
            kind = transformers.AutoModelForTextEncoding
        elif predicts and any(x.endswith(CAUSAL) for x in config.architectures or ()):
            kind = transformers.AutoModelForCausalLM
        tokenizer = _tokenizer(name, options)
        if tokenizer is None and not Path(name).is_dir():  # a cache may have the weights alone
            tokenizer = _tokenizer(name, options | {"local_files_only": False})
        if tokenizer is not None:
            options |= {"attn_implementation": "regard", "output_loading_info": True}
            model, told = kind.from_pretrained(name, **options)
            _warn_of_drawn(name, told["missing_keys"])
            return model.eval(), tokenizer
    where, way_out = "folder has", f"Write it there with tokenizer.save_pretrained({str(name)!r})"
    if not Path(name).is_dir():
        where, way_out = (
            "hub gives",
            "Write model and tokenizer into a folder, each by save_pretrained",
        )
    raise ValueError(
        f"{name}: the {where} no vocabulary of a tokenizer, such as tokenizer.json, and a text"
        f" is read with one. {way_out}. A model that reads no text is recorded by regard.hf.record."
    )


def _warn_of_drawn(name: str | Path, missing: Collection[str]) -> None:
    """Warns of weights that no file has: transformers draws random numbers for them."""
    if lacking := sorted(key for key in missing if "pooler" not in key):  # no layer follows it
        more = f" and {len(lacking) - 1} more are" if lacking[1:] else " is"
        warnings.warn(
            f"{name}: {lacking[0]}{more} missing from its weights, and random numbers stand there:"
            " what it attends to does not follow from a training.",
            stacklevel=4,
        )


def _tokenizer(name: str | Path, options: dict[str, Any]) -> Any:
    """The tokenizer; None where its vocabulary is missing, for which another would stand in."""
    found: Any = None
    try:
        found = transformers.AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        if _has_vocabulary(name) or "trust_remote_code" in str(error):
            raise
        return None
    needs_none = not getattr(found, "vocab_files_names", None)  # as where tokens are bytes
    return found if needs_none or _has_vocabulary(name) else None


def _has_vocabulary(name: str | Path) -> bool:
    """Whether the words of a tokenizer are in a folder, or in what was fetched from the hub."""
    folder = Path(name)
    if not folder.is_dir():
        config = cached_file(str(name), "config.json", local_files_only=True)
        if config is None:  # without a cache nobody knows
            return True
        folder = Path(config).parent
    return any(VOCABULARY.search(file.name) for file in folder.iterdir())


def read(
    name: str | Path, text: str, *, values: bool = True, trust_remote_code: bool = False
) -> Recording[Tensor]:
    """Records a model of transformers that reads a text; an encoder–decoder answers it.

    Args:
        name, trust_remote_code: as in ``load``.
        text: to read, all of it at once.
        values: as in ``regard.record``.

    Raises:
        FileNotFoundError, ValueError: as ``load``; or the text is longer than the model reads.
    """
    return Reader(name, values=values, trust_remote_code=trust_remote_code).read(text)[0]


class Reader:
    """A model of transformers that reads one text after another.

    Args:
        name, values, trust_remote_code: as in ``read``.
        predicts: give a causal model the head that its checkpoint has for the next token.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        values: bool = True,
        trust_remote_code: bool = False,
        predicts: bool = False,
    ) -> None:
        self._name, self._values = name, values
        self._model, self.tokenizer = _loaded(name, trust_remote_code, predicts)

    def read(self, text: str) -> tuple[Recording[Tensor], Tensor | None]:
        """The recording of a text, and the logits after each token where the model has them."""
        model, name = self._model, self._name
        inputs = self.tokenizer(text, return_tensors="pt")
        count, most = inputs["input_ids"].shape[1], _longest(model, self.tokenizer)
        if count > most:
            raise ValueError(
                f"The text has {count:,} tokens; {name} reads at most {most:,}: a part."
            )
        if count == 0:
            raise ValueError(f"The text has no token for {name}.")
        inputs = _taken(model, inputs)
        given = {"tokenizer": self.tokenizer, "values": self._values}
        with torch.no_grad(), record(model, **given) as recording:
            if model.config.is_encoder_decoder:
                model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=MOST_WRITTEN)
                return recording, None
            try:
                logits = getattr(model(**inputs), "logits", None)
            except (AttributeError, TypeError) as error:  # of pictures that are not given
                raise ValueError(
                    f"{name} does not read a text alone: {error}. regard.hf.record(model) records"
                    " whatever it is called with."
                ) from error
        return recording, None if logits is None else logits[0]


def _taken(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the model takes of what the tokenizer gives: many know no types of tokens, for example.

    ``generate`` refuses what neither the model nor its encoder names.
    """
    writes = model.config.is_encoder_decoder
    modules = [model, model.get_encoder()] if writes else [model]
    named = [x for one in modules for x in inspect.signature(one.forward).parameters.values()]
    if not writes and any(x.kind is x.VAR_KEYWORD for x in named):
        return dict(inputs)
    names = {"input_ids"}.union(x.name for x in named)
    return {name: x for name, x in inputs.items() if name in names}


def _longest(model: Any, tokenizer: Any) -> int:
    """The most tokens that have a position; the tokenizer of many a model knows of no limit."""
    known = getattr(model.config, "max_position_embeddings", None) or 0
    known = known if known > 0 else tokenizer.model_max_length  # XLNet says -1
    for name, module in model.named_modules():
        is_table = name.rpartition(".")[2] == POSITIONS and isinstance(module, Embedding)
        if is_table and module.padding_idx is not None:  # RoBERTa's begin after that of padding
            known = min(known, module.num_embeddings - module.padding_idx - 1)
    return min(int(known), int(tokenizer.model_max_length))


def _config(name: str | Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the options that find the rest: in the cache, else at the hub."""
    cached = options | {"local_files_only": True}
    try:
        return transformers.AutoConfig.from_pretrained(name, **cached), cached
    except OSError:
        return transformers.AutoConfig.from_pretrained(name, **options), options


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers prints while it loads."""
    before = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    of_hub = hub.level
    hub.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        hub.setLevel(of_hub)
        if bars:
            transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def _told(name: str | Path) -> Iterator[None]:
    """The errors of loading, in a sentence each."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, KeyError) and error.args == ("regard",):
            reason = "it computes its attention by itself, and nothing would be seen of it."
        if reason.endswith(":"):  # what it says follows
            reason = " ".join(str(error).split())
        if "trust_remote_code" in str(error):
            reason = (
                "it comes with Python of its own. To run that, where you trust it, add"
                " trust_remote_code=True, on the command line --trust-remote-code."
            )
        if Path(name).is_dir():
            raise ValueError(f"{name}: transformers cannot load it: {reason}") from error
        raise FileNotFoundError(
            f"{name}: no such folder, and Hugging Face's hub does not give it: {reason}"
        ) from error
