"""Target amx: bfloat16 by products of tiles, here by an emulation that has their bits.

The emulation runs on any processor with AVX-512. It is built once, hardly optimised, and linked
with what the install compiled, where this is kept.
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from built_objects import KERNELS, ROOT, definitions, installed_objects
from regard._backends import kernel

TESTS = Path(__file__).parent
COMPILER = next(filter(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++")), None)
pytestmark = [
    pytest.mark.xdist_group("tiles"),
    pytest.mark.skipif(
        COMPILER is None or shutil.which("cmake") is None or kernel.kernels is None,
        reason="this machine has no C++ compiler and cmake, with which tiles are emulated",
    ),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="only x86-64 has tiles"
    ),
]
needs_avx512 = pytest.mark.skipif(
    kernel.kernels is not None and "avx512" not in kernel.kernels.targets(),
    reason="this processor has no AVX-512, with which tiles are emulated",
)
needs_amx = pytest.mark.skipif(
    kernel.kernels is None or "amx" not in kernel.kernels.targets(),
    reason="this processor, or its system, has no AMX",
)


FLAGS = ["-std=gnu++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
         "-fno-trapping-math", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma",
         "-mprefer-vector-width=512", "-Og", "-fexpensive-optimizations"]  # fmt: skip


def link_with_the_installed(compile, objects, folder, flags):
    """A module of the installed objects and this target: the rest takes as long to compile."""
    folder.mkdir(exist_ok=True)
    others = [path for path in objects if path.name != "dispatch.cpp.o"]
    known = definitions({path.name.removesuffix(".cpp.o") for path in others} | {"amx_emulated"},
                        emulates=True)  # fmt: skip
    module = folder / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = KERNELS / "target" / "amx_emulated.cpp", KERNELS / "dispatch.cpp"
    compile(COMPILER, *FLAGS, *flags.split(), "-c", sources[0], "-o", folder / "target.o")
    compile(COMPILER, *FLAGS[:3], *known, "-c", sources[1], "-o", folder / "dispatch.o")
    compile(COMPILER, "-shared", folder / "target.o", folder / "dispatch.o", *others, "-pthread",
            "-ldl", "-o", module)  # fmt: skip
    run_bash(f"PWD= use_in {folder}")


def build_all(folder, flags):
    """The module as an install builds it, with fewer targets; none is tried before."""
    # PWD is what kernels.bash puts before a folder: this one has its whole path.
    words = "-DREGARD_EMULATE=ON -DREGARD_TARGETS=amx_emulated -DCMAKE_CXX_FLAGS_NONE=-O1"
    tried = " ".join(f"-Dbuilds_{name}=ON" for name in ("portable", "avx512", "amx_emulated"))
    build = f"PWD= build {folder} {COMPILER} '{flags}' {words} {tried}"
    run_bash(f"{build} || {{ cat {folder}.log; exit 1; }}")


def run_bash(command):
    done = subprocess.run(
        ["bash", "-c", f"source scripts/kernels.bash; {command}"], cwd=ROOT, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


# Runs Python for each line of words that it reads, in a fork of itself, which has loaded torch and
# what the first call of an operator loads: that takes as long as what most of them ask.
FORKING = """
import gc, json, os, runpy, signal, sys, tempfile, traceback
import numpy.random, torch
import regard._backends.kernel_ops, regard._backends.torch_reductions
import torch.fx.experimental.symbolic_shapes
gc.freeze()
def run(kind, *rest):
    if kind == "-c":
        exec(rest[0], {"__name__": "__main__"})
        return
    sys.argv[:] = rest if kind == "-m" else (kind, *rest)
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")
for line in sys.stdin:
    out, error = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        os.dup2(out.fileno(), 1), os.dup2(error.fileno(), 2)
        status = 0
        try:
            run(*json.loads(line))
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    told = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    for file in (out, error):
        file.seek(0)
        told.append(file.read().decode())
    print(json.dumps(told), flush=True)
