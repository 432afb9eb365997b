"""The attention function that transformers calls for a model of ``"regard"``."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, functional

from regard._base.autocast import is_autocast
from regard._base.errors import ShapeError, UnsupportedError
from regard._operator import watching
from regard._operator.attention import attention
from regard._weights.attention_weights import AttentionWeights
from regard.hf import _masks, _weights
from regard.hf._masks import Options

# What eager's functions of transformers take by name and is understood here too.
UNDERSTOOD = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap",
    "position_bias", "s_aux", "sinks", "indices", "block_indices", "is_causal", "cu_seq_lens_q",
    "cu_seq_lens_k", "kwargs", "sliding_window",  # which the mask says
}  # fmt: skip


class SinksCalls(NamedTuple):
    """The calls of a module whose queries have sinks of their own, keys before all others."""

    sinks: int  # of the first call
    tokens: int = 0  # queries of all calls
    forgot: bool = False  # whether a cache has forgotten keys of these

    def and_of(self, queries: int, keys: int) -> SinksCalls:
        """These calls and one of so many queries and keys, without the sinks."""
        tokens = self.tokens + queries
        return self._replace(tokens=tokens, forgot=self.forgot or keys < tokens)


class _Watched(threading.local):
    """The calls of the modules that this thread runs while somebody looks on."""

    def __init__(self) -> None:
        self.calls: weakref.WeakKeyDictionary[Module, SinksCalls] = weakref.WeakKeyDictionary()


watched = _Watched()


def attention_function(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as every model of transformers calls it: see ``AttentionInterface``.

    Args:
        module: the attention layer.
        query: ``(B, Hq, Lq, D)``, after rotation, any strides.
        key: ``(B, Hkv, Lk, D)``, the cache's included; heads are not repeated.
        value: ``(B, Hkv, Lk, Dv)``.
        attention_mask: from ``_masks.mask_function``, or any 4-D mask; None hides nothing, as in
            eager.
        is_causal: with no mask at all, a caller's own word that later keys are hidden, the first
            query at the first key.

    Returns:
        ``(B, Lq, Hq, Dv)``, contiguous, and the weights where the model's caller wants them.

    Raises:
        UnsupportedError: a keyword of this model changes its numbers and is not understood.
    """
    if kwargs:
        _refuse_unknown(type(module).__module__, kwargs)
    dtype = query.dtype  # that of its attentions, also where autocast has another
    if not query.dtype is key.dtype is value.dtype or is_autocast(query.device.type):
        query, key, value = _of_one_dtype(query, key, value)
    (B, _, Lq, _), (key_batch, _, Lk, _) = query.shape, key.shape
    if B == 1 != key_batch:
        query = query.expand(key_batch, -1, -1, -1)
    options = dict(_masks.options_of(attention_mask, Lq, Lk))
    if attention_mask is None and is_causal and Lq > 1:
        options = {"causal": True} if Lq == Lk else {"causal": True, "query_start": 0}
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        documents = _documents(cu_seq_lens_q, cu_seq_lens_k, query, key)
        options["intervals"] = _common(documents, options.get("intervals"))
    is_chosen = sinks is None and not (indices is None and block_indices is None)
    allowed = options if is_chosen else None
    if indices is not None:
        options = _narrowed(options, _scattered(indices.unsqueeze(1), Lk))
    if block_indices is not None:
        options = _narrowed(options, _selected_blocks(module, block_indices, query, key))
    if position_bias is not None:
        options["bias"] = options["bias"] + position_bias if "bias" in options else position_bias
        options["bias"] = options["bias"][..., :Lk].to(query.dtype)
    if s_aux is None:
        s_aux = module._parameters.get("sinks")
    if sinks is not None:
        if watching.watchers:
            known = watched.calls.get(module) or SinksCalls(sinks.shape[-1])
            watched.calls[module] = known.and_of(Lq, Lk)
        key, value, query, options = _with_sinks(query, key, value, sinks, scaling, options)
    elif s_aux is not None:
        options["sinks"] = s_aux.reshape(-1).to(query.dtype)
    if softcap is not None:
        options["softcap"] = softcap
    if scaling is not None:
        options["scale"] = float(scaling)
    if dropout and module.training:
        options["dropout"] = dropout
    found: Any
    are_wanted = _weights.are_wanted(module, kwargs)
    if watching.watchers:
        with watching.Called(module, allowed):
            found = attention(query, key, value, return_weights=are_wanted, **options)
    else:
        found = attention(query, key, value, return_weights=are_wanted, **options)
    if not are_wanted:
        return found.transpose(1, 2).contiguous(), None
    output, weights = found
    if sinks is not None:
        weights = weights.part(columns=slice(sinks.shape[-1], None))
    if "sinks" in options and _weights.are_before_sinks(type(module).__module__):
        rest = {name: x for name, x in options.items() if name not in ("sinks", "dropout")}
        weights = AttentionWeights(query, key, **rest)
    return output.transpose(1, 2).contiguous(), _weights.told(weights, dtype)


