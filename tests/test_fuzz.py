"""A fixed number of random calls on every instruction set, and faults that they must find."""

import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fuzz
import regard
from random_calls import calls, draw
from regard._backends import kernel
from regard._base import settings

SCRIPT = Path(__file__).parent / "fuzz.py"
SEED, CALLS = 5, 120  # of the first instruction set; each other has half as many of its own
SERVED = re.compile(r"(\d+) of (\d+) (output|gradient|weights)")


# Each instruction set in a process of its own, forked from one that has loaded torch and what the
# first call of an operator loads: that takes as long as the calls.
FORKING = """
import gc, os, runpy, sys
import numpy.random, torch
import regard._backends.kernel_ops, regard._backends.torch_reductions
import torch.fx.experimental.symbolic_shapes
script, *targets = sys.argv.pop(1).split(os.pathsep)
sys.path.insert(0, os.path.dirname(script))
import fuzz
gc.freeze()
calls, seed = map(int, sys.argv[2::2])
for number, target in enumerate(targets):
    sys.argv[2::2] = map(str, (calls // 2, seed + number) if number else (calls, seed))
    if os.fork() == 0:
        os.environ["REGARD_TARGET"] = target
        os.dup2(1, 2)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)  # at once: taking down torch would copy what the forks share
    print(f"ended: {os.waitstatus_to_exitcode(os.wait()[1])}", flush=True)
"""


@functools.cache
def fuzzed():
    """What was printed on each instruction set, and how it ended."""
    targets = kernel.kernels.targets()
    words = os.pathsep.join([str(SCRIPT), *targets]), "--calls", str(CALLS), "--seed", str(SEED)
    done = subprocess.run(
        [sys.executable, "-c", FORKING, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(targets, re.findall(r"(.*?)ended: (-?\d+)\n", done.stdout, re.DOTALL)))


@pytest.mark.xdist_group("fuzz")
@pytest.mark.parametrize("target", kernel.kernels.targets())
def test_random_calls_match_float64_and_the_kernels_serve_most(target):
    said, status = fuzzed()[target]
    assert status == "0", said[-6000:]
    number = CALLS if target == kernel.kernels.targets()[0] else CALLS // 2
    assert said.startswith(f"{target}: {number} calls in ")
    served = {what: int(n) / int(asked) for n, asked, what in SERVED.findall(said)}
    assert set(served) == {"output", "gradient", "weights"}
    assert min(served.values()) > 0.9


def test_a_call_is_the_same_when_it_is_drawn_again():
    assert repr(draw(0, 3)) == repr(draw(0, 3))
    assert repr(draw(0, 3)) != repr(draw(0, 4))


@pytest.fixture(scope="module")
def right():
    """The first calls that pass: what is found wrong with them afterwards is the fault."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_num_threads", None)  # which each call sets
        for _, call in itertools.islice(calls(SEED), 120):
            with contextlib.suppress(AssertionError):
                fuzz.check(call)
                found.append(call)
    assert len(found) > 90
    return found


@pytest.fixture
def compare(right, monkeypatch):
    """Compares them, attention replaced by a fault where it is not asked for the truth."""
    monkeypatch.setattr(settings, "_num_threads", None)
    attend = regard.attention

    def run(fault, **changes):
        def attention(*arrays, backend, **options):
            if backend in ("kernel", "auto"):
                return fault(attend, *arrays, backend=backend, **options)
            return attend(*arrays, backend=backend, **options)

        monkeypatch.setattr(regard, "attention", attention)
        for call in right:
            fuzz.check(replace(call, **changes))

    return run


def no_fault(attend, *arrays, **options):
    return attend(*arrays, **options)


def a_little_off(attend, *arrays, **options):
    out = attend(*arrays, **options)
    return out + 1e-4 * abs(out).max() if 0 not in out.shape else out


def one_key_too_many(attend, *arrays, **options):
    if options.get("causal") and "window" not in options:
        options |= {"causal": False, "window": (None, 1)}
    return attend(*arrays, **options)


def without_the_sinks(attend, *arrays, **options):
    return attend(*arrays, **options | {"sinks": None})


def last_query_left_out(attend, *arrays, **options):
    out = attend(*arrays, **options)
    out[..., -1:, :] = 0
    return out


def hidden_values_take_part(attend, query, key, value, **options):
    out = attend(query, key, value, **options)
    return out if np.isfinite(fuzz.to_numpy(value)).all() else out * np.nan


def in_float64(attend, *arrays, **options):
    out = attend(*arrays, **options)
    return out.double() if hasattr(out, "double") else out.astype(float)


def writes(attend, query, *more, **options):
    out = attend(query, *more, **options)
    if hasattr(query, "detach") or query.flags.writeable:
        query[...] = 0
    return out


FAULTS = {
    a_little_off: "output at", one_key_too_many: "output at", without_the_sinks: "output at",
    last_query_left_out: "output at", hidden_values_take_part: "output at",
    in_float64: "output is float64", writes: "query was written to",
}  # fmt: skip


@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_output_is_found(fault, compare):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        compare(fault, weights=False, gradient=())


@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
def test_a_wrong_gradient_is_found(name, compare):
    def fault(attend, *arrays, **options):
        given = dict(zip(("query", "key", "value"), arrays)) | options
        x = given.get(name)
        if getattr(x, "requires_grad", False):  # the same number, 1 % more gradient
            given[name] = x.detach() + 1.01 * (x - x.detach()).nan_to_num()
        arrays = [given.pop(n) for n in ("query", "key", "value")]
        return attend(*arrays, **given)

    with pytest.raises(AssertionError, match=f"gradient of {name} at"):
        compare(fault, weights=False)


REDUCTIONS = ("entropy", "distance", "received", "pool", "topk", "strongest", "blocks", "diagonals",
              "mass", "at", "__matmul__")  # fmt: skip


@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_wrong_reduction_is_found(name, compare, monkeypatch):
    right = getattr(regard.AttentionWeights, name)

    def wrong(self, *arguments, **options):
        found = right(self, *arguments, **options)
        if name == "topk":
            return found._replace(indices=found.indices + 1)
        if name == "strongest":
            return found._replace(weight=found.weight * 1.001)
        if name == "diagonals":
            return found._replace(values=found.values * 1.001)
        return found * 1.001

    monkeypatch.setattr(regard.AttentionWeights, name, wrong)
    told = {"__matmul__": "weights @ x", "blocks": "blocks|mass"}.get(name, name)
    with pytest.raises(AssertionError, match=told):  # shares of some keys are a block's
        compare(no_fault, gradient=())