"""


@contextlib.contextmanager
def built_in(compile, folder, flags=""):
    """Runs Python on a build of the kernels that emulates tiles, or has the flags' instructions."""
    if objects := installed_objects(binding=True):
        link_with_the_installed(compile, objects, folder, flags)
    else:
        build_all(folder, flags)
    with subprocess.Popen(
        [sys.executable, "-c", FORKING],
        env=os.environ | {"PYTHONPATH": f"{folder}/path", "REGARD_TARGET": "amx_emulated"},
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as forking:  # fmt: skip

        def run(*words):
            forking.stdin.write(json.dumps([*map(str, words)]) + "\n")
            forking.stdin.flush()
            status, out, error = json.loads(forking.stdout.readline())
            assert status == 0, (out + error)[-6000:]
            return out

        yield run


@pytest.fixture(scope="module")
def emulated(compile, tmp_path_factory):
    """Runs Python on a build of the kernels that emulates tiles."""
    with built_in(compile, tmp_path_factory.mktemp("tiles")) as run:
        yield run


@needs_avx512
def test_random_calls_match_float64(emulated):
    said = emulated(TESTS / "fuzz.py", "--calls", 120, "--seed", 3)
    assert said.startswith("amx_emulated: 120 calls in ")
    assert ", 0 failures; " in said


@needs_avx512
@pytest.mark.slow
def test_the_tests_of_the_operator_pass(emulated):
    names = ("attention", "same_bits", "gradients", "row_statistics", "masks")
    # What is not of 16 bits is computed by avx512.
    own = "(bfloat16 or (float16 and (kernel or bits)))"
    chosen = f"{own} and not (reference or auto or compiled or vmap or 1025)"
    files = [TESTS / f"test_{name}.py" for name in names]
    said = emulated("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files)
    assert int(said.split(" passed")[0].split()[-1]) > 130


# Scores of one key each, of queries that are enough for tiles, beside their definition: fused
# multiply-adds of the first numbers of pairs and of the second, 32 numbers at a time, without
# denormal numbers. In float64 the sum of a product and a float is exact here.
ORDER = """
import numpy as np, regard, torch

def flushed(x):
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)

def score(q, k):
    total = np.zeros(q.shape[:-1], np.float32)
    for at in range(0, q.shape[-1], 32):
        both = []
        for first in (at, at + 1):
            sum = np.zeros_like(total)
            for d in range(first, min(at + 32, q.shape[-1]), 2):
                sum = flushed(np.float64(flushed(q[..., d])) * flushed(k[..., d]) + sum)
            both.append(sum)
        total = flushed(total + flushed(both[0] + both[1]))
    return total

rng = np.random.default_rng(0)
for D in (1, 31, 32, 33, 64, 80, 128, 200):
    q, k = (rng.standard_normal((3, n, D)) * rng.choice([1, 30], (3, n, D)) for n in (40, 1))
    q[..., ::3] *= np.float32(1e-39)  # denormal
    k[1] *= np.float32(1e-30)
    q[1] *= np.float32(1e-20)  # their products are denormal, or less
    q, k = (torch.tensor(x, dtype=torch.float32).bfloat16()[None] for x in (q, k))
    _, statistics = regard.attention(q, k, k, scale=1.0, return_statistics=True, backend="kernel")
    expected = score(q.float().numpy(), k.float().numpy())
    found = statistics.maximum.float().numpy()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert (found == expected).all(), (D, np.abs(found - expected).max())
    print(D, np.abs(expected).max(), np.unique(expected).size)
"""


@needs_avx512
def test_a_score_is_added_as_the_processors_manual_says(emulated):
    assert len(emulated("-c", ORDER).splitlines()) == 8


@needs_amx
def test_a_score_is_added_by_the_processor_as_its_manual_says():
    done = subprocess.run(
        [sys.executable, "-c", ORDER], env=os.environ | {"REGARD_TARGET": "amx"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) == 8, done.stderr


# Output, gradients and reductions of shapes that take every path of the tiles, as a hash.
BITS = """
import hashlib, regard, torch
digest = hashlib.sha256()
add = lambda x: digest.update(x.detach().double().numpy().tobytes())
torch.manual_seed(0)
for (Lq, Lk, D, Dv) in [(1, 70, 64, 64), (40, 40, 16, 8), (97, 1025, 64, 64), (300, 300, 80, 33)]:
    for options in ({}, {"causal": True}, {"window": (20, 3), "softcap": 5.0}):
        q, k, v = (torch.randn(2, 3, n, d).bfloat16().requires_grad_()
                   for n, d in ((Lq, D), (Lk, D), (Lk, Dv)))
        out, weights = regard.attention(q, k, v, return_weights=True, backend="kernel", **options)
        add(out)
        for gradient in torch.autograd.grad(out.float().square().sum(), (q, k, v)):
            add(gradient)
        for result in (weights.entropy(), weights.received(), weights.topk(3).values, weights[0, 1],
                       weights.pool((4, 4)), weights.at([0] * 5, list(range(5)))):
            add(result)
print(digest.hexdigest())
"""


# Asks Linux for tiles, as the target that has this name does not.
REQUEST = "import ctypes; assert ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0\n"


@needs_amx
def test_the_instructions_give_the_bits_of_the_emulation(emulated, compile, tmp_path):
    # Of one source with one compiler's options: others contract other sums, that of tanh is one.
    with built_in(compile, tmp_path / "build", "-DREGARD_TILE_INSTRUCTIONS") as instructions:
        assert instructions("-c", REQUEST + BITS) == emulated("-c", BITS)


@needs_avx512
def test_bits_do_not_depend_on_threads(emulated):
    twice = f"import regard\nfor n in (1, 3):\n    regard.set_num_threads(n)\n    exec({BITS!r})"
    one, three = emulated("-c", twice).splitlines()
    assert one == three


def test_what_keeps_a_process_from_tiles_is_said():
    obstacle = kernel.kernels.amx_obstacle
    here = {"instructions": True, "kept": True, "given": True, "refused": 0}
    assert obstacle(**here) == ""
    for lacks, said in [
        ({"instructions": False}, "this processor lacks its instructions"),
        ({"kept": False}, "the operating system does not keep its tiles"),
        ({"given": False}, "this Linux kernel gives processes no tiles: 5.16 and newer do"),
        ({"refused": 1}, "the operating system refuses tiles to this process"
                         " (Operation not permitted)"),
    ]:  # fmt: skip
        assert obstacle(**(here | lacks)) == said
    assert ("amx" in kernel.kernels.targets()) == ("amx" not in kernel.kernels.obstacles())
