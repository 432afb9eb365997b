"""What docs/survey.md says of engines: each recipe is run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regard.survey import Survey
from tiny_model import TEXT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("survey")]  # processes of their own
PAGE = Path(__file__).parent.parent / "docs" / "survey.md"
# Of its own, which is begun again where it could not start: for one of its processes Ray waits
# 15 s, and beside other tests that may take longer.
RAY = {"RAY_ADDRESS": "local", "RAY_raylet_start_wait_time_s": "45"}
# Where this is there, jsonschema makes a parser of addresses with it at each import, which takes 3
# CPU seconds in each of the twenty processes that Ray starts. It does without.
UNUSED = "rfc3987_syntax.py"
NOT_STARTED = "The current node timed out during startup"
RECIPE = re.compile(r"^\*\*(.+?)\*\*[^\n]*\n\n```(?:python|sh)\n(.*?)```", re.DOTALL | re.MULTILINE)
RECIPES = dict(RECIPE.findall(PAGE.read_text(encoding="utf-8")))
BEGUN = """
from regard.survey import Survey
survey = Survey("/shared/heads", corpus="/shared/texts")
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder with texts, and an undisturbed survey of them."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "texts").mkdir()
    for n in range(5):
        (folder / "texts" / f"{n}.txt").write_text(TEXT[7 * n :][: 200 + 50 * n])
    Survey(folder / "plain", corpus=folder / "texts").run(workers=1)
    return folder


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "heads").glob("*.parquet")}


def run(line, shared, tmp_path):
    (tmp_path / UNUSED).write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    for _ in range(4):
        done = subprocess.run(
            line, cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **RAY},
        )  # fmt: skip
        if NOT_STARTED not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert files(tmp_path / "heads") == files(shared / "plain")
    assert len(files(tmp_path / "heads")) > 3


def placed(recipe, shared, tmp_path):
    """The recipe, with the folders of this test."""
    folders = {"heads": tmp_path / "heads", "texts": shared / "texts"}
    place = re.compile(r"(?:/shared/)?\b(heads|texts)\b/?(?=[\" ])")
    return place.sub(lambda found: str(folders[found[1]]), recipe)


@pytest.mark.parametrize(
    ("title", "package", "before"),
    [
        ("Any `concurrent.futures.Executor`", "joblib", BEGUN),
        ("Dask", "distributed", ""),
        ("Ray", "ray", ""),
    ],
)
def test_a_file_is_the_same_bits_in_every_engine(title, package, before, shared, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    script = tmp_path / "script.py"
    script.write_text(placed(before + RECIPES[title], shared, tmp_path))
    run([sys.executable, script], shared, tmp_path)


def test_an_array_of_processes_gives_the_same_bits(shared, tmp_path):
    recipe = placed(RECIPES["A Slurm array"], shared, tmp_path)
    command = recipe.replace("regard survey", f"{sys.executable} -m regard survey")
    assert "--array=0-23" in command
    assert "/24" in command
    every = 'pids=; for SLURM_ARRAY_TASK_ID in 0 1 2; do\n{} & pids="$pids $!"; done\n{}'
    waited = "for pid in $pids; do wait $pid || exit 1; done"
    few = every.format(command.rstrip().replace("/24", "/3"), waited)
    run(["bash", "-c", few], shared, tmp_path)
