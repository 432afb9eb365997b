"""What a survey of every head costs, what its sampled statistics are off, and what kills do to it.

    python benchmarks/survey.py [--only speed processes] [--threads N] [--quick] [--kills N]
                                [--json FILE]

CPU time of the process, beside that of the model's pass alone over the same tokens; the corpus is
the standard library's source. Kills are SIGKILL, of a worker and of the driver, each at moments
drawn by chance; the same command then finishes, and every file is compared with an undisturbed
run's. Two processes are compared with one by wall time, start-up included, the best of several runs
in turns, since whatever else runs on the machine only adds to it; CPU time, of all processes
together, shows what the second one costs.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import common
import numpy as np
import psutil

from regard.lm import LanguageModel
from regard.survey import Survey

TOKENS, QUICK_TOKENS = [256, 1024, 2048, 8192], [64]
RUNS = 3
DOCUMENTS = {"speed": 400, "kills": 24, "few": 40, "many": 400}
TIMEOUT_S = 300


def library():
    """Sources of the standard library, in order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(folder.glob("*.py")) if path.stat().st_size]


def cut_texts(folder, count, size):
    """So many files of so many bytes of source."""
    folder.mkdir(exist_ok=True)
    whole = b"".join(path.read_bytes() for path in library()).decode(errors="ignore")
    for n in range(count):
        start = n * size % (len(whole) - size)
        (folder / f"{n:03}.py").write_text(whole[start : start + size])
    return folder


