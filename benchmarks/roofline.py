"""Peak rates of this machine: multiply-adds, and reading memory.

    python benchmarks/roofline.py [--threads N] [--quick] [--json FILE]

Compiles roofline.cpp with the system's C++ compiler for this processor, and runs it with one thread
and with all: multiply-adds (two operations each) in vector registers of every width, the dot
product of bfloat16 pairs where the processor has it, and reading a memory far larger than the
caches. The other benchmarks show their figures as shares of these: of multiply-adds that take turns
with what is measured, since the rate of a processor's clock is not the same for long.
"""

import ctypes
import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import common

SOURCE = Path(__file__).with_name("roofline.cpp")
FLAGS = ["-O3", "-march=native", "-std=c++20", "-pthread"]
WIDEST = {"avx2": 256, "portable": 128}  # bits of a register
MEMORY_MIB = 1024  # the largest level-3 caches hold about as much, those of most machines 1/30


def rates(*threads, quick=False):
    """Operations and bytes per second by what was measured, for each number of threads.

    Raises:
        RuntimeError: nothing compiles the program.
    """
    seconds, memory = ("0.01", "64") if quick else ("0.3", str(MEMORY_MIB))
    with tempfile.TemporaryDirectory() as folder:
        program = _compile(folder)
        return [_run(program, n, seconds) | _run(program, n, seconds, memory) for n in threads]


def _compile(folder, *flags):
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler was found; install one, or name it in CXX")
    program = str(Path(folder) / "roofline")
    command = [compiler, *FLAGS, *flags, str(SOURCE), "-o", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return program


def _run(program, threads, *arguments):
    command = [program, str(threads), *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def peaks(options):
    """``read``, in bytes per second; empty without a compiler."""
    try:
        (measured,) = rates(options.threads, quick=options.quick)
    except RuntimeError as error:
        print(f"Shares of peak are left out: {error}")
        return {}
    return {"read": measured["read"]}


@functools.cache
def _library():
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(_compile(folder, "-shared", "-fPIC"))
    library.one_round.restype = ctypes.c_double
    library.one_round.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


def contestant(dtype, threads):
    """The multiply-adds that bound a dtype, to take turns with what is measured.

    float16, and bfloat16 where there is no dot product of it, are computed in float32. Registers
    that the kernels' instruction set lacks do not count.

    Returns:
        ``(run, operations)``: a function of a few milliseconds, and how many operations it does;
        None without a compiler.
    """
    try:
        library = _library()
    except RuntimeError as error:
        print(f"Shares of peak are left out: {error}")
        return None
    target = common.target()
    paired = dtype == "bfloat16" and target == "avx512_bf16"
    kinds = ["bfloat16 dot 512"] if paired else []
    real = "float64" if dtype == "float64" else "float32"
    kinds += [f"{real} fma {n}" for n in (512, 256, 128) if n <= WIDEST.get(target, 512)]
    for name in map(str.encode, kinds):
        if operations := library.one_round(name, threads):
            return functools.partial(library.one_round, name, threads), operations
    return None


def main():
    """Prints a row for each rate."""
    options = common.read_options(__doc__, threads=common.CORES)
    report = common.Report("roofline", options)
    one, every = rates(1, options.threads, quick=options.quick)
    report.table("Peak rates", "what", "unit", "1 thread", f"{options.threads} threads")
    for name in one:
        unit = "GB/s" if name == "read" else "GFLOP/s"
        cells = (f"{rate[name] / 1e9:.1f}" for rate in (one, every))
        report.row(name, unit, *cells, one=one[name], all=every[name])
    report.save()


if __name__ == "__main__":
    main()
