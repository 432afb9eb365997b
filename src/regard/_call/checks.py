"""Reads a call of attention: arguments become one Call, or an error that says why not."""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from regard._base import loaded
from regard._base.arrays import accumulating_name, dtype_name, is_array, is_tensor, read_array
from regard._base.compiling import is_traced
from regard._base.errors import ShapeError, UnsupportedError, a_type
from regard._base.settings import as_float, counted
from regard._call import edits as rectangles
from regard._call.call import Call, placed
from regard._call.options import OF_PART, OPTIONS
from regard._call.tensors import refuse_causal_bias, require_dense

FLOATS = ("float16", "bfloat16", "float32", "float64")
# Largest position of a query, either way: exact in float64 and JSON; with a window, within int64.
LARGEST_POSITION = 2**53
LARGEST_STEP = 2**31
# Scores that are capped at less are all alike as well, and a number that is 0 in float32 would
# make NaN of a score of 0.
SMALLEST_POSITIVE = 1e-30
_OPTIONS = {option.name: option for option in OPTIONS}
_DEFAULTS = {option.name: option.default for option in OPTIONS}


class Given(NamedTuple):
    """The shapes and kinds that options are checked against."""

    query: Any
    key: Any
    leading: tuple[int, ...]
    is_part: bool = False  # whether the options count the tokens of a whole


def kind_of(name: str, x: object) -> str:
    """``numpy`` or ``torch``; everything else is refused."""
    if is_array(x):
        return "numpy"
    if is_tensor(x):
        require_dense(name, x)
        if type(x) is not loaded.torch.Tensor:
            refuse_causal_bias(name, x)
            if hasattr(x, "device_mesh"):
                raise _sharded(name, x)
        return "torch"
    dtype = "bool" if name == "mask" else "np.float32"
    raise TypeError(
        f"attention: {name} is {a_type(x, whole=True)}; NumPy arrays and "
        f"dense torch tensors are understood. Convert it, as in np.array({name}, dtype={dtype})."
    )


