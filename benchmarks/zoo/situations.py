"""The situations in which an architecture is run: padding, caches, generation, gradients, ..."""

import contextlib
import copy

import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, StaticCache

from zoo.inputs import numbers, parameters_of, words

PADDED = 3  # places
TEXTS = ("input_ids", "token_type_ids", "mm_token_type_ids", "bbox")


class RefusedError(Exception):
    """A situation that an architecture does not know; says why."""


class Wide(TorchFunctionMode):
    """What a model does in float32 is done in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wide = {torch.float32: torch.float64}
        args = [wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        kwargs = {
            k: wide.get(x, x) if isinstance(x, torch.dtype) else x
            for k, x in (kwargs or {}).items()
        }
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*args, **kwargs)


class Run:
    """A model under one implementation in one dtype; each call starts from the same seed."""

    def __init__(self, model, dtype, implementation):
        self.model = copy.deepcopy(model).to(dtype)
        self.dtype, self.implementation = dtype, implementation
        if implementation != "eager":
            self.model.set_attn_implementation(implementation)

    def cast(self, value):
        """A tensor of the input, in the run's dtype where it has a fraction."""
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self.dtype)
        return value

    @contextlib.contextmanager
    def arithmetic(self):
        """The dtype's own arithmetic, and the same random numbers."""
        torch.manual_seed(0)
        if self.dtype != torch.float64:
            yield
            return
        torch.set_default_dtype(torch.float64)
        try:
            with Wide():
                yield
        finally:
            torch.set_default_dtype(torch.float32)

    def __call__(self, batch, **options):
        """What ``forward`` returns."""
        with self.arithmetic():
            return self.model(**{k: self.cast(v) for k, v in batch.items()}, **options)

    def generate(self, batch, **options):
        """The words that follow greedily."""
        with self.arithmetic():
            return self.model.generate(
                **{k: self.cast(v) for k, v in batch.items()}, do_sample=False, **options
            )


def tensors(found, name="", skip=("past_key_values", "attentions", "hidden_states", "loss")):
    """The tensors with a fraction of an output, by their path."""
    if isinstance(found, torch.Tensor):
        return {name: found} if found.is_floating_point() else {}
    if isinstance(found, dict):
        items = [(str(k), v) for k, v in found.items()]
    elif isinstance(found, (list, tuple)):
        items = [(str(i), v) for i, v in enumerate(found)]
    else:
        return {}
    result = {}
    for key, value in items:
        if not any(key == s or key.endswith(f"_{s}") for s in skip) or key.startswith("last"):
            result |= tensors(value, f"{name}.{key}" if name else key, skip)
    return result


def at(found, mask):
    """Of those with an axis of the mask's batch and time, what is real."""
    return {
        k: v[mask] for k, v in tensors(found).items() if v.dim() >= 2 and v.shape[:2] == mask.shape
    }


class Subject:
    """An architecture's model and input, and how the situations change that."""

    def __init__(self, model, batch):
        self.model, self.batch = model, batch
        self.taken = parameters_of(model)
        ids = batch.get("input_ids")
        self.is_text = ids is not None and ids.dim() == 2 and "attention_mask" in self.taken
        self.length = ids.shape[1] if self.is_text else 0
        self.is_paired = "decoder_input_ids" in batch
        self.is_decoder = self.is_text and not self.is_paired and self._sees_no_future(ids)

    def _sees_no_future(self, ids):
        if not self.model.can_generate():
            return False
        other = self.batch | {"input_ids": ids.clone()}
        other["input_ids"][:, -2:] = words(*ids[:, -2:].shape, seed=9)
        with torch.no_grad():
            first, second = (self.model(**b).logits for b in (self.batch, other))
        return first.dim() == 3 and bool((first[:, :-2] - second[:, :-2]).abs().max() < 1e-3)

    def need(self, condition, why):
        """Refuses the situation where a condition does not hold."""
        if not condition:
            raise RefusedError(why)

    def padded(self, side, seed):
        """Three places more on one side, which are padding in the first element alone."""
        self.need(self.is_text, "no text with a mask")
        batch, mask = {}, None
        for key, value in self.batch.items():
            if key in TEXTS or key in ("attention_mask",):
                if key == "input_ids":
                    extra = words(len(value), PADDED, seed=5)
                    extra[:1] = words(1, PADDED, seed=seed)
                elif key == "bbox":
                    extra = value[:, :PADDED]
                else:
                    extra = torch.zeros_like(value[:, :PADDED])
                value = torch.cat([extra, value] if side == "left" else [value, extra], 1)
            batch[key] = value
        mask = torch.ones(batch["input_ids"].shape, dtype=torch.long)
        mask[0, slice(None, PADDED) if side == "left" else slice(-PADDED, None)] = 0
        return batch | {"attention_mask": mask}, mask.bool()


