"""Runs every benchmark, and writes the README's tables, docs/benchmarks.md and its picture.

    python benchmarks/report.py               run everything; results go to benchmarks/results, into
                                              the folder of this processor
    python benchmarks/report.py --from DIR    take the results of earlier runs
    python benchmarks/report.py --quick       run everything in small, and write nothing

The document shows every processor that has results; the README one of AMD and one of Intel, those
with the most of its rows. Its tables stand between the lines ``<!-- benchmarks -->`` and
``<!-- /benchmarks -->``. ``results/architectures.json`` tells which models are right, which is the
same on every processor.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import common
import memory
import processors

HERE = Path(__file__).parent
ROOT = HERE.parent
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
BOTH = ["--dtype", "float32", "bfloat16"]
RUNS = {
    "roofline": [],
    "targets": [],
    "forward": BOTH,
    "backward": BOTH,
    "second_pass": BOTH,
    "linear_forms": BOTH,
    "pairs": [],
    "decode": BOTH,
    "small": [],
    "looking": BOTH,
    "heads": [],
    "survey": [],
    "effects": [],
    "watch": [],
    "spread": [],
    "layouts": [],
    "masks": [],
    "end_to_end": BOTH,
    "memory": [],
    "distributed": [],
    "huggingface": [],
    "peers": ["--dtype", "float32"],
    "import_time": [],
    "viewer": [],
    "long_map": [],
    "forward-threads": [*BOTH, "--threads", str(common.CORES)],
    "forward-avx2": ["--dtype", "float32"],
}
ON_GPUS = ["gpu"]  # by hand, where one is
# What a name's end means.
VARIANTS = {"threads": "with all threads", "avx2": "with AVX2 alone"}
T2048 = [1, 8, 2048, 64]
# What the README shows: a name, and the result and row that it stands for in both dtypes.
HEADLINES = [
    ("forward, T = 2048", "forward", {"shape": T2048, "causal": False}),
    ("forward, causal, T = 2048", "forward", {"shape": T2048, "causal": True}),
    ("training, causal, T = 2048", "backward", {"shape": T2048, "causal": True, "passes": "both"}),
    ("one query, 32,768 keys", "decode", {"length": 32_768}),
    ("decoder, training, T = 2048", "end_to_end", {"length": 2048, "passes": "forward + backward"}),
    ("output and summary, T = 2048", "second_pass", {"shape": T2048, "causal": False}),
    (
        "memory of training with a learned bias, T = 8192",
        "memory",
        {"job": "forward + backward, learned bias", "length": 8192},
    ),
]
DTYPES = ("float32", "bfloat16")


def run_all(folder, quick):
    """Runs every script; returns the names of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, arguments in RUNS.items():
        script, _, variant = name.partition("-")
        script, environment = HERE / f"{script}.py", dict(os.environ)
        if variant == "avx2":
            if variant not in common.targets():
                continue
            environment["REGARD_TARGET"] = variant
        command = [sys.executable, str(script), *arguments, "--json", str(folder / f"{name}.json")]
        print(f"== {script.name} {' '.join(arguments)}", flush=True)
        if subprocess.run(command + ["--quick"] * quick, check=False, env=environment).returncode:
            failed.append(name)
    return failed


def read_all(folder):
    """Every result in a folder and those in it: ``{processor: {run: result}}``."""
    found = {}
    for name in (*RUNS, *ON_GPUS):
        for path in sorted([*folder.glob(f"{name}.json"), *folder.glob(f"*/{name}.json")]):
            result = json.loads(path.read_text("utf-8"))
            of_processor = found.setdefault(processors.name(result["machine"]), {})
            if name in of_processor:
                raise SystemExit(f"{path}: another result of {name} is of the same processor.")
            of_processor[name] = result
    return dict(sorted(found.items()))


def find(result, **wanted):
    """The first row with these figures, or None."""
    for table in result["tables"] if result else ():
        for row in table["rows"]:
            if all(row.get(name) == value for name, value in wanted.items()):
                return row
    return None


def headlines(results):
    """``(name, {dtype: row or None})`` of all that was measured."""
    found = []
    for name, run, wanted in HEADLINES:
        rows = {dtype: find(results.get(run), dtype=dtype, **wanted) for dtype in DTYPES}
        if any(rows.values()):
            found.append((name, rows))
    return found


def markdown(columns, rows):
    """A table; its first column is aligned left, the others right."""
    aligned = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, aligned, *rows))


def shown(results):
    """The processors of the README: of AMD's and of Intel's that with the most of its rows.

    The last by name of equal ones; of processors of other vendors alone, one of them.
    """
    rows = {name: n for name, found in results.items() if (n := len(headlines(found)))}
    found = []
    for vendor in processors.VENDORS:
        if of_vendor := [(n, name) for name, n in rows.items() if name.startswith(vendor)]:
            found.append(max(of_vendor)[1])
    return found or sorted(rows)[-1:]


def readme_tables(results):
    """A table of each processor that the README shows, under its name, and what errors mean."""
    return "\n\n".join([*(readme_table(results[name], name) for name in shown(results)), LEGEND])


def readme_table(results, processor):
    """The headlines: time and error of regard, of torch, and how many times as fast regard is."""
    columns = [""]
    for dtype in DTYPES:
        columns += [f"regard, {dtype}", "error", "torch", "error", "faster"]
    rows = []
    for name, by_dtype in headlines(results):
        cells = [name]
        for row in by_dtype.values():
            cells += comparison(row) if row else ["-"] * 5
        rows.append(cells)
    machine = next(results[run]["machine"] for _, run, _ in HEADLINES if run in results)
    line = common.machine_line(machine).replace(processor, f"**{processor}**", 1)
    return f"{line}:\n\n{markdown(columns, rows)}"


