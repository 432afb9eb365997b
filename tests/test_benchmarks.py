"""The benchmarks run; what they measure is not tested."""

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")
pytestmark = pytest.mark.xdist_group("benchmarks")  # one smoke run serves several of the tests


@pytest.fixture
def run(monkeypatch):
    """Runs a script in this process, which has already loaded torch."""
    monkeypatch.syspath_prepend(FOLDER)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")

    yield run
    for name in ("common", *SCRIPTS):
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
    shapes, cases, _ = result["tables"]
    assert [row["causal"] for row in shapes["rows"]] == [False, True]
    assert cases["rows"][0]["case"] == "full"
    assert [row["visible"] < 1 for row in cases["rows"]] == [False] + 5 * [True]
    for table in result["tables"]:
        for row in table["rows"]:
            assert len(row["cells"]) == len(table["columns"])
            for name in ("regard", "torch"):
                assert 0 < row["seconds"][name] < math.inf
                assert 0 <= row["error"][name] < 10, "what was measured is not attention"


def headline(results, folder):
    """The same results, said to be of a size that the README shows."""
    result = json.loads((results / "forward.json").read_text())
    result["tables"][0]["rows"][0]["shape"] = [1, 8, 2048, 64]
    (folder / "forward.json").write_text(json.dumps(result))
    return folder


def test_the_report_replaces_what_stands_between_the_markers(results, run, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("Before\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\nAfter\n")
    source = headline(results, tmp_path)
    run("report", "--from", source, "--readme", readme, "--docs", tmp_path)
    text = readme.read_text()
    assert text.startswith("Before\n<!-- benchmarks -->\n| ")
    assert text.endswith("\n<!-- /benchmarks -->\nAfter\n")
    assert "| forward, T = 2048 | " in text
    assert "old" not in text
    assert "### Forward, float32" in (tmp_path / "benchmarks.md").read_text()
    assert (tmp_path / "benchmarks.svg").read_text().startswith("<?xml")


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
