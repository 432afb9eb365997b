"""The compiled kernels: every instruction set, threads, and what they refuse."""

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from bounds import assert_attends
from plain_formula import Errors, add_up, attend
from regard._backends import kernel, kernel_calls

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
        timeout=600,  # a busy machine is no failure
    )


FIRST = kernel.kernels.target()
OTHERS = [name for name in kernel.kernels.targets() if name != FIRST]


# One process collects the tests, and each instruction set runs them in a fork of it: torch, what
# the first call of an operator loads, the collection and what is expected take half as long as the
# tests. What a target has from another is tested there, or by the tests themselves, which run on
# the first of them.
FORKING = """
import gc, os, sys
import pytest

OWN = {"avx512_bf16": "bfloat16", "neon_bf16": "bfloat16", "amx": "float16"}  # and bfloat16
BASE = {"avx512_bf16": "avx512", "neon_bf16": "neon"}  # what the others of its types are from

class Forks:
    def __init__(self, first, *targets):
        self.targets, self.is_fork = targets, False
        self.own = OWN | ({BASE[first]: OWN[first]} if first in BASE else {})

    def pytest_runtestloop(self, session):
        import torch
        import regard._backends.kernel_ops, regard._backends.torch_reductions
        import torch.fx.experimental.symbolic_shapes
        for module in {item.module for item in session.items}:
            getattr(module, "before_forks", lambda: None)()
        gc.freeze()
        for target in self.targets:
            own = self.own.get(target, "")
            sys.stdout.flush()
            if os.fork() == 0:
                os.environ["REGARD_TARGET"], self.is_fork = target, True
                session.items[:] = [item for item in session.items if own in item.name]
                return None
            print(f"ended: {os.waitstatus_to_exitcode(os.wait()[1])}", flush=True)
        return True

forks = Forks(*sys.argv[1].split(os.pathsep))
status = pytest.main(sys.argv[2:], plugins=[forks])
if forks.is_fork:
    from regard._backends import kernel
    print(kernel.kernels.target(), flush=True)
    os._exit(status)
"""


@functools.cache
def on_others():
    """What pytest printed on every other instruction set, and how it ended."""
    names = ("attention", "promises", "layouts", "sums", "same_bits", "row_statistics")
    # By NumPy and by name: torch, or what is chosen by itself, leads to the same kernels. Long rows
    # are for the fuzzer, which runs on every instruction set.
    others = ("torch", "auto", "reference", "compiled", "vmap", "1025")
    chosen = f"(kernel or numpy or bits) and not ({' or '.join(others)})"
    files = [str(TESTS / f"test_{name}.py") for name in names]
    done = run("-c", FORKING, os.pathsep.join([FIRST, *OTHERS]), "-q", "-s", "-k", chosen, *files)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return dict(zip(OTHERS, re.findall(r"(.*?)ended: (-?\d+)\n", done.stdout, re.DOTALL)))


@pytest.mark.xdist_group("instruction sets")
@pytest.mark.parametrize("target", OTHERS)
def test_every_other_instruction_set_passes_the_tests_of_the_operator(target):
    said, status = on_others()[target]
    assert status == "0", said[-3000:]
    assert int(said.split(" passed")[0].split()[-1]) > 50
    assert said.endswith(f"\n{target}\n")


def test_a_target_that_is_unknown_is_refused_by_name():
    done = run("-c", FIRST_CALL, REGARD_TARGET="sse9")
    assert done.returncode == 1
    assert "REGARD_TARGET=sse9 is unknown; " in done.stderr
    assert "portable are there." in done.stderr


