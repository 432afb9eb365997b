"""The benchmarks run; what they measure is not tested."""

import itertools
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
MODULES = ("common", "processors")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in MODULES)
pytestmark = pytest.mark.xdist_group("benchmarks")  # one smoke run serves several of the tests


@pytest.fixture
def run(monkeypatch):
    """Runs a script in this process, which has already loaded torch."""
    monkeypatch.syspath_prepend(FOLDER)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")

    yield run
    for name in (*MODULES, *SCRIPTS):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with what a smoke run of forward.py writes."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(FOLDER / "forward.py"), "--quick", "--json"]
    subprocess.run(
        [*command, str(folder / "forward.json")],
        env={**os.environ, "CXX": "none"},  # no shares of peak: compiling takes a second
        stdout=subprocess.DEVNULL,
        timeout=120,
        check=True,
    )
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_tells_its_options(script, run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(script, "--help")
    assert stopped.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_a_smoke_run_writes_the_machine_and_every_row_with_its_error(results):
    result = json.loads((results / "forward.json").read_text())
    assert result["benchmark"] == "forward"
    assert result["machine"]["cpu"]
    assert result["machine"]["threads"] == 1
    shapes, kept, cases, _ = result["tables"]
    for table, statistics in ((shapes, False), (kept, True)):
        found = [(row["causal"], row["statistics"]) for row in table["rows"]]
        assert found == [(False, statistics), (True, statistics)]
    assert cases["rows"][0]["case"] == "full"
    assert [row["visible"] < 1 for row in cases["rows"]] == [False] + 5 * [True]
    for table in result["tables"]:
        for row in table["rows"]:
            assert len(row["cells"]) == len(table["columns"])
            for name in ("regard", "torch"):
                assert 0 < row["seconds"][name] < math.inf
                assert 0 <= row["error"][name] < 10, "what was measured is not attention"


ROUNDS = {"float32 fma", "float64 fma"}
COMPILES = shutil.which(os.environ.get("CXX") or "c++")
needs_compiler = pytest.mark.skipif(not COMPILES, reason="no C++ compiler")


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    """What a smoke run of roofline.py measures, by name."""
    path = tmp_path_factory.mktemp("rates") / "roofline.json"
    command = [sys.executable, str(FOLDER / "roofline.py"), "--quick", "--json", str(path)]
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=120, check=True)
    (table,) = json.loads(path.read_text())["tables"]
    return {row["kind"]: row for row in table["rows"]}


@needs_compiler
def test_every_product_is_measured_in_registers_and_with_its_loads(rates):
    products = {name for name in rates if name.split()[0] != "read" and not name.endswith("exp")}
    alone = {name for name in products if not name.endswith(" with loads")}
    assert products == alone | {f"{name} with loads" for name in alone}
    assert {" ".join(name.split()[:2]) for name in alone} >= ROUNDS
    for row in rates.values():
        assert row["one"] > 0


@needs_compiler
def test_memory_is_read_in_several_streams_and_exponentials_are_measured(rates):
    assert {f"read {n}" for n in (1, 2, 4, 8)} <= rates.keys()
    assert "float32 exp" in rates


