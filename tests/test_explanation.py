"""``regard.explain``: which backend serves a call, on which instruction set, and why not others."""

import numpy as np
import pytest
import torch

import regard
from regard._backends import BACKENDS, kernel

NAMES = [backend.name for backend in BACKENDS]
X = np.zeros((1, 2, 3, 4), "f")
WIDE = torch.zeros(1, 2, 3, 600)
WHY = "its compiler could not make it, or REGARD_TARGETS named others"


class Kernels:
    """The compiled module of another machine."""

    def __init__(self, used, built, obstacles=None, left_out=()):
        self.used, self.built = used, built
        self.others, self.left_out = obstacles or {}, left_out

    def target(self):
        return self.used

    def obstacles(self):
        return self.others

    def preference(self, vendor):  # of any processor: the names alone are asked for
        return self.built

    def targets_left_out(self):
        return list(self.left_out)


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        ([X] * 3, {}),
        ([X] * 2, {"causal": True}),
        ([torch.from_numpy(X)] * 3, {"window": (1, 0)}),
        ([WIDE] * 3, {}),
        ([X] * 3, {"backend": "reference"}),
        ([torch.from_numpy(X)] * 3, {"backend": "torch", "sinks": torch.zeros(2)}),
    ],
)
def test_it_names_the_backend_that_serves_the_call(arrays, options):
    found = regard.explain(*arrays, **options)
    if len(arrays) == 3:
        assert regard.attention(*arrays, **options).shape == arrays[0].shape
        assert regard.attention(*arrays, **options | {"backend": found.backend}) is not None
    assert sorted([found.backend, *found.others]) == sorted(NAMES)
    assert all(found.others.values())
    if found.backend == "kernel":
        assert found.target == kernel.kernels.target()
        assert {found.target, *found.other_targets} >= {*kernel.kernels.targets()}
        assert found.target not in found.other_targets
    else:
        assert (found.target, found.other_targets) == (None, {})


def test_it_says_why_in_the_words_of_the_refusal():
    found = regard.explain(WIDE, WIDE, WIDE)
    with pytest.raises(regard.UnsupportedError) as refusal:
        regard.attention(WIDE, WIDE, WIDE, backend="kernel")
    assert f"kernel: {found.others['kernel']}." in str(refusal.value)
    assert str(found).splitlines() == [
        "torch serves this call.",
        "  kernel: its head sizes D and Dv go up to 576, these are (600, 600).",
        "  fused: its head sizes D and Dv go up to 256, these are (600, 600).",
        "  triton: its head sizes D and Dv go up to 256, these are (600, 600).",
        "  reference: torch comes before it.",
    ]


def test_it_names_each_other_instruction_set(monkeypatch):
    obstacle = "the operating system does not keep its tiles"
    built = ["avx512_bf16", "avx512", "amx", "portable"]
    here = Kernels("avx512", built, {"amx": obstacle}, ["avx2"])
    monkeypatch.setattr("regard._operator.explanation.kernels", here)
    monkeypatch.delenv("REGARD_TARGET", raising=False)
    found = regard.explain(X, X, X)
    assert found.target == "avx512"
    assert found.other_targets == {
        "avx512_bf16": "avx512 comes before it on this processor",
        "amx": obstacle,
        "portable": "avx512 comes before it on this processor",
        "avx2": f"this build was made without it: {WHY}",
    }
    said = str(found).splitlines()
    assert said[0] == "kernel serves this call, with the instruction set avx512."
    assert said[-1] == f"  instruction set avx2: this build was made without it: {WHY}."
    monkeypatch.setenv("REGARD_TARGET", "avx512")
    assert regard.explain(X, X, X).other_targets["portable"] == "REGARD_TARGET=avx512 names another"


def test_errors_are_those_of_the_call():
    for arrays, options, error in [
        ([X, X[..., :3], X], {}, regard.ShapeError),
        ([X, X, X], {"backend": "cuda"}, ValueError),
        ([X, X, X], {"causl": True}, TypeError),
        ([WIDE] * 3, {"backend": "kernel"}, regard.UnsupportedError),
    ]:
        with pytest.raises(error) as asked:
            regard.explain(*arrays, **options)
        with pytest.raises(error) as called:
            regard.attention(*arrays, **options)
        said = str(asked.value).replace("explain:", "attention:")
        assert said.split(". ")[:2] == str(called.value).split(". ")[:2]
