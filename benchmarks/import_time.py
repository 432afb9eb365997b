"""How long `import regard` takes beside `import numpy`: at most twice as long is the promise.

Usage: python benchmarks/import_time.py [--rounds 21] [--json results.json]

Every import runs in a fresh interpreter, in turn, so that a busy machine slows all of them alike.
What is compared is the median time of the import statement; the interpreter's start is not in it.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

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
    """Median, quartiles and module count of every import, taken in turn; the first is a warm-up."""
    times = {module: [] for module in MODULES}
    counts = {}
    for turn in range(rounds + 1):
        for module in MODULES:
            elapsed_ms, counts[module] = import_ms(module)
            if turn:
                times[module].append(elapsed_ms)
    rows = {}
    for module in MODULES:
        low, median, high = statistics.quantiles(times[module], n=4)
        rows[module] = {
            "median_ms": median, "quartiles_ms": [low, high], "modules": counts[module],
        }  # fmt: skip
    return rows


def main():
    """Measures, prints the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    rows = measure(max(arguments.rounds, 2))
    ratio = rows["regard"]["median_ms"] / rows["numpy"]["median_ms"]
    print(f"{'import':<10} {'median':>9} {'quartiles':>17} {'modules':>8} {'of numpy':>9}")
    for module, row in rows.items():
        low, high = row["quartiles_ms"]
        share = row["median_ms"] / rows["numpy"]["median_ms"]
        print(
            f"{module:<10} {row['median_ms']:6.1f} ms {low:6.1f} to {high:6.1f} ms "
            f"{row['modules']:6} {share:8.2f}x"
        )
    result = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "numpy": version("numpy"),
        "regard": version("regard"),
        "rounds": arguments.rounds,
        "imports": rows,
        "ratio": ratio,
        "kept": ratio <= 2,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
