"""The kernels and their vectors without Python: stored results, on this machine and for ARM."""

import itertools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import stored_cases
from built_objects import KERNELS, definitions, installed_objects
from regard._backends import kernel

TESTS = Path(__file__).parent
SOURCES = [TESTS / "stored_cases.cpp", *(KERNELS / f"{n}.cpp" for n in
           ("dispatch", "mask", "threads", "visibility"))]  # fmt: skip
FLAGS = ["-std=gnu++20", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall",
         "-Wextra", "-Werror"]  # fmt: skip
COMPILER = next(filter(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++")), None)
ARM_COMPILER, ARM = "aarch64-linux-gnu-g++", "qemu-aarch64"
TYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="this machine has no C++ compiler")
pytestmark = pytest.mark.xdist_group("stored cases")  # they share what is compiled


def run(*command, **environment):
    return subprocess.run(
        list(map(str, command)), env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=1200,
    )  # fmt: skip


def compile_target(compile, compiler, folder, target, *flags, kernels=KERNELS):
    made = folder / f"{target}.o"
    compile(compiler, *FLAGS, "-Wno-maybe-uninitialized", "-Wno-uninitialized", *flags,
            "-c", kernels / "target" / f"{target}.cpp", "-o", made)  # fmt: skip
    return made


def compile_driver(compile, compiler, folder, built, *flags):
    """The driver with some targets, each with the flags that it needs."""
    objects = [
        compile_target(compile, compiler, folder, target, *flags, *own)
        for target, own in built.items()
    ]
    driver = folder / "stored_cases"
    compile(compiler, *FLAGS, *flags, *definitions(built), *SOURCES, *objects, "-pthread", "-ldl",
            "-o", driver)  # fmt: skip
    return driver


@pytest.fixture(scope="module")
def driver(compile, tmp_path_factory):
    """The driver with the installed kernels, or else with portable, not optimised."""
    folder = tmp_path_factory.mktemp("driver")
    if not (objects := installed_objects()):
        return compile_driver(compile, COMPILER, folder, {"portable": []})
    compile(COMPILER, *FLAGS, SOURCES[0], *objects, "-pthread", "-ldl", "-o", folder / "driver")
    return folder / "driver"


def cases(path):
    """The stored file: ``case → name → array``."""
    found, data, at = {}, path.read_bytes(), 0
    while at < len(data):
        end = data.index(b"\n", at)
        kind, name, *shape = data[at:end].decode().split()
        at = end + 1
        if kind == "case":
            case = found[name] = {}
            continue
        count, dtype = int(np.prod([int(n) for n in shape])), TYPES.get(kind) or np.dtype(kind)
        case[name] = np.frombuffer(data, dtype, count, at).reshape([int(n) for n in shape])
        at += count * dtype.itemsize
    return found


def write(path, found):
    with path.open("wb") as file:
        for case, fields in found.items():
            stored_cases.write_case(file, case, fields)


@needs_compiler
@pytest.mark.parametrize("target", kernel.kernels.targets() if kernel.kernels else ["portable"])
def test_the_kernels_give_the_stored_results(driver, target):
    done = run(driver, stored_cases.PATH, REGARD_TARGET=target)
    if "this build lacks it" in done.stderr:
        pytest.skip("the install keeps no objects; portable alone is compiled here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"\n{target}: {len(cases(stored_cases.PATH))} passed\n")


@needs_compiler
def test_a_wrong_result_is_found_in_every_array_of_every_case(driver, tmp_path):
    found, spoiled = cases(stored_cases.PATH), []
    for case, fields in found.items():
        for name in [name for name in fields if name.startswith("right.")]:
            right, bound = fields[name].ravel().copy(), fields[name.replace("right", "bound")]
            with np.errstate(over="ignore"):
                off = np.nonzero(np.isfinite(right) & np.isfinite(bound.astype(float).ravel()))[0]
            if len(off):
                at = off[len(off) // 2]
                right[at] += 2 * bound.astype(float).ravel()[at] + abs(right[at]) * 1e-6 + 1e-30
                fields[name] = right.reshape(fields[name].shape)
                spoiled.append((case, name.removeprefix("right.")))
    write(tmp_path / "spoiled.bin", found)
    done = run(driver, tmp_path / "spoiled.bin")
    said = {line.split()[0]: line for line in done.stdout.splitlines()}
    missed = [(case, name) for case, name in spoiled if f"{name} at " not in said[case]]
    assert (done.returncode, missed) == (1, [])
    assert {name for _, name in spoiled} == {
        name[6:] for fields in found.values() for name in fields if name.startswith("right.")
    }


@needs_compiler
def test_a_fault_of_the_kernels_is_found(compile, tmp_path):
    """Values that masks hide are multiplied with their weights of 0: NaN where they are none."""
    shutil.copytree(KERNELS, tmp_path / "kernels")
    forward = tmp_path / "kernels" / "forward-inl.h"
    faulty = forward.read_text().replace("!finite_sums(p, m.state)", "false")
    assert faulty != forward.read_text()
    forward.write_text(faulty)
    made = compile_target(compile, COMPILER, tmp_path, "portable", kernels=tmp_path / "kernels")
    others = [x for x in installed_objects() or [] if not x.name.startswith("portable.")]
    sources = SOURCES[:1] if others else [*definitions(["portable"]), *SOURCES]
    driver = tmp_path / "driver"
    compile(COMPILER, *FLAGS, *sources, made, *others, "-pthread", "-ldl", "-o", driver)
    done = run(driver, stored_cases.PATH, REGARD_TARGET="portable")
    lines = [line.split() for line in done.stdout.splitlines()[:-1]]
    wrong = {case for case, *said in lines if said != ["right"]}
    assert (done.returncode, wrong) == (1, {"masked-nan-float32", "masked-nan-bfloat16"})


@needs_compiler
def test_the_driver_says_why_it_cannot_compare(driver, tmp_path):
    missing = run(driver, tmp_path / "missing.bin")
    assert (missing.returncode, missing.stderr) == (
        2, f"stored_cases: {tmp_path / 'missing.bin'} cannot be read\n"
    )  # fmt: skip
    (tmp_path / "cut.bin").write_bytes(stored_cases.PATH.read_bytes()[:5000])
    cut = run(driver, tmp_path / "cut.bin")
    assert cut.returncode == 2
    assert " ends within " in cut.stderr
    (tmp_path / "none.bin").write_bytes(b"")
    assert run(driver, tmp_path / "none.bin").returncode == 1


@pytest.mark.skipif(kernel.kernels is None, reason="the kernels read the options of the cases")
def test_the_stored_cases_are_those_that_the_script_writes(tmp_path):
    stored_cases.write(tmp_path / "anew.bin")
    stored, anew = cases(stored_cases.PATH), cases(tmp_path / "anew.bin")
    assert {n: list(x) for n, x in stored.items()} == {n: list(x) for n, x in anew.items()}
    for case, fields in stored.items():
        for name, x in fields.items():
            near = {"right": 1e-5, "bound": 1e-2}.get(name.split(".")[0], 0.0)
            pair = (y if y.dtype.kind in "ib" else y.astype(float) for y in (anew[case][name], x))
            atol = 1e-30 if near else 0.0
            if name.startswith("bound.") and stored[case][f"right.{name[6:]}"].dtype == np.float64:
                # A bound of some roundings is a difference of numbers with roundings of their own.
                right = np.nan_to_num(stored[case][f"right.{name[6:]}"], posinf=0, neginf=0)
                atol = 2.0**-51 * max(1.0, abs(right).max(initial=0))
            np.testing.assert_allclose(*pair, near, atol, err_msg=f"{case}: {name}")
    assert stored_cases.PATH.stat().st_size < 300_000


AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DREGARD_LANES=16"]
VECTORS = {  # with what each is compiled
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-DREGARD_LANES=8"],
    "avx512": AVX512,
    "avx512_bf16": [*AVX512, "-mavx512bf16", "-DREGARD_PAIRS"],
    "neon": ["-DREGARD_LANES=4", "-DREGARD_ARM"],
    "neon_bf16": ["-march=armv8.2-a+bf16", "-DREGARD_LANES=4", "-DREGARD_ARM", "-DREGARD_PAIRS"],
}


def assert_vectors_keep_their_promises(compile, compiler, target, folder, *before):
    named = [] if target == "portable" else [f"-DREGARD_NAMESPACE={target}"]
    flags = [*FLAGS, "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-O1"]
    static = ["-static"] if before else []
    program = folder / target
    compile(compiler, *flags, *VECTORS[target], *named, *static, TESTS / "vectors.cpp", "-o",
            program)  # fmt: skip
    done = run(*before, program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_compiler
@pytest.mark.parametrize("target", kernel.kernels.targets() if kernel.kernels else ["portable"])
def test_the_vectors_keep_their_promises(compile, tmp_path, target):
    if target not in VECTORS:
        pytest.skip("its vectors are those of avx512")
    assert_vectors_keep_their_promises(compile, COMPILER, target, tmp_path)


@pytest.mark.parametrize("target", ["neon", "neon_bf16"])
def test_the_vectors_of_arm_keep_their_promises(compile, tmp_path, target):
    needs_arm_tools()
    emulator = ARM, "-cpu", "max"
    assert_vectors_keep_their_promises(compile, ARM_COMPILER, target, tmp_path, *emulator)


def needs_arm_tools():
    """Skips where nothing compiles for ARM; fails in CI, whose Linux machines have it."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("ARM is emulated on x86-64 Linux alone")
    missing = [tool for tool in (ARM_COMPILER, ARM) if shutil.which(tool) is None]
    if not missing:
        return
    way_out = "apt-get install g++-aarch64-linux-gnu qemu-user"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI needs {' and '.join(missing)}: {way_out}")
    pytest.skip(f"no {' and '.join(missing)} here; {way_out}")


@pytest.fixture(scope="module")
def arm_driver(compile, tmp_path_factory):
    needs_arm_tools()
    built = {"neon": [], "neon_bf16": ["-march=armv8.2-a+bf16"]}
    folder = tmp_path_factory.mktemp("arm")
    return compile_driver(compile, ARM_COMPILER, folder, built, "-Og", "-static")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["neon_bf16", "neon"])
def test_arm_gives_the_stored_results(arm_driver, target):
    done = run(ARM, "-cpu", "max", arm_driver, stored_cases.PATH, REGARD_TARGET=target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"\n{target}: {len(cases(stored_cases.PATH))} passed\n")


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "target"), [("max", "neon_bf16"), ("cortex-a72", "neon")])
def test_an_arm_processor_has_the_best_that_it_has_instructions_for(
    arm_driver, tmp_path, processor, target
):
    few = dict(itertools.islice(cases(stored_cases.PATH).items(), 3))
    write(tmp_path / "few.bin", few)
    done = run(ARM, "-cpu", processor, arm_driver, tmp_path / "few.bin", REGARD_TARGET="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"\n{target}: 3 passed\n")


@pytest.mark.slow
def test_a_processor_without_bfloat16_refuses_its_dot_products(arm_driver):
    done = run(ARM, "-cpu", "cortex-a72", arm_driver, stored_cases.PATH, REGARD_TARGET="neon_bf16")
    assert done.returncode == 2
    assert "neon_bf16: this processor lacks its instructions" in done.stderr


# Every product of one kind of words.
PRODUCTS = """
#include "multiply-inl.h"
namespace regard::REGARD_NAMESPACE {
template <class Op>
void* products[] = {(void*)multiply<Op, false, Epilogue::set>,
                    (void*)multiply<Op, false, Epilogue::set_and_maximum>,
                    (void*)multiply<Op, false, Epilogue::add>,
                    (void*)multiply<Op, true, Epilogue::add>};
template void* products<OPERATION>[4];
}
"""


@pytest.mark.parametrize(("target", "operation", "instruction"), [
    ("neon", "Plain<float>", "fmla"), ("neon", "Plain<double>", "fmla"),
    ("neon_bf16", "Pairs", "bfdot"),
])  # fmt: skip
def test_arm_multiplies_and_adds_in_one_instruction(
    compile, tmp_path, target, operation, instruction
):
    needs_arm_tools()
    named = [f"-DREGARD_NAMESPACE={target}", f"-DOPERATION={operation}", "-I", KERNELS]
    made = tmp_path / "products.o"
    compile(ARM_COMPILER, *FLAGS, "-O3", *VECTORS[target], *named, "-c", "-x", "c++", "-", "-o",
            made, source=PRODUCTS)  # fmt: skip
    said = run("aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", made).stdout
    functions = re.findall(r"^\w+ <(.*)>:\n((?:.+\n)+)", said, re.MULTILINE)
    bodies = [body for name, body in functions if "register_blocks<" in name]
    assert len(bodies) == 4 * 4  # for 1, 2, 3 and 4 vectors
    assert all(f"\t{instruction}\t" in body for body in bodies)
