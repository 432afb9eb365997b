"""What an install gives, with a C++ compiler and without, and what .ci/run does."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
import zlib
from pathlib import Path

import pytest

import regard
from built_objects import installed_objects

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "regard"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD_TOOLS = ("cmake", "ninja", "make", "gmake")
HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++", os.environ.get("CXX") or "c++")))
pytestmark = pytest.mark.xdist_group("install")  # two wheels serve many of the tests
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="this machine has no C++ compiler")
needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="it leaves out what x86-64 has"
)


def run(command, **environment):
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,  # a busy machine is no failure
    )
    assert result.returncode == 0, result.stdout
    return " ".join(result.stdout.split())  # cmake breaks its lines where it likes


def build_wheel(build, wheels, **environment):
    """The wheel's path and what the build said."""
    said = run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
        + ["-C", f"build-dir={build}", "-w", str(wheels), str(ROOT)],
        **environment,
    )
    (wheel,) = wheels.glob("*.whl")
    return wheel, said


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """An environment whose PATH leads to the build tools and to no compiler."""
    folder = tmp_path_factory.mktemp("bin")
    for tool in filter(shutil.which, BUILD_TOOLS):
        (folder / tool).symlink_to(shutil.which(tool))
    return {"PATH": str(folder), "CXX": "", "CC": ""}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """One build folder for both wheels, as an install after an install has it."""
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """What was compiled of the kernels, which is not compiled twice for the same instructions.

    At first what the install compiled, where it is kept: all but the instruction sets that are left
    out here, and what depends on which these are.
    """
    folder = tmp_path_factory.mktemp("objects")
    if compiled := installed_objects(binding=True):
        binding = compiled.pop().parent / "CMakeFiles" / "nanobind-static.dir"
        for path in [*compiled, *binding.rglob("*.o")]:
            if path.parent.name != "target" or path.name == "portable.cpp.o":
                shutil.copy(path, folder)
        (folder / "dispatch.cpp.o").unlink()
    return folder


@pytest.fixture(scope="module")
def without_compiler(hidden, build, tmp_path_factory):
    return build_wheel(build, tmp_path_factory.mktemp("without"), **hidden)


@pytest.fixture(scope="module")
def with_compiler(without_compiler, build, objects, tmp_path_factory):
    """Built after the other, in its folder: a compiler that came later must be found.

    It fails at AVX2 and AVX-512, and builds the rest without optimising. What is optimised is built
    by the install that is tested.
    """
    if not HAS_COMPILER:
        pytest.skip("this machine has no C++ compiler")
    folder = tmp_path_factory.mktemp("with")
    cxx = compiler_that_fails(folder, objects, "-mavx*")
    return build_wheel(build, folder, CXX=cxx)


def import_from(wheel, folder, code, **environment):
    """Run code on the wheel's regard alone: the installed one is out of sight."""
    zipfile.ZipFile(wheel).extractall(folder)
    paths = [folder, *(p for p in sys.path if p.endswith("site-packages"))]
    prologue = f"import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in \
str(type(f)).lower()]; sys.path[:0] = {list(map(str, paths))!r}; import regard; \
assert regard.__file__.startswith({str(folder)!r}), regard.__file__; "
    return run([sys.executable, "-W", "error", "-c", prologue + code], **environment)


def test_an_install_without_a_compiler_succeeds_and_says_so(without_compiler):
    wheel, said = without_compiler
    assert "no C++ compiler was found" in said
    assert "installed without its compiled module; NumPy and torch do all the work" in said
    assert "Install g++ or clang++ and install regard again" in said
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_kernels" in name]


def test_regard_computes_without_its_compiled_module(without_compiler, tmp_path):
    code = "import numpy as np; x = np.eye(3); print(regard.attention(x, x, x, causal=True)[0])"
    assert import_from(without_compiler[0], tmp_path, code) == "[1. 0. 0.]"


@pytest.mark.slow
def test_a_compiler_that_came_later_is_found_and_gives_the_compiled_module(with_compiler, tmp_path):
    wheel, said = with_compiler
    assert "no C++ compiler" not in said
    code = """import numpy as np; from regard import _kernels; x = np.eye(3, dtype='f')
print(regard.attention(x, x, x, causal=True, backend='kernel')[0])"""
    assert import_from(wheel, tmp_path, code, REGARD_TARGET="portable") == "[1. 0. 0.]"


def test_the_installed_compiled_module_knows_the_processor():
    kernels = pytest.importorskip("regard._kernels", reason="installed without a C++ compiler")
    name = kernels.cpu_name()
    assert name == name.strip() != ""
    if Path("/proc/cpuinfo").exists() and (
        model := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    ):
        assert name == model[1].strip()


