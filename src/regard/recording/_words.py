"""A recording by words: keys summed, and queries averaged, over the pieces of each word."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.arrays import to_numpy
from regard._base.settings import bytes_text, counted, require_materializable
from regard._base.types import Float, Int, PoolHow
from regard._base.words import word_starts, word_texts
from regard._call.visible import sees
from regard._weights.parts import basic_index, int_of, part_of, told_heads
from regard._weights.reductions import (
    Links,
    TopKeys,
    check_k,
    is_pair_of_ints,
    require_room_for_keys,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from regard._weights.attention_weights import AttentionWeights
    from regard.recording._recording import Recording

BLOCK_WEIGHTS = 2**20  # of the pieces of one block of rows
Pick = int | np.integer[Any] | slice | EllipsisType


class Words:
    """A recording by words; nothing is computed before it is asked for.

    The weight of a word on another is the sum over the other's pieces, and the mean over its own:
    exact, and rows sum to what rows of pieces sum to. A word is a run of pieces of which none after
    the first begins with white space; punctuation, newlines and tokens such as ``<bos>`` stand
    alone. Where no token has white space, each is a word.

    Attributes:
        tokens: texts of the words that are keys.
        query_tokens: texts of those that are queries.
        starts: ``(words,)``, the position of the first piece of each key.
        query_starts: the same of the queries.
        weights: ``weights[layer]``: ``WordWeights`` by the layer's number.
    """

    __slots__ = ("_recording", "query_starts", "query_tokens", "starts", "tokens", "weights")

    def __init__(self, recording: Recording[Any]) -> None:
        keys, queries = recording.tokens, recording.query_tokens
        self._recording = recording
        self.starts = word_starts(keys)
        first = recording.layers[0].query_start
        is_inside = 0 <= first <= len(keys) - len(queries)
        if keys == queries:
            self.query_starts = self.starts
        elif is_inside and keys[first : first + len(queries)] == queries:
            own = self.starts[(first < self.starts) & (self.starts < first + len(queries))]
            self.query_starts = np.concatenate([[0] if queries else [], own - first]).astype(int)
        else:
            self.query_starts = word_starts(queries)
        self.tokens = word_texts(keys, self.starts)
        self.query_tokens = word_texts(queries, self.query_starts)
        self.weights = WordLayers(self)

    def __repr__(self) -> str:
        words, tokens = len(self.tokens), len(self._recording.tokens)
        return f"<{counted(words, 'word')} of {counted(tokens, 'token')}>"


class WordLayers(Collection["WordWeights"]):
    """The ``WordWeights`` of each layer, by its number."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def __getitem__(self, layer: int) -> WordWeights:
        words = self._words
        return WordWeights(words._recording.weights[layer], words.query_starts, words.starts)

    def __len__(self) -> int:
        return len(self._words._recording.layers)

    def __iter__(self) -> Iterator[WordWeights]:
        return (self[number] for number in self._words._recording.layer_numbers)

    def __contains__(self, weights: object) -> bool:
        return False  # made anew at each request


