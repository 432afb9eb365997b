"""Recordings to test with."""

import ml_dtypes
import numpy as np

from regard import Edit
from regard.recording import Layer, Recording

TOKENS = ["Your", " journey", " starts", " with"]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def layer(Hq=4, Hkv=2, Lq=4, Lk=4, D=6, Dv=3, dtype=np.float32, **options):
    q, k = numbers(Hq, Lq, D, dtype=dtype), numbers(Hkv, Lk, D, dtype=dtype, seed=1)
    return Layer(q, k, numbers(Hkv, Lk, Dv, dtype=dtype, seed=2), **options)


def sample():
    masked = layer(
        causal=True,
        window=(2, 0),
        scale=0.25,
        softcap=30.0,
        query_start=0,
        key_lengths=3,
        segments=np.array([0, 0, 1, 1]),
        sinks=numbers(4),
        bias=numbers(4, 4, 4),
        mask=np.tri(4, dtype=bool),
        edits=[Edit(heads=1, queries=slice(2, None), keys=0), Edit(keys=-1, factor=0.5)],
    )
    return Recording(
        TOKENS, [layer(causal=True), masked, Layer(numbers(2, 4, 5), numbers(1, 4, 5))]
    )


def assert_same(found, expected):
    assert found.tokens == expected.tokens
    assert found.query_tokens == expected.query_tokens
    assert found.model == expected.model
    assert found.boundary == expected.boundary
    assert found.grids == expected.grids
    assert found.groups.keys() == expected.groups.keys()
    assert len(found.layers) == len(expected.layers)
    for a, b in zip(found.layers, expected.layers):
        assert (a.name, a.number, a.head_numbers) == (b.name, b.number, b.head_numbers)
        assert a.options.keys() == b.options.keys()
        for name in a.options:
            np.testing.assert_equal(a.options[name], b.options[name])
            assert type(a.options[name]) is type(b.options[name])
        arrays = ("query", "key", "value", "gradient")
        for x, y in ((getattr(a, name), getattr(b, name)) for name in arrays):
            assert (x is None) == (y is None)
            if x is not None:
                assert (x.dtype, x.shape) == (y.dtype, y.shape)
                np.testing.assert_array_equal(
                    x.view(np.uint8), np.ascontiguousarray(y).view(np.uint8)
                )
