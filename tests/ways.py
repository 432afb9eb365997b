"""Each library with each backend that takes its arrays, and proof that this backend answered."""

import contextlib
import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

import regard
from regard import _backends


@contextlib.contextmanager
def answering():
    """The names of the backends that compute an output meanwhile, in order."""
    names = []

    class Spy:
        def __init__(self, backend):
            self.backend = backend

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def attention(self, call, weights):
            names.append(self.name)
            return self.backend.attention(call, weights)

    spies = tuple(map(Spy, _backends.BACKENDS))
    with mock.patch.object(_backends, "BACKENDS", spies):
        yield names


@dataclasses.dataclass(frozen=True)
class Way:
    """A library and a backend by name; NumPy in and out."""

    library: str
    backend: str

    @property
    def serves(self):
        """The backend that must answer: on a CPU the kernels do unless another is named."""
        return "kernel" if self.backend == "auto" else self.backend

    def convert(self, x):
        """An array, or arrays in a tuple, in the library."""
        if isinstance(x, tuple):
            return tuple(self.convert(part) for part in x)
        if self.library == "numpy" or not isinstance(x, np.ndarray):
            return x
        return torch.from_numpy(x.copy() if min(x.strides, default=0) < 0 else x)

    def ask(self, *arrays, **options):
        """What attention gives, in the library; asserts who gave it."""
        options = {name: self.convert(x) for name, x in options.items()}
        with answering() as names:
            found = regard.attention(
                *(self.convert(x) for x in arrays), backend=self.backend, **options
            )
        assert names == [self.serves], f"{self} was answered by {names}"
        return found

    def output(self, *arrays, **options):
        """The output in NumPy."""
        return np.asarray(self.ask(*arrays, **options))

    def weights(self, *arrays, **options):
        """The weights of that output, by what gave it."""
        weights = self.ask(*arrays, **options, return_weights=True)[1]
        assert weights._statistics.backend.name == self.serves
        return weights


WAYS = [
    Way("numpy", "kernel"),
    Way("numpy", "reference"),
    Way("numpy", "auto"),
    Way("torch", "kernel"),
    Way("torch", "torch"),
    Way("torch", "auto"),
]


def by_ways(*chosen):
    """Runs a test by each way, or those chosen: the id names library and backend."""
    ways = chosen or WAYS
    return pytest.mark.parametrize("way", ways, ids=[f"{w.library}-{w.backend}" for w in ways])


NAMED = [way for way in WAYS if way.backend != "auto"]
DIFFERENTIABLE = [way for way in WAYS if way.library == "torch"]
