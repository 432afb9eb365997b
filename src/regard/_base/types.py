"""Types of the public names, for type checkers and editors.

``Float[Array[X], "H L D"]`` is ``Array[X]`` to them, and says the shape to people; jaxtyping's
names of the same spelling hold it to that (tests/test_attention.py).
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Never,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)
from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Float32
from typing import Annotated as Int
from typing import Annotated as UInt16

if TYPE_CHECKING:
    import numpy as np

    NoOption: TypeAlias = Never
else:  # for those who check types while a program runs, and know no argument of that type
    NoOption = Any

__all__ = [
    "AlignHow", "Array", "ArrayT", "BackendName", "BlocksHow", "Bool", "Float", "Float32",
    "FloatingT", "IndexT", "InputT", "Int", "Integers", "Intervals", "NoOption", "OutputT",
    "PoolHow", "ReceivedHow", "Segments", "UInt16", "Window",
]  # fmt: skip

PartT_co = TypeVar("PartT_co", covariant=True)


@runtime_checkable
class Array(Protocol[PartT_co]):
    """An array of NumPy or a tensor of torch; ``PartT_co`` is what its parts are.

    That is the kind of array in which answers come, ``NDArray[np.float32]`` or ``Tensor``: of any
    shape, and not of a subclass such as ``torch.nn.Parameter``.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> object: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: slice | tuple[slice, ...], /) -> PartT_co: ...


ArrayT = TypeVar("ArrayT", bound=Array[object])
IndexT = TypeVar("IndexT", bound=Array[object])  # arrays of int64 of the same library
InputT = TypeVar("InputT", bound=Array[object])  # of a classmethod, beside the ArrayT of its class
OutputT = TypeVar("OutputT")  # ArrayT, or None without a value
FloatingT = TypeVar("FloatingT", bound="np.floating")

BackendName: TypeAlias = Literal["auto", "kernel", "torch", "fused", "triton", "reference"]
AlignHow: TypeAlias = Literal["dtw"]
PoolHow: TypeAlias = Literal["max", "mass"]
ReceivedHow: TypeAlias = Literal["sum", "mean", "max", "seen"]
BlocksHow: TypeAlias = Literal["sum", "mean", "max", "mass"]

Window: TypeAlias = tuple[int | None, int | None]
Integers: TypeAlias = SupportsIndex | Array[object] | list[int]
_Ids: TypeAlias = Array[object] | list[int]
Segments: TypeAlias = _Ids | tuple[_Ids, _Ids]
Intervals: TypeAlias = tuple[_Ids, _Ids]
