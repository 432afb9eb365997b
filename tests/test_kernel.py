"""The compiled kernels: every instruction set, threads, and what they refuse."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard import _kernel
from regard.testing import assert_matches

TESTS = Path(__file__).parent
FIRST_CALL = (
    "import numpy as np, regard; x = np.ones((4, 2), 'f'); print(regard.attention(x, x, x))"
)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("target", _kernel.kernels.targets())
def test_every_instruction_set_passes_the_tests_of_the_operator(target):
    files = [str(TESTS / name) for name in ("test_attention.py", "test_promises.py")]
    done = run("-m", "pytest", "-q", "-k", "kernel or numpy", *files, REGARD_TARGET=target)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 50


def test_a_target_that_is_unknown_is_refused_by_name():
    done = run("-c", FIRST_CALL, REGARD_TARGET="sse9")
    assert done.returncode == 1
    assert "REGARD_TARGET=sse9 is unknown; " in done.stderr
    assert "portable are there." in done.stderr


def test_an_install_without_the_compiled_module_serves_the_call_all_the_same(monkeypatch):
    monkeypatch.setattr(_kernel, "kernels", None)
    x = np.ones((4, 2), np.float32)
    assert (regard.attention(x, x, x) == 1).all()
    with pytest.raises(regard.UnsupportedError, match="kernel: it is not in this install, which"):
        regard.attention(x, x, x, backend="kernel")


x = np.ones((2, 6, 4), np.float32)
t = torch.from_numpy(x)
REFUSALS = {
    "head size": (np.ones((1, 2, 257), "f"), {}, "its head sizes D and Dv go up to 256"),
    "device": (t.to("meta"), {}, "it computes on the CPU"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_refuses_it_says(name):
    arrays, options, message = REFUSALS[name]
    with pytest.raises(regard.UnsupportedError, match=f"kernel: {message}"):
        regard.attention(arrays, arrays, arrays, backend="kernel", **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_it_is_the_default_on_the_cpu(dtype):
    from regard._backends import choose
    from regard._checks import read_call

    y = t.to(getattr(torch, dtype))
    assert choose(read_call(y, y, y), "auto").name == "kernel"
    y.requires_grad_()
    assert choose(read_call(y, y, y), "auto").name == "kernel"
    if dtype != "bfloat16":
        y = y.detach().numpy()
        assert choose(read_call(y, y, y), "auto").name == "kernel"


@pytest.mark.parametrize("head_sizes", [(1, 1), (3, 5), (80, 96), (256, 256)])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 65), (130, 1), (65, 129)])
def test_odd_sizes_match_the_definition(head_sizes, lengths):
    rng = np.random.default_rng(0)
    (D, Dv), (Lq, Lk) = head_sizes, lengths
    q = rng.standard_normal((2, 3, Lq, D), dtype=np.float32)
    k = rng.standard_normal((2, 1, Lk, D), dtype=np.float32)
    v = rng.standard_normal((2, 1, Lk, Dv), dtype=np.float32)
    tensors = [torch.from_numpy(y) for y in (q, k, v)]

    def plain(q, k, v):
        return (q @ k.transpose(-1, -2) / D**0.5).softmax(-1) @ v

    exact, low = plain(*(y.double() for y in tensors)), plain(*tensors)
    assert_matches(regard.attention(q, k, v, backend="kernel"), exact, low)


def test_read_only_and_unaligned_arrays_are_read():
    raw = np.zeros(4 * 2 * 6 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, 6, 4)
    raw[:] = np.random.default_rng(0).standard_normal(raw.shape)
    raw.flags.writeable = False
    found = regard.attention(raw, raw, raw, causal=True, backend="kernel")
    np.testing.assert_array_equal(found, regard.attention(*[raw.copy()] * 3, causal=True))


def test_ctrl_c_ends_a_long_call_within_a_second():
    code = (
        "import numpy as np, regard\n"
        "x = np.ones((64, 40000, 64), 'f'); print('ready', flush=True)\n"
        "regard.attention(x, x, x, backend='kernel')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert error.rstrip().endswith("KeyboardInterrupt")


def test_a_forked_process_computes_too():
    code = (
        "import os, numpy as np, regard\n"
        "x = np.random.default_rng(0).standard_normal((8, 700, 32), 'f')\n"
        "regard.set_num_threads(2); a = regard.attention(x, x, x, backend='kernel')\n"
        "if os.fork() == 0:\n"
        "    b = regard.attention(x, x, x, backend='kernel')\n"
        "    os._exit(0 if (a == b).all() else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert run("-W", "ignore", "-c", code).returncode == 0


def test_a_visible_nan_comes_through_even_with_a_weight_of_zero():
    q, k = np.ones((1, 1), np.float32), np.full((1, 1), -np.inf, np.float32)
    v = np.float32([[np.nan, 1.0]])
    out = regard.attention(q, k, v, backend="kernel")
    exact = regard.attention(q.astype(float), k.astype(float), v.astype(float))
    np.testing.assert_array_equal(out, exact)
    assert np.isnan(out[0, 0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (50, 9), "softcap": 5.0}])
def test_deterministic_for_any_number_of_threads(options):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 400, 64), dtype=np.float32)
    before, found = regard.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            regard.set_num_threads(threads)
            found.append(regard.attention(q, k, v, backend="kernel", **options))
    finally:
        regard.set_num_threads(before)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