WIDEST_LAST = ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
# (vendor, family): what a processor with all instructions tries, best first.
ORDERS = {
    ("GenuineIntel", 6): ["amx", "avx512", "avx512_bf16", "avx2", "portable"],  # Sapphire Rapids
    ("GenuineIntel", 19): ["amx", "avx512", "avx512_bf16", "avx2", "portable"],
    ("AuthenticAMD", 25): ["amx", "avx512_bf16", "avx512", "avx2", "portable"],  # Zen 4
    ("AuthenticAMD", 26): ["amx", "avx512_bf16", "avx512", "avx2", "portable"],  # Zen 5
    ("CentaurHauls", 7): ["amx", "avx512_bf16", "avx512", "avx2", "portable"],  # not measured
    ("", 0): ["amx", "avx512_bf16", "avx512", "avx2", "portable"],
}


@pytest.mark.parametrize("cpu", ORDERS, ids=str)
def test_a_processor_tries_the_instruction_sets_in_the_order_of_its_measurements(cpu):
    kernels = kernel.kernels
    built = kernels.preference(*cpu)
    order = [name for name in built if name in WIDEST_LAST]
    assert order == [name for name in ORDERS[cpu] if name in order]
    assert order == built[: len(order)], "what is only for tests comes last"
    for count in range(1, len(WIDEST_LAST) + 1):  # a processor that lacks the wider ones
        has = WIDEST_LAST[:count]
        assert kernels.preference(*cpu, has) == [name for name in order if name in has]


def test_this_processor_is_in_the_table_of_preferences():
    kernels = kernel.kernels
    vendor, family, model = kernels.processor()
    assert bool(vendor) == bool(family), "both of CPUID"
    assert model >= 0
    here = kernels.targets()
    assert kernels.preference(vendor, family, here) == here


def test_an_install_without_the_compiled_module_serves_the_call_all_the_same(monkeypatch):
    monkeypatch.setattr(kernel, "kernels", None)
    x = np.ones((4, 2), np.float32)
    assert (regard.attention(x, x, x) == 1).all()
    with pytest.raises(regard.UnsupportedError, match="kernel: it is not in this install, which"):
        regard.attention(x, x, x, backend="kernel")


x = np.ones((2, 6, 4), np.float32)
t = torch.from_numpy(x)
REFUSALS = {
    "head size": (np.ones((1, 2, 577), "f"), {}, "its head sizes D and Dv go up to 576"),
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
    from regard._call.checks import read_call

    y = t.to(getattr(torch, dtype))
    assert choose(read_call(y, y, y), "auto").name == "kernel"
    y.requires_grad_()
    assert choose(read_call(y, y, y), "auto").name == "kernel"
    if dtype != "bfloat16":
        y = y.detach().numpy()
        assert choose(read_call(y, y, y), "auto").name == "kernel"


@pytest.mark.parametrize("head_sizes", [(1, 1), (3, 5), (80, 96), (256, 256), (576, 512)])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 65), (130, 1), (65, 129)])
def test_odd_sizes_match_the_definition(head_sizes, lengths):
    rng = np.random.default_rng(0)
    (D, Dv), (Lq, Lk) = head_sizes, lengths
    q = rng.standard_normal((2, 3, Lq, D), dtype=np.float32)
    k = rng.standard_normal((2, 1, Lk, D), dtype=np.float32)
    v = rng.standard_normal((2, 1, Lk, Dv), dtype=np.float32)
    assert_attends(regard.attention(q, k, v, backend="kernel"), q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128])
def test_values_of_no_numbers_have_weights_and_gradients(D, dtype):
    q, k, v = (torch.randn(1, 2, 300, n).to(dtype).requires_grad_() for n in (D, D, 0))
    out, weights = regard.attention(q, k, v, return_weights=True, backend="kernel")
    assert out.shape == (1, 2, 300, 0)
    torch.testing.assert_close(weights.received().sum(-1), torch.full((1, 2), 300.0))
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert dv.shape == v.shape


def test_read_only_and_unaligned_arrays_are_read():
    raw = np.zeros(4 * 2 * 6 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, 6, 4)
    raw[:] = np.random.default_rng(0).standard_normal(raw.shape)
    raw.flags.writeable = False
    found = regard.attention(raw, raw, raw, causal=True, backend="kernel")
    np.testing.assert_array_equal(found, regard.attention(*[raw.copy()] * 3, causal=True))