def _of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype in which eager would multiply them."""
    device = tensors[0].device.type
    if is_autocast(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
    query, key, value = tensors
    if query.dtype == key.dtype == value.dtype:
        return tensors
    dtype = value.dtype if query.dtype == key.dtype else query.dtype
    return tuple(x.to(dtype) for x in tensors)


@functools.cache
def _named(module_name: str) -> frozenset[str]:
    """The keywords that the model's own attention function takes by name, and which we ignore."""
    eager = getattr(sys.modules.get(module_name), "eager_attention_forward", None)
    if eager is None:
        return frozenset()
    return frozenset(inspect.signature(eager).parameters) - UNDERSTOOD


@torch.compiler.assume_constant_result
def _unknown(module_name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in _named(module_name))


def _refuse_unknown(module_name: str, kwargs: dict[str, Any]) -> None:
    given = tuple(name for name, x in kwargs.items() if x is not None)
    if unknown := _unknown(module_name, given):
        raise UnsupportedError(
            f"regard: {module_name} gives attention {', '.join(unknown)}, which its own eager "
            "function computes with and regard does not know. Use "
            'model.set_attn_implementation("eager") for it, and report the model.'
        )


def _narrowed(options: Options, selected: Tensor) -> Options:
    """The options with a further mask of bools."""
    mask = options.get("mask")
    return options | {"mask": selected if mask is None else mask & selected}


def _common(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The keys that are in two intervals of each query, where there are two."""
    first, last = one
    if other is not None:
        first, last = torch.maximum(first, other[0]), torch.minimum(last, other[1])
    return first, torch.maximum(first, last)


def _documents(
    query_ends: Tensor, key_ends: Tensor, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """The intervals ``(1, Lq)`` of packed documents, told by where each begins, as is their end."""
    Lq, Lk = query.shape[2], key.shape[2]
    if len(query) != 1 or int(query_ends[-1]) != Lq or int(key_ends[-1]) != Lk:
        raise ShapeError(
            f"regard: cu_seq_lens end at {int(query_ends[-1])} queries and {int(key_ends[-1])} "
            f"keys, of a batch of {len(query)} with {Lq} and {Lk}; documents are packed into a "
            "batch of one, all of them. Leave cu_seq_lens out to let them see each other."
        )
    query_ends, key_ends = (ends.to(key.device, torch.int64) for ends in (query_ends, key_ends))
    queries = torch.arange(Lq, device=key.device)
    document = torch.searchsorted(query_ends, queries, right=True)
    return key_ends[document - 1][None], key_ends[document][None]


def _selected_blocks(module: Any, blocks: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The blocks of keys ``(B, H, Lq, k)`` that a sparse attention chose, as a mask."""
    size, Lk = module.indexer.block_size, key.shape[2]
    chosen = _scattered(blocks, -(-Lk // size)).repeat_interleave(size, -1)[..., :Lk]
    return chosen.repeat_interleave(query.shape[1] // blocks.shape[1], 1)


def _scattered(indices: Tensor, count: int) -> Tensor:
    """A mask of the chosen ones of ``count``, by their numbers along the last axis; −1 is none."""
    chosen = indices.new_zeros((*indices.shape[:-1], count + 1), dtype=torch.bool)
    none_there = torch.where(indices < 0, count, indices).long()
    return chosen.scatter(-1, none_there, torch.ones_like(none_there, dtype=torch.bool))[..., :-1]


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    scaling: float | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Sinks ``(B, Hq, Lq, n)`` of every query: n keys before all, with these scores."""
    n, Lk = sinks.shape[-1], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = torch.eye(n, dtype=key.dtype, device=key.device).expand(*key.shape[:2], n, n)
    longer = functional.pad(rows, (key.shape[-1], 0)), functional.pad(key, (0, n))
    options = dict(options)
    order = {name: options.pop(name) for name in ("causal", "query_start") if name in options}
    bools = visible_bools(options, query, Lk)
    if bools is not None:
        bools = bools.expand(*bools.shape[:-1], Lk)
        options["mask"] = functional.pad(bools, (n, 0), value=True)
    if "bias" in options:
        bias = options["bias"].expand(*options["bias"].shape[:-1], Lk)
        options["bias"] = functional.pad(bias, (n, 0))
    if "query_start" in order:
        order["query_start"] = order["query_start"] + n
    options.setdefault("scale", scale)
    return (
        torch.cat(longer, 2),
        functional.pad(value, (0, 0, n, 0)),
        torch.cat((query, (sinks / scale).to(query.dtype)), -1),
        options | order,
    )


def visible_bools(options: Options, query: Tensor, keys: int) -> Tensor | None:
    """The mask that the options of visible keys make, which it takes out of them."""
    j = torch.arange(keys, device=query.device)
    found: Tensor | None = options.pop("mask", None)
    if options.pop("causal", False):
        start = options.pop("query_start", keys - query.shape[2])
        i = torch.arange(query.shape[2], device=query.device) + start
        causal = j <= i[:, None]
        found = causal if found is None else found & causal
    if "intervals" in options:
        first, last = options.pop("intervals")
        inside = ((j >= first[..., None]) & (j < last[..., None])).unsqueeze(1)
        found = inside if found is None else found & inside
    return found