def _sharded(name: str, x: Any) -> UnsupportedError:
    """The error of a DTensor, of which this process has a part."""
    return UnsupportedError(
        f"attention: {name} is a DTensor of {tuple(map(str, x.placements))}; plain tensors are"
        f" needed. Where batch or heads are sharded: attention of {name}.to_local() and the like,"
        " with the options of those heads, is this process's part of the output. Where tokens are:"
        " regard.distributed.attention, of the tokens that its layout gives to this process."
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
    kind = kind_of(name, x)
    if x is query:
        return
    if (own := kind_of("query", query)) != kind:
        raise TypeError(
            f"attention: query is of {own} and {name} of {kind}; "
            "all must be of one library. Convert with torch.from_numpy or tensor.numpy()."
        )
    if kind == "torch" and x.device != query.device:
        raise TypeError(
            f"attention: query is on {query.device} and {name} on {x.device}; "
            f"all must be on one device. Move it with {name}.to(query.device)."
        )


def _check_floating(name: str, x: Any, of_bool: str = "") -> None:
    """Raises a TypeError where x is not floating; ``of_bool``: another way out for bools."""
    if dtype_name(x) not in FLOATS:
        more = of_bool if dtype_name(x) == "bool" else ""
        if not more and dtype_name(x).startswith(("int", "uint", "bool")):
            more = (
                f" Convert it, as in {name}.{'float()' if is_tensor(x) else 'astype(np.float32)'}."
            )
        if str(x.dtype).startswith(">f"):
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
                f"{name} has {counted(x.ndim, 'axis', 'axes')}; at least (L, D) is needed. "
                f"A single vector is a length of one: {name}[None]."
            )
        if x.ndim != query.ndim:
            raise misfit(
                f"query has {counted(query.ndim, 'axis', 'axes')} and {name} has {x.ndim}; "
                "they must agree. Add axes of size 1 in front."
            )
    if query.shape[-1] != key.shape[-1]:
        raise misfit(
            f"query vectors have {counted(query.shape[-1], 'number')} and key vectors"
            f" {key.shape[-1]}; their product needs one size D."
        )
    if query.shape[-1] == 0:
        raise misfit("the head size D is 0; at least 1 is needed.")
    if value is not None and key.shape[-2] != value.shape[-2]:
        raise misfit(
            f"{counted(key.shape[-2], 'key')} and {counted(value.shape[-2], 'value')}; each key"
            " needs its own value."
        )
    if query.ndim == 2:
        return
    Hq, Hkv = query.shape[-3], key.shape[-3]
    if value is not None and value.shape[-3] != Hkv:
        raise misfit(
            f"{counted(Hkv, 'key head')} and {counted(value.shape[-3], 'value head')}; they must be"
            " equal."
        )
    if Hq != Hkv and (Hkv == 0 or Hq % Hkv):
        raise misfit(
            f"{counted(Hq, 'query head')} cannot share {counted(Hkv, 'key head')}; {Hq} must be a"
            f" multiple of {Hkv}."
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


def _read_pairs(name: str, x: Any, given: Given) -> Any:
    """mask or bias as ``(B or 1, Hq or 1, Lq or 1, Lk or 1)``."""
    query, key, leading, _ = given
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
    if not _fits(x.shape, full):
        raise ShapeError(
            f"attention: {name} {tuple(x.shape)} cannot be broadcast to {tuple(full)}, the "
            f"weights' shape (..., Hq, Lq, Lk).{_of_each(name, x.shape, full)}"
            f"{_shapes(query, key, None)}"
        )
    x = x.reshape((1,) * (len(full) - x.ndim) + tuple(x.shape))
    if query.ndim == 2:
        return x[None, None]
    return _fold(x, leading, 3)


def _fits(shape: Any, full: Any) -> bool:
    """Whether an array of a shape can be broadcast to a full one."""
    return len(shape) <= len(full) and all(
        m in (n, 1) for n, m in zip(reversed(full), reversed(shape))
    )


def _of_each(name: str, shape: Any, full: Any) -> str:
    """The way out where the first axis of a mask or bias is that of the batch, and others lack."""
    missing = len(full) - len(shape)
    if missing < 1 or not _fits((*shape[:1], *(1,) * missing, *shape[1:]), full):
        return ""
    return f" For each element of the batch it is {name}[:{', None' * missing}]."


def _read_integers(name: str, x: Any, given: Given, tail: Any = ()) -> Any:
    """An int or an array of ints as ``(B, *tail)``, or ``(1, *tail)`` where it has a tail."""
    query, _, leading, _ = given
    if isinstance(x, numbers.Integral) and not -(2**63) <= int(x) < 2**63:
        raise ValueError(f"attention: {name} is {x}; it must fit into 64 bits with a sign.")
    x = _integers(name, x, is_tensor(query))
    if tail and is_tensor(x):  # those of each batch element stay on the CPU: the host reads them
        x = x.to(query.device)
    if dtype_name(x) == "uint64":
        way_out = "to(torch.int64)" if is_tensor(x) else "astype(np.int64)"
        raise TypeError(
            f"attention: {name} is uint64; integers with a sign are needed, as in {name}.{way_out}."
        )
    full = leading + tail
    if not leading and x.ndim == len(tail) + 1 and x.shape[0] == 1:
        x = x[0]  # one sequence without a batch axis may be given as a batch of one
    if not _fits(x.shape, full) or (tail and (x.ndim == 0 or x.shape[-1] != tail[-1])):
        raise ShapeError(
            f"attention: {name} has shape {tuple(x.shape)}; "
            f"{tuple(full)} is needed{', or one int' if not tail else ''}."
            + ("" if leading else " The arrays have no batch axis in front of (H, L, D).")
        )
    if not tail:
        x = x.long() if is_tensor(x) else x.astype(np.int64, copy=False)
        return _expand(x, leading).reshape((math.prod(leading),))
    return _fold(x.reshape((1,) * (len(full) - x.ndim) + tuple(x.shape)), leading, 1)


def _integers(name: str, x: Any, is_torch: bool) -> Any:
    """Integers of one library, in any form that holds them."""
    torch = loaded.torch
    if is_tensor(x):
        require_dense(name, x)
        x = x if is_torch else x.numpy()
    elif is_torch and is_traced():
        x = torch.as_tensor(x, device="cpu")
    else:
        x = read_array(f"attention: {name}", x)
    if is_tensor(x):
        integral = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    else:
        integral = x.dtype.kind in "iu"
    if not integral:
        raise TypeError(f"attention: {name} is {dtype_name(x)}; integers are needed.")
    if not is_torch or is_tensor(x):
        return x
    # Copied, for torch takes no negative strides, no swapped bytes and nothing that is read-only.
    return torch.from_numpy(np.array(x, x.dtype.newbyteorder("="), order="C"))


def _read_segments(name: str, segments: Any, given: Given) -> tuple[Any, Any]:
    Lq, Lk = given.query.shape[-2], given.key.shape[-2]
    if isinstance(segments, tuple):
        if len(segments) != 2:
            raise ShapeError(
                f"attention: segments is a tuple of {len(segments)}; "
                "a pair is needed: ids of the queries, ids of the keys."
            )
        of_queries, of_keys = segments
    elif Lq != Lk:
        raise ShapeError(
            f"attention: segments is one array, but there are {counted(Lq, 'query', 'queries')} and"
            f" {counted(Lk, 'key')}. "
            "Pass a pair: segments=(ids of the queries, ids of the keys)."
        )
    else:
        of_both = _read_integers(name, segments, given, (Lq,))
        return of_both, of_both
    pair = (
        _read_integers(name, of_queries, given, (Lq,)),
        _read_integers(name, of_keys, given, (Lk,)),
    )
    if is_tensor(pair[0]) and pair[0].dtype != pair[1].dtype:  # torch compares not any two
        return pair[0].long(), pair[1].long()
    return pair


def _read_intervals(name: str, intervals: Any, given: Given) -> tuple[Any, Any]:
    if not isinstance(intervals, (tuple, list)) or len(intervals) != 2:
        found = a_type(intervals)
        found += f" of {len(intervals)}" if isinstance(intervals, (tuple, list)) else ""
        raise TypeError(
            f"attention: intervals is {found}; a pair is needed: the first key that each query "
            "sees, and the one after its last, as in intervals=(first, last)."
        )
    Lq = given.query.shape[-2]
    first, last = (_read_integers(name, x, given, (Lq,)) for x in intervals)
    if is_tensor(first):
        return first.long(), last.long()
    return first.astype(np.int64, copy=False), last.astype(np.int64, copy=False)


def _read_edits(name: str, edits: Any, given: Given) -> tuple[Any, Any]:
    query = given.query
    heads = query.shape[-3] if query.ndim > 2 else 1
    Lq, Lk = query.shape[-2], given.key.shape[-2]
    if is_tensor(Lq) or is_tensor(Lk):  # as torch.jit.trace has them
        heads, Lq, Lk = int(heads), int(Lq), int(Lk)
    if given.is_part:
        rectangles.refuse_from_the_end(edits)
        Lq = Lk = rectangles.OPEN
    ranges, factors = rectangles.read(edits, heads, Lq, Lk)
    if not ranges:
        return None, None
    if is_tensor(query):  # on the CPU, wherever the query is: they are read as numbers
        torch = loaded.torch
        return (
            torch.tensor(ranges, dtype=torch.int64, device="cpu"),
            torch.tensor(factors, dtype=torch.float64, device="cpu"),
        )
    return np.array(ranges, np.int64), np.array(factors)


def _read_window(name: str, window: Any, given: Given) -> tuple[int | None, int | None]:
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
        raise TypeError(f"attention: {name} is {a_type(x)}; a number is needed.")
    number = as_float(x)
    if not valid(number):
        raise ValueError(f"attention: {name} is {number}; it must be {needed}.")
    return number


def _read_integer(name: str, x: Any, low: int, high: int, told: str) -> int:
    if not isinstance(x, numbers.Integral) or isinstance(x, bool):
        raise TypeError(f"attention: {name} is {a_type(x)}; an int is needed.")
    if not low <= int(x) <= high:
        raise ValueError(f"attention: {name} is {x}; it must be {told}.")
    return int(x)


def _read_step(name: str, x: Any) -> int:
    return _read_integer(name, x, 1, LARGEST_STEP, "from 1 to 2**31")


def _read_position(name: str, x: Any) -> int:
    return _read_integer(name, x, -LARGEST_POSITION, LARGEST_POSITION, "between -2**53 and 2**53")


def _read_dtype(name: str, x: Any, given: Given) -> str | None:
    """The name of the dtype of the output; None for the query's."""
    own, wide = dtype_name(given.query), accumulating_name(given.query)
    try:
        if is_array(x) or is_tensor(x) or isinstance(x, np.generic):
            raise TypeError  # NumPy would take them for their dtype
        asked = str(x if isinstance(x, str) or is_torch_dtype(x) else np.dtype(x))
    except TypeError:
        raise TypeError(
            f"attention: {name} is {x!r}; a dtype is needed, as in {name}={wide!r}."
        ) from None
    asked = asked.removeprefix("torch.")
    if asked not in (own, wide):
        needed = own if own == wide else f"{own}, or {wide}, in which it is summed"
        raise ValueError(f"attention: {name} is {asked}; of a query of {own} it can be {needed}.")
    return None if asked == own else asked


def is_torch_dtype(x: Any) -> bool:
    """Whether x is a dtype of torch."""
    torch = loaded.torch
    return torch is not None and isinstance(x, torch.dtype)


def _read_positive(name: str, x: Any) -> float:
    number = _read_number(name, x, lambda n: 0 < n < math.inf, "positive and finite")
    return max(number, SMALLEST_POSITIVE)


def _read_sinks(name: str, sinks: Any, given: Given) -> Any:
    query = given.query
    heads = query.shape[-3] if query.ndim > 2 else 1
    _check_place("sinks", sinks, query)
    _check_floating("sinks", sinks)
    if tuple(sinks.shape) != (heads,) and not (query.ndim == 2 and sinks.ndim == 0):
        raise ShapeError(
            f"attention: sinks has shape {tuple(sinks.shape)}; one logit per query head is "
            f"needed: ({heads},)."
        )
    return sinks.reshape((heads,))


def _check_seed(seed: Any) -> None:
    if is_tensor(seed):
        is_int = not (seed.ndim or seed.is_floating_point() or seed.is_complex())
        if not is_int or dtype_name(seed) == "bool":
            raise TypeError(
                f"attention: seed is a tensor {tuple(seed.shape)} of {dtype_name(seed)}; an int, or"
                " a tensor () of ints, is needed."
            )
    elif not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise TypeError(f"attention: seed is {a_type(seed)}; an int is needed.")
    elif not -(2**63) <= int(seed) < 2**63:
        raise ValueError(f"attention: seed is {seed}; it must fit into 64 bits with a sign.")


def _read_seed(seed: Any, query: Any) -> Any:
    """The seed of the dropout as a () int64 of the query's library; a fresh one where none is."""
    if is_tensor(query):
        torch = loaded.torch
        if seed is None:  # from torch's generator, so that torch.manual_seed governs it
            return torch.randint(2**62, (), device=query.device)
        return torch.as_tensor(seed, dtype=torch.int64, device=None if is_tensor(seed) else "cpu")
    if seed is None:
        return np.random.default_rng().integers(2**62, dtype=np.int64)
    return np.int64(seed)


def read_flag(name: str, x: Any, function: str = "attention") -> bool:
    """A bool, also one of NumPy."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{function}: {name} is {x!r}; True or False is needed.")
    return bool(x)


# By the kind of an option: a function of its name, value and the arrays, to its field or fields.
READERS: dict[str, Callable[[str, Any, Given], Any]] = {
    "flag": lambda name, x, _: read_flag(name, x),
    "window": _read_window,
    "pairs": _read_pairs,
    "place": _read_integers,
    "position": lambda name, x, _: _read_position(name, x),
    "step": lambda name, x, _: _read_step(name, x),
    "dtype": _read_dtype,
    "segments": _read_segments,
    "intervals": _read_intervals,
    "sinks": _read_sinks,
    "edits": _read_edits,
    "finite": lambda name, x, _: (
        _read_number(  # by comparison: torch.compile may have it as a symbol
            name, x, lambda n: -math.inf < n < math.inf, "finite"
        )
    ),
    "positive": lambda name, x, _: _read_positive(name, x),
    "probability": lambda name, x, _: _read_number(
        name, x, lambda n: 0 <= n < 1, "at least 0 and less than 1"
    ),
}


def given(**options: Any) -> dict[str, Any]:
    """The options that differ from their defaults."""
    found = {}
    for name, x in options.items():
        default = _DEFAULTS[name]
        if x is not default and not (
            (type(x) in (int, float) and type(x) is type(default) and x == default)
            or (isinstance(x, np.integer) and type(default) is int and x == default)
        ):
            found[name] = x
    return found


def read_call(query: Any, key: Any, value: Any, *, seed: Any = None, **options: Any) -> Call:
    """Checks every argument and gives them back in one form.

    Only shapes, types and plain numbers are looked at, so it can be traced; what needs the contents
    of an array is for ``contents.check_contents``.
    """
    _check_arrays(query, key, value)
    leading = tuple(query.shape[:-3])
    is_part = any(name in options for name in OF_PART) and bool(
        given(**{name: options[name] for name in OF_PART if name in options})
    )
    arrays = Given(query, key, leading, is_part)
    fields: dict[str, Any] = {"scale": 1.0 / math.sqrt(query.shape[-1])}
    for name, x in given(**options).items():
        option = _OPTIONS[name]
        found = READERS[option.kind](name, x, arrays)
        if len(option.fields) == 1:
            fields[name] = found
        else:
            fields.update(zip((field.name for field in option.fields), found))
    if seed is not None:
        _check_seed(seed)
    if fields.get("dropout"):
        fields["seed"] = _read_seed(seed, query)
    if is_part:
        fields |= _read_part(options.get("query_start"), arrays, fields)
    if query.ndim == 2:
        query, key, value = (x if x is None else x[None, None] for x in (query, key, value))
        heads = False
    else:
        query, key, value = (x if x is None else _fold(x, leading, 3) for x in (query, key, value))
        heads = True
    B = math.prod(leading)
    if query.shape[0] != B:
        query = _expand(query, (B, *query.shape[1:]))
    return Call.of(query=query, key=key, value=value, leading=leading, heads=heads, **fields)


def _read_part(query_start: Any, given: Given, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a call on a part of a whole that its positions change."""
    if not isinstance(query_start, numbers.Integral):
        found = "missing" if query_start is None else a_type(query_start)
        raise TypeError(
            f"attention: query_start is {found}; with key_start, query_step or key_step it is"
            " needed as an int: the position of the first query in the whole."
        )
    starts = _read_position("query_start", query_start), fields.get("key_start", 0)
    steps = fields.get("query_step", 1), fields.get("key_step", 1)
    if fields.get("dropout") and min(starts) < 0:
        name = "query_start" if starts[0] < 0 else "key_start"
        raise ValueError(
            f"attention: {name} is {min(starts)}; with dropout, which is drawn by positions, it"
            " must not be negative."
        )
    sizes = given.query.shape[-2], given.key.shape[-2]
    return placed(sizes, *starts, steps, fields)
