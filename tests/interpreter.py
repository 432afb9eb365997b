"""Triton's interpreter, in a fifth of its time.

It puts its own functions in the place of ``triton.language``'s anew in every call of every function
of a kernel, and for each operation makes tables and types anew, checks that shapes are powers of 2
and computes every sum and product of integers twice, to see whether it overflows. Here the first is
done once in a process, which then interprets kernels and compiles none, types of one shape are made
once, and the last is left out where thousands of calls run.
"""

import dataclasses
import functools
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
    key = element.name, sizes
    if type(element) is not core.dtype:
        return core.block_type(element, [*sizes])
    if key not in _blocks:
        _blocks[key] = core.block_type(element, [*sizes])
    return _blocks[key]


def tensor_of(data, element, sizes):
    handle = interpreter.TensorHandle(data, element)
    return core.tensor(handle, block_of(element, sizes) if sizes else element)


def _make_types_once():
    """The types of blocks, and the shapes of tensors, which nothing changes once they are made."""
    of_block, known = core.block_type.__init__, {}

    def block(self, element, shape):
        sizes = tuple(shape.values if isinstance(shape, core.tuple) else shape)
        if type(element) is not core.dtype or not all(type(n) is int for n in sizes):
            return of_block(self, element, shape)
        key = element.name, *sizes
        if key not in known:
            of_block(self, element, shape)
            known[key] = vars(self).copy()
        return vars(self).update(known[key])

    def with_element(self, element):
        return block_of(element, tuple(self.shape))

    def tensor(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in _shapes:
            count = functools.reduce(lambda n, size: n * size, sizes, 1)
            wrapped = core.tuple([core.constexpr(n) for n in sizes])
            _shapes[sizes] = core.constexpr(count), wrapped
            _sizes[id(wrapped)] = sizes
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = _shapes[sizes]

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
    """Operands of one type and shape are as they are; constants beside a tensor are made once."""
    own = semantic.TritonSemantic
    check, broadcast, cast = own.binary_op_type_checking_impl, own.broadcast_impl_value, own.cast
    constants, common = {}, {}

    def check_of(self, a, b, allow_a=False, allow_b=False, arithmetic=True, divides=False):
        kind, other = type(a), type(b)
        if kind is other is core.tensor:
            same = a.dtype is b.dtype and type(a.dtype) is core.dtype
            if same and not divides:
                return (a, b) if a.shape is b.shape else broadcast_of(self, a, b)
        elif kind is core.tensor and other in (int, float) and type(a.dtype) is core.dtype:
            key = other, b or repr(b), a.dtype.name, id(a.shape), arithmetic, divides
            if key in constants:
                return a, constants[key]
            left, right = check(self, a, b, allow_a, allow_b, arithmetic, divides)
            if left is a:
                constants[key] = right
            return left, right
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
        return tensor_of(np.broadcast_to(x.handle.data, sizes), x.dtype, sizes)

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
    """What is of the type of an operand is not measured again."""
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


def without_overflow_checks():
    """Integers are not looked at in the block."""
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    return mock.patch.object(builder, "options", options)