# Every situation: what the run gives, and, with another seed, the same with other words where
# nobody should see them.


def plain(subject, run, seed):
    """The input as it is."""
    return tensors(run(subject.batch))


def left_padding(subject, run, seed):
    """Padding before the first element."""
    batch, real = subject.padded("left", seed)
    return places(subject, run(batch), real)


def right_padding(subject, run, seed):
    """Padding after the first element."""
    batch, real = subject.padded("right", seed)
    return places(subject, run(batch), real)


def places(subject, found, real):
    """The real places; of a pair, all of the decoder's."""
    result = at(found, real)
    if subject.is_paired:
        result |= tensors({"logits": found.get("logits")}) or {
            "last_hidden_state": found.last_hidden_state
        }
    subject.need(result, "no output has the places of the text")
    return result


def future(subject, run, seed):
    """Other words at the end; what stands before is looked at."""
    subject.need(subject.is_decoder, "not causal")
    ids = subject.batch["input_ids"].clone()
    ids[:, -PADDED:] = words(len(ids), PADDED, seed=seed)
    seen = torch.ones(ids.shape, dtype=torch.bool)
    seen[:, -PADDED:] = False
    return at(run(subject.batch | {"input_ids": ids}), seen)


def packed(subject, run, seed):
    """Two documents in one row, told by their positions alone; the second is looked at."""
    subject.need(subject.is_decoder, "not causal")
    subject.need("position_ids" in subject.taken, "takes no positions")
    subject.need(set(subject.batch) <= {"input_ids"}, "more than text")
    ids = subject.batch["input_ids"][:1].clone()
    ids[:, :4] = words(1, 4, seed=seed)
    positions = torch.cat([torch.arange(4), torch.arange(ids.shape[1] - 4)])[None]
    second = torch.zeros(ids.shape, dtype=torch.bool)
    second[:, 4:] = True
    return at(run({"input_ids": ids, "position_ids": positions}, use_cache=False), second)


def own_mask(subject, run, seed):
    """A mask (B, 1, T, T) of the user's, with holes."""
    subject.need(subject.is_text and not subject.is_paired, "no text with a mask")
    ids = subject.batch["input_ids"]
    length = ids.shape[1]
    seen = torch.rand(len(ids), 1, length, length, generator=torch.Generator().manual_seed(3)) < 0.7
    seen |= torch.eye(length, dtype=torch.bool)
    if subject.is_decoder:
        seen &= torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=run.dtype).masked_fill(~seen, torch.finfo(run.dtype).min)
    return at(
        run(subject.batch | {"attention_mask": mask}), torch.ones(ids.shape, dtype=torch.bool)
    )


def steps(subject, run, batch, real, cache, cuts):
    """The logits of all pieces of a text, one after the other with a cache."""
    ids, found, start = batch["input_ids"], [], 0
    once = {k: v for k, v in batch.items() if k not in (*TEXTS, "attention_mask")}
    for end in cuts:
        piece = {k: v[:, start:end] for k, v in batch.items() if k in TEXTS}
        if "attention_mask" in batch:
            piece["attention_mask"] = batch["attention_mask"][:, :end]
        out = run(once | piece, past_key_values=cache, use_cache=True)
        cache, once, start = out.past_key_values, {}, end
        subject.need(cache is not None, "no cache")
        found.append(out.logits)
    logits = torch.cat(found, 1)
    subject.need(logits.shape[:2] == ids.shape, "no output has the places of the text")
    return {"logits": logits[real]}


def cached(subject):
    """Refuses what has no cache to be filled bit by bit."""
    subject.need(subject.is_decoder, "not a causal model of text")
    subject.need("past_key_values" in subject.taken, "no cache of keys and values")


def dynamic_cache(subject, run, seed):
    """A first pass and then word by word, with padding on the left."""
    if subject.is_paired:
        return paired_cache(subject, run)
    cached(subject)
    batch, real = subject.padded("left", seed)
    length = real.shape[1]
    return steps(subject, run, batch, real, None, range(length - 2, length + 1))


