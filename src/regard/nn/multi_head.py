"""Several heads of attention with one fused projection: the layer of a transformer."""

from __future__ import annotations

import math
import numbers
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._base.cache import KeyValueCache
from regard._base.errors import ShapeError, UnsupportedError
from regard._base.rotary import rotate
from regard._base.settings import as_float, counted
from regard._call.checks import read_call, read_flag
from regard._operator.attention import attention
from regard.nn import conversion
from regard.nn.checks import check_cache, check_counts, check_names, check_own, check_tensor

if TYPE_CHECKING:
    from regard._base.types import Bool, Float, Int, NoOption, Segments
    from regard._weights.attention_weights import AttentionWeights

    class _Options(TypedDict, total=False):
        value: Tensor | None
        key_lengths: Tensor | None
        mask: Tensor | None
        bias: Tensor | None
        segments: Segments | None
        cache: KeyValueCache | None


_CALLED_WITH = (
    "value", "key_lengths", "mask", "bias", "segments", "cache", "return_weights",
)  # fmt: skip
_DEFAULTS = {
    "window": None, "softcap": None, "rope": None, "dropout": 0.0, "residual_dropout": 0.0,
}  # fmt: skip


class MultiHeadAttention(nn.Module):
    """Multi-head attention of x to itself or to a context, batch first.

    The parameters have the names and layout of ``torch.nn.MultiheadAttention``: a state dict of one
    loads into the other. With the same seed both start from the same numbers.

    Args:
        embed_dim: numbers in each vector of x and of the output.
        num_heads: query heads, Hq.
        num_kv_heads: key and value heads, Hkv, by default Hq; divides Hq (grouped queries).
        head_dim: numbers per head, D; by default ``embed_dim / num_heads``.
        kdim, vdim: numbers in each vector that keys and values are projected from, by default
            ``embed_dim``.
        bias: whether the projections have one.
        causal: token i sees tokens ``j <= i``.
        window: ``(left, right)``, how far a token sees to both sides; None leaves a side open.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        rope: base of rotary positions, such as 10000.0; None for no positions.
        dropout: probability of dropping a weight, in training mode.
        residual_dropout: probability of dropping an output number, in training mode.
        device, dtype: of the parameters.

    Attributes:
        in_proj_weight: ``((Hq + 2 Hkv) · D, embed_dim)``: query, key, value, one below the other;
            None where ``kdim`` or ``vdim`` differ from ``embed_dim``, and then
        q_proj_weight, k_proj_weight, v_proj_weight: ``(Hq · D, embed_dim)``, ``(Hkv · D, kdim)``,
            ``(Hkv · D, vdim)`` instead.
        in_proj_bias: ``((Hq + 2 Hkv) · D,)``, or None.
        out_proj: ``torch.nn.Linear(Hq · D, embed_dim)``.

    Raises:
        ShapeError: heads that do not divide, an odd head size with ``rope``.
        ValueError, TypeError: an option out of its range or of a wrong type.

    Example:
        >>> layer = MultiHeadAttention(64, 8, num_kv_heads=2, causal=True)
        >>> x = torch.rand(1, 100, 64)
        >>> output, weights = layer(x, return_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([1, 100, 64]), (1, 8, 100, 100))

    Source: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023 (grouped queries); Su et al.
    2021 (rotary positions); Beltagy et al. 2020 (window); Gemma team 2024 (softcap).
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        rope: float | None = None,
        dropout: float = 0.0,
        residual_dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(
            "MultiHeadAttention", embed_dim=embed_dim, num_heads=num_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, kdim=kdim, vdim=vdim,
        )  # fmt: skip
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim = _head_dim(embed_dim, num_heads, head_dim)
        self.causal, self.window, self.softcap = causal, window, softcap
        self.rope, self.dropout, self.residual_dropout = rope, dropout, residual_dropout
        self._check_options()
        rows = self._rows()
        factory = {"device": device, "dtype": dtype}
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty(sum(rows), embed_dim, **factory))
            for name in names:
                self.register_parameter(name, None)
        else:
            self.register_parameter("in_proj_weight", None)
            for name, n, size in zip(names, rows, (embed_dim, self.kdim, self.vdim)):
                self.register_parameter(name, nn.Parameter(torch.empty(n, size, **factory)))
        bias = read_flag("bias", bias, "MultiHeadAttention")
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(sum(rows), **factory))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(rows[0], embed_dim, bias, **factory)
        self._reset_in_proj()

    def reset_parameters(self) -> None:
        """Starts anew, as ``torch.nn.MultiheadAttention`` does: Xavier-uniform projections
        (Glorot & Bengio 2010), the output's weights as in ``torch.nn.Linear``, biases 0.
        """
        self.out_proj.reset_parameters()
        self._reset_in_proj()

    def _reset_in_proj(self) -> None:
        weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        for weight in weights:
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, causal: bool = False) -> Self:
        """A layer with the weights, and so the numbers, of ``torch.nn.MultiheadAttention``.

        Inputs and outputs are batch first, ``(B, L, embed_dim)``, whatever ``batch_first`` the
        module was made with. Its ``key_padding_mask`` (True = padding) becomes ``key_lengths``, its
        bool ``attn_mask`` (True = hidden) ``mask=~attn_mask``.

        Args:
            module: what to copy: weights, dtype, device, dropout, training mode.
            causal: torch's module is told at each call, this layer once.

        Raises:
            TypeError: not a ``torch.nn.MultiheadAttention``.
            UnsupportedError: made with ``add_bias_kv`` or ``add_zero_attn``, or with other weights
                than torch's own has, as quantizable modules.
        """
        return cls._built(*conversion.from_torch(module), causal=causal)

    @classmethod
    def from_gpt2(
        cls,
        c_attn: nn.Module,
        c_proj: nn.Module,
        num_heads: int,
        *,
        causal: bool = True,
        dropout: float = 0.0,
        residual_dropout: float = 0.0,
    ) -> Self:
        """A layer with the weights, and so the numbers, of GPT-2's attention.

        A ``torch.nn.Linear`` holds its weight as ``(out, in)``. Every other module is read as
        GPT-2's ``Conv1D``, which holds it as ``(in, out)``: the class decides, since the square
        weight of ``c_proj`` fits both.

        Args:
            c_attn: fused query, key and value: ``embed_dim`` to ``3 · embed_dim``.
            c_proj: the output's projection, ``embed_dim`` to ``embed_dim``.
            num_heads: the modules do not tell.
            causal, dropout, residual_dropout: as in the class.

        Raises:
            TypeError: a module without a weight.
            UnsupportedError: one that adds to its weight's product, as adapters do.
            ShapeError: weights of other shapes, or a number of heads that does not divide.
        """
        options, state, training = conversion.from_gpt2(c_attn, c_proj, num_heads)
        options |= {"dropout": dropout, "residual_dropout": residual_dropout}
        return cls._built(options, state, training, causal=causal)

    @classmethod
    def _built(
        cls, options: dict[str, Any], state: dict[str, Tensor], training: bool, causal: bool
    ) -> Self:
        layer = cls(**options, causal=causal, device="meta")
        layer.load_state_dict(state, assign=True)
        return layer.train(training)

    def new_cache(self, capacity: int = 0) -> KeyValueCache:
        """An empty cache for this layer; pass it to every call of one generation.

        With a window, keys that no later token can see are dropped as memory is renewed.

        Args:
            capacity: tokens to take memory for at once, where their number is known.

        Raises:
            ValueError: the layer is not causal, so that later tokens would change earlier outputs.
        """
        self._check_cacheable()
        return KeyValueCache(None if self.window is None else self.window[0], capacity)

    def forward(
        self,
        x: Float[Tensor, "*B L {self.embed_dim}"],
        context: Float[Tensor, "*B Lk {self.kdim}"] | None = None,
        *more: NoOption,
        value: Float[Tensor, "*B Lk {self.vdim}"] | None = None,
        key_lengths: Int[Tensor, "*B"] | None = None,
        mask: Bool[Tensor, "*_mask"] | None = None,
        bias: Float[Tensor, "*_bias"] | None = None,
        segments: Segments | None = None,
        cache: KeyValueCache | None = None,
        return_weights: bool = False,
        **unknown: NoOption,
    ) -> Tensor | tuple[Tensor, AttentionWeights[Tensor]]:
        """Attention of x to itself, or to a context.

        Args:
            x: ``(..., L, embed_dim)``, what queries are projected from.
            context: ``(..., Lk, kdim)``, what keys and values are projected from; by default x.
                With ``causal`` or ``window``, x stands at its end.
            value: ``(..., Lk, vdim)``, what values are projected from; by default the context.
            key_lengths: ``(B,)``; keys past the length are padding.
            mask: bool, True = may attend, broadcastable to ``(..., Hq, L, Lk)``.
            bias: added to the scores, broadcastable likewise.
            segments: int ids ``(B, L)``, or a pair for queries and keys; only equal ids see each
                other.
            cache: of ``new_cache()``. x are the next tokens after those in it, Lk counts both, and
                a mask, bias or segments of keys cover both.
            return_weights: give ``(output, weights)``.

        Returns:
            ``(..., L, embed_dim)``; with ``return_weights`` also AttentionWeights
            ``(..., Hq, L, Lk)``, which with a cache start at key ``cache.start``.

        Raises:
            ShapeError, TypeError: as ``regard.attention``.
            ValueError: a cache in a layer that is not causal, or together with a context; one of
                another layer, or of one that sees fewer tokens.
            UnsupportedError: a cache with ``key_lengths``, or a context with ``rope``.
        """
        check_names("MultiHeadAttention", more, unknown, _CALLED_WITH)
        self._check_call(x, context, value, key_lengths, cache)
        q, k, v = self._project(x, context, value)
        if self.rope is not None:
            start = 0 if cache is None else cache.length
            q, k = rotate(q, start, self.rope), rotate(k, start, self.rope)
        if cache is not None:
            k, v = cache._joined(k, v)
            check_own(cache, self)
            mask, bias, segments = _covering(cache.start, k.shape[-2], mask, bias, segments)
        attended: Any = attention(
            q,
            k,
            v,
            causal=self.causal,
            window=self.window,
            mask=mask,
            bias=bias,
            key_lengths=key_lengths,
            # Padding follows the tokens, so token i has position i whatever the length.
            query_start=0 if context is None and key_lengths is not None else None,
            segments=segments,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
        )
        heads = attended[0] if return_weights else attended
        output = self.out_proj(heads.transpose(-3, -2).flatten(-2))  # (..., L, Hq · D) projected
        output = F.dropout(output, self.residual_dropout, self.training)
        if cache is not None:  # now that nothing can raise
            cache._count(x.shape[-2])
            cache._layer = weakref.ref(self)
        return (output, attended[1]) if return_weights else output

    if TYPE_CHECKING:  # torch's own takes and gives anything

        @overload
        def __call__(
            self,
            x: Tensor,
            context: Tensor | None = None,
            *,
            return_weights: Literal[False] = False,
            **options: Unpack[_Options],
        ) -> Tensor: ...
        @overload
        def __call__(
            self,
            x: Tensor,
            context: Tensor | None = None,
            *,
            return_weights: Literal[True],
            **options: Unpack[_Options],
        ) -> tuple[Tensor, AttentionWeights[Tensor]]: ...
        @overload
        def __call__(
            self,
            x: Tensor,
            context: Tensor | None = None,
            *,
            return_weights: bool,
            **options: Unpack[_Options],
        ) -> Tensor | tuple[Tensor, AttentionWeights[Tensor]]: ...
        def __call__(self, *given: Any, **options: Any) -> Any: ...  # noqa: D102

    def _project(
        self, x: Tensor, context: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value: ``(..., H, L, D)``."""
        rows = self._rows()
        if self.in_proj_weight is not None and context is None and value is None:
            parts = F.linear(x, self.in_proj_weight, self.in_proj_bias).split(rows, -1)
        else:
            source = x if context is None else context
            inputs = (x, source, source if value is None else value)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(rows)
            weights = (
                (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                if self.in_proj_weight is None
                else self.in_proj_weight.split(rows)
            )
            parts = tuple(F.linear(z, w, b) for z, w, b in zip(inputs, weights, biases))
        q, k, v = (z.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for z in parts)
        return q, k, v

    def _rows(self) -> list[int]:
        """Rows of the projections of query, key and value."""
        shared = self.num_kv_heads * self.head_dim
        return [self.num_heads * self.head_dim, shared, shared]

    def _check_options(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"MultiHeadAttention: {counted(self.num_heads, 'query head')} cannot share"
                f" {counted(self.num_kv_heads, 'key head')}; num_heads must be a multiple of"
                " num_kv_heads."
            )
        probe = torch.zeros(1, 1)
        read_call(
            probe, probe, None,
            causal=self.causal, window=self.window, softcap=self.softcap, dropout=self.dropout,
            seed=0,
        )  # fmt: skip
        if not isinstance(self.residual_dropout, numbers.Real):
            raise TypeError(
                f"MultiHeadAttention: residual_dropout is {self.residual_dropout!r}; a number is "
                "needed."
            )
        if not 0 <= self.residual_dropout < 1:
            raise ValueError(
                f"MultiHeadAttention: residual_dropout is {self.residual_dropout}; "
                "it must be at least 0 and less than 1."
            )
        if self.rope is not None:
            _check_rope(self.rope, self.head_dim)

    def _check_cacheable(self) -> None:
        if not self.causal:
            raise ValueError(
                "MultiHeadAttention: a cache needs causal=True; without it later tokens change "
                "the outputs of earlier ones, which generation has already used."
            )

    def _check_call(
        self,
        x: Tensor,
        context: Tensor | None,
        value: Tensor | None,
        key_lengths: Any,
        cache: KeyValueCache | None,
    ) -> None:
        source, name = (x, "x") if context is None else (context, "context")
        third = (name, source) if value is None else ("value", value)
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        for named in dict([("x", x), (name, source), third]).items():
            check_tensor("MultiHeadAttention", *named, weight)
        _check_vectors("x", x, "embed_dim", self.embed_dim)
        _check_vectors(name, source, "kdim", self.kdim)
        _check_vectors(*third, "vdim", self.vdim)
        if context is not None and self.rope is not None:
            raise UnsupportedError(
                "MultiHeadAttention: rotary positions are those of one sequence, and x and context "
                "are two. Make the layer for cross-attention with rope=None."
            )
        if cache is None:
            return
        check_cache(cache)
        self._check_cacheable()
        if context is not None:
            raise ValueError(
                "MultiHeadAttention: a cache holds the earlier tokens of x itself, and context "
                "takes their place; pass one of the two."
            )
        sees = None if self.window is None else self.window[0]
        if cache._keep is not None and (sees is None or cache._keep < sees):
            raise ValueError(
                f"MultiHeadAttention: the cache keeps {cache._keep} earlier tokens, and this layer"
                f" sees {'all' if sees is None else sees}. Each layer needs a cache of its own:"
                " layer.new_cache()."
            )
        if key_lengths is not None:
            raise UnsupportedError(
                "MultiHeadAttention: key_lengths with a cache would leave padding between the "
                "tokens. Pad on the left, and hide the padding by mask=."
            )

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        text = [f"{self.embed_dim}, {self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            text.append(f"num_kv_heads={self.num_kv_heads}")
        if self.head_dim * self.num_heads != self.embed_dim:
            text.append(f"head_dim={self.head_dim}")
        text += [
            f"{n}={getattr(self, n)}"
            for n in ("kdim", "vdim")
            if getattr(self, n) != self.embed_dim
        ]
        if self.in_proj_bias is None:
            text.append("bias=False")
        if self.causal:
            text.append("causal=True")
        text += [f"{n}={getattr(self, n)}" for n, d in _DEFAULTS.items() if getattr(self, n) != d]
        return ", ".join(text)


def _head_dim(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    if embed_dim < 1 or num_heads < 1 or (head_dim is not None and head_dim < 1):
        raise ShapeError(
            f"MultiHeadAttention: embed_dim is {embed_dim}, num_heads {num_heads}, head_dim "
            f"{head_dim}; all must be positive."
        )
    if head_dim is not None:
        return head_dim
    if embed_dim % num_heads:
        raise ShapeError(
            f"MultiHeadAttention: embed_dim {embed_dim} cannot be divided among {num_heads} heads; "
            "it must be a multiple of num_heads, or head_dim must be given."
        )
    return embed_dim // num_heads


def _check_rope(rope: Any, head_dim: int) -> None:
    if not isinstance(rope, numbers.Real) or isinstance(rope, bool):
        raise TypeError(
            f"MultiHeadAttention: rope is {rope!r}; it is the base of the angles, a number such as "
            "10000.0, or None for no positions."
        )
    if not 0 < as_float(rope) < math.inf:
        raise ValueError(f"MultiHeadAttention: rope is {rope}; it must be positive and finite.")
    if head_dim % 2:
        raise ShapeError(
            f"MultiHeadAttention: rope turns pairs of numbers, and head_dim is {head_dim}; "
            "it must be even."
        )


def _check_vectors(name: str, x: Tensor, size_name: str, size: int) -> None:
    if x.ndim < 2 or x.shape[-1] != size:
        raise ShapeError(
            f"MultiHeadAttention: {name} has shape {tuple(x.shape)}; "
            f"(..., L, {size_name}) with {size_name} = {size} is needed."
        )


def _covering(start: int, held: int, mask: Any, bias: Any, segments: Any) -> tuple[Any, Any, Any]:
    """The part of a mask, a bias and segments over all keys for the last ``held`` of them."""

    def cover(x: Any) -> Any:
        whole = isinstance(x, Tensor) and x.ndim > 0 and x.shape[-1] == start + held
        return x[..., start:] if whole else x

    if isinstance(segments, tuple) and len(segments) == 2:
        segments = segments[0], cover(segments[1])
    return cover(mask), cover(bias), segments
