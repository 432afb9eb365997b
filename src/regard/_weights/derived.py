"""What is made of weights: alignments, effects on a loss, and mixes of heads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from regard._base.types import AlignHow, Array, ArrayT, Float, FloatingT
from regard._weights.alignment import Alignment, aligned, chosen_heads
from regard._weights.blocks import Blocks
from regard._weights.questions import at_once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._weights.effects import EffectKind, Effects
    from regard._weights.mix import Mix


class Derived(Blocks[ArrayT]):
    """Other matrices and paths that follow from weights; ``AttentionWeights`` has them."""

    @overload
    def align(
        self: Derived[NDArray[FloatingT]],
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[NDArray[FloatingT], NDArray[np.int64]]: ...
    @overload
    def align(
        self,
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[ArrayT, ArrayT]: ...
    @at_once
    def align(
        self,
        heads: Sequence[int] | None = None,
        how: AlignHow = "dtw",
        *,
        median_filter_width: int = 7,
        normalise: bool = True,
    ) -> Alignment[Any, Any]:
        """Aligns queries to keys, as the words of a transcript are to their times in the sound.

        The weights of each head are standardised, smoothed, and averaged over the heads; through
        that matrix goes the path with the largest sum, from the first pair to the last. Of equal
        paths it stays with its query. Time and memory are those of one matrix: ``Lq · Lk``.

        Args:
            heads: which, of ``head_numbers``; by default all. ``regard.align`` takes heads of
                several layers.
            how: ``"dtw"``, dynamic time warping: the path goes on by one query, one key or both.
            median_filter_width: in keys, odd; 1 leaves the weights as they are. Ends are
                reflected; fewer keys than half of it are not smoothed.
            normalise: whether weights count by their difference from the key's mean over the
                queries, in its standard deviations (z-score). A key of equal weights counts 0.

        Returns:
            ``(query, key, first, matrix)``: the path, ``first`` the key at which each query begins.

        Raises:
            IndexError: no such head, or heads of weights without that axis.
            TypeError: heads is no list of ints, the width no int, or ``normalise`` no bool.
            ValueError: another ``how``, an even width, no head, or weights of NaN.
            MaterializeError: a matrix is above the limit.

        Source: Radford et al. 2022, whose implementation is whisper/timing.py.
        """
        weights: Any = self
        return aligned(list(chosen_heads(weights, heads)), how, median_filter_width, normalise)

    @at_once
    def effects(
        self,
        value: Float[Array[ArrayT], "*_B_Hkv Lk Dv"],
        gradient: Float[Array[ArrayT], "*_B_Hq Lq Dv"] | None = None,
        kind: EffectKind = "knockout",
        output: Float[Array[ArrayT], "*_B_Hq Lq Dv"] | None = None,
    ) -> Effects[ArrayT]:
        """What every token pair does to a loss, ``(..., Hq, Lq, Lk)``, computed when asked.

        Args:
            value: ``(..., Hkv, Lk, Dv)`` of this attention, of the query's array type.
            gradient: ``(..., Hq, Lq, Dv)``: ∂loss/∂output of this attention. ``"change"`` reads
                none.
            kind: ``"knockout"``, the rise of the loss when the pair is cut; ``"contribution"``,
                ``"relevance"``, ``"gradient"`` or ``"change"``; see ``regard.Effects``.
            output: ``(..., Hq, Lq, Dv)`` of this attention without dropout, in float32 or wider,
                where it is at hand: in long texts a first question to knockouts is quicker by the
                kernels; other backends do without it. One row of each head is checked.

        Raises:
            ShapeError: value, gradient or output do not fit the weights.
            TypeError: no floating arrays of the query's library and device, or no gradient; an
                output in 16 bits.
            UnsupportedError: these are weights of some keys, and no whole rows.
            ValueError: another ``kind``; when asked, the output of another attention.

        Example:
            >>> import regard
            >>> q = k = v = np.eye(2)
            >>> weights = regard.AttentionWeights(q, k, scale=1.0)
            >>> weights.effects(v, np.array([[1.0, 0.0], [0.0, 1.0]]))[0].round(4)
            array([-0.7311,  0.2689])
        """
        from regard._weights.effects import Effects

        weights: Any = self
        return Effects(weights, value, gradient, kind, output)

    @at_once
    def mix(
        self,
        heads: Collection[int] | None = None,
        coefficients: Sequence[float] | Array[Any] | None = None,
    ) -> Mix[ArrayT]:
        """The weighted sum over heads, ``(..., Lq, Lk)``, computed when asked: by default the mean.

        ``regard.mix([...])`` is that over layers.

        Args:
            heads: which, of ``head_numbers``; by default all.
            coefficients: a number for each of these; by default 1/n.

        Raises:
            IndexError: no such head, or no axis of heads.
            ShapeError: the coefficients are not as many as the heads.
            ValueError: no head, or a coefficient that is not finite.
        """
        from regard._weights.mix import mixed_heads

        weights: Any = self
        return mixed_heads(weights, heads, coefficients)
