"""The language model: a decoder in NumPy on ``regard.attention``."""

from __future__ import annotations

import codecs
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from regard._base.cache import KeyValueCache
from regard._base.errors import a_type
from regard._base.files import check_folder, open_file, replaced_when_complete
from regard._base.rotary import rotate
from regard._base.settings import as_float, counted
from regard._operator.attention import attention
from regard._weights.parts import int_of
from regard.lm.checksum import require_unchanged, with_checksum
from regard.lm.config import NORM_EPSILON, Config
from regard.lm.memory import require_memory
from regard.lm.tokenizer import PUT_BACK, BytePairTokenizer, require_text
from regard.recording import Layer, Recording

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._base.types import Float32
    from regard.viewer._server import Viewer

    Array = NDArray[np.float32]

BUILTIN = "builtin"
FLOAT_BYTES = 4
GRAPH_VECTORS = 24  # of a token, that torch keeps of a layer for its gradient
ROWS_AT_ONCE = 512  # of logits: 6144 x 512 x 4 bytes are 12 MB


class LanguageModel:
    """A decoder-only transformer that continues texts and shows what it attends to.

    Args:
        config: its sizes.
        tokenizer: of ``config.vocab_size`` ids.
        weights: float32 arrays by name, of the shapes ``config.shapes()``.
        name: for people; goes into recordings.

    Raises:
        TypeError: a weight that is no float32 array.
        ValueError: weights or tokenizer that do not fit the config.

    Source: Vaswani 2017; Radford 2019 (pre-norm); Zhang & Sennrich 2019 (RMSNorm); Su 2021 (rotary
    positions); So 2021 (squared ReLU).
    """

    def __init__(
        self,
        config: Config,
        tokenizer: BytePairTokenizer,
        weights: dict[str, Array],
        name: str = "",
    ) -> None:
        _check(config, tokenizer, weights, name)
        self.config, self.tokenizer, self.weights, self.name = config, tokenizer, weights, name

    @classmethod
    def load(cls, folder: str | Path = BUILTIN) -> LanguageModel:
        """Reads a model: ``"builtin"``, the one in the package, or a folder that was saved.

        Raises:
            FileNotFoundError: no model there.
            ValueError: files that are no model, or do not belong together.
        """
        path = Path(__file__).parent / BUILTIN if folder == BUILTIN else Path(folder)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder}: no language model there; a folder with a config.json is needed. "
                f"'{BUILTIN}' is the one in the package, `regard train` makes others; models of "
                "Hugging Face are for regard.hf."
            )
        config = Config.load(path / "config.json")  # which tells a model of Hugging Face
        for name in ("tokenizer.json", "model.safetensors"):
            if not os.path.lexists(path / name):
                raise FileNotFoundError(f"{path / name}: no such file. {PUT_BACK}")
        return cls(
            config,
            BytePairTokenizer.load(path / "tokenizer.json"),
            _stored_weights(path / "model.safetensors"),
            name=str(folder),
        )

    def __repr__(self) -> str:
        c = self.config
        return (
            f"LanguageModel({self.name or 'no name'}: {counted(len(c.layers), 'layer')},"
            f" {counted(c.num_heads, 'head')} of {c.head_dim}, {c.vocab_size} ids)"
        )

    def save(self, folder: str | Path) -> None:
        """Writes the model to a folder, weights in float16; each file whole or not at all.

        Raises:
            OSError: a folder that is missing or cannot be written.
            ValueError: a file instead of a folder, a name that says one, or weights that are not
                finite in float16.
        """
        check_folder(folder)
        half = in_float16(self.weights, "Scale them down, or replace them")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replaced_when_complete(folder / "model.safetensors") as file:
            file.write(safetensors.numpy.save(half, with_checksum(half)))
        self.tokenizer.save(folder / "tokenizer.json")
        self.config.save(folder / "config.json")

    def record(
        self,
        text: str,
        progress: Callable[[int, int], object] | None = None,
        explain: int | None = None,
    ) -> Recording[Array]:
        """Records query, key and value of every head while the model reads ``text``, after BOS.

        Args:
            text: in Unicode.
            progress: called before each layer with how many are done, and how many there are.
            explain: position among the recording's tokens, where BOS is 0; negative counts from
                the last. The gradients of this token's loss, −ln p(token | all before it), are
                kept, for ``Recording.effects``. That needs torch: ``pip install "regard[torch]"``.

        Raises:
            IndexError: nothing predicts the token at that position.
            ModuleNotFoundError: ``explain`` without torch.
            TypeError: ``text`` is no str.
            ValueError: ``text`` is empty.
            MaterializeError: ``text`` is longer than the free memory allows.
        """
        kept = 0 if explain is None else GRAPH_VECTORS * len(self.config.layers)
        return self.record_ids(self._read(text, vectors=kept), progress, explain)

    def record_ids(
        self,
        ids: Sequence[int],
        progress: Callable[[int, int], object] | None = None,
        explain: int | None = None,
    ) -> Recording[Array]:
        """As ``record``, of token ids; BOS is not added.

        Raises:
            ValueError: no ids, or one outside the vocabulary.
        """
        self._require_ids(ids, 1)
        gradients = None if explain is None else self._explained(ids, explain)
        layers: list[Layer[Array]] = []

        def keep(layer: Layer[Array]) -> None:
            if progress is not None:
                progress(len(layers), len(self.config.layers))
            layers.append(layer)

        self.hidden(ids, record=keep)
        if gradients is not None:
            layers = [one._with_gradient(found) for one, found in zip(layers, gradients)]
        return Recording(self.tokenizer.tokens(ids), layers, model=self.name)

    def _explained(self, ids: Sequence[int], position: int) -> list[Array]:
        """The gradients of the loss of a token by the output of each layer's attention."""
        if isinstance(position, bool) or not isinstance(position, (int, np.integer)):
            raise TypeError(
                f"record: explain is {a_type(position)}; the position of a token is needed, an int."
            )
        found = int(position)
        found += len(ids) if found < 0 else 0
        if not 1 <= found < len(ids):
            raise IndexError(
                f"record: explain is {position}; a position from 1 to {len(ids) - 1} is needed, "
                "of a token with one before it to predict it from."
            )
        from regard.lm.decoder import gradients

        return gradients(self, ids, found)

    def view(self, text: str = "", *, open_browser: bool = True, port: int = 0) -> Viewer:
        """Look at every weight in the browser, in a page with an input: it reads what is typed.

        Args:
            text: that the page opens with.
            open_browser, port: as in ``Recording.view``.

        Returns:
            The viewer, as ``Recording.view`` does.

        Raises:
            ValueError: ``text`` is longer than the input can hold.
            OSError: the port is taken.

        Source: docs/viewer.md describes the page.
        """
        from regard.viewer import view_texts

        return view_texts(self, text, open_browser=open_browser, port=port)

    def losses(self, text: str) -> Float32[Array, " tokens"]:
        """``−ln p(token | BOS and all before it)`` of each token of ``text``, in nats.

        Raises:
            TypeError, ValueError, MaterializeError: as ``record``.
        """
        return self.losses_ids(self._read(text))

    def losses_ids(self, ids: Sequence[int]) -> Float32[Array, " tokens_less_1"]:
        """As ``losses``, of every token id from the second on; BOS is not added.

        Raises:
            ValueError: fewer than two ids, or one outside the vocabulary.
        """
        self._require_ids(ids, 2)
        hidden, targets = self.hidden(ids[:-1]), np.array(ids[1:])
        blocks = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(targets), ROWS_AT_ONCE)]
        return np.concatenate([_cross_entropy(self.logits(hidden[b]), targets[b]) for b in blocks])

    def loss(self, text: str) -> float:
        """Mean of ``losses``: nats per token."""
        return float(self.losses(text).mean(dtype=np.float64))

    def generate(
        self, text: str, tokens: int, *, temperature: float = 0.0, seed: int | None = 0
    ) -> str:
        """What continues ``text``, without the text itself; see ``stream``."""
        return "".join(self.stream(text, tokens, temperature=temperature, seed=seed))

    def stream(
        self, text: str, tokens: int, *, temperature: float = 0.0, seed: int | None = 0
    ) -> Iterator[str]:
        """Continues ``text`` piece by piece, whole characters only.

        A text may end inside a token (``"def "`` does: the model knows ``" name"``), so its last
        space or token is chosen again, among the tokens that begin with it. The text stays as it
        is: only what such a token has beyond it comes back.

        Args:
            tokens: how many at most, after the one that is chosen again; fewer where the model ends
                the text.
            temperature: 0 takes the most likely token, and so does all below 1e-8; 1 draws from
                the model's distribution.
            seed: of the draws; the same seed gives the same text, None another each time.

        Raises:
            ValueError: ``text`` is empty, ``tokens``, ``temperature`` or ``seed`` negative.
            TypeError: no str, no int, or no number.
            MaterializeError: as ``record``.
        """
        tokens = int_of("generate: tokens", tokens)
        if isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
            raise TypeError(f"generate: temperature is {a_type(temperature)}; a number is needed.")
        temperature = as_float(temperature)
        if tokens < 0 or not 0 <= temperature < np.inf:
            raise ValueError(
                f"generate: tokens is {tokens} and temperature {temperature}; "
                "both must be 0 or more, and finite."
            )
        seed = None if seed is None else int_of("generate: seed", seed)
        if seed is not None and seed < 0:
            raise ValueError(f"generate: seed is {seed}; it must not be negative.")
        self._read(text, more=tokens)
        return self._continue(text, tokens, temperature, np.random.default_rng(seed))

    def _continue(
        self, text: str, tokens: int, temperature: float, random: np.random.Generator
    ) -> Iterator[str]:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        ids, written = self._open_end(text)
        caches = self.new_caches(len(ids) + tokens)
        fits = [self.tokenizer.bytes(i).startswith(written) for i in range(len(self.tokenizer))]
        for n in range(tokens + 1 if tokens else 0):
            logits = self.logits(self.hidden(ids, caches)[-1])
            if n == 0:
                logits[~np.array(fits)] = -np.inf
            ids = [_choose(logits, temperature, random)]
            if ids[0] == self.tokenizer.bos:  # BOS begins another text, so this one ends
                break
            yield utf8.decode(self.tokenizer.bytes(ids[0])[len(written) if n == 0 else 0 :])
        yield utf8.decode(b"", final=True)

    def _open_end(self, text: str) -> tuple[list[int], bytes]:
        """Ids of all but the end of ``text``, and the end: its last space, or its last token."""
        if text[-1] in " \t\r\n":
            return self.tokenizer.encode(text[:-1], bos=True), text[-1].encode()
        *ids, last = self.tokenizer.encode(text, bos=True)
        return ids, self.tokenizer.bytes(last)

    def hidden(
        self,
        ids: Sequence[int],
        caches: Sequence[KeyValueCache] | None = None,
        record: Callable[[Layer[Array]], object] | None = None,
    ) -> Float32[Array, "L embed_dim"]:
        """The decoder: ids to the vectors that ``logits`` reads, after those in the caches.

        ``record`` takes each layer before it is computed; what it raises ends the pass.

        Raises:
            ValueError: no ids, one outside the vocabulary, or not one cache for each layer.
        """
        self._require_ids(ids, 1)
        if caches and len(caches) != len(self.config.layers):
            raise ValueError(
                f"hidden: there are {len(caches)} caches for"
                f" {counted(len(self.config.layers), 'layer')}; each needs its own: new_caches()."
            )
        start = caches[0].length if caches else 0
        x = _norm(self.weights["embedding"][list(ids)])
        for i, layer in enumerate(self.config.layers):
            w = {name: self.weights[f"layers.{i}.{name}"] for name in LAYER_WEIGHTS}
            q, k, v = self._heads(_norm(x) * w["attention_norm"] @ w["qkv"].T)
            if layer.rope is not None:
                q, k = (rotate(x, start, layer.rope) for x in (q, k))
            if record is not None:
                record(Layer(q, k, v, **layer.visible))
            if caches:
                k, v = caches[i]._joined(k, v)
            out = attention(q, k, v, **layer.visible)
            x = x + out.swapaxes(0, 1).reshape(x.shape) @ w["out"].T
            up = np.maximum(_norm(x) * w["mlp_norm"] @ w["up"].T, 0)
            x = x + np.square(up) @ w["down"].T
        for cache in caches or ():  # now that nothing can raise
            cache._count(len(ids))
        return _norm(x) * self.weights["norm"]

    def new_caches(self, capacity: int = 0) -> list[KeyValueCache]:
        """Empty caches, one for each layer, for ``hidden`` to read a text in parts.

        Args:
            capacity: tokens to take memory for at once, where their number is known.
        """
        return [KeyValueCache(layer.window, capacity) for layer in self.config.layers]

    def logits(self, hidden: Float32[Array, "*L embed_dim"]) -> Float32[Array, "*L vocab_size"]:
        """Scores of the next token: ``hidden @ embedding.T``."""
        return hidden @ self.weights["embedding"].T

    def _heads(self, qkv: Float32[np.ndarray, "L qkv"]) -> Float32[Array, "3 H L D"]:
        return qkv.reshape(len(qkv), 3, self.config.num_heads, -1).transpose(1, 2, 0, 3)

    def _require_ids(self, ids: Sequence[int], least: int) -> None:
        """Raises for no list, too few ids, or one that is none of the vocabulary."""
        if not hasattr(ids, "__len__"):
            raise TypeError(f"Token ids are {a_type(ids)}; a list of ints is needed.")
        if len(ids) < least:
            raise ValueError(
                f"Token ids: {len(ids)} given, at least {least} needed; "
                "tokenizer.encode(text, bos=True) gives those of a text."
            )
        for i in ids:
            self.tokenizer.bytes(i)

    def _read(self, text: str, more: int = 0, vectors: int = 0) -> list[int]:
        require_text("The text", text)
        if not text:
            raise ValueError("The text is empty; at least one character is needed.")
        ids = self.tokenizer.encode(text, bos=True)
        # Kept for every layer: q, k and v; alive at once in a layer: about 12 vectors per token.
        floats = self.config.embed_dim * (3 * len(self.config.layers) + 12 + vectors)
        require_memory(len(ids) + more, FLOAT_BYTES * floats)
        return ids


