"""Every architecture of transformers under an attention implementation, against eager.

    python benchmarks/architectures.py --implementation regard
    python benchmarks/architectures.py --only llama,bert --situations plain,gradients
    python benchmarks/architectures.py --implementation sdpa --json sdpa.json

Models are made tiny from their configs, with random weights; nothing is downloaded. Each runs in
every situation that it knows: once in float32 (``--dtype``) under eager, once under the
implementation, and, where these are not so near to each other that it is told without, once in
float64 under eager, in which even what transformers computes in float32 is computed in float64. A
situation passes where the implementation's error is at most 20 times eager's own (or that of
weights moved by a rounding step, or four rounding steps of the largest value), where nothing is
NaN, and where other words in padding, in another document or in the future change it no more than
they change eager. Places that are padding are not compared.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import re
import resource
import select
import subprocess
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from zoo.judge import judged
from zoo.models import architectures
from zoo.situations import SITUATIONS

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "architectures.json"
PAGE = HERE.parent / "docs" / "huggingface-architectures.md"
BEGIN, END = "<!-- architectures -->", "<!-- /architectures -->"
SECONDS, START, BYTES = 120, 120, 16 << 30  # for one architecture; to load torch; of memory
CHUNK = 40  # architectures of one process
QUICK = ("llama", "gpt2", "bert", "t5", "vit", "clip")
FAMILIES = (
    "decoder",
    "encoder",
    "encoder–decoder",
    "multimodal",
    "dual",
    "vision",
    "audio",
    "other",
)
# What a status says, in the order in which a table has them.
STATUSES = {
    "pass": "as eager in every situation",
    "fail": "differs from eager, or raises an error",
    "leak": "hidden words change what is real",
    "NaN": "not a number at a real place",
    "own attention": "attention code of its own, which calls no implementation",
    "no attention": "nothing that attends",
    "refused": "transformers refuses this implementation",
    "not built": "its tiny model could not be built or run",
    "crashed": "its process died, or took too long",
}
# Failures that are understood, and why they are none of the implementation's.
INVERTED = "its own code takes every mask for one of bools; eager's hides what it shows"
KNOWN = {
    "grounding-dino": "eager adds BERT's mask of bools to its scores as 0 and 1; it hides nothing",
    "mm-grounding-dino": "as grounding-dino",
    "nemotron3_5_asr": INVERTED,
    "nemotron_asr_streaming": INVERTED,
    "nemotron_asr_streaming_encoder": INVERTED,
}


def read_options():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementation", default="regard", help="its registered name")
    parser.add_argument("--only", help="names of architectures, with commas")
    parser.add_argument("--situations", help=f"of: {', '.join(SITUATIONS)}")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--evaluate", action="store_true", help="evaluate masks, as of short texts")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--quick", action="store_true", help="six architectures")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--merge", action="store_true", help="into what the JSON file has already")
    parser.add_argument("--page", action="store_true", help="write the page from the results alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.names = architectures()
    if options.quick:
        options.names = list(QUICK)
    if options.only:
        options.names = options.only.split(",")
    options.chosen = options.situations.split(",") if options.situations else list(SITUATIONS)
    if unknown := {*options.names} - {*architectures()}:
        named = ", ".join(repr(name) for name in sorted(unknown))
        parser.error(f"transformers {transformers.__version__} has no architecture {named}")
    if unknown := {*options.chosen} - {*SITUATIONS}:
        named = ", ".join(repr(name) for name in sorted(unknown))
        parser.error(f"there is no situation {named}; there are {', '.join(SITUATIONS)}")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}; at least 1 is needed")
    if options.json and not options.json.parent.is_dir():  # told now, not after the run
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    if options.merge:
        require_same(parser, options)
    return options


def require_same(parser, options):
    """Refuses to merge into what is no file of results, or into those of other numbers."""
    if not options.json or not options.json.is_file():
        parser.error("--merge needs --json FILE, with results that are there already")
    try:
        earlier = json.loads(options.json.read_text("utf-8"))
    except ValueError as error:
        parser.error(f"{options.json} is no file of results ({error})")
    for name in ("implementation", "dtype"):
        asked = getattr(options, name)
        if not isinstance(earlier, dict) or name not in earlier:
            parser.error(f"{options.json} is no file of results: it has no {name}")
        if earlier[name] != asked:
            parser.error(
                f"{options.json} has the {name} {earlier[name]}, and {asked} is asked for;"
                " name another file"
            )


def work(options):
    """A worker: one line of JSON for each architecture."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if options.implementation == "regard":
        import regard.hf

        if not options.evaluate:  # so that masks are read as those of long texts are
            regard.hf._masks.SMALL = 0
    torch.set_num_threads(1)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is no result
    print("{}", file=lines, flush=True)
    for name in options.names:
        found = judged(name, options.implementation, getattr(torch, options.dtype), options.chosen)
        print(json.dumps(found), file=lines, flush=True)


def supervise(names, options, report):
    """Has workers judge these architectures; another worker goes on where one dies."""
    names = list(names)
    while names:
        command = [sys.executable, __file__, "--worker", "--only", ",".join(names[:CHUNK])]
        command += ["--implementation", options.implementation, "--dtype", options.dtype]
        command += ["--situations", ",".join(options.chosen)] + ["--evaluate"] * options.evaluate
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        ) as worker:
            lines, seconds, left = Lines(worker.stdout), START, names[:CHUNK]
            while left:
                line = lines.read(seconds)
                if not line:
                    worker.kill()
                    why = f"took more than {seconds} s" if line is None else "its process died"
                    report({"name": left[0], "status": "crashed", "why": why})
                    names.remove(left[0])
                    break
                seconds, found = SECONDS, json.loads(line)
                if found:
                    report(found)
                    left = left[1:]
                    names.remove(found["name"])


