"""Peak rates of this machine: multiply-adds, and reading memory.

    python benchmarks/roofline.py [--threads N] [--quick] [--json FILE]

Compiles roofline.cpp with the system's C++ compiler for this processor, and runs it with one thread
and with all: multiply-adds (two operations each) in vector registers of every width, the dot
product of bfloat16 pairs where the processor has it, and reading a memory far larger than the
caches. The other benchmarks show their figures as shares of these.
"""

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


def rates(*threads, quick=False, bandwidth=True):
    """Operations and bytes per second by what was measured, for each number of threads.

    Raises:
        RuntimeError: nothing compiles the program.
    """
    seconds, memory = ("0.01", "64") if quick else ("0.3", str(MEMORY_MIB))
    with tempfile.TemporaryDirectory() as folder:
        program = _compile(folder)
        return [
            _run(program, n, seconds) | (_run(program, n, seconds, memory) if bandwidth else {})
            for n in threads
        ]


def _compile(folder):
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler was found; install one, or name it in CXX")
    program = str(Path(folder) / "roofline")
    command = [compiler, *FLAGS, str(SOURCE), "-o", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return program


def _run(program, threads, *arguments):
    command = [program, str(threads), *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def peaks(options, bandwidth=False):
    """The rate that bounds each dtype, and ``read`` in bytes per second; empty without a compiler.

    float16, and bfloat16 where there is no dot product of it, are computed in float32. Registers
    that the kernels' instruction set lacks do not count.
    """
    try:
        (measured,) = rates(options.threads, quick=options.quick, bandwidth=bandwidth)
    except RuntimeError as error:
        print(f"Shares of peak are left out: {error}")
        return {}
    target = common.target()
    lacks = [bits for bits in ("512", "256") if int(bits) > WIDEST.get(target, 512)]
    measured = {name: rate for name, rate in measured.items() if name.split()[-1] not in lacks}
    best = {
        dtype: max(rate for name, rate in measured.items() if name.startswith(dtype))
        for dtype in ("float32", "float64")
    }
    best["float16"] = best["float32"]
    best["bfloat16"] = measured.get("bfloat16 dot 512", best["float32"])
    return best | {name: rate for name, rate in measured.items() if name == "read"}


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