SITE = "https://regard-attention.github.io/regard"
LEGEND = (
    "Errors are in those of the plain formula in the same dtype (decoder: of torch's); less is "
    f"better. All: [the benchmarks]({SITE}/benchmarks/); "
    "`python benchmarks/report.py` measures anew."
)


def comparison(row):
    """Five cells of one comparison; of the errors of gradients the largest."""
    if "found" in row:  # memory: bytes, or the limit that torch met
        ours, theirs = row["found"]["regard"], row["found"][memory.PLAIN]
        met = isinstance(ours, str) or isinstance(theirs, str)
        less = "" if met else factor(theirs["bytes"] / ours["bytes"])
        return [memory.cell(ours), "", memory.cell(theirs), "", less]
    cells = []
    for name in ("regard", "torch"):
        error = row["error"][name]
        largest = max(error) if isinstance(error, list) else error
        cells += [common.ms(row["seconds"][name]), f"{largest:.2f}"]
    return [*cells, factor(row["ratio"])]


def factor(ratio):
    """``**1.4x**``."""
    return f"**{ratio:.1f}x**" if ratio >= 1 else f"**{ratio:.2f}x**"


def write_readme(path, table):
    """Replaces what stands between the markers; returns whether they are there."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    if not pattern.search(text):
        return False
    path.write_text(pattern.sub(lambda _: f"{table}\n", text, count=1), encoding="utf-8")
    return True


def write_document(path, picture, results):
    """``docs/benchmarks.md``: what each script says of itself, and all of its tables."""
    parts = [
        "# Benchmarks",
        "Written by `benchmarks/report.py` from its own measurements. "
        + " ".join(common.__doc__.split("\n\n", 1)[1].split()),
        f"Measured on {', '.join(results)}.",
        f"![How many times as fast as torch]({picture.name})",
    ]
    for name in (*RUNS, *ON_GPUS):
        of = {processor: found[name] for processor, found in results.items() if name in found}
        if of:
            parts += [f"## {title(name)}", *explanation(name)]
        titles = set()
        for processor, result in of.items():
            parts += [f"{common.machine_line(result['machine'])}."]
            for table in result["tables"]:
                parts += document_table(table, processor if table["title"] in titles else None)
            titles |= {table["title"] for table in result["tables"]}
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def document_table(table, processor):
    """A table under its title, which names the processor where an earlier one has it too."""
    yield f"### {table['title']}" + (f", {processor}" if processor else "")
    yield markdown(table["columns"], [row["cells"] for row in table["rows"]])
    yield from (f"\\[{i}\\] {note}" for i, note in enumerate(table["notes"], 1))


def documentation(name):
    """Paragraphs of the script's docstring: the first line, its usage, and the rest."""
    source = (HERE / f"{name.partition('-')[0]}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).split("\n\n")


def title(name):
    """The script's first line, and how it is run."""
    first, variant = documentation(name)[0].removesuffix("."), name.partition("-")[2]
    return f"{first}, {VARIANTS[variant]}" if variant else first


def explanation(name):
    """How to run it, as code, and the rest of its docstring."""
    for paragraph in documentation(name)[1:]:
        code = paragraph.startswith("    ")
        yield f"```sh\n{textwrap.dedent(paragraph)}\n```" if code else paragraph


def is_memory(rows):
    """Whether a headline is about bytes."""
    return any(row and "found" in row for row in rows.values())


def draw_picture(path, results):
    """Bars: how many times as fast as torch, of every headline; a part for each processor."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "regard"  # the same figures, the same file
    from matplotlib import pyplot

    of = {
        processor: [x for x in headlines(results[processor]) if not is_memory(x[1])][::-1]
        for processor in shown(results)
    }
    heights = [0.9 + 0.5 * len(bars) for bars in of.values()]
    figure, axes = pyplot.subplots(
        len(of), figsize=(8, sum(heights)), height_ratios=heights, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for ax, (processor, bars) in zip(axes[:, 0], of.items()):
        draw_bars(ax, bars)
        ax.set_title(processor)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_bars(ax, bars):
    """Those of one processor."""
    for offset, color, dtype in ((0.2, "#0072b2", "float32"), (-0.2, "#e69f00", "bfloat16")):
        ratios = [rows[dtype]["ratio"] if rows[dtype] else 0 for _, rows in bars]
        drawn = ax.barh([y + offset for y in range(len(bars))], ratios, 0.38, color=color)
        ax.bar_label(drawn, [f"{r:.1f}" if r else "" for r in ratios], padding=2, fontsize=8)
        drawn.set_label(dtype)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_yticks(range(len(bars)), [name for name, _ in bars])
    ax.set_xlabel("times as fast as torch")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)


def write(results, readme, docs):
    """Writes the document, the picture and the README's table.

    Raises:
        SystemExit: the results have no headline, or the README no markers.
    """
    if not shown(results):
        raise SystemExit("No result is of a size that the README shows; nothing was written.")
    picture = docs / "benchmarks.svg"
    draw_picture(picture, results)
    write_document(docs / "benchmarks.md", picture, results)
    if not write_readme(readme, readme_tables(results)):
        raise SystemExit(
            f"{readme}: no lines '{BEGIN}' and '{END}', so its table was not written; put them "
            "where it shall stand."
        )


def main():
    """Measures or reads, and writes all three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="run all in small, write nothing")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder for the others")
    options = parser.parse_args()
    failed = []
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            failed = run_all(Path(folder), quick=True)
    else:
        folder = options.source or HERE / "results"
        own = processors.folder(common.machine_of())
        failed = [] if options.source else run_all(own, quick=False)
        write(read_all(folder), options.readme, options.docs)
    if failed:
        raise SystemExit(f"These failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
