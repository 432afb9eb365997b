"""Triton's interpreter, in a fraction of its time and with the same bits.

It puts its own functions in the place of ``triton.language``'s anew in every call of every function
of a kernel, and for each operation makes tables and types anew, checks that shapes are powers of 2
and computes every sum and product of integers twice, to see whether it overflows. Here the first is
done once in a process, which then interprets kernels and compiles none, types of one shape are made
once, and a signed integer that overflows is an error.
"""

import contextlib
import functools
import sys
import types
from unittest import mock

import numpy as np
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


class _Nothing:
    """What there is to restore after a kernel."""

    def restore(self):
        pass


def _patched_by():
    """Of its globals the interpreter learns which modules a kernel sees."""
    return language, core


@functools.cache
def hasten():
    """Once in a process; see above."""
    interpreter._patch_attr = _put_in_place
    interpreter._patch_lang(_patched_by)
    interpreter._patch_lang = lambda fn: _Nothing()
    own, known = interpreter._get_np_dtype, {}

    def of(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = own(dtype)
        return known[name]

    interpreter._get_np_dtype = of
    _make_types_once()
    _unwrap_at_once()
    _take_operands_at_once()
    _compute_at_once()
    _read_parameters_once()


def _put_in_place(place, name, member, builder, scope):
    """A function of the language, by the interpreter's semantics, without a call between."""
    function, by = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*arguments, _semantic=None, **options):
        return function(*arguments, **options, _semantic=by)

    scope.set_attr(place, name, call)


_blocks: dict = {}  # types of blocks, by the name of what they hold and their sizes
_shapes: dict = {}  # how many elements a tensor has and its shape, by its sizes
_sizes: dict = {}  # the sizes, by the identity of a shape


def block_of(element, sizes):
    """The type of blocks of these sizes, the same one where they hold numbers."""
    if type(element) is not core.dtype:
        return core.block_type(element, [*sizes])
    key = element.name, sizes
    if key not in _blocks:
        _blocks[key] = core.block_type(element, [*sizes])
    return _blocks[key]


def tensor_of(data, element, sizes):
    handle = interpreter.TensorHandle(data, element)
    return core.tensor(handle, block_of(element, sizes) if sizes else element)


def shape_of(sizes):
    if sizes not in _shapes:
        count = functools.reduce(lambda n, size: n * size, sizes, 1)
        wrapped = core.tuple([core.constexpr(n) for n in sizes])
        _shapes[sizes] = core.constexpr(count), wrapped
        _sizes[id(wrapped)] = sizes
    return _shapes[sizes]


def _make_types_once():
    """The types of blocks, and the shapes of tensors, which nothing changes once they are made."""
    of_block, known = core.block_type.__init__, {}

    def block(self, element, shape):
        sizes = tuple(shape.values if isinstance(shape, core.tuple) else shape)
        key = element.name, *sizes
        if key in known and type(element) is core.dtype:
            vars(self).update(known[key])
            return
        of_block(self, element, shape)
        self.of_tensors = shape_of(tuple(self.shape.values))
        if type(element) is core.dtype and all(type(n) is int for n in sizes):
            known[key] = vars(self).copy()

    def with_element(self, element):
        return block_of(element, tuple(self.shape))

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors

    core.dtype.of_tensors = shape_of(())
    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.block_type.with_element_ty = with_element
    # What stands for a type where there is code is the type itself where there is none.
    core.block_type.to_ir = core.dtype.to_ir = lambda self, builder: self


def _unwrap_at_once():
    """What is no list or tuple is told from constants by its type."""
    of_any = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.tensor}

    def unwrap(x):
        kind = type(x)
        if kind in plain:
            return x
        return x.value if kind is core.constexpr else of_any(x)

    core._unwrap_if_constexpr = unwrap


