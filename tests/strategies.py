"""Random calls of attention for hypothesis: awkward sizes, strides and options, all together."""

import numpy as np
from hypothesis import strategies as st

from random_calls import edits

LENGTHS = st.sampled_from([0, 1, 2, 3, 7, 16, 17, 33])


def strided(rng, shape, dtype, layout):
    """A random array of that shape, in one of four memory layouts."""
    x = rng.standard_normal(shape).astype(dtype)
    if layout == "heads inside":  # (B, L, H, D) in memory
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if layout == "every other":
        wide = np.repeat(x, 2, axis=-1)
        return wide[..., ::2]
    if layout == "reversed":
        return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    return x


@st.composite
def calls(draw, options=True, min_length=0):
    """``(arrays, options)``: q, k, v as ``(B, H, L, D)`` float64 and keyword options in NumPy."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = LENGTHS.filter(lambda n: n >= min_length)
    B, Lq, Lk = draw(st.integers(1, 3)), draw(lengths), draw(lengths)
    Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    D, Dv = draw(st.sampled_from([1, 3, 8, 16])), draw(st.sampled_from([1, 4, 8]))
    layouts = st.sampled_from(["plain", "heads inside", "every other", "reversed"])
    shared = draw(st.sampled_from([B, B, 1]))
    q = strided(rng, (B, Hkv * group, Lq, D), float, draw(layouts))
    k = strided(rng, (shared, Hkv, Lk, D), float, draw(layouts))
    v = strided(rng, (shared, Hkv, Lk, Dv), float, draw(layouts))
    chosen = {}
    if options:
        sides, some = st.one_of(st.none(), st.integers(0, 9)), st.sampled_from([1, B])
        weights_shape = (B, Hkv * group, Lq, Lk)

        def broadcast_shape():
            full = [n if draw(st.booleans()) else 1 for n in weights_shape]
            return tuple(full[draw(st.integers(0, 3)) :])

        if draw(st.booleans()):
            chosen["causal"] = True
        if draw(st.booleans()):
            chosen["window"] = (draw(sides), draw(sides))
        if draw(st.booleans()):
            chosen["mask"] = rng.random(broadcast_shape()) < 0.7
        if draw(st.booleans()):
            chosen["bias"] = rng.standard_normal(broadcast_shape())
        if draw(st.booleans()):
            chosen["key_lengths"] = rng.integers(0, Lk + 1, B)
        if draw(st.booleans()):
            chosen["segments"] = (rng.integers(0, 3, (B, Lq)), rng.integers(0, 3, (B, Lk)))
        if draw(st.booleans()):
            chosen["intervals"] = tuple(rng.integers(-2, Lk + 3, (draw(some), Lq)) for _ in "12")
        if draw(st.booleans()):
            chosen["query_start"] = rng.integers(-3, Lk + 3, B)
        if draw(st.booleans()):
            chosen["sinks"] = rng.standard_normal(Hkv * group)
        if draw(st.booleans()):
            chosen["scale"] = draw(st.sampled_from([0.0, 1.0, -0.5, 3.0]))
        if draw(st.booleans()):
            chosen["softcap"] = draw(st.sampled_from([0.5, 5.0]))
        if draw(st.booleans()):
            chosen["edits"] = edits(rng, *weights_shape[1:])
    return (q, k, v), chosen


def to_dtype(x, name):
    """x in a dtype that may be bfloat16."""
    if name == "bfloat16":
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16)
    return x.astype(name)


def to_torch(options):
    """The options with tensors for arrays."""
    import torch

    def convert(x):
        if isinstance(x, tuple):
            return tuple(convert(part) for part in x)
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

    return {name: convert(x) for name, x in options.items()}
