"""Alignments of queries to keys by dynamic time warping, as the times of a transcript's words are.

Each head's weights are standardised over the queries and smoothed along the keys; the path with the
largest sum of their mean, from the first pair to the last, tells which keys each query is about.
Source: Radford et al. 2022 (Whisper), its timing.py; Sakoe & Chiba 1978 for the warping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, overload

import numpy as np

from regard._base.arrays import arrays_of, to_numpy
from regard._base.errors import ShapeError, a_type
from regard._base.settings import require_materializable
from regard._base.types import AlignHow, ArrayT, Float, FloatingT, IndexT, Int
from regard._call.checks import read_flag
from regard._weights.parts import int_of, place_of
from regard._weights.questions import at_once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._weights.attention_weights import AttentionWeights

BLOCK = 2**16  # numbers that are smoothed together: they stay in the cache
TOGETHER, NEXT_QUERY, NEXT_KEY = range(3)  # how a path came to a pair


class Alignment(NamedTuple, Generic[ArrayT, IndexT]):
    """A path of pairs (query, key) that never goes back, in either.

    It begins with the first query and key, ends with the last, and goes on by one query, one key or
    both. In a batch shorter paths end with -1.
    """

    query: IndexT
    """``(..., n)`` query indices of the path, int64."""
    key: IndexT
    """``(..., n)`` key indices of the path, int64."""
    first: IndexT
    """``(..., Lq)`` the key at which each query begins, int64; -1 where there is no key."""
    matrix: ArrayT
    """``(..., Lq, Lk)`` what the path has the largest sum of: the mean over the heads."""


@overload
def align(
    layers: Sequence[AttentionWeights[NDArray[FloatingT]]],
    heads: Sequence[Sequence[int]],
    how: AlignHow = "dtw",
    *,
    median_filter_width: int = 7,
    normalise: bool = True,
) -> Alignment[NDArray[FloatingT], NDArray[np.int64]]: ...
@overload
def align(
    layers: Sequence[AttentionWeights[ArrayT]],
    heads: Sequence[Sequence[int]],
    how: AlignHow = "dtw",
    *,
    median_filter_width: int = 7,
    normalise: bool = True,
) -> Alignment[ArrayT, ArrayT]: ...
@at_once
def align(
    layers: Sequence[AttentionWeights[Any]],
    heads: Sequence[Sequence[int]],
    how: AlignHow = "dtw",
    *,
    median_filter_width: int = 7,
    normalise: bool = True,
) -> Alignment[Any, Any]:
    """Aligns queries to keys by heads of several layers, such as Whisper's.

    Args:
        layers: weights of the same batch, queries and keys.
        heads: pairs ``(layer, head)``, as ``generation_config.alignment_heads`` of Whisper has
            them; heads by their ``head_numbers``.
        how, median_filter_width, normalise: as in ``AttentionWeights.align``.

    Returns:
        As ``AttentionWeights.align``.

    Raises:
        IndexError: no such layer or head.
        ShapeError: the layers differ in their batch, queries or keys.
        ValueError, TypeError, MaterializeError: as ``AttentionWeights.align``.

    Example:
        >>> from regard import AttentionWeights
        >>> rng = np.random.default_rng(0)
        >>> layers = [AttentionWeights(*rng.normal(size=(2, 4, 9, 8))) for _ in range(2)]
        >>> align(layers, [(0, 1), (1, 3)]).first.shape
        (9,)

    Source: Radford et al. 2022, whose implementation is whisper/timing.py.
    """
    layers, chosen = _listed("layers", layers, "AttentionWeights"), []
    for pair in _listed("heads", heads, "pairs (layer, head)"):
        try:
            layer, head = pair
        except (TypeError, ValueError):
            raise TypeError(f"align: heads has {pair!r}; pairs (layer, head) are needed.") from None
        place = place_of("align: layer", layer, range(len(layers)))
        chosen.append((layers[place], int_of("align: head", head)))
    return aligned(chosen, how, median_filter_width, normalise)


def aligned(
    heads: Sequence[tuple[AttentionWeights[Any], int | None]], how: str, width: int, normalise: bool
) -> Alignment[Any, Any]:
    """The alignment by some heads, each of its weights; None for weights without heads."""
    _check(heads, how, width)
    normalise = read_flag("normalise", normalise, "align")
    weights = heads[0][0]
    shape = _shape(weights)
    require_materializable(
        "align", shape, 64, "Align a part: weights.part(rows, columns).align(...)"
    )
    matrix = np.zeros((weights._call.sizes[0], *shape[-2:]))
    for of_layer, head in heads:
        one = of_layer if head is None else of_layer.head(head)
        w = to_numpy(one[...]).astype(float).reshape(matrix.shape)
        _require_numbers(w, head)
        smooth(standardised(w) if normalise else w, width, matrix)
    matrix /= len(heads)
    return _given(weights, matrix, [path(-x) for x in matrix])


def _check(heads: Sequence[tuple[AttentionWeights[Any], Any]], how: str, width: int) -> None:
    if how != "dtw":
        raise ValueError(f"align: how is {how!r}; 'dtw' is needed.")
    if isinstance(width, bool) or not isinstance(width, (int, np.integer)):
        raise TypeError(f"align: median_filter_width is {a_type(width)}; an int is needed.")
    if width < 1 or width % 2 == 0:
        raise ValueError(f"align: median_filter_width is {width}; an odd one from 1 on is needed.")
    if not heads:
        raise ValueError("align: no head was chosen; at least one is needed.")
    from regard._weights.attention_weights import AttentionWeights

    for weights, _ in heads:
        if not isinstance(weights, AttentionWeights):
            raise TypeError(
                f"align: layers has {a_type(weights)}; AttentionWeights are needed, as of"
                " regard.AttentionWeights(query, key)."
            )
    shapes = list(dict.fromkeys(_shape(weights) for weights, _ in heads))
    if len(shapes) > 1:
        raise ShapeError(
            f"align: layers of {shapes[0]} and {shapes[1]}, without heads; all must have the same "
            "batch, queries and keys. Take the same part of each: weights.part(rows, columns)."
        )


def _shape(weights: AttentionWeights[Any]) -> tuple[int, ...]:
    """``(..., Lq, Lk)``."""
    return (*weights._call.leading, *weights.shape[-2:])


def _require_numbers(w: Float[np.ndarray, "B Lq Lk"], head: int | None) -> None:
    wrong = np.argwhere(np.isnan(w).any(-1))
    if len(wrong):
        of = "" if head is None else f" of head {head}"
        raise ValueError(
            f"align: the weights{of} are NaN for query {wrong[0][1]}; a path needs numbers. Align "
            "the others: weights.part(rows=...)."
        )


def standardised(w: Float[np.ndarray, "B Lq Lk"]) -> Float[np.ndarray, "B Lq Lk"]:
    """Weights less their mean over the queries, in standard deviations; 0 for a key of equals."""
    if not w.size:
        return w
    deviation = w.std(-2, keepdims=True)
    centred: np.ndarray = w - w.mean(-2, keepdims=True)
    # Of equal numbers the mean is another, rounded, and the deviation more than 0.
    differ = (w.max(-2, keepdims=True) > w.min(-2, keepdims=True)) & (deviation > 0)
    return np.divide(centred, deviation, out=np.zeros_like(w), where=differ)


def smooth(x: Float[np.ndarray, "B Lq Lk"], width: int, sums: Float[np.ndarray, "B Lq Lk"]) -> None:
    """Adds a median filter along the keys, which are reflected at both ends; not of fewer keys."""
    keys, half = x.shape[-1], width // 2
    if keys <= half:
        sums += x
        return
    x, sums = x.reshape(-1, keys), sums.reshape(-1, keys)
    height = max(1, BLOCK // keys)
    for low in range(0, len(x), height):
        some = np.pad(x[low : low + height], ((0, 0), (half, half)), mode="reflect")
        sums[low : low + height] += median([some[:, i : i + keys] for i in range(width)])


def median(arrays: list[np.ndarray]) -> np.ndarray:
    """The median, number by number, of an odd count of arrays.

    Of half of them and two the smallest and the largest are not it; each leaves room for another.
    """
    kept, others = arrays[: len(arrays) // 2 + 2], iter(arrays[len(arrays) // 2 + 2 :])
    while len(kept) > 1:
        for i in range(1, len(kept)):
            kept[0], kept[i] = np.minimum(kept[0], kept[i]), np.maximum(kept[0], kept[i])
        for i in range(1, len(kept) - 1):
            kept[-1], kept[i] = np.maximum(kept[-1], kept[i]), np.minimum(kept[-1], kept[i])
        kept = [*kept[1:-1], *([x] if (x := next(others, None)) is not None else [])]
    return kept[0]


def path(cost: Float[np.ndarray, "Lq Lk"]) -> tuple[list[int], list[int]]:
    """Queries and keys of the path with the smallest sum, from the first pair to the last.

    Of paths that cost the same it stays with its query; else it goes to the next of both.
    """
    if not cost.size:
        return [], []
    moves, i, j = _moves(cost), cost.shape[0] - 1, cost.shape[1] - 1
    queries, keys = [i], [j]
    while i or j:
        move = moves[i + j][i]
        i, j = i - (move != NEXT_KEY), j - (move != NEXT_QUERY)
        queries.append(i)
        keys.append(j)
    return queries[::-1], keys[::-1]


def _moves(cost: Float[np.ndarray, "Lq Lk"]) -> Int[np.ndarray, "diagonals Lq"]:
    """How the best path to each pair came to it; the pairs with i + j = d are row d.

    Those of one row depend on the two rows before it alone, and are computed together.
    """
    Lq, Lk = cost.shape
    moves = np.zeros((Lq + Lk - 1, Lq), np.uint8)
    flat = np.ascontiguousarray(cost).reshape(-1)
    # The smallest sums of two rows, by query from 1 on: before the first pair there is one of 0.
    earlier, last = np.full((2, Lq + 1), np.inf)
    earlier[0] = 0
    for d in range(Lq + Lk - 1):
        low, high = max(0, d - Lk + 1), min(Lq, d + 1)
        both, query, key = earlier[low:high], last[low:high], last[low + 1 : high + 1]
        move, best = (query < both).astype(np.uint8), np.minimum(both, query)
        move[key <= best] = NEXT_KEY
        moves[d, low:high] = move
        at = slice(low * (Lk - 1) + d, (high - 1) * (Lk - 1) + d + 1, max(Lk - 1, 1))
        sums = np.full(Lq + 1, np.inf)
        np.add(np.minimum(best, key), flat[at], out=sums[low + 1 : high + 1])
        earlier, last = last, sums
    return moves


def _given(
    weights: AttentionWeights[Any], matrix: np.ndarray, paths: list[tuple[list[int], list[int]]]
) -> Alignment[Any, Any]:
    """The result with the batch, the library and the device of the weights."""
    leading, xp = weights._call.leading, arrays_of(weights._call.query)
    longest = max((len(queries) for queries, _ in paths), default=0)
    pairs = np.full((2, len(paths), longest), -1)
    first = np.full(matrix.shape[:2], -1)
    for b, found in enumerate(paths):
        pairs[:, b, : len(found[0])] = found
        for i, j in reversed(list(zip(*found))):
            first[b, i] = j

    def give(x: np.ndarray, dtype: str) -> Any:
        return xp.array(xp.empty((0,), dtype), x.reshape(*leading, *x.shape[1:]))

    query, key, begins = (give(x, "int64") for x in (*pairs, first))
    return Alignment(query, key, begins, give(matrix, weights._dtype_name))


def chosen_heads(weights: AttentionWeights[Any], heads: Any) -> Iterator[tuple[Any, int | None]]:
    """Each of some heads of the weights, by default all."""
    if not weights._call.heads:
        if heads is not None:
            raise IndexError(f"align: {weights.shape} has no axis of heads; leave heads out.")
        yield weights, None
        return
    if isinstance(heads, (int, np.integer)):
        raise TypeError(f"align: heads is {heads}, an int; a list is needed: [{heads}].")
    chosen = weights.head_numbers if heads is None else _listed("heads", heads, "ints")
    for head in chosen:
        yield weights, int_of("align: head", head)


def _listed(name: str, given: Any, of: str) -> Any:
    """What is given, if there are several in it; as a tuple, where it cannot tell their number."""
    try:
        several = iter(given)  # also of a sequence without ``__iter__``; of no array without axes
    except TypeError:
        raise TypeError(f"align: {name} is {a_type(given)}; a list of {of} is needed.") from None
    return given if isinstance(given, Sized) else tuple(several)