def _take_operands_at_once():
    """What two types have in common is found once, and a constant beside a tensor made once."""
    own = semantic.TritonSemantic
    check, broadcast, cast = own.binary_op_type_checking_impl, own.broadcast_impl_value, own.cast
    kinds, constants, common = {}, {}, {}

    def check_of(self, a, b, allow_a=False, allow_b=False, arithmetic=True, divides=False):
        if type(a) is not core.tensor:
            return check(self, a, b, allow_a, allow_b, arithmetic, divides)
        key = a.dtype.name, arithmetic, divides
        if type(a.dtype) is core.dtype and type(b) in (int, float):
            key += type(b), b or repr(b), id(a.shape)
            if key in constants:
                return a, constants[key]
            left, right = check(self, a, b, allow_a, allow_b, arithmetic, divides)
            if left is a:
                constants[key] = right
            return left, right
        if type(a.dtype) is core.dtype and type(b) is core.tensor and type(b.dtype) is core.dtype:
            key += (b.dtype.name,)
            if key in kinds:
                left, right = kinds[key]
                return broadcast_of(self, cast_to(self, a, left), cast_to(self, b, right))
            left, right = check(self, a, b, allow_a, allow_b, arithmetic, divides)
            kinds[key] = left.dtype, right.dtype
            return left, right
        if allow_a and a.dtype.is_ptr() and type(b) is core.tensor and b.dtype.is_int():
            return broadcast_of(self, a, b)
        return check(self, a, b, allow_a, allow_b, arithmetic, divides)

    def broadcast_of(self, a, b):
        if a.shape is b.shape:
            return a, b
        key = id(a.shape), id(b.shape)
        if key not in common:
            broadcast(self, a, b)  # which refuses shapes that do not fit
            common[key] = np.broadcast_shapes(*(_sizes[each] for each in key))
        return grown(a, common[key]), grown(b, common[key])

    def grown(x, sizes):
        if _sizes[id(x.shape)] == sizes:
            return x
        data = x.handle.data
        if data.size == 1:  # as below, in half the time
            data = np.ndarray(sizes, data.dtype, data, strides=(0,) * len(sizes))
        else:
            data = np.broadcast_to(data, sizes)
        return tensor_of(data, x.dtype, sizes)

    def cast_to(self, x, dtype, rounding=None):
        old, new = x.dtype, dtype.scalar
        if old is new:
            return x
        if rounding is None and (old.name, new.name) in CASTS:
            handle = self.builder.cast_impl(x.handle, new)
            return core.tensor(
                handle, block_of(new, sizes) if (sizes := _sizes[id(x.shape)]) else new
            )
        return cast(self, x, dtype, rounding)

    def expand(self, x, axis):
        sizes = list(_sizes[id(x.shape)])
        sizes.insert(axis, 1)
        return tensor_of(x.handle.data.reshape(sizes), x.dtype, tuple(sizes))

    own.binary_op_type_checking_impl, own.broadcast_impl_value = check_of, broadcast_of
    own.cast, own.expand_dims = cast_to, expand


# Those that the interpreter makes in one step.
CASTS = {
    (old, new) for old in ("int1", "int8", "int32", "int64", "fp32") for new in ("int32", "int64")
}
CASTS |= {(old, "fp32") for old in ("int1", "int32", "int64", "fp16", "bf16", "fp64")}
CASTS |= {("fp32", "fp16"), ("fp32", "bf16"), ("fp32", "fp64")}


def _compute_at_once():
    """Results of an operand's type are not measured again; signed integers may not overflow.

    Triton's own check of these costs a second result, and says nothing outside of its debug mode.
    """
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check_overflow(self, a, b, operation):
        kind = a.type.scalar
        if kind.int_bitwidth >= 64 or not kind.is_int_signed() or kind.is_bool():
            return
        exact = functions[operation.__name__](a.handle.data, b.handle.data, dtype=np.int64)
        if exact.min() < kind.get_int_min_value() or exact.max() > kind.get_int_max_value():
            raise OverflowError(f"{operation.__name__} of {a.type} and {b.type}")

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    own = interpreter.InterpreterBuilder.binary_op

    def binary(self, a, b, operation):
        found = operation(a.data, b.data)
        if found.dtype is a.data.dtype:
            return interpreter.TensorHandle(found, a.dtype.scalar)
        return own(self, a, b, lambda *_: found)

    interpreter.InterpreterBuilder.binary_op = binary
    interpreter.TensorHandle.__post_init__ = lambda self: None


def _read_parameters_once():
    """Those of a kernel."""
    own = interpreter.inspect
    signature = functools.cache(own.signature)

    def bound(function, *arguments, **options):
        found = signature(function).bind(*arguments, **options)
        found.apply_defaults()
        return found.arguments

    interpreter.inspect = types.SimpleNamespace(
        **vars(own) | {"getfullargspec": functools.cache(own.getfullargspec), "getcallargs": bound}
    )


@contextlib.contextmanager
def told_of_what_is_beyond(tensors, found):
    """Adds to found the kernels, and the lines, that read or write beyond the tensors.

    Args:
        tensors: the list of those of the kernel that runs.
        found: a set.
    """
    own = interpreter.InterpreterBuilder

    def watched(name, places):
        function = getattr(own, name)

        def call(self, *arguments):
            pointers, mask = (arguments[n] for n in places)
            at, size = pointers.data[mask.data], pointers.get_element_ty().primitive_bitwidth // 8
            inside = np.zeros(at.shape, bool)
            for first, last in map(_extent, tensors):
                inside |= (first <= at) & (at + size <= last)
            if not inside.all():
                found.add((name, _lines()))
            return function(self, *arguments)

        return mock.patch.object(own, name, call)

    with contextlib.ExitStack() as patches:
        patches.enter_context(watched("create_masked_load", (0, 1)))
        patches.enter_context(watched("create_masked_store", (0, 2)))
        patches.enter_context(watched("create_atomic_rmw", (1, 3)))
        yield


def _extent(x):
    """The address of a tensor's first number, and the one after its last."""
    span = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1 if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + span * x.itemsize


def _lines():
    """Those of the kernel that is at work, the innermost first."""
    frame, found = sys._getframe(), []
    while frame is not None:
        _, _, path = frame.f_code.co_filename.rpartition("/_backends/")
        if path.startswith("triton_"):
            found.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found[:3])
