"""The sources of the kernels: every header stands by itself, and what Python cannot reach holds."""

import os
import platform
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from compiled import Compiler

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "kernels"
COMPILER = next(filter(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++")), None)
HEADERS = {path.name: path.read_text() for path in sorted(KERNELS.glob("*.h"))}
OWN = re.compile(r'^#include "(.*)"\n', re.MULTILINE)
INCLUDES = {name: OWN.findall(text) for name, text in HEADERS.items()}
# What is there only where the instruction set has pairs.
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
PAIRS = {
    "x86_64": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DREGARD_LANES=16",
               "-DREGARD_PLAIN_PAIRS"],
    "aarch64": ["-march=armv8.2-a+bf16", "-DREGARD_LANES=4", "-DREGARD_ARM"],
}.get(MACHINE)  # fmt: skip
STANDARD = "-std=c++20"
CHECK = COMPILER, STANDARD, "-fsyntax-only"
pytestmark = pytest.mark.skipif(COMPILER is None, reason="this machine has no C++ compiler")


def longest(header, left):
    """The longest chain of headers from this one, each including the next, of those left."""
    further = [longest(name, left) for name in INCLUDES[header] if name in left]
    return [header, *max(further, key=len, default=[])]


def chains():
    """All headers, each once."""
    left = set(HEADERS)
    while left:
        chain = max((longest(name, left) for name in sorted(left)), key=len)
        left -= set(chain)
        yield chain


CHAINS = list(chains())


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The headers, each with the next of its chain before all else that it includes.

    What stands first is compiled by itself there too, so that a chain takes one compiler.
    """
    folder = tmp_path_factory.mktemp("kernels")
    following = dict(pair for chain in CHAINS for pair in pairwise(chain))
    for name, text in HEADERS.items():
        own = sorted(INCLUDES[name], key=lambda other: other != following.get(name))
        lines = "".join(f'#include "{other}"\n' for other in own)
        text = OWN.sub("", text).replace("#pragma once\n", f"#pragma once\n{lines}", 1)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("chain", CHAINS, ids=" ".join)
def test_every_header_compiles_by_itself(compile, copies, chain):
    source = f'#include "{chain[0]}"'
    compile(*CHECK, "-I", copies, "-x", "c++", "-", source=source)


@pytest.mark.skipif(PAIRS is None, reason="this processor has no pairs of bfloat16")
def test_pairs_compile_by_themselves(compile):
    source = '#include "pairs-inl.h"'
    named = ["-DREGARD_NAMESPACE=pairs", "-DREGARD_PAIRS"]
    compile(*CHECK, *PAIRS, *named, "-I", KERNELS, "-x", "c++", "-", source=source)


@pytest.mark.skipif(MACHINE != "x86_64", reason="only x86-64 has tiles")
def test_tiles_compile_by_themselves(compile):
    source = '#include "tiles-inl.h"'
    named = ["-DREGARD_NAMESPACE=tiles", "-DREGARD_PAIRS", "-DREGARD_TILES=2"]
    compile(*CHECK, *PAIRS, *named, "-I", KERNELS, "-x", "c++", "-", source=source)


def test_jobs_survive_the_end_of_memory_and_arrays_are_seen_to_leave_theirs(compile, tmp_path):
    sources = [TESTS / "kernels.cpp", KERNELS / "threads.cpp"]
    compile(COMPILER, STANDARD, *sources, "-pthread", "-o", tmp_path / "kernels", "-ldl")
    done = subprocess.run([tmp_path / "kernels"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_was_compiled_is_compiled_again_where_a_header_or_an_option_changed(tmp_path):
    source, header = tmp_path / "tests" / "main.cpp", tmp_path / "kernels" / "n.h"
    kept, program = tmp_path / "kept", tmp_path / "program"
    for path in (source.parent, header.parent, kept):
        path.mkdir()
    source.write_text('#include "all.h"\nint main() { return N + M; }')
    (header.parent / "all.h").write_text('#include "n.h"')
    for n, m in ((3, 0), (4, 0), (4, 9), (3, 0)):
        header.write_text(f"#define N {n}")
        (header.parent / "other.h").write_text(f"#define OTHER {n + m}")  # which nothing includes
        Compiler(kept)(COMPILER, f"-DM={m}", "-I", header.parent, source, "-o", program)
        assert subprocess.run([program], check=False).returncode == n + m
    header.write_text("#define N 4")
    Compiler(kept)(COMPILER, "-DM=0", "-I", header.parent, source, "-o", program)
    assert len(list(kept.iterdir())) == 3
    words = COMPILER, "-I", header.parent, "-x", "c++", "-fsyntax-only", "-"
    for n in (5, 6, 5):
        header.write_text(f"#define N {n}")
        Compiler(kept)(*words, source='#include "n.h"\nint main() { return N; }\n')
    assert len(list(kept.iterdir())) == 5
    with pytest.raises(AssertionError, match=r"was not declared|undeclared"):
        Compiler(kept)(COMPILER, "-I", header.parent, source, "-o", program)
