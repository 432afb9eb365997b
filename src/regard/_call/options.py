"""The options of attention, each declared once, for reading, computing, recording and showing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from regard._base.types import Array, Integers, Intervals, Segments, Window
from regard._call.edits import Edit


class Field(NamedTuple):
    """One field of a ``Call``, as torch's operators take it."""

    name: str
    type: str  # in torch's schemas
    # The axes of an array, a letter each: Batch, Heads of the query, Groups of them that share a
    # key head, Queries, Keys, Dimensions. In lower case: may be 1, and is broadcast.
    axes: str = ""


class Option(NamedTuple):
    """One option of ``regard.attention``."""

    name: str
    kind: str  # how it is read: of ``regard._call.checks.READERS``
    fields: tuple[Field, ...]
    recorded: str | None = None  # in a recording's file: a "number" of its header, or an "array"
    of_weights: bool = True  # False where it changes the output alone
    default: float | None = None
    of_part: bool = False  # whether it says which tokens of a whole these are


INPUTS = (
    Field("query", "Tensor", "BHQD"),
    Field("key", "Tensor", "bGKD"),
    Field("value", "Tensor", "bGKD"),
)
OPTIONS = (
    Option("causal", "flag", (Field("causal", "bool"),), "number", default=False),
    Option(
        "window", "window", (Field("window_left", "int?"), Field("window_right", "int?")), "number"
    ),
    Option("mask", "pairs", (Field("mask", "Tensor?", "bhqk"),), "array"),
    Option("bias", "pairs", (Field("bias", "Tensor?", "bhqk"),), "array"),
    Option("key_lengths", "place", (Field("key_lengths", "Tensor?", "B"),), "number"),
    Option(
        "segments", "segments",
        (Field("query_segments", "Tensor?", "bQ"), Field("key_segments", "Tensor?", "bK")), "array",
    ),
    Option(
        "intervals", "intervals",
        (Field("interval_first", "Tensor?", "bQ"), Field("interval_last", "Tensor?", "bQ")),
        "array",
    ),
    Option("query_start", "place", (Field("query_start", "Tensor?", "B"),), "number"),
    Option("query_step", "step", (Field("query_step", "int"),), default=1, of_part=True),
    Option("key_start", "position", (Field("key_start", "int?"),), of_part=True),
    Option("key_step", "step", (Field("key_step", "int"),), default=1, of_part=True),
    Option("sinks", "sinks", (Field("sinks", "Tensor?", "H"),), "array"),
    Option(
        "edits", "edits", (Field("edit_ranges", "Tensor?"), Field("edit_factors", "Tensor?")),
        "number",
    ),
    Option("scale", "finite", (Field("scale", "float"),), "number"),
    Option("softcap", "positive", (Field("softcap", "float?"),), "number"),
    Option("dropout", "probability", (Field("dropout", "float"),), of_weights=False, default=0.0),
    Option("seed", "seed", (Field("seed", "Tensor?"),), of_weights=False),
    Option("output_dtype", "dtype", (Field("output_dtype", "str?"),), of_weights=False),
)  # fmt: skip


class WeightsOptions(TypedDict, total=False):
    """The options of ``regard.attention`` that the weights follow from."""

    causal: bool
    window: Window | None
    mask: Array[object] | None
    bias: Array[object] | None
    key_lengths: Integers | None
    segments: Segments | None
    intervals: Intervals | None
    query_start: Integers | None
    query_step: int
    key_start: int | None
    key_step: int
    sinks: Array[object] | None
    edits: Sequence[Edit] | None
    scale: float | None
    softcap: float | None


class Options(WeightsOptions, total=False):
    """Those that the output follows from."""

    dropout: float
    seed: int | None
    output_dtype: object


@dataclass(frozen=True, eq=False, kw_only=True)
class Given:
    """The options' fields of a call, and what they are where nothing is given."""

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    mask: Any = None  # (B or 1, Hq or 1, Lq or 1, Lk or 1) bool
    bias: Any = None  # likewise, floating
    key_lengths: Any = None  # (B,) integers
    query_segments: Any = None  # (B or 1, Lq) integers
    key_segments: Any = None  # (B or 1, Lk) integers
    interval_first: Any = None  # (B or 1, Lq) int64
    interval_last: Any = None  # likewise: the key after the last
    query_start: Any = None  # (B,) integers, counted from the first key
    query_step: int = 1  # from a query's position to the next
    key_start: int | None = None  # the position of the first key, of a part of a whole
    key_step: int = 1  # from a key's position to the next
    sinks: Any = None  # (Hq,) floating
    edit_ranges: Any = (
        None  # (n, 6) int64: half-open intervals of heads, queries and keys; in torch
    )
    edit_factors: Any = None  # (n,) float64; both are on the CPU
    scale: float = 1.0
    softcap: float | None = None
    dropout: float = 0.0
    seed: Any = None  # () int64, given where dropout is
    output_dtype: str | None = None  # by default the query's


FIELDS = (*INPUTS, *(field for option in OPTIONS for field in option.fields))
ARRAYS = tuple(field for field in FIELDS if field.type.startswith("Tensor"))
NUMBERS = tuple(field for field in FIELDS if not field.type.startswith("Tensor"))
# Those that say which weights there are, with the names of their fields.
RECORDED = tuple(
    (option, frozenset(field.name for field in option.fields))
    for option in OPTIONS
    if option.recorded
)
# The options of the heads of one text, by their form in its file.
RECORDED_NUMBERS = tuple(option.name for option in OPTIONS if option.recorded == "number")
RECORDED_ARRAYS = tuple(option.name for option in OPTIONS if option.recorded == "array")
# Those that are two arrays, each under its field's name in a file.
RECORDED_PAIRS = {
    option.name: tuple(field.name for field in option.fields)
    for option in OPTIONS
    if option.recorded == "array" and len(option.fields) == 2
}
OPTION_OF = {field.name: option.name for option in OPTIONS for field in option.fields}
OF_PART = tuple(option.name for option in OPTIONS if option.of_part)
REAL_NUMBERS = tuple(option.name for option in OPTIONS if option.kind in ("finite", "positive"))
