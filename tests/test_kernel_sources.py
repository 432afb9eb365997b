"""The sources of the kernels: every header stands by itself, and what Python cannot reach holds."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "kernels"
COMPILER = next(filter(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++")), None)
HEADERS = sorted(path.name for path in KERNELS.glob("*.h"))
# What is there only where the instruction set has pairs.
PAIRS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DREGARD_NAMESPACE=pairs",
         "-DREGARD_LANES=16", "-DREGARD_PAIRS", "-DREGARD_EMULATED"]  # fmt: skip
pytestmark = pytest.mark.skipif(COMPILER is None, reason="this machine has no C++ compiler")
needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="only x86-64 has pairs of bfloat16"
)


def compile(*arguments, source=""):
    done = subprocess.run(
        [COMPILER, "-std=c++20", *map(str, arguments)],
        input=source, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("header", HEADERS)
def test_every_header_compiles_by_itself(header):
    compile("-fsyntax-only", "-I", KERNELS, "-x", "c++", "-", source=f'#include "{header}"')


@needs_x86
def test_pairs_compile_by_themselves():
    source = '#include "pairs-inl.h"'
    compile(*PAIRS, "-fsyntax-only", "-I", KERNELS, "-x", "c++", "-", source=source)


def test_jobs_survive_the_end_of_memory_and_arrays_are_seen_to_leave_theirs(tmp_path):
    sources = [TESTS / "kernels.cpp", KERNELS / "threads.cpp"]
    compile(*sources, "-pthread", "-o", tmp_path / "kernels", "-ldl")
    done = subprocess.run([tmp_path / "kernels"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