def cpu_seconds(run):
    """CPU time of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def tokens_of(model, count):
    """Ids of so many documents of the library, of the most tokens that are asked for."""
    whole = "".join(path.read_text(errors="ignore") for path in library()[:80])
    ids = model.tokenizer.encode(whole[: 40 * count * max(TOKENS)], bos=True)
    return [ids[n * max(TOKENS) : (n + 1) * max(TOKENS)] for n in range(count)]


def speed(report, options, scratch):
    """A whole survey of some documents, files and all, and the model's pass over them alone."""
    model = LanguageModel.load("builtin")
    report.table(
        "Documents of the built-in model, CPU time of each", "tokens", "pass alone",
        "regard survey", "speed of the pass",
    )  # fmt: skip
    for tokens in QUICK_TOKENS if options.quick else TOKENS:
        count = 2 if options.quick else min(8, max(2, 8192 // tokens))
        corpus = scratch / f"texts{tokens}"
        corpus.mkdir()
        documents = []
        for n, ids in enumerate(tokens_of(model, 4 if tokens > 2048 else count)[:count]):
            text = model.tokenizer.decode(ids[1 : tokens + tokens // 4])
            (corpus / f"{n:03}.txt").write_text(text)
            documents.append(model.tokenizer.encode(text, bos=True)[:tokens])
        taken = {"pass": [], "survey": []}
        for n in range(1 + (1 if options.quick else RUNS)):
            taken["pass"].append(cpu_seconds(lambda own=documents: [model.hidden(x) for x in own]))
            folder = scratch / f"speed{tokens}-{n}"
            survey = Survey(folder, corpus=corpus, max_tokens=tokens, shard_tokens=10**9)
            taken["survey"].append(cpu_seconds(lambda survey=survey: survey.run_shard(0)))
            read = survey.heads().tokens
        seconds = {
            name: float(np.median(found[1:])) / len(documents) for name, found in taken.items()
        }
        assert read == sum(map(len, documents))
        share = seconds["pass"] / seconds["survey"]
        report.row(
            f"{tokens:,}", *(common.ms(x) for x in seconds.values()), f"{share:.0%}",
            tokens=tokens, documents=len(documents), cpu_seconds=seconds, share=share,
        )  # fmt: skip


def nucleus(weights):
    """The keys that hold 90 % of each query's weight: the sum over all queries."""
    held = np.cumsum(-np.sort(-weights, -1), -1, dtype=np.float64)
    return ((held < 0.9 * held[..., -1:]).sum(-1) + 1).sum(-1)


def samples(report, options, scratch):
    """Nucleus sizes of every so many queries, as a survey has them, and of all."""
    model, queries, sums = LanguageModel.load("builtin"), 0, 0
    files = library()[: 2 if options.quick else 60]
    survey = Survey(scratch / "samples", corpus=files, max_tokens=1024)
    survey.run(workers=1)
    for path in files:
        ids = model.tokenizer.encode(path.read_text(), bos=True)[:1024]
        made = model.record_ids(ids)
        sums = sums + np.array([nucleus(weights[...]) for weights in made.weights])
        queries += len(ids)
    found = survey.heads()
    off = np.abs(found.mean("nucleus") * queries / sums - 1)
    every = survey.manifest.settings["every"]
    report.table(
        f"Mean nucleus size of every {every}th query, against that of all, 32 heads",
        "documents", "queries", "read whole", "median error", "largest error",
    )  # fmt: skip
    whole = int(found.count("nucleus").max())
    report.row(
        str(len(files)), f"{queries:,}", f"{whole:,}", f"{np.median(off):.2%}", f"{off.max():.2%}",
        documents=len(files), queries=queries, whole=whole, median=float(np.median(off)),
        largest=float(off.max()),
    )  # fmt: skip


def command(corpus, folder, *more):
    """A survey in a process of its own."""
    line = [sys.executable, "-m", "regard", "survey", str(corpus), "-o", str(folder), *more]
    return subprocess.Popen(
        [*line, "--max-tokens", "256"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
    )  # fmt: skip


def ended(process):
    """Its exit code; where it hangs, an error."""
    try:
        process.communicate(timeout=TIMEOUT_S)
        return process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def finish(process):
    """Waits for it; where it fails, an error with what it said."""
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, f"it ended with {process.returncode}:\n{said}"


def workers_of(process):
    """Processes of the pool."""
    try:
        children = psutil.Process(process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def kill(kind, process, moment):
    """Kills a worker or the driver after so many seconds; whether there was one."""
    time.sleep(moment)
    if process.poll() is not None:
        return False
    victims = workers_of(process) if kind == "worker" else [process]
    if not victims:
        return False
    victims[0].send_signal(signal.SIGKILL)
    return True


def differences(folder, undisturbed):
    """Files that are not those of the undisturbed run."""
    names = {path.name for path in (folder / "heads").glob("*.parquet")}
    expected = {path.name for path in (undisturbed / "heads").glob("*.parquet")}
    differ = [
        name
        for name in names & expected
        if (folder / "heads" / name).read_bytes() != (undisturbed / "heads" / name).read_bytes()
    ]
    return len(names ^ expected) + len(differ)


def kills(report, options, scratch):
    """A worker and a driver, killed at moments drawn by chance."""
    corpus = cut_texts(scratch / "texts", DOCUMENTS["kills"], 1500)
    undisturbed = scratch / "undisturbed"
    began = time.monotonic()
    finish(command(corpus, undisturbed, "--workers", "2"))
    lasts = time.monotonic() - began
    report.table(
        "Killed, then the same command again", "killed", "kills", "documents lost or twice",
        "files that differ", "hung",
    )  # fmt: skip
    draw = random.Random(0)
    for kind in ("worker", "driver"):
        hit = wrong = differ = 0
        while hit < options.kills:
            folder = scratch / kind
            process = command(corpus, folder, "--workers", "2")
            was_hit = kill(kind, process, draw.uniform(0.3, 0.8) * lasts)
            code = ended(process)  # it raises where the command hangs
            assert was_hit or code == 0
            if code != 0:
                assert kind == "driver"
                finish(command(corpus, folder, "--workers", "2"))
            if was_hit:
                hit += 1
                wrong += abs(Survey(folder).heads().documents - DOCUMENTS["kills"])
                differ += differences(folder, undisturbed)
            shutil.rmtree(folder)
        report.row(
            kind, str(hit), str(wrong), str(differ), "0",
            killed=kind, kills=hit, documents_wrong=wrong, files_differ=differ,
        )  # fmt: skip


def processes(report, options, scratch):
    """One process and two, by wall time; start-up included."""
    count = 8 if options.quick else DOCUMENTS["speed"]
    corpus = cut_texts(scratch / "speed", count, 4000)
    wall, cpu = {"1": [], "2": []}, {"1": [], "2": []}
    for n in range(1 if options.quick else RUNS):
        for workers, seconds in wall.items():
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            folder = scratch / f"workers{workers}-{n}"
            finish(command(corpus, folder, "--workers", workers))
            seconds.append(time.monotonic() - began)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu[workers].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    best = {workers: min(seconds) for workers, seconds in wall.items()}
    ratio = best["1"] / best["2"]
    report.table(
        f"{count} documents, wall time, best of {len(wall['1'])}", "1 process", "2 processes",
        "as fast", "CPU time of 1", "of 2",
    )  # fmt: skip
    report.row(
        f"{best['1']:.1f} s", f"{best['2']:.1f} s", f"{ratio:.2f}x",
        *(f"{min(seconds):.1f} s" for seconds in cpu.values()),
        wall=wall, cpu=cpu, ratio=ratio,
    )  # fmt: skip


def memory(report, options, scratch):
    """Peak memory of one process, of few documents and of ten times as many."""
    peaks = {}
    for name in ("few", "many"):
        count = DOCUMENTS[name] // (10 if options.quick else 1)
        corpus = cut_texts(scratch / f"memory{count}", count, 1500)
        code = (
            "import resource, sys; from regard.survey import Survey;"
            "Survey(sys.argv[1], corpus=sys.argv[2], max_tokens=256,"
            " shard_tokens=10**9).run(workers=1);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        line = [sys.executable, "-c", code, str(scratch / f"peak{count}"), str(corpus)]
        printed = subprocess.run(line, check=True, capture_output=True, text=True).stdout
        peaks[count] = int(printed) * 1024
    (few, least), (many, most) = peaks.items()
    report.table("Peak memory of one shard", f"{few} documents", f"{many} documents", "ratio")
    report.row(
        f"{least / 1e6:.0f} MB", f"{most / 1e6:.0f} MB", f"{most / least:.3f}",
        peaks=peaks, ratio=most / least,
    )  # fmt: skip


TABLES = speed, samples, memory, processes, kills


def main():
    """Five tables, or some of them in the place of those that are in the file."""

    def add(parser):
        parser.add_argument("--kills", type=int, default=10, help="moments, of each kind")
        names = [table.__name__ for table in TABLES]
        parser.add_argument("--only", nargs="+", choices=names, default=names)

    options = common.read_options(__doc__, add=add)
    report = common.Report("survey", options)
    chosen = [table for table in TABLES if table.__name__ in options.only]
    if options.quick or not options.kills:
        chosen = [table for table in chosen if table is not kills]
    with tempfile.TemporaryDirectory() as scratch:
        for table in chosen:
            table(report, options, Path(scratch))
    if len(options.only) < len(TABLES) and options.json and options.json.exists():
        tables = json.loads(options.json.read_text())["tables"]
        for table, own in zip(chosen, report.result["tables"]):
            tables[TABLES.index(table)] = own
        report.result["tables"] = tables
    report.save()


if __name__ == "__main__":
    main()