COLDEST = 1e-8  # below, noise times the temperature is less than the rounding of a score
HOTTEST = 1e30  # above, all scores are 0; float32 holds no more than 3e38
STORED = ("float16", "bfloat16", "float32", "float64")  # dtypes of a file of weights
LAYER_WEIGHTS = ("attention_norm", "qkv", "out", "mlp_norm", "up", "down")


def in_float16(weights: Mapping[str, Array], way_out: str) -> dict[str, NDArray[np.float16]]:
    """The weights as a file of a model holds them.

    Raises:
        ValueError: some are not finite in float16; ends in ``way_out``.
    """
    with np.errstate(over="ignore"):
        half = {name: weight.astype(np.float16) for name, weight in weights.items()}
    for name, weight in half.items():
        if count := weight.size - np.isfinite(weight).sum():
            raise ValueError(
                f"{name}: {count} of {weight.size} weights are not finite in float16, which a "
                f"model is saved in and which ends at {np.finfo(np.float16).max:.0f}. {way_out}."
            )
    return half


def _stored_weights(path: Path) -> dict[str, Array]:
    """The weights of a file in float32.

    Raises:
        ValueError: the file is no weights file, or has one that is not floating, or not finite, or
            bits of it have changed.
    """
    open_file(path).close()  # fails for a pipe instead of waiting
    try:
        with safe_open(path, "np") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            require_unchanged(stored, file.metadata())
    except (SafetensorError, TypeError, ValueError) as error:  # TypeError: a dtype NumPy has not
        raise ValueError(f"{path}: not a weights file ({error}). {PUT_BACK}") from error
    for name, weight in stored.items():
        if weight.dtype.name not in STORED:
            known = ", ".join(STORED)
            raise ValueError(
                f"{path}: {name} is {weight.dtype}; one of {known} is needed. {PUT_BACK}"
            )
    with np.errstate(over="ignore"):
        weights = {name: weight.astype(np.float32) for name, weight in stored.items()}
    for name, weight in weights.items():
        if count := weight.size - np.isfinite(weight).sum():
            raise ValueError(
                f"{path}: {count} of {weight.size} weights of {name} are not finite. {PUT_BACK}"
            )
    return weights