class Lines:
    """The lines of a process, with a limit to the time that each takes."""

    def __init__(self, stream):
        self.stream, self.left = stream, b""

    def read(self, seconds):
        """The next line; empty at the end, None where it takes too long."""
        while b"\n" not in self.left:
            if not select.select([self.stream], [], [], seconds)[0]:
                return None
            found = os.read(self.stream.fileno(), 1 << 20)
            if not found:
                return b""
            self.left += found
        line, _, self.left = self.left.partition(b"\n")
        return line


def run(options):
    """The results of all architectures, printed as they come and written now and then."""
    found, reported = {}, []
    if options.merge:
        earlier = json.loads(options.json.read_text("utf-8"))
        found = {x["name"]: x for x in earlier["architectures"]}

    def report(result):
        found[result["name"]] = result
        reported.append(result["name"])
        print(line_of(result), flush=True)
        if options.json and len(reported) % 10 == 0:
            write_results(options.json, results(options, found))

    parts = [options.names[i :: options.jobs] for i in range(options.jobs)]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(supervise, part, options, report) for part in parts]:
            future.result()
    return results(options, found)


def results(options, found):
    """What is written: the versions, and every architecture."""
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("transformers", "torch", "regard")}
    return {
        "benchmark": "architectures",
        "implementation": options.implementation,
        "dtype": options.dtype,
        "versions": versions,
        "situations": options.chosen,
        "architectures": [found[name] for name in sorted(found)],
    }


def write_results(path, result):
    """The results as JSON, an architecture in a line."""
    head = json.dumps(result | {"architectures": []}, indent=1)
    lines = ",\n".join(f"  {json.dumps(x)}" for x in result["architectures"])
    path.write_text(head.replace('"architectures": []', f'"architectures": [\n{lines}\n ]') + "\n")


def line_of(result):
    """An architecture in a line, and a line for everything that is not well."""
    situations = result.get("situations", {})
    ran = sum(r["result"] != "skip" for r in situations.values())
    worst = f"{ran} situations, worst {result['worst']:.2f}x" if "worst" in result else ""
    lines = [
        f"{result['name']:32}{result.get('family', ''):17}{result['status']:15}"
        f"{worst}{result.get('why', '')}"
    ]
    for name, r in situations.items():
        if r["result"] not in ("pass", "skip"):
            lines.append(f"    {name}: {r['result']}, {r['why']}")
    return "\n".join(lines)


def counts(result):
    """``{family: Counter of statuses}``, in the order of the tables."""
    found = {}
    for x in result["architectures"]:
        found.setdefault(x.get("family", "not built"), Counter())[x["status"]] += 1
    return {family: found[family] for family in (*FAMILIES, "not built") if family in found}


def summary(result):
    """The rows of the table of families and statuses; the first has the titles."""
    table = counts(result)
    total = sum(table.values(), Counter())
    shown = [s for s in STATUSES if total[s]]
    yield ["", *shown, "all"]
    for family, counter in [*table.items(), ("all", total)]:
        yield [family, *(str(counter[s] or "") for s in shown), str(sum(counter.values()))]


def markdown(rows):
    """A table of Markdown; the first row has its titles."""
    first, *rows = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (first, ["---"] * len(first), *rows))


def page(result):
    """What the page says: the figures, and every architecture by family and status."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    parts = [f"{versions}; {result['dtype']}.", markdown(summary(result))]
    for family in counts(result):
        parts.append(f"## {family.capitalize()}")
        members = [x for x in result["architectures"] if x.get("family", "not built") == family]
        for status, meaning in STATUSES.items():
            found = [x for x in members if x["status"] == status]
            if found and status == "pass":
                parts += passed(found)
            elif found:
                parts.append(f"**{status.capitalize()}** ({meaning}):")
                rows = [[x["name"], in_words(reason_of(x))] for x in found]
                names = ", ".join(x["name"] for x in found)
                with_reasons = any(why for _, why in rows)
                parts.append(markdown([["architecture", "why"], *rows]) if with_reasons else names)
    return "\n\n".join(parts)


def passed(found):
    """Paragraphs of architectures that pass, those of the same situations together."""
    groups = {}
    for x in found:
        ran = ", ".join(k for k, r in x["situations"].items() if r["result"] == "pass")
        groups.setdefault(ran, []).append(f"{x['name']} ({x['worst']:.1f})")
    for ran, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        yield f"**Pass** in {ran}:"
        yield f"{', '.join(names)}."


def reason_of(x):
    """Why an architecture does not pass."""
    if x["name"] in KNOWN:
        return KNOWN[x["name"]]
    bad = {k: r for k, r in x.get("situations", {}).items() if r["result"] not in ("pass", "skip")}
    return "; ".join(f"{k}: {r['why']}" for k, r in bad.items()) or x.get("why", "")


def in_words(text):
    """A reason that fits in a cell of a table."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 160 else f"{text[:157]}..."


def write_page(path, result):
    """Replaces what stands between the page's markers."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{path}: no lines '{BEGIN}' and '{END}'")
    path.write_text(pattern.sub(lambda _: f"{page(result)}\n", text, count=1), encoding="utf-8")


def main():
    """Runs, prints the table and writes what was asked for."""
    options = read_options()
    if options.worker:
        return work(options)
    if options.page:
        return write_page(PAGE, json.loads(RESULTS.read_text("utf-8")))
    result = run(options)
    rows = list(summary(result))
    print()
    for row in rows:
        print("".join(cell.ljust(17) if not i else cell.rjust(15) for i, cell in enumerate(row)))
    if options.json:
        write_results(options.json, result)
    return None


if __name__ == "__main__":
    main()
