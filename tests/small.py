"""Small operands whose steps are written out."""

import numpy as np
import torch

from regard import Edit

WORDS = ["Your", "journey", "starts", "with", "one", "step"]


def numbers(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def qkv(Hq=4, Hkv=2, Lq=3, Lk=5, D=6, Dv=2, dtype=np.float64):
    return (
        numbers(Hq, Lq, D, dtype=dtype),
        numbers(Hkv, Lk, D, dtype=dtype, seed=1),
        numbers(Hkv, Lk, Dv, dtype=dtype, seed=2),
    )


def journey():
    return torch.tensor([
        [0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33], [0.77, 0.25, 0.10], [0.05, 0.80, 0.55],
    ])  # fmt: skip


# Of attention(*qkv()), one by one.
OPTIONS = {
    "causal": True,
    "window": (1, 0),
    "mask": np.array([[1, 0, 1, 1, 1], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]], bool),
    "bias": numbers(4, 3, 5, seed=3),
    "key_lengths": 3,
    "segments": (np.array([0, 1, 1]), np.array([0, 0, 1, 1, 1])),
    "intervals": (np.array([0, 1, 2]), np.array([3, 5, 4])),
    "query_start": 1,
    "sinks": numbers(4, seed=4),
    "scale": 0.25,
    "softcap": 2.0,
    "edits": [Edit(1, slice(1, None), 0, 0.0), Edit(None, 2, slice(1, 3), 3.0)],
}
