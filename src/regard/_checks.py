"""Reads a call of attention: what was passed becomes one Call, or an error that says why not."""

import math
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard._errors import ShapeError

FLOATS = ("float16", "bfloat16", "float32", "float64")
# Of a query among the keys, either way: exact in float64 and JSON, and with a window within int64.
LARGEST_POSITION = 2**53
# NumPy takes a few microseconds to tell a name.
_NUMPY_NAMES = {np.dtype(name): name for name in ("float16", "float32", "float64", "bool")}

_ARRAYS = (
    "query", "key", "value", "mask", "bias", "key_lengths", "query_segments", "key_segments",
    "query_start", "sinks", "seed",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Call:
    """One checked call. Arrays are of one library, with axes ``(B, H, L, D)``; see DESIGN names.

    ``key``, ``value``, ``mask``, ``bias`` and the segments keep leading axes of size 1 as they are:
    they broadcast.
    """

    query: Any  # (B, Hq, Lq, D)
    key: Any  # (B or 1, Hkv, Lk, D)
    value: Any  # (B or 1, Hkv, Lk, Dv), or None where only the weights are asked for
    leading: tuple[int, ...]  # the axes that B stands for
    heads: bool  # whether the caller's arrays have a head axis
    causal: bool = False
    left: int | None = None  # the window's two sides
    right: int | None = None
    mask: Any = None  # (B or 1, Hq or 1, Lq or 1, Lk or 1) bool
    bias: Any = None  # likewise, floating
    key_lengths: Any = None  # (B,) integers
    query_segments: Any = None  # (B or 1, Lq) integers
    key_segments: Any = None  # (B or 1, Lk) integers
    query_start: Any = None  # (B,) integers
    query_step: int = 1  # from a query to the place of the next
    sinks: Any = None  # (Hq,) floating
    scale: float = 1.0
    softcap: float | None = None
    dropout: float = 0.0
    seed: Any = None  # () int64, given where dropout is
    part_of: int | None = None  # of a part of a call: the ``group_rows`` of the whole
    whole_rows: bool = True  # False where the call has only some of the keys

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """``B, Hq, Hkv, Lq, Lk``."""
        B, Hq, Lq, _ = self.query.shape
        return B, Hq, self.key.shape[1], Lq, self.key.shape[2]

    @property
    def group_rows(self) -> int:
        """The queries that share a key head, of the whole call: these decide how it is computed."""
        if self.part_of is not None:
            return self.part_of
        _, Hq, Hkv, Lq, _ = self.sizes
        return Hq // Hkv * Lq if Hkv else 0

    @property
    def is_torch(self) -> bool:
        """Whether the arrays are torch tensors."""
        return not isinstance(self.query, np.ndarray)

    @property
    def tensors(self) -> list[Any]:
        """Every torch tensor of the call."""
        given = (getattr(self, name) for name in _ARRAYS)
        return [x for x in given if x is not None and is_tensor(x)]

    def restore(self, x: Any) -> Any:
        """``(B, Hq, ...)`` with the caller's own leading axes."""
        if self.heads and len(self.leading) == 1:
            return x
        tail = tuple(x.shape[1:]) if self.heads else tuple(x.shape[2:])
        return x.reshape(self.leading + tail)

    def head(self, h: int) -> "Call":
        """Query head h alone, as if it had been passed as ``(..., L, D)``."""
        alone = self.of_heads(range(len(self.query)), range(h, h + 1))
        return replace(alone, leading=self.leading, heads=False)

    def element(self, b: int) -> "Call":
        """Batch element b alone, as if it had been passed as ``(H, L, D)``."""
        heads = range(self.sizes[1])
        return replace(self.of_heads(range(b, b + 1), heads), leading=(), heads=True)

    def of_heads(self, b: range, h: range) -> "Call":
        """Some batch elements and query heads: one, or all that share some of the keys."""
        group = self.sizes[1] // max(self.sizes[2], 1)
        batch, own = slice(b.start, b.stop), slice(h.start, h.stop)
        shared = slice(h.start // group, -(-h.stop // group)) if group else slice(0, 0)
        fields: dict[str, Any] = {"query": self.query[batch, own]}
        for name in ("key", "value"):
            x = getattr(self, name)
            fields[name] = None if x is None else x[_at(x, batch), shared]
        for name in ("mask", "bias"):
            x = getattr(self, name)
            fields[name] = (
                None if x is None else x[_at(x, batch), own if x.shape[1] > 1 else slice(None)]
            )
        for name in ("key_lengths", "query_start", "query_segments", "key_segments"):
            x = getattr(self, name)
            fields[name] = None if x is None else x[_at(x, batch)]
        fields["sinks"] = None if self.sinks is None else self.sinks[own]
        return replace(self, leading=(len(b),), heads=True, part_of=self.group_rows, **fields)

    def rows(self, part: slice) -> "Call":
        """Some of the queries, with what they see; ``part`` may have a step."""
        B, _, _, Lq, Lk = self.sizes
        start, stop, step = part.indices(Lq)
        starts = self.query_start
        if starts is None:
            lengths = self.key_lengths
            starts = np.full(B, Lk - Lq, np.int64) if lengths is None else lengths - Lq
        fields: dict[str, Any] = {"query": self.query[:, :, start:stop:step]}
        for name in ("mask", "bias"):
            x = getattr(self, name)
            fields[name] = x if x is None or x.shape[2] == 1 else x[:, :, start:stop:step]
        if self.query_segments is not None:
            fields["query_segments"] = self.query_segments[:, start:stop:step]
        fields["query_start"] = starts + start * self.query_step
        step *= self.query_step
        return replace(self, query_step=step, part_of=self.group_rows, **fields)

    def columns(self, part: slice) -> "Call":
        """Some of the keys, next to each other, and who sees them; its rows are no longer whole."""
        *_, Lq, Lk = self.sizes
        start, stop, _ = part.indices(Lk)
        count = max(0, stop - start)
        part = slice(start, start + count)
        if count == Lk:
            return self
        whole = self.rows(slice(0, Lq))
        fields: dict[str, Any] = {"key": self.key[:, :, part]}
        if self.value is not None:
            fields["value"] = self.value[:, :, part]
        for name in ("mask", "bias"):
            x = getattr(self, name)
            fields[name] = x if x is None or x.shape[3] == 1 else x[..., part]
        if self.key_segments is not None:
            fields["key_segments"] = self.key_segments[:, part]
        if self.key_lengths is not None:
            fields["key_lengths"] = (self.key_lengths - start).clip(0, count)
        return replace(whole, query_start=whole.query_start - start, whole_rows=False, **fields)

    def copy(self) -> "Call":
        """The same call on arrays of its own."""
        return Call(**{name: _copied(x) for name, x in vars(self).items()})

    def without_value(self) -> "Call":
        """The same weights with nothing to apply them to."""
        return replace(self, value=None, dropout=0.0, seed=None)


def _at(x: Any, batch: slice) -> slice:
    """Some batch elements of x, which may have only one for all."""
    return batch if len(x) > 1 else slice(None)


def _copied(x: Any) -> Any:
    """An array of its own; what is broadcast stays so."""
    if not (isinstance(x, np.ndarray) or is_tensor(x)):
        return x
    strides = x.stride() if is_tensor(x) else x.strides
    cell = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    if is_tensor(x):
        return cell.clone().expand(x.shape)
    return np.broadcast_to(cell.copy(), x.shape)


def dtype_name(x: Any) -> str:
    """``float32`` for NumPy's and torch's alike."""
    if isinstance(x, np.ndarray) and (name := _NUMPY_NAMES.get(x.dtype)):
        return name
    return str(x.dtype).removeprefix("torch.")


def accumulating_name(x: Any) -> str:
    """The dtype that sums over x are held in: float64 for float64, else float32."""
    return "float64" if dtype_name(x) == "float64" else "float32"


def is_tensor(x: object) -> bool:
    """Whether x is a torch tensor; torch is not loaded to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _kind(name: str, x: object) -> str:
    """``numpy`` or ``torch``, or a TypeError."""
    if isinstance(x, np.ndarray) and not isinstance(x, (np.ma.MaskedArray, np.matrix)):
        return "numpy"
    if is_tensor(x) and x.layout == sys.modules["torch"].strided:  # type: ignore[attr-defined]
        return "torch"
    dtype = "bool" if name == "mask" else "np.float32"
    raise TypeError(
        f"attention: {name} is a {type(x).__module__}.{type(x).__qualname__}; NumPy arrays and "
        f"dense torch tensors are understood. Convert it, as in np.array({name}, dtype={dtype})."
    )


def _shapes(query: Any, key: Any, value: Any) -> str:
    """The line under an error: whose shapes were read, and how."""
    axes = ("L, D", "H, L, D", "B, H, L, D")
    read = axes[query.ndim - 2] if 2 <= query.ndim <= 4 else "..., H, L, D"
    named = (("query", query), ("key", key), ("value", value))
    text = "  ".join(f"{name} {tuple(x.shape)}" for name, x in named if x is not None)
    return f"\n  {text}  read as ({read})"


def _check_place(name: str, x: Any, query: Any) -> None:
    """One library and one device for all."""
    kind = _kind(name, x)
    if x is query:
        return
    if (own := _kind("query", query)) != kind:
        raise TypeError(
            f"attention: query is of {own} and {name} of {kind}; "
            "all must be of one library. Convert with torch.from_numpy or tensor.numpy()."
        )
    if kind == "torch" and x.device != query.device:
        raise TypeError(
            f"attention: query is on {query.device} and {name} on {x.device}; "
            f"all must be on one device. Move it with {name}.to(query.device)."
        )


def _check_floating(name: str, x: Any, more: str = "") -> None:
    if dtype_name(x) not in FLOATS:
        if not more and str(x.dtype).startswith(">"):
            more = f" Its bytes are swapped: {name}.astype({name}.dtype.newbyteorder('='))."
        raise TypeError(
            f"attention: {name} is {dtype_name(x)}; floating numbers are needed "
            f"({', '.join(FLOATS)}).{more}"
        )


def _check_arrays(query: Any, key: Any, value: Any) -> None:
    """Types, dtypes and devices of the three arrays, and every shape they must share."""
    named = [("query", query), ("key", key)] + ([] if value is None else [("value", value)])
    for name, x in named:
        _check_place(name, x, query)
        if name == "query" or x.dtype != query.dtype:
            _check_floating(name, x)
        if x.dtype != query.dtype:
            raise TypeError(
                f"attention: query is {dtype_name(query)} and {name} is {dtype_name(x)}; "
                "query, key and value must have one dtype. Convert the narrower one."
            )

    def misfit(text: str) -> ShapeError:
        return ShapeError(f"attention: {text}{_shapes(query, key, value)}")

    for name, x in named:
        if x.ndim < 2:
            raise misfit(
                f"{name} has {x.ndim} axes; at least (L, D) is needed. "
                f"A single vector is a length of one: {name}[None]."
            )
        if x.ndim != query.ndim:
            raise misfit(
                f"query has {query.ndim} axes and {name} has {x.ndim}; "
                "they must agree. Add axes of size 1 in front."
            )
    if query.shape[-1] != key.shape[-1]:
        raise misfit(
            f"query vectors have {query.shape[-1]} numbers and key vectors {key.shape[-1]}; "
            "their product needs one size D."
        )
    if query.shape[-1] == 0:
        raise misfit("the head size D is 0; at least 1 is needed.")
    if value is not None and key.shape[-2] != value.shape[-2]:
        raise misfit(
            f"{key.shape[-2]} keys and {value.shape[-2]} values; each key needs its own value."
        )
    if query.ndim == 2:
        return
    Hq, Hkv = query.shape[-3], key.shape[-3]
    if value is not None and value.shape[-3] != Hkv:
        raise misfit(f"{Hkv} key heads and {value.shape[-3]} value heads; they must be equal.")
    if Hq != Hkv and (Hkv == 0 or Hq % Hkv):
        raise misfit(
            f"{Hq} query heads cannot share {Hkv} key heads; {Hq} must be a multiple of {Hkv}."
        )
    for name, x in named[1:]:
        for n, m in zip(query.shape[:-3], x.shape[:-3]):
            if m not in (n, 1):
                raise misfit(
                    f"the leading axes of {name} {tuple(x.shape[:-3])} do not fit the query's "
                    f"{tuple(query.shape[:-3])}; each must be equal, or 1."
                )


def _expand(x: Any, shape: tuple[int, ...]) -> Any:
    return x.expand(shape) if is_tensor(x) else np.broadcast_to(x, shape)


def _fold(x: Any, leading: tuple[int, ...], axes: int) -> Any:
    """The leading axes of x as one: of size 1 if all of them are, else of their product.

    ``axes`` counts those that follow and are kept.
    """
    if x.ndim == axes + 1 and x.shape[0] in (1, math.prod(leading)):
        return x
    tail = tuple(x.shape[x.ndim - axes :])
    own = tuple(x.shape[: x.ndim - axes])
    if all(n == 1 for n in own):
        return x.reshape((1, *tail))
    return _expand(x, leading + tail).reshape((math.prod(leading), *tail))


def _read_broadcast(name: str, x: Any, query: Any, key: Any, leading: tuple[int, ...]) -> Any:
    """mask or bias as ``(B or 1, Hq or 1, Lq or 1, Lk or 1)``."""
    _check_place(name, x, query)
    if name == "bias":
        _check_floating(name, x, " A bool that says who may attend is passed as mask=.")
    elif dtype_name(x) != "bool":
        raise TypeError(
            f"attention: mask is {dtype_name(x)}; a mask is bool, True where a query may attend. "
            "Numbers that are added to the scores are passed as bias=; "
            "ones and zeros become a mask with mask != 0."
        )
    full = (*query.shape[:-1], key.shape[-2])
    fits = x.ndim <= len(full) and all(
        m in (n, 1) for n, m in zip(reversed(full), reversed(x.shape))
    )
    if not fits:
        raise ShapeError(
            f"attention: {name} {tuple(x.shape)} cannot be broadcast to {tuple(full)}, the "
            f"weights' shape (..., Hq, Lq, Lk).{_shapes(query, key, None)}"
        )
    x = x.reshape((1,) * (len(full) - x.ndim) + tuple(x.shape))
    if query.ndim == 2:
        return x[None, None]
    return _fold(x, leading, 3)


def _read_integers(name: str, x: Any, query: Any, leading: tuple[int, ...], tail: Any = ()) -> Any:
    """An int or an array of ints as ``(B, *tail)``, or ``(1, *tail)`` where it has a tail."""
    if isinstance(x, numbers.Integral) and not -(2**63) <= int(x) < 2**63:
        raise ValueError(f"attention: {name} is {x}; it must fit into 64 bits with a sign.")
    if is_tensor(query):
        torch = sys.modules["torch"]
        x = torch.as_tensor(x, device=query.device)
        integral = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    else:
        if is_tensor(x):
            x = x.numpy()
        x = np.asarray(x)
        integral = x.dtype.kind in "iu"
    if not integral:
        raise TypeError(f"attention: {name} is {dtype_name(x)}; integers are needed.")
    if dtype_name(x) == "uint64":
        way_out = "to(torch.int64)" if is_tensor(x) else "astype(np.int64)"
        raise TypeError(
            f"attention: {name} is uint64; integers with a sign are needed, as in {name}.{way_out}."
        )
    full = leading + tail
    if not leading and x.ndim == len(tail) + 1 and x.shape[0] == 1:
        x = x[0]  # one sequence without a batch axis may be told as a batch of one
    fits = x.ndim <= len(full) and all(
        m in (n, 1) for n, m in zip(reversed(full), reversed(x.shape))
    )
    if not fits or (tail and (x.ndim == 0 or x.shape[-1] != tail[-1])):
        raise ShapeError(
            f"attention: {name} has shape {tuple(x.shape)}; "
            f"{tuple(full)} is needed{', or one int' if not tail else ''}."
            + ("" if leading else " The arrays have no batch axis in front of (H, L, D).")
        )
    if not tail:
        x = x.long() if is_tensor(x) else x.astype(np.int64, copy=False)
        return _expand(x, leading).reshape((math.prod(leading),))
    return _fold(x.reshape((1,) * (len(full) - x.ndim) + tuple(x.shape)), leading, 1)


def _read_segments(segments: Any, query: Any, key: Any, leading: tuple[int, ...]) -> Any:
    Lq, Lk = query.shape[-2], key.shape[-2]
    if isinstance(segments, tuple):
        if len(segments) != 2:
            raise ShapeError(
                f"attention: segments is a tuple of {len(segments)}; "
                "a pair is needed: ids of the queries, ids of the keys."
            )
        of_queries, of_keys = segments
    elif Lq != Lk:
        raise ShapeError(
            f"attention: segments is one array, but there are {Lq} queries and {Lk} keys. "
            "Pass a pair: segments=(ids of the queries, ids of the keys)."
        )
    else:
        of_queries = of_keys = segments
    return (
        _read_integers("segments", of_queries, query, leading, (Lq,)),
        _read_integers("segments", of_keys, query, leading, (Lk,)),
    )


def _read_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2 or not all(
        w is None or (isinstance(w, numbers.Integral) and not isinstance(w, bool)) for w in sides
    ):
        raise TypeError(
            f"attention: window is {window!r}; a pair (left, right) of ints is needed, None for "
            "an open side. The last 256 keys, the query's own included, are window=(255, 0)."
        )
    if any(w is not None and w < 0 for w in sides):
        raise ValueError(f"attention: window is {window!r}; its sides must not be negative.")
    # A side that reaches past every position is open.
    left, right = (None if w is None or w >= 2 * LARGEST_POSITION else int(w) for w in sides)
    return left, right


def _read_number(name: str, x: Any, valid: Callable[[float], bool], needed: str) -> float:
    if not isinstance(x, numbers.Real) or isinstance(x, bool):
        raise TypeError(f"attention: {name} is a {type(x).__name__}; a number is needed.")
    number = float(x)
    if not valid(number):
        raise ValueError(f"attention: {name} is {x}; it must be {needed}.")
    return number


def _read_sinks(sinks: Any, query: Any) -> Any:
    heads = query.shape[-3] if query.ndim > 2 else 1
    _check_place("sinks", sinks, query)
    _check_floating("sinks", sinks)
    if tuple(sinks.shape) != (heads,) and not (query.ndim == 2 and sinks.ndim == 0):
        raise ShapeError(
            f"attention: sinks has shape {tuple(sinks.shape)}; one logit per query head is "
            f"needed: ({heads},)."
        )
    return sinks.reshape((heads,))


def _read_seed(seed: Any, query: Any) -> Any:
    """The seed of the dropout as a () int64 of the query's library; a fresh one where none is."""
    if seed is not None and not (isinstance(seed, numbers.Integral) or is_tensor(seed)):
        raise TypeError(f"attention: seed is a {type(seed).__name__}; an int is needed.")
    if isinstance(seed, numbers.Integral) and not -(2**63) <= int(seed) < 2**63:
        raise ValueError(f"attention: seed is {seed}; it must fit into 64 bits with a sign.")
    if is_tensor(query):
        torch = sys.modules["torch"]
        if seed is None:  # from torch's generator, so that torch.manual_seed governs it
            return torch.randint(2**62, (), device=query.device)
        return torch.as_tensor(seed, dtype=torch.int64, device=query.device)
    if seed is None:
        return np.random.default_rng().integers(2**62, dtype=np.int64)
    return np.int64(seed)


def read_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: Any = False,
    window: Any = None,
    mask: Any = None,
    bias: Any = None,
    key_lengths: Any = None,
    segments: Any = None,
    query_start: Any = None,
    sinks: Any = None,
    scale: Any = None,
    softcap: Any = None,
    dropout: Any = 0.0,
    seed: Any = None,
) -> Call:
    """Checks every argument and gives them back in one form.

    Only shapes, types and plain numbers are looked at, so it can be traced; what needs the contents
    of an array is for ``check_contents``.
    """
    _check_arrays(query, key, value)
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"attention: causal is {causal!r}; True or False is needed.")
    leading = tuple(query.shape[:-3])
    left, right = _read_window(window)
    options: dict[str, Any] = {}
    if mask is not None:
        options["mask"] = _read_broadcast("mask", mask, query, key, leading)
    if bias is not None:
        options["bias"] = _read_broadcast("bias", bias, query, key, leading)
    if key_lengths is not None:
        options["key_lengths"] = _read_integers("key_lengths", key_lengths, query, leading)
    if query_start is not None:
        options["query_start"] = _read_integers("query_start", query_start, query, leading)
    if segments is not None:
        of_queries, of_keys = _read_segments(segments, query, key, leading)
        options |= {"query_segments": of_queries, "key_segments": of_keys}
    if sinks is not None:
        options["sinks"] = _read_sinks(sinks, query)
    if softcap is not None:
        softcap = _read_number(
            "softcap", softcap, lambda x: 0 < x < math.inf, "positive and finite"
        )
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    else:
        scale = _read_number("scale", scale, math.isfinite, "finite")
    dropout = _read_number("dropout", dropout, lambda x: 0 <= x < 1, "at least 0 and less than 1")
    if dropout:
        options["seed"] = _read_seed(seed, query)
    if query.ndim == 2:
        query, key, value = (x if x is None else x[None, None] for x in (query, key, value))
        heads = False
    else:
        query, key, value = (x if x is None else _fold(x, leading, 3) for x in (query, key, value))
        heads = True
    B = math.prod(leading)
    if query.shape[0] != B:
        query = _expand(query, (B, *query.shape[1:]))
    return Call(
        query, key, value, leading, heads, bool(causal), left, right,
        scale=scale, softcap=softcap, dropout=dropout, **options,
    )  # fmt: skip


def check_contents(call: Call) -> None:
    """What only the numbers in an array can tell: key lengths past the keys, queries far off them.

    Raises:
        ShapeError: key lengths exceed the keys.
        ValueError: the place of a query exceeds ``LARGEST_POSITION``.
    """
    if call.key_lengths is not None and len(call.key_lengths):
        low, high, Lk = int(call.key_lengths.min()), int(call.key_lengths.max()), call.key.shape[2]
        if low < 0 or high > Lk:
            raise ShapeError(
                f"attention: key_lengths are from {low} to {high}; "
                f"each must be between 0 and the number of keys, {Lk}."
            )
    if call.query_start is not None and len(call.query_start) and call.part_of is None:
        low, high = int(call.query_start.min()), int(call.query_start.max())
        if low < -LARGEST_POSITION or high > LARGEST_POSITION:
            raise ValueError(
                f"attention: query_start is {low if low < -LARGEST_POSITION else high}; "
                "the place of a query must be between -2**53 and 2**53."
            )
