"""Peak rates of this machine: multiply-adds, exponentials, and reading memory.

    python benchmarks/roofline.py [--threads N] [--quick] [--json FILE]

Compiles roofline.cpp with the system's C++ compiler for this processor, and runs it with one thread
and with all: multiply-adds (two operations each) in vector registers of every width, dot products
of bfloat16 pairs and products of tiles where the processor has them, exponentials as the kernels
compute them, and reading a memory far larger than the caches in one stream and in several.

Each multiply-add is measured in registers alone, and with the loads that a product needs: of 24
with 512 bits 10, four vectors and six numbers in all lanes; of a product of tiles one. That is the
rate that can be reached. The other benchmarks show their figures as shares of both, of rounds that
take turns with what is measured, since a processor's clock is not the same for long. Decoding is
shown as a share of the fastest number of streams.
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
PRODUCTS = {"avx512_bf16": "bfloat16 dot 512", "amx": "bfloat16 tiles"}  # of bfloat16
MEMORY_MIB = 1024  # the largest level-3 caches hold about as much, those of most machines 1/30
QUICK_MIB = 64
STREAMS = (1, 2, 4, 8)  # in which a thread reads


def rates(*threads, quick=False):
    """Operations and bytes per second by what was measured, for each number of threads.

    Raises:
        RuntimeError: nothing compiles the program.
    """
    seconds, memory = ("0.01", str(QUICK_MIB)) if quick else ("0.3", str(MEMORY_MIB))
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


def readers(options):
    """Readings of a memory, to take turns with what is measured; empty without a compiler.

    Returns:
        ``{streams: (run, bytes)}``: a function of some ten milliseconds, and what it reads.
    """
    library = _library_if_any()
    mib = QUICK_MIB if options.quick else MEMORY_MIB
    found = {}
    for n in STREAMS if library else ():
        run = functools.partial(library.one_reading, n, options.threads, mib)
        found[n] = run, run()
    return found


@functools.cache
def _library_if_any():
    try:
        return _library()
    except RuntimeError as error:
        print(f"Shares of peak are left out: {error}")
        return None


def _library():
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(_compile(folder, "-shared", "-fPIC"))
    library.one_round.restype = library.one_reading.restype = ctypes.c_double
    library.one_round.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.one_reading.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return library


def contestants(dtype, threads):
    """The multiply-adds that bound a dtype, to take turns with what is measured.

    float16, and bfloat16 where the kernels have no product of it, are computed in float32.
    Registers that the kernels' instruction set lacks do not count.

    Returns:
        ``{limit: (run, operations)}`` for the limits of ``common.SHARES``: a function of a few
        milliseconds, and how many operations it does; empty without a compiler.
    """
    library = _library_if_any()
    for kind in kinds(dtype, common.target()) if library else ():
        names = [f"{kind}{with_loads}".encode() for with_loads in (" with loads", "")]
        rounds = [functools.partial(library.one_round, name, threads) for name in names]
        if library.one_round(names[0], threads):
            return {limit: (run, run()) for limit, run in zip(common.SHARES, rounds)}
    return {}


def kinds(dtype, target):
    """What multiplies a dtype on a target, the fastest first."""
    real = "float64" if dtype == "float64" else "float32"
    fma = [f"{real} fma {n}" for n in (512, 256, 128) if n <= WIDEST.get(target, 512)]
    return ([PRODUCTS[target]] if dtype == "bfloat16" and target in PRODUCTS else []) + fma


def words(name):
    """``(what was measured, the unit of its rate)``."""
    if name.startswith("read"):
        streams = name.split()[1]
        return f"read, {streams} stream{'s' * (streams > '1')} a thread", "GB/s"
    return name, "10^9/s" if name.endswith("exp") else "GFLOP/s"


def main():
    """Prints a row for each rate."""
    options = common.read_options(__doc__, threads=common.CORES)
    report = common.Report("roofline", options)
    one, every = rates(1, options.threads, quick=options.quick)
    report.table("Peak rates", "what", "unit", "1 thread", f"{options.threads} threads")
    for name in one:
        cells = (f"{rate[name] / 1e9:.1f}" for rate in (one, every))
        report.row(*words(name), *cells, one=one[name], all=every[name], kind=name)
    for threads, rate in {1: one, options.threads: every}.items():
        best, streams = max((rate[f"read {n}"], n) for n in STREAMS)
        report.note(
            f"{threads} thread{'s' * (threads > 1)} read fastest in {streams} "
            f"stream{'s' * (streams > 1)} each: {best / 1e9:.1f} GB/s is the limit."
        )
    report.save()


if __name__ == "__main__":
    main()
