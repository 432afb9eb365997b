"""Attentions that a model returns: tensors to old code, computed from query and key when read."""

from __future__ import annotations

import functools
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from regard._base.torch_state import is_recorded
from regard._weights.attention_weights import AttentionWeights
from regard.hf._computed import Computed

_active_collector: Any
try:  # a private name of transformers
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None


def are_wanted(module: Module, kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model wants attentions: always where nothing tells."""
    if is_recorded():
        return torch.compiler.is_compiling() and _are_told(kwargs)
    if _active_collector is None or kwargs.get("output_attentions"):
        return True
    if (collected := _active_collector.get()) is not None:
        return any("attention" in name for name in collected)
    return not _collects(type(module).__module__)


def _are_told(kwargs: dict[str, Any]) -> bool:
    """Whether attentions are asked for where a graph is made: a collector is a global one there."""
    collected = getattr(_active_collector, "global_var", None) or ()
    wanted = any("attention" in name for name in collected)
    return wanted or bool(kwargs.get("output_attentions"))


@functools.cache
def _collects(module_name: str) -> bool:
    """Whether the models of a file of transformers gather attentions by its collector."""
    if not module_name.startswith("transformers"):  # nor those that come with a model
        return True
    file = sys.modules.get(module_name)
    return hasattr(file, "capture_outputs") and not any(map(_gathers, vars(file).values()))


def _gathers(kind: Any) -> bool:
    """Whether a model's class keeps the attentions of its layers in a list, asked or not."""
    forward = getattr(kind, "forward", None) if isinstance(kind, type) else None
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward else None
    if code is None or "output_attentions" in (*code.co_varnames, *code.co_consts):
        return False
    local = code.co_varnames[code.co_argcount :]
    return any(name.startswith("all_") and name.endswith("attentions") for name in local)


@torch.compiler.assume_constant_result
def are_before_sinks(module_name: str) -> bool:
    """Whether a model's own function gives its weights before sinks take their share of them."""
    return _are_before_sinks(module_name)


@functools.cache
def _are_before_sinks(module_name: str) -> bool:
    eager = getattr(sys.modules.get(module_name), "eager_attention_forward", None)
    if eager is None:
        return False
    one, sink = torch.zeros(1, 1, 1, 1), torch.zeros(1)  # a key and a sink of the same score
    module = SimpleNamespace(sinks=sink, num_key_value_groups=1, training=False)
    try:
        _, weights = eager(module, one, one, one, None, scaling=1.0, dropout=0.0, s_aux=sink)
    except Exception:  # a function with more needs: the weights are then those of the output
        return False
    return weights.item() == 1.0


def told(weights: AttentionWeights[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights as a model gives them: computed when read, or at once in a graph."""
    if torch.compiler.is_compiling():
        return weights[...].to(dtype)
    return Attentions(weights, dtype)


class Attentions(Computed):
    """The weights ``(B, Hq, Lq, Lk)`` of a layer, a tensor whose numbers are computed when read.

    Indexing computes what it gives; everything else computes the whole matrix, once, within the
    limit of ``regard.limits``. They are the weights before dropout, without a gradient; rows that
    see no key are zeros. Copies are computed when read too; what is pickled, or stored by
    ``torch.save``, is the whole as a plain tensor.

    Attributes:
        weights: the ``regard.AttentionWeights``.
    """

    weights: AttentionWeights[Tensor]
    _whole: Tensor | None

    def __new__(
        cls,
        weights: AttentionWeights[Tensor],
        dtype: torch.dtype,
        whole: Tensor | None = None,
    ) -> Attentions:
        """The tensor of ``weights`` in a dtype; ``whole`` are its numbers, where they are there."""
        device = weights._call.query.device
        if weights._call.key.is_inference():  # whose writes torch does not count
            weights = weights.copy()
        found = Tensor._make_wrapper_subclass(cls, weights.shape, dtype=dtype, device=device)
        found.weights, found._whole = weights, whole
        return found

    def numbers(self) -> Tensor:
        """The whole matrix: an ordinary tensor.

        Raises:
            MaterializeError: it is above the limit.
            RuntimeError: query or key was written to since, as a static cache is at each step.
        """
        if self._whole is None:
            self._whole = self.weights[...].detach().to(self.dtype)
        return self._whole

    def __getitem__(self, index: Any) -> Tensor:
        if self._whole is None and _is_basic(index):
            return self.weights[index].detach().to(self.dtype)
        return self.numbers()[index]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Whatever is computed with them is computed with their numbers."""
        if func.overloadpacket is torch.ops.aten.detach:
            return args[0]
        args, kwargs = cls.plain((args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().__reduce_ex__(protocol)  # torch.load takes plain tensors alone

    def __copy__(self) -> Attentions:
        return Attentions(self.weights, self.dtype, self._whole)  # which may be written to

    def __deepcopy__(self, memo: Any) -> Attentions:
        whole = None if self._whole is None else self._whole.detach().clone()
        return Attentions(self.weights.copy(), self.dtype, whole)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Attentions{tuple(self.shape)} {self.dtype}, computed when read"


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(type(x) in (int, slice) or x is Ellipsis for x in parts)