INSTRUCTIONS = {
    "neon_bf16": "asimd bf16",
    "neon": "asimd",
    "amx": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq amx_tile amx_bf16",
    "avx512_bf16": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16",
    "avx512": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq",
    "avx2": "avx2 fma f16c",
    "portable": "",
}


def test_the_targets_are_those_that_the_processor_has_the_instructions_for():
    kernels = pytest.importorskip("regard._kernels", reason="installed without a C++ compiler")
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("this system has no /proc/cpuinfo")
    said = re.search(r"(?:flags|Features)\s*: (.*)", Path("/proc/cpuinfo").read_text())
    has = set(said[1].split())
    runs = {target for target, needs in INSTRUCTIONS.items() if has.issuperset(needs.split())}
    found = {target for target in kernels.targets() if not target.endswith("_emulated")}
    assert found == runs - set(kernels.targets_left_out())


def compiler_that_fails(folder, objects, *patterns):
    """A compiler that builds without optimising and fails where a word matches a shell pattern.

    A source of the kernels is compiled at the configuration, which tries it, and again by the
    build; here the second takes the object of the first, if both ask for the same instructions.
    """
    file = folder / "c++"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")))
    file.write_text(
        f"""#!/bin/sh
before= object= source= machine=
for word in "$@"; do
  case $word in {"|".join(patterns)}) echo "error: no $word here" >&2; exit 1 ;; esac
  case $before in -o) object=$word ;; esac
  case $word in
    */kernels/*.cpp | */nanobind/src/*.cpp) source=${{word##*/}} ;;
    -mtls*) ;;
    -m*) machine=$machine$word ;;
  esac
  before=$word
done
kept="{objects}/$source$machine.o"
if [ -n "$source" ] && [ -e "$kept" ]; then exec cp "$kept" "$object"; fi
{compiler} "$@" -O0 -fPIC || exit
if [ -n "$source" ]; then cp "$object" "$kept"; fi
"""
    )
    file.chmod(0o755)
    return str(file)


@needs_x86
@pytest.mark.slow
def test_targets_that_the_compiler_cannot_build_are_left_out_one_by_one(with_compiler, tmp_path):
    wheel, said = with_compiler
    assert "cannot build the kernels for avx2, avx512, avx512_bf16, amx." in said
    assert "error: no -mavx2 here" in said
    assert "error: no -mavx512f here" in said
    code = "from regard import _kernels as k; print(k.targets_left_out()); k.target()"
    with pytest.raises(AssertionError) as refused:
        import_from(wheel, tmp_path, code, REGARD_TARGET="avx512")
    assert "['amx', 'avx512_bf16', 'avx512', 'avx2']" in str(refused.value)
    why = "its compiler could not make it, or REGARD_TARGETS named others; portable is there."
    assert f"REGARD_TARGET=avx512: this build lacks it: {why}" in str(refused.value)


@needs_compiler
def test_a_compiler_that_cannot_build_the_kernels_gives_an_install_without_them(objects, tmp_path):
    cxx = compiler_that_fails(tmp_path, objects, "*portable.cpp", "-mavx*")
    wheel, said = build_wheel(tmp_path / "build", tmp_path / "wheels", CXX=cxx)
    assert re.search(r"regard: \w+ [0-9.]+ cannot build the kernels\.", said)
    assert "installed without its compiled module" in said
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_kernels" in name]


@needs_compiler
def test_kernels_that_fail_to_build_after_all_give_an_install_without_them(objects, tmp_path):
    cxx = compiler_that_fails(tmp_path, objects, "*bind.cpp", "-mavx*")
    wheel, said = build_wheel(tmp_path / "build", tmp_path / "wheels", CXX=cxx)
    assert "the kernels could not be built; the errors are above" in said
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_kernels" in name]


NO_CPP20 = """
macro(enable_language language)
  _enable_language(${language})
  list(REMOVE_ITEM CMAKE_CXX_COMPILE_FEATURES cxx_std_20)
endmacro()
"""


@needs_compiler
@pytest.mark.parametrize(
    ("setting", "missing"),
    [
        ("CMAKE_PROJECT_regard_INCLUDE={file}", "has no C++20"),
        ("CMAKE_DISABLE_FIND_PACKAGE_Python=ON", "Python's C headers were not found"),
    ],
)
def test_what_is_missing_for_the_compiled_module_is_named(setting, missing, tmp_path):
    file = tmp_path / "old.cmake"
    file.write_text(NO_CPP20)
    said = run(
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-D{setting.format(file=file)}"]
    )
    assert missing in said
    assert "installed without its compiled module" in said