# One row of memory, many times over: 10¹⁴ operations are minutes on one thread of any processor.
LONG_CALLS = {
    "output": "x = np.broadcast_to(np.ones(64, 'f'), (1, 600_000, 64))\n"
    "print('ready', flush=True); regard.attention(x, x, x, backend='kernel')",
    "gradient": "import torch\nx = torch.ones(64).expand(1, 1, 400_000, 64)\n"
    "call, row = read_call(x, x, x), torch.ones(1, 1, 400_000); print('ready', flush=True)\n"
    "kernel.gradients(call, x, x, row, row, ('query', 'key', 'value'))",
    "weights": "x = np.broadcast_to(np.ones(64, 'f'), (1, 1, 900_000, 64))\n"
    "row = np.ones((1, 1, 900_000), 'f')\n"
    "weights = regard.AttentionWeights._of(read_call(x, x, None), None, (row, row))\n"
    "print('ready', flush=True); weights.summary()",
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_ctrl_c_ends_a_long_call(name):
    """It ends at all, however busy the machine is: the whole call would outlast the test."""
    code = "import signal, numpy as np, regard\nfrom regard._backends import kernel\n"
    code += "from regard._call.checks import read_call\n"
    # Who starts the tests in the background may have it ignored.
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n" + LONG_CALLS[name]
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert error.rstrip().endswith("KeyboardInterrupt"), error


FORKED = {
    "numpy": "import os, regard, numpy as np\n"
    "x = np.random.default_rng(0).standard_normal((8, 700, 32), 'f')\n",
    # Its threads are not there in the child, which waits for them forever where it counts on them.
    "torch": "import os, regard, numpy as np, torch\ntorch.set_num_threads(2)\n"
    "x = torch.randn(8, 700, 32) + torch.randn(8, 700, 32)\n",
}


FORKS = (
    "regard.set_num_threads(2); a = regard.attention(x, x, x, backend='kernel')\n"
    "if os.fork() == 0:\n"
    "    b = regard.attention(x, x, x, backend='kernel')\n"
    "    os._exit(0 if np.array_equal(a, b) else 1)\n"
    "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))"
)
WORKERS = """
import torch, regard
class Attended(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        x = torch.full((4, 300, 16), float(i))
        return regard.attention(x, x, x, backend="kernel")
loader = torch.utils.data.DataLoader(
    Attended(), num_workers=2, multiprocessing_context="fork", timeout=300
)
raise SystemExit([float(x[0, 0, 0, 0]) for x in loader] != [0, 1, 2, 3])
"""
# What runs in a process that has loaded torch, and nothing else: a fork of one with threads, as a
# test's may have, could wait for ever for what another thread held.
AFTER_TORCH = {
    "forks": FORKED["torch"] + FORKS,
    "loads the kernels in a fork": FORKED["torch"].replace("regard, ", "") + "if os.fork() == 0:\n"
    "    import regard; regard.attention(x, x, x, backend='kernel'); os._exit(0)\n"
    "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))",
    "loads data by workers": WORKERS,
}
RUN_AFTER_TORCH = """
import os, sys, traceback
import torch
for code in sys.argv[1:]:
    if os.fork() == 0:
        status = 1
        try:
            exec(code, {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@functools.cache
def ended_after_torch():
    """How each of them ended, and what all printed of errors."""
    done = run("-W", "ignore", "-c", RUN_AFTER_TORCH, *AFTER_TORCH.values())
    return dict(zip(AFTER_TORCH, done.stdout.split(), strict=True)), done.stderr


def test_a_forked_process_computes_too():
    assert run("-W", "ignore", "-c", FORKED["numpy"] + FORKS).returncode == 0


@pytest.mark.xdist_group("after torch")  # one process that loads torch serves all
@pytest.mark.parametrize("how", AFTER_TORCH)
def test_a_forked_process_computes_too_where_torch_is_loaded(how):
    ended, error = ended_after_torch()
    assert ended[how] == "0", error


def test_beside_torch_it_works_on_the_threads_that_torch_has():
    """Torch's stay awake after its work: further ones would share the processors with them."""
    code = FORKED["torch"] + (
        "import threading\n"
        "x, started, seen, done = torch.randn(8, 4000, 64), threading.Event(), set(), False\n"
        "def watch():\n"
        "    while not done: seen.update(os.listdir('/proc/self/task')); started.set()\n"
        "watcher = threading.Thread(target=watch); watcher.start(); started.wait()\n"
        "before = set(os.listdir('/proc/self/task')); seen.clear()\n"
        "regard.attention(x, x, x, backend='kernel'); done = True; watcher.join()\n"
        "assert seen and seen <= before, (seen, before)"
    )
    found = run("-c", code)
    assert found.returncode == 0, found.stderr


def test_a_visible_nan_comes_through_even_with_a_weight_of_zero():
    q, k = np.ones((1, 1), np.float32), np.full((1, 1), -np.inf, np.float32)
    v = np.float32([[np.nan, 1.0]])
    out = regard.attention(q, k, v, backend="kernel")
    exact = regard.attention(q.astype(float), k.astype(float), v.astype(float))
    np.testing.assert_array_equal(out, exact)
    assert np.isnan(out[0, 0])


def with_threads(function):
    """What it gives on one, two and three threads."""
    before, found = regard.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            regard.set_num_threads(threads)
            found.append(function())
    finally:
        regard.set_num_threads(before)
    return found


DETERMINISTIC = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (50, 9), "softcap": 5.0},
    "dropout": {"dropout": 0.2, "seed": 1},
    "bias": {"bias": torch.randn(1, 1, 400, 1, generator=torch.Generator().manual_seed(0))},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_for_any_number_of_threads(name, dtype):
    tensors = [torch.randn(2, 4, 400, 64).to(getattr(torch, dtype)) for _ in range(3)]
    options = {
        n: o.to(tensors[0].dtype) if torch.is_tensor(o) else o
        for n, o in DETERMINISTIC[name].items()
    }

    def run():
        inputs = [x.clone().requires_grad_() for x in tensors]
        if "bias" in options:
            inputs.append(options["bias"].clone().requires_grad_())
        more = options | ({"bias": inputs[3]} if "bias" in options else {})
        out, weights = regard.attention(*inputs[:3], **more, return_weights=True, backend="kernel")
        grads = torch.autograd.grad(out.square().sum(), inputs)
        return [out.detach(), *grads, weights[1, 2], *flatten(weights.summary(pool=(50, 70)))]

    one, *others = with_threads(run)
    for other in others:
        for x, y in zip(one, other):
            assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def flatten(summary):
    for x in summary:
        yield from flatten(x) if isinstance(x, tuple) else [x]


