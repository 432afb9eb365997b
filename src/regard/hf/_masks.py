"""The masks of transformers as options of ``regard.attention``: intervals of keys where they are.

A mask made here is eager's additive mask to a model that computes with it, and then takes the
memory of one, once. To ``regard.attention`` it is what its queries see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from regard._base.torch_state import is_recorded
from regard.capture import mask_or_bias
from regard.hf import _visible
from regard.hf._computed import Computed

aten: Any = torch.ops.aten

SMALL = 2**15  # pairs of a mask that is evaluated rather than read
BAND = 2**22  # pairs that are evaluated at a time
Options = dict[str, Any]


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls for the mask of a forward pass: see ``AttentionMaskInterface``.

    Returns:
        A ``Mask (B, 1, Lq, Lk)``; None where eager has none: all is seen, and the model allows it.
        Layers that are causal always get a mask. While torch records a graph, a tensor of bools.
    """
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache counts in it, and the mask is read later
    evaluate = Evaluated(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        use_vmap, device,
    )  # fmt: skip
    if is_recorded():
        return evaluate.rows(0, q_length)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    content = Content(evaluate, padding)
    is_two_way = mask_function is masking_utils.bidirectional_mask_function
    if allow_is_bidirectional_skip and is_two_way and content.options(kv_length) == {}:
        return None
    return Mask(content, dtype)


class Evaluated:
    """A mask function of transformers with its arguments: rows of it, as bools."""

    def __init__(
        self,
        batch: int,
        queries: int,
        keys: int,
        query_offset: int | Tensor,
        key_offset: int,
        function: Callable[..., Tensor],
        padding: Tensor | None,
        use_vmap: bool,
        device: torch.device | str,
    ) -> None:
        self.batch, self.queries, self.keys = batch, queries, keys
        self.query_offset, self.key_offset = query_offset, key_offset
        self.function, self.padding = function, padding
        self.use_vmap, self.device = use_vmap, torch.device(device)

    def rows(self, first: int, count: int) -> Tensor:
        """``(B, 1 or H, count, Lk)``, True = sees."""
        offset: Any = self.query_offset + first
        found = masking_utils.sdpa_mask(
            batch_size=self.batch, q_length=count, kv_length=self.keys,
            q_offset=offset, kv_offset=self.key_offset,
            mask_function=self.function, attention_mask=self.padding,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
            use_vmap=self.use_vmap, device=self.device,
        )  # fmt: skip
        assert found is not None  # neither skip is allowed
        return found


