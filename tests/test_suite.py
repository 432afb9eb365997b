"""How the tests themselves are run."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CRASHES = """
import os
import pytest

@pytest.mark.parametrize("n", range(17))
def test_of_some(n):
    if n in (0, 16):  # the first of a share, and one that is a share of its own
        os._exit(1)
"""


def test_a_test_that_ends_its_process_fails_once_and_all_others_run(tmp_path):
    for name in ("conftest.py", "compiled.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    (tmp_path / "test_some.py").write_text(CRASHES)
    words = ["-n", "2", "--dist", "loadgroup", "-c", HERE.parent / "pyproject.toml"]
    surroundings = {name: x for name, x in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert "2 failed, 15 passed" in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert "crashed while running 'test_some.py::test_of_some[16]'" in done.stdout