def test_one_head_is_computed_alike_by_many_threads():
    """Keys are shared out where there are few queries, and in the gradient always."""
    q, k, v = torch.randn(1, 1, 70, 16), *(torch.randn(1, 1, 9000, 16) for _ in range(2))

    def run():
        few = [x.clone().requires_grad_() for x in (q[:, :, :40], k, v)]
        out = regard.attention(*few, backend="kernel")
        one = regard.attention(q[:, :, :1], k, v, backend="kernel")
        return out.detach(), one, *torch.autograd.grad(out.square().sum(), few)

    one, *others = with_threads(run)
    assert all(torch.equal(x, y) for other in others for x, y in zip(one, other))
    exact = torch.softmax(q.double() @ k.double().transpose(-1, -2) / 4, -1) @ v.double()
    torch.testing.assert_close(one[0].double(), exact[:, :, :40], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(one[1].double(), exact[:, :, :1], rtol=1e-5, atol=1e-7)


# Every pair of a dtype, heads and sizes.
@pytest.mark.parametrize(
    ("dtype", "heads", "sizes", "apart"),
    [
        (dtype, heads, *laid)
        for n, dtype in enumerate(["float32", "bfloat16", "float16", "float64"])
        for m, heads in enumerate([(1, 1), (6, 2), (8, 1), (5, 5)])
        for k, laid in enumerate([((40, 72), False), ((136, 200), True)])
        if (n + m + k) % 2 == 0
    ],
)
def test_a_query_against_a_long_cache_matches_the_definition(heads, sizes, apart, dtype):
    """One to eight rows that share a key, over several pieces of keys and an odd end.

    Values of up to 128 numbers and more are read in different orders, and ``apart`` is the
    memory of ``(B, L, H, D)``.
    """
    (Hq, Hkv), (D, Dv) = heads, sizes
    q, k, v = torch.randn(2, Hq, 1, D), torch.randn(2, Hkv, 5001, D), torch.randn(2, Hkv, 5001, Dv)
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    if apart:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    options = {"key_lengths": torch.tensor([5001, 3000]), "sinks": torch.randn(Hq)}
    bias, keys = torch.randn(Hq, 1, 5001).to(q.dtype), torch.arange(5001)
    for more in (
        {},
        {"window": (700, 0)},
        {"window": (700, 0), "bias": bias},
        {"softcap": 3.0, "bias": bias},
        {"scale": -0.3},
    ):
        found = regard.attention(q, k, v, backend="kernel", **options, **more)
        first = options["key_lengths"] - 701 if more.pop("window", None) else torch.zeros(2)
        visible = (keys >= first[:, None]) & (keys < options["key_lengths"][:, None])
        visible = visible[:, None, None].numpy()
        assert_attends(found, q, k, v, visible, sinks=options["sinks"], **more)


@pytest.mark.parametrize("huge", [0, 1], ids=["query", "key"])
def test_a_scale_of_zero_has_no_gradient_even_of_huge_numbers(huge):
    """As in the plain formula, which multiplies by the scale before the products overflow."""
    q, k, v = (torch.randn(1, 2, n, 16) for n in (3, 40, 40))
    (q, k)[huge][..., 2, 5], v[..., 9, 4] = 1e30, -1e30
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = regard.attention(*inputs, scale=0.0, backend="kernel")
    dq, dk, _ = torch.autograd.grad(out.sum(), inputs)
    assert (dq == 0).all()
    assert (dk == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seen", ["all", "a first chunk", "later chunks", "none"])
def test_every_gradient_is_written_whatever_its_memory_held(seen, dtype, monkeypatch):
    """Where one chunk of keys adds to a query, several, or none: 1,100 keys are three."""
    first, last = {
        "all": (0, 1100),
        "a first chunk": (20, 300),
        "later chunks": (600, 1090),
        "none": (7, 7),
    }[seen]
    random = torch.Generator().manual_seed(5)
    inputs = [
        torch.randn(1, 2, n, 24, generator=random).to(dtype).requires_grad_()
        for n in (150, 1100, 1100)
    ]
    ends = torch.full((150,), first), torch.full((150,), last)
    ends[1][:70] = first  # these see no key
    out = regard.attention(*inputs, intervals=ends, backend="kernel")
    grad = torch.randn(out.shape, generator=random).to(dtype)
    monkeypatch.setattr(
        kernel, "empty", lambda *what: kernel_calls.empty(*what).fill_(float("nan"))
    )
    found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    monkeypatch.undo()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    right = torch.autograd.grad(
        regard.attention(*exact, intervals=ends, backend="torch"), exact, grad.double()
    )
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for x, y in zip(found, right):
        torch.testing.assert_close(x.double(), y, rtol=bound, atol=bound)
    assert (found[0][:, :, :70] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [50, 301])
def test_what_a_short_query_does_not_see_may_be_nan(keys, dtype):
    q, k, v = (torch.randn(1, 2, n, 16).to(dtype) for n in (2, keys, keys))
    clean = regard.attention(q, k, v, causal=True, backend="kernel")
    k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf
    out = regard.attention(q, k, v, causal=True, backend="kernel")
    torch.testing.assert_close(out[:, :, 0], clean[:, :, 0])
    assert out[:, :, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_many_queries_do_not_see_may_be_nan(dtype):
    """Over blocks of queries that one thread takes together, with and without such values."""
    q, k, v = (torch.randn(2, 4, 700, 16).to(dtype) for _ in range(3))
    clean = regard.attention(q, k, v, causal=True, backend="kernel")
    k[0, :, 500:], v[0, :, 500:] = torch.nan, torch.inf
    out = regard.attention(q, k, v, causal=True, backend="kernel")
    assert torch.equal(out[1], clean[1])
    # With such values weights are not rounded to pairs, so bfloat16 may differ by its rounding.
    atol = 1e-3 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out[0, :, :500], clean[0, :, :500], rtol=0, atol=atol)
    assert out[0, :, 500:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, (50, 0), (51, 0)])
def test_many_queries_see_an_odd_number_of_keys(dtype, window):
    """Pairs of keys are multiplied together; of the last only the first is seen, and with a window
    that reaches 51 keys back of the first only the second."""
    q, k, v = (torch.randn(2, 2, 400, 16).to(dtype) for _ in range(3))
    v[0, :, 333:], v[1, :, 399:] = torch.nan, torch.inf
    rules = {"causal": True, "window": window, "query_start": 0} if window else {}
    found = regard.attention(q, k, v, key_lengths=[333, 399], backend="kernel", **rules)
    for b, n in enumerate((333, 399)):
        rows = slice(0, n if window else None)
        seen = (x[b, :, :n] for x in (k, v))
        right = regard.attention(q[b, :, rows], *seen, backend="kernel", **rules)
        torch.testing.assert_close(found[b, :, rows], right, rtol=0, atol=2e-3)


def test_documents_that_lie_apart_are_told_by_their_ids():
    """Ids in one piece are intervals of keys; these are not."""
    ids = torch.arange(300) % 3
    q, k, v = (torch.randn(2, 300, 16) for _ in range(3))
    found = regard.attention(q, k, v, segments=ids, backend="kernel")
    for i in range(3):
        own = [x[:, ids == i] for x in (q, k, v)]
        torch.testing.assert_close(found[:, ids == i], regard.attention(*own, backend="torch"))


@pytest.mark.parametrize("k", [1, 8, 17, 64, 65, 300])
def test_topk_of_any_size_is_that_of_the_matrix(k):
    """Few are kept sorted while the keys go by, many are chosen from candidates."""
    q, keys = torch.randn(2, 70, 8), torch.randn(2, 300, 8)
    for key in (keys, keys.sort(1).values, keys.sort(1, descending=True).values):
        weights = regard.AttentionWeights(q, key, causal=True)
        values, indices = weights.topk(k)
        torch.testing.assert_close(values, weights[:].topk(k).values, rtol=1e-6, atol=0)
        torch.testing.assert_close(values, weights[:].gather(-1, indices), rtol=1e-6, atol=0)
        assert all(len(row.unique()) == k for row in indices.reshape(-1, k))


@pytest.mark.parametrize("k", [1, 7, 8, 40, 100])
def test_of_equal_weights_topk_gives_the_first_keys(k):
    q, key = torch.ones(1, 70, 1), torch.randint(5, (1, 500, 1)).float()
    weights = regard.AttentionWeights(q, key, query_start=430, causal=True)
    values, indices = weights.topk(k)
    exact = torch.sort(weights[:], dim=-1, descending=True, stable=True)
    torch.testing.assert_close(indices, exact.indices[..., :k])
    torch.testing.assert_close(values, exact.values[..., :k], rtol=1e-6, atol=0)


@pytest.mark.parametrize("how", ["max", "mass"])
@pytest.mark.parametrize("rows", [1, 3, 7, 512, 700, 1300])
def test_pictures_of_many_rows_are_those_of_the_matrix(rows, how):
    """Their bins lie across the chunks of rows that tasks have, or have them to themselves."""
    q, k = (torch.randn(2, 1300, 4, dtype=torch.float64) for _ in range(2))
    weights, expected = (
        regard.attention(q, k, k, causal=True, return_weights=True, backend=backend)[1]
        for backend in ("kernel", "torch")
    )
    for part in ({}, {"rows": slice(5, 1290), "columns": slice(3, 1200)}):
        picture = weights.pool((rows, 90), how, **part)
        exact = expected.pool((rows, 90), how, **part)
        torch.testing.assert_close(picture, exact, equal_nan=True)


HIDDEN = torch.ones(1, 1, 1, 600, dtype=torch.bool)
HIDDEN[..., 128:256] = False  # a tile of keys that is left out
FALLING = (400 - 3 * torch.arange(130))[None]  # later queries see keys before those of others
APART = (torch.arange(130) // 65 * 399)[None]  # and these keys far behind them
SEEN = {
    "all": {},
    "a tile is hidden": {"mask": HIDDEN},
    "a window": {"window": (70, 3)},
    "a window and a hidden tile": {"mask": HIDDEN, "window": (300, None)},
    "intervals that fall": {"intervals": (FALLING, FALLING + 50)},
    "intervals that lie apart": {"intervals": (APART, APART + 150)},
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize(("dtype", "D"), [("float16", 64), ("bfloat16", 64), ("bfloat16", 33)])
def test_keys_that_were_converted_for_other_queries_are_those_of_the_matrix(dtype, D, seen):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, n, D, generator=generator).to(getattr(torch, dtype))
        for n in (130, 600, 600)
    )
    found = regard.AttentionWeights(q, k, backend="kernel", **SEEN[seen])
    exact = regard.AttentionWeights(q.double(), k.double(), backend="reference", **SEEN[seen])
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    near(found.received(), exact.received())
    near(found.pool((10, 20), how="mass").exp(), exact.pool((10, 20), how="mass").exp())
    near(found.topk(3).values, exact.topk(3).values)
    effects, exact = (w.effects(v.to(w.dtype), v.to(w.dtype)[:, :, :130]) for w in (found, exact))
    np.testing.assert_allclose(effects.received(), exact.received(), rtol=2e-3, atol=2e-3)


def test_converted_keys_of_more_bytes_than_are_kept_are_those_of_the_matrix():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 64, generator=generator).half() for n in (60, 16500))
    found = regard.AttentionWeights(q, k, backend="kernel").received()
    exact = regard.AttentionWeights(q.float(), k.float(), backend="kernel").received()
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("width", [4, 8, 12, 20])  # of one bin or two, several are in step
@pytest.mark.parametrize("bins", [1, 5, 9])
def test_the_mass_of_bins_is_that_of_their_keys(width, bins):
    random = np.random.default_rng(width + bins)
    q, k = (random.standard_normal((2, n, 16), dtype=np.float32) for n in (30, width * bins))
    found, expected = (
        regard.AttentionWeights(q, k, backend=name).pool((5, bins), "mass")
        for name in ("kernel", "reference")
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_mass_of_a_picture_has_the_logarithm_of_float32():
    """Next to float64 over the whole range: also of what is close to 1, tiny or 0."""
    q = torch.ones(1, 4000, 1)
    key = torch.cat([torch.zeros(1, 1), torch.linspace(0, -110, 3999)[:, None]])[None]
    found = regard.AttentionWeights(q, key, scale=1.0).pool((1, 4000), "mass")
    exact = regard.AttentionWeights(q.double(), key.double(), scale=1.0).pool((1, 4000), "mass")
    seen = exact > -87  # below, float32 has fewer digits
    torch.testing.assert_close(found[seen], exact[seen].float(), rtol=3e-7, atol=3e-6)
    assert (found[~seen] < -86.9).all()
    assert found.isneginf().any()


@pytest.mark.parametrize("causal", [False, True])
def test_the_entropy_of_long_rows_is_no_less_exact_than_that_of_the_matrix(causal):
    q, k = (torch.randn(1, 1, 8192, 64, generator=torch.Generator().manual_seed(x)) for x in (0, 1))
    q = q[:, :, -512:]
    found = regard.attention(q, k, k, causal=causal, backend="kernel", return_weights=True)[1]

    visible = np.tri(512, 8192, 8192 - 512, bool) if causal else True

    def entropy(q, k):
        w = attend(q, k, k[..., :1], visible)[1]
        return add_up(-w * np.log(w, where=w > 0, out=np.zeros_like(w)))

    q, k, errors = q.numpy(), k.numpy(), Errors()
    errors.add(found.entropy()[..., None], entropy(q.astype(float), k.astype(float)), entropy(q, k))
    assert errors.ratio < 1


def test_python_ends_while_daemon_threads_compute():
    code = """
        import threading, time
        import numpy as np
        import regard

        q = np.ones((1, 20_000, 64), np.float32)

        def compute():
            while True:
                regard.attention(q, q, q)

        for _ in range(3):
            threading.Thread(target=compute, daemon=True).start()
        time.sleep(0.3)
        print("ending", flush=True)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (0, "ending\n", "")


@pytest.fixture
def checks(monkeypatch):
    """As in a build with -DREGARD_CHECKS=ON."""
    monkeypatch.setattr(kernel_calls, "checks", True)


ARRAYS = {
    "query": {},
    "key": {},
    "value": {},
    "mask": {"mask": np.ones((3, 5), bool)},
    "bias": {"bias": np.ones((2, 1, 5), np.float32)},
}


@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
@pytest.mark.parametrize("name", ARRAYS)
def test_with_checks_an_array_that_reaches_beyond_its_memory_is_named(
    name, library, checks, monkeypatch
):
    arrays = [library(np.ones((2, n, 4), np.float32)) for n in (3, 5, 5)]
    options = {key: library(x) for key, x in ARRAYS[name].items()}
    regard.attention(*arrays, **options, backend="kernel")
    short = [*arrays, *options.values()][min(list(ARRAYS).index(name), 3)]
    memory = kernel_calls._memory

    def told_short(x):
        begin, size = memory(x)
        return begin, size - (kernel_calls.address_of(x) == kernel_calls.address_of(short))

    monkeypatch.setattr(kernel_calls, "_memory", told_short)
    with pytest.raises(IndexError, match=f"{name} reaches beyond its memory"):
        regard.attention(*arrays, **options, backend="kernel")


numbers = np.random.default_rng(0).standard_normal((3, 9, 4, 6), dtype=np.float32)
VIEWS = {
    "part": numbers[1:, 2:7, :, :5],
    "transposed": numbers.swapaxes(1, 2)[:1],
    "broadcast": np.broadcast_to(numbers[:1], numbers.shape)[1:],
    "backwards": numbers[::-1, :, ::-1],
    "empty": numbers[:, :0],
    "torch": torch.asarray(numbers)[1:, 2:7, :, :5],
    "torch, expanded": torch.asarray(numbers)[:1].expand(5, 9, 4, 6)[3:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_with_checks_every_view_lies_within_its_memory(name, checks):
    x = VIEWS[name]
    alone = x.clone() if torch.is_tensor(x) else x.copy()
    exact = regard.attention(alone, alone, alone, causal=True, backend="kernel")
    found = regard.attention(x, x, x, causal=True, backend="kernel")
    np.testing.assert_array_equal(found, exact)


def test_arrays_of_another_shape_than_the_calls_are_not_read():
    from regard._call.checks import read_call

    call = read_call(*(np.ones((1, 2, n, 4), np.float32) for n in (3, 5, 5)))
    read, _held = kernel_calls.call_as_read(call)
    read.value = kernel_calls.array_ref(np.ones((1, 2, 4, 4), np.float32))
    with pytest.raises(ValueError, match="value has another shape than the call"):
        kernel.kernels.forward(read, None, 0, 0, 1)