def paired_cache(subject, run):
    """The decoder word by word."""
    subject.need("past_key_values" in subject.taken, "no cache of keys and values")
    ids, cache, found = subject.batch["decoder_input_ids"], None, []
    for start, end in ((0, 3), *((t, t + 1) for t in range(3, ids.shape[1]))):
        piece = {"decoder_input_ids": ids[:, start:end]}
        out = run(subject.batch | piece, past_key_values=cache, use_cache=True)
        subject.need(out.past_key_values is not None, "no cache")
        cache = out.past_key_values
        found.append(out.logits)
    return {"logits": torch.cat(found, 1)}


def chunks(subject, run, seed):
    """A text without a mask in pieces of several words, with a cache that grows."""
    cached(subject)
    real, length = torch.ones_like(subject.batch["input_ids"]).bool(), subject.length
    cache = DynamicCache(config=run.model.config)
    cuts = (length - 5, length - 1, length)
    return steps(subject, run, subject.batch, real, cache, cuts)


def static_cache(subject, run, seed):
    """A cache with room for more, filled in pieces, with padding on the left."""
    cached(subject)
    batch, real = subject.padded("left", seed)
    length = real.shape[1]
    cache = StaticCache(config=run.model.config, max_cache_len=length + 3)
    return steps(subject, run, batch, real, cache, (length - 4, length - 1, length))


def sliding_cache(subject, run, seed):
    """A static cache in which layers keep a window alone, filled beyond it without a mask."""
    cached(subject)
    real, length = torch.ones_like(subject.batch["input_ids"]).bool(), subject.length
    cache = StaticCache(config=run.model.config, max_cache_len=length + 3)
    subject.need(any(getattr(x, "is_sliding", False) for x in cache.layers), "no window")
    cuts = (length - 4, length - 1, length)
    return steps(subject, run, subject.batch, real, cache, cuts)


def generation(subject, run, seed):
    """Greedy words after a padded text; equal or not."""
    subject.need(subject.model.can_generate(), "does not generate")
    subject.need(subject.is_text or subject.is_paired, "no text with a mask")
    batch = subject.padded("left", seed)[0] if subject.is_text else subject.batch
    batch = {k: v for k, v in batch.items() if k != "decoder_input_ids"}
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}
    if subject.is_paired:
        options["decoder_start_token_id"] = 1
    found = run.generate(batch, **options)
    subject.need(isinstance(found, torch.Tensor), "generates more than words")
    return {"words": found.to(run.dtype)}


def gradients(subject, run, seed):
    """The gradient of every parameter, of a random sum of the outputs."""
    with torch.enable_grad():
        run.model.zero_grad()
        found = tensors(run(subject.batch))
        loss = sum(
            (v * numbers(*v.shape, seed=7).to(v.dtype)).sum() / v.numel() ** 0.5
            for v in found.values()
            if v.requires_grad
        )
        subject.need(isinstance(loss, torch.Tensor), "nothing has a gradient")
        loss.backward()
    grads = {k: p.grad for k, p in run.model.named_parameters() if p.grad is not None}
    run.model.zero_grad()
    return grads


def attentions(subject, run, seed):
    """``output_attentions``."""
    if run.implementation in ("sdpa",):
        raise RefusedError("this implementation has none")
    found = run(subject.batch, output_attentions=True)
    named = {k: v for k, v in found.items() if k.endswith("attentions")}
    weights = {k: w.clone() for k, w in tensors(named, skip=()).items()}  # some are made when read
    subject.need(weights or run.implementation != "eager", "eager gives none")
    return weights


def switching(subject, run, seed):
    """To eager and back: the same output as before, to the bit."""
    before = tensors(run(subject.batch))
    if run.implementation != "eager":
        run.model.set_attn_implementation("eager")
        run(subject.batch)
        run.model.set_attn_implementation(run.implementation)
        after = tensors(run(subject.batch))
        changed = [k for k in before if not torch.equal(before[k], after[k])]
        if changed:
            raise AssertionError(f"{changed[0]} is another after switching to eager and back")
    return before


SITUATIONS = {
    "plain": plain,
    "left padding": left_padding,
    "right padding": right_padding,
    "future": future,
    "packed": packed,
    "own mask": own_mask,
    "dynamic cache": dynamic_cache,
    "chunks": chunks,
    "static cache": static_cache,
    "sliding cache": sliding_cache,
    "generation": generation,
    "gradients": gradients,
    "attentions": attentions,
    "switching": switching,
}
LEAKS = ("left padding", "right padding", "future", "packed")
EXACT = ("plain",)  # compared in float64 also where that is not needed for a pass
