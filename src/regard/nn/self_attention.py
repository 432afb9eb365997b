"""One head of attention with trainable projections: the layer to learn and teach with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from regard._base.errors import ShapeError, UnsupportedError, a_type
from regard._call.checks import read_flag
from regard._operator.attention import attention
from regard.nn.checks import check_counts, check_names, check_tensor
from regard.nn.conversion import check_alone, copied

if TYPE_CHECKING:
    from regard._base.types import Bool, Float, Int, NoOption
    from regard._weights.attention_weights import AttentionWeights

    class _Options(TypedDict, total=False):
        key_lengths: Tensor | None
        mask: Tensor | None


# Names of the projections of single-head attention: here, and in two common tutorials.
_NAMES = (("query", "key", "value"), ("W_query", "W_key", "W_value"), ("Q", "K", "V"))
# Attributes in which modules keep the number of their heads.
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


class SelfAttention(nn.Module):
    """``softmax(query @ key.T / sqrt(d_out)) @ value`` with query, key and value projected from x.

    Args:
        d_in: numbers in each input vector.
        d_out: numbers in each query, key, value and output vector.
        bias: whether the projections have one.
        causal: token i sees tokens ``j <= i``.   T=3:  1 0 0
                                                        1 1 0
                                                        1 1 1
        device, dtype: of the parameters.

    Attributes:
        query, key, value: the projections, each a ``torch.nn.Linear(d_in, d_out)``.

    Raises:
        TypeError: ``d_in`` or ``d_out`` is no int, or ``bias`` or ``causal`` no bool.
        ValueError: ``d_in`` or ``d_out`` is not positive.

    Example:
        >>> layer = SelfAttention(3, 2)
        >>> output, weights = layer(torch.rand(6, 3), return_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([6, 2]), (1, 6, 6))

    Source: Vaswani et al. 2017, equation 1.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = False,
        causal: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts("SelfAttention", d_in=d_in, d_out=d_out)
        if d_in < 1 or d_out < 1:
            raise ValueError(
                f"SelfAttention: d_in is {d_in} and d_out {d_out}; both must be positive."
            )
        bias = read_flag("bias", bias, "SelfAttention")
        self.d_in, self.d_out = d_in, d_out
        self.causal = read_flag("causal", causal, "SelfAttention")
        self.query = nn.Linear(d_in, d_out, bias, device=device, dtype=dtype)
        self.key = nn.Linear(d_in, d_out, bias, device=device, dtype=dtype)
        self.value = nn.Linear(d_in, d_out, bias, device=device, dtype=dtype)

    @classmethod
    def from_projections(
        cls,
        query: nn.Linear | Tensor,
        key: nn.Linear | Tensor,
        value: nn.Linear | Tensor,
        causal: bool = False,
    ) -> Self:
        """A layer that gives the numbers of these projections; their weights are copied.

        Args:
            query, key, value: each a ``torch.nn.Linear``, or a matrix ``(d_in, d_out)`` that is
                applied as ``x @ matrix``.
            causal: as in the class.

        Raises:
            TypeError: neither a Linear nor a tensor.
            UnsupportedError: a Linear that adds to its weight's product, as adapters do.
            ShapeError: not three matrices of one shape.
        """
        given = {"query": query, "key": key, "value": value}
        weights: dict[str, Tensor] = {}  # (d_out, d_in)
        biases: dict[str, Tensor | None] = {}
        for name, projection in given.items():
            if isinstance(projection, nn.Linear):
                check_alone("SelfAttention", name, projection)
                weights[name], biases[name] = projection.weight, projection.bias
            elif isinstance(projection, Tensor):
                weights[name], biases[name] = projection.mT, None
            else:
                raise TypeError(
                    f"SelfAttention: {name} is {a_type(projection)}; a torch.nn.Linear or "
                    "a matrix (d_in, d_out) is needed."
                )
        if len({weight.shape for weight in weights.values()}) > 1 or weights["query"].ndim != 2:
            found = "  ".join(f"{n} {tuple(reversed(w.shape))}" for n, w in weights.items())
            raise ShapeError(
                "SelfAttention: the projections must be three matrices of one shape.\n"
                f"  {found}  read as (d_in, d_out)"
            )
        d_out, d_in = weights["query"].shape
        state = {f"{name}.weight": weight for name, weight in weights.items()}
        biased = any(bias is not None for bias in biases.values())
        if biased:  # a missing bias equals a bias of 0
            for name, bias in biases.items():
                zeros = weights[name].new_zeros(d_out)
                state[f"{name}.bias"] = zeros if bias is None else bias
        layer = cls(d_in, d_out, biased, causal, device="meta")
        layer.load_state_dict(copied(state), assign=True)
        return layer

    @classmethod
    def from_module(cls, module: nn.Module, causal: bool = False) -> Self:
        """A layer that gives the numbers of another single-head attention; weights are copied.

        Args:
            module: has the projections as ``W_query, W_key, W_value``, as ``Q, K, V``, or as
                ``query, key, value``: each a ``torch.nn.Linear``, or a parameter
                ``(d_in, d_out)`` that is applied as ``x @ W``.
            causal: as in the class; the module does not tell.

        Raises:
            TypeError: no such attributes.
            UnsupportedError: a module of several heads, or projections as above.
            ShapeError: not three matrices of one shape.
        """
        for name in _COUNTS:
            if (count := getattr(module, name, 1)) != 1:
                raise UnsupportedError(
                    f"SelfAttention: {type(module).__name__} has {name} = {count}; one head can be "
                    "moved over. regard.nn.replace(model) computes models of several heads, where "
                    "they call torch's operator."
                )
        for names in _NAMES:
            if all(hasattr(module, name) for name in names):
                query, key, value = (getattr(module, name) for name in names)
                return cls.from_projections(query, key, value, causal).train(module.training)
        known = "; ".join(", ".join(names) for names in _NAMES)
        found = ", ".join(name for name, _ in module.named_parameters()) or "none"
        raise TypeError(
            f"SelfAttention: {type(module).__name__} has no projections under a known name "
            f"({known}); its parameters: {found}. Name them: "
            "SelfAttention.from_projections(query, key, value)."
        )

    def forward(
        self,
        x: Float[Tensor, "*B T d_in"],
        context: Float[Tensor, "*B Tk d_in"] | None = None,
        *more: NoOption,
        key_lengths: Int[Tensor, "*B"] | None = None,
        mask: Bool[Tensor, "*_mask"] | None = None,
        return_weights: bool = False,
        **unknown: NoOption,
    ) -> Tensor | tuple[Tensor, AttentionWeights[Tensor]]:
        """Attention of x to itself, or to a context.

        Args:
            x: ``(..., T, d_in)``.
            context: ``(..., Tk, d_in)``, what keys and values are projected from instead of x.
            key_lengths: ``(B,)``; keys past the length are padding.
            mask: bool, True = may attend, broadcastable to ``(..., T, Tk)``.
            return_weights: give ``(output, weights)``.

        Returns:
            ``(..., T, d_out)``; with ``return_weights`` also AttentionWeights ``(..., 1, T, Tk)``,
            the 1 being the one head.

        Raises:
            ShapeError, TypeError: as ``regard.attention``.
        """
        check_names("SelfAttention", more, unknown, ("key_lengths", "mask", "return_weights"))
        source = x if context is None else context
        for name, tensor in (("x", x), ("context", source)):
            check_tensor("SelfAttention", name, tensor, getattr(self.query, "weight", None))
            if tensor.ndim < 2 or tensor.shape[-1] != self.d_in:
                raise ShapeError(
                    f"SelfAttention: {name} has shape {tuple(tensor.shape)}; "
                    f"(..., T, d_in) with d_in = {self.d_in} is needed."
                )
        attended: Any = attention(
            self.query(x).unsqueeze(-3),  # (..., 1, T, d_out)
            self.key(source).unsqueeze(-3),
            self.value(source).unsqueeze(-3),
            causal=self.causal,
            key_lengths=key_lengths,
            # Padding follows the tokens, so token i has position i whatever the length.
            query_start=0 if context is None and key_lengths is not None else None,
            mask=mask.unsqueeze(-3) if isinstance(mask, Tensor) and mask.ndim > 1 else mask,
            return_weights=return_weights,
        )
        if return_weights:
            output, weights = attended
            return output.squeeze(-3), weights
        return attended.squeeze(-3)

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

    def extra_repr(self) -> str:
        """Only ``causal``: torch shows the projections below."""
        return f"causal={self.causal}"