def package_files():
    """Every file of the package's source that an install must have."""
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            yield path.relative_to(PACKAGE).as_posix()


def test_the_wheel_holds_the_whole_package_and_nothing_else(without_compiler):
    names = zipfile.ZipFile(without_compiler[0]).namelist()
    package = {name.removeprefix("regard/") for name in names if name.startswith("regard/")}
    assert package == set(package_files())
    assert {"py.typed", "lm/builtin/config.json"} <= package
    assert {name.partition("/")[0] for name in names} == {
        "regard",
        f"regard-{PROJECT['project']['version']}.dist-info",
    }
    licences = {name.rpartition("licenses/")[2] for name in names if "licenses/" in name}
    assert licences == {"LICENSE", "LICENSE-PYTHON", "NOTICE"}


def test_the_wheel_stays_under_12_mb(without_compiler):
    kernels = pytest.importorskip("regard._kernels", reason="installed without a C++ compiler")
    compiled = len(zlib.compress(Path(kernels.__file__).read_bytes()))
    assert without_compiler[0].stat().st_size + compiled < 12e6


def test_the_installed_package_is_this_source_tree():
    installed = Path(regard.__file__).parent
    differing = [
        name
        for name in package_files()
        if not (installed / name).exists()
        or (installed / name).read_bytes() != (PACKAGE / name).read_bytes()
    ]
    assert not differing, f"{differing}: install again, or with pip install -e"


def test_the_version_is_the_installed_one_and_the_newest_in_the_changelog():
    version = PROJECT["project"]["version"]
    assert importlib.metadata.version("regard") == version
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0] == version
    assert version in headings[:2]


def test_constraints_pin_every_distribution_that_the_tests_pull_in():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and line[0] != "#")
    assert pins["torch"] == "2.13.0"
    assert not [version for version in pins.values() if "+" in version]
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    assert not required("regard[test]") - names - {"regard"}


def test_constraints_take_the_oldest_python_that_the_project_does():
    from packaging.specifiers import SpecifierSet

    oldest = PROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    newer = []
    for name in (line.split("==")[0] for line in lines if line and line[0] != "#"):
        needed = importlib.metadata.metadata(name).get("Requires-Python") or ""
        if not SpecifierSet(needed).contains(oldest):
            newer.append(f"{name} needs Python {needed}")
    assert not newer


def test_the_tools_of_the_page_are_pinned_without_addresses():
    wanted = json.loads((ROOT / "package.json").read_text())["devDependencies"]
    lock = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    assert lock.pop("")["devDependencies"] == wanted
    for name, version in wanted.items():
        assert lock[f"node_modules/{name}"]["version"] == version
    assert all(package["integrity"].startswith("sha512-") for package in lock.values())
    assert not [name for name, package in lock.items() if "resolved" in package]


def required(requirement, seen=None):
    """The names that a requirement brings in, by what the installed distributions say."""
    from packaging.requirements import Requirement

    seen = set() if seen is None else seen
    wanted = Requirement(requirement)
    key = (re.sub(r"[-_.]+", "-", wanted.name).lower(), frozenset(wanted.extras))
    if key not in seen:
        seen.add(key)
        extras = [{"extra": extra} for extra in wanted.extras or [""]]
        for inner in importlib.metadata.requires(wanted.name) or ():
            marker = Requirement(inner).marker
            if marker is None or any(map(marker.evaluate, extras)):
                required(inner.partition(";")[0], seen)
    return {name for name, _ in seen}


def test_ci_runs_the_command_that_the_readme_gives():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^pip install .* && \./check$", readme, re.MULTILINE)
    assert commands == ['pip install -c constraints.txt ".[test]" && ./check']
    script = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in script
    assert "set -euo pipefail" in script


@pytest.mark.parametrize("script", ["check", ".ci/run", "scripts/sanitize", "scripts/compilers"])
def test_scripts_are_executable_bash(script):
    path = ROOT / script
    assert path.stat().st_mode & 0o111 == 0o111
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    run(["bash", "-n", str(path)])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "check",
            "no part is called everything; there are format, lint, types, page, docs, tests and"
            " fix",
        ),
        ("scripts/sanitize", "everything is unknown; there are address, undefined and thread"),
        ("scripts/compilers", "everything is not here; here are "),
    ],
)
def test_scripts_name_their_parts_when_one_is_unknown(script, message):
    result = subprocess.run(
        ["bash", ROOT / script, "everything"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert message in result.stderr