class WordWeights:
    """The weights of words on words, ``(Hq, words, words)`` or ``(words, words)`` of one head.

    Each is the sum over the key word's pieces of the mean over the query word's. Results are arrays
    of NumPy; a long text is read in blocks of rows, in memory linear in its length.

    Args:
        weights: of the pieces.
        query_starts, key_starts: the first piece of each word; the first is 0.
    """

    __array_priority__ = 100

    def __init__(
        self,
        weights: AttentionWeights[Any],
        query_starts: Int[np.ndarray, " words"],
        key_starts: Int[np.ndarray, " words"],
    ) -> None:
        self._pieces = weights
        *self._axes, Lq, Lk = weights.shape
        self._rows = np.append(query_starts, Lq)
        self._columns = np.append(key_starts, Lk)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(Hq, queries, keys)`` in words, or ``(queries, keys)`` of one head."""
        return (*self._axes, len(self._rows) - 1, len(self._columns) - 1)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, or float64 where the query is float64."""
        return np.dtype(self._pieces._dtype_name)

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """Numbers by which heads are asked for."""
        return self._pieces.head_numbers

    @property
    def size(self) -> int:
        """The number of weights."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The bytes that all of them would take."""
        return self.size * self.dtype.itemsize

    def head(self, h: int) -> WordWeights:
        """One head alone.

        Args:
            h: which, of ``head_numbers``; negative counts from the last.

        Raises:
            IndexError: no such head, or no axis of heads.
        """
        return WordWeights(self._pieces.head(h), self._rows[:-1], self._columns[:-1])

    def part(self, rows: slice | None = None, columns: slice | None = None) -> WordWeights:
        """The weights of some neighbouring words, computed when asked for.

        Raises:
            TypeError: no slices.
            ValueError: a step other than 1.
        """
        Wq, Wk = self.shape[-2:]
        rows, columns = part_of("rows", rows, Wq), part_of("columns", columns, Wk)
        if rows.step != 1 or columns.step != 1:
            raise ValueError("weights of words: a part is of neighbours; its step must be 1.")
        down = self._rows[rows.start : rows.stop + 1]
        across = self._columns[columns.start : columns.stop + 1]
        pieces = self._pieces.part(slice(down[0], down[-1]), slice(across[0], across[-1]))
        return WordWeights(pieces, down[:-1] - down[0], across[:-1] - across[0])

    def rows(
        self, words: Int[np.ndarray, " n"]
    ) -> Iterator[tuple[int, Float[np.ndarray, " keys"]]]:
        """Each of some words of one head, and its row; NaN is masked."""
        for at, block in self._chosen(words, seen=True):
            yield from zip(words[at].tolist(), block)

    def __getitem__(self, index: Pick | tuple[Pick, ...]) -> NDArray[np.floating[Any]]:
        """Any basic index: ints, slices and ``...``; a head by its number.

        Raises:
            IndexError: out of range, or not a basic index.
            MaterializeError: the part is above the limit.
        """
        numbers = self._pieces._numbers
        *heads, rows, columns = basic_index(
            index, self.shape, 0 if self._axes else -1, numbers if self._axes else None
        )
        Wq, Wk = self.shape[-2:]
        chosen = np.arange(Wq)[rows]
        of_heads = [np.arange(n)[pick] for n, pick in zip(self._axes, heads)]
        shape = (*(n for x in (*of_heads, chosen, np.arange(Wk)[columns]) for n in x.shape),)
        require_materializable(
            "weights of words", shape, 8 * self.dtype.itemsize,
            "Ask for a part: weights.head(h)[i], or weights.pool(...)",
        )  # fmt: skip
        every = [self._head(h) for x in of_heads for h in np.atleast_1d(x)] if heads else [self]
        out = np.empty((len(every), chosen.size, np.arange(Wk)[columns].size), self.dtype)
        for into, one in zip(out, every):
            for at, block in one._chosen(chosen.reshape(-1)):
                into[at] = block[:, columns].reshape(len(block), -1)
        found: NDArray[np.floating[Any]] = out.reshape(shape)[()]
        return found

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.floating[Any]]:
        """All of them; refused above the limit that ``regard.limits`` sets."""
        if copy is False:
            raise ValueError("weights: they are computed when asked for, so an array is a copy.")
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype)

    def topk(self, k: int) -> TopKeys[NDArray[Any], NDArray[np.int64]]:
        """The k strongest words of every query: ``(values, indices)``, each ``(..., queries, k)``.

        Raises:
            TypeError: k is no int.
            ShapeError: k is larger than the number of words, or negative.
            MaterializeError: the result is above the limit.
        """
        Wk = self.shape[-1]
        check_k(k, Wk, "words")
        require_room_for_keys((*self.shape[:-1], k), self.dtype.name)

        def of_block(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            at = np.argsort(-block, -1, kind="stable")[:, :k]
            return np.take_along_axis(block, at, -1), at

        none = of_block(np.zeros((0, Wk), self.dtype))  # there may be no queries
        found = [
            [none, *(of_block(block) for _, block in one._blocks())] for one in self._matrices()
        ]
        values, indices = (
            np.array([np.concatenate([x[side] for x in head]) for head in found]).reshape(
                *self.shape[:-1], k
            )
            for side in (0, 1)
        )
        return TopKeys(values, indices.astype(np.int64))

    def strongest(self, n: int = 20) -> Links[NDArray[np.int64], NDArray[Any]]:
        """The n strongest pairs of words of each head: ``(query, key, weight)``, ``(..., n)``.

        Strongest first; −1, −1, 0.0 where no pair with a weight is left.

        Raises:
            TypeError: n is no int.
            ValueError: n is negative.
        """
        n = int_of("strongest: n", n)
        if n < 0:
            raise ValueError(f"strongest: n is {n}; it must not be negative.")
        *axes, Wq, Wk = self.shape
        n = min(n, Wq * Wk)
        query, key = np.full((2, max(1, *axes, 1) if axes else 1, n), -1, np.int64)
        weight = np.zeros(query.shape, self.dtype)
        for h, one in enumerate(self._matrices()):
            best, at = np.zeros(0, self.dtype), np.zeros(0, np.int64)
            for low, block in one._blocks():
                best = np.concatenate([best, np.nan_to_num(block).reshape(-1)])
                at = np.concatenate([at, low * Wk + np.arange(block.size)])
                order = np.lexsort((at, -best))[:n]
                best, at = best[order], at[order]
            kept = best > 0
            query[h, : kept.sum()], key[h, : kept.sum()] = np.divmod(at[kept], Wk)
            weight[h, : kept.sum()] = best[kept]
        return Links(*(x.reshape(*axes, n) for x in (query, key, weight)))

    def pool(
        self,
        size: tuple[int, int] = (512, 512),
        how: PoolHow = "max",
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Float[NDArray[Any], "*heads R C"]:
        """A heatmap in ln(weight), as ``AttentionWeights.pool`` gives it: NaN is masked.

        Args:
            size: ``(R, C)``; a side that exceeds its part becomes one bin for each word.
            how: ``"max"``, the strongest pair of words; or ``"mass"``, the mean over queries of the
                sum over keys.
            rows, columns: the part's words, by default all.

        Raises:
            TypeError: the size is no pair of ints, or parts are no slices.
            ValueError: another ``how``, or a size below 1.
        """
        if not is_pair_of_ints(size):
            raise TypeError(f"pool: size is {size!r}; a pair of ints (rows, columns) is needed.")
        if how not in ("max", "mass"):
            raise ValueError(f"pool: how is {how!r}; 'max' or 'mass' is needed.")
        if min(size) < 1:
            raise ValueError(f"pool: size is {tuple(size)}; each side must be at least 1.")
        Wq, Wk = self.shape[-2:]
        rows, columns = part_of("rows", rows, Wq), part_of("columns", columns, Wk)
        chosen = np.arange(Wq)[rows], np.arange(Wk)[columns]
        R, C = (min(n, len(x)) for n, x in zip(size, chosen))
        ends = np.arange(1, R + 1) * len(chosen[0]) // max(1, R)
        lefts = np.arange(C) * len(chosen[1]) // max(1, C)
        every = self._matrices()
        out = np.full((len(every), R, C), np.nan, self.dtype)
        counts = np.diff(ends, prepend=0)[:, None]
        for picture, one in zip(out, every) if R and C else ():
            for at, block in one._chosen(chosen[0], seen=True):
                # The bins of this block's rows, and the first row of each.
                bins, first = np.unique(np.searchsorted(ends, at, "right"), return_index=True)
                across = block[:, columns]
                seen = np.fmax.reduceat(np.fmax.reduceat(across, lefts, 1), first, 0)
                both = np.stack([picture[bins], seen])
                if how == "max":
                    picture[bins] = np.fmax.reduce(both)
                    continue
                across = np.nan_to_num(across)
                both[1] = np.add.reduceat(np.add.reduceat(across, lefts, 1), first, 0)
                hidden = np.isnan(both[0]) & np.isnan(seen)
                picture[bins] = np.where(hidden, np.nan, np.nansum(both, 0))
            if how == "mass":
                picture /= counts
        with np.errstate(divide="ignore"):
            return np.log(out).reshape(*self._axes, R, C)

    def __repr__(self) -> str:
        numbers = self._pieces._numbers
        heads = "" if numbers is None else f" of {told_heads(numbers)}"
        return (
            f"WordWeights{self.shape} {self.dtype}{heads}, computed when asked for; "
            f"whole: {bytes_text(self.nbytes)}"
        )

    @property
    def _texts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Texts of the queries and of the keys, by words."""
        origin = self._pieces._origin
        assert origin is not None  # words are those of a recording
        rows, columns = self._rows[:-1], self._columns[:-1]
        return word_texts(origin.row_tokens, rows), word_texts(origin.column_tokens, columns)

    def _repr_html_(self) -> str:
        from regard._showing.picture import words_html

        return words_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from regard.viewer._display import words_bundle

        return words_bundle(self)

    def _matrices(self) -> list[WordWeights]:
        return [self._head(h) for h in range(self._axes[0])] if self._axes else [self]

    def _head(self, place: int) -> WordWeights:
        return self.head(self.head_numbers[place])

    def _chosen(
        self, rows: Int[np.ndarray, " n"], seen: bool = False
    ) -> Iterator[tuple[Any, np.ndarray]]:
        """Places among some rows, all different, and these rows; NaN where masked if ``seen``."""
        if len(rows) > 1 and rows[-1] - rows[0] == len(rows) - 1:
            for low, block in self._blocks(int(rows[0]), int(rows[-1]) + 1, seen):
                start = low - int(rows[0])
                yield np.arange(start, start + len(block)), block
            return
        for at, row in enumerate(rows):
            for _, block in self._blocks(int(row), int(row) + 1, seen):
                yield np.array([at]), block

    def _blocks(
        self, low: int = 0, high: int | None = None, seen: bool = False
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The first row and the rows of each block, ``(rows, keys)`` in words, of one head."""
        high = len(self._rows) - 1 if high is None else high
        most = max(1, BLOCK_WEIGHTS // max(1, int(self._columns[-1])))
        while low < high:
            end = int(np.searchsorted(self._rows, self._rows[low] + most, "right")) - 1
            end = min(high, max(low + 1, end))
            yield low, self._block(low, end, seen)
            low = end

    def _block(self, low: int, high: int, seen: bool) -> np.ndarray:
        rows, columns = self._rows[low : high + 1] - self._rows[low], self._columns
        size = high - low, len(columns) - 1
        if not size[1]:
            return np.zeros(size, self.dtype)
        part = self._pieces.part(slice(int(self._rows[low]), int(self._rows[high])))
        of_row, of_column = (np.repeat(np.arange(len(x) - 1), np.diff(x)) for x in (rows, columns))
        found = to_numpy(part.blocks(of_row, of_column, "mass", size))
        if seen:
            (visible,) = sees(part._call)
            found = np.where(visible.any_in_runs(rows[:-1], columns[:-1])[0], found, np.nan)
        return found.astype(self.dtype, copy=False)