@needs_compiler
def test_tiles_are_measured_only_where_the_processor_gives_them(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import roofline

    try:
        program = roofline._compile(tmp_path, "-mamx-tile", "-mamx-bf16")
    except RuntimeError as refused:
        pytest.skip(f"this compiler makes no products of tiles: {refused}")
    found = {name for name in roofline._run(program, 1, "0.01") if "tiles" in name}
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    both = {"bfloat16 tiles", "bfloat16 tiles with loads"}
    assert found == (both if " amx_bf16" in flags else set())


def test_a_share_is_of_the_product_that_the_kernels_use(run, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import roofline

    assert roofline.kinds("bfloat16", "amx")[0] == "bfloat16 tiles"
    assert roofline.kinds("bfloat16", "avx512_bf16")[0] == "bfloat16 dot 512"
    assert roofline.kinds("bfloat16", "avx512")[0] == "float32 fma 512"
    assert roofline.kinds("float16", "amx")[0] == "float32 fma 512"
    assert roofline.kinds("float64", "avx2") == ["float64 fma 256", "float64 fma 128"]


@needs_compiler
def test_shares_are_of_what_can_be_reached_and_of_the_peak(run, tmp_path):
    path = tmp_path / "backward.json"
    run("backward", "--quick", "--dtype", "float32", "--json", path)
    (table,) = json.loads(path.read_text())["tables"]
    assert {"of reachable", "of peak"} <= set(table["columns"])
    for row in table["rows"]:
        assert row["share"] > 0
        assert row["share_of_peak"] > 0


def test_every_instruction_set_is_measured_beside_the_one_in_use(tmp_path):
    path = tmp_path / "targets.json"
    # In a process of its own: this one has chosen its instruction set.
    words = "--quick", "--dtype", "bfloat16", "--json", path
    subprocess.run([sys.executable, FOLDER / "targets.py", *words], timeout=120, check=True)
    result = json.loads(path.read_text())
    rows = result["tables"][0]["rows"]
    assert len(rows) == 5
    for row in rows:
        assert row["ratios"][result["machine"]["target"]] == 1
        assert row["fastest"] in row["seconds"]


@needs_compiler
def test_decoding_is_a_share_of_reading_in_the_same_rounds(run, tmp_path):
    path = tmp_path / "decode.json"
    run("decode", "--quick", "--dtype", "float32", "--json", path)
    (row,) = json.loads(path.read_text())["tables"][0]["rows"]
    assert row["streams"] in (1, 2, 4, 8)
    assert row["limit"] > 1e8
    assert row["share"] > 0


def headline(results, folder):
    """The same results, said to be of a size that the README shows."""
    result = json.loads((results / "forward.json").read_text())
    result["tables"][0]["rows"][0]["shape"] = [1, 8, 2048, 64]
    (folder / "forward.json").write_text(json.dumps(result))
    return folder


def test_every_contestant_runs_once_a_round_after_another_than_before(run):
    import common

    ran = []
    runs = {name: lambda name=name: ran.append(name) or time.sleep(common.TURN) for name in "abcd"}
    times = common.interleave(runs, types.SimpleNamespace(threads=2, quick=False), seconds=0.5)
    rounds = [ran[8:][n : n + 4] for n in range(0, len(ran) - 8, 4)]  # after two calls to warm up
    assert len(rounds) == len(times.seconds["a"]) >= 5
    assert all(sorted(one) == [*"abcd"] for one in rounds)
    after = {(x, y) for one in rounds for x, y in itertools.pairwise(one)}
    assert all(len({x for x, y in after if y == name}) > 1 for name in "abcd")


def test_the_report_replaces_what_stands_between_the_markers(results, run, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("Before\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\nAfter\n")
    source = headline(results, tmp_path)
    run("report", "--from", source, "--readme", readme, "--docs", tmp_path)
    text = readme.read_text()
    assert text.startswith("Before\n<!-- benchmarks -->\n**")
    assert text.endswith("\n<!-- /benchmarks -->\nAfter\n")
    assert "| forward, T = 2048 | " in text
    assert "old" not in text
    assert "### Forward, float32" in (tmp_path / "benchmarks.md").read_text()
    assert (tmp_path / "benchmarks.svg").read_text().startswith("<?xml")


INTEL = {"cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "architecture": "Sapphire Rapids"}
AMD = {"cpu": "AMD EPYC 9654 96-Core Processor", "architecture": "Zen 4"}
OTHER = {"cpu": "Neoverse-V2", "architecture": ""}


def test_a_processor_has_its_name_and_its_folder(run, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import processors

    assert processors.architecture("AuthenticAMD", 26, 2) == "Zen 5"
    assert processors.architecture("GenuineIntel", 6, 143) == "Sapphire Rapids"
    assert processors.architecture("GenuineIntel", 19, 1) == "family 19 model 1"
    assert processors.architecture("", 0, 0) == ""
    names = [processors.name(machine) for machine in (INTEL, AMD, OTHER)]
    assert names == ["Intel Xeon Platinum 8481C (Sapphire Rapids)", "AMD EPYC 9654 (Zen 4)",
                     "Neoverse-V2"]  # fmt: skip
    assert processors.folder(INTEL).name == "intel-xeon-platinum-8481c-sapphire-rapids"


def test_results_are_written_into_the_folder_of_their_processor(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("CXX", "none")
    monkeypatch.delenv("REGARD_TARGET", raising=False)
    import processors

    monkeypatch.setattr(processors, "RESULTS", tmp_path)
    command = ("decode", "--quick", "--dtype", "float32", "--json")
    run(*command)
    run(*command, "--threads", 2)
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {"decode.json", "decode-threads.json"}
    assert folder == processors.folder(json.loads((folder / "decode.json").read_text())["machine"])


def test_stored_results_lie_in_the_folder_of_their_processor(run, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import processors

    paths = [*(FOLDER / "results").glob("*/*.json")]
    assert paths
    for path in paths:
        machine = json.loads(path.read_text(encoding="utf-8"))["machine"]
        assert path.parent == processors.folder(machine)


def on(machine, folder, results):
    """The headline's results, of another processor, in a folder of its own."""
    folder.mkdir()
    path = headline(results, folder) / "forward.json"
    result = json.loads(path.read_text())
    result["machine"] |= machine
    path.write_text(json.dumps(result))


def test_the_report_shows_every_processor_and_the_readme_one_of_amd_and_one_of_intel(
    results, run, tmp_path
):
    for name, machine in {"a": INTEL, "b": AMD, "c": OTHER}.items():
        on(machine, tmp_path / name, results)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmarks -->\n<!-- /benchmarks -->\n")
    run("report", "--from", tmp_path, "--readme", readme, "--docs", tmp_path)
    names = ["AMD EPYC 9654 (Zen 4)", "Intel Xeon Platinum 8481C (Sapphire Rapids)", "Neoverse-V2"]
    text = readme.read_text()
    assert [text.count(f"**{name}**") for name in names] == [1, 1, 0]
    page = (tmp_path / "benchmarks.md").read_text()
    assert f"Measured on {', '.join(names)}." in page
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    assert len(headings) == len(set(headings)) == 3 * 4
    assert f"### Forward, float32, {names[1]}" in headings
    on(AMD, tmp_path / "d", results)
    with pytest.raises(SystemExit, match="another result of forward is of the same processor"):
        run("report", "--from", tmp_path, "--readme", readme, "--docs", tmp_path)


def test_the_report_says_when_the_readme_has_no_markers(results, run, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("No table here.\n")
    with pytest.raises(SystemExit, match="no lines '<!-- benchmarks -->'"):
        run("report", "--from", headline(results, tmp_path), "--readme", readme, "--docs", tmp_path)
    assert readme.read_text() == "No table here.\n"


def test_the_report_writes_nothing_of_a_smoke_run(results, run, tmp_path):
    with pytest.raises(SystemExit, match="No result is of a size that the README shows"):
        run("report", "--from", results, "--docs", tmp_path)
    assert not list(tmp_path.iterdir())