class Content:
    """What a mask shows, found when it is first asked for, and then kept for every layer."""

    def __init__(self, evaluate: Evaluated, padding: Tensor | None) -> None:
        self._evaluate, self._padding = evaluate, padding
        self._bools: Tensor | None = None
        self._additive: Tensor | None = None
        self._options: dict[int, Options] = {}
        self._version = 0
        self.was_written = False  # by a model, which then means its numbers

    @property
    def sizes(self) -> tuple[int, int, int]:
        """``(B, Lq, Lk)``."""
        return self._evaluate.batch, self._evaluate.queries, self._evaluate.keys

    @property
    def use_vmap(self) -> bool:
        """Whether its function is evaluated by ``torch.vmap``."""
        return self._evaluate.use_vmap

    @property
    def start(self) -> int:
        """The position of the first query among the keys."""
        return int(self._evaluate.query_offset) - self._evaluate.key_offset

    def bools(self) -> Tensor:
        """``(B, 1 or H, Lq, Lk)``, True = sees."""
        if self._bools is None and not is_recorded():
            self._bools = self._last_query()
        if self._bools is None:
            self._bools = self._evaluate.rows(0, self._evaluate.queries)
        return self._bools

    def _last_query(self) -> Tensor | None:
        """Of one query that comes last and sees all but padding, what is no padding."""
        is_causal = self._evaluate.function is masking_utils.causal_mask_function
        (_, Lq, Lk), first = self.sizes, self._evaluate.key_offset
        if self._padding is None or Lq != 1 or not is_causal or self.start != Lk - 1:
            return None
        return self._padding[:, None, None, first : first + Lk]

    def additive(self, dtype: torch.dtype) -> Tensor:
        """Eager's mask: 0 where a query sees a key, else the least number of the dtype."""
        if self._additive is None or self._additive.dtype != dtype:
            self._additive = additive(self.bools(), dtype)
            self._version = _version(self._additive)
        return self._additive

    def options(self, keys: int) -> Options:
        """The options of ``regard.attention`` that show it, of the first ``keys`` keys."""
        if self._additive is not None and (
            self.was_written or _version(self._additive) != self._version
        ):
            return options_of(self._additive[..., :keys], self.sizes[1], keys)
        if is_recorded():  # as where a model's forward alone is compiled, and masks come to it
            return {"mask": self.bools()[..., :keys]}
        if keys not in self._options:
            self._options[keys] = self._found(keys)
        return self._options[keys]

    def _found(self, keys: int) -> Options:
        plain = self._plain(keys)
        if plain is not None:
            return plain
        (B, Lq, Lk) = self.sizes
        options: Options = {} if self.start == keys - Lq else {"query_start": self.start}
        try:
            found = None if B * Lq * Lk <= SMALL else self._read()
        except _visible.UnreadableError:
            found = None
        if found is not None and self.use_vmap and not self._is_seen(found):
            found = None
        if found is None and (found := self._scanned()) is None:
            return options | {"mask": self.bools()[..., :keys]}
        if Lq == 1 and found.keys is None and bool((found.last - found.first >= keys).all()):
            return options
        ends = (x.clamp(0, keys).expand(-1, Lq).contiguous() for x in (found.first, found.last))
        options["intervals"] = tuple(ends)
        if found.keys is not None:
            options["mask"] = found.keys[:, None, None, :keys]
        return options

    def _plain(self, keys: int) -> Options | None:
        """Causal, or everything, without padding: known without looking at a position."""
        function = self._evaluate.function
        causal = function is masking_utils.causal_mask_function
        if not causal and function is not masking_utils.bidirectional_mask_function:
            return None
        offset, end = self._evaluate.key_offset, self._evaluate.key_offset + keys
        if causal:  # later keys are hidden anyhow
            end = min(end, offset + self.start + self.sizes[1])
        if self._padding is not None and not bool(self._padding[:, offset:end].all()):
            return None
        if not causal:
            return {}
        at_end = self.start == keys - self.sizes[1]
        return {"causal": True} if at_end else {"causal": True, "query_start": self.start}

    def _read(self) -> _visible.Visible:
        this = self._evaluate
        function = this.function
        if self._padding is not None:
            padding = masking_utils.padding_mask_function(self._padding)
            function = masking_utils.and_masks(function, padding)
        queries = torch.arange(this.queries, device=this.device) + this.query_offset
        batch = torch.arange(this.batch, device=this.device)
        return _visible.read(function, batch, queries, this.keys, this.key_offset)

    def _is_seen(self, found: _visible.Visible) -> bool:
        """Whether some rows are as they are evaluated: a function may need ``torch.vmap``."""
        Lq, Lk = self.sizes[1:]
        j = torch.arange(Lk, device=self._evaluate.device)
        for row in {0, Lq // 3, Lq // 2, Lq - 1}:
            first, last = (x[:, min(row, x.shape[1] - 1), None] for x in found[:2])
            seen = (first <= j) & (j < last)
            seen = seen if found.keys is None else seen & found.keys
            evaluated = self._evaluate.rows(row, 1)
            if not bool((evaluated == seen[:, None, None]).all()):
                return False
        return True

    def _scanned(self) -> _visible.Visible | None:
        """The intervals found by evaluating bands of rows; None where there are none."""
        B, Lq, Lk = self.sizes
        height = max(1, BAND // max(1, B * Lk))
        firsts, lasts = [], []
        for low in range(0, Lq, height):
            band = self.bools() if height >= Lq else self._evaluate.rows(low, min(height, Lq - low))
            if band.shape[1] != 1:
                return None
            numbers = band[:, 0].to(torch.uint8)
            count = numbers.sum(-1, dtype=torch.int64)
            first, last = numbers.argmax(-1), Lk - numbers.flip(-1).argmax(-1)
            last = torch.where(count == 0, first, last)
            if not torch.equal(last - first, count):
                return None
            firsts.append(first)
            lasts.append(last)
        return _visible.Visible(torch.cat(firsts, 1), torch.cat(lasts, 1))


def _version(x: Tensor) -> int:
    """How often a tensor was written to, where torch counts."""
    return 0 if x.is_inference() else x._version


def additive(bools: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``bools`` is True, else the least number of the dtype."""
    zero = torch.zeros((), dtype=dtype, device=bools.device)
    return torch.where(bools, zero, torch.finfo(dtype).min)


class Mask(Computed):
    """A mask ``(B, 1, Lq, Lk)`` whose numbers are computed if a model reads them."""

    content: Content

    def __new__(cls, content: Content, dtype: torch.dtype, keys: int | None = None) -> Mask:
        """The mask of ``content``, or of its first ``keys`` keys."""
        B, Lq, Lk = content.sizes
        shape = (B, 1, Lq, Lk if keys is None else keys)
        mask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=content._evaluate.device
        )
        mask.content = content
        return mask

    def options(self) -> Options:
        """The options of ``regard.attention`` that show what the mask shows."""
        return self.content.options(self.shape[-1])

    def numbers(self) -> Tensor:
        """Eager's mask: an ordinary tensor."""
        return self.content.additive(self.dtype)[..., : self.shape[-1]]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What must be evaluated by ``torch.vmap`` is so here: below, torch can no more."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":
            for mask in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(mask, Mask) and mask.content.use_vmap:
                    mask.content.bools()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Whatever is computed with a mask is computed with its numbers."""
        kwargs = kwargs or {}
        mask = args[0] if args and isinstance(args[0], Mask) else None
        if mask is not None and (kept := _kept(mask, func, args, kwargs)) is not None:
            return kept
        args, kwargs = cls.plain((args, kwargs))
        found = func(*args, **kwargs)
        if mask is None:
            return found
        writes = func._schema.is_mutable
        if writes or func.is_view:  # torch does not count here what is written into a view
            mask.content.was_written = True
        return mask if writes else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.numbers().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Mask{tuple(self.shape)} {self.dtype}, numbers computed when read"


def _kept(mask: Mask, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mask | None:
    """The mask that a cut, a copy or a view of a mask is; None for anything else."""
    name = func.overloadpacket
    if name in (aten.detach, aten.alias, aten.contiguous):
        return Mask(mask.content, mask.dtype, mask.shape[-1])
    if name is aten._to_copy:
        moved = kwargs.get("device", mask.device) != mask.device
        dtype = kwargs.get("dtype", mask.dtype) or mask.dtype
        if not moved and dtype.is_floating_point:
            return Mask(mask.content, dtype, mask.shape[-1]) if dtype == mask.dtype else None
    if name is aten.slice:
        given: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
        axis, first, last, step = given
        size = mask.shape[axis]
        first, last, step = slice(first, last, step).indices(size)
        if first == 0 and step == 1 and (last == size or axis in (3, -1)):
            return Mask(mask.content, mask.dtype, last if axis in (3, -1) else mask.shape[-1])
    return None


# The last mask of numbers that was looked at, for the next layer: it, its place in memory, and what
# it hides; None where it is a bias.
_seen: tuple[weakref.ref[Tensor], tuple[Any, ...], Tensor | None] | None = None


def options_of(mask: Tensor | None, queries: int, keys: int) -> Options:
    """The options of ``regard.attention`` for a mask that a model gives; None hides nothing.

    A floating mask of zeros and of numbers that hide is one of bools; another is a bias.
    """
    global _seen
    if mask is None:
        return {}
    if isinstance(mask, Mask):
        if mask.shape[2:] == (queries, keys):
            return mask.options()
        mask = mask.numbers()
    if mask.ndim < 4:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if mask.shape[-1] > keys > 1:
        mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return {"mask": mask}
    if not mask.is_floating_point():
        raise TypeError(
            f"regard: an attention mask of {mask.dtype} reached attention; a bool or floating one "
            "is needed. Give the model a 2-D mask, or a 4-D one of bools: True = sees."
        )
    if mask.requires_grad or is_recorded():
        return {"bias": mask}
    version = -1 if mask.is_inference() else mask._version
    place = (version, mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)
    owner = mask if mask._base is None else mask._base
    seen = _seen
    if version >= 0 and seen is not None and seen[0]() is owner and seen[1] == place:
        return {"bias": mask} if seen[2] is None else {"mask": seen[2]}
    options = mask_or_bias(mask)
    _seen = weakref.ref(owner), place, options.get("mask")
    return options