def _norm(x: Float32[Array, "*L d"]) -> Float32[Array, "*L d"]:
    mean_square = np.square(x).mean(-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(NORM_EPSILON))


def _cross_entropy(logits: Float32[Array, "L vocab_size"], targets: Array) -> Float32[Array, " L"]:
    highest = logits.max(-1)
    total = np.exp(logits - highest[:, None]).sum(-1)
    return highest + np.log(total) - logits[np.arange(len(targets)), targets]


def _choose(
    logits: Float32[Array, " vocab_size"], temperature: float, random: np.random.Generator
) -> int:
    if temperature < COLDEST:
        return int(logits.argmax())
    temperature = min(temperature, HOTTEST)
    # The largest of score / temperature + Gumbel noise is a draw from the softmax (Gumbel 1954).
    return int((logits / temperature + random.gumbel(size=logits.shape)).argmax())


def _check(
    config: Config, tokenizer: BytePairTokenizer, weights: dict[str, Array], name: str
) -> None:
    if len(tokenizer) != config.vocab_size:
        raise ValueError(
            f"{name or 'model'}: the tokenizer has {len(tokenizer)} ids and config.json says "
            f"{config.vocab_size}; take both from the same folder."
        )
    for key, weight in weights.items():
        if not isinstance(weight, np.ndarray) or weight.dtype != np.float32:
            found = weight.dtype if isinstance(weight, np.ndarray) else a_type(weight)
            raise TypeError(
                f"{name or 'model'}: {key} is {found}; weights are float32 arrays of NumPy."
            )
    shapes = {key: weight.shape for key, weight in weights.items()}
    needed = config.shapes()
    wrong = [key for key in needed | shapes if needed.get(key) != shapes.get(key)]
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"{name or 'model'}: {len(wrong)} weights are not those that config.json needs; "
            f"{first} is {shapes.get(first, 'missing')}, needed {needed.get(first, 'not at all')}. "
            "Take config.json and model.safetensors from the same folder."
        )
