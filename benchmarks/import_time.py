"""How long `import regard` takes beside `import numpy`: at most twice as long is the promise.

    python benchmarks/import_time.py [--rounds 21] [--quick] [--json FILE]

Every import runs in a fresh interpreter, in turn, so that a busy machine slows all of them alike.
What is compared is the median time of the import statement; the interpreter's start is not in it.
"""

import statistics
import subprocess
import sys

import common

MODULES = ("numpy", "jaxtyping", "regard")
CODE = """
import sys, time
start = time.perf_counter()
import {module}
print(1e3 * (time.perf_counter() - start), len(sys.modules))
"""


def import_ms(module):
    """Milliseconds of one import in a fresh interpreter, and the modules loaded after it."""
    command = [sys.executable, "-c", CODE.format(module=module)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(printed[0]), int(printed[1])


def measure(rounds):
    """Times of every import, taken in turn, and module counts; the first round is a warm-up."""
    times = {module: [] for module in MODULES}
    counts = {}
    for turn in range(rounds + 1):
        for module in MODULES:
            elapsed_ms, counts[module] = import_ms(module)
            if turn:
                times[module].append(elapsed_ms)
    return times, counts


def main():
    """A row for each module."""
    options = common.read_options(
        __doc__, add=lambda parser: parser.add_argument("--rounds", type=int, default=21)
    )
    report = common.Report("import_time", options, packages=["jaxtyping"])
    times, counts = measure(2 if options.quick else max(options.rounds, 2))
    report.table("Time of an import", "import", "median", "quartiles", "modules", "of numpy's")
    for module, elapsed_ms in times.items():
        low, median, high = statistics.quantiles(elapsed_ms, n=4)
        part = median / statistics.median(times["numpy"])
        report.row(
            module, f"{median:.1f} ms", f"{low:.1f} to {high:.1f} ms", str(counts[module]),
            f"{part:.2f}x", median_ms=median, quartiles_ms=[low, high], modules=counts[module],
            of_numpy=part,
        )  # fmt: skip
    report.save()


if __name__ == "__main__":
    main()
