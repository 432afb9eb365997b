"""One sequence over several processes: attention, gradients and weights as of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import distributed_cases
import regard.distributed

TESTS = Path(__file__).parent
SIZES = (1, 2, 4)
pytestmark = pytest.mark.xdist_group("distributed")  # one process forks the groups of all tests


@pytest.fixture(scope="module")
def found():
    """By size of the group and case the errors of its ranks."""
    told = subprocess.run(
        [sys.executable, TESTS / "ranks.py"], cwd=TESTS, capture_output=True, text=True,
        timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    return json.loads(told.stdout)


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in SIZES for name in distributed_cases.of_size(size)]
)
def test_ranks_give_what_one_process_gives(found, size, name):
    for rank, error in enumerate(found[str(size)][name]):
        assert not error, f"rank {rank}: {error}"


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_dies_is_named_by_every_other(found, size):
    errors = found[str(size)]["dies"]
    assert [error == "died" for error in errors] == [
        rank == distributed_cases.DYING[size] for rank in range(size)
    ]
    assert not any(error for error in errors if error != "died"), errors


@pytest.mark.parametrize("dying", distributed_cases.CHAIN)
def test_a_rank_that_dies_is_named_where_a_rank_keeps_the_store(found, dying):
    errors = found["no torchrun"][f"{dying} dies in a chain"]
    assert errors.pop(dying) == "died"
    assert not any(errors), errors


def test_a_rank_that_is_late_is_named_within_the_timeout(found):
    assert found["2"]["late"] == ["", ""]


def test_a_layout_needs_a_group():
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised; call"):
        regard.distributed.Layout(8)


def test_the_example_of_the_docs_gives_what_one_process_gives(found):
    assert found["2"]["example"] == ["", ""]


@pytest.mark.slow  # three processes that import torch
def test_the_example_runs_under_torchrun(tmp_path):
    (tmp_path / "example.py").write_text(distributed_cases.example(), encoding="utf-8")
    told = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "example.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "the same as one process" in told.stdout
