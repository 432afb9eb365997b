"""Triton's interpreter, in a fifth of its time.

It puts its own functions in the place of ``triton.language``'s anew in every call of every function
of a kernel, and for each operation makes tables and types anew, checks that shapes are powers of 2
and computes every sum and product of integers twice, to see whether it overflows. Here the first is
done once in a process, which then interprets kernels and compiles none, types of one shape are made
once, and the last is left out where thousands of calls run.
"""

import dataclasses
import functools
from unittest import mock

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


def _put_in_place(place, name, member, builder, scope):
    """A function of the language, by the interpreter's semantics, without a call between."""
    function, by = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*arguments, _semantic=None, **options):
        return function(*arguments, **options, _semantic=by)

    scope.set_attr(place, name, call)


def _make_types_once():
    """The types of blocks, and the shapes of tensors, which nothing changes once they are made."""
    of_block, blocks, shapes = core.block_type.__init__, {}, {}

    def block(self, element, shape):
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        if type(element) is not core.dtype or not all(type(n) is int for n in sizes):
            return of_block(self, element, shape)
        key = element.name, *sizes
        if key not in blocks:
            of_block(self, element, shape)
            blocks[key] = vars(self).copy()
        return vars(self).update(blocks[key])

    def tensor(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            count = functools.reduce(lambda n, size: n * size, sizes, 1)
            wrapped = core.tuple([core.constexpr(n) for n in sizes])
            shapes[sizes] = core.constexpr(count), wrapped
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[sizes]

    core.block_type.__init__, core.tensor.__init__ = block, tensor


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
    """Two blocks of one shape, and of one type, are as they are."""
    own = semantic.TritonSemantic
    check, broadcast, cast = own.binary_op_type_checking_impl, own.broadcast_impl_value, own.cast

    def check_of(self, a, b, allow_a=False, allow_b=False, arithmetic=True, divides=False):
        same = type(a) is type(b) is core.tensor and a.dtype is b.dtype
        if same and type(a.dtype) is core.dtype and not divides:
            return (a, b) if a.shape is b.shape else broadcast_of(self, a, b)
        return check(self, a, b, allow_a, allow_b, arithmetic, divides)

    def broadcast_of(self, a, b):
        return (a, b) if a.shape is b.shape else broadcast(self, a, b)

    def cast_to(self, x, dtype, rounding=None):
        return x if x.dtype is dtype else cast(self, x, dtype, rounding)

    own.binary_op_type_checking_impl, own.broadcast_impl_value = check_of, broadcast_of
    own.cast = cast_to


def without_overflow_checks():
    """Integers are not looked at in the block."""
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    return mock.patch.object(builder, "options", options)
