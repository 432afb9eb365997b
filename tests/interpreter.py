"""Triton's interpreter, in a third of its time.

It puts its own functions in the place of ``triton.language``'s anew in every call of every function
of a kernel, makes a table of dtypes for every operation, and computes every sum and product of
integers twice, to see whether it overflows. Here the first two are done once in a process, which
then interprets kernels and compiles none, and the last is left out where thousands of calls run.
"""

import dataclasses
import functools
from unittest import mock

from triton import language
from triton.language import core
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
    interpreter._patch_lang(_patched_by)
    interpreter._patch_lang = lambda fn: _Nothing()
    own, known = interpreter._get_np_dtype, {}

    def of(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = own(dtype)
        return known[name]

    interpreter._get_np_dtype = of


def without_overflow_checks():
    """Integers are not looked at in the block."""
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    return mock.patch.object(builder, "options", options)
